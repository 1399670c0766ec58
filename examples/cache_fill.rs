//! A cache that is filled once for many concurrent requests: read, lock, read again, fill.
//!
//! Run: `cargo run --example cache_fill`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use nestlock::LockClient;
use tokio::{task::JoinSet, time::sleep};

/// Stands for a cache that all processes share.
#[derive(Default)]
struct Cache {
    values: Mutex<HashMap<String, String>>,
    fills: AtomicU32,
}

impl Cache {
    fn get(&self, key: &str) -> Option<String> {
        self.values
            .lock()
            .expect("no fill panics")
            .get(key)
            .cloned()
    }

    /// An expensive computation that concurrent requests must not repeat.
    async fn fill(&self, key: &str) -> String {
        self.fills.fetch_add(1, SeqCst);
        sleep(Duration::from_millis(50)).await;
        let value = format!("the report of {key}");
        self.values
            .lock()
            .expect("no fill panics")
            .insert(key.to_owned(), value.clone());
        value
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let (cache, mut requests) = (Arc::new(Cache::default()), JoinSet::new());
    // four processes, each with 25 concurrent requests
    for _ in 0..4 {
        let client = LockClient::connect(server.url()).await?;
        for _ in 0..25 {
            requests.spawn(cached(client.clone(), Arc::clone(&cache), "2026-11"));
        }
    }
    while let Some(request) = requests.join_next().await {
        assert_eq!(request??, "the report of 2026-11");
    }
    let fills = cache.fills.load(SeqCst);
    println!("100 requests, {fills} fill");
    assert_eq!(fills, 1);
    Ok(())
}

async fn cached(client: LockClient, cache: Arc<Cache>, key: &str) -> nestlock::Result<String> {
    if let Some(value) = cache.get(key) {
        return Ok(value);
    }
    let guard = client.mutex(format!("fill:{key}"))?.lock().await?;
    // the previous holder of the lock may have filled it
    let value = match cache.get(key) {
        Some(value) => value,
        None => guard.run_until_lost(cache.fill(key)).await?,
    };
    guard.unlock().await?;
    Ok(value)
}
