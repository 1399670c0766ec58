//! `lua/fair`: each line under "Returns", each refusal, each script sent twice, and Redisson's
//! rules next to ours.

use std::ops::Deref;

use super::{ACQUIRED, Bench, Ears, eval, source};
use crate::support::{redisson::RFairLock, wire::Reply};

mod grants;

const LOCK: &str = "orders:7";
const QUEUE: &str = "redisson_lock_queue:{orders:7}";
const TIMEOUTS: &str = "redisson_lock_timeout:{orders:7}";
const SEEN: &str = "nestlock_fair_seen:{orders:7}";
const KEYS: [&str; 4] = [LOCK, QUEUE, TIMEOUTS, SEEN];
const CHANNEL: &str = "redisson_lock__channel:{orders:7}";
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const C: &str = "0a1b2c3d-1111-4222-8333-444455556666:44";
const D: &str = "0a1b2c3d-1111-4222-8333-444455556666:45";
const S: &str = "eeeeeeee-1111-4222-8333-444455556666:1";
/// Another nestlock client, with tasks numbered as Redisson numbers threads.
const R: &str = "ffffffff-1111-4222-8333-444455556666:1";

/// The prefix of a Redisson client, and the owners of its threads.
const JAVA: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:";
const J1: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71";
const J2: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:72";
const J3: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:73";

const ACQUIRE: &str = "fair/acquire";
const RELEASE: &str = "fair/release";
const FORCE: &str = "fair/force_release";

/// Longer than a test takes on a loaded machine, in milliseconds: no waiter counts as gone by
/// mistake.
const PATIENCE: i64 = 60_000;
/// Redisson's default wait in milliseconds: a waiter adds it to the scores, and subtracts it again.
const WAIT: i64 = 300_000;
/// The largest difference between the server's clock and the end of a test's step, in milliseconds.
const SLACK: i64 = 4_000;

struct Fair(Bench);

impl Deref for Fair {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.0
    }
}

impl Fair {
    fn new() -> Self {
        Self(Bench::new())
    }

    /// Starts a bench on a real server, for features that the embedded one lacks.
    fn real() -> Self {
        Self(Bench::real())
    }

    fn acquire(&self, owner: &str, lease: &str, holds: &str, waits: &str) -> Reply {
        self.run(
            ACQUIRE,
            &KEYS,
            &[owner, lease, holds, &PATIENCE.to_string(), waits, CHANNEL],
        )
    }

    /// Writes a record for this owner, regardless of the queue.
    fn held_by_force(&self, owner: &str) {
        self.set_up(&["HSET", LOCK, owner, "1"]);
        self.set_up(&["PEXPIRE", LOCK, "30000"]);
    }

    fn held_by(&self, owner: &str, lease: &str) {
        assert_eq!(self.acquire(owner, lease, "1", "1"), ACQUIRED);
    }

    /// Joins the queue, or polls again; returns the hint and the number of waiters ahead.
    fn wait(&self, owner: &str) -> (i64, i64) {
        busy(&self.acquire(owner, "30000", "1", "1"))
    }

    fn release(&self, owner: &str, holds: &str) -> Reply {
        self.run(RELEASE, &KEYS, &[owner, holds, CHANNEL, "0"])
    }

    fn queue(&self) -> Vec<String> {
        self.call(&["LRANGE", QUEUE, "0", "-1"])
            .list()
            .iter()
            .map(|owner| owner.text().to_owned())
            .collect()
    }

    /// Asserts the order of the queue, and that all keys contain the same waiters.
    fn assert_queue(&self, owners: &[&str]) {
        assert_eq!(self.queue(), owners);
        let members = |key| {
            let mut members: Vec<_> = self
                .call(&["ZRANGE", key, "0", "-1"])
                .list()
                .iter()
                .map(|owner| owner.text().to_owned())
                .collect();
            members.sort();
            members
        };
        let mut wanted = owners.to_vec();
        wanted.sort_unstable();
        assert_eq!(
            members(TIMEOUTS),
            wanted,
            "the scores belong to the waiters"
        );
        wanted.retain(|owner| !owner.starts_with(JAVA));
        let mut seen = members(SEEN);
        // `cut` is allowed while a Redisson waiter is the head, as its score may have been lowered
        seen.retain(|member| {
            member != "cut" || owners.first().is_none_or(|owner| !owner.starts_with(JAVA))
        });
        // `clock` is allowed while a nestlock waiter is in the queue
        seen.retain(|member| member != "clock" || wanted.is_empty());
        assert_eq!(seen, wanted, "the `seen` entries belong to the waiters");
    }

    fn score(&self, owner: &str) -> i64 {
        self.call(&["ZSCORE", TIMEOUTS, owner])
            .text()
            .parse()
            .unwrap()
    }

    /// Asserts that a nestlock waiter counts as gone one patience from now.
    fn assert_seen(&self, owner: &str) {
        let away = self
            .call(&["ZSCORE", SEEN, owner])
            .text()
            .parse::<i64>()
            .unwrap()
            - self.now();
        assert!(
            away > PATIENCE - SLACK && away <= PATIENCE,
            "{owner}: gone in {away} ms, not {PATIENCE}"
        );
    }

    /// Asserts that a waiter counts as gone for Redisson in `wanted` milliseconds.
    fn assert_scored(&self, owner: &str, wanted: i64) {
        let away = self.score(owner) - self.now();
        assert!(
            away > wanted - SLACK && away <= wanted,
            "{owner}: gone in {away} ms, not {wanted}"
        );
    }

    /// Makes a nestlock waiter count as gone, for both sides.
    fn silence(&self, owner: &str) {
        self.set_up(&["ZADD", SEEN, "1", owner]);
        self.set_up(&["ZADD", TIMEOUTS, "1", owner]);
    }
}

fn busy(reply: &Reply) -> (i64, i64) {
    match reply.list() {
        [Reply::Int(0), Reply::Int(hint), Reply::Int(ahead)] => (*hint, *ahead),
        other => panic!("not busy: {other:?}"),
    }
}

fn own_channel(owner: &str) -> String {
    format!("{CHANNEL}:{owner}")
}

fn nothing_was_said(bench: &Bench, ears: &mut [Ears]) {
    for ears in ears {
        assert_eq!(ears.heard(bench), [] as [&str; 0]);
    }
}

// --- acquire ---

/// An acquire of a free lock without a queue writes the record and nothing else.
#[test]
fn acquire_of_a_free_unqueued_lock_writes_only_the_record() {
    let fair = Fair::new();
    for waits in ["0", "1"] {
        assert_eq!(fair.acquire(A, "30000", "1", waits), ACQUIRED);
        let first = fair.snapshot();
        assert_eq!(first.len(), 1, "nothing but the record");
        assert_eq!(fair.server.record(LOCK), [(A.to_owned(), 1)]);
        let ttl = fair.server.pttl(LOCK);
        assert!((25_000..=30_000).contains(&ttl), "{ttl}");
        // sent twice
        assert_eq!(fair.acquire(A, "20000", "1", waits), ACQUIRED);
        assert_eq!(fair.snapshot(), first);
        fair.release(A, "0");
    }
}

#[test]
fn acquire_by_the_holder_counts_and_lengthens_while_others_wait() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    fair.wait(B);
    for (holds, says) in [(2, 2), (2, 2), (3, 3), (1, 3)] {
        assert_eq!(fair.acquire(A, "60000", &holds.to_string(), "1"), ACQUIRED);
        assert_eq!(
            fair.server.record(LOCK),
            [(A.to_owned(), says)],
            "a late one takes no hold away"
        );
    }
    assert!(fair.server.pttl(LOCK) > 50_000);
    assert_eq!(fair.acquire(A, "1000", "3", "1"), ACQUIRED);
    assert!(fair.server.pttl(LOCK) > 50_000, "never shortened");
    fair.assert_queue(&[B]);
}

#[test]
fn acquire_of_a_held_lock_joins_the_queue_in_redissons_format() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for (place, owner) in [B, C, R].into_iter().enumerate() {
        let (hint, ahead) = fair.wait(owner);
        assert_eq!(ahead, place as i64);
        assert!(hint > 0 && hint <= PATIENCE / 3 + 1, "{hint}");
        // Redisson's scores (rows 4 and 5 of its table: t + TTL + W, t + TTL + 2 W, ...), but with
        // our patience for each waiter ahead
        fair.assert_scored(owner, 30_000 + WAIT + PATIENCE * place as i64);
        fair.assert_seen(owner);
    }
    assert_eq!(fair.call(&["TYPE", QUEUE]).text(), "list");
    assert_eq!(fair.call(&["TYPE", TIMEOUTS]).text(), "zset");
    fair.assert_queue(&[B, C, R]);
    assert_eq!(
        (fair.server.pttl(QUEUE), fair.server.pttl(TIMEOUTS)),
        (-1, -1),
        "as Redisson leaves them"
    );
    // sent twice: no waiter is in the queue twice, or changes its position or time
    let before = fair.snapshot();
    for (place, owner) in [B, C, R].into_iter().enumerate() {
        let score = fair.score(owner);
        assert_eq!(fair.wait(owner).1, place as i64);
        assert!(fair.score(owner) >= score);
    }
    assert_eq!(fair.queue(), [B, C, R]);
    assert_eq!(fair.snapshot()[0], before[0], "the record is as it was");
}

#[test]
fn acquire_without_waiting_returns_busy_and_leaves_no_trace() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    let args = [B, "30000", "1", "5000", "0", CHANNEL];
    let (_, ahead) = busy(&fair.untouched(ACQUIRE, &KEYS, &args));
    assert_eq!(ahead, 0);
    fair.wait(C);
    let (_, ahead) = busy(&fair.untouched(ACQUIRE, &KEYS, &args));
    assert_eq!(ahead, 1, "one waits before it");
    // free, but another waiter is next
    fair.release(A, "0");
    fair.set_up(&["ZADD", TIMEOUTS, &(fair.now() + 1000).to_string(), C]);
    busy(&fair.untouched(ACQUIRE, &KEYS, &args));
}

#[test]
fn acquire_of_a_free_lock_is_for_the_head_alone() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.wait(C);
    assert_eq!(fair.release(A, "0"), Reply::Int(1));
    for owner in [C, R, A] {
        let (hint, _) = fair.wait(owner);
        assert!(hint > 0 && hint <= PATIENCE / 3 + 1, "{hint}");
        assert!(!fair.server.exists(LOCK));
    }
    fair.assert_queue(&[B, C, R, A]);
    for (owner, rest) in [
        (B, &[C, R, A] as &[&str]),
        (C, &[R, A]),
        (R, &[A]),
        (A, &[]),
    ] {
        assert_eq!(fair.acquire(owner, "30000", "1", "1"), ACQUIRED);
        fair.assert_queue(rest);
        assert_eq!(fair.release(owner, "0"), Reply::Int(1));
    }
    assert_eq!(fair.snapshot(), []);
}

/// An acquire drops the heads of the queue that were silent for too long, and no other waiter.
#[test]
fn acquire_drops_only_heads_that_were_silent_for_too_long() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [R, B, S] {
        fair.wait(owner);
    }
    // only a silent head blocks others, so only the head is removed
    fair.silence(B);
    fair.wait(S);
    fair.assert_queue(&[R, B, S]);
    fair.silence(R);
    assert_eq!(fair.wait(S).1, 0);
    fair.assert_queue(&[S]);
    assert!(fair.server.exists(LOCK), "the holder holds it");
    // a try removes silent heads as well
    fair.release(A, "0");
    fair.silence(S);
    assert_eq!(fair.acquire(A, "30000", "1", "0"), ACQUIRED);
    assert_eq!(fair.snapshot().len(), 1);
}

/// R62: silent waiters cost the others one patience in all, not one each.
#[test]
fn r62_acquire_drops_all_silent_heads_whatever_their_client() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, R, C, S] {
        fair.wait(owner);
    }
    for owner in [B, R, C] {
        fair.silence(owner);
    }
    assert_eq!(fair.wait(S).1, 0);
    fair.assert_queue(&[S]);
}

/// A future that is not polled is silent, but the other waiters of its client are not.
#[test]
fn a_silent_waiter_takes_no_other_of_its_client_along() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, C, R, D, S] {
        fair.wait(owner);
    }
    fair.silence(B);
    fair.silence(D);
    assert_eq!(
        fair.wait(S).1,
        3,
        "D is silent, but not ahead of a waiter that could be served"
    );
    fair.assert_queue(&[C, R, D, S]);
}

/// A waiter behind dead ones at a free lock is notified as soon as any acquire makes it the head.
#[test]
fn acquire_notifies_the_waiter_that_it_makes_the_next() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, C, R] {
        fair.wait(owner);
    }
    fair.set_up(&["DEL", LOCK]);
    let (mut next, mut ears) = (fair.listen(&own_channel(C)), [fair.listen(&own_channel(R))]);
    for waits in ["0", "1"] {
        fair.set_up(&["LREM", QUEUE, "0", B]);
        fair.set_up(&["LPUSH", QUEUE, B]);
        fair.silence(B);
        for _ in 0..2 {
            busy(&fair.acquire(R, "30000", "1", waits));
        }
        assert_eq!(next.heard(&fair), ["0"], "notified once");
        fair.assert_queue(&[C, R]);
    }
    // no message for a lock that is held
    fair.set_up(&["HSET", LOCK, A, "1"]);
    fair.silence(C);
    assert_eq!(fair.wait(R).1, 0);
    nothing_was_said(&fair, &mut ears);
}

/// A head that polls by itself keeps its place, even if its patience is over by then.
#[test]
fn acquire_keeps_a_head_that_looks_itself_however_late_it_comes() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.wait(R);
    fair.silence(B);
    assert_eq!(fair.wait(B).1, 0);
    fair.assert_seen(B);
    fair.assert_scored(B, 30_000 + WAIT);
    fair.silence(B);
    fair.set_up(&["DEL", LOCK]);
    assert_eq!(fair.acquire(B, "30000", "1", "1"), ACQUIRED);
    fair.assert_queue(&[R]);
}

/// An acquire gives a poll one patience, and for Redisson the time of a lease and its wait.
#[test]
fn acquire_grants_a_poll_a_patience_and_redisson_lease_and_wait() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.wait(C);
    for (place, owner) in [B, C].into_iter().enumerate() {
        for key in [SEEN, TIMEOUTS] {
            fair.set_up(&["ZADD", key, &(fair.now() + 1000).to_string(), owner]);
            fair.wait(owner);
            fair.assert_seen(owner);
        }
        fair.assert_scored(owner, 30_000 + WAIT + PATIENCE * place as i64);
    }
    // a high score from far behind is lowered: if the waiter died, Redisson would wait until then
    fair.set_up(&["ZADD", TIMEOUTS, &(fair.now() + 9_000_000).to_string(), C]);
    fair.set_up(&["ZADD", SEEN, &(fair.now() + 1000).to_string(), C]);
    fair.wait(C);
    fair.assert_scored(C, 30_000 + WAIT + PATIENCE);
    // the end of a record without a TTL is unknown
    fair.set_up(&["PERSIST", LOCK]);
    fair.silence(B);
    let (hint, _) = fair.wait(B);
    assert!(hint > 0 && hint <= PATIENCE / 3 + 1, "{hint}");
    fair.assert_seen(B);
    fair.assert_scored(B, WAIT);
}

/// With more waiters than the script counts, each keeps its position exactly once, even if one of
/// the keys is lost.
#[test]
fn a_far_back_place_survives_any_lost_key_and_never_doubles() {
    let waiters: Vec<String> = (0..40).map(|n| format!("{}:{n}", &B[..36])).collect();
    let queue: Vec<&str> = waiters.iter().map(String::as_str).collect();
    for lost in [None, Some(TIMEOUTS), Some(SEEN)] {
        let fair = Fair::new();
        fair.held_by(R, "30000");
        for (place, owner) in queue.iter().enumerate() {
            assert_eq!(fair.wait(owner).1, place as i64);
        }
        // only 17 waiters are checked; those farther ahead may be Redisson's, which need a full
        // wait
        assert!(fair.score(queue[20]) >= fair.score(queue[19]) + WAIT);
        if let Some(lost) = lost {
            fair.set_up(&["DEL", lost]);
        }
        for round in 0..2 {
            for (place, owner) in queue.iter().enumerate() {
                let (_, ahead) = fair.wait(owner);
                let lost = lost.is_some() && round == 0;
                assert_eq!(
                    ahead,
                    if lost {
                        place as i64
                    } else {
                        (place as i64).min(17)
                    },
                    "{owner}"
                );
            }
            fair.assert_queue(&queue);
        }
    }
    // without the queue key, all waiters still get the lock
    let fair = Fair::new();
    fair.held_by(R, "30000");
    for owner in &queue {
        fair.wait(owner);
    }
    fair.set_up(&["DEL", QUEUE]);
    fair.release(R, "0");
    let mut served = Vec::new();
    while served.len() < queue.len() {
        let before = served.len();
        for owner in &queue {
            if !served.contains(owner) && fair.acquire(owner, "30000", "1", "1") == ACQUIRED {
                fair.release(owner, "0");
                served.push(owner);
            }
        }
        assert!(served.len() > before, "no waiter gets it");
    }
    assert_eq!(fair.snapshot(), []);
}

/// With 10,000 waiters that each poll once a second, a poll must not cost the server more as the
/// queue grows, or they would take a whole core.
#[test]
fn a_look_costs_the_same_however_many_wait() {
    let fair = Fair::real();
    fair.held_by(A, "600000");
    let look = |waiter: usize| {
        let owner = format!("{}:{waiter}", &R[..36]);
        fair.run(
            ACQUIRE,
            &KEYS,
            &[&owner, "30000", "1", "600000", "1", CHANNEL],
        );
    };
    let asks = |waiter: usize| {
        let mut monitor = fair.server.wire();
        assert_eq!(monitor.call(&["MONITOR"]).unwrap().text(), "OK");
        look(waiter);
        fair.call(&["ECHO", "end-of-list"]);
        let lines = std::iter::from_fn(|| Some(monitor.read().unwrap().text().to_owned()));
        let lines = lines
            .take_while(|line| !line.contains("end-of-list"))
            .filter(|line| line.contains(" lua] "));
        lines
            .map(|line| {
                line.split('"')
                    .skip(1)
                    .step_by(2)
                    .map(str::to_owned)
                    .collect()
            })
            .collect::<Vec<Vec<String>>>()
    };
    let is_bounded = |words: &[String]| match words.iter().map(String::as_str).collect::<Vec<_>>()[..]
    {
        [
            "hget" | "hexists" | "hlen" | "pttl" | "time" | "zscore" | "zcard" | "llen",
            ..,
        ] => true,
        // the record has one field
        ["hkeys", LOCK] => true,
        // close to one of its ends
        ["lindex", _, at] => at.parse::<i64>().unwrap().abs() <= 17,
        ["lpos", _, _, "maxlen", most] => most.parse::<u32>().unwrap() <= 17,
        _ => false,
    };
    for (from, to) in [(0, 100), (100, 6_000)] {
        (from..to).for_each(look);
        // a waiter at the front, one in the middle, and the last one
        for waiter in [5, to / 2, to - 1] {
            let asked = asks(waiter);
            let unbounded = asked.iter().find(|words| !is_bounded(words));
            assert!(
                asked.len() < 20 && unbounded.is_none(),
                "{waiter} of {to}: {unbounded:?} of {asked:?}"
            );
        }
    }
}

/// Spares the server 10,000 writes a second from 10,000 waiters that each poll once a second.
#[test]
fn a_look_soon_after_another_writes_nothing() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, C] {
        fair.wait(owner);
    }
    let look = [C, "30000", "1", "60000", "1", CHANNEL];
    fair.run(ACQUIRE, &KEYS, &look);
    for _ in 0..3 {
        assert_eq!(busy(&fair.untouched(ACQUIRE, &KEYS, &look)).1, 1);
    }
}

/// R66: the clock of a Redisson client may be an hour off; once the lock is free for it, it has at
/// most one patience.
#[test]
fn r66_acquire_bounds_the_heads_time_by_the_servers_clock() {
    let fair = Fair::new();
    fair.set_up(&["RPUSH", QUEUE, J1]);
    for score in ["99999999999999", "inf", "9.5e15"] {
        fair.held_by_force(A);
        fair.set_up(&["ZADD", TIMEOUTS, score, J1]);
        let before = fair.call(&["ZSCORE", TIMEOUTS, J1]);
        fair.wait(B);
        assert_eq!(
            fair.call(&["ZSCORE", TIMEOUTS, J1]),
            before,
            "while it is held, the head keeps no other waiter waiting"
        );
        fair.assert_scored(B, 30_000 + 2 * WAIT);
        let mut head = fair.listen(&own_channel(J1));
        fair.release(A, "0");
        assert_eq!(head.heard(&fair), ["0"]);
        // a try does not wait behind the head, so it does not shorten the time of the head
        busy(&fair.untouched(ACQUIRE, &KEYS, &[C, "30000", "1", "5000", "0", CHANNEL]));
        for _ in 0..3 {
            let (hint, _) = fair.wait(B);
            assert!(hint > 0 && hint <= PATIENCE / 3 + 1);
            fair.assert_scored(J1, PATIENCE);
        }
        assert_eq!(
            head.heard(&fair),
            ["0"],
            "notified once more, by a waiter behind it"
        );
    }
    // a waiter whose clock is behind is removed at once
    fair.set_up(&["ZADD", TIMEOUTS, "-inf", J1]);
    assert_eq!(fair.acquire(B, "30000", "1", "1"), ACQUIRED);
    assert_eq!(fair.snapshot().len(), 1);
}

#[test]
fn acquire_of_a_second_hold_without_a_first_returns_lost() {
    let fair = Fair::new();
    let lost = || fair.untouched(ACQUIRE, &KEYS, &[A, "30000", "2", "5000", "1", CHANNEL]);
    assert_eq!(lost(), Reply::Int(-2));
    fair.held_by(B, "30000");
    fair.wait(C);
    fair.silence(C);
    for _ in 0..2 {
        assert_eq!(lost(), Reply::Int(-2), "taken over");
    }
}

#[test]
fn f30_fair_scripts_leave_other_hashes_alone() {
    let fair = Fair::new();
    fair.set_up(&["RPUSH", QUEUE, C]);
    fair.set_up(&["ZADD", TIMEOUTS, "1", C]);
    for fields in [
        &["name", "Ada"] as &[&str],
        &["name", "Ada", "born", "1815"],
        &["mode", "read", R, "1"],
        &[R, "1", "eeeeeeee-1111-4222-8333-444455556666:1", "1"],
    ] {
        fair.set_up(&["DEL", LOCK]);
        fair.set_up(&[&["HSET", LOCK], fields].concat());
        for (holds, waits) in [("1", "0"), ("1", "1"), ("2", "1")] {
            let answer =
                fair.untouched(ACQUIRE, &KEYS, &[A, "30000", holds, "5000", waits, CHANNEL]);
            assert_eq!(answer, Reply::Int(-3), "{fields:?}");
        }
        assert_eq!(
            fair.untouched(FORCE, &KEYS[..2], &[CHANNEL]),
            Reply::Int(-3),
            "{fields:?}"
        );
        assert_eq!(
            fair.untouched(RELEASE, &KEYS, &[A, "0", CHANNEL, "0"]),
            Reply::Nil,
            "{fields:?}"
        );
    }
}

/// Fair scripts refuse keys of another type, and touch nothing.
#[test]
fn f29_fair_scripts_refuse_keys_of_another_type_untouched() {
    // a wrong type at each of the four keys
    for wrong in KEYS {
        for waiting in [false, true] {
            for (held, others) in [(false, false), (true, false), (false, true)] {
                let fair = Fair::new();
                if held || others {
                    fair.held_by(if held { A } else { C }, "30000");
                }
                if waiting {
                    fair.set_up(&["RPUSH", QUEUE, A, B]);
                    fair.set_up(&["ZADD", TIMEOUTS, "1", B]);
                }
                fair.set_up(&["DEL", wrong]);
                fair.set_up(&["SET", wrong, "data"]);
                let what =
                    format!("{wrong} is a string; held {held}, waiting {waiting}, others {others}");
                for (script, keys, args) in [
                    (
                        ACQUIRE,
                        &KEYS[..],
                        &[B, "30000", "1", "5000", "1", CHANNEL] as &[&str],
                    ),
                    (ACQUIRE, &KEYS[..], &[B, "30000", "1", "5000", "0", CHANNEL]),
                    (RELEASE, &KEYS[..], &[A, "0", CHANNEL, "0"]),
                    (FORCE, &KEYS[..2], &[CHANNEL]),
                ] {
                    let before = fair.snapshot();
                    let reply = fair.run(script, keys, args);
                    if reply.is_error() {
                        assert!(
                            reply.text().starts_with("WRONGTYPE"),
                            "{script}, {what}: {reply:?}"
                        );
                        assert_eq!(fair.snapshot(), before, "{script}, {what}");
                    } else if script == RELEASE && wrong == LOCK {
                        // the release leaves the queue, whatever the type of the lock's key
                        assert_eq!(
                            (&reply, fair.call(&["GET", LOCK])),
                            (&Reply::Nil, Reply::Text("data".into()))
                        );
                        assert_eq!(fair.call(&["LPOS", QUEUE, A]), Reply::Nil, "{what}");
                    } else {
                        assert!(
                            script == FORCE || wrong == SEEN && script == RELEASE,
                            "{script}, {what}: {reply:?}"
                        );
                    }
                }
            }
        }
    }
}

/// A fair acquire refuses leases and patiences that are not valid.
#[test]
fn h1_h2_f39_fair_acquire_refuses_invalid_leases_and_patiences() {
    let fair = Fair::new();
    let none = [
        "0", "-1", "", "x", "1.5", "1e3", "0x10", " 10", "10 ", "nan", "inf",
    ];
    for held in [false, true] {
        if held {
            fair.held_by(A, "30000");
            fair.wait(B);
        }
        for number in none {
            for owner in [A, B, C] {
                fair.refused(ACQUIRE, &KEYS, &[owner, number, "1", "5000", "1", CHANNEL]);
                fair.refused(
                    ACQUIRE,
                    &KEYS,
                    &[owner, "30000", number, "5000", "1", CHANNEL],
                );
                fair.refused(ACQUIRE, &KEYS, &[owner, "30000", "1", number, "1", CHANNEL]);
            }
        }
        for number in none.iter().filter(|number| **number != "0") {
            fair.refused(RELEASE, &KEYS, &[A, number, CHANNEL, "0"]);
            fair.refused(RELEASE, &KEYS, &[B, number, CHANNEL, "0"]);
        }
    }
}

/// F39: the server may refuse the TTL after the record was written: the script then undoes the
/// write, and the waiter keeps its position.
#[test]
fn f39_fair_acquire_undoes_its_write_when_the_ttl_is_refused() {
    let fair = Fair::real();
    for queued in [false, true] {
        if queued {
            fair.held_by(B, "30000");
            fair.wait(A);
            fair.set_up(&["DEL", LOCK]);
        }
        fair.refused(
            ACQUIRE,
            &KEYS,
            &[A, "9223372036854775807", "1", "5000", "1", CHANNEL],
        );
        let mut limited = fair.limited("pexpire");
        let before = fair.snapshot();
        let command = eval(
            &source(ACQUIRE),
            &KEYS,
            &[A, "30000", "1", "5000", "1", CHANNEL],
        );
        let reply = limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap();
        assert!(reply.is_error(), "{reply:?}");
        assert_eq!(fair.snapshot(), before);
    }
}

/// R57: the list and the set may disagree; scripts never fail, and repair them.
#[test]
fn r57_scripts_mend_a_queue_whose_two_keys_are_out_of_step() {
    for deleted in [QUEUE, TIMEOUTS] {
        let fair = Fair::new();
        fair.held_by(A, "30000");
        fair.wait(B);
        fair.wait(C);
        fair.set_up(&["DEL", deleted]);
        fair.wait(C);
        fair.wait(B);
        fair.wait(R);
        let queue = if deleted == QUEUE {
            [C, B, R]
        } else {
            [B, C, R]
        };
        fair.assert_queue(&queue);
        fair.set_up(&["DEL", deleted]);
        assert_eq!(fair.release(A, "0"), Reply::Int(1));
        for _ in 0..2 {
            for owner in queue {
                let reply = fair.acquire(owner, "30000", "1", "1");
                assert!(!reply.is_error(), "{reply:?}");
                fair.set_up(&["DEL", deleted]);
                let reply = fair.release(owner, "0");
                assert!(!reply.is_error(), "{reply:?}");
            }
        }
        assert_eq!(fair.snapshot(), []);
    }
}

/// A head without a score gets one, and blocks no waiter for ever.
#[test]
fn r57_a_head_without_a_score_gets_one_and_blocks_no_waiter() {
    let fair = Fair::new();
    fair.set_up(&["RPUSH", QUEUE, J1]);
    let (hint, _) = fair.wait(B);
    assert!(hint > 0);
    fair.assert_scored(J1, PATIENCE);
    // a score without a position: the owner joins like any other
    fair.set_up(&["ZADD", TIMEOUTS, "1", C]);
    assert_eq!(fair.wait(C).1, 2);
    fair.assert_queue(&[J1, B, C]);
}

// --- release ---

#[test]
fn release_to_zero_returns_1_and_notifies_the_head_alone() {
    let fair = Fair::new();
    let mut ears: Vec<_> = [CHANNEL, &own_channel(C), &own_channel(A)]
        .map(|channel| fair.listen(channel))
        .into();
    let mut head = fair.listen(&own_channel(B));
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.wait(C);
    let queue = (fair.queue(), fair.score(B), fair.score(C));
    assert_eq!(fair.release(A, "0"), Reply::Int(1));
    assert!(!fair.server.exists(LOCK));
    assert_eq!(
        queue,
        (fair.queue(), fair.score(B), fair.score(C)),
        "the queue waits"
    );
    assert_eq!(head.heard(&fair), ["0"]);
    nothing_was_said(&fair, &mut ears);
    // a second send finds no hold, which after the first means success
    assert_eq!(
        fair.untouched(RELEASE, &KEYS, &[A, "0", CHANNEL, "0"]),
        Reply::Nil
    );
    assert_eq!(head.heard(&fair), [] as [&str; 0], "said once only");
}

#[test]
fn release_of_some_holds_returns_0_and_notifies_no_waiter() {
    let fair = Fair::new();
    let mut ears = [fair.listen(&own_channel(B)), fair.listen(CHANNEL)];
    fair.held_by(A, "30000");
    assert_eq!(fair.acquire(A, "30000", "3", "1"), ACQUIRED);
    fair.wait(B);
    let expires = fair.expires(LOCK);
    for holds in [2, 2, 1, 1] {
        assert_eq!(fair.release(A, &holds.to_string()), Reply::Int(0));
        assert_eq!(fair.server.record(LOCK), [(A.to_owned(), holds)]);
    }
    assert_eq!(
        fair.untouched(RELEASE, &KEYS, &[A, "9", CHANNEL, "0"]),
        Reply::Int(0),
        "a release never adds holds"
    );
    assert_eq!(fair.expires(LOCK), expires);
    fair.assert_queue(&[B]);
    nothing_was_said(&fair, &mut ears);
}

#[test]
fn r43_f38_fair_release_by_another_owner_returns_nil() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    fair.wait(C);
    let mut ears = [fair.listen(&own_channel(C))];
    for holds in ["0", "1"] {
        for owner in [B, R, &A[..36], &format!("{A}.1")] {
            assert_eq!(
                fair.untouched(RELEASE, &KEYS, &[owner, holds, CHANNEL, "0"]),
                Reply::Nil
            );
        }
    }
    // a partial release by a waiter does not leave the queue
    assert_eq!(
        fair.untouched(RELEASE, &KEYS, &[C, "1", CHANNEL, "0"]),
        Reply::Nil
    );
    nothing_was_said(&fair, &mut ears);
}

/// A release to zero by a waiter takes it out of the queue, and takes no other waiter's place.
#[test]
fn a_waiters_release_to_zero_removes_only_its_own_queue_place() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, C, R] {
        fair.wait(owner);
    }
    let mut ears: Vec<_> = [B, C, R]
        .map(|owner| fair.listen(&own_channel(owner)))
        .into();
    let scores = (fair.score(B), fair.score(R));
    assert_eq!(fair.release(C, "0"), Reply::Nil);
    fair.assert_queue(&[B, R]);
    assert_eq!(
        fair.untouched(RELEASE, &KEYS, &[C, "0", CHANNEL, "0"]),
        Reply::Nil,
        "sent twice"
    );
    assert_eq!((fair.score(B), fair.score(R)), scores);
    assert_eq!(fair.release(B, "0"), Reply::Nil);
    fair.assert_queue(&[R]);
    assert_eq!(fair.server.record(LOCK).len(), 1, "the holder holds");
    nothing_was_said(&fair, &mut ears);
}

#[test]
fn release_to_zero_by_the_head_of_a_free_lock_tells_the_next() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, C, R] {
        fair.wait(owner);
    }
    fair.release(A, "0");
    let (mut next, mut last) = (fair.listen(&own_channel(C)), fair.listen(&own_channel(R)));
    // notified that the lock is free, and gone before it tried
    assert_eq!(fair.release(B, "0"), Reply::Nil);
    assert_eq!(next.heard(&fair), ["0"]);
    // a leave from the middle sends no message
    assert_eq!(fair.release(R, "0"), Reply::Nil);
    assert_eq!((next.heard(&fair).len(), last.heard(&fair).len()), (0, 0));
}

/// A release leaves the queue, whatever other data replaced the record during the wait.
#[test]
fn release_to_zero_drops_the_place_next_to_data_of_any_kind() {
    let fair = Fair::new();
    for data in [
        &["SET", LOCK, "data"] as &[&str],
        &["RPUSH", LOCK, "data"],
        &["ZADD", LOCK, "1", "data"],
        &["HSET", LOCK, "name", "Ada"],
        &["HSET", LOCK, "name", "Ada", "born", "1815"],
        &["HSET", LOCK, "mode", "read", B, "1"],
        &["HSET", LOCK, A, "1", C, "1"],
    ] {
        fair.set_up(&["DEL", LOCK]);
        fair.held_by(A, "30000");
        for owner in [B, C, R] {
            fair.wait(owner);
        }
        fair.set_up(&["DEL", LOCK]);
        fair.set_up(data);
        let mut ears: Vec<_> = [B, C, R]
            .map(|owner| fair.listen(&own_channel(owner)))
            .into();
        let record = fair
            .snapshot()
            .into_iter()
            .find(|(key, ..)| key == LOCK)
            .unwrap();
        for _ in 0..2 {
            assert_eq!(fair.release(B, "0"), Reply::Nil, "{data:?}");
            fair.assert_queue(&[C, R]);
        }
        assert!(fair.snapshot().contains(&record), "{data:?}");
        nothing_was_said(&fair, &mut ears);
        assert_eq!(
            fair.untouched(RELEASE, &KEYS, &[A, "1", CHANNEL, "0"])
                .is_error(),
            data[0] != "HSET",
            "{data:?}"
        );
        for owner in [C, R] {
            if data[2] != A || owner != C {
                assert_eq!(fair.release(owner, "0"), Reply::Nil);
            }
        }
        fair.set_up(&["DEL", QUEUE, TIMEOUTS, SEEN]);
    }
}

/// A Redisson waiter behind dead ones gets the message, and is the head when it comes.
#[test]
fn release_takes_the_dead_off_the_head() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, S, C] {
        fair.wait(owner);
    }
    fair.set_up(&["RPUSH", QUEUE, J1]);
    fair.set_up(&["ZADD", TIMEOUTS, &(fair.now() + 10_000).to_string(), J1]);
    fair.wait(R);
    for owner in [B, S, C] {
        fair.silence(owner);
    }
    let mut head = fair.listen(&own_channel(J1));
    assert_eq!(fair.release(A, "0"), Reply::Int(1));
    assert_eq!(head.heard(&fair), ["0"]);
    fair.assert_queue(&[J1, R]);
    // a head that leaves a free lock removes dead waiters in the same way
    fair.silence(R);
    fair.set_up(&["ZADD", TIMEOUTS, "1", J1]);
    fair.set_up(&["LPUSH", QUEUE, D]);
    fair.set_up(&["RPUSH", QUEUE, S]);
    assert_eq!(fair.release(D, "0"), Reply::Nil);
    assert_eq!(fair.queue(), [S]);
}

#[test]
fn release_notifies_the_first_waiter_that_is_not_gone() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for owner in [B, C, R] {
        fair.wait(owner);
    }
    fair.silence(B);
    fair.silence(C);
    let mut ears: Vec<_> = [B, C].map(|owner| fair.listen(&own_channel(owner))).into();
    let mut next = fair.listen(&own_channel(R));
    assert_eq!(fair.release(A, "0"), Reply::Int(1));
    assert_eq!(next.heard(&fair), ["0"]);
    nothing_was_said(&fair, &mut ears);
    assert_eq!(fair.acquire(R, "30000", "1", "1"), ACQUIRED);
    fair.assert_queue(&[]);
}

/// F28: if PUBLISH is denied, nothing has been written before it.
#[test]
fn f28_a_fair_release_that_may_not_publish_changes_nothing() {
    let fair = Fair::real();
    fair.held_by(A, "30000");
    for owner in [B, C, R] {
        fair.wait(owner);
    }
    fair.silence(B);
    let mut limited = fair.limited("publish");
    let mut refused = |script: &str, keys: &[&str], args: &[&str]| {
        let before = fair.snapshot();
        let command = eval(&source(script), keys, args);
        let reply = limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap();
        assert!(reply.is_error(), "{script}: {reply:?}");
        assert_eq!(fair.snapshot(), before, "{script} {args:?}");
    };
    refused(RELEASE, &KEYS, &[A, "0", CHANNEL, "0"]);
    refused(FORCE, &KEYS[..2], &[CHANNEL]);
    fair.set_up(&["DEL", LOCK]);
    refused(RELEASE, &KEYS, &[B, "0", CHANNEL, "0"]);
}

// --- force_release ---

#[test]
fn p8_fair_force_release_tells_the_head_and_keeps_the_queue() {
    let fair = Fair::new();
    let mut head = fair.listen(&own_channel(B));
    let mut ears = [fair.listen(CHANNEL), fair.listen(&own_channel(C))];
    for _ in 0..2 {
        assert_eq!(
            fair.untouched(FORCE, &KEYS[..2], &[CHANNEL]),
            Reply::Int(0),
            "no owner holds it"
        );
    }
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.wait(C);
    assert_eq!(fair.run(FORCE, &KEYS[..2], &[CHANNEL]), Reply::Int(1));
    assert!(!fair.server.exists(LOCK));
    fair.assert_queue(&[B, C]);
    assert_eq!(head.heard(&fair), ["0"]);
    assert_eq!(
        fair.untouched(FORCE, &KEYS[..2], &[CHANNEL]),
        Reply::Int(0),
        "sent twice"
    );
    assert_eq!(head.heard(&fair), [] as [&str; 0]);
    nothing_was_said(&fair, &mut ears);
}

// --- a full server ---

/// H12, F25: without memory, joins and acquires are refused; waiters can leave, holders can
/// release, and gone heads are removed.
#[test]
fn h12_f25_without_memory_fair_locks_can_be_released_and_left() {
    let fair = Fair::real();
    fair.held_by(A, "30000");
    assert_eq!(fair.acquire(A, "30000", "2", "1"), ACQUIRED);
    fair.wait(B);
    fair.wait(C);
    fair.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    let join = [R, "30000", "1", "5000", "1", CHANNEL];
    assert!(fair.refused(ACQUIRE, &KEYS, &join).starts_with("OOM"));
    assert!(
        fair.refused(ACQUIRE, &KEYS, &[A, "1", "3", "5000", "1", CHANNEL])
            .starts_with("OOM")
    );
    assert_eq!(fair.release(C, "0"), Reply::Nil);
    fair.assert_queue(&[B]);
    let mut head = fair.listen(&own_channel(B));
    assert_eq!(fair.release(A, "1"), Reply::Int(0));
    assert_eq!(fair.release(A, "0"), Reply::Int(1));
    assert_eq!(head.heard(&fair), ["0"]);
    assert!(
        fair.refused(ACQUIRE, &KEYS, &[B, "30000", "1", "5000", "1", CHANNEL])
            .starts_with("OOM")
    );
    fair.assert_queue(&[B]);
    assert_eq!(fair.release(B, "0"), Reply::Nil);
    assert_eq!(fair.snapshot(), []);
}

// --- what it says and keeps ---

/// Three Redisson waiters may be served before the next poll, each of which subtracts 5 min from
/// the scores.
#[test]
fn a_look_makes_room_for_all_of_redissons_that_are_before_it() {
    let fair = Fair::new();
    let (java, mut wire) = (RFairLock::new(LOCK), fair.server.wire());
    fair.held_by(A, "30000");
    for owner in [J1, J2, J3] {
        assert!(
            java.wait(&mut wire, owner, fair.now(), WAIT, 30_000)
                .is_some()
        );
    }
    fair.wait(B);
    fair.assert_scored(B, 30_000 + 4 * WAIT);
    // a long hold has used up the waiters' time
    for (at, owner) in [J1, J2, J3, B].iter().enumerate() {
        let left = if *owner == B {
            100
        } else {
            5_000 + at as i64 * WAIT
        };
        fair.set_up(&["ZADD", TIMEOUTS, &(fair.now() + left).to_string(), owner]);
    }
    fair.wait(B);
    fair.assert_scored(B, 30_000 + 4 * WAIT);
    fair.release(A, "0");
    for owner in [J1, J2, J3] {
        assert_eq!(
            java.wait(&mut wire, owner, fair.now(), WAIT, 30_000),
            None,
            "its turn"
        );
        assert!(!java.try_lock(&mut wire, D, fair.now(), WAIT, 30_000));
        java.unlock(&mut wire, owner, fair.now(), 30_000);
    }
    fair.assert_queue(&[B]);
    assert_eq!(fair.acquire(B, "30000", "1", "1"), ACQUIRED);
}

impl Fair {
    /// Returns a lock held by A with three Redisson waiters ahead of B.
    fn with_three_of_redisson_before_b() -> Self {
        let fair = Fair::new();
        let (java, mut wire) = (RFairLock::new(LOCK), fair.server.wire());
        fair.held_by(A, "30000");
        for owner in [J1, J2, J3] {
            java.wait(&mut wire, owner, fair.now(), WAIT, 30_000);
        }
        fair.wait(B);
        fair
    }
}

/// Dead Redisson waiters have no subscription either: they cost one patience in all, not one each.
#[test]
fn dead_redisson_waiters_after_a_skip_get_a_tenth_patience_each() {
    let fair = Fair::with_three_of_redisson_before_b();
    let mut living = fair.listen(&own_channel(J3));
    fair.release(A, "0");
    fair.wait(B);
    fair.assert_scored(J1, PATIENCE);
    // the time of the others does not end before they become the head
    fair.assert_scored(J2, 30_000 + 2 * WAIT);
    fair.set_up(&["ZADD", TIMEOUTS, "1", J1]);
    fair.wait(B);
    assert!(
        fair.score(J2) - fair.now() <= PATIENCE / 10,
        "no client listens for it"
    );
    fair.set_up(&["ZADD", TIMEOUTS, "1", J2]);
    assert_eq!(living.heard(&fair), [] as [&str; 0]);
    fair.wait(B);
    fair.assert_scored(J3, PATIENCE);
    assert_eq!(living.heard(&fair), ["0"], "it listens, and has its time");
    fair.assert_queue(&[J3, B]);
}

/// Another Redisson waiter may remove the one whose time was shortened, before nestlock sees that
/// it did not come.
#[test]
fn dead_waiters_redisson_removes_get_a_tenth_patience_each_too() {
    let fair = Fair::with_three_of_redisson_before_b();
    fair.release(A, "0");
    fair.wait(B);
    fair.assert_scored(J1, PATIENCE);
    let put_out = |owner: &str, after: i64| {
        let cut = fair.now() - after;
        fair.set_up(&["LREM", QUEUE, "0", owner]);
        fair.set_up(&["ZREM", TIMEOUTS, owner]);
        fair.set_up(&["ZADD", SEEN, &cut.to_string(), "cut"]);
    };
    put_out(J1, 1);
    fair.wait(B);
    assert!(
        fair.score(J2) - fair.now() <= PATIENCE / 10,
        "no client listens for it"
    );
    // long after: that waiter may have had the lock
    put_out(J2, PATIENCE + 1);
    fair.wait(B);
    fair.assert_scored(J3, PATIENCE);
    fair.set_up(&["DEL", QUEUE, TIMEOUTS]);
    assert_eq!(fair.acquire(B, "30000", "1", "1"), ACQUIRED);
    assert_eq!(fair.call(&["EXISTS", SEEN]), Reply::Int(0));
}

/// Until the lock is free, such a waiter blocks nothing; Redisson may remove it earlier.
#[test]
fn an_expired_redisson_waiter_leaves_when_the_lock_is_free() {
    let fair = Fair::new();
    let (java, mut wire) = (RFairLock::new(LOCK), fair.server.wire());
    fair.held_by(A, "30000");
    java.wait(&mut wire, J1, fair.now(), WAIT, 30_000);
    fair.wait(B);
    fair.set_up(&["ZADD", TIMEOUTS, "1", J1]);
    assert_eq!(fair.wait(B).1, 1);
    fair.assert_queue(&[J1, B]);
    fair.set_up(&["DEL", LOCK]);
    assert_eq!(fair.acquire(B, "30000", "1", "1"), ACQUIRED);
    fair.assert_queue(&[]);
}

impl Fair {
    /// Simulates a server clock that went back by `by` milliseconds: all earlier times of nestlock
    /// are moved ahead.
    fn clock_goes_back(&self, by: i64) {
        for (key, ours_alone) in [(SEEN, false), (TIMEOUTS, true)] {
            for at in self.call(&["ZRANGE", key, "0", "-1"]).list() {
                if !(ours_alone && at.text().starts_with(JAVA)) {
                    self.set_up(&["ZINCRBY", key, &by.to_string(), at.text()]);
                }
            }
        }
    }
}

/// 2 s to 30 days, in milliseconds.
const BACK: [i64; 4] = [2_000, 600_000, 86_400_000, 30 * 86_400_000];

/// B is dead, C waits or tries: a dead waiter counts as gone one patience after its last poll, even
/// if the clock jumps.
#[test]
fn a_clock_that_goes_back_keeps_no_waiter_longer() {
    for (by, waits) in BACK.into_iter().flat_map(|by| [(by, "0"), (by, "1")]) {
        let fair = Fair::new();
        fair.held_by(A, "30000");
        assert_eq!((fair.wait(B).1, fair.wait(C).1), (0, 1));
        fair.set_up(&["DEL", LOCK]);
        fair.clock_goes_back(by);
        let (hint, _) = busy(&fair.acquire(C, "30000", "1", waits));
        assert!(hint <= PATIENCE / 3, "{hint}");
        fair.assert_seen(B);
        fair.assert_seen(C);
        fair.assert_scored(B, 30_000 + WAIT);
        fair.assert_queue(&[B, C]);
        let gone = fair.now() - 1;
        fair.set_up(&["ZADD", SEEN, &gone.to_string(), B]);
        assert_eq!(fair.acquire(C, "30000", "1", waits), ACQUIRED);
        assert_eq!(fair.call(&["EXISTS", SEEN]), Reply::Int(0), "no trace");
    }
}

/// A waiter that joins after the jump does not wait longer behind those from before it.
#[test]
fn a_later_waiter_sees_that_the_clock_went_back() {
    for by in BACK {
        let fair = Fair::new();
        fair.held_by(A, "30000");
        fair.wait(B);
        fair.clock_goes_back(by);
        assert_eq!(fair.wait(C).1, 1);
        fair.assert_seen(B);
        fair.assert_seen(C);
        fair.assert_queue(&[B, C]);
    }
}

/// A release sends or grants nothing to a waiter that was gone before the jump.
#[test]
fn a_release_after_the_clock_went_back_passes_over_the_gone() {
    for by in BACK {
        let fair = Fair::new();
        fair.held_by(A, "30000");
        fair.wait(B);
        fair.wait(C);
        let mut ears = fair.listen(&own_channel(C));
        // B was already silent for a patience at C's last poll
        let gone = fair.now() - SLACK;
        fair.set_up(&["ZADD", SEEN, &gone.to_string(), B]);
        fair.clock_goes_back(by);
        assert_eq!(fair.release(A, "0"), Reply::Int(1));
        assert_eq!(ears.heard(&fair), ["0"]);
        assert_eq!(fair.queue(), [C]);
    }
}

/// Dead waiters at the head are removed, even after a jump.
#[test]
fn the_dead_are_not_put_back_when_the_clock_went_back() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    for waiter in [B, C, D] {
        fair.wait(waiter);
    }
    fair.set_up(&["DEL", LOCK]);
    let gone = fair.now() - SLACK;
    fair.set_up(&["ZADD", SEEN, &gone.to_string(), B, &gone.to_string(), C]);
    fair.clock_goes_back(3_600_000);
    fair.held_by_force(A);
    assert_eq!(fair.wait(D).1, 0);
    fair.assert_queue(&[D]);
    assert_eq!(fair.release(A, "0"), Reply::Int(1));
    assert_eq!(fair.acquire(D, "30000", "1", "1"), ACQUIRED);
    assert_eq!(fair.call(&["EXISTS", SEEN]), Reply::Int(0), "no trace");
}

/// A try writes nothing, so it needs no memory.
#[test]
fn without_memory_a_try_is_busy_after_the_clock_went_back() {
    let fair = Fair::real();
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.clock_goes_back(3_600_000);
    fair.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(busy(&fair.acquire(C, "30000", "1", "0")).1, 1);
    fair.set_up(&["CONFIG", "SET", "maxmemory", "0"]);
    fair.wait(C);
    fair.assert_seen(B);
}

/// A clock that is slightly behind that of the previous server is not a jump.
#[test]
fn a_clock_that_is_behind_by_less_than_a_second_is_left_alone() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    fair.wait(B);
    fair.clock_goes_back(600);
    let before = fair.call(&["ZSCORE", SEEN, B]);
    assert_eq!(busy(&fair.acquire(C, "30000", "1", "0")).1, 1);
    assert_eq!(fair.call(&["ZSCORE", SEEN, B]), before);
}

/// With the last nestlock waiter, all of nestlock's data is removed, even if Redisson waiters stay.
#[test]
fn the_clock_is_forgotten_with_the_last_of_ours() {
    let fair = Fair::new();
    let (java, mut wire) = (RFairLock::new(LOCK), fair.server.wire());
    fair.held_by(A, "30000");
    fair.wait(B);
    java.wait(&mut wire, J1, fair.now(), WAIT, 30_000);
    assert_eq!(fair.release(B, "0"), Reply::Nil);
    fair.assert_queue(&[J1]);
    assert_eq!(fair.call(&["EXISTS", SEEN]), Reply::Int(0));
}

/// Entries of dead waiters that Redisson removed from the queue expire after a day.
#[test]
fn a_join_forgets_waiters_silent_for_a_day() {
    let fair = Fair::new();
    fair.held_by(A, "30000");
    let ago = |millis: i64| (fair.now() - millis).to_string();
    fair.set_up(&["ZADD", SEEN, &ago(90_000_000), C, &ago(80_000_000), D]);
    fair.wait(B);
    assert_eq!(
        fair.call(&["ZRANGE", SEEN, "0", "-1"]),
        Reply::List([D, "clock", B].map(|name| Reply::Text(name.into())).into())
    );
}

#[test]
fn nothing_is_published_anywhere_but_to_the_head() {
    let fair = Fair::new();
    let mut wire = fair.server.wire();
    assert!(!wire.call(&["PSUBSCRIBE", "*"]).unwrap().is_error());
    fair.held_by(A, "30000");
    fair.acquire(A, "30000", "2", "1");
    fair.wait(B);
    fair.acquire(C, "30000", "1", "0");
    fair.release(A, "1");
    fair.release(A, "0");
    fair.acquire(B, "30000", "1", "1");
    fair.release(B, "0");
    fair.set_up(&["PUBLISH", "end", "end"]);
    let first = wire.read().unwrap();
    assert_eq!(
        first.list()[2..],
        [Reply::Text(own_channel(B)), Reply::Text("0".into())]
    );
    assert_eq!(wire.read().unwrap().list()[2], Reply::Text("end".into()));
}

/// R60: repeated joins and leaves do not move a waiter's time into the far future.
#[test]
fn r60_ten_thousand_joins_and_leaves_do_not_add_up() {
    let fair = Fair::new();
    fair.held_by(A, "600000");
    fair.wait(B);
    let mut wire = fair.server.wire();
    let mut load = |script| {
        wire.call(&["SCRIPT", "LOAD", &source(script)])
            .unwrap()
            .text()
            .to_owned()
    };
    let (acquire, release) = (load(ACQUIRE), load(RELEASE));
    for round in 0..5_000 {
        for owner in [C, R] {
            let args = [
                "EVALSHA", &acquire, "4", LOCK, QUEUE, TIMEOUTS, SEEN, owner, "30000", "1", "5000",
                "1", CHANNEL,
            ];
            wire.call(&args).unwrap();
        }
        if round % 500 == 0 {
            fair.wait(B);
            let most = (WAIT * 3 + 600_000, fair.now());
            for owner in [B, C, R] {
                assert!(
                    fair.score(owner) - most.1 <= most.0,
                    "{owner} in round {round}"
                );
            }
        }
        for owner in [C, R] {
            let reply = wire
                .call(&[
                    "EVALSHA", &release, "4", LOCK, QUEUE, TIMEOUTS, SEEN, owner, "0", CHANNEL,
                ])
                .unwrap();
            assert_eq!(reply, Reply::Nil);
        }
    }
    fair.assert_queue(&[B]);
}
