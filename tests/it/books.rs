//! Nested holds of one owner: their settings, losses and tokens.

use std::time::Duration;

use nestlock::{AcquireOptions, Error, LockClient, LockGuard, LossReason, RLock};

use crate::support::{Server, eventually};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn client(server: &Server, watchdog: u64) -> LockClient {
    server
        .client_with(|builder| builder.watchdog_timeout(ms(watchdog)))
        .await
}

async fn leased(lock: &impl RLock, lease: u64) -> LockGuard {
    lock.try_lock_with(AcquireOptions::new().lease(ms(lease)))
        .await
        .unwrap()
        .unwrap()
}

/// While a guard of a lost hold is alive, its owner cannot re-enter the lock, whether or not the
/// watchdog has checked the hold.
#[tokio::test]
async fn a_lost_outer_guard_refuses_an_inner_lock_while_it_lives() {
    let server = Server::start();
    let (a, b) = (client(&server, 600).await, server.client().await);
    for lost_by in ["its lease", "force"] {
        let (here, there) = (
            a.reentrant_lock("l").unwrap(),
            b.reentrant_lock("l").unwrap(),
        );
        let outer = if lost_by == "force" {
            here.lock().await.unwrap()
        } else {
            leased(&here, 200).await
        };
        if lost_by == "force" {
            there.force_unlock().await.unwrap();
        }
        outer.lost().await;
        // Another owner has held the lock since.
        there.lock().await.unwrap().unlock().await.unwrap();
        for _ in 0..3 {
            let inner = here.lock().await;
            assert!(
                matches!(inner, Err(Error::Lost { .. })),
                "{lost_by}: {inner:?}"
            );
            let inner = here.try_lock_for(ms(100)).await;
            assert!(
                matches!(inner, Err(Error::Lost { .. })),
                "{lost_by}: {inner:?}"
            );
            tokio::time::sleep(ms(100)).await;
        }
        let said = outer.unlock().await;
        assert!(
            matches!(said, Err(Error::Lost { .. })),
            "{lost_by}: {said:?}"
        );
        // The owner has left the lost section, so this hold is a new one.
        here.lock().await.unwrap().unlock().await.unwrap();
    }
}

/// Both guards of a lost hold are notified, and both keep their owner out while they live.
#[tokio::test]
async fn both_guards_of_a_lost_hold_are_notified_and_bar_their_owner() {
    let server = Server::start();
    let client = client(&server, 600).await;
    let lock = client.reentrant_lock("l").unwrap();
    let (outer, inner) = (leased(&lock, 150).await, leased(&lock, 150).await);
    outer.lost().await;
    drop(inner);
    assert!(
        matches!(lock.try_lock().await, Err(Error::Lost { .. })),
        "one guard is left"
    );
    assert!(matches!(
        outer.unlock().await,
        Err(Error::Lost {
            reason: LossReason::LeaseExpired,
            ..
        })
    ));
    lock.try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    eventually("the client has forgotten it", || async {
        client.stats().holds == 0
    })
    .await;
}

/// The lease ends while a nested request is in flight. That request must not begin a hold inside
/// the lost one.
#[tokio::test]
async fn a_lease_that_ends_during_a_nested_acquire_is_a_loss_for_both() {
    use crate::support::proxy::{Action, Proxy, Verb};
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let outer = leased(&lock, 300).await;
    proxy.once(Verb::Acquire, Action::Late(ms(600)));
    let inner = lock.lock().await;
    assert!(matches!(inner, Err(Error::Lost { .. })), "{inner:?}");
    assert!(matches!(
        outer.unlock().await,
        Err(Error::Lost {
            reason: LossReason::LeaseExpired,
            ..
        })
    ));
    client.idle().await;
    assert_eq!(server.dump(), []);
}

/// The maximum hold time of the inner hold does not limit the outer hold, whose record it shares.
#[tokio::test]
async fn an_inner_holds_maximum_hold_time_is_not_the_outer_ones() {
    let server = Server::start();
    let client = client(&server, 450).await;
    let lock = client.reentrant_lock("l").unwrap();
    let outer = lock.lock().await.unwrap();
    let inner = lock
        .try_lock_with(AcquireOptions::new().max_hold(ms(600)))
        .await
        .unwrap()
        .unwrap();
    tokio::time::sleep(ms(1500)).await;
    assert!(
        !inner.is_lost(),
        "its record is the outer one's, which is renewed"
    );
    inner.unlock().await.unwrap();
    tokio::time::sleep(ms(1000)).await;
    assert!(
        !outer.is_lost(),
        "renewed until released, but lost: {:?}",
        outer.unlock().await
    );
}

#[tokio::test]
async fn an_outer_holds_maximum_hold_time_survives_a_nested_hold() {
    let server = Server::start();
    let client = client(&server, 300).await;
    let lock = client.reentrant_lock("l").unwrap();
    let outer = lock
        .try_lock_with(AcquireOptions::new().max_hold(ms(500)))
        .await
        .unwrap()
        .unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let lost = tokio::time::timeout(Duration::from_secs(10), outer.lost()).await;
    assert!(
        matches!(
            lost,
            Ok(Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            })
        ),
        "{lost:?}"
    );
}

/// The record of the outer hold never has less than the TTL that the outer hold requested.
#[tokio::test]
async fn an_inner_holds_short_ttl_ends_with_it() {
    let server = Server::start();
    let client = client(&server, 3000).await;
    let lock = client.reentrant_lock("l").unwrap();
    let outer = lock.lock().await.unwrap();
    let short = AcquireOptions::new().watchdog_timeout(ms(100));
    let inner = lock.try_lock_with(short).await.unwrap().unwrap();
    let start = std::time::Instant::now();
    let mut renewals = Vec::new();
    while start.elapsed() < ms(2500) {
        assert!(
            server.pttl("l") > 1500,
            "a renewal has shortened the TTL to {}",
            server.pttl("l")
        );
        renewals.push(server.script_count());
        tokio::time::sleep(ms(20)).await;
    }
    let often = renewals.last().unwrap() - renewals[0];
    assert!(
        often >= 10,
        "the inner hold asked for a renewal every 33 ms: {often}"
    );
    inner.unlock().await.unwrap();
    let before = server.script_count();
    tokio::time::sleep(ms(2500)).await;
    let seldom = server.script_count() - before;
    assert!(
        seldom <= 4,
        "the outer hold asked for one a second: {seldom} in 2.5 s"
    );
    assert!(!outer.is_lost() && outer.remaining() > ms(1000));
}

/// A renewal does not shorten an extension that is longer than the watchdog timeout.
#[tokio::test]
async fn an_extension_reaches_further_than_the_watch() {
    let server = Server::start();
    let client = client(&server, 450).await;
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    guard.extend(Duration::from_secs(60)).await.unwrap();
    tokio::time::sleep(ms(1000)).await;
    assert!(guard.remaining() > Duration::from_secs(55) && server.pttl("l") > 55_000);
}
