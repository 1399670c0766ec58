//! The emulated server without a port, for tests: bytes in, bytes out. Not part of the public API.

use std::{
    cell::Cell,
    net::{Ipv4Addr, SocketAddr},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use tokio::sync::Notify;

use crate::server::{
    Engine,
    client::Fate,
    resp::{Parser, Reply},
};

/// The commands, keys and scripts of one server.
#[derive(Debug, Clone)]
pub struct Machine {
    engine: Rc<Engine>,
    refuses: Rc<Cell<Option<&'static str>>>,
}

/// A client connection.
#[derive(Debug)]
pub struct Connection {
    machine: Machine,
    id: u64,
    parser: Parser,
    /// Notified when there is output, or a wait is over.
    pub wake: Rc<Notify>,
}

impl Machine {
    /// Creates a server without data.
    ///
    /// # Panics
    /// There is no memory for Lua.
    #[must_use]
    #[expect(clippy::new_without_default)]
    pub fn new() -> Self {
        let engine = Engine::new(6379, Arc::default()).expect("Lua");
        Self {
            engine: Rc::new(engine),
            refuses: Rc::default(),
        }
    }

    /// Opens a connection.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn connect(&self) -> Connection {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let id = self.engine.server.borrow_mut().enter(any, any);
        let wake = self
            .engine
            .with_client(id, |client| Rc::clone(&client.wake))
            .expect("it has just come");
        Connection {
            machine: self.clone(),
            id,
            parser: Parser::default(),
            wake,
        }
    }

    /// Advances the clock.
    pub fn advance(&self, by: Duration) {
        self.engine.advance(by);
    }

    /// Replies with this error to all scripts, without running them. `None` runs them again.
    pub fn refuse(&self, error: Option<&'static str>) {
        self.refuses.set(error);
    }
}

impl Connection {
    /// Executes the requests that these bytes complete.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.parser.feed(bytes);
        self.go_on();
    }

    /// Executes the pending requests, unless the client is blocked on a list.
    pub fn go_on(&mut self) {
        let engine = &self.machine.engine;
        let goes_on = || {
            engine.with_client(self.id, |client| {
                client.fate == Fate::Open && client.blocked.is_none()
            })
        };
        while goes_on() == Some(true) {
            let request = match self.parser.next() {
                Ok(Some(request)) => request,
                Ok(None) => return,
                Err(text) => {
                    engine.give_up(self.id, &text);
                    return;
                }
            };
            let runs_script =
                request[0].len() >= 4 && request[0][..4].eq_ignore_ascii_case(b"EVAL");
            match self.machine.refuses.get() {
                Some(error) if runs_script => {
                    engine.with_client(self.id, |client| client.send(&Reply::Error(error.into())));
                }
                _ => engine.execute(self.id, &request),
            }
        }
    }

    /// Takes the bytes to send to the client.
    #[must_use]
    pub fn output(&mut self) -> Vec<u8> {
        let take = |client: &mut crate::server::client::Client| std::mem::take(&mut client.output);
        self.machine
            .engine
            .with_client(self.id, take)
            .unwrap_or_default()
    }

    /// Returns how long a blocked client may still wait, or ends its wait if the time is up.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        let engine = &self.machine.engine;
        engine
            .with_client(self.id, |client| client.blocked.is_some())
            .filter(|blocked| *blocked)?;
        engine.time_left(self.id)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.machine.engine.server.borrow_mut().leave(self.id);
    }
}
