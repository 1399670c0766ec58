//! The kinds of fault.

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing arrives, in both directions; then all of it does.
    Silence,
    /// The same, towards the server only.
    SilenceUp,
    /// The same, towards the process only.
    SilenceDown,
    /// Silence in which the connection is cut: what was sent during it is executed late.
    SilenceAndCut,
    CutLost,
    CutLate,
    /// The process stops, as by SIGSTOP.
    PauseProcess,
    /// Only the user's runtime stops.
    PauseUsers,
    PauseServer,
    /// The machine of a process sleeps, and its monotonic clock stops.
    MachineSleeps,
    Slow,
    /// The process is killed. Only its requests in flight remain.
    Crash,
    /// The server restarts, with its records but without its scripts.
    Restart,
    /// The server replies to scripts with errors.
    Refuses,
    Shutdown,
    /// The server forgets everything.
    Forgets,
    /// The server's clock jumps.
    ClockJumps,
    /// Replies are swallowed, doubled or swapped, and the connections stay open.
    Strays,
}

impl Fault {
    pub(crate) const ALL: [Self; 18] = [
        Self::Silence,
        Self::SilenceUp,
        Self::SilenceDown,
        Self::SilenceAndCut,
        Self::CutLost,
        Self::CutLate,
        Self::PauseProcess,
        Self::PauseUsers,
        Self::PauseServer,
        Self::MachineSleeps,
        Self::Slow,
        Self::Crash,
        Self::Restart,
        Self::Refuses,
        Self::Shutdown,
        Self::Forgets,
        Self::ClockJumps,
        Self::Strays,
    ];
}
