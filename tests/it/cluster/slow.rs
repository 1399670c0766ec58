//! A master that is slow, or heard late, while a slot of its is on its way.

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

/// Two masters, of which the first is asked by way of a proxy, and the name of a lock of its.
async fn two() -> (Arc<SpawnedCluster>, Proxy, String) {
    let cluster = start(2, 0).await;
    let proxy = by_way_of_a_proxy(&cluster, 0).await;
    let name = name_at(&cluster, 0);
    (cluster, proxy, name)
}

fn url(proxy: &Proxy) -> String {
    format!("redis-cluster://{}", proxy.addr())
}

/// A client whose holds need a renewal every third of [`LEASE`].
async fn renews(proxy: &Proxy) -> LockClient {
    LockClient::builder().watchdog_timeout(LEASE).connect(url(proxy)).await.unwrap()
}

/// The lock goes, its slot stays on its way, and each answer of the old master takes 300 ms.
async fn becomes_slow(cluster: &Arc<SpawnedCluster>, proxy: &Proxy, name: &str) {
    begin_to_move(cluster, SpawnedCluster::slot_of(name), |_| true).await;
    proxy.rule(|_| Action::Late(Duration::from_millis(300)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_behind_ask_is_renewed_over_a_link_that_becomes_slow() {
    let (cluster, proxy, name) = two().await;
    let client = renews(&proxy).await;
    let guard = client.mutex(&name).unwrap().lock().await.unwrap();
    // they ask all the time: no PING goes over a link that is never silent
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

/// A renewal lets nobody in: it goes where it is sent also where that is said too late for others, and a hold outlives its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_behind_ask_is_renewed_over_a_link_that_is_too_slow_for_others() {
    let (cluster, proxy, name) = two().await;
    let client = renews(&proxy).await;
    let guard = client.mutex(&name).unwrap().lock().await.unwrap();
    begin_to_move(&cluster, SpawnedCluster::slot_of(&name), |_| true).await;
    proxy.rule(|_| Action::Late(Duration::from_millis(800)));
    tokio::time::sleep(2 * LEASE).await;
    assert!(!guard.is_lost());
}

/// Half of many holds of one slot have gone, and it stands still: no batch finds all of them at one end, and none is asked for one
/// after the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_holds_at_both_ends_are_renewed_over_a_slow_link() {
    let (cluster, proxy, name) = two().await;
    let client = renews(&proxy).await;
    let locks = (0..64).map(|n| client.mutex(format!("{{{name}}}{n}")).unwrap());
    let guards = join_all(locks.map(|lock| async move { lock.lock().await.unwrap() })).await;
    begin_to_move(&cluster, SpawnedCluster::slot_of(&name), |key| key.ends_with(['0', '2', '4', '6', '8'])).await;
    proxy.rule(|_| Action::Late(Duration::from_millis(240)));
    tokio::time::sleep(2 * LEASE).await;
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0, "of {}", guards.len());
}

/// Refused again and again, it is not asked once more where the answer would come when its time is over, or in its last tenth: a busy
/// machine is not to be taken for a slow master.
#[tokio::test]
async fn what_a_slow_master_only_refuses_is_never_unconfirmed() {
    let (cluster, proxy, name) = two().await;
    let limit = Duration::from_secs(9);
    let connect = || LockClient::builder().watchdog_timeout(3 * limit).command_timeout(limit).connect(url(&proxy));
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    let held = a.fenced_lock(&name).unwrap().lock().await.unwrap();
    let record = name.clone();
    begin_to_move(&cluster, SpawnedCluster::slot_of(&name), move |key| key == record).await;
    for late in [2_500, 3_100].map(Duration::from_millis) {
        proxy.rule(move |_| Action::Late(late));
        let error = b.fenced_lock(&name).unwrap().try_lock().await.unwrap_err();
        let is_refused = matches!(&error, Error::Store { source, .. } if !source.may_have_executed());
        assert!(is_refused && error.is_transient(), "{late:?}: {error:?}");
    }
    drop(held);
}

/// It may be refused, as no time is left.
async fn tries(lock: Lock) -> Option<LockGuard> {
    lock.try_lock().await.unwrap_or_else(|error| {
        assert!(matches!(&error, Error::Store { source, .. } if source.kind() == StoreErrorKind::Moved), "{error:?}");
        None
    })
}

/// Whoever blocks its runtime hears of a redirect late, and takes the way for slow. Meanwhile the slot goes, comes back, is taken,
/// and goes once more: what the old master said then is not followed, whatever answers took before.
#[tokio::test]
async fn a_runtime_that_is_blocked_follows_no_redirect_of_a_second_ago() {
    const BLOCK: Duration = Duration::from_secs(1);
    for is_busy_before in [false, true] {
        let cluster = start(2, 0).await;
        let name = name_at(&cluster, 0);
        let [lock, theirs] = [client(&cluster).await, client(&cluster).await].map(|a| a.mutex(&name).unwrap());
        let slot = SpawnedCluster::slot_of(&name).to_string();
        let ids = [0, 1].map(|n| ask(&cluster.nodes()[n], &["CLUSTER", "MYID"]).text().to_owned());
        let set = |node: usize, words: &[&str]| {
            let said = ask(&cluster.nodes()[node], &[&["CLUSTER", "SETSLOT", &slot][..], words].concat());
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
        // there is a connection to the new one
        lock.try_lock().await.unwrap().unwrap().unlock().await.unwrap();
        let mut rounds = 0;
        while rounds < 7 {
            let old = &cluster.nodes()[0];
            let said = errors(old, "ASK");
            // it says so when nobody polls whoever asked any more
            old.stop().unwrap();
            let tries = tokio::spawn(tries(lock.clone()));
            tokio::task::yield_now().await;
            old.cont().unwrap();
            let asked = Instant::now();
            while errors(old, "ASK") == said && asked.elapsed() < BLOCK {
                std::thread::sleep(Duration::from_millis(5));
            }
            if errors(old, "ASK") == said {
                // by a map of when the slot was there, the new one was asked
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
            assert_eq!(at_old(&["HSET", &name, "4b63a5c2-7b0e-4d0f-9c0e-6f5a2f1d3c11:1", "1"]), 1);
            assert_eq!(at_old(&["PEXPIRE", &name, "60000"]), 1);
            goes();
            std::thread::sleep(BLOCK);
            assert!(tries.await.unwrap().is_none(), "a second holder in round {rounds}");
            assert_eq!(at_old(&["DEL", &name]), 1);
        }
    }
}
