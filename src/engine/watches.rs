//! The renewals of one generation: one entry for each hold that the watchdog renews.

use std::{num::NonZeroU32, slice};

use nestlock_wire::clock::Instant;

use super::lease::Millis;

/// How the watchdog renews one hold: see [`Lease::Watched`].
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Watched {
    /// The ticket of the hold.
    pub(super) ticket: NonZeroU32,
    pub(super) ttl: Millis,
    /// How many times the TTL may be set, counting the last time it was set. `None`: no limit.
    pub(super) times: Option<NonZeroU32>,
}

impl Watched {
    /// Returns the earliest instant at which the next renewal counts, if the last one was sent at
    /// `sent`.
    pub(super) fn counts_from(&self, sent: Instant) -> Instant {
        // Renewals go out up to a tenth of the period early: see `slack`.
        sent + self.ttl.duration() / 3 * 9 / 10
    }

    /// Counts one renewal. The counter stops at 1.
    pub(super) fn count(&mut self) {
        let left = |left: NonZeroU32| NonZeroU32::new(left.get() - 1).unwrap_or(left);
        self.times = self.times.map(left);
    }

    /// Returns whether the TTL may be set again.
    pub(super) fn goes_on(&self) -> bool {
        self.times != Some(NonZeroU32::MIN)
    }
}

/// The watched holds of a generation. Most generations have one, which is stored inline: a client
/// may hold many locks.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) enum Watches {
    None,
    One(Watched),
    /// Each hold with the instant from which a renewal counts as its own: another hold may need
    /// renewals more often.
    Many(Vec<(Watched, Instant)>),
}

impl Watches {
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Watched> + ExactSizeIterator {
        let (one, many) = match self {
            Self::None => (&[][..], &[][..]),
            Self::One(watched) => (slice::from_ref(watched), &[][..]),
            Self::Many(watched) => (&[][..], &watched[..]),
        };
        let at = |at: usize| {
            if many.is_empty() {
                &one[at]
            } else {
                &many[at].0
            }
        };
        (0..one.len() + many.len()).map(at)
    }

    pub(super) fn push(&mut self, watched: Watched, sent: Instant) {
        let timed = |watched: Watched| {
            let from = watched.counts_from(sent);
            (watched, from)
        };
        *self = match std::mem::replace(self, Self::None) {
            Self::None => Self::One(watched),
            Self::One(first) => Self::Many([first, watched].map(timed).into()),
            Self::Many(mut many) => {
                many.push(timed(watched));
                Self::Many(many)
            }
        };
    }

    pub(super) fn remove(&mut self, at: usize) {
        match self {
            Self::Many(many) => _ = many.remove(at),
            Self::None | Self::One(_) => *self = Self::None,
        }
    }
}
