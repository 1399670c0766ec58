//! What the client's own thread does for a connection: the timeouts, and an eye on whoever reads.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{runtime::Handle, time::sleep};

use super::{
    Connection, LATE_IN_PART,
    driver::{Driver, Incoming},
    lock, tell_all,
};
use crate::{
    clock::Instant,
    log,
    store::wire::{Failure, stream},
};

/// How often it is looked at whether another runtime reads.
const LOOK: Duration = Duration::from_millis(250);
/// As long may a driver take that was woken.
const DRIVER_PATIENCE: Duration = Duration::from_millis(25);
/// A runtime that did not read is left alone for so long; twice as long if it does not read soon after that, either.
const REST: Duration = if cfg!(test) { Duration::from_millis(20) } else { Duration::from_secs(1) };
const LONGEST_REST: Duration = Duration::from_secs(60);

/// Has the timeouts of a connection.
pub(super) struct Keeper(pub(super) Arc<Connection>);

impl Keeper {
    /// On the client's own thread.
    pub(super) async fn keep(self) {
        let mut ended = self.0.is_ended.subscribe();
        loop {
            let pause = self.0.expire().saturating_duration_since(Instant::now());
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => return,
                () = sleep(pause) => {}
                () = self.0.sooner.notified() => {}
            }
        }
    }
}

impl Drop for Keeper {
    /// Without timeouts there is no connection, whyever that is.
    fn drop(&mut self) {
        self.0.end("nobody has its timeouts any more");
    }
}

impl Connection {
    /// Lets a runtime drive the connection, as soon as it polls what is spawned there.
    pub(super) fn drive_on(self: &Arc<Self>, runtime: &Handle) {
        if runtime.id() != self.own.id() {
            // no driver has this number: it takes the socket over when it is polled first
            runtime.spawn(Driver::new(self, 0, false));
            self.own.spawn(Arc::clone(self).watch());
        }
    }

    /// Takes the socket from another runtime when that does not read, and lets it try again later. On the client's own thread.
    async fn watch(self: Arc<Self>) {
        let mut ended = self.is_ended.subscribe();
        let (mut rest, mut returned) = (REST, None::<Instant>);
        loop {
            let is_elsewhere = self.is_elsewhere();
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => return,
                () = sleep(LOOK), if is_elsewhere => {}
                () = self.look.notified() => {}
            }
            if !self.is_elsewhere() || !self.is_waited_for() || self.is_read().await {
                continue;
            }
            self.take_over();
            let again = returned.is_some_and(|returned| returned.elapsed() < 4 * LOOK);
            rest = if again { LONGEST_REST.min(2 * rest) } else { REST };
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => return,
                () = sleep(rest) => {}
            }
            returned = Some(Instant::now());
            self.may_return.store(true, Ordering::Release);
            self.resting.wake();
        }
    }

    /// Whether the driver goes on if there is anything to do. To be polled is not enough: a busy runtime polls what was woken
    /// many times before it finds out that something has come.
    async fn is_read(&self) -> bool {
        let polls = self.polls.load(Ordering::Acquire);
        self.waker.wake();
        sleep(DRIVER_PATIENCE).await;
        if self.polls.load(Ordering::Acquire) == polls {
            return false;
        }
        let Some(progress) = self.due() else { return true };
        sleep(DRIVER_PATIENCE).await;
        self.due() != Some(progress)
    }

    /// What was done by now, if there is something to be read, or to be written to a full socket.
    fn due(&self) -> Option<(u64, u64)> {
        let has_more =
            lock(&self.incoming).as_ref().is_some_and(|incoming| incoming.is_behind() || incoming.reader.has_more());
        let out = lock(&self.out);
        (has_more || out.is_full).then(|| (self.reads.load(Ordering::Acquire), out.from))
    }

    pub(super) fn is_elsewhere(&self) -> bool {
        lock(&self.incoming).as_ref().is_some_and(|incoming| !incoming.is_on_own_thread)
    }

    /// Whether there is something to be done, or will be: else nobody is woken for it.
    fn is_waited_for(&self) -> bool {
        !lock(&self.out).waiting.is_empty() || self.due().is_some()
    }

    /// Tells those whose time is over; when to look again.
    fn expire(&self) -> Instant {
        let now = Instant::now();
        let mut guard = lock(&self.out);
        let (mut told, sent_in_part) = guard.drop_late(now);
        if sent_in_part {
            drop(guard);
            tell_all(told);
            self.end(LATE_IN_PART);
            return now;
        }
        // whoever asks from now on may wait for so long
        let mut next = now + self.limit;
        let out = &mut *guard;
        out.is_mixed &= !out.waiting.is_empty();
        for waiting in &mut out.waiting {
            if waiting.until.over > now {
                next = next.min(waiting.until.over);
                if out.is_mixed {
                    continue;
                }
                break;
            }
            told.extend(waiting.tell.take().map(|tell| (tell, Err(Failure::Late))));
        }
        out.alarm = Some(next);
        drop(guard);
        tell_all(told);
        next
    }

    /// Takes the socket to the client's own thread. There.
    pub(super) fn take_over(self: &Arc<Self>) {
        log::later!(DEBUG, polls = self.polls.load(Ordering::Acquire); "the runtime that reads answers does not run; the client's own thread does");
        match self.move_here(true) {
            Ok(Some(driver)) => _ = self.own.spawn(Driver::new(self, driver, true)),
            Ok(None) => {}
            Err(error) => self.end(&error.to_string()),
        }
    }

    /// Takes the socket to the runtime in whose context this is called: the number of its driver there. `None`: ended, or there
    /// already.
    pub(super) fn move_here(&self, is_own: bool) -> io::Result<Option<u64>> {
        let mut incoming = lock(&self.incoming);
        let elsewhere = incoming.take_if(|incoming| !(is_own && incoming.is_on_own_thread));
        let Some(before) = elsewhere else { return Ok(None) };
        let mut half = lock(&self.writer);
        let Some(writer) = half.take() else { return Ok(None) };
        let (reader, writer) = stream::moved_here(before.reader, writer)?;
        let driver = before.driver + 1;
        *half = Some(writer);
        *incoming = Some(Incoming { reader, driver, is_on_own_thread: is_own, ..before });
        drop((half, incoming));
        // whoever waits to write is told by the new one; the old driver finds out
        self.writable.is_so.store(true, Ordering::Release);
        self.waker.wake();
        self.look.notify_one();
        Ok(Some(driver))
    }
}
