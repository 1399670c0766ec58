//! The trait with the methods of [`Lock`], for generic code and trait objects.

use std::{fmt, time::Duration};

use async_trait::async_trait;

use crate::{
    error::Result,
    guard::LockGuard,
    hand_over::HandOver,
    lock::{Inspection, Lock},
    options::AcquireOptions,
    owner::OwnerId,
};

/// The methods of a [`Lock`] as a trait, for code that takes any lock: `&dyn RLock`, `impl RLock`.
/// After Redisson's `RLock`.
///
/// Each method behaves like the one of the same name on [`Lock`], which needs no import; see there
/// for errors and cancel safety. Only `Lock` implements this trait, since only a lock can create
/// guards. To test code that takes it, use a real lock:
///
/// ```no_run
/// use nestlock::{RLock, Result};
///
/// async fn alone<T>(lock: &dyn RLock, work: impl Future<Output = T>) -> Result<T> {
///     let guard = lock.lock().await?;
///     let done = guard.run_until_lost(work).await?;
///     guard.unlock().await?;
///     Ok(done)
/// }
/// ```
///
/// # In tests
///
/// The crate `nestlock-embedded` starts a server inside the test's process in one line, without any
/// other program, so you can test code with real locks and with the errors that it may meet:
///
/// ```
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use nestlock::{LockClient, RLock, Result};
/// use nestlock_embedded::EmbeddedServer;
///
/// /// Returns whether the work was done here.
/// async fn done_once(lock: &dyn RLock) -> Result<bool> {
///     let Some(guard) = lock.try_lock().await? else { return Ok(false) };
///     guard.run_until_lost(async { /* the work */ }).await?;
///     guard.unlock().await?;
///     Ok(true)
/// }
///
/// let server = EmbeddedServer::start()?;
/// let client = LockClient::connect(server.url()).await?;
/// let lock = client.mutex("report")?;
/// assert!(done_once(&lock).await?);
/// // busy
/// let guard = lock.lock().await?;
/// assert!(!done_once(&lock).await?);
/// // lost
/// lock.force_unlock().await?;
/// assert!(guard.unlock().await.is_err_and(|error| error.is_lost()));
/// // the server is gone
/// drop(server);
/// assert!(done_once(&lock).await.is_err_and(|error| error.is_transient()));
/// # Ok(())
/// # }
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
/// # runtime.block_on(example()).unwrap();
/// ```
#[async_trait]
pub trait RLock: sealed::Sealed + fmt::Debug + Send + Sync {
    /// As [`Lock::name`].
    fn name(&self) -> &str;
    /// As [`Lock::lock`].
    async fn lock(&self) -> Result<LockGuard>;
    /// As [`Lock::lock_with`].
    async fn lock_with(&self, options: AcquireOptions) -> Result<LockGuard>;
    /// As [`Lock::try_lock`].
    async fn try_lock(&self) -> Result<Option<LockGuard>>;
    /// As [`Lock::try_lock_with`].
    async fn try_lock_with(&self, options: AcquireOptions) -> Result<Option<LockGuard>>;
    /// As [`Lock::try_lock_for`].
    async fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>>;
    /// As [`Lock::try_lock_for_with`].
    async fn try_lock_for_with(
        &self,
        wait: Duration,
        options: AcquireOptions,
    ) -> Result<Option<LockGuard>>;
    /// As [`Lock::adopt`].
    async fn adopt(&self, hand_over: &HandOver) -> Result<LockGuard>;
    /// As [`Lock::adopt_with`].
    async fn adopt_with(&self, hand_over: &HandOver, options: AcquireOptions) -> Result<LockGuard>;
    /// As [`Lock::release`].
    async fn release(&self, owner: &OwnerId) -> Result<()>;
    /// As [`Lock::extend`].
    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()>;
    /// As [`Lock::force_unlock`].
    async fn force_unlock(&self) -> Result<bool>;
    /// As [`Lock::inspect`].
    async fn inspect(&self) -> Result<Option<Inspection>>;
    /// As [`Lock::is_locked`].
    async fn is_locked(&self) -> Result<bool>;
    /// As [`Lock::is_held_by`].
    async fn is_held_by(&self, owner: &OwnerId) -> Result<bool>;
    /// As [`Lock::hold_count`].
    async fn hold_count(&self, owner: &OwnerId) -> Result<u32>;
    /// As [`Lock::holder`].
    async fn holder(&self) -> Result<Option<OwnerId>>;
    /// As [`Lock::remaining_lease`].
    async fn remaining_lease(&self) -> Result<Option<Duration>>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::lock::Lock {}
}

#[async_trait]
impl RLock for Lock {
    fn name(&self) -> &str {
        Self::name(self)
    }

    async fn lock(&self) -> Result<LockGuard> {
        Self::lock(self).await
    }

    async fn lock_with(&self, options: AcquireOptions) -> Result<LockGuard> {
        Self::lock_with(self, options).await
    }

    async fn try_lock(&self) -> Result<Option<LockGuard>> {
        Self::try_lock(self).await
    }

    async fn try_lock_with(&self, options: AcquireOptions) -> Result<Option<LockGuard>> {
        Self::try_lock_with(self, options).await
    }

    async fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>> {
        Self::try_lock_for(self, wait).await
    }

    async fn try_lock_for_with(
        &self,
        wait: Duration,
        options: AcquireOptions,
    ) -> Result<Option<LockGuard>> {
        Self::try_lock_for_with(self, wait, options).await
    }

    async fn adopt(&self, hand_over: &HandOver) -> Result<LockGuard> {
        Self::adopt(self, hand_over).await
    }

    async fn adopt_with(&self, hand_over: &HandOver, options: AcquireOptions) -> Result<LockGuard> {
        Self::adopt_with(self, hand_over, options).await
    }

    async fn release(&self, owner: &OwnerId) -> Result<()> {
        Self::release(self, owner).await
    }

    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()> {
        Self::extend(self, owner, lease).await
    }

    async fn force_unlock(&self) -> Result<bool> {
        Self::force_unlock(self).await
    }

    async fn inspect(&self) -> Result<Option<Inspection>> {
        Self::inspect(self).await
    }

    async fn is_locked(&self) -> Result<bool> {
        Self::is_locked(self).await
    }

    async fn is_held_by(&self, owner: &OwnerId) -> Result<bool> {
        Self::is_held_by(self, owner).await
    }

    async fn hold_count(&self, owner: &OwnerId) -> Result<u32> {
        Self::hold_count(self, owner).await
    }

    async fn holder(&self) -> Result<Option<OwnerId>> {
        Self::holder(self).await
    }

    async fn remaining_lease(&self) -> Result<Option<Duration>> {
        Self::remaining_lease(self).await
    }
}
