//! The order of a fair lock, and what becomes of it if a client dies, hangs or gives up.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, LockClient, LockClientBuilder, OwnerId};
use rand::Rng;
use tokio::task::JoinHandle;

use crate::{
    contract::{contract_suite, nothing_is_left},
    support::{
        Server,
        child::{ByHand, Worker},
        eventually,
        history::{History, Order},
        proxy::Proxy,
        wire::{Reply, Wire},
        within,
    },
};

contract_suite! { mod contract, door = |client, name| client.fair_lock(name).unwrap() }
contract_suite! {
    mod non_reentrant,
    door = |client, name| client.non_reentrant_fair_lock(name).unwrap(),
    reentrant = false
}

const LOCK: &str = "fair:l";
const QUEUE: &str = "redisson_lock_queue:{fair:l}";
const TIMEOUTS: &str = "redisson_lock_timeout:{fair:l}";
const SEEN: &str = "nestlock_fair_seen:{fair:l}";
const CHANNEL: &str = "redisson_lock__channel:{fair:l}";
/// Far beyond each test's patience, so that a missed wake-up shows.
const NEVER: Duration = Duration::from_secs(600);
/// A wake-up takes less than this, and anything slower is a miss.
const PROMPT: Duration = Duration::from_secs(20);
/// Extra time for a loaded machine.
const SLACK: Duration = Duration::from_secs(5);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Connects a client whose waiters are woken by messages, and not by polling within a test's time.
async fn deaf_to_time(server: &Server) -> LockClient {
    let client = server
        .client_with(|c| c.poll_cap(NEVER).fair_patience(6 * NEVER))
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

async fn impatient(server: &Server, patience: Duration) -> LockClient {
    server.client_with(|c| c.fair_patience(patience)).await
}

fn queue(server: &Server) -> Vec<String> {
    server
        .call(&["LRANGE", QUEUE, "0", "-1"])
        .list()
        .iter()
        .map(|owner| owner.text().to_owned())
        .collect()
}

async fn queued(server: &Server, count: usize) {
    eventually(&format!("{count} in the queue"), || async {
        queue(server).len() == count
    })
    .await;
}

/// Releases the lock as another program that held it would.
fn release_by_hand(server: &Server) {
    server.call(&["DEL", LOCK]);
    if let Some(head) = queue(server).first() {
        server.call(&["PUBLISH", &format!("{CHANNEL}:{head}"), "0"]);
    }
}

/// Starts a task that joins the queue now and returns its rank among those that had the lock.
async fn waiter(
    server: &Server,
    client: &LockClient,
    done: &Arc<AtomicUsize>,
) -> JoinHandle<usize> {
    let (lock, done, before) = (
        client.fair_lock(LOCK).unwrap(),
        Arc::clone(done),
        queue(server).len(),
    );
    let task = tokio::spawn(async move {
        let guard = lock.lock().await.unwrap();
        let turn = done.fetch_add(1, Ordering::SeqCst);
        guard.unlock().await.unwrap();
        turn
    });
    queued(server, before + 1).await;
    task
}

async fn in_time<T>(what: &str, limit: Duration, task: JoinHandle<T>) -> T {
    tokio::time::timeout(limit, task)
        .await
        .unwrap_or_else(|_| panic!("not within {limit:?}: {what}"))
        .unwrap()
}

/// Asserts that no key is left, and nothing of the clients.
async fn all_gone(server: &Server, clients: &[&LockClient]) {
    nothing_is_left(server, clients).await;
}

// --- the order ---

/// R64, R63: the order holds across processes, with waiters that give up at any time and with
/// leases that end.
#[tokio::test]
async fn r63_r64_the_lock_goes_in_request_order_when_waiters_give_up() {
    let server = Server::start_real();
    // An unknown script is sent twice, so load it first.
    server
        .client()
        .await
        .fair_lock("warm")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    for leases in [false, true] {
        let order = Order::watch(&server, "l0");
        let history = History::play(&server, "fair", 1, 25, leases);
        let grants = order.check(&server);
        println!("{grants} times in the order of requests");
        assert!(grants >= history.holds.len());
        history.assert_no_clashes();
        // R63: at no time do all waiters stand still.
        assert!(
            history.gap() < SLACK,
            "no task got the lock for {:?}",
            history.gap()
        );
    }
}

#[tokio::test]
async fn waiters_of_two_clients_are_served_in_turn() {
    let server = Server::start();
    let clients = [deaf_to_time(&server).await, deaf_to_time(&server).await];
    let guard = clients[0].fair_lock(LOCK).unwrap().lock().await.unwrap();
    let (done, mut tasks) = (Arc::default(), Vec::new());
    for n in 0..20 {
        tasks.push(waiter(&server, &clients[n % 2], &done).await);
    }
    guard.unlock().await.unwrap();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(in_time("its turn", PROMPT, task).await, n);
    }
    all_gone(&server, &clients.each_ref()).await;
}

/// A task waits again while the client is still subscribed for its last wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_waits_again_at_once_has_a_place_and_is_woken() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let tasks: Vec<_> = [&a, &b, &b]
        .into_iter()
        .map(|client| {
            let lock = client.fair_lock(LOCK).unwrap();
            tokio::spawn(async move {
                for _ in 0..50 {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        in_time("150 holds", PROMPT, task).await;
    }
    all_gone(&server, &[&a, &b]).await;
}

#[tokio::test]
async fn a_try_takes_no_place_and_overtakes_no_waiter() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let lock = client.fair_lock(LOCK).unwrap();
    let other = ByHand::hold(&server, LOCK, NEVER);
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(
        !server.exists(QUEUE) && !server.exists(TIMEOUTS),
        "a try takes no place"
    );
    let (done, before) = (Arc::default(), server.script_count());
    let task = waiter(&server, &client, &done).await;
    // The waiter tries once more when it is subscribed.
    eventually("it waits", || async { server.script_count() == before + 2 }).await;
    // The lock is free, but no message has reached the waiter whose turn it is.
    server.call(&["DEL", LOCK]);
    let tries = server.script_count();
    for _ in 0..5 {
        assert!(
            lock.try_lock().await.unwrap().is_none(),
            "another owner waits"
        );
    }
    assert_eq!(server.script_count() - tries, 5);
    assert_eq!(queue(&server).len(), 1);
    release_by_hand(&server);
    assert_eq!(in_time("its turn", PROMPT, task).await, 0);
    drop(other);
    lock.try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    all_gone(&server, &[&client]).await;
}

#[tokio::test]
async fn the_holder_re_enters_while_others_wait() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let lock = a.fair_lock(LOCK).unwrap();
    let outer = lock.lock().await.unwrap();
    let done = Arc::default();
    let tasks = [
        waiter(&server, &b, &done).await,
        waiter(&server, &a, &done).await,
    ];
    for _ in 0..3 {
        let inner = tokio::time::timeout(PROMPT, lock.lock())
            .await
            .expect("at once")
            .unwrap();
        let tried = lock.try_lock().await.unwrap().expect("a re-entry");
        assert_eq!(lock.hold_count(&outer.owner()).await.unwrap(), 3);
        inner.unlock().await.unwrap();
        tried.unlock().await.unwrap();
        assert_eq!(queue(&server).len(), 2);
    }
    outer.unlock().await.unwrap();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(in_time("its turn", PROMPT, task).await, n);
    }
    all_gone(&server, &[&a, &b]).await;
}

/// Waiters of one owner share one place. The others re-enter as soon as the first one has the lock.
#[tokio::test]
async fn two_waiters_of_one_owner_get_in_together() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let other = ByHand::hold(&server, LOCK, NEVER);
    let options = AcquireOptions::new().owner(client.owner("job-7").unwrap());
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let (lock, options) = (client.fair_lock(LOCK).unwrap(), options.clone());
            tokio::spawn(async move { lock.lock_with(options).await.unwrap() })
        })
        .collect();
    queued(&server, 1).await;
    let tries = server.script_count();
    eventually("all have tried", || async {
        server.script_count() >= tries.max(4)
    })
    .await;
    assert_eq!(queue(&server).len(), 1, "one owner, one place");
    release_by_hand(&server);
    let mut guards = Vec::new();
    for task in tasks {
        guards.push(in_time("all three", PROMPT, task).await);
    }
    assert_eq!(server.record(LOCK), [(guards[0].owner().to_string(), 3)]);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    drop(other);
    all_gone(&server, &[&client]).await;
}

/// When one of two waiters of an owner gives up, the other one keeps the place.
#[tokio::test]
async fn a_waiter_keeps_the_place_when_its_owners_other_one_gives_up() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let other = ByHand::hold(&server, LOCK, NEVER);
    let owner = client.owner("job-7").unwrap();
    let options = AcquireOptions::new().owner(owner.clone());
    let lock = client.fair_lock(LOCK).unwrap();
    let patient = tokio::spawn({
        let (lock, options) = (lock.clone(), options.clone());
        async move { lock.lock_with(options).await.unwrap() }
    });
    queued(&server, 1).await;
    let done = Arc::default();
    let behind = waiter(&server, &client, &done).await;
    assert!(
        lock.try_lock_for_with(ms(300), options)
            .await
            .unwrap()
            .is_none()
    );
    client.idle().await;
    assert_eq!(queue(&server)[0], owner.to_string());
    release_by_hand(&server);
    in_time("the patient one", PROMPT, patient)
        .await
        .unlock()
        .await
        .unwrap();
    in_time("the one behind", PROMPT, behind).await;
    drop(other);
    all_gone(&server, &[&client]).await;
}

/// A retired name stays in use where it has a place.
#[tokio::test]
async fn a_waiter_keeps_its_name_in_the_queue() {
    let server = Server::start();
    let client = server.client_with(|c| c.poll_cap(ms(50))).await;
    let _other = ByHand::hold(&server, LOCK, NEVER);
    let task = waiter(&server, &client, &Arc::default()).await;
    let name = queue(&server);
    // Another client may release a hold that was handed over, so its owner name is retired.
    let owner = client
        .fair_lock("handed over")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .leave_to_lease();
    let before = server.script_count();
    eventually("it polled again", || async {
        server.script_count() > before + 3
    })
    .await;
    assert_eq!(queue(&server), name);
    release_by_hand(&server);
    in_time("its turn", PROMPT, task).await;
    client
        .fair_lock("handed over")
        .unwrap()
        .release(&owner)
        .await
        .unwrap();
    all_gone(&server, &[&client]).await;
}

// --- leaving ---

/// R56, R65: a wait that ends without the lock leaves neither key.
#[tokio::test]
async fn r56_r65_a_wait_that_times_out_leaves_nothing_in_the_queue() {
    let server = Server::start();
    let client = server.client().await;
    let _other = ByHand::hold(&server, LOCK, NEVER);
    let lock = client.fair_lock(LOCK).unwrap();
    for wait in [0, 30, 200, 1200] {
        assert!(matches!(
            lock.try_lock_for(ms(wait)).await,
            Ok(None) | Err(Error::Unconfirmed { .. })
        ));
        client.idle().await;
        assert!(
            !server.exists(QUEUE) && !server.exists(TIMEOUTS),
            "after a wait of {wait} ms"
        );
    }
    let tasks: Vec<_> = (0..100)
        .map(|n| {
            let lock = lock.clone();
            tokio::spawn(async move { drop(lock.try_lock_for(ms(200 + n)).await) })
        })
        .collect();
    for task in tasks {
        in_time("the end of a wait", PROMPT, task).await;
    }
    client.idle().await;
    assert!(!server.exists(QUEUE) && !server.exists(TIMEOUTS));
}

/// R59: a wait ends at its bound.
#[tokio::test]
async fn r59_a_fair_wait_ends_at_its_bound() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let _other = ByHand::hold(&server, LOCK, NEVER);
    for wait in [0, 50, 300, 1000].map(ms) {
        let start = Instant::now();
        let outcome = client.fair_lock(LOCK).unwrap().try_lock_for(wait).await;
        let took = start.elapsed();
        assert!(matches!(outcome, Ok(None)), "{wait:?}: {outcome:?}");
        assert!(
            took >= wait && took < wait + Duration::from_secs(2),
            "{wait:?}: {took:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_waits_that_are_dropped_or_aborted_leave_the_queue() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let other = ByHand::hold(&server, LOCK, NEVER);
    let lock = client.fair_lock(LOCK).unwrap();
    let done = Arc::default();
    let staying = waiter(&server, &client, &done).await;
    for round in 0..20 {
        // The lock is the losing branch of a `select!`.
        tokio::select! {
            biased;
            _ = lock.lock() => unreachable!("it is held"),
            () = tokio::time::sleep(ms(round)) => {}
        }
        // The future is polled and then dropped.
        OwnerId::scope(async {
            let mut future = pin!(lock.lock());
            assert!(futures::poll!(future.as_mut()).is_pending());
        })
        .await;
        let task = tokio::spawn({
            let lock = lock.clone();
            async move { lock.lock().await }
        });
        tokio::time::sleep(ms(round)).await;
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
    }
    client.idle().await;
    assert_eq!(
        queue(&server).len(),
        1,
        "the waiters that left are gone, the one that stays is not"
    );
    assert_eq!(server.call(&["ZCARD", TIMEOUTS]).int(), 1);
    release_by_hand(&server);
    in_time("the one that stays", PROMPT, staying).await;
    drop(other);
    all_gone(&server, &[&client]).await;
}

/// A waiter that leaves after the message about its turn passes the turn on to the next one.
#[tokio::test]
async fn a_waiter_that_leaves_with_its_turn_in_hand_passes_it_on() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    for round in 0..20 {
        let other = ByHand::hold(&server, LOCK, NEVER);
        let lock = a.fair_lock(LOCK).unwrap();
        let behind = {
            let mut first = pin!(lock.lock());
            // The waiter waits, is woken, and is not polled any more.
            let parked = tokio::time::timeout(ms(30), first.as_mut()).await;
            assert!(parked.is_err());
            queued(&server, 1).await;
            let behind = waiter(&server, &b, &Arc::default()).await;
            release_by_hand(&server);
            tokio::time::sleep(ms(round % 4)).await;
            behind
        };
        in_time(&format!("the one behind, round {round}"), PROMPT, behind).await;
        drop(other);
    }
    all_gone(&server, &[&a, &b]).await;
}

#[tokio::test]
async fn a_shutdown_leaves_the_queue_and_others_in_it() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let _other = ByHand::hold(&server, LOCK, NEVER);
    let leaving: Vec<_> = (0..20)
        .map(|_| {
            let lock = a.fair_lock(LOCK).unwrap();
            tokio::spawn(async move { lock.lock().await.map(drop) })
        })
        .collect();
    queued(&server, 20).await;
    let staying = waiter(&server, &b, &Arc::default()).await;
    a.shutdown().await.unwrap();
    assert_eq!(queue(&server).len(), 1);
    for task in leaving {
        let outcome = in_time("turned away", PROMPT, task).await;
        assert!(matches!(outcome, Err(Error::Closed)), "{outcome:?}");
    }
    release_by_hand(&server);
    in_time("the one that stays", PROMPT, staying).await;
    all_gone(&server, &[&b]).await;
}

// --- the dead, the paused and the deaf ---

/// R62: holder and head are killed. The next live waiter gets the lock when the lease and the
/// head's patience are over.
#[tokio::test]
async fn r62_a_killed_holder_and_queue_head_delay_others_only_briefly() {
    let server = Server::start();
    let (lease, patience) = (ms(600), ms(900));
    let client = impatient(&server, patience).await;
    let mut holder = Worker::start_with_patience(&server, lease, ms(200), patience);
    let mut head = Worker::start_with_patience(&server, lease, ms(200), patience);
    holder.ask(&format!("lock {LOCK}"));
    holder.answer_to("locked");
    head.ask(&format!("lock {LOCK}"));
    queued(&server, 1).await;
    let tasks = [
        waiter(&server, &client, &Arc::default()).await,
        waiter(&server, &client, &Arc::default()).await,
    ];
    holder.kill();
    head.kill();
    let start = Instant::now();
    for task in tasks {
        in_time("the living", lease + 2 * patience + SLACK, task).await;
    }
    println!(
        "after both were killed: {:?}; lease {lease:?}, patience {patience:?}",
        start.elapsed()
    );
    all_gone(&server, &[&client]).await;
}

/// R62: all waiters of a killed client together cost one patience.
#[tokio::test]
async fn r62_a_killed_clients_waiters_are_dropped_together() {
    let server = Server::start();
    let patience = ms(2000);
    let client = impatient(&server, patience).await;
    let guard = client.fair_lock(LOCK).unwrap().lock().await.unwrap();
    let mut worker = Worker::start_with_patience(&server, PROMPT, ms(100), patience);
    worker.ask(&format!("wait {LOCK} 4"));
    queued(&server, 4).await;
    let task = waiter(&server, &client, &Arc::default()).await;
    worker.kill();
    let start = Instant::now();
    guard.unlock().await.unwrap();
    in_time("the living", 3 * patience, task).await;
    println!(
        "4 dead in a row: {:?}, patience {patience:?}",
        start.elapsed()
    );
    all_gone(&server, &[&client]).await;
}

/// R62: five dead clients cost one patience, not five.
#[tokio::test]
async fn r62_the_dead_of_many_clients_cost_one_patience() {
    let server = Server::start();
    let patience = ms(3000);
    let client = impatient(&server, patience).await;
    let guard = client.fair_lock(LOCK).unwrap().lock().await.unwrap();
    let mut workers = Vec::new();
    for n in 1..=5 {
        let mut worker = Worker::start_with_patience(&server, PROMPT, ms(100), patience);
        worker.ask(&format!("wait {LOCK} 1"));
        queued(&server, n).await;
        workers.push(worker);
    }
    let task = waiter(&server, &client, &Arc::default()).await;
    workers.iter_mut().for_each(Worker::kill);
    let start = Instant::now();
    guard.unlock().await.unwrap();
    in_time("the living", 3 * patience, task).await;
    println!(
        "5 dead clients in a row: {:?}, patience {patience:?}",
        start.elapsed()
    );
    all_gone(&server, &[&client]).await;
}

/// An unpolled future cannot poll the lock, but other waiters of its client can.
#[tokio::test]
async fn an_unpolled_future_loses_only_its_own_place() {
    let server = Server::start();
    let patience = ms(4000);
    let client = impatient(&server, patience).await;
    let _other = ByHand::hold(&server, LOCK, NEVER);
    let (lock, looks) = (client.fair_lock(LOCK).unwrap(), server.script_count());
    let mut parked = Box::pin(OwnerId::scope(lock.lock()));
    // It polls, subscribes, and polls again. A reply that no future picks up would be in doubt, and
    // its name with it.
    let is_waiting =
        || async { server.script_count() >= looks + 2 && client.stats().requests == 0 };
    tokio::select! {
        biased;
        _ = parked.as_mut() => panic!("another one holds it"),
        () = eventually("it waits", is_waiting) => {}
    }
    assert!(futures::poll!(parked.as_mut()).is_pending());
    queued(&server, 1).await;
    let parked_as = queue(&server);
    let done = Arc::default();
    let tasks = [
        waiter(&server, &client, &done).await,
        waiter(&server, &client, &done).await,
    ];
    let living = queue(&server)[1..].to_vec();
    eventually("it counts as gone", || async { queue(&server) == living }).await;
    // One patience later, the others are still there.
    let start = Instant::now();
    while start.elapsed() < patience {
        assert_eq!(queue(&server), living);
        tokio::time::sleep(ms(20)).await;
    }
    // Polled again, it is the last one in the queue.
    tokio::select! {
        _ = parked.as_mut() => panic!("another one holds it"),
        () = eventually("it waits again", || async { queue(&server).last() == parked_as.last() }) => {}
    }
    release_by_hand(&server);
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(in_time("its turn", PROMPT, task).await, n);
    }
    tokio::time::timeout(PROMPT, parked)
        .await
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    all_gone(&server, &[&client]).await;
}

/// R61: the lock is held for many patiences, and no live waiter loses its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r61_a_wait_longer_than_the_patience_keeps_its_place() {
    let server = Server::start();
    let patience = ms(4_500);
    let clients = [
        impatient(&server, patience).await,
        impatient(&server, patience).await,
    ];
    // The lease is shorter than the patience, so that the times in the queue do not come from it. A
    // reply may take a third of the lease.
    let holder = server.client_with(|c| c.watchdog_timeout(ms(3_000))).await;
    let guard = holder.fair_lock(LOCK).unwrap().lock().await.unwrap();
    let (done, mut tasks) = (Arc::default(), Vec::new());
    for n in 0..6 {
        tasks.push(waiter(&server, &clients[n % 2], &done).await);
    }
    let (before, start) = (queue(&server), Instant::now());
    while start.elapsed() < 5 * patience {
        assert_eq!(queue(&server), before, "after {:?}", start.elapsed());
        // A poll of any client drops waiters that are gone.
        assert!(
            holder
                .fair_lock(LOCK)
                .unwrap()
                .try_lock_with(AcquireOptions::new().owner(holder.owner("x").unwrap()))
                .await
                .unwrap()
                .is_none()
        );
        tokio::time::sleep(ms(20)).await;
    }
    guard.unlock().await.unwrap();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(in_time("its turn", PROMPT, task).await, n);
    }
    all_gone(&server, &[&clients[0], &clients[1], &holder]).await;
}

/// A poll without a reply is retried under the same name, so a waiter in doubt keeps its place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_stall_beyond_the_command_timeout_keeps_the_order() {
    let server = Server::start();
    let configure = |builder: LockClientBuilder| {
        builder
            .command_timeout(ms(500))
            .poll_cap(ms(200))
            .fair_patience(NEVER)
            .outage_patience(PROMPT)
    };
    let clients = [
        server.client_with(configure).await,
        server.client_with(configure).await,
    ];
    let other = ByHand::hold(&server, LOCK, NEVER);
    let (done, mut tasks) = (Arc::default(), Vec::new());
    for n in 0..8 {
        tasks.push(waiter(&server, &clients[n % 2], &done).await);
    }
    let before = queue(&server);
    for _ in 0..2 {
        server.call(&["CLIENT", "PAUSE", "2500", "ALL"]);
        // This call returns when the pause is over. The requests that were sent before it run from
        // then on.
        let (start, scripts) = (Instant::now(), server.script_count());
        assert_eq!(queue(&server), before);
        eventually("all have polled several times", || async {
            assert_eq!(
                queue(&server),
                before,
                "{:?} after the pause",
                start.elapsed()
            );
            server.script_count() > scripts + 8 * 4
        })
        .await;
    }
    release_by_hand(&server);
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(in_time("its turn", PROMPT, task).await, n);
    }
    drop(other);
    all_gone(&server, &clients.each_ref()).await;
}

/// F2: a process that was stopped for longer than its patience is passed over, and rejoins behind
/// the others.
#[tokio::test]
async fn f2_a_paused_waiter_loses_its_place_and_comes_back() {
    let server = Server::start();
    let patience = ms(900);
    let client = impatient(&server, patience).await;
    let guard = client
        .fair_lock(LOCK)
        .unwrap()
        .try_lock_with(AcquireOptions::new().lease(PROMPT))
        .await
        .unwrap()
        .unwrap();
    let mut paused = Worker::start_with_patience(&server, ms(2000), ms(200), patience);
    paused.ask(&format!("lock {LOCK}"));
    queued(&server, 1).await;
    let name = queue(&server).remove(0);
    let task = waiter(&server, &client, &Arc::default()).await;
    paused.stop();
    guard.unlock().await.unwrap();
    in_time("the one behind", 3 * patience + SLACK, task).await;
    // The lock is held again before the paused process polls.
    let guard = client.fair_lock(LOCK).unwrap().lock().await.unwrap();
    assert!(!queue(&server).contains(&name), "passed over");
    let task = waiter(&server, &client, &Arc::default()).await;
    paused.cont();
    queued(&server, 2).await;
    assert_ne!(queue(&server)[0], name, "behind the others");
    guard.unlock().await.unwrap();
    in_time("the one before", PROMPT, task).await;
    paused.answer_to("locked");
    paused.ask(&format!("unlock {LOCK}"));
    assert_eq!(paused.answer(), format!("unlocked {LOCK} ok"));
    drop(paused);
    all_gone(&server, &[&client]).await;
}

/// F1: no message announces the end of a lease, so the next waiter finds it by polling.
#[tokio::test]
async fn f1_an_expired_hold_is_followed_within_the_poll_cap() {
    let server = Server::start();
    let client = server.client_with(|c| c.poll_cap(ms(300))).await;
    for ttl in [100, 700] {
        let start = Instant::now();
        let _other = ByHand::hold(&server, LOCK, ms(ttl));
        let guard = client.fair_lock(LOCK).unwrap().lock().await.unwrap();
        let took = start.elapsed();
        assert!(
            took + ms(5) >= ms(ttl) && took < ms(ttl + 300) + SLACK,
            "{took:?}"
        );
        guard.unlock().await.unwrap();
    }
    all_gone(&server, &[&client]).await;
}

/// R58: no holder unlocks. Each lease ends, and the next in line gets the lock.
#[tokio::test]
async fn r58_fair_waiters_get_a_never_unlocked_lock_one_by_one() {
    let server = Server::start();
    let client = server.client().await;
    let (lease, turns) = (ms(400), Arc::new(AtomicUsize::new(0)));
    let start = Instant::now();
    let mut tasks = Vec::new();
    for n in 0..8 {
        let (lock, served) = (client.fair_lock(LOCK).unwrap(), Arc::clone(&turns));
        tasks.push(tokio::spawn(async move {
            let options = AcquireOptions::new().lease(lease);
            let guard = lock.lock_with(options).await.unwrap();
            assert_eq!(served.fetch_add(1, Ordering::SeqCst), n);
            guard.lost().await;
        }));
        eventually("its place", || async {
            queue(&server).len() + turns.load(Ordering::SeqCst) > n
        })
        .await;
    }
    for task in tasks {
        in_time("its turn", 8 * lease + SLACK, task).await;
    }
    let took = start.elapsed();
    println!("8 leases of {lease:?} one after the other: {took:?}");
    assert!(took > 7 * (lease - ms(10)) && took < 8 * lease + SLACK);
    all_gone(&server, &[&client]).await;
}

#[tokio::test]
async fn p8_force_unlock_wakes_the_next_in_line() {
    let server = Server::start();
    let (a, b) = (deaf_to_time(&server).await, deaf_to_time(&server).await);
    let lock = a.fair_lock(LOCK).unwrap();
    for _ in 0..5 {
        let guard = lock.lock().await.unwrap();
        let done = Arc::default();
        let tasks = [
            waiter(&server, &b, &done).await,
            waiter(&server, &a, &done).await,
        ];
        assert!(b.fair_lock(LOCK).unwrap().force_unlock().await.unwrap());
        for (n, task) in tasks.into_iter().enumerate() {
            assert_eq!(in_time("its turn", PROMPT, task).await, n);
        }
        assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    }
    all_gone(&server, &[&a, &b]).await;
}

/// F18: no message arrives, so waiters poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f18_a_fair_lock_without_messages_moves_on_within_the_cap() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    proxy.drop_messages(true);
    let cap = ms(150);
    let client = LockClient::builder()
        .poll_cap(cap)
        .connect(proxy.url())
        .await
        .unwrap();
    let guard = client.fair_lock(LOCK).unwrap().lock().await.unwrap();
    let (done, mut tasks) = (Arc::default(), Vec::new());
    for _ in 0..10 {
        tasks.push(waiter(&server, &client, &done).await);
    }
    guard.unlock().await.unwrap();
    let start = Instant::now();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(in_time("its turn", 10 * cap + SLACK, task).await, n);
    }
    println!(
        "10 hand-overs without a message: {:?}, poll cap {cap:?}",
        start.elapsed()
    );
    all_gone(&server, &[&client]).await;
}

/// F19: connections break all the time. Every task gets the lock, and the queue is empty in the
/// end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f19_a_fair_lock_survives_connections_that_break() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let configure = |builder: LockClientBuilder| builder.poll_cap(ms(200)).fair_patience(ms(2000));
    let shaky = configure(LockClient::builder())
        .connect(proxy.url())
        .await
        .unwrap();
    let steady = server.client_with(configure).await;
    let (over, holds) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let tasks: Vec<_> = (0..12)
        .map(|n| {
            let lock = if n % 2 == 0 { &shaky } else { &steady }
                .fair_lock(LOCK)
                .unwrap();
            let (over, holds) = (Arc::clone(&over), Arc::clone(&holds));
            tokio::spawn(async move {
                while !over.load(Ordering::SeqCst) {
                    let options = AcquireOptions::new().lease(ms(1000));
                    if let Ok(guard) = lock.lock_with(options).await {
                        holds.fetch_add(1, Ordering::SeqCst);
                        let _ = guard.unlock().await;
                    }
                }
            })
        })
        .collect();
    for _ in 0..12 {
        tokio::time::sleep(ms(150)).await;
        proxy.cut();
    }
    let before = holds.load(Ordering::SeqCst);
    within(PROMPT, "holds after the cuts", || async {
        holds.load(Ordering::SeqCst) > before + 24
    })
    .await;
    over.store(true, Ordering::SeqCst);
    for task in tasks {
        in_time("its end", PROMPT, task).await;
    }
    println!("{} holds over 12 cuts", holds.load(Ordering::SeqCst));
    all_gone(&server, &[&shaky, &steady]).await;
}

// --- the queue's keys ---

/// R57: one of the keys is deleted at any time. No call fails, and all tasks proceed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r57_keys_that_vanish_cost_the_order_and_nothing_else() {
    let server = Server::start();
    let configure = |builder: LockClientBuilder| builder.poll_cap(ms(100)).fair_patience(ms(1000));
    let clients = [
        server.client_with(configure).await,
        server.client_with(configure).await,
    ];
    let (inside, left) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicUsize::new(12)));
    let tasks: Vec<_> = (0..12)
        .map(|n| {
            let lock = clients[n % 2].fair_lock(LOCK).unwrap();
            let (inside, left) = (Arc::clone(&inside), Arc::clone(&left));
            tokio::spawn(async move {
                for _ in 0..20 {
                    let guard = lock.lock().await.unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    guard.unlock().await.unwrap();
                }
                left.fetch_sub(1, Ordering::SeqCst);
            })
        })
        .collect();
    let (mut wire, start) = (server.wire(), Instant::now());
    while left.load(Ordering::SeqCst) > 0 {
        assert!(
            start.elapsed() < 3 * PROMPT,
            "{} tasks stand still",
            left.load(Ordering::SeqCst)
        );
        let key = [QUEUE, TIMEOUTS, SEEN][rand::rng().random_range(0..3)];
        wire.call(&["DEL", key]).unwrap();
        tokio::time::sleep(Duration::from_micros(rand::rng().random_range(0..20_000))).await;
    }
    for task in tasks {
        task.await.unwrap();
    }
    all_gone(&server, &clients.each_ref()).await;
}

// --- what it costs ---

#[tokio::test]
async fn five_hundred_waiters_cost_three_scripts_each() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let other = ByHand::hold(&server, LOCK, 10 * NEVER);
    let before = server.script_count();
    let done = Arc::new(AtomicUsize::new(0));
    let tasks: Vec<_> = (0..500)
        .map(|_| {
            let (lock, done) = (client.fair_lock(LOCK).unwrap(), Arc::clone(&done));
            tokio::spawn(async move {
                lock.lock().await.unwrap().unlock().await.unwrap();
                done.fetch_add(1, Ordering::SeqCst);
            })
        })
        .collect();
    queued(&server, 500).await;
    eventually("all listen", || async { server.channels().len() == 500 }).await;
    let start = Instant::now();
    release_by_hand(&server);
    for task in tasks {
        in_time("its turn", 2 * PROMPT, task).await;
    }
    let scripts = (server.script_count() - before) as f64 / 500.0;
    println!(
        "500 waiters: {scripts:.3} scripts per hold, drained in {:?}",
        start.elapsed()
    );
    assert!(scripts <= 3.1, "{scripts}");
    drop(other);
    all_gone(&server, &[&client]).await;
}

/// The lock is free, but it is another waiter's turn. The waiters behind it poll only once per
/// poll cap.
#[tokio::test]
async fn waiting_for_anothers_turn_costs_a_poll_per_poll_cap() {
    let server = Server::start();
    let client = server.client_with(|c| c.poll_cap(ms(500))).await;
    let peer = Redisson::new(&server);
    let other = ByHand::hold(&server, LOCK, NEVER);
    peer.join(60_000);
    let mut tasks = Vec::new();
    for _ in 0..10 {
        tasks.push(waiter(&server, &client, &Arc::default()).await);
    }
    release_by_hand(&server);
    let (before, start) = (server.script_count(), Instant::now());
    eventually("two seconds", || async {
        start.elapsed() > Duration::from_secs(2)
    })
    .await;
    let (scripts, took) = (server.script_count() - before, start.elapsed());
    println!("10 waiters behind one that does not come, {took:?}: {scripts} scripts");
    assert!(
        scripts <= 10 * (took.as_millis() as u64 / 500 + 2),
        "{scripts} in {took:?}"
    );
    peer.leave();
    for task in tasks {
        in_time("its turn", PROMPT, task).await;
    }
    drop((other, peer));
    all_gone(&server, &[&client]).await;
}

// --- Redisson ---

/// Another process with Redisson: the rows of its tables, as plain commands.
struct Redisson {
    wire: std::cell::RefCell<Wire>,
    ears: std::cell::RefCell<Wire>,
}

/// The peer's field in the record, and its name in the queue.
const PEER: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71";
const WAIT_MS: i64 = 300_000;

impl Redisson {
    fn new(server: &Server) -> Self {
        let mut ears = server.wire();
        assert!(
            !ears
                .call(&["SUBSCRIBE", &format!("{CHANNEL}:{PEER}")])
                .unwrap()
                .is_error()
        );
        Self {
            wire: server.wire().into(),
            ears: ears.into(),
        }
    }

    fn call(&self, parts: &[&str]) -> Reply {
        let reply = self.wire.borrow_mut().call(parts).unwrap();
        assert!(!reply.is_error(), "{parts:?}: {reply:?}");
        reply
    }

    /// Joins the queue by rows 4 and 5: behind the last waiter, with that one's score plus the wait
    /// time. The peer's own clock is `ahead` milliseconds ahead of the server's.
    fn join(&self, ahead: i64) {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        let now = i64::try_from(now.as_millis()).unwrap() + ahead;
        let ttl = match self.call(&["LINDEX", QUEUE, "-1"]) {
            Reply::Nil => self.call(&["PTTL", LOCK]).int(),
            last => {
                self.call(&["ZSCORE", TIMEOUTS, last.text()])
                    .text()
                    .parse::<f64>()
                    .unwrap() as i64
                    - now
            }
        };
        let added = self.call(&["ZADD", TIMEOUTS, &(ttl + WAIT_MS + now).to_string(), PEER]);
        assert_eq!(added.int(), 1);
        self.call(&["RPUSH", QUEUE, PEER]);
    }

    /// Waits for its message, and then takes the lock by row 1: it is free, and the peer is the
    /// head.
    fn acquire(&self) {
        let message = self.ears.borrow_mut().read().unwrap();
        assert_eq!(message.list()[2].text(), "0");
        assert_eq!(
            self.call(&["EXISTS", LOCK]).int(),
            0,
            "notified when it is free"
        );
        assert_eq!(
            self.call(&["LINDEX", QUEUE, "0"]).text(),
            PEER,
            "notified when it is next"
        );
        self.call(&["LPOP", QUEUE]);
        self.call(&["ZREM", TIMEOUTS, PEER]);
        for waiter in self.call(&["ZRANGE", TIMEOUTS, "0", "-1"]).list() {
            self.call(&["ZINCRBY", TIMEOUTS, &(-WAIT_MS).to_string(), waiter.text()]);
        }
        self.call(&["HSET", LOCK, PEER, "1"]);
        self.call(&["PEXPIRE", LOCK, "30000"]);
    }

    /// Releases the lock by row 5 of its unlock.
    fn release(&self) {
        self.call(&["DEL", LOCK]);
        if let Reply::Text(head) = self.call(&["LINDEX", QUEUE, "0"]) {
            self.call(&["PUBLISH", &format!("{CHANNEL}:{head}"), "0"]);
        }
    }

    /// Leaves the queue like Redisson's `acquireFailed`, and then releases the lock as another
    /// client.
    fn leave(&self) {
        self.call(&["ZREM", TIMEOUTS, PEER]);
        self.call(&["LREM", QUEUE, "0", PEER]);
        self.release();
    }
}

/// Both wait in one queue, and each wakes the other.
#[tokio::test]
async fn a_redisson_peer_and_nestlock_share_one_queue() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let peer = Redisson::new(&server);
    let lock = client.fair_lock(LOCK).unwrap();
    for round in 0..5 {
        let guard = lock.lock().await.unwrap();
        let done = Arc::default();
        let first = waiter(&server, &client, &done).await;
        peer.join(0);
        let second = waiter(&server, &client, &done).await;
        assert_eq!(queue(&server)[1], PEER, "round {round}");
        guard.unlock().await.unwrap();
        assert_eq!(in_time("before the peer", PROMPT, first).await, 0);
        peer.acquire();
        assert!(
            lock.try_lock().await.unwrap().is_none(),
            "the peer holds it"
        );
        assert_eq!(lock.holder().await.unwrap().unwrap().to_string(), PEER);
        assert_eq!(done.load(Ordering::SeqCst), 1);
        peer.release();
        assert_eq!(in_time("after the peer", PROMPT, second).await, 1);
    }
    drop(peer);
    all_gone(&server, &[&client]).await;
}

/// R66: the peer's clock is ten minutes off, either way. Nestlock's waiters keep their order and do
/// not wait for that clock.
#[tokio::test]
async fn r66_a_peer_whose_clock_is_wrong_neither_blocks_nor_overtakes() {
    let server = Server::start();
    let patience = ms(900);
    let client = impatient(&server, patience).await;
    let lock = client.fair_lock(LOCK).unwrap();
    for ahead in [600_000, -600_000] {
        let peer = Redisson::new(&server);
        let guard = lock.lock().await.unwrap();
        let done = Arc::default();
        let first = waiter(&server, &client, &done).await;
        peer.join(ahead);
        let second = waiter(&server, &client, &done).await;
        guard.unlock().await.unwrap();
        assert_eq!(in_time("before the peer", PROMPT, first).await, 0);
        // the peer never comes
        assert_eq!(
            in_time("after the peer", 2 * patience + SLACK, second).await,
            1
        );
        assert!(!queue(&server).contains(&PEER.to_owned()));
    }
    all_gone(&server, &[&client]).await;
}

// --- its owner may not take it again ---

/// A second acquire of a non-reentrant fair lock is a typed error, and sends no request.
#[tokio::test]
async fn a_non_reentrant_fair_lock_refuses_re_entry_with_no_request() {
    let server = Server::start();
    let client = deaf_to_time(&server).await;
    let lock = client.non_reentrant_fair_lock(LOCK).unwrap();
    let guard = lock.lock().await.unwrap();
    let before = server.script_count();
    let behind = waiter(&server, &client, &Arc::default()).await;
    // The waiter polls once more when it is subscribed.
    let scripts = before + 2;
    eventually("it sleeps", || async { server.script_count() == scripts }).await;
    for second in [lock.lock().await.map(Some), lock.try_lock_for(NEVER).await] {
        assert!(
            matches!(second, Err(Error::NotReentrant { .. })),
            "{second:?}"
        );
    }
    assert!(
        lock.try_lock().await.unwrap().is_none(),
        "a try does not wait: it is busy"
    );
    assert_eq!(server.script_count(), scripts);
    guard.unlock().await.unwrap();
    in_time("the one behind", PROMPT, behind).await;
    lock.lock().await.unwrap().unlock().await.unwrap();
    all_gone(&server, &[&client]).await;
}
