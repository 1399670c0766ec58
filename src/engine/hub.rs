//! Waking waiters: one subscriber connection, one gate for each channel that somebody waits on.
//!
//! A message is a hint: who is woken tries again. So a lost message costs time, never correctness, and a gate's
//! waiters poll together once in a while: one of them, not all.
//!
//! The gate of a read-write lock has a side for those who may hold the lock together, who are all woken by any message,
//! and one for the others, of whom one is: it gets the lock, or somebody else has it, whose release tells the next.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use dashmap::{DashMap, Entry};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc},
    time::{Sleep, sleep},
};

use super::{Core, Kind, Wake, hold::Hold};
use crate::{
    clock::Instant,
    error::StoreErrorKind,
    log,
    owner::OwnerId,
    store::{ChannelMessage, Link},
};

/// How long a channel stays subscribed after its last waiter left, so that a hot lock does not flap.
pub(super) const GRACE: Duration = Duration::from_millis(100);
/// Channels in one SUBSCRIBE.
const BATCH: usize = 500;
/// The pause before a failed SUBSCRIBE is repeated.
pub(super) const RETRY: Duration = Duration::from_millis(200);

/// The gates, and the line to the task that subscribes.
#[derive(Debug)]
pub(crate) struct Hub {
    gates: DashMap<Arc<str>, Arc<Gate>>,
    requests: mpsc::UnboundedSender<Request>,
    closed: AtomicBool,
}

#[derive(Debug)]
pub(crate) enum Request {
    Subscribe(Arc<Gate>),
    /// The last waiter left.
    Left(Arc<Gate>),
}

/// Where the waiters of one channel sleep.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(super) channel: Arc<str>,
    /// The lock that its first waiter waits for.
    pub(super) kind: Arc<dyn Kind>,
    /// Those who want the lock for themselves.
    alone: Side,
    /// Those who may hold it together, where the lock has two sides.
    together: Option<Box<Side>>,
    /// A request to listen was made, and nobody has stopped to listen since.
    listened: AtomicBool,
    /// It was subscribed to once; from then on, a subscription means that messages may have been missed.
    was_live: AtomicBool,
    /// What happened before its subscription is nothing to its waiters.
    quiet: bool,
    /// The ACL user may not listen: waiters poll, and nobody subscribes again while they do.
    denied: AtomicBool,
}

/// The waiters of a gate that are told alike.
#[derive(Debug)]
struct Side {
    permits: Arc<Semaphore>,
    waiters: AtomicUsize,
    /// When all were told last: whoever tried before, and comes to wait afterwards, was not.
    told_all: Mutex<Option<Instant>>,
    /// Somebody tries alone. If it gets a lock that others may hold with it, nobody else tells them.
    told_one: AtomicBool,
    /// The next time that one waiter tries without having been told to.
    next_poll: Mutex<Instant>,
}

impl Side {
    fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            waiters: AtomicUsize::new(0),
            told_all: Mutex::new(None),
            told_one: AtomicBool::new(false),
            next_poll: Mutex::new(Instant::now()),
        }
    }

    fn wake_one(&self) {
        self.told_one.store(true, Ordering::Release);
        // one also where nobody waits: somebody may have tried already, and be about to wait
        if self.permits.available_permits() < self.waiters().max(1) {
            self.permits.add_permits(1);
        }
    }

    fn wake_all(&self) {
        self.told_one.store(false, Ordering::Release);
        // locked until the permits are there: who looks in between would try without its own, which then wakes another
        let mut told_all = self.told_all();
        *told_all = Some(Instant::now());
        let missing = self.waiters().max(1).saturating_sub(self.permits.available_permits());
        self.permits.add_permits(missing);
    }

    fn waiters(&self) -> usize {
        self.waiters.load(Ordering::SeqCst)
    }

    fn told_all(&self) -> MutexGuard<'_, Option<Instant>> {
        self.told_all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_poll(&self) -> MutexGuard<'_, Instant> {
        self.next_poll.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate {
    fn new(kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool) -> Self {
        Self {
            channel: Arc::clone(channel),
            kind: Arc::clone(kind),
            alone: Side::new(),
            together: kind.has_two_sides().then(|| Box::new(Side::new())),
            listened: AtomicBool::new(true),
            was_live: AtomicBool::new(false),
            quiet,
            denied: AtomicBool::new(false),
        }
    }

    fn side(&self, shares: bool) -> &Side {
        self.together.as_deref().filter(|_| shares).unwrap_or(&self.alone)
    }

    fn sides(&self) -> impl Iterator<Item = &Side> {
        // those who may be in together first: a writer that comes second waits for them alone, since it holds the next
        // ones back; they have no such means against the next writers
        self.together.as_deref().into_iter().chain([&self.alone])
    }

    /// The lock may be free for one.
    pub(super) fn wake_one(&self) {
        match &self.together {
            Some(_) => self.wake_all(),
            None => self.alone.wake_one(),
        }
    }

    /// The lock may be free for many: but only one of those who want it alone can have it.
    fn wake_all(&self) {
        match &self.together {
            Some(together) => {
                together.wake_all();
                self.alone.wake_one();
            }
            None => self.alone.wake_all(),
        }
    }

    /// The subscription has arrived. The first time, one waiter tries again: it gets the lock, and its release is
    /// heard; or somebody has the lock, whose release will be. Later, all do.
    fn live(&self) {
        if self.was_live.swap(true, Ordering::AcqRel) {
            self.sides().for_each(Side::wake_all);
        } else if !self.quiet {
            self.sides().for_each(Side::wake_one);
        }
    }

    pub(super) fn waiters(&self) -> usize {
        self.sides().map(Side::waiters).sum()
    }

    fn close(&self) {
        self.sides().for_each(|side| side.permits.close());
    }

    /// Stops to listen, unless more than `so_many` wait: whoever comes to wait asks for it again.
    pub(super) fn stop_unless_more_than(&self, so_many: usize) -> bool {
        // first, so that a waiter who comes now either is counted or asks
        self.listened.store(false, Ordering::SeqCst);
        let goes_on = self.waiters() > so_many;
        if goes_on {
            self.listened.store(true, Ordering::SeqCst);
        }
        !goes_on
    }

    /// Takes back what nobody is left to hear.
    pub(super) fn take_unheard(&self) -> bool {
        self.waiters() == 0 && self.alone.permits.forget_permits(usize::MAX) > 0
    }
}

/// One waiter at a gate; leaves it when dropped.
#[derive(Debug)]
pub(crate) struct Waiter<'a> {
    core: &'a Core,
    hub: &'a Hub,
    gate: Arc<Gate>,
    /// Whether it may hold the lock together with others.
    shares: bool,
    /// Where the lock has a queue: the place in it.
    place: Option<Box<Place<'a>>>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.side().waiters.fetch_sub(1, Ordering::SeqCst);
        // two that leave both sides at once may both see that they were the last: that is said twice, and harms nobody
        if self.gate.waiters() == 0 {
            if self.hub.closed.load(Ordering::Acquire) {
                // nobody unsubscribes any more
                self.hub.gates.remove_if(&self.gate.channel, |_, kept| Arc::ptr_eq(kept, &self.gate));
            }
            let _ = self.hub.requests.send(Request::Left(Arc::clone(&self.gate)));
        }
    }
}

/// A place in the lock's queue, kept for one waiter. Given up when dropped: with the last one, the server is told.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    core: &'a Core,
    hold: Arc<Hold>,
}

impl<'a> Place<'a> {
    pub(crate) fn new(core: &'a Core, hold: &Arc<Hold>) -> Self {
        hold.enter_queue();
        Self { core, hold: Arc::clone(hold) }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.hold.leave_queue_once(self.core.epoch(&self.hold));
        self.core.tidy(&self.hold);
    }
}

/// Why a waiter tries again.
#[derive(Debug)]
pub(crate) enum Woken {
    /// A message came. The permit goes to the next waiter unless the try is made.
    Told(OwnedSemaphorePermit),
    /// It is this waiter's turn to look.
    Poll,
    /// The time is over.
    TimedOut,
    /// The client was shut down.
    Closed,
}

impl Hub {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Request>) {
        let (requests, queue) = mpsc::unbounded_channel();
        (Self { gates: DashMap::new(), requests, closed: AtomicBool::new(false) }, queue)
    }

    /// Counts one waiter more at a channel; the first one subscribes. A permit that nobody was there to take stays: who
    /// comes now may have tried before the message came.
    fn enter<'a>(&'a self, core: &'a Core, kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool) -> Waiter<'a> {
        let shares = kind.shares();
        // counted while the entry is locked: nobody removes the gate meanwhile
        let count = |gate: &Arc<Gate>| {
            gate.side(shares).waiters.fetch_add(1, Ordering::SeqCst);
            Arc::clone(gate)
        };
        let gate = match self.gates.entry(Arc::clone(channel)) {
            Entry::Occupied(gate) => count(gate.get()),
            Entry::Vacant(place) => {
                let gate = count(&place.insert(Arc::new(Gate::new(kind, channel, quiet))));
                let _ = self.requests.send(Request::Subscribe(Arc::clone(&gate)));
                gate
            }
        };
        if self.closed.load(Ordering::Acquire) {
            gate.close();
        }
        Waiter { core, hub: self, gate, shares, place: None }
    }

    fn get(&self, channel: &str) -> Option<Arc<Gate>> {
        self.gates.get(channel).map(|gate| Arc::clone(&gate))
    }

    fn all(&self) -> Vec<Arc<Gate>> {
        self.gates.iter().map(|gate| Arc::clone(&gate)).collect()
    }

    /// Messages may have been missed: everybody looks.
    pub(super) fn wake_all(&self) {
        for gate in self.all() {
            gate.sides().for_each(Side::wake_all);
        }
    }

    /// How many channels are subscribed to, or about to be.
    pub(crate) fn channels(&self) -> usize {
        self.gates.len()
    }

    /// Turns all waiters away, now and later.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        for gate in self.all() {
            gate.close();
        }
        self.gates.clear();
    }
}

impl Core {
    /// Waits at a channel from now on. `quiet`: no message can have been sent there yet.
    pub(super) fn join(&self, kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool) -> Waiter<'_> {
        self.hub.enter(self, kind, channel, quiet)
    }

    /// Waits for an element of a list from now on.
    pub(super) fn join_list(&self, kind: &Arc<dyn Kind>, list: &Arc<str>) -> Waiter<'_> {
        self.signals.enter(self, kind, list, true)
    }

    /// As [`Core::join`], if somebody waits there already. Whoever listens before trying needs to try but once.
    pub(super) fn join_existing(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Waiter<'_>> {
        if self.hub.gates.is_empty() {
            return None;
        }
        let Wake::Channel(channel) = kind.wake(owner) else { return None };
        self.hub.gates.contains_key(&channel).then(|| self.join(kind, &channel, false))
    }
}

impl<'a> Waiter<'a> {
    /// Keeps a place in the queue for as long as it waits.
    pub(crate) fn keep(&mut self, place: Option<Place<'a>>) {
        // one is enough; a waiter that listened before its first try had none
        self.place = self.place.take().or(place.map(Box::new));
    }

    /// It has the lock: where the channel is its owner's alone, the owner's next waiter can re-enter.
    pub(crate) fn tell_next(&self) {
        if self.side().waiters() > 1 {
            self.side().wake_one();
        }
    }

    /// It got a lock that others may hold as well: whoever was not told tries, too.
    pub(crate) fn pass_on(&self) {
        if self.side().told_one.load(Ordering::Acquire) {
            self.side().wake_all();
        }
    }

    fn side(&self) -> &Side {
        self.gate.side(self.shares)
    }

    /// Whether it listens to this channel.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        *self.gate.channel == *channel
    }

    /// The lock is busy, for `ttl` at most: somebody must look by then, or when the poll cap is over.
    pub(crate) fn look_after(&self, ttl: Option<Duration>) {
        let (now, cap) = (Instant::now(), self.core.config.poll_cap);
        // one millisecond more: the server rounds the TTL down
        let poll = now + ttl.map_or(cap, |ttl| cap.min(ttl + Duration::from_millis(1)));
        let mut next = self.side().next_poll();
        *next = if *next <= now { poll } else { poll.min(*next) };
    }

    /// Whether everybody was told since this waiter `tried`: it need not sleep.
    pub(crate) fn was_told_since(&self, tried: Instant) -> bool {
        self.side().told_all().is_some_and(|told| told > tried)
    }

    /// The permit of somebody who was told before he slept: left behind, it would make another one try in vain.
    pub(crate) fn take_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.side().permits).try_acquire_owned().ok()
    }

    /// Sleeps until told, until it is this waiter's turn to look, or until `limit`.
    pub(crate) fn wait(&self, limit: Option<Instant>) -> impl Future<Output = Woken> + Send + '_ {
        if !self.gate.listened.swap(true, Ordering::SeqCst) {
            let _ = self.hub.requests.send(Request::Subscribe(Arc::clone(&self.gate)));
        }
        // a block, since an `async fn` keeps its arguments twice
        async move {
            let told = Arc::clone(&self.side().permits).acquire_owned();
            tokio::pin!(told);
            loop {
                tokio::select! {
                    biased;
                    permit = &mut told => return permit.map_or(Woken::Closed, Woken::Told),
                    () = self.alarm(limit) => {}
                }
                if limit.is_some_and(|limit| limit <= Instant::now()) {
                    return Woken::TimedOut;
                }
                if self.is_my_turn_to_look() {
                    return Woken::Poll;
                }
            }
        }
    }

    fn alarm(&self, limit: Option<Instant>) -> Sleep {
        let next = *self.side().next_poll();
        self.core.sleep_until(limit.map_or(next, |limit| limit.min(next)))
    }

    fn is_my_turn_to_look(&self) -> bool {
        let now = Instant::now();
        let mut next = self.side().next_poll();
        let due = *next <= now;
        if due {
            *next = now + self.core.config.poll_cap;
            self.side().told_one.store(true, Ordering::Release);
        }
        due
    }
}

/// Hands messages to their gates. Does nothing else, so that it never lags.
pub(crate) async fn read(hub: &Hub, link: &Link) {
    use broadcast::error::RecvError;
    let mut messages = link.messages();
    loop {
        match messages.recv().await {
            Ok(message) => deliver(hub, &message),
            Err(RecvError::Lagged(missed)) => {
                log::later!(WARN, missed = missed; "pub/sub messages were missed; waking all waiters");
                hub.wake_all();
            }
            Err(RecvError::Closed) => return,
        }
    }
}

fn deliver(hub: &Hub, message: &ChannelMessage) {
    let Some(gate) = hub.get(&message.channel) else { return };
    match message.value.as_bytes() {
        Some(b"0") => gate.wake_one(),
        Some(b"1") => gate.wake_all(),
        _ => log::later!(DEBUG, channel = message.channel; "ignoring a message that is neither 0 nor 1"),
    }
}

/// Subscribes for new gates, unsubscribes for those that were left, and again for all after a reconnect.
pub(crate) async fn subscribe(hub: &Hub, link: &Link, mut queue: mpsc::UnboundedReceiver<Request>) {
    let mut connections = link.connections();
    let mut wanted: Vec<Arc<Gate>> = Vec::new();
    let mut left: Vec<(Instant, Arc<Gate>)> = Vec::new();
    loop {
        let (retry, mut connected) = (!wanted.is_empty(), false);
        let grace = left.first().map(|(since, _)| *since + GRACE);
        tokio::select! {
            request = queue.recv() => match request {
                Some(request) => sort_in(request, &mut wanted, &mut left),
                None => return,
            },
            _ = connections.changed() => {
                (wanted, connected) = (hub.all(), true);
                // a denial costs a connection: without end, if the new one began with the same
                wanted.retain(|gate| !gate.denied.load(Ordering::Acquire));
            }
            () = sleep(RETRY), if retry => {}
            () = sleep(grace.map_or(GRACE, |grace| grace.saturating_duration_since(Instant::now()))), if grace.is_some() => {}
        }
        while let Ok(request) = queue.try_recv() {
            sort_in(request, &mut wanted, &mut left);
        }
        connected |= link.is_up();
        let unused = remove_left(hub, &mut left);
        // a repetition must not subscribe for a gate that is gone: nobody would unsubscribe
        wanted.retain(|gate| hub.get(&gate.channel).is_some_and(|kept| Arc::ptr_eq(&kept, gate)));
        if connected {
            for batch in std::mem::take(&mut wanted).chunks(BATCH) {
                wanted.extend(subscribe_batch(link, batch).await);
            }
            for batch in unused.chunks(BATCH) {
                if let Err(error) = link.unsubscribe(batch.to_vec()).await {
                    log::later!(DEBUG, error = error; "cannot unsubscribe");
                }
            }
        }
    }
}

fn sort_in(request: Request, wanted: &mut Vec<Arc<Gate>>, left: &mut Vec<(Instant, Arc<Gate>)>) {
    match request {
        Request::Subscribe(gate) => wanted.push(gate),
        Request::Left(gate) => left.push((Instant::now(), gate)),
    }
}

/// Subscribes, and wakes waiters, since messages may have been missed before. Returns what must be repeated.
async fn subscribe_batch(link: &Link, batch: &[Arc<Gate>]) -> Vec<Arc<Gate>> {
    let channels = batch.iter().map(|gate| gate.channel.to_string()).collect();
    let outcome = match link.subscribe(channels).await {
        // SUBSCRIBE is answered before it is sent; the barrier proves that it arrived
        Ok(()) => link.barrier().await,
        Err(error) => Err(error),
    };
    let Err(error) = outcome else {
        for gate in batch {
            gate.live();
        }
        return Vec::new();
    };
    if !link.is_up() {
        return batch.to_vec();
    }
    // the refusal answered something else, and later answers may be shifted too: start over with a new connection
    link.reset().await;
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

/// Removes the gates that nobody came back to; returns their channels. A connection that is down needs no
/// UNSUBSCRIBE: the next one starts without.
pub(super) fn remove_left(hub: &Hub, left: &mut Vec<(Instant, Arc<Gate>)>) -> Vec<String> {
    let over = left.iter().take_while(|(since, _)| since.elapsed() >= GRACE).count();
    let mut channels = Vec::new();
    for (_, gate) in left.drain(..over) {
        let unused = |_: &Arc<str>, kept: &mut Arc<Gate>| Arc::ptr_eq(kept, &gate) && kept.waiters() == 0;
        if hub.gates.remove_if_mut(&gate.channel, unused).is_some() {
            channels.push(gate.channel.to_string());
        }
    }
    channels
}
