//! The signals that are forwarded to the command, and those that end the wait for the lock.

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

/// Signals that are forwarded to the command. SIGCHLD has a listener of its own.
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
/// Signals that stop a job, which are forwarded too.
const PAUSES: [Signal; 3] = [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGTTOU];

/// Returns the signals that were ignored when this process started, one bit each: by `nohup`, or by
/// a script with background jobs. A listener would undo that, for the command too. Systems other
/// than Linux do not report it.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok())
        .unwrap_or(0)
}

/// Returns whether the signal requests termination.
pub(crate) fn is_stop(signal: Signal) -> bool {
    matches!(
        signal,
        Signal::SIGHUP | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTERM
    )
}

/// Returns whether the signal stops a job until SIGCONT.
pub(crate) fn is_pause(signal: Signal) -> bool {
    PAUSES.contains(&signal)
}

/// Stops this process until SIGCONT, as a job without a listener would stop. `all`: stops its whole
/// process group. The kernel ignores the signal if there is no shell that could resume the job.
pub(crate) fn pause(signal: Signal, all: bool) {
    let _ = if all {
        killpg(getpgrp(), signal)
    } else {
        raise(signal)
    };
    // the signal is blocked, so it takes effect only here
    let signal = SigSet::from(signal);
    let _ = signal.thread_unblock();
    let _ = signal.thread_block();
}

/// Ends this process by SIGINT, because a shell loop continues after an exit code. `all`: also ends
/// its process group.
pub(crate) fn end_by_interrupt(all: bool) {
    stderr::finish();
    if all {
        let _ = killpg(getpgrp(), Signal::SIGINT);
    }
    // SIGINT does not end the first process of a container, and signal-hook would then abort it
    if getpid() != Pid::from_raw(1) {
        let _ = signal_hook::low_level::emulate_default_handler(Signal::SIGINT as i32);
    }
}

/// The signal listeners, active from construction on.
pub(crate) struct Signals {
    forwarded: Vec<(Signal, unix::Signal)>,
    pauses: pauses::Pauses,
    child: unix::Signal,
    /// The signal mask with which this process started.
    blocked: SigSet,
}

impl Signals {
    pub(crate) fn listen() -> io::Result<Self> {
        let listen =
            |signal: Signal| Ok((signal, unix::signal(SignalKind::from_raw(signal as i32))?));
        let ignored = ignored();
        let is_heard = |signal: &Signal| ignored & (1 << (*signal as u32 - 1)) == 0;
        let forwarded = FORWARDED
            .into_iter()
            .filter(is_heard)
            .map(listen)
            .collect::<io::Result<_>>()?;
        let child = unix::signal(SignalKind::child())?;
        let blocked = SigSet::thread_get_mask()?;
        // if SIGCHLD was blocked from the start, the end of the command would go unnoticed
        SigSet::from(Signal::SIGCHLD).thread_unblock()?;
        // blocked, so that a write over the file size limit fails like any other write
        SigSet::from(Signal::SIGXFSZ).thread_block()?;
        let pauses = pauses::Pauses::listen(PAUSES.into_iter().filter(is_heard).collect())?;
        Ok(Self {
            forwarded,
            pauses,
            child,
            blocked,
        })
    }

    /// Starts a program with the signal mask with which this process started.
    pub(crate) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let own = self.blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let begun = command.spawn();
        own.thread_set_mask()?;
        begun
    }

    /// Returns the next signal that requests termination, while there is no command. Reaps all
    /// children that end. Cancel safe.
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

    /// Returns the next signal, or `None` if a child has changed its state. Cancel safe.
    pub(crate) async fn next_or_child(&mut self) -> Option<Signal> {
        std::future::poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(signal) => Poll::Ready(Some(signal)),
            Poll::Pending => Pin::new(&mut self.child).poll_recv(cx).map(|_| None),
        })
        .await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Signal> {
        let came = self
            .forwarded
            .iter_mut()
            .find_map(|(signal, stream)| stream.poll_recv(cx).is_ready().then_some(*signal));
        came.map_or_else(|| self.pauses.poll(cx), Poll::Ready)
    }
}

/// The stop signals are blocked and read from a descriptor: with a listener, they could no longer
/// stop this process as they do by default.
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
        /// Blocks the signals. It has to run before other threads start, so that they inherit the
        /// mask.
        pub(super) fn listen(signals: SigSet) -> io::Result<Self> {
            signals.thread_block()?;
            let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
            #[expect(
                deprecated,
                reason = "the replacement requires `unsafe`; nothing else owns this descriptor"
            )]
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

/// On other systems the stop signals stop this process, but not the command.
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
