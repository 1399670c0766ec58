//! One supervised connection: never re-sends, says what may have been executed, comes back by itself.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use fred::{
    clients::Client,
    error::{Error as FredError, ErrorKind as FredKind},
    interfaces::{ClientLike, EventInterface, LuaInterface, PubsubInterface},
    types::{
        Builder, ClusterHash, ConnectHandle, CustomCommand, Key, Message, RespVersion, Value,
        config::{Config as FredConfig, Options, Server, ServerConfig},
    },
};
use tokio::{
    runtime::Handle,
    sync::{broadcast, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};
use uuid::Uuid;

use super::{
    pace::{Pace, nobody_listens},
    round_trip::RoundTrip,
    script::{Arg, Call},
};
use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    log,
    options::Config,
};

/// How many requests may wait in one connection's queue.
const MAX_QUEUED: usize = 50_000;
/// Pub/sub messages that may wait for the hub; beyond, fred drops the oldest and says so. It has nine channels of this
/// capacity for each connection, and fills them all with empty places: 2.4 MB. With 1,024, a script that publishes 1,500
/// messages at once wakes everybody.
const MESSAGE_CAPACITY: usize = 4096;
/// The same where no messages come, but news of the connection.
const NEWS_CAPACITY: usize = 32;
/// A connection that was silent this long is asked whether it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats without an answer before the connection is given up.
const MISSED_HEARTBEATS: u32 = 2;
/// How long a runtime of the user's may take to begin a task, or to end one, before the client does without it.
const DRIVER_PATIENCE: Duration = Duration::from_secs(2);
/// As long may the answers take that are under way when a connection is given up that works.
const DRAIN: Duration = Duration::from_secs(1);
/// A connection that breaks is replaced within milliseconds, usually: as long is a request kept back.
const BLINK: Duration = Duration::from_millis(250);
/// How often a request is given to fred again that was never sent.
const MAX_UNSENT: u32 = 20;
/// How long whoever gives a connection up waits for the next one.
const RESET: Duration = Duration::from_secs(2);
/// What the handshake may take, beyond the time to connect.
const HANDSHAKE: Duration = Duration::from_secs(8);

/// What a request meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Up,
    /// The connection was lost a moment ago, and nothing says that there will be no other.
    Blinking,
    Down,
}

/// One of the connections that a link has had: answers of one epoch came in the order of their requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// Before there is a connection.
    const NONE: Self = Self(0);
    pub(crate) const FIRST: Self = Self::NONE.next();

    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What goes over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carries {
    Scripts,
    Messages,
    /// A request may wait for minutes, and holds up those behind it.
    BlockingReads,
}

/// One connection.
pub(crate) struct Link {
    client: Client,
    /// The client's own runtime, where timers live: user runtimes may have none, or stop theirs.
    own: Handle,
    /// The runtime that drives the socket, until it ends.
    driver: Mutex<Handle>,
    carries: Carries,
    round_trip: RoundTrip,
    pace: Arc<Pace>,
    connect_timeout: Duration,
    command_timeout: Duration,
    state: watch::Sender<State>,
    /// How long a request waits for the next connection.
    patience: Duration,
    /// The epoch of the connection that may be used now, or could be until a moment ago.
    ready: watch::Sender<Epoch>,
    /// The epoch of a connection that is of no use any more.
    given_up: watch::Sender<Epoch>,
    /// Connections made so far: answers of one epoch came in the order of their requests.
    epoch: AtomicU64,
    connects: Mutex<broadcast::Receiver<Server>>,
    /// An answer came since the last heartbeat.
    alive: AtomicBool,
    closed: AtomicBool,
    router: Mutex<Option<AbortHandle>>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("state", &*self.state.borrow()).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl Drop for Link {
    /// A connect that was given up midway leaves no router behind on a runtime of the user's.
    fn drop(&mut self) {
        self.stop_router();
    }
}

impl Link {
    /// Connects, and keeps connected until [`Link::close`]. Must run on the client's own runtime.
    pub(super) async fn connect(
        server: &FredConfig,
        config: &Config,
        own: Handle,
        driver: Handle,
        pace: &Arc<Pace>,
        carries: Carries,
    ) -> Result<Arc<Self>, StoreError> {
        let link = Self::new(server, config, own, driver, pace, carries)?;
        let router = link.init().await.map_err(classify)?;
        link.set_up();
        link.own.spawn(Arc::clone(&link).supervise(Some(router)));
        link.own.spawn(Arc::clone(&link).beat());
        Ok(link)
    }

    /// A link for requests that wait for long: no heartbeat goes over it. It connects when it can.
    pub(super) fn blocking(
        server: &FredConfig,
        config: &Config,
        own: &Handle,
        pace: &Arc<Pace>,
    ) -> Result<Arc<Self>, StoreError> {
        let link = Self::new(server, config, own.clone(), own.clone(), pace, Carries::BlockingReads)?;
        own.spawn(Arc::clone(&link).supervise(None));
        Ok(link)
    }

    pub(super) fn new(
        server: &FredConfig,
        config: &Config,
        own: Handle,
        driver: Handle,
        pace: &Arc<Pace>,
        carries: Carries,
    ) -> Result<Arc<Self>, StoreError> {
        let client = build(server, config, carries)?;
        // before init(), so that no connect is missed
        let connects = Mutex::new(client.reconnect_rx());
        Ok(Arc::new(Self {
            client,
            own,
            driver: Mutex::new(driver),
            carries,
            round_trip: RoundTrip::new(),
            pace: Arc::clone(pace),
            connect_timeout: config.connect_timeout,
            command_timeout: config.command_timeout(),
            state: watch::Sender::new(State::Down),
            patience: BLINK.min(config.command_timeout()),
            ready: watch::Sender::new(Epoch::FIRST),
            given_up: watch::Sender::new(Epoch::NONE),
            epoch: AtomicU64::new(0),
            connects,
            alive: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            router: Mutex::new(None),
        }))
    }

    async fn init(&self) -> Result<ConnectHandle, FredError> {
        // fred spawns its router on the runtime that polls init()
        let driver = lock(&self.driver).clone();
        let client = self.client.clone();
        let init = async move { client.init().await };
        let init = InRuntime { runtime: &driver, future: Box::pin(init) };
        // on a runtime that ends meanwhile it would hang
        let router = timeout(self.connect_timeout.saturating_add(HANDSHAKE), init)
            .await
            .unwrap_or_else(|_| Err(FredError::new(FredKind::Timeout, "no connection in time")))?;
        *lock(&self.router) = Some(router.abort_handle());
        Ok(router)
    }

    /// Connects whenever there is no connection. fred has no policy for that here: its router ends with the connection.
    async fn supervise(self: Arc<Self>, mut router: Option<ConnectHandle>) {
        let (mut searches, mut given_up) = (self.pace.searches(), self.given_up.subscribe());
        let mut connected = None;
        loop {
            let mut connection = match router.take() {
                Some(connection) => connection,
                None => match self.reconnect(connected).await {
                    Some(connection) => connection,
                    None => return,
                },
            };
            connected = Some(Instant::now());
            searches.mark_unchanged();
            let epoch = self.epoch();
            self.set_up();
            log::later!(DEBUG, epoch = epoch; "connected");
            let works = tokio::select! {
                _ = &mut connection => false,
                _ = given_up.wait_for(|given_up| *given_up >= epoch) => false,
                _ = searches.changed() => true,
            };
            self.blink();
            if works {
                self.drain().await;
            }
            self.stop_router();
            // answers over it may come until it has ended
            if !connection.is_finished() && timeout(DRIVER_PATIENCE, connection).await.is_err() {
                self.do_without_driver();
            }
        }
    }

    /// Connects as soon as the server lets us in; `None`: closed meanwhile.
    async fn reconnect(&self, before: Option<Instant>) -> Option<ConnectHandle> {
        let lost = Instant::now();
        loop {
            if self.is_closed() {
                self.set(State::Down);
                return None;
            }
            let driver = lock(&self.driver).clone();
            if !matches!(timeout(DRIVER_PATIENCE, driver.spawn(async {})).await, Ok(Ok(()))) {
                self.do_without_driver();
            }
            match self.pace.knock(before, self.init()).await {
                Ok(_) if self.is_closed() => self.stop_router(),
                Ok(router) => return Some(router),
                Err(error) => {
                    // else it may have broken once more, on the way
                    if nobody_listens(&error) || lost.elapsed() > self.patience {
                        self.set(State::Down);
                    }
                    log::later!(DEBUG, error = error; "cannot connect");
                }
            }
        }
    }

    /// The runtime of the user's has ended, or is blocked.
    fn do_without_driver(&self) {
        *lock(&self.driver) = self.own.clone();
    }

    fn stop_router(&self) {
        if let Some(router) = lock(&self.router).take() {
            router.abort();
        }
    }

    /// Lets the answers come that are under way.
    async fn drain(&self) {
        let answers = async {
            // a caller that has just seen the link up may send its request after the first
            self.echo().await?;
            self.echo().await
        };
        if self.carries != Carries::BlockingReads && !matches!(timeout(DRAIN, answers).await, Ok(Ok(()))) {
            log::later!(DEBUG, epoch = self.epoch(); "the old connection does not answer any more");
        }
    }

    /// Asks a silent connection whether it lives. fred's own check never fires on an idle one, nor under load.
    async fn beat(self: Arc<Self>) {
        let mut missed = 0;
        while !self.is_closed() {
            sleep(HEARTBEAT).await;
            if self.alive.swap(false, Ordering::AcqRel) || !self.is_up() {
                missed = 0;
                continue;
            }
            match self.barrier().await {
                Ok(()) => missed = 0,
                Err(error) if error.kind() == StoreErrorKind::Timeout => missed += 1,
                Err(_) => {}
            }
            if missed >= MISSED_HEARTBEATS {
                missed = 0;
                log::later!(WARN, missed = MISSED_HEARTBEATS; "no answer to heartbeats; reconnecting");
                self.reset().await;
            }
        }
    }

    /// Drops the connection, and waits a little for a new one.
    pub(crate) async fn reset(&self) {
        self.blink();
        self.given_up.send_replace(self.epoch());
        let _ = timeout(RESET, self.wait_up()).await;
    }

    fn set(&self, state: State) {
        self.state.send_if_modified(|was| std::mem::replace(was, state) != state);
    }

    /// The connection is of no use any more; there may be another one in a moment.
    fn blink(&self) {
        self.state
            .send_if_modified(|state| *state == State::Up && std::mem::replace(state, State::Blinking) == State::Up);
    }

    /// Requests may be sent over the connection that was just made.
    fn set_up(&self) {
        self.set(State::Up);
        let epoch = self.epoch();
        self.ready.send_if_modified(|was| std::mem::replace(was, epoch) != epoch);
    }

    /// Changes whenever a new connection can be used: to its epoch. The first one counts as seen.
    pub(crate) fn connections(&self) -> watch::Receiver<Epoch> {
        self.ready.subscribe()
    }

    pub(crate) fn is_up(&self) -> bool {
        *self.state.borrow() == State::Up
    }

    /// Refuses a request while there is no connection: later it may mean something else.
    async fn check_up(&self) -> Result<(), StoreError> {
        if self.is_up() {
            return Ok(());
        }
        let mut state = self.state.subscribe();
        let over = timeout(self.patience, state.wait_for(|state| *state != State::Blinking)).await;
        if matches!(over, Ok(Ok(state)) if *state == State::Up) {
            return Ok(());
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, false, "not connected"))
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until the server can be reached.
    pub(crate) async fn wait_up(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == State::Up).await;
    }

    /// How many connections were made so far. A connect counts before the first command goes over it.
    pub(crate) fn epoch(&self) -> Epoch {
        use broadcast::error::TryRecvError::Lagged;
        let mut connects = lock(&self.connects);
        loop {
            match connects.try_recv() {
                Ok(_) => self.epoch.fetch_add(1, Ordering::AcqRel),
                Err(Lagged(missed)) => self.epoch.fetch_add(missed, Ordering::AcqRel),
                Err(_) => return Epoch(self.epoch.load(Ordering::Acquire)),
            };
        }
    }

    /// Runs a script: EVALSHA, and where the server does not know it, EVAL. Nothing else is ever sent twice: what is given
    /// to fred again was still in its queue when the connection ended.
    ///
    /// Dropped midway, the request may still execute; it was queued by the first poll, so that whatever is sent
    /// after the drop comes second. Nothing is sent a command timeout after the first poll: a future that was not polled
    /// for so long may have been given up by everybody, and what it asks for may be somebody else's by now.
    pub(crate) fn eval(&self, call: Call) -> impl Future<Output = Result<Value, StoreError>> + Send + '_ {
        // not an async fn: that would keep room for the whole future beside the box
        self.in_own_runtime(async move {
            let deadline = clock::Instant::now() + self.command_timeout;
            if !self.is_up() {
                self.check_up().await?;
                not_over(deadline)?;
            }
            let mut answer = self.run(&call, deadline).await;
            let mut tries = MAX_UNSENT;
            while tries > 0 && matches!(&answer, Err(error) if *error.kind() == FredKind::Canceled) {
                // that the connection is over is known a moment after fred has dropped its queue
                tries -= 1;
                sleep(Duration::from_millis(1)).await;
                self.check_up().await?;
                not_over(deadline)?;
                answer = Box::pin(self.run(&call, deadline)).await;
            }
            if answer.is_ok() {
                self.alive.store(true, Ordering::Release);
            }
            answer.map_err(|error| match not_over(deadline) {
                Err(late) if error.details().starts_with("NOSCRIPT") => late,
                _ => self.failed(error),
            })
        })
    }

    async fn run(&self, call: &Call, deadline: clock::Instant) -> Result<Value, FredError> {
        let sent = Instant::now();
        let answer = self.client.evalsha(call.script.sha1.clone(), keys(call), args(call)).await;
        match answer {
            Err(error) if error.details().starts_with("NOSCRIPT") && not_over(deadline).is_ok() => {
                Box::pin(self.client.eval(call.script.source, keys(call), args(call))).await
            }
            Err(error) => Err(error),
            Ok(answer) => {
                self.round_trip.take(sent);
                Ok(answer)
            }
        }
    }

    /// What a request took lately, and a quarter more. What it waited for a connection does not count.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip.get()
    }

    /// A failure, as told to the caller. A server that is a replica now makes the links look for another one.
    fn failed(&self, error: FredError) -> StoreError {
        let error = classify(error);
        if error.kind() == StoreErrorKind::ReadOnly {
            self.pace.search();
        }
        error
    }

    /// Waits until everything sent before was executed.
    pub(crate) async fn barrier(&self) -> Result<(), StoreError> {
        self.in_own_runtime(self.check_up()).await?;
        self.echo().await
    }

    /// Sends PING with a word, and compares the answer: fred may mix them up.
    async fn echo(&self) -> Result<(), StoreError> {
        let (word, sent) = (Uuid::new_v4().to_string(), Instant::now());
        let echo: String = self.in_own_runtime(self.client.ping(Some(word.clone()))).await.map_err(classify)?;
        if echo != word {
            return Err(StoreError::new(StoreErrorKind::Protocol, true, "PING was answered by something else"));
        }
        self.round_trip.take_ping(sent);
        self.alive.store(true, Ordering::Release);
        Ok(())
    }

    /// Subscribes. fred answers before it is sent; the barrier proves that it arrived.
    pub(crate) async fn subscribe(&self, channels: Vec<String>) -> Result<(), StoreError> {
        self.in_own_runtime(self.check_up()).await?;
        self.in_own_runtime(self.client.subscribe(channels)).await.map_err(classify)?;
        self.barrier().await
    }

    /// Unsubscribes, as [`Link::subscribe`].
    pub(crate) async fn unsubscribe(&self, channels: Vec<String>) -> Result<(), StoreError> {
        self.in_own_runtime(self.check_up()).await?;
        self.in_own_runtime(self.client.unsubscribe(channels)).await.map_err(classify)?;
        self.barrier().await
    }

    /// Waits for an element of any of the lists, at most `limit`, and takes it away; returns its list. Nothing else may be
    /// sent over this link.
    pub(crate) async fn pop(&self, lists: &[Arc<str>], limit: Duration) -> Result<Option<Arc<str>>, StoreError> {
        let seconds = limit.as_secs_f64().to_string();
        let words = lists.iter().map(|list| &**list).chain([&*seconds]);
        // its own timeout must not come first: the element would be lost
        let timeout = limit + self.command_timeout;
        let answer = self.custom("BLPOP", words, Some(timeout)).await?;
        Ok(match &answer {
            Value::Array(parts) => parts.first().and_then(Value::as_str).map(|list| (&*list).into()),
            _ => None,
        })
    }

    /// One page of SCAN, strings only: the next cursor, and keys. What is not UTF-8 is left out.
    pub(crate) async fn scan(&self, cursor: &str, pattern: &str) -> Result<(String, Vec<String>), StoreError> {
        let words = [cursor, "MATCH", pattern, "COUNT", "500", "TYPE", "string"];
        let answer = self.custom("SCAN", words.into_iter(), None).await?;
        let text = |value: &Value| value.as_str().map(|text| text.to_string());
        if let Value::Array(parts) = &answer
            && let [cursor, Value::Array(keys)] = parts.as_slice()
            && let Some(cursor) = text(cursor)
        {
            return Ok((cursor, keys.iter().filter_map(text).collect()));
        }
        Err(StoreError::new(StoreErrorKind::Protocol, true, "SCAN was answered by something else"))
    }

    /// The server's `run_id`, which no other server has; `None`: it does not say.
    pub(crate) async fn run_id(&self) -> Option<String> {
        let answer = self.custom("INFO", ["server"].into_iter(), None).await.ok()?;
        let text = answer.as_str()?;
        text.lines().find_map(|line| line.strip_prefix("run_id:")).map(|id| id.trim().to_owned())
    }

    /// A command that is not a script and need not be repeated.
    async fn custom(
        &self,
        name: &'static str,
        words: impl Iterator<Item = &str>,
        timeout: Option<Duration>,
    ) -> Result<Value, StoreError> {
        self.in_own_runtime(self.check_up()).await?;
        let words: Vec<Value> = words.map(Value::from).collect();
        let command = CustomCommand::new_static(name, ClusterHash::FirstKey, false);
        // with_options() has no effect on scripts, but on this
        let client = self.client.with_options(&Options { timeout, ..Options::default() });
        self.in_own_runtime(client.custom(command, words)).await.map_err(|error| self.failed(error))
    }

    /// Messages of the channels subscribed to.
    pub(crate) fn messages(&self) -> broadcast::Receiver<Message> {
        self.client.message_rx()
    }

    /// Ends the connection without a word: QUIT would wait behind a BLPOP.
    pub(crate) fn abandon(&self) {
        self.closed.store(true, Ordering::Release);
        self.stop_router();
        self.set(State::Down);
    }

    /// Ends the connection. Idempotent.
    pub(crate) async fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.is_up() {
            self.in_own_runtime(async { timeout(Duration::from_millis(500), self.client.quit()).await }).await.ok();
        }
        self.stop_router();
        self.set(State::Down);
    }

    fn in_own_runtime<F: Future>(&self, future: F) -> InRuntime<'_, F> {
        InRuntime { runtime: &self.own, future: Box::pin(future) }
    }
}

/// Whether there is time left to send a request.
fn not_over(deadline: clock::Instant) -> Result<(), StoreError> {
    if clock::Instant::now() < deadline {
        return Ok(());
    }
    let late = "the request was not sent within a command timeout; was its future polled?";
    Err(StoreError::new(StoreErrorKind::Overloaded, false, late))
}

/// Polls a future inside a runtime's context, from wherever: fred makes timers in whatever context polls it.
///
/// The box keeps the acquire futures of waiters small: fred's are large.
struct InRuntime<'a, F> {
    runtime: &'a Handle,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for InRuntime<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let _context = self.runtime.enter();
        self.future.as_mut().poll(cx)
    }
}

/// A text that fred need not copy: what it is lent it copies, and shares the copy by one allocation more.
fn shared(text: &Arc<str>) -> Bytes {
    Bytes::from_owner(Arc::<[u8]>::from(Arc::clone(text)))
}

fn keys(call: &Call) -> Vec<Key> {
    call.keys.iter().map(|key| shared(key).into()).collect()
}

fn args(call: &Call) -> Vec<Value> {
    let bytes = |arg: &Arg| match arg {
        Arg::Text(text) => shared(text),
        Arg::ChannelOf(name) => name.channel_text().into(),
        // most counts
        Arg::Number(0) => Bytes::from_static(b"0"),
        Arg::Number(1) => Bytes::from_static(b"1"),
        Arg::Number(number) => number.to_string().into(),
        Arg::Bytes(bytes) => Bytes::copy_from_slice(bytes),
    };
    call.args.iter().map(|arg| Value::Bytes(bytes(arg))).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client that sends each command once at most, with bounds on everything.
fn build(server: &FredConfig, config: &Config, carries: Carries) -> Result<Client, StoreError> {
    let mut server = server.clone();
    server.version = RespVersion::RESP3; // pushes and answers on one connection
    server.fail_fast = true;
    let mut builder = Builder::from_config(server);
    // no policy for reconnects: `Pace` has one, for all links
    builder.with_connection_config(|connection| {
        connection.max_command_attempts = 1; // a replayed release would free the next hold: never
        connection.max_redirections = 0;
        connection.connection_timeout = config.connect_timeout;
        connection.internal_command_timeout = config.connect_timeout.min(Duration::from_secs(2));
        connection.max_command_buffer_len = MAX_QUEUED;
        connection.tcp.nodelay = Some(true);
    });
    builder.with_performance_config(|performance| {
        performance.default_command_timeout = config.command_timeout();
        performance.broadcast_channel_capacity =
            if carries == Carries::Messages { MESSAGE_CAPACITY } else { NEWS_CAPACITY };
    });
    builder.build().map_err(classify)
}

/// Where a configuration leads, without user and password.
pub(crate) fn address(server: &FredConfig) -> String {
    match &server.server {
        ServerConfig::Unix { path } => path.display().to_string(),
        other => {
            let hosts: Vec<String> = other.hosts().iter().map(|host| format!("{}:{}", host.host, host.port)).collect();
            hosts.join(", ")
        }
    }
}

/// What the server's error codes mean. Each of these is said before a script has changed anything.
const REFUSALS: [(&str, StoreErrorKind); 17] = {
    use StoreErrorKind as K;
    [
        ("NOSCRIPT", K::NoScript),
        ("MOVED", K::Moved),
        ("ASK", K::Moved),
        ("TRYAGAIN", K::TryAgain),
        ("BUSY", K::Busy),
        ("LOADING", K::Loading),
        ("MASTERDOWN", K::MasterDown),
        ("CLUSTERDOWN", K::ClusterDown),
        ("READONLY", K::ReadOnly),
        // of a BLPOP, when the master becomes a replica
        ("UNBLOCKED", K::ReadOnly),
        ("CROSSSLOT", K::CrossSlot),
        ("OOM", K::OutOfMemory),
        ("MISCONF", K::Misconfigured),
        ("NOREPLICAS", K::NoReplicas),
        ("NOPERM", K::NoPermission),
        ("NOAUTH", K::Auth),
        ("WRONGTYPE", K::WrongType),
    ]
};

/// Sorts fred's errors by what the caller can do, and by whether the request may have been executed: yes, unless the
/// opposite is proven.
fn classify(error: FredError) -> StoreError {
    let (kind, may_have_executed) = verdict(error.kind(), error.details());
    StoreError::new(kind, may_have_executed, error)
}

fn verdict(kind: &FredKind, details: &str) -> (StoreErrorKind, bool) {
    let said = said_inside(details);
    let code = said.split([' ', ':']).next().unwrap_or("");
    if let Some((_, kind)) = REFUSALS.into_iter().find(|(refusal, _)| *refusal == code) {
        return (kind, false);
    }
    let text = said.strip_prefix("ERR ").unwrap_or(said);
    // our own refusals come before the first write
    if text.starts_with("nestlock: ") {
        return (StoreErrorKind::Other, false);
    }
    // without a code of its own, where a script meets the ACL: Redis up to 7.0, and later. Our scripts ask before they
    // write
    if ["The user executing the script can't ", "ACL failure in script: "].iter().any(|denied| text.starts_with(denied))
    {
        return (StoreErrorKind::NoPermission, false);
    }
    match kind {
        FredKind::Timeout => (StoreErrorKind::Timeout, true),
        FredKind::IO => (StoreErrorKind::Disconnected, true),
        // still in the queue when the connection ended: fred drops the queue, and says so to each
        FredKind::Canceled => (StoreErrorKind::Unavailable, false),
        FredKind::Backpressure => (StoreErrorKind::Overloaded, false),
        FredKind::Auth => (StoreErrorKind::Auth, false),
        FredKind::Protocol | FredKind::Parse => (StoreErrorKind::Protocol, true),
        FredKind::Routing | FredKind::Unknown
            if details.starts_with("Failed to route command")
                || details.starts_with("Failed to send command to router")
                || details.starts_with("Client is not initialized")
                || details.starts_with("Too many redirections") =>
        {
            (StoreErrorKind::Unavailable, false)
        }
        _ => (StoreErrorKind::Other, true),
    }
}

/// What a command inside a script said. Redis 6 wraps it, once or twice:
/// `ERR Error running script (call to f_30ad...): @user_script:1: @user_script: 1: -OOM command not allowed ...`
fn said_inside(details: &str) -> &str {
    let Some((_, mut said)) = details.strip_prefix("ERR Error running script").and_then(|rest| rest.split_once(": "))
    else {
        return details;
    };
    while let Some((_, inner)) = said.strip_prefix("@user_script:").and_then(|rest| rest.split_once(": ")) {
        said = inner;
    }
    said.strip_prefix('-').unwrap_or(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What redis-server 6.2.14 said, word for word: `{}` stands for what they put before it.
    #[test]
    fn what_redis_6_wraps_is_sorted_as_what_later_ones_say() {
        use StoreErrorKind as K;
        const CALL: &str =
            "ERR Error running script (call to f_30ada88aea1b8902e826c526ebaa64270516b3ec): @user_script:1: ";
        for (twice, said, kind) in [
            (false, "WRONGTYPE Operation against a key holding the wrong kind of value", K::WrongType),
            (true, "-OOM command not allowed when used memory > 'maxmemory'.", K::OutOfMemory),
            (true, "-NOREPLICAS Not enough good replicas to write.", K::NoReplicas),
            (true, "-READONLY You can't write against a read only replica.", K::ReadOnly),
            (
                true,
                "-MISCONF Redis is configured to save RDB snapshots, but it is currently not able to persist on disk. \
                 Commands that may modify the data set are disabled, because this instance is configured to report errors \
                 during writes if RDB snapshotting fails (stop-writes-on-bgsave-error option). Please check the Redis logs \
                 for details about the RDB error.",
                K::Misconfigured,
            ),
            (true, "The user executing the script can't run this command or subcommand", K::NoPermission),
            (
                true,
                "The user executing the script can't access at least one of the keys mentioned in the command arguments",
                K::NoPermission,
            ),
            (
                true,
                "The user executing the script can't publish to the channel mentioned in the command",
                K::NoPermission,
            ),
        ] {
            let details = format!("{CALL}{}{said}", if twice { "@user_script: 1: " } else { "" });
            assert_eq!(verdict(&FredKind::Unknown, &details), (kind, false), "{details}");
        }
        // what a word further on says is nothing
        for said in ["ERR value is BUSY or not a READONLY integer", "@user_script: 1: Unknown Redis command, ASK MOVED"]
        {
            let details = format!("{CALL}{said}");
            assert_eq!(verdict(&FredKind::Unknown, &details), (K::Other, true), "{details}");
        }
    }

    /// Redis 7.2 and Valkey.
    #[test]
    fn what_later_servers_say_of_the_acl_is_no_permission() {
        for denied in [
            "ERR ACL failure in script: User u has no permissions to run the 'hset' command script: 30ad, on @user_script:1.",
            "ERR ACL failure in script: No permissions to access a key script: 30ad, on @user_script:1.",
            "NOPERM User u has no permissions to run the 'evalsha' command",
        ] {
            assert_eq!(verdict(&FredKind::Unknown, denied), (StoreErrorKind::NoPermission, false), "{denied}");
        }
    }

    #[test]
    fn s9_codes_are_found_plain_and_wrapped() {
        let kind = |details| verdict(&FredKind::Unknown, details);
        assert_eq!(kind("OOM command not allowed"), (StoreErrorKind::OutOfMemory, false));
        assert_eq!(kind("BUSY Redis is busy"), (StoreErrorKind::Busy, false));
        assert_eq!(
            kind("ERR Error running script (call to f_ab): @user_script:12: WRONGTYPE Operation against a key"),
            (StoreErrorKind::WrongType, false)
        );
        assert_eq!(
            kind("ERR Error running script: @user_script:1: -OOM command not allowed").0,
            StoreErrorKind::OutOfMemory
        );
        for what in ["run this command or subcommand", "publish to the channel mentioned in the command"] {
            let denied = format!("ERR The user executing the script can't {what} script: 6bb2, on @user_script:29.");
            assert_eq!(verdict(&FredKind::Unknown, &denied), (StoreErrorKind::NoPermission, false));
        }
        assert_eq!(kind("ERR nestlock: the token key holds no token"), (StoreErrorKind::Other, false));
        assert_eq!(kind("channel closed"), (StoreErrorKind::Other, true));
        assert_eq!(kind("Failed to route command."), (StoreErrorKind::Unavailable, false));
        let unblocked = "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)";
        assert_eq!(kind(unblocked), (StoreErrorKind::ReadOnly, false));
        assert_eq!(verdict(&FredKind::Canceled, "Canceled."), (StoreErrorKind::Unavailable, false));
        assert_eq!(verdict(&FredKind::IO, "Connection closed."), (StoreErrorKind::Disconnected, true));
        assert_eq!(verdict(&FredKind::Timeout, "Request timed out."), (StoreErrorKind::Timeout, true));
    }
}
