//! Readers of both sides, one of which dies.

use std::time::Duration;

use super::{
    clock::monotonic_ns,
    servers::eventually,
    sides::{LONG, MS, NESTLOCK, REDISSON, Sides},
    wire::Reply,
    worker::{Library, Worker},
};

/// The setting of both sides for how long an unrenewed lease lasts, in ms.
const WATCHDOG: u64 = 6000;

/// A reader of Redisson sets the record's TTL to its own with each renewal, and is killed. nestlock's reader has a longer
/// lease (0: it is renewed): no writer gets in before that lease ends or is released.
fn outlives_a_dead_reader(lease: u64, release: bool) {
    let settings = format!("watchdog={WATCHDOG}");
    let mut all = Sides::start(2, &settings);
    let mut doomed = Worker::several(Library::Redisson, &all.servers, &settings, 1).remove(0);
    let asked = monotonic_ns();
    all.does(
        NESTLOCK,
        &format!("acquire read/shared {lease} 0"),
        "acquired",
    );
    doomed.does("acquire read/shared 0 0", "acquired");
    let ttl = |all: &Sides| all.call(&["PTTL", "shared"]).int();
    if lease > 0 {
        eventually("Redisson has renewed its hold", || {
            ttl(&all) <= WATCHDOG as i64
        });
    }
    doomed.kill();
    let killed = monotonic_ns();
    for side in [NESTLOCK, REDISSON] {
        all.sides[side][1].ask(&format!("acquire write/shared {WATCHDOG} {LONG}"));
    }
    let until = if release {
        killed + 3 * WATCHDOG * MS
    } else {
        asked + (lease - lease / 100 - 2) * MS
    };
    while monotonic_ns() < until {
        let (mode, since) = (
            all.call(&["HGET", "shared", "mode"]),
            (monotonic_ns() - killed) / MS,
        );
        let read = matches!(&mode, Reply::Text(mode) if mode == "read");
        assert!(
            read || monotonic_ns() >= until,
            "{mode:?} {since} ms after the kill, of a lease of {lease} ms"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    if release {
        all.does(NESTLOCK, "release read/shared", "released");
    }
    let mut waiting = vec![(NESTLOCK, 1), (REDISSON, 1)];
    while !waiting.is_empty() {
        let (side, task, at) = all.next(&mut waiting, LONG / 2);
        assert!(at >= until);
        all.sides[side][task].does("release write/shared", "released");
    }
}

#[test]
fn a_renewed_reader_outlives_a_dead_reader_of_redisson() {
    outlives_a_dead_reader(0, true);
}

#[test]
fn a_reader_with_a_lease_outlives_a_dead_reader_of_redisson() {
    outlives_a_dead_reader(6 * WATCHDOG, true);
}

#[test]
fn a_lease_ends_when_it_should_after_a_reader_of_redisson_died() {
    outlives_a_dead_reader(4 * WATCHDOG, false);
}
