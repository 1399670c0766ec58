//! What goes out, and who waits for the answer.

use std::{collections::VecDeque, mem};

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
            Failure, Until,
            resp::{self, Frame, Value},
        },
    },
};

/// How many requests go together at most. Of more, the first would wait for the last one's answer.
const MOST_TOGETHER: usize = 32;
/// What ends a connection.
const ANOTHER: &str = "an answer to another request";

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
    bundles: Bundles,
}

/// Requests that go together.
#[derive(Default)]
struct Bundles {
    /// The server has their script.
    are_known: bool,
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
    /// `None`: its time was over; its answer is still to come.
    pub(super) tell: Option<oneshot::Sender<Told>>,
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

/// What the answer to a request is.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Reply {
    /// A value.
    Value,
    /// So many pushes.
    Pushes(usize),
    /// A value, after one that says nothing.
    Second,
    /// A value, that of a PING; or the error that came before it.
    Echo(Option<String>),
    /// A value for each of so many requests, which went together; this is the first.
    Each(usize),
    /// One of the others.
    OfEach,
}

impl Out {
    /// Gives an answer to whom it belongs; an error: there is nobody.
    pub(super) fn answer(&mut self, frame: Frame, callers: &mut Vec<Caller>) -> Result<(), String> {
        let written = if self.turn == Turn::Free { self.from } else { self.end };
        let Some(first) = self.waiting.front_mut().filter(|first| first.end <= written) else {
            return Err("an answer to nothing".into());
        };
        let told = match (&mut first.reply, frame) {
            (Reply::Second, Frame::Value(_) | Frame::Error(_)) => {
                first.reply = Reply::Value;
                return Ok(());
            }
            (Reply::Echo(refused), Frame::Error(error)) => {
                refused.get_or_insert(error);
                return Ok(());
            }
            (Reply::Echo(refused), Frame::Value(value)) => {
                refused.take().map_or(Ok(value), |error| Err(Failure::Refused(error)))
            }
            (Reply::Each(many), frame) => {
                let many = *many;
                return self.answer_each(many, frame, callers);
            }
            (_, Frame::Error(error)) => Err(Failure::Refused(error)),
            (Reply::Value, Frame::Value(value)) => Ok(value),
            (Reply::Pushes(missing), Frame::Push(_)) => {
                *missing -= 1;
                if *missing > 0 {
                    return Ok(());
                }
                Ok(Value::Null)
            }
            _ => return Err(ANOTHER.into()),
        };
        callers.extend(self.waiting.pop_front().and_then(|first| first.tell).map(|tell| (tell, told)));
        Ok(())
    }

    /// The same for so many, which went together.
    fn answer_each(&mut self, many: usize, frame: Frame, callers: &mut Vec<Caller>) -> Result<(), String> {
        let mut answers = match frame {
            Frame::Value(Value::Array(answers)) if answers.len() == many => Ok(answers.into_iter()),
            Frame::Error(error) => Err(self.refused_together(error)),
            _ => return Err(ANOTHER.into()),
        };
        for waiting in self.waiting.drain(..many) {
            let told = match &mut answers {
                Ok(answers) => match answers.next() {
                    Some(Value::Refused(error)) => Err(Failure::Refused(error)),
                    answer => Ok(answer.unwrap_or(Value::Null)),
                },
                Err(failure) => Err(failure.clone()),
            };
            callers.extend(waiting.tell.map(|tell| (tell, told)));
        }
        Ok(())
    }

    /// What those are told who went together, and were refused together.
    fn refused_together(&mut self, error: String) -> Failure {
        if !refusal::is_known(&error) {
            return Failure::Refused(error);
        }
        self.bundles.are_known &= !error.starts_with("NOSCRIPT");
        let stays = [StoreErrorKind::NoPermission, StoreErrorKind::CrossSlot];
        self.bundles.are_off |= stays.contains(&refusal::verdict(&error).0);
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
        let (source, sha1) = bundle.text();
        let (verb, script) =
            if mem::replace(&mut self.bundles.are_known, true) { ("EVALSHA", sha1) } else { ("EVAL", source) };
        let begin = self.buf.len();
        resp::write_head(&mut self.buf, 3 + many * 5);
        resp::write_word(&mut self.buf, verb.as_bytes());
        resp::write_word(&mut self.buf, script.as_bytes());
        resp::write_integer(&mut self.buf, many as u64);
        for is_key in [true, false] {
            let mut from = 0;
            for waiting in self.waiting.range(at..at + many) {
                let Some(part) = &waiting.part else { return };
                let (key, args) = (from + part.key as usize, from + part.args as usize);
                from += waiting.length;
                if is_key {
                    self.buf.extend_from_slice(&bytes[key..args]);
                } else {
                    resp::write_word(&mut self.buf, &[part.digit]);
                    self.buf.extend_from_slice(&bytes[args..from]);
                }
            }
        }
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
        // what is kept moves up, in the buffer and in the stream
        let (mut told, mut read, mut kept) = (Vec::new(), 0, 0);
        for mut waiting in self.waiting.split_off(first) {
            // of the first one a part may be gone
            let (from, to) = (read, (waiting.end - self.from) as usize);
            read = to;
            if is_late(&waiting) {
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
        let waiting = self.waiting.drain(..);
        let tell = |waiting: Waiting| {
            let why = if waiting.end <= written { Failure::Ended } else { Failure::Unsent };
            waiting.tell.map(|tell| (tell, Err(why)))
        };
        waiting.filter_map(tell).collect()
    }
}
