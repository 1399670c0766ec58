//! The record of python-redis-lock: a string, and a list whose one element wakes one waiter.

use super::{
    clock::monotonic_ns,
    pair::Pair,
    servers::{Servers, eventually},
    worker::{
        Library::{self, Nestlock, PythonRedisLock},
        Record, Worker,
    },
};

const SIGNAL_LOCK: Library = Nestlock(Record::Signal);

const MS: u64 = 1_000_000;
/// How long waiters wait at most, in ms.
const WAIT: u64 = 30_000;
/// How long a wake-up may take, in ms: far less than that.
const WAKE: u64 = 1000;

fn start(libraries: [Library; 2]) -> Pair {
    Pair::start(libraries, 1, "lock:")
}

/// Three wait. When `holder` frees the lock with `request`, one of them gets it immediately, and the others are not even
/// woken. Then they wake each other.
fn wakes_one(holder: Library, waiting: Library, request: &str, answer: &str) {
    let servers = Servers::start(1);
    let mut holder = Worker::start(holder, &servers);
    let mut waiters: Vec<Worker> = (0..3).map(|_| Worker::start(waiting, &servers)).collect();
    let (mut crossing, mut among) = (Vec::new(), Vec::new());
    // a new name each time: without a waiter, the signal of the last release stays for 1 s
    for name in ["a", "b", "c", "d", "e"] {
        holder.does(&format!("acquire {name} {WAIT} 0"), "acquired");
        for (at, waiter) in waiters.iter_mut().enumerate() {
            let before = servers.count_of("blpop");
            waiter.ask(&format!("acquire {name} {WAIT} {WAIT}"));
            eventually("it waits", || {
                servers.count_of("blpop") > before && servers.blocked() == at as u64 + 1
            });
        }
        let mut waiting: Vec<&mut Worker> = waiters.iter_mut().collect();
        let waits = servers.count_of("blpop");
        let mut freed = holder.does(&format!("{request} {name}"), answer);
        while !waiting.is_empty() {
            let mut got = None;
            eventually("one of them has it", || {
                got = (0..waiting.len())
                    .find_map(|at| Some((at, waiting[at].has_answered("acquired")?)));
                got.is_some()
            });
            let (at, start) = got.expect("one");
            assert!(
                start > freed && start < freed + WAKE * MS,
                "woken {} ns after {freed}",
                start.abs_diff(freed)
            );
            let delay = (start - freed) / 1000;
            if waiting.len() == 3 {
                &mut crossing
            } else {
                &mut among
            }
            .push(delay);
            let winner = waiting.remove(at);
            assert_eq!(
                servers.blocked(),
                waiting.len() as u64,
                "the others still wait"
            );
            assert_eq!(
                servers.count_of("blpop"),
                waits,
                "no waiter was woken in vain and waits again"
            );
            assert!(
                waiting
                    .iter_mut()
                    .all(|waiter| waiter.has_answered("busy").is_none())
            );
            freed = winner.does(&format!("release {name}"), "released");
        }
    }
    let holder = holder.library();
    println!(
        "{waiting} got it {crossing:?} us after a {request} of {holder}, {among:?} us after each other's release"
    );
}

/// `acquire` may set the owner's name: a process that knows it can extend and release.
fn knows_given_owners(libraries: [Library; 2]) {
    let mut pair = start(libraries);
    for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
        if !libraries[a].takes_owners() {
            continue;
        }
        pair.does(
            a,
            &format!("acquire {name} {WAIT} 0 owner-of-{name}"),
            "acquired",
        );
        assert_eq!(pair.token(name), format!("owner-of-{name}"));
        pair.does(b, &format!("adopt {name} owner-of-{name}"), "adopted");
        pair.does(b, &format!("extend {name} {WAIT}"), "extended");
        pair.does(b, &format!("release {name}"), "released");
        pair.does(a, &format!("release {name}"), "lost");
    }
}

/// B resets what A holds.
fn resets(libraries: [Library; 2]) {
    let mut pair = start(libraries);
    for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
        pair.does(a, &format!("acquire {name} {WAIT} 0"), "acquired");
        pair.does(b, &format!("acquire {name} {WAIT} 0"), "busy");
        pair.does(b, &format!("reset {name}"), "reset");
        pair.free(name);
        pair.does(a, &format!("extend {name} {WAIT}"), "lost");
        pair.does(a, &format!("release {name}"), "lost");
        pair.does(b, &format!("acquire {name} {WAIT} 0"), "acquired");
        pair.does(a, &format!("acquire {name} {WAIT} 0"), "busy");
        pair.does(b, &format!("release {name}"), "released");
    }
}

/// B gives up after its time limit, and A's hold is unchanged.
fn give_up(libraries: [Library; 2]) {
    let mut pair = start(libraries);
    for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
        pair.does(a, &format!("acquire {name} {WAIT} 0"), "acquired");
        let token = pair.token(name);
        let before = monotonic_ns();
        let after = pair.does(b, &format!("acquire {name} {WAIT} 1000"), "busy");
        assert!(
            (before + 1000 * MS..before + 5000 * MS).contains(&after),
            "after {} ns",
            after - before
        );
        assert_eq!(pair.token(name), token);
        pair.does(a, &format!("release {name}"), "released");
    }
}

/// The last release leaves one signal, for 1 s; nestlock may leave one for itself, for 5 s. Nothing remains after that.
fn nothing_left(pair: &Pair) {
    for key in pair.servers().call(0, &["KEYS", "*"]).list() {
        assert!(key.text().starts_with("lock-signal:"), "{key:?}");
        let (len, ttl) = (
            pair.servers().call(0, &["LLEN", key.text()]),
            pair.servers().call(0, &["PTTL", key.text()]),
        );
        // or it has expired meanwhile
        assert!(
            len.int() <= 1 && ttl.int() <= 5000 && ttl.int() != -1,
            "{key:?}: {len:?} for {ttl:?}"
        );
    }
    eventually("no key", || pair.servers().keys() == 0);
}

macro_rules! pairs {
    ($($pair:ident: $a:expr, $b:expr, $holds:expr;)*) => {$(
        mod $pair {
            use super::*;

            const LIBRARIES: [Library; 2] = [$a, $b];

            #[test]
            fn they_take_turns() {
                let mut pair = start(LIBRARIES);
                pair.in_turn(10);
                nothing_left(&pair);
            }

            #[test]
            fn they_never_hold_at_once() {
                start(LIBRARIES).at_random($holds / 2);
            }

            #[test]
            fn they_see_a_hold_expire() {
                let mut pair = start(LIBRARIES);
                pair.expiry();
                nothing_left(&pair);
            }

            #[test]
            fn they_see_a_hold_deleted() {
                start(LIBRARIES).deletion(1);
            }

            #[test]
            fn they_see_a_hold_reset() {
                resets(LIBRARIES);
            }

            #[test]
            fn they_wait_in_their_own_ways() {
                start(LIBRARIES).own_waiting();
            }

            #[test]
            fn waits_end_at_their_limit() {
                give_up(LIBRARIES);
            }

            #[test]
            fn they_hand_over_a_hold() {
                start(LIBRARIES).handed_over();
            }

            #[test]
            fn they_know_given_owners() {
                knows_given_owners(LIBRARIES);
            }

            #[test]
            fn a_release_wakes_one_waiter() {
                let [a, b] = LIBRARIES;
                wakes_one(a, b, "release", "released");
                wakes_one(b, a, "release", "released");
            }

            #[test]
            fn a_reset_wakes_one_waiter() {
                let [a, b] = LIBRARIES;
                wakes_one(a, b, "reset", "reset");
                wakes_one(b, a, "reset", "reset");
            }
        }
    )*};
}

pairs! {
    a_signal_lock_and_python_redis_lock: SIGNAL_LOCK, PythonRedisLock, 2000;
    a_signal_lock_and_itself: SIGNAL_LOCK, SIGNAL_LOCK, 400;
    python_redis_lock_and_itself: PythonRedisLock, PythonRedisLock, 400;
}
