//! What order costs: the hand-over of a fair lock compared with that of a plain one, and one hold
//! among few or many waiters.
//!
//! Figures are ratios within one run, and times. `cargo bench --bench fair`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::{Duration, Instant};

use nestlock::{LockClient, Tuning};
use support::{Link, hand_over, median, quantile, report, server};

/// Long enough that no waiter polls: only messages wake it.
const NEVER: Duration = Duration::from_secs(3600);

async fn client(url: &str, grants: bool) -> LockClient {
    let builder = LockClient::builder()
        .poll_cap(NEVER)
        .watchdog_timeout(4 * NEVER)
        .fair_patience(4 * NEVER);
    builder
        .tuning(Tuning {
            grants,
            ..Tuning::default()
        })
        .connect(url)
        .await
        .expect("a client")
}

async fn hand_overs(url: &str) {
    let (a, b) = (client(url, true).await, client(url, true).await);
    let asking = (client(url, false).await, client(url, false).await);
    // as before nestlock had its own link
    let by_fred = format!("{url}?wire=fred");
    let by_fred = (client(&by_fred, false).await, client(&by_fred, false).await);
    let [mut fair, mut asked, mut before, mut plain] = [const { Vec::new() }; 4];
    for round in 0..1000 {
        let name = format!("hand-over-{}", round % 8);
        let kind = |client: &LockClient| client.fair_lock(format!("{name}-fair")).expect("a name");
        fair.push(hand_over(kind(&a), kind(&b)).await);
        asked.push(hand_over(kind(&asking.0), kind(&asking.1)).await);
        before.push(hand_over(kind(&by_fred.0), kind(&by_fred.1)).await);
        let kind = |client: &LockClient| client.reentrant_lock(&name).expect("a name");
        plain.push(hand_over(kind(&a), kind(&b)).await);
    }
    let times = [&mut fair, &mut asked, &mut before, &mut plain].map(|times| median(times));
    let [granted, asks, before, other] = times;
    println!(
        "    fair, without grants, the same over fred, plain: {:.0?} us",
        times.map(|time| time * 1e6)
    );
    report(
        "hand-over, fair to fair without grants, median",
        granted / asks,
        "",
    );
    report(
        "hand-over, fair to fair without grants over fred, median",
        granted / before,
        "<= 0.6",
    );
    report(
        "hand-over, fair to plain, median",
        granted / other,
        "<= 1.3",
    );
    report(
        "hand-over, fair to plain, p99",
        quantile(&mut fair, 0.99) / quantile(&mut plain, 0.99),
        "",
    );
}

/// Returns the mean time of one hold in seconds while this many waiters queue. A waiter that was
/// served queues again, at the end.
async fn hold_among(link: &Link, waiters: usize, round: usize, grants: bool) -> f64 {
    let measured = if link.is_far() { 100 } else { 1000 };
    link.speed_up();
    let client = client(&link.url, grants).await;
    let lock = client
        .fair_lock(format!("crowd-{waiters}-{round}-{grants}"))
        .expect("a name");
    let guard = lock.lock().await.expect("the lock");
    let (served, mut reports) = tokio::sync::mpsc::unbounded_channel();
    let tasks: Vec<_> = (0..waiters)
        .map(|_| {
            let (lock, served) = (lock.clone(), served.clone());
            tokio::spawn(async move {
                loop {
                    let guard = lock.lock().await.expect("the lock");
                    guard.unlock().await.expect("the unlock");
                    if served.send(Instant::now()).is_err() {
                        return;
                    }
                }
            })
        })
        .collect();
    while client.stats().channels < waiters {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    guard.unlock().await.expect("the unlock");
    // the first round is spent on subscriptions
    for _ in 0..waiters {
        reports.recv().await.expect("a hold");
    }
    link.slow_down();
    let first = reports.recv().await.expect("a hold");
    let mut last = first;
    for _ in 0..measured {
        last = reports.recv().await.expect("a hold");
    }
    for task in tasks {
        task.abort();
        let _ = task.await;
    }
    client.shutdown().await.expect("an end");
    (last - first).as_secs_f64() / f64::from(measured)
}

async fn crowds(link: &Link) {
    let (mut few, mut many, mut asked) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..5 {
        few.push(hold_among(link, 100, round, true).await);
        many.push(hold_among(link, 500, round, true).await);
        asked.push(hold_among(link, 100, round, false).await);
    }
    link.report(
        "time of one hold among 100, to that without grants",
        median(&mut few) / median(&mut asked),
        "",
    );
    let (few, many) = (median(&mut few), median(&mut many));
    println!(
        "    one hold among 100: {:.0} us, among 500: {:.0} us",
        few * 1e6,
        many * 1e6
    );
    link.report(
        "time of one hold, 500 waiters to 100, median of 5",
        many / few,
        "<= 1.3",
    );
}

#[tokio::main]
async fn main() {
    let server = server();
    hand_overs(server.url()).await;
    for link in server.links() {
        crowds(&link).await;
    }
}
