//! What is true of one hold: its count and its holder, that a loss is final, how its release ended.

use super::{
    Violation,
    records::{Op, Records},
    weather::{Fault, Place},
};
use crate::{clock::SECOND, kinds::Kind};

/// What the server answered while the hold was certain.
pub(crate) fn counts(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        for (time, what, said, wanted) in &op.questions {
            let certain =
                op.ok.is_some_and(|(_, last)| last > *time) && !records.weather.has_forgotten(op.kind, op.call, *time);
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

/// Somebody has been told: it does not come back.
pub(crate) fn finality(records: &Records) -> Vec<Violation> {
    let back = |op: &Op| Some(Violation::of("back again", op, op.back?, "was lost, and is not lost any more"));
    records.ops.iter().filter_map(back).collect()
}

/// Whether a server had forgotten this hold before its release, and nothing else was wrong: where an answer may have been
/// lost, the second one would find nothing either way. A `RedLock` may still be held by the others.
fn forgotten(records: &Records, op: &Op, begin: u64, end: u64) -> bool {
    let place = Place::of(op, records.client(op));
    let before = |fault: &&Fault| op.got().is_some_and(|got| got < fault.start) && fault.end < begin;
    op.kind != Kind::Red
        && records.weather.forgot(op.kind).any(|fault| {
            let others = records.weather.faults(begin.saturating_sub(2 * SECOND), end);
            before(&fault)
                && others
                    .filter(|other| other.sort != "flushall" && *other != fault)
                    .all(|other| !place.is_met_by(other))
        })
}

/// An unlock that said Ok was one of a hold, and one that said "not held" had none.
pub(crate) fn releases(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        let (Some((begin, _)), Some((end, result))) = (&op.release, &op.released) else { continue };
        match result.as_str() {
            "Ok" if op.lost.is_some_and(|lost| lost < *begin) => {
                found.push(Violation::of("unlock", op, *end, "it was lost, and its unlock said Ok"));
            }
            "Ok" if forgotten(records, op, *begin, *end) => {
                found.push(Violation::of("unlock", op, *end, "the server forgot it, and its unlock said Ok"));
            }
            // if the server forgot, it was lost
            "NotHeld" => {
                found.push(Violation::of("unlock", op, *end, "nobody released it, and its unlock said NotHeld"));
            }
            _ => {}
        }
    }
    found
}
