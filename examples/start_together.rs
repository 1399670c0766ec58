//! Starts the workers of all processes at the same moment, and waits for their end, with two latches.
//!
//! Run: `cargo run --example start_together`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use nestlock::{CountDownLatch, LockClient};
use tokio::{task::JoinSet, time::sleep};

const WORKERS: u32 = 4;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let leader = LockClient::connect(server.url()).await?;
    // the names of one run: no worker of an earlier one counts in it
    let run = format!("load-test:{}", std::process::id());
    let (go, done) = latches(&leader, &run)?;
    go.try_set_count(1).await?;
    done.try_set_count(WORKERS).await?;

    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        // each stands for a process
        let client = LockClient::connect(server.url()).await?;
        workers.spawn(work(client, run.clone(), worker));
    }
    sleep(Duration::from_millis(200)).await;
    go.count_down().await?;
    // a worker that dies would keep this waiting
    assert!(done.wait_for(Duration::from_secs(30)).await?);

    let started: Vec<Instant> = workers
        .join_all()
        .await
        .into_iter()
        .collect::<Result<_, _>>()?;
    let spread = started
        .iter()
        .max()
        .zip(started.iter().min())
        .map(|(last, first)| *last - *first);
    println!(
        "{WORKERS} workers began within {:?}, and all are done",
        spread.unwrap_or_default()
    );
    Ok(())
}

fn latches(client: &LockClient, run: &str) -> nestlock::Result<(CountDownLatch, CountDownLatch)> {
    let latch = |what| client.count_down_latch(format!("{run}:{what}"));
    Ok((latch("go")?, latch("done")?))
}

/// Waits for the start, works, and returns when it began.
async fn work(client: LockClient, run: String, worker: u32) -> nestlock::Result<Instant> {
    let (go, done) = latches(&client, &run)?;
    go.wait().await?;
    let began = Instant::now();
    sleep(Duration::from_millis(50)).await;
    // once for this worker, even if it is started again
    done.count_down_as(&format!("worker-{worker}")).await?;
    Ok(began)
}
