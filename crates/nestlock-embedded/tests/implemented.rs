//! The embedded server implements what scripts and clients need. It refuses everything else with an error, and changes nothing.
#![cfg(unix)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use nestlock_embedded::EmbeddedServer;
use support::{
    resp::{Value, escaped, quoted, words},
    scripts::{self, Script},
    servers,
    wire::Wire,
};

/// Commands that a script calls by a computed name: the expression, and the names it can evaluate to.
const COMPUTED: [(&str, &[&str]); 0] = [];

/// The names of the commands that a script calls.
fn called(script: &Script) -> BTreeSet<String> {
    let code: Vec<&str> = script
        .source
        .lines()
        .map(|line| line.split("--").next().unwrap_or_default())
        .collect();
    let code = code.join("\n");
    let mut names = BTreeSet::new();
    for call in ["redis.call(", "redis.pcall("] {
        for (at, _) in code.match_indices(call) {
            let first = code[at + call.len()..].trim_start();
            let first = first.split([',', ')']).next().unwrap_or_default().trim();
            let quoted = |quote: char| first.strip_prefix(quote)?.strip_suffix(quote);
            match (
                quoted('\'').or(quoted('"')),
                COMPUTED.iter().find(|(expression, _)| *expression == first),
            ) {
                (Some(name), _) => _ = names.insert(name.to_ascii_lowercase()),
                (None, Some((_, all))) => names.extend(all.iter().map(ToString::to_string)),
                _ => panic!(
                    "lua/{}.lua calls {first:?}: list in COMPUTED what that can be",
                    script.name
                ),
            }
        }
    }
    assert!(!names.is_empty(), "lua/{}.lua calls nothing?", script.name);
    names
}

fn connect(server: &EmbeddedServer) -> Wire {
    Wire::connect(server.addr()).expect("a connection")
}

fn text(value: &Value) -> String {
    escaped(value.text().unwrap_or_default())
}

fn is_unknown(answer: &Value) -> bool {
    answer.is_error() && text(answer).starts_with("ERR unknown ")
}

/// Commands that the scripts call, but the server does not have.
fn missing(scripts: &[Script]) -> Vec<String> {
    let server = EmbeddedServer::start().expect("a server");
    let mut missing = vec![];
    for script in scripts {
        for name in called(script) {
            let answer = connect(&server).call(&[&name]).expect("a reply");
            if is_unknown(&answer) {
                missing.push(format!("lua/{}.lua calls {name}: {answer:?}", script.name));
            }
        }
    }
    missing
}

#[test]
fn every_command_that_a_script_calls_is_there() {
    let mut scripts = scripts::all();
    assert_eq!(missing(&scripts), [] as [&str; 0]);
    // a missing command is noticed
    scripts[0].source += "\nredis.pcall('xadd', KEYS[1], '*', 'a', 'b')";
    assert_eq!(missing(&scripts).len(), 1);
}

#[test]
fn the_calls_of_a_script_are_found_however_they_are_written() {
    let mut script = scripts::all().remove(0);
    script.source =
        "redis.call('SET', KEYS[1], 1) -- redis.call('no')\nlocal x = redis.pcall( \"get\",\n'a')"
            .into();
    assert_eq!(called(&script), ["get", "set"].map(String::from).into());
    script.source = "redis.call(ARGV[1], 'x')".into();
    assert!(
        std::panic::catch_unwind(|| called(&script)).is_err(),
        "a name that is not visible in the call must be declared"
    );
}

/// Each of these is refused: unknown commands, commands that only Redis has, and contradictory options.
const REFUSED: [&str; 110] = [
    "NOSUCH",
    "NOSUCH s x",
    "SETT s x",
    "\"\" s x",
    "APPEND s",
    "APPEND s a b",
    "AUTH",
    "BITFIELD s SET u8 0 1",
    "BLMOVE l l2 LEFT RIGHT 0",
    "BLMPOP 0 1 l LEFT",
    "BLPOP l",
    "BLPOP l -1",
    "BLPOP l x",
    "BZPOPMIN z 0",
    "CLIENT",
    "CLIENT FOO",
    "CLIENT CACHING YES",
    "CLIENT NO-TOUCH ON",
    "CLIENT REPLY OFF",
    "CLIENT TRACKING ON",
    "CLIENT UNBLOCK 1",
    "CLUSTER INFO",
    "COMMAND FOO",
    "CONFIG FOO",
    "CONFIG SET maxmemory 1",
    "COPY s t",
    "DEBUG SLEEP 0",
    "DECRBY n x",
    "DISCARD",
    "DUMP s",
    "EVAL \"return 1\"",
    "EVAL \"return 1\" -1",
    "EVAL \"return 1\" x",
    "EVAL \"return 1\" 2 s",
    "EVAL \"redis.call('set', 's', 'x'\" 0",
    "EVAL_RO \"return redis.call('set', 's', 'x')\" 0",
    "EXEC",
    "EXPIRE s 100 FOO",
    "EXPIRE s 100 GT LT",
    "EXPIRE s 100 NX XX",
    "EXPIRE s x",
    "FCALL f 0",
    "FLUSHALL FOO",
    "FLUSHALL ASYNC SYNC",
    "FLUSHDB FOO",
    "FUNCTION LOAD \"#!lua name=f\"",
    "GEOADD g 1 1 a",
    "GETEX s EX 10 PERSIST",
    "GETEX s EX 10 PX 10",
    "GETEX s FOO",
    "GETEX s EX 0",
    "GETRANGE s 0 1",
    "HELLO 3 FOO",
    "HINCRBYFLOAT h f 1.5",
    "HINCRBY h f x",
    "HSCAN h 0",
    "HSET h f",
    "HSET h f 1 g",
    "INCRBYFLOAT n 1.5",
    "INCRBY n 9223372036854775808",
    "LATENCY RESET",
    "LINSERT l AT a b",
    "LMOVE l l2 LEFT RIGHT",
    "LMPOP 1 l LEFT",
    "LPOP l -1",
    "LPOP l 1 FOO",
    "LPOS l a FOO 1",
    "LPOS l a RANK 0",
    "LPOS l a RANK",
    "LSET l 99 a",
    "MIGRATE 127.0.0.1 1 s 0 1",
    "MOVE s 1",
    "MSET s 1 t",
    "MULTI",
    "OBJECT FREQ s",
    "PERSIST s FOO",
    "PFADD p a",
    "PSETEX s 0 x",
    "PUBSUB FOO",
    "PUBSUB NUMPAT FOO",
    "RENAME s t",
    "RENAMENX s t",
    "RESTORE t 0 x",
    "RPOPLPUSH l l2",
    "SADD set a",
    "SCAN 0 COUNT",
    "SCAN 0 COUNT 0",
    "SCAN 0 FOO 1",
    "SCAN x",
    "SCRIPT DEBUG YES",
    "SCRIPT FLUSH FOO",
    "SCRIPT FOO",
    "SELECT 99",
    "SET s x EX 0",
    "SET s x EX 10 PX 10",
    "SET s x FOO",
    "SET s x KEEPTTL EX 10",
    "SET s x NX XX",
    "SETRANGE s 0 x",
    "SORT l STORE t",
    "SWAPDB 0 1",
    "WATCH s",
    "XADD x * a b",
    "ZADD z FOO 1 m",
    "ZADD z INCR 1 a 2 b",
    "ZADD z 1",
    "ZADD z NX GT 1 a",
    "ZADD z 5 a x b",
    "ZRANGE z 0 -1 FOO",
    "ZRANGE z - + BYLEX",
];

/// Every key with its type, content and expiry.
fn state(wire: &mut Wire) -> BTreeMap<Vec<u8>, Vec<Value>> {
    let mut ask = |parts: &[&[u8]]| wire.call(parts).expect("a reply");
    let keys = ask(&[b"KEYS", b"*"]);
    let keys = keys
        .items()
        .expect("a list")
        .iter()
        .map(|key| key.text().expect("a key").to_vec());
    keys.map(|key| {
        let kind = ask(&[b"TYPE", &key]);
        let content = match kind.text().expect("a type") {
            b"string" => ask(&[b"GET", &key]),
            b"hash" => ask(&[b"HGETALL", &key]),
            b"list" => ask(&[b"LRANGE", &key, b"0", b"-1"]),
            _ => ask(&[b"ZRANGE", &key, b"0", b"-1", b"WITHSCORES"]),
        };
        assert!(!content.is_error(), "{content:?}");
        let time = ask(&[b"PEXPIRETIME", &key]);
        (key, vec![kind, content, time])
    })
    .collect()
}

#[test]
fn what_is_not_there_is_refused_with_err_and_changes_nothing() {
    let server = EmbeddedServer::start().expect("a server");
    let mut wire = connect(&server);
    for line in [
        "SET s text PX 5000000",
        "SET n 1",
        "HSET h f 1 g 2",
        "RPUSH l a b c",
        "ZADD z 1 a 2 b",
    ] {
        assert!(
            !wire
                .call(&words(line).expect("words"))
                .expect("a reply")
                .is_error(),
            "{line}"
        );
    }
    let before = state(&mut wire);
    assert_eq!(before.len(), 5);
    let mut wrong = vec![];
    for line in REFUSED {
        let line = words(line).expect("words");
        for script in [
            None,
            Some("return redis.call(unpack(ARGV))"),
            Some("return redis.pcall(unpack(ARGV))"),
        ] {
            let mut parts: Vec<Vec<u8>> = vec![];
            if let Some(script) = script {
                parts.extend([b"EVAL".to_vec(), script.as_bytes().to_vec(), b"0".to_vec()]);
            }
            parts.extend(line.iter().cloned());
            // a new connection each, so that no earlier command affects it
            let answer = connect(&server).call(&parts).expect("a reply");
            let shown: Vec<String> = parts.iter().map(|part| quoted(part)).collect();
            if answer.code() != Some(b"ERR") {
                wrong.push(format!("{} replied {answer:?}", shown.join(" ")));
            }
            if state(&mut wire) != before {
                wrong.push(format!("{} changed something", shown.join(" ")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The names of all commands of a real server, and of their subcommands.
fn known_to_redis(wire: &mut Wire) -> Vec<Vec<String>> {
    let all = wire.call(&["COMMAND"]).expect("a reply");
    let mut names = vec![];
    for command in all.items().expect("a list") {
        let items = command.items().expect("a list");
        let name = text(&items[0]);
        for subcommand in items[9].items().expect("subcommands") {
            // "client|id"
            names.push(
                text(&subcommand.items().expect("a list")[0])
                    .split('|')
                    .map(Into::into)
                    .collect(),
            );
        }
        names.push(vec![name]);
    }
    assert!(names.len() > 300, "{}", names.len());
    names
}

/// A command without arguments is either unknown, or gets the same reply as from Redis.
#[test]
fn every_command_of_redis_is_done_right_or_refused() {
    let (real, ours) = (servers::real(), EmbeddedServer::start().expect("a server"));
    let (mut wrong, mut there) = (vec![], 0);
    for parts in known_to_redis(&mut Wire::connect(real.addr()).expect("a connection")) {
        let answer = connect(&ours).call(&parts).expect("a reply");
        // COMMAND alone describes all of Redis
        if is_unknown(&answer) || parts == ["command"] && answer.is_error() {
            continue;
        }
        there += 1;
        // SHUTDOWN, SAVE and the like are unknown to the embedded server, so they never get here
        let wanted = Wire::connect(real.addr())
            .and_then(|mut wire| wire.call(&parts))
            .expect("a reply");
        let same = if wanted.is_error() || answer.is_error() {
            wanted == answer
        } else {
            std::mem::discriminant(&wanted) == std::mem::discriminant(&answer)
        };
        if !same {
            wrong.push(format!("{parts:?}\n  real: {wanted:?}\n  ours: {answer:?}"));
        }
    }
    println!("{there} commands and subcommands exist");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
