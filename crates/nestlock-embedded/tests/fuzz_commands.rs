//! Random commands to the embedded server and to a real one: every reply, every key and every message must be the same,
//! byte for byte.
#![cfg(unix)]

mod support;

use support::{
    grammar::{BIG_HASH, COMMANDS, Grammar},
    play::{Check, Command, LINES, Rules, Step, Tally},
    resp,
    rng::Rng,
    rounds::{Report, once, play_rounds},
    servers::Pair,
};

const RULES: Rules = Rules {
    lines: LINES,
    loose: &[BIG_HASH],
    content: Check::Exact,
};

const MAIN: [usize; 2] = [0, 1];
const LISTENERS: [usize; 2] = [2, 3];

/// About 2,000 commands, derived from the seed alone.
fn round(seed: u64) -> Vec<Step> {
    let (mut grammar, mut rng, mut steps) = (Grammar::new(seed), Rng::new(!seed), vec![]);
    for part in 0..8 {
        if part == 6 {
            expire_some(&mut grammar, &mut rng, &mut steps);
        }
        for _ in 0..3 {
            for line in LISTENERS {
                let protocol = RULES.lines[line].protocol;
                steps.extend(
                    (0..rng.below(6)).map(|_| Step::Send(line, grammar.listener_command(protocol))),
                );
            }
            for line in MAIN {
                steps.extend((0..rng.between(20, 60)).map(|_| Step::Send(line, grammar.command())));
            }
        }
        steps.push(Step::State);
        steps.push(Step::Scan(grammar.scan_options()));
    }
    steps
}

/// Commands whose replies do not depend on timing, then a pause, then any commands.
fn expire_some(grammar: &mut Grammar, rng: &mut Rng, steps: &mut Vec<Step>) {
    steps.push(Step::State);
    let mut keys = Grammar::all_keys();
    rng.shuffle(&mut keys);
    keys.truncate(rng.between(4, keys.len()));
    steps.extend(
        keys.iter()
            .map(|key| Step::Send(MAIN[0], grammar.short_lived(key))),
    );
    steps.push(Step::Wait(Grammar::SHORT));
    grammar.past = true;
}

/// More than 200,000 commands, a third of them through Lua.
#[test]
fn random_commands_are_answered_as_by_redis() {
    let mut report = Report::default();
    std::thread::scope(|scope| {
        let part =
            |first| scope.spawn(move || play_rounds(&Pair::start(), &RULES, first, 53, round));
        for part in [part(0), part(1_000_000)] {
            report.add(part.join().expect("no panic"));
        }
    });
    println!("{} commands in {} rounds", report.commands, report.rounds);
    report.assert_none();
    if report.is_partial() {
        return;
    }
    assert!(report.commands > 200_000, "{} commands", report.commands);
    let (lua, all) = report
        .tally
        .iter()
        .fold((0, 0), |(lua, all), (name, count)| {
            let count = count.accepted + count.refused;
            (
                if name.starts_with("EVAL") {
                    lua + count
                } else {
                    lua
                },
                all + count,
            )
        });
    assert!(lua * 10 > all * 3, "{lua} of {all} commands were scripts");
    for (name, weight) in COMMANDS.iter().filter(|(name, _)| *name != "QUIT") {
        let count = report
            .tally
            .get(&name.to_ascii_uppercase())
            .cloned()
            .unwrap_or_default();
        let unknown = ["NOSUCH", "GETT", "", "\u{fc}ber"].contains(name);
        // replies on listening lines are not counted
        let refused = count.refused >= 5 || *weight == 0;
        assert!(
            refused && (unknown || count.accepted >= 50),
            "{name}: {count:?}"
        );
    }
}

// --- the gate notices differences ---

fn words(line: &str) -> Command {
    Command::new(&resp::words(line).expect("words"), Check::Exact)
}

/// Some data of every type on both servers.
fn everything() -> Vec<Step> {
    let lines = [
        (2, "SUBSCRIBE c1"),
        (3, "PSUBSCRIBE c*"),
        (3, "SSUBSCRIBE c2"),
        (0, "MSET s1 text s2 10"),
        (0, "PEXPIRE s2 5000000"),
        (0, "HSET h1 f1 1 f2 2 f3 3"),
        (0, "RPUSH l1 a b c a"),
        (0, "ZADD z1 1 a 2 b 3 c"),
        (0, "PEXPIREAT z1 4000000000000"),
        (0, "SELECT 1"),
        (0, "SET s1 other"),
        (0, "SCRIPT LOAD \"return 1\""),
    ];
    lines
        .map(|(line, text)| Step::Send(line, words(text)))
        .to_vec()
}

#[test]
fn whatever_is_done_to_one_server_only_is_noticed() {
    let pair = Pair::start();
    let after = [
        Step::Send(
            0,
            words("EVALSHA e0e1f9fabfc9d4800c877a703b823ac0578ff8db 0"),
        ),
        Step::State,
    ];
    let untouched = [everything(), after.to_vec()].concat();
    assert!(once(&pair, &RULES, &untouched, &mut Tally::new()).is_none());
    let perturbations = [
        "SET s9 new",
        "SET \"\" new",
        "DEL s1",
        "APPEND s1 x",
        "PERSIST s2",
        "PEXPIRE s2 5060000",
        "PEXPIREAT z1 4000000000001",
        "PEXPIRE l1 5000000",
        "HSET h1 f2 3",
        "EVAL \"redis.call('hdel', 'h1', 'f1') redis.call('hset', 'h1', 'f1', '1')\" 0",
        "LSET l1 -1 b",
        "RPOPLPUSH l1 l1",
        "ZINCRBY z1 0.5 b",
        "ZADD z1 0 \"\"",
        "EVAL \"redis.call('select', 1) redis.call('append', 's1', 'x')\" 0",
        "PUBLISH c1 extra",
        "PUBLISH c9 extra",
        "SPUBLISH c2 extra",
        "SCRIPT FLUSH",
    ];
    for text in perturbations {
        // the embedded server does not have it
        let text = text.replace(
            "RPOPLPUSH l1 l1",
            "EVAL \"redis.call('lpush', 'l1', redis.call('rpop', 'l1'))\" 0",
        );
        let steps = [
            everything(),
            vec![Step::Perturb(words(&text))],
            after.to_vec(),
        ]
        .concat();
        assert!(
            once(&pair, &RULES, &steps, &mut Tally::new()).is_some(),
            "not noticed: {text}"
        );
    }
}

/// A difference in the middle of a round is cut down to a short list of commands that shows its
/// cause.
#[test]
fn a_difference_in_mid_round_is_cut_down_to_its_cause() {
    let mut steps = round(1);
    steps.retain(
        |step| !matches!(step, Step::Send(_, command) if command.name().starts_with("FLUSH")),
    );
    steps.insert(400, Step::Perturb(words("SET perturbed x")));
    let report = play_rounds(&Pair::start(), &RULES, 1, 1, |_| steps.clone());
    let failure = report.failures.first().expect("a difference");
    let short = failure.split("shortest list").nth(1).expect("a list");
    assert!(short.contains("ours only: SET perturbed x"), "{failure}");
    assert!(
        short.lines().filter(|line| line.starts_with("  ")).count() < 8,
        "{failure}"
    );
}
