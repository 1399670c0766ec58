//! A connection through the `fred` crate: one fred client per connection, without a reconnect
//! policy.
//!
//! The configuration types come from fred, and it is an independent check of everything that the
//! own connection does: the whole test suite runs on both. fred writes each script separately, so
//! this one is slower.

use std::{
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
#[cfg(feature = "fred-config")]
use fred::types::config::{ConnectionConfig, PerformanceConfig};
use fred::{
    clients::Client,
    error::{Error as FredError, ErrorKind as FredKind},
    interfaces::{ClientLike, EventInterface, LuaInterface, PubsubInterface},
    types::{
        Builder, ClusterHash, CustomCommand, Key, RespVersion, Value as FredValue,
        config::{Config as FredConfig, Options, Server, ServerConfig},
    },
};
use futures_util::{FutureExt, future::join};
use tokio::{
    runtime::Handle,
    sync::{broadcast::error::RecvError, watch},
    task::AbortHandle,
};

#[cfg(feature = "fred-config")]
use crate::wire::error::StoreError;
use crate::{
    clock::Instant,
    wire::{
        error::StoreErrorKind,
        failure::{Failure, NotConnected},
        limits::{MAX_IN_FLIGHT, REFUSED},
        numbered,
        push::Push,
        reach, refusal,
        request::{Channels, Request},
        resp::Value,
        script::{Arg, Call},
        settings::{ConnectionSettings, has_password},
        stream::bare,
        texts::Texts,
    },
};

/// How many messages may wait for the receiver. Beyond this, fred drops the oldest and reports the
/// loss. fred has nine channels of this capacity for each client and preallocates all of them: 2.4
/// MB. With 1,024, a script that publishes 1,500 messages at once would wake every waiter.
const MESSAGE_CAPACITY: usize = 4096;
/// The same capacity for a connection without messages.
const NEWS_CAPACITY: usize = 32;

/// One connection, made by fred.
pub(crate) struct FredConnection {
    client: Client,
    /// The runtime on which fred creates timers: a caller's runtime may have none.
    own: Handle,
    router: AbortHandle,
    /// True if a reply has arrived since the last [`FredConnection::had_reply`].
    has_reply: AtomicBool,
    /// The number of the next request.
    numbers: AtomicU64,
    texts: Mutex<Texts>,
    /// When a request was last refused.
    refused: Mutex<Option<Instant>>,
    is_ended: watch::Sender<bool>,
}

impl fmt::Debug for FredConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Drop for FredConnection {
    fn drop(&mut self) {
        self.end();
    }
}

/// Connects once, on the client's own runtime. The caller sets the time limit.
pub(crate) async fn connect(
    settings: &ConnectionSettings,
) -> Result<Arc<FredConnection>, NotConnected> {
    let client = build(settings, reachable(&settings.server).await?)?;
    let (mut messages, mut connects) = (client.message_rx(), client.reconnect_rx());
    let router = client
        .init()
        .await
        .map_err(|error| NotConnected::from_fred(&error, has_password(&settings.server)))?;
    // sent without waiting for the reply: nothing depends on the name
    let (named, name) = (client.clone(), settings.name.to_string());
    settings.own.spawn(async move {
        let hello = CustomCommand::new_static("HELLO", ClusterHash::FirstKey, false);
        let _ = named
            .custom::<FredValue, _>(hello, vec!["3", "SETNAME", &name])
            .await;
    });
    let connection = Arc::new(FredConnection {
        client,
        own: settings.own.clone(),
        router: router.abort_handle(),
        has_reply: AtomicBool::new(false),
        numbers: AtomicU64::new(numbered::base() + 1),
        texts: Mutex::default(),
        refused: Mutex::default(),
        is_ended: watch::Sender::new(false),
    });
    let ends = Arc::downgrade(&connection);
    settings.own.spawn(async move {
        // without a policy, fred does not reconnect; if it did, this would be another connection
        let twice = async {
            while connects.recv().await.is_ok() {
                if connects.recv().await.is_ok() {
                    return;
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = router => {}
            () = twice => {}
        }
        if let Some(connection) = ends.upgrade() {
            connection.end();
        }
    });
    if let Some(sink) = settings.sink.clone() {
        settings.own.spawn(async move {
            loop {
                match messages.recv().await {
                    Ok(message) => {
                        if let Some(text) = message.value.as_bytes() {
                            sink(Push::Message {
                                channel: &message.channel,
                                text,
                            });
                        }
                    }
                    Err(RecvError::Lagged(_)) => sink(Push::Missed),
                    Err(RecvError::Closed) => return,
                }
            }
        });
    }
    Ok(connection)
}

impl FredConnection {
    /// Sends a request; the first poll queues it. A reply that names no request counts only once
    /// the PING behind it has got its reply, in order.
    pub(crate) fn call(
        self: &Arc<Self>,
        request: Request<'_>,
        limit: Duration,
    ) -> impl Future<Output = Result<Value, Failure>> + use<> {
        let connection = Arc::clone(self);
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (is_script, text, sending) = self.sending(&request, number, limit);
        async move {
            // a call to a client that has ended hangs
            if *connection.is_ended.borrow() {
                return Err(Failure::Unsent);
            }
            let own = connection.own.clone();
            let sending = InRuntime {
                runtime: own.clone(),
                future: sending,
            };
            let asked = Arc::clone(&connection);
            let mut call =
                Box::pin(async move { asked.answer(is_script, number, sending, limit).await });
            let at_once = call.as_mut().now_or_never();
            // the text is queued by now, so no digest is queued before it
            if let (Some(text), None | Some(Ok(_))) = (text, &at_once) {
                connection.texts().learn(text);
            }
            if let Some(answer) = at_once {
                return answer;
            }
            // the reply is checked even if the caller has dropped its future: it may prove that
            // another reply is not to be trusted
            own.spawn(call).await.unwrap_or(Err(Failure::Ended))
        }
    }

    fn texts(&self) -> MutexGuard<'_, Texts> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self) -> MutexGuard<'_, Option<Instant>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the request is a script, the script's text if that is sent, and the future
    /// that sends the request.
    fn sending(
        &self,
        request: &Request<'_>,
        number: u64,
        limit: Duration,
    ) -> (bool, Option<&'static str>, Sending) {
        let client = self.client.clone();
        let (call, may_be_known) = match request {
            Request::Digest(call, _) | Request::Together(call) => (call, true),
            Request::Source(call, _) | Request::Asking(call, _) => (call, false),
            Request::Words(words) => return (false, None, self.words(words, limit)),
        };
        let ((text, digest), keys, args) =
            (call.script.text(false), keys(call), args(call, number));
        if may_be_known && self.texts().knows(text) {
            return (
                true,
                None,
                Box::pin(async move { client.evalsha(digest, keys, args).await }),
            );
        }
        (
            true,
            Some(text),
            Box::pin(async move { client.eval(text, keys, args).await }),
        )
    }

    /// Returns the reply to a request, after proof that it belongs to that request.
    async fn answer(
        &self,
        is_script: bool,
        number: u64,
        sending: InRuntime<Sent>,
        limit: Duration,
    ) -> Result<Value, Failure> {
        let refused = *self.refused();
        let (answer, proof) = if is_script && refused.is_none_or(|at| at.elapsed() >= REFUSED) {
            (sending.await, None)
        } else {
            let (answer, proof) = join(sending, self.prove(limit)).await;
            (answer, Some(proof))
        };
        match answer.map_err(|error| classify(&error)) {
            Ok(answer) if is_script => {
                let answer =
                    numbered::reply(number, value(answer)).ok_or_else(|| self.end_shifted())?;
                self.has_reply.store(true, Ordering::Release);
                Ok(answer)
            }
            Ok(answer) => {
                proof.transpose()?;
                Ok(value(answer))
            }
            Err(Failure::Refused(error)) => {
                if is_script {
                    self.texts().refused(&error);
                }
                *self.refused() = Some(Instant::now());
                match proof {
                    Some(proof) => proof?,
                    None => self.prove(limit).await?,
                }
                Err(Failure::Refused(error))
            }
            Err(failure) => {
                if is_script {
                    self.texts().forget();
                }
                Err(failure)
            }
        }
    }

    /// Sends these words. The first poll queues them.
    fn words(&self, words: &[&str], limit: Duration) -> Sending {
        let mut words = words.iter().map(|word| (*word).to_owned());
        let name = words.next().unwrap_or_default();
        let words: Vec<FredValue> = words.map(FredValue::from).collect();
        // fred applies these options to custom commands, but not to scripts
        let client = self.client.with_options(&Options {
            timeout: Some(limit),
            ..Options::default()
        });
        let command = CustomCommand::new(name, ClusterHash::FirstKey, false);
        Box::pin(async move { client.custom::<FredValue, _>(command, words).await })
    }

    /// Sends PING with a number. A reply with another number ends the connection.
    pub(crate) async fn echo(&self, limit: Duration) -> Result<(), Failure> {
        if *self.is_ended.borrow() {
            return Err(Failure::Unsent);
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let sending = self.words(&["PING", &number.to_string()], limit);
        let answer = InRuntime {
            runtime: self.own.clone(),
            future: sending,
        }
        .await
        .map_err(|error| classify(&error))?;
        if !numbered::is_pong(number, &value(answer)) {
            return Err(self.end_shifted());
        }
        self.has_reply.store(true, Ordering::Release);
        Ok(())
    }

    /// Proves that the replies so far belong to their requests. A PING that is refused in order
    /// proves as much.
    async fn prove(&self, limit: Duration) -> Result<(), Failure> {
        match self.echo(limit).await {
            Ok(()) | Err(Failure::Refused(_)) if !*self.is_ended.borrow() => Ok(()),
            Err(Failure::TimedOut) => Err(Failure::TimedOut),
            // the PING may not have been sent, but the request that it was to prove was: that one
            // is in doubt
            _ => Err(Failure::Ended),
        }
    }

    /// Ends the connection, because replies no longer match their requests.
    fn end_shifted(&self) -> Failure {
        self.end();
        Failure::Ended
    }

    /// Subscribes or unsubscribes. fred completes this before the command is sent.
    pub(crate) async fn channels(
        &self,
        verb: Channels,
        channels: Vec<String>,
    ) -> Result<(), Failure> {
        // a call to a client that has ended hangs
        if *self.is_ended.borrow() {
            return Err(Failure::Unsent);
        }
        let client = self.client.clone();
        let asked = async move {
            match verb {
                Channels::Subscribe => client.subscribe(channels).await,
                Channels::Unsubscribe => client.unsubscribe(channels).await,
                Channels::SubscribeSharded => client.ssubscribe(channels).await,
                Channels::UnsubscribeSharded => client.sunsubscribe(channels).await,
            }
        };
        let asked = InRuntime {
            runtime: self.own.clone(),
            future: Box::pin(asked),
        };
        asked.await.map_err(|error| classify(&error))
    }

    pub(crate) fn had_reply(&self) -> bool {
        self.has_reply.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn end(&self) {
        self.router.abort();
        self.is_ended.send_replace(true);
    }

    pub(crate) fn has_ended(&self) -> bool {
        *self.is_ended.borrow()
    }

    pub(crate) async fn ended(&self) {
        let _ = self.is_ended.subscribe().wait_for(|ended| *ended).await;
    }
}

type Sent = dyn Future<Output = Result<FredValue, FredError>> + Send;
type Sending = Pin<Box<Sent>>;

/// Polls a future inside a runtime's context, wherever it is awaited: fred creates timers in the
/// context that polls it.
struct InRuntime<F: ?Sized> {
    runtime: Handle,
    future: Pin<Box<F>>,
}

impl<F: Future + ?Sized> Future for InRuntime<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let _context = this.runtime.enter();
        this.future.as_mut().poll(cx)
    }
}

/// Returns a text as bytes that fred does not copy. A borrowed text would cost a copy, and one more
/// allocation to share the copy.
fn shared(text: &Arc<str>) -> Bytes {
    Bytes::from_owner(Arc::<[u8]>::from(Arc::clone(text)))
}

fn keys(call: &Call) -> Vec<Key> {
    call.keys.iter().map(|key| shared(key).into()).collect()
}

/// Returns a script's arguments, followed by the number of the request.
fn args(call: &Call, number: u64) -> Vec<FredValue> {
    let bytes = |arg: &Arg| match arg {
        Arg::Text(text) => shared(text),
        Arg::Derived(name) => (call.script.derive)(name).concat().into(),
        Arg::Number(number) => number.to_string().into(),
        Arg::Bytes(bytes) => Bytes::copy_from_slice(bytes),
    };
    let args = call.args.iter().map(|arg| FredValue::Bytes(bytes(arg)));
    args.chain([number.to_string().into()]).collect()
}

fn value(value: FredValue) -> Value {
    match value {
        FredValue::Null => Value::Null,
        FredValue::Integer(number) => Value::Integer(number),
        FredValue::String(text) => Value::Text(text.as_bytes().to_vec()),
        FredValue::Bytes(bytes) => Value::Text(bytes.to_vec()),
        FredValue::Array(parts) => Value::Array(parts.into_iter().map(self::value).collect()),
        _ => Value::Other,
    }
}

/// Returns the configuration with the address that accepts connections: fred would wait for a
/// name's addresses one after the other.
async fn reachable(server: &FredConfig) -> io::Result<FredConfig> {
    let mut server = server.clone();
    if let ServerConfig::Centralized { server: at } = &mut server.server
        && let Some(address) = reach::which(bare(&at.host), at.port).await?
    {
        let known = Server::new(address.ip().to_string(), at.port);
        #[cfg(feature = "rustls")]
        let known = Server {
            tls_server_name: at.tls_server_name.clone().or_else(|| Some(at.host.clone())),
            ..known
        };
        *at = known;
    }
    Ok(server)
}

/// Builds a client that sends each command at most once, with limits on everything.
fn build(settings: &ConnectionSettings, mut server: FredConfig) -> Result<Client, NotConnected> {
    server.version = RespVersion::RESP3; // pushes and answers on one connection
    server.fail_fast = true;
    let mut builder = Builder::from_config(server);
    // no reconnect policy: `Pace` has one, for all links
    builder.with_connection_config(|connection| {
        connection.max_command_attempts = 1; // a replayed release would free the next hold: never
        connection.max_redirections = 0;
        connection.connection_timeout = settings.connect_timeout;
        connection.internal_command_timeout = settings.connect_timeout.min(Duration::from_secs(2));
        connection.max_command_buffer_len = MAX_IN_FLIGHT;
        connection.tcp.nodelay = Some(true);
    });
    builder.with_performance_config(|performance| {
        performance.default_command_timeout = settings.command_timeout;
        performance.broadcast_channel_capacity = if settings.sink.is_some() {
            MESSAGE_CAPACITY
        } else {
            NEWS_CAPACITY
        };
    });
    builder
        .build()
        .map_err(|error| NotConnected::from_fred(&error, false))
}

/// Connects a client for the caller's own queries, as nestlock's own are connected: to the address
/// that accepts connections, and with no password in an error.
#[cfg(feature = "fred-config")]
pub(crate) async fn client(
    server: &FredConfig,
    performance: PerformanceConfig,
    connection: ConnectionConfig,
) -> Result<Client, StoreError> {
    let connected = async {
        let client = Client::new(
            reachable(server).await?,
            Some(performance),
            Some(connection),
            None,
        );
        client
            .init()
            .await
            .map_err(|error| NotConnected::from_fred(&error, has_password(server)))?;
        Ok(client)
    };
    connected
        .await
        .map_err(|failed: NotConnected| failed.error.before_any_request())
}

impl NotConnected {
    /// Converts fred's error, which contains the system's error only as text.
    pub(crate) fn from_fred(error: &FredError, has_password: bool) -> Self {
        let is_of = |kind| error.details().contains(&format!("kind: {kind}"));
        let nobody_listens = ["ConnectionRefused", "NotFound"].into_iter().any(is_of);
        let is_servers = match error.kind() {
            FredKind::IO => false,
            #[cfg(feature = "rustls")]
            FredKind::Tls => false,
            _ => true,
        };
        let failure = match classify(error) {
            // the text may be the server's, and quote the password
            Failure::Other(..) if has_password && is_servers => {
                Failure::Refused(error.details().to_owned())
            }
            failure => failure,
        };
        Self {
            nobody_listens,
            ..Self::of_handshake(failure, has_password)
        }
    }
}

/// Sorts fred's errors by whether the request may have been executed: yes, unless the opposite is
/// proven.
fn classify(error: &FredError) -> Failure {
    let details = error.details();
    match error.kind() {
        // fred ends the connection on this error, and reports it to every request in flight,
        // executed or not
        _ if refusal::verdict(details).0 == StoreErrorKind::ClusterDown => {
            Failure::Other(StoreErrorKind::ClusterDown, true, error.to_string())
        }
        _ if refusal::is_known(details) => Failure::Refused(details.to_owned()),
        FredKind::Timeout => Failure::TimedOut,
        FredKind::IO => Failure::Other(StoreErrorKind::Disconnected, true, error.to_string()),
        // still queued when the connection ended: fred drops the queue, and reports this to each
        // request
        FredKind::Canceled => Failure::Unsent,
        FredKind::Backpressure => Failure::TooMany,
        FredKind::Auth => Failure::Other(StoreErrorKind::Auth, false, error.to_string()),
        FredKind::Protocol | FredKind::Parse => Failure::Nonsense(error.to_string()),
        FredKind::Routing | FredKind::Unknown
            if details.starts_with("Failed to route command")
                || details.starts_with("Failed to send command to router")
                || details.starts_with("Client is not initialized")
                || details.starts_with("Too many redirections") =>
        {
            Failure::Other(StoreErrorKind::Unavailable, false, error.to_string())
        }
        // fred's router ended while the request was in flight, or could not write to a connection
        // that is gone
        FredKind::Unknown
            if details == "channel closed"
                || details.starts_with("Too many failed write attempts") =>
        {
            Failure::Ended
        }
        _ => Failure::Other(StoreErrorKind::Other, true, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use bytes::{Buf, BytesMut};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
        sync::mpsc,
    };

    use super::*;
    use crate::{
        options::Config,
        store::tests::{call, dials},
        wire::resp::{self, Frame, Scan},
    };

    #[test]
    fn a_router_that_was_ended_is_a_connection_that_ended() {
        for details in ["channel closed", "Too many failed write attempts."] {
            assert_eq!(
                classify(&FredError::new(FredKind::Unknown, details)),
                Failure::Ended,
                "{details}"
            );
        }
        let unknown = classify(&FredError::new(FredKind::Unknown, "something else"));
        assert!(
            matches!(unknown, Failure::Other(StoreErrorKind::Other, true, _)),
            "{unknown:?}"
        );
    }

    /// Plays a server: replies to the handshake and to scripts, and reports each EVAL or EVALSHA,
    /// and the HELLO with the connection's name.
    async fn play(
        listener: TcpListener,
        scripts: mpsc::UnboundedSender<String>,
        says: fn(usize, &str) -> Option<String>,
    ) {
        let (mut stream, mut come, mut scan, mut many) = (
            listener.accept().await.unwrap().0,
            BytesMut::new(),
            Scan::default(),
            0,
        );
        loop {
            // fred sends HELLO as a line
            let is_line =
                come.first().is_some_and(|first| *first != b'*') && come.ends_with(b"\r\n");
            let words = match resp::decode(&come, &mut scan) {
                _ if is_line => {
                    come.clear();
                    vec![Value::text("HELLO")]
                }
                Ok((Frame::Value(Value::Array(words)), length)) => {
                    come.advance(length);
                    words
                }
                _ if stream.read_buf(&mut come).await.unwrap_or(0) == 0 => return,
                _ => continue,
            };
            let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
            let reply = match &*words {
                ["HELLO", rest @ ..] => {
                    let _ = if rest.is_empty() {
                        Ok(())
                    } else {
                        scripts.send("HELLO".to_owned())
                    };
                    Some("%1\r\n$5\r\nproto\r\n:3\r\n".into())
                }
                ["INFO", ..] => Some("+redis_version:7.0.15\r\n".into()),
                ["CLIENT", "ID"] => Some(":1\r\n".into()),
                ["PING", word] => Some(format!("+{word}\r\n")),
                [verb @ ("EVAL" | "EVALSHA"), .., number] => {
                    many += 1;
                    let _ = scripts.send((*verb).to_owned());
                    says(many, number)
                }
                _ => Some("+OK\r\n".into()),
            };
            let _ = stream.write_all(reply.unwrap_or_default().as_bytes()).await;
        }
    }

    /// Connects to a server whose reply to the n-th script is `says(n, number)`, counted from 1.
    /// Also returns the commands that run scripts there.
    async fn connected(
        says: fn(usize, &str) -> Option<String>,
    ) -> (Arc<FredConnection>, mpsc::UnboundedReceiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let (scripts, mut run) = mpsc::unbounded_channel();
        tokio::spawn(play(listener, scripts, says));
        let dial = dials(&url, Config::default(), Handle::current()).for_scripts();
        let connection = connect(&dial.settings)
            .await
            .unwrap_or_else(|refused| panic!("{refused:?}"));
        // the HELLO with the name, which the client does not wait for
        assert_eq!(run.recv().await.unwrap(), "HELLO");
        (connection, run)
    }

    /// Returns what a script that does nothing replies to the request of this number.
    fn well(number: &str) -> Option<String> {
        number
            .parse::<i64>()
            .ok()
            .map(|number| format!(":{}\r\n", number * 16))
    }

    const LONG: Duration = Duration::from_secs(30);

    /// The request that is created first is not always queued first.
    #[tokio::test]
    async fn no_digest_is_queued_before_its_text() {
        let (connection, mut run) = connected(|_, number| well(number)).await;
        let call = call("l");
        let never = connection.call(Request::Digest(&call, false), LONG);
        let late = connection.call(Request::Digest(&call, false), LONG);
        drop(never);
        for asked in [connection.call(Request::Digest(&call, false), LONG), late] {
            assert!(asked.await.is_ok());
            assert_eq!(run.recv().await.unwrap(), "EVAL");
        }
        assert!(
            connection
                .call(Request::Digest(&call, false), LONG)
                .await
                .is_ok()
        );
        assert_eq!(run.recv().await.unwrap(), "EVALSHA");
    }

    /// The call that sent the text was dropped, and the server refused it without reading the text.
    #[tokio::test]
    async fn a_text_goes_again_after_a_call_that_was_dropped() {
        let refuses = |many, number: &str| {
            if many == 1 {
                Some("-LOADING x\r\n".into())
            } else {
                well(number)
            }
        };
        let (connection, mut run) = connected(refuses).await;
        let call = call("l");
        let mut dropped = Box::pin(connection.call(Request::Digest(&call, false), LONG));
        assert!(dropped.as_mut().now_or_never().is_none());
        drop(dropped);
        // a spawned task reads the reply to the dropped call
        while connection.texts().knows(call.script.text(false).0) {
            tokio::task::yield_now().await;
        }
        assert!(
            connection
                .call(Request::Digest(&call, false), LONG)
                .await
                .is_ok()
        );
        assert_eq!(
            [run.recv().await.unwrap(), run.recv().await.unwrap()],
            ["EVAL"; 2]
        );
    }

    /// The text may or may not have arrived.
    #[tokio::test]
    async fn a_text_goes_again_after_a_call_that_failed() {
        let (connection, mut run) =
            connected(|many, number| if many == 1 { None } else { well(number) }).await;
        let call = call("l");
        let late = connection.call(Request::Digest(&call, false), LONG).await;
        assert_eq!(late, Err(Failure::TimedOut));
        // the peer swallowed a reply, so its later ones are not trusted; the request is still sent
        let _ = connection.call(Request::Digest(&call, false), LONG).await;
        assert_eq!(
            [run.recv().await.unwrap(), run.recv().await.unwrap()],
            ["EVAL"; 2]
        );
    }
}
