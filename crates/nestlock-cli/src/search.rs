//! Searches all servers for locks, and reads the records.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use fred::{error::Error, types::Value};
use futures_util::future::join_all;
use tokio::time::sleep;

use crate::{
    failure::{Failure, Unusable},
    kind::Kind,
    locks::{Found, OF_SEMAPHORE, Record, derived, leases, name_of_leases},
    node::{Answer, Node, Words, is_denied, is_not_now, is_of_another_type, list, text, words},
    raw::{Away, Raw, SERVICE, Unheard},
};

/// Prefixes of the keys that locks keep in addition to their records.
const OTHERS: [&str; 3] = ["redisson_", "nestlock_", "lock-signal:"];
const SIGNAL: &str = "lock:";
/// The channel of permits and semaphores.
const OF_PERMITS: &str = "redisson_sc";
/// Keys that one SCAN visits.
const PAGE: u64 = 1_000;
/// Pause between two calls of SCAN, for other clients whose requests have queued up. A page takes
/// the server no longer than that, so a scan uses at most half of its time.
const PAUSE: Duration = Duration::from_millis(1);
/// The prefix of the keys of holders' notes.
const NOTE: &str = "nestlock_note";
/// A hash with more fields is other data, and is not read.
const MOST_HOLDERS: i64 = 100_000;

/// Which locks to search for.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) prefix: String,
    /// A pattern in the server's syntax, without the prefix.
    pub(crate) pattern: Option<String>,
    /// How many keys may be scanned. `None`: any number.
    pub(crate) most_keys: Option<u64>,
    /// Plain strings with a TTL count as locks.
    pub(crate) strings: bool,
    /// A single lock is read by its name: its record may lack a TTL, and waiters are not counted.
    pub(crate) by_name: bool,
    /// Of how many holders of a lock the notes are read.
    pub(crate) notes: usize,
}

/// The key of what may be a lock's record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Candidate {
    Hash(String),
    Signal(String),
    String(String),
    /// The leases of permits, or of a semaphore.
    Permits(String),
}

/// The locks that were found, and what this user may not read.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// By the keys of their records: two locks of different kinds may have one name.
    pub(crate) found: BTreeMap<String, Found>,
    pub(crate) denied: BTreeSet<&'static str>,
    /// Records that their servers could not serve now.
    pub(crate) unread: BTreeSet<String>,
    /// Keys of which this user may not read everything.
    pub(crate) hidden: BTreeSet<String>,
    /// Keys that hold something other than a lock's record.
    pub(crate) others: BTreeSet<String>,
    pub(crate) away: Away,
    /// Why the waiters are unknown, unless `away` already gives the reason.
    pub(crate) unheard: Option<String>,
}

impl Findings {
    /// Keeps the previous state of records that could not be read now: these locks are not free.
    pub(crate) fn keep<'f>(&mut self, before: impl Fn(&str) -> Option<&'f Found>) {
        let kept = self
            .unread
            .iter()
            .filter_map(|key| Some((key.clone(), before(key)?.clone())));
        self.found.extend(kept);
    }
}

/// Formats which servers are away, and why.
pub(crate) fn told(away: &Away) -> String {
    let all: Vec<String> = away
        .iter()
        .map(|(address, why)| format!("{address}: {why}"))
        .collect();
    all.join("; ")
}

/// Escapes the characters of a prefix that have a meaning in a pattern.
fn quoted(text: &str) -> String {
    text.chars()
        .flat_map(|letter| {
            "*?[]\\^"
                .contains(letter)
                .then_some('\\')
                .into_iter()
                .chain([letter])
        })
        .collect()
}

/// Scans all keys of all servers for what may be a lock. A key that stays is found; a key that is
/// created or deleted during the scan may be. If a server is away, the known candidates are kept.
pub(crate) async fn discover(
    raw: &Raw<'_>,
    wanted: &Wanted,
    known: &BTreeSet<Candidate>,
) -> Result<(BTreeSet<Candidate>, Away), Failure> {
    let searches = searches(wanted);
    let (mut all, mut away) = (BTreeSet::new(), Away::new());
    let (mut masters, mut looked_through) = (raw.masters(), BTreeSet::new());
    while !masters.is_empty() {
        for search in &searches {
            let looked = Cell::new(0);
            let scans = masters
                .iter()
                .map(|node| scan(node, wanted, &search.pattern, search.keys, &looked));
            for (node, keys) in masters.iter().zip(join_all(scans).await) {
                let keys = match keys? {
                    Ok(keys) => keys,
                    Err(error) => {
                        away.insert(node.address.clone(), error.details().to_owned());
                        continue;
                    }
                };
                all.extend(keys.into_iter().filter_map(search.candidate));
            }
        }
        looked_through.extend(masters.iter().map(|node| node.address.clone()));
        // another server may have taken over during the scan
        away.extend(raw.away());
        away.remove(SERVICE);
        masters = raw.masters();
        away.retain(|address, _| masters.iter().any(|node| node.address == *address));
        masters.retain(|node| !looked_through.contains(&node.address));
    }
    away.extend(raw.away());
    if !away.is_empty() {
        all.extend(known.iter().cloned());
    }
    Ok((all, away))
}

/// A scan of all keys.
struct Search {
    pattern: String,
    /// The type of the keys.
    keys: &'static str,
    candidate: fn(String) -> Option<Candidate>,
}

fn searches(wanted: &Wanted) -> Vec<Search> {
    let names = wanted.pattern.as_deref().unwrap_or("*");
    let names = format!("{}{names}", quoted(&wanted.prefix));
    let mut searches = vec![
        Search {
            pattern: names.clone(),
            keys: "hash",
            candidate: |key| (!is_other(&key)).then_some(Candidate::Hash(key)),
        },
        Search {
            pattern: format!("{SIGNAL}{names}"),
            keys: "string",
            candidate: |key| Some(Candidate::Signal(key)),
        },
    ];
    // names with a hash tag of their own, and all others
    for pattern in [
        format!("{names}:timeout"),
        format!("{{{names}}}:timeout"),
        format!("{OF_SEMAPHORE}:{names}"),
        format!("{OF_SEMAPHORE}:{{{names}}}"),
    ] {
        searches.push(Search {
            pattern,
            keys: "zset",
            candidate: |key| {
                name_of_leases(&key)
                    .is_some()
                    .then_some(Candidate::Permits(key))
            },
        });
    }
    if wanted.strings {
        searches.push(Search {
            pattern: names,
            keys: "string",
            candidate: |key| {
                let is_lock = !is_other(&key) && !key.starts_with(SIGNAL);
                is_lock.then_some(Candidate::String(key))
            },
        });
    }
    searches
}

fn is_other(key: &str) -> bool {
    OTHERS.iter().any(|other| key.starts_with(other)) || key.contains(":rwlock_timeout:")
}

/// Returns the error for a scan of too many keys, which the user has to request explicitly.
pub(crate) fn too_many(there: &str, most: u64) -> Unusable {
    Unusable(format!(
        "there are {there}, more than {most}, and all would be scanned; give a PATTERN, a --prefix or a higher --max-keys"
    ))
}

/// Reads the lock with this name, without a scan. Returns `None` if there is none, as far as this
/// user may see.
pub(crate) async fn named(
    raw: &Raw<'_>,
    prefix: &str,
    name: &str,
    kind: Option<Kind>,
) -> Result<Option<Found>, Failure> {
    let key = format!("{prefix}{name}");
    let (hash, signal) = (
        Candidate::Hash(key.clone()),
        Candidate::Signal(format!("{SIGNAL}{key}")),
    );
    let [permits, semaphore] = Candidate::counted(&key);
    let candidates = match kind {
        None => BTreeSet::from([hash, signal, permits, semaphore]),
        Some(Kind::Signal) => BTreeSet::from([signal]),
        Some(Kind::Permits) => BTreeSet::from([permits]),
        Some(Kind::Semaphore) => BTreeSet::from([semaphore]),
        Some(Kind::String) => BTreeSet::from([Candidate::String(key.clone())]),
        Some(_) => BTreeSet::from([hash]),
    };
    let wanted = Wanted {
        prefix: prefix.to_owned(),
        pattern: None,
        most_keys: None,
        strings: true,
        by_name: true,
        notes: usize::MAX,
    };
    let Findings {
        found,
        denied,
        unread,
        hidden,
        others,
        away,
        ..
    } = read(raw, &wanted, &candidates).await;
    if !unread.is_empty() {
        return Err(told(&away).into());
    }
    let mut found = found.into_values();
    match (found.next(), found.next()) {
        (Some(one), Some(other)) => Err(Unusable(format!(
            "two locks have the name {name:?}: one is {}, one is {}; select one with --kind",
            one.record.name(),
            other.record.name()
        ))
        .into()),
        (Some(one), None) => match kind {
            Some(kind) if !kind.has(one.record) => Err(format!(
                "{name:?} is held as another kind of lock: {}",
                one.record.name()
            )
            .into()),
            _ => Ok(Some(one)),
        },
        _ if candidates
            .iter()
            .any(|candidate| others.contains(candidate.key())) =>
        {
            Err(format!(
                "the key {key:?} does not belong to a lock, or to one whose --kind has to be given"
            )
            .into())
        }
        // signal locks and permits have separate keys: a user without access to these, who does not
        // ask for that kind, sees no such lock
        _ if candidates.iter().any(|candidate| {
            (kind.is_some() || candidate.key() == key) && hidden.contains(candidate.key())
        }) =>
        {
            let denied: Vec<&str> = denied.into_iter().collect();
            Err(format!(
                "this user may not read the holder of {name:?}; grant it +{}",
                denied.join(" +")
            )
            .into())
        }
        _ => Ok(None),
    }
}

/// Scans the keys of one server. The inner error says why the server cannot serve the scan now.
async fn scan(
    node: &Node,
    wanted: &Wanted,
    pattern: &str,
    kind: &str,
    looked: &Cell<u64>,
) -> Result<Result<Vec<String>, Error>, Failure> {
    let (mut cursor, mut keys) = ("0".to_owned(), Vec::new());
    loop {
        let page = match node
            .ask(&[
                "SCAN",
                &cursor,
                "MATCH",
                pattern,
                "COUNT",
                &PAGE.to_string(),
                "TYPE",
                kind,
            ])
            .await
        {
            Ok(page) => page,
            Err(error) if is_not_now(&error) => return Ok(Err(error)),
            Err(error) if is_denied(&error) => {
                return Err("this user may not scan the keys; grant it +scan".into());
            }
            Err(error) => {
                return Err(format!("cannot scan the keys: {}", error.details()).into());
            }
        };
        let [next, page] =
            <[Value; 2]>::try_from(list(page)).map_err(|_| "the reply to SCAN is invalid")?;
        // a key that is not valid text does not belong to nestlock
        keys.extend(list(page).iter().filter_map(text));
        match text(&next) {
            Some(next) if next != "0" => cursor = next,
            _ => return Ok(Ok(keys)),
        }
        looked.set(looked.get() + PAGE);
        if let Some(most) = wanted.most_keys.filter(|most| looked.get() > *most) {
            return Err(too_many("too many keys", most).into());
        }
        sleep(PAUSE).await;
    }
}

/// Reads the records of these candidates in a few round trips, and leaves out what is not a lock.
pub(crate) async fn read(
    raw: &Raw<'_>,
    wanted: &Wanted,
    candidates: &BTreeSet<Candidate>,
) -> Findings {
    let mut findings = Findings::default();
    let candidates: Vec<&Candidate> = candidates.iter().collect();
    // lengths first: a hash may be other data, of any size
    let lengths = raw
        .ask_all(
            candidates
                .iter()
                .map(|candidate| length(candidate))
                .collect(),
        )
        .await;
    let (mut chosen, mut permits) = (Vec::new(), false);
    for (candidate, length) in candidates.into_iter().zip(lengths) {
        if length.as_ref().is_err_and(is_of_another_type) {
            findings.others.insert(candidate.key().to_owned());
            continue;
        }
        let length = findings.note(candidate, length, "hlen, strlen or zcard");
        if length
            .and_then(|length| length.as_i64())
            .is_none_or(|length| (1..=MOST_HOLDERS).contains(&length))
        {
            permits |= matches!(candidate, Candidate::Permits(_));
            chosen.push(candidate);
        }
    }
    let (mut requests, mut channels) = (Vec::new(), Vec::new());
    for candidate in &chosen {
        requests.extend(questions(candidate, &wanted.prefix));
        if !wanted.by_name {
            channels.extend(candidate.heard_at());
        }
    }
    let (answers, listeners, now) = tokio::join!(
        raw.ask_all(requests),
        raw.listeners(&channels),
        time(raw, permits)
    );
    match &listeners {
        Ok(_) => {}
        Err(Unheard::Denied(what)) => _ = findings.denied.insert(what),
        Err(Unheard::Away(who)) => {
            findings.unheard = Some(format!("{who}; the number of waiters is not known"));
        }
    }
    let mut answers = answers.into_iter();
    for candidate in chosen {
        let mut next =
            |what| findings.note(candidate, answers.next().unwrap_or(Ok(Value::Null)), what);
        let (record, ttl) = (next("hgetall, get or zrange"), next("pttl"));
        let (queue, other) = match candidate {
            Candidate::Hash(_) => (next("llen"), next("get")),
            Candidate::Permits(_) => (None, next("get")),
            _ => (None, None),
        };
        let ttl = ttl.and_then(|ttl| ttl.as_i64());
        let Some(record) = record.filter(|_| ttl != Some(-2)) else {
            continue;
        };
        let key = candidate.key();
        if findings.unread.contains(key) {
            continue;
        }
        let Some(name) = candidate.name().strip_prefix(&wanted.prefix) else {
            continue;
        };
        let ttl = ttl.and_then(|ttl| u64::try_from(ttl).ok());
        let mut found = Found {
            name: name.to_owned(),
            record: Record::Reentrant,
            holders: Vec::new(),
            ttl,
            waiting: None,
            last_token: None,
            permits: None,
            notes: Vec::new(),
        };
        let heard = listeners.as_ref().ok().filter(|_| !wanted.by_name);
        let count = |channel: String| heard.map(|all| all.get(&channel).copied().unwrap_or(0));
        let mut heard = candidate.heard_at().map(count);
        let is_lock = match candidate {
            // without a TTL it is other data
            Candidate::Hash(_) | Candidate::String(_) if ttl.is_none() && !wanted.by_name => false,
            Candidate::Hash(_) => {
                let mut next = || heard.next().flatten();
                found.take_hash(record, queue, other, [next(), next()])
            }
            Candidate::String(_) => found.take_string(&record, Record::String),
            Candidate::Signal(_) => found.take_string(&record, Record::Signal),
            Candidate::Permits(_) => {
                found.record = name_of_leases(key).map_or(Record::Permits, |(_, record)| record);
                let Some(now) = findings.note(candidate, now.clone(), "time") else {
                    continue;
                };
                let now = now.as_u64().unwrap_or_default();
                found.take_permits(record, other.as_ref(), now, heard.next().flatten())
            }
        };
        if is_lock {
            // all permits may have expired
            if !found.holders.is_empty() {
                findings.found.insert(key.to_owned(), found);
            }
        } else {
            findings.others.insert(key.to_owned());
        }
    }
    read_notes(raw, wanted, &mut findings).await;
    findings.away = raw.away();
    findings.unheard.take_if(|_| !findings.away.is_empty());
    findings
}

/// Reads the notes of the holders.
async fn read_notes(raw: &Raw<'_>, wanted: &Wanted, findings: &mut Findings) {
    let (mut holders, mut requests) = (Vec::new(), Vec::new());
    for (key, found) in &findings.found {
        let name = derived(NOTE, &format!("{}{}", wanted.prefix, found.name));
        for (owner, _) in found.holders.iter().take(wanted.notes) {
            holders.push((key.clone(), owner.clone()));
            requests.push(words(&["GET", &format!("{name}:{owner}")]));
        }
    }
    // if it is denied, or fails, there is only no note
    for ((key, owner), answer) in holders.into_iter().zip(raw.ask_all(requests).await) {
        if let (Some(found), Ok(text)) = (findings.found.get_mut(&key), answer) {
            found.take_note(&owner, &text);
        }
    }
}

impl Findings {
    /// Returns the value of a reply. Returns `None` after an error: a missing permission is
    /// recorded, and a key of another type is not a lock.
    fn note(&mut self, candidate: &Candidate, answer: Answer, what: &'static str) -> Option<Value> {
        match answer {
            Ok(value) => Some(value),
            Err(error) => {
                if is_not_now(&error) {
                    self.unread.insert(candidate.key().to_owned());
                } else if is_denied(&error) {
                    self.denied.insert(what);
                    self.hidden.insert(candidate.key().to_owned());
                }
                None
            }
        }
    }
}

impl Candidate {
    /// Returns the key of the record.
    fn key(&self) -> &str {
        match self {
            Self::Hash(key) | Self::Signal(key) | Self::String(key) | Self::Permits(key) => key,
        }
    }

    /// Returns the name of the lock, with the prefix.
    fn name(&self) -> &str {
        match self {
            Self::Hash(key) | Self::String(key) => key,
            Self::Signal(key) => key.strip_prefix(SIGNAL).unwrap_or(key),
            Self::Permits(key) => name_of_leases(key).map_or(key, |(name, _)| name),
        }
    }

    /// Returns the channels on which its releases are published. For a hash, those of both sorts of
    /// records, as only the record itself says which sort it is.
    fn heard_at(&self) -> impl Iterator<Item = String> {
        let channels: &[&str] = match self {
            Self::Hash(_) => &["redisson_lock__channel", "redisson_rwlock"],
            Self::Permits(_) => &[OF_PERMITS],
            Self::Signal(_) | Self::String(_) => &[],
        };
        channels.iter().map(|channel| derived(channel, self.name()))
    }

    /// Returns the leases of the permits and of the semaphore with this name.
    fn counted(name: &str) -> [Self; 2] {
        [leases(name), derived(OF_SEMAPHORE, name)].map(Self::Permits)
    }

    /// Returns what may be held again after a message on this channel.
    pub(crate) fn heard(channel: &str) -> Vec<Self> {
        // `{name}`, perhaps followed by the waiter that the message is for
        let name = |rest: &str| rest.split_once('}').map(|(name, _)| name.to_owned());
        match channel
            .split_once('{')
            .map(|(kind, rest)| (kind, name(rest)))
        {
            Some((kind, Some(name))) if kind.starts_with(OF_PERMITS) => Self::counted(&name).into(),
            Some((_, Some(name))) => vec![Self::Hash(name)],
            _ => Vec::new(),
        }
    }
}

/// Returns the time of the servers in milliseconds since 1970, if it `is_needed`. Their clocks
/// differ a little: a permit may be held until the last of them says that it has expired.
async fn time(raw: &Raw<'_>, is_needed: bool) -> Answer {
    let mut first = Ok(Value::Null);
    let servers = if is_needed { raw.masters() } else { Vec::new() };
    for answer in raw.ask_each(&servers, &["TIME"]).await {
        let parts: Vec<u64> = match answer {
            Ok(time) => list(time).iter().filter_map(Value::as_u64).collect(),
            // the records there cannot be read, either
            Err(error) if is_not_now(&error) => continue,
            Err(error) => return Err(error),
        };
        let [seconds, micros] = parts[..] else {
            continue;
        };
        let now = seconds * 1_000 + micros / 1_000;
        let known = first.as_ref().ok().and_then(Value::as_u64);
        let now = i64::try_from(known.map_or(now, |known| known.min(now)));
        first = Ok(now.map_or(Value::Null, Value::Integer));
    }
    first
}

fn length(candidate: &Candidate) -> Words {
    match candidate {
        Candidate::Hash(key) => words(&["HLEN", key]),
        Candidate::Signal(key) | Candidate::String(key) => words(&["STRLEN", key]),
        Candidate::Permits(key) => words(&["ZCARD", key]),
    }
}

fn questions(candidate: &Candidate, prefix: &str) -> Vec<Words> {
    match candidate {
        Candidate::Hash(key) => {
            debug_assert!(key.starts_with(prefix));
            vec![
                words(&["HGETALL", key]),
                words(&["PTTL", key]),
                words(&["LLEN", &derived("redisson_lock_queue", key)]),
                words(&["GET", &derived("redisson_lock_token", key)]),
            ]
        }
        Candidate::Signal(key) | Candidate::String(key) => {
            vec![words(&["GET", key]), words(&["PTTL", key])]
        }
        Candidate::Permits(key) => vec![
            words(&["ZRANGE", key, "0", "-1", "WITHSCORES"]),
            words(&["PTTL", key]),
            words(&["GET", candidate.name()]),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_no_pattern() {
        assert_eq!(quoted("a*[b]?"), "a\\*\\[b\\]\\?");
    }
}
