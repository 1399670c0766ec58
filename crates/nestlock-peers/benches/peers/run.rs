//! The run: one private server, two processes of each contender, all scenarios in rounds.

use std::{
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nestlock_embedded::SpawnedServer;

use crate::{
    contenders::{self, Contender},
    figures::{self, Drain, Figures, Handover, Memory, Pairs},
    process::{Info, Worker},
    root,
    stats::{median, percentile},
};

const TASKS: [usize; 4] = [1, 8, 32, 256];
const WAITERS: usize = 64;
/// An even number: the two processes swap roles each time.
const HANDOVERS: u64 = 6;
const LOCKS: usize = 10_000;

#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) rounds: usize,
    /// How long a contender locks and unlocks, for each number of tasks in a round.
    pub(crate) time: Duration,
    /// Names of contenders; all of them if empty.
    pub(crate) only: Vec<String>,
}

struct Entry {
    contender: &'static Contender,
    version: String,
    workers: Option<[Worker; 2]>,
    absent: Option<String>,
    /// By number of tasks, then by round.
    pairs: Vec<Vec<Pairs>>,
    handovers: Vec<f64>,
    drains: Vec<f64>,
    memory: Option<Memory>,
}

impl Entry {
    fn start(contender: &'static Contender, url: &str) -> Self {
        let both =
            Worker::start(contender, url).and_then(|one| Ok([one, Worker::start(contender, url)?]));
        let mut entry = Self {
            contender,
            version: String::new(),
            workers: None,
            absent: None,
            pairs: vec![Vec::new(); TASKS.len()],
            handovers: Vec::new(),
            drains: Vec::new(),
            memory: None,
        };
        match both {
            Ok(both) => {
                let memory = Memory {
                    start_kb: both[1].memory("VmRSS:"),
                    locks: LOCKS,
                    before_kb: 0.0,
                    held_kb: 0.0,
                    peak_kb: 0.0,
                };
                entry.memory = Some(memory);
                let said = &both[0].version;
                entry.version = if said.is_empty() {
                    contender.locked_version()
                } else {
                    said.clone()
                };
                entry.workers = Some(both);
            }
            Err(why) => entry.leave(&why),
        }
        entry
    }

    /// Takes the contender out of the run.
    fn leave(&mut self, why: &str) {
        // the figures are published, and must not contain folders of this machine
        let folder = root().canonicalize().unwrap_or_default();
        let why = why.replace(&*folder.to_string_lossy(), ".");
        println!("ABSENT: {}: {why}", self.contender.name);
        self.absent = Some(why);
        self.workers = None;
    }

    /// Runs `act` with both workers. Returns `None` if they are gone, or if `act` fails, which
    /// takes the contender out of the run.
    fn with<T>(&mut self, act: impl FnOnce(&mut [Worker; 2]) -> Result<T, String>) -> Option<T> {
        match act(self.workers.as_mut()?) {
            Ok(found) => Some(found),
            Err(why) => {
                self.leave(&why);
                None
            }
        }
    }
}

fn pairs(
    worker: &mut Worker,
    info: &mut Info,
    tasks: usize,
    time: Duration,
) -> Result<Pairs, String> {
    let (client, server) = (worker.cpu(), info.cpu());
    let numbers = worker.numbers("pairs", format_args!("pairs {tasks} {}", time.as_millis()))?;
    let [count, micros, half, most, nearly_all, all] = numbers[..] else {
        return Err(format!("pairs: {numbers:?}"));
    };
    Ok(Pairs {
        tasks,
        per_second: count / micros * 1e6,
        to_redis_rs: None,
        p50_us: half,
        p90_us: most,
        p99_us: nearly_all,
        p999_us: all,
        client_us: (worker.cpu() - client) / count,
        server_us: (info.cpu() - server) / count,
    })
}

/// Hands a lock over from one process to the other and back, in turn. Returns the times in
/// microseconds.
fn handovers(
    workers: &mut [Worker; 2],
    round: usize,
    names: &mut impl FnMut() -> String,
) -> Result<Vec<f64>, String> {
    let mut micros = Vec::new();
    for turn in 0..HANDOVERS {
        workers.swap(0, 1);
        let [holder, waiter] = workers;
        let name = names();
        holder.ask("locked", format_args!("lock {name}"))?;
        waiter.send(format_args!("lock {name}"))?;
        // a waiter that polls must not be met at the same point of its pause: 40 to 300 ms
        let phase = (turn * 37 + round as u64 * 101) % 261;
        thread::sleep(Duration::from_millis(40 + phase));
        let released: i128 = parsed(&holder.ask("unlocked", format_args!("unlock {name}"))?)?;
        let taken: i128 = parsed(&waiter.answer("locked")?)?;
        waiter.ask("unlocked", format_args!("unlock {name}"))?;
        micros.push((taken - released) as f64 / 1e3);
    }
    Ok(micros)
}

fn parsed(text: &str) -> Result<i128, String> {
    text.parse().map_err(|_| format!("{text} is not a number"))
}

fn median_of(rounds: &[Pairs], tasks: usize, baseline: &[Pairs]) -> Option<Pairs> {
    if rounds.is_empty() {
        return None;
    }
    let of = |figure: fn(&Pairs) -> f64| median(rounds.iter().map(figure));
    let same = rounds.len() == baseline.len();
    let ratios = rounds
        .iter()
        .zip(baseline)
        .map(|(ours, theirs)| ours.per_second / theirs.per_second);
    Some(Pairs {
        tasks,
        per_second: of(|pairs| pairs.per_second),
        to_redis_rs: same.then(|| median(ratios)),
        p50_us: of(|pairs| pairs.p50_us),
        p90_us: of(|pairs| pairs.p90_us),
        p99_us: of(|pairs| pairs.p99_us),
        p999_us: of(|pairs| pairs.p999_us),
        client_us: of(|pairs| pairs.client_us),
        server_us: of(|pairs| pairs.server_us),
    })
}

/// Returns the first line of a program's output.
fn said(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let text = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    text.lines().next().unwrap_or("unknown").to_owned()
}

pub(crate) fn run(plan: &Plan) -> Figures {
    let begin = Instant::now();
    let server = SpawnedServer::start().unwrap_or_else(|error| panic!("{error}"));
    let mut info = Info::connect(server.addr());
    let wanted = contenders::ALL
        .iter()
        .filter(|one| plan.only.is_empty() || plan.only.iter().any(|name| name == one.name));
    let mut entries: Vec<Entry> = wanted
        .map(|contender| Entry::start(contender, &server.url()))
        .collect();
    // the first round warms up
    for round in 0..=plan.rounds {
        println!(
            "round {round} of {}, {:.1} min",
            plan.rounds,
            begin.elapsed().as_secs_f64() / 60.0
        );
        one_round(&mut entries, plan, round, &mut info);
    }
    for entry in &mut entries {
        let before = entry.memory.clone();
        // the worker that makes no pairs, as it keeps no samples
        entry.memory = entry.with(|[_, worker]| {
            let memory = before.ok_or("not started")?;
            let before_kb = worker.memory("VmRSS:");
            worker.ask("held", format_args!("hold {LOCKS}"))?;
            let held_kb = worker.memory("VmRSS:");
            worker.ask("freed", "free")?;
            Ok(Memory {
                before_kb,
                held_kb,
                peak_kb: worker.memory("VmHWM:"),
                ..memory
            })
        });
    }
    Figures {
        date: said("date", &["-u", "+%F"]),
        commit: said("git", &["rev-parse", "--short", "HEAD"]),
        cores: thread::available_parallelism().map_or(0, usize::from),
        server: format!("redis-server {}", info.field("server", "redis_version")),
        rounds: plan.rounds,
        seconds: plan.time.as_secs_f64(),
        minutes: (begin.elapsed().as_secs_f64() / 6.0).round() / 10.0,
        contenders: summaries(&entries),
    }
}

fn one_round(entries: &mut [Entry], plan: &Plan, round: usize, info: &mut Info) {
    let mut number = 0;
    let mut names = || {
        number += 1;
        format!("hand-over:{round}:{number}")
    };
    let count = entries.len();
    // each round begins with another contender
    let order = (0..count).map(|turn| (turn + round) % count);
    for (at, tasks) in TASKS.into_iter().enumerate() {
        for who in order.clone() {
            let entry = &mut entries[who];
            if let Some(found) = entry.with(|[worker, _]| pairs(worker, info, tasks, plan.time))
                && round > 0
            {
                entry.pairs[at].push(found);
            }
        }
    }
    for who in order
        .filter(|who| entries[*who].contender.waits)
        .collect::<Vec<_>>()
    {
        let entry = &mut entries[who];
        let found = entry.with(|workers| {
            let handovers = handovers(workers, round, &mut names)?;
            let drained =
                workers[0].numbers("drained", format_args!("drain {} {WAITERS}", names()))?;
            Ok((handovers, drained[0]))
        });
        if let Some((mut handovers, drained)) = found
            && round > 0
        {
            entry.handovers.append(&mut handovers);
            entry.drains.push(drained);
        }
    }
}

fn summaries(entries: &[Entry]) -> Vec<figures::Contender> {
    let baseline = entries
        .iter()
        .find(|entry| entry.contender.name == contenders::REDIS_RS);
    let summary = |entry: &Entry| {
        let pairs = TASKS.into_iter().enumerate().filter_map(|(at, tasks)| {
            median_of(
                &entry.pairs[at],
                tasks,
                baseline.map_or(&[], |baseline| &baseline.pairs[at]),
            )
        });
        let mut handovers = entry.handovers.clone();
        let handover = (!handovers.is_empty()).then(|| Handover {
            count: handovers.len(),
            p50_us: percentile(&mut handovers, 0.5),
            p90_us: percentile(&mut handovers, 0.9),
            max_us: percentile(&mut handovers, 1.0),
        });
        let drained = median(entry.drains.iter().copied());
        let drain = (!entry.drains.is_empty()).then(|| Drain {
            waiters: WAITERS,
            ms: drained / 1e3,
            per_second: WAITERS as f64 / drained * 1e6,
        });
        figures::Contender {
            name: entry.contender.name.to_owned(),
            version: entry.version.clone(),
            absent: entry.absent.clone(),
            pairs: pairs.collect(),
            handover,
            drain,
            memory: entry.memory.clone(),
        }
    };
    entries.iter().map(summary).collect()
}
