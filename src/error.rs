//! The crate's errors: typed data rather than text, with a variant of its own only if the caller
//! acts differently.

mod advice;

use std::{error, fmt, time::Duration};

use crate::{owner::OwnerId, token::FencingToken};

/// The result of most operations of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. A busy lock is not an error: that is `Ok(None)`.
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
    /// This owner held the lock and lost it. Others may have touched what it guards since.
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
    /// The key at this name, or one that belongs to it, has another type: it is no lock, or no
    /// guarded value. It was left as it is.
    #[error(
        "{lock:?}: the key at this name, or one that belongs to it, is of another type; use another name"
    )]
    #[non_exhaustive]
    WrongType {
        /// The name of the lock, or the guarded key.
        lock: String,
    },
    /// The guarded key has seen a higher fencing token: another owner has held the lock since.
    /// Nothing was changed.
    #[error(
        "key {key:?}: the token {token} is stale, {seen} was seen; acquire the lock again and begin anew"
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
    #[error("{token} is no fencing token; use that of a fenced lock's guard, 1 to 2^53 - 1")]
    #[non_exhaustive]
    InvalidToken {
        /// The number.
        token: u64,
    },
    /// The owner has re-entered the lock too often.
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
    /// The owner already holds this non-reentrant lock, nests a fair and a reentrant one, or gave
    /// away one of its nested holds and kept another; a wait would never end. It holds nothing more
    /// than before.
    #[error(
        "lock {lock:?} is held by {owner} already, and is not reentrant, was taken as another kind, or was given away in part; release it first"
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
        "lock {lock:?} is held by {owner} already, without a fencing token; take the fenced lock first"
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
        "lock {lock:?} is read-locked by {owner}, which would wait for itself; release the read lock first"
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
    /// client finds out in the background and undoes it; the lease ends it at the latest.
    #[error(
        "lock {lock:?}: no answer from the server, the outcome is unknown and being settled: {source}"
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
        "lock {lock:?}: {acked} of {wanted} replicas had it in time{}; is one away, or slow?",
        if *.on_disk == Some(false) { ", and it was not on the server's disk" } else { "" }
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
    /// that could not be extended or released on enough of them stays as it was on each.
    #[error("lock {lock:?}: too few of {} servers agreed, {needed} are needed: {}", .nodes.len(), list(.nodes))]
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
        "the lock client was shut down, but the release of {locks} locks could not be confirmed"
    )]
    #[non_exhaustive]
    Unsettled {
        /// How many releases were not confirmed.
        locks: usize,
    },
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
#[derive(Debug)]
#[non_exhaustive]
pub struct NodeAnswer {
    /// The server's address, or the member's name.
    pub node: String,
    /// Its reply.
    pub said: NodeSaid,
}

/// The reply of a server of a RedLock.
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
            NodeSaid::Nothing => f.write_str("no answer in time"),
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

/// An error of the server, or of the connection to it.
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    may_have_executed: bool,
    source: Box<dyn error::Error + Send + Sync>,
    command: Option<Box<str>>,
}

impl StoreError {
    pub(crate) fn new(
        kind: StoreErrorKind,
        may_have_executed: bool,
        source: impl Into<Box<dyn error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            kind,
            may_have_executed,
            source: source.into(),
            command: None,
        }
    }

    /// Returns the same error, about this command.
    pub(crate) fn about(mut self, command: Option<&str>) -> Self {
        self.command = command.map(Into::into);
        self
    }

    /// Returns the same error, for a connection that has not sent any request yet.
    pub(crate) fn before_any_request(mut self) -> Self {
        self.may_have_executed = false;
        if self.kind == StoreErrorKind::Disconnected {
            self.kind = StoreErrorKind::Unavailable;
        }
        self
    }

    /// Returns the same error, for a query about a request that may have been executed.
    pub(crate) fn that_may_have_executed(mut self) -> Self {
        self.may_have_executed = true;
        self
    }

    /// Returns the same error, for a request that changes nothing: its outcome cannot be in doubt.
    pub(crate) fn of_a_read(mut self) -> Self {
        self.may_have_executed = false;
        self
    }

    /// Returns the kind of the failure.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Returns the command that the server lacks or that the user may not use. If the server
    /// rejects a command inside a script without naming it, returns all candidates, separated by
    /// commas.
    #[must_use]
    pub fn command(&self) -> Option<&str> {
        self.command.as_deref()
    }

    /// Returns the error text of the server or the connection, unchanged.
    pub(crate) fn said(&self) -> String {
        self.source.to_string()
    }

    /// Returns whether the server may have executed the request despite the error.
    #[must_use]
    pub fn may_have_executed(&self) -> bool {
        self.may_have_executed
    }

    /// Returns whether the same request may succeed a little later: the server said "not now", or
    /// could not be reached.
    ///
    /// Acquires and releases retry after such an error as long as their time allows; a try fails at
    /// once. [`StoreErrorKind`] lists the kinds that are final.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        use StoreErrorKind as K;
        self.may_have_executed
            || matches!(
                self.kind,
                K::Unavailable
                    | K::Timeout
                    | K::Disconnected
                    | K::Overloaded
                    | K::Loading
                    | K::Busy
                    | K::ReadOnly
                    | K::ClusterDown
                    | K::TryAgain
                    | K::Moved
                    | K::MasterDown
                    | K::OutOfMemory
                    | K::Misconfigured
                    | K::NoReplicas
            )
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.source)?;
        match self.advice() {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

impl error::Error for StoreError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&*self.source)
    }
}

impl StoreErrorKind {
    /// Returns whether the server keeps rejecting a command until its configuration changes.
    pub(crate) fn is_denied(self) -> bool {
        matches!(self, Self::NoPermission | Self::UnknownCommand)
    }
}

/// The kinds of [`StoreError`].
///
/// Most are transient: the client retries within the wait of an acquire, or for as long as a
/// release may take ([`StoreError::is_transient`]). Others stay until the configuration, the users
/// or the data change: [`Auth`](Self::Auth), [`NoPermission`](Self::NoPermission),
/// [`CrossSlot`](Self::CrossSlot), [`WrongType`](Self::WrongType), [`Forked`](Self::Forked),
/// [`NoScript`](Self::NoScript), [`UnknownCommand`](Self::UnknownCommand), [`Tls`](Self::Tls). So
/// do [`Protocol`](Self::Protocol) and [`Other`](Self::Other), unless the request may have been
/// executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No connection at the moment.
    Unavailable,
    /// No reply within the command timeout.
    Timeout,
    /// The connection broke before the reply arrived.
    Disconnected,
    /// This client has too many requests in its queue, or another call of this owner about this
    /// lock does not return.
    Overloaded,
    /// The server rejected the user name or password.
    Auth,
    /// The ACL user may not do this (command, key or channel), or this process may not open the
    /// server's socket.
    NoPermission,
    /// The server lacks a command: it is too old, or the command is renamed or disabled. Nothing
    /// was executed.
    UnknownCommand,
    /// TLS failed: a certificate is not trusted, or only one side speaks TLS.
    Tls,
    /// The server is a replica. The client reconnects, as its address may lead to another server by
    /// now.
    ReadOnly,
    /// The server is loading its data.
    Loading,
    /// The server is running a long script.
    Busy,
    /// The replica has lost its master.
    MasterDown,
    /// The cluster does not serve this slot.
    ClusterDown,
    /// The slot is migrating.
    TryAgain,
    /// Another node serves the slot.
    Moved,
    /// The keys are in several slots.
    CrossSlot,
    /// The server is out of memory. Held locks are still renewed and released.
    OutOfMemory,
    /// The server cannot persist its data and rejects writes.
    Misconfigured,
    /// Too few replicas are connected.
    NoReplicas,
    /// The key has another type.
    WrongType,
    /// This process is a fork of the one that created the client, and must not use its connections.
    /// Create a new client in the fork.
    Forked,
    /// The server does not know the script.
    NoScript,
    /// The reply is invalid or unexpected.
    Protocol,
    /// Anything else.
    Other,
}
