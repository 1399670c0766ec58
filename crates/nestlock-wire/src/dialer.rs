//! Connects to a known server, or to one that must be found first.

use std::{fmt, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::time::timeout;

#[cfg(feature = "fred")]
use crate::by_fred;
use crate::{
    address::Server,
    clock::Instant,
    connection::Connection,
    credentials::CredentialSource,
    epoch::Epochs,
    error::{StoreError, StoreErrorKind},
    expiring::{Provided, provided},
    failure::NotConnected,
    own,
    settings::ConnectionSettings,
};

/// The Redis client that carries requests and messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wire {
    /// nestlock's own: sends many requests with few system calls.
    #[default]
    Own,
    /// The client of the `fred` crate. Slower. Use it for TLS other than rustls, or to find out
    /// which client has a bug.
    #[cfg(feature = "fred")]
    Fred,
}

impl Wire {
    /// Returns whether this is a client other than nestlock's own.
    #[must_use]
    pub fn is_fred(self) -> bool {
        self != Self::Own
    }
}

/// Finds the server to connect to, at each connect.
#[async_trait]
pub trait Locate: Send + Sync {
    /// Connects to the server that is responsible now. Each exchange with a server may take
    /// `limit`; the caller limits the whole, by [`Dialer::whole`].
    ///
    /// # Cancel safety
    ///
    /// An implementation must be cancel safe: the connect that calls it may run out of time.
    async fn connect(&self, dial: &Dialer, limit: Duration) -> Result<Connection, NotConnected>;
}

/// How to connect.
#[derive(Clone)]
pub struct Dialer {
    /// How to open a connection.
    pub settings: ConnectionSettings,
    /// The client that makes connections.
    pub wire: Wire,
    /// The time limit of the first reconnect attempt. It doubles after each timeout, up to the
    /// settings' `connect_timeout`.
    pub first_limit: Duration,
    /// Numbers the connections: one for all links of a client.
    pub epochs: Arc<Epochs>,
    /// Called after each reconnect, with the link's name in metrics.
    pub reconnected: fn(&'static str),
    /// Whether scripts publish with SPUBLISH.
    pub sharded: bool,
    /// Whether scripts may be bundled.
    pub bundles: bool,
    /// Finds the server. `None`: it is always the same one.
    pub locate: Option<Arc<dyn Locate>>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer")
            .field("settings", &self.settings)
            .field("wire", &self.wire)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// Creates a dialer that always connects to the server in `settings`.
    #[must_use]
    pub fn new(settings: ConnectionSettings) -> Self {
        Self {
            wire: Wire::default(),
            first_limit: settings.connect_timeout,
            epochs: Arc::default(),
            reconnected: |_| {},
            sharded: false,
            bundles: true,
            locate: None,
            settings,
        }
    }

    /// Returns the same dialer for this server, whichever server is the master.
    #[must_use]
    pub fn at(mut self, server: &Server) -> Self {
        self.settings = self.settings.at(server);
        self.locate = None;
        self
    }

    /// Connects once, on the client's own runtime. The limit covers all steps: finding the master,
    /// the name's addresses, TLS and the handshake. If the credentials are from a provider, it
    /// covers each exchange with a server, and [`Dialer::whole`] covers all of it.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the connection is closed.
    pub async fn connect(&self, limit: Duration) -> Result<Connection, NotConnected> {
        let attempt = async {
            match &self.locate {
                Some(locate) => locate.connect(self, limit).await,
                None => self.open(limit).await,
            }
        };
        let whole = self.whole(limit);
        // if the program's credential provider panics, even while it is dropped, the supervisor
        // must survive
        let in_time = async { timeout(whole, attempt).await };
        match AssertUnwindSafe(in_time).catch_unwind().await {
            Ok(Ok(connected)) => connected,
            Ok(Err(_)) => Err(self.late(whole)),
            Err(_) => Err(NotConnected {
                error: StoreError::new(
                    StoreErrorKind::Unavailable,
                    false,
                    "the connect panicked; the cause may be the credential provider",
                ),
                nobody_listens: false,
            }),
        }
    }

    /// Returns how long an attempt may take as a whole, if each exchange with a server may take
    /// `limit`: the same; and a quarter of the connect timeout more, if a provider is called in
    /// between, but not more than the connect timeout. A short limit tells a server that hangs from
    /// one that works, and the provider is no server.
    #[must_use]
    pub fn whole(&self, limit: Duration) -> Duration {
        let most = self.settings.connect_timeout;
        match self.settings.server.credentials {
            Some(_) => limit.max(most.min(limit.saturating_add(most / 4))),
            None => limit,
        }
    }

    /// Returns the error of an attempt that has taken longer than `whole`.
    #[must_use]
    pub fn late(&self, whole: Duration) -> NotConnected {
        let also = match self.settings.server.credentials {
            Some(_) => ", including the time of the credential provider",
            None => "",
        };
        late(format!("no connection within {whole:?}{also}"))
    }

    /// Connects to the server in `settings`, within `limit` for each exchange with it. The calls of
    /// a credential provider do not count: the caller limits the whole, by [`Dialer::whole`]. If
    /// the server refuses the credentials, tries once more: they may have been replaced in the
    /// meantime.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the connection is closed.
    pub async fn open(&self, limit: Duration) -> Result<Connection, NotConnected> {
        let Some(source) = &self.settings.server.credentials else {
            return self.open_by(&self.settings, limit).await;
        };
        match self.open_with(source, None, limit).await {
            Err((fetched, error)) if error.is_login_refused() => {
                let again = self.open_with(source, fetched, limit).await;
                again.map_err(|(_, error)| error)
            }
            outcome => outcome.map_err(|(_, error)| error),
        }
    }

    /// Connects with credentials that were fetched after those that were `refused`. An error comes
    /// with the time of those that were used.
    async fn open_with(
        &self,
        source: &CredentialSource,
        refused: Option<Instant>,
        limit: Duration,
    ) -> Result<Connection, (Option<Instant>, NotConnected)> {
        let provided = provided(source, &self.settings, refused).await;
        let Provided {
            login,
            at,
            expiring,
        } = provided.map_err(|error| (None, error))?;
        let mut settings = self.settings.clone();
        (settings.server.login, settings.server.credentials) = (login, None);
        match self.open_by(&settings, limit).await {
            Ok(connection) => Ok(connection.logged_in_with(expiring)),
            Err(error) => Err((Some(at), error)),
        }
    }

    async fn open_by(
        &self,
        settings: &ConnectionSettings,
        limit: Duration,
    ) -> Result<Connection, NotConnected> {
        let connection = async {
            match self.wire {
                Wire::Own => own::greet::connect(settings).await.map(Connection::from),
                #[cfg(feature = "fred")]
                Wire::Fred => by_fred::connect(settings)
                    .await
                    .map(|connection| Connection::foreign(connection)),
            }
        };
        timeout(limit, connection)
            .await
            .unwrap_or_else(|_| Err(late(format!("no connection within {limit:?}"))))
    }
}

fn late(why: String) -> NotConnected {
    NotConnected {
        error: StoreError::new(StoreErrorKind::Timeout, false, why),
        nobody_listens: false,
    }
}
