//! The servers of a test: one, several independent ones, or a cluster.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use nestlock_embedded::{SpawnedCluster, SpawnedServer};

use super::wire::{Reply, Wire};

/// Waits for a state, with a deadline far beyond what a loaded machine needs.
pub fn eventually(what: &str, mut state: impl FnMut() -> bool) {
    let start = Instant::now();
    while !state() {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "not within 20 s: {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A connection to the server that owns this key: this one, or another of its cluster.
pub fn home_of(key: &str, addr: SocketAddr) -> Wire {
    let mut wire = Wire::connect(addr).expect("a connection");
    match wire.call(&["TYPE", key]).expect("a reply") {
        Reply::Error(error) if error.starts_with("MOVED ") => {
            let home = error
                .rsplit(' ')
                .next()
                .and_then(|addr| addr.parse().ok())
                .expect("an address");
            Wire::connect(home).expect("a connection")
        }
        _ => wire,
    }
}

/// Real servers; they end when this is dropped.
#[derive(Debug)]
pub enum Servers {
    Apart(Vec<SpawnedServer>),
    /// What is documented for the first server applies to the whole cluster.
    Cluster(SpawnedCluster),
}

impl Servers {
    pub fn start(count: usize) -> Self {
        Self::Apart(
            (0..count)
                .map(|_| SpawnedServer::start().unwrap_or_else(|error| panic!("{error}")))
                .collect(),
        )
    }

    /// Starts a cluster of three masters.
    pub fn cluster() -> Self {
        // a busy machine must not trigger a failover
        let cluster = SpawnedCluster::start_with(3, 0, ["--cluster-node-timeout", "15000"]);
        Self::Cluster(cluster.unwrap_or_else(|error| panic!("{error}")))
    }

    fn processes(&self) -> &[SpawnedServer] {
        match self {
            Self::Apart(servers) => servers,
            Self::Cluster(cluster) => cluster.nodes(),
        }
    }

    pub fn count(&self) -> usize {
        match self {
            Self::Apart(servers) => servers.len(),
            Self::Cluster(_) => 1,
        }
    }

    /// The URLs for `connect`.
    pub fn urls(&self) -> String {
        match self {
            Self::Apart(servers) => servers
                .iter()
                .map(SpawnedServer::url)
                .collect::<Vec<_>>()
                .join(" "),
            Self::Cluster(cluster) => cluster.url(),
        }
    }

    /// Runs a command on one of them; in a cluster, on the owner of the key that is its first argument.
    pub fn call(&self, server: usize, parts: &[&str]) -> Reply {
        let addr = self.processes()[server].addr();
        let mut wire = match (self, parts) {
            (Self::Cluster(_), [_, key, ..]) => home_of(key, addr),
            _ => Wire::connect(addr).expect("a connection"),
        };
        wire.call(parts).expect("a reply")
    }

    /// Runs a command on each process.
    pub fn call_all(&self, parts: &[&str]) -> Vec<Reply> {
        let call = |server: &SpawnedServer| Wire::connect(server.addr())?.call(parts);
        self.processes()
            .iter()
            .map(|server| call(server).expect("a reply"))
            .collect()
    }

    /// The string at this key on each server.
    pub fn get(&self, key: &str) -> Vec<Option<String>> {
        let text = |reply: Reply| {
            if let Reply::Text(text) = reply {
                Some(text)
            } else {
                None
            }
        };
        self.call_all(&["GET", key]).into_iter().map(text).collect()
    }

    /// The number of keys on all servers.
    pub fn keys(&self) -> i64 {
        self.call_all(&["DBSIZE"]).iter().map(Reply::int).sum()
    }

    /// How often a command was called on the first server, including inside scripts.
    pub fn count_of(&self, command: &str) -> u64 {
        let line = format!("cmdstat_{command}:calls=");
        let count = |server: &SpawnedServer| -> u64 {
            let stats = Wire::connect(server.addr())
                .and_then(|mut wire| wire.call(&["INFO", "commandstats"]));
            let stats = stats.expect("a reply");
            let found = stats
                .text()
                .lines()
                .find_map(|stat| stat.strip_prefix(&line));
            found.map_or(0, |rest| {
                rest.split(',').next().unwrap().parse().expect("a count")
            })
        };
        match self {
            Self::Apart(servers) => count(&servers[0]),
            Self::Cluster(cluster) => cluster.nodes().iter().map(count).sum(),
        }
    }

    /// How many clients wait in a blocking command on the first server.
    pub fn blocked(&self) -> u64 {
        let info = self.call(0, &["INFO", "clients"]);
        let found = info
            .text()
            .lines()
            .find_map(|line| line.strip_prefix("blocked_clients:"));
        found.expect("a line").trim().parse().expect("a count")
    }

    pub fn kill(&self, server: usize) {
        self.processes()[server].kill().expect("a server to kill");
    }

    /// Restarts it on the same port, empty.
    pub fn restart(&self, server: usize) {
        self.processes()[server]
            .restart()
            .unwrap_or_else(|error| panic!("{error}"));
    }
}
