//! Connects, to a server that is known or to one that has to be found first.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::time::timeout;

#[cfg(feature = "fred")]
use crate::wire::by_fred;
use crate::wire::{
    address::Server,
    connection::Connection,
    epoch::Epochs,
    error::{StoreError, StoreErrorKind},
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
    /// The client of the `fred` crate. Slower; for TLS other than rustls, or to find out which
    /// client has a bug.
    #[cfg(feature = "fred")]
    Fred,
}

impl Wire {
    pub(crate) fn is_fred(self) -> bool {
        self != Self::Own
    }
}

/// Finds the server to connect to, anew at each connect.
#[async_trait]
pub(crate) trait Locate: Send + Sync {
    /// Connects to the server that is the right one now. The caller sets the time limit.
    async fn connect(&self, dial: &Dialer) -> Result<Connection, NotConnected>;
}

/// How to connect.
#[derive(Clone)]
pub(crate) struct Dialer {
    pub(crate) settings: ConnectionSettings,
    pub(crate) wire: Wire,
    /// Like the settings' `connect_timeout`, for the first reconnect attempt.
    pub(crate) first_limit: Duration,
    pub(crate) epochs: Arc<Epochs>,
    /// Called after each reconnect, with the link's name in metrics.
    pub(crate) reconnected: fn(&'static str),
    /// Whether scripts publish with SPUBLISH.
    pub(crate) sharded: bool,
    /// Whether scripts may be bundled.
    pub(crate) bundles: bool,
    /// Finds the server. `None`: it is always the same one.
    pub(crate) locate: Option<Arc<dyn Locate>>,
}

impl Dialer {
    /// Returns the same dialer for this server, whichever server is the master.
    pub(crate) fn at(mut self, server: &Server) -> Self {
        self.settings = self.settings.at(server);
        self.locate = None;
        self
    }

    /// Connects once, on the client's own runtime. The limit covers all steps: finding the master,
    /// fetching the credentials, the name's addresses, TLS and the handshake.
    pub(crate) async fn connect(&self, limit: Duration) -> Result<Connection, NotConnected> {
        let attempt = async {
            match &self.locate {
                Some(locate) => locate.connect(self).await,
                None => self.open().await,
            }
        };
        let late = |_| {
            let late = format!("no connection within {limit:?}");
            let error = StoreError::new(StoreErrorKind::Timeout, false, late);
            Err(NotConnected {
                error,
                nobody_listens: false,
            })
        };
        timeout(limit, attempt).await.unwrap_or_else(late)
    }

    /// Connects to the server in `server`. The caller sets the time limit.
    pub(crate) async fn open(&self) -> Result<Connection, NotConnected> {
        match self.wire {
            Wire::Own => own::greet::connect(&self.settings)
                .await
                .map(Connection::Own),
            #[cfg(feature = "fred")]
            Wire::Fred => by_fred::connect(&self.settings)
                .await
                .map(|connection| Connection::Foreign(connection)),
        }
    }
}
