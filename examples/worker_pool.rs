//! A pool of workers over job ids: each job is done by one worker at a time, of whatever process, and the dispatcher hands
//! each guard to the task that works.
//!
//! Run: `cargo run --example worker_pool`  (uses `NESTLOCK_URL`, else an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use nestlock::{LockClient, LockGuard};
use tokio::{task::JoinSet, time::sleep};

const JOBS: usize = 5;

/// How many work at each job.
type AtWork = Arc<[AtomicUsize; JOBS]>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    // three clients stand for three processes with the same list of jobs
    let (at_work, mut pools) = (AtWork::default(), JoinSet::new());
    for _ in 0..3 {
        pools.spawn(pool(
            LockClient::connect(server.url()).await?,
            Arc::clone(&at_work),
        ));
    }
    let mut done = 0;
    while let Some(pool) = pools.join_next().await {
        done += pool??;
    }
    println!("{done} pieces of work, and never two workers at one job");
    assert!(done >= JOBS);
    Ok(())
}

async fn pool(client: LockClient, at_work: AtWork) -> nestlock::Result<usize> {
    let mut workers = JoinSet::new();
    for job in 0..JOBS {
        // busy: another process is at it, and this one goes on to the next
        let Some(guard) = client.mutex(format!("job:{job}"))?.try_lock().await? else {
            continue;
        };
        workers.spawn(work(guard, job, Arc::clone(&at_work)));
    }
    let mut done = 0;
    while let Some(worker) = workers.join_next().await {
        worker.expect("a worker does not panic")?;
        done += 1;
    }
    client.shutdown().await?;
    Ok(done)
}

/// The guard is this task's now; whoever locked, nobody else has the job.
async fn work(guard: LockGuard, job: usize, at_work: AtWork) -> nestlock::Result<()> {
    guard
        .run_until_lost(async {
            assert_eq!(at_work[job].fetch_add(1, SeqCst), 0, "two at job {job}");
            sleep(Duration::from_millis(20)).await;
            at_work[job].fetch_sub(1, SeqCst);
        })
        .await?;
    guard.unlock().await
}
