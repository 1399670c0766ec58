//! Helpers: futures that are dropped midway, raw requests, child processes, a link that can be cut.

use std::{
    future::{Future, poll_fn},
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child as Process, Command, Stdio},
    sync::mpsc::{self, Receiver},
    task::Poll,
    time::{Duration, Instant},
};

use nestlock::LockClient;
use nestlock_recipes::cached::{Cached, RedisStore, cached};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::watch,
};

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub async fn client(url: impl AsRef<str>) -> LockClient {
    LockClient::connect(url).await.unwrap()
}

/// Creates a cache like that of another process. It refreshes no value early unless a test sets
/// `beta`.
pub async fn a_cache(url: impl AsRef<str>) -> Cached<RedisStore> {
    let url = url.as_ref();
    cached(&client(url).await, RedisStore::connect(url).await.unwrap()).beta(0.0)
}

/// Polls a future whenever it is woken, up to `k` times, then drops it. Returns its output if it
/// was ready by then.
pub async fn poll_times<F: Future>(future: F, k: u32) -> Option<F::Output> {
    poll_times_and_keep(&mut Box::pin(future), k).await
}

/// As [`poll_times`], but does not drop the future.
pub async fn poll_times_and_keep<F: Future + Unpin>(future: &mut F, k: u32) -> Option<F::Output> {
    let mut polls = 0;
    poll_fn(|cx| {
        polls += 1;
        match std::pin::Pin::new(&mut *future).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls >= k => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Waits for a state, with a deadline far beyond what a loaded machine needs.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut state: impl FnMut() -> F) {
    let start = Instant::now();
    while !state().await {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        tokio::time::sleep(ms(2)).await;
    }
}

/// Calls a function when it is dropped, for example with a future.
pub struct OnDrop<F: FnMut()>(pub F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Sends one command, and blocks for the first 4 KiB of the raw reply.
pub fn ask(addr: SocketAddr, command: &[&str]) -> String {
    let words: Vec<String> = command
        .iter()
        .map(|word| format!("${}\r\n{word}\r\n", word.len()))
        .collect();
    let request = format!("*{}\r\n{}", command.len(), words.concat());
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = [0; 4096];
    let read = stream.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

pub fn exists(addr: SocketAddr, key: &str) -> bool {
    ask(addr, &["EXISTS", key]) == ":1\r\n"
}

/// Returns the number that a command replies.
pub fn number(addr: SocketAddr, command: &[&str]) -> i64 {
    let answer = ask(addr, command);
    answer
        .trim_start_matches(':')
        .trim_end()
        .parse()
        .unwrap_or_else(|_| panic!("{command:?}: {answer}"))
}

const CHILD: &str = "NESTLOCK_RECIPES_CHILD";
const MARK: &str = "@child ";

/// A child process that runs this test binary with one test as its `main`. Killed when dropped.
pub struct Child {
    process: Process,
    lines: Receiver<String>,
}

impl Child {
    /// Starts the child. [`child`] returns `words` there.
    pub fn start(test: &str, words: &[&str]) -> Self {
        Self::start_in(test, words, &[])
    }

    /// Starts the child with these environment variables.
    pub fn start_in(test: &str, words: &[&str], variables: &[(&str, &Path)]) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(CHILD, words.join("\n"))
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // libtest may have written the beginning of the line
                if let Some((_, said)) = line.split_once(MARK) {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        Self { process, lines }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the next line that the child wrote with `say`.
    pub fn line(&self) -> String {
        self.lines
            .recv_timeout(Duration::from_secs(60))
            .expect("a line of the child")
    }

    /// Sends SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the words from [`Child::start`], if this process is a child.
pub fn child() -> Option<Vec<String>> {
    Some(
        std::env::var(CHILD)
            .ok()?
            .lines()
            .map(str::to_owned)
            .collect(),
    )
}

pub fn say(what: impl std::fmt::Display) {
    println!("{MARK}{what}");
}

/// Runs the main function of a child to its end.
pub fn run_child(main: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(main);
}

/// Returns nanoseconds of a clock that all processes share.
pub fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    Duration::from(now).as_nanos().try_into().unwrap()
}

/// A link to a server that carries nothing while it is cut.
pub struct Wire {
    url: String,
    open: watch::Sender<bool>,
}

impl Wire {
    pub async fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let (open, gate) = watch::channel(true);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = tokio::net::TcpStream::connect(server).await.unwrap();
                let ((near_in, near_out), (far_in, far_out)) =
                    (near.into_split(), far.into_split());
                tokio::spawn(carry(near_in, far_out, gate.clone()));
                tokio::spawn(carry(far_in, near_out, gate.clone()));
            }
        });
        Self { url, open }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Cuts the link: bytes that are sent from now on wait for [`mend`](Self::mend).
    pub fn cut(&self) {
        self.open.send_replace(false);
    }

    pub fn mend(&self) {
        self.open.send_replace(true);
    }
}

async fn carry(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    mut gate: watch::Receiver<bool>,
) {
    let mut bytes = [0; 16384];
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        if gate.wait_for(|open| *open).await.is_err() || to.write_all(&bytes[..read]).await.is_err()
        {
            return;
        }
    }
}
