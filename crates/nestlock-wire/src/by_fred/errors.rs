//! What fred's errors say about a request.

use std::io;

use fred::error::{Error as FredError, ErrorKind as FredKind};

use crate::{
    error::StoreErrorKind,
    failure::{Failure, NotConnected, nobody_listens},
    refusal,
};

impl NotConnected {
    /// Converts fred's error, which contains the system's error only as text.
    pub(crate) fn from_fred(error: &FredError, has_password: bool) -> Self {
        let nobody_listens =
            system_error(error.details()).is_some_and(|(_, error, _)| nobody_listens(&error));
        let is_servers = match error.kind() {
            FredKind::IO => false,
            #[cfg(feature = "rustls")]
            FredKind::Tls => false,
            _ => true,
        };
        let failure = match classify(error) {
            // the text may be the server's, and quote the password
            Failure::Other(..) if has_password && is_servers => {
                Failure::Refused(error.details().to_owned())
            }
            failure => failure,
        };
        Self {
            nobody_listens,
            ..Self::of_handshake(failure, has_password)
        }
    }
}

/// Sorts fred's errors by whether the request may have been executed: yes, unless the opposite is
/// proven.
pub(super) fn classify(error: &FredError) -> Failure {
    let details = error.details();
    match error.kind() {
        // fred ends the connection on this error, and reports it to every request in flight,
        // executed or not
        _ if refusal::verdict(details).0 == StoreErrorKind::ClusterDown => {
            Failure::Other(StoreErrorKind::ClusterDown, true, text(error))
        }
        _ if refusal::is_known(details) => Failure::Refused(details.to_owned()),
        FredKind::Timeout => Failure::TimedOut,
        FredKind::IO => Failure::Other(StoreErrorKind::Disconnected, true, text(error)),
        // still queued when the connection ended: fred drops the queue, and reports this to each
        // request
        FredKind::Canceled => Failure::Unsent,
        FredKind::Backpressure => Failure::TooMany,
        FredKind::Auth => Failure::Other(StoreErrorKind::Auth, false, text(error)),
        FredKind::Protocol | FredKind::Parse => Failure::Nonsense(text(error)),
        FredKind::Routing | FredKind::Unknown
            if details.starts_with("Failed to route command")
                || details.starts_with("Failed to send command to router")
                || details.starts_with("Client is not initialized")
                || details.starts_with("Too many redirections") =>
        {
            Failure::Other(StoreErrorKind::Unavailable, false, text(error))
        }
        // fred's router ended while the request was in flight, or could not write to a connection
        // that is gone
        FredKind::Unknown
            if details == "channel closed"
                || details.starts_with("Too many failed write attempts") =>
        {
            Failure::Ended
        }
        _ => Failure::Other(StoreErrorKind::Other, true, text(error)),
    }
}

/// Returns what fred says, with the system's error as the standard library displays it: fred has
/// only its debug form.
fn text(error: &FredError) -> String {
    let said = error.to_string();
    match system_error(&said) {
        Some((before, error, after)) => format!("{before}{error}{after}"),
        None => said,
    }
}

/// Finds the system's error in a text of fred's. Returns the text before it, the error, and the
/// text after it.
fn system_error(said: &str) -> Option<(&str, io::Error, &str)> {
    let (before, rest) = said.split_once("Os { code: ")?;
    let (code, rest) = rest.split_once(", kind: ")?;
    let (_, after) = rest.split_once("\" }")?;
    Some((
        before,
        io::Error::from_raw_os_error(code.parse().ok()?),
        after,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::absent_servers;

    #[test]
    fn a_router_that_was_ended_is_a_connection_that_ended() {
        for details in ["channel closed", "Too many failed write attempts."] {
            assert_eq!(
                classify(&FredError::new(FredKind::Unknown, details)),
                Failure::Ended,
                "{details}"
            );
        }
        let unknown = classify(&FredError::new(FredKind::Unknown, "something else"));
        assert!(
            matches!(unknown, Failure::Other(StoreErrorKind::Other, true, _)),
            "{unknown:?}"
        );
    }

    /// A closed port and a missing socket are distinguished from servers that are there and do not
    /// serve.
    #[test]
    fn freds_error_separates_absent_servers_from_those_not_serving() {
        for error in absent_servers() {
            let error = FredError::from(error);
            assert!(NotConnected::from_fred(&error, true).nobody_listens);
        }
        // root may open everything, so this is built as the system would report it
        let denied = FredError::from(io::Error::from_raw_os_error(13));
        let denied = NotConnected::from_fred(&denied, true).error;
        assert_eq!(denied.kind(), StoreErrorKind::NoPermission, "{denied}");
        assert!(denied.to_string().contains("unixsocketperm"), "{denied}");
        let text = "Permission denied (os error 13)";
        assert!(denied.to_string().contains(text), "{denied}");
        for error in [
            FredError::from(io::Error::from(io::ErrorKind::ConnectionReset)),
            FredError::new(FredKind::IO, "Connection closed."),
            FredError::new(FredKind::Timeout, "Request timed out."),
        ] {
            assert!(!NotConnected::from_fred(&error, true).nobody_listens);
        }
    }
}
