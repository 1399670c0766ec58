//! Futures that are dropped at every point: nothing stays held, the ledger is empty, and no waiter
//! is stuck.

use std::{
    future::{Future, poll_fn},
    panic::AssertUnwindSafe,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use futures::FutureExt;
use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    contract::nothing_is_left,
    support::{Server, came_too_late, eventually, poll_once, within},
};

const SOON: Duration = Duration::from_secs(15);
const LONG: Duration = Duration::from_secs(3600);

/// Polls a future up to `k` times, each time that it is woken, and then drops it. Returns `Some` if
/// it was ready by then.
pub async fn poll_times<F: Future>(future: F, k: u32) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut polls = 0;
    let output = poll_fn(|cx| {
        polls += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls >= k => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await;
    drop(future);
    output
}

struct Stage {
    server: Server,
    a: LockClient,
    b: LockClient,
    la: Lock,
    lb: Lock,
}

impl Stage {
    async fn new() -> Self {
        let server = Server::start();
        let (a, b) = (server.client().await, server.client().await);
        let (la, lb) = (
            a.reentrant_lock("l").unwrap(),
            b.reentrant_lock("l").unwrap(),
        );
        Self {
            server,
            a,
            b,
            la,
            lb,
        }
    }

    /// Asserts that the lock is free for another client at once, after `a` has settled what was
    /// cancelled.
    async fn free_and_forgotten(&self, what: &str, k: u32) {
        tokio::time::timeout(SOON, self.a.idle())
            .await
            .unwrap_or_else(|_| panic!("{what}, {k} polls: not settled"));
        self.b.idle().await;
        // This query uses the same connection, so everything that was sent before it has been
        // executed.
        assert!(
            !self.la.is_locked().await.unwrap(),
            "{what}, {k} polls: still held"
        );
        assert_eq!(self.server.dump(), [], "{what}, {k} polls: a key is left");
        let guard = self.lb.try_lock().await.unwrap();
        guard
            .unwrap_or_else(|| panic!("{what}, {k} polls: not free"))
            .unlock()
            .await
            .unwrap();
        assert_eq!(self.a.stats().settling, 0);
    }

    async fn end(self) {
        nothing_is_left(&self.server, &[&self.a, &self.b]).await;
    }
}

/// Drops `call` after one poll, two polls, and so on, until it completes earlier. With `prepare`,
/// `a` holds the lock once, by the guard that `call` receives. If `contended`, `b` holds the lock
/// and releases it at a random time.
async fn at_every_poll<'a, F, C>(
    stage: &'a Stage,
    what: &str,
    prepare: bool,
    contended: bool,
    call: C,
) where
    F: Future,
    C: Fn(&'a Stage, Option<LockGuard>) -> F,
{
    let mut rng = StdRng::seed_from_u64(7);
    let (mut k, mut ends) = (1, 0);
    // The number of polls differs from run to run: repeat until four calls have completed.
    while ends < 4 {
        assert!(k < 500, "{what} never ends");
        let guard = if prepare {
            Some(
                stage
                    .la
                    .lock_with(AcquireOptions::new().lease(LONG))
                    .await
                    .unwrap(),
            )
        } else {
            None
        };
        let holder = if contended {
            let (guard, pause) = (stage.lb.lock().await.unwrap(), rng.random_range(0..3000));
            let holder = async move {
                tokio::time::sleep(Duration::from_micros(pause)).await;
                guard.unlock().await
            };
            Some(tokio::spawn(holder))
        } else {
            None
        };
        let output = poll_times(call(stage, guard), k).await;
        ends += u32::from(output.is_some());
        drop(output);
        if let Some(holder) = holder {
            let released = holder.await.unwrap();
            assert!(
                matches!(released, Ok(()) | Err(Error::Lost { .. })),
                "{released:?}"
            );
        }
        stage.free_and_forgotten(what, k).await;
        k += 1;
    }
}

/// F32, R15, L9: each kind of acquire is dropped at each await.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_r15_l9_an_acquire_dropped_at_any_poll_holds_nothing() {
    let stage = Stage::new().await;
    for contended in [false, true] {
        let c = contended;
        at_every_poll(&stage, "lock", false, c, |s, _| s.la.lock()).await;
        at_every_poll(&stage, "try_lock", false, c, |s, _| s.la.try_lock()).await;
        at_every_poll(&stage, "try_lock_for", false, c, |s, _| {
            s.la.try_lock_for(Duration::from_millis(2))
        })
        .await;
        at_every_poll(&stage, "acquire", false, c, |s, _| {
            let owner = s.a.owner("job").unwrap();
            s.la.try_lock_for_with(SOON, AcquireOptions::new().lease(LONG).owner(owner))
        })
        .await;
    }
    stage.end().await;
}

/// F33, S16: once polled, a release completes in the background.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f33_s16_a_release_dropped_at_any_poll_goes_on() {
    let stage = Stage::new().await;
    at_every_poll(&stage, "unlock", true, false, |_, guard| {
        guard.unwrap().unlock()
    })
    .await;
    at_every_poll(&stage, "release", true, false, |s, guard| {
        let owner = guard.unwrap().leave_to_lease();
        async move { s.la.release(&owner).await }
    })
    .await;
    // An unpolled release acts like a dropped guard.
    let guard = stage.la.lock().await.unwrap();
    drop(guard.unlock());
    stage.free_and_forgotten("unlock", 0).await;
    stage.end().await;
}

/// A nested hold that is cancelled or released midway leaves the outer one as it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_a_re_entry_dropped_at_any_poll_leaves_the_outer_hold() {
    let stage = Stage::new().await;
    let outer = stage
        .la
        .try_lock_with(AcquireOptions::new().lease(LONG))
        .await
        .unwrap()
        .unwrap();
    let owner = outer.owner();
    for k in 1..30 {
        drop(poll_times(stage.la.lock(), k).await);
        stage.a.idle().await;
        // This query uses the same connection, so everything that was sent before it has been
        // executed.
        assert!(stage.la.is_locked().await.unwrap());
        assert_eq!(
            stage.server.record("l"),
            [(owner.to_string(), 1)],
            "{k} polls of lock"
        );
        let inner = stage.la.lock().await.unwrap();
        drop(poll_times(inner.unlock(), k).await);
        stage.a.idle().await;
        // This query uses the same connection, so everything that was sent before it has been
        // executed.
        assert!(stage.la.is_locked().await.unwrap());
        assert_eq!(
            stage.server.record("l"),
            [(owner.to_string(), 1)],
            "{k} polls of unlock"
        );
        assert!(!outer.is_lost());
    }
    outer.unlock().await.unwrap();
    stage.end().await;
}

/// A call that inspects or extends the lock changes nothing for good if it is dropped midway.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_every_other_call_may_be_dropped_at_any_poll() {
    let stage = Stage::new().await;
    for held in [false, true] {
        at_every_poll(&stage, "is_locked", held, false, |s, _g| async move {
            s.la.is_locked().await.unwrap()
        })
        .await;
        at_every_poll(&stage, "hold_count", held, false, |s, _g| async move {
            let owner = s.a.current_owner();
            s.la.hold_count(&owner).await.unwrap()
        })
        .await;
        at_every_poll(&stage, "holder", held, false, |s, _g| async move {
            s.la.holder().await.unwrap()
        })
        .await;
        at_every_poll(&stage, "remaining_lease", held, false, |s, _g| async move {
            s.la.remaining_lease().await.unwrap()
        })
        .await;
        at_every_poll(&stage, "extend", held, false, move |s, guard| async move {
            let extended = s.la.extend(&s.a.current_owner(), LONG).await;
            drop(guard);
            assert!(
                if held {
                    extended.is_ok()
                } else {
                    matches!(extended, Err(Error::NotHeld { .. }))
                },
                "{extended:?}"
            );
        })
        .await;
        at_every_poll(&stage, "force_unlock", held, !held, |s, _g| async move {
            s.la.force_unlock().await.unwrap()
        })
        .await;
        at_every_poll(&stage, "idle", held, false, |s, guard| async move {
            drop(guard);
            s.a.idle().await;
        })
        .await;
    }
    at_every_poll(&stage, "guard.extend", true, false, |_, guard| async move {
        guard.unwrap().extend(2 * LONG).await.unwrap();
    })
    .await;
    at_every_poll(
        &stage,
        "run_until_lost",
        true,
        false,
        |_, guard| async move {
            let work = async {
                for _ in 0..3 {
                    tokio::task::yield_now().await;
                }
            };
            guard.unwrap().run_until_lost(work).await.unwrap();
        },
    )
    .await;
    at_every_poll(&stage, "lost", true, false, |s, guard| async move {
        let guard = guard.unwrap();
        s.server.call(&["DEL", "l"]);
        let (lost, forced) = tokio::join!(guard.lost(), async {
            s.la.extend(&guard.owner(), LONG).await
        });
        assert!(matches!(lost, Error::Lost { .. }) && matches!(forced, Err(Error::NotHeld { .. })));
    })
    .await;
    stage.end().await;
}

/// An abandoned connect leaves no connection and no thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_a_connect_dropped_at_any_poll_leaves_no_connection() {
    let server = Server::start();
    let url = server.url();
    let (mut k, mut ends) = (1, 0);
    while ends < 4 {
        let client = poll_times(LockClient::connect(&url), k).await;
        ends += u32::from(client.is_some());
        drop(client);
        k += 1;
    }
    eventually("only the connection that asks", || async {
        server.call(&["CLIENT", "LIST"]).text().lines().count() == 1
    })
    .await;
}

/// A shutdown that is dropped midway has still given up the locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_a_shutdown_dropped_at_any_poll_has_given_the_locks_up() {
    let server = Server::start();
    let (mut k, mut ends) = (1, 0);
    while ends < 4 {
        let client = server.client().await;
        let guards: Vec<_> = {
            let mut guards = Vec::new();
            for name in ["a", "b", "c"] {
                guards.push(client.reentrant_lock(name).unwrap().lock().await.unwrap());
            }
            guards
        };
        ends += u32::from(poll_times(client.shutdown(), k).await.is_some());
        assert!(guards.iter().all(LockGuard::is_lost), "{k} polls");
        tokio::time::timeout(SOON, client.idle())
            .await
            .expect("settled");
        assert_eq!(server.dump(), [], "{k} polls");
        k += 1;
    }
}

/// F32, F33, R45: the measured row. Many tasks drop acquires and releases at random moments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_f33_r45_twenty_thousand_random_drops_leave_nothing() {
    const DROPS: usize = 20_000;
    const TASKS: usize = 64;
    let seed: u64 =
        std::env::var("NESTLOCK_SEED").map_or(20_260_801, |seed| seed.parse().expect("a number"));
    let command_timeout = Duration::from_secs(3);
    let server = Server::start();
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(
            server
                .client_with(|c| c.command_timeout(command_timeout))
                .await,
        );
    }
    let drops = Arc::new(AtomicUsize::new(0));
    let finished = Arc::new(AtomicUsize::new(0));
    let holders: Arc<Vec<AtomicUsize>> = Arc::new((0..23).map(|_| AtomicUsize::new(0)).collect());
    let start = Instant::now();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let client = clients[task % clients.len()].clone();
            let (drops, finished, holders) = (
                Arc::clone(&drops),
                Arc::clone(&finished),
                Arc::clone(&holders),
            );
            tokio::spawn(async move {
                let mut rng = StdRng::seed_from_u64(seed + task as u64);
                while drops.load(Ordering::Relaxed) < DROPS {
                    let name = rng.random_range(0..holders.len());
                    let lock = client.reentrant_lock(format!("n{name}")).unwrap();
                    let wait = Duration::from_millis(rng.random_range(0..20));
                    let mut options = AcquireOptions::new();
                    if rng.random() {
                        options = options.lease(LONG);
                    }
                    let acquired =
                        match dropped_midway(&mut rng, lock.try_lock_for_with(wait, options)).await
                        {
                            None => {
                                drops.fetch_add(1, Ordering::Relaxed);
                                continue;
                            }
                            // The client undoes a late acquire like a dropped one.
                            Some(Err(error)) if came_too_late(&error) => continue,
                            Some(acquired) => acquired.unwrap(),
                        };
                    let Some(guard) = acquired else { continue };
                    assert_eq!(
                        holders[name].fetch_add(1, Ordering::SeqCst),
                        0,
                        "two hold n{name}; seed {seed}"
                    );
                    let inner = if rng.random_range(0..4) == 0 {
                        dropped_midway(&mut rng, lock.try_lock())
                            .await
                            .map(Result::unwrap)
                    } else {
                        None
                    };
                    tokio::task::yield_now().await;
                    assert!(!guard.is_lost());
                    drop(inner);
                    holders[name].fetch_sub(1, Ordering::SeqCst);
                    match dropped_midway(&mut rng, guard.unlock()).await {
                        Some(unlocked) => {
                            unlocked.unwrap();
                            finished.fetch_add(1, Ordering::Relaxed);
                        }
                        None => {
                            drops.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let (drops, finished, storm) = (
        drops.load(Ordering::Relaxed),
        finished.load(Ordering::Relaxed),
        start.elapsed(),
    );
    // Promise: the server is quiet within the command timeout plus 100 ms.
    let quiet = Instant::now();
    within(
        command_timeout + Duration::from_millis(100),
        "no hold is left on the server",
        || async { server.call(&["DBSIZE"]).int() == 0 },
    )
    .await;
    let settled = quiet.elapsed();
    for client in &clients {
        client.idle().await;
    }
    assert_eq!(server.dump(), []);
    eventually("no registry entry is left", || async {
        clients.iter().all(|c| c.stats().holds == 0)
    })
    .await;
    nothing_is_left(&server, &clients.iter().collect::<Vec<_>>()).await;
    eprintln!(
        "seed {seed}: {drops} drops, {finished} whole rounds in {storm:.1?}; settled {settled:.1?} later; left: {} keys, \
         {} holds, {} channels",
        server.dump().len(),
        clients.iter().map(|c| c.stats().holds).sum::<usize>(),
        server.channels().len(),
    );
    assert!(drops >= DROPS);
}

/// Drops a future after a few polls or after less than 1.5 ms, by `select!` or by `timeout`, or
/// lets it complete. Returns `None` if the future was dropped.
async fn dropped_midway<F: Future>(rng: &mut StdRng, future: F) -> Option<F::Output> {
    let micros = Duration::from_micros(rng.random_range(0..1500));
    match rng.random_range(0..5) {
        0 | 1 => poll_times(future, rng.random_range(1..4)).await,
        2 => tokio::time::timeout(micros, future).await.ok(),
        3 => tokio::select! {
            output = future => Some(output),
            () = tokio::time::sleep(micros) => None,
        },
        _ => Some(future.await),
    }
}

/// R01, R42: acquires are aborted at random awaits, with releases in between. Nothing is renewed
/// afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r01_r42_two_thousand_aborted_acquires_are_never_renewed() {
    let server = Server::start();
    let watchdog = Duration::from_millis(600);
    let client = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    let mut rng = StdRng::seed_from_u64(1);
    for round in 0..2000 {
        let lock = client.reentrant_lock(format!("l{}", round % 5)).unwrap();
        let (polls, abort) = (rng.random_range(1..6), rng.random::<bool>());
        let task = tokio::spawn(async move {
            let guard = poll_times(lock.lock(), polls).await;
            let nested = poll_times(lock.lock(), polls).await;
            drop(guard);
            drop(nested);
        });
        if abort {
            tokio::task::yield_now().await;
            task.abort();
        }
        match task.await {
            Ok(()) => {}
            Err(error) => assert!(error.is_cancelled(), "{error}"),
        }
    }
    client.idle().await;
    assert_eq!(server.dump(), []);
    eventually("the registry is empty", || async {
        client.stats().holds == 0
    })
    .await;
    let scripts = server.script_count();
    tokio::time::sleep(2 * watchdog).await; // two leases: a renewal would fall into them
    assert_eq!(server.script_count(), scripts, "nothing is renewed");
    nothing_is_left(&server, &[&client]).await;
}

/// R45: a cancelled acquire never yields a guard and never leaves the lock held, whatever it was
/// doing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r45_a_cancelled_acquire_never_yields_a_guard() {
    let stage = Stage::new().await;
    let yielded = Arc::new(AtomicUsize::new(0));
    for k in 0..200 {
        let (lock, count) = (stage.la.clone(), Arc::clone(&yielded));
        let before = yielded.load(Ordering::SeqCst);
        let task = tokio::spawn(async move {
            let _guard = lock.lock().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        });
        for _ in 0..k % 20 {
            tokio::task::yield_now().await;
        }
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        let after = yielded.load(Ordering::SeqCst);
        stage.free_and_forgotten("an aborted task", k).await;
        assert_eq!(
            yielded.load(Ordering::SeqCst),
            after,
            "a guard came out after the cancellation"
        );
        assert!(after - before <= 1);
    }
    stage.end().await;
}

/// R80: several acquires in flight are undone together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r80_many_acquires_cancelled_together_are_all_undone() {
    let stage = Stage::new().await;
    let locks: Vec<_> = (0..20)
        .map(|n| stage.a.reentrant_lock(format!("m{n}")).unwrap())
        .collect();
    for k in 1..40 {
        let guards = poll_times(futures::future::join_all(locks.iter().map(Lock::lock)), k).await;
        drop(guards);
        stage.free_and_forgotten("join_all", k).await;
    }
    stage.end().await;
}

/// R16: a task releases its locks however it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r16_an_aborted_or_panicking_task_releases() {
    let stage = Stage::new().await;
    for how in ["abort", "panic", "panic while nested", "unwind and go on"] {
        let lock = stage.la.clone();
        let (holds, held) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let guard = lock
                .try_lock_with(AcquireOptions::new().lease(LONG))
                .await
                .unwrap()
                .unwrap();
            let nested = lock.lock().await.unwrap();
            holds.send(()).unwrap();
            match how {
                "abort" => std::future::pending().await,
                "panic" => {
                    drop(nested);
                    let _guard = guard;
                    panic!("on purpose");
                }
                "panic while nested" => panic!("on purpose"),
                _ => {
                    let unwound = AssertUnwindSafe(async move {
                        let _both = (guard, nested);
                        panic!("on purpose");
                    });
                    assert!(unwound.catch_unwind().await.is_err());
                }
            }
        });
        held.await.unwrap();
        if how == "abort" {
            task.abort();
        }
        let _ = task.await;
        stage.free_and_forgotten(how, 0).await;
    }
    stage.end().await;
}

/// L1, F34: a guard can be dropped anywhere.
#[test]
fn l1_f34_a_guard_is_released_wherever_it_is_dropped() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let client = runtime.block_on(server.client());
    let lock = client.reentrant_lock("l").unwrap();
    let other = runtime
        .block_on(server.client())
        .reentrant_lock("l")
        .unwrap();
    let free = |what: &str| {
        futures::executor::block_on(async {
            let guard = other
                .try_lock_for(SOON)
                .await
                .unwrap()
                .unwrap_or_else(|| panic!("{what}: not released"));
            guard.unlock().await.unwrap();
        });
    };
    let held = |runtime: &tokio::runtime::Runtime| {
        runtime
            .block_on(lock.try_lock_for_with(SOON, AcquireOptions::new().lease(LONG)))
            .unwrap()
            .unwrap()
    };

    let guard = held(&runtime);
    std::thread::spawn(move || drop(guard)).join().unwrap();
    free("on a plain thread");

    let current = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let guard = held(&current);
    current.block_on(async move { drop(guard) });
    free("in a current-thread runtime");

    let guard = held(&current);
    drop(current);
    drop(guard);
    free("after its runtime has ended");

    let guard = held(&runtime);
    let unwinding = std::thread::spawn(move || {
        let _guard = guard;
        panic!("on purpose");
    });
    assert!(unwinding.join().is_err());
    free("while unwinding, without a runtime");

    struct Outer(Option<LockGuard>);
    impl Drop for Outer {
        fn drop(&mut self) {
            drop(self.0.take());
        }
    }
    let outer = Outer(Some(held(&runtime)));
    assert!(
        std::panic::catch_unwind(AssertUnwindSafe(move || {
            let _outer = outer;
            panic!("on purpose");
        }))
        .is_err()
    );
    free("in a Drop during unwinding");

    // P6: without the client and the lock, the guard alone keeps the hold alive.
    let second = runtime.block_on(server.client());
    let guard = runtime
        .block_on(second.reentrant_lock("l").unwrap().lock())
        .unwrap();
    drop(second);
    assert!(!guard.is_lost());
    drop(guard);
    free("after its client");

    let guard = held(&runtime);
    runtime.shutdown_background();
    drop(guard);
    free("after shutdown_background");

    // A thread local is dropped after the thread's own context is gone.
    thread_local!(static KEPT: std::cell::RefCell<Option<LockGuard>> = const { std::cell::RefCell::new(None) });
    let guard = futures::executor::block_on(lock.lock()).unwrap();
    std::thread::spawn(move || KEPT.with(|kept| *kept.borrow_mut() = Some(guard)))
        .join()
        .unwrap();
    free("with its thread");
    futures::executor::block_on(client.idle());
    assert_eq!(server.dump(), []);
}

/// F35, P10: a runtime that shuts down while its tasks hold and wait does not hang, and their locks
/// are released.
#[test]
fn f35_p10_a_runtime_that_ends_while_holding_does_not_hang() {
    let server = Server::start();
    let keeper = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let client = keeper.block_on(server.client());
    for how in 0..4 {
        let runtime = if how == 3 {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
        } else {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap()
        };
        let (holds, held) = std::sync::mpsc::channel();
        for name in 0..20 {
            let (lock, holds) = (
                client.reentrant_lock(format!("l{}", name % 10)).unwrap(),
                holds.clone(),
            );
            runtime.spawn(async move {
                let _guard = lock
                    .lock_with(AcquireOptions::new().lease(LONG))
                    .await
                    .unwrap();
                holds.send(()).unwrap();
                std::future::pending::<()>().await;
            });
        }
        if how == 3 {
            runtime.block_on(async {
                eventually("ten hold", || async {
                    server.call(&["DBSIZE"]).int() == 10
                })
                .await;
            });
        } else {
            for _ in 0..10 {
                held.recv_timeout(SOON).expect("a holder");
            }
        }
        let start = Instant::now();
        match how {
            0 => runtime.shutdown_background(),
            1 => runtime.shutdown_timeout(SOON),
            _ => drop(runtime),
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no hang");
        keeper.block_on(async {
            eventually("all are released", || async {
                client.idle().await;
                server.dump().is_empty()
            })
            .await;
        });
    }
    keeper.block_on(nothing_is_left(&server, &[&client]));
}

/// R16: a leaked guard acts like a forgotten one. It is renewed while its client lives, and ends by
/// a release in its owner's name, by the client's shutdown, or by its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r16_a_leaked_guard_is_bounded() {
    let stage = Stage::new().await;
    let guard = stage.la.lock().await.unwrap();
    let owner = guard.owner();
    std::mem::forget(guard);
    assert!(stage.lb.try_lock().await.unwrap().is_none());
    stage.la.release(&owner).await.unwrap();
    stage.free_and_forgotten("release", 0).await;

    std::mem::forget(
        stage
            .la
            .try_lock_with(AcquireOptions::new().lease(Duration::from_millis(200)))
            .await
            .unwrap(),
    );
    stage
        .lb
        .try_lock_for(SOON)
        .await
        .unwrap()
        .expect("the lease is over")
        .unlock()
        .await
        .unwrap();

    let client = stage.server.client().await;
    std::mem::forget(client.reentrant_lock("l").unwrap().lock().await.unwrap());
    client.shutdown().await.unwrap();
    assert!(!stage.server.exists("l"));
}

/// A release in flight never frees a new hold of the same owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_release_never_frees_the_next_hold() {
    let stage = Stage::new().await;
    let mut rng = StdRng::seed_from_u64(3);
    for round in 0..500 {
        let guard = stage.la.lock().await.unwrap();
        drop(poll_times(guard.unlock(), rng.random_range(1..4)).await);
        let next = stage.la.lock().await.unwrap();
        stage.a.idle().await;
        assert_eq!(
            stage.server.record("l"),
            [(next.owner().to_string(), 1)],
            "round {round}"
        );
        assert!(!next.is_lost());
        if rng.random() {
            drop(next);
        } else {
            next.unlock().await.unwrap();
        }
    }
    stage.a.idle().await;
    stage.free_and_forgotten("release", 0).await;
    stage.end().await;
}

/// A waiter that gives up in a storm never takes a wake-up with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r87_waiters_that_give_up_never_take_a_wake_up_along() {
    let server = Server::start();
    let a = server.client().await;
    // Without polling, only messages wake a waiter.
    let b = server.client_with(|c| c.poll_cap(LONG)).await;
    let mut rng = StdRng::seed_from_u64(5);
    for round in 0..30 {
        let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
        let tasks: Vec<_> = (0..20)
            .map(|task| {
                let (lock, micros) = (b.reentrant_lock("l").unwrap(), rng.random_range(0..8000));
                tokio::spawn(async move {
                    let turn = async { drop(pin!(lock.lock()).await.unwrap()) };
                    if task % 2 == 0 {
                        turn.await;
                    } else {
                        let _ = tokio::time::timeout(Duration::from_micros(micros), turn).await;
                    }
                })
            })
            .collect();
        eventually("waiters", || async { !server.channels().is_empty() }).await;
        guard.unlock().await.unwrap();
        for task in tasks {
            tokio::time::timeout(SOON, task)
                .await
                .unwrap_or_else(|_| panic!("round {round}: stuck"))
                .unwrap();
        }
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// A future that is neither polled nor dropped keeps the owner lock. The next call of that owner
/// fails instead of hanging.
#[tokio::test]
async fn a_call_left_halfway_does_not_hang_its_owners_next_call() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(Duration::from_secs(1)))
        .await;
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    let parked = loop {
        let mut parked = Box::pin(lock.lock());
        // The reply may be there already: then try again.
        match poll_once(parked.as_mut()).await {
            Poll::Pending => break parked,
            Poll::Ready(inner) => inner.unwrap().unlock().await.unwrap(),
        }
    };
    let limit = Duration::from_secs(10);
    let tried = tokio::time::timeout(limit, lock.try_lock())
        .await
        .expect("a reply");
    assert!(matches!(tried, Err(Error::Store { .. })), "{tried:?}");
    let released = tokio::time::timeout(limit, guard.unlock())
        .await
        .expect("a reply");
    assert!(released.is_err(), "{released:?}");
    drop(parked);
    nothing_is_left(&server, &[&client]).await;
}
