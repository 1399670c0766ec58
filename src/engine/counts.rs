//! Numbers of permits, which belong to no hold.

use nestlock_wire::{Call, clock::Instant};

use super::{core::Core, failure::store_error, release::Repeat};

use crate::error::{Error, Result};

impl Core {
    /// Runs a script that replies with a number of permits and writes nothing. Sends one request and
    /// does not retry it.
    pub(crate) async fn count(&self, lock: &str, call: &Call) -> Result<u32> {
        self.enter(lock).await?;
        let counted = self.store.read_count(call).await;
        told(lock, counted.map_err(|error| store_error(lock, error))?)
    }

    /// Runs a script that changes a number of permits, and may be sent twice. Retries it for up to
    /// one command timeout.
    pub(crate) async fn change_count(&self, lock: &str, call: &Call) -> Result<u32> {
        let mut repeat = Repeat::until(Instant::now() + self.config.command_timeout());
        loop {
            self.enter(lock).await?;
            let error = match self.store.count(call).await {
                Ok(count) => return told(lock, count),
                Err(error) => error,
            };
            let paused = repeat.pause(self, lock, error).await;
            paused.map_err(|error| store_error(lock, error))?;
        }
    }
}

fn told(lock: &str, count: Option<u32>) -> Result<u32> {
    count.ok_or_else(|| Error::WrongLockKind {
        lock: lock.to_owned(),
    })
}
