//! Fair permits: first come, first served, among nestlock's waiters of all processes.
//!
//! The permits and the messages are those of [`super::permits`]. A sorted set has the waiting owners
//! in order, and another says when each expires and how many permits it wants. An acquire succeeds if
//! enough are left for all that came before it. A release tells the waiters that fit in now, each on
//! a channel of its own.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Arg, Call, Script, clock::millis};

use super::permits::PermitRecord;

use crate::{
    engine::{AcquireTerms, Kind, KindInfo, Wake},
    keys::{PERMIT_QUEUE, PERMIT_WAITERS},
    owner::OwnerId,
    store::script,
};

script!(
    ACQUIRE = "fair_permits/acquire",
    parts = ["permit", "available", "counter", "time", "take", "in_line"],
    keys = 4,
    args = 7
);
script!(
    RELEASE = "fair_permits/release",
    parts = ["permit", "available", "time", "give", "in_line"],
    keys = 4,
    args = 4
);

/// The record of permits, and the queue of their waiters.
#[derive(Debug, Clone)]
pub(super) struct FairPermits {
    record: PermitRecord,
    line: Arc<Line>,
}

#[derive(Debug)]
struct Line {
    queue: Arc<str>,
    seen: Arc<str>,
    patience: Duration,
}

impl FairPermits {
    pub(super) fn new(record: PermitRecord, patience: Duration) -> Self {
        let line = Line {
            queue: record.derived(PERMIT_QUEUE),
            seen: record.derived(PERMIT_WAITERS),
            patience,
        };
        Self {
            record,
            line: Arc::new(line),
        }
    }

    fn keys(&self) -> [Arc<str>; 4] {
        let [leases, counter] = self.record.keys();
        [
            leases,
            counter,
            Arc::clone(&self.line.queue),
            Arc::clone(&self.line.seen),
        ]
    }
}

impl Kind for FairPermits {
    fn about(&self) -> KindInfo {
        let family = "fair_permits";
        KindInfo {
            family,
            label: family,
            queues: true,
            own_channel: true,
            rival: Some("permits"),
            ..self.record.about()
        }
    }

    fn name(&self) -> &Arc<str> {
        Kind::name(&self.record)
    }

    fn record(&self) -> &Arc<str> {
        self.record.record()
    }

    fn wake(&self, owner: &OwnerId) -> Wake {
        Wake::Channel(format!("{}:{owner}", self.record.channel()).into())
    }

    /// Redisson, and permits that are not fair, know of no queue.
    fn heard(&self) -> Option<(Arc<dyn Kind>, Arc<str>)> {
        let channel = Arc::clone(self.record.channel());
        Some((Arc::new(self.record.clone()), channel))
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        let taken = self.record.acquire(terms);
        let line = [
            millis(self.line.patience).into(),
            u32::from(terms.waits).into(),
        ];
        Call::new(&ACQUIRE, self.keys(), taken.args.into_iter().chain(line))
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let given = self.record.release(owner, holds);
        Call::new(&RELEASE, self.keys(), given.args)
    }

    /// Tells no waiter of the queue: they ask again within the poll cap.
    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        self.record.release_record(owner, holds)
    }

    fn record_is_all(&self) -> bool {
        self.record.record_is_all()
    }

    fn release_if(&self, owner: &OwnerId, _: u32, _: u32) -> Call {
        self.release(owner, 0)
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        self.record.transfer(from, to, lease_ms)
    }

    fn renew(&self) -> &'static Script {
        self.record.renew()
    }

    fn of_entries(&self, entries: u16) -> Option<Arc<dyn Kind>> {
        let record = self.record.of_takes(entries)?;
        let line = Arc::clone(&self.line);
        Some(Arc::new(Self { record, line }))
    }

    fn renewed_owner(&self, owner: &OwnerId) -> Arg {
        self.record.renewed_owner(owner)
    }

    fn force_release(&self) -> Call {
        self.record.force_release()
    }

    fn inspect(&self) -> Call {
        self.record.inspect()
    }
}
