//! The clock that all processes of a machine share.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

pub(crate) const MILLI: u64 = 1_000_000;
pub(crate) const SECOND: u64 = 1000 * MILLI;

/// Returns the time on `CLOCK_MONOTONIC`, in nanoseconds.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("every Unix has this clock");
    u64::try_from(time.tv_sec()).expect("after the boot") * SECOND + time.tv_nsec().unsigned_abs()
}

pub(crate) fn seconds(nanos: u64) -> f64 {
    Duration::from_nanos(nanos).as_secs_f64()
}

/// Blocks this thread until `time`.
pub(crate) fn sleep_until(time: u64) {
    std::thread::sleep(Duration::from_nanos(time.saturating_sub(now())));
}

/// Waits until `state` returns `true`. Returns `false` if it does not within `limit` nanoseconds.
pub(crate) fn wait_for(limit: u64, mut state: impl FnMut() -> bool) -> bool {
    let until = now() + limit;
    while !state() {
        if now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_nanos(5 * MILLI));
    }
    true
}
