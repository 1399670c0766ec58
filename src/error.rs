//! The crate's errors: typed data rather than text, with a variant of its own only if the caller
//! acts differently.

use std::{fmt, time::Duration};

use crate::{owner::OwnerId, token::FencingToken};

#[doc(inline)]
pub use nestlock_wire::{StoreError, StoreErrorKind};

/// The result of most operations of this crate.
///
/// ```
/// use nestlock::{LockClient, Result};
///
/// async fn ship(client: &LockClient, order: u64) -> Result<()> {
///     let guard = client.mutex(format!("order:{order}"))?.lock().await?;
///     // one process at a time ships this order
///     guard.unlock().await
/// }
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. A busy lock is not an error: that is `Ok(None)`.
///
/// ```
/// use nestlock::Error;
///
/// /// Returns the HTTP status of a request that failed.
/// fn status(error: &Error) -> u16 {
///     match error {
///         Error::InvalidName { .. } => 400,
///         Error::Closed => 503, // this process is shutting down
///         _ if error.is_conflict() => 409,
///         _ if error.is_transient() => 503,
///         _ => 500,
///     }
/// }
/// assert_eq!(status(&Error::Closed), 503);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name of a lock, or of a guarded key, is not allowed. Nothing was sent.
    #[error("invalid name {name:?}: {reason}")]
    #[non_exhaustive]
    InvalidName {
        /// The name as given, with the client's prefix.
        name: String,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The owner is not allowed in this call. Nothing was sent.
    #[error("invalid owner {owner:?}: {reason}")]
    #[non_exhaustive]
    InvalidOwner {
        /// The owner as given.
        owner: String,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// The lease is zero, too short or too long. Nothing was sent.
    #[error("invalid lease of {lease:?} for lock {lock:?}: {reason}")]
    #[non_exhaustive]
    InvalidLease {
        /// The lock's name.
        lock: String,
        /// The lease as given.
        lease: Duration,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// The number of permits, or the count of a latch, is not possible. Nothing was changed.
    #[error("invalid count for {lock:?}: {reason}")]
    #[non_exhaustive]
    InvalidCount {
        /// The name of the permits, semaphore or latch.
        lock: String,
        /// What is wrong with the number, and what to do.
        reason: String,
    },
    /// The note of an acquire is empty, too long, or not one line of text. Nothing was sent.
    #[error("invalid note for lock {lock:?}: {reason}")]
    #[non_exhaustive]
    InvalidNote {
        /// The lock's name.
        lock: String,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// The client's configuration is invalid. Nothing was sent.
    #[error("invalid configuration: {reason}")]
    #[non_exhaustive]
    InvalidConfig {
        /// What is wrong, and what to do.
        reason: String,
    },
    /// This owner does not hold the lock: it was released already, or never held. Nothing was
    /// changed.
    #[error("lock {lock:?} is not held by {owner}")]
    #[non_exhaustive]
    NotHeld {
        /// The lock's name.
        lock: String,
        /// The expected holder.
        owner: OwnerId,
    },
    /// This owner held the lock and lost it. Others may have touched what it guards since then.
    #[error("lock {lock:?} was lost by {owner}: {reason}")]
    #[non_exhaustive]
    Lost {
        /// The lock's name.
        lock: String,
        /// The owner that held it.
        owner: OwnerId,
        /// How it was lost.
        reason: LossReason,
    },
    /// The record at this name belongs to another kind of lock, or is a hash of yours. It was left
    /// as it is.
    #[error(
        "lock {lock:?}: the hash at this name is not a record of this lock kind; use another name"
    )]
    #[non_exhaustive]
    WrongLockKind {
        /// The lock's name.
        lock: String,
    },
    /// The key at this name, or one that belongs to it, has another type: it is not a lock or a
    /// guarded value. It was left as it is.
    #[error(
        "{lock:?}: the key at this name, or one that belongs to it, has another type; use another name"
    )]
    #[non_exhaustive]
    WrongType {
        /// The name of the lock, or the guarded key.
        lock: String,
    },
    /// The guarded key has seen a higher fencing token: another owner has held the lock since.
    /// Nothing was changed.
    #[error(
        "key {key:?}: fencing token {token} is stale, {seen} was seen; acquire the lock again and start over"
    )]
    #[non_exhaustive]
    StaleToken {
        /// The guarded key.
        key: String,
        /// The token of the request.
        token: FencingToken,
        /// The highest token seen.
        seen: FencingToken,
    },
    /// The number cannot be a fencing token: no lock issues such a number.
    #[error("invalid fencing token {token}; use the token of a fenced lock's guard, 1 to 2^53 - 1")]
    #[non_exhaustive]
    InvalidToken {
        /// The number.
        token: u64,
    },
    /// The owner has re-entered the lock up to [`max_holds`](crate::LockClientBuilder::max_holds).
    #[error("lock {lock:?} is already held {holds} times by {owner}; release some holds first")]
    #[non_exhaustive]
    TooManyHolds {
        /// The lock's name.
        lock: String,
        /// The owner that holds it.
        owner: OwnerId,
        /// The hold count.
        holds: u32,
    },
    /// The owner already holds this non-reentrant lock, or holds the name as a fair lock and requests
    /// another kind, or vice versa; a wait would never end. Its holds are unchanged.
    #[error(
        "lock {lock:?} is already held by {owner}, and is not reentrant or was taken as another kind; release it first"
    )]
    #[non_exhaustive]
    NotReentrant {
        /// The lock's name.
        lock: String,
        /// The owner that holds it.
        owner: OwnerId,
    },
    /// The owner already holds this fenced lock, through a constructor whose holds have no fencing
    /// token. Nothing was sent.
    #[error(
        "lock {lock:?} is already held by {owner} without a fencing token; take the fenced lock first"
    )]
    #[non_exhaustive]
    NoToken {
        /// The lock's name.
        lock: String,
        /// The owner that holds it.
        owner: OwnerId,
    },
    /// The record of this lock has no TTL to extend: it is held until it is released. Nothing was
    /// changed.
    #[error("lock {lock:?} is held by {owner} without a TTL; there is nothing to extend")]
    #[non_exhaustive]
    NotExpirable {
        /// The lock's name.
        lock: String,
        /// The owner that holds it.
        owner: OwnerId,
    },
    /// The owner holds the read lock and requested the write lock: it would wait for itself.
    /// Nothing was sent.
    #[error(
        "lock {lock:?} is read-locked by {owner}, so the write lock would wait for itself; release the read lock first"
    )]
    #[non_exhaustive]
    UpgradeRefused {
        /// The lock's name.
        lock: String,
        /// The owner that holds the read lock.
        owner: OwnerId,
    },
    /// The guard's hold cannot be handed over. Nothing was sent, and the hold is unchanged.
    #[error("lock {lock:?} cannot be handed over: {reason}")]
    #[non_exhaustive]
    CannotHandOver {
        /// The lock's name.
        lock: String,
        /// Why not, and what to do.
        reason: &'static str,
    },
    /// The hand-over cannot be adopted here. Nothing was sent.
    #[error("this hand-over cannot be adopted: {reason}")]
    #[non_exhaustive]
    InvalidHandOver {
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The request was sent but no reply arrived in time: it may or may not have been executed. The
    /// client settles the outcome in the background: it undoes an acquire and completes a release;
    /// the lease ends the hold at the latest. [`fenced_set`](crate::LockClient::fenced_set), and
    /// changes of the numbers of permits, semaphores and latches, are not settled.
    #[error(
        "lock {lock:?}: no reply from the server, the outcome is unknown and is being settled in the background: {source}"
    )]
    #[non_exhaustive]
    Unconfirmed {
        /// The lock's name.
        lock: String,
        /// What the connection reported.
        source: StoreError,
    },
    /// The server rejected the request or could not be reached. The request was not executed.
    #[error("lock {lock:?}: {source}")]
    #[non_exhaustive]
    Store {
        /// The lock's name.
        lock: String,
        /// What the server or the connection reported.
        source: StoreError,
    },
    /// Too few replicas acknowledged the acquire in time, so it was released; or too few
    /// acknowledged the extension in time, so the hold keeps its old lease. See
    /// [`LockClientBuilder::replicas`](crate::LockClientBuilder::replicas).
    #[error(
        "lock {lock:?}: {acked} of {wanted} replicas acknowledged in time{}; check whether a replica is down or slow",
        if *.on_disk == Some(false) { ", and the server did not have it on disk" } else { "" }
    )]
    #[non_exhaustive]
    NotReplicated {
        /// The lock's name.
        lock: String,
        /// How many replicas acknowledged it.
        acked: u32,
        /// How many were required.
        wanted: u32,
        /// Whether the server had it on disk; `None` if that was not required.
        on_disk: Option<bool>,
    },
    /// Too few of a RedLock's servers agreed. A failed acquire is released on the others. A hold
    /// that could not be extended or released on enough servers stays as it was on each of them.
    #[error("lock {lock:?}: no quorum: too few of {} servers agreed, {needed} needed: {}", .nodes.len(), list(.nodes))]
    #[non_exhaustive]
    NoQuorum {
        /// The lock's name.
        lock: String,
        /// How many servers must agree.
        needed: usize,
        /// The reply of each server, in the given order.
        nodes: Vec<NodeAnswer>,
    },
    /// No connection could be made.
    #[error("cannot connect to {address}: {source}")]
    #[non_exhaustive]
    Connect {
        /// As [`LockClient::address`](crate::LockClient::address). Never the password.
        address: String,
        /// What the connection reported.
        source: StoreError,
    },
    /// [`LockClient::shutdown`](crate::LockClient::shutdown) was called.
    #[error("the lock client was shut down")]
    Closed,
    /// The shutdown could not confirm every release; the remaining locks end with their leases.
    #[error(
        "the lock client was shut down, but not all releases were confirmed ({releases} are left): {source}"
    )]
    #[non_exhaustive]
    Unsettled {
        /// How many releases were not confirmed, cancelled acquires included: several may be of one
        /// lock.
        releases: usize,
        /// Why the last of them failed.
        source: StoreError,
    },
}

/// Configurations whose conversion cannot fail.
#[cfg(any(feature = "fred", feature = "redis-rs"))]
impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

impl Error {
    /// Returns whether the caller already holds this lock in a conflicting way, which waiting does
    /// not change (a bug): [`NotReentrant`](Self::NotReentrant),
    /// [`UpgradeRefused`](Self::UpgradeRefused), [`TooManyHolds`](Self::TooManyHolds),
    /// [`NoToken`](Self::NoToken). False if another owner holds the lock: that is `Ok(None)`. HTTP:
    /// 409, as for `Ok(None)`.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(
            self,
            Self::NotReentrant { .. }
                | Self::UpgradeRefused { .. }
                | Self::TooManyHolds { .. }
                | Self::NoToken { .. }
        )
    }

    /// Returns whether the same call may succeed a little later: the server said "not now", was
    /// unreachable, or did not reply. The client settles what [`Unconfirmed`](Self::Unconfirmed)
    /// calls have left behind. HTTP: 503.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unconfirmed { .. } | Self::NotReplicated { .. } => true,
            Self::Store { source, .. } | Self::Connect { source, .. } => source.is_transient(),
            Self::NoQuorum { nodes, .. } => nodes.iter().any(|node| match &node.said {
                NodeSaid::Busy | NodeSaid::Nothing => true,
                NodeSaid::Agreed => false,
                NodeSaid::Failed(error) => error.is_transient(),
            }),
            _ => false,
        }
    }

    /// Returns whether others may have touched what the lock guards: the lock was lost, or another
    /// owner has held it since. Start over. HTTP: 409 or 500, depending on the work done under it.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::StaleToken { .. })
    }

    /// Returns the name of the lock, or of the guarded key, that the error is about.
    #[must_use]
    pub fn lock_name(&self) -> Option<&str> {
        match self {
            Self::InvalidName { name, .. } => Some(name),
            Self::InvalidLease { lock, .. }
            | Self::InvalidCount { lock, .. }
            | Self::InvalidNote { lock, .. }
            | Self::NotHeld { lock, .. }
            | Self::Lost { lock, .. }
            | Self::WrongLockKind { lock }
            | Self::WrongType { lock }
            | Self::TooManyHolds { lock, .. }
            | Self::NotReentrant { lock, .. }
            | Self::NoToken { lock, .. }
            | Self::NotExpirable { lock, .. }
            | Self::UpgradeRefused { lock, .. }
            | Self::CannotHandOver { lock, .. }
            | Self::Unconfirmed { lock, .. }
            | Self::Store { lock, .. }
            | Self::NotReplicated { lock, .. }
            | Self::NoQuorum { lock, .. } => Some(lock),
            Self::StaleToken { key, .. } => Some(key),
            Self::InvalidOwner { .. }
            | Self::InvalidConfig { .. }
            | Self::InvalidToken { .. }
            | Self::InvalidHandOver { .. }
            | Self::Connect { .. }
            | Self::Closed
            | Self::Unsettled { .. } => None,
        }
    }
}

/// One server of a RedLock, and its reply.
///
/// ```
/// use nestlock::{Error, NodeSaid};
///
/// /// Returns the servers that did not reply in time.
/// fn silent(error: &Error) -> Vec<&str> {
///     let Error::NoQuorum { nodes, .. } = error else { return Vec::new() };
///     let is_silent = |said: &NodeSaid| matches!(said, NodeSaid::Nothing);
///     nodes.iter().filter(|at| is_silent(&at.said)).map(|at| &*at.node).collect()
/// }
/// # assert!(silent(&Error::Closed).is_empty());
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct NodeAnswer {
    /// The server's address, or the member's name.
    pub node: String,
    /// Its reply.
    pub said: NodeSaid,
}

/// The reply of a server of a RedLock.
///
/// For an example, see [`NodeAnswer`].
#[derive(Debug)]
#[non_exhaustive]
pub enum NodeSaid {
    /// It executed the request.
    Agreed,
    /// Another owner holds the lock there.
    Busy,
    /// It did not reply within the time limit of the round.
    Nothing,
    /// It failed.
    Failed(Box<Error>),
}

impl NodeSaid {
    pub(crate) fn failure(&self) -> Option<&Error> {
        match self {
            Self::Failed(error) => Some(error),
            _ => None,
        }
    }
}

impl fmt::Display for NodeAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.node)?;
        match &self.said {
            NodeSaid::Agreed => f.write_str("agreed"),
            NodeSaid::Busy => f.write_str("busy"),
            NodeSaid::Nothing => f.write_str("no reply in time"),
            NodeSaid::Failed(error) => write!(f, "{error}"),
        }
    }
}

fn list(nodes: &[NodeAnswer]) -> String {
    nodes
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("; ")
}

/// How a lock was lost.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use std::time::Duration;
///
/// use nestlock::{AcquireOptions, Error, LossReason};
///
/// let lease = AcquireOptions::new().lease(Duration::from_millis(20));
/// let guard = client.mutex("stock")?.lock_with(lease).await?;
/// let loss = guard.lost().await;
/// assert!(matches!(loss, Error::Lost { reason: LossReason::LeaseExpired, .. }));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease ended on this client's monotonic clock before a renewal was confirmed.
    LeaseExpired,
    /// The server no longer has a record of the lock: it expired, was flushed, deleted, or freed by
    /// force.
    RecordMissing,
    /// The server's record names another owner.
    TakenOver,
    /// This client shut down.
    ShutDown,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeaseExpired => "the lease ended before it was renewed",
            Self::RecordMissing => "the record is gone from the server",
            Self::TakenOver => "another owner has it",
            Self::ShutDown => "the lock client was shut down",
        })
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_guide_has_the_advice_of_each_error() {
        let page = include_str!("guide/errors.md");
        for advice in nestlock_wire::all_advice() {
            assert!(page.contains(&advice), "{advice}");
        }
    }
}
