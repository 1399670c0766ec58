//! What the embedded server costs, compared with a real one in the same run.
//!
//! Run: `cargo bench -p nestlock-embedded`
#![allow(missing_docs, clippy::print_stdout, clippy::cast_precision_loss)]

use std::{
    error::Error,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use nestlock::LockClient;
use nestlock_embedded::{EmbeddedServer, SpawnedServer};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const ROUNDS: usize = 15;

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(start_to_first_lock())?;
    many_servers()?;
    let (embedded, real) = (EmbeddedServer::start()?, SpawnedServer::start()?);
    println!("\n## Speed: embedded, real, embedded/real, medians of {ROUNDS} alternating rounds");
    compare("EVALSHA/s, one connection, 100 in flight", || {
        Ok([
            scripts_per_second(embedded.addr())?,
            scripts_per_second(real.addr())?,
        ])
    })?;
    let clients = runtime.block_on(async {
        Ok::<_, nestlock::Error>([
            LockClient::connect(embedded.url()).await?,
            LockClient::connect(real.url()).await?,
        ])
    })?;
    compare("EVALSHA/s by lock + unlock, 64 tasks", || {
        let [embedded, real] = &clients;
        runtime.block_on(async {
            Ok([
                pairs_per_second(embedded, 64).await? * 2.0,
                pairs_per_second(real, 64).await? * 2.0,
            ])
        })
    })?;
    compare("EVALSHA/s by lock + unlock, 1 task", || {
        let [embedded, real] = &clients;
        runtime.block_on(async {
            Ok([
                pairs_per_second(embedded, 1).await? * 2.0,
                pairs_per_second(real, 1).await? * 2.0,
            ])
        })
    })
}

async fn start_to_first_lock() -> Result<()> {
    println!("## From the start of a server to the first lock");
    let (mut embedded, mut real) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let server = EmbeddedServer::start()?;
        first_lock(&server.url()).await?;
        embedded.push(start.elapsed());
        let start = Instant::now();
        let server = SpawnedServer::start()?;
        first_lock(&server.url()).await?;
        real.push(start.elapsed());
    }
    for (name, mut times) in [("embedded", embedded), ("real", real)] {
        times.sort_unstable();
        println!(
            "{name:9} median {:?}, worst {:?}",
            times[times.len() / 2],
            times[times.len() - 1]
        );
    }
    Ok(())
}

async fn first_lock(url: &str) -> Result<()> {
    let client = LockClient::connect(url).await?;
    client
        .reentrant_lock("first")?
        .lock()
        .await?
        .unlock()
        .await?;
    Ok(())
}

fn many_servers() -> Result<()> {
    println!("\n## 100 servers in one process");
    let (before, start) = (resident(), Instant::now());
    let servers = (0..100)
        .map(|_| EmbeddedServer::start())
        .collect::<std::io::Result<Vec<_>>>()?;
    let started = start.elapsed();
    for server in &servers {
        scripts(server.addr(), 1)?;
    }
    println!(
        "started in {started:?}, all have run a script after {:?}",
        start.elapsed()
    );
    if let (Some(before), Some(after)) = (before, resident()) {
        println!(
            "memory of each: {} KiB",
            after.saturating_sub(before) / 100 / 1024
        );
    }
    let start = Instant::now();
    drop(servers);
    println!("stopped in {:?}", start.elapsed());
    Ok(())
}

/// Resident bytes of this process, on Linux.
fn resident() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split(' ').nth(1)?.parse::<u64>().ok()? * 4096)
}

fn compare(what: &str, mut measure: impl FnMut() -> Result<[f64; 2]>) -> Result<()> {
    measure()?; // warm
    let rounds = (0..ROUNDS).map(|_| measure()).collect::<Result<Vec<_>>>()?;
    let median = |mut numbers: Vec<f64>| {
        numbers.sort_unstable_by(f64::total_cmp);
        numbers[numbers.len() / 2]
    };
    let [embedded, real] = [0, 1].map(|at| median(rounds.iter().map(|round| round[at]).collect()));
    let ratio = median(rounds.iter().map(|round| round[0] / round[1]).collect());
    println!("{what}: {embedded:.0}, {real:.0}, {ratio:.2}");
    Ok(())
}

fn scripts_per_second(addr: SocketAddr) -> Result<f64> {
    const COUNT: usize = 5_000;
    Ok(COUNT as f64 / scripts(addr, COUNT)?.as_secs_f64())
}

/// Runs the script of an acquire, 100 in flight.
fn scripts(addr: SocketAddr, count: usize) -> Result<Duration> {
    let source = concat!(
        include_str!("../../../lua/parts/owner.lua"),
        include_str!("../../../lua/parts/claim.lua"),
        include_str!("../../../lua/parts/raises.lua"),
        include_str!("../../../lua/reentrant/acquire.lua"),
    );
    let mut stream = BufReader::new(TcpStream::connect(addr)?);
    stream.get_mut().set_nodelay(true)?;
    let request = |words: &[&str]| {
        let words = words
            .iter()
            .map(|word| format!("${}\r\n{word}\r\n", word.len()));
        format!("*{}\r\n{}", words.len(), words.collect::<String>())
    };
    stream
        .get_mut()
        .write_all(request(&["SCRIPT", "LOAD", source]).as_bytes())?;
    let mut line = String::new();
    stream.read_line(&mut line)?;
    line.clear();
    stream.read_line(&mut line)?;
    let evalsha = request(&[
        "EVALSHA",
        line.trim_end(),
        "1",
        "bench",
        "owner",
        "30000",
        "1",
    ]);
    let start = Instant::now();
    let mut left = count;
    while left > 0 {
        let batch = left.min(100);
        stream
            .get_mut()
            .write_all(evalsha.repeat(batch).as_bytes())?;
        let mut replies = vec![0; b":1\r\n".len() * batch];
        stream.read_exact(&mut replies)?;
        left -= batch;
    }
    Ok(start.elapsed())
}

async fn pairs_per_second(client: &LockClient, tasks: usize) -> Result<f64> {
    const PAIRS: usize = 4_000;
    let start = Instant::now();
    let mut running = Vec::new();
    for task in 0..tasks {
        let lock = client.reentrant_lock(format!("bench:{task}"))?;
        running.push(tokio::spawn(async move {
            for _ in 0..PAIRS / tasks {
                lock.lock().await?.unlock().await?;
            }
            Ok::<_, nestlock::Error>(())
        }));
    }
    for task in running {
        task.await??;
    }
    Ok((PAIRS / tasks * tasks) as f64 / start.elapsed().as_secs_f64())
}
