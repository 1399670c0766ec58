//! Semaphores: a number that any process changes, with or without guards.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, LockClient, LockGuard, LossReason, Semaphore};
use tokio::task::JoinSet;

use crate::support::{
    Server, eventually, poll_once,
    proxy::{Action, Proxy, Verb},
    wire::Reply,
};

const LEASES: &str = "nestlock_semaphore_leases:{l}";
const CHANNEL: &str = "redisson_sc:{l}";

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn semaphore(client: &LockClient) -> Semaphore {
    client.semaphore("l").unwrap()
}

/// Returns a semaphore of this many permits.
async fn of(client: &LockClient, total: u32) -> Semaphore {
    let semaphore = semaphore(client);
    assert!(semaphore.try_set_permits(total).await.unwrap());
    semaphore
}

/// Returns the number that Redisson reads.
fn counter(server: &Server) -> i64 {
    server.call(&["GET", "l"]).text().parse().unwrap()
}

fn taken(server: &Server) -> i64 {
    server.call(&["ZCARD", LEASES]).int()
}

async fn has_waiters(client: &LockClient, waiters: usize) {
    eventually("they wait", || async { client.stats().waiters == waiters }).await;
    eventually("they listen", || async { client.stats().channels > 0 }).await;
}

/// Starts this many tasks that take a permit each.
fn acquiring(semaphore: &Semaphore, tasks: usize) -> JoinSet<LockGuard> {
    let one = |semaphore: Semaphore| async move { semaphore.acquire().await.unwrap() };
    (0..tasks).map(|_| one(semaphore.clone())).collect()
}

/// A client whose waiters are woken by messages, or never.
async fn patient(server: &Server) -> LockClient {
    let builder = |builder: nestlock::LockClientBuilder| builder.poll_cap(ms(600_000));
    server.client_with(builder).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_than_there_are_are_inside() {
    let server = Server::start();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..2 {
        let client = server.client().await;
        for _ in 0..6 {
            let semaphore = semaphore(&client);
            let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
            tasks.spawn(async move {
                semaphore.try_set_permits(3).await.unwrap();
                for _ in 0..40 {
                    let guard = semaphore.acquire().await.unwrap();
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.unlock().await.unwrap();
                }
            });
        }
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), 3);
    assert_eq!((counter(&server), taken(&server)), (3, 0));
}

/// Without a number there are no permits, and the first call that sets it wakes waiters.
#[tokio::test]
async fn the_number_is_set_once() {
    let server = Server::start();
    let client = patient(&server).await;
    let semaphore = semaphore(&client);
    assert_eq!(semaphore.available_permits().await.unwrap(), 0);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(server.dump(), [], "a try writes nothing");
    let waiters = acquiring(&semaphore, 2);
    has_waiters(&client, 2).await;
    assert!(semaphore.try_set_permits(2).await.unwrap());
    let guards = waiters.join_all().await;
    assert!(!semaphore.try_set_permits(9).await.unwrap());
    assert_eq!(semaphore.available_permits().await.unwrap(), 0);
    let mut owners: Vec<_> = guards.iter().map(|guard| (guard.owner(), 1)).collect();
    let mut holders = semaphore.holders().await.unwrap();
    owners.sort_by_key(|(owner, _)| owner.to_string());
    holders.sort_by_key(|(owner, _)| owner.to_string());
    assert_eq!(holders, owners);
    drop(guards);
    client.idle().await;
    assert_eq!((counter(&server), taken(&server)), (2, 0));
}

/// An acquire and a release are one request each.
#[tokio::test]
async fn a_permit_costs_two_requests() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 3).await;
    semaphore.acquire().await.unwrap().unlock().await.unwrap();
    let before = server.script_count();
    for _ in 0..10 {
        let guard = semaphore.acquire_many(2).await.unwrap();
        assert_eq!(counter(&server), 1);
        guard.unlock().await.unwrap();
    }
    assert_eq!(server.script_count() - before, 20);
}

/// What Redisson's `release` does wakes waiters, and `add_permits` does what Redisson's does.
#[tokio::test]
async fn permits_are_added_and_taken_away() {
    let server = Server::start();
    let client = patient(&server).await;
    let semaphore = of(&client, 0).await;
    assert_eq!(counter(&server), 0);
    let waiters = acquiring(&semaphore, 2);
    has_waiters(&client, 2).await;
    let mut listener = server.wire();
    listener.call(&["SUBSCRIBE", CHANNEL]).unwrap();
    semaphore.add_permits(1).await.unwrap();
    let text = |text: &str| Reply::Text(text.into());
    let told = Reply::List(vec![text("message"), text(CHANNEL), text("1")]);
    assert_eq!(listener.read().unwrap(), told);
    eventually("one gets in", || async { client.stats().waiters == 1 }).await;
    // as Redisson does it
    server.call(&["INCRBY", "l", "1"]);
    server.call(&["PUBLISH", CHANNEL, "1"]);
    let guards = waiters.join_all().await;
    semaphore.add_permits(-3).await.unwrap();
    assert_eq!(counter(&server), -3);
    assert_eq!(semaphore.available_permits().await.unwrap(), 0);
    drop(guards);
    client.idle().await;
    assert_eq!(counter(&server), -1);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    semaphore.add_permits(6).await.unwrap();
    assert_eq!(semaphore.drain_permits().await.unwrap(), 5);
    assert_eq!(semaphore.drain_permits().await.unwrap(), 0);
    assert_eq!((counter(&server), taken(&server)), (0, 0));
}

/// A drain leaves what was taken away below 0, and takes what has expired.
#[tokio::test]
async fn a_drain_takes_what_is_available() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 4).await;
    let several = semaphore.many(2).unwrap();
    let lease = AcquireOptions::new().lease(ms(20));
    several.lock_with(lease).await.unwrap().leave_to_lease();
    let held = semaphore.acquire().await.unwrap();
    eventually("they expire", || async {
        semaphore.available_permits().await.unwrap() == 3
    })
    .await;
    assert_eq!(semaphore.drain_permits().await.unwrap(), 3);
    assert_eq!((counter(&server), taken(&server)), (0, 1));
    semaphore.add_permits(-2).await.unwrap();
    assert_eq!(semaphore.drain_permits().await.unwrap(), 0);
    assert_eq!(counter(&server), -2);
    held.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (-1, 0));
    server.call(&["DEL", "l"]);
    assert_eq!(semaphore.drain_permits().await.unwrap(), 0);
    assert!(!server.exists("l"));
}

/// The permits of a dead holder's guards come back; those that it forgot do not.
#[tokio::test]
async fn a_dead_holder_keeps_what_it_forgot() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 5).await;
    let lease = || AcquireOptions::new().lease(ms(700));
    let two = semaphore.many(2).unwrap();
    let forgotten = two.lock_with(lease()).await.unwrap();
    semaphore.forget(&forgotten).await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));
    let error = forgotten.unlock().await.unwrap_err();
    assert!(matches!(error, Error::NotHeld { .. }), "{error}");
    two.lock_with(lease()).await.unwrap().leave_to_lease();
    let began = Instant::now();
    let guard = semaphore.acquire_many(3).await.unwrap();
    assert!(began.elapsed() < ms(5_000), "{:?}", began.elapsed());
    assert_eq!((counter(&server), taken(&server)), (0, 3));
    drop(guard);
    client.idle().await;
    assert_eq!((counter(&server), taken(&server)), (3, 0));
    // another process gives them back
    let other = crate::semaphore::semaphore(&server.client().await);
    other.add_permits(2).await.unwrap();
    other.acquire_many(5).await.unwrap().unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (5, 0));
}

/// A dropped guard whose permits were forgotten gives nothing back, and the watchdog leaves them.
#[tokio::test]
async fn what_was_forgotten_is_not_renewed_or_released() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(ms(900)))
        .await;
    let semaphore = of(&client, 3).await;
    let guard = semaphore.acquire().await.unwrap();
    semaphore.forget(&guard).await.unwrap();
    assert!(guard.is_lost() && guard.remaining() == Duration::ZERO);
    assert!(matches!(guard.lost().await, Error::NotHeld { .. }));
    let error = semaphore.forget(&guard).await.unwrap_err();
    assert!(matches!(error, Error::NotHeld { .. }), "{error}");
    drop(guard);
    tokio::time::sleep(ms(1_200)).await;
    client.idle().await;
    assert_eq!((counter(&server), taken(&server)), (2, 0));
    assert_eq!(client.stats().holds, 0);
    client.shutdown().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (2, 0));
}

/// A guard of another lock, or client, is refused and still held.
#[tokio::test]
async fn only_its_own_guards_are_forgotten() {
    let server = Server::start();
    let (client, other) = (server.client().await, server.client().await);
    let semaphore = of(&client, 3).await;
    let guards = [
        client.permits("p", 1).unwrap().acquire().await.unwrap(),
        client.mutex("m").unwrap().lock().await.unwrap(),
        self::semaphore(&other).acquire().await.unwrap(),
    ];
    for guard in guards {
        let error = semaphore.forget(&guard).await.unwrap_err();
        assert!(
            matches!(&error, Error::NotHeld { lock, .. } if lock == "l"),
            "{error}"
        );
        guard.unlock().await.unwrap();
    }
    assert_eq!((counter(&server), taken(&server)), (3, 0));
    // lost, and not noticed yet
    let guard = semaphore.acquire().await.unwrap();
    server.call(&["DEL", LEASES]);
    let error = semaphore.forget(&guard).await.unwrap_err();
    let missing = LossReason::RecordMissing;
    assert!(matches!(error, Error::Lost { reason, .. } if reason == missing));
    assert_eq!(counter(&server), 2);
}

/// A change whose reply is lost, or that arrives twice, is made once.
#[tokio::test]
async fn a_change_with_a_lost_reply_is_made_once() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let semaphore = semaphore(&client);
    for action in [
        Action::Lose,
        Action::CutBefore,
        Action::Ghost(ms(40)),
        Action::Twice,
    ] {
        let lose = || proxy.once(Verb::Count, action);
        lose();
        assert!(semaphore.try_set_permits(3).await.unwrap(), "{action:?}");
        lose();
        semaphore.add_permits(4).await.unwrap();
        assert_eq!(counter(&server), 7, "{action:?}");
        let guard = semaphore.acquire_many(2).await.unwrap();
        lose();
        semaphore.forget(&guard).await.unwrap();
        lose();
        assert_eq!(semaphore.drain_permits().await.unwrap(), 5, "{action:?}");
        // a request may be on its way still
        tokio::time::sleep(ms(100)).await;
        assert_eq!((counter(&server), taken(&server)), (0, 0), "{action:?}");
        server.call(&["DEL", "l"]);
    }
}

/// Each marker of a change goes after a minute.
#[tokio::test]
async fn changes_leave_nothing_for_long() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 3).await;
    semaphore.add_permits(1).await.unwrap();
    semaphore.drain_permits().await.unwrap();
    let markers: Vec<_> = server
        .dump()
        .into_iter()
        .filter(|(key, ..)| key != "l")
        .collect();
    assert_eq!(markers.len(), 3);
    for (key, ..) in markers {
        assert!(key.starts_with("nestlock_semaphore_request:{l}:"), "{key}");
        let ttl = server.pttl(&key);
        assert!(ttl > 50_000 && ttl <= 60_000, "{ttl}");
    }
}

/// However often an acquire is polled before it is dropped, the count is exact.
#[tokio::test]
async fn a_cancelled_acquire_takes_nothing() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 2).await;
    for polls in 0..6 {
        for n in [1, 2] {
            let acquire = semaphore.acquire_many(n);
            let mut acquire = pin!(acquire);
            for _ in 0..polls {
                if poll_once(acquire.as_mut()).await.is_ready() {
                    break;
                }
                tokio::time::sleep(ms(2)).await;
            }
        }
    }
    client.idle().await;
    assert_eq!((counter(&server), taken(&server)), (2, 0));
}

#[tokio::test]
async fn bad_numbers_are_refused_before_anything_is_sent() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = semaphore(&client);
    let before = server.script_count();
    let refused = |error: Error| assert!(matches!(error, Error::InvalidCount { .. }), "{error}");
    refused(semaphore.many(0).unwrap_err());
    refused(semaphore.many(101).unwrap_err());
    refused(semaphore.acquire_many(0).await.unwrap_err());
    refused(semaphore.add_permits(0).await.unwrap_err());
    refused(semaphore.try_set_permits(1 << 31).await.unwrap_err());
    for name in [
        "",
        "{x}",
        "lock:x",
        "redisson_x",
        "nestlock_semaphore_leases:{x}",
    ] {
        let error = client.semaphore(name).unwrap_err();
        assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    }
    assert_eq!(server.script_count(), before);
    // more than Redisson can read
    assert!(semaphore.try_set_permits(i32::MAX as u32).await.unwrap());
    refused(semaphore.add_permits(1).await.unwrap_err());
    assert_eq!(counter(&server), i64::from(i32::MAX));
    // not a number of permits
    server.call(&["SET", "l", "1.5"]);
    let error = semaphore.try_acquire().await.unwrap_err();
    assert!(matches!(error, Error::WrongLockKind { .. }), "{error}");
    let error = semaphore.add_permits(1).await.unwrap_err();
    assert!(matches!(error, Error::WrongLockKind { .. }), "{error}");
    server.call(&["DEL", "l"]);
    server.call(&["HSET", "l", "a", "1"]);
    let error = semaphore.drain_permits().await.unwrap_err();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
}

/// A semaphore that was deleted, and set again, counts the permits that are still taken.
#[tokio::test]
async fn a_number_that_is_set_again_includes_what_is_taken() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 3).await;
    let held = semaphore.acquire_many(2).await.unwrap();
    server.call(&["DEL", "l"]);
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    assert_eq!(semaphore.available_permits().await.unwrap(), 0);
    assert!(semaphore.try_set_permits(3).await.unwrap());
    assert_eq!(semaphore.available_permits().await.unwrap(), 1);
    held.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));
}

/// The poll cap is far away: the reply says when the lease ends.
#[tokio::test]
async fn a_waiter_learns_when_a_lease_ends() {
    let server = Server::start();
    let client = patient(&server).await;
    let semaphore = of(&client, 1).await;
    let lease = AcquireOptions::new().lease(ms(500));
    let one = semaphore.many(1).unwrap();
    one.lock_with(lease).await.unwrap().leave_to_lease();
    let began = Instant::now();
    let guard = semaphore.acquire().await.unwrap();
    assert!(began.elapsed() < ms(5_000), "{:?}", began.elapsed());
    guard.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (1, 0));
}

/// A first try that arrives after the reply to the second finds that one's reply.
#[tokio::test]
async fn a_late_first_try_changes_nothing() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let (late, other) = (semaphore(&client), semaphore(&server.client().await));
    let delay = || proxy.once(Verb::Count, Action::Ghost(ms(400)));
    delay();
    assert_eq!(late.drain_permits().await.unwrap(), 0);
    other.add_permits(5).await.unwrap();
    eventually("it arrives", || async { proxy.ghosts() == 1 }).await;
    tokio::time::sleep(ms(500)).await;
    assert_eq!(counter(&server), 5);
    delay();
    assert!(!late.try_set_permits(9).await.unwrap());
    delay();
    assert!(late.add_permits(i32::MAX).await.is_err());
    server.call(&["DEL", "l"]);
    tokio::time::sleep(ms(600)).await;
    assert!(!server.exists("l"));
}

/// A client that was shut down before the second try does not know whether the first was executed.
#[tokio::test]
async fn a_shutdown_between_two_tries_leaves_a_doubt() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let semaphore = of(&client, 1).await;
    // new connections only
    proxy.refuse();
    proxy.once(Verb::Count, Action::Lose);
    let add = tokio::spawn(async move { semaphore.add_permits(1).await });
    eventually("it is executed", || async { counter(&server) == 2 }).await;
    let _ = client.shutdown().await;
    let error = add.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unconfirmed { .. }), "{error}");
}

/// Redisson wakes as many waiters as a message says, in order, whatever each of them wants. nestlock wakes
/// as many as there are zeros before it.
#[tokio::test]
async fn a_message_is_the_number_available() {
    let server = Server::start();
    let client = server.client().await;
    let semaphore = of(&client, 3).await;
    let mut listener = server.wire();
    listener.call(&["SUBSCRIBE", CHANNEL]).unwrap();
    let mut told = || listener.read().unwrap().list()[2].text().to_owned();
    semaphore.acquire().await.unwrap().unlock().await.unwrap();
    assert_eq!(told(), "03");
    let lease = AcquireOptions::new().lease(ms(20));
    let two = semaphore.many(2).unwrap();
    two.lock_with(lease).await.unwrap().leave_to_lease();
    tokio::time::sleep(ms(40)).await;
    // which takes back what has expired, for Redisson's waiters, too
    let held = semaphore.acquire().await.unwrap();
    assert_eq!(told(), "02");
    assert_eq!((counter(&server), taken(&server)), (2, 1));
    held.unlock().await.unwrap();
    assert_eq!(told(), "03");
    let _held = semaphore.acquire().await.unwrap();
    semaphore.many(1).unwrap().force_unlock().await.unwrap();
    assert_eq!(told(), "3");
}

/// What has expired is available, though no acquire has taken it back yet.
#[tokio::test]
async fn a_number_that_grows_counts_what_has_expired() {
    let server = Server::start();
    let client = patient(&server).await;
    let semaphore = of(&client, 3).await;
    let permits = client.permits("p", 3).unwrap();
    let lease = || AcquireOptions::new().lease(ms(20));
    for all in [semaphore.many(3).unwrap(), permits.many(3).unwrap()] {
        all.lock_with(lease()).await.unwrap().leave_to_lease();
    }
    eventually("they expire", || async {
        semaphore.available_permits().await.unwrap() == 3
            && permits.available_permits().await.unwrap() == 3
    })
    .await;
    semaphore.add_permits(-2).await.unwrap();
    permits.set_permits(1).await.unwrap();
    let (ours, theirs) = (semaphore.clone(), permits.clone());
    let waits = tokio::spawn(async move { ours.acquire_many(3).await });
    let others = tokio::spawn(async move { theirs.acquire_many(3).await });
    has_waiters(&client, 2).await;
    eventually("they sleep", || async {
        let tries = server.script_count();
        tokio::time::sleep(ms(50)).await;
        server.script_count() == tries && server.channels().len() == 2
    })
    .await;
    semaphore.add_permits(2).await.unwrap();
    permits.set_permits(3).await.unwrap();
    let soon = |task| tokio::time::timeout(ms(10_000), task);
    for waiter in [waits, others] {
        let guard = soon(waiter).await.expect("it is woken").unwrap().unwrap();
        guard.unlock().await.unwrap();
    }
}
