//! Errors of a server, and of the connection to it.

pub(crate) mod advice;

use std::fmt;

/// An error of the server, or of the connection to it.
///
/// ```
/// use nestlock_wire::{StoreError, StoreErrorKind};
///
/// fn advice(error: &StoreError) -> &'static str {
///     match error.kind() {
///         StoreErrorKind::Auth | StoreErrorKind::NoPermission => "check the user",
///         _ if error.may_have_executed() => "find out whether it was executed",
///         _ if error.is_transient() => "try again later",
///         _ => "give up",
///     }
/// }
/// let error = StoreError::new(StoreErrorKind::Timeout, true, "no reply");
/// assert_eq!(advice(&error), "find out whether it was executed");
/// ```
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    may_have_executed: bool,
    source: Box<dyn std::error::Error + Send + Sync>,
    command: Option<Box<str>>,
}

impl StoreError {
    /// Creates an error. `may_have_executed`: whether the server may have executed the request.
    pub fn new(
        kind: StoreErrorKind,
        may_have_executed: bool,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            kind,
            may_have_executed,
            source: source.into(),
            command: None,
        }
    }

    /// Returns the same error, with the command that it is about.
    #[must_use]
    pub fn about(mut self, command: Option<&str>) -> Self {
        self.command = command.map(Into::into);
        self
    }

    /// Returns the same error, for a connection that has not sent any request yet.
    #[must_use]
    pub fn before_any_request(mut self) -> Self {
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
    #[must_use]
    pub fn of_a_read(mut self) -> Self {
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
    #[must_use]
    pub fn said(&self) -> String {
        self.source.to_string()
    }

    /// Returns whether the server may have executed the request despite the error.
    #[must_use]
    pub fn may_have_executed(&self) -> bool {
        self.may_have_executed
    }

    /// Returns whether the same request may succeed a little later: the server rejected it for now,
    /// or could not be reached.
    ///
    /// nestlock's acquires and releases retry after such an error while their time lasts; a try
    /// fails at once. [`StoreErrorKind`] lists the kinds that are final.
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

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.source)
    }
}

impl StoreErrorKind {
    /// Returns whether the server rejects the command until its configuration changes.
    #[must_use]
    pub fn is_denied(self) -> bool {
        matches!(self, Self::NoPermission | Self::UnknownCommand)
    }
}

/// The kinds of [`StoreError`].
///
/// Most are transient: nestlock retries within the wait of an acquire, or for as long as a release
/// may take ([`StoreError::is_transient`]). Others last until the configuration, the users or the
/// data change: [`Auth`](Self::Auth), [`NoPermission`](Self::NoPermission),
/// [`CrossSlot`](Self::CrossSlot), [`WrongType`](Self::WrongType), [`Forked`](Self::Forked),
/// [`NoScript`](Self::NoScript), [`UnknownCommand`](Self::UnknownCommand), [`Tls`](Self::Tls). So
/// do [`Protocol`](Self::Protocol) and [`Other`](Self::Other), unless the request may have been
/// executed.
///
/// For an example, see [`StoreError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No connection at the moment.
    Unavailable,
    /// No reply within the command timeout.
    Timeout,
    /// The connection broke before the reply arrived.
    Disconnected,
    /// This client has too many requests in flight, a request was not sent in time, or (in
    /// nestlock) another call of this owner about this lock does not return.
    Overloaded,
    /// The server rejected the user name or password.
    Auth,
    /// The ACL user lacks permission for a command, key or channel, or this process lacks
    /// permission to open the server's socket.
    NoPermission,
    /// The server lacks a command: it is too old, or the command is renamed or disabled. Nothing
    /// was executed.
    UnknownCommand,
    /// TLS failed: a certificate is not trusted, or only one side speaks TLS.
    Tls,
    /// The server is a replica. The client reconnects, because the address may lead to another
    /// server by now.
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
    /// The keys belong to different slots.
    CrossSlot,
    /// The server is out of memory. nestlock still renews and releases held locks.
    OutOfMemory,
    /// The server cannot persist its data and rejects writes.
    Misconfigured,
    /// Too few replicas are connected.
    NoReplicas,
    /// The key holds a value of another type.
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
