//! Each kind without contention, compared with the reentrant lock in the same run; and a multi-lock
//! compared with single ones.
//!
//! Run: `cargo bench --bench kinds`
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::Instant;

use nestlock::{Lock, LockClient};
use support::{median, report, server};

const ROUNDS: usize = 15;
const PAIRS: u32 = 300;
const MEMBERS: usize = 10;

#[tokio::main]
async fn main() {
    let server = server();
    let client = LockClient::connect(server.url()).await.expect("a client");
    let reentrant: Lock = client.reentrant_lock("reentrant").expect("a name");
    let read_write = client.read_write_lock("read-write").expect("a name");
    let kinds: [(&str, Lock); 7] = [
        ("fenced", client.fenced_lock("fenced").expect("a name")),
        ("fair", client.fair_lock("fair").expect("a name")),
        ("read", read_write.read_lock()),
        ("write", read_write.write_lock()),
        ("spin", client.spin_lock("spin").expect("a name")),
        (
            "non-reentrant",
            client.non_reentrant_lock("once").expect("a name"),
        ),
        ("signal", client.signal_lock("signal").expect("a name")),
    ];
    println!(
        "lock + unlock, compared with the reentrant lock, medians of {ROUNDS} alternating rounds"
    );
    for (name, lock) in &kinds {
        report(name, ratio(lock, &reentrant).await, "");
    }

    let members: Vec<Lock> = (0..MEMBERS)
        .map(|number| {
            client
                .reentrant_lock(format!("{{slot}}:{number}"))
                .expect("a name")
        })
        .collect();
    let multi = client.multi_lock(members.clone()).expect("members");
    let mut ratios = Vec::new();
    for _ in 0..=ROUNDS {
        let together = time(&multi, PAIRS / 10).await;
        let start = Instant::now();
        for _ in 0..PAIRS / 10 {
            let mut guards = Vec::new();
            for member in &members {
                guards.push(member.lock().await.expect("the lock"));
            }
            for guard in guards {
                guard.unlock().await.expect("the unlock");
            }
        }
        ratios.push(together / start.elapsed().as_secs_f64());
    }
    report(
        "a multi-lock of 10, against 10 locks one after another",
        median(&mut ratios[1..]),
        "",
    );
}

async fn ratio(lock: &Lock, baseline: &Lock) -> f64 {
    let mut ratios = Vec::new();
    for _ in 0..=ROUNDS {
        ratios.push(time(lock, PAIRS).await / time(baseline, PAIRS).await);
    }
    // the first pair loads the scripts
    median(&mut ratios[1..])
}

/// Returns the seconds for this many pairs of lock and unlock.
async fn time(lock: &Lock, pairs: u32) -> f64 {
    let start = Instant::now();
    for _ in 0..pairs {
        lock.lock()
            .await
            .expect("the lock")
            .unlock()
            .await
            .expect("the unlock");
    }
    start.elapsed().as_secs_f64()
}
