//! How long a request takes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::clock::Instant;

/// How long requests took lately: all of them, and those that stood behind no `WAIT`.
#[derive(Debug)]
pub(super) struct RoundTrip {
    all: Known,
    free: Known,
    beginning: Instant,
}

/// At least as long as the last request took, and not much less than those before. Relaxed: nothing else depends on it, and
/// a sample that gets lost is one of many.
#[derive(Debug, Default)]
struct Known {
    /// In microseconds; zero: not known yet.
    known: AtomicU64,
    /// When the last sample was taken, in microseconds after the beginning.
    taken: AtomicU64,
}

impl RoundTrip {
    pub(super) fn new() -> Self {
        Self { all: Known::default(), free: Known::default(), beginning: Instant::now() }
    }

    /// The answer has come to a PING of the link's own, which is polled at once: the first one is believed.
    pub(super) fn take_ping(&self, sent: Instant, is_held_up: bool) {
        let took = micros(sent.elapsed()).max(1);
        for known in self.those(is_held_up) {
            let _ = known.known.compare_exchange(0, took, Ordering::Relaxed, Ordering::Relaxed);
        }
        self.take(sent, is_held_up);
    }

    /// The answer has come to a request that was given to a connection at this time, over that connection.
    ///
    /// A process that was stopped takes its answers late, and so does a future that nobody polls. So of requests that were
    /// under way together one counts, and for twice of what is known at most.
    pub(super) fn take(&self, sent: Instant, is_held_up: bool) {
        let since_beginning = |time: Instant| micros(time.saturating_duration_since(self.beginning));
        let sent = since_beginning(sent);
        if self.those(is_held_up).any(|known| known.counts(sent)) {
            let now = since_beginning(Instant::now());
            self.those(is_held_up).filter(|known| known.counts(sent)).for_each(|known| known.take(sent, now));
        }
    }

    fn those(&self, is_held_up: bool) -> impl Iterator<Item = &Known> {
        [&self.all].into_iter().chain((!is_held_up).then_some(&self.free))
    }

    /// With a quarter more: they vary.
    pub(super) fn get(&self) -> Duration {
        self.all.get()
    }

    /// The same of those that stood behind no `WAIT`.
    pub(super) fn free(&self) -> Duration {
        self.free.get()
    }
}

impl Known {
    fn counts(&self, sent: u64) -> bool {
        sent >= self.taken.load(Ordering::Relaxed)
    }

    fn take(&self, sent: u64, now: u64) {
        const NEW: u64 = 40_000;
        self.taken.store(now, Ordering::Relaxed);
        let known = self.known.load(Ordering::Relaxed);
        let sample = now.saturating_sub(sent).clamp(1, known.saturating_mul(2).saturating_add(NEW));
        self.known.store(if sample >= known { sample } else { known - (known - sample) / 16 }, Ordering::Relaxed);
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
        // the pause counts for 40 ms, and a quarter
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
