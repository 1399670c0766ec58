//! Why a request has no usable reply, and why there is no connection.

use std::io;

use crate::{
    error::{StoreError, StoreErrorKind},
    refusal,
    until::NOT_SENT,
};

/// Why a request has no usable reply.
///
/// ```
/// use nestlock_wire::{Failure, StoreError};
///
/// assert!(StoreError::from(Failure::Ended).may_have_executed());
/// assert!(!StoreError::from(Failure::Unsent).may_have_executed());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The server replied with an error.
    Refused(String),
    /// The same for a request in a bundle: none of the bundle was executed, and each request is
    /// sent again alone.
    RefusedTogether(String),
    /// The connection ended before the request was sent.
    Unsent,
    /// The connection ended before the reply arrived.
    Ended,
    /// The request's time is over.
    TimedOut,
    /// The request's time is over, and it was never sent.
    LateUnsent,
    /// Too many requests are in flight.
    TooMany,
    /// What arrived is not a reply, or not the reply to this request.
    Nonsense(String),
    /// Anything else, and whether the request may have been executed.
    Other(StoreErrorKind, bool, String),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        use StoreErrorKind as K;
        let (kind, may_have_executed, why) = match failure {
            Failure::Refused(error) | Failure::RefusedTogether(error) => {
                return refusal::error(error);
            }
            Failure::Unsent => (
                K::Unavailable,
                false,
                "the connection ended before the request was sent".into(),
            ),
            Failure::Ended => (
                K::Disconnected,
                true,
                "the connection ended before the reply arrived".into(),
            ),
            Failure::TimedOut => (
                K::Timeout,
                true,
                "no reply within the command timeout".into(),
            ),
            Failure::LateUnsent => (K::Overloaded, false, NOT_SENT.into()),
            Failure::TooMany => (
                K::Overloaded,
                false,
                "too many requests are in flight".into(),
            ),
            Failure::Nonsense(what) => (K::Protocol, true, what),
            Failure::Other(kind, may_have_executed, why) => (kind, may_have_executed, why),
        };
        Self::new(kind, may_have_executed, why)
    }
}

/// Why there is no connection.
///
/// ```
/// use std::io;
///
/// use nestlock_wire::{NotConnected, StoreErrorKind};
///
/// let refused = NotConnected::from(io::Error::from(io::ErrorKind::ConnectionRefused));
/// assert!(refused.nobody_listens);
/// let failed = NotConnected::new(StoreErrorKind::Unavailable, "no token");
/// assert!(!failed.nobody_listens);
/// ```
#[derive(Debug)]
pub struct NotConnected {
    /// What happened.
    pub error: StoreError,
    /// True if nothing listens there (a closed port, or no such socket): the attempt cost the
    /// server nothing.
    pub nobody_listens: bool,
}

impl From<io::Error> for NotConnected {
    fn from(error: io::Error) -> Self {
        let nobody_listens = nobody_listens(&error);
        let error = StoreError::new(StoreErrorKind::Disconnected, false, error);
        Self {
            error: refusal::at_connect(error),
            nobody_listens,
        }
    }
}

/// Returns `true` if a connect that failed with this error found a closed port, or no such socket.
pub(crate) fn nobody_listens(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}

impl NotConnected {
    /// Creates the reason why there is no connection, if a server may be there.
    pub fn new(
        kind: StoreErrorKind,
        why: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            error: StoreError::new(kind, false, why),
            nobody_listens: false,
        }
    }

    /// Returns the same failure for another connection, as text.
    pub(crate) fn again(&self) -> Self {
        Self {
            nobody_listens: self.nobody_listens,
            ..Self::new(self.error.kind(), self.error.said())
        }
    }

    /// Returns whether the server refused the user or the password.
    pub(crate) fn is_login_refused(&self) -> bool {
        self.error.kind() == StoreErrorKind::Auth
    }

    /// Converts the failure of a login over a connection that is open. The reply may quote the
    /// password, and another client's words for it may, too: only known words are shown.
    pub(crate) fn of_login(failure: Failure) -> Self {
        let failure = match failure {
            Failure::Other(_, _, said)
            | Failure::Nonsense(said)
            | Failure::RefusedTogether(said) => Failure::Refused(said),
            failure => failure,
        };
        Self::of_handshake(failure, true)
    }

    /// Converts the failure of a handshake. If that contained a password, only known words of the
    /// server's error are shown.
    pub(crate) fn of_handshake(failure: Failure, has_password: bool) -> Self {
        let error = match failure {
            Failure::Refused(said) if has_password => refusal::login_error(&said),
            failure => failure.into(),
        };
        Self {
            error: refusal::at_connect(error),
            nobody_listens: false,
        }
    }
}

/// Converts the failure of a query after the handshake.
impl From<Failure> for NotConnected {
    fn from(failure: Failure) -> Self {
        Self::of_handshake(failure, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::absent_servers;

    /// A server or a proxy quotes the password, and fred's client passes that on as its own words.
    #[test]
    fn the_error_of_a_login_does_not_show_the_password() {
        let said = "ERR invalid s3cret";
        for failure in [
            Failure::Refused(said.into()),
            Failure::RefusedTogether(said.into()),
            Failure::Other(StoreErrorKind::Other, false, said.into()),
            Failure::Nonsense(said.into()),
        ] {
            let error = NotConnected::of_login(failure.clone()).error;
            assert!(
                !error.to_string().contains("s3cret"),
                "{failure:?}: {error}"
            );
        }
    }

    /// A closed port and a missing socket are distinguished from servers that are there and do not
    /// serve.
    #[test]
    fn an_error_separates_absent_servers_from_those_not_serving() {
        for error in absent_servers() {
            assert!(NotConnected::from(error).nobody_listens);
        }
        // root may open everything, so this is built as the system would report it
        let denied = NotConnected::from(io::Error::from_raw_os_error(13)).error;
        assert_eq!(denied.kind(), StoreErrorKind::NoPermission, "{denied}");
        assert!(denied.to_string().contains("unixsocketperm"), "{denied}");
        let reset = io::Error::from(io::ErrorKind::ConnectionReset);
        assert!(!NotConnected::from(reset).nobody_listens);
    }
}
