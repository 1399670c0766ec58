//! A hold that goes from one task of a client to the next, and the server is not asked.
//!
//! The record stays as it is, under the name of the first: so only what nobody doubts goes on. A *round* ends with a
//! release, when the server's last answer is too old or the hold has changed hands too often; then other clients have
//! their turn. Nobody is told of the hand-overs within a round.

use std::{sync::Arc, time::Duration};

use super::{
    generation::{Copied, Generation, Grant, Leg, Ticket},
    kind::Kind,
    lease::{Lease, Millis},
    state::{Effects, Request, ServerSide, Standing, State},
};
use crate::{clock::Instant, owner::OwnerId, store::Epoch};

/// So often a hold changes hands in a round.
const LEGS: u32 = 64;
/// For so long after the server's answer it may.
pub(super) const ROUND: Duration = Duration::from_millis(2);

/// A hold between two tasks: nobody's, and recorded.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Baton {
    pub(super) kind: Arc<dyn Kind>,
    /// What the record says. Nobody else is called that, or will be.
    pub(super) owner: OwnerId,
    /// When it was asked for.
    pub(super) since: Instant,
    pub(super) leg: Leg,
    /// Until when the record may live.
    pub(super) ends: Instant,
}

/// Which record a generation or a baton stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    owner: OwnerId,
    since: Instant,
}

impl Record {
    pub(super) fn of(generation: &Generation) -> Self {
        Self { owner: generation.owner.clone(), since: generation.since }
    }

    pub(super) fn is_of(&self, owner: &OwnerId) -> bool {
        self.owner == *owner
    }
}

impl Baton {
    pub(super) fn record(&self) -> Record {
        Record { owner: self.owner.clone(), since: self.since }
    }

    /// The lease that a hold must have to go on.
    pub(super) fn lease(watchdog_timeout: Duration) -> Lease {
        Lease::Watched { ttl: Millis::of(watchdog_timeout), times: None }
    }
}

impl State {
    /// Gives a hold up that its client's next waiter may take as it is: the server records it once, under a name that
    /// nothing late can use, and has just said so. `ttl`: what it is renewed with. `None`: nothing has changed.
    ///
    /// In the owner's turn. The name must be retired before that is over.
    pub(super) fn hand_on(
        &mut self,
        kind: &Arc<dyn Kind>,
        ticket: &Ticket,
        epoch: Epoch,
        ttl: Duration,
        now: Instant,
        effects: &mut Effects,
    ) -> Option<Baton> {
        let (generation, leg) = (&ticket.generation, ticket.generation.leg);
        let lease = Baton::lease(ttl);
        let is_sure = self.standing == Standing::Ours
            && self.server == ServerSide::Holds(1)
            && self.late.is_none()
            && self.moves_to.is_none()
            && !self.sibling_in_doubt
            && self.is_current(generation);
        let is_recent = leg.epoch == epoch && leg.number < LEGS && now.saturating_duration_since(leg.confirmed) < ROUND;
        let is_plain = generation.token.is_none() && {
            let books = generation.books();
            // what was extended lives for longer than whoever takes it asks for
            books.is_watched_alone(ttl, now) && books.deadline <= lease.valid_until(generation.since)
        };
        if !(is_sure && is_recent && is_plain) {
            return None;
        }
        let ends = self.record_ends();
        self.leave(ticket, now, effects).ok()?;
        self.server = ServerSide::Holds(0);
        let leg = Leg { number: leg.number + 1, ..leg };
        Some(Baton { kind: Arc::clone(kind), owner: generation.owner.clone(), since: generation.since, leg, ends })
    }

    /// Takes a hold over, instead of what was planned. `None`: this owner has something unsettled, the lease is nearly over,
    /// the link has another connection since, of which nobody asked about it, or fewer `replicas` have it; nothing has changed.
    pub(super) fn take(
        &mut self,
        request: &Request,
        baton: &Baton,
        (lease, replicas): (Lease, u32),
        epoch: Epoch,
        now: Instant,
    ) -> Option<Ticket> {
        let is_free = request.before == ServerSide::Holds(0) && request.count == 1 && self.late.is_none();
        let is_sure = baton.leg.epoch == epoch
            && now < lease.valid_until(baton.since)
            && baton.leg.replicas.map_or(0, u32::from) >= replicas;
        if self.standing != Standing::Ours || !is_free || !is_sure {
            return None;
        }
        // its own name it has again with its next plan
        self.owner = baton.owner.lent_to(&request.owner);
        self.server = ServerSide::Holds(1);
        self.ends = self.ends.max(baton.ends);
        let copied = Copied { wanted: replicas, had: baton.leg.replicas };
        let grant = Grant { copied, ..Grant::of(baton.since, lease) };
        let generation = Generation::new(&self.owner, &grant, baton.leg);
        let ticket = generation.add(&grant);
        self.current = Some(generation);
        Some(ticket)
    }
}

#[cfg(test)]
mod tests;
