//! The reentrant lock.

use nestlock::RLock;

use crate::support::Server;

#[tokio::test]
async fn two_clients_exclude_each_other() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (a.reentrant_lock("l").unwrap(), b.reentrant_lock("l").unwrap());
    let guard = la.lock().await.unwrap();
    assert!(lb.try_lock().await.unwrap().is_none());
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap().unlock().await.unwrap() });
    crate::support::eventually("a waiter", || async { !server.channels().is_empty() }).await;
    guard.unlock().await.unwrap();
    waiter.await.unwrap();
    assert!(!server.exists("l"));
}
