//! Mixed readers and writers of one lock: the throughput of each side if all are near, if readers
//! are far, and if all are far.
//!
//! Figures are holds per second, and the longest wait of a reader.
//! `cargo bench --bench read_write`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::{Duration, Instant};

use nestlock::{Lock, LockClient};
use support::{quantile, server};

const TIME: Duration = Duration::from_secs(10);
const READERS: usize = 8;
const WRITERS: usize = 2;
/// How long each of them holds the lock.
const HOLD: Duration = Duration::from_millis(2);

/// Acquires and releases until the time is over. Returns each wait in seconds.
async fn at_it(lock: Lock, until: Instant) -> Vec<f64> {
    let mut waits = Vec::new();
    while Instant::now() < until {
        let asked = Instant::now();
        // a side that starves has waited until the end
        let guard = tokio::time::timeout_at((until + HOLD).into(), lock.lock()).await;
        waits.push(asked.elapsed().as_secs_f64());
        let Ok(guard) = guard else { break };
        let guard = guard.expect("the lock");
        tokio::time::sleep(HOLD).await;
        guard.unlock().await.expect("the unlock");
    }
    waits
}

async fn mixed(what: &str, name: &str, reader_url: &str, writer_url: &str) {
    let until = Instant::now() + TIME;
    let mut sides = Vec::new();
    for (url, count, reads) in [(reader_url, READERS, true), (writer_url, WRITERS, false)] {
        let client = LockClient::connect(url).await.expect("a client");
        let lock = client.read_write_lock(name).expect("a name");
        let lock = if reads {
            lock.read_lock()
        } else {
            lock.write_lock()
        };
        sides.push((
            client,
            (0..count)
                .map(|_| tokio::spawn(at_it(lock.clone(), until)))
                .collect::<Vec<_>>(),
        ));
    }
    let mut figures = Vec::new();
    for (client, tasks) in sides {
        let mut waits = Vec::new();
        for task in tasks {
            waits.extend(task.await.expect("a task"));
        }
        client.shutdown().await.expect("an end");
        figures.push((
            waits.len() as f64 / TIME.as_secs_f64(),
            quantile(&mut waits, 0.5),
            quantile(&mut waits, 1.0),
        ));
    }
    let [(reads, _, longest), (writes, median, _)] = figures[..] else {
        unreachable!("two sides")
    };
    println!(
        "{what}: {reads:.0} reads/s, {writes:.0} writes/s; a reader waits {longest:.3} s at most, a writer {median:.4} s"
    );
}

#[tokio::main]
async fn main() {
    let server = server();
    let [near, far] = server.links();
    far.slow_down();
    println!(
        "{READERS} readers and {WRITERS} writers, each holds it for {HOLD:?}; far means a round trip of 50 ms"
    );
    mixed("all near", "near", &near.url, &near.url).await;
    mixed("readers far", "readers", &far.url, &near.url).await;
    mixed("writers far", "writers", &near.url, &far.url).await;
    mixed("all far", "far", &far.url, &far.url).await;
}
