//! Sends requests that do not belong to one lock to one server, over a connection of fred.

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

/// Capacity for messages that are not counted yet.
const MESSAGES: usize = 4_096;
/// Requests that are sent together.
const AT_ONCE: usize = 1_000;

/// Timeouts for a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) connect: Duration,
    /// Timeout for a reply, of a server that has many other clients.
    pub(crate) answer: Duration,
    /// Back-off before a server that failed is tried again.
    pub(crate) again: Duration,
}

/// A server. The first request connects to it, and a request after a failure reconnects.
pub(crate) struct Node {
    pub(crate) address: String,
    config: Config,
    /// The configuration without a login, if that is worth a try.
    bare: Option<Config>,
    limits: Limits,
    state: Mutex<Connection>,
}

/// The connection for requests.
enum Connection {
    New,
    Up(Client),
    /// When it failed, and with which error.
    Failed(Instant, Error),
}

/// A request: the command, and its arguments.
pub(crate) type Words = Vec<String>;

pub(crate) type Answer = Result<Value, Error>;

pub(crate) fn words(words: &[&str]) -> Words {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Node {
    pub(crate) fn new(address: String, config: Config, limits: Limits) -> Self {
        Self {
            address,
            config,
            bare: None,
            limits,
            state: Mutex::new(Connection::New),
        }
    }

    /// Also allows a connection without a login: a sentinel that needs none does not know the
    /// servers' login.
    pub(crate) fn or_bare(self) -> Self {
        let bare = Config {
            username: None,
            password: None,
            ..self.config.clone()
        };
        Self {
            bare: Some(bare),
            ..self
        }
    }

    /// Returns the host, without the port.
    pub(crate) fn host(&self) -> &str {
        self.address
            .rsplit_once(':')
            .map_or(&self.address, |(host, _)| host)
    }

    /// Returns the connection for requests. After a failure, returns the same error without a retry
    /// until the back-off is over.
    pub(crate) async fn client(&self) -> Result<Client, Error> {
        let mut state = self.state.lock().await;
        match &*state {
            Connection::Up(client) if client.is_connected() => return Ok(client.clone()),
            Connection::Failed(at, error) if at.elapsed() < self.limits.again => {
                return Err(error.clone());
            }
            _ => {}
        }
        let connected = self.connect().await;
        *state = match &connected {
            Ok(client) => Connection::Up(client.clone()),
            Err(error) => Connection::Failed(Instant::now(), error.clone()),
        };
        connected
    }

    /// Opens a separate connection.
    pub(crate) async fn connect(&self) -> Result<Client, Error> {
        let connected = self.connect_by(&self.config).await;
        match &self.bare {
            Some(bare)
                if connected
                    .as_ref()
                    .is_err_and(|error| *error.kind() == ErrorKind::Auth) =>
            {
                self.connect_by(bare).await.or(connected)
            }
            _ => connected,
        }
    }

    async fn connect_by(&self, config: &Config) -> Result<Client, Error> {
        let Limits {
            connect, answer, ..
        } = self.limits;
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
        let failed =
            |kind: ErrorKind, why: String| Error::new(kind, format!("cannot connect: {why}"));
        // one timeout for all steps of the connect
        let connected = timeout(connect, Endpoint::client(config, performance, connection)).await;
        let connected =
            connected.map_err(|_| failed(ErrorKind::IO, format!("no reply within {connect:?}")))?;
        connected.map_err(|error| {
            let kind = if error.kind() == StoreErrorKind::Auth {
                ErrorKind::Auth
            } else {
                ErrorKind::IO
            };
            // without the advice of the error: this is only one row of several
            failed(
                kind,
                error.source().map_or_else(String::new, ToString::to_string),
            )
        })
    }

    pub(crate) async fn ask(&self, words: &[&str]) -> Answer {
        let (command, args) = command(words.iter().copied());
        let answer = self.client().await?.custom(command, args).await;
        self.has_heard(answer.as_ref().err()).await;
        answer
    }

    /// Sends many requests in few round trips. A refused request does not affect the others.
    pub(crate) async fn ask_all<'w>(
        &self,
        requests: impl IntoIterator<Item = &'w Words>,
    ) -> Vec<Answer> {
        let (mut answers, mut requests) = (Vec::new(), requests.into_iter().peekable());
        while requests.peek().is_some() {
            let some: Vec<&Words> = requests.by_ref().take(AT_ONCE).collect();
            match self.ask_some(&some).await {
                Ok(said) => answers.extend(said),
                Err(error) => answers.extend(some.iter().map(|_| Err(error.clone()))),
            }
            let error = answers
                .iter()
                .filter_map(|answer: &Answer| answer.as_ref().err())
                .find(|error| is_over(error));
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
        // fred reports the error that ends a connection only once: it holds for all later requests
        let last = answers
            .last()
            .and_then(|answer: &Answer| answer.as_ref().err())
            .cloned();
        let missing = || {
            Err(last
                .clone()
                .unwrap_or_else(|| Error::new(ErrorKind::IO, "no reply")))
        };
        answers.resize_with(requests.len(), missing);
        Ok(answers)
    }

    /// Marks the connection as failed if the error has ended it, so that it is opened again.
    async fn has_heard(&self, error: Option<&Error>) {
        let Some(error) = error.filter(|error| is_over(error)) else {
            return;
        };
        let mut state = self.state.lock().await;
        if matches!(*state, Connection::Up(_)) {
            *state = Connection::Failed(Instant::now(), error.clone());
        }
    }
}

fn command<'w>(mut words: impl Iterator<Item = &'w str>) -> (CustomCommand, Vec<Value>) {
    let name = words.next().unwrap_or_default().to_owned();
    (
        CustomCommand::new(name, ClusterHash::FirstKey, false),
        words.map(Value::from).collect(),
    )
}

/// Returns whether the user lacks the permission for the request.
pub(crate) fn is_denied(error: &Error) -> bool {
    error.details().starts_with("NOPERM") || error.details().contains("no permissions")
}

/// Returns whether the server lacks the command.
pub(crate) fn is_unknown(error: &Error) -> bool {
    error.details().contains("unknown command")
}

/// Returns whether the key has another type.
pub(crate) fn is_of_another_type(error: &Error) -> bool {
    error.details().starts_with("WRONGTYPE")
}

/// Returns whether the connection is gone: no further request gets a reply.
pub(crate) fn is_over(error: &Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Auth | ErrorKind::IO | ErrorKind::Timeout | ErrorKind::Canceled
    )
}

/// Returns whether no server is there, so no client is connected to it, either.
pub(crate) fn is_down(error: &Error) -> bool {
    is_over(error)
        && error
            .details()
            .to_lowercase()
            .contains("connection refused")
}

/// Returns whether the server cannot serve the request now, or only another server can.
pub(crate) fn is_not_now(error: &Error) -> bool {
    const WORDS: [&str; 6] = [
        "CLUSTERDOWN",
        "LOADING",
        "MASTERDOWN",
        "TRYAGAIN",
        "MOVED",
        "ASK",
    ];
    is_over(error)
        || error
            .details()
            .split(' ')
            .next()
            .is_some_and(|word| WORDS.contains(&word))
}

/// Returns a string from a reply. A number becomes a string.
pub(crate) fn text(value: &Value) -> Option<String> {
    value.as_string()
}

/// Like [`text`], but also accepts bytes that are not valid UTF-8.
pub(crate) fn lossy(value: &Value) -> Option<String> {
    text(value).or_else(|| {
        value
            .as_bytes()
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    })
}

pub(crate) fn list(value: Value) -> Vec<Value> {
    match value {
        Value::Array(values) => values,
        _ => Vec::new(),
    }
}

/// Returns the pairs of a map, or of the flat list that older protocols use for a map.
pub(crate) fn pairs(value: Value) -> Option<Vec<(String, String)>> {
    match value {
        Value::Map(map) => map
            .inner()
            .into_iter()
            .map(|(key, value)| Some((key.into_string()?, text(&value)?)))
            .collect(),
        Value::Array(flat) => {
            let flat: Option<Vec<String>> = flat.iter().map(text).collect();
            Some(
                flat?
                    .chunks_exact(2)
                    .map(|pair| (pair[0].clone(), pair[1].clone()))
                    .collect(),
            )
        }
        _ => None,
    }
}
