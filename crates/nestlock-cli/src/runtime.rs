//! The runtime of this process, on a single thread.

use std::{io, panic};

use tokio::runtime::{Builder, Runtime};

/// Starts the runtime. Fails if the system has no file descriptor left for it.
pub(crate) fn runtime() -> io::Result<Runtime> {
    // tokio panics if no file descriptor is left for signals, and the hook would print that
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let runtime = panic::catch_unwind(|| Builder::new_current_thread().enable_all().build());
    panic::set_hook(hook);
    runtime.unwrap_or_else(|_| Err(io::Error::other("Too many open files: see ulimit -n")))
}
