//! What the release channels say: a connection of its own.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use fred::{
    clients::Client,
    interfaces::{ClientLike, EventInterface, PubsubInterface},
    types::Message,
};
use nestlock::permissions::{EVERY_CLIENT, KINDS, rule};
use tokio::{
    sync::broadcast::{Receiver as BroadcastReceiver, error::TryRecvError},
    time::timeout,
};

use crate::{
    node::{is_denied, is_over},
    raw::Raw,
};

/// Whoever may listen hears what is said within this time, be the server far away and busy.
const HEARD: Duration = Duration::from_secs(3);
/// After which it is said again, as it may not have listened then.
const SAID: Duration = Duration::from_millis(500);

pub(crate) struct Ears {
    client: Client,
    messages: BroadcastReceiver<Message>,
    since: Instant,
}

impl Ears {
    /// `None`: nobody can listen to all of them, or this user may not.
    pub(crate) async fn open(raw: &Raw<'_>, prefix: &str) -> Option<Self> {
        let node = raw.masters().into_iter().next()?;
        if raw.is_cluster() {
            // sharded messages have no patterns; others are heard wherever one listens
            let sharded = node.ask(&["PUBSUB", "SHARDNUMSUB"]).await;
            if sharded.is_ok() || sharded.is_err_and(|error| is_denied(&error) || is_over(&error)) {
                return None;
            }
        }
        let client = node.connect().await.ok()?;
        let mut messages = client.message_rx();
        let all = [EVERY_CLIENT].into_iter().chain(KINDS).flat_map(|part| part.channels);
        // a pattern may be listened to if it is, letter by letter, what a rule says
        let patterns: Vec<String> = all.map(|channel| rule(channel.trim_start_matches('&'), prefix)).collect();
        client.psubscribe(patterns.clone()).await.ok()?;
        // fred tells of no refusal: what is heard is what is said, about a lock that nobody has
        for pattern in &patterns {
            let channel = format!("{}nestlock-top:{}}}", pattern.trim_end_matches('*'), std::process::id());
            let is_heard = async {
                loop {
                    node.ask(&["PUBLISH", &channel, "0"]).await.ok()?;
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

    /// Whether it still listens.
    pub(crate) fn hear(&self) -> bool {
        self.client.is_connected()
    }

    /// How many releases there were a second since this was asked last, and of which locks; `None`: it hears no more.
    pub(crate) fn heard(&mut self) -> Option<(f64, BTreeSet<String>)> {
        if !self.hear() {
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
