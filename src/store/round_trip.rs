//! How long a request takes.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// In microseconds, at least as long as the last one took, and not much less than those before. Relaxed: nothing else
/// depends on it, and a sample that gets lost is one of many.
#[derive(Debug, Default)]
pub(super) struct RoundTrip(AtomicU64);

impl RoundTrip {
    /// One request, from when it was given to a connection to the answer over that connection. A future that is polled late
    /// takes its answer late: but for the first sample, one counts for twice of what is known at most.
    pub(super) fn take(&self, sample: Duration) {
        const NEW: u64 = 40_000;
        let known = self.0.load(Ordering::Relaxed);
        let sample = u64::try_from(sample.as_micros()).unwrap_or(u64::MAX);
        let sample = if known == 0 { sample } else { sample.min(known.saturating_mul(2).saturating_add(NEW)) };
        self.0.store(if sample >= known { sample } else { known - (known - sample) / 8 }, Ordering::Relaxed);
    }

    /// With a quarter more: they vary.
    pub(super) fn get(&self) -> Duration {
        let micros = self.0.load(Ordering::Relaxed);
        Duration::from_micros(micros.saturating_add(micros / 4))
    }
}
