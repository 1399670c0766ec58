//! The driver: the task that reads the socket, on the runtime in which the client was made or on
//! the client's own thread.
//!
//! It delivers replies to 16 callers at a time, and lets them send before it wakes the next: woken
//! all at once, they would take turns with the server.

use std::{
    future::Future,
    mem,
    pin::{Pin, pin},
    sync::{Arc, Weak, atomic::Ordering},
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use tokio::{io::AsyncReadExt, runtime::Handle};

use crate::{
    clock::Instant,
    own::{
        OwnConnection, lock, notify_all,
        out::{Caller, MAX_KEPT_BUFFER},
    },
    push::Push,
    resp::{self, Frame, Stop, Value},
    wake::catch_waker_panic,
};

/// How many replies one pass reads before their callers get to run. Their next requests keep the
/// server busy while the driver notifies the rest.
const NOTIFY_BATCH: usize = 16;
/// Most bytes that one read takes.
const READ_AT_ONCE: usize = 16 << 10;

/// The frames of one pass. Kept, to reuse the allocations.
#[derive(Default)]
struct ReadBatch {
    frames: Vec<Frame>,
    /// The callers of the replies among the frames, with their results.
    callers: Vec<Caller>,
    /// Whether a PING that proves the held replies was added to the buffer and must be written.
    proves: bool,
}

/// The outcome of one pass.
enum ReadStep {
    Something,
    Nothing,
    /// Another driver is in charge.
    Elsewhere,
    Ended,
}

/// Returns whether a frame is a pushed message and not a reply. A confirmation of SSUBSCRIBE counts
/// as a message, because its caller waits for the PING behind it.
fn is_message(frame: &Frame) -> bool {
    let Frame::Push(parts) = frame else {
        return false;
    };
    !matches!(
        parts.first().and_then(Value::as_str),
        Some("subscribe" | "unsubscribe")
    )
}

impl OwnConnection {
    /// Reads what has arrived, for the driver of this number. Returns an error if the connection
    /// must end, with the reason.
    fn read(
        &self,
        driver: u64,
        cx: &mut Context<'_>,
        come: &mut ReadBatch,
    ) -> Result<ReadStep, String> {
        let mut incoming = lock(&self.incoming);
        let Some(incoming) = incoming.as_mut() else {
            return Ok(ReadStep::Ended);
        };
        if incoming.driver != driver {
            return Ok(ReadStep::Elsewhere);
        }
        // Register before the read: a wake-up in between would be lost.
        self.waker.register(cx.waker());
        if !incoming.is_behind() {
            incoming.buf.reserve(READ_AT_ONCE);
            let mut limited = incoming.reader.as_read().take(READ_AT_ONCE as u64);
            match pin!(limited.read_buf(&mut incoming.buf)).poll(cx) {
                Poll::Pending => return Ok(ReadStep::Nothing),
                Poll::Ready(Ok(0)) => return Err("closed by the server".into()),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Err(error.to_string()),
            }
        }
        self.reads.fetch_add(1, Ordering::AcqRel);
        let (mut at, mut told) = (0, 0);
        while incoming.buf.len() - at >= incoming.needed && told < NOTIFY_BATCH {
            match resp::decode(&incoming.buf[at..], &mut incoming.scan) {
                Ok((frame, length)) => {
                    told += match &frame {
                        Frame::Value(Value::Array(parts)) => parts.len(),
                        _ => 1,
                    };
                    come.frames.push(frame);
                    at += length;
                    incoming.needed = 1;
                }
                Err(Stop::More(needed)) => incoming.needed = needed,
                Err(nonsense) => return Err(nonsense.to_string()),
            }
        }
        incoming.buf.advance(at);
        if incoming.buf.is_empty() && incoming.buf.capacity() > MAX_KEPT_BUFFER {
            incoming.buf = BytesMut::new();
        }
        // Lock `out` before `incoming` is released: replies must be matched in the order in which
        // they were read.
        let mut out = lock(&self.out);
        for frame in come.frames.extract_if(.., |frame| !is_message(frame)) {
            out.match_reply(frame, &mut come.callers)?;
            self.has_reply.store(true, Ordering::Release);
        }
        out.last_batch = come.callers.len();
        come.proves = out.prove(Instant::now(), self.limit);
        Ok(ReadStep::Something)
    }

    /// Passes a message to the sink.
    fn push(&self, message: &Frame) {
        let (Some(sink), Frame::Push(parts)) = (&self.sink, message) else {
            return;
        };
        let [verb, channel, last] = parts.as_slice() else {
            return;
        };
        let Some(channel) = channel.as_str() else {
            return;
        };
        match (verb.as_str(), last) {
            (Some("message" | "smessage"), Value::Text(text)) => {
                sink(Push::Message { channel, text });
            }
            (Some("sunsubscribe"), _) => sink(Push::Dropped { channel }),
            _ => {}
        }
    }

    /// Moves the socket back to the runtime that polls, once it may return. Returns the number of
    /// its driver there, or `None` if the connection has ended.
    fn poll_return(&self, cx: &Context<'_>) -> Poll<Option<u64>> {
        self.resting.register(cx.waker());
        if !self.may_return.swap(false, Ordering::AcqRel) {
            // The connection may have ended before the waker was registered. Then nothing would
            // wake this task.
            let has_ended = lock(&self.incoming).is_none();
            return if has_ended {
                Poll::Ready(None)
            } else {
                Poll::Pending
            };
        }
        let moved = self.move_here(false);
        if let Err(error) = &moved {
            self.end(&error.to_string());
        }
        Poll::Ready(moved.ok().flatten())
    }
}

/// The task that reads replies, and writes what the socket did not take at once.
pub(super) struct Driver {
    /// Weak, because a runtime that is no longer polled keeps its tasks, and would keep each
    /// connection that it ever had.
    connection: Weak<OwnConnection>,
    /// As in `Incoming::driver`.
    number: u64,
    is_own: bool,
    batch: ReadBatch,
    /// Whether the driver has rescheduled itself, to write what no caller has written by then.
    came_back: bool,
}

impl Driver {
    pub(super) fn new(connection: &Arc<OwnConnection>, number: u64, is_own: bool) -> Self {
        Self {
            connection: Arc::downgrade(connection),
            number,
            is_own,
            batch: ReadBatch::default(),
            came_back: false,
        }
    }

    /// Returns the connection. Returns `None` if it is gone, or if this process is a fork, whose
    /// runtime is a copy of its parent's. A fork would read or move what belongs to the parent: it
    /// shares the socket and the epoll that notifies the parent, and would register its own
    /// addresses there.
    fn connection(&self) -> Option<Arc<OwnConnection>> {
        self.connection
            .upgrade()
            .filter(|connection| connection.home.is_here())
    }

    /// Notifies the callers whose replies were read, and writes the PING that proves held replies.
    /// Returns how many callers there were.
    fn deliver(&mut self, connection: &OwnConnection) -> usize {
        let told = self.batch.callers.len();
        notify_all(self.batch.callers.drain(..));
        if mem::take(&mut self.batch.proves) {
            connection.flush(lock(&connection.out), Instant::now());
        }
        self.came_back = false;
        told
    }

    /// Reschedules the driver if callers may have requests to send. Writes the buffer once the
    /// driver has come back, or if the socket can take more.
    fn flush_or_come_back(&mut self, connection: &OwnConnection, cx: &Context<'_>) {
        let is_writable = connection.writable.is_so.swap(false, Ordering::AcqRel);
        let mut out = lock(&connection.out);
        let may_gather = out.last_batch > 1 || !out.buf.is_empty();
        let is_over = mem::take(&mut self.came_back);
        self.came_back = !is_over && may_gather;
        if self.came_back {
            // Run again after the callers that were just notified: they may have requests to send.
            cx.waker().wake_by_ref();
        }
        if is_over {
            out.last_batch = 0;
        }
        if is_over || is_writable {
            connection.flush(out, Instant::now());
        }
    }
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let Some(connection) = this.connection() else {
            return Poll::Ready(());
        };
        connection.polls.fetch_add(1, Ordering::AcqRel);
        loop {
            let read = connection.read(this.number, cx, &mut this.batch);
            for message in this.batch.frames.drain(..) {
                catch_waker_panic(|| connection.push(&message));
            }
            match read {
                Ok(ReadStep::Something) => {
                    if this.deliver(&connection) >= NOTIFY_BATCH / 2 {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                Ok(ReadStep::Nothing) => {
                    this.flush_or_come_back(&connection, cx);
                    return Poll::Pending;
                }
                Ok(ReadStep::Elsewhere) if this.is_own => return Poll::Ready(()),
                // This runtime sends the requests, so it is the better place to read the replies.
                Ok(ReadStep::Elsewhere) => match ready!(connection.poll_return(cx)) {
                    Some(number) => this.number = number,
                    None => return Poll::Ready(()),
                },
                Ok(ReadStep::Ended) => return Poll::Ready(()),
                Err(why) => {
                    connection.end(&why);
                    return Poll::Ready(());
                }
            }
        }
    }
}

impl Drop for Driver {
    /// Moves the socket to the client's own thread, because the runtime ends or the driver has
    /// panicked. The driver on the client's own thread ends the connection instead.
    fn drop(&mut self) {
        let Some(connection) = self.connection() else {
            return;
        };
        if lock(&connection.incoming)
            .as_ref()
            .is_none_or(|incoming| incoming.driver != self.number)
        {
            return;
        }
        if self.is_own {
            return connection.end("the task that reads replies has ended");
        }
        // Move the socket now: a moment later, the runtime shuts down all that is registered with
        // it. Only a thread whose thread-locals are gone cannot enter another runtime; it spawns
        // the move there.
        if Handle::try_current().is_err_and(|none| none.is_thread_local_destroyed()) {
            let own = connection.own.clone();
            own.spawn(async move { connection.take_over() });
        } else {
            let _own = connection.own.enter();
            connection.take_over();
        }
    }
}
