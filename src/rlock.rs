//! The contract of every lock kind.

use std::{any::Any, fmt, time::Duration};

use async_trait::async_trait;

use crate::{error::Result, guard::LockGuard, options::AcquireOptions, owner::OwnerId};

/// A distributed lock that its owner may take again while holding it, after Redisson's `RLock`.
///
/// An owner is a tokio task, unless you say otherwise: see [`OwnerId`] and [`AcquireOptions::owner`]. Outside of tokio's
/// tasks it is the thread: **tasks of another executor hold the lock together** unless each has an [`OwnerId::scope`].
///
/// A lock says who *may* act; it cannot stop a process that was paused past its lease from acting late. Only a fencing
/// token that the guarded resource checks can. Watch [`LockGuard::lost`], and keep what you do under a lock short of
/// its lease.
#[async_trait]
pub trait RLock: Any + fmt::Debug + Send + Sync {
    /// The lock's name, with the client's prefix.
    fn name(&self) -> &str;

    /// Acquires as the options say; `None`: the lock was busy until the wait was over.
    ///
    /// One round trip when nobody holds the lock. A re-entry counts one hold more, and never shortens the lease.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost) if this owner held the lock and this call found out that it does not any
    /// more; [`Error::WrongLockKind`](crate::Error::WrongLockKind) and [`Error::WrongType`](crate::Error::WrongType) if
    /// something else lives at this name; [`Error::Store`](crate::Error::Store) and
    /// [`Error::Unconfirmed`](crate::Error::Unconfirmed) if the server did not answer within the wait, a round trip and 40 ms more
    /// (without a wait: within the command timeout; without a limit: within the client's
    /// [`outage_patience`](crate::LockClientBuilder::outage_patience)).
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped at any point, nothing stays held. A request that was under way is undone by the client in
    /// the background; [`LockClient::idle`](crate::LockClient::idle) waits for that.
    async fn acquire(&self, options: AcquireOptions) -> Result<Option<LockGuard>>;

    /// Gives up one hold of `owner`, without a guard: after [`LockGuard::forget`], or in another process.
    ///
    /// # Errors
    ///
    /// [`Error::NotHeld`](crate::Error::NotHeld) if this owner does not hold the lock; nothing is changed then.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release goes on when the future is dropped. For what was handed over it is not repeated: without an
    /// answer, the hold may or may not have been given up.
    async fn release(&self, owner: &OwnerId) -> Result<()>;

    /// Lets the holds of `owner` live for at least `lease` from now; `false`: this owner does not hold the lock.
    ///
    /// Never shortens. The lease may be 10 ms to 10 years.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the lock may or may not have been extended.
    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<bool>;

    /// Frees the lock, whoever holds it, and wakes a waiter; `false`: nobody held it.
    ///
    /// The holder is not asked. It learns of the loss when it next renews or releases.
    ///
    /// # Cancel safety
    ///
    /// Dropped midway, the lock may or may not have been freed.
    async fn force_unlock(&self) -> Result<bool>;

    /// Whether anybody holds the lock, as the server saw it a moment ago.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLockKind`](crate::Error::WrongLockKind) and [`Error::WrongType`](crate::Error::WrongType) if something
    /// else lives at this name; [`Error::Store`](crate::Error::Store) if the server did not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    async fn is_locked(&self) -> Result<bool>;

    /// How often `owner` holds the lock, as the server saw it a moment ago.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLockKind`](crate::Error::WrongLockKind) and [`Error::WrongType`](crate::Error::WrongType) if something
    /// else lives at this name; [`Error::Store`](crate::Error::Store) if the server did not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    async fn hold_count(&self, owner: &OwnerId) -> Result<u32>;

    /// Who holds the lock, as the server saw it a moment ago.
    ///
    /// A string that another program wrote may be no UTF-8: each byte that cannot be read is U+FFFD, and such an owner can
    /// not be released by its text.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLockKind`](crate::Error::WrongLockKind) and [`Error::WrongType`](crate::Error::WrongType) if something
    /// else lives at this name; [`Error::Store`](crate::Error::Store) if the server did not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    async fn holder(&self) -> Result<Option<OwnerId>>;

    /// How long the record lives unless it is renewed, in milliseconds precision; `None`: nobody holds the lock, or the
    /// record has no TTL.
    ///
    /// # Errors
    ///
    /// [`Error::WrongLockKind`](crate::Error::WrongLockKind) and [`Error::WrongType`](crate::Error::WrongType) if something
    /// else lives at this name; [`Error::Store`](crate::Error::Store) if the server did not answer.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    async fn remaining_lease(&self) -> Result<Option<Duration>>;

    /// Acquires, and waits for it without limit. The watchdog renews the lease until the guard is released.
    ///
    /// # Errors
    ///
    /// As [`RLock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`RLock::acquire`].
    async fn lock(&self) -> Result<LockGuard> {
        loop {
            // without a limit to the wait, None does not come
            if let Some(guard) = self.acquire(AcquireOptions::new().wait_forever()).await? {
                return Ok(guard);
            }
        }
    }

    /// Acquires if nobody else holds the lock; never waits for a holder.
    ///
    /// # Errors
    ///
    /// As [`RLock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`RLock::acquire`].
    async fn try_lock(&self) -> Result<Option<LockGuard>> {
        self.acquire(AcquireOptions::new()).await
    }

    /// Acquires, and waits for it at most `wait`.
    ///
    /// # Errors
    ///
    /// As [`RLock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// As [`RLock::acquire`].
    async fn try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>> {
        self.acquire(AcquireOptions::new().wait(wait)).await
    }
}
