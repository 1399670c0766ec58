//! Hands a hold to another client: its record moves to an owner name that no task has, and from
//! there to the client that adopts it. (To adopt is to acquire by another script.)
//!
//! Each such name is used once, so both requests are idempotent, and late ones find a record that
//! does not have their name. For the giver it is a release; the name that the hold may have moved
//! to is kept with the doubt (`HoldState::moves_to`) and is released unless the call has returned
//! it. For the adopter it is an acquire; between two tries its `QueueEntry` keeps the janitor from
//! settling the doubt. Only the single hold of an owner moves: see decision 8.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{
    Epoch,
    clock::{Instant, millis},
};

use super::{
    acquire::options::Acquire,
    core::Core,
    failure::no_reply,
    hold::{
        Entered, Hold,
        generation::{Generation, GenerationEnd, Ticket},
        state::{Abandoned, Answered, Effects, HoldRequest, HoldState},
    },
    kind::Kind,
    release::Repeat,
    settle::{Agreement, CallInFlight},
};

use crate::{
    error::{Error, LossReason, Result, StoreError},
    options::{AcquireOptions, Wait, checked_lease},
    owner::OwnerId,
    store::{Acquired, Released},
};

const NESTED: &str = "its owner holds it more than once; release the other holds first";
const READS_AND_WRITES: &str =
    "its owner reads and writes at the same time; release one of the two first";
const SETTLED_OTHERWISE: &str = "another call of this owner ended the hold, or this call was not polled; the handed-over hold is being released";

impl<'a> Acquire<'a> {
    /// Returns an acquire that takes over the hold of `from`, rather than a free lock.
    pub(crate) fn adopting(
        core: &'a Core,
        kind: &'a Arc<dyn Kind>,
        options: &AcquireOptions,
        from: &'a OwnerId,
    ) -> Result<Self> {
        let mut adopt = Self::new(
            core,
            kind,
            options,
            Wait::at_most(core.config.command_timeout()),
        )?;
        if adopt.owner.is_value() {
            // a value has no other name: the server could not tell it from an earlier holder of the
            // same value
            let (owner, reason) = (
                adopt.owner.to_string(),
                "a hold cannot be adopted under a value; omit the value",
            );
            return Err(Error::InvalidOwner { owner, reason });
        }
        (adopt.waits, adopt.from) = (false, Some(from));
        Ok(adopt)
    }

    /// Adopts the hold. The error does not name `from`, which is a secret.
    pub(crate) async fn adopt(self) -> Result<Entered> {
        let (lock, owner) = (self.kind.name().to_string(), self.owner.clone());
        self.run().await?.ok_or(Error::NotHeld { lock, owner })
    }
}

/// Why a hold does not move.
enum Stays {
    /// The server does not agree with the ledger: settle that first.
    Unsettled,
    Refused(&'static str),
    Ended(GenerationEnd),
}

impl HoldState {
    /// Gives up the hold of a guard, if it is the only one and the server records it.
    fn part_with(
        &mut self,
        ticket: &Ticket,
        now: Instant,
        effects: &mut Effects,
    ) -> Result<Arc<Generation>, Stays> {
        let generation = &ticket.generation;
        if self.is_current(generation) {
            self.lose_if_over(now, effects);
        }
        let (end, count) = {
            let ledger = generation.ledger();
            (ledger.end, ledger.count)
        };
        match end {
            Some(end) => return Err(Stays::Ended(end)),
            None if count > 1 => return Err(Stays::Refused(NESTED)),
            None if !self.agrees() => return Err(Stays::Unsettled),
            None => {}
        }
        self.leave(ticket, now, effects).map_err(Stays::Ended)?;
        Ok(Arc::clone(generation))
    }

    /// Returns the move of a generation that was given up, as a request in flight. Returns `None`
    /// if another call has settled the generation already.
    ///
    /// Unless the caller receives the name `to`, the moved hold must be cleaned up.
    fn send_move(
        &mut self,
        generation: &Arc<Generation>,
        to: &OwnerId,
        keep: Duration,
        epoch: Epoch,
        now: Instant,
    ) -> Option<HoldRequest> {
        let request = self
            .plan_release()
            .filter(|request| self.is_current(generation) && request.count == 0)?;
        self.ends = self.ends.max(now + keep);
        self.moves_to = Some(Box::new(to.clone()));
        self.send(&request, epoch, now);
        Some(request)
    }

    /// Takes the name that the hold may have moved to, to be cleaned up. The giver's name is
    /// settled, so no move follows. Returns `None` if no move is in doubt.
    pub(super) fn untold(&mut self, epoch: Epoch) -> Option<Abandoned> {
        let owner = *self.moves_to.take()?;
        Some(Abandoned {
            owner,
            moves_to: None,
            epoch,
            ends: self.record_ends(),
        })
    }

    /// Takes in the reply that the hold has moved. Returns `None` if its name was abandoned before
    /// the reply came; then the name that it moved to was abandoned, too.
    pub(super) fn moved(
        &mut self,
        request: &HoldRequest,
        epoch: Epoch,
        effects: &mut Effects,
    ) -> Option<Answered> {
        self.moves_to.take()?;
        Some(self.released(request, Released::Free, epoch, effects))
    }
}

impl Hold {
    fn part_with(self: &Arc<Self>, ticket: &Ticket) -> Result<Arc<Generation>, Stays> {
        self.change(|state, effects| state.part_with(ticket, Instant::now(), effects))
    }

    fn send_move(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        moves: &Move<'_>,
        epoch: Epoch,
    ) -> Option<HoldRequest> {
        self.change(|state, _| {
            state.send_move(generation, &moves.to, moves.keep, epoch, Instant::now())
        })
    }
}

/// One move of a hold, with all its attempts.
struct Move<'a> {
    ticket: &'a Ticket,
    /// The generation, once it was given up: from then on there is no way back.
    given_up: Option<Arc<Generation>>,
    to: OwnerId,
    keep: Duration,
    deadline: Instant,
}

impl Core {
    /// Moves the hold of a guard to an owner name that no task has, for `keep`, and returns that
    /// name. Until the hold is given up, a failure has changed nothing. After that, a failed move
    /// is released, under whichever name the server records it.
    pub(crate) async fn transfer(
        &self,
        hold: &Arc<Hold>,
        ticket: &Ticket,
        keep: Duration,
    ) -> Result<OwnerId> {
        self.check_ours(hold.lock_name())?;
        self.check_open()?;
        let keep = checked_lease(hold.lock_name(), keep)?;
        let deadline = Instant::now() + self.config.command_timeout();
        let under_way = CallInFlight {
            core: self,
            hold: Arc::clone(hold),
        };
        let mut moves = Move {
            ticket,
            given_up: None,
            to: OwnerId::placeholder(),
            keep,
            deadline,
        };
        let mut repeat = Repeat::until(deadline);
        while let Some(error) = self.try_to_move(&under_way.hold, &mut moves).await? {
            repeat.after(self, hold, error).await?;
        }
        Ok(moves.to)
    }

    /// Makes one attempt to move the hold. Returns `Some` if a retry may succeed.
    async fn try_to_move(
        &self,
        hold: &Arc<Hold>,
        moves: &mut Move<'_>,
    ) -> Result<Option<StoreError>> {
        // the other half of a read-write lock must not change either. Both owner locks are taken in
        // a fixed order: otherwise two moves at once would wait for each other
        let sibling = self.holds.known_sibling(hold.kind(), &hold.caller);
        let mut both: Vec<_> = sibling.iter().chain([hold]).collect();
        both.sort_by_key(|hold| hold.kind().about().family);
        let mut turns = Vec::with_capacity(2);
        for hold in both {
            match self.lock_owner(hold, Some(moves.deadline)).await {
                Ok(turn) => turns.push(turn),
                Err(error) => return Ok(Some(error)),
            }
        }
        if let Some(sibling) = &sibling
            && moves.given_up.is_none()
            && let Some(error) = self.settle_sibling(sibling).await?
        {
            return Ok(Some(error));
        }
        let generation = match &moves.given_up {
            Some(generation) => Arc::clone(generation),
            None => match self.part(hold, moves).await? {
                Ok(generation) => Arc::clone(moves.given_up.insert(generation)),
                Err(error) => return Ok(Some(error)),
            },
        };
        let settled_otherwise = || Error::Unconfirmed {
            lock: hold.lock_name().to_string(),
            source: no_reply(SETTLED_OTHERWISE),
        };
        let mut route = self.route(hold, Instant::now());
        let request = hold
            .send_move(&generation, moves, route.epoch())
            .ok_or_else(settled_otherwise)?;
        let transfer = hold
            .kind()
            .transfer(&request.owner, &moves.to, millis(moves.keep));
        match self.acquire_by(&mut route, hold, &request, &transfer).await {
            Ok((Acquired::Yes { .. }, epoch)) => {
                let answered = hold
                    .change(|state, effects| state.moved(&request, epoch, effects))
                    .ok_or_else(settled_otherwise)?;
                self.settle_reply(hold, answered);
                // no await from here on: the caller is sure to receive the name
                Ok(None)
            }
            Ok((_, epoch)) => {
                self.agreed(hold, &request, Released::NotHeld, epoch);
                Err(hold.lost_error(&request.owner, LossReason::RecordMissing))
            }
            Err(error) => {
                if !error.may_have_executed() {
                    hold.change(|state, _| state.not_executed(&request));
                }
                Ok(Some(error))
            }
        }
    }

    /// Settles the sibling of a hold before its move, or refuses the move. Both have one name on
    /// the server. Returns `Some` if a retry may succeed.
    async fn settle_sibling(&self, sibling: &Arc<Hold>) -> Result<Option<StoreError>> {
        if sibling.count() == 0
            && let Agreement::Refused(error) | Agreement::Silent(error) =
                self.agree(sibling, Instant::now()).await
        {
            return Ok(Some(error));
        }
        if sibling.count() > 0 {
            return Err(Error::CannotHandOver {
                lock: sibling.lock_name().to_string(),
                reason: READS_AND_WRITES,
            });
        }
        Ok(None)
    }

    /// Gives the hold up in the ledger, as soon as the server agrees with it. `Ok(Err(_))`: a retry
    /// may succeed.
    async fn part(
        &self,
        hold: &Arc<Hold>,
        moves: &Move<'_>,
    ) -> Result<Result<Arc<Generation>, StoreError>> {
        loop {
            match hold.part_with(moves.ticket) {
                Ok(generation) => return Ok(Ok(generation)),
                Err(Stays::Refused(reason)) => {
                    return Err(Error::CannotHandOver {
                        lock: hold.lock_name().to_string(),
                        reason,
                    });
                }
                Err(Stays::Ended(end)) => return Err(hold.end_error(&moves.ticket.generation, end)),
                Err(Stays::Unsettled) => {}
            }
            match self.agree(hold, Instant::now()).await {
                Agreement::Reached { .. } | Agreement::NotOurs => {}
                Agreement::Refused(error) | Agreement::Silent(error) => return Ok(Err(error)),
            }
        }
    }
}
