//! The record of permits, with its scripts: a counter says how many are available, and a sorted set has
//! the taken ones, each with the instant at which its lease ends. An expired permit stays in the set
//! until an acquire takes it: nothing on the server runs by itself.

use std::sync::Arc;

use nestlock_wire::{Arg, Call, Script};

use super::Lock;

use crate::{
    engine::{AcquireTerms, Anchor, Kind, KindInfo, MOST_PERMITS, Sharing, Wake},
    error::{Error, Result},
    keys::{LockName, PERMIT_LEASES, SEMAPHORE_LEASES},
    owner::OwnerId,
    store::script,
};

script!(
    ACQUIRE = "permits/acquire",
    parts = ["permit", "available", "counter", "time", "take"],
    keys = 2,
    args = 5
);
script!(
    RELEASE = "permits/release",
    parts = ["permit", "available", "time", "give"],
    keys = 2,
    args = 4
);
script!(
    RELEASE_RECORD = "permits/release_record",
    parts = ["permit", "time"],
    keys = 1,
    args = 3
);
script!(
    TRANSFER = "permits/transfer",
    parts = ["moves", "permit", "time"],
    keys = 1,
    args = 3
);
script!(RENEW = "permits/renew", parts = ["permit", "renew_each", "time"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(
    FORCE_RELEASE = "permits/force_release",
    parts = ["counter"],
    keys = 2,
    args = 2
);
script!(
    INSPECT = "permits/inspect",
    parts = ["time"],
    keys = 1,
    args = 0
);
script!(
    AVAILABLE = "permits/available",
    parts = ["counter", "time"],
    keys = 2,
    args = 1
);
script!(
    SET_TOTAL = "permits/set_total",
    parts = ["counter", "time"],
    keys = 2,
    args = 2
);
/// The most permits that one name may have: Redisson's limit.
pub(super) const MOST: u32 = i32::MAX.unsigned_abs();

/// A string `name` with the number of available permits, and a sorted set of the taken ones:
/// `{name}:timeout`, or `nestlock_semaphore_leases:{name}` for a semaphore.
#[derive(Debug, Clone)]
pub(crate) struct PermitRecord {
    name: LockName,
    leases: Arc<str>,
    channel: Arc<str>,
    /// How many there are if the server has no number yet. `None`: a semaphore, of which there are
    /// none then.
    total: Option<u32>,
    /// How many each acquire takes.
    takes: u32,
}

impl PermitRecord {
    pub(crate) fn new(name: &LockName, total: u32) -> Self {
        let leases = name.with_suffix(&PERMIT_LEASES[1..]);
        Self::with_leases(name, leases, Some(total))
    }

    pub(super) fn of_semaphore(name: &LockName) -> Self {
        Self::with_leases(name, name.derived(SEMAPHORE_LEASES), None)
    }

    fn with_leases(name: &LockName, leases: Arc<str>, total: Option<u32>) -> Self {
        Self {
            name: name.clone(),
            leases,
            channel: name.derived("redisson_sc"),
            total,
            takes: 1,
        }
    }

    /// Returns the same record, of which each acquire takes `n` permits, if one acquire may take that
    /// many.
    pub(super) fn taking_checked(&self, n: u32) -> Result<Self> {
        if n == 0 {
            return Err(self.refuse("0 permits; take at least 1".to_owned()));
        }
        if let Some(total) = self.total.filter(|total| n > *total) {
            return Err(self.refuse(format!(
                "{n} permits are more than the {total} that there are; take fewer"
            )));
        }
        if n > MOST_PERMITS {
            return Err(self.refuse(format!(
                "{n} permits are more than the {MOST_PERMITS} of one acquire; let a permit stand for more"
            )));
        }
        Ok(self.taking(n))
    }

    pub(super) fn into_lock(self, anchor: &Arc<Anchor>) -> Lock {
        Lock::new(anchor, self).owner_per_acquire()
    }

    pub(super) fn taking(&self, takes: u32) -> Self {
        Self {
            takes,
            ..self.clone()
        }
    }

    /// Returns the same record, of which each acquire takes as many as a hold has entries. `None`: it
    /// is that record.
    pub(super) fn of_takes(&self, entries: u16) -> Option<Self> {
        let takes = u32::from(entries);
        (takes != self.takes).then(|| self.taking(takes))
    }

    pub(super) fn channel(&self) -> &Arc<str> {
        &self.channel
    }

    pub(super) fn keys(&self) -> [Arc<str>; 2] {
        [Arc::clone(&self.leases), Arc::clone(self.name.as_arc())]
    }

    pub(super) fn name(&self) -> &str {
        self.name.as_arc()
    }

    /// Returns a further key next to its own.
    pub(super) fn derived(&self, prefix: &str) -> Arc<str> {
        self.name.derived(prefix)
    }

    pub(super) fn refuse(&self, reason: String) -> Error {
        Error::InvalidCount {
            lock: self.name().to_owned(),
            reason,
        }
    }

    pub(super) fn check_total(&self, total: u32) -> Result<()> {
        if (1..=MOST).contains(&total) {
            return Ok(());
        }
        Err(self.refuse(format!("there cannot be {total} permits; use 1 to {MOST}")))
    }

    /// Returns the name of an owner's last permit: it says how many there must be.
    pub(super) fn last(&self, owner: &OwnerId) -> Arg {
        match self.takes {
            1 => owner.into(),
            takes => Arg::Text(format!("{owner} {takes}").into()),
        }
    }

    fn total(&self) -> Arg {
        self.total.unwrap_or(0).into()
    }

    pub(super) fn available(&self) -> Call {
        Call::new(&AVAILABLE, self.keys(), [self.total()])
    }

    pub(super) fn set_total(&self, total: u32) -> Call {
        let args = [total.into(), (&self.channel).into()];
        Call::new(&SET_TOTAL, self.keys(), args)
    }
}

impl Kind for PermitRecord {
    fn about(&self) -> KindInfo {
        let (family, rival) = match self.total {
            Some(_) => ("permits", Some("fair_permits")),
            None => ("semaphore", None),
        };
        KindInfo {
            reentrant: false,
            rival,
            sharing: Sharing::Counted { takes: self.takes },
            ..KindInfo::plain(family)
        }
    }

    fn name(&self) -> &Arc<str> {
        self.name.as_arc()
    }

    fn record(&self) -> &Arc<str> {
        &self.leases
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Channel(Arc::clone(&self.channel))
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        let args = [
            terms.owner.into(),
            terms.lease_ms.into(),
            self.takes.into(),
            self.total(),
            (&self.channel).into(),
        ];
        Call::new(&ACQUIRE, self.keys(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let (last, channel) = (self.last(owner), (&self.channel).into());
        Call::new(
            &RELEASE,
            self.keys(),
            [last, holds.into(), channel, self.total()],
        )
    }

    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        let args = [self.last(owner), holds.into(), (&self.channel).into()];
        Some(Call::new(&RELEASE_RECORD, [Arc::clone(&self.leases)], args))
    }

    /// The counter says nothing about owners.
    fn record_is_all(&self) -> bool {
        true
    }

    /// Ignores `seen`: an owner gives back all its permits at once.
    fn release_if(&self, owner: &OwnerId, _: u32, _: u32) -> Call {
        self.release(owner, 0)
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        Call::new(
            &TRANSFER,
            [Arc::clone(&self.leases)],
            [from.into(), to.into(), lease_ms.into()],
        )
    }

    fn renew(&self) -> &'static Script {
        &RENEW
    }

    fn of_entries(&self, entries: u16) -> Option<Arc<dyn Kind>> {
        Some(Arc::new(self.of_takes(entries)?))
    }

    fn renewed_owner(&self, owner: &OwnerId) -> Arg {
        self.last(owner)
    }

    fn force_release(&self) -> Call {
        let args = [(&self.channel).into(), self.total()];
        Call::new(&FORCE_RELEASE, self.keys(), args)
    }

    fn inspect(&self) -> Call {
        Call::new(&INSPECT, [Arc::clone(&self.leases)], [])
    }
}
