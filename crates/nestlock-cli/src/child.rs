//! The command: how it starts behind its guards and in its own process group, and how it is ended.

use std::{
    collections::HashSet,
    ffi::OsString,
    io::{self, PipeWriter, pipe},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, killpg},
    unistd::{Pid, getpgrp},
};
use tokio::net::unix::pipe::Receiver;

use crate::{
    deadline::Deadline,
    family::{Family, Member, Tries},
    guard::{self, LEFT, Told},
    signals::{Signals, is_pause, pause},
    stderr::warn,
    terminal,
    wait::{End, Event},
};

/// A stop of the command within this time after a forwarded stop signal is due to that signal.
const AT_ONCE: Duration = Duration::from_millis(500);

/// The environment variables of the command. `None`: removed, though this process has it.
pub(crate) type Variables = Vec<(String, Option<String>)>;

/// A change of the command's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It has stopped in a terminal. This process has to stop too, because a shell waits for that.
    Stopped(Signal),
    /// The guards have ended it, because this process was suspended until the deadline.
    Overdue,
    /// A guard was killed.
    Unguarded,
}

/// What the first guard reports of the processes below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GuardState {
    /// Some are left.
    Runs,
    /// The command's own guard was killed, and the command with it. The command's process ID may be
    /// reused.
    Alone,
    /// All have ended.
    Done,
    /// Nothing: the first guard has ended, and the remaining processes are children of this process
    /// now.
    Lost,
}

/// Whether the command has the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Terminal {
    /// It does not.
    Elsewhere,
    /// It does, until it ends.
    Given,
    /// It had the terminal when it ended.
    GivenBack,
}

/// The command, and all processes that it starts.
pub(crate) struct Child {
    /// The process group of the command.
    group: Pid,
    family: Family,
    first: Pid,
    guard: GuardState,
    /// Messages of the guards. `None` after the last one.
    told: Option<Receiver>,
    /// The guards notice the end of this process by the end of this pipe.
    _life: PipeWriter,
    deadline: Deadline,
    /// The guards reported the deadline before the command started.
    is_overdue: bool,
    terminal: Terminal,
    /// When a stop signal was last forwarded to the command.
    told_to_stop: Option<Instant>,
    ended: Option<End>,
    /// Everything is being ended, including the guards.
    is_ending: bool,
    /// TERM was sent to the process group.
    is_asked: bool,
    /// Other processes that got TERM.
    asked: HashSet<Pid>,
}

impl Child {
    /// Starts the command, which may run until `deadline`. The deadline is evaluated again while
    /// the guards start. Returns `None` if it passed before the command started.
    pub(crate) async fn begin(
        program: &[OsString],
        variables: Variables,
        deadline: impl Fn() -> Instant,
        signals: &Signals,
    ) -> io::Result<Option<Self>> {
        // before the guards start, so that this process adopts what they leave behind when they are
        // killed
        let mut family = Family::begin()?;
        if family.is_blind() {
            warn(
                "/proc belongs to another process namespace: only the command's process group can be ended",
            );
        }
        let (theirs, life) = pipe()?;
        let (told, tells) = pipe()?;
        let has_terminal = terminal::has_foreground() && terminal::is_for_this_alone();
        let until = Deadline::new(deadline())?;
        let mut command = guard::command(&theirs, &tells, &until, has_terminal)?;
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
        let mut is_overdue = false;
        let group = loop {
            match read(&told) {
                Ok(Some(Told::Guard(pid))) => family.keeper(pid),
                Ok(Some(Told::Begun(pid))) => break pid,
                Ok(Some(Told::Overdue)) => is_overdue = true,
                Ok(Some(_)) => {}
                Ok(None) if is_overdue => return Ok(None),
                Ok(None) => {
                    return Err(io::Error::other(
                        "the guards of the command ended before it started",
                    ));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    until.set(deadline())?;
                    let _ = tokio::time::timeout(LEFT, told.readable()).await;
                }
                Err(error) => return Err(error),
            }
        };
        family.command(group);
        Ok(Some(Self {
            group,
            family,
            first,
            guard: GuardState::Runs,
            told: Some(told),
            _life: life,
            deadline: until,
            is_overdue,
            terminal: if has_terminal {
                Terminal::Given
            } else {
                Terminal::Elsewhere
            },
            told_to_stop: None,
            ended: None,
            is_ending: false,
            is_asked: false,
            asked: HashSet::new(),
        }))
    }

    /// Sets until when the command may run. If this process is suspended, the guards end it then.
    pub(crate) fn until(&self, deadline: Instant) {
        // after a failure the previous deadline stays, which is earlier
        let _ = self.deadline.set(deadline);
    }

    /// Gives the terminal to the command, unless another job has it.
    fn give_terminal(&mut self) {
        if terminal::has_foreground() && terminal::give(self.group) {
            self.terminal = Terminal::Given;
        }
    }

    /// Takes the terminal back. Returns whether the command had it.
    fn take_terminal(&mut self) -> bool {
        let had = self.terminal == Terminal::Given;
        self.terminal = if had {
            Terminal::Elsewhere
        } else {
            self.terminal
        };
        // not from a shell that has taken it back in the meantime, or from the job to which that
        // shell gave it
        let is_its = |group| {
            group == self.group
                || killpg(group, None) == Err(Errno::ESRCH)
                || self.family.has(group)
        };
        let is_taken = had && terminal::foreground().is_some_and(is_its);
        if is_taken {
            terminal::give(getpgrp());
        }
        is_taken
    }

    /// Sends a signal to the command's process group. After the command has ended, sends it to the
    /// processes that it left behind, and to their groups.
    pub(crate) fn send(&mut self, signal: Signal) {
        if is_pause(signal) {
            self.told_to_stop = Some(Instant::now());
        }
        if self.ended.is_none() && self.guard == GuardState::Runs {
            if killpg(self.group, signal) == Err(Errno::EPERM) {
                warn(format_args!(
                    "{signal} does not reach the command: it runs as another user"
                ));
            }
        } else {
            self.family.tell(signal, |_, _| false);
        }
    }

    /// Sends TERM to all processes, once each. A process whose parent still runs gets it after its
    /// parent has ended.
    pub(crate) fn ask(&mut self) {
        if self.ended.is_none() && !std::mem::replace(&mut self.is_asked, true) {
            self.send(Signal::SIGTERM);
        }
        let is_asked =
            |pid, group| (self.is_asked && group == self.group) || self.asked.contains(&pid);
        let asked = self.family.tell(Signal::SIGTERM, is_asked);
        self.asked.extend(asked);
    }

    /// Kills all processes, and returns those that were still there. The caller repeats this until
    /// everything has ended.
    pub(crate) fn end(&mut self, tries: &Tries) -> Vec<Member> {
        self.is_ending = true;
        self.family.end(tries)
    }

    /// Returns how the command ended, if it has.
    pub(crate) fn ended(&self) -> Option<End> {
        self.ended
    }

    /// Returns whether the command had the terminal when it ended.
    pub(crate) fn had_terminal(&self) -> bool {
        self.terminal == Terminal::GivenBack
    }

    /// Returns whether the command and all processes that it started have ended.
    pub(crate) fn is_over(&mut self) -> bool {
        let is_over = match self.guard {
            GuardState::Runs | GuardState::Alone => false,
            GuardState::Done => true,
            GuardState::Lost => !self.family.has_any(),
        };
        // messages that the guards sent before they ended may still be unread
        let is_over = is_over && (self.ended.is_some() || self.told.is_none());
        if is_over {
            self.take_terminal();
        }
        is_over
    }

    /// Waits until the guards may have sent a message. Cancel safe.
    pub(crate) async fn told(&self) {
        match &self.told {
            Some(told) => drop(told.readable().await),
            None => std::future::pending().await,
        }
    }

    /// Returns the next change since the last call.
    pub(crate) fn change(&mut self) -> Option<Change> {
        for event in self.family.news().unwrap_or_default() {
            // act on this only once, as the process ID may be reused after it; the end of the
            // command is reported by the guards
            if let Event::Ended(pid, end) = event
                && pid == self.first
                && matches!(self.guard, GuardState::Runs | GuardState::Alone)
            {
                self.guard = if end == End::Exit(0) {
                    GuardState::Done
                } else {
                    GuardState::Lost
                };
            }
        }
        if std::mem::take(&mut self.is_overdue) {
            self.is_ending = true;
            return Some(Change::Overdue);
        }
        while let Some(told) = &self.told {
            match read(told) {
                Ok(Some(Told::Ended(end))) => self.end_with(end),
                // killing also stops the command first, which is not a change to report
                Ok(Some(Told::Stopped(signal)))
                    if !self.is_ending && guard::is_stopped(self.group) =>
                {
                    let wants_terminal = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
                    if wants_terminal
                        && self.terminal != Terminal::Given
                        && terminal::has_foreground()
                    {
                        self.give_terminal();
                        self.send(Signal::SIGCONT);
                    } else if self.terminal == Terminal::Given
                        || is_pause(signal) && terminal::is_there()
                    {
                        return Some(Change::Stopped(if is_pause(signal) {
                            signal
                        } else {
                            Signal::SIGTSTP
                        }));
                    }
                }
                Ok(Some(Told::Unguarded)) => {
                    self.family.command_ended();
                    if self.guard == GuardState::Runs {
                        self.guard = GuardState::Alone;
                    }
                    if !std::mem::replace(&mut self.is_ending, true) {
                        return Some(Change::Unguarded);
                    }
                }
                Ok(Some(Told::Overdue)) if !std::mem::replace(&mut self.is_ending, true) => {
                    return Some(Change::Overdue);
                }
                Ok(Some(_)) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) | Err(_) => self.told = None,
            }
        }
        // all messages that the guards sent before they ended have been read
        let is_unguarded =
            self.guard == GuardState::Lost && !std::mem::replace(&mut self.is_ending, true);
        is_unguarded.then_some(Change::Unguarded)
    }

    fn end_with(&mut self, end: End) {
        self.ended.get_or_insert(end);
        self.family.command_ended();
        if self.take_terminal() {
            self.terminal = Terminal::GivenBack;
        }
    }

    /// Stops this process as the command has stopped, as a shell expects of a job, until SIGCONT.
    /// Returns whether the command had the terminal. Nothing renews the lock during the stop.
    pub(crate) fn stop_along(&mut self, signal: Signal) -> bool {
        let had_terminal = self.take_terminal();
        // a stop signal that this process got also reached the rest of its job, or was not meant
        // for it
        let came_here = self
            .told_to_stop
            .take()
            .is_some_and(|at| at.elapsed() < AT_ONCE);
        pause(signal, !came_here);
        had_terminal
    }

    /// Resumes a stopped command.
    pub(crate) fn go_on(&mut self, had_terminal: bool) {
        if had_terminal {
            self.give_terminal();
        }
        self.send(Signal::SIGCONT);
    }
}

/// Reads the next message. Returns `None` after the last one.
fn read(told: &Receiver) -> io::Result<Option<Told>> {
    let mut bytes = Told::NOTHING;
    let read = match told.try_read(&mut bytes) {
        // also the result while the runtime has not yet noticed that the pipe is readable
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            nix::unistd::read(told, &mut bytes)?
        }
        read => read?,
    };
    // a message is short enough to be written, and so read, as a whole
    Ok(if read == 0 {
        None
    } else {
        Told::from_bytes(bytes)
    })
}
