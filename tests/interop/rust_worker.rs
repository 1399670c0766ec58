//! nestlock's own worker: this test binary, started again, speaks the protocol of README.md.

use std::{collections::HashMap, net::SocketAddr, process::Command, time::Duration};

use nestlock::{
    AcquireOptions, Backoff, Error, LockClient, LockGuard, OwnerId, RLock, RedLock, RedLockOptions, Result,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{
    clock::monotonic_ns,
    servers::Servers,
    wire::{Reply, Wire},
    worker::{Library, MARK, Record, Worker},
};

/// Set in worker processes: which record to keep.
const PEER: &str = "NESTLOCK_INTEROP_WORKER";

pub fn command(record: Record) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    command
        .args(["--exact", "rust_worker::a_worker_process_does_as_it_is_told", "--nocapture", "--test-threads=1"])
        .env(PEER, format!("{record:?}"));
    command
}

fn say(what: impl std::fmt::Display) {
    println!("{MARK}{what}");
}

/// What `acquire` or `adopt` left here.
enum Held {
    Guard(LockGuard),
    /// Somebody else's hold, whose token is known.
    Adopted(OwnerId),
}

struct State {
    record: Record,
    clients: Vec<LockClient>,
    first: SocketAddr,
    held: HashMap<String, Held>,
}

/// `false`: it was lost.
fn unless_lost<T>(result: Result<T>) -> Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(Error::Lost { .. } | Error::NotHeld { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

impl State {
    async fn connect(record: Record, urls: &[&str]) -> Result<Self> {
        let mut clients = Vec::new();
        for url in urls {
            // no waiter may get by with looking for himself
            clients.push(LockClient::builder().poll_cap(Duration::from_secs(60)).connect(url).await?);
        }
        let first = urls[0].strip_prefix("redis://").and_then(|addr| addr.parse().ok()).expect("an address");
        Ok(Self { record, clients, first, held: HashMap::new() })
    }

    /// The lock; `own`: with the pauses and tries that it has by itself, else with those of the other workers.
    fn lock(&self, name: &str, own: bool) -> Result<Box<dyn RLock>> {
        let [from, to] = [1, 4].map(Duration::from_millis);
        Ok(match self.record {
            Record::String => {
                assert_eq!(self.clients.len(), 1, "a string lock is on one server");
                let backoff = if own { Backoff::default() } else { Backoff::constant(to) };
                Box::new(self.clients[0].string_lock_with(name, backoff)?)
            }
            Record::RedLock => {
                let options = RedLockOptions::default();
                let options = if own { options } else { options.tries(u32::MAX).retry_delay(from, to) };
                Box::new(RedLock::over_servers(&self.clients, name, options)?)
            }
            Record::Signal => {
                assert_eq!(self.clients.len(), 1, "a signal lock is on one server");
                Box::new(self.clients[0].signal_lock(name)?)
            }
        })
    }

    async fn take(&self, name: &str, ttl: u64, wait: &str, owner: Option<&str>) -> Result<Option<LockGuard>> {
        let own = wait == "own";
        let mut options = AcquireOptions::new().lease(Duration::from_millis(ttl));
        options = match wait {
            "own" => options.wait_forever(),
            "0" => options,
            wait => options.wait(Duration::from_millis(wait.parse().expect("ms"))),
        };
        if let Some(owner) = owner {
            options = options.value(owner);
        }
        self.lock(name, own)?.acquire(options).await
    }

    async fn run(&self, name: &str, counter: &str, [holds, ttl, seed]: [u64; 3]) -> Result<()> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut wire = Wire::connect(self.first).expect("a connection");
        for _ in 0..holds {
            let guard = self.take(name, ttl, "60000", None).await?.expect("not busy for a minute");
            let start = monotonic_ns();
            let count = match wire.call(&["GET", counter]).expect("an answer") {
                Reply::Nil => 0,
                reply => reply.text().parse::<u64>().expect("a count"),
            };
            tokio::time::sleep(Duration::from_micros(random.random_range(0..500))).await;
            wire.call(&["SET", counter, &(count + 1).to_string()]).expect("an answer");
            let end = monotonic_ns();
            guard.unlock().await?;
            say(format_args!("hold {start} {end}"));
            tokio::time::sleep(Duration::from_micros(random.random_range(0..2000))).await;
        }
        say(format_args!("done {holds}"));
        Ok(())
    }

    async fn answer(&mut self, words: &[&str]) -> Result<()> {
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        let name = words[1];
        match words[0] {
            "acquire" => {
                let guard = self.take(name, number(2), words[3], words.get(4).copied()).await?;
                let at = monotonic_ns();
                say(format_args!("{} {at}", if guard.is_some() { "acquired" } else { "busy" }));
                if let Some(guard) = guard {
                    self.held.insert(name.into(), Held::Guard(guard));
                }
            }
            "adopt" => {
                self.held.insert(name.into(), Held::Adopted(OwnerId::from_value(words[2])?));
                say(format_args!("adopted {}", monotonic_ns()));
            }
            "release" => {
                let held = self.held.remove(name).expect("held");
                let at = monotonic_ns();
                let released = match held {
                    Held::Guard(guard) => guard.unlock().await,
                    Held::Adopted(owner) => self.lock(name, false)?.release(&owner).await,
                };
                say(format_args!("{} {at}", if unless_lost(released)? { "released" } else { "lost" }));
            }
            "extend" => {
                let (at, lease) = (monotonic_ns(), Duration::from_millis(number(2)));
                let extended = match &self.held[name] {
                    Held::Guard(guard) => unless_lost(guard.extend(lease).await)?,
                    Held::Adopted(owner) => self.lock(name, false)?.extend(owner, lease).await?,
                };
                say(format_args!("{} {at}", if extended { "extended" } else { "lost" }));
            }
            "reset" => {
                let at = monotonic_ns();
                self.lock(name, false)?.force_unlock().await?;
                say(format_args!("reset {at}"));
            }
            "run" => self.run(name, words[2], [number(3), number(4), number(5)]).await?,
            other => panic!("unknown request {other}"),
        }
        Ok(())
    }
}

/// The life of a worker process.
async fn serve(record: Record) {
    let mut state = None;
    for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let done = match &mut state {
            None => match State::connect(record, &words[1..]).await {
                Ok(connected) => {
                    state = Some(connected);
                    say(format_args!("connected {}", monotonic_ns()));
                    Ok(())
                }
                Err(error) => Err(error),
            },
            Some(state) => state.answer(&words).await,
        };
        if let Err(error) = done {
            say(format_args!("error {error:?}"));
        }
    }
}

#[test]
fn a_worker_process_does_as_it_is_told() {
    if let Some(record) = std::env::var_os(PEER) {
        let record =
            [Record::String, Record::RedLock, Record::Signal].into_iter().find(|known| record == *format!("{known:?}"));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(serve(record.expect("a record")));
        // the test that started this process has let go of it: no verdict of libtest's
        std::process::exit(0);
    }
    for (record, servers) in [(Record::String, 1), (Record::RedLock, 3), (Record::Signal, 1)] {
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
