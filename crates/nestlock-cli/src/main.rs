//! `nestlock`: distributed locks on Redis and Valkey, on the command line. See README.md.

mod acl;
mod args;
mod bench;
mod by_hand;
mod child;
mod connect;
mod deadline;
mod doctor;
mod ears;
mod exec;
mod family;
mod guard;
mod kind;
mod locks;
mod ls;
mod node;
mod raw;
mod search;
mod signals;
mod stderr;
mod terminal;
mod top;
mod wait;
mod whose;

use std::{
    io::{self, Write},
    panic,
    process::ExitCode,
};

use args::{Args, Command};
use clap::{CommandFactory, Parser};
use stderr::warn;
use tokio::runtime::Runtime;

/// Exit code for wrong use. clap's own code could be taken for that of the command.
const USAGE: u8 = 64;
/// Exit code if nestlock itself failed.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    let code = run();
    stderr::finish();
    code
}

fn run() -> ExitCode {
    if let Some(part) = guard::Part::asked_for() {
        return part.run();
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let code = if error.use_stderr() { USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let outcome = runtime().map_err(Into::into).and_then(|runtime| {
        runtime.block_on(async {
            match args.command {
                Command::Exec(exec) => exec::run(&args.server, &exec).await,
                Command::Force(force) => by_hand::force(&args.server, &force).await,
                Command::Release(release) => by_hand::release(&args.server, &release).await,
                Command::Extend(extend) => by_hand::extend(&args.server, &extend).await,
                Command::Who(who) => by_hand::who(&args.server, &who).await,
                Command::Ls(ls) => ls::ls(&args.server, &ls).await,
                Command::Top(top) => top::top(&args.server, &top).await,
                Command::Doctor(doctor) => doctor::doctor(&args.server, &doctor).await,
                Command::Acl(acl) => acl::acl(&args.server, &acl).await,
                Command::Bench(bench) => bench::bench(&args.server, &bench).await,
                Command::Completions { shell } => Ok(completions(shell)),
                Command::Man => man(),
            }
        })
    });
    outcome.map_or_else(
        |error| {
            warn(&error);
            ExitCode::from(if is_wrong_use(&error) { USAGE } else { FAILED })
        },
        ExitCode::from,
    )
}

fn runtime() -> io::Result<Runtime> {
    // tokio panics if no file descriptor is left for signals, and the hook would print that
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let runtime = panic::catch_unwind(|| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
    });
    panic::set_hook(hook);
    runtime.unwrap_or_else(|_| Err(io::Error::other("Too many open files: see ulimit -n")))
}

fn completions(shell: clap_complete::Shell) -> u8 {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "nestlock", &mut text);
    say(String::from_utf8_lossy(&text).trim_end());
    0
}

/// Prints one page for all commands.
fn man() -> Result<u8, Failure> {
    let (mut text, command) = (Vec::new(), Args::command());
    let page = clap_mangen::Man::new(command.clone());
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    for command in command.get_subcommands() {
        let name = command.get_name().to_owned();
        let page = clap_mangen::Man::new(command.clone().bin_name(format!("nestlock {name}")));
        writeln!(text, ".SH NESTLOCK {}", name.to_uppercase())?;
        page.render_description_section(&mut text)?;
        page.render_options_section(&mut text)?;
        page.render_extra_section(&mut text)?;
    }
    say(String::from_utf8_lossy(&text).trim_end());
    Ok(0)
}

/// Returns whether an error is wrong use, whichever server it is for: the tool is not at fault.
fn is_wrong_use(error: &Failure) -> bool {
    use nestlock::Error::{InvalidConfig, InvalidLease, InvalidName, InvalidOwner};
    let said = error.downcast_ref::<nestlock::Error>();
    error.is::<args::Unusable>()
        || said.is_some_and(|error| {
            matches!(
                error,
                InvalidConfig { .. }
                    | InvalidLease { .. }
                    | InvalidName { .. }
                    | InvalidOwner { .. }
            )
        })
}

/// The error that ends the program. It is printed, and the exit code is [`FAILED`] or [`USAGE`].
type Failure = Box<dyn std::error::Error>;

/// Prints a line. Ends the program if that fails, for example because the reader has closed the
/// pipe.
fn say(line: impl std::fmt::Display) {
    if let Err(error) = writeln!(io::stdout(), "{line}") {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            // the exit code of a program that the signal has ended
            stderr::finish();
            std::process::exit(128 + nix::sys::signal::Signal::SIGPIPE as i32);
        }
        warn(format_args!("cannot write: {error}"));
        stderr::finish();
        std::process::exit(FAILED.into());
    }
}
