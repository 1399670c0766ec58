//! The workers: one process for each library, which all speak the protocol of README.md.

use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::Duration,
};

use super::{answers::marked, clock::monotonic_ns, history::Hold, rust_worker, servers::Servers};

/// What every answer begins with. Other lines are libtest's, or a library's.
pub const MARK: &str = "@ ";
/// How long an answer may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(90);

/// A library whose worker can be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    Redsync,
    NodeRedlock,
    Phpredis,
    PythonRedisLock,
    Nestlock(Record),
}

/// Which of nestlock's locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A string lock, on one server.
    String,
    /// A RedLock, on one or several.
    RedLock,
    /// A signal lock, on one server.
    Signal,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redsync => "redsync",
            Self::NodeRedlock => "node-redlock",
            Self::Phpredis => "phpredis",
            Self::PythonRedisLock => "python-redis-lock",
            Self::Nestlock(Record::String) => "nestlock (string lock)",
            Self::Nestlock(Record::RedLock) => "nestlock (RedLock)",
            Self::Nestlock(Record::Signal) => "nestlock (signal lock)",
        })
    }
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/interop").join(path)
}

/// What `make interop` installs.
fn installed(path: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/interop").join(path);
    assert!(path.exists(), "there is no {}: run `make interop`, which installs what these tests need", path.display());
    path
}

/// A program that was built from `source`.
fn built(path: &str, from: &str) -> PathBuf {
    let modified = |path: &Path| path.metadata().and_then(|meta| meta.modified()).expect("a file's time");
    let (path, from) = (installed(path), source(from));
    assert!(modified(&path) >= modified(&from), "{} is older than its source: run `make interop`", path.display());
    path
}

impl Library {
    /// Whether `acquire` may name the owner.
    pub fn takes_owners(self) -> bool {
        self != Self::NodeRedlock
    }

    fn command(self) -> Command {
        match self {
            Self::Redsync => Command::new(built("redsync", "redsync/main.go")),
            Self::NodeRedlock => {
                let mut command = Command::new("node");
                command.arg(source("node/worker.js")).env("NODE_PATH", installed("node/node_modules"));
                command
            }
            Self::Phpredis => {
                let mut command = Command::new("php");
                command.args(["-d", "display_errors=stderr"]).arg(source("php/worker.php"));
                command
            }
            Self::PythonRedisLock => {
                let mut command = Command::new(installed("venv/bin/python"));
                command.arg(source("python/worker.py"));
                command
            }
            Self::Nestlock(record) => rust_worker::command(record),
        }
    }
}

/// A worker process; killed when dropped.
#[derive(Debug)]
pub struct Worker {
    library: Library,
    process: Child,
    requests: ChildStdin,
    answers: Receiver<String>,
    /// The last request, for messages.
    asked: String,
}

impl Worker {
    /// Starts a worker and connects it to all servers.
    pub fn start(library: Library, servers: &Servers) -> Self {
        let mut process = library
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{library} does not start: {error}; run `make interop`"));
        let requests = process.stdin.take().expect("its stdin");
        let answers = marked(process.stdout.take().expect("its stdout"), MARK);
        let mut worker = Self { library, process, requests, answers, asked: String::new() };
        // the clocks are one, or nothing that follows means anything
        worker.does(&format!("connect {}", servers.urls()), "connected");
        worker
    }

    pub fn library(&self) -> Library {
        self.library
    }

    /// Sends a request; see README.md for what there is.
    pub fn ask(&mut self, request: &str) {
        request.clone_into(&mut self.asked);
        writeln!(self.requests, "{request}").unwrap_or_else(|error| self.fail(&error.to_string()));
    }

    fn fail(&self, what: &str) -> ! {
        panic!("{}, asked `{}`: {what}", self.library, self.asked)
    }

    /// The next answer.
    fn answer(&self) -> String {
        match self.answers.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(mpsc::RecvTimeoutError::Timeout) => self.fail("no answer"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                self.fail("it has ended; if it cannot even start, run `make interop`")
            }
        }
    }

    /// Whether there is an answer already.
    pub fn has_answered(&mut self, wanted: &str) -> Option<u64> {
        self.answers.try_recv().ok().map(|answer| self.time(&answer, wanted))
    }

    /// The time in an answer that must be this one.
    fn time(&self, answer: &str, wanted: &str) -> u64 {
        match answer.split_once(' ') {
            Some((word, time)) if word == wanted => time.parse().expect("a time"),
            _ => self.fail(&format!("answered `{answer}`, not `{wanted}`")),
        }
    }

    /// Waits for the answer `wanted`; its time.
    pub fn tells(&mut self, wanted: &str) -> u64 {
        let answer = self.answer();
        self.time(&answer, wanted)
    }

    /// Asks, and waits for the answer `wanted`; its time.
    pub fn does(&mut self, request: &str, wanted: &str) -> u64 {
        let before = monotonic_ns();
        self.ask(request);
        let (time, after) = (self.tells(wanted), monotonic_ns());
        assert!((before..=after).contains(&time), "{}: {time} is not in {before}..{after}", self.library);
        time
    }

    /// The holds of a `run`, as worker `by`.
    pub fn holds(&mut self, by: usize) -> Vec<Hold> {
        let mut holds = Vec::new();
        loop {
            let answer = self.answer();
            let words: Vec<&str> = answer.split(' ').collect();
            let number = |at: usize| words[at].parse::<u64>().expect("a number");
            match words[..] {
                ["hold", _, _] => holds.push(Hold { start: number(1), end: number(2), by }),
                ["done", _] => {
                    assert_eq!(holds.len() as u64, number(1), "{}", self.library);
                    return holds;
                }
                _ => self.fail(&format!("answered `{answer}`")),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn what_is_missing_says_what_to_do() {
    let panic = std::panic::catch_unwind(|| installed("nothing/of the kind")).unwrap_err();
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("run `make interop`"), "{message}");
}
