//! What a seed decides before anything runs: the lock kind, the clocks, the mix of faults.

use std::{str::FromStr, time::Duration};

use nestlock::{Lock, LockClient, RedLockOptions, Result};

use crate::{
    checks::{Mode, lock_name},
    faults::Fault,
    kernel::{Clock, MILLI, Rng, SECOND},
    net,
};

/// Locks that all fight for.
pub(crate) const LOCKS: u64 = 2;
/// As many processes as crashes may make.
pub(crate) const MOST_PROCESSES: usize = 40;
/// The watchdog timeout.
pub(crate) const TTL: u64 = 3 * SECOND;
/// The longest patience of a waiter in a fair queue.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// Which locks are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Reentrant,
    /// One lock that many tasks of a process want for a moment.
    Relay,
    Mutex,
    NonReentrant,
    Fair,
    Fenced,
    ReadWrite,
    Spin,
    String,
    Signal,
    /// Both locks at once, or one of them.
    Multi,
    Red3,
    Red5,
    /// One record through all doors that lead to it.
    Mixed,
}

pub(crate) const KINDS: [(&str, Kind); 14] = [
    ("reentrant", Kind::Reentrant),
    ("relay", Kind::Relay),
    ("mutex", Kind::Mutex),
    ("non_reentrant", Kind::NonReentrant),
    ("fair", Kind::Fair),
    ("fenced", Kind::Fenced),
    ("read_write", Kind::ReadWrite),
    ("spin", Kind::Spin),
    ("string", Kind::String),
    ("signal", Kind::Signal),
    ("multi", Kind::Multi),
    ("red3", Kind::Red3),
    ("red5", Kind::Red5),
    ("mixed", Kind::Mixed),
];

impl FromStr for Kind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
        found.ok_or_else(|| format!("no kind {name:?}; there are {}", KINDS.map(|(name, _)| name).join(", ")))
    }
}

/// A lock that a task may take.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) lock: Lock,
    pub(crate) names: Vec<String>,
    pub(crate) mode: Mode,
}

impl Kind {
    pub(crate) fn servers(self) -> usize {
        match self {
            Self::Red3 => 3,
            Self::Red5 => 5,
            _ => 1,
        }
    }

    /// Processes at a time. Each has connections to each server, which take time though nothing happens.
    pub(crate) fn processes(self) -> usize {
        if self.is_red() { 2 } else { 3 }
    }

    /// Tasks of each process.
    pub(crate) fn tasks(self) -> u64 {
        if self == Self::Relay { 8 } else { 3 }
    }

    /// Which of the locks a task wants next.
    pub(crate) fn next_lock(self, rng: &mut Rng) -> String {
        lock_name(if self == Self::Relay { 0 } else { rng.below(LOCKS) })
    }

    /// Of a hundred holds, how many end at once.
    pub(crate) fn momentary(self) -> u64 {
        if self == Self::Relay { 90 } else { 0 }
    }

    pub(crate) fn is_red(self) -> bool {
        self.servers() > 1
    }

    /// Whether an owner can take it again.
    pub(crate) fn nests(self) -> bool {
        matches!(
            self,
            Self::Reentrant
                | Self::Relay
                | Self::Fair
                | Self::Fenced
                | Self::ReadWrite
                | Self::Spin
                | Self::Multi
                | Self::Mixed
        )
    }

    pub(crate) fn has_values(self) -> bool {
        self == Self::String
    }

    /// A lock of this kind, by the clients of one process. `turn` draws among several doors; `inside`: held already so.
    pub(crate) fn lock(self, clients: &[LockClient], name: &str, turn: u64, inside: Option<Mode>) -> Result<Choice> {
        let client = &clients[0];
        let (mut names, mut mode) = (vec![name.to_owned()], Mode::Alone);
        let lock = match self {
            Self::Mutex => client.mutex(name),
            Self::NonReentrant => client.non_reentrant_lock(name),
            Self::Fair => client.fair_lock(name),
            Self::Fenced => client.fenced_lock(name),
            Self::Spin => client.spin_lock(name),
            Self::String => client.string_lock(name),
            Self::Signal => client.signal_lock(name),
            Self::ReadWrite => {
                let lock = client.read_write_lock(name)?;
                // who reads may not begin to write
                if inside == Some(Mode::WithReaders) || !turn.is_multiple_of(3) {
                    mode = Mode::WithReaders;
                    Ok(lock.read_lock())
                } else {
                    Ok(lock.write_lock())
                }
            }
            Self::Multi if turn.is_multiple_of(2) => {
                names = (0..LOCKS).map(lock_name).collect();
                if turn.is_multiple_of(4) {
                    names.reverse();
                }
                let members = names.iter().map(|name| client.reentrant_lock(name)).collect::<Result<Vec<_>>>()?;
                client.multi_lock(members)
            }
            // or one of them
            Self::Multi | Self::Reentrant | Self::Relay => client.reentrant_lock(name),
            Self::Red3 | Self::Red5 => {
                let options = RedLockOptions::new().expiry(Duration::from_nanos(TTL)).timeout_factor(0.2);
                LockClient::red_lock(clients, name, options)
            }
            Self::Mixed => match turn % 3 {
                0 => client.reentrant_lock(name),
                1 => client.fenced_lock(name),
                _ => client.spin_lock(name),
            },
        }?;
        Ok(Choice { lock, names, mode })
    }

    /// Whether the servers have no record that is in the way of a lock.
    pub(crate) fn is_free(self, lock: &str) -> bool {
        let key = if self == Self::Signal { format!("lock:{lock}") } else { lock.to_owned() };
        (0..self.servers()).all(|server| net::ask(server, &format!("EXISTS {key}")).starts_with(":0"))
    }
}

/// What a seed decides.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    /// How long tasks lock, in nanoseconds.
    pub(crate) end: u64,
    /// Which faults there are.
    pub(crate) faults: Vec<Fault>,
    /// The longest time between two of them.
    pub(crate) gap: u64,
    /// Milliseconds to the servers, one way.
    pub(crate) distance: u64,
    /// Of ten thousand looks at the clock, how many give the turn to another thread.
    pub(crate) interruptions: u64,
    /// The longest pause of a task between two locks, in ms.
    pub(crate) calm: u64,
    /// How far clocks go wrong, in millionths.
    pub(crate) drift: i64,
    /// Guards are given away; locks are freed by an operator.
    pub(crate) gives: bool,
    pub(crate) forces: bool,
}

impl Plan {
    pub(crate) fn new(seed: u64, kind: Kind, seconds: u64, with_faults: bool) -> Self {
        let mut rng = Rng(seed);
        // a mix of its own for each seed: what is rare in one is frequent in another
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
            gives: rng.chance(30),
            forces: with_faults && rng.chance(10),
        }
    }

    /// The clocks of all processes and servers.
    pub(crate) fn clocks(&self) -> Vec<Clock> {
        let mut rng = Rng(self.seed ^ 0xc10c);
        let clocks = MOST_PROCESSES + self.kind.servers();
        (0..clocks).map(|_| Clock::new(rng.between(0, 2 * self.drift as u64) as i64 - self.drift)).collect()
    }

    /// How long a silent waiter keeps its place: where that is no longer than a lease, releases grant the lock.
    pub(crate) fn patience(&self) -> Duration {
        if self.seed.is_multiple_of(2) { PATIENCE } else { Duration::from_nanos(TTL) }
    }

    /// How long a lock may be free while somebody waits for it.
    pub(crate) fn taken_within(&self) -> u64 {
        match self.kind {
            // the dead of a queue cost one patience
            Kind::Fair => PATIENCE.as_nanos() as u64 + 1_500 * MILLI,
            // the intent of a writer that is not polled keeps readers out for 2 s
            Kind::ReadWrite => 3_500 * MILLI,
            // nobody is told
            Kind::Red3 | Kind::Red5 => 3 * SECOND,
            // two that disturb each other make pauses
            Kind::Multi => (1_500 + 20 * self.distance) * MILLI,
            _ => 1_500 * MILLI,
        }
    }
}
