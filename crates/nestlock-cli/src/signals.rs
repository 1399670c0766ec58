//! The signals that are passed on to the command, and those that end the wait for the lock.

use std::{
    io,
    pin::Pin,
    process::{Child, Command},
    task::{Context, Poll},
};

use nix::{
    sys::signal::{SigSet, SigmaskHow, Signal, killpg, raise},
    unistd::{Pid, getpgrp, getpid},
};
use tokio::signal::unix::{self, SignalKind};

use crate::{stderr, wait};

/// Passed on. Of CHLD only the listener knows.
const FORWARDED: [Signal; 8] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
    Signal::SIGCONT,
];
/// Passed on, too: what stops a job.
const PAUSES: [Signal; 3] = [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];

/// What was to be ignored when this program began, a bit each: `nohup`, or a script with its jobs in the background. A listener
/// would undo that, also for the command. Elsewhere than on Linux nothing says so.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

/// Whether it asks the program to end.
pub(crate) fn is_stop(signal: Signal) -> bool {
    matches!(signal, Signal::SIGHUP | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTERM)
}

/// Whether it stops a job until that goes on.
pub(crate) fn is_pause(signal: Signal) -> bool {
    PAUSES.contains(&signal)
}

/// Stops this program until it is told to go on, and with `all` its process group, as a job without a listener would be: not
/// where no shell is there that would let it go on.
pub(crate) fn pause(signal: Signal, all: bool) {
    let _ = if all { killpg(getpgrp(), signal) } else { raise(signal) };
    // here, where it was blocked
    let signal = SigSet::from(signal);
    let _ = signal.thread_unblock();
    let _ = signal.thread_block();
}

/// Ends this program by SIGINT, and with `all` its process group: a shell's loop goes on after an exit code.
pub(crate) fn end_by_interrupt(all: bool) {
    stderr::finish();
    if all {
        let _ = killpg(getpgrp(), Signal::SIGINT);
    }
    // the first process of a container is not ended by it, and signal-hook aborts what goes on after it
    if getpid() != Pid::from_raw(1) {
        let _ = signal_hook::low_level::emulate_default_handler(Signal::SIGINT as i32);
    }
}

/// Listens from its making on.
pub(crate) struct Signals {
    forwarded: Vec<(Signal, unix::Signal)>,
    pauses: pauses::Pauses,
    child: unix::Signal,
    /// What was blocked when this program began.
    blocked: SigSet,
}

impl Signals {
    pub(crate) fn listen() -> io::Result<Self> {
        let listen = |signal: Signal| Ok((signal, unix::signal(SignalKind::from_raw(signal as i32))?));
        let ignored = ignored();
        let is_heard = |signal: &Signal| ignored & (1 << (*signal as u32 - 1)) == 0;
        let forwarded = FORWARDED.into_iter().filter(is_heard).map(listen).collect::<io::Result<_>>()?;
        let child = unix::signal(SignalKind::child())?;
        let blocked = SigSet::thread_get_mask()?;
        // blocked from the beginning on, it would never tell that the command has ended
        SigSet::from(Signal::SIGCHLD).thread_unblock()?;
        // a file that may not be written is an error like others
        SigSet::from(Signal::SIGXFSZ).thread_block()?;
        let pauses = pauses::Pauses::listen(PAUSES.into_iter().filter(is_heard).collect())?;
        Ok(Self { forwarded, pauses, child, blocked })
    }

    /// Begins a program, which has those signals blocked that this one began with.
    pub(crate) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let own = self.blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let begun = command.spawn();
        own.thread_set_mask()?;
        begun
    }

    /// The next one that asks this program, which has no command, to end. All children that end are reaped. Cancel safe.
    pub(crate) async fn stop(&mut self) -> Signal {
        loop {
            match self.next_or_child().await {
                Some(signal) if is_stop(signal) => return signal,
                Some(signal) if is_pause(signal) => pause(signal, false),
                Some(_) => {}
                None => drop(wait::news(&mut Vec::new())),
            }
        }
    }

    /// One of these two: a signal, or `None`, the command changed its state. Cancel safe.
    pub(crate) async fn next_or_child(&mut self) -> Option<Signal> {
        std::future::poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(signal) => Poll::Ready(Some(signal)),
            Poll::Pending => Pin::new(&mut self.child).poll_recv(cx).map(|_| None),
        })
        .await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Signal> {
        let came =
            self.forwarded.iter_mut().find_map(|(signal, stream)| stream.poll_recv(cx).is_ready().then_some(*signal));
        came.map_or_else(|| self.pauses.poll(cx), Poll::Ready)
    }
}

/// What stops a job is blocked, and read from a descriptor: after a listener it could not do what it does without one.
#[cfg(target_os = "linux")]
mod pauses {
    use std::{
        io,
        task::{Context, Poll},
    };

    use nix::sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    };
    use tokio::io::unix::AsyncFd;

    pub(super) struct Pauses(AsyncFd<SignalFd>);

    impl Pauses {
        /// Before there are other threads: they block what this one does.
        pub(super) fn listen(signals: SigSet) -> io::Result<Self> {
            signals.thread_block()?;
            let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
            #[expect(deprecated, reason = "what came after it takes `unsafe`; this descriptor is its own")]
            Ok(Self(AsyncFd::new(SignalFd::with_flags(&signals, flags)?)?))
        }

        pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<Signal> {
            while let Poll::Ready(Ok(mut ready)) = self.0.poll_read_ready(cx) {
                match self.0.get_ref().read_signal() {
                    Ok(Some(came)) => {
                        if let Ok(signal) = Signal::try_from(came.ssi_signo.cast_signed()) {
                            return Poll::Ready(signal);
                        }
                    }
                    _ => ready.clear_ready(),
                }
            }
            Poll::Pending
        }
    }
}

/// Elsewhere they stop this program, and not the command.
#[cfg(not(target_os = "linux"))]
mod pauses {
    use std::{
        io,
        task::{Context, Poll},
    };

    use nix::sys::signal::{SigSet, Signal};

    pub(super) struct Pauses;

    impl Pauses {
        #[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
        pub(super) fn listen(_signals: SigSet) -> io::Result<Self> {
            Ok(Self)
        }

        #[expect(clippy::unused_self, reason = "as on Linux")]
        pub(super) fn poll(&self, _cx: &mut Context<'_>) -> Poll<Signal> {
            Poll::Pending
        }
    }
}
