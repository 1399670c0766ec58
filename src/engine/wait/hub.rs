//! The gates of one client, and the line to the task that listens for them.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;

use super::gate::Gate;
use crate::{
    clock::Instant,
    engine::{baton::Baton, kind::Kind},
    sync::{
        DashMap, Entry,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

/// How long a channel stays subscribed after its last waiter left, so that a hot lock does not flap.
pub(super) const LINGER: Duration = Duration::from_millis(100);
/// The pause before a failed SUBSCRIBE is repeated.
pub(super) const LISTEN_AGAIN: Duration = Duration::from_millis(200);

/// The gates, and the line to the task that subscribes.
#[derive(Debug)]
pub(crate) struct Hub {
    gates: DashMap<Arc<str>, Arc<Gate>>,
    /// How many there are. A hint, which spares whoever locks and unlocks a look at each shard of the map: read wrongly, it costs
    /// a try, or a hand-over, as if the waiter had come a moment later.
    count: AtomicUsize,
    events: mpsc::UnboundedSender<Event>,
    /// Stored before the gates are looked through, and loaded after one was put there: see `Core::closed`.
    closed: AtomicBool,
}

#[derive(Debug)]
pub(crate) enum Event {
    Subscribe(Arc<Gate>),
    /// The last waiter left.
    Left(Arc<Gate>),
}

impl Hub {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Event>) {
        let (events, queue) = mpsc::unbounded_channel();
        (Self { gates: DashMap::new(), count: AtomicUsize::new(0), events, closed: AtomicBool::new(false) }, queue)
    }

    /// Counts one waiter more at a channel; the first one subscribes. A permit that nobody was there to take stays: who
    /// comes now may have tried before the message came.
    pub(super) fn join(&self, kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool) -> Arc<Gate> {
        let shares = kind.about().shared;
        // counted while the entry is locked: nobody removes the gate meanwhile
        let count = |gate: &Arc<Gate>| {
            gate.side(shares).add_waiter();
            Arc::clone(gate)
        };
        let gate = match self.gates.entry(Arc::clone(channel)) {
            Entry::Occupied(gate) => count(gate.get()),
            Entry::Vacant(place) => {
                let gate = count(&place.insert(Arc::new(Gate::new(kind, channel, quiet))));
                self.count.fetch_add(1, Ordering::Relaxed);
                self.tell(Event::Subscribe(Arc::clone(&gate)));
                gate
            }
        };
        if self.closed.load(Ordering::Acquire) {
            gate.turn_away();
        }
        gate
    }

    /// One waiter less.
    pub(super) fn leave(&self, gate: &Arc<Gate>, shares: bool) {
        gate.side(shares).remove_waiter();
        // two that leave both sides at once may both see that they were the last: that is said twice, and harms nobody
        if gate.waiters() == 0 {
            if self.closed.load(Ordering::Acquire) {
                // nobody unsubscribes any more
                self.remove_if(&gate.channel, |kept| Arc::ptr_eq(kept, gate));
            }
            self.tell(Event::Left(Arc::clone(gate)));
        }
    }

    /// Tells the task that listens, if it still runs.
    pub(super) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }

    /// Whether somebody waits at this channel.
    pub(super) fn has(&self, channel: &str) -> bool {
        self.gates.contains_key(channel)
    }

    /// Whether nobody waits, as far as is known here.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    fn remove_if(&self, channel: &str, goes: impl FnOnce(&Arc<Gate>) -> bool) -> bool {
        let gone = self.gates.remove_if(channel, |_, gate| goes(gate)).is_some();
        if gone {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        gone
    }

    pub(crate) fn get(&self, channel: &str) -> Option<Arc<Gate>> {
        self.gates.get(channel).map(|gate| Arc::clone(&gate))
    }

    /// Where holds of this lock are handed on, by whatever handle it is looked for.
    pub(crate) fn of_lock(&self, kind: &Arc<dyn Kind>) -> Option<Arc<Gate>> {
        self.gates.iter().find(|gate| gate.is_of(kind)).map(|gate| Arc::clone(&gate))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Gate>> {
        self.gates.iter().map(|gate| Arc::clone(&gate)).collect()
    }

    /// Messages may have been missed: everybody looks.
    pub(super) fn wake_all(&self) {
        for gate in self.all() {
            gate.wake_both_sides();
        }
    }

    /// How many wait.
    pub(crate) fn waiters(&self) -> usize {
        self.gates.iter().map(|gate| gate.waiters()).sum()
    }

    /// Of each gate, whom its first waiter waits for, and how many wait.
    #[cfg(feature = "metrics")]
    pub(crate) fn for_each_kind(&self, mut look: impl FnMut(&Arc<dyn Kind>, usize)) {
        self.gates.iter().for_each(|gate| look(&gate.kind, gate.waiters()));
    }

    /// How many channels are subscribed to, or about to be.
    pub(crate) fn channels(&self) -> usize {
        self.gates.len()
    }

    /// Turns all waiters away, now and later. What they were about to hand on.
    pub(crate) fn close(&self) -> Vec<Baton> {
        self.closed.store(true, Ordering::Release);
        let left_behind = self.all();
        let left = left_behind.iter().filter_map(|gate| gate.close()).collect();
        for gate in &left_behind {
            self.remove_if(&gate.channel, |kept| Arc::ptr_eq(kept, gate));
        }
        left
    }
}

/// Removes the gates that nobody came back to; returns their channels. A connection that is down needs no
/// UNSUBSCRIBE: the next one starts without.
pub(super) fn remove_left(hub: &Hub, left: &mut Vec<(Instant, Arc<Gate>)>) -> Vec<String> {
    let over = left.iter().take_while(|(since, _)| since.elapsed() >= LINGER).count();
    let mut channels = Vec::new();
    for (_, gate) in left.drain(..over) {
        if hub.remove_if(&gate.channel, |kept| Arc::ptr_eq(kept, &gate) && kept.waiters() == 0) {
            channels.push(gate.channel.to_string());
        }
    }
    channels
}
