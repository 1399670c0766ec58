//! The server's state of a client connection.

use std::{net::SocketAddr, rc::Rc, time::Duration};

use indexmap::IndexSet;
use tokio::sync::Notify;

use super::resp::{Protocol, Reply};

/// How many bytes of output a client that does not read may accumulate: Redis's hard limit for
/// subscribers.
const MAX_OUTPUT: usize = 32 * 1024 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Subscriptions {
    pub(crate) channels: IndexSet<Vec<u8>>,
    pub(crate) patterns: IndexSet<Vec<u8>>,
    pub(crate) shards: IndexSet<Vec<u8>>,
}

impl Subscriptions {
    pub(crate) fn is_empty(&self) -> bool {
        self.channels.is_empty() && self.patterns.is_empty() && self.shards.is_empty()
    }
}

/// The two ends of a list.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Left,
    Right,
}

/// A client's pending blocking command.
#[derive(Debug)]
pub(crate) struct Blocked {
    pub(crate) db: usize,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) end: End,
    /// Time since the Unix epoch; `None` waits forever.
    pub(crate) until: Option<Duration>,
}

/// Whether a connection stays open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    Open,
    /// It closes when the pending output is written.
    Ending,
    /// It closes now, without writing the pending output.
    Ended,
}

#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: u64,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) name: Vec<u8>,
    pub(crate) db: usize,
    pub(crate) protocol: Protocol,
    pub(crate) subscriptions: Subscriptions,
    pub(crate) monitors: bool,
    pub(crate) blocked: Option<Blocked>,
    /// When the client connected, and when it last sent a request, as times since the Unix epoch.
    pub(crate) connected: Duration,
    pub(crate) active: Duration,
    pub(crate) last_command: &'static str,
    pub(crate) fate: Fate,
    /// The bytes not written yet.
    pub(crate) output: Vec<u8>,
    /// Wakes the connection's task when the output or the fate has changed.
    pub(crate) wake: Rc<Notify>,
}

impl Client {
    pub(crate) fn new(id: u64, peer: SocketAddr, local: SocketAddr, now: Duration) -> Self {
        Self {
            id,
            peer,
            local,
            name: Vec::new(),
            db: 0,
            protocol: Protocol::Resp2,
            subscriptions: Subscriptions::default(),
            monitors: false,
            blocked: None,
            connected: now,
            active: now,
            last_command: "NULL",
            fate: Fate::Open,
            output: Vec::new(),
            wake: Rc::new(Notify::new()),
        }
    }

    /// Appends a reply or a message to the output.
    pub(crate) fn send(&mut self, reply: &Reply) {
        if self.fate == Fate::Ended {
            return;
        }
        reply.write(self.protocol, &mut self.output);
        // Only messages and MONITOR lines pile up: with 1 MiB unread, no request of the client is
        // executed.
        if matches!(reply, Reply::Push(_) | Reply::Status(_)) && self.output.len() > MAX_OUTPUT {
            self.end(Fate::Ended);
        }
        self.wake.notify_one();
    }

    pub(crate) fn end(&mut self, fate: Fate) {
        self.fate = fate;
        if fate == Fate::Ended {
            self.output = Vec::new();
        }
        self.wake.notify_one();
    }

    /// Returns whether the connection may only send subscription commands: RESP2 allows no others
    /// while the client is subscribed.
    pub(crate) fn only_subscribes(&self) -> bool {
        self.protocol == Protocol::Resp2 && !self.subscriptions.is_empty()
    }

    /// Returns the client's line in CLIENT LIST.
    pub(crate) fn describe(&self, now: Duration) -> String {
        let flags = match (
            self.monitors,
            self.subscriptions.is_empty(),
            self.blocked.is_some(),
        ) {
            (true, ..) => "O",
            (_, false, _) => "P",
            (_, _, true) => "b",
            _ => "N",
        };
        format!(
            "id={} addr={} laddr={} fd=0 name={} age={} idle={} flags={flags} db={} sub={} psub={} ssub={} multi=-1 \
             obl={} oll=0 omem=0 events=r cmd={} user=default redir=-1 resp={}\n",
            self.id,
            self.peer,
            self.local,
            String::from_utf8_lossy(&self.name),
            now.saturating_sub(self.connected).as_secs(),
            now.saturating_sub(self.active).as_secs(),
            self.db,
            self.subscriptions.channels.len(),
            self.subscriptions.patterns.len(),
            self.subscriptions.shards.len(),
            self.output.len(),
            self.last_command,
            if self.protocol == Protocol::Resp3 {
                3
            } else {
                2
            },
        )
    }
}
