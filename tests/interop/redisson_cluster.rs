//! Redisson's locks in a cluster, where a lock's keys and messages are on the master of its slot.

use super::{
    redisson_record::{never_at_once, sees_what_the_other_holds, wakes_the_other},
    servers::Servers,
    sides::{LONG, MS, NESTLOCK, REDISSON, Sides},
};
use nestlock_embedded::SpawnedCluster;

fn start(tasks: usize) -> Sides {
    Sides::on(Servers::cluster(), tasks, "")
}

#[test]
fn they_never_hold_at_once() {
    let mut all = start(2);
    for kind in ["reentrant", "fair", "read_write", "fenced", "spin", "multi"] {
        never_at_once(&mut all, kind, 100);
    }
}

#[test]
fn each_sees_what_the_other_holds() {
    sees_what_the_other_holds(&mut start(1));
}

/// Both use sharded messages: neither would receive the other's classic ones.
#[test]
fn each_wakes_the_other() {
    wakes_the_other(&mut start(2));
}

/// Moves the slot of this key to another master.
fn moves(all: &Sides, key: &str) {
    let Servers::Cluster(cluster) = &all.servers else {
        panic!("no cluster")
    };
    let slot = SpawnedCluster::slot_of(key);
    let from = cluster.master_of(slot).expect("a master").addr();
    let to = cluster
        .nodes()
        .iter()
        .find(|node| node.addr() != from)
        .expect("another master");
    cluster
        .migrate(slot, to)
        .unwrap_or_else(|error| panic!("{error}"));
}

/// The slot moves while a lock is held and waited for: no other task gets it before its release. The release wakes a waiter
/// of nestlock. Redisson receives no messages any more, not even Redisson's, and tries again when the lease that it saw ends.
#[test]
fn a_slot_moves_while_one_holds_and_the_other_waits() {
    let mut all = start(2);
    for kind in ["reentrant", "fair", "read", "write", "fenced"] {
        moves_while_held(&mut all, kind, REDISSON, LONG, LONG / 6);
    }
    moves_while_held(&mut all, "reentrant", NESTLOCK, 3000, LONG / 6);
}

/// One holds a lock for `lease`; the other must get it within `limit` after its release. In ms.
fn moves_while_held(all: &mut Sides, kind: &str, holder: usize, lease: u64, limit: u64) {
    let (key, waiter) = (format!("{kind}-{holder}"), 1 - holder);
    let held = format!("{kind}/{key}");
    let barred = if kind == "read" {
        format!("write/{key}")
    } else {
        held.clone()
    };
    all.does(holder, &format!("acquire {held} {lease} 0"), "acquired");
    all.waits(waiter, 1, &format!("acquire {barred} {LONG} {LONG}"));
    moves(all, &key);
    all.does(waiter, &format!("acquire {barred} {LONG} 0"), "busy");
    assert!(
        all.sides[waiter][1].has_answered("acquired").is_none(),
        "{held} is still held"
    );
    let freed = all.does(holder, &format!("release {held}"), "released");
    let start = all.sides[waiter][1].tells("acquired");
    assert!(
        start > freed && start < freed + limit * MS,
        "{held}: {} ms",
        (start - freed) / MS
    );
    all.sides[waiter][1].does(&format!("release {barred}"), "released");
}
