//! Errors: data rather than text, a variant only where the caller acts differently.

mod advice;

use std::{error, fmt, time::Duration};

use crate::{owner::OwnerId, token::FencingToken};

/// The result of most operations of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. A busy lock is not an error: that is `Ok(None)`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The name of a lock, or of a guarded key, cannot be used. Nothing was sent.
    #[error("invalid name {name:?}: {reason}")]
    #[non_exhaustive]
    InvalidName {
        /// The name as given, with the client's prefix.
        name: String,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The owner cannot be used for this call. Nothing was sent.
    #[error("invalid owner {owner:?}: {reason}")]
    #[non_exhaustive]
    InvalidOwner {
        /// The owner as given.
        owner: String,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// A lease is zero, too short or too long. Nothing was sent.
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
    /// The client's configuration makes no sense. Nothing was sent.
    #[error("invalid configuration: {reason}")]
    #[non_exhaustive]
    InvalidConfig {
        /// What is wrong, and what to do.
        reason: String,
    },
    /// This owner does not hold the lock: released already, or never held. Nothing was changed.
    #[error("lock {lock:?} is not held by {owner}")]
    #[non_exhaustive]
    NotHeld {
        /// The lock's name.
        lock: String,
        /// Who was said to hold it.
        owner: OwnerId,
    },
    /// This owner held the lock and lost it. What it guarded may have been touched by others since.
    #[error("lock {lock:?} was lost by {owner}: {reason}")]
    #[non_exhaustive]
    Lost {
        /// The lock's name.
        lock: String,
        /// Who held it.
        owner: OwnerId,
        /// How it was lost.
        reason: LossReason,
    },
    /// The record at this name belongs to another kind of lock, or is a hash of yours. It was left as it is.
    #[error("lock {lock:?}: the hash at this name is not a record of this lock kind; use another name")]
    #[non_exhaustive]
    WrongLockKind {
        /// The lock's name.
        lock: String,
    },
    /// The key at this name, or one that belongs to it, is of another type: no lock at all, or no guarded value. It was
    /// left as it is.
    #[error("{lock:?}: the key at this name, or one that belongs to it, is of another type; use another name")]
    #[non_exhaustive]
    WrongType {
        /// The name of the lock, or the guarded key.
        lock: String,
    },
    /// The guarded key has seen a higher fencing token: another owner has held the lock since. Nothing was changed.
    #[error("key {key:?}: the token {token} is stale, {seen} was seen; acquire the lock again and begin anew")]
    #[non_exhaustive]
    StaleToken {
        /// The guarded key.
        key: String,
        /// The token that was shown.
        token: FencingToken,
        /// The highest token seen.
        seen: FencingToken,
    },
    /// The number is no fencing token: nobody was given it.
    #[error("{token} is no fencing token; use that of a fenced lock's guard, 1 to 2^53 - 1")]
    #[non_exhaustive]
    InvalidToken {
        /// The number.
        token: u64,
    },
    /// The owner re-entered the lock too often.
    #[error("lock {lock:?} is already held {holds} times by {owner}; release some holds first")]
    #[non_exhaustive]
    TooManyHolds {
        /// The lock's name.
        lock: String,
        /// Who holds it.
        owner: OwnerId,
        /// How often.
        holds: u32,
    },
    /// The owner holds this non-reentrant lock already, or a fair and a reentrant one would be nested, or it gave one of nested
    /// holds away and has another; waiting would never end. Nothing is held.
    #[error(
        "lock {lock:?} is held by {owner} already, and is not reentrant, was taken as another kind, or was given away in part; release it first"
    )]
    #[non_exhaustive]
    NotReentrant {
        /// The lock's name.
        lock: String,
        /// Who holds it.
        owner: OwnerId,
    },
    /// The owner holds this fenced lock already, through a door whose holds have no fencing token. Nothing was sent.
    #[error("lock {lock:?} is held by {owner} already, without a fencing token; take the fenced lock first")]
    #[non_exhaustive]
    NoToken {
        /// The lock's name.
        lock: String,
        /// Who holds it.
        owner: OwnerId,
    },
    /// The record of this lock has no TTL to extend: it is held until it is released. Nothing was changed.
    #[error("lock {lock:?} is held by {owner} without a TTL; there is nothing to extend")]
    #[non_exhaustive]
    NotExpirable {
        /// The lock's name.
        lock: String,
        /// Who holds it.
        owner: OwnerId,
    },
    /// The owner holds the read lock and asked for the write lock. Nothing was sent; it would wait for itself.
    #[error("lock {lock:?} is read-locked by {owner}, which would wait for itself; release the read lock first")]
    #[non_exhaustive]
    UpgradeRefused {
        /// The lock's name.
        lock: String,
        /// Who holds the read lock.
        owner: OwnerId,
    },
    /// What the guard holds cannot be handed over. Nothing was sent, and it is held as before.
    #[error("lock {lock:?} cannot be handed over: {reason}")]
    #[non_exhaustive]
    CannotHandOver {
        /// The lock's name.
        lock: String,
        /// Why not, and what to do.
        reason: &'static str,
    },
    /// A hand-over cannot be adopted here. Nothing was sent.
    #[error("this hand-over cannot be adopted: {reason}")]
    #[non_exhaustive]
    InvalidHandOver {
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The request was sent, no answer came: it may or may not have been executed. The client is making the server
    /// agree in the background; at the latest the lease ends what is left.
    #[error("lock {lock:?}: no answer from the server, the outcome is unknown and being settled: {source}")]
    #[non_exhaustive]
    Unconfirmed {
        /// The lock's name.
        lock: String,
        /// What the connection said.
        source: StoreError,
    },
    /// The server refused the request or could not be reached. It was not executed.
    #[error("lock {lock:?}: {source}")]
    #[non_exhaustive]
    Store {
        /// The lock's name.
        lock: String,
        /// What the server or the connection said.
        source: StoreError,
    },
    /// Too few replicas had the acquire in time, and it is given back; or the extension, and the hold is as it was. See
    /// [`LockClientBuilder::replicas`](crate::LockClientBuilder::replicas).
    #[error(
        "lock {lock:?}: {acked} of {wanted} replicas had it in time{}; is one away, or slow?",
        if *.on_disk == Some(false) { ", and it was not on the server's disk" } else { "" }
    )]
    #[non_exhaustive]
    NotReplicated {
        /// The lock's name.
        lock: String,
        /// How many replicas had it.
        acked: u32,
        /// How many must.
        wanted: u32,
        /// Whether the server had it on its disk; `None`: that was not asked for.
        on_disk: Option<bool>,
    },
    /// Too few of a RedLock's servers agreed. What was acquired on the others is being released, where it was asked for;
    /// a hold that could not be extended, or not be released on enough of them, stays as it was on each.
    #[error("lock {lock:?}: too few of {} servers agreed, {needed} are needed: {}", .nodes.len(), list(.nodes))]
    #[non_exhaustive]
    NoQuorum {
        /// The lock's name.
        lock: String,
        /// How many servers must agree.
        needed: usize,
        /// What each server said, in the order in which they were given.
        nodes: Vec<NodeAnswer>,
    },
    /// No connection could be made.
    #[error("cannot connect to {address}: {source}")]
    #[non_exhaustive]
    Connect {
        /// As [`LockClient::address`](crate::LockClient::address). Never the password.
        address: String,
        /// What the connection said.
        source: StoreError,
    },
    /// [`LockClient::shutdown`](crate::LockClient::shutdown) was called.
    #[error("the lock client was shut down")]
    Closed,
    /// The shutdown could not confirm every release; what is left ends with its lease.
    #[error("the lock client was shut down, but the release of {locks} locks could not be confirmed")]
    #[non_exhaustive]
    Unsettled {
        /// How many releases were not confirmed.
        locks: usize,
    },
}

impl Error {
    /// Whether the lock is held in a way that waiting does not change, by the caller itself:
    /// [`NotReentrant`](Self::NotReentrant), [`UpgradeRefused`](Self::UpgradeRefused),
    /// [`TooManyHolds`](Self::TooManyHolds), [`NoToken`](Self::NoToken). A lock that somebody else holds is no error.
    /// HTTP: 409, as for `Ok(None)`.
    #[must_use]
    pub fn is_conflict(&self) -> bool {
        matches!(
            self,
            Self::NotReentrant { .. } | Self::UpgradeRefused { .. } | Self::TooManyHolds { .. } | Self::NoToken { .. }
        )
    }

    /// Whether the same call may succeed a little later: the server said "not now", was not reached, or did not answer. What
    /// [`Unconfirmed`](Self::Unconfirmed) calls left behind is settled by the client. HTTP: 503.
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

    /// Whether what the lock guards may have been touched by others: the lock was lost, or another owner has held it since.
    /// Begin anew. HTTP: 409 or 500, by what was done under it.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::StaleToken { .. })
    }

    /// The name of the lock, or of the guarded key, that this is about.
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

/// What one server of a RedLock said.
#[derive(Debug)]
#[non_exhaustive]
pub struct NodeAnswer {
    /// The server's address, or the member's name.
    pub node: String,
    /// What it said.
    pub said: NodeSaid,
}

/// What a server of a RedLock said.
#[derive(Debug)]
#[non_exhaustive]
pub enum NodeSaid {
    /// It did what was asked.
    Agreed,
    /// Somebody else holds the lock there.
    Busy,
    /// No answer within the time limit of the round.
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
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// How a lock was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LossReason {
    /// The lease ended on this client's monotonic clock before a renewal was confirmed.
    LeaseExpired,
    /// The server has no record of the lock any more: expired, flushed, deleted, or freed by force.
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

/// What the server or the connection to it said.
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
        Self { kind, may_have_executed, source: source.into(), command: None }
    }

    /// The same, about a command.
    pub(crate) fn about(mut self, command: Option<&str>) -> Self {
        self.command = command.map(Into::into);
        self
    }

    /// The same, of a connection over which nothing was asked yet.
    pub(crate) fn before_any_request(mut self) -> Self {
        self.may_have_executed = false;
        if self.kind == StoreErrorKind::Disconnected {
            self.kind = StoreErrorKind::Unavailable;
        }
        self
    }

    /// The same, of a question about a request that was executed.
    pub(crate) fn that_may_have_executed(mut self) -> Self {
        self.may_have_executed = true;
        self
    }

    /// The same, of a request that changes nothing: there is no outcome that could be unknown.
    pub(crate) fn of_a_read(mut self) -> Self {
        self.may_have_executed = false;
        self
    }

    /// What kind of failure it was.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// The command that the server lacks, or that the user may not use; of a script's, if the server names one,
    /// all that it may be, with commas between them.
    #[must_use]
    pub fn command(&self) -> Option<&str> {
        self.command.as_deref()
    }

    /// What the server said, word for word.
    pub(crate) fn said(&self) -> String {
        self.source.to_string()
    }

    /// Whether the server may have executed the request nevertheless.
    #[must_use]
    pub fn may_have_executed(&self) -> bool {
        self.may_have_executed
    }

    /// Whether the same request may succeed a little later: the server said "not now", or could not be reached.
    ///
    /// Acquires and releases go on after such an error for as long as they may take; a try fails at once. See
    /// [`StoreErrorKind`] for which kinds are final.
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
    /// Whether the server refuses a command for as long as it is configured as it is.
    pub(crate) fn is_denied(self) -> bool {
        matches!(self, Self::NoPermission | Self::UnknownCommand)
    }
}

/// The kinds of [`StoreError`].
///
/// Most may pass, and are repeated within the wait of an acquire, or for as long as a release may take
/// ([`StoreError::is_transient`]). Final are those that stay until somebody changes the configuration, the users or the
/// data: [`Auth`](Self::Auth), [`NoPermission`](Self::NoPermission), [`CrossSlot`](Self::CrossSlot),
/// [`WrongType`](Self::WrongType), [`Forked`](Self::Forked), [`NoScript`](Self::NoScript),
/// [`UnknownCommand`](Self::UnknownCommand), [`Tls`](Self::Tls). So are [`Protocol`](Self::Protocol) and
/// [`Other`](Self::Other), unless the request may have been executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No connection at the moment.
    Unavailable,
    /// No answer within the command timeout.
    Timeout,
    /// The connection broke while the answer was awaited.
    Disconnected,
    /// Too many requests are queued in this client already, or another call of this owner about this lock does not end.
    Overloaded,
    /// User name or password were refused.
    Auth,
    /// The ACL user may not do this (command, key or channel), or this process may not open the server's socket.
    NoPermission,
    /// The server lacks a command: it is too old, or the command is renamed or disabled. Nothing was executed.
    UnknownCommand,
    /// TLS failed: a certificate is not trusted, or only one side speaks TLS.
    Tls,
    /// The server is a replica. The client connects anew, should its address lead to another server by now.
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
    /// The slot lives on another node.
    Moved,
    /// The keys are in several slots.
    CrossSlot,
    /// The server is out of memory. Locks that are held are renewed and released all the same.
    OutOfMemory,
    /// The server cannot persist and refuses writes.
    Misconfigured,
    /// Too few replicas are connected.
    NoReplicas,
    /// The key has another type.
    WrongType,
    /// This process is a fork of the one that made the client, whose connections it must not use. Make a client of its own.
    Forked,
    /// The server does not know the script.
    NoScript,
    /// The answer makes no sense.
    Protocol,
    /// Anything else.
    Other,
}
