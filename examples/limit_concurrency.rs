//! Limits how many tasks of all processes call a service at the same time, with permits.
//!
//! Run: `cargo run --example limit_concurrency`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use nestlock::{LockClient, Permits};
use tokio::{task::JoinSet, time::sleep};

/// What the service bears.
const AT_ONCE: u32 = 3;
const CALLS: u32 = 8;

/// A service that counts the calls in progress.
#[derive(Default)]
struct Service {
    calls: AtomicU32,
    most: AtomicU32,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    // three clients stand for three processes
    let (service, mut calls) = (Arc::new(Service::default()), JoinSet::new());
    for _ in 0..3 {
        let client = LockClient::connect(server.url()).await?;
        let permits = client.permits("geocoder", AT_ONCE)?;
        for _ in 0..CALLS {
            calls.spawn(call(permits.clone(), Arc::clone(&service)));
        }
    }
    while let Some(call) = calls.join_next().await {
        call??;
    }
    let most = service.most.load(SeqCst);
    println!(
        "{} calls of three processes, and at most {most} at once",
        3 * CALLS
    );
    assert_eq!(most, AT_ONCE);
    Ok(())
}

/// Calls the service with a permit. If this process dies, its permits come back when their leases
/// end.
async fn call(permits: Permits, service: Arc<Service>) -> nestlock::Result<()> {
    let guard = permits.acquire().await?;
    guard
        .run_until_lost(async {
            let now = service.calls.fetch_add(1, SeqCst) + 1;
            service.most.fetch_max(now, SeqCst);
            sleep(Duration::from_millis(50)).await;
            service.calls.fetch_sub(1, SeqCst);
        })
        .await?;
    guard.unlock().await
}
