//! Child processes of tests, and signals to them.
//!
//! A worker is this test binary, started again with [`PEER`] set and with one test selected, which
//! then becomes the worker: `crash::a_worker_process_does_as_it_is_told`. It reads one request per
//! line and replies with lines that begin with [`MARK`], which separates them from libtest's own
//! output.

use std::{
    collections::HashMap,
    io::Write,
    net::SocketAddr,
    path::Path,
    process::{Child as Process, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, mpsc::Receiver},
    time::{Duration, Instant},
};

use futures::executor::block_on;
use nestlock::{
    AcquireOptions, Error, Lock, LockClient, LockGuard, RedLockOptions, StoreErrorKind,
};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};

pub use super::clock::monotonic_ns;
use super::{Server, answers::marked, history::GUARDED, wire::Wire};

/// The environment variable that is set in worker processes.
const PEER: &str = "NESTLOCK_TEST_WORKER";
/// The prefix of every reply.
const MARK: &str = "@worker ";
/// Longest wait for a reply before the test fails.
const PATIENCE: Duration = Duration::from_secs(300);

/// Sends a signal to a process that the test started.
pub fn signal(pid: u32, signal: i32) {
    let status = Command::new("kill")
        .arg(format!("-{signal}"))
        .arg(pid.to_string())
        .status()
        .expect("kill(1)");
    assert!(status.success(), "kill -{signal} {pid}");
}

/// A worker process, which is killed on drop.
#[derive(Debug)]
pub struct Worker {
    process: Process,
    requests: ChildStdin,
    answers: Receiver<String>,
}

impl Worker {
    /// Starts a worker that is connected to `server`.
    pub fn start(server: &Server, watchdog: Duration, poll_cap: Duration) -> Self {
        Self::start_with_patience(server, watchdog, poll_cap, Duration::from_secs(300))
    }

    /// Like [`Worker::start`], with a `fair_patience`.
    pub fn start_with_patience(
        server: &Server,
        watchdog: Duration,
        poll_cap: Duration,
        patience: Duration,
    ) -> Self {
        let mut worker = Self::spawn();
        let [watchdog, poll_cap, patience] =
            [watchdog, poll_cap, patience].map(|time| time.as_millis());
        worker.ask(&format!(
            "connect {} {watchdog} {poll_cap} {patience}",
            server.url()
        ));
        assert_eq!(worker.answer(), "connected");
        worker
    }

    /// Like [`Worker::start`], with additional environment variables.
    pub fn start_in(server: &Server, watchdog: Duration, environment: &[(&str, &Path)]) -> Self {
        let mut worker = Self::spawn_in(environment);
        worker.ask(&format!(
            "connect {} {} 1000 30000",
            server.url(),
            watchdog.as_millis()
        ));
        assert_eq!(worker.answer(), "connected");
        worker
    }

    fn spawn() -> Self {
        Self::spawn_in(&[])
    }

    fn spawn_in(environment: &[(&str, &Path)]) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args([
                "--exact",
                "crash::a_worker_process_does_as_it_is_told",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(PEER, "1")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this binary, again");
        let requests = process.stdin.take().expect("its stdin");
        let answers = marked(process.stdout.take().expect("its stdout"), MARK);
        Self {
            process,
            requests,
            answers,
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a request; [`serve`] lists them.
    pub fn ask(&mut self, request: &str) {
        writeln!(self.requests, "{request}").expect("a worker that listens");
    }

    /// Returns the next reply.
    pub fn answer(&self) -> String {
        self.answers
            .recv_timeout(PATIENCE)
            .expect("a reply of the worker")
    }

    /// Returns the last word of the next reply that begins with `wanted`.
    pub fn answer_to(&self, wanted: &str) -> String {
        loop {
            let answer = self.answer();
            if answer.starts_with(wanted) {
                return answer.rsplit(' ').next().unwrap_or_default().to_owned();
            }
        }
    }

    /// Sends SIGKILL, and waits for the end of the process.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Waits until the process ends by itself.
    pub fn wait(&mut self) {
        let start = Instant::now();
        while self.process.try_wait().expect("a child").is_none() {
            assert!(start.elapsed() < PATIENCE, "the worker does not end");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends SIGSTOP, and waits until every thread has stopped: `kill` returns earlier, and a
    /// thread may still run for a while.
    pub fn stop(&self) {
        signal(self.pid(), libc::SIGSTOP);
        let (tasks, start) = (format!("/proc/{}/task", self.pid()), Instant::now());
        let runs = |task: &Path| {
            // a thread that has ended in between does not run
            let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
            stat.rsplit_once(") ")
                .is_some_and(|(_, rest)| !rest.starts_with(['T', 't']))
        };
        while std::fs::read_dir(&tasks)
            .expect("its threads")
            .flatten()
            .any(|task| runs(&task.path()))
        {
            assert!(start.elapsed() < PATIENCE, "it does not stop");
            std::thread::yield_now();
        }
    }

    /// Sends SIGCONT.
    pub fn cont(&self) {
        signal(self.pid(), libc::SIGCONT);
    }

    /// Returns the processor time used so far.
    pub fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()))
            .expect("a running worker");
        // the name may contain any characters; behind it, state is the first field, utime and stime
        // the 12th and 13th
        let fields: Vec<&str> = stat
            .rsplit_once(") ")
            .expect("a name")
            .1
            .split(' ')
            .collect();
        let ticks: u64 = fields[11..13]
            .iter()
            .map(|ticks| ticks.parse::<u64>().expect("ticks"))
            .sum();
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns whether this process is a worker: then the test calls [`serve`] and nothing else.
pub fn is_worker() -> bool {
    std::env::var_os(PEER).is_some()
}

fn say(what: impl std::fmt::Display) {
    println!("{MARK}{what}");
}

fn why(error: Option<Error>) -> String {
    match error {
        Some(Error::Store { source, .. } | Error::Connect { source, .. }) => {
            format!("{:?}", source.kind())
        }
        other => other.map_or("nothing".to_owned(), |error| format!("{error:?}")),
    }
}

/// Forks a process with a current-thread runtime, and drops that runtime in the child. The client's
/// connections are bound to it.
fn fork_runtime(url: &str, name: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let client = runtime.block_on(LockClient::connect(url)).unwrap();
    let pairs = |name: &str| {
        let lock = client.reentrant_lock(name).unwrap();
        runtime.block_on(async { lock.lock().await.unwrap().unlock().await.unwrap() });
    };
    let guard = runtime
        .block_on(client.reentrant_lock(name).unwrap().lock())
        .unwrap();
    let mut before = Box::pin(guard.lost());
    assert!(futures::FutureExt::now_or_never(&mut before).is_none());
    let (mut alive, child) = std::io::pipe().unwrap();
    let out = std::io::stdout().lock();
    // the test preloads a `getppid` that forks
    if std::os::unix::process::parent_id() == 0 {
        let lost = [block_on(before), block_on(guard.lost())].map(|error| why(Some(error)));
        let run = block_on(guard.run_until_lost(std::future::pending::<()>()));
        say(format_args!(
            "forked {}/{}/{}/{}",
            lost[0],
            lost[1],
            why(run.err()),
            guard.is_lost()
        ));
        drop(runtime);
        std::process::exit(0);
    }
    drop((out, child));
    // waits until the child has ended
    std::io::Read::read_to_end(&mut alive, &mut Vec::new()).unwrap();
    (0..100).for_each(|_| pairs("other"));
    let is_locked = runtime
        .block_on(client.reentrant_lock(name).unwrap().is_locked())
        .unwrap();
    say(format_args!("went on {}/{is_locked}", guard.is_lost()));
}

/// Forks `rounds` times while other threads of this process are inside calls of the client. Returns
/// `Forked/<lost guards>` if each child gets the error `Forked` from every call and ends; else what
/// differed.
fn fork_beside(client: &LockClient, rounds: u64) -> String {
    let held = |name: &str| block_on(client.reentrant_lock(name).unwrap().lock()).unwrap();
    let mut guards: Vec<LockGuard> = ["one", "two", "three", "four", "five"].map(held).into();
    let both = client
        .multi_lock(["six", "seven"].map(|name| client.reentrant_lock(name).unwrap()))
        .unwrap();
    let mut both = Some(block_on(both.lock()).unwrap());
    let red = LockClient::red_lock(
        [client],
        "eight",
        RedLockOptions::new().expiry(Duration::from_secs(60)),
    )
    .unwrap();
    let red = block_on(red.lock()).unwrap();
    let (lock, fair) = (
        client.reentrant_lock("asked").unwrap(),
        client.fair_lock("asked-fair").unwrap(),
    );
    let busy = |number: u64| {
        let lock = client.reentrant_lock(format!("busy-{number}")).unwrap();
        std::thread::spawn(move || {
            block_on(async {
                loop {
                    lock.lock().await.unwrap().unlock().await.unwrap();
                }
            })
        });
    };
    (0..3).for_each(busy);
    for round in 0..rounds {
        let (mut alive, mut child) = std::io::pipe().unwrap();
        let pid = std::os::unix::process::parent_id();
        // the test preloads a `getppid` that forks
        if pid == 0 {
            let all = async {
                let owner = guards[0].owner();
                let second = Duration::from_secs(1);
                let last = guards.pop().unwrap();
                let mut heard = vec![
                    lock.try_lock().await.err(),
                    lock.lock().await.err(),
                    fair.try_lock_for(second).await.err(),
                    lock.is_locked().await.err(),
                    lock.force_unlock().await.err(),
                    lock.release(&owner).await.err(),
                    lock.extend(&owner, second).await.err(),
                    last.extend(second).await.err(),
                    last.hand_over(second).await.err(),
                    last.unlock().await.err(),
                    both.take().unwrap().unlock().await.err(),
                    client.ready().await.err(),
                    red.extend(second).await.err(),
                    Some(red.lost().await),
                ];
                heard.push(Some(guards[0].lost().await));
                client.idle().await;
                let _ = (
                    client.stats(),
                    guards.pop().unwrap().leave_to_lease(),
                    guards.clear(),
                );
                heard
            };
            let heard: Vec<String> = block_on(all)
                .into_iter()
                .map(why)
                .filter(|why| why != "Forked")
                .collect();
            write!(child, "{}", heard.join("/") + "end").unwrap();
            drop(child);
            // an exit would wait for a mutex of the standard library that a thread held at the fork
            loop {
                std::thread::park();
            }
        }
        drop(child);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(std::io::read_to_string(&mut alive)));
        let heard = told.recv_timeout(Duration::from_secs(20));
        signal(pid, libc::SIGKILL);
        match heard {
            // every call failed with `Forked`, and the child reached its end
            Ok(Ok(heard)) if heard == "end" => {}
            Ok(heard) => return format!("{heard:?}").replace(' ', ""),
            Err(_) => return format!("hangs/{round}"),
        }
    }
    // the guards of this process are unaffected
    let lost = guards
        .iter()
        .chain(&both)
        .filter(|guard| block_on(guard.extend(Duration::from_secs(9))).is_err());
    format!("Forked/{}", lost.count())
}

/// Runs a worker process: reads one request per line until its stdin ends. Names that begin with
/// `fair:` are fair locks.
///
/// ```text
/// connect URL WATCHDOG_MS POLL_CAP_MS PATIENCE_MS    connected
/// lazy URL                       made: a client that connects at its first use
/// lock NAME [LEASE_MS]           locked NAME <ns>; later, on a loss: lost NAME <ns>
/// read NAME, write NAME [LEASE_MS]    the same, with a read-write lock
/// wait NAME TASKS                waiting: TASKS tasks each lock and unlock
/// unlock NAME                    the last guard: unlocked NAME <ok or the error>
/// fence NAME                     fenced NAME <token>: holds NAME as a fenced lock
/// put KEY VALUE TOKEN            put KEY <ok, Stale or the error>: a guarded write
/// set KEY VALUE                  set KEY <the server's reply>: a plain write
/// tokens FILE NAME KEY TASKS ROUNDS
///                                counting; later: done. Guarded writes, see [`count`];
///                                ROUNDS 0: endless
/// work KIND SEED FILE TASKS LOCKS ROUNDS LEASES
///                                working; later: done. Writes its holds, see [`work`];
///                                ROUNDS 0: endless
/// panic NAME                     panics in a task that holds NAME: panicked
/// is_lost NAME                   is_lost NAME <true or false>: the last guard of NAME
/// deaf                           deaf: every later write to the log blocks forever
/// fork NAME                      forked <errors>: of calls with NAME and of a shutdown, in a fork
/// fork_beside ROUNDS             forked beside <result>: see [`fork_beside`]
/// fork_runtime URL NAME          forked <errors>: of a guard of NAME, in a fork that drops the
///                                runtime of its client; then, after 100 locks of the parent:
///                                went on <whether NAME is lost>/<whether NAME is locked>
/// exit                           ends without unlocking
/// leave                          drops guards and client, and ends at once
/// ```
#[allow(clippy::too_many_lines, reason = "one arm for each request")]
pub fn serve() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let mut client: Option<LockClient> = None;
    let mut server: Option<SocketAddr> = None;
    let held: Arc<Mutex<HashMap<String, Vec<Arc<LockGuard>>>>> = Arc::default();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let get = || client.clone().expect("connect first");
        let number = |n: usize| words[n].parse::<u64>().expect("a number");
        let open = |name: &str| {
            if name.starts_with("fair:") {
                get().fair_lock(name)
            } else {
                get().reentrant_lock(name)
            }
        };
        match words[0] {
            "connect" => {
                let connecting = LockClient::builder()
                    .watchdog_timeout(Duration::from_millis(number(2)))
                    .poll_cap(Duration::from_millis(number(3)))
                    .fair_patience(Duration::from_millis(number(4)))
                    .connect(words[1]);
                client = Some(runtime.block_on(connecting).expect("a connection"));
                let addr = words[1]
                    .strip_prefix("redis://")
                    .and_then(|url| url.split('?').next());
                server = addr.and_then(|addr| addr.parse().ok());
                say("connected");
            }
            "lazy" => {
                client = Some(LockClient::connect_lazy(words[1]).expect("a URL"));
                say("made");
            }
            "lock" | "read" | "write" => {
                let name = words[1].to_owned();
                let lock = match words[0] {
                    "lock" => open(words[1]).unwrap(),
                    "read" => get().read_write_lock(&name).unwrap().read_lock(),
                    _ => get().read_write_lock(&name).unwrap().write_lock(),
                };
                let mut options = AcquireOptions::new();
                if words.len() > 2 {
                    options = options.lease(Duration::from_millis(number(2)));
                }
                let held = Arc::clone(&held);
                runtime.spawn(async move {
                    let guard = Arc::new(lock.lock_with(options).await.unwrap());
                    drop(lock);
                    held.lock()
                        .unwrap()
                        .entry(name.clone())
                        .or_default()
                        .push(Arc::clone(&guard));
                    say(format_args!("locked {name} {}", monotonic_ns()));
                    let weak = Arc::downgrade(&guard);
                    drop(guard);
                    // a weak reference, so that `unlock` can take the guard out of its `Arc`
                    while let Some(guard) = weak.upgrade() {
                        if tokio::time::timeout(Duration::from_millis(5), guard.lost())
                            .await
                            .is_ok()
                        {
                            say(format_args!("lost {name} {}", monotonic_ns()));
                            return;
                        }
                        drop(guard);
                        // leaves a moment without a strong reference, in which `unlock` can take
                        // the guard
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                });
            }
            "wait" => {
                for _ in 0..number(2) {
                    let lock = open(words[1]).unwrap();
                    runtime
                        .spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
                }
                say("waiting");
            }
            "unlock" => {
                let mut guard = held
                    .lock()
                    .unwrap()
                    .get_mut(words[1])
                    .and_then(Vec::pop)
                    .expect("held");
                let guard = loop {
                    match Arc::try_unwrap(guard) {
                        Ok(guard) => break guard,
                        Err(shared) => guard = shared,
                    }
                    std::thread::yield_now();
                };
                match runtime.block_on(guard.unlock()) {
                    Ok(()) => say(format_args!("unlocked {} ok", words[1])),
                    Err(Error::Lost { .. }) => say(format_args!("unlocked {} Lost", words[1])),
                    Err(error) => say(format_args!("unlocked {} {error}", words[1])),
                }
            }
            "work" => serve_work(&words, &runtime, get()),
            "fence" | "put" | "set" | "tokens" => {
                let lock = |name: &str, guard| {
                    held.lock()
                        .unwrap()
                        .entry(name.to_owned())
                        .or_default()
                        .push(Arc::new(guard));
                };
                serve_fenced(
                    &words,
                    &runtime,
                    &get(),
                    server.expect("connect first"),
                    lock,
                );
            }
            "panic" => {
                let lock = get().reentrant_lock(words[1]).unwrap();
                let task = runtime.spawn(async move {
                    let _guard = lock.lock().await.unwrap();
                    panic!("as told");
                });
                assert!(runtime.block_on(task).unwrap_err().is_panic());
                say("panicked");
            }
            "is_lost" => {
                let lost = held.lock().unwrap()[words[1]]
                    .last()
                    .expect("held")
                    .is_lost();
                say(format_args!("is_lost {} {lost}", words[1]));
            }
            "deaf" => {
                let subscriber = tracing_subscriber::fmt().with_writer(|| -> std::io::Sink {
                    loop {
                        std::thread::park();
                    }
                });
                subscriber
                    .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
                    .init();
                say("deaf");
            }
            "fork_beside" => say(format_args!(
                "forked beside {}",
                fork_beside(&get(), number(1))
            )),
            "fork_runtime" => fork_runtime(words[1], words[2]),
            "fork" => {
                let lock = get().reentrant_lock(words[1]).unwrap();
                // a fork has no other threads: a mutex that one of them holds at the fork stays
                // locked in it
                let (out, mut guards) = (std::io::stdout().lock(), held.lock().unwrap());
                // the test preloads a `getppid` that forks
                if std::os::unix::process::parent_id() == 0 {
                    let (tried, asked, ended) = block_on(async {
                        (
                            lock.try_lock().await.err(),
                            lock.is_locked().await.err(),
                            get().shutdown().await.err(),
                        )
                    });
                    // the holds belong to the parent
                    guards.clear();
                    drop((lock, client.take()));
                    say(format_args!(
                        "forked {} {} {}",
                        why(tried),
                        why(asked),
                        why(ended)
                    ));
                    std::process::exit(0);
                }
                drop((out, guards));
            }
            "exit" => std::process::exit(3),
            "leave" => {
                for mut guard in held.lock().unwrap().drain().flat_map(|(_, guards)| guards) {
                    // the task that waits for the loss also holds a reference for short moments
                    loop {
                        match Arc::try_unwrap(guard) {
                            Ok(guard) => break drop(guard),
                            Err(shared) => guard = shared,
                        }
                        std::thread::yield_now();
                    }
                }
                drop(client.take());
                std::process::exit(0);
            }
            other => panic!("unknown request {other}"),
        }
    }
    // the test process no longer needs this one: no verdict from libtest, no clean-up
    std::process::exit(0);
}

/// Serves a `work` request.
fn serve_work(words: &[&str], runtime: &tokio::runtime::Runtime, client: LockClient) {
    let number = |n: usize| words[n].parse::<u64>().expect("a number");
    let file = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(words[3])
        .expect("a file");
    let plan = Plan {
        kind: words[1].into(),
        locks: number(5) as usize,
        rounds: number(6),
        leases: words[7] == "true",
    };
    let (file, plan) = (Arc::new(file), Arc::new(plan));
    let task = |task| {
        runtime.spawn(work(
            client.clone(),
            Arc::clone(&plan),
            number(2) + task,
            Arc::clone(&file),
        ))
    };
    let tasks: Vec<_> = (0..number(4)).map(task).collect();
    say("working");
    runtime.spawn(async move {
        for task in tasks {
            task.await.expect("a task that does not panic");
        }
        client.idle().await;
        say("done");
    });
}

/// Serves the requests about fenced locks and guarded keys.
fn serve_fenced<T>(
    words: &[&str],
    runtime: &tokio::runtime::Runtime,
    client: &LockClient,
    server: SocketAddr,
    keep: impl FnOnce(&str, LockGuard) -> T,
) {
    let number = |n: usize| words[n].parse::<u64>().expect("a number");
    match words[0] {
        "fence" => {
            let lock = client.fenced_lock(words[1]).unwrap();
            let guard = runtime.block_on(async { lock.lock().await.unwrap() });
            say(format_args!(
                "fenced {} {}",
                words[1],
                guard.fencing_token().expect("a token")
            ));
            keep(words[1], guard);
        }
        "put" => match runtime.block_on(client.fenced_set(
            words[1],
            words[2],
            number(3).try_into().unwrap(),
        )) {
            Ok(()) => say(format_args!("put {} ok", words[1])),
            Err(Error::StaleToken { .. }) => say(format_args!("put {} Stale", words[1])),
            Err(error) => say(format_args!("put {} {error}", words[1])),
        },
        "set" => {
            let mut wire = Wire::connect(server).expect("a connection");
            let reply = wire.call(&["SET", words[1], words[2]]).expect("a reply");
            say(format_args!("set {} {}", words[1], reply.text()));
        }
        "tokens" => {
            let file = std::fs::OpenOptions::new()
                .append(true)
                .create(true)
                .open(words[1])
                .expect("a file");
            let file = Arc::new(file);
            let tasks: Vec<_> = (0..number(4))
                .map(|_| {
                    let (name, key) = (words[2].to_owned(), words[3].to_owned());
                    runtime.spawn(count(
                        client.clone(),
                        Arc::clone(&file),
                        name,
                        key,
                        number(5),
                    ))
                })
                .collect();
            say("counting");
            runtime.spawn(async move {
                for task in tasks {
                    task.await.expect("a task that does not panic");
                }
                say("done");
            });
        }
        other => panic!("unknown request {other}"),
    }
}

/// The work of the tasks of a history.
struct Plan {
    kind: String,
    locks: usize,
    rounds: u64,
    /// Whether some holds have leases, of which some are held beyond their lease.
    leases: bool,
}

/// Returns a lock of this kind, the names that it locks, and whether it is shared.
fn pick(
    client: &LockClient,
    kind: &str,
    locks: usize,
    rng: &mut StdRng,
) -> (Lock, Vec<String>, bool) {
    let mut names: Vec<String> = (0..locks).map(|number| format!("l{number}")).collect();
    names.shuffle(rng);
    names.truncate(if kind == "multi" {
        rng.random_range(1..=locks)
    } else {
        1
    });
    let (name, reads) = (&*names[0], kind == "read-write" && rng.random_ratio(3, 4));
    let lock: Lock = match kind {
        "reentrant" => client.reentrant_lock(name).unwrap(),
        "non-reentrant" => client.non_reentrant_lock(name).unwrap(),
        "spin" => client.spin_lock(name).unwrap(),
        "fair" => client.fair_lock(name).unwrap(),
        "fenced" => client.fenced_lock(name).unwrap(),
        "read-write" if reads => client.read_write_lock(name).unwrap().read_lock(),
        "read-write" => client.read_write_lock(name).unwrap().write_lock(),
        "multi" => {
            let member = |name| client.reentrant_lock(name).unwrap();
            client.multi_lock(names.iter().map(member)).unwrap()
        }
        other => panic!("unknown kind {other}"),
    };
    (lock, names, reads)
}

/// Acquires, holds and releases locks at random from the seed; some acquires are cancelled, or time
/// out. Writes two lines per hold, so that a kill in between leaves the first: `+ ID LOCK
/// alone|shared START LEASE_END TOKEN` and `- ID END`, where END is when the hold was last known to
/// be valid. Writes `missed` for an acquire without a hold.
async fn work(client: LockClient, plan: Arc<Plan>, seed: u64, file: Arc<std::fs::File>) {
    let (
        mut rng,
        mut round,
        Plan {
            kind,
            locks,
            rounds,
            leases,
        },
    ) = (StdRng::seed_from_u64(seed), 0, &*plan);
    let write = |lines: &str| {
        (&*file)
            .write_all(lines.as_bytes())
            .expect("history is written");
    };
    while *rounds == 0 || round < *rounds {
        round += 1;
        let (lock, names, shared) = pick(&client, kind, *locks, &mut rng);
        let patience = Duration::from_micros(rng.random_range(1..5000));
        let lease = (*leases && rng.random_ratio(1, 4))
            .then(|| Duration::from_millis(rng.random_range(20..60)));
        let hold_for = match lease {
            Some(lease) if rng.random_ratio(1, 4) => 2 * lease,
            _ => Duration::from_micros(rng.random_range(0..1500)),
        };
        let (way, drops) = (rng.random_range(0..4), rng.random());
        let mut options = AcquireOptions::new();
        if let Some(lease) = lease {
            options = options.lease(lease);
        }
        let acquired = match way {
            0 => tokio::time::timeout(patience, lock.lock_with(options))
                .await
                .map_or(Ok(None), |locked| locked.map(Some)),
            1 => lock.try_lock_for_with(patience, options).await,
            _ => lock.lock_with(options).await.map(Some),
        };
        let start = monotonic_ns();
        let (guard, remaining) = match acquired {
            Ok(Some(guard)) if !guard.is_lost() => {
                let remaining = guard.remaining();
                (guard, remaining)
            }
            Ok(_) | Err(Error::Unconfirmed { .. } | Error::Lost { .. }) => {
                write("missed\n");
                continue;
            }
            // an earlier drop must be settled first, which may take longer than such a short wait
            Err(Error::Store { source, .. }) if source.kind() == StoreErrorKind::Overloaded => {
                write("missed\n");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let id = |name: &str| format!("{}:{seed}:{round}:{name}", std::process::id());
        let (class, lease_end) = (
            if shared { "shared" } else { "alone" },
            start + remaining.as_nanos() as u64,
        );
        let token = guard
            .fencing_token()
            .map_or("-".to_owned(), |token| token.to_string());
        let line = |name: &String| {
            format!(
                "+ {} {name} {class} {start} {lease_end} {token}\n",
                id(name)
            )
        };
        write(&names.iter().map(line).collect::<Vec<_>>().concat());
        if let Some(token) = guard.fencing_token() {
            let _ = client.fenced_set(GUARDED, token.to_string(), token).await; // refused, if it is late
        }
        let (over, mut end) = (Instant::now() + hold_for, start);
        loop {
            let now = monotonic_ns();
            if guard.is_lost() {
                break;
            }
            end = now;
            if Instant::now() >= over {
                break;
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        write(
            &names
                .iter()
                .map(|name| format!("- {} {end}\n", id(name)))
                .collect::<Vec<_>>()
                .concat(),
        );
        if drops {
            drop(guard);
        } else {
            _ = guard.unlock().await;
        }
    }
}

/// Acquires a fenced lock and writes its token under `key`, even if the lock may be lost by then.
/// Writes the history: `token TOKEN INVOKED RETURNED` for each acquire, and `accepted TOKEN` or
/// `stale TOKEN` for each write.
async fn count(
    client: LockClient,
    file: Arc<std::fs::File>,
    name: String,
    key: String,
    rounds: u64,
) {
    let write = |line: String| {
        (&*file)
            .write_all(line.as_bytes())
            .expect("history is written");
    };
    let lock = client.fenced_lock(&name).unwrap();
    let mut round = 0;
    while rounds == 0 || round < rounds {
        round += 1;
        let invoked = monotonic_ns();
        let guard = match lock.lock().await {
            Ok(guard) => guard,
            Err(Error::Lost { .. } | Error::Unconfirmed { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        let token = guard.fencing_token().expect("a token");
        write(format!("token {token} {invoked} {}\n", monotonic_ns()));
        if rounds == 0 {
            let pause = Duration::from_micros(rand::rng().random_range(0..12_000));
            tokio::time::sleep(pause).await;
        }
        match client.fenced_set(&key, token.to_string(), token).await {
            Ok(()) => write(format!("accepted {token}\n")),
            Err(Error::StaleToken { .. }) => write(format!("stale {token}\n")),
            Err(error) => write(format!("{error}\n")),
        }
        let _ = guard.unlock().await;
    }
}

/// A hold written by hand, as another program would: no client renews it.
#[derive(Debug)]
pub struct ByHand<'a> {
    server: &'a Server,
    lock: String,
}

impl<'a> ByHand<'a> {
    /// Takes the lock for `ttl`, and overwrites any other hold.
    pub fn hold(server: &'a Server, lock: &str, ttl: Duration) -> Self {
        server.call(&["DEL", lock]);
        server.call(&["HSET", lock, "00000000-0000-4000-8000-000000000000:1", "1"]);
        server.call(&["PEXPIRE", lock, &ttl.as_millis().to_string()]);
        Self {
            server,
            lock: lock.into(),
        }
    }

    /// Frees the lock and publishes the message, as Redisson does.
    pub fn release(&self) {
        self.server.call(&["DEL", &self.lock]);
        self.server.call(&["PUBLISH", &channel(&self.lock), "0"]);
    }
}

/// Returns the channel to which the release of a lock is published.
pub fn channel(lock: &str) -> String {
    format!("redisson_lock__channel:{{{lock}}}")
}
