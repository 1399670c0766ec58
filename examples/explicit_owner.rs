//! Owners other than the calling task: named owners, hand-over, and branches of a `join!`.
//!
//! Run: `cargo run --example explicit_owner`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use nestlock::{AcquireOptions, Lock, LockClient, OwnerId, Result};
use tokio::time::sleep;

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let (client, other) = (
        LockClient::connect(server.url()).await?,
        LockClient::connect(server.url()).await?,
    );

    // a named owner: every task that uses it shares its holds
    let lock = client.reentrant_lock("job")?;
    let options = AcquireOptions::new().owner(client.owner("job-7")?);
    let first = lock.lock_with(options.clone()).await?;
    let second = tokio::spawn({
        let (lock, options) = (lock.clone(), options.clone());
        async move { lock.lock_with(options).await }
    });
    let second = second.await??;
    let holds = lock.hold_count(&first.owner()).await?;
    println!("job-7 holds the lock {holds} times, from two tasks");
    assert_eq!(holds, 2);
    second.unlock().await?;
    first.unlock().await?;

    // leave the hold to its lease, send its owner as text, and release it elsewhere
    let guard = lock
        .lock_with(options.lease(Duration::from_secs(60)))
        .await?;
    let ticket = guard.leave_to_lease().to_string();
    let there = other.reentrant_lock("job")?;
    assert!(there.try_lock().await?.is_none());
    there.release(&ticket.parse()?).await?;
    println!(
        "released by another client: locked: {}",
        there.is_locked().await?
    );
    assert!(!there.is_locked().await?);

    // branches of a join! are one task, and therefore one owner: both acquire. A scope makes a
    // branch a separate owner
    let lock = client.reentrant_lock("branches")?;
    let (inside, most) = (AtomicU32::new(0), AtomicU32::new(0));
    let (a, b) = tokio::join!(branch(&lock, &inside, &most), branch(&lock, &inside, &most));
    a?;
    b?;
    let together = most.swap(0, Ordering::SeqCst);
    let (a, b) = tokio::join!(
        OwnerId::scope(branch(&lock, &inside, &most)),
        OwnerId::scope(branch(&lock, &inside, &most)),
    );
    a?;
    b?;
    let scoped = most.load(Ordering::SeqCst);
    println!("concurrent branches: {together} without a scope, {scoped} with one");
    assert_eq!((together, scoped), (2, 1));

    client.shutdown().await?;
    other.shutdown().await?;
    Ok(())
}

/// Acquires the lock, and counts how many branches hold it at the same time.
async fn branch(lock: &Lock, inside: &AtomicU32, most: &AtomicU32) -> Result<()> {
    let guard = lock.lock().await?;
    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
    sleep(Duration::from_millis(50)).await;
    inside.fetch_sub(1, Ordering::SeqCst);
    guard.unlock().await
}
