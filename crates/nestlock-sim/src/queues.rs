//! Checks the queues of fair locks: nothing passes a waiter that came much earlier.

use crate::{
    clock::{MILLI, SECOND, now},
    kinds::{LOCKS, PATIENCE, TTL, lock_name},
    ledger::{Book, Doing, Who},
    net::{self, server_time, words},
};

/// Updates the known waiters of the fair queues. A waiter that left is kept for 1 s, as a grant
/// is in flight for less than that.
pub(crate) fn look(book: &mut Book) {
    for lock in (0..LOCKS).map(lock_name) {
        let waiting = words(&net::ask(
            0,
            &format!("LRANGE redisson_lock_queue:{{{lock}}} 0 -1"),
        ));
        // a server that refused scripts removed no expired waiters, so the queue may contain
        // some
        let may_be_dead =
            !waiting.is_empty() && now() < book.last_disturbed + PATIENCE.as_nanos() as u64;
        let dead = if may_be_dead {
            dead_waiters(0, &format!("{{{lock}}}"))
        } else {
            Vec::new()
        };
        let queue = book.queues.entry(lock).or_default();
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

/// Records that a fair lock was acquired, for [`check_order`] to judge after the next update of
/// the queues. Nested acquisitions, and those soon after a fault, are exempt.
pub(crate) fn came_in(book: &mut Book, who: Who, lock: &str, waiter: &str) {
    let nests = book
        .held
        .values()
        .any(|held| held.who == who && held.locks[0] == lock);
    if !nests && now() > book.last_disturbed + TTL + PATIENCE.as_nanos() as u64 {
        let since = book
            .queues
            .get(lock)
            .and_then(|queue| queue.get(waiter))
            .map(|(since, _)| *since);
        book.came_in
            .push((who, lock.to_owned(), since.unwrap_or_else(now)));
    }
}

/// Checks that no acquisition passed a waiter that had queued more than 1 s earlier and still
/// waits.
pub(crate) fn check_order(book: &mut Book) {
    for (who, lock, came) in std::mem::take(&mut book.came_in) {
        let is_passed = |(waiter, (since, until)): &(&String, &(u64, u64))| {
            // after a request in doubt, the waiter's name has a suffix
            let known = waiter
                .rsplit_once('.')
                .map_or(waiter.as_str(), |(name, _)| name);
            let waits = book.waiters.get(known).and_then(|who| book.tasks.get(who));
            let waits = waits
                .is_some_and(|(began, what)| began <= since && matches!(what, Doing::Acquires(_)));
            waits && *until == now() && *since + SECOND < came
        };
        let passed = book
            .queues
            .get(&lock)
            .map(|queue| queue.iter().filter(is_passed).collect::<Vec<_>>());
        if let Some(passed) = passed.filter(|passed| !passed.is_empty()) {
            let passed = format!("{who:?} has {lock} before {passed:?}");
            book.wrong(&passed);
        }
    }
}

/// Returns the waiters of this lock whose patience is over by the server's clock. `lock` includes
/// the braces.
fn dead_waiters(server: usize, lock: &str) -> Vec<String> {
    let before = server_time(server);
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
