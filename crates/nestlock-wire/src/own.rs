//! nestlock's own connection: many tasks share it with few system calls, and by construction each
//! request is sent at most once.
//!
//! [`OwnConnection`] is the send path: callers write to the socket themselves. The *driver* reads
//! the replies, on the runtime in which the client was made, and the *keeper* handles the timeouts,
//! on the client's own thread.
//!
//! At most once follows from two facts: no byte is written twice, and the bytes given to the socket
//! are counted. A request whose last byte was not written when the connection ended was not
//! executed; any other may have been. A request that was not written in time is removed from the
//! buffer; if a part of it was written, the connection ends. Over TLS, everything that rustls was
//! given counts as sent, because an error does not say how much was.
//!
//! Decision 14 has the reasons and the figures.

mod bundle;
pub(crate) mod driver;
pub(crate) mod greet;
pub(crate) mod incoming;
pub(crate) mod keeper;
pub(crate) mod out;

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
    runtime::{self, Handle},
    sync::{Notify, oneshot, watch},
};

use crate::{
    clock::Instant,
    error::StoreErrorKind,
    failure::Failure,
    limits::MAX_IN_FLIGHT,
    log,
    own::{
        incoming::Incoming,
        out::{Caller, MAX_KEPT_BUFFER, Out, Reply, ReplyResult, Waiting, WriterState},
    },
    process::Home,
    push::Sink,
    request::BundlePart,
    resp,
    stream::WriteHalf,
    texts::Texts,
    until::Until,
    wake::catch_waker_panic,
};

/// Why a connection ends if a request is only partly sent when its time is over.
const LATE_IN_PART: &str = "the rest of a request could not be sent in time";

/// One connection, from its first byte to its end. It is never reopened.
///
/// [`OwnConnection::send`] encodes a request into a buffer. If nothing is in flight and no further
/// requests are expected, the caller writes the buffer at once. Otherwise the request's future is
/// polled again after one pass of its scheduler, and the first such future writes what all of them
/// have gathered: no task, thread or timer stands between a caller and the socket. The driver reads
/// the replies and delivers them in order. It also writes the requests of futures that are no
/// longer polled: while the buffer has data, either a request is in flight whose reply the driver
/// will read, or the driver has scheduled its next poll.
///
/// The driver runs on the runtime in which the client was made, so that it wakes its callers
/// locally. On a thread of its own, it would wake each caller across threads, and on a
/// current-thread runtime, requests would no longer gather. The connection must not depend on the
/// user's runtime, though: the client's own thread takes the socket over if that runtime does not
/// read what has arrived, or if it ends. The driver may try again a little later.
pub(crate) struct OwnConnection {
    out: Mutex<Out>,
    incoming: Mutex<Option<Incoming>>,
    writer: Mutex<Option<WriteHalf>>,
    /// The count of requests (as in `Out::sent`) that the socket has, or that a writer is about to
    /// give to it.
    taken: AtomicU64,
    /// Wakes the driver.
    waker: AtomicWaker,
    /// The waker with which writers poll the socket. It wakes the driver, which continues the
    /// write.
    when_writable: Waker,
    writable: Arc<Writable>,
    /// Counts the driver's polls.
    polls: AtomicU64,
    /// Counts the driver's passes over received bytes.
    reads: AtomicU64,
    /// Wakes the driver on the other runtime, after the socket was taken from it.
    resting: AtomicWaker,
    /// Whether that driver may take the socket back.
    may_return: AtomicBool,
    /// Whether a reply arrived since the last [`OwnConnection::had_reply`].
    has_reply: AtomicBool,
    is_ended: watch::Sender<bool>,
    /// Why the connection has ended.
    why: OnceLock<String>,
    /// Wakes the keeper, because a request expires before its alarm.
    sooner: Notify,
    /// The other runtime, on which the driver is, if there is one.
    driven_by: OnceLock<runtime::Id>,
    /// Makes the client's own thread check now whether the other runtime reads.
    reader_check: Notify,
    sink: Option<Sink>,
    /// The command timeout. It limits the PINGs that prove replies, and is the keeper's longest
    /// pause.
    limit: Duration,
    /// The client's own runtime.
    own: Handle,
    /// The only process that may touch the socket and its epoll: a fork shares both.
    home: Home,
}

/// The waker of `when_writable`.
struct Writable {
    is_so: AtomicBool,
    connection: Weak<OwnConnection>,
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

impl OwnConnection {
    /// Returns when the oldest request without a reply was sent. Returns `None` if there is none.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        lock(&self.out)
            .waiting
            .front()
            .map(|first| first.until.sent_at)
    }

    /// Returns the number of requests that have no reply yet.
    pub(crate) fn in_flight(&self) -> usize {
        lock(&self.out).waiting.len()
    }

    /// Sends a PING whose argument is the request's number.
    pub(crate) fn ping(self: &Arc<Self>, until: Until) -> Result<SentRequest, Failure> {
        self.send(until, Reply::Ping, |out, number, _| {
            resp::write_ping(out, number);
            None
        })
    }

    /// Encodes a request into the buffer, and writes the buffer if that is due. If the reply will
    /// not name its request, a PING follows the request.
    pub(crate) fn send(
        self: &Arc<Self>,
        until: Until,
        reply: Reply,
        encode: impl FnOnce(&mut Vec<u8>, u64, &mut Texts) -> Option<BundlePart>,
    ) -> Result<SentRequest, Failure> {
        let (tell, told) = oneshot::channel();
        let mut out = lock(&self.out);
        if out.is_ended {
            return Err(Failure::Unsent);
        }
        if out.waiting.len() >= MAX_IN_FLIGHT {
            return Err(Failure::TooMany);
        }
        let pings = matches!(reply, Reply::Unnamed | Reply::Pushes(_));
        let subscribes = matches!(reply, Reply::Pushes(_));
        let (number, before) = (out.next_number(), out.buf.len());
        let to = &mut *out;
        let part = encode(&mut to.buf, number, &mut to.texts);
        out.push(
            before,
            Waiting {
                part,
                ..Waiting::new(Some(tell), number, until, reply)
            },
        );
        if pings {
            out.ping(until);
        }
        let asked = out.sent;
        // Callers whose replies arrived together send together. With nothing in flight, write as
        // soon as half of them have sent, so that the server works while the others follow.
        let is_idle = out
            .waiting
            .front()
            .is_some_and(|first| first.end > out.from);
        let is_due = is_idle && out.waiting.len() >= out.last_batch / 2;
        let is_early = out.alarm.is_some_and(|alarm| until.over < alarm);
        if is_due {
            self.flush(out, until.sent_at);
        } else {
            drop(out);
        }
        if is_early {
            self.sooner.notify_one();
        }
        if subscribes || self.is_sent_from_elsewhere() {
            self.prioritize();
        }
        Ok(SentRequest {
            connection: Arc::clone(self),
            result: told,
            unsent: (!is_due).then_some(asked),
            was_polled: false,
        })
    }

    /// Returns whether the caller is on neither of the two runtimes that may read the reply, such as a
    /// plain thread. Then nothing says that the runtime of the driver runs just now.
    fn is_sent_from_elsewhere(&self) -> bool {
        self.driven_by.get().is_some_and(|driver| {
            let here = Handle::try_current().map(|here| here.id());
            here.map_or(true, |here| here != *driver && here != self.own.id())
        })
    }

    /// Writes the buffer to the socket. If a writer is already active, leaves it to that writer.
    /// Does nothing in a fork.
    fn flush<'c>(&'c self, mut out: MutexGuard<'c, Out>, now: Instant) {
        if !self.home.is_here() {
            return;
        }
        loop {
            if out.writer != WriterState::Free {
                out.writer = WriterState::TakenAgain;
                return;
            }
            if out.is_ended || out.buf.is_empty() && !out.is_full {
                return;
            }
            let (late, sent_in_part) = out.drop_expired(now);
            if sent_in_part || !late.is_empty() {
                drop(out);
                notify_all(late);
                if sent_in_part {
                    return self.end(LATE_IN_PART);
                }
                out = lock(&self.out);
                continue;
            }
            let mut chunk = self.take_buffer(&mut out, now);
            drop(out);
            let (written, outcome) = self.write(&chunk);
            out = lock(&self.out);
            let again = mem::take(&mut out.writer) == WriterState::TakenAgain;
            if out.is_ended {
                // `end` left this to the writer: only the writer knows how much was written.
                let known = out.from - (chunk.len() - written) as u64;
                let told = out.give_up(known);
                drop(out);
                return notify_all(told);
            }
            match outcome {
                Ok(true) => {
                    chunk.clear();
                    if chunk.capacity() <= MAX_KEPT_BUFFER {
                        out.spare = chunk;
                    }
                    // If no other flush came in during the write, the requests that were added
                    // since still have theirs ahead.
                    if out.buf.is_empty() || !again {
                        return;
                    }
                }
                Ok(false) => {
                    out.put_back(chunk, written);
                    // If another flush came in during the write, it may be the driver's, woken by a
                    // writable socket before `is_full` was set. Returning would lose that wake-up.
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

    /// Makes the caller the writer. Returns the buffer, completed for the socket.
    fn take_buffer(&self, out: &mut Out, now: Instant) -> Vec<u8> {
        out.bundle();
        out.ping_if_refused(now, self.limit);
        (out.writer, out.is_full) = (WriterState::Taken, false);
        out.from = out.end;
        self.taken.store(out.sent, Ordering::Release);
        let spare = mem::take(&mut out.spare);
        mem::replace(&mut out.buf, spare)
    }

    /// Writes bytes to the socket. Returns how many it took, and whether it took and flushed all.
    fn write(&self, chunk: &[u8]) -> (usize, io::Result<bool>) {
        let mut writer = lock(&self.writer);
        let Some(half) = writer.as_mut() else {
            return (0, Err(io::ErrorKind::NotConnected.into()));
        };
        let mut cx = Context::from_waker(&self.when_writable);
        let mut written = 0;
        while written < chunk.len() {
            match Pin::new(half.as_write()).poll_write(&mut cx, &chunk[written..]) {
                Poll::Ready(Ok(0)) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(more)) => written += more,
                // Count all as written: any part of them may have reached the server.
                Poll::Ready(Err(error)) if half.hides_what_it_sent() => {
                    return (chunk.len(), Err(error));
                }
                Poll::Ready(Err(error)) => return (written, Err(error)),
                Poll::Pending => return (written, Ok(false)),
            }
        }
        match Pin::new(half.as_write()).poll_flush(&mut cx) {
            Poll::Ready(flushed) => (written, flushed.map(|()| true)),
            Poll::Pending => (written, Ok(false)),
        }
    }

    /// Ends the connection. Requests that were not written to their last byte were not executed.
    pub(crate) fn end(&self, why: &str) {
        if !self.home.is_here() {
            return;
        }
        let mut out = lock(&self.out);
        if mem::replace(&mut out.is_ended, true) {
            return;
        }
        let told = if out.writer == WriterState::Free {
            let written = out.from;
            out.give_up(written)
        } else {
            Vec::new()
        };
        drop(out);
        log::later!(DEBUG, why = why; "a connection has ended");
        // Before the callers are notified: `because` reads it.
        let _ = self.why.set(why.to_owned());
        // Dropping both halves closes the socket.
        lock(&self.incoming).take();
        lock(&self.writer).take();
        self.waker.wake();
        self.resting.wake();
        notify_all(told);
        self.is_ended.send_replace(true);
    }

    /// Adds the reason for the connection's end to the failure of a handshake request. With TLS
    /// 1.3, a client learns that the server rejects it only when it reads the first reply.
    pub(crate) fn because(&self, failure: Failure) -> Failure {
        match (failure, self.why.get()) {
            (Failure::Ended | Failure::Unsent, Some(why)) => {
                let why = format!("the connection ended before the reply arrived: {why}");
                Failure::Other(StoreErrorKind::Disconnected, true, why)
            }
            (failure, _) => failure,
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        *self.is_ended.borrow()
    }

    pub(crate) async fn ended(&self) {
        let _ = self.is_ended.subscribe().wait_for(|ended| *ended).await;
    }

    /// Returns whether a reply arrived since the last call. Pushed messages do not count: a server
    /// that pushes may have stopped replying.
    pub(crate) fn had_reply(&self) -> bool {
        self.has_reply.swap(false, Ordering::AcqRel)
    }

    /// Checks at once whether the other runtime reads, because a reply is urgent.
    pub(crate) fn prioritize(&self) {
        self.reader_check.notify_one();
    }
}

fn notify_all(told: impl IntoIterator<Item = Caller>) {
    for (tell, answer) in told {
        catch_waker_panic(|| drop(tell.send(answer)));
    }
}

/// A request in the buffer or in flight, as the future of its reply.
#[must_use]
pub(crate) struct SentRequest {
    connection: Arc<OwnConnection>,
    result: oneshot::Receiver<ReplyResult>,
    /// The request's place in `Out::sent`. `None` once this future has flushed it.
    unsent: Option<u64>,
    was_polled: bool,
}

impl SentRequest {
    fn flush(&mut self) {
        if let Some(number) = self.unsent.take()
            && self.connection.taken.load(Ordering::Acquire) < number
        {
            self.connection
                .flush(lock(&self.connection.out), Instant::now());
        }
    }
}

impl Future for SentRequest {
    type Output = ReplyResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ReplyResult> {
        if self.unsent.is_some() {
            let taken = self.connection.taken.load(Ordering::Acquire);
            if !mem::replace(&mut self.was_polled, true)
                && self.unsent.is_some_and(|number| taken < number)
            {
                // Let other tasks send first: after one pass of the scheduler, all their requests
                // go in one write.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.flush();
        }
        Pin::new(&mut self.result)
            .poll(cx)
            .map(|told| told.unwrap_or(Err(Failure::Ended)))
    }
}

impl Drop for SentRequest {
    /// Sends the request, even though its caller no longer waits for the reply.
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests;
