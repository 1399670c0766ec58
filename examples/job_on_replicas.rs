//! A job that every replica of a service wants to run, once per interval: the first replica runs
//! it, and leaves the lock to its lease.
//!
//! Run: `cargo run --example job_on_replicas`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, LockClient};
use tokio::{task::JoinSet, time::sleep};

const INTERVAL: Duration = Duration::from_millis(400);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let (runs, mut replicas, start) = (Arc::new(AtomicU32::new(0)), JoinSet::new(), Instant::now());
    for number in 0..4 {
        let client = LockClient::connect(server.url()).await?;
        replicas.spawn(replica(number, client, Arc::clone(&runs)));
    }
    while let Some(replica) = replicas.join_next().await {
        replica??;
    }
    let (runs, took) = (runs.load(SeqCst), start.elapsed());
    println!("four replicas tried for {took:?}: {runs} runs");
    assert!(
        runs > 0 && INTERVAL * (runs - 1) <= took,
        "at most once per {INTERVAL:?}"
    );
    Ok(())
}

async fn replica(number: u32, client: LockClient, runs: Arc<AtomicU32>) -> nestlock::Result<()> {
    let lock = client.mutex("nightly-report")?;
    for _ in 0..100 {
        // the lease is the interval; it must be longer than the job
        if let Some(guard) = lock
            .try_lock_with(AcquireOptions::new().lease(INTERVAL))
            .await?
        {
            let run = runs.fetch_add(1, SeqCst) + 1;
            println!("replica {number}: run {run}");
            // not unlocked: until the lease ends, no replica runs it again
            guard.leave_to_lease();
        }
        sleep(Duration::from_millis(20)).await;
    }
    client.shutdown().await
}
