//! Holds that are left to their lease: a guard is dropped, and its hold stays in the hold count.
//!
//! After the last guard, the owner is no longer inside that hold: it continues with another hold,
//! under another name. A value has no other name, so its next acquire asks the server first.
//!
//! A request in doubt is settled to the count that was left. After its lease the client sends
//! nothing more for it, because another client may have extended the record.
//!
//! `Lock::release` without a guard sends the new count with the one that it has read, and takes
//! effect only if the record still has the latter. If there is no reply, the janitor reads the
//! record: with the same count, the request was not executed, and will not be once the next one is;
//! with another, it was, or another release was.
//!
//! The half of a read-write lock that shares its name with a hold that was left is refused until
//! the other half is released. A shutdown ends the guards' part of a hold, and settles the count
//! that was left.

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::{Arc, MutexGuard},
};

use nestlock_wire::clock::Instant;

use super::{
    acquire::{
        attempt::{Attempt, Busy},
        options::Acquire,
    },
    core::Core,
    hold::{
        Hold,
        generation::{Generation, Ledger, Ticket},
        state::{Effects, HoldState, Ownership},
    },
};

use crate::{
    error::{Error, LossReason, Result},
    options::validity,
    store::Inspected,
};

impl HoldState {
    /// Notes until when the record may live, before a hold stops being renewed.
    pub(crate) fn note_end(&mut self, ledger: &Ledger) {
        if let Some(ttl) = ledger.longest_ttl() {
            self.ends = self
                .ends
                .max(ledger.deadline + ttl.saturating_sub(validity(ttl)));
        }
    }

    /// Marks the hold as left if no guard of it remains. The client reports its end now, since it
    /// need not notice the end of the lease. The hold counts as held for as long as its record may
    /// live.
    pub(crate) fn notice_left(
        &mut self,
        generation: &Arc<Generation>,
        mut ledger: MutexGuard<'_, Ledger>,
        effects: &mut Effects,
    ) {
        if ledger.guards == 0 && ledger.is_held() {
            self.is_left = true;
            ledger.deadline = ledger.deadline.max(self.ends);
            effects.ended = Some(Arc::clone(generation));
        }
    }

    /// Leaves the hold of a guard to its lease: it stays in the hold count, and is no longer
    /// renewed.
    pub(crate) fn leave_to_lease(&mut self, ticket: &Ticket, now: Instant, effects: &mut Effects) {
        if self.is_current(&ticket.generation) {
            self.lose_if_over(now, effects);
        }
        let mut ledger = ticket.generation.ledger();
        self.note_end(&ledger);
        ledger.guards -= u32::from(ticket.leave());
        ledger.unwatch(ticket);
        self.notice_left(&ticket.generation, ledger, effects);
    }

    /// Ends what guards hold, because the client shuts down. What was left to its lease stays.
    pub(crate) fn shut_down(&mut self, effects: &mut Effects) {
        if self.is_left {
            return;
        }
        let left = self
            .held()
            .and_then(|(generation, ledger)| generation.left_over(&ledger));
        self.lose(LossReason::ShutDown, effects);
        if left.is_some() {
            self.current = left;
            self.is_left = true;
        }
    }
}

impl Core {
    /// Leaves the hold of a guard to its lease: from here on, any client that knows its owner may
    /// release or extend it.
    pub(crate) fn leave_to_lease(&self, hold: &Arc<Hold>, ticket: &Ticket) {
        if !self.store.is_ours() {
            return;
        }
        // first: the owner's next acquire may come as soon as the hold is left, and must get
        // another name
        self.holds.retire_names();
        if let Some(sibling) = self.holds.held_sibling(hold.kind(), &hold.caller) {
            sibling.share_its_name(&ticket.generation.owner);
        }
        hold.change(|state, effects| state.leave_to_lease(ticket, Instant::now(), effects));
        self.tidy(hold);
    }

    /// Gives up on the request of a read lock inside a write lock that was left: the owner is no
    /// longer inside that.
    pub(crate) fn orphan_nested(&self, hold: &Arc<Hold>) {
        let sibling = hold.kind().about().sibling;
        if sibling.is_some_and(|sibling| sibling.excludes)
            && let Some(nested) = self.holds.known_sibling(hold.kind(), &hold.caller)
            && nested.owner() == hold.owner()
        {
            self.orphan(&nested);
            // its call goes on with another hold
            nested.change(|state, _| state.is_left |= state.ownership == Ownership::Orphaned);
        }
    }
}

impl<'a> Acquire<'a> {
    /// Checks the record before an acquire under a value whose hold was left to its lease. The
    /// server cannot tell the two holders of a value apart, so the acquire may be sent only if the
    /// record does not list the value. Returns `None` if it may be sent. Boxed, as it is rare.
    pub(crate) fn attempt_by_a_value_that_is_left(
        &self,
        deadline: Option<Instant>,
    ) -> Pin<Box<dyn Future<Output = Option<Result<Attempt<'a>>>> + Send + '_>> {
        Box::pin(async move {
            let left = self.core.holds.left(self.kind, &self.owner)?;
            Some(
                match self
                    .in_time(
                        deadline,
                        pin!(self.core.store.inspect(&self.kind.inspect())),
                    )
                    .await
                {
                    Some(Ok(Inspected::Held { ttl, holders }))
                        if holders.iter().any(|(owner, _)| *owner == self.owner) =>
                    {
                        Ok(Attempt::Busy(Busy {
                            ttl,
                            wake: self.core.wake(self.kind, &self.owner),
                            queue_entry: None,
                            far: false,
                        }))
                    }
                    Some(Ok(Inspected::WrongKind)) => Err(Error::WrongLockKind {
                        lock: self.kind.name().to_string(),
                    }),
                    Some(Ok(_)) => {
                        left.change(|state, effects| {
                            state.lose(LossReason::RecordMissing, effects);
                        });
                        self.core.tidy(&left);
                        return None;
                    }
                    Some(Err(error)) => self.failed(error),
                    None => Ok(Attempt::GivenUp),
                },
            )
        })
    }
}
