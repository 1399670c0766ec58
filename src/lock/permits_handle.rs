//! Permits: at most N holders at the same time. Redisson's `RPermitExpirableSemaphore`.

use std::{sync::Arc, time::Duration};

use super::{Lock, fair_permits::FairPermits, permits::PermitRecord};

use crate::{engine::Anchor, error::Result, guard::LockGuard, keys::LockName, owner::OwnerId};

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
    is_fair: bool,
}

impl Permits {
    pub(crate) fn new(anchor: &Arc<Anchor>, name: &LockName, total: u32) -> Result<Self> {
        let record = PermitRecord::new(name, total);
        record.check_total(total)?;
        Ok(Self {
            anchor: Arc::clone(anchor),
            record,
            is_fair: false,
        })
    }

    /// Returns the same permits, but fair, or not: the waiters of all processes get them in the order in
    /// which they came, and none passes one that wants more, unless there are not as many at all.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let exports = client.permits("exports", 3)?.fair(true);
    /// let heavy = exports.acquire_many(3).await?; // not passed by those that want one
    /// heavy.unlock().await
    /// # }
    /// ```
    ///
    /// The order is one among fair permits: ask for it in all programs that use the name. Others, and
    /// Redisson, see the same permits, but not the queue, and take what is free. What they give back is
    /// offered to the first waiter.
    ///
    /// A waiter that is silent for the client's
    /// [`fair_patience`](crate::LockClientBuilder::fair_patience) loses its place; until then it may hold
    /// up those behind it. [`try_acquire`](Self::try_acquire) passes no waiter.
    #[must_use]
    pub fn fair(self, is_fair: bool) -> Self {
        Self { is_fair, ..self }
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
    /// Waiters for fewer permits may pass it, unless these are [`fair`](Self::fair): whenever permits
    /// are given back, all get a chance. If there are fewer than `n` since
    /// [`set_permits`](Self::set_permits), it waits until there are more.
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
    /// As [`Lock::lock`]; [`Error::InvalidCount`](crate::Error::InvalidCount) as [`many`](Self::many).
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
    /// [`Error::NotHeld`](crate::Error::NotHeld) if they were fewer than `n`.
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
    /// [`Error::InvalidCount`](crate::Error::InvalidCount) if `n` is 0, above 100, or above the number
    /// that these [`Permits`] were made with; nothing is sent.
    pub fn many(&self, n: u32) -> Result<Lock> {
        Ok(self.as_lock(self.record.taking_checked(n)?))
    }

    fn one(&self) -> Lock {
        self.as_lock(self.record.taking(1))
    }

    fn as_lock(&self, record: PermitRecord) -> Lock {
        if !self.is_fair {
            return record.into_lock(&self.anchor);
        }
        let patience = self.anchor.config.fair_patience;
        Lock::new(&self.anchor, FairPermits::new(record, patience)).owner_per_acquire()
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
    /// [`Error::InvalidCount`](crate::Error::InvalidCount) if `total` is 0 or above 2,147,483,647; otherwise as
    /// [`Lock::inspect`]; [`Error::Unconfirmed`](crate::Error::Unconfirmed) if the number may have been changed. The call may
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
