//! Lost and late replies, doubled and late requests: a hold counts once, and ends when it is
//! released.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, LossReason, OwnerId};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::{
    Server, eventually,
    proxy::{Action, Proxy, Request, Verb, Way, is_over_fred},
    within,
};

/// Command timeout. Leases are 10 times as long.
const T: Duration = Duration::from_millis(500);
const LEASE: Duration = Duration::from_secs(5);

struct Bed {
    server: Server,
    proxy: Proxy,
    client: LockClient,
    /// Another client, not behind the proxy.
    other: LockClient,
}

impl Bed {
    async fn new() -> Self {
        Self::with(T).await
    }

    /// Starts a bed whose client waits this long for a reply, including a reconnect.
    async fn with(command_timeout: Duration) -> Self {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let builder = LockClient::builder()
            .watchdog_timeout(LEASE)
            .command_timeout(command_timeout);
        let client = builder.connect(proxy.url()).await.unwrap();
        let bed = Self {
            other: server.client().await,
            server,
            proxy,
            client,
        };
        // Loads the scripts, so that no request meets NOSCRIPT.
        bed.lock("warm")
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        bed
    }

    fn lock(&self, name: &str) -> Lock {
        self.client.reentrant_lock(name).unwrap()
    }

    fn other_lock(&self, name: &str) -> Lock {
        self.other.reentrant_lock(name).unwrap()
    }

    /// Acquires the fair lock `l` after a wait. The connection breaks at the acquire, and the
    /// server executes that request only after `delay`. The retry uses the same owner id, because
    /// that one is in the wait queue.
    async fn fair_turn_with_a_ghost(&self, delay: Duration) -> LockGuard {
        let (lock, other) = (
            self.client.fair_lock("l").unwrap(),
            self.other.fair_lock("l").unwrap(),
        );
        lock.lock().await.unwrap().unlock().await.unwrap(); // the scripts are known
        let held = other.lock().await.unwrap();
        let waiter = lock.try_lock_for(Duration::from_secs(20));
        let end = async {
            eventually("a waiter", || async {
                self.server.exists("redisson_lock_queue:{l}")
            })
            .await;
            self.proxy.once(Verb::Acquire, Action::Ghost(delay));
            held.unlock().await.unwrap();
        };
        let (guard, ()) = tokio::join!(waiter, end);
        guard.unwrap().expect("its turn")
    }

    /// Asserts that the guard is valid and that the record counts `holds` for its owner.
    fn assert_held(&self, guard: &LockGuard, holds: i64) {
        assert!(!guard.is_lost());
        assert_eq!(
            self.server.record(guard.name()),
            [(guard.owner().to_string(), holds)]
        );
    }

    /// Asserts that nothing is left: no record, no hold, no settlement, no channel.
    async fn assert_clean(&self) {
        self.client.idle().await;
        eventually("nothing is left in the client", || async {
            let stats = self.client.stats();
            (stats.holds, stats.channels, stats.settling) == (0, 0, 0)
        })
        .await;
        assert_eq!(self.server.dump(), []);
    }

    /// Watches a record on a thread until [`Watch::end`], which panics if the record ever counted
    /// more than `limit`.
    fn watch(&self, lock: &'static str, limit: i64) -> Watch {
        let (stop, mut wire) = (Arc::new(AtomicBool::new(false)), self.server.wire());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut most = 0;
            while !stopped.load(Ordering::SeqCst) {
                for value in wire.call(&["HVALS", lock]).unwrap().list() {
                    most = most.max(value.text().parse::<i64>().unwrap());
                }
            }
            assert!(most <= limit, "the record counted {most}");
            most
        });
        Watch { stop, thread }
    }
}

struct Watch {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<i64>,
}

impl Watch {
    fn end(self) -> i64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().expect("no count above the limit")
    }
}

fn unconfirmed<T: std::fmt::Debug>(answer: nestlock::Result<T>) {
    assert!(
        matches!(answer, Err(Error::Unconfirmed { .. })),
        "{answer:?}"
    );
}

// --- acquires ---

#[tokio::test]
async fn r31_r40_an_acquire_whose_reply_is_late_never_counts_twice() {
    let bed = Bed::new().await;
    let watch = bed.watch("l", 1);
    bed.proxy.once(Verb::Acquire, Action::Late(2 * T));
    let guard = bed
        .lock("l")
        .try_lock_for(Duration::from_secs(20))
        .await
        .unwrap()
        .expect("the lock");
    assert!(bed.proxy.count(Verb::Acquire) >= 3, "it was retried");
    bed.assert_held(&guard, 1);
    guard.unlock().await.unwrap();
    bed.assert_clean().await;
    assert_eq!(watch.end(), 1);
}

#[tokio::test]
async fn r31_an_acquire_given_up_without_a_reply_leaves_nothing() {
    for action in [
        Action::Late(2 * T),
        Action::Slow(2 * T),
        Action::Lose,
        Action::CutBefore,
        Action::Ghost(T / 2),
    ] {
        let bed = Bed::new().await;
        let watch = bed.watch("l", 1);
        bed.proxy.once(Verb::Acquire, action);
        unconfirmed(bed.lock("l").try_lock().await);
        bed.assert_clean().await;
        let guard = bed.other_lock("l").try_lock().await.unwrap();
        assert!(guard.is_some(), "{action:?}: others can have it");
        watch.end();
    }
}

#[tokio::test]
async fn f13_a_nested_acquire_without_a_reply_counts_once() {
    for action in [Action::Late(2 * T), Action::Lose] {
        let bed = Bed::new().await;
        let watch = bed.watch("l", 3);
        let outer = bed.lock("l").lock().await.unwrap();
        bed.proxy.once(Verb::Acquire, action);
        let inner = bed
            .lock("l")
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap()
            .expect("re-entry");
        bed.assert_held(&outer, 2);
        bed.proxy.once(Verb::Acquire, action);
        unconfirmed(bed.lock("l").try_lock().await);
        eventually("the hold without a guard is released", || async {
            bed.server.record("l")[0].1 == 2
        })
        .await;
        // The janitor awaits the reply, and has the owner lock until then.
        bed.client.idle().await;
        inner.unlock().await.unwrap();
        eventually("one is left", || async { bed.server.record("l")[0].1 == 1 }).await;
        bed.assert_held(&outer, 1);
        outer.unlock().await.unwrap();
        bed.assert_clean().await;
        watch.end();
    }
}

/// An acquire that is tried again is not blocked by its own record.
#[tokio::test]
async fn n13_a_retried_acquire_is_not_blocked_by_its_own_record() {
    let bed = Bed::new().await;
    // The lease lasts far beyond the test, so only a retry can get the lock.
    let (wait, options) = (
        Duration::from_secs(60),
        AcquireOptions::new().lease(Duration::from_secs(3600)),
    );
    for action in [Action::Lose, Action::Late(2 * T)] {
        bed.proxy.once(Verb::Acquire, action);
        let start = Instant::now();
        let guard = bed
            .lock("l")
            .try_lock_for_with(wait, options.clone())
            .await
            .unwrap()
            .expect("the lock");
        assert!(start.elapsed() < Duration::from_secs(20));
        guard.unlock().await.unwrap();
    }
    bed.assert_clean().await;
}

/// After an acquire without a reply, the task does not re-enter the hold that this acquire may have
/// left behind.
#[tokio::test]
async fn r41_a_task_does_not_re_enter_the_hold_of_a_lost_acquire() {
    let bed = Bed::new().await;
    bed.proxy.once(Verb::Acquire, Action::Lose);
    let ghost = bed.client.current_owner();
    unconfirmed(bed.lock("l").try_lock().await);
    let guard = bed
        .lock("l")
        .try_lock_for(Duration::from_secs(20))
        .await
        .unwrap()
        .expect("the lock");
    bed.assert_held(&guard, 1);
    assert_ne!(
        guard.owner(),
        ghost,
        "a name that the lost acquire cannot free"
    );
    guard.unlock().await.unwrap();
    let other = bed
        .other_lock("l")
        .try_lock_for(Duration::from_secs(20))
        .await
        .unwrap();
    assert!(other.is_some(), "one release was enough");
}

// --- releases ---

/// `unlock` waits until the server has released. After an earlier request without a reply, the
/// owner changes its id, and finding no hold under the new id confirms nothing.
#[tokio::test]
async fn an_unlock_behind_an_unanswered_request_fails() {
    for kind in ["reentrant", "fair", "read"] {
        for way in [
            "a dropped guard",
            "a cancelled unlock",
            "a cancelled acquire",
        ] {
            let bed = Bed::new().await;
            let lock = match kind {
                "fair" => bed.client.fair_lock("l").unwrap(),
                "read" => bed.client.read_write_lock("l").unwrap().read_lock(),
                _ => bed.lock("l"),
            };
            let outer = lock.lock().await.unwrap();
            let inner = if way == "a cancelled acquire" {
                None
            } else {
                Some(lock.lock().await.unwrap())
            };
            bed.proxy.rule(|_| Action::Mute);
            let sent = || bed.proxy.count(Verb::Acquire) + bed.proxy.count(Verb::Release);
            let before = sent();
            let is_sent = eventually("it is sent", || async { sent() > before });
            match inner {
                None => tokio::select! {
                    locked = lock.lock() => panic!("{kind}: {locked:?}"),
                    () = is_sent => {}
                },
                Some(inner) if way == "a dropped guard" => {
                    drop(inner);
                    is_sent.await;
                }
                Some(inner) => tokio::select! {
                    unlocked = inner.unlock() => panic!("{kind}: {unlocked:?}"),
                    () = is_sent => {}
                },
            }
            let unlocked = outer.unlock().await;
            assert!(unlocked.is_err(), "{kind}, {way}");
            bed.proxy.pass();
            eventually("it is undone", || async { !bed.server.exists("l") }).await;
        }
    }
}

#[tokio::test]
async fn r33_a_release_whose_reply_is_lost_succeeds() {
    let bed = Bed::new().await;
    let guard = bed.lock("l").lock().await.unwrap();
    let before = bed.proxy.count(Verb::Release);
    bed.proxy.once(Verb::Release, Action::Lose);
    guard.unlock().await.unwrap();
    assert!(!bed.server.exists("l"));
    // R34: the retry is the same request, so that the server can tell it from another release.
    let releases = bed.proxy.seen(Verb::Release).split_off(before);
    let is_first = |release: &Request| {
        (release.keys(), release.args()) == (releases[0].keys(), releases[0].args())
    };
    assert!(
        releases.len() >= 2 && releases.iter().all(is_first),
        "{releases:?}"
    );
    bed.assert_clean().await;
}

/// A release that is tried again does not free the next hold.
#[tokio::test]
async fn r33_r34_a_retried_release_does_not_free_the_next_hold() {
    let bed = Bed::new().await;
    let guard = bed.lock("l").lock().await.unwrap();
    let next = bed.other_lock("l");
    let next = tokio::spawn(async move { next.lock().await.unwrap() });
    eventually("a waiter", || async { !bed.server.channels().is_empty() }).await;
    bed.proxy.once(Verb::Release, Action::Lose);
    guard.unlock().await.unwrap();
    let next = next.await.unwrap();
    bed.client.idle().await;
    bed.assert_held(&next, 1);
}

/// Nested releases whose replies are lost give back one hold each.
#[tokio::test]
async fn f13_nested_releases_with_lost_replies_return_one_hold_each() {
    // each release has this time for its reconnect and its retry, on a busy machine
    let bed = Bed::with(3 * T).await;
    let mut guards = Vec::new();
    for _ in 0..4 {
        guards.push(bed.lock("l").lock().await.unwrap());
    }
    while let Some(guard) = guards.pop() {
        bed.proxy.once(Verb::Release, Action::Lose);
        guard.unlock().await.unwrap();
        match guards.last() {
            Some(left) => bed.assert_held(left, guards.len() as i64),
            None => assert!(!bed.server.exists("l")),
        }
    }
    bed.assert_clean().await;
}

/// Rule 4: a release that the server executes late finds an owner id that is no longer in use.
#[tokio::test]
async fn f7_a_late_release_does_not_free_the_next_hold_of_its_task() {
    for lives in [true, false] {
        let bed = Bed::new().await;
        let guard = bed.lock("l").lock().await.unwrap();
        bed.proxy.once(Verb::Release, Action::Ghost(T));
        if lives {
            guard.unlock().await.unwrap();
        } else {
            drop(guard);
        }
        let next = bed
            .lock("l")
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap()
            .expect("the lock");
        eventually("the late release is executed", || async {
            bed.proxy.ghosts() == 1
        })
        .await;
        bed.assert_held(&next, 1);
        next.unlock().await.unwrap();
        bed.assert_clean().await;
    }
}

/// A release by another client that is executed late does not free the next hold of the same owner.
#[tokio::test]
async fn f7_another_clients_late_release_spares_the_owners_next_hold() {
    let bed = Bed::new().await;
    let (here, there) = (bed.other_lock("l"), bed.lock("l"));
    let me = || AcquireOptions::new().owner(bed.other.owner("job").unwrap());
    let owner = here
        .try_lock_with(me())
        .await
        .unwrap()
        .unwrap()
        .leave_to_lease();
    // Late enough for the next release to finish first, even on a busy machine.
    bed.proxy
        .once(Verb::Release, Action::Ghost(Duration::from_secs(8)));
    unconfirmed(there.release(&owner).await);
    // The release that ran may have lost its reply to the timeout. The retry then finds no hold.
    let is_free = |released| matches!(released, Ok(()) | Err(Error::NotHeld { .. }));
    eventually("a release over the next connection", || async {
        is_free(there.release(&owner).await)
    })
    .await;
    assert_eq!(bed.proxy.ghosts(), 0, "the late one came first");
    // The hold is gone for the client that gave it away, too.
    assert!(matches!(
        here.release(&owner).await,
        Err(Error::NotHeld { .. })
    ));
    let next = here
        .try_lock_with(me())
        .await
        .unwrap()
        .expect("a free lock");
    eventually("the late release", || async { bed.proxy.ghosts() == 1 }).await;
    bed.assert_held(&next, 1);
    next.unlock().await.unwrap();
}

/// A nested release that is executed late does not end the hold.
#[tokio::test]
async fn f7_a_late_nested_release_does_not_end_the_hold() {
    let bed = Bed::new().await;
    let outer = bed.lock("l").lock().await.unwrap();
    let inner = bed.lock("l").lock().await.unwrap();
    bed.proxy.once(Verb::Release, Action::Ghost(T));
    inner.unlock().await.unwrap();
    let again = bed.lock("l").lock().await.unwrap();
    eventually("the late release is executed", || async {
        bed.proxy.ghosts() == 1
    })
    .await;
    assert_eq!(bed.server.record("l")[0].0, outer.owner().to_string());
    again.unlock().await.unwrap();
    bed.assert_held(&outer, 1);
    outer.unlock().await.unwrap();
    bed.assert_clean().await;
}

/// A waiter in a queue keeps its owner id, so a late copy of its acquire may run after a nested
/// one. The record must still count both, for the receiver of a hand-over. Found by the simulator.
#[tokio::test]
async fn f7_a_late_acquire_takes_no_nested_hold_away() {
    let bed = Bed::new().await;
    let outer = bed.fair_turn_with_a_ghost(T).await;
    let inner = bed.client.fair_lock("l").unwrap().lock().await.unwrap();
    bed.assert_held(&outer, 2);
    eventually("the late acquire is executed", || async {
        bed.proxy.ghosts() == 1
    })
    .await;
    bed.assert_held(&outer, 2);
    inner.unlock().await.unwrap();
    outer.unlock().await.unwrap();
    bed.assert_clean().await;
}

/// A late acquire does not renew a hold that was left: the record would be renewed for ever, and no
/// guard could release it.
#[tokio::test]
async fn f7_a_late_acquire_does_not_renew_what_was_left() {
    let bed = Bed::new().await;
    let given = bed.fair_turn_with_a_ghost(2 * T).await.leave_to_lease();
    bed.client.idle().await;
    bed.other
        .fair_lock("l")
        .unwrap()
        .release(&given)
        .await
        .unwrap();
    assert_eq!(bed.server.record("l"), []);
    eventually("the late acquire is executed", || async {
        bed.proxy.ghosts() == 1
    })
    .await;
    let came = Instant::now();
    eventually("it dies by its lease", || async {
        bed.server.record("l").is_empty()
    })
    .await;
    assert!(came.elapsed() < LEASE + T, "{:?}", came.elapsed());
    bed.assert_clean().await;
}

/// A request that runs late changes the count. The rest of it ends with its lease.
#[tokio::test]
async fn f7_holds_that_are_left_end_whatever_has_come_late() {
    // A release that runs late is retried over a new connection, and a busy machine connects
    // slowly.
    let bed = Bed::with(3 * T).await;
    let (lock, other) = (bed.lock("l"), bed.other_lock("l"));
    // The count in the record when both holds are left: one too many after a late acquire, one too
    // few after a late release.
    for (verb, says) in [(Verb::Acquire, 3), (Verb::Release, 1)] {
        let outer = lock.lock().await.unwrap();
        let inner = lock.lock().await.unwrap();
        let ghosts = bed.proxy.ghosts();
        bed.proxy.once(verb, Action::Ghost(4 * T));
        let inner = if verb == Verb::Acquire {
            assert!(lock.try_lock().await.is_err());
            bed.client.idle().await;
            inner
        } else {
            inner.unlock().await.unwrap();
            lock.lock().await.unwrap()
        };
        bed.assert_held(&outer, 2);
        eventually("it is executed late", || async {
            bed.proxy.ghosts() == ghosts + 1
        })
        .await;
        bed.assert_held(&outer, says);
        let (outer, inner) = (outer.leave_to_lease(), inner.leave_to_lease());
        assert_eq!(outer, inner);
        bed.client.idle().await;
        assert!(
            other.try_lock().await.unwrap().is_none(),
            "its lease is not over"
        );
        for left in (0..says).rev() {
            other.release(&outer).await.unwrap();
            assert_eq!(other.is_locked().await.unwrap(), left > 0);
        }
        bed.assert_clean().await;
    }
}

/// A request in doubt does not stop the renewals of the guard that is kept.
#[tokio::test]
async fn f7_a_dead_connection_stops_no_renewals_of_a_kept_guard() {
    let bed = Bed::new().await;
    let lease = Duration::from_millis(1600);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .command_timeout(T)
        .connect(bed.proxy.url());
    let lock = client.await.unwrap().reentrant_lock("l").unwrap();
    for long_ago in [true, false] {
        let outer = lock.lock().await.unwrap();
        let inner = lock.lock().await.unwrap();
        bed.proxy.once(Verb::Acquire, Action::Lose);
        let third = lock.try_lock().await;
        assert!(third.is_err(), "{third:?}");
        let broke = Instant::now();
        while long_ago && broke.elapsed() < 2 * lease {
            lock.lock().await.unwrap().unlock().await.unwrap();
        }
        let given = inner.leave_to_lease();
        let left = Instant::now();
        while left.elapsed() < 3 * lease {
            assert!(
                bed.server.exists("l"),
                "not renewed after {:?}, {long_ago}",
                left.elapsed()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        outer.unlock().await.unwrap();
        bed.other_lock("l").release(&given).await.unwrap();
        assert!(!bed.server.exists("l"));
    }
}

#[tokio::test]
async fn r19_the_hold_after_a_release_over_a_bad_link_is_renewed() {
    let bed = Bed::new().await;
    let client = LockClient::builder()
        .watchdog_timeout(Duration::from_millis(900))
        .connect(bed.proxy.url())
        .await
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    for action in [Action::Lose, Action::Late(Duration::from_millis(600))] {
        let guard = lock.lock().await.unwrap();
        bed.proxy.once(Verb::Release, action);
        let _ = guard.unlock().await; // Ok or Unconfirmed
        let guard = lock
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap()
            .expect("the lock");
        let held = Instant::now();
        eventually("three leases are over", || async {
            assert!(!guard.is_lost(), "lost after {:?}", held.elapsed());
            held.elapsed() > Duration::from_millis(2700)
        })
        .await;
        bed.assert_held(&guard, 1);
        guard.unlock().await.unwrap();
    }
}

/// The hold of the other guard is left to its lease while an `unlock` waits for its reply.
#[tokio::test]
async fn an_unlock_next_to_a_hold_that_is_left_is_confirmed() {
    for is_dropped in [false, true] {
        let bed = Bed::new().await;
        let (outer, inner) = (
            bed.lock("l").lock().await.unwrap(),
            bed.lock("l").lock().await.unwrap(),
        );
        bed.proxy.rule(|_| Action::Mute);
        let before = bed.proxy.count(Verb::Release);
        let unlocking = tokio::spawn(inner.unlock());
        eventually("it is sent", || async {
            bed.proxy.count(Verb::Release) > before
        })
        .await;
        let owner = outer.leave_to_lease();
        if is_dropped {
            unlocking.abort();
        }
        bed.proxy.pass();
        bed.proxy.cut();
        if !is_dropped {
            unlocking.await.unwrap().unwrap();
        }
        bed.client.idle().await;
        assert_eq!(bed.server.record("l"), [(owner.to_string(), 1)]);
        bed.lock("l").release(&owner).await.unwrap();
        bed.assert_clean().await;
    }
}

/// A release without a guard decrements the count in the record. The first try runs late: while the
/// retries are refused, or between the check and the write of the next try.
#[tokio::test]
async fn a_release_that_comes_late_takes_one_hold_only() {
    for is_refused in [true, false] {
        let bed = Bed::new().await;
        let (outer, inner) = (
            bed.lock("l").lock().await.unwrap(),
            bed.lock("l").lock().await.unwrap(),
        );
        let owner = outer.leave_to_lease();
        inner.leave_to_lease();
        bed.client.idle().await;
        let (ghosts, mut is_first) = (bed.proxy.ghosts(), true);
        bed.proxy.rule(move |request| match request.verb() {
            Some(Verb::Release) if is_first => {
                is_first = false;
                Action::Ghost(Duration::from_secs(1))
            }
            Some(Verb::Release) if is_refused => {
                Action::Refuse("NOREPLICAS Not enough good replicas to write.")
            }
            Some(Verb::Inspect) if !is_first && !is_refused => Action::Held,
            _ => Action::Pass,
        });
        let next = if is_refused {
            Verb::Release
        } else {
            Verb::Inspect
        };
        let before = bed.proxy.count(next);
        unconfirmed(bed.lock("l").release(&owner).await);
        // also after a refusal, since that says nothing about the first one
        let tries = if is_refused { 3 } else { 2 };
        eventually("it is tried again", || async {
            bed.proxy.count(next) >= before + tries
        })
        .await;
        eventually("the first one has come", || async {
            bed.proxy.ghosts() > ghosts
        })
        .await;
        bed.proxy.pass();
        bed.proxy.let_go();
        bed.client.idle().await;
        assert_eq!(
            bed.server.record("l"),
            [(owner.to_string(), 1)],
            "refused: {is_refused}"
        );
        bed.lock("l").release(&owner).await.unwrap();
        bed.assert_clean().await;
    }
}

/// The request that gives up a place in the queue gets no reply for now. The owner's next call is
/// sent behind it, and does not wait for that reply.
#[tokio::test]
async fn a_call_is_sent_behind_a_place_that_is_given_up() {
    let (server, limit) = (Server::start(), Duration::from_secs(30));
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder()
        .watchdog_timeout(3 * limit)
        .command_timeout(limit);
    let client = builder.connect(proxy.url()).await.unwrap();
    let other = server.client().await;
    let held = other.fair_lock("l").unwrap().lock().await.unwrap();
    proxy.rule(|request| match request.verb() {
        Some(Verb::Release) => Action::Held,
        _ => Action::Pass,
    });
    let lock = client.fair_lock("l").unwrap();
    let next = OwnerId::scope(async {
        let waited = lock.try_lock_for(Duration::from_millis(100)).await;
        assert!(waited.unwrap().is_none());
        eventually("the place is given up", || async {
            proxy.count(Verb::Release) > 0
        })
        .await;
        let sent = proxy.count(Verb::Acquire);
        tokio::join!(lock.try_lock(), async {
            within(limit / 2, "the next call is sent", || async {
                proxy.count(Verb::Acquire) > sent
            })
            .await;
            proxy.let_go();
        })
    });
    assert!(next.await.0.unwrap().is_none());
    proxy.pass();
    held.unlock().await.unwrap();
    client.shutdown().await.unwrap();
}

/// A release of another kind may fail for a reason of its own.
#[tokio::test]
async fn names_of_another_kind_do_not_hold_up_those_of_a_lock() {
    let bed = Bed::new().await;
    let (lock, string) = (bed.lock("l"), bed.client.string_lock("l").unwrap());
    bed.proxy.rule(|request| match request.verb() {
        Some(Verb::Acquire) => Action::Mute,
        Some(Verb::Release) => Action::CutBefore,
        _ => Action::Pass,
    });
    // The string lock goes first. Its pending release then finds a hash, and is refused while that
    // exists.
    let options = || AcquireOptions::new().lease(Duration::from_secs(60));
    for lock in [string, lock] {
        bed.server.call(&["DEL", "l"]);
        let failed = bed.proxy.count(Verb::Release);
        tokio::select! {
            locked = lock.lock_with(options()) => panic!("{locked:?}"),
            () = eventually("it is held without a guard", || async { bed.server.exists("l") }) => {}
        }
        eventually("its release fails", || async {
            bed.proxy.count(Verb::Release) > failed + 2
        })
        .await;
    }
    bed.proxy.pass();
    eventually("it is released", || async { !bed.server.exists("l") }).await;
}

/// An error that leaves open whether the request ran costs each try its owner id. The client
/// releases these ids one at a time, so that the request rate of a waiter does not grow.
#[tokio::test]
async fn names_left_by_tries_that_fail_are_released_in_turn() {
    let bed = Bed::new().await;
    bed.proxy.rule(|request| {
        request
            .verb()
            .map_or(Action::Pass, |_| Action::Refuse("ERR upstream failure"))
    });
    let waited = bed.lock("l").try_lock_for(Duration::from_secs(10)).await;
    assert!(waited.is_err(), "{waited:?}");
    let (tries, releases) = (
        bed.proxy.count(Verb::Acquire),
        bed.proxy.count(Verb::Release),
    );
    // Each try first releases what the last one left, and leaves one owner id.
    assert!(
        tries >= 10 && releases < 4 * tries,
        "{releases} releases, {tries} tries"
    );
    bed.proxy.pass();
    bed.assert_clean().await;
}

// --- a server that pauses ---

/// An acquire and a release during CLIENT PAUSE leave one hold or none.
#[tokio::test]
async fn r23_r40_calls_during_client_pause_leave_one_hold_or_none() {
    let bed = Bed::new().await;
    let guard = bed.lock("held").lock().await.unwrap();
    let mut wire = bed.server.wire();
    wire.call(&["CLIENT", "PAUSE", "1500", "ALL"]).unwrap();
    unconfirmed(bed.lock("l").try_lock().await);
    unconfirmed(guard.unlock().await);
    // Several attempts of one task run into the pause.
    unconfirmed(bed.lock("l").try_lock_for(T / 2).await);
    let other = bed
        .other_lock("l")
        .try_lock_for(LEASE)
        .await
        .unwrap()
        .expect("the lock, within the lease");
    eventually("the release is executed", || async {
        !bed.server.exists("held")
    })
    .await;
    bed.client.idle().await;
    bed.assert_held(&other, 1);
    other.unlock().await.unwrap();
    let watch = bed.watch("l", 1);
    let again = bed.lock("l").lock().await.unwrap();
    bed.assert_held(&again, 1);
    again.unlock().await.unwrap();
    watch.end();
    bed.assert_clean().await;
}

// --- callers that vanish between request and reply ---

/// An acquire that is cancelled between its request and its reply holds nothing.
#[tokio::test]
async fn r42_an_acquire_cancelled_before_its_reply_holds_nothing() {
    let bed = Bed::new().await;
    for action in [
        Action::Late(T / 2),
        Action::Late(2 * T),
        Action::Slow(T / 2),
        Action::Lose,
    ] {
        let before = bed.proxy.count(Verb::Acquire);
        bed.proxy.once(Verb::Acquire, action);
        let lock = bed.lock("l");
        let call = tokio::spawn(async move { lock.lock().await.map(drop) });
        eventually("the request is in flight", || async {
            bed.proxy.count(Verb::Acquire) > before
        })
        .await;
        call.abort();
        let _ = call.await;
        bed.assert_clean().await;
    }
}

#[tokio::test]
async fn s16_a_release_cancelled_between_request_and_reply_goes_on() {
    let bed = Bed::new().await;
    for action in [
        Action::Late(T / 2),
        Action::Late(2 * T),
        Action::Slow(T / 2),
        Action::Lose,
        Action::CutBefore,
    ] {
        let guard = bed.lock("l").lock().await.unwrap();
        let before = bed.proxy.count(Verb::Release);
        bed.proxy.once(Verb::Release, action);
        let call = tokio::spawn(guard.unlock());
        eventually("the request is in flight", || async {
            bed.proxy.count(Verb::Release) > before
        })
        .await;
        call.abort();
        let _ = call.await;
        bed.assert_clean().await;
    }
}

// --- one way cut ---

/// A connection that is cut one way ends the hold at its deadline, and heals.
#[tokio::test]
async fn f12_a_one_way_cut_ends_the_hold_at_its_deadline_and_heals() {
    for way in [Way::ToServer, Way::ToClient, Way::Both] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let other = server.client().await;
        let client = LockClient::builder()
            .watchdog_timeout(Duration::from_millis(900))
            .connect(proxy.url())
            .await
            .unwrap();
        let lock = client.reentrant_lock("l").unwrap();
        let guard = Arc::new(lock.lock().await.unwrap());
        let (next, holder) = (other.reentrant_lock("l").unwrap(), Arc::clone(&guard));
        let next = tokio::spawn(async move {
            let next = next.lock().await.unwrap();
            assert!(holder.is_lost(), "two valid guards");
            next
        });
        eventually("a waiter", || async { !server.channels().is_empty() }).await;

        proxy.black_hole(way);
        let error = tokio::time::timeout(Duration::from_secs(20), guard.lost())
            .await
            .expect("notified");
        assert!(matches!(error, Error::Lost { .. }), "{way:?}: {error}");
        assert!(
            client
                .reentrant_lock("other")
                .unwrap()
                .try_lock_for(Duration::from_millis(300))
                .await
                .is_err()
        );
        drop(guard);
        // Renewals that still reach the server keep the record until the holder gives up.
        let next = tokio::time::timeout(Duration::from_secs(20), next)
            .await
            .expect("the lock")
            .unwrap();

        proxy.heal();
        let again = client
            .reentrant_lock("other")
            .unwrap()
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap();
        again.expect("the lock").unlock().await.unwrap();
        client.idle().await;
        assert_eq!(server.record("l"), [(next.owner().to_string(), 1)]);
        assert!(!server.exists("other"));
    }
}

// --- doubled requests ---

#[tokio::test]
async fn f14_doubled_requests_change_nothing() {
    let bed = Bed::new().await;
    bed.proxy.rule(|request| {
        if request.verb().is_some() {
            Action::Twice
        } else {
            Action::Pass
        }
    });
    let lock = bed.lock("l");
    let waiter = bed.other_lock("l");
    for _ in 0..20 {
        let outer = lock.lock().await.unwrap();
        bed.assert_held(&outer, 1);
        let inner = lock.lock().await.unwrap();
        bed.assert_held(&outer, 2);
        assert!(waiter.try_lock().await.unwrap().is_none());
        outer.extend(Duration::from_secs(60)).await.unwrap();
        assert!(bed.server.pttl("l") > 50_000);
        assert_eq!(lock.hold_count(&outer.owner()).await.unwrap(), 2);
        inner.unlock().await.unwrap();
        bed.assert_held(&outer, 1);
        outer.unlock().await.unwrap();
        assert!(!bed.server.exists("l"));
        let guard = waiter.try_lock().await.unwrap().expect("free");
        assert!(lock.try_lock().await.unwrap().is_none());
        guard.unlock().await.unwrap();
    }
    let guard = bed.other_lock("l").lock().await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    assert!(guard.unlock().await.is_err());
    bed.assert_clean().await;
}

// --- all at once ---

/// Number of operations in the storm: calls of acquire and unlock.
const OPERATIONS: usize = 20_000;
/// The storm must check more records than this while they are held.
const ENOUGH: usize = OPERATIONS / 10;
const CLIENTS: usize = 8;
const TASKS: usize = 8;
const LOCKS: usize = 20;
/// Command timeout in the storm. The janitor checks for late requests once more after this time.
/// `Action::Ghost` requests run within 0.8 of it, so before that check even if the machine stalls.
const STORM_TIMEOUT: Duration = Duration::from_millis(300);
const SEED: u64 = 0x5eed_2026;

/// The state that the tasks of the storm share.
struct Storm {
    operations: AtomicUsize,
    acquired: AtomicUsize,
    busy: AtomicUsize,
    failed: AtomicUsize,
    lost: AtomicUsize,
    checked: AtomicUsize,
    /// Requests that the server executes late, per lock. They may change the count, never the
    /// owner.
    ghosts: Vec<AtomicUsize>,
    /// When each lock was certainly held: lock, from, to.
    held: Mutex<Vec<(usize, Instant, Instant)>>,
}

impl Storm {
    /// Returns the number of the next operation, or `None` after the last one. If the machine
    /// stalls, most operations time out, so up to 5 times as many run until enough is tested.
    fn next(&self) -> Option<usize> {
        let number = self.operations.fetch_add(1, Ordering::SeqCst);
        let has_tested_enough = self.checked.load(Ordering::SeqCst) > ENOUGH;
        (number < OPERATIONS || number < 5 * OPERATIONS && !has_tested_enough).then_some(number)
    }
}

/// Picks an action: a fault for 6 % of the requests.
fn weather(rng: &mut StdRng) -> Action {
    let t = STORM_TIMEOUT;
    match rng.random_range(0..10_000) {
        0..100 => Action::Lose,
        100..160 => Action::Late(t.mul_f64(rng.random_range(0.5..2.0))),
        160..220 => Action::Slow(t.mul_f64(rng.random_range(0.5..2.0))),
        220..280 => Action::Ghost(t.mul_f64(rng.random_range(0.0..0.8))),
        280..320 => Action::CutBefore,
        320..323 => Action::Mute,
        323..600 => Action::Twice,
        _ => Action::Pass,
    }
}

/// R31-R41, F13, F14: the measured row. 64 tasks run 20,000 operations while replies are lost or
/// late and requests are doubled or executed late: no double count, no early release, no attempt
/// sent twice, and nothing left afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f13_f14_20000_stormy_operations_count_once_and_never_overlap() {
    println!("seed {SEED:#x}");
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let builder = LockClient::builder()
            .watchdog_timeout(Duration::from_secs(1))
            .command_timeout(STORM_TIMEOUT);
        clients.push(
            builder
                .poll_cap(Duration::from_millis(100))
                .connect(proxy.url())
                .await
                .unwrap(),
        );
    }
    let warm = clients[0]
        .reentrant_lock("warm")
        .unwrap()
        .lock()
        .await
        .unwrap();
    warm.extend(Duration::from_secs(10)).await.unwrap();
    warm.unlock().await.unwrap();

    let storm = Arc::new(Storm {
        operations: AtomicUsize::new(0),
        acquired: AtomicUsize::new(0),
        busy: AtomicUsize::new(0),
        failed: AtomicUsize::new(0),
        lost: AtomicUsize::new(0),
        checked: AtomicUsize::new(0),
        ghosts: (0..LOCKS).map(|_| AtomicUsize::new(0)).collect(),
        held: Mutex::default(),
    });
    let met = Arc::new(Mutex::new(HashMap::<&str, usize>::new()));
    let (mut rng, told, ghosts) = (
        StdRng::seed_from_u64(SEED),
        Arc::clone(&met),
        Arc::clone(&storm),
    );
    proxy.rule(move |request| {
        if request.verb().is_none() {
            return Action::Pass;
        }
        let action = weather(&mut rng);
        let kind = match action {
            Action::Lose => "lost",
            Action::Late(_) => "late reply",
            Action::Slow(_) => "late request",
            Action::Ghost(_) => {
                for key in request.keys() {
                    ghosts.ghosts[key.parse::<usize>().unwrap()].fetch_add(1, Ordering::SeqCst);
                }
                "executed after the cut"
            }
            Action::CutBefore => "cut before",
            Action::Mute => "mute",
            Action::Twice => "doubled",
            _ => "passed",
        };
        *told.lock().unwrap().entry(kind).or_default() += 1;
        action
    });

    let start = Instant::now();
    let mut tasks = Vec::new();
    for (n, client) in clients.iter().enumerate() {
        for task in 0..TASKS {
            let rng = StdRng::seed_from_u64(SEED + (n * TASKS + task) as u64 + 1);
            tasks.push(tokio::spawn(storm_task(
                Arc::clone(&storm),
                client.clone(),
                server.wire(),
                rng,
            )));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let duration = start.elapsed();
    proxy.pass();

    // The storm is over: the clients must settle everything.
    let quiet = Instant::now();
    for client in &clients {
        client.idle().await;
        eventually("nothing is left in the client", || async {
            let stats = client.stats();
            (stats.holds, stats.channels, stats.settling) == (0, 0, 0)
        })
        .await;
    }
    let settled = quiet.elapsed();
    assert_eq!(server.dump(), [], "left on the server");

    let overlaps = overlaps(std::mem::take(&mut storm.held.lock().unwrap()));
    let count = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    println!(
        "{} operations in {duration:?}, settled in {settled:?}: {} acquired, {} busy, {} failed, {} lost, \
         {} records checked, {overlaps} overlaps; requests: {:?}",
        count(&storm.operations),
        count(&storm.acquired),
        count(&storm.busy),
        count(&storm.failed),
        count(&storm.lost),
        count(&storm.checked),
        met.lock().unwrap(),
    );
    assert_eq!(overlaps, 0, "two owners at once");
    assert!(count(&storm.checked) > ENOUGH, "nothing was tested");

    // A lease of 2 s or more belongs to one attempt, so the same lease twice is a second send.
    let mut sent = HashMap::<_, usize>::new();
    let requests = proxy.requests();
    for (_, _, args) in requests
        .iter()
        .flat_map(Request::parts)
        .filter(|(verb, ..)| *verb == Verb::Acquire)
    {
        if args[1].parse::<usize>().unwrap() >= 2_000 {
            *sent.entry(args[1].clone()).or_default() += 1;
        }
    }
    let bundles = requests
        .iter()
        .filter(|request| request.verb() == Some(Verb::Bundle))
        .count();
    println!("{bundles} bundles");
    assert!(
        is_over_fred() || bundles > ENOUGH / 10,
        "no requests were bundled"
    );
    assert!(sent.len() > ENOUGH);
    assert_eq!(
        sent.values().max(),
        Some(&1),
        "an attempt was sent more than once"
    );
    let doubled = met.lock().unwrap()["doubled"];
    assert!(server.script_count() as usize <= proxy.requests().len() + doubled);
}

async fn storm_task(
    storm: Arc<Storm>,
    client: LockClient,
    mut wire: crate::support::wire::Wire,
    mut rng: StdRng,
) {
    while let Some(operation) = storm.next() {
        let number = rng.random_range(0..LOCKS);
        let lock = client.reentrant_lock(number.to_string()).unwrap();
        let acquired = if rng.random_bool(0.5) {
            lock.try_lock_for(Duration::from_millis(300)).await
        } else {
            lock.try_lock_with(
                AcquireOptions::new().lease(Duration::from_millis(2_000 + operation as u64)),
            )
            .await
        };
        let guard = match acquired {
            Ok(Some(guard)) => guard,
            Ok(None) => {
                storm.busy.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            Err(error) => {
                assert!(
                    matches!(
                        error,
                        Error::Unconfirmed { .. } | Error::Store { .. } | Error::Lost { .. }
                    ),
                    "{error}"
                );
                storm.failed.fetch_add(1, Ordering::SeqCst);
                continue;
            }
        };
        storm.acquired.fetch_add(1, Ordering::SeqCst);
        let (from, ghosts) = (Instant::now(), storm.ghosts[number].load(Ordering::SeqCst));
        // The bounds of the count in the record. An acquire without a reply may or may not count.
        let (mut least, mut most) = (1, 1);
        let mut inner = None;
        if rng.random_bool(0.3) && storm.next().is_some() {
            match lock.try_lock_for(Duration::from_millis(300)).await {
                Ok(guard) => {
                    inner = Some(guard.expect("no other client has it"));
                    (least, most) = (2, 2);
                }
                Err(_) => most = 2,
            }
        }
        check_record(&storm, &mut wire, &guard, number, ghosts, least..=most);
        if let Some(inner) = inner.filter(|_| storm.next().is_some()) {
            least = 1;
            if inner.unlock().await.is_ok() {
                most = 1;
            }
            check_record(&storm, &mut wire, &guard, number, ghosts, least..=most);
        }
        if rng.random_bool(0.3) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..4))).await; // work
        }
        storm.next();
        let (to, remaining) = (Instant::now(), guard.remaining());
        if !remaining.is_zero() {
            storm.held.lock().unwrap().push((number, from, to));
        }
        match guard.unlock().await {
            Ok(()) => {}
            Err(Error::Lost { reason, .. }) => {
                let early = reason != LossReason::LeaseExpired && to.elapsed() < remaining;
                assert!(!early, "released early: {reason} with {remaining:?} to go");
                storm.lost.fetch_add(1, Ordering::SeqCst);
            }
            Err(_) => {
                storm.failed.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

/// Checks that the record of a valid hold names its owner and counts within `counts`. If a request
/// may have run late since the acquire, the count is not checked.
fn check_record(
    storm: &Storm,
    wire: &mut crate::support::wire::Wire,
    guard: &LockGuard,
    lock: usize,
    ghosts: usize,
    counts: std::ops::RangeInclusive<i64>,
) {
    let reply = wire.call(&["HGETALL", guard.name()]).unwrap();
    if guard.is_lost() {
        return;
    }
    let [owner, count] = reply.list() else {
        panic!("{guard:?} is valid, the record is {reply:?}")
    };
    assert_eq!(owner.text(), guard.owner().as_str(), "two owners");
    let count: i64 = count.text().parse().unwrap();
    let exact = storm.ghosts[lock].load(Ordering::SeqCst) == ghosts;
    assert!(
        !exact || counts.contains(&count),
        "{guard:?}: the record counts {count}, wanted is {counts:?}"
    );
    storm.checked.fetch_add(1, Ordering::SeqCst);
}

/// Counts the overlapping pairs among neighbouring intervals of one lock.
fn overlaps(mut held: Vec<(usize, Instant, Instant)>) -> usize {
    held.sort();
    held.windows(2)
        .filter(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2)
        .count()
}

/// Guards the check of the storm itself: it must report holds that overlap.
#[test]
fn overlapping_holds_are_found() {
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    assert_eq!(
        overlaps(vec![
            (1, at(0), at(2)),
            (2, at(1), at(3)),
            (1, at(2), at(4))
        ]),
        0
    );
    assert_eq!(overlaps(vec![(1, at(2), at(4)), (1, at(0), at(3))]), 1);
}
