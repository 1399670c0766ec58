//! `lua/signal`: each line under "Returns", each refusal, each script sent twice.

use std::time::Instant;

use super::{ACQUIRED, Bench, NO_LEASES, busy, busy_ttl, leases};
use crate::support::wire::Reply;

const LOCK: &str = "lock:orders:7";
const SIGNAL: &str = "lock-signal:orders:7";
const BOTH: [&str; 2] = [LOCK, SIGNAL];
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
/// An owner id in the format of python-redis-lock.
const P: &str = "47VYnQ+suoczi1BX8Zd/3LhO";
const LIFE: &str = "1000";

const ACQUIRE: &str = "signal/acquire";
const RELEASE: &str = "signal/release";
const RENEW: &str = "signal/renew";
const FORCE: &str = "signal/force_release";
const AGAIN: &str = "signal/signal";
const INSPECT: &str = "signal/inspect";

/// Returns the invalid leases, without 0, which means no TTL here.
fn no_leases() -> impl Iterator<Item = &'static str> {
    NO_LEASES.into_iter().filter(|lease| *lease != "0")
}

impl Bench {
    fn take(&self, owner: &str, lease: &str) -> Reply {
        self.run(ACQUIRE, &[LOCK], &[owner, lease])
    }

    fn taken_by(&self, owner: &str, lease: &str) {
        assert_eq!(self.take(owner, lease), ACQUIRED);
    }

    /// Asserts that there is one signal, with a TTL of about `life` milliseconds.
    fn assert_told(&self, life: i64) {
        assert_eq!(
            self.call(&["LRANGE", SIGNAL, "0", "-1"]).list(),
            [Reply::Text("1".into())]
        );
        let left = self.call(&["PTTL", SIGNAL]).int();
        assert!(
            left > 0 && left <= life && left > life - 900,
            "{left} of {life}"
        );
    }

    fn values(&self) -> Vec<(String, Reply)> {
        self.snapshot()
            .into_iter()
            .map(|(key, value, _)| (key, value))
            .collect()
    }
}

// --- acquire ---

/// An acquire of a free signal lock replies 1, and writes its TTL in whole seconds.
#[test]
fn acquire_of_a_free_signal_lock_writes_whole_seconds() {
    for (lease, ttl) in [
        ("1", 1_000),
        ("999", 1_000),
        ("1000", 1_000),
        ("1001", 2_000),
        ("30000", 30_000),
    ] {
        let bench = Bench::new();
        bench.taken_by(A, lease);
        assert_eq!(bench.call(&["GET", LOCK]).text(), A);
        let left = bench.call(&["PTTL", LOCK]).int();
        assert!(left > ttl - 900 && left <= ttl, "{left} for {lease}");
        assert_eq!(bench.snapshot().len(), 1, "nothing but the record");
    }
}

#[test]
fn acquire_with_a_lease_of_zero_writes_a_record_without_a_ttl() {
    let bench = Bench::new();
    bench.taken_by(A, "0");
    assert_eq!(bench.call(&["GET", LOCK]).text(), A);
    assert_eq!(bench.expires(LOCK), -1);
    assert_eq!(bench.untouched(ACQUIRE, &[LOCK], &[A, "0"]), ACQUIRED);
    assert_eq!(
        bench.untouched(ACQUIRE, &[LOCK], &[A, "5000"]),
        ACQUIRED,
        "what has no TTL keeps none"
    );
}

#[test]
fn acquire_of_a_signal_lock_sent_twice_changes_nothing() {
    let bench = Bench::new();
    bench.taken_by(A, "60000");
    for shorter in ["60000", "30000", "0"] {
        let before = bench.expires(LOCK);
        assert_eq!(bench.take(A, shorter), ACQUIRED);
        // a second later, the same lease may reach further; it is never shortened
        assert!(bench.expires(LOCK) >= before && bench.expires(LOCK) < before + 1_000);
    }
    assert_eq!(bench.take(A, "90000"), ACQUIRED);
    assert!(bench.call(&["PTTL", LOCK]).int() > 80_000);
}

#[test]
fn acquire_of_a_held_signal_lock_returns_its_ttl() {
    let bench = Bench::new();
    bench.taken_by(P, "30000");
    for lease in ["60000", "0"] {
        let ttl = busy_ttl(&bench.untouched(ACQUIRE, &[LOCK], &[A, lease]));
        assert!((25_000..=30_000).contains(&ttl), "{ttl}");
    }
    bench.set_up(&["PERSIST", LOCK]);
    assert_eq!(bench.untouched(ACQUIRE, &[LOCK], &[A, "30000"]), busy(-1));
}

/// H1, H2, F39, P1: an invalid lease leaves nothing, in particular no record without a TTL.
#[test]
fn h1_h2_f39_p1_signal_scripts_refuse_leases_that_are_none() {
    let bench = Bench::new();
    for lease in no_leases().chain(["00", "012"]) {
        bench.refused(ACQUIRE, &[LOCK], &[A, lease]);
    }
    bench.taken_by(A, "30000");
    for lease in no_leases().chain(["0"]) {
        let renewed = bench.untouched(RENEW, &[LOCK], &[A, lease]);
        assert!(renewed.is_error(), "{lease:?}: {renewed:?}");
    }
    for lease in no_leases() {
        bench.refused(ACQUIRE, &[LOCK], &[A, lease]);
        bench.untouched(ACQUIRE, &[LOCK], &[P, lease]);
    }
    bench.assert_every_key_expires();
}

// --- release ---

/// A release of a signal lock replies 1, deletes it, and notifies one waiter.
#[test]
fn release_of_a_signal_lock_deletes_it_and_signals_one_waiter() {
    let bench = Bench::new();
    for owner in [A, P] {
        bench.taken_by(owner, "30000");
        bench.set_up(&["RPUSH", SIGNAL, "old", "older"]);
        assert_eq!(
            bench.run(RELEASE, &BOTH, &[owner, "0", LIFE]),
            Reply::Int(1)
        );
        assert_eq!(bench.snapshot().len(), 1);
        bench.assert_told(1_000);
        assert_eq!(
            bench.untouched(RELEASE, &BOTH, &[owner, "0", LIFE]),
            Reply::Nil,
            "sent again"
        );
        bench.set_up(&["DEL", SIGNAL]);
    }
}

/// A release of a signal lock to one replies 0, and changes nothing.
#[test]
fn release_of_a_signal_lock_to_one_gets_0_and_changes_nothing() {
    let bench = Bench::new();
    bench.taken_by(A, "30000");
    assert_eq!(
        bench.untouched(RELEASE, &BOTH, &[A, "1", LIFE]),
        Reply::Int(0)
    );
    assert_eq!(bench.untouched(RELEASE, &BOTH, &[P, "1", LIFE]), Reply::Nil);
}

/// P9, R43: a release by another owner, or of a free lock, returns nil.
#[test]
fn p9_r43_release_of_a_signal_lock_by_another_owner_gets_nil() {
    let bench = Bench::new();
    assert_eq!(
        bench.untouched(RELEASE, &BOTH, &[A, "0", LIFE]),
        Reply::Nil,
        "of a free lock"
    );
    bench.taken_by(P, "30000");
    for other in [A, "", &P[..20], &format!("{P}=")] {
        assert_eq!(
            bench.untouched(RELEASE, &BOTH, &[other, "0", LIFE]),
            Reply::Nil,
            "{other:?}"
        );
    }
}

/// Signal scripts refuse invalid hold counts and invalid TTLs of a signal.
#[test]
fn signal_scripts_refuse_counts_and_lives_that_are_none() {
    let bench = Bench::new();
    bench.taken_by(A, "30000");
    for holds in ["2", "-1", "", "x", "1.5", "00", " 1", "10"] {
        bench.refused(RELEASE, &BOTH, &[A, holds, LIFE]);
    }
    for life in NO_LEASES {
        bench.refused(RELEASE, &BOTH, &[A, "0", life]);
        bench.refused(FORCE, &BOTH, &[life]);
        bench.refused(AGAIN, &BOTH, &[life]);
    }
}

/// H12, F25: without memory, locks can still be released, and waiters get their signals.
#[test]
fn h12_f25_a_full_server_still_releases_and_renews_signal_locks() {
    let bench = Bench::real();
    for with_signal in [false, true] {
        bench.set_up(&["CONFIG", "SET", "maxmemory", "0"]);
        for lock in [LOCK, "lock:forced", "lock:renewed"] {
            assert_eq!(bench.run(ACQUIRE, &[lock], &[A, "30000"]), ACQUIRED);
        }
        if with_signal {
            bench.set_up(&["RPUSH", SIGNAL, "1"]);
        }
        bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
        bench.refused(ACQUIRE, &["lock:free"], &[A, "30000"]);
        assert_eq!(
            bench.run(RENEW, &["lock:renewed"], &[A, "90000"]).list(),
            [Reply::Int(1)]
        );
        assert_eq!(bench.run(RELEASE, &BOTH, &[A, "0", LIFE]), Reply::Int(1));
        bench.assert_told(1_000);
        assert_eq!(
            bench.run(FORCE, &["lock:forced", "lock-signal:forced"], &[LIFE]),
            Reply::Int(1)
        );
        assert_eq!(bench.run(AGAIN, &BOTH, &[LIFE]), Reply::Int(1));
        bench.set_up(&["FLUSHALL"]);
    }
}

// --- force_release, signal, inspect ---

/// P8: works for any owner; a waiter gets a signal even if the lock was free, and each signal
/// expires.
#[test]
fn p8_signal_force_release_frees_any_lock_and_signals_a_waiter() {
    let bench = Bench::new();
    for (owner, lease) in [(A, "30000"), (P, "0"), ("", "1000")] {
        bench.taken_by(owner, lease);
        assert_eq!(bench.run(FORCE, &BOTH, &["5000"]), Reply::Int(1));
        for _ in 0..2 {
            bench.assert_told(5_000);
            assert_eq!(bench.snapshot().len(), 1);
            // the lock is free, but there may be waiters
            bench.set_up(&["DEL", SIGNAL]);
            assert_eq!(bench.run(FORCE, &BOTH, &["5000"]), Reply::Int(0));
        }
        bench.assert_every_key_expires();
    }
}

#[test]
fn signal_tells_one_waiter_only_where_the_lock_is_free() {
    let bench = Bench::new();
    for _ in 0..2 {
        assert_eq!(bench.run(AGAIN, &BOTH, &[LIFE]), Reply::Int(1));
        bench.assert_told(1_000);
        assert_eq!(bench.snapshot().len(), 1);
    }
    bench.set_up(&["DEL", SIGNAL]);
    for owner in [A, P, ""] {
        bench.taken_by(owner, "30000");
        assert_eq!(bench.untouched(AGAIN, &BOTH, &[LIFE]), Reply::Int(0));
        bench.set_up(&["DEL", LOCK]);
    }
}

#[test]
fn signal_inspect_returns_the_owner_and_for_how_long() {
    let bench = Bench::new();
    assert_eq!(bench.untouched(INSPECT, &[LOCK], &[]), Reply::Nil);
    for (owner, lease) in [(A, "30000"), (P, "0"), ("", "30000")] {
        bench.set_up(&["DEL", LOCK]);
        bench.taken_by(owner, lease);
        let held = bench.untouched(INSPECT, &[LOCK], &[]);
        let [ttl, holder, holds] = held.list() else {
            panic!("{held:?}")
        };
        assert_eq!((holder.text(), holds.int()), (owner, 1));
        let ttl = ttl.int();
        assert!(
            if lease == "0" {
                ttl == -1
            } else {
                ttl > 25_000
            },
            "{ttl}"
        );
    }
}

/// Signal scripts refuse a record of another type, and touch nothing.
#[test]
fn f29_signal_scripts_refuse_a_record_of_another_type_untouched() {
    let bench = Bench::new();
    let commands: [&[&str]; 4] = [
        &["HSET", LOCK, A, "1"],
        &["RPUSH", LOCK, A],
        &["SADD", LOCK, A],
        &["ZADD", LOCK, "1", A],
    ];
    for command in commands
        .into_iter()
        .filter(|command| command[0] != "SADD" || bench.server.has_type("set"))
    {
        bench.set_up(&["DEL", LOCK]);
        bench.set_up(command);
        for (script, keys, args) in [
            (ACQUIRE, &BOTH[..1], &[A, "30000"] as &[&str]),
            (RELEASE, &BOTH, &[A, "0", LIFE]),
            (FORCE, &BOTH, &[LIFE]),
            (AGAIN, &BOTH, &[LIFE]),
            (INSPECT, &BOTH[..1], &[]),
        ] {
            let error = bench.refused(script, keys, args);
            assert!(error.starts_with("WRONGTYPE"), "{script}: {error}");
        }
        assert_eq!(
            bench.untouched(RENEW, &[LOCK], &[A, "30000"]).list(),
            [Reply::Int(-1)]
        );
    }
}

// --- renew ---

/// A renewal of signal locks replies for each lock, and one bad key costs the others nothing.
#[test]
fn signal_renew_replies_per_lock_and_a_bad_key_harms_no_other() {
    let bench = Bench::new();
    for (lock, owner, lease) in [
        ("held", A, "10000"),
        ("long", A, "90000"),
        ("taken", P, "10000"),
        ("endless", A, "0"),
        ("theirs", P, "0"),
    ] {
        assert_eq!(bench.run(ACQUIRE, &[lock], &[owner, lease]), ACQUIRED);
    }
    bench.set_up(&["HSET", "hash", A, "1"]);
    let keys = ["hash", "held", "gone", "taken", "long", "endless", "theirs"];
    let args = leases(&[A; 7], "29001");
    let (before, long) = (bench.values(), (Instant::now(), bench.expires("long")));
    for renewals in 1..=2 {
        let answers: Vec<i64> = bench
            .run(RENEW, &keys, &args)
            .list()
            .iter()
            .map(Reply::int)
            .collect();
        assert_eq!(answers, [-1, 1, 0, -1, 1, -4, -1]);
        assert_eq!(bench.values(), before);
        bench.assert_left("long", long, renewals);
        let ttl = bench.call(&["PTTL", "held"]).int();
        assert!((29_100..=30_000).contains(&ttl), "{ttl}");
        assert!(bench.call(&["PTTL", "taken"]).int() <= 10_000);
        assert_eq!(
            (bench.expires("endless"), bench.expires("theirs")),
            (-1, -1)
        );
    }
}

/// If the server refuses the renewal of one of several locks, its reply is UNKNOWN; for a single
/// lock, the error itself.
#[test]
fn signal_renew_returns_unknown_for_what_the_server_refuses() {
    let bench = Bench::real();
    for lock in ["mine", "not-mine"] {
        assert_eq!(bench.run(ACQUIRE, &[lock], &[A, "10000"]), ACQUIRED);
    }
    bench.set_up(&[
        "ACL", "SETUSER", "limited", "on", ">pw", "~*", "&*", "+@all", "-expire",
    ]);
    let mut limited = bench.server.wire();
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let mut renew = |keys: &[&str], args: &[&str]| {
        let command = super::eval(&super::source(RENEW), keys, args);
        limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap()
    };
    let before = bench.snapshot();
    assert_eq!(
        renew(&["mine", "gone"], &leases(&[A; 2], "30000")).list(),
        [Reply::Int(-2), Reply::Int(0)]
    );
    assert!(renew(&["mine"], &[A, "30000"]).is_error());
    assert_eq!(bench.snapshot(), before);
}

#[test]
fn signal_renew_refuses_a_wrong_number_of_owners() {
    let bench = Bench::new();
    bench.taken_by(A, "10000");
    bench.refused(RENEW, &[LOCK], &[A]);
    bench.refused(RENEW, &[LOCK], &[A, "30000", A]);
}
