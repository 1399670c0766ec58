//! The fair lock: first come, first served, across processes. Redisson's `RFairLock`.

use std::{sync::Arc, time::Duration};

use super::reentrant::Reentrant;
use crate::{
    engine::{About, Kind, Terms, Turn, Verbs, Wake},
    keys::LockName,
    options::millis,
    owner::OwnerId,
    store::{Call, Script, script},
};

script!(ACQUIRE = "fair/acquire", parts = ["owner", "raises", "time", "clock"], keys = 4, args = 6);
script!(RELEASE = "fair/release", parts = ["fewer", "time", "clock"], keys = 4, args = 4);
script!(FORCE_RELEASE = "fair/force_release", parts = ["owner"], keys = 2, args = 1);

/// The reentrant lock's record, a list of waiters, and two sorted sets of the times when they count as gone: Redisson's,
/// which its clients lower, and one for our waiters alone.
#[derive(Debug)]
pub(crate) struct Fair {
    record: Reentrant,
    queue: Arc<str>,
    timeouts: Arc<str>,
    seen: Arc<str>,
    /// Each waiter listens to a channel of its own: this one with `:` and its name added.
    channel: Arc<str>,
    patience: Duration,
    /// A release makes the next waiter the holder.
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

    fn keys(&self) -> [Arc<str>; 4] {
        [self.name(), &self.queue, &self.timeouts, &self.seen].map(Arc::clone)
    }
}

impl Kind for Fair {
    fn about(&self) -> About {
        About { queues: true, own_channel: true, rival: Some("reentrant"), ..About::plain("fair") }
    }

    fn verbs(&self) -> &dyn Verbs {
        self
    }
}

impl Verbs for Fair {
    fn name(&self) -> &Arc<str> {
        self.record.name()
    }

    fn wake(&self, owner: &OwnerId) -> Wake {
        Wake::Channel(format!("{}:{owner}", self.channel).into())
    }

    fn acquire(&self, terms: Terms<'_>) -> Call {
        let Terms { owner, lease_ms, holds, waits, turn } = terms;
        let patience = millis(self.patience);
        // what is granted lives for what is left of a patience at first, which must not be longer than it should
        let turn = turn.filter(|_| self.grants && patience <= lease_ms);
        let waits = turn.map_or(u32::from(waits), Turn::number);
        let args = [owner.into(), lease_ms.into(), holds.into(), patience.into(), waits.into(), (&self.channel).into()];
        Call::new(&ACQUIRE, self.keys(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let grants = u32::from(self.grants);
        Call::new(&RELEASE, self.keys(), [owner.into(), holds.into(), (&self.channel).into(), grants.into()])
    }

    /// Nobody is told: who comes next, the queue says.
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
