//! A place in a lock's queue on the server.

use std::sync::Arc;

use crate::engine::{core::Core, hold::Hold, turn::LastLook};

/// A place in the lock's queue, kept for one waiter. Given up when dropped: with the last one, the server is told.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    core: &'a Core,
    hold: Arc<Hold>,
    /// By which a waiter believes that it was granted the lock.
    pub(super) look: Option<LastLook>,
}

impl<'a> Place<'a> {
    pub(crate) fn new(core: &'a Core, hold: &Arc<Hold>, look: Option<LastLook>) -> Self {
        hold.enter_queue();
        Self { core, hold: Arc::clone(hold), look }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.core.leave_queue_once(&self.hold);
    }
}
