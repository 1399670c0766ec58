//! The read-write lock: many readers or one writer. Redisson's `RReadWriteLock`.
//!
//! The two sides are two kinds that share one record. Neither side starves: each leaves a mark that
//! holds the other side back, for at most 2 seconds from the first waiter that is held back.
//!
//! - A writer that waits for readers leaves an intent: it then waits only for those that already
//!   read.
//! - Readers that wait for a writer are recorded, and the next writer waits for them. Readers that
//!   an intent holds back are recorded for the writer after that. So a reader waits for at most two
//!   writes, however slow its connection is, and readers enter together.

use std::sync::Arc;

use nestlock_wire::{Arg, Call, Script};

use super::Lock;

use crate::{
    engine::{AcquireTerms, Kind, KindInfo, Sharing, Sibling, Wake},
    error::Result,
    guard::LockGuard,
    keys::LockName,
    owner::OwnerId,
    store::script,
};

script!(
    READ_ACQUIRE = "read_write/read_acquire",
    parts = ["mode", "raises", "patience", "leave"],
    keys = 3,
    args = 5,
    names_keys = true
);
script!(
    READ_RELEASE = "read_write/read_release",
    parts = ["fewer", "life", "leave"],
    keys = 2,
    args = 4,
    names_keys = true
);
script!(
    READ_RELEASE_RECORD = "read_write/read_release_record",
    parts = ["fewer"],
    keys = 1,
    args = 3
);
script!(
    READ_TRANSFER = "read_write/read_transfer",
    parts = ["moves", "life"],
    keys = 1,
    args = 4,
    names_keys = true
);
script!(READ_RENEW = "read_write/read_renew", parts = ["renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock, names_keys = true);
script!(READ_INSPECT = "read_write/read_inspect", keys = 1, args = 0);
script!(
    WRITE_ACQUIRE = "read_write/write_acquire",
    parts = ["mode", "raises", "patience", "time"],
    keys = 3,
    args = 4,
    names_keys = true
);
script!(
    WRITE_RELEASE = "read_write/write_release",
    parts = ["fewer", "life"],
    keys = 2,
    args = 4,
    names_keys = true
);
script!(
    WRITE_RELEASE_RECORD = "read_write/write_release_record",
    parts = ["fewer"],
    keys = 1,
    args = 3
);
script!(
    WRITE_TRANSFER = "read_write/write_transfer",
    parts = ["moves"],
    keys = 1,
    args = 3
);
script!(WRITE_RENEW = "read_write/write_renew", parts = ["renew_each"], keys = 0 + 1 per_lock, args = 0 + 2 per_lock);
script!(
    FORCE_RELEASE = "read_write/force_release",
    parts = ["mode"],
    keys = 1,
    args = 3,
    names_keys = true
);
script!(
    WRITE_INSPECT = "read_write/write_inspect",
    parts = ["mode"],
    keys = 1,
    args = 0
);

/// A lock with two sides: any number of owners may read, or one owner may write. See
/// [`LockClient::read_write_lock`](crate::LockClient::read_write_lock).
///
/// ```no_run
/// # async fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
/// let prices = client.read_write_lock("prices")?;
/// let guard = prices.read().await?; // shared with other readers
/// guard.unlock().await?;
/// let guard = prices.write().await?; // alone
/// guard.unlock().await
/// # }
/// ```
///
/// Each side is a [`Lock`] and reentrant. A writer may also read, and then give up writing and keep
/// reading. A reader cannot write: it gets [`Error::UpgradeRefused`](crate::Error::UpgradeRefused)
/// at once, because it would wait for itself.
///
/// # Deadlocks
///
/// A waiting writer holds back new readers, except for owners that already read. So a task that
/// reads must not wait for another task, under another owner, that wants to read. If a writer
/// queues between them, the writer waits for the first task, the first for the second, and the
/// second for the writer. If none of these waits has a limit, they never end. Two tasks of one
/// request are enough. Read once per request and pass on the result; or make the tasks one owner
/// ([`AcquireOptions::owner`](crate::AcquireOptions::owner) with
/// [`LockClient::owner`](crate::LockClient::owner)), which may always read again; or bound the
/// inner wait ([`Lock::try_lock_for`]).
#[derive(Debug, Clone)]
pub struct ReadWriteLock {
    read: Lock,
    write: Lock,
}

impl ReadWriteLock {
    pub(crate) fn new(read: Lock, write: Lock) -> Self {
        Self { read, write }
    }

    /// Returns the readers' side as a separate lock; readers share it.
    #[must_use]
    pub fn read_lock(&self) -> Lock {
        self.read.clone()
    }

    /// Returns the writers' side as a separate lock: one writer at a time, while there are no
    /// readers.
    #[must_use]
    pub fn write_lock(&self) -> Lock {
        self.write.clone()
    }

    /// Returns the same lock, but with each acquire as a separate owner: see
    /// [`Lock::owner_per_acquire`]. A task that writes cannot then read as well, and every reader
    /// waits behind a waiting writer.
    #[must_use]
    pub fn owner_per_acquire(self) -> Self {
        Self {
            read: self.read.owner_per_acquire(),
            write: self.write.owner_per_acquire(),
        }
    }

    /// Acquires the lock to read, and waits for it without limit.
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

    /// Acquires the lock to write, and waits for it without limit.
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

    /// Acquires the lock to read. Returns `None` if another owner writes, or if a writer waits and
    /// the caller does not read already.
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

    /// Acquires the lock to write. Returns `None` if another owner holds it, if the caller itself
    /// only reads, or while waiting readers have their turn, which lasts at most 2 seconds.
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

/// The record and the keys that both sides share. The record is a hash: `mode` -> `read` or
/// `write`, reader -> hold count, `<writer>:write` -> hold count.
#[derive(Debug, Clone)]
struct ReadWriteRecord {
    name: Arc<str>,
    channel: Arc<str>,
    /// This key exists while a writer waits for readers.
    intent: Arc<str>,
    /// A sorted set of the waiting readers, each with the writer that it goes before.
    readers: Arc<str>,
    /// Prefix of the keys of read holds. Each read hold has a key that lives as long as its lease.
    holds: Arc<str>,
}

impl ReadWriteRecord {
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
        let args = [
            (&self.channel).into(),
            (&self.holds).into(),
            Arg::Text(side.into()),
        ];
        Call::new(&FORCE_RELEASE, self.key(), args)
    }

    fn key_and_marks(&self) -> [Arc<str>; 3] {
        [&self.name, &self.intent, &self.readers].map(Arc::clone)
    }
}

/// The side for readers.
#[derive(Debug)]
pub(crate) struct ReadSide(ReadWriteRecord);

impl ReadSide {
    pub(crate) fn new(name: &LockName) -> Self {
        Self(ReadWriteRecord::new(name))
    }
}

impl Kind for ReadSide {
    fn about(&self) -> KindInfo {
        let sibling = Some(Sibling {
            family: "write",
            excludes: false,
        });
        // Scripts scan the keys of all read holds, hence the limit. `queues`: a waiting reader is
        // recorded on the server.
        KindInfo {
            sharing: Sharing::Shared,
            queues: true,
            max_holds: 99_999,
            sibling,
            ..KindInfo::plain("read")
        }
    }

    fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Channel(Arc::clone(&self.0.channel))
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        let hold: Arc<str> = format!("{}{}:rwlock_timeout:", self.0.holds, terms.owner).into();
        let AcquireTerms {
            owner,
            lease_ms,
            holds,
            waits,
            ..
        } = terms;
        let args = [
            owner.into(),
            lease_ms.into(),
            holds.into(),
            (&hold).into(),
            u32::from(waits).into(),
        ];
        Call::new(&READ_ACQUIRE, self.0.key_and_marks(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let args = [
            owner.into(),
            holds.into(),
            (&self.0.channel).into(),
            (&self.0.holds).into(),
        ];
        Call::new(
            &READ_RELEASE,
            [&self.0.name, &self.0.readers].map(Arc::clone),
            args,
        )
    }

    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        let args = [owner.into(), holds.into(), (&self.0.channel).into()];
        Some(Call::new(&READ_RELEASE_RECORD, self.0.key(), args))
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        let args = [
            from.into(),
            to.into(),
            lease_ms.into(),
            (&self.0.holds).into(),
        ];
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

/// The side for writers.
#[derive(Debug)]
pub(crate) struct WriteSide(ReadWriteRecord);

impl WriteSide {
    pub(crate) fn new(name: &LockName) -> Self {
        Self(ReadWriteRecord::new(name))
    }
}

impl Kind for WriteSide {
    fn about(&self) -> KindInfo {
        let sibling = Some(Sibling {
            family: "read",
            excludes: true,
        });
        // `queues`: a waiting writer leaves an intent on the server.
        KindInfo {
            queues: true,
            sibling,
            ..KindInfo::plain("write")
        }
    }

    fn name(&self) -> &Arc<str> {
        &self.0.name
    }

    fn wake(&self, _: &OwnerId) -> Wake {
        Wake::Channel(Arc::clone(&self.0.channel))
    }

    fn acquire(&self, terms: AcquireTerms<'_>) -> Call {
        let AcquireTerms {
            owner,
            lease_ms,
            holds,
            waits,
            ..
        } = terms;
        let args = [
            owner.into(),
            lease_ms.into(),
            holds.into(),
            u32::from(waits).into(),
        ];
        Call::new(&WRITE_ACQUIRE, self.0.key_and_marks(), args)
    }

    fn release(&self, owner: &OwnerId, holds: u32) -> Call {
        let args = [
            owner.into(),
            holds.into(),
            (&self.0.channel).into(),
            (&self.0.holds).into(),
        ];
        Call::new(
            &WRITE_RELEASE,
            [&self.0.name, &self.0.intent].map(Arc::clone),
            args,
        )
    }

    fn release_record(&self, owner: &OwnerId, holds: u32) -> Option<Call> {
        let args = [owner.into(), holds.into(), (&self.0.channel).into()];
        Some(Call::new(&WRITE_RELEASE_RECORD, self.0.key(), args))
    }

    fn transfer(&self, from: &OwnerId, to: &OwnerId, lease_ms: u64) -> Call {
        Call::new(
            &WRITE_TRANSFER,
            self.0.key(),
            [from.into(), to.into(), lease_ms.into()],
        )
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
