//! One lock + unlock without contention, compared with the same two EVALSHA sent bare by fred.
//!
//! Rounds of both alternate in one run; figures are ratios of the medians. `make bench`, or
//! `cargo bench --bench uncontended`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::Instant;

use fred::{
    clients::Client,
    interfaces::{ClientLike, LuaInterface},
    types::Value,
};
use nestlock::{LockClient, Tuning, Wire};
use support::{
    bare, median, report,
    scripts::{ACQUIRE, OWNER, RELEASE},
    server,
};
use tokio::runtime::{Builder, Runtime};

const ROUNDS: usize = 15;
const TASKS: usize = 64;

async fn bare_pair(client: &Client, acquire: &str, release: &str, name: &str, channel: &str) {
    let taken: Value = client
        .evalsha(acquire, name, vec![OWNER, "30000", "1"])
        .await
        .expect("an answer");
    assert_eq!(taken.as_i64(), Some(1));
    let freed: Value = client
        .evalsha(release, name, vec![OWNER, "0", channel])
        .await
        .expect("an answer");
    assert_eq!(freed.as_i64(), Some(1));
}

async fn bare_pairs(client: Client, name: String, pairs: usize) -> Vec<f64> {
    let (acquire, release) = (
        sha1_smol::Sha1::from(ACQUIRE).digest().to_string(),
        sha1_smol::Sha1::from(RELEASE).digest().to_string(),
    );
    let channel = format!("redisson_lock__channel:{{{name}}}");
    let mut micros = Vec::with_capacity(pairs);
    for _ in 0..pairs {
        let start = Instant::now();
        bare_pair(&client, &acquire, &release, &name, &channel).await;
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
    micros
}

async fn our_pairs(client: LockClient, name: String, pairs: usize) -> Vec<f64> {
    let lock = client.reentrant_lock(name).expect("a name");
    let mut micros = Vec::with_capacity(pairs);
    for _ in 0..pairs {
        let start = Instant::now();
        lock.lock()
            .await
            .expect("the lock")
            .unlock()
            .await
            .expect("the unlock");
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
    micros
}

async fn pings(client: &Client, count: usize) -> Vec<f64> {
    let mut micros = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        let _: String = client.ping(None).await.expect("an answer");
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
    micros
}

/// One task, in the body of `block_on` or in a spawned task.
async fn latency(ours: &LockClient, bare: &Client, spawned: bool, what: &str, bound: &str) {
    let (mut plain, mut nest, mut ping) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        ping.extend(pings(bare, 200).await);
        if spawned {
            plain.extend(
                tokio::spawn(bare_pairs(bare.clone(), "one".into(), 400))
                    .await
                    .expect("a task"),
            );
            nest.extend(
                tokio::spawn(our_pairs(ours.clone(), "one".into(), 400))
                    .await
                    .expect("a task"),
            );
        } else {
            plain.extend(bare_pairs(bare.clone(), "one".into(), 400).await);
            nest.extend(our_pairs(ours.clone(), "one".into(), 400).await);
        }
    }
    let (plain, nest, ping) = (median(&mut plain), median(&mut nest), median(&mut ping));
    println!("    PING {ping:.0} us, bare pair {plain:.0} us, lock + unlock {nest:.0} us");
    report(
        &format!("latency of one pair / two bare EVALSHA, 1 task, {what}"),
        nest / plain,
        bound,
    );
}

/// 64 tasks on distinct names.
async fn throughput(ours: &LockClient, bare: &Client, what: &str, bound: &str) {
    let mut ratios = Vec::new();
    let (mut ours_best, mut bare_best) = (0_f64, 0_f64);
    for round in 0..ROUNDS {
        let (mut our_rate, mut bare_rate) = (0.0, 0.0);
        for first in [round % 2 == 0, round % 2 != 0] {
            let start = Instant::now();
            let tasks: Vec<_> = (0..TASKS)
                .map(|task| {
                    let name = format!("task-{task}");
                    if first {
                        tokio::spawn(our_pairs(ours.clone(), name, 200))
                    } else {
                        tokio::spawn(bare_pairs(bare.clone(), name, 200))
                    }
                })
                .collect();
            for task in tasks {
                task.await.expect("a task");
            }
            let rate = (TASKS * 200) as f64 / start.elapsed().as_secs_f64();
            if first {
                our_rate = rate;
            } else {
                bare_rate = rate;
            }
        }
        ratios.push(our_rate / bare_rate);
        ours_best = ours_best.max(our_rate);
        bare_best = bare_best.max(bare_rate);
    }
    println!("    best rounds: bare {bare_best:.0} pairs/s, lock + unlock {ours_best:.0} pairs/s");
    report(
        &format!("pairs/s with 64 tasks / bare EVALSHA with 64 tasks, {what}"),
        median(&mut ratios),
        bound,
    );
}

async fn measure(url: &str, runtime: &str, wire: Wire) {
    let bare = bare(url).await;
    for script in [ACQUIRE, RELEASE] {
        let _: Value = bare.script_load(script).await.expect("a digest");
    }
    let ours = LockClient::builder()
        .tuning(Tuning {
            wire,
            ..Tuning::default()
        })
        .connect(url)
        .await
        .expect("a connection");
    let what = |place: &str| {
        format!(
            "{runtime} {place}, {}",
            if wire == Wire::Own {
                "own wire"
            } else {
                "over fred"
            }
        )
    };
    latency(&ours, &bare, false, &what("main"), "<= 1.25").await;
    latency(&ours, &bare, true, &what("spawned"), "").await;
    throughput(&ours, &bare, &what("spawned"), ">= 0.85").await;
    ours.shutdown().await.expect("a clean end");
}

fn main() {
    let server = server();
    let multi = || {
        Builder::new_multi_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    };
    let single = || {
        Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
    };
    for (name, make) in [
        ("multi-thread", multi as fn() -> Runtime),
        ("current-thread", single),
    ] {
        for wire in [Wire::Fred, Wire::Own] {
            make().block_on(measure(server.url(), name, wire));
        }
    }
}
