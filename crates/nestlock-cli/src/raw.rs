//! Questions to the server that are about no one lock: a connection of fred's, and words.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::{ClientLike, EventInterface, PubsubInterface},
    types::{
        ClusterHash, CustomCommand, Message, Value,
        config::{Config, ConnectionConfig, PerformanceConfig},
    },
};

use nestlock::permissions::{EVERY_CLIENT, KINDS, rule};
use tokio::{
    sync::broadcast::{Receiver as BroadcastReceiver, error::TryRecvError},
    time::timeout,
};

use crate::{Failure, args::Server, connect::CONNECT_TIMEOUT};

/// What an answer may take, of a server that has many others to serve.
const LIMIT: Duration = Duration::from_secs(10);
/// Whoever may listen hears what is said within this time, be the server far away and busy.
const HEARD: Duration = Duration::from_secs(3);
/// After which it is said again, as it may not have listened then.
const SAID: Duration = Duration::from_millis(500);
/// Messages that wait to be counted.
const MESSAGES: usize = 4_096;
/// Requests that are sent together.
const AT_ONCE: usize = 1_000;

/// A connection for questions.
pub(crate) struct Raw {
    client: Client,
}

async fn client(server: &Server) -> Result<Client, Failure> {
    let url = server.url()?;
    // `?wire=` is nestlock's own
    let url = url.split('?').next().unwrap_or_default();
    let config =
        Config::from_url(url).map_err(|error| format!("the URL cannot be read ({})", error.kind().to_str()))?;
    let performance = PerformanceConfig {
        default_command_timeout: LIMIT,
        broadcast_channel_capacity: MESSAGES,
        ..PerformanceConfig::default()
    };
    let connection = ConnectionConfig {
        connection_timeout: CONNECT_TIMEOUT,
        internal_command_timeout: CONNECT_TIMEOUT,
        ..ConnectionConfig::default()
    };
    let client = Client::new(config, Some(performance), Some(connection), None);
    // all steps of it, one after the other
    let connected = timeout(CONNECT_TIMEOUT, client.init()).await;
    // its task ends with it
    drop(
        connected
            .map_err(|_| format!("cannot connect: no answer within {CONNECT_TIMEOUT:?}"))?
            .map_err(|error| format!("cannot connect: {}", error.details()))?,
    );
    Ok(client)
}

/// What the release channels say: a connection of its own.
pub(crate) struct Ears {
    client: Client,
    messages: BroadcastReceiver<Message>,
    since: Instant,
}

impl Ears {
    /// `None`: this user may not listen to all of them.
    pub(crate) async fn open(server: &Server, raw: &Raw) -> Option<Self> {
        let client = client(server).await.ok()?;
        let mut messages = client.message_rx();
        let all = [EVERY_CLIENT].into_iter().chain(KINDS).flat_map(|part| part.channels);
        // a pattern may be listened to if it is, letter by letter, what a rule says
        let patterns: Vec<String> = all.map(|channel| rule(channel.trim_start_matches('&'), &server.prefix)).collect();
        client.psubscribe(patterns.clone()).await.ok()?;
        // fred tells of no refusal: what is heard is what is said, about a lock that nobody has
        for pattern in &patterns {
            let channel = format!("{}nestlock-top:{}}}", pattern.trim_end_matches('*'), std::process::id());
            let is_heard = async {
                loop {
                    raw.ask(&["PUBLISH", &channel, "0"]).await.ok()?;
                    let said = timeout(SAID, messages.recv()).await;
                    if said.is_ok_and(|said| said.is_ok_and(|message| *message.channel == *channel)) {
                        return Some(());
                    }
                }
            };
            timeout(HEARD, is_heard).await.ok()??;
        }
        Some(Self { client, messages, since: Instant::now() })
    }

    /// How many releases there were a second since this was asked last, and of which locks; `None`: it hears no more.
    pub(crate) fn heard(&mut self) -> Option<(f64, BTreeSet<String>)> {
        if !self.client.is_connected() {
            return None;
        }
        let (mut count, mut names) = (0_u32, BTreeSet::new());
        loop {
            match self.messages.try_recv() {
                Ok(message) => {
                    count += 1;
                    // `{name}`, and behind it, perhaps, whom of a queue it is for
                    let name = message.channel.split_once('{').and_then(|(_, name)| name.split_once('}'));
                    names.extend(name.map(|(name, _)| name.to_owned()));
                }
                Err(TryRecvError::Lagged(missed)) => count += u32::try_from(missed).unwrap_or(u32::MAX),
                Err(_) => break,
            }
        }
        let took = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        Some((f64::from(count) / took.as_secs_f64(), names))
    }
}

/// What is asked: a command, and its arguments.
pub(crate) type Words = Vec<String>;

pub(crate) fn words(words: &[&str]) -> Words {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Raw {
    pub(crate) async fn connect(server: &Server) -> Result<Self, Failure> {
        Ok(Self { client: client(server).await? })
    }

    pub(crate) async fn ask(&self, words: &[&str]) -> Result<Value, Error> {
        let (command, args) = command(words.iter().map(|word| (*word).to_owned()).collect());
        self.client.custom(command, args).await
    }

    /// Many requests, in few round trips. What is refused refuses nothing else.
    pub(crate) async fn ask_all(&self, requests: Vec<Words>) -> Result<Vec<Result<Value, Error>>, Failure> {
        let mut answers = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter();
        loop {
            let pipeline = self.client.pipeline();
            let mut count = 0;
            for words in requests.by_ref().take(AT_ONCE) {
                let (command, args) = command(words);
                pipeline.custom::<(), _>(command, args).await.map_err(|error| error.to_string())?;
                count += 1;
            }
            if count == 0 {
                return Ok(answers);
            }
            answers.extend(pipeline.try_all::<Value>().await);
        }
    }
}

fn command(words: Words) -> (CustomCommand, Vec<Value>) {
    let mut words = words.into_iter();
    let name = words.next().unwrap_or_default();
    (CustomCommand::new(name, ClusterHash::FirstKey, false), words.map(Value::from).collect())
}

/// Whether the user may not ask that.
pub(crate) fn is_denied(error: &Error) -> bool {
    error.details().starts_with("NOPERM") || error.details().contains("no permissions")
}

/// Whether the connection is gone: nothing else will be answered.
pub(crate) fn is_over(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::IO | ErrorKind::Timeout | ErrorKind::Canceled)
}

/// A text, as the server's answers have them; also numbers.
pub(crate) fn text(value: &Value) -> Option<String> {
    value.as_string()
}

/// The same, of bytes that are no text, too.
pub(crate) fn lossy(value: &Value) -> Option<String> {
    text(value).or_else(|| value.as_bytes().map(|bytes| String::from_utf8_lossy(bytes).into_owned()))
}

pub(crate) fn list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values,
        _ => Vec::new(),
    }
}
