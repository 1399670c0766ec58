//! The commands: one table, and one function for each. Commands that are not in the table, and
//! unknown options, are refused with an error.

// all commands have the same signature, even those that cannot fail
#![allow(clippy::unnecessary_wraps)]

mod connection;
mod hashes;
mod keys;
mod lists;
mod pubsub;
mod server;
mod sorted_sets;
mod strings;

use std::{
    collections::{HashMap, VecDeque},
    sync::LazyLock,
};

use indexmap::IndexMap;

pub(crate) use self::lists::serve_blocked;
use super::{
    Server,
    client::Client,
    keyspace::{Hash, Value},
    resp::{Protocol, Reply, Text, integer},
    sorted_set::SortedSet,
};

/// A reply, or the text of an error.
pub(crate) type Outcome = Result<Reply, Text>;

pub(crate) const WRONG_TYPE: &str =
    "WRONGTYPE Operation against a key holding the wrong kind of value";
pub(crate) const SYNTAX: &str = "ERR syntax error";
pub(crate) const NOT_AN_INTEGER: &str = "ERR value is not an integer or out of range";
const NOT_A_FLOAT: &str = "ERR value is not a valid float";
const NOT_POSITIVE: &str = "ERR value is out of range, must be positive";
const OVERFLOW: &str = "ERR increment or decrement would overflow";

/// The properties of a command, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flags(u8);

impl Flags {
    /// It only reads.
    const READ: Self = Self(0);
    /// It writes keys.
    const WRITE: Self = Self(1);
    /// Scripts may not call it.
    const NO_SCRIPT: Self = Self(2);
    /// A subscribed RESP2 connection may send it.
    const SUBSCRIBED: Self = Self(4);
    /// CLIENT PAUSE WRITE holds it up, though it writes no keys itself.
    const PAUSED: Self = Self(8);

    const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// How a command is executed.
#[derive(Clone, Copy)]
pub(crate) enum Run {
    /// By a function that needs only the server.
    Plain(fn(&mut Call) -> Outcome),
    /// By the script engine.
    Script(ScriptCommand),
    /// By the function of a subcommand.
    Container(&'static [Command]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScriptCommand {
    Eval,
    EvalRo,
    EvalSha,
    EvalShaRo,
    Load,
    Exists,
    Flush,
    Kill,
}

pub(crate) struct Command {
    /// In lower case; a subcommand is `client|id`.
    pub(crate) name: &'static str,
    /// The number of words: exact if positive, a minimum if negative.
    arity: i64,
    flags: Flags,
    pub(crate) run: Run,
}

impl Command {
    pub(crate) fn is_for_scripts(&self) -> bool {
        !self.flags.has(Flags::NO_SCRIPT)
    }

    pub(crate) fn is_for_subscribed(&self) -> bool {
        self.flags.has(Flags::SUBSCRIBED)
    }

    /// Returns whether it writes keys, publishes, or may run or change scripts. CLIENT PAUSE WRITE
    /// holds it up, and read-only scripts may not call it.
    pub(crate) fn waits_for_writes(&self) -> bool {
        self.flags.has(Flags::WRITE.and(Flags::PAUSED))
    }

    fn takes(&self, words: usize) -> bool {
        let words = i64::try_from(words).unwrap_or(i64::MAX);
        if self.arity < 0 {
            words >= -self.arity
        } else {
            words == self.arity
        }
    }
}

const fn plain(
    name: &'static str,
    arity: i64,
    flags: Flags,
    run: fn(&mut Call) -> Outcome,
) -> Command {
    Command {
        name,
        arity,
        flags,
        run: Run::Plain(run),
    }
}

const fn script(name: &'static str, arity: i64, flags: Flags, run: ScriptCommand) -> Command {
    Command {
        name,
        arity,
        flags,
        run: Run::Script(run),
    }
}

const fn container(name: &'static str, subcommands: &'static [Command]) -> Command {
    Command {
        name,
        arity: -2,
        flags: Flags::READ,
        run: Run::Container(subcommands),
    }
}

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

const COMMAND: &[Command] = &[plain("command|count", 2, READ, server::command_count)];

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

fn wrong_number(name: &str) -> String {
    format!("ERR wrong number of arguments for '{name}' command")
}

/// Builds an error text that quotes words of a client.
fn text<const N: usize>(parts: [&[u8]; N]) -> Text {
    Text(parts.concat().into())
}

/// Truncates a word at its first NUL, as C prints a string, and to `len` bytes.
fn shortened(word: &[u8], len: usize) -> &[u8] {
    let word = word.split(|byte| *byte == 0).next().unwrap_or_default();
    &word[..word.len().min(len)]
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

/// One execution of a command.
pub(crate) struct Call<'a> {
    pub(crate) server: &'a mut Server,
    pub(crate) client: u64,
    /// The current database; SELECT changes it.
    pub(crate) db: usize,
    /// All words, starting with the command's name.
    pub(crate) args: &'a [Vec<u8>],
    /// Whether a script called it.
    pub(crate) in_script: bool,
    /// The protocol of the reply.
    pub(crate) protocol: Protocol,
    pub(crate) command: &'static Command,
}

impl Call<'_> {
    fn int(&self, at: usize) -> Result<i64, String> {
        integer(&self.args[at]).ok_or_else(|| NOT_AN_INTEGER.into())
    }

    fn positive(&self, at: usize) -> Result<usize, String> {
        let number = integer(&self.args[at]).and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| NOT_POSITIVE.into())
    }

    fn float(&self, at: usize) -> Result<f64, String> {
        float(&self.args[at]).ok_or_else(|| NOT_A_FLOAT.into())
    }

    /// Returns whether the word is this option, ignoring case.
    fn is(&self, at: usize, option: &str) -> bool {
        self.args[at].eq_ignore_ascii_case(option.as_bytes())
    }

    fn wrong_number(&self) -> String {
        wrong_number(self.command.name)
    }

    /// Returns the command's name in lower case, for error texts.
    fn name(&self) -> &'static str {
        self.command.name
    }

    fn now(&self) -> i64 {
        self.server.clock.now_ms()
    }

    /// Returns the client that sent the command or the script. It stays connected while the command
    /// runs.
    fn client_mut(&mut self) -> &mut Client {
        self.server
            .clients
            .get_mut(&self.client)
            .expect("a client that sends commands")
    }

    fn speaks_resp3(&self) -> bool {
        self.protocol == Protocol::Resp3
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        self.server.keys.take(self.db, key).is_some()
    }

    fn string(&self, key: &[u8]) -> Result<Option<&Vec<u8>>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    fn hash(&self, key: &[u8]) -> Result<Option<&Hash>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::Hash(hash)) => Ok(Some(hash)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    fn hash_or_new(&mut self, key: &[u8]) -> Result<&mut Hash, String> {
        match self
            .server
            .keys
            .get_or_insert(self.db, key, || Value::Hash(IndexMap::new()))
        {
            Value::Hash(hash) => Ok(hash),
            _ => Err(WRONG_TYPE.into()),
        }
    }

    fn list(&self, key: &[u8]) -> Result<Option<&VecDeque<Vec<u8>>>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    /// Returns a list to change. Call [`Call::tidy`] afterwards.
    fn list_mut(&mut self, key: &[u8]) -> Result<Option<&mut VecDeque<Vec<u8>>>, String> {
        match self.server.keys.get_mut(self.db, key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    fn sorted_set(&self, key: &[u8]) -> Result<Option<&SortedSet>, String> {
        match self.server.keys.get(self.db, key) {
            None => Ok(None),
            Some(Value::SortedSet(set)) => Ok(Some(set)),
            Some(_) => Err(WRONG_TYPE.into()),
        }
    }

    fn sorted_set_or_new(&mut self, key: &[u8]) -> Result<&mut SortedSet, String> {
        match self.server.keys.get_or_insert(
            self.db,
            key,
            || Value::SortedSet(SortedSet::default()),
        ) {
            Value::SortedSet(set) => Ok(set),
            _ => Err(WRONG_TYPE.into()),
        }
    }

    fn tidy(&mut self, key: &[u8]) {
        self.server.keys.tidy(self.db, key);
    }
}

/// Parses a score. Returns `None` if the text is not a number as a whole, is NaN, or is out of
/// range.
fn float(text: &[u8]) -> Option<f64> {
    if text.is_empty() || text[0].is_ascii_whitespace() {
        return None;
    }
    let number = strtod(text)?;
    let digits = text
        .strip_prefix(b"-")
        .or_else(|| text.strip_prefix(b"+"))
        .unwrap_or(text);
    let spelled_out = digits.first().is_some_and(u8::is_ascii_alphabetic);
    let mantissa = digits
        .split(|byte| b"eEpP".contains(byte))
        .next()
        .unwrap_or_default();
    let underflow = number == 0.0 && mantissa.iter().any(|digit| (b'1'..=b'9').contains(digit));
    if underflow || number.is_infinite() && !spelled_out {
        None
    } else {
        Some(number)
    }
}

/// Parses a number as C's `strtod` does. Returns `None` for NaN, or if a part of the text is left
/// over. Leading blanks are allowed, an empty text is 0, and a number out of range is infinite or
/// 0.
fn strtod(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text)
        .ok()?
        .trim_start_matches([' ', '\t', '\n', '\u{b}', '\u{c}', '\r']);
    if text.is_empty() {
        return Some(0.0);
    }
    let (sign, digits) = match text.as_bytes()[0] {
        b'-' => (-1.0, &text[1..]),
        b'+' => (1.0, &text[1..]),
        _ => (1.0, text),
    };
    let hexadecimal = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"));
    let number = hexadecimal.map_or_else(
        || {
            digits
                .parse()
                .ok()
                .filter(|_| !digits.starts_with(['+', '-']))
        },
        hex_float,
    )?;
    Some(sign * number).filter(|number| !number.is_nan())
}

/// Parses the part after `0x`: digits, an optional point, and an optional `p` with a power of two.
fn hex_float(text: &str) -> Option<f64> {
    let (mantissa, exponent) = text.split_once(['p', 'P']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut number = 0.0;
    for digit in whole.chars().chain(fraction.chars()) {
        number = number * 16.0 + f64::from(digit.to_digit(16)?);
    }
    let exponent: i32 = exponent.parse().ok()?;
    let places = i32::try_from(fraction.len()).ok()?;
    Some(number * f64::from(exponent.saturating_sub(places.saturating_mul(4))).exp2())
}

/// Returns whether a text matches a Redis pattern: `*`, `?`, `[a-c]`, `[^a]`, `\` before a
/// character.
///
/// As in Redis, an empty text matches only an empty pattern.
pub(crate) fn glob(pattern: &[u8], text: &[u8]) -> bool {
    if text.is_empty() {
        return pattern.is_empty();
    }
    // the pattern position after the last `*`, and where its match ends in the text: only the last
    // `*` ever has to be extended
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    loop {
        let advanced = match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
                continue;
            }
            None if t == text.len() => return true,
            Some(_) if t < text.len() => match_one(&pattern[p..], text[t]),
            _ => None,
        };
        if let Some(used) = advanced {
            p += used;
            t += 1;
        } else if let Some((after, taken)) = star.filter(|(_, taken)| *taken < text.len()) {
            star = Some((after, taken + 1));
            (p, t) = (after, taken + 1);
        } else {
            return false;
        }
    }
}

/// Returns how many bytes of the pattern match this byte. Returns `None` if it does not match.
fn match_one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern[0] {
        b'?' => Some(1),
        b'[' => {
            let mut at = 1;
            let not = pattern.get(at) == Some(&b'^');
            if not {
                at += 1;
            }
            let mut found = false;
            loop {
                match pattern.get(at) {
                    Some(b'\\') if at + 1 < pattern.len() => {
                        at += 1;
                        found |= pattern[at] == byte;
                    }
                    Some(b']') => break,
                    // an unterminated class: what has been read of it counts
                    None => {
                        at -= 1;
                        break;
                    }
                    Some(low) if pattern.get(at + 1) == Some(&b'-') && at + 2 < pattern.len() => {
                        let high = pattern[at + 2];
                        found |= (*low.min(&high)..=*low.max(&high)).contains(&byte);
                        at += 2;
                    }
                    Some(one) => found |= *one == byte,
                }
                at += 1;
            }
            (found != not).then_some(at + 1)
        }
        b'\\' if pattern.len() > 1 => (pattern[1] == byte).then_some(2),
        one => (one == byte).then_some(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, text, fits) in [
            ("*", "", false),
            ("", "", true),
            ("a*c", "abbc", true),
            ("a*c", "abcd", false),
            ("a?c", "abc", true),
            ("?", "", false),
            ("[a-c]x", "bx", true),
            ("[c-a]x", "bx", true),
            ("[^a-c]x", "bx", false),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("a*b*c", "a-b-b-c", true),
            ("[ab", "b", true),
            ("**", "x", true),
        ] {
            assert_eq!(
                glob(pattern.as_bytes(), text.as_bytes()),
                fits,
                "{pattern} {text}"
            );
        }
    }

    #[test]
    fn every_command_is_listed_once() {
        assert_eq!(BY_NAME.len(), TABLE.len());
    }

    #[test]
    fn floats_are_read_as_by_strtod() {
        assert_eq!(float(b"1e3"), Some(1000.0));
        assert_eq!(float(b"-inf"), Some(f64::NEG_INFINITY));
        assert_eq!(float(b"+.5"), Some(0.5));
        assert_eq!(float(b"0x1.8p1"), Some(3.0));
        for text in [
            "", " 1", "1 ", "nan", "1e999", "1e-999", "x", "1,5", "--1", "0x", "1e",
        ] {
            assert_eq!(float(text.as_bytes()), None, "{text}");
        }
        for (text, number) in [
            ("", 0.0),
            (" 1", 1.0),
            ("1e-400", 0.0),
            ("-1e400", f64::NEG_INFINITY),
            ("0x10", 16.0),
        ] {
            assert_eq!(strtod(text.as_bytes()), Some(number), "{text}");
        }
    }
}
