//! A holder is paused past its lease, wakes up and writes: the lock alone does not stop it, but the
//! fencing token does.
//!
//! Run: `cargo run --example fencing`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{error::Error, process, time::Duration};

use nestlock::{
    AcquireOptions, LockClient,
    fred::prelude::{Builder, ClientLike, Config, KeysInterface},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = support::server()?;
    let redis = Builder::from_config(Config::from_url(server.url())?).build()?;
    redis.init().await?;
    // two clients stand for two processes
    let (paused, next) = (
        LockClient::connect(server.url()).await?,
        LockClient::connect(server.url()).await?,
    );
    let name = format!("nestlock-example:{}", process::id());
    let (guarded, plain) = (format!("{name}:guarded"), format!("{name}:plain"));

    // the first holder checks its lock, and is paused
    let short = AcquireOptions::new().lease(Duration::from_millis(200));
    let late = paused.fenced_lock(&name)?.lock_with(short).await?;
    let late_token = late.fencing_token().ok_or("a fenced lock has tokens")?;
    assert!(!late.is_lost());
    println!("the first holder has token {late_token}, and is paused");

    // its lease ends; the next holder reads, which makes lower tokens invalid, and writes
    let guard = next.fenced_lock(&name)?.lock().await?;
    let token = guard.fencing_token().ok_or("a fenced lock has tokens")?;
    assert!(token > late_token);
    assert_eq!(next.fenced_get(&guarded, token).await?, None);
    next.fenced_set(&guarded, "from the next holder", token)
        .await?;
    redis
        .set::<(), _, _>(&plain, "from the next holder", None, None, false)
        .await?;
    println!("the next holder has token {token}, and writes");

    // the first holder wakes up, and continues where it was
    redis
        .set::<(), _, _>(&plain, "late", None, None, false)
        .await?;
    let refused = paused.fenced_set(&guarded, "late", late_token).await;
    println!(
        "the first holder wakes up, and writes: {}",
        refused.as_ref().err().ok_or("it was not refused")?
    );
    assert!(matches!(refused, Err(nestlock::Error::StaleToken { seen, .. }) if seen == token));

    let (without, with) = (
        redis.get::<String, _>(&plain).await?,
        redis.get::<String, _>(&guarded).await?,
    );
    println!("without the token the value is {without:?}, with it {with:?}");
    assert_eq!((&*without, &*with), ("late", "from the next holder"));

    guard.unlock().await?;
    drop(late);
    for key in [
        &guarded,
        &plain,
        &format!("nestlock_fence:{{{guarded}}}"),
        &format!("redisson_lock_token:{{{name}}}"),
    ] {
        redis.del::<(), _>(key).await?;
    }
    paused.shutdown().await?;
    next.shutdown().await?;
    redis.quit().await?;
    Ok(())
}
