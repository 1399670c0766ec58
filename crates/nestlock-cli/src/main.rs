//! `nestlock`: distributed locks on Redis and Valkey, on the command line. See README.md.
#![allow(clippy::print_stderr, reason = "it is a program")]

mod args;
mod by_hand;
mod child;
mod connect;
mod exec;
mod kind;
mod signals;

use std::{io::Write, process::ExitCode};

use args::{Args, Command};
use clap::Parser;

/// Wrong use; clap's own code would read as the child's.
const USAGE: u8 = 64;
/// The tool itself failed.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    if let Some(step) = child::Step::asked_for() {
        return step.run();
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    // on this thread, and no other: the child is told of the end of the thread that began it
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let outcome = runtime.map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            match args.command {
                Command::Exec(exec) => exec::run(&args.server, &exec).await,
                Command::Force(force) => by_hand::force(&args.server, &force).await,
                Command::Release(release) => by_hand::release(&args.server, &release).await,
                Command::Extend(extend) => by_hand::extend(&args.server, &extend).await,
                Command::Who(who) => by_hand::who(&args.server, &who).await,
            }
        })
    });
    outcome.map_or_else(
        |error| {
            eprintln!("nestlock: {error}");
            ExitCode::from(if error.is::<args::Unusable>() { USAGE } else { FAILED })
        },
        ExitCode::from,
    )
}

/// What ends the program: an error that is told, and answered with [`FAILED`], or [`USAGE`].
type Failure = Box<dyn std::error::Error>;

/// A line of output. Whoever reads may have enough of it.
fn say(line: impl std::fmt::Display) {
    if let Err(error) = writeln!(std::io::stdout(), "{line}") {
        let is_enough = error.kind() == std::io::ErrorKind::BrokenPipe;
        // as a program that the signal ended
        std::process::exit(if is_enough { 128 + nix::sys::signal::Signal::SIGPIPE as i32 } else { FAILED.into() });
    }
}
