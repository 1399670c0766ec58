//! Servers that are down, hang, come back, or refuse requests for a while.

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

use nestlock::{Error, LockClient, LockClientBuilder, LossReason, StoreErrorKind, Tuning, Wire};

use crate::support::{
    Server, WIRES, eventually,
    proxy::{Action, Proxy, Verb, Way, is_over_fred},
    within,
};

/// The most that a loaded machine may add to any limit.
const SLACK: Duration = Duration::from_secs(3);
const LEASE: Duration = Duration::from_millis(1_500);

fn quick() -> LockClientBuilder {
    LockClient::builder()
        .watchdog_timeout(LEASE)
        .command_timeout(Duration::from_millis(400))
}

// --- at connect ---

/// Returns a port without a listener.
fn dead_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

#[tokio::test]
async fn r104_no_server_at_connect_is_an_error_that_names_the_address() {
    let port = dead_port();
    let start = Instant::now();
    let error = LockClient::connect(format!("redis://127.0.0.1:{port}"))
        .await
        .unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(5) + SLACK);
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    assert!(
        error.to_string().contains(&format!("127.0.0.1:{port}")),
        "{error}"
    );
}

/// A server that never replies at connect is an error within the connect timeout.
#[tokio::test]
async fn r104_a_mute_server_is_an_error_within_the_connect_timeout() {
    let limit = Duration::from_millis(700);
    // The listener never accepts: the kernel completes the connection, and no byte ever arrives.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let start = Instant::now();
    let builder = LockClient::builder().connect_timeout(limit);
    let error = builder
        .connect(format!("redis://{}", silent.local_addr().unwrap()))
        .await
        .unwrap_err();
    assert!(start.elapsed() < limit + SLACK, "{:?}", start.elapsed());
    assert!(
        error
            .to_string()
            .contains(&silent.local_addr().unwrap().to_string()),
        "{error}"
    );

    let server = Server::start();
    let proxy = Proxy::start(&server);
    for way in [Way::ToServer, Way::ToClient] {
        proxy.heal();
        proxy.black_hole(way);
        let start = Instant::now();
        let error = LockClient::builder()
            .connect_timeout(limit)
            .connect(proxy.url())
            .await
            .unwrap_err();
        assert!(
            start.elapsed() < limit + SLACK,
            "{way:?}: {:?}",
            start.elapsed()
        );
        assert!(matches!(error, Error::Connect { .. }), "{error:?}");
    }
    proxy.heal();
    proxy.refuse();
    let error = LockClient::builder()
        .connect_timeout(limit)
        .connect(proxy.url())
        .await
        .unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
}

#[tokio::test]
async fn passwords_are_in_no_error_and_no_debug_output() {
    const SECRET: &str = "s3cr3t-w0rd";
    let clean = |text: String| assert!(!text.contains(SECRET), "{text}");
    let server = Server::start_with(&["--requirepass", SECRET]);
    let (host, dead) = (server.addr(), dead_port());
    for url in [
        format!("redis://:{SECRET}@127.0.0.1:{dead}"),
        format!("redis://{SECRET}:{SECRET}@{host}"),
        format!("redis://:{SECRET}-wrong@{host}"),
        format!("http://:{SECRET}@{host}"),
        format!("redis://:{SECRET}@{host}:not-a-port"),
        format!("redis://:{SECRET}@"),
    ] {
        let builder = LockClient::builder().connect_timeout(Duration::from_secs(1));
        let error = builder.connect(&url).await.unwrap_err();
        clean(format!("{error} {error:?} {error:#?}"));
        let mut cause = std::error::Error::source(&error);
        while let Some(source) = cause {
            clean(format!("{source} {source:?}"));
            cause = source.source();
        }
    }
    let builder = quick();
    clean(format!("{builder:?}"));
    let client = builder
        .connect(format!("redis://:{SECRET}@{host}"))
        .await
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    clean(format!("{client:?} {lock:?} {guard:?} {client:#?}"));
    server.kill();
    let error = lock.try_lock().await.unwrap_err();
    clean(format!("{error} {error:?}"));
}

/// A cluster of one node works like a single server.
#[tokio::test]
async fn a_cluster_of_one_node_works_like_any_server() {
    let bus = dead_port().to_string();
    let server = Server::start_with(&["--cluster-enabled", "yes", "--cluster-port", &bus]);
    server.call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    eventually("the cluster is up", || async {
        server
            .call(&["CLUSTER", "INFO"])
            .text()
            .contains("state:ok")
    })
    .await;
    let (a, b) = (server.client().await, server.client().await);
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let waiter = b.reentrant_lock("l").unwrap();
    let waiter = tokio::spawn(async move { waiter.lock().await.unwrap().unlock().await });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unwrap();
}

// --- later ---

/// A connection that is replaced at once is no outage: a try waits up to 250 ms for the new one.
#[tokio::test]
async fn a_try_survives_a_connection_that_is_replaced_at_once() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    // One connection for all admin commands, because one that is closing would be counted as well.
    let admin = std::cell::RefCell::new(server.wire());
    let ask = |parts: &[&str]| admin.borrow_mut().call(parts).unwrap();
    let (mut cut_off, mut held, mut stalls) = (0, 0, 0);
    for _ in 0..40 {
        // The second connection is the subscriber's, which exists even without waiters.
        assert_eq!(
            ask(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).int(),
            2
        );
        let killed = Instant::now();
        for _ in 0..20 {
            match lock.try_lock().await {
                Ok(guard) => {
                    held += 1;
                    // The client first settles a try that was cut off, so this release may fail.
                    drop(guard.expect("no other client wants it").unlock().await);
                }
                // In flight when the connection broke.
                Err(Error::Unconfirmed { .. }) => cut_off += 1,
                // On a machine that stalls, the connection is not replaced at once.
                Err(error @ Error::Store { .. }) if error.is_transient() => {
                    let after = killed.elapsed();
                    assert!(
                        after >= Duration::from_millis(250),
                        "{held} holds, {cut_off} cuts; {after:?}: {error}"
                    );
                    stalls += 1;
                    break;
                }
                Err(error) => panic!("after {held} holds and {cut_off} cuts: {error}"),
            }
        }
        eventually("the connection again", || async {
            ask(&["CLIENT", "LIST", "TYPE", "NORMAL"])
                .text()
                .lines()
                .count()
                == 3
        })
        .await;
    }
    println!("{held} holds, {cut_off} cut off, {stalls} stalls");
    assert!(
        stalls < 10 && held + 20 * stalls > 600,
        "{held} holds, {cut_off} cut off, {stalls} stalls"
    );
    client.idle().await;
    assert_eq!(server.dump(), []);
}

/// Makes the old master a replica, which keeps its connections. Its address now leads to the new
/// one.
fn fail_over(proxy: &Proxy, old: &Server, new: &Server) {
    proxy.lead_to(new);
    assert_eq!(
        old.call(&["REPLICAOF", "127.0.0.1", &new.addr().port().to_string()])
            .text(),
        "OK"
    );
}

#[tokio::test]
async fn a_failover_behind_one_address_is_followed_by_all_connections() {
    let (old, new) = (Server::start_real(), Server::start_real());
    let proxy = Proxy::start(&old);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    // One waiter needs a message and one a list, so that all three connections exist.
    let wait = |server: &Server| {
        let (url, client) = (server.url(), client.clone());
        async move {
            let holder = LockClient::connect(url).await.unwrap();
            let holds = (
                holder.reentrant_lock("l").unwrap().lock().await.unwrap(),
                holder.signal_lock("s").unwrap().lock().await.unwrap(),
            );
            let (l, s) = (
                client.reentrant_lock("l").unwrap(),
                client.signal_lock("s").unwrap(),
            );
            let l = tokio::spawn(async move { l.try_lock_for(Duration::from_secs(60)).await });
            let s = tokio::spawn(async move { s.try_lock_for(Duration::from_secs(60)).await });
            (holds, [l, s])
        }
    };
    let waits = |server: &Server| !server.channels().is_empty() && server.blocked() == 1;
    let (_old_holds, waiters) = wait(&old).await;
    eventually("waiters", || async { waits(&old) }).await;
    fail_over(&proxy, &old, &new);
    let failed_over = Instant::now();
    // The new server knows nothing about the holders.
    for waiter in waiters {
        waiter
            .await
            .unwrap()
            .unwrap()
            .expect("the lock")
            .unlock()
            .await
            .unwrap();
    }
    println!("followed after {:?}", failed_over.elapsed());
    let (new_holds, waiters) = wait(&new).await;
    eventually("waiters on the new server", || async { waits(&new) }).await;
    assert_eq!((old.channels(), old.blocked()), (vec![], 0));
    new_holds.0.unlock().await.unwrap();
    new_holds.1.unlock().await.unwrap();
    for waiter in waiters {
        waiter
            .await
            .unwrap()
            .unwrap()
            .expect("the lock")
            .unlock()
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_failover_behind_one_address_is_found_out_by_a_renewal() {
    // The new master sends its data after 5 s, the default since Redis 7. Once the old master has
    // the data, it replies to renewals itself that the record is gone.
    let (old, new) = (
        Server::start_real(),
        Server::start_with(&["--repl-diskless-sync", "yes"]),
    );
    let proxy = Proxy::start(&old);
    let client = LockClient::builder()
        .watchdog_timeout(Duration::from_secs(6))
        .connect(proxy.url())
        .await
        .unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    fail_over(&proxy, &old, &new);
    // The new server reports the loss before the lease ends.
    let error = tokio::time::timeout(Duration::from_secs(20), guard.lost())
        .await
        .expect("notified");
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{error}"
    );
    drop(guard);
    client
        .reentrant_lock("l")
        .unwrap()
        .try_lock()
        .await
        .unwrap()
        .expect("the lock")
        .unlock()
        .await
        .unwrap();
}

#[tokio::test]
async fn a_server_that_stays_a_replica_is_queried_ever_less_often() {
    let server = Server::start_real();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    server.call(&["REPLICAOF", "127.0.0.1", &dead_port().to_string()]);
    let (before, demoted) = (proxy.connections(), Instant::now());
    let mut refused = 0;
    while demoted.elapsed() < Duration::from_secs(5) {
        match lock.try_lock().await.unwrap_err() {
            Error::Store { source, .. } if source.kind() == StoreErrorKind::ReadOnly => {
                refused += 1;
            }
            // In flight when the connection was given up, or sent between two connections.
            Error::Store { .. } | Error::Unconfirmed { .. } => {}
            error => panic!("{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let connections = proxy.connections() - before;
    println!("{refused} refusals, {connections} connections");
    // Two links connect after 0, 0.5, 1.5 and 3.5 s. Each pause may be half as long.
    assert!(
        (4..=14).contains(&connections),
        "{connections} connections by two links, {refused} refusals"
    );
    server.call(&["REPLICAOF", "NO", "ONE"]);
    lock.try_lock_for(Duration::from_secs(20))
        .await
        .unwrap()
        .expect("the lock")
        .unlock()
        .await
        .unwrap();
}

/// A listener that takes connections but is no server is tried less and less often.
#[tokio::test]
async fn a_listener_that_is_no_server_is_tried_less_and_less_often() {
    let server = Server::start();
    let client = quick().connect(server.url()).await.unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let signal = client.signal_lock("s").unwrap();
    server.call(&["SET", "lock:s", "somebody", "PX", "600000"]);
    let waiter = tokio::spawn(async move { signal.try_lock_for(Duration::from_secs(60)).await });
    eventually("all connections", || async { server.blocked() == 1 }).await;
    server.kill();
    let listener = loop {
        match tokio::net::TcpListener::bind(server.addr()).await {
            Ok(listener) => break listener,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    // The three links of the client connect one at a time.
    let (mut knocks, since) = ([0; 2], Instant::now());
    while since.elapsed() < Duration::from_secs(8) {
        if let Ok(Ok((stream, _))) =
            tokio::time::timeout(Duration::from_millis(100), listener.accept()).await
        {
            drop(stream);
            knocks[usize::from(since.elapsed() > Duration::from_secs(4))] += 1;
        }
    }
    println!("{knocks:?} connects in the first and the second four seconds");
    assert!(
        knocks[1] >= 1 && knocks[1] <= 6 && knocks[0] <= 40,
        "{knocks:?}"
    );
    drop(listener);
    server.restart();
    let back = Instant::now();
    drop(
        lock.try_lock_for(Duration::from_secs(60))
            .await
            .unwrap()
            .expect("the lock"),
    );
    println!("back after {:?}", back.elapsed());
    assert!(
        back.elapsed() < Duration::from_secs(2) + SLACK,
        "{:?}",
        back.elapsed()
    );
    waiter
        .await
        .unwrap()
        .unwrap()
        .expect("the lock")
        .unlock()
        .await
        .unwrap();
}

/// An acquire errs at the end of its wait while the server is down.
#[tokio::test]
async fn r104_an_acquire_errs_at_the_end_of_its_wait_on_a_dead_server() {
    let server = Server::start();
    let client = quick()
        .outage_patience(Duration::from_secs(1))
        .connect(server.url())
        .await
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    server.kill();
    let start = Instant::now();
    let error = lock.try_lock().await.unwrap_err();
    assert!(
        matches!(error, Error::Store { .. } | Error::Unconfirmed { .. }),
        "{error:?}"
    );
    assert!(start.elapsed() < SLACK, "{:?}", start.elapsed());

    let (wait, start) = (Duration::from_millis(600), Instant::now());
    let error = lock.try_lock_for(wait).await.unwrap_err();
    assert!(
        matches!(error, Error::Store { .. } | Error::Unconfirmed { .. }),
        "{error:?}"
    );
    assert!(
        (wait..wait + SLACK).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );

    let (patience, start) = (Duration::from_secs(1), Instant::now());
    let error = tokio::time::timeout(patience + SLACK, lock.lock())
        .await
        .expect("a reply")
        .unwrap_err();
    assert!(
        matches!(error, Error::Store { .. } | Error::Unconfirmed { .. }),
        "{error:?}"
    );
    assert!(
        (patience..patience + SLACK).contains(&start.elapsed()),
        "{:?}",
        start.elapsed()
    );
}

/// An acquire errs at the end of its wait while the server hangs.
#[tokio::test]
async fn r104_an_acquire_errs_at_the_end_of_its_wait_on_a_hung_server() {
    let server = Server::start();
    let client = quick()
        .outage_patience(Duration::from_secs(1))
        .connect(server.url())
        .await
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    server.stop();
    for (wait, least) in [
        (Some(Duration::from_millis(100)), 100),
        (Some(Duration::from_secs(1)), 1_000),
        (None, 1_000),
    ] {
        let start = Instant::now();
        let call = async {
            match wait {
                Some(wait) => lock.try_lock_for(wait).await.map(drop),
                None => lock.lock().await.map(drop),
            }
        };
        let answer = tokio::time::timeout(Duration::from_millis(least) + SLACK, call)
            .await
            .expect("a reply");
        assert!(
            matches!(answer, Err(Error::Unconfirmed { .. } | Error::Store { .. })),
            "{answer:?}"
        );
        let least = Duration::from_millis(least);
        assert!(
            (least..least + SLACK).contains(&start.elapsed()),
            "{wait:?}: {:?}",
            start.elapsed()
        );
    }
    server.cont();
    client.idle().await;
    assert!(
        !server.exists("l"),
        "what the server executed late is given back"
    );
}

/// Holders are notified at their deadline, and the client recovers when the server returns.
#[tokio::test]
async fn f4_a_holder_learns_at_its_deadline_and_the_client_recovers() {
    let server = Server::start();
    let client = quick().connect(server.url()).await.unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    for round in 0..3 {
        let guard = lock
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap()
            .expect("the lock");
        server.kill();
        let killed = Instant::now();
        let error = tokio::time::timeout(LEASE + SLACK, guard.lost())
            .await
            .expect("notified at the deadline");
        assert!(
            matches!(
                error,
                Error::Lost {
                    reason: LossReason::LeaseExpired,
                    ..
                }
            ),
            "{error}"
        );
        assert!(killed.elapsed() < LEASE + SLACK && guard.is_lost() && guard.remaining().is_zero());
        assert!(guard.unlock().await.is_err());

        let waiter = lock.clone();
        let waiter =
            tokio::spawn(async move { waiter.try_lock_for(Duration::from_secs(60)).await });
        server.restart();
        let back = Instant::now();
        let guard = waiter.await.unwrap().unwrap().expect("the lock");
        let recovered = back.elapsed();
        println!("round {round}: back after {recovered:?}");
        // The goal is 250 ms. A loaded machine may take 10 times as long.
        assert!(recovered < 10 * Duration::from_millis(250), "{recovered:?}");
        guard.unlock().await.unwrap();
        // The subscriber is connected again, too.
        let (guard, next) = (
            lock.lock().await.unwrap(),
            client.reentrant_lock("l").unwrap(),
        );
        let next = tokio::spawn(async move { next.lock().await.unwrap().unlock().await });
        eventually("a waiter listens", || async {
            !server.channels().is_empty()
        })
        .await;
        guard.unlock().await.unwrap();
        next.await.unwrap().unwrap();
        client.idle().await;
    }
}

/// Without persistence a restart loses the lock. The client notifies the holder as soon as it is
/// connected again, long before the next renewal.
#[tokio::test]
async fn f4_a_restart_without_persistence_is_reported_to_the_holder() {
    let server = Server::start();
    let client = LockClient::builder()
        .watchdog_timeout(Duration::from_secs(90))
        .connect(server.url())
        .await
        .unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    server.kill();
    server.restart();
    // The next renewal would come after 30 s, a third of the watchdog timeout.
    let error = tokio::time::timeout(Duration::from_secs(15), guard.lost())
        .await
        .expect("notified");
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LossReason::RecordMissing,
            ..
        })
    ));
    client
        .reentrant_lock("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// No caller sends a request: the client itself checks whether its connection is alive. Otherwise a
/// waiter would not learn of a release until its poll cap.
#[tokio::test]
async fn a_client_gives_up_a_mute_connection_by_itself() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let minute = Duration::from_secs(60);
    let client = LockClient::builder()
        .poll_cap(minute)
        .connect(proxy.url())
        .await
        .unwrap();
    let holder = server
        .client()
        .await
        .reentrant_lock("l")
        .unwrap()
        .lock()
        .await
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let waiter = tokio::spawn(async move { lock.try_lock_for(3 * minute).await });
    eventually("it listens", || async { !server.channels().is_empty() }).await;
    let before = proxy.connections();
    let mut is_mute = false;
    proxy.rule(move |request| {
        if !is_mute && request.is("PING") {
            is_mute = true;
            return Action::Mute;
        }
        Action::Pass
    });
    within(
        Duration::from_secs(20),
        "there is another connection",
        || async { proxy.connections() > before },
    )
    .await;
    holder.unlock().await.unwrap();
    let guard = tokio::time::timeout(Duration::from_secs(15), waiter)
        .await
        .expect("notified")
        .unwrap()
        .unwrap();
    guard.expect("the lock").unlock().await.unwrap();
}

#[tokio::test]
async fn f5_a_restart_with_an_append_only_file_loses_no_lock() {
    let server = Server::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let client = LockClient::builder()
        .watchdog_timeout(Duration::from_secs(6))
        .connect(server.url())
        .await
        .unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    eventually("the record is written to the file", || async {
        // What the kernel has survives SIGKILL. The server writes before it replies to the next
        // command.
        server.call(&["PING"]).text() == "PONG"
    })
    .await;
    server.kill();
    server.restart();
    let restarted = Instant::now();
    eventually("it was renewed past its first lease", || async {
        assert!(!guard.is_lost(), "lost after {:?}", restarted.elapsed());
        restarted.elapsed() > Duration::from_secs(7)
    })
    .await;
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    guard.unlock().await.unwrap();
    assert!(!server.exists("l"));
}

// --- a frozen server ---

#[tokio::test]
async fn f6_a_freeze_shorter_than_the_lease_loses_nothing() {
    let server = Server::start();
    let lease = Duration::from_secs(9);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .connect(server.url())
        .await
        .unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    server.stop();
    let frozen = Instant::now();
    within(lease, "frozen for half the lease", || async {
        frozen.elapsed() > lease / 2
    })
    .await;
    server.cont();
    eventually("it is renewed", || async {
        guard.remaining() > lease * 3 / 4
    })
    .await;
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    guard.unlock().await.unwrap();
    client.idle().await;
    assert!(!server.exists("l"));
}

/// A holder is notified of a freeze longer than its lease before any other client has the lock.
#[tokio::test]
async fn f6_r27_a_freeze_past_the_lease_is_known_before_a_new_hold() {
    for _ in 0..3 {
        let server = Server::start();
        let client = quick().connect(server.url()).await.unwrap();
        let other = server.client().await;
        let guard = Arc::new(client.reentrant_lock("l").unwrap().lock().await.unwrap());
        let (next, holder) = (other.reentrant_lock("l").unwrap(), Arc::clone(&guard));
        let next = tokio::spawn(async move {
            let next = next.lock().await.unwrap();
            assert!(holder.is_lost(), "two valid guards");
            next
        });
        eventually("a waiter", || async { !server.channels().is_empty() }).await;
        server.stop();
        // The loss is reported while the server still hangs, so before another client can get the
        // lock.
        let error = tokio::time::timeout(LEASE + SLACK, guard.lost())
            .await
            .expect("notified");
        assert!(
            matches!(
                error,
                Error::Lost {
                    reason: LossReason::LeaseExpired,
                    ..
                }
            ),
            "{error}"
        );
        assert!(!next.is_finished());
        server.cont();
        let next = tokio::time::timeout(Duration::from_secs(20), next)
            .await
            .expect("the lock")
            .unwrap();
        let guard = Arc::into_inner(guard).expect("the last handle");
        assert!(guard.unlock().await.is_err());
        client.idle().await;
        assert_eq!(
            server.record("l"),
            [(next.owner().to_string(), 1)],
            "the old holder's release frees nothing"
        );
    }
}

// --- not now ---

const NOT_NOW: [(&str, StoreErrorKind); 9] = [
    (
        "LOADING Redis is loading the dataset in memory",
        StoreErrorKind::Loading,
    ),
    (
        "TRYAGAIN Multiple keys request during rehashing of slot",
        StoreErrorKind::TryAgain,
    ),
    (
        "READONLY You can't write against a read only replica.",
        StoreErrorKind::ReadOnly,
    ),
    ("BUSY Redis is busy running a script.", StoreErrorKind::Busy),
    ("MOVED 866 127.0.0.1:7002", StoreErrorKind::Moved),
    ("ASK 866 127.0.0.1:7002", StoreErrorKind::Moved),
    (
        "NOREPLICAS Not enough good replicas to write.",
        StoreErrorKind::NoReplicas,
    ),
    (
        "CLUSTERDOWN The cluster is down",
        StoreErrorKind::ClusterDown,
    ),
    (
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        StoreErrorKind::MasterDown,
    ),
];

/// Temporary refusals are absorbed by the wait, and are typed errors without one.
#[tokio::test]
async fn r102_r103_f27_a_wait_absorbs_refusals_that_a_try_reports() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    // Loads the scripts, because a NOSCRIPT would cost a second request.
    lock.lock().await.unwrap().unlock().await.unwrap();
    for (refusal, kind) in NOT_NOW {
        // fred reports this error to all requests in flight.
        let in_doubt = is_over_fred() && kind == StoreErrorKind::ClusterDown;
        proxy.each(Verb::Acquire, Action::Refuse(refusal));
        match lock.try_lock().await.unwrap_err() {
            Error::Unconfirmed { source, .. } if in_doubt => assert_eq!(source.kind(), kind),
            Error::Store { lock, source, .. } => {
                assert_eq!(
                    (lock.as_str(), source.kind(), source.may_have_executed()),
                    ("l", kind, false)
                );
            }
            error => panic!("{error:?}"),
        }
        let (wait, start) = (Duration::from_millis(300), Instant::now());
        let answer = tokio::time::timeout(wait + SLACK, lock.try_lock_for(wait))
            .await
            .expect("a reply");
        match answer {
            Err(Error::Store { source, .. }) => assert_eq!(source.kind(), kind),
            // The reply to the last attempt may come too late.
            Err(Error::Unconfirmed { .. }) => {}
            answer => panic!("{refusal}: {answer:?}"),
        }
        assert!(
            (wait..wait + SLACK).contains(&start.elapsed()),
            "{refusal}: {:?}",
            start.elapsed()
        );

        let mut refusals = 3;
        // The last attempt may still be in flight.
        client.idle().await;
        let before = proxy.count(Verb::Acquire);
        proxy.rule(move |request| {
            if request.verb() == Some(Verb::Acquire) && refusals > 0 {
                refusals -= 1;
                return Action::Refuse(refusal);
            }
            Action::Pass
        });
        let guard = lock
            .try_lock_for(Duration::from_secs(20))
            .await
            .unwrap()
            .expect("the lock");
        assert_eq!(
            proxy.count(Verb::Acquire) - before,
            4,
            "{refusal}: three refusals and one reply"
        );
        // Tries in doubt are settled next to the hold. If a release were in doubt as well, the
        // settlement would give up the owner id.
        client.idle().await;
        proxy.once(Verb::Release, Action::Refuse(refusal));
        guard.unlock().await.unwrap();
        if in_doubt {
            client.idle().await;
        }
        assert!(!server.exists("l"), "{refusal}");
        assert_eq!(client.stats().holds, 0);
    }
}

/// fred closes the connection at this error, and reports it to all requests in flight. The client
/// must settle those that ran.
#[tokio::test]
async fn a_request_executed_behind_clusterdown_is_not_deemed_refused() {
    for &wire in WIRES {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let client = LockClient::builder()
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .connect(format!("redis://{}", proxy.addr()))
            .await
            .unwrap();
        let [late, refused, executed] =
            ["late", "refused", "executed"].map(|name| client.reentrant_lock(name).unwrap());
        executed.lock().await.unwrap().unlock().await.unwrap();
        proxy.rule(|request| {
            match request
                .verb()
                .map(|verb| (verb, request.keys()[0].as_str()))
            {
                // Delays the replies behind it until all requests are in flight.
                Some((Verb::Acquire, "late")) => Action::Late(Duration::from_millis(500)),
                Some((Verb::Acquire, "refused")) => {
                    Action::Refuse("CLUSTERDOWN The cluster is down")
                }
                _ => Action::Pass,
            }
        });
        let before = proxy.count(Verb::Acquire);
        let mut tries = Vec::new();
        for lock in [late, refused, executed] {
            let asked = before + tries.len() + 1;
            tries.push(tokio::spawn(async move { lock.try_lock().await }));
            eventually("it is in flight", || async {
                proxy.count(Verb::Acquire) == asked
            })
            .await;
        }
        let executed = tries.pop().unwrap().await.unwrap();
        match &executed {
            Ok(guard) => assert!(wire == Wire::Own && guard.is_some()),
            Err(error) => {
                assert!(
                    wire != Wire::Own && matches!(error, Error::Unconfirmed { .. }),
                    "{wire:?}: {error:?}"
                );
            }
        }
        drop(executed);
        for attempt in tries {
            drop(attempt.await);
        }
        client.idle().await;
        assert_eq!(
            (server.exists("executed"), server.exists("late")),
            (false, false),
            "{wire:?}"
        );
    }
}

#[tokio::test]
async fn r11_a_renewal_that_is_refused_for_now_is_repeated_in_time() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = quick().connect(proxy.url()).await.unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    for (refusal, _) in NOT_NOW {
        proxy.once(Verb::Renew, Action::Refuse(refusal));
        let before = proxy.count(Verb::Renew);
        eventually("it was refused, then renewed", || async {
            assert!(!guard.is_lost(), "{refusal}");
            proxy.count(Verb::Renew) >= before + 2
        })
        .await;
        eventually("renewed", || async { guard.remaining() > LEASE / 2 }).await;
    }
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
}

#[tokio::test]
async fn r28_a_server_busy_with_a_script_costs_no_holder_the_lock() {
    let server = Server::start_with(&["--lua-time-limit", "50"]);
    let lease = Duration::from_secs(6);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .connect(server.url())
        .await
        .unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    // Longer than a third of the lease, so that a renewal meets the busy server.
    let mut wire = server.wire();
    wire.send(&["EVAL", "local n = 0 while n < 1e12 do n = n + 1 end", "0"])
        .unwrap();
    let busy = Instant::now();
    eventually("the server is busy", || async {
        server.call(&["PING"]).text().starts_with("BUSY")
    })
    .await;
    match client
        .reentrant_lock("other")
        .unwrap()
        .try_lock()
        .await
        .unwrap_err()
    {
        Error::Store { source, .. } => assert_eq!(source.kind(), StoreErrorKind::Busy),
        error => panic!("{error:?}"),
    }
    let other = client.reentrant_lock("other").unwrap();
    let other = tokio::spawn(async move { other.try_lock_for(Duration::from_secs(30)).await });
    within(lease, "a renewal met it", || async {
        busy.elapsed() > lease / 2
    })
    .await;
    assert!(!guard.is_lost());
    server.call(&["SCRIPT", "KILL"]);
    let other = other.await.unwrap().unwrap().expect("absorbed by the wait");
    eventually("it is renewed", || async {
        guard.remaining() > lease * 3 / 4
    })
    .await;
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    other.unlock().await.unwrap();
    guard.unlock().await.unwrap();
}

/// R102: the server becomes a replica and a master again while 16 tasks work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r102_a_waiting_caller_never_sees_a_brief_demotion_under_load() {
    let server = Server::start_real();
    let client = LockClient::connect(server.url()).await.unwrap();
    let demoted = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let tasks: Vec<_> = (0..16)
        .map(|task| {
            let (lock, demoted) = (
                client.reentrant_lock(format!("l{}", task % 4)).unwrap(),
                demoted.clone(),
            );
            tokio::spawn(async move {
                while demoted.load(std::sync::atomic::Ordering::SeqCst) < 3 {
                    let guard = lock
                        .try_lock_for(Duration::from_secs(30))
                        .await
                        .expect("no READONLY");
                    guard.expect("the lock").unlock().await.expect("a release");
                }
            })
        })
        .collect();
    for _ in 0..3 {
        // This master does not exist, so the server keeps its data.
        server.call(&["REPLICAOF", "127.0.0.1", &dead_port().to_string()]);
        eventually("refusals", || async {
            server
                .call(&["INFO", "errorstats"])
                .text()
                .contains("READONLY")
        })
        .await;
        server.call(&["REPLICAOF", "NO", "ONE"]);
        server.call(&["CONFIG", "RESETSTAT"]);
        let before = server.script_count();
        eventually("work goes on", || async {
            server.script_count() > before + 100
        })
        .await;
        demoted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
    for task in tasks {
        task.await.unwrap();
    }
    client.idle().await;
    assert_eq!(server.dump(), []);
}

/// R113: clients that start while the server restarts connect, or report that they could not. None
/// hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r113_a_hundred_clients_start_while_the_server_restarts() {
    let server = Server::start();
    let url = server.url();
    let tasks: Vec<_> = (0..100)
        .map(|n| {
            let url = url.clone();
            tokio::spawn(async move {
                let lock = loop {
                    match LockClient::builder()
                        .connect_timeout(Duration::from_secs(2))
                        .connect(&url)
                        .await
                    {
                        Ok(client) => break client.reentrant_lock(format!("l{}", n % 10)).unwrap(),
                        Err(Error::Connect { .. }) => {
                            tokio::time::sleep(Duration::from_millis(5)).await;
                        }
                        Err(error) => panic!("{error:?}"),
                    }
                };
                // A restart in between may lose the hold. The unlock then fails.
                match lock.try_lock_for(Duration::from_secs(60)).await {
                    Ok(guard) => drop(guard.expect("the lock").unlock().await),
                    Err(error) => panic!("{error:?}"),
                }
            })
        })
        .collect();
    server.kill();
    server.restart();
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(120), task)
            .await
            .expect("no hang")
            .unwrap();
    }
}

/// `Duration::MAX` stands for "for ever".
#[tokio::test]
async fn endless_durations_in_the_configuration_do_not_panic() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder()
        .poll_cap(Duration::MAX)
        .outage_patience(Duration::MAX);
    let client = builder
        .connect_timeout(Duration::MAX)
        .connect(proxy.url())
        .await
        .unwrap();
    server.call(&["HSET", "l", "0a1b2c3d-0000-0000-0000-000000000000:1", "1"]);
    let lock = client.reentrant_lock("l").unwrap();
    let busy = tokio::time::timeout(Duration::from_millis(300), lock.lock()).await;
    assert!(busy.is_err(), "no panic, no lock");
    server.call(&["DEL", "l"]);
    proxy.once(
        Verb::Acquire,
        Action::Refuse("LOADING Redis is loading the dataset in memory"),
    );
    lock.lock().await.unwrap().unlock().await.unwrap();
}

/// Found by the simulator (string locks, seed 482): the waiter waited for a connection that the
/// client no longer made.
#[tokio::test]
async fn a_waiter_in_an_outage_is_turned_away_by_a_shutdown() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let patient = Duration::from_secs(600);
    let client = LockClient::builder()
        .outage_patience(patient)
        .connect(proxy.url())
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    proxy.refuse();
    proxy.cut();
    let waiter = tokio::spawn(async move { lock.lock().await.map(drop) });
    // Longer than the client holds back a request: the acquire has failed once, and waits.
    tokio::time::sleep(Duration::from_secs(1)).await;
    // If the request was written before the cut was noticed, its outcome stays unknown.
    assert!(matches!(
        client.shutdown().await,
        Ok(()) | Err(Error::Unsettled { .. })
    ));
    let turned_away = tokio::time::timeout(Duration::from_secs(60), waiter)
        .await
        .expect("before its patience is over");
    assert!(matches!(turned_away.unwrap(), Err(Error::Closed)));
}
