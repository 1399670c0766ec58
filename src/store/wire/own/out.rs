//! What goes out, and who waits for the answer.

use std::{collections::VecDeque, mem, time::Duration};

use smallvec::SmallVec;
use tokio::sync::oneshot;

use super::{Caller, KEPT_BUFFER, Told};
use crate::{
    clock::Instant,
    error::StoreErrorKind,
    store::{
        bundle::Bundle,
        refusal,
        wire::{
            Failure, REFUSED, Texts, Until, numbered,
            resp::{self, Frame, Value},
        },
    },
};

/// How many requests go together at most. Of more, the first would wait for the last one's answer.
const MOST_TOGETHER: usize = 32;
/// What ends a connection.
const ANOTHER: &str = "a reply to another request";

/// What goes out, and who waits for the answer.
#[derive(Default)]
pub(super) struct Out {
    /// What nobody has given to the socket yet.
    pub(super) buf: Vec<u8>,
    pub(super) spare: Vec<u8>,
    /// How many requests there have been.
    pub(super) asked: u64,
    /// The places in the stream of requests at which `buf` begins and ends.
    pub(super) from: u64,
    pub(super) end: u64,
    /// In the order of their requests.
    pub(super) waiting: VecDeque<Waiting>,
    /// The replies to the first of those, which do not name their requests: told when a later reply names its own.
    held: VecDeque<Told>,
    /// PINGs that are not answered yet.
    pings: usize,
    /// When a refusal was told last, or had to be proven.
    refused: Option<Instant>,
    /// The number of the first request on the wire is one more. No two connections' numbers are alike.
    base: u64,
    /// The time of some may be over before that of others in front of them.
    pub(super) is_mixed: bool,
    /// When the keeper looks next whose time is over; `None`: it looks now.
    pub(super) alarm: Option<Instant>,
    pub(super) turn: Turn,
    /// How many were told together last.
    pub(super) told_together: usize,
    /// The socket takes no more for now: whoever has the driver's place goes on.
    pub(super) is_full: bool,
    pub(super) is_ended: bool,
    pub(super) texts: Texts,
    bundles: Bundles,
}

/// Requests that go together.
#[derive(Default)]
struct Bundles {
    /// The user may not use some key, or keys are not in one place: it would cost those beside it a second request each time.
    are_off: bool,
    spare: Vec<u8>,
}

/// How a request may go together with others: what stands where in its bytes.
pub(in super::super) struct Part {
    pub(in super::super) bundle: &'static Bundle,
    /// Its script's.
    pub(in super::super) digit: u8,
    /// Where the key and the arguments begin.
    pub(in super::super) key: u32,
    pub(in super::super) args: u32,
    /// Where the request's number begins.
    pub(in super::super) number: u32,
}

/// Whether somebody writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Turn {
    #[default]
    Free,
    Taken,
    /// Somebody else came meanwhile: whoever writes goes on for it.
    TakenAgain,
}

pub(super) struct Waiting {
    /// `None`: its time was over, and its reply is still to come; or it is a PING that proves what came before.
    pub(super) tell: Option<oneshot::Sender<Told>>,
    /// What its reply names.
    pub(super) number: u64,
    /// Its place in the stream of requests: the end, and how long it is.
    pub(super) end: u64,
    pub(super) length: usize,
    pub(super) until: Until,
    /// Until when it may be sent: as long as any has time with which it goes together.
    pub(super) last: Instant,
    pub(super) reply: Reply,
    /// `None`: it goes alone, or has gone.
    pub(super) part: Option<Part>,
}

impl Waiting {
    /// A request whose place is not known yet.
    pub(super) fn new(tell: Option<oneshot::Sender<Told>>, number: u64, until: Until, reply: Reply) -> Self {
        Self { tell, number, end: 0, length: 0, until, last: until.over, reply, part: None }
    }
}

/// What the reply to a request is.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Reply {
    /// A script's: it names the request.
    Script,
    /// The same, after a reply that says nothing.
    Second,
    /// The word of a PING, which is the request's number.
    Ping,
    /// The same; or the error that came before it.
    Echo(Option<String>),
    /// A value that names no request.
    Unnamed,
    /// The same in the handshake: told also when the connection ends, as a server does that turns us away.
    Greeting,
    /// The same, as so many pushes.
    Pushes(usize),
    /// A script's, over so many requests that went together; this is the first.
    Each(usize),
    /// One of the others.
    OfEach,
}

impl Out {
    pub(super) fn new(base: u64) -> Self {
        Self { base, ..Self::default() }
    }

    /// The number of the next request.
    pub(super) fn next_number(&mut self) -> u64 {
        self.asked += 1;
        self.base + self.asked
    }

    /// Appends a request that was encoded from this place of the buffer on.
    pub(super) fn push(&mut self, before: usize, waiting: Waiting) {
        self.end += (self.buf.len() - before) as u64;
        // one that another connection did not send, or a PING, may have less time than those in front of it
        self.is_mixed |= self.waiting.back().is_some_and(|last| waiting.until.over < last.until.over);
        self.pings += usize::from(waiting.reply == Reply::Ping);
        self.waiting.push_back(Waiting { end: self.end, length: self.buf.len() - before, ..waiting });
    }

    /// Appends a PING with its number, which has so long: its reply proves that those before it found their requests.
    pub(super) fn ping(&mut self, until: Until) {
        let (number, before) = (self.next_number(), self.buf.len());
        resp::write_ping(&mut self.buf, number);
        self.push(before, Waiting::new(None, number, until, Reply::Ping));
    }

    /// Behind what is about to be written a PING stands, if something was refused a moment ago: the next refusal is proven as soon
    /// as it comes.
    pub(super) fn ping_if_refused(&mut self, now: Instant, limit: Duration) {
        let is_refused = self.refused.is_some_and(|at| now.saturating_duration_since(at) < REFUSED);
        if is_refused && self.waiting.back().is_some_and(|last| last.reply != Reply::Ping) {
            self.ping(Until::new(now, limit));
        }
    }

    /// Sees to it that what is held is told, or found wrong, soon. `true`: there is something to be written.
    pub(super) fn prove(&mut self, now: Instant, limit: Duration) -> bool {
        let proves = !self.held.is_empty() && self.pings == 0;
        if proves {
            self.refused = Some(now);
            self.ping(Until::new(now, limit));
        }
        proves
    }

    /// The place in the stream up to which the socket has what was asked, or somebody is about to give it to it.
    fn written(&self) -> u64 {
        if self.turn == Turn::Free { self.from } else { self.end }
    }

    /// Gives a reply to its request; an error: it is no request's, or another one's.
    ///
    /// A script's reply names its request, and so does a PING's. What else comes may have been shifted by a reply that was lost,
    /// or that came twice: it is held until a later reply names its request.
    pub(super) fn answer(&mut self, frame: Frame, callers: &mut Vec<Caller>) -> Result<(), String> {
        let (at, written) = (self.held.len(), self.written());
        let next = self.waiting.get(at + 1).map(|next| next.number);
        let Some(waiting) = self.waiting.get_mut(at).filter(|waiting| waiting.end <= written) else {
            return Err("a reply to no request".into());
        };
        let number = waiting.number;
        if let (Reply::Script | Reply::Each(_), Frame::Error(error)) = (&waiting.reply, &frame) {
            self.texts.refused(error);
        }
        self.pings -= usize::from(waiting.reply == Reply::Ping);
        let told = match (&mut waiting.reply, frame) {
            (Reply::Second, Frame::Value(_) | Frame::Error(_)) => {
                waiting.reply = Reply::Script;
                return Ok(());
            }
            (Reply::Echo(refused @ None), Frame::Error(error)) => {
                *refused = Some(error);
                return Ok(());
            }
            // its PING was refused, too
            (Reply::Echo(refused), Frame::Error(error)) => Err(Failure::Refused(refused.take().unwrap_or(error))),
            (Reply::Pushes(missing @ 2..), Frame::Push(_)) => {
                *missing -= 1;
                return Ok(());
            }
            (Reply::Each(many), Frame::Error(error)) => {
                let many = *many;
                let refused = self.refused_together(error);
                self.held.extend((0..many).map(|_| Err(refused.clone())));
                self.tell_what_is_proven(callers);
                return Ok(());
            }
            (Reply::Pushes(_), Frame::Push(_)) => Ok(Value::Null),
            (Reply::Unnamed | Reply::Greeting, Frame::Value(value))
                if !next.is_some_and(|next| numbered::is_pong(next, &value)) =>
            {
                Ok(value)
            }
            (
                Reply::Script | Reply::Ping | Reply::Unnamed | Reply::Greeting | Reply::Pushes(_),
                Frame::Error(error),
            ) => Err(Failure::Refused(error)),
            // these name their request
            (Reply::Each(many), Frame::Value(value)) => {
                let many = *many;
                let told = numbered::each(number, value, many).ok_or(ANOTHER)?;
                self.tell_held(callers);
                for (waiting, told) in self.waiting.drain(..many).zip(told) {
                    callers.extend(waiting.tell.map(|tell| (tell, told)));
                }
                return Ok(());
            }
            (Reply::Script, Frame::Value(value)) => {
                let told = numbered::reply(number, value).ok_or(ANOTHER)?;
                self.tell_held(callers);
                self.tell_first(Ok(told), callers);
                return Ok(());
            }
            (Reply::Ping | Reply::Echo(_), Frame::Value(value)) => {
                let refused = if let Reply::Echo(refused) = &mut waiting.reply { refused.take() } else { None };
                if !numbered::is_pong(number, &value) {
                    return Err(ANOTHER.into());
                }
                self.tell_held(callers);
                self.tell_first(refused.map_or(Ok(Value::Null), |error| Err(Failure::Refused(error))), callers);
                return Ok(());
            }
            _ => return Err(ANOTHER.into()),
        };
        self.held.push_back(told);
        self.tell_what_is_proven(callers);
        Ok(())
    }

    fn tell_first(&mut self, told: Told, callers: &mut Vec<Caller>) {
        callers.extend(self.waiting.pop_front().and_then(|first| first.tell).map(|tell| (tell, told)));
    }

    /// What is held has found its requests.
    fn tell_held(&mut self, callers: &mut Vec<Caller>) {
        while let Some(told) = self.held.pop_front() {
            // a server that does not know CLIENT SETINFO does not refuse what comes after it
            let is_greeting = self.waiting.front().is_some_and(|first| first.reply == Reply::Greeting);
            if told.is_err() && !is_greeting {
                self.refused = Some(Instant::now());
            }
            self.tell_first(told, callers);
        }
    }

    /// A server that refuses PING, as it is loading, has refused what was asked before it if there are as many replies as requests.
    fn tell_what_is_proven(&mut self, callers: &mut Vec<Caller>) {
        let last = self.held.len().checked_sub(1).and_then(|last| self.waiting.get(last));
        if last.is_some_and(|last| last.reply == Reply::Ping && last.end == self.written()) {
            self.tell_held(callers);
        }
        while !self.held.is_empty() && self.waiting.front().is_some_and(|first| first.tell.is_none()) {
            self.held.pop_front();
            self.waiting.pop_front();
        }
    }

    /// What those are told who went together, and were refused together.
    fn refused_together(&mut self, error: String) -> Failure {
        use StoreErrorKind as K;
        let kind = refusal::verdict(&error).0;
        // a server that is in such a state would refuse each alone, a round trip later
        let refuses_all = matches!(kind, K::Loading | K::Busy | K::MasterDown | K::ClusterDown);
        if refuses_all || !refusal::is_known(&error) {
            return Failure::Refused(error);
        }
        self.bundles.are_off |= matches!(kind, K::NoPermission | K::CrossSlot);
        Failure::RefusedTogether(error)
    }

    /// Makes one request of those that stand beside each other and may go together.
    pub(super) fn bundle(&mut self) {
        let first = self.waiting.partition_point(|waiting| waiting.end <= self.from);
        let mut parts = self.waiting.range(first..).map(|waiting| waiting.part.is_some());
        let mut before = false;
        if self.bundles.are_off || !parts.any(|part| mem::replace(&mut before, part) && part) {
            return;
        }
        let spare = mem::take(&mut self.bundles.spare);
        let mut old = mem::replace(&mut self.buf, spare);
        // of the first one a part may be gone
        let is_cut = self.waiting.get(first).is_some_and(|first| first.end - (first.length as u64) < self.from);
        let (mut at, mut read) = (first, 0);
        while at < self.waiting.len() {
            let many = if is_cut && at == first { 1 } else { self.together(&old[read..], at) };
            let end = (self.waiting[at + many - 1].end - self.from) as usize;
            if many > 1 {
                self.write_together(&old[read..end], at, many);
            } else {
                self.buf.extend_from_slice(&old[read..end]);
            }
            let new_end = self.from + self.buf.len() as u64;
            let shift = |waiting: &mut Waiting| waiting.end = new_end;
            self.waiting.range_mut(at..at + many).for_each(shift);
            (at, read) = (at + many, end);
        }
        self.end = self.from + self.buf.len() as u64;
        old.clear();
        if old.capacity() <= KEPT_BUFFER {
            self.bundles.spare = old;
        }
    }

    /// How many go together from this one on, whose bytes begin here. No two about one lock: each script may be executed twice by
    /// whoever is on the way, which would not be true of an acquire that finds a lock busy and the release behind it.
    fn together(&self, bytes: &[u8], at: usize) -> usize {
        let (mut locks, mut from) = (SmallVec::<[&[u8]; MOST_TOGETHER]>::new(), 0);
        for waiting in self.waiting.range(at..).take(MOST_TOGETHER) {
            let Some(part) = &waiting.part else { break };
            let lock = &bytes[from + part.key as usize..from + part.args as usize];
            if locks.contains(&lock) {
                break;
            }
            locks.push(lock);
            from += waiting.length;
        }
        locks.len().max(1)
    }

    /// Writes so many requests as one, whose bytes these are.
    fn write_together(&mut self, bytes: &[u8], at: usize, many: usize) {
        let Some(bundle) = self.waiting[at].part.as_ref().map(|part| part.bundle) else { return };
        let (verb, script) = self.texts.verb(bundle.text());
        let begin = self.buf.len();
        resp::write_head(&mut self.buf, 4 + many * 5);
        resp::write_word(&mut self.buf, verb.as_bytes());
        resp::write_word(&mut self.buf, script.as_bytes());
        resp::write_integer(&mut self.buf, many as u64);
        for is_key in [true, false] {
            let mut from = 0;
            for waiting in self.waiting.range(at..at + many) {
                let Some(part) = &waiting.part else { return };
                let [key, args, number] = [part.key, part.args, part.number].map(|at| from + at as usize);
                from += waiting.length;
                if is_key {
                    self.buf.extend_from_slice(&bytes[key..args]);
                } else {
                    resp::write_word(&mut self.buf, &[part.digit]);
                    self.buf.extend_from_slice(&bytes[args..number]);
                }
            }
        }
        resp::write_integer(&mut self.buf, self.waiting[at].number);
        let length = self.buf.len() - begin;
        let last = self.waiting.range(at..at + many).map(|waiting| waiting.last).max();
        for (n, waiting) in self.waiting.range_mut(at..at + many).enumerate() {
            (waiting.reply, waiting.length) = if n == 0 { (Reply::Each(many), length) } else { (Reply::OfEach, 0) };
            waiting.last = last.unwrap_or(waiting.last);
            waiting.part = None;
        }
    }

    /// What nobody has given to the socket stays unsent if its time is over: who is to be told. `true`: such a request was
    /// sent in part.
    pub(super) fn drop_late(&mut self, now: Instant) -> (Vec<Caller>, bool) {
        let first = self.waiting.partition_point(|waiting| waiting.end <= self.from);
        let is_late = |waiting: &Waiting| waiting.last <= now;
        if !self.waiting.range(first..).any(is_late) {
            return (Vec::new(), false);
        }
        if self.waiting.get(first).is_some_and(|first| is_late(first) && first.end - (first.length as u64) < self.from)
        {
            return (Vec::new(), true);
        }
        self.texts.forget();
        // what is kept moves up, in the buffer and in the stream
        let (mut told, mut read, mut kept) = (Vec::new(), 0, 0);
        for mut waiting in self.waiting.split_off(first) {
            // of the first one a part may be gone
            let (from, to) = (read, (waiting.end - self.from) as usize);
            read = to;
            if is_late(&waiting) {
                self.pings -= usize::from(waiting.reply == Reply::Ping);
                told.extend(waiting.tell.map(|tell| (tell, Err(Failure::LateUnsent))));
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

    /// The socket did not take all.
    pub(super) fn put_back(&mut self, mut chunk: Vec<u8>, written: usize) {
        self.from -= (chunk.len() - written) as u64;
        chunk.drain(..written);
        let later = mem::replace(&mut self.buf, chunk);
        self.buf.extend_from_slice(&later);
        self.is_full = true;
    }

    /// The connection is over: who is to be told what. Bytes from this place on were not written.
    pub(super) fn give_up(&mut self, written: u64) -> Vec<Caller> {
        let mut held = mem::take(&mut self.held).into_iter();
        let waiting = self.waiting.drain(..);
        let tell = |waiting: Waiting| {
            let why = if waiting.end <= written { Failure::Ended } else { Failure::Unsent };
            let told = held.next().filter(|_| waiting.reply == Reply::Greeting).unwrap_or(Err(why));
            waiting.tell.map(|tell| (tell, told))
        };
        waiting.filter_map(tell).collect()
    }
}
