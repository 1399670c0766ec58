//! A master that is slow, or whose replies arrive late, while one of its slots migrates.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{Error, Lock, LockClient, LockGuard, StoreErrorKind};
use nestlock_embedded::SpawnedCluster;

use super::{ask, begin_to_move, by_way_of_a_proxy, client, errors, name_at, start};
use crate::support::proxy::{Action, Proxy};

const LEASE: Duration = Duration::from_secs(6);

/// Starts two masters, the first behind a proxy, and returns the name of a lock at the first.
async fn two() -> (Arc<SpawnedCluster>, Proxy, String) {
    let cluster = start(2, 0).await;
    let proxy = by_way_of_a_proxy(&cluster, 0).await;
    let name = name_at(&cluster, 0);
    (cluster, proxy, name)
}

fn url(proxy: &Proxy) -> String {
    format!("redis-cluster://{}", proxy.addr())
}

/// Connects a client whose holds need a renewal every third of [`LEASE`].
async fn renews(proxy: &Proxy) -> LockClient {
    LockClient::builder()
        .watchdog_timeout(LEASE)
        .connect(url(proxy))
        .await
        .unwrap()
}

/// Moves the lock, keeps its slot migrating, and delays each reply of the old master by 300 ms.
async fn becomes_slow(cluster: &Arc<SpawnedCluster>, proxy: &Proxy, name: &str) {
    begin_to_move(cluster, SpawnedCluster::slot_of(name), |_| true).await;
    proxy.rule(|_| Action::Late(Duration::from_millis(300)));
}

/// A hold behind an ASK redirect is renewed over a link that becomes slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_behind_ask_is_renewed_over_a_link_that_becomes_slow() {
    let (cluster, proxy, name) = two().await;
    let client = renews(&proxy).await;
    let guard = client.mutex(&name).unwrap().lock().await.unwrap();
    // they send all the time: no PING is sent on a link that is never idle
    let waiting = [(); 4].map(|()| {
        let lock = client.spin_lock(&name).unwrap();
        tokio::spawn(async move { lock.lock().await?.unlock().await })
    });
    becomes_slow(&cluster, &proxy, &name).await;
    tokio::time::sleep(2 * LEASE).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    for waits in waiting {
        waits.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_release_behind_ask_is_done_over_a_link_that_becomes_slow() {
    let (cluster, proxy, name) = two().await;
    let client = LockClient::connect(url(&proxy)).await.unwrap();
    let guard = client.mutex(&name).unwrap().lock().await.unwrap();
    becomes_slow(&cluster, &proxy, &name).await;
    guard.unlock().await.unwrap();
}

/// A renewal grants nothing, so it follows even a redirect that arrives too late for other
/// requests, and the hold outlives its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_behind_ask_is_renewed_over_a_link_too_slow_for_others() {
    let (cluster, proxy, name) = two().await;
    let client = renews(&proxy).await;
    let guard = client.mutex(&name).unwrap().lock().await.unwrap();
    begin_to_move(&cluster, SpawnedCluster::slot_of(&name), |_| true).await;
    proxy.rule(|_| Action::Late(Duration::from_millis(800)));
    tokio::time::sleep(2 * LEASE).await;
    assert!(!guard.is_lost());
}

/// Half of many holds of one slot have moved, and the migration stalls: no batch finds all of them
/// at one master, and the client does not send one request per hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_holds_at_both_ends_are_renewed_over_a_slow_link() {
    let (cluster, proxy, name) = two().await;
    let client = renews(&proxy).await;
    let locks = (0..64).map(|n| client.mutex(format!("{{{name}}}{n}")).unwrap());
    let guards = join_all(locks.map(|lock| async move { lock.lock().await.unwrap() })).await;
    begin_to_move(&cluster, SpawnedCluster::slot_of(&name), |key| {
        key.ends_with(['0', '2', '4', '6', '8'])
    })
    .await;
    proxy.rule(|_| Action::Late(Duration::from_millis(240)));
    tokio::time::sleep(2 * LEASE).await;
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0, "of {}", guards.len());
}

/// After repeated refusals, a request is not sent again if its reply would arrive after the
/// timeout, or in its last tenth. The timeout is long, so that a busy machine is not taken for a
/// slow master.
#[tokio::test]
async fn what_a_slow_master_only_refuses_is_never_unconfirmed() {
    let (cluster, proxy, name) = two().await;
    let limit = Duration::from_secs(9);
    let connect = || {
        LockClient::builder()
            .watchdog_timeout(3 * limit)
            .command_timeout(limit)
            .connect(url(&proxy))
    };
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    let held = a.fenced_lock(&name).unwrap().lock().await.unwrap();
    let record = name.clone();
    begin_to_move(&cluster, SpawnedCluster::slot_of(&name), move |key| {
        key == record
    })
    .await;
    for late in [2_500, 3_100].map(Duration::from_millis) {
        proxy.rule(move |_| Action::Late(late));
        let error = b.fenced_lock(&name).unwrap().try_lock().await.unwrap_err();
        let is_refused =
            matches!(&error, Error::Store { source, .. } if !source.may_have_executed());
        assert!(is_refused && error.is_transient(), "{late:?}: {error:?}");
    }
    drop(held);
}

/// Tries the lock; accepts a refusal, as there may be no time left for a retry.
async fn tries(lock: Lock) -> Option<LockGuard> {
    lock.try_lock().await.unwrap_or_else(|error| {
        assert!(
            matches!(&error, Error::Store { source, .. } if source.kind() == StoreErrorKind::Moved),
            "{error:?}"
        );
        None
    })
}

/// A client on a blocked runtime sees a redirect late, as on a slow link. By then the slot has
/// moved, come back, been locked, and started to move again: the old redirect must not be followed,
/// however long earlier replies took.
#[tokio::test]
async fn a_blocked_runtime_follows_no_redirect_from_a_second_ago() {
    const BLOCK: Duration = Duration::from_secs(1);
    for is_busy_before in [false, true] {
        let cluster = start(2, 0).await;
        let name = name_at(&cluster, 0);
        let [lock, theirs] =
            [client(&cluster).await, client(&cluster).await].map(|a| a.mutex(&name).unwrap());
        let slot = SpawnedCluster::slot_of(&name).to_string();
        let ids = [0, 1].map(|n| {
            ask(&cluster.nodes()[n], &["CLUSTER", "MYID"])
                .text()
                .to_owned()
        });
        let set = |node: usize, words: &[&str]| {
            let said = ask(
                &cluster.nodes()[node],
                &[&["CLUSTER", "SETSLOT", &slot][..], words].concat(),
            );
            assert!(!said.is_error(), "{said:?}");
        };
        let goes = || {
            set(1, &["IMPORTING", &ids[0]]);
            set(0, &["MIGRATING", &ids[1]]);
        };
        if is_busy_before {
            let held = theirs.lock().await.unwrap();
            for _ in 0..5 {
                let tries = tokio::spawn(tries(lock.clone()));
                tokio::task::yield_now().await;
                std::thread::sleep(BLOCK);
                assert!(tries.await.unwrap().is_none());
            }
            held.unlock().await.unwrap();
        }
        goes();
        // opens a connection to the new master
        lock.try_lock()
            .await
            .unwrap()
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let mut rounds = 0;
        while rounds < 7 {
            let old = &cluster.nodes()[0];
            let said = errors(old, "ASK");
            // the redirect arrives while the task that sent the request is not polled
            old.stop().unwrap();
            let tries = tokio::spawn(tries(lock.clone()));
            tokio::task::yield_now().await;
            old.cont().unwrap();
            let asked = Instant::now();
            while errors(old, "ASK") == said && asked.elapsed() < BLOCK {
                std::thread::sleep(Duration::from_millis(5));
            }
            if errors(old, "ASK") == said {
                // the request went to the new master, by a map from when the slot was there
                if let Some(guard) = tries.await.unwrap() {
                    guard.unlock().await.unwrap();
                }
                continue;
            }
            rounds += 1;
            for (node, words) in [
                (1, ["NODE", &ids[1]]),
                (0, ["NODE", &ids[1]]),
                (0, ["IMPORTING", &ids[1]]),
                (1, ["MIGRATING", &ids[0]]),
                (0, ["NODE", &ids[0]]),
                (1, ["NODE", &ids[0]]),
            ] {
                set(node, &words);
            }
            let at_old = |words: &[&str]| ask(&cluster.nodes()[0], words).int();
            assert_eq!(
                at_old(&["HSET", &name, "4b63a5c2-7b0e-4d0f-9c0e-6f5a2f1d3c11:1", "1"]),
                1
            );
            assert_eq!(at_old(&["PEXPIRE", &name, "60000"]), 1);
            goes();
            std::thread::sleep(BLOCK);
            assert!(
                tries.await.unwrap().is_none(),
                "a second holder in round {rounds}"
            );
            assert_eq!(at_old(&["DEL", &name]), 1);
        }
    }
}
