//! A soak test: processes take locks, while faults hit them, the servers and the connections
//! between them; then a checker reads all histories. README.md says how to run it and what is
//! checked.

#![allow(clippy::print_stdout, reason = "a program that reports")]

mod check;
mod clock;
mod handover;
mod heartbeat;
mod history;
mod kinds;
mod nemesis;
mod process;
mod run;
mod servers;
mod settings;
mod support;
mod task;
mod topology;
mod worker;

use std::{path::Path, process::ExitCode};

use settings::Settings;

const USAGE: &str = "\
nestlock-soak run [seconds=60] [seed=random] [mode=none|aof|plain|all] [only=KIND,..] [faults=SORT,..] [workers=4] [tasks=3] [keep=no]
nestlock-soak scenario FILE [..]   the faults of FILE (a run's journal), instead of random ones
nestlock-soak check FOLDER         reads the histories of a run once more
nestlock-soak worker ..            what `run` starts";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["run", ref rest @ ..] => Settings::parse(rest).and_then(|settings| run::run(&settings)),
        ["scenario", file, ref rest @ ..] => {
            Settings::of_scenario(Path::new(file), rest).and_then(|settings| run::run(&settings))
        }
        ["check", folder] => run::check_again(Path::new(folder)),
        ["worker", ref rest @ ..] => Settings::parse(rest).map(|settings| worker::run(&settings)),
        ["hog", ms] => ms.parse().map_err(|_| USAGE.to_owned()).map(nemesis::hog),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
