//! Lock owners (tasks, threads, scopes, named owners) and the runtimes that calls may come from.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    executor::LocalPool,
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
    task::LocalSpawnExt,
};
use nestlock::{AcquireOptions, LockClient, LockGuard, OwnerId};
use tokio::{
    runtime::{Builder, Handle},
    sync::Barrier,
};

use crate::{
    contract::nothing_is_left,
    support::{Server, eventually},
};

const SOON: Duration = Duration::from_secs(15);

/// Returns the part of the current owner that follows the client's id.
fn task_part(client: &LockClient) -> String {
    client
        .current_owner()
        .as_str()
        .split_once(':')
        .unwrap()
        .1
        .to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_spaces_of_owners_never_collide() {
    let server = Server::start();
    let client = server.client().await;
    let body = task_part(&client);
    assert!(
        body.starts_with('b') && body[1..].parse::<u64>().is_ok(),
        "{body}"
    );
    assert_eq!(
        task_part(&client),
        body,
        "block_on does not leave its thread"
    );
    let spawned = client.clone();
    let (task, id) =
        tokio::spawn(async move { (task_part(&spawned), tokio::task::id().to_string()) })
            .await
            .unwrap();
    assert_eq!(task, id);
    let scope = OwnerId::scope(async { task_part(&client) }).await;
    assert!(
        scope.starts_with('s') && scope[1..].parse::<u64>().is_ok(),
        "{scope}"
    );
    for name in ["b1", "s7", "42", "x", "/", &body, &task, &scope] {
        let named = client.owner(name).unwrap();
        assert_eq!(
            named.as_str().split_once(':').unwrap().1,
            format!("x/{name}")
        );
        assert!(
            ![&body, &task, &scope]
                .iter()
                .any(|other| named.as_str().ends_with(&format!(":{other}")))
        );
    }
    let thread = client.clone();
    let other =
        std::thread::spawn(move || futures::executor::block_on(async { task_part(&thread) }))
            .join()
            .unwrap();
    assert!(other.starts_with('b') && other != body);
}

/// R46: two clients of one process are two owners, even in the same task.
#[tokio::test]
async fn r46_two_clients_in_one_task_do_not_re_enter_each_other() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    assert_eq!(task_part(&a), task_part(&b));
    assert_ne!(a.current_owner(), b.current_owner());
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    assert!(
        b.reentrant_lock("l")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    // Clones are the same client, so they share the owner.
    let clone = a.clone();
    clone
        .reentrant_lock("l")
        .unwrap()
        .try_lock()
        .await
        .unwrap()
        .expect("the same owner")
        .unlock()
        .await
        .unwrap();
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The branches of one task are one owner, as owner.rs documents. A scope or a spawn separates
/// them.
#[tokio::test]
async fn a_scope_or_spawn_stops_task_branches_re_entering_each_other() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let outer = lock.lock().await.unwrap();
    let taken = async || lock.try_lock().await.unwrap().is_some();

    let (left, right) = tokio::join!(taken(), taken());
    assert!(left && right, "join!");
    let selected =
        tokio::select! { taken = taken() => taken, () = std::future::pending() => false };
    assert!(selected, "select!");
    let mut many: FuturesUnordered<_> = (0..3).map(|_| taken()).collect();
    while let Some(taken) = many.next().await {
        assert!(taken, "FuturesUnordered");
    }

    let (left, right) = tokio::join!(OwnerId::scope(taken()), OwnerId::scope(taken()));
    assert!(!left && !right, "scopes in join!");
    let selected = tokio::select! { taken = OwnerId::scope(taken()) => taken, () = std::future::pending() => true };
    assert!(!selected, "a scope in select!");
    let mut many: FuturesUnordered<_> = (0..3).map(|_| OwnerId::scope(taken())).collect();
    while let Some(taken) = many.next().await {
        assert!(!taken, "scopes in FuturesUnordered");
    }
    let spawned = lock.clone();
    assert!(
        !tokio::spawn(async move { spawned.try_lock().await.unwrap().is_some() })
            .await
            .unwrap(),
        "spawn"
    );
    client.idle().await;
    assert_eq!(server.record("l"), [(outer.owner().to_string(), 1)]);
    outer.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scopes_nest_and_a_spawn_inside_is_a_task_of_its_own() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    OwnerId::scope(async {
        let outer = client.current_owner();
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.owner(), outer);
        lock.try_lock()
            .await
            .unwrap()
            .expect("re-entry in the scope")
            .unlock()
            .await
            .unwrap();
        OwnerId::scope(async {
            assert_ne!(client.current_owner(), outer);
            assert!(
                lock.try_lock().await.unwrap().is_none(),
                "the inner scope is another owner"
            );
        })
        .await;
        assert_eq!(client.current_owner(), outer);
        let (inner, scoped) = (lock.clone(), client.clone());
        let spawned = tokio::spawn(async move {
            assert_eq!(task_part(&scoped), tokio::task::id().to_string());
            inner.try_lock().await.unwrap().is_none()
        });
        assert!(spawned.await.unwrap());
        // The owner in the options takes precedence over the scope that the call runs in.
        let as_outer = AcquireOptions::new().owner(outer.clone());
        OwnerId::scope(async {
            lock.try_lock_with(as_outer)
                .await
                .unwrap()
                .expect("re-entry")
                .unlock()
                .await
                .unwrap();
        })
        .await;
        guard.unlock().await.unwrap();
    })
    .await;
    nothing_is_left(&server, &[&client]).await;
}

/// An acquire keeps the owner that it started with, even if another task polls it later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_is_resolved_once() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let held = b.reentrant_lock("l").unwrap().lock().await.unwrap();
    let lock = a.reentrant_lock("l").unwrap();
    let expected = a.current_owner();
    let mut waiting: futures::future::BoxFuture<'static, _> =
        Box::pin(async move { lock.lock().await.unwrap() });
    assert!(futures::poll!(&mut waiting).is_pending());
    let waiter = tokio::spawn(waiting);
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    held.unlock().await.unwrap();
    let guard = waiter.await.unwrap();
    assert_eq!(guard.owner(), expected);
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

#[test]
fn local_sets_and_blocking_threads_have_owners_of_their_own() {
    let server = Server::start();
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let client = runtime.block_on(server.client());
    let lock = client.reentrant_lock("l").unwrap();
    let mut owners = HashSet::new();
    runtime.block_on(async {
        let guard = lock.lock().await.unwrap();
        owners.insert(guard.owner().to_string());
        tokio::task::LocalSet::new()
            .run_until(async {
                for _ in 0..2 {
                    let (lock, client) = (lock.clone(), client.clone());
                    let local = tokio::task::spawn_local(async move {
                        assert!(lock.try_lock().await.unwrap().is_none(), "spawn_local");
                        client.current_owner().to_string()
                    });
                    owners.insert(local.await.unwrap());
                }
            })
            .await;
        for _ in 0..2 {
            let (lock, client) = (lock.clone(), client.clone());
            let blocking = tokio::task::spawn_blocking(move || {
                Handle::current().block_on(async {
                    assert!(
                        lock.try_lock().await.unwrap().is_none(),
                        "spawn_blocking + block_on"
                    );
                    let other = client.reentrant_lock("other").unwrap();
                    let outer = other.lock().await.unwrap();
                    other
                        .try_lock()
                        .await
                        .unwrap()
                        .expect("re-entry on a blocking thread")
                        .unlock()
                        .await
                        .unwrap();
                    outer.unlock().await.unwrap();
                    client.current_owner().to_string()
                })
            });
            owners.insert(blocking.await.unwrap());
        }
        guard.unlock().await.unwrap();
    });
    assert_eq!(owners.len(), 5, "{owners:?}");
    runtime.block_on(nothing_is_left(&server, &[&client]));
}

/// Issue 10, E31, and documented at [`OwnerId`]: tasks of an executor other than tokio share one
/// owner per thread, unless each task has a scope.
#[test]
fn unscoped_tasks_of_other_executors_are_one_owner_per_thread() {
    /// Runs two tasks on one thread that try the lock at the same time, and returns the owner of
    /// each guard, or `None` for a task that did not get the lock.
    fn two_tasks(client: &LockClient, scopes: bool) -> Vec<Option<OwnerId>> {
        let mut pool = LocalPool::new();
        let both_tried = Arc::new(Barrier::new(2));
        let tasks = [(), ()].map(|()| {
            let (lock, both_tried) = (client.reentrant_lock("l").unwrap(), Arc::clone(&both_tried));
            let task = async move {
                let guard = lock.try_lock().await.unwrap();
                both_tried.wait().await;
                let owner = guard.as_ref().map(LockGuard::owner);
                if let Some(guard) = guard {
                    guard.unlock().await.unwrap();
                }
                owner
            };
            let task = async move {
                if scopes {
                    OwnerId::scope(task).await
                } else {
                    task.await
                }
            };
            pool.spawner().spawn_local_with_handle(task).unwrap()
        });
        pool.run_until(join_all(tasks))
    }

    let server = Server::start();
    let client = futures::executor::block_on(server.client());
    let thread = client.current_owner();
    assert_eq!(
        two_tasks(&client, false),
        [Some(thread.clone()), Some(thread)],
        "one owner holds it twice"
    );
    let scoped = two_tasks(&client, true);
    assert_eq!(scoped.iter().flatten().count(), 1, "one of two: {scoped:?}");
    futures::executor::block_on(client.idle());
    assert_eq!(server.dump(), []);
}

/// F36: the ids of finished tasks are not reused, so no later task re-enters a leaked hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f36_a_leaked_hold_is_never_re_entered_by_later_tasks() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let leaking = lock.clone();
    let leaked = tokio::spawn(async move { leaking.lock().await.unwrap().leave_to_lease() })
        .await
        .unwrap();
    let mut seen = HashSet::from([leaked.to_string()]);
    for batch in 0..100 {
        let tasks: Vec<_> = (0..1000)
            .map(|task| {
                let (client, lock) = (client.clone(), lock.clone());
                tokio::spawn(async move {
                    if task == 0 {
                        assert!(
                            lock.try_lock().await.unwrap().is_none(),
                            "re-entered a leaked hold"
                        );
                    }
                    client.current_owner().to_string()
                })
            })
            .collect();
        for task in tasks {
            assert!(
                seen.insert(task.await.unwrap()),
                "an id came back in batch {batch}"
            );
        }
    }
    assert_eq!(server.record("l"), [(leaked.to_string(), 1)]);
    lock.release(&leaked).await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

/// The client needs nothing from the caller's runtime: no timers, no I/O, no real clock, not even
/// tokio.
#[test]
fn a_client_needs_no_timers_no_running_clock_and_no_tokio() {
    let server = Server::start();
    let bare = || Builder::new_current_thread().build().unwrap();
    let paused = || {
        Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap()
    };
    bare().block_on(everything(&server));
    paused().block_on(everything(&server));
    futures::executor::block_on(everything(&server));
    // The client is created on one runtime and used on another that starts later.
    let client = bare().block_on(LockClient::connect(server.url())).unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let guard = paused().block_on(lock.lock()).unwrap();
    futures::executor::block_on(guard.unlock()).unwrap();
    assert_eq!(server.dump(), []);
}

/// Runs a waiting acquire, a timeout, a renewal, a loss, an extension, a release and a shutdown.
async fn everything(server: &Server) {
    let connect = || {
        LockClient::builder()
            .watchdog_timeout(Duration::from_millis(900))
            .connect(server.url())
    };
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let guard = la.lock().await.unwrap();
    // The wait takes real time, and more of it than the watchdog timeout.
    let start = std::time::Instant::now();
    assert!(
        lb.try_lock_for(Duration::from_millis(1500))
            .await
            .unwrap()
            .is_none()
    );
    assert!(start.elapsed() >= Duration::from_millis(1500));
    assert!(!guard.is_lost());
    guard.extend(Duration::from_secs(5)).await.unwrap();
    let releasing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        drop(guard);
    });
    let next = lb.try_lock_for(SOON).await.unwrap().expect("released");
    releasing.join().unwrap();
    next.unlock().await.unwrap();
    let leased = la
        .try_lock_with(AcquireOptions::new().lease(Duration::from_millis(60)))
        .await
        .unwrap()
        .unwrap();
    let lost = leased.run_until_lost(std::future::pending::<()>()).await;
    assert!(lost.is_err());
    drop(leased);
    a.idle().await;
    a.shutdown().await.unwrap();
    drop(b);
}

/// R47: the guard remembers its owner, and tasks never re-enter each other's hold, whatever threads
/// they run on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r47_1000_tasks_on_two_threads_never_re_enter_each_other() {
    let server = Server::start();
    let client = server.client().await;
    let inside = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..1000)
        .map(|task| {
            let (lock, client, inside) = (
                client.reentrant_lock("l").unwrap(),
                client.clone(),
                Arc::clone(&inside),
            );
            tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                assert_eq!(
                    inside.fetch_add(1, Ordering::SeqCst),
                    0,
                    "re-entered another's hold"
                );
                assert_eq!(guard.owner().as_str(), client.current_owner().as_str());
                tokio::task::yield_now().await;
                let nested = lock.try_lock().await.unwrap().expect("one's own hold");
                inside.fetch_sub(1, Ordering::SeqCst);
                match task % 4 {
                    // The guards are moved to another task, moved to a plain thread, released here,
                    // or dropped.
                    0 => {
                        nested.unlock().await.unwrap();
                        tokio::spawn(guard.unlock()).await.unwrap().unwrap();
                    }
                    1 => {
                        let both = move || {
                            futures::executor::block_on(guard.unlock()).unwrap();
                            futures::executor::block_on(nested.unlock()).unwrap();
                        };
                        tokio::task::spawn_blocking(both).await.unwrap();
                    }
                    2 => {
                        guard.unlock().await.unwrap();
                        nested.unlock().await.unwrap();
                    }
                    _ => drop((guard, nested)),
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}
