//! The process that each thread belongs to, or acts as.

use std::cell::Cell;

thread_local! {
    static PROCESS: Cell<usize> = const { Cell::new(0) };
}

/// Returns the process of the calling thread, or the one that it acts as.
pub(crate) fn current() -> usize {
    PROCESS.get()
}

/// Makes the calling thread one of this process.
pub(crate) fn join(process: usize) {
    PROCESS.set(process);
}

/// Runs `look` as another process: by its clock, and as the owner of what `look` starts.
pub(crate) fn as_process<R>(process: usize, look: impl FnOnce() -> R) -> R {
    let before = PROCESS.replace(process);
    let result = look();
    PROCESS.set(before);
    result
}
