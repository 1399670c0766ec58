//! nestlock and Redisson on the same server: a process of each, with several tasks, each of them an owner.

use std::{collections::BTreeSet, time::Duration};

use super::{
    clock::monotonic_ns,
    servers::{Servers, eventually},
    wire::Reply,
    worker::{Library, Record, Worker},
};

pub const MS: u64 = 1_000_000;
/// A lease in ms that no test outlives.
pub const LONG: u64 = 60_000;

/// The two, by their number.
pub const LIBRARIES: [Library; 2] = [Library::Nestlock(Record::Redisson), Library::Redisson];
pub const NESTLOCK: usize = 0;
pub const REDISSON: usize = 1;

/// One server, or a cluster, and one process of each library with several tasks.
#[derive(Debug)]
pub struct Sides {
    pub servers: Servers,
    pub sides: [Vec<Worker>; 2],
}

impl Sides {
    pub fn start(tasks: usize, settings: &str) -> Self {
        Self::on(Servers::start(1), tasks, settings)
    }

    pub fn on(servers: Servers, tasks: usize, settings: &str) -> Self {
        let sides = LIBRARIES.map(|library| Worker::several(library, &servers, settings, tasks));
        Self { servers, sides }
    }

    pub fn does(&mut self, side: usize, request: &str, wanted: &str) -> u64 {
        self.sides[side][0].does(request, wanted)
    }

    pub fn call(&self, parts: &[&str]) -> Reply {
        self.servers.call(0, parts)
    }

    /// Fields and counts of a record, without the mode.
    pub fn record(&self, key: &str) -> Vec<(String, String)> {
        let reply = self.call(&["HGETALL", key]);
        let words: Vec<String> = reply
            .list()
            .iter()
            .map(|word| word.text().to_owned())
            .collect();
        let fields = words
            .chunks(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()));
        fields.filter(|(field, _)| field != "mode").collect()
    }

    /// The waiters of a fair lock, the next one first.
    pub fn queue(&self, key: &str) -> Vec<String> {
        let reply = self.call(&[
            "LRANGE",
            &format!("redisson_lock_queue:{{{key}}}"),
            "0",
            "-1",
        ]);
        reply
            .list()
            .iter()
            .map(|word| word.text().to_owned())
            .collect()
    }

    /// How many connections are subscribed to a channel of this lock.
    pub fn listeners(&self, key: &str) -> i64 {
        let count = |channels: &str, counts: &str| -> i64 {
            let channels = self
                .servers
                .call_all(&["PUBSUB", channels, &format!("*{{{key}}}*")]);
            let names = channels
                .iter()
                .flat_map(|channels| channels.list().iter().map(Reply::text));
            let names: BTreeSet<&str> = names.collect();
            let on_all = |name| self.servers.call_all(&["PUBSUB", counts, name]);
            names
                .iter()
                .flat_map(|name| on_all(name))
                .map(|count| count.list()[1].int())
                .sum()
        };
        let sharded = if matches!(self.servers, Servers::Cluster(_)) {
            count("SHARDCHANNELS", "SHARDNUMSUB")
        } else {
            0
        };
        count("CHANNELS", "NUMSUB") + sharded
    }

    /// Waits until this many threads of Redisson sleep. Its message for all only wakes threads that sleep when it arrives: a
    /// thread that has just found the lock busy misses it, and waits until the TTL is over.
    pub fn asleep(&mut self, threads: usize) {
        let redisson = &mut self.sides[REDISSON][0];
        eventually("all sleep", || {
            redisson.numbers("asleep", "asleep") == [threads as i64]
        });
    }

    /// Sends a request that must wait, and waits until it has tried, subscribed, and tried again.
    pub fn waits(&mut self, side: usize, task: usize, request: &str) {
        let (_, key) = request
            .split(' ')
            .nth(1)
            .and_then(|name| name.split_once('/'))
            .expect("a kind and a name");
        let (queued, listening, requests) =
            (self.queue(key).len(), self.listeners(key), self.requests());
        let fair = usize::from(request.contains(" fair/"));
        self.sides[side][task].ask(request);
        eventually("it waits", || {
            let joined = self.queue(key).len() >= queued + fair;
            joined && self.listeners(key) > listening && self.requests() >= requests + 2
        });
    }

    /// The number of attempts and releases so far.
    pub fn requests(&self) -> u64 {
        self.servers.count_of("evalsha") + self.servers.count_of("eval")
    }

    /// Waits until one of these tasks, given by side and number, has the lock. Removes it from them.
    pub fn next(&mut self, waiting: &mut Vec<(usize, usize)>, limit: u64) -> (usize, usize, u64) {
        let next = self.next_within(waiting, limit);
        next.unwrap_or_else(|| panic!("none of {waiting:?} has it after {limit} ms"))
    }

    /// The same, but returns `None` after `limit` ms.
    pub fn next_within(
        &mut self,
        waiting: &mut Vec<(usize, usize)>,
        limit: u64,
    ) -> Option<(usize, usize, u64)> {
        let start = monotonic_ns();
        while monotonic_ns() < start + limit * MS {
            let sides = &mut self.sides;
            let got = waiting.iter().enumerate().find_map(|(at, &(side, task))| {
                Some((at, side, task, sides[side][task].has_answered("acquired")?))
            });
            if let Some((at, side, task, time)) = got {
                waiting.remove(at);
                return Some((side, task, time));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// Checks that only keys with these prefixes are left.
    pub fn nothing_left(&self, but: &[&str]) {
        let left = || -> Vec<String> {
            let keys = self.servers.call_all(&["KEYS", "*"]);
            keys.iter()
                .flat_map(Reply::list)
                .map(|key| key.text().to_owned())
                .filter(|key| !but.iter().any(|but| key.starts_with(but)))
                .collect()
        };
        // Redisson deletes the keys of a release only after the release
        eventually(
            &format!("nothing but {but:?} is left, of {:?}", left()),
            || left().is_empty(),
        );
    }
}
