//! A TCP proxy between a client and a server, which injects faults.
//!
//! A *rule* decides the fate of each request and its reply: see [`Action`]. Switches act on the
//! connections as a whole: [`Proxy::cut`], [`Proxy::black_hole`], [`Proxy::refuse`],
//! [`Proxy::drop_messages`].
//!
//! TCP delivers the bytes of a connection in order: a late reply delays those behind it, and after
//! a lost reply the connection ends or stays silent. A faulty middlebox can do more: it swallows,
//! duplicates or swaps a reply, and keeps the connection open. Requests sent into a black hole
//! arrive after it has ended, as with TCP retransmission, unless the connection was cut.

use std::{
    collections::{HashMap, VecDeque},
    future::pending,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    Server,
    frames::{frame_len, line},
    scripts,
};

/// The fate of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Pass,
    /// Executed; the reply arrives this long after the request, and delays those behind it.
    Late(Duration),
    /// Executed; the reply waits for [`Proxy::let_go`], and so do those behind it.
    Held,
    /// Reaches the server this long after it was sent, and so do those behind it.
    Slow(Duration),
    /// Executed; then the connection is cut instead of a reply.
    Lose,
    /// Executed; neither the reply nor anything behind it arrives, but the connection stays open.
    Mute,
    /// Never executed: the connection is cut before the request is forwarded.
    CutBefore,
    /// The connection is cut at once. The server executes the request this much later.
    Ghost(Duration),
    /// Executed twice in a row; the client gets the first reply.
    Twice,
    /// Never executed; the reply is this error.
    Refuse(&'static str),
    /// Executed; half of the reply arrives, then the connection is cut.
    #[allow(dead_code, reason = "nestlock-soak's")]
    Truncate,
    /// Executed; the reply never arrives, but those behind it do.
    Swallow,
    /// Executed; the reply arrives twice.
    Double,
    /// Executed; the reply arrives behind the next one.
    Swap,
    /// Executed; the reply arrives byte by byte, with this pause after each.
    #[allow(dead_code, reason = "nestlock-soak's")]
    Drip(Duration),
}

/// The kinds of scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Acquire,
    Release,
    Renew,
    Inspect,
    ForceRelease,
    Transfer,
    /// Reads or changes a number of permits, or the count of a latch.
    Count,
    /// Writes, reads or erases a holder's note.
    Note,
    /// Acquires and releases in one request: see [`Request::parts`].
    Bundle,
}

/// Returns the verb of each script, by its source and by its digest.
fn script_verbs() -> &'static HashMap<String, Verb> {
    static VERBS: OnceLock<HashMap<String, Verb>> = OnceLock::new();
    VERBS.get_or_init(|| {
        let mut verbs = HashMap::new();
        for script in scripts::names() {
            let verb = script.rsplit('/').next().expect("<kind>/<verb>");
            let verb = match verb
                .trim_start_matches("read_")
                .trim_start_matches("write_")
            {
                name if name.starts_with("acquire") => Verb::Acquire,
                name if name.starts_with("release") => Verb::Release,
                name if name.starts_with("renew") => Verb::Renew,
                name if name.starts_with("inspect") => Verb::Inspect,
                name if name.starts_with("force_release") => Verb::ForceRelease,
                name if name.starts_with("transfer") => Verb::Transfer,
                "available" | "set_total" | "try_set" | "add" | "drain" | "forget" | "count"
                | "count_down" => Verb::Count,
                "write" | "read" | "erase" => Verb::Note,
                _ => continue,
            };
            let source = scripts::sent(&script);
            verbs.insert(sha1_smol::Sha1::from(&source).digest().to_string(), verb);
            verbs.insert(source, verb);
        }
        verbs
    })
}

/// A command as the client sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    parts: Vec<String>,
}

impl Request {
    pub fn is(&self, command: &str) -> bool {
        self.parts[0].eq_ignore_ascii_case(command)
    }

    /// Returns the number of words, including the command.
    pub fn words(&self) -> usize {
        self.parts.len()
    }

    /// Returns whether it runs a script, by digest or by text.
    pub fn is_script(&self) -> bool {
        self.is("EVALSHA") || self.is("EVAL")
    }

    pub fn verb(&self) -> Option<Verb> {
        if !self.is_script() {
            return None;
        }
        script_verbs().get(&self.parts[1]).copied().or_else(|| {
            let of_bundle = self.key_count() > 1 && self.args().len() == 4 * self.key_count();
            of_bundle.then_some(Verb::Bundle)
        })
    }

    /// Returns the verb, the first key and the arguments of each script in a bundle, or of the
    /// script itself.
    pub fn parts(&self) -> Vec<(Verb, &str, &[String])> {
        match self.verb() {
            None => Vec::new(),
            Some(Verb::Bundle) => {
                let verb = |args: &[String]| {
                    if args[0] == "1" {
                        Verb::Acquire
                    } else {
                        Verb::Release
                    }
                };
                let parts = self.keys().iter().zip(self.args().chunks(4));
                parts
                    .map(|(key, args)| (verb(args), key.as_str(), &args[1..]))
                    .collect()
            }
            Some(verb) => vec![(verb, self.keys()[0].as_str(), self.args())],
        }
    }

    pub fn keys(&self) -> &[String] {
        &self.parts[3..3 + self.key_count()]
    }

    /// Returns the arguments of a script, without the request number at their end.
    pub fn args(&self) -> &[String] {
        &self.parts[3 + self.key_count()..self.parts.len() - 1]
    }

    fn key_count(&self) -> usize {
        self.parts[2].parse().expect("the number of keys")
    }
}

/// The direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToServer,
    ToClient,
    Both,
}

type Rule = Box<dyn FnMut(&Request) -> Action + Send>;

#[derive(Debug, Clone, Copy, Default)]
struct Switches {
    hole_to_server: bool,
    hole_to_client: bool,
    refuse: bool,
    drop_messages: bool,
    lets_go: bool,
    /// The number of first connections that carry pushes but no replies.
    only_push: usize,
    cuts: u64,
}

struct Shared {
    server: Mutex<SocketAddr>,
    rule: Mutex<Rule>,
    switches: watch::Sender<Switches>,
    log: Mutex<Vec<Request>>,
    ghosts: AtomicUsize,
    connections: AtomicUsize,
}

/// A proxy on its own port, which ends on drop.
pub struct Proxy {
    addr: SocketAddr,
    shared: Arc<Shared>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Returns whether the tests run over fred's client, which sends no bundles.
pub fn is_over_fred() -> bool {
    std::env::var("NESTLOCK_TEST_WIRE").is_ok_and(|wire| wire == "fred")
}

/// Adds the wire to the URL that `NESTLOCK_TEST_WIRE` names: `own`, the default, or `fred`.
pub fn with_wire(url: String) -> String {
    match std::env::var("NESTLOCK_TEST_WIRE") {
        Ok(wire) => format!("{url}?wire={wire}"),
        Err(_) => url,
    }
}

impl Proxy {
    pub fn start(server: &Server) -> Self {
        Self::to(server.addr())
    }

    pub fn to(server: SocketAddr) -> Self {
        let shared = Arc::new(Shared {
            server: Mutex::new(server),
            rule: Mutex::new(Box::new(|_| Action::Pass)),
            switches: watch::Sender::new(Switches::default()),
            log: Mutex::new(Vec::new()),
            ghosts: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
        });
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.set_nonblocking(true).expect("a listener");
        let addr = listener.local_addr().expect("its address");
        let (end, ended) = oneshot::channel::<()>();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let accepting = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = ended => {}
                    () = accept(accepting, listener) => {}
                }
            });
        });
        Self {
            addr,
            shared,
            end: Some(end),
            thread: Some(thread),
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn url(&self) -> String {
        with_wire(format!("redis://{}", self.addr))
    }

    /// Sets the rule for all later requests. `rule` must not call the proxy.
    pub fn rule(&self, rule: impl FnMut(&Request) -> Action + Send + 'static) {
        *self.shared.rule.lock().unwrap() = Box::new(rule);
    }

    /// Lets all later requests pass.
    pub fn pass(&self) {
        self.rule(|_| Action::Pass);
    }

    /// Applies `action` to the next request of this kind; all others pass.
    pub fn once(&self, verb: Verb, action: Action) {
        self.nth(1, verb, action);
    }

    /// Applies `action` to the n-th request of this kind from now; all others pass.
    pub fn nth(&self, n: usize, verb: Verb, action: Action) {
        let mut left = n;
        self.rule(move |request| {
            left = left.saturating_sub(usize::from(left > 0 && request.verb() == Some(verb)));
            if left == 0 && request.verb() == Some(verb) {
                left = usize::MAX;
                return action;
            }
            Action::Pass
        });
    }

    /// Applies `action` to every request of this kind; all others pass.
    pub fn each(&self, verb: Verb, action: Action) {
        self.rule(move |request| {
            if request.verb() == Some(verb) {
                action
            } else {
                Action::Pass
            }
        });
    }

    /// Forwards new connections to this server; existing ones stay as they are.
    pub fn lead_to(&self, server: &Server) {
        *self.shared.server.lock().unwrap() = server.addr();
    }

    /// Cuts all connections.
    pub fn cut(&self) {
        self.shared
            .switches
            .send_modify(|switches| switches.cuts += 1);
    }

    /// Stops all bytes in this direction; connections stay open.
    pub fn black_hole(&self, way: Way) {
        self.shared.switches.send_modify(|switches| {
            switches.hole_to_server |= way != Way::ToClient;
            switches.hole_to_client |= way != Way::ToServer;
        });
    }

    /// Closes new connections at once.
    pub fn refuse(&self) {
        self.shared
            .switches
            .send_modify(|switches| switches.refuse = true);
    }

    /// Sets whether pub/sub messages are dropped.
    pub fn drop_messages(&self, drop: bool) {
        self.shared
            .switches
            .send_modify(|switches| switches.drop_messages = drop);
    }

    /// Delivers the held replies, and holds no others from now on.
    pub fn let_go(&self) {
        self.shared
            .switches
            .send_modify(|switches| switches.lets_go = true);
    }

    /// Replaces every reply on the current connections by a push.
    pub fn only_push(&self) {
        let there_are = self.connections();
        self.shared
            .switches
            .send_modify(|switches| switches.only_push = there_are);
    }

    /// Ends black holes, refusals and the rule.
    pub fn heal(&self) {
        self.pass();
        self.shared.switches.send_modify(|switches| {
            *switches = Switches {
                cuts: switches.cuts,
                ..Switches::default()
            }
        });
    }

    /// Forgets all requests so far, which saves memory in runs of hours.
    #[allow(dead_code, reason = "nestlock-soak's")]
    pub fn forget_requests(&self) {
        self.shared.log.lock().unwrap().clear();
    }

    /// Returns all requests so far, as the client sent them.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.log.lock().unwrap().clone()
    }

    /// Returns the requests of one kind so far.
    pub fn seen(&self, verb: Verb) -> Vec<Request> {
        self.requests()
            .into_iter()
            .filter(|request| request.verb() == Some(verb))
            .collect()
    }

    /// Returns the number of requests of one kind so far.
    pub fn count(&self, verb: Verb) -> usize {
        self.shared
            .log
            .lock()
            .unwrap()
            .iter()
            .filter(|request| request.verb() == Some(verb))
            .count()
    }

    /// Returns how many [`Action::Ghost`] requests the server has executed.
    pub fn ghosts(&self) -> usize {
        self.shared.ghosts.load(Ordering::SeqCst)
    }

    /// Returns the number of accepted connections.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().expect("a thread").join();
    }
}

async fn accept(shared: Arc<Shared>, listener: std::net::TcpListener) {
    let listener = TcpListener::from_std(listener).expect("a listener");
    while let Ok((client, _)) = listener.accept().await {
        let number = shared.connections.fetch_add(1, Ordering::SeqCst);
        if !shared.switches.borrow().refuse {
            tokio::spawn(serve(Arc::clone(&shared), client, number));
        }
    }
}

/// The fate of a reply.
enum Fate {
    Pass,
    At(Instant),
    Held,
    Replace(&'static str),
    Drop,
    Double,
    Swap,
    Mute,
    Cut,
    Truncate,
    Drip(Duration),
}

async fn serve(shared: Arc<Shared>, client: TcpStream, number: usize) {
    let mut switches = shared.switches.subscribe();
    let cuts = switches.borrow_and_update().cuts;
    let server = *shared.server.lock().unwrap();
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (client_in, client_out) = client.into_split();
    let (mut server_in, mut server_out) = server.into_split();
    let fates = Mutex::new(VecDeque::new());
    let ghost = tokio::select! {
        ghost = requests(&shared, &fates, client_in, &mut server_out) => ghost.unwrap_or(None),
        _ = replies(&shared, &fates, &mut server_in, client_out, number) => None,
        _ = switches.wait_for(|now| now.cuts != cuts) => None,
    };
    // the client's socket is closed by now
    if let Some((delay, frame)) = ghost {
        let mut rest = Vec::new();
        sleep(delay).await;
        if server_out.write_all(&frame).await.is_ok() && server_out.shutdown().await.is_ok() {
            let _ = timeout(Duration::from_secs(20), server_in.read_to_end(&mut rest)).await;
        }
        shared.ghosts.fetch_add(1, Ordering::SeqCst);
    }
}

type GhostFrame = (Duration, Vec<u8>);

async fn requests(
    shared: &Shared,
    fates: &Mutex<VecDeque<Fate>>,
    mut client: OwnedReadHalf,
    server: &mut OwnedWriteHalf,
) -> io::Result<Option<GhostFrame>> {
    let mut switches = shared.switches.subscribe();
    let mut bytes = Vec::new();
    loop {
        while let Some(len) = frame_len(&bytes) {
            let frame: Vec<u8> = bytes.drain(..len).collect();
            let arrived = Instant::now();
            let _ = switches.wait_for(|now| !now.hole_to_server).await;
            let request = Request {
                parts: parts(&frame),
            };
            let action = shared.rule.lock().unwrap()(&request);
            // its reply is a push, which takes no place among the replies
            let answered = !request.is("SUBSCRIBE") && !request.is("UNSUBSCRIBE");
            shared.log.lock().unwrap().push(request);
            let mut fate = Fate::Pass;
            match action {
                Action::Pass | Action::Twice => {}
                Action::Late(delay) => fate = Fate::At(arrived + delay),
                Action::Held => fate = Fate::Held,
                Action::Slow(delay) => sleep_until(arrived + delay).await,
                Action::Lose => fate = Fate::Cut,
                Action::Mute => fate = Fate::Mute,
                Action::Truncate => fate = Fate::Truncate,
                Action::Drip(pause) => fate = Fate::Drip(pause),
                Action::Swallow => fate = Fate::Drop,
                Action::Double => fate = Fate::Double,
                Action::Swap => fate = Fate::Swap,
                Action::CutBefore => return Ok(None),
                Action::Ghost(delay) => return Ok(Some((delay, frame))),
                Action::Refuse(error) => {
                    // a PING in its place keeps the order of the replies
                    fates.lock().unwrap().push_back(Fate::Replace(error));
                    server.write_all(b"*1\r\n$4\r\nPING\r\n").await?;
                    continue;
                }
            }
            if answered {
                fates.lock().unwrap().push_back(fate);
            }
            server.write_all(&frame).await?;
            if action == Action::Twice {
                fates.lock().unwrap().push_back(Fate::Drop);
                server.write_all(&frame).await?;
            }
        }
        if client.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
    }
}

async fn replies(
    shared: &Shared,
    fates: &Mutex<VecDeque<Fate>>,
    server: &mut OwnedReadHalf,
    mut client: OwnedWriteHalf,
    number: usize,
) -> io::Result<()> {
    let mut switches = shared.switches.subscribe();
    let (mut bytes, mut swapped) = (Vec::new(), None);
    loop {
        while let Some(len) = frame_len(&bytes) {
            let mut frame: Vec<u8> = bytes.drain(..len).collect();
            let _ = switches.wait_for(|now| !now.hole_to_client).await;
            if frame[0] == b'>' {
                let is_message = parts(&frame)[0] == "message";
                if !(is_message && switches.borrow().drop_messages) {
                    client.write_all(&frame).await?;
                }
                continue;
            }
            let fate = fates.lock().unwrap().pop_front().unwrap_or(Fate::Pass);
            if number < switches.borrow().only_push {
                client
                    .write_all(b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n")
                    .await?;
                continue;
            }
            if matches!(fate, Fate::Swap) && swapped.is_none() {
                swapped = Some(frame);
                continue;
            }
            frame.extend(swapped.take().into_iter().flatten());
            match fate {
                Fate::Pass | Fate::Swap => client.write_all(&frame).await?,
                Fate::At(due) => {
                    sleep_until(due).await;
                    client.write_all(&frame).await?;
                }
                Fate::Held => {
                    let _ = switches.wait_for(|now| now.lets_go).await;
                    client.write_all(&frame).await?;
                }
                Fate::Replace(error) => {
                    client.write_all(format!("-{error}\r\n").as_bytes()).await?;
                }
                Fate::Drop => {}
                Fate::Double => client.write_all(&frame.repeat(2)).await?,
                Fate::Mute => pending().await,
                Fate::Cut => return Ok(()),
                Fate::Truncate => return client.write_all(&frame[..frame.len() / 2]).await,
                Fate::Drip(pause) => {
                    for byte in frame {
                        client.write_all(&[byte]).await?;
                        sleep(pause).await;
                    }
                }
            }
        }
        if server.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    }
}

/// Returns the elements of a list of strings and numbers, or the words of an inline command (fred's
/// HELLO is one).
fn parts(frame: &[u8]) -> Vec<String> {
    if !matches!(frame[0], b'*' | b'>') {
        return String::from_utf8_lossy(frame)
            .split_whitespace()
            .map(str::to_owned)
            .collect();
    }
    let Some((_, mut at)) = line(frame) else {
        return Vec::new();
    };
    let mut parts = Vec::new();
    while let Some(len) = frame_len(&frame[at..]) {
        let (first, start) = line(&frame[at..]).expect("a line");
        let body = if frame[at] == b'$' {
            &frame[at + start..at + len - 2]
        } else {
            first.as_bytes()
        };
        parts.push(String::from_utf8_lossy(body).into_owned());
        at += len;
    }
    parts
}

#[test]
fn frames_are_measured_and_read() {
    let request = b"*3\r\n$4\r\nEVAL\r\n$2\r\n\r\n\r\n$0\r\n\r\n";
    assert_eq!(parts(request), ["EVAL", "\r\n", ""]);
    let whole: [&[u8]; 9] = [
        request,
        b"+OK\r\n",
        b"_\r\n",
        b",3.25\r\n",
        b"$-1\r\n",
        b"%2\r\n+a\r\n:1\r\n$1\r\nb\r\n*2\r\n_\r\n#t\r\n",
        b">3\r\n+message\r\n$1\r\nc\r\n$1\r\n0\r\n",
        b"*-1\r\n",
        b"|1\r\n+k\r\n+v\r\n:7\r\n",
    ];
    for frame in whole {
        let mut more = frame.to_vec();
        more.extend(b":9\r\n");
        assert_eq!(
            frame_len(&more),
            Some(frame.len()),
            "{}",
            String::from_utf8_lossy(frame)
        );
        for cut in 0..frame.len() {
            assert_eq!(
                frame_len(&frame[..cut]),
                None,
                "{cut} of {}",
                String::from_utf8_lossy(frame)
            );
        }
    }
}
