//! A master that becomes slow while all that is asked of it is sent elsewhere, as its slot is on its way: what it refuses tells
//! how slow it is, so that redirects are followed.

use std::{sync::Arc, time::Duration};

use nestlock::LockClient;
use nestlock_embedded::SpawnedCluster;

use super::{begin_to_move, by_way_of_a_proxy, name_at, start};
use crate::support::proxy::{Action, Proxy};

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

/// The lock goes, its slot stays on its way, and each answer of the old master takes 300 ms.
async fn becomes_slow(cluster: &Arc<SpawnedCluster>, proxy: &Proxy, name: &str) {
    begin_to_move(cluster, SpawnedCluster::slot_of(name), |_| true).await;
    proxy.rule(|_| Action::Late(Duration::from_millis(300)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_behind_ask_is_renewed_over_a_link_that_becomes_slow() {
    let (cluster, proxy, name) = two().await;
    let lease = Duration::from_secs(6);
    let client = LockClient::builder().watchdog_timeout(lease).connect(url(&proxy)).await.unwrap();
    let guard = client.mutex(&name).unwrap().lock().await.unwrap();
    // they ask all the time: no PING goes over a link that is never silent
    let waiting = [(); 4].map(|()| {
        let lock = client.spin_lock(&name).unwrap();
        tokio::spawn(async move { lock.lock().await?.unlock().await })
    });
    becomes_slow(&cluster, &proxy, &name).await;
    tokio::time::sleep(2 * lease).await;
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
