//! How the watchdog renews a generation: an entry for each hold.

use std::{num::NonZeroU32, slice};

use super::lease::Millis;
use crate::clock::Instant;

/// How the watchdog renews one hold: see [`Lease::Watched`].
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Watched {
    /// The ticket that it belongs to.
    pub(super) ticket: NonZeroU32,
    pub(super) ttl: Millis,
    /// How often the TTL may be set, what was set last included.
    pub(super) times: Option<NonZeroU32>,
}

impl Watched {
    /// From when on the next renewal counts, after one that was sent at this instant.
    pub(super) fn counts_from(&self, sent: Instant) -> Instant {
        // a tenth early is in time: see `slack`
        sent + self.ttl.duration() / 3 * 9 / 10
    }

    pub(super) fn count(&mut self) {
        let left = |left: NonZeroU32| NonZeroU32::new(left.get() - 1).unwrap_or(left);
        self.times = self.times.map(left);
    }

    pub(super) fn goes_on(&self) -> bool {
        self.times != Some(NonZeroU32::MIN)
    }
}

/// How the watchdog renews a generation: an entry for each hold that it renews. Most often that is one, which has its
/// place here: a client may hold many locks.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) enum Watches {
    None,
    One(Watched),
    /// Each with the time from which a renewal counts as its own: another one may need them more often.
    Many(Vec<(Watched, Instant)>),
}

impl Watches {
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Watched> + ExactSizeIterator {
        let (one, many) = match self {
            Self::None => (&[][..], &[][..]),
            Self::One(watched) => (slice::from_ref(watched), &[][..]),
            Self::Many(watched) => (&[][..], &watched[..]),
        };
        let at = |at: usize| if many.is_empty() { &one[at] } else { &many[at].0 };
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
