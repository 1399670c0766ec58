//! The transitions of a [`HoldState`]. They are pure, like the state itself.
//!
//! While a guard of a lost generation is alive, its owner is inside what it lost: its acquires are
//! refused with `Lost`, whether the watchdog has noticed or not. So are its reads inside a write
//! lock that it lost, but not its writes after a lost read: an owner never writes inside its own
//! read lock. The release or drop of the last such guard ends that. A lease that ended is not
//! released before: the record lives a moment longer than the deadline, and no lease is cut short.
//!
//! A loss is final: a guard may have reported it, so neither a late renewal nor a late re-entry
//! revives a generation. How a release ended is kept in the generation, in case another call of the
//! owner settled it first.
//!
//! A nested request has the name of the outermost hold. If it is executed late, the record may have
//! another count; the next release or acquire sets it.

use std::{
    num::NonZeroU8,
    sync::{Arc, MutexGuard},
};

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    generation::{Confirmed, Generation, GenerationEnd, Grant, Ledger, Ticket},
    refusal::Refusal,
    state::{
        Abandoned, AcquireMode, AcquirePlan, Answered, Effects, HeldSibling, HoldRequest,
        HoldState, Ownership, ServerSide, SiblingState,
    },
};

use crate::{
    engine::kind::Adopts,
    error::{LossReason, StoreErrorKind},
    owner::OwnerId,
    store::Released,
};

// --- requests ---

impl HoldState {
    /// Plans the next acquire.
    pub(crate) fn plan(
        &mut self,
        mode: AcquireMode<'_>,
        siblings: SiblingState<'_>,
        now: Instant,
        effects: &mut Effects,
    ) -> Result<AcquirePlan, Refusal> {
        self.lose_if_over(now, effects);
        if self.ownership != Ownership::Ours || self.is_left {
            return Ok(AcquirePlan::Forget);
        }
        self.forget_ended();
        self.check_loss(mode)?;
        self.check_turn(mode, siblings.caller)?;
        let again = (mode.adopts == Some(Adopts::Again) || mode.waits && mode.about.queues)
            && self.may_retry();
        if !self.agrees() && !again {
            return Ok(AcquirePlan::Agree);
        }
        let count = self.wanted();
        self.check_nesting(mode, count)?;
        if siblings.value_in_doubt {
            return Err(Refusal::ValueInDoubt);
        }
        if count == 0 {
            self.choose_name(mode, siblings, again)?;
        }
        Ok(AcquirePlan::Send(HoldRequest {
            owner: self.owner.clone(),
            count: count + 1,
            before: self.server,
            is_release: false,
        }))
    }

    /// Refuses an acquire while a guard of a lost generation is alive: its owner is still inside the
    /// critical section that it lost, and a new hold would hide the loss.
    fn check_loss(&mut self, mode: AcquireMode<'_>) -> Result<(), Refusal> {
        if let Some(generation) = self.current.clone()
            && let Some(GenerationEnd::Lost(reason)) = generation.ledger().end
        {
            if !mode.after_loss {
                return Err(Refusal::Lost(generation.owner.clone(), reason));
            }
            self.current = None;
        }
        Ok(())
    }

    /// Refuses an acquire by the owner of one acquire, unless it is that acquire or is nested in its
    /// hold: after a hand-off, the record's name is that of another holder.
    fn check_turn(&self, mode: AcquireMode<'_>, caller: &OwnerId) -> Result<(), Refusal> {
        let owner = mode.named.unwrap_or(caller);
        let turns = (mode.turn.or(owner.turn()), caller.turn());
        let is_refused = match (self.held(), mode.named) {
            _ if turns == (None, None) => false,
            // A name that was read from the record has no turn: it means the first holder. After a
            // hand-off it may come from the giver, which must not get a second guard.
            (Some((generation, _ledger)), _) => match (turns.0, generation.owner.turn()) {
                (None, Some(turn)) => turn != NonZeroU8::MIN,
                (named, held) => named != held,
            },
            (None, Some(_)) => true,
            (None, None) => self.owner.turn() != turns.1,
        };
        if is_refused {
            return Err(Refusal::AcquireEnded(owner.clone()));
        }
        Ok(())
    }

    /// Refuses an acquire that cannot be nested in what is held.
    fn check_nesting(&self, mode: AcquireMode<'_>, count: u32) -> Result<(), Refusal> {
        let Some((generation, _ledger)) = self.held() else {
            return Ok(());
        };
        let owner = generation.owner.clone();
        if !mode.about.reentrant || mode.adopts.is_some() {
            Err(Refusal::NotReentrant(owner))
        } else if mode.about.token && generation.token.is_none() {
            Err(Refusal::NoToken(owner))
        } else if count >= mode.max_holds {
            Err(Refusal::TooManyHolds(owner, count))
        } else {
            Ok(())
        }
    }

    /// Chooses the name of a first hold, if the sibling does not exclude it. `again`: the request is
    /// a retry.
    fn choose_name(
        &mut self,
        mode: AcquireMode<'_>,
        siblings: SiblingState<'_>,
        again: bool,
    ) -> Result<(), Refusal> {
        // As for a lost generation: see `check_loss`.
        if let Some((owner, reason)) = siblings.lost_sibling
            && !mode.after_loss
        {
            return Err(Refusal::Lost(owner, reason));
        }
        match siblings.sibling {
            Some(HeldSibling {
                refusal: Some(refusal),
                ..
            }) => return Err(refusal),
            // Use the sibling's name: by it the server knows that both belong to one owner.
            Some(HeldSibling { owner, .. }) => self.owner = owner,
            // Keep the name: a place in the queue, or a request to retry, is bound to it.
            None if self.server == ServerSide::Waits
                || again
                || self.owner.has_suffix(siblings.suffix) => {}
            None => self.owner = siblings.caller.with_suffix(siblings.suffix),
        }
        Ok(())
    }

    /// Plans the release that makes the server agree. Returns `None` if it agrees already, or if
    /// this client no longer owns the hold.
    pub(crate) fn plan_release(&self) -> Option<HoldRequest> {
        (self.ownership == Ownership::Ours && !self.agrees()).then(|| HoldRequest {
            owner: self.owner.clone(),
            count: self.wanted(),
            before: self.server,
            is_release: true,
        })
    }

    /// Marks the request as in flight: if its reply is lost, the server's side stays in doubt.
    pub(crate) fn send(&mut self, request: &HoldRequest, epoch: Epoch, now: Instant) {
        self.doubt(epoch, !request.is_release && request.count == 1, now);
    }

    /// Records that the server did not execute the request: nothing new is in doubt.
    pub(crate) fn not_executed(&mut self, request: &HoldRequest) {
        if self.ownership == Ownership::Ours {
            self.server = request.before;
            self.moves_to = self.moves_to.take().filter(|_| self.is_in_doubt());
        }
    }

    /// Records an acquire that the server confirmed over the connection `epoch`. Returns `Ok(None)`
    /// if the lease has already ended or the owner no longer uses the hold. Returns `Err` if the
    /// hold that it was to be nested in was lost.
    pub(crate) fn granted(
        &mut self,
        request: &HoldRequest,
        grant: &Grant,
        epoch: Epoch,
        now: Instant,
        effects: &mut Effects,
    ) -> Result<Option<Ticket>, (Arc<Generation>, GenerationEnd)> {
        if self.ownership != Ownership::Ours {
            return Ok(None);
        }
        self.lose_if_over(now, effects);
        self.overtake(request.before, epoch);
        self.server = ServerSide::Holds(request.count);
        self.forget_ended();
        if let Some(generation) = &self.current
            && let Some(end @ GenerationEnd::Lost(_)) = generation.ledger().end
        {
            return Err((Arc::clone(generation), end));
        }
        let nested = self.held().map(|(generation, _)| Arc::clone(generation));
        if self.is_left || nested.is_none() && grant.valid_until() <= now {
            return Ok(None);
        }
        let generation = nested.unwrap_or_else(|| {
            let confirmed = Confirmed {
                at: now,
                epoch,
                replicas: grant.copied.had,
            };
            Generation::new(&request.owner, grant, confirmed)
        });
        let ticket = generation.add(grant);
        self.current = Some(generation);
        if std::mem::take(&mut self.to_be_checked) {
            self.check_soon(now);
        }
        Ok(Some(ticket))
    }

    /// Records the reply that another owner holds the lock. `queued`: this request has a place in
    /// its wait queue.
    pub(crate) fn busy(&mut self, request: &HoldRequest, queued: bool, epoch: Epoch) {
        if self.ownership != Ownership::Ours {
            return;
        }
        self.overtake(request.before, epoch);
        let queued = queued || request.before == ServerSide::Waits;
        self.server = if queued {
            ServerSide::Waits
        } else {
            ServerSide::Holds(0)
        };
    }

    /// Records the reply that the record is of another kind. A place in the queue stays as it was.
    pub(crate) fn refused_as_another_kind(&mut self, request: &HoldRequest, effects: &mut Effects) {
        if self.ownership != Ownership::Ours {
            return;
        }
        self.server = match request.before {
            ServerSide::Holds(_) => ServerSide::Holds(0),
            before => before,
        };
        self.was_not_released(GenerationEnd::Lost(LossReason::TakenOver));
        self.lose(LossReason::TakenOver, effects);
    }

    /// Records the reply that this owner does not hold what it re-entered.
    pub(crate) fn refused_as_lost(&mut self, effects: &mut Effects) {
        if self.ownership == Ownership::Ours {
            self.server = ServerSide::Holds(0);
            self.was_not_released(GenerationEnd::Lost(LossReason::RecordMissing));
            self.lose(LossReason::RecordMissing, effects);
        }
    }

    /// Changes the end of a generation that was given up but is not released yet.
    fn was_not_released(&mut self, end: GenerationEnd) {
        if let Some(generation) = &self.current {
            let mut ledger = generation.ledger();
            if ledger.end == Some(GenerationEnd::Released) {
                ledger.end = Some(end);
            }
        }
    }

    /// Records the reply to a release over the connection `epoch`.
    pub(crate) fn released(
        &mut self,
        request: &HoldRequest,
        released: Released,
        epoch: Epoch,
        effects: &mut Effects,
    ) -> Answered {
        let HoldRequest { count, before, .. } = *request;
        let was_in_doubt = matches!(before, ServerSide::InDoubt { .. });
        let held = released != Released::NotHeld || count == 0 && was_in_doubt;
        if self.ownership != Ownership::Ours {
            return Answered {
                held,
                abandoned: None,
                untold: None,
            };
        }
        // First: `abandon` would take the name as one that the hold may still be moved to.
        let untold = self.untold(epoch);
        let mut abandoned = None;
        self.overtake(before, epoch);
        match self.late_request {
            Some(late) if count == 0 => abandoned = Some(self.abandon(late.epoch)),
            _ if released == Released::NotHeld => {
                self.server = ServerSide::Holds(0);
                if !was_in_doubt {
                    self.was_not_released(GenerationEnd::Lost(LossReason::RecordMissing));
                }
            }
            _ => self.server = ServerSide::Holds(count),
        }
        if count > 0 && released == Released::NotHeld {
            self.lose(LossReason::RecordMissing, effects);
        }
        Answered {
            held,
            abandoned,
            untold,
        }
    }
}

// --- waiting in the lock's queue ---

impl HoldState {
    /// Removes a waiter from the queue. With the last one, the place in the queue is given up.
    ///
    /// `in_turn`: the caller has the owner lock, so no request is planned. Then the name is
    /// abandoned with the place, and the owner continues under another name. Otherwise the next
    /// settlement gives the place up.
    pub(crate) fn leave_queue_once(
        &mut self,
        in_turn: bool,
        epoch: Epoch,
        now: Instant,
    ) -> Option<Abandoned> {
        self.waiters = self.waiters.saturating_sub(1);
        if self.waiters > 0 {
            return None;
        }
        let waits = self.server == ServerSide::Waits;
        self.leave_queue(epoch, now);
        if waits && in_turn {
            self.abandon_name_in_doubt()
        } else {
            None
        }
    }

    /// Removes all waiters from the queue.
    pub(crate) fn leave_queue(&mut self, epoch: Epoch, now: Instant) {
        self.waiters = 0;
        if self.server == ServerSide::Waits {
            self.doubt(epoch, true, now);
        }
    }
}

// --- ending ---

impl HoldState {
    /// Gives back the hold of a guard. Returns `Err` if its generation has already ended.
    pub(crate) fn leave(
        &mut self,
        ticket: &Ticket,
        now: Instant,
        effects: &mut Effects,
    ) -> Result<(), GenerationEnd> {
        let generation = &ticket.generation;
        // If one guard has seen the lease end, it has ended for all. Otherwise giving up a guard
        // could find its hold alive again.
        if self.is_current(generation) {
            self.lose_if_over(now, effects);
        }
        let mut ledger = generation.ledger();
        ledger.guards -= u32::from(ticket.leave());
        match ledger.end {
            Some(end) => return Err(end),
            None => self.leave_ledger(generation, ledger, Some(ticket), effects),
        }
        Ok(())
    }

    /// Gives back one hold of a generation, whichever guard it belongs to. Returns `Ok(false)` if
    /// it is not held, or no guard holds it, and `Err` if it was lost just now.
    pub(crate) fn leave_without_guard(
        &mut self,
        generation: &Arc<Generation>,
        now: Instant,
        effects: &mut Effects,
    ) -> Result<bool, LossReason> {
        if self.is_left || !self.is_current(generation) {
            return Ok(false);
        }
        if self.lose_if_over(now, effects) {
            return Err(LossReason::LeaseExpired);
        }
        let ledger = generation.ledger();
        if !ledger.is_held() {
            return Ok(false);
        }
        self.leave_ledger(generation, ledger, None, effects);
        Ok(true)
    }

    fn leave_ledger(
        &mut self,
        generation: &Arc<Generation>,
        mut ledger: MutexGuard<'_, Ledger>,
        ticket: Option<&Ticket>,
        effects: &mut Effects,
    ) {
        self.note_end(&ledger);
        ledger.leave(ticket);
        if !ledger.is_held() {
            self.sibling_in_doubt = false;
            effects.ended = Some(Arc::clone(generation));
        }
        self.notice_left(generation, ledger, effects);
    }

    /// Gives up on a request whose future is no longer polled. Returns `None` if the request is no
    /// longer in doubt, or if the hold is held or no longer this client's. What was left to its
    /// lease is orphaned, and nothing is undone: what the request may acquire ends with that lease.
    pub(crate) fn orphan(&mut self) -> Option<Abandoned> {
        let ServerSide::InDoubt { .. } = self.server else {
            return None;
        };
        if self.ownership != Ownership::Ours || self.held().is_some() && !self.is_left {
            return None;
        }
        self.ownership = Ownership::Orphaned;
        if self.is_left {
            return None;
        }
        let epoch = self.doubts(self.server)?;
        Some(self.abandon(epoch))
    }

    /// Abandons the owner's name to late requests: those in doubt, and those that a newer reply
    /// overtook. Returns `None` if there are none or the lock is held: a late nested request only
    /// changes the hold count, which each release sets again.
    pub(crate) fn abandon_name_in_doubt(&mut self) -> Option<Abandoned> {
        if self.wanted() > 0 || self.is_left || self.ownership != Ownership::Ours {
            return None;
        }
        let epoch = self.doubts(self.server)?;
        // Otherwise a caller that awaits this release would find no record under the new name and
        // take that for success.
        if self.server != ServerSide::Holds(0) {
            self.was_not_released(GenerationEnd::Unconfirmed);
        }
        Some(self.abandon(epoch))
    }

    /// Leaves a record whose release was refused to its lease, and its name to late requests.
    pub(crate) fn write_off(&mut self, refusal: StoreErrorKind) -> Option<Abandoned> {
        // First: `abandon_name_in_doubt` would mark the end as unconfirmed.
        self.was_not_released(GenerationEnd::Refused(refusal));
        let abandoned = self.abandon_name_in_doubt();
        self.server = ServerSide::Holds(self.wanted());
        abandoned
    }
}

#[cfg(test)]
mod tests;
