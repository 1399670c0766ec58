//! What the tasks of a worker process work with: the process that they share, and the clients.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use nestlock::LockClient;

use crate::{
    handover::Mailbox, history::History, kinds::Kind, settings::Settings, topology::SERVERS,
};

/// What all tasks of a process share.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) settings: Settings,
    pub(crate) history: Arc<History>,
    pub(crate) mailbox: Mailbox,
    /// No new work begins after this time.
    pub(crate) until: u64,
    /// Slot and generation: `s0g1`.
    pub(crate) name: String,
    ops: AtomicU64,
}

impl Process {
    pub(crate) fn new(
        settings: Settings,
        history: Arc<History>,
        mailbox: Mailbox,
        until: u64,
        name: String,
    ) -> Self {
        Self {
            settings,
            history,
            mailbox,
            until,
            name,
            ops: AtomicU64::new(0),
        }
    }

    /// Returns the number of the next operation.
    pub(crate) fn op(&self) -> u64 {
        self.ops.fetch_add(1, Relaxed)
    }
}

/// A client: a connection to each server. All locks are on the first one, except those that span
/// several.
#[derive(Debug, Clone)]
pub(crate) struct Connected {
    pub(crate) name: String,
    pub(crate) servers: Vec<LockClient>,
    pub(crate) watchdog: Duration,
}

impl Connected {
    /// Returns the round trip by which waits for locks of this kind end.
    pub(crate) fn round_trip(&self, kind: Kind) -> Duration {
        let servers = if kind == Kind::Red { SERVERS } else { 1 };
        self.servers[..servers]
            .iter()
            .map(|client| client.stats().round_trip)
            .max()
            .unwrap_or_default()
    }
}
