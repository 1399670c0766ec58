//! Random commands: mostly valid ones on a few keys, and all kinds of invalid ones.

use super::{
    play::{Check, Command, FIXED_TIMES},
    rng::Rng,
    scripts::sha1,
};

/// The key that may have many and long fields.
pub const BIG_HASH: &str = "hbig";

const STRINGS: [&str; 5] = ["s1", "s2", "s3", "{t}:s4", "s 5"];
const HASHES: [&str; 4] = ["h1", "h2", "h3", BIG_HASH];
const LISTS: [&str; 4] = ["l1", "l2", "l3", "{t}:l4"];
const ZSETS: [&str; 4] = ["z1", "z2", "z3", "{t}:z4"];
/// Keys of any type.
const ODD: [&[u8]; 3] = [b"", b"\x00\xff\r\n", b"odd"];
pub const CHANNELS: [&str; 6] = [
    "c1",
    "c2",
    "redisson_lock__channel:{a}",
    "",
    "h*x",
    "c\u{fc}",
];
const PATTERNS: [&str; 10] = [
    "*",
    "c*",
    "c?",
    "[ab]*",
    "h\\*x",
    "c[12]",
    "redisson_*",
    "",
    "c[^1]",
    "*}",
];

/// Values in place of a number or an option. None of them makes a time that ends soon, or is
/// another unit of time.
const JUNK: [&[u8]; 31] = [
    b"",
    b"abc",
    b"0",
    b"-1",
    b"-5",
    b"-0",
    b"1.5",
    b"+7",
    b" 8",
    b"8 ",
    b"012",
    b"0x10",
    b"1e3",
    b"nan",
    b"inf",
    b"9223372036854775807",
    b"9223372036854775808",
    b"-9223372036854775808",
    b"-9223372036854775809",
    b"99999999999999999999999",
    b"\x00\xff",
    b"NX",
    b"XX",
    b"GT",
    b"LT",
    b"LIMIT",
    b"WITHSCORES",
    b"COUNT",
    b"foo",
    b"(",
    b"KEEPTTL",
];

/// Every command, and how often it is chosen.
pub const COMMANDS: [(&str, u32); 108] = [
    ("PING", 2),
    ("ECHO", 2),
    ("SELECT", 1),
    ("DBSIZE", 6),
    ("EXISTS", 5),
    ("DEL", 14),
    ("UNLINK", 4),
    ("TYPE", 4),
    ("KEYS", 4),
    ("SCAN", 4),
    ("EXPIRE", 6),
    ("PEXPIRE", 6),
    ("EXPIREAT", 5),
    ("PEXPIREAT", 5),
    ("TTL", 4),
    ("PTTL", 4),
    ("EXPIRETIME", 4),
    ("PEXPIRETIME", 4),
    ("PERSIST", 4),
    ("TOUCH", 2),
    ("GET", 6),
    ("SET", 14),
    ("SETNX", 4),
    ("SETEX", 4),
    ("PSETEX", 4),
    ("GETDEL", 4),
    ("GETEX", 6),
    ("GETSET", 4),
    ("MGET", 4),
    ("MSET", 3),
    ("MSETNX", 4),
    ("INCR", 4),
    ("DECR", 4),
    ("INCRBY", 5),
    ("DECRBY", 5),
    ("APPEND", 4),
    ("STRLEN", 3),
    ("HSET", 12),
    ("HMSET", 4),
    ("HSETNX", 4),
    ("HGET", 5),
    ("HMGET", 4),
    ("HGETALL", 5),
    ("HDEL", 6),
    ("HEXISTS", 4),
    ("HLEN", 4),
    ("HKEYS", 4),
    ("HRANDFIELD", 4),
    ("HVALS", 4),
    ("HINCRBY", 7),
    ("HSTRLEN", 3),
    ("LPUSH", 7),
    ("RPUSH", 9),
    ("LPUSHX", 3),
    ("RPUSHX", 3),
    ("LPOP", 6),
    ("RPOP", 6),
    ("LLEN", 3),
    ("LRANGE", 7),
    ("LINDEX", 5),
    ("LREM", 6),
    ("LTRIM", 4),
    ("LSET", 5),
    ("LINSERT", 6),
    ("LPOS", 8),
    ("BLPOP", 2),
    ("BRPOP", 2),
    ("ZADD", 18),
    ("ZREM", 5),
    ("ZSCORE", 5),
    ("ZMSCORE", 4),
    ("ZCARD", 3),
    ("ZCOUNT", 6),
    ("ZINCRBY", 7),
    ("ZRANGE", 12),
    ("ZRANGEBYSCORE", 8),
    ("ZREVRANGEBYSCORE", 8),
    ("ZREVRANGE", 5),
    ("ZREMRANGEBYSCORE", 4),
    ("ZREMRANGEBYRANK", 4),
    ("ZRANK", 5),
    ("ZREVRANK", 5),
    ("ZPOPMIN", 5),
    ("ZPOPMAX", 5),
    ("PUBLISH", 12),
    ("SPUBLISH", 6),
    ("PUBSUB", 8),
    ("SCRIPT", 5),
    ("EVALSHA", 5),
    ("EVALSHA_RO", 3),
    ("TIME", 1),
    ("CLIENT", 3),
    ("HELLO", 1),
    ("FLUSHALL", 1),
    ("FLUSHDB", 1),
    // unknown to the embedded server, to Redis, or to both
    ("NOSUCH", 2),
    ("GETT", 1),
    ("", 1),
    ("\u{fc}ber", 1),
    // through Lua
    ("EVAL", 200),
    ("EVAL_RO", 25),
    // only on listening lines
    ("SUBSCRIBE", 0),
    ("UNSUBSCRIBE", 0),
    ("PSUBSCRIBE", 0),
    ("PUNSUBSCRIBE", 0),
    ("SSUBSCRIBE", 0),
    ("SUNSUBSCRIBE", 0),
    ("QUIT", 0),
];

/// Scripts that run the command in ARGV.
const CALLERS: [&str; 15] = [
    "return redis.call(unpack(ARGV))",
    "return redis.call(unpack(ARGV))",
    "return redis.call(unpack(ARGV))",
    "return redis.pcall(unpack(ARGV))",
    "return redis.pcall(unpack(ARGV))",
    "local r = redis.call(unpack(ARGV)) return r",
    "local r = redis.pcall(unpack(ARGV)) if type(r) == 'table' and r.err then return 'error: ' .. r.err end return r",
    "local r = redis.pcall(unpack(ARGV)) if type(r) == 'table' then return {type(r), r.ok, r.err, #r} end return {type(r), r}",
    "return {redis.pcall(unpack(ARGV))}",
    "return {1, {redis.pcall(unpack(ARGV)), 'end'}}",
    "local r = redis.pcall(unpack(ARGV)) if r == false then return 'nil' end return r",
    "local ok, r = pcall(redis.call, unpack(ARGV)) return {ok, r}",
    "if redis.call('exists', KEYS[1] or ARGV[2] or '') == 1 then return redis.call(unpack(ARGV)) end return redis.status_reply('absent')",
    "redis.setresp(3) return redis.call(unpack(ARGV))",
    "redis.call(unpack(ARGV)) return redis.error_reply('MINE done')",
];

/// Several commands in ARGV: a count, then that many words; and so on.
const MANY: [&str; 3] = [
    "local out, i = {}, 1
     while ARGV[i] do
       local n, words = tonumber(ARGV[i]), {}
       for j = 1, n do words[j] = ARGV[i + j] end
       out[#out + 1] = redis.pcall(unpack(words))
       i = i + n + 1
     end
     return out",
    // stops at the first error, and earlier writes stay
    "local out, i = {}, 1
     while ARGV[i] do
       local n, words = tonumber(ARGV[i]), {}
       for j = 1, n do words[#words + 1] = ARGV[i + j] end
       out[#out + 1] = redis.call(unpack(words))
       i = i + n + 1
     end
     return out",
    "local i = 1
     while ARGV[i] do
       local n, words = tonumber(ARGV[i]), {}
       for j = 1, n do table.insert(words, ARGV[i + j]) end
       local r = redis.pcall(unpack(words))
       if type(r) == 'table' and r.err then redis.call('rpush', KEYS[1] or 'l1', r.err) end
       i = i + n + 1
     end
     return i",
];

/// Scripts about values: KEYS and ARGV are arbitrary words.
const VALUES: [&str; 96] = [
    "return KEYS",
    "return ARGV",
    "return {KEYS, ARGV}",
    "return #ARGV",
    "return ARGV[1]",
    "return tonumber(ARGV[1])",
    "return tostring(tonumber(ARGV[1]))",
    "return {tonumber(ARGV[1]), tonumber(ARGV[2])}",
    "return tonumber(ARGV[1], 16)",
    "return tonumber(ARGV[1], 2)",
    "return tonumber(ARGV[1]) + tonumber(ARGV[2])",
    "return ARGV[1] + ARGV[2]",
    "return ARGV[1] .. ARGV[2]",
    "return ARGV[1] == ARGV[2]",
    "return (tonumber(ARGV[1]) or 0) < (tonumber(ARGV[2]) or 0)",
    "return ARGV[1] < 5",
    "return not ARGV[1]",
    "return -ARGV[1]",
    "return ARGV[1] % 7",
    "return 2 ^ 10 / 3",
    "return {1.9, -1.9, 0.4, -0.4}",
    "return tostring(0.1) .. tostring(1e15) .. tostring(1e16) .. tostring(-0) .. tostring(1/3) .. tostring(2^53)",
    "return string.format('%d|%s|%5.2f|%x|%g', 42, ARGV[1], 3.14159, 255, 1e20)",
    "return string.format('%d', ARGV[1])",
    "return string.format('%s %q', ARGV[1], ARGV[2])",
    "return string.format('%5s|%-5s|%05d|%c|%%|%i|%u|%e', 'a', 'b', 42, 65, 7, 8, 1.5)",
    "return string.format('%y', 1)",
    "return string.sub(ARGV[1], 2, -2)",
    "return string.sub(ARGV[1], tonumber(ARGV[2]) or 1)",
    "return {string.find(ARGV[1], '^[1-9]%d*$')}",
    "return {string.find(ARGV[1], ARGV[2], 1, true)}",
    "return {string.find(ARGV[1], '(%w+):(%w+)')}",
    "return string.match(ARGV[1], '%d+')",
    "return {string.match(ARGV[1], '^(%x+)%-?(%x*)')}",
    "return {string.gsub(ARGV[1], '%w', '%0%0')}",
    "return {string.gsub(ARGV[1], 'a', {a = 'b'}, 1)}",
    "local out = {} for word in string.gmatch(ARGV[1], '%a+') do out[#out + 1] = word end return out",
    "return {string.len(ARGV[1]), #ARGV[2], string.upper(ARGV[1]), string.lower(ARGV[1]), string.reverse(ARGV[1])}",
    "return {string.byte(ARGV[1], 1, -1)}",
    "return string.char(72, 105, 0, 255)",
    "return string.rep(ARGV[1], 3)",
    "return string.rep('ab', 5000)",
    "return ('x'):rep(3) .. ARGV[1]:sub(1, 1)",
    "return table.concat(ARGV, ',')",
    "return table.concat({1, 2, 'x', 2.5}, '-', 2)",
    "return table.concat({1, {}, 3})",
    "local t = {'d', 'b', 'c', 'a'} table.sort(t) return t",
    "local t = {3, 1, 2} table.sort(t, function(a, b) return a > b end) return t",
    "local t = {} for i = 1, 10 do table.insert(t, 1, i) end table.remove(t) return t",
    "return {unpack(ARGV)}",
    "return {unpack({1, 2, 3}, 2)}",
    "return select('#', unpack(ARGV))",
    "return {select(2, 'a', 'b', 'c')}",
    "return {math.floor(2.7), math.ceil(2.1), math.max(1, 5, 3), math.min(4, 2), math.abs(-3), math.fmod(7, 3)}",
    "return {1, 2, nil, 4}",
    "return {1, false, true, 'x'}",
    "return {}",
    "return {{}, {{}}, {1, {2, {3, 'x', {4}}}}}",
    "return nil",
    "return true",
    "return false",
    "return 'text'",
    "return 3.99",
    "return",
    "",
    "return {ok = 'fine'}",
    "return {ok = ARGV[1]}",
    "return {err = 'MINE bad'}",
    "return {err = ARGV[1]}",
    "return {err = 'ERR a', ok = 'b'}",
    "return {{ok = 'fine'}, {err = 'MINE bad'}, 'end'}",
    "return {double = 3.25}",
    "return {map = {a = 1}}",
    "return {set = {a = true}}",
    "return redis.status_reply(ARGV[1])",
    "return redis.error_reply(ARGV[1])",
    "return redis.error_reply('-MINE bad')",
    "return redis.status_reply()",
    "return redis.sha1hex(ARGV[1])",
    "error(ARGV[1])",
    "error({err = 'MINE thrown'})",
    "error('plain', 0)",
    "assert(false, ARGV[1])",
    "return {pcall(error, 'caught')}",
    "return {pcall(function() return 1, 2 end)}",
    "local t = setmetatable({}, {__index = function(_, key) return key .. '!' end}) return t.x",
    "return loadstring('return 1 + 1')()",
    "return type(redis.log) .. type(string) .. type(_VERSION) .. tostring(rawget(_G, 'io'))",
    "local n = 0 for i = 1, 2000 do n = n + i end return n",
    "local function f(n) if n < 2 then return n end return f(n - 1) + f(n - 2) end return f(12)",
    "local i = 0 repeat i = i + 1 if i == 5 then break end until false return i",
    "local out = {} for i, key in ipairs(KEYS) do out[i] = key .. i end return out",
    "return redis.call('set', KEYS[1], 0.1)",
    "return redis.call('set', KEYS[1], 1e20)",
    "return redis.call('mset', KEYS[1], 3, KEYS[2], -2.5)",
    "return redis.call('set', KEYS[1], 10, 'px', 2000000)",
];

/// Scripts that must fail.
const WRONG: [&str; 34] = [
    "return (",
    "x = 1",
    "return x",
    "return x.y",
    "local x return x.y",
    "local x = 5 return x()",
    "return nil .. 'a'",
    "return {} + 1",
    "return {} < 1",
    "return #nil",
    "return redis.call()",
    "return redis.pcall()",
    "return redis.call('')",
    "return redis.call('GET')",
    "return redis.pcall('GET')",
    "return redis.call('NOSUCH', 'a')",
    "return redis.pcall('NOSUCH', 'a')",
    "return redis.call('SET', 'a', true)",
    "return redis.call('SET', 'a', {})",
    "return redis.pcall('SET', 'a', nil)",
    "return redis.nosuch('a')",
    "return redis.call('SUBSCRIBE', 'a')",
    "return redis.pcall('EVAL', 'return 1', 0)",
    "return redis.call('SCRIPT', 'FLUSH')",
    "return redis.call('PUBSUB', 'FOO')",
    "return redis.call('HELLO', 3)",
    "redis.call('SET', 's1', 'written') error('after')",
    "redis.call('SET', 's1', 'written') redis.call('GET')",
    "redis.foo = 1",
    "string.foo = 1",
    "return os.time()",
    "return setmetatable(_G, {})",
    "redis.setresp(4)",
    "return tonumber('1', 99)",
];

#[derive(Debug, Clone)]
pub struct Grammar {
    pub rng: Rng,
    times: u64,
    turn: u64,
    /// Some keys may have expired without an access. Redis counts them in DBSIZE until its background task finds them, so
    /// DBSIZE is not generated.
    pub past: bool,
}

macro_rules! words {
    ($($word:expr),* $(,)?) => { vec![$($word.to_vec()),*] };
}

type Words = Vec<Vec<u8>>;

impl Grammar {
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let (turn, past) = (rng.below(4999) as u64, rng.percent(50));
        Self {
            rng,
            times: 0,
            turn,
            past,
        }
    }

    /// A command for a line that does not listen.
    pub fn command(&mut self) -> Command {
        let (name, _) = self.choose(|_| true);
        match name {
            "EVAL" | "EVAL_RO" => self.script(name),
            _ => self.plain(name, true),
        }
    }

    /// A command other than a script command.
    pub fn plain_command(&mut self) -> Command {
        let (name, _) = self.choose(|name| !name.starts_with("EVAL"));
        self.plain(name, true)
    }

    fn choose(&mut self, may: impl Fn(&str) -> bool) -> (&'static str, u32) {
        let total: u32 = COMMANDS
            .iter()
            .filter(|(name, _)| may(name))
            .map(|(_, weight)| weight)
            .sum();
        let mut ticket = self.rng.below(total as usize) as u32;
        for (name, weight) in COMMANDS.iter().filter(|(name, _)| may(name)) {
            if ticket < *weight {
                return (name, *weight);
            }
            ticket -= weight;
        }
        unreachable!()
    }

    /// A command that a script calls.
    fn called(&mut self) -> Command {
        let (name, _) = self.choose(|name| !matches!(name, "EVAL" | "EVAL_RO" | "HELLO"));
        self.plain(name, false)
    }

    fn plain(&mut self, name: &str, top: bool) -> Command {
        let name = match name {
            "DBSIZE" if self.past => "TYPE",
            name => name,
        };
        let (mut words, check) = match name {
            "PING" | "ECHO" | "SELECT" | "DBSIZE" | "TIME" | "CLIENT" | "HELLO" | "FLUSHALL"
            | "FLUSHDB" | "NOSUCH" | "GETT" | "" | "\u{fc}ber" => self.server(name),
            "PUBLISH" | "SPUBLISH" | "PUBSUB" | "SCRIPT" | "EVALSHA" | "EVALSHA_RO" => {
                self.messages(name)
            }
            name if name.starts_with('H') => self.hash(name),
            name if name.starts_with('Z') => self.zset(name),
            name if name.starts_with('L') || name.starts_with('B') || name.starts_with('R') => {
                self.list(name)
            }
            "GET" | "SET" | "SETNX" | "SETEX" | "PSETEX" | "GETDEL" | "GETEX" | "GETSET"
            | "MGET" | "MSET" | "MSETNX" | "INCR" | "DECR" | "INCRBY" | "DECRBY" | "APPEND"
            | "STRLEN" => self.string(name),
            _ => self.key_command(name),
        };
        self.spoil(&mut words);
        if name == "LPOS" {
            // Redis negates a rank, and the negation of this one overflows: undefined in C
            words
                .iter_mut()
                .filter(|word| *word == b"-9223372036854775808")
                .for_each(|word| *word = b"-1".to_vec());
        }
        if top && (name == "BLPOP" || name == "BRPOP") && words.len() > 2 {
            // blocking commands wait only for a moment
            let patient = [&b"0.001"[..], b"0.002", b"-1", b"abc", b""];
            let last = words.last_mut().expect("words");
            if !patient.contains(&&last[..]) {
                *last = b"0.002".to_vec();
            }
        }
        words[0] = self.case(name);
        Command::of(words, check)
    }

    /// Makes 1 in 8 commands invalid in some way.
    fn spoil(&mut self, words: &mut Words) {
        // a hash at another key might be a big one, and cursors differ between the servers
        let keep = if words[0].starts_with(b"H") && words[0] != b"HELLO" || words[0] == b"SCAN" {
            2
        } else {
            1
        };
        let at = keep + self.rng.below(words.len().saturating_sub(keep).max(1));
        match self.rng.below(100) {
            0..=3 if words.len() > 1 => _ = words.pop(),
            4..=6 => words.push(self.junk()),
            7..=10 if at < words.len() => words[at] = self.junk(),
            11 if at < words.len() => words.insert(at, words[at].clone()),
            _ => {}
        }
    }

    // --- words ---

    pub fn junk(&mut self) -> Vec<u8> {
        self.rng.pick(&JUNK).to_vec()
    }

    /// Upper case, lower case, or mixed.
    fn case(&mut self, word: &str) -> Vec<u8> {
        match self.rng.below(4) {
            0 | 1 => word.as_bytes().to_vec(),
            2 => word.to_ascii_lowercase().into_bytes(),
            _ => {
                let random = |letter: u8| {
                    if self.rng.percent(50) {
                        letter.to_ascii_lowercase()
                    } else {
                        letter
                    }
                };
                word.bytes().map(random).collect()
            }
        }
    }

    fn key_of(&mut self, names: &[&str]) -> Vec<u8> {
        if self.rng.percent(90) {
            self.rng.pick(names).as_bytes().to_vec()
        } else {
            self.key()
        }
    }

    pub fn key(&mut self) -> Vec<u8> {
        match self.rng.below(9) {
            0 | 1 => self.rng.pick(&STRINGS).as_bytes().to_vec(),
            2 | 3 => self.rng.pick(&HASHES).as_bytes().to_vec(),
            4 | 5 => self.rng.pick(&LISTS).as_bytes().to_vec(),
            6 | 7 => self.rng.pick(&ZSETS).as_bytes().to_vec(),
            _ => self.rng.pick(&ODD).to_vec(),
        }
    }

    fn several(&mut self, most: usize, mut word: impl FnMut(&mut Self) -> Vec<u8>) -> Words {
        (0..self.rng.between(1, most)).map(|_| word(self)).collect()
    }

    fn small(&mut self) -> Vec<u8> {
        self.rng.around(6).to_string().into_bytes()
    }

    /// An index, a count, an addend.
    fn int(&mut self) -> Vec<u8> {
        if self.rng.percent(92) {
            self.small()
        } else {
            self.junk()
        }
    }

    fn number(&mut self) -> Vec<u8> {
        match self.rng.below(10) {
            0..=6 => self.rng.around(1000).to_string().into_bytes(),
            7 => self
                .rng
                .pick(&[
                    &b"9223372036854775806"[..],
                    b"-9223372036854775807",
                    b"9007199254740993",
                ])
                .to_vec(),
            _ => self.junk(),
        }
    }

    /// At most 64 bytes: a longer value makes Redis lose the order of a hash's fields.
    pub fn value(&mut self) -> Vec<u8> {
        match self.rng.below(14) {
            0..=3 => self.number(),
            4..=7 => self
                .rng
                .pick(&["a", "b", "c", "ab:12", "word and word", "x-1", "\u{e4}"])
                .as_bytes()
                .to_vec(),
            8 => vec![],
            9 => self
                .rng
                .pick(&[&b"\x00"[..], b"\r\n", b"+OK\r\n", b"\xff\xfe", b"$-1"])
                .to_vec(),
            10 => {
                let length = self.rng.between(1, 64);
                self.rng.bytes(length)
            }
            _ => format!("v{}", self.rng.below(30)).into_bytes(),
        }
    }

    fn long_value(&mut self) -> Vec<u8> {
        let length = self.rng.pick(&[&100, &4000, &20_000]);
        vec![b'a' + self.rng.below(26) as u8; *length]
    }

    fn field(&mut self, key: &[u8]) -> Vec<u8> {
        if key == BIG_HASH.as_bytes() {
            return match self.rng.below(20) {
                0 => vec![b'f'; 70],
                _ => format!("field{}", self.rng.below(400)).into_bytes(),
            };
        }
        match self.rng.below(10) {
            0 => vec![],
            1 => b"\x00\xff".to_vec(),
            2 => b"123e4567-e89b-12d3-a456-426614174000:42".to_vec(),
            _ => format!("f{}", self.rng.below(12)).into_bytes(),
        }
    }

    fn hash_value(&mut self, key: &[u8]) -> Vec<u8> {
        match self.rng.below(10) {
            0..=5 => self.number(),
            6 if key == BIG_HASH.as_bytes() => self.long_value(),
            _ => self.value(),
        }
    }

    fn member(&mut self) -> Vec<u8> {
        match self.rng.below(12) {
            0 => vec![],
            1 => b"\x00\xff".to_vec(),
            2 => self.value(),
            _ => format!("m{}", self.rng.below(15)).into_bytes(),
        }
    }

    fn score(&mut self) -> Vec<u8> {
        const RARE: [&str; 28] = [
            "inf",
            "-inf",
            "+inf",
            "Infinity",
            "nan",
            "abc",
            "",
            "1e308",
            "-1e308",
            "1e400",
            "1e-400",
            "0x10",
            "0x1p-1",
            " 1",
            "1 ",
            "-0",
            "0.1",
            "3.3",
            "1e17",
            "12345678901234567",
            "1e-5",
            "+1",
            "1.",
            ".5",
            "1e",
            "--1",
            "1_0",
            "9007199254740993",
        ];
        if self.rng.percent(12) {
            return self.rng.pick(&RARE).as_bytes().to_vec();
        }
        let halves = self.rng.around(20);
        let (sign, whole) = (if halves < 0 { "-" } else { "" }, halves.abs() / 2);
        format!("{sign}{whole}{}", if halves % 2 == 0 { "" } else { ".5" }).into_bytes()
    }

    fn border(&mut self) -> Vec<u8> {
        match self.rng.below(10) {
            0 => b"-inf".to_vec(),
            1 => b"+inf".to_vec(),
            2..=4 => [b"(", &self.score()[..]].concat(),
            _ => self.score(),
        }
    }

    /// A time from now, in seconds. It differs from all others of the round by far more than the delay between the two
    /// servers, so that which of two times is later does not depend on timing.
    fn relative(&mut self) -> u64 {
        // 4999 is a prime, so no number repeats
        self.times += 1;
        self.turn = (self.turn + 1237) % 4999;
        assert!(self.times < 4999, "too many times in one round");
        1000 + 60 * self.turn
    }

    /// [`Grammar::relative`] in milliseconds.
    pub fn millis(&mut self) -> Vec<u8> {
        (self.relative() * 1000).to_string().into_bytes()
    }

    /// A time in the unit of an option or a command: seconds if `seconds`, and absolute if `fixed`.
    fn time(&mut self, seconds: bool, fixed: bool) -> Vec<u8> {
        if self.rng.percent(10) {
            return self.junk();
        }
        if !fixed {
            return (self.relative() * if seconds { 1 } else { 1000 })
                .to_string()
                .into_bytes();
        }
        if self.past && self.rng.percent(15) {
            return self
                .rng
                .pick(&["1", "100", "1000000000"])
                .as_bytes()
                .to_vec();
        }
        let millis = FIXED_TIMES + 100_000 * (10 + self.rng.around(10));
        (if seconds { millis / 1000 } else { millis })
            .to_string()
            .into_bytes()
    }

    fn options(&mut self, words: &mut Words, mut options: Vec<Words>) {
        self.rng.shuffle(&mut options);
        words.extend(options.into_iter().flatten());
    }

    fn sometimes(&mut self, chance: usize, options: &mut Vec<Words>, word: &str) {
        if self.rng.percent(chance) {
            options.push(vec![self.case(word)]);
        }
    }

    // --- commands, by what they are about ---

    fn server(&mut self, name: &str) -> (Words, Check) {
        let mut words = words![name.as_bytes()];
        let mut check = if name == "HELLO" {
            Check::Hello
        } else {
            Check::Exact
        };
        match name {
            "ECHO" => words.push(self.value()),
            "PING" if self.rng.percent(50) => words.push(self.value()),
            "SELECT" => words.push(
                self.rng
                    .pick(&["0", "0", "0", "1", "16", "-1", "x", "99999999999"])
                    .into(),
            ),
            "TIME" => check = Check::Kind,
            "CLIENT" => match self.rng.below(8) {
                0 | 1 => {
                    words.push(self.case("ID"));
                    check = Check::Kind;
                }
                2 | 3 => words.push(self.case("GETNAME")),
                4 | 5 => {
                    words.push(self.case("SETNAME"));
                    words.push(
                        self.rng
                            .pick(&["n1", "a-b", "", "a b", "\n", "\u{e4}"])
                            .into(),
                    );
                }
                6 => words.push(self.rng.pick(&["FOO", "", "nosuch", "i d"]).into()),
                _ => {}
            },
            "HELLO" => match self.rng.below(8) {
                0 => {}
                1 => words.push(self.rng.pick(&["1", "4", "x", "-1", ""]).into()),
                2 => words.extend(words![b"3", &self.case("SETNAME"), b"n2"]),
                3 => words.extend(words![b"2", b"FOO"]),
                4 | 5 => words.push(b"2".to_vec()),
                _ => words.push(b"3".to_vec()),
            },
            "FLUSHALL" | "FLUSHDB" if self.rng.percent(50) => {
                words.push(self.rng.pick(&["SYNC", "ASYNC", "async", "FOO"]).into());
            }
            "NOSUCH" | "GETT" | "" | "\u{fc}ber" => words.extend(self.several(4, Self::value)),
            _ => {}
        }
        (words, check)
    }

    fn messages(&mut self, name: &str) -> (Words, Check) {
        let mut words = words![name.as_bytes()];
        match name {
            "PUBLISH" | "SPUBLISH" => {
                words.extend(words![self.rng.pick(&CHANNELS).as_bytes(), &self.value()]);
            }
            "PUBSUB" => match self.rng.below(10) {
                0..=3 => {
                    let about = if self.rng.percent(60) {
                        "CHANNELS"
                    } else {
                        "SHARDCHANNELS"
                    };
                    words.push(self.case(about));
                    if self.rng.percent(60) {
                        words.push(self.rng.pick(&PATTERNS).into());
                    }
                    return (words, Check::Unordered);
                }
                4..=7 => {
                    let about = if self.rng.percent(60) {
                        "NUMSUB"
                    } else {
                        "SHARDNUMSUB"
                    };
                    words.push(self.case(about));
                    for _ in 0..self.rng.below(4) {
                        words.push(self.rng.pick(&CHANNELS).into());
                    }
                }
                8 => words.push(self.case("NUMPAT")),
                _ => words.push(self.rng.pick(&["FOO", "", "CHANNEL"]).into()),
            },
            "SCRIPT" => match self.rng.below(12) {
                0..=3 => {
                    words.push(self.case("LOAD"));
                    words.push(self.known_script().as_bytes().to_vec());
                }
                4..=7 => {
                    words.push(self.case("EXISTS"));
                    words.extend(self.several(3, Self::sha));
                }
                8 | 9 => {
                    words.push(self.case("FLUSH"));
                    if self.rng.percent(50) {
                        words.push(self.rng.pick(&["SYNC", "ASYNC", "sync", "FOO"]).into());
                    }
                }
                10 => words.extend(words![&self.case("LOAD"), self.rng.pick(&WRONG).as_bytes()]),
                _ => words.push(self.rng.pick(&["FOO", "", "LOADED"]).into()),
            },
            _ => {
                words.push(self.sha());
                self.keys_and_values(&mut words);
            }
        }
        (words, Check::Exact)
    }

    fn known_script(&mut self) -> &'static str {
        self.rng.pick(&VALUES[..12])
    }

    fn sha(&mut self) -> Vec<u8> {
        match self.rng.below(10) {
            0 => b"ffffffffffffffffffffffffffffffffffffffff".to_vec(),
            1 => b"abc".to_vec(),
            at => {
                let text = sha1(self.known_script());
                (if at == 2 { text.to_uppercase() } else { text }).into_bytes()
            }
        }
    }

    fn keys_and_values(&mut self, words: &mut Words) {
        let keys = self.rng.below(4);
        words.push(match self.rng.below(40) {
            0 => b"-1".to_vec(),
            1 => b"x".to_vec(),
            2 => b"99".to_vec(),
            3 => b"".to_vec(),
            _ => keys.to_string().into_bytes(),
        });
        (0..keys).for_each(|_| words.push(self.key_of(&STRINGS)));
        (0..self.rng.below(4)).for_each(|_| words.push(self.value()));
    }

    fn key_command(&mut self, name: &str) -> (Words, Check) {
        let mut words = words![name.as_bytes()];
        match name {
            "EXISTS" | "DEL" | "UNLINK" | "TOUCH" => {
                let most = self.rng.pick(&[&1, &1, &3]);
                words.extend(self.several(*most, Self::key));
            }
            "KEYS" => {
                words.push(self.glob());
                return (words, Check::Unordered);
            }
            "SCAN" => {
                words.push(if self.rng.percent(95) {
                    b"0".to_vec()
                } else {
                    self.rng.pick(&["", "1.5", "a", "0a"]).into()
                });
                // so large that one reply has all elements
                let mut options = vec![];
                if self.rng.percent(94) {
                    options.push(words![&self.case("COUNT"), b"100000"]);
                } else {
                    words[1] = b"x".to_vec();
                }
                let options = self.scan_filters(options);
                self.options(&mut words, options);
                return (words, Check::Unordered);
            }
            "EXPIRE" | "PEXPIRE" | "EXPIREAT" | "PEXPIREAT" => {
                words.push(self.key());
                let time = self.time(!name.starts_with('P'), name.ends_with("AT"));
                words.push(time);
                let mut options = vec![];
                for option in ["NX", "XX", "GT", "LT"] {
                    self.sometimes(18, &mut options, option);
                }
                self.options(&mut words, options);
            }
            "TTL" | "EXPIRETIME" => {
                words.push(self.key());
                return (words, Check::Seconds);
            }
            "PTTL" | "PEXPIRETIME" => {
                words.push(self.key());
                return (words, Check::Millis);
            }
            _ => words.push(self.key()),
        }
        (words, Check::Exact)
    }

    fn glob(&mut self) -> Vec<u8> {
        const GLOBS: [&str; 22] = [
            "*", "s*", "h?", "[sz]*", "[^s]*", "*1", "*[1-3]", "\\*", "{t}*", "??", "", "s1", "[",
            "[a-", "*b*", "s[3-1]", "h\\1", "**", "*?", "[]]*", "\\", "[s\\1]*",
        ];
        self.rng.pick(&GLOBS).as_bytes().to_vec()
    }

    fn scan_filters(&mut self, mut options: Vec<Words>) -> Vec<Words> {
        if self.rng.percent(40) {
            options.push(words![&self.case("MATCH"), &self.glob()]);
        }
        if self.rng.percent(40) {
            let kind = *self
                .rng
                .pick(&[&"string", &"hash", &"list", &"zset", &"ZSET", &"nosuch"]);
            options.push(words![&self.case("TYPE"), kind.as_bytes()]);
        }
        options
    }

    /// Options for a whole iteration.
    pub fn scan_options(&mut self) -> Words {
        let mut options = self.scan_filters(vec![]);
        if self.rng.percent(60) {
            let count = self.rng.between(1, 20).to_string();
            options.push(words![&self.case("COUNT"), count.as_bytes()]);
        }
        options.concat()
    }

    fn string(&mut self, name: &str) -> (Words, Check) {
        let mut words = words![name.as_bytes()];
        match name {
            "MGET" => words.extend(self.several(4, |me| me.key_of(&STRINGS))),
            "MSET" | "MSETNX" => {
                for _ in 0..self.rng.between(1, 3) {
                    words.extend(words![&self.key_of(&STRINGS), &self.value()]);
                }
            }
            _ => words.push(self.key_of(&STRINGS)),
        }
        match name {
            "SET" => {
                words.push(if self.rng.percent(95) {
                    self.value()
                } else {
                    self.long_value()
                });
                let mut options = vec![];
                for (option, chance) in [("NX", 15), ("XX", 15), ("GET", 15), ("KEEPTTL", 12)] {
                    self.sometimes(chance, &mut options, option);
                }
                self.expiry_option(&mut options, 40);
                self.options(&mut words, options);
            }
            "GETEX" => {
                let mut options = vec![];
                self.sometimes(15, &mut options, "PERSIST");
                self.expiry_option(&mut options, 60);
                self.options(&mut words, options);
            }
            "SETEX" | "PSETEX" => {
                let time = self.time(name == "SETEX", false);
                words.extend([time, self.value()]);
            }
            "SETNX" | "GETSET" | "APPEND" => words.push(self.value()),
            "INCRBY" | "DECRBY" => words.push(self.number()),
            _ => {}
        }
        (words, Check::Exact)
    }

    fn expiry_option(&mut self, options: &mut Vec<Words>, chance: usize) {
        let times = if self.rng.percent(8) { 2 } else { 1 };
        for _ in 0..times {
            if self.rng.percent(chance) {
                let option = *self.rng.pick(&[&"EX", &"PX", &"EXAT", &"PXAT"]);
                let time = self.time(option.starts_with('E'), option.ends_with("AT"));
                let mut words = words![&self.case(option), &time];
                if self.rng.percent(4) {
                    words.pop();
                }
                options.push(words);
            }
        }
    }

    fn hash(&mut self, name: &str) -> (Words, Check) {
        let key = self.key_of(&HASHES);
        let mut words = words![name.as_bytes(), &key];
        match name {
            "HSET" | "HMSET" => {
                let most = if key == BIG_HASH.as_bytes() && self.rng.percent(20) {
                    60
                } else {
                    3
                };
                for _ in 0..self.rng.between(1, most) {
                    words.extend([self.field(&key), self.hash_value(&key)]);
                }
            }
            "HSETNX" => words.extend([self.field(&key), self.hash_value(&key)]),
            "HGET" | "HEXISTS" | "HSTRLEN" => words.push(self.field(&key)),
            "HMGET" | "HDEL" => words.extend(self.several(4, |me| me.field(&key))),
            "HINCRBY" => words.extend([self.field(&key), self.number()]),
            "HRANDFIELD" => {
                words.push(
                    self.rng
                        .pick(&["1000", "1000", "0", "x", "-9223372036854775808"])
                        .into(),
                );
                if self.rng.percent(50) {
                    words.push(
                        self.rng
                            .pick(&["WITHVALUES", "withvalues", "VALUES"])
                            .into(),
                    );
                }
                // the choice among several is random
                return (words, Check::Kind);
            }
            "HGETALL" if key == BIG_HASH.as_bytes() => return (words, Check::Pairs),
            "HKEYS" | "HVALS" if key == BIG_HASH.as_bytes() => return (words, Check::Unordered),
            _ => {}
        }
        (words, Check::Exact)
    }

    fn list(&mut self, name: &str) -> (Words, Check) {
        let mut words = words![name.as_bytes(), &self.key_of(&LISTS)];
        match name {
            "LPUSH" | "RPUSH" | "LPUSHX" | "RPUSHX" => words.extend(self.several(3, Self::value)),
            "LPOP" | "RPOP" if self.rng.percent(50) => words.push(self.int()),
            "LRANGE" | "LTRIM" => words.extend([self.int(), self.int()]),
            "LINDEX" => words.push(self.int()),
            "LREM" | "LSET" => words.extend([self.int(), self.value()]),
            "LINSERT" => {
                let place = *self
                    .rng
                    .pick(&[&"BEFORE", &"AFTER", &"BEFORE", &"AFTER", &"AT"]);
                words.extend([self.case(place), self.value(), self.value()]);
            }
            "LPOS" => {
                words.push(self.value());
                let mut options = vec![];
                for option in ["RANK", "COUNT", "MAXLEN"] {
                    if self.rng.percent(35) {
                        options.push(vec![self.case(option), self.int()]);
                    }
                }
                self.options(&mut words, options);
            }
            "BLPOP" | "BRPOP" => {
                words.extend(
                    (0..self.rng.below(2))
                        .map(|_| self.key_of(&LISTS))
                        .collect::<Vec<_>>(),
                );
                words.push(self.rng.pick(&["0.001", "0.002", "-1", "abc", ""]).into());
            }
            _ => {}
        }
        (words, Check::Exact)
    }

    fn zset(&mut self, name: &str) -> (Words, Check) {
        let mut words = words![name.as_bytes(), &self.key_of(&ZSETS)];
        match name {
            "ZADD" => {
                let mut options = vec![];
                for (option, chance) in [
                    ("NX", 12),
                    ("XX", 12),
                    ("GT", 12),
                    ("LT", 12),
                    ("CH", 20),
                    ("INCR", 12),
                ] {
                    self.sometimes(chance, &mut options, option);
                }
                self.options(&mut words, options);
                let most = self.rng.pick(&[&1, &1, &4]);
                for _ in 0..self.rng.between(1, *most) {
                    words.extend([self.score(), self.member()]);
                }
            }
            "ZREM" | "ZMSCORE" => words.extend(self.several(3, Self::member)),
            "ZSCORE" | "ZRANK" | "ZREVRANK" => words.push(self.member()),
            "ZCOUNT" | "ZREMRANGEBYSCORE" => words.extend([self.border(), self.border()]),
            "ZINCRBY" => words.extend([self.score(), self.member()]),
            "ZRANGE" => self.range(&mut words),
            "ZRANGEBYSCORE" | "ZREVRANGEBYSCORE" => {
                words.extend([self.border(), self.border()]);
                let mut options = vec![];
                self.sometimes(50, &mut options, "WITHSCORES");
                self.limit(&mut options, 40);
                self.options(&mut words, options);
            }
            "ZREVRANGE" => {
                words.extend([self.int(), self.int()]);
                let mut options = vec![];
                self.sometimes(50, &mut options, "WITHSCORES");
                self.options(&mut words, options);
            }
            "ZREMRANGEBYRANK" => words.extend([self.int(), self.int()]),
            "ZPOPMIN" | "ZPOPMAX" if self.rng.percent(50) => words.push(self.int()),
            _ => {}
        }
        (words, Check::Exact)
    }

    fn range(&mut self, words: &mut Words) {
        let mut options = vec![];
        if self.rng.percent(50) {
            words.extend([self.border(), self.border()]);
            options.push(vec![self.case("BYSCORE")]);
            self.limit(&mut options, 40);
        } else {
            words.extend([self.int(), self.int()]);
            self.limit(&mut options, 5);
        }
        self.sometimes(40, &mut options, "REV");
        self.sometimes(50, &mut options, "WITHSCORES");
        self.options(words, options);
    }

    fn limit(&mut self, options: &mut Vec<Words>, chance: usize) {
        if self.rng.percent(chance) {
            options.push(vec![self.case("LIMIT"), self.int(), self.int()]);
        }
    }

    // --- scripts ---

    fn script(&mut self, name: &str) -> Command {
        let mut words = words![&self.case(name)];
        let check = match self.rng.below(100) {
            0..=49 => {
                let called = self.called();
                let name = called.name();
                let through = *self.rng.pick(&CALLERS.each_ref());
                words.push(through.as_bytes().to_vec());
                let keys = self.rng.below(2);
                words.push(keys.to_string().into_bytes());
                words.extend((0..keys).map(|_| self.key()).collect::<Vec<_>>());
                words.extend(called.parts);
                if through.contains("setresp(3)") && name == "HGETALL" {
                    // a map that went through a Lua table returns in Lua's order
                    Check::Pairs
                } else if through.contains("{redis")
                    || through.contains("{type")
                    || through.contains("{ok")
                    || through.contains("{1")
                {
                    within(called.check)
                } else {
                    called.check
                }
            }
            50..=69 => {
                let many = *self.rng.pick(&MANY.each_ref());
                words.extend(words![many.as_bytes(), b"0"]);
                let mut checks = vec![];
                for _ in 0..self.rng.between(1, 5) {
                    let called = self.called();
                    words.push(called.parts.len().to_string().into_bytes());
                    words.extend(called.parts);
                    checks.push(called.check);
                }
                Check::Each(checks)
            }
            70..=89 => {
                words.push(self.rng.pick(&VALUES).into());
                self.keys_and_values(&mut words);
                Check::Exact
            }
            _ => {
                words.push(self.rng.pick(&WRONG).into());
                self.keys_and_values(&mut words);
                Check::Exact
            }
        };
        Command::of(words, check)
    }

    // --- listening lines ---

    pub fn listener_command(&mut self, protocol: u8) -> Command {
        let mut words = match self.rng.below(100) {
            0..=24 => self.channels("SUBSCRIBE", &CHANNELS, 1),
            25..=44 => self.channels("PSUBSCRIBE", &PATTERNS, 1),
            45..=59 => self.channels("SSUBSCRIBE", &CHANNELS, 1),
            60..=67 => self.channels("UNSUBSCRIBE", &CHANNELS, 0),
            68..=75 => self.channels("PUNSUBSCRIBE", &PATTERNS, 0),
            76..=83 => self.channels("SUNSUBSCRIBE", &CHANNELS, 0),
            84..=89 => words![b"PING", &self.value()],
            90 | 91 => words![b"PING"],
            _ => {
                // RESP2 refuses it while the line listens; in RESP3 a listener may even receive its own message
                let name = *self
                    .rng
                    .pick(&[&"PUBLISH", &"SPUBLISH", &"GET", &"RPUSH", &"NOSUCH"]);
                return self.plain(name, true);
            }
        };
        if protocol == 2 && words[0] == b"PING" && words.len() > 2 {
            words.truncate(2);
        }
        self.spoil(&mut words);
        let name = String::from_utf8_lossy(&words[0]).into_owned();
        words[0] = self.case(&name);
        Command::of(words, Check::Exact)
    }

    fn channels(&mut self, name: &str, from: &[&str], least: usize) -> Words {
        let mut words = words![name.as_bytes()];
        for _ in 0..self.rng.between(least, 2) {
            words.push(self.rng.pick(from).into());
        }
        words
    }

    // --- times that end ---

    /// Gives a key a TTL of some milliseconds, in one of many ways.
    pub fn short_lived(&mut self, key: &[u8]) -> Command {
        let millis = self.rng.between(1, 8).to_string();
        let millis = millis.as_bytes();
        let parts = match self.rng.below(6) {
            0 => words![b"SET", key, b"short", b"PX", millis],
            1 => words![b"PSETEX", key, millis, b"short"],
            2 => words![
                b"EVAL",
                b"return redis.call('pexpire', KEYS[1], ARGV[1])",
                b"1",
                key,
                millis
            ],
            _ => words![b"PEXPIRE", key, millis],
        };
        Command::of(parts, Check::Exact)
    }

    /// The longest TTL of [`Grammar::short_lived`], plus a margin.
    pub const SHORT: u64 = 12;

    pub fn all_keys() -> Words {
        let named = [&STRINGS[..], &HASHES, &LISTS, &ZSETS].concat();
        named
            .iter()
            .map(|name| name.as_bytes().to_vec())
            .chain(ODD.iter().map(|name| name.to_vec()))
            .collect()
    }
}

/// The check for one item of a list.
fn within(check: Check) -> Check {
    match check {
        Check::Unordered | Check::Pairs => Check::Kind,
        other => other,
    }
}
