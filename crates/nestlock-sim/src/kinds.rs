//! The locks that tasks compete for: their names, their kinds, and how long their holds last.

use std::{str::FromStr, time::Duration};

use nestlock::{Lock, LockClient, RedLockOptions, Result};

use crate::{clock::SECOND, rng::Rng};

/// How many locks the tasks compete for.
pub(crate) const LOCKS: u64 = 2;
/// The watchdog timeout, in nanoseconds.
pub(crate) const TTL: u64 = 3 * SECOND;
/// The longest patience of a waiter in a fair queue.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How many permits there are of each name.
pub(crate) const PERMITS: u32 = 3;

pub(crate) fn lock_name(number: u64) -> String {
    format!("l{number}")
}

/// How a hold shares its lock with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Alone,
    WithReaders,
    /// It has this many of the permits.
    Permits(u32),
}

impl Mode {
    /// Returns the hold count that a hold of this mode adds to its record.
    pub(crate) fn holds(self) -> u32 {
        match self {
            Self::Alone | Self::WithReaders => 1,
            Self::Permits(taken) => taken,
        }
    }
}

/// The kind of lock that tasks take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Reentrant,
    /// One mutex, which many tasks of each process take for a moment.
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
    Permits,
    /// Most of them are fair.
    FairPermits,
    /// Like permits, and their number changes.
    Semaphore,
    /// Not a lock: its waiters go on when its count is 0.
    Latch,
    /// One record, through all constructors that share it.
    Mixed,
}

pub(crate) const KINDS: [(&str, Kind); 18] = [
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
    ("permits", Kind::Permits),
    ("fair_permits", Kind::FairPermits),
    ("semaphore", Kind::Semaphore),
    ("latch", Kind::Latch),
    ("mixed", Kind::Mixed),
];

impl FromStr for Kind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = KINDS
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, kind)| *kind);
        found.ok_or_else(|| {
            format!(
                "unknown kind {name:?}; the kinds are {}",
                KINDS.map(|(name, _)| name).join(", ")
            )
        })
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

    /// Returns how many processes run at a time. RedLock has fewer: connections to several servers
    /// take time even if nothing happens.
    pub(crate) fn processes(self) -> usize {
        if self.is_red() { 2 } else { 3 }
    }

    /// Returns the number of tasks in each process.
    pub(crate) fn tasks(self) -> u64 {
        if self == Self::Relay { 8 } else { 3 }
    }

    /// Draws the lock that a task wants next.
    pub(crate) fn next_lock(self, rng: &mut Rng) -> String {
        lock_name(if self == Self::Relay {
            0
        } else {
            rng.below(LOCKS)
        })
    }

    /// Returns the percentage of holds that end at once.
    pub(crate) fn momentary(self) -> u64 {
        if self == Self::Relay { 90 } else { 0 }
    }

    pub(crate) fn is_red(self) -> bool {
        self.servers() > 1
    }

    /// Returns `true` if an owner can take the lock again.
    pub(crate) fn nests(self) -> bool {
        matches!(
            self,
            Self::Reentrant
                | Self::Fair
                | Self::Fenced
                | Self::ReadWrite
                | Self::Spin
                | Self::Multi
                | Self::Mixed
        )
    }

    pub(crate) fn has_permits(self) -> bool {
        matches!(self, Self::Permits | Self::FairPermits | Self::Semaphore)
    }

    pub(crate) fn has_values(self) -> bool {
        self == Self::String
    }

    /// Creates a lock of this kind, with the clients of one process. `turn` selects the constructor
    /// or the mode; `inside` is the mode in which the task holds the lock already.
    pub(crate) fn lock(
        self,
        clients: &[LockClient],
        name: &str,
        turn: u64,
        inside: Option<Mode>,
    ) -> Result<Choice> {
        let client = &clients[0];
        let (mut names, mut mode) = (vec![name.to_owned()], Mode::Alone);
        let lock = match self {
            Self::Mutex | Self::Relay => client.mutex(name),
            Self::NonReentrant => client.non_reentrant_lock(name),
            Self::Fair => client.fair_lock(name),
            Self::Fenced => client.fenced_lock(name),
            Self::Spin => client.spin_lock(name),
            Self::String => client.string_lock(name),
            Self::Signal => client.signal_lock(name),
            Self::ReadWrite => {
                let lock = client.read_write_lock(name)?;
                // a reader must not begin to write
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
                let members = names
                    .iter()
                    .map(|name| client.reentrant_lock(name))
                    .collect::<Result<Vec<_>>>()?;
                client.multi_lock(members)
            }
            // otherwise one of the members
            Self::Multi | Self::Reentrant => client.reentrant_lock(name),
            Self::Red3 | Self::Red5 => {
                let options = RedLockOptions::new()
                    .expiry(Duration::from_nanos(TTL))
                    .timeout_factor(0.2);
                LockClient::red_lock(clients, name, options)
            }
            Self::Permits | Self::FairPermits | Self::Semaphore => {
                let taken = if turn.is_multiple_of(4) { 2 } else { 1 };
                mode = Mode::Permits(taken);
                if self == Self::Semaphore {
                    client.semaphore(name)?.many(taken)
                } else {
                    let is_fair = self == Self::FairPermits && !turn.is_multiple_of(5);
                    client.permits(name, PERMITS)?.fair(is_fair).many(taken)
                }
            }
            Self::Latch => unreachable!("no lock"),
            Self::Mixed => match turn % 3 {
                0 => client.reentrant_lock(name),
                1 => client.fenced_lock(name),
                _ => client.spin_lock(name),
            },
        }?;
        Ok(Choice { lock, names, mode })
    }

    /// Returns the key of a lock's record.
    pub(crate) fn key(self, lock: &str) -> String {
        match self {
            Self::Signal => format!("lock:{lock}"),
            Self::Permits | Self::FairPermits => format!("{{{lock}}}:timeout"),
            Self::Semaphore => format!("nestlock_semaphore_leases:{{{lock}}}"),
            _ => lock.to_owned(),
        }
    }
}
