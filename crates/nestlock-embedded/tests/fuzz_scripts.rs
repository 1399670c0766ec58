//! The library's own scripts in random sequences: the embedded server and a real one must agree byte for byte.
#![cfg(unix)]

mod support;

use std::{collections::BTreeSet, panic};

use support::{
    grammar::Grammar,
    play::{Check, Command, Count, LINES, Rules, Step, Tally},
    rng::Rng,
    rounds::{Report, once, play_rounds},
    scripts::{self, Script, Word},
    servers::Pair,
};

/// Scores and fields may be times, so they are compared as times.
const RULES: Rules = Rules {
    lines: LINES,
    loose: &[],
    content: Check::Millis,
};

const LOCKS: [&str; 4] = ["orders:7", "a", "{tag}:b", "wrong kind"];
const OWNERS: [&str; 8] = [
    "0a1b2c3d-1111-4222-8333-444455556666:42",
    "0a1b2c3d-1111-4222-8333-444455556666:42",
    "0a1b2c3d-1111-4222-8333-444455556666:b1",
    "ffffffff-1111-4222-8333-444455556666:1",
    "ffffffff-1111-4222-8333-444455556666:1",
    "ffffffff-1111-4222-8333-444455556666:1.2",
    "no-uuid",
    "",
];

struct Round<'a> {
    rng: Rng,
    /// Generates times that differ by more than the delay between the two servers.
    times: Grammar,
    scripts: &'a [Script],
    /// The scripts that the server has cached.
    known: BTreeSet<String>,
    steps: Vec<Step>,
}

impl<'a> Round<'a> {
    fn new(seed: u64, scripts: &'a [Script]) -> Self {
        Self {
            rng: Rng::new(seed),
            times: Grammar::new(seed),
            scripts,
            known: BTreeSet::new(),
            steps: vec![],
        }
    }

    /// A random value for an argument of this name. An unknown name fails the test until its values are added here.
    fn argument(&mut self, script: &Script, word: &Word, lock: &str) -> Vec<u8> {
        match (&*word.name, &*word.kind) {
            ("owner" | "from" | "to", "string") => self.rng.pick(&OWNERS).into(),
            ("last", "string") => match self.rng.below(3) {
                0 => format!("{} {}", self.rng.pick(&OWNERS), self.rng.between(2, 4)).into_bytes(),
                _ => self.rng.pick(&OWNERS).into(),
            },
            ("lease" | "life", "integer") => self.lease(),
            ("holds", "string") if self.rng.below(4) == 0 => {
                let (seen, holds) = (self.rng.between(1, 4), self.rng.between(0, 3));
                format!("{seen}>{holds}").into_bytes()
            }
            ("holds", "integer" | "string") => match self.rng.below(20) {
                0 => self.times.junk(),
                1..=4 => b"0".to_vec(),
                5..=12 => b"1".to_vec(),
                _ => self.rng.between(2, 4).to_string().into_bytes(),
            },
            ("channel", "string") => channel(lock),
            ("caller", "string") => self.rng.pick(&["", "", "a", "b"]).into(),
            ("patience", "integer") => match self.rng.below(4) {
                0 => b"0".to_vec(),
                _ => self.lease(),
            },
            ("side", "string") => self
                .rng
                .pick(&["read", "read", "write", "write", "no side"])
                .into(),
            ("waits", "integer") => self
                .rng
                .pick(&["0", "1", "1", "2", "2", "1023", "yes"])
                .into(),
            ("grants", "integer") => self.rng.pick(&["0", "1", "1"]).into(),
            ("token", "integer") => match self.rng.below(10) {
                0 => self.times.junk(),
                _ => self.rng.between(1, 9).to_string().into_bytes(),
            },
            ("value" | "text", "string") => self.times.junk(),
            ("turn", "integer") => match self.rng.below(20) {
                0 => self.times.junk(),
                _ => self.rng.between(1, 12).to_string().into_bytes(),
            },
            ("count" | "total", "integer") => match self.rng.below(20) {
                0 => self.times.junk(),
                1 => b"0".to_vec(),
                2 => b"-2".to_vec(),
                _ => self.rng.between(1, 4).to_string().into_bytes(),
            },
            ("hold", "string") => {
                let owner = self.rng.pick(&OWNERS);
                [&holds(lock), owner.as_bytes(), b":rwlock_timeout:"].concat()
            }
            ("holds", "of") => holds(lock),
            (name, kind) => panic!(
                "lua/{}.lua: no values for ARGV[{}] {name} {kind}; add them to Round::argument in {}",
                script.name,
                word.index,
                file!()
            ),
        }
    }

    /// The same for keys.
    fn key(&mut self, script: &Script, word: &Word, lock: &str) -> Vec<u8> {
        match (&*word.name, &*word.kind) {
            ("lock", "string") if script.name.starts_with("signal/") => {
                [b"lock:", lock.as_bytes()].concat()
            }
            ("lock", "hash" | "string") | ("counter" | "latch", "string") => lock.into(),
            ("signal", "list") => [b"lock-signal:", lock.as_bytes()].concat(),
            ("queue", "list") => derived("redisson_lock_queue", lock),
            ("timeouts", "zset") => derived("redisson_lock_timeout", lock),
            ("queue", "zset") => derived("nestlock_permits_queue", lock),
            ("seen", "zset") if script.name.starts_with("fair_permits") => {
                derived("nestlock_permits_seen", lock)
            }
            ("seen", "zset") => derived("nestlock_fair_seen", lock),
            ("intent", "string") => derived("nestlock_rwlock_intent", lock),
            ("readers", "zset") => derived("nestlock_rwlock_readers", lock),
            ("token", "string") => derived("redisson_lock_token", lock),
            ("data", "string") => [b"data:", lock.as_bytes()].concat(),
            ("fence", "string") => derived("nestlock_fence", lock),
            ("note", "string") => {
                let owner = self.rng.pick(&OWNERS);
                [
                    &derived("nestlock_note", lock),
                    b":".as_slice(),
                    owner.as_bytes(),
                ]
                .concat()
            }
            ("callers", "hash") => derived("nestlock_latch_callers", lock),
            ("request", "string") => {
                let request = self.rng.between(1, 9);
                format!("nestlock_semaphore_request:{}:{request}", tagged(lock)).into_bytes()
            }
            ("leases", "zset") => format!("{}:timeout", tagged(lock)).into_bytes(),
            (name, kind) => panic!(
                "lua/{}.lua: no values for KEYS[{}] {name} {kind}; add them to Round::key in {}",
                script.name,
                word.index,
                file!()
            ),
        }
    }

    fn lease(&mut self) -> Vec<u8> {
        match self.rng.below(20) {
            0 | 1 => self.times.junk(),
            // a number, and more than the server can count
            2 => b"9223372036854775807".to_vec(),
            _ => self.times.millis(),
        }
    }

    fn lock(&mut self) -> &'static str {
        self.rng.pick(&LOCKS)
    }

    /// KEYS and ARGV of a script, by its header; with more of them where the header says `n`.
    fn call(&mut self, script: &Script) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        let many = self.rng.between(1, 4);
        let locks: Vec<&str> = (0..many).map(|_| self.lock()).collect();
        let (mut keys, mut args) = (vec![], vec![]);
        for word in &script.keys {
            let count = if word.index.starts_with('n') { many } else { 1 };
            keys.extend(
                locks[..count]
                    .iter()
                    .map(|lock| self.key(script, word, lock))
                    .collect::<Vec<_>>(),
            );
        }
        let (each, once): (Vec<_>, Vec<_>) = script
            .args
            .iter()
            .partition(|word| word.index.contains('n'));
        args.extend(
            once.iter()
                .map(|word| self.argument(script, word, locks[0])),
        );
        for lock in &locks {
            args.extend(each.iter().map(|word| self.argument(script, word, lock)));
        }
        if self.rng.percent(2) {
            args.pop();
        }
        if self.rng.percent(1) {
            args.push(b"one more".to_vec());
        }
        (keys, args)
    }

    fn run(&mut self, script: &Script, keys: &[Vec<u8>], args: &[Vec<u8>]) {
        let line = self.rng.below(2);
        if let Some(at) = script.keys.iter().position(|word| word.name == "token") {
            // without a token key, tokens start at the server's microseconds, which differ between the servers
            let parts = [b"SET".as_slice(), &keys[at], b"41", b"NX"];
            self.steps
                .push(Step::Send(line, Command::new(&parts, Check::Exact)));
        }
        let known = self.known.contains(&script.name);
        let text = ("EVAL", script.source.clone(), script.name.as_str());
        // NOSCRIPT is not counted as a run
        let sha = (
            "EVALSHA",
            script.sha(),
            if known { &script.name } else { "" },
        );
        let ways = match self.rng.below(10) {
            0 => vec![text],
            // as clients do after NOSCRIPT
            1..=6 if !known => vec![sha, text],
            _ => vec![sha],
        };
        for (how, what, label) in ways {
            if how == "EVAL" {
                self.known.insert(script.name.clone());
            }
            let mut parts = vec![
                how.into(),
                what.into_bytes(),
                keys.len().to_string().into_bytes(),
            ];
            parts.extend(keys.iter().chain(args).cloned());
            self.steps.push(Step::Send(
                line,
                Command {
                    parts,
                    check: Check::Millis,
                    label: label.into(),
                },
            ));
        }
    }

    /// Other changes to the keys.
    fn interfere(&mut self) {
        let lock = self.lock();
        let owner = *self.rng.pick(&OWNERS.each_ref());
        let time = String::from_utf8(self.times.millis()).expect("digits");
        let load = &self.scripts[self.rng.below(self.scripts.len())];
        let writer = format!("{owner}:write");
        let (record, signal) = (format!("lock:{lock}"), format!("lock-signal:{lock}"));
        let leases = format!("{}:timeout", tagged(lock));
        let second = format!("{owner} 2");
        let [queue, seen] =
            ["queue", "seen"].map(|key| format!("nestlock_permits_{key}:{}", tagged(lock)));
        let choices: [&[&str]; 51] = [
            &["DEL", lock],
            &["DEL", lock],
            &["DEL", lock],
            &["DEL", lock],
            &["DEL", lock],
            &["HDEL", lock, owner],
            &["HSET", lock, owner, "1"],
            &["HSET", lock, owner, "text"],
            &["HSET", lock, "mode", "read"],
            &["HSET", lock, "mode", "write", &writer, "1"],
            &["HSET", lock, "mode", "write", &writer, "1"],
            &["HSET", lock, "mode", "read", owner, "1"],
            &["HSET", lock, "name", "Ada"],
            &["HINCRBY", lock, owner, "1"],
            &["SET", lock, "data"],
            &["SET", lock, "data", "PX", &time],
            &["RPUSH", lock, "a", "b"],
            &["ZADD", lock, "1", "a"],
            &["PERSIST", lock],
            &["DEL", &record],
            &["DEL", &record],
            &["DEL", &record, &signal],
            &["PERSIST", &record],
            &["PERSIST", &record],
            &["SET", &record, owner, "PX", &time],
            &["RPUSH", &record, "a"],
            &["SET", &signal, "data"],
            &["LPOP", &signal],
            &["PEXPIRE", lock, &time],
            &["PEXPIRE", lock, &time],
            &["PEXPIRE", lock, "0"],
            &["SET", lock, "3"],
            &["SET", lock, "1"],
            &["ZADD", &leases, "7", owner],
            &["ZADD", &leases, "922337203685477", &second, "8", "id"],
            &["ZADD", &leases, "922337203685477", "0123456789abcdef"],
            &["DEL", &leases],
            &["ZADD", &queue, "7", owner, "8", &second],
            &["ZADD", &seen, "9999999999999", owner, "9", &second],
            &["DEL", &queue],
            &["SET", &seen, "data", "PX", &time],
            &["PTTL", lock],
            &["HGETALL", lock],
            &["EXISTS", lock],
            &["PUBLISH", "redisson_lock__channel:{a}", "1"],
            &["SPUBLISH", "redisson_lock__channel:{a}", "1"],
            &["FLUSHALL"],
            &["SCRIPT", "FLUSH"],
            &["SCRIPT", "LOAD", &load.source],
            &["SCRIPT", "LOAD", &load.source],
            &[
                "SCRIPT",
                "EXISTS",
                "e0e1f9fabfc9d4800c877a703b823ac0578ff8db",
            ],
        ];
        let choice = choices[self.rng.below(choices.len())];
        match choice {
            ["SCRIPT", "FLUSH"] => self.known.clear(),
            ["SCRIPT", "LOAD", _] => _ = self.known.insert(load.name.clone()),
            _ => {}
        }
        let line = self.rng.below(2);
        self.steps
            .push(Step::Send(line, Command::new(choice, Check::Millis)));
    }

    /// Leases of some milliseconds, one for each lock, and a pause until they have expired on both servers.
    fn expire_some(&mut self) {
        self.steps.push(Step::State);
        let mut locks = LOCKS;
        self.rng.shuffle(&mut locks);
        for lock in &locks[..self.rng.between(1, locks.len())] {
            let millis = self.rng.between(1, 8).to_string();
            for key in [(*lock).to_owned(), format!("lock:{lock}")] {
                self.steps.push(Step::Send(
                    0,
                    Command::new(&["PEXPIRE", &key, &millis], Check::Exact),
                ));
            }
        }
        self.steps.push(Step::Wait(Grammar::SHORT));
    }

    fn listen(&mut self) {
        let [a, b] = [channel("a"), channel("orders:7")];
        let commands: [(usize, &[&[u8]]); 4] = [
            (2, &[b"PSUBSCRIBE", b"*"]),
            (2, &[b"SSUBSCRIBE", &a, &b]),
            (3, &[b"SUBSCRIBE", &a, &b]),
            (3, &[b"PSUBSCRIBE", b"*:{orders:7}"]),
        ];
        self.steps.extend(
            commands.map(|(line, parts)| Step::Send(line, Command::new(parts, Check::Exact))),
        );
    }
}

fn tagged(lock: &str) -> String {
    if lock.contains('{') {
        lock.to_owned()
    } else {
        format!("{{{lock}}}")
    }
}

fn derived(prefix: &str, lock: &str) -> Vec<u8> {
    format!("{prefix}:{}", tagged(lock)).into_bytes()
}

fn channel(lock: &str) -> Vec<u8> {
    derived("redisson_lock__channel", lock)
}

/// The prefix of the keys of read holds.
fn holds(lock: &str) -> Vec<u8> {
    format!("{}:", tagged(lock)).into_bytes()
}

/// About 600 runs of scripts, derived from the seed alone.
fn round(seed: u64, scripts: &[Script]) -> Vec<Step> {
    let mut round = Round::new(seed, scripts);
    round.listen();
    for part in 0..12 {
        for _ in 0..60 {
            if round.rng.percent(15) {
                round.interfere();
            } else {
                let script = &scripts[round.rng.below(scripts.len())];
                let (keys, args) = round.call(script);
                round.run(script, &keys, &args);
            }
        }
        round.steps.push(Step::State);
        if part % 4 == 3 {
            round.expire_some();
        }
    }
    round.steps
}

/// More than 50,000 runs.
#[test]
fn random_sequences_of_our_scripts_do_the_same_as_on_redis() {
    let scripts = scripts::all();
    let mut report = Report::default();
    std::thread::scope(|scope| {
        let part = |first| {
            let scripts = &scripts;
            scope.spawn(move || {
                play_rounds(&Pair::start(), &RULES, first, 90, |seed| {
                    round(seed, scripts)
                })
            })
        };
        for part in [part(0), part(1_000_000)] {
            report.add(part.join().expect("no panic"));
        }
    });
    let runs: usize = scripts
        .iter()
        .filter_map(|script| report.tally.get(&script.name))
        .map(Count::total)
        .sum();
    println!(
        "{runs} runs of {} scripts, {} commands in {} rounds",
        scripts.len(),
        report.commands,
        report.rounds
    );
    report.assert_none();
    if report.is_partial() {
        return;
    }
    assert!(runs > 50_000, "{runs} runs");
    for script in &scripts {
        let count = report.tally.get(&script.name).cloned().unwrap_or_default();
        for wanted in &script.returns {
            // of a list, its first element
            let seen = match wanted.trim_matches(['{', ',']) {
                ">" | ">=" => count.kinds.contains(">1"),
                "n" => count.kinds.contains("list"),
                "error" => count.refused > 0,
                kind => count.kinds.contains(kind),
            };
            assert!(
                seen,
                "lua/{}.lua never returned {wanted:?}, though its header lists it: {count:?}",
                script.name
            );
        }
    }
}

#[test]
fn a_lock_that_one_server_changes_is_noticed() {
    let (pair, scripts) = (Pair::start(), scripts::all());
    let send = |parts: &[&str]| Step::Send(0, Command::new(parts, Check::Exact));
    for what in [
        &["HINCRBY", "a", OWNERS[0], "1"][..],
        &["PEXPIRE", "a", "400000000"],
        &["DEL", "a"],
        &["HSET", "b", OWNERS[0], "1"],
        &["PUBLISH", "redisson_lock__channel:{a}", "0"],
    ] {
        let mut steps = round(7, &scripts);
        // keys with a TTL of a few milliseconds have expired then
        let waited = steps
            .iter()
            .position(|step| matches!(step, Step::Wait(_)))
            .expect("a pause");
        steps.truncate(waited + 1);
        steps.extend([
            send(&["DEL", "a"]),
            send(&["HSET", "a", OWNERS[0], "1"]),
            Step::State,
        ]);
        if let Some(difference) = once(&pair, &RULES, &steps, &mut Tally::new()) {
            panic!("differs before anything was changed: {difference}");
        }
        steps.insert(
            steps.len() - 1,
            Step::Perturb(Command::new(what, Check::Exact)),
        );
        assert!(
            once(&pair, &RULES, &steps, &mut Tally::new()).is_some(),
            "not noticed: {what:?}"
        );
    }
}

#[test]
fn a_script_with_an_argument_that_is_new_here_fails_the_test() {
    let mut scripts = scripts::all();
    let script = scripts
        .iter_mut()
        .find(|script| script.name == "reentrant/acquire")
        .expect("it is there");
    script.args.push(Word {
        index: "4".into(),
        name: "colour".into(),
        kind: "string".into(),
    });
    let panic = panic::catch_unwind(|| round(1, &scripts)).expect_err("a panic");
    let text = panic.downcast_ref::<String>().expect("a text");
    assert!(
        text.contains("lua/reentrant/acquire.lua: no values for ARGV[4] colour string; add them"),
        "{text}"
    );
}
