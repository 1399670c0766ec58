//! Non-reentrant locks: the owner who asks again is told at once, and nothing is sent.

use std::time::{Duration, Instant};

use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, Result};

use crate::{
    contract::contract_suite,
    support::{Server, history::History},
};

contract_suite! { mod contract, door = |client, name| client.non_reentrant_lock(name).unwrap(), reentrant = false }

/// Every way to wait for it.
async fn all_ways(lock: &Lock) -> Vec<Result<Option<LockGuard>>> {
    let forever = Duration::MAX;
    vec![
        lock.lock().await.map(Some),
        lock.try_lock_for(Duration::from_secs(3600)).await,
        lock.try_lock_for(forever).await,
        lock.lock_with(AcquireOptions::new().lease(Duration::from_secs(60))).await.map(Some),
    ]
}

fn doors(client: &LockClient) -> [Lock; 2] {
    [client.non_reentrant_lock("l").unwrap(), client.non_reentrant_fair_lock("f").unwrap()]
}

#[tokio::test]
async fn the_owner_who_asks_again_is_refused_at_once_and_without_a_request() {
    let server = Server::start();
    let client = server.client().await;
    for lock in doors(&client) {
        let guard = lock.lock().await.unwrap();
        let (before, requests, start) = (server.dump(), server.script_count(), Instant::now());
        for refused in all_ways(&lock).await {
            let Err(Error::NotReentrant { lock: name, owner, .. }) = &refused else { panic!("{refused:?}") };
            assert_eq!((&**name, owner), (lock.name(), &guard.owner()));
        }
        assert!(start.elapsed() < Duration::from_secs(5), "it waited: {:?}", start.elapsed());
        assert_eq!(server.script_count(), requests, "nothing is sent");
        assert_eq!(server.dump(), before);
        assert_eq!(server.channels(), [] as [&str; 0]);
        assert_eq!(lock.hold_count(&guard.owner()).await.unwrap(), 1);
        assert!(!guard.is_lost());
        guard.unlock().await.unwrap();
        // and afterwards it is like any other
        lock.try_lock().await.unwrap().expect("free").unlock().await.unwrap();
    }
}

#[tokio::test]
async fn other_owners_wait_for_a_non_reentrant_lock_as_for_any() {
    let server = Server::start();
    let client = server.client().await;
    for lock in doors(&client) {
        let guard = lock.lock().await.unwrap();
        let other = || AcquireOptions::new().owner(client.owner("other").unwrap());
        assert!(lock.try_lock_with(other()).await.unwrap().is_none(), "busy, not refused");
        let waiter = {
            let (lock, options) = (lock.clone(), other());
            tokio::spawn(async move { lock.lock_with(options).await })
        };
        crate::support::eventually("a waiter", || async { !server.channels().is_empty() }).await;
        assert!(matches!(lock.lock().await, Err(Error::NotReentrant { .. })));
        guard.unlock().await.unwrap();
        let next = waiter.await.unwrap().expect("its turn");
        assert!(matches!(lock.lock_with(other()).await, Err(Error::NotReentrant { .. })));
        assert!(lock.try_lock_with(other()).await.unwrap().is_none(), "a try does not wait: it is busy");
        assert!(lock.try_lock().await.unwrap().is_none(), "the first owner is another one now");
        next.unlock().await.unwrap();
        crate::support::eventually("nobody listens", || async { server.channels().is_empty() }).await;
    }
}

/// The record is one: the door decides whether its owner may enter again.
#[tokio::test]
async fn a_hold_through_another_door_counts() {
    let server = Server::start();
    let client = server.client().await;
    let (once, again) = (client.non_reentrant_lock("l").unwrap(), client.reentrant_lock("l").unwrap());
    let outer = again.lock().await.unwrap();
    for refused in all_ways(&once).await {
        assert!(matches!(refused, Err(Error::NotReentrant { .. })), "{refused:?}");
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
    let guard = lock.try_lock_with(AcquireOptions::new().lease(Duration::from_millis(50))).await.unwrap().unwrap();
    tokio::time::timeout(Duration::from_secs(15), guard.lost()).await.expect("it ends");
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    let next = lock.lock().await.unwrap();
    assert_eq!(lock.hold_count(&next.owner()).await.unwrap(), 1);
    next.unlock().await.unwrap();
}

/// Four processes with eight tasks each; see `support::history`.
#[test]
fn no_two_of_thirty_two_tasks_in_four_processes_ever_hold_a_non_reentrant_lock_at_once() {
    let server = Server::start_real();
    for leases in [false, true] {
        History::play(&server, "non-reentrant", 3, 30, leases).assert_no_clashes();
    }
}
