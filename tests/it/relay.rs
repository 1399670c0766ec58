//! The relay: the tasks of one client hand a contended lock off without a request to the server.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, LossReason, OwnerId, Tuning};

use crate::{
    support::{
        Pauses, Server,
        child::{ByHand, channel},
        eventually, poll_once,
    },
    unpolled::park,
};

/// Far beyond the limit of each test, so that a missed wake-up shows.
const NEVER: Duration = Duration::from_secs(60);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn client(server: &Server) -> LockClient {
    server.client_with(|builder| builder.poll_cap(NEVER)).await
}

/// Waits until this many waiters of the client sleep.
async fn asleep(server: &Server, client: &LockClient, waiters: usize) {
    eventually("the waiters sleep", || async {
        // Their requests have their replies, and the waiter that polls once more when the
        // subscription is confirmed has done so.
        let scripts = server.script_count();
        tokio::time::sleep(ms(30)).await;
        client.stats().waiters == waiters
            && server.channels().contains(&channel("l"))
            && server.script_count() == scripts
    })
    .await;
}

/// Returns a hold that was handed off: the owner that acquired it, and the guard of the task that
/// received it.
async fn handed_on(server: &Server, client: &LockClient) -> (OwnerId, LockGuard) {
    let lock = client.mutex("l").unwrap();
    // A busy machine may take longer than the 2 ms in which a hand-off is possible.
    for _ in 0..500 {
        let other = ByHand::hold(server, "l", NEVER);
        let gives = Arc::new(AtomicU64::new(0));
        let waiter = || {
            let (lock, gives) = (lock.clone(), Arc::clone(&gives));
            tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                let owner = guard.owner();
                if gives.fetch_add(1, Ordering::SeqCst) == 0 {
                    guard.unlock().await.unwrap();
                    return (owner, None);
                }
                (owner, Some(guard))
            })
        };
        let both = [waiter(), waiter()];
        asleep(server, client, 2).await;
        other.release();
        let [mut one, mut two] = [None, None];
        for (waiter, place) in both.into_iter().zip([&mut one, &mut two]) {
            *place = Some(waiter.await.unwrap());
        }
        let (mut first, mut second) = (one.unwrap(), two.unwrap());
        if first.1.is_some() {
            std::mem::swap(&mut first, &mut second);
        }
        let guard = second.1.expect("one of the two still has it");
        if guard.owner() == first.0 {
            return (first.0, guard);
        }
        guard.unlock().await.unwrap();
    }
    panic!("no hold was handed on");
}

/// Holds that start and end within 2 ms of the server's reply share one record, under the owner of
/// the first. They cost the server two scripts per series, not two per hold.
#[tokio::test]
async fn many_holds_are_one_record() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let inside = Arc::new(AtomicU64::new(0));
    let before = server.script_count();
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let (lock, inside) = (lock.clone(), Arc::clone(&inside));
            tokio::spawn(async move {
                for _ in 0..200 {
                    let guard = lock.lock().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                    tokio::task::yield_now().await;
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1, "two at once");
                    assert!(!guard.is_lost());
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    client.idle().await;
    assert!(!server.exists("l"), "{:?}", server.record("l"));
    let scripts = (server.script_count() - before) as f64 / 3_200.0;
    println!("{scripts:.3} scripts a hold");
    // With requests for each hold, it would be at least 2.
    assert!(scripts < 1.0, "{scripts} scripts a hold");
}

/// Checks that 8 tasks that hold the lock 50 times each send a request to acquire it and one to
/// release it, each time.
async fn check_each_hold_sends_requests(server: &Server, lock: &Lock) {
    let before = server.script_count();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(server.script_count() - before >= 800);
}

/// Without the relay, each acquire and release sends a request.
#[tokio::test]
async fn each_release_asks_the_server_if_so_configured() {
    let server = Server::start();
    let client = server
        .client_with(|builder| {
            builder.tuning(Tuning {
                relay: false,
                ..Tuning::default()
            })
        })
        .await;
    let lock = client.mutex("l").unwrap();
    check_each_hold_sends_requests(&server, &lock).await;
}

/// The server's last reply is too old at the release, which therefore sends a request and reports
/// what the server finds.
#[tokio::test]
async fn what_was_held_for_longer_is_released_at_the_server() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let guard = lock.lock().await.unwrap();
    let waiting = tokio::spawn({
        let lock = lock.clone();
        async move { lock.lock().await.unwrap().unlock().await.unwrap() }
    });
    asleep(&server, &client, 1).await;
    server.call(&["DEL", "l"]);
    let lost = guard.unlock().await.unwrap_err();
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{lost}"
    );
    server.call(&["PUBLISH", &channel("l"), "0"]);
    waiting.await.unwrap();
}

/// The acquire that handed the lock off is no longer its owner, whatever the record says.
#[tokio::test]
async fn a_giver_neither_re_enters_nor_ends_what_it_handed_off() {
    let server = Server::start();
    let client = client(&server).await;
    let (first, guard) = handed_on(&server, &client).await;
    let lock = client.mutex("l").unwrap();
    let read: OwnerId = first.to_string().parse().unwrap();
    assert_eq!(first, guard.owner());
    for name in [&first, &read] {
        let options = AcquireOptions::new().owner(name.clone());
        let again = lock.try_lock_with(options).await;
        assert!(
            matches!(again, Err(Error::InvalidOwner { .. })),
            "two guards: {again:?}"
        );
    }
    let again = lock.release(&first).await;
    assert!(
        matches!(again, Err(Error::NotHeld { .. })),
        "it released what another acquire holds: {again:?}"
    );
    let again = lock.extend(&first, ms(90_000)).await;
    assert!(matches!(again, Err(Error::NotHeld { .. })), "{again:?}");
    assert!(!guard.is_lost() && guard.remaining() < ms(80_000));
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

/// The owner of one acquire holds nothing after its release, so it cannot acquire again.
#[tokio::test]
async fn an_owner_of_one_acquire_does_not_acquire_again() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let guard = lock.lock().await.unwrap();
    let owner = guard.owner();
    let options = || AcquireOptions::new().owner(owner.clone());
    let inside = lock.lock_with(options()).await.unwrap();
    assert_eq!(server.record("l"), [(owner.to_string(), 2)]);
    inside.unlock().await.unwrap();
    guard.unlock().await.unwrap();
    let again = lock.lock_with(options()).await;
    assert!(
        matches!(again, Err(Error::InvalidOwner { .. })),
        "{again:?}"
    );
    assert!(!server.exists("l"));
    client.idle().await;
    assert_eq!(client.stats().holds, 0);
}

/// Tasks are owners that may acquire again, so their holds are released at the server.
#[tokio::test]
async fn the_hold_of_a_task_is_not_handed_off() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.reentrant_lock("l").unwrap();
    check_each_hold_sends_requests(&server, &lock).await;
}

/// A hold that was handed off excludes other owners, is renewed, and is released like any other.
#[tokio::test]
async fn what_was_handed_on_is_held_like_any_other() {
    let server = Server::start();
    let timeout = ms(600);
    let client = server
        .client_with(|builder| builder.poll_cap(NEVER).watchdog_timeout(timeout))
        .await;
    let (name, guard) = handed_on(&server, &client).await;
    let lock = client.mutex("l").unwrap();
    OwnerId::scope(async { assert!(lock.try_lock().await.unwrap().is_none(), "two owners") }).await;
    tokio::time::sleep(3 * timeout).await;
    assert!(!guard.is_lost(), "it is renewed");
    assert_eq!(server.record("l"), [(name.to_string(), 1)]);
    guard.extend(ms(5_000)).await.unwrap();
    assert!(server.pttl("l") > 4_000);
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
    client.idle().await;
    assert_eq!(client.stats().holds, 0);
}

#[tokio::test]
async fn what_was_handed_on_is_lost_when_it_is_forced_free() {
    let server = Server::start();
    let client = client(&server).await;
    let (_, guard) = handed_on(&server, &client).await;
    assert!(client.mutex("l").unwrap().force_unlock().await.unwrap());
    assert!(guard.is_lost(), "this client has freed it itself");
    let lost = guard.unlock().await;
    assert!(
        matches!(
            lost,
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            })
        ),
        "{lost:?}"
    );
}

#[tokio::test]
async fn what_was_handed_on_is_released_by_a_shutdown() {
    let server = Server::start();
    let client = client(&server).await;
    let (_, guard) = handed_on(&server, &client).await;
    client.shutdown().await.unwrap();
    assert!(!server.exists("l"));
    assert!(guard.is_lost());
}

/// A hold goes from task to task while other waiters are dropped or no longer polled. One task has
/// it at a time, no task waits for ever, and nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_holds_it_at_a_time_if_waiters_are_dropped_or_unpolled() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(300)))
        .await;
    let inside = Arc::new(AtomicU64::new(0));
    let lock = client.mutex("l").unwrap();
    let work = |n: u64| {
        let (lock, inside) = (lock.clone(), Arc::clone(&inside));
        tokio::spawn(async move {
            let mut held = 0;
            for round in 0..150 {
                // Some tasks give up at any point of their wait.
                let patience = Duration::from_micros((n * 7 + round * 13) % 41 * 50);
                let waiting = OwnerId::scope(lock.lock());
                let guard = if n.is_multiple_of(3) {
                    tokio::select! {
                        guard = waiting => guard.unwrap(),
                        () = tokio::time::sleep(patience) => continue,
                    }
                } else {
                    waiting.await.unwrap()
                };
                held += 1;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                if round.is_multiple_of(5) {
                    tokio::task::yield_now().await;
                }
                assert!(!guard.is_lost());
                assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1, "two at once");
                if round.is_multiple_of(4) {
                    drop(guard);
                } else {
                    guard.unlock().await.unwrap();
                }
            }
            held
        })
    };
    let tasks: Vec<_> = (0..12).map(work).collect();
    let unpolled: Vec<_> = (0..20).map(|_| client.mutex("l").unwrap()).collect();
    let mut parked = Vec::new();
    for lock in &unpolled {
        let mut future = Box::pin(OwnerId::scope(lock.lock()));
        // Polled a few times, so that it waits, and then never again, even if it is woken.
        for _ in 0..20 {
            if let Poll::Ready(guard) = poll_once(future.as_mut()).await {
                guard.unwrap().unlock().await.unwrap();
                future = Box::pin(OwnerId::scope(lock.lock()));
            }
            tokio::time::sleep(ms(1)).await;
        }
        parked.push(future);
    }
    let mut held = 0;
    for task in tasks {
        held += tokio::time::timeout(NEVER, task)
            .await
            .expect("no task waits for ever")
            .unwrap();
    }
    assert!(held >= 8 * 150, "{held}");
    drop(parked);
    client.idle().await;
    eventually("nothing is left", || async {
        !server.exists("l") && client.stats().holds == 0
    })
    .await;
}

/// A waiter is woken, and then no longer polled. The next one gets the lock within a moment.
#[tokio::test]
async fn an_unclaimed_hand_off_is_for_the_next_waiter() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(500)))
        .await;
    let lock = client.mutex("l").unwrap();
    for _ in 0..20 {
        let other = ByHand::hold(&server, "l", NEVER);
        let mut unpolled = Box::pin(OwnerId::scope(lock.lock()));
        let one = tokio::spawn({
            let lock = lock.clone();
            async move { lock.lock().await.unwrap().unlock().await.unwrap() }
        });
        // Polls it until it sleeps.
        while client.stats().waiters < 2 {
            assert!(poll_once(unpolled.as_mut()).await.is_pending());
            tokio::time::sleep(ms(1)).await;
        }
        asleep(&server, &client, 2).await;
        other.release();
        one.await.unwrap();
        let next = OwnerId::scope(lock.try_lock_for(Duration::from_secs(20)))
            .await
            .unwrap();
        next.expect("it is free").unlock().await.unwrap();
        drop(unpolled);
        client.idle().await;
    }
    eventually("nothing is left", || async {
        !server.exists("l") && client.stats().holds == 0
    })
    .await;
}

/// A holder re-enters while others wait, also inside a hold that was handed to it.
#[tokio::test]
async fn a_holder_re_enters_while_others_wait() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for round in 0..60 {
                    let outer = lock.lock().await.unwrap();
                    // A hold that was nested is not handed off, so only a third of the holds nest.
                    if (task + round) % 3 == 0 {
                        let options = AcquireOptions::new().owner(outer.owner());
                        let inner = lock.lock_with(options).await.unwrap();
                        assert_eq!(outer.owner(), inner.owner());
                        inner.unlock().await.unwrap();
                    }
                    assert!(!outer.is_lost());
                    outer.unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(NEVER, task)
            .await
            .expect("no task waits for itself")
            .unwrap();
    }
    client.idle().await;
    assert!(!server.exists("l"));
}

/// An acquire with a lease of its own, with a token or of another kind takes no hand-off, and still
/// gets its turn.
#[tokio::test]
async fn an_acquire_that_cannot_receive_it_has_its_turn() {
    let server = Server::start();
    let client = client(&server).await;
    let (plain, fenced) = (client.mutex("l").unwrap(), client.fenced_lock("l").unwrap());
    let crowd: Vec<_> = (0..8)
        .map(|_| {
            let lock = plain.clone();
            tokio::spawn(async move {
                for _ in 0..200 {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    let (leased, tokens) = (plain.clone(), fenced.clone());
    let leased = tokio::spawn(async move {
        for _ in 0..20 {
            let guard = leased
                .lock_with(AcquireOptions::new().lease(ms(2_000)))
                .await
                .unwrap();
            assert!(guard.remaining() <= ms(2_000));
            guard.unlock().await.unwrap();
        }
    });
    let tokens = tokio::spawn(async move {
        let mut last = 0;
        for _ in 0..20 {
            let guard = tokens.lock().await.unwrap();
            let token = guard.fencing_token().expect("a token").get();
            assert!(token > last, "{token} after {last}");
            last = token;
            guard.unlock().await.unwrap();
        }
    });
    for task in crowd.into_iter().chain([leased, tokens]) {
        tokio::time::timeout(NEVER, task)
            .await
            .expect("each has its turn")
            .unwrap();
    }
    client.idle().await;
    assert!(!server.exists("l"));
}

/// Waits until a hold of `l` is offered to the waiters: `unpolled` waits behind the task that
/// released it. Returns `None` if no hold was offered.
async fn lying<'a>(
    server: &Server,
    client: &LockClient,
    lock: &'a Lock,
) -> Option<(
    OwnerId,
    std::pin::Pin<Box<dyn Future<Output = nestlock::Result<LockGuard>> + 'a>>,
)> {
    let other = ByHand::hold(server, "l", NEVER);
    let gives = client.mutex("l").unwrap();
    let (said, gave) = tokio::sync::oneshot::channel();
    let before = client.stats().waiters;
    let first = tokio::spawn(async move {
        let guard = gives.lock().await.unwrap();
        let owner = guard.owner();
        guard.unlock().await.unwrap();
        let _ = said.send(owner);
    });
    while client.stats().waiters == before {
        tokio::time::sleep(ms(1)).await;
    }
    let mut unpolled: std::pin::Pin<Box<dyn Future<Output = _>>> =
        Box::pin(OwnerId::scope(lock.lock()));
    while client.stats().waiters < before + 2 {
        assert!(poll_once(unpolled.as_mut()).await.is_pending());
        tokio::time::sleep(ms(1)).await;
    }
    asleep(server, client, before + 2).await;
    // It may be woken to poll once more when the subscription is confirmed.
    for _ in 0..20 {
        assert!(poll_once(unpolled.as_mut()).await.is_pending());
        tokio::time::sleep(ms(1)).await;
    }
    other.release();
    let owner = gave.await.unwrap();
    first.await.unwrap();
    (server.record("l") == [(owner.to_string(), 1)]).then_some((owner, unpolled))
}

/// `x` and `{x}` are two locks that share a channel.
#[tokio::test]
async fn x_is_not_handed_off_to_a_waiter_for_x_in_braces() {
    let server = Server::start();
    let client = client(&server).await;
    for _ in 0..20 {
        let (one, two) = (
            ByHand::hold(&server, "l", NEVER),
            ByHand::hold(&server, "{l}", NEVER),
        );
        let (plain, braces) = (client.mutex("l").unwrap(), client.mutex("{l}").unwrap());
        let first =
            tokio::spawn(async move { plain.lock().await.unwrap().unlock().await.unwrap() });
        asleep(&server, &client, 1).await;
        let second = tokio::spawn(async move { braces.lock().await.unwrap() });
        asleep(&server, &client, 2).await;
        one.release();
        first.await.unwrap();
        tokio::time::sleep(ms(60)).await;
        assert!(
            !second.is_finished(),
            "two tasks hold it: {:?}",
            server.record("{l}")
        );
        two.release();
        server.call(&["PUBLISH", &channel("l"), "0"]);
        second.await.unwrap().unlock().await.unwrap();
        client.idle().await;
        eventually("nothing is left", || async {
            !server.exists("l") && !server.exists("{l}")
        })
        .await;
    }
}

/// The owner of a hold that was handed off is the one in its guard, for every call.
#[tokio::test]
async fn what_was_handed_on_is_re_entered_by_the_name_of_its_guard() {
    let server = Server::start();
    let client = client(&server).await;
    let (_, guard) = handed_on(&server, &client).await;
    let lock = client.mutex("l").unwrap();
    let again = lock
        .try_lock_with(AcquireOptions::new().owner(guard.owner()))
        .await
        .unwrap();
    again.expect("it holds it").unlock().await.unwrap();
    guard.unlock().await.unwrap();
}

/// A name that was read from the record, or from text, means its present holder.
#[tokio::test]
async fn a_name_read_from_the_record_nests_in_its_hold() {
    let server = Server::start();
    let client = client(&server).await;
    for lock in [
        client.mutex("m").unwrap(),
        client.fair_lock("f").unwrap().owner_per_acquire(),
    ] {
        let guard = lock.lock().await.unwrap();
        let read = lock.holder().await.unwrap().expect("it is held");
        let parsed = guard.owner().to_string().parse().unwrap();
        for name in [read, parsed] {
            let nested = lock
                .try_lock_with(AcquireOptions::new().owner(name))
                .await
                .unwrap();
            nested.expect("its owner holds it").unlock().await.unwrap();
        }
        guard.unlock().await.unwrap();
    }
}

/// The name of an acquire that is not polled is read from the record, and a guard is acquired by it.
/// The acquire must not enter that hold when it is polled again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquire_does_not_enter_what_its_name_acquired() {
    let server = Server::start();
    let builder = || LockClient::builder().command_timeout(Duration::from_millis(200));
    let client = builder().connect(server.url()).await.unwrap();
    for lock in [
        client.mutex("l").unwrap(),
        client.reentrant_lock("l").unwrap().owner_per_acquire(),
        client.fair_lock("l").unwrap().owner_per_acquire(),
    ] {
        lock.lock().await.unwrap().unlock().await.unwrap();
        let mut parked = park(&lock).await;
        eventually("it is recorded", || async { server.exists("l") }).await;
        let name = lock.holder().await.unwrap().expect("it is held");
        eventually("it is given up", || async { !server.exists("l") }).await;
        client.idle().await;
        let by_name = lock
            .try_lock_with(AcquireOptions::new().owner(name))
            .await
            .unwrap()
            .expect("it is free");
        let entered = tokio::time::timeout(Duration::from_millis(500), &mut parked).await;
        assert!(!matches!(entered, Ok(Ok(_))), "two guards: {entered:?}");
        by_name.unlock().await.unwrap();
        drop(parked);
        client.idle().await;
    }
}

#[tokio::test]
async fn what_was_handed_on_is_released_by_the_name_of_its_guard() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let (_, guard) = handed_on(&server, &client).await;
    lock.release(&guard.owner()).await.unwrap();
    assert!(!server.exists("l"));
    drop(guard);
}

#[tokio::test]
async fn what_was_handed_on_and_left_is_released_by_its_name() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let (_, guard) = handed_on(&server, &client).await;
    let owner = guard.leave_to_lease();
    assert_eq!(server.record("l"), [(owner.to_string(), 1)]);
    assert!(lock.try_lock().await.unwrap().is_none());
    lock.release(&owner).await.unwrap();
    assert!(!server.exists("l"));
}

/// `hold_count` reports the task that has the hold now.
#[tokio::test]
async fn what_was_handed_on_is_held_by_who_has_it() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    for _ in 0..500 {
        let other = ByHand::hold(&server, "l", NEVER);
        let waiter = || {
            let lock = lock.clone();
            tokio::spawn(async move { lock.lock().await.unwrap() })
        };
        let first = waiter();
        asleep(&server, &client, 1).await;
        let second = waiter();
        asleep(&server, &client, 2).await;
        other.release();
        let guard = first.await.unwrap();
        let name = guard.owner();
        guard.unlock().await.unwrap();
        let guard = second.await.unwrap();
        let counts = |owner: OwnerId| {
            let lock = lock.clone();
            async move { lock.hold_count(&owner).await.unwrap() }
        };
        let owner = guard.owner();
        let is_handed_on = owner == name;
        assert_eq!((counts(name).await, counts(owner).await), (0, 1));
        guard.unlock().await.unwrap();
        if is_handed_on {
            return;
        }
    }
    panic!("no hold was handed on");
}

#[tokio::test]
async fn what_was_handed_on_is_extended_by_its_name() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let (_, guard) = handed_on(&server, &client).await;
    lock.extend(&guard.owner(), ms(90_000)).await.unwrap();
    assert!(guard.remaining() > ms(80_000), "{:?}", guard.remaining());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn what_was_handed_on_is_handed_over_and_adopted() {
    let server = Server::start();
    let client = client(&server).await;
    let other = server.client().await;
    for adopter in [&client, &other] {
        let (_, guard) = handed_on(&server, &client).await;
        let hand_over = guard.hand_over(ms(5_000)).await.unwrap();
        let guard = adopter.mutex("l").unwrap().adopt(&hand_over).await.unwrap();
        assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
        guard.unlock().await.unwrap();
        assert!(!server.exists("l"));
    }
}

/// A forced release by any handle removes the record, and no waiter continues with it.
#[tokio::test]
async fn an_unclaimed_hand_off_that_is_forced_free_has_no_holder() {
    let (server, pauses) = (Server::start(), Pauses::watch());
    let client = client(&server).await;
    let locks = [
        ("mutex", client.mutex("l").unwrap()),
        ("reentrant", client.reentrant_lock("l").unwrap()),
        ("fenced", client.fenced_lock("l").unwrap()),
        ("spin", client.spin_lock("l").unwrap()),
    ];
    let waits = client.mutex("l").unwrap();
    for (kind, by) in &locks {
        let (mut tried, mut late) = (0, 0);
        while tried < 10 {
            pauses.forget();
            let Some((_, mut unpolled)) = lying(&server, &client, &waits).await else {
                continue;
            };
            // If this process was held up, the client has released the untaken hold in the
            // meantime.
            if !by.force_unlock().await.unwrap() {
                late += 1;
                assert!(
                    pauses.was_held_up() && late < 10,
                    "by {kind}: the lock was free"
                );
                continue;
            }
            tried += 1;
            for _ in 0..10 {
                if let Poll::Ready(guard) = poll_once(unpolled.as_mut()).await {
                    let guard = guard.unwrap();
                    assert_eq!(
                        server.record("l"),
                        [(guard.owner().to_string(), 1)],
                        "by {kind}: {}",
                        guard.is_lost()
                    );
                    guard.unlock().await.unwrap();
                    break;
                }
                tokio::time::sleep(ms(1)).await;
            }
        }
    }
}

/// After the last release has returned, a try finds the lock free, however short its wait.
#[tokio::test]
async fn a_released_lock_is_free_for_the_next_acquire() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    for _ in 0..30 {
        let other = ByHand::hold(&server, "l", NEVER);
        let waiter = || {
            let lock = lock.clone();
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        };
        let both = [waiter(), waiter()];
        asleep(&server, &client, 2).await;
        other.release();
        for waiter in both {
            waiter.await.unwrap();
        }
        let next = OwnerId::scope(lock.try_lock_for(ms(0))).await.unwrap();
        next.expect("it is free").unlock().await.unwrap();
    }
}

/// A long lease ends with the task that set it. The receiver of the hold has its own.
#[tokio::test]
async fn what_is_handed_on_has_the_lease_of_who_takes_it() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    for _ in 0..50 {
        let other = ByHand::hold(&server, "l", NEVER);
        let waiter = |extends: bool| {
            let lock = lock.clone();
            tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                if extends {
                    guard.extend(ms(3_600_000)).await.unwrap();
                }
                guard
            })
        };
        let first = waiter(true);
        asleep(&server, &client, 1).await;
        let second = waiter(false);
        asleep(&server, &client, 2).await;
        other.release();
        drop(first.await.unwrap());
        let guard = second.await.unwrap();
        let ttl = server.pttl("l");
        assert!(
            ttl <= 30_000,
            "the receiver dies, and the lock stays locked for {ttl} ms"
        );
        guard.unlock().await.unwrap();
    }
}

/// The age of a reply counts from its arrival, not from the time when a task reads it.
#[tokio::test]
async fn a_reply_that_was_read_late_is_not_recent() {
    let server = Server::start();
    let client = client(&server).await;
    let (lock, waits) = (client.mutex("l").unwrap(), client.mutex("l").unwrap());
    let other = ByHand::hold(&server, "l", NEVER);
    let mut both = [
        Box::pin(OwnerId::scope(lock.lock())),
        Box::pin(OwnerId::scope(waits.lock())),
    ];
    let mut polls = 0;
    while client.stats().waiters < 2 || polls < 50 {
        for waiter in &mut both {
            assert!(poll_once(waiter.as_mut()).await.is_pending());
        }
        polls += 1;
        tokio::time::sleep(ms(1)).await;
    }
    other.release();
    tokio::time::sleep(ms(20)).await;
    // The requests are sent, and then this thread is busy.
    for waiter in &mut both {
        assert!(poll_once(waiter.as_mut()).await.is_pending());
    }
    tokio::time::sleep(ms(20)).await;
    assert!(server.exists("l"));
    server.call(&["DEL", "l"]);
    std::thread::sleep(ms(300));
    let [one, two] = both;
    let (guard, two) = match futures::future::select(one, two).await {
        futures::future::Either::Left((guard, two))
        | futures::future::Either::Right((guard, two)) => (guard, two),
    };
    let unlocked = guard.unwrap().unlock().await;
    assert!(
        matches!(unlocked, Err(Error::Lost { .. })),
        "the last reply was 300 ms old: {unlocked:?}"
    );
    drop(two);
}

/// While the connection was down, another client may have freed the lock.
#[tokio::test]
async fn what_lay_there_through_a_reconnect_is_not_taken() {
    let server = Server::start_real();
    let client = client(&server).await;
    let waits = client.mutex("l").unwrap();
    for _ in 0..8 {
        let Some((owner, mut unpolled)) = lying(&server, &client, &waits).await else {
            continue;
        };
        server.call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        server.call(&["DEL", "l"]);
        tokio::time::sleep(ms(8)).await;
        for _ in 0..50 {
            if let Poll::Ready(guard) = poll_once(unpolled.as_mut()).await {
                let guard = guard.unwrap();
                if guard.owner() == owner {
                    // After a reconnect the client checks all holds at once, and reports the loss.
                    tokio::time::sleep(ms(500)).await;
                    assert!(guard.is_lost(), "{:?}", server.record("l"));
                }
                drop(guard);
                break;
            }
            tokio::time::sleep(ms(1)).await;
        }
        drop(unpolled);
        client.idle().await;
    }
}

/// `idle` also settles a hold that no task takes.
#[tokio::test]
async fn idle_waits_for_what_lies_there() {
    let server = Server::start();
    let client = client(&server).await;
    let waits = client.mutex("l").unwrap();
    for _ in 0..10 {
        let Some((_, unpolled)) = lying(&server, &client, &waits).await else {
            continue;
        };
        client.idle().await;
        assert!(!server.exists("l"), "it is released");
        drop(unpolled);
        client.idle().await;
    }
}

/// A name that is read from the record means its present holder, as in any other process.
#[tokio::test]
async fn the_reported_holder_can_be_extended_and_released() {
    let server = Server::start();
    let client = client(&server).await;
    let (_, guard) = handed_on(&server, &client).await;
    let lock = client.mutex("l").unwrap();
    let holder = lock.holder().await.unwrap().expect("it is held");
    assert_eq!(lock.hold_count(&holder).await.unwrap(), 1);
    lock.extend(&holder, ms(90_000)).await.unwrap();
    assert!(guard.remaining() > ms(80_000), "{:?}", guard.remaining());
    lock.release(&holder).await.unwrap();
    assert!(!server.exists("l"));
    drop(guard);
}

/// The rounds of a multi-lock acquire its members again and again under one name. What a failed
/// round gave back may be another acquire's by then.
#[tokio::test]
async fn a_multi_lock_does_not_enter_what_it_gave_back() {
    let server = Server::start();
    let client = client(&server).await;
    for _ in 0..5 {
        let (a, l) = (
            ByHand::hold(&server, "a", NEVER),
            ByHand::hold(&server, "l", NEVER),
        );
        let members = ["l", "a"].map(|name| client.reentrant_lock(name).unwrap());
        let multi = client.multi_lock(members).unwrap().owner_per_acquire();
        let both = tokio::spawn(async move { multi.lock().await.unwrap() });
        asleep(&server, &client, 1).await;
        let lock = client.mutex("l").unwrap();
        let one = tokio::spawn(async move { lock.lock().await.unwrap() });
        asleep(&server, &client, 2).await;
        l.release();
        let guard = one.await.unwrap();
        // The multi-lock waits for `a` now, and then tries `l`.
        tokio::time::sleep(ms(50)).await;
        a.release();
        let both = tokio::time::timeout(ms(300), both).await;
        assert!(both.is_err() || guard.is_lost(), "two guards of `l`");
        drop(guard);
        if let Ok(both) = both {
            drop(both.unwrap());
        }
        client.idle().await;
        eventually("the locks are free", || async {
            client.stats().waiters == 0 && !server.exists("l") && !server.exists("a")
        })
        .await;
    }
}

/// The extension may be executed after the hand-off. The record would outlive the lease that the
/// receiver wants.
#[tokio::test]
async fn a_hold_with_an_extension_in_flight_is_not_handed_off() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    for _ in 0..10 {
        let other = ByHand::hold(&server, "l", NEVER);
        let waiter = |extends: bool| {
            let lock = lock.clone();
            tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                if extends {
                    let mut extend = Box::pin(guard.extend(ms(3_600_000)));
                    let _ = poll_once(extend.as_mut()).await;
                }
                guard
            })
        };
        let first = waiter(true);
        asleep(&server, &client, 1).await;
        let second = waiter(false);
        asleep(&server, &client, 2).await;
        other.release();
        first.await.unwrap().unlock().await.unwrap();
        let guard = second.await.unwrap();
        tokio::time::sleep(ms(20)).await;
        let ttl = server.pttl("l");
        assert!(ttl <= 30_000, "the receiver's record lives for {ttl} ms");
        guard.unlock().await.unwrap();
    }
}

/// A newcomer waits without a request while a series goes on, which may end without a release.
#[tokio::test]
async fn what_is_left_after_a_hand_off_is_waited_for() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(NEVER).watchdog_timeout(ms(900)))
        .await;
    let lock = client.mutex("l").unwrap();
    for _ in 0..10 {
        let (_, guard) = handed_on(&server, &client).await;
        guard.leave_to_lease();
        let next = lock.try_lock_for(ms(20_000)).await.unwrap();
        next.expect("the lease ends").unlock().await.unwrap();
    }
}

/// A forced release whose caller is dropped, or whose reply overtakes that of an acquire, may have
/// freed what a guard of this client holds. The guard learns it.
#[tokio::test]
async fn a_force_that_no_caller_awaits_is_noticed() {
    let server = Server::start();
    let client = client(&server).await;
    let lock = client.mutex("l").unwrap();
    let guard = lock.lock().await.unwrap();
    {
        let mut force = Box::pin(lock.force_unlock());
        while server.exists("l") {
            assert!(poll_once(force.as_mut()).await.is_pending());
            tokio::time::sleep(ms(1)).await;
        }
    }
    eventually("the loss is known", || async { guard.is_lost() }).await;
    drop(guard);
    for _ in 0..20 {
        let mut acquire = Box::pin(OwnerId::scope(lock.lock()));
        let first = poll_once(acquire.as_mut()).await;
        let mut force = Box::pin(lock.force_unlock());
        let _ = poll_once(force.as_mut()).await;
        let guard = match first {
            Poll::Ready(guard) => guard.unwrap(),
            Poll::Pending => acquire.await.unwrap(),
        };
        if force.await.unwrap() {
            eventually("the loss is known", || async {
                guard.is_lost() || server.exists("l")
            })
            .await;
        }
        drop(guard);
        client.idle().await;
    }
}
