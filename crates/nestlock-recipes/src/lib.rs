//! What people build with a distributed lock, built once. On the public API of [`nestlock`], nothing else.
//!
//! | page | what it answers |
//! |---|---|
//! | [`cached`](mod@cached) | how is a cache filled once, however many ask, and whoever dies? |
//! | [`once_per`](mod@once_per) | how does a job run once for each tick, on whichever replica? |
//! | [`leader`](mod@leader) | how do replicas agree on one of them, and how does its work end before the next one begins? |
//! | [`locked`](mod@locked) | how does a function run under a lock, without a line about it in its body? |
#![cfg_attr(
    feature = "tower",
    doc = "| [`tower`] | how does a service handle one request at a time, for each thing that is asked for? |"
)]

pub mod cached;
pub mod leader;
pub mod locked;
pub mod once_per;
#[cfg(feature = "tower")]
pub mod tower;

#[doc(hidden)]
pub use nestlock;
#[doc(inline)]
pub use nestlock_macros::locked;

pub use crate::locked::LockedError;
#[doc(inline)]
pub use crate::{cached::cached, leader::Leader, once_per::once_per};

/// Whether a retry can never succeed: the client was shut down, this process is a fork of the client's, or an argument is not
/// allowed.
fn is_final(error: &nestlock::Error) -> bool {
    use nestlock::{Error, StoreErrorKind};
    match error {
        Error::Closed | Error::InvalidName { .. } | Error::InvalidLease { .. } => true,
        Error::Store { source, .. } => source.kind() == StoreErrorKind::Forked,
        _ => false,
    }
}
