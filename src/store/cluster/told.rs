//! Slots whose own master recently redirected them to another one.
//!
//! The other nodes learn of the new master a moment later, and the map follows the majority of the
//! nodes. Without this record, the map would lead the client back to the old master, and the client
//! would leave the new one while that grants locks.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use nestlock_wire::clock::Instant;

/// How long the nodes of a cluster take to learn of a new master, even on a busy machine.
/// Distrusting the map for longer would be wrong: a client that was redirected to a master that
/// hung, and was replaced, must learn of the replacement before that master resumes and grants
/// locks.
const GOSSIP_DELAY: Duration = Duration::from_millis(250);

/// The slots, and when they were redirected.
#[derive(Debug, Default)]
pub(super) struct RedirectedSlots(Mutex<HashMap<u16, Instant>>);

impl RedirectedSlots {
    pub(super) fn of(&self, slot: u16) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(slot, Instant::now());
    }

    /// Returns the slots for which the map may still be stale.
    pub(super) fn lately(&self) -> HashMap<u16, Instant> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, at| at.elapsed() < GOSSIP_DELAY);
        told.clone()
    }
}
