//! Time that goes on while the machine sleeps.
//!
//! The server's clock does not stop when this machine is suspended, or its VM is paused or moved; `CLOCK_MONOTONIC`,
//! which [`std::time::Instant`] reads on Linux, does. Leases are kept on `CLOCK_BOOTTIME` instead (on Apple systems
//! `CLOCK_MONOTONIC`, which counts sleep there). Elsewhere it is the clock of `std`.

use std::{
    ops::{Add, Sub},
    sync::LazyLock,
    time::Duration,
};

/// A moment of this machine, as the time since a fixed one. Sums never overflow: they end at the end of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

/// The clock, chosen once: two clocks must never be compared.
static SLEEPLESS: LazyLock<bool> = LazyLock::new(|| since_boot().is_some());

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn since_boot() -> Option<Duration> {
    use nix::time::{ClockId, clock_gettime};
    #[cfg(target_vendor = "apple")]
    const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;
    #[cfg(not(target_vendor = "apple"))]
    const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
    clock_gettime(CLOCK).ok().map(Duration::from)
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn since_boot() -> Option<Duration> {
    None
}

fn since_start() -> Duration {
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    START.elapsed()
}

impl Instant {
    pub(crate) fn now() -> Self {
        Self(if *SLEEPLESS { since_boot().unwrap_or(Duration::MAX) } else { since_start() })
    }

    pub(crate) fn elapsed(self) -> Duration {
        Self::now().saturating_duration_since(self)
    }

    /// How long after `earlier` this is; zero if it is not.
    pub(crate) fn saturating_duration_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Whole milliseconds of this clock, rounded down.
    pub(crate) fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn from_millis(millis: u64) -> Self {
        Self(Duration::from_millis(millis))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_moves_and_sums_do_not_overflow() {
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(5));
        assert!(start.elapsed() >= Duration::from_millis(5));
        let never = start + Duration::MAX;
        assert!(never > Instant::now());
        assert_eq!(start.saturating_duration_since(never), Duration::ZERO);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn on_linux_sleep_counts() {
        assert!(*SLEEPLESS);
    }
}
