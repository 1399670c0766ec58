//! A supervised connection. It reconnects by itself, reports which requests may have been executed,
//! and never sends one of those again.

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
    acks::{Receipt, WaitRequests},
    cluster::HealthWatch,
    pace::Pace,
    refusal,
    round_trip::RoundTrip,
    script::Call,
    wire::{
        self, Channels, Connection, Dialer, Failure, NOT_SENT, NotConnected, Request, Until, Value,
        catch_waker_panic,
    },
};
use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    log,
    meter::Meter,
    options::Copies,
    process::Home,
};

/// A connection without a reply for this long gets a PING.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats without a reply before the connection is given up.
const MISSED_HEARTBEATS: u32 = 2;
/// How long to drain in-flight replies when replacing a healthy connection.
const DRAIN: Duration = Duration::from_secs(1);
/// How long a request waits for a reconnect: a broken connection is usually replaced within
/// milliseconds.
const RECONNECT_GRACE: Duration = Duration::from_millis(250);
/// How often a request is retried that was never sent.
const MAX_UNSENT: u32 = 20;
/// How long [`Link::reset`] waits for the next connection.
const RESET: Duration = Duration::from_secs(2);
/// Channels in one SUBSCRIBE.
const CHANNELS_AT_ONCE: usize = 500;
/// How long a server that the link leaves has to accept a new connection, if a request has been in
/// flight for at least a heartbeat: after that it counts as hung. Any other server may only be
/// slow, and has ten times as long.
const HANGS: Duration = Duration::from_millis(100);
/// How long closing a client waits for requests that were sent.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

const FORKED: &str = "this process is a fork of the one that made the client; connect anew here";

/// The state in which a request finds a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkState {
    Up,
    /// The connection was lost a moment ago, and nothing suggests that it cannot be replaced.
    Reconnecting,
    Down,
}

/// The number of one of a client's connections. Replies of one epoch arrive in the order of their
/// requests. No two links of a client share an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Epoch(u64);

impl Epoch {
    /// The epoch of no connection. Requests in doubt that were sent over several connections have
    /// it: no reply proves that they are over, only the time by which none of them can still
    /// arrive.
    pub(crate) const NONE: Self = Self(0);
    #[cfg(test)]
    pub(crate) const FIRST: Self = Self(1);

    /// Returns the epoch of requests that went over both connections: [`Epoch::NONE`] if they
    /// differ, since a reply over one proves nothing about the other.
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
    /// The latest connection that carries scripts.
    of_scripts: watch::Sender<Epoch>,
    /// The only process that may use the connections.
    home: Home,
}

impl Default for Epochs {
    fn default() -> Self {
        Self {
            last: AtomicU64::new(0),
            of_scripts: watch::Sender::new(Epoch::NONE),
            home: Home::here(),
        }
    }
}

impl Epochs {
    fn next(&self) -> Epoch {
        Epoch(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Returns whether this process is the client's, and not a fork of it.
    pub(super) fn are_ours(&self) -> bool {
        self.home.is_here()
    }

    pub(super) fn check_ours(&self) -> Result<(), StoreError> {
        if self.are_ours() {
            Ok(())
        } else {
            Err(StoreError::new(StoreErrorKind::Forked, false, FORKED))
        }
    }

    /// Triggers a check of every hold: another server may have its record now, or none.
    pub(super) fn recheck_all(&self) {
        catch_waker_panic(|| self.of_scripts.send_modify(|_| {}));
    }

    /// Returns a receiver of the latest epoch that carries scripts. [`Epochs::recheck_all`] marks
    /// it as changed, too.
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

/// What a server reports about itself.
#[derive(Debug, Default)]
pub(super) struct ServerInfo {
    /// An id that no other server has.
    pub(super) run_id: Option<String>,
    /// True for a node of a cluster.
    pub(super) is_node: bool,
    pub(super) is_sentinel: bool,
}

/// What a link carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkPurpose {
    /// Short requests, whose replies arrive soon.
    Requests,
    /// Requests that may block for minutes, and hold up those behind them.
    BlockingReads,
}

/// A link to a server: one connection after the other.
pub(crate) struct Link {
    dial: Dialer,
    carries: LinkPurpose,
    round_trip: RoundTrip,
    pub(super) wait_requests: WaitRequests,
    pace: Arc<Pace>,
    /// The connection that can be used, or could be until a moment ago, and its epoch.
    connection: RwLock<Option<(Epoch, Connection)>>,
    state: watch::Sender<LinkState>,
    /// Why there is no connection.
    refused: Mutex<Option<String>>,
    /// How long a request waits for the next connection.
    patience: Duration,
    /// The epoch of the latest connection.
    ready: watch::Sender<Epoch>,
    /// The epoch of the last connection that was given up.
    given_up: watch::Sender<Epoch>,
    closed: AtomicBool,
    /// See [`Link::leave`].
    is_left: AtomicBool,
    pub(super) down: HealthWatch,
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
    /// Ends the connection, so that a connect that is dropped midway leaves nothing behind on the
    /// user's runtime.
    fn drop(&mut self) {
        self.end();
    }
}

impl Link {
    /// Connects, and stays connected until [`Link::close`]. Must run on the client's own runtime.
    pub(super) async fn connect(dial: Dialer, pace: &Arc<Pace>) -> Result<Arc<Self>, StoreError> {
        let link = Self::new(dial, pace, LinkPurpose::Requests);
        let connection = link
            .dial
            .connect(link.dial.connect_timeout)
            .await
            .map_err(|refused| refused.error)?;
        link.set_up(&connection);
        link.dial
            .own
            .spawn(Arc::clone(&link).supervise(Some(connection)));
        link.dial.own.spawn(Arc::clone(&link).beat());
        Ok(link)
    }

    /// Returns a link that connects when it can. Requests in its first moments wait for that.
    pub(super) fn lazy(dial: Dialer, pace: &Arc<Pace>) -> Arc<Self> {
        let link = Self::new(dial, pace, LinkPurpose::Requests);
        link.set(LinkState::Reconnecting);
        link.dial.own.spawn(Arc::clone(&link).supervise(None));
        link.dial.own.spawn(Arc::clone(&link).beat());
        link
    }

    /// Returns a link for requests that block, without heartbeats. It connects when it can.
    pub(super) fn blocking(dial: Dialer, pace: &Arc<Pace>) -> Arc<Self> {
        let link = Self::new(dial, pace, LinkPurpose::BlockingReads);
        link.dial.own.spawn(Arc::clone(&link).supervise(None));
        link
    }

    pub(super) fn new(dial: Dialer, pace: &Arc<Pace>, carries: LinkPurpose) -> Arc<Self> {
        Arc::new(Self {
            carries,
            round_trip: RoundTrip::new(),
            wait_requests: WaitRequests::default(),
            pace: Arc::clone(pace),
            connection: RwLock::new(None),
            state: watch::Sender::new(LinkState::Down),
            refused: Mutex::default(),
            patience: RECONNECT_GRACE.min(dial.command_timeout),
            ready: watch::Sender::new(Epoch::NONE),
            given_up: watch::Sender::new(Epoch::NONE),
            closed: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            down: HealthWatch::new(),
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
            self.mark_reconnecting();
            if works {
                self.drain().await;
            }
            connection.end();
        }
    }

    /// Connects as soon as the server accepts. Returns `None` if the link was closed.
    async fn reconnect(&self, before: Option<Instant>) -> Option<Connection> {
        let lost = Instant::now();
        let mut limit = self.dial.first_limit;
        loop {
            if self.is_closed() {
                self.set(LinkState::Down);
                return None;
            }
            match self
                .pace
                .attempt_connect(before, self.dial.connect(limit))
                .await
            {
                Ok(connection) if self.is_closed() => connection.end(),
                Ok(connection) => return Some(connection),
                Err(NotConnected {
                    error,
                    nobody_listens,
                }) => {
                    if error.kind() == StoreErrorKind::Timeout {
                        // the server may be slow, not hung
                        limit = (2 * limit).min(self.dial.connect_timeout);
                    }
                    *self.refused.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(error.said());
                    // otherwise the new connection may just have broken again
                    if nobody_listens || lost.elapsed() > self.patience {
                        self.set(LinkState::Down);
                    }
                    log::later!(DEBUG, error = error; "cannot connect");
                }
            }
        }
    }

    /// Waits up to [`DRAIN`] for the replies in flight, except to blocking reads.
    async fn drain(&self) {
        let answers = async {
            // a caller that has just seen the link up may send its request after the first PING
            self.echo().await?;
            self.echo().await
        };
        if self.carries != LinkPurpose::BlockingReads
            && !matches!(timeout(DRAIN, answers).await, Ok(Ok(())))
        {
            log::later!(DEBUG, epoch = self.epoch(); "the old connection does not answer any more");
        }
    }

    /// Sends a PING over a silent connection, and gives the connection up if replies stay away.
    async fn beat(self: Arc<Self>) {
        let mut missed = 0;
        while !self.is_closed() {
            sleep(HEARTBEAT).await;
            if self
                .current()
                .is_none_or(|connection| connection.had_reply())
                || !self.is_up()
            {
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
        self.mark_reconnecting();
        self.given_up.send_replace(self.epoch());
        let _ = timeout(RESET, self.wait_up()).await;
    }

    /// Returns the name of the link in metrics.
    fn name(&self) -> &'static str {
        match self.carries {
            LinkPurpose::BlockingReads => "lists",
            LinkPurpose::Requests if self.dial.sink.is_some() => "pubsub",
            LinkPurpose::Requests => "script",
        }
    }

    fn set(&self, state: LinkState) {
        catch_waker_panic(|| {
            _ = self
                .state
                .send_if_modified(|was| std::mem::replace(was, state) != state);
        });
    }

    /// Marks the connection as unusable. Another one may be up in a moment.
    fn mark_reconnecting(&self) {
        let blink = |state: &mut LinkState| {
            *state == LinkState::Up
                && std::mem::replace(state, LinkState::Reconnecting) == LinkState::Up
        };
        catch_waker_panic(|| _ = self.state.send_if_modified(blink));
    }

    /// Lets requests use the connection that was just made.
    fn set_up(&self, connection: &Connection) {
        let epoch = self.dial.epochs.next();
        *self
            .connection
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some((epoch, connection.clone()));
        self.set(LinkState::Up);
        self.refused
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        catch_waker_panic(|| _ = self.ready.send_replace(epoch));
        if self.carries == LinkPurpose::Requests && self.dial.sink.is_none() {
            catch_waker_panic(|| _ = self.dial.epochs.of_scripts.send_replace(epoch));
        }
    }

    fn numbered(&self) -> Option<(Epoch, Connection)> {
        self.connection
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn current(&self) -> Option<Connection> {
        self.numbered().map(|(_, connection)| connection)
    }

    /// Returns when the oldest request in flight was sent.
    pub(super) fn waits_since(&self) -> Option<clock::Instant> {
        self.current()?.waits_since()
    }

    /// Returns the host that the link leads to.
    pub(super) fn host(&self) -> String {
        match &self.dial.server.server {
            ServerConfig::Centralized { server } => server.host.to_string(),
            _ => String::new(),
        }
    }

    /// Returns the server that the link leads to, unless sentinels or a list decide that.
    pub(super) fn address(&self) -> String {
        wire::address(&self.dial.server)
    }

    /// Returns the number of requests in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.current()
            .map_or(0, |connection| connection.in_flight())
    }

    /// Returns a receiver of the latest connection's epoch.
    pub(crate) fn connections(&self) -> watch::Receiver<Epoch> {
        self.ready.subscribe()
    }

    pub(crate) fn is_up(&self) -> bool {
        *self.state.borrow() == LinkState::Up
    }

    /// Returns whether the server is known to accept no connection.
    pub(super) fn is_down(&self) -> bool {
        *self.state.borrow() == LinkState::Down
    }

    /// Returns the connection for a request. If there is none after a short wait, the request is
    /// refused: later it may mean something else.
    pub(super) async fn up(&self) -> Result<(Epoch, Connection), StoreError> {
        self.up_within(self.patience).await
    }

    /// Returns the same, within the time that the request has left.
    pub(super) async fn up_by(&self, until: Until) -> Result<(Epoch, Connection), StoreError> {
        self.up_within(self.patience.min(until.patience(clock::Instant::now())))
            .await
    }

    async fn up_within(&self, limit: Duration) -> Result<(Epoch, Connection), StoreError> {
        // a fork has no supervisor that would reconnect
        if !self.is_up() && self.dial.epochs.are_ours() {
            self.wait_for_reconnect(limit).await?;
        }
        self.usable()
    }

    /// Returns the connection, unless it belongs to another process.
    fn usable(&self) -> Result<(Epoch, Connection), StoreError> {
        self.dial.epochs.check_ours()?;
        self.numbered().ok_or_else(|| self.not_connected())
    }

    /// Returns the error that there is no connection, and why.
    pub(super) fn not_connected(&self) -> StoreError {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let why = refused
            .as_ref()
            .map_or_else(String::new, |why| format!(" to {}: {why}", self.address()));
        StoreError::new(
            StoreErrorKind::Unavailable,
            false,
            format!("not connected{why}"),
        )
    }

    async fn wait_for_reconnect(&self, limit: Duration) -> Result<(), StoreError> {
        let mut state = self.state.subscribe();
        let over = self
            .in_time(
                limit,
                state.wait_for(|state| *state != LinkState::Reconnecting),
            )
            .await;
        match over {
            Some(Ok(state)) if *state == LinkState::Up => Ok(()),
            _ => Err(self.not_connected()),
        }
    }

    /// Limits the time of a future, with a timer of the client's own runtime: the caller's may have
    /// none. Returns `None` if the time is over first.
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

    /// Spawns a task on the client's own runtime.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.dial.own.spawn(task);
    }

    /// Returns whether the link was closed for good.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until the server can be reached.
    pub(crate) async fn wait_up(&self) {
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| *state == LinkState::Up)
            .await;
    }

    /// Waits until the server is known to accept no connection.
    pub(super) async fn wait_down(&self) {
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| *state == LinkState::Down)
            .await;
    }

    /// Returns the epoch of the current connection.
    pub(crate) fn epoch(&self) -> Epoch {
        let connection = self
            .connection
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        connection.as_ref().map_or(Epoch::NONE, |(epoch, _)| *epoch)
    }

    /// Runs a script, and returns its reply and the epoch of the connection that brought it. If the
    /// server has forgotten the script, the request is sent again with the text; if its bundle was
    /// refused, it is sent again alone. Any other retry is of a request that was not sent when the
    /// connection ended.
    ///
    /// If the future is dropped midway, the request may still execute. The first poll queues it, so
    /// anything sent after the drop comes second. Nothing is sent once `until` is over: if a future
    /// was not polled for that long, all callers may have given it up, and the lock may belong to
    /// another owner by now.
    ///
    /// `copies`: the copies that its write must have. [`Link::acknowledged`] waits for them by the
    /// receipt.
    pub(super) async fn eval(
        &self,
        call: &Call,
        mut until: Until,
        asking: bool,
        (copies, receipt): (Option<Copies>, &mut Option<Receipt>),
    ) -> Result<(Value, Epoch), StoreError> {
        let is_up = asking || self.is_up();
        let (mut epoch, mut connection) = if is_up {
            self.usable()?
        } else {
            self.up_by(until).await?
        };
        if !is_up {
            until = until.again(clock::Instant::now());
        }
        let (mut digest, mut tries) = (true, MAX_UNSENT);
        let mut together = self.dial.bundles && copies.is_none() && call.script.bundle.is_some();
        loop {
            let sharded = self.dial.sharded;
            let request = match (asking, digest) {
                // with its text: each ASKING is for one request, so NOSCRIPT could not be retried
                (true, _) => Request::Asking(call, sharded),
                (false, true) if together => Request::Together(call),
                (false, true) => Request::Digest(call, sharded),
                (false, false) => Request::Source(call, sharded),
            };
            let is_held_up = self.wait_requests.hold_up();
            let answer = match copies {
                None => connection.call(request, until).await,
                Some(copies) => {
                    let asked =
                        Box::pin(self.call_and_wait((epoch, &connection), request, until, copies));
                    let (answer, of_it) = asked.await;
                    *receipt = Some(of_it);
                    answer
                }
            };
            match answer {
                // it may have granted a lock that no other server knows of
                Ok(_) if self.is_left() => return Err(self.failed(Failure::Ended)),
                Ok(answer) => {
                    self.round_trip.take(until.asked(), is_held_up);
                    return Ok((answer, epoch));
                }
                Err(Failure::Refused(error)) if digest && error.starts_with("NOSCRIPT") => {
                    digest = false;
                }
                Err(Failure::RefusedTogether(_)) if together => together = false,
                // sent alone, its error names the line in the script
                Err(Failure::Refused(error)) if together && refusal::is_unknown_command(&error) => {
                    together = false;
                }
                // a request with ASKING is sent at once or not at all
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

    /// Returns the connection that follows `ended`. It becomes known a moment later.
    async fn after(
        &self,
        ended: &Connection,
        until: Until,
    ) -> Result<(Epoch, Connection), StoreError> {
        let mut connections = self.connections();
        let next = async {
            loop {
                let next = self.up_by(until).await?;
                if !next.1.is(ended) {
                    return Ok(next);
                }
                // the supervisor has not noticed the end yet
                self.in_time(Duration::from_millis(1), connections.changed())
                    .await;
            }
        };
        let limit = self.patience.min(until.patience(clock::Instant::now()));
        self.in_time(limit, next)
            .await
            .unwrap_or_else(|| Err(self.not_connected()))
    }

    /// Returns how long requests took lately, plus a quarter. The wait for a connection does not
    /// count.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip.get()
    }

    /// Records how long the server took to redirect a request that was sent at `asked`. If it
    /// redirects every request, no other reply shows how long one takes. The sample counts as
    /// behind a WAIT, because whether it was is not known here.
    pub(super) fn sent_elsewhere(&self, asked: clock::Instant) {
        self.round_trip.take(asked, true);
    }

    /// Returns the same without time spent behind a WAIT. Bounded waits use it: they must end in
    /// time, even if other waits need replicas.
    pub(super) fn free_round_trip(&self) -> Duration {
        self.round_trip.free()
    }

    /// Makes sure that replies are read soon, whatever the user's runtime does.
    pub(crate) fn prioritize(&self) {
        if let Some(connection) = self.current() {
            connection.prioritize();
        }
    }

    /// Converts a failure for the caller. If the server is a replica now, all links search for
    /// another server.
    pub(super) fn failed(&self, failure: Failure) -> StoreError {
        let error = StoreError::from(failure);
        if error.kind() == StoreErrorKind::ReadOnly {
            self.pace.search();
        }
        error
    }

    /// Returns how long a request may take.
    pub(super) fn limit(&self) -> Duration {
        self.dial.command_timeout
    }

    /// Returns the time limits of a request that is sent now.
    pub(super) fn until(&self, asked: clock::Instant) -> Until {
        Until::new(asked, self.dial.command_timeout)
    }

    /// Waits until everything sent before has been executed.
    pub(crate) async fn barrier(&self) -> Result<(), StoreError> {
        self.up().await?;
        self.echo().await
    }

    /// Sends a PING, and records how long it takes.
    async fn echo(&self) -> Result<(), StoreError> {
        let sent = clock::Instant::now();
        let ((_, connection), is_held_up) = (self.usable()?, self.wait_requests.hold_up());
        let answer = connection.echo(self.until(sent)).await;
        // a server that is loading refuses PING as well: without this, no reply would show the
        // round trip
        if matches!(answer, Ok(()) | Err(Failure::Refused(_))) {
            self.round_trip.take_ping(sent, is_held_up);
        }
        answer.map_err(|failure| self.failed(failure))
    }

    /// Subscribes. Completes once the server has done so.
    pub(crate) async fn subscribe(&self, channels: &[String]) -> Result<(), StoreError> {
        let verb = if self.dial.sharded {
            Channels::SubscribeSharded
        } else {
            Channels::Subscribe
        };
        self.channels(verb, channels).await
    }

    /// Unsubscribes, as [`Link::subscribe`].
    pub(crate) async fn unsubscribe(&self, channels: &[String]) -> Result<(), StoreError> {
        let verb = if self.dial.sharded {
            Channels::UnsubscribeSharded
        } else {
            Channels::Unsubscribe
        };
        self.channels(verb, channels).await
    }

    /// Returns how many channels one call may name.
    pub(crate) fn channels_at_once(&self) -> usize {
        if self.dial.sharded {
            1
        } else {
            CHANNELS_AT_ONCE
        }
    }

    async fn channels(&self, verb: Channels, channels: &[String]) -> Result<(), StoreError> {
        let (_, mut connection) = self.up().await?;
        loop {
            let until = self.until(clock::Instant::now());
            match connection.channels(verb, channels, until).await {
                // the connection may have ended a moment ago
                Err(Failure::Unsent) => (_, connection) = self.after(&connection, until).await?,
                done => return done.map_err(|failure| self.failed(failure)),
            }
        }
    }

    /// Waits up to `limit` for an element in any of the lists, removes it, and returns its list.
    /// Nothing else may be sent over this link.
    pub(crate) async fn pop(
        &self,
        lists: &[Arc<str>],
        limit: Duration,
    ) -> Result<Option<Arc<str>>, StoreError> {
        let seconds = limit.as_secs_f64().to_string();
        let words = ["BLPOP"]
            .into_iter()
            .chain(lists.iter().map(|list| &**list))
            .chain([&*seconds]);
        // the server's timeout must come first: otherwise the element could be lost
        let answer = self
            .custom(words, limit + self.dial.command_timeout)
            .await?;
        Ok(match &answer {
            Value::Array(parts) => parts.first().and_then(Value::as_str).map(Into::into),
            _ => None,
        })
    }

    /// Returns one page of SCAN, strings only: the next cursor, and keys. Keys that are not UTF-8
    /// are left out.
    pub(crate) async fn scan(
        &self,
        cursor: &str,
        pattern: &str,
    ) -> Result<(String, Vec<String>), StoreError> {
        let words = [
            "SCAN", cursor, "MATCH", pattern, "COUNT", "500", "TYPE", "string",
        ];
        let answer = self
            .custom(words.into_iter(), self.dial.command_timeout)
            .await?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        if let Value::Array(parts) = &answer
            && let [cursor, Value::Array(keys)] = parts.as_slice()
            && let Some(cursor) = text(cursor)
        {
            return Ok((cursor, keys.iter().filter_map(text).collect()));
        }
        Err(StoreError::new(
            StoreErrorKind::Protocol,
            true,
            "SCAN was answered by something else",
        ))
    }

    /// Returns the slots and their nodes, as a node of the cluster reports them.
    pub(super) async fn slots(&self, limit: Duration) -> Result<Value, StoreError> {
        self.custom(["CLUSTER", "SLOTS"].into_iter(), limit).await
    }

    /// Returns the state of the cluster, as a node reports it.
    pub(super) async fn cluster_info(&self, limit: Duration) -> Result<Value, StoreError> {
        self.custom(["CLUSTER", "INFO"].into_iter(), limit).await
    }

    /// Returns what the server reports about itself. Returns `None` if it reports nothing.
    pub(super) async fn about(&self) -> Option<ServerInfo> {
        let answer = self
            .custom(["INFO", "server"].into_iter(), self.dial.command_timeout)
            .await
            .ok()?;
        let info = answer.as_str()?;
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        // some compatible servers report the same id everywhere
        let run_id =
            field("run_id:").filter(|id| id.len() == 40 && id.bytes().any(|byte| byte != b'0'));
        let mode = field("redis_mode:").or(field("server_mode:"));
        Some(ServerInfo {
            run_id: run_id.map(str::to_owned),
            is_node: mode == Some("cluster"),
            is_sentinel: mode == Some("sentinel"),
        })
    }

    /// Sends a command that is not a script, without a retry.
    async fn custom(
        &self,
        words: impl Iterator<Item = &str>,
        limit: Duration,
    ) -> Result<Value, StoreError> {
        let words: Vec<&str> = words.collect();
        let (_, connection) = self.up().await?;
        let answer = connection
            .call(
                Request::Words(&words),
                Until::new(clock::Instant::now(), limit),
            )
            .await;
        answer.map_err(|failure| self.failed(failure))
    }

    fn end(&self) {
        if let Some(connection) = self.current() {
            connection.end();
        }
    }

    /// Leaves a server that is no longer responsible. Refusals of requests in flight are still
    /// believed, since a server that has handed over refuses. Any other reply is not.
    pub(super) fn leave(self: &Arc<Self>) {
        self.is_left.store(true, Ordering::Release);
        self.closed.store(true, Ordering::Release);
        self.set(LinkState::Down);
        let link = Arc::clone(self);
        self.dial.own.spawn(async move {
            let over = Instant::now() + link.limit();
            let is_silent = link
                .waits_since()
                .is_some_and(|since| since.elapsed() >= HEARTBEAT);
            let knock = link
                .dial
                .connect(if is_silent { HANGS } else { 10 * HANGS });
            let (knock, ()) = tokio::join!(knock, sleep(HANGS));
            if let Ok(connection) = knock {
                connection.end();
                while link.in_flight() > 0 && Instant::now() < over {
                    sleep(HANGS / 10).await;
                }
            }
            link.end();
        });
    }

    /// Returns whether the server's replies are no longer believed, except refusals.
    pub(super) fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Acquire)
    }

    /// Ends the connection without waiting for anything.
    pub(crate) fn abandon(&self) {
        self.closed.store(true, Ordering::Release);
        self.end();
        self.set(LinkState::Down);
    }

    /// Ends the connection after everything that was sent. Idempotent.
    pub(crate) async fn close(&self) {
        if !self.is_closed() && self.is_up() {
            let _ = self.in_time(DRAIN_TIMEOUT, self.echo()).await;
        }
        self.abandon();
    }
}

#[cfg(test)]
mod tests;
