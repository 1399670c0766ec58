//! Non-reentrant locks: a second acquire by the owner is refused at once, and nothing is sent.

use std::time::{Duration, Instant};

use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, Result};

use crate::{
    contract::contract_suite,
    support::{Server, history::History},
};

contract_suite! { mod contract, door = |client, name| client.non_reentrant_lock(name).unwrap(), reentrant = false }

/// Acquires the lock in every way that waits.
async fn all_ways(lock: &Lock) -> Vec<Result<Option<LockGuard>>> {
    let forever = Duration::MAX;
    vec![
        lock.lock().await.map(Some),
        lock.try_lock_for(Duration::from_secs(3600)).await,
        lock.try_lock_for(forever).await,
        lock.lock_with(AcquireOptions::new().lease(Duration::from_secs(60)))
            .await
            .map(Some),
    ]
}

fn doors(client: &LockClient) -> [Lock; 2] {
    [
        client.non_reentrant_lock("l").unwrap(),
        client.non_reentrant_fair_lock("f").unwrap(),
    ]
}

/// An owner that asks again for a non-reentrant lock is refused at once and without a request.
#[tokio::test]
async fn a_non_reentrant_lock_refuses_its_owner_without_a_request() {
    let server = Server::start();
    let client = server.client().await;
    for lock in doors(&client) {
        let guard = lock.lock().await.unwrap();
        let (before, requests, start) = (server.dump(), server.script_count(), Instant::now());
        for refused in all_ways(&lock).await {
            let Err(Error::NotReentrant {
                lock: name, owner, ..
            }) = &refused
            else {
                panic!("{refused:?}")
            };
            assert_eq!((&**name, owner), (lock.name(), &guard.owner()));
        }
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "it waited: {:?}",
            start.elapsed()
        );
        assert_eq!(server.script_count(), requests, "nothing is sent");
        assert_eq!(server.dump(), before);
        assert_eq!(server.channels(), [] as [&str; 0]);
        assert_eq!(lock.hold_count(&guard.owner()).await.unwrap(), 1);
        assert!(!guard.is_lost());
        guard.unlock().await.unwrap();
        // After the release, the owner gets the lock again.
        lock.try_lock()
            .await
            .unwrap()
            .expect("free")
            .unlock()
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn other_owners_wait_for_a_non_reentrant_lock_as_for_any() {
    let server = Server::start();
    let client = server.client().await;
    for lock in doors(&client) {
        let guard = lock.lock().await.unwrap();
        let other = || AcquireOptions::new().owner(client.owner("other").unwrap());
        assert!(
            lock.try_lock_with(other()).await.unwrap().is_none(),
            "busy, not refused"
        );
        let waiter = {
            let (lock, options) = (lock.clone(), other());
            tokio::spawn(async move { lock.lock_with(options).await })
        };
        crate::support::eventually("a waiter", || async { !server.channels().is_empty() }).await;
        assert!(matches!(lock.lock().await, Err(Error::NotReentrant { .. })));
        guard.unlock().await.unwrap();
        let next = waiter.await.unwrap().expect("its turn");
        assert!(matches!(
            lock.lock_with(other()).await,
            Err(Error::NotReentrant { .. })
        ));
        assert!(
            lock.try_lock_with(other()).await.unwrap().is_none(),
            "a try does not wait: it is busy"
        );
        assert!(
            lock.try_lock().await.unwrap().is_none(),
            "the first owner is another one now"
        );
        next.unlock().await.unwrap();
        crate::support::eventually("no client is subscribed", || async {
            server.channels().is_empty()
        })
        .await;
    }
}

/// There is one record. The constructor decides whether its owner may re-enter.
#[tokio::test]
async fn a_hold_through_another_door_counts() {
    let server = Server::start();
    let client = server.client().await;
    let (once, again) = (
        client.non_reentrant_lock("l").unwrap(),
        client.reentrant_lock("l").unwrap(),
    );
    let outer = again.lock().await.unwrap();
    for refused in all_ways(&once).await {
        assert!(
            matches!(refused, Err(Error::NotReentrant { .. })),
            "{refused:?}"
        );
    }
    outer.unlock().await.unwrap();
    let outer = once.lock().await.unwrap();
    let inner = again.lock().await.unwrap();
    assert_eq!(once.hold_count(&outer.owner()).await.unwrap(), 2);
    assert!(matches!(once.lock().await, Err(Error::NotReentrant { .. })));
    inner.unlock().await.unwrap();
    outer.unlock().await.unwrap();
    assert!(server.dump().is_empty());
}

#[tokio::test]
async fn a_lost_hold_does_not_count_as_held() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.non_reentrant_lock("l").unwrap();
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(Duration::from_millis(50)))
        .await
        .unwrap()
        .unwrap();
    tokio::time::timeout(Duration::from_secs(15), guard.lost())
        .await
        .expect("it ends");
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    let next = lock.lock().await.unwrap();
    assert_eq!(lock.hold_count(&next.owner()).await.unwrap(), 1);
    next.unlock().await.unwrap();
}

/// Runs four processes with eight tasks each; see `support::history`.
#[test]
fn a_non_reentrant_lock_admits_one_of_32_tasks_at_a_time() {
    let server = Server::start_real();
    for leases in [false, true] {
        History::play(&server, "non-reentrant", 3, 30, leases).assert_no_clashes();
    }
}
