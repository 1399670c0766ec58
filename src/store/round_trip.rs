//! How long a request takes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// At least as long as the last two requests took, and not much less than those before. Relaxed: nothing else depends on it,
/// and a sample that gets lost is one of many.
#[derive(Debug)]
pub(super) struct RoundTrip {
    /// In microseconds; zero: not known yet.
    known: AtomicU64,
    /// The last sample.
    last: AtomicU64,
    /// When that was taken, in microseconds after the beginning.
    taken: AtomicU64,
    beginning: Instant,
}

impl RoundTrip {
    pub(super) fn new() -> Self {
        Self { known: 0.into(), last: 0.into(), taken: 0.into(), beginning: Instant::now() }
    }

    /// The answer has come to a request that was given to a connection at this time, over that connection.
    ///
    /// A process that was stopped takes its answers late, and so does a future that nobody polls. So of requests that were
    /// under way together one counts; of two samples the shorter one; and that for twice of what is known at most.
    pub(super) fn take(&self, sent: Instant) {
        const NEW: u64 = 40_000;
        let now = Instant::now();
        let since_beginning = |time: Instant| micros(time.saturating_duration_since(self.beginning));
        if since_beginning(sent) < self.taken.load(Ordering::Relaxed) {
            return;
        }
        self.taken.store(since_beginning(now), Ordering::Relaxed);
        let sample = micros(now - sent).max(1);
        let (known, last) = (self.known.load(Ordering::Relaxed), self.last.swap(sample, Ordering::Relaxed));
        // the first one has to do
        let sample =
            if known == 0 { sample } else { sample.min(last).min(known.saturating_mul(2).saturating_add(NEW)) };
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
    fn requests_that_a_pause_made_late_together_do_not_count() {
        let (round_trip, sent) = (RoundTrip::new(), Instant::now());
        round_trip.take(sent);
        sleep(Duration::from_millis(300));
        for _ in 0..10 {
            round_trip.take(sent);
        }
        assert!(round_trip.get() < Duration::from_millis(10), "{:?}", round_trip.get());
        // nor does the next one make it count
        round_trip.take(Instant::now());
        assert!(round_trip.get() < Duration::from_millis(10), "{:?}", round_trip.get());
    }

    #[test]
    fn a_link_that_is_slower_from_now_on_is_known_by_the_second_request() {
        let round_trip = RoundTrip::new();
        round_trip.take(Instant::now());
        for slow in [false, true] {
            let sent = Instant::now();
            sleep(Duration::from_millis(30));
            round_trip.take(sent);
            assert_eq!(round_trip.get() >= Duration::from_millis(37), slow, "{:?}", round_trip.get());
        }
    }

    #[test]
    fn what_is_faster_counts_little_by_little() {
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
