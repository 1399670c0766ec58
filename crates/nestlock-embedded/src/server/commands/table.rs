//! The table of all commands, and the search for the one that a request names.

use std::{collections::HashMap, sync::LazyLock};

use super::{
    call::Call,
    command::{Command, Flags, Run, ScriptCommand, container, plain, script},
    connection,
    error_text::{shortened, text, wrong_number},
    hashes, keys, lists, pubsub, server, sorted_sets, strings,
};
use crate::server::resp::{Outcome, Reply, Text};

const READ: Flags = Flags::READ;
const WRITE: Flags = Flags::WRITE;
const NO_SCRIPT: Flags = Flags::NO_SCRIPT;
const SUBSCRIBE: Flags = NO_SCRIPT.and(Flags::SUBSCRIBED);
const PAUSED: Flags = Flags::PAUSED;

static TABLE: &[Command] = &[
    // connections
    plain("auth", -2, NO_SCRIPT, connection::auth),
    container("client", CLIENT),
    plain("echo", 2, READ, connection::echo),
    plain("hello", -1, NO_SCRIPT, connection::hello),
    plain("ping", -1, Flags::SUBSCRIBED, connection::ping),
    plain("quit", -1, SUBSCRIBE, connection::quit),
    plain("reset", 1, SUBSCRIBE, connection::reset),
    plain("select", 2, READ, connection::select),
    // the server
    container("command", COMMAND),
    container("config", CONFIG),
    plain("dbsize", 1, READ, server::dbsize),
    plain("flushall", -1, WRITE, server::flushall),
    plain("flushdb", -1, WRITE, server::flushdb),
    plain("info", -1, READ, server::info),
    plain("monitor", 1, NO_SCRIPT, server::monitor),
    plain("time", 1, READ, server::time),
    // keys of any type
    plain("del", -2, WRITE, keys::del),
    plain("exists", -2, READ, keys::exists),
    plain("expire", -3, WRITE, keys::expire),
    plain("expireat", -3, WRITE, keys::expireat),
    plain("expiretime", 2, READ, keys::expiretime),
    plain("keys", 2, READ, keys::keys),
    plain("persist", 2, WRITE, keys::persist),
    plain("pexpire", -3, WRITE, keys::pexpire),
    plain("pexpireat", -3, WRITE, keys::pexpireat),
    plain("pexpiretime", 2, READ, keys::pexpiretime),
    plain("pttl", 2, READ, keys::pttl),
    plain("scan", -2, READ, keys::scan),
    plain("touch", -2, READ, keys::exists),
    plain("ttl", 2, READ, keys::ttl),
    plain("type", 2, READ, keys::type_name),
    plain("unlink", -2, WRITE, keys::del),
    // strings
    plain("append", 3, WRITE, strings::append),
    plain("decr", 2, WRITE, strings::decr),
    plain("decrby", 3, WRITE, strings::decrby),
    plain("get", 2, READ, strings::get),
    plain("getdel", 2, WRITE, strings::getdel),
    plain("getex", -2, WRITE, strings::getex),
    plain("getset", 3, WRITE, strings::getset),
    plain("incr", 2, WRITE, strings::incr),
    plain("incrby", 3, WRITE, strings::incrby),
    plain("mget", -2, READ, strings::mget),
    plain("mset", -3, WRITE, strings::mset),
    plain("msetnx", -3, WRITE, strings::msetnx),
    plain("psetex", 4, WRITE, strings::psetex),
    plain("set", -3, WRITE, strings::set),
    plain("setex", 4, WRITE, strings::setex),
    plain("setnx", 3, WRITE, strings::setnx),
    plain("strlen", 2, READ, strings::strlen),
    // hashes
    plain("hdel", -3, WRITE, hashes::hdel),
    plain("hexists", 3, READ, hashes::hexists),
    plain("hget", 3, READ, hashes::hget),
    plain("hgetall", 2, READ, hashes::hgetall),
    plain("hincrby", 4, WRITE, hashes::hincrby),
    plain("hkeys", 2, READ, hashes::hkeys),
    plain("hlen", 2, READ, hashes::hlen),
    plain("hmget", -3, READ, hashes::hmget),
    plain("hmset", -4, WRITE, hashes::hmset),
    plain("hrandfield", -2, READ, hashes::hrandfield),
    plain("hset", -4, WRITE, hashes::hset),
    plain("hsetnx", 4, WRITE, hashes::hsetnx),
    plain("hstrlen", 3, READ, hashes::hstrlen),
    plain("hvals", 2, READ, hashes::hvals),
    // lists
    plain("blpop", -3, WRITE.and(NO_SCRIPT), lists::blpop),
    plain("brpop", -3, WRITE.and(NO_SCRIPT), lists::brpop),
    plain("lindex", 3, READ, lists::lindex),
    plain("linsert", 5, WRITE, lists::linsert),
    plain("llen", 2, READ, lists::llen),
    plain("lpop", -2, WRITE, lists::lpop),
    plain("lpos", -3, READ, lists::lpos),
    plain("lpush", -3, WRITE, lists::lpush),
    plain("lpushx", -3, WRITE, lists::lpushx),
    plain("lrange", 4, READ, lists::lrange),
    plain("lrem", 4, WRITE, lists::lrem),
    plain("lset", 4, WRITE, lists::lset),
    plain("ltrim", 4, WRITE, lists::ltrim),
    plain("rpop", -2, WRITE, lists::rpop),
    plain("rpush", -3, WRITE, lists::rpush),
    plain("rpushx", -3, WRITE, lists::rpushx),
    // sorted sets
    plain("zadd", -4, WRITE, sorted_sets::zadd),
    plain("zcard", 2, READ, sorted_sets::zcard),
    plain("zcount", 4, READ, sorted_sets::zcount),
    plain("zincrby", 4, WRITE, sorted_sets::zincrby),
    plain("zmscore", -3, READ, sorted_sets::zmscore),
    plain("zpopmax", -2, WRITE, sorted_sets::zpopmax),
    plain("zpopmin", -2, WRITE, sorted_sets::zpopmin),
    plain("zrange", -4, READ, sorted_sets::zrange),
    plain("zrangebyscore", -4, READ, sorted_sets::zrangebyscore),
    plain("zrank", 3, READ, sorted_sets::zrank),
    plain("zrem", -3, WRITE, sorted_sets::zrem),
    plain("zremrangebyrank", 4, WRITE, sorted_sets::zremrangebyrank),
    plain("zremrangebyscore", 4, WRITE, sorted_sets::zremrangebyscore),
    plain("zrevrange", -4, READ, sorted_sets::zrevrange),
    plain("zrevrangebyscore", -4, READ, sorted_sets::zrevrangebyscore),
    plain("zrevrank", 3, READ, sorted_sets::zrevrank),
    plain("zscore", 3, READ, sorted_sets::zscore),
    // publish and subscribe
    plain("psubscribe", -2, SUBSCRIBE, pubsub::psubscribe),
    plain("publish", 3, PAUSED, pubsub::publish),
    container("pubsub", PUBSUB),
    plain("punsubscribe", -1, SUBSCRIBE, pubsub::punsubscribe),
    plain("spublish", 3, PAUSED, pubsub::spublish),
    plain("ssubscribe", -2, SUBSCRIBE, pubsub::ssubscribe),
    plain("subscribe", -2, SUBSCRIBE, pubsub::subscribe),
    plain("sunsubscribe", -1, SUBSCRIBE, pubsub::sunsubscribe),
    plain("unsubscribe", -1, SUBSCRIBE, pubsub::unsubscribe),
    // scripts
    script("eval", -3, NO_SCRIPT.and(PAUSED), ScriptCommand::Eval),
    script("eval_ro", -3, NO_SCRIPT, ScriptCommand::EvalRo),
    script("evalsha", -3, NO_SCRIPT.and(PAUSED), ScriptCommand::EvalSha),
    script("evalsha_ro", -3, NO_SCRIPT, ScriptCommand::EvalShaRo),
    container("script", SCRIPT),
];

const CLIENT: &[Command] = &[
    plain("client|getname", 2, NO_SCRIPT, connection::client_getname),
    plain("client|id", 2, NO_SCRIPT, connection::client_id),
    plain("client|info", 2, NO_SCRIPT, connection::client_info),
    plain("client|kill", -3, NO_SCRIPT, connection::client_kill),
    plain("client|list", -2, NO_SCRIPT, connection::client_list),
    plain("client|no-evict", 3, NO_SCRIPT, connection::client_no_evict),
    plain("client|pause", -3, NO_SCRIPT, connection::client_pause),
    plain("client|setinfo", 4, NO_SCRIPT, connection::client_setinfo),
    plain("client|setname", 3, NO_SCRIPT, connection::client_setname),
    plain("client|unpause", 2, NO_SCRIPT, connection::client_unpause),
];

const COMMAND: &[Command] = &[plain("command|count", 2, READ, command_count)];

const CONFIG: &[Command] = &[
    plain("config|get", -3, NO_SCRIPT, server::config_get),
    plain("config|resetstat", 2, NO_SCRIPT, server::config_resetstat),
];

const PUBSUB: &[Command] = &[
    plain("pubsub|channels", -2, READ, pubsub::channels),
    plain("pubsub|numpat", 2, READ, pubsub::numpat),
    plain("pubsub|numsub", -2, READ, pubsub::numsub),
    plain("pubsub|shardchannels", -2, READ, pubsub::shardchannels),
    plain("pubsub|shardnumsub", -2, READ, pubsub::shardnumsub),
];

const SCRIPT: &[Command] = &[
    script("script|exists", -3, NO_SCRIPT, ScriptCommand::Exists),
    script(
        "script|flush",
        -2,
        NO_SCRIPT.and(PAUSED),
        ScriptCommand::Flush,
    ),
    script("script|kill", 2, NO_SCRIPT, ScriptCommand::Kill),
    script("script|load", 3, NO_SCRIPT.and(PAUSED), ScriptCommand::Load),
];

static BY_NAME: LazyLock<HashMap<&'static str, &'static Command>> = LazyLock::new(|| {
    TABLE
        .iter()
        .map(|command| (command.name, command))
        .collect()
});

fn command_count(_: &mut Call) -> Outcome {
    Ok(Reply::len(TABLE.len()))
}

/// Why a request matches no command.
pub(crate) enum Unfit {
    /// There is no such command or subcommand.
    Unknown(Text),
    /// There are too few or too many words.
    Arity(Text),
}

/// Returns the command that a request names, if the number of words is right.
pub(crate) fn find(args: &[Vec<u8>]) -> Result<&'static Command, Unfit> {
    let lower = |word: &[u8]| String::from_utf8_lossy(word).to_ascii_lowercase();
    let unfit = |command: &Command| Unfit::Arity(wrong_number(command.name).into());
    let Some(command) = BY_NAME.get(lower(&args[0]).as_str()) else {
        return Err(Unfit::Unknown(unknown(args)));
    };
    let Run::Container(subcommands) = command.run else {
        return if command.takes(args.len()) {
            Ok(command)
        } else {
            Err(unfit(command))
        };
    };
    let Some(word) = args.get(1) else {
        return Err(unfit(command));
    };
    let name = lower(word);
    let subcommand = subcommands.iter().find(|sub| {
        sub.name
            .split_once('|')
            .is_some_and(|(_, last)| last == name)
    });
    match subcommand {
        None => {
            let hint = format!("'. Try {} HELP.", command.name.to_ascii_uppercase());
            Err(Unfit::Unknown(text([
                b"ERR unknown subcommand '",
                shortened(word, 128),
                hint.as_bytes(),
            ])))
        }
        Some(subcommand) if !subcommand.takes(args.len()) => Err(unfit(subcommand)),
        Some(subcommand) => Ok(subcommand),
    }
}

fn unknown(args: &[Vec<u8>]) -> Text {
    let mut beginning = Vec::new();
    for arg in &args[1..] {
        if beginning.len() >= 128 {
            break;
        }
        let word = shortened(arg, 128 - beginning.len());
        beginning.extend([b"'", word, b"' "].concat());
    }
    text([
        b"ERR unknown command '",
        shortened(&args[0], 128),
        b"', with args beginning with: ",
        &beginning,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_listed_once() {
        assert_eq!(BY_NAME.len(), TABLE.len());
    }
}
