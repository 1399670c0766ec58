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

use std::{pin::pin, sync::Arc, time::Duration};

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    enter::{AcquireReply, why_not_entered},
    options::Acquire,
};

use crate::{
    engine::{
        failure::store_error,
        hold::{
            Entered, Hold,
            granted::LastLook,
            state::{AcquirePlan, HoldRequest},
        },
        kind::Wake,
        settle::CallInFlight,
        wait::{place::QueueEntry, waiter::Waiter},
    },
    error::{Error, Result, StoreError},
    store::{Acquired, Route},
};

/// How many waiters must be ahead for a waiter to skip its second attempt after it has subscribed.
/// That many hand-overs do not happen while a subscription is in flight, so it has missed no
/// message; if it has, it polls within the poll cap.
const FAR: u32 = 16;

/// The outcome of one attempt.
pub(crate) enum Attempt<'a> {
    Entered(Entered),
    Busy(Busy<'a>),
    /// A transient failure: a retry may succeed. Nothing is held. Another waiter would meet it, too.
    Failed(Error),
    /// As [`Attempt::Failed`], but it is about this owner, or its lease: another waiter may succeed.
    FailedAlone(Error),
    /// As [`Attempt::FailedAlone`]: another call of this owner did not release the owner lock in time.
    OwnerLockTimeout(Error),
    /// The deadline passed without a reply. The request is undone.
    GivenUp,
    /// The state of this owner has changed: retry at once.
    Again,
}

/// A reply that the lock is busy.
pub(crate) struct Busy<'a> {
    pub(crate) ttl: Option<Duration>,
    /// How the waiter learns that another attempt is worthwhile.
    pub(crate) wake: Wake,
    pub(crate) queue_entry: Option<QueueEntry<'a>>,
    /// Whether at least [`FAR`] waiters are ahead of this one.
    pub(crate) far: bool,
}

impl<'a> Acquire<'a> {
    /// Makes one attempt. `waiter`: a release may have granted the lock to it. `now` is the current
    /// time.
    pub(crate) async fn attempt(
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
        let (_permit, now) = match core.lock_owner_at(hold, deadline, now).await {
            Ok(permit) => permit,
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
        hold.send(kind, &request, self.lease, route.epoch(), sent);
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
                Some(Err(error)) => return Err(self.failed_alone(error)),
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
            Some(Err(error)) => self.failed_alone(error),
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
            Err(error) => self.no_outcome(hold, request, sent, error),
        }
    }

    /// Records that the request brought no reply, or was refused. If it was not executed, nothing
    /// is in doubt.
    fn no_outcome(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        sent: Instant,
        error: StoreError,
    ) -> Result<Attempt<'a>> {
        if !error.may_have_executed() {
            hold.change(|state, _| state.not_executed(request));
            self.asked().take_if(|asked| *asked == sent);
        }
        self.failed(error)
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
            None => self.failed_alone(why_not_entered(hold)),
        }
    }

    pub(crate) fn failed(&self, error: StoreError) -> Result<Attempt<'a>> {
        self.if_transient(error).map(Attempt::Failed)
    }

    fn failed_alone(&self, error: StoreError) -> Result<Attempt<'a>> {
        self.if_transient(error).map(Attempt::FailedAlone)
    }

    fn if_transient(&self, error: StoreError) -> Result<Error> {
        let transient = error.is_transient();
        let error = store_error(self.kind.name(), error);
        if transient { Ok(error) } else { Err(error) }
    }
}
