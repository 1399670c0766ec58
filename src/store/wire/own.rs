//! A connection of our own: many tasks, few system calls, at most once by construction.
//!
//! A request stands in a buffer when [`Connection::ask`] returns. If nothing else is under way it is written at once, by
//! whoever asks. Otherwise its future comes back after one round of its scheduler, and whoever comes back first writes what
//! all have gathered: no task, thread or timer is between a caller and the socket. Answers are read by one task, the
//! driver, and told to their callers in order. It comes back, too, and writes what was asked by futures that nobody polls
//! any more: whatever is in the buffer, something is under way whose answer the driver will read, or it is about to come back.
//!
//! The driver runs where the client was made, so that those whom it wakes are beside it: on a thread of our own it would
//! wake each caller by itself, and on a current-thread runtime nothing would gather any more. Nobody may depend on a runtime
//! of the user's, though: a *keeper* on the client's own thread has the timeouts, and takes the socket over when what has
//! come is not read, or that runtime ends. A little later the driver may try again.

mod driver;
mod greet;
mod keeper;
mod out;

use std::{
    future::Future,
    io, mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot, watch},
};

use self::{
    driver::{Driver, Incoming},
    keeper::Keeper,
    out::{Out, Turn, Waiting},
};
pub(super) use self::{
    greet::connect,
    out::{Part, Reply},
};
use super::{
    Failure, MOST_UNDER_WAY, Sink, Texts, Until, contain, numbered,
    resp::{self, Value},
    stream::{Reader, Writer},
};
use crate::{clock::Instant, error::StoreErrorKind, log, process::Home};

/// A buffer that has grown beyond is not kept.
const KEPT_BUFFER: usize = 256 << 10;
/// Why a connection ends that takes no more for so long.
const LATE_IN_PART: &str = "the rest of a request could not be sent in time";

/// What a caller is told.
type Told = Result<Value, Failure>;

/// One connection, from the first byte to the end: it never comes back.
pub(in super::super) struct Connection {
    out: Mutex<Out>,
    incoming: Mutex<Option<Incoming>>,
    writer: Mutex<Option<Writer>>,
    /// So many requests were given to the socket, or are in the hands of somebody who writes.
    taken: AtomicU64,
    /// Wakes the driver.
    waker: AtomicWaker,
    /// What writers are woken by: the driver, who goes on for them.
    when_writable: Waker,
    writable: Arc<Writable>,
    /// Counts the driver's polls.
    polls: AtomicU64,
    /// Counts what was read.
    reads: AtomicU64,
    /// Wakes the driver on another runtime, from which the socket was taken.
    resting: AtomicWaker,
    /// That driver may have the socket again.
    may_return: AtomicBool,
    /// A reply came since this was asked last.
    heard: AtomicBool,
    is_ended: watch::Sender<bool>,
    /// Why it has.
    why: OnceLock<String>,
    /// A request's time is over sooner than the keeper expects.
    sooner: Notify,
    /// It is to be looked at now whether another runtime reads.
    look: Notify,
    sink: Option<Sink>,
    /// How long a request takes at most, unless it says so.
    limit: Duration,
    own: Handle,
    /// The only process that may touch the socket, and what tells it of that: a fork shares both.
    home: Home,
}

struct Writable {
    is_so: AtomicBool,
    connection: Weak<Connection>,
}

impl Wake for Writable {
    fn wake(self: Arc<Self>) {
        self.is_so.store(true, Ordering::Release);
        if let Some(connection) = self.connection.upgrade() {
            connection.waker.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// Takes a stream over that was made on the client's own thread, in whose context this is called.
    pub(super) fn start(reader: Reader, writer: Writer, sink: Option<Sink>, limit: Duration, own: Handle) -> Arc<Self> {
        let connection = Arc::new_cyclic(|connection| {
            let writable = Arc::new(Writable { is_so: AtomicBool::new(false), connection: Weak::clone(connection) });
            Self {
                out: Mutex::new(Out::new(numbered::base())),
                incoming: Mutex::new(Some(Incoming::new(reader))),
                writer: Mutex::new(Some(writer)),
                taken: AtomicU64::new(0),
                waker: AtomicWaker::new(),
                when_writable: Waker::from(Arc::clone(&writable)),
                writable,
                polls: AtomicU64::new(0),
                reads: AtomicU64::new(0),
                resting: AtomicWaker::new(),
                may_return: AtomicBool::new(true),
                heard: AtomicBool::new(false),
                is_ended: watch::Sender::new(false),
                why: OnceLock::new(),
                sooner: Notify::new(),
                look: Notify::new(),
                sink,
                limit,
                own,
                home: Home::here(),
            }
        });
        connection.own.spawn(Driver::new(&connection, 1, true));
        connection.own.spawn(Keeper(Arc::clone(&connection)).keep());
        connection
    }

    /// Since when the oldest request is not answered.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        lock(&self.out).waiting.front().map(|first| first.until.asked)
    }

    /// Requests that are not answered yet.
    pub(super) fn under_way(&self) -> usize {
        lock(&self.out).waiting.len()
    }

    /// A PING with a word.
    pub(super) fn ping(self: &Arc<Self>, until: Until) -> Result<Asked, Failure> {
        self.ask(until, Reply::Ping, |out, number, _| {
            resp::write_ping(out, number);
            None
        })
    }

    /// A request, which stands in the buffer when this returns. Where its reply names no request, a PING stands behind it.
    pub(super) fn ask(
        self: &Arc<Self>,
        until: Until,
        reply: Reply,
        encode: impl FnOnce(&mut Vec<u8>, u64, &mut Texts) -> Option<Part>,
    ) -> Result<Asked, Failure> {
        let (tell, told) = oneshot::channel();
        let mut out = lock(&self.out);
        if out.is_ended {
            return Err(Failure::Unsent);
        }
        if out.waiting.len() >= MOST_UNDER_WAY {
            return Err(Failure::TooMany);
        }
        let pings = matches!(reply, Reply::Unnamed | Reply::Pushes(_));
        let (number, before) = (out.next_number(), out.buf.len());
        let to = &mut *out;
        let part = encode(&mut to.buf, number, &mut to.texts);
        out.push(before, Waiting { part, ..Waiting::new(Some(tell), number, until, reply) });
        if pings {
            out.ping(until);
        }
        let asked = out.asked;
        // those who were told together will ask together: half of them are sent as soon as they have asked, so that the server
        // is at work while the others do
        let is_idle = out.waiting.front().is_some_and(|first| first.end > out.from);
        let is_due = is_idle && out.waiting.len() >= out.told_together / 2;
        let is_early = out.alarm.is_some_and(|alarm| until.over < alarm);
        if is_due {
            self.flush(out, until.asked);
        } else {
            drop(out);
        }
        if is_early {
            self.sooner.notify_one();
        }
        Ok(Asked { connection: Arc::clone(self), told, unsent: (!is_due).then_some(asked), was_polled: false })
    }

    /// Writes what has gathered. If somebody else does, it goes on with it.
    fn flush<'c>(&'c self, mut out: MutexGuard<'c, Out>, now: Instant) {
        if !self.home.is_here() {
            return;
        }
        if out.turn != Turn::Free {
            out.turn = Turn::TakenAgain;
            return;
        }
        loop {
            if out.is_ended || out.buf.is_empty() && !out.is_full {
                return;
            }
            let (late, sent_in_part) = out.drop_late(now);
            if sent_in_part || !late.is_empty() {
                drop(out);
                tell_all(late);
                if sent_in_part {
                    return self.end(LATE_IN_PART);
                }
                out = lock(&self.out);
                if out.turn != Turn::Free {
                    out.turn = Turn::TakenAgain;
                    return;
                }
                continue;
            }
            out.bundle();
            out.ping_if_refused(now, self.limit);
            (out.turn, out.is_full) = (Turn::Taken, false);
            let spare = mem::take(&mut out.spare);
            let mut chunk = mem::replace(&mut out.buf, spare);
            out.from = out.end;
            self.taken.store(out.asked, Ordering::Release);
            drop(out);
            let (written, outcome) = self.write(&chunk);
            out = lock(&self.out);
            let again = mem::take(&mut out.turn) == Turn::TakenAgain;
            if out.is_ended {
                // who ended it left this to whoever was writing
                let known = out.from - (chunk.len() - written) as u64;
                let told = out.give_up(known);
                drop(out);
                return tell_all(told);
            }
            match outcome {
                Ok(true) => {
                    chunk.clear();
                    if chunk.capacity() <= KEPT_BUFFER {
                        out.spare = chunk;
                    }
                    // whoever has not come back yet will
                    if out.buf.is_empty() || !again {
                        return;
                    }
                }
                Ok(false) => {
                    out.put_back(chunk, written);
                    // else whoever was told that the socket takes more has been here while it was not known that it was full
                    if !again {
                        return;
                    }
                }
                Err(error) => {
                    out.put_back(chunk, written);
                    drop(out);
                    return self.end(&error.to_string());
                }
            }
        }
    }

    /// Gives bytes to the socket: how many, and whether it took them all.
    fn write(&self, chunk: &[u8]) -> (usize, io::Result<bool>) {
        let mut writer = lock(&self.writer);
        let Some(half) = writer.as_mut() else { return (0, Err(io::ErrorKind::NotConnected.into())) };
        let mut cx = Context::from_waker(&self.when_writable);
        let mut written = 0;
        while written < chunk.len() {
            match Pin::new(half.as_write()).poll_write(&mut cx, &chunk[written..]) {
                Poll::Ready(Ok(0)) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(more)) => written += more,
                Poll::Ready(Err(error)) if half.hides_what_it_sent() => return (chunk.len(), Err(error)),
                Poll::Ready(Err(error)) => return (written, Err(error)),
                Poll::Pending => return (written, Ok(false)),
            }
        }
        match Pin::new(half.as_write()).poll_flush(&mut cx) {
            Poll::Ready(flushed) => (written, flushed.map(|()| true)),
            Poll::Pending => (written, Ok(false)),
        }
    }

    /// Ends the connection. What was not written entirely was not executed.
    pub(super) fn end(&self, why: &str) {
        if !self.home.is_here() {
            return;
        }
        let mut out = lock(&self.out);
        if mem::replace(&mut out.is_ended, true) {
            return;
        }
        let told = if out.turn == Turn::Free {
            let written = out.from;
            out.give_up(written)
        } else {
            Vec::new()
        };
        drop(out);
        log::later!(DEBUG, why = why; "a connection has ended");
        let _ = self.why.set(why.to_owned());
        // closes the socket
        lock(&self.incoming).take();
        lock(&self.writer).take();
        self.waker.wake();
        self.resting.wake();
        tell_all(told);
        self.is_ended.send_replace(true);
    }

    /// Why there is no answer to the first requests: by TLS 1.3 a server says only now that it does not want us.
    pub(super) fn because(&self, failure: Failure) -> Failure {
        match (failure, self.why.get()) {
            (Failure::Ended | Failure::Unsent, Some(why)) => {
                let why = format!("the connection ended before the answer came: {why}");
                Failure::Other(StoreErrorKind::Disconnected, true, why)
            }
            (failure, _) => failure,
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        *self.is_ended.borrow()
    }

    pub(super) async fn ended(&self) {
        let _ = self.is_ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Whether a reply came since this was asked last. What a server pushes is none: it may answer nothing any more.
    pub(super) fn was_heard(&self) -> bool {
        self.heard.swap(false, Ordering::AcqRel)
    }

    /// Something is urgent: whether it is read is looked at now.
    pub(super) fn hurry(&self) {
        self.look.notify_one();
    }
}

type Caller = (oneshot::Sender<Told>, Told);

fn tell_all(told: impl IntoIterator<Item = Caller>) {
    for (tell, answer) in told {
        contain(|| drop(tell.send(answer)));
    }
}

/// A request that was asked.
#[must_use]
pub(super) struct Asked {
    connection: Arc<Connection>,
    told: oneshot::Receiver<Told>,
    /// Which one it is; `None`: it was written.
    unsent: Option<u64>,
    was_polled: bool,
}

impl Asked {
    fn flush(&mut self) {
        if let Some(number) = self.unsent.take()
            && self.connection.taken.load(Ordering::Acquire) < number
        {
            self.connection.flush(lock(&self.connection.out), Instant::now());
        }
    }
}

impl Future for Asked {
    type Output = Told;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Told> {
        if self.unsent.is_some() {
            let taken = self.connection.taken.load(Ordering::Acquire);
            if !mem::replace(&mut self.was_polled, true) && self.unsent.is_some_and(|number| taken < number) {
                // others may have something to send, too: after a round of this scheduler all of it goes at once
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.flush();
        }
        Pin::new(&mut self.told).poll(cx).map(|told| told.unwrap_or(Err(Failure::Ended)))
    }
}

impl Drop for Asked {
    /// What was asked goes out, whatever becomes of its caller.
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests;
