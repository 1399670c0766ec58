//! Locks that a replica must have compared with those that need none, in alternating rounds.
//! `cargo bench --bench replicas`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::{Duration, Instant};

use nestlock::LockClient;
use nestlock_embedded::SpawnedSentinel;
use support::{far::Far, median, pairs, report};

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(500);
const FAR: Duration = Duration::from_millis(50);

/// Returns how long an acquire takes, in milliseconds.
async fn to_lock(client: &LockClient) -> f64 {
    let lock = client.reentrant_lock("lock").expect("a name");
    let from = Instant::now();
    let guard = lock.lock().await.expect("the lock");
    let took = from.elapsed().as_secs_f64() * 1e3;
    guard.unlock().await.expect("the unlock");
    took
}

#[tokio::main]
async fn main() {
    let group = SpawnedSentinel::start(1, 1).expect("a group");
    let master = group.servers()[0].addr();
    let far = Far::start(master);
    let client = async |replicas, url: String| {
        LockClient::builder()
            .replicas(replicas, Duration::from_millis(500))
            .connect(url)
            .await
            .expect("the server")
    };
    let near = format!("redis://{master}");
    let (plain, copied) = (client(0, near.clone()).await, client(1, near).await);
    for tasks in [1, 16, 64] {
        let (mut ratios, mut figures) = (Vec::new(), (Vec::new(), Vec::new()));
        for _ in 0..ROUNDS {
            let (without, with) = (
                pairs(&plain, tasks, ROUND).await,
                pairs(&copied, tasks, ROUND).await,
            );
            ratios.push(with / without);
            figures.0.push(without);
            figures.1.push(with);
        }
        let bound = if tasks == 64 { ">= 0.5" } else { "" };
        report(
            &format!("{tasks} tasks, pairs/s with replicas(1) / without"),
            median(&mut ratios),
            bound,
        );
        report("  without", median(&mut figures.0), "");
        report("  with", median(&mut figures.1), "");
    }
    let mut more = Vec::new();
    for _ in 0..500 {
        more.push(to_lock(&copied).await - to_lock(&plain).await);
    }
    report(
        "what replicas(1) adds to a lock, in microseconds",
        median(&mut more) * 1e3,
        "",
    );
    let (plain, copied) = (client(0, far.url()).await, client(1, far.url()).await);
    for client in [&plain, &copied] {
        to_lock(client).await;
    }
    far.round_trip(FAR);
    let mut trips = Vec::new();
    for _ in 0..20 {
        trips.push((to_lock(&copied).await - to_lock(&plain).await) / (FAR.as_secs_f64() * 1e3));
    }
    report(
        "the same 50 ms away, in round trips",
        median(&mut trips),
        "0",
    );
}
