//! Processes that die, hang or come back.

use rand::Rng;
use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::support::{
    Server,
    child::{self, Worker, monotonic_ns},
    eventually,
    history::History,
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const POLL_CAP: Duration = Duration::from_millis(200);
/// Extra time for a loaded machine.
const SLACK: Duration = Duration::from_secs(3);

fn start(server: &Server, watchdog: Duration) -> Worker {
    Worker::start(server, watchdog, POLL_CAP)
}

#[test]
fn a_worker_process_does_as_it_is_told() {
    if child::is_worker() {
        child::serve();
    }
    let server = Server::start();
    let (mut a, mut b) = (start(&server, ms(3000)), start(&server, ms(3000)));
    a.ask("lock l");
    a.answer_to("locked l ");
    assert_eq!(server.record("l").len(), 1);
    b.ask("lock l");
    a.ask("unlock l");
    assert_eq!(a.answer(), "unlocked l ok");
    b.answer_to("locked l ");
    b.ask("unlock l");
    assert_eq!(b.answer(), "unlocked l ok");
    assert!(!server.exists("l"));
}

#[tokio::test]
async fn f1_a_killed_holder_frees_the_lock_at_the_end_of_its_lease() {
    let server = Server::start();
    let lease = ms(600);
    let client = server
        .client_with(|builder| builder.poll_cap(POLL_CAP))
        .await;
    let mut late = Vec::new();
    for round in 0..12 {
        let name = format!("l{round}");
        let mut worker = start(&server, lease);
        worker.ask(&format!("lock {name}"));
        worker.answer_to("locked");
        let lock = client.reentrant_lock(&name).unwrap();
        let waiter = tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            (Instant::now(), guard)
        });
        eventually("a waiter", || async { !server.channels().is_empty() }).await;
        tokio::time::sleep(ms(rand::rng().random_range(0..200))).await;
        worker.kill();
        let killed = Instant::now();
        let left = server.pttl(&name);
        let ends = Instant::now() + ms(u64::try_from(left).unwrap());
        let (acquired, guard) = tokio::time::timeout(lease + POLL_CAP + SLACK, waiter)
            .await
            .expect("its turn")
            .unwrap();
        // The server rounds its TTL to a millisecond.
        assert!(
            acquired + ms(2) + (ends - killed).saturating_sub(ms(left as u64))
                >= killed + ms(left as u64)
        );
        late.push(acquired.saturating_duration_since(ends));
        guard.unlock().await.unwrap();
    }
    late.sort();
    println!(
        "after SIGKILL, beyond the end of the lease: p50 {:?}, max {:?}",
        late[6], late[11]
    );
    assert!(late[11] < POLL_CAP + SLACK, "{late:?}");
}

/// A paused holder knows of its loss at once when it comes back.
#[tokio::test]
async fn f2_a_paused_holder_knows_of_its_loss_at_once_on_resuming() {
    let server = Server::start();
    let lease = ms(700);
    let client = server
        .client_with(|builder| builder.poll_cap(POLL_CAP))
        .await;
    for round in 0..3 {
        let name = format!("l{round}");
        let mut worker = start(&server, lease);
        worker.ask(&format!("lock {name}"));
        worker.answer_to("locked");
        worker.stop();
        let paused = Instant::now();
        let left = ms(server.pttl(&name) as u64);
        let guard = client.reentrant_lock(&name).unwrap().lock().await.unwrap();
        let waited = paused.elapsed();
        assert!(
            waited + ms(5) >= left && waited < lease + POLL_CAP + SLACK,
            "{waited:?}"
        );
        let continued = monotonic_ns();
        worker.cont();
        let told: u64 = worker.answer_to(&format!("lost {name}")).parse().unwrap();
        let after = Duration::from_nanos(told.saturating_sub(continued));
        println!("notified of the loss {after:?} after SIGCONT");
        assert!(after < SLACK);
        worker.ask(&format!("unlock {name}"));
        assert_eq!(worker.answer(), format!("unlocked {name} Lost"));
        // The paused process took nothing from the second holder.
        assert!(!guard.is_lost());
        assert_eq!(server.record(&name), [(guard.owner().to_string(), 1)]);
        guard.unlock().await.unwrap();
    }
}

#[tokio::test]
async fn a_killed_waiter_leaves_nothing_behind() {
    let server = Server::start();
    let client = server.client().await;
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    let mut worker = start(&server, ms(3000));
    worker.ask("wait l 50");
    worker.answer_to("waiting");
    eventually("waiters", || async { !server.channels().is_empty() }).await;
    worker.kill();
    eventually("no channels", || async { server.channels().is_empty() }).await;
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    guard.unlock().await.unwrap();
    assert!(server.dump().is_empty());
}

/// A process that exits without unlocking frees the lock when its lease ends.
#[tokio::test]
async fn a_process_exit_without_unlock_frees_the_lock_by_its_lease() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(POLL_CAP))
        .await;
    let mut worker = start(&server, ms(600));
    worker.ask("lock l");
    worker.answer_to("locked");
    worker.ask("exit");
    worker.wait();
    let start = Instant::now();
    let guard = client.reentrant_lock("l").unwrap().lock().await.unwrap();
    assert!(start.elapsed() < ms(600) + POLL_CAP + SLACK);
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn r16_a_panic_in_a_task_of_another_process_frees_its_lock() {
    let server = Server::start();
    let client = server.client().await;
    let mut worker = start(&server, Duration::from_secs(60));
    worker.ask("panic l");
    worker.answer_to("panicked");
    // The panic dropped the guard, long before the lease ends.
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock
        .try_lock_for(Duration::from_secs(20))
        .await
        .unwrap()
        .expect("freed");
    guard.unlock().await.unwrap();
}

#[test]
fn no_two_processes_ever_hold_a_lock_while_others_are_killed() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history");
    let lease = ms(600);
    let spawn = || {
        let mut worker = start(&server, lease);
        worker.ask(&format!(
            "work reentrant {} {} 8 3 0 true",
            rand::rng().random::<u32>(),
            file.display()
        ));
        worker.answer_to("working");
        worker
    };
    let mut workers: Vec<Worker> = (0..4).map(|_| spawn()).collect();
    let mut killed = HashMap::new();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(8) {
        std::thread::sleep(ms(rand::rng().random_range(300..900)));
        let victim = rand::rng().random_range(0..workers.len());
        let worker = &mut workers[victim];
        if rand::rng().random_range(0..3) == 0 {
            // Pause the process beyond the lease, in the middle of anything.
            worker.stop();
            std::thread::sleep(lease + ms(200));
            worker.cont();
        } else {
            killed.insert(worker.pid().to_string(), monotonic_ns());
            worker.kill();
            workers[victim] = spawn();
        }
    }
    let now = monotonic_ns();
    drop(workers);
    let history = History::read(&std::fs::read_to_string(&file).unwrap(), &killed, now);
    println!(
        "{} holds by {} processes, {} of them killed",
        history.holds.len(),
        killed.len() + 4,
        killed.len()
    );
    assert!(history.holds.len() > 200, "{}", history.holds.len());
    history.assert_no_clashes();
}
