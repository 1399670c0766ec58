#![doc = include_str!("locked.md")]

use nestlock::Error;

/// Why a function under [`#[locked]`](macro@crate::locked), or a request under a `LockLayer`, has
/// no result of its own.
///
/// ```
/// use nestlock::{Error, LockClient};
/// use nestlock_recipes::{LockedError, locked};
///
/// #[locked("report", client = client, wait = "0s")]
/// async fn report(client: &LockClient) -> Result<&'static str, LockedError> {
///     Ok("written")
/// }
///
/// async fn is_busy(client: &LockClient) -> bool {
///     report(client).await.is_err_and(|error| error.is_busy())
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockedError {
    /// Another owner held the lock until the wait was over. The body did not run.
    #[error("lock {lock:?} is held by another owner; try again later")]
    #[non_exhaustive]
    Busy {
        /// The lock's name, with the client's prefix.
        lock: String,
    },
    /// The lock was lost while the body ran: another holder may have changed what it protects. The
    /// body was dropped, or had just ended.
    #[error("the lock was lost while it was needed: {0}")]
    Lost(#[source] Error),
    /// The lock could not be acquired. The body did not run.
    #[error(transparent)]
    Lock(Error),
}

impl LockedError {
    /// Returns whether the body did not run because the lock was held: by another owner, or by the
    /// caller itself in a way that waiting does not change ([`Error::is_conflict`]).
    ///
    /// [`Error::is_conflict`]: nestlock::Error
    #[must_use]
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Busy { .. } => true,
            Self::Lock(error) => error.is_conflict(),
            Self::Lost(_) => false,
        }
    }
}

/// The functions that the expansion of `#[locked]` calls. Not part of the API.
#[doc(hidden)]
pub mod expansion {
    use std::{borrow::Borrow, time::Duration};

    use nestlock::{AcquireOptions, Error, Lock, LockClient, LockGuard, RedLockOptions, Result};

    use super::LockedError;

    /// Returns a RedLock over clients, which may be owned, borrowed or in an `Arc`.
    pub fn red<C: Borrow<LockClient>>(
        clients: &[C],
        name: &str,
        options: RedLockOptions,
    ) -> Result<Lock> {
        LockClient::red_lock(clients.iter().map(Borrow::borrow), name, options)
    }

    /// Acquires the lock. Without a `wait`, waits without limit.
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    ///
    /// [`Lock::lock`]: nestlock::Lock
    pub async fn acquire(
        lock: Result<Lock>,
        wait: Option<Duration>,
        options: AcquireOptions,
    ) -> Result<LockGuard, LockedError> {
        let lock = lock.map_err(LockedError::Lock)?;
        let acquired = match wait {
            None => lock.lock_with(options).await.map(Some),
            Some(Duration::ZERO) => lock.try_lock_with(options).await,
            Some(wait) => lock.try_lock_for_with(wait, options).await,
        };
        match acquired {
            Ok(Some(guard)) => Ok(guard),
            Ok(None) => Err(LockedError::Busy {
                lock: lock.name().to_owned(),
            }),
            Err(error) => Err(LockedError::Lock(error)),
        }
    }

    /// Releases the lock, and returns the result of a body that ran under
    /// [`LockGuard::run_until_lost`], or the loss of the lock.
    ///
    /// # Cancel safety
    ///
    /// As [`LockGuard::unlock`].
    ///
    /// [`LockGuard::run_until_lost`]: nestlock::LockGuard
    /// [`LockGuard::unlock`]: nestlock::LockGuard
    pub async fn release<T, E: From<LockedError>>(
        guard: LockGuard,
        outcome: Result<std::result::Result<T, E>>,
    ) -> std::result::Result<T, E> {
        let output = outcome.map_err(LockedError::Lost)?;
        let released = unlock(Some(guard)).await;
        let value = output?;
        released?;
        Ok(value)
    }

    /// Releases the lock; only a loss is an error. `None`: a clone of the guard remains, and the
    /// release follows when the last one is dropped.
    pub(crate) async fn unlock(guard: Option<LockGuard>) -> std::result::Result<(), LockedError> {
        let Some(guard) = guard else { return Ok(()) };
        match guard.unlock().await {
            Err(loss @ (Error::Lost { .. } | Error::NotHeld { .. })) => {
                Err(LockedError::Lost(loss))
            }
            // the lock was held to the end, and the client keeps releasing it in the background
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Names a type where an expression is needed. Never called.
    #[must_use]
    pub fn never<T>() -> T {
        unreachable!("the expansion calls this only behind `if false`")
    }
}
