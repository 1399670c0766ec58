//! The reentrant lock: how holds nest, how they count, and in which order they end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt, future::BoxFuture};
use nestlock::{AcquireOptions, Error, Lock, LockGuard, LossReason};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{
    contract::nothing_is_left,
    support::{Server, eventually, history::History},
};

const SOON: Duration = Duration::from_secs(15);
const LONG: Duration = Duration::from_secs(3600);

async fn leased(lock: &Lock, lease: Duration) -> LockGuard {
    lock.try_lock_with(AcquireOptions::new().lease(lease))
        .await
        .unwrap()
        .expect("a free lock")
}

#[tokio::test]
async fn two_clients_exclude_each_other() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let guard = la.lock().await.unwrap();
    assert!(lb.try_lock().await.unwrap().is_none());
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap().unlock().await.unwrap() });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    guard.unlock().await.unwrap();
    waiter.await.unwrap();
    assert!(!server.exists("l"));
}

/// Redis before 7.2 refuses CLIENT SETINFO. That costs no extra request.
#[tokio::test]
async fn a_pair_is_two_requests_from_the_first_on() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let count = || (server.script_count(), server.command_count("ping"));
    let before = count();
    for _ in 0..20 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    let after = count();
    assert_eq!(after.0 - before.0, 40);
    // A heartbeat may come in between.
    assert!(after.1 - before.1 < 10, "{} PINGs", after.1 - before.1);
}

/// Functions that each take the lock call each other. The server counts the levels.
#[tokio::test]
async fn sections_nest_over_calls_to_a_depth_of_fifty() {
    fn section<'a>(server: &'a Server, lock: &'a Lock, depth: i64) -> BoxFuture<'a, ()> {
        async move {
            let guard = lock.lock().await.unwrap();
            assert_eq!(server.record("l"), [(guard.owner().to_string(), depth)]);
            assert_eq!(lock.hold_count(&guard.owner()).await.unwrap(), depth as u32);
            if depth < 50 {
                section(server, lock, depth + 1).await;
            }
            assert_eq!(server.record("l"), [(guard.owner().to_string(), depth)]);
            guard.unlock().await.unwrap();
        }
        .boxed()
    }
    let server = Server::start();
    let client = server.client().await;
    section(&server, &client.reentrant_lock("l").unwrap(), 1).await;
    nothing_is_left(&server, &[&client]).await;
}

/// Guards may be dropped in any order. Only the last one releases the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guards_may_end_in_any_order_and_the_last_one_frees() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let seed = 11;
    let mut rng = StdRng::seed_from_u64(seed);
    for round in 0..60 {
        let mut guards = Vec::new();
        let mut count = 0;
        // Holds come and go at random, and the record follows.
        for _ in 0..rng.random_range(2..14) {
            if guards.is_empty() || rng.random_range(0..3) > 0 {
                let lease = rng.random::<bool>().then_some(LONG);
                let options = AcquireOptions::new();
                let options = if let Some(lease) = lease {
                    options.lease(lease)
                } else {
                    options
                };
                guards.push(la.lock_with(options).await.unwrap());
                count += 1;
            } else {
                guards.shuffle(&mut rng);
                guards.pop().unwrap().unlock().await.unwrap();
                count -= 1;
            }
            assert_eq!(
                lb.hold_count(&a.current_owner()).await.unwrap(),
                count,
                "round {round}, seed {seed}"
            );
        }
        guards.shuffle(&mut rng);
        while let Some(guard) = guards.pop() {
            assert!(
                lb.try_lock().await.unwrap().is_none(),
                "round {round}, seed {seed}"
            );
            match rng.random_range(0..3) {
                0 => drop(guard),
                1 => guard.unlock().await.unwrap(),
                _ => tokio::spawn(guard.unlock()).await.unwrap().unwrap(),
            }
        }
        a.idle().await;
        lb.try_lock()
            .await
            .unwrap()
            .expect("the last one freed it")
            .unlock()
            .await
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R08, R14: the watchdog renews as long as one hold without a lease is left, whatever came and
/// went around it.
#[tokio::test]
async fn r08_r14_the_watchdog_renews_while_one_unleased_hold_is_left() {
    let server = Server::start();
    let watchdog = Duration::from_millis(900);
    let client = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    let locks: Vec<_> = (0..4)
        .map(|n| client.reentrant_lock(format!("l{n}")).unwrap())
        .collect();
    // The outer hold has a lease, the inner one is renewed. The outer one ends first.
    let outer = leased(&locks[0], Duration::from_millis(300)).await;
    let inner_watched = locks[0].lock().await.unwrap();
    outer.unlock().await.unwrap();
    // The outer hold is renewed, the inner one has a lease and ends.
    let outer_watched = locks[1].lock().await.unwrap();
    leased(&locks[1], Duration::from_millis(300))
        .await
        .unlock()
        .await
        .unwrap();
    // Both holds are alive.
    let both_watched = locks[2].lock().await.unwrap();
    let both_leased = leased(&locks[2], Duration::from_millis(300)).await;
    // Three acquires, two releases.
    let first = locks[3].lock().await.unwrap();
    let second = locks[3].lock().await.unwrap();
    let third = locks[3].lock().await.unwrap();
    first.unlock().await.unwrap();
    drop(third);
    let start = Instant::now();
    let held = [
        &inner_watched,
        &outer_watched,
        &both_watched,
        &both_leased,
        &second,
    ];
    while start.elapsed() < 3 * watchdog {
        for guard in held {
            assert!(
                !guard.is_lost() && server.exists(guard.name()),
                "{} after {:?}",
                guard.name(),
                start.elapsed()
            );
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for guard in [
        inner_watched,
        outer_watched,
        both_watched,
        both_leased,
        second,
    ] {
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// Once the last hold without a lease is released, the others end with their lease.
#[tokio::test]
async fn a_leased_hold_is_not_renewed_once_the_watched_one_is_gone() {
    let server = Server::start();
    let client = server
        .client_with(|c| c.watchdog_timeout(Duration::from_millis(600)))
        .await;
    let lock = client.reentrant_lock("l").unwrap();
    for watched_first in [true, false] {
        let (watched, leased) = if watched_first {
            let watched = lock.lock().await.unwrap();
            (watched, leased(&lock, Duration::from_millis(200)).await)
        } else {
            let leased = leased(&lock, Duration::from_millis(200)).await;
            (lock.lock().await.unwrap(), leased)
        };
        watched.unlock().await.unwrap();
        let lost = tokio::time::timeout(SOON, leased.lost())
            .await
            .expect("it ends");
        assert!(
            matches!(
                lost,
                Error::Lost {
                    reason: LossReason::LeaseExpired,
                    ..
                }
            ),
            "{lost}"
        );
        eventually("the record ends", || async { !server.exists("l") }).await;
        drop(leased);
    }
    nothing_is_left(&server, &[&client]).await;
}

/// Guards of holds that were released by the owner's id are stale: they never release a later hold.
#[tokio::test]
async fn stale_guards_never_touch_a_later_hold() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let (one, two) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    let owner = one.owner();
    lock.release(&owner).await.unwrap();
    assert_eq!(server.record("l"), [(owner.to_string(), 1)]);
    assert!(
        !one.is_lost() && !two.is_lost(),
        "one hold is left, whichever"
    );
    lock.release(&owner).await.unwrap();
    assert!(!server.exists("l"));
    assert!(one.is_lost() && two.is_lost());
    assert!(matches!(one.lost().await, Error::NotHeld { .. }));
    let next = lock.lock().await.unwrap();
    drop(one);
    assert!(matches!(two.unlock().await, Err(Error::NotHeld { .. })));
    client.idle().await;
    assert_eq!(server.record("l"), [(owner.to_string(), 1)]);
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

/// The record disappears under nested guards: all are lost, and none releases the next hold.
#[tokio::test]
async fn when_the_record_is_gone_all_nested_guards_are_lost() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let (one, two, three) = (
        la.lock().await.unwrap(),
        la.lock().await.unwrap(),
        la.lock().await.unwrap(),
    );
    assert_eq!(server.call(&["DEL", "l"]).int(), 1);
    let other = lb.try_lock().await.unwrap().expect("free");
    let before = server.dump();
    assert!(
        matches!(one.unlock().await, Err(Error::Lost { .. })),
        "the first one finds out"
    );
    assert!(two.is_lost() && three.is_lost());
    assert!(matches!(two.unlock().await, Err(Error::Lost { .. })));
    drop(three);
    a.idle().await;
    assert_eq!(server.dump(), before);
    assert!(!other.is_lost());
    other.unlock().await.unwrap();
    // R41, rule 1: a re-entry into a lock that is gone is refused, and not taken as a new hold.
    let held = la.lock().await.unwrap();
    assert_eq!(server.call(&["DEL", "l"]).int(), 1);
    assert!(matches!(la.lock().await, Err(Error::Lost { .. })));
    assert!(held.is_lost() && !server.exists("l"));
    drop(held);
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The nested acquire finds the record gone while the outer hold is already being released.
#[tokio::test]
async fn an_unlock_during_a_nested_acquire_learns_the_record_was_gone() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    assert_eq!(server.call(&["DEL", "l"]).int(), 1);
    let (nested, unlocked) = futures::join!(lock.lock(), guard.unlock());
    for lost in [nested.map(drop), unlocked] {
        assert!(
            matches!(
                lost,
                Err(Error::Lost {
                    reason: LossReason::RecordMissing,
                    ..
                })
            ),
            "{lost:?}"
        );
    }
    nothing_is_left(&server, &[&client]).await;
}

/// R13: a single lock and unlock leaves no entry behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r13_r21_immediate_lock_and_unlock_leaves_no_entry() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let mut later = 0;
    for round in 0..2000 {
        lock.lock().await.unwrap().unlock().await.unwrap();
        // If the watchdog is checking the entry at this moment, it is removed a moment later.
        if client.stats().holds > 0 {
            later += 1;
            eventually(&format!("round {round} is forgotten"), || async {
                client.stats().holds == 0
            })
            .await;
        }
    }
    assert!(
        later <= 10,
        "{later} rounds left an entry behind for a while"
    );
    nothing_is_left(&server, &[&client]).await;
}

/// R48: if the lease ended between a check and a write, a re-entry could overwrite the next holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r48_a_re_entry_at_lease_end_never_overwrites_the_next_holder() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    for round in 0..60 {
        let guard = loop {
            // A reply that comes after the end of such a short lease is an error, so the acquire is
            // retried.
            if let Ok(Some(guard)) = la
                .try_lock_with(AcquireOptions::new().lease(Duration::from_millis(20 + round % 7)))
                .await
            {
                break guard;
            }
        };
        let other = tokio::spawn({
            let lock = lb.clone();
            async move { lock.lock().await.unwrap() }
        });
        // At the end of the lease, or up to 3 ms before it.
        while guard.remaining() > Duration::from_micros(100 * (round % 30)) {
            tokio::task::yield_now().await;
        }
        let nested = match la
            .try_lock_with(AcquireOptions::new().lease(Duration::from_millis(10)))
            .await
        {
            Ok(nested) => nested,
            Err(Error::Lost { .. } | Error::Unconfirmed { .. }) => None,
            Err(error) => panic!("{error}"),
        };
        let still_ours = nested.as_ref().is_some_and(|nested| !nested.is_lost());
        let holder = server.record("l");
        if still_ours && nested.as_ref().is_some_and(|nested| !nested.is_lost()) {
            let ours = guard.owner().to_string();
            assert!(
                matches!(&holder[..], [(owner, 1 | 2)] if *owner == ours),
                "round {round}: {holder:?}"
            );
        }
        let other = tokio::time::timeout(SOON, other)
            .await
            .expect("its turn")
            .unwrap();
        assert!(
            guard.is_lost() && nested.as_ref().is_none_or(LockGuard::is_lost),
            "round {round}"
        );
        drop(nested);
        drop(guard);
        a.idle().await;
        assert_eq!(
            server.record("l"),
            [(other.owner().to_string(), 1)],
            "round {round}"
        );
        other.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R49: tasks share one lock object, each with its own lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r49_tasks_that_share_a_lock_object_keep_their_own_leases() {
    let server = Arc::new(Server::start());
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let tasks: Vec<_> = [Some(100), Some(3600), None, Some(7)]
        .into_iter()
        .map(|seconds| {
            let (lock, server) = (lock.clone(), Arc::clone(&server));
            tokio::spawn(async move {
                for _ in 0..30 {
                    let options = AcquireOptions::new();
                    let lease = Duration::from_secs(seconds.unwrap_or(30));
                    let options = if seconds.is_some() {
                        options.lease(lease)
                    } else {
                        options
                    };
                    let guard = lock.lock_with(options).await.unwrap();
                    let left = Duration::from_millis(server.pttl("l") as u64);
                    assert!(
                        left <= lease && left + Duration::from_secs(5) > lease,
                        "{left:?} of {lease:?}"
                    );
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// An owner that drops and takes the lock in a loop really releases it in between: another client
/// gets its turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drop_then_relock_of_the_same_owner_releases_in_between() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let turns = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&turns);
    let waiter = tokio::spawn(async move {
        for _ in 0..5 {
            lb.lock().await.unwrap().unlock().await.unwrap();
            counting.fetch_add(1, Ordering::SeqCst);
        }
    });
    let start = Instant::now();
    let mut rounds = 0;
    while turns.load(Ordering::SeqCst) < 5 {
        let guard = la.lock().await.unwrap();
        assert_eq!(
            server.record("l"),
            [(guard.owner().to_string(), 1)],
            "released in between"
        );
        drop(guard);
        rounds += 1;
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "starved for {rounds} rounds"
        );
    }
    waiter.await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R46: the same owner name in two clients is two owners. Neither re-enters the other's hold.
#[tokio::test]
async fn r46_equal_task_parts_of_two_clients_are_two_owners() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let as_job = |owner| AcquireOptions::new().owner(owner);
    let guard = la
        .try_lock_with(as_job(a.owner("job").unwrap()))
        .await
        .unwrap()
        .unwrap();
    assert!(
        lb.try_lock_with(as_job(b.owner("job").unwrap()))
            .await
            .unwrap()
            .is_none()
    );
    assert!(matches!(
        lb.release(&b.owner("job").unwrap()).await,
        Err(Error::NotHeld { .. })
    ));
    let nested = la
        .try_lock_with(as_job(a.owner("job").unwrap()))
        .await
        .unwrap()
        .expect("the same owner");
    assert!(
        la.try_lock().await.unwrap().is_none(),
        "the task itself is another owner"
    );
    guard.unlock().await.unwrap();
    nested.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// F37: the limit is checked before a request is sent.
#[tokio::test]
async fn f37_more_holds_than_allowed_are_refused_and_change_nothing() {
    let server = Server::start();
    let client = server.client_with(|c| c.max_holds(3)).await;
    let lock = client.reentrant_lock("l").unwrap();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(lock.lock().await.unwrap());
    }
    let scripts = server.script_count();
    assert!(matches!(
        lock.lock().await,
        Err(Error::TooManyHolds { holds: 3, .. })
    ));
    assert_eq!(server.script_count(), scripts);
    guards.pop().unwrap().unlock().await.unwrap();
    guards.push(lock.lock().await.unwrap());
    drop(guards);
    nothing_is_left(&server, &[&client]).await;
}

/// R02, R05, R12: a hold stays renewed whatever is added to and removed from the registry while the
/// watchdog runs. One owner holds each lock throughout, and re-enters and releases it from several
/// threads at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r02_r05_r12_a_hold_stays_renewed_whatever_comes_and_goes() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(Duration::from_secs(3)))
        .await;
    let (mut held, mut busy) = (Vec::new(), Vec::new());
    let until = std::time::Instant::now() + Duration::from_secs(10);
    for number in 0..16 {
        let owner = client.owner(format!("owner-{number}")).unwrap();
        let lock = client.reentrant_lock(format!("l{number}")).unwrap();
        held.push(
            lock.try_lock_with(AcquireOptions::new().owner(owner.clone()))
                .await
                .unwrap()
                .unwrap(),
        );
        for _ in 0..2 {
            let (lock, owner, client) = (lock.clone(), owner.clone(), client.clone());
            busy.push(tokio::spawn(async move {
                let mut rounds = 0_u32;
                while std::time::Instant::now() < until {
                    let again = lock
                        .try_lock_with(AcquireOptions::new().owner(owner.clone()))
                        .await
                        .unwrap()
                        .unwrap();
                    // An entry that is added and removed at once.
                    let other = client
                        .reentrant_lock(format!("{}:{rounds}", again.name()))
                        .unwrap();
                    drop(
                        other
                            .try_lock_with(AcquireOptions::new().owner(owner.clone()))
                            .await
                            .unwrap()
                            .unwrap(),
                    );
                    again.unlock().await.unwrap();
                    rounds += 1;
                }
                rounds
            }));
        }
    }
    for task in busy {
        assert!(task.await.unwrap() > 1);
    }
    for guard in held {
        assert!(!guard.is_lost(), "{guard:?}");
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// Runs four processes with eight tasks each; see `support::history`.
#[test]
fn no_two_of_32_tasks_in_four_processes_hold_a_lock_at_once() {
    let server = Server::start_real();
    for leases in [false, true] {
        History::play(&server, "reentrant", 3, 30, leases).assert_no_clashes();
    }
}
