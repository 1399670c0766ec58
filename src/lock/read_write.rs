//! The read-write lock: many readers or one writer. Redisson's `RReadWriteLock`.
//!
//! Two kinds at one record. Neither side starves, as each leaves a mark that holds the other one back, for two seconds at most
//! from the first who is held back:
//!
//! - A writer that waits for readers leaves an intent: it waits only for those that read already.
//! - Readers that wait for a writer are noted, and the next writer waits for them. Those that an intent holds back are noted for
//!   the writer after that. So a reader waits for two writes at most, however far it is, and readers come in together.

use std::sync::Arc;

use super::Lock;
use crate::{
    engine::{About, Kind, Sibling, Terms, Verbs, Wake},
    error::Result,
    guard::LockGuard,
    keys::LockName,
    owner::OwnerId,
    store::{Arg, Call, Script, script},
};

script!(READ_ACQUIRE = "read_write/read_acquire", parts = ["mode", "raises", "patience", "leave"], keys = 3, args = 5);
script!(READ_RELEASE = "read_write/read_release", parts = ["fewer", "life", "leave"], keys = 2, args = 4);
script!(READ_RELEASE_RECORD = "read_write/read_release_record", parts = ["fewer"], keys = 1, args = 3);
script!(READ_TRANSFER = "read_write/read_transfer", parts = ["moves", "life"], keys = 1, args = 4);
script!(READ_RENEW = "read_write/read_renew", parts = ["renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(READ_INSPECT = "read_write/read_inspect", keys = 1, args = 0);
script!(WRITE_ACQUIRE = "read_write/write_acquire", parts = ["mode", "raises", "patience", "time"], keys = 3, args = 4);
script!(WRITE_RELEASE = "read_write/write_release", parts = ["fewer", "life"], keys = 2, args = 4);
script!(WRITE_RELEASE_RECORD = "read_write/write_release_record", parts = ["fewer"], keys = 1, args = 3);
script!(WRITE_TRANSFER = "read_write/write_transfer", parts = ["moves"], keys = 1, args = 3);
script!(WRITE_RENEW = "read_write/write_renew", parts = ["renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(FORCE_RELEASE = "read_write/force_release", parts = ["mode"], keys = 1, args = 3);
script!(WRITE_INSPECT = "read_write/write_inspect", parts = ["mode"], keys = 1, args = 0);

/// A lock with two sides: any number of owners may read, or one may write. See
/// [`LockClient::read_write_lock`](crate::LockClient::read_write_lock).
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let prices = client.read_write_lock("prices")?;
/// let guard = prices.read().await?; // beside other readers
/// guard.unlock().await?;
/// let guard = prices.write().await?; // alone
/// guard.unlock().await
/// # }
/// ```
///
/// Each side is a [`Lock`], reentrant by itself. A writer may also read, and then give up writing and read on. A reader
/// cannot write: it gets [`Error::UpgradeRefused`](crate::Error::UpgradeRefused) at once, since it would wait for itself.
///
/// # Deadlocks
///
/// A writer that waits holds new readers back, except for owners that read already. So a task that reads must not wait for
/// another task, under another owner, that wants to read: if a writer comes between them, the writer waits for the first
/// task, the first for the second, and the second for the writer. Nobody times out if nobody has a limit. Two tasks of
/// one request are enough. Read once for each request and pass on what was read; or let its tasks be one owner
/// ([`AcquireOptions::owner`](crate::AcquireOptions::owner) with [`LockClient::owner`](crate::LockClient::owner)), which
/// may always read on; or bound the inner wait ([`Lock::try_lock_for`]).
#[derive(Debug, Clone)]
pub struct ReadWriteLock {
    read: Lock,
    write: Lock,
}

impl ReadWriteLock {
    pub(crate) fn new(read: Lock, write: Lock) -> Self {
        Self { read, write }
    }

    /// The side for readers, shared by all of them, as a lock of its own.
    #[must_use]
    pub fn read_lock(&self) -> Lock {
        self.read.clone()
    }

    /// The side for writers, for one at a time while nobody reads, as a lock of its own.
    #[must_use]
    pub fn write_lock(&self) -> Lock {
        self.write.clone()
    }

    /// The same lock, but each acquire is an owner of its own: see [`Lock::owner_per_acquire`]. Then a reader is not let in
    /// beside its own writer, and every reader waits behind a writer that waits.
    #[must_use]
    pub fn owner_per_acquire(self) -> Self {
        Self { read: self.read.owner_per_acquire(), write: self.write.owner_per_acquire() }
    }

    /// Acquires to read, and waits for it without limit.
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn read(&self) -> Result<LockGuard> {
        self.read.lock().await
    }

    /// Acquires to write, and waits for it without limit.
    ///
    /// # Errors
    ///
    /// As [`Lock::lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn write(&self) -> Result<LockGuard> {
        self.write.lock().await
    }

    /// Acquires to read if nobody writes, or waits to; `None`: somebody does.
    ///
    /// # Errors
    ///
    /// As [`Lock::try_lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn try_read(&self) -> Result<Option<LockGuard>> {
        self.read.try_lock().await
    }

    /// Acquires to write if nobody holds the lock; `None`: somebody does, perhaps the caller itself, or it is the turn of readers
    /// that wait, for two seconds at most.
    ///
    /// # Errors
    ///
    /// As [`Lock::try_lock`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lock::lock`].
    pub async fn try_write(&self) -> Result<Option<LockGuard>> {
        self.write.try_lock().await
    }
}

/// What both sides share. A hash: `mode` -> `read` or `write`, reader -> hold count, `<writer>:write` -> hold count.
#[derive(Debug, Clone)]
struct Record {
    name: Arc<str>,
    channel: Arc<str>,
    /// There while a writer waits for readers.
    intent: Arc<str>,
    /// The readers that wait, and before which writer they come.
    readers: Arc<str>,
    /// What the keys of read holds begin with. There is one for each hold, which lives as long as its lease.
    holds: Arc<str>,
}

impl Record {
    fn new(name: &LockName) -> Self {
        Self {
            name: Arc::clone(name.as_arc()),
            channel: name.derived("redisson_rwlock"),
            intent: name.derived("nestlock_rwlock_intent"),
            readers: name.derived("nestlock_rwlock_readers"),
            holds: name.with_suffix(""),
        }
    }

    fn key(&self) -> [Arc<str>; 1] {
        [Arc::clone(&self.name)]
    }

    fn force_release(&self, side: &str) -> Call {
        let args = [(&self.channel).into(), (&self.holds).into(), Arg::Text(side.into())];
        Call::new(&FORCE_RELEASE, self.key(), args)
    }

    fn key_and_marks(&self) -> [Arc<str>; 3] {
        [&self.name, &self.intent, &self.readers].map(Arc::clone)
    }
}

#[derive(Debug)]
pub(crate) struct Read(Record);

impl Read {
    pub(crate) fn new(name: &LockName) -> Self {
        Self(Record::new(name))
    }
}

impl Kind for Read {
    fn about(&self) -> About {
        let sibling = Some(Sibling { family: "write", excludes: false });
        // each hold has a key, and scripts look at all of them; a reader that waits is noted
        About { shared: true, queues: true, max_holds: 99_999, sibling, ..About::plain("read") }
    }

    fn verbs(&self) -> &dyn Verbs {
        self
    }
}

impl Verbs for Read {
    fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Channel(Arc::clone(&self.0.channel))
    }

    fn acquire(&self, terms: Terms<'_>) -> Call {
        let hold: Arc<str> = format!("{}{}:rwlock_timeout:", self.0.holds, terms.owner).into();
        let Terms { owner, lease_ms, holds, waits, .. } = terms;
        let args = [owner.into(), lease_ms.into(), holds.into(), (&hold).into(), u32::from(waits).into()];
        Call::new(&READ_ACQUIRE, self.0.key_and_marks(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let args = [owner.into(), holds.into(), (&self.0.channel).into(), (&self.0.holds).into()];
        Call::new(&READ_RELEASE, [&self.0.name, &self.0.readers].map(Arc::clone), args)
    }

    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        let args = [owner.into(), holds.into(), (&self.0.channel).into()];
        Some(Call::new(&READ_RELEASE_RECORD, self.0.key(), args))
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        let args = [from.into(), to.into(), lease_ms.into(), (&self.0.holds).into()];
        Call::new(&READ_TRANSFER, self.0.key(), args)
    }

    fn renew(&self) -> &'static Script {
        &READ_RENEW
    }

    fn force_release(&self) -> Call {
        self.0.force_release("read")
    }

    fn inspect(&self) -> Call {
        Call::new(&READ_INSPECT, self.0.key(), [])
    }
}

#[derive(Debug)]
pub(crate) struct Write(Record);

impl Write {
    pub(crate) fn new(name: &LockName) -> Self {
        Self(Record::new(name))
    }
}

impl Kind for Write {
    fn about(&self) -> About {
        let sibling = Some(Sibling { family: "read", excludes: true });
        // a writer that waits leaves an intent
        About { queues: true, sibling, ..About::plain("write") }
    }

    fn verbs(&self) -> &dyn Verbs {
        self
    }
}

impl Verbs for Write {
    fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Channel(Arc::clone(&self.0.channel))
    }

    fn acquire(&self, terms: Terms<'_>) -> Call {
        let Terms { owner, lease_ms, holds, waits, .. } = terms;
        let args = [owner.into(), lease_ms.into(), holds.into(), u32::from(waits).into()];
        Call::new(&WRITE_ACQUIRE, self.0.key_and_marks(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let args = [owner.into(), holds.into(), (&self.0.channel).into(), (&self.0.holds).into()];
        Call::new(&WRITE_RELEASE, [&self.0.name, &self.0.intent].map(Arc::clone), args)
    }

    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        let args = [owner.into(), holds.into(), (&self.0.channel).into()];
        Some(Call::new(&WRITE_RELEASE_RECORD, self.0.key(), args))
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        Call::new(&WRITE_TRANSFER, self.0.key(), [from.into(), to.into(), lease_ms.into()])
    }

    fn renew(&self) -> &'static Script {
        &WRITE_RENEW
    }

    fn force_release(&self) -> Call {
        self.0.force_release("write")
    }

    fn inspect(&self) -> Call {
        Call::new(&WRITE_INSPECT, self.0.key(), [])
    }
}
