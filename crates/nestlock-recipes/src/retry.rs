//! Which errors a retry does not cure.

use nestlock::{Error, StoreErrorKind};

/// Returns whether a retry can never succeed: the client was shut down, this process is a fork of
/// the one that created it, or an argument is not allowed.
pub(crate) fn is_final(error: &Error) -> bool {
    match error {
        Error::Closed | Error::InvalidName { .. } | Error::InvalidLease { .. } => true,
        Error::Store { source, .. } => source.kind() == StoreErrorKind::Forked,
        _ => false,
    }
}
