//! The guards between nestlock and the command, which are this program, too. Each adopts what the command leaves behind, and ends
//! all that is below it when nestlock, or the guard below it, is gone.

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
    family::{ENDED_ALL, Family, Tries, may_leave_some, unended},
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
/// One more than may be killed along with nestlock.
const GUARDS: u8 = 2;
/// How often what is left is looked at while it is asked to end.
pub(crate) const LEFT: Duration = Duration::from_millis(20);
/// Of stops no more is told than this, in bytes that nestlock has not read: while it stands still, the end and the deadline have room.
const UNREAD: u64 = 1_000;
/// How often at least a guard looks. A machine that slept wakes up in the midst of a pause; and elsewhere than on Linux no signal
/// tells of a process group's end.
const LOOK: Duration = if cfg!(target_os = "linux") { Duration::from_millis(500) } else { LEFT };

/// What the guards tell nestlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Told {
    /// This is one.
    Guard(Pid),
    /// This is the command.
    Begun(Pid),
    Stopped(Signal),
    Ended(End),
    /// The guard of the command was killed, and the command with it.
    Unguarded,
    /// nestlock stood still until the deadline: all of it is ended.
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

/// The first guard, to which the command's own words are still to be added. `life` ends with nestlock, `told` is for messages.
pub(crate) fn command(
    life: &PipeReader,
    told: &PipeWriter,
    deadline: &Deadline,
    takes_terminal: bool,
) -> io::Result<Command> {
    let (life, told, deadline) = (passed_on(life)?, passed_on(told)?, passed_on(&deadline.file())?);
    Guard { below: GUARDS - 1, life, told, deadline, takes_terminal }.command()
}

/// Lets the next program inherit a descriptor: its number.
fn passed_on(end: &impl AsFd) -> io::Result<RawFd> {
    fcntl(end.as_fd(), FcntlArg::F_SETFD(FdFlag::empty()))?;
    Ok(end.as_fd().as_raw_fd())
}

/// A descriptor that was passed on, as one of this program's own.
fn inherited(end: RawFd, writes: bool) -> io::Result<File> {
    let fds = if cfg!(target_os = "linux") { "/proc/self/fd" } else { "/dev/fd" };
    File::options().read(!writes).write(writes).open(format!("{fds}/{end}"))
}

/// This program, though it may have been replaced while it waited for the lock.
fn own_program() -> io::Result<Command> {
    let path: PathBuf = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
    let mut command = Command::new(path);
    // a group of its own: what is meant for nestlock's, or for the command's, does not reach a guard
    command.arg0("nestlock").process_group(0);
    Ok(command)
}

/// Whether the command is stopped now.
pub(crate) fn is_stopped(command: Pid) -> bool {
    // its name may be anything
    let stat = std::fs::read(format!("/proc/{command}/stat"));
    stat.map_or(cfg!(not(target_os = "linux")), |stat| String::from_utf8_lossy(&stat).contains(") T "))
}

/// What this program is begun for, if it is not by a user.
pub(crate) enum Part {
    Guard(Guard, Vec<OsString>),
    /// What becomes the command.
    Step {
        parent: Pid,
        takes_terminal: bool,
        /// The guard writes a byte when it has told nestlock of the command.
        may: RawFd,
        program: Vec<OsString>,
    },
}

/// A guard, as its arguments say.
#[derive(Clone, Copy)]
pub(crate) struct Guard {
    /// How many more are to be below it.
    below: u8,
    life: RawFd,
    told: RawFd,
    deadline: RawFd,
    takes_terminal: bool,
}

impl Part {
    pub(crate) fn asked_for() -> Option<Self> {
        fn number<T: std::str::FromStr>(args: &mut impl Iterator<Item = OsString>) -> Option<T> {
            args.next()?.to_str()?.parse().ok()
        }
        let mut args = std::env::args_os().skip(1);
        match args.next()?.to_str()? {
            GUARD => {
                let (below, life, told) = (number(&mut args)?, number(&mut args)?, number(&mut args)?);
                let (deadline, takes_terminal) = (number(&mut args)?, number(&mut args)?);
                Some(Self::Guard(Guard { below, life, told, deadline, takes_terminal }, args.collect()))
            }
            STEP => {
                let (parent, takes_terminal) = (Pid::from_raw(number(&mut args)?), number(&mut args)?);
                Some(Self::Step { parent, takes_terminal, may: number(&mut args)?, program: args.collect() })
            }
            _ => None,
        }
    }

    pub(crate) fn run(self) -> ExitCode {
        match self {
            Self::Guard(guard, program) => {
                // on this thread, and no other: the command is told of the end of the thread that began it
                match crate::runtime().and_then(|runtime| runtime.block_on(guard.run(&program))) {
                    Ok(true) => ExitCode::SUCCESS,
                    Ok(false) => ExitCode::from(ENDED_ALL),
                    Err(error) => {
                        warn(error);
                        ExitCode::from(crate::FAILED)
                    }
                }
            }
            Self::Step { parent, takes_terminal, may, program } => step(parent, takes_terminal, may, &program),
        }
    }
}

impl Guard {
    fn command(self) -> io::Result<Command> {
        let mut command = own_program()?;
        command.arg(GUARD).args([self.below.to_string(), self.life.to_string(), self.told.to_string()]);
        command.args([self.deadline.to_string(), self.takes_terminal.to_string()]);
        Ok(command)
    }

    fn close(self) -> io::Result<()> {
        for end in [self.life, self.told, self.deadline] {
            close(end)?;
        }
        Ok(())
    }

    /// Until all that is below it has ended. `false`: it ended that itself.
    async fn run(self, program: &[OsString]) -> io::Result<bool> {
        // none of them is for a guard
        let mut signals = Signals::listen()?;
        let mut family = Family::begin()?;
        let (life, told) = (Receiver::from_file(inherited(self.life, false)?)?, inherited(self.told, true)?);
        let deadline = Deadline::of(inherited(self.deadline, false)?);
        // not waited for where it is full, as nestlock stands still
        fcntl(&told, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let tell = |what: Told| (&told).write_all(&what.to_bytes());
        tell(Told::Guard(getpid()))?;
        let (is_last, mut is_well) = (self.below == 0, true);
        let begins = if is_last { Some(pipe()?) } else { None };
        let mut next = if let Some((may, _)) = &begins {
            // not for the command
            self.close()?;
            let mut step = own_program()?;
            step.args([STEP, &getpid().to_string(), &self.takes_terminal.to_string(), &passed_on(may)?.to_string()]);
            step
        } else {
            Self { below: self.below - 1, ..self }.command()?
        };
        let begun = Pid::from_raw(signals.spawn(next.args(program))?.id().cast_signed());
        if let Some((may, mut begin)) = begins {
            drop(may);
            family.command(begun);
            is_well = !deadline.left()?.is_zero();
            if is_well {
                // the command begins when nestlock knows of it: a guard that is killed before that leaves none behind
                tell(Told::Begun(begun))?;
                // the step may have been killed: that is seen below
                let _ = begin.write_all(&[0]);
            } else {
                // the step ends by itself
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
                    // its number may be another's after its end
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
                // the last one says it, while there is one
                if is_alone && !is_said {
                    for member in unended(&left, false) {
                        warn(format_args!(
                            "{member}; nestlock is gone or stands still, so that it may work on without the lock"
                        ));
                        is_said = true;
                    }
                }
                let _ = tokio::time::timeout(tries.pause(&left), signals.next_or_child()).await;
            }
        }
    }
}

/// Until nestlock is gone, which never writes anything.
async fn gone(life: &Receiver) {
    while life.readable().await.is_ok() {
        match life.try_read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}

/// Becomes the command, when nestlock knows of it, and unless who began it has died.
fn step(parent: Pid, takes_terminal: bool, may: RawFd, program: &[OsString]) -> ExitCode {
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_pdeathsig(Signal::SIGKILL) {
        warn(format_args!("the command would outlive nestlock: {error}"));
        return ExitCode::from(crate::FAILED);
    }
    // it may have died before that
    if getppid() != parent {
        return ExitCode::from(crate::FAILED);
    }
    let told = inherited(may, false).and_then(|mut told| told.read(&mut [0]));
    if close(may).is_err() || !matches!(told, Ok(1)) {
        return ExitCode::from(crate::FAILED);
    }
    if takes_terminal {
        // before it reads
        terminal::give(getpgrp());
    }
    let Some((program, args)) = program.split_first() else { return ExitCode::from(crate::USAGE) };
    let error = Command::new(program).args(args).exec();
    warn(format_args!("{}: {error}", program.display()));
    let missing = error.kind() == io::ErrorKind::NotFound;
    ExitCode::from(if missing { NOT_FOUND } else { NOT_EXECUTABLE })
}
