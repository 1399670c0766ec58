//! The replicas of an acquire: how many must have its record, and what happens if too few do.

use std::{
    pin::{Pin, pin},
    sync::Arc,
};

use nestlock_wire::{Acks, Copies, clock::Instant};

use super::{attempt::Attempt, options::Acquire};

use crate::{
    engine::{
        failure::{NO_RECEIPT, no_reply, not_replicated},
        hold::{Hold, state::HoldRequest},
    },
    error::Result,
    store::Route,
};

/// How many replicas have the record, if that is known. `Err`: the attempt ends with this outcome.
type HasCopies<'a, 'b> =
    Pin<Box<dyn Future<Output = Result<Option<u8>, Result<Attempt<'a>>>> + Send + 'b>>;

impl<'a> Acquire<'a> {
    /// Returns the copies to wait for. An inner hold moves the deadline of the outer one, which may
    /// need more replicas.
    pub(crate) fn copies_for_outer(&self, hold: &Hold, request: &HoldRequest) -> Option<Copies> {
        let outer = (request.count > 1).then(|| hold.generation()).flatten();
        let of_outer = outer.map_or(0, |outer| outer.ledger().replicas);
        self.core.config.copies(self.replicas().max(of_outer))
    }

    /// Waits until enough copies of the record exist, and undoes the acquire if they do not.
    /// Returns how many replicas have it, if that is known. Boxed, as it is rare.
    pub(crate) fn copied<'b>(
        &'b self,
        hold: &'b Arc<Hold>,
        route: &'b Route,
        copies: Copies,
        deadline: Option<Instant>,
    ) -> HasCopies<'a, 'b> {
        Box::pin(async move {
            let core = self.core;
            let acks = match self
                .in_time(deadline, pin!(core.store.acknowledged(route)))
                .await
            {
                Some(Ok(Some(acks))) if self.copies.is_none_or(|own| acks.suffice(own)) => {
                    return Ok(Some(acks.counted()));
                }
                // only the outer hold needs them: without them its deadline stays as it is
                _ if self.copies.is_none() => return Ok(None),
                Some(Ok(Some(acks))) => acks,
                Some(Ok(None)) => return Err(self.failed(no_reply(NO_RECEIPT))),
                // the lock was acquired, but WAIT is denied for good: no retry would confirm it
                Some(Err(error)) if error.kind().is_denied() => {
                    let is_undone = matches!(
                        self.in_time(deadline, pin!(core.settle(hold))).await,
                        Some(Ok(()))
                    );
                    return Err(self.failed(if is_undone { error.of_a_read() } else { error }));
                }
                Some(Err(error)) => return Err(self.failed(error)),
                // no acknowledgement in time
                None => Acks::default(),
            };
            let refused = Attempt::Failed(not_replicated(
                self.kind.name(),
                self.copies.unwrap_or(copies),
                acks,
            ));
            // a failure leaves the hold in doubt: the next call of this owner, or the janitor,
            // settles it
            let _ = self.in_time(deadline, pin!(core.settle(hold))).await;
            Err(Ok(refused))
        })
    }
}
