//! One of three replicas leads. It is stopped, and another one is elected: by then the work of the
//! first has ended.
//!
//! Run: `cargo run -p nestlock-recipes --example leader`
#![allow(clippy::print_stdout)]

use std::{
    collections::HashMap,
    error::Error,
    sync::atomic::{AtomicU32, Ordering::SeqCst},
};

use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::leader::{Leader, Term};

static AT_WORK: AtomicU32 = AtomicU32::new(0);

/// Counts the leaders that work now.
struct AtWork;

impl AtWork {
    fn begin() -> Self {
        assert_eq!(AT_WORK.fetch_add(1, SeqCst), 0, "one at a time");
        Self
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.fetch_sub(1, SeqCst);
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let mut replicas = HashMap::new();
    for number in 1..=3 {
        let client = LockClient::connect(server.url()).await?;
        let identity = format!("10.0.0.{number}:8080");
        let leader = Leader::new(&client, "scheduler")?.identity(&identity);
        let address = identity.clone();
        let replica = tokio::spawn(async move {
            let work = |term: Term| {
                let identity = identity.clone();
                async move {
                    let _at_work = AtWork::begin();
                    println!("{identity} leads with token {}", term.token());
                    // the leader passes this token with every write
                    println!("{identity} stops: {}", term.lost().await);
                }
            };
            leader.lead(work).await
        });
        replicas.insert(address, replica);
    }
    let client = LockClient::connect(server.url()).await?;
    let mut observer = Leader::new(&client, "scheduler")?.observe();
    let mut last = None;
    while !replicas.is_empty() {
        let Some(leading) = observer.next().await? else {
            continue;
        };
        println!("observed: {}", leading.identity);
        assert!(last < Some(leading.token), "each leader has a higher token");
        last = Some(leading.token);
        // drops its work, then gives up the office
        replicas
            .remove(&leading.identity)
            .ok_or("a stopped replica leads")?
            .abort();
    }
    Ok(())
}
