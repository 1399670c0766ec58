//! One waiter: how it sleeps and what wakes it.
//!
//! A waiter joins its queue before its next try, so no release falls between. Where many may hold
//! the lock together, one that was woken alone and got in wakes the others of its side. In a fair
//! lock's queue with 16 or more ahead, a waiter does not try again once it listens: no release can
//! have been meant for it yet.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use nestlock_wire::clock::Instant;
use tokio::{sync::OwnedSemaphorePermit, time::Sleep};

use super::{
    awaited::Awaited,
    place::QueueEntry,
    queue::{SideQueue, WaitQueue},
    subscriptions::{ChannelEvent, Subscriptions},
};

use crate::{
    engine::{
        core::Core,
        hold::{Entered, Hold, generation::Ticket, state::HoldRequest},
        kind::{HEARD_SIDE, Kind, Wake},
        lease::Lease,
    },
    meter::Source,
    owner::OwnerId,
};

/// A waiter in a wait queue. It leaves the queue when dropped.
#[derive(Debug)]
pub(crate) struct Waiter<'a> {
    core: &'a Core,
    subscriptions: &'a Subscriptions,
    pub(super) queue: Arc<WaitQueue>,
    /// The number of its side of the queue.
    side: usize,
    /// Set if it can take a hold that another holder of this client hands off: how many replicas
    /// must have it at least.
    takes: Option<u32>,
    /// Where it hears the messages of another kind: see [`Kind::heard`].
    heard: Option<Arc<WaitQueue>>,
    /// Its place in the lock's queue, if the lock has one.
    queue_entry: Option<Box<QueueEntry<'a>>>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if !self.core.store.is_ours() {
            return;
        }
        if self.takes.is_some()
            && let Some((hold, ticket)) = self.queue.relay.leave()
        {
            self.core.release_later(&hold, &ticket);
        }
        self.subscriptions.leave(&self.queue, self.side);
        if let Some(heard) = &self.heard {
            self.subscriptions.leave(heard, HEARD_SIDE);
        }
    }
}

/// Why a wait ended.
#[derive(Debug)]
pub(crate) enum Woken {
    /// A message arrived. If the attempt is not made, dropping the permit wakes the next waiter.
    Notified(OwnedSemaphorePermit),
    /// Another holder of this client has handed this hold off to it.
    Handed(Entered),
    /// This waiter's poll is due.
    Poll(PollTurn),
    /// The deadline has passed.
    TimedOut,
    /// The client was shut down.
    Closed,
}

/// The turn of a waiter that polls for its side. If no attempt is made, dropping it wakes the next
/// waiter.
#[derive(Debug)]
pub(crate) struct PollTurn {
    /// `None`: the attempt was made.
    queue: Option<Arc<WaitQueue>>,
    side: usize,
}

impl PollTurn {
    pub(super) fn of(waiter: &Waiter<'_>) -> Self {
        Self {
            queue: Some(Arc::clone(&waiter.queue)),
            side: waiter.side,
        }
    }

    pub(crate) fn forget(mut self) {
        self.queue = None;
    }
}

impl Drop for PollTurn {
    fn drop(&mut self) {
        if let Some(queue) = &self.queue {
            queue.side(self.side).wake_some(1);
        }
    }
}

/// Waits for the future, or for ever if there is none.
async fn if_some<T>(future: &mut Option<Pin<Box<impl Future<Output = T>>>>) -> T {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

impl Core {
    fn join_at<'a>(
        &'a self,
        subscriptions: &'a Subscriptions,
        kind: &Arc<dyn Kind>,
        channel: &Arc<str>,
        quiet: bool,
    ) -> Waiter<'a> {
        let side = kind.about().sharing.side();
        let awaited = || Awaited::Lock(Arc::clone(kind));
        let queue = subscriptions.join(awaited, side, channel, quiet);
        self.waiter(subscriptions, queue, side)
    }

    fn waiter<'a>(
        &'a self,
        subscriptions: &'a Subscriptions,
        queue: Arc<WaitQueue>,
        side: usize,
    ) -> Waiter<'a> {
        Waiter {
            core: self,
            subscriptions,
            queue,
            side,
            takes: None,
            heard: None,
            queue_entry: None,
        }
    }

    /// Joins the wait queue of a channel. `quiet`: the waiter cannot have missed a message that
    /// concerns it. `takes`: it can take a hand-off that at least this many replicas have.
    pub(crate) fn join(
        &self,
        kind: &Arc<dyn Kind>,
        channel: &Arc<str>,
        quiet: bool,
        takes: Option<u32>,
    ) -> Waiter<'_> {
        let mut waiter = self.join_at(&self.subscriptions, kind, channel, quiet);
        waiter.takes = takes.filter(|_| waiter.queue.is_of(kind));
        if waiter.takes.is_some() {
            waiter.queue.relay.join();
        }
        waiter.heard = kind.heard().map(|(other, channel)| {
            let awaited = || Awaited::Lock(other);
            self.subscriptions
                .join(awaited, HEARD_SIDE, &channel, false)
        });
        waiter
    }

    /// Joins the wait queue of a latch.
    pub(crate) fn join_latch(&self, name: &Arc<str>, channel: &Arc<str>) -> Waiter<'_> {
        let (subscriptions, awaited) = (&*self.subscriptions, Awaited::Latch(Arc::clone(name)));
        let side = awaited.about().sharing.side();
        let queue = subscriptions.join(|| awaited, side, channel, false);
        self.waiter(subscriptions, queue, side)
    }

    /// Joins the wait queue of a list.
    pub(crate) fn join_list(&self, kind: &Arc<dyn Kind>, list: &Arc<str>) -> Waiter<'_> {
        self.join_at(&self.signals, kind, list, true)
    }

    /// Like [`Core::join`], but only if the channel has a wait queue already. Listening before the
    /// first attempt saves the second.
    pub(crate) fn join_existing(
        &self,
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        takes: Option<u32>,
    ) -> Option<Waiter<'_>> {
        if self.subscriptions.is_empty() {
            return None;
        }
        let Wake::Channel(channel) = kind.wake(owner) else {
            return None;
        };
        self.subscriptions
            .has(&channel)
            .then(|| self.join(kind, &channel, false, takes))
    }
}

impl<'a> Waiter<'a> {
    /// Keeps a place in the queue until this waiter is dropped.
    pub(crate) fn keep(&mut self, place: Option<QueueEntry<'a>>) {
        match (&mut self.queue_entry, place) {
            // One place is enough.
            (Some(kept), Some(place)) => kept.look = place.look,
            (kept, Some(place)) => *kept = Some(Box::new(place)),
            (_, None) => {}
        }
    }

    /// Wakes the next waiter after this one got the lock. Where each owner has its own channel,
    /// that waiter can re-enter.
    pub(crate) fn wake_next(&self) {
        if self.side_queue().waiters() > 1 {
            self.side_queue().wake_one();
        }
    }

    /// Wakes the others after this waiter got a lock that they may share, if it alone was woken.
    pub(crate) fn pass_on(&self) {
        if self.queue.has_permits() {
            self.side_queue().go_on();
        } else if self.side_queue().notified_one.load(Ordering::Acquire) {
            self.side_queue().wake_all();
        }
    }

    /// Records that an attempt which began then found the lock busy.
    pub(crate) fn was_busy(&self, tried: Instant) {
        self.side_queue().end_chain(tried);
    }

    fn side_queue(&self) -> &SideQueue {
        self.queue.side(self.side)
    }

    /// Returns whether it waits at this channel.
    pub(crate) fn listens_to(&self, channel: &str) -> bool {
        *self.queue.channel == *channel
    }

    /// Schedules a poll: the lock is busy for at most `ttl`, so a waiter must check it then, or
    /// after the poll cap if that is earlier.
    pub(crate) fn poll_after(&self, ttl: Option<Duration>) {
        let (now, cap) = (Instant::now(), self.core.config.poll_cap);
        // 1 ms more: the server rounds the TTL down.
        let poll = now + ttl.map_or(cap, |ttl| cap.min(ttl + Duration::from_millis(1)));
        let mut next = self.side_queue().next_poll();
        *next = if *next <= now { poll } else { poll.min(*next) };
    }

    /// Schedules a poll for an acquire that sent no request: its holder's record has the default
    /// lease, and may be left to it.
    pub(crate) fn poll_after_relay(&self) {
        self.poll_after(Some(self.core.config.watchdog_timeout));
    }

    /// Returns whether a request for the lock would be pointless now: another task of this client
    /// holds it, and hands it off or publishes its release.
    pub(crate) fn is_request_pointless(&self) -> bool {
        self.takes.is_some() && self.queue.is_live() && self.queue.relay.goes_on(Instant::now())
    }

    /// Takes the hold that another holder has handed off. A hold that may no longer be received is
    /// released.
    fn take(&self) -> Option<Entered> {
        let (hold, ticket) = self.queue.relay.take()?;
        let replicas = self.takes.unwrap_or(0);
        if ticket
            .generation
            .may_be_received(replicas, self.core.epoch(&hold), Instant::now())
        {
            return Some((hold, ticket));
        }
        self.core.release_later(&hold, &ticket);
        None
    }

    /// Takes the hold that the last holder's release granted.
    pub(crate) fn take_granted(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        lease: Lease,
    ) -> Option<Ticket> {
        let granted = self.queue.take_granted()?;
        let look = self.queue_entry.as_ref()?.look?;
        let (epoch, now) = (self.core.epoch(hold), Instant::now());
        // The rule for watchdog timeouts: a renewal can fail and still be retried in time.
        let renewal = 2 * (self.core.config.command_timeout() + self.core.grace());
        let grant = look.grant(granted, lease, epoch, now, renewal)?;
        hold.change(|state, effects| state.take_granted(request, &grant, epoch, now, effects))
    }

    /// Returns whether all waiters were woken since this one `tried`: then it need not sleep.
    pub(crate) fn was_notified_since(&self, tried: Instant) -> bool {
        self.side_queue()
            .notified_all()
            .is_some_and(|told| told > tried)
    }

    /// Takes the permit of a waiter that was woken before it slept. Left behind, the permit would
    /// wake another waiter in vain.
    pub(crate) fn take_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.side_queue().permits)
            .try_acquire_owned()
            .ok()
    }

    fn count(&self, source: Source) {
        self.core
            .config
            .meter
            .wakeup(self.queue.awaited.of(), source);
    }

    /// Sleeps until woken, until this waiter's poll is due, or until the deadline.
    pub(crate) fn wait(
        &self,
        deadline: Option<Instant>,
    ) -> impl Future<Output = Woken> + Send + '_ {
        for queue in self.heard.iter().chain([&self.queue]) {
            if queue.must_be_listened_to() {
                self.subscriptions
                    .send_event(ChannelEvent::Subscribe(Arc::clone(queue)));
            }
        }
        // A block, because an `async fn` keeps its arguments twice.
        async move {
            let told = Arc::clone(&self.side_queue().permits).acquire_owned();
            tokio::pin!(told);
            let hand = || Arc::clone(&self.queue.relay.permits).acquire_owned();
            let handed = hand();
            tokio::pin!(handed);
            let listen =
                |queue: &WaitQueue| Arc::clone(&queue.side(HEARD_SIDE).permits).acquire_owned();
            let mut heard = self.heard.as_deref().map(|queue| Box::pin(listen(queue)));
            loop {
                tokio::select! {
                    biased;
                    permit = &mut handed, if self.takes.is_some() => {
                        let Ok(permit) = permit else { return Woken::Closed };
                        permit.forget();
                        if let Some(entered) = self.take() {
                            self.count(Source::Message);
                            return Woken::Handed(entered);
                        }
                        // Another waiter took the hand-off, or it was taken back.
                        handed.set(hand());
                    }
                    permit = &mut told => {
                        let Ok(permit) = permit else { return Woken::Closed };
                        self.count(self.queue.notified_by());
                        return Woken::Notified(permit);
                    }
                    permit = if_some(&mut heard) => {
                        let Ok(permit) = permit else { return Woken::Closed };
                        self.count(Source::Message);
                        return Woken::Notified(permit);
                    }
                    () = self.alarm(deadline) => {}
                }
                if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    return Woken::TimedOut;
                }
                if let Some(turn) = self.turn_to_poll() {
                    self.count(Source::Poll);
                    return Woken::Poll(turn);
                }
            }
        }
    }

    fn alarm(&self, deadline: Option<Instant>) -> Sleep {
        let next = *self.side_queue().next_poll();
        self.core
            .sleep_until(deadline.map_or(next, |deadline| deadline.min(next)))
    }

    /// Returns its turn if a poll is due, and no other waiter of its side has taken that turn.
    fn turn_to_poll(&self) -> Option<PollTurn> {
        let now = Instant::now();
        let mut next = self.side_queue().next_poll();
        if *next > now {
            return None;
        }
        *next = now + self.core.config.poll_cap;
        self.side_queue().begin_chain();
        self.side_queue()
            .notified_one
            .store(true, Ordering::Release);
        Some(PollTurn::of(self))
    }
}
