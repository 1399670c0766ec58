//! `lua/string`: each line under "Returns", each refusal, each script sent twice.

use super::{ACQUIRED, Bench, NO_LEASES, busy, busy_ttl, leases};
use crate::support::wire::Reply;

const LOCK: &str = "orders:7";
const FENCE: &str = "nestlock_fence:{orders:7}";
/// Any text is a valid owner.
const A: &str = "b3duZXIgQQ==";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";

const ACQUIRE: &str = "string/acquire";
const RELEASE: &str = "string/release";
const RENEW: &str = "string/renew";
const FORCE: &str = "string/force_release";
const INSPECT: &str = "string/inspect";

impl Bench {
    fn acquire_string(&self, owner: &str, lease: &str) -> Reply {
        self.run(ACQUIRE, &[LOCK], &[owner, lease])
    }

    fn value(&self) -> Reply {
        self.call(&["GET", LOCK])
    }

    fn ttl_is_about(&self, lease: i64) {
        let ttl = self.server.pttl(LOCK);
        assert!(
            ttl > lease - 5_000 && ttl <= lease,
            "TTL {ttl} for a lease of {lease}"
        );
    }
}

fn text(text: &str) -> Reply {
    Reply::Text(text.into())
}

/// A string acquire of a free lock replies 1, and writes the owner and the TTL.
#[test]
fn string_acquire_of_a_free_lock_writes_the_owner_and_the_ttl() {
    let bench = Bench::new();
    for _ in 0..2 {
        assert_eq!(bench.acquire_string(A, "30000"), ACQUIRED);
        assert_eq!(bench.value(), text(A));
        bench.ttl_is_about(30_000);
    }
    assert_eq!(bench.snapshot().len(), 1);
}

/// N13: a try that is sent twice is not blocked by its own record.
#[test]
fn n13_string_acquire_of_ones_own_lock_never_shortens() {
    let bench = Bench::new();
    assert_eq!(bench.acquire_string(A, "60000"), ACQUIRED);
    assert_eq!(bench.untouched(ACQUIRE, &[LOCK], &[A, "30000"]), ACQUIRED);
    assert_eq!(bench.acquire_string(A, "90000"), ACQUIRED);
    bench.ttl_is_about(90_000);
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(
        bench.untouched(ACQUIRE, &[LOCK], &[A, "30000"]),
        ACQUIRED,
        "no short TTL in place of none"
    );
}

#[test]
fn string_acquire_of_a_held_lock_returns_its_ttl_or_minus_one() {
    let bench = Bench::new();
    bench.set_up(&["SET", LOCK, B, "PX", "60000"]);
    let ttl = busy_ttl(&bench.untouched(ACQUIRE, &[LOCK], &[A, "30000"]));
    assert!(ttl > 55_000 && ttl <= 60_000, "{ttl}");
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(bench.untouched(ACQUIRE, &[LOCK], &[A, "30000"]), busy(-1));
}

/// H1, L2, N2: an invalid lease is refused, and nothing is touched.
#[test]
fn string_leases_that_are_none_are_refused_untouched() {
    let bench = Bench::new();
    for held in [false, true] {
        if held {
            assert_eq!(bench.acquire_string(A, "60000"), ACQUIRED);
        }
        for lease in NO_LEASES {
            // the longest numbers pass the script's check, and the server refuses them only if it
            // must set a TTL
            let counts = lease.starts_with("99") || lease.starts_with("92");
            if !counts || !held {
                bench.refused(ACQUIRE, &[LOCK], &[A, lease]);
            }
            if !counts || held {
                bench.refused(RENEW, &[LOCK], &[A, lease]);
            }
        }
    }
}

#[test]
fn string_release_by_its_owner_returns_1_and_by_others_nil() {
    let bench = Bench::new();
    assert_eq!(bench.untouched(RELEASE, &[LOCK], &[A]), Reply::Nil);
    assert_eq!(bench.acquire_string(A, "30000"), ACQUIRED);
    assert_eq!(bench.untouched(RELEASE, &[LOCK], &[B]), Reply::Nil);
    assert_eq!(bench.run(RELEASE, &[LOCK], &[A]), Reply::Int(1));
    assert!(bench.snapshot().is_empty());
    assert_eq!(bench.untouched(RELEASE, &[LOCK], &[A]), Reply::Nil);
}

#[test]
fn string_renew_replies_for_each_lock() {
    let bench = Bench::new();
    bench.set_up(&["SET", "mine", A, "PX", "10000"]);
    bench.set_up(&["SET", "theirs", B, "PX", "10000"]);
    bench.set_up(&["SET", "endless", A]);
    bench.set_up(&["HSET", "hash", A, "1"]);
    let keys = ["mine", "gone", "theirs", "hash", "endless"];
    let ints = |ints: &[i64]| Reply::List(ints.iter().copied().map(Reply::Int).collect());
    for _ in 0..2 {
        assert_eq!(
            bench.run(RENEW, &keys, &leases(&[A; 5], "30000")),
            ints(&[1, 0, -1, -1, 1])
        );
    }
    let ttl = bench.server.pttl("mine");
    assert!(ttl > 25_000 && ttl <= 30_000, "{ttl}");
    assert_eq!(
        (
            bench.server.pttl("theirs") <= 10_000,
            bench.server.pttl("endless")
        ),
        (true, -1)
    );
    // never shorter
    assert_eq!(bench.run(RENEW, &["mine"], &[A, "1000"]), ints(&[1]));
    assert!(bench.server.pttl("mine") > 20_000);
    // the server refuses one of two
    let huge = "9223372036854775807";
    assert_eq!(
        bench.untouched(RENEW, &["mine", "gone"], &leases(&[A; 2], huge)),
        ints(&[-2, 0])
    );
    bench.refused(RENEW, &["mine"], &[A, huge]);
    bench.refused(RENEW, &["mine", "gone"], &[A, "30000"]);
}

#[test]
fn string_force_release_frees_any_owners_lock() {
    let bench = Bench::new();
    assert_eq!(bench.untouched(FORCE, &[LOCK, FENCE], &[]), Reply::Int(0));
    bench.set_up(&["SET", LOCK, B]);
    assert_eq!(bench.run(FORCE, &[LOCK, FENCE], &[]), Reply::Int(1));
    assert_eq!(bench.untouched(FORCE, &[LOCK, FENCE], &[]), Reply::Int(0));
}

#[test]
fn string_inspect_returns_owner_and_ttl() {
    let bench = Bench::new();
    assert_eq!(bench.untouched(INSPECT, &[LOCK], &[]), Reply::Nil);
    bench.set_up(&["SET", LOCK, A]);
    assert_eq!(
        bench.untouched(INSPECT, &[LOCK], &[]),
        Reply::List(vec![Reply::Int(-1), text(A), Reply::Int(1)])
    );
    bench.set_up(&["PEXPIRE", LOCK, "30000"]);
    let reply = bench.untouched(INSPECT, &[LOCK], &[]);
    assert!(
        reply.list()[0].int() > 25_000 && reply.list()[1..] == [text(A), Reply::Int(1)],
        "{reply:?}"
    );
}

/// N12, R52: other data at the lock's name is refused and left alone.
#[test]
fn n12_r52_string_scripts_refuse_other_types_untouched() {
    let bench = Bench::new();
    for (kind, command) in [
        ("hash", ["HSET", LOCK, A, "1"].as_slice()),
        ("list", &["RPUSH", LOCK, A]),
    ] {
        bench.set_up(&["DEL", LOCK]);
        bench.set_up(command);
        let calls: [(&str, &[&str]); 4] = [
            (ACQUIRE, &[A, "30000"]),
            (RELEASE, &[A]),
            (FORCE, &[]),
            (INSPECT, &[]),
        ];
        for (script, args) in calls {
            let error = bench.refused(script, &[LOCK], args);
            assert!(error.contains("WRONGTYPE"), "{script} of a {kind}: {error}");
        }
        assert_eq!(
            bench.untouched(RENEW, &[LOCK], &[A, "30000"]),
            Reply::List(vec![Reply::Int(-1)])
        );
    }
}
