//! `lua/latch`: each line under "Returns", each refusal, each script sent twice.

use super::{Bench, NO_COUNTS, eval, source};
use crate::support::wire::Reply;

const REQUEST: &str = "nestlock_latch_request:{go}:1";
const CALLERS: &str = "nestlock_latch_callers:{go}";
const KEYS: [&str; 3] = [REQUEST, "go", CALLERS];
const CHANNEL: &str = "redisson_countdownlatch__channel__{go}";

const COUNT: &str = "latch/count";
const TRY_SET: &str = "latch/try_set";
const COUNT_DOWN: &str = "latch/count_down";

/// The reply of a script that counts.
fn count(left: i64) -> Reply {
    Reply::List(vec![Reply::Int(left)])
}

impl Bench {
    /// Runs a script, and sends it a second time.
    fn latch_twice(&self, script: &str, args: &[&str]) -> Reply {
        let reply = self.run(script, &KEYS, args);
        assert_eq!(self.untouched(script, &KEYS, args), reply, "the same reply");
        self.call(&["DEL", REQUEST]);
        reply
    }

    /// Runs a script that must change nothing but the reply that it keeps, and returns that.
    fn latch_declined(&self, script: &str, args: &[&str]) -> Reply {
        let before = self.snapshot();
        let reply = self.latch_twice(script, args);
        assert_eq!(self.snapshot(), before, "{script} {args:?}");
        reply
    }

    fn latch_count(&self) -> Reply {
        self.untouched(COUNT, &KEYS[1..2], &[])
    }
}

#[test]
fn latch_counts_down_to_zero_and_is_gone() {
    let bench = Bench::new();
    let mut ears = bench.listen(CHANNEL);
    assert_eq!(bench.latch_count(), count(0));
    assert_eq!(bench.latch_declined(COUNT_DOWN, &["", CHANNEL]), count(0));
    assert_eq!(bench.latch_twice(TRY_SET, &["2", CHANNEL]), count(1));
    assert_eq!(bench.latch_declined(TRY_SET, &["9", CHANNEL]), count(0));
    assert_eq!(ears.heard(&bench), ["1"]);
    assert_eq!(bench.latch_twice(COUNT_DOWN, &["", CHANNEL]), count(1));
    assert_eq!(bench.latch_count(), count(1));
    assert_eq!(ears.heard(&bench).len(), 0);
    assert_eq!(bench.latch_twice(COUNT_DOWN, &["", CHANNEL]), count(0));
    assert_eq!(ears.heard(&bench), ["0"]);
    assert_eq!(bench.snapshot(), [], "nothing is left");
    assert_eq!(bench.latch_twice(TRY_SET, &["1", CHANNEL]), count(1));
}

#[test]
fn latch_counts_each_caller_once() {
    let bench = Bench::new();
    bench.set_up(&["SET", "go", "3"]);
    let down = |caller| bench.run(COUNT_DOWN, &KEYS, &[caller, CHANNEL]);
    let again = |caller| {
        bench.call(&["DEL", REQUEST]);
        bench.latch_declined(COUNT_DOWN, &[caller, CHANNEL])
    };
    assert_eq!((down("a"), again("a")), (count(2), count(2)));
    assert_eq!(
        (down("b"), again("b"), again("a")),
        (count(1), count(1), count(1))
    );
    assert_eq!(bench.latch_twice(COUNT_DOWN, &["", CHANNEL]), count(0));
    assert_eq!(bench.call(&["EXISTS", CALLERS, "go"]), Reply::Int(0));
    // of an earlier count, which Redisson opened
    bench.set_up(&["HSET", CALLERS, "a", "1"]);
    assert_eq!(bench.run(TRY_SET, &KEYS, &["2", CHANNEL]), count(1));
    bench.call(&["DEL", REQUEST]);
    assert_eq!(down("a"), count(1));
}

#[test]
fn latch_keeps_a_ttl_and_refuses_what_is_no_count() {
    let bench = Bench::new();
    bench.set_up(&["SET", "go", "3", "PX", "100000"]);
    assert_eq!(bench.latch_twice(COUNT_DOWN, &["", CHANNEL]), count(2));
    assert!(bench.server.pttl("go") > 0);
    for number in NO_COUNTS.into_iter().chain(["0", "12345678901"]) {
        let error = bench.refused(TRY_SET, &KEYS, &[number, CHANNEL]);
        assert!(error.starts_with("ERR nestlock: "), "{error}");
    }
    bench.set_up(&["SET", "go", "-2"]);
    assert_eq!(bench.latch_count(), count(0));
    assert_eq!(bench.latch_declined(COUNT_DOWN, &["", CHANNEL]), count(0));
    for other in ["x", "-", "007", "100000000000000000000"] {
        bench.set_up(&["SET", "go", other]);
        let wrong = Reply::Int(-3);
        assert_eq!(bench.latch_count(), wrong);
        assert_eq!(bench.untouched(TRY_SET, &KEYS, &["3", CHANNEL]), wrong);
        assert_eq!(bench.untouched(COUNT_DOWN, &KEYS, &["", CHANNEL]), wrong);
    }
}

#[test]
fn latch_tells_no_change_that_is_refused() {
    let bench = Bench::real();
    let mut ears = bench.listen(CHANNEL);
    let mut refusals = 0;
    for command in ["get", "set", "del", "hmget", "hset", "publish"] {
        let mut limited = bench.limited(command);
        for (script, before, argument) in [
            (TRY_SET, "", "3"),
            (COUNT_DOWN, "1", ""),
            (COUNT_DOWN, "1", "a"),
            (COUNT_DOWN, "2", "a"),
        ] {
            bench.set_up(&["DEL", "go", REQUEST, CALLERS]);
            if !before.is_empty() {
                bench.set_up(&["SET", "go", before]);
            }
            let state = bench.snapshot();
            let call = eval(&source(script), &KEYS, &[argument, CHANNEL]);
            let call: Vec<_> = call.iter().map(String::as_str).collect();
            let refused = limited.call(&call).unwrap().is_error();
            let told = ears.heard(&bench);
            if refused {
                refusals += 1;
                assert!(told.is_empty(), "{script} without {command}: {told:?}");
                assert_eq!(bench.snapshot(), state, "{script} without {command}");
            }
        }
    }
    assert!(refusals > 12, "{refusals}");
}

/// A replica may not have the count yet, or any more.
#[test]
fn latch_is_not_looked_at_on_a_replica() {
    let bench = Bench::real();
    bench.set_up(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = bench.refused(COUNT, &KEYS[1..2], &[]);
    assert!(error.contains("READONLY "), "{error}");
}

#[test]
fn latch_of_a_server_without_memory_stays_as_it_is() {
    let bench = Bench::real();
    let mut ears = bench.listen(CHANNEL);
    let refuses = |script, args: &[&str]| bench.refused_without_memory(script, &KEYS, args);
    refuses(TRY_SET, &["3", CHANNEL]);
    bench.set_up(&["SET", "go", "1"]);
    for caller in ["", "a"] {
        refuses(COUNT_DOWN, &[caller, CHANNEL]);
    }
    assert_eq!(bench.latch_count(), count(1));
    assert_eq!(ears.heard(&bench).len(), 0, "no waiter looks in vain");
}
