//! A worker keeps its lock when it is deployed, and gets it back at once after it was killed.
//!
//! Run: `cargo run --example survive_restart`  (uses `NESTLOCK_URL`, or an embedded server; it
//! starts itself three times, as the worker)
#![allow(clippy::print_stdout)]

mod support;

use std::{
    env,
    error::Error,
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nestlock::{AcquireOptions, Error as LockError, HandOver, Lock, LockClient, LockGuard};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// How long a deployment may take.
const KEEP: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Outcome<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    if let [url, state] = args.as_slice() {
        return work(url, Path::new(state)).await;
    }
    let server = support::server()?;
    let files = tempfile::tempdir()?;
    // readable by the worker alone: who has what is in it can take the lock
    let state = files.path().join("state");
    let client = LockClient::connect(server.url()).await?;
    let lock = client.fenced_lock("stream:7")?;

    let mut worker = Worker::start(server.url(), &state)?;
    worker.expect("nothing to take over")?;

    // a deployment: the old process ends, then the new one starts
    let rival = tokio::spawn({
        let lock = lock.clone();
        async move {
            let guard = lock.lock().await?;
            Ok::<_, LockError>((guard, Instant::now()))
        }
    });
    worker.stop()?;
    let mut worker = Worker::start(server.url(), &state)?;
    worker.expect("adopted")?;
    assert!(!rival.is_finished(), "a rival got the lock in between");
    rival.abort();

    // a crash: the supervisor starts a new process when the old one is gone
    worker.kill()?;
    assert!(lock.is_locked().await?, "the dead process still holds it");
    let killed = Instant::now();
    let mut worker = Worker::start(server.url(), &state)?;
    worker.expect("released the dead one's hold")?;
    println!(
        "back after {:?}, not after the lease of 30 s",
        killed.elapsed()
    );
    assert!(killed.elapsed() < Duration::from_secs(10));
    worker.kill()?;
    Ok(())
}

/// Works until its standard input ends, which stands for SIGTERM.
async fn work(url: &str, state: &Path) -> Outcome<()> {
    let client = LockClient::connect(url).await?;
    let (guard, how) = acquire(&client, &client.fenced_lock("stream:7")?, state).await?;
    println!(
        "{how}, token {}",
        guard.fencing_token().ok_or("not fenced")?
    );
    // in a thread of its own: the runtime, at its end, would wait for a blocking task
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(|| ended.send(std::io::stdin().read_to_end(&mut Vec::new())));
    guard.run_until_lost(end).await???;

    // keep the lock for the next process, which finds the text here
    let hand_over = guard.hand_over(KEEP).await?;
    store(state, &format!("hand-over {}", hand_over.to_text()))?;
    client.shutdown().await?;
    Ok(())
}

/// Acquires the lock, also from the process that ran here before.
async fn acquire(
    client: &LockClient,
    lock: &Lock,
    state: &Path,
) -> Outcome<(LockGuard, &'static str)> {
    let before = fs::read_to_string(state).unwrap_or_default();
    let owner = client.owner("worker")?;
    // before the lock is acquired: a process that dies right afterwards has left its name
    store(state, &format!("owner {owner}"))?;
    let options = AcquireOptions::new().owner(owner);
    let mut how = "nothing to take over";
    match before.split_once(' ') {
        Some(("hand-over", text)) => {
            match lock
                .adopt_with(&HandOver::from_text(text)?, options.clone())
                .await
            {
                // too late: it is free, or another process has it
                Err(LockError::NotHeld { .. }) => {}
                adopted => return Ok((adopted?, "adopted")),
            }
        }
        // only because that process is surely dead: if it lived, two would work
        Some(("owner", dead)) => match lock.release(&dead.parse()?).await {
            Ok(()) => how = "released the dead one's hold",
            Err(LockError::NotHeld { .. }) => {}
            Err(error) => return Err(error.into()),
        },
        _ => {}
    }
    Ok((lock.lock_with(options).await?, how))
}

/// Replaces the state as a whole: a process that dies here leaves the old one or the new one.
fn store(state: &Path, text: &str) -> std::io::Result<()> {
    let new = state.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(&new, state)
}

/// A worker process.
struct Worker {
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Worker {
    fn start(url: &str, state: &PathBuf) -> Outcome<Self> {
        let mut process = Command::new(env::current_exe()?)
            .arg(url)
            .arg(state)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(process.stdout.take().ok_or("no stdout")?);
        Ok(Self { process, lines })
    }

    /// Waits until the worker has the lock, in this way.
    fn expect(&mut self, how: &str) -> Outcome<()> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        println!("worker {}: {}", self.process.id(), line.trim_end());
        assert!(line.starts_with(how), "{line:?} instead of {how:?}");
        Ok(())
    }

    fn stop(mut self) -> Outcome<()> {
        drop(self.process.stdin.take());
        assert!(self.process.wait()?.success());
        Ok(())
    }

    fn kill(mut self) -> Outcome<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}
