//! `lua/*/transfer`: each line under "Returns", each refusal, each script sent twice.

use super::Bench;
use crate::support::wire::Reply;

const LOCK: &str = "orders:7";
const TOKEN: &str = "redisson_lock_token:{orders:7}";
const HOLDS: &str = "{orders:7}:";
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-2222-4222-8333-444455556666:handed-over";
const C: &str = "0a1b2c3d-3333-4222-8333-444455556666:7";

const ALL: [&str; 5] = [
    "reentrant/transfer",
    "fenced/transfer",
    "read_write/read_transfer",
    "read_write/write_transfer",
    "string/transfer",
];

const MOVED: Reply = Reply::Int(1);
const LOST: Reply = Reply::Int(-2);

impl Bench {
    fn moves(&self, script: &str, from: &str, to: &str, lease: &str) -> Reply {
        let keys: &[&str] = if script.starts_with("fenced") {
            &[LOCK, TOKEN]
        } else {
            &[LOCK]
        };
        let args: &[&str] = if script.ends_with("read_transfer") {
            &[from, to, lease, HOLDS]
        } else {
            &[from, to, lease]
        };
        self.run(script, keys, args)
    }

    fn lives(&self, key: &str, lease: i64) {
        let ttl = self.server.pttl(key);
        assert!(
            ttl > lease - 5_000 && ttl <= lease,
            "{key}: TTL {ttl} for a lease of {lease}"
        );
    }
}

/// A hash moves as a whole, and its TTL becomes the new one, longer or shorter.
#[test]
fn a_hash_moves_whole_and_takes_a_longer_or_shorter_new_ttl() {
    for script in ["reentrant/transfer", "fenced/transfer"] {
        let bench = Bench::new();
        let moved = |token: i64| {
            if script.starts_with("fenced") {
                Reply::List(vec![Reply::Int(1), Reply::Int(token)])
            } else {
                MOVED
            }
        };
        bench.set_up(&["HSET", LOCK, A, "1"]);
        bench.set_up(&["PEXPIRE", LOCK, "30000"]);
        bench.set_up(&["SET", TOKEN, "41"]);
        assert_eq!(bench.moves(script, A, B, "60000"), moved(42));
        bench.lives(LOCK, 60_000);
        let keys: &[&str] = if script.starts_with("fenced") {
            &[LOCK, TOKEN]
        } else {
            &[LOCK]
        };
        assert_eq!(
            bench.untouched(script, keys, &[A, B, "90000"]),
            moved(42),
            "sent twice"
        );
        assert_eq!(bench.moves(script, B, C, "10000"), moved(43));
        bench.lives(LOCK, 10_000);
        assert_eq!(bench.server.record(LOCK), [(C.to_owned(), 1)]);
        assert_eq!(
            bench.untouched(script, keys, &[A, B, "90000"]),
            LOST,
            "it has gone on from there"
        );
        // counts are absolute: the new owner holds the lock once
        bench.set_up(&["HSET", LOCK, C, "3"]);
        bench.moves(script, C, A, "10000");
        assert_eq!(bench.server.record(LOCK), [(A.to_owned(), 1)]);
    }
}

/// A token that is gone is drawn again, also for the owner that already holds the lock.
#[test]
fn a_missing_token_is_redrawn_even_for_the_current_holder() {
    let bench = Bench::new();
    bench.set_up(&["HSET", LOCK, A, "1"]);
    bench.set_up(&["PEXPIRE", LOCK, "30000"]);
    let drawn = |reply: Reply| match reply {
        Reply::List(parts) => match parts.as_slice() {
            [Reply::Int(1), Reply::Int(token)] => *token,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    let first = drawn(bench.moves("fenced/transfer", A, B, "30000"));
    assert!(first > 1_000_000_000_000_000, "microseconds: {first}");
    bench.set_up(&["DEL", TOKEN]);
    assert!(drawn(bench.moves("fenced/transfer", A, B, "30000")) > first);
    bench.set_up(&["SET", TOKEN, "9007199254740991"]);
    assert!(
        bench
            .refused("fenced/transfer", &[LOCK, TOKEN], &[B, C, "30000"])
            .contains("token")
    );
}

/// The adopter may have re-entered by then, and the token key may have been evicted.
#[test]
fn a_late_transfer_leaves_the_hold_count_as_it_is() {
    for script in ALL
        .into_iter()
        .filter(|script| *script != "string/transfer")
    {
        let bench = Bench::new();
        let (side, mode) = match script.strip_prefix("read_write/") {
            Some("write_transfer") => (":write", "write"),
            Some(_) => ("", "read"),
            None => ("", ""),
        };
        if !mode.is_empty() {
            bench.set_up(&["HSET", LOCK, "mode", mode]);
        }
        bench.set_up(&["HSET", LOCK, &format!("{A}{side}"), "1"]);
        bench.set_up(&["PEXPIRE", LOCK, "30000"]);
        bench.set_up(&[
            "SET",
            &format!("{HOLDS}{A}:rwlock_timeout:1"),
            "1",
            "PX",
            "30000",
        ]);
        bench.moves(script, A, B, "30000");
        bench.set_up(&["HSET", LOCK, &format!("{B}{side}"), "3"]);
        let before = bench.call(&["HGETALL", LOCK]);
        bench.moves(script, A, B, "90000");
        bench.set_up(&["DEL", TOKEN]);
        let late = bench.moves(script, A, B, "90000");
        assert!(!late.is_error() && late != LOST, "{script}: {late:?}");
        assert_eq!(bench.call(&["HGETALL", LOCK]), before, "{script}");
        bench.lives(LOCK, 30_000);
    }
}

#[test]
fn a_string_moves_with_a_ttl_or_without() {
    let bench = Bench::new();
    bench.set_up(&["SET", LOCK, "any text", "PX", "30000"]);
    assert_eq!(
        bench.moves("string/transfer", "any text", B, "60000"),
        MOVED
    );
    bench.lives(LOCK, 60_000);
    assert_eq!(
        bench.untouched("string/transfer", &[LOCK], &["any text", B, "90000"]),
        MOVED,
        "sent twice"
    );
    assert_eq!(bench.moves("string/transfer", B, C, "0"), MOVED);
    assert_eq!(bench.server.pttl(LOCK), -1);
    assert_eq!(bench.moves("string/transfer", C, A, "10000"), MOVED);
    bench.lives(LOCK, 10_000);
    assert_eq!(
        bench.untouched("string/transfer", &[LOCK], &[C, B, "10000"]),
        LOST
    );
}

#[test]
fn a_reader_moves_with_the_keys_of_its_holds_and_others_read_on() {
    let bench = Bench::new();
    let key = |owner: &str, n: u32| format!("{HOLDS}{owner}:rwlock_timeout:{n}");
    bench.set_up(&["HSET", LOCK, "mode", "read", A, "2", C, "1"]);
    bench.set_up(&["PEXPIRE", LOCK, "40000"]);
    for (owner, n, ttl) in [(A, 1, "20000"), (A, 2, "20000"), (C, 1, "40000")] {
        bench.set_up(&["SET", &key(owner, n), "1", "PX", ttl]);
    }
    assert_eq!(
        bench.moves("read_write/read_transfer", A, B, "10000"),
        MOVED
    );
    bench.lives(LOCK, 40_000);
    bench.lives(&key(B, 1), 10_000);
    assert!(!bench.server.exists(&key(A, 1)) && !bench.server.exists(&key(A, 2)));
    let keep = [A, B, "90000", HOLDS];
    assert_eq!(
        bench.untouched("read_write/read_transfer", &[LOCK], &keep),
        MOVED,
        "sent twice"
    );
    assert_eq!(
        bench.moves("read_write/read_transfer", B, A, "60000"),
        MOVED
    );
    bench.lives(LOCK, 60_000);
    // the last reader's TTL is that of the record
    bench.set_up(&["HDEL", LOCK, C]);
    assert_eq!(
        bench.moves("read_write/read_transfer", A, B, "10000"),
        MOVED
    );
    bench.lives(LOCK, 10_000);
    assert_eq!(
        bench.untouched("read_write/read_transfer", &[LOCK], &[C, A, "10000", HOLDS]),
        LOST
    );
}

#[test]
fn a_writer_moves_and_an_owner_that_also_reads_does_not() {
    let bench = Bench::new();
    bench.set_up(&["HSET", LOCK, "mode", "write", &format!("{A}:write"), "1"]);
    bench.set_up(&["PEXPIRE", LOCK, "30000"]);
    assert_eq!(
        bench.moves("read_write/write_transfer", A, B, "60000"),
        MOVED
    );
    bench.lives(LOCK, 60_000);
    assert_eq!(
        bench.untouched("read_write/write_transfer", &[LOCK], &[A, B, "90000"]),
        MOVED,
        "sent twice"
    );
    assert_eq!(
        bench.untouched("read_write/write_transfer", &[LOCK], &[C, A, "90000"]),
        LOST
    );
    bench.set_up(&["HSET", LOCK, B, "1"]);
    for (script, args) in [
        ("read_write/write_transfer", &[B, C, "30000"][..]),
        ("read_write/read_transfer", &[B, C, "30000", HOLDS][..]),
    ] {
        assert!(
            bench
                .refused(script, &[LOCK], args)
                .contains("inside its own writing")
        );
    }
}

#[test]
fn nothing_moves_from_a_free_lock_or_one_of_another_kind() {
    for script in ALL {
        let bench = Bench::new();
        assert_eq!(bench.moves(script, A, B, "30000"), LOST, "{script}");
        assert!(!bench.server.exists(LOCK));
        if script != "string/transfer" {
            // the field of a reader has the same name as that of an owner of a plain lock
            let mode: &[&str] = if script.starts_with("read_write") {
                &[]
            } else {
                &["mode", "read"]
            };
            bench.set_up(&[&["HSET", LOCK, A, "1"], mode].concat());
            assert_eq!(bench.moves(script, A, B, "30000"), LOST, "{script}");
        }
    }
}

/// A transfer to the same owner, or with an invalid lease, is refused and changes nothing.
#[test]
fn nonsense_is_refused() {
    for script in ALL {
        let bench = Bench::new();
        bench.set_up(&["HSET", LOCK, A, "1"]);
        for (from, to, lease) in [(A, A, "30000"), (A, B, "-1"), (A, B, "1.5"), (A, B, "")] {
            assert!(
                bench.moves(script, from, to, lease).is_error(),
                "{script} {from} {to} {lease}"
            );
        }
        assert_eq!(bench.server.record(LOCK), [(A.to_owned(), 1)]);
    }
}
