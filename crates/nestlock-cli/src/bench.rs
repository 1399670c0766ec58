//! `bench`: measures the cost of a lock, compared with bare EVALSHA over the same sort of
//! connection in the same rounds.

use std::{
    cell::{Cell, RefCell},
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use nestlock::LockClient;

use crate::{
    args::{Bench, Server},
    connect::is_near,
    failure::{Failure, Unusable},
    node::{Node, text},
    raw::Raw,
    signals::Signals,
    stderr::warn,
    stdout::say,
};

/// The minimum number of samples for a figure.
const FEWEST: usize = 1_000;
/// The script for bare EVALSHA. Each sample runs it twice, as a lock and an unlock take two
/// requests.
const BARE: &str = "return redis.call('hset', KEYS[1], 'f', ARGV[1])";
/// Clients that hand a lock over to each other.
const WAITERS: usize = 4;
/// The length of the bar for a ratio of 1.
const BAR: u32 = 40;

/// The durations of the pairs of one round.
type Times = Vec<Duration>;

pub(crate) async fn bench(server: &Server, bench: &Bench) -> Result<u8, Failure> {
    let (tasks, rounds) = (usize::from(bench.tasks), usize::from(bench.rounds));
    let each = (bench.pairs as usize).max(FEWEST).div_ceil(tasks * rounds);
    let raw = Raw::connect(server).await?;
    let client = raw.locks()?;
    let id = client
        .current_owner()
        .to_string()
        .split(':')
        .next()
        .unwrap_or_default()
        .to_owned();
    // bare requests and those for locks, then the hand-overs
    let commands = 4 * each * tasks * rounds + 4 * FEWEST;
    let others = others(&raw, &id).await;
    let is_near = raw.masters().iter().all(|node| is_near(&node.address));
    if !bench.yes && (!is_near || others > 0) {
        let why = if is_near {
            format!("{others} other clients use it")
        } else {
            "it is not on this machine".to_owned()
        };
        return Err(Unusable(format!(
            "this sends about {commands} commands to the server, and {why}; add --yes to run it anyway"
        ))
        .into());
    }
    warn(format_args!(
        "sending about {commands} commands; concurrent tasks: {}, rounds: {}",
        bench.tasks, bench.rounds
    ));
    let scratch = format!("nestlock-bench:{id}");
    let key = format!("{}{scratch}:bare", server.prefix);
    let node = raw
        .master_of(&key)
        .map_err(|error| error.details().to_owned())?;
    // all names on the same server, in a cluster too
    let names: Vec<String> = raw.names_at(&node, &scratch).take(tasks + 1).collect();
    if names.len() <= tasks {
        return Err(Unusable(format!(
            "too few lock names map to one server for {tasks} tasks; use a smaller --tasks"
        ))
        .into());
    }
    let mut signals = Signals::listen()?;
    let measured = tokio::select! {
        measured = measure(&node, &key, client, server, &names, bench, each) => measured,
        signal = signals.stop() => Err(format!("stopped by {signal}").into()),
    };
    client.idle().await;
    let _ = raw.ask(&["DEL", &key]).await;
    let all = measured?;
    let (bare, hand_overs) = (&all[0], &all[2]);
    // absolute figures depend on this machine, so the ratios come first; more is better
    let of_rate = |measured: &Measured| measured.rate() / bare.rate();
    let of_time = bare.at(50).as_secs_f64() / hand_overs.at(50).as_secs_f64();
    for (measured, ratio) in all.iter().zip([1.0, of_rate(&all[1]), of_time]) {
        say(format_args!(
            "{:20} {ratio:5.2} x  {}",
            measured.what,
            bar(ratio)
        ));
    }
    for measured in &all {
        let millis = |share: usize| measured.at(share).as_secs_f64() * 1e3;
        let rate = if measured.rates.is_empty() {
            String::new()
        } else {
            format!("{:.0} pairs/s; ", measured.rate())
        };
        let (p50, p99, max) = (millis(50), millis(99), millis(100));
        let (what, times) = (measured.what, measured.times.len());
        say(format_args!(
            "{what:20} {rate}p50 {p50:.3} ms, p99 {p99:.3} ms, max {max:.3} ms; {times} samples"
        ));
    }
    Ok(0)
}

/// Counts the other clients. Leaves out this client, its requests, replication links and sentinels.
async fn others(raw: &Raw<'_>, id: &str) -> usize {
    let lists = raw.ask_each(&raw.masters(), &["CLIENT", "LIST"]).await;
    let lists = lists.into_iter().filter_map(|list| text(&list.ok()?));
    let is_other = |line: &&str| {
        let field = |name: &str| {
            line.split(' ')
                .find_map(|field| field.strip_prefix(name))
                .unwrap_or_default()
        };
        let is_of_service =
            field("flags=").contains(['S', 'M']) || field("name=").starts_with("sentinel-");
        !is_of_service && !field("name=").ends_with(id)
    };
    // one connection to each server is this program's
    lists
        .map(|list| list.lines().filter(is_other).count().saturating_sub(1))
        .sum()
}

fn count(pairs: usize) -> f64 {
    f64::from(u32::try_from(pairs).unwrap_or(u32::MAX))
}

/// The pairs per second of each round, and the duration of each sample, in the end sorted from the
/// shortest.
struct Measured {
    what: &'static str,
    rates: Vec<f64>,
    times: Times,
}

impl Measured {
    fn rate(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    }

    /// Returns the duration that `share` percent of the samples do not exceed.
    fn at(&self, share: usize) -> Duration {
        self.times[(self.times.len() - 1) * share / 100]
    }
}

async fn measure(
    node: &Node,
    key: &str,
    client: &LockClient,
    server: &Server,
    names: &[String],
    bench: &Bench,
    each: usize,
) -> Result<[Measured; 3], Failure> {
    let loaded = node
        .ask(&["SCRIPT", "LOAD", BARE])
        .await
        .map_err(|error| error.details().to_owned())?;
    let digest = text(&loaded).unwrap_or_default();
    let mut bare = Measured {
        what: "bare EVALSHA, twice",
        rates: Vec::new(),
        times: Vec::new(),
    };
    let mut locks = Measured {
        what: "lock and unlock",
        rates: Vec::new(),
        times: Vec::new(),
    };
    let tasks = usize::from(bench.tasks);
    for _ in 0..bench.rounds {
        round(&mut bare, tasks, |_| async {
            let mut times = Vec::with_capacity(each);
            for _ in 0..each {
                let began = Instant::now();
                for _ in 0..2 {
                    let asked = node.ask(&["EVALSHA", &digest, "1", key, "1"]).await;
                    asked.map_err(|error| error.details().to_owned())?;
                }
                times.push(began.elapsed());
            }
            Ok(times)
        })
        .await?;
        round(&mut locks, tasks, |task| async move {
            let lock = client.mutex(&names[task])?;
            let mut times = Vec::with_capacity(each);
            for _ in 0..each {
                let began = Instant::now();
                lock.lock().await?.unlock().await?;
                times.push(began.elapsed());
            }
            Ok(times)
        })
        .await?;
    }
    let times = hand_overs(server, &names[tasks]).await?;
    let mut all = [
        bare,
        locks,
        Measured {
            what: "hand-over, fair",
            rates: Vec::new(),
            times,
        },
    ];
    for measured in &mut all {
        measured.times.sort_unstable();
    }
    Ok(all)
}

/// Measures from the start of an unlock until another client has the lock. There is always a
/// waiter.
async fn hand_overs(server: &Server, name: &str) -> Result<Times, Failure> {
    let (times, last) = (RefCell::new(Times::new()), Cell::new(None));
    let work = async |me: usize| {
        let client = server.connect(None).await?;
        let lock = client.fair_lock(name)?;
        while times.borrow().len() < FEWEST {
            let guard = lock.lock().await?;
            if let Some((other, at)) = last.get()
                && other != me
            {
                times.borrow_mut().push(Instant::elapsed(&at));
            }
            last.set(Some((me, Instant::now())));
            guard.unlock().await?;
        }
        Ok::<_, Failure>(())
    };
    join_all((0..WAITERS).map(work))
        .await
        .into_iter()
        .collect::<Result<(), Failure>>()?;
    Ok(times.into_inner())
}

async fn round<F: Future<Output = Result<Times, Failure>>>(
    measured: &mut Measured,
    tasks: usize,
    work: impl Fn(usize) -> F,
) -> Result<(), Failure> {
    let began = Instant::now();
    let all: Result<Vec<Times>, Failure> =
        join_all((0..tasks).map(work)).await.into_iter().collect();
    let (all, took) = (all?.concat(), began.elapsed());
    measured.rates.push(count(all.len()) / took.as_secs_f64());
    measured.times.extend(all);
    Ok(())
}

fn bar(ratio: f64) -> String {
    (0..2 * BAR)
        .take_while(|mark| f64::from(*mark) < ratio * f64::from(BAR))
        .map(|_| '#')
        .collect()
}
