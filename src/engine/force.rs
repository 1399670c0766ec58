//! Frees locks by force, no matter which owner holds them.

use std::sync::Arc;

use futures_util::future::join_all;
use nestlock_wire::clock::Instant;

use super::{core::Core, failure::store_error, kind::Kind, settle::CallInFlight};

use crate::{
    error::{Error, LossReason, Result},
    store::Forced,
};

/// Makes the watchdog check all holds of a lock when dropped. A forced release may have freed them
/// though no reply says so, because it was lost or its caller dropped, and it may have freed what an
/// acquire got whose reply is read later.
struct CheckOnDrop<'a> {
    core: &'a Core,
    kind: &'a Arc<dyn Kind>,
}

impl Drop for CheckOnDrop<'_> {
    fn drop(&mut self) {
        if self.core.store.is_ours() {
            for hold in self.core.holds.of_lock(self.kind) {
                hold.change(|state, _| state.check_when_granted(Instant::now()));
            }
        }
    }
}

impl Core {
    /// Frees a lock, no matter which owner holds it. Returns `false` if it was free.
    pub(crate) async fn force_unlock(&self, kind: &Arc<dyn Kind>) -> Result<bool> {
        self.enter(kind.name()).await?;
        // notes what is held now: a hold that begins after this must not be ended
        let ours: Vec<_> = self
            .holds
            .of_lock(kind)
            .into_iter()
            .map(|hold| {
                let since = hold.generation().map(|generation| generation.since);
                (CallInFlight { core: self, hold }, since)
            })
            .collect();
        let check = CheckOnDrop { core: self, kind };
        let forced = self.store.force_release(&kind.force_release()).await;
        let may_be_freed = match &forced {
            Ok(forced) => matches!(forced, Forced::Freed),
            Err(error) => error.may_have_executed(),
        };
        if !may_be_freed {
            // a check would renew what is held, for nothing
            std::mem::forget(check);
        }
        match forced {
            Ok(Forced::Freed) => {
                for (CallInFlight { hold, .. }, since) in &ours {
                    // a hand-off begins another generation, with the same `since`
                    hold.change(|state, effects| {
                        if state
                            .held()
                            .is_some_and(|(generation, _)| Some(generation.since) == *since)
                        {
                            state.lose(LossReason::RecordMissing, effects);
                        }
                    });
                }
                Ok(true)
            }
            Ok(Forced::WasFree) => Ok(false),
            Ok(Forced::WrongKind) => Err(Error::WrongLockKind {
                lock: kind.name().to_string(),
            }),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Frees all locks whose records are at keys of this pattern, as [`Core::force_unlock`] does.
    /// Returns how many were held. `kind_of` maps a record's key to its lock.
    pub(crate) async fn force_unlock_all(
        &self,
        pattern: &str,
        kind_of: impl Fn(&str) -> Option<Arc<dyn Kind>>,
    ) -> Result<u64> {
        let (mut cursor, mut freed) = ("0".to_owned(), 0);
        loop {
            self.enter(pattern).await?;
            let page = self
                .store
                .scan(&cursor, pattern)
                .await
                .map_err(|error| store_error(pattern, error))?;
            let kinds: Vec<_> = page.keys.iter().filter_map(|key| kind_of(key)).collect();
            for outcome in join_all(kinds.iter().map(|kind| self.force_unlock(kind))).await {
                match outcome {
                    Ok(held) => freed += u64::from(held),
                    // the key no longer has a lock record
                    Err(Error::WrongType { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            match page.next {
                Some(next) => cursor = next,
                None => return Ok(freed),
            }
        }
    }
}
