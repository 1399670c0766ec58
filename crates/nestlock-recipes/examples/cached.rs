//! A cache that is filled once for many concurrent callers, and serves a stale value while one
//! caller refills it.
//!
//! Run: `cargo run -p nestlock-recipes --features fred --example cached`
#![allow(clippy::print_stdout)]

use std::{
    error::Error,
    io,
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::cached::{RedisStore, cached};
use tokio::{task::JoinSet, time::sleep};

static FILLS: AtomicU32 = AtomicU32::new(0);

/// An expensive computation that concurrent callers must not repeat.
async fn report(month: &'static str) -> io::Result<Vec<u8>> {
    let fill = FILLS.fetch_add(1, SeqCst) + 1;
    sleep(Duration::from_millis(50)).await;
    Ok(format!("report {fill} of {month}").into_bytes())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    // four processes, each with 25 concurrent requests
    let (mut processes, mut requests) = (Vec::new(), JoinSet::new());
    for _ in 0..4 {
        let client = LockClient::connect(server.url()).await?;
        let reports = cached(&client, RedisStore::connect(server.url()).await?).beta(0.0);
        processes.push(
            reports
                .ttl(Duration::from_secs(60))
                .stale_for(Duration::from_secs(3600)),
        );
    }
    for reports in processes
        .iter()
        .flat_map(|process| vec![process.clone(); 25])
    {
        requests.spawn(async move {
            reports
                .try_get_with("report:2026-11", report("2026-11"))
                .await
        });
    }
    while let Some(value) = requests.join_next().await {
        assert_eq!(value??, b"report 1 of 2026-11");
    }
    println!("100 requests in 4 processes, {} fill", FILLS.load(SeqCst));
    assert_eq!(FILLS.load(SeqCst), 1);

    // a minute later the value is stale: it is still served, and refilled in the background
    server.advance(Duration::from_secs(61));
    let reports = &processes[0];
    let stale = reports
        .try_get_with("report:2026-11", report("2026-11"))
        .await?;
    println!("after its end: {}", String::from_utf8_lossy(&stale));
    assert_eq!(stale, b"report 1 of 2026-11");
    while reports.get("report:2026-11").await?.ok_or("it was there")? == stale {
        sleep(Duration::from_millis(5)).await;
    }
    println!(
        "a moment later: report 2 of 2026-11, {} fills",
        FILLS.load(SeqCst)
    );
    assert_eq!(FILLS.load(SeqCst), 2);
    Ok(())
}
