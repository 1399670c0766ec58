//! Locks that require replicas: the defects that an attack found.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, LockClient};
use nestlock_embedded::SpawnedServer;

use crate::{
    cancel::poll_times,
    replicas::{Group, call, kinds},
    support::{
        proxy::{Action, Proxy, with_wire},
        within,
    },
};

const LONG: Duration = Duration::from_secs(20);

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Forwards all bytes to this address until `is_shut` is set, and returns its own address. Its
/// threads end with their connections.
fn way(to: SocketAddr, is_shut: &Arc<AtomicBool>) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (addr, is_shut) = (listener.local_addr().unwrap(), Arc::clone(is_shut));
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(to) else {
                continue;
            };
            for (mut from, mut into) in [
                (client.try_clone().unwrap(), server.try_clone().unwrap()),
                (server, client),
            ] {
                let is_shut = Arc::clone(&is_shut);
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 65536];
                    while let Ok(len @ 1..) = from.read(&mut buffer) {
                        // The connection stays open, because the other direction uses it as well.
                        if is_shut.load(Ordering::Relaxed)
                            || into.write_all(&buffer[..len]).is_err()
                        {
                            return;
                        }
                    }
                    let _ = into.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    addr
}

/// A lease that no replica has is lost when the replica is promoted. So it does not count for the
/// outer hold, which requires a replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inner_hold_without_copies_makes_no_second_holder() {
    let is_shut = Arc::new(AtomicBool::new(false));
    let master = SpawnedServer::start().unwrap();
    call(&master, &["CONFIG", "SET", "repl-timeout", "600"]);
    call(&master, &["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    let port = way(master.addr(), &is_shut).port().to_string();
    let replicas = vec![SpawnedServer::start_with(["--replicaof", "127.0.0.1", &port]).unwrap()];
    let group = Group { master, replicas };
    group.are_there(1).await;
    let client = group.client(1).await;
    let lock = client.reentrant_lock("l").unwrap();
    let leased = |lease| AcquireOptions::new().lease(lease);
    let outer = lock.lock_with(leased(ms(2_000))).await.unwrap();
    is_shut.store(true, Ordering::Relaxed);
    let inner = lock
        .lock_with(leased(ms(60_000)).replicas(0))
        .await
        .unwrap();
    inner.unlock().await.unwrap();
    group.master.kill().unwrap();
    call(&group.replicas[0], &["REPLICAOF", "NO", "ONE"]);
    let other = LockClient::connect(group.replicas[0].url()).await.unwrap();
    let second = other.reentrant_lock("l").unwrap().lock().await.unwrap();
    assert!(outer.is_lost() || second.is_lost(), "two hold it");
}

/// Each hold has the copies that it requires. A longer lease counts only if as many replicas have
/// it as the most demanding hold requires.
#[tokio::test]
async fn an_inner_hold_moves_an_outer_end_if_as_many_replicas_have_it() {
    let group = Group::start(2).await;
    let client = group.client(0).await;
    let lock = client.reentrant_lock("l").unwrap();
    let of = |lease, replicas| AcquireOptions::new().lease(ms(lease)).replicas(replicas);
    for (outer, inner) in [(0, 1), (1, 2), (1, 0), (2, 1), (2, 0)] {
        let one = lock.lock_with(of(5_000, outer)).await.unwrap();
        let two = lock.lock_with(of(60_000, inner)).await.unwrap();
        assert!(
            one.remaining() > ms(50_000) && two.remaining() > ms(50_000),
            "{outer} {inner}"
        );
        group.stop(1);
        let three = lock.lock_with(of(600_000, 0)).await.unwrap();
        assert_eq!(
            three.remaining() > ms(60_000),
            outer.max(inner) < 2,
            "{outer} {inner}"
        );
        group.stop(2);
        let three = lock.lock_with(of(900_000, 0)).await.unwrap();
        assert_eq!(
            three.remaining() > ms(600_000),
            outer.max(inner) < 1,
            "{outer} {inner}"
        );
        drop((one, two, three));
        group.cont();
        group.are_there(2).await;
        client.idle().await;
    }
}

/// Inner acquires are dropped at any poll, with and without replicas that reply. The outer hold
/// does not change.
#[tokio::test]
async fn an_inner_acquire_dropped_at_any_poll_leaves_the_outer_hold() {
    let group = Group::start(1).await;
    let client = group.client(1).await;
    for (record, lock) in kinds(&client)
        .into_iter()
        .filter(|(name, _)| ["reentrant", "fenced", "fair", "rw", "read"].contains(name))
    {
        for inner in [0, 1] {
            for is_away in [false, true] {
                let outer = lock
                    .lock_with(AcquireOptions::new().lease(ms(60_000)))
                    .await
                    .unwrap();
                if is_away {
                    group.stop(1);
                }
                let mut k = 0;
                loop {
                    k += 1;
                    let ended =
                        poll_times(lock.try_lock_with(AcquireOptions::new().replicas(inner)), k)
                            .await;
                    let is_over = ended.is_some();
                    match ended {
                        Some(Ok(guard)) => {
                            let guard = guard.unwrap();
                            assert!(guard.replicas().unwrap_or(0) >= inner);
                            guard.unlock().await.unwrap();
                        }
                        Some(Err(error)) => assert!(
                            is_away && inner == 1 && matches!(error, Error::NotReplicated { .. }),
                            "{k}: {error}"
                        ),
                        None => {}
                    }
                    client.idle().await;
                    let holds = call(&group.master, &["HGETALL", record]);
                    let counts: Vec<_> = holds
                        .list()
                        .iter()
                        .map(|text| text.text().to_owned())
                        .collect();
                    assert!(
                        counts.iter().any(|count| count == "1")
                            && !counts.iter().any(|count| count == "2"),
                        "{record} {inner} {k}: {counts:?}"
                    );
                    assert!(!outer.is_lost());
                    if is_over {
                        break;
                    }
                }
                outer.unlock().await.unwrap();
                assert!(!group.has(record));
                group.cont();
                group.are_there(1).await;
            }
        }
    }
}

/// A release is retried as long as the record may live. An extension that did not count may have
/// prolonged the record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_lasts_as_long_as_an_extension_that_did_not_count() {
    let group = Group::start(1).await;
    let proxy = Proxy::to(group.master.addr());
    let client = LockClient::builder()
        .watchdog_timeout(ms(600))
        .replicas(1, ms(50))
        .connect(proxy.url())
        .await
        .unwrap();
    let guard = client
        .mutex("l")
        .unwrap()
        .lock_with(AcquireOptions::new().lease(ms(1500)))
        .await
        .unwrap();
    group.stop(1);
    // On a busy machine, the reply may come too late.
    let outcome = guard.extend(ms(600_000)).await;
    assert!(
        matches!(
            outcome,
            Err(Error::NotReplicated { .. } | Error::Unconfirmed { .. })
        ),
        "{outcome:?}"
    );
    proxy.refuse();
    proxy.cut();
    drop(guard);
    // Longer than the lease and all that is added to it.
    tokio::time::sleep(ms(4000)).await;
    proxy.heal();
    group.cont();
    within(LONG, "the record is released", || async { !group.has("l") }).await;
}

/// A wait that requires no copies ends in time, although WAITs of other acquires are always in
/// flight.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_needing_no_copies_ends_in_time_despite_others_that_do() {
    let group = Group::start(1).await;
    let client = LockClient::builder()
        .replicas(1, ms(900))
        .connect(with_wire(group.master.url()))
        .await
        .unwrap();
    let other = LockClient::connect(group.master.url()).await.unwrap();
    let held = other.mutex("held").unwrap().lock().await.unwrap();
    group.stop(1);
    let lock = client.mutex("l").unwrap();
    let asks = tokio::spawn(async move {
        loop {
            let _ = lock.try_lock().await;
        }
    });
    let lock = client.mutex("held").unwrap();
    let mut longest = Duration::ZERO;
    for _ in 0..8 {
        let begun = Instant::now();
        let _ = lock
            .try_lock_for_with(ms(50), AcquireOptions::new().replicas(0))
            .await;
        longest = longest.max(begun.elapsed());
    }
    asks.abort();
    group.cont();
    held.unlock().await.unwrap();
    assert!(
        longest < ms(500),
        "50 ms, and 40, and a round trip of less than one: {longest:?}"
    );
}

/// The WAIT of a refused acquire has no caller that reads its reply. Later requests must not stay
/// behind it for ever: the client still learns how long a request takes, also after the link became
/// slower.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_without_a_caller_is_over_when_its_reply_arrives() {
    let group = Group::start(1).await;
    let proxy = Proxy::to(group.master.addr());
    let client = Group::builder(1).connect(proxy.url()).await.unwrap();
    let other = LockClient::connect(group.master.url()).await.unwrap();
    let held = other.mutex("held").unwrap().lock().await.unwrap();
    // The script's reply, busy, comes first.
    proxy.rule(|request| {
        if request.is("WAIT") {
            Action::Late(ms(30))
        } else {
            Action::Pass
        }
    });
    assert!(
        client
            .mutex("held")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    proxy.rule(|_| Action::Late(ms(150)));
    let lock = client.mutex("l").unwrap();
    // The client may give up the first attempts.
    within(LONG, "the lock, which is free", || async {
        let guard = lock
            .try_lock_for_with(ms(20), AcquireOptions::new().replicas(0))
            .await;
        matches!(guard, Ok(Some(_)))
    })
    .await;
    held.unlock().await.unwrap();
}
