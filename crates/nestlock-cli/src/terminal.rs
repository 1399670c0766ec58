//! The terminal that this program was begun in, if any, whatever its input and output are.

use std::{
    fs::File,
    io::{IsTerminal, stderr, stdin, stdout},
    os::fd::AsFd,
};

use nix::{
    sys::{
        signal::{SigSet, Signal},
        stat::{SFlag, fstat},
    },
    unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp},
};

fn terminal() -> Option<File> {
    File::open("/dev/tty").ok()
}

/// Whether there is one.
pub(crate) fn is_there() -> bool {
    terminal().is_some()
}

/// Whether this program's process group has it.
pub(crate) fn has_foreground() -> bool {
    foreground() == Some(getpgrp())
}

/// Which process group has it.
pub(crate) fn foreground() -> Option<Pid> {
    tcgetpgrp(terminal()?).ok()
}

/// Whether it is this program's to read from, and for no other of a pipeline to write to.
pub(crate) fn is_for_this_alone() -> bool {
    fn is_pipe(end: impl AsFd) -> bool {
        fstat(end).is_ok_and(|stat| SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO)
    }
    stdin().is_terminal() && !is_pipe(stdout()) && !is_pipe(stderr())
}

/// Gives it to a process group, also from the background: a process that blocks the signal for that may.
pub(crate) fn give(group: Pid) -> bool {
    let blocked = SigSet::from(Signal::SIGTTOU);
    let Ok(before) = blocked.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK) else { return false };
    let is_given = terminal().is_some_and(|terminal| tcsetpgrp(terminal, group).is_ok());
    let _ = before.thread_set_mask();
    is_given
}
