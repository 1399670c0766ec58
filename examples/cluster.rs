//! Locks in a cluster: their slots, a slot that moves, and a master that dies while they are held.
//!
//! Run: `cargo run --example cluster`  (starts its own cluster, with `redis-server` or
//! `valkey-server`)
#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use nestlock::LockClient;
use nestlock_embedded::SpawnedCluster;
use tokio::time::{sleep, timeout};

const LONG: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = SpawnedCluster::start(3, 3)?;
    let builder = || LockClient::builder().outage_patience(LONG);
    // an acquire succeeds only when a replica has it, too
    let client = builder()
        .replicas(1, Duration::from_millis(500))
        .connect(cluster.url())
        .await?;
    let other = builder().connect(cluster.url()).await?;
    println!("{}", client.topology());

    let names = ["invoice:7", "invoice:8", "invoice:9"];
    let mut guards = Vec::new();
    for name in names {
        let guard = client.fair_lock(name)?.lock().await?;
        let slot = SpawnedCluster::slot_of(name);
        println!(
            "{name} is ours: slot {slot}, replicas that have it: {}",
            guard.replicas().unwrap_or(0)
        );
        guards.push(guard);
    }

    // a lock moves with its slot
    let slot = SpawnedCluster::slot_of(names[0]);
    let from = cluster.master_of(slot)?;
    let to = cluster
        .masters()?
        .into_iter()
        .find(|master| master.addr() != from.addr())
        .ok_or("another master")?;
    cluster.migrate(slot, to)?;
    assert!(other.fair_lock(names[0])?.try_lock().await?.is_none());
    guards[0].extend(Duration::from_secs(30)).await?;
    println!(
        "slot {slot} has moved from {} to {}, and {} is still ours",
        from.addr(),
        to.addr(),
        names[0]
    );

    // the new master of that slot dies while another client waits for the lock
    let waits = other.fair_lock(names[0])?;
    let waiter = tokio::spawn(async move { waits.lock().await?.unlock().await });
    let killed = Instant::now();
    to.kill()?;
    let is_ours = |slot: u16| {
        move |node: &nestlock::TopologyNode| node.slots.iter().any(|slots| slots.contains(&slot))
    };
    let address = to.addr().to_string();
    timeout(LONG, async {
        while client
            .topology()
            .nodes
            .iter()
            .find(|node| is_ours(slot)(node))
            .is_none_or(|node| node.address == address)
        {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await?;
    println!(
        "{} is killed; after {:.1} s this client knows:",
        to.addr(),
        killed.elapsed().as_secs_f64()
    );
    println!("{}", client.topology());

    for guard in guards {
        guard.unlock().await?;
    }
    timeout(LONG, waiter).await???;
    println!("all locks were released, and the waiter has had its turn");
    Ok(())
}
