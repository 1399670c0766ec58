//! Estimates how long a request takes.
//!
//! Bounded waits end by it, so a refused PING counts as well: a loading server replies to nothing
//! else. Of requests in flight together one counts. There are two estimates: one with the requests
//! behind a WAIT, by which the watchdog knows how many renewals to keep in flight, and one without,
//! by which bounded waits end.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::clock::Instant;

/// How long recent requests took: all of them, and those that were not behind a `WAIT`.
#[derive(Debug)]
pub(crate) struct RoundTrip {
    all: Known,
    free: Known,
    beginning: Instant,
}

/// An estimate that rises at once with a slower request, and falls slowly with faster ones. Its
/// atomics are relaxed: nothing else depends on them, and a lost sample is one of many.
#[derive(Debug, Default)]
struct Known {
    /// In microseconds; 0 while unknown.
    known: AtomicU64,
    /// When the last sample was taken, in microseconds after the beginning.
    taken: AtomicU64,
}

impl RoundTrip {
    pub(crate) fn new() -> Self {
        Self {
            all: Known::default(),
            free: Known::default(),
            beginning: Instant::now(),
        }
    }

    /// Records the reply to a PING of the link itself. Such a PING is polled at once, so the first
    /// one counts in full.
    pub(crate) fn take_ping(&self, sent: Instant, is_held_up: bool) {
        let took = micros(sent.elapsed()).max(1);
        for known in self.samples(is_held_up) {
            let _ = known
                .known
                .compare_exchange(0, took, Ordering::Relaxed, Ordering::Relaxed);
        }
        self.take(sent, is_held_up);
    }

    /// Records the reply to a request that was given to its connection at `sent`.
    ///
    /// A process that was stopped reads its replies late, and so does a future that is not polled.
    /// So only one of the requests that were in flight together counts, and for at most twice the
    /// estimate plus 40 ms.
    pub(crate) fn take(&self, sent: Instant, is_held_up: bool) {
        let since_beginning =
            |time: Instant| micros(time.saturating_duration_since(self.beginning));
        let sent = since_beginning(sent);
        if self.samples(is_held_up).any(|known| known.counts(sent)) {
            let now = since_beginning(Instant::now());
            self.samples(is_held_up)
                .filter(|known| known.counts(sent))
                .for_each(|known| known.take(sent, now));
        }
    }

    fn samples(&self, is_held_up: bool) -> impl Iterator<Item = &Known> {
        [&self.all]
            .into_iter()
            .chain((!is_held_up).then_some(&self.free))
    }

    /// Returns the estimate for all requests, plus a quarter, because they vary.
    pub(crate) fn get(&self) -> Duration {
        self.all.get()
    }

    /// Returns the same for requests that were not behind a `WAIT`.
    pub(crate) fn free(&self) -> Duration {
        self.free.get()
    }
}

impl Known {
    fn counts(&self, sent: u64) -> bool {
        sent >= self.taken.load(Ordering::Relaxed)
    }

    fn take(&self, sent: u64, now: u64) {
        // in microseconds: the cap on a sample while nothing is known
        const NEW: u64 = 40_000;
        self.taken.store(now, Ordering::Relaxed);
        let known = self.known.load(Ordering::Relaxed);
        let sample = now
            .saturating_sub(sent)
            .clamp(1, known.saturating_mul(2).saturating_add(NEW));
        self.known.store(
            if sample >= known {
                sample
            } else {
                known - (known - sample) / 16
            },
            Ordering::Relaxed,
        );
    }

    fn get(&self) -> Duration {
        let known = self.known.load(Ordering::Relaxed);
        Duration::from_micros(known.saturating_add(known / 4))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::*;

    #[test]
    fn requests_that_a_pause_made_late_together_count_as_one() {
        let (round_trip, sent) = (RoundTrip::new(), Instant::now());
        sleep(Duration::from_millis(300));
        for _ in 0..10 {
            round_trip.take(sent, false);
        }
        // the pause counts for 40 ms, plus a quarter
        assert_eq!(round_trip.get(), Duration::from_millis(50));
    }

    #[test]
    fn what_stood_behind_a_wait_counts_apart() {
        let round_trip = RoundTrip::new();
        sleep(Duration::from_millis(30));
        round_trip.take_ping(round_trip.beginning, true);
        assert_eq!(round_trip.free(), Duration::ZERO);
        let sent = Instant::now();
        round_trip.take_ping(sent, false);
        assert!(round_trip.get() >= Duration::from_millis(30));
        assert!(round_trip.free() > Duration::ZERO && round_trip.free() < round_trip.get());
    }

    #[test]
    fn the_first_ping_is_believed() {
        let (round_trip, sent) = (RoundTrip::new(), Instant::now());
        sleep(Duration::from_millis(120));
        round_trip.take_ping(sent, false);
        assert!(round_trip.get() >= Duration::from_millis(150));
    }

    #[test]
    fn what_is_faster_counts_little_by_little() {
        let round_trip = RoundTrip::new();
        sleep(Duration::from_millis(40));
        round_trip.take_ping(round_trip.beginning, false);
        let slow = round_trip.get();
        assert!(slow >= Duration::from_millis(50));
        round_trip.take(Instant::now(), false);
        assert!(round_trip.get() < slow && round_trip.get() > slow.mul_f64(0.8));
        for _ in 0..100 {
            round_trip.take(Instant::now(), false);
        }
        assert!(round_trip.get() < slow.mul_f64(0.2));
    }
}
