//! `lua/fenced`: the token of an acquire, and the guarded write and read.

use std::time::{Duration, Instant};

use super::{Bench, busy, busy_ttl, eval, source};
use crate::support::wire::Reply;

const LOCK: &str = "orders:7";
const TOKEN: &str = "redisson_lock_token:{orders:7}";
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const DATA: &str = "stock";
const FENCE: &str = "nestlock_fence:{stock}";

const ACQUIRE: &str = "fenced/acquire";
const RELEASE: &str = "reentrant/release";
const SET: &str = "fenced/set";
const GET: &str = "fenced/get";

/// The highest valid token: beyond it, Lua's numbers skip integers.
const MAX: &str = "9007199254740991";
const NO_TOKENS: [&str; 12] = [
    "",
    "x",
    "-1",
    "+1",
    " 1",
    "1 ",
    "1.5",
    "1e3",
    "0x10",
    "nan",
    "9007199254740992",
    "99999999999999999999999",
];

impl Bench {
    fn fenced(&self, owner: &str, lease: &str, holds: &str) -> Reply {
        self.run(ACQUIRE, &[LOCK, TOKEN], &[owner, lease, holds])
    }

    /// Acquires, and returns the token.
    fn token(&self, owner: &str, holds: &str) -> i64 {
        let reply = self.fenced(owner, "30000", holds);
        let [Reply::Int(1), Reply::Int(token)] = reply.list() else {
            panic!("{reply:?}")
        };
        assert_eq!(self.call(&["GET", TOKEN]).text(), token.to_string());
        *token
    }

    fn free(&self, owner: &str) {
        assert_eq!(self.run(RELEASE, &[LOCK], &[owner, "0", ""]), Reply::Int(1));
    }

    fn micros(&self) -> i64 {
        let time = self.call(&["TIME"]);
        let number = |n: usize| time.list()[n].text().parse::<i64>().unwrap();
        number(0) * 1_000_000 + number(1)
    }

    /// Runs an acquire that must be refused.
    fn try_fenced(&self, owner: &str, holds: &str) -> Reply {
        self.untouched(ACQUIRE, &[LOCK, TOKEN], &[owner, "30000", holds])
    }

    /// Runs a script as a user who may run every command but `denied`.
    fn without(&self, denied: &str, script: &str, keys: &[&str], args: &[&str]) -> Reply {
        self.set_up(&[
            "ACL",
            "SETUSER",
            "limited",
            "reset",
            "on",
            ">pw",
            "~*",
            "&*",
            "+@all",
            &format!("-{denied}"),
        ]);
        let mut limited = self.server.wire();
        limited.call(&["AUTH", "limited", "pw"]).unwrap();
        let command = eval(&source(script), keys, args);
        limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap()
    }
}

// --- acquire ---

#[test]
fn a_first_token_is_the_servers_time_in_microseconds() {
    let bench = Bench::new();
    // also early in a second, where the microseconds have fewer than six digits
    let deadline = Instant::now() + Duration::from_secs(20);
    while bench.micros() % 1_000_000 > 50_000 {
        assert!(Instant::now() < deadline, "the server's clock stands");
        std::thread::sleep(Duration::from_millis(2));
    }
    let before = bench.micros();
    let token = bench.token(A, "1");
    assert!(
        (before..=bench.micros()).contains(&token),
        "{before} {token}"
    );
    assert_eq!(bench.server.record(LOCK), [(A.to_owned(), 1)]);
    let ttl = bench.server.pttl(LOCK);
    assert!((25_000..=30_000).contains(&ttl), "{ttl}");
    assert_eq!(bench.server.pttl(TOKEN), -1, "a token is kept for ever");
    assert_eq!(bench.snapshot().len(), 2);
}

/// A token is counted up when the lock goes from free to held, and only then.
#[test]
fn a_token_rises_only_when_the_lock_goes_from_free_to_held() {
    let bench = Bench::new();
    let first = bench.token(A, "1");
    for (holds, says) in [("2", 2), ("3", 3), ("2", 3), ("1", 3)] {
        assert_eq!(bench.token(A, holds), first, "re-entry, {holds} holds");
        assert_eq!(
            bench.server.record(LOCK),
            [(A.to_owned(), says)],
            "a late one takes no hold away"
        );
    }
    assert!(busy_ttl(&bench.try_fenced(B, "1")) > 25_000);
    bench.free(A);
    assert_eq!(bench.token(B, "1"), first + 1);
    bench.free(B);
    assert_eq!(bench.token(A, "1"), first + 2);
    bench.set_up(&["DEL", LOCK]); // expired, or freed by force
    assert_eq!(
        bench.token(A, "1"),
        first + 3,
        "the same owner again is another holder"
    );
}

/// A fenced acquire that is sent twice gives the same token and changes nothing.
#[test]
fn a_fenced_acquire_sent_twice_keeps_the_token_and_the_record() {
    let bench = Bench::new();
    let first = bench.fenced(A, "60000", "1");
    let after = bench.snapshot();
    for lease in ["60000", "30000"] {
        let again = bench.fenced(A, lease, "1");
        assert_eq!(again, first);
    }
    let now: Vec<_> = bench
        .snapshot()
        .into_iter()
        .map(|(key, value, _)| (key, value))
        .collect();
    assert_eq!(
        now,
        after
            .iter()
            .map(|(key, value, _)| (key.clone(), value.clone()))
            .collect::<Vec<_>>()
    );
    let second = bench.fenced(A, "60000", "2");
    assert_eq!((&second, &bench.fenced(A, "60000", "2")), (&first, &first));
    assert_eq!(bench.server.record(LOCK), [(A.to_owned(), 2)]);
}

/// Tokens continue from the value that Redisson wrote, however small, and Redisson continues from
/// ours.
#[test]
fn a_small_token_of_redissons_is_counted_on() {
    let bench = Bench::new();
    bench.set_up(&["INCR", TOKEN]);
    assert_eq!(bench.token(A, "1"), 2);
    bench.free(A);
    bench.set_up(&["INCR", TOKEN]); // a Redisson client in between
    assert_eq!(bench.token(A, "1"), 4);
    assert_eq!(
        bench.call(&["INCR", TOKEN]),
        Reply::Int(5),
        "and Redisson counts on from ours"
    );
}

/// A token that was deleted or lost begins above every token that was given before.
#[test]
fn h9_a_deleted_or_lost_token_restarts_above_all_given_before() {
    let bench = Bench::new();
    let mut last = 0;
    for round in 0..200 {
        let token = bench.token(if round % 2 == 0 { A } else { B }, "1");
        assert!(token > last, "round {round}: {token} after {last}");
        last = token;
        match round % 4 {
            0 => bench.set_up(&["FLUSHALL"]),
            1 => {
                bench.set_up(&["DEL", TOKEN, LOCK]); // evicted
            }
            _ => bench.set_up(&["DEL", LOCK]),
        }
    }
    // evicted under a held lock: the next token is still above the last one, and not zero
    bench.set_up(&["DEL", LOCK]);
    let given = bench.token(A, "1");
    bench.set_up(&["DEL", TOKEN]);
    let again = bench.token(A, "2");
    assert!(again > given);
    bench.set_up(&["DEL", LOCK]);
    assert_eq!(bench.token(B, "1"), again + 1);
}

/// A token key that holds no token is refused before the lock is written.
#[test]
fn a_bad_token_key_is_refused_before_the_lock_is_written() {
    let bench = Bench::real();
    let refuse_all = |what: &str, starts: &str| {
        let error = bench.refused(ACQUIRE, &[LOCK, TOKEN], &[A, "30000", "1"]);
        assert!(error.starts_with(starts), "{what}: {error}");
        bench.set_up(&["HSET", LOCK, A, "1"]);
        bench.set_up(&["PEXPIRE", LOCK, "30000"]);
        let error = bench.refused(ACQUIRE, &[LOCK, TOKEN], &[A, "60000", "2"]);
        assert!(error.starts_with(starts), "re-entry, {what}: {error}");
        assert!(
            busy_ttl(&bench.try_fenced(B, "1")) > 0,
            "waiters are not affected"
        );
        bench.set_up(&["DEL", LOCK]);
    };
    for bad in NO_TOKENS.iter().copied().chain([MAX]) {
        bench.set_up(&["SET", TOKEN, bad]);
        refuse_all(bad, "ERR nestlock: the token key");
    }
    for command in [
        &["RPUSH", TOKEN, "1"] as &[&str],
        &["HSET", TOKEN, "a", "1"],
        &["SADD", TOKEN, "1"],
    ] {
        bench.set_up(&["DEL", TOKEN]);
        bench.set_up(command);
        refuse_all(command[0], "WRONGTYPE");
    }
    bench.set_up(&["SET", TOKEN, "9007199254740990"]);
    assert_eq!(bench.token(A, "1").to_string(), MAX, "the last token");
}

/// A fenced acquire that is refused raises no token.
#[test]
fn what_a_fenced_acquire_refuses_it_does_not_count() {
    let bench = Bench::real();
    bench.set_up(&["SET", TOKEN, "5"]);
    for (lease, holds) in [
        ("0", "1"),
        ("-1", "1"),
        ("", "1"),
        ("1.5", "1"),
        ("30000", "0"),
        ("30000", "x"),
    ] {
        bench.refused(ACQUIRE, &[LOCK, TOKEN], &[A, lease, holds]);
    }
    assert_eq!(
        bench.try_fenced(A, "2"),
        Reply::Int(-2),
        "LOST: no owner holds it"
    );
    // the server cannot add this lease to its clock, or the user may not set a TTL
    bench.refused(ACQUIRE, &[LOCK, TOKEN], &[A, "9223372036854775807", "1"]);
    let before = bench.snapshot();
    for denied in ["pexpire", "get", "incr"] {
        assert!(
            bench
                .without(denied, ACQUIRE, &[LOCK, TOKEN], &[A, "30000", "1"])
                .is_error(),
            "{denied}"
        );
        assert_eq!(bench.snapshot(), before, "{denied}");
    }
    bench.set_up(&["DEL", TOKEN]);
    for denied in ["pexpire", "time", "set"] {
        assert!(
            bench
                .without(denied, ACQUIRE, &[LOCK, TOKEN], &[A, "30000", "1"])
                .is_error(),
            "{denied}"
        );
        assert_eq!(bench.snapshot(), [], "{denied}");
    }
    let token = bench.token(B, "1");
    assert_eq!(bench.try_fenced(A, "2"), Reply::Int(-2), "LOST: taken over");
    assert!(busy_ttl(&bench.try_fenced(A, "1")) > 25_000);
    bench.set_up(&["DEL", LOCK]);
    for fields in [
        &["name", "Ada"] as &[&str],
        &["name", "Ada", "born", "1815"],
        &["mode", "read", B, "1"],
    ] {
        let command: Vec<&str> = ["HSET", LOCK].iter().chain(fields).copied().collect();
        bench.set_up(&command);
        for holds in ["1", "2"] {
            assert_eq!(
                bench.try_fenced(A, holds),
                Reply::Int(-3),
                "WRONG_KIND: {fields:?}"
            );
        }
        bench.set_up(&["DEL", LOCK]);
    }
    bench.set_up(&["SET", LOCK, "data"]);
    assert!(
        bench
            .refused(ACQUIRE, &[LOCK, TOKEN], &[A, "30000", "1"])
            .starts_with("WRONGTYPE")
    );
    bench.set_up(&["DEL", LOCK]);
    assert_eq!(
        bench.token(A, "1"),
        token + 1,
        "nothing was counted in between"
    );
}

/// H3: Redisson's script replies "acquired, with the token -1" here.
#[test]
fn h3_a_fenced_lock_without_ttl_is_busy_and_never_acquired() {
    let bench = Bench::new();
    bench.token(B, "1");
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(bench.try_fenced(A, "1"), busy(-1));
}

#[test]
fn without_memory_no_token_is_counted_and_nothing_is_held() {
    let bench = Bench::real();
    for known in [false, true] {
        if known {
            bench.set_up(&["SET", TOKEN, "5"]);
        }
        bench.refused_without_memory(ACQUIRE, &[LOCK, TOKEN], &[A, "30000", "1"]);
    }
    assert_eq!(bench.token(A, "1"), 6);
    bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(
        bench.fenced(A, "1000", "1").list()[1],
        Reply::Int(6),
        "a second send of what was done already"
    );
    assert!(busy_ttl(&bench.try_fenced(B, "1")) > 0);
    bench.free(A);
}

// --- set and get ---

fn read(value: Reply) -> Reply {
    Reply::List(vec![Reply::Int(1), value])
}

fn stale_at(seen: i64) -> Reply {
    Reply::List(vec![Reply::Int(0), Reply::Int(seen)])
}

/// A guarded write replies 1, and keeps the highest token next to the value.
#[test]
fn a_guarded_write_returns_1_and_keeps_the_highest_token() {
    let bench = Bench::new();
    for (token, value) in [("1", "a"), ("1", "b"), ("7", "c"), (MAX, "")] {
        for _ in 0..2 {
            assert_eq!(
                bench.run(SET, &[DATA, FENCE], &[token, value]),
                Reply::Int(1)
            );
            assert_eq!(bench.call(&["GET", DATA]), Reply::Text(value.into()));
            assert_eq!(bench.call(&["GET", FENCE]), Reply::Text(token.into()));
        }
    }
    assert_eq!(bench.server.pttl(FENCE), -1, "a fence is kept for ever");
    assert_eq!(bench.snapshot().len(), 2);
}

/// A guarded write with a lower token replies with the highest token seen, and touches nothing.
#[test]
fn a_stale_guarded_write_returns_the_highest_and_writes_nothing() {
    let bench = Bench::new();
    for seen in [7, 10, 100, 9_007_199_254_740_991_i64] {
        assert_eq!(
            bench.run(SET, &[DATA, FENCE], &[&seen.to_string(), "value"]),
            Reply::Int(1)
        );
        // compared as numbers, not as text: 9 is below 10
        for stale in [1, 6, seen - 1] {
            let stale = stale.to_string();
            assert_eq!(
                bench.untouched(SET, &[DATA, FENCE], &[&stale, "late"]),
                stale_at(seen),
                "{stale}"
            );
            assert_eq!(
                bench.untouched(GET, &[DATA, FENCE], &[&stale]),
                stale_at(seen),
                "{stale}"
            );
        }
    }
    bench.set_up(&["DEL", DATA]);
    assert_eq!(
        bench.untouched(SET, &[DATA, FENCE], &["7", "late"]),
        stale_at(9_007_199_254_740_991),
        "outlives the value"
    );
}

#[test]
fn a_guarded_read_returns_the_value_and_refuses_lower_tokens() {
    let bench = Bench::new();
    assert_eq!(
        bench.run(GET, &[DATA, FENCE], &["5"]),
        read(Reply::Nil),
        "there is none"
    );
    assert_eq!(bench.call(&["GET", FENCE]), Reply::Text("5".into()));
    assert_eq!(
        bench.untouched(GET, &[DATA, FENCE], &["5"]),
        read(Reply::Nil),
        "sent twice"
    );
    assert_eq!(
        bench.untouched(SET, &[DATA, FENCE], &["4", "late"]),
        stale_at(5)
    );
    assert_eq!(bench.run(SET, &[DATA, FENCE], &["5", "a"]), Reply::Int(1));
    assert_eq!(
        bench.run(GET, &[DATA, FENCE], &["6"]),
        read(Reply::Text("a".into()))
    );
    assert_eq!(
        bench.untouched(SET, &[DATA, FENCE], &["5", "late"]),
        stale_at(6)
    );
    // a value that was written before the key was guarded
    bench.set_up(&["SET", "old", "1815"]);
    let answer = bench.run(GET, &["old", "nestlock_fence:{old}"], &["1"]);
    assert_eq!(answer, read(Reply::Text("1815".into())));
}

#[test]
fn guarded_reads_and_writes_refuse_bad_tokens_and_bad_keys() {
    let bench = Bench::real();
    let refused = |what: &str, token: &str, starts: &str| {
        for (script, args) in [(SET, &[token, "late"] as &[&str]), (GET, &[token])] {
            let error = bench.refused(script, &[DATA, FENCE], args);
            assert!(error.starts_with(starts), "{script}, {what}: {error}");
        }
    };
    for fenced in [false, true] {
        if fenced {
            assert_eq!(
                bench.run(SET, &[DATA, FENCE], &["3", "value"]),
                Reply::Int(1)
            );
        }
        for bad in NO_TOKENS.iter().copied().chain(["0", "007"]) {
            refused(bad, bad, "ERR nestlock: a token");
        }
    }
    for bad in NO_TOKENS {
        bench.set_up(&["SET", FENCE, bad]);
        refused(bad, "9", "ERR nestlock: the fence");
    }
    for key in [DATA, FENCE] {
        for (command, value) in [
            ("RPUSH", &["a"] as &[&str]),
            ("HSET", &["a", "b"]),
            ("SADD", &["a"]),
        ] {
            bench.set_up(&["DEL", DATA, FENCE]);
            bench.set_up(
                &[command, key]
                    .iter()
                    .chain(value)
                    .copied()
                    .collect::<Vec<_>>(),
            );
            refused(command, "9", "WRONGTYPE");
        }
    }
}

#[test]
fn a_guarded_write_that_is_refused_raises_no_fence() {
    let bench = Bench::real();
    assert_eq!(
        bench.run(SET, &[DATA, FENCE], &["3", "value"]),
        Reply::Int(1)
    );
    bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    assert!(
        bench
            .refused(SET, &[DATA, FENCE], &["4", "more"])
            .starts_with("OOM")
    );
    assert!(
        bench
            .refused(GET, &[DATA, FENCE], &["4"])
            .starts_with("OOM")
    );
    assert_eq!(
        bench.untouched(GET, &[DATA, FENCE], &["3"]),
        read(Reply::Text("value".into()))
    );
    assert_eq!(
        bench.untouched(SET, &[DATA, FENCE], &["2", "late"]),
        stale_at(3)
    );
    bench.set_up(&["CONFIG", "SET", "maxmemory", "0"]);
    let before = bench.snapshot();
    for denied in ["mset", "strlen", "get"] {
        assert!(
            bench
                .without(denied, SET, &[DATA, FENCE], &["4", "more"])
                .is_error(),
            "{denied}"
        );
        assert_eq!(bench.snapshot(), before, "{denied}");
    }
    for denied in ["set", "get"] {
        assert!(
            bench
                .without(denied, GET, &[DATA, FENCE], &["4"])
                .is_error(),
            "{denied}"
        );
        assert_eq!(bench.snapshot(), before, "{denied}");
    }
}
