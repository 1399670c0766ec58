//! How the state of a hold changes: pure, like [`State`] itself.

use std::sync::{Arc, MutexGuard};

use super::{
    generation::{Books, End, Generation, Grant, Leg, Ticket},
    kind::Adopts,
    lease::Keep,
    refusal::Refusal,
    state::{
        Abandoned, Answered, Around, Door, Due, Effects, HeldSibling, Left, Planned, Request, STUCK_SLACK, ServerSide,
        Standing, State, Unsettled, slack,
    },
};
use crate::{
    clock::Instant,
    error::{LossReason, StoreErrorKind},
    options::validity,
    store::{Epoch, Released, Renewed},
};

// --- requests ---

impl State {
    /// What the next acquire should send.
    pub(super) fn plan(&mut self, door: Door, around: Around<'_>, now: Instant, effects: &mut Effects) -> Planned {
        let refuse = Planned::Refused;
        if self.standing != Standing::Ours {
            return Planned::Gone;
        }
        self.lose_if_over(now, effects);
        self.forget_ended();
        // while a guard of a lost generation lives, its owner is inside what it lost
        if let Some(generation) = self.current.clone()
            && let Some(End::Lost(reason)) = generation.books().end
        {
            if !door.after_loss {
                return refuse(Refusal::Lost(generation.owner.clone(), reason));
            }
            self.current = None;
        }
        let again = (door.adopts == Some(Adopts::Again) || door.waits && door.about.queues) && self.may_ask_again();
        if !self.agrees() && !again {
            return Planned::Unsettled;
        }
        let count = self.wanted();
        if let Some((generation, _)) = self.held() {
            let owner = || generation.owner.clone();
            if !door.about.reentrant || door.adopts.is_some() {
                return refuse(Refusal::NotReentrant(owner()));
            }
            if door.about.token && generation.token.is_none() {
                return refuse(Refusal::NoToken(owner()));
            }
            if count >= door.max_holds {
                return refuse(Refusal::TooManyHolds(owner(), count));
            }
        }
        if around.value_in_doubt {
            return refuse(Refusal::ValueInDoubt);
        }
        // inside what it lost of the other half, too
        if let Some((owner, reason)) = around.lost_sibling.filter(|_| count == 0 && !door.after_loss) {
            return refuse(Refusal::Lost(owner, reason));
        }
        match around.sibling {
            _ if count > 0 => {}
            Some(HeldSibling { refusal: Some(refusal), .. }) => return refuse(refusal),
            // the server tells by the name that both are one owner's
            Some(HeldSibling { owner, .. }) => self.owner = owner,
            // a place in the queue is kept under its name
            None if self.server == ServerSide::Waits || again || self.owner.has_suffix(around.suffix) => {}
            None => self.owner = around.caller.with_suffix(around.suffix),
        }
        Planned::Send(Request { owner: self.owner.clone(), count: count + 1, before: self.server, is_release: false })
    }

    /// The release that makes the server agree. `None`: it agrees already, or it is not ours to tell.
    pub(super) fn plan_release(&self) -> Option<Request> {
        (self.standing == Standing::Ours && !self.agrees()).then(|| Request {
            owner: self.owner.clone(),
            count: self.wanted(),
            before: self.server,
            is_release: true,
        })
    }

    /// From here on the request is under way: if nobody hears its answer, the server's side is unknown.
    pub(super) fn send(&mut self, request: &Request, epoch: Epoch, now: Instant) {
        self.doubt(epoch, !request.is_release && request.count == 1, now);
    }

    /// The server did not execute the request: nothing new is in doubt.
    pub(super) fn not_executed(&mut self, request: &Request) {
        if self.standing == Standing::Ours {
            self.server = request.before;
            self.moves_to = self.moves_to.take().filter(|_| self.is_in_doubt());
        }
    }

    /// The acquire was confirmed over the connection `epoch`. `Ok(None)`: so late that the lease is over already, or
    /// that nobody counts on it any more. `Err`: the hold that it was to be nested in was lost meanwhile.
    pub(super) fn granted(
        &mut self,
        request: &Request,
        grant: &Grant,
        epoch: Epoch,
        now: Instant,
        effects: &mut Effects,
    ) -> Result<Option<Ticket>, (Arc<Generation>, End)> {
        if self.standing != Standing::Ours {
            return Ok(None);
        }
        self.lose_if_over(now, effects);
        self.overtake(request.before, epoch);
        self.server = ServerSide::Holds(request.count);
        self.forget_ended();
        if let Some(generation) = &self.current
            && let Some(end @ End::Lost(_)) = generation.books().end
        {
            return Err((Arc::clone(generation), end));
        }
        let nested = self.held().map(|(generation, _)| Arc::clone(generation));
        if nested.is_none() && grant.valid_until() <= now {
            return Ok(None);
        }
        let generation =
            nested.unwrap_or_else(|| Generation::new(&request.owner, grant, Leg::first(now, epoch, grant.copied.had)));
        let ticket = generation.add(grant);
        self.current = Some(generation);
        Ok(Some(ticket))
    }

    /// The server said that somebody else holds the lock. `queued`: this request has a place in its queue.
    pub(super) fn busy(&mut self, request: &Request, queued: bool, epoch: Epoch) {
        if self.standing != Standing::Ours {
            return;
        }
        self.overtake(request.before, epoch);
        let queued = queued || request.before == ServerSide::Waits;
        self.server = if queued { ServerSide::Waits } else { ServerSide::Holds(0) };
    }

    /// The server said that the record is of another kind. A place in the queue is as it was.
    pub(super) fn refused_as_another_kind(&mut self, request: &Request, effects: &mut Effects) {
        if self.standing != Standing::Ours {
            return;
        }
        self.server = match request.before {
            ServerSide::Holds(_) => ServerSide::Holds(0),
            before => before,
        };
        self.was_not_released(End::Lost(LossReason::TakenOver));
        self.lose(LossReason::TakenOver, effects);
    }

    /// The server said that this owner does not hold what it re-entered.
    pub(super) fn refused_as_lost(&mut self, effects: &mut Effects) {
        if self.standing == Standing::Ours {
            self.server = ServerSide::Holds(0);
            self.was_not_released(End::Lost(LossReason::RecordMissing));
            self.lose(LossReason::RecordMissing, effects);
        }
    }

    /// What was given up, and not released yet, has ended in another way.
    fn was_not_released(&mut self, end: End) {
        if let Some(generation) = &self.current {
            let mut books = generation.books();
            if books.end == Some(End::Released) {
                books.end = Some(end);
            }
        }
    }

    /// The server answered the release over the connection `epoch`.
    pub(super) fn released(
        &mut self,
        request: &Request,
        released: Released,
        epoch: Epoch,
        effects: &mut Effects,
    ) -> Answered {
        let Request { count, before, .. } = *request;
        let was_in_doubt = matches!(before, ServerSide::InDoubt { .. });
        let held = released != Released::NotHeld || count == 0 && was_in_doubt;
        if self.standing != Standing::Ours {
            return Answered { held, abandoned: None, untold: None };
        }
        let untold = self.untold(epoch);
        let mut abandoned = None;
        self.overtake(before, epoch);
        match self.late {
            Some(late) if count == 0 => abandoned = Some(self.abandon(late.epoch)),
            _ if released == Released::NotHeld => {
                self.server = ServerSide::Holds(0);
                if !was_in_doubt {
                    self.was_not_released(End::Lost(LossReason::RecordMissing));
                }
            }
            _ => self.server = ServerSide::Holds(count),
        }
        if count > 0 && released == Released::NotHeld {
            self.lose(LossReason::RecordMissing, effects);
        }
        Answered { held, abandoned, untold }
    }
}

// --- waiting in the lock's queue ---

impl State {
    /// One waiter less; with the last one the place in the queue is given up. `in_turn`: no request is planned, so that the
    /// name is left to the place, and the owner goes on under another. Otherwise the next to make the server agree gives it up.
    pub(super) fn leave_queue_once(&mut self, in_turn: bool, epoch: Epoch, now: Instant) -> Option<Abandoned> {
        self.waiters = self.waiters.saturating_sub(1);
        if self.waiters > 0 {
            return None;
        }
        let waits = self.server == ServerSide::Waits;
        self.leave_queue(epoch, now);
        if waits && in_turn { self.abandon_name_in_doubt() } else { None }
    }

    /// All waiters leave the queue.
    pub(super) fn leave_queue(&mut self, epoch: Epoch, now: Instant) {
        self.waiters = 0;
        if self.server == ServerSide::Waits {
            self.doubt(epoch, true, now);
        }
    }
}

// --- holding ---

impl State {
    /// What is due.
    pub(super) fn look(&mut self, now: Instant, overdue: std::time::Duration, effects: &mut Effects) -> Due {
        if self.lose_if_over(now, effects) {
            return Due::Ended;
        }
        if let Some((generation, mut books)) = self.held() {
            let early = slack(&books);
            let Some(due) = books.renew_at.filter(|at| *at <= now + early) else { return Due::Nothing };
            let checked = std::mem::take(&mut books.to_be_checked);
            let (keep, period) = match (books.watch(), books.kept_every) {
                (Some((ttl, period)), _) => (Keep::For(ttl), Some(period)),
                // what its guards rely on: a little less than the lease, so that what nobody cut is left as it is
                (None, Some(period)) => (Keep::Until(books.deadline), Some(period.duration())),
                (None, None) if checked => (Keep::AsItIs, None),
                (None, None) => {
                    books.renew_at = None;
                    return Due::Nothing;
                }
            };
            // until the answer is here
            books.renew_at = period.map(|period| now + period);
            return Due::Renew {
                generation: Arc::clone(generation),
                keep,
                due,
                deadline: books.deadline,
                period: period.unwrap_or(books.deadline.saturating_duration_since(now)),
            };
        }
        match self.next_look(overdue) {
            Some((at, _)) if at <= now + STUCK_SLACK => Due::Stuck,
            _ => Due::Nothing,
        }
    }

    /// The record is to be asked for at once, and renewed if it is to be renewed.
    pub(super) fn check_soon(&mut self, now: Instant) {
        if let Some((_, mut books)) = self.held() {
            books.to_be_checked = true;
            books.renew_by(now);
        }
    }

    /// A renewal sent at `sent` was answered; an end of the generation wins. So does a lease that ended before the answer
    /// came: whoever looked has been told that the lock is lost. `next`: when it is due again, `None`: that stays as it is.
    pub(super) fn renewed(
        &mut self,
        generation: &Arc<Generation>,
        answer: Renewed,
        (sent, lease): (Instant, std::time::Duration),
        next: Option<Instant>,
        now: Instant,
        effects: &mut Effects,
    ) {
        if !self.is_current(generation) || self.lose_if_over(now, effects) {
            return;
        }
        let Some((_, mut books)) = self.held() else { return };
        let by_watchdog = next.is_some();
        match answer {
            Renewed::Yes | Renewed::Endless => {
                books.deadline = books.deadline.max(sent + validity(lease));
                if by_watchdog {
                    books.count_renewal(sent);
                }
            }
            Renewed::Unknown => {}
            Renewed::Gone | Renewed::Taken => {
                drop(books);
                let gone = answer == Renewed::Gone;
                return self.lose(if gone { LossReason::RecordMissing } else { LossReason::TakenOver }, effects);
            }
        }
        if let Some(next) = next {
            let goes_on = books.watch().is_some() || books.kept_every.is_some();
            books.renew_at = goes_on.then_some(next);
        }
    }

    /// The renewal was not confirmed; it is due again at `next`.
    pub(super) fn not_renewed(
        &mut self,
        generation: &Arc<Generation>,
        next: Instant,
        now: Instant,
        effects: &mut Effects,
    ) {
        if !self.is_current(generation) || self.lose_if_over(now, effects) {
            return;
        }
        if let Some((_, mut books)) = self.held() {
            books.renew_at = Some(next);
            // nothing else would ask for it again
            books.to_be_checked |= books.watch().is_none() && books.kept_every.is_none();
        }
    }
}

// --- ending ---

impl State {
    /// Gives the hold of a guard back. `Err`: how its generation has ended before.
    pub(super) fn leave(&mut self, ticket: &Ticket, now: Instant, effects: &mut Effects) -> Result<Left, End> {
        let generation = &ticket.generation;
        // a lease that one guard found over is over for all: whoever gives up a guard must not meet its hold again
        if self.is_current(generation) {
            self.lose_if_over(now, effects);
        }
        let mut books = generation.books();
        books.guards -= u32::from(ticket.leave());
        match books.end {
            Some(end) => Err(end),
            None => Ok(self.leave_books(generation, books, Some(ticket), effects)),
        }
    }

    /// Gives one hold of the generation back that is held, whichever guard it has. `Err(None)`: nothing is held.
    pub(super) fn leave_without_guard(&mut self, now: Instant, effects: &mut Effects) -> Result<Left, Option<End>> {
        if self.lose_if_over(now, effects) {
            return Err(Some(End::Lost(LossReason::LeaseExpired)));
        }
        let Some(generation) = self.held().map(|(generation, _)| Arc::clone(generation)) else { return Err(None) };
        let books = generation.books();
        Ok(self.leave_books(&generation, books, None, effects))
    }

    fn leave_books(
        &mut self,
        generation: &Arc<Generation>,
        mut books: MutexGuard<'_, Books>,
        ticket: Option<&Ticket>,
        effects: &mut Effects,
    ) -> Left {
        if self.standing == Standing::GivenAway {
            // whoever it was given away to still has a hold
            books.leave_watch(ticket);
            return Left::Elsewhere(generation.owner.clone());
        }
        books.leave(ticket);
        if !books.is_held() {
            self.sibling_in_doubt = false;
            effects.ended = Some(Arc::clone(generation));
        }
        Left::Here(Arc::clone(generation))
    }

    /// A guard is let go of without a release: from here on the hold is somebody else's to release. `None`: there is
    /// nothing to give away, the lock was lost.
    pub(super) fn give_away(&mut self, ticket: &Ticket, now: Instant, effects: &mut Effects) -> Option<Unsettled> {
        let generation = &ticket.generation;
        let current = self.is_current(generation) && !self.lose_if_over(now, effects);
        let mut books = generation.books();
        books.guards -= u32::from(ticket.leave());
        if !current || !books.is_held() {
            return None;
        }
        let in_doubt = self.is_in_doubt() || self.late.is_some_and(|late| now < late.until);
        if in_doubt && books.guards == 0 {
            // no guard is left here: what comes back under this name dies by its lease
            books.stop_watching();
        }
        if self.standing == Standing::GivenAway {
            return Some(Unsettled::Nothing);
        }
        self.standing = Standing::GivenAway;
        // without a TTL it is never asked for again; nor is its name used again, unless it is a value
        if books.deadline == Instant::NEVER && !generation.owner.is_value() {
            books.end = Some(End::Released);
        }
        Some(match self.server {
            ServerSide::Holds(known) if !in_doubt && known == books.count => Unsettled::Nothing,
            ServerSide::Holds(known) if !in_doubt && known > books.count => Unsettled::Owed(known - books.count),
            _ => Unsettled::InDoubt(books.count),
        })
    }

    /// Gives up on a request that is never answered to anybody. `None`: it was answered meanwhile.
    pub(super) fn orphan(&mut self) -> Option<Abandoned> {
        let ServerSide::InDoubt { .. } = self.server else { return None };
        if self.held().is_some() || self.standing != Standing::Ours {
            return None;
        }
        self.standing = Standing::Orphaned;
        let epoch = self.doubts(self.server)?;
        Some(self.abandon(epoch))
    }

    /// Leaves the owner's name to late executions of what is in doubt, or was before something newer was answered. `None`:
    /// nothing is, or the lock is held: late copies of nested requests change its count, which each release sets anew.
    pub(super) fn abandon_name_in_doubt(&mut self) -> Option<Abandoned> {
        if self.wanted() > 0 || self.standing != Standing::Ours {
            return None;
        }
        let epoch = self.doubts(self.server)?;
        // who waits for a release would take the new name, of which the server has no record, for its success
        if self.server != ServerSide::Holds(0) {
            self.was_not_released(End::Unconfirmed);
        }
        Some(self.abandon(epoch))
    }

    /// Leaves the record to its lease, and the name with it to what may still be executed.
    pub(super) fn write_off(&mut self, refusal: StoreErrorKind) -> Option<Abandoned> {
        self.was_not_released(End::Refused(refusal));
        let abandoned = self.abandon_name_in_doubt();
        self.server = ServerSide::Holds(self.wanted());
        abandoned
    }
}

#[cfg(test)]
mod tests;
