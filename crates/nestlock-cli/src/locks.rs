//! A lock as a server has it, and its forms for display. What the server does not report is `None`,
//! never zero.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use fred::types::Value;
use nestlock::{HolderNote, OwnerId};
use serde_json::json;

use crate::node::{list, lossy, pairs, text};

/// The end of the key with the leases of permits.
const LEASES: &str = ":timeout";
/// The prefix of the key with the leases of a semaphore's permits.
pub(crate) const OF_SEMAPHORE: &str = "nestlock_semaphore_leases";
/// Redisson's permits without a lease end here, or later.
const NO_LEASE: u64 = 922_337_203_685_477;

/// The kind of a lock, as far as its record shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Record {
    /// A reentrant lock, or another kind with the same record.
    Reentrant,
    /// The same record, with a wait queue.
    Fair,
    Read,
    Write,
    Signal,
    String,
    Permits,
    Semaphore,
}

impl Record {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Reentrant => "reentrant",
            Self::Fair => "fair",
            Self::Read => "read",
            Self::Write => "write",
            Self::Signal => "signal",
            Self::String => "string",
            Self::Permits => "permits",
            Self::Semaphore => "semaphore",
        }
    }
}

/// The waiters, as far as the server knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Waiting {
    /// Client processes that are subscribed to its releases.
    Clients(u64),
    /// Tasks in its wait queue.
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
    /// The name, without the prefix.
    pub(crate) name: String,
    pub(crate) record: Record,
    /// Each owner, with its hold count.
    pub(crate) holders: Vec<(String, u64)>,
    /// The TTL in milliseconds.
    pub(crate) ttl: Option<u64>,
    pub(crate) waiting: Option<Waiting>,
    /// The last fencing token that was given at this name, perhaps not to this holder.
    pub(crate) last_token: Option<u64>,
    /// How many permits there are, taken ones included.
    pub(crate) permits: Option<u64>,
    /// The notes of those holders that have one.
    pub(crate) notes: Vec<HolderNote>,
}

impl Found {
    /// Returns which kind it may be instead: a fenced lock has the same record as a reentrant one,
    /// and the tokens of a name outlive its holds.
    pub(crate) fn maybe(&self) -> Option<&'static str> {
        (self.record == Record::Reentrant && self.last_token.is_some()).then_some("fenced")
    }

    pub(crate) fn kind_text(&self) -> String {
        self.maybe()
            .map_or_else(|| self.record.name().to_owned(), |kind| format!("{kind}?"))
    }

    /// Returns the holders in a form that fits into a line.
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

    /// Returns the number of holds; for permits, also how many there are: `2/3`.
    pub(crate) fn holds_text(&self) -> String {
        let holds = self.holds();
        self.permits
            .map_or_else(|| holds.to_string(), |permits| format!("{holds}/{permits}"))
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
        self.last_token
            .map_or("-".to_owned(), |token| token.to_string())
    }

    /// Adds the note of this holder, if the text is one.
    pub(crate) fn take_note(&mut self, owner: &str, text: &Value) {
        let owner = OwnerId::from_value(owner).ok();
        let note = owner.zip(self::text(text));
        self.notes
            .extend(note.and_then(|(owner, text)| HolderNote::parse(&owner, &text)));
    }

    /// Returns the note of this holder.
    pub(crate) fn note(&self, owner: &str) -> Option<&HolderNote> {
        self.notes.iter().find(|note| note.owner.as_str() == owner)
    }

    /// Returns a JSON object, in the first version of this format.
    pub(crate) fn json(&self) -> serde_json::Value {
        let holders: Vec<_> = self
            .holders
            .iter()
            .map(|(owner, holds)| {
                let note = self.note(owner);
                json!({
                    "owner": owner, "holds": holds,
                    "note": note.map(|note| &note.note), "since_ms": note.map(since_ms),
                    "application": note.map(|note| &note.application), "host": note.map(|note| &note.host),
                    "process": note.map(|note| note.process.to_string()),
                })
            })
            .collect();
        let (tasks, clients) = match self.waiting {
            Some(Waiting::Tasks(tasks)) => (Some(tasks), None),
            Some(Waiting::Clients(clients)) => (None, Some(clients)),
            None => (None, None),
        };
        json!({
            "v": 1, "name": self.name, "kind": self.record.name(), "maybe": self.maybe(), "holders": holders,
            "ttl_ms": self.ttl, "waiting_tasks": tasks, "waiting_clients": clients, "last_token": self.last_token,
            "permits": self.permits,
        })
    }
}

/// Returns since when a holder has the lock, in milliseconds since 1970 by the clock of its host.
pub(crate) fn since_ms(note: &HolderNote) -> u128 {
    let since = note.since.duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis())
}

/// Returns for how many seconds a holder has the lock, by the clocks of its host and of this one.
pub(crate) fn held_secs(note: &HolderNote) -> u64 {
    note.since.elapsed().unwrap_or_default().as_secs()
}

/// Returns the key or the channel that belongs to a lock.
pub(crate) fn derived(prefix: &str, name: &str) -> String {
    if name.contains('{') {
        format!("{prefix}:{name}")
    } else {
        format!("{prefix}:{{{name}}}")
    }
}

/// Returns the key with the leases of permits.
pub(crate) fn leases(name: &str) -> String {
    if name.contains('{') {
        format!("{name}{LEASES}")
    } else {
        format!("{{{name}}}{LEASES}")
    }
}

/// Returns the name of the permits whose leases are at this key, and whether they are permits or a
/// semaphore. Returns `None` if it is a key of something else.
pub(crate) fn name_of_leases(key: &str) -> Option<(&str, Record)> {
    let of_semaphore = || key.strip_prefix(OF_SEMAPHORE)?.strip_prefix(':');
    let (name, record) = match of_semaphore() {
        Some(name) => (name, Record::Semaphore),
        None => (key.strip_suffix(LEASES)?, Record::Permits),
    };
    let inner = name
        .strip_prefix('{')
        .and_then(|name| name.strip_suffix('}'));
    // a name with a hash tag of its own gets no braces
    inner
        .filter(|inner| !inner.is_empty() && !inner.contains('{'))
        .or_else(|| name.contains('{').then_some(name))
        .map(|name| (name, record))
}

/// Returns the owner of a permit. The second and each further permit of an owner ends with its
/// number. One of Redisson's is 16 random bytes, and its own owner, in hex. Returns `None` if it is
/// no permit.
fn owner_of_permit(permit: &[u8]) -> Option<String> {
    let text = str::from_utf8(permit).ok();
    let first = text.map(|text| match text.rsplit_once(' ') {
        Some((first, n)) if n.bytes().all(|digit| digit.is_ascii_digit()) => first,
        _ => text,
    });
    if let Some(first) = first.filter(|first| owner(first) == Some(first)) {
        return Some(first.to_owned());
    }
    let random = <[u8; 16]>::try_from(permit).ok()?;
    Some(format!("{:032x}", u128::from_be_bytes(random)))
}

/// Returns the milliseconds in a score, which a server writes as `1e+18` if it is large.
fn millis(score: &str) -> Option<u64> {
    let score = Duration::try_from_secs_f64(score.parse::<f64>().ok()? / 1e3).ok()?;
    u64::try_from(score.as_millis()).ok()
}

/// Returns the owner in a field of a record, `<uuid>:<task>`; the field of a writer ends with
/// `:write`. Returns `None` if the field has no owner.
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
    /// Reads a hash. Returns whether it is the record of a lock.
    pub(crate) fn take_hash(
        &mut self,
        record: Value,
        queue: Option<Value>,
        token: Option<Value>,
        [plain, shared]: [Option<u64>; 2],
    ) -> bool {
        let Some(fields) = pairs(record) else {
            return false;
        };
        let (mut mode, mut writers) = (None, Vec::new());
        for (field, value) in fields {
            match (owner(&field), value.parse()) {
                (Some(owner), Ok(holds)) if owner.len() < field.len() => {
                    writers.push((owner.to_owned(), holds));
                }
                (Some(owner), Ok(holds)) => self.holders.push((owner.to_owned(), holds)),
                _ if field == "mode" => mode = Some(value),
                // on a server that is short of memory, a record may have an empty field for a
                // moment
                _ if field.is_empty() => {}
                _ => return false,
            }
        }
        // an owner that reads inside its own write hold is the writer
        if mode.as_deref() == Some("write") {
            self.holders = writers;
        }
        if self.holders.is_empty() {
            return false;
        }
        let in_queue = queue
            .and_then(|queue| queue.as_u64())
            .filter(|length| *length > 0);
        self.last_token = token.and_then(|token| text(&token)?.parse().ok());
        (self.record, self.waiting) = match mode.as_deref() {
            Some("read") => (Record::Read, shared.map(Waiting::Clients)),
            Some("write") => (Record::Write, shared.map(Waiting::Clients)),
            Some(_) => return false,
            None if in_queue.is_some() => (Record::Fair, in_queue.map(Waiting::Tasks)),
            None => (Record::Reentrant, plain.map(Waiting::Clients)),
        };
        true
    }

    /// Reads the leases of permits, at this time of the server. Returns whether they are such; if
    /// all have ended, there are no holders.
    pub(crate) fn take_permits(
        &mut self,
        leases: Value,
        counter: Option<&Value>,
        now: u64,
        listeners: Option<u64>,
    ) -> bool {
        let leases = list(leases);
        let (mut taken, mut last) = (BTreeMap::<String, u64>::new(), 0);
        for lease in leases.chunks_exact(2) {
            let Some((owner, end)) = lease[0]
                .as_bytes()
                .and_then(owner_of_permit)
                .zip(text(&lease[1]).and_then(|end| millis(&end)))
            else {
                return false;
            };
            // one that has expired stays until the next acquire
            if end > now {
                *taken.entry(owner).or_default() += 1;
                last = last.max(end);
            }
        }
        self.holders = taken.into_iter().collect();
        self.ttl = (last < NO_LEASE).then(|| last.saturating_sub(now));
        self.waiting = listeners.map(Waiting::Clients);
        let all = i64::try_from(leases.len() / 2).unwrap_or(i64::MAX);
        // what Redisson has taken of a semaphore is nowhere
        self.permits = counter
            .filter(|_| self.record == Record::Permits)
            .and_then(|counter| text(counter)?.parse::<i64>().ok())
            .map(|counter| u64::try_from(counter.saturating_add(all)).unwrap_or(0));
        true
    }

    pub(crate) fn take_string(&mut self, record: &Value, kind: Record) -> bool {
        let Some(owner) = lossy(record).filter(|owner| !owner.is_empty()) else {
            return false;
        };
        self.holders.push((owner, 1));
        self.record = kind;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";

    #[test]
    fn an_owner_is_told_from_data() {
        assert_eq!(owner(OWNER), Some(OWNER));
        assert_eq!(owner(&format!("{OWNER}:write")), Some(OWNER));
        for data in [
            "",
            "a:b",
            "0a1b2c3d-1111-4222-8333-44445555666x:42",
            "0a1b2c3d-1111-4222-8333-444455556666:",
        ] {
            assert_eq!(owner(data), None, "{data}");
        }
    }

    #[test]
    fn permits_are_told_from_data() {
        for (permit, told) in [
            (OWNER.as_bytes(), Some(OWNER)),
            (format!("{OWNER} 2").as_bytes(), Some(OWNER)),
            (
                b"\xff0123456789abcde",
                Some("ff303132333435363738396162636465"),
            ),
            (b"a member".as_slice(), None),
            (format!("{OWNER}:write").as_bytes(), None),
        ] {
            assert_eq!(owner_of_permit(permit).as_deref(), told, "{permit:?}");
        }
        for (key, name) in [
            ("{jobs}:timeout", Some("jobs")),
            ("{shop}:jobs:timeout", Some("{shop}:jobs")),
            ("jobs:timeout", None),
            ("{}:timeout", Some("{}")),
            ("{jobs}:other", None),
        ] {
            let told = name.map(|name| (name, Record::Permits));
            assert_eq!(name_of_leases(key), told, "{key}");
            assert!(name.is_none_or(|name| leases(name) == key), "{key}");
        }
        for name in ["jobs", "{shop}:jobs"] {
            let key = derived(OF_SEMAPHORE, name);
            assert_eq!(name_of_leases(&key), Some((name, Record::Semaphore)));
        }
        assert_eq!(name_of_leases("nestlock_semaphore_leases:jobs"), None);
    }

    #[test]
    fn what_is_not_known_is_not_zero() {
        let found = Found {
            name: "l".into(),
            record: Record::Signal,
            holders: vec![("another".into(), 1)],
            ttl: None,
            waiting: None,
            last_token: None,
            permits: None,
            notes: Vec::new(),
        };
        assert_eq!(
            (found.waiting_text(), found.ttl_text(), found.token_text()),
            ("-".into(), "-".into(), "-".into())
        );
        let json = found.json();
        assert!(
            json["waiting_tasks"].is_null()
                && json["waiting_clients"].is_null()
                && json["ttl_ms"].is_null()
        );
    }
}
