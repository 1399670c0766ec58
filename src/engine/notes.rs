//! Keeps the note of a hold beside its record, on the client's thread, until the hold has ended.
//!
//! A note is a hint for people, so no caller waits for it: it is written after the acquire, again
//! whenever the deadline of the hold has moved, and erased after the end. It lasts as long as the hold
//! is valid when it is sent. Few are in flight at once, because locks use the same connection.

use std::{sync::Arc, time::Duration};

use nestlock_wire::{
    Arg, Call,
    clock::{Instant, millis},
    log,
};

use super::{
    core::{Anchor, Core},
    failure::store_error,
    hold::generation::Generation,
    retry::Retry,
};

use crate::{
    error::{Result, StoreError},
    sync::atomic::Ordering,
};

/// The shortest time between two looks at a deadline.
const LOOK: Duration = Duration::from_millis(50);
/// First and longest pause before a note is written again that could not be written.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// How a note is written, with its life in milliseconds as the first argument, and how it is erased.
#[derive(Debug)]
pub(crate) struct NoteCalls {
    pub(crate) write: Call,
    pub(crate) erase: Call,
}

impl Anchor {
    /// Keeps a note until this generation has ended, unless an outer hold has one.
    pub(crate) fn keep_note(&self, lock: Arc<str>, generation: &Arc<Generation>, calls: NoteCalls) {
        if generation.has_note.swap(true, Ordering::Relaxed) {
            return;
        }
        let (core, generation) = (Arc::clone(&self.core), Arc::clone(generation));
        self.runtime.spawn(async move {
            let NoteCalls { write, erase } = calls;
            if let Err(error) = core.note(&generation, write, &erase).await {
                core.note_refused(&lock, error);
            }
        });
    }
}

impl Core {
    /// Writes a note until this generation has ended, then erases it. Fails if it is refused for good.
    async fn note(
        &self,
        generation: &Generation,
        mut write: Call,
        erase: &Call,
    ) -> Result<(), StoreError> {
        let (mut retry, mut lasts) = (Retry::new(PAUSES.0, PAUSES.1), None);
        let mut is_written = false;
        loop {
            // before the look: an end in between wakes it
            let ended = generation.ended.notified();
            let Ok(left) = generation.remaining() else {
                break;
            };
            let mut pause = (left / 3 * 2).max(LOOK);
            let is_kept = |lasts| lasts + LOOK >= Instant::now() + left;
            if !is_written || !lasts.is_some_and(is_kept) {
                let Ok(_slot) = self.note_slots.acquire().await else {
                    break;
                };
                // that may have taken long
                let Ok(left) = generation.remaining() else {
                    break;
                };
                write.args[0] = Arg::from(millis(left).max(1));
                lasts = Some(Instant::now() + left);
                match self.store.note(&write).await {
                    // if not, another hold of this owner has its note there
                    Ok(written) => is_written = written,
                    Err(error) if error.is_transient() => {
                        (is_written, pause) = (false, retry.next());
                    }
                    Err(error) => return Err(error),
                }
            }
            tokio::select! {
                () = ended => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        if lasts.is_some_and(|lasts| lasts > Instant::now()) {
            let _slot = self.note_slots.acquire().await;
            // once: without it, the note stays until its TTL is over
            let _ = self.store.note(erase).await;
        }
        Ok(())
    }

    /// Tells once that notes cannot be written: the server refuses all of them alike.
    fn note_refused(&self, lock: &Arc<str>, error: StoreError) {
        if !self.notes_refused.swap(true, Ordering::Relaxed) {
            let error = store_error(lock, error);
            log::later!(WARN, lock = lock, error = error; "the note of a holder is refused; later refusals are not told");
        }
    }

    /// Runs a script that replies with a text for each of its keys, and writes nothing. Sends one
    /// request and does not retry it.
    pub(crate) async fn texts(&self, lock: &str, call: &Call) -> Result<Vec<String>> {
        self.enter(lock).await?;
        let texts = self.store.texts(call).await;
        texts.map_err(|error| store_error(lock, error))
    }
}
