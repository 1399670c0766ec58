//! Names, leases, waits, owners, releases, configurations and URLs that are invalid, or nearly so.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use nestlock::{
    AcquireOptions, Error, LockClient, LockClientBuilder, LossReason, OwnerId, StoreErrorKind,
};
use proptest::{
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};

use crate::support::{Server, eventually, poll_once};

const TEN_YEARS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
const PASSWORD: &str = "hunter2-s3cret";

/// Awaits `future` for 60 s at most: enough for any machine, and a hang fails.
async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("an end")
}

/// Returns how many scripts and subscriptions the server has received, without heartbeats.
fn asked(server: &Server) -> u64 {
    server.script_count() + server.command_count("subscribe")
}

// --- names ---

#[tokio::test]
async fn f31_h10_h11_bad_names_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let client = server.client().await;
    let prefixed = server
        .client_with(|builder| builder.name_prefix("redisson_"))
        .await;
    let short = server
        .client_with(|builder| builder.name_prefix("app:").max_name_len(8))
        .await;
    let before = asked(&server);
    let long = "x".repeat(1025);
    let wide = "ä".repeat(513);
    for name in [
        "",
        &long,
        &wide,
        "redisson_lock_queue:{x}",
        "redisson_lock__channel:{x}",
        "redisson_",
        "{x}:0a1b:1:rwlock_timeout:1",
        "{",
        "}",
        "{}",
        "}{",
        "{}a",
        "a{b",
        "a}b",
        "}a{b}",
    ] {
        let Err(Error::InvalidName {
            name: refused,
            reason,
            ..
        }) = client.reentrant_lock(name)
        else {
            panic!("{name:?} was accepted");
        };
        assert_eq!(refused, name);
        assert!(!reason.is_empty() && !reason.ends_with('.'), "{reason}");
    }
    assert!(
        matches!(
            prefixed.reentrant_lock("lock"),
            Err(Error::InvalidName { .. })
        ),
        "the prefix counts"
    );
    assert!(
        matches!(short.reentrant_lock(""), Err(Error::InvalidName { .. })),
        "a prefix alone is not a name"
    );
    assert!(short.reentrant_lock("1234").is_ok());
    assert!(matches!(
        short.reentrant_lock("12345"),
        Err(Error::InvalidName { .. })
    ));
    assert_eq!(asked(&server), before, "nothing was sent");
    assert_eq!(server.dump(), []);
}

/// R55: no character of a name is special, and every name can be waited for.
#[tokio::test]
async fn r55_f31_nasty_names_work_end_to_end() {
    let server = Server::start();
    let a = server.client().await;
    let b = server
        .client_with(|builder| builder.poll_cap(Duration::from_secs(600)))
        .await;
    let longest = "n".repeat(1024);
    for name in [
        " ",
        "\0",
        "a\0b",
        "\r\n",
        "*1\r\n$8\r\nFLUSHALL\r\n",
        ":",
        "a:b::c:",
        "{tag}",
        "{tag}:a",
        "a{tag}b}",
        "ключ",
        "锁",
        "🔒\u{200d}🗝\u{fe0f}",
        "\u{202e}rtl\u{0301}",
        "\u{feff}\u{10ffff}",
        "\x01\x7f\u{80}",
        "\"quoted\" 'too' \\",
        "%s%n${x}[[:alpha:]]*?^",
        "0",
        "-1",
        "mode",
        &longest,
    ] {
        let (la, lb) = (
            a.reentrant_lock(name).unwrap(),
            b.reentrant_lock(name).unwrap(),
        );
        assert_eq!(la.name(), name);
        let guard = la.lock().await.unwrap();
        assert_eq!(
            server.record(name),
            [(guard.owner().to_string(), 1)],
            "{name:?}"
        );
        let inner = la.lock().await.unwrap();
        assert!(lb.try_lock().await.unwrap().is_none(), "{name:?}");
        let waiter = tokio::spawn(async move { lb.lock().await.unwrap().unlock().await.unwrap() });
        let channel = if name.contains('{') {
            format!("redisson_lock__channel:{name}")
        } else {
            format!("redisson_lock__channel:{{{name}}}")
        };
        eventually("a subscription", || async {
            server.channels().contains(&channel)
        })
        .await;
        inner.unlock().await.unwrap();
        guard.unlock().await.unwrap();
        soon(waiter).await.unwrap();
        assert_eq!(server.dump(), [], "{name:?}");
    }
}

// --- leases ---

fn no_leases() -> [Duration; 8] {
    [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(999),
        Duration::from_millis(1),
        Duration::from_nanos(9_999_999),
        TEN_YEARS + Duration::from_nanos(1),
        Duration::from_millis(u64::MAX),
        Duration::MAX,
    ]
}

/// H1, H2, L14: the client refuses a lease that the server would refuse or treat as a deletion.
#[tokio::test]
async fn h1_h2_l14_invalid_leases_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let client = server.client().await;
    let (free, held) = (
        client.reentrant_lock("free").unwrap(),
        client.reentrant_lock("held").unwrap(),
    );
    let guard = held.lock().await.unwrap();
    let (before, record) = (asked(&server), server.dump());
    for lease in no_leases() {
        let refused =
            |error| matches!(error, Error::InvalidLease { lease: named, .. } if named == lease);
        for lock in [&free, &held] {
            let options = AcquireOptions::new().lease(lease);
            assert!(
                refused(lock.try_lock_with(options.clone()).await.unwrap_err()),
                "{lease:?}"
            );
            assert!(
                refused(lock.lock_with(options).await.unwrap_err()),
                "{lease:?}"
            );
            assert!(
                refused(lock.extend(&guard.owner(), lease).await.unwrap_err()),
                "{lease:?}"
            );
        }
        assert!(refused(guard.extend(lease).await.unwrap_err()), "{lease:?}");
    }
    assert_eq!(asked(&server), before, "nothing was sent");
    assert_eq!(server.dump(), record);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
}

/// L2, N2: a lease is in milliseconds, from the shortest to the longest.
#[tokio::test]
async fn l2_n2_leases_at_the_edges_work() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    for lease in [
        TEN_YEARS,
        Duration::from_secs(1),
        Duration::from_millis(1234),
        TEN_YEARS - Duration::from_nanos(1),
    ] {
        let guard = lock
            .try_lock_with(AcquireOptions::new().lease(lease))
            .await
            .unwrap()
            .unwrap();
        let (ttl, wanted) = (
            server.pttl("l"),
            i64::try_from(lease.as_nanos().div_ceil(1_000_000)).unwrap(),
        );
        assert!(
            ttl > 0 && ttl <= wanted && ttl > wanted - 20_000,
            "{lease:?}: {ttl}"
        );
        assert!(guard.remaining() <= lease);
        guard.unlock().await.unwrap();
    }
    // The shortest leases may end before their reply arrives, but their records never stay.
    for millis in 10..30 {
        let options = AcquireOptions::new().lease(Duration::from_millis(millis));
        match lock.try_lock_with(options).await {
            Ok(guard) => drop(guard),
            Err(Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            }) => {}
            Err(Error::Unconfirmed { source, .. })
                if source.to_string().contains("after the lease had ended") => {}
            Err(error) => panic!("{millis} ms: {error}"),
        }
        client.idle().await;
    }
    eventually("the lock to be free", || async { !server.exists("l") }).await;
    // An extension is in milliseconds as well.
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(Duration::from_secs(5)))
        .await
        .unwrap()
        .unwrap();
    guard.extend(Duration::from_secs(60)).await.unwrap();
    let ttl = server.pttl("l");
    assert!((40_000..=60_000).contains(&ttl), "{ttl}");
    assert!(guard.remaining() > Duration::from_secs(30));
}

/// F39, N9, P1: no duration ever leaves a record without a TTL.
#[test]
fn r37_f39_n9_p1_no_duration_leaves_a_record_without_ttl() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = Server::start();
    let client = runtime.block_on(server.client());
    let number = AtomicUsize::new(0);
    let duration = prop_oneof![
        (0..40_000_000_u64).prop_map(Duration::from_nanos),
        any::<u64>().prop_map(Duration::from_nanos),
        any::<u64>().prop_map(Duration::from_millis),
        (any::<u64>(), 0..1_000_000_000_u32)
            .prop_map(|(seconds, nanos)| Duration::new(seconds, nanos)),
        (0..700_000_000_u64).prop_map(Duration::from_secs),
    ];
    let config = Config {
        cases: 300,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        ..Config::default()
    };
    let outcome =
        TestRunner::new(config).run(&(duration.clone(), duration), |(lease, extension)| {
            let name = format!("l{}", number.fetch_add(1, Ordering::Relaxed));
            let lock = client.reentrant_lock(&name).unwrap();
            let allowed =
                |lease: Duration| lease >= Duration::from_millis(10) && lease <= TEN_YEARS;
            runtime.block_on(async {
                let acquired = lock.try_lock_with(AcquireOptions::new().lease(lease)).await;
                let ttl = server.pttl(&name);
                prop_assert_ne!(ttl, -1);
                match acquired {
                    Ok(Some(guard)) => {
                        prop_assert!(allowed(lease));
                        prop_assert!(ttl > 0 || lease < Duration::from_secs(10), "{}", ttl);
                        let extended = guard.extend(extension).await;
                        prop_assert_ne!(server.pttl(&name), -1);
                        match extended {
                            Ok(()) => prop_assert!(allowed(extension)),
                            Err(Error::InvalidLease { .. }) => prop_assert!(!allowed(extension)),
                            Err(error) => {
                                prop_assert!(lease < Duration::from_secs(10), "{}", error);
                            }
                        }
                        let _ = guard.leave_to_lease();
                    }
                    Ok(None) => prop_assert!(false, "busy"),
                    Err(Error::InvalidLease { .. }) => prop_assert!(!allowed(lease) && ttl == -2),
                    Err(error) => prop_assert!(lease < Duration::from_secs(10), "{}", error),
                }
                Ok(())
            })
        });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    let keys = server.dump();
    assert!(keys.len() > 10, "{} records", keys.len());
    for (key, ..) in keys {
        assert_ne!(server.pttl(&key), -1, "{key}");
    }
}

// --- waits ---

/// R75, N3: a wait of zero is valid and means one try: one script, no subscription.
#[tokio::test]
async fn r75_n3_a_wait_of_zero_tries_once() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let _guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let lock = b.reentrant_lock("l").unwrap();
    lock.try_lock().await.unwrap(); // the server knows the script from here on
    for _ in 0..3 {
        let before = asked(&server);
        assert!(
            soon(lock.try_lock_for(Duration::ZERO))
                .await
                .unwrap()
                .is_none()
        );
        assert_eq!(asked(&server), before + 1);
    }
    assert_eq!(server.command_count("subscribe"), 0);
}

#[tokio::test]
async fn waits_at_the_edges_end_when_they_should() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = b.reentrant_lock("l").unwrap();
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    for wait in [
        Duration::from_nanos(1),
        Duration::from_micros(999),
        Duration::from_millis(1),
    ] {
        assert!(
            soon(lock.try_lock_for(wait)).await.unwrap().is_none(),
            "{wait:?}"
        );
    }
    let mut waiters = Vec::new();
    for wait in [
        Duration::MAX,
        Duration::from_secs(u64::MAX / 2),
        Duration::from_secs(u64::MAX / 4),
        TEN_YEARS * 100,
    ] {
        let lock = lock.clone();
        let held = async move {
            lock.try_lock_for(wait)
                .await
                .unwrap()
                .expect("the lock, in the end")
                .unlock()
                .await
        };
        waiters.push(tokio::spawn(held));
    }
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
    guard.unlock().await.unwrap();
    for waiter in waiters {
        soon(waiter).await.unwrap().unwrap();
    }
    // On a free lock, every wait succeeds.
    for wait in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
        soon(lock.try_lock_for(wait))
            .await
            .unwrap()
            .expect("free")
            .unlock()
            .await
            .unwrap();
    }
}

// --- owners ---

#[tokio::test]
async fn an_owner_of_another_client_cannot_acquire() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let lock = a.reentrant_lock("l").unwrap();
    let before = asked(&server);
    let read: OwnerId = b.owner("job").unwrap().to_string().parse().unwrap();
    for owner in [b.owner("job").unwrap(), b.current_owner(), read] {
        let error = lock
            .try_lock_with(AcquireOptions::new().owner(owner.clone()))
            .await
            .unwrap_err();
        assert!(
            matches!(&error, Error::InvalidOwner { owner: named, .. } if *named == owner.to_string()),
            "{error}"
        );
    }
    assert_eq!(asked(&server), before, "nothing was sent");
    // An owner of its own is accepted, even if parsed from text.
    let own: OwnerId = a.owner("job").unwrap().to_string().parse().unwrap();
    let guard = lock
        .try_lock_with(AcquireOptions::new().owner(own.clone()))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(guard.owner(), own);
    guard.unlock().await.unwrap();
}

/// A text that is not a valid owner is a typed error.
#[test]
fn owners_that_are_none_are_not_read() {
    let uuid = "0a1b2c3d-1111-4222-8333-444455556666";
    for text in [
        "",
        ":",
        "a:b",
        uuid,
        &format!("{uuid}:"),
        &format!("{}:1", uuid.replace('-', "")),
        &format!("x{uuid}:1"),
    ] {
        assert!(
            matches!(text.parse::<OwnerId>(), Err(Error::InvalidOwner { .. })),
            "{text:?}"
        );
    }
    // Three parts are valid: Redisson's transactions have them.
    for text in [
        format!("{uuid}:1"),
        format!("{uuid}:1:tx"),
        format!("{uuid}:x/job.3"),
    ] {
        assert_eq!(text.parse::<OwnerId>().unwrap().to_string(), text);
    }
}

// --- releases ---

/// R43, R44, F38, P9, S12: an owner that does not hold the lock cannot release it, and the error
/// says which case it is.
#[tokio::test]
async fn r43_r44_f38_p9_s12_a_release_by_a_non_holder_changes_nothing() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    let mut ears = server.wire();
    ears.call(&["PSUBSCRIBE", "*"]).unwrap();
    let not_held = |outcome: nestlock::Result<()>| match outcome {
        Err(Error::NotHeld { lock, .. }) => assert_eq!(lock, "l"),
        other => panic!("{other:?}"),
    };
    // The lock is free.
    for owner in [a.current_owner(), b.current_owner(), a.owner("x").unwrap()] {
        not_held(la.release(&owner).await);
    }
    let guard = la.lock().await.unwrap();
    let record = server.dump();
    // Another client, another task, and another client in the name of another owner fail.
    not_held(lb.release(&b.current_owner()).await);
    not_held(la.release(&a.owner("x").unwrap()).await);
    not_held(lb.release(&a.owner("x").unwrap()).await);
    let (lock, client) = (la.clone(), a.clone());
    tokio::spawn(async move { not_held(lock.release(&client.current_owner()).await) })
        .await
        .unwrap();
    assert!(matches!(
        lb.extend(&b.current_owner(), Duration::from_secs(600))
            .await,
        Err(Error::NotHeld { .. })
    ));
    assert!(matches!(
        la.extend(&a.owner("x").unwrap(), Duration::from_secs(600))
            .await,
        Err(Error::NotHeld { .. })
    ));
    assert_eq!(server.dump(), record);
    // A second release fails: by hand, and by a guard whose hold was released by hand.
    la.release(&guard.owner()).await.unwrap();
    not_held(la.release(&guard.owner()).await);
    not_held(guard.unlock().await);
    assert_eq!(server.dump(), []);
    server.call(&["PUBLISH", "end", "end"]);
    assert_eq!(ears.read().unwrap().list()[3].text(), "0", "one release");
    assert_eq!(
        ears.read().unwrap().list()[2].text(),
        "end",
        "was notified once"
    );
}

/// N11: after a known loss, a release sends nothing.
#[tokio::test]
async fn n11_r43_a_release_after_the_loss_says_lost_at_once() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    // The lease ended.
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(Duration::from_millis(50)))
        .await
        .unwrap()
        .unwrap();
    let error = soon(guard.lost()).await;
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
    eventually("the record to end", || async { !server.exists("l") }).await;
    server.stop();
    let start = Instant::now();
    let outcome = guard.unlock().await;
    let took = start.elapsed();
    server.cont();
    assert!(
        matches!(
            outcome,
            Err(Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            })
        ),
        "{outcome:?}"
    );
    assert!(
        took < Duration::from_secs(1),
        "{took:?}: it sent a request to a server that hangs"
    );
    client.idle().await;

    // The record vanished, and the client learns of it from the release.
    let guard = lock.lock().await.unwrap();
    let inner = lock.lock().await.unwrap();
    server.call(&["DEL", "l"]);
    let outcome = inner.unlock().await;
    assert!(
        matches!(
            outcome,
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            })
        ),
        "{outcome:?}"
    );
    let outcome = guard.unlock().await;
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    client.idle().await;
    assert_eq!(server.dump(), []);
    assert_eq!(client.stats().holds, 0);
}

/// R43, N4: if a background release finds nothing or is refused, the next release does not succeed.
#[tokio::test]
async fn r43_n4_a_release_says_what_the_background_found_out_first() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    for data in [false, true, false, true] {
        server.call(&["DEL", "l"]);
        let (outer, inner) = (lock.lock().await.unwrap(), lock.lock().await.unwrap());
        server.call(&["DEL", "l"]);
        if data {
            server.call(&["SET", "l", "data"]);
        }
        server.stop();
        drop(inner);
        // Give the background time to send its release. Otherwise the test passes but proves
        // nothing.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let mut unlock = Box::pin(outer.unlock());
        let polled = poll_once(unlock.as_mut()).await;
        server.cont();
        assert!(polled.is_pending());
        match soon(unlock).await {
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }) if !data => {}
            Err(Error::WrongType { .. }) if data => {}
            outcome => panic!("{outcome:?}"),
        }
        soon(client.idle()).await;
        assert_eq!(server.exists("l"), data);
    }
}

/// R20: a hold that was lost and given up is gone. The owner's next acquire begins a new one.
#[tokio::test]
async fn r20_a_lock_whose_lease_is_over_can_be_acquired_again() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    for unlock in [true, false, true, false] {
        // The lease is longer than a reply takes on a busy machine.
        let lease = AcquireOptions::new().lease(Duration::from_millis(1_500));
        let guard = lock.try_lock_with(lease).await.unwrap().unwrap();
        soon(guard.lost()).await;
        if unlock {
            let outcome = guard.unlock().await;
            assert!(
                matches!(
                    outcome,
                    Err(Error::Lost {
                        reason: LossReason::LeaseExpired,
                        ..
                    })
                ),
                "{outcome:?}"
            );
        } else {
            drop(guard);
        }
        let guard = lock.lock().await.expect("a new hold");
        assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
        guard.unlock().await.unwrap();
    }
    client.idle().await;
    assert_eq!((server.dump(), client.stats().holds), (vec![], 0));
}

/// R43: a late release does not touch the next owner's hold.
#[tokio::test]
async fn r43_a_release_after_a_takeover_leaves_the_new_hold() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let late = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    assert!(b.reentrant_lock("l").unwrap().force_unlock().await.unwrap());
    let new = b.reentrant_lock("l").unwrap().lock().await.unwrap();
    let record = server.dump();
    let outcome = late.unlock().await;
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    a.idle().await;
    assert_eq!(server.dump(), record);
    new.unlock().await.unwrap();
}

/// F37: the hold count has a limit, and reaching it changes nothing.
#[tokio::test]
async fn f37_too_many_holds_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let client = server.client_with(|builder| builder.max_holds(3)).await;
    let lock = client.reentrant_lock("l").unwrap();
    let mut guards = Vec::new();
    for _ in 0..3 {
        guards.push(lock.lock().await.unwrap());
    }
    let (before, record) = (asked(&server), server.dump());
    for _ in 0..2 {
        let error = lock.lock().await.unwrap_err();
        assert!(
            matches!(error, Error::TooManyHolds { holds: 3, .. }),
            "{error}"
        );
    }
    assert_eq!((asked(&server), server.dump()), (before, record));
    guards.pop().unwrap().unlock().await.unwrap();
    guards.push(lock.lock().await.unwrap());
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    assert_eq!(server.dump(), []);
}

// --- configuration ---

/// A configuration that makes no sense is refused before anything is sent.
#[tokio::test]
async fn r36_l5_a_senseless_configuration_is_refused_before_sending() {
    type Change = fn(LockClientBuilder) -> LockClientBuilder;
    let server = Server::start();
    let before = server
        .call(&["INFO", "stats"])
        .text()
        .lines()
        .find(|l| l.starts_with("total_conn"))
        .map(str::to_owned);
    let changes: [Change; 11] = [
        |b| b.watchdog_timeout(Duration::ZERO),
        |b| b.watchdog_timeout(Duration::from_millis(199)),
        |b| b.watchdog_timeout(Duration::MAX),
        |b| b.command_timeout(Duration::ZERO),
        |b| b.command_timeout(Duration::from_secs(11)),
        |b| b.command_timeout(Duration::MAX),
        |b| b.poll_cap(Duration::ZERO),
        |b| b.poll_cap(Duration::from_nanos(1)),
        |b| b.connect_timeout(Duration::ZERO),
        |b| b.max_holds(0),
        |b| b.max_name_len(0),
    ];
    for (number, change) in changes.iter().enumerate() {
        let outcome = change(LockClient::builder()).connect(server.url()).await;
        assert!(
            matches!(outcome, Err(Error::InvalidConfig { .. })),
            "{number}: {outcome:?}"
        );
    }
    let after = server.call(&["INFO", "stats"]);
    let after = after
        .text()
        .lines()
        .find(|line| line.starts_with("total_conn"))
        .unwrap();
    let count = |line: &str| {
        line.rsplit(':')
            .next()
            .unwrap()
            .trim()
            .parse::<u32>()
            .unwrap()
    };
    assert_eq!(
        count(after),
        count(&before.unwrap()) + 1,
        "only this test's own connection was made"
    );
}

/// R36, L5: allowed extremes work on a free lock, on a contended one, and without a wake-up.
#[tokio::test]
async fn r36_l5_extreme_configurations_work() {
    type Change = fn(LockClientBuilder) -> LockClientBuilder;
    let server = Server::start();
    let changes: [Change; 8] = [
        |b| b.poll_cap(Duration::from_millis(1)),
        |b| b.poll_cap(Duration::MAX),
        |b| b.outage_patience(Duration::ZERO),
        |b| b.outage_patience(Duration::MAX),
        |b| b.connect_timeout(Duration::MAX),
        |b| {
            b.watchdog_timeout(Duration::from_millis(600))
                .command_timeout(Duration::from_millis(200))
        },
        |b| {
            b.watchdog_timeout(TEN_YEARS)
                .command_timeout(Duration::from_secs(60))
        },
        |b| b.max_holds(u32::MAX).max_name_len(usize::MAX),
    ];
    for (number, change) in changes.iter().enumerate() {
        let (a, b) = (
            server.client_with(change).await,
            server.client_with(change).await,
        );
        let (la, lb) = (
            a.reentrant_lock("l").unwrap(),
            b.reentrant_lock("l").unwrap(),
        );
        let guard = la.lock().await.unwrap();
        // Without a TTL, the waiter takes its longest sleep.
        server.call(&["PERSIST", "l"]);
        let waiter = tokio::spawn(async move { lb.lock().await.unwrap().unlock().await.unwrap() });
        eventually("a waiter", || async { !server.channels().is_empty() }).await;
        guard
            .unlock()
            .await
            .unwrap_or_else(|error| panic!("{number}: {error}"));
        soon(waiter)
            .await
            .unwrap_or_else(|error| panic!("{number}: {error}"));
        assert!(!server.exists("l"));
        eventually("the channel to be left", || async {
            server.channels().is_empty()
        })
        .await;
    }
}

/// With the longest patience, a wait outlasts a restart of the server.
#[tokio::test]
async fn an_endless_patience_outlasts_an_outage() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.outage_patience(Duration::MAX))
        .await;
    let lock = client.reentrant_lock("l").unwrap();
    server.kill();
    let waiter = tokio::spawn(async move { lock.lock().await });
    tokio::task::yield_now().await;
    server.restart();
    soon(waiter).await.unwrap().unwrap().unlock().await.unwrap();
}

// --- URLs ---

fn assert_hides_the_password(what: &str, text: &str) {
    assert!(
        !text.contains(PASSWORD) && !text.contains("s3cret"),
        "{what} shows the password: {text}"
    );
}

/// A URL that cannot be read is refused without showing the password.
#[tokio::test]
async fn an_unreadable_url_is_refused_without_showing_the_password() {
    for url in [
        format!("http://user:{PASSWORD}@localhost:6379"),
        format!("redis//user:{PASSWORD}@localhost"),
        format!("user:{PASSWORD}@localhost:6379"),
        format!("redis://user:{PASSWORD}@localhost:99999"),
        format!("redis://user:{PASSWORD}@localhost:port"),
        format!("redis://user:{PASSWORD}@[::1"),
        format!("redis://user:{PASSWORD}@:6379:6379"),
        format!("redis://user:{PASSWORD}@localhost/no-number"),
        format!("redis-cluster://user:{PASSWORD}@localhost:6379/x"),
        format!("redis-sentinel://user:{PASSWORD}@localhost:6379"),
        String::new(),
        "redis:".into(),
        "://".into(),
    ] {
        let outcome = soon(LockClient::connect(&url)).await;
        let error = outcome.err().unwrap_or_else(|| panic!("{url:?} was read"));
        assert!(
            matches!(error, Error::InvalidConfig { .. }),
            "{url:?}: {error}"
        );
        assert_hides_the_password(&url, &format!("{error} {error:?}"));
    }
    if !cfg!(feature = "rustls") {
        for scheme in ["rediss", "valkeys"] {
            let error = LockClient::connect(format!("{scheme}://u:{PASSWORD}@localhost"))
                .await
                .unwrap_err();
            assert!(
                matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains("rustls")),
                "{error}"
            );
            assert_hides_the_password(scheme, &format!("{error} {error:?}"));
        }
    }
}

#[tokio::test]
async fn the_password_never_shows() {
    let server = Server::start_with(&["--requirepass", PASSWORD]);
    let builder = || LockClient::builder().connect_timeout(Duration::from_secs(5));
    let url = format!("redis://:{PASSWORD}@{}", server.addr());
    let client = builder().connect(&url).await.unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    for text in [
        format!("{client:?} {client:#?}"),
        format!("{lock:?} {lock:#?}"),
        format!("{guard:?} {guard:#?}"),
        format!("{:?}", builder()),
    ] {
        assert_hides_the_password("Debug", &text);
    }
    guard.unlock().await.unwrap();
    // A wrong password, a wrong user, and no server.
    let nobody = LockClient::builder().connect_timeout(Duration::from_millis(300));
    for (builder, url) in [
        (
            builder(),
            format!("redis://:{PASSWORD}-not@{}", server.addr()),
        ),
        (
            builder(),
            format!("redis://nobody:{PASSWORD}@{}", server.addr()),
        ),
        (nobody, format!("redis://:{PASSWORD}@127.0.0.1:1")),
    ] {
        let error = soon(builder.connect(&url)).await.unwrap_err();
        let Error::Connect {
            address, source, ..
        } = &error
        else {
            panic!("{error}")
        };
        assert!(address.starts_with("127.0.0.1:"), "{address}");
        let chain = std::iter::successors(Some(source as &dyn std::error::Error), |error| {
            error.source()
        });
        let told = chain
            .map(|error| format!("{error} {error:?}"))
            .collect::<Vec<_>>()
            .join(" ");
        assert_hides_the_password("Error", &format!("{error} {error:?} {error:#?} {told}"));
    }
}

#[tokio::test]
async fn a_wrong_password_is_an_auth_error() {
    let server = Server::start_with(&["--requirepass", PASSWORD]);
    for user in ["", ":wrong@", "nobody:wrong@"] {
        let outcome = soon(LockClient::connect(format!(
            "redis://{user}{}",
            server.addr()
        )))
        .await;
        let Err(Error::Connect { source, .. }) = outcome else {
            panic!("{user:?}: {outcome:?}")
        };
        assert_eq!(source.kind(), StoreErrorKind::Auth, "{user:?}: {source}");
        assert!(!source.is_transient());
    }
}

#[tokio::test]
async fn a_url_names_database_user_and_password() {
    let server = Server::start_real();
    server.call(&[
        "ACL",
        "SETUSER",
        "locks",
        "on",
        &format!(">{PASSWORD}"),
        "~*",
        "&*",
        "+@all",
    ]);
    let client = LockClient::connect(format!("redis://locks:{PASSWORD}@{}/3", server.addr()))
        .await
        .unwrap();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    assert_eq!(server.dump(), [], "database 0 is empty");
    let mut wire = server.wire();
    wire.call(&["SELECT", "3"]).unwrap();
    assert_eq!(
        wire.call(&["HGET", "l", guard.owner().as_str()])
            .unwrap()
            .text(),
        "1"
    );
    // The same name in another database is another lock.
    server
        .client()
        .await
        .reentrant_lock("l")
        .unwrap()
        .try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    // A waiter in the same database is woken.
    let other = LockClient::builder().poll_cap(Duration::from_secs(600));
    let other = other
        .connect(format!("redis://locks:{PASSWORD}@{}/3", server.addr()))
        .await
        .unwrap();
    let waiter = tokio::spawn(async move {
        other
            .reentrant_lock("l")
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
    });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    guard.unlock().await.unwrap();
    soon(waiter).await.unwrap().unwrap();
    assert!(
        server
            .call(&["CLIENT", "LIST"])
            .text()
            .contains("user=locks")
    );
}

#[tokio::test]
async fn a_unix_socket_works() {
    let server = Server::start_real();
    let url = format!("redis+unix://{}", server.socket().display());
    let (a, b) = (
        LockClient::connect(&url).await.unwrap(),
        server.client().await,
    );
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let lock = b.reentrant_lock("l").unwrap();
    assert!(lock.try_lock().await.unwrap().is_none());
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    guard.unlock().await.unwrap();
    let guard = soon(waiter).await.unwrap();
    let lock = a.reentrant_lock("l").unwrap();
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
    guard.unlock().await.unwrap();
    soon(waiter).await.unwrap();
    assert_eq!(server.dump(), []);
}

/// A web handler needs these facts from an error.
#[tokio::test]
async fn errors_say_whether_to_send_409_or_503_and_for_which_lock() {
    let server = Server::start();
    let client = server.client().await;
    let kinds = |error: &Error| (error.is_conflict(), error.is_transient(), error.is_lost());
    let lock = client.non_reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    let again = lock.lock().await.unwrap_err();
    assert_eq!(
        (kinds(&again), again.lock_name()),
        ((true, false, false), Some("l"))
    );
    server.call(&["DEL", "l"]);
    let lost = guard.unlock().await.unwrap_err();
    assert_eq!(
        (kinds(&lost), lost.lock_name()),
        ((false, false, true), Some("l"))
    );
    let name = client.mutex("").unwrap_err();
    assert_eq!(
        (kinds(&name), name.lock_name()),
        ((false, false, false), Some(""))
    );
    client.shutdown().await.unwrap();
    let closed = lock.lock().await.unwrap_err();
    assert_eq!(
        (kinds(&closed), closed.lock_name()),
        ((false, false, false), None)
    );
    let nowhere = LockClient::builder()
        .connect_timeout(Duration::from_millis(300))
        .connect("redis://127.0.0.1:1")
        .await;
    assert_eq!(kinds(&nowhere.unwrap_err()), (false, true, false));
}
