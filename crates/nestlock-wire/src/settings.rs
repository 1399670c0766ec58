//! How to open a connection.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

#[cfg(feature = "fred")]
use fred::types::config::Config as FredConfig;
use tokio::runtime::Handle;

use crate::{
    address::{Address, Server},
    credential_source::CredentialSource,
    credentials::Login,
    push::Sink,
};

/// The host names that servers announce in addition to their IP addresses.
///
/// The nodes of a cluster do so. Clones share the names: a name that is learned later is used by
/// all connects from then on.
///
/// ```
/// use nestlock_wire::{AnnouncedNames, Server};
///
/// let (names, node) = (AnnouncedNames::default(), Server::new("10.0.0.1", 6379));
/// names.replace([(node.clone(), "node-1.example".into())].into());
/// assert_eq!(names.of(&node).as_deref(), Some("node-1.example"));
/// ```
#[derive(Debug, Clone, Default)]
pub struct AnnouncedNames(Arc<Mutex<HashMap<Server, Arc<str>>>>);

impl AnnouncedNames {
    /// Replaces all names.
    pub fn replace(&self, names: HashMap<Server, Arc<str>>) {
        let names = names.into_iter().map(|(at, name)| (unbracketed(&at), name));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = names.collect();
    }

    /// Returns the name that this server announces.
    #[must_use]
    pub fn of(&self, server: &Server) -> Option<Arc<str>> {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.get(&unbracketed(server)).cloned()
    }
}

/// Returns a server whose IPv6 address has no brackets: both spellings mean the same server.
fn unbracketed(server: &Server) -> Server {
    Server::new(server.bare_host(), server.port)
}

/// How to speak TLS.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use nestlock_wire::TlsSettings;
/// use tokio_rustls::{
///     TlsConnector,
///     rustls::{ClientConfig, RootCertStore},
/// };
///
/// let trusted = RootCertStore::empty(); // add the CAs here
/// let config = ClientConfig::builder().with_root_certificates(trusted).with_no_client_auth();
/// let connector = TlsConnector::from(Arc::new(config));
/// let tls = TlsSettings { connector, server_name: Some("redis.internal".into()) };
/// ```
#[cfg(feature = "rustls")]
#[derive(Clone)]
pub struct TlsSettings {
    /// The trusted CAs, and the client's certificate.
    pub connector: tokio_rustls::TlsConnector,
    /// The name that each server's certificate must have. `None`: the one that the server
    /// announces, or the host.
    pub server_name: Option<Arc<str>>,
}

#[cfg(feature = "rustls")]
impl fmt::Debug for TlsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsSettings")
            .field("server_name", &self.server_name)
            .finish_non_exhaustive()
    }
}

/// Where a server is, and how to log in.
///
/// ```
/// use nestlock_wire::{Address, Login, Server, ServerSettings};
///
/// let mut settings = ServerSettings::new(Address::Tcp(Server::new("127.0.0.1", 6379)));
/// settings.login = Login { user: Some("app".into()), password: Some("a secret".into()) };
/// settings.database = Some(1);
/// assert!(!settings.is_by_tls());
/// ```
#[derive(Clone)]
pub struct ServerSettings {
    /// Where the server listens.
    pub address: Address,
    /// The user and password.
    pub login: Login,
    /// Provides the login when a connection is made, in place of `login`.
    pub credentials: Option<CredentialSource>,
    /// The number of the database. `None`: 0.
    pub database: Option<u8>,
    /// How to speak TLS. `None`: plain text.
    #[cfg(feature = "rustls")]
    pub tls: Option<TlsSettings>,
    /// The names that the servers' certificates must have, if these settings give none.
    pub announced: AnnouncedNames,
    /// The fred configuration from which these settings were made. The second wire (fred's client)
    /// takes from it what has no place here: another library's TLS, tracing.
    #[cfg(feature = "fred")]
    pub fred: Option<Arc<FredConfig>>,
}

impl fmt::Debug for ServerSettings {
    /// Omits user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerSettings")
            .field("address", &self.address)
            .field("database", &self.database)
            .finish_non_exhaustive()
    }
}

impl ServerSettings {
    /// Creates the settings of a server that needs no login.
    #[must_use]
    pub fn new(address: Address) -> Self {
        Self {
            address,
            login: Login::default(),
            credentials: None,
            database: None,
            #[cfg(feature = "rustls")]
            tls: None,
            announced: AnnouncedNames::default(),
            #[cfg(feature = "fred")]
            fred: None,
        }
    }

    /// Returns whether connections use TLS.
    #[must_use]
    pub fn is_by_tls(&self) -> bool {
        #[cfg(feature = "rustls")]
        if self.tls.is_some() {
            return true;
        }
        #[cfg(feature = "fred")]
        if self.is_by_freds_tls() {
            return true;
        }
        false
    }

    /// Returns the name that the certificate of this server must have, if it is not the host.
    #[cfg(feature = "rustls")]
    pub(crate) fn tls_name(&self, at: &Server) -> Option<Arc<str>> {
        let name = self.tls.as_ref().and_then(|tls| tls.server_name.clone());
        #[cfg(feature = "fred")]
        let name = name.or_else(|| self.name_of_freds(at));
        let name = name.or_else(|| self.announced.of(at));
        #[cfg(feature = "fred")]
        let name = name.or_else(|| self.name_mapped_by_freds(at));
        name
    }

    /// Returns whether only fred's client can speak the TLS that fred's configuration requires.
    #[cfg(feature = "fred")]
    #[must_use]
    pub fn is_by_freds_tls(&self) -> bool {
        #[cfg(feature = "rustls")]
        if self.tls.is_some() {
            return false;
        }
        self.fred.as_ref().is_some_and(|fred| fred.uses_tls())
    }
}

/// How to open one connection to one server.
///
/// ```
/// # use nestlock_wire::{Address, ConnectionSettings, Server, ServerSettings};
/// # #[tokio::main]
/// # async fn main() {
/// use std::time::Duration;
///
/// use tokio::runtime::Handle;
///
/// let server = ServerSettings::new(Address::Tcp(Server::new("127.0.0.1", 6379)));
/// let mut settings = ConnectionSettings::new(server, Handle::current());
/// settings.name = "orders".into();
/// settings.command_timeout = Duration::from_secs(1);
/// # }
/// ```
#[derive(Clone)]
pub struct ConnectionSettings {
    /// The server.
    pub server: ServerSettings,
    /// How long a connect may take, TLS and login included.
    pub connect_timeout: Duration,
    /// How long a request may take.
    pub command_timeout: Duration,
    /// The connection's name in CLIENT LIST.
    pub name: Arc<str>,
    /// The client's own runtime.
    pub own: Handle,
    /// The runtime that reads replies, while it runs. It needs I/O and time enabled.
    pub driver: Option<Handle>,
    /// Receives pushes. It must not block.
    pub sink: Option<Sink>,
}

impl fmt::Debug for ConnectionSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionSettings")
            .field("server", &self.server)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl ConnectionSettings {
    /// Creates the settings of connections without messages: 5 s to connect, 3 s for a request.
    /// `own` is the runtime that makes the connections and keeps them.
    #[must_use]
    pub fn new(server: ServerSettings, own: Handle) -> Self {
        Self {
            server,
            connect_timeout: Duration::from_secs(5),
            command_timeout: Duration::from_secs(3),
            name: "nestlock-wire".into(),
            own,
            driver: None,
            sink: None,
        }
    }

    /// Returns how long a call of the credential provider may take before another one is made.
    pub(crate) fn hangs(&self) -> Duration {
        self.connect_timeout / 4
    }

    /// Returns the same settings for this server.
    pub(crate) fn at(mut self, server: &Server) -> Self {
        self.server.address = Address::Tcp(server.clone());
        self
    }
}
