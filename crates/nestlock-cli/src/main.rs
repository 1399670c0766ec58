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
mod failure;
mod family;
mod guard;
mod kind;
mod locks;
mod ls;
mod node;
mod raw;
mod runtime;
mod search;
mod signals;
mod stderr;
mod stdout;
mod terminal;
mod top;
mod wait;
mod whose;

use std::{io::Write, process::ExitCode};

use args::{Args, Command};
use clap::{CommandFactory, Parser};
use failure::{FAILED, Failure, USAGE, is_wrong_use};
use runtime::runtime;
use stderr::warn;
use stdout::say;

fn main() -> ExitCode {
    let code = run();
    stderr::finish();
    code
}

fn run() -> ExitCode {
    if let Some(role) = guard::Role::asked_for() {
        return role.run();
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
