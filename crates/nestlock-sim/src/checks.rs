//! The invariants of a run, checked against the ledger of all processes. No single process could
//! check them.

use std::{fmt::Write as _, sync::Arc};

use nestlock::{Error, FencingToken, LockGuard};

use crate::{
    clock::{MILLI, SECOND, now},
    kinds::{Kind, LOCKS, Mode, PERMITS, TTL, lock_name},
    ledger::{Book, Doing, Held, Who, book, is_lost, seconds, wrong},
    net::{self, server_time},
    plan::Plan,
    queues,
    trace::note,
};

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
                check_token(book, who, &locks[0], token);
            }
            let overlaps = overlaps(book, who, &locks, mode, void);
            if in_turn {
                queues::came_in(book, who, &locks[0], &guard.owner().to_string());
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

/// Returns the tasks that hold these locks, and so keep `who` from acquiring them.
fn overlaps(book: &mut Book, who: Who, locks: &[String], mode: Mode, void: bool) -> Vec<Who> {
    let (mut overlaps, mut taken) = (Vec::new(), mode.holds());
    let is_permit = matches!(mode, Mode::Permits(_));
    for other in book.held.values_mut().filter(|other| {
        // each permit has an owner of its own
        (other.who != who || is_permit)
            && (other.mode, mode) != (Mode::WithReaders, Mode::WithReaders)
            && other.locks.iter().any(|lock| locks.contains(lock))
    }) {
        if !is_lost(other.who, &other.guard) && other.void_since.is_none() && !void {
            overlaps.push(other.who);
            taken += other.mode.holds();
        }
        // whose permits those of a lost hold are now is not known
        other.was_overtaken = !is_permit;
    }
    if is_permit && i64::from(taken) <= book.total(&locks[0]).most() {
        return Vec::new();
    }
    overlaps
}

/// Checks that each permit is either available or taken, and none is both. Nothing undoes a
/// miscount.
fn count_permits(book: &mut Book, kind: Kind) {
    for lock in (0..LOCKS).map(lock_name) {
        // there is none before the first acquire
        let Some(available) = net::number(0, &format!("GET {lock}")) else {
            continue;
        };
        let taken = net::number(0, &format!("ZCARD {}", kind.key(&lock)));
        let taken = taken.expect("a number");
        let (least, most) = match kind {
            Kind::Permits | Kind::FairPermits => (i64::from(PERMITS), i64::from(PERMITS)),
            _ => match book.total(&lock).range() {
                Some(range) => range,
                None => continue,
            },
        };
        if !(least..=most).contains(&(available + taken)) {
            book.wrong(&format!(
                "{lock} has {available} permits available and {taken} taken, of {least} to {most}"
            ));
        }
    }
}

/// Checks that each latch counts what was counted down, and nothing twice.
fn count_latches(book: &mut Book) {
    for lock in (0..LOCKS).map(lock_name) {
        let Some((least, most, _)) = book.latch(&lock).range() else {
            continue;
        };
        let count = net::number(0, &format!("GET {lock}")).unwrap_or_default();
        if !(least as i64..=most as i64).contains(&count) {
            book.wrong(&format!(
                "{lock} has {count} left to count, not {least} to {most}"
            ));
        }
    }
}

/// Checks that fencing tokens grow with every holder.
fn check_token(book: &mut Book, who: Who, lock: &str, token: FencingToken) {
    if let Some((highest, by)) = book.tokens.get(lock).copied()
        && (token < highest || token == highest && by != who)
    {
        book.wrong(&format!(
            "token {token} of {lock} for {who:?} after {highest} for {by:?}"
        ));
    }
    if book
        .tokens
        .get(lock)
        .is_none_or(|(highest, _)| token >= *highest)
    {
        book.tokens.insert(lock.into(), (token, who));
    }
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
    let held = book(|book| book.held.remove(&number)).expect("held until it leaves");
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
            wrong(|| format!("{who:?} unlocked {lock}, which another task had acquired meanwhile"));
        }
        Err(Error::NotHeld { .. }) if !leaving.is_void => {
            wrong(|| format!("{who:?} did not hold {lock}, and no other task had released it"));
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
                wrong.push(format!("{who:?} regained {lock} after a loss"));
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
        if plan.kind.has_permits() {
            count_permits(book, plan.kind);
        }
        if plan.kind == Kind::Latch {
            count_latches(book);
        }
        if plan.kind == Kind::Fair {
            queues::look(book);
            queues::check_order(book);
        }
    });
}

/// Returns `true` if no server has a record of the lock, a permit is available, or a latch is open.
fn is_free(kind: Kind, lock: &str) -> bool {
    let key = kind.key(lock);
    if kind == Kind::Semaphore {
        let expired = net::number(0, &format!("ZCOUNT {key} -inf {}", server_time(0)));
        let available = net::number(0, &format!("GET {lock}"));
        return available.is_some_and(|available| available + expired.expect("a number") > 0);
    }
    if matches!(kind, Kind::Permits | Kind::FairPermits) {
        let taken = net::number(0, &format!("ZCOUNT {key} ({} +inf", server_time(0)));
        // the first in line may want two, and what is there is kept for it
        let kept = i64::from(kind == Kind::FairPermits);
        return taken.expect("a number") < i64::from(PERMITS) - kept;
    }
    (0..kind.servers()).all(|server| net::ask(server, &format!("EXISTS {key}")).starts_with(":0"))
}

/// Checks that a free lock is acquired in time if a task waits for it and no fault is near.
fn look_for_free_locks(book: &mut Book, plan: &Plan) {
    if now() < book.last_disturbed + TTL {
        book.free.clear();
        return;
    }
    let free: Vec<String> = (0..LOCKS)
        .map(lock_name)
        .filter(|lock| is_free(plan.kind, lock))
        .collect();
    // an open latch is open for those that come later, too
    let since_when = |(since, _): &(u64, Doing)| match plan.kind {
        Kind::Latch => now() > since + plan.taken_within(),
        _ => true,
    };
    // a task that wants several locks may be waiting for another one of them
    let could_be_taken = |lock: &String| {
        let wants = |task: &(u64, Doing)| {
            since_when(task)
                && matches!(&task.1, Doing::Acquires(locks) if locks.contains(lock) && locks.iter().all(|lock| free.contains(lock)))
        };
        free.contains(lock) && book.tasks.values().any(wants)
    };
    let wanted: Vec<String> = (0..LOCKS).map(lock_name).filter(could_be_taken).collect();
    book.free.retain(|lock, _| wanted.contains(lock));
    for lock in wanted {
        let since = *book.free.entry(lock.clone()).or_insert_with(now);
        if now() > since + plan.taken_within() {
            book.wrong(&format!(
                "{lock} has been free since {:.6}, with a task waiting for it",
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
            book.wrong(&format!("tasks that do not end: {stuck:?}"));
        }
        let mut left = String::new();
        for (process, client) in &book.clients {
            let stats = client.stats();
            if (stats.holds, stats.settling) != (0, 0) {
                let _ = write!(left, " {process}: {stats:?}");
            }
        }
        if !left.is_empty() {
            book.wrong(&format!("clients that do not become idle:{left}"));
        }
    });
}
