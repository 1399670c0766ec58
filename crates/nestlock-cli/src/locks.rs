//! Which locks there are on a server, and what it says of each. What it does not say is `None`, never zero.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use fred::types::Value;
use serde_json::json;
use tokio::time::sleep;

use crate::{
    Failure,
    args::Unusable,
    raw::{Raw, Words, is_denied, is_over, list, lossy, text, words},
};

/// Keys that locks keep beside their records.
const OTHERS: [&str; 3] = ["redisson_", "nestlock_", "lock-signal:"];
const SIGNAL: &str = "lock:";
/// Keys that one SCAN looks through.
const PAGE: u64 = 1_000;
/// Between two of them others are served, who may have waited meanwhile: so many keys are no more than half of the server's time.
const PAUSE: Duration = Duration::from_millis(1);
/// A hash of more fields is somebody's data: it is not read.
const MOST_HOLDERS: i64 = 100_000;

/// What the record says of its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Record {
    /// Of a reentrant lock, and of all kinds that have the same.
    Reentrant,
    /// The same, with a token beside it.
    Fenced,
    /// The same, with a queue.
    Fair,
    Read,
    Write,
    Signal,
    String,
}

impl Record {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Reentrant => "reentrant",
            Self::Fenced => "fenced?",
            Self::Fair => "fair",
            Self::Read => "read",
            Self::Write => "write",
            Self::Signal => "signal",
            Self::String => "string",
        }
    }
}

/// Who waits, as far as the server knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Waiting {
    /// Client processes that listen for its release.
    Clients(u64),
    /// In its queue.
    Tasks(u64),
}

impl Waiting {
    pub(crate) fn count(self) -> u64 {
        match self {
            Self::Clients(count) | Self::Tasks(count) => count,
        }
    }
}

/// A lock that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Without the prefix.
    pub(crate) name: String,
    pub(crate) record: Record,
    /// Each owner, and how often it holds the lock.
    pub(crate) holders: Vec<(String, u64)>,
    /// In milliseconds.
    pub(crate) ttl: Option<u64>,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) token: Option<u64>,
}

impl Found {
    /// The holders, as there is room for them in a line.
    pub(crate) fn holder(&self) -> String {
        match &self.holders[..] {
            [] => "-".to_owned(),
            [(one, _)] => one.clone(),
            [(first, _), rest @ ..] => format!("{first} +{}", rest.len()),
        }
    }

    pub(crate) fn holds(&self) -> u64 {
        self.holders.iter().map(|(_, holds)| holds).sum()
    }

    pub(crate) fn waiting_text(&self) -> String {
        match self.waiting {
            None => "-".to_owned(),
            Some(Waiting::Tasks(tasks)) => tasks.to_string(),
            Some(Waiting::Clients(1)) => "1 client".to_owned(),
            Some(Waiting::Clients(clients)) => format!("{clients} clients"),
        }
    }

    pub(crate) fn ttl_text(&self) -> String {
        self.ttl.map_or("-".to_owned(), |ttl| format!("{ttl}ms"))
    }

    pub(crate) fn token_text(&self) -> String {
        self.token.map_or("-".to_owned(), |token| token.to_string())
    }

    /// One object, of the first version of this format.
    pub(crate) fn json(&self) -> serde_json::Value {
        let holders: Vec<_> =
            self.holders.iter().map(|(owner, holds)| json!({ "owner": owner, "holds": holds })).collect();
        let (tasks, clients) = match self.waiting {
            Some(Waiting::Tasks(tasks)) => (Some(tasks), None),
            Some(Waiting::Clients(clients)) => (None, Some(clients)),
            None => (None, None),
        };
        json!({
            "v": 1, "name": self.name, "kind": self.record.name().trim_end_matches('?'), "holders": holders, "ttl_ms": self.ttl,
            "waiting_tasks": tasks, "waiting_clients": clients, "token": self.token,
        })
    }
}

/// Which locks to look for.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) prefix: String,
    /// A pattern of the server's, without the prefix.
    pub(crate) pattern: Option<String>,
    /// How many keys may be looked through.
    pub(crate) most_keys: Option<u64>,
    /// Plain strings with a TTL count as locks.
    pub(crate) strings: bool,
}

/// What may be a lock: its record's key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Candidate {
    Hash(String),
    Signal(String),
    String(String),
}

/// What was found, and what this user may not ask.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// By the keys of their records: locks of two sorts may have one name.
    pub(crate) found: BTreeMap<String, Found>,
    pub(crate) denied: BTreeSet<&'static str>,
}

/// The prefix may have characters that mean something in a pattern.
fn quoted(text: &str) -> String {
    text.chars().flat_map(|letter| "*?[]\\^".contains(letter).then_some('\\').into_iter().chain([letter])).collect()
}

/// Looks through all keys for what may be a lock. A key that stays is found; one that comes or goes meanwhile may be.
pub(crate) async fn discover(raw: &Raw, wanted: &Wanted) -> Result<BTreeSet<Candidate>, Failure> {
    let of = |before: &str| format!("{before}{}{}", quoted(&wanted.prefix), wanted.pattern.as_deref().unwrap_or("*"));
    let mut all = BTreeSet::new();
    let mut add = |keys: Vec<String>, make: fn(String) -> Candidate| all.extend(keys.into_iter().map(make));
    let hashes = scan(raw, wanted, &of(""), "hash").await?;
    add(hashes.into_iter().filter(|key| !is_other(key)).collect(), Candidate::Hash);
    add(scan(raw, wanted, &of(SIGNAL), "string").await?, Candidate::Signal);
    if wanted.strings {
        let strings = scan(raw, wanted, &of(""), "string").await?;
        add(strings.into_iter().filter(|key| !is_other(key) && !key.starts_with(SIGNAL)).collect(), Candidate::String);
    }
    Ok(all)
}

fn is_other(key: &str) -> bool {
    OTHERS.iter().any(|other| key.starts_with(other)) || key.contains(":rwlock_timeout:")
}

/// Who looks through that many does it knowingly.
pub(crate) fn too_many(there: &str, most: u64) -> Unusable {
    Unusable(format!(
        "there are {there}, more than {most}, and all would be looked through; say a PATTERN, --prefix or a higher --max-keys"
    ))
}

async fn scan(raw: &Raw, wanted: &Wanted, pattern: &str, kind: &str) -> Result<Vec<String>, Failure> {
    let (mut cursor, mut keys, mut looked) = ("0".to_owned(), Vec::new(), 0);
    loop {
        let page = raw.ask(&["SCAN", &cursor, "MATCH", pattern, "COUNT", &PAGE.to_string(), "TYPE", kind]).await;
        let page = page.map_err(|error| {
            if is_denied(&error) {
                "this user may not look through the keys; give it +scan".to_owned()
            } else {
                format!("cannot look through the keys: {}", error.details())
            }
        })?;
        let [next, page] = <[Value; 2]>::try_from(list(page)).map_err(|_| "the answer to SCAN makes no sense")?;
        // what is no text is no name of ours
        keys.extend(list(page).iter().filter_map(text));
        match text(&next) {
            Some(next) if next != "0" => cursor = next,
            _ => return Ok(keys),
        }
        looked += PAGE;
        if let Some(most) = wanted.most_keys.filter(|most| looked > *most) {
            return Err(too_many("too many keys", most).into());
        }
        sleep(PAUSE).await;
    }
}

/// The key, or the channel, that belongs to a lock.
pub(crate) fn derived(prefix: &str, name: &str) -> String {
    if name.contains('{') { format!("{prefix}:{name}") } else { format!("{prefix}:{{{name}}}") }
}

/// Reads what the server says of these, in a few round trips. What is no lock is left out.
pub(crate) async fn read(raw: &Raw, wanted: &Wanted, candidates: &BTreeSet<Candidate>) -> Result<Findings, Failure> {
    let mut findings = Findings::default();
    let candidates: Vec<&Candidate> = candidates.iter().collect();
    // a hash may be somebody's, of any size
    let lengths = raw.ask_all(candidates.iter().map(|candidate| length(candidate)).collect()).await?;
    let mut chosen = Vec::new();
    for (candidate, length) in candidates.into_iter().zip(lengths) {
        let length = findings.note(length, "hlen or strlen")?;
        if length.and_then(|length| length.as_i64()).is_none_or(|length| (1..=MOST_HOLDERS).contains(&length)) {
            chosen.push(candidate);
        }
    }
    let mut requests = Vec::new();
    for candidate in &chosen {
        requests.extend(questions(candidate, &wanted.prefix));
    }
    let mut answers = raw.ask_all(requests).await?.into_iter();
    for candidate in chosen {
        let mut next = |what| findings.note(answers.next().unwrap_or(Ok(Value::Null)), what);
        let (record, ttl) = (next("hgetall or get")?, next("pttl")?);
        let (queue, token, heard) = match candidate {
            Candidate::Hash(_) => (next("llen")?, next("get")?, next("pubsub|numsub")?),
            _ => (None, None, None),
        };
        let ttl = ttl.and_then(|ttl| ttl.as_i64());
        let Some(record) = record.filter(|_| ttl != Some(-2)) else { continue };
        let (key, cut) = match candidate {
            Candidate::Hash(key) | Candidate::String(key) => (key, 0),
            Candidate::Signal(key) => (key, SIGNAL.len()),
        };
        let Some(name) = key[cut..].strip_prefix(&wanted.prefix) else { continue };
        let ttl = ttl.and_then(|ttl| u64::try_from(ttl).ok());
        let mut found = Found {
            name: name.to_owned(),
            record: Record::Reentrant,
            holders: Vec::new(),
            ttl,
            waiting: None,
            token: None,
        };
        let is_lock = match candidate {
            Candidate::Hash(_) => ttl.is_some() && found.take_hash(record, queue, token, heard),
            // one without a TTL is somebody's data
            Candidate::String(_) if ttl.is_none() => false,
            Candidate::String(_) => found.take_string(&record, Record::String),
            Candidate::Signal(_) => found.take_string(&record, Record::Signal),
        };
        if is_lock {
            findings.found.insert(key.clone(), found);
        }
    }
    Ok(findings)
}

impl Findings {
    /// An answer, or nothing: what may not be asked is noted, and what is of another type is no lock.
    fn note(
        &mut self,
        answer: Result<Value, fred::error::Error>,
        what: &'static str,
    ) -> Result<Option<Value>, Failure> {
        match answer {
            Ok(value) => Ok(Some(value)),
            Err(error) if is_over(&error) => Err(error.details().to_owned().into()),
            Err(error) => {
                if is_denied(&error) {
                    self.denied.insert(what);
                }
                Ok(None)
            }
        }
    }
}

fn length(candidate: &Candidate) -> Words {
    match candidate {
        Candidate::Hash(key) => words(&["HLEN", key]),
        Candidate::Signal(key) | Candidate::String(key) => words(&["STRLEN", key]),
    }
}

fn questions(candidate: &Candidate, prefix: &str) -> Vec<Words> {
    match candidate {
        Candidate::Hash(key) => {
            debug_assert!(key.starts_with(prefix));
            // of both sorts, since the record says which it is
            let (plain, shared) = (derived("redisson_lock__channel", key), derived("redisson_rwlock", key));
            vec![
                words(&["HGETALL", key]),
                words(&["PTTL", key]),
                words(&["LLEN", &derived("redisson_lock_queue", key)]),
                words(&["GET", &derived("redisson_lock_token", key)]),
                words(&["PUBSUB", "NUMSUB", &plain, &shared]),
            ]
        }
        Candidate::Signal(key) | Candidate::String(key) => vec![words(&["GET", key]), words(&["PTTL", key])],
    }
}

/// `<uuid>:<task>`, and of a writer `:write` behind it.
fn owner(field: &str) -> Option<&str> {
    let (client, task) = field.split_once(':')?;
    let is_uuid = client.len() == 36
        && client.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        });
    (is_uuid && !task.is_empty()).then(|| field.strip_suffix(":write").unwrap_or(field))
}

impl Found {
    /// Whether it is a lock's record.
    fn take_hash(&mut self, record: Value, queue: Option<Value>, token: Option<Value>, heard: Option<Value>) -> bool {
        let Some(fields) = pairs(record) else { return false };
        let mut mode = None;
        for (field, value) in fields {
            match (owner(&field), value.parse()) {
                (Some(owner), Ok(holds)) => self.holders.push((owner.to_owned(), holds)),
                _ if field == "mode" => mode = Some(value),
                // an empty field is written for a moment, on a server that is short of memory
                _ if field.is_empty() => {}
                _ => return false,
            }
        }
        if self.holders.is_empty() {
            return false;
        }
        let [plain, shared] = heard.map(counts).unwrap_or_default();
        let in_queue = queue.and_then(|queue| queue.as_u64()).filter(|length| *length > 0);
        self.token = token.and_then(|token| text(&token)?.parse().ok());
        (self.record, self.waiting) = match mode.as_deref() {
            Some("read") => (Record::Read, shared.map(Waiting::Clients)),
            Some("write") => (Record::Write, shared.map(Waiting::Clients)),
            Some(_) => return false,
            None if in_queue.is_some() => (Record::Fair, in_queue.map(Waiting::Tasks)),
            None if self.token.is_some() => (Record::Fenced, plain.map(Waiting::Clients)),
            None => (Record::Reentrant, plain.map(Waiting::Clients)),
        };
        true
    }

    fn take_string(&mut self, record: &Value, kind: Record) -> bool {
        let Some(owner) = lossy(record).filter(|owner| !owner.is_empty()) else { return false };
        self.holders.push((owner, 1));
        self.record = kind;
        true
    }
}

/// A hash, whichever protocol tells it.
fn pairs(value: Value) -> Option<Vec<(String, String)>> {
    match value {
        Value::Map(map) => {
            map.inner().into_iter().map(|(key, value)| Some((key.into_string()?, text(&value)?))).collect()
        }
        Value::Array(flat) => {
            let flat: Option<Vec<String>> = flat.iter().map(text).collect();
            Some(flat?.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect())
        }
        _ => None,
    }
}

/// How many listen to each of two channels.
fn counts(value: Value) -> [Option<u64>; 2] {
    let said = pairs(value).unwrap_or_default();
    let count = |at: usize| said.get(at).and_then(|(_, count)| count.parse().ok());
    // whatever the order in which a map tells them
    let of = |prefix: &str| said.iter().position(|(channel, _)| channel.starts_with(prefix)).and_then(count);
    [of("redisson_lock__channel"), of("redisson_rwlock")]
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";

    #[test]
    fn an_owner_is_told_from_data() {
        assert_eq!(owner(OWNER), Some(OWNER));
        assert_eq!(owner(&format!("{OWNER}:write")), Some(OWNER));
        for data in ["", "a:b", "0a1b2c3d-1111-4222-8333-44445555666x:42", "0a1b2c3d-1111-4222-8333-444455556666:"] {
            assert_eq!(owner(data), None, "{data}");
        }
    }

    #[test]
    fn a_prefix_is_no_pattern() {
        assert_eq!(quoted("a*[b]?"), "a\\*\\[b\\]\\?");
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        let found = Found {
            name: "l".into(),
            record: Record::Signal,
            holders: vec![("somebody".into(), 1)],
            ttl: None,
            waiting: None,
            token: None,
        };
        assert_eq!((found.waiting_text(), found.ttl_text(), found.token_text()), ("-".into(), "-".into(), "-".into()));
        let json = found.json();
        assert!(json["waiting_tasks"].is_null() && json["waiting_clients"].is_null() && json["ttl_ms"].is_null());
    }
}
