//! What a lock kind must say. Values in, values out: no async, no I/O, no clock.

use std::{fmt, sync::Arc};

use crate::{
    owner::OwnerId,
    store::{Call, Script},
};

/// A lock kind: which scripts to run on which keys. The engine does the rest.
pub(crate) trait Kind: Send + Sync + fmt::Debug + 'static {
    /// The lock's name: the key of its record.
    fn name(&self) -> &Arc<str>;

    /// Kinds of one family share their record, and hence their hold counts.
    fn family(&self) -> &'static str;

    /// Where the release of this lock is announced.
    fn channel(&self) -> &Arc<str>;

    /// Makes `owner` hold the lock `holds` times, one more than before.
    fn acquire(&self, owner: &OwnerId, lease_ms: u64, holds: u32) -> Call;

    /// Makes `owner` hold the lock `holds` times, fewer than before.
    fn release(&self, owner: &OwnerId, holds: u32) -> Call;

    /// The script that renews many locks: keys are the locks, arguments the lease and one owner for each.
    fn renew(&self) -> &'static Script;

    /// Frees the lock, whoever holds it.
    fn force_release(&self) -> Call;

    /// Asks who holds the lock.
    fn inspect(&self) -> Call;
}
