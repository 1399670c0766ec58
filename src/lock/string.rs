//! The string lock: one string with a TTL, in the format of RedLock libraries of many languages
//! (redsync, node-redlock, RedLock-Hyperf, redis-py). It has no wake-up: waiters retry with
//! back-off.
//!
//! Any text may be the owner, so that another process can release the lock. Such an owner has no
//! suffix: while a request with its text has no reply, the text is refused (decision 6).

use std::sync::Arc;

use nestlock_wire::{Call, Script};

use crate::{
    engine::{AcquireTerms, Kind, KindInfo, Wake},
    keys::{FENCE, LockName},
    options::Backoff,
    owner::OwnerId,
    store::script,
};

script!(ACQUIRE = "string/acquire", keys = 1, args = 2);
script!(RELEASE = "string/release", keys = 1, args = 1);
script!(TRANSFER = "string/transfer", keys = 1, args = 3);
script!(RENEW = "string/renew", parts = ["renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(FORCE_RELEASE = "string/force_release", keys = 2, args = 0);
script!(INSPECT = "string/inspect", keys = 1, args = 0);

/// A string `name` with the owner, and the lease as its TTL. It has no hold count, so it is not
/// reentrant.
#[derive(Debug)]
pub(crate) struct StringRecord {
    name: Arc<str>,
    /// The key of the fence, if this name is a guarded value.
    fence: Arc<str>,
    backoff: Backoff,
}

/// Returns the transfer call of any record that is a string.
pub(super) fn transfer(record: &Arc<str>, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
    Call::new(
        &TRANSFER,
        [Arc::clone(record)],
        [from.into(), to.into(), lease_ms.into()],
    )
}

/// Returns the release call of any record that is a string.
pub(super) fn release(record: &Arc<str>, owner: &OwnerId) -> Call {
    Call::new(&RELEASE, [Arc::clone(record)], [owner.into()])
}

impl StringRecord {
    pub(crate) fn new(name: &LockName, backoff: Backoff) -> Self {
        Self {
            name: Arc::clone(name.as_arc()),
            fence: name.derived(FENCE),
            backoff,
        }
    }

    fn key(&self) -> [Arc<str>; 1] {
        [Arc::clone(&self.name)]
    }
}

impl Kind for StringRecord {
    fn about(&self) -> KindInfo {
        KindInfo {
            reentrant: false,
            values: true,
            ..KindInfo::plain("string")
        }
    }

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Poll(self.backoff.into())
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        Call::new(
            &ACQUIRE,
            self.key(),
            [terms.owner.into(), terms.lease_ms.into()],
        )
    }

    fn release(&self, owner: &OwnerId, _: u32) -> Call {
        release(&self.name, owner)
    }

    /// Ignores `seen`: the record has no hold count.
    fn release_if(&self, owner: &OwnerId, holds: u32, _: u32) -> Call {
        self.release(owner, holds)
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        transfer(self.record(), from, to, lease_ms)
    }

    fn renew(&self) -> &'static Script {
        &RENEW
    }

    fn force_release(&self) -> Call {
        Call::new(
            &FORCE_RELEASE,
            [Arc::clone(&self.name), Arc::clone(&self.fence)],
            [],
        )
    }

    fn inspect(&self) -> Call {
        Call::new(&INSPECT, self.key(), [])
    }
}
