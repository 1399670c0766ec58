//! Bundling: adjacent requests in the send buffer are merged into one script.

use std::mem;

use smallvec::SmallVec;

use super::out::{MAX_KEPT_BUFFER, Out, Reply, Waiting};

use crate::{error::StoreErrorKind, failure::Failure, refusal, resp};

/// Most requests in one bundle. All of a bundle wait until the last is executed, so a larger one
/// would delay the first.
const MOST_TOGETHER: usize = 32;
impl Out {
    /// Returns the failure for the requests of a bundle that was refused as a whole.
    pub(super) fn refused_together(&mut self, error: String) -> Failure {
        use StoreErrorKind as K;
        let kind = refusal::verdict(&error).0;
        // A server in such a state would refuse each request alone, one round trip later.
        let refuses_all = matches!(kind, K::Loading | K::Busy | K::MasterDown | K::ClusterDown);
        if refuses_all || !refusal::is_known(&error) {
            return Failure::Refused(error);
        }
        // Known errors come before execution, so each request may be sent again, alone.
        self.bundles.are_off |= matches!(kind, K::NoPermission | K::CrossSlot);
        Failure::RefusedTogether(error)
    }

    /// Merges adjacent requests in the buffer into bundles, where they allow it.
    pub(super) fn bundle(&mut self) {
        let first = self
            .waiting
            .partition_point(|waiting| waiting.end <= self.from);
        let mut parts = self
            .waiting
            .range(first..)
            .map(|waiting| waiting.part.is_some());
        let mut before = false;
        if self.bundles.are_off || !parts.any(|part| mem::replace(&mut before, part) && part) {
            return;
        }
        let spare = mem::take(&mut self.bundles.spare);
        let mut old = mem::replace(&mut self.buf, spare);
        // Part of the first request may have been sent, so its bytes must not change.
        let is_cut = self
            .waiting
            .get(first)
            .is_some_and(|first| first.end - (first.length as u64) < self.from);
        let (mut at, mut read) = (first, 0);
        while at < self.waiting.len() {
            let many = if is_cut && at == first {
                1
            } else {
                self.together(&old[read..], at)
            };
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
        if old.capacity() <= MAX_KEPT_BUFFER {
            self.bundles.spare = old;
        }
    }

    /// Returns how many requests from this one on form a bundle; `bytes` begins with this one's. No
    /// two may be about the same lock: a proxy may deliver a request twice, which is harmless for
    /// each script, but not for an acquire that finds its lock busy and the release behind it.
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

    /// Encodes `many` requests, whose bytes these are, as one.
    fn write_together(&mut self, bytes: &[u8], at: usize, many: usize) {
        let Some(bundle) = self.waiting[at].part.as_ref().map(|part| part.bundle) else {
            return;
        };
        let (text, digest) = bundle.text();
        let (verb, script) = self.texts.verb(text, digest);
        let begin = self.buf.len();
        resp::write_head(&mut self.buf, 4 + many * 5);
        resp::write_word(&mut self.buf, verb.as_bytes());
        resp::write_word(&mut self.buf, script.as_bytes());
        resp::write_integer(&mut self.buf, many as u64);
        for is_key in [true, false] {
            let mut from = 0;
            for waiting in self.waiting.range(at..at + many) {
                let Some(part) = &waiting.part else { return };
                let [key, args, number] =
                    [part.key, part.args, part.number].map(|at| from + at as usize);
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
        // The first request has all of the bundle's bytes, and the others have none.
        let length = self.buf.len() - begin;
        let last = self
            .waiting
            .range(at..at + many)
            .map(|waiting| waiting.last)
            .max();
        for (n, waiting) in self.waiting.range_mut(at..at + many).enumerate() {
            (waiting.reply, waiting.length) = if n == 0 {
                (Reply::Each(many), length)
            } else {
                (Reply::OfEach, 0)
            };
            waiting.last = last.unwrap_or(waiting.last);
            waiting.part = None;
        }
    }
}
