//! How the links of a client connect.

use std::{fmt, sync::Arc, time::Duration};

use nestlock_wire::{ConnectionSettings, Dialer, Epochs, Sink};
use tokio::runtime::Handle;

use crate::{
    error::{Error, StoreError, StoreErrorKind},
    meter::Meter,
    options::Config,
    store::endpoint::Endpoint,
};

/// Lower bound for the limit of the first reconnect attempt, which is a third of the lease: an
/// attempt that hangs must not cost the lease.
const AGAIN: Duration = Duration::from_secs(1);

/// What an attempt to connect says that has run out of time.
const LATE: &str = "no connection within";

/// How the links of one client connect.
pub(crate) struct ConnectOptions {
    pub(crate) endpoint: Endpoint,
    pub(crate) config: Config,
    /// The connections' name, for `CLIENT LIST`.
    pub(crate) name: Arc<str>,
    /// The client's own runtime.
    pub(crate) own: Handle,
    /// The runtime that reads replies and messages, while it runs.
    pub(crate) driver: Option<Handle>,
    /// Receives messages.
    pub(crate) sink: Sink,
    pub(crate) epochs: Arc<Epochs>,
}

impl ConnectOptions {
    /// Returns the connect error for this cause, with the address. Adds a hint if the cause is a
    /// timeout or a connection that the server closed in plain text.
    pub(crate) fn unreachable(&self, source: StoreError) -> Error {
        let said = source.said();
        let source = source.before_any_request();
        let was_closed = || {
            ["closed by the server", "reset by peer"]
                .iter()
                .any(|part| said.contains(part))
        };
        let source = match source.kind() {
            kind @ StoreErrorKind::Timeout if self.endpoint.server.is_by_tls() => {
                let by_tls = said.replace(LATE, "no connection by TLS within");
                StoreError::new(kind, false, by_tls)
            }
            kind @ StoreErrorKind::Unavailable
                if !self.endpoint.server.is_by_tls() && was_closed() =>
            {
                StoreError::new(kind, false, format!("{said}, connected in plain text"))
            }
            _ => source,
        };
        Error::Connect {
            address: self.endpoint.address(),
            source,
        }
    }

    /// Returns the error for a connect timeout.
    pub(crate) fn timed_out(&self) -> StoreError {
        let limit = self.config.connect_timeout;
        let provider = self.endpoint.server.credentials.as_ref();
        let also = provider.map_or_else(String::new, |provider| provider.why_late(limit));
        let late = format!("{LATE} {limit:?}{also}");
        StoreError::new(StoreErrorKind::Timeout, false, late)
    }

    fn dialer(&self, driver: Option<Handle>, sink: Option<Sink>) -> Dialer {
        let config = &self.config;
        Dialer {
            settings: ConnectionSettings {
                server: self.endpoint.server.clone(),
                connect_timeout: config.connect_timeout,
                command_timeout: config.command_timeout(),
                name: Arc::clone(&self.name),
                own: self.own.clone(),
                driver,
                sink,
            },
            wire: self.endpoint.wire(config),
            first_limit: config
                .connect_timeout
                .min((config.watchdog_timeout / 3).max(AGAIN)),
            epochs: Arc::clone(&self.epochs),
            reconnected: Meter::reconnect,
            sharded: false,
            bundles: config.tuning.bundle,
            locate: None,
        }
    }

    pub(crate) fn for_scripts(&self) -> Dialer {
        self.dialer(self.driver.clone(), None)
    }

    pub(crate) fn for_messages(&self) -> Dialer {
        self.dialer(self.driver.clone(), Some(Arc::clone(&self.sink)))
    }

    pub(crate) fn for_lists(&self) -> Dialer {
        self.dialer(None, None)
    }
}

impl fmt::Debug for ConnectOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectOptions")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}
