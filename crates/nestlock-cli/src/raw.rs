//! Questions to the server that are about no one lock: a connection of fred's, and words.

use std::time::Duration;

use fred::{
    clients::Client,
    error::{Error, ErrorKind},
    interfaces::ClientLike,
    types::{
        ClusterHash, CustomCommand, Value,
        config::{Config, ConnectionConfig, PerformanceConfig},
    },
};

use tokio::time::timeout;

use crate::{Failure, args::Server, connect::CONNECT_TIMEOUT};

/// What an answer may take, of a server that has many others to serve.
const LIMIT: Duration = Duration::from_secs(10);
/// Requests that are sent together.
const AT_ONCE: usize = 1_000;

/// A connection for questions.
pub(crate) struct Raw {
    client: Client,
}

/// What is asked: a command, and its arguments.
pub(crate) type Words = Vec<String>;

pub(crate) fn words(words: &[&str]) -> Words {
    words.iter().map(|word| (*word).to_owned()).collect()
}

impl Raw {
    pub(crate) async fn connect(server: &Server) -> Result<Self, Failure> {
        let url = server.url()?;
        // `?wire=` is nestlock's own
        let url = url.split('?').next().unwrap_or_default();
        let config =
            Config::from_url(url).map_err(|error| format!("the URL cannot be read ({})", error.kind().to_str()))?;
        let performance = PerformanceConfig { default_command_timeout: LIMIT, ..PerformanceConfig::default() };
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
        Ok(Self { client })
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
