//! The command: how it begins, behind its guards and in a process group of its own, and how that is ended.

use std::{
    collections::HashSet,
    ffi::OsString,
    io::{self, IsTerminal, PipeWriter, pipe, stdin},
    os::fd::OwnedFd,
};

use nix::{
    errno::Errno,
    sys::{
        signal::{SigSet, Signal, kill, killpg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getpgrp, getpid, tcgetpgrp, tcsetpgrp},
};
use tokio::net::unix::pipe::Receiver;

use crate::{
    family::{Family, Member},
    guard::{self, Told},
    signals::Signals,
    warn,
};

/// What the command is told, and what it is not told though this program was.
pub(crate) type Variables = Vec<(String, Option<String>)>;

/// What became of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// `as_a_job`: by the terminal, or in the foreground of one, so that a shell waits for this program to stop, too.
    Stopped { as_a_job: bool },
    /// A guard was killed.
    Unguarded,
}

/// What the first guard says of those below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guard {
    /// There are some.
    Runs,
    /// All have ended.
    Done,
    /// Nothing: they are this program's own now.
    Lost,
}

/// The exit code of what ended like this: 128 more than the number of the signal.
pub(crate) fn exit_code(status: WaitStatus) -> Option<u8> {
    match status {
        WaitStatus::Exited(_, code) => Some(code.to_le_bytes()[0]),
        WaitStatus::Signaled(_, signal, _) => Some(128 + signal as u8),
        _ => None,
    }
}

/// The next child that has ended.
pub(crate) fn reap() -> Option<WaitStatus> {
    waitpid(None, Some(WaitPidFlag::WNOHANG)).ok().filter(|status| exit_code(*status).is_some())
}

/// The command, and all that it begins.
pub(crate) struct Child {
    /// The command's.
    group: Pid,
    family: Family,
    first: Pid,
    guard: Guard,
    /// What the guards tell, while they do.
    told: Option<Receiver>,
    /// Its end tells the guards of this program's.
    _life: PipeWriter,
    /// It has the terminal, which comes back at its end.
    has_terminal: bool,
    ended: Option<u8>,
    /// The guards are ended, too.
    is_ending: bool,
    /// The process group was asked to end.
    is_asked: bool,
    /// Who was asked besides.
    asked: HashSet<Pid>,
}

impl Child {
    pub(crate) async fn begin(program: &[OsString], variables: Variables, signals: &Signals) -> io::Result<Self> {
        // what the guards leave behind, when they are killed, is this program's child then
        let mut family = Family::begin()?;
        let (theirs, life) = pipe()?;
        let (told, tells) = pipe()?;
        let has_terminal = has_foreground();
        let mut command = guard::command(&theirs, &tells, has_terminal)?;
        command.args(program);
        for (name, value) in variables {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let first = Pid::from_raw(signals.spawn(&mut command)?.id().cast_signed());
        drop((theirs, tells));
        let told = Receiver::from_owned_fd(OwnedFd::from(told))?;
        let group = loop {
            told.readable().await?;
            match read(&told) {
                Ok(Some(Told::Guard(pid))) => family.keeper(pid),
                Ok(Some(Told::Begun(pid))) => break pid,
                Ok(Some(_)) => {}
                Ok(None) => return Err(io::Error::other("the command's guards ended before it began")),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        };
        family.command(group);
        Ok(Self {
            group,
            family,
            first,
            guard: Guard::Runs,
            told: Some(told),
            _life: life,
            has_terminal,
            ended: None,
            is_ending: false,
            is_asked: false,
            asked: HashSet::new(),
        })
    }

    /// Hands the terminal over, if it is this program's to give: not to take it away from another job.
    fn give_terminal(&mut self) {
        if has_foreground() {
            self.has_terminal = tcsetpgrp(stdin(), self.group).is_ok();
        }
    }

    /// Takes the terminal back.
    fn take_terminal(&mut self) {
        if std::mem::take(&mut self.has_terminal) {
            set_foreground(getpgrp());
        }
    }

    /// To the command's process group; when the command has ended, to those that it left behind, and to their groups.
    pub(crate) fn send(&self, signal: Signal) {
        if self.ended.is_none() {
            if killpg(self.group, signal) == Err(Errno::EPERM) {
                warn(format_args!("{signal} does not reach the command: it runs as another user"));
            }
        } else {
            self.family.tell(signal, |_, _| false);
        }
    }

    /// Asks all of them to end: each once, and those whose parent runs on when that has ended.
    pub(crate) fn ask(&mut self) {
        if self.ended.is_none() && !std::mem::replace(&mut self.is_asked, true) {
            self.send(Signal::SIGTERM);
        }
        let is_asked = |pid, group| (self.is_asked && group == self.group) || self.asked.contains(&pid);
        let asked = self.family.tell(Signal::SIGTERM, is_asked);
        self.asked.extend(asked);
    }

    /// Ends all of them, and says who was still there. Again, until all is over.
    pub(crate) fn end(&mut self) -> Vec<Member> {
        self.is_ending = true;
        self.family.end()
    }

    /// Its exit code, if it has ended.
    pub(crate) fn code(&self) -> Option<u8> {
        self.ended
    }

    /// Whether the command has ended, and all that it began.
    pub(crate) fn is_over(&mut self) -> bool {
        let is_over = match self.guard {
            Guard::Runs => false,
            Guard::Done => true,
            Guard::Lost => !self.family.has_any(),
        };
        if is_over {
            self.take_terminal();
        }
        is_over
    }

    /// Something may have changed. Cancel safe.
    pub(crate) async fn told(&self) {
        match &self.told {
            Some(told) => drop(told.readable().await),
            None => std::future::pending().await,
        }
    }

    /// What has changed since this was asked last.
    pub(crate) fn change(&mut self) -> Option<Change> {
        while let Some(status) = reap() {
            if status.pid() == Some(self.group) {
                self.end_with(exit_code(status));
            } else if status.pid() == Some(self.first) {
                self.guard = if exit_code(status) == Some(0) { Guard::Done } else { Guard::Lost };
                if self.guard == Guard::Lost && !self.is_ending {
                    return Some(Change::Unguarded);
                }
            }
        }
        while let Some(told) = &self.told {
            match read(told) {
                Ok(Some(Told::Ended(code))) => self.end_with(Some(code)),
                // what is being ended is stopped, too
                Ok(Some(Told::Stopped(signal))) if !self.is_ending && guard::is_stopped(self.group) => {
                    let by_terminal = matches!(signal, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU);
                    return Some(Change::Stopped { as_a_job: self.has_terminal || by_terminal });
                }
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => self.told = None,
            }
        }
        None
    }

    fn end_with(&mut self, code: Option<u8>) {
        self.ended = self.ended.or(code);
        self.take_terminal();
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

/// The next message; `None`: there will be none.
fn read(told: &Receiver) -> io::Result<Option<Told>> {
    let mut bytes = Told::NOTHING;
    // each is written, and so read, as a whole
    Ok(if told.try_read(&mut bytes)? == 0 { None } else { Told::from_bytes(bytes) })
}

/// Whether the terminal is this program's process group's.
fn has_foreground() -> bool {
    stdin().is_terminal() && tcgetpgrp(stdin()) == Ok(getpgrp())
}

/// Gives the terminal to a process group, from the background: who blocks the signal for that may.
pub(crate) fn set_foreground(group: Pid) {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGTTOU);
    let _ = blocked.thread_block();
    let _ = tcsetpgrp(stdin(), group);
    let _ = blocked.thread_unblock();
}
