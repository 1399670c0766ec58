//! The clock that all processes of one machine share.

use std::time::Instant;

/// Returns the nanoseconds of CLOCK_MONOTONIC, parsed from the debug output of `Instant`.
pub fn monotonic_ns() -> u64 {
    let printed = format!("{:?}", Instant::now());
    let mut numbers = printed
        .split(|c: char| !c.is_ascii_digit())
        .filter(|part| !part.is_empty());
    let mut next = || {
        numbers
            .next()
            .expect("seconds and nanoseconds")
            .parse::<u64>()
            .expect("a number")
    };
    next() * 1_000_000_000 + next()
}
