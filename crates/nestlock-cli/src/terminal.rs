//! The terminal in which this process was started, if any, wherever its input and output go.

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

/// Returns whether there is a terminal.
pub(crate) fn is_there() -> bool {
    terminal().is_some()
}

/// Returns whether the process group of this process has the terminal.
pub(crate) fn has_foreground() -> bool {
    foreground() == Some(getpgrp())
}

/// Returns the process group that has the terminal.
pub(crate) fn foreground() -> Option<Pid> {
    tcgetpgrp(terminal()?).ok()
}

/// Returns whether only this process uses the terminal: it reads from it, and no output goes to
/// another process of a pipeline.
pub(crate) fn is_for_this_alone() -> bool {
    fn is_pipe(end: impl AsFd) -> bool {
        fstat(end).is_ok_and(|stat| {
            SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFIFO
        })
    }
    stdin().is_terminal() && !is_pipe(stdout()) && !is_pipe(stderr())
}

/// Gives the terminal to a process group. It works from the background too, because SIGTTOU is
/// blocked.
pub(crate) fn give(group: Pid) -> bool {
    let blocked = SigSet::from(Signal::SIGTTOU);
    let Ok(before) = blocked.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK) else {
        return false;
    };
    let is_given = terminal().is_some_and(|terminal| tcsetpgrp(terminal, group).is_ok());
    let _ = before.thread_set_mask();
    is_given
}
