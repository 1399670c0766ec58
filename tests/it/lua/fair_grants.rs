//! `lua/fair`: a waiter with a turn, which the release of the last holder makes the holder.

use std::ops::Deref;

use super::{ACQUIRED, Bench, Ears, eval, source};
use crate::support::wire::Reply;

const LOCK: &str = "orders:7";
const QUEUE: &str = "redisson_lock_queue:{orders:7}";
const TIMEOUTS: &str = "redisson_lock_timeout:{orders:7}";
const SEEN: &str = "nestlock_fair_seen:{orders:7}";
const KEYS: [&str; 4] = [LOCK, QUEUE, TIMEOUTS, SEEN];
const CHANNEL: &str = "redisson_lock__channel:{orders:7}";
const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const C: &str = "0a1b2c3d-1111-4222-8333-444455556666:44";
/// A thread of Redisson's.
const J: &str = "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71";

/// Longer than a loaded machine takes for a test: nobody is gone by mistake.
const PATIENCE: &str = "60000";
/// As a release says it that grants the lock, and one that does not.
const GRANT: &str = "1";
const NONE: &str = "0";

struct Fair(Bench);

impl Deref for Fair {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        &self.0
    }
}

impl Fair {
    fn held_by_a() -> Self {
        Self::on(Bench::new())
    }

    fn on(bench: Bench) -> Self {
        let fair = Self(bench);
        assert_eq!(fair.acquire(A, "1"), ACQUIRED);
        fair
    }

    fn acquire(&self, owner: &str, waits: &str) -> Reply {
        self.run("fair/acquire", &KEYS, &[owner, "70000", "1", PATIENCE, waits, CHANNEL])
    }

    /// What the answer calls the place in the queue.
    fn wait(&self, owner: &str, turn: u32) -> String {
        let reply = self.acquire(owner, &turn.to_string());
        let [Reply::Int(0), Reply::Int(_), Reply::Int(_), place] = reply.list() else { panic!("{reply:?}") };
        assert_eq!(self.seen(owner), of(place.text()));
        place.text().to_owned()
    }

    fn seen(&self, owner: &str) -> (u64, u64) {
        of(self.call(&["ZSCORE", SEEN, owner]).text())
    }

    fn now(&self) -> i64 {
        let time = self.call(&["TIME"]);
        let number = |n: usize| time.list()[n].text().parse::<i64>().unwrap();
        number(0) * 1000 + number(1) / 1000
    }

    fn listen_as(&self, owner: &str) -> Ears {
        self.listen(&format!("{CHANNEL}:{owner}"))
    }

    fn release(&self, owner: &str, grant: &str) -> Reply {
        self.run("fair/release", &KEYS, &[owner, "0", CHANNEL, grant])
    }

    fn queue(&self) -> Vec<String> {
        self.call(&["LRANGE", QUEUE, "0", "-1"]).list().iter().map(|owner| owner.text().to_owned()).collect()
    }

    fn assert_held_by(&self, owner: &str, waiting: &[&str]) {
        assert_eq!(self.server.record(LOCK), [(owner.to_owned(), 1)]);
        self.assert_queue(waiting);
    }

    fn assert_free(&self, waiting: &[&str]) {
        assert!(!self.server.exists(LOCK));
        self.assert_queue(waiting);
    }

    fn assert_queue(&self, waiting: &[&str]) {
        assert_eq!(self.queue(), waiting);
        for key in [TIMEOUTS, SEEN] {
            assert!(self.call(&["ZCARD", key]).int() <= waiting.len() as i64, "{key} knows of somebody else");
        }
    }
}

/// Of a score, the time and the turn.
fn of(score: &str) -> (u64, u64) {
    let parts = score.parse::<f64>().unwrap() * 1024.0;
    assert!(parts.fract().abs() < f64::EPSILON, "{score}");
    (parts as u64 / 1024, parts as u64 % 1024)
}

/// That the one at this place was told, and what is left of its patience.
fn assert_granted(heard: &[String], place: &str) {
    let [text] = heard else { panic!("{heard:?}") };
    let (told, ttl) = text.split_once(' ').unwrap();
    assert_eq!(told, place);
    assert!((50_000..=60_000).contains(&ttl.parse::<u64>().unwrap()), "{text}");
}

#[test]
fn a_release_grants_the_lock_to_the_next_with_a_turn_and_tells_it_its_place() {
    let fair = Fair::held_by_a();
    let (b, c) = (fair.wait(B, 2), fair.wait(C, 1023));
    let (mut next, mut ears) = (fair.listen_as(B), [fair.listen_as(C), fair.listen_as(A), fair.listen(CHANNEL)]);
    assert_eq!(fair.release(A, GRANT), Reply::Int(1));
    fair.assert_held_by(B, &[C]);
    let ttl = fair.server.pttl(LOCK);
    assert!((50_000..=60_000).contains(&ttl), "what is left of its patience: {ttl}");
    assert_granted(&next.heard(&fair), &b);
    for ear in &mut ears {
        assert_eq!(ear.heard(&fair), [] as [&str; 0]);
    }
    // sent twice
    assert_eq!(fair.untouched("fair/release", &KEYS, &[A, "0", CHANNEL, GRANT]), Reply::Nil);
    assert_eq!(next.heard(&fair), [] as [&str; 0]);
    // whoever has not heard asks, and is told
    assert_eq!(fair.acquire(B, "2"), ACQUIRED);
    fair.assert_held_by(B, &[C]);
    assert!(fair.server.pttl(LOCK) > 60_000, "the lease that it asks for");
    let mut last = fair.listen_as(C);
    assert_eq!(fair.release(B, GRANT), Reply::Int(1));
    assert_granted(&last.heard(&fair), &c);
    fair.assert_held_by(C, &[]);
}

#[test]
fn nobody_is_granted_the_lock_who_did_not_ask_for_that() {
    for (turn, grant) in [("1", GRANT), ("2", NONE)] {
        let fair = Fair::held_by_a();
        fair.acquire(B, turn);
        fair.wait(C, 3);
        let mut next = fair.listen_as(B);
        assert_eq!(fair.release(A, grant), Reply::Int(1));
        assert_eq!(next.heard(&fair), ["0"], "waits {turn}, grant {grant}");
        fair.assert_free(&[B, C]);
    }
    // one of Redisson's, whose threads would re-enter
    let fair = Fair::held_by_a();
    fair.set_up(&["RPUSH", QUEUE, J]);
    fair.set_up(&["ZADD", TIMEOUTS, "9000000000000", J]);
    fair.wait(B, 2);
    let mut next = fair.listen_as(J);
    assert_eq!(fair.release(A, GRANT), Reply::Int(1));
    assert_eq!(next.heard(&fair), ["0"]);
    fair.assert_free(&[J, B]);
}

#[test]
fn nobody_is_granted_what_somebody_holds() {
    let fair = Fair::held_by_a();
    fair.run("fair/acquire", &KEYS, &[A, "70000", "2", PATIENCE, "1", CHANNEL]);
    fair.wait(B, 2);
    let mut next = fair.listen_as(B);
    for holds in ["1", "2>1"] {
        fair.run("fair/release", &KEYS, &[A, holds, CHANNEL, GRANT]);
        fair.assert_held_by(A, &[B]);
    }
    // nor by a waiter that leaves
    fair.wait(C, 3);
    assert_eq!(fair.release(C, GRANT), Reply::Nil);
    fair.assert_held_by(A, &[B]);
    // nor what stands there without a TTL, and with it would be gone
    fair.set_up(&["PERSIST", LOCK]);
    assert_eq!(next.heard(&fair), [] as [&str; 0]);
    assert_eq!(fair.release(A, GRANT), Reply::Int(1));
    assert_eq!(next.heard(&fair), ["0"]);
    fair.assert_free(&[B]);
}

#[test]
fn whoever_is_gone_is_passed_over_and_whoever_leaves_lets_the_next_in() {
    let fair = Fair::held_by_a();
    fair.wait(B, 2);
    let c = fair.wait(C, 3);
    fair.set_up(&["ZADD", SEEN, "1.5", B]);
    let mut next = fair.listen_as(C);
    assert_eq!(fair.release(A, GRANT), Reply::Int(1));
    assert_granted(&next.heard(&fair), &c);
    fair.assert_held_by(C, &[]);
    // it leaves, and has not heard that it holds it
    fair.wait(A, 4);
    assert_eq!(fair.release(C, GRANT), Reply::Int(1));
    fair.assert_held_by(A, &[]);
}

/// Its place is kept for as long as it would have been, and its death costs no more.
#[test]
fn a_grant_lives_for_what_is_left_of_the_waiters_patience() {
    let fair = Fair::held_by_a();
    fair.wait(B, 2);
    let until = fair.now() + 7_000;
    fair.set_up(&["ZADD", SEEN, &format!("{until}.25"), B]);
    assert_eq!(fair.release(A, GRANT), Reply::Int(1));
    fair.assert_held_by(B, &[]);
    assert!((until - fair.expires(LOCK)).abs() < 50, "{until}, {}", fair.expires(LOCK));
}

/// Two waits of one owner are never called the same: a late message of the first one says nothing about the second.
#[test]
fn a_place_is_called_by_its_turn() {
    let fair = Fair::held_by_a();
    let first = fair.wait(B, 2);
    assert_eq!(fair.wait(B, 2), first, "a look soon after another writes nothing");
    let second = fair.wait(B, 3);
    assert_ne!(second, first);
    assert_eq!(of(&second).1, 3);
    // a look of the same owner without a turn ends it
    fair.acquire(B, "1");
    assert_eq!(fair.seen(B).1, 0);
    let mut next = fair.listen_as(B);
    fair.release(A, GRANT);
    assert_eq!(next.heard(&fair), ["0"]);
}

/// Where the server allows a release and nothing else, the lock is free.
#[test]
fn where_the_next_one_cannot_be_made_the_holder_it_is_told_that_the_lock_is_free() {
    for denied in ["hset", "pexpire"] {
        let fair = Fair::on(Bench::real());
        fair.wait(B, 2);
        let (mut limited, mut next) = (fair.limited(denied), fair.listen_as(B));
        let command = eval(&source("fair/release"), &KEYS, &[A, "0", CHANNEL, GRANT]);
        let reply = limited.call(&command.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        assert_eq!(reply, Reply::Int(1), "without {denied}");
        assert_eq!(next.heard(&fair), ["0"], "without {denied}");
        fair.assert_free(&[B]);
    }
}
