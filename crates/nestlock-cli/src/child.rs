//! The command: how it begins, behind its guards and in a process group of its own, and how that is ended.

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

/// What the command does within this time after a signal it does for that.
const AT_ONCE: Duration = Duration::from_millis(500);

/// What the command is told, and what it is not told though this program was.
pub(crate) type Variables = Vec<(String, Option<String>)>;

/// What became of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// In a terminal, so that a shell waits for this program to stop, too.
    Stopped(Signal),
    /// The guards have ended it, as this program stood still until the deadline.
    Overdue,
    /// A guard was killed.
    Unguarded,
}

/// What the first guard says of those below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guard {
    /// There are some.
    Runs,
    /// The command's own was killed, and the command with it: its number may be another's.
    Alone,
    /// All have ended.
    Done,
    /// Nothing: they are this program's own now.
    Lost,
}

/// Whose the terminal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Terminal {
    /// Not the command's.
    Elsewhere,
    /// The command's, until it ends.
    Given,
    /// The command had it when it ended.
    GivenBack,
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
    deadline: Deadline,
    /// The guards have said so before it began.
    is_overdue: bool,
    terminal: Terminal,
    /// When it was told last to stop as a job does.
    told_to_stop: Option<Instant>,
    ended: Option<End>,
    /// The guards are ended, too.
    is_ending: bool,
    /// The process group was asked to end.
    is_asked: bool,
    /// Who was asked besides.
    asked: HashSet<Pid>,
}

impl Child {
    /// Until `deadline` it may work, by what is known then. `None`: that was over before it began.
    pub(crate) async fn begin(
        program: &[OsString],
        variables: Variables,
        deadline: impl Fn() -> Instant,
        signals: &Signals,
    ) -> io::Result<Option<Self>> {
        // what the guards leave behind, when they are killed, is this program's child then
        let mut family = Family::begin()?;
        if family.is_blind() {
            warn("/proc is not that of this process: of what the command begins, only its process group can be ended");
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
                Ok(None) => return Err(io::Error::other("the command's guards ended before it began")),
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
            guard: Guard::Runs,
            told: Some(told),
            _life: life,
            deadline: until,
            is_overdue,
            terminal: if has_terminal { Terminal::Given } else { Terminal::Elsewhere },
            told_to_stop: None,
            ended: None,
            is_ending: false,
            is_asked: false,
            asked: HashSet::new(),
        }))
    }

    /// Until then it may work. When this program stands still, the guards end it at that time.
    pub(crate) fn until(&self, deadline: Instant) {
        // what was said last stays, which is sooner
        let _ = self.deadline.set(deadline);
    }

    /// Hands the terminal over, if it is this program's to give: not to take it away from another job.
    fn give_terminal(&mut self) {
        if terminal::has_foreground() && terminal::give(self.group) {
            self.terminal = Terminal::Given;
        }
    }

    /// Takes the terminal back, and says whether the command had it.
    fn take_terminal(&mut self) -> bool {
        let had = self.terminal == Terminal::Given;
        self.terminal = if had { Terminal::Elsewhere } else { self.terminal };
        // not from a shell that has taken it meanwhile, or the job that this has given it to
        let is_its = |group| group == self.group || killpg(group, None) == Err(Errno::ESRCH) || self.family.has(group);
        let is_taken = had && terminal::foreground().is_some_and(is_its);
        if is_taken {
            terminal::give(getpgrp());
        }
        is_taken
    }

    /// To the command's process group; when the command has ended, to those that it left behind, and to their groups.
    pub(crate) fn send(&mut self, signal: Signal) {
        if is_pause(signal) {
            self.told_to_stop = Some(Instant::now());
        }
        if self.ended.is_none() && self.guard == Guard::Runs {
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
    pub(crate) fn end(&mut self, tries: &Tries) -> Vec<Member> {
        self.is_ending = true;
        self.family.end(tries)
    }

    /// How it ended, if it has.
    pub(crate) fn ended(&self) -> Option<End> {
        self.ended
    }

    /// Whether it had the terminal when it ended.
    pub(crate) fn had_terminal(&self) -> bool {
        self.terminal == Terminal::GivenBack
    }

    /// Whether the command has ended, and all that it began.
    pub(crate) fn is_over(&mut self) -> bool {
        let is_over = match self.guard {
            Guard::Runs | Guard::Alone => false,
            Guard::Done => true,
            Guard::Lost => !self.family.has_any(),
        };
        // what the guards have told before they ended may still have to be read
        let is_over = is_over && (self.ended.is_some() || self.told.is_none());
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
        for event in self.family.news().unwrap_or_default() {
            // once: its number may be another's after that. Of the command's end the guards tell
            if let Event::Ended(pid, end) = event
                && pid == self.first
                && matches!(self.guard, Guard::Runs | Guard::Alone)
            {
                self.guard = if end == End::Exit(0) { Guard::Done } else { Guard::Lost };
            }
        }
        if std::mem::take(&mut self.is_overdue) {
            self.is_ending = true;
            return Some(Change::Overdue);
        }
        while let Some(told) = &self.told {
            match read(told) {
                Ok(Some(Told::Ended(end))) => self.end_with(end),
                // what is being ended is stopped, too
                Ok(Some(Told::Stopped(signal))) if !self.is_ending && guard::is_stopped(self.group) => {
                    let wants_terminal = matches!(signal, Signal::SIGTTIN | Signal::SIGTTOU);
                    if wants_terminal && self.terminal != Terminal::Given && terminal::has_foreground() {
                        self.give_terminal();
                        self.send(Signal::SIGCONT);
                    } else if self.terminal == Terminal::Given || is_pause(signal) && terminal::is_there() {
                        return Some(Change::Stopped(if is_pause(signal) { signal } else { Signal::SIGTSTP }));
                    }
                }
                Ok(Some(Told::Unguarded)) => {
                    self.family.command_ended();
                    if self.guard == Guard::Runs {
                        self.guard = Guard::Alone;
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
        // what it told before it ended was read
        let is_unguarded = self.guard == Guard::Lost && !std::mem::replace(&mut self.is_ending, true);
        is_unguarded.then_some(Change::Unguarded)
    }

    fn end_with(&mut self, end: End) {
        self.ended.get_or_insert(end);
        self.family.command_ended();
        if self.take_terminal() {
            self.terminal = Terminal::GivenBack;
        }
    }

    /// Stops as the command has, as a shell expects of a job, until it is told to go on, and returns whether the command had the
    /// terminal. Meanwhile nothing renews the lock.
    pub(crate) fn stop_along(&mut self, signal: Signal) -> bool {
        let had_terminal = self.take_terminal();
        // of what came to this program the others of its job know: it came to them, too, or was not for them
        let came_here = self.told_to_stop.take().is_some_and(|at| at.elapsed() < AT_ONCE);
        pause(signal, !came_here);
        had_terminal
    }

    /// Lets a stopped command go on.
    pub(crate) fn go_on(&mut self, had_terminal: bool) {
        if had_terminal {
            self.give_terminal();
        }
        self.send(Signal::SIGCONT);
    }
}

/// The next message; `None`: there will be none.
fn read(told: &Receiver) -> io::Result<Option<Told>> {
    let mut bytes = Told::NOTHING;
    let read = match told.try_read(&mut bytes) {
        // so it says, too, while the runtime has not heard of what is there
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => nix::unistd::read(told, &mut bytes)?,
        read => read?,
    };
    // each is written, and so read, as a whole
    Ok(if read == 0 { None } else { Told::from_bytes(bytes) })
}
