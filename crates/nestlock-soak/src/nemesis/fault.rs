//! A fault, and what it may have done to the servers' data.

use std::{thread, time::Duration};

/// A fault, as the journal describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) sort: String,
    /// The link or the process.
    pub(crate) target: usize,
    pub(crate) server: usize,
    pub(crate) ms: u64,
    /// A detail of the fault: a delay, or a variant.
    pub(crate) arg: u64,
}

/// What a fault may have done to the servers' data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    Kept,
    /// A server lost its data.
    Forgot,
}

impl Fault {
    /// Blocks this thread for as long as the fault lasts.
    pub(super) fn sleep(&self) {
        thread::sleep(Duration::from_millis(self.ms));
    }
}
