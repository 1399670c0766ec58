//! Checks losses: each has a reason, none is early, and all are reported in time.

use super::{
    op::Op,
    records::Records,
    violation::Violation,
    weather::{Event, Place, RECOVERY, slack},
};
use crate::{
    clock::{MILLI, SECOND},
    kinds::Kind,
    settings::{LONGEST_LEASE, Mode},
};

/// By how much `lost()` may be later than `is_lost()`.
const APART: u64 = 200 * MILLI;

/// Returns when a hold was found lost, by a check or by its unlock.
fn loss(op: &Op) -> Option<u64> {
    let by_unlock = op
        .released
        .as_ref()
        .filter(|(_, result)| result.starts_with("Lost"))
        .map(|(time, _)| *time);
    op.lost.or(by_unlock)
}

/// Checks that a hold with renewals is lost only if something prevented its renewal.
pub(crate) fn without_a_reason(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in records.ops.iter().filter(|op| op.lease.is_none()) {
        let Some(time) = loss(op) else { continue };
        let client = records.client(op);
        let (place, ttl) = (Place::of(op, client), op.ttl(client));
        let foul = records
            .weather
            .is_foul(&place, time.saturating_sub(ttl + RECOVERY), time);
        let starved =
            records
                .weather
                .starved(&place, Event::Starved, time.saturating_sub(ttl), time);
        if !foul && starved < ttl / 3 && !records.weather.has_forgotten(op.kind, op.call, time) {
            found.push(Violation::of(
                "lost",
                op,
                time,
                "was renewed, and is lost without a reason",
            ));
        }
    }
    found
}

/// Checks that a hold is not lost while an earlier check said that it can be relied on. If the
/// server keeps its data, only a bug can end the hold.
pub(crate) fn before_the_deadline(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        let Some(time) = loss(op) else { continue };
        let forgot =
            records.mode == Mode::Plain && records.weather.has_forgotten(op.kind, op.call, time);
        if time + MILLI < op.deadline && !forgot {
            let left = (op.deadline - time) / MILLI;
            found.push(Violation::of(
                "lost",
                op,
                time,
                format_args!(
                    "is lost {left} ms before its time: {:?}, {:?}",
                    op.told, op.released
                ),
            ));
        }
    }
    found
}

/// Checks that a hold whose record a server lost is reported lost: by the next renewal, and in any
/// case at the end of the lease.
pub(crate) fn told_late(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    // the other servers may still hold a RedLock
    for op in records.ops.iter().filter(|op| op.kind != Kind::Red) {
        let Some((_, last)) = op.ok else { continue };
        let client = records.client(op);
        let nested = if op.parent.is_some() {
            LONGEST_LEASE.as_nanos() as u64
        } else {
            0
        };
        let extension = op.extension.map_or(0, |(_, lease)| lease);
        let ttl = client
            .watchdog
            .max(op.lease.unwrap_or(0))
            .max(nested)
            .max(extension);
        let asked_before = records
            .weather
            .forgot(op.kind)
            .filter(|fault| op.got().is_some_and(|got| got < fault.start));
        for fault in asked_before {
            let mut limit = fault.end + ttl + 5 * MILLI;
            let place = Place::of(op, client);
            let others = records
                .weather
                .faults(fault.start.saturating_sub(RECOVERY), last);
            let is_alone = others
                .filter(|other| *other != fault)
                .all(|other| !place.is_met_by(other));
            if fault.sort == "flushall"
                && is_alone
                && op.lease.is_none()
                && nested == 0
                && extension == 0
            {
                let starved = records
                    .weather
                    .starved(&place, Event::Starved, fault.start, last);
                limit = limit.min(
                    fault.end
                        + client.watchdog / 3
                        + client.command()
                        + 100 * MILLI
                        + slack(starved),
                );
            }
            if last > limit {
                let late = (last - limit) / MILLI;
                found.push(Violation::of(
                    "told late",
                    op,
                    last,
                    format_args!("{late} ms after its time, not lost: {}", fault.line),
                ));
            }
        }
    }
    found
}

/// Checks that `lost()` resolves soon after `is_lost()`.
pub(crate) fn told_apart(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        let Some(lost) = op.lost else { continue };
        let place = Place::of(op, records.client(op));
        let told = op.told.as_ref().map(|(time, _)| *time);
        let until = told.unwrap_or(lost + SECOND);
        let excuse = slack(records.weather.starved(&place, Event::Blocked, lost, until));
        // before the release, the task had waited 1 s for `lost()`
        let never = told.is_none() && op.release.is_some();
        if never || told.is_some_and(|told| told > lost + APART + excuse) {
            found.push(Violation::of(
                "told late",
                op,
                lost,
                format_args!("is_lost() said so, and lost() did not: {told:?}"),
            ));
        }
    }
    found
}
