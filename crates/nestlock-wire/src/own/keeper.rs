//! The work of the client's own thread for a connection: it times requests out, and takes the
//! socket from a runtime that does not read.
//!
//! It checks the driver every 250 ms, and at once with each renewal, subscription, and request of a
//! thread that is not on that runtime. It wakes the driver. If that is not polled within 25 ms, or
//! its runtime ends, the socket moves here. A busy runtime may poll the driver and still not ask the
//! system for input for a long time: so if the system says that there is something to read (or a
//! full socket does not drain), and still does after 25 ms more, the socket moves, too. After 1 s the
//! other runtime may try again; if that fails at once, after twice that time, up to 1 min.
//!
//! Nothing in flight is lost: the halves leave one reactor and join the other. Decision 17.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{runtime::Handle, time::sleep};

use crate::{
    clock::Instant,
    failure::Failure,
    log,
    own::{LATE_IN_PART, OwnConnection, driver::Driver, incoming::Incoming, lock, notify_all},
    stream,
};

/// How often the client checks whether another runtime reads.
const POLL: Duration = Duration::from_millis(250);
/// How long a driver may take to run after it was woken, and then to make progress.
const DRIVER_PATIENCE: Duration = Duration::from_millis(25);
/// How long a runtime that did not read is left alone. The time doubles, up to `LONGEST_REST`, if
/// the runtime fails again soon after its return.
const REST: Duration = if cfg!(test) {
    Duration::from_millis(20)
} else {
    Duration::from_secs(1)
};
const LONGEST_REST: Duration = Duration::from_secs(60);

/// The task that times out a connection's requests.
pub(super) struct Keeper(pub(super) Arc<OwnConnection>);

impl Keeper {
    /// Times requests out until the connection ends. Runs on the client's own thread.
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
    /// Ends the connection, whatever the reason for the drop: without timeouts, requests could wait
    /// forever.
    fn drop(&mut self) {
        self.0.end("the task that times out requests has ended");
    }
}

impl OwnConnection {
    /// Lets a runtime drive the connection as soon as it polls its tasks. Does nothing if it is the
    /// client's own runtime.
    pub(super) fn drive_on(self: &Arc<Self>, runtime: &Handle) {
        if runtime.id() != self.own.id() {
            let _ = self.driven_by.set(runtime.id());
            // No driver in charge has the number 0, so this one takes the socket over at its first
            // poll.
            runtime.spawn(Driver::new(self, 0, false));
            self.own.spawn(Arc::clone(self).watch());
        }
    }

    /// Takes the socket from the other runtime if that does not read, and lets it try again later.
    /// Runs on the client's own thread.
    async fn watch(self: Arc<Self>) {
        let mut ended = self.is_ended.subscribe();
        let (mut rest, mut returned) = (REST, None::<Instant>);
        loop {
            let is_elsewhere = self.is_elsewhere();
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => return,
                () = sleep(POLL), if is_elsewhere => {}
                () = self.reader_check.notified() => {}
            }
            if !self.is_elsewhere() || !self.is_waited_for() || self.is_read().await {
                continue;
            }
            self.take_over();
            // A runtime that fails within 4 polls of its return has not recovered.
            let again = returned.is_some_and(|returned| returned.elapsed() < 4 * POLL);
            rest = if again {
                LONGEST_REST.min(2 * rest)
            } else {
                REST
            };
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => return,
                () = sleep(rest) => {}
            }
            returned = Some(Instant::now());
            self.may_return.store(true, Ordering::Release);
            self.resting.wake();
        }
    }

    /// Returns whether the driver makes progress if there is work. A poll alone proves nothing: a
    /// busy runtime polls a woken task many times before it finds out that data has arrived.
    async fn is_read(&self) -> bool {
        let polls = self.polls.load(Ordering::Acquire);
        self.waker.wake();
        sleep(DRIVER_PATIENCE).await;
        if self.polls.load(Ordering::Acquire) == polls {
            return false;
        }
        let Some(progress) = self.due() else {
            return true;
        };
        sleep(DRIVER_PATIENCE).await;
        self.due() != Some(progress)
    }

    /// Returns the progress so far (passes, and bytes given to the socket). Returns `None` if there
    /// is nothing to read, and nothing to write to a full socket.
    fn due(&self) -> Option<(u64, u64)> {
        let has_more = lock(&self.incoming)
            .as_ref()
            .is_some_and(|incoming| incoming.is_behind() || incoming.reader.has_more());
        let out = lock(&self.out);
        (has_more || out.is_full).then(|| (self.reads.load(Ordering::Acquire), out.from))
    }

    /// Returns whether the socket belongs to another runtime than the client's own.
    pub(super) fn is_elsewhere(&self) -> bool {
        lock(&self.incoming)
            .as_ref()
            .is_some_and(|incoming| !incoming.is_on_own_thread)
    }

    /// Returns whether the driver has work, or will have. Otherwise it is not worth waking.
    fn is_waited_for(&self) -> bool {
        !lock(&self.out).waiting.is_empty() || self.due().is_some()
    }

    /// Fails the requests whose time is over. Returns when to check again.
    fn expire(&self) -> Instant {
        let now = Instant::now();
        let mut guard = lock(&self.out);
        let (mut told, sent_in_part) = guard.drop_expired(now);
        if sent_in_part {
            drop(guard);
            notify_all(told);
            self.end(LATE_IN_PART);
            return now;
        }
        // A request that is sent from now on expires no earlier than this, or it wakes the keeper.
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
            told.extend(
                waiting
                    .reply_to
                    .take()
                    .map(|tell| (tell, Err(Failure::TimedOut))),
            );
        }
        out.alarm = Some(next);
        drop(guard);
        notify_all(told);
        next
    }

    /// Moves the socket to the client's own thread. Must be called in the context of its runtime.
    pub(super) fn take_over(self: &Arc<Self>) {
        log::later!(DEBUG, polls = self.polls.load(Ordering::Acquire); "the runtime that reads replies does not run; the client's own thread takes over");
        match self.move_here(true) {
            Ok(Some(driver)) => _ = self.own.spawn(Driver::new(self, driver, true)),
            Ok(None) => {}
            Err(error) => self.end(&error.to_string()),
        }
    }

    /// Moves the socket to the runtime in whose context this is called. Returns the number of its
    /// driver there. Returns `None` if the connection has ended, or if the client's own runtime
    /// already has the socket. After an error, the socket is closed, and the caller must end the
    /// connection.
    pub(super) fn move_here(&self, is_own: bool) -> io::Result<Option<u64>> {
        let mut incoming = lock(&self.incoming);
        let elsewhere = incoming.take_if(|incoming| !(is_own && incoming.is_on_own_thread));
        let Some(before) = elsewhere else {
            return Ok(None);
        };
        let mut half = lock(&self.writer);
        let Some(writer) = half.take() else {
            return Ok(None);
        };
        let (reader, writer) = stream::moved_here(before.reader, writer)?;
        let driver = before.driver + 1;
        *half = Some(writer);
        *incoming = Some(Incoming {
            reader,
            driver,
            is_on_own_thread: is_own,
            ..before
        });
        drop((half, incoming));
        // A write that waits for the old runtime would never continue, so let the new driver flush.
        // The old driver wakes up, and finds that it is no longer in charge.
        self.writable.is_so.store(true, Ordering::Release);
        self.waker.wake();
        self.reader_check.notify_one();
        Ok(Some(driver))
    }
}
