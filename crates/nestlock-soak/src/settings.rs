//! The settings of a run, from its own command line or a worker's, and what follows from the seed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{clock::SECOND, kinds::Kind};

/// How long one kind of lock has most of the work, in nanoseconds.
pub(crate) const HOT: u64 = 3 * SECOND / 2;
pub(crate) const POLL_CAP: Duration = Duration::from_millis(500);
pub(crate) const OUTAGE_PATIENCE: Duration = Duration::from_secs(3);
pub(crate) const FAIR_PATIENCE: Duration = Duration::from_millis(1500);
pub(crate) const LONGEST_WATCHDOG: Duration = Duration::from_secs(2);
pub(crate) const LONGEST_LEASE: Duration = Duration::from_millis(1500);

/// Which faults a run has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No faults: nothing may be lost.
    None,
    /// All faults that must not break exclusion.
    Aof,
    /// Also faults in which a server loses its data.
    Plain,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Aof => "aof",
            Self::Plain => "plain",
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Settings {
    words: BTreeMap<String, String>,
    pub(crate) seed: u64,
    pub(crate) seconds: u64,
    /// They run one after the other.
    pub(crate) modes: Vec<Mode>,
    pub(crate) only: Vec<Kind>,
    /// Kinds of faults; all of them if empty.
    pub(crate) faults: Vec<String>,
    pub(crate) workers: usize,
    pub(crate) tasks: usize,
    /// How long processes may take to finish, in seconds.
    pub(crate) patience: u64,
    pub(crate) keep: bool,
    /// A journal whose faults are repeated.
    pub(crate) schedule: Option<PathBuf>,
}

impl Settings {
    pub(crate) fn parse(words: &[&str]) -> Result<Self, String> {
        let split = |word: &&str| {
            let (name, value) = word
                .split_once('=')
                .ok_or_else(|| format!("not NAME=VALUE: {word}"))?;
            Ok((name.to_lowercase(), value.to_owned()))
        };
        Self::of(words.iter().map(split).collect::<Result<_, String>>()?)
    }

    fn of(mut words: BTreeMap<String, String>) -> Result<Self, String> {
        if words.get("seed").is_none_or(|seed| seed == "random") {
            words.insert(
                "seed".to_owned(),
                rand::rng().random_range(0..u64::from(u32::MAX)).to_string(),
            );
        }
        let get =
            |name: &str, default: &str| words.get(name).map_or(default, String::as_str).to_owned();
        let modes = match &*get("mode", "all") {
            "none" => vec![Mode::None],
            "aof" => vec![Mode::Aof],
            "plain" => vec![Mode::Plain],
            "all" => vec![Mode::None, Mode::Aof, Mode::Plain],
            other => {
                return Err(format!(
                    "no mode {other}: there is none, aof, plain and all"
                ));
            }
        };
        let list = |name: &str| -> Vec<String> {
            get(name, "")
                .split(',')
                .filter(|word| !word.is_empty())
                .map(str::to_owned)
                .collect()
        };
        let only: Vec<Kind> = list("only")
            .iter()
            .map(|kind| Kind::named(kind))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            seed: number(&get("seed", "0"))?,
            seconds: number(&get("seconds", "60"))?,
            modes,
            only: if only.is_empty() {
                Kind::ALL.to_vec()
            } else {
                only
            },
            faults: list("faults"),
            workers: number(&get("workers", "4"))?,
            tasks: number(&get("tasks", "3"))?,
            patience: number(&get("patience", "150"))?,
            keep: get("keep", "no") == "yes",
            schedule: words.get("schedule").map(PathBuf::from),
            words,
        })
    }

    /// Reads a journal, whose first line has the settings of its run. `words` take precedence over
    /// them.
    pub(crate) fn of_scenario(file: &Path, words: &[&str]) -> Result<Self, String> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let first = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("# "))
            .ok_or("its first line has no settings")?;
        let schedule = format!("schedule={}", file.display());
        let all: Vec<&str> = first
            .split(' ')
            .chain([&*schedule])
            .chain(words.iter().copied())
            .collect();
        Self::parse(&all)
    }

    /// Returns the settings as words of a command line, for one mode.
    pub(crate) fn words(&self, mode: Mode) -> String {
        let mut words = self.words.clone();
        words.insert("mode".to_owned(), mode.name().to_owned());
        words.insert("seconds".to_owned(), self.seconds.to_string());
        words
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Returns a setting that only workers have.
    pub(crate) fn told<T: FromStr>(&self, name: &str) -> T {
        let word = self.words.get(name).and_then(|word| word.parse().ok());
        word.unwrap_or_else(|| panic!("a worker needs {name}=VALUE"))
    }

    pub(crate) fn rng(&self, salt: u64) -> StdRng {
        StdRng::seed_from_u64(self.seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Returns the watchdog timeout of a client.
    pub(crate) fn watchdog(&self, client: usize) -> Duration {
        Duration::from_millis(
            self.rng(7 + client as u64)
                .random_range(900..=LONGEST_WATCHDOG.as_millis() as u64),
        )
    }

    /// Returns the kind of lock that has most of the work at this time.
    pub(crate) fn hot(&self, time: u64) -> Kind {
        self.only[self.rng(1000 + time / HOT).random_range(0..self.only.len())]
    }
}

fn number<T: FromStr>(word: &str) -> Result<T, String> {
    word.parse().map_err(|_| format!("not a number: {word}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_says_itself_again() {
        let settings =
            Settings::parse(&["SECONDS=5", "seed=7", "only=mutex,fair", "mode=all"]).unwrap();
        let again = settings.words(Mode::Aof);
        assert_eq!(again, "mode=aof only=mutex,fair seconds=5 seed=7");
        assert!(
            Settings::parse(&["mode=some"]).is_err() && Settings::parse(&["only=latch"]).is_err()
        );
    }
}
