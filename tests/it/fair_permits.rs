//! Fair permits: first come, first served, over all processes.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use nestlock::{AcquireOptions, Error, LockClient, LockGuard, Permits};
use tokio::task::{JoinHandle, JoinSet};

use crate::{
    contract::contract_suite,
    permits::{QUEUE, all_come_back, counter, is_as_before_after_drops, queue, taken},
    support::{Server, eventually, poll_once, proxy::Proxy, wire::Reply},
};

contract_suite! {
    mod contract,
    door = |client, name| client.permits(name, 1).unwrap().fair(true).many(1).unwrap(),
    reentrant = false,
    counted = true,
}

const SEEN: &str = "nestlock_permits_seen:{l}";

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn fair(client: &LockClient, total: u32) -> Permits {
    client.permits("l", total).unwrap().fair(true)
}

fn unfair(client: &LockClient, total: u32) -> Permits {
    client.permits("l", total).unwrap()
}

/// A client whose waiters are woken by messages, or after minutes.
async fn patient(server: &Server) -> LockClient {
    let builder = |builder: nestlock::LockClientBuilder| {
        builder.fair_patience(ms(600_000)).poll_cap(ms(600_000))
    };
    server.client_with(builder).await
}

async fn queue_is(server: &Server, waiters: i64) {
    let is_there = || async { queue(server) == waiters };
    eventually("the queue has them", is_there).await;
}

/// Starts a task that waits for `n` permits, and returns once the server has it in the queue.
async fn waits(server: &Server, permits: &Permits, n: u32) -> JoinHandle<LockGuard> {
    let before = queue(server);
    let permits = permits.clone();
    let task = tokio::spawn(async move { permits.acquire_many(n).await.unwrap() });
    queue_is(server, before + 1).await;
    task
}

/// Waits until no more scripts run: those that wait sleep.
async fn are_asleep(server: &Server) {
    let settled = || async {
        let scripts = server.script_count();
        tokio::time::sleep(ms(50)).await;
        server.script_count() == scripts
    };
    eventually("they sleep", settled).await;
}

/// Takes the only permit as Redisson does, without a lease.
fn taken_by_redisson(server: &Server) {
    server.call(&["SET", "l", "0"]);
    server.call(&["ZADD", "{l}:timeout", "922337203685477", "0123456789abcdef"]);
}

fn given_back_by_redisson(server: &Server) {
    server.call(&["ZREM", "{l}:timeout", "0123456789abcdef"]);
    server.call(&["INCRBY", "l", "1"]);
}

/// Waits until more requests were made than there are waiters.
async fn are_asked(server: &Server) {
    let (before, waiters) = (server.script_count(), queue(server).unsigned_abs());
    let all = || async { server.script_count() > before + waiters };
    eventually("all have asked", all).await;
}

async fn has(task: JoinHandle<LockGuard>) -> LockGuard {
    let got = tokio::time::timeout(ms(20_000), task).await;
    got.expect("it gets them").unwrap()
}

/// The waiters of three clients get permits in the order in which they came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_get_permits_in_the_order_they_came() {
    let server = Server::start();
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(patient(&server).await);
    }
    let held = fair(&clients[0], 1).acquire().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for number in 0..30 {
        let permits = fair(&clients[number % 3], 1);
        let order = Arc::clone(&order);
        tasks.spawn(async move {
            let guard = permits.acquire().await.unwrap();
            order.lock().unwrap().push(number);
            guard.unlock().await.unwrap();
        });
        queue_is(&server, number as i64 + 1).await;
    }
    are_asleep(&server).await;
    let before = server.script_count();
    held.unlock().await.unwrap();
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..30).collect::<Vec<_>>());
    let scripts = server.script_count() - before;
    assert!(scripts <= 61 + 3, "{scripts} scripts for 30 holds");
    assert_eq!((counter(&server), taken(&server)), (1, 0));
    assert!(!server.exists(QUEUE) && !server.exists(SEEN));
}

/// A waiter for three is not passed by those that want one, waiting or not.
#[tokio::test]
async fn a_waiter_for_many_is_not_passed() {
    let server = Server::start();
    let (a, b) = (patient(&server).await, patient(&server).await);
    let (one, two) = (
        fair(&a, 3).acquire().await.unwrap(),
        fair(&a, 3).acquire().await.unwrap(),
    );
    let heavy = waits(&server, &fair(&a, 3), 3).await;
    assert!(fair(&b, 3).try_acquire().await.unwrap().is_none());
    let light = waits(&server, &fair(&b, 3), 1).await;
    one.unlock().await.unwrap();
    are_asleep(&server).await;
    assert!(!heavy.is_finished() && !light.is_finished());
    assert!(fair(&a, 3).try_acquire().await.unwrap().is_none());
    two.unlock().await.unwrap();
    let heavy = has(heavy).await;
    assert!(!light.is_finished());
    heavy.unlock().await.unwrap();
    has(light).await.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (3, 0));
}

/// Enough for all that wait, and for one that comes now: it need not wait for them.
#[tokio::test]
async fn what_is_left_over_goes_to_any() {
    let server = Server::start();
    let client = patient(&server).await;
    let all = fair(&client, 5).acquire_many(5).await.unwrap();
    // a waiter that is told, and does not come
    let permits = fair(&client, 5);
    let mut slow = pin!(permits.acquire_many(2));
    while queue(&server) == 0 {
        assert!(poll_once(slow.as_mut()).await.is_pending());
        tokio::time::sleep(ms(5)).await;
    }
    all.unlock().await.unwrap();
    let other = fair(&client, 5).try_acquire().await.unwrap();
    assert!(other.is_some(), "2 of 5 are for the slow one");
    assert!(permits.many(3).unwrap().try_lock().await.unwrap().is_none());
    slow.await.unwrap().unlock().await.unwrap();
}

/// An acquire and a release are one request each.
#[tokio::test]
async fn a_fair_permit_costs_two_requests() {
    let server = Server::start();
    let client = server.client().await;
    let permits = fair(&client, 2);
    permits.acquire().await.unwrap().unlock().await.unwrap();
    let before = server.script_count();
    for _ in 0..10 {
        permits.acquire().await.unwrap().unlock().await.unwrap();
    }
    assert_eq!(server.script_count() - before, 20);
}

/// Where a waiter for many is cancelled, those behind it go on at once.
#[tokio::test]
async fn a_cancelled_waiter_leaves_the_queue() {
    let server = Server::start();
    let client = patient(&server).await;
    let one = fair(&client, 2).acquire().await.unwrap();
    let heavy = waits(&server, &fair(&client, 2), 2).await;
    let light = waits(&server, &fair(&client, 2), 1).await;
    are_asleep(&server).await;
    assert!(!light.is_finished());
    heavy.abort();
    has(light).await.unlock().await.unwrap();
    client.idle().await;
    assert_eq!(queue(&server), 0);
    one.unlock().await.unwrap();
}

/// A release by a program that knows of no queue wakes the first waiter.
#[tokio::test]
async fn other_programs_wake_the_first_waiter() {
    let server = Server::start();
    let (a, b) = (patient(&server).await, patient(&server).await);
    let held = unfair(&a, 1).acquire().await.unwrap();
    // the first waiter is one of the other client, and the last to sleep
    let first = waits(&server, &fair(&a, 1), 1).await;
    let mut rest = Vec::new();
    for number in 0..6 {
        let client = if number % 2 == 0 { &b } else { &a };
        rest.push(waits(&server, &fair(client, 1), 1).await);
    }
    are_asleep(&server).await;
    held.unlock().await.unwrap();
    let mut held = has(first).await;
    for waiter in rest {
        held.unlock().await.unwrap();
        held = has(waiter).await;
    }
    held.unlock().await.unwrap();
    // and Redisson's
    taken_by_redisson(&server);
    let last = waits(&server, &fair(&b, 1), 1).await;
    are_asleep(&server).await;
    given_back_by_redisson(&server);
    server.call(&["PUBLISH", "redisson_sc:{l}", "1"]);
    has(last).await.unlock().await.unwrap();
}

/// More permits are offered to as many waiters as they are for.
#[tokio::test]
async fn more_permits_are_offered_in_order() {
    let server = Server::start();
    let client = patient(&server).await;
    let held = fair(&client, 1).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for _ in 0..5 {
        waiters.push(waits(&server, &fair(&client, 1), 1).await);
    }
    are_asleep(&server).await;
    fair(&client, 1).set_permits(4).await.unwrap();
    let mut got = Vec::new();
    for waiter in waiters.drain(..3) {
        got.push(has(waiter).await);
    }
    assert_eq!((counter(&server), queue(&server)), (0, 2));
    unfair(&client, 1)
        .many(1)
        .unwrap()
        .force_unlock()
        .await
        .unwrap();
    for waiter in waiters {
        got.push(has(waiter).await);
    }
    drop((got, held));
    client.idle().await;
}

/// A waiter that wants more than there are from now on holds up no others.
#[tokio::test]
async fn fewer_permits_let_others_pass() {
    let server = Server::start();
    let (a, b) = (patient(&server).await, patient(&server).await);
    unfair(&a, 6).set_permits(6).await.unwrap();
    let held = fair(&a, 6).acquire_many(2).await.unwrap();
    let many = waits(&server, &fair(&a, 6), 5).await;
    let one = waits(&server, &fair(&b, 6), 1).await;
    are_asleep(&server).await;
    unfair(&a, 6).set_permits(4).await.unwrap();
    has(one).await.unlock().await.unwrap();
    assert!(!many.is_finished());
    held.unlock().await.unwrap();
    many.abort();
}

/// Visitors that come rarely and leave early are held up by a dead waiter for its patience, too.
#[tokio::test]
async fn rare_visitors_pass_a_dead_waiter() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let patience = |builder: nestlock::LockClientBuilder| builder.fair_patience(ms(900));
    let dead = patience(LockClient::builder())
        .connect(proxy.url())
        .await
        .unwrap();
    let client = server.client_with(patience).await;
    let held = fair(&client, 1).acquire().await.unwrap();
    let gone = waits(&server, &fair(&dead, 1), 1).await;
    proxy.refuse();
    proxy.cut();
    gone.abort();
    held.unlock().await.unwrap();
    let one = fair(&client, 1).many(1).unwrap();
    let mut visits = 0;
    let got = loop {
        visits += 1;
        let wait = ms(100 * (visits % 2));
        match one.try_lock_for(wait).await.unwrap() {
            Some(got) => break got,
            None => tokio::time::sleep(ms(600)).await,
        }
    };
    assert!(visits <= 5, "{visits} visits");
    got.unlock().await.unwrap();
}

/// A waiter that died holds up the others for its patience, no longer.
#[tokio::test]
async fn a_dead_waiter_loses_its_place() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let patience = |builder: nestlock::LockClientBuilder| builder.fair_patience(ms(900));
    let dead = patience(LockClient::builder())
        .connect(proxy.url())
        .await
        .unwrap();
    let client = server.client_with(patience).await;
    let held = fair(&client, 2).acquire_many(2).await.unwrap();
    let mut gone = JoinSet::new();
    for _ in 0..300 {
        let permits = fair(&dead, 2);
        gone.spawn(async move { permits.acquire_many(2).await.map(drop) });
    }
    queue_is(&server, 300).await;
    let behind = waits(&server, &fair(&client, 2), 1).await;
    proxy.refuse();
    proxy.cut();
    gone.shutdown().await;
    held.unlock().await.unwrap();
    has(behind).await.unlock().await.unwrap();
    assert_eq!((counter(&server), queue(&server)), (2, 0));
}

/// Also where its place is one of a named owner, who waits twice, for unlike numbers.
#[tokio::test]
async fn an_owner_that_waits_twice_has_one_place() {
    let server = Server::start();
    let client = patient(&server).await;
    let held = fair(&client, 3).acquire_many(3).await.unwrap();
    let as_me = || AcquireOptions::new().owner(client.owner("me").unwrap());
    let mut waiting = JoinSet::new();
    for n in [3, 1] {
        let (lock, options) = (fair(&client, 3).many(n).unwrap(), as_me());
        waiting.spawn(async move { lock.lock_with(options).await.map(drop) });
    }
    eventually("both wait", || async { client.stats().waiters == 2 }).await;
    queue_is(&server, 1).await;
    let behind = waits(&server, &fair(&client, 3), 3).await;
    waiting.shutdown().await;
    client.idle().await;
    held.unlock().await.unwrap();
    has(behind).await.unlock().await.unwrap();
    assert!(!server.exists(QUEUE) && !server.exists(SEEN));
}

/// A client with little patience does not lose patience for others.
#[tokio::test]
async fn each_waiter_has_the_patience_of_its_client() {
    let server = Server::start();
    let (slow, quick) = (
        patient(&server).await,
        server
            .client_with(|builder| builder.fair_patience(ms(300)))
            .await,
    );
    let held = fair(&slow, 1).acquire().await.unwrap();
    let first = waits(&server, &fair(&slow, 1), 1).await;
    let second = waits(&server, &fair(&quick, 1), 1).await;
    // it asks many times
    let scripts = server.script_count();
    let asked = || async { server.script_count() > scripts + 8 };
    eventually("it asks", asked).await;
    assert_eq!(queue(&server), 2);
    held.unlock().await.unwrap();
    let first = has(first).await;
    assert!(!second.is_finished());
    first.unlock().await.unwrap();
    has(second).await.unlock().await.unwrap();
}

/// While the server is stopped, no waiter can ask: none loses its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_costs_no_place() {
    let server = Server::start_real();
    let impatient = |builder: nestlock::LockClientBuilder| builder.fair_patience(ms(1_000));
    let (a, b) = (
        server.client_with(impatient).await,
        server.client_with(impatient).await,
    );
    let held = fair(&a, 1).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for number in 0..10 {
        let client = if number % 2 == 0 { &a } else { &b };
        waiters.push(waits(&server, &fair(client, 1), 1).await);
    }
    let names = || server.call(&["ZRANGE", QUEUE, "0", "-1"]);
    let before = names();
    server.stop();
    tokio::time::sleep(ms(2_500)).await;
    server.cont();
    are_asked(&server).await;
    assert_eq!(names(), before);
    let mut held = held;
    for waiter in waiters {
        held.unlock().await.unwrap();
        held = has(waiter).await;
    }
    held.unlock().await.unwrap();
}

/// After a reconnect, a waiter of each client looks, not all.
#[tokio::test]
async fn a_reconnect_makes_few_fair_waiters_look() {
    let server = Server::start_real();
    let client = patient(&server).await;
    let held = fair(&client, 1).acquire().await.unwrap();
    let mut waiters = Vec::new();
    for _ in 0..50 {
        waiters.push(waits(&server, &fair(&client, 1), 1).await);
    }
    are_asleep(&server).await;
    let channels = server.channels().len();
    let before = server.script_count();
    server.call(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    let all = || async { server.channels().len() == channels && server.script_count() > before };
    eventually("they listen again", all).await;
    are_asleep(&server).await;
    let scripts = server.script_count() - before;
    assert!(scripts <= 3, "{scripts} scripts");
    held.unlock().await.unwrap();
    for waiter in waiters {
        has(waiter).await.unlock().await.unwrap();
    }
}

/// A lost message costs a third of the patience at most.
#[tokio::test]
async fn a_lost_message_costs_a_poll() {
    let server = Server::start();
    let patience = |builder: nestlock::LockClientBuilder| builder.fair_patience(ms(900));
    let client = server.client_with(patience).await;
    taken_by_redisson(&server);
    let waiter = waits(&server, &fair(&client, 1), 1).await;
    given_back_by_redisson(&server);
    has(waiter).await.unlock().await.unwrap();
}

/// Each of a thousand waiters is served by three scripts at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_fair_waiters_cause_no_stampede() {
    const WAITERS: u64 = 1_000;
    let server = Server::start();
    // on a busy machine they would poll
    let client = patient(&server).await;
    let lock = client.permits("p", 10).unwrap().fair(true).many(1).unwrap();
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
    eventually("they wait", || async {
        client.stats().waiters == WAITERS as usize
    })
    .await;
    for guard in held {
        guard.unlock().await.unwrap();
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    let scripts = server.script_count() - before;
    println!("{scripts} scripts for {WAITERS} holds");
    assert!(scripts <= 3 * WAITERS + 60, "{scripts} scripts");
    assert_eq!(server.call(&["GET", "p"]).text(), "10");
}

/// Fair, other and several permits together: never more than there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_waiters_take_no_more_than_there_are() {
    let server = Server::start();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = JoinSet::new();
    for number in 0..12 {
        let client = server.client().await;
        let permits = client.permits("l", 4).unwrap().fair(number % 3 > 0);
        let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
        tasks.spawn(async move {
            for round in 0..30 {
                let n = 1 + (number + round) % 3;
                let guard = permits.acquire_many(n as u32).await.unwrap();
                let now = inside.fetch_add(n, Ordering::SeqCst) + n;
                most.fetch_max(now, Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.fetch_sub(n, Ordering::SeqCst);
                guard.unlock().await.unwrap();
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert!(most.load(Ordering::SeqCst) <= 4);
    assert_eq!(
        (counter(&server), taken(&server), queue(&server)),
        (4, 0, 0)
    );
}

/// Whatever becomes of a request, the number is exact and the queue empty afterwards.
#[tokio::test]
async fn a_lost_reply_leaves_no_waiter_behind() {
    all_come_back(true).await;
}

/// An acquire that is dropped at any of its polls leaves number and queue as they were.
#[tokio::test]
async fn a_dropped_acquire_leaves_the_queue_as_it_was() {
    is_as_before_after_drops(true).await;
}

/// One owner cannot hold permits of a name both ways.
#[tokio::test]
async fn one_owner_holds_fair_permits_or_others() {
    let server = Server::start();
    let client = server.client().await;
    let owner = client.owner("me").unwrap();
    let as_me = || AcquireOptions::new().owner(owner.clone());
    let (one, other) = (
        fair(&client, 3).many(1).unwrap(),
        unfair(&client, 3).many(1).unwrap(),
    );
    for (first, second) in [(&one, &other), (&other, &one)] {
        let held = first.lock_with(as_me()).await.unwrap();
        let refused = second.lock_with(as_me()).await.unwrap_err();
        assert!(matches!(refused, Error::NotReentrant { .. }), "{refused:?}");
        held.unlock().await.unwrap();
    }
}

/// A key of another program where the queue would be is told, and nothing is written.
#[tokio::test]
async fn a_foreign_queue_is_told() {
    let server = Server::start();
    let client = server.client().await;
    let held = fair(&client, 1).acquire().await.unwrap();
    server.call(&["SET", QUEUE, "mine"]);
    let refused = fair(&client, 1).try_acquire().await.unwrap_err();
    assert!(
        refused.to_string().contains("has another type"),
        "{refused}"
    );
    held.unlock().await.unwrap();
    assert_eq!((counter(&server), taken(&server)), (1, 0));
    assert_eq!(server.call(&["GET", QUEUE]), Reply::Text("mine".into()));
}
