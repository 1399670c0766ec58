//! The fair lock: first come, first served, across processes. Redisson's `RFairLock`.
//!
//! The queue is shared with Redisson's waiters; decision 11 has the rules. C is the longest wait of
//! a Redisson client: 5 minutes, or our patience if longer. What keeps the place of live waiters:
//!
//! - Redisson's is served, or gives up: our scores have C for each of Redisson's ahead. Its async
//!   calls subtract the configured wait, which C covers.
//! - Ours is served, or gives up: nothing is subtracted.
//! - Redisson's is interrupted, or dies: its place stays until its score passes, or for a patience
//!   after it was notified that the lock is free.
//! - Ours is cancelled: its place is taken back at once, or, if that cannot be sent, expires.
//! - The holder dies: no message comes; ours poll, and notify the Redisson waiter whose turn it is.
//! - A dead one of ours at the head, none of ours alive: Redisson waits for its score.
//!
//! The script knows the places of the first 17. With 16 or more ahead, a waiter does not try again
//! once it listens. A poll within a third of the patience after the last write writes nothing.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Call, Script, clock::millis};

use super::reentrant::Reentrant;

use crate::{
    engine::{AcquireTerms, Kind, KindInfo, WaitId, Wake},
    keys::LockName,
    owner::OwnerId,
    store::script,
};

script!(
    ACQUIRE = "fair/acquire",
    parts = ["owner", "raises", "time", "clock"],
    keys = 4,
    args = 6
);
script!(
    RELEASE = "fair/release",
    parts = ["fewer", "time", "clock"],
    keys = 4,
    args = 4
);
script!(
    FORCE_RELEASE = "fair/force_release",
    parts = ["owner"],
    keys = 2,
    args = 1
);

/// The record of the reentrant lock, a list of waiters, and two sorted sets of the times at which
/// waiters count as gone: Redisson's, which its clients lower, and one for nestlock's waiters
/// alone.
#[derive(Debug)]
pub(crate) struct Fair {
    record: Reentrant,
    queue: Arc<str>,
    timeouts: Arc<str>,
    seen: Arc<str>,
    /// Prefix of the waiters' channels: each waiter listens to this name with `:` and its owner
    /// name appended.
    channel: Arc<str>,
    patience: Duration,
    /// Whether a release grants the lock to the next waiter.
    grants: bool,
}

impl Fair {
    pub(crate) fn new(name: &LockName, patience: Duration, grants: bool) -> Self {
        Self {
            record: Reentrant::new(name),
            queue: name.derived("redisson_lock_queue"),
            timeouts: name.derived("redisson_lock_timeout"),
            seen: name.derived("nestlock_fair_seen"),
            channel: name.channel(),
            patience,
            grants,
        }
    }

    /// Returns the same lock, but not reentrant: Redisson's `NonReentrantFairLock`.
    pub(crate) fn not_reentrant(self) -> Self {
        Self {
            record: self.record.not_reentrant(),
            ..self
        }
    }

    fn keys(&self) -> [Arc<str>; 4] {
        [self.name(), &self.queue, &self.timeouts, &self.seen].map(Arc::clone)
    }
}

impl Kind for Fair {
    fn about(&self) -> KindInfo {
        let reentrant = self.record.about().reentrant;
        KindInfo {
            reentrant,
            queues: true,
            own_channel: true,
            rival: Some("reentrant"),
            ..KindInfo::plain("fair")
        }
    }

    fn name(&self) -> &Arc<str> {
        self.record.name()
    }

    fn wake(&self, owner: &OwnerId) -> Wake {
        Wake::Channel(format!("{}:{owner}", self.channel).into())
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        let AcquireTerms {
            owner,
            lease_ms,
            holds,
            waits,
            wait_id,
        } = terms;
        let patience = millis(self.patience);
        // A granted record lives at first for the rest of the waiter's patience, which must not
        // exceed its lease.
        let wait_id = wait_id.filter(|_| self.grants && patience <= lease_ms);
        let waits = wait_id.map_or(u32::from(waits), WaitId::number);
        let args = [
            owner.into(),
            lease_ms.into(),
            holds.into(),
            patience.into(),
            waits.into(),
            (&self.channel).into(),
        ];
        Call::new(&ACQUIRE, self.keys(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let grants = u32::from(self.grants);
        Call::new(
            &RELEASE,
            self.keys(),
            [
                owner.into(),
                holds.into(),
                (&self.channel).into(),
                grants.into(),
            ],
        )
    }

    /// Notifies no waiter: the queue has the next one, and this call does not touch it.
    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        Some(self.record.release(owner, holds))
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        self.record.transfer(from, to, lease_ms)
    }

    fn renew(&self) -> &'static Script {
        self.record.renew()
    }

    fn force_release(&self) -> Call {
        let keys = [self.name(), &self.queue].map(Arc::clone);
        Call::new(&FORCE_RELEASE, keys, [(&self.channel).into()])
    }

    fn inspect(&self) -> Call {
        self.record.inspect()
    }
}
