//! What the kernel tells of children: also of those that a real-time signal ended.

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
    /// By the signal of this number.
    Signal(u8),
}

impl End {
    /// Of what a signal ended, 128 more than the number of the signal.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Exit(code) => code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// What has happened to a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Ended(Pid, End),
    Stopped(Pid, Signal),
    /// There are no children.
    Childless,
}

/// How much is told at once: what begins others and ends may do so faster than it is reaped.
const AT_ONCE: usize = 256;

/// Adds what has happened since this was asked last, in its order. What has ended is reaped: its number may be another's next.
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
    // there may be more, of which the kernel has told already: no loop sleeps before that
    Ok(raise(Signal::SIGCHLD)?)
}

/// What has happened next, if anything has.
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
        if let Some(signal) = status.stopping_signal().and_then(|signal| Signal::try_from(signal).ok()) {
            return Ok(Some(Event::Stopped(pid, signal)));
        }
    }
}

/// Whether there are children, or some that have ended and were not reaped. A subreaper has some until all that is below it has
/// ended: the kernel hands on the children of what ends before that can be reaped.
pub(crate) fn has_children() -> bool {
    waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT).err()
        != Some(Errno::CHILD)
}
