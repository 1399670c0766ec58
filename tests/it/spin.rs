//! Spin locks: no messages, pauses that grow, and a record shared with the reentrant lock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Backoff, Error};

use crate::{
    contract::contract_suite,
    support::{Server, eventually, history::History, wire::Wire},
};

contract_suite! { mod contract, door = |client, name| client.spin_lock(name).unwrap(), listens = false }

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Returns the times of `owner`'s tries at the server in seconds, read from MONITOR.
fn tries(monitor: &mut Wire, server: &Server, owner: &str) -> Vec<f64> {
    server.call(&["ECHO", "the end of it"]);
    let mut tries = Vec::new();
    loop {
        let line = monitor.read().unwrap();
        let line = line.text();
        if line.contains("the end of it") {
            return tries;
        }
        // only commands of the client, not those inside scripts
        if line.contains(owner) && line.to_lowercase().contains("\"evalsha\"") {
            tries.push(line.split(' ').next().unwrap().parse().expect("seconds"));
        }
    }
}

fn monitor(server: &Server) -> Wire {
    let mut wire = server.wire();
    assert_eq!(wire.call(&["MONITOR"]).unwrap().text(), "OK");
    wire
}

/// Waits for a held lock until `wait` has passed, and returns the pauses between tries in
/// milliseconds.
async fn pauses(server: &Server, backoff: Backoff, wait: Duration) -> Vec<f64> {
    let (holder, client) = (server.client().await, server.client().await);
    let guard = holder.spin_lock("l").unwrap().lock().await.unwrap();
    let owner = client.owner("waiter").unwrap();
    let mut monitor = monitor(server);
    let options = AcquireOptions::new().owner(owner.clone());
    let start = Instant::now();
    assert!(
        client
            .spin_lock_with("l", backoff)
            .unwrap()
            .try_lock_for_with(wait, options)
            .await
            .unwrap()
            .is_none()
    );
    let waited = start.elapsed();
    assert!(
        waited >= wait && waited < wait + Duration::from_secs(5),
        "waited {waited:?} instead of {wait:?}"
    );
    guard.unlock().await.unwrap();
    let tries = tries(&mut monitor, server, owner.to_string().as_str());
    tries
        .windows(2)
        .map(|pair| (pair[1] - pair[0]) * 1000.0)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spin_lock_neither_subscribes_nor_publishes() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for client in [&a, &b] {
        for _ in 0..4 {
            let (lock, inside) = (client.spin_lock("l").unwrap(), Arc::clone(&inside));
            tasks.push(tokio::spawn(async move {
                for _ in 0..25 {
                    let guard = lock.lock().await.unwrap();
                    let nested = lock.lock().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    nested.unlock().await.unwrap();
                    guard.unlock().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    let guard = a.spin_lock("l").unwrap().lock().await.unwrap();
    assert!(b.spin_lock("l").unwrap().force_unlock().await.unwrap());
    drop(guard);
    for command in [
        "subscribe",
        "ssubscribe",
        "psubscribe",
        "publish",
        "spublish",
    ] {
        assert_eq!(server.command_count(command), 0, "{command}");
    }
    assert!(server.dump().is_empty());
}

#[tokio::test]
async fn a_spin_locks_pauses_grow_to_their_limit_and_are_jittered() {
    let server = Server::start();
    let backoff = Backoff::exponential(ms(20), ms(160), 2.0);
    let pauses = pauses(&server, backoff, ms(1500)).await;
    // jitter shortens each pause by up to a half; a busy machine lengthens it
    for (n, planned) in [20.0, 40.0, 80.0, 160.0, 160.0].into_iter().enumerate() {
        assert!(pauses[n] >= planned / 2.0 - 2.0, "pause {n}: {pauses:?}");
    }
    assert!(
        (9..=22).contains(&pauses.len()),
        "{} pauses: {pauses:?}",
        pauses.len()
    );
    let full = &pauses[3..pauses.len() - 1];
    let shortened = full.iter().filter(|pause| **pause < 155.0).count();
    assert!(shortened > 0, "no jitter: {pauses:?}");
    let distinct: std::collections::BTreeSet<i64> =
        full.iter().map(|pause| *pause as i64).collect();
    assert!(distinct.len() > 2, "all alike: {pauses:?}");
}

#[tokio::test]
async fn a_constant_backoff_keeps_its_length() {
    let server = Server::start();
    let pauses = pauses(&server, Backoff::constant(ms(60)), ms(900)).await;
    let regular = &pauses[..pauses.len() - 1]; // the last one ends with the wait
    assert!(regular.iter().all(|pause| *pause >= 28.0), "{pauses:?}");
    assert!(
        (8..=31).contains(&regular.len()),
        "{} pauses: {pauses:?}",
        regular.len()
    );
    let (first, second) = regular.split_at(regular.len() / 2);
    let mean = |pauses: &[f64]| pauses.iter().sum::<f64>() / pauses.len() as f64;
    assert!(
        mean(second) < 2.5 * mean(first),
        "they do not grow: {pauses:?}"
    );
}

/// A spin lock tries again when the lease that was reported to it is over.
#[tokio::test]
async fn a_spin_lock_tries_again_when_the_reported_lease_is_over() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lease = AcquireOptions::new().lease(ms(300));
    let start = Instant::now(); // before the lease can begin
    let lost = a
        .spin_lock("l")
        .unwrap()
        .try_lock_with(lease)
        .await
        .unwrap()
        .unwrap();
    // its own pause would be an hour
    let lock = b
        .spin_lock_with("l", Backoff::constant(Duration::from_secs(3600)))
        .unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(15), lock.lock())
        .await
        .expect("in time")
        .unwrap();
    assert!(start.elapsed() >= ms(298) && lost.is_lost());
    guard.unlock().await.unwrap();
}

/// A spin lock's long pause ends with the wait and with a shutdown.
#[tokio::test]
async fn a_spin_locks_pause_ends_with_its_wait_and_with_a_shutdown() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guard = a.spin_lock("l").unwrap().lock().await.unwrap();
    let lock = b
        .spin_lock_with("l", Backoff::constant(Duration::from_secs(3600)))
        .unwrap();
    let start = Instant::now();
    assert!(lock.try_lock_for(ms(300)).await.unwrap().is_none());
    assert!(start.elapsed() >= ms(300) && start.elapsed() < Duration::from_secs(15));
    let before = server.script_count();
    let waiter = tokio::spawn(async move { lock.lock().await });
    eventually("a waiter has tried", || async {
        server.script_count() > before
    })
    .await;
    b.shutdown().await.unwrap();
    let turned_away = tokio::time::timeout(Duration::from_secs(15), waiter)
        .await
        .expect("turned away")
        .unwrap();
    assert!(matches!(turned_away, Err(Error::Closed)), "{turned_away:?}");
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spin_and_reentrant_locks_of_one_name_exclude_each_other() {
    let server = Server::start();
    let poll_cap = ms(50);
    let (a, b) = (
        server.client_with(|c| c.poll_cap(poll_cap)).await,
        server.client_with(|c| c.poll_cap(poll_cap)).await,
    );
    let (spin, plain) = (a.spin_lock("l").unwrap(), b.reentrant_lock("l").unwrap());
    let guard = spin.lock().await.unwrap();
    assert!(plain.try_lock().await.unwrap().is_none());
    // a spin lock sends no message: the waiter of the reentrant lock polls within the poll cap
    let waiter = tokio::spawn(async move { plain.lock().await.unwrap() });
    eventually("a waiter listens", || async {
        !server.channels().is_empty()
    })
    .await;
    guard.unlock().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(15), waiter)
        .await
        .expect("it polls")
        .unwrap();
    assert!(spin.try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();

    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for task in 0..8 {
        let client = if task % 2 == 0 { &a } else { &b };
        let lock = if task % 4 < 2 {
            client.spin_lock("l")
        } else {
            client.reentrant_lock("l")
        }
        .unwrap();
        let inside = Arc::clone(&inside);
        tasks.push(tokio::spawn(async move {
            for _ in 0..20 {
                let guard = lock.lock().await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                guard.unlock().await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(server.dump().is_empty());
}

/// Four processes with eight tasks each; see `support::history`.
#[test]
fn no_two_of_32_tasks_in_4_processes_hold_a_spin_lock_at_once() {
    let server = Server::start_real();
    for leases in [false, true] {
        History::play(&server, "spin", 3, 30, leases).assert_no_clashes();
    }
}
