//! Making the server agree with the books: the one verb of releases, cancellations and lost replies alike.

use std::{sync::Arc, time::Duration};

use super::{
    core::Core,
    hold::Hold,
    jobs::{Ghost, Job, LentTurn},
    state::{Abandoned, Answered, Leftover, Request, Standing},
};
use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    meter::Meter,
    owner::OwnerId,
    store::{Epoch, Released, Route},
};

/// Why a hold waits for another call of its owner.
const ANOTHER_KIND: &str = "its owner asks for a hold of another kind at this name, which does not go with this one";

/// What came of [`Core::agree`].
pub(crate) enum Agreement {
    /// The server records what we want. `held`: it had recorded this owner, or may have.
    Reached { held: bool },
    /// It is not this client's to make it so any more: somebody else's by now, or being undone.
    NotOurs,
    /// Not executed.
    Refused(StoreError),
    /// No answer.
    Silent(StoreError),
}

impl Core {
    /// The way of a request about this hold.
    pub(crate) fn route(&self, hold: &Hold, asked: Instant) -> Route {
        self.store.route(hold.kind().record(), asked)
    }

    /// The number of the connection that carries requests about this hold by now.
    pub(crate) fn epoch(&self, hold: &Hold) -> Epoch {
        self.store.epoch(hold.kind().record())
    }

    /// Makes the server record our count, if it does not. In the hold's turn. Sent twice it changes nothing; dropped
    /// midway, the doubt stays and the next in line repeats it.
    pub(crate) async fn agree(&self, hold: &Arc<Hold>, now: Instant) -> Agreement {
        let mut route = self.route(hold, now);
        let Some(request) = hold.send_release(route.epoch(), now) else {
            let is_ours = hold.standing() == Standing::Ours;
            return if is_ours { Agreement::Reached { held: true } } else { Agreement::NotOurs };
        };
        let release = hold.kind().release(&request.owner, request.count);
        match self.release_by(&mut route, (hold, &request), &release).await {
            Ok((released, epoch)) => Agreement::Reached { held: self.agreed(hold, &request, released, epoch) },
            Err(error) if error.may_have_executed() => Agreement::Silent(error),
            Err(error) => {
                hold.not_executed(&request);
                Agreement::Refused(error)
            }
        }
    }

    /// Settles what an owner left behind, before it begins anew: a dropped guard, a cancelled call, a lost reply. In the
    /// hold's turn. Where nothing is held, silence costs the name.
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

    /// The same for a hold of another kind of the owner's, which does not go with the one that begins.
    pub(crate) async fn settle_rival(&self, rival: Arc<Hold>) -> Result<(), StoreError> {
        let under_way = UnderWay { core: self, hold: rival };
        // only tried: that call may be at this one's hold
        let Ok(_turn) = under_way.hold.turn.try_acquire() else {
            return Err(StoreError::new(StoreErrorKind::Overloaded, false, ANOTHER_KIND));
        };
        self.settle(&under_way.hold).await
    }

    /// Takes in what the server answered a release. Whether it had recorded this owner, or may have.
    pub(crate) fn agreed(&self, hold: &Arc<Hold>, request: &Request, released: Released, epoch: Epoch) -> bool {
        self.heard(hold, hold.released(request, released, epoch))
    }

    /// Looks after the names that an answer has left behind. Whether the server had recorded this owner, or may have.
    pub(super) fn heard(&self, hold: &Hold, Answered { held, abandoned, untold }: Answered) -> bool {
        self.abandon(hold, abandoned);
        if let Some(untold) = untold {
            self.lay(hold, untold);
        }
        held
    }

    /// Goes on under another name, if something under this one is in doubt and nothing is held.
    pub(crate) fn abandon_name_in_doubt(&self, hold: &Arc<Hold>) {
        self.abandon(hold, hold.abandon_name_in_doubt());
    }

    /// Gives up on a release that is refused.
    pub(crate) fn write_off(&self, hold: &Arc<Hold>, refusal: StoreErrorKind) {
        self.abandon(hold, hold.write_off(refusal));
    }

    /// A future that nobody polls has a request about this hold: undoes what it may do.
    pub(crate) fn orphan(&self, hold: &Arc<Hold>) {
        // the owner's next acquire comes as soon as this is nobody's, and must know by then
        if let Some(abandoned) = hold.orphan(|owner| self.retire_name(hold, owner)) {
            self.lay(hold, abandoned);
            self.holds.forget(hold);
        }
    }

    /// One waiter less in the queue. The last one's place is left to the janitor, who holds the turn until the connection has
    /// the request: what this owner asks next comes behind it, and need not wait for its answer.
    pub(crate) fn leave_queue_once(&self, hold: &Arc<Hold>) {
        if !self.store.is_ours() {
            return;
        }
        // a call that has the turn may be about to ask under this name
        let turn = hold.turn.try_acquire();
        if let Some(place) = hold.leave_queue_once(turn.is_ok(), self.epoch(hold)) {
            if let Ok(turn) = turn {
                turn.forget();
            }
            self.retire_name(hold, &place.owner);
            let (place, turn) = (ghost(hold, place), LentTurn(Arc::clone(hold)));
            return self.janitor.post(Job::Leave { place, turn });
        }
        drop(turn);
        self.tidy(hold);
    }

    fn abandon(&self, hold: &Hold, abandoned: Option<Abandoned>) {
        if let Some(abandoned) = abandoned {
            // in the hold's turn: nobody plans anything before this
            self.retire_name(hold, &abandoned.owner);
            self.lay(hold, abandoned);
        }
    }

    /// Late executions may use this name: no new hold does.
    fn retire_name(&self, hold: &Hold, owner: &OwnerId) {
        self.holds.retire_names();
        if owner.is_value() {
            self.holds.doubt_value(hold.kind(), owner);
        }
    }

    /// Leaves what late executions may do under a name to the janitor.
    fn lay(&self, hold: &Hold, abandoned: Abandoned) {
        if let Some(sibling) = self.holds.held_sibling(hold.kind(), &hold.caller) {
            sibling.share_its_name(&abandoned.owner);
        }
        Meter::ghost();
        self.janitor.lay(ghost(hold, abandoned));
    }

    /// Waits until nothing is left to settle.
    pub(crate) async fn idle(&self) {
        if !self.store.is_ours() {
            return;
        }
        // what is handed on is given up, and somebody's, or on the janitor's list, in a moment
        for gate in self.hub.all() {
            let lies_there = gate.relay.lying();
            while lies_there.is_some() && gate.relay.lying() == lies_there {
                self.sleep_until(Instant::now() + Duration::from_millis(1)).await;
            }
        }
        self.janitor.idle().await;
        // what was settled a moment ago may still be in somebody's hands
        for _ in 0..100 {
            if !self.holds.reap_again() {
                return;
            }
            self.sleep_until(Instant::now() + Duration::from_millis(1)).await;
        }
    }

    /// Looks after a hold that its user is done with. Call with a handle that is not used again.
    pub(crate) fn tidy(&self, hold: &Arc<Hold>) {
        if !self.store.is_ours() {
            return;
        }
        match hold.leftover() {
            Leftover::Held => {}
            Leftover::Doubt => self.janitor.settle(hold),
            Leftover::Nothing => self.holds.reap(hold),
        }
    }
}

fn ghost(hold: &Hold, Abandoned { owner, moves_to, epoch, ends }: Abandoned) -> Ghost {
    Ghost { kind: Arc::clone(hold.kind()), owner, moves_to, epoch, ends }
}

/// A call about a hold. When it ends, or is dropped midway, what it leaves behind is looked after.
pub(crate) struct UnderWay<'a> {
    pub(crate) core: &'a Core,
    pub(crate) hold: Arc<Hold>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.core.tidy(&self.hold);
    }
}
