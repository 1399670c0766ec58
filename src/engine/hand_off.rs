//! Hands a hold off from one task of a client to the next, without a request to the server.
//!
//! The record stays as it is, under the name of the first owner, so a hold qualifies only if
//! nothing about it is in doubt. A *series* of hand-offs ends with a release when the server's last
//! reply is too old, or when the hold has changed hands too often; then other clients get their
//! turn. No message reports the hand-offs within a series.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    generation::{Copied, Generation, Grant, Hop, Ticket},
    kind::Kind,
    lease::{Lease, Millis},
    state::{Effects, HoldRequest, HoldState, Ownership, ServerSide},
};

use crate::owner::OwnerId;

/// How often a hold may change hands in a series.
const HOPS: u32 = 64;
/// How long after the server's reply a hold may change hands.
pub(super) const HAND_OFF_WINDOW: Duration = Duration::from_millis(2);

/// A hold between two tasks: the server records it, and neither task holds it.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct HandOff {
    pub(super) kind: Arc<dyn Kind>,
    /// The owner in the record. No other hold has this name, or will have it.
    pub(super) owner: OwnerId,
    /// When the request for it was sent.
    pub(super) since: Instant,
    pub(super) hop: Hop,
    /// Until when the record may live.
    pub(super) ends: Instant,
}

/// Identifies the record that a generation or a hand-off stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordId {
    owner: OwnerId,
    since: Instant,
}

impl RecordId {
    pub(super) fn of(generation: &Generation) -> Self {
        Self {
            owner: generation.owner.clone(),
            since: generation.since,
        }
    }

    pub(super) fn is_of(&self, owner: &OwnerId) -> bool {
        self.owner == *owner
    }
}

/// The terms of the task that takes a hand-off.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TakerTerms {
    pub(crate) lease: Lease,
    /// How many replicas must have the record.
    pub(crate) replicas: u32,
    /// The current connection.
    pub(crate) epoch: Epoch,
}

impl HandOff {
    pub(super) fn record(&self) -> RecordId {
        RecordId {
            owner: self.owner.clone(),
            since: self.since,
        }
    }

    /// Returns the lease that a hold must have to be handed off: the default one, renewed without a
    /// limit.
    pub(super) fn lease(watchdog_timeout: Duration) -> Lease {
        Lease::Watched {
            ttl: Millis::of(watchdog_timeout),
            times: None,
        }
    }
}

impl HoldState {
    /// Gives the hold up for this client's next waiter, which takes it as it is. The server must
    /// record it exactly once, under a name that no late request can use, and must have confirmed
    /// it a moment ago. `ttl`: the TTL that its renewals set. Returns `None` if it does not
    /// qualify; then nothing has changed.
    ///
    /// Requires the owner lock. The name must be retired before that is released.
    pub(super) fn hand_on(
        &mut self,
        kind: &Arc<dyn Kind>,
        ticket: &Ticket,
        epoch: Epoch,
        ttl: Duration,
        now: Instant,
        effects: &mut Effects,
    ) -> Option<HandOff> {
        let (generation, hop) = (&ticket.generation, ticket.generation.hop);
        let lease = HandOff::lease(ttl);
        let is_sure = self.ownership == Ownership::Ours
            && self.server == ServerSide::Holds(1)
            && self.late_request.is_none()
            && self.moves_to.is_none()
            && !self.sibling_in_doubt
            && self.is_current(generation);
        let is_recent = hop.epoch == epoch
            && hop.number < HOPS
            && now.saturating_duration_since(hop.confirmed) < HAND_OFF_WINDOW;
        let is_plain = generation.token.is_none() && {
            let ledger = generation.ledger();
            // an extended record outlives the lease that the taker requests
            ledger.is_watched_alone(ttl, now)
                && ledger.deadline <= lease.valid_until(generation.since)
        };
        if !(is_sure && is_recent && is_plain) {
            return None;
        }
        let ends = self.record_ends();
        self.leave(ticket, now, effects).ok()?;
        self.server = ServerSide::Holds(0);
        let hop = Hop {
            number: hop.number + 1,
            ..hop
        };
        Some(HandOff {
            kind: Arc::clone(kind),
            owner: generation.owner.clone(),
            since: generation.since,
            hop,
            ends,
        })
    }

    /// Takes a hand-off in place of the planned request. Returns `None`, with nothing changed, if
    /// this owner holds the lock or has something unsettled, if the lease is over, if the link has
    /// a new connection that has not confirmed the record, or if fewer than the required replicas
    /// have it.
    pub(super) fn take(
        &mut self,
        request: &HoldRequest,
        hand_off: &HandOff,
        taker: TakerTerms,
        now: Instant,
    ) -> Option<Ticket> {
        let TakerTerms {
            lease,
            replicas,
            epoch,
        } = taker;
        let is_free = request.before == ServerSide::Holds(0)
            && request.count == 1
            && self.late_request.is_none();
        let is_sure = hand_off.hop.epoch == epoch
            && now < lease.valid_until(hand_off.since)
            && hand_off.hop.replicas.map_or(0, u32::from) >= replicas;
        if self.ownership != Ownership::Ours || !is_free || !is_sure {
            return None;
        }
        // the next plan returns to the owner's own name
        self.owner = hand_off.owner.lent_to(&request.owner);
        self.server = ServerSide::Holds(1);
        self.ends = self.ends.max(hand_off.ends);
        let copied = Copied {
            wanted: replicas,
            had: hand_off.hop.replicas,
        };
        let grant = Grant {
            copied,
            ..Grant::of(hand_off.since, lease)
        };
        let generation = Generation::new(&self.owner, &grant, hand_off.hop);
        let ticket = generation.add(&grant);
        self.current = Some(generation);
        Some(ticket)
    }
}

#[cfg(test)]
mod tests;
