//! The spin lock: the reentrant lock's record without messages, for waiters that try again after pauses. Redisson's
//! `RSpinLock`.

use std::sync::Arc;

use super::reentrant::Reentrant;
use crate::{
    engine::{About, Kind, Terms, Together, Verbs, Wake},
    keys::LockName,
    options::Backoff,
    owner::OwnerId,
    store::{Call, Script},
};

#[derive(Debug)]
pub(crate) struct Spin {
    record: Reentrant,
    backoff: Backoff,
}

impl Spin {
    pub(crate) fn new(name: &LockName, backoff: Backoff) -> Self {
        Self { record: Reentrant::silent(name), backoff }
    }
}

impl Kind for Spin {
    fn about(&self) -> About {
        About { label: "spin", relayed: false, ..self.record.about() }
    }

    fn verbs(&self) -> &dyn Verbs {
        self
    }
}

impl Verbs for Spin {
    fn name(&self) -> &Arc<str> {
        self.record.name()
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Poll(self.backoff.into())
    }

    fn acquire(&self, terms: Terms<'_>) -> Call {
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

    fn together(&self) -> Option<Together> {
        self.record.together()
    }

    fn force_release(&self) -> Call {
        self.record.force_release()
    }

    fn inspect(&self) -> Call {
        self.record.inspect()
    }
}
