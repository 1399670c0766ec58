//! Many waiters: their cost, and that each of them gets the lock or an error in time.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{AcquireOptions, Error, LockClient, StoreErrorKind};
use rand::{Rng, seq::SliceRandom};
use tokio::task::JoinHandle;

use crate::support::{
    Server,
    child::{ByHand, Worker, channel},
    eventually,
    proxy::{Action, Proxy, Verb},
};

/// A poll interval far beyond each test's timeout, so that a missed wake-up shows.
const NEVER: Duration = Duration::from_secs(60);
/// A wake-up arrives within this time.
const PROMPT: Duration = Duration::from_secs(15);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn patient_client(server: &Server) -> LockClient {
    let client = server.client_with(|builder| builder.poll_cap(NEVER)).await;
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

fn waiters(client: &LockClient, lock: &str, count: usize) -> Vec<JoinHandle<()>> {
    (0..count)
        .map(|_| {
            let lock = client.reentrant_lock(lock).unwrap();
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        })
        .collect()
}

async fn all_end(what: &str, limit: Duration, tasks: Vec<JoinHandle<()>>) {
    let all = async {
        for task in tasks {
            task.await.expect("a task that does not fail");
        }
    };
    tokio::time::timeout(limit, all)
        .await
        .unwrap_or_else(|_| panic!("not within {limit:?}: {what}"));
}

async fn tries(server: &Server, before: u64, count: u64) {
    eventually(&format!("{count} tries"), || async {
        server.script_count() >= before + count
    })
    .await;
}

/// Parks waiters of several clients at one lock, frees it, and returns the total number of scripts
/// per hold.
async fn scripts_per_hold(clients: usize, each: usize) -> f64 {
    let server = Server::start();
    let mut many = Vec::new();
    for _ in 0..clients {
        many.push(patient_client(&server).await);
    }
    let other = ByHand::hold(&server, "l", 10 * NEVER);
    let before = server.script_count();
    let tasks: Vec<_> = many
        .iter()
        .flat_map(|client| waiters(client, "l", each))
        .collect();
    tries(&server, before, (clients * each) as u64).await;
    let start = Instant::now();
    other.release();
    all_end("all waiters", 2 * PROMPT, tasks).await;
    let scripts = (server.script_count() - before) as f64 / (clients * each) as f64;
    println!(
        "{clients} x {each} waiters: {scripts:.3} scripts per hold, drained in {:?}",
        start.elapsed()
    );
    assert!(!server.exists("l"));
    scripts
}

#[tokio::test]
async fn a_thousand_waiters_of_one_client_cost_three_scripts_each() {
    let scripts = scripts_per_hold(1, 1000).await;
    assert!(scripts <= 3.1, "{scripts}");
}

/// A thousand waiters of four clients cost one more try for each client.
#[tokio::test]
async fn a_release_to_1000_waiters_costs_one_more_try_per_client() {
    // each release wakes one waiter of each client
    let scripts = scripts_per_hold(4, 250).await;
    assert!(scripts <= 3.0 + 4.0, "{scripts}");
}

/// Waiters that are cancelled at random take no wake-up with them.
#[tokio::test]
async fn r87_waiters_cancelled_at_random_take_no_wake_up_along() {
    let server = Server::start();
    let client = patient_client(&server).await;
    for round in 0..5 {
        let name = format!("l{round}");
        let other = ByHand::hold(&server, &name, NEVER);
        let before = server.script_count();
        let mut tasks = waiters(&client, &name, 200);
        tries(&server, before, 200).await;
        tasks.shuffle(&mut rand::rng());
        let cancelled = tasks.split_off(100);
        other.release();
        for task in &cancelled {
            task.abort();
            tokio::time::sleep(Duration::from_micros(rand::rng().random_range(0..200))).await;
        }
        all_end("the waiters that were not cancelled", PROMPT, tasks).await;
        let mut in_time = 0;
        for task in cancelled {
            // some got the lock before the cancellation
            in_time += usize::from(task.await.is_err_and(|error| error.is_cancelled()));
        }
        assert!(in_time > 0, "no waiter was cancelled while it waited");
        client.idle().await;
        assert!(!server.exists(&name));
    }
    eventually("nothing left", || async {
        let stats = client.stats();
        (stats.holds, stats.channels, stats.settling) == (0, 0, 0)
    })
    .await;
}

#[tokio::test]
async fn r87_cancelled_waiters_leave_no_permits_behind() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let other = ByHand::hold(&server, "l", 10 * NEVER);
    let before = server.script_count();
    let staying = waiters(&client, "l", 5);
    let leaving = waiters(&client, "l", 50);
    tries(&server, before, 56).await;
    // message `1` wakes all waiters while most of them leave
    server.call(&["PUBLISH", &channel("l"), "1"]);
    leaving.iter().for_each(JoinHandle::abort);
    for task in leaving {
        assert!(task.await.unwrap_err().is_cancelled());
    }
    // all permits are used up: from here on, each message wakes exactly one waiter
    let mut expected = before;
    eventually("quiet", || {
        let now = server.script_count();
        let quiet = now == std::mem::replace(&mut expected, now);
        async move {
            tokio::time::sleep(ms(100)).await;
            quiet
        }
    })
    .await;
    for _ in 0..5 {
        server.call(&["PUBLISH", &channel("l"), "0"]);
        expected += 1;
        tries(&server, 0, expected).await;
    }
    assert_eq!(server.script_count(), expected);
    other.release();
    all_end("the waiters that stayed", PROMPT, staying).await;
}

#[tokio::test]
async fn r90_a_shutdown_turns_waiters_away_with_a_typed_error() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let _other = ByHand::hold(&server, "l", NEVER);
    let before = server.script_count();
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let lock = client.reentrant_lock("l").unwrap();
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    tries(&server, before, 51).await;
    client.shutdown().await.unwrap();
    for task in tasks {
        let outcome = tokio::time::timeout(PROMPT, task)
            .await
            .expect("turned away")
            .unwrap();
        assert!(matches!(outcome, Err(Error::Closed)), "{outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r76_fifty_tasks_of_two_clients_never_stall() {
    let server = Server::start();
    let clients = [patient_client(&server).await, patient_client(&server).await];
    let start = Instant::now();
    let (last, worst, holds) = (
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
        Arc::new(AtomicU64::new(0)),
    );
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let client = clients[n % 2].clone();
            let (last, worst, holds) = (Arc::clone(&last), Arc::clone(&worst), Arc::clone(&holds));
            tokio::spawn(async move {
                while start.elapsed() < Duration::from_secs(4) {
                    let pause = ms(rand::rng().random_range(0..3));
                    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
                    let now = start.elapsed().as_millis() as u64;
                    worst.fetch_max(now - last.swap(now, Ordering::AcqRel), Ordering::AcqRel);
                    holds.fetch_add(1, Ordering::AcqRel);
                    guard.unlock().await.unwrap();
                    tokio::time::sleep(pause).await;
                }
            })
        })
        .collect();
    all_end("50 tasks", 2 * PROMPT, tasks).await;
    println!(
        "{} holds, the longest gap {} ms",
        holds.load(Ordering::Acquire),
        worst.load(Ordering::Acquire)
    );
    assert!(worst.load(Ordering::Acquire) < 2000);
    assert!(holds.load(Ordering::Acquire) > 100);
}

/// Parked waiters cost no processor time, and one script per poll cap.
#[tokio::test]
async fn r78_l7_parked_waiters_cost_no_cpu_and_a_script_per_poll_cap() {
    let server = Server::start();
    let _knows_the_scripts = patient_client(&server).await;
    let mut worker = Worker::start(&server, Duration::from_secs(30), Duration::from_secs(1));
    let _other = ByHand::hold(&server, "l", NEVER);
    let before = server.script_count();
    worker.ask("wait l 200");
    assert_eq!(worker.answer(), "waiting");
    tries(&server, before, 201).await;
    let (scripts, cpu, start) = (server.script_count(), worker.cpu(), Instant::now());
    eventually("three seconds", || async {
        start.elapsed() > Duration::from_secs(3)
    })
    .await;
    let (scripts, cpu, took) = (
        server.script_count() - scripts,
        worker.cpu() - cpu,
        start.elapsed(),
    );
    println!("200 waiters parked for {took:?}: {scripts} scripts, {cpu:?} of processor time");
    assert!(scripts <= took.as_secs() + 3, "{scripts}");
    assert!(cpu < ms(600), "{cpu:?}");
}

#[tokio::test]
async fn r59_a_wait_ends_at_its_bound() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let _other = ByHand::hold(&server, "l", NEVER);
    for wait in [0, 50, 300, 1000, 1500].map(ms) {
        let start = Instant::now();
        let outcome = client.reentrant_lock("l").unwrap().try_lock_for(wait).await;
        let took = start.elapsed();
        assert!(matches!(outcome, Ok(None)), "{wait:?}: {outcome:?}");
        assert!(
            took >= wait && took < wait + Duration::from_secs(2),
            "{wait:?}: {took:?}"
        );
    }
}

#[tokio::test]
async fn r104_a_wait_ends_at_its_bound_while_the_server_is_away() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let wait = ms(700);
    for hang in [true, false] {
        if hang {
            server.stop();
        } else {
            server.kill();
        }
        let start = Instant::now();
        let outcome = client.reentrant_lock("l").unwrap().try_lock_for(wait).await;
        let took = start.elapsed();
        assert!(outcome.is_err(), "{outcome:?}");
        assert!(
            took >= wait && took < wait + Duration::from_secs(2),
            "hang {hang}: {took:?}"
        );
        if hang {
            server.cont();
        }
    }
}

#[tokio::test]
async fn r104_a_waiter_whose_server_goes_away_leaves_at_its_bound() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let _other = ByHand::hold(&server, "l", NEVER);
    let before = server.script_count();
    let lock = client.reentrant_lock("l").unwrap();
    let start = Instant::now();
    let waiter = tokio::spawn(async move { lock.try_lock_for(ms(1500)).await });
    tries(&server, before, 2).await;
    server.stop();
    let outcome = waiter.await.unwrap();
    let took = start.elapsed();
    assert!(!matches!(outcome, Ok(Some(_))));
    assert!(took >= ms(1500) && took < ms(4000), "{took:?}");
}

#[tokio::test]
async fn waiters_of_a_dead_holder_get_the_lock_when_its_ttl_is_over() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let ttl = ms(1200);
    let start = Instant::now();
    let _other = ByHand::hold(&server, "l", ttl);
    let before = server.script_count();
    let tasks = waiters(&client, "l", 20);
    let lock = client.reentrant_lock("l").unwrap();
    let first = lock.lock().await.unwrap();
    let took = start.elapsed();
    assert!(
        took >= ttl && took < ttl + Duration::from_secs(3),
        "{took:?}"
    );
    first.unlock().await.unwrap();
    all_end("20 waiters", PROMPT, tasks).await;
    assert!(server.script_count() - before < 21 * 4);
}

/// Waiters get the lock one by one where no holder ever unlocks.
#[tokio::test]
async fn r58_p7_waiters_get_a_never_unlocked_lock_one_by_one() {
    let server = Server::start();
    let client = server.client().await;
    let start = Instant::now();
    let tasks: Vec<_> = (0..5)
        .map(|_| {
            let lock = client.reentrant_lock("l").unwrap();
            tokio::spawn(async move {
                let options = AcquireOptions::new().lease(ms(400));
                let guard = lock.lock_with(options).await.unwrap();
                guard.lost().await;
            })
        })
        .collect();
    // each lease, and one poll cap as an expiry sends no message
    all_end(
        "5 waiters",
        5 * (ms(400) + Duration::from_secs(1)) + PROMPT,
        tasks,
    )
    .await;
    assert!(start.elapsed() > 4 * ms(390));
}

/// A waiter whose time is over when it is woken passes the wake-up on.
#[tokio::test]
async fn a_waiter_woken_when_its_time_is_over_passes_the_wake_up_on() {
    let server = Server::start();
    let client = patient_client(&server).await;
    for round in 0..20 {
        let name = format!("l{round}");
        let other = ByHand::hold(&server, &name, NEVER);
        let before = server.script_count();
        let brief: Vec<_> = (0..30)
            .map(|n| {
                let lock = client.reentrant_lock(&name).unwrap();
                tokio::spawn(async move { drop(lock.try_lock_for(ms(60) + n * ms(1)).await) })
            })
            .collect();
        let long = waiters(&client, &name, 1);
        tries(&server, before, 31).await;
        let moment = ms(rand::rng().random_range(0..60));
        tokio::time::sleep(moment).await;
        other.release();
        all_end(&format!("the patient one, round {round}"), PROMPT, long).await;
        all_end("the brief ones", PROMPT, brief).await;
    }
}

#[tokio::test]
async fn a_waiter_dropped_with_a_wake_up_in_hand_passes_it_on() {
    let server = Server::start();
    let client = patient_client(&server).await;
    for round in 0..20 {
        let name = format!("l{round}");
        let other = ByHand::hold(&server, &name, NEVER);
        let before = server.script_count();
        let lock = client.reentrant_lock(&name).unwrap();
        let behind = {
            let mut first = pin!(lock.lock());
            // the first in the queue: waits, is woken, and is not polled any more
            let parked = tokio::time::timeout(ms(30), first.as_mut()).await;
            assert!(parked.is_err());
            let behind = waiters(&client, &name, 1);
            tries(&server, before, 2).await;
            other.release();
            // its wake-up may have arrived by now, or not
            tokio::time::sleep(ms(round % 4)).await;
            behind
        };
        all_end("the one behind", PROMPT, behind).await;
    }
}

/// After a refusal, the next waiter would only meet the same server, and so would all others: whether
/// a poll or a message led to it. If the refusal ends the call, the next waiter gets its own answer.
#[tokio::test]
async fn a_refusal_sends_no_other_waiter_after_it() {
    const WAITERS: usize = 300;
    for (refusal, is_final) in [
        (
            "OOM command not allowed when used memory > 'maxmemory'.",
            false,
        ),
        (
            "NOPERM this user has no permissions to run the 'evalsha' command",
            true,
        ),
    ] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let builder = LockClient::builder().poll_cap(ms(400));
        let client = builder.connect(proxy.url()).await.unwrap();
        let other = server.client().await;
        let held = other.mutex("l").unwrap().lock().await.unwrap();
        let waiters: Vec<_> = (0..WAITERS)
            .map(|_| {
                let lock = client.mutex("l").unwrap();
                tokio::spawn(async move { lock.lock().await?.unlock().await })
            })
            .collect();
        eventually("they wait", || async { client.stats().waiters == WAITERS }).await;
        let asleep = || async {
            let tries = server.script_count();
            tokio::time::sleep(ms(100)).await;
            server.script_count() == tries
        };
        eventually("they sleep", asleep).await;
        let refused = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&refused);
        proxy.rule(move |request| {
            if !request.is_script() {
                return Action::Pass;
            }
            count.fetch_add(1, Ordering::SeqCst);
            Action::Refuse(refusal)
        });
        server.call(&["PUBLISH", &channel("l"), "0"]);
        tokio::time::sleep(ms(1_500)).await;
        let scripts = refused.load(Ordering::SeqCst);
        let most = if is_final { WAITERS } else { WAITERS / 3 };
        assert!(
            scripts > 0 && scripts <= most,
            "{refusal}: {scripts} scripts"
        );
        proxy.pass();
        held.unlock().await.unwrap();
        let mut failed = 0;
        for waiter in waiters {
            failed += usize::from(waiter.await.unwrap().is_err());
        }
        let expected = if is_final { WAITERS } else { 0 };
        assert_eq!(failed, expected, "{refusal}");
    }
}

/// A waiter that cannot be served, for a reason of its own, does not keep the wake-up from the next.
#[tokio::test]
async fn a_failure_of_ones_own_passes_the_wake_up_on() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder().poll_cap(NEVER).outage_patience(NEVER);
    let client = builder.connect(proxy.url()).await.unwrap();
    let other = server.client().await;
    let has_waiters = async |count| {
        eventually("they wait", || async { client.stats().waiters == count }).await;
        eventually("they listen", || async { !server.channels().is_empty() }).await;
    };

    // its token's key is damaged
    let held = other.mutex("l").unwrap().lock().await.unwrap();
    let fenced = client.fenced_lock("l").unwrap();
    let fails = tokio::spawn(async move { fenced.lock().await.map(drop) });
    has_waiters(1).await;
    let next = waiters(&client, "l", 1);
    has_waiters(2).await;
    server.call(&["SET", "redisson_lock_token:{l}", "rubbish"]);
    held.unlock().await.unwrap();
    all_end("the next waiter", PROMPT, next).await;
    let error = fails.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");

    // its lease is shorter than a round trip
    let held = other.mutex("l").unwrap().lock().await.unwrap();
    let brief = client.mutex("l").unwrap();
    let lease = AcquireOptions::new().lease(ms(40));
    let fails = tokio::spawn(async move { brief.lock_with(lease).await.map(drop) });
    has_waiters(1).await;
    let next = waiters(&client, "l", 1);
    has_waiters(2).await;
    proxy.each(Verb::Acquire, Action::Late(ms(80)));
    held.unlock().await.unwrap();
    all_end("the next waiter", PROMPT, next).await;
    fails.abort();
}

/// The last attempt has time for its reply, which says what is wrong.
#[tokio::test]
async fn a_long_refusal_is_reported_as_such() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder().outage_patience(ms(600));
    let client = builder.connect(proxy.url()).await.unwrap();
    let oom = "OOM command not allowed when used memory > 'maxmemory'.";
    proxy.rule(move |request| {
        if request.is_script() {
            Action::Refuse(oom)
        } else {
            Action::Pass
        }
    });
    let refused = (0..40).map(|n| client.mutex(format!("l:{n}")).unwrap());
    let refused = refused.map(|lock| async move { lock.lock().await.unwrap_err() });
    for error in join_all(refused).await {
        let Error::Store { source, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(source.kind(), StoreErrorKind::OutOfMemory, "{error}");
    }
}
