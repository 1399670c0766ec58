//! The checker: reads the histories of a run, and finds the promises that were broken.

mod calls;
mod exclusion;
mod holds;
mod losses;
mod op;
mod order;
mod records;
mod report;
#[cfg(test)]
mod tests;
mod violation;
mod weather;

use std::path::Path;

use self::records::Records;
pub(crate) use self::{report::Report, violation::Violation};

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
