//! What the kernel tells of children: also of those that a real-time signal ended.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use rustix::{
    io::Errno,
    process::{WaitId, WaitIdOptions, WaitOptions, wait, waitid},
};

use nix::{sys::signal::Signal, unistd::Pid};

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
    /// To none, by now.
    Nothing,
    /// There are no children.
    Childless,
}

/// How much is looked at before anything else is done: what begins others and ends may do so faster than it is reaped.
const AT_ONCE: usize = 256;

/// What was reaped beside the loop that asks: the kernel tells each only once.
static REAPED: Mutex<Vec<Event>> = Mutex::new(Vec::new());

/// What has happened, one after the other, or the first part of it.
pub(crate) fn all() -> impl Iterator<Item = io::Result<Event>> {
    let reaped = std::mem::take(&mut *REAPED.lock().unwrap_or_else(PoisonError::into_inner));
    reaped.into_iter().map(Ok).chain(news())
}

fn news() -> impl Iterator<Item = io::Result<Event>> {
    (0..AT_ONCE).map(|_| next()).take_while(|event| !matches!(event, Ok(Event::Nothing)))
}

/// Reaps what has ended, for a loop that looks at processes: a chain of fork and exit is faster than the looking. [`all`] still
/// tells of it. Returns the numbers, which others may have next.
pub(crate) fn reap() -> Vec<Pid> {
    let events = news().map_while(|event| event.ok().filter(|event| *event != Event::Childless));
    let events: Vec<Event> = events.collect();
    let number = |event: &Event| if let Event::Ended(pid, _) = event { Some(*pid) } else { None };
    let ended = events.iter().filter_map(number).collect();
    REAPED.lock().unwrap_or_else(PoisonError::into_inner).extend(events);
    ended
}

/// What has happened next. What has ended is reaped.
fn next() -> io::Result<Event> {
    loop {
        let (pid, status) = match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
            Ok(Some((pid, status))) => (Pid::from_raw(pid.as_raw_pid()), status),
            Ok(None) => return Ok(Event::Nothing),
            Err(Errno::CHILD) => return Ok(Event::Childless),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let byte = |number: i32| number.to_le_bytes()[0];
        if let Some(code) = status.exit_status() {
            return Ok(Event::Ended(pid, End::Exit(byte(code))));
        }
        if let Some(signal) = status.terminating_signal() {
            return Ok(Event::Ended(pid, End::Signal(byte(signal))));
        }
        if let Some(signal) = status.stopping_signal().and_then(|signal| Signal::try_from(signal).ok()) {
            return Ok(Event::Stopped(pid, signal));
        }
    }
}

/// Whether there are children, or some that have ended and were not reaped. A subreaper has some until all that is below it has
/// ended: the kernel hands on the children of what ends before that can be reaped.
pub(crate) fn has_children() -> bool {
    waitid(WaitId::All, WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT).err()
        != Some(Errno::CHILD)
}
