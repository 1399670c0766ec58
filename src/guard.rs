//! The held thing.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use crate::{
    engine::{
        Anchor,
        holds::{Hold, Ticket},
    },
    error::{Error, Result},
    owner::OwnerId,
};

/// One hold of a lock.
///
/// A guard remembers its owner: it may be moved to, and released by, any task or thread.
///
/// # Release on drop is not immediate
///
/// Dropping works from anywhere (another thread, no runtime, a panic, after the runtime has ended): the client's own
/// thread sends the release a moment later. Await [`LockGuard::unlock`] where the next step relies on it, and to learn
/// whether the lock was still held.
#[must_use = "dropped at once, the lock is released at once"]
#[clippy::has_significant_drop]
pub struct LockGuard {
    anchor: Arc<Anchor>,
    hold: Arc<Hold>,
    /// Taken when the hold is given up, or left without a guard.
    ticket: Option<Ticket>,
}

impl LockGuard {
    pub(crate) fn new(anchor: Arc<Anchor>, (hold, ticket): (Arc<Hold>, Ticket)) -> Self {
        Self { anchor, hold, ticket: Some(ticket) }
    }

    /// The lock's name, with the client's prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        self.hold.lock_name()
    }

    /// Who holds the lock.
    #[must_use]
    pub fn owner(&self) -> OwnerId {
        self.hold.owner()
    }

    /// The fencing token: higher than that of every earlier holder. `None` if the kind has none; see
    /// [`LockClient::fenced_lock`](crate::LockClient::fenced_lock).
    #[must_use]
    pub fn fencing_token(&self) -> Option<u64> {
        self.ticket.and_then(|ticket| ticket.token)
    }

    /// Releases this hold, and waits until the server has done so.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost before: what it guarded may have been touched by others.
    /// [`Error::NotHeld`] if the hold was released without this guard. [`Error::Store`] or [`Error::Unconfirmed`] if
    /// the server did not answer within the command timeout: the client goes on releasing in the background, and the
    /// hold is neither renewed nor valid any more.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it is polled, it releases as a dropped guard does. Once polled, the release goes on in the
    /// background when the future is dropped.
    pub async fn unlock(mut self) -> Result<()> {
        match self.ticket.take() {
            Some(ticket) => self.anchor.release(Arc::clone(&self.hold), Some(ticket)).await,
            None => Err(self.hold.not_held_error()),
        }
    }

    /// Resolves when the lock is lost, no later than its lease ends on this client's monotonic clock; or when the hold
    /// was released without this guard. Never resolves while the lock is held. For `select!`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn lost(&self) -> Error {
        loop {
            let ended = self.hold.ended();
            tokio::pin!(ended);
            ended.as_mut().enable();
            let remaining = match self.remaining_or_error() {
                Ok(remaining) => remaining,
                Err(error) => return error,
            };
            tokio::select! {
                () = ended => {}
                () = self.anchor.sleep_until(std::time::Instant::now() + remaining) => {}
            }
        }
    }

    /// Whether the lock is lost. Looks at this client's clock and books only, without a request.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.remaining_or_error().is_err()
    }

    /// How much longer the lock may be relied on without a renewal: the lease, counted from before the request was
    /// sent, less a drift allowance of 1 % + 2 ms. Zero: lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.remaining_or_error().unwrap_or(Duration::ZERO)
    }

    fn remaining_or_error(&self) -> Result<Duration> {
        match self.ticket {
            Some(ticket) => self.hold.remaining(ticket),
            None => Err(self.hold.not_held_error()),
        }
    }

    /// Lets the lock live for at least `lease` from now: 10 ms to 10 years, never less than it has already.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost; [`Error::InvalidLease`]; [`Error::Store`] and [`Error::Unconfirmed`] if
    /// the server did not answer. The lock stays as it was.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropped midway, the lock may or may not have been extended.
    pub async fn extend(&self, lease: Duration) -> Result<()> {
        self.remaining_or_error()?;
        self.anchor.extend(self.hold.kind(), &self.hold.owner(), lease).await?;
        // an extension that was refused has ended the hold
        self.remaining_or_error().map(drop)
    }

    /// Lets go of the guard without releasing: the lock stays held, and is renewed if it has no lease of its own.
    ///
    /// Release it with [`RLock::release`](crate::RLock::release) and the owner returned, here or in another process.
    /// This is the one way to hand a hold over: the next hold of this owner has another name, so that a late release by
    /// the other process meets nobody. Renewal lasts as long as this client has a lock, a guard or itself alive.
    /// Where another process does so, this client notices at its next renewal, or when this owner next acquires: that call
    /// then answers [`Error::Lost`], once.
    #[must_use = "the owner is what the lock can be released with"]
    pub fn forget(mut self) -> OwnerId {
        self.ticket = None;
        // another process may release it, and do so late: the next hold has another name
        self.anchor.holds.retire_names();
        self.hold.owner()
    }

    /// Runs `future` while the lock is held; when the lock is lost, `future` is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] if the lock was lost before `future` ended.
    ///
    /// # Cancel safety
    ///
    /// As cancel safe as `future`. The guard stays.
    ///
    /// ```no_run
    /// # async fn example(lock: nestlock::Lock) -> nestlock::Result<()> {
    /// use nestlock::RLock;
    ///
    /// let guard = lock.lock().await?;
    /// let total = guard.run_until_lost(async { 40 + 2 }).await?;
    /// guard.unlock().await?;
    /// # let _ = total; Ok(())
    /// # }
    /// ```
    pub async fn run_until_lost<F: Future>(&self, future: F) -> Result<F::Output> {
        tokio::select! {
            biased;
            error = self.lost() => Err(error),
            output = future => Ok(output),
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        match self.ticket.take() {
            Some(ticket) => self.anchor.release_later(&self.hold, ticket),
            None => self.anchor.tidy(&self.hold),
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("lock", &self.name())
            .field("owner", &self.owner())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
