//! Virtual time: its units, true time, and the clocks, which drift and stand still while their
//! machine sleeps.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(crate) const MICRO: u64 = 1_000;
pub(crate) const MILLI: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1_000_000_000;

/// What every clock reads at the start.
const EPOCH: u64 = 1_000 * SECOND;

/// True time, in nanoseconds.
static NOW: AtomicU64 = AtomicU64::new(0);

/// Returns true time, in nanoseconds.
pub(crate) fn now() -> u64 {
    NOW.load(Relaxed)
}

/// Lets `nanos` pass. Returns true time after them.
pub(crate) fn pass(nanos: u64) -> u64 {
    NOW.fetch_add(nanos, Relaxed) + nanos
}

/// Lets time jump to `time`.
pub(crate) fn jump(time: u64) {
    NOW.store(time, Relaxed);
}

/// The clock of a process or a server.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Clock {
    /// How much faster than true time the clock runs, in millionths.
    drift: i64,
    /// How long the machine slept before `sleeps`, in nanoseconds.
    slept: u64,
    /// The beginning and the end of its latest sleep.
    sleeps: (u64, u64),
}

impl Clock {
    pub(crate) fn new(drift: i64) -> Self {
        Self {
            drift,
            slept: 0,
            sleeps: (0, 0),
        }
    }

    /// Returns how long the machine has slept by `now`, in true time.
    fn slept(&self, now: u64) -> u64 {
        self.slept + now.clamp(self.sleeps.0, self.sleeps.1) - self.sleeps.0
    }

    /// Returns what the clock reads at `now`, in true time.
    pub(crate) fn read(&self, now: u64, counts_sleep: bool) -> u64 {
        let slept = if counts_sleep { 0 } else { self.slept(now) };
        EPOCH + (now as i64 + now as i64 / 1_000_000 * self.drift) as u64 - slept
    }

    /// Returns when the clock will have advanced by `nanos`, in true time.
    pub(crate) fn after(&self, nanos: u64) -> u64 {
        now().saturating_add(
            (u128::from(nanos) * 1_000_000 / (1_000_000 + self.drift) as u128) as u64 + MICRO,
        )
    }

    /// Lets the machine sleep until the time `until`. Returns by how much that is longer than it
    /// sleeps already, and `None` if it is not.
    pub(crate) fn sleep(&mut self, until: u64) -> Option<u64> {
        let awake_until = now().max(self.sleeps.1);
        let slept = until.checked_sub(awake_until)?;
        self.slept = self.slept(awake_until);
        self.sleeps = (awake_until, until);
        Some(slept)
    }
}
