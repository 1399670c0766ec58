//! The guards between nestlock and the command, which run this same program. Each adopts what the
//! command leaves behind, and ends everything below it when nestlock, or the guard below it, is
//! gone.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, PipeReader, PipeWriter, Read, Write, pipe},
    os::{
        fd::{AsFd, AsRawFd, RawFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::{Command, ExitCode},
    time::Duration,
};

use nix::{
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    sys::signal::Signal,
    unistd::{Pid, close, getpgrp, getpid, getppid},
};
use tokio::net::unix::pipe::Receiver;

use crate::{
    deadline::Deadline,
    failure::{FAILED, USAGE},
    family::{ENDED_ALL, Family, Tries, may_leave_some, unended},
    runtime::runtime,
    signals::Signals,
    stderr::warn,
    terminal,
    wait::{End, Event},
};

const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;
/// The first argument of a guard.
const GUARD: &str = "__guard";
/// The first argument of the step between the last guard and the command.
const STEP: &str = "__step";
/// Number of guards: one more than may be killed along with nestlock.
const GUARDS: u8 = 2;
/// How often the remaining processes are checked after they got TERM.
pub(crate) const LEFT: Duration = Duration::from_millis(20);
/// No stop is reported while nestlock has this many unread bytes. That leaves room for the end and
/// the deadline while nestlock is suspended.
const UNREAD: u64 = 1_000;
/// Longest pause between two checks of a guard. A suspended machine may wake up in the middle of a
/// pause; and on systems other than Linux no signal reports the end of a process group.
const LOOK: Duration = if cfg!(target_os = "linux") {
    Duration::from_millis(500)
} else {
    LEFT
};

/// A message of a guard to nestlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// The process ID of a guard.
    Guard(Pid),
    /// The process ID of the command.
    Begun(Pid),
    Stopped(Signal),
    Ended(End),
    /// The guard of the command was killed, and the command with it.
    Unguarded,
    /// nestlock was suspended until the deadline, so everything is being ended.
    Overdue,
}

impl Told {
    pub(crate) const NOTHING: [u8; 5] = [0; 5];

    fn to_bytes(self) -> [u8; 5] {
        let (what, value) = match self {
            Self::Guard(pid) => (b'g', pid.as_raw()),
            Self::Begun(pid) => (b'b', pid.as_raw()),
            Self::Stopped(signal) => (b's', signal as i32),
            Self::Ended(End::Exit(code)) => (b'e', code.into()),
            Self::Ended(End::Signal(signal)) => (b'k', signal.into()),
            Self::Unguarded => (b'u', 0),
            Self::Overdue => (b'o', 0),
        };
        let [a, b, c, d] = value.to_le_bytes();
        [what, a, b, c, d]
    }

    pub(crate) fn from_bytes([what, a, b, c, d]: [u8; 5]) -> Option<Self> {
        let value = i32::from_le_bytes([a, b, c, d]);
        match what {
            b'g' => Some(Self::Guard(Pid::from_raw(value))),
            b'b' => Some(Self::Begun(Pid::from_raw(value))),
            b's' => Signal::try_from(value).ok().map(Self::Stopped),
            b'e' => Some(Self::Ended(End::Exit(a))),
            b'k' => Some(Self::Ended(End::Signal(a))),
            b'u' => Some(Self::Unguarded),
            b'o' => Some(Self::Overdue),
            _ => None,
        }
    }
}

/// Returns the `Command` for the first guard; the caller adds the user's command. `life` ends with
/// nestlock, and `told` is for messages.
pub(crate) fn command(
    life: &PipeReader,
    told: &PipeWriter,
    deadline: &Deadline,
    takes_terminal: bool,
) -> io::Result<Command> {
    let (life, told, deadline) = (
        passed_on(life)?,
        passed_on(told)?,
        passed_on(&deadline.file())?,
    );
    Guard {
        below: GUARDS - 1,
        life,
        told,
        deadline,
        takes_terminal,
    }
    .command()
}

/// Lets the next program inherit a descriptor, and returns its number.
fn passed_on(end: &impl AsFd) -> io::Result<RawFd> {
    fcntl(end.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(end.as_fd().as_raw_fd())
}

/// Opens an inherited descriptor as a file of this process.
fn inherited(end: RawFd, writes: bool) -> io::Result<File> {
    let fds = if cfg!(target_os = "linux") {
        "/proc/self/fd"
    } else {
        "/dev/fd"
    };
    File::options()
        .read(!writes)
        .write(writes)
        .open(format!("{fds}/{end}"))
}

/// Returns this program. On Linux this works even if its file was replaced while nestlock waited
/// for the lock.
fn own_program() -> io::Result<Command> {
    let path: PathBuf = if cfg!(target_os = "linux") {
        "/proc/self/exe".into()
    } else {
        std::env::current_exe()?
    };
    let mut command = Command::new(path);
    // a process group of its own, so that signals for nestlock's or the command's do not reach a
    // guard
    command.arg0("nestlock").process_group(0);
    Ok(command)
}

/// Returns whether the command is stopped now.
pub(crate) fn is_stopped(command: Pid) -> bool {
    // read as bytes: the process name in it may not be text
    let stat = std::fs::read(format!("/proc/{command}/stat"));
    stat.map_or(cfg!(not(target_os = "linux")), |stat| {
        String::from_utf8_lossy(&stat).contains(") T ")
    })
}

/// The role of a process that nestlock itself starts.
pub(crate) enum Role {
    Guard(Guard, Vec<OsString>),
    /// The process that becomes the user's command.
    Step {
        parent: Pid,
        takes_terminal: bool,
        /// The guard writes a byte here after it has reported the command to nestlock.
        may: RawFd,
        program: Vec<OsString>,
    },
}

/// A guard, as its arguments describe it.
#[derive(Clone, Copy)]
pub(crate) struct Guard {
    /// How many guards follow below it.
    below: u8,
    life: RawFd,
    told: RawFd,
    deadline: RawFd,
    takes_terminal: bool,
}

impl Role {
    pub(crate) fn asked_for() -> Option<Self> {
        fn number<T: std::str::FromStr>(args: &mut impl Iterator<Item = OsString>) -> Option<T> {
            args.next()?.to_str()?.parse().ok()
        }
        let mut args = std::env::args_os().skip(1);
        match args.next()?.to_str()? {
            GUARD => {
                let (below, life, told) =
                    (number(&mut args)?, number(&mut args)?, number(&mut args)?);
                let (deadline, takes_terminal) = (number(&mut args)?, number(&mut args)?);
                Some(Self::Guard(
                    Guard {
                        below,
                        life,
                        told,
                        deadline,
                        takes_terminal,
                    },
                    args.collect(),
                ))
            }
            STEP => {
                let (parent, takes_terminal) =
                    (Pid::from_raw(number(&mut args)?), number(&mut args)?);
                Some(Self::Step {
                    parent,
                    takes_terminal,
                    may: number(&mut args)?,
                    program: args.collect(),
                })
            }
            _ => None,
        }
    }

    pub(crate) fn run(self) -> ExitCode {
        match self {
            Self::Guard(guard, program) => {
                // on this thread: the parent-death signal kills the command at the end of the
                // thread that started it
                match runtime().and_then(|runtime| runtime.block_on(guard.run(&program))) {
                    Ok(true) => ExitCode::SUCCESS,
                    Ok(false) => ExitCode::from(ENDED_ALL),
                    Err(error) => {
                        warn(error);
                        ExitCode::from(FAILED)
                    }
                }
            }
            Self::Step {
                parent,
                takes_terminal,
                may,
                program,
            } => step(parent, takes_terminal, may, &program),
        }
    }
}

impl Guard {
    fn command(self) -> io::Result<Command> {
        let mut command = own_program()?;
        command.arg(GUARD).args([
            self.below.to_string(),
            self.life.to_string(),
            self.told.to_string(),
        ]);
        command.args([self.deadline.to_string(), self.takes_terminal.to_string()]);
        Ok(command)
    }

    fn close(self) -> io::Result<()> {
        for end in [self.life, self.told, self.deadline] {
            close(end)?;
        }
        Ok(())
    }

    /// Runs until everything below has ended. Returns `false` if this guard ended it.
    async fn run(self, program: &[OsString]) -> io::Result<bool> {
        // the listeners only keep these signals from ending a guard
        let mut signals = Signals::listen()?;
        let mut family = Family::begin()?;
        let (life, told) = (
            Receiver::from_file(inherited(self.life, false)?)?,
            inherited(self.told, true)?,
        );
        let deadline = Deadline::of(inherited(self.deadline, false)?);
        // do not block while the pipe is full: nestlock is suspended then, and this guard has to
        // enforce the deadline
        fcntl(&told, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let tell = |what: Told| (&told).write_all(&what.to_bytes());
        tell(Told::Guard(getpid()))?;
        let (is_last, mut is_well) = (self.below == 0, true);
        let begins = if is_last { Some(pipe()?) } else { None };
        let mut next = if let Some((may, _)) = &begins {
            // the command must not inherit these
            self.close()?;
            let mut step = own_program()?;
            step.args([
                STEP,
                &getpid().to_string(),
                &self.takes_terminal.to_string(),
                &passed_on(may)?.to_string(),
            ]);
            step
        } else {
            Self {
                below: self.below - 1,
                ..self
            }
            .command()?
        };
        let begun = Pid::from_raw(signals.spawn(next.args(program))?.id().cast_signed());
        if let Some((may, mut begin)) = begins {
            drop(may);
            family.command(begun);
            is_well = !deadline.left()?.is_zero();
            if is_well {
                // the command starts only when nestlock knows of it: a guard that is killed before
                // that leaves no command behind
                tell(Told::Begun(begun))?;
                // the step may have been killed, which the loop below notices
                let _ = begin.write_all(&[0]);
            } else {
                // without the byte, the step ends by itself
                tell(Told::Overdue)?;
            }
        } else {
            family.keeper(begun);
            self.close()?;
        }
        let mut child = Some(begun);
        let (mut tries, mut is_alone, mut is_said) = (Tries::default(), is_last, false);
        loop {
            let mut is_childless = false;
            for event in family.news()? {
                match event {
                    Event::Childless => is_childless = !family.has_any(),
                    // after the end its process ID may be reused
                    Event::Stopped(pid, signal) if is_last && child == Some(pid) => {
                        if rustix::io::ioctl_fionread(&told).is_ok_and(|unread| unread < UNREAD) {
                            let _ = tell(Told::Stopped(signal));
                        }
                    }
                    Event::Ended(pid, end) if child == Some(pid) => {
                        child = None;
                        if is_last {
                            let _ = tell(Told::Ended(end));
                        } else {
                            is_alone = true;
                            if is_well && may_leave_some(end) {
                                let _ = tell(Told::Unguarded);
                            }
                            is_well = is_well && end == End::Exit(0);
                        }
                    }
                    Event::Stopped(..) | Event::Ended(..) => {}
                }
            }
            if is_childless {
                return Ok(is_well);
            }
            if is_well {
                let left = deadline.left()?;
                if left.is_zero() {
                    let _ = tell(Told::Overdue);
                    is_well = false;
                    continue;
                }
                tokio::select! {
                    _ = signals.next_or_child() => {}
                    () = gone(&life) => is_well = false,
                    () = tokio::time::sleep(left.min(LOOK)) => {}
                }
            } else {
                let left = family.end(&tries);
                // the lowest guard that is left reports it
                if is_alone && !is_said {
                    for member in unended(&left, false) {
                        warn(format_args!(
                            "{member}; nestlock is gone or suspended, so it may run on without the lock"
                        ));
                        is_said = true;
                    }
                }
                let _ = tokio::time::timeout(tries.pause(&left), signals.next_or_child()).await;
            }
        }
    }
}

/// Waits until nestlock is gone. nestlock never writes to this pipe.
async fn gone(life: &Receiver) {
    while life.readable().await.is_ok() {
        match life.try_read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

/// Becomes the command when nestlock knows of it, unless the guard has died.
fn step(parent: Pid, takes_terminal: bool, may: RawFd, program: &[OsString]) -> ExitCode {
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
        warn(format_args!("the command would outlive nestlock: {error}"));
        return ExitCode::from(FAILED);
    }
    // the guard may have died before the signal was requested
    if getppid() != parent {
        return ExitCode::from(FAILED);
    }
    let told = inherited(may, false).and_then(|mut told| told.read(&mut [0]));
    if close(may).is_err() || !matches!(told, Ok(1)) {
        return ExitCode::from(FAILED);
    }
    if takes_terminal {
        // before the command reads from it
        terminal::give(getpgrp());
    }
    let Some((program, args)) = program.split_first() else {
        return ExitCode::from(USAGE);
    };
    let error = Command::new(program).args(args).exec();
    warn(format_args!("{}: {error}", program.display()));
    let missing = error.kind() == io::ErrorKind::NotFound;
    ExitCode::from(if missing { NOT_FOUND } else { NOT_EXECUTABLE })
}
