//! The events that are measured. With the feature `metrics`, the `metrics` crate receives them;
//! without it, nothing is done.

use std::{sync::Arc, time::Duration};

#[cfg(feature = "metrics")]
pub(crate) mod facade;
#[cfg(not(feature = "metrics"))]
mod nothing;

#[cfg(feature = "metrics")]
pub(crate) use self::facade::{Gauges, Levels, Meter, describe};
#[cfg(not(feature = "metrics"))]
pub(crate) use self::nothing::Meter;
use crate::error::{Error, LossReason};

/// Whether metrics are reported.
pub(crate) const IS_ON: bool = cfg!(feature = "metrics");

/// The lock that an event is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Of<'l> {
    pub(crate) kind: &'static str,
    #[cfg_attr(
        not(feature = "metrics"),
        expect(dead_code, reason = "read by the facade")
    )]
    pub(crate) lock: &'l str,
}

/// The outcome of an acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AcquireOutcome {
    Acquired,
    /// The owner already held the lock.
    Reentered,
    /// A try without a wait found the lock busy.
    Busy,
    /// The wait ended before the lock was free.
    Timeout,
    /// The future was dropped.
    Cancelled,
    Error(&'static str),
}

impl AcquireOutcome {
    pub(crate) fn failed(error: &Error) -> Self {
        Self::Error(error_type(error))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Acquired => "acquired",
            Self::Reentered => "reentered",
            Self::Busy => "busy",
            Self::Timeout => "timeout",
            Self::Cancelled => "cancelled",
            Self::Error(_) => "error",
        }
    }
}

/// How a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HoldEnd {
    Released,
    Lost(LossReason),
    /// It was left to its lease.
    LeftToLease,
}

impl HoldEnd {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Lost(LossReason::ShutDown) => "shut_down",
            Self::Lost(_) => "lost",
            Self::LeftToLease => "left_to_lease",
        }
    }
}

/// A renewal that got a reply, or failed.
#[derive(Debug)]
#[cfg_attr(
    not(feature = "metrics"),
    expect(dead_code, reason = "read by the facade")
)]
pub(crate) struct RenewalOutcome {
    pub(crate) kind: &'static str,
    pub(crate) lock: Arc<str>,
    pub(crate) outcome: &'static str,
    /// How long after its due time it was confirmed; `None` if it was not.
    pub(crate) late: Option<Duration>,
}

/// What woke a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Message,
    /// The waiter checked the lock by itself.
    Poll,
    /// Messages may have been missed while there was no connection.
    Reconnect,
}

impl Source {
    #[cfg(feature = "metrics")]
    fn name(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Poll => "poll",
            Self::Reconnect => "reconnect",
        }
    }
}

/// Returns the name of an error in the metrics.
fn error_type(error: &Error) -> &'static str {
    match error {
        Error::InvalidName { .. } => "invalid_name",
        Error::InvalidOwner { .. } => "invalid_owner",
        Error::InvalidLease { .. } => "invalid_lease",
        Error::InvalidConfig { .. } => "invalid_config",
        Error::NotHeld { .. } => "not_held",
        Error::Lost { .. } => "lost",
        Error::WrongLockKind { .. } => "wrong_lock_kind",
        Error::WrongType { .. } => "wrong_type",
        Error::TooManyHolds { .. } => "too_many_holds",
        Error::NotReentrant { .. } => "not_reentrant",
        Error::UpgradeRefused { .. } => "upgrade_refused",
        Error::NoToken { .. } => "no_token",
        Error::NoQuorum { .. } => "no_quorum",
        Error::Unconfirmed { .. } => "unconfirmed",
        Error::NotReplicated { .. } => "not_replicated",
        Error::Store { .. } => "store",
        Error::Closed => "closed",
        _ => "other",
    }
}
