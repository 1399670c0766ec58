//! Waking the tasks of the program.
//!
//! A waker is code of the program, and the client's own thread calls it, too. A panic is caught
//! here: it must end neither that thread nor the connection's tasks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::log;

/// Runs code that wakes the program's tasks or calls its callbacks. A panic there must not affect
/// anything else.
pub(crate) fn catch_waker_panic(wake: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(wake)).is_err() {
        log::later!(ERROR, ; "a waker or callback of the program panicked");
    }
}
