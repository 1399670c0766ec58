//! How to open a connection.

use std::{sync::Arc, time::Duration};

#[cfg(feature = "rustls")]
use fred::bytes_utils::Str;
use fred::types::config::{Config as FredConfig, Server, ServerConfig};
use tokio::runtime::Handle;

use crate::wire::push::Sink;

/// How to open one connection to one server.
#[derive(Clone)]
pub(crate) struct ConnectionSettings {
    pub(crate) server: FredConfig,
    /// The name that each server's certificate must have.
    #[cfg(feature = "rustls")]
    pub(crate) server_name: Option<Str>,
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
        let server = server.clone();
        #[cfg(feature = "rustls")]
        let server = Server {
            tls_server_name: self.server_name.clone().or(server.tls_server_name),
            ..server
        };
        self.server.server = ServerConfig::Centralized { server };
        self
    }
}

/// Returns whether the handshake with this server contains a password.
pub(crate) fn has_password(server: &FredConfig) -> bool {
    #[cfg(feature = "fred-config")]
    if server.credential_provider.is_some() {
        return true;
    }
    server.password.is_some()
}
