//! The history of the locks of many processes, on the clock that they share, and the invariants
//! that it must satisfy.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    thread::JoinHandle,
    time::Duration,
};

use super::{Server, child::Worker};

/// Number of worker processes; [`TASKS`] is the number of tasks in each.
pub const PROCESSES: usize = 4;
pub const TASKS: usize = 8;
/// The key to which holders of fenced locks write their tokens.
pub const GUARDED: &str = "guarded";

/// The part of one hold that is certain: `start..end` in nanoseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    /// Begins with the process id.
    pub id: String,
    pub lock: String,
    pub shared: bool,
    pub start: u64,
    pub end: u64,
    pub token: Option<u64>,
}

/// The lines that workers wrote; see `child::work`.
#[derive(Debug)]
pub struct History {
    pub holds: Vec<Hold>,
    /// Acquires that ended without the lock.
    pub missed: usize,
}

/// Returns the seed of a test's workers, which `NESTLOCK_SEED` overrides.
pub fn seed() -> u64 {
    std::env::var("NESTLOCK_SEED").map_or(20_261_121, |seed| seed.parse().expect("a number"))
}

impl History {
    /// Lets processes lock, hold and unlock at random, and checks the invariants of every kind.
    /// `kind` is a kind of `child::work`.
    ///
    /// The end of a lease sends no message, so with leases, waiters also poll every 200 ms. Without
    /// leases, only messages wake them.
    pub fn play(server: &Server, kind: &str, locks: usize, rounds: usize, leases: bool) -> Self {
        let poll_cap = if leases {
            Duration::from_millis(200)
        } else {
            Duration::from_secs(3600)
        };
        let folder = tempfile::tempdir().expect("a folder");
        let (file, seed) = (folder.path().join("history"), seed());
        let mut workers: Vec<Worker> = (0..PROCESSES)
            .map(|_| Worker::start(server, Duration::from_secs(60), poll_cap))
            .collect();
        for (number, worker) in workers.iter_mut().enumerate() {
            let seed = seed.wrapping_add((number * TASKS) as u64);
            worker.ask(&format!(
                "work {kind} {seed} {} {TASKS} {locks} {rounds} {leases}",
                file.display()
            ));
        }
        for worker in &workers {
            worker.answer_to("done");
        }
        let history = Self::read(
            &std::fs::read_to_string(&file).expect("a history"),
            &HashMap::new(),
            0,
        );
        let (holds, missed) = (history.holds.len(), history.missed);
        println!(
            "seed {seed}: {holds} holds of {kind} locks, {missed} given up; {:?} at most in between",
            history.gap()
        );
        let processes: BTreeSet<_> = history
            .holds
            .iter()
            .map(|hold| hold.id.split(':').next())
            .collect();
        assert_eq!(processes.len(), PROCESSES, "every task had a lock");
        assert!(
            holds > rounds * TASKS && missed > rounds,
            "{holds} holds, {missed} given up"
        );
        let kept = |key: &str| key.starts_with("redisson_lock_token:") || key.contains(GUARDED);
        let left: Vec<_> = server
            .dump()
            .into_iter()
            .filter(|(key, ..)| !kept(key))
            .collect();
        assert_eq!(left, [], "no record is left");
        history
    }

    /// Parses lines; the last one may be cut off. A hold without an end line is certain until the
    /// kill of its process or the end of its lease.
    pub fn read(text: &str, killed: &HashMap<String, u64>, now: u64) -> Self {
        let (mut open, mut history) = (
            BTreeMap::new(),
            Self {
                holds: Vec::new(),
                missed: 0,
            },
        );
        for line in text[..text.rfind('\n').map_or(0, |end| end + 1)].lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |n: usize| words[n].parse::<u64>().expect("a number");
            match words[0] {
                "+" => {
                    let (id, lock, shared) = (
                        words[1].to_owned(),
                        words[2].to_owned(),
                        words[3] == "shared",
                    );
                    let hold = Hold {
                        id,
                        lock,
                        shared,
                        start: number(4),
                        end: number(5),
                        token: words[6].parse().ok(),
                    };
                    assert!(
                        open.insert(hold.id.clone(), hold).is_none(),
                        "twice: {line}"
                    );
                }
                "-" => {
                    let hold = open.remove(words[1]).expect("a beginning before the end");
                    history.holds.push(Hold {
                        end: number(2),
                        ..hold
                    });
                }
                _ => history.missed += 1,
            }
        }
        for hold in open.into_values() {
            let pid = hold.id.split(':').next().expect("a process");
            let end = hold
                .end
                .min(*killed.get(pid).unwrap_or(&now))
                .max(hold.start);
            history.holds.push(Hold { end, ..hold });
        }
        history
            .holds
            .sort_by(|a, b| (&a.lock, a.start, a.end).cmp(&(&b.lock, b.start, b.end)));
        history
    }

    /// Returns pairs of holds of one lock that overlap and are not both shared: each hold with the
    /// longest-lasting one before it.
    pub fn clashes(&self) -> Vec<(Hold, Hold)> {
        self.overlaps(false)
    }

    /// Returns such pairs of which both are shared.
    pub fn companies(&self) -> Vec<(Hold, Hold)> {
        self.overlaps(true)
    }

    fn overlaps(&self, both_shared: bool) -> Vec<(Hold, Hold)> {
        let (mut found, mut longest) = (Vec::new(), HashMap::<(&str, bool), &Hold>::new());
        for hold in &self.holds {
            for shared in [false, true] {
                if let Some(before) = longest.get(&(&*hold.lock, shared))
                    && hold.start < before.end
                    && (shared && hold.shared) == both_shared
                {
                    found.push(((*before).clone(), hold.clone()));
                }
            }
            let longest = longest.entry((&*hold.lock, hold.shared)).or_insert(hold);
            if hold.end > longest.end {
                *longest = hold;
            }
        }
        found
    }

    /// Returns consecutive holds of a lock whose token is missing or does not rise.
    pub fn tokens_that_do_not_rise(&self) -> Vec<(Hold, Hold)> {
        let pairs = self
            .holds
            .windows(2)
            .filter(|pair| pair[0].lock == pair[1].lock);
        let wrong = pairs.filter(|pair| pair[0].token.is_none() || pair[1].token <= pair[0].token);
        wrong
            .map(|pair| (pair[0].clone(), pair[1].clone()))
            .collect()
    }

    /// Panics if an exclusive hold overlaps another one.
    pub fn assert_no_clashes(&self) {
        let found = self.clashes();
        assert!(
            found.is_empty(),
            "{} of {} holds clash: {:?}",
            found.len(),
            self.holds.len(),
            found.first()
        );
    }

    /// Returns the longest time without an acquire.
    pub fn gap(&self) -> Duration {
        let mut starts: Vec<u64> = self.holds.iter().map(|hold| hold.start).collect();
        starts.sort_unstable();
        Duration::from_nanos(
            starts
                .windows(2)
                .map(|pair| pair[1] - pair[0])
                .max()
                .unwrap_or(0),
        )
    }
}

/// The order in which owners requested and got a fair lock, read from MONITOR.
pub struct Order(JoinHandle<(usize, Vec<String>)>);

const THE_END: &str = "the end of the history";

impl Order {
    pub fn watch(server: &Server, lock: &str) -> Self {
        let (mut wire, lock) = (server.wire(), lock.to_owned());
        assert!(!wire.call(&["MONITOR"]).unwrap().is_error());
        Self(std::thread::spawn(move || {
            let lines =
                std::iter::from_fn(|| Some(wire.read().expect("the log").text().to_owned()));
            out_of_order(lines.take_while(|line| !line.contains(THE_END)), &lock)
        }))
    }

    /// Returns the number of grants; panics if one was out of order.
    pub fn check(self, server: &Server) -> usize {
        server.call(&["ECHO", THE_END]);
        let (grants, violations) = self.0.join().unwrap();
        assert!(violations.is_empty(), "{violations:#?}");
        grants
    }
}

/// Returns the number of grants, and the grants out of order.
fn out_of_order(lines: impl Iterator<Item = String>, lock: &str) -> (usize, Vec<String>) {
    let (mut asked, mut holder, mut grants, mut violations) =
        (VecDeque::<String>::new(), None, 0, Vec::new());
    // the earlier lines about the two owners explain a violation
    let mut before = Vec::<String>::new();
    let about = |before: &[String], two: [&str; 2]| -> Vec<String> {
        let all = before
            .iter()
            .rev()
            .filter(|line| two.iter().any(|one| line.contains(one)));
        all.take(300).cloned().collect()
    };
    for line in lines {
        before.push(line.clone());
        let words: Vec<&str> = line.split('"').skip(1).step_by(2).collect();
        match words[..] {
            // acquire: owner, lease, 1, patience, waits, channel, and the request's number
            [
                "EVALSHA" | "EVAL",
                ..,
                "4",
                name,
                _,
                _,
                _,
                owner,
                _,
                "1",
                _,
                waits,
                _,
                _,
            ] if name == lock
                && waits != "0"
                && holder.as_deref() != Some(owner)
                && !asked.iter().any(|asked| asked == owner) =>
            {
                asked.push_back(owner.to_owned());
            }
            // release: unlocks, leaves the queue, or never waited
            [
                "EVALSHA" | "EVAL",
                ..,
                "4",
                name,
                _,
                _,
                _,
                owner,
                "0",
                _,
                _,
                _,
            ] if name == lock => {
                asked.retain(|asked| asked != owner);
                holder = holder.filter(|holder| holder != owner);
            }
            // no line shows that a lease has ended; an rpush shows that its owner waits again
            ["rpush", queue, owner]
                if queue.contains(lock)
                    && line.contains("lua]")
                    && !asked.iter().any(|asked| asked == owner) =>
            {
                asked.push_back(owner.to_owned());
            }
            ["hset", name, owner, "1"] if name == lock && line.contains("lua]") => {
                grants += 1;
                // or, if no owner waits, that the owner acquires again at once
                if holder.as_deref() == Some(owner) && asked.is_empty() {
                    asked.push_back(owner.to_owned());
                }
                if asked.front().is_none_or(|first| first != owner) {
                    let first = asked.front().map_or("no waiter", String::as_str);
                    let before = about(&before, [owner, first]);
                    violations.push(format!(
                        "{owner} was given the lock before {first}: {before:#?}"
                    ));
                }
                asked.retain(|asked| asked != owner);
                holder = Some(owner.to_owned());
            }
            _ => {}
        }
    }
    (grants, violations)
}

#[test]
fn the_history_checker_finds_overlaps() {
    let killed = HashMap::from([("9".to_owned(), 150)]);
    let read = |text: &str| History::read(text, &killed, 5000);
    let ids = |pairs: Vec<(Hold, Hold)>| -> Vec<String> {
        pairs
            .iter()
            .map(|(a, b)| format!("{} {}", a.id, b.id))
            .collect()
    };
    let alone = "+ 9:a x alone 100 1000 -\n+ 8:b x alone 140 900 -\n- 8:b 160\n+ 8:c x alone 160 900 -\n- 8:c 170\n\
                 + 8:d y alone 90 900 -\n- 8:d 200\nmissed\n+ 8:e x alo";
    let history = read(alone);
    assert_eq!(
        (ids(history.clashes()), ids(history.companies())),
        (vec!["9:a 8:b".to_owned()], vec![])
    );
    assert_eq!(
        (history.holds.len(), history.missed, history.gap()),
        (4, 1, Duration::from_nanos(40))
    );

    // a short hold must not hide a long one before it
    let hidden = "+ 1:a x alone 0 0 -\n- 1:a 100\n+ 1:b x alone 10 0 -\n- 1:b 20\n+ 1:c x alone 50 0 -\n- 1:c 60\n";
    assert_eq!(ids(read(hidden).clashes()), ["1:a 1:b", "1:a 1:c"]);

    // concurrent readers, with a writer before, among and after them
    let classes = "+ 1:w x alone 0 0 -\n- 1:w 10\n+ 1:r x shared 10 0 -\n- 1:r 50\n+ 2:r x shared 20 0 -\n- 2:r 30\n";
    let history = read(classes);
    assert_eq!(
        (ids(history.clashes()), ids(history.companies())),
        (vec![], vec!["1:r 2:r".to_owned()])
    );
    for (writer, wrong) in [
        ((5, 8), "1:w 3:w"),
        ((40, 45), "1:r 3:w"),
        ((9, 9), "1:w 3:w"),
        ((49, 90), "1:r 3:w"),
    ] {
        let text = format!(
            "{classes}+ 3:w x alone {} 0 -\n- 3:w {}\n",
            writer.0, writer.1
        );
        assert_eq!(ids(read(&text).clashes()), [wrong]);
    }
    let reader = format!("{classes}+ 3:r x shared 9 0 -\n- 3:r 12\n");
    assert_eq!(ids(read(&reader).clashes()), ["1:w 3:r"]);
    assert_eq!(
        read(&format!("{classes}+ 3:w x alone 50 0 -\n- 3:w 90\n")).clashes(),
        []
    );
}

#[test]
fn the_history_checker_finds_tokens_that_do_not_rise() {
    let history = |tokens: [&str; 3]| {
        let lines = tokens
            .iter()
            .enumerate()
            .map(|(at, token)| format!("+ 1:{at} x alone {at}0 0 {token}\n- 1:{at} {at}5\n"));
        History::read(&lines.collect::<String>(), &HashMap::new(), 0)
            .tokens_that_do_not_rise()
            .len()
    };
    assert_eq!(
        [
            ["1", "2", "7"],
            ["1", "1", "2"],
            ["3", "2", "4"],
            ["1", "2", "-"]
        ]
        .map(history),
        [0, 1, 1, 1]
    );
}

/// Guards the checker itself: it must report a grant out of turn, and no grant in turn.
#[test]
fn the_history_checker_finds_a_lock_that_is_given_out_of_turn() {
    let ask = |owner: &str| {
        format!(
            r#"1.0 [0 127.0.0.1:1] "EVALSHA" "f" "4" "l" "q" "t" "s" "{owner}" "30000" "1" "15000" "7" "c" "9""#
        )
    };
    let give = |owner: &str| format!(r#"1.0 [0 lua] "hset" "l" "{owner}" "1""#);
    let end = |owner: &str| {
        format!(
            r#"1.0 [0 127.0.0.1:1] "EVALSHA" "f" "4" "l" "q" "t" "s" "{owner}" "0" "c" "1" "9""#
        )
    };
    let check = |lines: &[String]| {
        let (grants, violations) = out_of_order(lines.iter().cloned(), "l");
        (grants, violations.len())
    };
    assert_eq!(
        check(&[
            ask("a"),
            give("a"),
            ask("b"),
            ask("c"),
            end("a"),
            give("b"),
            end("b"),
            give("c")
        ]),
        (3, 0)
    );
    assert_eq!(
        check(&[
            ask("a"),
            give("a"),
            ask("b"),
            ask("c"),
            end("a"),
            give("c"),
            end("c"),
            give("b")
        ]),
        (3, 1)
    );
    assert_eq!(
        check(&[
            ask("a"),
            give("a"),
            ask("b"),
            ask("c"),
            end("b"),
            end("a"),
            give("c")
        ]),
        (2, 0),
        "b gave up"
    );
    assert_eq!(
        check(&[ask("a"), give("a"), end("a"), give("a")]),
        (2, 1),
        "no waiter asked"
    );
    // an owner whose lease has ended
    let join = |owner: &str| format!(r#"1.0 [0 lua] "rpush" "queue:{{l}}" "{owner}""#);
    let over = [
        ask("a"),
        give("a"),
        ask("b"),
        join("b"),
        ask("a"),
        join("a"),
        ask("c"),
        join("c"),
    ];
    let then = |owners: [&str; 3]| check(&[over.to_vec(), owners.map(give).to_vec()].concat());
    assert_eq!(then(["b", "a", "c"]), (4, 0));
    assert_eq!(then(["b", "c", "a"]), (4, 1));
    assert_eq!(then(["a", "b", "c"]), (4, 1));
    assert_eq!(check(&[ask("a"), give("a"), ask("a"), give("a")]), (2, 0));
}
