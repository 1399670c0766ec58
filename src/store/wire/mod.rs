//! The seam: one connection to a server, from its handshake to its end. Two independent clients stand behind it.
//!
//! What is above sees requests, answers, messages, and whether a request may have been executed; it decides when to
//! connect, and to which epoch a connection belongs.

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
use self::own::{Part, Reply};
pub(crate) use self::{resp::Value, stream::has_io_here};
use super::{
    Dials,
    link::Epochs,
    master::Master,
    refusal,
    script::{Arg, Call},
};
use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    log,
    options::Wire,
};

/// How many requests may be under way on one connection.
const MOST_UNDER_WAY: usize = 50_000;

/// The first attempt to connect again has a third of the lease, and no less than this: one that hangs costs no lease.
const AGAIN: Duration = Duration::from_secs(1);

/// How long a PING stands behind all that is written after something was refused: the next refusal is proven as soon as it comes.
const REFUSED: Duration = Duration::from_secs(2);

/// The time of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Until {
    /// When it was asked.
    asked: Instant,
    /// From then on it is not sent any more, and its answer counts no more.
    over: Instant,
    /// From then on it waits for no connection, and is sent nowhere else: what was refused until then was refused.
    gives_up: Option<Instant>,
}

impl Until {
    pub(super) fn new(asked: Instant, limit: Duration) -> Self {
        Self { asked, over: asked + limit, gives_up: None }
    }

    pub(super) fn giving_up(self, at: Option<Instant>) -> Self {
        Self { gives_up: at, ..self }
    }

    /// How long it may wait for a connection.
    pub(super) fn patience(self, now: Instant) -> Duration {
        let left = self.left(now);
        self.gives_up.map_or(left, |gives_up| left.min(gives_up.saturating_duration_since(now)))
    }

    /// Whether it may be sent at this time, and have so long for its answer.
    pub(super) fn has_time(self, at: Instant, takes: Duration) -> bool {
        self.gives_up.is_none_or(|gives_up| gives_up > at) && self.left(at) >= takes
    }

    /// Asked again, as it was not executed: it has no more time for that. The watchdog takes what an acquire holds, and has
    /// not told after a command timeout, for nobody's.
    pub(super) fn again(self, asked: Instant) -> Self {
        Self { asked, ..self }
    }

    pub(super) fn asked(self) -> Instant {
        self.asked
    }

    /// How much of it is left.
    pub(super) fn left(self, now: Instant) -> Duration {
        self.over.saturating_duration_since(now)
    }

    pub(super) fn is_over(self) -> bool {
        self.asked >= self.over
    }
}

/// Runs what wakes tasks of the program's: a waker that panics there harms nobody else.
pub(super) fn contain(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        log::later!(ERROR, ; "a waker that was to be told of an answer, or of a connection, panicked");
    }
}

/// Why a request is not sent any more.
pub(super) const NOT_SENT: &str = "the request was not sent within a command timeout; was its future polled?";

/// What comes over a connection, and was not asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Heard<'m> {
    Message {
        channel: &'m str,
        text: &'m [u8],
    },
    /// Messages were lost on the way.
    Missed,
    /// The server has ended a subscription: its slot has moved.
    Dropped {
        channel: &'m str,
    },
}

/// Who listens.
pub(crate) type Sink = Arc<dyn Fn(Heard<'_>) + Send + Sync>;

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failure {
    /// The server's answer is an error.
    Refused(String),
    /// The same to what went together with others: none of it was executed, and each is asked alone.
    RefusedTogether(String),
    /// The connection ended before the request was sent.
    Unsent,
    /// The connection ended before the answer came.
    Ended,
    /// The time for it is over.
    Late,
    /// The same, and it was never sent.
    LateUnsent,
    TooMany,
    /// What came is no answer, or none of this request's.
    Nonsense(String),
    /// Anything else; whether it may have been executed.
    Other(StoreErrorKind, bool, String),
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        use StoreErrorKind as K;
        let (kind, may_have_executed, why) = match failure {
            Failure::Refused(error) | Failure::RefusedTogether(error) => return refusal::error(error),
            Failure::Unsent => (K::Unavailable, false, "the connection ended before the request was sent".into()),
            Failure::Ended => (K::Disconnected, true, "the connection ended before the answer came".into()),
            Failure::Late => (K::Timeout, true, "no answer within the command timeout".into()),
            Failure::LateUnsent => (K::Overloaded, false, NOT_SENT.into()),
            Failure::TooMany => (K::Overloaded, false, "too many requests are under way".into()),
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
    /// The attempt cost nobody anything.
    pub(super) nobody_listens: bool,
}

impl From<io::Error> for NotConnected {
    fn from(error: io::Error) -> Self {
        let nobody_listens = matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound);
        let error = StoreError::new(StoreErrorKind::Disconnected, false, error);
        Self { error: refusal::at_connect(error), nobody_listens }
    }
}

impl NotConnected {
    /// The failure of a handshake, which has a password in it, or none.
    fn of_handshake(failure: Failure, has_password: bool) -> Self {
        let error = match failure {
            Failure::Refused(said) if has_password => refusal::login_error(&said),
            failure => failure.into(),
        };
        Self { error: refusal::at_connect(error), nobody_listens: false }
    }
}

/// Of a question behind the handshake.
impl From<Failure> for NotConnected {
    fn from(failure: Failure) -> Self {
        Self::of_handshake(failure, false)
    }
}

/// Whether the handshake with it has a password in it.
fn has_password(server: &FredConfig) -> bool {
    #[cfg(feature = "fred-config")]
    if server.credential_provider.is_some() {
        return true;
    }
    server.password.is_some()
}

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub(super) enum Request<'r> {
    /// EVALSHA, or EVAL for the first time, and whether messages are sharded.
    Digest(&'r Call, bool),
    /// The same, which may go together with others of its bundle.
    Together(&'r Call),
    /// EVAL, and the same.
    Source(&'r Call, bool),
    /// ASKING and EVAL, and the same.
    Asking(&'r Call, bool),
    Words(&'r [&'r str]),
}

/// The scripts whose texts were sent over a connection: from then on their digests do, as what is asked first is executed first. A
/// server that has forgotten one says so. To ask by the digest first would cost a round trip where the server does not know it: more
/// than a short wait has.
#[derive(Debug, Default)]
pub(super) struct Texts(SmallVec<[usize; 8]>);

impl Texts {
    /// What runs a script: its text, once, then its digest.
    fn verb(&mut self, (text, digest): (&'static str, &'static str)) -> (&'static str, &'static str) {
        if self.knows(text) { ("EVALSHA", digest) } else { self.again(text) }
    }

    /// The text of a script, which goes along in any case.
    fn again(&mut self, text: &'static str) -> (&'static str, &'static str) {
        self.learn(text);
        ("EVAL", text)
    }

    fn knows(&self, text: &'static str) -> bool {
        // a text is made once, and stays where it is
        self.0.contains(&(text.as_ptr() as usize))
    }

    fn learn(&mut self, text: &'static str) {
        if !self.knows(text) {
            self.0.push(text.as_ptr() as usize);
        }
    }

    /// A script was refused: by a server that has forgotten it, and so others; or before its text was read.
    fn refused(&mut self, error: &str) {
        use StoreErrorKind as K;
        let unread = [K::NoScript, K::Moved, K::TryAgain, K::Busy, K::Loading, K::MasterDown, K::ClusterDown];
        if unread.contains(&refusal::verdict(error).0) {
            self.forget();
        }
    }

    /// A script was not sent, or perhaps not.
    fn forget(&mut self) {
        self.0.clear();
    }
}

/// What is asked about channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Channels {
    Subscribe,
    Unsubscribe,
    /// SSUBSCRIBE: one channel each time.
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

/// A connection.
#[derive(Clone)]
pub(super) enum Connection {
    Own(Arc<own::Connection>),
    Fred(Arc<by_fred::Connection>),
}

/// How to connect.
#[derive(Clone)]
pub(super) struct Dial {
    pub(super) server: FredConfig,
    /// What each server's certificate must have.
    #[cfg(feature = "rustls")]
    pub(super) server_name: Option<Str>,
    pub(super) wire: Wire,
    pub(super) connect_timeout: Duration,
    /// The same for the first attempt to connect again.
    pub(super) first_limit: Duration,
    pub(super) command_timeout: Duration,
    /// What the connection is called, for whoever reads CLIENT LIST.
    pub(super) name: Arc<str>,
    /// The client's own runtime.
    pub(super) own: Handle,
    /// The runtime that reads answers, while it runs.
    pub(super) driver: Option<Handle>,
    pub(super) sink: Option<Sink>,
    pub(super) epochs: Arc<Epochs>,
    /// Whether scripts publish with SPUBLISH.
    pub(super) sharded: bool,
    /// Whether scripts may go together.
    pub(super) bundles: bool,
    /// Who knows where the server is by now; `None`: it is always the same one.
    pub(super) master: Option<Arc<Master>>,
}

impl Dial {
    pub(super) fn new(dials: &Dials, driver: Option<Handle>, sink: Option<Sink>) -> Self {
        Self {
            server: dials.endpoint.server.clone(),
            #[cfg(feature = "rustls")]
            server_name: dials.endpoint.server_name.clone(),
            wire: dials.endpoint.wire(&dials.config),
            connect_timeout: dials.config.connect_timeout,
            first_limit: dials.config.connect_timeout.min((dials.config.watchdog_timeout / 3).max(AGAIN)),
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

    /// The same to this server, whichever is the master.
    pub(super) fn at(mut self, server: &Server) -> Self {
        let server = server.clone();
        #[cfg(feature = "rustls")]
        let server = Server { tls_server_name: self.server_name.clone().or(server.tls_server_name), ..server };
        self.server.server = ServerConfig::Centralized { server };
        self.master = None;
        self
    }

    /// Connects, once, within this limit for all that it takes: who the master is, the login from who provides it, the name's
    /// addresses, TLS, the handshake. On the client's own runtime.
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
            Err(NotConnected { error, nobody_listens: false })
        };
        timeout(limit, attempt).await.unwrap_or_else(late)
    }

    /// Connects to the server that is written here. The caller limits it.
    pub(super) async fn open(&self) -> Result<Connection, NotConnected> {
        match self.wire {
            Wire::Own => own::connect(self).await.map(Connection::Own),
            Wire::Fred => by_fred::connect(self).await.map(Connection::Fred),
        }
    }
}

/// Ends a connection that nobody keeps: whoever asks a question or two may be given up midway.
pub(super) struct Ends {
    pub(super) connection: Connection,
    is_kept: bool,
}

impl Ends {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection, is_kept: false }
    }

    pub(super) fn keep(mut self) -> Connection {
        self.is_kept = true;
        self.connection.clone()
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if !self.is_kept {
            self.connection.end();
        }
    }
}

impl Connection {
    /// Sends a request: before the first poll is over, it comes before whatever is asked later. Nothing is sent twice.
    pub(super) async fn call(&self, request: Request<'_>, until: Until) -> Result<Value, Failure> {
        match self {
            Self::Own(own) => {
                let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| request.encode(number, out, texts);
                let asked = match request {
                    Request::Asking(..) => own.ask(until, Reply::Second, encode),
                    Request::Words(_) => own.ask(until, Reply::Unnamed, encode),
                    _ => own.ask(until, Reply::Script, encode),
                };
                asked?.await
            }
            Self::Fred(fred) => fred.call(request, until.over.saturating_duration_since(until.asked)).await,
        }
    }

    /// Subscribes, or unsubscribes. Answered when the server has done so of each channel.
    pub(super) async fn channels(&self, verb: Channels, channels: &[String], until: Until) -> Result<(), Failure> {
        match self {
            Self::Own(own) => {
                let words: Vec<&str> = [verb.word()].into_iter().chain(channels.iter().map(String::as_str)).collect();
                // where a slot has moved, a server answers twice, or with an error alone: what is asked next ends it
                let sharded = matches!(verb, Channels::SubscribeSharded | Channels::UnsubscribeSharded);
                let asked = if sharded {
                    own.ask(until, Reply::Echo(None), |out, number, texts| {
                        Request::Words(&words).encode(number, out, texts);
                        resp::write_ping(out, number);
                        None
                    })
                } else {
                    let encode = |out: &mut Vec<u8>, number, texts: &mut Texts| {
                        Request::Words(&words).encode(number, out, texts)
                    };
                    own.ask(until, Reply::Pushes(channels.len()), encode)
                };
                asked?.await.map(drop)
            }
            Self::Fred(fred) => {
                let asked = fred.channels(verb, channels.to_vec()).await;
                // what is asked next proves that it arrived
                let proven = if asked.is_ok() { self.echo(until).await } else { asked };
                // fred takes a refusal for another answer: the connection is of no use any more
                if matches!(proven, Err(Failure::Refused(_) | Failure::Nonsense(_))) {
                    fred.end();
                }
                proven
            }
        }
    }

    /// Subscribes to a channel, if that is allowed, and proves nothing.
    pub(super) async fn listen(&self, channel: &str, until: Until) -> Result<(), Failure> {
        let channels = [channel.to_owned()];
        match self {
            Self::Own(_) => self.channels(Channels::Subscribe, &channels, until).await,
            // a sentinel of 6.2 refuses a PING with a word, which would be the proof
            Self::Fred(fred) => fred.channels(Channels::Subscribe, channels.to_vec()).await,
        }
    }

    /// Sends PING with a word. Another word ends the connection.
    pub(super) async fn echo(&self, until: Until) -> Result<(), Failure> {
        match self {
            Self::Own(own) => own.ping(until)?.await.map(drop),
            Self::Fred(fred) => fred.echo(until.over.saturating_duration_since(until.asked)).await,
        }
    }

    /// Whether both are one.
    pub(super) fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Own(own), Self::Own(other)) => Arc::ptr_eq(own, other),
            (Self::Fred(fred), Self::Fred(other)) => Arc::ptr_eq(fred, other),
            _ => false,
        }
    }

    /// Whether an answer came since this was asked last.
    pub(super) fn was_heard(&self) -> bool {
        match self {
            Self::Own(own) => own.was_heard(),
            Self::Fred(fred) => fred.was_heard(),
        }
    }

    /// Since when the oldest request is not answered; fred does not say.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        match self {
            Self::Own(own) => own.waits_since(),
            Self::Fred(_) => None,
        }
    }

    /// Requests that are not answered yet; fred does not say.
    pub(super) fn under_way(&self) -> usize {
        match self {
            Self::Own(own) => own.under_way(),
            Self::Fred(_) => 0,
        }
    }

    /// Answers are needed soon, whatever becomes of the user's runtime.
    pub(super) fn hurry(&self) {
        if let Self::Own(own) = self {
            own.hurry();
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

    /// Waits for the end: no answer comes after it.
    pub(super) async fn ended(&self) {
        match self {
            Self::Own(own) => own.ended().await,
            Self::Fred(fred) => fred.ended().await,
        }
    }
}

impl Request<'_> {
    /// How it may go together with others, if it may.
    fn encode(&self, number: u64, out: &mut Vec<u8>, texts: &mut Texts) -> Option<Part> {
        match self {
            Self::Digest(call, sharded) => call.encode(texts.verb(call.script.text(*sharded)), number, out),
            Self::Together(call) => match texts.verb(call.script.text(false)) {
                ("EVAL", text) => call.encode(("EVAL", text), number, out),
                (_, digest) => return call.encode_part(digest, number, out),
            },
            Self::Source(call, sharded) => call.encode(texts.again(call.script.text(*sharded).0), number, out),
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
    fn encode_part(&self, digest: &str, number: u64, out: &mut Vec<u8>) -> Option<Part> {
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
        Some(Part { bundle, digit, key, args, number })
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

/// The one answer that these bytes are.
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

    #[test]
    fn a_closed_port_and_a_missing_socket_are_told_from_servers_that_do_not_serve() {
        use std::net::{TcpListener, TcpStream};
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        // as the system tells it
        for connect in [&|| std::os::unix::net::UnixStream::connect("/nobody/is/here").map(drop), &|| {
            TcpStream::connect(port).map(drop)
        }] as [&dyn Fn() -> io::Result<()>; 2]
        {
            assert!(NotConnected::from_fred(&FredError::from(connect().unwrap_err()), true).nobody_listens);
            assert!(NotConnected::from(connect().unwrap_err()).nobody_listens);
        }
        // root may open all: as the system would say it
        let denied = || io::Error::from_raw_os_error(13);
        for error in [NotConnected::from(denied()), NotConnected::from_fred(&FredError::from(denied()), true)] {
            assert_eq!(error.error.kind(), StoreErrorKind::NoPermission, "{}", error.error);
            assert!(error.error.to_string().contains("unixsocketperm"), "{}", error.error);
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
