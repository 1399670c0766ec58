//! What metrics cost: pairs of lock and unlock with a Prometheus recorder, and without one.
//!
//! `cargo bench --bench metrics --features metrics`. A process has only one recorder, so each round
//! runs in its own process, and rounds alternate. With `OFF=program`, this bench built without the
//! feature, the figures are also compared with those of that program.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::{alloc::System, env, path::PathBuf, process::Command, time::Instant};

use metrics_exporter_prometheus::PrometheusBuilder;
use nestlock::LockClient;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use support::{median, report, server};

const ROUNDS: usize = 21;
const TASKS: usize = 64;
const PAIRS: usize = 300;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

async fn pairs(client: &LockClient, each: usize) -> f64 {
    let start = Instant::now();
    let work = |task: usize| {
        let lock = client.mutex(format!("task-{task}")).expect("a name");
        tokio::spawn(async move {
            for _ in 0..each {
                lock.lock()
                    .await
                    .expect("the lock")
                    .unlock()
                    .await
                    .expect("the unlock");
            }
        })
    };
    let tasks: Vec<_> = (0..TASKS).map(work).collect();
    for task in tasks {
        task.await.expect("a task");
    }
    (TASKS * each) as f64 / start.elapsed().as_secs_f64()
}

/// Runs one round, in its own process: prints pairs per second, and allocations per pair of one
/// task.
#[tokio::main(worker_threads = 2)]
async fn round(recorder: bool, url: &str) {
    if recorder {
        let builder = PrometheusBuilder::new()
            .set_buckets(&[0.001, 0.01, 0.1, 1.0])
            .expect("buckets");
        builder.install_recorder().expect("the only one");
    }
    let client = LockClient::connect(url).await.expect("a client");
    pairs(&client, 50).await;
    let rate = pairs(&client, PAIRS).await;
    let lock = client.mutex("one").expect("a name");
    let before = ALLOCATOR.stats().allocations;
    for _ in 0..1_000 {
        lock.lock()
            .await
            .expect("the lock")
            .unlock()
            .await
            .expect("the unlock");
    }
    let allocations = (ALLOCATOR.stats().allocations - before) as f64 / 1_000.0;
    println!("{rate} {allocations}");
}

/// Returns the figures that one round printed.
fn measured(program: &PathBuf, recorder: bool, url: &str) -> [f64; 2] {
    let output = Command::new(program)
        .args(["round", if recorder { "with" } else { "without" }, url])
        .output()
        .expect("a round");
    let text = String::from_utf8(output.stdout).expect("text");
    let mut figures = text
        .split_whitespace()
        .map(|figure| figure.parse().expect("a figure"));
    [figures.next(), figures.next()].map(|figure| figure.expect("two figures"))
}

fn main() {
    let args: Vec<String> = env::args().collect();
    if let [_, word, recorder, url] = &args[..]
        && word == "round"
    {
        return round(recorder == "with", url);
    }
    let (server, own) = (server(), env::current_exe().expect("a program"));
    let off = env::var_os("OFF").map(PathBuf::from);
    let mut programs = vec![(own.clone(), false), (own, true)];
    programs.extend(off.map(|off| (off, false)));
    let mut rates = vec![Vec::new(); programs.len()];
    let mut allocations = rates.clone();
    for turn in 0..ROUNDS {
        for at in 0..programs.len() {
            let at = (at + turn) % programs.len();
            let [rate, pair] = measured(&programs[at].0, programs[at].1, server.url());
            rates[at].push(rate);
            allocations[at].push(pair);
        }
    }
    // ratios of neighbouring rounds, as the speed of the machine drifts
    let against = |at: usize, base: usize| {
        let mut ratios: Vec<f64> = rates[at]
            .iter()
            .zip(&rates[base])
            .map(|(one, other)| one / other)
            .collect();
        median(&mut ratios)
    };
    let mut of = |at: usize| median(&mut allocations[at]);
    let (without, with) = (of(0), of(1));
    report(
        "pairs/s, 64 tasks: with a Prometheus recorder / without one",
        against(1, 0),
        "at least 0.97",
    );
    report(
        "allocations per pair, 1 task: additional ones with the recorder",
        with - without,
        "at most 1",
    );
    if programs.len() > 2 {
        report(
            "pairs/s, 64 tasks: feature on, no recorder / feature off",
            against(0, 2),
            "about 1",
        );
        report(
            "pairs/s, 64 tasks: with a recorder / feature off",
            against(1, 2),
            "at least 0.97",
        );
        report("allocations per pair, 1 task: feature off", of(2), "");
    }
}
