//! Waking waiters by messages: one subscriber connection for each server, one gate for each channel that somebody waits on.
//!
//! A message is a hint: who is woken tries again. So a lost message costs time, never correctness, and a gate's
//! waiters poll together once in a while: one of them, not all.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use futures_util::future::join_all;
use tokio::{sync::mpsc, time::sleep};

use super::{
    gate::Gate,
    hub::{Event, Hub, LINGER, LISTEN_AGAIN, remove_left},
};
use crate::{
    clock::Instant,
    engine::{core::Core, turn::Granted},
    error::StoreErrorKind,
    log,
    store::{Heard, Link},
};

/// Hands what was heard to its gate.
pub(crate) fn deliver(hub: &Hub, heard: Heard<'_>) {
    let (channel, text) = match heard {
        Heard::Message { channel, text } => (channel, text),
        Heard::Missed => {
            log::later!(WARN, channels = hub.channels(); "pub/sub messages were missed; waking all waiters");
            return hub.wake_all();
        }
        Heard::Dropped { channel } => {
            // it was not this client that ended it
            if let Some(gate) = hub.get(channel) {
                hub.tell(Event::Subscribe(gate));
            }
            return;
        }
    };
    let Some(gate) = hub.get(channel) else { return };
    gate.hear();
    match text {
        b"0" => gate.wake_one(),
        b"1" => gate.wake_all(),
        _ => match Granted::parse(text) {
            Some(granted) => gate.grant(granted),
            None => log::later!(DEBUG, channel = channel; "ignoring a message of another program"),
        },
    }
}

/// Sees to it that each gate's messages are heard: on one connection, or, in a cluster, from the node of its lock.
pub(crate) async fn subscribe(core: Arc<Core>, mut queue: mpsc::UnboundedReceiver<Event>) {
    let Some(mut moves) = core.store.moves() else {
        let (home, link) = core.store.home("");
        return listen(&core, home, &link, queue).await;
    };
    let mut homes = Homes { core: &core, known: HashMap::new() };
    loop {
        tokio::select! {
            event = queue.recv() => match event {
                Some(Event::Subscribe(gate)) => homes.settle(&gate),
                Some(Event::Left(gate)) => homes.tell(gate.home(), Event::Left(gate)),
                None => return,
            },
            _ = moves.changed() => {
                core.hub.all().iter().for_each(|gate| homes.visit(gate));
                // whoever listens to a link that was left ends, since nobody tells it anything any more
                homes.known.retain(|_, (link, _)| !link.is_closed());
            }
        }
    }
}

/// Who listens where, in a cluster.
struct Homes<'a> {
    core: &'a Arc<Core>,
    known: HashMap<u16, (Arc<Link>, mpsc::UnboundedSender<Event>)>,
}

impl Homes<'_> {
    /// Subscribes where a gate is at home by now.
    fn settle(&mut self, gate: &Arc<Gate>) {
        let (home, link) = self.core.store.home(&gate.channel);
        gate.move_to(home);
        if self.known.get(&home).is_none_or(|(known, _)| !Arc::ptr_eq(known, &link)) {
            let (tell, events) = mpsc::unbounded_channel();
            let (core, listens) = (Arc::clone(self.core), Arc::clone(&link));
            self.known.insert(home, (link, tell));
            tokio::spawn(async move { listen(&core, home, &listens, events).await });
        }
        self.tell(home, Event::Subscribe(Arc::clone(gate)));
    }

    /// Slots have moved: a gate may be at home elsewhere.
    fn visit(&mut self, gate: &Arc<Gate>) {
        let (home, link) = self.core.store.home(&gate.channel);
        if gate.is_at(home) && self.known.get(&home).is_some_and(|(known, _)| Arc::ptr_eq(known, &link)) {
            return;
        }
        let old = gate.home();
        self.settle(gate);
        self.tell(old, Event::Left(Arc::clone(gate)));
    }

    fn tell(&self, home: u16, event: Event) {
        if let Some((_, tell)) = self.known.get(&home) {
            let _ = tell.send(event);
        }
    }
}

/// Subscribes for new gates of one node, unsubscribes for those that were left, and again for all after a reconnect.
async fn listen(core: &Core, home: u16, link: &Link, mut queue: mpsc::UnboundedReceiver<Event>) {
    let hub = &core.hub;
    let mut connections = link.connections();
    let mut wanted: Vec<Arc<Gate>> = Vec::new();
    let mut left: Vec<(Instant, Arc<Gate>)> = Vec::new();
    // channels that nobody waits for, and to which the connection is subscribed
    let mut unused: Vec<String> = Vec::new();
    loop {
        let (retry, mut connected) = (!wanted.is_empty() || !unused.is_empty(), false);
        let grace = left.first().map(|(since, _)| *since + LINGER);
        tokio::select! {
            event = queue.recv() => match event {
                Some(event) => sort_in(event, &mut wanted, &mut left),
                None => return,
            },
            _ = connections.changed() => {
                (wanted, connected) = (hub.all(), true);
                wanted.retain(|gate| gate.is_at(home));
                unused.clear();
                // a denial costs a connection: without end, if the new one began with the same
                wanted.retain(|gate| !gate.denied.load(Ordering::Acquire));
            }
            () = sleep(LISTEN_AGAIN), if retry => {}
            () = sleep(grace.map_or(LINGER, |grace| grace.saturating_duration_since(Instant::now()))), if grace.is_some() => {}
        }
        while let Ok(event) = queue.try_recv() {
            sort_in(event, &mut wanted, &mut left);
        }
        connected |= link.is_up();
        for (_, gate) in left.extract_if(.., |(_, gate)| !gate.is_at(home)) {
            unused.push(gate.channel.to_string());
            // whether anybody has left it is the business of its new home
            if gate.waiters() == 0 {
                hub.tell(Event::Left(gate));
            }
        }
        unused.extend(remove_left(hub, &mut left));
        unused.retain(|channel| hub.get(channel).is_none_or(|gate| !gate.is_at(home)));
        // a repetition must not subscribe for a gate that is gone: nobody would unsubscribe
        wanted.retain(|gate| gate.is_at(home) && hub.get(&gate.channel).is_some_and(|kept| Arc::ptr_eq(&kept, gate)));
        if connected {
            let at_once = link.channels_at_once();
            let batches = std::mem::take(&mut wanted);
            let again = join_all(batches.chunks(at_once).map(|batch| subscribe_batch(core, link, batch))).await;
            wanted.extend(again.into_iter().flatten());
            let batches = std::mem::take(&mut unused);
            let again = join_all(batches.chunks(at_once).map(|batch| unsubscribe_batch(link, batch))).await;
            unused.extend(again.into_iter().flatten());
        }
    }
}

fn sort_in(event: Event, wanted: &mut Vec<Arc<Gate>>, left: &mut Vec<(Instant, Arc<Gate>)>) {
    match event {
        Event::Subscribe(gate) => wanted.push(gate),
        Event::Left(gate) => left.push((Instant::now(), gate)),
    }
}

/// Subscribes, and wakes waiters, since messages may have been missed before. Returns what must be repeated.
async fn subscribe_batch(core: &Core, link: &Link, batch: &[Arc<Gate>]) -> Vec<Arc<Gate>> {
    let channels: Vec<String> = batch.iter().map(|gate| gate.channel.to_string()).collect();
    let Err(error) = link.subscribe(&channels).await else {
        for gate in batch {
            gate.live();
        }
        return Vec::new();
    };
    if error.kind() == StoreErrorKind::Moved {
        core.store.ring();
    }
    if !error.kind().is_denied() {
        return batch.to_vec();
    }
    if let [gate] = batch {
        gate.denied.store(true, Ordering::Release);
        log::later!(WARN, channel = gate.channel, error = error; "may not subscribe; waiters poll instead");
        return Vec::new();
    }
    let (first, second) = batch.split_at(batch.len() / 2);
    let mut again = Box::pin(subscribe_batch(core, link, first)).await;
    again.extend(Box::pin(subscribe_batch(core, link, second)).await);
    again
}

/// Unsubscribes. Returns what must be repeated. Who may never unsubscribe hears, and ignores, what nobody waits for. Where a slot
/// has moved away, the server has ended its subscriptions by itself.
async fn unsubscribe_batch(link: &Link, batch: &[String]) -> Vec<String> {
    let Err(error) = link.unsubscribe(batch).await else { return Vec::new() };
    log::later!(DEBUG, error = error; "cannot unsubscribe");
    let is_over = error.kind().is_denied() || error.kind() == StoreErrorKind::Moved;
    if is_over { Vec::new() } else { batch.to_vec() }
}
