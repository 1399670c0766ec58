//! The promises of every lock kind, written once. A kind adopts them with [`contract_suite`] and
//! lists the exceptions:
//! `contract_suite! { mod spin, door = |client, name| .., listens = false }`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt, future::BoxFuture};
use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, LossReason};

use crate::support::{Server, came_too_late, eventually, wire::Reply};

type Door = fn(&LockClient, &str) -> Lock;

/// A lock kind and its promises.
#[derive(Clone, Copy)]
pub struct Kind {
    pub door: Door,
    /// The lock of the other party, which this one excludes: the same constructor, except for the
    /// sides of a read-write lock.
    pub rival: Door,
    /// Many owners may hold it together, and with `rival_shared`, many may hold its rival.
    pub shared: bool,
    pub rival_shared: bool,
    /// Its owner may re-enter it.
    pub reentrant: bool,
    /// Its waiters subscribe to a channel.
    pub listens: bool,
    /// It has exactly one record.
    pub one_record: bool,
    /// Its record is a string at `lock:` plus the name, and a list wakes its waiters, as in
    /// python-redis-lock.
    pub signals: bool,
    /// Its record is a sorted set whose scores are the ends of the leases.
    pub counted: bool,
}

impl Kind {
    pub fn new(door: Door) -> Self {
        let (shared, rival_shared) = (false, false);
        Self {
            door,
            rival: door,
            shared,
            rival_shared,
            reentrant: true,
            listens: true,
            one_record: true,
            signals: false,
            counted: false,
        }
    }

    fn lock(&self, client: &LockClient, name: &str) -> Lock {
        (self.door)(client, name)
    }

    fn rival(&self, client: &LockClient, name: &str) -> Lock {
        (self.rival)(client, name)
    }

    /// Returns the key of the record of `l`.
    fn record(&self) -> &'static str {
        match (self.signals, self.counted) {
            (true, _) => "lock:l",
            (_, true) => "{l}:timeout",
            _ => "l",
        }
    }

    /// Returns how long the lease of `l` lasts, in milliseconds, as the server sees it.
    fn ttl(&self, server: &Server) -> i64 {
        if !self.counted {
            return server.pttl(self.record());
        }
        let first = server.call(&["ZRANGE", self.record(), "0", "0", "WITHSCORES"]);
        let end: i64 = first.list()[1].text().parse().unwrap();
        end - server.now()
    }

    /// Returns the command that renews.
    fn renewal(&self) -> &'static str {
        match (self.signals, self.counted) {
            (true, _) => "expire",
            (_, true) => "zadd",
            _ => "pexpire",
        }
    }

    /// Waits until this client has a waiter.
    async fn waiting(&self, server: &Server, client: &LockClient) {
        if self.signals {
            eventually("a waiter listens", || async {
                client.stats().channels > 0 && server.blocked() > 0
            })
            .await;
        } else if self.listens {
            eventually("a waiter listens", || async {
                client.stats().channels > 0 && !server.channels().is_empty()
            })
            .await;
        } else {
            let before = server.script_count();
            eventually("a waiter tries", || async {
                server.script_count() > before
            })
            .await;
        }
    }
}

macro_rules! contract_suite {
    (mod $name:ident, door = $door:expr $(, $flag:ident = $value:expr)* $(,)?) => {
        mod $name {
            #[allow(unused_mut, reason = "a kind that promises everything changes nothing")]
            fn kind() -> crate::contract::Kind {
                let mut kind = crate::contract::Kind::new($door);
                $(kind.$flag = $value;)*
                kind
            }
            crate::contract::contract_suite! { @tests
                clients_and_tasks_exclude_each_other
                a_busy_try_returns_none_and_a_free_one_holds
                a_wait_ends_in_time_with_none
                a_zero_wait_tries_once_and_a_huge_wait_waits
                re_entry_counts_and_frees_at_the_last_release
                r43_r44_f38_a_foreign_or_second_release_changes_nothing
                force_unlock_frees_and_wakes_a_waiter
                a_lease_ends_and_the_next_waiter_gets_the_lock
                the_watchdog_renews_over_three_timeouts
                an_explicit_lease_is_not_renewed
                r51_a_lease_is_kept_over_re_entry_and_partial_release
                r50_the_lease_of_an_earlier_acquire_is_not_used_again
                a_dropped_guard_releases
                a_cancelled_waiter_holds_nothing_and_others_are_served
                a_cancelled_acquire_holds_nothing
                an_ended_lease_is_observed_by_every_means
                a_deleted_record_is_observed_at_the_next_renewal
                run_until_lost_cancels_at_the_loss
                run_until_lost_gives_the_output
                a_lost_hold_does_not_trouble_the_next_acquire
                a_hold_that_is_left_stays_until_released_or_over
                another_client_extends_and_releases_what_was_left
                a_guard_unlocks_on_another_task_and_on_a_plain_thread
                extend_never_shortens
                short_extensions_do_not_keep_the_watchdog_away
                names_are_independent
                r30_shutdown_releases_everything_and_turns_waiters_away
                a_shutdown_leaves_nothing_of_acquires_in_flight
            }
        }
    };
    (@tests $($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                crate::contract::$test(kind()).await;
            }
        )*
    };
}
pub(crate) use contract_suite;

contract_suite! { mod reentrant, door = |client, name| client.reentrant_lock(name).unwrap() }

const SHORT_WATCHDOG: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(15);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

async fn leased(lock: &Lock, lease: Duration) -> LockGuard {
    loop {
        match lock.try_lock_with(AcquireOptions::new().lease(lease)).await {
            Ok(guard) => return guard.expect("a free lock"),
            // On a busy machine, the reply may come after so short a lease has ended.
            Err(Error::Unconfirmed { .. } | Error::NoQuorum { .. })
                if lease < Duration::from_secs(1) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Asserts that neither the clients nor the server keep anything.
pub async fn nothing_is_left(server: &Server, clients: &[&LockClient]) {
    for client in clients {
        client.idle().await;
        eventually("the client's ledger is empty", || async {
            let stats = client.stats();
            stats.holds == 0 && stats.settling == 0 && stats.channels == 0
        })
        .await;
    }
    eventually("no channel is subscribed", || async {
        server.channels().is_empty()
    })
    .await;
    assert_eq!(records(server), [], "no key is left");
}

/// Returns every key except fencing tokens, which are kept forever so that they never restart,
/// signals that expire, and the number of available permits if all are.
fn records(server: &Server) -> Vec<(String, Reply, i64)> {
    let brief = |key: &str, expires: i64| key.starts_with("lock-signal:") && expires > 0;
    let kept =
        |key: &str, expires: i64| key.starts_with("redisson_lock_token:") || brief(key, expires);
    let all_free = Reply::List(["string", "1"].map(|text| Reply::Text(text.into())).into());
    // PEXPIRETIME is -2 for a key that has just expired.
    server
        .dump()
        .into_iter()
        .filter(|(key, _, expires)| !kept(key, *expires) && *expires != -2)
        .filter(|(_, value, expires)| *value != all_free || *expires != -1)
        .collect()
}

fn delete_everything(server: &Server, kind: Kind) {
    assert!(server.exists(kind.record()));
    server.call(&["FLUSHALL"]);
}

pub async fn clients_and_tasks_exclude_each_other(kind: Kind) {
    /// The weight of a holder that must be alone.
    const ALONE: usize = 1000;
    let server = Server::start();
    let inside = Arc::new(AtomicUsize::new(0));
    let entries = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    let mut tasks = Vec::new();
    for _ in 0..3 {
        let client = server.client().await;
        for task in 0..4 {
            let (lock, shared) = match task % 2 {
                0 => (kind.lock(&client, "l"), kind.shared),
                _ => (kind.rival(&client, "l"), kind.rival_shared),
            };
            let (inside, entries) = (Arc::clone(&inside), Arc::clone(&entries));
            let weight = if shared { 1 } else { ALONE };
            tasks.push(tokio::spawn(async move {
                for round in 0..25 {
                    let guard = match (task + round) % 3 {
                        0 => lock.lock().await.unwrap(),
                        1 => lock
                            .try_lock_for(Duration::from_secs(60))
                            .await
                            .unwrap()
                            .expect("within a minute"),
                        _ => {
                            let mut wait = ms(3);
                            loop {
                                match lock.try_lock_for(wait).await {
                                    Ok(Some(guard)) => break guard,
                                    Ok(None) => {}
                                    Err(error) => assert!(came_too_late(&error), "{error}"),
                                }
                                // With a fixed wait, a slow server where others are first would get
                                // retries forever and be slowed further.
                                wait *= 2;
                            }
                        }
                    };
                    let others = inside.fetch_add(weight, Ordering::SeqCst);
                    assert!(
                        if shared { others < ALONE } else { others == 0 },
                        "{others} are inside"
                    );
                    tokio::task::yield_now().await;
                    assert!(!guard.is_lost());
                    entries.fetch_add(1, Ordering::SeqCst);
                    let others = inside.fetch_sub(weight, Ordering::SeqCst) - weight;
                    assert!(
                        if shared { others < ALONE } else { others == 0 },
                        "{others} are inside"
                    );
                    if round % 2 == 0 {
                        drop(guard);
                    } else {
                        guard.unlock().await.unwrap();
                    }
                }
            }));
        }
        clients.push(client);
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(180), task)
            .await
            .expect("every task has its turns")
            .unwrap();
    }
    assert_eq!(entries.load(Ordering::SeqCst), 3 * 4 * 25);
    nothing_is_left(&server, &clients.iter().collect::<Vec<_>>()).await;
}

pub async fn a_busy_try_returns_none_and_a_free_one_holds(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (kind.lock(&a, "l"), kind.lock(&b, "l"));
    let rival = kind.rival(&b, "l");
    assert!(!la.is_locked().await.unwrap());
    assert_eq!(la.remaining_lease().await.unwrap(), None);
    let guard = la.try_lock().await.unwrap().expect("a free lock");
    assert_eq!(guard.name(), la.name());
    if kind.one_record {
        assert_eq!(guard.name(), "l");
    }
    assert!(rival.try_lock().await.unwrap().is_none());
    assert!(lb.is_locked().await.unwrap());
    assert_eq!(lb.hold_count(&guard.owner()).await.unwrap(), 1);
    assert_eq!(lb.hold_count(&b.current_owner()).await.unwrap(), 0);
    if kind.one_record {
        assert_eq!(lb.holder().await.unwrap(), Some(guard.owner()));
        assert!(lb.remaining_lease().await.unwrap().unwrap() > Duration::from_secs(20));
    }
    guard.unlock().await.unwrap();
    assert!(!lb.is_locked().await.unwrap());
    assert_eq!(lb.holder().await.unwrap(), None);
    for lock in [lb, rival] {
        lock.try_lock()
            .await
            .unwrap()
            .expect("a free lock")
            .unlock()
            .await
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn a_wait_ends_in_time_with_none(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guard = kind.lock(&a, "l").lock().await.unwrap();
    let lock = kind.rival(&b, "l");
    for wait in [200, 600] {
        let start = Instant::now();
        assert!(lock.try_lock_for(ms(wait)).await.unwrap().is_none());
        let waited = start.elapsed();
        assert!(
            waited >= ms(wait) && waited < SOON,
            "waited {waited:?} instead of {wait} ms"
        );
    }
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn a_zero_wait_tries_once_and_a_huge_wait_waits(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    let guard = la.lock().await.unwrap();
    let tries = server.script_count();
    assert!(rival.try_lock_for(Duration::ZERO).await.unwrap().is_none());
    let members = if kind.one_record { 1 } else { 3 };
    assert!(server.script_count() <= tries + members, "one try");
    assert_eq!(
        server.channels(),
        [] as [&str; 0],
        "a try does not subscribe"
    );
    let waiter = tokio::spawn(async move {
        rival
            .try_lock_for(Duration::MAX)
            .await
            .unwrap()
            .expect("no limit")
    });
    kind.waiting(&server, &b).await;
    guard.unlock().await.unwrap();
    waiter.await.unwrap().unlock().await.unwrap();
    la.try_lock_for(Duration::MAX)
        .await
        .unwrap()
        .expect("a free lock")
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn re_entry_counts_and_frees_at_the_last_release(kind: Kind) {
    if !kind.reentrant {
        return;
    }
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (kind.lock(&a, "l"), kind.lock(&b, "l"));
    let rival = kind.rival(&b, "l");
    let owner = a.current_owner();
    let mut guards = Vec::new();
    for holds in 1..=4 {
        guards.push(if holds % 2 == 0 {
            la.lock().await.unwrap()
        } else {
            la.try_lock().await.unwrap().unwrap()
        });
        assert_eq!(lb.hold_count(&owner).await.unwrap(), holds);
    }
    for holds in (0..4).rev() {
        assert!(
            rival.try_lock().await.unwrap().is_none(),
            "held {} times",
            holds + 1
        );
        guards.pop().unwrap().unlock().await.unwrap();
        assert_eq!(lb.hold_count(&owner).await.unwrap(), holds);
    }
    rival
        .try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// A release by another owner, or a second release, is refused and changes nothing.
pub async fn r43_r44_f38_a_foreign_or_second_release_changes_nothing(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, lb) = (kind.lock(&a, "l"), kind.lock(&b, "l"));
    let not_held = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::NotHeld { .. })), "{result:?}");
    };
    not_held(la.release(&a.current_owner()).await);
    assert_eq!(records(&server), []);
    let guard = leased(&la, Duration::from_secs(3600)).await;
    let before = records(&server);
    not_held(lb.release(&b.current_owner()).await);
    not_held(lb.release(&a.owner("somebody-else").unwrap()).await);
    not_held(la.release(&a.owner("somebody-else").unwrap()).await);
    not_held(la.release(&b.current_owner()).await);
    assert!(matches!(
        lb.extend(&b.current_owner(), Duration::from_secs(7200))
            .await,
        Err(Error::NotHeld { .. })
    ));
    assert!(matches!(
        la.extend(
            &a.owner("somebody-else").unwrap(),
            Duration::from_secs(7200)
        )
        .await,
        Err(Error::NotHeld { .. })
    ));
    assert_eq!(records(&server), before);
    assert!(kind.ttl(&server) <= 3_600_000);
    let owner = guard.owner();
    guard.unlock().await.unwrap();
    not_held(la.release(&owner).await);
    not_held(lb.release(&owner).await);
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn force_unlock_frees_and_wakes_a_waiter(kind: Kind) {
    let server = Server::start();
    // The poll cap is too long to be what wakes the waiter.
    let (a, b) = (
        server.client().await,
        server
            .client_with(|c| c.poll_cap(Duration::from_secs(3600)))
            .await,
    );
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    assert!(!la.force_unlock().await.unwrap(), "no owner held it");
    let guard = leased(&la, Duration::from_secs(3600)).await;
    let waiter = tokio::spawn(async move { rival.lock().await.unwrap() });
    kind.waiting(&server, &b).await;
    assert!(kind.lock(&b, "l").force_unlock().await.unwrap());
    let next = tokio::time::timeout(SOON, waiter)
        .await
        .expect("woken")
        .unwrap();
    assert_ne!(next.owner(), guard.owner());
    let unlocked = guard.unlock().await;
    assert!(matches!(unlocked, Err(Error::Lost { .. })), "{unlocked:?}");
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn a_lease_ends_and_the_next_waiter_gets_the_lock(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    let start = Instant::now();
    let guard = leased(&la, ms(400)).await;
    let next = rival
        .try_lock_for(SOON)
        .await
        .unwrap()
        .expect("the lease is over");
    // The server counts in milliseconds.
    assert!(
        start.elapsed() >= ms(398),
        "the lease was cut short: {:?}",
        start.elapsed()
    );
    assert!(guard.is_lost(), "lost before the next one holds");
    next.unlock().await.unwrap();
    drop(guard);
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn the_watchdog_renews_over_three_timeouts(kind: Kind) {
    let server = Server::start();
    let a = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let b = server.client().await;
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    let guard = la.lock().await.unwrap();
    let start = Instant::now();
    while start.elapsed() < 3 * SHORT_WATCHDOG {
        assert!(
            !guard.is_lost() && rival.try_lock().await.unwrap().is_none(),
            "after {:?}",
            start.elapsed()
        );
        tokio::time::sleep(ms(20)).await;
    }
    guard.unlock().await.unwrap();
    rival
        .try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn an_explicit_lease_is_not_renewed(kind: Kind) {
    let server = Server::start();
    let a = server.client_with(|c| c.watchdog_timeout(ms(300))).await;
    let b = server.client().await;
    let lock = kind.lock(&a, "l");
    let start = Instant::now();
    let guard = leased(&lock, ms(700)).await;
    // The release of a signal lock has a PEXPIRE of its own.
    let renewals = || server.command_count(kind.renewal());
    // A first attempt whose reply came too late is settled by a release. The release of a reader
    // shortens the record's TTL.
    a.idle().await;
    let before = renewals();
    let lost = tokio::time::timeout(SOON, guard.lost())
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
    assert!(start.elapsed() > ms(500), "no earlier than its lease");
    let free = kind.lock(&b, "l");
    eventually("the lock is free", || async {
        !free.is_locked().await.unwrap()
    })
    .await;
    let renewed = renewals() - before;
    // A reader's end is sent again every 100 ms, and that writes if it is late.
    let told_again = if kind.shared {
        start.elapsed().as_millis() as u64 / 100
    } else {
        0
    };
    assert!(
        renewed <= told_again,
        "no client renews: {renewed}, {told_again} allowed"
    );
    drop(guard);
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn r51_a_lease_is_kept_over_re_entry_and_partial_release(kind: Kind) {
    if !kind.reentrant || !kind.one_record {
        return;
    }
    let server = Server::start();
    let client = server.client().await; // watchdog: 30 s
    let lock = kind.lock(&client, "l");
    let kept = |what: &str| {
        assert!(
            kind.ttl(&server) > 3_500_000,
            "{what}: {} ms",
            kind.ttl(&server)
        );
    };
    let outer = leased(&lock, Duration::from_secs(3600)).await;
    let inner = lock.lock().await.unwrap();
    kept("re-entry without a lease");
    let innermost = leased(&lock, Duration::from_secs(1)).await;
    kept("re-entry with a shorter lease");
    assert!(
        innermost.remaining() > Duration::from_secs(3000),
        "one record, one end"
    );
    innermost.unlock().await.unwrap();
    kept("partial release");
    inner.unlock().await.unwrap();
    kept("partial release");
    assert!(outer.remaining() > Duration::from_secs(3000));
    let longer = leased(&lock, Duration::from_secs(7200)).await;
    assert!(kind.ttl(&server) > 7_000_000, "a longer lease counts");
    longer.unlock().await.unwrap();
    outer.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

pub async fn r50_the_lease_of_an_earlier_acquire_is_not_used_again(kind: Kind) {
    if !kind.one_record {
        return;
    }
    let server = Server::start();
    let client = server.client().await;
    let lock = kind.lock(&client, "l");
    for lease in [3600, 5] {
        leased(&lock, Duration::from_secs(lease))
            .await
            .unlock()
            .await
            .unwrap();
        let guard = lock.lock().await.unwrap();
        let pttl = kind.ttl(&server);
        assert!(
            pttl > 20_000 && pttl <= 30_000,
            "{pttl} ms are not the watchdog's after a lease of {lease} s"
        );
        assert!(
            guard.remaining() > Duration::from_secs(20)
                && guard.remaining() <= Duration::from_secs(30)
        );
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

pub async fn a_dropped_guard_releases(kind: Kind) {
    let server = Server::start();
    let (a, b) = (
        server.client().await,
        server
            .client_with(|c| c.poll_cap(Duration::from_secs(3600)))
            .await,
    );
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    let guard = leased(&la, Duration::from_secs(3600)).await;
    let waiter = tokio::spawn(async move { rival.lock().await.unwrap() });
    kind.waiting(&server, &b).await;
    drop(guard);
    let next = tokio::time::timeout(SOON, waiter)
        .await
        .expect("woken by the drop")
        .unwrap();
    next.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn a_cancelled_waiter_holds_nothing_and_others_are_served(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    let guard = la.lock().await.unwrap();
    let mut waiters: Vec<_> = (0..10)
        .map(|_| {
            let lock = rival.clone();
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        })
        .collect();
    kind.waiting(&server, &b).await;
    let staying = waiters.split_off(5);
    for waiter in waiters {
        waiter.abort();
        assert!(waiter.await.unwrap_err().is_cancelled());
    }
    guard.unlock().await.unwrap();
    for waiter in staying {
        tokio::time::timeout(SOON, waiter)
            .await
            .expect("served")
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn a_cancelled_acquire_holds_nothing(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (la, rival) = (kind.lock(&a, "l"), kind.rival(&b, "l"));
    for round in 0..20 {
        // The request is in flight, and its reply is not awaited.
        drop(la.lock().now_or_never());
        if round % 2 == 0 {
            a.idle().await;
            rival
                .try_lock()
                .await
                .unwrap()
                .expect("no owner holds it")
                .unlock()
                .await
                .unwrap();
        } else {
            rival
                .try_lock_for(SOON)
                .await
                .unwrap()
                .expect("soon no owner holds it")
                .unlock()
                .await
                .unwrap();
            // An abandoned acquire does not hinder its own owner.
            la.lock().await.unwrap().unlock().await.unwrap();
        }
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn an_ended_lease_is_observed_by_every_means(kind: Kind) {
    let server = Server::start();
    let client = server.client().await;
    let lock = kind.lock(&client, "l");
    let (start, lease) = (Instant::now(), ms(2_000));
    let guard = leased(&lock, lease).await;
    assert!(!guard.is_lost() && guard.remaining() > Duration::ZERO && guard.remaining() < lease);
    let lost = tokio::time::timeout(SOON, guard.lost())
        .await
        .expect("it ends");
    assert!(start.elapsed() < SOON);
    let Error::Lost {
        reason: LossReason::LeaseExpired,
        lock: named,
        ..
    } = &lost
    else {
        panic!("{lost}")
    };
    assert!(
        named == guard.name() || !kind.one_record && named == "l",
        "{lost}"
    );
    assert!(guard.is_lost());
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert!(matches!(
        guard.extend(Duration::from_secs(1)).await,
        Err(Error::Lost { .. })
    ));
    assert!(matches!(
        guard.run_until_lost(std::future::ready(())).await,
        Err(Error::Lost { .. })
    ));
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LossReason::LeaseExpired,
            ..
        })
    ));
    nothing_is_left(&server, &[&client]).await;
}

pub async fn a_deleted_record_is_observed_at_the_next_renewal(kind: Kind) {
    if !kind.one_record {
        return;
    }
    let server = Server::start();
    let client = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let lock = kind.lock(&client, "l");
    let guard = lock.lock().await.unwrap();
    delete_everything(&server, kind);
    let lost = tokio::time::timeout(SOON, guard.lost())
        .await
        .expect("it is noticed");
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    assert!(guard.is_lost());
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    // N11, F16: without a renewal in between, the release reports the loss.
    let guard = lock.lock().await.unwrap();
    delete_everything(&server, kind);
    let unlocked = guard.unlock().await;
    assert!(
        matches!(
            unlocked,
            Err(Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            })
        ),
        "{unlocked:?}"
    );
    nothing_is_left(&server, &[&client]).await;
}

pub async fn run_until_lost_cancels_at_the_loss(kind: Kind) {
    struct Dropped<'a>(&'a AtomicUsize);
    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let server = Server::start();
    let client = server.client().await;
    let guard = leased(&kind.lock(&client, "l"), ms(300)).await;
    let dropped = AtomicUsize::new(0);
    let work = async {
        let _dropped = Dropped(&dropped);
        std::future::pending::<()>().await;
    };
    let lost = tokio::time::timeout(SOON, guard.run_until_lost(work))
        .await
        .expect("it ends")
        .unwrap_err();
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    assert_eq!(dropped.load(Ordering::SeqCst), 1, "the work was dropped");
    drop(guard);
    nothing_is_left(&server, &[&client]).await;
}

pub async fn run_until_lost_gives_the_output(kind: Kind) {
    let server = Server::start();
    let client = server.client().await;
    let guard = kind.lock(&client, "l").lock().await.unwrap();
    let output = guard
        .run_until_lost(async {
            tokio::task::yield_now().await;
            42
        })
        .await;
    assert_eq!(output.unwrap(), 42);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

/// An owner that was notified of the loss, or gave up its guard, starts afresh.
pub async fn a_lost_hold_does_not_trouble_the_next_acquire(kind: Kind) {
    let server = Server::start();
    let client = server.client().await;
    let lock = kind.lock(&client, "l");
    for round in 0..6 {
        let guard = leased(&lock, ms(200)).await;
        tokio::time::timeout(SOON, guard.lost())
            .await
            .expect("it ends");
        match round % 3 {
            0 => drop(guard),
            1 => assert!(matches!(guard.unlock().await, Err(Error::Lost { .. }))),
            _ => {
                let moved = std::thread::spawn(move || drop(guard));
                moved.join().unwrap();
            }
        }
        lock.lock()
            .await
            .expect("no trace of the lost hold")
            .unlock()
            .await
            .unwrap();
    }
    nothing_is_left(&server, &[&client]).await;
}

pub async fn a_hold_that_is_left_stays_until_released_or_over(kind: Kind) {
    let server = Server::start();
    let a = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let b = server.client().await;
    let (la, lb) = (kind.lock(&a, "l"), kind.lock(&b, "l"));
    let rival = kind.rival(&b, "l");
    let owner = leased(&la, 10 * SHORT_WATCHDOG).await.leave_to_lease();
    a.idle().await;
    let start = Instant::now();
    while start.elapsed() < 2 * SHORT_WATCHDOG {
        assert!(
            rival.try_lock().await.unwrap().is_none(),
            "its lease is not over"
        );
        tokio::time::sleep(ms(20)).await;
    }
    la.release(&owner).await.unwrap();
    assert!(!lb.is_locked().await.unwrap());
    assert!(matches!(
        la.release(&owner).await,
        Err(Error::NotHeld { .. })
    ));
    // It ends by itself, with a lease or with its last renewal. (The RedLock here has an expiry of
    // 30 s.)
    let ways: &[bool] = if kind.one_record {
        &[true, false]
    } else {
        &[true]
    };
    for &has_lease in ways {
        let guard = if has_lease {
            leased(&la, ms(200)).await
        } else {
            la.lock().await.unwrap()
        };
        let _ = guard.leave_to_lease();
        rival
            .try_lock_for(SOON)
            .await
            .unwrap()
            .expect("the lease is over")
            .unlock()
            .await
            .unwrap();
    }
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn another_client_extends_and_releases_what_was_left(kind: Kind) {
    let server = Server::start();
    let a = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let b = server.client().await;
    let (la, lb) = (kind.lock(&a, "l"), kind.lock(&b, "l"));
    let printed = leased(&la, Duration::from_secs(3))
        .await
        .leave_to_lease()
        .to_string();
    let owner = printed.parse().unwrap();
    assert_eq!(lb.hold_count(&owner).await.unwrap(), 1);
    lb.extend(&owner, Duration::from_secs(3600)).await.unwrap();
    if kind.one_record {
        assert!(kind.ttl(&server) > 3_500_000);
    }
    let acquire = lb
        .try_lock_with(AcquireOptions::new().owner(owner.clone()))
        .await;
    assert!(
        matches!(acquire, Err(Error::InvalidOwner { .. })),
        "another client's owner cannot acquire"
    );
    lb.release(&owner).await.unwrap();
    assert!(!lb.is_locked().await.unwrap());
    assert!(matches!(
        lb.release(&owner).await,
        Err(Error::NotHeld { .. })
    ));
    assert!(matches!(
        lb.extend(&owner, Duration::from_secs(1)).await,
        Err(Error::NotHeld { .. })
    ));
    // The client that left it notices the release, or that its lease is over.
    let other = AcquireOptions::new().owner(a.owner("job-2").unwrap());
    let owner = la
        .try_lock_with(other)
        .await
        .unwrap()
        .unwrap()
        .leave_to_lease();
    lb.release(&owner).await.unwrap();
    let next = lb.lock().await.unwrap();
    eventually("the release was noticed", || async { a.stats().holds == 0 }).await;
    assert!(!next.is_lost());
    next.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn a_guard_unlocks_on_another_task_and_on_a_plain_thread(kind: Kind) {
    let server = Server::start();
    let client = server.client().await;
    let lock = kind.lock(&client, "l");
    let guard = lock.lock().await.unwrap();
    tokio::spawn(guard.unlock()).await.unwrap().unwrap();
    assert_eq!(records(&server), []);
    let guard = lock.lock().await.unwrap();
    let thread = std::thread::spawn(move || futures::executor::block_on(guard.unlock()));
    thread.join().unwrap().unwrap();
    assert_eq!(records(&server), []);
    let guard = lock.lock().await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    nothing_is_left(&server, &[&client]).await;
}

pub async fn extend_never_shortens(kind: Kind) {
    let server = Server::start();
    let client = server.client().await;
    let lock = kind.lock(&client, "l");
    let guard = leased(&lock, Duration::from_secs(60)).await;
    guard.extend(Duration::from_secs(3600)).await.unwrap();
    assert!(guard.remaining() > Duration::from_secs(3000));
    guard.extend(ms(10)).await.unwrap();
    lock.extend(&guard.owner(), ms(10)).await.unwrap();
    assert!(guard.remaining() > Duration::from_secs(3000));
    if kind.one_record {
        assert!(kind.ttl(&server) > 3_500_000);
    }
    for bad in [Duration::ZERO, ms(9), Duration::MAX] {
        assert!(matches!(
            guard.extend(bad).await,
            Err(Error::InvalidLease { .. })
        ));
        assert!(matches!(
            lock.extend(&guard.owner(), bad).await,
            Err(Error::InvalidLease { .. })
        ));
    }
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

/// An extension that does not reach beyond the lease must not postpone the renewal.
pub async fn short_extensions_do_not_keep_the_watchdog_away(kind: Kind) {
    let server = Server::start();
    let client = server
        .client_with(|c| c.watchdog_timeout(SHORT_WATCHDOG))
        .await;
    let guard = kind.lock(&client, "l").lock().await.unwrap();
    let start = Instant::now();
    while start.elapsed() < 2 * SHORT_WATCHDOG {
        guard
            .extend(ms(10))
            .await
            .unwrap_or_else(|error| panic!("after {:?}: {error}", start.elapsed()));
        tokio::time::sleep(ms(15)).await;
    }
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&client]).await;
}

pub async fn names_are_independent(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guard = kind.lock(&a, "l").lock().await.unwrap();
    for name in ["l2", "L", "l:", "{l}x"] {
        let other = kind
            .rival(&b, name)
            .try_lock()
            .await
            .unwrap()
            .expect("another lock");
        other.unlock().await.unwrap();
    }
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

pub async fn r30_shutdown_releases_everything_and_turns_waiters_away(kind: Kind) {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let busy = kind.rival(&b, "busy").lock().await.unwrap();
    let held = kind.lock(&a, "l").lock().await.unwrap();
    let watched: BoxFuture<'_, Error> = held.lost().boxed();
    let lock = kind.lock(&a, "busy");
    let waiter = tokio::spawn(async move { lock.lock().await });
    kind.waiting(&server, &a).await;
    a.shutdown().await.unwrap();
    let turned_away = tokio::time::timeout(SOON, waiter)
        .await
        .expect("turned away")
        .unwrap();
    assert!(matches!(turned_away, Err(Error::Closed)), "{turned_away:?}");
    let lost = tokio::time::timeout(SOON, watched).await.expect("notified");
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: LossReason::ShutDown,
                ..
            }
        ),
        "{lost}"
    );
    assert!(!server.exists(kind.record()));
    let lock = kind.lock(&a, "l");
    assert!(matches!(lock.lock().await, Err(Error::Closed)));
    assert!(matches!(lock.try_lock().await, Err(Error::Closed)));
    assert!(matches!(lock.is_locked().await, Err(Error::Closed)));
    assert!(matches!(lock.force_unlock().await, Err(Error::Closed)));
    assert!(matches!(
        held.unlock().await,
        Err(Error::Lost {
            reason: LossReason::ShutDown,
            ..
        })
    ));
    a.shutdown().await.unwrap();
    assert!(!busy.is_lost());
    busy.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// Nothing is held when a shutdown returns, whatever was in flight.
pub async fn a_shutdown_leaves_nothing_of_acquires_in_flight(kind: Kind) {
    let server = Server::start();
    for round in 0..20 {
        let client = server.client().await;
        let tasks: Vec<_> = (0..40)
            .map(|task| {
                let lock = kind.lock(&client, &format!("l{task}"));
                tokio::spawn(async move {
                    let mut guards = Vec::new();
                    loop {
                        match lock.lock().await {
                            Ok(guard) if guards.is_empty() && kind.reentrant => guards.push(guard),
                            Ok(guard) => {
                                guards.push(guard);
                                for guard in std::mem::take(&mut guards) {
                                    match guard.unlock().await {
                                        Ok(()) | Err(Error::Lost { .. }) => {}
                                        // The connection was closed during the wait, and the
                                        // shutdown settles the release.
                                        Err(Error::Store { .. } | Error::Unconfirmed { .. }) => {}
                                        Err(error) => panic!("{error}"),
                                    }
                                }
                            }
                            Err(Error::Lost { .. }) => {}
                            Err(Error::Closed) => return guards,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        eventually("holds", || async { client.stats().holds >= 20 }).await;
        client.shutdown().await.unwrap();
        let left = records(&server);
        assert!(
            left.is_empty(),
            "round {round}: {} locks are held after the shutdown",
            left.len()
        );
        for task in tasks {
            let guards = tokio::time::timeout(SOON, task)
                .await
                .expect("it ends")
                .unwrap();
            assert!(guards.iter().all(LockGuard::is_lost));
        }
        assert_eq!(records(&server), [], "no task acquires after the shutdown");
    }
}
