//! All scripts: a refused script has changed nothing, whichever of its commands the server refuses,
//! and whenever a TTL ends.

use std::{collections::BTreeSet, fmt::Write as _};

use super::{Bench, eval, leases, source};
use crate::support::{scripts, wire::Reply};

const A: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const B: &str = "0a1b2c3d-1111-4222-8333-444455556666:43";
const L: &str = "l";
const CHANNEL: &str = "redisson_lock__channel:{l}";
const TOKEN: &str = "redisson_lock_token:{l}";
const FAIR: [&str; 4] = [
    L,
    "redisson_lock_queue:{l}",
    "redisson_lock_timeout:{l}",
    "nestlock_fair_seen:{l}",
];
const INTENT: &str = "nestlock_rwlock_intent:{l}";
const READERS: &str = "nestlock_rwlock_readers:{l}";
const HOLDS: &str = "{l}:";
const LEASES: &str = "{l}:timeout";
const PLACES: &str = "nestlock_permits_queue:{l}";
const WAITERS: &str = "nestlock_permits_seen:{l}";
const SIGNAL: [&str; 2] = ["lock:l", "lock-signal:l"];
const GUARDED: [&str; 2] = ["k", "nestlock_fence:{k}"];

/// A script and a state that it finds; `state` is a list of commands, separated by semicolons.
struct Case {
    script: &'static str,
    state: String,
    keys: Vec<&'static str>,
    args: Vec<String>,
}

/// Returns states for every script, at least one for each path through it that writes.
#[allow(clippy::too_many_lines, reason = "a table")]
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut of = |script, keys: &[_], args: &[&str], states: &[&str]| {
        cases.extend(Case::in_states(script, keys, args, states));
    };
    let held = &*format!("HSET l {A} 1;PEXPIRE l 20000");
    let twice = &*format!("HSET l {A} 2;PEXPIRE l 20000");
    let others = &*format!("HSET l {B} 1;PEXPIRE l 20000");

    of(
        "reentrant/acquire",
        &[L],
        &[A, "30000", "1"],
        &["", held, twice, others],
    );
    of("reentrant/acquire", &[L], &[A, "10000", "2"], &[held]);
    of("reentrant/acquire", &[L], &[A, "30000", "2"], &[held]);
    of(
        "reentrant/release",
        &[L],
        &[A, "0", CHANNEL],
        &[held, twice, others, &format!("{held};HSET l data x")],
    );
    of("reentrant/release", &[L], &[A, "1", CHANNEL], &[twice]);
    of(
        "reentrant/release",
        &[L],
        &[A, "2>1", CHANNEL],
        &[held, twice],
    );
    of("reentrant/renew", &[L], &[A, "30000"], &[held, others]);
    let two = &*format!("{held};HSET m {A} 1;PEXPIRE m 20000");
    of(
        "reentrant/renew",
        &[L, "m"],
        &leases(&[A, A], "30000"),
        &[held, two],
    );
    let (moves, moved) = ([A, B, "30000"], [B, A, "30000"]);
    of("reentrant/transfer", &[L], &moves, &["", held, twice]);
    of("reentrant/transfer", &[L], &moved, &[held]);
    of("reentrant/force_release", &[L], &[CHANNEL], &[held]);
    of("reentrant/inspect", &[L], &[], &[held]);
    let second = &*format!("HSET m {A} 3;PEXPIRE m 20000");
    of(
        "reentrant/acquire_together",
        &[L, "m"],
        &[A, "30000"],
        &["", held, twice, second, &format!("{twice};{second}")],
    );
    of(
        "reentrant/release_together",
        &[L, "m"],
        &[A, CHANNEL, A, ""],
        &["", held, two],
    );

    let (token, foreign) = (
        &*format!("SET {TOKEN} 41"),
        &*format!("{others};SET {TOKEN} 41"),
    );
    let again = &*format!("{held};{token}");
    of(
        "fenced/acquire",
        &[L, TOKEN],
        &[A, "30000", "1"],
        &["", token, held, again, foreign],
    );
    of(
        "fenced/acquire",
        &[L, TOKEN],
        &[A, "30000", "2"],
        &[held, again],
    );
    of("fenced/transfer", &[L, TOKEN], &moves, &["", held, again]);
    of("fenced/transfer", &[L, TOKEN], &moved, &[held, again]);
    let guarded = "SET k old;SET nestlock_fence:{k} 5";
    of(
        "fenced/set",
        &GUARDED,
        &["7", "new"],
        &["", "SET k old", guarded, "SET nestlock_fence:{k} 7"],
    );
    of("fenced/get", &GUARDED, &["7"], &["", "SET k old", guarded]);

    let queue = |waiters: &[&str], record: &str| {
        let mut state = record.to_owned();
        for (at, waiter) in waiters.iter().enumerate() {
            let score = if waiter.ends_with('0') {
                "1".to_owned()
            } else {
                format!("900000000000{at}")
            };
            let _ = write!(
                state,
                ";RPUSH {} {waiter};ZADD {} {score} {waiter}",
                FAIR[1], FAIR[2]
            );
        }
        state
    };
    // a waiter that is gone, and the next one
    let (gone, next) = (
        "0a1b2c3d-2222-4222-8333-444455556666:40",
        "0a1b2c3d-3333-4222-8333-444455556666:44",
    );
    let waits = [
        queue(&[], ""),
        queue(&[A], ""),
        queue(&[gone, A], ""),
        queue(&[gone, next], ""),
        queue(&[next, A], others),
    ];
    let acquire = [A, "30000", "1", "5000", "1", CHANNEL];
    // nestlock waiters: gone behind a holder, alive behind another head, and left over without a
    // queue
    let seen = |waiter: &str, until: &str, state: &str| {
        format!("{state};ZADD {} {until} {waiter}", FAIR[3])
    };
    let ours = [
        seen(gone, "1", &queue(&[gone], others)),
        seen(gone, "1", &queue(&[gone, next], others)),
        seen(gone, "1", &queue(&[gone, A], others)),
        seen(A, "9000000000000", &queue(&[next, A], others)),
        seen(gone, "1", others),
        seen(gone, "1", &queue(&[next], others)),
        // the clock went back
        seen(
            "clock",
            "9000000000000",
            &seen(gone, "9000000000000", &queue(&[gone, A], others)),
        ),
    ];
    for state in waits
        .iter()
        .chain(&ours)
        .map(String::as_str)
        .chain([held, twice, others])
    {
        of("fair/acquire", &FAIR, &acquire, &[state]);
    }
    of(
        "fair/acquire",
        &FAIR,
        &[A, "30000", "2", "5000", "1", CHANNEL],
        &[held],
    );
    let queues = [
        queue(&[gone, next], held),
        queue(&[next, A], others),
        queue(&[A, next], ""),
        held.to_owned(),
    ];
    for state in &queues {
        of("fair/release", &FAIR, &[A, "0", CHANNEL, "0"], &[state]);
    }
    // a waiter with a wait id, which the release makes the holder
    let turn = seen(next, "9000000000000.5", &queue(&[gone, next], held));
    of(
        "fair/release",
        &FAIR,
        &[A, "0", CHANNEL, "1"],
        &[&turn, &format!("{turn};PERSIST l")],
    );
    of(
        "fair/acquire",
        &FAIR,
        &[A, "30000", "1", "5000", "2", CHANNEL],
        &[others, &waits[4]],
    );
    of("fair/release", &FAIR, &[A, "1", CHANNEL, "1"], &[twice]);
    of("fair/force_release", &FAIR[..2], &[CHANNEL], &[&queues[0]]);

    let text = &*format!("SET l {A} PX 20000");
    of(
        "string/acquire",
        &[L],
        &[A, "30000"],
        &["", text, &format!("SET l {B} PX 20000")],
    );
    of("string/release", &[L], &[A], &["", text]);
    of("string/transfer", &[L], &moves, &["", text]);
    of("string/transfer", &[L], &[A, B, "0"], &[text]);
    of("string/renew", &[L], &[A, "30000"], &[text]);
    of(
        "string/renew",
        &[L, "m"],
        &leases(&[A, A], "30000"),
        &[text],
    );
    of(
        "string/force_release",
        &[L, "nestlock_fence:{l}"],
        &[],
        &[text],
    );
    of("string/inspect", &[L], &[], &[text]);

    let taken = &*format!("SET lock:l {A} EX 20");
    let told = &*format!("{taken};RPUSH lock-signal:l 1;PEXPIRE lock-signal:l 700");
    of(
        "signal/acquire",
        &SIGNAL[..1],
        &[A, "30000"],
        &["", taken, &format!("SET lock:l {B} EX 20")],
    );
    of("signal/acquire", &SIGNAL[..1], &[A, "0"], &["", taken]);
    of(
        "signal/release",
        &SIGNAL,
        &[A, "0", "1000"],
        &["", taken, told, &format!("{told};RPUSH lock-signal:l 2")],
    );
    of("signal/renew", &SIGNAL[..1], &[A, "30000"], &[taken]);
    of(
        "signal/renew",
        &["lock:l", "lock:m"],
        &leases(&[A, A], "30000"),
        &[taken],
    );
    of(
        "signal/force_release",
        &SIGNAL,
        &["1000"],
        &["", taken, told],
    );
    of(
        "signal/signal",
        &SIGNAL,
        &["1000"],
        &["", taken, "RPUSH lock-signal:l 1;PEXPIRE lock-signal:l 700"],
    );
    of("signal/inspect", &SIGNAL[..1], &[], &[taken]);

    let key = |owner: &str, n: u32| format!("{HOLDS}{owner}:rwlock_timeout:{n}");
    let hold = |owner: &str, n: u32, ttl: u32| format!("SET {} 1 PX {ttl}", key(owner, n));
    let reads = &*format!(
        "HSET l mode read {A} 1;PEXPIRE l 20000;{}",
        hold(A, 1, 20_000)
    );
    let reads_twice = &*format!(
        "HSET l mode read {A} 2;PEXPIRE l 40000;{};{}",
        hold(A, 1, 20_000),
        hold(A, 2, 40_000)
    );
    let both = &*format!(
        "{reads};HSET l {B} 1;PEXPIRE l 40000;{}",
        hold(B, 1, 40_000)
    );
    let writes = &*format!("HSET l mode write {A}:write 1;PEXPIRE l 20000");
    let writes_and_reads = &*format!("{writes};HSET l {A} 1;{}", hold(A, 1, 15_000));
    let (mine, intent) = (
        format!("{HOLDS}{A}:rwlock_timeout:"),
        &*format!("SET {INTENT} {A} PX 20000"),
    );
    let marks = [L, INTENT, READERS];
    let other_writes = &*writes.replace(A, B);
    let (first, after) = (
        &*format!("ZADD {READERS} 0 {A} 0 {B};PEXPIRE {READERS} 20000"),
        format!("ZADD {READERS} 1 {B};PEXPIRE {READERS} 1000"),
    );
    let other_intent = &*format!("SET {INTENT} {B} PX 1500");
    of(
        "read_write/read_acquire",
        &marks,
        &[A, "30000", "1", &mine, "1"],
        &["", reads, writes, intent, other_writes, first],
    );
    let held_back = [
        &*format!("{other_intent};{after}"),
        &*format!("{other_intent};{first}"),
    ];
    of(
        "read_write/read_acquire",
        &marks,
        &[A, "30000", "1", &mine, "1"],
        &held_back,
    );
    of(
        "read_write/read_acquire",
        &marks,
        &[A, "30000", "2", &mine, "1"],
        &[reads, writes_and_reads],
    );
    let release = [A, "0", "c", HOLDS];
    of(
        "read_write/read_release",
        &[L, READERS],
        &release,
        &["", reads, reads_twice, both, writes_and_reads, first],
    );
    of(
        "read_write/read_release",
        &[L, READERS],
        &[A, "1", "c", HOLDS],
        &[reads_twice],
    );
    of(
        "read_write/read_release_record",
        &[L],
        &[A, "0", "c"],
        &["", reads, both, writes_and_reads],
    );
    of(
        "read_write/read_renew",
        &[L],
        &[A, "30000"],
        &[reads, reads_twice, writes_and_reads],
    );
    let no_key = &*format!("HSET l mode read {A} 1;PEXPIRE l 20000");
    of(
        "read_write/read_renew",
        &[L, "m"],
        &leases(&[A, A], "30000"),
        &[reads, no_key],
    );
    let reader_moves = [A, B, "30000", HOLDS];
    of(
        "read_write/read_transfer",
        &[L],
        &reader_moves,
        &["", reads, reads_twice],
    );
    of(
        "read_write/read_transfer",
        &[L],
        &[A, "c:1", "30000", HOLDS],
        &[both],
    );
    of("read_write/write_transfer", &[L], &moves, &["", writes]);
    of(
        "read_write/force_release",
        &[L],
        &["c", HOLDS, "read"],
        &[both],
    );
    of("read_write/read_inspect", &[L], &[], &[both]);
    of(
        "read_write/write_acquire",
        &marks,
        &[A, "30000", "1", "1"],
        &["", intent, both, writes, first, &after],
    );
    of(
        "read_write/write_acquire",
        &marks,
        &[A, "30000", "2", "1"],
        &[writes],
    );
    of(
        "read_write/write_release",
        &[L, INTENT],
        &release,
        &[writes, writes_and_reads, &format!("{both};{intent}")],
    );
    of(
        "read_write/write_release",
        &[L, INTENT],
        &[A, "1", "c", HOLDS],
        &[&writes.replace(":write 1", ":write 2")],
    );
    of(
        "read_write/write_release_record",
        &[L],
        &[A, "0", "c"],
        &[writes, writes_and_reads],
    );
    of(
        "read_write/write_release_record",
        &[L],
        &[A, "1", "c"],
        &[&writes.replace(":write 1", ":write 2")],
    );
    of("read_write/write_renew", &[L], &[A, "30000"], &[writes]);
    of(
        "read_write/write_renew",
        &[L, "m"],
        &leases(&[A, A], "30000"),
        &[writes],
    );
    of(
        "read_write/force_release",
        &[L],
        &["c", HOLDS, "write"],
        &[writes_and_reads],
    );
    of("read_write/write_inspect", &[L], &[], &[writes]);
    cases.extend(cases_of_permits());
    cases
}

/// Returns the states of `permits/*`: all free, some taken, some expired, without a counter.
fn cases_of_permits() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut of = |script, keys: &[_], args: &[&str], states: &[&str]| {
        cases.extend(Case::in_states(script, keys, args, states));
    };
    // an end that is far away, and the space in the name of a second permit, which no command here
    // can have
    let far = "99999999999999";
    let free = "SET l 3";
    let mine = &*format!("SET l 2;ZADD {LEASES} {far} {A}");
    let others = &*format!("SET l 0;ZADD {LEASES} {far} {B}");
    let expired = &*format!("SET l 1;ZADD {LEASES} 7 {A} 8 {B}");
    let no_counter = &*format!("ZADD {LEASES} {far} {A} 8 {B}");
    let all = [free, mine, others, expired, no_counter];
    let keys = [LEASES, L];
    for count in ["1", "2"] {
        let args = [A, "30000", count, "3", "c"];
        of("permits/acquire", &keys, &args, &all);
        of("permits/acquire", &keys, &args, &[""]);
    }
    for total in ["0", "3"] {
        of("permits/release", &keys, &[A, "0", "c", total], &all);
        of("permits/force_release", &keys, &["c", total], &all);
    }
    of("permits/release", &keys, &[A, "1", "c", "3"], &[mine]);
    let line = format!(
        "ZADD {PLACES} 1 {B} 2 {A};PEXPIRE {PLACES} 600000;ZADD {WAITERS} {far} {B} {far} {A}"
    );
    let dead = format!("ZADD {PLACES} 1 {B};ZADD {WAITERS} 7 {B};PEXPIRE {WAITERS} 600000");
    let fair = [LEASES, L, PLACES, WAITERS];
    for state in all {
        for queue in [&line, &dead] {
            let state = &*format!("{state};{queue}");
            let acquire = |waits| [A, "30000", "1", "3", "c", "15000", waits];
            of("fair_permits/acquire", &fair, &acquire("0"), &[state]);
            of("fair_permits/acquire", &fair, &acquire("1"), &[state]);
            of("fair_permits/release", &fair, &[A, "0", "c", "3"], &[state]);
        }
    }
    let acquire = [A, "30000", "1", "3", "c", "15000", "1"];
    of("fair_permits/acquire", &fair, &acquire, &all);
    of("fair_permits/release", &fair, &[A, "0", "c", "3"], &all);
    of("fair_permits/release", &fair, &[A, "1", "c", "3"], &[mine]);
    of("permits/release_record", &[LEASES], &[A, "0", "c"], &all);
    of("permits/renew", &[LEASES], &[A, "30000"], &all);
    let two = leases(&[A, A], "30000");
    let second = &*format!("{mine};ZADD m {far} {A}");
    of("permits/renew", &[LEASES, "m"], &two, &[mine, second]);
    let moves = [A, "c:1", "30000"];
    of("permits/transfer", &[LEASES], &moves, &[mine, others]);
    of("permits/inspect", &[LEASES], &[], &all);
    of("permits/available", &keys, &["3"], &all);
    for total in ["1", "9"] {
        of("permits/set_total", &keys, &[total, "c"], &all);
    }
    let keys = ["request", L, LEASES];
    for total in ["0", "1", "9"] {
        of("semaphore/try_set", &keys, &[total, "c"], &all);
    }
    for count in ["2", "-2"] {
        of("semaphore/add", &keys, &[count, "c"], &all);
    }
    let (latch, callers) = (
        ["request", L, "callers"],
        &*format!("{free};HSET callers me 1"),
    );
    let last = "SET l 1;HSET callers x 1";
    for caller in ["", "me", "you"] {
        of(
            "latch/count_down",
            &latch,
            &[caller, "c"],
            &[free, callers, last, ""],
        );
    }
    of(
        "latch/try_set",
        &latch,
        &["3", "c"],
        &[free, "", "HSET callers x 1"],
    );
    of("latch/count", &[L], &[], &[free, ""]);
    let noted = "SET n 7-import PX 20000";
    let (later, written) = ("SET n 9-report PX 20000", ["30000", "7", "import"]);
    of("note/write", &["n"], &written, &["", noted, later]);
    of("note/erase", &["n"], &["7"], &["", noted, later]);
    of("note/read", &["n"], &[], &["", noted]);
    of("semaphore/drain", &keys, &[], &all);
    of("semaphore/forget", &["request", LEASES], &[A], &all);
    cases
}

impl Case {
    /// Returns a case for each state.
    fn in_states(
        script: &'static str,
        keys: &[&'static str],
        args: &[&str],
        states: &[&str],
    ) -> Vec<Self> {
        let of = |state: &&str| Self {
            script,
            state: (*state).to_owned(),
            keys: keys.to_vec(),
            args: args.iter().map(ToString::to_string).collect(),
        };
        states.iter().map(of).collect()
    }

    fn commands(&self) -> Vec<Vec<&str>> {
        self.state
            .split(';')
            .filter(|command| !command.is_empty())
            .map(|command| command.split(' ').collect())
            .collect()
    }

    fn set_up(&self, bench: &Bench) {
        bench.set_up(&["FLUSHALL"]);
        for command in self.commands() {
            bench.set_up(&command);
        }
    }

    fn eval(&self) -> Vec<String> {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        eval(&source(self.script), &self.keys, &args)
    }
}

fn texts(parts: &[String]) -> Vec<&str> {
    parts.iter().map(String::as_str).collect()
}

/// Returns the commands that a script calls.
fn commands_of(script: &str) -> BTreeSet<String> {
    let source = source(script);
    let calls = source.split("call('").skip(1);
    calls
        .map(|rest| rest.split('\'').next().unwrap().to_owned())
        .collect()
}

/// Returns whether the script, or the renewal of one of several locks, was refused.
fn is_refused(script: &str, reply: &Reply) -> bool {
    let one = |answers: &[Reply]| script.ends_with("renew") && answers.contains(&Reply::Int(-2));
    reply.is_error() || matches!(reply, Reply::List(answers) if one(answers))
}

/// Compares snapshots. A TTL that was set and restored may be a few milliseconds off, as `PTTL` and
/// `PX` read the clock separately.
fn same(before: &[(String, Reply, i64)], after: &[(String, Reply, i64)]) -> bool {
    before.len() == after.len()
        && before.iter().zip(after).all(|(before, after)| {
            (&before.0, &before.1) == (&after.0, &after.1)
                && (before.2 < 0) == (after.2 < 0)
                && (before.2 - after.2).abs() <= 3
        })
}

#[test]
fn every_script_has_cases() {
    let tested: BTreeSet<String> = cases().iter().map(|case| case.script.to_owned()).collect();
    assert_eq!(tested, scripts::names());
}

/// Scripts that fail if a TTL ends.
const KNOWN_LATE: [&str; 0] = [];

/// No script fails after its first write: runs each script, in each state, without each of its
/// commands.
#[test]
fn a_script_that_is_refused_a_command_has_changed_nothing() {
    let bench = Bench::real();
    let mut limited = bench.server.wire();
    bench.set_up(&["ACL", "SETUSER", "limited", "on", ">pw"]);
    limited.call(&["AUTH", "limited", "pw"]).unwrap();
    let (mut changed, mut refusals) = (BTreeSet::new(), 0);
    for case in cases() {
        for denied in commands_of(case.script) {
            case.set_up(&bench);
            bench.set_up(&[
                "ACL",
                "SETUSER",
                "limited",
                "reset",
                "on",
                ">pw",
                "~*",
                "&*",
                "+@all",
                &format!("-{denied}"),
            ]);
            let before = bench.snapshot();
            let reply = limited.call(&texts(&case.eval())).unwrap();
            if is_refused(case.script, &reply) {
                refusals += 1;
                // of several locks, those that were not refused are renewed
                let renewed: Vec<&str> = match &reply {
                    Reply::List(answers) => case
                        .keys
                        .iter()
                        .zip(answers)
                        .filter(|(_, is)| **is == Reply::Int(1))
                        .map(|(key, _)| *key)
                        .collect(),
                    _ => vec![],
                };
                let refused = |(key, ..): &(String, Reply, i64)| {
                    !renewed
                        .iter()
                        .any(|lock| key == lock || key.starts_with(&format!("{{{lock}}}")))
                };
                let before: Vec<_> = before.into_iter().filter(refused).collect();
                let after: Vec<_> = bench.snapshot().into_iter().filter(refused).collect();
                if !same(&before, &after) && changed.insert((case.script, denied.clone())) {
                    println!(
                        "{} without {denied}, {}: {before:?} -> {after:?}",
                        case.script, case.state
                    );
                }
            }
        }
    }
    assert!(
        refusals > 200,
        "only {refusals} refusals: the check is broken"
    );
    assert!(
        changed.is_empty(),
        "refused, and changed something all the same: {changed:?}"
    );
}

/// A script that is refused for lack of memory has changed nothing. A server that is out of memory
/// refuses some commands, but only until a script has written.
#[test]
fn a_script_refused_for_want_of_memory_has_changed_nothing() {
    let bench = Bench::real();
    let mut refusals = 0;
    for case in cases() {
        bench.set_up(&["CONFIG", "SET", "maxmemory", "0"]);
        case.set_up(&bench);
        bench.set_up(&["CONFIG", "SET", "maxmemory", "1"]);
        let before = bench.snapshot();
        let reply = bench.call(&texts(&case.eval()));
        if is_refused(case.script, &reply) {
            refusals += 1;
            assert_eq!(
                bench.snapshot(),
                before,
                "{}, {}: {reply:?}",
                case.script,
                case.state
            );
        }
    }
    assert!(
        refusals > 10,
        "only {refusals} refusals: the check is broken"
    );
}

/// The remaining TTL of a key while a script runs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Left {
    Time,
    /// Less than a millisecond: the key exists, and `PTTL` returns 0.
    AMoment,
    Nothing,
}

/// Each key with a TTL has ended just before a script runs, or is about to end. A moment is too
/// short to be timed, so the test makes `PTTL` return 0.
#[test]
fn a_ttl_that_ends_makes_no_script_fail() {
    let bench = Bench::real();
    let mut failures = BTreeSet::new();
    for case in cases() {
        case.set_up(&bench);
        let ending: Vec<String> = bench
            .snapshot()
            .into_iter()
            .filter(|(_, _, expires)| *expires > 0)
            .map(|(key, ..)| key)
            .collect();
        for choice in 0..3_usize.pow(ending.len() as u32) {
            let left =
                |at: u32| [Left::Time, Left::AMoment, Left::Nothing][choice / 3_usize.pow(at) % 3];
            let keys: Vec<_> = (0..)
                .zip(&ending)
                .map(|(at, key)| (key.as_str(), left(at)))
                .collect();
            case.set_up(&bench);
            let mut moments = String::new();
            for (key, left) in &keys {
                match left {
                    Left::Time => {}
                    Left::AMoment => _ = write!(moments, "['{key}'] = true, "),
                    Left::Nothing => bench.set_up(&["DEL", key]),
                }
            }
            let script = format!(
                "local server, moments = redis, {{{moments}}} \
                 local function ask(how) return function(what, ...) \
                 if what == 'pttl' and moments[...] then return 0 end return how(what, ...) end end \
                 local redis = {{call = ask(server.call), pcall = ask(server.pcall), error_reply = server.error_reply}}\n{}",
                source(case.script)
            );
            let args: Vec<&str> = case.args.iter().map(String::as_str).collect();
            let reply = bench.call(&texts(&eval(&script, &case.keys, &args)));
            if is_refused(case.script, &reply) && failures.insert(case.script) {
                println!("{}, {}, {keys:?}: {reply:?}", case.script, case.state);
            }
            // a lease of 0 means no TTL
            let endless = matches!(
                (case.script, args.as_slice()),
                ("signal/acquire" | "string/transfer", [.., "0"])
            );
            for (key, _) in keys.iter().filter(|_| !endless) {
                assert_ne!(
                    bench.expires(key),
                    -1,
                    "{}, {}: {key} lives for ever",
                    case.script,
                    case.state
                );
            }
        }
    }
    assert_eq!(failures.into_iter().collect::<Vec<_>>(), KNOWN_LATE);
}
