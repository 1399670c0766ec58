//! The turn: while the machine is on, only the thread that has the turn runs.

use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

static ON: AtomicBool = AtomicBool::new(false);

/// Turns the machine on or off. The caller has the turn.
pub(crate) fn set_on(is_on: bool) {
    ON.store(is_on, Relaxed);
}

/// Returns `true` while the machine is on.
pub(crate) fn is_on() -> bool {
    ON.load(Relaxed)
}

/// A value that only the thread with the turn touches.
pub(crate) struct Turned<T>(UnsafeCell<T>);

// SAFETY: only one thread has the turn
unsafe impl<T> Sync for Turned<T> {}

impl<T> Turned<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: the caller has the turn, and `act` never comes back here
        act(unsafe { &mut *self.0.get() })
    }
}
