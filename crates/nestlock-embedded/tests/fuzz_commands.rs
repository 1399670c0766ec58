//! Random commands, byte for byte the same for the embedded server and for a real one: every answer, every key, every
//! message must be the same.
#![allow(unreachable_pub, reason = "what the test binaries share is public to them")]

mod support;

use support::{
    grammar::{BIG_HASH, COMMANDS, Grammar},
    play::{Check, Command, Line, Rules, Step, Tally},
    rng::Rng,
    rounds::{Report, once, play_rounds},
    servers::Pair,
};

const RULES: Rules = Rules {
    lines: &[
        Line { protocol: 2, listens: false },
        Line { protocol: 3, listens: false },
        Line { protocol: 2, listens: true },
        Line { protocol: 3, listens: true },
    ],
    loose: &[BIG_HASH],
    content: Check::Exact,
};

const MAIN: [usize; 2] = [0, 1];
const LISTENERS: [usize; 2] = [2, 3];

/// About 2,000 commands, made from the seed alone.
fn round(seed: u64) -> Vec<Step> {
    let (mut grammar, mut rng, mut steps) = (Grammar::new(seed), Rng::new(!seed), vec![]);
    for part in 0..8 {
        if part == 6 {
            expire_some(&mut grammar, &mut rng, &mut steps);
        }
        for _ in 0..3 {
            for line in LISTENERS {
                let protocol = RULES.lines[line].protocol;
                steps.extend((0..rng.below(6)).map(|_| Step::Send(line, grammar.listener_command(protocol))));
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

/// Commands whose answers do not depend on the moment at which they come, then a pause, then whatever comes.
fn expire_some(grammar: &mut Grammar, rng: &mut Rng, steps: &mut Vec<Step>) {
    steps.push(Step::State);
    let mut keys = Grammar::all_keys();
    rng.shuffle(&mut keys);
    keys.truncate(rng.between(4, keys.len()));
    steps.extend(keys.iter().map(|key| Step::Send(MAIN[0], grammar.short_lived(key))));
    steps.push(Step::Wait(Grammar::SHORT));
    grammar.past = true;
}

fn rounds(pair: &Pair, first: u64, count: u64) -> Report {
    play_rounds(pair, &RULES, first, count, round)
}

/// 100 rounds of some 2,000 commands, on as many threads as there are pairs of servers.
#[test]
fn random_commands_are_answered_as_by_redis() {
    let mut report = Report::default();
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..2).map(|part| scope.spawn(move || rounds(&Pair::start(), part * 1_000_000, 53))).collect();
        parts.into_iter().for_each(|part| report.add(part.join().unwrap()));
    });
    println!("{} commands in {} rounds, {:#?}", report.commands, report.rounds, report.tally);
    report.assert_none();
}

#[test]
fn play() {
    let _ = (COMMANDS, Tally::new(), once, Command::name);
}
