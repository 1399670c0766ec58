//! Checks each hold: its count and its holder, that a loss is final, and how its release ended.

use super::{
    op::Op,
    records::Records,
    violation::Violation,
    weather::{PastFault, Place},
};
use crate::{clock::SECOND, kinds::Kind};

/// Checks what the server replied while the hold was certain.
pub(crate) fn counts(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        for (time, what, said, wanted) in &op.questions {
            let certain = op.ok.is_some_and(|(_, last)| last > *time)
                && !records.weather.has_forgotten(op.kind, op.call, *time);
            if said != wanted && certain {
                found.push(Violation::of(
                    if *what == "count" { "count" } else { "holder" },
                    op,
                    *time,
                    format_args!("{what} is {said}, not {wanted}"),
                ));
            }
        }
    }
    found
}

/// Checks that a hold that was reported lost does not come back.
pub(crate) fn finality(records: &Records) -> Vec<Violation> {
    let back = |op: &Op| {
        Some(Violation::of(
            "back again",
            op,
            op.back?,
            "was lost, and is not lost any more",
        ))
    };
    records.ops.iter().filter_map(back).collect()
}

/// Returns `true` if a server had lost this hold before its release, and no other fault was near:
/// if a reply may have been lost, a retry would find no hold either way. A RedLock does not count,
/// as the other servers may still hold it.
fn forgotten(records: &Records, op: &Op, begin: u64, end: u64) -> bool {
    let place = Place::of(op, records.client(op));
    let before =
        |fault: &&PastFault| op.got().is_some_and(|got| got < fault.start) && fault.end < begin;
    op.kind != Kind::Red
        && records.weather.forgot(op.kind).any(|fault| {
            let others = records
                .weather
                .faults(begin.saturating_sub(2 * SECOND), end);
            before(&fault)
                && others
                    .filter(|other| other.sort != "flushall" && *other != fault)
                    .all(|other| !place.is_met_by(other))
        })
}

/// Checks that no unlock of a lost hold returned Ok, and that none returned `NotHeld`.
pub(crate) fn releases(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        let (Some((begin, _)), Some((end, result))) = (&op.release, &op.released) else {
            continue;
        };
        match result.as_str() {
            "Ok" if op.lost.is_some_and(|lost| lost < *begin) => {
                found.push(Violation::of(
                    "unlock",
                    op,
                    *end,
                    "it was lost, and its unlock said Ok",
                ));
            }
            "Ok" if forgotten(records, op, *begin, *end) => {
                found.push(Violation::of(
                    "unlock",
                    op,
                    *end,
                    "the server forgot it, and its unlock said Ok",
                ));
            }
            // a record that the server lost is reported as a loss
            "NotHeld" => {
                found.push(Violation::of(
                    "unlock",
                    op,
                    *end,
                    "its unlock returned NotHeld, but no other task released it",
                ));
            }
            _ => {}
        }
    }
    found
}
