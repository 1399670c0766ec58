//! Fair locks that a release grants to the next waiter: what a grant saves, which waiter gets it,
//! and what becomes of an unclaimed one.

use std::{future::Future, pin::Pin, time::Duration};

use nestlock::{AcquireOptions, Lock, LockClient, LockGuard, Result, Tuning};

use crate::{
    contract::nothing_is_left,
    support::{
        Server,
        child::Worker,
        eventually,
        proxy::{Action, Proxy, Verb},
        within,
    },
};

const LOCK: &str = "fair:l";
const QUEUE: &str = "redisson_lock_queue:{fair:l}";
const CHANNEL: &str = "redisson_lock__channel:{fair:l}";
/// So far beyond each test's patience that no waiter polls by itself.
const NEVER: Duration = Duration::from_secs(600);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Connects a client whose waiters are woken by messages alone.
async fn deaf_to_time(server: &Server) -> LockClient {
    let client = server
        .client_with(|c| {
            c.poll_cap(NEVER)
                .watchdog_timeout(9 * NEVER)
                .fair_patience(6 * NEVER)
        })
        .await;
    client
        .fair_lock("warm")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    client
}

fn fair(client: &LockClient) -> Lock {
    client.fair_lock(LOCK).unwrap()
}

fn queue(server: &Server) -> Vec<String> {
    server
        .call(&["LRANGE", QUEUE, "0", "-1"])
        .list()
        .iter()
        .map(|owner| owner.text().to_owned())
        .collect()
}

type Waiting<'a> = Pin<Box<dyn Future<Output = Result<LockGuard>> + Send + 'a>>;

/// Adds a waiter to the queue that is subscribed and has polled. The future is not polled again for
/// now.
async fn waits<'a>(
    server: &Server,
    future: impl Future<Output = Result<LockGuard>> + Send + 'a,
) -> Waiting<'a> {
    let (mut future, before) = (Box::pin(future), queue(server).len());
    let scripts = server.script_count();
    let listens = async {
        eventually("it has its place, and has polled again", || async {
            queue(server).len() > before && server.script_count() >= scripts + 2
        })
        .await;
        // The waiter needs the reply to that poll: without it, it would send a request instead of
        // taking a grant.
        tokio::time::sleep(ms(50)).await;
    };
    tokio::select! {
        guard = &mut future => panic!("it does not wait: {guard:?}"),
        () = listens => future,
    }
}

async fn soon(waiting: Waiting<'_>) -> LockGuard {
    tokio::time::timeout(Duration::from_secs(10), waiting)
        .await
        .expect("the lock, soon")
        .unwrap()
}

/// A hand-over is one script: the release grants the lock, and the next waiter sends no request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_release_of_one_is_the_acquire_of_the_next() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let (here, there) = (fair(&a), fair(&b));
    for _ in 0..3 {
        let guard = here.lock().await.unwrap();
        let waiting = waits(&server, there.lock()).await;
        let before = server.script_count();
        guard.unlock().await.unwrap();
        let guard = soon(waiting).await;
        assert_eq!(
            server.script_count() - before,
            1,
            "no waiter sent a request"
        );
        assert_eq!(server.record(LOCK), [(guard.owner().to_string(), 1)]);
        let nested = there.lock().await.unwrap();
        assert_eq!(server.record(LOCK), [(guard.owner().to_string(), 2)]);
        nested.unlock().await.unwrap();
        guard.unlock().await.unwrap();
        nothing_is_left(&server, &[&a, &b]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_wants_more_than_a_grant_gives_sends_a_request() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let (here, there) = (fair(&a), fair(&b));
    let short =
        |builder: nestlock::LockClientBuilder| builder.poll_cap(NEVER).fair_patience(6 * NEVER);
    // The lease of this client is shorter than that of a grant.
    let leases_less = server.client_with(short).await;
    let asks = server
        .client_with(|c| {
            short(c).watchdog_timeout(9 * NEVER).tuning(Tuning {
                grants: false,
                ..Tuning::default()
            })
        })
        .await;
    let options = |lease| AcquireOptions::new().lease(lease);
    let doors = [fair(&leases_less), fair(&asks)];
    let lease = Duration::from_secs(40);
    let waiters: [Waiting<'_>; 3] = [
        Box::pin(there.lock_with(options(lease))),
        Box::pin(doors[0].lock()),
        Box::pin(doors[1].lock()),
    ];
    for (which, waiter) in waiters.into_iter().enumerate() {
        let guard = here.lock().await.unwrap();
        let waiting = waits(&server, waiter).await;
        let before = server.script_count();
        guard.unlock().await.unwrap();
        let guard = soon(waiting).await;
        assert_eq!(server.script_count() - before, 2, "waiter {which}");
        let remaining = guard.remaining();
        assert!(
            which > 0 || (ms(35_000)..lease).contains(&remaining),
            "{remaining:?}"
        );
        guard.unlock().await.unwrap();
    }
    // A client with grants disabled does not grant the lock either.
    let guard = doors[1].lock().await.unwrap();
    let waiting = waits(&server, there.lock()).await;
    let before = server.script_count();
    guard.unlock().await.unwrap();
    soon(waiting).await.unlock().await.unwrap();
    assert_eq!(server.script_count() - before, 3);
    nothing_is_left(&server, &[&a, &b, &leases_less, &asks]).await;
}

/// The record lives for one patience at first, and then for the requested lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_granted_is_renewed_before_a_patience_is_over() {
    let server = Server::start();
    let settings = |builder: nestlock::LockClientBuilder| {
        builder
            .fair_patience(ms(3_000))
            .watchdog_timeout(ms(30_000))
            .command_timeout(ms(500))
    };
    let (a, b) = (
        server.client_with(settings).await,
        server.client_with(settings).await,
    );
    let (here, there) = (fair(&a), fair(&b));
    let guard = here.lock().await.unwrap();
    let waiting = waits(&server, there.lock()).await;
    guard.unlock().await.unwrap();
    let guard = soon(waiting).await;
    let (ttl, remaining) = (server.pttl(LOCK), guard.remaining());
    assert!(ttl <= 3_000, "{ttl}");
    assert!(remaining <= ms(3_000), "{remaining:?}");
    eventually("it is renewed", || async {
        server.pttl(LOCK) > 20_000 && guard.remaining() > ms(20_000)
    })
    .await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The late message belongs to a wait that is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_about_another_wait_is_not_believed() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let (here, there) = (fair(&a), fair(&b));
    let guard = here.lock().await.unwrap();
    let mut waiting = waits(&server, there.lock()).await;
    let seen: f64 = server
        .call(&["ZSCORE", "nestlock_fair_seen:{fair:l}", &queue(&server)[0]])
        .text()
        .parse()
        .unwrap();
    for late in [seen - 1.0, seen.floor() + 1023.0 / 1024.0, seen + 1.0] {
        let asked = server.script_count();
        server.call(&[
            "PUBLISH",
            &format!("{CHANNEL}:{}", queue(&server)[0]),
            &format!("{late} 3600000"),
        ]);
        tokio::select! {
            got = &mut waiting => panic!("another owner holds it: {got:?}"),
            () = eventually("it sends a request", || async { server.script_count() > asked }) => {}
        }
    }
    assert_eq!(server.record(LOCK), [(guard.owner().to_string(), 1)]);
    guard.unlock().await.unwrap();
    soon(waiting).await.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// A waiter that is dropped with a lock that it was granted leaves it to the next waiter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_waiter_leaves_its_granted_lock_to_the_next() {
    let server = Server::start();
    let (a, b, c) = (
        deaf_to_time(&server).await,
        deaf_to_time(&server).await,
        deaf_to_time(&server).await,
    );
    let (here, there, elsewhere) = (fair(&a), fair(&b), fair(&c));
    let guard = here.lock().await.unwrap();
    let first = waits(&server, there.lock()).await;
    let second = waits(&server, elsewhere.lock()).await;
    let owner = queue(&server)[0].clone();
    guard.unlock().await.unwrap();
    assert_eq!(server.record(LOCK), [(owner, 1)]);
    drop(first);
    soon(second).await.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b, &c]).await;
}

/// The waiter is not polled, so the lock is free when its patience is over. Polled again, it waits
/// like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_waiter_keeps_its_granted_lock_for_one_patience() {
    let server = Server::start();
    let patience = ms(1_500);
    let settings = |builder: nestlock::LockClientBuilder| builder.fair_patience(patience);
    let (a, b) = (
        server.client_with(settings).await,
        server.client_with(settings).await,
    );
    let (here, there) = (fair(&a), fair(&b));
    let guard = here.lock().await.unwrap();
    let mut first = waits(&server, there.lock()).await;
    let owner = queue(&server)[0].clone();
    guard.unlock().await.unwrap();
    assert_eq!(server.record(LOCK), [(owner, 1)]);
    let guard = here
        .try_lock_for(Duration::from_secs(10))
        .await
        .unwrap()
        .expect("free after a patience");
    let polled = tokio::time::timeout(ms(300), &mut first).await;
    assert!(polled.is_err(), "two guards: {polled:?}");
    guard.unlock().await.unwrap();
    soon(first).await.unlock().await.unwrap();
    nothing_is_left(&server, &[&a, &b]).await;
}

/// The server has forgotten the grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_granted_before_a_restart_is_requested() {
    let server = Server::start();
    let (a, b, c) = (
        deaf_to_time(&server).await,
        deaf_to_time(&server).await,
        deaf_to_time(&server).await,
    );
    let (here, there, elsewhere) = (fair(&a), fair(&b), fair(&c));
    let guard = here.lock().await.unwrap();
    let mut first = waits(&server, there.lock()).await;
    guard.unlock().await.unwrap();
    // The message reaches the waiter, which is not polled.
    tokio::time::sleep(ms(200)).await;
    server.kill();
    server.restart();
    let guard = elsewhere.lock().await.unwrap();
    b.reentrant_lock("other")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let polled = tokio::time::timeout(ms(500), &mut first).await;
    assert!(polled.is_err(), "two guards: {polled:?}");
    guard.unlock().await.unwrap();
    soon(first).await.unlock().await.unwrap();
}

/// The waiter is dead when it is granted the lock. One patience later, the lock is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_granted_to_a_dead_process_is_free_after_a_patience() {
    let server = Server::start();
    let patience = ms(1_500);
    // The waiter's own patience counts, not that of the releasing client.
    let a = server
        .client_with(|c| c.fair_patience(Duration::from_secs(20)))
        .await;
    let here = fair(&a);
    let guard = here.lock().await.unwrap();
    let mut worker =
        Worker::start_with_patience(&server, Duration::from_secs(30), ms(1_000), patience);
    worker.ask(&format!("lock {LOCK}"));
    eventually("it waits", || async { queue(&server).len() == 1 }).await;
    let owner = queue(&server)[0].clone();
    worker.kill();
    guard.unlock().await.unwrap();
    assert_eq!(server.record(LOCK), [(owner, 1)], "granted to the dead");
    within(Duration::from_secs(8), "free after a patience", || async {
        !server.exists(LOCK)
    })
    .await;
    let guard = here
        .try_lock_for(Duration::from_secs(8))
        .await
        .unwrap()
        .expect("no other owner waits");
    guard.unlock().await.unwrap();
}

/// A waiter keeps its turn for as long as it would have kept its place, whatever the patience of
/// the releasing client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_releaser_of_little_patience_costs_no_waiter_its_turn() {
    let server = Server::start();
    let hurried = server.client_with(|c| c.fair_patience(ms(200))).await;
    let (b, c) = (server.client().await, server.client().await);
    let (here, there, elsewhere) = (fair(&hurried), fair(&b), fair(&c));
    let guard = here.lock().await.unwrap();
    let first = waits(&server, there.lock()).await;
    let mut second = waits(&server, elsewhere.lock()).await;
    guard.unlock().await.unwrap();
    // The first waiter is not polled during this time.
    let polled = tokio::time::timeout(ms(1_500), &mut second).await;
    assert!(polled.is_err(), "the second was first: {polled:?}");
    soon(first).await.unlock().await.unwrap();
    soon(second).await.unlock().await.unwrap();
    nothing_is_left(&server, &[&hurried, &b, &c]).await;
}

/// With a round trip of 100 ms, the least patience, and a release just after a poll, a renewal
/// would come too late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_could_not_be_renewed_in_time_is_requested() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    proxy.rule(|_| Action::Late(ms(100)));
    let near = server.client_with(|c| c.fair_patience(ms(200))).await;
    let far = LockClient::builder()
        .fair_patience(ms(200))
        .connect(proxy.url())
        .await
        .unwrap();
    let (here, there) = (fair(&near), fair(&far));
    there.lock().await.unwrap().unlock().await.unwrap();
    for _ in 0..5 {
        let guard = here.lock().await.unwrap();
        let waiter = tokio::spawn({
            let there = there.clone();
            async move { there.lock().await }
        });
        let seen = || {
            server.call(&[
                "ZRANGE",
                "nestlock_fair_seen:{fair:l}",
                "0",
                "-1",
                "WITHSCORES",
            ])
        };
        eventually("it waits", || async { queue(&server).len() == 1 }).await;
        let before = seen();
        eventually("it polls", || async { seen() != before }).await;
        guard.unlock().await.unwrap();
        let guard = waiter.await.unwrap().unwrap();
        let lost = tokio::time::timeout(ms(700), guard.lost()).await;
        assert!(lost.is_err(), "{lost:?}");
        guard.unlock().await.unwrap();
    }
    nothing_is_left(&server, &[&near, &far]).await;
}

/// Like any hold, a granted one survives one refused renewal or a connection that falls silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_renewal_that_fails_ends_no_hold_that_was_granted() {
    // Fair patience, watchdog timeout and command timeout.
    let believed = (ms(1_000), Duration::from_secs(30), ms(200));
    // A command may take as long as the whole grant.
    let asked = (ms(3_000), Duration::from_secs(30), ms(3_000));
    let refuse = Action::Refuse("LOADING Redis is loading the dataset in memory");
    for ((patience, watchdog, command), action) in [(believed, refuse), (asked, Action::Mute)] {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let settings = |c: nestlock::LockClientBuilder| {
            c.fair_patience(patience)
                .watchdog_timeout(watchdog)
                .command_timeout(command)
        };
        let a = server.client_with(settings).await;
        let b = settings(LockClient::builder())
            .connect(proxy.url())
            .await
            .unwrap();
        let (here, there) = (fair(&a), fair(&b));
        let guard = here.lock().await.unwrap();
        let waiting = waits(&server, there.lock()).await;
        proxy.once(Verb::Renew, action);
        guard.unlock().await.unwrap();
        let guard = soon(waiting).await;
        let lost = tokio::time::timeout(patience * 2, guard.lost()).await;
        assert!(lost.is_err(), "{patience:?}, {action:?}: {lost:?}");
        guard.unlock().await.unwrap();
    }
}
