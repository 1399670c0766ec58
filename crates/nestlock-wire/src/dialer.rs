//! Connects to a known server, or to one that must be found first.

use std::{fmt, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::time::timeout;

#[cfg(feature = "fred")]
use crate::by_fred;
use crate::{
    address::Server, connection::Connection, epoch::Epochs, error::StoreErrorKind,
    expiring::Expiring, failure::NotConnected, own, settings::ConnectionSettings,
};

/// The Redis client that carries requests and messages.
///
/// For an example, see [`Dialer`].
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
///
/// ```
/// # use std::time::Duration;
/// # use nestlock_wire::{Connection, Dialer, Locate, NotConnected, Server};
/// /// Connects to the first server, or else to the second.
/// struct Either(Server, Server);
///
/// #[async_trait::async_trait]
/// impl Locate for Either {
///     async fn connect(
///         &self,
///         dial: &Dialer,
///         limit: Duration,
///     ) -> Result<Connection, NotConnected> {
///         match dial.clone().at(&self.0).open(limit).await {
///             Ok(connection) => Ok(connection),
///             Err(_) => dial.clone().at(&self.1).open(limit).await,
///         }
///     }
/// }
/// ```
#[async_trait]
pub trait Locate: Send + Sync {
    /// Connects to the server that is responsible now. Each exchange with a server may take
    /// `limit`; the caller limits the whole, by [`Dialer::in_time`].
    ///
    /// # Cancel safety
    ///
    /// An implementation must be cancel safe: the connect that calls it may run out of time.
    async fn connect(&self, dial: &Dialer, limit: Duration) -> Result<Connection, NotConnected>;
}

/// How to connect.
///
/// ```
/// # use nestlock_wire::{Address, ConnectionSettings, Server, ServerSettings};
/// # use tokio::runtime::Handle;
/// use std::time::Duration;
///
/// use nestlock_wire::{Dialer, Wire};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let address = Address::Tcp(Server::new("127.0.0.1", server.addr().port()));
/// # let settings = ConnectionSettings::new(ServerSettings::new(address), Handle::current());
/// let mut dialer = Dialer::new(settings);
/// dialer.wire = Wire::Own; // the default
/// let limit = Duration::from_secs(5);
/// let connection = dialer.connect(limit).await.map_err(|failed| failed.error)?;
/// assert!(!connection.has_ended());
/// # Ok(())
/// # }
/// ```
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
    /// covers each exchange with a server, and all of it is limited by [`Dialer::in_time`].
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
        // the supervisor must survive a panic of the program's code, such as a certificate verifier
        let in_time = AssertUnwindSafe(self.in_time(limit, attempt));
        in_time.catch_unwind().await.unwrap_or_else(|_| {
            let why = "the connect panicked; the cause may be a certificate verifier";
            Err(NotConnected::new(StoreErrorKind::Unavailable, why))
        })
    }

    /// Limits the time of an attempt in which each exchange with a server may take `limit`. The
    /// whole may take as long; and a quarter of the connect timeout more, if a credential provider
    /// is called in between, but not more than the connect timeout. A short limit tells a server
    /// that hangs from one that works, and the provider is no server.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as the attempt.
    pub async fn in_time<T>(
        &self,
        limit: Duration,
        attempt: impl Future<Output = Result<T, NotConnected>>,
    ) -> Result<T, NotConnected> {
        let most = self.settings.connect_timeout;
        let whole = match self.settings.server.credentials {
            Some(_) => limit.max(most.min(limit.saturating_add(self.settings.hangs()))),
            None => limit,
        };
        // not dropped before the error is made: it may wait for the provider
        tokio::pin!(attempt);
        timeout(whole, &mut attempt).await.unwrap_or_else(|_| {
            let provider = self.settings.server.credentials.as_ref();
            let also = provider.map_or_else(String::new, |provider| provider.why_late(most));
            Err(late(format!("no connection within {whole:?}{also}")))
        })
    }

    /// Connects to the server in `settings`, within `limit` for each exchange with it. The calls of
    /// a credential provider do not count: the caller limits the whole, by [`Dialer::in_time`]. If
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
        let log_in = |login| async move {
            let mut settings = self.settings.clone();
            (settings.server.login, settings.server.credentials) = (login, None);
            self.open_by(&settings, limit).await
        };
        let (address, hangs) = (&self.settings.server.address, self.settings.hangs());
        let (connection, fetched) = source.log_in(address, hangs, log_in).await?;
        Ok(connection.logged_in_with(Expiring::new(source, &self.settings, &fetched)))
    }

    /// Waits until no connection waits for the credential provider, a quarter of the connect timeout
    /// at most. Returns whether one did.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_for_provider(&self) -> bool {
        match &self.settings.server.credentials {
            Some(source) => source.wait(self.settings.hangs()).await,
            None => false,
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
    NotConnected::new(StoreErrorKind::Timeout, why)
}
