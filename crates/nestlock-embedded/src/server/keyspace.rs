//! The server's data: databases of keys, with their values and deadlines.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    hash::{DefaultHasher, Hasher},
};

use indexmap::IndexMap;

use super::sorted_set::SortedSet;

pub(crate) const DATABASES: usize = 16;

/// A hash in insertion order, as Redis keeps small hashes.
pub(crate) type Hash = IndexMap<Vec<u8>, Vec<u8>>;

/// The value of a key. Only a string may be empty: a collection's key is removed with its last
/// element.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    String(Vec<u8>),
    Hash(Hash),
    List(VecDeque<Vec<u8>>),
    SortedSet(SortedSet),
}

impl Value {
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::String(_) => "string",
            Self::Hash(_) => "hash",
            Self::List(_) => "list",
            Self::SortedSet(_) => "zset",
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::String(_) => false,
            Self::Hash(hash) => hash.is_empty(),
            Self::List(list) => list.is_empty(),
            Self::SortedSet(set) => set.is_empty(),
        }
    }
}

#[derive(Debug)]
struct Entry {
    key: Vec<u8>,
    value: Value,
    /// Milliseconds since the Unix epoch.
    deadline: Option<i64>,
}

/// A numbered database.
///
/// Keys are ordered by a hash of the key. A SCAN can therefore resume at a number, and it returns
/// every key that exists during the whole scan.
#[derive(Debug, Default)]
struct Database {
    entries: BTreeMap<u64, Vec<Entry>>,
    len: usize,
}

/// All databases of the server.
#[derive(Debug)]
pub(crate) struct Keyspace {
    databases: Vec<Database>,
    /// Every deadline, in order: `(deadline, database, key)`.
    deadlines: BTreeSet<(i64, usize, Vec<u8>)>,
    /// The lists that have received elements since the last [`Keyspace::take_pushed`]: blocked
    /// clients may be waiting for them.
    pushed: Vec<(usize, Vec<u8>)>,
}

/// Returns the hash that orders a key. It has 48 bits, so that every client language can hold a
/// cursor exactly, even as a double. It is never 0, which marks the start and the end of a scan.
fn slot(key: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(key);
    (hasher.finish() >> 16) | 1
}

impl Keyspace {
    pub(crate) fn new() -> Self {
        Self {
            databases: (0..DATABASES).map(|_| Database::default()).collect(),
            deadlines: BTreeSet::new(),
            pushed: Vec::new(),
        }
    }

    /// Removes the expired keys and returns how many there were. Runs before each command, so that
    /// no command sees an expired key.
    pub(crate) fn expire(&mut self, now: i64) -> u64 {
        let mut expired = 0;
        // a key still exists in the millisecond of its deadline
        while self
            .deadlines
            .first()
            .is_some_and(|(deadline, ..)| *deadline < now)
        {
            let Some((_, db, key)) = self.deadlines.pop_first() else {
                break;
            };
            self.take(db, &key);
            expired += 1;
        }
        expired
    }

    fn entry(&self, db: usize, key: &[u8]) -> Option<&Entry> {
        self.databases[db]
            .entries
            .get(&slot(key))?
            .iter()
            .find(|entry| entry.key == key)
    }

    fn entry_mut(&mut self, db: usize, key: &[u8]) -> Option<&mut Entry> {
        self.databases[db]
            .entries
            .get_mut(&slot(key))?
            .iter_mut()
            .find(|entry| entry.key == key)
    }

    pub(crate) fn get(&self, db: usize, key: &[u8]) -> Option<&Value> {
        self.entry(db, key).map(|entry| &entry.value)
    }

    /// Returns a value to change in place. Call [`Keyspace::tidy`] after removing elements.
    pub(crate) fn get_mut(&mut self, db: usize, key: &[u8]) -> Option<&mut Value> {
        self.entry_mut(db, key).map(|entry| &mut entry.value)
    }

    /// Returns the value of a key, inserting the result of `make` if the key does not exist.
    pub(crate) fn get_or_insert(
        &mut self,
        db: usize,
        key: &[u8],
        make: impl FnOnce() -> Value,
    ) -> &mut Value {
        let database = &mut self.databases[db];
        let bucket = database.entries.entry(slot(key)).or_default();
        let at = bucket
            .iter()
            .position(|entry| entry.key == key)
            .unwrap_or_else(|| {
                database.len += 1;
                bucket.push(Entry {
                    key: key.to_vec(),
                    value: make(),
                    deadline: None,
                });
                bucket.len() - 1
            });
        &mut bucket[at].value
    }

    /// Sets the value of a key and keeps its deadline.
    pub(crate) fn put(&mut self, db: usize, key: &[u8], value: Value) {
        let mut value = Some(value);
        let slot = self.get_or_insert(db, key, || {
            value.take().unwrap_or(Value::String(Vec::new()))
        });
        if let Some(value) = value {
            *slot = value;
        }
    }

    /// Removes a key and returns its value.
    pub(crate) fn take(&mut self, db: usize, key: &[u8]) -> Option<Value> {
        let database = &mut self.databases[db];
        let slot = slot(key);
        let bucket = database.entries.get_mut(&slot)?;
        let at = bucket.iter().position(|entry| entry.key == key)?;
        let entry = bucket.swap_remove(at);
        if bucket.is_empty() {
            database.entries.remove(&slot);
        }
        database.len -= 1;
        if let Some(deadline) = entry.deadline {
            self.deadlines.remove(&(deadline, db, entry.key));
        }
        Some(entry.value)
    }

    /// Removes a key if its value is an empty collection.
    pub(crate) fn tidy(&mut self, db: usize, key: &[u8]) {
        if self.get(db, key).is_some_and(Value::is_empty) {
            self.take(db, key);
        }
    }

    pub(crate) fn contains(&self, db: usize, key: &[u8]) -> bool {
        self.entry(db, key).is_some()
    }

    pub(crate) fn deadline(&self, db: usize, key: &[u8]) -> Option<i64> {
        self.entry(db, key)?.deadline
    }

    pub(crate) fn set_deadline(&mut self, db: usize, key: &[u8], deadline: Option<i64>) {
        let Some(entry) = self.entry_mut(db, key) else {
            return;
        };
        let before = std::mem::replace(&mut entry.deadline, deadline);
        if let Some(before) = before {
            self.deadlines.remove(&(before, db, key.to_vec()));
        }
        if let Some(deadline) = deadline {
            self.deadlines.insert((deadline, db, key.to_vec()));
        }
    }

    pub(crate) fn len(&self, db: usize) -> usize {
        self.databases[db].len
    }

    /// Returns how many keys of a database have a deadline.
    pub(crate) fn volatile(&self, db: usize) -> usize {
        self.deadlines
            .iter()
            .filter(|(_, database, _)| *database == db)
            .count()
    }

    pub(crate) fn keys(&self, db: usize) -> impl Iterator<Item = (&[u8], &Value)> {
        self.databases[db]
            .entries
            .values()
            .flatten()
            .map(|entry| (entry.key.as_slice(), &entry.value))
    }

    /// Returns the next cursor and the keys from `cursor` on: at least `count`, unless fewer are
    /// left. The next cursor is 0 at the end.
    pub(crate) fn scan(&self, db: usize, cursor: u64, count: usize) -> (u64, Vec<(&[u8], &Value)>) {
        let mut found = Vec::new();
        for (slot, bucket) in self.databases[db].entries.range(cursor..) {
            if found.len() >= count {
                return (*slot, found);
            }
            found.extend(
                bucket
                    .iter()
                    .map(|entry| (entry.key.as_slice(), &entry.value)),
            );
        }
        (0, found)
    }

    pub(crate) fn flush(&mut self, db: usize) {
        self.databases[db] = Database::default();
        self.deadlines.retain(|(_, database, _)| *database != db);
    }

    /// Records that elements were pushed to a list.
    pub(crate) fn note_push(&mut self, db: usize, key: &[u8]) {
        if !self
            .pushed
            .iter()
            .any(|(database, pushed)| *database == db && pushed == key)
        {
            self.pushed.push((db, key.to_vec()));
        }
    }

    /// Returns the lists that received elements since the last call, in order of the first push.
    pub(crate) fn take_pushed(&mut self) -> Vec<(usize, Vec<u8>)> {
        std::mem::take(&mut self.pushed)
    }
}
