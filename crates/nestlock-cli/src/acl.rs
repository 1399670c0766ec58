//! `acl`: prints the rules that a user needs, from the table of the library.

use std::collections::BTreeSet;

use nestlock::permissions::{
    CLUSTER, EVERY_CLIENT, FSYNC, KINDS, NOTES, Permissions, REPLICAS, SENTINEL, rule,
};
use serde_json::json;

use crate::{
    args::{Acl, For, Server},
    failure::Failure,
    kind::Kind,
    node::text,
    raw::Raw,
    stdout::say,
};

/// Older versions need a rule for HELLO.
const HELLO_IS_FREE: (u64, u64, u64) = (6, 2, 2);

/// How a pattern writes a name between braces.
const NAME: &str = "{{}";
/// Marks a key that is only read.
const READ: &str = "%R";
const EVERY_KEY: &str = "~*";
/// The name in the table for the keys of [`fenced_key`](nestlock::LockClient::fenced_key).
const GUARDED: &str = "guarded keys";
/// The name in the table for latches.
pub(crate) const LATCH: &str = "latch";
/// Older versions do not know rules for channels.
const CHANNELS_HAVE_RULES: (u64, u64, u64) = (6, 2, 0);

/// Older versions have no sharded messages, and no rules for keys that are only read.
const SHARDED: (u64, u64, u64) = (7, 0, 0);
const SHARDED_MESSAGES: [&str; 3] = ["spublish", "ssubscribe", "sunsubscribe"];

/// What a task needs, as in the [`Permissions`] of the library.
#[derive(Debug, Clone, Copy)]
struct Part {
    keys: &'static [&'static str],
    channels: &'static [&'static str],
    commands: &'static [&'static str],
}

impl From<Permissions> for Part {
    fn from(
        Permissions {
            keys,
            channels,
            commands,
            ..
        }: Permissions,
    ) -> Self {
        Self {
            keys,
            channels,
            commands,
        }
    }
}

/// To read records, and the keys that belong to them. fred sends `client|id`.
const READS: Part = Part {
    keys: &[
        "%R~{}",
        "%R~lock:{}",
        "%R~nestlock_note:{{}",
        "%R~nestlock_semaphore_leases:{{}",
        "%R~redisson_lock_queue:{{}",
        "%R~redisson_lock_token:{{}",
        "%R~{{}",
    ],
    channels: &[],
    commands: &[
        "client|id",
        "get",
        "hgetall",
        "hlen",
        "info",
        "llen",
        "ping",
        "pttl",
        "strlen",
        "time",
        "zcard",
        "zrange",
    ],
};
/// To scan all keys, and count the subscribers.
const LOOKS: Part = Part {
    keys: &[],
    channels: &[],
    commands: &["pubsub|numsub", "scan"],
};
/// To count the keys before a scan without a prefix.
const COUNTS: Part = Part {
    keys: &[],
    channels: &[],
    commands: &["dbsize"],
};
/// To list the connections of all clients.
const PEOPLE: Part = Part {
    keys: &[],
    channels: &[],
    commands: &["client|list"],
};
/// To subscribe to releases; `publish` tests the subscription.
const LISTENS: Part = Part {
    keys: &[],
    channels: &[
        "&redisson_lock__channel:{{}",
        "&redisson_rwlock:{{}",
        "&redisson_sc:{{}",
    ],
    commands: &["psubscribe", "publish"],
};
/// To free a lock of any kind: all holds, or those of one owner.
const FREES: Part = Part {
    keys: &[
        "~{}",
        "~lock:{}",
        "~lock-signal:{}",
        "~nestlock_fair_seen:{{}",
        "~nestlock_fence:{{}",
        "~nestlock_rwlock_intent:{{}",
        "~nestlock_rwlock_readers:{{}",
        "~nestlock_semaphore_leases:{{}",
        "~redisson_lock_queue:{{}",
        "~redisson_lock_timeout:{{}",
        "~{{}",
    ],
    channels: &[
        "&redisson_lock__channel:{{}",
        "&redisson_rwlock:{{}",
        "&redisson_sc:{{}",
    ],
    commands: &[
        "del",
        "eval",
        "evalsha",
        "exists",
        "hdel",
        "hexists",
        "hget",
        "hkeys",
        "hmget",
        "hrandfield",
        "hset",
        "incrby",
        "lindex",
        "lpush",
        "lrem",
        "ltrim",
        "pexpire",
        "publish",
        "set",
        "time",
        "zcard",
        "zcount",
        "zmscore",
        "zrangebyscore",
        "zrem",
        "zremrangebyscore",
        "zscore",
    ],
};
/// What `doctor` sends and cleans up in addition to its locks.
const EXAMINES: Part = Part {
    keys: &[],
    channels: &[],
    commands: &["client|id", "config|get", "del", "wait"],
};
/// What `bench` sends in addition to its locks.
const MEASURES: Part = Part {
    keys: &[],
    channels: &[],
    commands: &["client|id", "client|list", "del", "hset", "script|load"],
};

/// Needed behind sentinels, and with several addresses.
const ROLE: &str = "role";

/// Returns what is also sent to a sentinel, by the same client as to the servers.
fn at_sentinel(tool: For) -> &'static [&'static str] {
    if tool == For::Doctor {
        &["client|id", "info", "sentinel|masters"]
    } else {
        &[]
    }
}

/// Returns the permissions that are needed.
fn parts(acl: &Acl, is_cluster: bool, prefix: &str) -> Vec<Part> {
    if acl.sentinel {
        return vec![SENTINEL.into()];
    }
    let asked: BTreeSet<&str> = acl
        .kinds
        .iter()
        .flat_map(|kind| kind.permissions())
        .copied()
        .collect();
    let is_asked = |kind: &Permissions| asked.is_empty() || asked.contains(kind.what);
    // none of the tools uses guarded keys, or latches
    let locks = || {
        let unused = [GUARDED, LATCH];
        KINDS
            .into_iter()
            .filter(move |kind| !unused.contains(&kind.what))
    };
    let mut parts: Vec<Part> = match acl.tool {
        None => [EVERY_CLIENT]
            .into_iter()
            .chain(KINDS.into_iter().filter(is_asked))
            .map(Part::from)
            .collect(),
        Some(For::Exec) => [EVERY_CLIENT]
            .into_iter()
            .chain(locks().filter(is_asked))
            .map(Part::from)
            .collect(),
        Some(For::Ls) => vec![READS, LOOKS],
        Some(For::Who) => vec![READS, PEOPLE],
        Some(For::Force) => vec![READS, FREES],
        Some(For::Top) => vec![READS, LOOKS, PEOPLE, LISTENS, FREES],
        Some(For::Doctor) => [EVERY_CLIENT.into(), EXAMINES]
            .into_iter()
            .chain(locks().filter(is_asked).map(Part::from))
            .collect(),
        Some(For::Bench) => {
            let fair = KINDS
                .into_iter()
                .filter(|kind| Kind::Fair.permissions().contains(&kind.what));
            [EVERY_CLIENT.into(), MEASURES]
                .into_iter()
                .chain(fair.map(Part::from))
                .collect()
        }
    };
    if prefix.is_empty() && matches!(acl.tool, Some(For::Ls | For::Top)) {
        parts.push(COUNTS);
    }
    // of the tools, only `exec` waits for replicas and writes notes, and none waits for the disk
    let waits = (
        matches!(acl.tool, None | Some(For::Exec)),
        acl.tool.is_none(),
    );
    let further = [
        (is_cluster, CLUSTER),
        (acl.replicas && waits.0, REPLICAS),
        (acl.fsync && waits.1, FSYNC),
        (acl.notes && waits.0, NOTES),
    ];
    parts.extend(
        further
            .into_iter()
            .filter(|(is_wanted, _)| *is_wanted)
            .map(|(_, part)| Part::from(part)),
    );
    parts
}

/// Returns patterns and commands of those parts that a tool does not need.
fn superfluous(tool: Option<For>) -> &'static [&'static str] {
    match tool {
        // these publish nothing
        Some(For::Ls | For::Who) => &SHARDED_MESSAGES,
        // it frees nothing by force, and resets nothing
        Some(For::Exec) => &[
            "scan",
            "~nestlock_fence:{{}",
            "~nestlock_semaphore_request:{{}",
        ],
        // as for `exec`; also, it tries no semaphore and no fair permits, and its locks have no other
        // clients: no queue advances, no reader blocks a writer, and no second token is issued
        Some(For::Doctor) => &[
            "scan",
            "~nestlock_fence:{{}",
            "~nestlock_permits_queue:{{}",
            "~nestlock_permits_seen:{{}",
            "~nestlock_semaphore_leases:{{}",
            "~nestlock_semaphore_request:{{}",
            "blpop",
            "exists",
            "expire",
            "hkeys",
            "hrandfield",
            "incr",
            "llen",
            "lpos",
            "lrange",
            "lrem",
            "ltrim",
            "rpush",
            "zcount",
            "zrange",
            "zrangebyscore",
            "zrank",
            "zremrangebyscore",
        ],
        // it never reads the owner of a lock, and none of its waiters dies
        Some(For::Bench) => &["hgetall", "ltrim"],
        _ => &[],
    }
}

pub(crate) async fn acl(server: &Server, acl: &Acl) -> Result<u8, Failure> {
    let (is_cluster, is_looked_for) = server.is_cluster_or_service()?;
    let is_cluster = is_cluster || acl.cluster;
    let version = if acl.for_server {
        Some(version(server).await?)
    } else {
        None
    };
    let (parts, superfluous) = (
        parts(acl, is_cluster, &server.prefix),
        superfluous(acl.tool),
    );
    let of = |what: fn(&Part) -> &'static [&'static str]| -> Vec<String> {
        let mut seen = BTreeSet::new();
        // a name with a hash tag of its own gets no braces around it; the scratch locks of kinds
        // with braces have no such names
        let are_tagged = is_cluster && !matches!(acl.tool, Some(For::Doctor | For::Bench));
        let tagged = |pattern: &str| {
            (are_tagged && pattern.contains(NAME)).then(|| pattern.replacen(NAME, "{}", 1))
        };
        let patterns = |pattern: &&str| {
            [Some((*pattern).to_owned()), tagged(pattern)]
                .into_iter()
                .flatten()
        };
        let of_part = |part: &Part| {
            what(part)
                .iter()
                .filter(|pattern| !superfluous.contains(pattern))
        };
        let all = parts
            .iter()
            .flat_map(|part| of_part(part).flat_map(patterns));
        all.map(|pattern| rule(&pattern, &server.prefix))
            .filter(|pattern| seen.insert(pattern.clone()))
            .collect()
    };
    let (mut keys, channels) = (of(|part| part.keys), of(|part| part.channels));
    // writing includes reading, and older servers have no rule for keys that are only read
    let written = keys.clone();
    let is_old = version.is_some_and(|version| version < SHARDED);
    keys.retain(|pattern| {
        pattern
            .strip_prefix(READ)
            .is_none_or(|plain| !written.iter().any(|other| other == plain))
    });
    if is_old {
        for pattern in &mut keys {
            *pattern = pattern.trim_start_matches(READ).to_owned();
        }
    }
    // without a prefix this covers each key, and a server accepts no other pattern next to it
    if let Some(every) = keys
        .iter()
        .find(|pattern| pattern.trim_start_matches(READ) == EVERY_KEY)
    {
        keys = vec![every.clone()];
    }
    let words = parts
        .iter()
        .flat_map(|part| part.commands)
        .filter(|word| !superfluous.contains(word));
    let mut commands: BTreeSet<String> = words.map(|word| (*word).to_owned()).collect();
    let at_sentinel = acl
        .tool
        .filter(|_| acl.sentinel)
        .map(at_sentinel)
        .unwrap_or_default();
    commands.extend(at_sentinel.iter().map(|command| (*command).to_owned()));
    if is_looked_for && !acl.sentinel {
        commands.insert(ROLE.into());
    }
    if version.is_some_and(|version| version < HELLO_IS_FREE) {
        commands.insert("hello".into());
    }
    // a server accepts no rule for a command that it does not know
    if is_old {
        commands.retain(|command| !SHARDED_MESSAGES.contains(&&**command));
    }
    if acl.json {
        say(
            json!({ "v": 1, "user": acl.user, "keys": keys, "channels": channels, "commands": commands }),
        );
        return Ok(0);
    }
    let mut words = vec![
        "ACL".into(),
        "SETUSER".into(),
        acl.user.clone(),
        "on".into(),
        ">PASSWORD".into(),
        "resetkeys".into(),
    ];
    words.extend(keys);
    // older versions have no rules for channels; from then on, until version 7, a new user may use
    // all channels
    if version.is_none_or(|version| version >= CHANNELS_HAVE_RULES) {
        words.push("resetchannels".into());
        words.extend(channels);
    }
    words.extend(commands.iter().map(|command| format!("+{command}")));
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    say(words.join(" "));
    Ok(0)
}

/// Quotes a word for a shell, where `*`, `&` and `>` have a meaning.
fn quoted(word: &str) -> String {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || b"+-_:.,|/@".contains(&byte) && byte != b'|';
    if word.bytes().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

async fn version(server: &Server) -> Result<(u64, u64, u64), Failure> {
    let raw = Raw::connect(server).await?;
    // the rules must be valid on all servers
    let said = raw.ask_each(&raw.masters(), &["INFO", "server"]).await;
    let said: Result<Vec<_>, _> = said.into_iter().collect();
    let said = said.map_err(|error| error.details().to_owned())?;
    Ok(said
        .iter()
        .map(|info| version_of(&text(info).unwrap_or_default()))
        .min()
        .unwrap_or_default())
}

/// Returns the version of Redis whose commands the server has.
pub(crate) fn version_of(info: &str) -> (u64, u64, u64) {
    let said = info
        .lines()
        .find_map(|line| line.strip_prefix("redis_version:"))
        .unwrap_or_default();
    let mut numbers = said
        .trim()
        .split('.')
        .map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_each_word_as_it_is() {
        assert_eq!(quoted("+hset"), "+hset");
        assert_eq!(quoted("~app:*"), "'~app:*'");
        assert_eq!(quoted("+client|list"), "'+client|list'");
        assert_eq!(quoted("~it's"), "'~it'\\''s'");
    }

    #[test]
    fn a_version_is_read_off() {
        assert_eq!(
            version_of("# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n"),
            (6, 2, 14)
        );
        assert_eq!(version_of("nothing"), (0, 0, 0));
    }
}
