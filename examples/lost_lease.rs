//! The lease ends before the work is done: how the holder is notified, and stops.
//!
//! Run: `cargo run --example lost_lease`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use nestlock::{AcquireOptions, Error, LockClient, LossReason};
use tokio::time::sleep;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    // the watchdog renews at a third of its timeout: a process that stands still for the other two thirds
    // loses its locks
    let client = LockClient::builder()
        .watchdog_timeout(Duration::from_secs(4))
        .connect(server.url())
        .await?;
    let lock = client.reentrant_lock("import")?;
    // a fixed lease: the watchdog does not renew it
    let short = AcquireOptions::new().lease(Duration::from_millis(300));

    // as a future, for a select! loop
    let guard = lock.lock_with(short.clone()).await?;
    let start = Instant::now();
    let mut steps = 0;
    let loss = loop {
        tokio::select! {
            loss = guard.lost() => break loss,
            () = sleep(Duration::from_millis(20)) => steps += 1,
        }
    };
    println!("stopped after {steps} steps, {:?}: {loss}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(5) && guard.is_lost());

    // a release that comes too late is an error
    let late = guard.unlock().await;
    assert!(
        matches!(
            late,
            Err(Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            })
        ),
        "{late:?}"
    );

    // the same in one call: the work is dropped when the lock is lost
    let lock = client.reentrant_lock("export")?;
    let guard = lock.lock_with(short).await?;
    let outcome = guard.run_until_lost(sleep(Duration::from_secs(60))).await;
    println!("run_until_lost: {outcome:?}");
    assert!(matches!(outcome, Err(Error::Lost { .. })));
    drop(guard);

    // without a fixed lease the watchdog renews, however long the work takes
    let lock = client.reentrant_lock("backup")?;
    let guard = lock.lock().await?;
    let done = guard.run_until_lost(sleep(Duration::from_secs(5))).await;
    println!("renewed: {done:?}");
    done?;
    guard.unlock().await?;
    client.shutdown().await?;
    Ok(())
}
