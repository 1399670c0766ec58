//! A job that runs once for each tick, on the first of four replicas that finds it due. No tick is
//! missed when one replica stops.
//!
//! Run: `cargo run -p nestlock-recipes --features cron --example once_per`
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    error::Error,
    sync::{Arc, Mutex},
    time::Duration,
};

use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::once_per::{Missed, Ticks, once_per};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    // the replicas that ran each tick; "30 3 * * *" would be 03:30 UTC
    let (runs, mut replicas) = (Arc::new(Mutex::new(BTreeMap::new())), JoinSet::new());
    for replica in 0..4 {
        let client = LockClient::connect(server.url()).await?;
        let job = once_per(&client, "report", Ticks::cron("* * * * * *")?)?.missed(Missed::All(10));
        let runs = Arc::clone(&runs);
        replicas.spawn(async move {
            let forever = job.run_forever(|tick| {
                let runs = Arc::clone(&runs);
                async move {
                    sleep(Duration::from_millis(20)).await;
                    let mut runs = runs.lock().expect("no job panics");
                    runs.entry(tick.number() / 1000)
                        .or_insert_with(Vec::new)
                        .push(replica);
                }
            });
            // the first replica stops after 2 s, even in the middle of a job
            timeout(
                Duration::from_millis(if replica == 0 { 2_000 } else { 5_000 }),
                forever,
            )
            .await
        });
    }
    while let Some(replica) = replicas.join_next().await {
        if let Ok(closed) = replica? {
            return Err(closed.into());
        }
    }
    let runs = runs.lock().expect("no job panics");
    let mut again = 0;
    for (tick, replicas) in &*runs {
        println!("tick {tick}: run by replica {replicas:?}");
        again += replicas.len() - 1;
    }
    // each of the four replicas may have been stopped between the end of its job and the mark
    assert!(again <= 4, "all other ticks run once");
    let (first, last) = (
        runs.keys().next().ok_or("no tick")?,
        runs.keys().last().ok_or("no tick")?,
    );
    assert_eq!(
        last - first + 1,
        u64::try_from(runs.len())?,
        "no tick is missing"
    );
    Ok(())
}
