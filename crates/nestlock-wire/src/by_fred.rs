//! A connection through the `fred` crate: one fred client per connection, without a reconnect
//! policy.
//!
//! It is an independent check of everything that nestlock's own connection does: the whole test
//! suite runs on both. fred writes each script separately, so this one is slower.
//!
//! fred also confirms SUBSCRIBE before it is sent, and may take a refusal for the reply to another
//! request. So each call continues in a task of the client, which checks the reply even if its
//! caller is gone, and an error is believed once a PING behind it has returned and no reply before
//! it was another request's. For 2 s after an error, a PING follows each script.

mod config;
pub(crate) mod connector;
mod errors;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use fred::{
    clients::Client,
    error::Error as FredError,
    interfaces::{ClientLike, EventInterface, LuaInterface, PubsubInterface},
    types::{
        ClusterHash, CustomCommand, Key, Message, Value as FredValue,
        config::{Config as FredConfig, Options},
    },
};
use futures_util::{FutureExt, future::join};
use tokio::{
    runtime::Handle,
    sync::{
        broadcast::{Receiver, error::RecvError},
        watch,
    },
    task::AbortHandle,
};

use crate::{
    by_fred::{
        connector::{build, can_be_sent, reachable, set_name, start},
        errors::classify,
    },
    clock::Instant,
    connection::ForeignConnection,
    failure::{Failure, NotConnected},
    limits::REFUSED,
    numbered,
    push::{Push, Sink},
    request::{Channels, Request},
    resp::Value,
    script::{Arg, Call},
    settings::ConnectionSettings,
    texts::Texts,
    until::Until,
    wake::catch_waker_panic,
};

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

/// Ends a connection together with the task that owns this, even if the task's runtime ends.
struct EndOnDrop(Weak<FredConnection>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if let Some(connection) = self.0.upgrade() {
            connection.end();
        }
    }
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
    can_be_sent(&settings.server)?;
    let server = reachable(FredConfig::from(&settings.server)).await?;
    let client = build(settings, server)?;
    let (messages, mut connects) = (client.message_rx(), client.reconnect_rx());
    let has_password = settings.server.login.password.is_some();
    let router = start(&client)
        .await
        .map_err(|error| NotConnected::from_fred(&error, has_password))?;
    set_name(&client, settings);
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
    let ends = EndOnDrop(Arc::downgrade(&connection));
    settings.own.spawn(async move {
        let _ends = ends;
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
    });
    if let Some(sink) = settings.sink.clone() {
        settings.own.spawn(pass_messages(messages, sink));
    }
    Ok(connection)
}

/// Passes messages to the sink until the client has ended.
async fn pass_messages(mut messages: Receiver<Message>, sink: Sink) {
    loop {
        match messages.recv().await {
            Ok(message) => {
                if let Some(text) = message.value.as_bytes() {
                    let channel = &message.channel;
                    catch_waker_panic(|| sink(Push::Message { channel, text }));
                }
            }
            Err(RecvError::Lagged(_)) => catch_waker_panic(|| sink(Push::Missed)),
            Err(RecvError::Closed) => return,
        }
    }
}

impl FredConnection {
    /// Sends a request; the first poll queues it. A reply that names no request counts only once
    /// the PING behind it has got its reply, in order.
    fn request(
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
            let answer = own.spawn(call);
            // fred does not limit the time of scripts
            let over = {
                let _context = own.enter();
                tokio::time::sleep(limit)
            };
            tokio::select! {
                biased;
                answer = answer => answer.unwrap_or(Err(Failure::Ended)),
                () = over => Err(Failure::TimedOut),
            }
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
            // zero would be no limit
            timeout: Some(limit.max(Duration::from_millis(1))),
            ..Options::default()
        });
        let command = CustomCommand::new(name, ClusterHash::FirstKey, false);
        Box::pin(async move { client.custom::<FredValue, _>(command, words).await })
    }

    /// Sends PING with a number. A reply with another number ends the connection.
    async fn ping(&self, limit: Duration) -> Result<(), Failure> {
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
        match self.ping(limit).await {
            Ok(()) | Err(Failure::Refused(_)) if !*self.is_ended.borrow() => Ok(()),
            Err(Failure::TimedOut) => Err(Failure::TimedOut),
            // the PING may not have been sent, but the request before it was: that request is in
            // doubt
            _ => Err(Failure::Ended),
        }
    }

    /// Ends the connection, because replies no longer match their requests.
    fn end_shifted(&self) -> Failure {
        self.end();
        Failure::Ended
    }

    /// Subscribes or unsubscribes. fred completes this before the command is sent.
    async fn subscribe_or_not(&self, verb: Channels, channels: Vec<String>) -> Result<(), Failure> {
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
}

#[async_trait]
impl ForeignConnection for FredConnection {
    async fn call(self: Arc<Self>, request: Request<'_>, until: Until) -> Result<Value, Failure> {
        self.request(request, until.remaining(Instant::now())).await
    }

    async fn channels(
        &self,
        verb: Channels,
        channels: &[String],
        until: Until,
    ) -> Result<(), Failure> {
        let asked = self.subscribe_or_not(verb, channels.to_vec()).await;
        // the PING behind it proves that it arrived
        let proven = if asked.is_ok() {
            self.ping(until.remaining(Instant::now())).await
        } else {
            asked
        };
        // fred takes a refusal for the reply to another request: the connection is unusable from
        // now on
        if matches!(proven, Err(Failure::Refused(_) | Failure::Nonsense(_))) {
            self.end();
        }
        proven
    }

    async fn listen(&self, channel: &str) -> Result<(), Failure> {
        // a sentinel of 6.2 refuses a PING with an argument, which would be the proof
        let channels = vec![channel.to_owned()];
        self.subscribe_or_not(Channels::Subscribe, channels).await
    }

    async fn echo(&self, until: Until) -> Result<(), Failure> {
        self.ping(until.remaining(Instant::now())).await
    }

    fn had_reply(&self) -> bool {
        self.has_reply.swap(false, Ordering::AcqRel)
    }

    fn end(&self) {
        self.router.abort();
        self.is_ended.send_replace(true);
    }

    fn has_ended(&self) -> bool {
        *self.is_ended.borrow()
    }

    async fn ended(&self) {
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

#[cfg(test)]
mod tests;
