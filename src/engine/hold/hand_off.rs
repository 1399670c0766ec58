//! Hands a hold off from one acquire of a client to the next, without a request to the server.
//!
//! The record stays as it is, under the name of the first owner, and so does its [`Hold`]: only the
//! generation is new. So giver and receiver must each be the owner of one acquire, which no call
//! can re-enter, and nothing about the hold may be in doubt. A *series* of hand-offs ends with a
//! release when the server's last reply is too old, or when the hold has changed hands too often;
//! then other clients get their turn. No message reports the hand-offs within a series.
//!
//! An extended record outlives the lease that its receiver asks for, so it is released instead. So
//! is a record that another connection confirmed: the check of all holds after a reconnect does not
//! see a hand-off between two holders. The window counts from the server's reply, so `unlock`
//! returns `Ok` by a reply that is at most 2 ms old. Decision 13.
//!
//! [`Hold`]: super::Hold

use std::time::Duration;

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    generation::{Copied, Generation, Grant, Ticket},
    state::{Effects, HoldState, Ownership, ServerSide},
};

use crate::engine::lease::{Lease, Millis};

/// How many times a hold may change hands in a series. Then a release gives other clients their
/// turn.
const HAND_OFFS: u8 = 64;
/// How long after the server's reply a hold may change hands.
pub(crate) const HAND_OFF_WINDOW: Duration = Duration::from_millis(2);

/// Returns the lease that a hold must have to be handed off, and that its receiver must want: the
/// default one, renewed without a limit.
pub(crate) fn relayed_lease(watchdog_timeout: Duration) -> Lease {
    Lease::Watched {
        ttl: Millis::of(watchdog_timeout),
        max_hold: None,
    }
}

impl HoldState {
    /// Ends the hold of `ticket`, and begins the next one in its place. The server must record it
    /// exactly once, under a name that no late request can use, and must have confirmed it within
    /// [`HAND_OFF_WINDOW`]. `ttl`: the TTL that its renewals set. Returns the ticket for the
    /// receiver, or `None` if it does not qualify; then nothing has changed.
    ///
    /// Requires the owner lock.
    pub(crate) fn hand_off(
        &mut self,
        ticket: &Ticket,
        epoch: Epoch,
        ttl: Duration,
        now: Instant,
        effects: &mut Effects,
    ) -> Option<Ticket> {
        let (generation, confirmed) = (&ticket.generation, ticket.generation.confirmed);
        let lease = relayed_lease(ttl);
        let turn = self.owner.turn()?.get();
        let is_sure = self.ownership == Ownership::Ours
            && self.server == ServerSide::Holds(1)
            && self.late_request.is_none()
            && self.moves_to.is_none()
            && !self.sibling_in_doubt
            // an extension in flight may let the record live for longer
            && self.ends <= lease.record_ends(generation.since)
            && self.is_current(generation);
        let is_recent = confirmed.epoch == epoch
            && turn <= HAND_OFFS
            && now.saturating_duration_since(confirmed.at) < HAND_OFF_WINDOW;
        let wanted = {
            let ledger = generation.ledger();
            // an extended record outlives the lease that the receiver wants
            let is_plain = generation.token.is_none()
                && ledger.is_watched_alone(ttl, now)
                && ledger.deadline <= lease.valid_until(generation.since);
            is_plain.then_some(ledger.replicas)?
        };
        if !(is_sure && is_recent) {
            return None;
        }
        self.leave(ticket, now, effects).ok()?;
        // the same text in the record, but the giver's name no longer means this hold
        self.owner = self.owner.next_turn();
        let copied = Copied {
            wanted,
            had: confirmed.replicas,
        };
        let grant = Grant {
            copied,
            ..Grant::of(generation.since, lease)
        };
        let next = Generation::new(&self.owner, &grant, confirmed);
        let ticket = next.add(&grant);
        self.current = Some(next);
        Some(ticket)
    }
}

impl Generation {
    /// Returns whether a hand-off may still be received: its hold has not ended, the link has no
    /// new connection that has not confirmed the record, at least `replicas` replicas have it, and
    /// its renewals need as many.
    pub(crate) fn may_be_received(&self, replicas: u32, epoch: Epoch, now: Instant) -> bool {
        let ledger = self.ledger();
        ledger.is_held()
            && now < ledger.deadline
            && self.confirmed.epoch == epoch
            && self.confirmed.replicas.map_or(0, u32::from) >= replicas
            && ledger.replicas == replicas
    }
}

#[cfg(test)]
mod tests;
