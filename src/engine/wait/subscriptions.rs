//! The wait queues of one client, and the event channel to the task that listens for them.
//!
//! Signal locks have a list of their own (`Core::signals`), whose events go to the task that pops
//! lists.

use std::{sync::Arc, time::Duration};

use nestlock_wire::clock::Instant;
use tokio::sync::mpsc;

use super::{awaited::Awaited, queue::WaitQueue};

use crate::{
    engine::hold::Entered,
    sync::{
        DashMap, Entry,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// How long a channel stays subscribed after its last waiter left, so that a hot lock does not
/// subscribe and unsubscribe all the time.
pub(super) const LINGER: Duration = Duration::from_millis(100);
/// Pause before a failed SUBSCRIBE, UNSUBSCRIBE or BLPOP is retried.
pub(super) const LISTEN_AGAIN: Duration = Duration::from_millis(200);

/// The wait queues, and the event channel to the task that listens.
#[derive(Debug)]
pub(crate) struct Subscriptions {
    queues: DashMap<Arc<str>, Arc<WaitQueue>>,
    /// Number of wait queues. A hint that saves each lock and unlock from checking the shards of
    /// the map. A stale value costs an attempt or a hand-off, as if the waiter had come a moment
    /// later.
    count: AtomicUsize,
    events: mpsc::UnboundedSender<ChannelEvent>,
    /// Stored before the wait queues are scanned, and loaded after one was inserted: see
    /// `Core::closed`.
    closed: AtomicBool,
}

#[derive(Debug)]
pub(crate) enum ChannelEvent {
    Subscribe(Arc<WaitQueue>),
    /// The last waiter left.
    LastWaiterLeft(Arc<WaitQueue>),
}

impl Subscriptions {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<ChannelEvent>) {
        let (events, queue) = mpsc::unbounded_channel();
        (
            Self {
                queues: DashMap::new(),
                count: AtomicUsize::new(0),
                events,
                closed: AtomicBool::new(false),
            },
            queue,
        )
    }

    /// Adds a waiter to a channel's queue. The first one subscribes. A permit that no waiter took
    /// stays: this waiter may have made its attempt before the message arrived.
    pub(super) fn join(
        &self,
        awaited: impl FnOnce() -> Awaited,
        side: usize,
        channel: &Arc<str>,
        quiet: bool,
    ) -> Arc<WaitQueue> {
        // Count while the entry is locked, so that the wait queue cannot be removed in between.
        let count = |queue: &Arc<WaitQueue>| {
            queue.side(side).add_waiter();
            Arc::clone(queue)
        };
        let queue = match self.queues.entry(Arc::clone(channel)) {
            Entry::Occupied(queue) => count(queue.get()),
            Entry::Vacant(place) => {
                let queue =
                    count(&place.insert(Arc::new(WaitQueue::new(awaited(), channel, quiet))));
                self.count.fetch_add(1, Ordering::Relaxed);
                self.send_event(ChannelEvent::Subscribe(Arc::clone(&queue)));
                queue
            }
        };
        if self.closed.load(Ordering::Acquire) {
            queue.close_permits();
        }
        queue
    }

    /// Removes a waiter. The last one reports that to the task that listens.
    pub(super) fn leave(&self, queue: &Arc<WaitQueue>, side: usize) {
        queue.side(side).remove_waiter();
        // If the last waiters of both sides leave at once, both may send the event. That is
        // harmless.
        if queue.waiters() == 0 {
            if self.closed.load(Ordering::Acquire) {
                // After a shutdown no task unsubscribes, so the queue is removed here.
                self.remove_if(&queue.channel, |kept| Arc::ptr_eq(kept, queue));
            }
            self.send_event(ChannelEvent::LastWaiterLeft(Arc::clone(queue)));
        }
    }

    /// Sends an event to the task that listens, if it still runs.
    pub(super) fn send_event(&self, event: ChannelEvent) {
        let _ = self.events.send(event);
    }

    /// Returns whether the channel has a wait queue.
    pub(super) fn has(&self, channel: &str) -> bool {
        self.queues.contains_key(channel)
    }

    /// Returns whether there are no wait queues. The value may be stale.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    fn remove_if(&self, channel: &str, goes: impl FnOnce(&Arc<WaitQueue>) -> bool) -> bool {
        let gone = self
            .queues
            .remove_if(channel, |_, queue| goes(queue))
            .is_some();
        if gone {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        gone
    }

    pub(crate) fn get(&self, channel: &str) -> Option<Arc<WaitQueue>> {
        self.queues.get(channel).map(|queue| Arc::clone(&queue))
    }

    pub(crate) fn all(&self) -> Vec<Arc<WaitQueue>> {
        self.queues.iter().map(|queue| Arc::clone(&queue)).collect()
    }

    /// Wakes all waiters to check their locks, because messages may have been missed.
    pub(super) fn wake_all(&self) {
        for queue in self.all() {
            queue.wake_all_queues();
        }
    }

    /// Returns the number of waiters.
    pub(crate) fn waiters(&self) -> usize {
        self.queues.iter().map(|queue| queue.own_waiters()).sum()
    }

    /// Calls `look` for each wait queue, with what is awaited and the number of waiters.
    #[cfg(feature = "metrics")]
    pub(crate) fn for_each(&self, mut look: impl FnMut(&Awaited, usize)) {
        self.queues
            .iter()
            .for_each(|queue| look(&queue.awaited, queue.own_waiters()));
    }

    /// Returns how many channels are subscribed or about to be.
    pub(crate) fn channels(&self) -> usize {
        self.queues.len()
    }

    /// Closes all wait queues, present and future. Returns the hand-offs that were left in them.
    pub(crate) fn close(&self) -> Vec<Entered> {
        self.closed.store(true, Ordering::Release);
        let left_behind = self.all();
        let left = left_behind
            .iter()
            .filter_map(|queue| queue.close())
            .collect();
        for queue in &left_behind {
            self.remove_if(&queue.channel, |kept| Arc::ptr_eq(kept, queue));
        }
        left
    }
}

/// Removes the queues whose waiters have not come back within [`LINGER`], and returns their
/// channels. A connection that is down needs no UNSUBSCRIBE: the next one starts without
/// subscriptions.
pub(super) fn remove_abandoned(
    subscriptions: &Subscriptions,
    left: &mut Vec<(Instant, Arc<WaitQueue>)>,
) -> Vec<String> {
    let over = left
        .iter()
        .take_while(|(since, _)| since.elapsed() >= LINGER)
        .count();
    let mut channels = Vec::new();
    for (_, queue) in left.drain(..over) {
        if subscriptions.remove_if(&queue.channel, |kept| {
            Arc::ptr_eq(kept, &queue) && kept.waiters() == 0
        }) {
            channels.push(queue.channel.to_string());
        }
    }
    channels
}
