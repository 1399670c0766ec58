//! Signal locks: python-redis-lock's records, and one waiter woken for each release.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Wake},
    time::{Duration, Instant},
};

use nestlock::{
    AcquireOptions, Error, Lock, LockClient, LossReason, OwnerId, SignalOptions, StoreErrorKind,
};
use tokio::task::JoinHandle;

use crate::{
    bad_server::{denials, log_in, set_user},
    cancel::poll_times,
    contract::contract_suite,
    support::{
        Server, eventually,
        proxy::{Action, Proxy, Request},
    },
};

contract_suite! {
    mod contract, door = |client, name| client.signal_lock(name).unwrap(),
    reentrant = false, signals = true
}

const RECORD: &str = "lock:l";
const SIGNAL: &str = "lock-signal:l";
/// An owner id in the format of python-redis-lock.
const PYTHON: &str = "47VYnQ+suoczi1BX8Zd/3LhO";
/// A poll interval beyond each test's timeout: only a signal can wake a waiter.
const NEVER: Duration = Duration::from_secs(3600);
/// A signal arrives within this time, which is well below the timeout of one BLPOP.
const PROMPT: Duration = Duration::from_secs(4);
const SOON: Duration = Duration::from_secs(30);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn patient(server: &Server) -> LockClient {
    server.client_with(|builder| builder.poll_cap(NEVER)).await
}

fn lock(client: &LockClient) -> Lock {
    client.signal_lock("l").unwrap()
}

/// Takes the lock as a client other than nestlock would.
fn hold_by_hand(server: &Server) {
    assert_eq!(
        server
            .call(&["SET", RECORD, PYTHON, "NX", "EX", "3600"])
            .text(),
        "OK"
    );
}

/// Releases the lock as that client would, in one step.
fn release_by_hand(server: &Server) {
    let script = "redis.call('del', KEYS[2]) redis.call('lpush', KEYS[2], 1) redis.call('pexpire', KEYS[2], 1000)
        return redis.call('del', KEYS[1])";
    assert_eq!(server.call(&["EVAL", script, "2", RECORD, SIGNAL]).int(), 1);
}

/// Returns the ids of the clients that block in a BLPOP, from `CLIENT LIST`.
fn blocked(server: &Server) -> Vec<String> {
    let list = server.call(&["CLIENT", "LIST"]);
    let lines = list
        .text()
        .lines()
        .filter(|line| line.contains("cmd=blpop") && line.contains("flags=b"));
    lines
        .map(|line| line.split([' ', '=']).nth(1).unwrap().to_owned())
        .collect()
}

async fn waiting(server: &Server, clients: u64) {
    eventually("BLPOPs that wait", || async { server.blocked() == clients }).await;
}

async fn prompt<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PROMPT, future)
        .await
        .unwrap_or_else(|_| panic!("not within {PROMPT:?}: {what}"))
}

fn spawn_waiter(lock: Lock) -> JoinHandle<nestlock::LockGuard> {
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

// --- what is on the server ---

#[tokio::test]
async fn keys_and_values_are_those_of_python_redis_lock() {
    let server = Server::start();
    let client = server.client_with(|c| c.name_prefix("app:")).await;
    let guard = client.signal_lock("l").unwrap().lock().await.unwrap();
    let dump = server.dump();
    assert_eq!(dump.len(), 1);
    assert_eq!(dump[0].0, "lock:app:l");
    assert_eq!(
        server.call(&["GET", "lock:app:l"]).text(),
        guard.owner().as_str()
    );
    assert_eq!(guard.name(), "app:l");
    guard.unlock().await.unwrap();
    assert_eq!(
        server
            .call(&["LRANGE", "lock-signal:app:l", "0", "-1"])
            .list()
            .len(),
        1
    );
    assert_eq!(server.call(&["LPOP", "lock-signal:app:l"]).text(), "1");
    assert_eq!(server.dump(), []);
    // the signal has the TTL that was configured
    for (options, least, most) in [
        (SignalOptions::new(), 1, 1000),
        (
            SignalOptions::new().signal_expire(Duration::from_secs(60)),
            50_000,
            60_000,
        ),
        (
            SignalOptions::new().signal_expire(Duration::MAX),
            1_000_000_000,
            i64::MAX,
        ),
    ] {
        client
            .signal_lock_with("l", options)
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        let life = server.pttl("lock-signal:app:l");
        assert!((least..=most).contains(&life), "{life} for {options:?}");
    }
}

/// P1: no lease leaves a record without a TTL. The server's TTL is rounded up to whole seconds; the
/// guard keeps the exact lease.
#[tokio::test]
async fn p1_a_lease_is_whole_seconds_on_the_server_and_never_shorter() {
    let server = Server::start();
    let client = server.client().await;
    for lease in [10, 999, 1000, 1001, 59_500, 3_600_000] {
        let options = AcquireOptions::new().lease(ms(lease));
        let Ok(Some(guard)) = lock(&client).try_lock_with(options).await else {
            continue;
        };
        let ttl = server.pttl(RECORD);
        let seconds = lease.div_ceil(1000) as i64 * 1000;
        assert!(ttl <= seconds && ttl > seconds - 900, "{ttl} for {lease}");
        assert!(guard.remaining() <= ms(lease));
        drop(guard);
        client.idle().await;
        server.call(&["DEL", RECORD]);
    }
    let guard = lock(&client).lock().await.unwrap();
    guard.extend(ms(61_500)).await.unwrap();
    assert!((61_500..=62_000).contains(&server.pttl(RECORD)));
    assert!(guard.remaining() <= ms(61_500) && guard.remaining() > ms(50_000));
    guard.unlock().await.unwrap();
    for bad in [Duration::ZERO, ms(9), Duration::MAX] {
        let refused = lock(&client)
            .try_lock_with(AcquireOptions::new().lease(bad))
            .await;
        assert!(
            matches!(refused, Err(Error::InvalidLease { .. })),
            "{bad:?}"
        );
    }
    assert!(!server.exists(RECORD));
}

/// P4, P5, P9: the value of the record is the owner, whatever its format; only that owner can
/// release or extend.
#[tokio::test]
async fn p4_p5_p9_a_recorded_owner_is_released_and_extended_by_name() {
    let server = Server::start();
    let client = server.client().await;
    for owner in [
        PYTHON,
        "given",
        "\u{fc}ber",
        "a:b",
        "0a1b2c3d-1111-4222-8333-444455556666:42",
        " ",
    ] {
        let lock = client.signal_lock("l").unwrap();
        server.call(&["SET", RECORD, owner, "EX", "100"]);
        let holder = lock.holder().await.unwrap().expect("held");
        assert_eq!(holder.as_str(), owner);
        assert!(lock.is_locked().await.unwrap());
        assert_eq!(lock.hold_count(&holder).await.unwrap(), 1);
        assert!(lock.remaining_lease().await.unwrap().unwrap() > Duration::from_secs(90));
        assert!(lock.try_lock().await.unwrap().is_none());
        let before = server.dump();
        let other: OwnerId = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:1".parse().unwrap();
        for stranger in [&other, &client.current_owner()] {
            assert!(
                matches!(lock.release(stranger).await, Err(Error::NotHeld { .. })),
                "{owner:?}"
            );
            assert!(matches!(
                lock.extend(stranger, Duration::from_secs(900)).await,
                Err(Error::NotHeld { .. })
            ));
        }
        assert_eq!(server.dump(), before);
        lock.extend(&holder, Duration::from_secs(900))
            .await
            .unwrap();
        assert!(server.pttl(RECORD) > 890_000);
        lock.release(&holder).await.unwrap();
        assert!(
            !server.exists(RECORD) && server.pttl(SIGNAL) > 0,
            "{owner:?}"
        );
        assert!(matches!(
            lock.release(&holder).await,
            Err(Error::NotHeld { .. })
        ));
    }
}

/// An owner of a signal lock that asks again is refused at once and without a request.
#[tokio::test]
async fn a_signal_locks_owner_is_refused_at_once_without_a_request() {
    let server = Server::start();
    let client = server.client().await;
    let guard = lock(&client).lock().await.unwrap();
    let requests = server.script_count();
    for refused in [
        lock(&client).lock().await.map(Some),
        lock(&client).try_lock_for(NEVER).await,
    ] {
        assert!(
            matches!(refused, Err(Error::NotReentrant { .. })),
            "{refused:?}"
        );
    }
    assert!(
        lock(&client).try_lock().await.unwrap().is_none(),
        "a try does not wait: it is busy"
    );
    assert_eq!(server.script_count(), requests);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn data_of_another_type_at_the_record_is_refused_and_left_alone() {
    let server = Server::start();
    let client = server.client().await;
    let lock = lock(&client);
    server.call(&["HSET", RECORD, "name", "Ada"]);
    let before = server.dump();
    let refused = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::WrongType { .. })), "{result:?}");
    };
    refused(lock.lock().await.map(drop));
    refused(lock.force_unlock().await.map(drop));
    refused(lock.holder().await.map(drop));
    refused(lock.release(&PYTHON_OWNER.parse().unwrap()).await);
    assert_eq!(
        client.maintenance().reset_all_signal_locks().await.unwrap(),
        0
    );
    assert_eq!(server.dump(), before);
}

const PYTHON_OWNER: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:1";

// --- without expiry ---

/// A lock without expiry has no TTL, is not renewed, and lasts until it is released.
#[tokio::test]
async fn a_lock_without_expiry_has_no_ttl_and_lasts_until_its_release() {
    let server = Server::start();
    let client = server.client_with(|c| c.watchdog_timeout(ms(1_500))).await;
    let endless = client
        .signal_lock_with("l", SignalOptions::new().without_expiry())
        .unwrap();
    let guard = endless.lock().await.unwrap();
    assert_eq!(server.pttl(RECORD), -1);
    assert_eq!(endless.remaining_lease().await.unwrap(), None);
    assert!(
        guard.remaining() > Duration::from_secs(9 * 365 * 24 * 3600),
        "{:?}",
        guard.remaining()
    );
    // the watchdog has run: it renews a hold of another kind in the same time
    let beside = client
        .reentrant_lock("beside")
        .unwrap()
        .lock()
        .await
        .unwrap();
    eventually("renewals", || async {
        server.command_count("pexpire") >= 6
    })
    .await;
    assert_eq!(server.command_count("expire"), 0);
    assert_eq!(server.pttl(RECORD), -1);
    assert!(!guard.is_lost());
    beside.unlock().await.unwrap();
    guard.unlock().await.unwrap();
    assert!(!server.exists(RECORD) && server.exists(SIGNAL));
    // an explicit lease still applies
    let guard = endless
        .try_lock_with(AcquireOptions::new().lease(Duration::from_secs(60)))
        .await
        .unwrap()
        .unwrap();
    assert!(server.pttl(RECORD) > 50_000);
    assert!(guard.remaining() < Duration::from_secs(60));
    drop(guard);
    client.idle().await;
    // a dropped guard or a cancelled acquire leaves nothing
    drop(endless.lock().await.unwrap());
    client.idle().await;
    assert!(!server.exists(RECORD));
    for polls in 1..6 {
        drop(poll_times(endless.lock(), polls).await);
        client.idle().await;
        assert!(!server.exists(RECORD), "{polls} polls");
    }
    eventually("the ledger is empty", || async {
        client.stats().holds == 0
    })
    .await;
}

#[tokio::test]
async fn a_lock_without_expiry_cannot_be_extended() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let options = SignalOptions::new().without_expiry();
    let (la, lb) = (a.signal_lock_with("l", options).unwrap(), lock(&b));
    let guard = la.lock().await.unwrap();
    let before = server.dump();
    let owner = guard.owner();
    let refused = |result: Result<(), Error>| match result {
        Err(Error::NotExpirable {
            lock, owner: by, ..
        }) => assert_eq!((&*lock, by.as_str()), ("l", owner.as_str())),
        other => panic!("{other:?}"),
    };
    refused(guard.extend(Duration::from_secs(60)).await);
    refused(la.extend(&owner, Duration::from_secs(60)).await.map(drop));
    refused(lb.extend(&owner, Duration::from_secs(60)).await.map(drop));
    assert_eq!(server.dump(), before);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    // a hold whose TTL another client removed is still held, and stays so
    let watched = server.client_with(|c| c.watchdog_timeout(ms(600))).await;
    let guard = lock(&watched).lock().await.unwrap();
    assert_eq!(server.call(&["PERSIST", RECORD]).int(), 1);
    let (gets, start) = (server.command_count("get"), Instant::now());
    eventually("renewals", || async {
        server.command_count("get") >= gets + 6 && start.elapsed() > ms(1300)
    })
    .await;
    assert!(!guard.is_lost());
    assert_eq!(server.pttl(RECORD), -1);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn the_loss_of_a_lock_without_expiry_is_noticed_at_its_release() {
    let server = Server::start();
    let client = server.client_with(|c| c.watchdog_timeout(ms(1_500))).await;
    let endless = client
        .signal_lock_with("l", SignalOptions::new().without_expiry())
        .unwrap();
    let guard = endless.lock().await.unwrap();
    server.call(&["DEL", RECORD]);
    let beside = client
        .reentrant_lock("beside")
        .unwrap()
        .lock()
        .await
        .unwrap();
    eventually("renewals", || async {
        server.command_count("pexpire") >= 4
    })
    .await;
    assert!(!guard.is_lost());
    let lost = guard.unlock().await;
    assert!(
        matches!(
            lost,
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            })
        ),
        "{lost:?}"
    );
    beside.unlock().await.unwrap();
}

// --- which waiter is woken ---

/// Three waiters in three clients: each release costs one try, not three.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_release_wakes_exactly_one_waiter_of_three_clients() {
    let server = Server::start();
    let holder = patient(&server).await;
    let guard = lock(&holder).lock().await.unwrap();
    let mut clients = Vec::new();
    let mut waiters = Vec::new();
    let served = Arc::new(AtomicUsize::new(0));
    for n in 1..=3 {
        let client = patient(&server).await;
        let (lock, served) = (lock(&client), Arc::clone(&served));
        waiters.push(tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            assert_eq!(served.fetch_add(1, Ordering::SeqCst) % 2, 0, "alone");
            served.fetch_add(1, Ordering::SeqCst);
            guard.unlock().await.unwrap();
        }));
        clients.push(client);
        waiting(&server, n).await;
    }
    let (calls, sets, pops) = (
        server.script_count(),
        server.command_count("set"),
        server.command_count("lpush"),
    );
    prompt("three hand-overs", async {
        guard.unlock().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
    })
    .await;
    let scripts = server.script_count() - calls;
    println!("3 hand-overs: {scripts} scripts");
    // the first release, then an acquire and a release for each waiter
    assert_eq!(server.command_count("set") - sets, 3);
    assert_eq!(
        server.command_count("lpush") - pops,
        4,
        "one signal for each release"
    );
    // the first release may need EVAL after EVALSHA, as the server does not know its script yet
    let again = server.command_count("eval");
    assert!((7..=7 + again).contains(&scripts), "{scripts} scripts");
    assert_eq!(
        server.command_count("get"),
        3 + 1 + 3 + 4,
        "a try or a release reads the record once"
    );
}

/// A release wakes one waiter of the client; its others continue to wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_one_client_share_a_blpop_and_are_woken_one_by_one() {
    let server = Server::start();
    let (holder, client) = (patient(&server).await, patient(&server).await);
    let guard = lock(&holder).lock().await.unwrap();
    let waiters: Vec<_> = (0..20)
        .map(|_| {
            let lock = lock(&client);
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        })
        .collect();
    eventually("tries", || async { server.command_count("get") >= 21 }).await;
    waiting(&server, 1).await;
    let tries = server.command_count("get");
    prompt("twenty hand-overs", async {
        guard.unlock().await.unwrap();
        for waiter in waiters {
            waiter.await.unwrap();
        }
    })
    .await;
    let tries = server.command_count("get") - tries;
    // 21 releases and 20 acquires read the record once each; a waiter that was about to sleep may
    // read it in vain
    assert!((41..=45).contains(&tries), "{tries} reads of the record");
    println!("20 waiters of one client: {} tries", tries - 21);
}

/// A BLPOP in flight does not include a list that is added later, so the client must end it at
/// once.
#[tokio::test]
async fn a_lock_that_is_waited_for_later_is_listened_to_at_once() {
    let server = Server::start();
    let (holder, client) = (patient(&server).await, patient(&server).await);
    let mut guards = Vec::new();
    for n in 0..5 {
        guards.push(
            holder
                .signal_lock(format!("l{n}"))
                .unwrap()
                .lock()
                .await
                .unwrap(),
        );
    }
    let mut waiters = Vec::new();
    for n in 0..5 {
        waiters.push(spawn_waiter(client.signal_lock(format!("l{n}")).unwrap()));
        eventually("a waiter", || async { client.stats().channels == n + 1 }).await;
        waiting(&server, 1).await;
    }
    // the lock that was added last is released first
    while let (Some(guard), Some(waiter)) = (guards.pop(), waiters.pop()) {
        guard.unlock().await.unwrap();
        prompt("a signal", waiter)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    assert_eq!(blocked(&server).len(), 0);
}

/// Records whether the waker of a future was called.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Returns whether the request ends a BLPOP whose client now waits for further lists.
fn ends_a_blpop(request: &Request) -> bool {
    request.is("LPUSH")
        || request.is_script() && request.keys().iter().any(|key| key.ends_with(":free"))
}

/// Found by the simulator (signal 1152): the list that ends a BLPOP was never deleted if its
/// PEXPIRE was lost.
#[tokio::test]
async fn no_list_outlives_a_connection_broken_between_two_commands() {
    let server = Server::start_real();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let (rung, mut wire) = (Arc::new(AtomicBool::new(false)), server.wire());
    let is_rung = Arc::clone(&rung);
    proxy.rule(move |request| {
        if ends_a_blpop(request) && !is_rung.swap(true, Ordering::SeqCst) {
            // kills the BLPOP, so that the element is not popped
            let clients = wire.call(&["CLIENT", "LIST"]).unwrap().text().to_owned();
            let blocked = clients
                .lines()
                .find(|line| line.contains("cmd=blpop"))
                .expect("one that waits");
            let id = blocked
                .strip_prefix("id=")
                .and_then(|rest| rest.split(' ').next())
                .expect("its number");
            wire.call(&["CLIENT", "KILL", "ID", id]).unwrap();
        }
        if request.is("PEXPIRE") || request.is("BLPOP") && is_rung.load(Ordering::SeqCst) {
            return Action::CutBefore;
        }
        Action::Pass
    });
    for name in ["lock:m", "lock:n"] {
        assert_eq!(
            server.call(&["SET", name, PYTHON, "EX", "3600"]).text(),
            "OK"
        );
    }
    let wait = |name: &'static str| {
        let lock = client.signal_lock(name).unwrap();
        tokio::spawn(async move { lock.try_lock_for(ms(1500)).await.map(drop) })
    };
    let first = wait("m");
    eventually("a BLPOP", || async { server.blocked() == 1 }).await;
    // the BLPOP in flight does not include this list, so the client ends it
    let second = wait("n");
    let _ = (first.await.unwrap(), second.await.unwrap());
    assert!(rung.load(Ordering::SeqCst));
    let lists = || {
        server
            .dump()
            .into_iter()
            .filter(|(key, ..)| key.starts_with("lock-signal:"))
            .count()
    };
    eventually("its list is gone", || async { lists() == 0 }).await;
}

/// The waiter has left, but its client's BLPOP has not: a signal popped by it goes to the next
/// client.
#[tokio::test]
async fn a_signal_whose_waiter_has_left_is_handed_on() {
    let server = Server::start();
    let (first, second) = (patient(&server).await, patient(&server).await);
    for told in [false, true] {
        hold_by_hand(&server);
        let gone = lock(&first);
        let mut gone = Box::pin(gone.lock());
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = Arc::clone(&woken).into();
        eventually("the first waits", || {
            assert!(
                gone.as_mut()
                    .poll(&mut Context::from_waker(&waker))
                    .is_pending()
            );
            async { server.blocked() == 1 }
        })
        .await;
        // from here on, only a signal can wake it
        woken.0.store(false, Ordering::SeqCst);
        let next = spawn_waiter(lock(&second));
        waiting(&server, 2).await;
        if told {
            // the waiter is woken, and dropped before it polls the lock
            release_by_hand(&server);
            eventually("it is notified", || async {
                woken.0.load(Ordering::SeqCst)
            })
            .await;
            drop(gone);
        } else {
            drop(gone);
            release_by_hand(&server);
        }
        let guard = prompt("the second is notified", next).await.unwrap();
        guard.unlock().await.unwrap();
        eventually("no client waits", || async { server.blocked() == 0 }).await;
        eventually("no wait queue", || async {
            first.stats().channels + second.stats().channels == 0
        })
        .await;
        server.call(&["DEL", SIGNAL]);
    }
}

/// The signal is also handed on where the client has already dropped its wait queue and could not
/// end its BLPOP.
#[tokio::test]
async fn a_signal_that_a_stale_blpop_pops_is_handed_on() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    proxy.rule(|request| {
        if ends_a_blpop(request) {
            Action::Refuse("ERR not now")
        } else {
            Action::Pass
        }
    });
    let first = LockClient::builder()
        .poll_cap(NEVER)
        .connect(proxy.url())
        .await
        .unwrap();
    let second = patient(&server).await;
    hold_by_hand(&server);
    let gone = spawn_waiter(lock(&first));
    waiting(&server, 1).await;
    gone.abort();
    eventually("the first has forgotten the lock", || async {
        first.stats().channels == 0
    })
    .await;
    let next = spawn_waiter(lock(&second));
    waiting(&server, 2).await;
    release_by_hand(&server);
    prompt("the second is notified", next)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// If another task of that client waits for the lock by then, it gets the signal. The simulator
/// found a process that did not listen for 40 s.
#[tokio::test]
async fn a_signal_popped_by_a_stale_blpop_goes_to_a_later_waiter() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    proxy.rule(|request| {
        if ends_a_blpop(request) {
            Action::Refuse("ERR not now")
        } else {
            Action::Pass
        }
    });
    let client = LockClient::builder()
        .poll_cap(NEVER)
        .connect(proxy.url())
        .await
        .unwrap();
    for _ in 0..5 {
        hold_by_hand(&server);
        let gone = spawn_waiter(lock(&client));
        waiting(&server, 1).await;
        gone.abort();
        eventually("the client has forgotten the lock", || async {
            client.stats().channels == 0
        })
        .await;
        let next = spawn_waiter(lock(&client));
        eventually("it waits", || async { client.stats().channels == 1 }).await;
        release_by_hand(&server);
        prompt("it is notified", next)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        eventually("the client has forgotten the lock", || async {
            client.stats().channels == 0
        })
        .await;
        // ends the stale BLPOP
        server.call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        eventually("no client waits", || async { server.blocked() == 0 }).await;
        server.call(&["DEL", SIGNAL]);
    }
}

/// P8: a reset wakes a waiter even if the lock is free, and the keys that remain expire.
#[tokio::test]
async fn p8_a_reset_wakes_a_waiter_and_leaves_nothing() {
    let server = Server::start();
    let (a, b) = (patient(&server).await, patient(&server).await);
    for held in [true, false] {
        hold_by_hand(&server);
        let waiter = spawn_waiter(lock(&b));
        waiting(&server, 1).await;
        if !held {
            // a holder that vanished without a signal
            server.call(&["DEL", RECORD]);
        }
        assert_eq!(lock(&a).force_unlock().await.unwrap(), held);
        prompt("a reset", waiter)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    eventually("no key", || async { server.dump().is_empty() }).await;
    eventually("no wait queue", || async { b.stats().channels == 0 }).await;
    eventually("the ledger is empty", || async { b.stats().holds == 0 }).await;
}

/// P2: a waiter that listens again only after the signal has expired acquires within the poll cap.
#[tokio::test]
async fn p2_a_waiter_missing_the_signal_acquires_within_the_poll_cap() {
    let server = Server::start();
    let client = server.client_with(|c| c.poll_cap(ms(200))).await;
    hold_by_hand(&server);
    let waiter = spawn_waiter(lock(&client));
    waiting(&server, 1).await;
    // a release whose signal has expired
    server.call(&["DEL", RECORD]);
    prompt("a poll", waiter)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// P7: the wait timeout does not depend on the lease.
#[tokio::test]
async fn p7_a_wait_is_not_over_with_the_lease_that_is_asked_for() {
    let server = Server::start();
    let client = patient(&server).await;
    let start = Instant::now();
    server.call(&["SET", RECORD, PYTHON, "PX", "1800"]);
    let options = AcquireOptions::new().lease(ms(500));
    let guard = lock(&client)
        .try_lock_for_with(SOON, options)
        .await
        .unwrap()
        .expect("the other's lease is over");
    assert!(start.elapsed() >= ms(1790), "{:?}", start.elapsed());
    drop(guard);
}

/// P13: a wait ends at its timeout, however often it is woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p13_a_storm_of_signals_does_not_prolong_a_wait() {
    let server = Server::start();
    let client = patient(&server).await;
    hold_by_hand(&server);
    let (stop, mut wire) = (Arc::new(AtomicBool::new(false)), server.wire());
    let stopped = Arc::clone(&stop);
    let storm = std::thread::spawn(move || {
        while !stopped.load(Ordering::Acquire) {
            wire.call(&["LPUSH", SIGNAL, "1"]).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
        wire.call(&["DEL", SIGNAL]).unwrap();
    });
    let (start, tries) = (Instant::now(), server.script_count());
    let waits: Vec<_> = (0..10)
        .map(|_| {
            let lock = lock(&client);
            tokio::spawn(async move {
                let outcome = lock.try_lock_for(Duration::from_secs(1)).await;
                // on a busy machine, the last reply may arrive after the wait has ended
                (
                    start.elapsed(),
                    matches!(outcome, Ok(None) | Err(Error::Unconfirmed { .. })),
                )
            })
        })
        .collect();
    for wait in waits {
        let (took, busy) = wait.await.unwrap();
        assert!(
            busy && took >= Duration::from_secs(1) && took < Duration::from_secs(4),
            "{busy} {took:?}"
        );
    }
    assert!(server.script_count() > tries + 30, "there was a storm");
    stop.store(true, Ordering::Release);
    storm.join().unwrap();
}

/// P6, P10: a shutdown releases the lock, ends renewals and waits, and closes all connections, even
/// the one that blocks in a BLPOP.
#[tokio::test]
async fn p6_p10_a_shutdown_ends_renewals_waits_and_the_blocking_link() {
    let server = Server::start();
    let client = server
        .client_with(|c| c.watchdog_timeout(ms(300)).poll_cap(NEVER))
        .await;
    let connections = || server.call(&["CLIENT", "LIST"]).text().lines().count();
    let at_first = connections();
    hold_by_hand(&server);
    let held = client.signal_lock("held").unwrap().lock().await.unwrap();
    let (one, other) = (lock(&client), lock(&client));
    let waiter = tokio::spawn(async move { one.lock().await });
    waiting(&server, 1).await;
    assert_eq!(
        connections(),
        at_first + 1,
        "one more, and only for waiters"
    );
    let second = tokio::spawn(async move { other.lock().await });
    let start = Instant::now();
    client.shutdown().await.unwrap();
    assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    for waiter in [waiter, second] {
        assert!(matches!(
            prompt("turned away", waiter).await.unwrap(),
            Err(Error::Closed)
        ));
    }
    assert!(held.is_lost() && !server.exists("lock:held"));
    eventually("no BLPOP", || async { server.blocked() == 0 }).await;
    eventually("no connection", || async { connections() == at_first - 2 }).await;
    let renewals = server.command_count("expire");
    let start = Instant::now();
    eventually("two periods", || async { start.elapsed() > ms(700) }).await;
    assert_eq!(server.command_count("expire"), renewals);
}

/// Hand-overs of one lock while the same client waits for many others: the others cost the server
/// nothing, and their signals arrive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_does_not_ask_for_the_clients_other_awaited_locks() {
    const OTHERS: usize = 400;
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let waiting = LockClient::builder()
        .poll_cap(NEVER)
        .connect(proxy.url())
        .await
        .unwrap();
    let holder = server.client().await;
    let (mut others, mut waiters) = (Vec::new(), Vec::new());
    for n in 0..OTHERS {
        let name = format!("other:{n}");
        others.push(holder.signal_lock(&name).unwrap().lock().await.unwrap());
        waiters.push(spawn_waiter(waiting.signal_lock(&name).unwrap()));
    }
    let large = || {
        proxy
            .requests()
            .iter()
            .filter(|request| request.is("BLPOP") && request.words() > OTHERS)
            .count()
    };
    eventually("one BLPOP for all lists", || async { large() > 0 }).await;
    let quiet = Instant::now();
    eventually("nothing new", || async { quiet.elapsed() > ms(1_500) }).await;

    let (ours, theirs) = (lock(&waiting), lock(&holder));
    let (before, start) = (large(), Instant::now());
    for _ in 0..40 {
        let held = theirs.lock().await.unwrap();
        let tries = server.command_count("get");
        let waiter = spawn_waiter(ours.clone());
        eventually("a try", || async { server.command_count("get") > tries }).await;
        held.unlock().await.unwrap();
        prompt("a hand-over", waiter)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    let (looks, took) = (large() - before, start.elapsed());
    println!("{looks} BLPOPs for all in {took:?}, of {} hand-overs", 40);
    // 20 a second, those for the first hand-over, and those of a second without hand-overs
    assert!(
        looks as u128 <= took.as_millis() / 50 + 4 + 2 * took.as_millis() / 1000,
        "{looks} in {took:?}"
    );

    // during these hand-overs, signals for the other locks arrive
    let stop = Arc::new(AtomicBool::new(false));
    let going_on = tokio::spawn({
        let stop = Arc::clone(&stop);
        async move {
            while !stop.load(Ordering::SeqCst) {
                let held = theirs.lock().await.unwrap();
                let waiter = spawn_waiter(ours.clone());
                tokio::task::yield_now().await;
                held.unlock().await.unwrap();
                prompt("a hand-over", waiter)
                    .await
                    .unwrap()
                    .unlock()
                    .await
                    .unwrap();
            }
        }
    });
    let start = Instant::now();
    for (other, waiter) in others.into_iter().zip(waiters).take(40) {
        other.unlock().await.unwrap();
        prompt("a hand-over elsewhere", waiter)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    println!("40 other hand-overs meanwhile in {:?}", start.elapsed());
    stop.store(true, Ordering::SeqCst);
    going_on.await.unwrap();
}

/// One list always has an element: signals for others still arrive, in whatever order the names are
/// kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_that_is_never_empty_keeps_no_other_waiting() {
    let server = Server::start();
    let (waiting, holder) = (patient(&server).await, server.client().await);
    hold_by_hand(&server);
    let stuff = "for _ = 1, 1000 do redis.call('rpush', KEYS[1], unpack(ARGV)) end";
    let ones = ["1"; 200];
    server.call(&[&["EVAL", stuff, "1", SIGNAL][..], &ones].concat());
    let (mut others, mut waiters) = (Vec::new(), Vec::new());
    for n in 0..20 {
        let name = format!("other:{n}");
        others.push(holder.signal_lock(&name).unwrap().lock().await.unwrap());
        waiters.push(spawn_waiter(waiting.signal_lock(&name).unwrap()));
    }
    // with only one waiter, the client would leave the list out of BLPOP during its tries
    let in_vain = [(); 3].map(|()| spawn_waiter(lock(&waiting)));
    let left = || server.call(&["LLEN", SIGNAL]).int();
    eventually("it is popped from", || async { left() < 199_990 }).await;
    for (other, waiter) in others.into_iter().zip(waiters) {
        other.unlock().await.unwrap();
        prompt("a hand-over elsewhere", waiter)
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    assert!(left() > 0, "it was never empty");
    in_vain.iter().for_each(JoinHandle::abort);
}

// --- faults ---

/// The connection dies under 20 waiters, perhaps with a signal: each waiter tries once after the
/// reconnect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_survives_the_death_of_its_waiting_connection() {
    let server = Server::start();
    let clients = [patient(&server).await, patient(&server).await];
    hold_by_hand(&server);
    let waiters: Vec<_> = (0..20)
        .map(|n| {
            let lock = lock(&clients[n % 2]);
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        })
        .collect();
    eventually("tries", || async { server.command_count("get") >= 20 }).await;
    waiting(&server, 2).await;
    for _ in 0..3 {
        for id in blocked(&server) {
            server.call(&["CLIENT", "KILL", "ID", &id]);
        }
        eventually("new connections", || async { server.blocked() == 2 }).await;
    }
    // no signal for this release: the waiters detect it after one more connection loss
    server.call(&["DEL", RECORD]);
    for id in blocked(&server) {
        server.call(&["CLIENT", "KILL", "ID", &id]);
    }
    let start = Instant::now();
    for waiter in waiters {
        tokio::time::timeout(SOON, waiter)
            .await
            .expect("served")
            .unwrap();
    }
    println!("20 waiters after a cut: {:?}", start.elapsed());
    assert!(!server.exists(RECORD));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_overs_go_on_while_the_connections_that_wait_are_killed() {
    let server = Server::start();
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let client = server.client_with(|c| c.poll_cap(ms(500))).await;
        for _ in 0..3 {
            let (lock, inside) = (lock(&client), Arc::clone(&inside));
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
    }
    let killer = async {
        loop {
            for id in blocked(&server) {
                server.call(&["CLIENT", "KILL", "ID", &id]);
            }
            tokio::time::sleep(ms(40)).await;
        }
    };
    let all = async {
        for task in tasks {
            task.await.unwrap();
        }
    };
    tokio::select! {
        () = killer => {}
        done = tokio::time::timeout(Duration::from_secs(120), all) => done.expect("all are served"),
    }
}

/// A signal key of the wrong type makes its own waiters poll, and does not affect others.
#[tokio::test]
async fn a_signal_key_of_another_type_does_not_trouble_other_locks() {
    let server = Server::start();
    let (holder, client) = (patient(&server).await, patient(&server).await);
    let quick = server.client_with(|c| c.poll_cap(ms(200))).await;
    hold_by_hand(&server);
    server.call(&["SET", SIGNAL, "data"]);
    let good = client.signal_lock("good").unwrap();
    let guard = holder.signal_lock("good").unwrap().lock().await.unwrap();
    let bad = spawn_waiter(lock(&client));
    eventually("a try", || async { client.stats().channels == 1 }).await;
    let waiter = spawn_waiter(good);
    waiting(&server, 1).await;
    let polls = spawn_waiter(lock(&quick));
    eventually("both try", || async { quick.stats().channels == 1 }).await;
    guard.unlock().await.unwrap();
    prompt("the good one is notified", waiter)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    server.call(&["DEL", RECORD]);
    let guard = prompt("a poll", polls).await.unwrap();
    assert_eq!(server.call(&["GET", SIGNAL]).text(), "data");
    bad.abort();
    drop(guard);
}

// --- all at once ---

/// P14: a reset of all locks scans page by page, and deletes only this client's keys.
#[tokio::test]
async fn p14_a_reset_of_all_frees_the_prefixs_locks_and_wakes_waiters() {
    let server = Server::start();
    let client = server
        .client_with(|c| c.name_prefix("a*p[p]:").poll_cap(NEVER))
        .await;
    assert_eq!(
        client.maintenance().reset_all_signal_locks().await.unwrap(),
        0
    );
    let mut guards = Vec::new();
    for n in 0..1200 {
        server.call(&["SET", &format!("lock:a*p[p]:{n}"), PYTHON, "EX", "3600"]);
    }
    for n in 0..20 {
        guards.push(
            client
                .signal_lock(format!("mine:{n}"))
                .unwrap()
                .lock()
                .await
                .unwrap(),
        );
    }
    let others = [
        "lock:app:1",
        "lock:axp[p]:1",
        "a*p[p]:1",
        "lock-signal-of-mine",
        "lock:",
    ];
    for key in others {
        server.call(&["SET", key, "data"]);
    }
    server.call(&["HSET", "lock:a*p[p]:hash", "name", "Ada"]);
    server.call(&["RPUSH", "lock:a*p[p]:list", "1"]);
    let waiter = spawn_waiter(client.signal_lock("7").unwrap());
    waiting(&server, 1).await;
    assert_eq!(
        client.maintenance().reset_all_signal_locks().await.unwrap(),
        1220
    );
    assert_eq!(server.command_count("keys"), 0);
    assert!(
        server.command_count("scan") >= 3,
        "{} pages",
        server.command_count("scan")
    );
    prompt("a waiter", waiter)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    for guard in guards {
        assert!(guard.is_lost());
        assert!(matches!(
            guard.unlock().await,
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            })
        ));
    }
    eventually("nothing but what others have", || async {
        server.dump().len() == others.len() + 2
    })
    .await;
    // without a prefix, all of them
    let client = server.client().await;
    assert_eq!(
        client.maintenance().reset_all_signal_locks().await.unwrap(),
        3
    );
    client.shutdown().await.unwrap();
    assert!(matches!(
        client.maintenance().reset_all_signal_locks().await,
        Err(Error::Closed)
    ));
}

// --- permissions ---

/// What `src/guide/permissions.md` lists for signal locks, in addition to [`SHARED`].
const COMMANDS: [&str; 10] = [
    "get", "set", "del", "lpush", "ltrim", "pexpire", "expire", "pttl", "blpop", "scan",
];
/// What each client needs, whatever the kind: tested in `bad_server.rs`.
const SHARED: [&str; 4] = ["evalsha", "eval", "ping", "info"];
const KEYS: [&str; 3] = ["~lock:app:*", "~lock-signal:app:*", "resetchannels"];

/// R112: a user with exactly the permissions in the guide can do everything, and each permission is
/// needed.
#[tokio::test]
async fn r112_a_signal_lock_needs_exactly_the_listed_permissions() {
    let server = Server::start_real();
    for missing in [None].into_iter().chain(COMMANDS.iter().map(Some)) {
        let rest: Vec<&str> = COMMANDS
            .iter()
            .filter(|word| Some(*word) != missing)
            .chain(&SHARED)
            .copied()
            .collect();
        set_user(&server, "locks", &rest, &KEYS);
        server.call(&["FLUSHALL"]);
        server.call(&["SCRIPT", "FLUSH"]);
        server.call(&["ACL", "LOG", "RESET"]);
        let url = format!("redis://locks:pw@{}", server.addr());
        let build = || {
            LockClient::builder()
                .watchdog_timeout(ms(600))
                .name_prefix("app:")
                .poll_cap(ms(300))
        };
        let everything = async {
            let (a, b) = (build().connect(&url).await?, build().connect(&url).await?);
            let (la, lb) = (a.signal_lock("l")?, b.signal_lock("l")?);
            let guard = la.lock().await?;
            let waiter =
                tokio::spawn(async move { lb.try_lock_for(Duration::from_secs(20)).await });
            let (start, gets) = (Instant::now(), server.command_count("get"));
            eventually("looks", || async {
                let waits = server.blocked() > 0
                    || missing == Some(&"blpop") && !denials(&server).is_empty();
                waits && server.command_count("get") > gets
                    || start.elapsed() > Duration::from_secs(3)
            })
            .await;
            // adds a list while the other is waited for
            let other = a.signal_lock("m")?.lock().await?;
            assert!(b.signal_lock("m")?.try_lock_for(ms(400)).await?.is_none());
            guard.extend(Duration::from_secs(100)).await?;
            guard.unlock().await?;
            waiter.await.unwrap()?.expect("free").unlock().await?;
            // a signal without a waiter
            server.call(&["RPUSH", "lock-signal:app:m", "1"]);
            drop(other);
            let again = la.lock().await?;
            la.force_unlock().await?;
            drop(again);
            a.maintenance().reset_all_signal_locks().await?;
            a.idle().await;
            b.idle().await;
            Ok::<_, Error>((a, b))
        };
        let outcome = tokio::time::timeout(SOON, everything)
            .await
            .expect("an end");
        let denied = denials(&server);
        match missing {
            None => {
                let (a, b) = outcome.unwrap();
                assert_eq!(denied, std::collections::BTreeSet::new());
                a.shutdown().await.unwrap();
                b.shutdown().await.unwrap();
            }
            Some(missing) => assert!(
                outcome.is_err() || !denied.is_empty(),
                "{missing} is not needed"
            ),
        }
    }
}

/// F28: a user without BLPOP polls; a user without LPUSH cannot release.
#[tokio::test]
async fn f28_denied_blpop_polls_and_a_denied_signal_is_a_typed_error() {
    let server = Server::start_real();
    let without = |missing: &str| -> Vec<&str> {
        COMMANDS
            .into_iter()
            .filter(|word| *word != missing)
            .chain(SHARED)
            .collect()
    };
    set_user(&server, "deaf", &without("blpop"), &KEYS);
    set_user(&server, "mute", &without("lpush"), &KEYS);
    let deaf = log_in(
        &server,
        "deaf",
        LockClient::builder().poll_cap(ms(100)).name_prefix("app:"),
    )
    .await;
    let mute = log_in(&server, "mute", LockClient::builder().name_prefix("app:")).await;
    let held = mute.signal_lock("l").unwrap().lock().await.unwrap();
    let waiter = spawn_waiter(deaf.signal_lock("l").unwrap());
    let looks = server.script_count();
    eventually("it polls", || async { server.script_count() > looks + 5 }).await;
    let blpops = denials(&server).len();
    assert!(blpops > 0, "its BLPOP was denied");
    let refused = held.unlock().await;
    let Err(Error::Store { source, .. }) = &refused else {
        panic!("{refused:?}")
    };
    assert_eq!(source.kind(), StoreErrorKind::NoPermission);
    assert_eq!(server.call(&["EXISTS", "lock:app:l"]).int(), 1);
    server.call(&["DEL", "lock:app:l"]);
    prompt("a poll", waiter)
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}
