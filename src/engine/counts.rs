//! Numbers of permits and counts of latches, which belong to no hold.

use std::time::Duration;

use nestlock_wire::{Call, clock::Instant};

use super::{core::Core, failure::store_error, release::Repeat};

use crate::error::{Error, Result, StoreError};

/// How long after the first try a reply is that of one change: for a minute, less 5 s, the server knows
/// a request (`lua/parts/once.lua`).
const KNOWN: Duration = Duration::from_secs(55);
/// How long it is retried. The last try may take as long again.
const REPEATED_WITHIN: Duration = Duration::from_secs(27);

impl Core {
    /// Runs a script that replies with a number and writes nothing. Sends one request and does not
    /// retry it.
    pub(crate) async fn count(&self, lock: &str, call: &Call) -> Result<u32> {
        self.enter(lock).await?;
        counted(lock, self.store.read_count(call).await)
    }

    /// Runs a script that sets a number. Sends one request and does not retry it: a late first try would
    /// undo what came after the second.
    pub(crate) async fn set_count(&self, lock: &str, call: &Call) -> Result<u32> {
        self.enter(lock).await?;
        counted(lock, self.store.count(call).await)
    }

    /// Runs a script that changes a number once, though it is sent twice. Retries it for up to one
    /// command timeout, which the last try may take as well.
    pub(crate) async fn change_count(&self, lock: &str, call: &Call) -> Result<u32> {
        let patience = self.config.command_timeout().min(REPEATED_WITHIN);
        let began = Instant::now();
        let mut repeat = Repeat::until(began + patience);
        loop {
            if let Err(error) = self.enter(lock).await {
                // an earlier try may have been executed
                let unconfirmed = repeat.unconfirmed();
                return Err(unconfirmed.map_or(error, |error| store_error(lock, error)));
            }
            let error = match self.store.count(call).await {
                Err(error) => error,
                answer => {
                    let earlier = repeat.unconfirmed().filter(|_| began.elapsed() >= KNOWN);
                    return counted(lock, earlier.map_or(answer, Err));
                }
            };
            let paused = repeat.pause(self, lock, error).await;
            paused.map_err(|error| store_error(lock, error))?;
        }
    }
}

fn counted(lock: &str, answer: Result<Option<u32>, StoreError>) -> Result<u32> {
    let count = answer.map_err(|error| store_error(lock, error))?;
    count.ok_or_else(|| Error::WrongLockKind {
        lock: lock.to_owned(),
    })
}
