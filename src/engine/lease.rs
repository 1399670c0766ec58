//! How long a hold lasts.

use std::{
    num::{NonZeroU32, NonZeroU64},
    time::Duration,
};

use crate::{
    clock::Instant,
    options::{millis, validity},
};

/// Whole milliseconds, one at least. Half as large as a [`Duration`], and an `Option` of it is no larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Millis(NonZeroU64);

impl Millis {
    /// Rounded up.
    pub(crate) fn of(duration: Duration) -> Self {
        Self(NonZeroU64::new(millis(duration)).unwrap_or(NonZeroU64::MIN))
    }

    pub(crate) fn get(self) -> u64 {
        self.0.get()
    }

    pub(crate) fn duration(self) -> Duration {
        Duration::from_millis(self.get())
    }
}

/// How long a hold lasts that is not released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lease {
    /// For as long as the watchdog renews it.
    Watched {
        /// What each renewal sets the TTL to; it is due after a third.
        ttl: Millis,
        /// How often the TTL may be set, by the acquire and by renewals; `None`: no limit.
        times: Option<NonZeroU32>,
    },
    /// For so long.
    Fixed(Millis),
    /// For ever: its record has no TTL.
    Endless,
}

impl Lease {
    /// What the server is asked for, in milliseconds; 0: no TTL.
    pub(crate) fn millis(self) -> u64 {
        match self {
            Self::Watched { ttl, .. } | Self::Fixed(ttl) => ttl.get(),
            Self::Endless => 0,
        }
    }

    /// Until when a hold may be relied on whose request was sent at this instant.
    pub(crate) fn valid_until(self, sent: Instant) -> Instant {
        match self {
            Self::Watched { ttl, .. } | Self::Fixed(ttl) => sent + validity(ttl.duration()),
            Self::Endless => Instant::NEVER,
        }
    }

    /// Until when a record lives whose request was sent at this instant, if nobody renews it.
    pub(crate) fn record_ends(self, sent: Instant) -> Instant {
        match self {
            Self::Watched { ttl, .. } | Self::Fixed(ttl) => sent + ttl.duration(),
            Self::Endless => Instant::NEVER,
        }
    }

    pub(crate) fn is_watched(self) -> bool {
        matches!(self, Self::Watched { .. })
    }
}

/// What a renewal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// This TTL.
    For(Duration),
    /// What is left of a lease.
    Until(Instant),
    /// Nothing: it only asks whether the record is there.
    AsItIs,
}

impl Keep {
    /// The TTL that a renewal sent now asks for, in whole milliseconds.
    pub(crate) fn ttl(self, now: Instant) -> Duration {
        let shortest = Duration::from_millis(1);
        match self {
            Self::For(ttl) => ttl,
            Self::Until(end) => {
                Duration::from_millis(end.saturating_duration_since(now).as_millis() as u64).max(shortest)
            }
            Self::AsItIs => shortest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_as_long_as_it_says() {
        let (sent, ttl) = (Instant::now(), Millis::of(Duration::from_secs(10)));
        let watched = Lease::Watched { ttl, times: None };
        for (lease, asked) in [(watched, 10_000), (Lease::Fixed(ttl), 10_000)] {
            assert_eq!(lease.millis(), asked);
            assert_eq!(lease.valid_until(sent).saturating_duration_since(sent), Duration::from_millis(9_898));
        }
        assert_eq!(Lease::Endless.millis(), 0);
        assert_eq!(Lease::Endless.valid_until(sent), Instant::NEVER);
        assert!(watched.is_watched() && !Lease::Fixed(ttl).is_watched());
    }

    #[test]
    fn milliseconds_are_rounded_up() {
        assert_eq!(Millis::of(Duration::from_micros(1001)).get(), 2);
        assert_eq!(Millis::of(Duration::ZERO).get(), 1);
    }
}
