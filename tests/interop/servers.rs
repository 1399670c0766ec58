//! The servers of a test: one, or several that know nothing of each other.

use std::time::{Duration, Instant};

use nestlock_embedded::SpawnedServer;

use super::wire::{Reply, Wire};

/// Waits for a state, with a deadline far beyond what a loaded machine needs.
pub fn eventually(what: &str, mut state: impl FnMut() -> bool) {
    let start = Instant::now();
    while !state() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Real servers; they end when this is dropped.
#[derive(Debug)]
pub struct Servers(Vec<SpawnedServer>);

impl Servers {
    pub fn start(count: usize) -> Self {
        Self((0..count).map(|_| SpawnedServer::start().unwrap_or_else(|error| panic!("{error}"))).collect())
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// What `connect` takes.
    pub fn urls(&self) -> String {
        self.0.iter().map(SpawnedServer::url).collect::<Vec<_>>().join(" ")
    }

    /// Runs a command on one of them.
    pub fn call(&self, server: usize, parts: &[&str]) -> Reply {
        let mut wire = Wire::connect(self.0[server].addr()).expect("a connection");
        wire.call(parts).expect("an answer")
    }

    /// Runs a command on each.
    pub fn call_all(&self, parts: &[&str]) -> Vec<Reply> {
        (0..self.count()).map(|server| self.call(server, parts)).collect()
    }

    /// A string on each server.
    pub fn get(&self, key: &str) -> Vec<Option<String>> {
        let text = |reply: Reply| if let Reply::Text(text) = reply { Some(text) } else { None };
        self.call_all(&["GET", key]).into_iter().map(text).collect()
    }

    /// How many keys there are on all together.
    pub fn keys(&self) -> i64 {
        self.call_all(&["DBSIZE"]).iter().map(Reply::int).sum()
    }

    /// How often a command has been called on the first one, also inside scripts.
    pub fn count_of(&self, command: &str) -> u64 {
        let stats = self.call(0, &["INFO", "commandstats"]);
        let line = format!("cmdstat_{command}:calls=");
        let found = stats.text().lines().find_map(|stat| stat.strip_prefix(&line));
        found.map_or(0, |rest| rest.split(',').next().unwrap().parse().expect("a count"))
    }

    /// How many clients wait in a blocking command on the first one.
    pub fn blocked(&self) -> u64 {
        let info = self.call(0, &["INFO", "clients"]);
        let found = info.text().lines().find_map(|line| line.strip_prefix("blocked_clients:"));
        found.expect("a line").trim().parse().expect("a count")
    }

    pub fn kill(&self, server: usize) {
        self.0[server].kill().expect("a server to kill");
    }

    /// On the same port, empty.
    pub fn restart(&self, server: usize) {
        self.0[server].restart().unwrap_or_else(|error| panic!("{error}"));
    }
}
