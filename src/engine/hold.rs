//! One owner's business with one lock: its turn, and its state behind a mutex.
//!
//! The *turn* puts everything that the owner sends about the lock in single file. The *state* is changed in short
//! transitions, none of which asks the server: `Core::agree` makes it follow.

use std::{
    fmt,
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::sync::Semaphore;

use super::{
    due::{DueQueue, Queued, Spot},
    failure::{NOT_CONFIRMED, silent, store_error},
    generation::{End, Generation, Grant, Ticket},
    kind::Kind,
    lease::{Keep, Lease},
    state::{
        Abandoned, Answered, Around, Door, Due, Effects, Left, Leftover, Planned, Request, Standing, State, Unsettled,
    },
};
use crate::{
    clock::Instant,
    error::{Error, LossReason, Result, StoreError, StoreErrorKind},
    meter::Meter,
    owner::OwnerId,
    store::{Epoch, Released, Renewed},
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

/// What one owner has of one lock.
pub(crate) struct Hold {
    /// What the owner is called at first; the same without its suffix for as long as it lives.
    pub(super) caller: OwnerId,
    kind: Arc<dyn Kind>,
    /// The one permit is held around each request about this hold, and never while waiting for the lock.
    pub(crate) turn: Semaphore,
    state: Mutex<State>,
    due: Arc<DueQueue<Self>>,
    meter: Meter,
    /// Where the watchdog finds it.
    spot: Spot,
    /// The janitor has it on its list.
    listed: AtomicBool,
    /// It is on the list of those to be forgotten as soon as nobody has a handle of it.
    to_be_reaped: AtomicBool,
}

/// What the next acquire is to do.
#[derive(Debug)]
pub(crate) enum Next {
    Send(Request),
    /// Make the server agree with the books first.
    Agree,
    /// Take another hold: this one is not this client's business any more.
    Forget,
}

/// A generation to be renewed.
pub(crate) struct Renewal {
    pub(crate) hold: Arc<Hold>,
    pub(crate) generation: Arc<Generation>,
    pub(crate) keep: Keep,
    /// Since when it is due.
    pub(crate) due: Instant,
    /// What is not answered by then comes too late.
    pub(crate) deadline: Instant,
    /// After how long it is due again.
    pub(crate) period: Duration,
}

/// What the watchdog finds.
pub(crate) enum Look {
    Nothing,
    Renew(Renewal),
    /// The lease is over.
    Ended,
    /// A request has been under way for longer than one can be.
    Stuck,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("lock", &self.lock_name()).field("state", &*self.state()).finish_non_exhaustive()
    }
}

impl Queued for Hold {
    fn spot(&self) -> &Spot {
        &self.spot
    }
}

impl Hold {
    pub(super) fn new(kind: &Arc<dyn Kind>, owner: &OwnerId, due: &Arc<DueQueue<Self>>, meter: Meter) -> Self {
        Self {
            caller: owner.clone(),
            kind: Arc::clone(kind),
            turn: Semaphore::new(1),
            state: Mutex::new(State::new(owner.clone(), Instant::EARLIEST)),
            due: Arc::clone(due),
            meter,
            spot: Spot::default(),
            listed: AtomicBool::new(false),
            to_be_reaped: AtomicBool::new(false),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state. Afterwards the watchdog knows when to look, and guards are told of their end: in this order,
    /// and the latter without the mutex, since wakers are the user's code.
    pub(super) fn change<T>(self: &Arc<Self>, transition: impl FnOnce(&mut State, &mut Effects) -> T) -> T {
        let (outcome, effects) = self.change_quietly(transition);
        self.tell(effects);
        outcome
    }

    /// The same, where a mutex is held: its guards are told by [`Hold::tell`], after that.
    pub(super) fn change_quietly<T>(
        self: &Arc<Self>,
        transition: impl FnOnce(&mut State, &mut Effects) -> T,
    ) -> (T, Effects) {
        let (mut effects, mut state) = (Effects::default(), self.state());
        let outcome = transition(&mut state, &mut effects);
        state.forget_ended();
        self.due.put(self, state.next_look(self.due.overdue()));
        drop(state);
        (outcome, effects)
    }

    pub(super) fn tell(&self, effects: Effects) {
        if let Some(ended) = effects.ended {
            ended.tell_end(&self.kind, self.meter, effects.lost);
        }
    }

    pub(crate) fn kind(&self) -> &Arc<dyn Kind> {
        &self.kind
    }

    pub(crate) fn lock_name(&self) -> &Arc<str> {
        self.kind.name()
    }

    /// The owner as the server knows it.
    pub(crate) fn owner(&self) -> OwnerId {
        self.state().owner.clone()
    }

    pub(crate) fn standing(&self) -> Standing {
        self.state().standing
    }

    /// What a user of this hold leaves behind.
    pub(crate) fn leftover(&self) -> Leftover {
        self.state().leftover()
    }

    /// How often it is held.
    pub(crate) fn count(&self) -> u32 {
        self.state().wanted()
    }

    /// Until when the record may live, as far as we know.
    pub(crate) fn record_ends(&self) -> Instant {
        self.state().record_ends()
    }

    /// The generation that is held.
    pub(crate) fn generation(&self) -> Option<Arc<Generation>> {
        self.state().held().map(|(generation, _)| Arc::clone(generation))
    }

    /// The generation that is held, if this is what its owner is called.
    pub(crate) fn generation_of(&self, owner: &OwnerId) -> Option<Arc<Generation>> {
        self.generation().filter(|generation| !owner.is_exact() || generation.owner == *owner)
    }

    /// Whether it is this generation that is held.
    pub(crate) fn is_current(&self, generation: &Arc<Generation>) -> bool {
        self.state().held().is_some_and(|(held, _)| Arc::ptr_eq(held, generation))
    }

    // --- lists that it is on ---
    //
    // Whoever puts it on a list owes a look to whatever changed before: so the flags are swapped with acquire and release,
    // and whoever finds one set knows that its own change is seen by the one who clears it.

    /// Puts it on the janitor's list. `false`: it is there already.
    pub(super) fn list(&self) -> bool {
        !self.listed.swap(true, Ordering::AcqRel)
    }

    pub(super) fn unlist(&self) {
        self.listed.store(false, Ordering::Release);
    }

    /// Puts it on the list of those to be forgotten. `false`: it is there already.
    pub(super) fn mark_for_reaping(&self) -> bool {
        !self.to_be_reaped.swap(true, Ordering::AcqRel)
    }

    pub(super) fn unmark_for_reaping(&self) {
        self.to_be_reaped.store(false, Ordering::Release);
    }

    // --- errors ---

    pub(crate) fn lost_error(&self, owner: &OwnerId, reason: LossReason) -> Error {
        Error::Lost { lock: self.lock_name().to_string(), owner: owner.clone(), reason }
    }

    pub(crate) fn not_held_error(&self, owner: &OwnerId) -> Error {
        Error::NotHeld { lock: self.lock_name().to_string(), owner: owner.clone() }
    }

    pub(crate) fn not_reentrant_error(&self, owner: &OwnerId) -> Error {
        Error::NotReentrant { lock: self.lock_name().to_string(), owner: owner.clone() }
    }

    /// What the guards of a generation that has ended are told.
    pub(crate) fn end_error(&self, generation: &Generation, end: End) -> Error {
        match end {
            End::Lost(reason) => self.lost_error(&generation.owner, reason),
            End::Released | End::Refused(_) | End::Unconfirmed => self.not_held_error(&generation.owner),
        }
    }

    // --- acquiring: in turn ---

    /// What the next acquire should do.
    pub(crate) fn plan(self: &Arc<Self>, door: Door, around: Around<'_>, now: Instant) -> Result<Next> {
        match self.change(|state, effects| state.plan(door, around, now, effects)) {
            Planned::Send(request) => Ok(Next::Send(request)),
            Planned::Unsettled => Ok(Next::Agree),
            Planned::Gone => Ok(Next::Forget),
            Planned::Refused(refusal) => Err(refusal.into_error(self.lock_name())),
        }
    }

    /// From here on the request is under way: if nobody hears its answer, the server's side is unknown.
    pub(crate) fn send(self: &Arc<Self>, request: &Request, lease: Lease, epoch: Epoch, now: Instant) {
        self.change(|state, _| {
            state.ends = state.ends.max(lease.record_ends(now));
            state.send(request, epoch, now);
        });
    }

    /// The server did not execute the request: nothing new is in doubt.
    pub(crate) fn not_executed(self: &Arc<Self>, request: &Request) {
        self.change(|state, _| state.not_executed(request));
    }

    /// The server said that somebody else holds the lock. `queued`: this request has a place in its queue.
    pub(crate) fn busy(self: &Arc<Self>, request: &Request, queued: bool, epoch: Epoch) {
        self.change(|state, _| state.busy(request, queued, epoch));
    }

    /// The server said that the record is of another kind. A place in the queue is as it was.
    pub(crate) fn refused_as_another_kind(self: &Arc<Self>, request: &Request) {
        self.change(|state, effects| state.refused_as_another_kind(request, effects));
    }

    /// The server said that this owner does not hold what it re-entered.
    pub(crate) fn refused_as_lost(self: &Arc<Self>, request: &Request) -> Error {
        self.change(State::refused_as_lost);
        self.lost_error(&request.owner, LossReason::RecordMissing)
    }

    /// The acquire was confirmed by a connection. `Ok(None)`: so late that the lease is over already, or
    /// that nobody counts on it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the hold that it was to be nested in was lost meanwhile.
    pub(crate) fn granted(self: &Arc<Self>, request: &Request, grant: &Grant, epoch: Epoch) -> Result<Option<Ticket>> {
        let granted = self.change(|state, effects| state.granted(request, grant, epoch, Instant::now(), effects));
        granted.map_err(|(generation, end)| self.end_error(&generation, end))
    }

    /// Bears with a waiter in the queue that is between two tries: then no request is in the hands of a future that nobody
    /// polls, and the watchdog looks again later. `false`: that is not so.
    pub(super) fn bear_with_queue(self: &Arc<Self>) -> bool {
        let turn = self.turn.try_acquire();
        turn.is_ok() && self.change(|state, _| state.bear_with_queue(Instant::now()))
    }

    /// Counts a waiter in the queue. In nobody's turn; nothing that the watchdog looks at changes.
    pub(crate) fn enter_queue(&self) {
        self.state().waiters += 1;
    }

    /// One waiter less; with the last one the place in the queue is given up. See [`State::leave_queue_once`].
    pub(crate) fn leave_queue_once(self: &Arc<Self>, in_turn: bool, epoch: Epoch) -> Option<Abandoned> {
        self.change(|state, _| state.leave_queue_once(in_turn, epoch, Instant::now()))
    }

    /// All waiters leave the queue.
    pub(crate) fn leave_queue(self: &Arc<Self>, epoch: Epoch) {
        self.change(|state, _| state.leave_queue(epoch, Instant::now()));
    }

    // --- holding ---

    /// What is due.
    pub(crate) fn look(self: &Arc<Self>, now: Instant) -> Look {
        match self.change(|state, effects| state.look(now, self.due.overdue(), effects)) {
            Due::Nothing => Look::Nothing,
            Due::Ended => Look::Ended,
            Due::Stuck => Look::Stuck,
            Due::Renew { generation, keep, due, deadline, period } => {
                Look::Renew(Renewal { hold: Arc::clone(self), generation, keep, due, deadline, period })
            }
        }
    }

    /// Asks at once whether the record is still there, and renews it if it is to be renewed.
    pub(crate) fn check_soon(self: &Arc<Self>, now: Instant) {
        self.change(|state, _| state.check_soon(now));
    }

    /// Takes in what a renewal sent at `sent` was answered. `next`: when it is due again, `None`: that stays as it is.
    pub(crate) fn renewed(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        answer: Renewed,
        sent: Instant,
        lease: Duration,
        next: Option<Instant>,
    ) {
        self.change(|state, effects| state.renewed(generation, answer, (sent, lease), next, Instant::now(), effects));
    }

    /// The renewal was not confirmed; it is due again at `next`.
    pub(crate) fn not_renewed(self: &Arc<Self>, generation: &Arc<Generation>, next: Instant) {
        self.change(|state, effects| state.not_renewed(generation, next, Instant::now(), effects));
    }

    // --- ending ---

    /// Gives one hold back, in our books; the server is told by `Core::agree`.
    pub(crate) fn leave(self: &Arc<Self>, ticket: &Ticket, now: Instant) -> Result<Left> {
        let left = self.change(|state, effects| state.leave(ticket, now, effects));
        left.map_err(|end| self.end_error(&ticket.generation, end))
    }

    /// Gives one hold of the generation back that is held under this name, whichever guard it has.
    pub(crate) fn leave_without_guard(self: &Arc<Self>, owner: &OwnerId) -> Result<Left> {
        let left = self.change(|state, effects| state.leave_without_guard(Instant::now(), effects));
        left.map_err(|end| match end {
            Some(End::Lost(reason)) => self.lost_error(&self.owner(), reason),
            _ => self.not_held_error(owner),
        })
    }

    /// A guard is let go of without a release: from here on the hold is somebody else's to release. `None`: there is
    /// nothing to give away, the lock was lost.
    pub(crate) fn give_away(self: &Arc<Self>, ticket: &Ticket) -> Option<Unsettled> {
        self.change(|state, effects| state.give_away(ticket, Instant::now(), effects))
    }

    /// Nobody knows any more how many holds the server records.
    pub(crate) fn stop_watching(self: &Arc<Self>) {
        self.change(|state, _| state.stop_watching());
    }

    /// The name is shared with a hold that was given away.
    pub(super) fn share_its_name(&self, owner: &OwnerId) {
        let mut state = self.state();
        state.sibling_in_doubt |= state.owner == *owner;
    }

    /// Gives up on a request that is never answered to anybody. `None`: it was answered meanwhile. `retire` is told the
    /// name, before anybody can see that the hold is nobody's; it must not come back to a hold.
    pub(crate) fn orphan(self: &Arc<Self>, retire: impl FnOnce(&OwnerId)) -> Option<Abandoned> {
        self.change(|state, _| state.orphan().inspect(|abandoned| retire(&abandoned.owner)))
    }

    /// What the release of a generation came to, if another release of the same owner settled it first.
    pub(crate) fn check_released(&self, generation: &Generation) -> Result<()> {
        let end = generation.books().end;
        match end {
            Some(End::Lost(reason)) => Err(self.lost_error(&generation.owner, reason)),
            Some(End::Refused(kind)) => {
                Err(store_error(self.lock_name(), StoreError::new(kind, false, "the release was refused")))
            }
            Some(End::Unconfirmed) => Err(store_error(self.lock_name(), silent(NOT_CONFIRMED))),
            _ => Ok(()),
        }
    }

    /// The lock is not ours any more.
    pub(crate) fn lose(self: &Arc<Self>, reason: LossReason) {
        self.change(|state, effects| state.lose(reason, effects));
    }

    /// Ends the guards that are left of a lock that was given away. How many: the server records a hold for each.
    pub(crate) fn lose_guards(self: &Arc<Self>, reason: LossReason) -> u32 {
        self.change(|state, effects| {
            let guards = state.held().map_or(0, |(_, books)| books.guards);
            if guards > 0 {
                state.lose(reason, effects);
            }
            guards
        })
    }

    // --- settling: in turn ---

    /// Leaves the record to its lease.
    pub(crate) fn write_off(self: &Arc<Self>, refusal: StoreErrorKind) -> Option<Abandoned> {
        self.change(|state, _| state.write_off(refusal))
    }

    /// The release that makes the server agree, which is about to be sent: from here on the server's side is in doubt.
    /// `None`: it agrees already, or it is not ours to tell.
    pub(crate) fn send_release(self: &Arc<Self>, epoch: Epoch, now: Instant) -> Option<Request> {
        self.change(|state, _| {
            let request = state.plan_release()?;
            state.send(&request, epoch, now);
            Some(request)
        })
    }

    /// The server answered the release.
    pub(super) fn released(self: &Arc<Self>, request: &Request, released: Released, epoch: Epoch) -> Answered {
        self.change(|state, effects| state.released(request, released, epoch, effects))
    }

    /// The server has moved the hold, and whoever asked for it hears that. `None`: the name was given up meanwhile.
    pub(super) fn moved(self: &Arc<Self>, request: &Request, epoch: Epoch) -> Option<Answered> {
        self.change(|state, effects| state.moved(request, epoch, effects))
    }

    /// Leaves the owner's name to late executions of what is in doubt. `None`: nothing is, or the lock is held.
    pub(crate) fn abandon_name_in_doubt(self: &Arc<Self>) -> Option<Abandoned> {
        self.change(|state, _| state.abandon_name_in_doubt())
    }
}

#[cfg(test)]
mod tests;
