//! `lua/semaphore`, and `lua/permits` as a semaphore uses it: each line under "Returns", each refusal,
//! each script sent twice.

use super::{ACQUIRED, Bench, NO_COUNTS, busy};
use crate::support::wire::Reply;

const REQUEST: &str = "nestlock_semaphore_request:{jobs}:1";
const LEASES: &str = "nestlock_semaphore_leases:{jobs}";
const KEYS: [&str; 3] = [REQUEST, "jobs", LEASES];
/// The keys of `permits/*`.
const PERMITS: [&str; 2] = [LEASES, "jobs"];
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const CHANNEL: &str = "redisson_sc:{jobs}";

const TRY_SET: &str = "semaphore/try_set";
const ADD: &str = "semaphore/add";
const DRAIN: &str = "semaphore/drain";
const FORGET: &str = "semaphore/forget";

/// The reply of a script that counts.
fn count(permits: i64) -> Reply {
    Reply::List(vec![Reply::Int(permits)])
}

fn keys(script: &str) -> &'static [&'static str] {
    match script {
        FORGET => &[REQUEST, LEASES],
        _ => &KEYS,
    }
}

impl Bench {
    fn semaphore_of(&self, total: &str) {
        self.set_up(&["SET", "jobs", total]);
    }

    /// Acquires `count` permits of a semaphore.
    fn take_of_semaphore(&self, count: &str) -> Reply {
        let args = [A, "30000", count, "0", CHANNEL];
        self.run("permits/acquire", &PERMITS, &args)
    }

    /// Runs a script that must change nothing but the reply that it keeps, and returns that.
    fn declined(&self, script: &str, args: &[&str]) -> Reply {
        let before = self.snapshot();
        let reply = self.run(script, keys(script), args);
        assert_eq!(
            self.untouched(script, keys(script), args),
            reply,
            "the same reply"
        );
        assert_eq!(
            self.call(&["DEL", REQUEST]),
            Reply::Int(1),
            "late tries change nothing"
        );
        assert_eq!(self.snapshot(), before, "{script} {args:?}");
        reply
    }

    fn number(&self) -> i64 {
        self.call(&["GET", "jobs"]).text().parse().unwrap()
    }

    fn taken(&self) -> i64 {
        self.call(&["ZCARD", LEASES]).int()
    }

    /// Runs a script, and sends it a second time.
    fn change_twice(&self, script: &str, args: &[&str]) -> Reply {
        let keys = keys(script);
        let reply = self.run(script, keys, args);
        assert_eq!(self.untouched(script, keys, args), reply, "the same reply");
        self.call(&["DEL", REQUEST]);
        reply
    }
}

#[test]
fn semaphore_without_a_number_has_no_permits() {
    let bench = Bench::new();
    let args = [A, "30000", "1", "0", CHANNEL];
    let tried = bench.untouched("permits/acquire", &PERMITS, &args);
    assert_eq!(tried, busy(-1));
    let available = || bench.untouched("permits/available", &PERMITS, &["0"]);
    assert_eq!(available(), count(0));
    // the number was deleted
    bench.semaphore_of("2");
    assert_eq!(bench.take_of_semaphore("2"), ACQUIRED);
    bench.call(&["DEL", "jobs"]);
    assert_eq!(available(), count(0));
    assert_eq!(
        bench.take_of_semaphore("2"),
        ACQUIRED,
        "it has them already"
    );
    assert_eq!(bench.call(&["EXISTS", "jobs"]), Reply::Int(0));
}

#[test]
fn semaphore_try_set_is_done_once() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.change_twice(TRY_SET, &["3", CHANNEL]), count(1));
    assert_eq!(bench.number(), 3);
    let other = bench.declined(TRY_SET, &["5", CHANNEL]);
    assert_eq!(other, count(0));
    assert_eq!(ears.heard(&bench), ["3"]);
    // what is taken still is counted
    assert_eq!(bench.take_of_semaphore("2"), ACQUIRED);
    bench.call(&["DEL", "jobs"]);
    assert_eq!(bench.change_twice(TRY_SET, &["3", CHANNEL]), count(1));
    assert_eq!(
        (bench.number(), ears.heard(&bench)),
        (1, vec!["1".to_owned()])
    );
    bench.call(&["DEL", "jobs"]);
    assert_eq!(bench.change_twice(TRY_SET, &["0", CHANNEL]), count(1));
    assert_eq!((bench.number(), ears.heard(&bench).len()), (-2, 0));
}

#[test]
fn semaphore_add_counts_both_ways() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(
        bench.change_twice(ADD, &["2", CHANNEL]),
        count(1),
        "as Redisson does it"
    );
    assert_eq!(
        (bench.number(), ears.heard(&bench)),
        (2, vec!["2".to_owned()])
    );
    assert_eq!(bench.change_twice(ADD, &["-3", CHANNEL]), count(1));
    assert_eq!(bench.change_twice(ADD, &["1", CHANNEL]), count(1));
    assert_eq!(bench.number(), 0);
    assert_eq!(ears.heard(&bench).len(), 0, "there is none for a waiter");
    let most = i32::MAX.to_string();
    assert_eq!(bench.change_twice(ADD, &[&most, CHANNEL]), count(1));
    assert_eq!(bench.declined(ADD, &["1", CHANNEL]), count(0));
    bench.semaphore_of(&format!("-{most}"));
    assert_eq!(bench.declined(ADD, &["-1", CHANNEL]), count(0));
}

#[test]
fn semaphore_drain_takes_what_is_there() {
    let bench = Bench::new();
    assert_eq!(bench.declined(DRAIN, &[]), count(0));
    bench.semaphore_of("-2");
    assert_eq!(bench.declined(DRAIN, &[]), count(0));
    bench.semaphore_of("5");
    assert_eq!(bench.take_of_semaphore("2"), ACQUIRED);
    bench.set_up(&["ZADD", LEASES, "7", "expired", "8", "too"]);
    assert_eq!(bench.change_twice(DRAIN, &[]), count(5));
    assert_eq!((bench.number(), bench.taken()), (0, 2));
    // more are owed than have expired
    bench.semaphore_of("-2");
    bench.set_up(&["ZADD", LEASES, "7", "expired"]);
    assert_eq!(bench.declined(DRAIN, &[]), count(0));
    bench.semaphore_of("0");
    assert_eq!(bench.change_twice(DRAIN, &[]), count(1));
    assert_eq!((bench.number(), bench.taken()), (0, 2));
}

#[test]
fn semaphore_forget_keeps_the_number() {
    let bench = Bench::new();
    bench.semaphore_of("5");
    assert_eq!(bench.take_of_semaphore("2"), ACQUIRED);
    assert_eq!(bench.change_twice(FORGET, &[&format!("{A} 2")]), count(1));
    assert_eq!((bench.number(), bench.taken()), (3, 0));
    assert_eq!(bench.declined(FORGET, &[A]), count(0));
    bench.set_up(&["ZADD", LEASES, "7", A]);
    assert_eq!(bench.declined(FORGET, &[A]), count(0), "it has expired");
    bench.call(&["DEL", LEASES]);
    assert_eq!(bench.take_of_semaphore("1"), ACQUIRED);
    let two = bench.declined(FORGET, &[&format!("{A} 2")]);
    assert_eq!(two, count(0), "there is one");
}

#[test]
fn semaphore_of_bad_numbers_is_refused_untouched() {
    let bench = Bench::new();
    let refused = |script: &str, args: &[&str]| {
        let error = bench.refused(script, keys(script), args);
        assert!(error.starts_with("ERR nestlock: "), "{error}");
    };
    for number in NO_COUNTS.into_iter().chain(["12345678901"]) {
        refused(TRY_SET, &[number, CHANNEL]);
        if number != "-1" && number.len() < 11 {
            refused(ADD, &[number, CHANNEL]);
        }
    }
    for number in ["0", "-0", "123456789012", "-12345678901"] {
        refused(ADD, &[number, CHANNEL]);
    }
    for number in ["x", "-", "007", "100000000000000000000"] {
        bench.semaphore_of(number);
        let wrong = Reply::Int(-3);
        assert_eq!(bench.untouched(TRY_SET, &KEYS, &["3", CHANNEL]), wrong);
        assert_eq!(bench.untouched(ADD, &KEYS, &["3", CHANNEL]), wrong);
        assert_eq!(bench.untouched(DRAIN, &KEYS, &[]), wrong);
    }
}

/// A message of a change that was refused would wake waiters in vain, at each try.
#[test]
fn semaphore_of_a_server_without_memory_tells_nothing() {
    let bench = Bench::real();
    let mut ears = bench.listen(CHANNEL);
    let refuses = |script, args: &[&str]| bench.refused_without_memory(script, &KEYS, args);
    refuses(TRY_SET, &["3", CHANNEL]);
    bench.semaphore_of("2");
    refuses(ADD, &["1", CHANNEL]);
    assert_eq!((bench.number(), ears.heard(&bench).len()), (2, 0));
    // its permits were handed over: a refusal would leave half of it
    assert_eq!(bench.take_of_semaphore("2"), ACQUIRED);
    bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    let last = format!("{A} 2");
    assert_eq!(bench.run(FORGET, &[REQUEST, LEASES], &[&last]), count(1));
}
