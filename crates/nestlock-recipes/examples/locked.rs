//! A function that runs one call at a time for each order, over all processes, without any lock code
//! in its body.
//!
//! Run: `cargo run -p nestlock-recipes --example locked`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

#[path = "../../../examples/support/mod.rs"]
mod support;

use std::{
    sync::atomic::{AtomicU32, Ordering::SeqCst},
    time::Duration,
};

use nestlock::LockClient;
use nestlock_recipes::{LockedError, locked};

/// The number of calls that pay order 7 now, and of payments so far.
static PAYING: AtomicU32 = AtomicU32::new(0);
static PAID: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, thiserror::Error)]
enum PayError {
    #[error(transparent)]
    Lock(#[from] LockedError),
    #[error("order {0} was paid before")]
    Paid(u64),
}

/// One of several replicas.
struct Shop {
    locks: LockClient,
}

impl Shop {
    #[locked("order:{id}", client = self.locks, wait = "10s")]
    async fn pay(&self, id: u64) -> Result<u32, PayError> {
        assert_eq!(
            PAYING.fetch_add(1, SeqCst),
            0,
            "two calls pay at the same time"
        );
        let paid = PAID.load(SeqCst);
        tokio::time::sleep(Duration::from_millis(20)).await;
        PAYING.fetch_sub(1, SeqCst);
        if paid > 0 {
            return Err(PayError::Paid(id));
        }
        Ok(PAID.fetch_add(1, SeqCst) + 1)
    }

    /// Returns `None` if another replica is already cleaning up.
    #[locked("cleanup", client = self.locks, wait = "0s", busy = return Ok(None))]
    async fn clean_up(&self) -> Result<Option<&str>, LockedError> {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(Some("cleaned"))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let (here, there) = (
        Shop {
            locks: LockClient::connect(server.url()).await?,
        },
        Shop {
            locks: LockClient::connect(server.url()).await?,
        },
    );
    let (a, b, c) = tokio::join!(here.pay(7), there.pay(7), here.pay(7));
    for outcome in [&a, &b, &c] {
        println!("pay: {outcome:?}");
    }
    assert_eq!(
        [a, b, c].iter().filter(|outcome| outcome.is_ok()).count(),
        1
    );

    let (a, b) = tokio::join!(here.clean_up(), there.clean_up());
    println!("clean up: {a:?} and {b:?}");
    assert!(a?.is_some() != b?.is_some());
    Ok(())
}
