//! The fenced lock: the reentrant lock with a token that only grows. Redisson's `RFencedLock`.

use std::sync::Arc;

use super::reentrant::Reentrant;
use crate::{
    engine::{Kind, Request, Wake},
    keys::LockName,
    owner::OwnerId,
    store::{Call, Script, script},
};

script!(ACQUIRE = "fenced/acquire", keys = 2, args = 3);

#[derive(Debug)]
pub(crate) struct Fenced {
    record: Reentrant,
    token: Arc<str>,
}

impl Fenced {
    pub(crate) fn new(name: &LockName) -> Self {
        Self { record: Reentrant::new(name), token: name.derived("redisson_lock_token") }
    }
}

impl Kind for Fenced {
    fn name(&self) -> &Arc<str> {
        self.record.name()
    }

    fn family(&self) -> &'static str {
        self.record.family()
    }

    fn wake(&self, owner: &OwnerId) -> Wake {
        self.record.wake(owner)
    }

    fn acquire(&self, request: Request<'_>) -> Call {
        let keys = vec![Arc::clone(self.name()), Arc::clone(&self.token)];
        Call::new(&ACQUIRE, keys, vec![request.owner.into(), request.lease_ms.into(), request.holds.into()])
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        self.record.release(owner, holds)
    }

    fn renew(&self) -> &'static Script {
        self.record.renew()
    }

    fn force_release(&self) -> Call {
        self.record.force_release()
    }

    fn inspect(&self) -> Call {
        self.record.inspect()
    }
}
