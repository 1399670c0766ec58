//! Servers that refuse requests for a while or for good, and servers that lost all data.

use std::time::{Duration, Instant};

use nestlock::{
    AcquireOptions, Error, LockClient, LossReason, SignalOptions, StoreErrorKind, Tuning,
};
use tokio::time::timeout;

use crate::support::{
    Server, WIRES, eventually,
    proxy::{Action, Proxy, Verb},
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn refuse_writes(server: &Server, refuse: bool) {
    server.call(&[
        "CONFIG",
        "SET",
        "min-replicas-to-write",
        if refuse { "1" } else { "0" },
    ]);
}

/// Releases that are refused for a while (NOREPLICAS; MISCONF is handled alike) are retried in the
/// background.
#[tokio::test]
async fn a_release_that_is_refused_is_repeated_until_the_record_ends() {
    let server = Server::start_real();
    let (a, b) = (server.client().await, server.client().await);
    let guard = a.reentrant_lock("unlocked").unwrap().lock().await.unwrap();
    let dropped = a.reentrant_lock("dropped").unwrap().lock().await.unwrap();
    let forever = a
        .signal_lock_with("forever", SignalOptions::new().without_expiry())
        .unwrap();
    let endless = forever.lock().await.unwrap();
    refuse_writes(&server, true);
    let said = guard.unlock().await;
    let refused = |source: &nestlock::StoreError| source.kind() == StoreErrorKind::NoReplicas;
    assert!(
        matches!(&said, Err(Error::Store { source, .. }) if refused(source)),
        "{said:?}"
    );
    drop((dropped, endless));
    let idle = tokio::time::timeout(ms(1500), a.idle()).await;
    assert!(
        idle.is_err() && a.stats().settling >= 3,
        "nothing was released: {:?}",
        a.stats()
    );
    refuse_writes(&server, false);
    let over = Instant::now();
    a.idle().await;
    for name in ["unlocked", "dropped"] {
        let lock = b.reentrant_lock(name).unwrap();
        lock.try_lock()
            .await
            .unwrap()
            .expect("released")
            .unlock()
            .await
            .unwrap();
    }
    assert!(!b.signal_lock("forever").unwrap().is_locked().await.unwrap());
    // Less than the lease of 30 s.
    assert!(
        over.elapsed() < Duration::from_secs(10),
        "{:?}",
        over.elapsed()
    );
}

/// After a reconnect the client checks every hold at once. Otherwise a holder would learn of the
/// loss only at the next renewal, a third of the lease later.
#[tokio::test]
async fn a_restart_without_persistence_is_reported_on_reconnection() {
    let server = Server::start_real();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(Duration::from_secs(120)))
        .await;
    let renewed = client
        .reentrant_lock("renewed")
        .unwrap()
        .lock()
        .await
        .unwrap();
    let leased = nestlock::AcquireOptions::new().lease(Duration::from_secs(100));
    let leased = client
        .reentrant_lock("leased")
        .unwrap()
        .try_lock_with(leased)
        .await
        .unwrap()
        .unwrap();
    server.kill();
    server.restart();
    for guard in [&renewed, &leased] {
        let lost = tokio::time::timeout(Duration::from_secs(15), guard.lost()).await;
        assert!(
            matches!(
                lost,
                Ok(Error::Lost {
                    reason: LossReason::RecordMissing,
                    ..
                })
            ),
            "{lost:?}"
        );
    }
    drop((renewed, leased));
    eventually("the client has forgotten them", || async {
        client.stats().holds == 0
    })
    .await;
}

/// The check after a reconnect changes nothing if the record still exists.
#[tokio::test]
async fn a_reconnect_leaves_holds_and_their_leases_as_they_are() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = nestlock::LockClient::connect(proxy.url()).await.unwrap();
    let leased = nestlock::AcquireOptions::new().lease(Duration::from_secs(50));
    let leased = client
        .reentrant_lock("leased")
        .unwrap()
        .try_lock_with(leased)
        .await
        .unwrap()
        .unwrap();
    let renewed = client
        .reentrant_lock("renewed")
        .unwrap()
        .lock()
        .await
        .unwrap();
    let before = leased.remaining();
    for _ in 0..3 {
        proxy.cut();
        let lock = client.reentrant_lock("leased").unwrap();
        eventually("the connection is back", || async {
            lock.is_locked().await.is_ok()
        })
        .await;
    }
    eventually("it was checked", || async { proxy.count(Verb::Renew) >= 2 }).await;
    assert!(!leased.is_lost() && !renewed.is_lost());
    assert!(
        leased.remaining() <= before
            && server.pttl("leased") > 30_000
            && server.pttl("leased") <= 50_000
    );
    leased.unlock().await.unwrap();
    renewed.unlock().await.unwrap();
}

// --- commands that the server lacks, or does not allow ---

/// Starts a server without these commands.
fn lacking(commands: &[&str]) -> Server {
    let args: Vec<&str> = commands
        .iter()
        .flat_map(|command| ["--rename-command", command, ""])
        .collect();
    Server::start_with(&args)
}

#[track_caller]
fn assert_lacks(error: &Error, command: &str) {
    let (Error::Store { source, .. } | Error::Connect { source, .. }) = error else {
        panic!("{error:?}")
    };
    assert_eq!(source.kind(), StoreErrorKind::UnknownCommand, "{error}");
    assert!(
        !error.is_transient() && !source.may_have_executed(),
        "{error}"
    );
    // A line of a script may call two commands.
    let named = source.command().unwrap_or_default().to_lowercase();
    assert!(
        named.split(',').any(|one| one == command) && named.split(',').count() < 3,
        "{error}"
    );
    assert!(
        error.to_string().to_lowercase().contains(command) && error.to_string().contains("6.2"),
        "{error}"
    );
}

/// A client checks at connect for the commands that connections and locks need.
#[tokio::test]
async fn a_connect_names_the_command_that_a_server_lacks() {
    for command in ["HELLO", "EVAL", "EVALSHA"] {
        let server = lacking(&[command]);
        for &wire in WIRES {
            let url = format!("redis://default:sesame@{}", server.addr());
            let error = LockClient::builder()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .connect(url)
                .await
                .unwrap_err();
            assert_lacks(&error, &command.to_lowercase());
            // The server quotes the request in its error, which must not reveal the password.
            assert!(
                !format!("{error} {error:?}").contains("sesame"),
                "{error:?}"
            );
        }
    }
    let server = lacking(&["WAIT"]);
    let builder = LockClient::builder().replicas(1, ms(100));
    assert_lacks(&builder.connect(server.url()).await.unwrap_err(), "wait");
}

#[tokio::test]
async fn a_connect_names_the_command_that_a_user_may_not_use() {
    let server = Server::start_real();
    for command in ["eval", "evalsha"] {
        server.call(&[
            "ACL",
            "SETUSER",
            "u",
            "reset",
            "on",
            ">pw",
            "~*",
            "&*",
            "+@all",
            &format!("-{command}"),
        ]);
        for &wire in WIRES {
            let url = format!("redis://u:pw@{}", server.addr());
            let error = LockClient::builder()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .connect(url)
                .await
                .unwrap_err();
            let Error::Connect { source, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!(
                (source.kind(), source.command()),
                (StoreErrorKind::NoPermission, Some(command)),
                "{error}"
            );
            assert!(
                !error.is_transient() && error.to_string().contains("ACL"),
                "{error}"
            );
        }
    }
}

/// A missing command is final: even an acquire without a limit ends, nothing is written, and
/// nothing is left to settle.
#[tokio::test]
async fn a_command_that_a_script_lacks_is_a_final_error() {
    for (command, kind) in [
        ("pexpire", "mutex"),
        ("time", "fair"),
        ("time", "fenced"),
        ("hset", "mutex"),
    ] {
        let server = lacking(&[command]);
        if kind == "fair" {
            // A free fair lock without a queue does not call TIME, so this one is held.
            server.call(&["HSET", "l", "8743c9c0-0795-4907-87fd-6c719a6b4586:1", "1"]);
        }
        let before = server.dump();
        for &wire in WIRES {
            let client = LockClient::builder()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .connect(format!("redis://{}", server.addr()))
                .await
                .unwrap();
            let lock = match kind {
                "fair" => client.fair_lock("l").unwrap(),
                "fenced" => client.fenced_lock("l").unwrap(),
                _ => client.mutex("l").unwrap(),
            };
            let scripts = server.script_count();
            for _ in 0..3 {
                assert_lacks(
                    &timeout(ms(20_000), lock.lock())
                        .await
                        .expect("an end")
                        .unwrap_err(),
                    command,
                );
            }
            assert!(
                server.script_count() <= scripts + 8,
                "it was sent again and again"
            );
            assert_eq!(server.dump(), before, "{command}");
            assert_eq!(client.stats().settling, 0);
            client.shutdown().await.unwrap();
        }
    }
}

/// A release that is refused for good is retried, but a shutdown does not wait for it.
#[tokio::test]
async fn a_shutdown_waits_for_no_release_that_is_refused_for_good() {
    let server = lacking(&["PUBLISH"]);
    for &wire in WIRES {
        let client = LockClient::builder()
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .connect(format!("redis://{}", server.addr()))
            .await
            .unwrap();
        let guard = client.mutex("told").unwrap().lock().await.unwrap();
        assert_lacks(&guard.unlock().await.unwrap_err(), "publish");
        drop(client.mutex("dropped").unwrap().lock().await.unwrap());
        let forgotten = client.mutex("kept").unwrap().lock().await.unwrap();
        let began = Instant::now();
        let error = client.shutdown().await.unwrap_err();
        assert!(
            matches!(error, Error::Unsettled { releases: 3, .. }),
            "{error:?}"
        );
        let why = "enable PUBLISH";
        assert!(error.to_string().contains(why), "{error}");
        // Requests without a reply may take this long.
        assert!(
            began.elapsed() < Duration::from_secs(5),
            "{:?}",
            began.elapsed()
        );
        // the connections are closed by then, and the client still tries
        tokio::time::sleep(Duration::from_millis(100)).await;
        let again = client.shutdown().await.unwrap_err();
        assert!(again.to_string().contains(why), "{again}");
        drop(forgotten);
        server.call(&["FLUSHALL"]);
    }
}

/// The server refused a release once, and is silent since.
#[tokio::test]
async fn a_shutdown_tells_the_last_reason_not_an_old_one() {
    for locks in [1, 3] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let client = LockClient::connect(&proxy.url()).await.unwrap();
        let guards: Vec<_> = (0..locks)
            .map(|n| client.mutex(format!("l{n}")).unwrap())
            .collect();
        let mut held = Vec::new();
        for lock in &guards {
            held.push(lock.lock().await.unwrap());
        }
        proxy.each(
            Verb::Release,
            Action::Refuse("NOREPLICAS Not enough good replicas to write."),
        );
        drop(held);
        // by then the client pauses for 250 ms or more
        let refused = || async { proxy.count(Verb::Release) >= 8 * locks };
        eventually("releases are refused", refused).await;
        proxy.rule(|request| {
            if request.is_script() {
                Action::Mute
            } else {
                Action::Pass
            }
        });
        let error = client.shutdown().await.unwrap_err().to_string();
        assert!(!error.contains("NOREPLICAS"), "{locks}: {error}");
        assert_eq!(client.shutdown().await.unwrap_err().to_string(), error);
    }
}

/// One request releases several locks, and it is the first that brings no reply.
#[tokio::test]
async fn a_shutdown_tells_why_a_joint_release_failed() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(&proxy.url()).await.unwrap();
    let (a, b) = (client.mutex("a").unwrap(), client.mutex("b").unwrap());
    let held = (a.lock().await.unwrap(), b.lock().await.unwrap());
    proxy.rule(|request| {
        if request.is_script() {
            Action::Mute
        } else {
            Action::Pass
        }
    });
    let error = client.shutdown().await.unwrap_err().to_string();
    let why = "2 are left): Timeout: no reply within the command timeout";
    assert!(error.contains(why), "{error}");
    drop(held);
}

/// The script has acquired the lock, but WAIT fails, so the client takes the lock back.
#[tokio::test]
async fn an_acquire_whose_wait_fails_is_taken_back() {
    let server = lacking(&["WAIT"]);
    for &wire in WIRES {
        let client = LockClient::builder()
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .connect(format!("redis://{}", server.addr()))
            .await
            .unwrap();
        let lock = client.mutex("l").unwrap();
        let asked = lock.lock_with(AcquireOptions::new().replicas(1));
        assert_lacks(
            &timeout(ms(20_000), asked)
                .await
                .expect("an end")
                .unwrap_err(),
            "wait",
        );
        client.idle().await;
        assert_eq!(server.dump(), []);
        client.shutdown().await.unwrap();
    }
}
