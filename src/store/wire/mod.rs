//! One connection to a server, from its handshake to its end. Two independent clients implement it.
//!
//! The layers above see requests, replies, messages, and whether a request may have been executed.
//! They decide when to connect, and which epoch a connection belongs to.

mod by_fred;
mod numbered;
mod own;
mod reach;
mod resp;
mod stream;

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

#[cfg(feature = "rustls")]
use fred::bytes_utils::Str;
use fred::types::config::{Config as FredConfig, Server, ServerConfig};
use smallvec::SmallVec;
use tokio::{runtime::Handle, time::timeout};

pub(super) use self::by_fred::address;
#[cfg(feature = "fred-config")]
pub(super) use self::by_fred::client as fred_client;
use self::own::{BundlePart, Reply};
pub(crate) use self::{resp::Value, stream::has_io_here};
use super::{
    ConnectOptions,
    link::Epochs,
    master::ServiceMaster,
    refusal,
    script::{Arg, Call},
};
use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    log,
    options::Wire,
};

/// How many requests may be in flight on one connection.
const MAX_IN_FLIGHT: usize = 50_000;

/// Lower bound for the limit of the first reconnect attempt, which is a third of the lease: an
/// attempt that hangs must not cost the lease.
const AGAIN: Duration = Duration::from_secs(1);

/// How long after a refusal each write ends with a PING, so that the next refusal is proven as soon
/// as it arrives.
const REFUSED: Duration = Duration::from_secs(2);

/// The time limits of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Until {
    /// When the request was last sent.
    sent_at: Instant,
    /// From this time on the request is not sent any more, and its reply does not count.
    over: Instant,
    /// From this time on the request waits for no connection and follows no redirect. A request
    /// refused by then stays refused.
    gives_up: Option<Instant>,
}

impl Until {
    pub(super) fn new(asked: Instant, limit: Duration) -> Self {
        Self {
            sent_at: asked,
            over: asked + limit,
            gives_up: None,
        }
    }

    pub(super) fn giving_up(self, at: Option<Instant>) -> Self {
        Self {
            gives_up: at,
            ..self
        }
    }

    /// Returns how long the request may wait for a connection.
    pub(super) fn patience(self, now: Instant) -> Duration {
        let left = self.remaining(now);
        self.gives_up.map_or(left, |gives_up| {
            left.min(gives_up.saturating_duration_since(now))
        })
    }

    /// Returns whether the request may be sent at `at` and have `takes` for its reply.
    pub(super) fn has_time(self, at: Instant, takes: Duration) -> bool {
        self.gives_up.is_none_or(|gives_up| gives_up > at) && self.remaining(at) >= takes
    }

    /// Returns the limits for a retry of a request that was not executed. The deadline stays: if an
    /// acquire is not reported within one command timeout, the watchdog treats its hold as
    /// abandoned.
    pub(super) fn again(self, asked: Instant) -> Self {
        Self {
            sent_at: asked,
            ..self
        }
    }

    pub(super) fn asked(self) -> Instant {
        self.sent_at
    }

    /// Returns how much time is left.
    pub(super) fn remaining(self, now: Instant) -> Duration {
        self.over.saturating_duration_since(now)
    }

    pub(super) fn is_over(self) -> bool {
        self.sent_at >= self.over
    }
}

/// Runs code that wakes the program's tasks. A waker that panics must not affect anything else.
pub(super) fn catch_waker_panic(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        log::later!(ERROR, ; "a waker that was to be told of an answer, or of a connection, panicked");
    }
}

/// Why a request is not sent any more.
pub(super) const NOT_SENT: &str =
    "the request was not sent within a command timeout; was its future polled?";

/// A message or notice from the server that is not a reply to a request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Push<'m> {
    Message {
        channel: &'m str,
        text: &'m [u8],
    },
    /// Messages were lost on the way.
    Missed,
    /// The server has ended a subscription, because the channel's slot has moved.
    Dropped {
        channel: &'m str,
    },
}

/// A receiver of pushes.
pub(crate) type Sink = Arc<dyn Fn(Push<'_>) + Send + Sync>;

/// Why a request has no usable reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server replied with an error.
    Refused(String),
    /// The same for a request in a bundle: none of the bundle was executed, and each request is
    /// sent again alone.
    RefusedTogether(String),
    /// The connection ended before the request was sent.
    Unsent,
    /// The connection ended before the reply arrived.
    Ended,
    /// The request's time is over.
    TimedOut,
    /// The request's time is over, and it was never sent.
    LateUnsent,
    TooMany,
    /// What arrived is not a reply, or not the reply to this request.
    Nonsense(String),
    /// Anything else, and whether the request may have been executed.
    Other(StoreErrorKind, bool, String),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        use StoreErrorKind as K;
        let (kind, may_have_executed, why) = match failure {
            Failure::Refused(error) | Failure::RefusedTogether(error) => {
                return refusal::error(error);
            }
            Failure::Unsent => (
                K::Unavailable,
                false,
                "the connection ended before the request was sent".into(),
            ),
            Failure::Ended => (
                K::Disconnected,
                true,
                "the connection ended before the answer came".into(),
            ),
            Failure::TimedOut => (
                K::Timeout,
                true,
                "no answer within the command timeout".into(),
            ),
            Failure::LateUnsent => (K::Overloaded, false, NOT_SENT.into()),
            Failure::TooMany => (
                K::Overloaded,
                false,
                "too many requests are under way".into(),
            ),
            Failure::Nonsense(what) => (K::Protocol, true, what),
            Failure::Other(kind, may_have_executed, why) => (kind, may_have_executed, why),
        };
        Self::new(kind, may_have_executed, why)
    }
}

/// Why there is no connection.
#[derive(Debug)]
pub(super) struct NotConnected {
    pub(super) error: StoreError,
    /// True if nothing listens there (a closed port, no such socket): the attempt cost the server
    /// nothing.
    pub(super) nobody_listens: bool,
}

impl From<io::Error> for NotConnected {
    fn from(error: io::Error) -> Self {
        let nobody_listens = matches!(
            error.kind(),
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
        );
        let error = StoreError::new(StoreErrorKind::Disconnected, false, error);
        Self {
            error: refusal::at_connect(error),
            nobody_listens,
        }
    }
}

impl NotConnected {
    /// Converts the failure of a handshake. If that contained a password, only known words of the
    /// server's error are shown.
    fn of_handshake(failure: Failure, has_password: bool) -> Self {
        let error = match failure {
            Failure::Refused(said) if has_password => refusal::login_error(&said),
            failure => failure.into(),
        };
        Self {
            error: refusal::at_connect(error),
            nobody_listens: false,
        }
    }
}

/// Converts the failure of a query after the handshake.
impl From<Failure> for NotConnected {
    fn from(failure: Failure) -> Self {
        Self::of_handshake(failure, false)
    }
}

/// Returns whether the handshake with this server contains a password.
fn has_password(server: &FredConfig) -> bool {
    #[cfg(feature = "fred-config")]
    if server.credential_provider.is_some() {
        return true;
    }
    server.password.is_some()
}

/// A request.
#[derive(Debug, Clone, Copy)]
pub(super) enum Request<'r> {
    /// EVALSHA, or EVAL the first time, and whether messages are sharded.
    Digest(&'r Call, bool),
    /// The same with plain messages; it may be sent with others of its bundle.
    Together(&'r Call),
    /// EVAL, and whether messages are sharded.
    Source(&'r Call, bool),
    /// ASKING and EVAL, and whether messages are sharded.
    Asking(&'r Call, bool),
    Words(&'r [&'r str]),
}

/// The scripts whose texts were sent over a connection. From then on the digest is enough, since
/// the server executes requests in order; a server that has forgotten a script says so. Trying the
/// digest first would cost a round trip if the server does not know the script: a short wait does
/// not have that time.
#[derive(Debug, Default)]
pub(super) struct Texts(SmallVec<[usize; 8]>);

impl Texts {
    /// Returns how to run a script: EVAL and its text the first time, then EVALSHA and its digest.
    fn verb(
        &mut self,
        (text, digest): (&'static str, &'static str),
    ) -> (&'static str, &'static str) {
        if self.knows(text) {
            ("EVALSHA", digest)
        } else {
            self.again(text)
        }
    }

    /// Returns EVAL and the text, whether it was sent before or not.
    fn again(&mut self, text: &'static str) -> (&'static str, &'static str) {
        self.learn(text);
        ("EVAL", text)
    }

    fn knows(&self, text: &'static str) -> bool {
        // a text is created once and never moves, so its address identifies it
        self.0.contains(&(text.as_ptr() as usize))
    }

    fn learn(&mut self, text: &'static str) {
        if !self.knows(text) {
            self.0.push(text.as_ptr() as usize);
        }
    }

    /// Handles the refusal of a script. Forgets all texts if the server has forgotten one, and so
    /// perhaps others, or refused the request before it read the text.
    fn refused(&mut self, error: &str) {
        use StoreErrorKind as K;
        let unread = [
            K::NoScript,
            K::Moved,
            K::TryAgain,
            K::Busy,
            K::Loading,
            K::MasterDown,
            K::ClusterDown,
        ];
        if unread.contains(&refusal::verdict(error).0) {
            self.forget();
        }
    }

    /// Forgets all texts: a script was not sent, or perhaps not.
    fn forget(&mut self) {
        self.0.clear();
    }
}

/// A command about channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channels {
    Subscribe,
    Unsubscribe,
    /// SSUBSCRIBE, one channel at a time.
    SubscribeSharded,
    UnsubscribeSharded,
}

impl Channels {
    fn word(self) -> &'static str {
        match self {
            Self::Subscribe => "SUBSCRIBE",
            Self::Unsubscribe => "UNSUBSCRIBE",
            Self::SubscribeSharded => "SSUBSCRIBE",
            Self::UnsubscribeSharded => "SUNSUBSCRIBE",
        }
    }
}

/// A connection, by either client.
#[derive(Clone)]
pub(super) enum Connection {
    Own(Arc<own::OwnConnection>),
    Fred(Arc<by_fred::FredConnection>),
}

/// How to connect.
#[derive(Clone)]
pub(super) struct Dialer {
    pub(super) server: FredConfig,
    /// The name that each server's certificate must have.
    #[cfg(feature = "rustls")]
    pub(super) server_name: Option<Str>,
    pub(super) wire: Wire,
    pub(super) connect_timeout: Duration,
    /// Like `connect_timeout`, for the first reconnect attempt.
    pub(super) first_limit: Duration,
    pub(super) command_timeout: Duration,
    /// The connection's name in CLIENT LIST.
    pub(super) name: Arc<str>,
    /// The client's own runtime.
    pub(super) own: Handle,
    /// The runtime that reads replies, while it runs.
    pub(super) driver: Option<Handle>,
    pub(super) sink: Option<Sink>,
    pub(super) epochs: Arc<Epochs>,
    /// Whether scripts publish with SPUBLISH.
    pub(super) sharded: bool,
    /// Whether scripts may be bundled.
    pub(super) bundles: bool,
    /// Finds the server. `None`: it is always the same one.
    pub(super) master: Option<Arc<ServiceMaster>>,
}

impl Dialer {
    pub(super) fn new(dials: &ConnectOptions, driver: Option<Handle>, sink: Option<Sink>) -> Self {
        Self {
            server: dials.endpoint.server.clone(),
            #[cfg(feature = "rustls")]
            server_name: dials.endpoint.server_name.clone(),
            wire: dials.endpoint.wire(&dials.config),
            connect_timeout: dials.config.connect_timeout,
            first_limit: dials
                .config
                .connect_timeout
                .min((dials.config.watchdog_timeout / 3).max(AGAIN)),
            command_timeout: dials.config.command_timeout(),
            name: Arc::clone(&dials.name),
            own: dials.own.clone(),
            driver,
            sink,
            epochs: Arc::clone(&dials.epochs),
            sharded: false,
            bundles: dials.config.bundle,
            master: None,
        }
    }

    /// Returns the same settings for this server, whichever server is the master.
    pub(super) fn at(mut self, server: &Server) -> Self {
        let server = server.clone();
        #[cfg(feature = "rustls")]
        let server = Server {
            tls_server_name: self.server_name.clone().or(server.tls_server_name),
            ..server
        };
        self.server.server = ServerConfig::Centralized { server };
        self.master = None;
        self
    }

    /// Connects once, on the client's own runtime. The limit covers all steps: finding the master,
    /// fetching the credentials, the name's addresses, TLS and the handshake.
    pub(super) async fn connect(&self, limit: Duration) -> Result<Connection, NotConnected> {
        let attempt = async {
            match &self.master {
                Some(master) => master.connect(self).await,
                None => self.open().await,
            }
        };
        let late = |_| {
            let late = format!("no connection within {limit:?}");
            let error = StoreError::new(StoreErrorKind::Timeout, false, late);
            Err(NotConnected {
                error,
                nobody_listens: false,
            })
        };
        timeout(limit, attempt).await.unwrap_or_else(late)
    }

    /// Connects to the server in `server`. The caller sets the time limit.
    pub(super) async fn open(&self) -> Result<Connection, NotConnected> {
        match self.wire {
            Wire::Own => own::connect(self).await.map(Connection::Own),
            Wire::Fred => by_fred::connect(self).await.map(Connection::Fred),
        }
    }
}

/// Ends a connection when dropped, unless it is kept: a future that sends a query or two may be
/// dropped midway.
pub(super) struct CloseOnDrop {
    pub(super) connection: Connection,
    is_kept: bool,
}

impl CloseOnDrop {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            is_kept: false,
        }
    }

    pub(super) fn keep(mut self) -> Connection {
        self.is_kept = true;
        self.connection.clone()
    }
}

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        if !self.is_kept {
            self.connection.end();
        }
    }
}

impl Connection {
    /// Sends a request, at most once. The first poll queues it, so it comes before everything sent
    /// later.
    pub(super) async fn call(&self, request: Request<'_>, until: Until) -> Result<Value, Failure> {
        match self {
            Self::Own(own) => {
                let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
                    request.encode(number, out, texts)
                };
                let asked = match request {
                    Request::Asking(..) => own.send(until, Reply::Second, encode),
                    Request::Words(_) => own.send(until, Reply::Unnamed, encode),
                    _ => own.send(until, Reply::Script, encode),
                };
                asked?.await
            }
            Self::Fred(fred) => {
                fred.call(request, until.over.saturating_duration_since(until.sent_at))
                    .await
            }
        }
    }

    /// Subscribes or unsubscribes. Completes once the server has done so for each channel.
    pub(super) async fn channels(
        &self,
        verb: Channels,
        channels: &[String],
        until: Until,
    ) -> Result<(), Failure> {
        match self {
            Self::Own(own) => {
                let words: Vec<&str> = [verb.word()]
                    .into_iter()
                    .chain(channels.iter().map(String::as_str))
                    .collect();
                // if a slot has moved, a server replies twice, or only with an error: the PING
                // behind it marks the end
                let sharded = matches!(
                    verb,
                    Channels::SubscribeSharded | Channels::UnsubscribeSharded
                );
                let asked = if sharded {
                    own.send(until, Reply::Echo(None), |out, number, texts| {
                        Request::Words(&words).encode(number, out, texts);
                        resp::write_ping(out, number);
                        None
                    })
                } else {
                    let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
                        Request::Words(&words).encode(number, out, texts)
                    };
                    own.send(until, Reply::Pushes(channels.len()), encode)
                };
                asked?.await.map(drop)
            }
            Self::Fred(fred) => {
                let asked = fred.channels(verb, channels.to_vec()).await;
                // the PING behind it proves that it arrived
                let proven = if asked.is_ok() {
                    self.echo(until).await
                } else {
                    asked
                };
                // fred takes a refusal for the reply to another request: the connection is of no
                // use any more
                if matches!(proven, Err(Failure::Refused(_) | Failure::Nonsense(_))) {
                    fred.end();
                }
                proven
            }
        }
    }

    /// Subscribes to a channel, if that is permitted. With fred, nothing proves that it happened.
    pub(super) async fn listen(&self, channel: &str, until: Until) -> Result<(), Failure> {
        let channels = [channel.to_owned()];
        match self {
            Self::Own(_) => self.channels(Channels::Subscribe, &channels, until).await,
            // a sentinel of 6.2 refuses a PING with an argument, which would be the proof
            Self::Fred(fred) => fred.channels(Channels::Subscribe, channels.to_vec()).await,
        }
    }

    /// Sends PING with a number. A reply with another number ends the connection.
    pub(super) async fn echo(&self, until: Until) -> Result<(), Failure> {
        match self {
            Self::Own(own) => own.ping(until)?.await.map(drop),
            Self::Fred(fred) => {
                fred.echo(until.over.saturating_duration_since(until.sent_at))
                    .await
            }
        }
    }

    /// Returns whether both are the same connection.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Own(own), Self::Own(other)) => Arc::ptr_eq(own, other),
            (Self::Fred(fred), Self::Fred(other)) => Arc::ptr_eq(fred, other),
            _ => false,
        }
    }

    /// Returns whether a reply has arrived since the last call.
    pub(super) fn had_reply(&self) -> bool {
        match self {
            Self::Own(own) => own.had_reply(),
            Self::Fred(fred) => fred.had_reply(),
        }
    }

    /// Returns when the oldest request in flight was sent. Returns `None` if none is in flight, and
    /// always with fred, which does not report it.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        match self {
            Self::Own(own) => own.waits_since(),
            Self::Fred(_) => None,
        }
    }

    /// Returns the number of requests in flight. Always 0 with fred, which does not report it.
    pub(super) fn in_flight(&self) -> usize {
        match self {
            Self::Own(own) => own.in_flight(),
            Self::Fred(_) => 0,
        }
    }

    /// Makes sure that replies are read soon, whatever the user's runtime does.
    pub(super) fn prioritize(&self) {
        if let Self::Own(own) = self {
            own.prioritize();
        }
    }

    pub(super) fn end(&self) {
        match self {
            Self::Own(own) => own.end("no longer wanted"),
            Self::Fred(fred) => fred.end(),
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        match self {
            Self::Own(own) => own.has_ended(),
            Self::Fred(fred) => fred.has_ended(),
        }
    }

    /// Waits for the end of the connection. No reply arrives after it.
    pub(super) async fn ended(&self) {
        match self {
            Self::Own(own) => own.ended().await,
            Self::Fred(fred) => fred.ended().await,
        }
    }
}

impl Request<'_> {
    /// Writes the request. Returns how it can be bundled with others, or `None` if it cannot.
    fn encode(&self, number: u64, out: &mut Vec<u8>, texts: &mut Texts) -> Option<BundlePart> {
        match self {
            Self::Digest(call, sharded) => {
                call.encode(texts.verb(call.script.text(*sharded)), number, out);
            }
            Self::Together(call) => match texts.verb(call.script.text(false)) {
                ("EVAL", text) => call.encode(("EVAL", text), number, out),
                (_, digest) => return call.encode_part(digest, number, out),
            },
            Self::Source(call, sharded) => {
                call.encode(texts.again(call.script.text(*sharded).0), number, out);
            }
            Self::Asking(call, sharded) => {
                Self::Words(&["ASKING"]).encode(number, out, texts);
                Self::Source(call, *sharded).encode(number, out, texts);
            }
            Self::Words(words) => {
                resp::write_head(out, words.len());
                for word in *words {
                    resp::write_word(out, word.as_bytes());
                }
            }
        }
        None
    }
}

impl Call {
    fn encode_part(&self, digest: &str, number: u64, out: &mut Vec<u8>) -> Option<BundlePart> {
        let begin = out.len();
        self.encode_head(("EVALSHA", digest), out);
        let key = out.len();
        self.encode_keys(out);
        let args = out.len();
        self.encode_args(out);
        let end = out.len();
        resp::write_integer(out, number);
        let bundle = self.script.bundle?;
        let digit = bundle.digit(self.script)?;
        let [key, args, number] = [key, args, end].map(|at| (at - begin) as u32);
        Some(BundlePart {
            bundle,
            digit,
            key,
            args,
            number,
        })
    }

    fn encode(&self, verb: (&str, &str), number: u64, out: &mut Vec<u8>) {
        self.encode_head(verb, out);
        self.encode_keys(out);
        self.encode_args(out);
        resp::write_integer(out, number);
    }

    fn encode_head(&self, (verb, script): (&str, &str), out: &mut Vec<u8>) {
        resp::write_head(out, 4 + self.keys.len() + self.args.len());
        resp::write_word(out, verb.as_bytes());
        resp::write_word(out, script.as_bytes());
        resp::write_integer(out, self.keys.len() as u64);
    }

    fn encode_keys(&self, out: &mut Vec<u8>) {
        for key in &self.keys {
            resp::write_word(out, key.as_bytes());
        }
    }

    fn encode_args(&self, out: &mut Vec<u8>) {
        for arg in &self.args {
            match arg {
                Arg::Text(text) => resp::write_word(out, text.as_bytes()),
                Arg::ChannelOf(name) => resp::write_parts(out, &name.channel_parts()),
                Arg::Number(number) => resp::write_integer(out, *number),
                Arg::Bytes(bytes) => resp::write_word(out, bytes),
            }
        }
    }
}

/// Returns the single reply that these bytes are.
#[cfg(test)]
pub(super) fn value(bytes: &[u8]) -> Value {
    match resp::decode(bytes, &mut resp::Scan::default()) {
        Ok((resp::Frame::Value(value), length)) if length == bytes.len() => value,
        other => panic!("{other:?} of {}", String::from_utf8_lossy(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use fred::error::{Error as FredError, ErrorKind};

    use super::*;

    /// A closed port and a missing socket are distinguished from servers that are there and do not
    /// serve.
    #[test]
    fn an_error_separates_absent_servers_from_those_not_serving() {
        use std::net::{TcpListener, TcpStream};
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        // errors as the system reports them
        for connect in [
            &|| std::os::unix::net::UnixStream::connect("/nobody/is/here").map(drop),
            &|| TcpStream::connect(port).map(drop),
        ] as [&dyn Fn() -> io::Result<()>; 2]
        {
            assert!(
                NotConnected::from_fred(&FredError::from(connect().unwrap_err()), true)
                    .nobody_listens
            );
            assert!(NotConnected::from(connect().unwrap_err()).nobody_listens);
        }
        // root may open everything, so these are built as the system would report them
        let denied = || io::Error::from_raw_os_error(13);
        for error in [
            NotConnected::from(denied()),
            NotConnected::from_fred(&FredError::from(denied()), true),
        ] {
            assert_eq!(
                error.error.kind(),
                StoreErrorKind::NoPermission,
                "{}",
                error.error
            );
            assert!(
                error.error.to_string().contains("unixsocketperm"),
                "{}",
                error.error
            );
        }
        let reset = || io::Error::from(io::ErrorKind::ConnectionReset);
        assert!(!NotConnected::from(reset()).nobody_listens);
        for error in [
            FredError::from(reset()),
            FredError::new(ErrorKind::IO, "Connection closed."),
            FredError::new(ErrorKind::Timeout, "Request timed out."),
        ] {
            assert!(!NotConnected::from_fred(&error, true).nobody_listens);
        }
    }
}
