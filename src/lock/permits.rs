//! Permits: at most N holders at the same time. Redisson's `RPermitExpirableSemaphore`.
//!
//! A counter says how many permits are available, and a sorted set has the taken ones, each with the
//! instant at which its lease ends. An expired permit stays in the set until an acquire takes it:
//! nothing on the server runs by itself.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Arg, Call, Script};

use super::Lock;

use crate::{
    engine::{AcquireTerms, Anchor, Kind, KindInfo, MOST_PERMITS, Sharing, Wake},
    error::{Error, Result},
    guard::LockGuard,
    keys::{LockName, PERMIT_LEASES, SEMAPHORE_LEASES},
    owner::OwnerId,
    store::script,
};

script!(
    ACQUIRE = "permits/acquire",
    parts = ["permit", "available", "counter", "time"],
    keys = 2,
    args = 5
);
script!(
    RELEASE = "permits/release",
    parts = ["permit", "available", "time"],
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

/// At most N holders at the same time, over all processes. See
/// [`LockClient::permits`](crate::LockClient::permits).
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let exports = client.permits("exports", 3)?;
/// let guard = exports.acquire().await?; // one of three
/// // at most three exports run at once, on all machines
/// guard.unlock().await
/// # }
/// ```
///
/// Each acquire takes a permit of its own, also within one task, unless
/// [`AcquireOptions::owner`](crate::AcquireOptions::owner) names an owner that has one. The [`LockGuard`] is that of a lock:
/// the watchdog renews it, a lost permit is reported ([`LockGuard::lost`]), and a drop gives it back.
/// The permits of a process that died come back when their leases end.
///
/// # How many there are
///
/// The first acquire of a name stores the number of permits on the server. From then on that number
/// counts, whatever number later calls pass; [`set_permits`](Self::set_permits) changes it.
///
/// # With Redisson
///
/// Both use the same keys and messages. Redisson takes the client's clock for its leases and to find
/// those that have ended; nestlock takes the server's. A Java process whose clock is ahead by two
/// thirds of the watchdog timeout takes permits that are held, and one that is ahead at all takes
/// those with a lease of their own early. The permits of one that is behind end early. Keep the
/// machines' clocks in step.
#[derive(Debug, Clone)]
pub struct Permits {
    anchor: Arc<Anchor>,
    record: PermitRecord,
}

impl Permits {
    pub(crate) fn new(anchor: &Arc<Anchor>, name: &LockName, total: u32) -> Result<Self> {
        let record = PermitRecord::new(name, total);
        record.check_total(total)?;
        Ok(Self {
            anchor: Arc::clone(anchor),
            record,
        })
    }

    /// Returns the name, with the client's prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        self.record.name()
    }

    /// Takes a permit, and waits for it without limit.
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn acquire(&self) -> Result<LockGuard> {
        self.one().lock().await
    }

    /// Takes a permit if one is available. Returns `None` if not.
    ///
    /// # Errors
    ///
    /// As [`Lock::try_lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn try_acquire(&self) -> Result<Option<LockGuard>> {
        self.one().try_lock().await
    }

    /// Takes a permit, and waits for it for at most `wait`. Returns `None` if none was available
    /// all that time.
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn try_acquire_for(&self, wait: Duration) -> Result<Option<LockGuard>> {
        self.one().try_lock_for(wait).await
    }

    /// Takes `n` permits at once, and waits for them without limit. The guard has all of them, and is
    /// lost with any of them: the others come back when their leases end.
    ///
    /// Waiters for fewer permits may pass it: whenever permits are given back, all get a chance. If
    /// there are fewer than `n` since [`set_permits`](Self::set_permits), it waits until there are
    /// more.
    ///
    /// ```no_run
    /// # async fn example(permits: nestlock::Permits) -> nestlock::Result<()> {
    /// let heavy = permits.acquire_many(2).await?;
    /// heavy.unlock().await // gives back both
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`]; [`Error::InvalidCount`] as [`many`](Self::many).
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn acquire_many(&self, n: u32) -> Result<LockGuard> {
        self.many(n)?.lock().await
    }

    /// Returns a lock whose every acquire takes `n` permits: for options, such as a lease, and for
    /// what takes a [`Lock`]. Its `adopt` is for permits that were handed over by a lock of the same
    /// `n`. Its `release` gives back all permits of an owner, and fails with
    /// [`Error::NotHeld`] if they were fewer than `n`.
    ///
    /// ```no_run
    /// # async fn example(permits: nestlock::Permits) -> nestlock::Result<()> {
    /// use std::time::Duration;
    /// use nestlock::AcquireOptions;
    ///
    /// let one = permits.many(1)?;
    /// let lease = AcquireOptions::new().lease(Duration::from_secs(10));
    /// if let Some(guard) = one.try_lock_with(lease).await? {
    ///     guard.unlock().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`] if `n` is 0, above 100, or above the number that these [`Permits`]
    /// were made with; nothing is sent.
    pub fn many(&self, n: u32) -> Result<Lock> {
        self.record.many(&self.anchor, n)
    }

    fn one(&self) -> Lock {
        self.record.as_lock(&self.anchor, 1)
    }

    /// Returns how many permits may be acquired, as the server saw it a moment ago. One request.
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn available_permits(&self) -> Result<u32> {
        let call = self.record.available();
        self.anchor.count(self.record.name(), &call).await
    }

    /// Changes how many permits there are, taken ones included, and wakes waiters if there are more
    /// than before. If there are fewer, holders keep theirs: the next acquires wait until enough are
    /// given back.
    ///
    /// Processes that pass another number to [`LockClient::permits`](crate::LockClient::permits)
    /// follow, but refuse [`many`](Self::many) above their number.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`] if `total` is 0 or above 2,147,483,647; otherwise as
    /// [`Lock::inspect`]; [`Error::Unconfirmed`] if the number may have been changed. The call may
    /// be repeated.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the number may or may not have been changed.
    pub async fn set_permits(&self, total: u32) -> Result<()> {
        self.record.check_total(total)?;
        let call = self.record.set_total(total);
        let changed = self.anchor.set_count(self.record.name(), &call).await;
        changed.map(drop)
    }

    /// Returns the owners of permits and how many each has, as the server saw it a moment ago. A
    /// permit of Redisson's is its own owner, as 32 hexadecimal digits. One request.
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn holders(&self) -> Result<Vec<(OwnerId, u32)>> {
        let held = self.one().inspect().await?;
        Ok(held.map_or_else(Vec::new, |held| held.holders))
    }
}

/// A string `name` with the number of available permits, and a sorted set of the taken ones:
/// `{name}:timeout`, or `nestlock_semaphore_leases:{name}` for a semaphore.
#[derive(Debug, Clone)]
pub(crate) struct PermitRecord {
    name: Arc<str>,
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
            name: Arc::clone(name.as_arc()),
            leases,
            channel: name.derived("redisson_sc"),
            total,
            takes: 1,
        }
    }

    /// Returns a lock whose every acquire takes `n` permits, if one acquire may take that many.
    pub(super) fn many(&self, anchor: &Arc<Anchor>, n: u32) -> Result<Lock> {
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
        Ok(self.as_lock(anchor, n))
    }

    pub(super) fn as_lock(&self, anchor: &Arc<Anchor>, takes: u32) -> Lock {
        Lock::new(anchor, self.taking(takes)).owner_per_acquire()
    }

    pub(super) fn taking(&self, takes: u32) -> Self {
        Self {
            takes,
            ..self.clone()
        }
    }

    pub(super) fn channel(&self) -> &Arc<str> {
        &self.channel
    }

    pub(super) fn keys(&self) -> [Arc<str>; 2] {
        [Arc::clone(&self.leases), Arc::clone(&self.name)]
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn refuse(&self, reason: String) -> Error {
        Error::InvalidCount {
            lock: self.name.to_string(),
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
        let family = match self.total {
            Some(_) => "permits",
            None => "semaphore",
        };
        KindInfo {
            reentrant: false,
            sharing: Sharing::Counted { takes: self.takes },
            ..KindInfo::plain(family)
        }
    }

    fn name(&self) -> &Arc<str> {
        &self.name
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
        let takes = u32::from(entries);
        (takes != self.takes).then(|| -> Arc<dyn Kind> { Arc::new(self.taking(takes)) })
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
