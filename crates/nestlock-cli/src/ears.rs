//! Counts releases on their channels, with a separate connection.

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
    acl::LATCH,
    node::{is_denied, is_over},
    raw::Raw,
    search::Candidate,
};

/// How long a test message may take, even from a busy server far away. After that, this user is
/// taken to lack the permission to subscribe.
const HEARD: Duration = Duration::from_secs(3);
/// Interval of the test message, as the subscription may not be active at first.
const SAID: Duration = Duration::from_millis(500);

pub(crate) struct Ears {
    client: Client,
    messages: BroadcastReceiver<Message>,
    since: Instant,
}

impl Ears {
    /// Subscribes to all releases. Returns `None` if some of them cannot be received, or this user
    /// may not subscribe.
    pub(crate) async fn open(raw: &Raw<'_>, prefix: &str) -> Option<Self> {
        let node = raw.masters().into_iter().next()?;
        if raw.is_cluster() {
            // patterns do not match sharded messages; other messages reach a subscriber at any node
            let sharded = node.ask(&["PUBSUB", "SHARDNUMSUB"]).await;
            if sharded.is_ok() || sharded.is_err_and(|error| is_denied(&error) || is_over(&error)) {
                return None;
            }
        }
        let client = node.connect().await.ok()?;
        let mut messages = client.message_rx();
        let all = [EVERY_CLIENT]
            .into_iter()
            .chain(KINDS)
            // nothing is held there
            .filter(|part| part.what != LATCH)
            .flat_map(|part| part.channels);
        // a user may subscribe to a pattern only if a rule has exactly the same text
        let patterns: Vec<String> = all
            .map(|channel| rule(channel.trim_start_matches('&'), prefix))
            .collect();
        client.psubscribe(patterns.clone()).await.ok()?;
        // fred does not report a refusal: wait for a test message about a lock that is never taken
        for pattern in &patterns {
            let channel = format!(
                "{}nestlock-top:{}}}",
                pattern.trim_end_matches('*'),
                std::process::id()
            );
            let is_heard = async {
                loop {
                    node.ask(&["PUBLISH", &channel, "0"]).await.ok()?;
                    let said = timeout(SAID, messages.recv()).await;
                    if said.is_ok_and(|said| said.is_ok_and(|message| *message.channel == *channel))
                    {
                        return Some(());
                    }
                }
            };
            timeout(HEARD, is_heard).await.ok()??;
        }
        Some(Self {
            client,
            messages,
            since: Instant::now(),
        })
    }

    /// Returns whether the subscription still works.
    pub(crate) fn hear(&self) -> bool {
        self.client.is_connected()
    }

    /// Returns the releases per second since the last call, and what may be held again. Returns
    /// `None` if the subscription has ended.
    pub(crate) fn heard(&mut self) -> Option<(f64, BTreeSet<Candidate>)> {
        if !self.hear() {
            return None;
        }
        let (mut count, mut again) = (0_u32, BTreeSet::new());
        loop {
            match self.messages.try_recv() {
                Ok(message) => {
                    count += 1;
                    again.extend(Candidate::heard(&message.channel));
                }
                Err(TryRecvError::Lagged(missed)) => {
                    count += u32::try_from(missed).unwrap_or(u32::MAX);
                }
                Err(_) => break,
            }
        }
        let took = std::mem::replace(&mut self.since, Instant::now()).elapsed();
        Some((f64::from(count) / took.as_secs_f64(), again))
    }
}
