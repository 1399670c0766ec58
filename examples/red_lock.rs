//! How do I lock over several independent servers, one of which may fail? One of three servers ends
//! while the lock is held. Then a second one ends, and the acquire fails with an error.
//!
//! Run: `cargo run --example red_lock`  (three embedded servers, as a RedLock over one server would
//! prove nothing)
#![allow(clippy::print_stdout)]

use std::time::Duration;

use nestlock::{Error, LockClient, RedLockOptions};
use nestlock_embedded::EmbeddedServer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let server = EmbeddedServer::start()?;
        clients.push(LockClient::connect(server.url()).await?);
        servers.push(server);
    }
    println!("three embedded servers: locks are shared only within this process");

    // the same record as redsync, node-redlock and RedLock-Hyperf: all of them exclude each other
    let report = LockClient::red_lock(&clients, "report", RedLockOptions::new().tries(3))?;
    let guard = report.lock().await?;
    println!(
        "held on {} of 3 servers, for {:?} without a renewal",
        guard.members().len(),
        guard.remaining()
    );

    drop(servers.pop());
    guard.extend(Duration::from_secs(20)).await?;
    println!(
        "one server is gone, two still agree: valid for {:?}",
        guard.remaining()
    );
    guard.unlock().await?;

    let Some(guard) = report.try_lock_for(Duration::from_secs(5)).await? else {
        return Err("busy for 5 s".into());
    };
    println!("acquired on {} of 3", guard.members().len());
    guard.unlock().await?;

    drop(servers.pop());
    match report.try_lock().await {
        Err(error @ Error::NoQuorum { .. }) => println!("{error}"),
        other => return Err(format!("one of three is no majority: {other:?}").into()),
    }
    Ok(())
}
