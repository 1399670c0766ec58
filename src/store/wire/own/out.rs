//! What goes out, and who waits for the answer.

use std::{collections::VecDeque, mem};

use tokio::sync::oneshot;

use super::{Caller, Told};
use crate::{
    clock::Instant,
    store::wire::{
        Failure, Until,
        resp::{Frame, Value},
    },
};

/// What goes out, and who waits for the answer.
#[derive(Default)]
pub(super) struct Out {
    /// What nobody has given to the socket yet.
    pub(super) buf: Vec<u8>,
    pub(super) spare: Vec<u8>,
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
    pub(super) reply: Reply,
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
}

impl Out {
    /// Gives an answer to whom it belongs; an error: there is nobody.
    pub(super) fn answer(&mut self, frame: Frame) -> Result<Option<Caller>, String> {
        let written = if self.turn == Turn::Free { self.from } else { self.end };
        let Some(first) = self.waiting.front_mut().filter(|first| first.end <= written) else {
            return Err("an answer to nothing".into());
        };
        let told = match (&mut first.reply, frame) {
            (Reply::Second, Frame::Value(_) | Frame::Error(_)) => {
                first.reply = Reply::Value;
                return Ok(None);
            }
            (Reply::Echo(refused), Frame::Error(error)) => {
                refused.get_or_insert(error);
                return Ok(None);
            }
            (Reply::Echo(refused), Frame::Value(value)) => {
                refused.take().map_or(Ok(value), |error| Err(Failure::Refused(error)))
            }
            (_, Frame::Error(error)) => Err(Failure::Refused(error)),
            (Reply::Value, Frame::Value(value)) => Ok(value),
            (Reply::Pushes(missing), Frame::Push(_)) => {
                *missing -= 1;
                if *missing > 0 {
                    return Ok(None);
                }
                Ok(Value::Null)
            }
            _ => return Err("an answer to another request".into()),
        };
        let tell = self.waiting.pop_front().and_then(|first| first.tell);
        Ok(tell.map(|tell| (tell, told)))
    }

    /// What nobody has given to the socket stays unsent if its time is over: who is to be told. `true`: such a request was
    /// sent in part.
    pub(super) fn drop_late(&mut self, now: Instant) -> (Vec<Caller>, bool) {
        let first = self.waiting.partition_point(|waiting| waiting.end <= self.from);
        let is_late = |waiting: &Waiting| waiting.until.over <= now;
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
