//! The current master, and the connections to it.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use nestlock_wire::{Connection, Pace, Server, log};
use tokio::sync::watch;

/// Which server is the master, as far as the client knows.
pub(super) struct Reign {
    current: Mutex<Current>,
    /// Counts the masters so far.
    terms: watch::Sender<u64>,
    /// Whether a link is reconnecting; the sentinels are polled more often then.
    is_away: AtomicBool,
    pace: Arc<Pace>,
}

/// The current master.
#[derive(Default)]
struct Current {
    term: u64,
    at: Option<Server>,
    /// When it became the master, as far as the client knows.
    since: Option<Instant>,
    /// The connections to it.
    connections: Vec<Connection>,
}

impl Reign {
    pub(super) fn new(pace: &Arc<Pace>) -> Self {
        Self {
            current: Mutex::default(),
            terms: watch::Sender::new(0),
            is_away: AtomicBool::new(true),
            pace: Arc::clone(pace),
        }
    }

    /// Notes whether a link is reconnecting.
    pub(super) fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::Release);
    }

    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Acquire)
    }

    /// Returns a receiver of the number of masters so far: it changes when there is another one.
    pub(super) fn terms(&self) -> watch::Receiver<u64> {
        self.terms.subscribe()
    }

    /// Returns the current master, if it is known.
    pub(super) fn at(&self) -> Option<Server> {
        self.current().at.clone()
    }

    /// Returns the current master, and since when it has been one.
    pub(super) fn reigns(&self) -> Option<(Server, Instant)> {
        let current = self.current();
        current.at.clone().zip(current.since)
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a server the master, and returns its term. Ends the connections to any other master:
    /// its replies no longer count.
    pub(super) fn is_now(&self, at: &Server) -> u64 {
        let mut current = self.current();
        if current.at.as_ref() == Some(at) {
            return current.term;
        }
        let old = std::mem::take(&mut current.connections);
        let before = current.at.replace(at.clone());
        current.since = Some(Instant::now());
        current.term += 1;
        let term = current.term;
        self.terms.send_replace(term);
        drop(current);
        for connection in old {
            connection.end();
        }
        self.pace.attempt_now();
        if let Some(before) = before {
            log::later!(WARN, before = before, now = at; "the service has another master; closing the connections to the old one");
        }
        term
    }

    /// Adds a connection to the master of this term. Returns `false` if the master has changed
    /// since.
    pub(super) fn take(&self, term: u64, connection: &Connection) -> bool {
        let mut current = self.current();
        if current.term != term {
            return false;
        }
        current
            .connections
            .retain(|connection| !connection.has_ended());
        current.connections.push(connection.clone());
        true
    }
}
