//! Permits, compared in the same run with the mutex, with the reentrant lock's hand-over, and with
//! the sorted set that programs make by hand; and the renewal of 20,000 permits of one client.
//!
//! Run: `cargo bench --bench permits`
#![allow(
    missing_docs,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss
)]

mod support;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fred::{clients::Client, interfaces::LuaInterface};
use nestlock::{Lock, LockClient, LockGuard};
use support::{bare, hand_over, median, report, server};
use tokio::task::JoinSet;

const ROUNDS: usize = 15;
const PAIRS: usize = 300;
const TASKS: usize = 64;
/// Permits of each name.
const TOTAL: u32 = 10;
/// Held by one client.
const HELD: u32 = 20_000;
const WATCHDOG: Duration = Duration::from_secs(6);
const TICKS: u32 = 5;

#[tokio::main]
async fn main() {
    let server = server();
    let client = LockClient::connect(server.url()).await.expect("a client");
    let by_hand = ByHand::new(&bare(server.url()).await).await;
    without_contention(&client, &by_hand).await;
    woken(server.url()).await;
    renewed(server.url()).await;
}

async fn without_contention(client: &LockClient, by_hand: &ByHand) {
    let permit = |name: &str| {
        let permits = client.permits(name, TOTAL).expect("a name");
        permits.many(1).expect("at least one")
    };
    let mutex = |name: &str| client.mutex(name).expect("a name");
    for tasks in [1, TASKS] {
        let locks = |of: &dyn Fn(&str) -> Lock, kind: &str| -> Vec<Lock> {
            (0..tasks)
                .map(|task| of(&format!("{kind}:{task}")))
                .collect()
        };
        let (permits, mutexes) = (locks(&permit, "permits"), locks(&mutex, "mutex"));
        let sets: Vec<_> = (0..tasks).map(|task| by_hand.at(task)).collect();
        let (mut to_mutex, mut to_set) = (Vec::new(), Vec::new());
        // the first round loads the scripts
        for _ in 0..=ROUNDS {
            let ours = time(&permits, pair).await;
            to_mutex.push(time(&mutexes, pair).await / ours);
            to_set.push(time(&sets, ByHand::pair).await / ours);
        }
        for (beside, ratios, bound) in [
            ("the mutex", &mut to_mutex, ">= 0.85"),
            ("a sorted set by hand", &mut to_set, "> 1"),
        ] {
            let what = format!("pairs/s of permits, {tasks} tasks, relative to {beside}");
            report(&what, median(&mut ratios[1..]), bound);
        }
    }
}

/// Returns the seconds in which each task makes its pairs.
async fn time<T, F>(tasks: &[T], pair: impl Fn(T) -> F + Copy + Send + 'static) -> f64
where
    T: Clone + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let start = Instant::now();
    let each = PAIRS.max(tasks.len() * 20) / tasks.len();
    let mut running = JoinSet::new();
    for task in tasks {
        let task = task.clone();
        running.spawn(async move {
            for _ in 0..each {
                pair(task.clone()).await;
            }
        });
    }
    running.join_all().await;
    start.elapsed().as_secs_f64() / (each * tasks.len()) as f64
}

async fn pair(lock: Lock) {
    let guard = lock.lock().await.expect("a lock");
    guard.unlock().await.expect("an unlock");
}

fn millis() -> u128 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("after 1970").as_millis()
}

/// The usual semaphore by hand: the acquire removes what is old, counts, and adds.
#[derive(Clone)]
struct ByHand {
    client: Client,
    /// The hashes of the scripts.
    scripts: [String; 2],
    key: String,
}

impl ByHand {
    async fn new(client: &Client) -> Self {
        const ACQUIRE: &str = "redis.call('zremrangebyscore', KEYS[1], '-inf', ARGV[1])
            if redis.call('zcard', KEYS[1]) < tonumber(ARGV[2]) then
                redis.call('zadd', KEYS[1], ARGV[3], ARGV[4]) return 1
            end
            return 0";
        const RELEASE: &str = "return redis.call('zrem', KEYS[1], ARGV[1])";
        let load = async |script: &str| client.script_load(script).await.expect("a script");
        Self {
            client: client.clone(),
            scripts: [load(ACQUIRE).await, load(RELEASE).await],
            key: String::new(),
        }
    }

    fn at(&self, task: usize) -> Self {
        Self {
            key: format!("by-hand:{task}"),
            ..self.clone()
        }
    }

    async fn pair(self) {
        let [acquire, release] = &self.scripts;
        let (id, now) = (format!("holder of {}", self.key), millis());
        let end = (now + 30_000).to_string();
        let args = vec![now.to_string(), TOTAL.to_string(), end, id.clone()];
        let keys = vec![self.key.as_str()];
        let run = self.client.evalsha(acquire.as_str(), keys.clone(), args);
        assert_eq!(run.await, Ok(1));
        let run = self.client.evalsha(release.as_str(), keys, vec![id]);
        assert_eq!(run.await, Ok(1));
    }
}

async fn woken(url: &str) {
    let connect = || LockClient::connect(url);
    let [from, to] = [
        connect().await.expect("a client"),
        connect().await.expect("a client"),
    ];
    let permit = |client: &LockClient, name: &str, is_fair| {
        let permits = client.permits(name, 1).expect("a name").fair(is_fair);
        permits.many(1).expect("at least one")
    };
    let reentrant = |client: &LockClient, name: &str| client.reentrant_lock(name).expect("a name");
    let (mut permits, mut locks) = ([Vec::new(), Vec::new()], Vec::new());
    for round in 0..1_000 {
        for (kind, is_fair) in [("p", false), ("f", true)] {
            let name = format!("{kind}:{}", round % 8);
            let [from, to] = [&from, &to].map(|client| permit(client, &name, is_fair));
            permits[usize::from(is_fair)].push(hand_over(from, to).await);
        }
        let name = format!("l:{}", round % 8);
        locks.push(hand_over(reentrant(&from, &name), reentrant(&to, &name)).await);
    }
    let lock = median(&mut locks);
    for (what, permits) in ["permits", "fair permits"].into_iter().zip(&mut permits) {
        let what = format!("wake-up of a waiter of {what}, median, relative to the reentrant lock");
        report(&what, median(permits) / lock, "<= 1.2");
    }
}

/// Measures how much of its lease the permit that is renewed last still has.
async fn renewed(url: &str) {
    let builder = LockClient::builder().watchdog_timeout(WATCHDOG);
    let client = builder.connect(url).await.expect("a client");
    let permits = client.permits("held", HELD).expect("a name");
    let mut acquires = JoinSet::new();
    for _ in 0..64 {
        let permits = permits.clone();
        acquires.spawn(async move {
            let mut guards = Vec::new();
            for _ in 0..HELD.div_ceil(64) {
                guards.extend(permits.try_acquire().await.expect("a permit"));
            }
            guards
        });
    }
    let guards: Vec<LockGuard> = acquires.join_all().await.into_iter().flatten().collect();
    assert_eq!(guards.len(), HELD as usize);
    let (mut least, over) = (WATCHDOG, Instant::now() + WATCHDOG / 3 * TICKS);
    while Instant::now() < over {
        let now = guards.iter().map(LockGuard::remaining).min();
        least = least.min(now.unwrap_or_default());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let lost = guards.iter().filter(|guard| guard.is_lost()).count();
    report(
        "20,000 permits of one client: lost in 5 renewals",
        lost as f64,
        "0",
    );
    report(
        "the same: shortest remaining lease, as a share of it",
        least.as_secs_f64() / WATCHDOG.as_secs_f64(),
        ">= 0.33",
    );
}
