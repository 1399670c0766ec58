//! The command: how it begins, in a process group of its own, and how that is ended.

use std::{
    ffi::OsString,
    io::{self, IsTerminal, stdin},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode},
};

use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal, kill, killpg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getpgrp, getpid, getppid, tcgetpgrp, tcsetpgrp},
};

use crate::warn;

const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;
/// The first argument of the step between this program and the command.
const STEP: &str = "__step";

/// What this program does in the command's place, before it becomes the command: who began it may die.
pub(crate) struct Step {
    parent: Pid,
    program: Vec<OsString>,
}

impl Step {
    /// Whether that is what this process was begun for.
    pub(crate) fn asked_for() -> Option<Self> {
        let mut args = std::env::args_os().skip(1);
        if args.next()? != STEP {
            return None;
        }
        let parent = args.next()?.to_str()?.parse().ok()?;
        Some(Self { parent: Pid::from_raw(parent), program: args.collect() })
    }

    pub(crate) fn run(self) -> ExitCode {
        #[cfg(target_os = "linux")]
        if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
            warn(format_args!("the command would outlive nestlock: {error}"));
            return ExitCode::from(crate::FAILED);
        }
        // it may have died before that
        if getppid() != self.parent {
            return ExitCode::from(crate::FAILED);
        }
        let Some((program, args)) = self.program.split_first() else { return ExitCode::from(crate::USAGE) };
        let error = Command::new(program).args(args).exec();
        warn(format_args!("{}: {error}", program.display()));
        let missing = error.kind() == io::ErrorKind::NotFound;
        ExitCode::from(if missing { NOT_FOUND } else { NOT_EXECUTABLE })
    }
}

/// This program, though it may have been replaced while it waited for the lock.
fn own_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

/// What the command is told, and what it is not told though this program was.
pub(crate) type Variables = Vec<(String, Option<String>)>;

/// What became of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// With this exit code: 128 more than the number of the signal that ended it.
    Ended(u8),
    /// `as_a_job`: by the terminal, or in the foreground of one, so that a shell waits for this program to stop, too.
    Stopped { as_a_job: bool },
}

/// Reaps children that have ended, before there is a command and after it: as process 1, or as the command's subreaper.
pub(crate) fn reap() {
    while let Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {}
}

/// The command, and all that it begins in its process group.
pub(crate) struct Child {
    group: Pid,
    /// It has the terminal, which comes back at its end.
    has_terminal: bool,
}

impl Child {
    pub(crate) fn begin(program: &[OsString], variables: Variables) -> io::Result<Self> {
        // whom the command leaves behind is this program's child then, and seen to end
        #[cfg(target_os = "linux")]
        nix::sys::prctl::set_child_subreaper(true)?;
        let mut step = Command::new(own_program()?);
        step.arg0("nestlock").arg(STEP).arg(getpid().to_string()).args(program).process_group(0);
        for (name, value) in variables {
            match value {
                Some(value) => step.env(name, value),
                None => step.env_remove(name),
            };
        }
        let child = step.spawn()?;
        let group = Pid::from_raw(child.id().cast_signed());
        let mut child = Self { group, has_terminal: false };
        child.give_terminal();
        Ok(child)
    }

    /// Hands the terminal over, if it is this program's to give: not to take it away from another job.
    fn give_terminal(&mut self) {
        if stdin().is_terminal() && tcgetpgrp(stdin()) == Ok(getpgrp()) {
            self.has_terminal = tcsetpgrp(stdin(), self.group).is_ok();
            // it may have read too early, which stops it
            let _ = self.send(Signal::SIGCONT);
        }
    }

    /// Takes the terminal back, from the background: who blocks the signal for that may.
    fn take_terminal(&mut self) {
        if std::mem::take(&mut self.has_terminal) {
            let mut blocked = SigSet::empty();
            blocked.add(Signal::SIGTTOU);
            let _ = blocked.thread_block();
            let _ = tcsetpgrp(stdin(), getpgrp());
            let _ = blocked.thread_unblock();
        }
    }

    /// To all of the group. `false`: there is nobody left.
    pub(crate) fn send(&self, signal: impl Into<Option<Signal>>) -> bool {
        killpg(self.group, signal) != Err(Errno::ESRCH)
    }

    /// Whether anybody is left of the group, when the command has ended.
    pub(crate) fn has_left_any(&self) -> bool {
        reap();
        self.send(None)
    }

    /// What has changed since this was asked last.
    pub(crate) fn change(&mut self) -> io::Result<Option<Change>> {
        loop {
            let change = match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                // what the command left behind
                Ok(status) if status.pid().is_some_and(|pid| pid != self.group) => continue,
                Ok(WaitStatus::Exited(_, code)) => Change::Ended(code.to_le_bytes()[0]),
                Ok(WaitStatus::Signaled(_, signal, _)) => Change::Ended(128 + signal as u8),
                Ok(WaitStatus::Stopped(_, signal)) => {
                    let by_terminal = matches!(signal, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU);
                    Change::Stopped { as_a_job: self.has_terminal || by_terminal }
                }
                Ok(_) => return Ok(None),
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            if matches!(change, Change::Ended(_)) {
                self.take_terminal();
            }
            return Ok(Some(change));
        }
    }

    /// Stops as the command has, as a shell expects of a job, until it is told to go on. Meanwhile nobody renews the lock.
    pub(crate) fn stop_along(&mut self) {
        self.take_terminal();
        let _ = kill(getpid(), Signal::SIGSTOP);
    }

    /// Lets a stopped command go on.
    pub(crate) fn go_on(&mut self) {
        self.give_terminal();
        self.send(Signal::SIGCONT);
    }
}
