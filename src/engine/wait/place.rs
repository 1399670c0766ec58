//! A waiter's place in a lock's queue on the server.
//!
//! The end of a place is a doubt like any other: the release with a count of 0 takes back
//! everything of the owner, so no kind needs a script of its own for leaving its queue. A place is
//! bound to its name: the owner keeps that name while it waits, even if a new suffix is in use. The
//! last waiter abandons the name with the place, and lends the owner lock to the janitor until the
//! connection has the release (decision 7).

use std::sync::Arc;

use crate::engine::{
    core::Core,
    hold::{Hold, granted::LastLook},
};

/// A place in the lock's queue, kept for one waiter. When a hold's last entry is dropped, the
/// client leaves the queue on the server.
#[derive(Debug)]
pub(crate) struct QueueEntry<'a> {
    core: &'a Core,
    hold: Arc<Hold>,
    /// The last reply about this place. A waiter checks a grant message against it.
    pub(super) look: Option<LastLook>,
}

impl<'a> QueueEntry<'a> {
    pub(crate) fn new(core: &'a Core, hold: &Arc<Hold>, look: Option<LastLook>) -> Self {
        hold.enter_queue();
        Self {
            core,
            hold: Arc::clone(hold),
            look,
        }
    }
}

impl Drop for QueueEntry<'_> {
    fn drop(&mut self) {
        self.core.leave_queue_once(&self.hold);
    }
}
