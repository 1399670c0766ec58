//! Regression tests for defects that a deliberate attack found: one test each, with the documented
//! promise that the defect broke.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, Lock, LockClient};
use tokio::sync::Notify;

use crate::support::{
    Server, eventually, poll_once,
    proxy::{Action, Proxy, Verb, Way},
    within,
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Connects a client whose watchdog timeout is 0.9 s instead of 30 s: a lease of 60 s stands for
/// one of 33 minutes.
async fn quick(proxy: &Proxy) -> LockClient {
    let builder = LockClient::builder()
        .watchdog_timeout(ms(900))
        .command_timeout(ms(300));
    builder.connect(proxy.url()).await.unwrap()
}

fn long() -> AcquireOptions {
    AcquireOptions::new().lease(Duration::from_secs(60))
}

/// Asserts that the lock becomes free within 5 s, although its lease would last for a minute.
async fn assert_free_soon(server: &Server, client: &LockClient) {
    let lock = client.reentrant_lock("l").unwrap();
    let free = lock.try_lock_for(Duration::from_secs(5)).await.unwrap();
    assert!(
        free.is_some(),
        "held without a guard for {} ms more",
        server.pttl("l")
    );
}

/// Promise: an abandoned hold is released as soon as the server takes writes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a01_a_cancelled_long_lease_acquire_is_undone_after_refusals() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (quick(&proxy).await, server.client().await);
    let here = a.reentrant_lock("l").unwrap();
    here.lock().await.unwrap().unlock().await.unwrap();
    let sent = Arc::new(Notify::new());
    let is_sent = Arc::clone(&sent);
    proxy.rule(move |request| match request.verb() {
        Some(Verb::Acquire) => {
            is_sent.notify_one();
            Action::Late(ms(60))
        }
        Some(Verb::Release) => Action::Refuse("NOREPLICAS Not enough good replicas to write."),
        _ => Action::Pass,
    });
    tokio::select! {
        biased;
        () = sent.notified() => {}
        acquired = here.lock_with(long()) => panic!("before it is sent: {acquired:?}"),
    }
    tokio::time::sleep(ms(7500)).await;
    proxy.pass();
    assert_free_soon(&server, &b).await;
}

/// Promise: the client recovers from a silent link by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a02_a_release_over_a_silent_link_is_made_good_for_any_lease() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (quick(&proxy).await, server.client().await);
    let guard = a
        .reentrant_lock("l")
        .unwrap()
        .lock_with(long())
        .await
        .unwrap();
    // The requests never reach the server, because the link is cut first.
    proxy.each(Verb::Release, Action::CutBefore);
    drop(guard);
    tokio::time::sleep(ms(7500)).await;
    proxy.pass();
    assert_free_soon(&server, &b).await;
}

/// Promise: after a reconnect, the client checks every hold and reports a loss at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a03_a_leased_hold_is_checked_again_after_a_refused_check() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = quick(&proxy).await;
    let guard = a
        .reentrant_lock("l")
        .unwrap()
        .lock_with(long())
        .await
        .unwrap();
    let mut left = 1;
    proxy.rule(move |request| {
        if request.verb() == Some(Verb::Renew) && left > 0 {
            left -= 1;
            return Action::Refuse("LOADING Redis is loading the dataset in memory");
        }
        Action::Pass
    });
    server.call(&["FLUSHALL"]);
    proxy.cut();
    within(Duration::from_secs(5), "notified of the loss", || async {
        guard.is_lost()
    })
    .await;
}

/// A bounded wait overruns its bound by at most 40 ms and one round trip, also for a value that was
/// left to its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a04_a_wait_for_a_value_that_was_left_ends_in_time() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::connect(proxy.url()).await.unwrap();
    let lock = a.string_lock("l").unwrap();
    let options = || AcquireOptions::new().value("ticket-4711");
    let _given = lock
        .try_lock_with(options())
        .await
        .unwrap()
        .unwrap()
        .leave_to_lease();
    proxy.black_hole(Way::Both);
    let start = Instant::now();
    let outcome = lock.try_lock_for_with(ms(100), options()).await;
    let took = start.elapsed();
    assert!(took < ms(600), "{took:?}: {outcome:?}");
}

/// Each hold has its own watchdog settings.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a05_an_inner_holds_renewals_do_not_count_against_the_outer() {
    let server = Server::start();
    let a = server.client().await;
    let lock = a.reentrant_lock("l").unwrap();
    let outer = AcquireOptions::new()
        .watchdog_timeout(ms(1500))
        .max_hold(ms(3500));
    let outer = lock.try_lock_with(outer).await.unwrap().unwrap();
    let start = Instant::now();
    // This hold is renewed every 50 ms.
    let inner = AcquireOptions::new().watchdog_timeout(ms(150));
    let inner = lock.try_lock_with(inner).await.unwrap().unwrap();
    tokio::time::sleep(ms(400)).await;
    inner.unlock().await.unwrap();
    outer.lost().await;
    let lived = start.elapsed();
    assert!(lived > ms(3000), "{lived:?}");
}

/// One reply that its future picked up late does not mean that the link is slow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a06_a_late_polled_future_does_not_lengthen_other_waits() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::connect(proxy.url()).await.unwrap();
    let (lock, other) = (
        a.reentrant_lock("l").unwrap(),
        a.reentrant_lock("other").unwrap(),
    );
    lock.lock().await.unwrap().unlock().await.unwrap();
    // The delay keeps the reply out of the first poll, even if this thread stalls.
    proxy.rule(|_| Action::Late(ms(50)));
    let mut parked = Box::pin(lock.lock());
    let _ = poll_once(parked.as_mut()).await;
    proxy.pass();
    tokio::time::sleep(ms(2000)).await;
    let guard = parked.await.unwrap();
    proxy.black_hole(Way::Both);
    let start = Instant::now();
    let outcome = other.try_lock_for(ms(100)).await;
    let took = start.elapsed();
    assert!(took < ms(600), "{took:?}: {outcome:?}");
    drop(guard);
}

/// Promise: each waiter keeps its place by polling. A waiter that is silent for `fair_patience`
/// loses only its own place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a07_an_outage_within_the_patience_costs_no_queue_place() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let configure = || {
        LockClient::builder()
            // a future that is not polled for longer than this loses its place
            .command_timeout(ms(2000))
            .outage_patience(Duration::from_secs(30))
            .fair_patience(Duration::from_secs(30))
    };
    let first = configure().connect(proxy.url()).await.unwrap();
    let (second, holder) = (
        configure().connect(server.url()).await.unwrap(),
        server.client().await,
    );
    let held = holder.fair_lock("l").unwrap().lock().await.unwrap();
    let (sender, mut order) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = Vec::new();
    for (name, client) in [("first", &first), ("second", &second)] {
        let (lock, sender) = (client.fair_lock("l").unwrap(), sender.clone());
        tasks.push(tokio::spawn(async move {
            let got = lock.lock().await;
            sender
                .send(got.as_ref().map(|_| name).map_err(ToString::to_string))
                .unwrap();
            let guard = got.unwrap();
            tokio::time::sleep(ms(50)).await;
            guard.unlock().await.unwrap();
        }));
        let waiting = tasks.len();
        eventually("in the queue", || async {
            server.call(&["LLEN", "redisson_lock_queue:{l}"]).int()
                == i64::try_from(waiting).unwrap()
        })
        .await;
    }
    tokio::time::sleep(ms(100)).await;
    // A poll is in flight when the link breaks.
    proxy.black_hole(Way::ToClient);
    tokio::time::sleep(ms(3000)).await;
    proxy.refuse();
    proxy.cut();
    tokio::time::sleep(ms(3500)).await;
    proxy.heal();
    tokio::time::sleep(ms(3000)).await;
    held.unlock().await.unwrap();
    assert_eq!(order.recv().await, Some(Ok("first")));
    for task in tasks {
        task.await.unwrap();
    }
}

/// Promise: a dropped guard is released, and `shutdown()` returns `Ok` only if nothing is
/// unsettled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a08_a_shutdown_awaits_a_guard_dropped_next_to_one_left() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (
        LockClient::connect(proxy.url()).await.unwrap(),
        server.client().await,
    );
    let lock = a.reentrant_lock("l").unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    let given = outer.leave_to_lease();
    // The first attempt is refused, and the next one comes 20 ms later.
    proxy.once(
        Verb::Release,
        Action::Refuse("NOREPLICAS Not enough good replicas to write."),
    );
    drop(inner);
    eventually("refused", || async { proxy.count(Verb::Release) > 0 }).await;
    a.shutdown().await.unwrap();
    let there = b.reentrant_lock("l").unwrap();
    there.release(&given).await.unwrap();
    assert!(
        !there.is_locked().await.unwrap(),
        "{:?}",
        server.record("l")
    );
}

/// A read lease stays in force after the renewed hold around it has ended, also against the
/// renewals of Redisson's readers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a09_a_read_lease_is_kept_after_the_outer_renewed_hold_ends() {
    let server = Server::start();
    let a = server
        .client_with(|builder| builder.watchdog_timeout(ms(900)))
        .await;
    let lock = a.read_write_lock("l").unwrap().read_lock();
    let outer = lock.lock().await.unwrap();
    let inner = lock.lock_with(long()).await.unwrap();
    outer.unlock().await.unwrap();
    tokio::time::sleep(ms(400)).await;
    // Redisson's renewal of another reader does this before its process dies.
    server.call(&["PEXPIRE", "l", "900"]);
    let start = Instant::now();
    while start.elapsed() < ms(2500) {
        assert!(
            server.exists("l") || inner.is_lost(),
            "the record ended after {:?}, and the guard says {:?}",
            start.elapsed(),
            inner.remaining()
        );
        tokio::time::sleep(ms(20)).await;
    }
}

/// Promise: a wait overruns its bound by at most 40 ms and one round trip, and a free lock is
/// acquired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a10_a_short_wait_gets_a_free_multi_lock_over_a_120_ms_link() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    proxy.rule(|_| Action::Late(ms(120)));
    let a = LockClient::connect(proxy.url()).await.unwrap();
    let lock = a
        .multi_lock([a.reentrant_lock("x").unwrap(), a.fair_lock("y").unwrap()])
        .unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap(); // the server knows the scripts
    let mut said = Vec::new();
    for wait in [5, 20, 50, 100] {
        match lock.try_lock_for(ms(wait)).await {
            Ok(Some(guard)) => guard.unlock().await.unwrap(),
            other => said.push(format!("{wait} ms: {other:?}")),
        }
        a.idle().await;
    }
    lock.try_lock()
        .await
        .unwrap()
        .expect("free, and a try has the time")
        .unlock()
        .await
        .unwrap();
    assert!(said.is_empty(), "{said:#?}");
}

/// Promise: `Store` means that the request was surely not executed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a11_an_unlock_amid_a_parked_re_entry_never_says_unexecuted() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder().command_timeout(ms(400));
    let a = builder.connect(proxy.url()).await.unwrap();
    let b = server.client().await;
    let lock = a.reentrant_lock("l").unwrap();
    let outer = lock.lock().await.unwrap();
    proxy.rule(|_| Action::Late(ms(20)));
    let mut parked = Box::pin(lock.lock());
    let _ = poll_once(parked.as_mut()).await;
    proxy.pass();
    tokio::time::sleep(ms(2500)).await;
    let start = Instant::now();
    let outcome = outer.unlock().await;
    let took = start.elapsed();
    let there = b.reentrant_lock("l").unwrap();
    let free = there.try_lock().await.unwrap().is_some();
    assert!(
        !matches!(outcome, Err(Error::Store { .. })) || !free,
        "{outcome:?} after {took:?}, and it is free"
    );
    drop(parked);
}

/// Promise: the client undoes what an unpolled future had sent. If the future is polled again, it
/// starts over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a12_a_future_that_is_polled_again_leaves_no_orphaned_hold() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::builder()
        .command_timeout(ms(300))
        .connect(proxy.url())
        .await
        .unwrap();
    let lock = a.reentrant_lock("l").unwrap();
    // The server does not know the script, so a second request must follow the first poll.
    proxy.rule(|_| Action::Late(ms(50)));
    let mut parked = Box::pin(lock.lock());
    let _ = poll_once(parked.as_mut()).await;
    proxy.pass();
    tokio::time::sleep(ms(2500)).await;
    a.idle().await;
    let start = Instant::now();
    let guard = tokio::time::timeout(Duration::from_secs(5), parked).await;
    assert!(
        guard.is_ok(),
        "waits for itself since {:?}: held as {:?} for {} ms more",
        start.elapsed(),
        server.record("l"),
        server.pttl("l")
    );
}

/// Promise: re-entering a lost lock fails with `Lost` while a guard of it is alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a13_reading_inside_a_write_lock_that_was_lost_is_lost() {
    let server = Server::start();
    let a = server
        .client_with(|builder| builder.watchdog_timeout(ms(600)))
        .await;
    let lock = a.read_write_lock("l").unwrap();
    let writing = lock.write().await.unwrap();
    server.call(&["FLUSHALL"]);
    eventually("notified", || async { writing.is_lost() }).await;
    let inside = lock.try_read().await;
    assert!(matches!(inside, Err(Error::Lost { .. })), "{inside:?}");
}

/// A hold that was left and then released elsewhere is forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a14_what_is_left_without_expiry_is_forgotten() {
    let server = Server::start();
    let (a, b) = (
        server
            .client_with(|builder| builder.watchdog_timeout(ms(300)))
            .await,
        server.client().await,
    );
    let endless = nestlock::SignalOptions::new().without_expiry();
    for n in 0..100 {
        let name = format!("l{n}");
        let given = a
            .signal_lock_with(&name, endless)
            .unwrap()
            .lock()
            .await
            .unwrap()
            .leave_to_lease();
        b.signal_lock_with(&name, endless)
            .unwrap()
            .release(&given)
            .await
            .unwrap();
    }
    tokio::time::sleep(ms(3000)).await;
    a.idle().await;
    assert_eq!(a.stats().holds, 0);
}

/// Promise: `shutdown()` takes two command timeouts at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a16_a_shutdown_on_a_silent_link_takes_two_timeouts_at_most() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let limit = ms(2_000);
    let a = LockClient::builder()
        .command_timeout(limit)
        .connect(proxy.url())
        .await
        .unwrap();
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    proxy.black_hole(Way::Both);
    let start = Instant::now();
    let outcome = a.shutdown().await;
    let took = start.elapsed();
    // Half a timeout is for a busy machine. A third timeout would fail.
    assert!(took < limit * 5 / 2, "{took:?}: {outcome:?}");
    drop(guard);
}

/// Promise: guards that are still alive at `shutdown()` report `LossReason::ShutDown`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a17_a_guard_next_to_one_that_is_left_learns_of_a_shutdown() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = a.reentrant_lock("l").unwrap();
    let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
    let given = outer.leave_to_lease();
    a.shutdown().await.unwrap();
    assert!(inner.is_lost(), "{inner:?}");
    let there = b.reentrant_lock("l").unwrap();
    there.release(&given).await.unwrap();
    assert!(
        !there.is_locked().await.unwrap(),
        "{:?}",
        server.record("l")
    );
}

/// Promise: `Store` means refused or unreachable, and surely not executed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a18_an_acquire_with_one_executed_try_does_not_report_none() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::connect(proxy.url()).await.unwrap();
    let lock = a.reentrant_lock("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    proxy.once(Verb::Acquire, Action::Lose);
    let end = async {
        eventually("executed", || async { !server.record("l").is_empty() }).await;
        drop(proxy); // no listener is left
    };
    let (outcome, ()) = tokio::join!(lock.try_lock_for(ms(1500)), end);
    let record = server.record("l");
    assert!(
        !matches!(outcome, Err(Error::Store { .. })) || record.is_empty(),
        "{outcome:?}, and {record:?}"
    );
}

/// Promise: `Store` means refused or unreachable, and surely not executed. This holds for a release
/// too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a19_a_release_with_one_executed_try_does_not_report_none() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::connect(proxy.url()).await.unwrap();
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    a.reentrant_lock("m")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let mut switched = false;
    proxy.rule(move |request| match request.verb() {
        Some(Verb::Release) if !std::mem::replace(&mut switched, true) => Action::Lose,
        _ => Action::CutBefore,
    });
    let outcome = guard.unlock().await;
    let record = server.record("l");
    assert!(
        !matches!(outcome, Err(Error::Store { .. })) || !record.is_empty(),
        "{outcome:?}, and it is free"
    );
}

/// Promise: after `Error::Unconfirmed`, the client settles the outcome in the background.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a20_an_unconfirmed_release_of_a_lock_that_is_left_is_settled() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (
        server
            .client_with(|builder| builder.watchdog_timeout(ms(900)))
            .await,
        quick(&proxy).await,
    );
    let given = a
        .reentrant_lock("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .leave_to_lease();
    let there = b.reentrant_lock("l").unwrap();
    proxy.once(Verb::Release, Action::CutBefore);
    let outcome = there.release(&given).await;
    assert!(
        matches!(outcome, Err(Error::Unconfirmed { .. })),
        "{outcome:?}"
    );
    b.idle().await;
    // This is three times the giver's lease.
    tokio::time::sleep(ms(2700)).await;
    let record = server.record("l");
    assert!(
        record.is_empty(),
        "{outcome:?}, and it is held, renewed by the giver: {record:?}"
    );
}

/// Promise: an acquire is retried within its wait. A short outage does not end one for a value that
/// was left to its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a21_a_wait_for_a_value_that_was_left_survives_a_refusal() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let (a, b) = (
        LockClient::connect(proxy.url()).await.unwrap(),
        server.client().await,
    );
    let lock = a.string_lock("l").unwrap();
    let options = || AcquireOptions::new().value("ticket-4711");
    let given = lock
        .try_lock_with(options())
        .await
        .unwrap()
        .unwrap()
        .leave_to_lease();
    b.string_lock("l").unwrap().release(&given).await.unwrap();
    proxy.once(
        Verb::Inspect,
        Action::Refuse("LOADING Redis is loading the dataset in memory"),
    );
    let outcome = lock
        .try_lock_for_with(Duration::from_secs(5), options())
        .await;
    assert!(matches!(outcome, Ok(Some(_))), "{outcome:?}");
}

/// Promise: no other hold is released. A release is not sent any more if its future was not polled
/// for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a22_a_release_polled_late_spares_a_later_hold_of_the_value() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::builder()
        .command_timeout(ms(300))
        .connect(proxy.url())
        .await
        .unwrap();
    let b = server.client().await;
    let lock = a.string_lock("l").unwrap();
    let options = || AcquireOptions::new().value("ticket-4711");
    let first = lock.try_lock_with(options()).await.unwrap().unwrap();
    // The server does not know the script, so a second request must follow the first poll.
    proxy.rule(|_| Action::Late(ms(50)));
    let mut parked = Box::pin(first.unlock());
    let _ = poll_once(parked.as_mut()).await;
    proxy.pass();
    tokio::time::sleep(ms(2500)).await;
    a.idle().await;
    let second = lock
        .try_lock_for_with(Duration::from_secs(2), options())
        .await
        .unwrap()
        .unwrap();
    let outcome = parked.await;
    let other = b.string_lock("l").unwrap().try_lock().await.unwrap();
    assert!(
        other.is_none() || second.is_lost(),
        "two valid guards: {second:?} and {other:?}; the release: {outcome:?}"
    );
}

/// The two kinds count differently: the inner release used to free the record under the outer hold
/// without notice.
#[tokio::test]
async fn a_fair_lock_inside_a_reentrant_one_is_refused_and_vice_versa() {
    let server = Server::start();
    let client = LockClient::connect(server.url()).await.unwrap();
    let other = LockClient::connect(server.url()).await.unwrap();
    for (outer, inner) in [
        (
            client.reentrant_lock("l").unwrap(),
            client.fair_lock("l").unwrap(),
        ),
        (
            client.fair_lock("l").unwrap(),
            client.fenced_lock("l").unwrap(),
        ),
    ] {
        let guard = outer.lock().await.unwrap();
        let refused = inner.lock().await.map(drop);
        assert!(
            matches!(refused, Err(Error::NotReentrant { .. })),
            "{refused:?}"
        );
        assert!(inner.try_lock().await.unwrap().is_none());
        assert!(
            other
                .reentrant_lock("l")
                .unwrap()
                .try_lock()
                .await
                .unwrap()
                .is_none(),
            "it is held"
        );
        guard.unlock().await.unwrap();
        inner.lock().await.unwrap().unlock().await.unwrap();
    }
}

/// One of the two is refused even if they arrive at the same moment. Both used to hold one record,
/// and the first release freed it under the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_a_fair_and_a_reentrant_acquire_at_once_is_refused() {
    let server = Server::start();
    let (client, other) = (server.client().await, server.client().await);
    for round in 0..100 {
        let name = format!("l{round}");
        let (reentrant, fair) = (
            client.reentrant_lock(&name).unwrap(),
            client.fair_lock(&name).unwrap(),
        );
        let both = if round % 2 == 0 {
            tokio::join!(reentrant.lock(), fair.lock())
        } else {
            let me = client.owner("me").unwrap();
            let take = |lock: Lock| {
                let options = AcquireOptions::new().owner(me.clone());
                tokio::spawn(async move { lock.lock_with(options).await })
            };
            let (reentrant, fair) = (take(reentrant), take(fair));
            (reentrant.await.unwrap(), fair.await.unwrap())
        };
        let (guard, refused) = match both {
            (Ok(guard), Err(refused)) | (Err(refused), Ok(guard)) => (guard, refused),
            both => panic!("{both:?}"),
        };
        assert!(matches!(refused, Error::NotReentrant { .. }), "{refused:?}");
        assert!(
            other
                .reentrant_lock(&name)
                .unwrap()
                .try_lock()
                .await
                .unwrap()
                .is_none(),
            "it is held"
        );
        guard.unlock().await.unwrap();
    }
}
