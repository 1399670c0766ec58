//! One owner's hold of one lock: its owner lock, and its state behind a mutex.
//!
//! The *owner lock* serializes all requests of the owner about the lock. The *state* changes by
//! short transitions that send nothing: `Core::agree` makes the server follow.
//!
//! [`Hold::change`] keeps an order: the transition, the watchdog's queue, unlock, then guards and
//! log. No waker runs, and nothing is logged, while the mutex is locked: both are user code.
//!
//! A future that is no longer polled may keep the owner lock. So waiting for it is bounded, and
//! fails with `Store(Overloaded)`; the watchdog orphans the hold (decision 7).

pub(crate) mod generation;
pub(super) mod watches;

pub(super) mod due;
pub(super) mod refusal;
pub(super) mod state;

pub(super) mod granted;
pub(super) mod hand_off;
mod holding;
mod transitions;

pub(super) mod registry;

use std::{
    fmt,
    sync::{Arc, PoisonError},
};

use nestlock_wire::{Epoch, clock::Instant};
use tokio::sync::Semaphore;

use self::{
    due::{DueQueue, QueueSlot, Queued},
    generation::{Generation, GenerationEnd, Grant, Ticket},
    state::{
        AcquireMode, AcquirePlan, Due, Effects, HoldRequest, HoldState, Ownership, Residue,
        SiblingState,
    },
};

use super::{
    failure::{NOT_CONFIRMED, no_reply, store_error},
    kind::Kind,
    lease::{Lease, RenewalReply},
};

use crate::{
    error::{Error, LossReason, Result, StoreError},
    meter::Meter,
    owner::OwnerId,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

/// One owner's hold of one lock, with its entries in the lists of the watchdog and the janitor.
pub(crate) struct Hold {
    /// The owner that the hold was created for. Every name of the hold has the same base.
    pub(super) caller: OwnerId,
    kind: Arc<dyn Kind>,
    /// Its one permit is held around each request about this hold, and never while waiting for the
    /// lock.
    pub(crate) owner_lock: Semaphore,
    state: Mutex<HoldState>,
    due: Arc<DueQueue<Self>>,
    meter: Meter,
    /// Its position in the watchdog's queue.
    queue_slot: QueueSlot,
    /// Whether it is on the janitor's list.
    listed: AtomicBool,
    /// Whether it is on the list of holds to forget as soon as no other handle is left.
    to_be_reaped: AtomicBool,
    /// How many entries of the record its last acquire was for: perhaps not as many as the kind that
    /// it was created for would take.
    entries: AtomicU16,
}

/// A hold that was acquired, and its ticket.
pub(crate) type Entered = (Arc<Hold>, Ticket);

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("lock", &self.lock_name())
            .field("state", &*self.state())
            .finish_non_exhaustive()
    }
}

impl Queued for Hold {
    fn queue_slot(&self) -> &QueueSlot {
        &self.queue_slot
    }
}

impl Hold {
    pub(super) fn new(
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        due: &Arc<DueQueue<Self>>,
        meter: Meter,
    ) -> Self {
        Self {
            caller: owner.clone(),
            kind: Arc::clone(kind),
            owner_lock: Semaphore::new(1),
            state: Mutex::new(HoldState::new(owner.clone(), Instant::EARLIEST)),
            due: Arc::clone(due),
            meter,
            queue_slot: QueueSlot::default(),
            listed: AtomicBool::new(false),
            to_be_reaped: AtomicBool::new(false),
            entries: AtomicU16::new(kind.about().sharing.entries()),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, HoldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, then queues the hold for the watchdog, then notifies guards if the
    /// generation has ended. Guards come last and without the mutex, because wakers are user code.
    pub(super) fn change<T>(
        self: &Arc<Self>,
        transition: impl FnOnce(&mut HoldState, &mut Effects) -> T,
    ) -> T {
        let (outcome, effects) = self.change_quietly(transition);
        self.notify(effects);
        outcome
    }

    /// Like [`Hold::change`], for a caller that has a mutex locked: it unlocks that and then passes
    /// the effects to [`Hold::notify`].
    pub(super) fn change_quietly<T>(
        self: &Arc<Self>,
        transition: impl FnOnce(&mut HoldState, &mut Effects) -> T,
    ) -> (T, Effects) {
        let (mut effects, mut state) = (Effects::default(), self.state());
        let outcome = transition(&mut state, &mut effects);
        state.forget_ended();
        // before unlocking: the last change must also be the last to queue the hold
        self.due.put(self, state.next_poll(self.due.overdue()));
        drop(state);
        (outcome, effects)
    }

    pub(super) fn notify(&self, effects: Effects) {
        if let Some(ended) = effects.ended {
            ended.notify_end(&self.kind, self.meter, effects.lost);
        }
    }

    pub(crate) fn kind(&self) -> &Arc<dyn Kind> {
        &self.kind
    }

    /// Returns how many entries of the record it is for.
    pub(crate) fn entries(&self) -> u16 {
        self.entries.load(Ordering::Acquire)
    }

    /// Returns the kind that takes as many entries of the record as this hold: for requests that say
    /// how many the owner must have.
    pub(crate) fn kind_as_acquired(&self) -> Arc<dyn Kind> {
        let other = self.kind.of_entries(self.entries());
        other.unwrap_or_else(|| Arc::clone(&self.kind))
    }

    pub(crate) fn lock_name(&self) -> &Arc<str> {
        self.kind.name()
    }

    /// Returns the owner as the server knows it.
    pub(crate) fn owner(&self) -> OwnerId {
        self.state().owner.clone()
    }

    pub(crate) fn ownership(&self) -> Ownership {
        self.state().ownership
    }

    /// Returns whether its owner has left it, and continues with another hold.
    pub(crate) fn is_left(&self) -> bool {
        self.state().is_left
    }

    /// Returns whether it was left to a lease that has not ended.
    pub(crate) fn is_left_to_lease(&self) -> bool {
        self.state().is_left_to_lease()
    }

    /// Returns what a call on this hold leaves behind.
    pub(crate) fn residue(&self) -> Residue {
        self.state().residue()
    }

    /// Returns the hold count.
    pub(crate) fn count(&self) -> u32 {
        self.state().wanted()
    }

    /// Returns until when the record may live, as far as the client knows.
    pub(crate) fn record_ends(&self) -> Instant {
        self.state().record_ends()
    }

    /// Returns the generation that is held.
    pub(crate) fn generation(&self) -> Option<Arc<Generation>> {
        self.state()
            .held()
            .map(|(generation, _)| Arc::clone(generation))
    }

    /// Returns the generation that is held, if `owner` names it. An owner that is not exact names
    /// any.
    pub(crate) fn generation_of(&self, owner: &OwnerId) -> Option<Arc<Generation>> {
        self.generation()
            .filter(|generation| owner.means(&generation.owner))
    }

    /// Returns whether everything that `owner` held here has ended or was handed off. It is the
    /// owner of one acquire, so what the record says under its name belongs to another holder.
    pub(crate) fn has_ended_for(&self, owner: &OwnerId) -> bool {
        self.caller.turn().is_some() && !self.is_left() && self.generation_of(owner).is_none()
    }

    /// Returns whether this generation is held.
    pub(crate) fn is_current(&self, generation: &Arc<Generation>) -> bool {
        self.state()
            .held()
            .is_some_and(|(held, _)| Arc::ptr_eq(held, generation))
    }

    // --- lists that it is on ---
    //
    // A caller that finds a flag set leaves the hold to the task that clears it. That task checks
    // the hold after clearing, and must then see the caller's change: hence acquire and release
    // ordering.

    /// Puts it on the janitor's list. Returns `false` if it is there already.
    pub(super) fn list(&self) -> bool {
        !self.listed.swap(true, Ordering::AcqRel)
    }

    pub(super) fn unlist(&self) {
        self.listed.store(false, Ordering::Release);
    }

    /// Marks it for the list of holds to forget. Returns `false` if it is there already.
    pub(super) fn mark_for_reaping(&self) -> bool {
        !self.to_be_reaped.swap(true, Ordering::AcqRel)
    }

    pub(super) fn unmark_for_reaping(&self) {
        self.to_be_reaped.store(false, Ordering::Release);
    }

    // --- errors ---

    pub(crate) fn lost_error(&self, owner: &OwnerId, reason: LossReason) -> Error {
        Error::Lost {
            lock: self.lock_name().to_string(),
            owner: owner.clone(),
            reason,
        }
    }

    pub(crate) fn not_held_error(&self, owner: &OwnerId) -> Error {
        Error::NotHeld {
            lock: self.lock_name().to_string(),
            owner: owner.clone(),
        }
    }

    pub(crate) fn not_reentrant_error(&self, owner: &OwnerId) -> Error {
        Error::NotReentrant {
            lock: self.lock_name().to_string(),
            owner: owner.clone(),
        }
    }

    /// Returns the error that guards of a generation get after its end.
    pub(crate) fn end_error(&self, generation: &Generation, end: GenerationEnd) -> Error {
        match end {
            GenerationEnd::Lost(reason) => self.lost_error(&generation.owner, reason),
            GenerationEnd::Released | GenerationEnd::Refused(_) | GenerationEnd::Unconfirmed => {
                self.not_held_error(&generation.owner)
            }
        }
    }

    // --- acquiring: with the owner lock ---

    /// Plans the next acquire.
    pub(crate) fn plan(
        self: &Arc<Self>,
        mode: AcquireMode<'_>,
        siblings: SiblingState<'_>,
        now: Instant,
    ) -> Result<AcquirePlan> {
        let planned = self.change(|state, effects| state.plan(mode, siblings, now, effects));
        planned.map_err(|refusal| refusal.into_error(self.lock_name()))
    }

    /// Marks an acquire of this kind as in flight: if its reply is lost, the server's side stays in
    /// doubt.
    pub(crate) fn send(
        self: &Arc<Self>,
        kind: &Arc<dyn Kind>,
        request: &HoldRequest,
        lease: Lease,
        epoch: Epoch,
        now: Instant,
    ) {
        let entries = kind.about().sharing.entries();
        self.entries.store(entries, Ordering::Release);
        self.change(|state, _| {
            state.ends = state.ends.max(lease.record_ends(now));
            state.send(request, epoch, now);
        });
    }

    /// Records the reply that this owner does not hold what it re-entered. Returns the error for
    /// the caller.
    pub(crate) fn refused_as_lost(self: &Arc<Self>, request: &HoldRequest) -> Error {
        self.change(HoldState::refused_as_lost);
        self.lost_error(&request.owner, LossReason::RecordMissing)
    }

    /// Records an acquire that the server confirmed. Returns `Ok(None)` if the lease has already
    /// ended or this client no longer owns the hold.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the hold that it was to be nested in was lost.
    pub(crate) fn granted(
        self: &Arc<Self>,
        request: &HoldRequest,
        grant: &Grant,
        epoch: Epoch,
    ) -> Result<Option<Ticket>> {
        let granted = self
            .change(|state, effects| state.granted(request, grant, epoch, Instant::now(), effects));
        granted.map_err(|(generation, end)| self.end_error(&generation, end))
    }

    /// Postpones the check for a stuck request, if a queued waiter or the janitor is between two
    /// attempts. Then the owner lock is free, so no request belongs to a future that is no longer
    /// polled. Returns `false` if that is not so.
    pub(super) fn bear(self: &Arc<Self>) -> bool {
        let turn = self.owner_lock.try_acquire();
        turn.is_ok() && self.change(|state, _| state.bear(Instant::now()))
    }

    /// Adds a waiter to the queue. Needs neither the owner lock nor [`Hold::change`]: nothing that
    /// the watchdog polls changes.
    pub(crate) fn enter_queue(&self) {
        self.state().waiters += 1;
    }

    // --- holding ---

    /// Returns what the watchdog must do now.
    pub(crate) fn poll(self: &Arc<Self>, now: Instant) -> Due {
        self.change(|state, effects| state.poll(now, self.due.overdue(), effects))
    }

    /// See [`HoldState::renewed`].
    pub(crate) fn renewed(self: &Arc<Self>, generation: &Arc<Generation>, reply: RenewalReply) {
        self.change(|state, effects| state.renewed(generation, reply, Instant::now(), effects));
    }

    /// See [`HoldState::not_renewed`].
    pub(crate) fn not_renewed(self: &Arc<Self>, generation: &Arc<Generation>, next: Instant) {
        self.change(|state, effects| state.not_renewed(generation, next, Instant::now(), effects));
    }

    // --- ending ---

    /// Gives back the hold of a guard in the ledger. `Core::agree` makes the server follow.
    pub(crate) fn leave(self: &Arc<Self>, ticket: &Ticket, now: Instant) -> Result<()> {
        let left = self.change(|state, effects| state.leave(ticket, now, effects));
        left.map_err(|end| self.end_error(&ticket.generation, end))
    }

    /// Gives back one hold of a generation, whichever guard it belongs to. Returns `Ok(false)` if
    /// it is not held, or no guard holds it.
    pub(crate) fn leave_without_guard(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        now: Instant,
    ) -> Result<bool> {
        self.change(|state, effects| state.leave_without_guard(generation, now, effects))
            .map_err(|reason| self.lost_error(&generation.owner, reason))
    }

    /// Marks that the sibling may have a hold under this name, if the name is that of this hold.
    pub(super) fn share_its_name(&self, owner: &OwnerId) {
        let mut state = self.state();
        state.sibling_in_doubt |= state.owner == *owner;
    }

    /// Returns the outcome of a generation's release. Another release of the same owner may have
    /// settled it first.
    pub(crate) fn check_released(&self, generation: &Generation) -> Result<()> {
        let end = generation.ledger().end;
        match end {
            Some(GenerationEnd::Lost(reason)) => Err(self.lost_error(&generation.owner, reason)),
            Some(GenerationEnd::Refused(kind)) => Err(store_error(
                self.lock_name(),
                StoreError::new(kind, false, "the server refused the release"),
            )),
            Some(GenerationEnd::Unconfirmed) => {
                Err(store_error(self.lock_name(), no_reply(NOT_CONFIRMED)))
            }
            _ => Ok(()),
        }
    }

    // --- settling: with the owner lock ---

    /// Plans the release that makes the server agree, and marks it as in flight: the caller sends
    /// it next. Returns `None` if the server agrees already, or if this client no longer owns the
    /// hold.
    pub(crate) fn send_release(
        self: &Arc<Self>,
        epoch: Epoch,
        now: Instant,
    ) -> Option<HoldRequest> {
        self.change(|state, _| {
            let request = state.plan_release()?;
            state.send(&request, epoch, now);
            Some(request)
        })
    }
}

#[cfg(test)]
mod tests;
