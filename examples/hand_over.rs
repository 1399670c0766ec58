//! A request acquires the lock and replies at once; a worker process continues under the same lock.
//! No other client gets the lock in between.
//!
//! Run: `cargo run --example hand_over`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    env,
    error::Error,
    process::{Command, Stdio},
    time::Duration,
};

use nestlock::{HandOver, LockClient};

type Outcome<T> = Result<T, Box<dyn Error>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [url] = args.as_slice() {
        return work(url).await;
    }
    let server = support::server()?;
    let client = LockClient::connect(server.url()).await?;

    // the first request does the quick part here, and leaves the rest to a worker
    let guard = client.mutex("order:7")?.lock().await?;
    println!("request 1: order 7 is locked, the response is 202 Accepted");
    let job = guard.hand_over(Duration::from_secs(30)).await?.to_text();

    // the same customer tries again
    assert!(
        client.mutex("order:7")?.try_lock().await?.is_none(),
        "two requests hold the lock"
    );
    println!("request 2: order 7 is being processed, the response is 409 Conflict");

    // send the text along with the job, but keep it out of logs: with it, any process can adopt the
    // lock
    let mut worker = Command::new(env::current_exe()?)
        .arg(server.url())
        .stdin(Stdio::piped())
        .spawn()?;
    std::io::Write::write_all(&mut worker.stdin.take().ok_or("no stdin")?, job.as_bytes())?;

    let guard = client.mutex("order:7")?.lock().await?;
    println!("request 3: waited until the worker was done");
    guard.unlock().await?;
    assert!(worker.wait()?.success());

    // a hand-over can be adopted only once
    let again = client
        .mutex("order:7")?
        .adopt(&HandOver::from_text(&job)?)
        .await;
    assert!(
        matches!(again, Err(nestlock::Error::NotHeld { .. })),
        "{again:?}"
    );
    Ok(())
}

async fn work(url: &str) -> Outcome<()> {
    let job = std::io::read_to_string(std::io::stdin())?;
    let client = LockClient::connect(url).await?;
    let guard = client
        .mutex("order:7")?
        .adopt(&HandOver::from_text(&job)?)
        .await?;
    println!(
        "worker {}: has the lock of {}",
        std::process::id(),
        guard.name()
    );
    tokio::time::sleep(Duration::from_millis(300)).await;
    println!("worker {}: done", std::process::id());
    guard.unlock().await?;
    Ok(())
}
