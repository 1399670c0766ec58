//! First come, first served: workers of two clients queue for one lock, and get it in the order of
//! their requests.
//!
//! Run: `cargo run --example fair`  (uses `NESTLOCK_URL`, or an embedded server)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use nestlock::LockClient;
use tokio::time::sleep;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = support::server()?;
    let (here, there) = (
        LockClient::connect(server.url()).await?,
        LockClient::connect(server.url()).await?,
    );

    let desk = here.fair_lock("desk")?;
    let opening = desk.lock().await?;
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut customers = Vec::new();
    for number in 0..6 {
        let desk = if number % 2 == 0 { &here } else { &there }.fair_lock("desk")?;
        let order = Arc::clone(&order);
        customers.push(tokio::spawn(async move {
            // the fourth customer is in a hurry, and leaves the queue
            let wait = Duration::from_millis(if number == 3 { 200 } else { 60_000 });
            let Some(guard) = desk.try_lock_for(wait).await? else {
                return Ok(());
            };
            order.lock().expect("no customer panics").push(number);
            guard.unlock().await
        }));
        // far enough apart for a certain order of the requests
        sleep(Duration::from_millis(100)).await;
    }

    // a try without a wait does not enter the queue
    assert!(there.fair_lock("desk")?.try_lock().await?.is_none());
    opening.unlock().await?;
    for customer in customers {
        customer.await??;
    }
    let order = std::mem::take(&mut *order.lock().expect("no customer panics"));
    println!("served in the order {order:?}");
    assert_eq!(order, [0, 1, 2, 4, 5]);
    here.shutdown().await?;
    there.shutdown().await?;
    Ok(())
}
