//! Lock names and what is derived from them: the rules of Redisson, so that both meet at the same keys.

use std::sync::Arc;

use crate::error::Error;

/// What the key of a guarded value's fence begins with.
pub(crate) const FENCE: &str = "nestlock_fence";
/// What stands before a signal lock's name: the key of its record.
pub(crate) const SIGNAL_RECORD: &str = "lock:";
/// The same of the list that wakes its waiters.
pub(crate) const SIGNAL_LIST: &str = "lock-signal:";
/// Keys that locks derive from their names begin with these, but for a signal lock's record: that is a string lock's of
/// that name, for whoever asks for one.
const RESERVED: [&str; 3] = ["redisson_", "nestlock_", SIGNAL_LIST];

/// A lock name that was checked, with the client's prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LockName(Arc<str>);

impl LockName {
    /// Checks a name: not empty, not too long, not one of the keys that locks derive, and of one cluster slot with
    /// everything that is derived from it.
    pub(crate) fn new(prefix: &str, name: &str, max_len: usize) -> Result<Self, Error> {
        let full = format!("{prefix}{name}");
        let refuse = |reason: String| Err(Error::InvalidName { name: full.clone(), reason });
        if name.is_empty() {
            return refuse("it is empty; give it at least one character".into());
        }
        if full.len() > max_len {
            return refuse(format!("{} bytes are more than the limit of {max_len}; use a shorter name", full.len()));
        }
        if RESERVED.iter().any(|prefix| full.starts_with(prefix)) || full.contains(":rwlock_timeout:") {
            return refuse("locks keep their own keys under such names; use another one".into());
        }
        let channel = derived("redisson_lock__channel", &full).concat();
        if hash_tag(&full) != hash_tag(&channel) || full.find('}') < full.find('{') && full.contains('}') {
            return refuse(
                "its braces would put it and what is derived from it into different cluster slots; \
                 use no braces, or one pair around a part that is not empty"
                    .into(),
            );
        }
        Ok(Self(full.into()))
    }

    /// The same for the key of a guarded value, which no lock may be kept at.
    pub(crate) fn guarded(key: &str, max_len: usize) -> Result<Self, Error> {
        if key.starts_with(SIGNAL_RECORD) {
            let reason = "signal locks are kept under such names; use another one".into();
            return Err(Error::InvalidName { name: key.into(), reason });
        }
        Self::new("", key, max_len)?.with_keys()
    }

    /// Checks that it can have further keys beside the record: those of `{x}` would be those of `x`.
    pub(crate) fn with_keys(self) -> Result<Self, Error> {
        match self.0.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            Some(inner) if !inner.contains('{') => Err(Error::InvalidName {
                name: self.0.to_string(),
                reason: format!(
                    "what is kept beside it would be that of {inner:?}; put something before or after the braces"
                ),
            }),
            _ => Ok(self),
        }
    }

    /// Checks that keys which begin with something else are in its slot.
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

    pub(crate) fn as_arc(&self) -> &Arc<str> {
        &self.0
    }

    /// The pub/sub channel of a plain lock.
    pub(crate) fn channel(&self) -> Arc<str> {
        self.channel_parts().concat().into()
    }

    /// The same, to be written one after the other.
    pub(crate) fn channel_parts(&self) -> [&str; 5] {
        derived("redisson_lock__channel", &self.0)
    }

    /// A further key or channel of this lock, in its slot.
    pub(crate) fn derived(&self, prefix: &str) -> Arc<str> {
        derived(prefix, &self.0).concat().into()
    }
}

impl LockName {
    /// `{name}:suffix`, or `name:suffix` where the name has braces already.
    pub(crate) fn with_suffix(&self, suffix: &str) -> Arc<str> {
        let name = &self.0;
        if name.contains('{') { format!("{name}:{suffix}").into() } else { format!("{{{name}}}:{suffix}").into() }
    }
}

/// `prefix:{name}`, or `prefix:name` where the name has braces already (Redisson tests for `{` only).
fn derived<'a>(prefix: &'a str, name: &'a str) -> [&'a str; 5] {
    let (open, close) = if name.contains('{') { ("", "") } else { ("{", "}") };
    [prefix, ":", open, name, close]
}

/// The part of a key that decides its cluster slot: between the first `{` and the next `}`, unless that is empty.
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

    #[test]
    fn channels_are_redissons() {
        assert_eq!(&*check("orders:7").unwrap().channel(), "redisson_lock__channel:{orders:7}");
        assert_eq!(&*check("{test}:abc:key").unwrap().channel(), "redisson_lock__channel:{test}:abc:key");
    }

    /// R54, R107: every derived key is in the slot of the record. H10: names that would split are refused.
    #[test]
    fn r54_r107_h10_braces_never_split_the_slots() {
        for good in ["a", "a:b", "{a}", "{a}b", "x{a}y", "{a}{b}", "{a}}", "ä\0\r\n"] {
            let name = check(good).unwrap();
            assert_eq!(hash_tag(good), hash_tag(&name.channel()), "{good:?}");
        }
        for bad in ["{", "}", "a{b", "a}b", "{}a", "}{", "}a{b}", "{}"] {
            assert!(matches!(check(bad), Err(Error::InvalidName { .. })), "{bad:?}");
        }
    }

    /// H11: a lock may not be named like the keys that locks derive.
    #[test]
    fn h11_reserved_names_are_refused() {
        for bad in [
            "redisson_lock_queue:{x}",
            "redisson_lock__channel:{x}",
            "nestlock_fence:{x}",
            "nestlock_fair_seen:{x}",
            "{x}:1:rwlock_timeout:1",
        ] {
            assert!(matches!(check(bad), Err(Error::InvalidName { .. })), "{bad:?}");
        }
        // the prefix is a part of the name
        for (prefix, name) in [("lock-", "signal:x"), ("lock-signal:", "x"), ("redisson", "_x"), ("", "lock-signal:x")]
        {
            assert!(matches!(LockName::new(prefix, name, 1024), Err(Error::InvalidName { .. })), "{prefix:?} {name:?}");
        }
        assert!(check("lock:x").is_ok() && LockName::guarded("lock:x", 1024).is_err());
    }

    #[test]
    fn x_in_braces_may_not_share_the_further_keys_of_x() {
        assert_eq!(check("x").unwrap().channel(), check("{x}").unwrap().channel());
        assert!(check("{x}").unwrap().with_keys().is_err() && LockName::guarded("{x}", 1024).is_err());
        for good in ["x", "{x}y", "y{x}", "{x}{y}"] {
            assert_eq!(&**check(good).unwrap().with_keys().unwrap().as_arc(), good);
        }
    }

    #[test]
    fn keys_that_begin_otherwise_are_in_the_slot_of_a_name_with_a_tag() {
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
