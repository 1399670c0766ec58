//! Locks that are shared with Python's `python-redis-lock`, and how to free one without an expiry
//! whose holder has died.
//!
//! Run: `cargo run --example signal_lock`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::time::{Duration, Instant};

use nestlock::{LockClient, SignalOptions};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    // the keys are `lock:jobs:...` and `lock-signal:jobs:...`; in Python, this lock is
    // redis_lock.Lock(redis, "jobs:import")
    let connect = || {
        LockClient::builder()
            .name_prefix("jobs:")
            .connect(server.url())
    };
    let (old, new) = (connect().await?, connect().await?);

    // expire=30, auto_renewal=True
    let guard = old.signal_lock("import")?.lock().await?;
    let lock = new.signal_lock("import")?;
    let waiter = tokio::spawn(async move { lock.lock().await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let released = Instant::now();
    guard.unlock().await?; // one signal, for one waiter in any process
    let guard = waiter.await??;
    println!("the waiter was woken after {:?}", released.elapsed());
    guard.unlock().await?;

    // expire=None: held until it is released, whatever happens
    let forever = SignalOptions::new().without_expiry();
    let owner = old
        .signal_lock_with("report", forever)?
        .lock()
        .await?
        .leave_to_lease();
    let report = new.signal_lock("report")?;
    assert_eq!(report.remaining_lease().await?, None);
    println!("{owner} holds it without an expiry; then its process dies");

    // its successor knows that no process uses these locks any more
    let freed = new.maintenance().reset_all_signal_locks().await?;
    println!("{freed} lock was freed");
    assert_eq!(freed, 1);
    report.try_lock().await?.expect("free").unlock().await?;
    old.shutdown().await?;
    new.shutdown().await?;
    Ok(())
}
