//! `lua/permits`: each line under "Returns", each refusal, each script sent twice.

use super::{ACQUIRED, Bench, NO_COUNTS, NO_LEASES, busy, busy_ttl, leases};
use crate::support::wire::Reply;

const KEYS: [&str; 2] = ["{jobs}:timeout", "jobs"];
const LEASES: [&str; 1] = ["{jobs}:timeout"];
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const CHANNEL: &str = "redisson_sc:{jobs}";
/// Redisson's score for a permit without a lease.
const NEVER: &str = "922337203685477";

const ACQUIRE: &str = "permits/acquire";
const RELEASE: &str = "permits/release";
const RELEASE_RECORD: &str = "permits/release_record";
const RENEW: &str = "permits/renew";
const TRANSFER: &str = "permits/transfer";
const FORCE: &str = "permits/force_release";
const INSPECT: &str = "permits/inspect";
const AVAILABLE: &str = "permits/available";
const SET_TOTAL: &str = "permits/set_total";

/// The reply of a script that counts.
fn count(permits: i64) -> Reply {
    Reply::List(vec![Reply::Int(permits)])
}

impl Bench {
    /// Acquires `count` of three permits.
    fn take_permits(&self, owner: &str, lease: &str, count: &str) -> Reply {
        self.run(ACQUIRE, &KEYS, &[owner, lease, count, "3", CHANNEL])
    }

    fn give_back(&self, owner: &str) -> Reply {
        self.run(RELEASE, &KEYS, &[owner, "0", CHANNEL, "3"])
    }

    fn counter(&self) -> i64 {
        self.call(&["GET", "jobs"]).text().parse().unwrap()
    }

    /// Returns how long a permit lasts, in milliseconds.
    fn lasts(&self, permit: &str) -> i64 {
        let score = self.call(&["ZSCORE", KEYS[0], permit]);
        score.text().parse::<i64>().unwrap() - self.now()
    }

    fn is_about(&self, permit: &str, lease: i64) {
        let lasts = self.lasts(permit);
        assert!(
            lasts > lease - 5_000 && lasts <= lease + 1,
            "{lasts} ms for a lease of {lease}"
        );
    }
}

#[test]
fn permits_acquire_takes_them_once() {
    let bench = Bench::new();
    for _ in 0..2 {
        assert_eq!(bench.take_permits(A, "30000", "2"), ACQUIRED);
        assert_eq!(bench.counter(), 1);
        bench.is_about(A, 30_000);
        bench.is_about(&format!("{A} 2"), 30_000);
        assert_eq!(bench.snapshot().len(), 2);
    }
    assert_eq!(bench.take_permits(B, "30000", "1"), ACQUIRED);
    assert_eq!(bench.counter(), 0);
}

/// A request that is sent again does not shorten the lease.
#[test]
fn permits_acquire_of_ones_own_never_shortens() {
    let bench = Bench::new();
    assert_eq!(bench.take_permits(A, "60000", "1"), ACQUIRED);
    assert_eq!(bench.take_permits(A, "30000", "1"), ACQUIRED);
    bench.is_about(A, 60_000);
    assert_eq!(bench.take_permits(A, "90000", "1"), ACQUIRED);
    bench.is_about(A, 90_000);
    assert_eq!(bench.counter(), 2);
}

#[test]
fn permits_acquire_returns_when_the_next_one_expires() {
    let bench = Bench::new();
    assert_eq!(bench.take_permits(A, "60000", "2"), ACQUIRED);
    let two = [B, "30000", "2", "3", CHANNEL];
    let ttl = busy_ttl(&bench.untouched(ACQUIRE, &KEYS, &two));
    assert!(ttl > 55_000 && ttl <= 60_000, "{ttl}");
    bench.set_up(&["ZADD", KEYS[0], NEVER, A, NEVER, &format!("{A} 2")]);
    assert_eq!(bench.untouched(ACQUIRE, &KEYS, &two), busy(-1));
}

/// What has expired is available, also to the owner that had it.
#[test]
fn permits_acquire_takes_what_has_expired() {
    for owner in [A, B] {
        let bench = Bench::new();
        bench.set_up(&["SET", "jobs", "0"]);
        bench.set_up(&["ZADD", KEYS[0], "7", A, "8", &format!("{A} 2"), NEVER, "id"]);
        let mut ears = bench.listen(CHANNEL);
        assert_eq!(bench.take_permits(owner, "30000", "1"), ACQUIRED);
        assert_eq!(ears.heard(&bench), ["1"], "one more is available");
        assert_eq!(bench.counter(), 1);
        assert_eq!(bench.call(&["ZCARD", KEYS[0]]), Reply::Int(2));
        bench.is_about(owner, 30_000);
    }
}

/// Another program gave back the first of two permits: the next acquire of that owner takes the one
/// that is left, and counts only what it adds.
#[test]
fn permits_acquire_counts_what_the_owner_still_has() {
    let bench = Bench::new();
    for (count, counter, taken) in [("2", 1, 2), ("1", 2, 1), ("3", 0, 3)] {
        bench.set_up(&["FLUSHALL"]);
        bench.set_up(&["SET", "jobs", "2"]);
        bench.set_up(&["ZADD", KEYS[0], NEVER, &format!("{A} 2")]);
        assert_eq!(bench.take_permits(A, "30000", count), ACQUIRED, "{count}");
        assert_eq!(bench.counter(), counter, "{count}");
        assert_eq!(bench.call(&["ZCARD", KEYS[0]]), Reply::Int(taken));
        assert_eq!(bench.give_back(A), Reply::Int(1));
        assert_eq!(bench.counter(), 3);
    }
}

/// Redisson's `expire` is about the counter; its permits end with it.
#[test]
fn permits_expire_with_their_counter() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "3", "PX", "60000"]);
    assert_eq!(bench.take_permits(A, "30000", "1"), ACQUIRED);
    let ttl = bench.server.pttl(KEYS[0]);
    assert!(ttl > 55_000 && ttl <= 60_000, "{ttl}");
    assert!(bench.server.pttl("jobs") > 55_000);
}

/// A Java waiter that came before the counter is told of it.
#[test]
fn permits_acquire_tells_of_a_new_counter() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.take_permits(A, "30000", "1"), ACQUIRED);
    assert_eq!(ears.heard(&bench), ["2"]);
}

#[test]
fn permits_release_record_ends_the_leases() {
    let bench = Bench::new();
    assert_eq!(bench.take_permits(A, "30000", "2"), ACQUIRED);
    let mut ears = bench.listen(CHANNEL);
    let kept = bench.untouched(RELEASE_RECORD, &LEASES, &[A, "1", CHANNEL]);
    assert_eq!(kept, Reply::Int(0));
    let args = [A, "0", CHANNEL];
    assert_eq!(bench.run(RELEASE_RECORD, &LEASES, &args), Reply::Int(1));
    for holds in ["0", "1"] {
        let again = bench.untouched(RELEASE_RECORD, &LEASES, &[A, holds, CHANNEL]);
        assert_eq!(again, Reply::Nil);
    }
    bench.refused(RELEASE_RECORD, &LEASES, &[A, "2", CHANNEL]);
    assert_eq!(ears.heard(&bench), ["2"]);
    assert_eq!(bench.run(AVAILABLE, &KEYS, &["3"]), count(3));
    assert_eq!(bench.take_permits(B, "30000", "3"), ACQUIRED);
    assert_eq!(bench.counter(), 0);
}

#[test]
fn permits_without_a_counter_are_counted() {
    let bench = Bench::new();
    bench.set_up(&["ZADD", KEYS[0], NEVER, "id", "7", A]);
    assert_eq!(
        bench.run(AVAILABLE, &KEYS, &["3"]),
        count(2),
        "one has expired"
    );
    assert_eq!(bench.take_permits(B, "30000", "2"), ACQUIRED);
    assert_eq!(bench.counter(), 0);
    bench.set_up(&["DEL", "jobs"]);
    assert_eq!(bench.give_back(B), Reply::Int(1));
    assert_eq!(bench.run(AVAILABLE, &KEYS, &["3"]), count(2));
}

#[test]
fn permits_of_bad_numbers_are_refused_untouched() {
    let bench = Bench::new();
    let refused = |script: &str, args: &[&str]| {
        let error = bench.refused(script, &KEYS, args);
        assert!(error.starts_with("ERR nestlock: "), "{error}");
    };
    for lease in NO_LEASES {
        refused(ACQUIRE, &[A, lease, "1", "3", CHANNEL]);
    }
    for count in NO_COUNTS.into_iter().chain(["0"]) {
        refused(ACQUIRE, &[A, "30000", count, "3", CHANNEL]);
        refused(SET_TOTAL, &[count, CHANNEL]);
        if count != "0" {
            refused(ACQUIRE, &[A, "30000", "1", count, CHANNEL]);
            refused(AVAILABLE, &[count]);
            refused(RELEASE, &[A, count, CHANNEL, "3"]);
        }
    }
    refused(RELEASE, &[A, "2", CHANNEL, "3"]);
    refused(ACQUIRE, &[A, "30000", "1000", "1000", CHANNEL]);
    // INCRBY takes neither of the last two
    for counter in ["x", "-", "007", "100000000000000000000"] {
        bench.set_up(&["SET", "jobs", counter]);
        let wrong = Reply::Int(-3);
        let acquire = [A, "30000", "1", "3", CHANNEL];
        assert_eq!(bench.untouched(ACQUIRE, &KEYS, &acquire), wrong);
        assert_eq!(bench.untouched(AVAILABLE, &KEYS, &["3"]), wrong);
        assert_eq!(bench.untouched(SET_TOTAL, &KEYS, &["3", CHANNEL]), wrong);
        assert_eq!(bench.untouched(FORCE, &KEYS, &[CHANNEL, "3"]), wrong);
    }
}

#[test]
fn permits_release_gives_back_all_of_an_owner() {
    let bench = Bench::new();
    assert_eq!(bench.take_permits(A, "30000", "2"), ACQUIRED);
    assert_eq!(bench.take_permits(B, "30000", "1"), ACQUIRED);
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(
        bench.untouched(RELEASE, &KEYS, &[A, "1", CHANNEL, "3"]),
        Reply::Int(0)
    );
    assert_eq!(bench.give_back(A), Reply::Int(1));
    assert_eq!(bench.counter(), 2);
    for holds in ["0", "1"] {
        let again = bench.untouched(RELEASE, &KEYS, &[A, holds, CHANNEL, "3"]);
        assert_eq!(again, Reply::Nil);
    }
    assert_eq!(ears.heard(&bench), ["2"]);
    assert_eq!(bench.call(&["ZCARD", KEYS[0]]), Reply::Int(1));
}

/// The release of an expired permit gives it back, and says that it was not held.
#[test]
fn permits_release_of_what_has_expired_is_none() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "2"]);
    bench.set_up(&["ZADD", KEYS[0], "7", A]);
    let kept = bench.untouched(RELEASE, &KEYS, &[A, "1", CHANNEL, "3"]);
    assert_eq!(kept, Reply::Nil);
    assert_eq!(bench.give_back(A), Reply::Nil);
    assert_eq!(bench.counter(), 3);
}

#[test]
fn permits_renew_extends_and_never_shortens() {
    let bench = Bench::new();
    assert_eq!(bench.take_permits(A, "20000", "2"), ACQUIRED);
    let renew = |owner, lease| bench.run(RENEW, &LEASES, &[owner, lease]);
    let answer = |code| Reply::List(vec![Reply::Int(code)]);
    assert_eq!(renew(A, "60000"), answer(1));
    bench.is_about(A, 60_000);
    bench.is_about(&format!("{A} 2"), 60_000);
    assert_eq!(renew(A, "30000"), answer(1));
    bench.is_about(A, 60_000);
    assert_eq!(renew(B, "30000"), answer(0));
    bench.set_up(&["ZADD", KEYS[0], "7", B]);
    assert_eq!(renew(B, "30000"), answer(0), "it has expired");
    bench.set_up(&["SET", "other", "x"]);
    let both = bench.run(RENEW, &[KEYS[0], "other"], &leases(&[A, A], "30000"));
    assert_eq!(both, Reply::List(vec![Reply::Int(1), Reply::Int(-1)]));
}

/// The name of the last permit says how many there must be, whichever of them is gone.
#[test]
fn permits_that_are_gone_are_noticed() {
    let bench = Bench::new();
    let all = [A.to_owned(), format!("{A} 2"), format!("{A} 3")];
    for gone in &all {
        for (expired, left) in [(false, 2), (true, 3)] {
            bench.call(&["FLUSHALL"]);
            assert_eq!(bench.take_permits(A, "60000", "3"), ACQUIRED);
            if expired {
                bench.set_up(&["ZADD", KEYS[0], "7", gone]);
            } else {
                bench.set_up(&["ZREM", KEYS[0], gone]);
            }
            let renewed = bench.untouched(RENEW, &LEASES, &[&all[2], "90000"]);
            assert_eq!(renewed, Reply::List(vec![Reply::Int(0)]), "{gone}");
            let kept = bench.untouched(RELEASE, &KEYS, &[&all[2], "1", CHANNEL, "3"]);
            assert_eq!(kept, Reply::Nil);
            let kept = bench.untouched(RELEASE_RECORD, &LEASES, &[&all[2], "1", CHANNEL]);
            assert_eq!(kept, Reply::Nil);
            // the others are given back, past a gap too
            let given = bench.run(RELEASE, &KEYS, &[&all[2], "0", CHANNEL, "3"]);
            assert_eq!((given, bench.counter()), (Reply::Nil, left), "{gone}");
            assert_eq!(bench.call(&["ZCARD", KEYS[0]]), Reply::Int(0));
        }
    }
    bench.call(&["FLUSHALL"]);
    assert_eq!(bench.take_permits(A, "60000", "3"), ACQUIRED);
    let renewed = bench.run(RENEW, &LEASES, &[&all[2], "90000"]);
    assert_eq!(renewed, Reply::List(vec![Reply::Int(1)]));
    for permit in &all {
        bench.is_about(permit, 90_000);
    }
    let kept = bench.untouched(RELEASE, &KEYS, &[&all[2], "1", CHANNEL, "3"]);
    assert_eq!(kept, Reply::Int(0));
    let given = bench.run(RELEASE, &KEYS, &[&all[2], "0", CHANNEL, "3"]);
    assert_eq!((given, bench.counter()), (Reply::Int(1), 3));
}

#[test]
fn permits_transfer_moves_all_and_sets_the_lease() {
    let bench = Bench::new();
    assert_eq!(bench.take_permits(A, "60000", "2"), ACQUIRED);
    for _ in 0..2 {
        let moved = bench.run(TRANSFER, &LEASES, &[A, B, "20000"]);
        assert_eq!(moved, Reply::Int(1));
    }
    bench.is_about(B, 20_000);
    bench.is_about(&format!("{B} 2"), 20_000);
    assert_eq!(bench.call(&["ZCARD", KEYS[0]]), Reply::Int(2));
    let lost = bench.untouched(TRANSFER, &LEASES, &[A, "c:1", "20000"]);
    assert_eq!(lost, Reply::Int(-2));
    bench.refused(TRANSFER, &LEASES, &[B, B, "20000"]);
    bench.refused(TRANSFER, &LEASES, &[B, A, "0"]);
}

#[test]
fn permits_force_release_gives_back_whatever_is_taken() {
    let bench = Bench::new();
    assert_eq!(
        bench.untouched(FORCE, &KEYS, &[CHANNEL, "3"]),
        Reply::Int(0),
        "none was taken"
    );
    assert_eq!(bench.take_permits(A, "60000", "2"), ACQUIRED);
    bench.set_up(&["DECRBY", "jobs", "1"]);
    bench.set_up(&["ZADD", KEYS[0], NEVER, "id"]);
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.run(FORCE, &KEYS, &[CHANNEL, "3"]), Reply::Int(1));
    assert_eq!(bench.run(FORCE, &KEYS, &[CHANNEL, "3"]), Reply::Int(0));
    assert_eq!(bench.counter(), 3);
    assert_eq!(ears.heard(&bench), ["3"]);
}

/// A server that accepts no writes is asked again and again: waiters must not be told each time.
#[test]
fn permits_that_cannot_be_given_back_wake_no_waiter() {
    let bench = Bench::real();
    assert_eq!(bench.take_permits(A, "60000", "2"), ACQUIRED);
    bench.set_up(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let mut ears = bench.listen(CHANNEL);
    for (script, keys, args) in [
        (RELEASE, &KEYS[..], &[A, "0", CHANNEL, "3"][..]),
        (RELEASE_RECORD, &LEASES, &[A, "0", CHANNEL]),
        (FORCE, &KEYS, &[CHANNEL, "3"]),
    ] {
        let reply = bench.run(script, keys, args);
        assert!(
            matches!(&reply, Reply::Error(text) if text.starts_with("NOREPLICAS")),
            "{reply:?}"
        );
    }
    assert_eq!(ears.heard(&bench), [""; 0]);
    assert_eq!(bench.counter(), 1);
}

#[test]
fn permits_inspect_lists_the_owners() {
    let bench = Bench::new();
    assert_eq!(bench.run(INSPECT, &LEASES, &[]), Reply::Nil);
    assert_eq!(bench.take_permits(A, "60000", "2"), ACQUIRED);
    assert_eq!(bench.take_permits(B, "30000", "1"), ACQUIRED);
    bench.set_up(&["ZADD", KEYS[0], "7", "c:1"]);
    let held = bench.untouched(INSPECT, &LEASES, &[]);
    let [ttl, rest @ ..] = held.list() else {
        panic!("{held:?}")
    };
    assert!(ttl.int() > 55_000 && ttl.int() <= 60_000, "the longest");
    let text = |text: &str| Reply::Text(text.into());
    let holders = [text(B), Reply::Int(1), text(A), Reply::Int(2)];
    assert_eq!(rest, holders, "an expired one is not listed");
    // Redisson's: 16 bytes
    bench.set_up(&["ZADD", KEYS[0], NEVER, "0123456789abcd 2"]);
    let held = bench.run(INSPECT, &LEASES, &[]);
    assert_eq!(held.list()[0], Reply::Int(-1));
    assert_eq!(held.list()[5], text("30313233343536373839616263642032"));
}

#[test]
fn permits_set_total_counts_what_is_taken() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    let set = |total| bench.run(SET_TOTAL, &KEYS, &[total, CHANNEL]);
    assert_eq!(set("2"), count(2));
    assert_eq!(bench.take_permits(A, "60000", "2"), ACQUIRED);
    for (total, more, counter) in [("2", 0, 0), ("5", 3, 3), ("5", 0, 3), ("1", 0, -1)] {
        assert_eq!(set(total), count(more), "{total}");
        assert_eq!(bench.counter(), counter);
    }
    assert_eq!(set("4"), count(2), "one of three was owed");
    assert_eq!(ears.heard(&bench), ["2", "3", "0", "2"]);
    let available = bench.untouched(AVAILABLE, &KEYS, &["9"]);
    assert_eq!(available, count(2));
    // without a counter, waiters were told of none
    bench.set_up(&["DEL", KEYS[1], KEYS[0]]);
    bench.set_up(&["ZADD", KEYS[0], "7", A, "8", B]);
    assert_eq!(set("2"), count(2));
    assert_eq!(ears.heard(&bench), ["2"]);
}
