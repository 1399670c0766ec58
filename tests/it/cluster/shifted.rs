//! Replies that arrive for the wrong request, as in `crate::shifted`, where scripts are never
//! bundled.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use nestlock::Error;
use nestlock_embedded::SpawnedCluster;

use super::{begin_to_move, by_way_of_a_proxy, client, name_at, start, there};
use crate::{
    shifted::{LIES, builder, now_and_then, theirs, work, works_again},
    support::proxy::{Action, Proxy},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_reply_that_strays_in_a_cluster_gives_no_lock_to_two() {
    let cluster = start(2, 0).await;
    let proxy = by_way_of_a_proxy(&cluster, 0).await;
    let direct = client(&cluster).await;
    let tag = name_at(&cluster, 0);
    let name = move |name: String| format!("{{{tag}}}{name}");
    let _held = theirs(&direct, &name).await;
    for lie in LIES {
        let client = builder(true)
            .connect(format!("redis-cluster://{}", proxy.addr()))
            .await
            .unwrap();
        works_again(&client, name("warm".into())).await;
        proxy.rule(now_and_then(lie));
        assert!(
            work(&client, &name, Duration::from_secs(2)).await > 0,
            "{lie:?}: the client acquires nothing"
        );
        proxy.pass();
        works_again(&client, name("warm".into())).await;
    }
}

/// Applies `action` to the first script with this key.
fn once(proxy: &Proxy, key: &str, action: Action) {
    let (key, is_first) = (key.to_owned(), AtomicBool::new(true));
    proxy.rule(move |request| {
        let is_it = request.is_script() && request.keys().contains(&key);
        if is_it && is_first.swap(false, Ordering::Relaxed) {
            action
        } else {
            Action::Pass
        }
    });
}

/// The ASK for a free lock must not count as the reply about a held one of its slot: the importing
/// node would grant that lock.
#[tokio::test]
async fn an_ask_that_strays_gives_no_lock_to_two() {
    for lie in LIES {
        let cluster = start(2, 0).await;
        let proxy = by_way_of_a_proxy(&cluster, 0).await;
        let tag = name_at(&cluster, 0);
        let (held, free) = (format!("{{{tag}}}held"), format!("{{{tag}}}free"));
        let guard = client(&cluster)
            .await
            .mutex(&held)
            .unwrap()
            .lock()
            .await
            .unwrap();
        let client = builder(true)
            .connect(format!("redis-cluster://{}", proxy.addr()))
            .await
            .unwrap();
        let (busy, other) = (client.mutex(&held).unwrap(), client.mutex(&free).unwrap());
        assert!(busy.try_lock().await.unwrap().is_none());
        begin_to_move(&cluster, SpawnedCluster::slot_of(&tag), |_| false).await;
        // opens a link to the other node
        other
            .try_lock()
            .await
            .unwrap()
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let got = if lie == Action::Double {
            once(&proxy, &free, lie);
            tokio::join!(other.try_lock(), busy.try_lock()).1
        } else {
            once(&proxy, &held, lie);
            tokio::join!(busy.try_lock(), other.try_lock()).0
        };
        assert!(!guard.is_lost());
        assert!(
            !matches!(got, Ok(Some(_))),
            "{lie:?}: a lock was given to two"
        );
    }
}

/// A release that was executed is not sent again because of another request's MOVED: it would find
/// that it held nothing.
#[tokio::test]
async fn a_moved_that_strays_has_no_release_sent_twice() {
    for lie in LIES {
        let cluster = start(2, 0).await;
        let proxy = by_way_of_a_proxy(&cluster, 0).await;
        let held = name_at(&cluster, 0);
        let client = builder(true)
            .connect(format!("redis-cluster://{}", proxy.addr()))
            .await
            .unwrap();
        let slot = |name: &str| SpawnedCluster::slot_of(name);
        let is_other = |name: &String| {
            slot(name) != slot(&held)
                && cluster.master_of(slot(name)).unwrap().addr() == cluster.nodes()[0].addr()
        };
        let moved = (0..9_999)
            .map(|n| format!("other{n}"))
            .find(is_other)
            .unwrap();
        let guard = client.mutex(&held).unwrap().lock().await.unwrap();
        client
            .mutex(&moved)
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let goes = slot(&moved);
        there(&cluster, move |cluster| {
            cluster.migrate(goes, &cluster.nodes()[1]).unwrap();
        })
        .await;
        let other = client.mutex(&moved).unwrap();
        let told = if lie == Action::Double {
            once(&proxy, &moved, lie);
            tokio::join!(other.try_lock(), guard.unlock()).1
        } else {
            once(&proxy, &held, lie);
            tokio::join!(guard.unlock(), other.try_lock()).0
        };
        assert!(
            !matches!(told, Err(Error::NotHeld { .. } | Error::Lost { .. })),
            "{lie:?}: {told:?}"
        );
    }
}
