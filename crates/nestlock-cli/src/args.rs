//! What is asked for.

use std::{ffi::OsString, fmt, path::PathBuf, time::Duration};

use clap::{ArgAction, Parser, Subcommand};

use crate::kind::Kind;

#[derive(Debug, Parser)]
#[command(name = "nestlock", version, about = "Distributed locks on Redis and Valkey, on the command line")]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) server: Server,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Where the locks are.
#[derive(Debug, clap::Args)]
pub(crate) struct Server {
    /// The server's URL. Other users see it in the list of processes: prefer the variable
    #[arg(long, global = true, env = "NESTLOCK_URL", hide_env_values = true, value_name = "URL")]
    pub(crate) url: Option<String>,
    /// A file whose first line is the server's URL
    #[arg(long, global = true, env = "NESTLOCK_URL_FILE", value_name = "FILE", conflicts_with = "url")]
    pub(crate) url_file: Option<PathBuf>,
    /// What stands before each name on the server
    #[arg(long, global = true, env = "NESTLOCK_PREFIX", default_value = "", value_name = "TEXT")]
    pub(crate) prefix: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a lock
    Exec(Exec),
    /// Who holds a lock; exit code 1: nobody
    Who(Who),
    /// Free a lock, whoever holds it; exit code 1: nobody held it
    Force(Force),
    /// Give back one hold of an owner; exit code 1: it holds none
    Release(Release),
    /// Let an owner's hold live for at least so long; exit code 1: it holds none
    Extend(Extend),
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: the command's own; 128+N if signal N ended it; 75 (-E) if the lock is busy; 76 (--lost-code) if it was lost;
126, 127 if the command cannot be run or found; 125 if nestlock failed; 64 for wrong use.

The lock is renewed while nestlock runs, and dies with it after the lease. If it cannot be renewed, the command's process
group gets TERM a grace before the lease ends, and KILL when it does: before anybody else can have the lock.
Below another `exec` of the same lock it goes along with that one's hold.")]
pub(crate) struct Exec {
    /// The lock
    pub(crate) name: String,
    /// Of which kind the lock is
    #[arg(long, default_value = "reentrant")]
    pub(crate) kind: Kind,
    /// Share it with other readers: --kind read
    #[arg(short, long, conflicts_with = "kind")]
    pub(crate) shared: bool,
    /// Give up if it is busy for so long: 500ms, 10s, 2m [default: wait for ever]
    #[arg(short, long, value_parser = duration, value_name = "TIME", conflicts_with = "nonblock")]
    pub(crate) wait: Option<Duration>,
    /// Give up at once if it is busy
    #[arg(short, long)]
    pub(crate) nonblock: bool,
    /// After how long without a renewal others may have it
    #[arg(long, value_parser = duration, default_value = "30s", value_name = "TIME")]
    pub(crate) lease: Duration,
    /// How long the command has between TERM and KILL when the lock is lost: a third of the lease at most
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub(crate) grace: Option<Duration>,
    /// The exit code if the lock is busy
    #[arg(short = 'E', long, default_value_t = 75, value_name = "CODE")]
    pub(crate) conflict_exit_code: u8,
    /// The exit code if the lock was lost
    #[arg(long, default_value_t = 76, value_name = "CODE")]
    pub(crate) lost_code: u8,
    /// Take a hold of its own below another exec of the same lock, too, and wait for that one
    #[arg(long)]
    pub(crate) no_inherit: bool,
    /// Run a line of shell instead of a command
    #[arg(short = 'c', long = "command", value_name = "LINE", conflicts_with = "program")]
    pub(crate) line: Option<OsString>,
    /// The command
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "line", action = ArgAction::Append)]
    pub(crate) program: Vec<OsString>,
}

/// Which lock.
#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    /// The lock
    pub(crate) name: String,
    /// Of which kind the lock is
    #[arg(long, default_value = "reentrant")]
    pub(crate) kind: Kind,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Who {
    #[command(flatten)]
    pub(crate) named: Named,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Force {
    #[command(flatten)]
    pub(crate) named: Named,
    /// Only what this owner holds: its holds are given back one by one
    #[arg(long, value_name = "OWNER")]
    pub(crate) if_owner: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) named: Named,
    /// Whose hold it is, as `who` tells it
    #[arg(long)]
    pub(crate) owner: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Extend {
    #[command(flatten)]
    pub(crate) named: Named,
    /// For at least so long from now on: 500ms, 10s, 2m
    #[arg(value_parser = duration)]
    pub(crate) lease: Duration,
    /// Whose hold it is, as `who` tells it
    #[arg(long)]
    pub(crate) owner: String,
}

/// What was asked for makes no sense: no fault of the tool's.
#[derive(Debug)]
pub(crate) struct Unusable(pub(crate) String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unusable {}

/// A time as people write it: `500ms`, `1.5s`, `2m`, `1h`; a bare number is seconds, as flock has it.
fn duration(text: &str) -> Result<Duration, String> {
    let unit_at = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds = match unit {
        "ms" => 0.001,
        "s" | "" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("{unit:?} is no unit of time; use ms, s, m or h")),
    };
    let number = number.parse::<f64>().map_err(|_| "say it as 500ms, 10s or 2m".to_owned())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn what_is_asked_for_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        let millis = ["500ms", "1.5s", "2m", "1h", "3", "0"].map(|text| duration(text).unwrap().as_millis());
        assert_eq!(millis, [500, 1_500, 120_000, 3_600_000, 3_000, 0]);
        for wrong in ["", "s", "5 s", "-1s", "5d", "1e99h", "nan"] {
            duration(wrong).unwrap_err();
        }
    }
}
