//! Workers of apalis: jobs of one customer do not overlap, on any replica.
//!
//! Run: `cargo run -p nestlock-examples-jobs --example with_apalis`  (uses an embedded server)
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    error::Error,
    sync::{Arc, Mutex},
    time::Duration,
};

use apalis::prelude::*;
use nestlock::LockClient;
use nestlock_embedded::EmbeddedServer;

#[derive(Debug, Clone)]
struct Invoice {
    customer: &'static str,
    number: u32,
}

/// What the jobs work on. Without the lock, two of them would read the same total.
#[derive(Debug, Default)]
struct Totals {
    of: Mutex<BTreeMap<&'static str, u32>>,
}

impl Totals {
    fn get(&self, customer: &'static str) -> u32 {
        let totals = self.of.lock().expect("no job panics");
        totals.get(customer).copied().unwrap_or_default()
    }

    fn set(&self, customer: &'static str, total: u32) {
        self.of
            .lock()
            .expect("no job panics")
            .insert(customer, total);
    }
}

async fn send(
    invoice: Invoice,
    client: Data<LockClient>,
    totals: Data<Arc<Totals>>,
) -> Result<(), BoxDynError> {
    let lock = client.mutex(format!("customer:{}", invoice.customer))?;
    // with apalis's feature `retry`, a job that fails is retried
    let wait = lock.try_lock_for(Duration::from_secs(10)).await?;
    let guard = wait.ok_or("the customer's other jobs take too long")?;
    // stops if the lock is lost
    let work = async {
        let total = totals.get(invoice.customer);
        tokio::time::sleep(Duration::from_millis(20)).await;
        totals.set(invoice.customer, total + invoice.number);
    };
    guard.run_until_lost(work).await?;
    // the work is done: an error of the release must not repeat it
    drop(guard);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let server = EmbeddedServer::start()?;
    let (totals, mut workers) = (Arc::new(Totals::default()), Vec::new());
    // two clients stand for two replicas; a queue that they share could give a job to both, if one
    // seems dead
    for replica in 1..=2 {
        let mut queue = MemoryStorage::new();
        for number in 1..=10 {
            for customer in ["ada", "bob"] {
                queue.push(Invoice { customer, number }).await?;
            }
        }
        let worker = WorkerBuilder::new(format!("replica-{replica}"))
            .backend(queue)
            .data(LockClient::connect(server.url()).await?)
            .data(Arc::clone(&totals))
            .concurrency(4)
            .build(send);
        workers.push(tokio::spawn(worker.run()));
    }

    let all_sent = async {
        while totals.get("ada") + totals.get("bob") < 4 * 55 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all_sent).await?;
    println!("ada: {}, bob: {}", totals.get("ada"), totals.get("bob"));
    assert_eq!((totals.get("ada"), totals.get("bob")), (110, 110));
    for worker in workers {
        worker.abort();
    }
    Ok(())
}
