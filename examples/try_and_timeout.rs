//! Without waiting, waiting with a limit, and giving up midway: `try_lock`, `try_lock_for`, and a
//! dropped `lock`.
//!
//! Run: `cargo run --example try_and_timeout`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use nestlock::LockClient;
use tokio::time::{sleep, timeout};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    // two clients stand for two machines
    let (ours, theirs) = (
        LockClient::connect(server.url()).await?,
        LockClient::connect(server.url()).await?,
    );
    let (lock, their_lock) = (
        ours.reentrant_lock("report")?,
        theirs.reentrant_lock("report")?,
    );
    let held = their_lock.lock().await?;

    // busy is not an error: it is None
    let guard = lock.try_lock().await?;
    println!(
        "try_lock:              {}",
        if guard.is_some() { "acquired" } else { "busy" }
    );
    assert!(guard.is_none());

    let start = Instant::now();
    let guard = lock.try_lock_for(Duration::from_millis(200)).await?;
    println!("try_lock_for 200 ms:   busy after {:?}", start.elapsed());
    assert!(guard.is_none() && start.elapsed() >= Duration::from_millis(200));

    // any acquire may be dropped: a timeout around it leaves nothing held
    let given_up = timeout(Duration::from_millis(50), lock.lock()).await;
    println!(
        "lock, dropped midway:  {}",
        if given_up.is_err() {
            "given up"
        } else {
            "acquired"
        }
    );
    assert!(given_up.is_err());

    let release = tokio::spawn(async move {
        sleep(Duration::from_millis(300)).await;
        held.unlock().await
    });
    let start = Instant::now();
    let guard = lock
        .try_lock_for(Duration::from_secs(20))
        .await?
        .ok_or("still busy after 20 s")?;
    println!(
        "try_lock_for 20 s:     acquired after {:?}, when it was released",
        start.elapsed()
    );
    release.await??;
    guard.unlock().await?;

    ours.idle().await;
    assert!(!lock.is_locked().await?);
    ours.shutdown().await?;
    theirs.shutdown().await?;
    Ok(())
}
