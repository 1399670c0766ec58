//! Enters the hold that the server has granted.

use std::{num::NonZeroU64, sync::Arc};

use nestlock_wire::{Epoch, clock::Instant};

use super::options::Acquire;

use crate::{
    engine::{
        failure::not_entered,
        hold::{
            Hold,
            generation::{Copied, Grant, Ticket},
            state::{HoldRequest, HoldState, Ownership},
        },
        kind::Sharing,
        lease::Millis,
    },
    error::{Result, StoreError},
};

/// The reply that granted the lock.
#[derive(Clone, Copy)]
pub(crate) struct AcquireReply {
    /// When the request was sent: the lease counts from here.
    pub(crate) sent: Instant,
    pub(crate) token: Option<NonZeroU64>,
    /// The connection that brought the reply.
    pub(crate) epoch: Epoch,
    /// How many replicas have acknowledged it. `None` if that is unknown.
    pub(crate) replicas: Option<u8>,
}

/// Returns the reason why a granted lock was not entered.
pub(crate) fn why_not_entered(hold: &Hold) -> StoreError {
    not_entered(hold.ownership() == Ownership::Orphaned)
}

impl Acquire<'_> {
    /// Enters the hold that the server has granted. Returns `None` if its lease is over already, or
    /// if the hold is no longer this client's.
    pub(crate) fn take_in(
        &self,
        hold: &Arc<Hold>,
        request: &HoldRequest,
        reply: AcquireReply,
    ) -> Result<Option<Ticket>> {
        let core = self.core;
        let AcquireReply {
            sent,
            token,
            epoch,
            replicas,
        } = reply;
        // other holders of a shared record may shorten its TTL (Redisson's readers do), so the
        // watchdog keeps sending a fixed lease
        let is_told_again =
            self.kind.about().sharing == Sharing::Shared && !self.lease.is_watched();
        let kept_every = is_told_again.then(|| Millis::of(core.config.watchdog_timeout / 3));
        let copied = Copied {
            wanted: self.replicas(),
            had: replicas,
        };
        let grant = Grant {
            kept_every,
            token,
            copied,
            ..Grant::of(sent, self.lease)
        };
        let ticket = hold.granted(request, &grant, epoch)?;
        ticket.map(|ticket| self.entered(hold, ticket)).transpose()
    }

    /// Returns the ticket, or releases the hold if the client was shut down. Checked after the hold
    /// is entered: a shutdown that this check misses ends the hold itself.
    pub(crate) fn entered(&self, hold: &Arc<Hold>, ticket: Ticket) -> Result<Ticket> {
        if let Err(closed) = self.core.check_open() {
            hold.change(HoldState::shut_down);
            self.core.release_later(hold, &ticket);
            return Err(closed);
        }
        Ok(ticket)
    }
}
