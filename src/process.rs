//! Whether this is still the process that a client was made in.
//!
//! A fork has the client's sockets and none of its threads: what it sent would be executed, and answered to the other process.

/// The process that this was made in. To compare costs a load: where numbers of processes are a system call, each request would
/// pay for it.
#[derive(Debug, Clone)]
pub(crate) struct Home(Option<forkguard::Guard>);

impl Home {
    pub(crate) fn here() -> Self {
        Self(forkguard::Guard::try_new().ok())
    }

    /// Whether it is this one.
    pub(crate) fn is_here(&self) -> bool {
        // looking forgets what was seen: a copy looks
        !self.0.clone().is_some_and(|mut guard| guard.detected_fork())
    }
}
