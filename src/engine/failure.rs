//! Failures of the store, as a lock tells them.

use crate::{
    error::{Error, StoreError, StoreErrorKind},
    options::Copies,
    store::Acks,
};

pub(super) const NO_ANSWER: &str = "no answer before the wait was over";
const TOO_LATE: &str = "the reply came when the lease was over already";
const NOT_POLLED: &str = "the call was not polled for longer than a request may take; what it got is being undone";
pub(super) const NOT_CONFIRMED: &str = "no reply to a request of this owner; it is settled in the background";
pub(super) const NO_RECEIPT: &str = "nobody has asked which replicas have it";

/// A failure of the store, told as one of this lock.
pub(super) fn store_error(lock: &str, source: StoreError) -> Error {
    let lock = lock.to_owned();
    match source.kind() {
        StoreErrorKind::WrongType => Error::WrongType { lock },
        _ if source.may_have_executed() => Error::Unconfirmed { lock, source },
        _ => Error::Store { lock, source },
    }
}

pub(super) fn silent(what: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Timeout, true, what)
}

/// What the server has granted was not entered: too late for its lease, or for a future that is polled again after it was given up.
pub(super) fn not_entered(is_orphaned: bool) -> StoreError {
    silent(if is_orphaned { NOT_POLLED } else { TOO_LATE })
}

/// What was written is not where it must be.
pub(super) fn not_replicated(lock: &str, copies: Copies, acks: Acks) -> Error {
    Error::NotReplicated {
        lock: lock.to_owned(),
        acked: acks.replicas,
        wanted: copies.replicas,
        on_disk: copies.fsync.then_some(acks.on_disk),
    }
}
