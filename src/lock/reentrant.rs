//! The reentrant lock: Redisson's `RLock`, with the same record and messages byte for byte.

use std::sync::Arc;

use nestlock_wire::{Arg, Bundle, Call, Script};

use crate::{
    engine::{AcquireTerms, JointScripts, Kind, KindInfo, Wake},
    keys::LockName,
    owner::OwnerId,
    store::script,
};

script!(
    ACQUIRE = "reentrant/acquire",
    parts = ["owner", "claim", "raises"],
    keys = 1,
    args = 3,
    bundle = PAIR
);
script!(
    RELEASE = "reentrant/release",
    parts = ["fewer", "held"],
    keys = 1,
    args = 3,
    bundle = PAIR
);
/// The scripts of most requests. Several such requests may go out bundled, as one script call.
static PAIR: Bundle = Bundle::of(&[&ACQUIRE.source, &RELEASE.source]);
script!(
    TRANSFER = "reentrant/transfer",
    parts = ["held", "moves"],
    keys = 1,
    args = 3
);
script!(ACQUIRE_TOGETHER = "reentrant/acquire_together", parts = ["owner", "raises"], keys = 0 + 1 per_lock, args = 2);
script!(RELEASE_TOGETHER = "reentrant/release_together", parts = ["held"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(RENEW = "reentrant/renew", parts = ["held", "renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(
    FORCE_RELEASE = "reentrant/force_release",
    parts = ["owner"],
    keys = 1,
    args = 1
);
script!(
    INSPECT = "reentrant/inspect",
    parts = ["owner"],
    keys = 1,
    args = 0
);

/// A hash `name`: owner -> hold count, with the lease as its TTL.
#[derive(Debug)]
pub(crate) struct Reentrant {
    name: LockName,
    /// Whether a release publishes a message to waiters.
    tells: bool,
    /// Whether the holds of one owner nest.
    nests: bool,
}

impl Reentrant {
    pub(crate) fn new(name: &LockName) -> Self {
        Self {
            name: name.clone(),
            tells: true,
            nests: true,
        }
    }

    /// Returns the same record without a channel: a release publishes no message.
    pub(super) fn silent(name: &LockName) -> Self {
        Self {
            name: name.clone(),
            tells: false,
            nests: true,
        }
    }

    /// Returns the same record, but not reentrant: Redisson's `NonReentrantLock`. No owner belongs
    /// to two clients, so the client knows by itself whether the owner holds the lock, and refuses
    /// without a request.
    pub(crate) fn not_reentrant(self) -> Self {
        Self {
            nests: false,
            ..self
        }
    }

    fn key(&self) -> [Arc<str>; 1] {
        [Arc::clone(self.name())]
    }

    fn channel(&self) -> Arg {
        if self.tells {
            Arg::Derived(Arc::clone(self.name()))
        } else {
            Arg::Text("".into())
        }
    }
}

impl Kind for Reentrant {
    fn about(&self) -> KindInfo {
        KindInfo {
            rival: Some("fair"),
            relayed: true,
            reentrant: self.nests,
            ..KindInfo::plain("reentrant")
        }
    }

    fn name(&self) -> &Arc<str> {
        self.name.as_arc()
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Channel(self.name.channel())
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        Call::new(
            &ACQUIRE,
            self.key(),
            [
                terms.owner.into(),
                terms.lease_ms.into(),
                terms.holds.into(),
            ],
        )
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        Call::new(
            &RELEASE,
            self.key(),
            [owner.into(), holds.into(), self.channel()],
        )
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        Call::new(
            &TRANSFER,
            self.key(),
            [from.into(), to.into(), lease_ms.into()],
        )
    }

    fn renew(&self) -> &'static Script {
        &RENEW
    }

    fn together(&self) -> Option<JointScripts> {
        Some(JointScripts {
            acquire: &ACQUIRE_TOGETHER,
            release: &RELEASE_TOGETHER,
        })
    }

    fn force_release(&self) -> Call {
        Call::new(&FORCE_RELEASE, self.key(), [self.channel()])
    }

    fn inspect(&self) -> Call {
        Call::new(&INSPECT, self.key(), [])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::ClientId;

    #[test]
    fn a_kind_is_a_description() {
        let lock = Reentrant::new(&LockName::new("", "orders:7", 1024).unwrap());
        let owner = OwnerId::named(&ClientId::random(), "me").unwrap();
        let terms = AcquireTerms {
            owner: &owner,
            lease_ms: 30_000,
            holds: 1,
            waits: false,
            wait_id: None,
        };
        for call in [
            lock.acquire(terms),
            lock.release(&owner, 0),
            lock.force_release(),
            lock.inspect(),
        ] {
            assert_eq!(call.keys.len(), 1, "{}", call.script.source.name);
            assert_eq!(&*call.keys[0], "orders:7");
        }
        let Wake::Channel(channel) = lock.wake(&owner) else {
            panic!("it has a channel")
        };
        assert_eq!(&*channel, "redisson_lock__channel:{orders:7}");
    }
}
