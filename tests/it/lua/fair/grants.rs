//! `lua/fair`: a release grants the lock to the next waiter, if it waits with a wait id (`turn`).

use super::{
    A, ACQUIRED, B, Bench, C, CHANNEL, Ears, Fair, J1, KEYS, LOCK, QUEUE, RELEASE, SEEN, TIMEOUTS,
    own_channel,
};
use crate::{
    lua::{eval, source},
    support::wire::Reply,
};

/// The last argument of a release: whether it may grant the lock.
const GRANTS: &str = "1";
const NONE: &str = "0";

impl Fair {
    fn held_by_a() -> Self {
        Self::held_by_a_on(Bench::new())
    }

    fn held_by_a_on(bench: Bench) -> Self {
        let fair = Self(bench);
        fair.held_by(A, "70000");
        fair
    }

    fn asks(&self, owner: &str, waits: &str) -> Reply {
        self.acquire(owner, "70000", "1", waits)
    }

    /// Waits with a wait id, and returns the name that the reply gives to this queue entry.
    fn wait_in_turn(&self, owner: &str, turn: u32) -> String {
        let reply = self.asks(owner, &turn.to_string());
        let [Reply::Int(0), Reply::Int(_), Reply::Int(_), place] = reply.list() else {
            panic!("{reply:?}")
        };
        assert_eq!(self.seen(owner), of(place.text()));
        place.text().to_owned()
    }

    fn seen(&self, owner: &str) -> (u64, u64) {
        of(self.call(&["ZSCORE", SEEN, owner]).text())
    }

    fn listen_as(&self, owner: &str) -> Ears {
        self.listen(&own_channel(owner))
    }

    fn leave(&self, owner: &str, grants: &str) -> Reply {
        self.run(RELEASE, &KEYS, &[owner, "0", CHANNEL, grants])
    }

    fn assert_held_by(&self, owner: &str, waiting: &[&str]) {
        assert_eq!(self.server.record(LOCK), [(owner.to_owned(), 1)]);
        self.assert_queue(waiting);
    }

    fn assert_free(&self, waiting: &[&str]) {
        assert!(!self.server.exists(LOCK));
        self.assert_queue(waiting);
    }
}

/// Splits a score into the time and the wait id.
fn of(score: &str) -> (u64, u64) {
    let parts = score.parse::<f64>().unwrap() * 1024.0;
    assert!(parts.fract().abs() < f64::EPSILON, "{score}");
    (parts as u64 / 1024, parts as u64 % 1024)
}

/// Asserts that the message names this queue entry and the rest of its patience.
fn assert_granted(heard: &[String], place: &str) {
    let [text] = heard else { panic!("{heard:?}") };
    let (told, ttl) = text.split_once(' ').unwrap();
    assert_eq!(told, place);
    assert!(
        (50_000..=60_000).contains(&ttl.parse::<u64>().unwrap()),
        "{text}"
    );
}

/// A release grants the lock to the next waiter with a turn, and notifies it of its place.
#[test]
fn a_release_grants_the_next_turn_and_notifies_it_of_its_place() {
    let fair = Fair::held_by_a();
    let (b, c) = (fair.wait_in_turn(B, 2), fair.wait_in_turn(C, 1023));
    let (mut next, mut ears) = (
        fair.listen_as(B),
        [fair.listen_as(C), fair.listen_as(A), fair.listen(CHANNEL)],
    );
    assert_eq!(fair.leave(A, GRANTS), Reply::Int(1));
    fair.assert_held_by(B, &[C]);
    let ttl = fair.server.pttl(LOCK);
    assert!(
        (50_000..=60_000).contains(&ttl),
        "the rest of its patience: {ttl}"
    );
    assert_granted(&next.heard(&fair), &b);
    for ear in &mut ears {
        assert_eq!(ear.heard(&fair), [] as [&str; 0]);
    }
    // sent twice
    assert_eq!(
        fair.untouched(RELEASE, &KEYS, &[A, "0", CHANNEL, GRANTS]),
        Reply::Nil
    );
    assert_eq!(next.heard(&fair), [] as [&str; 0]);
    // a waiter without the message polls, and learns that it holds the lock
    assert_eq!(fair.asks(B, "2"), ACQUIRED);
    fair.assert_held_by(B, &[C]);
    assert!(
        fair.server.pttl(LOCK) > 60_000,
        "the lease that it asks for"
    );
    let mut last = fair.listen_as(C);
    assert_eq!(fair.leave(B, GRANTS), Reply::Int(1));
    assert_granted(&last.heard(&fair), &c);
    fair.assert_held_by(C, &[]);
}

#[test]
fn no_waiter_is_granted_the_lock_unless_it_asked_for_that() {
    for (turn, grant) in [("1", GRANTS), ("2", NONE)] {
        let fair = Fair::held_by_a();
        fair.asks(B, turn);
        fair.wait_in_turn(C, 3);
        let mut next = fair.listen_as(B);
        assert_eq!(fair.leave(A, grant), Reply::Int(1));
        assert_eq!(next.heard(&fair), ["0"], "waits {turn}, grant {grant}");
        fair.assert_free(&[B, C]);
    }
    // a Redisson waiter gets no grant, as its threads would re-enter
    let fair = Fair::held_by_a();
    fair.set_up(&["RPUSH", QUEUE, J1]);
    fair.set_up(&["ZADD", TIMEOUTS, "9000000000000", J1]);
    fair.wait_in_turn(B, 2);
    let mut next = fair.listen_as(J1);
    assert_eq!(fair.leave(A, GRANTS), Reply::Int(1));
    assert_eq!(next.heard(&fair), ["0"]);
    fair.assert_free(&[J1, B]);
}

#[test]
fn no_waiter_is_granted_what_another_owner_holds() {
    let fair = Fair::held_by_a();
    fair.run(
        super::ACQUIRE,
        &KEYS,
        &[A, "70000", "2", "60000", "1", CHANNEL],
    );
    fair.wait_in_turn(B, 2);
    let mut next = fair.listen_as(B);
    for holds in ["1", "2>1"] {
        fair.run(RELEASE, &KEYS, &[A, holds, CHANNEL, GRANTS]);
        fair.assert_held_by(A, &[B]);
    }
    // a waiter that leaves grants nothing either
    fair.wait_in_turn(C, 3);
    assert_eq!(fair.leave(C, GRANTS), Reply::Nil);
    fair.assert_held_by(A, &[B]);
    // a record without a TTL is not granted, as a TTL would end it
    fair.set_up(&["PERSIST", LOCK]);
    assert_eq!(next.heard(&fair), [] as [&str; 0]);
    assert_eq!(fair.leave(A, GRANTS), Reply::Int(1));
    assert_eq!(next.heard(&fair), ["0"]);
    fair.assert_free(&[B]);
}

/// A waiter that is gone is passed over, and a waiter that leaves lets the next one in.
#[test]
fn a_gone_waiter_is_skipped_and_a_leaving_one_lets_the_next_in() {
    let fair = Fair::held_by_a();
    fair.wait_in_turn(B, 2);
    let c = fair.wait_in_turn(C, 3);
    fair.set_up(&["ZADD", SEEN, "1.5", B]);
    let mut next = fair.listen_as(C);
    assert_eq!(fair.leave(A, GRANTS), Reply::Int(1));
    assert_granted(&next.heard(&fair), &c);
    fair.assert_held_by(C, &[]);
    // the granted owner leaves before it knows of the grant
    fair.wait_in_turn(A, 4);
    assert_eq!(fair.leave(C, GRANTS), Reply::Int(1));
    fair.assert_held_by(A, &[]);
}

/// A grant keeps the queue entry for as long as before, and costs no more if its owner is dead.
#[test]
fn a_grant_lives_for_what_is_left_of_the_waiters_patience() {
    let fair = Fair::held_by_a();
    fair.wait_in_turn(B, 2);
    let until = fair.now() + 7_000;
    fair.set_up(&["ZADD", SEEN, &format!("{until}.25"), B]);
    assert_eq!(fair.leave(A, GRANTS), Reply::Int(1));
    fair.assert_held_by(B, &[]);
    assert!(
        (until - fair.expires(LOCK)).abs() < 50,
        "{until}, {}",
        fair.expires(LOCK)
    );
}

/// The clock goes back, and the next waiter has died since: its record ends no later than without
/// the jump.
#[test]
fn a_grant_after_the_clock_went_back_lives_no_longer() {
    for by in [2_000, 86_400_000] {
        let fair = Fair::held_by_a();
        fair.wait_in_turn(B, 2);
        fair.clock_goes_back(by);
        assert_eq!(fair.leave(A, GRANTS), Reply::Int(1));
        fair.assert_held_by(B, &[]);
        let left = fair.server.pttl(LOCK);
        assert!((50_000..=60_000).contains(&left), "{left}");
    }
}

/// Two waits of one owner have different names: a late message for the first one does not affect
/// the second.
#[test]
fn a_place_is_called_by_its_turn() {
    let fair = Fair::held_by_a();
    let first = fair.wait_in_turn(B, 2);
    assert_eq!(
        fair.wait_in_turn(B, 2),
        first,
        "a poll soon after another writes nothing"
    );
    let second = fair.wait_in_turn(B, 3);
    assert_ne!(second, first);
    assert_eq!(of(&second).1, 3);
    // a poll of the same owner without a wait id ends it
    fair.asks(B, "1");
    assert_eq!(fair.seen(B).1, 0);
    let mut next = fair.listen_as(B);
    fair.leave(A, GRANTS);
    assert_eq!(next.heard(&fair), ["0"]);
}

/// If the server allows a release but no acquire, the lock is free.
#[test]
fn a_waiter_that_cannot_be_made_holder_learns_the_lock_is_free() {
    for denied in ["hset", "pexpire"] {
        let fair = Fair::held_by_a_on(Bench::real());
        fair.wait_in_turn(B, 2);
        let (mut limited, mut next) = (fair.limited(denied), fair.listen_as(B));
        let command = eval(&source(RELEASE), &KEYS, &[A, "0", CHANNEL, GRANTS]);
        let reply = limited
            .call(&command.iter().map(String::as_str).collect::<Vec<_>>())
            .unwrap();
        assert_eq!(reply, Reply::Int(1), "without {denied}");
        assert_eq!(next.heard(&fair), ["0"], "without {denied}");
        fair.assert_free(&[B]);
    }
}
