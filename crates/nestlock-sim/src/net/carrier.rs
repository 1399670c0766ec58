//! Carries connections: takes what arrives in time to the server, and its replies to the process.

#[allow(
    unreachable_pub,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "the tests'"
)]
#[path = "../../../../tests/it/support/frames.rs"]
mod frames;

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    io::ErrorKind,
    rc::Rc,
    time::Duration,
};

use nestlock_embedded::simulated::Connection;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Notify,
    task::spawn_local,
};

use self::frames::frame_len;
use super::{Cut, Way, Wire, with};
use crate::{clock::now, kernel, ledger::book, process::as_process, trace::note};

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; 64 * 1024]);
}

/// Accepts the connections of a process to a server. Called before the process starts.
pub(crate) fn listen(path: &str, process: usize, server: usize) {
    let listener = UnixListener::bind(path).expect("a listener");
    spawn_local(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if with(|net| net.servers[server].refuses_connections_until > now()) {
                note("refused", &[process as u8, server as u8]);
                continue;
            }
            spawn_local(carry(stream, process, server));
        }
    });
}

/// One direction of a connection: the bytes in flight, with the times of their departure and
/// arrival.
#[derive(Default)]
struct Line {
    under_way: VecDeque<(u64, u64, Vec<u8>)>,
    last: u64,
}

impl Line {
    fn send(&mut self, process: usize, server: usize, bytes: Vec<u8>) {
        self.last = with(|net| net.arrival(process, server, self.last));
        self.under_way.push_back((now(), self.last, bytes));
    }

    /// Returns when the next bytes arrive. Returns `None` if none are in flight.
    fn next(&self, not_before: u64) -> Option<u64> {
        self.under_way
            .front()
            .map(|(_, at, _)| (*at).max(not_before))
    }

    fn take(&mut self, process: usize) -> Vec<u8> {
        let (sent, _, bytes) = self.under_way.pop_front().unwrap_or_default();
        book(|book| book.travelled(process, now() - sent));
        bytes
    }
}

/// Draws how many of these bytes arrive if the connection ends in the middle of them.
fn half(bytes: &[u8]) -> usize {
    with(|net| {
        net.rng
            .as_mut()
            .map_or(0, |rng| rng.below(bytes.len() as u64))
    }) as usize
}

struct Carrier {
    process: usize,
    server: usize,
    clock: usize,
    connection: Connection,
    up: Line,
    down: Line,
    /// A reply that is delivered after the next one.
    swapped: Vec<u8>,
}

impl Carrier {
    fn at_server<R>(&mut self, act: impl FnOnce(&mut Connection) -> R) -> R {
        as_process(self.clock, || act(&mut self.connection))
    }

    /// Lets the server process these bytes, and collects its output.
    fn serve(&mut self, what: &str, bytes: &[u8]) {
        if !bytes.is_empty() {
            note(
                what,
                &[format!("{} ", self.process).as_bytes(), bytes].concat(),
            );
            with(|net| net.requests += 1);
        }
        self.at_server(|connection| connection.feed(bytes));
        self.collect();
    }

    fn collect(&mut self) {
        let output = self.at_server(Connection::output);
        let output = if self.strays() {
            self.stray(&output)
        } else {
            output
        };
        if !output.is_empty() {
            self.down.send(self.process, self.server, output);
        }
    }

    fn strays(&self) -> bool {
        with(|net| net.paths[self.process][self.server].strays_until > now())
            || !self.swapped.is_empty()
    }

    /// Returns what a middlebox makes of these replies: it swallows, doubles or swaps one in five,
    /// but no push message.
    fn stray(&mut self, output: &[u8]) -> Vec<u8> {
        let (mut rest, mut all) = (output, Vec::new());
        while let Some(length) = frame_len(rest) {
            let (frame, behind) = rest.split_at(length);
            rest = behind;
            let lie = if frame[0] == b'>' {
                14
            } else {
                with(|net| net.rng.as_mut().map_or(14, |rng| rng.below(15)))
            };
            match lie {
                0 => note("swallowed", frame),
                1 => {
                    note("doubled", frame);
                    all.extend_from_slice(&frame.repeat(2));
                }
                2 if self.swapped.is_empty() => {
                    note("swapped", frame);
                    self.swapped = frame.to_vec();
                }
                _ => {
                    all.extend_from_slice(frame);
                    all.append(&mut self.swapped);
                }
            }
        }
        all.extend_from_slice(rest);
        all
    }

    /// Executes what a cut leaves of a connection. The process has lost `stream`.
    async fn end(mut self, how: Cut) {
        with(|net| net.ending += 1);
        match how {
            Cut::Lost => {
                let bytes = self.up.take(self.process);
                if !bytes.is_empty() {
                    self.serve("torn >", &bytes[..half(&bytes)]);
                }
            }
            Cut::Late(at) => {
                sleep_until(at).await;
                while let Some(at) = self
                    .up
                    .next(with(|net| net.servers[self.server].paused_until))
                {
                    sleep_until(at).await;
                    with(|net| net.late += 1);
                    book(|book| _ = book.late.insert(self.process, now()));
                    let bytes = self.up.take(self.process);
                    self.serve("late >", &bytes);
                }
            }
        }
        with(|net| net.ending -= 1);
    }
}

async fn sleep_until(at: u64) {
    while now() < at {
        tokio::time::sleep(Duration::from_nanos(at - now())).await;
    }
}

fn read(stream: &UnixStream) -> std::io::Result<Vec<u8>> {
    BUFFER.with_borrow_mut(|buffer| stream.try_read(buffer).map(|len| buffer[..len].to_vec()))
}

/// Carries one connection until it ends.
async fn carry(stream: UnixStream, process: usize, server: usize) {
    let (wake, cut, under_way) = (
        Rc::new(Notify::new()),
        Rc::new(RefCell::new(None)),
        Rc::new(Cell::new(0)),
    );
    let (machine, clock) = with(|net| {
        let (cut, wake, under_way) = (Rc::clone(&cut), Rc::clone(&wake), Rc::clone(&under_way));
        net.wires.push(Wire {
            process,
            server,
            cut,
            wake,
            under_way,
        });
        (
            net.servers[server].machine.clone(),
            net.servers[server].process,
        )
    });
    let connection = as_process(clock, || machine.connect());
    let output = Rc::clone(&connection.wake);
    let mut carrier = Carrier {
        process,
        server,
        clock,
        connection,
        up: Line::default(),
        down: Line::default(),
        swapped: Vec::new(),
    };
    let mut open = true;
    loop {
        let how: Option<Cut> = *cut.borrow();
        if let Some(how) = how {
            if let (Cut::Lost, Some((_, _, bytes))) = (how, carrier.down.under_way.front()) {
                let _ = stream.try_write(&bytes[..half(bytes)]);
            }
            drop(stream);
            return carrier.end(how).await;
        }
        let (up_from, down_from) =
            with(|net| [Way::Up, Way::Down].map(|way| net.not_before(process, server, way))).into();
        while carrier.up.next(up_from).is_some_and(|at| at <= now()) {
            let bytes = carrier.up.take(process);
            carrier.serve(">", &bytes);
        }
        while carrier.down.next(down_from).is_some_and(|at| at <= now()) {
            let bytes = carrier.down.take(process);
            note("<", &[format!("{process} ").as_bytes(), &bytes].concat());
            // a partial or failed write: the process is dead, or has not read for long
            open &= stream
                .try_write(&bytes)
                .is_ok_and(|written| written == bytes.len());
        }
        if !open && carrier.up.under_way.is_empty() {
            return;
        }
        under_way.set(carrier.up.under_way.len());
        let left = carrier
            .at_server(|connection| connection.time_left())
            .map(|left| as_process(clock, || kernel::after(left.as_nanos() as u64)));
        let next = [carrier.up.next(up_from), carrier.down.next(down_from), left]
            .into_iter()
            .flatten()
            .min();
        tokio::select! {
            biased;
            () = wake.notified() => {}
            () = output.notified() => {
                carrier.at_server(Connection::go_on);
                carrier.collect();
            }
            readable = stream.readable(), if open => {
                match readable.and_then(|()| read(&stream)) {
                    Ok(bytes) if !bytes.is_empty() => carrier.up.send(process, server, bytes),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    _ => open = false,
                }
            }
            () = sleep_until(next.unwrap_or_default()), if next.is_some() => carrier.collect(),
        }
    }
}
