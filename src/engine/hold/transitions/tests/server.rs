//! A server with one lock: the shipped scripts, and time that passes only when the test says so.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use nestlock_wire::{Call, Epoch};

use crate::{
    engine::{
        kind::{AcquireTerms, Kind},
        lease::Millis,
    },
    keys::LockName,
    lock::Reentrant,
    owner::OwnerId,
    store::{
        Acquired, Released, Renewed,
        tests::scripts::{self, GRAIN, Record},
    },
};

/// The lease of every hold.
pub(super) const TTL: Duration = GRAIN.saturating_mul(10_000);
/// The longest time that a request can be in flight.
pub(super) const OVERDUE: Duration = GRAIN.saturating_mul(1_500);

pub(super) static LOCK: LazyLock<Arc<dyn Kind>> =
    LazyLock::new(|| Arc::new(Reentrant::new(&LockName::new("", "lock", 1024).unwrap())));

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Verb {
    Acquire { holds: u32 },
    Release { holds: u32 },
    Renew { lease: Duration },
}

/// A request as the server sees it.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub(super) owner: OwnerId,
    pub(super) verb: Verb,
    pub(super) epoch: Epoch,
}

impl Sent {
    /// Returns whether the request takes or frees the lock. Other requests only change the count,
    /// which each release sets again.
    pub(super) fn decides(&self) -> bool {
        matches!(
            self.verb,
            Verb::Acquire { holds: 1 } | Verb::Release { holds: 0 }
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Answer {
    Held,
    Busy,
    Lost,
    Released(Released),
    Renewed(Renewed),
}

#[derive(Debug, Clone, Default)]
pub(super) struct Server {
    pub(super) record: Option<Record>,
}

impl Server {
    pub(super) fn execute(&mut self, sent: &Sent) -> Answer {
        let (owner, record) = (&sent.owner, &mut self.record);
        match sent.verb {
            Verb::Acquire { holds } => {
                let terms = AcquireTerms {
                    owner,
                    lease_ms: Millis::of(TTL).get(),
                    holds,
                    waits: false,
                    wait_id: None,
                };
                match scripts::acquire(record, &LOCK.acquire(terms)) {
                    Acquired::Yes { token: None } => Answer::Held,
                    Acquired::Busy { .. } => Answer::Busy,
                    Acquired::Lost => Answer::Lost,
                    other => unreachable!("{other:?}"),
                }
            }
            Verb::Release { holds } => {
                Answer::Released(scripts::release(record, &LOCK.release(owner, holds)))
            }
            Verb::Renew { lease } => {
                let args = vec![owner.into(), Millis::of(lease).get().into()];
                let call = Call::new(LOCK.renew(), vec![Arc::clone(LOCK.record())], args);
                Answer::Renewed(scripts::renew(record, &call))
            }
        }
    }

    /// Lets time pass. The record goes when its lease ends.
    pub(super) fn pass(&mut self, time: Duration) {
        self.record = self
            .record
            .take()
            .filter(|record| record.ttl > time)
            .map(|mut record| {
                record.ttl -= time;
                record
            });
    }

    /// Returns the hold count of this owner. Returns `None` if it holds nothing.
    pub(super) fn count(&self, owner: &OwnerId) -> Option<u32> {
        self.record
            .as_ref()
            .filter(|record| *record.owner == *owner.as_str())
            .map(|record| record.count)
    }
}
