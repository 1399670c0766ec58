//! Many tasks of one client on one lock: handed on among them, compared with a request to the
//! server for each.
//!
//! Both in one run, in alternating rounds. `cargo bench --bench relay`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fred::{clients::Client, interfaces::ClientLike, types::InfoKind};
use nestlock::{LockClient, Tuning};
use support::{bare, median, quantile, report, server};

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(500);

/// The result of a round.
struct Round {
    holds: f64,
    scripts: f64,
    p99: f64,
}

async fn scripts(bare: &Client) -> f64 {
    let info: String = bare.info(Some(InfoKind::CommandStats)).await.expect("INFO");
    let calls = |line: &str| {
        line.split(['=', ','])
            .nth(1)
            .and_then(|calls| calls.parse::<f64>().ok())
    };
    let counted = info.lines().filter(|line| line.starts_with("cmdstat_eval"));
    counted.filter_map(calls).sum()
}

/// Starts this many tasks, which acquire and release the same lock until told to end. Returns the
/// waits of each in seconds.
fn crowd(
    client: &LockClient,
    tasks: usize,
    over: &Arc<AtomicBool>,
) -> Vec<tokio::task::JoinHandle<Vec<f64>>> {
    let spawn = |_| {
        let (lock, over) = (client.mutex("hot").expect("a name"), Arc::clone(over));
        tokio::spawn(async move {
            let mut waits = Vec::new();
            while !over.load(Ordering::Relaxed) {
                let from = Instant::now();
                let guard = lock.lock().await.expect("the lock");
                waits.push(from.elapsed().as_secs_f64());
                guard.unlock().await.expect("the unlock");
            }
            waits
        })
    };
    (0..tasks).map(spawn).collect()
}

async fn all(tasks: Vec<tokio::task::JoinHandle<Vec<f64>>>) -> Vec<f64> {
    let mut waits = Vec::new();
    for task in tasks {
        waits.extend(task.await.expect("a task"));
    }
    waits
}

/// Runs 64 tasks of one client, and optionally 8 of another client at the same time. Returns the
/// results of both.
async fn round(bare: &Client, client: &LockClient, beside: Option<&LockClient>) -> (Round, f64) {
    let over = Arc::new(AtomicBool::new(false));
    let (before, from) = (scripts(bare).await, Instant::now());
    let tasks = crowd(client, 64, &over);
    let others = beside.map_or(Vec::new(), |client| crowd(client, 8, &over));
    tokio::time::sleep(ROUND).await;
    over.store(true, Ordering::Relaxed);
    let mut waits = all(tasks).await;
    let theirs = all(others).await.len() as f64;
    let (seconds, scripts) = (from.elapsed().as_secs_f64(), scripts(bare).await - before);
    let holds = waits.len() as f64;
    let p99 = quantile(&mut waits, 0.99);
    (
        Round {
            holds: holds / seconds,
            scripts: scripts / (holds + theirs),
            p99,
        },
        theirs / seconds,
    )
}

fn main() {
    let server = server();
    let url = server.url();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let bare = bare(url).await;
        let client = async |relay| LockClient::builder().tuning(Tuning { relay, ..Tuning::default() }).connect(url).await.expect("a client");
        let (with, without, other) = (client(true).await, client(false).await, client(false).await);
        let (mut rows, mut beside): (Vec<[Round; 2]>, Vec<[f64; 4]>) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            rows.push([round(&bare, &without, None).await.0, round(&bare, &with, None).await.0]);
            let (ours_without, theirs_without) = round(&bare, &without, Some(&other)).await;
            let (ours_with, theirs_with) = round(&bare, &with, Some(&other)).await;
            beside.push([theirs_without, theirs_with, ours_without.holds, ours_with.holds]);
        }
        let of = |at: usize, what: fn(&Round) -> f64| {
            median(&mut rows.iter().map(|rounds| what(&rounds[at])).collect::<Vec<_>>())
        };
        let ratio = |what: fn(&Round) -> f64| {
            median(&mut rows.iter().map(|[without, with]| what(with) / what(without)).collect::<Vec<_>>())
        };
        for (at, how) in [(0, "each sends a request"), (1, "handed on")] {
            let (holds, scripts, p99) =
                (of(at, |round| round.holds), of(at, |round| round.scripts), of(at, |round| round.p99));
            println!("    {how}: {holds:.0} holds/s, {scripts:.3} scripts per hold, p99 of lock() {:.2} ms", p99 * 1e3);
        }
        report("64 tasks of one client, one lock: holds/s, handed on / a request each", ratio(|round| round.holds), ">= 20");
        report("scripts per hold, handed on", of(1, |round| round.scripts), "<= 0.2");
        report("p99 of lock(), handed on, ms", of(1, |round| round.p99) * 1e3, "<= 5");
        let theirs = |at: usize| median(&mut beside.iter().map(|row| row[at]).collect::<Vec<_>>());
        println!(
            "    with 8 tasks of another client: theirs {:.0} and {:.0} holds/s, ours {:.0} and {:.0}",
            theirs(0),
            theirs(1),
            theirs(2),
            theirs(3)
        );
        let kept = median(&mut beside.iter().map(|row| row[1] / row[0]).collect::<Vec<_>>());
        report("holds/s of 8 concurrent tasks of another client, handed on / a request each", kept, ">= 0.9");
    });
}
