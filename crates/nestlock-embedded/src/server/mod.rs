//! The emulated server. As in Redis, one thread runs one command at a time.

pub(crate) mod client;
mod clock;
mod commands;
mod keyspace;
pub(crate) mod port;
pub(crate) mod resp;
mod script;
mod sorted_set;

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    fmt::Write as _,
    hash::{BuildHasher, RandomState},
    net::SocketAddr,
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use self::{
    client::{Blocked, Client, Fate},
    clock::Clock,
    commands::{Call, Command, Outcome, Run, Unfit},
    keyspace::Keyspace,
    resp::{Protocol, Reply, Request, Text},
    script::Scripts,
};

/// The commands that CLIENT PAUSE holds up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PauseMode {
    Write,
    All,
}

#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) executed: u64,
    pub(crate) rejected: u64,
    pub(crate) failed: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub(crate) connections: u64,
    pub(crate) commands: u64,
    pub(crate) expired: u64,
    pub(crate) calls: BTreeMap<&'static str, Calls>,
    pub(crate) errors: BTreeMap<String, u64>,
}

impl Stats {
    fn count_error(&mut self, text: &Text) {
        *self.errors.entry(text.code().into_owned()).or_default() += 1;
    }
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
    fn new(port: u16) -> Self {
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
    fn wake_all(&self) {
        for client in self.clients.values() {
            client.wake.notify_one();
        }
    }

    /// Returns how long CLIENT PAUSE still holds up this request. Returns `None` if it may run now.
    fn held_up(&mut self, request: &Request) -> Option<Duration> {
        let (until, mode) = self.paused?;
        self.clock.tick();
        let left = until
            .checked_sub(self.clock.now())
            .filter(|left| !left.is_zero());
        if left.is_none() {
            self.paused = None;
        }
        let waits =
            mode == PauseMode::All || commands::find(request).is_ok_and(Command::waits_for_writes);
        left.filter(|_| waits)
    }

    /// Runs a command other than a script command.
    fn run(
        &mut self,
        client: u64,
        db: &mut usize,
        args: &[Vec<u8>],
        (command, run): (&'static Command, fn(&mut Call) -> Outcome),
        (in_script, protocol): (bool, Protocol),
    ) -> Outcome {
        let now = self.clock.now_ms();
        self.stats.expired += self.keys.expire(now);
        let mut call = Call {
            server: self,
            client,
            db: *db,
            args,
            in_script,
            protocol,
            command,
        };
        let outcome = run(&mut call);
        *db = call.db;
        self.count(command.name, &outcome);
        outcome
    }

    fn count(&mut self, name: &'static str, outcome: &Outcome) {
        self.stats.commands += 1;
        let calls = self.stats.calls.entry(name).or_default();
        calls.executed += 1;
        if let Err(text) = outcome {
            calls.failed += 1;
            self.stats.count_error(text);
        }
    }

    fn feed_monitors(&mut self, client: u64, db: usize, from_script: bool, args: &[Vec<u8>]) {
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

/// The server with its scripts.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) server: Rc<RefCell<Server>>,
    scripts: Scripts,
}

impl Engine {
    pub(crate) fn new(port: u16, stop: Arc<AtomicBool>) -> Result<Self, String> {
        let server = Rc::new(RefCell::new(Server::new(port)));
        let scripts = Scripts::new(&server, stop)?;
        Ok(Self { server, scripts })
    }

    /// Advances the clock. Keys that expire as a result are removed before it returns.
    pub(crate) fn advance(&self, by: Duration) {
        let mut server = self.server.borrow_mut();
        server.clock.advance(by);
        let now = server.clock.now_ms();
        server.stats.expired += server.keys.expire(now);
        server.wake_all();
    }

    /// Replies with a protocol error and closes the connection, because the client has sent invalid
    /// RESP.
    pub(crate) fn give_up(&self, id: u64, text: &Text) {
        self.with_client(id, |client| {
            client.send(&Reply::Error(Text([b"ERR ", &text.0[..]].concat().into())));
            client.end(Fate::Ending);
        });
    }

    /// Runs a request and writes its reply.
    pub(crate) fn execute(&self, id: u64, request: &Request) {
        let mut server = self.server.borrow_mut();
        server.clock.tick();
        let now = server.clock.now();
        let Some(client) = server.clients.get_mut(&id) else {
            return;
        };
        client.active = now;
        let (mut db, protocol) = (client.db, client.protocol);
        let only_subscribes = client.only_subscribes();

        let refuse = |server: &mut Server, text: Text| {
            server.stats.count_error(&text);
            if let Some(client) = server.clients.get_mut(&id) {
                client.send(&Reply::Error(text));
            }
        };
        let command = match commands::find(request) {
            Ok(command) => command,
            Err(Unfit::Unknown(text) | Unfit::Arity(text)) => return refuse(&mut server, text),
        };
        client.last_command = command.name;
        if only_subscribes && !command.is_for_subscribed() {
            server.stats.calls.entry(command.name).or_default().rejected += 1;
            let text = format!(
                "ERR Can't execute '{}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed in \
                 this context",
                command.name
            );
            return refuse(&mut server, text.into());
        }
        server.feed_monitors(id, db, false, request);

        let outcome = match command.run {
            Run::Plain(run) => server.run(id, &mut db, request, (command, run), (false, protocol)),
            Run::Container(_) => Err(commands::SYNTAX.into()),
            Run::Script(which) => {
                drop(server);
                let outcome = self.scripts.execute(which, id, db, request);
                server = self.server.borrow_mut();
                server.count(command.name, &outcome);
                outcome
            }
        };
        if let Some(client) = server.clients.get_mut(&id) {
            client.db = db;
            match outcome {
                Ok(Reply::Nothing) => {}
                Ok(reply) => client.send(&reply),
                Err(text) => client.send(&Reply::Error(text)),
            }
        }
        commands::serve_blocked(&mut server);
    }

    /// Returns how long a blocked client may still wait, or ends its wait if the time is up.
    /// Returns `None` if the client is not blocked, waits forever, or has just been unblocked.
    pub(crate) fn time_left(&self, id: u64) -> Option<Duration> {
        let mut server = self.server.borrow_mut();
        server.clock.tick();
        let now = server.clock.now();
        let until = server.clients.get(&id)?.blocked.as_ref()?.until?;
        let left = until.saturating_sub(now);
        if left.is_zero() {
            server.unblock(id, &Reply::NilList);
            return None;
        }
        Some(left)
    }

    pub(crate) fn with_client<R>(&self, id: u64, act: impl FnOnce(&mut Client) -> R) -> Option<R> {
        self.server.borrow_mut().clients.get_mut(&id).map(act)
    }
}
