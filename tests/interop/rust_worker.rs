//! nestlock's own worker: this test binary, started again, speaks the protocol of README.md.

use std::{collections::HashMap, net::SocketAddr, process::Command, time::Duration};

use nestlock::{
    AcquireOptions, Backoff, Error, HandOver, Lock, LockClient, LockGuard, OwnerId, RedLockOptions,
    Result,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::{
    clock::monotonic_ns,
    servers::{Servers, home_of},
    wire::Reply,
    worker::{Library, MARK, Record, Worker},
};

/// Set in worker processes: which record to keep.
const PEER: &str = "NESTLOCK_INTEROP_WORKER";

pub fn command(record: Record) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args([
            "--exact",
            "rust_worker::a_worker_process_serves_requests",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(PEER, format!("{record:?}"));
    command
}

/// A hold from `acquire` or `adopt`.
enum Held {
    Guard(LockGuard),
    /// Another process's hold, by its token.
    Adopted(OwnerId),
}

/// The state of a task. Each task is an owner.
struct State {
    record: Record,
    clients: Vec<LockClient>,
    first: SocketAddr,
    /// The prefix of the replies.
    tag: String,
    /// By name. The last hold of a name is released first.
    held: HashMap<String, Vec<Held>>,
}

/// Returns `false` if it was lost.
fn unless_lost<T>(result: Result<T>) -> Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(Error::Lost { .. } | Error::NotHeld { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

impl State {
    /// `words` are the servers, and settings as `name=ms`.
    async fn connect(record: Record, words: &[&str]) -> Result<Self> {
        let (settings, urls): (Vec<&str>, Vec<&str>) =
            words.iter().partition(|word| word.contains('='));
        let mut clients = Vec::new();
        for url in &urls {
            // polling must not replace a missing wake-up
            let mut builder = LockClient::builder().poll_cap(Duration::from_secs(60));
            for setting in &settings {
                let (name, ms) = setting.split_once('=').expect("a setting");
                let time = Duration::from_millis(ms.parse().expect("ms"));
                builder = match name {
                    "watchdog" => builder.watchdog_timeout(time).command_timeout(time / 3),
                    "patience" => builder.fair_patience(time),
                    _ => panic!("unknown setting {name}"),
                };
            }
            clients.push(builder.connect(url).await?);
        }
        let (_, addrs) = urls[0].split_once("://").expect("a URL");
        let first = addrs
            .split(',')
            .next()
            .and_then(|addr| addr.parse().ok())
            .expect("an address");
        Ok(Self {
            record,
            clients,
            first,
            tag: String::new(),
            held: HashMap::new(),
        })
    }

    /// Creates the state of another task.
    fn with_tag(&self, tag: &str) -> Self {
        Self {
            clients: self.clients.clone(),
            tag: tag.to_owned(),
            held: HashMap::new(),
            ..*self
        }
    }

    fn say(&self, what: impl std::fmt::Display) {
        println!("{MARK}{}{what}", self.tag);
    }

    /// Creates the lock. `own`: with its default pauses and tries, otherwise with those of the other workers.
    fn lock(&self, name: &str, own: bool) -> Result<Lock> {
        let [from, to] = [1, 4].map(Duration::from_millis);
        Ok(match self.record {
            Record::String => {
                assert_eq!(self.clients.len(), 1, "a string lock is on one server");
                let backoff = if own {
                    Backoff::default()
                } else {
                    Backoff::constant(to)
                };
                self.clients[0].string_lock_with(name, backoff)?
            }
            Record::RedLock => {
                let options = RedLockOptions::default();
                let options = if own {
                    options
                } else {
                    options.tries(u32::MAX).retry_delay(from, to)
                };
                LockClient::red_lock(&self.clients, name, options)?
            }
            Record::Signal => {
                assert_eq!(self.clients.len(), 1, "a signal lock is on one server");
                self.clients[0].signal_lock(name)?
            }
            Record::Redisson => {
                let (kind, name) = name.split_once('/').expect("a kind");
                let client = &self.clients[0];
                match kind {
                    "reentrant" => client.reentrant_lock(name)?,
                    "fair" => client.fair_lock(name)?,
                    "fenced" => client.fenced_lock(name)?,
                    "spin" => client.spin_lock(name)?,
                    "read" => client.read_write_lock(name)?.read_lock(),
                    "write" => client.read_write_lock(name)?.write_lock(),
                    "multi" => {
                        let members =
                            [1, 2].map(|member| client.reentrant_lock(format!("{name}:{member}")));
                        let [first, second] = members;
                        client.multi_lock([first?, second?])?
                    }
                    "permits" => client.permits(name, 1)?.many(1)?,
                    "permits3" => client.permits(name, 3)?.many(1)?,
                    // the other side says how many there are
                    "semaphore" | "semaphore3" => client.semaphore(name)?.many(1)?,
                    _ => panic!("unknown kind {kind}"),
                }
            }
        })
    }

    async fn take(
        &self,
        name: &str,
        ttl: u64,
        wait: &str,
        owner: Option<&str>,
    ) -> Result<Option<LockGuard>> {
        let own = wait == "own";
        let mut options = AcquireOptions::new();
        if ttl > 0 {
            options = options.lease(Duration::from_millis(ttl));
        }
        if let Some(owner) = owner {
            options = options.value(owner);
        }
        let lock = self.lock(name, own)?;
        match wait {
            "own" => lock.lock_with(options).await.map(Some),
            "0" => lock.try_lock_with(options).await,
            wait => {
                lock.try_lock_for_with(Duration::from_millis(wait.parse().expect("ms")), options)
                    .await
            }
        }
    }

    async fn run(&self, name: &str, counter: &str, [holds, ttl, seed]: [u64; 3]) -> Result<()> {
        let mut random = StdRng::seed_from_u64(seed);
        let [mut wire, mut setter] = [(); 2].map(|()| home_of(counter, self.first));
        let mut count = || match wire.call(&["GET", counter]).expect("a reply") {
            Reply::Nil => 0,
            reply => reply.text().parse::<u64>().expect("a count"),
        };
        for _ in 0..holds {
            let (kind, key) = name.split_once('/').unwrap_or(("", name));
            let side = random.random();
            let shared = kind == "read_write" && side;
            let name = match kind {
                "read_write" => format!("{}/{key}", if side { "read" } else { "write" }),
                "rivals" => format!("{}/{key}", if side { "fair" } else { "reentrant" }),
                _ => name.to_owned(),
            };
            let guard = self
                .take(&name, ttl, "60000", None)
                .await?
                .expect("not busy for a minute");
            let start = monotonic_ns();
            let before = count();
            tokio::time::sleep(Duration::from_micros(random.random_range(0..500))).await;
            if shared {
                assert_eq!(count(), before, "a write happened during a read hold");
            } else {
                setter
                    .call(&["SET", counter, &(before + 1).to_string()])
                    .expect("a reply");
            }
            let end = monotonic_ns();
            let token = guard
                .fencing_token()
                .map(|token| format!(" {token}"))
                .unwrap_or_default();
            guard.unlock().await?;
            self.say(format_args!(
                "{} {start} {end}{token}",
                if shared { "shared" } else { "hold" }
            ));
            tokio::time::sleep(Duration::from_micros(random.random_range(0..2000))).await;
        }
        self.say(format_args!("done {holds}"));
        Ok(())
    }

    async fn answer(&mut self, words: &[&str]) -> Result<()> {
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        let name = words[1];
        match words[0] {
            "acquire" => {
                let guard = self
                    .take(name, number(2), words[3], words.get(4).copied())
                    .await?;
                let at = monotonic_ns();
                self.say(format_args!(
                    "{} {at}",
                    if guard.is_some() { "acquired" } else { "busy" }
                ));
                self.held
                    .entry(name.into())
                    .or_default()
                    .extend(guard.map(Held::Guard));
            }
            "count" => {
                let latch = self.clients[0].count_down_latch(name)?;
                let count = number(2).try_into().expect("a count");
                let is_set = latch.try_set_count(count).await?;
                let said = if is_set { "counts" } else { "counted" };
                self.say(format_args!("{said} {}", monotonic_ns()));
            }
            "down" => {
                let at = monotonic_ns();
                self.clients[0].count_down_latch(name)?.count_down().await?;
                self.say(format_args!("down {at}"));
            }
            "await" => {
                let latch = self.clients[0].count_down_latch(name)?;
                let is_open = latch.wait_for(Duration::from_millis(number(2))).await?;
                let said = if is_open { "open" } else { "shut" };
                self.say(format_args!("{said} {}", monotonic_ns()));
            }
            "adopt" => {
                let adopted = Held::Adopted(OwnerId::from_value(words[2])?);
                self.held.entry(name.into()).or_default().push(adopted);
                self.say(format_args!("adopted {}", monotonic_ns()));
            }
            // through a key, instead of a message to the other process
            "give" => {
                let Some(Held::Guard(guard)) = self.held.get_mut(name).and_then(Vec::pop) else {
                    panic!("no guard")
                };
                let text = guard
                    .hand_over(Duration::from_millis(number(2)))
                    .await?
                    .to_text();
                home_of("given", self.first)
                    .call(&["SET", "given", &text])
                    .expect("a reply");
                self.say(format_args!("gave {}", monotonic_ns()));
            }
            "take" => {
                let text = home_of("given", self.first)
                    .call(&["GETDEL", "given"])
                    .expect("a reply");
                let guard = self
                    .lock(name, false)?
                    .adopt(&HandOver::from_text(text.text())?)
                    .await?;
                self.held
                    .entry(name.into())
                    .or_default()
                    .push(Held::Guard(guard));
                self.say(format_args!("took {}", monotonic_ns()));
            }
            "release" => {
                let held = self.held.get_mut(name).and_then(Vec::pop);
                let at = monotonic_ns();
                let released = match held {
                    Some(Held::Guard(guard)) => guard.unlock().await,
                    Some(Held::Adopted(owner)) => self.lock(name, false)?.release(&owner).await,
                    None => {
                        self.lock(name, false)?
                            .release(&self.clients[0].current_owner())
                            .await
                    }
                };
                self.say(format_args!(
                    "{} {at}",
                    if unless_lost(released)? {
                        "released"
                    } else {
                        "lost"
                    }
                ));
            }
            "extend" => {
                let (at, lease) = (monotonic_ns(), Duration::from_millis(number(2)));
                let extended = match self.held[name].last().expect("held") {
                    Held::Guard(guard) => unless_lost(guard.extend(lease).await)?,
                    Held::Adopted(owner) => {
                        unless_lost(self.lock(name, false)?.extend(owner, lease).await)?
                    }
                };
                self.say(format_args!(
                    "{} {at}",
                    if extended { "extended" } else { "lost" }
                ));
            }
            "reset" => {
                let at = monotonic_ns();
                self.lock(name, false)?.force_unlock().await?;
                self.say(format_args!("reset {at}"));
            }
            "look" => {
                let (lock, own) = (self.lock(name, false)?, self.clients[0].current_owner());
                let locked = u8::from(lock.is_locked().await?);
                let (holds, ttl) = (lock.hold_count(&own).await?, lock.remaining_lease().await?);
                let ttl = ttl.map_or("-2".to_owned(), |ttl| ttl.as_millis().to_string());
                self.say(format_args!("sees {locked} {holds} {ttl}"));
            }
            "run" => {
                self.run(name, words[2], [number(3), number(4), number(5)])
                    .await?;
            }
            other => panic!("unknown request {other}"),
        }
        Ok(())
    }
}

/// Serves the requests of a task, one after the other.
async fn answer_all(mut state: State, mut requests: UnboundedReceiver<String>) {
    while let Some(request) = requests.recv().await {
        let words: Vec<&str> = request.split(' ').collect();
        if let Err(error) = state.answer(&words).await {
            state.say(format_args!("error {error:?}"));
        }
    }
}

/// Runs a worker process.
async fn serve(record: Record) {
    let mut lines = std::io::stdin().lines().map_while(std::result::Result::ok);
    let connect = lines.next().expect("a request");
    let state = match State::connect(record, &connect.split(' ').collect::<Vec<_>>()[1..]).await {
        Ok(state) => state,
        Err(error) => return println!("{MARK}error {error:?}"),
    };
    state.say(format_args!("connected {}", monotonic_ns()));
    let mut tasks = HashMap::new();
    for line in lines {
        let (tag, request) = line.split_at(if line.starts_with('#') {
            line.find(' ').expect("a request") + 1
        } else {
            0
        });
        let task = tasks.entry(tag.to_owned()).or_insert_with(|| {
            let (sender, requests) = mpsc::unbounded_channel();
            tokio::spawn(answer_all(state.with_tag(tag), requests));
            sender
        });
        task.send(request.to_owned()).expect("a task");
    }
}

#[test]
fn a_worker_process_serves_requests() {
    if let Some(record) = std::env::var_os(PEER) {
        let all = [
            Record::String,
            Record::RedLock,
            Record::Signal,
            Record::Redisson,
        ];
        let record = all
            .into_iter()
            .find(|known| record == *format!("{known:?}"));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(serve(record.expect("a record")));
        // the test that started this process is done with it: exit without libtest's report
        std::process::exit(0);
    }
    for (record, servers) in [
        (Record::String, 1),
        (Record::RedLock, 3),
        (Record::Signal, 1),
    ] {
        let servers = Servers::start(servers);
        let mut worker = Worker::start(Library::Nestlock(record), &servers);
        worker.does("acquire l 10000 0", "acquired");
        worker.does("release l", "released");
        worker.does("acquire l 10000 0", "acquired");
        worker.does("reset l", "reset");
        worker.does("release l", "lost");
        worker.ask("run l counter 3 10000 1");
        assert_eq!(worker.holds(7).len(), 3);
        assert_eq!(servers.call(0, &["GET", "counter"]).text(), "3");
    }
}
