//! What a failover costs: how many granted locks have no record afterwards, with and without
//! replicas that have them. `cargo bench --bench failovers`; `-- each=20`.
#![allow(missing_docs, clippy::print_stdout)]

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use nestlock::{Error, LockClient, LockClientBuilder, LockGuard};
use nestlock_embedded::{SpawnedCluster, SpawnedSentinel, SpawnedServer};
use tokio::time::sleep;

const LONG: Duration = Duration::from_secs(60);
/// Concurrent failovers: they wait most of the time.
const AT_ONCE: usize = 4;
/// Replicas of each master behind sentinels; a master of the cluster has one.
const REPLICAS: usize = 2;

/// The outcome of a failover: locks that were granted, and those that were lost.
#[derive(Debug, Clone, Copy, Default)]
struct Outcome {
    granted: usize,
    lost: usize,
}

/// What happens to a master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    KilledUpToDate,
    KilledUnheard,
    KilledWithWhoHeard,
    PausedAndResumed,
    SentinelFailover,
    ClusterFailover,
}

impl Fault {
    const ALL: [Self; 6] = [
        Self::KilledUpToDate,
        Self::KilledUnheard,
        Self::KilledWithWhoHeard,
        Self::PausedAndResumed,
        Self::SentinelFailover,
        Self::ClusterFailover,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::KilledUpToDate => "master killed, replicas up to date",
            Self::KilledUnheard => "master killed, no replica had the lock",
            Self::KilledWithWhoHeard => "master killed, and one of its two replicas",
            Self::PausedAndResumed => "master paused, another promoted, resumed: late requests",
            Self::SentinelFailover => "`SENTINEL FAILOVER` while locks are taken",
            Self::ClusterFailover => "`CLUSTER FAILOVER` while locks are taken",
        }
    }

    /// Runs one failover.
    async fn happen(self, replicas: u32) -> Outcome {
        if self == Self::ClusterFailover {
            return gracefully_in_a_cluster(replicas.min(1)).await;
        }
        let group = SpawnedSentinel::start(REPLICAS, 3).expect("a group");
        let [master, one, other] = group.servers() else {
            unreachable!("a master and two replicas")
        };
        let builder = || builder(replicas);
        let client = builder().connect(group.url()).await.expect("a client");
        let is_away = |replica: &SpawnedServer| {
            replica.stop().expect("a signal");
            // unread bytes would stay in its socket, and reach it when it resumes
            ask(master.addr(), "CLIENT KILL TYPE replica");
        };
        let guards = match self {
            Self::KilledUpToDate => {
                let guards = take(&client, 4).await;
                let copied = || {
                    [one, other]
                        .iter()
                        .all(|replica| keys(replica.addr()) == keys(master.addr()))
                };
                until(copied).await;
                master.kill().expect("a signal");
                guards
            }
            Self::KilledUnheard => {
                is_away(one);
                is_away(other);
                let guards = take(&client, 3).await;
                master.kill().expect("a signal");
                one.cont().expect("a signal");
                other.cont().expect("a signal");
                guards
            }
            Self::KilledWithWhoHeard => {
                is_away(other);
                until(|| {
                    ask(one.addr(), "ROLE") == "*5" && keys(one.addr()) == keys(master.addr())
                })
                .await;
                let guards = take(&client, 3).await;
                until(|| keys(one.addr()) == keys(master.addr())).await;
                master.kill().expect("a signal");
                one.kill().expect("a signal");
                other.cont().expect("a signal");
                guards
            }
            Self::PausedAndResumed => return late_requests(&group, replicas).await,
            Self::SentinelFailover | Self::ClusterFailover => {
                let taking = tokio::spawn(take_on(client.clone(), Duration::from_secs(4)));
                sleep(Duration::from_millis(500)).await;
                ask(group.sentinels()[0].addr(), "SENTINEL FAILOVER mymaster");
                let guards = taking.await.expect("no panic");
                settled(|| group.wait_for_another_master(master).map(drop));
                guards
            }
        };
        let new = settled(|| {
            group
                .wait_for_another_master(master)
                .map(SpawnedServer::addr)
        });
        // a lock that it did not have before it became the master is not there
        count(&guards, |_| new)
    }
}

fn builder(replicas: u32) -> LockClientBuilder {
    LockClient::builder()
        .outage_patience(LONG)
        .replicas(replicas, Duration::from_millis(300))
}

/// Acquires locks one after the other. Leaves out those that are refused.
async fn take(client: &LockClient, locks: usize) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for n in 0..locks {
        match client
            .mutex(format!("lock:{n}"))
            .expect("a name")
            .try_lock()
            .await
        {
            Ok(Some(guard)) => guards.push(guard),
            Ok(None) => {}
            Err(error) => assert!(matches!(error, Error::NotReplicated { .. }), "{error}"),
        }
    }
    guards
}

/// Acquires one lock after the other for this time, and keeps them.
async fn take_on(client: LockClient, time: Duration) -> Vec<LockGuard> {
    let (mut guards, from) = (Vec::new(), Instant::now());
    for n in 0.. {
        if from.elapsed() > time {
            break;
        }
        if let Ok(Some(guard)) = client
            .mutex(format!("lock:{n}"))
            .expect("a name")
            .try_lock()
            .await
        {
            guards.push(guard);
        }
        sleep(Duration::from_millis(2)).await;
    }
    guards
}

/// Requests that were in a master's sockets when it was paused, and get a reply when another master
/// has taken over. The clients do not ask the sentinels.
async fn late_requests(group: &SpawnedSentinel, replicas: u32) -> Outcome {
    let master = &group.servers()[0];
    let client = builder(replicas)
        .command_timeout(Duration::from_secs(10))
        .connect(master.url())
        .await
        .expect("a client");
    // the server knows the scripts now
    drop(take(&client, 1).await);
    client.idle().await;
    master.stop().expect("a signal");
    let asked: Vec<_> = (1..9)
        .map(|n| {
            let lock = client.mutex(format!("lock:{n}")).expect("a name");
            tokio::spawn(async move { lock.try_lock().await })
        })
        .collect();
    settled(|| group.wait_for_another_master(master).map(drop));
    master.cont().expect("a signal");
    let mut outcome = Outcome::default();
    for asked in asked {
        // the new master has none of these locks
        let is_granted = matches!(asked.await.expect("no panic"), Ok(Some(_)));
        outcome.granted += usize::from(is_granted);
    }
    outcome.lost = outcome.granted;
    outcome
}

async fn gracefully_in_a_cluster(replicas: u32) -> Outcome {
    let cluster = SpawnedCluster::start(3, 3).expect("a cluster");
    let client = builder(replicas)
        .connect(cluster.url())
        .await
        .expect("a client");
    let taking = tokio::spawn(take_on(client, Duration::from_secs(2)));
    sleep(Duration::from_millis(500)).await;
    settled(|| cluster.failover(&cluster.nodes()[0]).map(drop));
    let guards = taking.await.expect("no panic");
    count(&guards, |name| {
        cluster
            .master_of(SpawnedCluster::slot_of(name))
            .expect("a master")
            .addr()
    })
}

/// Counts the locks whose record is not on its master.
fn count(guards: &[LockGuard], at: impl Fn(&str) -> SocketAddr) -> Outcome {
    let is_lost =
        |guard: &&LockGuard| ask(at(guard.name()), &format!("EXISTS {}", guard.name())) != ":1";
    Outcome {
        granted: guards.len(),
        lost: guards.iter().filter(is_lost).count(),
    }
}

fn settled<T>(wait: impl FnOnce() -> Result<T, nestlock_embedded::SpawnError>) -> T {
    tokio::task::block_in_place(wait).unwrap_or_else(|error| panic!("{error}"))
}

async fn until(is_so: impl Fn() -> bool) {
    let from = Instant::now();
    while !is_so() {
        assert!(from.elapsed() < LONG, "the state was not reached");
        sleep(Duration::from_millis(5)).await;
    }
}

fn keys(server: SocketAddr) -> String {
    ask(server, "DBSIZE")
}

/// Returns the first line of a server's reply.
fn ask(server: SocketAddr, request: &str) -> String {
    let mut line = String::new();
    let asked = TcpStream::connect(server).and_then(|mut stream| {
        write!(stream, "{request}\r\n")?;
        BufReader::new(stream).read_line(&mut line)
    });
    asked.map_or_else(|error| error.to_string(), |_| line.trim_end().to_owned())
}

fn main() {
    let each = std::env::args()
        .find_map(|arg| arg.strip_prefix("each=")?.parse().ok())
        .unwrap_or(20);
    let columns = [0, 1, REPLICAS as u32];
    let cells: Vec<(Fault, u32)> = Fault::ALL
        .into_iter()
        .flat_map(|fault| columns.map(|n| (fault, n)))
        .collect();
    let work = cells
        .iter()
        .flat_map(|cell| std::iter::repeat_n(*cell, each));
    let (work, done) = (Mutex::new(work), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .worker_threads(1)
                    .enable_all()
                    .build();
                let runtime = runtime.expect("a runtime");
                loop {
                    let next = work.lock().expect("no panic").next();
                    let Some((fault, replicas)) = next else { break };
                    let outcome =
                        runtime.block_on(async { tokio::spawn(fault.happen(replicas)).await });
                    done.lock().expect("no panic").push((
                        fault,
                        replicas,
                        outcome.expect("no panic"),
                    ));
                }
            });
        }
    });
    let done = done.into_inner().expect("no panic");
    println!(
        "{each} failovers per cell: locks that were granted and lost, of all that were granted"
    );
    println!("| what happens | `replicas(0)` | 1 | all |\n|---|---|---|---|");
    for fault in Fault::ALL {
        let cell = |replicas| {
            let of = done
                .iter()
                .filter(|(of, n, _)| (*of, *n) == (fault, replicas))
                .map(|(_, _, outcome)| outcome);
            let (lost, granted) = of.fold((0, 0), |(lost, granted), one| {
                (lost + one.lost, granted + one.granted)
            });
            if granted == 0 {
                "none granted".to_owned()
            } else {
                format!("{lost} of {granted}")
            }
        };
        println!(
            "| {} | {} | {} | {} |",
            fault.name(),
            cell(0),
            cell(1),
            cell(REPLICAS as u32)
        );
    }
}
