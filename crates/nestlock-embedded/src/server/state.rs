//! The server's state: what commands read and change.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt::Write as _,
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    time::Duration,
};

use super::{
    client::{Blocked, Client},
    clock::Clock,
    keyspace::Keyspace,
    resp::Reply,
    stats::Stats,
};

/// The commands that CLIENT PAUSE holds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PauseMode {
    Write,
    All,
}

/// The server's state, without its scripts.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) clock: Clock,
    pub(crate) keys: Keyspace,
    pub(crate) clients: BTreeMap<u64, Client>,
    pub(crate) stats: Stats,
    pub(crate) port: u16,
    /// A random id, different for each server.
    pub(crate) run_id: String,
    /// The clients that are blocked on a list, in order of arrival.
    waiters: VecDeque<u64>,
    paused: Option<(Duration, PauseMode)>,
    last_client: u64,
}

fn random_id() -> String {
    let [a, b, c] = [0_u8, 1, 2].map(|part| RandomState::new().hash_one(part));
    format!("{a:016x}{b:016x}{:08x}", c >> 32)
}

impl Server {
    pub(crate) fn new(port: u16) -> Self {
        Self {
            clock: Clock::new(),
            keys: Keyspace::new(),
            clients: BTreeMap::new(),
            stats: Stats::default(),
            port,
            run_id: random_id(),
            waiters: VecDeque::new(),
            paused: None,
            last_client: 0,
        }
    }

    pub(crate) fn enter(&mut self, peer: SocketAddr, local: SocketAddr) -> u64 {
        self.clock.tick();
        self.last_client += 1;
        self.stats.connections += 1;
        let client = Client::new(self.last_client, peer, local, self.clock.now());
        self.clients.insert(self.last_client, client);
        self.last_client
    }

    pub(crate) fn leave(&mut self, id: u64) {
        self.clients.remove(&id);
        self.waiters.retain(|waiter| *waiter != id);
    }

    pub(crate) fn block(&mut self, id: u64, blocked: Blocked) {
        if let Some(client) = self.clients.get_mut(&id) {
            client.blocked = Some(blocked);
            self.waiters.push_back(id);
        }
    }

    /// Sends the reply to a blocked client and ends its wait.
    pub(crate) fn unblock(&mut self, id: u64, reply: &Reply) {
        self.waiters.retain(|waiter| *waiter != id);
        if let Some(client) = self.clients.get_mut(&id) {
            client.blocked = None;
            client.send(reply);
        }
    }

    /// Returns the clients that wait for a list, in order of arrival.
    pub(crate) fn waiting_for(&self, db: usize, key: &[u8]) -> Vec<u64> {
        let waits = |id: &&u64| {
            let blocked = self
                .clients
                .get(id)
                .and_then(|client| client.blocked.as_ref());
            blocked.is_some_and(|blocked| {
                blocked.db == db && blocked.keys.iter().any(|other| other == key)
            })
        };
        self.waiters.iter().filter(waits).copied().collect()
    }

    pub(crate) fn pause_clients(&mut self, until: Duration, mode: PauseMode) {
        // a later CLIENT PAUSE may extend or widen an active pause, but not shorten or narrow it
        self.paused = Some(
            match self.paused.filter(|(end, _)| *end > self.clock.now()) {
                Some((end, before)) => (end.max(until), before.max(mode)),
                None => (until, mode),
            },
        );
    }

    pub(crate) fn unpause_clients(&mut self) {
        self.paused = None;
        self.wake_all();
    }

    /// Wakes the task of every connection, after the clock has jumped or a pause has ended.
    pub(crate) fn wake_all(&self) {
        for client in self.clients.values() {
            client.wake.notify_one();
        }
    }

    /// Returns how long CLIENT PAUSE still holds up commands, and which. Returns `None` if it holds
    /// up none.
    pub(crate) fn pause_left(&mut self) -> Option<(Duration, PauseMode)> {
        let (until, mode) = self.paused?;
        self.clock.tick();
        let left = until
            .checked_sub(self.clock.now())
            .filter(|left| !left.is_zero());
        if left.is_none() {
            self.paused = None;
        }
        left.map(|left| (left, mode))
    }

    pub(crate) fn feed_monitors(
        &mut self,
        client: u64,
        db: usize,
        from_script: bool,
        args: &[Vec<u8>],
    ) {
        if !self.clients.values().any(|client| client.monitors) {
            return;
        }
        let now = self.clock.now();
        let sender = self
            .clients
            .get(&client)
            .map_or_else(String::new, |client| client.peer.to_string());
        let sender = if from_script { "lua".into() } else { sender };
        let mut line = format!(
            "{}.{:06} [{db} {sender}]",
            now.as_secs(),
            now.subsec_micros()
        );
        for arg in args {
            line += " \"";
            for byte in arg {
                let _ = match byte {
                    b'\\' | b'"' => write!(line, "\\{}", char::from(*byte)),
                    b'\n' => write!(line, "\\n"),
                    b'\r' => write!(line, "\\r"),
                    b'\t' => write!(line, "\\t"),
                    b' '..=b'~' => write!(line, "{}", char::from(*byte)),
                    _ => write!(line, "\\x{byte:02x}"),
                };
            }
            line.push('"');
        }
        let line = Reply::Status(line.into());
        for monitor in self.clients.values_mut().filter(|client| client.monitors) {
            monitor.send(&line);
        }
    }
}
