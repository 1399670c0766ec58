//! The workers in Rust: this program, started again. The protocol is in `workers/README.md`.

use std::{
    collections::HashMap,
    io::{BufRead, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use fred::{interfaces::LuaInterface, prelude::ClientLike};
use nestlock::{Lock as NestLock, LockClient, LockGuard};
use nix::time::{ClockId, clock_gettime};
use redis::aio::MultiplexedConnection;
use rlock::async_lock::{RLock, RLockGuard};
use rslock::{Lock, LockManager};
use tokio::{runtime::Runtime, sync::Barrier};

use crate::{
    scripts::{ACQUIRE, OWNER, RELEASE},
    stats::percentile,
};

const TTL: Duration = Duration::from_secs(30);

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Clone)]
enum Contender {
    Nestlock(LockClient),
    Redis {
        connection: MultiplexedConnection,
        acquire: String,
        release: String,
    },
    Fred {
        client: fred::clients::Client,
        acquire: String,
        release: String,
    },
    Rslock(LockManager),
    Rlock(RLock),
}

/// A lock that a task takes repeatedly. It is created once, if the library has such a thing.
enum Named {
    Nestlock(NestLock),
    Other(Contender, String),
}

enum Held {
    Nestlock(LockGuard),
    Bare,
    Rslock(Lock),
    Rlock(RLockGuard),
}

impl Contender {
    async fn connect(name: &str, url: &str) -> Result<Self, Failure> {
        Ok(match name {
            "nestlock" => Self::Nestlock(LockClient::connect(url).await?),
            "bare redis-rs" => {
                let mut connection = redis::Client::open(url)?
                    .get_multiplexed_async_connection()
                    .await?;
                let mut digests = Vec::new();
                for script in [ACQUIRE, RELEASE] {
                    let load = redis::cmd("SCRIPT").arg("LOAD").arg(script).to_owned();
                    digests.push(load.query_async::<String>(&mut connection).await?);
                }
                let release = digests.pop().expect("two");
                Self::Redis {
                    connection,
                    acquire: digests.pop().expect("two"),
                    release,
                }
            }
            "bare fred" => {
                let client = fred::clients::Client::new(
                    fred::types::config::Config::from_url(url)?,
                    None,
                    None,
                    None,
                );
                client.init().await?;
                let acquire = client.script_load(ACQUIRE).await?;
                let release = client.script_load(RELEASE).await?;
                Self::Fred {
                    client,
                    acquire,
                    release,
                }
            }
            "rslock" => Self::Rslock(LockManager::new(vec![url])),
            "rlock" => Self::Rlock(RLock::new(url).await?),
            _ => return Err(format!("{name}: unknown").into()),
        })
    }

    fn named(&self, name: String) -> Result<Named, Failure> {
        Ok(match self {
            Self::Nestlock(client) => Named::Nestlock(client.mutex(name)?),
            other => Named::Other(other.clone(), name),
        })
    }
}

impl Named {
    async fn lock(&mut self) -> Result<Held, Failure> {
        let (contender, name) = match self {
            Self::Nestlock(lock) => return Ok(Held::Nestlock(lock.lock().await?)),
            Self::Other(contender, name) => (contender, name.as_str()),
        };
        Ok(match contender {
            Contender::Nestlock(_) => unreachable!("has locks of its own"),
            Contender::Redis {
                connection,
                acquire,
                ..
            } => {
                let mut ask = redis::cmd("EVALSHA");
                ask.arg(&*acquire)
                    .arg(1)
                    .arg(name)
                    .arg(OWNER)
                    .arg(30_000)
                    .arg(1);
                took(ask.query_async::<i64>(connection).await?)?
            }
            Contender::Fred {
                client, acquire, ..
            } => took(
                client
                    .evalsha::<i64, _, _, _>(&*acquire, name, vec![OWNER, "30000", "1"])
                    .await?,
            )?,
            Contender::Rslock(manager) => Held::Rslock(manager.acquire_no_guard(name, TTL).await?),
            Contender::Rlock(rlock) => Held::Rlock(
                rlock
                    .acquire_mutex_with_options(name, rlock::AcquireOptions::new().ttl(TTL))
                    .await?,
            ),
        })
    }

    async fn unlock(&mut self, held: Held) -> Result<(), Failure> {
        match (self, held) {
            (_, Held::Nestlock(guard)) => guard.unlock().await?,
            (_, Held::Rlock(mut guard)) => guard.release().await?,
            (Self::Other(Contender::Rslock(manager), _), Held::Rslock(lock)) => {
                manager.unlock(&lock).await;
            }
            (
                Self::Other(
                    Contender::Redis {
                        connection,
                        release,
                        ..
                    },
                    name,
                ),
                Held::Bare,
            ) => {
                let mut ask = redis::cmd("EVALSHA");
                ask.arg(&*release)
                    .arg(1)
                    .arg(&*name)
                    .arg(OWNER)
                    .arg(0)
                    .arg(channel(name));
                took(ask.query_async::<i64>(connection).await?)?;
            }
            (
                Self::Other(
                    Contender::Fred {
                        client, release, ..
                    },
                    name,
                ),
                Held::Bare,
            ) => {
                let args = vec![OWNER.to_owned(), "0".to_owned(), channel(name)];
                took(
                    client
                        .evalsha::<i64, _, _, _>(&*release, &*name, args)
                        .await?,
                )?;
            }
            _ => unreachable!("held by another contender"),
        }
        Ok(())
    }
}

fn channel(name: &str) -> String {
    format!("redisson_lock__channel:{{{name}}}")
}

fn took(answer: i64) -> Result<Held, Failure> {
    if answer == 1 {
        Ok(Held::Bare)
    } else {
        Err(format!("the script replied {answer}").into())
    }
}

/// Returns the time of the clock that all processes of a machine share, in nanoseconds.
fn now() -> i128 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    i128::from(time.tv_sec()) * 1_000_000_000 + i128::from(time.tv_nsec())
}

async fn pairs(mut lock: Named, end: Instant) -> Result<Vec<f64>, Failure> {
    let mut micros = Vec::new();
    loop {
        let start = Instant::now();
        if start >= end {
            return Ok(micros);
        }
        let held = lock.lock().await?;
        lock.unlock(held).await?;
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
}

struct Worker {
    name: String,
    contender: Option<Contender>,
    held: HashMap<String, (Named, Held)>,
}

impl Worker {
    fn named(&self, name: String) -> Result<Named, Failure> {
        self.contender.as_ref().ok_or("connect first")?.named(name)
    }

    async fn answer(&mut self, words: &[&str]) -> Result<String, Failure> {
        match *words {
            ["connect", url] => {
                self.contender = Some(Contender::connect(&self.name, url).await?);
                Ok("connected".into())
            }
            ["pairs", tasks, ms] => {
                self.pairs(tasks.parse()?, Duration::from_millis(ms.parse()?))
                    .await
            }
            ["lock", name] => {
                let mut lock = self.named(name.to_owned())?;
                let held = lock.lock().await?;
                let at = now();
                self.held.insert(name.to_owned(), (lock, held));
                Ok(format!("locked {at}"))
            }
            ["unlock", name] => {
                let (mut lock, held) = self.held.remove(name).ok_or("not held")?;
                let at = now();
                lock.unlock(held).await?;
                Ok(format!("unlocked {at}"))
            }
            ["drain", name, waiters] => self.drain(name, waiters.parse()?).await,
            ["hold", count] => {
                for number in 0..count.parse()? {
                    let name = format!("hold:{number}");
                    let mut lock = self.named(name.clone())?;
                    let held = lock.lock().await?;
                    self.held.insert(name, (lock, held));
                }
                Ok("held".into())
            }
            ["free"] => {
                for (_, (mut lock, held)) in self.held.drain() {
                    lock.unlock(held).await?;
                }
                Ok("freed".into())
            }
            _ => Err("unknown".into()),
        }
    }

    async fn pairs(&self, tasks: usize, time: Duration) -> Result<String, Failure> {
        let start = Instant::now();
        let mut micros = if tasks == 1 {
            pairs(self.named("pairs:0".into())?, start + time).await?
        } else {
            let mut running = Vec::new();
            for task in 0..tasks {
                running.push(tokio::spawn(pairs(
                    self.named(format!("pairs:{task}"))?,
                    start + time,
                )));
            }
            let mut micros = Vec::new();
            for task in running {
                micros.append(&mut task.await??);
            }
            micros
        };
        let elapsed = start.elapsed().as_secs_f64() * 1e6;
        let count = micros.len();
        let [p50, p90, p99, p999] =
            [0.5, 0.9, 0.99, 0.999].map(|share| percentile(&mut micros, share));
        Ok(format!("pairs {count} {elapsed} {p50} {p90} {p99} {p999}"))
    }

    async fn drain(&self, name: &str, waiters: usize) -> Result<String, Failure> {
        let mut first = self.named(name.to_owned())?;
        let held = first.lock().await?;
        let barrier = Arc::new(Barrier::new(waiters + 1));
        let mut running = Vec::new();
        for _ in 0..waiters {
            let mut lock = self.named(name.to_owned())?;
            let barrier = Arc::clone(&barrier);
            running.push(tokio::spawn(async move {
                barrier.wait().await;
                let held = lock.lock().await?;
                lock.unlock(held).await
            }));
        }
        barrier.wait().await;
        // until all tasks wait
        tokio::time::sleep(Duration::from_millis(400)).await;
        let start = Instant::now();
        first.unlock(held).await?;
        for task in running {
            task.await??;
        }
        Ok(format!("drained {}", start.elapsed().as_secs_f64() * 1e6))
    }
}

pub(crate) fn run(name: &str) {
    let runtime = Runtime::new().expect("a runtime");
    let mut worker = Worker {
        name: name.to_owned(),
        contender: None,
        held: HashMap::new(),
    };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match runtime.block_on(worker.answer(&words)) {
            Ok(answer) => answer,
            Err(error) => format!("error {error}").replace('\n', " "),
        };
        println!("@ {answer}");
        std::io::stdout().flush().expect("a reader");
    }
    // exits without waiting for tasks of the libraries
    std::process::exit(0);
}
