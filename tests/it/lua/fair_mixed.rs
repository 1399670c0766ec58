//! Simulates hours of a fair lock with Redisson and nestlock waiters in seconds, with the scripts
//! of both and a server whose clock the test moves. A waiter that lives and polls must keep its
//! position, whatever the others do: wait, die, give up or hold.
//!
//! Redisson alone does remove living waiters: each waiter that is served subtracts a wait from all
//! scores, so the head's score stays where that of the first waiter was when the queue was last
//! empty. A waiter that still waits when that time has passed is removed.
//!
//! Why our scores suffice, whatever the patience is (C is the longest wait of a Redisson client):
//! between two polls of our waiter X, each Redisson waiter ahead subtracts C at most once, and none
//! enters ahead of X. If X is far behind, its score continues the chain: when the last Redisson
//! waiter ahead is served, that one's score has not passed, otherwise it would have removed itself;
//! X has C more, of which at most C is subtracted; what others between them subtract, they have
//! added themselves. The other way round, with X ahead of a Redisson waiter J: J adds its wait to
//! the score of X, which has room for each waiter ahead, with equal patience as much as Redisson
//! alone would give it; and nestlock subtracts nothing.

use std::{collections::BTreeMap, time::Duration};

use nestlock_embedded::EmbeddedServer;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::{ACQUIRED, source};
use crate::support::{
    redisson::RFairLock,
    wire::{Reply, Wire},
};

const LOCK: &str = "l";
const SEEN: &str = "nestlock_fair_seen:{l}";
const LEASE: i64 = 120_000;
/// How long a nestlock waiter relies on messages, in milliseconds.
const POLL_CAP: i64 = 4_000;
/// The largest random delay of a message or a poll, in milliseconds.
const LATE: i64 = 200;
/// The longest time that a lock is idle if no waiter died, in milliseconds, plus what a loaded
/// machine may add.
const SOON: i64 = 8_000;

/// The parameters of one run; times are in milliseconds.
#[derive(Debug, Clone, Copy)]
struct World {
    patience: i64,
    /// What Redisson's waiters add to the scores: the wait of `tryLock(wait)`, or that of its
    /// configuration.
    waits: &'static [i64],
    /// Whether those waits end: `tryLock` instead of `lock`.
    give_up: bool,
    /// The longest hold.
    hold: i64,
    /// The percentage of Redisson waiters, and of waiters that die.
    redisson: u32,
    die: u32,
    /// The number of waiters that join before the queue must be empty again. `None`: the queue
    /// never empties.
    burst: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Waits,
    Holds,
    Gone,
}

#[derive(Debug)]
struct One {
    life: Life,
    /// For a Redisson waiter: its wait, and when it gives up.
    java: Option<(i64, i64)>,
    /// The time of its next action.
    due: i64,
    /// When it dies while it waits.
    dies: i64,
    /// Whether Redisson removed it by its own rule.
    out: bool,
    /// The `waits` argument: 1, or its wait id if a release may grant it the lock.
    waits: String,
    /// Whether it was granted the lock, of which it may not have been notified.
    granted: bool,
}

struct Play {
    server: EmbeddedServer,
    wire: Wire,
    ears: Wire,
    java: RFairLock,
    world: World,
    rng: StdRng,
    all: BTreeMap<String, One>,
    /// The living waiters in the order of their requests, the only order in which the lock may be
    /// granted.
    order: Vec<String>,
    /// The scores before the last script, and whether the lock was free then.
    before: (BTreeMap<String, f64>, bool),
    put_out: usize,
    granted: usize,
    /// Since when the lock has been free although a living waiter waits.
    idle: Option<i64>,
    worst_idle: i64,
    served: usize,
    born: u32,
    acquire: String,
    release: String,
}

impl Play {
    fn new(world: World, seed: u64) -> Self {
        let server = EmbeddedServer::start().unwrap();
        let (mut wire, mut ears) = (
            Wire::connect(server.addr()).unwrap(),
            Wire::connect(server.addr()).unwrap(),
        );
        assert!(!ears.call(&["PSUBSCRIBE", "*"]).unwrap().is_error());
        let mut load = |script| {
            wire.call(&["SCRIPT", "LOAD", &source(script)])
                .unwrap()
                .text()
                .to_owned()
        };
        let (acquire, release) = (load("fair/acquire"), load("fair/release"));
        Self {
            java: RFairLock::new(LOCK),
            rng: StdRng::seed_from_u64(seed),
            all: BTreeMap::new(),
            order: vec![],
            before: (BTreeMap::new(), true),
            put_out: 0,
            granted: 0,
            idle: None,
            worst_idle: 0,
            served: 0,
            born: 0,
            server,
            wire,
            ears,
            world,
            acquire,
            release,
        }
    }

    fn now(&mut self) -> i64 {
        let time = self.wire.call(&["TIME"]).unwrap();
        let number = |n: usize| time.list()[n].text().parse::<i64>().unwrap();
        number(0) * 1000 + number(1) / 1000
    }

    fn queue(&mut self) -> Vec<String> {
        let queue = self
            .wire
            .call(&["LRANGE", &self.java.queue, "0", "-1"])
            .unwrap();
        queue
            .list()
            .iter()
            .map(|owner| owner.text().to_owned())
            .collect()
    }

    /// Acquires or polls for a nestlock waiter; returns how long it sleeps at most, or `None` if it
    /// has the lock.
    fn look(&mut self, name: &str, waits: &str) -> Option<i64> {
        let patience = self.world.patience.to_string();
        let lease = LEASE.to_string();
        let RFairLock {
            name: lock,
            queue,
            timeouts,
            channel,
        } = &self.java;
        let keys = ["EVALSHA", &self.acquire, "4", lock, queue, timeouts, SEEN];
        let reply = self
            .wire
            .call(&[&keys[..], &[name, &lease, "1", &patience, waits, channel]].concat())
            .unwrap();
        if reply == ACQUIRED {
            return None;
        }
        let [Reply::Int(0), Reply::Int(hint), Reply::Int(_), ..] = reply.list() else {
            panic!("{reply:?}")
        };
        Some(POLL_CAP.min(hint + 1))
    }

    fn give_back(&mut self, name: &str) -> Reply {
        let RFairLock {
            name: lock,
            queue,
            timeouts,
            channel,
        } = &self.java;
        let keys = ["EVALSHA", &self.release, "4", lock, queue, timeouts, SEEN];
        self.wire
            .call(&[&keys[..], &[name, "0", channel, "1"]].concat())
            .unwrap()
    }

    /// Adds an owner, which joins the queue or acquires the lock.
    fn come(&mut self, now: i64) {
        self.born += 1;
        let redisson = self.rng.random_range(0..100) < self.world.redisson;
        let client = self.rng.random_range(0..3);
        let side = if redisson { "5b8f1c9e" } else { "0a1b2c3d" };
        let name = format!("{side}-000{client}-4222-8333-444455556666:{}", self.born);
        let wait = self.world.waits[self.rng.random_range(0..self.world.waits.len())];
        let java = redisson.then_some((
            wait,
            if self.world.give_up {
                now + wait
            } else {
                i64::MAX
            },
        ));
        let dies = if self.rng.random_range(0..100) < self.world.die {
            now + self.rng.random_range(0..3 * self.world.hold)
        } else {
            i64::MAX
        };
        // half of the nestlock waiters accept a grant
        let waits = if self.born.is_multiple_of(2) {
            1
        } else {
            2 + self.born % 1022
        }
        .to_string();
        let one = One {
            life: Life::Waits,
            java,
            due: now,
            dies,
            out: false,
            waits,
            granted: false,
        };
        self.all.insert(name.clone(), one);
        self.order.push(name.clone());
        self.act(&name, now);
    }

    fn act(&mut self, name: &str, now: i64) {
        let (life, java, out) = (self.all[name].life, self.all[name].java, self.all[name].out);
        self.remember();
        match (life, java) {
            (Life::Gone, _) => {}
            (Life::Waits, Some((wait, until))) if until <= now => {
                self.java.give_up(&mut self.wire, name, wait);
                self.over(name);
            }
            (Life::Waits, java) => {
                let sleep = match java {
                    Some((wait, _)) => self.java.wait(&mut self.wire, name, now, wait, LEASE),
                    None => self.look(name, &self.all[name].waits.clone()),
                };
                let late = self.rng.random_range(0..LATE);
                let hold = self.rng.random_range(0..=self.world.hold);
                let one = self.all.get_mut(name).unwrap();
                if let Some(sleep) = sleep {
                    let until = java.map_or(i64::MAX, |(_, until)| until);
                    // a free lock whose turn is another waiter's is polled again and again
                    one.due = (now + sleep.max(10) + late).min(until);
                    one.out = false;
                    if out {
                        self.order.push(name.to_owned());
                    }
                } else {
                    (one.life, one.due) = (Life::Holds, now + hold);
                    if one.granted {
                        // its turn was at the grant
                    } else if out {
                        assert!(self.order.is_empty(), "out of turn: {:#?}", self.order);
                    } else {
                        assert_eq!(
                            self.order.first().map(String::as_str),
                            Some(name),
                            "out of turn: {:#?}",
                            self.order
                        );
                        self.order.remove(0);
                    }
                    self.served += 1;
                }
            }
            (Life::Holds, java) => {
                match java {
                    Some(_) => self.java.unlock(&mut self.wire, name, now, LEASE),
                    None => assert_eq!(self.give_back(name), Reply::Int(1)),
                }
                self.over(name);
            }
        }
        self.hear(now);
        self.check(now, java.is_some());
    }

    fn remember(&mut self) {
        let scores = self
            .wire
            .call(&["ZRANGE", &self.java.timeouts, "0", "-1", "WITHSCORES"])
            .unwrap();
        let pairs = scores
            .list()
            .chunks(2)
            .map(|pair| (pair[0].text().to_owned(), pair[1].text().parse().unwrap()));
        self.before = (
            pairs.collect(),
            self.wire.call(&["EXISTS", LOCK]).unwrap() == Reply::Int(0),
        );
    }

    fn over(&mut self, name: &str) {
        self.all.get_mut(name).unwrap().life = Life::Gone;
        self.order.retain(|other| other != name);
    }

    /// Delivers the messages; a notified waiter acts a little later.
    fn hear(&mut self, now: i64) {
        self.wire.call(&["PUBLISH", "end", "end"]).unwrap();
        loop {
            let message = self.ears.read().unwrap();
            let [_, _, channel, text] = message.list() else {
                panic!("{message:?}")
            };
            if channel.text() == "end" {
                return;
            }
            let name = channel
                .text()
                .strip_prefix(&format!("{}:", self.java.channel))
                .unwrap()
                .to_owned();
            let late = self.rng.random_range(0..LATE);
            if text.text() != "0" && self.all[&name].life == Life::Waits {
                assert_eq!(
                    self.order.first(),
                    Some(&name),
                    "out of turn: {:#?}",
                    self.order
                );
                self.order.remove(0);
                let (heard, hold) = (
                    self.rng.random_range(0..10) > 0,
                    self.rng.random_range(0..=self.world.hold),
                );
                let one = self.all.get_mut(&name).unwrap();
                // otherwise its next poll detects the grant
                if heard {
                    (one.life, one.due) = (Life::Holds, now + late + hold);
                    self.served += 1;
                }
                one.granted = true;
                self.granted += 1;
            } else if let Some(one) = self
                .all
                .get_mut(&name)
                .filter(|one| one.life == Life::Waits)
            {
                one.due = one.due.min(now + late);
            }
        }
    }

    /// Checks that no living waiter has lost its position, except where Redisson itself would
    /// remove it, and records how long the lock is idle although a waiter waits.
    fn check(&mut self, now: i64, by_redisson: bool) {
        let mut queue = self.queue();
        let (scores, was_free) = &self.before;
        for name in self.order.extract_if(.., |name| !queue.contains(name)) {
            let score = scores[&name];
            let said = format!("{name}, {score} at {now}: {scores:#?}");
            let one = self.all.get_mut(&name).unwrap();
            assert!(one.java.is_some(), "a nestlock waiter was removed: {said}");
            assert!(
                score <= now as f64 && (by_redisson || *was_free),
                "removed by a nestlock client: {said}"
            );
            one.out = true;
            self.put_out += 1;
        }
        queue.retain(|name| self.order.contains(name));
        assert_eq!(
            queue, self.order,
            "in the queue, and in the order of requests"
        );
        let held = self
            .all
            .values()
            .any(|one| one.life == Life::Holds || one.granted && one.life == Life::Waits);
        if held || self.order.is_empty() {
            self.idle = None;
        } else {
            self.worst_idle = self.worst_idle.max(now - *self.idle.get_or_insert(now));
        }
    }

    /// Runs until `newcomers` owners have come and gone, which takes hours of the server's clock.
    fn run(&mut self, newcomers: u32, at_once: usize) {
        let mut renewed = 0;
        loop {
            let now = self.now();
            let quiet = self.all.values().all(|one| one.life == Life::Gone);
            let open = match self.world.burst {
                Some(burst) => quiet || !(self.born as usize).is_multiple_of(burst),
                None => quiet || self.order.len() < at_once && self.rng.random_range(0..3) > 0,
            };
            if self.born < newcomers && open {
                self.come(now);
                continue;
            }
            // first the dead, then the owner whose action is due next
            let dead = self
                .all
                .iter()
                .filter(|(_, one)| one.life == Life::Waits && one.dies <= now);
            let dead: Vec<String> = dead.map(|(name, _)| name.clone()).collect();
            for name in dead {
                self.over(&name);
            }
            let next = self
                .all
                .iter()
                .filter(|(_, one)| one.life != Life::Gone)
                .min_by_key(|(_, one)| one.due);
            let Some((name, due)) = next.map(|(name, one)| (name.clone(), one.due)) else {
                if self.born < newcomers {
                    continue;
                }
                break;
            };
            // a granted lock has at least a third of the patience left, so renewals are twice as
            // frequent
            let soon = self.world.patience / 6;
            if now >= renewed + soon && self.all.values().any(|one| one.life == Life::Holds) {
                // the watchdog of the holder
                self.wire
                    .call(&[
                        "EVAL",
                        "return redis.call('pexpire', KEYS[1], ARGV[1])",
                        "1",
                        LOCK,
                        "120000",
                    ])
                    .unwrap();
                renewed = now;
            }
            if due > now {
                let step = (due - now).min(soon);
                self.server.advance(Duration::from_millis(step as u64));
                if due > now + step {
                    continue;
                }
            }
            let now = self.now();
            self.act(&name, now);
            // occasionally, an owner outside the queue tries
            self.remember();
            let mut by_redisson = false;
            match self.rng.random_range(0..40) {
                0 => {
                    by_redisson = true;
                    let tried = self.java.try_lock(
                        &mut self.wire,
                        "5b8f1c9e-0009-4222-8333-444455556666:1",
                        now,
                        1,
                        LEASE,
                    );
                    assert!(!tried || self.order.is_empty(), "overtook {:?}", self.order);
                    if tried {
                        self.java.unlock(
                            &mut self.wire,
                            "5b8f1c9e-0009-4222-8333-444455556666:1",
                            now,
                            LEASE,
                        );
                    }
                }
                1 => {
                    let name = "0a1b2c3d-0009-4222-8333-444455556666:1";
                    if self.look(name, "0").is_none() {
                        assert!(self.order.is_empty(), "overtook {:?}", self.order);
                        self.give_back(name);
                    }
                }
                _ => continue,
            }
            self.hear(now);
            self.check(now, by_redisson);
        }
    }
}

fn play(what: &str, world: World, rounds: u64, allowed: i64) -> usize {
    let (mut put_out, mut granted) = (0, 0);
    for seed in 0..rounds {
        let mut play = Play::new(world, seed);
        play.run(60, 12);
        let Play {
            served,
            born,
            worst_idle,
            ..
        } = play;
        (put_out, granted) = (put_out + play.put_out, granted + play.granted);
        println!(
            "{what}, {seed}: {served} of {born} served, {} were granted it, {} removed by Redisson, idle {worst_idle} ms",
            play.granted, play.put_out
        );
        assert!(
            worst_idle <= allowed,
            "idle for {worst_idle} ms, not {allowed}"
        );
    }
    assert!(granted > 0, "no waiter was granted the lock");
    put_out
}

/// The case that Redisson's own promise covers: the queue is empty once within a lease and a wait.
const EQUAL: World = World {
    patience: 20_000,
    waits: &[20_000],
    give_up: false,
    hold: 12_000,
    redisson: 50,
    die: 0,
    burst: Some(10),
};

#[test]
fn with_equal_patience_no_live_waiter_loses_its_place() {
    for redisson in [10, 50, 90] {
        assert_eq!(play("equal", World { redisson, ..EQUAL }, 2, SOON), 0);
    }
}

/// No waiter of nestlock loses its place in a queue that is never empty.
#[test]
fn a_nestlock_waiter_keeps_its_place_in_a_never_empty_queue() {
    for redisson in [10, 50, 90] {
        play(
            "never empty",
            World {
                redisson,
                burst: None,
                ..EQUAL
            },
            2,
            i64::MAX,
        );
    }
}

/// Each `tryLock` of 4 min subtracts 4 min from the scores of waiters with a 20 s patience.
#[test]
fn long_waits_of_redisson_put_no_waiter_of_ours_out() {
    for (burst, hold) in [(Some(10), 12_000), (None, 12_000), (None, 32_000)] {
        let world = World {
            waits: &[240_000],
            give_up: true,
            hold,
            burst,
            ..EQUAL
        };
        play(
            "four minutes",
            world,
            1,
            if hold < 20_000 { SOON } else { i64::MAX },
        );
        play(
            "all sorts",
            World {
                waits: &[20_000, 240_000, 300_000],
                ..world
            },
            2,
            i64::MAX,
        );
    }
}

/// Waits of 5 minutes there, a patience of 15 s here, and holds of up to 40 s.
#[test]
fn the_defaults_of_both_do_together() {
    for burst in [Some(10), None] {
        let world = World {
            patience: 15_000,
            die: 0,
            waits: &[300_000],
            hold: 40_000,
            burst,
            ..EQUAL
        };
        let put_out = play("defaults", world, 1, SOON);
        assert!(burst.is_none() || put_out == 0);
    }
}

/// R62: any number of dead nestlock waiters, of any clients, leave the lock idle no longer than the
/// remaining patience of the last one.
#[test]
fn r62_the_dead_of_all_clients_are_gone_together() {
    let world = World {
        redisson: 0,
        die: 60,
        burst: None,
        ..EQUAL
    };
    play("dead of ours", world, 6, 2 * world.patience + SOON);
}
