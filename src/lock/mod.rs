//! The lock: one type for every kind, for several locks as one, and for one lock over several servers.

mod fair;
mod fenced;
mod multi;
mod non_reentrant;
mod observed;
mod quorum;
mod read_write;
mod red;
mod reentrant;
mod signal;
mod spin;
mod string;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use tracing::Instrument;

use self::observed::Observed;
pub(crate) use self::{
    fair::Fair,
    fenced::{Fenced, FencedKey},
    multi::MultiLock,
    non_reentrant::NonReentrant,
    read_write::{Read, Write},
    red::RedLock,
    reentrant::Reentrant,
    signal::Signal,
    spin::Spin,
    string::StringRecord,
};
pub use self::{read_write::ReadWriteLock, red::RedLockOptions};
use crate::{
    engine::{Anchor, Kind, attempt::Acquire},
    error::{Error, Result},
    guard::LockGuard,
    hand_over::HandOver,
    options::{AcquireOptions, Wait},
    owner::OwnerId,
    store::Inspected,
};

/// A distributed lock, made by one of the doors of [`LockClient`](crate::LockClient). Cheap to clone.
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let lock = client.mutex("invoice:7")?;
/// let guard = lock.lock().await?;
/// // one at a time, over all processes
/// guard.unlock().await
/// # }
/// ```
///
/// # Who holds it
///
/// A guard belongs to the owner that acquired it, wherever the guard is moved. With [`mutex`](crate::LockClient::mutex),
/// and after [`owner_per_acquire`](Self::owner_per_acquire), each acquire is an owner of its own, as with
/// `tokio::sync::Mutex`. With the other doors the owner is the tokio task that makes the call (see [`OwnerId`]): **a guard
/// that is handed to another task is still owned by the task that locked**, which may take a reentrant lock again
/// meanwhile. Outside of tokio's tasks the owner is the thread: tasks of another executor hold a lock together, unless each
/// has an [`OwnerId::scope`].
///
/// # What it cannot do
///
/// A lock says who *may* act; it cannot stop a process that was paused past its lease from acting late. Only a fencing
/// token that the guarded resource checks can. Watch [`LockGuard::lost`], and keep what you do under a lock short of
/// its lease.
#[derive(Debug, Clone)]
pub struct Lock {
    inner: Inner,
    /// Each acquire is an owner of its own.
    owner_per_acquire: bool,
}

#[derive(Debug, Clone)]
enum Inner {
    One(Single),
    Several(Arc<dyn Several>),
}

/// What is made of several locks, whose methods are those of [`Lock`]: all of them, or most.
#[async_trait]
pub(crate) trait Several: fmt::Debug + Send + Sync {
    fn name(&self) -> &str;
    /// What it is called where things are counted and told.
    fn label(&self) -> &'static str;
    fn members(&self) -> &[Lock];
    async fn acquire(&self, wait: Wait, options: &AcquireOptions) -> Result<Option<LockGuard>>;
    async fn release(&self, owner: &OwnerId) -> Result<()>;
    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()>;
    async fn force_unlock(&self) -> Result<bool>;
    async fn inspect(&self) -> Result<Option<Inspection>>;
    async fn is_locked(&self) -> Result<bool>;
    async fn hold_count(&self, owner: &OwnerId) -> Result<u32>;
    async fn remaining_lease(&self) -> Result<Option<Duration>> {
        Ok(self.inspect().await?.and_then(|held| held.remaining))
    }
}

/// A lock of one kind, on one server.
#[derive(Debug, Clone)]
struct Single {
    anchor: Arc<Anchor>,
    kind: Arc<dyn Kind>,
}

/// Who holds a lock, and for how long, as the server saw it a moment ago.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// Each owner, and how often it holds the lock: one, or all readers.
    ///
    /// A string that another program wrote may not be UTF-8: each byte that cannot be read is U+FFFD, and such an owner
    /// cannot be released by its text.
    pub holders: Vec<(OwnerId, u32)>,
    /// How long the record lives unless it is renewed, to the millisecond; `None`: it has no TTL.
    pub remaining: Option<Duration>,
}

impl Inspection {
    /// How often `owner` holds the lock, whatever suffix its name has.
    #[must_use]
    pub fn hold_count(&self, owner: &OwnerId) -> u32 {
        // one that holds anew what it gave away is recorded under both names
        let is_it = |(holder, _): &&(OwnerId, u32)| owner.is_exact() && holder == owner;
        let exact = self.holders.iter().find(is_it).map(|(_, holds)| *holds);
        let under_any = self.holders.iter().filter(|(holder, _)| holder.base() == owner.base());
        exact.unwrap_or_else(|| under_any.map(|(_, holds)| holds).sum())
    }
}

impl Lock {
    pub(crate) fn new(anchor: &Arc<Anchor>, kind: impl Kind) -> Self {
        Self::of(Inner::One(Single { anchor: Arc::clone(anchor), kind: Arc::new(kind) }))
    }

    pub(crate) fn of_several(several: impl Several + 'static) -> Self {
        Self::of(Inner::Several(Arc::new(several)))
    }

    fn of(inner: Inner) -> Self {
        Self { inner, owner_per_acquire: false }
    }

    fn single(&self) -> Option<&Single> {
        match &self.inner {
            Inner::One(single) => Some(single),
            Inner::Several(_) => None,
        }
    }

    /// The same lock, but each acquire is an owner of its own, whichever task makes it: nobody re-enters, and guards that
    /// are held by one task exclude each other.
    ///
    /// An [`AcquireOptions::owner`] or [`AcquireOptions::value`] is the owner all the same.
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

    /// The lock's name, with the client's prefix; of several locks, their names with `+` between.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.inner {
            Inner::One(single) => single.kind.name(),
            Inner::Several(several) => several.name(),
        }
    }

    /// The locks that this one is made of, in the order in which they were given; of a lock of one kind, none.
    #[must_use]
    pub fn members(&self) -> &[Self] {
        match &self.inner {
            Inner::One(_) => &[],
            Inner::Several(several) => several.members(),
        }
    }

    /// Acquires, and waits for it without limit. The watchdog renews the lease until the guard is released.
    ///
    /// One round trip when nobody holds the lock. A re-entry counts one hold more, and never shortens the lease.
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
    /// - [`Error::Lost`]: this owner held the lock and does not any more, or is inside a hold that was lost.
    /// - [`Error::NotReentrant`], [`Error::UpgradeRefused`], [`Error::TooManyHolds`], [`Error::NoToken`]: this owner holds
    ///   the lock in a way that waiting cannot change. Nothing was sent.
    /// - [`Error::WrongLockKind`], [`Error::WrongType`]: something else lives at this name.
    /// - [`Error::Store`], [`Error::Unconfirmed`]: the server refused, or did not answer. Without a limit to the wait, what
    ///   may pass is tried for the client's [`outage_patience`](crate::LockClientBuilder::outage_patience); with one, until
    ///   it is over, a round trip and 40 ms more; a try ends within the command timeout.
    /// - [`Error::NoQuorum`]: too few servers of a RedLock answered.
    /// - [`Error::Closed`]: the client was shut down.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped at any point, nothing stays held. A request that was under way is undone by the client in
    /// the background; [`LockClient::idle`](crate::LockClient::idle) waits for that.
    pub async fn lock(&self) -> Result<LockGuard> {
        self.wait_and_acquire(&PLAIN).await
    }

    /// As [`lock`](Self::lock), with options: a lease, an owner.
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
    /// As [`lock`](Self::lock); [`Error::InvalidLease`] and [`Error::InvalidOwner`] before anything is sent.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn lock_with(&self, options: AcquireOptions) -> Result<LockGuard> {
        self.wait_and_acquire(&options).await
    }

    /// Acquires if nobody else holds the lock; `None`: somebody does. Never waits for a holder.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// match lock.try_lock().await? {
    ///     Some(guard) => guard.unlock().await,
    ///     None => Ok(()), // busy: somebody else is at it
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), but for [`Error::NotReentrant`] and [`Error::UpgradeRefused`]: a lock that the caller itself
    /// holds, and cannot take again, is busy. These errors say that a wait would never end, and a try does not wait.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<LockGuard>> {
        self.try_to_acquire(&PLAIN).await
    }

    /// As [`try_lock`](Self::try_lock), with options: a lease, an owner.
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
    /// As [`try_lock`](Self::try_lock); [`Error::InvalidLease`] and [`Error::InvalidOwner`] before anything is sent.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_with(&self, options: AcquireOptions) -> Result<Option<LockGuard>> {
        self.try_to_acquire(&options).await
    }

    /// Acquires, and waits for it at most `wait`; `None`: busy until then. Zero tries once; more than ten years is without
    /// limit.
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

    /// As [`try_lock_for`](Self::try_lock_for), with options: a lease, an owner.
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
    /// As [`lock`](Self::lock); [`Error::InvalidLease`] and [`Error::InvalidOwner`] before anything is sent.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock_for_with(&self, wait: Duration, options: AcquireOptions) -> Result<Option<LockGuard>> {
        self.acquire(Wait::at_most(wait), &options).await
    }

    /// Takes over what another guard's [`hand_over`](LockGuard::hand_over) gave, in whatever process. The watchdog renews it
    /// from here on, and a fenced lock's guard has a new, higher token.
    ///
    /// One round trip. Of two that adopt the same, one gets it. Replicas are not waited for, also where
    /// [`replicas`](crate::LockClientBuilder::replicas) says so: until its first renewal counts, a failover may end it with
    /// what its giver had. An [`extend`](LockGuard::extend) right behind tells.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock, text: &str) -> nestlock::Result<()> {
    /// use nestlock::HandOver;
    ///
    /// let guard = lock.adopt(&HandOver::from_text(text)?).await?;
    /// // go on with what the other process began
    /// guard.unlock().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`]: somebody has adopted it already, or it is over. [`Error::InvalidHandOver`]: it is of another lock
    /// or kind; nothing was sent. [`Error::NotReentrant`]: the caller holds this lock, as one of several readers.
    /// [`Error::CannotHandOver`]: this is several locks as one. [`Error::Store`] and [`Error::Unconfirmed`] as
    /// [`lock`](Self::lock) within the command timeout: it may be adopted again, but what was adopted unheard is released.
    ///
    /// # Cancel safety
    ///
    /// Dropped midway, it may have been adopted, and is released then.
    pub async fn adopt(&self, hand_over: &HandOver) -> Result<LockGuard> {
        self.adopt_with(hand_over, AcquireOptions::new()).await
    }

    /// As [`adopt`](Self::adopt), with options: a lease, an owner.
    ///
    /// # Errors
    ///
    /// As [`adopt`](Self::adopt); [`Error::InvalidLease`], and [`Error::InvalidOwner`] also for a value, before anything is
    /// sent.
    ///
    /// # Cancel safety
    ///
    /// As [`adopt`](Self::adopt).
    pub async fn adopt_with(&self, hand_over: &HandOver, options: AcquireOptions) -> Result<LockGuard> {
        let Inner::One(Single { anchor, kind }) = &self.inner else {
            return Err(Error::CannotHandOver {
                lock: self.name().to_owned(),
                reason: "it is several locks as one; adopt with the lock that was handed over",
            });
        };
        let from = hand_over.owner_for(kind.about().family, kind.name())?;
        let adopt = async {
            let entered = Acquire::adopting(anchor, kind, &options, from)?.adopt().await?;
            Ok(LockGuard::new(Arc::clone(anchor), entered))
        };
        if self.owner_per_acquire { OwnerId::scope(adopt).await } else { adopt.await }
    }

    /// Gives up one hold of `owner`, without a guard: after [`LockGuard::forget`], or in another process.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// let owner = lock.lock().await?.forget();
    /// lock.release(&owner).await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if this owner does not hold the lock; nothing is changed then. [`Error::Store`] and
    /// [`Error::Unconfirmed`] if the server did not answer.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release goes on when the future is dropped, and where it was not answered. Of what was handed over
    /// the count is not this client's alone: the release is repeated while the server records the count that it was sent
    /// for, and counts as done once the server records another.
    pub async fn release(&self, owner: &OwnerId) -> Result<()> {
        match &self.inner {
            Inner::One(single) => single.anchor.release_owner(&single.kind, owner).await,
            Inner::Several(several) => several.release(owner).await,
        }
    }

    /// Lets the holds of `owner` live for at least `lease` from now, 10 ms to 10 years. Never shortens.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock, owner: nestlock::OwnerId) -> nestlock::Result<()> {
    /// lock.extend(&owner, std::time::Duration::from_secs(60)).await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if this owner does not hold the lock; nothing is changed then. [`Error::NotExpirable`] if the record
    /// has no TTL; [`Error::InvalidLease`]; [`Error::Store`] and [`Error::Unconfirmed`] if the server did not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the lock may or may not have been extended.
    pub async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()> {
        match &self.inner {
            Inner::One(single) => single.anchor.extend(&single.kind, owner, lease).await,
            Inner::Several(several) => several.extend(owner, lease).await,
        }
    }

    /// Frees the lock, whoever holds it, and wakes a waiter; `false`: nobody held it.
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
    /// As [`inspect`](Self::inspect); [`Error::Unconfirmed`] if it may have been freed.
    ///
    /// # Cancel safety
    ///
    /// Dropped midway, the lock may or may not have been freed.
    pub async fn force_unlock(&self) -> Result<bool> {
        match &self.inner {
            Inner::One(single) => single.anchor.force_unlock(&single.kind).await,
            Inner::Several(several) => several.force_unlock().await,
        }
    }

    /// Who holds the lock and for how long, as the server saw it a moment ago; `None`: nobody does. One request.
    ///
    /// Of several locks as one: whoever holds all of them, and for the shortest time. Of a RedLock: whoever holds most.
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
    /// [`Error::WrongLockKind`] and [`Error::WrongType`] if something else lives at this name; [`Error::Store`] if the server
    /// did not answer; [`Error::NoQuorum`] if too few of a RedLock's servers did.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn inspect(&self) -> Result<Option<Inspection>> {
        match &self.inner {
            Inner::One(single) => Ok(match single.anchor.inspect(&single.kind).await? {
                Inspected::Held { holders, ttl } => Some(Inspection { holders, remaining: ttl }),
                _ => None,
            }),
            Inner::Several(several) => several.inspect().await,
        }
    }

    /// Whether anybody holds the lock, as the server saw it a moment ago. Of several locks as one: whether so many are held
    /// that nobody else can have it.
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
            Inner::One(_) => Ok(self.inspect().await?.is_some()),
            Inner::Several(several) => several.is_locked().await,
        }
    }

    /// Whether `owner` holds the lock, as the server saw it a moment ago: [`hold_count`](Self::hold_count) above 0, and as there,
    /// never so of a task and a [`mutex`](crate::LockClient::mutex). Of a lock in one's own hands the
    /// [guard](LockGuard::is_lost) tells, without a request.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient, lock: nestlock::Lock) -> nestlock::Result<()> {
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

    /// How often `owner` holds the lock, as the server saw it a moment ago.
    ///
    /// Each acquire of a [`mutex`](crate::LockClient::mutex) is an owner of its own: there the count of
    /// [`current_owner`](crate::LockClient::current_owner) is 0 also while the task holds it, and the guard's
    /// [`owner`](LockGuard::owner) is who to ask for.
    ///
    /// ```no_run
    /// # async fn example(client: nestlock::LockClient, lock: nestlock::Lock) -> nestlock::Result<()> {
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
            Inner::One(_) => Ok(self.inspect().await?.map_or(0, |held| held.hold_count(owner))),
            Inner::Several(several) => several.hold_count(owner).await,
        }
    }

    /// Who holds the lock, as the server saw it a moment ago; of several readers, one.
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
        Ok(self.inspect().await?.and_then(|held| held.holders.into_iter().next()).map(|(owner, _)| owner))
    }

    /// How long the record lives unless it is renewed, to the millisecond; `None`: nobody holds the lock, or the record
    /// has no TTL.
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
            Inner::One(_) => Ok(self.inspect().await?.and_then(|held| held.remaining)),
            Inner::Several(several) => several.remaining_lease().await,
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

    /// The one way in; `None`: busy until the wait was over.
    async fn acquire(&self, wait: Wait, options: &AcquireOptions) -> Result<Option<LockGuard>> {
        if self.owner_per_acquire {
            // in a box, so that waiters without it stay small
            return Box::pin(OwnerId::scope(self.acquire_as_caller(wait, options))).await;
        }
        self.acquire_as_caller(wait, options).await
    }

    async fn acquire_as_caller(&self, wait: Wait, options: &AcquireOptions) -> Result<Option<LockGuard>> {
        let mut observed = Observed::begin(self, wait);
        let outcome = match observed.span() {
            Some(span) => Box::pin(self.acquire_unobserved(wait, options).instrument(span)).await,
            None => self.acquire_unobserved(wait, options).await,
        };
        observed.end(&outcome);
        outcome
    }

    async fn acquire_unobserved(&self, wait: Wait, options: &AcquireOptions) -> Result<Option<LockGuard>> {
        match &self.inner {
            Inner::One(Single { anchor, kind }) => {
                let entered = Acquire::new(anchor, kind, options, wait)?.run().await?;
                Ok(entered.map(|entered| LockGuard::new(Arc::clone(anchor), entered)))
            }
            Inner::Several(several) => several.acquire(wait, options).await,
        }
    }
}

/// What is asked for where nothing is.
static PLAIN: AcquireOptions = AcquireOptions { lease: None, rare: None };
