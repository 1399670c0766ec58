//! The server without its port, for tests: bytes in, bytes out. No part of the public interface.

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

/// Commands, keys and scripts of one server.
#[derive(Debug, Clone)]
pub struct Machine {
    engine: Rc<Engine>,
    refuses: Rc<Cell<Option<&'static str>>>,
}

/// One connection.
#[derive(Debug)]
pub struct Connection {
    machine: Machine,
    id: u64,
    parser: Parser,
    /// Told when there is output, or a wait is over.
    pub wake: Rc<Notify>,
}

impl Machine {
    /// # Panics
    /// No memory for Lua.
    #[must_use]
    #[expect(clippy::new_without_default)]
    pub fn new() -> Self {
        let engine = Engine::new(6379, Arc::default()).expect("Lua");
        Self { engine: Rc::new(engine), refuses: Rc::default() }
    }

    /// A new connection.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn connect(&self) -> Connection {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let id = self.engine.server.borrow_mut().enter(any, any);
        let wake = self.engine.with_client(id, |client| Rc::clone(&client.wake)).expect("it has just come");
        Connection { machine: self.clone(), id, parser: Parser::default(), wake }
    }

    /// Puts the clock forward.
    pub fn advance(&self, by: Duration) {
        self.engine.advance(by);
    }

    /// Until further notice, scripts are not run, but answered by this error.
    pub fn refuse(&self, error: Option<&'static str>) {
        self.refuses.set(error);
    }
}

impl Connection {
    /// Executes what these bytes complete.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.parser.feed(bytes);
        self.go_on();
    }

    /// Executes what has come, unless the client waits for a list.
    pub fn go_on(&mut self) {
        let engine = &self.machine.engine;
        let goes_on = || engine.with_client(self.id, |client| client.fate == Fate::Open && client.blocked.is_none());
        while goes_on() == Some(true) {
            let request = match self.parser.next() {
                Ok(Some(request)) => request,
                Ok(None) => return,
                Err(text) => {
                    engine.give_up(self.id, &text);
                    return;
                }
            };
            let runs_script = request[0].len() >= 4 && request[0][..4].eq_ignore_ascii_case(b"EVAL");
            match self.machine.refuses.get() {
                Some(error) if runs_script => {
                    engine.with_client(self.id, |client| client.send(&Reply::Error(error.into())));
                }
                _ => engine.execute(self.id, &request),
            }
        }
    }

    /// What is to be written.
    #[must_use]
    pub fn output(&mut self) -> Vec<u8> {
        let take = |client: &mut crate::server::client::Client| std::mem::take(&mut client.output);
        self.machine.engine.with_client(self.id, take).unwrap_or_default()
    }

    /// Ends a wait whose time is up; else how long it may still last.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        let engine = &self.machine.engine;
        engine.with_client(self.id, |client| client.blocked.is_some()).filter(|blocked| *blocked)?;
        engine.time_left(self.id)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.machine.engine.server.borrow_mut().leave(self.id);
    }
}
