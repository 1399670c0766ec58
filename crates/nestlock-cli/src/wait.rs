//! Reads from the kernel what happens to children, including those that a real-time signal ends.

use std::io;

use rustix::{
    io::Errno,
    process::{WaitId, WaitIdOptions, WaitOptions, wait, waitid},
};

use nix::{
    sys::signal::{Signal, raise},
    unistd::Pid,
};

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Exit(u8),
    /// By the signal with this number.
    Signal(u8),
}

impl End {
    /// Returns the exit code. For a signal it is 128 plus the number of the signal.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// A change of a child's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Ended(Pid, End),
    Stopped(Pid, Signal),
    /// No children are left.
    Childless,
}

/// Most events per call: processes that fork and exit may do so faster than they are reaped.
const AT_ONCE: usize = 256;

/// Adds the events since the last call, in order. A child that has ended is reaped, so its process
/// ID may be reused.
pub(crate) fn news(events: &mut Vec<Event>) -> io::Result<()> {
    for _ in 0..AT_ONCE {
        match next()? {
            Some(event) => events.push(event),
            None => return Ok(()),
        }
        if events.last() == Some(&Event::Childless) {
            return Ok(());
        }
    }
    // the SIGCHLD for the remaining events may already be consumed: without another one, the caller
    // would sleep
    Ok(raise(Signal::SIGCHLD)?)
}

/// Returns the next event, if there is one.
fn next() -> io::Result<Option<Event>> {
    loop {
        let (pid, status) = match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            Ok(Some((pid, status))) => (Pid::from_raw(pid.as_raw_pid()), status),
            Ok(None) => return Ok(None),
            Err(Errno::CHILD) => return Ok(Some(Event::Childless)),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let byte = |number: i32| number.to_le_bytes()[0];
        if let Some(code) = status.exit_status() {
            return Ok(Some(Event::Ended(pid, End::Exit(byte(code)))));
        }
        if let Some(signal) = status.terminating_signal() {
            return Ok(Some(Event::Ended(pid, End::Signal(byte(signal)))));
        }
        if let Some(signal) = status
            .stopping_signal()
            .and_then(|signal| Signal::try_from(signal).ok())
        {
            return Ok(Some(Event::Stopped(pid, signal)));
        }
    }
}

/// Returns whether there are children, including those that have ended and are not reaped. A
/// subreaper has some until everything below it has ended: the kernel passes on the children of a
/// process before that process can be reaped.
pub(crate) fn has_children() -> bool {
    waitid(
        WaitId::All,
        WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT,
    )
    .err()
        != Some(Errno::CHILD)
}
