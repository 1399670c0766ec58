//! A semaphore: a number that goes down and up, with or without guards. Redisson's `RSemaphore`.
//!
//! Redisson's counter has no owners, so a process that dies keeps its permits for ever. Here each
//! acquire through a guard is a permit with a lease, in a sorted set next to the counter.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{Arg, Call};

use super::{
    Lock,
    permits::{MOST, PermitRecord},
};

use crate::{
    engine::{Anchor, Kind},
    error::{Error, LossReason, Result},
    guard::LockGuard,
    keys::{LockName, SEMAPHORE_LEASES, SEMAPHORE_REQUEST, request_key},
    owner::OwnerId,
    store::script,
};

script!(
    TRY_SET = "semaphore/try_set",
    parts = ["counter", "once", "time"],
    keys = 3,
    args = 2
);
script!(
    ADD = "semaphore/add",
    parts = ["counter", "once", "time"],
    keys = 3,
    args = 2
);
script!(
    DRAIN = "semaphore/drain",
    parts = ["counter", "once", "time"],
    keys = 3,
    args = 0
);
script!(
    FORGET = "semaphore/forget",
    parts = ["permit", "once", "time"],
    keys = 2,
    args = 1
);

/// How long permits that are to be forgotten keep a lease, until the server has forgotten it.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(60);

/// A number of permits that any process may change. See
/// [`LockClient::semaphore`](crate::LockClient::semaphore).
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let slots = client.semaphore("slots")?;
/// slots.try_set_permits(3).await?; // the first one says how many there are
/// let guard = slots.acquire().await?;
/// guard.unlock().await
/// # }
/// ```
///
/// If in doubt, take [`Permits`](crate::Permits): they know how many there are, so no caller can
/// give back more than it took. A semaphore is for programs that share a `RSemaphore` with Redisson,
/// and for permits that one process takes and another gives back ([`forget`](Self::forget),
/// [`add_permits`](Self::add_permits)).
///
/// # Guards
///
/// Each acquire takes permits of its own, with a lease. The [`LockGuard`] is that of a lock: the
/// watchdog renews it, a lost one is reported ([`LockGuard::lost`]), and a drop gives it back. An
/// acquire whose reply is lost takes its permits once, or gives them back.
///
/// # When a holder dies
///
/// The permits of a guard come back when its lease has ended and a nestlock client acquires one next: a
/// Redisson process does not know of the lease, and an acquire that finds too few changes nothing. The
/// same holds for what was released in a cluster while the counter was on another node than the leases.
/// Permits without a guard, as all of Redisson's, stay taken until
/// [`add_permits`](Self::add_permits), and so do those of guards if their key
/// (`nestlock_semaphore_leases:{name}`) is deleted or evicted.
///
/// # Changes
///
/// Each change of the number is one request, whose reply the server knows for a minute: the client
/// repeats it if the reply is lost, and it counts once. After [`Error::Unconfirmed`] the client does
/// nothing more. [`replicas`](crate::LockClientBuilder::replicas) are for acquires, not for changes. In
/// a cluster, a slot that is being moved refuses changes, which may be made again.
#[derive(Debug, Clone)]
pub struct Semaphore {
    anchor: Arc<Anchor>,
    record: PermitRecord,
}

impl Semaphore {
    pub(crate) fn new(anchor: &Arc<Anchor>, name: &LockName) -> Self {
        Self {
            anchor: Arc::clone(anchor),
            record: PermitRecord::of_semaphore(name),
        }
    }

    /// Returns the name, with the client's prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        self.record.name()
    }

    /// Says how many permits there are, 0 to 2,147,483,647, if that was not said before. Returns
    /// whether it was this call. One request.
    ///
    /// Without such a number, there are no permits, and acquires wait.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`] if `total` is above that; otherwise as [`Lock::inspect`];
    /// [`Error::Unconfirmed`] if the number may have been set. The call may be repeated.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the number may or may not have been set.
    pub async fn try_set_permits(&self, total: u32) -> Result<bool> {
        if total > MOST {
            let reason = format!("there cannot be {total} permits; use 0 to {MOST}");
            return Err(self.record.refuse(reason));
        }
        self.change(&self.record.try_set(total)).await
    }

    /// Returns whether the request changed anything.
    async fn change(&self, call: &Call) -> Result<bool> {
        Ok(self.anchor.change_count(self.name(), call).await? == 1)
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

    /// Takes `n` permits at once, and waits for them without limit: see
    /// [`Permits::acquire_many`](crate::Permits::acquire_many).
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
    /// what takes a [`Lock`]. See [`Permits::many`](crate::Permits::many).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`] if `n` is 0 or above 100; nothing is sent.
    pub fn many(&self, n: u32) -> Result<Lock> {
        Ok(self.record.taking_checked(n)?.into_lock(&self.anchor))
    }

    fn one(&self) -> Lock {
        self.record.taking(1).into_lock(&self.anchor)
    }

    /// Makes `count` more permits available, whether new ones or ones that were taken without a
    /// guard, and wakes waiters; below 0, takes them away. Redisson's `release` and `addPermits`.
    ///
    /// More may be taken away than are available: that many must come back before the next acquire.
    ///
    /// ```no_run
    /// # async fn example(slots: nestlock::Semaphore) -> nestlock::Result<()> {
    /// slots.forget(&slots.acquire().await?).await?; // this process takes it,
    /// slots.add_permits(1).await // and another one gives it back
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidCount`] if `count` is 0, or if there would be more than 2,147,483,647
    /// permits, or fewer than the same number below 0: nothing was changed. Otherwise as
    /// [`Lock::inspect`]. After [`Error::Unconfirmed`] the number may have been changed; a request
    /// that was repeated within the command timeout was counted once.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, the number may or may not have been changed.
    pub async fn add_permits(&self, count: i32) -> Result<()> {
        let refuse = |reason: &str| Err(self.record.refuse(reason.to_owned()));
        if count == 0 {
            return refuse("0 more permits; add or take away at least 1");
        }
        if self.change(&self.record.add(count)).await? {
            return Ok(());
        }
        refuse("there would be more permits than 2147483647, or as many below 0")
    }

    /// Takes away all permits that are available, and returns how many there were. Redisson's
    /// `drainPermits`.
    ///
    /// # Errors
    ///
    /// As [`Lock::inspect`]. After [`Error::Unconfirmed`] they may have been taken away.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, they may or may not have been taken away.
    pub async fn drain_permits(&self) -> Result<u32> {
        self.anchor
            .change_count(self.name(), &self.record.drain())
            .await
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
        self.anchor
            .count(self.name(), &self.record.available())
            .await
    }

    /// Keeps a guard's permits taken after its process, and without a lease: any process gives them
    /// back with [`add_permits`](Self::add_permits). tokio's `SemaphorePermit::forget`. Two requests.
    ///
    /// From here on, the guard holds nothing.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`] if the guard is not one of this semaphore and client: it still holds what it
    /// held. [`Error::Lost`] if any of its permits was lost: the others come back when their leases end.
    /// Otherwise as [`LockGuard::hand_over`]: [`LockGuard::remaining`] shows whether the guard still
    /// holds them. If not, they come back within a minute, or, after [`Error::Unconfirmed`], may be
    /// forgotten.
    ///
    /// # Cancel safety
    ///
    /// If dropped midway, as after [`Error::Unconfirmed`].
    pub async fn forget(&self, guard: &LockGuard) -> Result<()> {
        let (owner, record) = (guard.owner(), &self.record);
        let Some(taken) = guard.entries(&self.anchor, record.record()) else {
            return Err(Error::NotHeld {
                lock: self.name().to_owned(),
                owner,
            });
        };
        // under a name that no request of the guard's can reach any more
        let handed = guard.hand_over(FORGOTTEN_WITHIN).await?;
        let last = handed.owner_for(record.about().family, self.name())?;
        if self.change(&record.forget(last, taken)).await? {
            return Ok(());
        }
        Err(Error::Lost {
            lock: self.name().to_owned(),
            owner,
            reason: LossReason::RecordMissing,
        })
    }

    /// Returns the owners of permits with a guard, and how many each has, as the server saw it a
    /// moment ago. One request.
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

impl PermitRecord {
    fn try_set(&self, total: u32) -> Call {
        let [leases, counter] = self.keys();
        let args = [total.into(), self.channel().into()];
        Call::new(&TRY_SET, [self.request(), counter, leases], args)
    }

    fn add(&self, count: i32) -> Call {
        let [leases, counter] = self.keys();
        let args = [Arg::Text(count.to_string().into()), self.channel().into()];
        Call::new(&ADD, [self.request(), counter, leases], args)
    }

    fn drain(&self) -> Call {
        let [leases, counter] = self.keys();
        Call::new(&DRAIN, [self.request(), counter, leases], [])
    }

    /// Returns a call that removes an owner's permits from the set.
    fn forget(&self, owner: &OwnerId, takes: u16) -> Call {
        let [leases, _] = self.keys();
        let last = self.taking(takes.into()).last(owner);
        Call::new(&FORGET, [self.request(), leases], [last])
    }

    /// Returns the key of a request that is made once, even if it is sent twice.
    fn request(&self) -> Arc<str> {
        request_key(self.record(), SEMAPHORE_LEASES, SEMAPHORE_REQUEST)
    }
}
