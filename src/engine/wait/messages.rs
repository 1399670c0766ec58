//! Wakes waiters by pub/sub messages: one subscriber connection per server, one wait queue per
//! channel.
//!
//! A message is a hint: the waiter that it wakes retries. So a lost message costs time, never
//! correctness. To bound that time, one waiter of each wait queue polls now and then, on behalf of
//! all.
//!
//! A PING with a fresh payload follows SUBSCRIBE, since SUBSCRIBE may be confirmed before it has
//! reached the server. When the PING is back, one waiter tries again; after a reconnect all do. A
//! channel is unsubscribed 100 ms after its last waiter left. In a cluster, waiters listen at the
//! master of their slot, and move with it: the server reports that where messages are sharded,
//! otherwise the map does. A failed SUBSCRIBE is retried at a fixed pace while a waiter is left.
//! Decisions 9 and 21.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use futures_util::future::join_all;
use nestlock_wire::{Link, Push, clock::Instant, log};
use tokio::{sync::mpsc, time::sleep};

use super::{
    queue::WaitQueue,
    subscriptions::{ChannelEvent, LINGER, LISTEN_AGAIN, Subscriptions, remove_abandoned},
};

use crate::{
    engine::{core::Core, hold::granted::Granted},
    error::StoreErrorKind,
};

/// Delivers a push to its wait queue.
pub(crate) fn deliver(subscriptions: &Subscriptions, heard: Push<'_>) {
    let (channel, text) = match heard {
        Push::Message { channel, text } => (channel, text),
        Push::Missed => {
            log::later!(WARN, channels = subscriptions.channels(); "pub/sub messages were missed; waking all waiters");
            return subscriptions.wake_all();
        }
        Push::Dropped { channel } => {
            // If the wait queue is still there, the server ended the subscription, not this client.
            if let Some(queue) = subscriptions.get(channel) {
                subscriptions.send_event(ChannelEvent::Subscribe(queue));
            }
            return;
        }
    };
    let Some(queue) = subscriptions.get(channel) else {
        return;
    };
    queue.notify();
    if queue.has_permits() {
        return match given_back(text) {
            Some(permits) => queue.wake_for(permits, is_in_line(text)),
            None => log::later!(DEBUG, channel = channel; "ignoring a message of another program"),
        };
    }
    match text {
        b"0" => queue.wake_one(),
        b"1" => queue.wake_all(),
        _ => match Granted::parse(text) {
            Some(granted) => queue.grant(granted),
            None => log::later!(DEBUG, channel = channel; "ignoring a message of another program"),
        },
    }
}

/// Returns how many permits a message says were given back, or else are available: see
/// `lua/parts/available.lua`. `None`: it is no number.
fn given_back(text: &[u8]) -> Option<usize> {
    let number: i64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    let given = text.iter().take_while(|byte| **byte == b'0').count();
    // Redisson also reports a number below 0, when it takes permits away.
    let available = usize::try_from(number).unwrap_or(0);
    Some(if given > 0 && available > 0 {
        given
    } else {
        available
    })
}

/// Returns whether the release also told the waiters of a queue, each by a message of its own: see
/// `lua/parts/available.lua`.
fn is_in_line(text: &[u8]) -> bool {
    text.len() > 1 && text.starts_with(b"0")
}

/// Keeps all wait queues subscribed: on one connection, or in a cluster on the node of each lock.
pub(crate) async fn subscribe(core: Arc<Core>, mut events: mpsc::UnboundedReceiver<ChannelEvent>) {
    let Some(mut moves) = core.store.moves() else {
        let (home, link) = core.store.node_of_channel("");
        return listen(&core, home, &link, events).await;
    };
    let mut homes = ChannelNodes {
        core: &core,
        known: HashMap::new(),
    };
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Some(ChannelEvent::Subscribe(queue)) => homes.resubscribe(&queue),
                Some(ChannelEvent::LastWaiterLeft(queue)) => homes.send_event(queue.node(), ChannelEvent::LastWaiterLeft(queue)),
                None => return,
            },
            _ = moves.changed() => {
                core.subscriptions.all().iter().for_each(|queue| homes.visit(queue));
                // Dropping the sender ends the task that listens on a closed link.
                homes.known.retain(|_, (link, _)| !link.is_closed());
            }
        }
    }
}

/// The listening tasks of a cluster, by node number.
struct ChannelNodes<'a> {
    core: &'a Arc<Core>,
    known: HashMap<u16, (Arc<Link>, mpsc::UnboundedSender<ChannelEvent>)>,
}

impl ChannelNodes<'_> {
    /// Subscribes a wait queue at the node that serves its channel now.
    fn resubscribe(&mut self, queue: &Arc<WaitQueue>) {
        let (home, link) = self.core.store.node_of_channel(&queue.channel);
        queue.move_to(home);
        if self
            .known
            .get(&home)
            .is_none_or(|(known, _)| !Arc::ptr_eq(known, &link))
        {
            let (tell, events) = mpsc::unbounded_channel();
            let (core, listens) = (Arc::clone(self.core), Arc::clone(&link));
            self.known.insert(home, (link, tell));
            tokio::spawn(async move { listen(&core, home, &listens, events).await });
        }
        self.send_event(home, ChannelEvent::Subscribe(Arc::clone(queue)));
    }

    /// Resubscribes a wait queue if another node or link serves its channel now. Called after slots
    /// have moved.
    fn visit(&mut self, queue: &Arc<WaitQueue>) {
        let (home, link) = self.core.store.node_of_channel(&queue.channel);
        if queue.is_at(home)
            && self
                .known
                .get(&home)
                .is_some_and(|(known, _)| Arc::ptr_eq(known, &link))
        {
            return;
        }
        let old = queue.node();
        self.resubscribe(queue);
        self.send_event(old, ChannelEvent::LastWaiterLeft(Arc::clone(queue)));
    }

    fn send_event(&self, home: u16, event: ChannelEvent) {
        if let Some((_, tell)) = self.known.get(&home) {
            let _ = tell.send(event);
        }
    }
}

/// Listens on one node. Subscribes new wait queues, unsubscribes abandoned ones, and resubscribes
/// all after a reconnect.
async fn listen(
    core: &Core,
    home: u16,
    link: &Link,
    mut events: mpsc::UnboundedReceiver<ChannelEvent>,
) {
    let mut connections = link.connections();
    let mut node = NodeChannels {
        core,
        home,
        link,
        wanted: Vec::new(),
        left: Vec::new(),
        unused: Vec::new(),
    };
    loop {
        let retry = !node.wanted.is_empty() || !node.unused.is_empty();
        let mut connected = false;
        let grace = node.left.first().map(|(since, _)| *since + LINGER);
        tokio::select! {
            event = events.recv() => match event {
                Some(event) => node.sort_in(event),
                None => return,
            },
            _ = connections.changed() => {
                connected = true;
                node.connected();
            }
            () = sleep(LISTEN_AGAIN), if retry => {}
            () = sleep(grace.map_or(LINGER, |grace| grace.saturating_duration_since(Instant::now()))), if grace.is_some() => {}
        }
        while let Ok(event) = events.try_recv() {
            node.sort_in(event);
        }
        node.tidy();
        if connected || link.is_up() {
            node.subscribe().await;
        }
    }
}

/// The channels to subscribe or unsubscribe on one node.
struct NodeChannels<'a> {
    core: &'a Core,
    home: u16,
    link: &'a Link,
    wanted: Vec<Arc<WaitQueue>>,
    /// Wait queues without waiters, since when.
    left: Vec<(Instant, Arc<WaitQueue>)>,
    /// Channels without waiters to which the connection is still subscribed.
    unused: Vec<String>,
}

impl NodeChannels<'_> {
    fn sort_in(&mut self, event: ChannelEvent) {
        match event {
            ChannelEvent::Subscribe(queue) => self.wanted.push(queue),
            ChannelEvent::LastWaiterLeft(queue) => self.left.push((Instant::now(), queue)),
        }
    }

    /// Wants all wait queues of this node, since a new connection has no subscriptions.
    fn connected(&mut self) {
        self.wanted = self.core.subscriptions.all();
        // A denied SUBSCRIBE costs the connection. If each new one retried it, that would never
        // end.
        self.wanted
            .retain(|queue| queue.is_at(self.home) && !queue.denied.load(Ordering::Acquire));
        self.unused.clear();
    }

    /// Drops from the lists the wait queues that have moved, were abandoned or were removed.
    fn tidy(&mut self) {
        let (subscriptions, home) = (&self.core.subscriptions, self.home);
        for (_, queue) in self.left.extract_if(.., |(_, queue)| !queue.is_at(home)) {
            self.unused.push(queue.channel.to_string());
            // The task of the new node decides whether the queue is abandoned.
            if queue.waiters() == 0 {
                subscriptions.send_event(ChannelEvent::LastWaiterLeft(queue));
            }
        }
        self.unused
            .extend(remove_abandoned(subscriptions, &mut self.left));
        self.unused.retain(|channel| {
            subscriptions
                .get(channel)
                .is_none_or(|queue| !queue.is_at(home))
        });
        // A retry must not subscribe a wait queue that was removed: it would never be unsubscribed.
        self.wanted.retain(|queue| {
            queue.is_at(home)
                && subscriptions
                    .get(&queue.channel)
                    .is_some_and(|kept| Arc::ptr_eq(&kept, queue))
        });
    }

    /// Subscribes the wanted channels, then unsubscribes the unused ones. Those that fail stay
    /// listed.
    async fn subscribe(&mut self) {
        let at_once = self.link.channels_at_once();
        let batches = std::mem::take(&mut self.wanted);
        let again = join_all(
            batches
                .chunks(at_once)
                .map(|batch| subscribe_batch(self.core, self.link, batch)),
        )
        .await;
        self.wanted.extend(again.into_iter().flatten());
        let batches = std::mem::take(&mut self.unused);
        let again = join_all(
            batches
                .chunks(at_once)
                .map(|batch| unsubscribe_batch(self.link, batch)),
        )
        .await;
        self.unused.extend(again.into_iter().flatten());
    }
}

/// Subscribes a batch and wakes its waiters, which may have missed messages. Splits a denied batch
/// to find the denied channels. Returns the wait queues to retry.
async fn subscribe_batch(
    core: &Core,
    link: &Link,
    batch: &[Arc<WaitQueue>],
) -> Vec<Arc<WaitQueue>> {
    let channels: Vec<String> = batch
        .iter()
        .map(|queue| queue.channel.to_string())
        .collect();
    let Err(error) = link.subscribe(&channels).await else {
        for queue in batch {
            queue.live();
        }
        return Vec::new();
    };
    if error.kind() == StoreErrorKind::Moved {
        core.store.request_refresh();
    }
    if !error.kind().is_denied() {
        return batch.to_vec();
    }
    if let [queue] = batch {
        queue.denied.store(true, Ordering::Release);
        log::later!(WARN, channel = queue.channel, error = error; "SUBSCRIBE was denied; waiters poll");
        return Vec::new();
    }
    let (first, second) = batch.split_at(batch.len() / 2);
    let mut again = Box::pin(subscribe_batch(core, link, first)).await;
    again.extend(Box::pin(subscribe_batch(core, link, second)).await);
    again
}

/// Unsubscribes a batch. Returns the channels to retry. A client that may not unsubscribe ignores
/// messages on channels without waiters. After a slot has moved, the server has ended its
/// subscriptions itself.
async fn unsubscribe_batch(link: &Link, batch: &[String]) -> Vec<String> {
    let Err(error) = link.unsubscribe(batch).await else {
        return Vec::new();
    };
    log::later!(DEBUG, error = error; "UNSUBSCRIBE failed");
    let is_over = error.kind().is_denied() || error.kind() == StoreErrorKind::Moved;
    if is_over { Vec::new() } else { batch.to_vec() }
}
