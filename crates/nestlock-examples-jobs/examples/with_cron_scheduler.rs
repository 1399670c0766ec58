//! A schedule of tokio-cron-scheduler on three replicas: each tick runs on one of them.
//!
//! Run: `cargo run -p nestlock-examples-jobs --example with_cron_scheduler`  (uses an embedded
//! server)
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    error::Error,
    sync::{Arc, Mutex},
    time::Duration,
};

use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::once_per::{OncePer, Ticks, once_per};
use tokio_cron_scheduler::{Job, JobScheduler};

/// Which replica ran each tick, and how many times.
type Runs = Arc<Mutex<BTreeMap<u64, Vec<u32>>>>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let (runs, mut replicas) = (Runs::default(), Vec::new());
    // three clients stand for three replicas
    for replica in 1..=3 {
        let client = LockClient::connect(server.url()).await?;
        // the same times as those of the schedule
        let report = once_per(&client, "report", Ticks::every(Duration::from_secs(1)))?;
        let scheduler = JobScheduler::new().await?;
        scheduler.add(job(report, replica, &runs)?).await?;
        scheduler.start().await?;
        replicas.push((client, scheduler));
    }
    tokio::time::sleep(Duration::from_millis(3500)).await;
    for (client, mut scheduler) in replicas {
        scheduler.shutdown().await?;
        client.shutdown().await?;
    }

    let runs = runs.lock().expect("no job panics");
    for (tick, replicas) in runs.iter() {
        println!("tick {tick}: ran on replica {replicas:?}");
        assert_eq!(replicas.len(), 1);
    }
    assert!(runs.len() >= 2);
    Ok(())
}

fn job(report: OncePer, replica: u32, runs: &Runs) -> Result<Job, Box<dyn Error>> {
    let runs = Arc::clone(runs);
    Ok(Job::new_async("* * * * * *", move |_, _| {
        let (report, runs) = (report.clone(), Arc::clone(&runs));
        Box::pin(async move {
            let ran = report.run(|tick| async move {
                let mut runs = runs.lock().expect("no job panics");
                runs.entry(tick.number()).or_default().push(replica);
            });
            // The server is away. This tick is not run; the next one may be. That another replica
            // runs it, or has run it, is no error
            if let Err(error) = ran.await {
                println!("replica {replica}: {error}");
            }
        })
    })?)
}
