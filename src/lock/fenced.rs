//! The fenced lock: the reentrant lock with a fencing token that only grows. Redisson's
//! `RFencedLock`.

use std::sync::Arc;

use nestlock_wire::{Arg, Call, Script};

use super::reentrant::Reentrant;

use crate::{
    engine::{AcquireTerms, Kind, KindInfo, Wake},
    keys::{FENCE, LockName},
    owner::OwnerId,
    store::script,
    token::FencingToken,
};

script!(
    ACQUIRE = "fenced/acquire",
    parts = ["owner", "claim", "raises", "token"],
    keys = 2,
    args = 3
);
script!(
    TRANSFER = "fenced/transfer",
    parts = ["held", "moves", "token"],
    keys = 2,
    args = 3
);
script!(SET = "fenced/set", keys = 2, args = 2);
script!(GET = "fenced/get", keys = 2, args = 1);

/// The record of the reentrant lock, and a counter for its tokens.
#[derive(Debug)]
pub(crate) struct Fenced {
    record: Reentrant,
    token: Arc<str>,
}

impl Fenced {
    pub(crate) fn new(name: &LockName) -> Self {
        Self {
            record: Reentrant::new(name),
            token: name.derived("redisson_lock_token"),
        }
    }
}

impl Kind for Fenced {
    fn about(&self) -> KindInfo {
        KindInfo {
            label: "fenced",
            token: true,
            relayed: false,
            ..self.record.about()
        }
    }

    fn name(&self) -> &Arc<str> {
        self.record.name()
    }

    fn wake(&self, owner: &OwnerId) -> Wake {
        self.record.wake(owner)
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        let keys = [Arc::clone(self.name()), Arc::clone(&self.token)];
        Call::new(
            &ACQUIRE,
            keys,
            [
                terms.owner.into(),
                terms.lease_ms.into(),
                terms.holds.into(),
            ],
        )
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        self.record.release(owner, holds)
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        self.record.transfer(from, to, lease_ms)
    }

    fn adopt(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        let keys = [Arc::clone(self.name()), Arc::clone(&self.token)];
        Call::new(&TRANSFER, keys, [from.into(), to.into(), lease_ms.into()])
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

/// A key that is read and written with a token, and the key that stores the highest token seen.
#[derive(Debug)]
pub(crate) struct FencedKey {
    data: Arc<str>,
    fence: Arc<str>,
}

impl FencedKey {
    pub(crate) fn new(key: &LockName) -> Self {
        Self {
            data: Arc::clone(key.as_arc()),
            fence: key.derived(FENCE),
        }
    }

    pub(crate) fn set(&self, value: &[u8], token: FencingToken) -> Call {
        Call::new(
            &SET,
            self.keys(),
            [token.get().into(), Arg::Bytes(value.to_vec())],
        )
    }

    pub(crate) fn get(&self, token: FencingToken) -> Call {
        Call::new(&GET, self.keys(), [token.get().into()])
    }

    fn keys(&self) -> [Arc<str>; 2] {
        [Arc::clone(&self.data), Arc::clone(&self.fence)]
    }
}
