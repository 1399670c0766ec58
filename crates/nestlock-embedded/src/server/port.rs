//! The server's TCP port: accepts connections, reads requests and writes replies.

use std::{io::ErrorKind, rc::Rc, time::Duration};

use tokio::net::{TcpListener, TcpStream};

use super::{
    client::{Client, Fate},
    engine::Engine,
    resp::{MAX_REQUEST, Parser},
};

/// The amount of unread output, in bytes, at which a client's requests are no longer read or
/// executed.
const ENOUGH_OUTPUT: usize = 1024 * 1024;
/// How many requests of a client run before other clients get a turn.
const TURN: usize = 64;

/// Accepts connections and serves each of them in a task. Never returns.
pub(crate) async fn serve(engine: Rc<Engine>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::task::spawn_local(TcpConnection::run(Rc::clone(&engine), stream));
            }
            // most likely out of file descriptors: other connections may close soon
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

struct TcpConnection {
    engine: Rc<Engine>,
    id: u64,
    stream: TcpStream,
    parser: Parser,
}

impl Drop for TcpConnection {
    fn drop(&mut self) {
        self.engine.server.borrow_mut().leave(self.id);
    }
}

impl TcpConnection {
    async fn run(engine: Rc<Engine>, stream: TcpStream) {
        let (Ok(peer), Ok(local)) = (stream.peer_addr(), stream.local_addr()) else {
            return;
        };
        let _ = stream.set_nodelay(true);
        let id = engine.server.borrow_mut().enter(peer, local);
        let mut connection = Self {
            engine,
            id,
            stream,
            parser: Parser::default(),
        };
        // an error here means that the connection is lost, so it cannot be reported
        let _ = connection.serve().await;
    }

    async fn serve(&mut self) -> std::io::Result<()> {
        let Some(wake) = self
            .engine
            .with_client(self.id, |client| Rc::clone(&client.wake))
        else {
            return Ok(());
        };
        // a request that has been read, but that CLIENT PAUSE holds up
        let mut held = None;
        loop {
            let mut timer = self.execute_waiting(&mut held);
            let full = |client: &mut Client| client.output.len() >= ENOUGH_OUTPUT;
            let was_full = self.engine.with_client(self.id, full) == Some(true);
            self.write()?;
            let (fate, unwritten, blocked) = self
                .engine
                .with_client(self.id, |client| {
                    (client.fate, client.output.len(), client.blocked.is_some())
                })
                .unwrap_or((Fate::Ended, 0, false));
            if fate == Fate::Ended || fate == Fate::Ending && unwritten == 0 {
                return Ok(());
            }
            // requests were put off because the output was full, and no event would wake this task
            // for them
            if was_full && unwritten < ENOUGH_OUTPUT {
                continue;
            }
            if blocked {
                timer = self.engine.time_left(self.id);
                if timer.is_none()
                    && self
                        .engine
                        .with_client(self.id, |client| client.blocked.is_none())
                        == Some(true)
                {
                    continue;
                }
            }
            // bounds the unparsed input: a waiting client may send 1 MiB ahead, any other its
            // largest request
            let ahead = if blocked || held.is_some() {
                ENOUGH_OUTPUT
            } else {
                MAX_REQUEST + ENOUGH_OUTPUT
            };
            let reads =
                fate == Fate::Open && unwritten < ENOUGH_OUTPUT && self.parser.waiting() < ahead;
            tokio::select! {
                biased;
                () = wake.notified() => {}
                writable = self.stream.writable(), if unwritten > 0 => writable?,
                readable = self.stream.readable(), if reads => {
                    readable?;
                    if !self.read()? {
                        return Ok(());
                    }
                }
                () = sleep(timer), if timer.is_some() => {}
            }
        }
    }

    /// Executes the requests that have arrived, at most [`TURN`]. Returns how long to wait before
    /// the next call if no event triggers it earlier, or `None` if only an event can.
    fn execute_waiting(&mut self, held: &mut Option<Vec<Vec<u8>>>) -> Option<Duration> {
        for _ in 0..TURN {
            let goes_on = self.engine.with_client(self.id, |client| {
                client.fate == Fate::Open
                    && client.blocked.is_none()
                    && client.output.len() < ENOUGH_OUTPUT
            });
            if goes_on != Some(true) {
                return None;
            }
            let request = match held
                .take()
                .map_or_else(|| self.parser.next(), |request| Ok(Some(request)))
            {
                Ok(Some(request)) => request,
                Ok(None) => return None,
                Err(text) => {
                    self.engine.give_up(self.id, &text);
                    return None;
                }
            };
            if let Some(left) = self.engine.held_up(&request) {
                *held = Some(request);
                return Some(left);
            }
            self.engine.execute(self.id, &request);
        }
        Some(Duration::ZERO)
    }

    /// Reads from the socket. Returns `false` if the client has closed the connection.
    fn read(&mut self) -> std::io::Result<bool> {
        let mut buffer = [0; 16 * 1024];
        match self.stream.try_read(&mut buffer) {
            Ok(0) => Ok(false),
            Ok(len) => {
                self.parser.feed(&buffer[..len]);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Writes as much of the output as the socket accepts.
    fn write(&mut self) -> std::io::Result<()> {
        let mut output = self
            .engine
            .with_client(self.id, |client| std::mem::take(&mut client.output))
            .unwrap_or_default();
        let mut written = 0;
        let result = loop {
            if written == output.len() {
                break Ok(());
            }
            match self.stream.try_write(&output[written..]) {
                Ok(len) => written += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        output.drain(..written);
        if output.capacity() > ENOUGH_OUTPUT && output.is_empty() {
            output = Vec::new();
        }
        // no other task ran since the output was taken, so this overwrites nothing
        self.engine
            .with_client(self.id, |client| client.output = output);
        result
    }
}

async fn sleep(timer: Option<Duration>) {
    match timer {
        Some(Duration::ZERO) => tokio::task::yield_now().await,
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}
