//! What stays the same at scale, near the server and 50 ms away: a hold with a short TTL and pairs
//! while there are many other holds; many readers; many lists that are waited for.
//!
//! `cargo bench --bench scale`
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::{Duration, Instant};

use fred::{clients::Client, interfaces::ClientLike, types::InfoKind};
use futures::{StreamExt, stream};
use nestlock::{AcquireOptions, LockClient, LockGuard, OwnerId};
use support::{Link, bare, median, server};

const WATCHDOG: Duration = Duration::from_secs(6);

async fn hold_many(client: &LockClient, count: usize) -> Vec<LockGuard> {
    stream::iter(0..count)
        .map(|n| {
            let lock = client.reentrant_lock(format!("held:{n}")).expect("a name");
            async move { lock.lock().await.expect("the lock") }
        })
        .buffer_unordered(2000)
        .collect()
        .await
}

/// Many holds: none may be lost, and a hold with a short TTL is renewed in time among them.
async fn many_holds(link: &Link) {
    let client = LockClient::builder()
        .watchdog_timeout(WATCHDOG)
        .connect(&link.url)
        .await
        .expect("a client");
    let guards = hold_many(&client, 100_000).await;
    let options = AcquireOptions::new().watchdog_timeout(Duration::from_secs(1));
    let short = client
        .reentrant_lock("short")
        .expect("a name")
        .try_lock_with(options)
        .await
        .expect("an answer")
        .expect("free");
    link.slow_down();
    tokio::time::sleep(Duration::from_secs(20)).await;
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    link.report("100,000 locks, TTL 6 s, 20 s: locks lost", lost as f64, "0");
    link.report(
        "a lock with a TTL of 1 s among them: lost",
        f64::from(u8::from(short.is_lost())),
        "0",
    );
    let least = guards
        .iter()
        .map(LockGuard::remaining)
        .min()
        .unwrap_or_default();
    link.report(
        "shortest remaining lease, as a share of it",
        least.as_secs_f64() / WATCHDOG.as_secs_f64(),
        "",
    );
    // this many concurrent releases would take longer than a shutdown may
    link.speed_up();
    drop((guards, short));
    client.idle().await;
}

/// Measures pairs per second of an acquire with its own TTL, with many other holds and with none.
async fn beside_many(link: &Link) {
    let (busy, quiet) = (
        LockClient::connect(&link.url).await.expect("a client"),
        LockClient::connect(&link.url).await.expect("a client"),
    );
    let guards = hold_many(&busy, 200_000).await;
    link.slow_down();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let long = Duration::from_millis(if link.is_far() { 2000 } else { 500 });
    let mut ratios = Vec::new();
    for _ in 0..9 {
        let mut rates = Vec::new();
        for client in [&quiet, &busy] {
            let lock = client.reentrant_lock("hot").expect("a name");
            let (since, mut pairs) = (Instant::now(), 0_u32);
            while since.elapsed() < long {
                let options = AcquireOptions::new().watchdog_timeout(Duration::from_secs(8));
                lock.try_lock_with(options)
                    .await
                    .expect("an answer")
                    .expect("free")
                    .unlock()
                    .await
                    .expect("an answer");
                pairs += 1;
            }
            rates.push(f64::from(pairs) / since.elapsed().as_secs_f64());
        }
        ratios.push(rates[1] / rates[0]);
    }
    link.report(
        "pairs/s, each with a TTL of 8 s, with 200,000 other holds / with none",
        median(&mut ratios),
        ">= 0.90",
    );
    link.speed_up();
    drop(guards);
    busy.idle().await;
}

async fn script_us(client: &Client) -> (f64, f64) {
    let stats: String = client
        .info(Some(InfoKind::CommandStats))
        .await
        .expect("INFO");
    let line = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_evalsha:"))
        .unwrap_or("calls=0,usec=0");
    let field = |name: &str| {
        let value = line
            .split(',')
            .find_map(|field| field.strip_prefix(name))
            .unwrap_or("=0");
        value
            .trim_start_matches('=')
            .parse::<f64>()
            .expect("a number")
    };
    (field("calls"), field("usec"))
}

/// Measures the server time of a reader's acquire and release, by the number of readers.
async fn readers(link: &Link) {
    // renewals of this many holds would be counted, too
    let builder = LockClient::builder().watchdog_timeout(Duration::from_secs(3_600));
    let (client, bare) = (
        builder.connect(&link.url).await.expect("a client"),
        bare(&link.url).await,
    );
    link.slow_down();
    let pairs = if link.is_far() { 50 } else { 200 };
    let read = client
        .read_write_lock("shared")
        .expect("a name")
        .read_lock();
    let mut guards: Vec<LockGuard> = Vec::new();
    let mut first = None;
    for count in [10_usize, 1000, 5000] {
        let more = stream::iter(guards.len()..count).map(|_| {
            let read = read.clone();
            OwnerId::scope(async move { read.lock().await.expect("the lock") })
        });
        guards.extend(more.buffer_unordered(100).collect::<Vec<_>>().await);
        let before = script_us(&bare).await;
        for _ in 0..pairs {
            let read = read.clone();
            let guard = OwnerId::scope(async move { read.lock().await.expect("the lock") }).await;
            guard.unlock().await.expect("an answer");
        }
        let after = script_us(&bare).await;
        let (calls, us) = (after.0 - before.0, after.1 - before.1);
        let pair = us / calls * 2.0;
        let first = *first.get_or_insert(pair);
        link.report(
            &format!("server time of a reader's pair with {count} readers, in us"),
            pair,
            "",
        );
        link.report("    compared with 10 readers", pair / first, "<= 2");
    }
    link.speed_up();
    drop(guards);
    client.idle().await;
}

/// Measures the hand-over of a signal lock, by the number of other lists for which the client
/// waits.
async fn lists(link: &Link) {
    let (a, b) = (
        LockClient::connect(&link.url).await.expect("a client"),
        LockClient::connect(&link.url).await.expect("a client"),
    );
    let (mut kept, mut tasks, mut first) = (Vec::new(), Vec::new(), None);
    for count in [0_usize, 1000, 4000] {
        link.speed_up();
        while kept.len() < count {
            let name = format!("idle:{}", kept.len());
            kept.push(
                b.signal_lock(&name)
                    .expect("a name")
                    .lock()
                    .await
                    .expect("the lock"),
            );
            let lock = a.signal_lock(&name).expect("a name");
            tasks.push(tokio::spawn(async move { drop(lock.lock().await) }));
        }
        link.slow_down();
        tokio::time::sleep(Duration::from_secs(3)).await;
        let (waits, holds) = (
            a.signal_lock("hot").expect("a name"),
            b.signal_lock("hot").expect("a name"),
        );
        let mut times = Vec::new();
        for _ in 0..if link.is_far() { 20 } else { 60 } {
            let guard = holds.lock().await.expect("the lock");
            let waiter = tokio::spawn({
                let lock = waits.clone();
                async move { (lock.lock().await.expect("the lock"), Instant::now()) }
            });
            link.pause(Duration::from_millis(20)).await;
            let since = Instant::now();
            guard.unlock().await.expect("an answer");
            let (guard, at) = waiter.await.expect("a task");
            times.push((at - since).as_secs_f64() * 1e6);
            guard.unlock().await.expect("an answer");
        }
        let time = median(&mut times);
        let first = *first.get_or_insert(time);
        link.report(
            &format!(
                "a signal lock's hand-over with {count} other lists waited for, in us, median"
            ),
            time,
            "",
        );
        link.report("    compared with none", time / first, "");
    }
    link.speed_up();
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        // a new server for each part: what one part leaves behind must not slow down the next
        for part in 0..4 {
            let server = server();
            for link in server.links() {
                match part {
                    0 => many_holds(&link).await,
                    1 => beside_many(&link).await,
                    2 => readers(&link).await,
                    _ => lists(&link).await,
                }
            }
        }
    });
}
