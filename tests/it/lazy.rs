//! Clients that connect on first use.

use std::{
    sync::LazyLock,
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{Error, LockClient, OwnerId, StoreErrorKind, TopologyKind, Tuning};
use nestlock_embedded::SpawnedCluster;

use crate::{
    connect_errors::assert_told,
    support::{
        Server, WIRES, eventually,
        proxy::{Proxy, Way},
    },
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn lazy(url: &str) -> LockClient {
    LockClient::connect_lazy(url).unwrap()
}

#[tokio::test]
async fn nothing_is_sent_before_the_first_use_nor_twice_at_it() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = lazy(&proxy.url());
    let locks: Vec<_> = (0..100)
        .map(|n| client.reentrant_lock(format!("l{n}")).unwrap())
        .collect();
    assert_eq!(
        client
            .topology()
            .nodes
            .iter()
            .filter(|node| node.is_connected == Some(true))
            .count(),
        0
    );
    let stats = client.stats();
    assert_eq!((stats.holds, stats.requests, stats.settling), (0, 0, 0));
    client.idle().await;
    assert_eq!(proxy.connections(), 0);
    let guards = join_all(
        locks
            .iter()
            .map(|lock| OwnerId::scope(async { lock.lock().await.unwrap() })),
    )
    .await;
    assert_eq!(proxy.connections(), 2, "one for scripts, one for messages");
    join_all(
        guards
            .into_iter()
            .map(|guard| async { guard.unlock().await.unwrap() }),
    )
    .await;
}

#[tokio::test]
async fn a_program_starts_without_a_server_and_waits_for_it() {
    let server = Server::start_real();
    server.kill();
    for &wire in WIRES {
        let client = LockClient::builder()
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .connect_lazy(server.url())
            .unwrap();
        let lock = client.fair_lock("l").unwrap();
        for _ in 0..3 {
            assert_told(
                &client.ready().await.unwrap_err(),
                StoreErrorKind::Unavailable,
                true,
                "",
            );
            assert_told(
                &lock.try_lock().await.unwrap_err(),
                StoreErrorKind::Unavailable,
                true,
                "",
            );
            assert_told(
                &lock.is_locked().await.unwrap_err(),
                StoreErrorKind::Unavailable,
                true,
                "",
            );
        }
        let both = client
            .multi_lock(["a", "b"].map(|name| client.reentrant_lock(name).unwrap()))
            .unwrap();
        let waits = [lock, both].map(|lock| tokio::spawn(async move { lock.lock().await }));
        // By the time both calls have failed, each waiter has tried and failed.
        client.ready().await.unwrap_err();
        client.ready().await.unwrap_err();
        assert!(waits.iter().all(|wait| !wait.is_finished()));
        server.restart();
        for wait in waits {
            wait.await.unwrap().unwrap().unlock().await.unwrap();
        }
        client.ready().await.unwrap();
        server.kill();
        client.ready().await.unwrap_err();
    }
}

#[tokio::test]
async fn a_bounded_wait_for_the_first_connection_is_bounded() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    proxy.black_hole(Way::Both);
    let client = lazy(&proxy.url());
    let lock = client.mutex("l").unwrap();
    for wait in [ms(0), ms(300)] {
        let began = Instant::now();
        let error = lock.try_lock_for(wait).await.unwrap_err();
        assert_told(&error, StoreErrorKind::Timeout, true, "");
        // A zero wait is a single try, which still gets the timeout of one request.
        assert!(
            began.elapsed() < ms(4_000),
            "{wait:?} took {:?}",
            began.elapsed()
        );
    }
    proxy.heal();
    proxy.cut();
    lock.lock().await.unwrap().unlock().await.unwrap();
}

/// A permanent connect error, such as a wrong password, ends a wait without a limit at once.
#[tokio::test]
async fn what_stays_wrong_ends_a_wait_at_once() {
    let server = Server::start_real();
    server.call(&["CONFIG", "SET", "requirepass", "secret"]);
    let client = lazy(&server.url());
    let lock = client.reentrant_lock("l").unwrap();
    let error = tokio::time::timeout(ms(10_000), lock.lock())
        .await
        .expect("it waits")
        .unwrap_err();
    assert_told(&error, StoreErrorKind::Auth, false, "");
    let nonsense = LockClient::connect_lazy("redis://127.0.0.1:70000").unwrap_err();
    assert!(
        matches!(nonsense, Error::InvalidConfig { .. }),
        "{nonsense:?}"
    );
}

/// Every operation connects if it is the first one.
#[tokio::test]
async fn each_verb_connects() {
    let server = Server::start();
    let other = server.client().await;
    let lock_of = |client: &LockClient| client.reentrant_lock("l").unwrap();
    let held = lock_of(&other).lock().await.unwrap();
    let owner = held.owner().clone();
    assert!(lock_of(&lazy(&server.url())).is_locked().await.unwrap());
    assert_eq!(
        lock_of(&lazy(&server.url()))
            .hold_count(&owner)
            .await
            .unwrap(),
        1
    );
    assert!(
        lock_of(&lazy(&server.url()))
            .inspect()
            .await
            .unwrap()
            .is_some()
    );
    assert!(
        lock_of(&lazy(&server.url()))
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    lock_of(&lazy(&server.url()))
        .extend(&owner, ms(60_000))
        .await
        .unwrap();
    let client = lazy(&server.url());
    let both = client
        .multi_lock([lock_of(&client), client.reentrant_lock("m").unwrap()])
        .unwrap();
    assert!(both.try_lock().await.unwrap().is_none());
    let client = lazy(&server.url());
    // The waiter learns of the release from a message, so it needs the subscription too.
    let waits = tokio::spawn({
        let lock = lock_of(&client);
        async move { lock.lock().await.unwrap().unlock().await }
    });
    eventually("it listens", || async { !server.channels().is_empty() }).await;
    held.unlock().await.unwrap();
    waits.await.unwrap().unwrap();
    let held = lock_of(&other).lock().await.unwrap();
    lock_of(&lazy(&server.url()))
        .release(&held.leave_to_lease())
        .await
        .unwrap();
    let _held = lock_of(&other).lock().await.unwrap();
    assert!(lock_of(&lazy(&server.url())).force_unlock().await.unwrap());
}

#[tokio::test]
async fn a_shutdown_before_the_first_use_ends_it() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = lazy(&proxy.url());
    let lock = client.mutex("l").unwrap();
    client.shutdown().await.unwrap();
    for error in [
        lock.lock().await.unwrap_err(),
        client.ready().await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::Closed), "{error:?}");
    }
    assert_eq!(proxy.connections(), 0);

    // The shutdown comes while the client connects.
    proxy.black_hole(Way::Both);
    let client = lazy(&proxy.url());
    let lock = client.mutex("l").unwrap();
    let waits = tokio::spawn(async move { lock.lock().await });
    eventually("it connects", || async { proxy.connections() > 0 }).await;
    client.shutdown().await.unwrap();
    let error = waits.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Closed), "{error:?}");
}

#[test]
fn a_static_client_needs_no_runtime_to_be_made() {
    static SERVER: LazyLock<Server> = LazyLock::new(Server::start);
    static LOCKS: LazyLock<LockClient> = LazyLock::new(|| lazy(&SERVER.url()));
    let _ = LOCKS.mutex("l").unwrap();
    // Each runtime ends before the next one starts.
    for _ in 0..2 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            LOCKS
                .mutex("l")
                .unwrap()
                .lock()
                .await
                .unwrap()
                .unlock()
                .await
                .unwrap();
        });
    }
}

#[tokio::test]
async fn a_cluster_is_found_at_the_first_use() {
    let cluster = SpawnedCluster::start(3, 0).unwrap();
    let client = lazy(&cluster.url());
    // The URL alone says that this is a cluster, so the two slots are rejected before connecting.
    let two_slots = client.signal_lock("s").unwrap_err();
    assert!(
        matches!(two_slots, Error::InvalidName { .. }),
        "{two_slots:?}"
    );
    let topology = client.topology();
    assert_eq!(
        (topology.kind, topology.nodes.len()),
        (TopologyKind::Cluster, 0)
    );
    let locks = (0..20).map(|n| client.reentrant_lock(format!("l{n}")).unwrap());
    let guards =
        join_all(locks.map(|lock| OwnerId::scope(async move { lock.lock().await.unwrap() }))).await;
    assert_eq!(client.topology().nodes.len(), 3);
    join_all(
        guards
            .into_iter()
            .map(|guard| async { guard.unlock().await.unwrap() }),
    )
    .await;
    client.ready().await.unwrap();
    client
        .signal_lock("{s}")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();

    let of_one = cluster.url().replace("redis-cluster://", "redis://");
    let of_one = lazy(of_one.split(',').next().unwrap());
    let error = of_one.mutex("l").unwrap().lock().await.unwrap_err();
    assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");
}

/// `ready` serves as a readiness probe: it fails while a master does not reply.
#[tokio::test]
async fn a_client_is_ready_when_each_master_replies() {
    let cluster = SpawnedCluster::start(3, 0).unwrap();
    let client = lazy(&cluster.url());
    client.ready().await.unwrap();
    let away = &cluster.nodes()[1];
    away.stop().unwrap();
    for _ in 0..2 {
        let began = Instant::now();
        assert_told(
            &client.ready().await.unwrap_err(),
            StoreErrorKind::Timeout,
            true,
            "",
        );
        assert!(began.elapsed() < ms(10_000), "{:?}", began.elapsed());
    }
    away.cont().unwrap();
    eventually("all of them are back", || async {
        client.ready().await.is_ok()
    })
    .await;
}
