//! A hold that was left to its lease no longer concerns its client.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Barrier},
    time::Duration,
};

use nestlock::{AcquireOptions, Error, LockClient, LockGuard, OwnerId, Result};

use crate::support::{
    Server, eventually, poll_once,
    proxy::{Action, Proxy, Verb},
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Connects a client whose renewals are due every 200 ms.
async fn quick(server: &Server) -> LockClient {
    server
        .client_with(|builder| builder.watchdog_timeout(ms(600)))
        .await
}

/// Waits for some renewals and janitor polls, for 1.5 s at most.
async fn several_renewals(server: &Server) {
    let before = server.script_count();
    let start = std::time::Instant::now();
    while server.script_count() < before + 3 && start.elapsed() < ms(1500) {
        tokio::time::sleep(ms(20)).await;
    }
}

#[tokio::test]
async fn what_was_left_is_not_re_entered_by_its_owner() {
    let server = Server::start();
    let client = server.client().await;
    for lock in [
        client.reentrant_lock("reentrant"),
        client.non_reentrant_lock("non-reentrant"),
        client.fair_lock("fair"),
        client.string_lock("string"),
        client.signal_lock("signal"),
        client
            .permits("permits", 1)
            .and_then(|permits| permits.many(1)),
        client.read_write_lock("rw").map(|lock| lock.write_lock()),
    ] {
        let lock = lock.unwrap();
        let given = lock.lock().await.unwrap().leave_to_lease();
        let mine = lock.try_lock().await.unwrap();
        assert!(
            mine.is_none(),
            "both another owner ({given}) and this task hold the lock: {mine:?}"
        );
        // The lock is free for the giver too, as soon as the receiver has released it.
        lock.release(&given).await.unwrap();
        let mine = lock.try_lock().await.unwrap().expect("free");
        assert_ne!(mine.owner(), given);
        mine.unlock().await.unwrap();
    }
}

/// A value has no second name, so the client queries the server for the holder.
#[tokio::test]
async fn a_value_that_was_left_is_not_re_entered() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let options = || AcquireOptions::new().value("ticket-4711");
    for kind in ["string", "signal"] {
        let lock = |client: &LockClient| match kind {
            "string" => client.string_lock("l").unwrap(),
            _ => client.signal_lock("l").unwrap(),
        };
        let given = lock(&a)
            .try_lock_with(options())
            .await
            .unwrap()
            .unwrap()
            .leave_to_lease();
        assert!(
            lock(&a).try_lock_with(options()).await.unwrap().is_none(),
            "{kind}"
        );
        lock(&b).release(&given).await.unwrap();
        lock(&a)
            .try_lock_with(options())
            .await
            .unwrap()
            .expect("free")
            .unlock()
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_shutdown_does_not_release_what_was_left() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let given = a
        .reentrant_lock("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .leave_to_lease();
    let there = b.reentrant_lock("l").unwrap();
    there.extend(&given, Duration::from_secs(60)).await.unwrap();
    a.shutdown().await.unwrap();
    assert!(
        there.is_locked().await.unwrap(),
        "released by the giver's shutdown"
    );
    there.release(&given).await.unwrap();
}

/// An inner hold was left, and a guard has the outer one: the shutdown takes that one off.
#[tokio::test]
async fn a_shutdown_takes_off_only_what_guards_hold() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = a.reentrant_lock("l").unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    let given = inner.leave_to_lease();
    a.shutdown().await.unwrap();
    assert_eq!(server.record("l"), [(given.to_string(), 1)]);
    drop(outer);
    let there = b.reentrant_lock("l").unwrap();
    there.release(&given).await.unwrap();
    assert!(!there.is_locked().await.unwrap());
}

#[tokio::test]
async fn what_was_left_and_extended_is_not_released_by_its_client() {
    let server = Server::start();
    let (a, b) = (quick(&server).await, server.client().await);
    let (here, there) = (a.string_lock("l").unwrap(), b.string_lock("l").unwrap());
    let options = AcquireOptions::new().value("ticket-4711").lease(ms(400));
    let given = here
        .try_lock_with(options)
        .await
        .unwrap()
        .unwrap()
        .leave_to_lease();
    there.extend(&given, Duration::from_secs(60)).await.unwrap();
    // As far as the giver knows, the lease is over.
    eventually("the giver forgets it", || async { a.stats().holds == 0 }).await;
    a.idle().await;
    assert!(server.pttl("l") > 50_000);
    there.release(&given).await.unwrap();
}

/// A lock that was left lasts as long as it was extended, is not renewed, and may be released.
#[tokio::test]
async fn a_lock_that_was_left_is_not_renewed() {
    let server = Server::start();
    let (a, b) = (quick(&server).await, server.client().await);
    let there = b.reentrant_lock("l").unwrap();
    for is_extended in [true, false] {
        let given = a
            .reentrant_lock("l")
            .unwrap()
            .lock()
            .await
            .unwrap()
            .leave_to_lease();
        assert_eq!(there.hold_count(&given).await.unwrap(), 1);
        if is_extended {
            there.extend(&given, Duration::from_secs(60)).await.unwrap();
            several_renewals(&server).await;
            assert!(server.pttl("l") > 50_000);
            there.release(&given).await.unwrap();
        }
        eventually("it is free", || async { !server.exists("l") }).await;
        let next = there.try_lock().await.unwrap().expect("free");
        eventually("the giver forgets it", || async { a.stats().holds == 0 }).await;
        assert!(!next.is_lost());
        next.unlock().await.unwrap();
    }
}

/// A release elsewhere ends a hold that was left, even if the inner hold was dropped a moment ago.
#[tokio::test]
async fn a_release_elsewhere_ends_what_was_left_after_a_drop() {
    let server = Server::start();
    let (a, b) = (quick(&server).await, server.client().await);
    for round in 0..30 {
        let name = format!("l{round}");
        let (here, there) = (
            a.reentrant_lock(&name).unwrap(),
            b.reentrant_lock(&name).unwrap(),
        );
        let outer = here.lock().await.unwrap();
        let inner = here.lock().await.unwrap();
        drop(inner);
        let given = outer.leave_to_lease();
        a.idle().await;
        there.release(&given).await.unwrap();
        assert!(
            !there.is_locked().await.unwrap(),
            "round {round}: it is held without a guard"
        );
    }
    eventually("nothing is renewed", || async { a.stats().holds == 0 }).await;
}

/// One of two nested holds is left to its lease.
#[tokio::test]
async fn an_inner_hold_that_is_left_and_the_outer_one_are_two() {
    let server = Server::start();
    let (a, b) = (quick(&server).await, server.client().await);
    for first in ["giver", "dropped", "receiver", "both"] {
        let (here, there) = (
            a.reentrant_lock("l").unwrap(),
            b.reentrant_lock("l").unwrap(),
        );
        let outer = here.lock().await.unwrap();
        let given = here.lock().await.unwrap().leave_to_lease();
        match first {
            "giver" => {
                outer.unlock().await.unwrap();
                assert_eq!(there.hold_count(&given).await.unwrap(), 1);
                there.release(&given).await.unwrap();
            }
            "receiver" => {
                there.release(&given).await.unwrap();
                several_renewals(&server).await;
                assert!(!outer.is_lost());
                outer.unlock().await.unwrap();
            }
            "dropped" => {
                drop(outer);
                a.idle().await;
                assert_eq!(there.hold_count(&given).await.unwrap(), 1);
                there.release(&given).await.unwrap();
            }
            _ => {
                let (x, y) = tokio::join!(there.release(&given), outer.unlock());
                x.unwrap();
                y.unwrap();
            }
        }
        // A release elsewhere that comes before the guard's is not counted: the lease ends it.
        let is_free = || async { !there.is_locked().await.unwrap() };
        if matches!(first, "giver" | "dropped") {
            assert!(is_free().await, "{first}: it is held without a guard");
        }
        eventually("it ends", is_free).await;
        eventually("nothing is renewed", || async { a.stats().holds == 0 }).await;
    }
}

/// Two processes each release one hold of an owner that has two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_by_two_processes_both_count() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        server.client().await,
        server.client().await,
    );
    let kinds: [fn(&LockClient, &str) -> nestlock::Lock; 4] = [
        |client, name| client.reentrant_lock(name).unwrap(),
        |client, name| client.fair_lock(name).unwrap(),
        |client, name| client.read_write_lock(name).unwrap().read_lock(),
        |client, name| client.read_write_lock(name).unwrap().write_lock(),
    ];
    for (n, kind) in kinds.into_iter().enumerate() {
        for round in 0..25 {
            let name = format!("l{n}:{round}");
            let here = kind(&a, &name);
            let (outer, inner) = (here.lock().await.unwrap(), here.lock().await.unwrap());
            let (owner, same) = (inner.leave_to_lease(), outer.leave_to_lease());
            assert_eq!(owner, same);
            let (there, elsewhere) = (kind(&b, &name), kind(&c, &name));
            let released = tokio::join!(there.release(&owner), elsewhere.release(&owner));
            released.0.unwrap();
            released.1.unwrap();
            assert!(
                !there.is_locked().await.unwrap(),
                "{name}: both releases reported success"
            );
            assert!(matches!(
                there.release(&owner).await,
                Err(Error::NotHeld { .. })
            ));
        }
    }
}

/// While a guard of the hold is alive, its owner is inside: it re-enters, and does not wait for
/// itself.
#[tokio::test]
async fn an_owner_with_its_outer_hold_left_and_a_guard_re_enters() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (here, there) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let (outer, inner) = (here.lock().await.unwrap(), here.lock().await.unwrap());
    let given = outer.leave_to_lease();
    let again = here.try_lock().await.unwrap().expect("it is inside");
    assert_eq!(again.owner(), given);
    assert_eq!(there.hold_count(&given).await.unwrap(), 3);
    again.unlock().await.unwrap();
    assert!(!inner.is_lost());
    inner.unlock().await.unwrap();
    // Now it is outside, and waits as any other owner does.
    assert_eq!(there.hold_count(&given).await.unwrap(), 1);
    assert!(here.try_lock().await.unwrap().is_none());
    let waiting = tokio::spawn({
        let here = here.clone();
        async move { here.lock().await }
    });
    eventually("it waits", || async { a.stats().waiters == 1 }).await;
    there.release(&given).await.unwrap();
    waiting.await.unwrap().unwrap().unlock().await.unwrap();
}

/// A nested acquire is in flight when the last guard is left: its hold is not entered.
#[tokio::test]
async fn an_acquire_next_to_a_hold_that_is_left_waits_for_its_end() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::builder()
        .watchdog_timeout(ms(1500))
        .connect(proxy.url())
        .await
        .unwrap();
    let (here, me) = (a.reentrant_lock("l").unwrap(), a.owner("me").unwrap());
    let mine = || AcquireOptions::new().owner(me.clone());
    let outer = here.lock_with(mine()).await.unwrap();
    proxy.once(Verb::Acquire, Action::Late(ms(300)));
    let before = proxy.count(Verb::Acquire);
    let nested = tokio::spawn({
        let (here, mine) = (here.clone(), mine());
        async move { here.lock_with(mine).await }
    });
    eventually("it is sent", || async {
        proxy.count(Verb::Acquire) > before
    })
    .await;
    let given = outer.leave_to_lease();
    let nested = nested.await.unwrap().unwrap();
    assert_ne!(nested.owner(), given);
    assert_eq!(server.record("l"), [(nested.owner().to_string(), 1)]);
    nested.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

/// The owner id of a hold that was left and released can neither release nor extend the next hold.
#[tokio::test]
async fn the_owner_of_an_earlier_hold_releases_nothing() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (here, there) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let old = here.lock().await.unwrap().leave_to_lease();
    there.release(&old).await.unwrap();
    let guard = here.lock().await.unwrap();
    assert_ne!(guard.owner(), old);
    for lock in [&here, &there] {
        assert!(matches!(
            lock.release(&old).await,
            Err(Error::NotHeld { .. })
        ));
        assert!(matches!(
            lock.extend(&old, Duration::from_secs(60)).await,
            Err(Error::NotHeld { .. })
        ));
    }
    assert!(!guard.is_lost());
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    // The task's own owner means its current hold.
    here.release(&a.current_owner()).await.unwrap();
    assert!(matches!(guard.unlock().await, Err(Error::NotHeld { .. })));
}

/// The receiver's release meets the giver's late one. Whatever happens, the lock is free in the
/// end.
#[tokio::test]
async fn a_hold_that_is_left_in_doubt_is_not_renewed() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::builder()
        .watchdog_timeout(ms(900))
        .connect(proxy.url())
        .await
        .unwrap();
    let b = server.client().await;
    let (here, there) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let outer = here.lock().await.unwrap();
    let inner = here.lock().await.unwrap();
    proxy.once(Verb::Release, Action::Mute);
    // The reply never comes.
    assert!(tokio::time::timeout(ms(50), inner.unlock()).await.is_err());
    let given = outer.leave_to_lease();
    let _ = there.release(&given).await;
    // A hold in doubt is not renewed.
    eventually("it ends", || async { !there.is_locked().await.unwrap() }).await;
    eventually("and is forgotten", || async { a.stats().holds == 0 }).await;
}

/// The halves of a read-write lock share one name. A hold that was handed over must not be
/// re-entered through the other half.
#[tokio::test]
async fn a_reading_writer_that_left_its_write_lock_cannot_write() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (here, there) = (
        a.read_write_lock("l").unwrap(),
        b.read_write_lock("l").unwrap(),
    );
    let write = here.write_lock().lock().await.unwrap();
    let read = here.read_lock().lock().await.unwrap();
    let given = write.leave_to_lease();
    let again = [here.write().await.map(Some), here.try_write().await];
    assert!(
        matches!(again, [Err(Error::UpgradeRefused { .. }), Ok(None)]),
        "two writers: {given} and {again:?}"
    );
    there.write_lock().release(&given).await.unwrap();
    read.unlock().await.unwrap();
    here.write_lock()
        .try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
}

/// The owner is sent as text, as another process would get it.
#[tokio::test]
async fn an_owner_as_text_is_exact() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let given = a
        .reentrant_lock("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .leave_to_lease()
        .to_string();
    let read: OwnerId = given.parse().unwrap();
    // The text gives no access to the giver's next holds.
    let other = a.reentrant_lock("other").unwrap().lock().await.unwrap();
    assert!(matches!(
        b.reentrant_lock("other").unwrap().release(&read).await,
        Err(Error::NotHeld { .. })
    ));
    b.reentrant_lock("l").unwrap().release(&read).await.unwrap();
    other.unlock().await.unwrap();
}

/// An owner that re-acquires a lock after handing it over is recorded twice, under two names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holds_next_to_one_that_was_left_are_counted_by_name() {
    let server = Server::start();
    let client = quick(&server).await;
    let me = client.owner("me").unwrap();
    let read = client.read_write_lock("l").unwrap().read_lock();
    let lock = || read.lock_with(AcquireOptions::new().owner(me.clone()));
    let given = lock().await.unwrap().leave_to_lease();
    let anew = [lock().await.unwrap(), lock().await.unwrap()];
    assert_eq!(read.hold_count(&anew[0].owner()).await.unwrap(), 2);
    assert_eq!(read.hold_count(&given).await.unwrap(), 1);
    assert_eq!(read.hold_count(&me).await.unwrap(), 3);
    read.release(&given).await.unwrap();
    assert_eq!(read.hold_count(&me).await.unwrap(), 2);
}

// --- what an attack found ---

type Parked<'a> = Pin<Box<dyn Future<Output = Result<Option<LockGuard>>> + Send + 'a>>;

/// Connects with a command timeout of 300 ms.
async fn hasty(proxy: &Proxy, watchdog: u64) -> LockClient {
    LockClient::builder()
        .command_timeout(ms(300))
        .watchdog_timeout(ms(watchdog))
        .connect(proxy.url())
        .await
        .unwrap()
}

/// A nested acquire is not polled any more. Its client undoes nothing, and its owner goes on:
/// whether the lease ends before the request counts as stuck, after 1.3 s, or later.
#[tokio::test]
async fn an_unpolled_acquire_next_to_a_left_hold_undoes_nothing() {
    for watchdog in [900, 30_000] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let (a, b) = (hasty(&proxy, watchdog).await, server.client().await);
        let (here, there) = (
            a.reentrant_lock("l").unwrap(),
            b.reentrant_lock("l").unwrap(),
        );
        let me = a.owner("me").unwrap();
        let mine = || AcquireOptions::new().owner(me.clone());
        let outer = here.lock_with(mine()).await.unwrap();
        proxy.once(Verb::Acquire, Action::Late(ms(30)));
        let mut nested: Parked<'_> = Box::pin(here.try_lock_with(mine()));
        assert!(poll_once(nested.as_mut()).await.is_pending());
        let given = outer.leave_to_lease();
        there.extend(&given, Duration::from_secs(60)).await.unwrap();
        eventually("it is given up", || async { a.stats().settling == 0 }).await;
        tokio::time::sleep(ms(1000)).await;
        assert_eq!(proxy.count(Verb::Release), 0, "it releases what was left");
        assert!(server.pttl("l") > 50_000);
        assert!(here.try_lock_with(mine()).await.unwrap().is_none());
        while there.release(&given).await.is_ok() {}
        let next = here.try_lock_with(mine()).await.unwrap().expect("free");
        drop(nested);
        next.unlock().await.unwrap();
        a.shutdown().await.unwrap();
        assert!(!server.exists("l"));
    }
}

/// No reply comes to what settles a hold that was left, until its lease is over.
#[tokio::test]
async fn what_was_left_in_doubt_is_not_released_after_its_lease() {
    for is_acquire in [false, true] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let (a, b) = (hasty(&proxy, 900).await, server.client().await);
        let (here, there) = (
            a.reentrant_lock("l").unwrap(),
            b.reentrant_lock("l").unwrap(),
        );
        let outer = here.lock().await.unwrap();
        let inner = here.lock().await.unwrap();
        let start = std::time::Instant::now();
        proxy.rule(move |request| match request.verb() {
            Some(Verb::Acquire | Verb::Release) if start.elapsed() < ms(1400) => Action::Swallow,
            _ => Action::Pass,
        });
        if is_acquire {
            let mut nested: Parked<'_> = Box::pin(here.try_lock_for(ms(300)));
            assert!(poll_once(nested.as_mut()).await.is_pending());
            drop(nested);
        }
        drop(inner);
        let given = outer.leave_to_lease();
        there.extend(&given, Duration::from_secs(60)).await.unwrap();
        eventually("it is given up", || async { a.stats().settling == 0 }).await;
        while start.elapsed() < ms(2500) {
            assert!(server.exists("l"), "released by its client");
            tokio::time::sleep(ms(10)).await;
        }
        assert!(server.pttl("l") > 50_000);
    }
}

/// A release by the owner's name succeeds, although it runs at the same time as the leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_at_the_same_time_as_the_leave_takes_it() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let me = a.owner("me").unwrap();
    for round in 0..1000_u64 {
        let name = format!("l{round}");
        let lock = a.reentrant_lock(&name).unwrap();
        let options = AcquireOptions::new().owner(me.clone());
        let guard = lock.lock_with(options).await.unwrap();
        let (owner, barrier) = (guard.owner(), Arc::new(Barrier::new(2)));
        let leaver = std::thread::spawn({
            let barrier = Arc::clone(&barrier);
            move || {
                barrier.wait();
                for _ in 0..(round % 40) * 5 {
                    std::hint::spin_loop();
                }
                guard.leave_to_lease()
            }
        });
        let releaser = tokio::spawn({
            let lock = lock.clone();
            async move {
                barrier.wait();
                lock.release(&owner).await
            }
        });
        releaser.await.unwrap().unwrap();
        leaver.join().unwrap();
        a.idle().await;
        let is_held = b.reentrant_lock(&name).unwrap().is_locked().await.unwrap();
        assert!(!is_held, "round {round}: the release reported success");
    }
}

/// The drop of the inner hold is settled first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_right_after_a_drop_and_a_leave_ends_it() {
    let server = Server::start();
    let a = server.client().await;
    for round in 0..200 {
        let name = format!("l{round}");
        let here = a.reentrant_lock(&name).unwrap();
        let outer = here.lock().await.unwrap();
        let inner = here.lock().await.unwrap();
        drop(inner);
        let given = outer.leave_to_lease();
        here.release(&given).await.unwrap();
        a.idle().await;
        assert!(!server.exists(&name), "round {round}");
    }
}

/// A read inside a write is in flight when the write is left: its owner is not inside any more.
#[tokio::test]
async fn a_read_in_flight_does_not_enter_a_write_that_was_left() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (
        LockClient::connect(proxy.url()).await.unwrap(),
        server.client().await,
    );
    let (rw, me) = (a.read_write_lock("l").unwrap(), a.owner("me").unwrap());
    let mine = || AcquireOptions::new().owner(me.clone());
    let write = rw.write_lock().lock_with(mine()).await.unwrap();
    proxy.once(Verb::Acquire, Action::Late(ms(200)));
    let before = proxy.count(Verb::Acquire);
    let reading = tokio::spawn({
        let (read, mine) = (rw.read_lock(), mine());
        async move { read.try_lock_with(mine).await }
    });
    eventually("it is sent", || async {
        proxy.count(Verb::Acquire) > before
    })
    .await;
    let given = write.leave_to_lease();
    let read = reading.await.unwrap();
    assert!(matches!(read, Ok(None)), "alongside {given}: {read:?}");
    a.idle().await;
    let there = b.read_write_lock("l").unwrap();
    there.write_lock().release(&given).await.unwrap();
    assert!(!server.exists("l"));
}

/// The lease ends on the server a moment later than for guards, by 1 % and 2 ms.
#[tokio::test]
async fn a_value_is_not_re_entered_before_its_lease_is_over() {
    let server = Server::start();
    let a = server.client().await;
    let lock = a.string_lock("l").unwrap();
    let value = || AcquireOptions::new().value("t").lease(ms(5000));
    let guard = lock.try_lock_with(value()).await.unwrap().unwrap();
    guard.leave_to_lease();
    tokio::time::sleep(ms(4800)).await;
    loop {
        let (at, ttl) = (std::time::Instant::now(), server.pttl("l"));
        if lock.try_lock_with(value()).await.unwrap().is_some() {
            let left = i128::from(ttl) - at.elapsed().as_millis() as i128;
            assert!(left < 10, "re-entered {left} ms before the lease's end");
            break;
        }
    }
}
