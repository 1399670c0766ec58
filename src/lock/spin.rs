//! The spin lock: the record of the reentrant lock without messages; waiters retry with back-off.
//! Redisson's `RSpinLock`.

use std::sync::Arc;

use nestlock_wire::{Call, Script};

use super::reentrant::Reentrant;

use crate::{
    engine::{AcquireTerms, JointScripts, Kind, KindInfo, Wake},
    keys::LockName,
    options::Backoff,
    owner::OwnerId,
};

/// The record of the reentrant lock, and the back-off of its waiters.
#[derive(Debug)]
pub(crate) struct Spin {
    record: Reentrant,
    backoff: Backoff,
}

impl Spin {
    pub(crate) fn new(name: &LockName, backoff: Backoff) -> Self {
        Self {
            record: Reentrant::silent(name),
            backoff,
        }
    }
}

impl Kind for Spin {
    fn about(&self) -> KindInfo {
        KindInfo {
            label: "spin",
            relayed: false,
            ..self.record.about()
        }
    }

    fn name(&self) -> &Arc<str> {
        self.record.name()
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Poll(self.backoff.into())
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        self.record.acquire(terms)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        self.record.release(owner, holds)
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        self.record.transfer(from, to, lease_ms)
    }

    fn renew(&self) -> &'static Script {
        self.record.renew()
    }

    fn together(&self) -> Option<JointScripts> {
        self.record.together()
    }

    fn force_release(&self) -> Call {
        self.record.force_release()
    }

    fn inspect(&self) -> Call {
        self.record.inspect()
    }
}
