//! String locks: the record of RedLock libraries on one server, with values of the user's choice.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use nestlock::{AcquireOptions, Error, Lock, LossReason, OwnerId};

use crate::{
    contract::{contract_suite, nothing_is_left},
    support::{
        Server, eventually,
        proxy::{Action, Proxy, Verb},
        wire::Reply,
    },
};

contract_suite! {
    mod contract,
    door = |client, name| client.string_lock(name).unwrap(),
    reentrant = false,
    listens = false,
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn value(text: &str) -> AcquireOptions {
    AcquireOptions::new().value(text)
}

#[tokio::test]
async fn the_record_is_one_string_with_a_ttl() {
    let server = Server::start();
    let client = server.client_with(|c| c.name_prefix("app:")).await;
    let guard = client.string_lock("l").unwrap().lock().await.unwrap();
    assert_eq!(
        server.call(&["GET", "app:l"]),
        Reply::Text(guard.owner().to_string())
    );
    assert_eq!(
        (server.dump().len(), server.pttl("app:l") > 20_000),
        (1, true)
    );
    guard.unlock().await.unwrap();
    assert!(server.dump().is_empty());
}

/// A process of another library sets the value, and compares it before it deletes it.
#[tokio::test]
async fn records_of_other_libraries_exclude() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.string_lock("l").unwrap();
    server.call(&["SET", "l", "dG9rZW4=", "NX", "PX", "60000"]);
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(
        lock.holder().await.unwrap().unwrap().to_string(),
        "dG9rZW4="
    );
    assert!(lock.remaining_lease().await.unwrap().unwrap() > ms(50_000));
    // a client that knows the value can adopt the lock
    let owner = OwnerId::from_value("dG9rZW4=").unwrap();
    assert_eq!(lock.hold_count(&owner).await.unwrap(), 1);
    lock.extend(&owner, Duration::from_secs(600)).await.unwrap();
    assert!(server.pttl("l") > 500_000);
    lock.release(&owner).await.unwrap();
    assert!(matches!(
        lock.release(&owner).await,
        Err(Error::NotHeld { .. })
    ));
    assert!(matches!(
        lock.extend(&owner, ms(1000)).await,
        Err(Error::NotHeld { .. })
    ));
    let guard = lock.lock().await.unwrap();
    assert_eq!(
        server.call(&["SET", "l", "other", "NX", "PX", "60000"]),
        Reply::Nil
    );
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

/// P5: passing a value does not prove a hold: the server checks it.
#[tokio::test]
async fn p5_a_chosen_value_is_handed_over_and_checked_on_the_server() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (a.string_lock("l").unwrap(), b.string_lock("l").unwrap());
    let guard = la
        .try_lock_with(value("token-1").lease(ms(60_000)))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(guard.owner().as_str(), "token-1");
    assert_eq!(server.call(&["GET", "l"]), Reply::Text("token-1".into()));
    let owner = OwnerId::from_value("token-1").unwrap();
    let other = OwnerId::from_value("token-2").unwrap();
    assert!(matches!(
        lb.extend(&other, ms(90_000)).await,
        Err(Error::NotHeld { .. })
    ));
    assert!(matches!(
        lb.release(&other).await,
        Err(Error::NotHeld { .. })
    ));
    // the other process extends and releases, which the guard here detects
    lb.extend(&owner, ms(90_000)).await.unwrap();
    lb.release(&owner).await.unwrap();
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LossReason::RecordMissing,
            ..
        })
    ));
    // the same value again is a new hold
    let guard = la.try_lock_with(value("token-1")).await.unwrap().unwrap();
    assert!(matches!(
        la.lock_with(value("token-1")).await,
        Err(Error::NotReentrant { .. })
    ));
    assert!(
        la.try_lock_with(value("token-1")).await.unwrap().is_none(),
        "a try does not wait: it is busy"
    );
    assert!(
        la.try_lock_with(value("token-2")).await.unwrap().is_none(),
        "another value is another owner"
    );
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// An invalid value is refused before anything is sent.
#[tokio::test]
async fn values_that_are_none_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let client = server.client().await;
    let string = client.string_lock("l").unwrap();
    let before = server.script_count();
    for bad in [
        String::new(),
        "x".repeat(1025),
        client.current_owner().to_string(),
    ] {
        let refused = string.try_lock_with(value(&bad)).await;
        assert!(
            matches!(refused, Err(Error::InvalidOwner { .. })),
            "{bad:?}: {refused:?}"
        );
    }
    for lock in [
        client.reentrant_lock("l").unwrap(),
        client.fair_lock("l").unwrap(),
    ] {
        assert!(matches!(
            lock.try_lock_with(value("token")).await,
            Err(Error::InvalidOwner { .. })
        ));
    }
    assert_eq!(server.script_count(), before);
    assert!(OwnerId::from_value("").is_err());
}

/// R52: each of two kinds with one name gets `WrongType` while the other is held.
#[tokio::test]
async fn r52_a_hash_at_the_name_is_a_wrong_type_and_vice_versa() {
    let server = Server::start();
    let client = server.client().await;
    let (string, reentrant) = (
        client.string_lock("l").unwrap(),
        client.reentrant_lock("l").unwrap(),
    );
    let guard = reentrant.lock().await.unwrap();
    assert!(matches!(
        string.try_lock().await,
        Err(Error::WrongType { .. })
    ));
    assert!(matches!(
        string.is_locked().await,
        Err(Error::WrongType { .. })
    ));
    guard.unlock().await.unwrap();
    let guard = string.lock().await.unwrap();
    assert!(matches!(
        reentrant.try_lock().await,
        Err(Error::WrongType { .. })
    ));
    guard.unlock().await.unwrap();
}

/// A value that another program wrote may be any bytes. Such an owner is shown with replacement
/// characters: reads succeed, and the shown text neither releases nor extends the lock.
#[tokio::test]
async fn an_owner_that_is_no_utf8_is_read_and_left_alone() {
    let server = Server::start();
    let client = server.client().await;
    let foreign: [(Lock, &str); 3] = [
        (
            client.string_lock("s").unwrap(),
            "redis.call('set', 's', 'a\\255\\0b', 'px', 60000)",
        ),
        (
            client.signal_lock("g").unwrap(),
            "redis.call('set', 'lock:g', 'a\\255\\0b', 'px', 60000)",
        ),
        (
            client.reentrant_lock("r").unwrap(),
            "redis.call('hset', 'r', 'ffffffff-1111-4222-8333-444455556666:\\255', 1) redis.call('pexpire', 'r', 60000)",
        ),
    ];
    for (lock, command) in foreign {
        assert!(!server.call(&["EVAL", command, "0"]).is_error());
        let before = server.dump();
        let holder = lock.holder().await.unwrap().expect("it is held");
        assert!(holder.as_str().contains('\u{fffd}'), "{holder}");
        assert!(lock.is_locked().await.unwrap() && lock.remaining_lease().await.unwrap().is_some());
        assert_eq!(lock.hold_count(&client.current_owner()).await.unwrap(), 0);
        assert!(lock.try_lock().await.unwrap().is_none());
        assert!(matches!(
            lock.release(&holder).await,
            Err(Error::NotHeld { .. })
        ));
        assert!(matches!(
            lock.extend(&holder, Duration::from_secs(600)).await,
            Err(Error::NotHeld { .. })
        ));
        assert_eq!(server.dump(), before);
        assert!(lock.force_unlock().await.unwrap());
    }
}

/// A query without a reply changes nothing, so its outcome is never in doubt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_query_without_a_reply_is_never_an_unknown_outcome() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = nestlock::LockClient::builder()
        .watchdog_timeout(ms(900))
        .connect(proxy.url())
        .await
        .unwrap();
    let lock = client.string_lock("l").unwrap();
    for action in [Action::Lose, Action::Mute, Action::CutBefore] {
        proxy.rule(|_| Action::Pass);
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while lock.is_locked().await.is_err() {
            assert!(std::time::Instant::now() < deadline, "no connection");
            tokio::time::sleep(ms(10)).await;
        }
        proxy.rule(move |request| {
            if request.is_script() && request.args().is_empty() {
                action
            } else {
                Action::Pass
            }
        });
        let error = lock.holder().await.unwrap_err();
        let Error::Store { source, .. } = &error else {
            panic!("{action:?}: {error:?}")
        };
        assert!(
            !source.may_have_executed() && source.is_transient(),
            "{action:?}: {source}"
        );
    }
}

/// A request with a value got no reply: its late execution could not be told from a new hold with
/// that value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_in_doubt_is_not_used_again_until_it_is_settled() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = nestlock::LockClient::builder()
        .watchdog_timeout(ms(900))
        .connect(proxy.url())
        .await
        .unwrap();
    let lock = client.string_lock("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap(); // scripts are known
    let mut lose = true;
    proxy.rule(move |request| {
        let is_acquire =
            request.is_script() && request.args().len() == 2 && std::mem::take(&mut lose);
        if is_acquire {
            Action::Lose
        } else {
            Action::Pass
        }
    });
    let lost = lock.try_lock_with(value("token").lease(ms(60_000))).await;
    assert!(matches!(lost, Err(Error::Unconfirmed { .. })), "{lost:?}");
    let refused = lock.try_lock_for_with(ms(200), value("token")).await;
    assert!(
        matches!(refused, Err(Error::Unconfirmed { .. })),
        "{refused:?}"
    );
    // any other value is still usable
    lock.try_lock_for_with(ms(5000), value("other"))
        .await
        .unwrap()
        .expect("the late request is settled")
        .unlock()
        .await
        .unwrap();
    client.idle().await;
    assert!(!server.exists("l"));
    lock.try_lock_with(value("token"))
        .await
        .unwrap()
        .expect("settled")
        .unlock()
        .await
        .unwrap();
}

/// The acquire got no reply, and the release that settles it, or the repeated one, executes late.
/// The waiter gets an error: a lock acquired with the same value would be deleted by that release,
/// and another client could then hold the lock at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_with_a_value_does_not_use_it_again() {
    for nth in [1, 2] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let client = nestlock::LockClient::builder()
            .watchdog_timeout(ms(900))
            .connect(proxy.url())
            .await
            .unwrap();
        let lock = client.string_lock("l").unwrap();
        lock.lock().await.unwrap().unlock().await.unwrap(); // scripts are known
        let (mut acquires, mut releases) = (0, 0);
        proxy.rule(move |request| {
            let count = match request.verb() {
                Some(Verb::Acquire) => {
                    acquires += 1;
                    return if acquires == 1 {
                        Action::Mute
                    } else {
                        Action::Pass
                    };
                }
                Some(Verb::Release) => &mut releases,
                _ => return Action::Pass,
            };
            *count += 1;
            match nth.cmp(count) {
                // no reply, so that the client sends another one
                Ordering::Greater => Action::Mute,
                Ordering::Equal => Action::Ghost(ms(1000)),
                Ordering::Less => Action::Pass,
            }
        });
        let got = lock
            .try_lock_for_with(ms(20_000), value("token").lease(ms(60_000)))
            .await;
        assert!(matches!(got, Err(Error::Unconfirmed { .. })), "{got:?}");
        eventually("it is executed", || async { proxy.ghosts() == 1 }).await;
        nothing_is_left(&server, &[&client]).await;
    }
}

/// The watchdog renews a hold with the TTL of its acquire, not with the client's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_is_renewed_by_a_ttl_of_its_own() {
    let server = Server::start();
    let client = server.client().await; // watchdog: 30 s
    for lock in [
        client.string_lock("s").unwrap(),
        client.reentrant_lock("r").unwrap(),
    ] {
        let options = || AcquireOptions::new().watchdog_timeout(ms(1500));
        let guard = lock.try_lock_with(options()).await.unwrap().unwrap();
        let other = lock.name().to_owned() + "2";
        let longer = client.reentrant_lock(&other).unwrap().lock().await.unwrap();
        let start = std::time::Instant::now();
        while start.elapsed() < ms(4000) {
            let ttl = server.pttl(lock.name());
            assert!(
                (1..=1500).contains(&ttl),
                "after {:?}: {ttl} ms",
                start.elapsed()
            );
            tokio::time::sleep(ms(10)).await;
        }
        assert!(
            !guard.is_lost() && server.pttl(&other) > 20_000 && longer.remaining() > ms(20_000)
        );
        guard.unlock().await.unwrap();
        // the hold time can be limited
        let start = std::time::Instant::now();
        let guard = lock
            .try_lock_with(options().max_hold(ms(2500)))
            .await
            .unwrap()
            .unwrap();
        let lost = tokio::time::timeout(Duration::from_secs(10), guard.lost())
            .await
            .expect("it ends");
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
        // renewed after 500 ms, 1 s, 1.5 s and 2 s
        assert!(start.elapsed() > ms(2300), "{:?}", start.elapsed());
        longer.unlock().await.unwrap();
    }
    let refused = client
        .string_lock("s")
        .unwrap()
        .try_lock_with(AcquireOptions::new().watchdog_timeout(ms(9)))
        .await;
    assert!(matches!(refused, Err(Error::InvalidLease { .. })));
    nothing_is_left(&server, &[&client]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_many_clients_exclude_each_other() {
    let server = Server::start();
    let mut tasks = Vec::new();
    let inside = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    for _ in 0..3 {
        let client = server.client().await;
        for _ in 0..4 {
            let (lock, inside) = (client.string_lock("l").unwrap(), Arc::clone(&inside));
            tasks.push(tokio::spawn(async move {
                for _ in 0..15 {
                    let guard = lock.lock().await.unwrap();
                    assert_eq!(
                        inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst),
                        0,
                        "two are inside"
                    );
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    guard.unlock().await.unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(server.channels().is_empty());
}
