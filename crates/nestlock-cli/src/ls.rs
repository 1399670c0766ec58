//! `ls`: which locks are held, once or for ever.

use std::{collections::BTreeMap, time::Duration};

use serde_json::json;
use tokio::time::{Instant, interval, sleep};

use crate::{
    Failure,
    args::{Find, Ls, Server},
    locks::{self, Findings, Found, Wanted},
    raw::Raw,
    say, warn,
};

/// How often new locks are looked for, as that goes through all keys.
pub(crate) const DISCOVER: Duration = Duration::from_secs(10);
/// How often those that are known are asked for.
const REFRESH: Duration = Duration::from_secs(1);

/// What to look for; refused where it would cost the server too much.
pub(crate) async fn wanted(raw: &Raw, server: &Server, find: &Find) -> Result<Wanted, Failure> {
    let (prefix, pattern, strings) = (server.prefix.clone(), find.pattern.clone(), find.strings);
    let mut most_keys = None;
    if pattern.is_none() && prefix.is_empty() {
        match raw.ask(&["DBSIZE"]).await.ok().and_then(|keys| keys.as_u64()) {
            Some(keys) if keys > find.max_keys => {
                return Err(locks::too_many(&format!("{keys} keys"), find.max_keys).into());
            }
            Some(_) => {}
            // they are counted while they are looked through
            None => most_keys = Some(find.max_keys),
        }
    }
    Ok(Wanted { prefix, pattern, most_keys, strings })
}

async fn look(raw: &Raw, wanted: &Wanted) -> Result<Findings, Failure> {
    let candidates = locks::discover(raw, wanted).await?;
    locks::read(raw, wanted, &candidates).await
}

pub(crate) async fn ls(server: &Server, ls: &Ls) -> Result<u8, Failure> {
    let raw = Raw::connect(server).await?;
    let wanted = wanted(&raw, server, &ls.find).await?;
    if ls.watch || ls.stat {
        return watch(&raw, &wanted, ls).await;
    }
    let Findings { found, denied } = look(&raw, &wanted).await?;
    let mut found: Vec<&Found> = found.values().collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    if ls.json {
        for found in found {
            say(found.json());
        }
    } else if !found.is_empty() {
        table(&found);
    }
    for what in denied {
        warn(format_args!("this user may not ask everything (+{what}); what is not known is `-`"));
    }
    Ok(0)
}

/// Columns as wide as they need to be.
fn table(found: &[&Found]) {
    let mut rows = vec![["NAME", "KIND", "HOLDER", "HOLDS", "TTL", "WAITING", "TOKEN"].map(str::to_owned)];
    rows.extend(found.iter().map(|found| {
        [
            printable(&found.name),
            found.record.name().to_owned(),
            printable(&found.holder()),
            found.holds().to_string(),
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
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        say(cells.join("  ").trim_end());
    }
}

/// A name may have anything in it, which must not move the cursor.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{FFFD}' } else { letter }).collect()
}

async fn watch(raw: &Raw, wanted: &Wanted, ls: &Ls) -> Result<u8, Failure> {
    let (mut candidates, mut known, mut discovered) = (locks::discover(raw, wanted).await?, None, Instant::now());
    let mut ticks = interval(REFRESH);
    loop {
        ticks.tick().await;
        if discovered.elapsed() >= DISCOVER {
            (candidates, discovered) = (locks::discover(raw, wanted).await?, Instant::now());
        }
        let now = locks::read(raw, wanted, &candidates).await?.found;
        let changes = known.as_ref().map(|before| changes(before, &now));
        if ls.stat {
            stat(&now, changes.map_or(0, |changes| changes.len()), ls.json);
        } else {
            match changes {
                None => now.values().for_each(|found| tell('=', found, ls.json)),
                Some(changes) => changes.into_iter().for_each(|(what, found)| tell(what, found, ls.json)),
            }
        }
        known = Some(now);
        // a server that was slow is not asked at once again
        sleep(Duration::from_millis(50)).await;
    }
}

/// What has changed: `+` held now, `-` free now, `~` somebody else's or held another number of times.
fn changes<'f>(before: &'f BTreeMap<String, Found>, now: &'f BTreeMap<String, Found>) -> Vec<(char, &'f Found)> {
    let gone = before.iter().filter(|(name, _)| !now.contains_key(*name)).map(|(_, found)| ('-', found));
    let other = now.iter().filter_map(|(name, found)| match before.get(name) {
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
    say(format_args!("{what} {name} {} {holder} {} {}", found.record.name(), found.holds(), found.ttl_text()));
}

fn stat(now: &BTreeMap<String, Found>, changes: usize, as_json: bool) {
    let waiting: u64 = now.values().filter_map(|found| found.waiting).map(locks::Waiting::count).sum();
    let unknown = now.values().filter(|found| found.waiting.is_none()).count();
    if as_json {
        return say(
            json!({ "v": 1, "held": now.len(), "waiting": waiting, "waiting_unknown": unknown, "changes": changes }),
        );
    }
    say(format_args!("{} held, {waiting} waiting ({unknown} unknown), {changes} changes", now.len()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::Record;

    fn held(name: &str, owner: &str) -> (String, Found) {
        let holders = vec![(owner.to_owned(), 1)];
        let found =
            Found { name: name.to_owned(), record: Record::Reentrant, holders, ttl: None, waiting: None, token: None };
        (name.to_owned(), found)
    }

    #[test]
    fn a_change_is_told_once() {
        let before = BTreeMap::from([held("a", "1"), held("b", "1"), held("c", "1")]);
        let now = BTreeMap::from([held("b", "2"), held("c", "1"), held("d", "1")]);
        let told: Vec<_> = changes(&before, &now).into_iter().map(|(what, found)| (what, &*found.name)).collect();
        assert_eq!(told, [('-', "a"), ('~', "b"), ('+', "d")]);
    }

    #[test]
    fn a_name_moves_no_cursor() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\u{FFFD}[2Jb\u{FFFD}");
    }
}
