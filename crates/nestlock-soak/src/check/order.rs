//! Checks the order of acquires without faults: a fair lock is granted in the order of the
//! requests, and a release wakes a waiter.

use std::collections::BTreeMap;

use super::{
    op::{Op, Outcome},
    records::Records,
    violation::Violation,
    weather::{Event, Place, slack},
};
use crate::{
    clock::{MILLI, SECOND},
    kinds::Kind,
};

/// How soon a waiter must have a lock after its release: well before it would poll by itself.
const WOKEN: u64 = 300 * MILLI;
/// Within this time, a hold that was left to its lease is released, and the lease of a killed
/// process ends.
const BEFORE: u64 = 5 * SECOND;
/// Within this time after a fault, connections are restored and unsettled requests have ended with
/// their leases, 2 s at most.
const RECOVERY: u64 = 5 * SECOND / 2;

/// A call that begins this much later counts as later.
const LATER: u64 = 250 * MILLI;
/// A waiter that gives up and calls again within this time keeps its place: the server did not know
/// yet.
const KEEPS_ITS_PLACE: u64 = 100 * MILLI;

pub(crate) fn fair(records: &Records) -> Vec<Violation> {
    let asks = |op: &&Op| {
        let way = matches!(&*op.way, "bounded" | "unbounded" | "cancelled" | "calm");
        op.kind.is_fair() && way && op.parent.is_none()
    };
    let mut asked = BTreeMap::<(&str, &str), Vec<&Op>>::new();
    for op in records.ops.iter().filter(asks) {
        asked.entry((&op.task, &op.locks[0])).or_default().push(op);
    }
    for ops in asked.values_mut() {
        ops.sort_by_key(|op| op.call);
    }
    // since when its owner has waited, without a pause
    let since = |op: &Op| {
        let before = asked[&(&*op.task, &*op.locks[0])]
            .iter()
            .rev()
            .skip_while(|other| other.call >= op.call);
        let mut since = op.call;
        for other in before {
            match &other.end {
                Some((end, Outcome::None | Outcome::Gone)) if *end + KEEPS_ITS_PLACE > since => {
                    since = other.call;
                }
                _ => break,
            }
        }
        since
    };
    let waits = |op: &&Op| asks(op) && op.way != "cancelled" && op.got().is_some();
    let mut locks = BTreeMap::<&str, Vec<&Op>>::new();
    for op in records.ops.iter().filter(waits) {
        locks.entry(&op.locks[0]).or_default().push(op);
    }
    let fair_weather = |op: &Op, until: u64| {
        let place = Place::of(op, records.client(op));
        !records
            .weather
            .is_foul(&place, op.call.saturating_sub(2 * SECOND), until)
            && records
                .weather
                .starved(&place, Event::Blocked, op.call, until)
                < LATER / 2
    };
    let mut found = Vec::new();
    for ops in locks.values_mut() {
        ops.sort_by_key(|op| op.call);
        for (at, first) in ops.iter().enumerate() {
            let Some(got) = first.got() else { continue };
            let came_later = ops[at + 1..].iter().take_while(|later| later.call < got);
            let mut overtook = came_later
                .filter(|later| since(later) > first.call + LATER && later.got() < Some(got));
            let Some(later) = overtook.next().filter(|_| fair_weather(first, got)) else {
                continue;
            };
            found.push(Violation {
                sort: "order",
                time: later.got().unwrap_or(got),
                text: format!(
                    "{}: {} acquired it before {}, which had requested it {} ms earlier",
                    first.locks[0],
                    later.id,
                    first.id,
                    (later.call - first.call) / MILLI
                ),
                words: vec![first.id.clone(), later.id.clone()],
            });
        }
    }
    found
}

/// Returns until when an operation may have held its lock: for [`BEFORE`] if its end is unknown, as
/// its process was killed. Returns `None` if it never had the lock.
fn kept_until(op: &Op) -> Option<u64> {
    let got = op.got()?;
    let released = op
        .released
        .as_ref()
        .or(op.release.as_ref())
        .map(|(time, _)| *time);
    Some(released.or(op.lost).unwrap_or(got + BEFORE))
}

/// Checks that a waiter gets a released lock by a message or a signal, well before it would poll.
pub(crate) fn woken(records: &Records) -> Vec<Violation> {
    let mut locks = BTreeMap::<&str, Vec<&Op>>::new();
    let is_told =
        |op: &&Op| !matches!(op.kind, Kind::Spin | Kind::String | Kind::Multi | Kind::Red);
    for op in records.ops.iter().filter(is_told) {
        locks.entry(&op.locks[0]).or_default().push(op);
    }
    let mut found = Vec::new();
    for (lock, mut by_call) in locks {
        by_call.sort_by_key(|op| op.call);
        let mut by_got: Vec<&Op> = by_call
            .iter()
            .copied()
            .filter(|op| op.got().is_some())
            .collect();
        by_got.sort_by_key(|op| op.got());
        let mut free_from = 0;
        for pair in by_got.windows(2) {
            let (op, next) = (pair[0], pair[1]);
            free_from = free_from.max(kept_until(op).unwrap_or(0));
            let (Some(got), true) = (next.got(), op.release.is_some()) else {
                continue;
            };
            if got < free_from + WOKEN
                || records
                    .weather
                    .faults(free_from.saturating_sub(RECOVERY), got)
                    .next()
                    .is_some()
            {
                continue;
            }
            // a hold that was left to its lease may still exist
            let first =
                by_got.partition_point(|op| op.got() < Some(free_from.saturating_sub(BEFORE)));
            let is_left = |op: &&Op| op.release.as_ref().is_some_and(|(_, how)| how == "leave");
            if by_got[first..]
                .iter()
                .take_while(|op| op.got() < Some(got))
                .any(is_left)
            {
                continue;
            }
            // a call without an end does not count, as its process may have been killed
            let waits = |op: &&&Op| {
                let way = matches!(&*op.way, "bounded" | "unbounded" | "calm");
                way && op.call + 50 * MILLI < free_from
                    && op.end.as_ref().is_some_and(|(end, _)| *end >= got)
            };
            let first = by_call.partition_point(|op| op.call + 2 * BEFORE < free_from);
            let Some(waiter) = by_call[first..]
                .iter()
                .take_while(|op| op.call < free_from)
                .find(waits)
            else {
                continue;
            };
            let place = Place::of(waiter, records.client(waiter));
            let starved = records
                .weather
                .starved(&place, Event::Blocked, free_from, got);
            if got > free_from + WOKEN + slack(starved) {
                found.push(Violation {
                    sort: "not woken",
                    time: got,
                    text: format!(
                        "{lock}: free for {} ms, while {} waited",
                        (got - free_from) / MILLI,
                        waiter.id
                    ),
                    words: vec![op.id.clone(), next.id.clone(), waiter.id.clone()],
                });
            }
        }
    }
    found
}
