//! The server with its scripts: runs requests, one at a time.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use super::{
    client::{Client, Fate},
    commands::{self, Command, Run, Unfit},
    resp::{Reply, Request, Text},
    script::Scripts,
    state::{PauseMode, Server},
};

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

    /// Returns how long CLIENT PAUSE still holds up this request. Returns `None` if it may run now.
    pub(crate) fn held_up(&self, request: &Request) -> Option<Duration> {
        let (left, mode) = self.server.borrow_mut().pause_left()?;
        let waits =
            mode == PauseMode::All || commands::find(request).is_ok_and(Command::waits_for_writes);
        waits.then_some(left)
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
            Run::Plain(run) => commands::run(
                &mut server,
                id,
                &mut db,
                request,
                (command.name, run),
                (false, protocol),
            ),
            Run::Container(_) => Err(commands::SYNTAX.into()),
            Run::Script(which) => {
                drop(server);
                let outcome = self.scripts.execute(which, id, db, request);
                server = self.server.borrow_mut();
                server.stats.count(command.name, &outcome);
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
