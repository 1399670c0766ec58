//! The canonical record of RedLock: a string with a TTL, with the lock's name as its key, on one server or on several.

use super::{
    pair::Pair,
    worker::{
        Library::{self, Nestlock, NodeRedlock, Phpredis, Redsync},
        Record,
    },
};

const STRING_LOCK: Library = Nestlock(Record::String);
const RED_LOCK: Library = Nestlock(Record::RedLock);

fn start(libraries: [Library; 2], servers: usize) -> Pair {
    Pair::start(libraries, servers, "")
}

/// Nothing is left on any server.
fn nothing_left(pair: &Pair) {
    assert_eq!(pair.servers().keys(), 0);
}

macro_rules! on {
    ($name:ident: $servers:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn they_take_turns() {
                let mut pair = start(LIBRARIES, $servers);
                pair.in_turn(10);
                nothing_left(&pair);
            }

            #[test]
            fn they_never_hold_at_once() {
                let mut pair = start(LIBRARIES, $servers);
                pair.at_random(HOLDS / 2);
                pair.free("random");
            }

            #[test]
            fn they_see_a_hold_expire() {
                let mut pair = start(LIBRARIES, $servers);
                pair.expiry();
                nothing_left(&pair);
            }

            #[test]
            fn they_see_a_hold_deleted() {
                let mut pair = start(LIBRARIES, $servers);
                pair.deletion($servers);
                nothing_left(&pair);
            }

            #[test]
            fn they_wait_in_their_own_ways() {
                let mut pair = start(LIBRARIES, $servers);
                pair.own_waiting();
                nothing_left(&pair);
            }

            #[test]
            fn they_hand_over_a_hold() {
                let mut pair = start(LIBRARIES, $servers);
                pair.handed_over();
                nothing_left(&pair);
            }
        }
    };
}
macro_rules! pairs {
    ($($pair:ident: $a:expr, $b:expr, $holds:expr;)*) => {$(
        mod $pair {
            use super::*;

            const LIBRARIES: [Library; 2] = [$a, $b];
            const HOLDS: usize = $holds;

            on!(one_server: 1);
            on!(three_servers: 3);

            #[test]
            fn a_minority_does_not_give_the_lock_away() {
                let mut pair = start(LIBRARIES, 3);
                pair.minority();
                nothing_left(&pair);
            }

            #[test]
            fn a_majority_gives_it_away() {
                let mut pair = start(LIBRARIES, 3);
                pair.deletion(2);
                nothing_left(&pair);
            }

            #[test]
            fn one_server_of_three_may_die() {
                start(LIBRARIES, 3).outage(100);
            }
        }
    )*};
}

macro_rules! single {
    ($($pair:ident: $a:expr, $b:expr, $holds:expr;)*) => {$(
        mod $pair {
            use super::*;

            const LIBRARIES: [Library; 2] = [$a, $b];
            const HOLDS: usize = $holds;

            on!(one_server: 1);
        }
    )*};
}

single! {
    a_string_lock_and_redsync: STRING_LOCK, Redsync, 2000;
    a_string_lock_and_node_redlock: STRING_LOCK, NodeRedlock, 2000;
    a_string_lock_and_phpredis: STRING_LOCK, Phpredis, 2000;
    a_string_lock_and_a_red_lock: STRING_LOCK, RED_LOCK, 2000;
}

pairs! {
    a_red_lock_and_redsync: RED_LOCK, Redsync, 2000;
    a_red_lock_and_node_redlock: RED_LOCK, NodeRedlock, 2000;
    a_red_lock_and_phpredis: RED_LOCK, Phpredis, 2000;
    redsync_and_node_redlock: Redsync, NodeRedlock, 400;
    redsync_and_phpredis: Redsync, Phpredis, 400;
    node_redlock_and_phpredis: NodeRedlock, Phpredis, 400;
}

/// The checks notice what they are meant to notice.
#[test]
fn two_locks_are_reported_as_overlapping() {
    start([Redsync, Phpredis], 1).at_random_apart(300);
    start([NodeRedlock, Phpredis], 3).at_random_apart(300);
    start([STRING_LOCK, Phpredis], 1).at_random_apart(300);
    start([RED_LOCK, Redsync], 3).at_random_apart(300);
}
