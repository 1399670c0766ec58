//! Questions about a lock, and guarded keys: one request each.

use std::sync::Arc;

use super::{core::Core, failure::store_error, kind::Kind};
#[cfg(feature = "metrics")]
use crate::meter::Levels;
use crate::{
    error::{Error, Result},
    store::{Call, Guarded, Inspected},
    token::FencingToken,
};

/// What a [`LockClient`](crate::LockClient) keeps in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ClientStats {
    /// Pairs of lock and owner that are held, being acquired or being released, or were handed over and are renewed.
    pub holds: usize,
    /// Channels subscribed to and lists waited for: locks that somebody of this client waits for, or did a moment ago.
    pub channels: usize,
    /// Acquires that wait for a release.
    pub waiters: usize,
    /// Requests that are not answered yet; 0 on [`Wire::Fred`](crate::Wire::Fred).
    pub requests: usize,
    /// Releases and cancellations that the background thread has still to settle with the server.
    pub settling: usize,
}

impl Core {
    /// Asks the server who holds a lock.
    pub(crate) async fn inspect(&self, kind: &Arc<dyn Kind>) -> Result<Inspected> {
        self.enter(kind.name()).await?;
        let mut inspected = self.ask(kind).await?;
        if let Inspected::Held { holders, .. } = &mut inspected {
            for (holder, _) in holders.iter_mut().filter(|(holder, _)| holder.is_of(&self.client)) {
                if let Some(lent) = self.holds.lent(kind, holder) {
                    *holder = lent;
                }
            }
        }
        Ok(inspected)
    }

    /// The same for the janitor, which works on after a shutdown has begun.
    pub(super) async fn ask(&self, kind: &Arc<dyn Kind>) -> Result<Inspected> {
        match self.store.inspect(&kind.inspect()).await {
            Ok(Inspected::WrongKind) => Err(Error::WrongLockKind { lock: kind.name().to_string() }),
            Ok(inspected) => Ok(inspected),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Reads or writes a guarded key, showing `token`. One request, which is not repeated.
    pub(crate) async fn guarded(&self, token: FencingToken, call: &Call) -> Result<Option<Vec<u8>>> {
        let key = call.keys.first().map_or_else(String::new, ToString::to_string);
        self.enter(&key).await?;
        match self.store.guarded(call).await {
            Ok(Guarded::Done(value)) => Ok(value),
            Ok(Guarded::Stale { seen }) => Err(Error::StaleToken { key, token, seen }),
            Err(error) => Err(store_error(&key, error)),
        }
    }

    /// What is kept in memory.
    pub(crate) fn stats(&self) -> ClientStats {
        if !self.store.is_ours() {
            return ClientStats::default();
        }
        ClientStats {
            holds: self.holds.len(),
            channels: self.hub.channels() + self.signals.channels(),
            waiters: self.hub.waiters() + self.signals.waiters(),
            requests: self.store.under_way(),
            settling: self.janitor.pending(),
        }
    }

    /// How much there is of what comes and goes.
    #[cfg(feature = "metrics")]
    pub(super) fn levels(&self) -> Levels {
        let (mut levels, meter) = (Levels::default(), self.config.meter);
        self.holds.for_each(|hold| {
            if hold.count() > 0 {
                levels.held(meter, hold.kind().of());
            }
        });
        for hub in [&*self.hub, &self.signals] {
            hub.for_each_kind(|kind, waiters| levels.waiters(meter, kind.of(), waiters));
        }
        levels.under_way(self.store.under_way());
        levels
    }
}
