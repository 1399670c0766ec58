//! The plan of a run, made before anything runs: the kind of lock, the clocks, the mix of faults.

use std::time::Duration;

use crate::{
    clock::{Clock, MILLI, SECOND},
    faults::Fault,
    kinds::{Kind, PATIENCE, TTL},
    rng::Rng,
};

/// The upper bound of process numbers. Process 0 is the simulator itself, and each restart after a
/// crash uses a new number.
pub(crate) const MOST_PROCESSES: usize = 40;

/// The plan of a run, fixed before it starts.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    /// How long tasks acquire locks, in nanoseconds.
    pub(crate) end: u64,
    /// The mix of faults.
    pub(crate) faults: Vec<Fault>,
    /// The longest time between two faults, in nanoseconds.
    pub(crate) gap: u64,
    /// The delay to the servers, one way, in milliseconds.
    pub(crate) distance: u64,
    /// How many of 10,000 reads of the clock pass the turn to another thread.
    pub(crate) interruptions: u64,
    /// How far a pause of a task between two locks may exceed 30 ms, in milliseconds.
    pub(crate) calm: u64,
    /// The largest drift of a clock, in millionths.
    pub(crate) drift: i64,
    /// Tasks give guards away.
    pub(crate) gives: bool,
    /// An operator frees locks.
    pub(crate) forces: bool,
}

impl Plan {
    pub(crate) fn new(seed: u64, kind: Kind, seconds: u64, with_faults: bool) -> Self {
        let mut rng = Rng(seed);
        // each seed has its own mix: a fault that is rare in one is frequent in another
        let mut faults = Vec::new();
        if with_faults {
            faults.extend(Fault::ALL.into_iter().filter(|_| rng.chance(25)));
            if faults.is_empty() {
                faults.push(rng.pick(&Fault::ALL));
            }
        }
        Self {
            seed,
            kind,
            end: seconds * SECOND,
            faults,
            gap: rng.pick(&[SECOND / 4, SECOND, 4 * SECOND]),
            distance: rng.pick(&[0, 0, 0, 0, 0, 25, 100]),
            interruptions: rng.pick(&[0, 0, 50, 500]),
            calm: rng.pick(&[0, 0, 0, 2_000]),
            drift: 3_000,
            gives: rng.chance(30) && kind != Kind::Latch,
            forces: with_faults && rng.chance(10) && kind != Kind::Latch,
        }
    }

    /// Returns the clocks of all processes and servers.
    pub(crate) fn clocks(&self) -> Vec<Clock> {
        let mut rng = Rng(self.seed ^ 0xc10c);
        let clocks = MOST_PROCESSES + self.kind.servers();
        (0..clocks)
            .map(|_| Clock::new(rng.between(0, 2 * self.drift as u64) as i64 - self.drift))
            .collect()
    }

    /// Returns how long a silent waiter keeps its place in a fair queue. Where that is no longer
    /// than a lease, releases grant the lock to the next waiter.
    pub(crate) fn patience(&self) -> Duration {
        if self.seed.is_multiple_of(2) {
            PATIENCE
        } else {
            Duration::from_nanos(TTL)
        }
    }

    /// Returns how long a lock may be free while a task waits for it, in nanoseconds.
    pub(crate) fn taken_within(&self) -> u64 {
        match self.kind {
            // dead waiters in the queue cost one patience
            Kind::Fair | Kind::FairPermits => PATIENCE.as_nanos() as u64 + 1_500 * MILLI,
            // the intent of a writer that is not polled keeps readers out for 2 s
            Kind::ReadWrite => 3_500 * MILLI,
            // waiters are not notified
            Kind::Red3 | Kind::Red5 => 3 * SECOND,
            // tasks that get in each other's way back off
            Kind::Multi => (1_500 + 20 * self.distance) * MILLI,
            _ => 1_500 * MILLI,
        }
    }
}
