//! How do I lock several things at once without a deadlock? Two tellers move money between the same
//! two accounts in opposite directions, and each acquires both locks or none.
//!
//! Run: `cargo run --example multi_lock`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering::Relaxed},
};

use nestlock::LockClient;

type Account = (&'static str, AtomicI64);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let accounts: Arc<[Account; 2]> =
        Arc::new([("ann", AtomicI64::new(1000)), ("bob", AtomicI64::new(1000))]);

    let mut tellers = Vec::new();
    for (from, to) in [(0, 1), (1, 0)] {
        // a client for each teller, as on two machines
        let (client, accounts) = (
            LockClient::connect(server.url()).await?,
            Arc::clone(&accounts),
        );
        tellers.push(tokio::spawn(async move {
            for _ in 0..100 {
                transfer(&client, &accounts[from], &accounts[to], 7).await?;
            }
            client.shutdown().await
        }));
    }
    for teller in tellers {
        teller.await??;
    }

    let (ann, bob) = (accounts[0].1.load(Relaxed), accounts[1].1.load(Relaxed));
    println!("200 transfers, both ways: ann {ann}, bob {bob}");
    assert_eq!((ann, bob), (1000, 1000));
    Ok(())
}

async fn transfer(
    client: &LockClient,
    from: &Account,
    to: &Account,
    amount: i64,
) -> nestlock::Result<()> {
    // the order of the names does not matter
    let both = client.multi_lock([client.mutex(from.0)?, client.mutex(to.0)?])?;
    let guard = both.lock().await?;
    let (rest, sum) = (from.1.load(Relaxed) - amount, to.1.load(Relaxed) + amount);
    tokio::task::yield_now().await; // without the lock, the other teller would interfere here
    from.1.store(rest, Relaxed);
    to.1.store(sum, Relaxed);
    guard.unlock().await
}
