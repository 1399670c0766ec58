//! A nested critical section: two functions that each take the same lock, one calls the other.
//!
//! Run: `cargo run --example quickstart`  (uses NESTLOCK_URL, else a private redis-server from PATH)

mod support;

use nestlock::{LockClient, RLock};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let client = LockClient::connect(server.url()).await?;

    checkout(&client).await?;

    let stock = client.reentrant_lock("stock")?;
    println!("after:    locked: {}", stock.is_locked().await?);
    client.shutdown().await?;
    Ok(())
}

/// Takes the lock, and calls a function that takes it as well: the same task, so that it does not wait for itself.
async fn checkout(client: &LockClient) -> nestlock::Result<()> {
    let stock = client.reentrant_lock("stock")?;
    let guard = stock.lock().await?;
    println!("checkout: hold count {}", stock.hold_count(&guard.owner()).await?);
    reserve(client).await?;
    println!("checkout: hold count {}", stock.hold_count(&guard.owner()).await?);
    guard.unlock().await
}

async fn reserve(client: &LockClient) -> nestlock::Result<()> {
    let stock = client.reentrant_lock("stock")?;
    let guard = stock.lock().await?;
    println!("reserve:  hold count {}", stock.hold_count(&guard.owner()).await?);
    guard.unlock().await
}
