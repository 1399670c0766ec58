//! Renewal and the loss of holds: the guard reports a loss before another client can acquire the
//! lock.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{StreamExt, future::join_all, stream};
use nestlock::{AcquireOptions, Error, LockClient, LockGuard, LossReason};

use crate::support::{
    Server, came_too_late,
    child::ByHand,
    eventually,
    proxy::{Action, Proxy, Verb},
    within,
};

const MINUTE: Duration = Duration::from_secs(60);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn client(server: &Server, watchdog: Duration) -> LockClient {
    let client = server
        .client_with(|builder| builder.watchdog_timeout(watchdog))
        .await;
    client
        .reentrant_lock("warm")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    client
}

async fn hold(client: &LockClient, name: &str) -> LockGuard {
    client.reentrant_lock(name).unwrap().lock().await.unwrap()
}

/// Acquires `count` locks concurrently, as one owner.
async fn hold_many(client: &LockClient, count: usize) -> Vec<LockGuard> {
    let owner = client.owner("many").unwrap();
    let take = |n| {
        let lock = client.reentrant_lock(format!("many:{n}")).unwrap();
        let options = AcquireOptions::new().owner(owner.clone());
        tokio::spawn(async move {
            loop {
                match lock.try_lock_with(options.clone()).await {
                    Ok(guard) => break guard.expect("a free lock"),
                    // with a short watchdog timeout, the command timeout is short as well
                    Err(error) => assert!(came_too_late(&error), "{error}"),
                }
            }
        })
    };
    // without this limit, a server that shares two cores with ten tests would have to reply to all
    // of them within one command timeout
    stream::iter(0..count)
        .map(take)
        .buffered(200)
        .map(Result::unwrap)
        .collect()
        .await
}

/// Lets time pass, for scenarios that consist of elapsed time instead of an event.
async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

fn reason(error: &Error) -> LossReason {
    match error {
        Error::Lost { reason, .. } => *reason,
        other => panic!("not lost: {other}"),
    }
}

/// Measures the longest time for which threads of this process or the server were not scheduled.
struct Canary(Arc<AtomicU64>, Arc<AtomicBool>);

impl Canary {
    fn start(server: &Server) -> Self {
        let canary = Self(Arc::default(), Arc::default());
        let (worst, stop, mut wire) = (Arc::clone(&canary.0), Arc::clone(&canary.1), server.wire());
        std::thread::spawn(move || {
            while !stop.load(Ordering::Acquire) {
                let start = Instant::now();
                std::thread::sleep(ms(1));
                if wire.call(&["PING"]).is_err() {
                    return;
                }
                worst.fetch_max(start.elapsed().as_millis() as u64, Ordering::AcqRel);
            }
        });
        canary
    }

    fn worst(&self) -> Duration {
        ms(self.0.load(Ordering::Acquire))
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.1.store(true, Ordering::Release);
    }
}

/// The watchdog renews a hold every third of its timeout, so the TTL never falls far below two
/// thirds.
#[tokio::test]
async fn a_hold_is_watchdog_timeout_its_lease() {
    let server = Server::start();
    let watchdog = ms(3000);
    let client = client(&server, watchdog).await;
    let guard = hold(&client, "l").await;
    let (before, start, mut least) = (server.script_count(), Instant::now(), i64::MAX);
    while start.elapsed() < 3 * watchdog {
        least = least.min(server.pttl("l"));
        pass(ms(5)).await;
    }
    let renewals = server.script_count() - before;
    assert!(least > 1200, "the TTL fell to {least} ms of 3000");
    assert!(
        (6..=11).contains(&renewals),
        "{renewals} renewals in nine thirds"
    );
    guard.unlock().await.unwrap();
}

/// One bad record does not cost a thousand others their renewal.
#[tokio::test]
async fn r10_one_bad_record_costs_a_thousand_others_no_renewal() {
    let server = Server::start();
    let watchdog = ms(4500);
    let client = client(&server, watchdog).await;
    let guards = hold_many(&client, 1000).await;
    server.call(&["SET", "many:500", "not a lock any more"]);
    server.call(&["HSET", "many:501", "something", "else"]);
    server.call(&["DEL", "many:502"]);
    pass(2 * watchdog).await;
    let lost: Vec<usize> = (0..1000).filter(|n| guards[*n].is_lost()).collect();
    assert_eq!(lost, [500, 502]);
    assert_eq!(reason(&guards[500].lost().await), LossReason::TakenOver);
    assert_eq!(reason(&guards[502].lost().await), LossReason::RecordMissing);
    assert!(
        (0..1000)
            .filter(|n| !lost.contains(n))
            .all(|n| server.pttl(&format!("many:{n}")) > 0)
    );
}

#[tokio::test]
async fn r11_p12_after_a_failed_tick_the_next_one_renews() {
    let server = Server::start();
    let client = client(&server, ms(3000)).await;
    let guard = hold(&client, "l").await;
    // writes stall past the first tick and its timeout
    server.call(&["CLIENT", "PAUSE", "2200", "WRITE"]);
    eventually("a failed renewal and a later one", || async {
        server.pttl("l") < 1500
    })
    .await;
    eventually("renewed", || async { server.pttl("l") > 2000 }).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn r28_a_busy_server_does_not_end_the_watchdog() {
    let server = Server::start_with(&["--lua-time-limit", "20"]);
    let client = client(&server, ms(6000)).await;
    let guard = hold(&client, "l").await;
    let mut wire = server.wire();
    wire.send(&["EVAL", "while true do end", "0"]).unwrap();
    // past the first tick, which gets a BUSY reply
    pass(ms(2600)).await;
    eventually("the loop is killed", || async {
        !server.call(&["SCRIPT", "KILL"]).is_error()
    })
    .await;
    wire.read().unwrap();
    eventually("renewed", || async { server.pttl("l") > 5000 }).await;
    pass(ms(5000)).await;
    assert!(!guard.is_lost() && server.pttl("l") > 2000);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn r18_after_a_loss_the_next_hold_is_renewed() {
    let server = Server::start();
    let watchdog = ms(2_000);
    let client = client(&server, watchdog).await;
    let guard = hold(&client, "l").await;
    server.stop();
    assert_eq!(reason(&guard.lost().await), LossReason::LeaseExpired);
    server.cont();
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    let guard = hold(&client, "l").await;
    pass(3 * watchdog).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

#[tokio::test]
async fn r20_a_lock_taken_again_after_a_flush_is_renewed() {
    let server = Server::start();
    let watchdog = ms(2_000);
    let client = client(&server, watchdog).await;
    let guard = hold(&client, "l").await;
    server.call(&["FLUSHALL"]);
    assert_eq!(reason(&guard.lost().await), LossReason::RecordMissing);
    drop(guard);
    let again = hold(&client, "l").await;
    pass(3 * watchdog).await;
    assert!(!again.is_lost());
    again.unlock().await.unwrap();
    client.idle().await;
    assert_eq!(client.stats().holds, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r26_short_watchdog_timeouts_lose_nothing_under_load() {
    let server = Server::start();
    let canary = Canary::start(&server);
    let mut held = Vec::new();
    for timeout in [200, 300, 1000] {
        let client = client(&server, ms(timeout)).await;
        let busy = client.clone();
        // concurrent traffic
        let traffic = tokio::spawn(async move {
            loop {
                hold(&busy, "busy").await.unlock().await.unwrap();
            }
        });
        held.push((timeout, hold_many(&client, 20).await, traffic));
        pass(ms(1500)).await;
        let (_, guards, traffic) = held.last().unwrap();
        traffic.abort();
        let lost = guards.iter().filter(|guard| guard.is_lost()).count();
        // a loss is not the watchdog's fault if the machine stalls for more than a quarter of the
        // timeout
        assert!(
            lost == 0 || canary.worst() > ms(timeout / 4),
            "{timeout} ms: {lost} lost; threads and the server ran late by {:?} at most",
            canary.worst()
        );
        held.clear();
        server.call(&["FLUSHALL"]);
    }
}

/// Blocks all workers of the runtime that holds a lock: the record must be renewed nevertheless.
fn hold_in_blocked_runtime(runtime: &tokio::runtime::Runtime, workers: usize) {
    let server = Server::start();
    let watchdog = ms(1200);
    let guard = runtime.block_on(async { hold(&client(&server, watchdog).await, "l").await });
    for _ in 0..workers {
        runtime.spawn(async move { std::thread::sleep(4 * watchdog) });
    }
    let start = Instant::now();
    let mut least = i64::MAX;
    // a current-thread runtime has no workers, and is blocked outside of `block_on`
    while start.elapsed() < 3 * watchdog {
        least = least.min(server.pttl("l"));
        assert!(!guard.is_lost());
        std::thread::sleep(ms(5));
    }
    assert!(least > 0, "{least}");
    runtime.block_on(guard.unlock()).unwrap();
    assert!(!server.exists("l"));
}

#[test]
fn r27_f3_blocked_workers_do_not_stop_renewals() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    hold_in_blocked_runtime(&runtime, 2);
}

/// A blocked current-thread runtime does not stop renewals.
#[test]
fn r27_f3_a_blocked_current_thread_runtime_stops_no_renewals() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    hold_in_blocked_runtime(&runtime, 0);
}

/// When the runtime that reads the replies is blocked, nothing is lost.
#[test]
fn r27_f3_p11_a_blocked_reply_reading_runtime_loses_nothing() {
    let server = Server::start();
    let watchdog = ms(600);
    // the client was made on this runtime, so its replies are read there
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let connect =
        server.client_with(|builder| builder.watchdog_timeout(watchdog).poll_cap(ms(100)));
    let client = runtime.block_on(connect);
    let other = runtime.block_on(server.client());
    let guard = runtime.block_on(hold(&client, "l"));
    for _ in 0..2 {
        let blocked = runtime.spawn(async move { std::thread::sleep(2 * watchdog) });
        let own = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        own.block_on(async {
            let lock = other.reentrant_lock("l").unwrap();
            assert!(lock.try_lock_for(watchdog).await.unwrap().is_none());
            // calls from another runtime get their replies, too
            hold(&client, "m").await.unlock().await.unwrap();
        });
        runtime.block_on(blocked).unwrap();
        assert!(!guard.is_lost());
    }
    runtime.block_on(guard.unlock()).unwrap();
}

#[tokio::test]
async fn r08_partial_release_keeps_the_renewal() {
    let server = Server::start();
    let watchdog = ms(1200);
    let client = client(&server, watchdog).await;
    let first = hold(&client, "l").await;
    let (second, third) = (hold(&client, "l").await, hold(&client, "l").await);
    first.unlock().await.unwrap();
    third.unlock().await.unwrap();
    pass(3 * watchdog).await;
    assert!(!second.is_lost() && server.pttl("l") > 0);
    second.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

#[tokio::test]
async fn r13_r22_nothing_is_renewed_after_the_release_or_the_loss() {
    let server = Server::start();
    // the command timeout is a third of it: longer than this process stalls on a busy machine
    let watchdog = ms(4_500);
    let client = client(&server, watchdog).await;
    for _ in 0..20 {
        hold(&client, "l").await.unlock().await.unwrap();
    }
    let guard = hold(&client, "gone").await;
    server.call(&["DEL", "gone"]);
    guard.lost().await;
    let before = server.script_count();
    pass(2 * watchdog).await;
    assert_eq!(server.script_count(), before);
    drop(guard);
    client.idle().await;
    assert_eq!(client.stats().holds, 0);
}

#[tokio::test]
async fn r09_holds_that_end_while_a_batch_is_in_flight_harm_no_other() {
    let server = Server::start();
    let watchdog = ms(900);
    let client = client(&server, watchdog).await;
    let canary = Canary::start(&server);
    let kept = hold(&client, "kept").await;
    let start = Instant::now();
    while start.elapsed() < 4 * watchdog {
        let guards = hold_many(&client, 100).await;
        for (n, guard) in guards.into_iter().enumerate() {
            if n % 2 == 0 {
                drop(guard);
            } else {
                let _ = guard.unlock().await;
            }
        }
        assert!(
            !kept.is_lost() || canary.worst() > watchdog / 4,
            "threads ran late by {:?}",
            canary.worst()
        );
    }
    client.idle().await;
    drop(kept);
    client.idle().await;
    eventually("nothing left", || async { server.dump().is_empty() }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f40_1200_holds_cost_three_or_four_scripts_a_tick() {
    let server = Server::start();
    let watchdog = ms(6000);
    let client = client(&server, watchdog).await;
    let start = Instant::now();
    let guards = hold_many(&client, 1200).await;
    let acquired = start.elapsed();
    // the server must know the script: otherwise each of several batches in flight would be sent
    // twice
    guards[0].extend(ms(10)).await.unwrap();
    // from just before the first tick to just before the third
    tokio::time::sleep_until((start + watchdog / 3 - ms(250)).into()).await;
    let before = server.script_count();
    pass(2 * watchdog / 3).await;
    let calls = server.script_count() - before;
    println!("1200 holds, acquired within {acquired:?}: {calls} scripts in two ticks");
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    assert!(calls >= 6, "{calls}: not renewed?");
    // a watchdog pass during the acquires splits the holds into two groups, which costs one more
    // batch
    assert!(calls <= 8 || acquired > watchdog / 30, "{calls}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r06_f40_20000_holds_are_renewed_within_a_third_of_the_lease() {
    let server = Server::start();
    let watchdog = ms(18_000);
    // requests that are sent together get their replies within this time, even on a busy machine
    let client = server
        .client_with(|builder| {
            builder
                .watchdog_timeout(watchdog)
                .command_timeout(watchdog / 3)
        })
        .await;
    let start = Instant::now();
    let guards = hold_many(&client, 20_000).await;
    let acquired = start.elapsed();
    // every hold has been renewed once: its remaining time rises again
    within(watchdog, "one round", || {
        let fresh = guards.iter().all(|guard| guard.remaining() > ms(100));
        let renewed = start.elapsed() > acquired + watchdog / 3 + ms(500);
        async move {
            assert!(fresh, "a hold was close to its end");
            renewed
        }
    })
    .await;
    let least = guards.iter().map(LockGuard::remaining).min().unwrap();
    println!("20000 holds, acquired within {acquired:?}: {least:?} of {watchdog:?} left at least");
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    assert!(least > watchdog / 3, "{least:?}");
    client.shutdown().await.unwrap();
    std::mem::drop(guards);
}

#[tokio::test]
async fn a_lease_is_never_renewed() {
    let server = Server::start();
    let client = client(&server, ms(300)).await;
    let lock = client.reentrant_lock("l").unwrap();
    let start = Instant::now();
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(ms(1000)))
        .await
        .unwrap()
        .unwrap();
    let before = server.script_count();
    let mut last = i64::MAX;
    while !guard.is_lost() {
        let ttl = server.pttl("l");
        assert!(ttl <= last, "the TTL rose from {last} to {ttl}");
        last = ttl;
    }
    assert_eq!(reason(&guard.lost().await), LossReason::LeaseExpired);
    let lost = start.elapsed();
    assert!(lost >= ms(900) && lost < ms(4000), "{lost:?}");
    eventually("the record ends", || async { !server.exists("l") }).await;
    assert!(start.elapsed() >= lost);
    // at most one script: the client deletes the record of a lost hold
    assert!(
        server.script_count() <= before + 1,
        "{}",
        server.script_count() - before
    );
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LossReason::LeaseExpired,
            ..
        })
    ));
}

/// Ends all holds by `end_them`, and checks that each guard is already lost when `next` acquires
/// its lock.
async fn nobody_acquires_before_the_loss_is_known(
    guards: Vec<LockGuard>,
    next: &LockClient,
    end_them: impl FnOnce(),
    limit: Duration,
) {
    let waiters: Vec<_> = guards
        .into_iter()
        .map(|guard| {
            let lock = next.reentrant_lock(guard.name()).unwrap();
            tokio::spawn(async move {
                let theirs = lock.lock().await.unwrap();
                // no await since the reply arrived, so the guard could not learn of its loss after
                // it
                let known = guard.is_lost() && guard.remaining().is_zero();
                guard.lost().await;
                theirs.unlock().await.unwrap();
                known
            })
        })
        .collect();
    end_them();
    let all = async {
        let mut late = 0;
        for waiter in waiters {
            late += usize::from(!waiter.await.unwrap());
        }
        late
    };
    let late = tokio::time::timeout(limit, all)
        .await
        .expect("the next holders");
    assert_eq!(late, 0, "acquired by another client before its holder knew");
}

/// The end of a lease is known before any other client can acquire.
#[tokio::test]
async fn r27_a_lease_end_is_known_before_another_client_can_acquire() {
    let server = Server::start();
    let (a, b) = (
        client(&server, ms(3000)).await,
        server.client_with(|builder| builder.poll_cap(ms(50))).await,
    );
    let mut held = 0;
    for _ in 0..5 {
        let mut guards = Vec::new();
        for n in 0..20 {
            let lock = a.reentrant_lock(format!("l{n}")).unwrap();
            match lock
                .try_lock_with(AcquireOptions::new().lease(ms(200 + n)))
                .await
            {
                Ok(guard) => guards.extend(guard),
                // with so short a lease, the reply may arrive after its end
                Err(error) => assert!(came_too_late(&error), "{error}"),
            }
        }
        held += guards.len();
        nobody_acquires_before_the_loss_is_known(guards, &b, || {}, MINUTE).await;
    }
    assert!(held >= 50, "{held}");
}

/// When the server hangs past the lease, the holder knows of its loss before any other client can
/// acquire.
#[tokio::test]
async fn f6_a_hang_past_the_lease_is_known_before_the_next_acquire() {
    let server = Server::start();
    let (a, b) = (
        client(&server, ms(900)).await,
        server.client_with(|builder| builder.poll_cap(ms(50))).await,
    );
    for _ in 0..3 {
        let guards = hold_many(&a, 20).await;
        let hang = || {
            server.stop();
            std::thread::sleep(ms(1100)); // while it hangs, beyond the lease
            server.cont();
        };
        nobody_acquires_before_the_loss_is_known(guards, &b, hang, MINUTE).await;
        a.idle().await;
    }
}

#[tokio::test]
async fn f6_a_server_that_hangs_for_less_than_the_lease_costs_nothing() {
    let server = Server::start();
    let client = client(&server, ms(6000)).await;
    let guards = hold_many(&client, 20).await;
    server.stop();
    std::thread::sleep(ms(3000)); // while it hangs, half of the lease
    server.cont();
    pass(ms(6000)).await;
    assert!(guards.iter().all(|guard| !guard.is_lost()));
    for guard in guards {
        guard.unlock().await.unwrap();
    }
}

/// Renewals that are forbidden end in a loss that is known in time.
#[tokio::test]
async fn f28_forbidden_renewals_end_in_a_loss_that_is_known_in_time() {
    let server = Server::start_real();
    let rights = |rights: &[&str]| {
        let reply = server.call(
            &[
                &["ACL", "SETUSER", "u", "on", ">p", "~*", "allchannels"],
                rights,
            ]
            .concat(),
        );
        assert!(!reply.is_error(), "{reply:?}");
    };
    rights(&["+@all"]);
    // a third of it is enough for the replies to 200 concurrent acquires, even on a busy machine
    let builder = LockClient::builder().watchdog_timeout(ms(6_000));
    let a = builder
        .connect(format!("redis://u:p@{}", server.addr()))
        .await
        .unwrap();
    let b = server.client_with(|builder| builder.poll_cap(ms(50))).await;
    // denies the request as a whole, then the script's command for each lock
    for forbidden in [&["-evalsha", "-eval"][..], &["-pexpire"]].repeat(2) {
        rights(&["+@all"]);
        let guards = hold_many(&a, 200).await;
        nobody_acquires_before_the_loss_is_known(guards, &b, || rights(forbidden), MINUTE).await;
    }
}

/// A record that is gone or taken is reported within a tick.
#[tokio::test]
async fn r17_f16_f17_a_gone_or_taken_record_is_reported_within_a_tick() {
    let server = Server::start();
    let watchdog = ms(900);
    let client = client(&server, watchdog).await;
    type Harm = fn(&Server);
    let harms: [(&str, Harm, LossReason); 5] = [
        (
            "DEL",
            |server| drop(server.call(&["DEL", "l"])),
            LossReason::RecordMissing,
        ),
        (
            "FLUSHALL",
            |server| drop(server.call(&["FLUSHALL"])),
            LossReason::RecordMissing,
        ),
        (
            "taken over",
            |server| drop(ByHand::hold(server, "l", MINUTE)),
            LossReason::TakenOver,
        ),
        (
            "a string",
            |server| drop(server.call(&["SET", "l", "x"])),
            LossReason::TakenOver,
        ),
        (
            "shortened",
            |server| drop(server.call(&["PEXPIRE", "l", "1"])),
            LossReason::RecordMissing,
        ),
    ];
    for (what, harm, wanted) in harms {
        let guard = hold(&client, "l").await;
        harm(&server);
        let start = Instant::now();
        assert_eq!(reason(&guard.lost().await), wanted, "{what}");
        let took = start.elapsed();
        assert!(
            took < watchdog / 3 + watchdog / 3 + ms(1000),
            "{what}: {took:?}"
        );
        let Err(error) = guard.unlock().await else {
            panic!("{what}: released")
        };
        assert_eq!(reason(&error), wanted, "{what}");
        server.call(&["DEL", "l"]);
    }
    client.idle().await;
    assert_eq!(client.stats().holds, 0);
}

#[tokio::test]
async fn a_record_without_a_ttl_stays_held_and_is_released() {
    let server = Server::start();
    let watchdog = ms(1200);
    let client = client(&server, watchdog).await;
    let guard = hold(&client, "l").await;
    server.call(&["PERSIST", "l"]);
    pass(3 * watchdog).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

/// The remaining time only falls between renewals, and is never more than the server gives.
#[tokio::test]
async fn s2_n7_the_time_left_falls_between_renewals_within_the_ttl() {
    let server = &Server::start();
    // a third of it exceeds the delays of this process on a busy machine plus the late replies
    let watchdog = ms(4_800);
    // prompt replies, then replies so late that a lease counted from the reply would be too long
    let looks = [None, Some(watchdog / 4)].map(|late| async move {
        let proxy = Proxy::start(server);
        let builder = LockClient::builder().watchdog_timeout(watchdog);
        let client = builder.connect(proxy.url()).await.unwrap();
        let name = format!("{late:?}");
        let guard = hold(&client, &name).await;
        if let Some(late) = late {
            proxy.each(Verb::Renew, Action::Late(late));
        }
        let mut wire = server.wire();
        let (mut last, mut rises) = (Duration::MAX, 0);
        let start = Instant::now();
        while start.elapsed() < 4 * watchdog {
            let before = wire.call(&["PTTL", &name]).unwrap().int();
            let (asked, remaining) = (Instant::now(), guard.remaining());
            let after = wire.call(&["PTTL", &name]).unwrap().int();
            // a renewal may have come in between, so the true TTL at that moment is at most the
            // larger of the two
            let truth = before.max(after + asked.elapsed().as_millis() as i64 + 1);
            assert!(
                remaining.as_millis() as i64 <= truth,
                "{late:?}: {remaining:?} where the server gives {truth} ms"
            );
            assert!(remaining <= watchdog);
            rises += u32::from(remaining > last);
            last = remaining;
            pass(ms(1)).await;
        }
        assert!(
            (6..=14).contains(&rises),
            "{late:?}: rose {rises} times in twelve thirds"
        );
        proxy.pass();
        guard.unlock().await.unwrap();
    });
    join_all(looks).await;
}

#[tokio::test]
async fn a_renewal_never_shortens_an_extension() {
    let server = Server::start();
    let watchdog = ms(600);
    let client = client(&server, watchdog).await;
    let guard = hold(&client, "l").await;
    guard.extend(MINUTE).await.unwrap();
    pass(4 * watchdog).await;
    assert!(server.pttl("l") > 55_000 && guard.remaining() > ms(55_000));
    // a PEXPIRE by hand is not shortened either
    server.call(&["PEXPIRE", "l", "600000"]);
    pass(2 * watchdog).await;
    assert!(server.pttl("l") > 590_000);
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

#[tokio::test]
async fn a_loss_is_final_even_if_an_extension_is_confirmed_late() {
    for unlock in [true, false] {
        let server = Server::start();
        let client = server.client().await;
        let lock = client.reentrant_lock("l").unwrap();
        let guard = lock
            .try_lock_with(AcquireOptions::new().lease(ms(300)))
            .await
            .unwrap()
            .unwrap();
        // the record must still exist when the server resumes
        server.call(&["PEXPIRE", "l", "60000"]);
        server.stop();
        let owner = guard.owner();
        let mut extension = pin!(lock.extend(&owner, 10 * MINUTE));
        let pending = std::future::poll_fn(|cx| {
            std::task::Poll::Ready(extension.as_mut().poll(cx).is_pending())
        });
        assert!(pending.await);
        assert_eq!(reason(&guard.lost().await), LossReason::LeaseExpired);
        // the guard is dropped or unlocked before the reply to the extension arrives
        if unlock {
            assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
        } else {
            drop(guard);
        }
        server.cont();
        let _ = extension.await;
        // no guard is left, so the record must not live for the extended 10 minutes
        eventually("released", || async { !server.exists("l") }).await;
        client.idle().await;
        assert_eq!(client.stats().holds, 0);
    }
}

#[tokio::test]
async fn a_guard_that_was_lost_once_stays_lost() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(ms(300)))
        .await
        .unwrap()
        .unwrap();
    server.call(&["PEXPIRE", "l", "60000"]);
    server.stop();
    let owner = guard.owner();
    let mut extension = pin!(lock.extend(&owner, 10 * MINUTE));
    let pending =
        std::future::poll_fn(|cx| std::task::Poll::Ready(extension.as_mut().poll(cx).is_pending()));
    assert!(pending.await);
    guard.lost().await;
    server.cont();
    assert!(extension.await.is_err(), "extended what was reported lost");
    assert!(guard.is_lost());
    // a re-entry does not revive it either
    let again = lock.lock().await;
    assert!(guard.is_lost());
    drop((again, guard));
    client.idle().await;
    eventually("released", || async { !server.exists("l") }).await;
}

/// The record ends at the maximum hold time at the latest, and the guard reports it before that.
#[tokio::test]
async fn a_lock_is_held_for_its_maximum_hold_time_and_no_longer() {
    let server = Server::start();
    let client = client(&server, ms(600)).await;
    let lock = client.reentrant_lock("l").unwrap();
    let start = Instant::now();
    let options = AcquireOptions::new().max_hold(ms(2_000));
    let guard = lock.lock_with(options).await.unwrap();
    let granted = Instant::now();
    while !guard.is_lost() {
        // in this order: a pause between the two makes the sum smaller
        let end = granted.elapsed() + guard.remaining();
        assert!(end <= ms(2_000), "{end:?}");
        tokio::time::sleep(ms(20)).await;
    }
    let lived = start.elapsed();
    assert!(lived > ms(1_900), "it is renewed up to then: {lived:?}");
    let lost = tokio::time::timeout(MINUTE, guard.lost()).await.unwrap();
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            }
        ),
        "{lost}"
    );
    drop(guard);
    let next = lock.try_lock_for(MINUTE).await.unwrap();
    next.expect("it ends").unlock().await.unwrap();
}

/// A maximum hold time shortens a longer lease, and the default one.
#[tokio::test]
async fn a_maximum_hold_time_shortens_a_longer_lease() {
    let server = Server::start();
    let client = client(&server, MINUTE).await;
    let lock = client.reentrant_lock("l").unwrap();
    let string = client.string_lock("s").unwrap();
    for lock in [&lock, &string] {
        for options in [
            AcquireOptions::new(),
            AcquireOptions::new().lease(ms(30_000)),
            AcquireOptions::new().watchdog_timeout(ms(30_000)),
        ] {
            let guard = lock.lock_with(options.max_hold(ms(9_000))).await.unwrap();
            let ttl = server.pttl(lock.name());
            assert!((1..=9_000).contains(&ttl), "{}: {ttl}", lock.name());
            assert!(guard.remaining() <= ms(9_000));
            guard.unlock().await.unwrap();
        }
    }
    let refused = lock
        .lock_with(AcquireOptions::new().max_hold(Duration::ZERO))
        .await;
    assert!(
        matches!(refused, Err(Error::InvalidLease { .. })),
        "{refused:?}"
    );
    assert!(!server.exists("l"));
}

/// An inner hold whose time is over does not shorten the period in which the outer one is renewed.
#[tokio::test]
async fn a_maximum_hold_time_that_is_over_causes_no_renewals() {
    let server = Server::start();
    let client = client(&server, ms(30_000)).await;
    let lock = client.reentrant_lock("l").unwrap();
    let outer = lock.lock().await.unwrap();
    let options = AcquireOptions::new().max_hold(ms(10));
    let inner = lock.lock_with(options).await.unwrap();
    tokio::time::sleep(ms(200)).await;
    let before = server.script_count();
    tokio::time::sleep(ms(1_000)).await;
    let renewals = server.script_count() - before;
    assert!(renewals <= 2, "{renewals} renewals in 1 s");
    drop((inner, outer));
}

/// Renewals wait for their turn while others are in flight, and are sent later than planned.
#[tokio::test]
async fn a_late_renewal_does_not_exceed_the_maximum_hold_time() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .connect(proxy.url())
        .await
        .unwrap();
    // Three scripts: more than are in flight at once.
    let read_write = client.read_write_lock("three").unwrap();
    let others = [
        client.reentrant_lock("one").unwrap(),
        client.fair_lock("two").unwrap(),
        read_write.write_lock(),
    ];
    let mut guards = Vec::new();
    for lock in &others {
        guards.push(lock.lock().await.unwrap());
    }
    tokio::time::sleep(ms(75)).await;
    let options = AcquireOptions::new().max_hold(ms(4_200));
    let lock = client.string_lock("s").unwrap();
    let guard = lock.lock_with(options).await.unwrap();
    let granted = Instant::now();
    proxy.each(Verb::Renew, Action::Late(ms(750)));
    while !guard.is_lost() {
        // in this order: a pause between the two makes the sum smaller
        let end = granted.elapsed() + guard.remaining();
        assert!(end <= ms(4_200), "{end:?}");
        tokio::time::sleep(ms(10)).await;
    }
    drop(guards);
}
