//! The ACL rules that a client's user needs: those of the [guide's
//! page](crate::guide::permissions), as data.
//!
//! ```
//! let all = nestlock::permissions::KINDS.iter().map(|kind| kind.what);
//! assert_eq!(
//!     all.collect::<Vec<_>>(),
//!     ["fenced", "guarded keys", "fair", "string", "signal", "permits", "fair permits",
//!      "semaphore", "latch", "read-write"],
//! );
//! assert_eq!(nestlock::permissions::rule("~{}", "app:"), "~app:*");
//! ```

/// The rules that one part of nestlock needs. In keys and channels, `{}` stands for the beginning
/// of lock names: see [`rule`].
///
/// ```
/// use nestlock::permissions::{EVERY_CLIENT, rule};
///
/// let keys = EVERY_CLIENT.keys.iter().map(|key| rule(key, "app:"));
/// let commands = EVERY_CLIENT.commands.iter().map(|command| format!("+{command}"));
/// let rules: Vec<String> = keys.chain(commands).collect();
/// assert!(rules.join(" ").starts_with("~app:* +evalsha +eval "));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Permissions {
    /// The part that needs them, such as `fair`.
    pub what: &'static str,
    /// Patterns of keys, such as `~redisson_lock_queue:{{}`.
    pub keys: &'static [&'static str],
    /// Patterns of channels.
    pub channels: &'static [&'static str],
    /// Commands, without the `+`.
    pub commands: &'static [&'static str],
}

/// What every client needs. The reentrant lock, and the kinds that use only its record, need no
/// more.
pub const EVERY_CLIENT: Permissions = Permissions {
    what: "reentrant",
    keys: &["~{}"],
    channels: &["&redisson_lock__channel:{{}"],
    commands: &[
        "evalsha",
        "eval",
        "hset",
        "hmget",
        "hlen",
        "hgetall",
        "hdel",
        "del",
        "pexpire",
        "pttl",
        "publish",
        "subscribe",
        "unsubscribe",
        "ping",
        "info",
    ],
};

/// What each user of a cluster needs in addition; the last four commands are for sharded messages
/// only ([`Messages`](crate::Messages)).
pub const CLUSTER: Permissions = Permissions {
    what: "cluster",
    keys: &[],
    channels: &[],
    commands: &[
        "cluster|slots",
        "cluster|info",
        "asking",
        "pubsub|shardnumsub",
        "spublish",
        "ssubscribe",
        "sunsubscribe",
    ],
};

/// What a user needs on the sentinels. Nothing else in this module is needed there.
pub const SENTINEL: Permissions = Permissions {
    what: "at each sentinel",
    keys: &[],
    channels: &["&+switch-master"],
    commands: &["ping", "sentinel|get-master-addr-by-name", "subscribe"],
};

/// What [`LockClientBuilder::replicas`](crate::LockClientBuilder::replicas) needs in addition.
pub const REPLICAS: Permissions = Permissions {
    what: "replicas",
    keys: &[],
    channels: &[],
    commands: &["wait"],
};

/// What [`LockClientBuilder::fsync`](crate::LockClientBuilder::fsync) needs in addition.
pub const FSYNC: Permissions = Permissions {
    what: "fsync",
    keys: &[],
    channels: &[],
    commands: &["waitaof"],
};

/// What [`AcquireOptions::note`](crate::AcquireOptions::note) and
/// [`Lock::notes`](crate::Lock::notes) need in addition.
pub const NOTES: Permissions = Permissions {
    what: "notes",
    keys: &["~nestlock_note:{{}"],
    channels: &[],
    commands: &["get", "set"],
};

/// What the scripts of permits send: those of semaphores, too.
const COUNTED: &[&str] = &[
    "get",
    "incrby",
    "set",
    "time",
    "zadd",
    "zcard",
    "zcount",
    "zmscore",
    "zrangebyscore",
    "zrem",
    "zremrangebyscore",
    "zscore",
];

/// What some kinds need in addition.
pub const KINDS: [Permissions; 10] = [
    Permissions {
        what: "fenced",
        keys: &["~redisson_lock_token:{{}"],
        channels: &[],
        commands: &["get", "set", "incr", "time"],
    },
    Permissions {
        what: "guarded keys",
        keys: &["~nestlock_fence:{{}"],
        channels: &[],
        commands: &["get", "set", "mset", "strlen"],
    },
    Permissions {
        what: "fair",
        keys: &[
            "~redisson_lock_queue:{{}",
            "~redisson_lock_timeout:{{}",
            "~nestlock_fair_seen:{{}",
        ],
        channels: &[],
        commands: &[
            "hget",
            "hexists",
            "hkeys",
            "lindex",
            "llen",
            "lpos",
            "lrange",
            "lrem",
            "ltrim",
            "rpush",
            "time",
            "zadd",
            "zcard",
            "zmscore",
            "zrangebyscore",
            "zrem",
            "zscore",
        ],
    },
    Permissions {
        what: "string",
        keys: &["~nestlock_fence:{{}"],
        channels: &[],
        commands: &["get", "set", "exists"],
    },
    Permissions {
        what: "signal",
        keys: &["~lock:{}", "~lock-signal:{}"],
        channels: &[],
        commands: &["get", "set", "lpush", "ltrim", "expire", "blpop", "scan"],
    },
    Permissions {
        what: "permits",
        keys: &["~{{}"],
        channels: &["&redisson_sc:{{}"],
        commands: COUNTED,
    },
    Permissions {
        what: "fair permits",
        keys: &[
            "~{{}",
            "~nestlock_permits_queue:{{}",
            "~nestlock_permits_seen:{{}",
        ],
        channels: &["&redisson_sc:{{}"],
        commands: &[
            "get",
            "incrby",
            "set",
            "time",
            "zadd",
            "zcard",
            "zcount",
            "zmscore",
            "zrange",
            "zrangebyscore",
            "zrank",
            "zrem",
            "zremrangebyscore",
            "zscore",
        ],
    },
    Permissions {
        what: "semaphore",
        keys: &[
            "~nestlock_semaphore_leases:{{}",
            "~nestlock_semaphore_request:{{}",
        ],
        channels: &["&redisson_sc:{{}"],
        commands: COUNTED,
    },
    Permissions {
        what: "latch",
        keys: &["~nestlock_latch_callers:{{}", "~nestlock_latch_request:{{}"],
        channels: &["&redisson_countdownlatch__channel__{{}"],
        commands: &["get", "getex", "set"],
    },
    Permissions {
        what: "read-write",
        keys: &[
            "~{{}",
            "~nestlock_rwlock_intent:{{}",
            "~nestlock_rwlock_readers:{{}",
        ],
        channels: &["&redisson_rwlock:{{}"],
        commands: &[
            "exists",
            "get",
            "hget",
            "hexists",
            "hgetall",
            "hkeys",
            "hrandfield",
            "set",
            "time",
            "zadd",
            "zcard",
            "zcount",
            "zrangebyscore",
            "zrem",
            "zremrangebyscore",
            "zscore",
        ],
    },
];

/// Returns a pattern of keys or channels for lock names that begin with `prefix`.
///
/// For an example, see [`Permissions`].
#[must_use]
pub fn rule(pattern: &str, prefix: &str) -> String {
    pattern.replacen("{}", &format!("{prefix}*"), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brace_of_the_name_stays() {
        assert_eq!(
            rule("~redisson_lock_queue:{{}", "app:"),
            "~redisson_lock_queue:{app:*"
        );
    }

    /// The guide's tables list the same rules.
    #[test]
    fn the_guide_says_the_same() {
        let page = include_str!("guide/permissions.md");
        let words = |row: &str| -> Vec<String> {
            let code = row.split('`').skip(1).step_by(2);
            let rules = code
                .flat_map(str::split_whitespace)
                .filter(|word| word.starts_with(['~', '&', '+']));
            let mut words: Vec<_> = rules.map(|word| word.replace('\\', "")).collect();
            words.sort_unstable();
            words
        };
        let of = |permissions: &Permissions| {
            let patterns = permissions
                .keys
                .iter()
                .chain(permissions.channels)
                .map(|pattern| rule(pattern, "app:"));
            let mut all: Vec<String> = patterns
                .chain(
                    permissions
                        .commands
                        .iter()
                        .map(|command| format!("+{command}")),
                )
                .collect();
            all.sort_unstable();
            all
        };
        for kind in KINDS.into_iter().chain([CLUSTER, REPLICAS, FSYNC, NOTES]) {
            let row = page
                .lines()
                .find(|line| line.starts_with(&format!("| {}", kind.what)))
                .unwrap();
            assert_eq!(words(row), of(&kind), "{}", kind.what);
        }
        let sentinel = page
            .lines()
            .find(|line| line.starts_with(&format!("| {}", SENTINEL.what)))
            .unwrap();
        let mut said = words(sentinel);
        said.retain(|word| !["+client|id", "+hello"].contains(&&**word));
        assert_eq!(said, of(&SENTINEL));
        let first = page.split("| kind |").next().unwrap();
        let rows: Vec<&str> = first
            .lines()
            .filter(|line| line.starts_with("| ") && line.contains('`'))
            .collect();
        let mut said: Vec<String> = rows.iter().flat_map(|row| words(row)).collect();
        // these depend on the URL and on the version of the server
        said.retain(|word| !["+client|id", "+select", "+hello"].contains(&&**word));
        said.sort_unstable();
        assert_eq!(said, of(&EVERY_CLIENT));
    }
}
