//! The report: figures, and each violation with the lines around it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Display, Formatter},
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
};

use super::{calls, exclusion, op::Op, records::Records, violation::Violation};
use crate::{
    clock::{MILLI, SECOND, seconds},
    settings::Mode,
};

/// How many violations are shown with their lines.
const SHOWN: usize = 8;
/// How many lines are shown for each of them.
const LINES: usize = 80;
/// How many other operations are shown for each of them.
const OTHERS: usize = 12;

#[derive(Debug)]
pub(crate) struct Report {
    mode: Mode,
    acquires: usize,
    calls: usize,
    certain: usize,
    faults: BTreeMap<String, usize>,
    failed: usize,
    /// Successful acquires, by kind.
    kinds: BTreeMap<&'static str, usize>,
    worst: Option<(u64, String)>,
    pub(crate) violations: Vec<Violation>,
    /// For each violation that is shown, lines of the histories and of the journal.
    lines: Vec<Vec<String>>,
}

impl Report {
    pub(super) fn new(folder: &Path, records: &Records, violations: Vec<Violation>) -> Self {
        let mut report = Self {
            mode: records.mode,
            acquires: 0,
            calls: records.ops.len(),
            certain: exclusion::certain_holds(records),
            faults: BTreeMap::new(),
            failed: 0,
            kinds: BTreeMap::new(),
            worst: calls::worst_in_calm(records)
                .map(|(took, op)| (took, format!("{} {}", op.kind.name(), op.id))),
            lines: Vec::new(),
            violations,
        };
        for op in records.ops.iter().filter(|op| op.got().is_some()) {
            report.acquires += 1;
            *report.kinds.entry(op.kind.name()).or_default() += 1;
        }
        for fault in &records.weather.faults {
            if fault.effect == "failed" {
                report.failed += 1;
            } else {
                *report.faults.entry(fault.sort.clone()).or_default() += 1;
            }
        }
        for violation in report.violations.iter().take(SHOWN) {
            let mut lines = lines_of(folder, &concerned(records, violation));
            let near = records.weather.faults(
                violation.time.saturating_sub(3 * SECOND),
                violation.time + SECOND,
            );
            lines.extend(near.map(|fault| format!("faults  {}", fault.line)));
            report.lines.push(lines);
        }
        report
    }
}

/// Returns the operations that a violation is about, and others on the same locks within about 1 s.
fn concerned(records: &Records, violation: &Violation) -> BTreeSet<String> {
    let mut ids: BTreeSet<String> = violation.words.iter().cloned().collect();
    let locks: Vec<&String> = records
        .ops
        .iter()
        .filter(|op| ids.contains(&op.id))
        .flat_map(|op| &op.locks)
        .collect();
    let begins =
        |op: &&Op| op.call + SECOND > violation.time && op.call < violation.time + SECOND / 20;
    let ends = |op: &&Op| {
        op.released
            .as_ref()
            .or(op.release.as_ref())
            .is_some_and(|(time, _)| time.abs_diff(violation.time) < SECOND)
    };
    let near = records
        .ops
        .iter()
        .filter(|op| begins(op) || ends(op))
        .filter(|op| op.locks.iter().any(|lock| locks.contains(&lock)));
    ids.extend(near.take(OTHERS).map(|op| op.id.clone()));
    ids
}

/// Returns the lines of these operations by time. Of consecutive checks, it keeps the first and the
/// last.
fn lines_of(folder: &Path, ids: &BTreeSet<String>) -> Vec<String> {
    let processes: BTreeSet<&str> = ids
        .iter()
        .filter_map(|id| Some(id.split_once('#')?.0))
        .collect();
    let mut found: Vec<(u64, String)> = Vec::new();
    for process in processes {
        let Ok(file) = File::open(folder.join(format!("{process}.history"))) else {
            continue;
        };
        for line in BufReader::new(file).lines().map_while(Result::ok) {
            let mut words = line.split(' ');
            let time = words.next().and_then(|time| time.parse().ok()).unwrap_or(0);
            if words
                .nth(1)
                .is_some_and(|number| ids.contains(&format!("{process}#{number}")))
            {
                found.push((time, format!("{process}  {line}")));
            }
        }
    }
    found.sort();
    let is_look = |at: usize| {
        found
            .get(at)
            .is_some_and(|(_, line)| line.split(' ').nth(3) == Some("ok"))
    };
    let lines: Vec<String> = (0..found.len())
        .filter(|at| !is_look(*at) || *at == 0 || !is_look(at - 1) || !is_look(at + 1))
        .map(|at| found[at].1.clone())
        .collect();
    // the beginning and the end are the most useful parts
    let skipped = lines.len().saturating_sub(LINES);
    if skipped == 0 {
        return lines;
    }
    let (first, last) = (&lines[..LINES / 2], &lines[LINES / 2 + skipped..]);
    first
        .iter()
        .cloned()
        .chain([format!(".. {skipped} lines")])
        .chain(last.iter().cloned())
        .collect()
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let faults: usize = self.faults.values().sum();
        for (violation, lines) in self.violations.iter().zip(&self.lines) {
            writeln!(
                f,
                "VIOLATION {} at {:.6}: {}",
                violation.sort,
                seconds(violation.time),
                violation.text
            )?;
            lines
                .iter()
                .try_for_each(|line| writeln!(f, "    {line}"))?;
        }
        for violation in self.violations.iter().skip(SHOWN) {
            writeln!(
                f,
                "VIOLATION {} at {:.6}: {}",
                violation.sort,
                seconds(violation.time),
                violation.text
            )?;
        }
        let list = |counts: Vec<String>| counts.join(", ");
        let kinds = self
            .kinds
            .iter()
            .map(|(kind, count)| format!("{kind} {count}"))
            .collect();
        writeln!(
            f,
            "{}: {} acquires of {} calls ({})",
            self.mode.name(),
            self.acquires,
            self.calls,
            list(kinds)
        )?;
        writeln!(f, "{} certain holds in the overlap check", self.certain)?;
        let sorts = self
            .faults
            .iter()
            .map(|(sort, count)| format!("{sort} {count}"))
            .collect();
        writeln!(
            f,
            "{faults} faults of {} sorts ({}); {} could not be done",
            self.faults.len(),
            list(sorts),
            self.failed
        )?;
        if let Some((took, who)) = &self.worst {
            writeln!(f, "worst wait in calm: {} ms ({who})", took / MILLI)?;
        }
        write!(f, "{} violations", self.violations.len())
    }
}
