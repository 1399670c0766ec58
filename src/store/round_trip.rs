//! How long a request takes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// At least as long as the last request took, and not much less than those before. Relaxed: nothing else depends on it, and
/// a sample that gets lost is one of many.
#[derive(Debug)]
pub(super) struct RoundTrip {
    /// In microseconds; zero: not known yet.
    known: AtomicU64,
    /// When the last sample was taken, in microseconds after the beginning.
    taken: AtomicU64,
    beginning: Instant,
}

impl RoundTrip {
    pub(super) fn new() -> Self {
        Self { known: AtomicU64::new(0), taken: AtomicU64::new(0), beginning: Instant::now() }
    }

    /// The answer has come to a request that was given to a connection at this time, over that connection.
    ///
    /// A process that was stopped, or a future that is polled late, takes its answer late. So of requests that were under way
    /// together one counts, and but for the first sample, it counts for twice of what is known at most.
    pub(super) fn take(&self, sent: Instant) {
        const NEW: u64 = 40_000;
        let now = Instant::now();
        let since_beginning = |time: Instant| micros(time.saturating_duration_since(self.beginning));
        if since_beginning(sent) < self.taken.load(Ordering::Relaxed) {
            return;
        }
        self.taken.store(since_beginning(now), Ordering::Relaxed);
        let (known, sample) = (self.known.load(Ordering::Relaxed), micros(now - sent).max(1));
        let sample = if known == 0 { sample } else { sample.min(known.saturating_mul(2).saturating_add(NEW)) };
        self.known.store(if sample >= known { sample } else { known - (known - sample) / 8 }, Ordering::Relaxed);
    }

    /// With a quarter more: they vary.
    pub(super) fn get(&self) -> Duration {
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
        round_trip.take(sent);
        sleep(Duration::from_millis(300));
        for _ in 0..10 {
            round_trip.take(sent);
        }
        // the pause counts for 40 ms, and a quarter
        let known = round_trip.get();
        assert!(known > Duration::from_millis(49) && known < Duration::from_millis(60), "{known:?}");
    }

    #[test]
    fn what_is_slower_counts_at_once_and_what_is_faster_little_by_little() {
        let round_trip = RoundTrip::new();
        sleep(Duration::from_millis(40));
        round_trip.take(round_trip.beginning);
        let slow = round_trip.get();
        assert!(slow >= Duration::from_millis(50));
        round_trip.take(Instant::now());
        assert!(round_trip.get() < slow && round_trip.get() > slow.mul_f64(0.8));
        for _ in 0..50 {
            round_trip.take(Instant::now());
        }
        assert!(round_trip.get() < slow.mul_f64(0.2));
    }
}
