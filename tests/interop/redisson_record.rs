//! Redisson's locks: a hash, and the other keys of each kind.

use super::{
    clock::monotonic_ns,
    history::judge,
    servers::eventually,
    sides::{LONG, MS, NESTLOCK, REDISSON, Sides},
};

/// How long a wake-up may take, in ms: far less than the lease. No task of nestlock polls within it, except writers that
/// wait for readers, which poll each second.
const WAKE: u64 = 10_000;

/// The lease in ms of tasks that take a lock often: the cost of a message that Redisson misses (see
/// [`Sides::asleep`]).
const SHORT: u64 = 10_000;

/// Two tasks of each side take one lock, at random: only readers overlap, no increment is lost, and tokens grow.
pub fn never_at_once(all: &mut Sides, kind: &str, each: usize) {
    // on a busy machine, one side may finish before the other begins
    for _ in 0..5 {
        let start = std::time::Instant::now();
        all.call(&["DEL", "counter"]);
        for (side, workers) in all.sides.iter_mut().enumerate() {
            for (task, worker) in workers.iter_mut().enumerate() {
                worker.ask(&format!(
                    "run {kind}/random counter {each} {SHORT} {}",
                    11 + 2 * side + task
                ));
            }
        }
        let mut holds = Vec::new();
        for (side, workers) in all.sides.iter_mut().enumerate() {
            for worker in workers {
                holds.extend(worker.holds(side));
            }
        }
        let verdict = judge(holds);
        let counter = all
            .call(&["GET", "counter"])
            .text()
            .parse::<usize>()
            .expect("a count");
        println!(
            "{kind}: {verdict:?}, counter {counter}, {:.1} s",
            start.elapsed().as_secs_f64()
        );
        assert!(
            verdict.longest < SHORT * MS,
            "the machine stood still: this says nothing about the locks"
        );
        assert_eq!(
            (verdict.holds, verdict.overlaps, verdict.stale),
            (4 * each, 0, 0)
        );
        assert_eq!(counter, verdict.alone);
        // the number of permits stays
        let stays = match kind {
            "permits" | "semaphore" => "random",
            _ => "counter",
        };
        all.nothing_left(&["counter", "redisson_lock_token:", stays]);
        if verdict.handovers >= each / 10 && (kind != "read_write" || verdict.together >= each / 20)
        {
            return;
        }
    }
    panic!("they were never at it at the same time");
}

macro_rules! kinds {
    ($($kind:ident: $each:expr;)*) => {
        mod they_never_hold_at_once {
            $(
                #[test]
                fn $kind() {
                    super::never_at_once(&mut super::Sides::start(2, ""), stringify!($kind), $each);
                }
            )*
        }
    };
}

kinds! {
    reentrant: 200;
    fair: 200;
    read_write: 200;
    fenced: 200;
    spin: 200;
    multi: 100;
    permits: 200;
    semaphore: 200;
    // one record, as a fair and as a reentrant lock; few holds, since a release of one kind does not wake waiters of the other
    rivals: 20;
}

/// Three permits for both: none is given twice, each side wakes the other, and each takes what has
/// expired at the other.
#[test]
fn permits_are_shared_and_come_back() {
    const NAME: &str = "permits3/p";
    let mut all = Sides::start(2, "");
    three_are_shared(&mut all, NAME);
    let take = format!("acquire {NAME} {LONG} 0");
    let number = |all: &Sides| all.call(&["GET", "p"]).text().to_owned();
    assert_eq!(number(&all), "3");
    for (dies, lives) in [(NESTLOCK, REDISSON), (REDISSON, NESTLOCK)] {
        for task in [0, 1, 1] {
            all.sides[dies][task].does(&format!("acquire {NAME} 500 0"), "acquired");
        }
        for task in [0, 1, 1] {
            let wait = format!("acquire {NAME} {LONG} {WAKE}");
            all.sides[lives][task].does(&wait, "acquired");
        }
        all.sides[dies][0].does(&take, "busy");
        for task in [0, 1, 1] {
            all.sides[lives][task].does(&format!("release {NAME}"), "released");
            all.sides[dies][task].does(&format!("release {NAME}"), "lost");
        }
        assert_eq!(number(&all), "3");
    }
    all.nothing_left(&["p"]);
}

/// The same for a semaphore, whose permits of Redisson's have no leases: those of a nestlock holder that is gone come back with
/// nestlock's next acquire.
#[test]
fn a_semaphore_is_shared() {
    const NAME: &str = "semaphore3/s";
    let mut all = Sides::start(2, "");
    three_are_shared(&mut all, NAME);
    let number = |all: &Sides| all.call(&["GET", "s"]).text().to_owned();
    assert_eq!(number(&all), "3");
    for _ in 0..3 {
        all.sides[NESTLOCK][1].does(&format!("acquire {NAME} 500 0"), "acquired");
    }
    let wait = format!("acquire {NAME} {LONG} {WAKE}");
    all.sides[NESTLOCK][0].does(&wait, "acquired");
    all.does(REDISSON, &format!("acquire {NAME} {LONG} 0"), "acquired");
    all.does(REDISSON, &format!("release {NAME}"), "released");
    all.sides[NESTLOCK][0].does(&format!("release {NAME}"), "released");
    assert_eq!(number(&all), "3");
    all.nothing_left(&["s"]);
}

/// Both count down one latch, and its zero wakes the waiters of both, whichever is last.
#[test]
fn a_latch_opens_for_both() {
    let mut all = Sides::start(2, "");
    for (round, (sets, last)) in [(REDISSON, NESTLOCK), (NESTLOCK, REDISSON)]
        .into_iter()
        .enumerate()
    {
        // in the second round, one that was open before
        for name in ["l".to_owned(), format!("l{round}")] {
            all.does(sets, &format!("count {name} 3"), "counts");
            all.does(last, &format!("count {name} 9"), "counted");
            all.sides[REDISSON][0].does(&format!("await {name} 20"), "shut");
            all.sides[NESTLOCK][0].does(&format!("await {name} 20"), "shut");
            for side in [REDISSON, NESTLOCK] {
                all.sides[side][1].ask(&format!("await {name} {LONG}"));
            }
            let channel = format!("redisson_countdownlatch__channel__{{{name}}}");
            eventually("both listen", || {
                all.call(&["PUBSUB", "NUMSUB", &channel]).list()[1].int() == 2
            });
            for side in [sets, last, last] {
                all.sides[side][0].does(&format!("down {name}"), "down");
            }
            let opened = monotonic_ns();
            for side in [REDISSON, NESTLOCK] {
                let woken = all.sides[side][1].tells("open");
                assert!(woken < opened + WAKE * MS, "{} ms", (woken - opened) / MS);
                all.sides[side][0].does(&format!("await {name} 0"), "open");
            }
        }
    }
    all.nothing_left(&["nestlock_latch_request:"]);
}

/// Three permits for both: each side wakes the other.
fn three_are_shared(all: &mut Sides, name: &str) {
    let take = format!("acquire {name} {LONG} 0");
    for (side, task) in [(REDISSON, 0), (NESTLOCK, 0), (REDISSON, 1)] {
        all.sides[side][task].does(&take, "acquired");
    }
    let waits = format!("acquire {name} {LONG} {LONG}");
    for (side, other) in [(NESTLOCK, REDISSON), (REDISSON, NESTLOCK)] {
        all.sides[NESTLOCK][1].does(&take, "busy");
        all.sides[REDISSON][0].does(&take, "busy");
        all.waits(side, 1, &waits);
        if side == REDISSON {
            all.asleep(1);
        }
        let freed = all.does(other, &format!("release {name}"), "released");
        let start = all.sides[side][1].tells("acquired");
        assert!(
            start > freed && start < freed + WAKE * MS,
            "{} ms",
            (start - freed) / MS
        );
        // the next round has the same three holders
        all.sides[side][1].does(&format!("release {name}"), "released");
        all.does(other, &take, "acquired");
    }
    for (side, task) in [(REDISSON, 0), (NESTLOCK, 0), (REDISSON, 1)] {
        all.sides[side][task].does(&format!("release {name}"), "released");
    }
}

/// Between hand-over and adoption no client of Redisson gets in. The adopter's release notifies the one that waits.
#[test]
fn no_other_client_gets_a_hand_over_in_between() {
    const ADOPTER: usize = 1;
    let mut all = Sides::start(2, "");
    for kind in ["reentrant", "fair", "fenced", "spin", "read", "write"] {
        let name = format!("{kind}/moves-{kind}");
        let barred = if kind == "read" {
            format!("write/moves-{kind}")
        } else {
            name.clone()
        };
        all.does(NESTLOCK, &format!("acquire {name} {LONG} 0"), "acquired");
        let waits = format!("acquire {barred} {LONG} {LONG}");
        if kind == "spin" {
            all.sides[REDISSON][0].ask(&waits);
        } else {
            all.waits(REDISSON, 0, &waits);
        }
        all.does(NESTLOCK, &format!("give {name} {LONG}"), "gave");
        all.sides[REDISSON][1].does(&format!("acquire {barred} {LONG} 0"), "busy");
        all.sides[NESTLOCK][ADOPTER].does(&format!("take {name}"), "took");
        all.sides[REDISSON][1].does(&format!("acquire {barred} {LONG} 0"), "busy");
        let free = all.sides[NESTLOCK][ADOPTER].does(&format!("release {name}"), "released");
        assert!(all.sides[REDISSON][0].tells("acquired") > free, "{name}");
        all.does(REDISSON, &format!("release {barred}"), "released");
    }
    all.nothing_left(&["redisson_lock_token:"]);
}

/// The check notices what it is meant to notice.
#[test]
fn two_locks_are_reported_as_overlapping() {
    let mut all = Sides::start(1, "");
    for (side, name) in ["fenced/mine", "fenced/yours"].into_iter().enumerate() {
        all.sides[side][0].ask(&format!("run {name} counter 200 {LONG} {side}"));
    }
    let holds = [0, 1].map(|side| all.sides[side][0].holds(side)).concat();
    let verdict = judge(holds);
    assert!(verdict.overlaps > 20 && verdict.stale > 20, "{verdict:?}");
    assert!(
        all.call(&["GET", "counter"])
            .text()
            .parse::<usize>()
            .expect("a count")
            < 400
    );
}

#[test]
fn each_sees_what_the_other_holds() {
    sees_what_the_other_holds(&mut Sides::start(1, ""));
}

#[test]
fn each_wakes_the_other() {
    wakes_the_other(&mut Sides::start(2, ""));
}

/// B sees what A holds, hold by hold. B can neither take nor release it, but can force-release it.
pub fn sees_what_the_other_holds(all: &mut Sides) {
    for (a, b) in [(NESTLOCK, REDISSON), (REDISSON, NESTLOCK)] {
        for kind in ["reentrant", "fair", "fenced", "spin", "read", "write"] {
            let key = format!("{kind}-{a}");
            let name = &format!("{kind}/{key}");
            // a reader would get in
            let barred = &if kind == "read" {
                format!("write/{key}")
            } else {
                name.clone()
            };
            let sees = |all: &mut Sides, side: usize, holds| {
                let seen = all.sides[side][0].numbers(&format!("look {name}"), "sees");
                assert_eq!(seen[..2], [1, holds], "{name}: {seen:?}");
                assert!(
                    (LONG as i64 - 20_000..=LONG as i64).contains(&seen[2]),
                    "{name}: {seen:?}"
                );
            };
            for holds in [1, 2, 3] {
                all.does(a, &format!("acquire {name} {LONG} 0"), "acquired");
                let record = all.record(&key);
                assert_eq!(record.len(), 1, "{name}: {record:?}");
                assert_eq!(record[0].1, holds.to_string(), "{name}");
                // Redisson adds up the leases of a writer, including nestlock's
                if kind != "write" {
                    sees(all, a, holds);
                    sees(all, b, 0);
                }
                all.does(b, &format!("acquire {barred} {LONG} 0"), "busy");
                all.does(b, &format!("release {name}"), "lost");
                assert_eq!(
                    all.record(&key),
                    record,
                    "{name}: who did not get it has changed the record"
                );
            }
            for holds in [2, 1] {
                all.does(a, &format!("release {name}"), "released");
                assert_eq!(all.record(&key)[0].1, holds.to_string(), "{name}");
                all.does(b, &format!("acquire {barred} {LONG} 0"), "busy");
            }
            all.does(a, &format!("release {name}"), "released");
            for side in [a, b] {
                assert_eq!(
                    all.sides[side][0].numbers(&format!("look {name}"), "sees"),
                    [0, 0, -2],
                    "{name}"
                );
            }
            // B resets what A holds
            all.does(a, &format!("acquire {name} {LONG} 0"), "acquired");
            all.does(b, &format!("reset {name}"), "reset");
            all.does(b, &format!("acquire {barred} {LONG} 0"), "acquired");
            all.does(a, &format!("release {name}"), "lost");
            all.does(b, &format!("release {barred}"), "released");
        }
    }
    // Redisson's reset leaves the keys of read holds until these would have ended
    all.nothing_left(&["redisson_lock_token:", &format!("{{read-{NESTLOCK}}}:")]);
}

/// A's last release, and its reset, wake B long before the lease ends.
pub fn wakes_the_other(all: &mut Sides) {
    let mut delays = [Vec::new(), Vec::new()];
    for (a, b) in [(NESTLOCK, REDISSON), (REDISSON, NESTLOCK)] {
        for (holds, waits) in [
            ("reentrant", "reentrant"),
            ("fair", "fair"),
            ("fenced", "fenced"),
            ("read", "write"),
            ("write", "read"),
            ("write", "write"),
        ] {
            for (round, (request, answer)) in [("release", "released"), ("reset", "reset")]
                .into_iter()
                .enumerate()
            {
                let key = format!("{holds}-{waits}-{a}-{round}");
                let (held, wanted) = (format!("{holds}/{key}"), format!("{waits}/{key}"));
                all.does(a, &format!("acquire {held} {LONG} 0"), "acquired");
                all.does(a, &format!("acquire {held} {LONG} 0"), "acquired");
                all.waits(b, 1, &format!("acquire {wanted} {LONG} {LONG}"));
                // a waiter for a fenced lock waits in another way, and gets a message for one waiter, which is kept for it
                if b == REDISSON && waits != "fenced" {
                    all.asleep(1);
                }
                if request == "release" {
                    all.does(a, &format!("release {held}"), "released");
                    assert!(
                        all.sides[b][1].has_answered("acquired").is_none(),
                        "{held} is held still"
                    );
                }
                let freed = all.does(a, &format!("{request} {held}"), answer);
                let start = all.sides[b][1].tells("acquired");
                assert!(
                    start > freed && start < freed + WAKE * MS,
                    "{held}: {} ms",
                    (start - freed) / MS
                );
                delays[b].push((start - freed) / 1000);
                all.sides[b][1].does(&format!("release {wanted}"), "released");
            }
        }
    }
    println!(
        "nestlock was woken after {:?} us, Redisson after {:?} us",
        delays[NESTLOCK], delays[REDISSON]
    );
}

/// Readers and writers of both sides wait, and release immediately when they get in. All of them are done long before
/// any lease ends.
#[test]
fn waiting_readers_and_writers_wake_each_other() {
    let kind_of = |task| if task == 3 { "read" } else { "write" };
    let mut all = Sides::start(4, "");
    let (mut rounds, mut nudges) = (0, 0);
    for round in 0..4 {
        for (holder, holds) in [
            (NESTLOCK, "write"),
            (NESTLOCK, "read"),
            (REDISSON, "write"),
            (REDISSON, "read"),
        ] {
            let key = &format!("{holds}-{holder}-{round}");
            all.does(
                holder,
                &format!("acquire {holds}/{key} {LONG} 0"),
                "acquired",
            );
            let (before, mut waiting) = (all.requests(), Vec::new());
            // a reader lets others read
            let tasks = if holds == "write" { 1..=3 } else { 1..=2 };
            for task in tasks.clone() {
                for side in [NESTLOCK, REDISSON] {
                    all.sides[side][task]
                        .ask(&format!("acquire {}/{key} {LONG} {LONG}", kind_of(task)));
                    waiting.push((side, task));
                }
            }
            let all_tried = before + waiting.len() as u64;
            eventually("they wait", || {
                all.listeners(key) == 2 && all.requests() >= all_tried
            });
            all.asleep(tasks.count());
            all.does(holder, &format!("release {holds}/{key}"), "released");
            rounds += 1;
            while !waiting.is_empty() {
                // a Redisson thread that was notified in vain may miss the next message: see `asleep`
                let deaf = waiting.iter().all(|&(side, _)| side == REDISSON);
                let got = all.next_within(&mut waiting, if deaf { WAKE / 5 } else { WAKE });
                let Some((side, task, _)) = got else {
                    assert!(deaf, "{key} is free, and {waiting:?} do not get it");
                    all.call(&["PUBLISH", &format!("redisson_rwlock:{{{key}}}"), "0"]);
                    nudges += 1;
                    continue;
                };
                all.sides[side][task].does(&format!("release {}/{key}", kind_of(task)), "released");
            }
        }
    }
    println!("{rounds} rounds, in {nudges} of them Redisson needed another message");
    assert!(nudges <= rounds / 2, "{nudges}");
    all.nothing_left(&["nestlock_latch_request:"]);
}
