//! `ls`: lists the locks that are held, once or continuously.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use serde_json::json;
use tokio::time::{Instant, interval, sleep};

use crate::{
    args::{Find, Ls, Server},
    failure::Failure,
    locks::{Found, Waiting},
    node::is_not_now,
    raw::{Away, Raw},
    search::{self, Candidate, Findings, Wanted, told},
    stderr::warn,
    stdout::say,
};

/// How often new locks are discovered, which scans all keys.
pub(crate) const DISCOVER: Duration = Duration::from_secs(10);
/// Exit code: a server did not reply, and its locks are missing.
const MISSING: u8 = 1;
/// How often the known locks are read.
const REFRESH: Duration = Duration::from_secs(1);

/// Returns what to search for, with the notes of this many holders of each lock. Fails if the search would
/// cost the servers too much.
pub(crate) async fn wanted(
    raw: &Raw<'_>,
    server: &Server,
    find: &Find,
    notes: usize,
) -> Result<Wanted, Failure> {
    let (prefix, pattern, strings) = (server.prefix.clone(), find.pattern.clone(), find.strings);
    let mut most_keys = None;
    if pattern.is_none() && prefix.is_empty() {
        let counts = raw.ask_each(&raw.masters(), &["DBSIZE"]).await;
        // a server that does not reply is not scanned, either
        let counts = counts
            .into_iter()
            .filter(|count| !count.as_ref().is_err_and(is_not_now));
        let counts: Option<Vec<u64>> = counts.map(|count| count.ok()?.as_u64()).collect();
        match counts.map(|counts| counts.into_iter().sum::<u64>()) {
            Some(keys) if keys > find.max_keys => {
                return Err(search::too_many(&format!("{keys} keys"), find.max_keys).into());
            }
            Some(_) => {}
            // without a count, the scan itself counts the keys
            None => most_keys = Some(find.max_keys),
        }
    }
    Ok(Wanted {
        prefix,
        pattern,
        most_keys,
        strings,
        by_name: false,
        notes,
    })
}

pub(crate) async fn ls(server: &Server, ls: &Ls) -> Result<u8, Failure> {
    let raw = Raw::connect(server).await?;
    // the table has none
    let notes = if ls.json { usize::MAX } else { 0 };
    let wanted = wanted(&raw, server, &ls.find, notes).await?;
    if ls.watch || ls.stat {
        return watch(&raw, &wanted, ls).await;
    }
    let (candidates, mut away) = search::discover(&raw, &wanted, &BTreeSet::new()).await?;
    let findings = search::read(&raw, &wanted, &candidates).await;
    away.extend(findings.away);
    if raw.is_dark(&away) {
        return Err(told(&away).into());
    }
    let mut found: Vec<&Found> = findings.found.values().collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    if ls.json {
        for found in found {
            say(found.json());
        }
    } else if !found.is_empty() {
        table(&found);
    }
    for what in findings.denied {
        warn(format_args!(
            "this user may not read everything (+{what}); what is not known is `-`"
        ));
    }
    if let Some(unheard) = findings.unheard {
        warn(unheard);
    }
    if away.is_empty() {
        return Ok(0);
    }
    warn(format_args!(
        "{}; the locks there are missing from this list",
        told(&away)
    ));
    Ok(MISSING)
}

/// Prints a table with columns as wide as their content.
fn table(found: &[&Found]) {
    let mut rows =
        vec![["NAME", "KIND", "HOLDER", "HOLDS", "TTL", "WAITING", "TOKEN"].map(str::to_owned)];
    rows.extend(found.iter().map(|found| {
        [
            printable(&found.name),
            found.kind_text(),
            printable(&found.holder()),
            found.holds_text(),
            found.ttl_text(),
            found.waiting_text(),
            found.token_text(),
        ]
    }));
    let mut widths = [0; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &rows {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        say(cells.join("  ").trim_end());
    }
}

/// Replaces control characters: a name may contain any, and must not move the cursor.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|letter| {
            if letter.is_control() {
                '\u{FFFD}'
            } else {
                letter
            }
        })
        .collect()
}

/// What was discovered, and the servers that were away last.
struct Watched {
    candidates: BTreeSet<Candidate>,
    discovered: Option<Instant>,
    away: Away,
}

impl Watched {
    /// Reads the known locks, and discovers new ones if that is due. A change of the servers that
    /// are away is reported once; the caller keeps the locks of those servers as they were.
    async fn look(&mut self, raw: &Raw<'_>, wanted: &Wanted) -> Result<Findings, Failure> {
        let mut away = Away::new();
        if self.discovered.is_none_or(|at| at.elapsed() >= DISCOVER) {
            (self.candidates, away) = search::discover(raw, wanted, &self.candidates).await?;
            // a server that was away is scanned as soon as it is back
            self.discovered = away.is_empty().then(Instant::now);
        }
        let findings = search::read(raw, wanted, &self.candidates).await;
        away.extend(findings.away.clone());
        if !away.keys().eq(self.away.keys()) {
            if away.is_empty() {
                warn("all servers reply");
            } else {
                warn(format_args!(
                    "{}; the locks there are taken to be unchanged",
                    told(&away)
                ));
            }
        }
        self.away = away;
        Ok(findings)
    }
}

async fn watch(raw: &Raw<'_>, wanted: &Wanted, ls: &Ls) -> Result<u8, Failure> {
    let mut watched = Watched {
        candidates: BTreeSet::new(),
        discovered: None,
        away: Away::new(),
    };
    let mut known: Option<BTreeMap<String, Found>> = None;
    let mut ticks = interval(REFRESH);
    loop {
        ticks.tick().await;
        let mut findings = watched.look(raw, wanted).await?;
        findings.keep(|key| known.as_ref()?.get(key));
        let now = findings.found;
        let changes = known.as_ref().map(|before| changes(before, &now));
        if ls.stat {
            stat(&now, changes.map_or(0, |changes| changes.len()), ls.json);
        } else {
            match changes {
                None => now.values().for_each(|found| tell('=', found, ls.json)),
                Some(changes) => changes
                    .into_iter()
                    .for_each(|(what, found)| tell(what, found, ls.json)),
            }
        }
        known = Some(now);
        // a slow server must not be polled again at once
        sleep(Duration::from_millis(50)).await;
    }
}

/// Returns the changes: `+` held now, `-` free now, `~` held by other owners, or with another hold
/// count.
fn changes<'f>(
    before: &'f BTreeMap<String, Found>,
    now: &'f BTreeMap<String, Found>,
) -> Vec<(char, &'f Found)> {
    let gone = before
        .iter()
        .filter(|(name, _)| !now.contains_key(*name))
        .map(|(_, found)| ('-', found));
    let other = now
        .iter()
        .filter_map(|(name, found)| match before.get(name) {
            None => Some(('+', found)),
            Some(known) if known.holders != found.holders => Some(('~', found)),
            Some(_) => None,
        });
    gone.chain(other).collect()
}

fn tell(what: char, found: &Found, as_json: bool) {
    if as_json {
        let mut line = found.json();
        line["change"] = match what {
            '+' => "held",
            '-' => "free",
            '~' => "changed",
            _ => "was_held",
        }
        .into();
        return say(line);
    }
    let (name, holder) = (printable(&found.name), printable(&found.holder()));
    say(format_args!(
        "{what} {name} {} {holder} {} {}",
        found.kind_text(),
        found.holds_text(),
        found.ttl_text()
    ));
}

fn stat(now: &BTreeMap<String, Found>, changes: usize, as_json: bool) {
    let waiting: u64 = now
        .values()
        .filter_map(|found| found.waiting)
        .map(Waiting::count)
        .sum();
    let unknown = now.values().filter(|found| found.waiting.is_none()).count();
    if as_json {
        return say(
            json!({ "v": 1, "held": now.len(), "waiting": waiting, "waiting_unknown": unknown, "changes": changes }),
        );
    }
    say(format_args!(
        "{} held, {waiting} waiting ({unknown} unknown), {changes} changes",
        now.len()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::Record;

    fn held(name: &str, owner: &str) -> (String, Found) {
        let holders = vec![(owner.to_owned(), 1)];
        let found = Found {
            name: name.to_owned(),
            record: Record::Reentrant,
            holders,
            ttl: None,
            waiting: None,
            last_token: None,
            permits: None,
            notes: Vec::new(),
        };
        (name.to_owned(), found)
    }

    #[test]
    fn a_change_is_reported_once() {
        let before = BTreeMap::from([held("a", "1"), held("b", "1"), held("c", "1")]);
        let now = BTreeMap::from([held("b", "2"), held("c", "1"), held("d", "1")]);
        let told: Vec<_> = changes(&before, &now)
            .into_iter()
            .map(|(what, found)| (what, &*found.name))
            .collect();
        assert_eq!(told, [('-', "a"), ('~', "b"), ('+', "d")]);
    }

    #[test]
    fn a_name_moves_no_cursor() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{FFFD}[2Jb\u{FFFD}");
    }
}
