//! An operation: one acquire, with all that became of its guard, and the client that called it.

use crate::kinds::{Class, Kind};

/// The configuration of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Client {
    /// In nanoseconds, like every time here.
    pub(crate) watchdog: u64,
    pub(crate) link: Option<usize>,
}

impl Client {
    pub(crate) fn command(self) -> u64 {
        self.watchdog / 3
    }
}

/// How an acquire ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Got,
    None,
    Gone,
    Failed(String),
}

/// One acquire, and what became of its guard.
#[derive(Debug, Clone)]
pub(crate) struct Op {
    /// Such as `s0g1#17`.
    pub(crate) id: String,
    pub(crate) task: String,
    pub(crate) who: String,
    pub(crate) kind: Kind,
    pub(crate) locks: Vec<String>,
    pub(crate) class: Class,
    pub(crate) way: String,
    pub(crate) limit: Option<u64>,
    pub(crate) lease: Option<u64>,
    /// The operation of the same process that it is nested in.
    pub(crate) parent: Option<usize>,
    pub(crate) call: u64,
    pub(crate) end: Option<(u64, Outcome)>,
    /// The longest round trip that its client knew of, when it began and when it ended.
    pub(crate) trip: u64,
    pub(crate) token: Option<u64>,
    /// The first and the last check that found it held; the times are from before the checks.
    pub(crate) ok: Option<(u64, u64)>,
    /// The latest time up to which such a check said that the hold can be relied on.
    pub(crate) deadline: u64,
    pub(crate) lost: Option<u64>,
    pub(crate) told: Option<(u64, String)>,
    pub(crate) release: Option<(u64, String)>,
    pub(crate) released: Option<(u64, String)>,
    /// The last extension: when it began, and its lease.
    pub(crate) extension: Option<(u64, u64)>,
    pub(crate) extended: Vec<(u64, String)>,
    /// Queries: when the reply arrived, the subject, the value, and the expected value.
    pub(crate) questions: Vec<(u64, &'static str, String, String)>,
    /// A check that found it held after a loss was reported.
    pub(crate) back: Option<u64>,
}

impl Op {
    pub(crate) fn got(&self) -> Option<u64> {
        self.end
            .as_ref()
            .filter(|(_, outcome)| *outcome == Outcome::Got)
            .map(|(time, _)| *time)
    }

    /// Returns the client, such as `s0g1c0`.
    pub(crate) fn client(&self) -> &str {
        client(&self.task)
    }

    /// Returns how long its hold, by this client, lasts without a renewal.
    pub(crate) fn ttl(&self, client: Client) -> u64 {
        self.lease.unwrap_or(client.watchdog)
    }
}

/// Returns the process of a task.
pub(crate) fn process(task: &str) -> &str {
    task.split('c').next().unwrap_or(task)
}

/// Returns the client of a task.
pub(crate) fn client(task: &str) -> &str {
    task.split('t').next().unwrap_or(task)
}
