//! Checks calls: they end in time, and fail only if there is a fault.

use std::collections::BTreeMap;

use super::{
    op::{Op, Outcome},
    records::Records,
    violation::Violation,
    weather::{Event, Place, RECOVERY, slack},
};
use crate::{
    clock::{MILLI, SECOND},
    kinds::{Kind, ROUND},
};

/// By how much a wait may exceed its limit, as documented, apart from a round trip.
const MORE: u64 = 40 * MILLI;
/// A round trip on this machine, with the delays by the scheduler between two heartbeats.
const TRIP: u64 = 25 * MILLI;
/// A round trip during a fault, if the client knew of none that was longer: delays are 130 ms at
/// most.
const FOUL_TRIP: u64 = 350 * MILLI;

/// Checks that waits with a limit keep it.
pub(crate) fn limits(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in records
        .ops
        .iter()
        .filter(|op| op.way == "bounded" || op.way == "try")
    {
        let (Some((end, _)), Some(limit)) = (&op.end, op.limit) else {
            continue;
        };
        let (client, took) = (records.client(op), end - op.call);
        let place = Place::of(op, client);
        let foul = records
            .weather
            .is_foul(&place, op.call.saturating_sub(RECOVERY), *end);
        // the client measured a pause as a longer round trip, and allows a quarter more
        let before = records.weather.starved(
            &place,
            Event::Blocked,
            op.call.saturating_sub(SECOND),
            op.call,
        );
        let trip = if foul {
            // what an earlier request left in doubt is settled first: 80 ms and a round trip more
            FOUL_TRIP.max(2 * (MORE + op.trip))
        } else {
            TRIP.max(before + before / 4)
        };
        let allowed = match op.kind {
            // a multi-lock waits for one member, requests the others, and releases what it acquired
            Kind::Multi => {
                limit.max(if op.way == "try" { client.command() } else { 0 }) + 3 * (MORE + trip)
            }
            // a round may begin at the limit, and what a minority granted is released
            Kind::Red => limit + 2 * client.watchdog * u64::from(ROUND) / 100 + MORE + trip,
            _ if op.way == "try" => client.command() + MORE + trip,
            _ => limit + MORE + trip,
        };
        let excuse = slack(
            records
                .weather
                .starved(&place, Event::Blocked, op.call, *end),
        );
        if took > allowed + excuse {
            // rust 1.88 keeps no temporary of `format_args!` beyond its statement
            let text = format!(
                "waited {} ms, {} allowed, {} for starvation",
                took / MILLI,
                allowed / MILLI,
                excuse / MILLI
            );
            found.push(Violation::of("late", op, *end, text));
        }
    }
    found
}

/// Returns `true` if a fault may cause this error. Any other error is a violation.
fn is_excusable(error: &str) -> bool {
    ["Lost/", "Store/", "Unconfirmed/", "NoQuorum"]
        .iter()
        .any(|name| error.starts_with(name))
}

/// Returns `true` if something did not run for more than 20 ms, so that a call may have failed.
fn is_busy(records: &Records, place: &Place, begin: u64, end: u64) -> bool {
    records
        .weather
        .starved(place, Event::Blocked, begin.saturating_sub(SECOND), end)
        > 20 * MILLI
}

/// Checks that no call fails without a fault.
pub(crate) fn errors(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in &records.ops {
        let acquire = match &op.end {
            Some((time, Outcome::Failed(error))) => Some((op.call, *time, error)),
            _ => None,
        };
        let begin = op.release.as_ref().map_or(0, |(time, _)| *time);
        let release = op
            .released
            .as_ref()
            .filter(|(_, result)| result != "Ok")
            .map(|(time, error)| (begin, *time, error));
        let extensions = op.extended.iter().filter(|(_, result)| result != "Ok");
        let extensions = extensions
            .map(|(time, error)| (op.extension.map_or(0, |(begin, _)| begin), *time, error));
        let place = Place::of(op, records.client(op));
        for (begin, end, error) in acquire.into_iter().chain(release).chain(extensions) {
            let foul = records
                .weather
                .is_foul(&place, begin.saturating_sub(RECOVERY), end);
            let in_a_lost_one = || {
                let parent = op.parent.map(|parent| &records.ops[parent]);
                let is_over =
                    parent.is_some_and(|parent| parent.ok.is_none_or(|(_, last)| last < end));
                // the lease ended before the reply arrived, or before the release
                let is_late = op
                    .lease
                    .is_some_and(|lease| end - op.call + 3 * MILLI + lease / 100 >= lease);
                error.starts_with("Lost/")
                    && (is_over || is_late || op.lost.is_some_and(|lost| lost <= end))
            };
            let excused = is_excusable(error) && (foul || is_busy(records, &place, begin, end))
                || in_a_lost_one();
            if !excused {
                found.push(Violation::of(
                    "error",
                    op,
                    end,
                    format_args!("{error} without a fault"),
                ));
            }
            let parent = op.parent.map(|parent| &records.ops[parent]);
            if error.starts_with("Lost/")
                && Some(end) == op.end.as_ref().map(|(time, _)| *time)
                && parent.is_some_and(|parent| {
                    parent.class == op.class && parent.ok.is_some_and(|(_, last)| last > end)
                })
            {
                found.push(Violation::of(
                    "error",
                    op,
                    end,
                    format_args!("{error}, while the outer hold is not lost"),
                ));
            }
        }
    }
    found
}

/// Checks that in calm each lock is acquired within its limit. On a busy machine a call may fail,
/// and is repeated.
pub(crate) fn calm(records: &Records) -> Vec<Violation> {
    let mut found = Vec::new();
    for op in records.ops.iter().filter(|op| op.way == "calm") {
        let Some((end, outcome)) = &op.end else {
            continue;
        };
        let place = Place::of(op, records.client(op));
        let starved = records
            .weather
            .starved(&place, Event::Blocked, op.call, *end);
        let is_well = match outcome {
            Outcome::Got => true,
            Outcome::None | Outcome::Gone => false,
            Outcome::Failed(error) => {
                let is_had = |later: &Op| {
                    let is_same =
                        (&later.task, &later.locks, later.class) == (&op.task, &op.locks, op.class);
                    later.way == "calm" && is_same && later.got().is_some_and(|got| got > *end)
                };
                is_excusable(error)
                    && is_busy(records, &place, op.call, *end)
                    && records.ops.iter().any(is_had)
            }
        };
        if !is_well && starved < SECOND {
            found.push(Violation::of(
                "calm",
                op,
                *end,
                format_args!("{outcome:?} after {} ms", (end - op.call) / MILLI),
            ));
        }
        let Some((time, result)) = op.released.as_ref().filter(|(_, result)| result != "Ok") else {
            continue;
        };
        if !is_excusable(result) || !is_busy(records, &place, *end, *time) {
            found.push(Violation::of(
                "calm",
                op,
                *time,
                format_args!("its unlock returned {result}"),
            ));
        }
    }
    found
}

/// Returns the longest successful acquire in calm.
pub(crate) fn worst_in_calm(records: &Records) -> Option<(u64, &Op)> {
    let calm = records.ops.iter().filter(|op| op.way == "calm");
    calm.filter_map(|op| Some((op.got()? - op.call, op)))
        .max_by_key(|(took, _)| *took)
}

/// Checks that all calls of processes that were not killed have returned.
pub(crate) fn open(records: &Records) -> Vec<Violation> {
    let mut last = BTreeMap::<&str, usize>::new();
    for client in records.clients.keys() {
        let (slot, generation) = split(client);
        let known = last.entry(slot).or_default();
        *known = (*known).max(generation);
    }
    let is_last = |op: &Op| {
        let (slot, generation) = split(op.client());
        last.get(slot) == Some(&generation)
    };
    let mut found = Vec::new();
    for op in records.ops.iter().filter(|op| is_last(op)) {
        if op.end.is_none() {
            found.push(Violation::of(
                "open",
                op,
                op.call,
                format_args!("a {} acquire never returned", op.way),
            ));
        } else if op.release.as_ref().is_some_and(|(_, how)| how == "unlock")
            && op.released.is_none()
        {
            found.push(Violation::of(
                "open",
                op,
                op.call,
                "its unlock never returned",
            ));
        }
    }
    found
}

/// Returns the slot and the generation of a client such as `s1g2c0`.
fn split(client: &str) -> (&str, usize) {
    let (slot, rest) = client.split_once('g').unwrap_or((client, ""));
    (
        slot,
        rest.split('c')
            .next()
            .and_then(|generation| generation.parse().ok())
            .unwrap_or(0),
    )
}
