//! Back-off and jitter for retries.
//!
//! Nine loops retry a request. Each has a `Retry`, whose pauses double up to a maximum, and a
//! deadline:
//!
//! - `Acquire::run`: an attempt that failed for now, until the wait or the outage patience is over
//! - `Core::released`: a release that a caller awaits, for one command timeout
//! - `Core::transfer`: a hand-over, or a settlement that must come before it, for one command
//!   timeout
//! - `Core::change_count`: a change of a number, for one command timeout
//! - `Core::wait_for_zero`: the look at a latch, until the wait or the outage patience is over
//! - `Core::note`: a holder's note, until the hold has ended
//! - `janitor::settle`: a release that no caller awaits, until the record's lease is over
//! - `janitor::clean_up`: the release of an abandoned name, until its requests cannot arrive any
//!   more, or the lease is over
//! - `janitor::take_off`: a release without a guard, until it counts, or a lease is over
//!
//! The watchdog has no retry loop: a renewal that failed is due again. The tasks that listen for
//! messages and list elements retry at a fixed pace while there is a waiter.

use std::time::Duration;

use nestlock_wire::clock::Instant;
use uuid::Uuid;

use crate::error::Error;

/// First and longest pause before a retry of a request that the server refused for now. Up to half
/// of each pause is random.
const REFUSED_FOR_NOW: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_millis(500));

/// A back-off: each pause is twice the one before, up to a maximum.
#[derive(Debug)]
pub(super) struct Retry {
    pause: Duration,
    longest: Duration,
}

impl Retry {
    pub(super) fn new(first: Duration, longest: Duration) -> Self {
        Self {
            pause: first,
            longest,
        }
    }

    /// Returns the pause before the next retry without advancing the back-off.
    pub(super) fn pause(&self) -> Duration {
        self.pause
    }

    /// Returns the pause before the next retry and doubles the one after it.
    pub(super) fn next(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(self.longest);
        pause
    }
}

/// A series of failures that may end soon.
pub(super) struct Failing {
    pub(super) since: Instant,
    pub(super) retry: Retry,
    /// The error of a request that may have been executed.
    pub(super) unconfirmed: Option<Error>,
}

impl Failing {
    pub(super) fn since(since: Instant) -> Self {
        Self {
            since,
            retry: Retry::new(REFUSED_FOR_NOW.0, REFUSED_FOR_NOW.1),
            unconfirmed: None,
        }
    }

    /// Returns the error of the whole series, of which `last` is the last. If any request may have
    /// been executed, the series is unconfirmed.
    pub(super) fn as_a_whole(&mut self, last: Error) -> Error {
        match last {
            // An adoption whose reply was lost may have succeeded and then ended. A retry then gets
            // `NotHeld`.
            Error::Store { .. } | Error::NotHeld { .. } => self.unconfirmed.take().unwrap_or(last),
            _ => last,
        }
    }
}

/// Returns a random duration between half of this pause and all of it, so that clients that failed
/// together do not retry together.
pub(super) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * random_fraction())
}

/// Returns a random number from 0 to 1.
pub(crate) fn random_fraction() -> f64 {
    f64::from(u32::from_le_bytes(
        *Uuid::new_v4().as_bytes().first_chunk().unwrap_or(&[0; 4]),
    )) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_longest() {
        let mut retry = Retry::new(Duration::from_millis(20), Duration::from_millis(100));
        let pauses: Vec<u128> = (0..5).map(|_| retry.next().as_millis()).collect();
        assert_eq!(pauses, [20, 40, 80, 100, 100]);
    }

    #[test]
    fn jitter_takes_up_to_half() {
        let pause = Duration::from_millis(10);
        assert!(
            (0..1000)
                .map(|_| jittered(pause))
                .all(|jittered| jittered >= pause / 2 && jittered <= pause)
        );
    }
}
