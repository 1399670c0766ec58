//! Grants of a fair lock to a waiter.

use super::{Guard, TTL, World};
use crate::{
    engine::{
        hold::{
            generation::{First, Grant},
            state::{AcquireMode, AcquirePlan, Effects, SiblingState},
        },
        kind::KindInfo,
        lease::{Lease, Millis},
    },
    store::tests::scripts::Record,
};

impl World {
    /// Lets another owner's release make this owner the holder. `heard`: the message about it
    /// arrived.
    pub(super) fn granted(&mut self, heard: bool, effects: &mut Effects) {
        let owner = self.state.owner.clone();
        self.server.record = Some(Record {
            owner: owner.as_str().into(),
            count: 1,
            ttl: TTL,
        });
        let about = KindInfo {
            queues: true,
            ..KindInfo::plain("fair")
        };
        let mode = AcquireMode {
            about,
            waits: true,
            adopts: None,
            max_holds: 5,
            after_loss: false,
            named: None,
            turn: None,
        };
        let siblings = SiblingState {
            caller: &owner,
            sibling: None,
            lost_sibling: None,
            suffix: self.suffix,
            value_in_doubt: false,
        };
        if !heard {
            return;
        }
        let Ok(AcquirePlan::Send(request)) = self.state.plan(mode, siblings, self.now, effects)
        else {
            return;
        };
        self.state.send(&request, self.epoch, self.now);
        let lease = Lease::Watched {
            ttl: Millis::of(TTL),
            max_hold: None,
        };
        let first = Some(First {
            until: lease.valid_until(self.now),
            renew_at: self.now + TTL / 3,
        });
        let grant = Grant {
            first,
            ..Grant::of(self.now, lease)
        };
        match self
            .state
            .take_granted(&request, &grant, self.epoch, self.now, effects)
        {
            Some(ticket) => {
                assert_eq!(request.owner, owner, "under the name of its place");
                (self.count, self.tampered) = (1, false);
                self.guards.push(Guard { ticket, end: None });
            }
            // It sends a request instead, which is not executed.
            None => self.state.not_executed(&request),
        }
    }
}
