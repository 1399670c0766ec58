//! How any two libraries that use the same record must behave with each other.

use std::time::Instant;

use super::{
    history::{Verdict, judge},
    servers::{Servers, eventually},
    worker::{Library, Worker},
};

/// In ms: long enough that no hold ends by its TTL.
const LONG: u64 = 30_000;
/// In ms: short enough to wait for; python-redis-lock counts in whole seconds.
const SHORT: u64 = 1000;

const MS: u64 = 1_000_000;

/// Two workers, and the servers that both use.
#[derive(Debug)]
pub struct Pair {
    servers: Servers,
    workers: [Worker; 2],
    /// The prefix of a lock's name in its key.
    prefix: &'static str,
}

impl Pair {
    pub fn start(libraries: [Library; 2], servers: usize, prefix: &'static str) -> Self {
        let servers = Servers::start(servers);
        let workers = libraries.map(|library| Worker::start(library, &servers));
        Self {
            servers,
            workers,
            prefix,
        }
    }

    pub fn servers(&self) -> &Servers {
        &self.servers
    }

    pub fn does(&mut self, worker: usize, request: &str, wanted: &str) -> u64 {
        self.workers[worker].does(request, wanted)
    }

    pub fn ask(&mut self, worker: usize, request: &str) {
        self.workers[worker].ask(request);
    }

    pub fn tells(&mut self, worker: usize, wanted: &str) -> u64 {
        self.workers[worker].tells(wanted)
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The token in the record, which must be the same on all servers.
    pub fn token(&self, name: &str) -> String {
        let key = self.key(name);
        // some libraries return when a majority has replied
        eventually("all servers have the record", || {
            self.servers.get(&key).iter().all(Option::is_some)
        });
        let mut tokens: Vec<String> = self.servers.get(&key).into_iter().flatten().collect();
        tokens.dedup();
        assert_eq!(tokens.len(), 1, "the servers disagree: {tokens:?}");
        assert!(!tokens[0].is_empty());
        tokens.remove(0)
    }

    /// Waits until no server has a record.
    pub fn free(&self, name: &str) {
        let key = self.key(name);
        eventually("the record is gone", || {
            self.servers.get(&key).iter().all(Option::is_none)
        });
    }

    /// Waits until the record ends within this time, in ms, on each server.
    fn ends_within(&self, name: &str, range: std::ops::RangeInclusive<u64>) {
        let key = self.key(name);
        let ends = || self.servers.call_all(&["PTTL", &key]);
        let all = || {
            ends()
                .iter()
                .all(|ttl| u64::try_from(ttl.int()).is_ok_and(|ttl| range.contains(&ttl)))
        };
        eventually(&format!("a TTL in {range:?}"), all);
    }

    /// Deletes the record on some of the servers, which no client may do.
    fn delete(&self, name: &str, servers: std::ops::Range<usize>) {
        for server in servers {
            assert_eq!(
                self.servers.call(server, &["DEL", &self.key(name)]).int(),
                1,
                "there was no record"
            );
        }
    }

    /// The number of attempts to take a lock on the first server.
    fn attempts(&self) -> u64 {
        ["set", "eval", "evalsha"]
            .iter()
            .map(|command| self.servers.count_of(command))
            .sum()
    }

    /// A holds, B finds it busy, A extends, B waits, A releases, B gets it; and vice versa.
    pub fn in_turn(&mut self, rounds: usize) {
        let mut free_since = 0;
        for round in 0..rounds {
            let (a, b) = (round % 2, 1 - round % 2);
            let start = self.does(a, &format!("acquire turn {LONG} 0"), "acquired");
            assert!(start > free_since);
            let token = self.token("turn");
            self.ends_within("turn", LONG - 20_000..=LONG);
            self.does(b, &format!("acquire turn {LONG} 0"), "busy");
            assert_eq!(
                self.token("turn"),
                token,
                "the loser has changed the record"
            );
            self.does(a, &format!("extend turn {}", 2 * LONG), "extended");
            self.ends_within("turn", LONG + 1..=2 * LONG);
            assert_eq!(self.token("turn"), token);
            self.ask(b, &format!("acquire turn {LONG} 20000"));
            let end = self.does(a, "release turn", "released");
            assert!(self.tells(b, "acquired") > end);
            self.does(a, &format!("acquire turn {LONG} 0"), "busy");
            free_since = self.does(b, "release turn", "released");
            self.free("turn");
        }
    }

    /// Both hold the locks named `names`, which should be the same, `each` times at random. Also returns the value of a
    /// counter that each holder increments by reading and then writing it.
    fn history(&mut self, names: [&str; 2], each: usize) -> (Verdict, usize) {
        let start = Instant::now();
        for (by, name) in names.iter().enumerate() {
            self.ask(by, &format!("run {name} counter {each} {LONG} {}", 11 + by));
        }
        let holds = [0, 1].map(|by| self.workers[by].holds(by)).concat();
        let verdict = judge(holds);
        let counter = self
            .servers
            .call(0, &["GET", "counter"])
            .text()
            .parse()
            .expect("a count");
        let [a, b] = self.workers.each_ref().map(Worker::library);
        println!(
            "{a} and {b} on {} server(s), locks {names:?}: {} holds, {} overlaps, counter {counter}, {} handovers, \
             longest hold {:.1} ms, {:.1} s",
            self.servers.count(),
            verdict.holds,
            verdict.overlaps,
            verdict.handovers,
            verdict.longest as f64 / 1e6,
            start.elapsed().as_secs_f64(),
        );
        assert!(
            verdict.longest < LONG * MS,
            "the machine stalled: this proves nothing about the locks"
        );
        (verdict, counter)
    }

    /// Both hold one lock, at random, and never at once.
    pub fn at_random(&mut self, each: usize) {
        let (verdict, counter) = self.history(["random", "random"], each);
        assert_eq!(
            (verdict.holds, verdict.overlaps, counter),
            (2 * each, 0, 2 * each)
        );
        assert!(
            verdict.handovers >= each / 10,
            "they did not compete: {verdict:?}"
        );
    }

    /// Each holds a different lock: the checks must notice, or [`Pair::at_random`] proves nothing.
    pub fn at_random_apart(&mut self, each: usize) {
        let (verdict, counter) = self.history(["mine", "yours"], each);
        assert_eq!(verdict.holds, 2 * each);
        assert!(verdict.overlaps > each / 10, "{verdict:?}");
        assert!(counter < 2 * each, "{counter} with {verdict:?}");
    }

    /// A's hold ends by its TTL: B gets the lock, no earlier, and A finds its hold lost and cannot release B's.
    pub fn expiry(&mut self) {
        for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
            let asked = super::clock::monotonic_ns();
            self.does(a, &format!("acquire {name} {SHORT} 0"), "acquired");
            self.does(b, &format!("acquire {name} {LONG} 0"), "busy");
            self.ask(b, &format!("acquire {name} {LONG} 3000"));
            let start = self.tells(b, "acquired");
            // the server counts TTLs in whole milliseconds
            assert!(
                start + MS >= asked + SHORT * MS,
                "{} ns too early",
                asked + SHORT * MS - start
            );
            self.taken_from(a, b, name);
        }
    }

    /// A's record is deleted on `servers`: B gets the lock, and A finds its hold lost and cannot release B's.
    pub fn deletion(&mut self, servers: usize) {
        for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
            self.does(a, &format!("acquire {name} {LONG} 0"), "acquired");
            self.token(name);
            self.delete(name, 0..servers);
            self.does(b, &format!("acquire {name} {LONG} 0"), "acquired");
            self.taken_from(a, b, name);
        }
    }

    /// B holds what A still considers its own.
    fn taken_from(&mut self, a: usize, b: usize, name: &str) {
        self.does(a, &format!("extend {name} {LONG}"), "lost");
        self.does(a, &format!("release {name}"), "lost");
        self.does(a, &format!("acquire {name} {LONG} 0"), "busy");
        self.does(b, &format!("extend {name} {LONG}"), "extended");
        self.does(b, &format!("release {name}"), "released");
        self.free(name);
    }

    /// A's record is deleted on a minority: B does not get it, and leaves nothing there.
    pub fn minority(&mut self) {
        for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
            self.does(a, &format!("acquire {name} {LONG} 0"), "acquired");
            self.token(name);
            self.delete(name, 0..1);
            self.does(b, &format!("acquire {name} {LONG} 0"), "busy");
            self.does(b, &format!("acquire {name} {LONG} 1000"), "busy");
            let key = self.key(name);
            eventually("no key of the loser", || {
                self.servers.get(&key)[0].is_none()
            });
            self.does(a, &format!("release {name}"), "released");
            self.free(name);
        }
    }

    /// One of several servers dies: the others decide, and it may restart empty.
    pub fn outage(&mut self, each: usize) {
        let last = self.servers.count() - 1;
        self.servers.kill(last);
        self.workers[0].does(&format!("acquire l {LONG} 5000"), "acquired");
        self.does(1, &format!("acquire l {LONG} 0"), "busy");
        self.servers.restart(last);
        self.does(1, &format!("acquire l {LONG} 1000"), "busy");
        self.does(0, "release l", "released");
        self.does(1, &format!("acquire l {LONG} 5000"), "acquired");
        self.does(0, &format!("acquire l {LONG} 0"), "busy");
        self.does(1, "release l", "released");
        self.servers.kill(last);
        // the side that has just noticed may still wait for that server, while the other one takes all its turns
        for _ in 0..5 {
            self.servers.call(0, &["DEL", "counter"]);
            let (verdict, counter) = self.history(["random", "random"], each);
            assert_eq!(
                (verdict.holds, verdict.overlaps, counter),
                (2 * each, 0, 2 * each)
            );
            if verdict.handovers >= each / 10 {
                return;
            }
        }
        panic!("they never competed");
    }

    /// B waits with its library's default pauses and number of attempts.
    pub fn own_waiting(&mut self) {
        for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
            self.does(a, &format!("acquire {name} {LONG} 0"), "acquired");
            self.token(name);
            let before = self.attempts();
            self.ask(b, &format!("acquire {name} {LONG} own"));
            eventually("an attempt", || self.attempts() > before);
            let end = self.does(a, &format!("release {name}"), "released");
            assert!(self.tells(b, "acquired") > end);
            self.does(b, &format!("release {name}"), "released");
            self.free(name);
        }
    }

    /// A hands its token to B, which extends and releases.
    pub fn handed_over(&mut self) {
        for (a, b, name) in [(0, 1, "there"), (1, 0, "back")] {
            self.does(a, &format!("acquire {name} {LONG} 0"), "acquired");
            let token = self.token(name);
            self.does(b, &format!("adopt {name} {token}"), "adopted");
            self.does(b, &format!("extend {name} {}", 2 * LONG), "extended");
            self.ends_within(name, LONG + 1..=2 * LONG);
            self.does(b, &format!("release {name}"), "released");
            self.free(name);
            self.does(a, &format!("release {name}"), "lost");
        }
    }
}
