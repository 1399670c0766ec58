//! Checks exclusion: holds, fencing tokens and guarded writes.

use std::collections::BTreeMap;

use super::{
    op::{Op, client},
    records::{Records, Write},
    violation::Violation,
    weather::Place,
};
use crate::kinds::{Class, Kind};

/// The certain part of a hold of one lock.
#[derive(Debug, Clone)]
struct Certain<'a> {
    start: u64,
    end: u64,
    /// The owner. Its own holds may overlap.
    who: &'a str,
    op: &'a Op,
}

/// Returns until when a hold is certain: the time taken before the last check that found it held,
/// or the start of an unlock that returned Ok.
fn certain_end(op: &Op) -> Option<u64> {
    let looked = op.ok.map(|(_, last)| last);
    let unlocked = op.release.as_ref().filter(|_| {
        op.released
            .as_ref()
            .is_some_and(|(_, result)| result == "Ok")
    });
    looked.max(unlocked.map(|(time, _)| *time))
}

/// Returns the number of holds in the overlap check.
pub(crate) fn certain_holds(records: &Records) -> usize {
    records
        .ops
        .iter()
        .filter(|op| op.got().is_some() && certain_end(op).is_some())
        .count()
}

/// Cuts a hold at the first loss of data by a server after the acquire was called.
fn cut(records: &Records, op: &Op, end: u64) -> u64 {
    let forgot = records
        .weather
        .forgot(op.kind)
        .filter(|fault| op.call < fault.end);
    forgot
        .map(|fault| fault.start)
        .min()
        .map_or(end, |start| start.min(end))
}

fn certain(records: &Records) -> BTreeMap<&str, Vec<Certain<'_>>> {
    let mut all = BTreeMap::<&str, Vec<Certain>>::new();
    for op in &records.ops {
        let (Some(start), Some(end)) = (op.got(), certain_end(op)) else {
            continue;
        };
        let end = cut(records, op, end);
        for lock in op.locks.iter().filter(|_| start < end) {
            all.entry(lock).or_default().push(Certain {
                start,
                end,
                who: &op.who,
                op,
            });
        }
    }
    // a hold that was left to its lease lasts until another task begins to release it, or for what
    // its last renewal left it; only without faults nearby, as a repeated release would return Ok
    // either way
    let given: BTreeMap<&str, &Op> = records
        .ops
        .iter()
        .filter(|op| {
            op.lease.is_none() && op.release.as_ref().is_some_and(|(_, how)| how == "leave")
        })
        .map(|op| (&*op.id, op))
        .collect();
    for taken in &records.taken {
        let (Some(op), Some((end, result))) = (given.get(&*taken.what), &taken.end) else {
            continue;
        };
        let begin = op.release.as_ref().map_or(0, |(time, _)| *time);
        let origin = Place::of(op, records.client(op));
        let task = if taken.task == "giver" {
            &op.task
        } else {
            &taken.task
        };
        let Some(client) = records.clients.get(client(task)) else {
            continue;
        };
        let taker = Place::new(task, *client, op.kind);
        let before = begin.saturating_sub(2 * records.client(op).watchdog);
        if result == "Ok"
            && op.lost.is_none()
            && !records.weather.is_foul(&origin, before, *end)
            && !records.weather.is_foul(&taker, before, *end)
        {
            all.entry(&op.locks[0]).or_default().push(Certain {
                start: begin,
                end: taken.begin.min(begin + records.client(op).watchdog / 2),
                who: &taken.what,
                op,
            });
        }
    }
    for holds in all.values_mut() {
        holds.sort_by_key(|hold| hold.start);
    }
    all
}

pub(crate) fn overlaps(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for (lock, holds) in certain(records) {
        let mut inside: Vec<&Certain> = Vec::new();
        for hold in &holds {
            inside.retain(|other| other.end > hold.start);
            let both_read =
                |other: &Certain| (other.op.class, hold.op.class) == (Class::Shared, Class::Shared);
            let mut others = inside
                .iter()
                .filter(|other| other.who != hold.who && !both_read(other));
            if let Some(other) = others.nth(hold.op.kind.holders() - 1) {
                found.push(Violation {
                    sort: "two holders",
                    time: hold.start,
                    text: format!(
                        "{lock}: {} of {} has it from {} to {}, {} of {} from {} to {}",
                        other.op.id,
                        other.op.task,
                        other.start,
                        other.end,
                        hold.op.id,
                        hold.op.task,
                        hold.start,
                        hold.end
                    ),
                    words: vec![other.op.id.clone(), hold.op.id.clone()],
                });
            }
            inside.push(hold);
        }
    }
    found
}

/// Checks that a holder that called after another one had its token has a higher token. A nested
/// hold may have the same.
pub(crate) fn tokens(records: &Records) -> Vec<Violation> {
    let mut locks = BTreeMap::<&str, Vec<&Op>>::new();
    for op in records
        .ops
        .iter()
        .filter(|op| op.kind == Kind::Fenced && op.got().is_some())
    {
        locks.entry(&op.locks[0]).or_default().push(op);
    }
    let mut found = Vec::new();
    for ops in locks.values() {
        let (mut by_call, mut by_got) = (ops.clone(), ops.clone());
        by_call.sort_by_key(|op| op.call);
        by_got.sort_by_key(|op| op.got());
        let (mut at, mut highest): (usize, Option<&Op>) = (0, None);
        for op in by_call {
            while by_got
                .get(at)
                .is_some_and(|before| before.got() < Some(op.call))
            {
                highest = highest.max_by_token(by_got[at]);
                at += 1;
            }
            let before = highest.and_then(|before| before.token);
            let is_wrong = op.token.is_none()
                || op.token < before
                || (op.token == before && op.parent.is_none());
            if is_wrong {
                found.push(Violation {
                    sort: "token",
                    time: op.call,
                    text: format!(
                        "{}: {} has token {:?} after {:?} of {:?}",
                        op.locks[0],
                        op.id,
                        op.token,
                        before,
                        highest.map(|op| &op.id)
                    ),
                    words: [Some(op), highest]
                        .into_iter()
                        .flatten()
                        .map(|op| op.id.clone())
                        .collect(),
                });
            }
        }
    }
    found
}

trait Highest<'a> {
    fn max_by_token(self, other: &'a Op) -> Self;
}

impl<'a> Highest<'a> for Option<&'a Op> {
    fn max_by_token(self, other: &'a Op) -> Self {
        if self.is_some_and(|op| op.token >= other.token) {
            self
        } else {
            Some(other)
        }
    }
}

/// Checks that a guarded key never accepts a lower token after a higher one, and never rejects a
/// task that certainly holds the lock.
pub(crate) fn writes(records: &Records) -> Vec<Violation> {
    let mut keys = BTreeMap::<&str, Vec<&Write>>::new();
    for write in &records.writes {
        keys.entry(&write.key).or_default().push(write);
    }
    let ops: BTreeMap<&str, &Op> = records
        .ops
        .iter()
        .filter(|op| op.kind == Kind::Fenced)
        .map(|op| (&*op.id, op))
        .collect();
    let mut found = Vec::new();
    for writes in keys.values() {
        let accepted: Vec<&Write> = writes
            .iter()
            .copied()
            .filter(|write| write.result == "Ok")
            .collect();
        let (mut by_begin, mut by_end) = (accepted.clone(), accepted);
        by_begin.sort_by_key(|write| write.begin);
        by_end.sort_by_key(|write| write.end);
        let (mut at, mut highest): (usize, Option<&Write>) = (0, None);
        for write in by_begin {
            while by_end
                .get(at)
                .is_some_and(|before| before.end < write.begin)
            {
                let before = by_end[at];
                if highest.is_none_or(|highest| before.token > highest.token) {
                    highest = Some(before);
                }
                at += 1;
            }
            // a server that lost its data has lost the fence as well
            highest = highest.filter(|before| {
                !records
                    .weather
                    .has_forgotten(Kind::Fenced, before.begin, write.end)
            });
            if let Some(before) = highest.filter(|before| before.token > write.token) {
                found.push(Violation {
                    sort: "guarded write",
                    time: write.begin,
                    text: format!(
                        "{}: token {} of {} was accepted after {} of {}",
                        write.key, write.token, write.id, before.token, before.id
                    ),
                    words: vec![write.id.clone(), before.id.clone()],
                });
            }
        }
        for write in writes.iter().filter(|write| write.result == "StaleToken") {
            let Some(op) = ops.get(&*write.id) else {
                continue;
            };
            let end = certain_end(op).map_or(0, |end| cut(records, op, end));
            if end > write.end {
                found.push(Violation {
                    sort: "guarded write",
                    time: write.end,
                    text: format!(
                        "{}: {} was rejected as stale while it held the lock",
                        write.key, write.id
                    ),
                    words: vec![write.id.clone()],
                });
            }
        }
    }
    found
}
