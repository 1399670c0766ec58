//! What a slot's own master has said of it lately: that it has another one.
//!
//! The other nodes hear of that a moment later, and the map is what most of them say. Taken at its word, it would lead back to the
//! old master, and the new one would be left while it grants.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use crate::clock::Instant;

/// Within this time, the nodes of a cluster hear of a new master, even on a busy machine. For no longer is the map not believed:
/// whoever was sent to a master that hangs, and was replaced, must hear of it before that goes on and grants.
const HEARSAY: Duration = Duration::from_millis(250);

/// The slots, and when that was.
#[derive(Debug, Default)]
pub(super) struct Told(Mutex<HashMap<u16, Instant>>);

impl Told {
    pub(super) fn of(&self, slot: u16) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, Instant::now());
    }

    /// Those of which the map may be older.
    pub(super) fn lately(&self) -> HashMap<u16, Instant> {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|_, at| at.elapsed() < HEARSAY);
        told.clone()
    }
}
