//! `lua/reentrant`: each line under "Returns", each refusal, each script sent twice.

use std::time::Instant;

use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, RngSeed, TestRunner},
};

use super::{ACQUIRED, Bench, NO_COUNTS, NO_LEASES, busy, busy_ttl, eval, leases, source};
use crate::support::wire::{Reply, Wire};

const LOCK: &str = "orders:7";
const CHANNEL: &str = "redisson_lock__channel:{orders:7}";
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
/// Another client, with Redisson's numbering of threads.
const R: &str = "ffffffff-1111-4222-8333-444455556666:1";

const ACQUIRE: &str = "reentrant/acquire";
const RELEASE: &str = "reentrant/release";
const RENEW: &str = "reentrant/renew";
const FORCE: &str = "reentrant/force_release";
const INSPECT: &str = "reentrant/inspect";
const ALL: &str = "reentrant/acquire_together";
const RELEASE_ALL: &str = "reentrant/release_together";
/// Several locks, and the owner and channel of each for a release; an empty channel means no
/// waiters.
const LOCKS: [&str; 3] = ["a", "b", "c"];
const CHANNELS: [&str; 6] = [A, "heard:a", A, "", A, "heard:c"];

impl Bench {
    fn acquire(&self, owner: &str, lease: &str, holds: &str) -> Reply {
        self.run(ACQUIRE, &[LOCK], &[owner, lease, holds])
    }

    fn release(&self, owner: &str, holds: &str) -> Reply {
        self.run(RELEASE, &[LOCK], &[owner, holds, CHANNEL])
    }

    fn held_by(&self, owner: &str, lease: &str, holds: &str) {
        assert_eq!(self.acquire(owner, lease, "1"), ACQUIRED);
        if holds != "1" {
            assert_eq!(self.acquire(owner, lease, holds), ACQUIRED);
        }
    }

    fn assert_record(&self, owner: &str, holds: i64) {
        assert_eq!(self.server.record(LOCK), [(owner.to_owned(), holds)]);
    }

    fn assert_ttl_about(&self, lease: i64) {
        let ttl = self.server.pttl(LOCK);
        assert!(
            ttl > lease - 5_000 && ttl <= lease,
            "TTL {ttl} for a lease of {lease}"
        );
    }

    /// Replaces the record by other data.
    fn put(&self, command: &[&str]) {
        self.set_up(&["DEL", LOCK]);
        self.set_up(command);
    }

    /// Replaces the record by a hash that is not a record of a reentrant lock.
    fn put_hash(&self, what: usize) -> &'static str {
        self.set_up(&["DEL", LOCK]);
        let (name, fields): (_, &[&str]) = [
            ("one field of data", &["name", "Ada"] as &[&str]),
            ("several fields of data", &["name", "Ada", "born", "1815"]),
            ("a Redisson read lock", &["mode", "read", R, "1"]),
            (
                "a Redisson write lock",
                &[
                    "mode",
                    "write",
                    "ffffffff-1111-4222-8333-444455556666:1:write",
                    "1",
                ],
            ),
            (
                "two owners",
                &[R, "1", "eeeeeeee-1111-4222-8333-444455556666:1", "1"],
            ),
        ][what];
        let command: Vec<&str> = ["HSET", LOCK].iter().chain(fields).copied().collect();
        self.set_up(&command);
        if what == 1 {
            self.set_up(&["PEXPIRE", LOCK, "60000"]);
        }
        name
    }
}

// --- acquire ---

#[test]
fn acquire_of_a_free_lock_returns_1_and_writes_the_whole_record() {
    let bench = Bench::new();
    assert_eq!(bench.acquire(A, "30000", "1"), ACQUIRED);
    bench.assert_record(A, 1);
    bench.assert_ttl_about(30_000);
    assert_eq!(bench.snapshot().len(), 1, "nothing but the record");
}

#[test]
fn acquire_sent_twice_changes_nothing_and_returns_the_same() {
    let bench = Bench::new();
    bench.held_by(A, "60000", "1");
    let first = bench.snapshot();
    assert_eq!(bench.acquire(A, "30000", "1"), ACQUIRED);
    assert_eq!(
        bench.snapshot(),
        first,
        "the count stays 1, the longer TTL stays"
    );
    assert_eq!(bench.acquire(A, "90000", "1"), ACQUIRED);
    bench.assert_record(A, 1);
    bench.assert_ttl_about(90_000);
}

#[test]
fn acquire_raises_the_count_on_re_entry_and_takes_no_hold_away() {
    let bench = Bench::new();
    bench.held_by(A, "30000", "1");
    for (holds, says) in [(2, 2), (2, 2), (3, 3), (2, 3), (10, 10), (9, 10), (1, 10)] {
        assert_eq!(bench.acquire(A, "30000", &holds.to_string()), ACQUIRED);
        bench.assert_record(A, says);
    }
}

/// Lua parses more as numbers than valid counts; NaN, for one, is never less than another number.
#[test]
fn acquire_overwrites_what_is_no_count() {
    let bench = Bench::new();
    for damaged in [
        "nan",
        "-nan",
        "inf",
        "1e18",
        "0x10",
        " 3",
        "-1",
        "1.5",
        "text",
        "",
        "9999999999",
    ] {
        bench.set_up(&["HSET", LOCK, A, damaged]);
        bench.set_up(&["PEXPIRE", LOCK, "30000"]);
        assert_eq!(bench.acquire(A, "30000", "2"), ACQUIRED);
        bench.assert_record(A, 2);
    }
}

#[test]
fn acquire_on_re_entry_lengthens_the_ttl_and_never_shortens_it() {
    let bench = Bench::new();
    bench.held_by(A, "60000", "1");
    let expires = bench.expires(LOCK);
    assert_eq!(bench.acquire(A, "1000", "2"), ACQUIRED);
    assert_eq!(bench.expires(LOCK), expires);
    assert_eq!(bench.acquire(A, "120000", "3"), ACQUIRED);
    bench.assert_ttl_about(120_000);
}

#[test]
fn acquire_of_a_held_lock_returns_its_ttl() {
    let bench = Bench::new();
    bench.held_by(A, "30000", "2");
    for _ in 0..2 {
        let ttl = busy_ttl(&bench.untouched(ACQUIRE, &[LOCK], &[B, "60000", "1"]));
        assert!((25_000..=30_000).contains(&ttl), "{ttl}");
    }
}

/// H3: a record without a TTL is busy for every other owner, and never acquired.
#[test]
fn h3_acquire_of_a_record_without_ttl_is_busy() {
    let bench = Bench::new();
    bench.held_by(A, "30000", "1");
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(
        bench.untouched(ACQUIRE, &[LOCK], &[B, "30000", "1"]),
        busy(-1)
    );
    // its own owner holds it, and leaves it without a TTL
    assert_eq!(
        bench.untouched(ACQUIRE, &[LOCK], &[A, "30000", "1"]),
        ACQUIRED
    );
    assert_eq!(bench.acquire(A, "30000", "2"), ACQUIRED);
    bench.assert_record(A, 2);
    assert_eq!(bench.expires(LOCK), -1, "no short TTL in place of none");
}

#[test]
fn acquire_of_a_second_hold_without_a_first_returns_lost() {
    let bench = Bench::new();
    assert_eq!(
        bench.untouched(ACQUIRE, &[LOCK], &[A, "30000", "2"]),
        Reply::Int(-2)
    );
    bench.held_by(B, "30000", "1");
    for _ in 0..2 {
        assert_eq!(
            bench.untouched(ACQUIRE, &[LOCK], &[A, "30000", "2"]),
            Reply::Int(-2),
            "taken over"
        );
    }
}

#[test]
fn f30_acquire_of_another_hash_returns_wrong_kind() {
    let bench = Bench::new();
    for what in 0..5 {
        let name = bench.put_hash(what);
        for holds in ["1", "2"] {
            assert_eq!(
                bench.untouched(ACQUIRE, &[LOCK], &[A, "30000", holds]),
                Reply::Int(-3),
                "{name}"
            );
        }
    }
}

#[test]
fn f29_scripts_refuse_a_key_of_another_type() {
    let bench = Bench::new();
    let commands: [(&str, &[&str]); 6] = [
        ("string", &["SET", LOCK, "data"]),
        ("list", &["RPUSH", LOCK, "a", "b"]),
        ("set", &["SADD", LOCK, "a"]),
        ("zset", &["ZADD", LOCK, "1", "a"]),
        ("stream", &["XADD", LOCK, "*", "a", "b"]),
        ("string with TTL", &["SET", LOCK, "data", "PX", "60000"]),
    ];
    for (name, command) in commands
        .into_iter()
        .filter(|(name, _)| bench.server.has_type(name))
    {
        bench.put(command);
        for (script, args) in [
            (ACQUIRE, &[A, "30000", "1"] as &[&str]),
            (ACQUIRE, &[A, "30000", "2"]),
            (RELEASE, &[A, "0", CHANNEL]),
            (RELEASE, &[A, "1", CHANNEL]),
            (FORCE, &[CHANNEL]),
            (INSPECT, &[]),
        ] {
            let error = bench.refused(script, &[LOCK], args);
            assert!(
                error.starts_with("WRONGTYPE"),
                "{script} on a {name}: {error}"
            );
        }
        assert_eq!(
            bench.untouched(RENEW, &[LOCK], &[A, "30000"]),
            Reply::List(vec![Reply::Int(-1)]),
            "{name}"
        );
    }
}

/// H1, H2, F39, L14: an invalid lease is refused, and leaves no record, in particular none without
/// a TTL.
#[test]
fn h1_h2_f39_acquire_refuses_leases_that_are_none() {
    let bench = Bench::new();
    for lease in NO_LEASES {
        bench.refused(ACQUIRE, &[LOCK], &[A, lease, "1"]);
    }
    bench.held_by(A, "30000", "1");
    for lease in NO_LEASES {
        let renewed = bench.untouched(RENEW, &[LOCK], &[A, lease]);
        assert!(
            renewed.is_error() || renewed.list() == [Reply::Int(-2)],
            "{lease:?}: {renewed:?}"
        );
        bench.refused(ACQUIRE, &[LOCK], &[A, lease, "2"]);
        bench.refused(ACQUIRE, &[LOCK], &[A, lease, "1"]);
        bench.untouched(ACQUIRE, &[LOCK], &[B, lease, "1"]);
    }
    bench.assert_every_key_expires();
}

/// R111: a count is a whole number in decimal digits.
#[test]
fn r111_scripts_refuse_counts_that_are_none() {
    let bench = Bench::new();
    let no_holds: Vec<&str> = NO_COUNTS.iter().copied().chain(["0"]).collect();
    for holds in &no_holds {
        bench.refused(ACQUIRE, &[LOCK], &[A, "30000", holds]);
    }
    bench.held_by(A, "30000", "3");
    for holds in &no_holds {
        bench.refused(ACQUIRE, &[LOCK], &[A, "60000", holds]);
    }
    for holds in NO_COUNTS {
        bench.refused(RELEASE, &[LOCK], &[A, holds, CHANNEL]);
    }
}

/// F39: the server may refuse the TTL after the record was written: the script then undoes the
/// write.
#[test]
fn f39_acquire_takes_its_write_back_when_the_ttl_is_refused() {
    // a lease that passes the checks, but that the server cannot add to its clock
    let error = Bench::new().refused(ACQUIRE, &[LOCK], &[A, "9223372036854775807", "1"]);
    assert!(
        error.contains("lease") || error.contains("expire"),
        "{error}"
    );
}

/// Returns whether the error is an ACL denial inside a script, as Redis up to 7.0 or later words
/// it.
fn is_denial(error: &str) -> bool {
    [
        "The user executing the script can't",
        "ACL failure in script: ",
    ]
    .iter()
    .any(|words| error.contains(words))
        || error.starts_with("NOPERM")
}

/// F39: the script also undoes its write for a user who may run every command but PEXPIRE.
#[test]
fn f39_acquire_takes_its_write_back_when_pexpire_is_denied() {
    let bench = Bench::real();
    bench.set_up(&[
        "ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-pexpire",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let before = bench.snapshot();
    let command = eval(&source(ACQUIRE), &[LOCK], &[A, "30000", "1"]);
    let reply = limited
        .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
        .unwrap();
    assert!(is_denial(reply.text()), "{reply:?}");
    assert_eq!(bench.snapshot(), before);
}

// --- release ---

/// A release to zero replies 1, deletes the record, and says so once.
#[test]
fn release_to_zero_deletes_the_record_and_says_so_only_once() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for holds in ["1", "5"] {
        bench.held_by(A, "30000", holds);
        assert_eq!(bench.release(A, "0"), Reply::Int(1));
        assert_eq!(bench.snapshot(), []);
        assert_eq!(ears.heard(&bench), ["0"]);
        // a second send finds no hold, which after the first means success
        assert_eq!(
            bench.untouched(RELEASE, &[LOCK], &[A, "0", CHANNEL]),
            Reply::Nil
        );
        assert_eq!(ears.heard(&bench), [] as [&str; 0], "said once only");
    }
}

#[test]
fn release_of_some_holds_returns_0_and_leaves_the_ttl() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    bench.held_by(A, "30000", "3");
    let expires = bench.expires(LOCK);
    for holds in [2, 2, 1, 1] {
        assert_eq!(bench.release(A, &holds.to_string()), Reply::Int(0));
        bench.assert_record(A, holds);
        assert_eq!(
            bench.expires(LOCK),
            expires,
            "Redisson resets the TTL here; we do not"
        );
    }
    assert_eq!(
        bench.untouched(RELEASE, &[LOCK], &[A, "1", CHANNEL]),
        Reply::Int(0),
        "a second send changes nothing"
    );
    assert_eq!(
        bench.untouched(RELEASE, &[LOCK], &[A, "9", CHANNEL]),
        Reply::Int(0),
        "a release never adds holds"
    );
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

/// R43, F38, P9: a release by another owner, or of a free lock, returns nil.
#[test]
fn r43_f38_release_by_another_owner_returns_nil() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for holds in ["0", "1"] {
        assert_eq!(
            bench.untouched(RELEASE, &[LOCK], &[A, holds, CHANNEL]),
            Reply::Nil,
            "of a free lock"
        );
    }
    bench.held_by(A, "30000", "2");
    for holds in ["0", "1"] {
        assert_eq!(
            bench.untouched(RELEASE, &[LOCK], &[B, holds, CHANNEL]),
            Reply::Nil
        );
        // neither a part of the owner nor a longer name matches
        assert_eq!(
            bench.untouched(RELEASE, &[LOCK], &[&A[..36], holds, CHANNEL]),
            Reply::Nil
        );
        assert_eq!(
            bench.untouched(RELEASE, &[LOCK], &[&format!("{A}.1"), holds, CHANNEL]),
            Reply::Nil
        );
    }
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

/// `n>m`: a release by a client that may not be the only one to count. Holds for each kind whose
/// record has a count.
#[test]
#[allow(clippy::type_complexity, reason = "a table")]
fn release_of_a_wrong_count_returns_the_real_one_and_no_change() {
    let (fair, rw) = (
        [
            "redisson_lock_queue:{l}",
            "redisson_lock_timeout:{l}",
            "nestlock_fair_seen:{l}",
        ],
        "{l}:",
    );
    let writer = format!("{A}:write");
    let of = |field: &str| {
        [
            "HSET".to_owned(),
            "l".to_owned(),
            field.to_owned(),
            "2".to_owned(),
        ]
    };
    let kinds: [(&str, Vec<&str>, Vec<&str>, &str, Option<&str>); 5] = [
        (RELEASE, vec!["l"], vec!["c"], A, None),
        (
            "fair/release",
            [&["l"][..], &fair].concat(),
            vec!["c", "0"],
            A,
            None,
        ),
        (
            "read_write/read_release",
            vec!["l", "readers"],
            vec!["c", rw],
            A,
            Some("read"),
        ),
        (
            "read_write/write_release",
            vec!["l", "intent"],
            vec!["c", rw],
            &writer,
            Some("write"),
        ),
        (
            "read_write/write_release_record",
            vec!["l"],
            vec!["c"],
            &writer,
            Some("write"),
        ),
    ];
    for (script, keys, rest, field, mode) in kinds {
        let bench = Bench::new();
        let args = |holds| [&[A, holds][..], &rest].concat();
        bench.set_up(&of(field).each_ref().map(String::as_str));
        if let Some(mode) = mode {
            bench.set_up(&["HSET", "l", "mode", mode]);
        }
        if mode == Some("read") {
            for hold in ["1", "2"] {
                bench.set_up(&[
                    "SET",
                    &format!("{rw}{A}:rwlock_timeout:{hold}"),
                    "1",
                    "PX",
                    "60000",
                ]);
            }
        }
        bench.set_up(&["PEXPIRE", "l", "60000"]);
        for other in ["1>0", "3>2", "3>0"] {
            let answer = bench.untouched(script, &keys, &args(other));
            assert_eq!(
                answer.list(),
                [Reply::Int(0), Reply::Int(2)],
                "{script} {other}"
            );
        }
        for wrong in ["0>0", ">1", "2>", "2>-1", "2>1>0", "a>b"] {
            assert!(
                bench.refused(script, &keys, &args(wrong)).contains("holds"),
                "{script} {wrong}"
            );
        }
        assert_eq!(
            bench.run(script, &keys, &args("2>1")),
            Reply::Int(0),
            "{script}"
        );
        assert_eq!(
            bench.untouched(script, &keys, &args("2>1")).list(),
            [Reply::Int(0), Reply::Int(1)],
            "{script}"
        );
        assert_eq!(
            bench.run(script, &keys, &args("1>0")),
            Reply::Int(1),
            "{script}"
        );
        assert_eq!(
            bench.run(script, &keys, &args("1>0")),
            Reply::Nil,
            "{script}"
        );
        assert_eq!(bench.snapshot(), [], "{script}");
    }
}

#[test]
fn release_deletes_its_own_field_only() {
    let bench = Bench::new();
    bench.held_by(A, "30000", "1");
    bench.set_up(&["HSET", LOCK, "name", "Ada"]);
    let expires = bench.expires(LOCK);
    assert_eq!(bench.release(A, "0"), Reply::Int(1));
    assert_eq!(
        bench.call(&["HGETALL", LOCK]).list(),
        [Reply::Text("name".into()), Reply::Text("Ada".into())]
    );
    assert_eq!(bench.expires(LOCK), expires);
}

// --- renew ---

/// A renewal replies for each lock, and one bad key costs the others nothing.
#[test]
fn renew_replies_for_each_lock_and_a_bad_key_harms_no_other() {
    let bench = Bench::new();
    for lock in ["held", "long", "taken", "persisted"] {
        let owner = if lock == "taken" { B } else { A };
        let lease = if lock == "long" { "90000" } else { "10000" };
        assert_eq!(bench.run(ACQUIRE, &[lock], &[owner, lease, "1"]), ACQUIRED);
    }
    bench.set_up(&["PERSIST", "persisted"]);
    bench.set_up(&["SET", "string", "data"]);
    bench.set_up(&["HSET", "hash", "name", "Ada"]);
    bench.set_up(&["HSET", "rw", "mode", "read", R, "1"]);
    assert_eq!(bench.run(ACQUIRE, &["last"], &[A, "10000", "1"]), ACQUIRED);
    let keys = [
        "string",
        "held",
        "gone",
        "taken",
        "hash",
        "long",
        "rw",
        "persisted",
        "last",
    ];
    let args = leases(&[A; 9], "30000");
    let values = || -> Vec<_> {
        bench
            .server
            .dump()
            .into_iter()
            .map(|(key, value, _)| (key, value))
            .collect()
    };
    let (others, long) = (values(), (Instant::now(), bench.expires("long")));
    for _ in 0..2 {
        let answers: Vec<i64> = bench
            .run(RENEW, &keys, &args)
            .list()
            .iter()
            .map(Reply::int)
            .collect();
        assert_eq!(answers, [-1, 1, 0, -1, -1, 1, -1, 1, 1]);
    }
    assert_eq!(values(), others, "renewing writes no value");
    for lock in ["held", "last"] {
        let ttl = bench.server.pttl(lock);
        assert!((25_000..=30_000).contains(&ttl), "{lock}: {ttl}");
    }
    bench.assert_left("long", long, 2);
    assert!(
        bench.server.pttl("taken") <= 10_000,
        "another owner's lock is not renewed"
    );
    assert_eq!(bench.server.pttl("persisted"), -1);
    for data in ["string", "hash", "rw"] {
        assert_eq!(bench.server.pttl(data), -1, "{data}");
    }
}

#[test]
fn renew_returns_minus_2_where_the_server_refuses() {
    let bench = Bench::real();
    bench.held_by(A, "10000", "1");
    assert_eq!(bench.run(ACQUIRE, &["long"], &[A, "90000", "1"]), ACQUIRED);
    bench.set_up(&[
        "ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-pexpire",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let before = bench.snapshot();
    let command = eval(
        &source(RENEW),
        &[LOCK, "gone", "long"],
        &leases(&[A; 3], "30000"),
    );
    let reply = limited
        .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
        .unwrap();
    // a longer TTL is set again as well, so that WAIT has a write to confirm
    assert_eq!(
        reply.list(),
        [Reply::Int(-2), Reply::Int(0), Reply::Int(-2)]
    );
    assert_eq!(bench.snapshot(), before);
}

#[test]
fn renew_of_a_single_lock_returns_the_servers_refusal() {
    let bench = Bench::real();
    bench.held_by(A, "10000", "1");
    for denied in ["pexpire", "pttl", "hmget"] {
        bench.set_up(&[
            "ACL",
            "SETUSER",
            "limited",
            "on",
            ">pw",
            "~*",
            "&*",
            "+@all",
            &format!("-{denied}"),
        ]);
        let mut limited = bench.server.wire();
        limited.call(&["AUTH", "limited", "pw"]).unwrap();
        let before = bench.snapshot();
        for keys in [&[LOCK] as &[&str], &[LOCK, LOCK]] {
            let command = eval(&source(RENEW), keys, &leases(&vec![A; keys.len()], "30000"));
            let reply = limited
                .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
                .unwrap();
            match reply {
                Reply::Error(error) if keys.len() == 1 => {
                    assert!(is_denial(&error), "without {denied}: {error}");
                }
                Reply::List(answers) if keys.len() == 2 => {
                    assert_eq!(answers, [Reply::Int(-2), Reply::Int(-2)]);
                }
                reply => panic!("without {denied}: {reply:?}"),
            }
        }
        assert_eq!(bench.snapshot(), before);
    }
}

/// A renewal is refused as a whole if the numbers of keys and arguments do not match, or one lease
/// is invalid.
#[test]
fn renew_refuses_calls_that_do_not_add_up() {
    let bench = Bench::new();
    bench.held_by(A, "10000", "1");
    bench.refused(RENEW, &[LOCK], &[A]);
    bench.refused(RENEW, &[LOCK], &[A, "30000", B]);
    bench.refused(RENEW, &[LOCK], &[A, "30000", B, "30000"]);
    bench.refused(RENEW, &[LOCK, "other"], &[A, "30000"]);
    // one bad lease: nothing is renewed
    bench.refused(RENEW, &[LOCK, "other"], &[A, "30000", A, "0"]);
}

#[test]
fn renew_gives_each_lock_its_own_lease() {
    let bench = Bench::new();
    for lock in ["a", "b", "c"] {
        assert_eq!(bench.run(ACQUIRE, &[lock], &[A, "10000", "1"]), ACQUIRED);
    }
    let args = [A, "30000", A, "600000", B, "60000"];
    assert_eq!(
        bench.run(RENEW, &["a", "b", "c"], &args).list(),
        [1, 1, -1].map(Reply::Int)
    );
    let ttls = ["a", "b", "c"].map(|lock| bench.server.pttl(lock) / 5_000);
    assert!(
        (5..=6).contains(&ttls[0]) && (119..=120).contains(&ttls[1]) && (1..=2).contains(&ttls[2]),
        "{ttls:?}"
    );
}

#[test]
fn renew_takes_500_locks_at_once() {
    let bench = Bench::new();
    let locks: Vec<String> = (0..500).map(|n| format!("l{n}")).collect();
    for lock in &locks {
        assert_eq!(bench.run(ACQUIRE, &[lock], &[A, "10000", "1"]), ACQUIRED);
    }
    let keys: Vec<&str> = locks.iter().map(String::as_str).collect();
    assert_eq!(
        bench.run(RENEW, &keys, &leases(&[A; 500], "30000")).list(),
        vec![Reply::Int(1); 500]
    );
    assert!(locks.iter().all(|lock| bench.server.pttl(lock) > 20_000));
}

// --- acquire_together and release_together ---

#[test]
fn acquire_together_returns_1_and_writes_every_record() {
    let bench = Bench::new();
    assert_eq!(bench.run(ALL, &LOCKS, &[A, "30000"]), ACQUIRED);
    for lock in LOCKS {
        assert_eq!(bench.server.record(lock), [(A.to_owned(), 1)]);
        assert!(
            (25_000..=30_000).contains(&bench.server.pttl(lock)),
            "{lock}"
        );
    }
    assert_eq!(bench.snapshot().len(), 3, "nothing but the records");
}

/// An acquire of locks together that is sent twice changes nothing but a shorter TTL.
#[test]
fn acquire_together_sent_twice_changes_only_a_shorter_ttl() {
    let bench = Bench::new();
    for lease in ["60000", "60000", "30000"] {
        assert_eq!(bench.run(ALL, &LOCKS, &[A, lease]), ACQUIRED);
        assert!(
            LOCKS.iter().all(|lock| bench.server.pttl(lock) > 50_000),
            "the longer TTL stays"
        );
    }
    // some of them are held, and one of those has a nested hold
    bench.set_up(&["DEL", "b"]);
    bench.set_up(&["HSET", "c", A, "2"]);
    let kept = bench.expires("a");
    assert_eq!(bench.run(ALL, &LOCKS, &[A, "1000"]), ACQUIRED);
    for lock in LOCKS {
        assert_eq!(
            bench.server.record(lock),
            [(A.to_owned(), if lock == "c" { 2 } else { 1 })]
        );
    }
    assert_eq!(bench.expires("a"), kept);
    assert!(bench.server.pttl("b") <= 1000);
}

/// H3: an acquire of locks together does not count a record without a TTL as free either.
#[test]
fn h3_acquire_together_returns_which_is_busy_and_takes_none() {
    for (at, lock) in LOCKS.into_iter().enumerate() {
        let bench = Bench::new();
        assert_eq!(bench.run(ACQUIRE, &[lock], &[B, "30000", "1"]), ACQUIRED);
        let number = at as i64 + 1;
        let answer = bench.untouched(ALL, &LOCKS, &[A, "60000"]);
        assert_eq!(answer.list()[0], Reply::Int(number));
        assert!(
            (25_000..=30_000).contains(&answer.list()[1].int()),
            "{answer:?}"
        );
        bench.set_up(&["PERSIST", lock]);
        assert_eq!(
            bench.untouched(ALL, &LOCKS, &[A, "60000"]).list(),
            [Reply::Int(number), Reply::Int(-1)]
        );
    }
}

/// An acquire of locks together refuses what is no record, and takes none of them.
#[test]
fn f29_f30_acquire_together_refuses_a_non_record_and_takes_none() {
    let bench = Bench::new();
    let locks = ["a", LOCK, "c"];
    for what in 0..5 {
        let name = bench.put_hash(what);
        let answer = bench.untouched(ALL, &locks, &[A, "30000"]);
        assert_eq!(answer.list(), [Reply::Int(2), Reply::Int(-3)], "{name}");
    }
    bench.put(&["SET", LOCK, "data"]);
    assert!(
        bench
            .refused(ALL, &locks, &[A, "30000"])
            .starts_with("WRONGTYPE")
    );
}

/// H1, H2, F39: if the server refuses a TTL, the script undoes all earlier writes.
#[test]
fn h1_h2_f39_acquire_together_takes_every_write_back() {
    let bench = Bench::new();
    for lease in NO_LEASES {
        bench.refused(ALL, &LOCKS, &[A, lease]);
    }
    // an earlier hold stays
    assert_eq!(bench.run(ACQUIRE, &["a"], &[A, "30000", "1"]), ACQUIRED);
    bench.refused(ALL, &LOCKS, &[A, "9223372036854775807"]);

    let bench = Bench::real();
    for denied in ["-pexpire", "-hset"] {
        bench.set_up(&[
            "ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", denied,
        ]);
        let mut limited = bench.server.wire();
        limited.call(&["AUTH", "limited", "pw"]).unwrap();
        let command = eval(&source(ALL), &LOCKS, &[A, "30000"]);
        let reply = limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap();
        assert!(reply.is_error(), "{denied}: {reply:?}");
        assert_eq!(bench.snapshot(), [], "{denied}: {reply:?}");
    }
}

#[test]
fn release_together_replies_for_each_and_says_so_once() {
    let bench = Bench::new();
    let mut ears = [bench.listen("heard:a"), bench.listen("heard:c")];
    assert_eq!(bench.run(ALL, &LOCKS, &[A, "30000"]), ACQUIRED);
    assert_eq!(
        bench.run(RELEASE_ALL, &LOCKS, &CHANNELS).list(),
        vec![Reply::Int(1); 3]
    );
    assert_eq!(bench.snapshot(), []);
    assert!(ears.iter_mut().all(|ears| ears.heard(&bench) == ["0"]));
    // sent twice
    assert_eq!(
        bench.untouched(RELEASE_ALL, &LOCKS, &CHANNELS).list(),
        vec![Reply::Nil; 3]
    );
    // each with its own owner
    assert_eq!(bench.run(ACQUIRE, &["a"], &[A, "30000", "1"]), ACQUIRED);
    assert_eq!(bench.run(ACQUIRE, &["b"], &[B, "30000", "1"]), ACQUIRED);
    assert_eq!(
        bench.run(RELEASE_ALL, &LOCKS[..2], &[A, "", B, ""]).list(),
        vec![Reply::Int(1); 2]
    );
    assert_eq!(bench.snapshot(), []);
    // held by another owner, or next to other data; any hold count
    assert_eq!(bench.run(ACQUIRE, &["a"], &[B, "30000", "1"]), ACQUIRED);
    bench.set_up(&["HSET", "b", A, "3", "name", "Ada"]);
    bench.set_up(&["HSET", "c", A, "1", "mode", "read"]);
    assert_eq!(
        bench.run(RELEASE_ALL, &LOCKS, &CHANNELS).list(),
        [Reply::Nil, Reply::Int(1), Reply::Nil]
    );
    assert_eq!(bench.server.record("a"), [(B.to_owned(), 1)]);
    assert_eq!(
        bench.call(&["HGETALL", "b"]).list(),
        [Reply::Text("name".into()), Reply::Text("Ada".into())]
    );
    assert_eq!(bench.call(&["HLEN", "c"]), Reply::Int(2));
    assert!(ears.iter_mut().all(|ears| ears.heard(&bench).is_empty()));
}

#[test]
fn release_together_writes_nothing_where_it_is_refused() {
    let bench = Bench::real();
    assert_eq!(bench.run(ALL, &LOCKS, &[A, "30000"]), ACQUIRED);
    bench.refused(RELEASE_ALL, &LOCKS, &CHANNELS[..5]);
    let mut ears = bench.listen("heard:a");
    bench.set_up(&["SET", "data", "data"]);
    let error = bench.refused(RELEASE_ALL, &["a", "b", "data"], &CHANNELS);
    assert!(error.starts_with("WRONGTYPE"), "{error}");
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);

    bench.set_up(&[
        "ACL",
        "SETUSER",
        "limited",
        "on",
        ">pw",
        "~*",
        "resetchannels",
        "&heard:a",
        "+@all",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let before = bench.snapshot();
    let command = eval(&source(RELEASE_ALL), &LOCKS, &CHANNELS);
    assert!(
        limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap()
            .is_error()
    );
    assert_eq!(bench.snapshot(), before);
}

/// R25, H12, F25: without memory, no locks are acquired together, but they can be released
/// together.
#[test]
fn h12_f25_a_full_server_takes_no_locks_together_and_frees_all() {
    let bench = Bench::real();
    assert_eq!(bench.run(ALL, &LOCKS[..2], &[A, "30000"]), ACQUIRED);
    bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    for locks in [&LOCKS[..], &LOCKS[2..]] {
        assert!(bench.refused(ALL, locks, &[A, "60000"]).starts_with("OOM"));
    }
    assert_eq!(
        bench.run(RELEASE_ALL, &LOCKS[..2], &CHANNELS[..4]).list(),
        vec![Reply::Int(1); 2]
    );
    assert_eq!(bench.snapshot(), []);
}

#[test]
fn five_hundred_locks_are_taken_and_given_back_together() {
    let bench = Bench::new();
    let locks: Vec<String> = (0..500).map(|n| format!("l{n}")).collect();
    let keys: Vec<&str> = locks.iter().map(String::as_str).collect();
    assert_eq!(bench.run(ALL, &keys, &[A, "30000"]), ACQUIRED);
    assert!(keys.iter().all(|lock| bench.server.pttl(lock) > 20_000));
    let args: Vec<&str> = std::iter::repeat_n([A, CHANNEL], 500).flatten().collect();
    assert_eq!(
        bench.run(RELEASE_ALL, &keys, &args).list(),
        vec![Reply::Int(1); 500]
    );
    assert_eq!(bench.snapshot(), []);
}

// --- force_release and inspect ---

/// P8: waiters get one message.
#[test]
fn p8_force_release_frees_any_owners_lock_and_says_so_once() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for _ in 0..2 {
        assert_eq!(
            bench.untouched(FORCE, &[LOCK], &[CHANNEL]),
            Reply::Int(0),
            "no owner holds it"
        );
    }
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
    for persisted in [false, true] {
        bench.held_by(A, "30000", "3");
        if persisted {
            bench.set_up(&["PERSIST", LOCK]);
        }
        assert_eq!(bench.run(FORCE, &[LOCK], &[CHANNEL]), Reply::Int(1));
        assert_eq!(bench.snapshot(), []);
        assert_eq!(
            bench.untouched(FORCE, &[LOCK], &[CHANNEL]),
            Reply::Int(0),
            "sent twice"
        );
        assert_eq!(ears.heard(&bench), ["0"]);
    }
}

#[test]
fn f30_force_release_and_inspect_leave_other_hashes_alone() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    for what in 0..5 {
        let name = bench.put_hash(what);
        assert_eq!(
            bench.untouched(FORCE, &[LOCK], &[CHANNEL]),
            Reply::Int(-3),
            "{name}"
        );
        assert_eq!(
            bench.untouched(INSPECT, &[LOCK], &[]),
            Reply::Int(-3),
            "{name}"
        );
        assert_eq!(
            bench.untouched(RELEASE, &[LOCK], &[A, "0", CHANNEL]),
            Reply::Nil,
            "{name}"
        );
        assert_eq!(
            bench.untouched(RENEW, &[LOCK], &[A, "30000"]),
            Reply::List(vec![Reply::Int(-1)]),
            "{name}"
        );
    }
    assert_eq!(ears.heard(&bench), [] as [&str; 0]);
}

#[test]
fn inspect_returns_nil_or_the_holder_and_writes_nothing() {
    let bench = Bench::new();
    assert_eq!(bench.untouched(INSPECT, &[LOCK], &[]), Reply::Nil);
    bench.held_by(A, "30000", "4");
    let answer = bench.untouched(INSPECT, &[LOCK], &[]);
    assert!((25_000..=30_000).contains(&answer.list()[0].int()));
    assert_eq!(answer.list()[1..], [Reply::Text(A.into()), Reply::Int(4)]);
    bench.set_up(&["PERSIST", LOCK]);
    let answer = bench.untouched(INSPECT, &[LOCK], &[]);
    assert_eq!(
        answer.list(),
        [Reply::Int(-1), Reply::Text(A.into()), Reply::Int(4)]
    );
}

// --- a full server, and a Redisson peer ---

/// R25, H12, F25: without memory, acquires are refused, but releases and renewals work.
#[test]
fn h12_f25_without_memory_locks_can_be_released_and_renewed() {
    let bench = Bench::real();
    let mut ears = bench.listen(CHANNEL);
    bench.held_by(A, "10000", "2");
    for maxmemory in ["0", "1"] {
        bench.set_up(&["CONFIG", "SET", "maxmemory", maxmemory]);
    }
    assert!(
        bench
            .refused(ACQUIRE, &["other"], &[A, "30000", "1"])
            .starts_with("OOM")
    );
    assert!(
        busy_ttl(&bench.untouched(ACQUIRE, &[LOCK], &[B, "30000", "1"])) > 0,
        "still busy"
    );
    assert!(
        bench
            .refused(ACQUIRE, &[LOCK], &[A, "1", "3"])
            .starts_with("OOM"),
        "a re-entry is one more number"
    );
    assert_eq!(bench.release(A, "1"), Reply::Int(0), "one number less");
    bench.assert_record(A, 1);
    assert_eq!(
        bench.run(RENEW, &[LOCK], &[A, "30000"]).list(),
        [Reply::Int(1)]
    );
    bench.assert_ttl_about(30_000);
    assert!(bench.untouched(INSPECT, &[LOCK], &[]).list()[0].int() > 0);
    assert_eq!(bench.release(A, "0"), Reply::Int(1));
    assert_eq!(ears.heard(&bench), ["0"]);
    assert_eq!(bench.snapshot(), []);

    bench.set_up(&["CONFIG", "SET", "maxmemory", "0"]);
    bench.held_by(A, "10000", "2");
    bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(bench.run(FORCE, &[LOCK], &[CHANNEL]), Reply::Int(1));
    assert_eq!(bench.snapshot(), []);
}

#[test]
fn a_record_that_redisson_wrote_is_respected() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    bench.set_up(&["HINCRBY", LOCK, R, "1"]);
    bench.set_up(&["PEXPIRE", LOCK, "30000"]);
    assert!(busy_ttl(&bench.untouched(ACQUIRE, &[LOCK], &[A, "60000", "1"])) > 25_000);
    assert_eq!(
        bench.untouched(RELEASE, &[LOCK], &[A, "0", CHANNEL]),
        Reply::Nil
    );
    assert_eq!(
        bench.untouched(RENEW, &[LOCK], &[A, "60000"]),
        Reply::List(vec![Reply::Int(-1)])
    );
    bench.set_up(&["HINCRBY", LOCK, R, "1"]);
    let answer = bench.untouched(INSPECT, &[LOCK], &[]);
    assert_eq!(answer.list()[1..], [Reply::Text(R.into()), Reply::Int(2)]);
    assert_eq!(bench.run(FORCE, &[LOCK], &[CHANNEL]), Reply::Int(1));
    assert_eq!(ears.heard(&bench), ["0"]);
    // Redisson can do arithmetic on nestlock's count
    bench.held_by(A, "30000", "2");
    assert_eq!(bench.call(&["HINCRBY", LOCK, A, "-1"]), Reply::Int(1));
}

#[test]
fn nothing_is_published_anywhere_else() {
    let bench = Bench::new();
    let mut wire = bench.server.wire();
    assert!(!wire.call(&["PSUBSCRIBE", "*"]).unwrap().is_error());
    bench.held_by(A, "30000", "2");
    bench.acquire(B, "30000", "1");
    bench.run(RENEW, &[LOCK], &[A, "30000"]);
    bench.run(INSPECT, &[LOCK], &[]);
    bench.release(A, "1");
    bench.release(A, "0");
    bench.set_up(&["PUBLISH", "end", "end"]);
    let first = wire.read().unwrap();
    assert_eq!(
        first.list()[2..],
        [Reply::Text(CHANNEL.into()), Reply::Text("0".into())]
    );
    assert_eq!(wire.read().unwrap().list()[2], Reply::Text("end".into()));
}

// --- any order ---

#[derive(Debug, Clone, Copy)]
enum Op {
    Acquire {
        owner: usize,
        lease: i64,
        holds: i64,
    },
    Release {
        owner: usize,
        holds: i64,
    },
    Renew {
        owner: usize,
        lease: i64,
    },
    ForceRelease,
    /// The lease ends.
    Expire,
    Persist,
    Inspect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    owner: usize,
    holds: i64,
    /// `None` means no TTL.
    ttl: Option<i64>,
}

/// The expected reply: an exact number, or one that counts down from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Nil,
    Exactly(i64),
    About(i64),
    /// The lock is held by another owner.
    Busy(Option<i64>),
}

/// A model of the scripts in a few lines.
#[derive(Debug, Default)]
struct Model {
    held: Option<Held>,
    messages: usize,
}

impl Model {
    fn step(&mut self, op: Op) -> Answer {
        let ttl_or = |ttl: Option<i64>| ttl.map_or(Answer::Exactly(-1), Answer::About);
        match (op, self.held) {
            (Op::Acquire { holds, .. }, None) if holds > 1 => Answer::Exactly(-2),
            (
                Op::Acquire {
                    owner,
                    lease,
                    holds,
                },
                None,
            ) => {
                self.held = Some(Held {
                    owner,
                    holds,
                    ttl: Some(lease),
                });
                Answer::Exactly(1)
            }
            (
                Op::Acquire {
                    owner,
                    lease,
                    holds,
                },
                Some(held),
            ) if held.owner == owner => {
                let ttl = held.ttl.map(|ttl| ttl.max(lease));
                self.held = Some(Held {
                    owner,
                    holds: holds.max(held.holds),
                    ttl,
                });
                Answer::Exactly(1)
            }
            (Op::Acquire { holds, .. }, Some(_)) if holds > 1 => Answer::Exactly(-2),
            (Op::Acquire { .. }, Some(held)) => Answer::Busy(held.ttl),
            (Op::Release { owner, holds: 0 }, Some(held)) if held.owner == owner => {
                self.held = None;
                self.messages += 1;
                Answer::Exactly(1)
            }
            (Op::Release { owner, holds }, Some(held)) if held.owner == owner => {
                self.held = Some(Held {
                    holds: holds.min(held.holds),
                    ..held
                });
                Answer::Exactly(0)
            }
            (Op::Release { .. }, _) | (Op::Inspect, None) => Answer::Nil,
            (Op::Renew { .. } | Op::ForceRelease | Op::Expire | Op::Persist, None) => {
                Answer::Exactly(0)
            }
            (Op::Renew { owner, lease }, Some(held)) if held.owner == owner => {
                self.held = Some(Held {
                    ttl: held.ttl.map(|ttl| ttl.max(lease)),
                    ..held
                });
                Answer::Exactly(1)
            }
            (Op::Renew { .. }, Some(_)) => Answer::Exactly(-1),
            (Op::ForceRelease, Some(_)) => {
                self.held = None;
                self.messages += 1;
                Answer::Exactly(1)
            }
            (Op::Expire, Some(_)) => {
                self.held = None;
                Answer::Exactly(1)
            }
            (Op::Persist, Some(held)) => {
                self.held = Some(Held { ttl: None, ..held });
                Answer::Exactly(i64::from(held.ttl.is_some()))
            }
            (Op::Inspect, Some(held)) => ttl_or(held.ttl),
        }
    }
}

const OWNERS: [&str; 3] = [A, B, R];

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let owner = 0..3_usize;
    let lease = prop::sample::select(vec![30_000_i64, 60_000, 90_000]);
    let op = prop_oneof![
        6 => (owner.clone(), lease.clone(), 1..4_i64).prop_map(|(owner, lease, holds)| Op::Acquire { owner, lease, holds }),
        4 => (owner.clone(), 0..4_i64).prop_map(|(owner, holds)| Op::Release { owner, holds }),
        3 => (owner, lease).prop_map(|(owner, lease)| Op::Renew { owner, lease }),
        1 => Just(Op::ForceRelease),
        1 => Just(Op::Expire),
        1 => Just(Op::Persist),
        2 => Just(Op::Inspect),
    ];
    vec(op, 1..25)
}

/// The scripts by their digests, which makes each case fast.
struct Digests([String; 5]);

impl Digests {
    fn load(wire: &mut Wire) -> Self {
        let mut load = |script| {
            wire.call(&["SCRIPT", "LOAD", &source(script)])
                .unwrap()
                .text()
                .to_owned()
        };
        Self([ACQUIRE, RELEASE, RENEW, FORCE, INSPECT].map(&mut load))
    }

    fn run(&self, wire: &mut Wire, op: Op) -> Reply {
        let [acquire, release, renew, force, inspect] = &self.0;
        match op {
            Op::Acquire {
                owner,
                lease,
                holds,
            } => {
                let (lease, holds) = (lease.to_string(), holds.to_string());
                wire.call(&["EVALSHA", acquire, "1", LOCK, OWNERS[owner], &lease, &holds])
            }
            Op::Release { owner, holds } => wire.call(&[
                "EVALSHA",
                release,
                "1",
                LOCK,
                OWNERS[owner],
                &holds.to_string(),
                CHANNEL,
            ]),
            Op::Renew { owner, lease } => wire.call(&[
                "EVALSHA",
                renew,
                "1",
                LOCK,
                OWNERS[owner],
                &lease.to_string(),
            ]),
            Op::ForceRelease => wire.call(&["EVALSHA", force, "1", LOCK, CHANNEL]),
            Op::Inspect => wire.call(&["EVALSHA", inspect, "1", LOCK]),
            Op::Expire => wire.call(&["PEXPIRE", LOCK, "0"]),
            Op::Persist => wire.call(&["PERSIST", LOCK]),
        }
        .unwrap()
    }
}

fn about(ttl: i64, lease: i64) -> bool {
    ttl > lease - 20_000 && ttl <= lease
}

#[test]
fn any_sequence_of_calls_agrees_with_the_model() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    let digests = Digests::load(&mut bench.wire.borrow_mut());
    let config = Config {
        cases: 300,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(7),
        ..Config::default()
    };
    let ears = std::cell::RefCell::new(&mut ears);
    let outcome = TestRunner::new(config).run(&ops(), |ops| {
        bench.set_up(&["DEL", LOCK]);
        ears.borrow_mut().heard(&bench);
        let mut model = Model::default();
        for op in ops {
            let wanted = model.step(op);
            let reply = digests.run(&mut bench.wire.borrow_mut(), op);
            let reply = match (op, &reply) {
                (Op::Renew { .. }, Reply::List(answers)) => answers[0].clone(),
                (Op::Inspect, Reply::List(answer)) => {
                    let held = model.held.expect("held");
                    prop_assert_eq!(
                        &answer[1..],
                        [
                            Reply::Text(OWNERS[held.owner].into()),
                            Reply::Int(held.holds)
                        ]
                    );
                    answer[0].clone()
                }
                _ => reply,
            };
            let agrees = match (wanted, &reply) {
                (Answer::Nil, Reply::Nil) => true,
                (Answer::Exactly(wanted), Reply::Int(number)) => wanted == *number,
                (Answer::About(wanted), Reply::Int(number)) => about(*number, wanted),
                (Answer::Busy(wanted), reply) => {
                    wanted.map_or(*reply == busy(-1), |ttl| about(busy_ttl(reply), ttl))
                }
                _ => false,
            };
            prop_assert!(agrees, "{:?}: wanted {:?}, got {:?}", op, wanted, reply);
            let record = bench.call(&["HGETALL", LOCK]);
            let ttl = bench.call(&["PTTL", LOCK]).int();
            match model.held {
                None => prop_assert_eq!((record.list().len(), ttl), (0, -2)),
                Some(held) => {
                    let wanted = [
                        Reply::Text(OWNERS[held.owner].into()),
                        Reply::Text(held.holds.to_string()),
                    ];
                    prop_assert_eq!(record.list(), wanted);
                    prop_assert!(
                        held.ttl.map_or(ttl == -1, |lease| about(ttl, lease)),
                        "{:?}: TTL {}",
                        held,
                        ttl
                    );
                }
            }
        }
        let heard = ears.borrow_mut().heard(&bench);
        prop_assert_eq!(heard, vec!["0"; model.messages]);
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}
