//! Nothing is left behind: no memory, no connection, no channel, no renewal, no thread.

use std::time::{Duration, Instant};

use nestlock::{
    AcquireOptions, ClientStats, Error, Lock, LockClient, LockClientBuilder, LockGuard, LossReason,
    OwnerId, StoreError, StoreErrorKind,
};

use crate::{
    contract::nothing_is_left,
    support::{Server, came_too_late, eventually},
};

const LONG: Duration = Duration::from_secs(3600);

/// Returns the resident memory of this process in KiB.
fn rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("VmRSS");
    line.trim()
        .trim_end_matches("kB")
        .trim()
        .parse()
        .expect("a number")
}

/// Counts the client connections, except the one that sends this query.
fn connections(server: &Server) -> usize {
    server.call(&["CLIENT", "LIST"]).text().lines().count() - 1
}

/// R29, R94, L10: many locks over many names always use the same two connections, and memory does
/// not grow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r29_r94_l10_a_hundred_thousand_locks_leave_nothing() {
    const TASKS: u32 = 32;
    if !alone("r29_r94_l10_a_hundred_thousand_locks_leave_nothing") {
        return;
    }
    let server = Server::start();
    let client = server.client().await;
    assert_eq!(connections(&server), 2);
    let round = async |locks: u32| {
        let tasks: Vec<_> = (0..TASKS)
            .map(|task| {
                let client = client.clone();
                tokio::spawn(async move {
                    for n in 0..locks / TASKS {
                        let name = format!("some/rather/long/name/of/a/lock/{task}/{n}");
                        let guard = client.reentrant_lock(name).unwrap().lock().await.unwrap();
                        if n % 4 == 0 {
                            drop(guard);
                        } else {
                            guard.unlock().await.unwrap();
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(connections(&server), 2);
        client.idle().await;
    };
    round(10_000).await;
    let before = rss();
    round(100_000).await;
    nothing_is_left(&server, &[&client]).await;
    let grown = rss().saturating_sub(before);
    eprintln!("RSS after 10,000 locks: {before} KiB; after 100,000 more: {grown} KiB more");
    // A few hundred KiB are normal. A leak of one small allocation per lock would be 10 MiB.
    assert!(grown < 6_000, "{grown} KiB for 100,000 locks");
}

/// R03: the entries of nested holds are gone after the last release, and no more requests are sent
/// for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r03_nested_holds_leave_no_entry_and_no_renewal() {
    let server = Server::start();
    // A reply may take a third of it: longer than a busy machine holds this process up.
    let watchdog = Duration::from_millis(4_500);
    let client = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    for round in 0..300 {
        let lock = client.reentrant_lock(format!("l{}", round % 7)).unwrap();
        let mut guards = Vec::new();
        for _ in 0..=round % 5 {
            guards.push(lock.lock().await.unwrap());
        }
        while let Some(guard) = guards.pop() {
            if round % 2 == 0 {
                guard.unlock().await.unwrap();
            } else {
                drop(guard);
            }
        }
    }
    nothing_is_left(&server, &[&client]).await;
    let scripts = server.script_count();
    tokio::time::sleep(2 * watchdog).await; // two leases: a renewal would fall into them
    assert_eq!(server.script_count(), scripts);
}

/// R22, R25: nothing is renewed after a loss, a failed release or a successful one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r22_r25_nothing_is_sent_after_a_release_or_a_loss() {
    let server = Server::start();
    let watchdog = Duration::from_millis(4_500);
    let client = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    let lock = |name: &str| client.reentrant_lock(name).unwrap();
    lock("released")
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    drop(lock("dropped").lock().await.unwrap());
    let owner = lock("forgotten").lock().await.unwrap().leave_to_lease();
    lock("forgotten").release(&owner).await.unwrap();
    let deleted = lock("deleted").lock().await.unwrap();
    server.call(&["DEL", "deleted"]);
    tokio::time::timeout(Duration::from_secs(15), deleted.lost())
        .await
        .expect("noticed");
    let deleted_first = lock("deleted first").lock().await.unwrap();
    server.call(&["DEL", "deleted first"]);
    assert!(matches!(
        deleted_first.unlock().await,
        Err(Error::Lost { .. })
    ));
    let forced = lock("forced").lock().await.unwrap();
    assert!(lock("forced").force_unlock().await.unwrap());
    assert!(forced.is_lost());
    client.idle().await;
    let scripts = server.script_count();
    tokio::time::sleep(2 * watchdog).await; // two leases: a renewal would fall into them
    assert_eq!(
        server.script_count(),
        scripts,
        "with the guards of lost locks still alive"
    );
    drop((deleted, forced));
    client.idle().await;
    assert_eq!(
        server.script_count(),
        scripts,
        "there is nothing to release"
    );
    nothing_is_left(&server, &[&client]).await;
}

/// R88: any number of contended names uses one connection, and all channels are unsubscribed in the
/// end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r88_two_thousand_contended_names_leave_no_channel() {
    const NAMES: usize = 2000;
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let mut held = Vec::new();
    for n in 0..NAMES {
        held.push(
            a.reentrant_lock(format!("l{n}"))
                .unwrap()
                .lock()
                .await
                .unwrap(),
        );
    }
    let waiters: Vec<_> = (0..NAMES)
        .map(|n| {
            let lock = b.reentrant_lock(format!("l{n}")).unwrap();
            tokio::spawn(async move {
                if n % 10 == 0 {
                    // This waiter gives up.
                    match lock.try_lock_for(Duration::from_millis(1)).await {
                        Ok(None) => {}
                        Err(error) if came_too_late(&error) => {}
                        other => panic!("{other:?}"),
                    }
                } else {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    eventually("all wait", || async {
        server.channels().len() >= NAMES / 10 * 9
    })
    .await;
    assert_eq!(connections(&server), 4);
    drop(held);
    for waiter in waiters {
        tokio::time::timeout(Duration::from_secs(30), waiter)
            .await
            .expect("its turn")
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
    assert_eq!(connections(&server), 4);
}

/// A client that is dropped after its last release closes its connections and ends its thread.
#[test]
fn a_dropped_client_ends_its_connections_and_its_thread() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        for drop_guard_last in [false, true] {
            let client = server.client().await;
            let lock = client.reentrant_lock("l").unwrap();
            let guard = lock.lock().await.unwrap();
            let clone = client.clone();
            drop((client, lock));
            assert_eq!(connections(&server), 2);
            if drop_guard_last {
                drop((clone, guard));
            } else {
                drop((guard, clone));
            }
            // The end of the client does not cut off the release of the guard.
            eventually("released", || async { !server.exists("l") }).await;
            eventually("no connection is left", || async {
                connections(&server) == 0
            })
            .await;
        }
        // The same for a client that was shut down.
        let client = server.client().await;
        client.shutdown().await.unwrap();
        eventually("no connection is left", || async {
            connections(&server) == 0
        })
        .await;
    });
    if !alone("a_dropped_client_ends_its_connections_and_its_thread") {
        return;
    }
    runtime.block_on(eventually("no thread is left", || async {
        client_threads() == 0
    }));
    let client = runtime.block_on(server.client());
    // A new thread has its parent's name until it sets its own.
    runtime.block_on(eventually("it has a thread", || async {
        client_threads() == 1
    }));
    drop(client);
    runtime.block_on(eventually("no thread is left", || async {
        client_threads() == 0
    }));
}

/// Runs a test of this file again in a process of its own, where threads and memory can be counted.
/// Returns `true` in that process.
fn alone(test: &str) -> bool {
    if std::env::var_os("NESTLOCK_ALONE").is_some() {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &format!("residue::{test}"),
            "--test-threads",
            "1",
            "--nocapture",
        ])
        .env("NESTLOCK_ALONE", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "alone in its process: {said}");
    eprint!("{said}");
    false
}

fn client_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let name = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
    };
    tasks
        .flatten()
        .filter(|task| task.path().exists())
        .map(name)
        .filter(|name| name.trim() == "nestlock")
        .count()
}

/// P6: guards and locks keep their client running, including its watchdog.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p6_held_guards_outlive_the_client_handle() {
    let server = Server::start();
    let watchdog = Duration::from_millis(900);
    let client = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    let lock = client.reentrant_lock("l").unwrap();
    drop(client);
    let guard = lock.lock().await.unwrap();
    drop(lock);
    let start = Instant::now();
    while start.elapsed() < 2 * watchdog {
        assert!(
            !guard.is_lost() && server.exists("l"),
            "after {:?}",
            start.elapsed()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    guard.extend(LONG).await.unwrap();
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
    eventually("no connection is left", || async {
        connections(&server) == 0
    })
    .await;
}

/// R30: a shutdown with a thousand locks held returns soon and has released them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r30_a_shutdown_while_holding_a_thousand_returns_soon() {
    let server = Server::start();
    let client = server.client().await;
    let mut guards = Vec::new();
    for n in 0..1000 {
        let lock = client.reentrant_lock(format!("l{n}")).unwrap();
        guards.push(
            lock.try_lock_with(AcquireOptions::new().lease(LONG))
                .await
                .unwrap()
                .unwrap(),
        );
    }
    assert_eq!(client.stats().holds, 1000);
    let start = Instant::now();
    client.shutdown().await.unwrap();
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(server.dump(), []);
    assert!(guards.iter().all(LockGuard::is_lost));
    drop(guards);
    eventually("an empty ledger", || async {
        client.stats().holds == 0 && client.stats().settling == 0
    })
    .await;
    eventually("no connection is left", || async {
        connections(&server) == 0
    })
    .await;
}

/// L11: the compiler checks what is `Send`, `Sync` and `'static`.
#[allow(clippy::used_underscore_items, reason = "never called")]
#[test]
fn l11_everything_is_send_sync_and_static() {
    fn all<T: Send + Sync + Unpin + 'static>() {}
    fn future<F: Future + Send>(_: F) {}
    fn owned<F: Future + Send + 'static>(_: F) {}
    fn _futures(
        client: &LockClient,
        lock: &Lock,
        dynamic: &Lock,
        guard: LockGuard,
        other: &LockGuard,
    ) {
        let owner = client.current_owner();
        owned(LockClient::connect("redis://localhost"));
        owned(LockClient::builder().connect("redis://localhost"));
        future(client.idle());
        future(client.shutdown());
        future(lock.lock());
        future(dynamic.lock());
        future(lock.try_lock());
        future(lock.try_lock_for(LONG));
        future(lock.try_lock_with(AcquireOptions::new()));
        future(lock.release(&owner));
        future(lock.extend(&owner, LONG));
        future(lock.force_unlock());
        future(lock.is_locked());
        future(lock.hold_count(&owner));
        future(lock.holder());
        future(lock.remaining_lease());
        future(other.lost());
        future(other.extend(LONG));
        future(other.run_until_lost(async {}));
        owned(guard.unlock());
        owned(OwnerId::scope(async {}));
    }
    all::<LockClient>();
    all::<LockClientBuilder>();
    all::<Lock>();
    all::<Lock>();
    all::<Lock>();
    all::<LockGuard>();
    all::<OwnerId>();
    all::<AcquireOptions>();
    all::<ClientStats>();
    all::<Error>();
    all::<LossReason>();
    all::<StoreError>();
    all::<StoreErrorKind>();
}
