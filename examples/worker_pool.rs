//! A pool of workers over job ids: one worker at a time, in any process, runs each job, and the
//! dispatcher passes each guard to the task that does the work.
//!
//! Run: `cargo run --example worker_pool`  (uses `NESTLOCK_URL`, or an embedded server)
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

/// The number of workers at each job now.
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
    println!("{done} runs, and never two workers at one job");
    assert!(done >= JOBS);
    Ok(())
}

async fn pool(client: LockClient, at_work: AtWork) -> nestlock::Result<usize> {
    let mut workers = JoinSet::new();
    for job in 0..JOBS {
        // busy: another process runs this job, so continue with the next one
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

/// Runs a job. The guard now belongs to this task, and no other client holds the job's lock.
async fn work(guard: LockGuard, job: usize, at_work: AtWork) -> nestlock::Result<()> {
    guard
        .run_until_lost(async {
            assert_eq!(
                at_work[job].fetch_add(1, SeqCst),
                0,
                "two workers at job {job}"
            );
            sleep(Duration::from_millis(20)).await;
            at_work[job].fetch_sub(1, SeqCst);
        })
        .await?;
    guard.unlock().await
}
