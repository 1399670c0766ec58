//! The checker: reads the histories of a run, and finds the promises that were broken.

mod calls;
mod exclusion;
mod holds;
mod losses;
mod order;
mod records;
mod report;
#[cfg(test)]
mod tests;
mod weather;

use std::{fmt::Display, path::Path};

use self::records::{Op, Records};
pub(crate) use self::report::Report;

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) sort: &'static str,
    pub(crate) time: u64,
    pub(crate) text: String,
    /// The ids of the operations that it is about.
    pub(crate) words: Vec<String>,
}

impl Violation {
    fn of(sort: &'static str, op: &Op, time: u64, text: impl Display) -> Self {
        let text = format!("{} {} of {}: {text}", op.locks.join("+"), op.id, op.task);
        Self {
            sort,
            time,
            text,
            words: vec![op.id.clone()],
        }
    }

    pub(crate) fn of_the_run(time: u64, text: String) -> Self {
        Self {
            sort: "end",
            time,
            text,
            words: Vec::new(),
        }
    }
}

pub(crate) fn check(folder: &Path, mut violations: Vec<Violation>) -> Result<Report, String> {
    let records = Records::read(folder)?;
    violations.extend(verdict(&records));
    Ok(Report::new(folder, &records, violations))
}

/// Runs all checks. Returns the violations by time.
fn verdict(records: &Records) -> Vec<Violation> {
    let checks = [
        exclusion::overlaps,
        exclusion::tokens,
        exclusion::writes,
        holds::counts,
        holds::finality,
        holds::releases,
        losses::without_a_reason,
        losses::before_the_deadline,
        losses::told_late,
        losses::told_apart,
        calls::limits,
        calls::errors,
        calls::calm,
        calls::open,
        order::fair,
        order::woken,
    ];
    let mut found: Vec<Violation> = checks.iter().flat_map(|check| check(records)).collect();
    found.sort_by_key(|violation| violation.time);
    found
}
