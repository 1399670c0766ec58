//! Permits: at most N holders at the same time.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, LockClient, LockGuard, OwnerId, Permits};
use tokio::task::{JoinHandle, JoinSet};

use crate::{
    contract::contract_suite,
    support::{
        Server, eventually, poll_once,
        proxy::{Action, Proxy, Verb},
        wire::Reply,
    },
};

contract_suite! {
    mod contract,
    door = |client, name| client.permits(name, 1).unwrap().many(1).unwrap(),
    reentrant = false,
    counted = true,
}

/// The channel of the permits `l`.
const CHANNEL: &str = "redisson_sc:{l}";
/// The queue of fair permits.
pub const QUEUE: &str = "nestlock_permits_queue:{l}";

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn permits(client: &LockClient, total: u32) -> Permits {
    client.permits("l", total).unwrap()
}

/// Returns the number that the server has for available permits.
pub fn counter(server: &Server) -> i64 {
    server.call(&["GET", "l"]).text().parse().unwrap()
}

pub fn taken(server: &Server) -> i64 {
    server.call(&["ZCARD", "{l}:timeout"]).int()
}

/// Returns how many wait in the queue of fair permits.
pub fn queue(server: &Server) -> i64 {
    server.call(&["ZCARD", QUEUE]).int()
}

async fn has_waiters(client: &LockClient, waiters: usize) {
    eventually("they wait", || async { client.stats().waiters == waiters }).await;
}

/// Starts this many tasks that take a permit each.
fn acquiring(permits: &Permits, tasks: usize) -> JoinSet<LockGuard> {
    let one = |permits: Permits| async move { permits.acquire().await.unwrap() };
    (0..tasks).map(|_| one(permits.clone())).collect()
}

/// Three of twelve tasks are inside at any time, over two clients.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_than_there_are_are_inside() {
    let server = Server::start();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..2 {
        let client = server.client().await;
        for _ in 0..6 {
            let permits = permits(&client, 3);
            let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
            tasks.spawn(async move {
                for _ in 0..40 {
                    let guard = permits.acquire().await.unwrap();
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
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

/// An acquire and a release are one request each.
#[tokio::test]
async fn a_permit_costs_two_requests() {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 2);
    permits.acquire().await.unwrap().unlock().await.unwrap();
    let before = server.script_count();
    for _ in 0..10 {
        permits.acquire().await.unwrap().unlock().await.unwrap();
    }
    assert_eq!(server.script_count() - before, 20);
}

/// A guard of several permits gives them back together. While it waits for them, others may take
/// one; it gets them once there are enough.
#[tokio::test]
async fn several_permits_are_taken_and_given_back_together() {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 3);
    let heavy = permits.acquire_many(3).await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (0, 3));
    assert_eq!(permits.holders().await.unwrap(), [(heavy.owner(), 3)]);
    assert!(permits.try_acquire().await.unwrap().is_none());
    heavy.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));

    let [one, two] = [(); 2].map(|()| permits.try_acquire());
    let (one, two) = (one.await.unwrap().unwrap(), two.await.unwrap().unwrap());
    let waits = {
        let permits = permits.clone();
        tokio::spawn(async move { permits.acquire_many(3).await })
    };
    has_waiters(&client, 1).await;
    one.unlock().await.unwrap();
    assert_eq!(permits.available_permits().await.unwrap(), 2);
    two.unlock().await.unwrap();
    let heavy = waits.await.unwrap().unwrap();
    assert_eq!(permits.available_permits().await.unwrap(), 0);
    drop(heavy);
    client.idle().await;
    assert_eq!(permits.available_permits().await.unwrap(), 3);
}

/// A waiter for more than is given back does not keep the permit from a waiter for one.
#[tokio::test]
async fn a_waiter_for_several_holds_up_no_waiter_for_one() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(60_000)))
        .await;
    let permits = permits(&client, 2);
    let (one, two) = (
        permits.acquire().await.unwrap(),
        permits.acquire().await.unwrap(),
    );
    let (first, second) = (permits.clone(), permits.clone());
    let several = tokio::spawn(async move { first.acquire_many(2).await });
    has_waiters(&client, 1).await;
    let single = tokio::spawn(async move { second.acquire().await });
    has_waiters(&client, 2).await;
    one.unlock().await.unwrap();
    let next = tokio::time::timeout(ms(10_000), single).await;
    let next = next.expect("it is woken").unwrap().unwrap();
    two.unlock().await.unwrap();
    next.unlock().await.unwrap();
    let several = tokio::time::timeout(ms(10_000), several).await;
    let several = several.expect("it is woken").unwrap().unwrap();
    several.unlock().await.unwrap();
}

/// The permits of a client that is gone come back when their leases end, and waiters take them then.
#[tokio::test]
async fn permits_of_a_dead_holder_come_back() {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 2);
    let lease = AcquireOptions::new().lease(ms(600));
    for _ in 0..2 {
        let one = permits.many(1).unwrap();
        one.lock_with(lease.clone()).await.unwrap().leave_to_lease();
    }
    let began = Instant::now();
    let waiters = acquiring(&permits, 2);
    let guards = waiters.join_all().await;
    assert!(
        began.elapsed() < ms(5_000),
        "{:?}: as soon as the leases end",
        began.elapsed()
    );
    assert_eq!((counter(&server), taken(&server)), (0, 2));
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    assert_eq!((counter(&server), taken(&server)), (2, 0));
}

/// Expired permits count as available before an acquire removes them.
#[tokio::test]
async fn expired_permits_are_available() {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 3);
    let lease = AcquireOptions::new().lease(ms(20));
    let several = permits.many(2).unwrap();
    several.lock_with(lease).await.unwrap().leave_to_lease();
    eventually("they expire", || async {
        permits.available_permits().await.unwrap() == 3
    })
    .await;
    assert_eq!(permits.holders().await.unwrap(), []);
    assert_eq!((counter(&server), taken(&server)), (1, 2));
    permits.set_permits(4).await.unwrap();
    assert_eq!(permits.available_permits().await.unwrap(), 4);
    let all = client.permits("l", 4).unwrap().acquire_many(4).await;
    all.unwrap().unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (4, 0));
}

/// More permits wake waiters at once; fewer leave the holders theirs.
#[tokio::test]
async fn the_number_changes_while_permits_are_taken() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(60_000)))
        .await;
    let permits = permits(&client, 1);
    let first = permits.acquire().await.unwrap();
    let waiters = acquiring(&permits, 2);
    has_waiters(&client, 2).await;
    permits.set_permits(3).await.unwrap();
    let mut guards = waiters.join_all().await;
    guards.push(first);
    permits.set_permits(1).await.unwrap();
    assert_eq!(permits.available_permits().await.unwrap(), 0);
    for guard in guards {
        assert!(permits.try_acquire().await.unwrap().is_none());
        assert!(!guard.is_lost());
        guard.unlock().await.unwrap();
    }
    assert_eq!((counter(&server), taken(&server)), (1, 0));
    // another number in another process changes nothing
    let other = client.permits("l", 7).unwrap();
    other.acquire().await.unwrap().unlock().await.unwrap();
    assert_eq!(other.available_permits().await.unwrap(), 1);
}

/// Redisson reports how many are available, so a message may wake several.
#[tokio::test]
async fn a_message_wakes_as_many_as_it_says() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(60_000)))
        .await;
    let permits = permits(&client, 3);
    let held = permits.acquire_many(3).await.unwrap();
    let waiters = acquiring(&permits, 3);
    has_waiters(&client, 3).await;
    eventually("they listen", || async { !server.channels().is_empty() }).await;
    let settled = || async {
        let tries = server.script_count();
        tokio::time::sleep(ms(50)).await;
        server.script_count() == tries
    };
    eventually("they sleep", settled).await;
    for (message, wakes) in [("0", 0), ("-2", 0), ("2", 2), ("x", 0), ("5", 3)] {
        let before = server.script_count();
        server.call(&["PUBLISH", CHANNEL, message]);
        let told = || async { server.script_count() - before >= wakes };
        eventually("they try", told).await;
        eventually("they sleep", settled).await;
        assert_eq!(server.script_count() - before, wakes, "{message}");
    }
    held.unlock().await.unwrap();
    for guard in waiters.join_all().await {
        guard.unlock().await.unwrap();
    }
}

/// After a reconnect, all get in that can, though their handle knows of one permit only and no
/// message tells of any: each that gets one wakes the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missed_messages_about_many_permits_cost_one_poll() {
    const WAITERS: usize = 60;
    let server = Server::start();
    let other = server.client().await;
    let all = permits(&other, WAITERS as u32);
    let client = server
        .client_with(|builder| builder.poll_cap(ms(1_000)))
        .await;
    let held = all.acquire_many(WAITERS as u32).await.unwrap();
    let waiters = acquiring(&permits(&client, 1), WAITERS);
    has_waiters(&client, WAITERS).await;
    eventually("they listen", || async { !server.channels().is_empty() }).await;
    server.call(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    held.unlock().await.unwrap();
    let began = Instant::now();
    let guards = waiters.join_all().await;
    assert!(
        began.elapsed() < ms(8_000),
        "{:?}: not one after the other",
        began.elapsed()
    );
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    assert_eq!((counter(&server), taken(&server)), (WAITERS as i64, 0));
}

/// What is too few for one waiter may be enough for another, which no message tells.
#[tokio::test]
async fn a_waiter_for_more_holds_up_no_waiter_for_fewer() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(600_000)))
        .await;
    let permits = permits(&client, 4);
    // another program's permits
    server.call(&["SET", "l", "0"]);
    for id in ["a", "b", "c", "d"] {
        server.call(&["ZADD", "{l}:timeout", "9e12", id]);
    }
    let mut waiters = Vec::new();
    for (waiting, n) in [(1, 4), (2, 3), (3, 2)] {
        let permits = permits.clone();
        waiters.push(tokio::spawn(async move { permits.acquire_many(n).await }));
        has_waiters(&client, waiting).await;
    }
    eventually("they listen", || async { !server.channels().is_empty() }).await;
    server.call(&["ZREM", "{l}:timeout", "a", "b"]);
    server.call(&["INCRBY", "l", "2"]);
    server.call(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    let next = async |waiters: &mut Vec<JoinHandle<Result<LockGuard, Error>>>| {
        let waiter = waiters.pop().unwrap();
        eventually("it gets in", || async { waiter.is_finished() }).await;
        waiter.await.unwrap().unwrap()
    };
    let fewest = next(&mut waiters).await;
    // the release of two makes three together with one that came back unheard
    server.call(&["ZREM", "{l}:timeout", "c"]);
    server.call(&["INCRBY", "l", "1"]);
    fewest.unlock().await.unwrap();
    let more = next(&mut waiters).await;
    server.call(&["ZREM", "{l}:timeout", "d"]);
    server.call(&["INCRBY", "l", "1"]);
    more.unlock().await.unwrap();
    let most = next(&mut waiters).await;
    most.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (4, 0));
}

/// Waiters for several are served without a stampede, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_for_several_cause_no_stampede() {
    const WAITERS: u64 = 300;
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 6);
    let held = permits.acquire_many(6).await.unwrap();
    let mut tasks = JoinSet::new();
    let before = server.script_count();
    for task in 0..WAITERS {
        let (permits, n) = (permits.clone(), 2 + u32::try_from(task % 2).unwrap());
        tasks.spawn(async move {
            let guard = permits.acquire_many(n).await.unwrap();
            guard.unlock().await.unwrap();
        });
    }
    has_waiters(&client, WAITERS as usize).await;
    held.unlock().await.unwrap();
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let scripts = server.script_count() - before;
    println!("{scripts} scripts for {WAITERS} holds");
    assert!(scripts <= 6 * WAITERS, "{scripts} scripts");
    assert_eq!((counter(&server), taken(&server)), (6, 0));
}

/// An integer beside the number of a request has four bits.
#[tokio::test]
async fn the_number_of_permits_may_be_large() {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 5);
    for total in [6, 7, 8, 100, 2_147_483_647] {
        permits.set_permits(total).await.unwrap();
        assert_eq!(permits.available_permits().await.unwrap(), total);
    }
    permits.set_permits(5).await.unwrap();
    server.call(&["DEL", "l"]);
    permits.set_permits(1_000).await.unwrap();
    assert_eq!(counter(&server), 1_000);
}

/// A number that was only read is in no doubt; one that may have been changed is.
#[tokio::test]
async fn a_lost_count_is_in_doubt_if_it_was_to_change() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::builder()
        .command_timeout(ms(300))
        .connect(proxy.url())
        .await
        .unwrap();
    let permits = permits(&client, 2);
    permits.set_permits(3).await.unwrap();
    proxy.once(Verb::Count, Action::Lose);
    let error = permits.available_permits().await.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    proxy.once(Verb::Count, Action::Lose);
    let error = permits.set_permits(4).await.unwrap_err();
    assert!(matches!(error, Error::Unconfirmed { .. }), "{error}");
    assert_eq!(counter(&server), 4);
}

/// An owner that had other numbers of permits before is not taken to have lost any, and is told if
/// it did.
#[tokio::test]
async fn an_owner_may_change_its_number_of_permits() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(ms(900)))
        .await;
    let permits = permits(&client, 3);
    let named = || AcquireOptions::new().owner(client.owner("job").unwrap());
    let [one, three] = [1, 3].map(|n| permits.many(n).unwrap());
    for (before, after) in [(&three, &one), (&one, &three)] {
        drop(before.lock_with(named()).await.unwrap());
        let guard = after.lock_with(named()).await.unwrap();
        guard.unlock().await.unwrap();
        drop(before.lock_with(named()).await.unwrap());
        let guard = after.lock_with(named()).await.unwrap();
        guard.extend(ms(300)).await.unwrap();
        // renewed beyond its lease
        tokio::time::sleep(ms(1_500)).await;
        assert!(!guard.is_lost());
        drop(guard);
        client.idle().await;
        assert_eq!((counter(&server), taken(&server)), (3, 0));
    }
    drop(one.lock_with(named()).await.unwrap());
    let guard = three.lock_with(named()).await.unwrap();
    let last = format!("{} 3", guard.owner());
    assert_eq!(server.call(&["ZREM", "{l}:timeout", &last]).int(), 1);
    assert!(matches!(guard.lost().await, Error::Lost { .. }));
}

/// A guard of several permits is lost with any of them.
#[tokio::test]
async fn the_loss_of_one_of_several_is_told() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(ms(900)))
        .await;
    let permits = permits(&client, 3);
    for gone in 1..=3 {
        let guard = permits.acquire_many(3).await.unwrap();
        let name = match gone {
            1 => guard.owner().to_string(),
            _ => format!("{} {gone}", guard.owner()),
        };
        // as another program gives it back
        assert_eq!(server.call(&["ZREM", "{l}:timeout", &name]).int(), 1);
        server.call(&["INCRBY", "l", "1"]);
        let other = client.permits("l", 3).unwrap().acquire().await.unwrap();
        assert!(matches!(guard.lost().await, Error::Lost { .. }));
        assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
        other.unlock().await.unwrap();
        // what is left of a lost hold comes back with its lease
        eventually("all are back", || async {
            permits.available_permits().await.unwrap() == 3
        })
        .await;
    }
}

/// A thousand waiters of ten permits are served without a stampede.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiters_are_served_without_a_stampede() {
    const WAITERS: u64 = 1_000;
    let server = Server::start();
    let client = server.client().await;
    client
        .semaphore("s")
        .unwrap()
        .try_set_permits(10)
        .await
        .unwrap();
    let permits = client.permits("p", 10).unwrap().many(1).unwrap();
    let semaphore = client.semaphore("s").unwrap().many(1).unwrap();
    for (name, lock) in [("p", permits), ("s", semaphore)] {
        let mut held = Vec::new();
        for _ in 0..10 {
            held.push(lock.lock().await.unwrap());
        }
        let mut tasks = JoinSet::new();
        let before = server.script_count();
        for _ in 0..WAITERS {
            let lock = lock.clone();
            tasks.spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
        }
        has_waiters(&client, WAITERS as usize).await;
        for guard in held {
            guard.unlock().await.unwrap();
        }
        while let Some(done) = tasks.join_next().await {
            done.unwrap();
        }
        let scripts = server.script_count() - before;
        println!("{name}: {scripts} scripts for {WAITERS} holds");
        assert!(scripts <= 3 * WAITERS + 30, "{name}: {scripts} scripts");
        let counter = server.call(&["GET", name]);
        assert_eq!(counter.text(), "10", "{name}");
    }
}

/// Whatever becomes of a request, the number is exact afterwards.
#[tokio::test]
async fn a_lost_reply_loses_no_permit() {
    all_come_back(false).await;
}

/// Takes and gives back permits, with a fault of each request. Nothing is missing afterwards, and no
/// waiter is left in a queue.
pub async fn all_come_back(fair: bool) {
    for verb in [Verb::Acquire, Verb::Release] {
        for action in [
            Action::Lose,
            Action::CutBefore,
            Action::Late(ms(700)),
            Action::Ghost(ms(300)),
        ] {
            let server = Server::start();
            let proxy = Proxy::start(&server);
            let client = LockClient::builder()
                .command_timeout(ms(500))
                .watchdog_timeout(ms(5_000))
                .fair_patience(ms(1_500))
                .connect(proxy.url())
                .await
                .unwrap();
            let permits = permits(&client, 2).fair(fair);
            permits.acquire().await.unwrap().unlock().await.unwrap();
            proxy.once(verb, action);
            for _ in 0..3 {
                if let Ok(guard) = permits.acquire_many(2).await {
                    let _ = guard.unlock().await;
                }
            }
            let all_back = async || {
                client.idle().await;
                eventually("all are back", || async {
                    (counter(&server), taken(&server), queue(&server)) == (2, 0, 0)
                })
                .await;
            };
            all_back().await;
            // a late request may take and give back once more
            eventually("the late request is executed", || async {
                !matches!(action, Action::Ghost(_)) || proxy.ghosts() == 1
            })
            .await;
            all_back().await;
        }
    }
}

/// An acquire that is dropped at any of its polls leaves the number as it was.
#[tokio::test]
async fn a_dropped_acquire_leaves_the_number_exact() {
    is_as_before_after_drops(false).await;
}

/// Drops acquires of one permit and of two at each of their polls: number and queue are as before.
pub async fn is_as_before_after_drops(fair: bool) {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 2).fair(fair);
    let held = permits.acquire().await.unwrap();
    for n in [1, 2] {
        for polls in 0..12 {
            let mut acquire = pin!(permits.acquire_many(n));
            for _ in 0..polls {
                if poll_once(acquire.as_mut()).await.is_ready() {
                    break;
                }
                tokio::time::sleep(ms(1)).await;
            }
        }
    }
    client.idle().await;
    assert_eq!(
        (counter(&server), taken(&server), queue(&server)),
        (1, 1, 0)
    );
    held.unlock().await.unwrap();
}

/// A hold that is handed over keeps all its permits.
#[tokio::test]
async fn several_permits_are_handed_over_together() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (ours, theirs) = (permits(&a, 3), permits(&b, 3));
    let text = ours
        .acquire_many(2)
        .await
        .unwrap()
        .hand_over(ms(30_000))
        .await;
    let text = text.unwrap();
    assert_eq!(theirs.available_permits().await.unwrap(), 1);
    let guard = theirs.many(2).unwrap().adopt(&text).await.unwrap();
    assert_eq!(ours.holders().await.unwrap(), [(guard.owner(), 2)]);
    guard.extend(ms(60_000)).await.unwrap();
    guard.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));
    // without a guard, all of an owner's permits are given back
    let owner = ours.acquire_many(2).await.unwrap().leave_to_lease();
    theirs.many(1).unwrap().release(&owner).await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));
}

/// If the counter is deleted, the taken permits still count.
#[tokio::test]
async fn a_lost_counter_lets_no_more_in() {
    let server = Server::start();
    let client = server.client().await;
    let permits = permits(&client, 3);
    let held = permits.acquire_many(2).await.unwrap();
    server.call(&["DEL", "l"]);
    assert_eq!(permits.available_permits().await.unwrap(), 1);
    let third = permits.acquire().await.unwrap();
    assert!(permits.try_acquire().await.unwrap().is_none());
    server.call(&["DEL", "l"]);
    held.unlock().await.unwrap();
    third.unlock().await.unwrap();
    assert_eq!(permits.available_permits().await.unwrap(), 3);
    permits.acquire().await.unwrap().unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));
}

#[tokio::test]
async fn bad_numbers_and_foreign_keys_are_refused() {
    let server = Server::start();
    let client = server.client().await;
    let refused = |outcome: Result<(), Error>| {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::InvalidCount { .. }), "{error}");
        assert_eq!(error.lock_name(), Some("l"));
        error.to_string()
    };
    for total in [0, 2_147_483_648, u32::MAX] {
        refused(client.permits("l", total).map(drop));
    }
    let permits = permits(&client, 3);
    let error = client.permits("l", 1_000).unwrap().many(101).unwrap_err();
    assert!(matches!(error, Error::InvalidCount { .. }), "{error}");
    let spaced = format!("{} 2", client.owner("job").unwrap()).parse::<OwnerId>();
    assert!(
        matches!(spaced, Err(Error::InvalidOwner { .. })),
        "{spaced:?}"
    );
    for n in [0, 4, u32::MAX] {
        let text = refused(permits.acquire_many(n).await.map(drop));
        assert!(text.contains("take"), "{text}");
        refused(permits.many(n).map(drop));
    }
    for total in [0, u32::MAX] {
        refused(permits.set_permits(total).await);
    }
    for name in ["{l}", "lock:l", "{l}:timeout", "l{7}:timeout"] {
        let error = client.permits(name, 3).unwrap_err();
        assert!(
            matches!(error, Error::InvalidName { .. }),
            "{name}: {error}"
        );
    }
    assert_eq!(server.dump(), [], "nothing was sent");

    server.call(&["SET", "l", "no number"]);
    let before = server.dump();
    let wrong = |error: Error| assert!(matches!(error, Error::WrongLockKind { .. }), "{error}");
    wrong(permits.acquire().await.unwrap_err());
    wrong(permits.available_permits().await.unwrap_err());
    wrong(permits.set_permits(2).await.unwrap_err());
    wrong(permits.many(1).unwrap().force_unlock().await.unwrap_err());
    assert_eq!(server.dump(), before);
    for key in ["l", "{l}:timeout"] {
        server.call(&["FLUSHALL"]);
        server.call(&["RPUSH", key, "x"]);
        let before = server.dump();
        let error = permits.acquire().await.unwrap_err();
        assert!(matches!(error, Error::WrongType { .. }), "{error}");
        assert_eq!(server.dump(), before);
    }
    let free: Reply = server.call(&["FLUSHALL"]);
    assert!(!free.is_error());
    assert!(!permits.many(1).unwrap().force_unlock().await.unwrap());
}

/// A forced release gives back all permits, whatever their owners, and the holders are told.
#[tokio::test]
async fn a_forced_release_gives_back_all() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let guard = permits(&a, 3).acquire_many(2).await.unwrap();
    let (id, hex) = ("0123456789abcdef", "30313233343536373839616263646566");
    let never = "922337203685477";
    server.call(&["ZADD", "{l}:timeout", never, id]);
    server.call(&["DECRBY", "l", "1"]);
    let permits = permits(&b, 3);
    let mut holders = permits.holders().await.unwrap();
    holders.sort_unstable_by_key(|(_, n)| *n);
    assert_eq!(holders[0].0.as_str(), hex);
    assert_eq!(holders[1], (guard.owner(), 2));
    assert!(permits.many(1).unwrap().force_unlock().await.unwrap());
    assert_eq!((counter(&server), taken(&server)), (3, 0));
    let outcome = guard.unlock().await;
    assert!(matches!(outcome, Err(Error::Lost { .. })), "{outcome:?}");
    assert_eq!((counter(&server), taken(&server)), (3, 0));
}
