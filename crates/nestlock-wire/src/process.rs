//! Detects that this process is a fork of the one that created a client.
//!
//! A fork has the client's sockets and none of its threads: the server would execute the requests
//! of the fork, and send the replies to the parent process.

/// The process that created a client. A comparison costs one load; a comparison of process ids
/// would cost each request a system call on some platforms.
///
/// For an example, see [`Epochs`].
///
/// [`Epochs`]: crate::Epochs
#[derive(Debug, Clone)]
pub struct Home(Option<forkguard::Guard>);

impl Home {
    pub(crate) fn here() -> Self {
        Self(forkguard::Guard::try_new().ok())
    }

    /// Returns whether this process is the one that created it.
    pub(crate) fn is_here(&self) -> bool {
        // a guard reports a fork only once: a copy is checked, so that every call reports it
        !self
            .0
            .clone()
            .is_some_and(|mut guard| guard.detected_fork())
    }
}
