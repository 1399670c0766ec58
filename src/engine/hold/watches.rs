//! The renewals of one generation: one entry for each hold that the watchdog renews.

use std::{num::NonZeroU32, slice};

use nestlock_wire::clock::Instant;

use crate::engine::lease::{Keep, Millis};

/// How the watchdog renews one hold: see [`Lease::Watched`](crate::engine::lease::Lease::Watched).
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Watched {
    /// The ticket of the hold.
    pub(crate) ticket: NonZeroU32,
    pub(crate) ttl: Millis,
    /// The hold is not renewed beyond this instant. `None`: no limit.
    pub(crate) until: Option<Instant>,
}

impl Watched {
    /// Returns what a renewal sent at `now` requests for this hold, and until when that lasts.
    /// Returns `None` if its time is over.
    pub(crate) fn keep(&self, now: Instant) -> Option<(Instant, Keep)> {
        let ttl = self.ttl.duration();
        match self.until {
            Some(until) if until <= now => None,
            until => {
                let ends = until.map_or(now + ttl, |until| until.min(now + ttl));
                Some((ends, Keep::For { ttl, until }))
            }
        }
    }
}

/// The watched holds of a generation. Most generations have one, which is stored inline: a client
/// may hold many locks.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Watches {
    None,
    One(Watched),
    Many(Vec<Watched>),
}

impl Watches {
    pub(crate) fn iter(&self) -> slice::Iter<'_, Watched> {
        match self {
            Self::None => [].iter(),
            Self::One(watched) => slice::from_ref(watched).iter(),
            Self::Many(watched) => watched.iter(),
        }
    }

    pub(crate) fn push(&mut self, watched: Watched) {
        *self = match std::mem::replace(self, Self::None) {
            Self::None => Self::One(watched),
            Self::One(first) => Self::Many(vec![first, watched]),
            Self::Many(mut many) => {
                many.push(watched);
                Self::Many(many)
            }
        };
    }

    pub(crate) fn remove(&mut self, at: usize) {
        match self {
            Self::Many(many) => _ = many.remove(at),
            Self::None | Self::One(_) => *self = Self::None,
        }
    }
}
