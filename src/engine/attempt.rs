//! One attempt to acquire: it settles what is in doubt, sends the request and takes in the reply,
//! all under the owner lock.
//!
//! The owner lock is held for one or two requests, never while waiting for the lock.
//! `AcquirePlan::Agree` settles first what the owner left behind. The hold is marked as in doubt,
//! with the epoch of the connection, before anything is sent; shutdown and a rival kind are checked
//! after that, so that of two concurrent calls at least one sees the other.
//!
//! With replicas, an acquire that too few of them have acknowledged is released under the same
//! owner lock, before the caller learns of it (decision 22).

use std::{
    num::NonZeroU64,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nestlock_wire::{Call, Copies, Epoch, clock::Instant};

use super::{
    core::Core,
    failure::{not_entered, store_error},
    generation::{Copied, Grant, Ticket},
    hand_off::relayed_lease,
    hold::{Entered, Hold},
    kind::{AcquireTerms, Adopts, Kind, WaitId, Wake},
    lease::{Lease, Millis},
    settle::CallInFlight,
    state::{AcquireMode, AcquirePlan, HoldRequest, HoldState, Ownership},
    turn::LastLook,
    wait::{place::QueueEntry, waiter::Waiter},
};

use crate::{
    error::{Error, Result, StoreError},
    options::{AcquireOptions, Wait, checked_lease},
    owner::OwnerId,
    store::{Acquired, Route},
};

/// The reply that granted the lock.
#[derive(Clone, Copy)]
pub(super) struct AcquireReply {
    /// When the request was sent: the lease counts from here.
    pub(super) sent: Instant,
    pub(super) token: Option<NonZeroU64>,
    /// The connection that brought the reply.
    pub(super) epoch: Epoch,
    /// How many replicas have acknowledged it. `None` if that is unknown.
    pub(super) replicas: Option<u8>,
}

/// How many waiters must be ahead for a waiter to skip its second attempt after it has subscribed.
/// That many hand-overs do not happen while a subscription is in flight, so it has missed no
/// message; if it has, it polls within the poll cap.
const FAR: u32 = 16;

/// One call that acquires a lock, with all options resolved.
pub(crate) struct Acquire<'a> {
    pub(super) core: &'a Core,
    pub(super) kind: &'a Arc<dyn Kind>,
    pub(super) owner: OwnerId,
    /// The caller passed an owner, rather than acquiring as itself.
    is_named: bool,
    pub(super) lease: Lease,
    /// The copies that must exist before the acquire counts.
    pub(super) copies: Option<Copies>,
    pub(super) waits: bool,
    /// The number under which the server may grant the lock to this waiter.
    wait_id: Option<WaitId>,
    /// The owner whose hold is adopted.
    pub(super) from: Option<&'a OwnerId>,
    /// When the first adopt request that may have been executed was sent. While that is in doubt,
    /// attempts send the same request again.
    first_sent: Mutex<Option<Instant>>,
    /// See [`AcquireOptions::after_a_loss`].
    pub(super) after_loss: bool,
    pub(super) started: Instant,
    /// When the wait is over; `None`: never.
    pub(super) deadline: Option<Instant>,
}

/// The outcome of one attempt.
pub(super) enum Attempt<'a> {
    Entered(Entered),
    Busy(Busy<'a>),
    /// A transient failure: a retry may succeed. Nothing is held.
    Failed(Error),
    /// As [`Attempt::Failed`]: another call of this owner did not release the owner lock in time.
    OwnerLockTimeout(Error),
    /// The deadline passed without a reply. The request is undone.
    GivenUp,
    /// The state of this owner has changed: retry at once.
    Again,
}

/// A reply that the lock is busy.
pub(super) struct Busy<'a> {
    pub(super) ttl: Option<Duration>,
    /// How the waiter learns that another attempt is worthwhile.
    pub(super) wake: Wake,
    pub(super) queue_entry: Option<QueueEntry<'a>>,
    /// Whether at least [`FAR`] waiters are ahead of this one.
    pub(super) far: bool,
}

/// Returns the reason why a granted lock was not entered.
pub(super) fn why_not_entered(hold: &Hold) -> StoreError {
    not_entered(hold.ownership() == Ownership::Orphaned)
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(
        core: &'a Core,
        kind: &'a Arc<dyn Kind>,
        options: &AcquireOptions,
        wait: Wait,
    ) -> Result<Self> {
        core.check_ours(kind.name())?;
        let started = Instant::now();
        let checked = |lease| checked_lease(kind.name(), lease).map(Millis::of);
        let max_hold = options.rare().max_hold.map(checked).transpose()?;
        let at_most = |ttl: Millis| max_hold.map_or(ttl, |longest| ttl.min(longest));
        let watched = |ttl| Lease::Watched {
            ttl: at_most(ttl),
            max_hold,
        };
        let lease = match (options.lease, options.rare().watchdog_timeout) {
            (Some(lease), _) => Lease::Fixed(at_most(checked(lease)?)),
            (None, Some(ttl)) => watched(checked(ttl)?),
            (None, None) if kind.about().endless => max_hold.map_or(Lease::Endless, Lease::Fixed),
            (None, None) => watched(Millis::of(core.config.watchdog_timeout)),
        };
        let (waits, copies) = (
            wait != Wait::No,
            core.config
                .copies(options.rare().replicas.unwrap_or(core.config.replicas)),
        );
        // only a plain acquire may be granted by another release: a fixed lease would start short,
        // and replicas and counted renewals need a request of its own
        let is_plain = copies.is_none() && matches!(lease, Lease::Watched { max_hold: None, .. });
        Ok(Self {
            core,
            kind,
            lease,
            copies,
            waits,
            wait_id: (waits && is_plain && kind.about().own_channel)
                .then(|| WaitId::next(&core.owner_locks_taken)),
            from: None,
            first_sent: Mutex::default(),
            after_loss: options.rare().after_loss,
            started,
            deadline: wait.until(started),
            owner: core.resolve(kind, options)?,
            is_named: options.rare().owner.is_some(),
        })
    }

    /// Returns how this call acquires a lock of this kind.
    pub(super) fn acquire_mode(&self, kind: &Arc<dyn Kind>, waits: bool) -> AcquireMode<'_> {
        let about = kind.about();
        let max_holds = self.core.config.max_holds.min(about.max_holds);
        AcquireMode {
            about,
            waits,
            adopts: self.adopts(),
            max_holds,
            after_loss: self.after_loss,
            named: self.is_named.then_some(&self.owner),
        }
    }

    fn adopts(&self) -> Option<Adopts> {
        self.from.map(|_| match *self.asked() {
            Some(_) => Adopts::Again,
            None => Adopts::First,
        })
    }

    fn asked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.first_sent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one attempt. `waiter`: a release may have granted the lock to it. `now` is the current
    /// time.
    pub(super) async fn attempt(
        &self,
        waiter: Option<&Waiter<'a>>,
        mut now: Instant,
        deadline: Option<Instant>,
    ) -> Result<Attempt<'a>> {
        let (core, kind, began) = (self.core, self.kind, now);
        if !core.store.is_connected() {
            match core.connected(deadline).await {
                Ok(()) => now = Instant::now(),
                Err(error) if error.is_transient() => return Ok(Attempt::Failed(error)),
                Err(error) => return Err(error),
            }
        }
        if self.owner.is_value() {
            if let Some(attempt) = self.attempt_by_a_value_that_is_left(deadline).await {
                return attempt;
            }
            now = Instant::now();
        }
        let under_way = CallInFlight {
            core,
            hold: core.holds.get_or_insert(kind, &self.owner),
        };
        let hold = &under_way.hold;
        let (_turn, now) = match core.lock_owner_at(hold, deadline, now).await {
            Ok(turn) => turn,
            Err(error) => return Ok(Attempt::OwnerLockTimeout(store_error(kind.name(), error))),
        };
        let (request, sent) = match self.plan(hold, deadline, now).await {
            Ok(planned) => planned,
            Err(attempt) => return attempt,
        };
        // `now` is read again only after an await, so `sent` is later than `began` only if
        // something came first
        let deadline = if sent > began {
            self.after_what_came_first(deadline, sent)
        } else {
            deadline
        };
        let route = core.route(hold, sent);
        hold.send(&request, self.lease, route.epoch(), sent);
        // checked after the hold is in doubt: a shutdown that this check misses waits for the owner
        // lock
        let refused = core.check_open().err().map(Err);
        if let Some(rival) = refused.or_else(|| core.holds.rival(hold, request.count)) {
            hold.change(|state, _| state.not_executed(&request));
            return self.settle_rival(hold, &request, rival?, deadline).await;
        }
        if let Some(ticket) =
            waiter.and_then(|waiter| waiter.take_granted(hold, &request, self.lease))
        {
            let ticket = self.entered(hold, ticket)?;
            return Ok(Attempt::Entered((Arc::clone(hold), ticket)));
        }
        self.ask(hold, &request, sent, route, deadline).await
    }

    /// Plans the request, and returns when to send it. Settles first what this owner left behind:
    /// without that, the count that the server records is unknown. `Err`: the attempt ends with
    /// this outcome.
    async fn plan(
        &self,
        hold: &Arc<Hold>,
        deadline: Option<Instant>,
        mut now: Instant,
    ) -> Result<(HoldRequest, Instant), Result<Attempt<'a>>> {
        let core = self.core;
        loop {
            let (mode, siblings) = (
                self.acquire_mode(self.kind, self.waits),
                core.holds.sibling_state(hold),
            );
            match hold.plan(mode, siblings, now).map_err(Err)? {
                AcquirePlan::Send(request) => return Ok((request, now)),
                AcquirePlan::Forget => {
                    core.holds.forget(hold);
                    return Err(Ok(Attempt::Again));
                }
                AcquirePlan::Agree => {}
            }
            match self.in_time(deadline, pin!(core.settle(hold))).await {
                Some(Ok(())) => {}
                Some(Err(error)) => return Err(self.failed(error)),
                None => return Err(Ok(Attempt::GivenUp)),
            }
            now = Instant::now();
        }
    }

    /// Settles a hold of the same owner that excludes this one. The request was not sent.
    async fn settle_rival(
        &self,
        hold: &Hold,
        request: &HoldRequest,
        rival: Arc<Hold>,
        deadline: Option<Instant>,
    ) -> Result<Attempt<'a>> {
        let settles = pin!(self.core.settle_rival(rival));
        match self.in_time(deadline, settles).await {
            Some(Ok(())) => Ok(Attempt::Again),
            Some(Err(_)) if !self.waits => Err(hold.not_reentrant_error(&request.owner)),
            Some(Err(error)) => self.failed(error),
            None => Ok(Attempt::GivenUp),
        }
    }

    /// Sends the request, and takes in the reply.
    async fn ask(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        sent: Instant,
        mut route: Route,
        deadline: Option<Instant>,
    ) -> Result<Attempt<'a>> {
        let (core, kind) = (self.core, self.kind);
        let (call, since) = self.call(request, sent);
        // an adopted hold needs no new copies: until the replicas have its record, they have the
        // giver's
        route.copies = self
            .copies_for_outer(hold, request)
            .filter(|_| self.from.is_none());
        // the grace at the end is for the reply alone: no connection or redirect is awaited in it
        route.give_up(deadline.map(|deadline| deadline - core.grace()));
        let ask = core.acquire_by(&mut route, hold, request, &call);
        let Some(answer) = self.in_time(deadline, pin!(ask)).await else {
            return Ok(Attempt::GivenUp);
        };
        match answer {
            Ok((Acquired::Yes { token }, epoch)) => {
                let replicas = match route.copies {
                    Some(copies) => match self.copied(hold, &route, copies, deadline).await {
                        Ok(replicas) => replicas,
                        Err(attempt) => return attempt,
                    },
                    None => None,
                };
                let reply = AcquireReply {
                    sent: since,
                    token,
                    epoch,
                    replicas,
                };
                self.granted(hold, request, reply)
            }
            Ok((Acquired::Busy { ttl, ahead, place }, epoch)) => {
                let queued = self.waits && kind.about().queues;
                let look = place.map(|place| LastLook { place, sent, epoch });
                let queue_entry = queued.then(|| QueueEntry::new(core, hold, look));
                hold.change(|state, _| state.busy(request, queued, epoch));
                Ok(Attempt::Busy(Busy {
                    ttl,
                    wake: core.wake(kind, &request.owner),
                    queue_entry,
                    far: ahead.is_some_and(|ahead| ahead >= FAR),
                }))
            }
            Ok((Acquired::Lost, epoch)) => Err(self.not_held(hold, request, epoch)),
            Ok((Acquired::WrongKind, _)) => {
                hold.change(|state, effects| state.refused_as_another_kind(request, effects));
                let lock = kind.name().to_string();
                Err(Error::WrongLockKind { lock })
            }
            Err(error) => {
                if !error.may_have_executed() {
                    hold.change(|state, _| state.not_executed(request));
                    self.asked().take_if(|asked| *asked == sent);
                }
                self.failed(error)
            }
        }
    }

    /// Records the reply that the hold to adopt or to re-enter is gone. Returns the error.
    fn not_held(&self, hold: &Arc<Hold>, request: &HoldRequest, epoch: Epoch) -> Error {
        if self.from.is_none() {
            return hold.refused_as_lost(request);
        }
        hold.change(|state, _| state.busy(request, false, epoch));
        hold.not_held_error(&request.owner)
    }

    /// Enters the hold that the server has granted.
    fn granted(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        reply: AcquireReply,
    ) -> Result<Attempt<'a>> {
        match self.take_in(hold, request, reply)? {
            Some(ticket) => Ok(Attempt::Entered((Arc::clone(hold), ticket))),
            None if hold.is_left() => Ok(Attempt::Again),
            // its lease counts from the first request, so a retry would be too late as well
            None if self.from.is_some() => {
                Err(store_error(self.kind.name(), why_not_entered(hold)))
            }
            None => self.failed(why_not_entered(hold)),
        }
    }

    /// Returns the script call, and the instant from which its lease counts. A retried adoption
    /// counts from its first request, which may have been executed.
    fn call(&self, request: &HoldRequest, sent: Instant) -> (Call, Instant) {
        let Self {
            kind,
            waits,
            wait_id: turn,
            ..
        } = *self;
        let (owner, lease_ms, holds) = (&request.owner, self.lease.millis(), request.count);
        if let Some(from) = self.from {
            return (
                kind.adopt(from, owner, lease_ms),
                *self.asked().get_or_insert(sent),
            );
        }
        (
            kind.acquire(AcquireTerms {
                owner,
                lease_ms,
                holds,
                waits,
                turn,
            }),
            sent,
        )
    }

    /// Enters the hold that the server has granted. Returns `None` if its lease is over already, or
    /// if the hold is no longer this client's.
    pub(super) fn take_in(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        reply: AcquireReply,
    ) -> Result<Option<Ticket>> {
        let core = self.core;
        let AcquireReply {
            sent,
            token,
            epoch,
            replicas,
        } = reply;
        // other holders of a shared record may shorten its TTL (Redisson's readers do), so the
        // watchdog keeps sending a fixed lease
        let is_told_again = self.kind.about().shared && !self.lease.is_watched();
        let kept_every = is_told_again.then(|| Millis::of(core.config.watchdog_timeout / 3));
        let copied = Copied {
            wanted: self.replicas(),
            had: replicas,
        };
        let grant = Grant {
            kept_every,
            token,
            copied,
            ..Grant::of(sent, self.lease)
        };
        let ticket = hold.granted(request, &grant, epoch)?;
        ticket.map(|ticket| self.entered(hold, ticket)).transpose()
    }

    /// Returns how many replicas must have the record of a hand-off to this acquire. Returns `None`
    /// if it cannot receive one: only an acquire of a mutex with the default lease and without a
    /// given owner can.
    pub(super) fn takes(&self) -> Option<u32> {
        let config = &self.core.config;
        let is_plain = config.tuning.relay
            && self.kind.about().relayed
            && self.owner.turn().is_some()
            && !self.is_named
            && self.from.is_none()
            && self.lease == relayed_lease(config.watchdog_timeout);
        is_plain.then(|| self.replicas())
    }

    /// Returns the ticket, or releases the hold if the client was shut down. Checked after the hold
    /// is entered: a shutdown that this check misses ends the hold itself.
    pub(super) fn entered(&self, hold: &Arc<Hold>, ticket: Ticket) -> Result<Ticket> {
        if let Err(closed) = self.core.check_open() {
            hold.change(HoldState::shut_down);
            self.core.release_later(hold, &ticket);
            return Err(closed);
        }
        Ok(ticket)
    }

    /// Returns how many replicas must have the record.
    pub(super) fn replicas(&self) -> u32 {
        self.copies.map_or(0, |copies| copies.replicas)
    }

    pub(super) fn failed(&self, error: StoreError) -> Result<Attempt<'a>> {
        let transient = error.is_transient();
        let error = store_error(self.kind.name(), error);
        if transient {
            Ok(Attempt::Failed(error))
        } else {
            Err(error)
        }
    }
}
