//! The commands over a link that are not scripts.

use std::{sync::Arc, time::Duration};

use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    failure::Failure,
    link::Link,
    refusal,
    request::{Channels, Request},
    resp::Value,
    until::Until,
};

/// Most channels in one SUBSCRIBE.
const CHANNELS_AT_ONCE: usize = 500;

/// What a server reports about itself.
///
/// ```no_run
/// # async fn example(link: &nestlock_wire::Link) {
/// if let Some(info) = link.about().await {
///     println!("server {:?}, of a cluster: {}", info.run_id, info.is_node);
/// }
/// # }
/// ```
#[derive(Debug, Default)]
pub struct ServerInfo {
    /// An id that no other server has.
    pub run_id: Option<String>,
    /// True for a node of a cluster.
    pub is_node: bool,
    /// True for a sentinel.
    pub is_sentinel: bool,
}

impl Link {
    /// Subscribes. Completes once the server has done so.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped midway, the request may still be executed.
    pub async fn subscribe(&self, channels: &[String]) -> Result<(), StoreError> {
        let verb = if self.dial.sharded {
            Channels::SubscribeSharded
        } else {
            Channels::Subscribe
        };
        self.channels(verb, channels).await
    }

    /// Unsubscribes. Completes once the server has done so.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped midway, the request may still be executed.
    pub async fn unsubscribe(&self, channels: &[String]) -> Result<(), StoreError> {
        let verb = if self.dial.sharded {
            Channels::UnsubscribeSharded
        } else {
            Channels::Unsubscribe
        };
        self.channels(verb, channels).await
    }

    /// Returns how many channels one call may name.
    pub fn channels_at_once(&self) -> usize {
        if self.dial.sharded {
            1
        } else {
            CHANNELS_AT_ONCE
        }
    }

    pub(crate) async fn channels(
        &self,
        verb: Channels,
        channels: &[String],
    ) -> Result<(), StoreError> {
        let (_, mut connection) = self.up().await?;
        loop {
            let until = self.until(clock::Instant::now());
            match connection.channels(verb, channels, until).await {
                // the connection may have ended a moment ago
                Err(Failure::Unsent) => (_, connection) = self.after(&connection, until).await?,
                done => return done.map_err(|failure| self.failed(failure)),
            }
        }
    }

    /// Waits up to `limit` for an element in any of the lists, removes it, and returns its list.
    /// Nothing else may be sent over this link. The wait lasts for at least a millisecond.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped midway, an element may be lost.
    pub async fn pop(
        &self,
        lists: &[Arc<str>],
        limit: Duration,
    ) -> Result<Option<Arc<str>>, StoreError> {
        // zero would block forever, and an old server rounds shorter times down to zero
        let limit = limit.max(Duration::from_millis(1));
        let seconds = limit.as_secs_f64().to_string();
        let words: Vec<&str> = ["BLPOP"]
            .into_iter()
            .chain(lists.iter().map(|list| &**list))
            .chain([&*seconds])
            .collect();
        // the server's timeout must come first: otherwise the element could be lost
        let answer = self
            .command(
                &words,
                limit.saturating_add(self.dial.settings.command_timeout),
            )
            .await?;
        Ok(match &answer {
            Value::Array(parts) => parts.first().and_then(Value::as_str).map(Into::into),
            _ => None,
        })
    }

    /// Returns one page of SCAN, strings only: the next cursor, and keys. Keys that are not UTF-8
    /// are left out.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn scan(
        &self,
        cursor: &str,
        pattern: &str,
    ) -> Result<(String, Vec<String>), StoreError> {
        let words = [
            "SCAN", cursor, "MATCH", pattern, "COUNT", "500", "TYPE", "string",
        ];
        let answer = self
            .command(&words, self.dial.settings.command_timeout)
            .await?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        if let Value::Array(parts) = &answer
            && let [cursor, Value::Array(keys)] = parts.as_slice()
            && let Some(cursor) = text(cursor)
        {
            return Ok((cursor, keys.iter().filter_map(text).collect()));
        }
        Err(StoreError::new(
            StoreErrorKind::Protocol,
            true,
            "unexpected reply to SCAN",
        ))
    }

    /// Returns the slots and their nodes, as a node of the cluster reports them.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn slots(&self, limit: Duration) -> Result<Value, StoreError> {
        self.command(&["CLUSTER", "SLOTS"], limit).await
    }

    /// Returns the state of the cluster, as a node reports it.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn cluster_info(&self, limit: Duration) -> Result<Value, StoreError> {
        self.command(&["CLUSTER", "INFO"], limit).await
    }

    /// Returns what the server reports about itself. Returns `None` if it reports nothing.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: it changes nothing.
    pub async fn about(&self) -> Option<ServerInfo> {
        let answer = self
            .command(&["INFO", "server"], self.dial.settings.command_timeout)
            .await
            .ok()?;
        let info = answer.as_str()?;
        let field = |name: &str| {
            info.lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
        };
        // some compatible servers report the same id everywhere
        let run_id =
            field("run_id:").filter(|id| id.len() == 40 && id.bytes().any(|byte| byte != b'0'));
        let mode = field("redis_mode:").or(field("server_mode:"));
        Some(ServerInfo {
            run_id: run_id.map(str::to_owned),
            is_node: mode == Some("cluster"),
            is_sentinel: mode == Some("sentinel"),
        })
    }

    /// Sends a command and its arguments, at most once, and returns the reply. `limit` counts from
    /// the first poll, and includes a wait for a connection.
    ///
    /// A command that blocks, such as BLPOP, needs a link of [`Link::blocking`]: on any other, 2
    /// heartbeats without a reply end the connection for all its requests. The connection also ends
    /// on a command that breaks the rule of one reply per request, such as SUBSCRIBE, MULTI or
    /// MONITOR, and on a reply nested more than 8 deep or of more than 2^20 elements.
    ///
    /// # Errors
    ///
    /// An error of the server or of the connection. It says whether the server may have executed
    /// the command ([`StoreError::may_have_executed`]). The script of an EVAL must not return an
    /// error of its own that begins with a code of the server (`BUSY`, `MOVED`, `NOAUTH`): it would
    /// count as not executed. [`StoreErrorKind::Other`] if `words` is empty.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped after its first poll, the command may still be executed.
    pub async fn command(&self, words: &[&str], limit: Duration) -> Result<Value, StoreError> {
        if words.is_empty() {
            let why = "the command is empty";
            return Err(StoreError::new(StoreErrorKind::Other, false, why));
        }
        let until = Until::new(clock::Instant::now(), limit);
        let (_, connection) = self.up_by(until).await?;
        let answer = match connection.call(Request::Words(words), until).await {
            Ok(_) if self.is_left() => Err(Failure::Ended),
            answer => answer,
        };
        answer.map_err(|failure| match self.failed(failure) {
            error if refusal::is_script(words[0]) => refusal::of_a_script(error),
            error => error,
        })
    }
}
