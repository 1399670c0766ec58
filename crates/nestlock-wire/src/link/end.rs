//! How a link ends: it is closed, abandoned, or leaves a server that another one has replaced.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use tokio::time::sleep;

use crate::{
    link::{HEARTBEAT, Link, LinkState},
    wake::catch_waker_panic,
};

/// How long a server that the link leaves has to accept a new connection, if a request has been in
/// flight for at least a heartbeat: after that it counts as hung. Any other server may only be
/// slow, and has ten times as long.
const HANGS: Duration = Duration::from_millis(100);
/// How long closing a client waits for requests that were sent.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

impl Link {
    /// Closes the link for good, and wakes the callers that wait for a connection. Returns whether
    /// it was already closed.
    pub(crate) fn mark_closed(&self) -> bool {
        let was_closed = self.closed.swap(true, Ordering::AcqRel);
        catch_waker_panic(|| _ = self.state.send_replace(LinkState::Down));
        was_closed
    }

    /// Leaves a server that is no longer responsible. Refusals of requests in flight still count,
    /// because a server that has handed over refuses. Any other reply does not.
    pub fn leave(self: &Arc<Self>) {
        self.is_left.store(true, Ordering::Release);
        self.mark_closed();
        let link = Arc::clone(self);
        self.dial.settings.own.spawn(async move {
            let left = Instant::now();
            let is_silent = link
                .waits_since()
                .is_some_and(|since| since.elapsed() >= HEARTBEAT);
            let knock = link
                .dial
                .connect(if is_silent { HANGS } else { 10 * HANGS });
            let (knock, ()) = tokio::join!(knock, sleep(HANGS));
            if let Ok(connection) = knock {
                connection.end();
                while link.in_flight() > 0 && left.elapsed() < link.limit() {
                    sleep(HANGS / 10).await;
                }
            }
            link.end();
        });
    }

    /// Returns whether the server's replies no longer count, except refusals.
    pub(crate) fn is_left(&self) -> bool {
        self.is_left.load(Ordering::Acquire)
    }

    /// Ends the connection without waiting for anything.
    pub fn abandon(&self) {
        self.mark_closed();
        self.end();
    }

    /// Ends the connection after the replies to all requests that were sent, or after 500 ms.
    /// Idempotent.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped midway, the connection stays open. [`Link::abandon`] ends it.
    pub async fn close(&self) {
        if !self.is_closed() && self.is_up() {
            let _ = self.in_time(DRAIN_TIMEOUT, self.echo()).await;
        }
        self.abandon();
    }
}
