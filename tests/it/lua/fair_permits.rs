//! `lua/fair_permits`: each line under "Returns", each refusal, each script sent twice.

use super::{ACQUIRED, Bench, NO_LEASES};
use crate::support::wire::Reply;

const QUEUE: &str = "nestlock_permits_queue:{jobs}";
const SEEN: &str = "nestlock_permits_seen:{jobs}";
const KEYS: [&str; 4] = ["{jobs}:timeout", "jobs", QUEUE, SEEN];
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const C: &str = "0a1b2c3d-1111-4222-8333-444455556666:44";
const D: &str = "0a1b2c3d-1111-4222-8333-444455556666:45";
const CHANNEL: &str = "redisson_sc:{jobs}";
const NEVER: &str = "922337203685477";
/// An end that is far away, with room for a fraction.
const FAR: &str = "4000000000000";

const ACQUIRE: &str = "fair_permits/acquire";
const RELEASE: &str = "fair_permits/release";

/// A waiter of three permits: its owner, and how many it wants.
type Wants<'a> = (&'a str, &'a str);

impl Bench {
    fn asks(&self, (owner, count): Wants<'_>, waits: &str) -> Reply {
        let args = [owner, "30000", count, "3", CHANNEL, "15000", waits];
        self.run(ACQUIRE, &KEYS, &args)
    }

    /// Asserts that it must wait.
    fn waits(&self, wants: Wants<'_>) {
        let reply = self.asks(wants, "1");
        let [Reply::Int(0), Reply::Int(time), _] = reply.list() else {
            panic!("{reply:?}");
        };
        assert!(
            (0..=5_000).contains(time),
            "a third of the patience: {time}"
        );
    }

    fn gives(&self, (owner, count): Wants<'_>) -> Reply {
        let last = last((owner, count));
        self.run(RELEASE, &KEYS, &[&last, "0", CHANNEL, "3"])
    }

    fn line(&self) -> Vec<String> {
        let waiters = self.call(&["ZRANGE", QUEUE, "0", "-1"]);
        // two of them are no waiters
        let known = (self.call(&["ZCARD", SEEN]).int() - 2).max(0);
        let waiters: Vec<_> = waiters
            .list()
            .iter()
            .map(|name| name.text().to_owned())
            .collect();
        assert_eq!(waiters.len() as i64, known);
        waiters
    }

    fn spare(&self) -> i64 {
        self.call(&["GET", "jobs"]).text().parse().unwrap()
    }

    /// Puts waiters in line that expire then.
    fn in_line(&self, ends: &str, waiters: &[Wants<'_>]) {
        let now = self.server.now().to_string();
        self.set_up(&["ZADD", SEEN, &now, "clock", "0", "told"]);
        for (place, (owner, count)) in waiters.iter().enumerate() {
            let count: f64 = count.parse().unwrap();
            let ends = (ends.parse::<f64>().unwrap() + count / 1024.0).to_string();
            self.set_up(&["ZADD", QUEUE, &(place + 1).to_string(), owner]);
            self.set_up(&["ZADD", SEEN, &ends, owner]);
        }
    }
}

/// The name of a waiter, and of the last permit of a holder.
fn last((owner, count): Wants<'_>) -> String {
    match count {
        "1" => owner.to_owned(),
        count => format!("{owner} {count}"),
    }
}

fn own(owner: &str) -> String {
    format!("{CHANNEL}:{owner}")
}

#[test]
fn fair_permits_go_to_the_first_in_line() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "3"), "1"), ACQUIRED);
    for _ in 0..2 {
        bench.waits((B, "2"));
    }
    for _ in 0..2 {
        bench.waits((C, "1"));
    }
    assert_eq!(bench.line(), [B, C]);
    // one that does not wait leaves no trace
    bench.untouched(
        ACQUIRE,
        &KEYS,
        &[D, "30000", "1", "3", CHANNEL, "15000", "0"],
    );
    let ttl = bench.server.pttl(QUEUE).min(bench.server.pttl(SEEN));
    assert!(
        ttl > 140_000 && ttl <= 150_000,
        "ten times the patience: {ttl}"
    );
    let (mut all, mut b, mut c) = (
        bench.listen(CHANNEL),
        bench.listen(&own(B)),
        bench.listen(&own(C)),
    );
    assert_eq!(bench.gives((A, "3")), Reply::Int(1));
    assert_eq!(bench.gives((A, "3")), Reply::Nil);
    assert_eq!(b.heard(&bench), ["2"]);
    assert_eq!(c.heard(&bench), ["1"]);
    assert_eq!(all.heard(&bench), ["0003"]);
    bench.waits((D, "1"));
    assert_eq!(b.heard(&bench), ["2"], "its message may be lost");
    for _ in 0..2 {
        assert_eq!(bench.asks((C, "1"), "1"), ACQUIRED);
    }
    assert_eq!(bench.asks((B, "2"), "1"), ACQUIRED);
    assert_eq!(bench.line(), [D]);
    assert_eq!(bench.spare(), 0);
}

/// Two of three are given back, and the first wants three: they are kept for it.
#[test]
fn fair_permits_are_kept_for_one_that_wants_more() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "2"), "1"), ACQUIRED);
    assert_eq!(bench.asks((D, "1"), "1"), ACQUIRED);
    bench.waits((B, "3"));
    bench.waits((C, "1"));
    let (mut b, mut c) = (bench.listen(&own(B)), bench.listen(&own(C)));
    assert_eq!(bench.gives((A, "2")), Reply::Int(1));
    bench.waits((C, "1"));
    assert_eq!(bench.gives((D, "1")), Reply::Int(1));
    assert_eq!(
        (b.heard(&bench), c.heard(&bench)),
        (vec!["3".to_owned()], vec![])
    );
    // it gives up, and the next one goes on
    assert_eq!(bench.gives((B, "3")), Reply::Nil);
    assert_eq!(bench.gives((B, "3")), Reply::Nil);
    assert_eq!(c.heard(&bench), ["1"]);
    assert_eq!(bench.asks((C, "1"), "1"), ACQUIRED);
    assert_eq!(bench.line(), [""; 0]);
}

/// What those in line do not want is free for all.
#[test]
fn fair_permits_that_are_left_over_are_free() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "3"]);
    bench.in_line(FAR, &[(B, "2")]);
    assert_eq!(bench.asks((A, "1"), "0"), ACQUIRED);
    bench.waits((C, "1"));
    assert_eq!(bench.asks((B, "2"), "1"), ACQUIRED);
}

/// One that wants more than there are waits until there are more, and holds up no others.
#[test]
fn what_is_not_there_is_not_waited_for_by_all() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "2"), "1"), ACQUIRED);
    bench.waits((B, "3"));
    bench.waits((C, "1"));
    // there are two of them now, and both are taken
    bench.set_up(&["SET", "jobs", "0"]);
    let (mut b, mut c) = (bench.listen(&own(B)), bench.listen(&own(C)));
    bench.waits((B, "3"));
    bench.set_up(&["INCRBY", "jobs", "1"]);
    bench.set_up(&["ZREM", KEYS[0], &last((A, "2"))]);
    bench.waits((B, "3"));
    assert_eq!(c.heard(&bench), ["1"], "its own request tells the others");
    assert_eq!(bench.gives((A, "2")), Reply::Nil);
    assert_eq!(
        (b.heard(&bench), c.heard(&bench)),
        (vec![], vec!["1".to_owned()])
    );
    assert_eq!(bench.asks((C, "1"), "1"), ACQUIRED);
    bench.set_up(&["INCRBY", "jobs", "1"]);
    bench.waits((D, "1"));
    assert_eq!(bench.gives((C, "1")), Reply::Int(1));
    assert_eq!(
        (b.heard(&bench), bench.line()),
        (vec!["3".to_owned()], vec![B.to_owned(), D.into()])
    );
}

/// Any number of dead waiters is passed at once, and removed.
#[test]
fn the_dead_in_line_are_passed() {
    let bench = Bench::new();
    for dead in [1, 20, 900] {
        bench.set_up(&["FLUSHALL"]);
        bench.set_up(&["SET", "jobs", "1"]);
        let names: Vec<String> = (0..dead).map(|number| format!("{A}{number}")).collect();
        let waiters: Vec<Wants<'_>> = names.iter().map(|name| (&**name, "1")).collect();
        bench.in_line("7", &waiters);
        assert_eq!(bench.asks((B, "1"), "0"), ACQUIRED, "{dead}");
        assert_eq!(bench.line(), [""; 0], "{dead}");
    }
    // the next request removes the rest
    let names: Vec<String> = (0..2_500).map(|number| format!("{A}{number}")).collect();
    let waiters: Vec<Wants<'_>> = names.iter().map(|name| (&**name, "1")).collect();
    bench.in_line("7", &waiters);
    for _ in 0..2 {
        assert_eq!(bench.asks((C, "1"), "1").list()[1], Reply::Int(1));
    }
    bench.waits((C, "1"));
    assert_eq!(bench.gives((C, "1")), Reply::Nil);
    // a release passes them as well, and tells the next
    bench.in_line("7", &[(A, "1")]);
    bench.waits((C, "1"));
    bench.in_line("7", &[(A, "1")]);
    let mut c = bench.listen(&own(C));
    assert_eq!(bench.gives((B, "1")), Reply::Int(1));
    assert_eq!(c.heard(&bench), ["1"]);
}

/// Without the times, those that ask are alive, and the others are not.
#[test]
fn a_lost_time_keeps_no_place() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "0"]);
    bench.in_line(FAR, &[(A, "3"), (B, "1")]);
    bench.set_up(&["DEL", SEEN]);
    bench.waits((B, "1"));
    assert_eq!(bench.line(), [B]);
    bench.set_up(&["DEL", QUEUE]);
    bench.waits((B, "1"));
    assert_eq!(bench.line(), [B]);
}

/// Places last as long as if the clock had not been set, or the server had not been stopped.
#[test]
fn a_clock_that_was_set_costs_no_place() {
    for hours in [1, -1] {
        let bench = Bench::new();
        bench.set_up(&["SET", "jobs", "0"]);
        bench.waits((A, "1"));
        bench.waits((B, "3"));
        for name in [A, B, "clock"] {
            bench.set_up(&["ZINCRBY", SEEN, &(hours * 3_600_000).to_string(), name]);
        }
        bench.waits((C, "1"));
        assert_eq!(bench.line(), [A, B, C], "{hours}");
        for (name, wants) in [(A, 1), (B, 3)] {
            let ends: f64 = bench.call(&["ZSCORE", SEEN, name]).text().parse().unwrap();
            let lasts = ends - bench.server.now() as f64;
            assert!(lasts > 10_000.0 && lasts < 15_010.0, "{hours}: {lasts}");
            assert_eq!((ends.fract() * 1024.0) as i64, wants, "{hours}");
        }
    }
}

/// Where requests are rare, a dead waiter is taken once for one that could not ask, not again and again.
#[test]
fn a_pause_moves_an_end_once() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "0"]);
    bench.waits((A, "3"));
    let an_hour_later = |names: &[&str]| {
        for name in names {
            bench.set_up(&["ZINCRBY", SEEN, "-3600000", name]);
        }
    };
    an_hour_later(&[A, "clock"]);
    bench.waits((B, "1"));
    assert_eq!(bench.line(), [A, B]);
    assert_eq!(bench.gives((B, "1")), Reply::Nil);
    an_hour_later(&[A, "clock"]);
    bench.waits((B, "1"));
    assert_eq!(bench.line(), [B]);
    // also if all that come do not wait
    assert_eq!(bench.gives((B, "1")), Reply::Nil);
    bench.waits((A, "3"));
    bench.set_up(&["SET", "jobs", "3"]);
    for reply in [false, true] {
        an_hour_later(&[A, "clock"]);
        assert_eq!(bench.asks((B, "1"), "0") == ACQUIRED, reply);
    }
    assert_eq!(bench.gives((B, "1")), Reply::Int(1));
    bench.set_up(&["SET", "jobs", "0"]);
    bench.waits((B, "1"));
    // one that has asked since then is moved again
    bench.waits((A, "3"));
    for _ in 0..2 {
        an_hour_later(&[A, B, "clock"]);
        bench.waits((A, "3"));
        bench.waits((B, "1"));
        assert_eq!(bench.line(), [B, A]);
    }
}

/// One that is silent while others ask loses its place.
#[test]
fn who_is_silent_while_others_ask_is_passed() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "0"]);
    bench.waits((A, "1"));
    bench.waits((B, "1"));
    bench.set_up(&["ZADD", SEEN, "XX", "7", A]);
    bench.waits((B, "1"));
    assert_eq!(bench.line(), [B]);
}

/// An owner has one place, whatever number it wants.
#[test]
fn an_owner_has_one_place() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "3"), "1"), ACQUIRED);
    bench.waits((B, "3"));
    bench.waits((B, "1"));
    bench.waits((C, "1"));
    assert_eq!(bench.line(), [B, C]);
    assert_eq!(bench.gives((A, "3")), Reply::Int(1));
    assert_eq!(bench.gives((B, "3")), Reply::Nil);
    assert_eq!(bench.line(), [C]);
}

/// Those behind more than there are permits are far.
#[test]
fn a_waiter_learns_how_far_it_is() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "3"), "1"), ACQUIRED);
    let behind = |owner: &str| bench.asks((owner, "1"), "1").list()[2].int();
    let far: Vec<i64> = (0..6)
        .map(|number| behind(&format!("{B}{number}")))
        .collect();
    assert_eq!(far, [0, 0, 0, 1, 2, 3]);
}

/// Room that no release told of is told to as many as it is for, once.
#[test]
fn all_that_fit_are_told_once() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "3"), "1"), ACQUIRED);
    for waiter in [B, C, D] {
        bench.waits((waiter, "1"));
    }
    let mut ears = [B, C, D].map(|waiter| bench.listen(&own(waiter)));
    let mut told = |bench: &Bench| ears.each_mut().map(|ears| ears.heard(bench).len());
    // another program gives back two
    bench.set_up(&["INCRBY", "jobs", "2"]);
    bench.waits((D, "1"));
    assert_eq!(told(&bench), [1, 1, 0]);
    bench.waits((D, "1"));
    assert_eq!(told(&bench), [1, 0, 0], "the first may have missed it");
    // and takes them again before they come
    bench.set_up(&["DECRBY", "jobs", "2"]);
    bench.waits((C, "1"));
    bench.set_up(&["INCRBY", "jobs", "2"]);
    bench.waits((D, "1"));
    assert_eq!(told(&bench), [1, 1, 0], "the second has come");
    assert_eq!(bench.asks((B, "1"), "1"), ACQUIRED);
    assert_eq!(told(&bench), [0, 1, 0]);
}

/// What a dead holder leaves is told on from waiter to waiter.
#[test]
fn expired_permits_are_told_in_line() {
    let bench = Bench::new();
    bench.set_up(&["SET", "jobs", "0"]);
    bench.set_up(&["ZADD", KEYS[0], "7", A, "8", &format!("{A} 2"), NEVER, "id"]);
    bench.in_line(FAR, &[(B, "1"), (C, "1"), (D, "1")]);
    let (mut c, mut d) = (bench.listen(&own(C)), bench.listen(&own(D)));
    assert_eq!(bench.asks((B, "1"), "1"), ACQUIRED);
    assert_eq!(
        (c.heard(&bench), d.heard(&bench)),
        (vec!["1".to_owned()], vec![])
    );
    assert_eq!(bench.asks((C, "1"), "1"), ACQUIRED);
    bench.waits((D, "1"));
}

/// A wait is told of the first end among the leases, if that comes before the next look.
#[test]
fn fair_permits_say_when_to_ask_again() {
    let bench = Bench::new();
    assert_eq!(bench.asks((A, "3"), "1"), ACQUIRED);
    let time = |bench: &Bench| bench.asks((B, "1"), "1").list()[1].int();
    assert_eq!(time(&bench), 5_000);
    let soon = (bench.server.now() + 2_000).to_string();
    bench.set_up(&["ZADD", KEYS[0], &soon, A]);
    let soon = time(&bench);
    assert!(soon > 0 && soon <= 2_000, "{soon}");
}

#[test]
fn fair_permits_refuse_what_they_cannot_read() {
    let bench = Bench::new();
    for bad in NO_LEASES {
        bench.refused(ACQUIRE, &KEYS, &[A, bad, "1", "3", CHANNEL, "15000", "1"]);
    }
    for bad in ["", "0", "-1", "x", "1.5"] {
        bench.refused(ACQUIRE, &KEYS, &[A, "30000", "1", "3", CHANNEL, bad, "1"]);
    }
    for bad in ["", "2", "yes"] {
        bench.refused(
            ACQUIRE,
            &KEYS,
            &[A, "30000", "1", "3", CHANNEL, "15000", bad],
        );
        bench.refused(RELEASE, &KEYS, &[A, bad, CHANNEL, "3"]);
    }
    bench.set_up(&["SET", "jobs", "x"]);
    let args = [A, "30000", "1", "3", CHANNEL, "15000", "1"];
    assert_eq!(bench.untouched(ACQUIRE, &KEYS, &args), Reply::Int(-3));
}
