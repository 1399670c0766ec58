//! What the world orders a process to do.

use std::sync::atomic::AtomicBool;

use tokio::sync::Notify;

/// The orders of one process.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    pub(crate) shut_down: Notify,
    pub(crate) is_shut_down: AtomicBool,
}
