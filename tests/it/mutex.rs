//! Guard ownership: with `mutex` each acquire is an owner of its own; with `reentrant_lock` the
//! owner is the task that locks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, stream};
use nestlock::{AcquireOptions, Error, Lock, LockClient, RLock, ReadWriteLock};
use tokio::sync::mpsc;

use crate::{
    contract::contract_suite,
    support::{Server, eventually},
};

contract_suite! { mod contract, door = |client, name| client.mutex(name).unwrap(), reentrant = false }

const SOON: Duration = Duration::from_secs(15);

/// How many workers are inside now, and the most that ever were at once.
#[derive(Default)]
struct Inside {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Inside {
    async fn work(&self) {
        self.work_beside(0).await;
    }

    /// Waits until `wanted` workers have been inside at once, and 20 ms more, so that one too many
    /// shows.
    async fn work_beside(&self, wanted: usize) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        eventually("that many are inside", || async { self.most() >= wanted }).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }
}

/// Locks in one task, and hands each guard to a worker task.
async fn dispatcher(lock: &Lock, wanted: usize) -> usize {
    let inside = Arc::new(Inside::default());
    let mut workers = Vec::new();
    for _ in 0..3 {
        let guard = lock.lock().await.unwrap();
        let inside = Arc::clone(&inside);
        workers.push(tokio::spawn(async move {
            inside.work_beside(wanted).await;
            guard.unlock().await.unwrap();
        }));
    }
    for worker in workers {
        worker.await.unwrap();
    }
    inside.most()
}

/// Locks in the futures of one task, four at a time.
async fn for_each_concurrent(lock: &Lock, wanted: usize) -> usize {
    let inside = Inside::default();
    stream::iter(0..8)
        .for_each_concurrent(4, |_| async {
            let guard = lock.lock().await.unwrap();
            inside.work_beside(wanted).await;
            guard.unlock().await.unwrap();
        })
        .await;
    inside.most()
}

/// Serves a connection in one task, one request after another. Each request hands its work to a
/// task.
async fn keep_alive(lock: &Lock, wanted: usize) -> usize {
    let inside = Arc::new(Inside::default());
    let (requests, mut connection) = mpsc::channel(1);
    let serve = {
        let (lock, inside) = (lock.clone(), Arc::clone(&inside));
        tokio::spawn(async move {
            let mut under_way = Vec::new();
            while let Some(()) = connection.recv().await {
                let guard = lock.lock().await.unwrap();
                let inside = Arc::clone(&inside);
                under_way.push(tokio::spawn(async move {
                    inside.work_beside(wanted).await;
                    guard.unlock().await.unwrap();
                }));
            }
            for work in under_way {
                work.await.unwrap();
            }
        })
    };
    for _ in 0..2 {
        requests.send(()).await.unwrap();
    }
    drop(requests);
    serve.await.unwrap();
    inside.most()
}

/// In three programs the mutex lets one in at a time, and the reentrant lock lets all in at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mutex_admits_one_where_a_reentrant_lock_admits_all() {
    let server = Server::start();
    let client = server.client().await;
    let (mutex, reentrant) = (
        client.mutex("m").unwrap(),
        client.reentrant_lock("r").unwrap(),
    );
    assert_eq!(
        (dispatcher(&mutex, 1).await, dispatcher(&reentrant, 3).await),
        (1, 3)
    );
    assert_eq!(
        (
            for_each_concurrent(&mutex, 1).await,
            for_each_concurrent(&reentrant, 4).await
        ),
        (1, 4)
    );
    assert_eq!(
        (keep_alive(&mutex, 1).await, keep_alive(&reentrant, 2).await),
        (1, 2)
    );
    client.idle().await;
    assert_eq!(server.dump(), []);
}

/// The owner of a mutex is the owner in its guard, not the task that locked it.
#[tokio::test]
async fn a_mutex_is_held_by_the_owner_of_its_guard() {
    let server = Server::start();
    let client = server.client().await;
    let mutex = client.mutex("a").unwrap();
    let guard = mutex.lock().await.unwrap();
    let (task, lock) = (client.current_owner(), &mutex as &dyn RLock);
    assert_eq!(
        (
            lock.is_held_by(&guard.owner()).await.unwrap(),
            lock.is_held_by(&task).await.unwrap()
        ),
        (true, false)
    );
    assert_eq!(
        (
            mutex.hold_count(&guard.owner()).await.unwrap(),
            mutex.hold_count(&task).await.unwrap()
        ),
        (1, 0)
    );
    let owner = guard.owner();
    guard.unlock().await.unwrap();
    assert!(!mutex.is_held_by(&owner).await.unwrap());
    let reentrant = client.reentrant_lock("b").unwrap();
    let _guards = [
        reentrant.lock().await.unwrap(),
        reentrant.lock().await.unwrap(),
    ];
    assert!(reentrant.is_held_by(&task).await.unwrap());
    assert!(!reentrant.is_held_by(&owner).await.unwrap());
}

/// A dispatcher that only tries, in the task that holds the lock.
#[tokio::test]
async fn a_try_of_a_lock_that_the_same_task_holds_is_busy() {
    let server = Server::start();
    let client = server.client().await;
    let locks = [
        client.mutex("a").unwrap(),
        client.non_reentrant_lock("b").unwrap(),
        client.non_reentrant_fair_lock("c").unwrap(),
        client.signal_lock("d").unwrap(),
        client.string_lock("e").unwrap(),
        client
            .read_write_lock("f")
            .unwrap()
            .owner_per_acquire()
            .write_lock(),
        client
            .multi_lock([client.mutex("g").unwrap(), client.mutex("h").unwrap()])
            .unwrap(),
        LockClient::red_lock([&client], "i", nestlock::RedLockOptions::new()).unwrap(),
    ];
    for lock in locks {
        let guard = lock.lock().await.unwrap();
        assert!(lock.try_lock().await.unwrap().is_none(), "{}", lock.name());
        let leased = AcquireOptions::new().lease(SOON);
        assert!(
            lock.try_lock_with(leased).await.unwrap().is_none(),
            "{}",
            lock.name()
        );
        guard.unlock().await.unwrap();
        lock.try_lock()
            .await
            .unwrap()
            .expect("free")
            .unlock()
            .await
            .unwrap();
    }
    let both = client.read_write_lock("rw").unwrap();
    let reads = both.read().await.unwrap();
    assert!(
        both.try_write().await.unwrap().is_none(),
        "busy: the task itself reads"
    );
    assert!(
        matches!(both.write().await, Err(Error::UpgradeRefused { .. })),
        "a wait would never end"
    );
    reads.unlock().await.unwrap();
}

/// All these constructors use one record, so a mutex excludes each of them at that name.
#[tokio::test]
async fn a_mutex_excludes_the_other_doors_of_its_record() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let doors: [fn(&LockClient) -> Lock; 5] = [
        |client| client.mutex("l").unwrap(),
        |client| client.reentrant_lock("l").unwrap(),
        |client| client.non_reentrant_lock("l").unwrap(),
        |client| client.spin_lock("l").unwrap(),
        |client| client.fenced_lock("l").unwrap(),
    ];
    let guard = a.mutex("l").unwrap().lock().await.unwrap();
    for door in doors {
        assert!(door(&a).try_lock().await.unwrap().is_none());
        assert!(door(&b).try_lock().await.unwrap().is_none());
    }
    guard.unlock().await.unwrap();
    for door in doors {
        let guard = door(&a).lock().await.unwrap();
        assert!(a.mutex("l").unwrap().try_lock().await.unwrap().is_none());
        guard.unlock().await.unwrap();
    }
}

/// The waiters are served in order, although all futures belong to one task.
#[tokio::test]
async fn a_fair_lock_of_acquires_serves_one_tasks_futures_in_turn() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.fair_lock("f").unwrap().owner_per_acquire();
    let first = lock.lock().await.unwrap();
    let mut waiting = Vec::new();
    for n in 0..4_i64 {
        let lock = lock.clone();
        waiting.push(Box::pin(async move { lock.lock().await.unwrap() }));
        eventually("its place", || {
            for waiter in &mut waiting {
                assert!(
                    futures::FutureExt::now_or_never(waiter.as_mut()).is_none(),
                    "{n}"
                );
            }
            let joined = server.call(&["LLEN", "redisson_lock_queue:{f}"]).int() == n + 1;
            async move { joined }
        })
        .await;
    }
    drop(first);
    for (n, next) in waiting.into_iter().enumerate() {
        let guard = tokio::time::timeout(SOON, next)
            .await
            .unwrap_or_else(|_| panic!("{n} waits for its turn"));
        guard.unlock().await.unwrap();
    }
}

async fn readers(lock: &ReadWriteLock) -> usize {
    let inside = Inside::default();
    stream::iter(0..8)
        .for_each_concurrent(4, |n| {
            let inside = &inside;
            async move {
                let guard = if n % 2 == 0 {
                    lock.read().await
                } else {
                    lock.write().await
                };
                // If the task were the owner, the reader that becomes a writer would be refused.
                let guard = guard.unwrap();
                if n % 2 == 1 {
                    inside.work().await;
                }
                guard.unlock().await.unwrap();
            }
        })
        .await;
    inside.most()
}

#[tokio::test]
async fn readers_and_writers_of_one_task_exclude_each_other() {
    let server = Server::start();
    let client = server.client().await;
    assert_eq!(
        readers(&client.read_write_lock("rw").unwrap().owner_per_acquire()).await,
        1
    );
}

/// A named owner is the same owner with any constructor.
#[tokio::test]
async fn a_named_owner_of_a_mutex_re_enters() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.mutex("l").unwrap();
    let job = || AcquireOptions::new().owner(client.owner("job-7").unwrap());
    let outer = lock.lock_with(job()).await.unwrap();
    let inner = lock
        .try_lock_with(job())
        .await
        .unwrap()
        .expect("the same owner");
    assert_eq!(
        lock.hold_count(&client.owner("job-7").unwrap())
            .await
            .unwrap(),
        2
    );
    assert!(lock.try_lock().await.unwrap().is_none());
    inner.unlock().await.unwrap();
    outer.unlock().await.unwrap();
}

/// Each acquire of a multi-lock is one owner for all members.
#[tokio::test]
async fn a_multi_lock_of_acquires_has_one_owner_of_all_members() {
    let server = Server::start();
    let client = server.client().await;
    let members = || ["a", "b"].map(|name| client.reentrant_lock(name).unwrap());
    let both = client.multi_lock(members()).unwrap().owner_per_acquire();
    let guard = both.lock().await.unwrap();
    assert_eq!(guard.members()[0].owner(), guard.members()[1].owner());
    assert_ne!(guard.owner(), client.current_owner());
    assert!(both.try_lock().await.unwrap().is_none());
    assert!(members()[1].try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
    assert_eq!(server.dump(), []);
}

/// The use case is a job that must run once per interval.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_left_to_its_lease_is_held_until_then_and_not_renewed() {
    let server = Server::start();
    let builder =
        |builder: nestlock::LockClientBuilder| builder.watchdog_timeout(Duration::from_millis(600));
    let (a, b) = (
        server.client_with(builder).await,
        server.client_with(builder).await,
    );
    let lock = a.mutex("job").unwrap();
    let start = std::time::Instant::now();
    let once = AcquireOptions::new().lease(Duration::from_millis(1500));
    lock.lock_with(once).await.unwrap().leave_to_lease();
    assert!(b.mutex("job").unwrap().try_lock().await.unwrap().is_none());
    let next = b.mutex("job").unwrap().lock().await.unwrap();
    assert!(
        start.elapsed() >= Duration::from_millis(1480),
        "{:?}",
        start.elapsed()
    );
    next.unlock().await.unwrap();
    // A lease that the watchdog renewed ends within the watchdog timeout, and can be released
    // earlier.
    let watched = lock.lock().await.unwrap();
    tokio::time::sleep(Duration::from_millis(900)).await;
    let (owner, left) = (watched.leave_to_lease(), std::time::Instant::now());
    assert_eq!(lock.holder().await.unwrap(), Some(owner));
    b.mutex("job")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert!(
        left.elapsed() < Duration::from_secs(5),
        "still renewed: {:?}",
        left.elapsed()
    );
    let owner = lock.lock().await.unwrap().leave_to_lease();
    lock.release(&owner).await.unwrap();
    assert_eq!(server.dump(), []);
    // A hold that is left to its lease stays as long as an outer guard renews the lock.
    let nested = a.reentrant_lock("nested").unwrap();
    let outer = nested.lock().await.unwrap();
    nested.lock().await.unwrap().leave_to_lease();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!outer.is_lost());
    outer.unlock().await.unwrap();
    assert!(
        nested.is_locked().await.unwrap(),
        "one hold is left to its lease"
    );
    eventually("it ends", || async { !server.exists("nested") }).await;
    eventually("nothing is kept", || async { a.stats().holds == 0 }).await;
}

/// A trait object behaves like the lock itself.
#[tokio::test]
async fn a_lock_can_be_used_as_an_object() {
    let server = Server::start();
    let client = server.client().await;
    let locks: [Box<dyn nestlock::RLock>; 2] = [
        Box::new(client.mutex("a").unwrap()),
        Box::new(client.multi_lock([client.mutex("b").unwrap()]).unwrap()),
    ];
    for lock in locks {
        let guard = lock.lock().await.unwrap();
        let held = lock.inspect().await.unwrap().expect("held");
        assert_eq!(held.holders, [(guard.owner(), 1)]);
        assert!(held.remaining.is_some_and(|left| left > SOON), "{held:?}");
        assert!(lock.try_lock().await.unwrap().is_none() && lock.is_locked().await.unwrap());
        lock.extend(&guard.owner(), 4 * SOON).await.unwrap();
        let stranger = client.owner("nobody").unwrap();
        assert!(matches!(
            lock.extend(&stranger, SOON).await,
            Err(Error::NotHeld { .. })
        ));
        assert!(matches!(
            lock.release(&stranger).await,
            Err(Error::NotHeld { .. })
        ));
        guard.unlock().await.unwrap();
        assert_eq!(lock.inspect().await.unwrap(), None);
    }
}
