//! Handing a lock over: from the call of `unlock` in one client until `lock` returns in another
//! that waits.
//!
//! Figures are PING round trips of the same run, or times where the bound is a time.
//! `cargo bench --bench contended`.
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use fred::{
    clients::Client,
    interfaces::ClientLike,
    types::{ClusterHash, CustomCommand, Value},
};
use nestlock::{Lock, LockClient, Tuning, Wire};
use nestlock_embedded::SpawnedServer;
use support::{Link, bare, median, quantile, report, server};

type Door = fn(&LockClient, &str) -> Lock;

/// Hands the lock over `rounds` times, each time after a pause in which the waiter falls asleep.
/// The pause is idle, so that cores sleep too, or filled with PINGs. Returns the seconds of the
/// hand-overs, and of PINGs after the same kind of pause.
async fn hand_over(
    door: Door,
    from: &LockClient,
    to: &LockClient,
    bare: &Client,
    idle: bool,
    rounds: usize,
) -> (Vec<f64>, Vec<f64>) {
    let pause = Duration::from_millis(4);
    let (mut hand_overs, mut pings) = (Vec::with_capacity(rounds), Vec::new());
    for round in 0..rounds {
        let name = format!("hand-over-{}", round % 8);
        let guard = door(from, &name).lock().await.expect("the lock");
        let theirs = door(to, &name);
        let waiter = tokio::spawn(async move {
            let guard = theirs.lock().await.expect("the lock");
            let returned = Instant::now();
            guard.unlock().await.expect("the unlock");
            returned
        });
        // the waiter needs four round trips to subscribe and to try again
        if idle {
            tokio::time::sleep(pause).await;
        } else {
            for _ in 0..40 {
                pings.push(ping(bare).await);
            }
        }
        let start = Instant::now();
        guard.unlock().await.expect("the unlock");
        let returned = waiter.await.expect("a task");
        hand_overs.push(returned.duration_since(start).as_secs_f64());
        if idle {
            tokio::time::sleep(pause).await;
            pings.push(ping(bare).await);
        }
    }
    (hand_overs, pings)
}

async fn ping(bare: &Client) -> f64 {
    let start = Instant::now();
    let _: String = bare.ping(None).await.expect("an answer");
    start.elapsed().as_secs_f64()
}

/// Hands over by an element of a list, which BLPOP pops, instead of a message.
async fn with_signals(url: &str) {
    let bare = bare(url).await;
    let signal: Door = |client, name| client.signal_lock(name).expect("a name");
    let [a, b] = [
        LockClient::connect(url).await.expect("a"),
        LockClient::connect(url).await.expect("b"),
    ];
    for (machine, idle) in [("idle before", true), ("busy before", false)] {
        let (hand_overs, mut pings) = hand_over(signal, &a, &b, &bare, idle, 1000).await;
        let ping = median(&mut pings);
        let mut trips: Vec<f64> = hand_overs
            .into_iter()
            .map(|seconds| seconds / ping)
            .collect();
        let what = format!("signal lock's hand-over in PING round trips, {machine}");
        report(&format!("{what}, median"), median(&mut trips), "<= 3");
        report(&format!("{what}, p99"), quantile(&mut trips, 0.99), "<= 10");
    }
}

async fn with_messages(url: &str) {
    let bare = bare(url).await;
    let reentrant: Door = |client, name| client.reentrant_lock(name).expect("a name");
    let own = [
        LockClient::connect(url).await.expect("a"),
        LockClient::connect(url).await.expect("b"),
    ];
    let over_fred = || {
        LockClient::builder()
            .tuning(Tuning {
                wire: Wire::Fred,
                ..Tuning::default()
            })
            .connect(url)
    };
    let fred = [over_fred().await.expect("a"), over_fred().await.expect("b")];
    for (wire, [a, b]) in [("own wire", &own), ("over fred", &fred)] {
        for (machine, idle) in [("idle before", true), ("busy before", false)] {
            let (hand_overs, mut pings) = hand_over(reentrant, a, b, &bare, idle, 1000).await;
            let ping = median(&mut pings);
            let mut trips: Vec<f64> = hand_overs
                .into_iter()
                .map(|seconds| seconds / ping)
                .collect();
            println!("    PING {:.0} us", ping * 1e6);
            let what = format!("hand-over in PING round trips, {wire}, {machine}");
            report(&format!("{what}, median"), median(&mut trips), "<= 3");
            report(&format!("{what}, p99"), quantile(&mut trips, 0.99), "<= 10");
        }
    }
}

/// The user of the waiter may not subscribe, so no message reaches it.
async fn without_messages(url: &str) {
    let bare = bare(url).await;
    let command = CustomCommand::new_static("ACL", ClusterHash::FirstKey, false);
    let rule = [
        "SETUSER",
        "deaf",
        "on",
        ">deaf",
        "~*",
        "+@all",
        "resetchannels",
        "&none",
    ]
    .map(Value::from);
    let _: Value = bare.custom(command, rule.to_vec()).await.expect("a user");
    let cap = Duration::from_millis(500);
    let deaf = url.replace("redis://", "redis://deaf:deaf@");
    let a = LockClient::connect(url).await.expect("a");
    let b = LockClient::builder()
        .poll_cap(cap)
        .connect(deaf)
        .await
        .expect("b");
    // this user may not publish, either, so the waiter only acquires the lock, and its lease frees
    // it
    let mut worst = 0_f64;
    for round in 0..10 {
        let name = format!("deaf-{round}");
        let guard = a
            .reentrant_lock(&name)
            .expect("a name")
            .lock()
            .await
            .expect("the lock");
        let theirs = b.reentrant_lock(&name).expect("a name");
        let waiter = tokio::spawn(async move {
            let guard = theirs.lock().await.expect("the lock");
            (Instant::now(), guard)
        });
        tokio::time::sleep(Duration::from_millis(50 + 37 * round)).await;
        let start = Instant::now();
        guard.unlock().await.expect("the unlock");
        let (returned, guard) = waiter.await.expect("a task");
        worst = worst.max((returned - start).as_secs_f64());
        let _ = guard.leave_to_lease();
    }
    report(
        "hand-over without any pub/sub message, worst, in ms (poll cap 500 ms)",
        worst * 1e3,
        "<= 550",
    );
}

async fn many_tasks(link: &Link) {
    let holds_each = if link.is_far() { 5 } else { 50 };
    let client = LockClient::connect(&link.url).await.expect("a client");
    link.slow_down();
    let start = Instant::now();
    let tasks: Vec<_> = (0..64)
        .map(|_| {
            let lock = client.mutex("hot").expect("a name");
            tokio::spawn(async move {
                for _ in 0..holds_each {
                    lock.lock()
                        .await
                        .expect("the lock")
                        .unlock()
                        .await
                        .expect("the unlock");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a task");
    }
    let holds = 64.0 * f64::from(holds_each);
    link.report(
        "holds/s, 64 tasks of one client on one lock",
        holds / start.elapsed().as_secs_f64(),
        "",
    );
}

/// R70: from the writer's unlock until the last of the 50 readers that it woke has the lock.
async fn many_readers(link: &Link) {
    let bare = bare(&link.url).await;
    let (a, b) = (
        LockClient::connect(&link.url).await.expect("a"),
        LockClient::connect(&link.url).await.expect("b"),
    );
    link.slow_down();
    let (mut last, mut pings) = (Vec::new(), Vec::new());
    for round in 0..if link.is_far() { 20 } else { 50 } {
        let name = format!("shared-{round}");
        let guard = a
            .read_write_lock(&name)
            .expect("a name")
            .write_lock()
            .lock()
            .await
            .expect("the lock");
        let readers: Vec<_> = (0..50)
            .map(|_| {
                let lock = b.read_write_lock(&name).expect("a name").read_lock();
                tokio::spawn(async move {
                    let guard = lock.lock().await.expect("the lock");
                    (Instant::now(), guard)
                })
            })
            .collect();
        // until all waiters are asleep
        link.pause(Duration::from_millis(30)).await;
        pings.push(ping(&bare).await);
        let start = Instant::now();
        guard.unlock().await.expect("the unlock");
        let (mut end, mut guards) = (start, Vec::new());
        for reader in readers {
            let (returned, guard) = reader.await.expect("a task");
            end = end.max(returned);
            guards.push(guard);
        }
        last.push((end - start).as_secs_f64());
        for guard in guards {
            guard.unlock().await.expect("the unlock");
        }
    }
    let (last, ping) = (median(&mut last), median(&mut pings));
    link.report(
        "50 readers woken by a writer's unlock, until the last one has it, in ms, median",
        last * 1e3,
        "",
    );
    link.report("the same in PING round trips", last / ping, "<= 20");
}

/// Returns the time at which the port opens.
fn opens(addr: SocketAddr) -> Instant {
    while TcpStream::connect(addr).is_err() {
        std::thread::sleep(Duration::from_micros(200));
    }
    Instant::now()
}

/// The server is killed, and starts again on the same port.
async fn recovery() {
    let server = SpawnedServer::start().unwrap_or_else(|error| panic!("{error}"));
    let client = LockClient::connect(server.url()).await.expect("a client");
    let mut worst = 0_f64;
    for round in 0..10_u64 {
        server.kill().expect("its end");
        tokio::time::sleep(Duration::from_millis(300 + 150 * round)).await;
        let lock = client.reentrant_lock("after").expect("a name");
        let waiter = tokio::spawn(async move {
            let guard = lock.lock().await.expect("the lock");
            let returned = Instant::now();
            guard.unlock().await.expect("the unlock");
            returned
        });
        let addr = server.addr();
        let open = std::thread::spawn(move || opens(addr));
        server.restart().expect("a server again");
        let open = open.join().expect("a thread");
        let returned = waiter.await.expect("a task");
        worst = worst.max(returned.saturating_duration_since(open).as_secs_f64());
    }
    report(
        "first acquire after the port of a killed server opens again, worst of 10, in ms",
        worst * 1e3,
        "<= 250",
    );
}

#[tokio::main]
async fn main() {
    let server = server();
    with_messages(server.url()).await;
    with_signals(server.url()).await;
    without_messages(server.url()).await;
    for link in server.links() {
        many_tasks(&link).await;
        link.speed_up();
        many_readers(&link).await;
    }
    recovery().await;
}
