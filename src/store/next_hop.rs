//! Where a request goes after a cluster node has redirected it.

use std::{sync::Arc, time::Duration};

use nestlock_wire::Link;

/// How many redirects to follow without a pause.
const AT_ONCE: u32 = 5;

/// Where a request goes next.
#[derive(Debug)]
pub(crate) enum RedirectTo {
    /// To the slot's new master.
    To(Arc<Link>),
    /// To the node that is importing the slot, for this request only.
    Asking(Arc<Link>),
    /// To the same node, a little later: the keys are being moved.
    Later,
    /// To the master that the map names next, as the current one does not know the slot. With
    /// `or_there`, the current one accepted no connection; the request may also go back there once
    /// it does.
    Elsewhere { or_there: bool },
}

impl RedirectTo {
    /// Returns the pause before the next hop, after this many redirects.
    pub(crate) fn pause(&self, hops: u32) -> Duration {
        // for moving keys 2, 4, 8 .. 32, then 50 ms; otherwise 20, 40 .. 320, then 500 ms
        let ms = match self {
            Self::Later => 1 << hops.clamp(1, 6),
            Self::Elsewhere { .. } => 0,
            _ if hops <= AT_ONCE => 0,
            _ => 10 << (hops - AT_ONCE).min(6),
        };
        Duration::from_millis(ms.min(if matches!(self, Self::Later) { 50 } else { 500 }))
    }
}
