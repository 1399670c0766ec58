//! Questions to one server that are about no one lock: a connection of fred's, and words.

use std::{
    error::Error as _,
    time::{Duration, Instant},
};

use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::ClientLike,
    types::{
        ClusterHash, CustomCommand, Value,
        config::{Config, ConnectionConfig, PerformanceConfig},
    },
};
use nestlock::{Endpoint, StoreErrorKind};
use tokio::{sync::Mutex, time::timeout};

/// Messages that wait to be counted.
const MESSAGES: usize = 4_096;
/// Requests that are sent together.
const AT_ONCE: usize = 1_000;

/// How long a server is waited for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) connect: Duration,
    /// What an answer may take, of a server that has many others to serve.
    pub(crate) answer: Duration,
    /// After which one that did not answer is asked again.
    pub(crate) again: Duration,
}

/// A server. It is connected to when it is asked first, and anew after it has failed.
pub(crate) struct Node {
    pub(crate) address: String,
    config: Config,
    /// Without a login, where that is worth a try.
    bare: Option<Config>,
    limits: Limits,
    state: Mutex<State>,
}

enum State {
    New,
    Up(Client),
    /// When, and of what.
    Failed(Instant, Error),
}

/// What is asked: a command, and its arguments.
pub(crate) type Words = Vec<String>;

pub(crate) type Answer = Result<Value, Error>;

pub(crate) fn words(words: &[&str]) -> Words {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Node {
    pub(crate) fn new(address: String, config: Config, limits: Limits) -> Self {
        Self { address, config, bare: None, limits, state: Mutex::new(State::New) }
    }

    /// A sentinel's: where it wants no login, it was not told of the servers'.
    pub(crate) fn or_bare(self) -> Self {
        let bare = Config { username: None, password: None, ..self.config.clone() };
        Self { bare: Some(bare), ..self }
    }

    /// Its host, without the port.
    pub(crate) fn host(&self) -> &str {
        self.address.rsplit_once(':').map_or(&self.address, |(host, _)| host)
    }

    /// The connection for questions. Whoever fails is not tried again by each question.
    pub(crate) async fn client(&self) -> Result<Client, Error> {
        let mut state = self.state.lock().await;
        match &*state {
            State::Up(client) if client.is_connected() => return Ok(client.clone()),
            State::Failed(at, error) if at.elapsed() < self.limits.again => return Err(error.clone()),
            _ => {}
        }
        let connected = self.connect().await;
        *state = match &connected {
            Ok(client) => State::Up(client.clone()),
            Err(error) => State::Failed(Instant::now(), error.clone()),
        };
        connected
    }

    /// A connection of its own.
    pub(crate) async fn connect(&self) -> Result<Client, Error> {
        let connected = self.connect_by(&self.config).await;
        match &self.bare {
            Some(bare) if connected.as_ref().is_err_and(|error| *error.kind() == ErrorKind::Auth) => {
                self.connect_by(bare).await.or(connected)
            }
            _ => connected,
        }
    }

    async fn connect_by(&self, config: &Config) -> Result<Client, Error> {
        let Limits { connect, answer, .. } = self.limits;
        let performance = PerformanceConfig {
            default_command_timeout: answer,
            broadcast_channel_capacity: MESSAGES,
            ..PerformanceConfig::default()
        };
        let connection = ConnectionConfig {
            connection_timeout: connect,
            internal_command_timeout: connect,
            ..ConnectionConfig::default()
        };
        let failed = |kind: ErrorKind, why: String| Error::new(kind, format!("cannot connect: {why}"));
        // all steps of it, one after the other
        let connected = timeout(connect, Endpoint::client(config, performance, connection)).await;
        let connected = connected.map_err(|_| failed(ErrorKind::IO, format!("no answer within {connect:?}")))?;
        connected.map_err(|error| {
            let kind = if error.kind() == StoreErrorKind::Auth { ErrorKind::Auth } else { ErrorKind::IO };
            // without what to do about it: this is one row of several
            failed(kind, error.source().map_or_else(String::new, ToString::to_string))
        })
    }

    pub(crate) async fn ask(&self, words: &[&str]) -> Answer {
        let (command, args) = command(words.iter().copied());
        let answer = self.client().await?.custom(command, args).await;
        self.has_heard(answer.as_ref().err()).await;
        answer
    }

    /// Many requests, in few round trips. What is refused refuses nothing else.
    pub(crate) async fn ask_all<'w>(&self, requests: impl IntoIterator<Item = &'w Words>) -> Vec<Answer> {
        let (mut answers, mut requests) = (Vec::new(), requests.into_iter().peekable());
        while requests.peek().is_some() {
            let some: Vec<&Words> = requests.by_ref().take(AT_ONCE).collect();
            match self.ask_some(&some).await {
                Ok(said) => answers.extend(said),
                Err(error) => answers.extend(some.iter().map(|_| Err(error.clone()))),
            }
            let error = answers.iter().filter_map(|answer: &Answer| answer.as_ref().err()).find(|error| is_over(error));
            self.has_heard(error).await;
        }
        answers
    }

    async fn ask_some(&self, requests: &[&Words]) -> Result<Vec<Answer>, Error> {
        let client = self.client().await?;
        let pipeline = client.pipeline();
        for words in requests {
            let (command, args) = command(words.iter().map(String::as_str));
            pipeline.custom::<(), _>(command, args).await?;
        }
        let mut answers = pipeline.try_all::<Value>().await;
        // what ends a connection is told once
        let last = answers.last().and_then(|answer: &Answer| answer.as_ref().err()).cloned();
        let missing = || Err(last.clone().unwrap_or_else(|| Error::new(ErrorKind::IO, "no answer")));
        answers.resize_with(requests.len(), missing);
        Ok(answers)
    }

    /// One that failed has a new connection next time.
    async fn has_heard(&self, error: Option<&Error>) {
        let Some(error) = error.filter(|error| is_over(error)) else { return };
        let mut state = self.state.lock().await;
        if matches!(*state, State::Up(_)) {
            *state = State::Failed(Instant::now(), error.clone());
        }
    }
}

fn command<'w>(mut words: impl Iterator<Item = &'w str>) -> (CustomCommand, Vec<Value>) {
    let name = words.next().unwrap_or_default().to_owned();
    (CustomCommand::new(name, ClusterHash::FirstKey, false), words.map(Value::from).collect())
}

/// Whether the user may not ask that.
pub(crate) fn is_denied(error: &Error) -> bool {
    error.details().starts_with("NOPERM") || error.details().contains("no permissions")
}

/// Whether what is kept at the key is of another type.
pub(crate) fn is_of_another_type(error: &Error) -> bool {
    error.details().starts_with("WRONGTYPE")
}

/// Whether the connection is gone: nothing else will be answered.
pub(crate) fn is_over(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Auth | ErrorKind::IO | ErrorKind::Timeout | ErrorKind::Canceled)
}

/// Whether there is no server: no client is there, either.
pub(crate) fn is_nobody(error: &Error) -> bool {
    is_over(error) && error.details().to_lowercase().contains("connection refused")
}

/// Whether it says nothing of what was asked: another time, or elsewhere.
pub(crate) fn is_not_now(error: &Error) -> bool {
    const WORDS: [&str; 6] = ["CLUSTERDOWN", "LOADING", "MASTERDOWN", "TRYAGAIN", "MOVED", "ASK"];
    is_over(error) || error.details().split(' ').next().is_some_and(|word| WORDS.contains(&word))
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

/// A map, or what older protocols tell of one.
pub(crate) fn pairs(value: Value) -> Option<Vec<(String, String)>> {
    match value {
        Value::Map(map) => {
            map.inner().into_iter().map(|(key, value)| Some((key.into_string()?, text(&value)?))).collect()
        }
        Value::Array(flat) => {
            let flat: Option<Vec<String>> = flat.iter().map(text).collect();
            Some(flat?.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect())
        }
        _ => None,
    }
}
