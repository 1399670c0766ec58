//! A supervised connection: never re-sends, says what may have been executed, comes back by itself.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use fred::types::config::ServerConfig;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    acks::{Receipt, Rounds},
    cluster::Down,
    pace::Pace,
    refusal,
    round_trip::RoundTrip,
    script::Call,
    wire::{self, Channels, Connection, Dial, Failure, NOT_SENT, NotConnected, Request, Until, Value, contain},
};
use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    log,
    meter::Meter,
    options::Copies,
    process::Home,
};

/// A connection that was silent this long is asked whether it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats without an answer before the connection is given up.
const MISSED_HEARTBEATS: u32 = 2;
/// As long may the answers take that are under way when a connection is given up that works.
const DRAIN: Duration = Duration::from_secs(1);
/// A connection that breaks is replaced within milliseconds, usually: as long is a request kept back.
const BLINK: Duration = Duration::from_millis(250);
/// How often a request is asked again that was never sent.
const MAX_UNSENT: u32 = 20;
/// How long whoever gives a connection up waits for the next one.
const RESET: Duration = Duration::from_secs(2);
/// Channels in one SUBSCRIBE.
const CHANNELS_AT_ONCE: usize = 500;
/// So long has a server that is left to answer a new connection, if it has left a request unanswered for as long as a heartbeat:
/// else it hangs. Any other is slow, as far as is known, and has ten times as long.
const HANGS: Duration = Duration::from_millis(100);
/// How long the end of a client waits for what was sent.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

const FORKED: &str = "this process is a fork of the one that made the client; connect anew here";

/// What a request meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Up,
    /// The connection was lost a moment ago, and nothing says that there will be no other.
    Blinking,
    Down,
}

/// One of the connections that a client has had: answers of one epoch came in the order of their requests. No two links
/// of a client have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// No connection's. Requests in doubt that went over several are over when none of them can come any more: no answer
    /// proves it.
    pub(crate) const NONE: Self = Self(0);
    #[cfg(test)]
    pub(crate) const FIRST: Self = Self(1);

    /// Of both, that no answer proves which is not over both.
    pub(crate) fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::NONE }
    }

    #[cfg(test)]
    pub(crate) const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Numbers the connections of one client.
#[derive(Debug)]
pub(super) struct Epochs {
    last: AtomicU64,
    /// The last one that carries scripts.
    of_scripts: watch::Sender<Epoch>,
    /// The only process that may use them.
    home: Home,
}

impl Default for Epochs {
    fn default() -> Self {
        Self { last: AtomicU64::new(0), of_scripts: watch::Sender::new(Epoch::NONE), home: Home::here() }
    }
}

impl Epochs {
    fn next(&self) -> Epoch {
        Epoch(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Whether this process is the client's, and no fork of it.
    pub(super) fn are_ours(&self) -> bool {
        self.home.is_here()
    }

    pub(super) fn check_ours(&self) -> Result<(), StoreError> {
        if self.are_ours() { Ok(()) } else { Err(StoreError::new(StoreErrorKind::Forked, false, FORKED)) }
    }

    /// Whatever is held may be recorded by another server, or by none.
    pub(super) fn stir(&self) {
        contain(|| self.of_scripts.send_modify(|_| {}));
    }

    /// Changes whenever a connection that carries scripts can be used, to its number.
    pub(super) fn of_scripts(&self) -> watch::Receiver<Epoch> {
        self.of_scripts.subscribe()
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl log::Number for Epoch {
    fn told(&self) -> u64 {
        self.0
    }
}

/// What a server says of itself.
#[derive(Debug, Default)]
pub(super) struct About {
    /// No other server has it.
    pub(super) run_id: Option<String>,
    /// It is a node of a cluster.
    pub(super) is_node: bool,
    pub(super) is_sentinel: bool,
}

/// What goes over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carries {
    /// Short requests, each of which is answered soon.
    Requests,
    /// A request may wait for minutes, and holds up those behind it.
    BlockingReads,
}

/// One connection after the other.
pub(crate) struct Link {
    dial: Dial,
    carries: Carries,
    round_trip: RoundTrip,
    pub(super) rounds: Rounds,
    pace: Arc<Pace>,
    /// The connection that may be used, or could be until a moment ago, and its number.
    connection: RwLock<Option<(Epoch, Connection)>>,
    state: watch::Sender<State>,
    /// Why there is no connection.
    refused: Mutex<Option<String>>,
    /// How long a request waits for the next connection.
    patience: Duration,
    /// The epoch of that connection.
    ready: watch::Sender<Epoch>,
    /// The epoch of a connection that is of no use any more.
    given_up: watch::Sender<Epoch>,
    closed: AtomicBool,
    /// See [`Link::leave`].
    is_left: AtomicBool,
    pub(super) down: Down,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("state", &*self.state.borrow())
            .field("epoch", &self.epoch())
            .finish_non_exhaustive()
    }
}

impl Drop for Link {
    /// A connect that was given up midway leaves nothing behind on a runtime of the user's.
    fn drop(&mut self) {
        self.end();
    }
}

impl Link {
    /// Connects, and keeps connected until [`Link::close`]. Must run on the client's own runtime.
    pub(super) async fn connect(dial: Dial, pace: &Arc<Pace>) -> Result<Arc<Self>, StoreError> {
        let link = Self::new(dial, pace, Carries::Requests);
        let connection = link.dial.connect(link.dial.connect_timeout).await.map_err(|refused| refused.error)?;
        link.set_up(&connection);
        link.dial.own.spawn(Arc::clone(&link).supervise(Some(connection)));
        link.dial.own.spawn(Arc::clone(&link).beat());
        Ok(link)
    }

    /// A link that connects when it can. What is asked in its first moments waits for that.
    pub(super) fn lazy(dial: Dial, pace: &Arc<Pace>) -> Arc<Self> {
        let link = Self::new(dial, pace, Carries::Requests);
        link.set(State::Blinking);
        link.dial.own.spawn(Arc::clone(&link).supervise(None));
        link.dial.own.spawn(Arc::clone(&link).beat());
        link
    }

    /// A link for requests that wait for long: no heartbeat goes over it. It connects when it can.
    pub(super) fn blocking(dial: Dial, pace: &Arc<Pace>) -> Arc<Self> {
        let link = Self::new(dial, pace, Carries::BlockingReads);
        link.dial.own.spawn(Arc::clone(&link).supervise(None));
        link
    }

    pub(super) fn new(dial: Dial, pace: &Arc<Pace>, carries: Carries) -> Arc<Self> {
        Arc::new(Self {
            carries,
            round_trip: RoundTrip::new(),
            rounds: Rounds::default(),
            pace: Arc::clone(pace),
            connection: RwLock::new(None),
            state: watch::Sender::new(State::Down),
            refused: Mutex::default(),
            patience: BLINK.min(dial.command_timeout),
            ready: watch::Sender::new(Epoch::NONE),
            given_up: watch::Sender::new(Epoch::NONE),
            closed: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            down: Down::new(),
            dial,
        })
    }

    /// Connects whenever there is no connection.
    async fn supervise(self: Arc<Self>, mut first: Option<Connection>) {
        let (mut searches, mut given_up) = (self.pace.searches(), self.given_up.subscribe());
        let mut connected = None;
        loop {
            let connection = match first.take() {
                Some(connection) => connection,
                None => match self.reconnect(connected).await {
                    Some(connection) => {
                        self.set_up(&connection);
                        if connected.is_some() {
                            Meter::reconnect(self.name());
                        }
                        connection
                    }
                    None => return,
                },
            };
            connected = Some(Instant::now());
            searches.mark_unchanged();
            let epoch = self.epoch();
            log::later!(DEBUG, epoch = epoch; "connected");
            let works = tokio::select! {
                () = connection.ended() => false,
                _ = given_up.wait_for(|given_up| *given_up >= epoch) => false,
                _ = searches.changed() => true,
            };
            self.blink();
            if works {
                self.drain().await;
            }
            connection.end();
        }
    }

    /// Connects as soon as the server lets us in; `None`: closed meanwhile.
    async fn reconnect(&self, before: Option<Instant>) -> Option<Connection> {
        let lost = Instant::now();
        let mut limit = self.dial.first_limit;
        loop {
            if self.is_closed() {
                self.set(State::Down);
                return None;
            }
            match self.pace.knock(before, self.dial.connect(limit)).await {
                Ok(connection) if self.is_closed() => connection.end(),
                Ok(connection) => return Some(connection),
                Err(NotConnected { error, nobody_listens }) => {
                    if error.kind() == StoreErrorKind::Timeout {
                        // it may be slow, and not hang
                        limit = (2 * limit).min(self.dial.connect_timeout);
                    }
                    *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.said());
                    // else it may have broken once more, on the way
                    if nobody_listens || lost.elapsed() > self.patience {
                        self.set(State::Down);
                    }
                    log::later!(DEBUG, error = error; "cannot connect");
                }
            }
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

    /// Asks a silent connection whether it lives.
    async fn beat(self: Arc<Self>) {
        let mut missed = 0;
        while !self.is_closed() {
            sleep(HEARTBEAT).await;
            if self.current().is_none_or(|connection| connection.was_heard()) || !self.is_up() {
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

    /// What it is for.
    fn name(&self) -> &'static str {
        match self.carries {
            Carries::BlockingReads => "lists",
            Carries::Requests if self.dial.sink.is_some() => "pubsub",
            Carries::Requests => "script",
        }
    }

    fn set(&self, state: State) {
        contain(|| _ = self.state.send_if_modified(|was| std::mem::replace(was, state) != state));
    }

    /// The connection is of no use any more; there may be another one in a moment.
    fn blink(&self) {
        let blink = |state: &mut State| *state == State::Up && std::mem::replace(state, State::Blinking) == State::Up;
        contain(|| _ = self.state.send_if_modified(blink));
    }

    /// Requests may be sent over the connection that was just made.
    fn set_up(&self, connection: &Connection) {
        let epoch = self.dial.epochs.next();
        *self.connection.write().unwrap_or_else(PoisonError::into_inner) = Some((epoch, connection.clone()));
        self.set(State::Up);
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).take();
        contain(|| _ = self.ready.send_replace(epoch));
        if self.carries == Carries::Requests && self.dial.sink.is_none() {
            contain(|| _ = self.dial.epochs.of_scripts.send_replace(epoch));
        }
    }

    fn numbered(&self) -> Option<(Epoch, Connection)> {
        self.connection.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn current(&self) -> Option<Connection> {
        self.numbered().map(|(_, connection)| connection)
    }

    /// Since when the oldest request is not answered.
    pub(super) fn waits_since(&self) -> Option<clock::Instant> {
        self.current()?.waits_since()
    }

    /// The host that it leads to.
    pub(super) fn host(&self) -> String {
        match &self.dial.server.server {
            ServerConfig::Centralized { server } => server.host.to_string(),
            _ => String::new(),
        }
    }

    /// The server that it leads to, unless sentinels or a list say that.
    pub(super) fn address(&self) -> String {
        wire::address(&self.dial.server)
    }

    /// Requests that are not answered yet.
    pub(crate) fn under_way(&self) -> usize {
        self.current().map_or(0, |connection| connection.under_way())
    }

    /// Changes whenever a new connection can be used: to its epoch.
    pub(crate) fn connections(&self) -> watch::Receiver<Epoch> {
        self.ready.subscribe()
    }

    pub(crate) fn is_up(&self) -> bool {
        *self.state.borrow() == State::Up
    }

    /// Whether it is known that the server lets nobody in.
    pub(super) fn is_down(&self) -> bool {
        *self.state.borrow() == State::Down
    }

    /// The connection for a request. While there is none it is refused: later it may mean something else.
    pub(super) async fn up(&self) -> Result<(Epoch, Connection), StoreError> {
        self.up_within(self.patience).await
    }

    /// The same for a request that has so long for all.
    pub(super) async fn up_by(&self, until: Until) -> Result<(Epoch, Connection), StoreError> {
        self.up_within(self.patience.min(until.patience(clock::Instant::now()))).await
    }

    async fn up_within(&self, limit: Duration) -> Result<(Epoch, Connection), StoreError> {
        // a fork has nobody who would make another one
        if !self.is_up() && self.dial.epochs.are_ours() {
            self.wait_a_blink(limit).await?;
        }
        self.usable()
    }

    /// The connection, unless it is another process's.
    fn usable(&self) -> Result<(Epoch, Connection), StoreError> {
        self.dial.epochs.check_ours()?;
        self.numbered().ok_or_else(|| self.not_connected())
    }

    /// That there is no connection, and why.
    pub(super) fn not_connected(&self) -> StoreError {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let why = refused.as_ref().map_or_else(String::new, |why| format!(" to {}: {why}", self.address()));
        StoreError::new(StoreErrorKind::Unavailable, false, format!("not connected{why}"))
    }

    async fn wait_a_blink(&self, limit: Duration) -> Result<(), StoreError> {
        let mut state = self.state.subscribe();
        let over = self.in_time(limit, state.wait_for(|state| *state != State::Blinking)).await;
        match over {
            Some(Ok(state)) if *state == State::Up => Ok(()),
            _ => Err(self.not_connected()),
        }
    }

    /// With a timer of the client's own runtime: the caller's may have none.
    pub(super) async fn in_time<F: Future>(&self, limit: Duration, future: F) -> Option<F::Output> {
        let over = {
            let _context = self.dial.own.enter();
            sleep(limit)
        };
        tokio::select! {
            biased;
            output = future => Some(output),
            () = over => None,
        }
    }

    /// On the client's own runtime.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.dial.own.spawn(task);
    }

    /// Whether it was left for good.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until the server can be reached.
    pub(crate) async fn wait_up(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == State::Up).await;
    }

    /// Waits until it is known that the server lets nobody in.
    pub(super) async fn wait_down(&self) {
        let _ = self.state.subscribe().wait_for(|state| *state == State::Down).await;
    }

    /// Which connection it is by now.
    pub(crate) fn epoch(&self) -> Epoch {
        let connection = self.connection.read().unwrap_or_else(PoisonError::into_inner);
        connection.as_ref().map_or(Epoch::NONE, |(epoch, _)| *epoch)
    }

    /// Runs a script; once more, with its text, where the server has forgotten it. Nothing else is ever sent twice: what is asked
    /// again was not sent when the connection ended. With the number of the connection that brought the answer.
    ///
    /// Dropped midway, the request may still execute; it was asked by the first poll, so that whatever is sent
    /// after the drop comes second. Nothing is sent when `until` is over: a future that was not polled for so long may have
    /// been given up by everybody, and what it asks for may be somebody else's by now.
    ///
    /// `copies`: who must have what it writes. [`Link::acknowledged`] tells by the receipt.
    pub(super) async fn eval(
        &self,
        call: &Call,
        mut until: Until,
        asking: bool,
        (copies, receipt): (Option<Copies>, &mut Option<Receipt>),
    ) -> Result<(Value, Epoch), StoreError> {
        let is_up = asking || self.is_up();
        let (mut epoch, mut connection) = if is_up { self.usable()? } else { self.up_by(until).await? };
        if !is_up {
            until = until.again(clock::Instant::now());
        }
        let (mut digest, mut tries) = (true, MAX_UNSENT);
        let mut together = self.dial.bundles && copies.is_none() && call.script.bundle.is_some();
        loop {
            let sharded = self.dial.sharded;
            let request = match (asking, digest) {
                // with its text: each ASKING is for one request
                (true, _) => Request::Asking(call, sharded),
                (false, true) if together => Request::Together(call),
                (false, true) => Request::Digest(call, sharded),
                (false, false) => Request::Source(call, sharded),
            };
            let is_held_up = self.rounds.hold_up();
            let answer = match copies {
                None => connection.call(request, until).await,
                Some(copies) => {
                    let asked = Box::pin(self.call_and_wait((epoch, &connection), request, until, copies));
                    let (answer, of_it) = asked.await;
                    *receipt = Some(of_it);
                    answer
                }
            };
            match answer {
                // it may have granted what no other server knows of
                Ok(_) if self.is_left() => return Err(self.failed(Failure::Ended)),
                Ok(answer) => {
                    self.round_trip.take(until.asked(), is_held_up);
                    return Ok((answer, epoch));
                }
                Err(Failure::Refused(error)) if digest && error.starts_with("NOSCRIPT") => digest = false,
                Err(Failure::RefusedTogether(_)) if together => together = false,
                // alone, it says where
                Err(Failure::Refused(error)) if together && refusal::is_unknown_command(&error) => together = false,
                // whoever asks this time only does so at once or not at all
                Err(Failure::Unsent) if tries > 0 && !asking => {
                    tries -= 1;
                    (epoch, connection) = Box::pin(self.after(&connection, until)).await?;
                }
                Err(failure) => return Err(call.script.explained(self.failed(failure), sharded)),
            }
            until = until.again(clock::Instant::now());
            if until.is_over() {
                return Err(StoreError::new(StoreErrorKind::Overloaded, false, NOT_SENT));
            }
        }
    }

    /// The connection after one that has ended, which is known a moment later.
    async fn after(&self, ended: &Connection, until: Until) -> Result<(Epoch, Connection), StoreError> {
        let mut connections = self.connections();
        let next = async {
            loop {
                let next = self.up_by(until).await?;
                if !next.1.is(ended) {
                    return Ok(next);
                }
                // the supervisor has not heard of it yet
                self.in_time(Duration::from_millis(1), connections.changed()).await;
            }
        };
        let limit = self.patience.min(until.patience(clock::Instant::now()));
        self.in_time(limit, next).await.unwrap_or_else(|| Err(self.not_connected()))
    }

    /// What a request took lately, and a quarter more. What it waited for a connection does not count.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip.get()
    }

    /// It sent a request elsewhere, which was asked at this time: where all is sent elsewhere, no other answer tells how long one
    /// takes. What stands behind a WAIT is not known here.
    pub(super) fn sent_elsewhere(&self, asked: clock::Instant) {
        self.round_trip.take(asked, true);
    }

    /// The same without what is spent behind a WAIT: for bounded waits, which end in time beside those who wait for replicas.
    pub(super) fn free_round_trip(&self) -> Duration {
        self.round_trip.free()
    }

    /// Answers are needed soon, whatever becomes of the user's runtime.
    pub(crate) fn hurry(&self) {
        if let Some(connection) = self.current() {
            connection.hurry();
        }
    }

    /// A failure, as told to the caller. A server that is a replica now makes the links look for another one.
    pub(super) fn failed(&self, failure: Failure) -> StoreError {
        let error = StoreError::from(failure);
        if error.kind() == StoreErrorKind::ReadOnly {
            self.pace.search();
        }
        error
    }

    /// How long a request may take.
    pub(super) fn limit(&self) -> Duration {
        self.dial.command_timeout
    }

    /// The time of a request that is asked now.
    pub(super) fn until(&self, asked: clock::Instant) -> Until {
        Until::new(asked, self.dial.command_timeout)
    }

    /// Waits until everything sent before was executed.
    pub(crate) async fn barrier(&self) -> Result<(), StoreError> {
        self.up().await?;
        self.echo().await
    }

    /// A PING, which tells how long a request takes.
    async fn echo(&self) -> Result<(), StoreError> {
        let sent = clock::Instant::now();
        let ((_, connection), is_held_up) = (self.usable()?, self.rounds.hold_up());
        let answer = connection.echo(self.until(sent)).await;
        // a server that is loading refuses PING, too: else nothing would tell how long it takes
        if matches!(answer, Ok(()) | Err(Failure::Refused(_))) {
            self.round_trip.take_ping(sent, is_held_up);
        }
        answer.map_err(|failure| self.failed(failure))
    }

    /// Subscribes. Answered when the server has done so.
    pub(crate) async fn subscribe(&self, channels: &[String]) -> Result<(), StoreError> {
        let verb = if self.dial.sharded { Channels::SubscribeSharded } else { Channels::Subscribe };
        self.channels(verb, channels).await
    }

    /// Unsubscribes, as [`Link::subscribe`].
    pub(crate) async fn unsubscribe(&self, channels: &[String]) -> Result<(), StoreError> {
        let verb = if self.dial.sharded { Channels::UnsubscribeSharded } else { Channels::Unsubscribe };
        self.channels(verb, channels).await
    }

    /// How many channels it takes at once.
    pub(crate) fn channels_at_once(&self) -> usize {
        if self.dial.sharded { 1 } else { CHANNELS_AT_ONCE }
    }

    async fn channels(&self, verb: Channels, channels: &[String]) -> Result<(), StoreError> {
        let (_, mut connection) = self.up().await?;
        loop {
            let until = self.until(clock::Instant::now());
            match connection.channels(verb, channels, until).await {
                // it may have ended a moment ago
                Err(Failure::Unsent) => (_, connection) = self.after(&connection, until).await?,
                done => return done.map_err(|failure| self.failed(failure)),
            }
        }
    }

    /// Waits for an element of any of the lists, at most `limit`, and takes it away; returns its list. Nothing else may be
    /// sent over this link.
    pub(crate) async fn pop(&self, lists: &[Arc<str>], limit: Duration) -> Result<Option<Arc<str>>, StoreError> {
        let seconds = limit.as_secs_f64().to_string();
        let words = ["BLPOP"].into_iter().chain(lists.iter().map(|list| &**list)).chain([&*seconds]);
        // its own timeout must not come first: the element would be lost
        let answer = self.custom(words, limit + self.dial.command_timeout).await?;
        Ok(match &answer {
            Value::Array(parts) => parts.first().and_then(Value::as_str).map(Into::into),
            _ => None,
        })
    }

    /// One page of SCAN, strings only: the next cursor, and keys. What is not UTF-8 is left out.
    pub(crate) async fn scan(&self, cursor: &str, pattern: &str) -> Result<(String, Vec<String>), StoreError> {
        let words = ["SCAN", cursor, "MATCH", pattern, "COUNT", "500", "TYPE", "string"];
        let answer = self.custom(words.into_iter(), self.dial.command_timeout).await?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        if let Value::Array(parts) = &answer
            && let [cursor, Value::Array(keys)] = parts.as_slice()
            && let Some(cursor) = text(cursor)
        {
            return Ok((cursor, keys.iter().filter_map(text).collect()));
        }
        Err(StoreError::new(StoreErrorKind::Protocol, true, "SCAN was answered by something else"))
    }

    /// Who serves which slot, as a node of a cluster says.
    pub(super) async fn slots(&self, limit: Duration) -> Result<Value, StoreError> {
        self.custom(["CLUSTER", "SLOTS"].into_iter(), limit).await
    }

    /// How its cluster is, as a node says.
    pub(super) async fn cluster_info(&self, limit: Duration) -> Result<Value, StoreError> {
        self.custom(["CLUSTER", "INFO"].into_iter(), limit).await
    }

    /// What the server says of itself; `None`: nothing.
    pub(super) async fn about(&self) -> Option<About> {
        let answer = self.custom(["INFO", "server"].into_iter(), self.dial.command_timeout).await.ok()?;
        let info = answer.as_str()?;
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // some that speak the protocol say the same everywhere
        let run_id = field("run_id:").filter(|id| id.len() == 40 && id.bytes().any(|byte| byte != b'0'));
        let mode = field("redis_mode:").or(field("server_mode:"));
        Some(About {
            run_id: run_id.map(str::to_owned),
            is_node: mode == Some("cluster"),
            is_sentinel: mode == Some("sentinel"),
        })
    }

    /// A command that is not a script and need not be repeated.
    async fn custom(&self, words: impl Iterator<Item = &str>, limit: Duration) -> Result<Value, StoreError> {
        let words: Vec<&str> = words.collect();
        let (_, connection) = self.up().await?;
        let answer = connection.call(Request::Words(&words), Until::new(clock::Instant::now(), limit)).await;
        answer.map_err(|failure| self.failed(failure))
    }

    fn end(&self) {
        if let Some(connection) = self.current() {
            connection.end();
        }
    }

    /// Leaves a server that is no longer the one to ask. What is under way there may still be refused, which is what a server does
    /// that has handed over; what it says else is not believed.
    pub(super) fn leave(self: &Arc<Self>) {
        self.is_left.store(true, Ordering::Release);
        self.closed.store(true, Ordering::Release);
        self.set(State::Down);
        let link = Arc::clone(self);
        self.dial.own.spawn(async move {
            let over = Instant::now() + link.limit();
            let is_silent = link.waits_since().is_some_and(|since| since.elapsed() >= HEARTBEAT);
            let knock = link.dial.connect(if is_silent { HANGS } else { 10 * HANGS });
            let (knock, ()) = tokio::join!(knock, sleep(HANGS));
            if let Ok(connection) = knock {
                connection.end();
                while link.under_way() > 0 && Instant::now() < over {
                    sleep(HANGS / 10).await;
                }
            }
            link.end();
        });
    }

    /// Whether what the server says is not believed any more, unless it refuses something.
    pub(super) fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Acquire)
    }

    /// Ends the connection without waiting for anything.
    pub(crate) fn abandon(&self) {
        self.closed.store(true, Ordering::Release);
        self.end();
        self.set(State::Down);
    }

    /// Ends the connection, after what was sent. Idempotent.
    pub(crate) async fn close(&self) {
        if !self.is_closed() && self.is_up() {
            let _ = self.in_time(LAST_ANSWERS, self.echo()).await;
        }
        self.abandon();
    }
}

#[cfg(test)]
mod tests;
