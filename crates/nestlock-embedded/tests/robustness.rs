//! The port against everything that can arrive on a socket: random bytes, truncated requests, too much, too slowly, and
//! clients that never read. It is a separate binary because it measures the memory of the whole process.
#![cfg(target_os = "linux")]

mod support;

use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    panic,
    sync::{
        Arc, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use nestlock_embedded::EmbeddedServer;
use support::{
    grammar::Grammar,
    nonsense::{Limits, nonsense},
    resp::{Value, request},
    rng::Rng,
    wire::Wire,
};

/// Far beyond what a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest time that a reply to PING may take while the machine is busy with the attack itself.
const PROMPT: Duration = Duration::from_secs(4);
/// How much more memory the process may use after an attack than before it.
const SLACK: usize = 32 << 20;

const ON_PURPOSE: &str = "on purpose";

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Runs one test at a time, so that the memory is that of one, and counts the panics of all threads.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, SeqCst);
            if info.payload().downcast_ref() != Some(&ON_PURPOSE) {
                usual(info);
            }
        }));
    });
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    PANICS.store(0, SeqCst);
    guard
}

/// The memory of this process that is in RAM, in bytes.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").expect("Linux");
    pages
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<usize>().ok())
        .expect("a number")
        * 4096
}

fn connect(addr: SocketAddr) -> Wire {
    Wire::connect(addr).expect("a connection")
}

fn until(what: &str, mut state: impl FnMut() -> bool) {
    let start = Instant::now();
    while !state() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in time");
        thread::sleep(Duration::from_millis(1));
    }
}

fn clients(wire: &mut Wire) -> usize {
    let list = wire.call(&["CLIENT", "LIST"]).expect("a reply");
    list.text()
        .expect("a text")
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .count()
}

// --- the attack ---

#[derive(Debug)]
struct Attacker {
    addr: SocketAddr,
    rng: Rng,
    lines: Vec<Option<TcpStream>>,
    /// Connections opened.
    opened: usize,
    /// Connections that the server closed.
    closed: usize,
    /// Strings that did not fit into a socket.
    skipped: usize,
}

impl Attacker {
    fn new(addr: SocketAddr, seed: u64, lines: usize) -> Self {
        Self {
            addr,
            rng: Rng::new(seed),
            lines: (0..lines).map(|_| None).collect(),
            opened: 0,
            closed: 0,
            skipped: 0,
        }
    }

    fn open(addr: SocketAddr) -> TcpStream {
        let start = Instant::now();
        loop {
            // the backlog of connections not yet accepted may be full
            match TcpStream::connect_timeout(&addr, PATIENCE) {
                Ok(stream) => {
                    stream.set_nonblocking(true).expect("a socket");
                    return stream;
                }
                Err(error) => assert!(start.elapsed() < PATIENCE, "no connection: {error}"),
            }
        }
    }

    /// Writes bytes to one of the connections, and reads what has arrived.
    fn strike(&mut self, bytes: &[u8]) {
        let at = self.rng.below(self.lines.len());
        let line = self.lines[at].get_or_insert_with(|| {
            self.opened += 1;
            Self::open(self.addr)
        });
        let mut left = bytes;
        let mut ended = loop {
            match line.write(left) {
                Ok(count) if count < left.len() => left = &left[count..],
                Ok(_) => break false,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.skipped += 1;
                    break false;
                }
                Err(_) => break true,
            }
        };
        if self.rng.percent(50) {
            let mut answer = [0; 16384];
            ended |= loop {
                match line.read(&mut answer) {
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(error) => break error.kind() != ErrorKind::WouldBlock,
                }
            };
        }
        self.closed += usize::from(ended);
        // close some in the middle of a request: otherwise an announced length would swallow all further bytes
        if ended || self.rng.percent(3) {
            self.lines[at] = None;
        } else if self.rng.percent(2) {
            self.finish(at);
        }
    }

    /// Closes this side, and waits until the server has read everything and closes its side.
    fn finish(&mut self, at: usize) {
        let Some(mut line) = self.lines[at].take() else {
            return;
        };
        line.set_nonblocking(false).expect("a socket");
        line.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let _ = line.shutdown(Shutdown::Write);
        let mut answer = [0; 16384];
        loop {
            match line.read(&mut answer) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the server does not close the connection: {error}"),
            }
        }
    }
}

#[derive(Debug)]
struct Outcome {
    strings: usize,
    opened: usize,
    closed: usize,
    skipped: usize,
    pings: usize,
    slowest: Duration,
    took: Duration,
    grown: usize,
    left: usize,
    panics: usize,
}

impl Outcome {
    fn judge(&self) -> Result<(), String> {
        let fine = |good: bool, what: &str| {
            if good {
                Ok(())
            } else {
                Err(format!("{what}: {self:?}"))
            }
        };
        fine(self.panics == 0, "a thread has panicked")?;
        fine(self.slowest < PROMPT, "PING got no prompt reply")?;
        fine(self.left == 1, "connections are left")?;
        fine(self.grown < SLACK, "memory has grown")
    }
}

/// Sends this many strings over many connections, while another client is served.
fn attack(addr: SocketAddr, strings: usize, patience: Duration) -> Outcome {
    const THREADS: usize = 2;
    let stop = AtomicBool::new(false);
    let (mut opened, mut closed, mut skipped) = (0, 0, 0);
    let begun = Instant::now();
    let before = resident();
    let (pings, slowest) = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let (mut wire, mut pings, mut slowest) = (connect(addr), 0, Duration::ZERO);
            while !stop.load(SeqCst) {
                let start = Instant::now();
                assert_eq!(
                    wire.call(&["PING"]).expect("a reply"),
                    Value::Simple(b"PONG".to_vec())
                );
                slowest = slowest.max(start.elapsed());
                pings += 1;
                if pings % 200 == 0 {
                    // keys and scripts that were valid by chance are not a leak
                    wire.call(&["FLUSHALL"]).expect("a reply");
                    wire.call(&["SCRIPT", "FLUSH"]).expect("a reply");
                }
                thread::sleep(Duration::from_millis(5));
            }
            (pings, slowest)
        });
        let attackers: Vec<_> = (0..THREADS as u64)
            .map(|seed| {
                scope.spawn(move || {
                    let (mut attacker, mut rng) =
                        (Attacker::new(addr, seed, 60), Rng::new(seed + 100));
                    let mut grammar = Grammar::new(seed);
                    for number in 0..strings / THREADS {
                        if number % 1000 == 0 {
                            grammar = Grammar::new(rng.next());
                        }
                        attacker.strike(&nonsense(&mut rng, &mut grammar, Limits::Any));
                    }
                    (0..attacker.lines.len()).for_each(|at| attacker.finish(at));
                    (attacker.opened, attacker.closed, attacker.skipped)
                })
            })
            .collect();
        for attacker in attackers {
            let counts = attacker.join().expect("no panic");
            (opened, closed, skipped) = (opened + counts.0, closed + counts.1, skipped + counts.2);
        }
        stop.store(true, SeqCst);
        watch.join().expect("no panic")
    });
    let took = begun.elapsed();
    let mut wire = connect(addr);
    let start = Instant::now();
    let mut left = clients(&mut wire);
    while left > 1 && start.elapsed() < patience {
        thread::sleep(Duration::from_millis(5));
        left = clients(&mut wire);
    }
    wire.call(&["FLUSHALL"]).expect("a reply");
    wire.call(&["SCRIPT", "FLUSH"]).expect("a reply");
    let grown = resident().saturating_sub(before);
    Outcome {
        strings,
        opened,
        closed,
        skipped,
        pings,
        slowest,
        took,
        grown,
        left,
        panics: PANICS.load(SeqCst),
    }
}

#[test]
fn a_million_strings_of_nonsense_leave_the_server_as_it_was() {
    let _alone = alone();
    let server = EmbeddedServer::start().expect("a server");
    // warm up: some memory is allocated once and kept
    attack(server.addr(), 20_000, PATIENCE);
    let outcome = attack(server.addr(), 1_000_000, PATIENCE);
    let Outcome {
        strings,
        took,
        pings,
        slowest,
        ..
    } = outcome;
    println!(
        "{strings} strings in {took:?}, {pings} PINGs, the slowest in {slowest:?}: {outcome:?}"
    );
    outcome.judge().unwrap_or_else(|error| panic!("{error}"));
    assert!(outcome.skipped < 1000, "{outcome:?}");
    // a race decides how many: bytes written before the close is noticed go to a closed connection
    assert!(
        outcome.closed > 10_000 && outcome.opened > outcome.closed,
        "the attack was tame: {outcome:?}"
    );
    let mut wire = connect(server.addr());
    assert_eq!(
        wire.call(&["SET", "still", "works"]).expect("a reply"),
        Value::Simple(b"OK".to_vec())
    );
    assert_eq!(
        wire.call(&["EVAL", "return 1", "0"]).expect("a reply"),
        Value::Int(1)
    );
}

/// The attack hits this about once in several hundred million strings.
#[test]
fn fields_that_are_asked_for_without_end_take_no_memory() {
    let server = EmbeddedServer::start().expect("a server");
    let mut wire = connect(server.addr());
    wire.call(&["HSET", "hash", "field", "value"])
        .expect("a reply");
    for (count, more) in [
        ("-9223372036854775807", None),
        ("-4611686018427387903", Some("WITHVALUES")),
        ("-1000001", None),
    ] {
        let words: Vec<&str> = ["HRANDFIELD", "hash", count]
            .into_iter()
            .chain(more)
            .collect();
        let answer = wire.call(&words).expect("a reply");
        assert!(matches!(answer, Value::Error(_)), "{count}: {answer:?}");
    }
    let Value::List(fields) = wire.call(&["HRANDFIELD", "hash", "-3"]).expect("a reply") else {
        panic!("no list")
    };
    assert_eq!(fields.len(), 3);
}

// --- the attack notices faults ---

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    Leak,
    Stall,
    Panic,
    Keep,
}

/// A minimal server with one fault.
fn faulty(fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let addr = listener.local_addr().expect("an address");
    let (open, leaked, lock) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(Mutex::new(vec![])),
        Arc::new(Mutex::new(false)),
    );
    let serve = move |mut stream: TcpStream| {
        let (open, leaked, lock) = (Arc::clone(&open), Arc::clone(&leaked), Arc::clone(&lock));
        thread::spawn(move || {
            open.fetch_add(1, SeqCst);
            let mut chunk = [0; 16384];
            while let Ok(count @ 1..) = stream.read(&mut chunk) {
                let said = &chunk[..count];
                let has = |words: &[u8]| said.windows(words.len()).any(|window| window == words);
                match fault {
                    Fault::Leak => leaked.lock().expect("a lock").push(vec![1_u8; 20_000]),
                    Fault::Panic if said.starts_with(b"\xff\xff") || said.ends_with(b"\xfe") => {
                        panic::panic_any(ON_PURPOSE)
                    }
                    Fault::Stall if said.ends_with(b"\xfe") => {
                        let mut once = lock.lock().expect("a lock");
                        if !*once {
                            *once = true;
                            thread::sleep(PROMPT + PROMPT / 2);
                        }
                    }
                    // wait behind the connection that stalls
                    _ => drop(lock.lock()),
                }
                let answer = match () {
                    () if has(b"PING") => b"+PONG\r\n".to_vec(),
                    () if has(b"LIST") => {
                        let lines = "id=1\n".repeat(open.load(SeqCst));
                        format!("${}\r\n{lines}\r\n", lines.len()).into_bytes()
                    }
                    () => b"+OK\r\n".to_vec(),
                };
                if stream.write_all(&answer).is_err() {
                    break;
                }
            }
            if fault != Fault::Keep {
                open.fetch_sub(1, SeqCst);
            }
        });
    };
    thread::spawn(move || listener.incoming().map_while(Result::ok).for_each(serve));
    addr
}

/// A server that leaks memory, stalls, panics or forgets to close connections is noticed.
#[test]
fn a_server_that_leaks_stalls_panics_or_never_closes_is_caught() {
    let _alone = alone();
    let judge = |fault| attack(faulty(fault), 10_000, Duration::from_secs(8)).judge();
    assert_eq!(judge(Fault::None), Ok(()));
    for (fault, what) in [
        (Fault::Leak, "memory has grown"),
        (Fault::Stall, "no prompt reply"),
        (Fault::Panic, "has panicked"),
        (Fault::Keep, "connections are left"),
    ] {
        let verdict = judge(fault).expect_err("a verdict");
        assert!(verdict.contains(what), "{fault:?}: {verdict}");
        PANICS.store(0, SeqCst);
    }
}

// --- slow and silent clients ---

/// Clients that send nothing, or one byte at a time, hold up no other client.
#[test]
fn silent_and_byte_by_byte_clients_hold_up_no_other_client() {
    let _alone = alone();
    let server = EmbeddedServer::start().expect("a server");
    let addr = server.addr();
    let silent: Vec<TcpStream> = (0..500)
        .map(|_| TcpStream::connect(addr).expect("a connection"))
        .collect();
    let mut control = connect(addr);
    until("all connections", || clients(&mut control) == 501);

    let bytes = request(&["SET", "slowly", "written"]);
    let done = AtomicBool::new(false);
    let slowest = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut slowest = Duration::ZERO;
            while !done.load(SeqCst) {
                let start = Instant::now();
                assert_eq!(
                    control.call(&["PING"]).expect("a reply"),
                    Value::Simple(b"PONG".to_vec())
                );
                slowest = slowest.max(start.elapsed());
            }
            slowest
        });
        // 100 at once, one byte at a time
        let mut slow: Vec<Wire> = (0..100).map(|_| connect(addr)).collect();
        for byte in &bytes {
            for wire in &mut slow {
                wire.write(&[*byte]).expect("a connection");
            }
        }
        for wire in &mut slow {
            assert_eq!(wire.read().expect("a reply"), Value::Simple(b"OK".to_vec()));
        }
        // a client that stops in the middle
        slow[0]
            .write(&bytes[..bytes.len() - 3])
            .expect("a connection");
        assert_eq!(
            slow[1].call(&["GET", "slowly"]).expect("a reply"),
            Value::Bulk(b"written".to_vec())
        );
        done.store(true, SeqCst);
        watch.join().expect("no panic")
    });
    assert!(slowest < PROMPT, "{slowest:?}");
    drop(silent);
    until("their end", || clients(&mut control) == 1);
    assert_eq!(PANICS.load(SeqCst), 0);
}

/// An announced length costs no memory until the bytes arrive.
#[test]
fn lengths_that_are_announced_and_never_come_take_no_memory() {
    let _alone = alone();
    let server = EmbeddedServer::start().expect("a server");
    let before = resident();
    let announced: Vec<Wire> = (0..400)
        .map(|number| {
            let mut wire = connect(server.addr());
            let bytes: &[u8] = if number % 2 == 0 {
                b"*2\r\n$3\r\nGET\r\n$60000000\r\nabc"
            } else {
                b"*1048576\r\n$1\r\na\r\n"
            };
            wire.write(bytes).expect("a connection");
            wire
        })
        .collect();
    let mut control = connect(server.addr());
    until("all connections", || clients(&mut control) == 401);
    let grown = resident().saturating_sub(before);
    assert!(grown < SLACK, "{grown} bytes for announced lengths");
    drop(announced);
    until("their end", || clients(&mut control) == 1);
}

// --- clients that never read ---

/// Messages for it are kept up to 32 MiB, as in Redis; then the connection is closed.
#[test]
fn a_subscriber_that_never_reads_is_cut_and_others_lose_nothing() {
    for protocol in ["2", "3"] {
        let _alone = alone();
        let server = EmbeddedServer::start().expect("a server");
        let mut deaf = connect(server.addr());
        deaf.call(&["HELLO", protocol]).expect("a reply");
        deaf.call(&["SUBSCRIBE", "c"]).expect("a reply");
        let mut control = connect(server.addr());
        assert_eq!(clients(&mut control), 2);
        let message = vec![b'm'; 1 << 20];
        let before = resident();
        let (mut peak, mut sent) = (0, 0);
        while clients(&mut control) == 2 {
            let heard = control
                .call(&[&b"PUBLISH"[..], b"c", &message])
                .expect("a reply");
            sent += 1;
            // a client that sends without a pause keeps the server's thread for up to 128 polls; only then can the other connection end
            thread::sleep(Duration::from_millis(1));
            peak = peak.max(resident().saturating_sub(before));
            assert!(
                sent < 200,
                "it was never disconnected, the last message went to {heard:?}"
            );
        }
        // the sockets buffer some megabytes as well
        assert!((32..=48).contains(&sent), "disconnected after {sent} MiB");
        assert!(
            peak < (32 << 20) + 2 * SLACK,
            "{peak} bytes were kept for it"
        );
        // what was written can still be read, then the connection ends
        let end = loop {
            match deaf.read() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(
            matches!(
                end.kind(),
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset
            ),
            "{end}"
        );
        assert_eq!(
            control.call(&["PUBLISH", "c", "x"]).expect("a reply"),
            Value::Int(0)
        );
        assert_eq!(PANICS.load(SeqCst), 0);
    }
}

/// The server stops reading from a client that sends requests but reads no reply. No reply is lost when it reads at last.
#[test]
fn a_client_that_reads_late_costs_little_and_gets_every_reply() {
    let _alone = alone();
    let server = EmbeddedServer::start().expect("a server");
    let (mut control, mut deaf) = (connect(server.addr()), connect(server.addr()));
    control
        .call(&[&b"SET"[..], b"big", &vec![b'v'; 1 << 20]])
        .expect("a reply");
    let before = resident();
    // 300 MiB of replies
    let asked = 300;
    deaf.write(&request(&["GET", "big"]).repeat(asked))
        .expect("a connection");
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        assert_eq!(
            control.call(&["PING"]).expect("a reply"),
            Value::Simple(b"PONG".to_vec())
        );
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < SLACK, "{grown} bytes are kept for it");
    for _ in 0..asked {
        let answer: io::Result<Value> = deaf.read();
        assert_eq!(
            answer.expect("a reply").text().map(<[u8]>::len),
            Some(1 << 20)
        );
    }
}
