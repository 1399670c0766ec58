//! The lock kinds, and the one implementation of [`RLock`] over all of them.

mod fair;
mod fenced;
mod multi;
mod non_reentrant;
mod read_write;
mod red;
mod reentrant;
mod signal;
mod spin;
mod string;

use std::{any::Any, sync::Arc, time::Duration};

use async_trait::async_trait;

pub(crate) use self::{
    fair::Fair,
    fenced::{Fenced, FencedKey},
    non_reentrant::NonReentrant,
    read_write::{Read, Write},
    reentrant::Reentrant,
    signal::Signal,
    spin::Spin,
    string::StringRecord,
};
pub use self::{
    multi::MultiLock,
    read_write::ReadWriteLock,
    red::{RedLock, RedLockOptions},
};
use crate::{
    engine::{Anchor, Kind, acquire::Acquire},
    error::Result,
    guard::LockGuard,
    options::AcquireOptions,
    owner::OwnerId,
    rlock::RLock,
    store::Inspected,
};

/// A lock, made by one of the doors of [`LockClient`](crate::LockClient). Cheap to clone; what it can do stands in
/// [`RLock`].
#[derive(Debug, Clone)]
pub struct Lock {
    anchor: Arc<Anchor>,
    kind: Arc<dyn Kind>,
}

impl Lock {
    pub(crate) fn new(anchor: &Arc<Anchor>, kind: impl Kind) -> Self {
        Self { anchor: Arc::clone(anchor), kind: Arc::new(kind) }
    }

    /// A member of a lock over several, if it is one of these.
    fn of(member: &Arc<dyn RLock>) -> Option<&Self> {
        let member: &dyn Any = &**member;
        member.downcast_ref()
    }
}

#[async_trait]
impl RLock for Lock {
    fn name(&self) -> &str {
        self.kind.name()
    }

    async fn acquire(&self, options: AcquireOptions) -> Result<Option<LockGuard>> {
        let entered = Acquire::new(&self.anchor, &self.kind, &options)?.run().await?;
        Ok(entered.map(|entered| LockGuard::new(Arc::clone(&self.anchor), entered)))
    }

    async fn release(&self, owner: &OwnerId) -> Result<()> {
        self.anchor.release_owner(&self.kind, owner).await
    }

    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<bool> {
        self.anchor.extend(&self.kind, owner, lease).await
    }

    async fn force_unlock(&self) -> Result<bool> {
        self.anchor.force_unlock(&self.kind).await
    }

    async fn is_locked(&self) -> Result<bool> {
        Ok(self.anchor.inspect(&self.kind).await? != Inspected::Free)
    }

    async fn hold_count(&self, owner: &OwnerId) -> Result<u32> {
        self.anchor.hold_count(&self.kind, owner).await
    }

    async fn holder(&self) -> Result<Option<OwnerId>> {
        Ok(match self.anchor.inspect(&self.kind).await? {
            Inspected::Held { holders, .. } => holders.into_iter().next().map(|(owner, _)| owner),
            _ => None,
        })
    }

    async fn remaining_lease(&self) -> Result<Option<Duration>> {
        Ok(match self.anchor.inspect(&self.kind).await? {
            Inspected::Held { ttl, .. } => ttl,
            _ => None,
        })
    }
}
