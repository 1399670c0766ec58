//! The [`Lock`] type: a lock of one kind, or a combination of several locks.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    engine::{Anchor, Kind},
    error::Result,
    guard::LockGuard,
    options::{AcquireOptions, Wait},
    owner::OwnerId,
};

/// A distributed lock, created by one of the constructors of [`LockClient`](crate::LockClient).
/// Cheap to clone.
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let lock = client.mutex("invoice:7")?;
/// let guard = lock.lock().await?;
/// // one holder at a time, across all processes
/// guard.unlock().await
/// # }
/// ```
///
/// # Who holds it
///
/// A guard belongs to the owner that acquired it, wherever the guard is moved. With
/// [`mutex`](crate::LockClient::mutex), and after [`owner_per_acquire`](Self::owner_per_acquire),
/// each acquire is a separate owner, as with `tokio::sync::Mutex`. With the other constructors the
/// owner is the tokio task that makes the call (see [`OwnerId`]): **a guard handed to another task
/// is still owned by the task that locked**, which may take a reentrant lock again. Outside tokio's
/// tasks the owner is the thread: tasks of another executor that share a thread hold a lock
/// together, unless each has an [`OwnerId::scope`].
///
/// # What it cannot do
///
/// A lock says who *may* act. It cannot stop a process that was paused past its lease from acting
/// late; only a fencing token that the guarded resource checks can. Watch [`LockGuard::lost`], and
/// keep the work under a lock shorter than its lease.
#[derive(Debug, Clone)]
pub struct Lock {
    pub(crate) inner: LockInner,
    /// Whether each acquire is an owner of its own.
    pub(crate) owner_per_acquire: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum LockInner {
    One(SingleLock),
    Several(Arc<dyn Several>),
}

/// The methods of [`Lock`] on a combination of several locks: all members, or most of them.
#[async_trait]
pub(crate) trait Several: fmt::Debug + Send + Sync {
    fn name(&self) -> &str;
    /// Its name in metrics and logs.
    fn label(&self) -> &'static str;
    fn members(&self) -> &[Lock];
    async fn acquire(
        self: Arc<Self>,
        wait: Wait,
        options: &AcquireOptions,
    ) -> Result<Option<LockGuard>>;
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
pub(crate) struct SingleLock {
    pub(crate) anchor: Arc<Anchor>,
    pub(crate) kind: Arc<dyn Kind>,
}

/// A lock's holders and remaining lease, as the server saw them a moment ago.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// let lock = client.reentrant_lock("printer")?;
/// let guard = lock.lock().await?;
/// let inspection = lock.inspect().await?.expect("it is held");
/// assert_eq!(inspection.holders, [(guard.owner(), 1)]);
/// guard.unlock().await?;
/// assert_eq!(lock.inspect().await?, None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The owners and their hold counts: one owner, or all readers.
    ///
    /// A string written by another program may not be UTF-8: each unreadable byte becomes U+FFFD,
    /// and such an owner cannot be released by its text.
    pub holders: Vec<(OwnerId, u32)>,
    /// How long the record lives unless it is renewed, to the millisecond; `None` if it has no TTL.
    pub remaining: Option<Duration>,
}

impl Inspection {
    /// Returns the hold count of `owner`, whatever suffix its name has.
    #[must_use]
    pub fn hold_count(&self, owner: &OwnerId) -> u32 {
        // An owner that left its hold to its lease and acquired again is recorded under both names.
        let is_it = |(holder, _): &&(OwnerId, u32)| owner.is_exact() && holder == owner;
        let exact = self.holders.iter().find(is_it).map(|(_, holds)| *holds);
        let under_any = self
            .holders
            .iter()
            .filter(|(holder, _)| holder.base() == owner.base());
        exact.unwrap_or_else(|| under_any.map(|(_, holds)| holds).sum())
    }
}
