//! Converts store failures to errors of a lock.

use nestlock_wire::{Acks, Copies};

use crate::error::{Error, StoreError, StoreErrorKind};

pub(super) const NO_REPLY: &str = "no reply before the wait was over";
const TOO_LATE: &str = "the reply came after the lease had ended";
const NOT_POLLED: &str =
    "the future was not polled for longer than a request may take; its acquire is being undone";
pub(super) const NOT_CONFIRMED: &str =
    "no reply to a request of this owner; it is settled in the background";
pub(super) const NO_RECEIPT: &str =
    "no WAIT was sent, so it is unknown which replicas have the lock";

/// Returns a store failure as an error of this lock.
pub(super) fn store_error(lock: &str, source: StoreError) -> Error {
    let lock = lock.to_owned();
    match source.kind() {
        StoreErrorKind::WrongType => Error::WrongType { lock },
        _ if source.may_have_executed() => Error::Unconfirmed { lock, source },
        _ => Error::Store { lock, source },
    }
}

/// Copies an error for a further caller: `StoreError` is not `Clone`.
pub(super) fn again(error: &StoreError) -> StoreError {
    let again = StoreError::new(error.kind(), error.may_have_executed(), error.said());
    again.about(error.command())
}

/// Returns a timeout of a request that may have been executed.
pub(super) fn no_reply(what: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::Timeout, true, what)
}

/// Returns the error of a grant that was not entered: it came too late for its lease, or its future
/// was polled again after the client had given the request up.
pub(super) fn not_entered(is_orphaned: bool) -> StoreError {
    no_reply(if is_orphaned { NOT_POLLED } else { TOO_LATE })
}

/// Returns the error of a write that too few replicas acknowledged.
pub(super) fn not_replicated(lock: &str, copies: Copies, acks: Acks) -> Error {
    Error::NotReplicated {
        lock: lock.to_owned(),
        acked: acks.replicas,
        wanted: copies.replicas,
        on_disk: copies.fsync.then_some(acks.on_disk),
    }
}
