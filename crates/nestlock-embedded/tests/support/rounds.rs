//! Many rounds, each derived from its seed alone. The first difference of a round is reduced to a short list of steps.

use std::{
    collections::BTreeMap,
    env,
    fmt::Write as _,
    time::{Duration, Instant},
};

use super::{
    play::{Difference, Play, Rules, Step, Tally},
    servers::Pair,
};

/// What was compared.
#[derive(Debug, Default)]
pub struct Report {
    pub rounds: usize,
    pub commands: usize,
    pub tally: Tally,
    pub failures: Vec<String>,
}

/// One example of each kind of difference, most frequent first: useful if there are many. `NESTLOCK_FUZZ_SURVEY=1`.
fn survey(pair: &Pair, rules: &Rules, rounds: impl Iterator<Item = Vec<Step>>) -> String {
    let mut sorts: BTreeMap<String, (usize, Difference)> = BTreeMap::new();
    for steps in rounds {
        let mut play = Play::new(pair.addrs(), rules).expect("a round begins");
        play.survey = Some(Vec::new());
        let last = play.run(&steps);
        for found in play.survey.take().into_iter().flatten().chain(last) {
            let head = |text: &str| {
                text.split_whitespace()
                    .take(4)
                    .collect::<Vec<_>>()
                    .join(" ")
            };
            let command: Vec<&str> = found.what.split_whitespace().collect();
            let name = command
                .iter()
                .skip_while(|word| !word.ends_with(':'))
                .nth(1)
                .unwrap_or(&"");
            let digits = |text: String| text.replace(|letter: char| letter.is_ascii_digit(), "");
            let sort = digits(format!(
                "{} {} / {}",
                name.to_uppercase(),
                head(&found.real),
                head(&found.ours)
            ));
            sorts.entry(sort).or_insert((0, found)).0 += 1;
        }
        play.end();
    }
    let mut sorts: Vec<_> = sorts.into_values().collect();
    sorts.sort_by_key(|(count, _)| usize::MAX - count);
    let lines: Vec<String> = sorts
        .iter()
        .map(|(count, found)| format!("{count} times: {found}"))
        .collect();
    format!("{} kinds of differences\n{}", lines.len(), lines.join("\n"))
}

/// Enough to see a pattern.
const MOST_FAILURES: usize = 5;

/// Plays the rounds of these seeds. `NESTLOCK_FUZZ_SEED=7` plays only that one, `NESTLOCK_FUZZ_FACTOR=10` ten times as
/// many.
pub fn play_rounds(
    pair: &Pair,
    rules: &Rules,
    first: u64,
    count: u64,
    make: impl Fn(u64) -> Vec<Step>,
) -> Report {
    let number = |name: &str| {
        env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().expect("a number"))
    };
    let seeds = match number("NESTLOCK_FUZZ_SEED") {
        Some(seed) => seed..seed + 1,
        None => first..first + count * number("NESTLOCK_FUZZ_FACTOR").unwrap_or(1),
    };
    let wants_survey = env::var_os("NESTLOCK_FUZZ_SURVEY").is_some();
    assert!(!wants_survey, "{}", survey(pair, rules, seeds.map(make)));
    let mut report = Report::default();
    for seed in seeds {
        let steps = make(seed);
        report.rounds += 1;
        report.commands += steps
            .iter()
            .filter(|step| matches!(step, Step::Send(..)))
            .count();
        let Some(found) = once(pair, rules, &steps, &mut report.tally) else {
            continue;
        };
        report
            .failures
            .push(describe(pair, rules, seed, &steps, &found));
        if report.failures.len() == MOST_FAILURES {
            break;
        }
    }
    report
}

impl Report {
    /// Whether only one seed was requested.
    pub fn is_partial(&self) -> bool {
        self.rounds <= 2
    }

    /// Panics if the two servers ever disagreed.
    pub fn assert_none(&self) {
        let count = self.failures.len();
        assert!(
            count == 0,
            "{count} rounds of {} differ:\n\n{}",
            self.rounds,
            self.failures.join("\n")
        );
    }

    pub fn add(&mut self, other: Self) {
        self.rounds += other.rounds;
        self.commands += other.commands;
        self.failures.extend(other.failures);
        for (name, count) in other.tally {
            self.tally.entry(name).or_default().add(count);
        }
    }
}

/// Plays steps on two servers without data.
pub fn once(pair: &Pair, rules: &Rules, steps: &[Step], tally: &mut Tally) -> Option<Difference> {
    let broken = |what: &dyn std::fmt::Display| Difference {
        at: 0,
        what: format!("cannot begin a round: {what}"),
        real: String::new(),
        ours: String::new(),
    };
    let mut play = match Play::new(pair.addrs(), rules) {
        Ok(play) => play,
        Err(error) => return Some(broken(&error)),
    };
    let found = play.run(steps);
    for (name, count) in std::mem::take(&mut play.tally) {
        tally.entry(name).or_default().add(count);
    }
    play.end();
    found
}

fn describe(pair: &Pair, rules: &Rules, seed: u64, steps: &[Step], found: &Difference) -> String {
    let mut text = format!(
        "--- seed {seed}, step {} of {}\n{found}\n",
        found.at,
        steps.len()
    );
    let (short, found) = shorten(pair, rules, &steps[..=found.at.min(steps.len() - 1)]);
    let _ = match &found {
        Some(_) => writeln!(text, "shortest list of steps that was found:"),
        None => writeln!(
            text,
            "did not recur with the same steps; these were the last of them:"
        ),
    };
    let from = short.len().saturating_sub(60);
    for step in &short[from..] {
        let _ = writeln!(
            text,
            "  {}",
            step.to_string().chars().take(1000).collect::<String>()
        );
    }
    if let Some(found) = found {
        let _ = writeln!(text, "after which\n{found}");
    }
    text
}

/// Removes steps that the difference does not need: halves first, then smaller and smaller parts.
fn shorten(pair: &Pair, rules: &Rules, steps: &[Step]) -> (Vec<Step>, Option<Difference>) {
    let start = Instant::now();
    let differs = |steps: &[Step]| once(pair, rules, steps, &mut Tally::new());
    let mut short = steps.to_vec();
    let Some(mut found) = differs(&short) else {
        return (short, None);
    };
    let mut part = short.len().div_ceil(2);
    loop {
        let mut from = 0;
        while from < short.len() && start.elapsed() < Duration::from_secs(30) {
            let to = (from + part).min(short.len());
            let without = [&short[..from], &short[to..]].concat();
            if let Some(difference) = differs(&without).filter(|_| !without.is_empty()) {
                // the steps after the difference are not needed either
                short = without;
                short.truncate(difference.at + 1);
                found = difference;
            } else {
                from = to;
            }
        }
        if part == 1 {
            return (short, Some(found));
        }
        part = part.div_ceil(2);
    }
}
