//! A clock that keeps counting while the machine sleeps.
//!
//! The server's clock does not stop when this machine is suspended, or when its VM is paused or
//! moved; `CLOCK_MONOTONIC`, which [`std::time::Instant`] reads on Linux, does. So leases use
//! `CLOCK_BOOTTIME` (on Apple systems `CLOCK_MONOTONIC`, which counts sleep there). Other systems
//! use the clock of `std`.

use std::{
    num::NonZeroU64,
    ops::{Add, Sub},
    sync::LazyLock,
    time::Duration,
};

/// A moment on this machine: nanoseconds since a fixed moment, with a range of 584 years. Sums
/// never overflow: they stop at [`Instant::NEVER`]. It is half the size of the `Instant` of `std`,
/// and an `Option` of it is no larger: each hold and waiter keeps several.
///
/// ```
/// use std::time::Duration;
///
/// use nestlock_wire::clock::Instant;
///
/// let end = Instant::now() + Duration::from_secs(30);
/// assert!(end > Instant::now() && end < Instant::NEVER);
/// assert_eq!(end.elapsed(), Duration::ZERO); // it is still to come
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(NonZeroU64);

/// Whether the clock counts sleep. Chosen once: readings of two clocks must never be compared.
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
    /// The earliest moment.
    pub const EARLIEST: Self = Self(NonZeroU64::MIN);

    /// The latest moment, which never comes.
    pub const NEVER: Self = Self(NonZeroU64::MAX);

    /// Returns this moment.
    #[must_use]
    pub fn now() -> Self {
        // if the clock fails, every lease counts as over
        Self::after(if *SLEEPLESS {
            since_boot().unwrap_or(Duration::MAX)
        } else {
            since_start()
        })
    }

    /// Returns the moment this long after the fixed moment.
    fn after(duration: Duration) -> Self {
        Self(NonZeroU64::MIN.saturating_add(nanos(duration)))
    }

    /// Returns how long ago this was.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        Self::now().saturating_duration_since(self)
    }

    /// Returns how long after `earlier` this is, or zero if it is not later.
    #[must_use]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    /// Returns the whole milliseconds since the fixed moment, rounded down.
    #[must_use]
    pub fn as_millis(self) -> u64 {
        self.0.get() / NANOS_OF_A_MILLI
    }

    /// Returns the moment this many milliseconds after the fixed moment.
    #[must_use]
    pub fn from_millis(millis: u64) -> Self {
        Self(NonZeroU64::new(millis.saturating_mul(NANOS_OF_A_MILLI)).unwrap_or(NonZeroU64::MIN))
    }
}

const NANOS_OF_A_MILLI: u64 = 1_000_000;

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;

    fn sub(self, duration: Duration) -> Self {
        Self(
            NonZeroU64::new(self.0.get().saturating_sub(nanos(duration)))
                .unwrap_or(NonZeroU64::MIN),
        )
    }
}

/// Returns whole milliseconds, rounded up.
///
/// ```
/// use std::time::Duration;
///
/// assert_eq!(nestlock_wire::clock::millis(Duration::from_micros(1_001)), 2);
/// ```
#[must_use]
pub fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
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
        assert!(
            (start - Duration::MAX).elapsed()
                >= start.saturating_duration_since(Instant::from_millis(0))
        );
    }

    #[test]
    fn milliseconds_are_rounded_down() {
        let at = Instant::from_millis(7);
        assert_eq!((at + Duration::from_micros(999)).as_millis(), 7);
        assert_eq!(
            (at + Duration::from_millis(1)).saturating_duration_since(at),
            Duration::from_millis(1)
        );
        assert_eq!((at - Duration::from_nanos(1)).as_millis(), 6);
    }

    #[test]
    fn it_is_small() {
        assert_eq!(size_of::<Option<Instant>>(), size_of::<u64>());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn on_linux_sleep_counts() {
        assert!(*SLEEPLESS);
    }
}
