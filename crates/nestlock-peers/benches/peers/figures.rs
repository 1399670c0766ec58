//! The figures of a run: `docs/peers.json`.

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) date: String,
    pub(crate) commit: String,
    pub(crate) cores: usize,
    pub(crate) server: String,
    pub(crate) rounds: usize,
    /// How long a contender locks and unlocks, for each number of tasks in a round.
    pub(crate) seconds: f64,
    pub(crate) minutes: f64,
    pub(crate) contenders: Vec<Contender>,
}

/// The figures of a contender, as medians over the rounds.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Contender {
    pub(crate) name: String,
    /// The version of the library and, for other languages, of the language.
    pub(crate) version: String,
    /// Why figures are missing.
    pub(crate) absent: Option<String>,
    pub(crate) pairs: Vec<Pairs>,
    /// `None` if it cannot wait.
    pub(crate) handover: Option<Handover>,
    pub(crate) drain: Option<Drain>,
    pub(crate) memory: Option<Memory>,
}

/// Tasks that lock and unlock, each with a lock of its own.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pairs {
    pub(crate) tasks: usize,
    pub(crate) per_second: f64,
    /// The median of the ratios to bare redis-rs in the same round, as noise affects both.
    /// `None` if one of them lacks rounds.
    pub(crate) to_redis_rs: Option<f64>,
    /// The latency of one pair.
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
    /// The processor time of one pair.
    pub(crate) client_us: f64,
    pub(crate) server_us: f64,
}

/// The time from the call of `unlock` in one process to the return of `lock` in another, over all
/// rounds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Handover {
    pub(crate) count: usize,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) max_us: f64,
}

/// Tasks of one process that wait for one lock. Each of them releases it at once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Drain {
    pub(crate) waiters: usize,
    pub(crate) ms: f64,
    pub(crate) per_second: f64,
}

/// The resident memory of a process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Memory {
    /// After it has connected, before it has done anything.
    pub(crate) start_kb: f64,
    pub(crate) locks: usize,
    /// Before it held the locks.
    pub(crate) before_kb: f64,
    /// While it held the locks.
    pub(crate) held_kb: f64,
    /// The peak.
    pub(crate) peak_kb: f64,
}

impl Figures {
    /// Returns `true` if the run is too short to be quoted.
    pub(crate) fn is_trial(&self) -> bool {
        self.rounds < 9 || self.seconds < 1.0
    }

    pub(crate) fn contender(&self, name: &str) -> Option<&Contender> {
        self.contenders
            .iter()
            .find(|contender| contender.name == name)
    }

    /// Prints the figures for the notes, as tables in Markdown.
    pub(crate) fn print(&self) {
        println!(
            "{} rounds of {} s, {:.1} min, {} cores, {}\n",
            self.rounds, self.seconds, self.minutes, self.cores, self.server
        );
        println!(
            "| | tasks | pairs/s | / redis-rs | p50, p99 us | client us | server us |\n|---|---|---|---|---|---|---|"
        );
        for contender in &self.contenders {
            for pairs in &contender.pairs {
                let Pairs {
                    tasks,
                    per_second,
                    p50_us,
                    p99_us,
                    client_us,
                    server_us,
                    ..
                } = pairs;
                let ratio = pairs
                    .to_redis_rs
                    .map_or("-".into(), |ratio| format!("{ratio:.2}"));
                println!(
                    "| {} | {tasks} | {per_second:.0} | {ratio} | {p50_us:.0}, {p99_us:.0} | {client_us:.1} | {server_us:.1} |",
                    contender.name
                );
            }
        }
        println!(
            "\n| | hand-over p50, p90 ms | waiters drained/s | MB at the start, with locks held, at most |\n|---|---|---|---|"
        );
        for contender in &self.contenders {
            let none = || "-".to_owned();
            let hand = contender.handover.as_ref();
            let hand = hand.map_or_else(none, |hand| {
                format!("{:.2}, {:.2}", hand.p50_us / 1e3, hand.p90_us / 1e3)
            });
            let drain = contender
                .drain
                .as_ref()
                .map_or_else(none, |drain| format!("{:.0}", drain.per_second));
            let memory = contender.memory.as_ref().map_or_else(none, |memory| {
                let Memory {
                    start_kb,
                    held_kb,
                    peak_kb,
                    ..
                } = memory;
                format!(
                    "{:.1}, {:.1}, {:.1}",
                    start_kb / 1024.0,
                    held_kb / 1024.0,
                    peak_kb / 1024.0
                )
            });
            println!(
                "| {} {} | {hand} | {drain} | {memory} |",
                contender.name, contender.version
            );
        }
        for contender in &self.contenders {
            if let Some(why) = &contender.absent {
                println!("\nABSENT: {}: {why}", contender.name);
            }
        }
    }
}
