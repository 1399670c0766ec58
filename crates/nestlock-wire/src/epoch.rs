//! Numbers the connections of a client.

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use tokio::sync::watch;

use crate::{
    error::{StoreError, StoreErrorKind},
    log,
    process::Home,
    wake::catch_waker_panic,
};

const FORKED: &str =
    "this process is a fork of the one that created the client; create a new client here";

/// The number of one of a client's connections. Replies of one epoch arrive in the order of their
/// requests. No two links of a client share an epoch.
///
/// ```
/// use nestlock_wire::Epoch;
///
/// let (first, second) = (Epoch::FIRST, Epoch::FIRST.next());
/// assert_eq!(first.and(first), first);
/// assert_eq!(first.and(second), Epoch::NONE);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

impl Epoch {
    /// The epoch of no connection. Requests in doubt that were sent over several connections have
    /// this epoch: no reply proves that they are over, only the time by which none of them can
    /// still arrive.
    pub const NONE: Self = Self(0);
    /// The epoch of a client's first connection.
    pub const FIRST: Self = Self(1);

    /// Returns the epoch of requests that went over both connections: [`Epoch::NONE`] if they
    /// differ, since a reply over one proves nothing about the other.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::NONE }
    }

    /// Returns the epoch of the connection after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Numbers the connections of one client.
///
/// ```
/// use nestlock_wire::{Epoch, Epochs};
///
/// let epochs = Epochs::default();
/// assert!(epochs.are_ours()); // this process is not a fork
/// assert_eq!(*epochs.of_scripts().borrow(), Epoch::NONE); // there is no connection yet
/// ```
#[derive(Debug)]
pub struct Epochs {
    last: AtomicU64,
    /// The latest connection that carries scripts.
    pub(crate) of_scripts: watch::Sender<Epoch>,
    /// The only process that may use the connections.
    home: Home,
}

impl Default for Epochs {
    fn default() -> Self {
        Self {
            last: AtomicU64::new(0),
            of_scripts: watch::Sender::new(Epoch::NONE),
            home: Home::here(),
        }
    }
}

impl Epochs {
    pub(crate) fn next(&self) -> Epoch {
        // `next`, because 0 is `Epoch::NONE`
        Epoch(self.last.fetch_add(1, Ordering::Relaxed)).next()
    }

    /// Returns whether this process is the client's, and not a fork of it.
    pub fn are_ours(&self) -> bool {
        self.home.is_here()
    }

    /// Fails with [`StoreErrorKind::Forked`] in a fork.
    pub fn check_ours(&self) -> Result<(), StoreError> {
        if self.are_ours() {
            Ok(())
        } else {
            Err(StoreError::new(StoreErrorKind::Forked, false, FORKED))
        }
    }

    /// Triggers a check of every hold: another server may have its record now, or none.
    pub fn recheck_all(&self) {
        catch_waker_panic(|| self.of_scripts.send_modify(|_| {}));
    }

    /// Returns a receiver of the latest epoch that carries scripts. [`Epochs::recheck_all`] marks
    /// it as changed, too.
    pub fn of_scripts(&self) -> watch::Receiver<Epoch> {
        self.of_scripts.subscribe()
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl log::Number for Epoch {
    fn told(&self) -> u64 {
        self.0
    }
}
