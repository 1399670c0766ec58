//! A cluster of three masters compared with one server, in alternating rounds; and the time until a
//! lock can be acquired after the loss of a master. `cargo bench --bench cluster`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nestlock::LockClient;
use nestlock_embedded::{SpawnedCluster, SpawnedServer};
use support::{median, pairs, quantile, report};

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(500);
const TASKS: usize = 64;
const FAILOVERS: usize = 5;

/// Returns one line of a server's reply to an inline command.
fn ask(at: SocketAddr, command: &str) -> std::io::Result<String> {
    let stream = TcpStream::connect(at)?;
    stream.set_read_timeout(Some(Duration::from_millis(50)))?;
    (&stream).write_all(format!("{command}\r\n").as_bytes())?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line)
}

/// Returns the processor seconds that a server has used.
fn cpu(server: &SpawnedServer) -> f64 {
    let stat =
        std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).expect("its statistics");
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .expect("a name")
        .1
        .split_whitespace()
        .collect();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("ticks");
    (ticks(11) + ticks(12)) / 100.0
}

async fn beside_one_server() {
    let (cluster, one) = (
        SpawnedCluster::start(3, 0).expect("a cluster"),
        SpawnedServer::start().expect("a server"),
    );
    let in_cluster = LockClient::connect(cluster.url())
        .await
        .expect("the cluster");
    let at_one = LockClient::connect(one.url()).await.expect("the server");
    for tasks in [1, TASKS] {
        let (mut ratios, mut costs) = (Vec::new(), (Vec::new(), Vec::new()));
        for _ in 0..ROUNDS {
            let (before, nodes) = (cpu(&one), cluster.nodes());
            let alone = pairs(&at_one, tasks, ROUND).await;
            costs
                .0
                .push((cpu(&one) - before) / (alone * ROUND.as_secs_f64()) * 1e6);
            let before: f64 = nodes.iter().map(cpu).sum();
            let shared = pairs(&in_cluster, tasks, ROUND).await;
            let after: f64 = nodes.iter().map(cpu).sum();
            costs
                .1
                .push((after - before) / (shared * ROUND.as_secs_f64()) * 1e6);
            ratios.push(shared / alone);
        }
        report(
            &format!("{tasks} tasks, pairs/s in a cluster of 3 / at one server"),
            median(&mut ratios),
            "",
        );
        report(
            "  processor time of the one server per pair",
            median(&mut costs.0),
            "us",
        );
        report("  of the three nodes, together", median(&mut costs.1), "us");
    }
}

/// Returns the milliseconds from the moment at which a replica serves in place of its master until
/// the first pair through it. With `elsewhere`, measures from the moment at which another master
/// serves again, which refuses all requests while some slots have no master.
async fn after_a_loss(lose: Loss, elsewhere: bool) -> f64 {
    let cluster = Arc::new(SpawnedCluster::start(3, 3).expect("a cluster"));
    let client = LockClient::builder()
        .outage_patience(Duration::from_secs(30))
        .connect(cluster.url())
        .await
        .expect("the cluster");
    let master_of = |name: &str| {
        cluster
            .master_of(SpawnedCluster::slot_of(name))
            .expect("a master")
            .addr()
    };
    let master = master_of("l");
    let mut names = (0..).map(|n| {
        if elsewhere {
            format!("l{n}")
        } else {
            "l".to_owned()
        }
    });
    let name = names
        .find(|name| (master_of(name) != master) == elsewhere)
        .expect("there are others");
    let lock = client.reentrant_lock(&name).expect("a name");
    lock.lock()
        .await
        .expect("the lock")
        .unlock()
        .await
        .expect("the unlock");
    let others: Vec<SocketAddr> = cluster
        .addrs()
        .into_iter()
        .filter(|addr| *addr != master)
        .collect();
    let serves = thread::spawn(move || {
        // a node that is not the master of the slot replies MOVED, or that the cluster is down
        let probe = format!("SET {{{name}}}probe 1");
        let serves = || {
            others
                .iter()
                .any(|at| ask(*at, &probe).is_ok_and(|said| said.starts_with("+OK")))
        };
        for wanted in [false, true] {
            while serves() != wanted {
                thread::sleep(Duration::from_millis(1));
            }
        }
        Instant::now()
    });
    let losing = {
        let cluster = Arc::clone(&cluster);
        thread::spawn(move || {
            let node = cluster
                .nodes()
                .iter()
                .find(|node| node.addr() == master)
                .expect("it");
            lose(&cluster, node);
        })
    };
    // until a pair ends that began when the new master was already serving
    let (mut ended, serves) = (
        Vec::new(),
        tokio::task::spawn_blocking(move || serves.join().expect("a node serves")),
    );
    let until = loop {
        lock.lock()
            .await
            .expect("the lock")
            .unlock()
            .await
            .expect("the unlock");
        ended.push(Instant::now());
        if serves.is_finished() {
            break serves.await.expect("a node serves");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    };
    losing.join().expect("it was lost");
    lock.lock()
        .await
        .expect("the lock")
        .unlock()
        .await
        .expect("the unlock");
    ended.push(Instant::now());
    let first = ended
        .into_iter()
        .find(|ended| *ended >= until)
        .expect("one came later");
    (first - until).as_secs_f64() * 1e3
}

/// The way in which a master is lost.
type Loss = fn(&SpawnedCluster, &SpawnedServer);

#[tokio::main]
async fn main() {
    beside_one_server().await;
    let ways: [(&str, Loss, bool); 4] = [
        (
            "killed: the first pair after the new one serves",
            |_, master| master.kill().expect("a kill"),
            false,
        ),
        (
            "killed: the first pair of another master after it serves again",
            |_, master| master.kill().expect("a kill"),
            true,
        ),
        (
            "hangs: the first pair after the new one serves",
            |_, master| master.stop().expect("a stop"),
            false,
        ),
        (
            "hands over: the first pair after the new one serves",
            |cluster, master| _ = cluster.failover(master).expect("a failover"),
            false,
        ),
    ];
    for (what, lose, elsewhere) in ways {
        let mut took = Vec::new();
        for _ in 0..FAILOVERS {
            took.push(after_a_loss(lose, elsewhere).await);
        }
        report(
            &format!("a master {what}, median"),
            median(&mut took.clone()),
            "ms",
        );
        report("  the worst", quantile(&mut took, 1.0), "ms");
    }
}
