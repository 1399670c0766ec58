//! Credentials that a provider returned, and when they are to be replaced.

use std::{sync::Arc, time::Duration};

use tokio::sync::oneshot;

use crate::{
    clock::Instant,
    credentials::{CredentialProvider, Credentials, Login},
    error::{StoreError, StoreErrorKind},
    failure::NotConnected,
    settings::ConnectionSettings,
};

/// The shortest time after which credentials are replaced: a lifetime of zero must not keep the
/// provider busy.
const SHORTEST: Duration = Duration::from_millis(50);

/// Calls the provider on a thread of its own: code of the program must not block the thread that
/// keeps the connections.
async fn fetch(
    provider: &Arc<dyn CredentialProvider>,
    settings: &ConnectionSettings,
) -> Result<Credentials, NotConnected> {
    let (mut tell, told) = oneshot::channel();
    let (provider, address) = (Arc::clone(provider), settings.server.address.clone());
    let own = settings.own.clone();
    settings.own.spawn_blocking(move || {
        own.block_on(async {
            let fetched = tokio::select! {
                biased;
                // the caller's time is over, or its runtime has ended, and with it the timers
                () = tell.closed() => return,
                fetched = provider.fetch(&address) => fetched,
            };
            _ = tell.send(fetched);
        });
    });
    told.await.unwrap_or_else(|_| {
        let why = "the credential provider panicked";
        Err(NotConnected {
            error: StoreError::new(StoreErrorKind::Unavailable, false, why),
            nobody_listens: false,
        })
    })
}

/// The credentials of a connection, if they expire.
pub(crate) struct Expiring {
    pub(crate) provider: Arc<dyn CredentialProvider>,
    pub(crate) settings: ConnectionSettings,
    pub(crate) fetched: Instant,
    pub(crate) refresh_after: Duration,
}

/// Fetches credentials from a provider. Returns the login, and what replaces it in time.
pub(crate) async fn provided(
    provider: &Arc<dyn CredentialProvider>,
    settings: &ConnectionSettings,
) -> Result<(Login, Option<Expiring>), NotConnected> {
    let fetched = Instant::now();
    let Credentials {
        login,
        refresh_after,
    } = fetch(provider, settings).await?;
    let expiring = refresh_after.map(|refresh_after| Expiring {
        provider: Arc::clone(provider),
        settings: settings.clone(),
        fetched,
        refresh_after: refresh_after.max(SHORTEST),
    });
    Ok((login, expiring))
}
