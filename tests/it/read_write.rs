//! The read-write lock: the behaviour of its two sides.

use std::{
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::FutureExt;
use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, OwnerId, Tuning};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestRunner},
};
use tokio::task::JoinHandle;

use crate::{
    contract::{contract_suite, nothing_is_left},
    support::{
        Server,
        child::Worker,
        eventually,
        history::History,
        proxy::{Action, Proxy, Verb},
        wire::{Reply, Wire},
        within,
    },
};

contract_suite! {
    mod read,
    door = |client, name| client.read_write_lock(name).unwrap().read_lock(),
    rival = |client, name| client.read_write_lock(name).unwrap().write_lock(),
    shared = true,
}
contract_suite! { mod write, door = |client, name| client.read_write_lock(name).unwrap().write_lock() }
contract_suite! {
    mod write_against_readers,
    door = |client, name| client.read_write_lock(name).unwrap().write_lock(),
    rival = |client, name| client.read_write_lock(name).unwrap().read_lock(),
    rival_shared = true,
}

const INTENT: &str = "nestlock_rwlock_intent:{l}";
const READERS: &str = "nestlock_rwlock_readers:{l}";
const CHANNEL: &str = "redisson_rwlock:{l}";
/// How long a waiter's mark holds back the other side.
const MARK_TIME: Duration = Duration::from_secs(2);
const SHORT_WATCHDOG: Duration = Duration::from_secs(2);
/// The most that a loaded machine may add.
const SLACK: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(15);
const NEVER: Duration = Duration::from_secs(3600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn read(client: &LockClient) -> Lock {
    client.read_write_lock("l").unwrap().read_lock()
}

fn write(client: &LockClient) -> Lock {
    client.read_write_lock("l").unwrap().write_lock()
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future)
        .await
        .expect("it ends soon")
}

async fn leased(lock: &Lock, lease: Duration) -> LockGuard {
    lock.try_lock_with(AcquireOptions::new().lease(lease))
        .await
        .unwrap()
        .expect("free")
}

/// Acquires the lock for a named owner.
async fn named(client: &LockClient, lock: &Lock, owner: &str) -> LockGuard {
    let options = AcquireOptions::new().owner(client.owner(owner).unwrap());
    lock.lock_with(options).await.unwrap()
}

fn waiter(lock: Lock) -> JoinHandle<LockGuard> {
    tokio::spawn(async move { lock.lock().await.unwrap() })
}

/// Connects a client that never polls a lock within a test, so that only a message wakes it.
async fn deaf_to_time(server: &Server) -> LockClient {
    server.client_with(|c| c.poll_cap(NEVER)).await
}

async fn listens(client: &LockClient) {
    eventually("it listens", || async { client.stats().channels > 0 }).await;
}

async fn intent_is_there(server: &Server) {
    eventually("a writer waits", || async { server.exists(INTENT) }).await;
}

fn hold_key(owner: &OwnerId, n: u32) -> String {
    format!("{{l}}:{owner}:rwlock_timeout:{n}")
}

fn hold_keys(server: &Server) -> Vec<String> {
    let keys = server.dump().into_iter().map(|(key, ..)| key);
    keys.filter(|key| key.contains(":rwlock_timeout:"))
        .collect()
}

fn mode(server: &Server) -> Reply {
    server.call(&["HGET", "l", "mode"])
}

// --- which holds go together ---

/// R67: each side reports its own holds in `is_locked` and in the counts, for every number of holds
/// of one owner.
#[tokio::test]
async fn r67_each_side_reports_its_own_holds() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let me = a.current_owner();
    for writes in 0..3 {
        for reads in 0..3 {
            let mut guards = Vec::new();
            for n in 0..writes + reads {
                let lock = if n < writes { write(&a) } else { read(&a) };
                guards.push(lock.try_lock().await.unwrap().expect("its own"));
            }
            for client in [&a, &b] {
                for (side, holds) in [(write(client), writes), (read(client), reads)] {
                    assert_eq!(
                        side.is_locked().await.unwrap(),
                        holds > 0,
                        "{writes} writes, {reads} reads"
                    );
                    assert_eq!(side.hold_count(&me).await.unwrap(), holds);
                    assert_eq!(
                        side.holder().await.unwrap(),
                        (holds > 0).then(|| me.clone())
                    );
                    assert_eq!(side.remaining_lease().await.unwrap().is_some(), holds > 0);
                }
            }
            assert_eq!(read(&b).try_lock().await.unwrap().is_some(), writes == 0);
            b.idle().await;
            assert_eq!(
                write(&b).try_lock().await.unwrap().is_some(),
                writes + reads == 0
            );
            b.idle().await;
            // The writes are released first.
            for guard in guards {
                guard.unlock().await.unwrap();
            }
        }
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

#[tokio::test]
async fn fifty_readers_are_in_together() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let mut guards = Vec::new();
    for n in 0..25 {
        for client in [&a, &b] {
            guards.push(soon(named(client, &read(client), &format!("r{n}"))).await);
        }
    }
    assert_eq!(server.call(&["HLEN", "l"]).int(), 51);
    assert!(write(&a).try_lock().await.unwrap().is_none());
    assert!(
        !server.exists(INTENT),
        "an owner that does not wait holds no other back"
    );
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    write(&a)
        .try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

#[tokio::test]
async fn a_reader_is_refused_to_write_before_anything_is_sent() {
    let server = Server::start();
    let a = server.client().await;
    let guard = read(&a).lock().await.unwrap();
    let scripts = server.script_count();
    for wait in [Duration::ZERO, ms(50), NEVER] {
        let refused = soon(write(&a).try_lock_for(wait)).await;
        assert!(
            matches!(refused, Err(Error::UpgradeRefused { .. })),
            "{refused:?}"
        );
    }
    assert_eq!(server.script_count(), scripts);
    guard.unlock().await.unwrap();
    write(&a)
        .try_lock()
        .await
        .unwrap()
        .expect("no longer reads")
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a]).await;
}

/// A read hold whose lease has ended does not block a write of the same owner.
#[tokio::test]
async fn an_owner_may_write_when_the_lease_of_its_read_is_over() {
    let server = Server::start();
    let a = server.client().await;
    for _ in 0..3 {
        let guard = leased(&read(&a), ms(600)).await;
        soon(guard.lost()).await;
        soon(write(&a).lock())
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        drop(guard);
    }
    nothing_is_left(&server, &[&a]).await;
}

/// A `force_unlock` of the write side also ends the reads inside that write.
#[tokio::test]
async fn a_forced_end_of_a_write_ends_the_reads_inside() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guards = [
        leased(&write(&a), NEVER).await,
        leased(&read(&a), NEVER).await,
        leased(&read(&a), NEVER).await,
    ];
    assert!(
        !read(&a).force_unlock().await.unwrap(),
        "another owner writes"
    );
    assert!(write(&a).force_unlock().await.unwrap());
    assert!(guards.iter().all(LockGuard::is_lost));
    assert_eq!(server.dump(), []);
    let other = write(&b).try_lock().await.unwrap().expect("free");
    drop(guards);
    a.idle().await;
    assert!(!other.is_lost() && read(&a).try_lock().await.unwrap().is_none());
    other.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R71: one owner nests reads and writes, and releases them in any order.
#[test]
fn r71_any_order_of_nested_holds_agrees_with_the_model() {
    #[derive(Debug, Clone, Copy)]
    enum Op {
        Read,
        Write,
        /// Releases the n-th hold.
        Release(usize),
    }
    let op = prop_oneof![3 => Just(Op::Read), 3 => Just(Op::Write), 4 => (0..4_usize).prop_map(Op::Release)];
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let server = Server::start();
    let (a, b) = runtime.block_on(async { (server.client().await, server.client().await) });
    let config = Config {
        cases: 150,
        failure_persistence: None,
        ..Config::default()
    };
    let one_case = |ops: Vec<Op>| {
        runtime.block_on(async {
            let mut held: Vec<(bool, LockGuard)> = Vec::new();
            for op in ops {
                let count = |held: &[(bool, LockGuard)], writes| {
                    held.iter().filter(|(write, _)| *write == writes).count()
                };
                let (reads, writes) = (count(&held, false), count(&held, true));
                match op {
                    Op::Release(n) if n < held.len() => held.remove(n).1.unlock().await.unwrap(),
                    Op::Release(_) => {}
                    _ if held.len() == 4 => {}
                    Op::Read => {
                        held.push((false, read(&a).try_lock().await.unwrap().expect("its own")));
                    }
                    Op::Write if reads > 0 && writes == 0 => {
                        let refused =
                            [write(&a).lock().await.map(Some), write(&a).try_lock().await];
                        let refused =
                            matches!(refused, [Err(Error::UpgradeRefused { .. }), Ok(None)]);
                        prop_assert!(refused);
                    }
                    Op::Write => {
                        held.push((true, write(&a).try_lock().await.unwrap().expect("its own")));
                    }
                }
                let (reads, writes) = (count(&held, false), count(&held, true));
                prop_assert!(held.iter().all(|(_, guard)| !guard.is_lost()));
                let owner = a.current_owner();
                prop_assert_eq!(
                    read(&b).hold_count(&owner).await.unwrap(),
                    u32::try_from(reads).unwrap()
                );
                prop_assert_eq!(
                    write(&b).hold_count(&owner).await.unwrap(),
                    u32::try_from(writes).unwrap()
                );
                prop_assert_eq!(hold_keys(&server).len(), reads);
                let wanted = match (reads, writes) {
                    (0, 0) => Reply::Nil,
                    (_, 0) => Reply::Text("read".into()),
                    _ => Reply::Text("write".into()),
                };
                prop_assert_eq!(mode(&server), wanted);
                for (side, may) in [(read(&b), writes == 0), (write(&b), writes + reads == 0)] {
                    let got = side.try_lock().await.unwrap();
                    prop_assert_eq!(got.is_some(), may, "{} reads, {} writes", reads, writes);
                    if let Some(guard) = got {
                        guard.unlock().await.unwrap();
                    }
                }
            }
            for (_, guard) in held {
                guard.unlock().await.unwrap();
            }
            prop_assert_eq!(server.dump(), vec![]);
            Ok(())
        })
    };
    TestRunner::new(config)
        .run(&vec(op, 1..14), one_case)
        .unwrap_or_else(|failure| panic!("{failure}"));
}

// --- leases ---

/// R68, R72: the TTL of the record is the longest lease of the reads that are left, no shorter and
/// no longer.
#[tokio::test]
async fn r68_r72_a_short_read_cuts_no_long_one_which_leaves_no_trace() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        server.client().await,
        server.client().await,
    );
    let long = leased(&read(&a), Duration::from_secs(50)).await;
    let short = leased(&read(&b), Duration::from_secs(10)).await;
    let record = || server.pttl("l");
    assert!(record() > 45_000, "{}", record());
    short.unlock().await.unwrap();
    assert!(record() > 45_000 && record() <= 50_000, "{}", record());
    let start = Instant::now();
    let short = leased(&read(&b), ms(700)).await;
    let writer = waiter(write(&c));
    intent_is_there(&server).await;
    long.unlock().await.unwrap();
    assert!(record() <= 700, "{}", record());
    // No holder releases: the writer gets in when the lease ends.
    soon(writer).await.unwrap().unlock().await.unwrap();
    assert!(
        start.elapsed() > ms(650) && start.elapsed() < ms(700) + SLACK,
        "{:?}",
        start.elapsed()
    );
    assert!(short.is_lost());
    drop(short);
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// R72: once the writes are released, the record lives as long as the remaining reads.
#[tokio::test]
async fn r72_a_downgrade_leaves_the_lease_of_the_reads() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let writing = leased(&write(&a), NEVER).await;
    let reading = leased(&read(&a), ms(700)).await;
    assert!(server.pttl("l") > 3_500_000);
    writing.unlock().await.unwrap();
    let left = server.pttl("l");
    assert!(left <= 700, "the record outlives its holds: {left} ms");
    soon(write(&b).lock())
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert!(reading.is_lost());
    drop(reading);
    // The read has already ended, so there is nothing to downgrade to.
    let writing = leased(&write(&a), NEVER).await;
    let reading = leased(&read(&a), ms(600)).await;
    soon(reading.lost()).await;
    eventually("its key is gone", || async {
        hold_keys(&server).is_empty()
    })
    .await;
    writing.unlock().await.unwrap();
    write(&b)
        .try_lock()
        .await
        .unwrap()
        .expect("no owner holds it")
        .unlock()
        .await
        .unwrap();
    drop(reading);
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R69: a re-entered write lives for the longest of its leases, not for their sum, and not for the
/// last one.
#[tokio::test]
async fn r69_nested_writes_neither_add_up_nor_shorten_their_leases() {
    let server = Server::start();
    let a = server.client().await;
    let record = || server.pttl("l");
    let outer = leased(&write(&a), Duration::from_secs(40)).await;
    let mut inner = Vec::new();
    for _ in 0..3 {
        inner.push(leased(&write(&a), Duration::from_secs(10)).await);
        assert!(record() > 35_000 && record() <= 40_000, "{}", record());
    }
    inner.push(leased(&write(&a), Duration::from_secs(60)).await);
    inner.push(leased(&read(&a), Duration::from_secs(5)).await);
    for guard in inner {
        guard.unlock().await.unwrap();
        assert!(record() > 50_000 && record() <= 60_000, "{}", record());
    }
    outer.unlock().await.unwrap();
    nothing_is_left(&server, &[&a]).await;
}

#[tokio::test]
async fn each_read_hold_has_a_key_with_its_own_lease() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let me = a.current_owner();
    let mut guards = Vec::new();
    for lease in [20, 60, 40] {
        guards.push(leased(&read(&a), Duration::from_secs(lease)).await);
    }
    for (n, lease) in [(1, 20_000), (2, 60_000), (3, 40_000)] {
        let left = server.pttl(&hold_key(&me, n));
        assert!(left > lease - 5_000 && left <= lease, "hold {n}: {left} ms");
    }
    assert!(server.pttl("l") > 55_000);
    // Whichever guard is released, the record lives as long as the longest lease that was promised.
    for left in [2, 1] {
        guards.remove(0).unlock().await.unwrap();
        assert_eq!(
            hold_keys(&server),
            (1..=left).map(|n| hold_key(&me, n)).collect::<Vec<_>>()
        );
        assert!(server.pttl("l") > 55_000, "{}", server.pttl("l"));
    }
    assert!(guards[0].remaining() > Duration::from_secs(50));
    assert!(write(&b).try_lock().await.unwrap().is_none());
    guards.remove(0).unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

// --- the watchdog ---

/// R24: the watchdog renews a hundred readers of two clients over three leases.
#[tokio::test]
async fn r24_a_hundred_readers_are_renewed() {
    let server = Server::start();
    let (a, b, c) = (
        server
            .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
            .await,
        server
            .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
            .await,
        server.client().await,
    );
    let mut guards = Vec::new();
    for n in 0..50 {
        guards.push(named(&a, &read(&a), &format!("r{n}")).await);
        guards.push(named(&b, &read(&b), &format!("r{n}")).await);
    }
    let start = Instant::now();
    while start.elapsed() < 3 * SHORT_WATCHDOG {
        assert!(
            guards.iter().all(|guard| !guard.is_lost()),
            "after {:?}",
            start.elapsed()
        );
        assert!(write(&c).try_lock().await.unwrap().is_none());
        assert_eq!(hold_keys(&server).len(), 100);
        tokio::time::sleep(ms(50)).await;
    }
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// R07: one renewal covers five locks with three read holds each.
#[tokio::test]
async fn r07_each_hold_of_each_lock_is_renewed() {
    let server = Server::start();
    let a = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let mut guards = Vec::new();
    for lock in 0..5 {
        for _ in 0..3 {
            guards.push(
                a.read_write_lock(format!("many{lock}"))
                    .unwrap()
                    .read_lock()
                    .lock()
                    .await
                    .unwrap(),
            );
        }
    }
    let keys = hold_keys(&server);
    assert_eq!(keys.len(), 15);
    let expiry = |key: &String| server.expires(key);
    for _ in 0..3 {
        let before: Vec<i64> = keys.iter().map(expiry).collect();
        eventually("all live longer", || async {
            keys.iter()
                .zip(&before)
                .all(|(key, before)| expiry(key) > *before)
                && hold_keys(&server).len() == 15
        })
        .await;
    }
    for guard in guards {
        assert!(!guard.is_lost());
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a]).await;
}

/// R02: reads of the same client that come and go do not shorten the one that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r02_a_held_read_is_renewed_whatever_comes_and_goes_with_it() {
    let server = Server::start();
    let (a, b) = (
        server
            .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
            .await,
        server.client().await,
    );
    let guard = read(&a).lock().await.unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let passers: Vec<_> = (0..4)
        .map(|n| {
            let (lock, over) = (read(&a), Arc::clone(&over));
            tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let outer = lock.lock().await.unwrap();
                    let inner = leased(&lock, ms(300)).await;
                    if n % 2 == 0 {
                        drop(outer);
                    } else {
                        outer.unlock().await.unwrap();
                    }
                    drop(inner);
                }
            })
        })
        .collect();
    let start = Instant::now();
    while start.elapsed() < 3 * SHORT_WATCHDOG {
        assert!(!guard.is_lost(), "after {:?}", start.elapsed());
        assert!(write(&b).try_lock().await.unwrap().is_none());
        tokio::time::sleep(ms(20)).await;
    }
    over.store(true, Ordering::SeqCst);
    for passer in passers {
        passer.await.unwrap();
    }
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// R03: nested reads leave no entry behind, and no more requests are sent for them.
#[tokio::test]
async fn r03_nested_reads_leave_no_entry_and_no_renewal() {
    let server = Server::start();
    // A reply may take a third of it: longer than a busy machine holds this process up.
    let watchdog = ms(4_500);
    let a = server.client_with(|c| c.watchdog_timeout(watchdog)).await;
    for round in 0..200 {
        let mut guards = Vec::new();
        for _ in 0..=round % 5 {
            guards.push(read(&a).lock().await.unwrap());
        }
        for guard in guards {
            guard.unlock().await.unwrap();
        }
        assert_eq!(server.dump(), []);
    }
    nothing_is_left(&server, &[&a]).await;
    let scripts = server.script_count();
    // The test waits for two leases: no renewal may be sent.
    tokio::time::sleep(2 * watchdog).await;
    assert_eq!(server.script_count(), scripts);
}

/// R14: after the writes are released, the read is still renewed and keeps writers out. Other
/// readers get in at once.
#[tokio::test]
async fn r14_a_downgrade_lets_readers_in_and_is_renewed() {
    let server = Server::start();
    let a = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let (b, c) = (deaf_to_time(&server).await, server.client().await);
    let writing = write(&a).lock().await.unwrap();
    let reading = read(&a).lock().await.unwrap();
    let readers: Vec<_> = (0..10).map(|_| waiter(read(&b))).collect();
    listens(&b).await;
    assert!(read(&c).try_lock().await.unwrap().is_none());
    writing.unlock().await.unwrap();
    for reader in readers {
        soon(reader).await.unwrap().unlock().await.unwrap();
    }
    let start = Instant::now();
    while start.elapsed() < 3 * SHORT_WATCHDOG {
        assert!(
            !reading.is_lost() && write(&c).try_lock().await.unwrap().is_none(),
            "after {:?}",
            start.elapsed()
        );
        tokio::time::sleep(ms(20)).await;
    }
    reading.unlock().await.unwrap();
    write(&c)
        .try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

// --- the dead ---

/// R04, R72: one reader is killed, another lives and is renewed. The keys of the killed reader end
/// within its lease. The writer gets in when the other one releases.
#[tokio::test]
async fn r04_r72_a_dead_reader_is_not_kept_alive_by_a_living_one() {
    let server = Server::start();
    let a = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let c = deaf_to_time(&server).await;
    let mut dead = Worker::start(&server, SHORT_WATCHDOG, ms(200));
    for _ in 0..3 {
        dead.ask("read l");
        dead.answer_to("locked l");
    }
    let living = read(&a).lock().await.unwrap();
    assert_eq!(hold_keys(&server).len(), 4);
    dead.kill();
    let killed = Instant::now();
    let own = [hold_key(&a.current_owner(), 1)];
    within(
        SHORT_WATCHDOG + SLACK,
        "only the living one's key is left",
        || async { hold_keys(&server) == own },
    )
    .await;
    println!(
        "the dead reader's keys were gone {:?} after its SIGKILL",
        killed.elapsed()
    );
    while killed.elapsed() < 3 * SHORT_WATCHDOG {
        assert_eq!(hold_keys(&server), own);
        tokio::time::sleep(ms(20)).await;
    }
    assert!(!living.is_lost());
    let writer = waiter(write(&c));
    intent_is_there(&server).await;
    let released = Instant::now();
    living.unlock().await.unwrap();
    soon(writer).await.unwrap().unlock().await.unwrap();
    println!(
        "the writer entered {:?} after the living reader's release",
        released.elapsed()
    );
    nothing_is_left(&server, &[&a, &c]).await;
}

/// R72: a killed reader with many holds costs the writer one lease.
#[tokio::test]
async fn r72_a_writer_gets_in_when_the_dead_readers_lease_is_over() {
    let server = Server::start();
    let client = server.client().await;
    let mut dead = Worker::start(&server, SHORT_WATCHDOG, ms(200));
    for _ in 0..5 {
        dead.ask("read l");
        dead.answer_to("locked l");
    }
    let writer = waiter(write(&client));
    intent_is_there(&server).await;
    dead.kill();
    let killed = Instant::now();
    soon(writer).await.unwrap().unlock().await.unwrap();
    let waited = killed.elapsed();
    println!(
        "the writer entered {waited:?} after the SIGKILL of the last reader, whose lease is {SHORT_WATCHDOG:?}"
    );
    assert!(waited < SHORT_WATCHDOG + SLACK);
    nothing_is_left(&server, &[&client]).await;
}

/// The record of a killed writer expires without a message, and all readers of a client still get
/// in together.
#[tokio::test]
async fn all_readers_get_in_when_a_dead_writers_lease_is_over() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let mut dead = Worker::start(&server, SHORT_WATCHDOG, ms(200));
    dead.ask("write l");
    dead.answer_to("locked l");
    let readers: Vec<_> = (0..20).map(|_| waiter(read(&client))).collect();
    listens(&client).await;
    dead.kill();
    let killed = Instant::now();
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(soon(reader).await.unwrap());
    }
    println!(
        "20 readers entered {:?} after the SIGKILL of a writer",
        killed.elapsed()
    );
    assert!(killed.elapsed() < SHORT_WATCHDOG + SLACK);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

/// A waiting writer that is killed holds readers back until its intent expires.
#[tokio::test]
async fn all_readers_get_in_when_a_waiting_writer_was_killed() {
    let server = Server::start();
    let (a, b) = (server.client().await, deaf_to_time(&server).await);
    let reading = read(&a).lock().await.unwrap();
    let mut dead = Worker::start(&server, SHORT_WATCHDOG, ms(200));
    dead.ask("write l");
    intent_is_there(&server).await;
    let readers: Vec<_> = (0..20).map(|_| waiter(read(&b))).collect();
    listens(&b).await;
    assert!(
        read(&a).try_lock().await.unwrap().is_some(),
        "an owner that already reads may read on"
    );
    dead.kill();
    let killed = Instant::now();
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(soon(reader).await.unwrap());
    }
    let waited = killed.elapsed();
    println!("20 readers entered {waited:?} after the SIGKILL of a waiting writer");
    assert!(waited < MARK_TIME + SLACK);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    reading.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

// --- turns ---

/// R70: the clients do not poll, so the message must wake all fifty readers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r70_fifty_readers_are_woken_together_by_a_writers_release() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        deaf_to_time(&server).await,
        deaf_to_time(&server).await,
    );
    let writing = write(&a).lock().await.unwrap();
    let inside = Arc::new(AtomicUsize::new(0));
    let readers: Vec<_> = (0..50)
        .map(|n| {
            let (lock, inside) = (read(if n % 2 == 0 { &b } else { &c }), Arc::clone(&inside));
            tokio::spawn(async move {
                let guard = lock.lock().await.unwrap();
                inside.fetch_add(1, Ordering::SeqCst);
                // Each reader stays until all are in, so one reader after another would never end.
                eventually("all are in", || async {
                    inside.load(Ordering::SeqCst) == 50
                })
                .await;
                guard.unlock().await.unwrap();
            })
        })
        .collect();
    listens(&b).await;
    listens(&c).await;
    assert_eq!(inside.load(Ordering::SeqCst), 0);
    writing.unlock().await.unwrap();
    for reader in readers {
        soon(reader).await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// The waiter tried before the client was subscribed, and has not read the reply when all waiters
/// are woken.
#[tokio::test]
async fn a_task_that_has_tried_and_not_yet_waits_is_woken_too() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    // Loads the scripts, because a try would be two requests otherwise.
    read(&client).lock().await.unwrap().unlock().await.unwrap();
    let writer = format!("{}:1:write", uuid::Uuid::new_v4());
    server.call(&["HSET", "l", "mode", "write", &writer, "1"]);
    server.call(&["PEXPIRE", "l", "3600000"]);
    let lock = read(&client);
    let before = server.script_count();
    let mut slow = Box::pin(async move { lock.lock().await.unwrap() });
    assert!(slow.as_mut().now_or_never().is_none());
    eventually("it has tried", || async { server.script_count() > before }).await;
    let listens_already = waiter(read(&client));
    listens(&client).await;
    eventually("it has tried again since", || async {
        server.script_count() >= before + 3
    })
    .await;
    // It sleeps by then. From here on only the client's own thread runs, which gets the message.
    tokio::time::sleep(ms(100)).await;
    server.call(&["DEL", "l"]);
    server.call(&["PUBLISH", CHANNEL, "1"]);
    std::thread::sleep(ms(200));
    let guard = soon(slow).await;
    soon(listens_already).await.unwrap().unlock().await.unwrap();
    guard.unlock().await.unwrap();
}

/// R70: the last reader wakes the waiting writer, which does not wait for the end of a lease.
#[tokio::test]
async fn r70_a_waiting_writer_is_woken_by_the_last_reader() {
    let server = Server::start();
    let a = server.client().await;
    for foreign in [false, true] {
        let reading = leased(&read(&a), NEVER).await;
        let also = named(&a, &read(&a), "other").await;
        let b = deaf_to_time(&server).await;
        let writer = waiter(write(&if foreign { b.clone() } else { a.clone() }));
        intent_is_there(&server).await;
        also.unlock().await.unwrap();
        assert!(!writer.is_finished());
        let released = Instant::now();
        reading.unlock().await.unwrap();
        soon(writer).await.unwrap().unlock().await.unwrap();
        println!(
            "the writer entered {:?} after the last reader's release",
            released.elapsed()
        );
        nothing_is_left(&server, &[&a, &b]).await;
    }
}

/// Tasks that hold a lock for a fixed time and acquire it again at once.
struct AtIt {
    tasks: Vec<JoinHandle<()>>,
    over: Arc<AtomicBool>,
    holds: Arc<AtomicUsize>,
}

impl AtIt {
    fn start(locks: impl IntoIterator<Item = Lock>, hold: Duration) -> Self {
        let (over, holds) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let start = |lock: Lock| {
            let (over, holds) = (Arc::clone(&over), Arc::clone(&holds));
            tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let guard = lock.lock().await.unwrap();
                    holds.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(hold).await;
                    guard.unlock().await.unwrap();
                }
            })
        };
        let tasks = locks.into_iter().map(start).collect();
        Self { tasks, over, holds }
    }

    /// Returns how often the lock was acquired.
    fn holds(&self) -> usize {
        self.holds.load(Ordering::SeqCst)
    }

    async fn stop(self) {
        self.over.store(true, Ordering::SeqCst);
        for task in self.tasks {
            soon(task).await.unwrap();
        }
    }
}

/// Otherwise readers that overlap all the time would keep a writer out for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_is_not_starved_by_overlapping_readers() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (over, rounds) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let readers: Vec<_> = (0..12)
        .map(|n| {
            // Half of the readers use the writer's client.
            let lock = read(if n % 2 == 0 { &a } else { &b });
            let (over, rounds) = (Arc::clone(&over), Arc::clone(&rounds));
            tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let guard = lock.lock().await.unwrap();
                    tokio::time::sleep(ms(40 + 7 * n)).await;
                    guard.unlock().await.unwrap();
                    rounds.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    eventually("readers overlap", || async {
        server.call(&["HLEN", "l"]).int() > 8
    })
    .await;
    let (lock, mut longest) = (write(&a), Duration::ZERO);
    for round in 0..5 {
        let (start, before) = (Instant::now(), rounds.load(Ordering::SeqCst));
        let guard = soon(lock.lock()).await.unwrap();
        longest = longest.max(start.elapsed());
        guard.unlock().await.unwrap();
        eventually("readers get in again", || async {
            rounds.load(Ordering::SeqCst) > before + 12
        })
        .await;
        println!("round {round}: the writer waited {:?}", start.elapsed());
    }
    println!("the longest wait of a writer: {longest:?}");
    assert!(longest < SLACK);
    over.store(true, Ordering::SeqCst);
    for reader in readers {
        reader.await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Writers that follow each other without a pause let readers in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_are_not_starved_by_writers() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        server.client().await,
        server.client().await,
    );
    let writers = AtIt::start(
        (0..6).map(|n| write(if n % 2 == 0 { &a } else { &b })),
        ms(5),
    );
    eventually("writers are busy", || async { writers.holds() > 10 }).await;
    let mut longest = Duration::ZERO;
    for round in 0..20 {
        let start = Instant::now();
        let lock = read([&a, &b, &c][round % 3]);
        soon(lock.lock()).await.unwrap().unlock().await.unwrap();
        longest = longest.max(start.elapsed());
    }
    println!(
        "the longest wait of a reader: {longest:?}, during {} writes",
        writers.holds()
    );
    writers.stop().await;
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// A reader gets in after two more writes at most, for any round-trip time, although the next
/// writer is waiting when the reader's client learns of a release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_is_in_after_two_more_writes_at_most() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    // Writers of two clients, and readers that always come first.
    let writers = AtIt::start([write(&a), write(&a), write(&b)], ms(150));
    let readers = AtIt::start([read(&a), read(&b)], ms(10));
    for round_trip in [0, 20, 120] {
        let proxy = Proxy::start(&server);
        proxy.rule(move |_| Action::Late(ms(round_trip)));
        let far = LockClient::connect(proxy.url()).await.unwrap();
        for round in 0..5 {
            let before = writers.holds();
            let guard = soon(read(&far).lock()).await.unwrap();
            let passed = writers.holds() - before;
            println!("{round_trip} ms, round {round}: {passed} writes");
            // One write may have started while the request was in flight.
            assert!(passed <= 3, "{passed} writes, {round_trip} ms");
            guard.unlock().await.unwrap();
        }
        far.shutdown().await.unwrap();
    }
    writers.stop().await;
    readers.stop().await;
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The marks of live readers do not expire with the turn of a killed one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_reader_costs_a_far_one_no_turn() {
    let server = Server::start();
    let (a, proxy) = (server.client().await, Proxy::start(&server));
    proxy.rule(move |_| Action::Late(ms(120)));
    let far = LockClient::connect(proxy.url()).await.unwrap();
    // Loads the scripts in the client and in the server.
    read(&far).lock().await.unwrap().unlock().await.unwrap();
    for late in [ms(0), ms(800), ms(1_900)] {
        let writing = write(&a).lock().await.unwrap();
        let mut dead = Worker::start(&server, SHORT_WATCHDOG, ms(200));
        dead.ask("read l");
        eventually("a reader waits", || async { server.exists(READERS) }).await;
        dead.kill();
        writing.unlock().await.unwrap();
        let writers = AtIt::start((0..4).map(|_| write(&a)), ms(100));
        tokio::time::sleep(late).await;
        let before = writers.holds();
        let guard = soon(read(&far).lock()).await.unwrap();
        let passed = writers.holds() - before;
        println!("{late:?} after the release: {passed} writes");
        // One write may have started while the request was in flight.
        assert!(passed <= 3, "{passed} writes, {late:?}");
        guard.unlock().await.unwrap();
        writers.stop().await;
    }
    nothing_is_left(&server, &[&a, &far]).await;
}

/// A reader that is killed while it waits for a writer holds the next writer back until its mark
/// expires.
#[tokio::test]
async fn a_writer_is_in_when_a_waiting_reader_was_killed() {
    let server = Server::start();
    let (a, b) = (server.client().await, deaf_to_time(&server).await);
    let writing = write(&a).lock().await.unwrap();
    let mut dead = Worker::start(&server, SHORT_WATCHDOG, ms(200));
    dead.ask("read l");
    eventually("a reader waits", || async { server.exists(READERS) }).await;
    dead.kill();
    let writer = waiter(write(&b));
    listens(&b).await;
    let released = Instant::now();
    writing.unlock().await.unwrap();
    soon(writer).await.unwrap().unlock().await.unwrap();
    let waited = released.elapsed();
    println!("a writer entered {waited:?} after the release, behind a dead reader");
    assert!(waited < MARK_TIME + SLACK);
    nothing_is_left(&server, &[&a, &b]).await;
}

/// A reader that stopped waiting holds no writer back.
#[tokio::test]
async fn a_reader_that_gives_up_takes_its_mark_back() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let writing = write(&a).lock().await.unwrap();
    assert!(read(&b).try_lock_for(ms(100)).await.unwrap().is_none());
    eventually("its mark is gone", || async { !server.exists(READERS) }).await;
    let reader = waiter(read(&b));
    eventually("a reader waits", || async { server.exists(READERS) }).await;
    reader.abort();
    eventually("its mark is gone", || async { !server.exists(READERS) }).await;
    assert!(read(&b).try_lock().await.unwrap().is_none());
    assert!(
        !server.exists(READERS),
        "an owner that does not wait holds no other back"
    );
    writing.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The writer's polls renew the intent, even if readers of its client wait at the same channel.
#[tokio::test]
async fn a_writers_turn_lasts_while_readers_of_its_client_wait_too() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let reading = read(&b).lock().await.unwrap();
    let writer = waiter(write(&a));
    intent_is_there(&server).await;
    let readers: Vec<_> = (0..10).map(|_| waiter(read(&a))).collect();
    let start = Instant::now();
    while start.elapsed() < 4 * MARK_TIME {
        assert!(server.exists(INTENT), "lapsed after {:?}", start.elapsed());
        assert_eq!(
            server.call(&["HLEN", "l"]).int(),
            2,
            "a reader went before the writer"
        );
        tokio::time::sleep(ms(10)).await;
    }
    reading.unlock().await.unwrap();
    soon(writer).await.unwrap().unlock().await.unwrap();
    for reader in readers {
        soon(reader).await.unwrap().unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Waiters at the same channel do not wake each other.
#[tokio::test]
async fn many_waiting_writers_cost_a_few_looks() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let reading = read(&b).lock().await.unwrap();
    let mut writers = Vec::new();
    for _ in 0..5 {
        for lock in [write(&a), write(&b)] {
            writers.push(tokio::spawn(async move {
                lock.lock().await.unwrap().unlock().await.unwrap();
            }));
        }
        intent_is_there(&server).await;
    }
    listens(&a).await;
    listens(&b).await;
    let (start, before) = (Instant::now(), server.script_count());
    while start.elapsed() < ms(2500) {
        assert!(server.exists(INTENT), "lapsed after {:?}", start.elapsed());
        tokio::time::sleep(ms(10)).await;
    }
    let scripts = server.script_count() - before;
    println!("{scripts} scripts in 2.5 s for 10 waiting writers of 2 clients");
    assert!(scripts < 60, "{scripts} scripts");
    reading.unlock().await.unwrap();
    for writer in writers {
        soon(writer).await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// However a writer stops waiting, the readers that it held back are notified at once.
#[tokio::test]
async fn a_writer_that_gives_up_lets_readers_in() {
    let server = Server::start();
    let (a, b, c) = (
        server.client().await,
        server.client().await,
        deaf_to_time(&server).await,
    );
    let reading = read(&a).lock().await.unwrap();
    for how in [
        "its wait is over",
        "aborted",
        "dropped unpolled",
        "shut down",
    ] {
        let b = if how == "shut down" {
            server.client().await
        } else {
            b.clone()
        };
        let lock = write(&b);
        let wait = if how == "its wait is over" {
            ms(700)
        } else {
            NEVER
        };
        let writer = tokio::spawn(async move { lock.try_lock_for(wait).await });
        intent_is_there(&server).await;
        // Without the notification, this intent would hold the readers back until the writer's next
        // poll.
        server.call(&["PEXPIRE", INTENT, "3600000"]);
        let readers: Vec<_> = (0..5).map(|_| waiter(read(&c))).collect();
        listens(&c).await;
        let start = Instant::now();
        match how {
            "its wait is over" => assert!(soon(writer).await.unwrap().unwrap().is_none()),
            "shut down" => {
                b.shutdown().await.unwrap();
                assert!(matches!(soon(writer).await.unwrap(), Err(Error::Closed)));
            }
            _ => {
                if how == "dropped unpolled" {
                    // The request is in flight, and no caller awaits its reply.
                    drop(write(&b).lock().now_or_never());
                }
                writer.abort();
                assert!(writer.await.unwrap_err().is_cancelled());
            }
        }
        for reader in readers {
            soon(reader).await.unwrap().unlock().await.unwrap();
        }
        println!("{how}: readers entered after {:?}", start.elapsed());
        eventually("no intent", || async { !server.exists(INTENT) }).await;
    }
    reading.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// Returns the number of scripts per hold while many tasks take the lock again and again.
async fn scripts_per_hold(server: &Server, lock: Lock) -> f64 {
    const TASKS: usize = 200;
    const ROUNDS: usize = 5;
    let before = server.script_count();
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for _ in 0..ROUNDS {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(4 * SOON, task)
            .await
            .expect("all have their turns")
            .unwrap();
    }
    #[allow(clippy::cast_precision_loss, reason = "a few thousand")]
    let scripts = (server.script_count() - before) as f64 / (TASKS * ROUNDS) as f64;
    scripts
}

/// A writer that is woken gets the lock, or finds a holder whose release wakes the next one. The
/// other writers need not try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_wakes_one_of_many_writers() {
    let server = Server::start();
    // Without the relay, which hands on plain holds but not write holds.
    let client = server
        .client_with(|builder| {
            builder.tuning(Tuning {
                relay: false,
                ..Tuning::default()
            })
        })
        .await;
    let plain = scripts_per_hold(&server, client.reentrant_lock("plain").unwrap()).await;
    let write = scripts_per_hold(&server, write(&client)).await;
    println!("200 tasks: {plain:.1} scripts for a hold of a plain lock, {write:.1} for a write");
    assert!(
        write < 1.5 * plain + 1.0,
        "{write:.1} scripts for a write, {plain:.1} for a plain hold"
    );
    nothing_is_left(&server, &[&client]).await;
}

/// Redisson's last reader sends `0`, its writer `1`. Both wake all readers, which can be in
/// together, and one writer.
#[tokio::test]
async fn a_message_wakes_all_readers_and_one_writer_of_each_client() {
    let server = Server::start();
    let clients = [deaf_to_time(&server).await, deaf_to_time(&server).await];
    // Loads the scripts, so that each try counts once.
    for lock in [read(&clients[0]), write(&clients[0])] {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    let mut peer = Redisson::new(&server);
    assert_eq!(peer.write("3600000"), Reply::Nil);
    let before = server.script_count();
    let mut waiters = Vec::new();
    for client in &clients {
        for _ in 0..10 {
            for lock in [read(client), write(client)] {
                waiters.push(tokio::spawn(async move {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }));
            }
        }
    }
    // Each waiter tries once, and one per side and client once more when its subscription is
    // confirmed.
    let mut expected = before + 44;
    let tried = |count| {
        let server = &server;
        async move {
            eventually("all have tried", || async {
                server.script_count() >= count
            })
            .await;
        }
    };
    tried(expected).await;
    assert_eq!(server.command_count("subscribe"), 2, "one for both sides");
    for message in ["0", "1", "1", "0"] {
        server.call(&["PUBLISH", CHANNEL, message]);
        expected += 22;
        tried(expected).await;
    }
    // A waiter whose last reply is in flight at a message may be woken twice. Waking all writers
    // would cost 40 tries per message.
    let tries = server.script_count() - before;
    assert!(tries < 44 + 4 * 30, "{tries} tries");
    assert_eq!(peer.unlock_write(), Reply::Int(1));
    for waiter in waiters {
        soon(waiter).await.unwrap();
    }
    nothing_is_left(&server, &[&clients[0], &clients[1]]).await;
    eventually("no client is subscribed", || async {
        server.channels().is_empty()
    })
    .await;
}

/// R87: a waiter that is woken and does not try passes the wake-up on. No client polls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r87_a_writer_or_reader_giving_up_takes_no_wake_up_along() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let over = Arc::new(AtomicBool::new(false));
    let fickle: Vec<_> = (0..16_u64)
        .map(|n| {
            let client = if n % 2 == 0 { &a } else { &b };
            let (lock, over) = (
                if n % 4 < 2 {
                    write(client)
                } else {
                    read(client)
                },
                Arc::clone(&over),
            );
            tokio::spawn(async move {
                let mut round = n;
                while !over.load(Ordering::SeqCst) {
                    round += 1;
                    // The acquire is dropped anywhere: while it waits, after it was woken, with a
                    // request in flight.
                    let brief = Duration::from_micros(100 + 379 * (round % 23));
                    if let Ok(Ok(guard)) = tokio::time::timeout(brief, lock.lock()).await {
                        guard.unlock().await.unwrap();
                    }
                }
            })
        })
        .collect();
    let steady: Vec<_> = (0..8)
        .map(|n| {
            let client = if n % 2 == 0 { &a } else { &b };
            let lock = if n % 4 < 2 {
                write(client)
            } else {
                read(client)
            };
            tokio::spawn(async move {
                for _ in 0..40 {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in steady {
        tokio::time::timeout(20 * SOON, task)
            .await
            .expect("woken by messages alone")
            .unwrap();
    }
    over.store(true, Ordering::SeqCst);
    for task in fickle {
        soon(task).await.unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

/// As many readers as writers of one client, each acquiring again at once, on one thread, where the
/// waiter that is woken first comes first.
#[tokio::test]
async fn neither_readers_nor_writers_starve_where_both_wait() {
    let server = Server::start();
    let client = server.client().await;
    let over = Arc::new(AtomicBool::new(false));
    let holds: [Arc<Vec<AtomicUsize>>; 2] =
        std::array::from_fn(|_| Arc::new((0..20).map(|_| AtomicUsize::new(0)).collect()));
    let mut tasks = Vec::new();
    for n in 0..20 {
        for (lock, holds) in [read(&client), write(&client)].into_iter().zip(&holds) {
            let (over, holds) = (Arc::clone(&over), Arc::clone(holds));
            tasks.push(tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let guard = lock.lock().await.unwrap();
                    tokio::task::yield_now().await;
                    guard.unlock().await.unwrap();
                    holds[n].fetch_add(1, Ordering::SeqCst);
                }
            }));
        }
    }
    let least = |side: usize| {
        holds[side]
            .iter()
            .map(|count| count.load(Ordering::SeqCst))
            .min()
            .unwrap()
    };
    within(20 * SOON, "each of them had ten turns", || async {
        least(0) >= 10 && least(1) >= 10
    })
    .await;
    over.store(true, Ordering::SeqCst);
    for task in tasks {
        soon(task).await.unwrap();
    }
    let [reads, writes] = [0, 1].map(|side| {
        holds[side]
            .iter()
            .map(|count| count.load(Ordering::SeqCst))
            .sum::<usize>()
    });
    println!("{reads} reads, {writes} writes");
    nothing_is_left(&server, &[&client]).await;
}

/// The rule of the guide (`src/guide/choosing.md`) for readers inside readers: the same owner may
/// always read again, and a limit ends the wait of another owner.
#[tokio::test]
async fn a_nested_reader_enters_as_the_same_owner_or_waits_as_another() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let outer = named(&a, &read(&a), "request").await;
    let writer = waiter(write(&b));
    intent_is_there(&server).await;
    let (same, other) = (a.clone(), read(&a));
    let other = tokio::spawn(async move { other.try_lock_for(ms(300)).await.unwrap() });
    let same = tokio::spawn(async move { named(&same, &read(&same), "request").await });
    soon(same).await.unwrap().unlock().await.unwrap();
    assert!(
        soon(other).await.unwrap().is_none(),
        "the writer comes first"
    );
    assert!(!writer.is_finished());
    outer.unlock().await.unwrap();
    soon(writer).await.unwrap().unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

// --- other kinds at the same name ---

type Door = fn(&LockClient) -> Lock;

const PLAIN: [(&str, Door); 5] = [
    ("reentrant", |client| client.reentrant_lock("l").unwrap()),
    ("fenced", |client| client.fenced_lock("l").unwrap()),
    ("fair", |client| client.fair_lock("l").unwrap()),
    ("spin", |client| client.spin_lock("l").unwrap()),
    ("non-reentrant", |client| {
        client.non_reentrant_lock("l").unwrap()
    }),
];
const SIDES: [(&str, Door); 2] = [
    ("read", |client| read(client)),
    ("write", |client| write(client)),
];

/// R52: an acquire of another kind is refused, even to the holder itself, and the hold stays
/// unchanged.
#[tokio::test]
async fn r52_no_plain_and_read_write_lock_of_a_name_are_held_at_once() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let plain_first = PLAIN
        .iter()
        .flat_map(|plain| SIDES.iter().map(move |side| (plain, side)));
    let pairs = plain_first.flat_map(|(plain, side)| [(plain, side), (side, plain)]);
    for ((held, door), (other, intruder)) in pairs {
        let what = format!("{other} next to {held}");
        let lock = door(&a);
        let guard = lock.lock().await.unwrap();
        let record = server.record_of_any_kind("l");
        for client in [&a, &b] {
            let intruder = intruder(client);
            let refused = |error: Error| {
                assert!(
                    matches!(error, Error::WrongLockKind { .. }),
                    "{what}: {error}"
                );
            };
            refused(intruder.try_lock().await.expect_err(&what));
            refused(soon(intruder.lock()).await.expect_err(&what));
            refused(intruder.is_locked().await.expect_err(&what));
            refused(intruder.force_unlock().await.expect_err(&what));
            // Cancelled with the request in flight: the clean-up must not undo the hold of the
            // other kind.
            drop(intruder.lock().now_or_never());
            client.idle().await;
            assert_eq!(server.record_of_any_kind("l"), record, "{what}");
        }
        lock.extend(&guard.owner(), Duration::from_secs(60))
            .await
            .unwrap();
        assert!(!guard.is_lost(), "{what}");
        guard.unlock().await.expect(&what);
        for client in [&a, &b] {
            client.idle().await;
        }
        let left = server
            .dump()
            .into_iter()
            .filter(|(key, ..)| !key.starts_with("redisson_lock_token:"));
        assert_eq!(left.count(), 0, "{what}");
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

// --- lost replies ---

/// A read inside a write uses the writer's owner id. It is refused while an earlier request under
/// that id may still run.
#[tokio::test]
async fn a_read_in_a_write_is_refused_while_a_prior_one_is_in_doubt() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::builder()
        .command_timeout(ms(300))
        .watchdog_timeout(Duration::from_secs(4))
        .connect(proxy.url())
        .await
        .unwrap();
    // Loads the scripts, so that no request meets NOSCRIPT.
    read(&a).lock().await.unwrap().unlock().await.unwrap();
    let b = server.client().await;
    let writing = leased(&write(&a), NEVER).await;
    let name = writing.owner();
    proxy.once(Verb::Acquire, Action::Ghost(ms(1500)));
    let unanswered = read(&a).try_lock().await;
    assert!(
        matches!(
            unanswered,
            Err(Error::Unconfirmed { .. } | Error::Store { .. })
        ),
        "{unanswered:?}"
    );
    eventually("refused", || async {
        match read(&a).try_lock().await {
            Err(Error::Unconfirmed { .. }) => true,
            Err(Error::Store { .. }) => false,
            other => panic!("{other:?}"),
        }
    })
    .await;
    eventually("the late request runs", || async {
        proxy.ghosts() == 1 && hold_keys(&server) == [hold_key(&name, 1)]
    })
    .await;
    assert!(matches!(
        read(&a).try_lock().await,
        Err(Error::Unconfirmed { .. })
    ));
    assert!(!writing.is_lost());
    assert!(
        read(&b).try_lock().await.unwrap().is_none(),
        "the write is held all the time"
    );
    // The write itself is not in doubt.
    write(&a)
        .try_lock()
        .await
        .unwrap()
        .expect("its own")
        .unlock()
        .await
        .unwrap();
    writing.unlock().await.unwrap();
    let reading = soon(read(&a).lock()).await.unwrap();
    assert_ne!(
        reading.owner(),
        name,
        "a late request meets an unused owner name"
    );
    reading.unlock().await.unwrap();
    // The hold of the late request ends with its lease.
    eventually("nothing is held", || async { server.dump().is_empty() }).await;
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The replies to nested reads, to a downgrade and to the last release are lost. The counts stay
/// correct.
#[tokio::test]
async fn lost_replies_leave_the_counts_true() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let a = LockClient::builder()
        .command_timeout(ms(300))
        .connect(proxy.url())
        .await
        .unwrap();
    let b = server.client().await;
    for action in [Action::Twice, Action::Lose, Action::CutBefore] {
        let reading = leased(&read(&a), NEVER).await;
        proxy.once(Verb::Acquire, action);
        let nested = soon(read(&a).lock()).await.unwrap();
        assert_eq!(
            read(&b).hold_count(&reading.owner()).await.unwrap(),
            2,
            "{action:?}"
        );
        proxy.once(Verb::Release, action);
        let _ = nested.unlock().await;
        a.idle().await;
        assert_eq!(
            read(&b).hold_count(&reading.owner()).await.unwrap(),
            1,
            "{action:?}"
        );
        assert!(!reading.is_lost(), "{action:?}");
        reading.unlock().await.unwrap();

        let writing = leased(&write(&a), NEVER).await;
        let reading = leased(&read(&a), NEVER).await;
        proxy.once(Verb::Release, action);
        let _ = writing.unlock().await;
        a.idle().await;
        eventually("downgraded", || async {
            mode(&server) == Reply::Text("read".into())
        })
        .await;
        read(&b)
            .try_lock()
            .await
            .unwrap()
            .expect("readers are in")
            .unlock()
            .await
            .unwrap();
        assert!(!reading.is_lost(), "{action:?}");
        reading.unlock().await.unwrap();
        nothing_is_left(&server, &[&a, &b]).await;
    }
}

// --- Redisson at the same lock ---

/// Another process that uses Redisson: the rows of its tables, in scripts of our own.
struct Redisson {
    wire: Wire,
    field: &'static str,
}

impl Redisson {
    const KEYS: &str =
        "local field, holds = ARGV[1], '{' .. KEYS[1] .. '}:' .. ARGV[1] .. ':rwlock_timeout:' ";

    fn new(server: &Server) -> Self {
        Self {
            wire: server.wire(),
            field: "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71",
        }
    }

    fn run(&mut self, script: &str, lease: &str) -> Reply {
        let script = format!("{}{script}", Self::KEYS);
        self.wire
            .call(&["EVAL", &script, "1", "l", self.field, lease, CHANNEL])
            .unwrap()
    }

    /// Returns `Nil` if the lock was acquired, otherwise its PTTL in milliseconds.
    fn read(&mut self, lease: &str) -> Reply {
        self.run(
            "local mode = redis.call('hget', KEYS[1], 'mode')
            if mode == 'write' and redis.call('hexists', KEYS[1], field .. ':write') == 0 then
                return redis.call('pttl', KEYS[1])
            end
            if not mode then redis.call('hset', KEYS[1], 'mode', 'read') end
            local n = redis.call('hincrby', KEYS[1], field, 1)
            redis.call('set', holds .. n, 1, 'PX', ARGV[2])
            local left = redis.call('pttl', KEYS[1])
            redis.call('pexpire', KEYS[1], math.max(left, ARGV[2]))
            return nil",
            lease,
        )
    }

    fn write(&mut self, lease: &str) -> Reply {
        self.run(
            "if redis.call('exists', KEYS[1]) == 1 and redis.call('hexists', KEYS[1], field .. ':write') == 0 then
                return redis.call('pttl', KEYS[1])
            end
            local left = math.max(redis.call('pttl', KEYS[1]), 0)
            redis.call('hset', KEYS[1], 'mode', 'write')
            redis.call('hincrby', KEYS[1], field .. ':write', 1)
            redis.call('pexpire', KEYS[1], left + ARGV[2])
            return nil",
            lease,
        )
    }

    fn unlock_read(&mut self) -> Reply {
        self.run(
            "if redis.call('hexists', KEYS[1], field) == 0 then return nil end
            local n = redis.call('hincrby', KEYS[1], field, -1)
            if n == 0 then redis.call('hdel', KEYS[1], field) end
            redis.call('del', holds .. (n + 1))
            if redis.call('hlen', KEYS[1]) > 1 then
                local most = -3
                for _, key in ipairs(redis.call('hkeys', KEYS[1])) do
                    for i = tonumber(redis.call('hget', KEYS[1], key)) or 0, 1, -1 do
                        most = math.max(most, redis.call('pttl', '{' .. KEYS[1] .. '}:' .. key .. ':rwlock_timeout:' .. i))
                    end
                end
                if most > 0 then redis.call('pexpire', KEYS[1], most) return 0 end
                if redis.call('hget', KEYS[1], 'mode') == 'write' then return 0 end
            end
            redis.call('del', KEYS[1])
            redis.call('publish', ARGV[3], '0')
            return 1",
            "0",
        )
    }

    fn unlock_write(&mut self) -> Reply {
        self.run(
            "if redis.call('hexists', KEYS[1], field .. ':write') == 0 then return nil end
            if redis.call('hincrby', KEYS[1], field .. ':write', -1) > 0 then return 0 end
            redis.call('hdel', KEYS[1], field .. ':write')
            if redis.call('hlen', KEYS[1]) == 1 then
                redis.call('del', KEYS[1])
                redis.call('publish', ARGV[3], '1')
            else
                redis.call('hset', KEYS[1], 'mode', 'read')
            end
            return 1",
            "0",
        )
    }

    fn holds(&self, n: u32) -> String {
        format!("{{l}}:{}:rwlock_timeout:{n}", self.field)
    }
}

#[tokio::test]
async fn redissons_writer_and_ours_exclude_each_other_and_all_readers() {
    let server = Server::start();
    let a = deaf_to_time(&server).await;
    let mut peer = Redisson::new(&server);
    assert_eq!(peer.write("60000"), Reply::Nil);
    assert!(read(&a).try_lock().await.unwrap().is_none());
    assert!(write(&a).try_lock().await.unwrap().is_none());
    assert_eq!(
        write(&a).holder().await.unwrap().unwrap().as_str(),
        peer.field
    );
    let readers: Vec<_> = (0..10).map(|_| waiter(read(&a))).collect();
    listens(&a).await;
    assert_eq!(peer.unlock_write(), Reply::Int(1));
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(soon(reader).await.unwrap());
    }
    assert!(peer.write("60000").int() > 0, "our readers keep it out");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    let writing = write(&a).lock().await.unwrap();
    let nested = read(&a).lock().await.unwrap();
    assert!(peer.write("60000").int() > 0 && peer.read("60000").int() > 0);
    writing.unlock().await.unwrap();
    assert_eq!(peer.read("60000"), Reply::Nil, "it sees our downgrade");
    assert!(peer.write("60000").int() > 0);
    nested.unlock().await.unwrap();
    assert_eq!(peer.unlock_read(), Reply::Int(1));
    nothing_is_left(&server, &[&a]).await;
}

#[tokio::test]
async fn redissons_readers_and_ours_keep_each_others_holds() {
    let server = Server::start();
    let (a, b) = (server.client().await, deaf_to_time(&server).await);
    let mut peer = Redisson::new(&server);
    let ours = leased(&read(&a), Duration::from_secs(40)).await;
    for lease in ["20000", "30000"] {
        assert_eq!(peer.read(lease), Reply::Nil);
    }
    assert!(write(&b).try_lock().await.unwrap().is_none());
    // Our hold ends. The two holds of the peer stay, and the record lives as long as the longer
    // one.
    ours.unlock().await.unwrap();
    assert_eq!(hold_keys(&server), [peer.holds(1), peer.holds(2)]);
    assert!(
        server.pttl("l") > 25_000 && server.pttl("l") <= 30_000,
        "{}",
        server.pttl("l")
    );
    // The holds of the peer end. The record lives as long as ours.
    let ours = leased(&read(&a), Duration::from_secs(10)).await;
    assert_eq!(peer.unlock_read(), Reply::Int(0));
    assert!(
        server.pttl("l") > 15_000 && server.pttl("l") <= 20_000,
        "{}",
        server.pttl("l")
    );
    assert_eq!(peer.unlock_read(), Reply::Int(0));
    assert!(
        server.pttl("l") > 5_000 && server.pttl("l") <= 10_000,
        "it counts our hold key"
    );
    assert_eq!(hold_keys(&server), [hold_key(&ours.owner(), 1)]);
    // The last release of the peer wakes our writer.
    assert_eq!(peer.read("60000"), Reply::Nil);
    ours.unlock().await.unwrap();
    let writer = waiter(write(&b));
    intent_is_there(&server).await;
    listens(&b).await;
    assert_eq!(peer.unlock_read(), Reply::Int(1));
    let writing = soon(writer).await.unwrap();
    assert!(peer.read("60000").int() > 0);
    writing.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Redisson's last reader wakes one waiter. If that is one of our readers, the other readers
/// follow.
#[tokio::test]
async fn a_message_for_one_wakes_all_readers() {
    let server = Server::start();
    let a = deaf_to_time(&server).await;
    let mut peer = Redisson::new(&server);
    assert_eq!(peer.write("3600000"), Reply::Nil);
    let readers: Vec<_> = (0..10).map(|_| waiter(read(&a))).collect();
    listens(&a).await;
    server.call(&["DEL", "l"]);
    server.call(&["PUBLISH", CHANNEL, "0"]);
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(soon(reader).await.unwrap());
    }
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&a]).await;
}

/// R73: all keys of a lock are in its slot, with and without braces in the name.
#[tokio::test]
async fn r73_the_keys_of_a_lock_are_in_one_slot() {
    let bus = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
        .to_string();
    let server = Server::start_with(&["--cluster-enabled", "yes", "--cluster-port", &bus]);
    assert!(
        !server
            .call(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"])
            .is_error()
    );
    eventually("the cluster is up", || async {
        server
            .call(&["CLUSTER", "INFO"])
            .text()
            .contains("state:ok")
    })
    .await;
    let (a, b) = (
        server
            .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
            .await,
        server.client().await,
    );
    for name in ["l", "orders:7", "{shop}:orders", "a{b}c"] {
        let (lock, other) = (
            a.read_write_lock(name).unwrap(),
            b.read_write_lock(name).unwrap(),
        );
        let writing = lock.write_lock().lock().await.unwrap();
        let reading = lock.read_lock().lock().await.unwrap();
        let nested = lock.read_lock().lock().await.unwrap();
        writing.unlock().await.unwrap();
        let also = other.read_lock().lock().await.unwrap();
        let writer = waiter(other.write_lock());
        // The reads that are held keep the writer out, so it leaves an intent.
        let slots: Vec<i64> = {
            eventually("an intent", || async { server.dump().len() == 5 }).await;
            server
                .dump()
                .iter()
                .map(|(key, ..)| server.call(&["CLUSTER", "KEYSLOT", key]).int())
                .collect()
        };
        assert!(
            slots.iter().all(|slot| *slot == slots[0]),
            "{name}: {slots:?}"
        );
        // The test waits for one lease, which renewals must outlive.
        tokio::time::sleep(SHORT_WATCHDOG).await;
        assert!(!reading.is_lost() && !nested.is_lost(), "renewed");
        for guard in [reading, nested, also] {
            guard.unlock().await.unwrap();
        }
        soon(writer).await.unwrap().unlock().await.unwrap();
        assert!(
            !lock.read_lock().force_unlock().await.unwrap()
                && !lock.write_lock().force_unlock().await.unwrap()
        );
        nothing_is_left(&server, &[&a, &b]).await;
    }
}

/// Runs four processes with eight tasks each; see `support::history`.
#[test]
fn tasks_in_four_processes_read_together_and_write_alone() {
    let server = Server::start_real();
    for leases in [false, true] {
        let history = History::play(&server, "read-write", 2, 30, leases);
        history.assert_no_clashes();
        let (readers, together) = (
            history.holds.iter().filter(|hold| hold.shared).count(),
            history.companies().len(),
        );
        println!("{readers} reads, {together} of them together with another one");
        assert!(together > readers / 10, "{together} of {readers}");
    }
}
