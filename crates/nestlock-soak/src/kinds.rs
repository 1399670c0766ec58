//! The kinds of lock, and how a task creates one.

use std::time::Duration;

use nestlock::{Error, Lock, LockClient, RedLockOptions};
use rand::{Rng, rngs::StdRng, seq::SliceRandom};

use crate::topology::SERVERS;

/// Locks of each kind.
const NAMES: usize = 2;
/// Locks that multi-locks are made of.
const MEMBERS: usize = 3;
/// Permits of each name.
pub(crate) const PERMITS: u32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    Mutex,
    Reentrant,
    Fair,
    ReadWrite,
    Fenced,
    Spin,
    String,
    NonReentrant,
    NonReentrantFair,
    Signal,
    Multi,
    Red,
    Permits,
    FairPermits,
    Semaphore,
}

impl Kind {
    pub(crate) const ALL: [Self; 15] = [
        Self::Mutex,
        Self::Reentrant,
        Self::Fair,
        Self::ReadWrite,
        Self::Fenced,
        Self::Spin,
        Self::String,
        Self::NonReentrant,
        Self::NonReentrantFair,
        Self::Signal,
        Self::Multi,
        Self::Red,
        Self::Permits,
        Self::FairPermits,
        Self::Semaphore,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mutex => "mutex",
            Self::Reentrant => "reentrant",
            Self::Fair => "fair",
            Self::ReadWrite => "read-write",
            Self::Fenced => "fenced",
            Self::Spin => "spin",
            Self::String => "string",
            Self::NonReentrant => "non-reentrant",
            Self::NonReentrantFair => "non-reentrant-fair",
            Self::Signal => "signal",
            Self::Multi => "multi",
            Self::Red => "red",
            Self::Permits => "permits",
            Self::FairPermits => "fair-permits",
            Self::Semaphore => "semaphore",
        }
    }

    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let all = Self::ALL.map(Self::name).join(", ");
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| format!("unknown kind {name}; the kinds are {all}"))
    }

    /// Returns `true` if an owner can acquire it again.
    pub(crate) fn nests(self) -> bool {
        matches!(
            self,
            Self::Reentrant
                | Self::Fair
                | Self::ReadWrite
                | Self::Fenced
                | Self::Spin
                | Self::Multi
        )
    }

    /// Returns `true` if a hold is one record with one owner, by which any process can release it.
    pub(crate) fn has_one_owner(self) -> bool {
        !matches!(self, Self::ReadWrite | Self::Multi | Self::Red)
    }

    pub(crate) fn has_permits(self) -> bool {
        matches!(self, Self::Permits | Self::FairPermits | Self::Semaphore)
    }

    /// Returns how many owners may hold it at once.
    pub(crate) fn holders(self) -> usize {
        if self.has_permits() {
            PERMITS as usize
        } else {
            1
        }
    }

    /// Returns `true` if waiters get it in the order of their requests.
    pub(crate) fn is_fair(self) -> bool {
        matches!(self, Self::Fair | Self::NonReentrantFair)
    }

    /// Returns `true` if its records are those of other systems, in which any text can be an owner.
    pub(crate) fn has_values(self) -> bool {
        matches!(self, Self::String | Self::Signal)
    }
}

/// How a hold shares its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    Alone,
    Shared,
}

impl Class {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::Shared => "shared",
        }
    }
}

/// A lock that a task takes.
#[derive(Debug, Clone)]
pub(crate) struct Choice {
    pub(crate) kind: Kind,
    pub(crate) lock: Lock,
    /// The names of its records: several for a multi-lock.
    pub(crate) names: Vec<String>,
    pub(crate) class: Class,
    /// Each acquire has an owner of its own.
    pub(crate) per_acquire: bool,
}

/// Returns the names of a kind's locks.
pub(crate) fn names(kind: Kind) -> Vec<String> {
    let count = if kind == Kind::Multi { MEMBERS } else { NAMES };
    (0..count)
        .map(|at| format!("{}:{at}", kind.name()))
        .collect()
}

impl Choice {
    /// Draws a lock of this kind. For a read-write lock, it draws the mode as well; for a
    /// multi-lock, the members.
    pub(crate) fn random(
        clients: &[LockClient],
        kind: Kind,
        expiry: Duration,
        rng: &mut StdRng,
    ) -> Self {
        let mut names = names(kind);
        names.shuffle(rng);
        let mut class = Class::Alone;
        match kind {
            // a member may also be taken alone
            Kind::Multi => names.truncate(if rng.random_ratio(1, 3) {
                1
            } else {
                rng.random_range(2..=MEMBERS)
            }),
            Kind::ReadWrite if rng.random_ratio(2, 3) => class = Class::Shared,
            _ => {}
        }
        if kind != Kind::Multi {
            names.truncate(1);
        }
        let per_acquire = kind == Kind::Mutex
            || kind.has_permits()
            || (kind != Kind::Red && rng.random_ratio(1, 8));
        Self::open(clients, kind, names, class, per_acquire, expiry).expect("good names")
    }

    /// Creates the lock again, to be acquired inside a hold of it. A writer may read.
    pub(crate) fn inner(&self, clients: &[LockClient], expiry: Duration, rng: &mut StdRng) -> Self {
        let class = if rng.random_ratio(1, 2) {
            Class::Shared
        } else {
            self.class
        };
        let class = if self.kind == Kind::ReadWrite {
            class
        } else {
            self.class
        };
        Self::open(clients, self.kind, self.names.clone(), class, false, expiry)
            .expect("the same names")
    }

    pub(crate) fn open(
        clients: &[LockClient],
        kind: Kind,
        names: Vec<String>,
        class: Class,
        per_acquire: bool,
        expiry: Duration,
    ) -> Result<Self, Error> {
        let (client, name) = (&clients[0], &names[0]);
        let lock = match kind {
            Kind::Mutex => client.mutex(name)?,
            Kind::Reentrant => client.reentrant_lock(name)?,
            Kind::Fair => client.fair_lock(name)?,
            Kind::ReadWrite if class == Class::Shared => client.read_write_lock(name)?.read_lock(),
            Kind::ReadWrite => client.read_write_lock(name)?.write_lock(),
            Kind::Fenced => client.fenced_lock(name)?,
            Kind::Spin => client.spin_lock(name)?,
            Kind::String => client.string_lock(name)?,
            Kind::NonReentrant => client.non_reentrant_lock(name)?,
            Kind::NonReentrantFair => client.non_reentrant_fair_lock(name)?,
            Kind::Signal => client.signal_lock(name)?,
            Kind::Permits => client.permits(name, PERMITS)?.many(1)?,
            Kind::FairPermits => client.permits(name, PERMITS)?.fair(true).many(1)?,
            Kind::Semaphore => client.semaphore(name)?.many(1)?,
            Kind::Multi if names.len() == 1 => client.reentrant_lock(name)?,
            Kind::Multi => {
                let members: Result<Vec<_>, _> = names
                    .iter()
                    .map(|name| client.reentrant_lock(name))
                    .collect();
                client.multi_lock(members?)?
            }
            Kind::Red => {
                // a share of the expiry that a busy machine can keep
                let options = RedLockOptions::new()
                    .expiry(expiry)
                    .timeout_factor(f64::from(ROUND) / 100.0);
                LockClient::red_lock(&clients[..SERVERS], name, options)?
            }
        };
        let lock = if per_acquire {
            lock.owner_per_acquire()
        } else {
            lock
        };
        Ok(Self {
            kind,
            lock,
            names,
            class,
            per_acquire,
        })
    }
}

/// How long a round of a RedLock may take, in percent of its expiry.
pub(crate) const ROUND: u8 = 15;
