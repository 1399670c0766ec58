//! The workers: one process for each library, which all speak the protocol of README.md.

use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use super::{answers::marked, clock::monotonic_ns, history::Hold, rust_worker, servers::Servers};

/// The prefix of every reply. Other lines are libtest's, or a library's.
pub const MARK: &str = "@ ";
/// How long a reply may take before the test fails.
const PATIENCE: Duration = Duration::from_secs(90);

/// A library that has a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    Redsync,
    NodeRedlock,
    Phpredis,
    PythonRedisLock,
    Redisson,
    Nestlock(Record),
}

/// The record that nestlock's locks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A string lock, on one server.
    String,
    /// A RedLock, on one or several.
    RedLock,
    /// A signal lock, on one server.
    Signal,
    /// Any lock that shares records with Redisson, on one server. Its kind is part of the name.
    Redisson,
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Redsync => "redsync",
            Self::NodeRedlock => "node-redlock",
            Self::Phpredis => "phpredis",
            Self::PythonRedisLock => "python-redis-lock",
            Self::Redisson => "Redisson",
            Self::Nestlock(Record::String) => "nestlock (string lock)",
            Self::Nestlock(Record::RedLock) => "nestlock (RedLock)",
            Self::Nestlock(Record::Signal) => "nestlock (signal lock)",
            Self::Nestlock(Record::Redisson) => "nestlock",
        })
    }
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/interop")
        .join(path)
}

/// A file that `make interop` installs.
fn installed(path: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("target/interop")
        .join(path);
    assert!(
        path.exists(),
        "{} is missing: run `make interop`, which installs what these tests need",
        path.display()
    );
    path
}

/// A program that was built from `source`.
fn built(path: &str, from: &str) -> PathBuf {
    let modified = |path: &Path| {
        path.metadata()
            .and_then(|meta| meta.modified())
            .expect("a file's time")
    };
    let (path, from) = (installed(path), source(from));
    assert!(
        modified(&path) >= modified(&from),
        "{} is older than its source: run `make interop`",
        path.display()
    );
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
                command
                    .arg(source("node/worker.js"))
                    .env("NODE_PATH", installed("node/node_modules"));
                command
            }
            Self::Phpredis => {
                let mut command = Command::new("php");
                command
                    .args(["-d", "display_errors=stderr"])
                    .arg(source("php/worker.php"));
                command
            }
            Self::PythonRedisLock => {
                let mut command = Command::new(installed("venv/bin/python"));
                command.arg(source("python/worker.py"));
                command
            }
            Self::Redisson => {
                let class = built("redisson/classes/Worker.class", "redisson/Worker.java");
                let classes = class.parent().expect("its folder").display();
                let mut command = Command::new("java");
                // it starts in half the time, and does not warn about a missing logger
                command
                    .args([
                        "-XX:TieredStopAtLevel=1",
                        "-XX:+UseSerialGC",
                        "-Dslf4j.internal.verbosity=ERROR",
                        "-cp",
                    ])
                    .arg(format!(
                        "{}/*:{classes}",
                        installed("redisson/lib").display()
                    ))
                    .arg("Worker");
                command
            }
            Self::Nestlock(record) => rust_worker::command(record),
        }
    }
}

/// A worker process; killed when dropped.
#[derive(Debug)]
struct Process {
    child: Mutex<Child>,
    requests: Mutex<ChildStdin>,
}

impl Process {
    /// Kills it with SIGKILL: it can notify no other process.
    fn kill(&self) {
        let mut child = self.child.lock().expect("no panic while locked");
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A worker: a process, or one task of a process that has several.
#[derive(Debug)]
pub struct Worker {
    library: Library,
    process: Arc<Process>,
    /// The prefix of its requests and replies.
    tag: String,
    answers: Receiver<String>,
    /// The last request, for messages.
    asked: String,
}

/// Routes each reply to the task with its tag, until the process ends.
fn sort(answers: Receiver<String>, tasks: Vec<(String, Sender<String>)>) {
    thread::spawn(move || {
        for answer in answers {
            // the task without a tag comes last
            let (tag, task) = tasks
                .iter()
                .find(|(tag, _)| answer.starts_with(tag))
                .expect("a known task");
            let _ = task.send(answer[tag.len()..].to_owned());
        }
    });
}

impl Worker {
    /// Starts a worker and connects it to all servers.
    pub fn start(library: Library, servers: &Servers) -> Self {
        Self::several(library, servers, "", 1).remove(0)
    }

    /// Starts one process with `tasks` tasks, each of which is an owner, and connects it with these settings.
    pub fn several(library: Library, servers: &Servers, settings: &str, tasks: usize) -> Vec<Self> {
        let mut child = library
            .command()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| {
                panic!("{library} does not start: {error}; run `make interop`")
            });
        let requests = Mutex::new(child.stdin.take().expect("its stdin"));
        let marked = marked(child.stdout.take().expect("its stdout"), MARK);
        let process = Arc::new(Process {
            child: Mutex::new(child),
            requests,
        });
        let (mut workers, mut senders): (Vec<Self>, Vec<_>) = (0..tasks)
            .map(|task| {
                let tag = if task == 0 {
                    String::new()
                } else {
                    format!("#{task} ")
                };
                let (sender, answers) = mpsc::channel();
                let worker = Self {
                    library,
                    process: Arc::clone(&process),
                    tag: tag.clone(),
                    answers,
                    asked: String::new(),
                };
                (worker, (tag, sender))
            })
            .unzip();
        senders.reverse();
        sort(marked, senders);
        // both must use the same clock: all other checks rely on it
        workers[0].does(
            format!("connect {} {settings}", servers.urls()).trim_end(),
            "connected",
        );
        workers
    }

    /// Kills the process of this task, and with it all its other tasks, with SIGKILL.
    pub fn kill(&self) {
        self.process.kill();
    }

    pub fn library(&self) -> Library {
        self.library
    }

    /// Sends a request: README.md lists them.
    pub fn ask(&mut self, request: &str) {
        request.clone_into(&mut self.asked);
        let line = format!("{}{request}\n", self.tag);
        let mut requests = self.process.requests.lock().expect("no panic while locked");
        requests
            .write_all(line.as_bytes())
            .unwrap_or_else(|error| self.fail(&error.to_string()));
    }

    fn fail(&self, what: &str) -> ! {
        panic!(
            "{}, request `{}{}`: {what}",
            self.library, self.tag, self.asked
        )
    }

    /// The next reply.
    fn answer(&self) -> String {
        match self.answers.recv_timeout(PATIENCE) {
            Ok(answer) => answer,
            Err(mpsc::RecvTimeoutError::Timeout) => self.fail("no reply"),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                self.fail("it has exited; if it cannot even start, run `make interop`")
            }
        }
    }

    /// The time in the reply, if it has arrived already.
    pub fn has_answered(&mut self, wanted: &str) -> Option<u64> {
        self.answers
            .try_recv()
            .ok()
            .map(|answer| self.time(&answer, wanted))
    }

    /// The time in a reply, which must be `wanted`.
    fn time(&self, answer: &str, wanted: &str) -> u64 {
        match answer.split_once(' ') {
            Some((word, time)) if word == wanted => time.parse().expect("a time"),
            _ => self.fail(&format!("it replied `{answer}`, not `{wanted}`")),
        }
    }

    /// Waits for the reply `wanted`. Returns its time.
    pub fn tells(&mut self, wanted: &str) -> u64 {
        let answer = self.answer();
        self.time(&answer, wanted)
    }

    /// Sends a request, and waits for the reply `wanted`. Returns its time.
    pub fn does(&mut self, request: &str, wanted: &str) -> u64 {
        let before = monotonic_ns();
        self.ask(request);
        let (time, after) = (self.tells(wanted), monotonic_ns());
        assert!(
            (before..=after).contains(&time),
            "{}: {time} is not in {before}..{after}",
            self.library
        );
        time
    }

    /// Sends a request, and waits for the reply `wanted`. Returns its numbers.
    pub fn numbers(&mut self, request: &str, wanted: &str) -> Vec<i64> {
        self.ask(request);
        let answer = self.answer();
        let mut words = answer.split(' ');
        if words.next() != Some(wanted) {
            self.fail(&format!("it replied `{answer}`, not `{wanted}`"));
        }
        words.map(|word| word.parse().expect("a number")).collect()
    }

    /// The holds of a `run`, as worker `by`.
    pub fn holds(&mut self, by: usize) -> Vec<Hold> {
        let mut holds = Vec::new();
        loop {
            let answer = self.answer();
            let words: Vec<&str> = answer.split(' ').collect();
            let number = |at: usize| words[at].parse::<u64>().expect("a number");
            let hold = |shared, token| Hold {
                start: number(1),
                end: number(2),
                by,
                shared,
                token,
            };
            match words[..] {
                ["hold", _, _] => holds.push(hold(false, None)),
                ["hold", _, _, _] => holds.push(hold(false, Some(number(3)))),
                ["shared", _, _] => holds.push(hold(true, None)),
                ["done", _] => {
                    assert_eq!(holds.len() as u64, number(1), "{}", self.library);
                    return holds;
                }
                _ => self.fail(&format!("it replied `{answer}`")),
            }
        }
    }
}

#[test]
fn what_is_missing_says_what_to_do() {
    let panic = std::panic::catch_unwind(|| installed("nothing/of the kind")).unwrap_err();
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("run `make interop`"), "{message}");
}
