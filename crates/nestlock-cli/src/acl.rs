//! `acl`: the rules that a user needs, from the table that the library has.

use std::collections::BTreeSet;

use nestlock::permissions::{CLUSTER, EVERY_CLIENT, FSYNC, KINDS, Permissions, REPLICAS, SENTINEL, rule};
use serde_json::json;

use crate::{
    Failure,
    args::{Acl, For, Server},
    node::text,
    raw::Raw,
    say,
};

/// Below this version HELLO has to be allowed.
const HELLO_IS_FREE: (u64, u64, u64) = (6, 2, 2);

/// Where a pattern has a name between braces.
const NAME: &str = "{{}";
const EVERY_KEY: &str = "~*";
/// Older versions do not understand rules about channels.
const CHANNELS_HAVE_RULES: (u64, u64, u64) = (6, 2, 0);

/// Older ones have no messages by slots.
const SHARDED: (u64, u64, u64) = (7, 0, 0);

/// To look through all keys, and at locks.
const LOOK: &[&str] = &[
    "client|id",
    "client|list",
    "dbsize",
    "get",
    "hgetall",
    "hlen",
    "llen",
    "pttl",
    "pubsub|numsub",
    "scan",
    "strlen",
];
/// What the tools ask besides; `client|id` is fred's.
fn of_tool(tool: For) -> Vec<&'static str> {
    match tool {
        For::Exec => Vec::new(),
        For::Force => vec!["client|id"],
        For::Ls => LOOK.to_vec(),
        // and to hear of releases
        For::Top => [LOOK, &["psubscribe"]].concat(),
        For::Who => vec!["client|id", "client|list"],
        For::Doctor => vec!["client|id", "config|get", "del"],
        For::Bench => vec!["client|id", "client|list", "script|load", "hset", "del"],
    }
}

/// Behind sentinels, or one of several addresses.
const ROLE: &str = "role";

/// What is asked at a sentinel besides, by the same client as at the servers.
fn at_sentinel(tool: For) -> &'static [&'static str] {
    if tool == For::Doctor { &["client|id", "info", "sentinel|masters"] } else { &[] }
}

/// The parts of the table that are needed.
fn parts(acl: &Acl, is_cluster: bool) -> Vec<Permissions> {
    if acl.sentinel {
        return vec![SENTINEL];
    }
    let asked: BTreeSet<&str> = acl.kinds.iter().map(|kind| kind.permissions()).collect();
    // whoever forces a lock, or looks whether all kinds work, has to do with each
    let all = acl.kinds.is_empty() || acl.tool.is_some_and(|tool| tool != For::Exec);
    let mut parts = vec![EVERY_CLIENT];
    parts.extend(KINDS.into_iter().filter(|kind| all || asked.contains(kind.what)));
    let besides = [(is_cluster, CLUSTER), (acl.replicas, REPLICAS), (acl.fsync, FSYNC)];
    parts.extend(besides.into_iter().filter_map(|(is_wanted, part)| is_wanted.then_some(part)));
    parts
}

pub(crate) async fn acl(server: &Server, acl: &Acl) -> Result<u8, Failure> {
    let (is_cluster, is_looked_for) = server.is_cluster_or_service()?;
    let is_cluster = is_cluster || acl.cluster;
    let parts = parts(acl, is_cluster);
    let of = |what: fn(&Permissions) -> &'static [&'static str]| -> Vec<String> {
        let mut seen = BTreeSet::new();
        // a name with a tag of its own gets no braces around it
        let tagged = |pattern: &str| (is_cluster && pattern.contains(NAME)).then(|| pattern.replacen(NAME, "{}", 1));
        let patterns = |pattern: &&str| [Some((*pattern).to_owned()), tagged(pattern)].into_iter().flatten();
        let all = parts.iter().flat_map(|part| what(part).iter().flat_map(patterns));
        all.map(|pattern| rule(&pattern, &server.prefix)).filter(|pattern| seen.insert(pattern.clone())).collect()
    };
    let (mut keys, channels) = (of(|part| part.keys), of(|part| part.channels));
    // without a prefix, each key is a lock's: a server takes no other pattern beside that
    if keys.iter().any(|pattern| pattern == EVERY_KEY) {
        keys = vec![EVERY_KEY.to_owned()];
    }
    let mut commands: BTreeSet<String> =
        parts.iter().flat_map(|part| part.commands).map(|word| (*word).to_owned()).collect();
    let of_tool = match acl.tool {
        Some(tool) if acl.sentinel => at_sentinel(tool).to_vec(),
        tool => tool.map(of_tool).unwrap_or_default(),
    };
    commands.extend(of_tool.into_iter().map(str::to_owned));
    if is_looked_for && !acl.sentinel {
        commands.insert(ROLE.into());
    }
    let version = if acl.for_server { Some(version(server).await?) } else { None };
    if version.is_some_and(|version| version < HELLO_IS_FREE) {
        commands.insert("hello".into());
    }
    // what a server does not know, it takes no rule about
    if version.is_some_and(|version| version < SHARDED) {
        commands.retain(|command| !["spublish", "ssubscribe", "sunsubscribe"].contains(&&**command));
    }
    if acl.json {
        say(json!({ "v": 1, "user": acl.user, "keys": keys, "channels": channels, "commands": commands }));
        return Ok(0);
    }
    let mut words =
        vec!["ACL".into(), "SETUSER".into(), acl.user.clone(), "on".into(), ">PASSWORD".into(), "resetkeys".into()];
    words.extend(keys);
    // there are no rules about channels before; from then on all may hear all, up to version 7
    if version.is_none_or(|version| version >= CHANNELS_HAVE_RULES) {
        words.push("resetchannels".into());
        words.extend(channels);
    }
    words.extend(commands.iter().map(|command| format!("+{command}")));
    let words: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    say(words.join(" "));
    Ok(0)
}

/// For a shell, where `*`, `&` and `>` mean something.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-_:.,|/@".contains(&byte) && byte != b'|';
    if word.bytes().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

async fn version(server: &Server) -> Result<(u64, u64, u64), Failure> {
    let raw = Raw::connect(server).await?;
    // rules are for all of them
    let said = raw.ask_each(&raw.masters(), &["INFO", "server"]).await;
    let said: Result<Vec<_>, _> = said.into_iter().collect();
    let said = said.map_err(|error| error.details().to_owned())?;
    Ok(said.iter().map(|info| version_of(&text(info).unwrap_or_default())).min().unwrap_or_default())
}

/// The version of Redis whose commands it has.
pub(crate) fn version_of(info: &str) -> (u64, u64, u64) {
    let said = info.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap_or_default();
    let mut numbers = said.trim().split('.').map(|number| number.parse().unwrap_or(0));
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
        assert_eq!(version_of("# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n"), (6, 2, 14));
        assert_eq!(version_of("nothing"), (0, 0, 0));
    }
}
