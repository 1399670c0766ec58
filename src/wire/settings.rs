//! How to open a connection.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
#[cfg(feature = "fred")]
use fred::types::config::Config as FredConfig;
use tokio::runtime::Handle;

use crate::wire::{
    address::{Address, Server},
    failure::NotConnected,
    push::Sink,
};

/// A user and a password.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
}

impl fmt::Debug for Login {
    /// Omits user and password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(..)")
    }
}

/// Returns the login of each connect, for credentials that expire.
#[async_trait]
pub(crate) trait Credentials: Send + Sync {
    /// Returns the login for a server. The caller sets the time limit.
    async fn fetch(&self, address: &Address) -> Result<Login, NotConnected>;
}

/// How to speak TLS.
#[cfg(feature = "rustls")]
#[derive(Clone)]
pub(crate) struct TlsSettings {
    pub(crate) connector: tokio_rustls::TlsConnector,
    /// The name that each server's certificate must have. `None`: the host.
    pub(crate) server_name: Option<Arc<str>>,
}

/// Where a server is, and how to log in.
#[derive(Clone)]
pub(crate) struct ServerSettings {
    pub(crate) address: Address,
    pub(crate) login: Login,
    /// Replaces `login`.
    pub(crate) credentials: Option<Arc<dyn Credentials>>,
    pub(crate) database: Option<u8>,
    #[cfg(feature = "rustls")]
    pub(crate) tls: Option<TlsSettings>,
    /// The configuration that these were made of. The second wire takes from it what has no place
    /// here: another library's TLS, tracing.
    #[cfg(feature = "fred")]
    pub(crate) fred: Option<Arc<FredConfig>>,
}

impl ServerSettings {
    /// Returns the settings of a server that needs no login.
    pub(crate) fn new(address: Address) -> Self {
        Self {
            address,
            login: Login::default(),
            credentials: None,
            database: None,
            #[cfg(feature = "rustls")]
            tls: None,
            #[cfg(feature = "fred")]
            fred: None,
        }
    }

    /// Returns whether connections are by TLS.
    #[cfg_attr(
        not(any(feature = "fred", feature = "rustls")),
        expect(clippy::unused_self, reason = "there is no TLS")
    )]
    pub(crate) fn is_by_tls(&self) -> bool {
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

    /// Returns whether only fred's client can speak the TLS that fred's configuration asks for.
    #[cfg(feature = "fred")]
    pub(crate) fn is_by_freds_tls(&self) -> bool {
        #[cfg(feature = "rustls")]
        if self.tls.is_some() {
            return false;
        }
        self.fred.as_ref().is_some_and(|fred| fred.uses_tls())
    }
}

/// How to open one connection to one server.
#[derive(Clone)]
pub(crate) struct ConnectionSettings {
    pub(crate) server: ServerSettings,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
    /// The connection's name in CLIENT LIST.
    pub(crate) name: Arc<str>,
    /// The client's own runtime.
    pub(crate) own: Handle,
    /// The runtime that reads replies, while it runs.
    pub(crate) driver: Option<Handle>,
    pub(crate) sink: Option<Sink>,
}

impl ConnectionSettings {
    /// Returns the same settings for this server.
    pub(crate) fn at(mut self, server: &Server) -> Self {
        self.server.address = Address::Tcp(server.clone());
        self
    }
}
