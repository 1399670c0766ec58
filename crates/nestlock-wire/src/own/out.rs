//! The send buffer of a connection, and the requests that wait for replies: encoding, bundling,
//! matching, expiry.
//!
//! A reply that cannot name its request (an error, WAIT, SUBSCRIBE, ..) is held until a later reply
//! names its own: see decision 15. Which requests may be bundled: decision 16.
//!
//! SUBSCRIBE has its reply when the server has confirmed each channel, and the PING behind it.

use std::{collections::VecDeque, mem, time::Duration};

use tokio::sync::oneshot;

use crate::{
    clock::Instant,
    failure::Failure,
    limits::REFUSED,
    numbered,
    request::BundlePart,
    resp::{self, Frame, Value},
    texts::Texts,
    until::Until,
};

/// Why a connection ends if a reply does not match the request that is due.
const ANOTHER: &str = "a reply to another request";

/// The send buffer, and the requests that wait for replies.
#[derive(Default)]
pub(super) struct Out {
    /// The bytes that no writer has given to the socket yet.
    pub(super) buf: Vec<u8>,
    /// An empty buffer that replaces `buf` while that is written.
    pub(super) spare: Vec<u8>,
    /// How many requests were encoded, PINGs included.
    pub(super) sent: u64,
    /// The offsets, in the stream of all request bytes, at which `buf` begins and ends.
    pub(super) from: u64,
    pub(super) end: u64,
    /// The requests without a reply, in the order of their bytes.
    pub(super) waiting: VecDeque<Waiting>,
    /// Replies to the first of `waiting` that do not name their requests. They are delivered when a
    /// later reply names its own.
    held: VecDeque<ReplyResult>,
    /// How many PINGs wait for a reply.
    pings: usize,
    /// When a refusal was last delivered, or last needed a PING to prove it.
    refused: Option<Instant>,
    /// The number before that of the first request. It differs between connections, so that no
    /// reply of one names a request of another.
    base: u64,
    /// Whether a request may expire before one in front of it.
    pub(super) is_mixed: bool,
    /// When the keeper next checks for expired requests. `None` before its first check.
    pub(super) alarm: Option<Instant>,
    pub(super) writer: WriterState,
    /// How many callers were last notified in one pass.
    pub(super) last_batch: usize,
    /// Whether the socket takes no more for now. The driver in charge continues the write.
    pub(super) is_full: bool,
    pub(super) is_ended: bool,
    pub(super) texts: Texts,
    pub(super) bundles: Bundles,
}

/// The state of bundling: the merge of several requests into one.
#[derive(Default)]
pub(super) struct Bundles {
    /// Whether bundling is off, because the user lacks permission for a key or the keys are in
    /// different slots. Each refused bundle would cost all of its requests a second round trip.
    pub(super) are_off: bool,
    /// An empty buffer for the next merge.
    pub(super) spare: Vec<u8>,
}

/// Whether a writer is active.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum WriterState {
    #[default]
    Free,
    Taken,
    /// Another flush came in during the write, so the writer checks the buffer again.
    TakenAgain,
}

/// A request that waits for its reply.
pub(super) struct Waiting {
    /// `None` if the request timed out and its reply is still to come, or if it is a PING that
    /// proves earlier replies.
    pub(super) reply_to: Option<oneshot::Sender<ReplyResult>>,
    /// The number that its reply names.
    pub(super) number: u64,
    /// The offset of its end in the stream of request bytes, and its length in bytes.
    pub(super) end: u64,
    pub(super) length: usize,
    pub(super) until: Until,
    /// Until when it may be sent. In a bundle, this is the latest deadline of all its requests.
    pub(super) last: Instant,
    pub(super) reply: Reply,
    /// `None` if the request cannot be bundled, or already is.
    pub(super) part: Option<BundlePart>,
}

impl Waiting {
    /// Returns a request whose place in the stream is still unknown.
    pub(super) fn new(
        tell: Option<oneshot::Sender<ReplyResult>>,
        number: u64,
        until: Until,
        reply: Reply,
    ) -> Self {
        Self {
            reply_to: tell,
            number,
            end: 0,
            length: 0,
            until,
            last: until.over,
            reply,
            part: None,
        }
    }
}

/// What kind of reply a request gets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// A script's reply, which names the request.
    Script,
    /// A script's reply, after the reply to ASKING, which is ignored.
    Second,
    /// The argument of a PING, which is the request's number.
    Ping,
    /// The argument of a PING behind a sharded subscription, or the error that came before it.
    Echo(Option<String>),
    /// A value that names no request.
    Unnamed,
    /// A value in the handshake that names no request. It is delivered even if the connection ends
    /// unproven: a server that rejects the client replies, and then closes.
    Greeting,
    /// This many pushed confirmations, still to come. They name no request.
    Pushes(usize),
    /// The reply to a bundle of this many requests, of which this is the first.
    Each(usize),
    /// Part of an earlier request's `Each`.
    OfEach,
}

impl Out {
    pub(super) fn new(base: u64) -> Self {
        Self {
            base,
            ..Self::default()
        }
    }

    /// Counts a request. Returns its number.
    pub(super) fn next_number(&mut self) -> u64 {
        self.sent += 1;
        self.base + self.sent
    }

    /// Adds a request whose bytes begin at offset `before` of the buffer.
    pub(super) fn push(&mut self, before: usize, waiting: Waiting) {
        self.end += (self.buf.len() - before) as u64;
        // A request that another connection left unsent, or a PING, may have less time than those
        // in front of it.
        self.is_mixed |= self
            .waiting
            .back()
            .is_some_and(|last| waiting.until.over < last.until.over);
        self.pings += usize::from(waiting.reply == Reply::Ping);
        self.waiting.push_back(Waiting {
            end: self.end,
            length: self.buf.len() - before,
            ..waiting
        });
    }

    /// Appends a PING with its number. Its reply proves that the replies before it belong to their
    /// requests.
    pub(super) fn ping(&mut self, until: Until) {
        let (number, before) = (self.next_number(), self.buf.len());
        resp::write_ping(&mut self.buf, number);
        self.push(before, Waiting::new(None, number, until, Reply::Ping));
    }

    /// Appends a PING to the bytes about to be written, if a request was refused less than
    /// `REFUSED` ago. The next refusal is then proven within its own round trip.
    pub(super) fn ping_if_refused(&mut self, now: Instant, limit: Duration) {
        let is_refused = self
            .refused
            .is_some_and(|at| now.saturating_duration_since(at) < REFUSED);
        if is_refused
            && self
                .waiting
                .back()
                .is_some_and(|last| last.reply != Reply::Ping)
        {
            self.ping(Until::new(now, limit));
        }
    }

    /// Appends a PING if replies are held and no PING is pending, so that they are soon delivered
    /// or found wrong. Returns `true` if there is a PING to write.
    pub(super) fn prove(&mut self, now: Instant, limit: Duration) -> bool {
        let proves = !self.held.is_empty() && self.pings == 0;
        if proves {
            self.refused = Some(now);
            self.ping(Until::new(now, limit));
        }
        proves
    }

    /// Returns the stream offset up to which requests may have been sent. While a writer is active,
    /// that includes the whole buffer.
    fn written(&self) -> u64 {
        if self.writer == WriterState::Free {
            self.from
        } else {
            self.end
        }
    }

    /// Matches a reply to its request. Returns an error if it belongs to another request, or to
    /// none.
    ///
    /// The replies to scripts and PINGs name their requests. Any other reply may have been shifted
    /// by one that was lost or doubled, so it is held until a later reply names its request.
    pub(super) fn match_reply(
        &mut self,
        frame: Frame,
        callers: &mut Vec<Caller>,
    ) -> Result<(), String> {
        let (at, written) = (self.held.len(), self.written());
        let Some(waiting) = self
            .waiting
            .get(at)
            .filter(|waiting| waiting.end <= written)
        else {
            return Err("a reply without a request".into());
        };
        self.pings -= usize::from(waiting.reply == Reply::Ping);
        match frame {
            Frame::Value(value) => self.match_value(at, value, callers),
            Frame::Error(error) => self.match_refusal(at, error, callers),
            Frame::Push(_) => self.match_confirmation(at, callers),
        }
    }

    /// Matches a value to the request at this index.
    fn match_value(
        &mut self,
        at: usize,
        value: Value,
        callers: &mut Vec<Caller>,
    ) -> Result<(), String> {
        let waiting = &mut self.waiting[at];
        let number = waiting.number;
        match &mut waiting.reply {
            Reply::Second => waiting.reply = Reply::Script,
            Reply::Unnamed | Reply::Greeting => {
                let next = self.waiting.get(at + 1);
                if next.is_some_and(|next| numbered::is_pong(next.number, &value)) {
                    return Err(ANOTHER.into());
                }
                self.hold(Ok(value), callers);
            }
            // The replies below name their requests.
            Reply::Each(many) => {
                let many = *many;
                let told = numbered::each(number, value, many).ok_or(ANOTHER)?;
                self.resolve_held(callers);
                for (waiting, told) in self.waiting.drain(..many).zip(told) {
                    callers.extend(waiting.reply_to.map(|tell| (tell, told)));
                }
            }
            Reply::Script => {
                let told = numbered::reply(number, value).ok_or(ANOTHER)?;
                self.resolve_named(Ok(told), callers);
            }
            Reply::Ping | Reply::Echo(None) if numbered::is_pong(number, &value) => {
                self.resolve_named(Ok(Value::Null), callers);
            }
            Reply::Echo(Some(error)) if numbered::is_pong(number, &value) => {
                let refused = Failure::Refused(mem::take(error));
                self.resolve_named(Err(refused), callers);
            }
            _ => return Err(ANOTHER.into()),
        }
        Ok(())
    }

    /// Matches a refusal to the request at this index.
    fn match_refusal(
        &mut self,
        at: usize,
        error: String,
        callers: &mut Vec<Caller>,
    ) -> Result<(), String> {
        let reply = &mut self.waiting[at].reply;
        if let Reply::Script | Reply::Each(_) = reply {
            self.texts.refused(&error);
        }
        match reply {
            Reply::Second => *reply = Reply::Script,
            Reply::Echo(refused @ None) => *refused = Some(error),
            // The PING behind the request was refused, too.
            Reply::Echo(Some(first)) => {
                let refused = Failure::Refused(mem::take(first));
                self.hold(Err(refused), callers);
            }
            Reply::Each(many) => {
                let many = *many;
                let refused = self.refused_together(error);
                self.held.extend((0..many).map(|_| Err(refused.clone())));
                self.resolve_proven(callers);
            }
            Reply::Script | Reply::Ping | Reply::Unnamed | Reply::Greeting | Reply::Pushes(_) => {
                self.hold(Err(Failure::Refused(error)), callers);
            }
            Reply::OfEach => return Err(ANOTHER.into()),
        }
        Ok(())
    }

    /// Matches a pushed confirmation to the request at this index.
    fn match_confirmation(&mut self, at: usize, callers: &mut Vec<Caller>) -> Result<(), String> {
        match &mut self.waiting[at].reply {
            Reply::Pushes(missing @ 2..) => *missing -= 1,
            Reply::Pushes(_) => self.hold(Ok(Value::Null), callers),
            _ => return Err(ANOTHER.into()),
        }
        Ok(())
    }

    /// Holds the result of a request until a later reply proves it.
    fn hold(&mut self, told: ReplyResult, callers: &mut Vec<Caller>) {
        self.held.push_back(told);
        self.resolve_proven(callers);
    }

    /// Resolves the held replies, and the request behind them, which was named by its reply.
    fn resolve_named(&mut self, told: ReplyResult, callers: &mut Vec<Caller>) {
        self.resolve_held(callers);
        self.resolve_first(told, callers);
    }

    /// Takes the first request off the queue, with this result for its caller.
    fn resolve_first(&mut self, told: ReplyResult, callers: &mut Vec<Caller>) {
        callers.extend(
            self.waiting
                .pop_front()
                .and_then(|first| first.reply_to)
                .map(|tell| (tell, told)),
        );
    }

    /// Resolves the requests of all held replies, which are now proven.
    fn resolve_held(&mut self, callers: &mut Vec<Caller>) {
        while let Some(told) = self.held.pop_front() {
            // A server that does not know CLIENT SETINFO does not refuse the requests after it.
            let is_greeting = self
                .waiting
                .front()
                .is_some_and(|first| first.reply == Reply::Greeting);
            if told.is_err() && !is_greeting {
                self.refused = Some(Instant::now());
            }
            self.resolve_first(told, callers);
        }
    }

    /// Resolves the held replies if they end with a refused PING, and there are as many replies as
    /// requests that were sent: a loading server refuses PING, too. Then drops the first replies if
    /// they have no caller.
    fn resolve_proven(&mut self, callers: &mut Vec<Caller>) {
        let last = self
            .held
            .len()
            .checked_sub(1)
            .and_then(|last| self.waiting.get(last));
        if last.is_some_and(|last| last.reply == Reply::Ping && last.end == self.written()) {
            self.resolve_held(callers);
        }
        while !self.held.is_empty()
            && self
                .waiting
                .front()
                .is_some_and(|first| first.reply_to.is_none())
        {
            self.held.pop_front();
            self.waiting.pop_front();
        }
    }

    /// Removes the requests in the buffer whose time is over. Returns their callers, and `true` if
    /// nothing was removed because such a request was already sent in part.
    pub(super) fn drop_expired(&mut self, now: Instant) -> (Vec<Caller>, bool) {
        let first = self
            .waiting
            .partition_point(|waiting| waiting.end <= self.from);
        let is_late = |waiting: &Waiting| waiting.last <= now;
        if !self.waiting.range(first..).any(is_late) {
            return (Vec::new(), false);
        }
        if self
            .waiting
            .get(first)
            .is_some_and(|first| is_late(first) && first.end - (first.length as u64) < self.from)
        {
            return (Vec::new(), true);
        }
        // A removed request may have carried a script's text.
        self.texts.forget();
        // Close the gaps: the requests that stay move up, in the buffer and in the stream.
        let (mut told, mut read, mut kept) = (Vec::new(), 0, 0);
        for mut waiting in self.waiting.split_off(first) {
            // Not `length`: part of the first request may have been sent.
            let (from, to) = (read, (waiting.end - self.from) as usize);
            read = to;
            if is_late(&waiting) {
                self.pings -= usize::from(waiting.reply == Reply::Ping);
                told.extend(
                    waiting
                        .reply_to
                        .map(|tell| (tell, Err(Failure::LateUnsent))),
                );
                continue;
            }
            self.buf.copy_within(from..to, kept);
            kept += to - from;
            waiting.end = self.from + kept as u64;
            self.waiting.push_back(waiting);
        }
        self.buf.truncate(kept);
        self.end = self.from + kept as u64;
        (told, false)
    }

    /// Puts the bytes that the socket did not take back in front of the buffer.
    pub(super) fn put_back(&mut self, mut chunk: Vec<u8>, written: usize) {
        self.from -= (chunk.len() - written) as u64;
        chunk.drain(..written);
        let later = mem::replace(&mut self.buf, chunk);
        self.buf.extend_from_slice(&later);
        self.is_full = true;
    }

    /// Fails all requests, because the connection has ended. Returns their callers. Bytes from the
    /// offset `written` on were not sent.
    pub(super) fn give_up(&mut self, written: u64) -> Vec<Caller> {
        let mut held = mem::take(&mut self.held).into_iter();
        let waiting = self.waiting.drain(..);
        let tell = |waiting: Waiting| {
            let why = if waiting.end <= written {
                Failure::Ended
            } else {
                Failure::Unsent
            };
            let told = held
                .next()
                .filter(|_| waiting.reply == Reply::Greeting)
                .unwrap_or(Err(why));
            waiting.reply_to.map(|tell| (tell, told))
        };
        waiting.filter_map(tell).collect()
    }
}

/// Largest capacity, in bytes, of an empty buffer that is kept for reuse.
pub(crate) const MAX_KEPT_BUFFER: usize = 256 << 10;

/// The outcome of a request, as its caller gets it.
pub(crate) type ReplyResult = Result<Value, Failure>;

pub(crate) type Caller = (oneshot::Sender<ReplyResult>, ReplyResult);
