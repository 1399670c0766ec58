//! How long a request takes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::clock::Instant;

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
        Self { known: 0.into(), taken: 0.into(), beginning: Instant::now() }
    }

    /// The answer has come to a PING of the link's own, which is polled at once: the first one is believed.
    pub(super) fn take_ping(&self, sent: Instant) {
        if self.known.load(Ordering::Relaxed) == 0 {
            self.known.store(micros(sent.elapsed()).max(1), Ordering::Relaxed);
        }
        self.take(sent);
    }

    /// The answer has come to a request that was given to a connection at this time, over that connection.
    ///
    /// A process that was stopped takes its answers late, and so does a future that nobody polls. So of requests that were
    /// under way together one counts, and for twice of what is known at most.
    pub(super) fn take(&self, sent: Instant) {
        const NEW: u64 = 40_000;
        let now = Instant::now();
        let since_beginning = |time: Instant| micros(time.saturating_duration_since(self.beginning));
        if since_beginning(sent) < self.taken.load(Ordering::Relaxed) {
            return;
        }
        self.taken.store(since_beginning(now), Ordering::Relaxed);
        let known = self.known.load(Ordering::Relaxed);
        let sample = micros(now.saturating_duration_since(sent)).clamp(1, known.saturating_mul(2).saturating_add(NEW));
        self.known.store(if sample >= known { sample } else { known - (known - sample) / 16 }, Ordering::Relaxed);
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
        sleep(Duration::from_millis(300));
        for _ in 0..10 {
            round_trip.take(sent);
        }
        // the pause counts for 40 ms, and a quarter
        assert_eq!(round_trip.get(), Duration::from_millis(50));
    }

    #[test]
    fn the_first_ping_is_believed() {
        let (round_trip, sent) = (RoundTrip::new(), Instant::now());
        sleep(Duration::from_millis(120));
        round_trip.take_ping(sent);
        assert!(round_trip.get() >= Duration::from_millis(150));
    }

    #[test]
    fn what_is_faster_counts_little_by_little() {
        let round_trip = RoundTrip::new();
        sleep(Duration::from_millis(40));
        round_trip.take_ping(round_trip.beginning);
        let slow = round_trip.get();
        assert!(slow >= Duration::from_millis(50));
        round_trip.take(Instant::now());
        assert!(round_trip.get() < slow && round_trip.get() > slow.mul_f64(0.8));
        for _ in 0..100 {
            round_trip.take(Instant::now());
        }
        assert!(round_trip.get() < slow.mul_f64(0.2));
    }
}
