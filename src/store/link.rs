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
    time::Duration,
};

use fred::{
    clients::Client,
    error::{Error as FredError, ErrorKind as FredKind},
    interfaces::{ClientLike, EventInterface, LuaInterface, PubsubInterface},
    types::{
        Builder, ClientState, ClusterHash, CustomCommand, Message, RespVersion, Value,
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

use super::script::{Arg, Call};
use crate::{
    error::{StoreError, StoreErrorKind},
    options::Config,
};

/// The first delay before a reconnect, and the longest: a server that comes back is noticed within a quarter second.
const RECONNECT_DELAYS: (u32, u32) = (10, 150);
/// How many requests may wait in one connection's queue.
const MAX_QUEUED: usize = 50_000;
/// Pub/sub messages that may wait for the hub; beyond, fred drops the oldest and says so.
const MESSAGE_CAPACITY: usize = 4096;
/// A connection that was silent this long is asked whether it lives.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Heartbeats without an answer before the connection is given up.
const MISSED_HEARTBEATS: u32 = 2;

/// One connection.
pub(crate) struct Link {
    client: Client,
    /// The client's own runtime, where timers live: user runtimes may have none, or stop theirs.
    own: Handle,
    /// The runtime that drives the socket, until it ends.
    driver: Mutex<Handle>,
    up: watch::Sender<bool>,
    /// The epoch of the connection that may be used now, or could be until a moment ago.
    ready: watch::Sender<u64>,
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
        f.debug_struct("Link").field("up", &*self.up.borrow()).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl Drop for Link {
    /// A connect that was given up midway leaves no router behind on a runtime of the user's.
    fn drop(&mut self) {
        if let Some(router) = lock(&self.router).take() {
            router.abort();
        }
    }
}

impl Link {
    /// Connects, and keeps connected until [`Link::close`]. Must run on the client's own runtime.
    pub(crate) async fn connect(
        server: &FredConfig,
        config: &Config,
        own: Handle,
        driver: Handle,
    ) -> Result<Arc<Self>, StoreError> {
        let client = build(server, config)?;
        // before init(), so that no event is missed
        let (errors, reconnects, connects) = (client.error_rx(), client.reconnect_rx(), client.reconnect_rx());
        let link = Arc::new(Self {
            client,
            own,
            driver: Mutex::new(driver),
            up: watch::Sender::new(true),
            ready: watch::Sender::new(1),
            epoch: AtomicU64::new(0),
            connects: Mutex::new(connects),
            alive: AtomicBool::new(true),
            closed: AtomicBool::new(false),
            router: Mutex::new(None),
        });
        let router = link.init().await.map_err(classify)?;
        link.set_up(true);
        link.own.spawn(Arc::clone(&link).supervise(router, errors, reconnects));
        Ok(link)
    }

    /// Looks after a connection that may be silent. Not for one that waits for lists: its PING would wait as well.
    pub(crate) fn keep_alive(self: &Arc<Self>) {
        self.own.spawn(Arc::clone(self).beat());
    }

    async fn init(&self) -> Result<fred::types::ConnectHandle, FredError> {
        // fred spawns its router on the runtime that polls init()
        let driver = lock(&self.driver).clone();
        let client = self.client.clone();
        let init = async move { client.init().await };
        let router = InRuntime { runtime: &driver, future: Box::pin(init) }.await?;
        *lock(&self.router) = Some(router.abort_handle());
        Ok(router)
    }

    /// Follows fred's events, and starts its router again when that ends: later calls would hang for ever.
    async fn supervise(
        self: Arc<Self>,
        mut router: fred::types::ConnectHandle,
        mut errors: broadcast::Receiver<(FredError, Option<Server>)>,
        mut reconnects: broadcast::Receiver<Server>,
    ) {
        use broadcast::error::RecvError::Closed;
        while !self.closed.load(Ordering::Acquire) {
            tokio::select! {
                biased;
                event = reconnects.recv() => match event {
                    Err(Closed) => return,
                    _ => self.set_up(true),
                },
                event = errors.recv() => match event {
                    Err(Closed) => return,
                    // fred still says Connected during the first delay after a cut; a stale event must not hide that
                    // the connection is back
                    _ => self.set_up(self.client.state() == ClientState::Connected),
                },
                // a stale error that was read between the event of a reconnect and the state after it
                () = sleep(HEARTBEAT), if !self.is_up() => self.set_up(self.client.state() == ClientState::Connected),
                ended = &mut router => {
                    if self.closed.load(Ordering::Acquire) {
                        return;
                    }
                    self.set_up(false);
                    tracing::warn!(?ended, "the connection task ended; starting it again");
                    // perhaps with its runtime
                    *lock(&self.driver) = self.own.clone();
                    router = loop {
                        match self.init().await {
                            Ok(router) => break router,
                            Err(error) => tracing::debug!(%error, "cannot connect"),
                        }
                        sleep(Duration::from_millis(RECONNECT_DELAYS.1.into())).await;
                        if self.closed.load(Ordering::Acquire) {
                            return;
                        }
                    };
                    self.set_up(true);
                }
            }
        }
    }

    /// Asks a silent connection whether it lives. fred's own check never fires on an idle one, nor under load.
    async fn beat(self: Arc<Self>) {
        let mut missed = 0;
        while !self.closed.load(Ordering::Acquire) {
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
                tracing::warn!("no answer to heartbeats; reconnecting");
                self.reset().await;
            }
        }
    }

    /// Drops the connection and makes a new one.
    pub(crate) async fn reset(&self) {
        let limit = Duration::from_secs(2);
        if !matches!(timeout(limit, self.client.force_reconnection()).await, Ok(Ok(()))) {
            // a router that is stuck writing into a full socket hears nothing; the supervisor starts another
            if let Some(router) = &*lock(&self.router) {
                router.abort();
            }
        }
    }

    fn set_up(&self, up: bool) {
        self.up.send_if_modified(|was| std::mem::replace(was, up) != up);
        if up {
            let epoch = self.epoch();
            self.ready.send_if_modified(|was| std::mem::replace(was, epoch) != epoch);
        }
    }

    /// Changes whenever a new connection can be used: to its epoch. The first one, made by [`Link::connect`], counts as
    /// seen.
    #[allow(dead_code, reason = "the watchdog will renew everything after a reconnect")]
    pub(crate) fn connections(&self) -> watch::Receiver<u64> {
        self.ready.subscribe()
    }

    pub(crate) fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    /// Waits until the server can be reached.
    pub(crate) async fn wait_up(&self) {
        let _ = self.up.subscribe().wait_for(|up| *up).await;
    }

    /// How many connections were made so far. A connect counts before the first command goes over it.
    pub(crate) fn epoch(&self) -> u64 {
        use broadcast::error::TryRecvError::Lagged;
        let mut connects = lock(&self.connects);
        loop {
            match connects.try_recv() {
                Ok(_) => self.epoch.fetch_add(1, Ordering::AcqRel),
                Err(Lagged(missed)) => self.epoch.fetch_add(missed, Ordering::AcqRel),
                Err(_) => return self.epoch.load(Ordering::Acquire),
            };
        }
    }

    /// Runs a script: EVALSHA, and where the server does not know it, EVAL. Nothing else is ever sent twice.
    ///
    /// Dropped midway, the request may still execute; it was queued by the first poll, so that whatever is sent
    /// after the drop comes second.
    pub(crate) fn eval(&self, call: Call) -> impl Future<Output = Result<Value, StoreError>> + Send + '_ {
        // not an async fn: that would keep room for the whole future beside the box
        self.in_own_runtime(async move {
            if !self.is_up() {
                return Err(StoreError::new(StoreErrorKind::Unavailable, false, "not connected"));
            }
            let answer = match self.client.evalsha(call.script.sha1.as_str(), keys(&call), args(&call)).await {
                Err(error) if error.details().starts_with("NOSCRIPT") => {
                    Box::pin(self.client.eval(call.script.source, keys(&call), args(&call))).await
                }
                answer => answer,
            };
            if answer.is_ok() {
                self.alive.store(true, Ordering::Release);
            }
            answer.map_err(classify)
        })
    }

    /// Waits until everything sent before was executed. The echo is compared: fred may mix up answers.
    pub(crate) async fn barrier(&self) -> Result<(), StoreError> {
        let sent = Uuid::new_v4().to_string();
        let echo: String = self.in_own_runtime(self.client.ping(Some(sent.clone()))).await.map_err(classify)?;
        if echo != sent {
            return Err(StoreError::new(StoreErrorKind::Protocol, true, "PING was answered by something else"));
        }
        self.alive.store(true, Ordering::Release);
        Ok(())
    }

    /// Sends SUBSCRIBE. It has arrived only after a [`Link::barrier`].
    pub(crate) async fn subscribe(&self, channels: Vec<String>) -> Result<(), StoreError> {
        self.in_own_runtime(self.client.subscribe(channels)).await.map_err(classify)
    }

    /// Sends UNSUBSCRIBE.
    pub(crate) async fn unsubscribe(&self, channels: Vec<String>) -> Result<(), StoreError> {
        self.in_own_runtime(self.client.unsubscribe(channels)).await.map_err(classify)
    }

    /// Waits for an element of any of the lists, at most `limit`, and takes it away; returns its list. Nothing else may be
    /// sent over this link.
    pub(crate) async fn pop(&self, lists: &[Arc<str>], limit: Duration) -> Result<Option<Arc<str>>, StoreError> {
        let seconds = limit.as_secs_f64().to_string();
        let words = lists.iter().map(|list| &**list).chain([&*seconds]);
        // its own timeout must not come first: the element would be lost
        let timeout = limit + self.client.perf_config().default_command_timeout;
        let answer = self.custom("BLPOP", words, Some(timeout)).await?;
        Ok(match &answer {
            Value::Array(parts) => parts.first().and_then(Value::as_str).map(|list| (&*list).into()),
            _ => None,
        })
    }

    /// Pushes an element to a list, which then lives for `life`.
    pub(crate) async fn push(&self, list: &str, life: Duration) -> Result<(), StoreError> {
        let life = life.as_millis().to_string();
        let pushed = self.custom("LPUSH", [list, "1"].into_iter(), None);
        let bounded = self.custom("PEXPIRE", [list, &life].into_iter(), None);
        let (pushed, bounded) = tokio::join!(pushed, bounded);
        pushed.and(bounded).map(drop)
    }

    /// One page of SCAN, strings only: the next cursor, and keys. What is no UTF-8 is left out.
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

    /// A command that is no script and needs no repetition.
    async fn custom(
        &self,
        name: &'static str,
        words: impl Iterator<Item = &str>,
        timeout: Option<Duration>,
    ) -> Result<Value, StoreError> {
        if !self.is_up() {
            return Err(StoreError::new(StoreErrorKind::Unavailable, false, "not connected"));
        }
        let words: Vec<Value> = words.map(Value::from).collect();
        let command = CustomCommand::new_static(name, ClusterHash::FirstKey, false);
        // with_options() has no effect on scripts, but on this
        let client = self.client.with_options(&Options { timeout, ..Options::default() });
        self.in_own_runtime(client.custom(command, words)).await.map_err(classify)
    }

    /// Messages of the channels subscribed to.
    pub(crate) fn messages(&self) -> broadcast::Receiver<Message> {
        self.client.message_rx()
    }

    /// One event for each connection made.
    pub(crate) fn reconnects(&self) -> broadcast::Receiver<Server> {
        self.client.reconnect_rx()
    }

    /// Ends the connection without a word: QUIT would wait behind a BLPOP.
    pub(crate) fn abandon(&self) {
        self.closed.store(true, Ordering::Release);
        if let Some(router) = lock(&self.router).take() {
            router.abort();
        }
        self.set_up(false);
    }

    /// Ends the connection. Idempotent.
    pub(crate) async fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.in_own_runtime(async { timeout(Duration::from_millis(500), self.client.quit()).await }).await.ok();
        if let Some(router) = lock(&self.router).take() {
            router.abort();
        }
        self.set_up(false);
    }

    fn in_own_runtime<F: Future>(&self, future: F) -> InRuntime<'_, F> {
        InRuntime { runtime: &self.own, future: Box::pin(future) }
    }
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

fn keys(call: &Call) -> Vec<&str> {
    call.keys.iter().map(|key| &**key).collect()
}

fn args(call: &Call) -> Vec<Value> {
    let value = |arg: &Arg| match arg {
        Arg::Text(text) => Value::String((&**text).into()),
        Arg::Number(number) => Value::String(number.to_string().into()),
        Arg::Bytes(bytes) => bytes.as_slice().into(),
    };
    call.args.iter().map(value).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A client that sends each command once at most, with bounds on everything.
fn build(server: &FredConfig, config: &Config) -> Result<Client, StoreError> {
    let mut server = server.clone();
    server.version = RespVersion::RESP3; // pushes and answers on one connection
    server.fail_fast = true;
    let mut builder = Builder::from_config(server);
    builder.set_policy(fred::types::config::ReconnectPolicy::Exponential {
        attempts: 0,
        max_attempts: 0,
        min_delay: RECONNECT_DELAYS.0,
        max_delay: RECONNECT_DELAYS.1,
        base: 2,
        jitter: 10,
    });
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
        performance.broadcast_channel_capacity = MESSAGE_CAPACITY;
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
const REFUSALS: [(&str, StoreErrorKind); 16] = {
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
    let code = details.split([' ', ':']).next().unwrap_or("");
    let wrapped = code == "ERR" && details.contains("Error running script"); // Redis 6 and older
    for (refusal, kind) in REFUSALS {
        if code == refusal || wrapped && details.split([' ', ':', '-']).any(|word| word == refusal) {
            return (kind, false);
        }
    }
    // our own refusals come before the first write
    if details.starts_with("ERR nestlock: ") {
        return (StoreErrorKind::Other, false);
    }
    // Redis 7.0 and older say so, without a code, where a script meets the ACL. Our scripts ask before they write
    if details.contains("The user executing the script can't") {
        return (StoreErrorKind::NoPermission, false);
    }
    match kind {
        FredKind::Timeout => (StoreErrorKind::Timeout, true),
        FredKind::IO | FredKind::Canceled => (StoreErrorKind::Disconnected, true),
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(verdict(&FredKind::IO, "Connection closed."), (StoreErrorKind::Disconnected, true));
        assert_eq!(verdict(&FredKind::Timeout, "Request timed out."), (StoreErrorKind::Timeout, true));
    }
}
