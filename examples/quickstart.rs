//! A nested critical section: a function that holds the lock calls another one that acquires the
//! same lock.
//!
//! Run: `cargo run --example quickstart`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use nestlock::LockClient;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let client = LockClient::connect(server.url()).await?;

    checkout(&client).await?;

    let stock = client.reentrant_lock("stock")?;
    let locked = stock.is_locked().await?;
    println!("after:    locked: {locked}");
    assert!(!locked);
    client.shutdown().await?;
    Ok(())
}

/// Acquires the lock, and calls a function that acquires it as well. The owner is the same task, so
/// it does not wait for itself.
async fn checkout(client: &LockClient) -> nestlock::Result<()> {
    let stock = client.reentrant_lock("stock")?;
    let guard = stock.lock().await?;
    println!(
        "checkout: hold count {}",
        stock.hold_count(&guard.owner()).await?
    );
    reserve(client).await?;
    let holds = stock.hold_count(&guard.owner()).await?;
    println!("checkout: hold count {holds}");
    assert_eq!(holds, 1);
    guard.unlock().await
}

async fn reserve(client: &LockClient) -> nestlock::Result<()> {
    let stock = client.reentrant_lock("stock")?;
    let guard = stock.lock().await?;
    let holds = stock.hold_count(&guard.owner()).await?;
    println!("reserve:  hold count {holds}");
    assert_eq!(holds, 2);
    guard.unlock().await
}
