//! The global view of a run: a ledger of the holds, tasks and faults of all processes, and the
//! invariants checked against it. No single process could check them.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
};

use nestlock::{Error, FencingToken, HandOver, LockClient, LockGuard, OwnerId};

use crate::{
    kernel::{self, MILLI, SECOND, note, now},
    net,
    plan::{Kind, LOCKS, PATIENCE, Plan, TTL},
    workload::words,
};

/// How a hold shares its lock with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Alone,
    WithReaders,
}

/// Identifies a task: its process, and its number there.
pub(crate) type Who = (usize, u64);

/// A live guard, with what the ledger knows of it.
#[derive(Debug)]
struct Held {
    who: Who,
    locks: Vec<String>,
    mode: Mode,
    guard: Arc<LockGuard>,
    since: u64,
    /// The hold has a fixed lease, so it may expire by itself.
    is_leased: bool,
    /// An earlier check found the guard lost.
    was_lost: bool,
    /// Since when exclusion is not promised, because the server lost the record or an operator
    /// freed the lock.
    void_since: Option<u64>,
    /// Another task acquired the lock while this guard lived.
    was_overtaken: bool,
}

/// What a task is doing.
#[derive(Debug, Clone)]
pub(crate) enum Doing {
    Acquires(Vec<String>),
    /// Read only through `Debug`, in the report on tasks that do not end.
    #[expect(dead_code)]
    Other(String),
}

/// A hold that was given away, for another task to take over.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    pub(crate) lock: String,
    pub(crate) turn: u64,
    pub(crate) gift: Gift,
}

#[derive(Debug, Clone)]
pub(crate) enum Gift {
    /// The hold must be released under this owner.
    Forgotten(OwnerId),
    /// The hand-over may be adopted. The number says how often the lock had been acquired before
    /// it.
    HandedOver(HandOver, u64),
}

/// The ledger of a run.
#[derive(Debug, Default)]
pub(crate) struct Book {
    held: BTreeMap<u64, Held>,
    last: u64,
    pub(crate) tasks: BTreeMap<Who, (u64, Doing)>,
    pub(crate) clients: Vec<(usize, LockClient)>,
    pub(crate) given: Vec<Given>,
    /// What each task is taking over. If the task's process crashes, it returns to `given`.
    pub(crate) taking: BTreeMap<Who, Given>,
    /// How often each lock was acquired.
    entries: BTreeMap<String, u64>,
    tokens: BTreeMap<String, (FencingToken, Who)>,
    /// Until when a fault may keep each process from renewing.
    disturbed: BTreeMap<usize, u64>,
    /// How often the user's runtime of each process was paused.
    pauses: BTreeMap<usize, u64>,
    /// The longest of these pauses, in nanoseconds of true time.
    longest_pause: BTreeMap<usize, u64>,
    /// The longest time that bytes to or from each process were in flight, in nanoseconds.
    longest: BTreeMap<usize, u64>,
    /// When the server last executed a late request of each process.
    pub(crate) late: BTreeMap<usize, u64>,
    /// Until when holds of each lock may vanish.
    void_until: BTreeMap<String, u64>,
    /// Until when a forced release may still be executed, by lock and requesting process.
    forced_until: BTreeMap<(String, usize), u64>,
    /// Since when each lock has been free although a task waits for it.
    free: BTreeMap<String, u64>,
    /// Waiters seen in the queue of each fair lock within the last second: when each one arrived,
    /// and when it was last seen.
    queues: BTreeMap<String, BTreeMap<String, (u64, u64)>>,
    /// The task behind each waiter's name.
    waiters: BTreeMap<String, Who>,
    /// Fair locks acquired since the last check: the task, the lock, and when the task's waiter
    /// arrived in the queue.
    came_in: Vec<(Who, String, u64)>,
    last_disturbed: u64,
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
    kernel::uninterrupted(|| kernel::as_process(0, act))
}

fn is_lost(who: Who, guard: &LockGuard) -> bool {
    kernel::as_process(who.0, || guard.is_lost())
}

fn seconds(time: u64) -> f64 {
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
    fn wrong(&mut self, what: &str) {
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

    /// Updates the known waiters of the fair queues. A waiter that left is kept for 1 s, as a grant
    /// is in flight for less than that.
    fn look_at_queues(&mut self) {
        for lock in (0..LOCKS).map(lock_name) {
            let waiting = words(&net::ask(
                0,
                &format!("LRANGE redisson_lock_queue:{{{lock}}} 0 -1"),
            ));
            // a server that refused scripts removed no expired waiters, so the queue may contain
            // some
            let may_be_dead =
                !waiting.is_empty() && now() < self.last_disturbed + PATIENCE.as_nanos() as u64;
            let dead = if may_be_dead {
                dead_waiters(0, &format!("{{{lock}}}"))
            } else {
                Vec::new()
            };
            let queue = self.queues.entry(lock).or_default();
            for waiter in waiting {
                let is_new = dead.contains(&waiter);
                let known = queue.entry(waiter).or_insert_with(|| (now(), now()));
                // a waiter that expired, or that the last checks (every 20 ms) did not see, has
                // queued again
                *known = (
                    if is_new || known.1 + 50 * MILLI < now() {
                        now()
                    } else {
                        known.0
                    },
                    now(),
                );
            }
            queue.retain(|_, (_, until)| *until + SECOND > now());
        }
    }

    /// Records that a fair lock was acquired, for `check_order` to judge after the next update of
    /// the queues. Nested acquisitions, and those soon after a fault, are exempt.
    fn came_in(&mut self, who: Who, lock: &str, waiter: &str) {
        let nests = self
            .held
            .values()
            .any(|held| held.who == who && held.locks[0] == lock);
        if !nests && now() > self.last_disturbed + TTL + PATIENCE.as_nanos() as u64 {
            let since = self
                .queues
                .get(lock)
                .and_then(|queue| queue.get(waiter))
                .map(|(since, _)| *since);
            self.came_in
                .push((who, lock.to_owned(), since.unwrap_or_else(now)));
        }
    }

    /// Checks that no acquisition passed a waiter that had queued more than 1 s earlier and still
    /// waits.
    fn check_order(&mut self) {
        for (who, lock, came) in std::mem::take(&mut self.came_in) {
            let is_passed = |(waiter, (since, until)): &(&String, &(u64, u64))| {
                // after a request in doubt, the waiter's name has a suffix
                let known = waiter
                    .rsplit_once('.')
                    .map_or(waiter.as_str(), |(name, _)| name);
                let waits = self.waiters.get(known).and_then(|who| self.tasks.get(who));
                let waits = waits.is_some_and(|(began, what)| {
                    began <= since && matches!(what, Doing::Acquires(_))
                });
                waits && *until == now() && *since + SECOND < came
            };
            let passed = self
                .queues
                .get(&lock)
                .map(|queue| queue.iter().filter(is_passed).collect::<Vec<_>>());
            if let Some(passed) = passed.filter(|passed| !passed.is_empty()) {
                let passed = format!("{who:?} has {lock} before {passed:?}");
                self.wrong(&passed);
            }
        }
    }

    /// Checks that fencing tokens grow with every holder.
    fn check_token(&mut self, who: Who, lock: &str, token: FencingToken) {
        if let Some((highest, by)) = self.tokens.get(lock).copied()
            && (token < highest || token == highest && by != who)
        {
            self.wrong(&format!(
                "token {token} of {lock} for {who:?} after {highest} for {by:?}"
            ));
        }
        if self
            .tokens
            .get(lock)
            .is_none_or(|(highest, _)| token >= *highest)
        {
            self.tokens.insert(lock.into(), (token, who));
        }
    }
}

/// Returns the waiters of this lock whose patience is over by the server's clock. `lock` includes
/// the braces.
fn dead_waiters(server: usize, lock: &str) -> Vec<String> {
    let time = words(&net::ask(server, "TIME"));
    let [seconds, micros] = [0, 1].map(|part| time[part].parse::<u64>().expect("a number"));
    let before = seconds * 1000 + micros / 1000;
    words(&net::ask(
        server,
        &format!("ZRANGEBYSCORE nestlock_fair_seen:{lock} -inf ({before}"),
    ))
}

/// Returns `true` if every waiter in the queue of this lock has expired.
pub(crate) fn is_queue_dead(server: usize, lock: &str) -> bool {
    let dead = dead_waiters(server, lock);
    words(&net::ask(
        server,
        &format!("LRANGE redisson_lock_queue:{lock} 0 -1"),
    ))
    .iter()
    .all(|waiter| dead.contains(waiter))
}

pub(crate) fn lock_name(number: u64) -> String {
    format!("l{number}")
}

/// Registers `owner` as the name under which a task waits in queues.
pub(crate) fn waits_as(who: Who, owner: &OwnerId) {
    book(|book| _ = book.waiters.insert(owner.to_string(), who));
}

pub(crate) fn does(who: Who, what: Doing) {
    book(|book| _ = book.tasks.insert(who, (now(), what)));
}

/// Records an acquired lock, and checks that no other task's guard still claims it. With `in_turn`,
/// the order of a fair queue is checked as well.
pub(crate) fn enter(
    who: Who,
    locks: Vec<String>,
    mode: Mode,
    guard: LockGuard,
    is_leased: bool,
    in_turn: bool,
) -> (u64, Arc<LockGuard>) {
    note(
        "acquired",
        format!("{who:?} {} {mode:?} as {}", locks.join("+"), guard.owner()).as_bytes(),
    );
    let guard = Arc::new(guard);
    let number = book(|book| {
        *book.counts.entry("acquired").or_default() += 1;
        let counts = !is_lost(who, &guard);
        let void = book.may_vanish(&locks);
        if counts {
            for lock in &locks {
                *book.entries.entry(lock.clone()).or_default() += 1;
            }
            if let (Some(token), false) = (guard.fencing_token(), void) {
                book.check_token(who, &locks[0], token);
            }
            let mut overlaps = Vec::new();
            for other in book.held.values_mut().filter(|other| {
                other.who != who
                    && (other.mode, mode) != (Mode::WithReaders, Mode::WithReaders)
                    && other.locks.iter().any(|lock| locks.contains(lock))
            }) {
                if !is_lost(other.who, &other.guard) && other.void_since.is_none() && !void {
                    overlaps.push(other.who);
                }
                other.was_overtaken = true;
            }
            if in_turn {
                book.came_in(who, &locks[0], &guard.owner().to_string());
            }
            for other in overlaps {
                book.wrong(&format!(
                    "exclusion: {} entered by {who:?} while {other:?} holds it",
                    locks.join("+")
                ));
            }
        }
        book.last += 1;
        let held = Held {
            who,
            locks,
            mode,
            guard: Arc::clone(&guard),
            since: now(),
            is_leased,
            was_lost: false,
            void_since: void.then_some(now()),
            was_overtaken: false,
        };
        book.held.insert(book.last, held);
        book.last
    });
    (number, guard)
}

/// The state of a hold at its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaving {
    pub(crate) is_lost: bool,
    was_overtaken: bool,
    is_void: bool,
}

/// Removes a hold from the ledger. Returns its guard, to be released.
pub(crate) fn leave(number: u64, guard: Arc<LockGuard>) -> (LockGuard, Leaving) {
    let held = book(|book| book.held.remove(&number)).expect("it is there until then");
    let leaving = Leaving {
        is_lost: is_lost(held.who, &guard),
        was_overtaken: held.was_overtaken,
        is_void: held.void_since.is_some(),
    };
    drop(held);
    (
        Arc::try_unwrap(guard).expect("the book's and this one"),
        leaving,
    )
}

/// Checks the outcome of an `unlock` or `hand_over` against the ledger.
pub(crate) fn unlocked(who: Who, lock: &str, leaving: Leaving, outcome: Result<(), &Error>) {
    match outcome {
        Ok(()) if leaving.is_lost => wrong(|| format!("{who:?} unlocked {lock}, which was lost")),
        Ok(()) if leaving.was_overtaken && !leaving.is_void => {
            wrong(|| format!("{who:?} unlocked {lock}, which somebody else had meanwhile"));
        }
        Err(Error::NotHeld { .. }) if !leaving.is_void => {
            wrong(|| format!("{who:?} did not hold {lock}, and nobody had released it"));
        }
        _ => {}
    }
}

/// Runs the periodic checks: losses, free locks, fair queues.
pub(crate) fn look(plan: &Plan) {
    book(|book| {
        let mut wrong = Vec::new();
        for held in book.held.values_mut() {
            let (who, lock, lost) = (
                held.who,
                held.locks.join("+"),
                is_lost(held.who, &held.guard),
            );
            if held.was_lost && !lost {
                wrong.push(format!("{who:?} has {lock} back"));
            }
            let disturbed = book.disturbed.get(&who.0).copied().unwrap_or_default() + TTL + SECOND;
            if lost
                && !held.was_lost
                && !held.is_leased
                && held.void_since.is_none()
                && now() > disturbed
            {
                wrong.push(format!(
                    "{who:?} has lost {lock}, undisturbed since {:.6}",
                    seconds(disturbed)
                ));
            }
            held.was_lost = lost;
        }
        for what in wrong {
            book.wrong(&what);
        }
        look_for_free_locks(book, plan);
        if plan.kind == Kind::Fair {
            book.look_at_queues();
            book.check_order();
        }
    });
}

/// Checks that a free lock is acquired in time if a task waits for it and no fault is near.
fn look_for_free_locks(book: &mut Book, plan: &Plan) {
    if now() < book.last_disturbed + TTL {
        book.free.clear();
        return;
    }
    let free: Vec<String> = (0..LOCKS)
        .map(lock_name)
        .filter(|lock| plan.kind.is_free(lock))
        .collect();
    // a task that wants several locks may be waiting for another one of them
    let could_be_taken = |lock: &String| {
        let wants = |(_, what): &(u64, Doing)| matches!(what, Doing::Acquires(locks) if locks.contains(lock) && locks.iter().all(|lock| free.contains(lock)));
        free.contains(lock) && book.tasks.values().any(wants)
    };
    let wanted: Vec<String> = (0..LOCKS).map(lock_name).filter(could_be_taken).collect();
    book.free.retain(|lock, _| wanted.contains(lock));
    for lock in wanted {
        let since = *book.free.entry(lock.clone()).or_insert_with(now);
        if now() > since + plan.taken_within() {
            book.wrong(&format!(
                "{lock} is free since {:.6}, and waited for",
                seconds(since)
            ));
            book.free.insert(lock, u64::MAX / 2);
        }
    }
}

/// Returns how far a bounded wait of this process may be overrun after its network delays and
/// pauses, in nanoseconds.
pub(crate) fn slack(plan: &Plan, process: usize) -> u64 {
    let (longest, pause) = book(|book| {
        [&book.longest, &book.longest_pause]
            .map(|known| {
                known
                    .get(&process)
                    .copied()
                    .unwrap_or_default()
                    .min(TTL / 3)
            })
            .into()
    });
    // a multi-lock waits for one member, requests the others, then releases what it acquired
    let steps = if plan.kind == Kind::Multi { 3 } else { 1 };
    // a future that is not polled inflates the known round trip, to twice that plus 40 ms, and so
    // does a pause while a reply is in flight; two round trips, and a quarter in reserve
    steps * (200 * MILLI + longest * 10 + pause)
}

/// Returns `true` if all tasks have ended and all clients are idle.
pub(crate) fn is_settled() -> bool {
    let clients = book(|book| book.clients.clone());
    let idle = clients
        .iter()
        .all(|(_, client)| (client.stats().holds, client.stats().settling) == (0, 0));
    idle && book(|book| book.tasks.is_empty())
}

/// Reports tasks that did not end, and clients that are not idle.
pub(crate) fn unsettled() {
    book(|book| {
        let stuck: Vec<String> = book
            .tasks
            .iter()
            .map(|(who, (since, what))| format!("{who:?} {what:?} since {:.6}", seconds(*since)))
            .collect();
        if !stuck.is_empty() {
            book.wrong(&format!("these do not end: {stuck:?}"));
        }
        let mut left = String::new();
        for (process, client) in &book.clients {
            let stats = client.stats();
            if (stats.holds, stats.settling) != (0, 0) {
                let _ = write!(left, " {process}: {stats:?}");
            }
        }
        if !left.is_empty() {
            book.wrong(&format!("the books do not empty:{left}"));
        }
    });
}
