//! What waiters wait for.

use std::sync::Arc;

use crate::{
    engine::kind::{Kind, KindInfo, Sharing},
    meter::Of,
};

/// What the waiters of one queue wait for.
#[derive(Debug, Clone)]
pub(crate) enum Awaited {
    /// The lock of the first waiter.
    Lock(Arc<dyn Kind>),
    /// The latch of this name. It lets all waiters go.
    Latch(Arc<str>),
}

impl Awaited {
    pub(super) fn about(&self) -> KindInfo {
        match self {
            Self::Lock(kind) => kind.about(),
            Self::Latch(_) => KindInfo {
                sharing: Sharing::Shared,
                ..KindInfo::plain("latch")
            },
        }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        match self {
            Self::Lock(kind) => kind.name(),
            Self::Latch(name) => name,
        }
    }

    pub(super) fn lock(&self) -> Option<&Arc<dyn Kind>> {
        match self {
            Self::Lock(kind) => Some(kind),
            Self::Latch(_) => None,
        }
    }

    /// Returns its labels in metrics.
    pub(crate) fn of(&self) -> Of<'_> {
        Of {
            kind: self.about().label,
            lock: self.name(),
        }
    }
}
