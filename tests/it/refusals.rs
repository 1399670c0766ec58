//! A server that says no for a while, and one that has forgotten everything.

use std::time::{Duration, Instant};

use nestlock::{Error, LossReason, SignalOptions, StoreErrorKind};

use crate::support::{Server, eventually};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn refuse_writes(server: &Server, refuse: bool) {
    server.call(&["CONFIG", "SET", "min-replicas-to-write", if refuse { "1" } else { "0" }]);
}

/// Releases that are refused for a second (NOREPLICAS; MISCONF is the same) go on in the background.
#[tokio::test]
async fn a_release_that_is_refused_is_repeated_until_the_record_ends() {
    let server = Server::start_real();
    let (a, b) = (server.client().await, server.client().await);
    let guard = a.reentrant_lock("unlocked").unwrap().lock().await.unwrap();
    let dropped = a.reentrant_lock("dropped").unwrap().lock().await.unwrap();
    let forever = a.signal_lock_with("forever", SignalOptions::new().without_expiry()).unwrap();
    let endless = forever.lock().await.unwrap();
    refuse_writes(&server, true);
    let said = guard.unlock().await;
    let refused = |source: &nestlock::StoreError| source.kind() == StoreErrorKind::NoReplicas;
    assert!(matches!(&said, Err(Error::Store { source, .. }) if refused(source)), "{said:?}");
    drop((dropped, endless));
    let idle = tokio::time::timeout(ms(1500), a.idle()).await;
    assert!(idle.is_err() && a.stats().settling >= 3, "nothing was released: {:?}", a.stats());
    refuse_writes(&server, false);
    let over = Instant::now();
    a.idle().await;
    for name in ["unlocked", "dropped"] {
        let lock = b.reentrant_lock(name).unwrap();
        lock.try_lock().await.unwrap().expect("released").unlock().await.unwrap();
    }
    assert!(!b.signal_lock("forever").unwrap().is_locked().await.unwrap());
    // the lease is 30 s
    assert!(over.elapsed() < Duration::from_secs(10), "{:?}", over.elapsed());
}

/// After a reconnect every hold is asked for at once: nobody has to wait for the next renewal, a third of the lease later.
#[tokio::test]
async fn a_restart_without_persistence_is_told_when_the_connection_is_back() {
    let server = Server::start_real();
    let client = server.client_with(|builder| builder.watchdog_timeout(Duration::from_secs(120))).await;
    let renewed = client.reentrant_lock("renewed").unwrap().lock().await.unwrap();
    let leased = nestlock::AcquireOptions::new().lease(Duration::from_secs(100));
    let leased = client.reentrant_lock("leased").unwrap().try_lock_with(leased).await.unwrap().unwrap();
    server.kill();
    server.restart();
    for guard in [&renewed, &leased] {
        let lost = tokio::time::timeout(Duration::from_secs(15), guard.lost()).await;
        assert!(matches!(lost, Ok(Error::Lost { reason: LossReason::RecordMissing, .. })), "{lost:?}");
    }
    drop((renewed, leased));
    eventually("nothing is known", || async { client.stats().holds == 0 }).await;
}

/// The same question changes nothing where the record is still there.
#[tokio::test]
async fn a_reconnect_leaves_holds_and_their_leases_as_they_are() {
    let server = Server::start();
    let proxy = crate::support::proxy::Proxy::start(&server);
    let client = nestlock::LockClient::connect(proxy.url()).await.unwrap();
    let leased = nestlock::AcquireOptions::new().lease(Duration::from_secs(50));
    let leased = client.reentrant_lock("leased").unwrap().try_lock_with(leased).await.unwrap().unwrap();
    let renewed = client.reentrant_lock("renewed").unwrap().lock().await.unwrap();
    let before = leased.remaining();
    for _ in 0..3 {
        proxy.cut();
        let lock = client.reentrant_lock("leased").unwrap();
        eventually("the connection is back", || async { lock.is_locked().await.is_ok() }).await;
    }
    eventually("it was asked for", || async { proxy.count(crate::support::proxy::Verb::Renew) >= 2 }).await;
    assert!(!leased.is_lost() && !renewed.is_lost());
    assert!(leased.remaining() <= before && server.pttl("leased") > 30_000 && server.pttl("leased") <= 50_000);
    leased.unlock().await.unwrap();
    renewed.unlock().await.unwrap();
}
