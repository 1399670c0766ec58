//! Compares nestlock's RedLock with redsync (Go) and rslock (Rust): acquire and release without
//! contention, over three real servers, in one run.
//!
//! Run: `make peers-red`, which builds the redsync worker first.
#![allow(missing_docs, clippy::print_stdout, clippy::cast_precision_loss)]

mod stats;

use std::{
    io::{BufRead, BufReader, Lines, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, LockClient, RedLockOptions, Tuning, Wire};
use nestlock_embedded::SpawnedServer;
use redis::aio::MultiplexedConnection;
use rslock::LockManager;
use stats::median;
use tokio::time::timeout;

const ROUNDS: usize = 15;
const SERVERS: usize = 3;
/// The expiry. nestlock and redsync wait 5 % of it for silent servers.
const TTL: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_millis(100);
/// A library in this process that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pairs of a single worker, and of each of many.
const ALONE: usize = 300;
const MANY: usize = 60;
const WORKERS: usize = 32;

#[derive(Debug, Clone, Copy)]
enum Library {
    Nestlock,
    /// nestlock over fred.
    NestlockFred,
    /// With go-redis as it comes, which waits 3 s for a silent server, whatever redsync's timeout
    /// is.
    Redsync,
    /// With `ContextTimeoutEnabled`, and a limit for releases as well.
    RedsyncLimited,
    Rslock,
}

impl Library {
    fn name(self) -> &'static str {
        match self {
            Self::Nestlock => "nestlock",
            Self::NestlockFred => "nestlock over fred",
            Self::Redsync => "redsync",
            Self::RedsyncLimited => "redsync, ContextTimeoutEnabled",
            Self::Rslock => "rslock",
        }
    }

    async fn connect(self, servers: &[SpawnedServer]) -> Contender {
        let mut clients = Vec::new();
        for server in servers {
            let builder = match self {
                Self::Nestlock => LockClient::builder(),
                Self::NestlockFred => LockClient::builder().tuning(Tuning {
                    wire: Wire::Fred,
                    ..Tuning::default()
                }),
                _ => continue,
            };
            clients.push(builder.connect(server.url()).await.expect("a client"));
        }
        match self {
            Self::Nestlock | Self::NestlockFred => Contender::Nestlock(clients),
            Self::Redsync => Contender::Redsync(Worker::start(servers), Duration::ZERO),
            Self::RedsyncLimited => Contender::Redsync(Worker::start(servers), LIMIT),
            Self::Rslock => {
                let mut manager =
                    LockManager::new(servers.iter().map(SpawnedServer::url).collect());
                // the others try once, too
                manager.set_retry(1, Duration::from_millis(200));
                Contender::Rslock(manager)
            }
        }
    }
}

/// A library that is connected to three servers.
enum Contender {
    Nestlock(Vec<LockClient>),
    Redsync(Worker, Duration),
    Rslock(LockManager),
}

/// The lock of one worker.
enum Lock {
    Nestlock(nestlock::Lock),
    Rslock(LockManager, String),
}

/// Latency in seconds, and rates.
#[derive(Debug, Clone, Copy)]
struct Figures {
    /// The median of the pairs.
    latency: f64,
    /// Successful pairs per second.
    rate: f64,
    /// Pairs that did not hold the lock.
    failures: f64,
}

impl Contender {
    fn lock(&self, worker: usize) -> Lock {
        let name = format!("lock-{worker}");
        match self {
            Self::Nestlock(clients) => {
                let options = RedLockOptions::new().expiry(TTL);
                Lock::Nestlock(LockClient::red_lock(clients, name, options).expect("three servers"))
            }
            Self::Rslock(manager) => Lock::Rslock(manager.clone(), name),
            Self::Redsync(..) => unreachable!("redsync's locks are its own"),
        }
    }

    /// Makes `pairs` pairs with each of the workers, and measures them.
    async fn bench(&mut self, pairs: usize, workers: usize) -> Figures {
        if let Self::Redsync(worker, limit) = self {
            return worker.bench(pairs, workers, *limit);
        }
        let samples = Arc::new(Mutex::new(Vec::with_capacity(pairs * workers)));
        let start = Instant::now();
        let all = async {
            if workers == 1 {
                // in the body of `block_on`: the figure of a spawned task depends on what shares
                // its thread
                return self.lock(0).pairs(pairs, &samples).await;
            }
            let tasks = (0..workers).map(|worker| {
                let (lock, samples) = (self.lock(worker), Arc::clone(&samples));
                tokio::spawn(timeout(PATIENCE, async move {
                    lock.pairs(pairs, &samples).await;
                }))
            });
            for task in tasks.collect::<Vec<_>>() {
                let _ = task.await.expect("a worker");
            }
        };
        let _ = timeout(PATIENCE, all).await;
        let elapsed = start.elapsed().as_secs_f64();
        let samples = samples.lock().expect("no panic");
        let held = samples.iter().filter(|(_, held)| *held).count() as f64;
        Figures {
            latency: median(samples.iter().map(|(time, _)| *time)),
            rate: held / elapsed,
            failures: samples.len() as f64 - held,
        }
    }
}

impl Lock {
    async fn pairs(&self, pairs: usize, samples: &Mutex<Vec<(f64, bool)>>) {
        for _ in 0..pairs {
            let start = Instant::now();
            let held = self.pair().await;
            samples
                .lock()
                .expect("no panic")
                .push((start.elapsed().as_secs_f64(), held));
        }
    }

    /// Acquires and releases the lock. Returns `true` if it was held.
    async fn pair(&self) -> bool {
        match self {
            // with a lease, and so without renewals, like the others
            Self::Nestlock(lock) => {
                match lock.try_lock_with(AcquireOptions::new().lease(TTL)).await {
                    Ok(Some(guard)) => guard.unlock().await.is_ok(),
                    _ => false,
                }
            }
            Self::Rslock(manager, name) => match manager.lock(name.as_str(), TTL).await {
                Ok(lock) => {
                    lock.release().await;
                    true
                }
                Err(_) => false,
            },
        }
    }
}

/// The worker of `tests/interop/redsync`. Its protocol is in `tests/interop/README.md`.
struct Worker {
    process: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    fn start(servers: &[SpawnedServer]) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let program = root.join("target/interop/redsync");
        let modified = |path: &Path| path.metadata().and_then(|meta| meta.modified()).ok();
        let source = modified(&root.join("tests/interop/redsync/main.go"));
        assert!(
            modified(&program) >= source,
            "{} is missing or old: run `make interop`",
            program.display()
        );
        let mut process = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("redsync does not start: {error}; run `make interop`"));
        let requests = process.stdin.take().expect("its stdin");
        let answers = BufReader::new(process.stdout.take().expect("its stdout")).lines();
        let mut worker = Self {
            process,
            requests,
            answers,
        };
        let urls: Vec<_> = servers.iter().map(SpawnedServer::url).collect();
        worker.ask(&format!("connect {}", urls.join(" ")), "connected");
        worker
    }

    /// Sends a request. Returns the numbers of the reply.
    fn ask(&mut self, request: &str, answered: &str) -> Vec<f64> {
        writeln!(self.requests, "{request}").expect("redsync reads");
        let line = self.answers.next().expect("redsync answers").expect("text");
        let numbers = line
            .strip_prefix("@ ")
            .and_then(|line| line.strip_prefix(answered));
        let numbers = numbers
            .unwrap_or_else(|| panic!("{request}: {line}"))
            .split_whitespace();
        numbers
            .map(|number| number.parse().expect("a number"))
            .collect()
    }

    fn bench(&mut self, pairs: usize, workers: usize, limit: Duration) -> Figures {
        let request = format!(
            "bench lock {pairs} {workers} {} {}",
            TTL.as_millis(),
            limit.as_millis()
        );
        let answer = self.ask(&request, "benched");
        let [nanoseconds, rate, failures] = answer[..] else {
            panic!("{request}: {answer:?}")
        };
        Figures {
            latency: nanoseconds / 1e9,
            rate,
            failures,
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::main]
async fn main() {
    all_answer().await;
    one_hangs().await;
}

/// Compares all libraries in turn on the same servers, so that the machine's noise affects them
/// alike.
async fn all_answer() {
    let libraries = [
        Library::Nestlock,
        Library::NestlockFred,
        Library::Redsync,
        Library::Rslock,
    ];
    let servers = start();
    let mut bare = bare(&servers[0]).await;
    let mut contenders = Vec::new();
    for library in libraries {
        contenders.push(library.connect(&servers).await);
    }
    let mut pings = Vec::new();
    let mut rounds = vec![Vec::new(); libraries.len()];
    for round in 0..=ROUNDS {
        let ping = ping(&mut bare).await;
        for (at, contender) in contenders.iter_mut().enumerate() {
            let (alone, many) = (
                contender.bench(ALONE, 1).await,
                contender.bench(MANY, WORKERS).await,
            );
            assert!(
                alone.failures + many.failures == 0.0,
                "{} failed",
                libraries[at].name()
            );
            // the first round loads the scripts
            if round > 0 {
                rounds[at].push([alone.latency / ping, alone.rate, many.rate]);
            }
        }
        if round > 0 {
            pings.push(ping);
        }
    }
    println!(
        "All three servers reply: medians of {ROUNDS} alternating rounds; a PING takes {:.0} us",
        median(pings) * 1e6
    );
    head();
    for (library, rounds) in libraries.iter().zip(&rounds) {
        row(
            library.name(),
            (0..3).map(|figure| median(rounds.iter().map(|round| round[figure]))),
            "",
        );
    }
    for (ours, theirs) in [(0, 2), (0, 3), (1, 2), (1, 3)] {
        let name = format!("{} / {}", libraries[ours].name(), libraries[theirs].name());
        let ratios = rounds[ours].iter().zip(&rounds[theirs]);
        row(
            &name,
            (0..3).map(|figure| {
                median(
                    ratios
                        .clone()
                        .map(|(ours, theirs)| ours[figure] / theirs[figure]),
                )
            }),
            "",
        );
    }
}

/// Compares the libraries, each on servers of its own: what a library leaves behind on the server
/// that hangs affects no other.
async fn one_hangs() {
    // the library, the pairs of a single worker, and those of each of many
    let libraries = [
        (Library::Nestlock, 10, 5),
        (Library::NestlockFred, 10, 5),
        (Library::RedsyncLimited, 10, 5),
        (Library::Redsync, 1, 1),
        (Library::Rslock, 5, 5),
    ];
    let (mut all, mut pings) = (Vec::new(), Vec::new());
    for (library, alone, many) in libraries {
        let servers = start();
        let mut contender = library.connect(&servers).await;
        contender.bench(MANY, WORKERS).await;
        pings.push(ping(&mut bare(&servers[0]).await).await);
        servers[SERVERS - 1].stop().expect("a server");
        all.push([
            contender.bench(alone, 1).await,
            contender.bench(many, WORKERS).await,
        ]);
    }
    let ping = median(pings);
    println!(
        "\nOne of the three is stopped (SIGSTOP), expiry {TTL:?}; a PING takes {:.0} us",
        ping * 1e6
    );
    head();
    for ((library, ..), [alone, many]) in libraries.iter().zip(&all) {
        let note = match (alone.latency * 1e3, alone.failures + many.failures) {
            (latency, _) if latency.is_nan() => format!("hangs: no pair within {PATIENCE:?}"),
            (latency, 0.0) => format!("{latency:.0} ms"),
            (latency, _) => format!(
                "{latency:.0} ms; failed: {} and {}",
                alone.failures, many.failures
            ),
        };
        row(
            library.name(),
            [alone.latency / ping, alone.rate, many.rate],
            &note,
        );
    }
    for rival in [2, 4] {
        let [[ours, our_many], [theirs, their_many]] = [all[0], all[rival]];
        let name = format!("nestlock / {}", libraries[rival].0.name());
        row(
            &name,
            [
                ours.latency / theirs.latency,
                ours.rate / theirs.rate,
                our_many.rate / their_many.rate,
            ],
            "",
        );
    }
}

fn start() -> Vec<SpawnedServer> {
    (0..SERVERS)
        .map(|_| SpawnedServer::start().unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

async fn bare(server: &SpawnedServer) -> MultiplexedConnection {
    let client = redis::Client::open(server.url()).expect("a URL");
    client
        .get_multiplexed_async_connection()
        .await
        .expect("a connection")
}

/// Returns the median of a round trip, in seconds.
async fn ping(bare: &mut MultiplexedConnection) -> f64 {
    let mut times = Vec::with_capacity(ALONE);
    for _ in 0..ALONE {
        let start = Instant::now();
        redis::cmd("PING").exec_async(bare).await.expect("a PONG");
        times.push(start.elapsed().as_secs_f64());
    }
    median(times)
}

fn head() {
    let many = format!("pairs/s, {WORKERS} workers");
    println!(
        "{:<58}{:>17}{:>19}{:>21}",
        "acquire + release", "median in PINGs", "pairs/s, 1 worker", many
    );
}

fn row(name: &str, figures: impl IntoIterator<Item = f64>, note: &str) {
    let figures: Vec<f64> = figures.into_iter().collect();
    println!(
        "{name:<58}{:>17.2}{:>19.2}{:>21.2}   {note}",
        figures[0], figures[1], figures[2]
    );
}
