//! Makes the server agree with the ledger. Releases, cancellations and lost replies all use
//! [`Core::agree`].
//!
//! It sends the release script with the wanted count, which is idempotent. If a call ends midway,
//! the doubt stays: the drop of its `CallInFlight` puts the hold on the janitor's list, and the
//! owner's next call settles it first.
//!
//! Only a reply over the connection that carried a request proves that the request is over. Without
//! that proof, if nothing is held, the name is abandoned: later holds use another suffix, and the
//! janitor releases the old name. A name is retired in the transition, or under the owner lock,
//! because the owner's next acquire may be planned right after.
//!
//! Decisions 6 and 7 say why.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    core::Core,
    hold::{
        Hold,
        state::{Abandoned, Answered, HoldRequest, Ownership, Residue},
    },
    jobs::{Job, LentOwnerLock, UnsettledRequest},
};

use crate::{
    error::{StoreError, StoreErrorKind},
    meter::Meter,
    owner::OwnerId,
    store::{Released, Route},
};

/// Error text: another call of the same owner, for a rival kind, is in flight.
const ANOTHER_KIND: &str =
    "its owner is acquiring a lock of another kind with this name, which excludes this one";

/// The outcome of [`Core::agree`].
pub(crate) enum Agreement {
    /// The server records the wanted count. `held`: it recorded this owner before, or may have.
    Reached { held: bool },
    /// This client no longer owns the hold: it is being undone.
    NotOurs,
    /// The server did not execute the request.
    Refused(StoreError),
    /// No reply: the request may have been executed.
    Silent(StoreError),
}

impl Core {
    /// Returns the route of a request about this hold, sent at `asked`.
    pub(crate) fn route(&self, hold: &Hold, asked: Instant) -> Route {
        self.store.route(hold.kind().record(), asked)
    }

    /// Returns the epoch of the connection that carries requests about this hold now.
    pub(crate) fn epoch(&self, hold: &Hold) -> Epoch {
        self.store.epoch(hold.kind().record())
    }

    /// Makes the server record the ledger's count, if it does not. Call with the owner lock held.
    ///
    /// Idempotent. If dropped midway, the doubt stays and the next call under the owner lock
    /// retries.
    pub(crate) async fn agree(&self, hold: &Arc<Hold>, now: Instant) -> Agreement {
        let mut route = self.route(hold, now);
        let Some(request) = hold.send_release(route.epoch(), now) else {
            let is_ours = hold.ownership() == Ownership::Ours;
            return if is_ours {
                Agreement::Reached { held: true }
            } else {
                Agreement::NotOurs
            };
        };
        let kind = hold.kind_as_acquired();
        let release = kind.release(&request.owner, request.count);
        match self.release_by(&mut route, hold, &request, &release).await {
            Ok((released, epoch)) => Agreement::Reached {
                held: self.agreed(hold, &request, released, epoch),
            },
            Err(error) if error.may_have_executed() => Agreement::Silent(error),
            Err(error) => {
                hold.change(|state, _| state.not_executed(&request));
                Agreement::Refused(error)
            }
        }
    }

    /// Settles what an owner left behind (a dropped guard, a cancelled call, a lost reply) before
    /// its next acquire. Call with the owner lock held.
    ///
    /// If the server does not reply and the owner holds nothing, the name is abandoned.
    pub(crate) async fn settle(&self, hold: &Arc<Hold>) -> Result<(), StoreError> {
        match self.agree(hold, Instant::now()).await {
            Agreement::Reached { .. } | Agreement::NotOurs => Ok(()),
            Agreement::Silent(_) if hold.count() == 0 => {
                self.abandon_name_in_doubt(hold);
                Ok(())
            }
            Agreement::Refused(error) | Agreement::Silent(error) => Err(error),
        }
    }

    /// Settles a hold of the same owner whose kind excludes the kind that is about to be acquired.
    pub(crate) async fn settle_rival(&self, rival: Arc<Hold>) -> Result<(), StoreError> {
        let under_way = CallInFlight {
            core: self,
            hold: rival,
        };
        // Do not wait: that call may be waiting for the owner lock that this one holds.
        let Ok(_permit) = under_way.hold.owner_lock.try_acquire() else {
            return Err(StoreError::new(
                StoreErrorKind::Overloaded,
                false,
                ANOTHER_KIND,
            ));
        };
        self.settle(&under_way.hold).await
    }

    /// Records the reply to a release. Returns whether the server had recorded this owner, or may
    /// have.
    pub(crate) fn agreed(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        released: Released,
        epoch: Epoch,
    ) -> bool {
        let answered =
            hold.change(|state, effects| state.released(request, released, epoch, effects));
        self.settle_reply(hold, answered)
    }

    /// Schedules cleanup of the names that a reply leaves behind. Returns whether the server had
    /// recorded this owner, or may have.
    pub(super) fn settle_reply(
        &self,
        hold: &Hold,
        Answered {
            held,
            abandoned,
            untold,
        }: Answered,
    ) -> bool {
        self.abandon(hold, abandoned);
        if let Some(untold) = untold {
            self.schedule_cleanup(hold, untold);
        }
        held
    }

    /// Abandons the name if a request under it is in doubt and nothing is held.
    pub(crate) fn abandon_name_in_doubt(&self, hold: &Arc<Hold>) {
        self.abandon(hold, hold.change(|state, _| state.abandon_name_in_doubt()));
    }

    /// Gives up on a release that the server refuses; the record is left to its lease.
    pub(crate) fn write_off(&self, hold: &Arc<Hold>, refusal: StoreErrorKind) {
        self.abandon(hold, hold.change(|state, _| state.write_off(refusal)));
    }

    /// Undoes what a stuck request may have done or may still do: its future is no longer polled.
    pub(crate) fn orphan(&self, hold: &Arc<Hold>) {
        // Retire the name inside the transition: the owner's next acquire may start right after it,
        // and must not reuse the name.
        if let Some(abandoned) = hold.change(|state, _| {
            let abandoned = state.orphan();
            abandoned.inspect(|abandoned| self.retire_name(hold, &abandoned.owner))
        }) {
            self.schedule_cleanup(hold, abandoned);
        }
        if hold.ownership() == Ownership::Orphaned {
            self.holds.forget(hold);
        }
    }

    /// Removes one waiter from the queue. The janitor gives up the place of the last one. It keeps
    /// the owner lock until the connection has that request, so the owner's next request goes out
    /// behind it and need not wait for its reply.
    pub(crate) fn leave_queue_once(&self, hold: &Arc<Hold>) {
        if !self.store.is_ours() {
            return;
        }
        // If a call has the owner lock, it may be about to send under this name.
        let permit = hold.owner_lock.try_acquire();
        if let Some(place) = hold.change(|state, _| {
            state.leave_queue_once(permit.is_ok(), self.epoch(hold), Instant::now())
        }) {
            if let Ok(permit) = permit {
                permit.forget();
            }
            self.retire_name(hold, &place.owner);
            let (place, permit) = (unsettled(hold, place), LentOwnerLock(Arc::clone(hold)));
            return self.janitor.post(Job::Leave { place, permit });
        }
        drop(permit);
        self.tidy(hold);
    }

    fn abandon(&self, hold: &Hold, abandoned: Option<Abandoned>) {
        if let Some(abandoned) = abandoned {
            // The owner lock is held: no acquire can be planned before the name is retired.
            self.retire_name(hold, &abandoned.owner);
            self.schedule_cleanup(hold, abandoned);
        }
    }

    /// Retires a name that late executions may still use: no new hold gets it.
    fn retire_name(&self, hold: &Hold, owner: &OwnerId) {
        self.holds.retire_names();
        if owner.is_value() {
            self.holds.doubt_value(hold.kind(), owner);
        }
    }

    /// Makes the janitor undo what late executions may do under an abandoned name.
    fn schedule_cleanup(&self, hold: &Hold, abandoned: Abandoned) {
        if let Some(sibling) = self.holds.held_sibling(hold.kind(), &hold.caller) {
            sibling.share_its_name(&abandoned.owner);
        }
        Meter::ghost();
        self.janitor.schedule_cleanup(unsettled(hold, abandoned));
    }

    /// Waits until nothing is left to settle. Returns at once in a fork.
    pub(crate) async fn idle(&self) {
        if !self.store.is_ours() {
            return;
        }
        // A hand-off in a slot is soon claimed, or expires and is posted to the janitor.
        for queue in self.subscriptions.all() {
            let lies_there = queue.relay.lying();
            while lies_there.is_some() && queue.relay.lying() == lies_there {
                self.sleep_until(Instant::now() + Duration::from_millis(1))
                    .await;
            }
        }
        self.janitor.idle().await;
        // Another task may still have a handle of a settled hold: wait for at most about 100 ms.
        for _ in 0..100 {
            if !self.holds.reap_again() {
                return;
            }
            self.sleep_until(Instant::now() + Duration::from_millis(1))
                .await;
        }
    }

    /// Settles or forgets a hold after a call is done with it. The caller must not use its handle
    /// afterwards.
    pub(crate) fn tidy(&self, hold: &Arc<Hold>) {
        if !self.store.is_ours() {
            return;
        }
        let (residue, is_left) = {
            let state = hold.state();
            (state.residue(), state.is_left)
        };
        if is_left && residue != Residue::Held {
            self.orphan_nested(hold);
        }
        match residue {
            Residue::Held => {}
            // Its owner continues with another hold, even if other tasks still have a handle of
            // this one.
            Residue::Nothing if is_left => self.holds.forget(hold),
            Residue::Doubt => self.janitor.settle(hold),
            Residue::Left => self.holds.forget(hold),
            Residue::Nothing => self.holds.reap(hold),
        }
    }
}

fn unsettled(
    hold: &Hold,
    Abandoned {
        owner,
        moves_to,
        epoch,
        ends,
    }: Abandoned,
) -> UnsettledRequest {
    UnsettledRequest {
        kind: Arc::clone(hold.kind()),
        owner,
        moves_to,
        epoch,
        ends,
    }
}

/// A call about a hold. Tidies the hold when it ends or is dropped midway.
pub(crate) struct CallInFlight<'a> {
    pub(crate) core: &'a Core,
    pub(crate) hold: Arc<Hold>,
}

impl Drop for CallInFlight<'_> {
    fn drop(&mut self) {
        self.core.tidy(&self.hold);
    }
}
