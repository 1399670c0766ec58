//! One waiter: how it sleeps, and what wakes it.

use std::{
    future::Future,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{sync::OwnedSemaphorePermit, time::Sleep};

use super::{
    gate::{Gate, Side},
    hub::{Event, Hub},
    place::Place,
};
use crate::{
    clock::Instant,
    engine::{
        baton::Baton,
        core::Core,
        generation::Ticket,
        hold::Hold,
        kind::{Kind, Wake},
        lease::Lease,
        state::Request,
    },
    meter::Source,
    owner::OwnerId,
};

/// One waiter at a gate; leaves it when dropped.
#[derive(Debug)]
pub(crate) struct Waiter<'a> {
    core: &'a Core,
    hub: &'a Hub,
    pub(super) gate: Arc<Gate>,
    /// Whether it may hold the lock together with others.
    shares: bool,
    /// It could go on with a hold as its client's last holder leaves it.
    takes: bool,
    /// Where the lock has a queue: the place in it.
    place: Option<Box<Place<'a>>>,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        if !self.core.store.is_ours() {
            return;
        }
        if self.takes
            && let Some(baton) = self.gate.relay.leave()
        {
            self.core.janitor.lay(baton.into());
        }
        self.hub.leave(&self.gate, self.shares);
    }
}

/// Why a waiter tries again.
#[derive(Debug)]
pub(crate) enum Woken {
    /// A message came. The permit goes to the next waiter unless the try is made.
    Told(OwnedSemaphorePermit),
    /// The last holder hands the lock on. The permit goes to the next waiter who takes part, unless it is taken.
    Handed(OwnedSemaphorePermit),
    /// It is this waiter's turn to look.
    Poll,
    /// The time is over.
    TimedOut,
    /// The client was shut down.
    Closed,
}

impl Core {
    fn join_at<'a>(&'a self, hub: &'a Hub, kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool) -> Waiter<'a> {
        let gate = hub.join(kind, channel, quiet);
        Waiter { core: self, hub, gate, shares: kind.about().shared, takes: false, place: None }
    }

    /// Waits at a channel from now on. `quiet`: no message can have been sent there yet. `lease`: which it asks for.
    pub(crate) fn join(&self, kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool, lease: Lease) -> Waiter<'_> {
        let mut waiter = self.join_at(&self.hub, kind, channel, quiet);
        waiter.takes = self.config.relay
            && kind.about().relayed
            && waiter.gate.is_of(kind)
            && lease == Baton::lease(self.config.watchdog_timeout);
        if waiter.takes {
            waiter.gate.relay.join();
        }
        waiter
    }

    /// Waits for an element of a list from now on.
    pub(crate) fn join_list(&self, kind: &Arc<dyn Kind>, list: &Arc<str>) -> Waiter<'_> {
        self.join_at(&self.signals, kind, list, true)
    }

    /// As [`Core::join`], if somebody waits there already. Whoever listens before trying needs to try but once.
    pub(crate) fn join_existing(&self, kind: &Arc<dyn Kind>, owner: &OwnerId, lease: Lease) -> Option<Waiter<'_>> {
        if self.hub.is_empty() {
            return None;
        }
        let Wake::Channel(channel) = kind.wake(owner) else { return None };
        self.hub.has(&channel).then(|| self.join(kind, &channel, false, lease))
    }
}

impl<'a> Waiter<'a> {
    /// Keeps a place in the queue for as long as it waits.
    pub(crate) fn keep(&mut self, place: Option<Place<'a>>) {
        match (&mut self.place, place) {
            // one is enough
            (Some(kept), Some(place)) => kept.look = place.look,
            (kept, Some(place)) => *kept = Some(Box::new(place)),
            (_, None) => {}
        }
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

    /// Whether it is in vain to ask for the lock now: another task of this client has it, and hands it on or tells of its
    /// release.
    pub(crate) fn knows_better_than_to_ask(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> bool {
        let goes_on = self.takes && self.gate.is_live() && self.gate.relay.goes_on(Instant::now());
        goes_on && self.core.holds.get(kind, owner).is_none_or(|hold| hold.count() == 0)
    }

    /// Takes what the last holder hands on.
    pub(crate) fn take(&self, hold: &Arc<Hold>, request: &Request, lease: Lease, replicas: u32) -> Option<Ticket> {
        let take = |baton: &_| {
            let epoch = self.core.epoch(hold);
            let (ticket, told) =
                hold.change_quietly(|state, _| state.take(request, baton, (lease, replicas), epoch, Instant::now()));
            debug_assert!(told.ended.is_none(), "what begins ends nothing");
            ticket
        };
        self.gate.relay.take(take)
    }

    /// Takes what the last holder's release granted.
    pub(crate) fn take_granted(&self, hold: &Arc<Hold>, request: &Request, lease: Lease) -> Option<Ticket> {
        let granted = self.gate.take_granted()?;
        let look = self.place.as_ref()?.look?;
        let (epoch, now) = (self.core.epoch(hold), Instant::now());
        // the rule of the watchdog timeout: it can fail, and be repeated in time
        let renewal = 2 * (self.core.config.command_timeout() + self.core.grace());
        let grant = look.grant(granted, lease, epoch, now, renewal)?;
        hold.change(|state, effects| state.take_granted(request, &grant, epoch, now, effects))
    }

    /// Whether something is handed on: whose permit was for naught need not tell the next one.
    pub(crate) fn is_handed_something(&self) -> bool {
        self.gate.relay.has_baton()
    }

    /// Whether everybody was told since this waiter `tried`: it need not sleep.
    pub(crate) fn was_told_since(&self, tried: Instant) -> bool {
        self.side().told_all().is_some_and(|told| told > tried)
    }

    /// The permit of somebody who was told before he slept: left behind, it would make another one try in vain.
    pub(crate) fn take_permit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.side().permits).try_acquire_owned().ok()
    }

    fn count(&self, source: Source) {
        self.core.config.meter.wakeup(self.gate.kind.of(), source);
    }

    /// Sleeps until told, until it is this waiter's turn to look, or until the deadline.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> impl Future<Output = Woken> + Send + '_ {
        if self.gate.must_be_listened_to() {
            self.hub.tell(Event::Subscribe(Arc::clone(&self.gate)));
        }
        // a block, since an `async fn` keeps its arguments twice
        async move {
            let told = Arc::clone(&self.side().permits).acquire_owned();
            tokio::pin!(told);
            let hand = || Arc::clone(&self.gate.relay.permits).acquire_owned();
            let handed = hand();
            tokio::pin!(handed);
            loop {
                tokio::select! {
                    biased;
                    permit = &mut handed, if self.takes => {
                        let Ok(permit) = permit else { return Woken::Closed };
                        if self.gate.relay.has_baton() {
                            self.count(Source::Message);
                            return Woken::Handed(permit);
                        }
                        // somebody else has it, or it was taken back
                        permit.forget();
                        handed.set(hand());
                    }
                    permit = &mut told => {
                        let Ok(permit) = permit else { return Woken::Closed };
                        self.count(self.gate.told_by());
                        return Woken::Told(permit);
                    }
                    () = self.alarm(deadline) => {}
                }
                if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    return Woken::TimedOut;
                }
                if self.is_my_turn_to_look() {
                    self.count(Source::Poll);
                    return Woken::Poll;
                }
            }
        }
    }

    fn alarm(&self, deadline: Option<Instant>) -> Sleep {
        let next = *self.side().next_poll();
        self.core.sleep_until(deadline.map_or(next, |deadline| deadline.min(next)))
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
