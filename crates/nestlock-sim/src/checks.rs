//! What is true of all processes together, and what must be: nobody in the program could see it.

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

/// Who locks: process and task.
pub(crate) type Who = (usize, u64);

/// A guard, as everybody can see it.
#[derive(Debug)]
struct Held {
    who: Who,
    locks: Vec<String>,
    mode: Mode,
    guard: Arc<LockGuard>,
    since: u64,
    /// It ends by itself.
    is_leased: bool,
    /// A loss was seen.
    was_lost: bool,
    /// The server, or an operator, took it away: exclusion was not promised from then on.
    void_since: Option<u64>,
    /// Somebody else came in.
    was_overtaken: bool,
}

/// What a task does.
#[derive(Debug, Clone)]
pub(crate) enum Doing {
    Acquires(Vec<String>),
    /// For whoever reads what does not end.
    #[expect(dead_code)]
    Other(String),
}

/// A hold that was given away, for somebody else.
#[derive(Debug, Clone)]
pub(crate) struct Given {
    pub(crate) lock: String,
    pub(crate) turn: u64,
    pub(crate) gift: Gift,
}

#[derive(Debug, Clone)]
pub(crate) enum Gift {
    /// It must be released under this name.
    Forgotten(OwnerId),
    /// It may be adopted. So many have had the lock up to now.
    HandedOver(HandOver, u64),
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    held: BTreeMap<u64, Held>,
    last: u64,
    pub(crate) tasks: BTreeMap<Who, (u64, Doing)>,
    pub(crate) clients: Vec<(usize, LockClient)>,
    pub(crate) given: Vec<Given>,
    /// What this task is about to take of it.
    pub(crate) taking: BTreeMap<Who, Given>,
    /// How many have had a lock.
    entries: BTreeMap<String, u64>,
    tokens: BTreeMap<String, (FencingToken, Who)>,
    /// Until when something may keep a process from renewing.
    disturbed: BTreeMap<usize, u64>,
    /// How often the user's part of a process was stopped.
    pauses: BTreeMap<usize, u64>,
    /// The longest of these stops, by the world's clock.
    longest_pause: BTreeMap<usize, u64>,
    /// The longest that something was under way to or from a process.
    longest: BTreeMap<usize, u64>,
    /// When something of a process came late.
    pub(crate) late: BTreeMap<usize, u64>,
    /// Until when holds of a lock may vanish.
    void_until: BTreeMap<String, u64>,
    /// Until when a forced release may still be executed: by lock, and by the process that asked for it.
    forced_until: BTreeMap<(String, usize), u64>,
    /// Since when a lock is free, and waited for.
    free: BTreeMap<String, u64>,
    /// Who waits in the queue of a fair lock, or did a moment ago: lock, then waiter; since when, and until when.
    queues: BTreeMap<String, BTreeMap<String, (u64, u64)>>,
    /// Whose the names in queues are.
    waiters: BTreeMap<String, Who>,
    /// Who has got a fair lock since the last look: it, the lock, and since when it was seen in the queue.
    came_in: Vec<(Who, String, u64)>,
    last_disturbed: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) wrong: Vec<String>,
}

static BOOK: Mutex<Option<Book>> = Mutex::new(None);

/// What is allocated for it remains if the caller is killed.
pub(crate) fn book<R>(act: impl FnOnce(&mut Book) -> R) -> R {
    let act = || act(BOOK.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default());
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
    // not its text, which has the path of a socket
    note("error", name.as_bytes());
    count(name);
}

/// A kind of wrong that needs no more than words.
pub(crate) fn wrong(what: impl FnOnce() -> String) {
    book(|book| book.wrong(&what()));
}

impl Book {
    fn wrong(&mut self, what: &str) {
        note("WRONG", what.as_bytes());
        self.wrong.push(format!("{:.6} {what}", seconds(now())));
    }

    /// Something may keep these processes from renewing until then.
    pub(crate) fn disturb(&mut self, processes: impl IntoIterator<Item = usize>, until: u64) {
        self.last_disturbed = self.last_disturbed.max(until);
        for process in processes {
            let known = self.disturbed.entry(process).or_default();
            *known = (*known).max(until);
            // a network that falls silent again before it delivers keeps what was sent for as long
            for ((_, by), forced) in &mut self.forced_until {
                if *by == process && *forced > now() {
                    *forced = (*forced).max(until + TTL);
                }
            }
        }
    }

    pub(crate) fn is_disturbed(&self, process: usize) -> bool {
        self.disturbed.get(&process).is_some_and(|until| now() < *until + SECOND)
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

    /// The server has lost what it knew, or an operator took it away: of these locks. Until then, holds may vanish.
    pub(crate) fn void(&mut self, locks: &[String], until: u64) {
        let is_meant = |name: &String| locks.contains(name);
        for held in self.held.values_mut().filter(|held| held.locks.iter().any(is_meant)) {
            held.void_since.get_or_insert(now());
        }
        for name in (0..LOCKS).map(lock_name).filter(is_meant) {
            let known = self.void_until.entry(name).or_default();
            *known = (*known).max(until);
        }
    }

    /// A process frees these locks from their holders: until then, or later where faults keep the request on its way.
    pub(crate) fn forced(&mut self, locks: &[String], by: usize, until: u64) {
        self.void(locks, until);
        for lock in locks {
            let known = self.forced_until.entry((lock.clone(), by)).or_default();
            *known = (*known).max(until);
        }
    }

    /// Exclusion is not promised of one of these, for the time being.
    pub(crate) fn may_vanish(&self, locks: &[String]) -> bool {
        let forced = |lock: &String| self.forced_until.iter().any(|((of, _), until)| of == lock && *until > now());
        locks.iter().any(|lock| self.void_until.get(lock).is_some_and(|until| *until > now()) || forced(lock))
    }

    pub(crate) fn travelled(&mut self, process: usize, time: u64) {
        let known = self.longest.entry(process).or_default();
        *known = (*known).max(time);
    }

    pub(crate) fn entries(&self, lock: &str) -> u64 {
        self.entries.get(lock).copied().unwrap_or_default()
    }

    pub(crate) fn is_void(&self, number: u64) -> bool {
        self.held.get(&number).is_some_and(|held| held.void_since.is_some())
    }

    /// Whether what came late may have set another count than the one that was asked for since: the record is this owner's
    /// all the same, until it asks for none.
    pub(crate) fn is_miscounted(&self, number: u64) -> bool {
        let late = |held: &Held| self.late.get(&held.who.0).is_some_and(|late| *late > held.since);
        self.held.get(&number).is_some_and(late)
    }

    /// A process is gone, and what it held in memory: nobody drops it.
    pub(crate) fn crash(&mut self, process: usize) {
        let gone: Vec<u64> = self.held.iter().filter(|(_, held)| held.who.0 == process).map(|(at, _)| *at).collect();
        for at in gone {
            std::mem::forget(self.held.remove(&at));
        }
        self.tasks.retain(|who, _| who.0 != process);
        // it is for somebody else
        let taking = std::mem::take(&mut self.taking).into_iter();
        let (theirs, others): (BTreeMap<_, _>, _) = taking.partition(|(who, _)| who.0 == process);
        self.taking = others;
        self.given.extend(theirs.into_values());
        for at in (0..self.clients.len()).rev().filter(|at| self.clients[*at].0 == process).collect::<Vec<_>>() {
            std::mem::forget(self.clients.remove(at));
        }
    }

    /// Notes who has come since, and who has left: a grant is under way for less than a second.
    fn look_at_queues(&mut self) {
        for lock in (0..LOCKS).map(lock_name) {
            let waiting = words(&net::ask(0, &format!("LRANGE redisson_lock_queue:{{{lock}}} 0 -1")));
            // a server that refuses scripts puts nobody out
            let may_be_dead = !waiting.is_empty() && now() < self.last_disturbed + PATIENCE.as_nanos() as u64;
            let dead = if may_be_dead { dead_waiters(0, &format!("{{{lock}}}")) } else { Vec::new() };
            let queue = self.queues.entry(lock).or_default();
            for waiter in waiting {
                let is_new = dead.contains(&waiter);
                let known = queue.entry(waiter).or_insert_with(|| (now(), now()));
                // away for a look or longer, or to be put out: it has come anew
                *known = (if is_new || known.1 + 50 * MILLI < now() { now() } else { known.0 }, now());
            }
            queue.retain(|_, (_, until)| *until + SECOND > now());
        }
    }

    /// Somebody has a fair lock: the next look at the queue tells whether it was its turn.
    fn came_in(&mut self, who: Who, lock: &str, waiter: &str) {
        let nests = self.held.values().any(|held| held.who == who && held.locks[0] == lock);
        if !nests && now() > self.last_disturbed + TTL + PATIENCE.as_nanos() as u64 {
            let since = self.queues.get(lock).and_then(|queue| queue.get(waiter)).map(|(since, _)| *since);
            self.came_in.push((who, lock.to_owned(), since.unwrap_or_else(now)));
        }
    }

    /// Where no fault is near, nobody comes before somebody who was there before, and still waits.
    fn check_order(&mut self) {
        for (who, lock, came) in std::mem::take(&mut self.came_in) {
            let is_passed = |(waiter, (since, until)): &(&String, &(u64, u64))| {
                // a name that was in doubt has a suffix
                let known = waiter.rsplit_once('.').map_or(waiter.as_str(), |(name, _)| name);
                let waits = self.waiters.get(known).and_then(|who| self.tasks.get(who));
                let waits = waits.is_some_and(|(began, what)| began <= since && matches!(what, Doing::Acquires(_)));
                waits && *until == now() && *since + SECOND < came
            };
            let passed = self.queues.get(&lock).map(|queue| queue.iter().filter(is_passed).collect::<Vec<_>>());
            if let Some(passed) = passed.filter(|passed| !passed.is_empty()) {
                let passed = format!("{who:?} has {lock} before {passed:?}");
                self.wrong(&passed);
            }
        }
    }

    /// Tokens grow with every holder.
    fn check_token(&mut self, who: Who, lock: &str, token: FencingToken) {
        if let Some((highest, by)) = self.tokens.get(lock).copied()
            && (token < highest || token == highest && by != who)
        {
            self.wrong(&format!("token {token} of {lock} for {who:?} after {highest} for {by:?}"));
        }
        if self.tokens.get(lock).is_none_or(|(highest, _)| token >= *highest) {
            self.tokens.insert(lock.into(), (token, who));
        }
    }
}

/// Those in the queue of this lock, braces and all, whose time is over by the server's clock.
fn dead_waiters(server: usize, lock: &str) -> Vec<String> {
    let time = words(&net::ask(server, "TIME"));
    let [seconds, micros] = [0, 1].map(|part| time[part].parse::<u64>().expect("a number"));
    let before = seconds * 1000 + micros / 1000;
    words(&net::ask(server, &format!("ZRANGEBYSCORE nestlock_fair_seen:{lock} -inf ({before}")))
}

/// Whether everybody in the queue of this lock counts as gone.
pub(crate) fn is_queue_dead(server: usize, lock: &str) -> bool {
    let dead = dead_waiters(server, lock);
    words(&net::ask(server, &format!("LRANGE redisson_lock_queue:{lock} 0 -1")))
        .iter()
        .all(|waiter| dead.contains(waiter))
}

pub(crate) fn lock_name(number: u64) -> String {
    format!("l{number}")
}

/// A task waits in queues under this name.
pub(crate) fn waits_as(who: Who, owner: &OwnerId) {
    book(|book| _ = book.waiters.insert(owner.to_string(), who));
}

pub(crate) fn does(who: Who, what: Doing) {
    book(|book| _ = book.tasks.insert(who, (now(), what)));
}

/// A lock was acquired, by one who waited for its turn or not: nobody else believes to hold it.
pub(crate) fn enter(
    who: Who,
    locks: Vec<String>,
    mode: Mode,
    guard: LockGuard,
    is_leased: bool,
    in_turn: bool,
) -> (u64, Arc<LockGuard>) {
    note("acquired", format!("{who:?} {} {mode:?} as {}", locks.join("+"), guard.owner()).as_bytes());
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
                book.wrong(&format!("exclusion: {} entered by {who:?} while {other:?} holds it", locks.join("+")));
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

/// What is known of a hold at its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leaving {
    pub(crate) is_lost: bool,
    was_overtaken: bool,
    is_void: bool,
}

/// A guard is taken out of the book, to be released.
pub(crate) fn leave(number: u64, guard: Arc<LockGuard>) -> (LockGuard, Leaving) {
    let held = book(|book| book.held.remove(&number)).expect("it is there until then");
    let leaving = Leaving {
        is_lost: is_lost(held.who, &guard),
        was_overtaken: held.was_overtaken,
        is_void: held.void_since.is_some(),
    };
    drop(held);
    (Arc::try_unwrap(guard).expect("the book's and this one"), leaving)
}

/// How `unlock` may end.
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

/// Looks at everything, while it goes on.
pub(crate) fn look(plan: &Plan) {
    book(|book| {
        let mut wrong = Vec::new();
        for held in book.held.values_mut() {
            let (who, lock, lost) = (held.who, held.locks.join("+"), is_lost(held.who, &held.guard));
            if held.was_lost && !lost {
                wrong.push(format!("{who:?} has {lock} back"));
            }
            let disturbed = book.disturbed.get(&who.0).copied().unwrap_or_default() + TTL + SECOND;
            if lost && !held.was_lost && !held.is_leased && held.void_since.is_none() && now() > disturbed {
                wrong.push(format!("{who:?} has lost {lock}, undisturbed since {:.6}", seconds(disturbed)));
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

/// A lock that is free, and waited for by somebody who is not disturbed, is taken.
fn look_for_free_locks(book: &mut Book, plan: &Plan) {
    if now() < book.last_disturbed + TTL {
        book.free.clear();
        return;
    }
    let free: Vec<String> = (0..LOCKS).map(lock_name).filter(|lock| plan.kind.is_free(lock)).collect();
    // whoever wants several may wait for another one of them
    let could_be_taken = |lock: &String| {
        let wants = |(_, what): &(u64, Doing)| matches!(what, Doing::Acquires(locks) if locks.contains(lock) && locks.iter().all(|lock| free.contains(lock)));
        free.contains(lock) && book.tasks.values().any(wants)
    };
    let wanted: Vec<String> = (0..LOCKS).map(lock_name).filter(could_be_taken).collect();
    book.free.retain(|lock, _| wanted.contains(lock));
    for lock in wanted {
        let since = *book.free.entry(lock.clone()).or_insert_with(now);
        if now() > since + plan.taken_within() {
            book.wrong(&format!("{lock} is free since {:.6}, and waited for", seconds(since)));
            book.free.insert(lock, u64::MAX / 2);
        }
    }
}

/// How far a bounded wait may be overrun, by what the network has done to this process.
pub(crate) fn slack(plan: &Plan, process: usize) -> u64 {
    let (longest, pause) = book(|book| {
        [&book.longest, &book.longest_pause]
            .map(|known| known.get(&process).copied().unwrap_or_default().min(TTL / 3))
            .into()
    });
    // several locks: one is waited for, then the others are asked, then what was got is released
    let steps = if plan.kind == Kind::Multi { 3 } else { 1 };
    // a future that is not polled makes the round trip longer that is known, by twice and 40 ms; two of them; a quarter more.
    // So does a process that is stopped while an answer is under way
    steps * (200 * MILLI + longest * 10 + pause)
}

/// The end: everything comes to one.
pub(crate) fn is_settled() -> bool {
    let clients = book(|book| book.clients.clone());
    let idle = clients.iter().all(|(_, client)| (client.stats().holds, client.stats().settling) == (0, 0));
    idle && book(|book| book.tasks.is_empty())
}

/// What did not come to an end.
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
