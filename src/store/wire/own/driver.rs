//! Who reads: the task on the runtime in which the client was made, or on the client's own thread.

use std::{
    future::Future,
    mem,
    pin::{Pin, pin},
    sync::{Arc, Weak, atomic::Ordering},
    task::{Context, Poll},
};

use bytes::{Buf, BytesMut};
use tokio::{io::AsyncReadExt, runtime::Handle};

use super::{Caller, Connection, KEPT_BUFFER, lock, tell_all};
use crate::{
    clock::Instant,
    store::wire::{
        Heard, contain,
        resp::{self, Frame, Stop, Value},
        stream::Reader,
    },
};

/// So many callers are told, and then have their turn: the server is at work again while others are told.
const TOLD_AT_ONCE: usize = 16;
/// What one read may bring.
const READ_AT_ONCE: usize = 16 << 10;

/// What comes, and who reads it.
pub(super) struct Incoming {
    pub(super) reader: Reader,
    pub(super) buf: BytesMut,
    /// What is known of the first frame in there, which has not come entirely.
    pub(super) scan: resp::Scan,
    /// Before so many bytes have come there is nothing to be read.
    pub(super) needed: usize,
    /// Counts the drivers, of whom the last one drives; the first one is on the client's own thread.
    pub(super) driver: u64,
    pub(super) is_on_own_thread: bool,
}

impl Incoming {
    /// Read on the client's own thread at first.
    pub(super) fn new(reader: Reader) -> Self {
        let (buf, scan) = (BytesMut::new(), resp::Scan::default());
        Self { reader, buf, scan, needed: 1, driver: 1, is_on_own_thread: true }
    }

    /// Whether something was read that nobody was told yet.
    pub(super) fn is_behind(&self) -> bool {
        self.buf.len() >= self.needed
    }
}

/// What came at once: kept, so that it need not be made anew each time.
#[derive(Default)]
struct Come {
    frames: Vec<Frame>,
    /// Whose answers they are.
    told: Vec<Caller>,
    /// A PING is to be written, which proves what is held.
    proves: bool,
}

enum Read {
    Something,
    Nothing,
    /// Somebody else drives.
    Elsewhere,
    Ended,
}

/// Whether it is nobody's answer.
fn is_message(frame: &Frame) -> bool {
    let Frame::Push(parts) = frame else { return false };
    !matches!(parts.first().and_then(Value::as_str), Some("subscribe" | "unsubscribe"))
}

impl Connection {
    /// Reads what has come, for the driver of this number; an error: why this connection must end.
    fn read(&self, driver: u64, cx: &mut Context<'_>, come: &mut Come) -> Result<Read, String> {
        let mut incoming = lock(&self.incoming);
        let Some(incoming) = incoming.as_mut() else { return Ok(Read::Ended) };
        if incoming.driver != driver {
            return Ok(Read::Elsewhere);
        }
        self.waker.register(cx.waker());
        if !incoming.is_behind() {
            incoming.buf.reserve(READ_AT_ONCE);
            let mut limited = incoming.reader.as_read().take(READ_AT_ONCE as u64);
            match pin!(limited.read_buf(&mut incoming.buf)).poll(cx) {
                Poll::Pending => return Ok(Read::Nothing),
                Poll::Ready(Ok(0)) => return Err("closed by the server".into()),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Err(error.to_string()),
            }
        }
        self.reads.fetch_add(1, Ordering::AcqRel);
        let (mut at, mut told) = (0, 0);
        while incoming.buf.len() - at >= incoming.needed && told < TOLD_AT_ONCE {
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
        if incoming.buf.is_empty() && incoming.buf.capacity() > KEPT_BUFFER {
            incoming.buf = BytesMut::new();
        }
        // answers find their callers in the order in which they were read
        let mut out = lock(&self.out);
        for frame in come.frames.extract_if(.., |frame| !is_message(frame)) {
            out.answer(frame, &mut come.told)?;
            self.heard.store(true, Ordering::Release);
        }
        out.told_together = come.told.len();
        come.proves = out.prove(Instant::now(), self.limit);
        Ok(Read::Something)
    }

    /// Tells whoever listens.
    fn hear(&self, message: &Frame) {
        let (Some(sink), Frame::Push(parts)) = (&self.sink, message) else { return };
        let [verb, channel, last] = parts.as_slice() else { return };
        let Some(channel) = channel.as_str() else { return };
        match (verb.as_str(), last) {
            (Some("message" | "smessage"), Value::Text(text)) => sink(Heard::Message { channel, text }),
            (Some("sunsubscribe"), _) => sink(Heard::Dropped { channel }),
            _ => {}
        }
    }
}

/// Reads, and writes what the socket did not take at once.
pub(super) struct Driver {
    /// Weak: a runtime that is not polled any more keeps its tasks, of each connection that there was.
    connection: Weak<Connection>,
    number: u64,
    is_own: bool,
    come: Come,
    /// It was polled again to write what nobody else has.
    came_back: bool,
}

impl Driver {
    pub(super) fn new(connection: &Arc<Connection>, number: u64, is_own: bool) -> Self {
        Self { connection: Arc::downgrade(connection), number, is_own, come: Come::default(), came_back: false }
    }

    /// `None`: it is gone; or this is a fork, whose runtime is a copy of its parent's. What it would read, or move, is the
    /// parent's: with the socket it shares the epoll that tells the parent of it, and puts addresses of its own in there.
    fn connection(&self) -> Option<Arc<Connection>> {
        self.connection.upgrade().filter(|connection| connection.home.is_here())
    }
}

impl Future for Driver {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let Some(connection) = this.connection() else { return Poll::Ready(()) };
        connection.polls.fetch_add(1, Ordering::AcqRel);
        loop {
            let read = connection.read(this.number, cx, &mut this.come);
            for message in this.come.frames.drain(..) {
                contain(|| connection.hear(&message));
            }
            match read {
                Ok(Read::Something) => {
                    let told = this.come.told.len();
                    tell_all(this.come.told.drain(..));
                    if mem::take(&mut this.come.proves) {
                        connection.flush(lock(&connection.out), Instant::now());
                    }
                    this.came_back = false;
                    if told >= TOLD_AT_ONCE / 2 {
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                }
                Ok(Read::Nothing) => {
                    let is_writable = connection.writable.is_so.swap(false, Ordering::AcqRel);
                    let mut out = lock(&connection.out);
                    let may_gather = out.told_together > 1 || !out.buf.is_empty();
                    let is_over = mem::take(&mut this.came_back);
                    this.came_back = !is_over && may_gather;
                    if this.came_back {
                        // behind those who were just told, and have something to send, perhaps
                        cx.waker().wake_by_ref();
                    }
                    if is_over {
                        out.told_together = 0;
                    }
                    if is_over || is_writable {
                        connection.flush(out, Instant::now());
                    }
                    return Poll::Pending;
                }
                Ok(Read::Elsewhere) if this.is_own => return Poll::Ready(()),
                // what is asked here is better read here
                Ok(Read::Elsewhere) => {
                    connection.resting.register(cx.waker());
                    if !connection.may_return.swap(false, Ordering::AcqRel) {
                        // it may have ended before it was known whom to wake
                        let has_ended = lock(&connection.incoming).is_none();
                        return if has_ended { Poll::Ready(()) } else { Poll::Pending };
                    }
                    match connection.move_here(false) {
                        Ok(Some(number)) => this.number = number,
                        Ok(None) => return Poll::Ready(()),
                        Err(error) => {
                            connection.end(&error.to_string());
                            return Poll::Ready(());
                        }
                    }
                }
                Ok(Read::Ended) => return Poll::Ready(()),
                Err(why) => {
                    connection.end(&why);
                    return Poll::Ready(());
                }
            }
        }
    }
}

impl Drop for Driver {
    /// Its runtime ends, perhaps, or it has panicked.
    fn drop(&mut self) {
        let Some(connection) = self.connection() else { return };
        if lock(&connection.incoming).as_ref().is_none_or(|incoming| incoming.driver != self.number) {
            return;
        }
        if self.is_own {
            return connection.end("nobody reads any more");
        }
        // now: a moment later that runtime ends what is bound to it. Only a thread that ends itself cannot
        if Handle::try_current().is_err_and(|none| none.is_thread_local_destroyed()) {
            let own = connection.own.clone();
            own.spawn(async move { connection.take_over() });
        } else {
            let _own = connection.own.enter();
            connection.take_over();
        }
    }
}
