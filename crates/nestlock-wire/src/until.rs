//! The time limits of a request.

use std::time::Duration;

use crate::clock::Instant;

/// The time limits of a request.
///
/// ```
/// use std::time::Duration;
///
/// use nestlock_wire::{Until, clock::Instant};
///
/// let now = Instant::now();
/// let until = Until::new(now, Duration::from_secs(3));
/// assert_eq!(until.remaining(now + Duration::from_secs(1)), Duration::from_secs(2));
/// assert!(until.has_time(now, Duration::from_secs(3)) && !until.is_over());
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Until {
    /// When the request was last sent.
    pub(crate) sent_at: Instant,
    /// From this time on, the request is no longer sent, and its reply no longer counts.
    pub(crate) over: Instant,
    /// From this time on, the request waits for no connection and follows no redirect. A request
    /// refused by then stays refused.
    gives_up: Option<Instant>,
}

impl Until {
    /// Returns the limits of a request that is sent at `asked` and may take `limit`.
    #[must_use]
    pub fn new(asked: Instant, limit: Duration) -> Self {
        Self {
            sent_at: asked,
            over: asked + limit,
            gives_up: None,
        }
    }

    /// Returns the same limits. From `at` on, the request waits for no connection.
    #[must_use]
    pub fn giving_up(self, at: Option<Instant>) -> Self {
        Self {
            gives_up: at,
            ..self
        }
    }

    /// Returns how long the request may wait for a connection.
    #[must_use]
    pub fn patience(self, now: Instant) -> Duration {
        let left = self.remaining(now);
        self.gives_up.map_or(left, |gives_up| {
            left.min(gives_up.saturating_duration_since(now))
        })
    }

    /// Returns whether the request may be sent at `at`, with at least `takes` left for its reply.
    #[must_use]
    pub fn has_time(self, at: Instant, takes: Duration) -> bool {
        self.gives_up.is_none_or(|gives_up| gives_up > at) && self.remaining(at) >= takes
    }

    /// Returns the limits for a retry of a request that was not executed. The deadline stays the
    /// same, because the caller relies on the request being over by then.
    #[must_use]
    pub fn again(self, asked: Instant) -> Self {
        Self {
            sent_at: asked,
            ..self
        }
    }

    /// Returns when the request was last sent.
    #[must_use]
    pub fn asked(self) -> Instant {
        self.sent_at
    }

    /// Returns how much time is left.
    #[must_use]
    pub fn remaining(self, now: Instant) -> Duration {
        self.over.saturating_duration_since(now)
    }

    /// Returns whether the request may no longer be sent.
    #[must_use]
    pub fn is_over(self) -> bool {
        self.sent_at >= self.over
    }
}

/// Why a request is no longer sent.
pub(crate) const NOT_SENT: &str =
    "the request was not sent within a command timeout; was its future polled?";
