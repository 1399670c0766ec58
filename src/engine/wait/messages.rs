//! Waking waiters by messages: one subscriber connection, one gate for each channel that somebody waits on.
//!
//! A message is a hint: who is woken tries again. So a lost message costs time, never correctness, and a gate's
//! waiters poll together once in a while: one of them, not all.

use std::sync::{Arc, atomic::Ordering};

use tokio::{sync::mpsc, time::sleep};

use super::{
    gate::Gate,
    hub::{Event, Hub, LINGER, LISTEN_AGAIN, remove_left},
};
use crate::{
    clock::Instant,
    error::StoreErrorKind,
    log,
    store::{Heard, Link},
};

/// Channels in one SUBSCRIBE.
const CHANNELS_AT_ONCE: usize = 500;

/// Hands what was heard to its gate.
pub(crate) fn deliver(hub: &Hub, heard: Heard<'_>) {
    let (channel, text) = match heard {
        Heard::Message { channel, text } => (channel, text),
        Heard::Missed => {
            log::later!(WARN, channels = hub.channels(); "pub/sub messages were missed; waking all waiters");
            return hub.wake_all();
        }
    };
    let Some(gate) = hub.get(channel) else { return };
    gate.hear();
    match text {
        b"0" => gate.wake_one(),
        b"1" => gate.wake_all(),
        _ => log::later!(DEBUG, channel = channel; "ignoring a message that is neither 0 nor 1"),
    }
}

/// Subscribes for new gates, unsubscribes for those that were left, and again for all after a reconnect.
pub(crate) async fn subscribe(hub: &Hub, link: &Link, mut queue: mpsc::UnboundedReceiver<Event>) {
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
        unused.extend(remove_left(hub, &mut left));
        unused.retain(|channel| !hub.has(channel));
        // a repetition must not subscribe for a gate that is gone: nobody would unsubscribe
        wanted.retain(|gate| hub.get(&gate.channel).is_some_and(|kept| Arc::ptr_eq(&kept, gate)));
        if connected {
            for batch in std::mem::take(&mut wanted).chunks(CHANNELS_AT_ONCE) {
                wanted.extend(subscribe_batch(link, batch).await);
            }
            for batch in std::mem::take(&mut unused).chunks(CHANNELS_AT_ONCE) {
                unused.extend(unsubscribe_batch(link, batch).await);
            }
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
async fn subscribe_batch(link: &Link, batch: &[Arc<Gate>]) -> Vec<Arc<Gate>> {
    let channels: Vec<String> = batch.iter().map(|gate| gate.channel.to_string()).collect();
    let Err(error) = link.subscribe(&channels).await else {
        for gate in batch {
            gate.live();
        }
        return Vec::new();
    };
    if error.kind() != StoreErrorKind::NoPermission {
        return batch.to_vec();
    }
    if let [gate] = batch {
        gate.denied.store(true, Ordering::Release);
        log::later!(WARN, channel = gate.channel, error = error; "may not subscribe; waiters poll instead");
        return Vec::new();
    }
    let (first, second) = batch.split_at(batch.len() / 2);
    let mut again = Box::pin(subscribe_batch(link, first)).await;
    again.extend(Box::pin(subscribe_batch(link, second)).await);
    again
}

/// Unsubscribes. Returns what must be repeated. Who may never unsubscribe hears, and ignores, what nobody waits for.
async fn unsubscribe_batch(link: &Link, batch: &[String]) -> Vec<String> {
    let Err(error) = link.unsubscribe(batch).await else { return Vec::new() };
    log::later!(DEBUG, error = error; "cannot unsubscribe");
    if error.kind() == StoreErrorKind::NoPermission { Vec::new() } else { batch.to_vec() }
}
