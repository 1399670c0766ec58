//! Many readers read an account while a writer updates it: does any of them see half an update?
//!
//! Run: `cargo run --example read_write`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    error::Error,
    process,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use nestlock::{
    LockClient,
    fred::prelude::{Builder, ClientLike, Config, KeysInterface},
};
use tokio::{time::sleep, try_join};

const ROUNDS: usize = 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = support::server()?;
    let redis = Builder::from_config(Config::from_url(server.url())?).build()?;
    redis.init().await?;
    let client = LockClient::connect(server.url()).await?;
    let account = format!("nestlock-example:{}", process::id());
    let (debit, credit) = (format!("{account}:debit"), format!("{account}:credit"));
    let lock = client.read_write_lock(&account)?;
    let (reading, together) = (AtomicUsize::new(0), AtomicUsize::new(0));

    // one writer: for a moment, the two sides differ
    let write = nestlock::OwnerId::scope(async {
        for _ in 0..ROUNDS {
            let guard = lock.write_lock().lock().await?;
            redis.incr::<i64, _>(&debit).await?;
            sleep(Duration::from_millis(2)).await;
            redis.incr::<i64, _>(&credit).await?;
            guard.unlock().await?;
        }
        Ok::<_, Box<dyn Error>>(())
    });
    // three readers: each is a separate owner, and sees equal sides
    let read = || {
        nestlock::OwnerId::scope(async {
            for _ in 0..ROUNDS {
                let guard = lock.read_lock().lock().await?;
                together.fetch_max(
                    reading.fetch_add(1, Ordering::Relaxed) + 1,
                    Ordering::Relaxed,
                );
                let one: Option<i64> = redis.get(&debit).await?;
                sleep(Duration::from_millis(2)).await;
                let other: Option<i64> = redis.get(&credit).await?;
                assert_eq!(one, other, "half an update");
                reading.fetch_sub(1, Ordering::Relaxed);
                guard.unlock().await?;
            }
            Ok::<_, Box<dyn Error>>(())
        })
    };
    try_join!(write, read(), read(), read())?;

    let booked: i64 = redis.del(vec![debit, credit]).await?;
    println!(
        "no, in {ROUNDS} updates; up to {} concurrent readers",
        together.load(Ordering::Relaxed)
    );
    assert_eq!(booked, 2, "both sides were there");
    assert!(
        together.load(Ordering::Relaxed) > 1,
        "readers waited for each other"
    );
    client.shutdown().await?;
    redis.quit().await?;
    Ok(())
}
