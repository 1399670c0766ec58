//! [`Lock`]: one type for locks of every kind, for combinations of several locks, and for one lock
//! over several servers.

mod fair;
mod fair_permits;
mod fenced;
mod handle;
mod latch;
mod multi;
mod nodes;
mod note;
mod observed;
mod permits;
mod permits_handle;
mod quorum;
mod read_write;
mod red;
mod red_options;
mod reentrant;
mod semaphore;
mod signal;
mod spin;
mod string;

use std::{sync::Arc, time::Duration};

use tracing::Instrument;

pub(crate) use self::{
    fair::Fair,
    fenced::{Fenced, FencedKey},
    handle::Several,
    multi::MultiLock,
    read_write::{ReadSide, WriteSide},
    red::{RedLock, RedMembers},
    reentrant::Reentrant,
    signal::Signal,
    spin::Spin,
    string::StringRecord,
};
pub use self::{
    handle::{Inspection, Lock},
    latch::CountDownLatch,
    note::HolderNote,
    permits_handle::Permits,
    read_write::ReadWriteLock,
    red_options::RedLockOptions,
    semaphore::Semaphore,
};
use self::{
    handle::{LockInner, SingleLock},
    observed::Observed,
};
use crate::{
    engine::{Anchor, Kind, acquire::options::Acquire},
    error::{Error, Result},
    guard::LockGuard,
    hand_over::HandOver,
    options::{AcquireOptions, Wait},
    owner::OwnerId,
    store::Inspected,
};

impl Lock {
    pub(crate) fn new(anchor: &Arc<Anchor>, kind: impl Kind) -> Self {
        Self::of(LockInner::One(SingleLock {
            anchor: Arc::clone(anchor),
            kind: Arc::new(kind),
        }))
    }

    pub(crate) fn of_several(several: impl Several + 'static) -> Self {
        Self::of(LockInner::Several(Arc::new(several)))
    }

    fn of(inner: LockInner) -> Self {
        Self {
            inner,
            owner_per_acquire: false,
        }
    }

    fn single(&self) -> Option<&SingleLock> {
        match &self.inner {
            LockInner::One(single) => Some(single),
            LockInner::Several(_) => None,
        }
    }

    /// Returns the same lock, but with each acquire as a separate owner, whichever task makes it:
    /// the lock is not re-entered, and guards held by one task exclude each other.
    ///
    /// An [`AcquireOptions::owner`] or [`AcquireOptions::value`] takes precedence.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let turns = client.fair_lock("printer")?.owner_per_acquire();
    /// let guard = turns.lock().await?;
    /// assert!(turns.try_lock().await?.is_none(), "also in the same task");
    /// guard.unlock().await
    /// # }
    /// ```
    #[must_use]
    pub fn owner_per_acquire(mut self) -> Self {
        self.owner_per_acquire = true;
        self
    }

    /// Returns the lock's name, with the client's prefix. For several locks: their names, joined
    /// with `+`.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.inner {
            LockInner::One(single) => single.kind.name(),
            LockInner::Several(several) => several.name(),
        }
    }

    /// Returns the locks that this one combines, in the given order; empty for a single lock.
    #[must_use]
    pub fn members(&self) -> &[Self] {
        match &self.inner {
            LockInner::One(_) => &[],
            LockInner::Several(several) => several.members(),
        }
    }

    /// Acquires the lock, and waits for it without limit. The watchdog renews the lease until the
    /// guard is released.
    ///
    /// One round trip if the lock is free. A re-entry adds one hold, and never shortens the lease.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// let guard = lock.lock().await?;
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Error::Lost`]: this owner held the lock and lost it, or the call is nested inside a hold
    ///   that was lost.
    /// - [`Error::NotReentrant`], [`Error::UpgradeRefused`], [`Error::TooManyHolds`],
    ///   [`Error::NoToken`]: this owner holds the lock in a way that waiting cannot change. Nothing
    ///   was sent.
    /// - [`Error::WrongLockKind`], [`Error::WrongType`]: the key belongs to something else.
    /// - [`Error::Store`], [`Error::Unconfirmed`]: the server rejected the request, or did not
    ///   reply. Without a limit to the wait, transient errors are retried for the client's
    ///   [`outage_patience`](crate::LockClientBuilder::outage_patience); with a limit, until the
    ///   wait is over, plus a round trip and 40 ms; a try ends within the command timeout.
    /// - [`Error::NoQuorum`]: too few servers of a RedLock agreed.
    /// - [`Error::Closed`]: the client was shut down.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped at any point, nothing stays held. The client undoes a request in
    /// flight in the background; [`LockClient::idle`](crate::LockClient::idle) waits for that.
    pub async fn lock(&self) -> Result<LockGuard> {
        self.wait_and_acquire(&PLAIN).await
    }

    /// Acquires like [`lock`](Self::lock), with options: a lease, an owner.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    /// use nestlock::AcquireOptions;
    ///
    /// let guard = lock.lock_with(AcquireOptions::new().lease(Duration::from_secs(10))).await?;
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock); [`Error::InvalidLease`] and [`Error::InvalidOwner`] before anything
    /// is sent.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn lock_with(&self, options: AcquireOptions) -> Result<LockGuard> {
        self.wait_and_acquire(&options).await
    }

    /// Acquires the lock if it is free, without waiting for a holder. Returns `None` if another
    /// owner holds it, or if the caller does and cannot take it again.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// match lock.try_lock().await? {
    ///     Some(guard) => guard.unlock().await,
    ///     None => Ok(()), // busy: another owner holds it
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without [`Error::NotReentrant`] and [`Error::UpgradeRefused`]:
    /// those say that a wait would never end, and a try does not wait.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<LockGuard>> {
        self.try_to_acquire(&PLAIN).await
    }

    /// Acquires like [`try_lock`](Self::try_lock), with options: a lease, an owner.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    /// use nestlock::AcquireOptions;
    ///
    /// let once_a_minute = AcquireOptions::new().lease(Duration::from_secs(60));
    /// if let Some(guard) = lock.try_lock_with(once_a_minute).await? {
    ///     guard.leave_to_lease();
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`try_lock`](Self::try_lock); [`Error::InvalidLease`] and [`Error::InvalidOwner`] before
    /// anything is sent.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_with(&self, options: AcquireOptions) -> Result<Option<LockGuard>> {
        self.try_to_acquire(&options).await
    }

    /// Acquires the lock, and waits for it for at most `wait`. Returns `None` if it was busy all
    /// that time. Zero tries once; more than 10 years counts as no limit.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// let Some(guard) = lock.try_lock_for(Duration::from_secs(2)).await? else { return Ok(()) };
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock).
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>> {
        self.acquire(Wait::at_most(wait), &PLAIN).await
    }

    /// Acquires like [`try_lock_for`](Self::try_lock_for), with options: a lease, an owner.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use std::time::Duration;
    /// use nestlock::AcquireOptions;
    ///
    /// let (wait, lease) = (Duration::from_secs(2), Duration::from_secs(10));
    /// let guard = lock.try_lock_for_with(wait, AcquireOptions::new().lease(lease)).await?;
    /// # drop(guard); Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock); [`Error::InvalidLease`] and [`Error::InvalidOwner`] before anything
    /// is sent.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for_with(
        &self,
        wait: Duration,
        options: AcquireOptions,
    ) -> Result<Option<LockGuard>> {
        self.acquire(Wait::at_most(wait), &options).await
    }

    /// Takes over a hold that another guard [handed over](LockGuard::hand_over), in this process or
    /// another. The watchdog renews it from here on, and a fenced lock's guard has a new, higher
    /// token.
    ///
    /// One round trip. If two callers adopt the same hand-over, only one gets the lock. The call
    /// does not wait for replicas, even with [`replicas`](crate::LockClientBuilder::replicas):
    /// until its first renewal is acknowledged, a failover may end the hold together with the
    /// giver's record. Call [`extend`](LockGuard::extend) right after it to find out.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock, text: &str) -> nestlock::Result<()> {
    /// use nestlock::HandOver;
    ///
    /// let guard = lock.adopt(&HandOver::from_text(text)?).await?;
    /// // continue the other process's work
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Error::NotHeld`]: the hold has been adopted already, or its lease is over.
    /// - [`Error::InvalidHandOver`]: it belongs to another lock or kind; nothing was sent.
    /// - [`Error::NotReentrant`]: the caller holds this lock as one of several readers.
    /// - [`Error::CannotHandOver`]: this lock combines several.
    /// - [`Error::Store`], [`Error::Unconfirmed`]: as with [`lock`](Self::lock), within the command
    ///   timeout. After `Store`, the hold may be adopted again; an unconfirmed adoption is
    ///   released.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the hold may have been adopted; it is then released.
    pub async fn adopt(&self, hand_over: &HandOver) -> Result<LockGuard> {
        self.adopt_with(hand_over, AcquireOptions::new()).await
    }

    /// Adopts like [`adopt`](Self::adopt), with options: a lease, an owner.
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt); before anything is sent, [`Error::InvalidLease`] and
    /// [`Error::InvalidOwner`], the latter also for a value.
    ///
    /// # Cancel safety
    ///
    /// As [`adopt`](Self::adopt).
    pub async fn adopt_with(
        &self,
        hand_over: &HandOver,
        options: AcquireOptions,
    ) -> Result<LockGuard> {
        let LockInner::One(SingleLock { anchor, kind }) = &self.inner else {
            return Err(Error::CannotHandOver {
                lock: self.name().to_owned(),
                reason: "it combines several locks; adopt with the lock that was handed over",
            });
        };
        let from = hand_over.owner_for(kind.about().family, kind.name())?;
        let adopt = async {
            let entered = Acquire::adopting(anchor, kind, &options, from)?
                .adopt()
                .await?;
            Ok(note::guard(anchor, entered, &options))
        };
        if self.owner_per_acquire {
            OwnerId::of_one_acquire(adopt).await
        } else {
            adopt.await
        }
    }

    /// Releases one hold of `owner`, without a guard: after [`LockGuard::leave_to_lease`], or in
    /// another process.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// let owner = lock.lock().await?.leave_to_lease();
    /// lock.release(&owner).await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if this owner does not hold the lock; nothing is changed.
    /// [`Error::Store`] and [`Error::Unconfirmed`] if the server did not reply.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release continues if the future is dropped or the reply is lost. Without a
    /// guard here, this client is not the only one that may change the owner's hold count: it
    /// repeats the release while the server still records the count that the release was sent for,
    /// and considers it done once the server records another count.
    pub async fn release(&self, owner: &OwnerId) -> Result<()> {
        match &self.inner {
            LockInner::One(single) => single.anchor.release_owner(&single.kind, owner).await,
            LockInner::Several(several) => several.release(owner).await,
        }
    }

    /// Extends the holds of `owner` to at least `lease` from now, 10 ms to 10 years. Never shortens
    /// them.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock, owner: nestlock::OwnerId) -> nestlock::Result<()> {
    /// lock.extend(&owner, std::time::Duration::from_secs(60)).await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if this owner does not hold the lock; nothing is changed.
    /// [`Error::NotExpirable`] if the record has no TTL; [`Error::InvalidLease`]; [`Error::Store`]
    /// and [`Error::Unconfirmed`] if the server did not reply.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: if dropped midway, the lock may or may not have been extended.
    pub async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()> {
        match &self.inner {
            LockInner::One(single) => single.anchor.extend(&single.kind, owner, lease).await,
            LockInner::Several(several) => several.extend(owner, lease).await,
        }
    }

    /// Frees the lock, whatever its owner, and wakes a waiter. Returns `false` if it was free.
    ///
    /// The holder is not asked. It learns of the loss when it next renews or releases.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// if lock.force_unlock().await? {
    ///     println!("{} was held, and is free now", lock.name());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect); [`Error::Unconfirmed`] if the lock may have been freed.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the lock may or may not have been freed.
    pub async fn force_unlock(&self) -> Result<bool> {
        match &self.inner {
            LockInner::One(single) => single.anchor.force_unlock(&single.kind).await,
            LockInner::Several(several) => several.force_unlock().await,
        }
    }

    /// Returns the lock's holders and remaining lease, as the server saw them a moment ago. Returns
    /// `None` if it is free. One request.
    ///
    /// For a multi-lock: the owners that hold all members, and the shortest remaining time. For a
    /// RedLock: the owners that hold most of them.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// if let Some(held) = lock.inspect().await? {
    ///     println!("held by {:?}, for {:?} more", held.holders, held.remaining);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::WrongLockKind`] and [`Error::WrongType`] if the key belongs to something else;
    /// [`Error::Store`] if the server did not reply; [`Error::NoQuorum`] if too few of a RedLock's
    /// servers did.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn inspect(&self) -> Result<Option<Inspection>> {
        match &self.inner {
            LockInner::One(single) => Ok(match single.anchor.inspect(&single.kind).await? {
                Inspected::Held { holders, ttl } => Some(Inspection {
                    holders,
                    remaining: ttl,
                }),
                _ => None,
            }),
            LockInner::Several(several) => several.inspect().await,
        }
    }

    /// Returns whether the lock is held, as the server saw it a moment ago. For several locks:
    /// whether enough members are held to keep any other owner from acquiring the whole.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// println!("{} is {}", lock.name(), if lock.is_locked().await? { "held" } else { "free" });
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn is_locked(&self) -> Result<bool> {
        match &self.inner {
            LockInner::One(_) => Ok(self.inspect().await?.is_some()),
            LockInner::Several(several) => several.is_locked().await,
        }
    }

    /// Returns whether `owner` holds the lock, as the server saw it a moment ago: whether
    /// [`hold_count`](Self::hold_count) is above 0. As there, a task is never the owner of a
    /// [`mutex`](crate::LockClient::mutex). If you have the guard, use
    /// [`LockGuard::is_lost`] instead, which sends no request.
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: nestlock::LockClient, lock: nestlock::Lock,
    /// # ) -> nestlock::Result<()> {
    /// let guard = lock.lock().await?;
    /// assert!(lock.is_held_by(&guard.owner()).await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn is_held_by(&self, owner: &OwnerId) -> Result<bool> {
        Ok(self.hold_count(owner).await? > 0)
    }

    /// Returns the hold count of `owner`, as the server saw it a moment ago.
    ///
    /// Each acquire of a [`mutex`](crate::LockClient::mutex) is a separate owner: for a mutex, the
    /// count of [`current_owner`](crate::LockClient::current_owner) is 0 even while the task holds
    /// it. Use the guard's [`owner`](LockGuard::owner) instead.
    ///
    /// ```no_run
    /// # async fn example(
    /// #     client: nestlock::LockClient, lock: nestlock::Lock,
    /// # ) -> nestlock::Result<()> {
    /// assert_eq!(lock.hold_count(&client.current_owner()).await?, 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn hold_count(&self, owner: &OwnerId) -> Result<u32> {
        match &self.inner {
            LockInner::One(SingleLock { anchor, kind }) => {
                // before and after: the hold may be handed off, or forgotten, in between
                let has_ended = anchor.has_ended_for(kind, owner);
                let held = self.inspect().await?;
                let held = held.filter(|_| !has_ended && !anchor.has_ended_for(kind, owner));
                Ok(held.map_or(0, |held| held.hold_count(owner)))
            }
            LockInner::Several(several) => several.hold_count(owner).await,
        }
    }

    /// Returns the owner of the lock, as the server saw it a moment ago: one of them if there are
    /// several readers, `None` if the lock is free.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// if let Some(owner) = lock.holder().await? {
    ///     println!("held by {owner}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn holder(&self) -> Result<Option<OwnerId>> {
        Ok(self
            .inspect()
            .await?
            .and_then(|held| held.holders.into_iter().next())
            .map(|(owner, _)| owner))
    }

    /// Returns how long the record lives unless it is renewed, to the millisecond. Returns `None`
    /// if the lock is free or the record has no TTL.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// println!("free in {:?} at the latest", lock.remaining_lease().await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn remaining_lease(&self) -> Result<Option<Duration>> {
        match &self.inner {
            LockInner::One(_) => Ok(self.inspect().await?.and_then(|held| held.remaining)),
            LockInner::Several(several) => several.remaining_lease().await,
        }
    }

    async fn wait_and_acquire(&self, options: &AcquireOptions) -> Result<LockGuard> {
        let guard = self.acquire(Wait::Forever, options).await?;
        Ok(guard.expect("a wait without limit does not end without the lock"))
    }

    async fn try_to_acquire(&self, options: &AcquireOptions) -> Result<Option<LockGuard>> {
        match self.acquire(Wait::No, options).await {
            Err(Error::NotReentrant { .. } | Error::UpgradeRefused { .. }) => Ok(None),
            outcome => outcome,
        }
    }

    /// Acquires for all public methods. Returns `None` if the lock was busy for the whole wait.
    async fn acquire(&self, wait: Wait, options: &AcquireOptions) -> Result<Option<LockGuard>> {
        let acquire = self.acquire_as_caller(wait, options);
        // Boxed, so that waiters without an owner of their own stay small.
        match &self.inner {
            _ if !self.owner_per_acquire => acquire.await,
            LockInner::One(_) => Box::pin(OwnerId::of_one_acquire(acquire)).await,
            // Not the owner of one acquire: each round acquires the members again under its name.
            LockInner::Several(_) => Box::pin(OwnerId::scope(acquire)).await,
        }
    }

    async fn acquire_as_caller(
        &self,
        wait: Wait,
        options: &AcquireOptions,
    ) -> Result<Option<LockGuard>> {
        let mut observed = Observed::begin(self, wait);
        let outcome = match observed.span() {
            Some(span) => Box::pin(self.acquire_unobserved(wait, options).instrument(span)).await,
            None => self.acquire_unobserved(wait, options).await,
        };
        observed.end(&outcome);
        outcome
    }

    async fn acquire_unobserved(
        &self,
        wait: Wait,
        options: &AcquireOptions,
    ) -> Result<Option<LockGuard>> {
        match &self.inner {
            LockInner::One(SingleLock { anchor, kind }) => {
                let entered = Acquire::new(anchor, kind, options, wait)?.run().await?;
                Ok(entered.map(|entered| note::guard(anchor, entered, options)))
            }
            LockInner::Several(several) => Arc::clone(several).acquire(wait, options).await,
        }
    }
}

/// The default options, for calls that pass none.
static PLAIN: AcquireOptions = AcquireOptions {
    lease: None,
    rare: None,
};

#[cfg(test)]
pub(crate) use self::permits::PermitRecord;
