//! Credentials that a provider returned, and when they are to be replaced.

use std::{
    mem,
    panic::{self, AssertUnwindSafe},
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::{runtime::Builder, sync::oneshot};

use crate::{
    address::Address,
    clock::Instant,
    credentials::{CredentialSource, Credentials, Fetched, Login},
    error::{StoreError, StoreErrorKind},
    failure::NotConnected,
    settings::ConnectionSettings,
};

/// How long the credentials of one call serve other connections as well: a client makes several, and
/// a provider that takes a second must not take it for each.
const SHARED: Duration = Duration::from_secs(5);

/// The shortest time after which credentials are replaced: a lifetime of zero must not keep the
/// provider busy.
const SHORTEST: Duration = Duration::from_millis(50);

/// Calls the provider on a thread of its own, with a runtime of its own: code of the program must
/// not block the thread that keeps the connections, and may outlive it.
async fn fetch(source: &CredentialSource, address: &Address) -> Result<Credentials, NotConnected> {
    let failed = |why: String| NotConnected {
        error: StoreError::new(StoreErrorKind::Unavailable, false, why),
        nobody_listens: false,
    };
    // Calls that block forever must not take ever more threads. The semaphore is never closed.
    let permit = Arc::clone(&source.calls).acquire_owned().await;
    let (mut tell, told) = oneshot::channel();
    let (provider, address) = (Arc::clone(&source.provider), address.clone());
    let call = move || {
        let _permit = permit;
        let runtime = match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                _ = tell.send(Err(failed(format!("cannot start a runtime: {error}"))));
                return;
            }
        };
        let fetched = panic::catch_unwind(AssertUnwindSafe(|| {
            runtime.block_on(async {
                tokio::select! {
                    biased;
                    // the caller's time is over
                    () = tell.closed() => None,
                    fetched = provider.fetch(&address) => Some(fetched),
                }
            })
        }));
        // A task that the program left behind must not delay the permit. Dropped while it unwinds,
        // the runtime would wait for it.
        runtime.shutdown_background();
        match fetched {
            Ok(Some(fetched)) => _ = tell.send(fetched),
            Ok(None) => {}
            Err(panic) => {
                _ = tell.send(Err(failed("the credential provider panicked".into())));
                // its drop may panic, too, and would then end the process
                if let Err(again) = panic::catch_unwind(AssertUnwindSafe(|| drop(panic))) {
                    mem::forget(again);
                }
            }
        }
    };
    thread::Builder::new()
        .name("credentials".into())
        .spawn(call)
        .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
    told.await
        .unwrap_or_else(|_| Err(failed("the call for credentials has ended".into())))
}

/// The credentials of a connection, if they expire.
pub(crate) struct Expiring {
    pub(crate) source: CredentialSource,
    pub(crate) settings: ConnectionSettings,
    pub(crate) fetched: Instant,
    pub(crate) refresh_after: Duration,
}

/// The credentials for a connection.
pub(crate) struct Provided {
    pub(crate) login: Login,
    /// When the provider was called.
    pub(crate) at: Instant,
    /// What replaces them, if they expire.
    pub(crate) expiring: Option<Expiring>,
}

/// Fetches credentials from a provider, or takes those of a call that was made just before for
/// another connection. If a server has `refused` those of a call, takes those of a later one.
pub(crate) async fn provided(
    source: &CredentialSource,
    settings: &ConnectionSettings,
    refused: Option<Instant>,
) -> Result<Provided, NotConnected> {
    let address = &settings.server.address;
    let last = source.last(address);
    // one call at a time: the others take its result
    let mut last = last.lock().await;
    let Fetched { credentials, at } = match &*last {
        Some(fetched) if fetched.serves(refused) => fetched.clone(),
        _ => {
            let at = Instant::now();
            let credentials = fetch(source, address).await?;
            last.insert(Fetched { credentials, at }).clone()
        }
    };
    let expiring = credentials.refresh_after.map(|refresh_after| Expiring {
        source: source.clone(),
        settings: settings.clone(),
        fetched: at,
        refresh_after: refresh_after.max(SHORTEST),
    });
    Ok(Provided {
        login: credentials.login,
        at,
        expiring,
    })
}

impl Fetched {
    fn serves(&self, refused: Option<Instant>) -> bool {
        let after = self.credentials.refresh_after;
        let time = after.map_or(SHARED, |after| after.max(SHORTEST).min(SHARED));
        self.at.elapsed() < time && refused.is_none_or(|refused| self.at > refused)
    }
}
