//! Acquires and releases of plain locks that are sent at the same moment share one script.

use std::{
    thread,
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{AcquireOptions, LockClient, StoreErrorKind, Tuning};

use crate::{
    cancel::poll_times,
    contract::nothing_is_left,
    support::{
        Server, eventually,
        proxy::{Action, Proxy, Verb},
    },
};

const MANY: usize = 64;

/// Returns the URL with nestlock's own connection, the only one that bundles, whatever connection
/// the other tests use.
fn own(url: String) -> String {
    url.replacen("wire=fred", "wire=own", 1)
}

async fn lock_many(
    client: &LockClient,
    names: impl Iterator<Item = String>,
) -> Vec<nestlock::Result<nestlock::LockGuard>> {
    join_all(names.map(|name| {
        let lock = client.reentrant_lock(name).unwrap();
        async move {
            lock.lock_with(AcquireOptions::new().lease(Duration::from_secs(60)))
                .await
        }
    }))
    .await
}

fn bundles(proxy: &Proxy) -> usize {
    proxy.count(Verb::Bundle)
}

fn store_kind(error: &nestlock::Error) -> StoreErrorKind {
    match error {
        nestlock::Error::Store { source, .. } => source.kind(),
        other => panic!("{other:?}"),
    }
}

/// Concurrent requests share scripts by default, and each has its own script if bundling is off.
#[tokio::test]
async fn requests_made_at_once_share_a_script_unless_that_is_off() {
    let server = Server::start();
    for (bundle, most) in [(true, MANY as u64), (false, 2 * MANY as u64)] {
        let client = LockClient::builder()
            .tuning(Tuning {
                bundle,
                ..Tuning::default()
            })
            .connect(own(server.url()))
            .await
            .unwrap();
        // The first round also sends the script texts.
        for _ in 0..2 {
            let before = server.script_count();
            let guards = lock_many(&client, (0..MANY).map(|n| format!("l{n}"))).await;
            assert_eq!(server.dump().len(), MANY);
            for guard in join_all(guards.into_iter().map(|guard| guard.unwrap().unlock())).await {
                guard.unwrap();
            }
            let scripts = server.script_count() - before;
            assert!(
                scripts <= most && (bundle || scripts >= most),
                "{scripts} scripts"
            );
        }
        nothing_is_left(&server, &[&client]).await;
    }
}

/// One lock is free, one is held by another client, one is held by its own owner, and two keys are
/// not locks.
#[tokio::test]
async fn each_request_gets_its_own_reply() {
    let server = Server::start();
    let (proxy, other) = (Proxy::start(&server), server.client().await);
    let client = LockClient::connect(own(proxy.url())).await.unwrap();
    let _theirs = other
        .reentrant_lock("theirs")
        .unwrap()
        .lock()
        .await
        .unwrap();
    let ours = client.reentrant_lock("ours").unwrap().lock().await.unwrap();
    server.call(&["HSET", "hash", "not", "ours"]);
    server.call(&["SET", "text", "t"]);
    // The first request is in flight before the others are sent, so that those form a bundle.
    let names = ["first", "free", "theirs", "ours", "hash", "text"];
    let got = join_all(names.map(|name| {
        let lock = client.reentrant_lock(name).unwrap();
        async move { lock.try_lock().await }
    }))
    .await;
    assert_eq!(bundles(&proxy), 1);
    let [first, free, theirs, again, hash, text] = got.try_into().unwrap();
    assert!(theirs.unwrap().is_none());
    assert_eq!(server.record("ours")[0].1, 2);
    assert!(
        matches!(hash, Err(nestlock::Error::WrongLockKind { .. })),
        "{hash:?}"
    );
    assert!(
        matches!(text, Err(nestlock::Error::WrongType { .. })),
        "{text:?}"
    );
    // Another client removes one of the records.
    server.call(&["DEL", "free"]);
    let ends = [first, free, again].map(|guard| guard.unwrap().unwrap().unlock());
    let [first, free, again] = join_all(ends).await.try_into().unwrap();
    assert!(
        matches!(
            free,
            Err(nestlock::Error::NotHeld { .. } | nestlock::Error::Lost { .. })
        ),
        "{free:?}"
    );
    first.and(again).unwrap();
    assert_eq!(bundles(&proxy), 2);
    ours.unlock().await.unwrap();
    assert!(!server.exists("ours"));
}

/// A key that is forbidden to the user costs the others in its bundle one retry, once, and nothing
/// else.
#[tokio::test]
async fn a_key_that_is_forbidden_is_so_for_itself() {
    let server = Server::start_real();
    server.call(&["ACL", "SETUSER", "u", "on", ">secret", "~l*", "&*", "+@all"]);
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(own(proxy.url()).replacen("://", "://u:secret@", 1))
        .await
        .unwrap();
    for (together, round) in [(1, 0), (0, 1)] {
        let before = bundles(&proxy);
        let mut got = lock_many(
            &client,
            ["l1", "forbidden", "l2"]
                .map(|name| format!("{name}{round}"))
                .into_iter(),
        )
        .await;
        assert_eq!(
            store_kind(&got.remove(1).unwrap_err()),
            StoreErrorKind::NoPermission
        );
        let ends: Vec<_> = got.into_iter().map(Result::unwrap).collect();
        assert_eq!(
            bundles(&proxy) - before,
            together,
            "it would be refused again and again"
        );
        for guard in ends {
            guard.unlock().await.unwrap();
        }
    }
}

/// A server without memory refuses requests that need memory, and accepts releases.
#[tokio::test]
async fn a_server_without_memory_refuses_those_that_need_some() {
    let server = Server::start_real();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(own(proxy.url())).await.unwrap();
    let held = lock_many(&client, (0..8).map(|n| format!("l{n}"))).await;
    server.call(&["CONFIG", "SET", "maxmemory", "1"]);
    let others: Vec<_> = (0..8)
        .map(|n| client.reentrant_lock(format!("other{n}")).unwrap())
        .collect();
    let refused = join_all(others.iter().map(nestlock::Lock::try_lock));
    let released = join_all(held.into_iter().map(|guard| guard.unwrap().unlock()));
    let before = bundles(&proxy);
    let (refused, released) = tokio::join!(refused, released);
    assert!(bundles(&proxy) > before);
    for error in refused {
        assert_eq!(store_kind(&error.unwrap_err()), StoreErrorKind::OutOfMemory);
    }
    for released in released {
        released.unwrap();
    }
    assert_eq!(server.dump(), []);
}

/// The server has forgotten the script, and the connection breaks or the bundle runs twice. A
/// request that was not executed is retried alone, and none takes effect twice.
#[tokio::test]
async fn a_lost_script_text_and_lost_replies_cost_no_hold() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::builder()
        .command_timeout(Duration::from_millis(500))
        .connect(own(proxy.url()))
        .await
        .unwrap();
    for (round, action) in [Action::Pass, Action::Lose, Action::CutBefore, Action::Twice]
        .into_iter()
        .enumerate()
    {
        server.call(&["SCRIPT", "FLUSH"]);
        proxy.once(Verb::Bundle, action);
        let before = bundles(&proxy);
        let guards = lock_many(&client, (0..8).map(|n| format!("l{round}:{n}"))).await;
        assert!(bundles(&proxy) > before, "{action:?}");
        for n in 0..8 {
            assert_eq!(
                server.record(&format!("l{round}:{n}"))[0].1,
                1,
                "{action:?}"
            );
        }
        for guard in guards {
            guard.unwrap().unlock().await.unwrap();
        }
        nothing_is_left(&server, &[&client]).await;
    }
}

/// An acquire is dropped at any poll. The others in its bundle get their locks, and nothing is left
/// of the dropped one.
#[tokio::test]
async fn a_dropped_acquire_leaves_nothing_and_harms_no_other() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(own(proxy.url())).await.unwrap();
    for k in 1..8 {
        let [first, stays, goes] =
            ["first", "stays", "goes"].map(|name| client.reentrant_lock(name).unwrap());
        let before = bundles(&proxy);
        let (first, guard, dropped) =
            tokio::join!(first.lock(), stays.lock(), poll_times(goes.lock(), k));
        assert!(bundles(&proxy) > before, "{k}");
        drop(dropped);
        eventually("it is given back", || async { !server.exists("goes") }).await;
        first.unwrap().unlock().await.unwrap();
        guard.unwrap().unlock().await.unwrap();
        nothing_is_left(&server, &[&client]).await;
    }
}

/// A proxy on the path may execute a request twice. If an acquire that found its lock busy were
/// bundled with the release, it would take the lock the second time, unnoticed.
#[tokio::test]
async fn what_is_executed_twice_leaves_nothing() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(own(proxy.url())).await.unwrap();
    let [first, lock, other] = ["first", "l", "other"].map(|name| client.mutex(name).unwrap());
    // A script that is sent as text is never bundled, so load the scripts first.
    first.lock().await.unwrap().unlock().await.unwrap();
    proxy.each(Verb::Bundle, Action::Twice);
    for _ in 0..5 {
        let (held, before) = (lock.lock().await.unwrap(), bundles(&proxy));
        let all = tokio::join!(first.lock(), lock.try_lock(), held.unlock(), other.lock());
        assert!(bundles(&proxy) > before, "no requests were bundled");
        assert!(all.1.unwrap().is_none());
        all.2.unwrap();
        assert!(!server.exists("l"));
        let (first, other) = tokio::join!(all.0.unwrap().unlock(), all.3.unwrap().unlock());
        first.and(other).unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// A client may connect to a cluster of one node as to a server, but the keys are in many slots.
#[tokio::test]
async fn where_keys_cannot_go_together_they_are_not_refused_each_time() {
    let bus = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
        .to_string();
    let server = Server::start_with(&["--cluster-enabled", "yes", "--cluster-port", &bus]);
    server.call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    eventually("it serves", || async {
        server
            .call(&["CLUSTER", "INFO"])
            .text()
            .contains("cluster_state:ok")
    })
    .await;
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(own(proxy.url())).await.unwrap();
    for round in 0..3 {
        for guard in lock_many(&client, (0..8).map(|n| format!("l{round}:{n}"))).await {
            guard.unwrap().unlock().await.unwrap();
        }
    }
    assert_eq!(bundles(&proxy), 1, "refused again and again");
}

/// Replies were read and some were delivered when the runtime that made the client stops.
#[test]
fn a_client_passes_on_replies_read_before_its_runtime_stalled() {
    let server = Server::start();
    let current = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    for is_multi in [false, true] {
        let made_in = if is_multi {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap()
        } else {
            current()
        };
        let client = made_in.block_on(server.client_with(|builder| {
            builder
                .watchdog_timeout(Duration::from_secs(3))
                .command_timeout(Duration::from_millis(900))
        }));
        for guard in made_in.block_on(lock_many(&client, (0..8).map(|n| format!("l{n}")))) {
            made_in.block_on(guard.unwrap().unlock()).unwrap();
        }
        let held = made_in
            .block_on(client.reentrant_lock("held").unwrap().lock())
            .unwrap();
        server.stop();
        let there = client.clone();
        let elsewhere = thread::spawn(move || {
            let began = Instant::now();
            current().block_on(async {
                let guards = join_all((0..300).map(|n| {
                    let lock = there.reentrant_lock(format!("there:{n}")).unwrap();
                    async move { lock.lock().await.unwrap() }
                }))
                .await;
                let first = began.elapsed();
                for guard in guards.into_iter().take(3) {
                    guard.unlock().await.unwrap();
                }
                (first, began.elapsed())
            })
        });
        let here = client.clone();
        let work = async move {
            let tasks: Vec<_> = (0..300)
                .map(|n| {
                    let lock = here.reentrant_lock(format!("here:{n}")).unwrap();
                    tokio::spawn(async move {
                        let guard = lock.lock().await.unwrap();
                        if n == 3 {
                            thread::sleep(Duration::from_millis(6_500));
                        }
                        guard.unlock().await
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap().unwrap();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(300));
                server.cont();
            });
            made_in.block_on(async { tokio::spawn(work).await.unwrap() });
        });
        let (first, all) = elsewhere.join().unwrap();
        println!("{is_multi}: {first:?}, {all:?}");
        assert!(
            all < Duration::from_secs(5),
            "while it was stalled: {first:?}, {all:?}"
        );
        assert!(!held.is_lost());
        made_in.block_on(held.unlock()).unwrap();
    }
}
