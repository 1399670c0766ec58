//! A supervised connection. It reconnects automatically, reports which requests may have been
//! executed, and never sends one of those again.
//!
//! Only `Link::eval` sends a request again: EVAL after EVALSHA was refused with NOSCRIPT, and alone
//! after its bundle was refused. Both refusals prove that nothing was executed. While there is no
//! connection, nothing is sent; a request waits up to 250 ms, since most connections are replaced
//! within milliseconds. A connection counts as alive when a reply has arrived completely, so a peer
//! that trickles, or only pushes, is given up.

pub(crate) mod commands;
mod copies;
mod down;
mod end;
mod refresh;
mod supervisor;

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::sleep};

use crate::{
    acks::{Copies, ScriptReply, WaitRequests},
    address::Address,
    clock,
    connection::Connection,
    dialer::Dialer,
    epoch::Epoch,
    error::{StoreError, StoreErrorKind},
    failure::Failure,
    health::HealthWatch,
    pace::Pace,
    refusal,
    request::Request,
    round_trip::RoundTrip,
    script::Call,
    until::{NOT_SENT, Until},
    wake::catch_waker_panic,
};

/// A connection without a reply for this long gets a PING.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// How long a request waits for a reconnect: a broken connection is usually replaced within
/// milliseconds.
const RECONNECT_GRACE: Duration = Duration::from_millis(250);
/// How many times a request that was never sent is retried.
const MAX_UNSENT: u32 = 20;
/// How long [`Link::reset`] waits for the next connection.
const RESET: Duration = Duration::from_secs(2);

/// The state in which a request finds a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkState {
    Up,
    /// The connection was lost a moment ago, and nothing suggests that it cannot be replaced.
    Reconnecting,
    Down,
}

/// What a link carries.
///
/// ```
/// # use std::sync::Arc;
/// # use nestlock_wire::{Dialer, Link, LinkPurpose, Pace};
/// # fn example(dialer: Dialer) {
/// let link = Link::new(dialer, &Arc::new(Pace::new()), LinkPurpose::Requests);
/// assert!(!link.is_up()); // it never connects
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkPurpose {
    /// Short requests, whose replies arrive soon.
    Requests,
    /// Requests that may block for minutes, and hold up those behind them.
    BlockingReads,
}

/// A link to a server: a connection that is replaced when it ends.
///
/// ```
/// # use nestlock_wire::{Address, ConnectionSettings, Server, ServerSettings};
/// # use tokio::runtime::Handle;
/// use std::{sync::Arc, time::Duration};
///
/// use nestlock_wire::{Dialer, Link, Pace};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let address = Address::Tcp(Server::new("127.0.0.1", server.addr().port()));
/// # let settings = ConnectionSettings::new(ServerSettings::new(address), Handle::current());
/// let link = Link::connect(Dialer::new(settings), &Arc::new(Pace::new())).await?;
/// let orders = link.command(&["INCR", "orders"], Duration::from_secs(3)).await?;
/// assert_eq!(orders.as_number(), Some(1));
/// link.close().await;
/// # Ok(())
/// # }
/// ```
pub struct Link {
    dial: Dialer,
    carries: LinkPurpose,
    round_trip: RoundTrip,
    pub(crate) wait_requests: WaitRequests,
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
    pub(crate) down: HealthWatch,
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
    /// Connects, and stays connected until the link is closed or dropped. Must run on the client's
    /// own runtime.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the connection is closed.
    pub async fn connect(dial: Dialer, pace: &Arc<Pace>) -> Result<Arc<Self>, StoreError> {
        let link = Self::new(dial, pace, LinkPurpose::Requests);
        let connection = link
            .dial
            .connect(link.dial.settings.connect_timeout)
            .await
            .map_err(|refused| refused.error)?;
        link.set_up(&connection);
        link.keep_connected(Some(connection));
        Ok(link)
    }

    /// Creates a link that connects in the background. Requests in its first moments wait for the
    /// connection.
    pub fn lazy(dial: Dialer, pace: &Arc<Pace>) -> Arc<Self> {
        let link = Self::new(dial, pace, LinkPurpose::Requests);
        link.set(LinkState::Reconnecting);
        link.keep_connected(None);
        link
    }

    /// Creates a link for requests that block, without heartbeats. It connects in the background.
    pub fn blocking(dial: Dialer, pace: &Arc<Pace>) -> Arc<Self> {
        let link = Self::new(dial, pace, LinkPurpose::BlockingReads);
        link.keep_connected(None);
        link
    }

    /// Creates a link that never connects.
    pub fn new(dial: Dialer, pace: &Arc<Pace>, carries: LinkPurpose) -> Arc<Self> {
        Arc::new(Self {
            carries,
            round_trip: RoundTrip::new(),
            wait_requests: WaitRequests::default(),
            pace: Arc::clone(pace),
            connection: RwLock::new(None),
            state: watch::Sender::new(LinkState::Down),
            refused: Mutex::default(),
            patience: RECONNECT_GRACE.min(dial.settings.command_timeout),
            ready: watch::Sender::new(Epoch::NONE),
            given_up: watch::Sender::new(Epoch::NONE),
            closed: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            down: HealthWatch::new(),
            dial,
        })
    }

    /// Drops the connection, and waits up to 2 s for a new one.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn reset(&self) {
        self.give_up();
        self.in_time(RESET, self.wait_up()).await;
    }

    fn give_up(&self) {
        self.mark_reconnecting();
        self.given_up.send_replace(self.epoch());
    }

    fn set(&self, state: LinkState) {
        catch_waker_panic(|| {
            _ = self
                .state
                .send_if_modified(|was| std::mem::replace(was, state) != state);
        });
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
    pub fn waits_since(&self) -> Option<clock::Instant> {
        self.current()?.waits_since()
    }

    /// Returns the host that the link leads to. Empty for a Unix socket.
    pub fn host(&self) -> String {
        match &self.dial.settings.server.address {
            Address::Tcp(server) => server.host.to_string(),
            Address::Unix(_) => String::new(),
        }
    }

    /// Returns the server that the link leads to, unless sentinels or a list decide that.
    pub fn address(&self) -> String {
        self.dial.settings.server.address.to_string()
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.current()
            .map_or(0, |connection| connection.in_flight())
    }

    /// Returns a receiver of the latest connection's epoch.
    pub fn connections(&self) -> watch::Receiver<Epoch> {
        self.ready.subscribe()
    }

    /// Returns whether there is a connection that can be used.
    pub fn is_up(&self) -> bool {
        *self.state.borrow() == LinkState::Up
    }

    /// Returns the connection for a request. Fails at once while the link is down. While it
    /// reconnects, fails after 250 ms, or after the command timeout if that is shorter: later, the
    /// request may mean something else.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn up(&self) -> Result<(Epoch, Connection), StoreError> {
        self.up_within(self.patience).await
    }

    /// As [`Link::up`], within the time that the request has left.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn up_by(&self, until: Until) -> Result<(Epoch, Connection), StoreError> {
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

    /// Returns the error for a missing connection, with the reason.
    pub fn not_connected(&self) -> StoreError {
        let why = self
            .refusal()
            .map_or_else(String::new, |why| format!(" to {}: {why}", self.address()));
        StoreError::new(
            StoreErrorKind::Unavailable,
            false,
            format!("not connected{why}"),
        )
    }

    /// Returns why the last attempt to connect failed.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.clone()
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
    pub(crate) async fn in_time<F: Future>(&self, limit: Duration, future: F) -> Option<F::Output> {
        let over = {
            let _context = self.dial.settings.own.enter();
            sleep(limit)
        };
        let mut state = self.state.subscribe();
        let closed = state.wait_for(|_| self.is_closed());
        tokio::select! {
            biased;
            output = future => Some(output),
            // before the timer, whose runtime may have ended: that closes the link, and a poll of
            // the timer would panic
            _ = closed => None,
            () = over => None,
        }
    }

    /// Spawns a task on the client's own runtime.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.dial.settings.own.spawn(task);
    }

    /// Returns whether the link was closed for good.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits until the server can be reached. Never returns if the link is closed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_up(&self) {
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| *state == LinkState::Up)
            .await;
    }

    /// Waits until the server is known to accept no connection.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_down(&self) {
        let _ = self
            .state
            .subscribe()
            .wait_for(|state| *state == LinkState::Down)
            .await;
    }

    /// Returns the epoch of the current connection.
    pub fn epoch(&self) -> Epoch {
        let connection = self
            .connection
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        connection.as_ref().map_or(Epoch::NONE, |(epoch, _)| *epoch)
    }

    /// Runs a script, and returns its reply. If the server has forgotten the script, the request is
    /// sent again with the text; if its bundle was refused, it is sent again alone. Any other retry
    /// is of a request that was not sent when the connection ended.
    ///
    /// `copies`: the copies that its write must have. [`Link::acknowledged`] waits for them.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped midway, the request may still execute. The first poll queues it, so
    /// anything sent after the drop comes second. Nothing is sent once `until` is over: if a future
    /// was not polled for that long, all callers may have given it up, and what it would change may
    /// belong to another owner by now.
    pub async fn eval(
        &self,
        call: &Call,
        mut until: Until,
        asking: bool,
        copies: Option<Copies>,
    ) -> Result<ScriptReply, StoreError> {
        let (mut epoch, mut connection) = if asking || self.is_up() {
            self.usable()?
        } else {
            let next = self.up_by(until).await?;
            until = until.again(clock::Instant::now());
            next
        };
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
            let (answer, receipt) = match copies {
                None => (connection.call(request, until).await, None),
                Some(copies) => {
                    Box::pin(self.call_and_wait(epoch, &connection, request, until, copies)).await
                }
            };
            match answer {
                // it may have granted a lock that no other server knows of
                Ok(_) if self.is_left() => return Err(self.failed(Failure::Ended)),
                Ok(value) => {
                    self.round_trip.take(until.asked(), is_held_up);
                    return Ok(ScriptReply {
                        value,
                        epoch,
                        receipt,
                    });
                }
                Err(Failure::Refused(error)) if digest && error.starts_with("NOSCRIPT") => {
                    digest = false;
                }
                Err(failure) if together && goes_alone(&failure, call) => together = false,
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

    /// Returns how long recent requests took, plus a quarter. The wait for a connection does not
    /// count.
    pub fn round_trip(&self) -> Duration {
        self.round_trip.get()
    }

    /// Records how long the server took to redirect a request that was sent at `asked`. If it
    /// redirects every request, no other reply shows how long one takes. The sample counts as
    /// behind a WAIT, because whether it was is not known here.
    pub fn sent_elsewhere(&self, asked: clock::Instant) {
        self.round_trip.take(asked, true);
    }

    /// As [`Link::round_trip`], without time spent behind a WAIT. Bounded waits use it: they must
    /// end in time, even if other waits need replicas.
    pub fn free_round_trip(&self) -> Duration {
        self.round_trip.free()
    }

    /// Makes sure that replies are read soon, whatever the user's runtime does.
    pub fn prioritize(&self) {
        if let Some(connection) = self.current() {
            connection.prioritize();
        }
    }

    /// Converts a failure for the caller. If the server is a replica now, all links search for
    /// another server.
    pub fn failed(&self, failure: Failure) -> StoreError {
        let error = StoreError::from(failure);
        if error.kind() == StoreErrorKind::ReadOnly {
            self.pace.search();
        }
        error
    }

    /// Returns how long a request may take.
    pub fn limit(&self) -> Duration {
        self.dial.settings.command_timeout
    }

    /// Returns the time limits of a request that is sent now.
    pub fn until(&self, asked: clock::Instant) -> Until {
        Until::new(asked, self.dial.settings.command_timeout)
    }

    /// Waits until everything sent before has been executed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn barrier(&self) -> Result<(), StoreError> {
        self.up().await?;
        self.echo().await
    }

    /// Sends a PING, and records how long it takes.
    async fn echo(&self) -> Result<(), StoreError> {
        let sent = clock::Instant::now();
        let ((_, connection), is_held_up) = (self.usable()?, self.wait_requests.hold_up());
        let answer = connection.echo(self.until(sent)).await;
        self.echoed(answer, sent, is_held_up)
    }

    fn echoed(
        &self,
        answer: Result<(), Failure>,
        sent: clock::Instant,
        is_held_up: bool,
    ) -> Result<(), StoreError> {
        // a server that is loading refuses PING as well: without this, no reply would show the
        // round trip
        if matches!(answer, Ok(()) | Err(Failure::Refused(_))) {
            self.round_trip.take_ping(sent, is_held_up);
        }
        answer.map_err(|failure| self.failed(failure))
    }

    fn end(&self) {
        if let Some(connection) = self.current() {
            connection.end();
        }
    }
}

/// Returns whether a script that may have been bundled is sent again alone after this failure.
fn goes_alone(failure: &Failure, call: &Call) -> bool {
    match failure {
        Failure::RefusedTogether(_) => true,
        // sent alone, its error names the line in the script
        Failure::Refused(error) => {
            call.script.source.is_atomic && refusal::is_unknown_command(error)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
