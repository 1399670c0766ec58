//! Leases: how long a hold lasts, and what a renewal requests.

use std::{num::NonZeroU64, time::Duration};

use nestlock_wire::clock::{Instant, millis};

use crate::{options::validity, store::Renewed};

/// The server's reply to a renewal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RenewalReply {
    pub(crate) renewed: Renewed,
    /// When the renewal was sent: the TTL counts from here.
    pub(crate) sent: Instant,
    pub(crate) ttl: Duration,
    /// When the next renewal is due. `None`: unchanged.
    pub(crate) next: Option<Instant>,
}

/// Whole milliseconds, at least 1. Half as large as a [`Duration`], and an `Option` of it is no
/// larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Millis(NonZeroU64);

impl Millis {
    /// Converts a duration, rounded up.
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

/// How long a hold lasts unless it is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lease {
    /// For as long as the watchdog renews it.
    Watched {
        /// The TTL that each renewal sets. The next one is due after a third of it.
        ttl: Millis,
        /// How long after its acquire the hold ends at the latest. `None`: no limit.
        max_hold: Option<Millis>,
    },
    /// For this time.
    Fixed(Millis),
    /// Without end: the record has no TTL.
    Endless,
}

impl Lease {
    /// Returns the TTL that an acquire requests, in milliseconds. 0: no TTL.
    pub(crate) fn millis(self) -> u64 {
        match self {
            Self::Watched { ttl, .. } | Self::Fixed(ttl) => ttl.get(),
            Self::Endless => 0,
        }
    }

    /// Returns until when guards may rely on a hold whose request was sent at `sent`.
    pub(crate) fn valid_until(self, sent: Instant) -> Instant {
        match self {
            Self::Watched { ttl, .. } | Self::Fixed(ttl) => sent + validity(ttl.duration()),
            Self::Endless => Instant::NEVER,
        }
    }

    /// Returns until when a record lives whose request was sent at `sent`, unless it is renewed.
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

/// What a renewal does to the TTL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Sets this TTL, but not beyond `until`. A renewal may be sent later than it is planned.
    For {
        ttl: Duration,
        until: Option<Instant>,
    },
    /// Sets the remainder of a lease that ends at this instant.
    Until(Instant),
    /// Sets nothing: only checks that the record exists.
    AsItIs,
}

impl Keep {
    /// Returns the TTL that a renewal sent at `now` requests, in whole milliseconds and at least 1.
    pub(crate) fn ttl(self, now: Instant) -> Duration {
        let shortest = Duration::from_millis(1);
        let left = |end: Instant| {
            let left = end.saturating_duration_since(now).as_millis() as u64;
            Duration::from_millis(left).max(shortest)
        };
        match self {
            Self::For { ttl, until } => until.map_or(ttl, |until| ttl.min(left(until))),
            Self::Until(end) => left(end),
            // The scripts only raise a TTL, so this one changes nothing.
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
        let watched = Lease::Watched {
            ttl,
            max_hold: None,
        };
        for (lease, asked) in [(watched, 10_000), (Lease::Fixed(ttl), 10_000)] {
            assert_eq!(lease.millis(), asked);
            assert_eq!(
                lease.valid_until(sent).saturating_duration_since(sent),
                Duration::from_millis(9_898)
            );
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
