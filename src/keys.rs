//! Lock names, and the keys and channels derived from them. The rules are Redisson's, so that both
//! libraries use the same keys.

use std::sync::Arc;

use crc16::{State, XMODEM};
use uuid::Uuid;

use crate::error::Error;

/// How many slots a cluster has.
pub(crate) const SLOTS: u16 = 16_384;
/// The prefix of the key that stores a guarded value's fence.
pub(crate) const FENCE: &str = "nestlock_fence";
/// The prefix of the key of a signal lock's record.
pub(crate) const SIGNAL_RECORD: &str = "lock:";
/// The prefix of the list that wakes a signal lock's waiters.
pub(crate) const SIGNAL_LIST: &str = "lock-signal:";
/// The end of the key of the leases of permits, after a name in braces.
pub(crate) const PERMIT_LEASES: &str = ":timeout";
/// The prefix of the key of the queue of fair permits.
pub(crate) const PERMIT_QUEUE: &str = "nestlock_permits_queue";
/// The prefix of the key that says when waiters of fair permits expire, and how many they want.
pub(crate) const PERMIT_WAITERS: &str = "nestlock_permits_seen";
/// The prefix of the key of the leases of a semaphore's permits.
pub(crate) const SEMAPHORE_LEASES: &str = "nestlock_semaphore_leases";
/// The prefix of the keys that say which changes of a semaphore were made.
pub(crate) const SEMAPHORE_REQUEST: &str = "nestlock_semaphore_request";
/// The prefix of the keys that say which changes of a latch were made.
pub(crate) const LATCH_REQUEST: &str = "nestlock_latch_request";
/// The prefix of the key of those that have counted down a latch once for all.
pub(crate) const LATCH_CALLERS: &str = "nestlock_latch_callers";
/// The prefix of the keys of holders' notes.
const NOTE: &str = "nestlock_note";
/// The prefixes of the keys that locks derive from their names: no lock may have such a name.
/// [`SIGNAL_RECORD`] is not one of them, since its keys are also the records of string locks with
/// these names.
const RESERVED: [&str; 3] = ["redisson_", "nestlock_", SIGNAL_LIST];

/// Returns the key of a request that is made once, even if it is sent twice, with the prefix
/// `request`. `key` is one of the lock's, with the prefix `prefix`: the new one is in its slot.
pub(crate) fn request_key(key: &str, prefix: &str, request: &str) -> Arc<str> {
    let key = key.replacen(prefix, request, 1);
    format!("{key}:{}", Uuid::new_v4()).into()
}

/// Returns the key of the note of an owner that holds the lock with this name, in the lock's slot.
pub(crate) fn note_key(lock: &str, owner: &str) -> Arc<str> {
    let [prefix, colon, open, name, close] = derived(NOTE, lock);
    [prefix, colon, open, name, close, ":", owner]
        .concat()
        .into()
}

/// A checked lock name, with the client's prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LockName(Arc<str>);

impl LockName {
    /// Checks a name: it is not empty, not too long, not a key that locks derive, and in one
    /// cluster slot with all its derived keys.
    pub(crate) fn new(prefix: &str, name: &str, max_len: usize) -> Result<Self, Error> {
        let full = format!("{prefix}{name}");
        let refuse = |reason: String| {
            Err(Error::InvalidName {
                name: full.clone(),
                reason,
            })
        };
        if name.is_empty() {
            return refuse("it is empty; give it at least one character".into());
        }
        if full.len() > max_len {
            return refuse(format!(
                "{} bytes are more than the limit of {max_len}; use a shorter name",
                full.len()
            ));
        }
        if RESERVED.iter().any(|prefix| full.starts_with(prefix))
            || full.contains(":rwlock_timeout:")
            || full.contains('{') && full.ends_with(PERMIT_LEASES)
        {
            return refuse(
                "it is reserved: locks store their own keys under such names; use another name"
                    .into(),
            );
        }
        let channel = channel_parts(&full).concat();
        if hash_tag(&full) != hash_tag(&channel)
            || full.find('}') < full.find('{') && full.contains('}')
        {
            return refuse(
                "its braces would put the lock and its derived keys into different cluster slots; \
                 use no braces, or one pair around a part that is not empty"
                    .into(),
            );
        }
        Ok(Self(full.into()))
    }

    /// Checks the key of a guarded value, which must also differ from the records of signal locks.
    pub(crate) fn guarded(key: &str, max_len: usize) -> Result<Self, Error> {
        Self::new("", key, max_len)?.with_keys()?.not_of_signals()
    }

    /// Checks that the name differs from the records of signal locks: for keys that a signal lock of
    /// that name would take for its own.
    pub(crate) fn not_of_signals(self) -> Result<Self, Error> {
        if self.0.starts_with(SIGNAL_RECORD) {
            return Err(Error::InvalidName {
                name: self.0.to_string(),
                reason: "signal locks are stored under such names; use another name".into(),
            });
        }
        Ok(self)
    }

    /// Checks that the name can have further keys next to its record: `{x}` would share those of
    /// `x`.
    pub(crate) fn with_keys(self) -> Result<Self, Error> {
        match self
            .0
            .strip_prefix('{')
            .and_then(|rest| rest.strip_suffix('}'))
        {
            Some(inner) if !inner.contains('{') => Err(Error::InvalidName {
                name: self.0.to_string(),
                reason: format!(
                    "its derived keys would be those of {inner:?}; put something before or after the braces"
                ),
            }),
            _ => Ok(self),
        }
    }

    /// Checks that the name has a hash tag, so that keys with another prefix are in its slot.
    pub(crate) fn with_tag(self) -> Result<Self, Error> {
        if hash_tag(&self.0) != &*self.0 {
            return Ok(self);
        }
        Err(Error::InvalidName {
            name: self.0.to_string(),
            reason: "in a cluster the two keys of a signal lock must be in one slot; put a part of the name into braces, as \
                     in orders:{7}"
                .into(),
        })
    }

    /// Checks that the name has no braces: Redisson puts that of a latch in braces, whatever it is.
    pub(crate) fn without_braces(self) -> Result<Self, Error> {
        if !self.0.contains(['{', '}']) {
            return Ok(self);
        }
        Err(Error::InvalidName {
            name: self.0.to_string(),
            reason: "Redisson puts the name of a latch in braces; use a name without them".into(),
        })
    }

    pub(crate) fn as_arc(&self) -> &Arc<str> {
        &self.0
    }

    /// Returns the pub/sub channel of a plain lock.
    pub(crate) fn channel(&self) -> Arc<str> {
        channel_parts(&self.0).concat().into()
    }

    /// Returns a further key or channel of this lock, in its slot.
    pub(crate) fn derived(&self, prefix: &str) -> Arc<str> {
        derived(prefix, &self.0).concat().into()
    }
}

impl LockName {
    /// Returns `{name}:suffix`, or `name:suffix` if the name already has braces.
    pub(crate) fn with_suffix(&self, suffix: &str) -> Arc<str> {
        let name = &self.0;
        if name.contains('{') {
            format!("{name}:{suffix}").into()
        } else {
            format!("{{{name}}}:{suffix}").into()
        }
    }
}

/// Returns the parts of [`LockName::channel`], in order, for writing without an allocation.
pub(crate) fn channel_parts(name: &str) -> [&str; 5] {
    derived("redisson_lock__channel", name)
}

/// Returns the parts of `prefix:{name}`, or of `prefix:name` if the name already has braces. Like
/// Redisson, it tests for `{` only.
fn derived<'a>(prefix: &'a str, name: &'a str) -> [&'a str; 5] {
    let (open, close) = if name.contains('{') {
        ("", "")
    } else {
        ("{", "}")
    };
    [prefix, ":", open, name, close]
}

/// Returns the cluster slot of a key.
/// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#key-distribution-model>
pub(crate) fn slot_of(key: &str) -> u16 {
    State::<XMODEM>::calculate(hash_tag(key).as_bytes()) % SLOTS
}

/// Returns the part of a key that decides its cluster slot: the text between the first `{` and the
/// next `}`, or the whole key if there is none or it is empty.
/// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags>
fn hash_tag(key: &str) -> &str {
    key.split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty())
        .unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str) -> Result<LockName, Error> {
        LockName::new("", name, 1024)
    }

    /// The first is the specification's example; a server says the others.
    #[test]
    fn slots_are_the_servers() {
        for (key, slot) in [("123456789", 0x31c3 % SLOTS), ("foo", 12_182), ("", 0)] {
            assert_eq!(slot_of(key), slot, "{key}");
        }
        assert_eq!(slot_of("redisson_lock__channel:{foo}"), slot_of("foo"));
    }

    #[test]
    fn channels_are_redissons() {
        assert_eq!(
            &*check("orders:7").unwrap().channel(),
            "redisson_lock__channel:{orders:7}"
        );
        assert_eq!(
            &*check("{test}:abc:key").unwrap().channel(),
            "redisson_lock__channel:{test}:abc:key"
        );
    }

    /// R54, R107: every derived key is in the slot of the record. H10: names that would split are
    /// rejected.
    #[test]
    fn r54_r107_h10_braces_never_split_the_slots() {
        for good in [
            "a", "a:b", "{a}", "{a}b", "x{a}y", "{a}{b}", "{a}}", "ä\0\r\n",
        ] {
            let name = check(good).unwrap();
            assert_eq!(hash_tag(good), hash_tag(&name.channel()), "{good:?}");
        }
        for bad in ["{", "}", "a{b", "a}b", "{}a", "}{", "}a{b}", "{}"] {
            assert!(
                matches!(check(bad), Err(Error::InvalidName { .. })),
                "{bad:?}"
            );
        }
    }

    /// H11: a lock must not have the name of a key that locks derive.
    #[test]
    fn h11_reserved_names_are_refused() {
        for bad in [
            "redisson_lock_queue:{x}",
            "redisson_lock__channel:{x}",
            "nestlock_fence:{x}",
            "nestlock_fair_seen:{x}",
            "{x}:1:rwlock_timeout:1",
        ] {
            assert!(
                matches!(check(bad), Err(Error::InvalidName { .. })),
                "{bad:?}"
            );
        }
        // the prefix counts as part of the name
        for (prefix, name) in [
            ("lock-", "signal:x"),
            ("lock-signal:", "x"),
            ("redisson", "_x"),
            ("", "lock-signal:x"),
        ] {
            assert!(
                matches!(
                    LockName::new(prefix, name, 1024),
                    Err(Error::InvalidName { .. })
                ),
                "{prefix:?} {name:?}"
            );
        }
        assert!(check("lock:x").is_ok() && LockName::guarded("lock:x", 1024).is_err());
    }

    #[test]
    fn x_in_braces_may_not_share_the_further_keys_of_x() {
        assert_eq!(
            check("x").unwrap().channel(),
            check("{x}").unwrap().channel()
        );
        assert!(
            check("{x}").unwrap().with_keys().is_err() && LockName::guarded("{x}", 1024).is_err()
        );
        for good in ["x", "{x}y", "y{x}", "{x}{y}"] {
            assert_eq!(&**check(good).unwrap().with_keys().unwrap().as_arc(), good);
        }
    }

    /// Keys that begin differently are in the same slot when their name has a hash tag.
    #[test]
    fn a_differently_prefixed_key_shares_the_slot_of_a_tagged_name() {
        assert!(check("x").unwrap().with_tag().is_err());
        for good in ["{x}", "x{y}z"] {
            let name = check(good).unwrap().with_tag().unwrap();
            assert_eq!(
                hash_tag(&format!("lock-signal:{}", name.as_arc())),
                hash_tag(&format!("lock:{}", name.as_arc()))
            );
        }
    }

    #[test]
    fn f31_empty_and_over_long_names_are_refused() {
        assert!(check("").is_err());
        assert!(LockName::new("app:", "", 1024).is_err());
        assert!(check(&"x".repeat(1024)).is_ok());
        assert!(check(&"x".repeat(1025)).is_err());
        assert!(LockName::new("app:", &"x".repeat(1021), 1024).is_err());
    }
}
