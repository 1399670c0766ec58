//! Four processes move coins by reading, computing and writing back: without the lock coins
//! disappear, with it none do.
//!
//! Run: `cargo run --example transfer`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{env, error::Error, process, time::Duration};

use nestlock::{
    LockClient,
    fred::prelude::{Builder, Client, ClientLike, Config, KeysInterface},
};
use tokio::time::{sleep, timeout};

const WORKERS: i64 = 4;
const COINS: i64 = 50;

type Outcome<T> = Result<T, Box<dyn Error>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [url, bank, worker, mode] = args.as_slice() {
        return timeout(
            Duration::from_secs(60),
            work(url, bank, worker, mode == "locked"),
        )
        .await?;
    }
    let server = support::server()?;
    let unlocked = run(server.url(), "unlocked").await?;
    let locked = run(server.url(), "locked").await?;
    println!("before:           {} coins", WORKERS * COINS);
    println!("without the lock: {unlocked} coins");
    println!("with the lock:    {locked} coins");
    assert!(unlocked < WORKERS * COINS, "the race did not show");
    assert_eq!(locked, WORKERS * COINS);
    Ok(())
}

/// Starts the workers, each with a separate account and one that they share. Returns the coins in
/// all accounts afterwards.
async fn run(url: &str, mode: &str) -> Outcome<i64> {
    let redis = connect(url).await?;
    let bank = format!("nestlock-example:{}:{mode}", process::id());
    let mut workers = Vec::new();
    for worker in (0..WORKERS).map(|worker| worker.to_string()) {
        redis
            .set::<(), _, _>(format!("{bank}:{worker}"), COINS, None, None, false)
            .await?;
        let mut command = tokio::process::Command::new(env::current_exe()?);
        workers.push(
            command
                .args([url, &bank, &worker, mode])
                .kill_on_drop(true)
                .spawn()?,
        );
    }
    for mut worker in workers {
        if !worker.wait().await?.success() {
            return Err("a worker failed".into());
        }
    }
    let mut total = 0;
    for account in (0..WORKERS)
        .map(|worker| worker.to_string())
        .chain(["shared".into()])
    {
        total += redis
            .getdel::<Option<i64>, _>(format!("{bank}:{account}"))
            .await?
            .unwrap_or(0);
    }
    redis.del::<(), _>(format!("{bank}:ready")).await?;
    redis.quit().await?;
    Ok(total)
}

/// Runs one worker process, which moves its coins to the shared account, one by one.
async fn work(url: &str, bank: &str, worker: &str, locked: bool) -> Outcome<()> {
    let redis = connect(url).await?;
    let client = LockClient::connect(url).await?;
    let lock = client.reentrant_lock(format!("{bank}:lock"))?;

    // all workers start together
    let ready = format!("{bank}:ready");
    redis.incr::<i64, _>(&ready).await?;
    while redis.get::<i64, _>(&ready).await? < WORKERS {
        sleep(Duration::from_millis(1)).await;
    }
    for _ in 0..COINS {
        let guard = if locked {
            Some(lock.lock().await?)
        } else {
            None
        };
        move_coin(
            &redis,
            &format!("{bank}:{worker}"),
            &format!("{bank}:shared"),
        )
        .await?;
        if let Some(guard) = guard {
            guard.unlock().await?;
        }
    }
    client.shutdown().await?;
    redis.quit().await?;
    Ok(())
}

async fn move_coin(redis: &Client, from: &str, to: &str) -> Outcome<()> {
    let paying: i64 = redis.get(from).await?;
    let receiving = redis.get::<Option<i64>, _>(to).await?.unwrap_or(0);
    sleep(Duration::from_millis(1)).await; // long enough for the others to read the same balance
    redis
        .set::<(), _, _>(from, paying - 1, None, None, false)
        .await?;
    redis
        .set::<(), _, _>(to, receiving + 1, None, None, false)
        .await?;
    Ok(())
}

async fn connect(url: &str) -> Outcome<Client> {
    let redis = Builder::from_config(Config::from_url(url)?).build()?;
    redis.init().await?;
    Ok(redis)
}
