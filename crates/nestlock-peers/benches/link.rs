//! Compares nestlock's lock and unlock with the same two scripts, sent bare by redis-rs: pairs,
//! processor time of client and server, allocations, latency in PINGs. All of it in one run, in
//! rounds that alternate; ratios are medians of the rounds' ratios.
//!
//! Run: `cargo bench -p nestlock-peers --bench link`. To count system calls, put
//! `strace -f -c -e trace=write,writev,sendto,sendmsg` before the bench's binary with
//! `only=nestlock` or `only=redis-rs`, which only makes 32 tasks of 2,000 pairs and prints their
//! pairs/s. `tasks=N` changes the number of tasks, `current-thread` the runtime, and `alone` makes
//! it one task in `block_on`.
#![allow(missing_docs, clippy::print_stdout, clippy::cast_precision_loss)]

#[path = "../../../benches/support/scripts.rs"]
mod scripts;
mod stats;

use std::{
    alloc::System,
    time::{Duration, Instant},
};

use nestlock::LockClient;
use nestlock_embedded::SpawnedServer;
use nix::sys::resource::{UsageWho, getrusage};
use redis::aio::MultiplexedConnection;
use scripts::{ACQUIRE, OWNER, RELEASE};
use stats::median;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use tokio::runtime::{Builder, Runtime};

const ROUNDS: usize = 11;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn allocations() -> usize {
    let stats = ALLOCATOR.stats();
    stats.allocations + stats.reallocations
}

#[derive(Clone)]
enum Contender {
    Nestlock(LockClient),
    Bare {
        connection: MultiplexedConnection,
        acquire: String,
        release: String,
    },
}

impl Contender {
    async fn nestlock(url: &str) -> Self {
        Self::Nestlock(LockClient::connect(url).await.expect("a client"))
    }

    async fn bare(url: &str) -> Self {
        let client = redis::Client::open(url).expect("a URL");
        let mut connection = client
            .get_multiplexed_async_connection()
            .await
            .expect("a connection");
        let mut digests = Vec::new();
        for script in [ACQUIRE, RELEASE] {
            let load = redis::cmd("SCRIPT").arg("LOAD").arg(script).to_owned();
            digests.push(
                load.query_async::<String>(&mut connection)
                    .await
                    .expect("a digest"),
            );
        }
        let release = digests.pop().expect("two");
        Self::Bare {
            connection,
            acquire: digests.pop().expect("two"),
            release,
        }
    }

    /// Locks and unlocks `pairs` times. Returns how long each pair took, in microseconds.
    async fn pairs(self, name: String, pairs: usize) -> Vec<f64> {
        let mut micros = Vec::with_capacity(pairs);
        let mut time = |start: Instant| micros.push(start.elapsed().as_secs_f64() * 1e6);
        match self {
            Self::Nestlock(client) => {
                let lock = client.reentrant_lock(name).expect("a name");
                for _ in 0..pairs {
                    let start = Instant::now();
                    lock.lock()
                        .await
                        .expect("the lock")
                        .unlock()
                        .await
                        .expect("the unlock");
                    time(start);
                }
            }
            Self::Bare {
                mut connection,
                acquire,
                release,
            } => {
                let channel = format!("redisson_lock__channel:{{{name}}}");
                for _ in 0..pairs {
                    let start = Instant::now();
                    let mut ask = redis::cmd("EVALSHA");
                    ask.arg(&acquire)
                        .arg(1)
                        .arg(&name)
                        .arg(OWNER)
                        .arg(30_000)
                        .arg(1);
                    assert_eq!(
                        ask.query_async::<i64>(&mut connection)
                            .await
                            .expect("an answer"),
                        1
                    );
                    let mut ask = redis::cmd("EVALSHA");
                    ask.arg(&release)
                        .arg(1)
                        .arg(&name)
                        .arg(OWNER)
                        .arg(0)
                        .arg(&channel);
                    assert_eq!(
                        ask.query_async::<i64>(&mut connection)
                            .await
                            .expect("an answer"),
                        1
                    );
                    time(start);
                }
            }
        }
        micros
    }
}

/// The costs of a round.
#[derive(Debug, Clone, Copy)]
struct Cost {
    /// Pairs per second.
    rate: f64,
    /// The median of a pair, in microseconds.
    latency: f64,
    /// The processor time of a pair, in microseconds.
    client: f64,
    server: f64,
    allocations: f64,
}

fn processor_time() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("figures");
    let micros = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 * 1e6 + time.tv_usec() as f64;
    micros(usage.user_time()) + micros(usage.system_time())
}

async fn server_time(connection: &mut MultiplexedConnection) -> f64 {
    let info: String = redis::cmd("INFO")
        .arg("cpu")
        .query_async(connection)
        .await
        .expect("figures");
    let field = |name: &str| -> f64 {
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .expect("a field");
        line.trim().parse().expect("a number")
    };
    (field("used_cpu_user:") + field("used_cpu_sys:")) * 1e6
}

async fn round(
    contender: &Contender,
    tasks: usize,
    each: usize,
    control: &mut MultiplexedConnection,
) -> Cost {
    let (server, client, allocated) = (server_time(control).await, processor_time(), allocations());
    let start = Instant::now();
    let mut micros = Vec::new();
    if tasks == 1 {
        micros = contender.clone().pairs("alone".into(), each).await;
    } else {
        let tasks: Vec<_> = (0..tasks)
            .map(|task| tokio::spawn(contender.clone().pairs(format!("task-{task}"), each)))
            .collect();
        for task in tasks {
            micros.append(&mut task.await.expect("a task"));
        }
    }
    let pairs = (tasks * each) as f64;
    Cost {
        rate: pairs / start.elapsed().as_secs_f64(),
        latency: median(micros),
        client: (processor_time() - client) / pairs,
        allocations: (allocations() - allocated) as f64 / pairs,
        server: (server_time(control).await - server) / pairs,
    }
}

fn of(costs: &[[Cost; 2]], figure: impl Fn(&[Cost; 2]) -> f64) -> f64 {
    median(costs.iter().map(figure))
}

async fn compare(url: &str, runtime: &str, tasks: usize, each: usize, bound: &str) {
    let contenders = [Contender::nestlock(url).await, Contender::bare(url).await];
    let Contender::Bare { connection, .. } = &contenders[1] else {
        unreachable!()
    };
    let mut control = connection.clone();
    let (mut costs, mut pings) = (Vec::new(), Vec::new());
    for number in 0..=ROUNDS {
        let mut both = [None, None];
        for turn in 0..2 {
            let who = (turn + number) % 2;
            both[who] = Some(round(&contenders[who], tasks, each, &mut control).await);
        }
        if tasks == 1 {
            for _ in 0..each {
                let start = Instant::now();
                redis::cmd("PING")
                    .exec_async(&mut control)
                    .await
                    .expect("an answer");
                pings.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
        // the first round warms up
        if number > 0 {
            costs.push(both.map(|cost| cost.expect("both")));
        }
    }
    println!("{tasks} tasks, {runtime} runtime; nestlock and redis-rs:");
    println!(
        "    pairs/s            {:>9.0} {:>9.0}",
        of(&costs, |both| both[0].rate),
        of(&costs, |both| both[1].rate)
    );
    println!(
        "    ratio              {:>9.2}           {bound}",
        of(&costs, |both| both[0].rate / both[1].rate)
    );
    for (what, figure) in [
        (
            "latency of a pair, us",
            (|cost| cost.latency) as fn(&Cost) -> f64,
        ),
        ("client, us a pair", |cost| cost.client),
        ("server, us a pair", |cost| cost.server),
        ("allocations a pair", |cost| cost.allocations),
    ] {
        let [ours, theirs] = [0, 1].map(|who| of(&costs, |both| figure(&both[who])));
        let ratio = of(&costs, |both| figure(&both[0]) / figure(&both[1]));
        println!("    {what:<22}{ours:>6.1} {theirs:>9.1}   ratio {ratio:.2}");
    }
    if tasks == 1 {
        let ping = median(pings);
        println!(
            "    latency of a pair in PINGs of redis-rs ({ping:.0} us): {:.2}",
            of(&costs, |both| both[0].latency) / ping
        );
    }
    if let Contender::Nestlock(client) = &contenders[0] {
        client.shutdown().await.expect("a clean end");
    }
}

fn main() {
    let server = SpawnedServer::start().unwrap_or_else(|error| panic!("{error}"));
    let url = server.url();
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
    let only = std::env::args().find_map(|arg| arg.strip_prefix("only=").map(str::to_owned));
    if let Some(only) = only {
        let runtime = if std::env::args().any(|arg| arg == "current-thread") {
            single()
        } else {
            multi()
        };
        runtime.block_on(async {
            let contender = if only == "nestlock" {
                Contender::nestlock(&url).await
            } else {
                Contender::bare(&url).await
            };
            let many = std::env::args()
                .find_map(|arg| arg.strip_prefix("tasks=")?.parse().ok())
                .unwrap_or(32);
            let is_alone = std::env::args().any(|arg| arg == "alone");
            let begin = Instant::now();
            if is_alone {
                contender.pairs("alone".into(), 2_000).await;
            } else {
                let pairs =
                    |task| tokio::spawn(contender.clone().pairs(format!("task-{task}"), 2_000));
                for task in (0..many).map(pairs).collect::<Vec<_>>() {
                    task.await.expect("a task");
                }
            }
            let tasks = if is_alone { 1 } else { many };
            println!(
                "{:.0} pairs/s",
                f64::from(tasks * 2_000) / begin.elapsed().as_secs_f64()
            );
        });
        return;
    }
    for (name, make, tasks, each, bound) in [
        ("multi-thread", multi as fn() -> Runtime, 1, 2_000, ">= 1.2"),
        ("multi-thread", multi, 32, 500, ">= 1.25"),
        ("multi-thread", multi, 256, 100, ">= 1.15"),
        ("current-thread", single, 64, 300, ">= 0.95"),
    ] {
        let runtime = make();
        runtime.block_on(compare(&url, name, tasks, each, bound));
        runtime.shutdown_timeout(Duration::from_secs(1));
    }
}
