//! Metrics for Prometheus: what locks cost a program, and whether any is lost.
//!
//! Run: `cargo run --features metrics --example metrics`  (uses `NESTLOCK_URL`, or an embedded
//! server). It runs for a few seconds, and prints the metrics. With `METRICS_ADDR=127.0.0.1:9187`
//! it continues, and Prometheus can scrape it there.
#![allow(clippy::print_stdout)]

use std::{env, error::Error, net::SocketAddr, time::Duration};

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use nestlock::{AcquireOptions, LockClient};
use nestlock_embedded::EmbeddedServer;
use tokio::time::{Instant, sleep, timeout};

/// Buckets in seconds, for quick acquires as well as for long holds.
const BUCKETS: [f64; 17] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0,
];

/// Installs the recorder. Call it before a client is created: what was counted earlier is lost.
fn install(address: Option<SocketAddr>) -> Result<Option<PrometheusHandle>, Box<dyn Error>> {
    // with units in the names, and with histograms, since there are only summaries without buckets
    let builder = PrometheusBuilder::new()
        .with_recommended_naming(true)
        .set_buckets(&BUCKETS)?;
    match address {
        Some(address) => builder
            .with_http_listener(address)
            .install()
            .map(|()| None)
            .map_err(Into::into),
        None => Ok(Some(builder.install_recorder()?)),
    }
}

/// Returns the class under which a lock is counted. Never use the name itself.
fn class(lock: &str) -> &'static str {
    if lock.starts_with("order:") {
        "orders"
    } else {
        "rest"
    }
}

/// Does a bit of everything that can happen to locks.
async fn work(client: &LockClient, turn: u64) -> Result<(), Box<dyn Error>> {
    let (order, report) = (client.mutex("order:7")?, client.reentrant_lock("report")?);
    let held = order.lock().await?;
    let (waiter, waits) = (order.clone(), Duration::from_millis(500));
    let waiter = tokio::spawn(async move { waiter.try_lock_for(waits).await });
    assert!(order.try_lock().await?.is_none());
    assert!(
        order
            .try_lock_for(Duration::from_millis(5))
            .await?
            .is_none()
    );
    let _ = timeout(Duration::from_millis(5), order.lock()).await;
    sleep(Duration::from_millis(10 + turn % 7 * 5)).await;
    held.unlock().await?;
    // dropped, so that it is released in the background
    drop(waiter.await??);

    let outer = report.lock().await?;
    let inner = report.lock().await?;
    sleep(Duration::from_millis(250)).await;
    if turn.is_multiple_of(4) {
        // as an operator or a failover may do
        report.force_unlock().await?;
        println!("{}", outer.lost().await);
        let _ = (inner.unlock().await, outer.unlock().await);
    } else {
        inner.unlock().await?;
        outer.unlock().await?;
    }
    report
        .lock_with(AcquireOptions::new().lease(Duration::from_millis(50)))
        .await?
        .leave_to_lease();
    report.lock().await?.unlock().await?;
    let _ = report
        .try_lock_with(AcquireOptions::new().lease(Duration::ZERO))
        .await;
    Ok(())
}

/// Simulates a server that hangs: the outcome of requests in that time is unknown, and they are
/// undone when it is back.
async fn outage(client: &LockClient, server: &EmbeddedServer) -> Result<(), Box<dyn Error>> {
    server.pause();
    let in_vain = client
        .mutex("order:8")?
        .try_lock_for(Duration::from_millis(50))
        .await;
    println!("{in_vain:?}");
    // long enough for the client to give up the connection
    sleep(Duration::from_secs(4)).await;
    server.resume();
    client.idle().await;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = env::var("METRICS_ADDR")
        .ok()
        .map(|address| address.parse())
        .transpose()?;
    let metrics = install(address)?;
    let ours = if env::var_os("NESTLOCK_URL").is_none() {
        Some(EmbeddedServer::start()?)
    } else {
        None
    };
    let url = ours
        .as_ref()
        .map_or_else(|| env::var("NESTLOCK_URL"), |server| Ok(server.url()))?;
    let builder = LockClient::builder()
        .application("metrics")
        .metrics_class(class);
    let client = builder
        .watchdog_timeout(Duration::from_millis(600))
        .connect(url)
        .await?;
    let (start, mut turn) = (Instant::now(), 0);
    while address.is_some() || start.elapsed() < Duration::from_secs(3) {
        work(&client, turn).await?;
        turn += 1;
        if let Some(server) = &ours
            && address.is_some()
            && turn.is_multiple_of(20)
        {
            outage(&client, server).await?;
        }
    }
    if let Some(metrics) = metrics {
        let text = metrics.render();
        text.lines()
            .filter(|line| !line.contains("_bucket"))
            .for_each(|line| println!("{line}"));
        assert!(text.contains("nestlock_losses_total"), "a loss is counted");
    }
    client.shutdown().await?;
    Ok(())
}
