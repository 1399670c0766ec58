//! Questions about a lock, and guarded keys: one request each.

use std::sync::Arc;

use super::{core::Core, failure::store_error, kind::Kind};
use crate::{
    error::{Error, Result},
    store::{Call, Guarded, Inspected},
    token::FencingToken,
};

impl Core {
    /// Asks the server who holds a lock.
    pub(crate) async fn inspect(&self, kind: &Arc<dyn Kind>) -> Result<Inspected> {
        self.check_open()?;
        self.ask(kind).await
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
        self.check_open()?;
        let key = call.keys.first().map_or_else(String::new, ToString::to_string);
        match self.store.guarded(call).await {
            Ok(Guarded::Done(value)) => Ok(value),
            Ok(Guarded::Stale { seen }) => Err(Error::StaleToken { key, token, seen }),
            Err(error) => Err(store_error(&key, error)),
        }
    }

    /// For tests: holds known, channels subscribed to, settlements pending.
    pub(crate) fn residue(&self) -> (usize, usize, usize) {
        (self.holds.len(), self.hub.channels() + self.signals.channels(), self.janitor.pending())
    }
}
