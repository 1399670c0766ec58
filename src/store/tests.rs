//! A server that a test plays: plain locks, one connection, and wake-up messages for released
//! locks.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
};

use nestlock_wire::{Arg, Call, Value};
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::{mpsc, oneshot},
};

use super::*;
use crate::{options::Config, sync::spawn};

pub(crate) mod scripts;

/// A runtime that nothing drives: spawned tasks do not run, and timers do not fire.
static STOPPED: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_time().build().unwrap());

/// A link that leads nowhere, shared by all tests.
static NOWHERE: LazyLock<Arc<Link>> = LazyLock::new(|| {
    let dial = dials("redis://127.0.0.1:1", Config::default(), stopped()).for_scripts();
    Link::new(dial, &Arc::new(Pace::new()), LinkPurpose::Requests)
});

/// Returns the options of a client that receives no messages.
pub(crate) fn dials(url: &str, config: Config, own: Handle) -> ConnectOptions {
    ConnectOptions {
        endpoint: Endpoint::from_url(url).unwrap(),
        config,
        name: NAME.into(),
        own,
        driver: None,
        sink: Arc::new(|_| {}),
        epochs: Arc::default(),
    }
}

/// The name of its connections.
pub(super) const NAME: &str = "a-name";

pub(crate) fn stopped() -> Handle {
    STOPPED.handle().clone()
}

/// The server's data.
#[derive(Debug, Default)]
struct Known {
    /// Owner and hold count of each held lock.
    records: BTreeMap<Arc<str>, (Arc<str>, u64)>,
    subscribed: BTreeSet<String>,
}

/// The server. It executes requests in order and replies, even if the caller no longer waits for
/// the reply.
#[derive(Debug)]
pub(crate) struct Server {
    known: Mutex<Known>,
    requests: mpsc::UnboundedSender<(Call, oneshot::Sender<Value>)>,
    messages: mpsc::UnboundedSender<Message>,
}

impl Server {
    pub(crate) fn start() -> (Arc<Self>, mpsc::UnboundedReceiver<Message>) {
        let (messages, published) = mpsc::unbounded_channel();
        let (requests, mut connection) = mpsc::unbounded_channel();
        let server = Arc::new(Self {
            known: Mutex::default(),
            requests,
            messages,
        });
        let executes = Arc::downgrade(&server);
        spawn(async move {
            while let Some((call, answer)) = connection.recv().await {
                let Some(server) = executes.upgrade() else {
                    return;
                };
                let _ = oneshot::Sender::send(answer, server.execute(&call));
            }
        });
        (server, published)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the owner of a lock and its hold count.
    pub(crate) fn record(&self, lock: &str) -> Option<(Arc<str>, u64)> {
        self.known().records.get(lock).cloned()
    }

    pub(crate) fn subscribe(&self, channel: &str) {
        self.known().subscribed.insert(channel.to_owned());
    }

    pub(crate) fn unsubscribe(&self, channel: &str) {
        self.known().subscribed.remove(channel);
    }

    pub(super) async fn answer(&self, call: Call) -> Result<Value, StoreError> {
        let (answer, answered) = oneshot::channel();
        let _ = self.requests.send((call, answer));
        answered
            .await
            .map_err(|_| StoreError::new(StoreErrorKind::Unavailable, true, "the test is over"))
    }

    fn execute(&self, call: &Call) -> Value {
        let known = &mut *self.known();
        let verb = call.script.source.name.rsplit('/').next().unwrap();
        match (verb, &*call.args) {
            ("acquire", [Arg::Text(owner), _, Arg::Number(holds)]) => {
                let record = known.records.get(&call.keys[0]);
                match record {
                    Some((holder, _)) if holder != owner && *holds == 1 => {
                        return Value::Array(vec![Value::Integer(0), Value::Integer(30_000)]);
                    }
                    Some((holder, _)) if holder == owner => {}
                    _ if *holds > 1 => return Value::Integer(-2),
                    _ => {}
                }
                let record = known.records.entry(Arc::clone(&call.keys[0]));
                let (_, count) = record.or_insert_with(|| (Arc::clone(owner), *holds));
                *count = (*count).max(*holds);
                Value::Integer(1)
            }
            ("release", [Arg::Text(owner), Arg::Number(holds), channel]) => {
                self.release(known, &call.keys[0], owner, *holds, channel)
            }
            ("release_together", args) => {
                let each = call.keys.iter().zip(args.chunks(2));
                let release = |(lock, args): (&Arc<str>, &[Arg])| match args {
                    [Arg::Text(owner), channel] => self.release(known, lock, owner, 0, channel),
                    _ => unreachable!("{args:?}"),
                };
                Value::Array(each.map(release).collect())
            }
            _ => unreachable!("{call:?}"),
        }
    }

    fn release(
        &self,
        known: &mut Known,
        lock: &Arc<str>,
        owner: &Arc<str>,
        holds: u64,
        channel: &Arg,
    ) -> Value {
        match known.records.get_mut(lock) {
            Some((holder, count)) if holder == owner && holds > 0 => {
                *count = holds.min(*count);
                Value::Integer(0)
            }
            Some((holder, _)) if holder == owner => {
                known.records.remove(lock);
                let channel = match channel {
                    Arg::Derived(name) => crate::keys::channel_parts(name).concat(),
                    Arg::Text(channel) => channel.to_string(),
                    other => unreachable!("{other:?}"),
                };
                if known.subscribed.contains(&channel) {
                    let _ = self.messages.send((channel, "0"));
                }
                Value::Integer(1)
            }
            _ => Value::Null,
        }
    }
}

/// A channel, and a message published there.
pub(crate) type Message = (String, &'static str);

impl Store {
    pub(crate) fn played_by(server: &Arc<Server>) -> Self {
        let dials = dials("redis://127.0.0.1:1", Config::default(), stopped());
        Self {
            servers: OnceLock::from(Servers::One(One::nowhere(&NOWHERE))),
            nowhere: OnceLock::new(),
            connect_options: Arc::new(dials),
            address: String::new(),
            played: Some(Arc::clone(server)),
        }
    }
}
