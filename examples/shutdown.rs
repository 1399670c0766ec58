//! How do I release all locks before the process ends? A worker gets SIGTERM, or ctrl-c, in the
//! middle of its work: both of its locks are free at once, and not only when their leases end.
//!
//! Run: `cargo run --example shutdown`  (uses `NESTLOCK_URL`, or an embedded server; sends itself
//! SIGTERM)
#![allow(clippy::print_stdout)]

mod support;

use std::{future::Future, process, time::Duration};

use nestlock::{Error, Lock, LockClient, LockGuard, RedLockOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    // the clients of a RedLock; both use one server here, to keep the example short
    let clients = [
        LockClient::connect(server.url()).await?,
        LockClient::connect(server.url()).await?,
    ];
    let members: [Lock; 2] = [
        clients[0].reentrant_lock("a")?,
        clients[1].reentrant_lock("b")?,
    ];
    let quorum = clients[0].red_lock_over(members, RedLockOptions::new())?;

    // listen for the signal before any lock is held
    let stop = stop_signal()?;
    let held = [
        clients[0].reentrant_lock("plain")?.lock().await?,
        quorum.lock().await?,
    ];
    println!(
        "holding {:?}; ctrl-c ends this",
        held.iter().map(LockGuard::name).collect::<Vec<_>>()
    );
    process::Command::new("kill")
        .args(["-TERM", &process::id().to_string()])
        .status()?;

    tokio::select! {
        () = work(&held) => println!("the work is done"),
        () = stop => {
            // rejects waiters, releases all holds, also those of other tasks, and waits for the
            // server's reply
            for client in &clients {
                client.shutdown().await?;
            }
            println!("stopped: released before the process ends");
        }
    }

    assert!(
        matches!(held[0].lost().await, Error::Lost { .. }) && held[1].is_lost(),
        "each guard reports the loss"
    );
    let observer = LockClient::connect(server.url()).await?;
    for name in ["plain", "a", "b"] {
        assert!(
            !observer.reentrant_lock(name)?.is_locked().await?,
            "{name} is still held"
        );
    }
    Ok(())
}

async fn work(_held: &[LockGuard]) {
    tokio::time::sleep(Duration::from_secs(60)).await;
}

/// Resolves at SIGTERM, which init systems and orchestrators send, or at ctrl-c.
fn stop_signal() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut terminate, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
