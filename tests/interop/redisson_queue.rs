//! A fair lock with waiters of both: live waiters keep their places, dead ones do not hold up others.

use std::time::Duration;

use super::{
    clock::monotonic_ns,
    servers::eventually,
    sides::{LIBRARIES, LONG, MS, NESTLOCK, REDISSON, Sides},
    worker::Worker,
};

/// The setting of both sides for how long a silent waiter keeps its place, and how long an unrenewed lease lasts, in ms.
const PATIENCE: u64 = 5000;
const WATCHDOG: u64 = 5000;

fn settings() -> String {
    format!("watchdog={WATCHDOG} patience={PATIENCE}")
}

/// Live threads of Redisson and live tasks of nestlock wait for a fair lock. However long its holder takes, all keep
/// their places, and get it in their order.
fn places_are_kept(holder: usize) {
    let mut all = Sides::start(4, &settings());
    all.does(holder, "acquire fair/queue 0 0", "acquired");
    let mut waiting: Vec<(usize, usize)> = [1, 2, 3]
        .into_iter()
        .flat_map(|task| [(1 - holder, task), (holder, task)])
        .collect();
    for &(side, task) in &waiting {
        all.waits(side, task, &format!("acquire fair/queue {LONG} {LONG}"));
    }
    let mut queue = all.queue("queue");
    assert_eq!(queue.len(), waiting.len());
    let kept = |all: &Sides, queue: &[String], long: u64| {
        let start = monotonic_ns();
        while monotonic_ns() - start < long * MS {
            assert_eq!(
                all.queue("queue"),
                queue,
                "after {} ms",
                (monotonic_ns() - start) / MS
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    kept(&all, &queue, 3 * PATIENCE + WATCHDOG);
    all.does(holder, "release fair/queue", "released");
    while !waiting.is_empty() {
        let first = waiting[0];
        let (side, task, _) = all.next(&mut waiting, LONG);
        assert_eq!((side, task), first, "out of turn");
        queue.remove(0);
        // long enough for the others to try
        kept(&all, &queue, PATIENCE / 5);
        all.sides[side][task].does("release fair/queue", "released");
    }
    all.nothing_left(&[]);
}

#[test]
fn live_waiters_keep_their_places_while_nestlock_holds() {
    places_are_kept(NESTLOCK);
}

#[test]
fn live_waiters_keep_their_places_while_redisson_holds() {
    places_are_kept(REDISSON);
}

/// The first waiters are killed: the next one gets the lock after about one patience, whatever their number.
fn dead_waiters_leave(dead: [usize; 2]) {
    let mut all = Sides::start(2, &settings());
    let mut doomed: Vec<Vec<Worker>> = [0, 1]
        .map(|side| Worker::several(LIBRARIES[side], &all.servers, &settings(), 1 + dead[side]))
        .into();
    all.does(NESTLOCK, "acquire fair/queue 0 0", "acquired");
    for task in 1..=dead[0].max(dead[1]) {
        for workers in &mut doomed {
            if task < workers.len() {
                let before = all.queue("queue").len();
                workers[task].ask(&format!("acquire fair/queue {LONG} own"));
                eventually("it waits", || all.queue("queue").len() > before);
            }
        }
    }
    let mut waiting = vec![(REDISSON, 1), (NESTLOCK, 1)];
    for &(side, task) in &waiting {
        all.waits(side, task, &format!("acquire fair/queue {LONG} own"));
    }
    let killed = monotonic_ns();
    doomed.clear();
    all.does(NESTLOCK, "release fair/queue", "released");
    while !waiting.is_empty() {
        let first = waiting[0];
        let (side, task, at) = all.next(&mut waiting, LONG);
        println!(
            "{dead:?} dead: {} has it after {} ms",
            LIBRARIES[side],
            (at - killed) / MS
        );
        assert_eq!((side, task), first, "out of turn");
        assert!(
            at < killed + (2 * PATIENCE + WATCHDOG) * MS,
            "{} ms after the kill",
            (at - killed) / MS
        );
        all.sides[side][task].does("release fair/queue", "released");
    }
    all.nothing_left(&[]);
}

#[test]
fn dead_waiters_of_nestlock_leave_together() {
    dead_waiters_leave([4, 0]);
}

#[test]
fn dead_waiters_of_redisson_leave_together() {
    dead_waiters_leave([0, 4]);
}

#[test]
fn dead_waiters_of_both_leave_together() {
    dead_waiters_leave([3, 3]);
}
