//! The simulated network, and the servers behind it: delays, silence, cuts, late requests.
//!
//! Each process has a Unix socket for each server (`sockets.rs`), which adds no delay. Between
//! socket and server, bytes wait until they may arrive. All of this runs on the first thread.

mod carrier;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use nestlock_embedded::simulated::{Connection, Machine};
use tokio::sync::Notify;

pub(crate) use self::carrier::listen;
use crate::{
    clock::{MILLI, now},
    plan::{MOST_PROCESSES, Plan},
    process::as_process,
    rng::Rng,
    trace::note,
};

/// The path between a process and a server.
#[derive(Debug, Default, Clone)]
pub(crate) struct Path {
    /// What the process sends does not arrive before this time.
    pub(crate) up_silent_until: u64,
    /// What the server sends does not arrive before this time.
    pub(crate) down_silent_until: u64,
    pub(crate) slow_until: u64,
    pub(crate) slow_ms: u64,
    /// Until then, a middlebox swallows, doubles or swaps replies.
    pub(crate) strays_until: u64,
}

/// One of the servers.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) machine: Machine,
    questions: Connection,
    /// The process number under which the server has its clock.
    pub(crate) process: usize,
    pub(crate) refuses_connections_until: u64,
    pub(crate) paused_until: u64,
    pub(crate) refuses_scripts_until: u64,
}

/// How a connection ends.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cut {
    /// Bytes in flight are lost, except for a random part of the next chunk in each direction.
    Lost,
    /// Requests in flight to the server are executed, from this time on.
    Late(u64),
}

struct Wire {
    process: usize,
    server: usize,
    cut: Rc<RefCell<Option<Cut>>>,
    wake: Rc<Notify>,
    /// How many chunks of bytes are in flight to the server.
    under_way: Rc<Cell<usize>>,
}

#[derive(Default)]
pub(crate) struct Net {
    pub(crate) servers: Vec<Server>,
    /// By process, then server.
    pub(crate) paths: Vec<Vec<Path>>,
    wires: Vec<Wire>,
    rng: Option<Rng>,
    /// The least delay each way, in milliseconds.
    pub(crate) distance: u64,
    pub(crate) requests: u64,
    pub(crate) late: u64,
    /// Connections that were cut and may still deliver late requests.
    pub(crate) ending: usize,
}

thread_local! {
    static NET: RefCell<Net> = RefCell::default();
}

pub(crate) fn with<R>(act: impl FnOnce(&mut Net) -> R) -> R {
    NET.with_borrow_mut(act)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

impl Net {
    pub(crate) fn begin(&mut self, plan: &Plan) {
        let servers = plan.kind.servers();
        self.servers = (0..servers)
            .map(|at| {
                let process = MOST_PROCESSES + at;
                let machine = as_process(process, Machine::new);
                let questions = as_process(process, || machine.connect());
                Server {
                    machine,
                    questions,
                    process,
                    refuses_connections_until: 0,
                    paused_until: 0,
                    refuses_scripts_until: 0,
                }
            })
            .collect();
        self.paths = vec![vec![Path::default(); servers]; MOST_PROCESSES];
        self.rng = Some(Rng(plan.seed ^ 0x7e7));
        self.distance = plan.distance;
    }

    /// Lets servers run scripts again when their time of refusal is over.
    pub(crate) fn accept_scripts_again(&mut self) {
        for server in self
            .servers
            .iter()
            .filter(|server| server.refuses_scripts_until <= now())
        {
            server.machine.refuse(None);
        }
    }

    /// Ends all faults.
    pub(crate) fn calm(&mut self) {
        self.paths
            .iter_mut()
            .flatten()
            .for_each(|path| *path = Path::default());
        for server in &mut self.servers {
            server.machine.refuse(None);
            (server.refuses_connections_until, server.paused_until) = (0, 0);
        }
    }

    /// Returns when bytes sent now arrive, which is never before those sent earlier.
    fn arrival(&mut self, process: usize, server: usize, last: u64) -> u64 {
        let path = self.paths[process][server].clone();
        let distance = self.distance;
        let Some(rng) = &mut self.rng else {
            return now();
        };
        let mut delay = if rng.chance(50) { 0 } else { rng.between(1, 4) };
        delay += distance;
        if path.slow_until > now() {
            delay += rng.below(path.slow_ms + 1);
        }
        last.max(now() + delay * MILLI)
    }

    /// Returns the time before which faults let nothing arrive. A partition only delays, as TCP
    /// retransmits; a paused server neither reads nor writes.
    fn not_before(&self, process: usize, server: usize, way: Way) -> u64 {
        let path = &self.paths[process][server];
        let silent_until = if way == Way::Up {
            path.up_silent_until
        } else {
            path.down_silent_until
        };
        silent_until.max(self.servers[server].paused_until)
    }
}

/// Wakes all connections after a change of the faults.
pub(crate) fn changed() {
    with(|net| net.wires.iter().for_each(|wire| wire.wake.notify_one()));
}

/// Returns `true` if bytes are in flight from a process to a server.
pub(crate) fn is_busy(process: usize, server: usize) -> bool {
    let busy =
        |wire: &Wire| (wire.process, wire.server) == (process, server) && wire.under_way.get() > 0;
    with(|net| net.wires.iter().any(busy))
}

/// Ends the connections of a process to a server.
pub(crate) fn cut(process: usize, server: usize, how: Cut) {
    note("cut", &[process as u8, server as u8]);
    with(|net| {
        for wire in net
            .wires
            .extract_if(.., |wire| (wire.process, wire.server) == (process, server))
        {
            *wire.cut.borrow_mut() = Some(how);
            wire.wake.notify_one();
        }
    });
}

/// Sends a request to a server directly, under its own clock and without a network. Returns the
/// reply.
pub(crate) fn ask(server: usize, request: &str) -> String {
    with(|net| {
        let Server {
            process, questions, ..
        } = &mut net.servers[server];
        as_process(*process, || {
            questions.feed(format!("{request}\r\n").as_bytes());
            String::from_utf8_lossy(&questions.output()).into_owned()
        })
    })
}

/// Returns the number in a server's reply. Returns `None` if there is none.
pub(crate) fn number(server: usize, request: &str) -> Option<i64> {
    let reply = words(&ask(server, request)).into_iter().next()?;
    reply.trim_start_matches(':').parse().ok()
}

/// Returns the time of a server in milliseconds since 1970.
pub(crate) fn server_time(server: usize) -> u64 {
    let time = words(&ask(server, "TIME"));
    let [seconds, micros] = [0, 1].map(|part| time[part].parse::<u64>().expect("a number"));
    seconds * 1000 + micros / 1000
}

/// Returns the strings of a RESP reply.
pub(crate) fn words(answer: &str) -> Vec<String> {
    let is_word = |line: &&str| !line.is_empty() && !line.starts_with(['*', '$']);
    answer
        .split("\r\n")
        .filter(is_word)
        .map(|line| line.trim_start_matches(',').to_owned())
        .collect()
}
