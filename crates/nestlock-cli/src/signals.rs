//! The signals that are passed on to the command, and those that end the wait for the lock.

use std::{
    io,
    pin::Pin,
    process::{Child, Command},
    task::{Context, Poll},
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use tokio::signal::unix::{self, SignalKind};

use crate::child::reap;

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

/// What whoever began this program wants ignored, a bit each: `nohup`, or a script with its jobs in the background. A listener
/// would undo that, also for the command. Elsewhere than on Linux nobody says so.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

/// Whether it asks the program to end.
pub(crate) fn is_stop(signal: Signal) -> bool {
    matches!(signal, Signal::SIGHUP | Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTERM)
}

/// Listens from its making on.
pub(crate) struct Signals {
    forwarded: Vec<(Signal, unix::Signal)>,
    child: unix::Signal,
    /// What was blocked when this program began.
    blocked: SigSet,
}

impl Signals {
    pub(crate) fn listen() -> io::Result<Self> {
        let listen = |signal: Signal| Ok((signal, unix::signal(SignalKind::from_raw(signal as i32))?));
        let ignored = ignored();
        let heard = FORWARDED.into_iter().filter(|signal| ignored & (1 << (*signal as u32 - 1)) == 0);
        let forwarded = heard.map(listen).collect::<io::Result<_>>()?;
        let child = unix::signal(SignalKind::child())?;
        let blocked = SigSet::thread_get_mask()?;
        // blocked by whoever began this program, it would never tell that the command has ended
        SigSet::from(Signal::SIGCHLD).thread_unblock()?;
        Ok(Self { forwarded, child, blocked })
    }

    /// Begins a program, which has those signals blocked that this one began with.
    pub(crate) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let own = self.blocked.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let begun = command.spawn();
        own.thread_set_mask()?;
        begun
    }

    /// The next one that was sent to this program, which has no command: all children that end are reaped. Cancel safe.
    async fn next(&mut self) -> Signal {
        loop {
            match self.next_or_child().await {
                Some(signal) => return signal,
                None => while reap().is_some() {},
            }
        }
    }

    /// The next one that asks the program to end. Cancel safe.
    pub(crate) async fn stop(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if is_stop(signal) {
                return signal;
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
        came.map_or(Poll::Pending, Poll::Ready)
    }
}
