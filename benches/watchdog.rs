//! 100,000 held locks: renewal calls per tick, locks lost, memory per held lock and per waiter.
//!
//! `cargo bench --bench watchdog` (Linux: memory is read from /proc).
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use fred::{clients::Client, interfaces::ClientLike, types::InfoKind};
use nestlock::{LockClient, LockGuard};
use support::{bare, report, resident, server};
use tokio::sync::Semaphore;

const LOCKS: usize = 100_000;
const WAITERS: usize = 20_000;
const TICKS: u32 = 5;
const WATCHDOG: Duration = Duration::from_secs(6);

async fn scripts_run(client: &Client) -> u64 {
    let stats: String = client
        .info(Some(InfoKind::CommandStats))
        .await
        .expect("INFO");
    let calls = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="));
    calls
        .and_then(|calls| calls.split(',').next())
        .map_or(0, |calls| calls.parse().expect("a number"))
}

async fn take_all(client: &LockClient) -> Vec<LockGuard> {
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                let mut guards = Vec::new();
                for lock in (task..LOCKS).step_by(64) {
                    let lock = client
                        .reentrant_lock(format!("held:{lock:06}"))
                        .expect("a name");
                    guards.push(lock.lock().await.expect("the lock"));
                }
                guards
            })
        })
        .collect();
    let mut guards = Vec::with_capacity(LOCKS);
    for task in tasks {
        guards.append(&mut task.await.expect("a task"));
    }
    guards
}

async fn held(client: &LockClient, bare: &Client) {
    let before = resident();
    let start = Instant::now();
    let guards = take_all(client).await;
    println!("    {LOCKS} locks acquired in {:?}", start.elapsed());
    report(
        "client memory per held lock, in bytes",
        (resident() - before) / LOCKS as f64,
        "<= 722",
    );

    tokio::time::sleep(WATCHDOG / 3).await;
    let calls = scripts_run(bare).await;
    tokio::time::sleep(WATCHDOG / 3 * TICKS).await;
    let calls = scripts_run(bare).await - calls;
    report(
        "renewal script calls per tick, 100,000 locks",
        calls as f64 / f64::from(TICKS),
        "<= 400",
    );
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    report("locks lost in 5 ticks", lost as f64, "0");
    let least = guards
        .iter()
        .map(LockGuard::remaining)
        .min()
        .unwrap_or_default();
    report(
        "shortest remaining lease after 5 ticks, as a share of it",
        least.as_secs_f64() / WATCHDOG.as_secs_f64(),
        "",
    );

    let start = Instant::now();
    drop(guards);
    client.idle().await;
    println!(
        "    {LOCKS} guards dropped and released in {:?}",
        start.elapsed()
    );
}

async fn waiting(client: &LockClient, url: &str) {
    let other = LockClient::connect(url).await.expect("a client");
    let guard = other
        .reentrant_lock("wanted")
        .expect("a name")
        .lock()
        .await
        .expect("the lock");
    // the tasks and their locks belong to the caller, and exist before
    let start = Arc::new(Semaphore::new(0));
    let waiters: Vec<_> = (0..WAITERS)
        .map(|_| {
            let (lock, start) = (
                client.reentrant_lock("wanted").expect("a name"),
                Arc::clone(&start),
            );
            tokio::spawn(async move {
                start.acquire().await.expect("open").forget();
                lock.lock().await.map(drop)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = resident();
    for _ in 0..WAITERS / 200 {
        start.add_permits(200);
        // let them fall asleep: this measures a waiter, and not a burst of requests
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    report(
        "client memory per waiter, in bytes",
        (resident() - before) / WAITERS as f64,
        "<= 986",
    );
    client.shutdown().await.expect("a clean end");
    for waiter in waiters {
        assert!(waiter.await.expect("a task").is_err(), "turned away");
    }
    guard.unlock().await.expect("the unlock");
}

/// Runs each part in its own process: memory that one part has freed must not hide what the next
/// one needs.
#[tokio::main]
async fn main() {
    let server = server();
    let url = server.url();
    match std::env::var("NESTLOCK_BENCH_PART").as_deref() {
        Ok(part) => {
            let bare = bare(url).await;
            let client = LockClient::builder()
                .watchdog_timeout(WATCHDOG)
                .connect(url)
                .await
                .expect("a client");
            if part == "held" {
                held(&client, &bare).await;
            } else {
                waiting(&client, url).await;
            }
        }
        Err(_) => {
            for part in ["held", "waiting"] {
                let this = std::env::current_exe().expect("this program");
                let mut process = std::process::Command::new(this);
                let status = process
                    .env("NESTLOCK_URL", url)
                    .env("NESTLOCK_BENCH_PART", part)
                    .status();
                assert!(status.expect("a process").success(), "{part}");
            }
        }
    }
}
