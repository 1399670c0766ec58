//! The ledger of a run: the holds, tasks and faults of all processes, and what was wrong.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use nestlock::{Error, FencingToken, HandOver, LockClient, LockGuard, OwnerId};

use crate::{
    clock::{SECOND, now},
    kernel,
    kinds::{LOCKS, Mode, TTL, lock_name},
    numbers::{Latch, Total},
    process::as_process,
    trace::note,
};

/// Identifies a task: its process, and its number there.
pub(crate) type Who = (usize, u64);

/// A live guard, with what the ledger knows of it.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) who: Who,
    pub(crate) locks: Vec<String>,
    pub(crate) mode: Mode,
    pub(crate) guard: Arc<LockGuard>,
    pub(crate) since: u64,
    /// The hold has a fixed lease, so it may expire by itself.
    pub(crate) is_leased: bool,
    /// An earlier check found the guard lost.
    pub(crate) was_lost: bool,
    /// Since when exclusion is not promised, because the server lost the record or an operator
    /// freed the lock.
    pub(crate) void_since: Option<u64>,
    /// Another task acquired the lock while this guard lived.
    pub(crate) was_overtaken: bool,
}

/// What a task is doing.
#[derive(Debug, Clone)]
pub(crate) enum Doing {
    Acquires(Vec<String>),
    /// Read only through `Debug`, in the report on tasks that do not end.
    #[expect(dead_code)]
    Other(String),
}

/// A hold that was handed over or left to its lease, for another task to take over or release.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    pub(crate) lock: String,
    pub(crate) turn: u64,
    pub(crate) gift: Gift,
}

#[derive(Debug, Clone)]
pub(crate) enum Gift {
    /// The hold was left to its lease under this owner.
    Left(OwnerId),
    /// The hand-over may be adopted. The number says how often the lock had been acquired before
    /// it.
    HandedOver(HandOver, u64),
}

/// The ledger of a run.
#[derive(Debug, Default)]
pub(crate) struct Book {
    pub(crate) held: BTreeMap<u64, Held>,
    pub(crate) last: u64,
    pub(crate) tasks: BTreeMap<Who, (u64, Doing)>,
    pub(crate) clients: Vec<(usize, LockClient)>,
    pub(crate) given: Vec<Given>,
    /// What each task is taking over. If the task's process crashes, it returns to `given`.
    pub(crate) taking: BTreeMap<Who, Given>,
    /// How often each lock was acquired.
    pub(crate) entries: BTreeMap<String, u64>,
    pub(crate) tokens: BTreeMap<String, (FencingToken, Who)>,
    /// Until when a fault may keep each process from renewing.
    pub(crate) disturbed: BTreeMap<usize, u64>,
    /// How often the user's runtime of each process was paused.
    pauses: BTreeMap<usize, u64>,
    /// The longest of these pauses, in nanoseconds of true time.
    pub(crate) longest_pause: BTreeMap<usize, u64>,
    /// The longest time that bytes to or from each process were in flight, in nanoseconds.
    pub(crate) longest: BTreeMap<usize, u64>,
    /// When the server last executed a late request of each process.
    pub(crate) late: BTreeMap<usize, u64>,
    /// Until when holds of each lock may vanish.
    void_until: BTreeMap<String, u64>,
    /// Until when a forced release may still be executed, by lock and requesting process.
    forced_until: BTreeMap<(String, usize), u64>,
    /// Since when each lock has been free although a task waits for it.
    pub(crate) free: BTreeMap<String, u64>,
    /// Waiters seen in the queue of each fair lock within the last second: when each one arrived,
    /// and when it was last seen.
    pub(crate) queues: BTreeMap<String, BTreeMap<String, (u64, u64)>>,
    /// The task behind each waiter's name.
    pub(crate) waiters: BTreeMap<String, Who>,
    /// Fair locks acquired since the last check: the task, the lock, and when the task's waiter
    /// arrived in the queue.
    pub(crate) came_in: Vec<(Who, String, u64)>,
    /// How many permits each semaphore has.
    totals: BTreeMap<String, Total>,
    latches: BTreeMap<String, Latch>,
    /// How often the server has forgotten everything.
    pub(crate) era: u64,
    pub(crate) last_disturbed: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) wrong: Vec<String>,
}

static BOOK: Mutex<Option<Book>> = Mutex::new(None);

/// Runs `act` on the ledger. Its allocations belong to process 0, so they survive if the calling
/// process is killed.
pub(crate) fn book<R>(act: impl FnOnce(&mut Book) -> R) -> R {
    let act = || {
        act(BOOK
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default())
    };
    kernel::uninterrupted(|| as_process(0, act))
}

pub(crate) fn is_lost(who: Who, guard: &LockGuard) -> bool {
    as_process(who.0, || guard.is_lost())
}

/// Converts nanoseconds.
pub(crate) fn seconds(time: u64) -> f64 {
    time as f64 / SECOND as f64
}

pub(crate) fn count(what: &'static str) {
    book(|book| *book.counts.entry(what).or_default() += 1);
}

pub(crate) fn count_error(error: &Error) {
    let name = match error {
        Error::Lost { .. } => "Lost",
        Error::Store { .. } => "Store",
        Error::Unconfirmed { .. } => "Unconfirmed",
        Error::NotHeld { .. } => "NotHeld",
        Error::Closed => "Closed",
        Error::Connect { .. } => "Connect",
        Error::NoQuorum { .. } => "NoQuorum",
        Error::NotReentrant { .. } => "NotReentrant",
        Error::UpgradeRefused { .. } => "UpgradeRefused",
        Error::Unsettled { .. } => "Unsettled",
        Error::WrongLockKind { .. } => "WrongLockKind",
        _ => "another error",
    };
    // only the name: the error's text contains the path of a socket
    note("error", name.as_bytes());
    count(name);
}

/// Records a violated invariant.
pub(crate) fn wrong(what: impl FnOnce() -> String) {
    book(|book| book.wrong(&what()));
}

impl Book {
    /// Records a violated invariant.
    pub(crate) fn wrong(&mut self, what: &str) {
        note("WRONG", what.as_bytes());
        self.wrong.push(format!("{:.6} {what}", seconds(now())));
    }

    /// Records that a fault may keep these processes from renewing until `until`.
    pub(crate) fn disturb(&mut self, processes: impl IntoIterator<Item = usize>, until: u64) {
        self.last_disturbed = self.last_disturbed.max(until);
        for process in processes {
            let known = self.disturbed.entry(process).or_default();
            *known = (*known).max(until);
            // if the network falls silent again, a forced release in flight is delayed as well
            for ((_, by), forced) in &mut self.forced_until {
                if *by == process && *forced > now() {
                    *forced = (*forced).max(until + TTL);
                }
            }
        }
    }

    pub(crate) fn is_disturbed(&self, process: usize) -> bool {
        self.disturbed
            .get(&process)
            .is_some_and(|until| now() < *until + SECOND)
    }

    pub(crate) fn pause(&mut self, process: usize, until: u64) {
        self.last_disturbed = self.last_disturbed.max(until);
        *self.pauses.entry(process).or_default() += 1;
        let longest = self.longest_pause.entry(process).or_default();
        *longest = (*longest).max(until.saturating_sub(now()));
    }

    pub(crate) fn pauses(&self, process: usize) -> u64 {
        self.pauses.get(&process).copied().unwrap_or_default()
    }

    /// Records that the server lost these locks, or that an operator freed them. Their holds may
    /// vanish until `until`.
    pub(crate) fn void(&mut self, locks: &[String], until: u64) {
        let is_meant = |name: &String| locks.contains(name);
        for held in self
            .held
            .values_mut()
            .filter(|held| held.locks.iter().any(is_meant))
        {
            held.void_since.get_or_insert(now());
        }
        for name in (0..LOCKS).map(lock_name).filter(is_meant) {
            let known = self.void_until.entry(name).or_default();
            *known = (*known).max(until);
        }
    }

    pub(crate) fn total(&mut self, lock: &str) -> &mut Total {
        self.totals.entry(lock.to_owned()).or_default()
    }

    pub(crate) fn latch(&mut self, lock: &str) -> &mut Latch {
        self.latches.entry(lock.to_owned()).or_default()
    }

    /// Records that the server has forgotten everything. Holds may vanish until `until`.
    pub(crate) fn forgotten(&mut self, locks: &[String], until: u64) {
        self.void(locks, until);
        self.era += 1;
        for lock in locks {
            self.total(lock).forget();
            self.latch(lock).forget();
        }
    }

    /// Records that process `by` frees these locks from their holders. The request may be executed
    /// until `until`, or later if a fault delays it.
    pub(crate) fn forced(&mut self, locks: &[String], by: usize, until: u64) {
        self.void(locks, until);
        for lock in locks {
            let known = self.forced_until.entry((lock.clone(), by)).or_default();
            *known = (*known).max(until);
        }
    }

    /// Returns `true` if exclusion is currently not promised for at least one of these locks.
    pub(crate) fn may_vanish(&self, locks: &[String]) -> bool {
        let forced = |lock: &String| {
            self.forced_until
                .iter()
                .any(|((of, _), until)| of == lock && *until > now())
        };
        locks.iter().any(|lock| {
            self.void_until
                .get(lock)
                .is_some_and(|until| *until > now())
                || forced(lock)
        })
    }

    pub(crate) fn travelled(&mut self, process: usize, time: u64) {
        let known = self.longest.entry(process).or_default();
        *known = (*known).max(time);
    }

    pub(crate) fn entries(&self, lock: &str) -> u64 {
        self.entries.get(lock).copied().unwrap_or_default()
    }

    pub(crate) fn is_void(&self, number: u64) -> bool {
        self.held
            .get(&number)
            .is_some_and(|held| held.void_since.is_some())
    }

    /// Returns `true` if a late request may have set a hold count other than the expected one. The
    /// record still belongs to the owner, until the owner sets the count to zero.
    pub(crate) fn is_miscounted(&self, number: u64) -> bool {
        let late = |held: &Held| {
            self.late
                .get(&held.who.0)
                .is_some_and(|late| *late > held.since)
        };
        self.held.get(&number).is_some_and(late)
    }

    /// Removes everything that a killed process held in memory. Nothing is dropped: no code of that
    /// process may run any more.
    pub(crate) fn crash(&mut self, process: usize) {
        let gone: Vec<u64> = self
            .held
            .iter()
            .filter(|(_, held)| held.who.0 == process)
            .map(|(at, _)| *at)
            .collect();
        for at in gone {
            std::mem::forget(self.held.remove(&at));
        }
        self.tasks.retain(|who, _| who.0 != process);
        // another task may take over what this process was taking
        let taking = std::mem::take(&mut self.taking).into_iter();
        let (theirs, others): (BTreeMap<_, _>, _) = taking.partition(|(who, _)| who.0 == process);
        self.taking = others;
        self.given.extend(theirs.into_values());
        for at in (0..self.clients.len())
            .rev()
            .filter(|at| self.clients[*at].0 == process)
            .collect::<Vec<_>>()
        {
            std::mem::forget(self.clients.remove(at));
        }
    }
}

/// Registers `owner` as the name under which a task waits in queues.
pub(crate) fn waits_as(who: Who, owner: &OwnerId) {
    book(|book| _ = book.waiters.insert(owner.to_string(), who));
}

pub(crate) fn does(who: Who, what: Doing) {
    book(|book| _ = book.tasks.insert(who, (now(), what)));
}
