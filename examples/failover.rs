//! A master dies: which client holds which lock at what time, what a replica did not know, and what
//! `replicas(1)` changes.
//!
//! Run: `cargo run --example failover`  (starts its own Sentinel group, with `redis-server` or
//! `valkey-server`)
#![allow(clippy::print_stdout)]

use std::{
    io::{BufRead, BufReader, Write},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error, LockClient, LossReason};
use nestlock_embedded::SpawnedSentinel;
use tokio::time::{sleep, timeout};

const LONG: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let group = SpawnedSentinel::start(1, 3)?;
    let [master, replica] = group.servers() else {
        return Err("a master and a replica".into());
    };
    let client = LockClient::builder()
        .outage_patience(LONG)
        .connect(group.url())
        .await?;
    let other = LockClient::builder()
        .outage_patience(LONG)
        .connect(group.url())
        .await?;
    let began = Instant::now();
    let say = |what: &str| println!("{:5.2} s  {what}", began.elapsed().as_secs_f64());
    say(&format!(
        "the master is {}, the replica {}",
        master.addr(),
        replica.addr()
    ));

    // the replica gets the record of one lock, but not of the other: it hangs, and its link is cut
    let copied = client.mutex("copied")?.lock().await?;
    while ask(replica.addr(), "EXISTS copied")? != ":1" {
        sleep(Duration::from_millis(2)).await;
    }
    replica.stop()?;
    // unread bytes would stay in its socket, and reach it when it resumes
    ask(master.addr(), "CLIENT KILL TYPE replica")?;
    let forgotten = client.mutex("forgotten")?.lock().await?;
    say("A holds `copied` and `forgotten`; B waits for both");
    let careful = client
        .mutex("careful")?
        .try_lock_with(AcquireOptions::new().replicas(1))
        .await;
    let Err(refused @ Error::NotReplicated { .. }) = careful else {
        return Err("an acquire succeeded without a replica".into());
    };
    say(&format!(
        "C requires replicas(1), and its acquire fails: {refused}"
    ));
    let waits = |name: &'static str| {
        let lock = other.mutex(name);
        tokio::spawn(async move { lock?.lock().await })
    };
    let (waits_for_copied, waits_for_forgotten) = (waits("copied"), waits("forgotten"));

    master.kill()?;
    replica.cont()?;
    say("the master is killed");

    let loss = timeout(LONG, forgotten.lost()).await?;
    say(&format!("A is notified: {loss}"));
    assert!(
        matches!(
            loss,
            Error::Lost {
                reason: LossReason::RecordMissing | LossReason::TakenOver,
                ..
            }
        ),
        "{loss:?}"
    );
    let now_bs = timeout(LONG, waits_for_forgotten).await???;
    say(
        "B holds `forgotten`: before A was notified, there may have been two holders. Fencing tokens protect against that",
    );

    assert!(!copied.is_lost() && !waits_for_copied.is_finished());
    say("A still holds `copied`");
    copied.unlock().await?;
    let guard = timeout(LONG, waits_for_copied).await???;
    say("A has released it, and B holds it");
    now_bs.unlock().await?;
    guard.unlock().await?;
    say(&format!(
        "the topology that the client knows: {}",
        client.topology().to_string().replace('\n', "; ")
    ));
    Ok(())
}

/// Returns the first line of a server's reply.
fn ask(server: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(server)?;
    write!(stream, "{request}\r\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}
