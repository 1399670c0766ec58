//! Multi-locks: all or nothing, in any order, of any kind, on any server.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{AcquireOptions, Error, Lock, LockClient, Tuning};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{
    cancel::poll_times,
    contract::{contract_suite, nothing_is_left},
    support::{
        Server, eventually,
        history::History,
        proxy::{Action, Proxy, Verb},
    },
};

contract_suite! {
    mod contract,
    door = |client, name| {
        let members = [name.to_owned(), format!("{name}:2"), format!("{name}:3")];
        let members = members.map(|name| client.reentrant_lock(name).unwrap());
        client.multi_lock(members).unwrap()
    },
    one_record = false,
}

// One request cannot acquire these members together.
contract_suite! {
    mod contract_of_mixed_members,
    door = |client, name| {
        let members: [nestlock::Lock; 3] = [
            client.reentrant_lock(name).unwrap(),
            client.fair_lock(format!("{name}:2")).unwrap(),
            client.read_write_lock(format!("{name}:3")).unwrap().write_lock(),
        ];
        client.multi_lock(members).unwrap()
    },
    one_record = false,
}

const SOON: Duration = Duration::from_secs(20);

fn plain(client: &LockClient, names: &[&str]) -> Vec<Lock> {
    names
        .iter()
        .map(|name| client.reentrant_lock(name).unwrap())
        .collect()
}

/// Returns members that need a request each, because the middle one is fair.
fn mixed(client: &LockClient, names: &[&str; 3]) -> Vec<Lock> {
    let mut members = plain(client, names);
    members[1] = client.fair_lock(names[1]).unwrap();
    members
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[tokio::test]
async fn a_multi_lock_of_nothing_is_refused() {
    let server = Server::start();
    let client = server.client().await;
    let refused = client.multi_lock([]).map(drop);
    assert!(
        matches!(refused, Err(Error::InvalidName { .. })),
        "{refused:?}"
    );
}

#[tokio::test]
async fn one_busy_member_keeps_all_free() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let names = ["l1", "l2", "l3"];
    for members in [plain(&a, &names), mixed(&a, &names)] {
        let busy = b.reentrant_lock("l3").unwrap().lock().await.unwrap();
        let all = a.multi_lock(members).unwrap();
        assert!(all.try_lock().await.unwrap().is_none());
        assert!(all.try_lock_for(ms(150)).await.unwrap().is_none());
        // The members that were acquired are released before the call returns.
        assert!(!server.exists("l1") && !server.exists("l2"));
        assert!(all.is_locked().await.unwrap());
        assert_eq!(all.holder().await.unwrap(), None);
        busy.unlock().await.unwrap();
        let guard = all.try_lock().await.unwrap().expect("all are free");
        assert_eq!((guard.name(), guard.members().len()), ("l1+l2+l3", 3));
        assert_eq!(all.holder().await.unwrap(), Some(guard.owner()));
        assert_eq!(all.hold_count(&guard.owner()).await.unwrap(), 1);
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R74, R77: the lease is the requested one, however many attempts the acquire takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r74_r77_every_member_gets_the_lease_that_was_asked_for() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let names = ["l1", "l2", "l3"];
    let rival = b.reentrant_lock("l3").unwrap();
    let all = a.multi_lock(plain(&a, &names)).unwrap();
    for contended in [false, true, true, true] {
        let busy = if contended {
            Some(rival.lock().await.unwrap())
        } else {
            None
        };
        let options = AcquireOptions::new().lease(Duration::from_secs(10));
        let acquire = all.try_lock_for_with(SOON, options);
        let (guard, ()) = tokio::join!(acquire, async {
            if let Some(busy) = busy {
                eventually("it waits", || async { !server.channels().is_empty() }).await;
                busy.unlock().await.unwrap();
            }
        });
        let guard = guard.unwrap().expect("free in time");
        for name in names {
            let ttl = server.pttl(name);
            assert!((1..=10_000).contains(&ttl), "{name}: {ttl}");
        }
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R75: a wait of zero tries once: all members together, or each by itself.
#[tokio::test]
async fn r75_a_wait_of_zero_tries_once() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let names = ["l1", "l2", "l3"];
    let _busy = b.reentrant_lock("l3").unwrap().lock().await.unwrap();
    // With a request per member: three tries and two releases.
    for (members, scripts) in [(plain(&a, &names), 1), (mixed(&a, &names), 5)] {
        let all = a.multi_lock(members).unwrap();
        assert!(all.try_lock().await.unwrap().is_none()); // scripts are known from here on
        let before = server.script_count();
        assert!(all.try_lock_for(Duration::ZERO).await.unwrap().is_none());
        assert_eq!(server.script_count() - before, scripts);
    }
    assert!(server.channels().is_empty(), "no client is subscribed");
}

/// R76, R81, S9: tasks that take the same locks in random orders, or only one of them, all make
/// progress.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r76_r81_random_orders_do_not_block_each_other() {
    let server = Server::start();
    let names = ["l1", "l2", "l3", "l4"];
    let inside: Arc<[AtomicUsize; 4]> = Arc::default();
    let holds = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    let mut tasks = Vec::new();
    for number in 0..3 {
        let client = server.client().await;
        for task in 0..8 {
            let (client, inside, holds) = (client.clone(), Arc::clone(&inside), Arc::clone(&holds));
            tasks.push(tokio::spawn(async move {
                let mut rng = StdRng::seed_from_u64(number * 100 + task);
                for _ in 0..20 {
                    let mut order = [0, 1, 2, 3];
                    order.shuffle(&mut rng);
                    let mine = &order[..rng.random_range(1..=3)];
                    let mut members = plain(
                        &client,
                        &mine.iter().map(|at| names[*at]).collect::<Vec<_>>(),
                    );
                    let all = match members.len() {
                        1 => members.remove(0),
                        _ => client.multi_lock(members).unwrap(),
                    };
                    let guard = all.lock().await.unwrap();
                    for at in mine {
                        assert_eq!(
                            inside[*at].fetch_add(1, Ordering::SeqCst),
                            0,
                            "two hold {}",
                            names[*at]
                        );
                    }
                    tokio::task::yield_now().await;
                    for at in mine {
                        inside[*at].fetch_sub(1, Ordering::SeqCst);
                    }
                    guard.unlock().await.unwrap();
                    holds.fetch_add(1, Ordering::SeqCst);
                }
            }));
        }
        clients.push(client);
    }
    let mut all = pin!(join_all(tasks));
    let ended = loop {
        let before = holds.load(Ordering::SeqCst);
        // On a busy machine some tasks wait long. No hold at all within 30 s is a deadlock.
        match tokio::time::timeout(Duration::from_secs(30), &mut all).await {
            Ok(ended) => break ended,
            Err(_) => assert!(
                holds.load(Ordering::SeqCst) > before,
                "after {before} holds no task gets in"
            ),
        }
    };
    for task in ended {
        task.unwrap();
    }
    nothing_is_left(&server, &clients.iter().collect::<Vec<_>>()).await;
}

/// R78: a wait for a busy member is a wait, not a storm of retries.
#[tokio::test]
async fn r78_waiting_costs_little() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let busy = b.reentrant_lock("l2").unwrap().lock().await.unwrap();
    let all = a.multi_lock(plain(&a, &["l1", "l2"])).unwrap();
    let before = server.script_count();
    assert!(all.try_lock_for(ms(2500)).await.unwrap().is_none());
    let scripts = server.script_count() - before;
    // One attempt for all members, then a waiter on one lock that polls once a second.
    assert!(scripts <= 12, "{scripts} scripts");
    busy.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R79: if the server of one member does not reply, no member stays held.
#[tokio::test]
async fn r79_a_member_without_a_reply_leaves_nothing_held() {
    let (one, two) = (Server::start(), Server::start());
    let short = |server: &Server| {
        let server = server.url();
        async move {
            LockClient::builder()
                .command_timeout(ms(300))
                .connect(server)
                .await
                .unwrap()
        }
    };
    let (a, b) = (short(&one).await, short(&two).await);
    let members = [plain(&a, &["l1"]), plain(&b, &["l2"]), plain(&a, &["l3"])].concat();
    let all = a.multi_lock(members).unwrap();
    two.stop();
    let failed = all.try_lock_for(ms(400)).await.map(drop);
    assert!(
        matches!(failed, Err(Error::Unconfirmed { .. } | Error::Store { .. })),
        "{failed:?}"
    );
    assert!(!one.exists("l1") && !one.exists("l3"));
    two.cont();
    nothing_is_left(&two, &[&b]).await;
    nothing_is_left(&one, &[&a]).await;
    // These clients tolerate a late reply.
    let (a, b) = (one.client().await, two.client().await);
    let members = [plain(&a, &["l1"]), plain(&b, &["l2"]), plain(&a, &["l3"])].concat();
    let all = a.multi_lock(members).unwrap();
    all.try_lock_for(SOON)
        .await
        .unwrap()
        .expect("all are free")
        .unlock()
        .await
        .unwrap();
}

/// R80: an acquire that is cancelled at any point leaves no member held.
#[tokio::test]
async fn r80_an_acquire_dropped_at_any_poll_holds_no_member() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (names, rival) = (["l1", "l2", "l3"], b.reentrant_lock("l3").unwrap());
    for (members, contended) in [
        (plain(&a, &names), false),
        (plain(&a, &names), true),
        (mixed(&a, &names), true),
    ] {
        let all = a.multi_lock(members).unwrap();
        let mut ends = 0;
        for k in 1..200 {
            let busy = if contended {
                Some(rival.lock().await.unwrap())
            } else {
                None
            };
            let release = async {
                tokio::task::yield_now().await;
                drop(busy);
            };
            let (guard, ()) = tokio::join!(poll_times(all.lock(), k), release);
            ends += usize::from(guard.is_some());
            drop(guard);
            a.idle().await;
            b.idle().await;
            assert!(!all.is_locked().await.unwrap(), "{k} polls");
            assert_eq!(server.dump(), [], "{k} polls");
            if ends == 4 {
                break;
            }
        }
        assert_eq!(ends, 4, "it never completed");
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R84: members may be of any kind, including multi-locks.
#[tokio::test]
async fn r84_members_may_be_of_any_kind() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let members = |client: &LockClient| -> Vec<Lock> {
        vec![
            client.reentrant_lock("reentrant").unwrap(),
            client.fair_lock("fair").unwrap(),
            client.read_write_lock("read").unwrap().read_lock(),
            client.read_write_lock("write").unwrap().write_lock(),
            client.fenced_lock("fenced").unwrap(),
            client.spin_lock("spin").unwrap(),
            client.non_reentrant_lock("once").unwrap(),
            client.multi_lock(plain(client, &["n1", "n2"])).unwrap(),
        ]
    };
    let (la, lb) = (
        a.multi_lock(members(&a)).unwrap(),
        b.multi_lock(members(&b)).unwrap(),
    );
    let guard = la.lock().await.unwrap();
    assert!(lb.try_lock().await.unwrap().is_none());
    assert!(guard.members()[4].fencing_token().is_some());
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap() });
    eventually("it waits", || async { b.stats().channels > 0 }).await;
    guard.unlock().await.unwrap();
    let next = tokio::time::timeout(SOON, waiter)
        .await
        .expect("woken")
        .unwrap();
    next.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

#[tokio::test]
async fn the_loss_of_one_member_is_the_loss_of_all() {
    let (one, two) = (Server::start(), Server::start());
    let watchdog = |c: nestlock::LockClientBuilder| c.watchdog_timeout(ms(600));
    let (a, b) = (
        one.client_with(watchdog).await,
        two.client_with(watchdog).await,
    );
    for (l2, lives_on) in [(plain(&b, &["l2"]), &two), (plain(&a, &["l2"]), &one)] {
        let all = a.multi_lock([plain(&a, &["l1"]), l2].concat()).unwrap();
        let guard = all.lock().await.unwrap();
        assert!(!guard.is_lost() && guard.remaining() > Duration::ZERO);
        lives_on.call(&["DEL", "l2"]);
        let loss = tokio::time::timeout(SOON, guard.lost())
            .await
            .expect("it is notified");
        assert!(
            matches!(loss, Error::Lost { ref lock, .. } if lock == "l2"),
            "{loss}"
        );
        assert!(guard.is_lost());
        assert_eq!(guard.remaining(), Duration::ZERO);
        let unlocked = guard.unlock().await;
        assert!(matches!(unlocked, Err(Error::Lost { .. })), "{unlocked:?}");
        // The other member is released all the same.
        assert!(!one.exists("l1"));
    }
    nothing_is_left(&one, &[&a]).await;
    nothing_is_left(&two, &[&b]).await;
}

/// An unlock detects a loss that went unnoticed, and releases the other members.
#[tokio::test]
async fn an_unlock_says_which_member_was_lost_and_frees_the_others() {
    let server = Server::start();
    let a = server.client().await;
    let all = a.multi_lock(plain(&a, &["l1", "l2", "l3"])).unwrap();
    for lost in [&["DEL", "l2"] as &[&str], &["SET", "l2", "data"]] {
        let guard = all.lock().await.unwrap();
        server.call(lost);
        match guard.unlock().await {
            Err(Error::Lost { lock, .. }) if lost.len() == 2 => assert_eq!(lock, "l2"),
            Err(Error::WrongType { lock, .. }) if lost.len() == 3 => assert_eq!(lock, "l2"),
            other => panic!("{lost:?}: {other:?}"),
        }
        assert!(!server.exists("l1") && !server.exists("l3"));
        server.call(&["DEL", "l2"]);
    }
    nothing_is_left(&server, &[&a]).await;
}

#[tokio::test]
async fn data_at_one_members_name_is_refused_and_named() {
    let server = Server::start();
    let a = server.client().await;
    let all = a.multi_lock(plain(&a, &["l1", "l2", "l3"])).unwrap();
    for (data, kind) in [
        (&["SET", "l3", "data"] as &[&str], "string"),
        (&["HSET", "l3", "name", "Ada"], "hash"),
    ] {
        server.call(data);
        let before = server.dump();
        match all.lock().await.map(drop) {
            Err(Error::WrongType { lock, .. }) if kind == "string" => assert_eq!(lock, "l3"),
            Err(Error::WrongLockKind { lock, .. }) if kind == "hash" => assert_eq!(lock, "l3"),
            other => panic!("{kind}: {other:?}"),
        }
        assert_eq!(server.dump(), before);
        server.call(&["DEL", "l3"]);
    }
    nothing_is_left(&server, &[&a]).await;
}

#[tokio::test]
async fn the_watchdog_renews_every_member() {
    let server = Server::start();
    let watchdog = ms(600);
    let a = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    let names = ["l1", "l2", "l3"];
    let guard = a
        .multi_lock(plain(&a, &names))
        .unwrap()
        .lock()
        .await
        .unwrap();
    let start = Instant::now();
    eventually("three timeouts are over", || async {
        assert!(
            !guard.is_lost() && names.iter().all(|name| server.exists(name)),
            "after {:?}",
            start.elapsed()
        );
        start.elapsed() > 3 * watchdog
    })
    .await;
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a]).await;
}

#[tokio::test]
async fn the_release_of_all_wakes_the_waiters_of_each() {
    let server = Server::start();
    // With this poll cap, only a message wakes the waiters.
    let (a, b) = (
        server.client().await,
        server
            .client_with(|c| c.poll_cap(Duration::from_secs(3600)))
            .await,
    );
    let names = ["l1", "l2", "l3"];
    let all = a.multi_lock(plain(&a, &names)).unwrap();
    let guard = all
        .try_lock_with(AcquireOptions::new().lease(Duration::from_secs(3600)))
        .await
        .unwrap()
        .unwrap();
    let waiters = names.map(|name| {
        let lock = b.reentrant_lock(name).unwrap();
        tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
    });
    eventually("all wait", || async { b.stats().channels == 3 }).await;
    guard.unlock().await.unwrap();
    for waiter in waiters {
        tokio::time::timeout(SOON, waiter)
            .await
            .expect("woken")
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The branches of one task are one owner: they share the owner lock, and re-enter each other's
/// holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owners_opposite_orders_and_repeated_names_are_re_entries() {
    let server = Server::start();
    let a = server.client().await;
    let multi = |names: &[&str]| a.multi_lock(plain(&a, names)).unwrap();
    let (there, back, twice) = (
        multi(&["l1", "l2", "l3"]),
        multi(&["l3", "l2", "l1"]),
        multi(&["l1", "l1", "l2"]),
    );
    for _ in 0..50 {
        let (one, two, three) = tokio::join!(there.lock(), back.lock(), twice.lock());
        let guards = [one.unwrap(), two.unwrap(), three.unwrap()];
        for (name, holds) in [("l1", 4), ("l2", 3), ("l3", 2)] {
            assert_eq!(
                server.record(name),
                [(guards[0].owner().to_string(), holds)]
            );
        }
        let [one, two, three] = guards;
        let (one, two, three) = tokio::join!(one.unlock(), two.unlock(), three.unlock());
        one.and(two).and(three).unwrap();
        assert_eq!(server.dump(), []);
    }
    nothing_is_left(&server, &[&a]).await;
}

/// One request for many members blocks the server, so it takes at most 500.
#[tokio::test]
async fn more_than_five_hundred_members_go_by_themselves() {
    let server = Server::start();
    let a = server
        .client_with(|builder| {
            builder.tuning(Tuning {
                bundle: false,
                ..Tuning::default()
            })
        })
        .await;
    plain(&a, &["warm"])[0]
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    a.multi_lock(plain(&a, &["warm"]))
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    for (members, scripts) in [(500, 2), (501, 2 * 501)] {
        let names: Vec<String> = (0..members).map(|number| format!("l{number}")).collect();
        let all = a
            .multi_lock(plain(
                &a,
                &names.iter().map(String::as_str).collect::<Vec<_>>(),
            ))
            .unwrap();
        let before = server.script_count();
        all.lock().await.unwrap().unlock().await.unwrap();
        assert_eq!(server.script_count() - before, scripts, "{members} members");
    }
    nothing_is_left(&server, &[&a]).await;
}

/// R80, F33: an unlock that is dropped at any point still completes.
#[tokio::test]
async fn r80_f33_an_unlock_dropped_at_any_poll_frees_all() {
    let server = Server::start();
    let a = server.client().await;
    let all = a.multi_lock(plain(&a, &["l1", "l2", "l3"])).unwrap();
    for k in 1..50 {
        let guard = all.lock().await.unwrap();
        let done = poll_times(guard.unlock(), k).await;
        a.idle().await;
        assert_eq!(server.dump(), [], "{k} polls");
        if let Some(unlocked) = done {
            unlocked.unwrap();
            nothing_is_left(&server, &[&a]).await;
            return;
        }
    }
    panic!("it never completed");
}

// --- one request for all, over a bad link ---

/// The command timeout.
const T: Duration = Duration::from_millis(500);

/// Connects a client through a proxy, and returns a multi-lock of it. The scripts are already
/// loaded.
async fn behind_a_proxy(server: &Server) -> (Proxy, LockClient, Lock) {
    let proxy = Proxy::start(server);
    let client = LockClient::builder()
        .command_timeout(T)
        .connect(proxy.url())
        .await
        .unwrap();
    plain(&client, &["l1"])[0]
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let all = client
        .multi_lock(plain(&client, &["l1", "l2", "l3"]))
        .unwrap();
    all.lock().await.unwrap().unlock().await.unwrap();
    (proxy, client, all)
}

/// R79, F13: no member stays held, whatever happens to the request or its reply.
#[tokio::test]
async fn r79_f13_a_multi_acquire_without_a_reply_holds_no_member() {
    for action in [
        Action::Late(2 * T),
        Action::Slow(2 * T),
        Action::Lose,
        Action::CutBefore,
        Action::Ghost(T / 2),
    ] {
        let server = Server::start();
        let (proxy, client, all) = behind_a_proxy(&server).await;
        proxy.once(Verb::Acquire, action);
        let start = Instant::now();
        let refused = all.try_lock().await.map(drop);
        assert!(
            matches!(refused, Err(Error::Unconfirmed { .. })),
            "{action:?}: {refused:?}"
        );
        assert!(start.elapsed() < 2 * T, "{action:?}: {:?}", start.elapsed());
        eventually("the request is over", || async {
            action != Action::Ghost(T / 2) || proxy.ghosts() == 1
        })
        .await;
        nothing_is_left(&server, &[&client]).await;

        // An acquire that still has time gets all members, each with one hold.
        proxy.once(Verb::Acquire, action);
        let guard = all.try_lock_for(SOON).await.unwrap().expect("the locks");
        for member in guard.members() {
            assert_eq!(
                server.record(member.name()),
                [(member.owner().to_string(), 1)],
                "{action:?}"
            );
        }
        guard.unlock().await.unwrap();
        nothing_is_left(&server, &[&client]).await;
    }
}

#[tokio::test]
async fn f13_a_release_of_all_without_a_reply_frees_all() {
    for action in [
        Action::Late(2 * T),
        Action::Lose,
        Action::CutBefore,
        Action::Refuse("LOADING not yet"),
    ] {
        let server = Server::start();
        let (proxy, client, all) = behind_a_proxy(&server).await;
        let guard = all.lock().await.unwrap();
        proxy.once(Verb::Release, action);
        let start = Instant::now();
        let unlocked = guard.unlock().await;
        match action {
            Action::Late(_) => assert!(
                matches!(unlocked, Err(Error::Unconfirmed { .. })),
                "{unlocked:?}"
            ),
            _ => unlocked.unwrap(),
        }
        assert!(start.elapsed() < 2 * T, "{action:?}: {:?}", start.elapsed());
        nothing_is_left(&server, &[&client]).await;
    }
}

/// F14: the server may execute each request for all members twice.
#[tokio::test]
async fn f14_requests_for_all_that_arrive_twice_change_nothing() {
    let server = Server::start();
    let (proxy, client, all) = behind_a_proxy(&server).await;
    proxy.rule(|request| {
        if request.verb().is_some() {
            Action::Twice
        } else {
            Action::Pass
        }
    });
    for _ in 0..5 {
        let guard = all.lock().await.unwrap();
        for member in guard.members() {
            assert_eq!(
                server.record(member.name()),
                [(member.owner().to_string(), 1)]
            );
        }
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

#[tokio::test]
async fn a_wait_for_all_is_bounded_where_no_server_replies() {
    let server = Server::start();
    let a = server.client().await;
    let all = a.multi_lock(plain(&a, &["l1", "l2"])).unwrap();
    server.stop();
    let start = Instant::now();
    let refused = all.try_lock_for(ms(300)).await.map(drop);
    let waited = start.elapsed();
    server.cont();
    assert!(
        matches!(refused, Err(Error::Unconfirmed { .. })),
        "{refused:?}"
    );
    // Less than the command timeout of 3 s.
    assert!(waited >= ms(300) && waited < ms(2000), "{waited:?}");
    nothing_is_left(&server, &[&a]).await;
}

#[tokio::test]
async fn an_owner_of_one_client_can_not_take_members_of_another() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let all = a
        .multi_lock([plain(&a, &["l1"]), plain(&b, &["l2"])].concat())
        .unwrap();
    let refused = all
        .try_lock_with(AcquireOptions::new().owner(a.owner("me").unwrap()))
        .await
        .map(drop);
    assert!(
        matches!(refused, Err(Error::InvalidOwner { .. })),
        "{refused:?}"
    );
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The limit applies to the wait for all members, not to the wait for each.
#[tokio::test]
async fn the_whole_wait_is_bounded() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let busy = (
        b.reentrant_lock("l1").unwrap().lock().await.unwrap(),
        b.reentrant_lock("l3").unwrap().lock().await.unwrap(),
    );
    let all = a.multi_lock(plain(&a, &["l1", "l2", "l3"])).unwrap();
    let start = Instant::now();
    let (outcome, ()) = tokio::join!(all.try_lock_for(ms(900)), async {
        tokio::time::sleep(ms(300)).await;
        busy.0.unlock().await.unwrap();
    });
    assert!(outcome.unwrap().is_none());
    assert!(
        start.elapsed() >= ms(890) && start.elapsed() < SOON,
        "{:?}",
        start.elapsed()
    );
    busy.1.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Issue 10, C19: a member that hangs costs the wait, and no command timeout on top of it.
/// Releasing the other members adds none either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_is_bounded_where_one_member_hangs() {
    let (one, two, three) = (Server::start(), Server::start(), Server::start());
    let client = |server: &Server| {
        let server = server.url();
        async move {
            LockClient::builder()
                .command_timeout(ms(10_000))
                .connect(server)
                .await
                .unwrap()
        }
    };
    let (a, b, c) = (client(&one).await, client(&two).await, client(&three).await);
    // Less than the command timeout.
    let most = ms(8000);
    let members = || [plain(&a, &["l1"]), plain(&b, &["l2"]), plain(&c, &["l3"])].concat();
    let all = a.multi_lock(members()).unwrap();
    for (busy, hangs) in [(None, &two), (Some(&c), &two), (None, &one)] {
        let held = match busy {
            Some(rival) => Some(rival.reentrant_lock("l3").unwrap().lock().await.unwrap()),
            None => None,
        };
        // In another task, because this one would re-enter the rival's hold.
        let all = all.clone();
        hangs.stop();
        let start = Instant::now();
        let outcome =
            tokio::spawn(
                async move { all.try_lock_for(ms(500)).await.map(|guard| guard.is_some()) },
            );
        let outcome = outcome.await.unwrap();
        let waited = start.elapsed();
        if hangs.addr() != one.addr() {
            eventually("the members that reply are released", || async {
                !one.exists("l1")
            })
            .await;
        }
        hangs.cont();
        assert!(waited >= ms(500) && waited < most, "{waited:?}");
        match held {
            Some(guard) => {
                assert!(
                    matches!(outcome, Ok(false)),
                    "it is busy in any case: {outcome:?}"
                );
                guard.unlock().await.unwrap();
            }
            None => assert!(
                matches!(outcome, Err(Error::Unconfirmed { .. })),
                "{outcome:?}"
            ),
        }
        nothing_is_left(&one, &[&a]).await;
        nothing_is_left(&two, &[&b]).await;
        nothing_is_left(&three, &[&c]).await;
    }
    all.try_lock_for(SOON)
        .await
        .unwrap()
        .expect("all are free")
        .unlock()
        .await
        .unwrap();
}

/// Runs four processes with eight tasks each; see `support::history`.
#[test]
fn no_two_of_32_tasks_in_four_processes_hold_a_member_at_once() {
    let server = Server::start_real();
    for leases in [false, true] {
        History::play(&server, "multi", 4, 30, leases).assert_no_clashes();
    }
}
