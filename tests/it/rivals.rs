//! The reentrant and the fair lock of one owner: they share a record, so a settlement for one kind
//! could end a hold of the other.

use std::{collections::BTreeMap, time::Duration};

use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, OwnerId};

use crate::{
    contract::nothing_is_left,
    support::{
        Pauses, Server,
        proxy::{Action, Proxy, Verb},
    },
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns both locks, the fair one first unless `swap` is set.
fn doors(client: &LockClient, name: &str, swap: bool) -> (Lock, Lock) {
    let (fair, reentrant) = (
        client.fair_lock(name).unwrap(),
        client.reentrant_lock(name).unwrap(),
    );
    if swap {
        (reentrant, fair)
    } else {
        (fair, reentrant)
    }
}

/// Asserts that no other client gets in next to the guard, once this client has settled everything.
async fn is_alone(client: &LockClient, theirs: &Lock, guard: LockGuard) {
    tokio::time::timeout(ms(5_000), client.idle())
        .await
        .expect("it settles");
    let stolen = theirs.try_lock().await.unwrap();
    assert!(stolen.is_none(), "two valid guards: {guard:?}, {stolen:?}");
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_kind_at_once_after_a_dropped_guard() {
    let server = Server::start();
    let (client, other) = (server.client().await, server.client().await);
    for round in 0..60 {
        let name = format!("l{round}");
        let (first, second) = doors(&client, &name, round % 2 == 1);
        OwnerId::scope(async {
            drop(first.lock().await.unwrap());
            let guard = if round % 4 < 2 {
                second.try_lock_for(ms(5_000)).await.unwrap()
            } else {
                // The release may be in flight.
                loop {
                    if let Some(guard) = second.try_lock().await.unwrap() {
                        break Some(guard);
                    }
                }
            };
            is_alone(
                &client,
                &other.reentrant_lock(&name).unwrap(),
                guard.expect("free"),
            )
            .await;
        })
        .await;
    }
    nothing_is_left(&server, &[&client, &other]).await;
}

/// The reply to the release is late or lost, or the release is refused for a while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_kind_while_a_release_is_in_doubt_or_refused() {
    let (server, pauses) = (Server::start(), Pauses::watch());
    for swap in [false, true] {
        for action in [
            Action::Lose,
            Action::Late(ms(300)),
            Action::CutBefore,
            Action::Refuse("LOADING not now"),
        ] {
            let proxy = Proxy::start(&server);
            let client = LockClient::builder()
                .command_timeout(ms(500))
                .connect(proxy.url())
                .await
                .unwrap();
            let other = server.client().await;
            let (first, second) = doors(&client, "l", swap);
            OwnerId::scope(async {
                // Loads the scripts.
                second.lock().await.unwrap().unlock().await.unwrap();
                first.lock().await.unwrap().unlock().await.unwrap();
                let guard = first.lock().await.unwrap();
                if matches!(action, Action::Refuse(_)) {
                    proxy.each(Verb::Release, action);
                    assert!(matches!(guard.unlock().await, Err(Error::Store { .. })));
                    // The server still records the first kind. A process that is held up at the end
                    // of the wait may not have read that reply.
                    for left in (0..5).rev() {
                        pauses.forget();
                        match second.try_lock_for(ms(1_000)).await {
                            Err(Error::Store { .. }) => break,
                            Err(Error::Unconfirmed { .. }) if pauses.was_held_up() && left > 0 => {}
                            refused => panic!("{refused:?}"),
                        }
                    }
                    proxy.pass();
                } else {
                    proxy.once(Verb::Release, action);
                    drop(guard);
                }
                let guard = second.try_lock_for(ms(5_000)).await.unwrap().expect("free");
                is_alone(&client, &other.reentrant_lock("l").unwrap(), guard).await;
            })
            .await;
            nothing_is_left(&server, &[&client, &other]).await;
        }
    }
}

/// Inside a lost hold, the owner cannot start again with the other kind: the drop of the lost guard
/// would end that hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_kind_inside_a_loss_is_lost() {
    let server = Server::start();
    let (client, other) = (server.client().await, server.client().await);
    for swap in [false, true] {
        let (first, second) = doors(&client, "l", swap);
        OwnerId::scope(async {
            let lost = first
                .lock_with(AcquireOptions::new().lease(ms(100)))
                .await
                .unwrap();
            tokio::time::sleep(ms(300)).await;
            assert!(lost.is_lost());
            let inside = second.try_lock_for(ms(1_000)).await;
            assert!(matches!(inside, Err(Error::Lost { .. })), "{inside:?}");
            drop(lost);
            let guard = second.try_lock_for(ms(5_000)).await.unwrap().expect("free");
            is_alone(&client, &other.reentrant_lock("l").unwrap(), guard).await;
        })
        .await;
    }
    nothing_is_left(&server, &[&client, &other]).await;
}

/// A waiter in the queue has an entry under its owner id. Giving up the entry would give up a
/// record of that id as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_kind_next_to_a_place_in_the_queue_is_refused() {
    let server = Server::start();
    let (client, other) = (
        server
            .client_with(|builder| builder.poll_cap(ms(300)))
            .await,
        server.client().await,
    );
    for round in 0..6 {
        let name = format!("l{round}");
        let (fair, reentrant) = doors(&client, &name, false);
        let theirs = other.reentrant_lock(&name).unwrap();
        let held = theirs.lock().await.unwrap();
        let me = client.owner(format!("me{round}")).unwrap();
        let take = |lock: &Lock| {
            let (lock, options) = (lock.clone(), AcquireOptions::new().owner(me.clone()));
            tokio::spawn(async move { lock.lock_with(options).await })
        };
        let waiting = [take(&fair), take(&reentrant)];
        tokio::time::sleep(ms(100)).await;
        held.unlock().await.unwrap();
        let (mut guards, mut refused) = (Vec::new(), 0);
        for waiting in waiting {
            match tokio::time::timeout(ms(10_000), waiting)
                .await
                .expect("no task hangs")
                .unwrap()
            {
                Ok(guard) => guards.push(guard),
                Err(Error::NotReentrant { .. }) => refused += 1,
                Err(other) => panic!("{other:?}"),
            }
        }
        assert_eq!((guards.len(), refused), (1, 1));
        is_alone(&client, &theirs, guards.remove(0)).await;
    }
    nothing_is_left(&server, &[&client, &other]).await;
}

/// Once an owner gives up its place in the queue, it can acquire the other kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_is_given_up_makes_way_for_the_other_kind() {
    let server = Server::start();
    let (client, other) = (server.client().await, server.client().await);
    let (fair, reentrant) = doors(&client, "l", false);
    let theirs = other.reentrant_lock("l").unwrap();
    let held = theirs.lock().await.unwrap();
    OwnerId::scope(async {
        let mut waits = Box::pin(fair.lock());
        assert!(tokio::time::timeout(ms(200), &mut waits).await.is_err());
        held.unlock().await.unwrap();
        assert!(reentrant.try_lock().await.unwrap().is_none());
        drop(waits);
        let guard = reentrant
            .try_lock_for(ms(5_000))
            .await
            .unwrap()
            .expect("free");
        is_alone(&client, &theirs, guard).await;
    })
    .await;
    nothing_is_left(&server, &[&client, &other]).await;
}

/// Of two concurrent tries one is busy, seldom both. Neither fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_tries_at_once_none_fails() {
    let server = Server::start();
    let client = server.client().await;
    let mut outcomes = BTreeMap::<(bool, bool), u32>::new();
    for round in 0..100 {
        let (fair, reentrant) = doors(&client, &format!("l{round}"), false);
        let me = client.owner(format!("me{round}")).unwrap();
        let take = |lock: Lock| {
            let options = AcquireOptions::new().owner(me.clone());
            tokio::spawn(async move { lock.try_lock_with(options).await.unwrap() })
        };
        let (a, b) = (take(fair), take(reentrant));
        let (a, b) = (a.await.unwrap(), b.await.unwrap());
        *outcomes.entry((a.is_some(), b.is_some())).or_default() += 1;
    }
    assert!(!outcomes.contains_key(&(true, true)), "{outcomes:?}");
    let both = outcomes.get(&(false, false)).copied().unwrap_or_default();
    assert!(both < 50, "{outcomes:?}");
    nothing_is_left(&server, &[&client]).await;
}
