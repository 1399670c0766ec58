//! The command-line arguments.

use std::{cell::OnceCell, ffi::OsString, path::PathBuf, time::Duration};

use clap::{ArgAction, Parser, Subcommand, ValueEnum};

use crate::{failure::Unusable, kind::Kind};

#[derive(Debug, Parser)]
#[command(
    name = "nestlock",
    version,
    about = "Distributed locks on Redis and Valkey, on the command line"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) server: Server,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The server that keeps the locks.
#[derive(Debug, clap::Args)]
pub(crate) struct Server {
    /// The server's URL
    #[arg(
        long,
        help = "The server's URL: redis://HOST, redis-cluster://A,B, redis-sentinel://A,B/SERVICE, redis://A,B, with rediss for TLS, or redis+unix://PATH. Other users see it in the process list: prefer the variable [env: NESTLOCK_URL]",
        global = true,
        value_name = "URL"
    )]
    pub(crate) url: Option<String>,
    /// A file whose first line is the server's URL
    #[arg(
        long,
        help = "A file whose first line is the server's URL [env: NESTLOCK_URL_FILE]",
        global = true,
        value_name = "FILE",
        conflicts_with = "url"
    )]
    pub(crate) url_file: Option<PathBuf>,
    /// The URL from these options. It is read once, because the file may be a pipe.
    #[arg(skip)]
    pub(crate) said: OnceCell<String>,
    /// Prefix of every name on the server
    #[arg(
        long,
        global = true,
        env = "NESTLOCK_PREFIX",
        default_value = "",
        value_name = "TEXT"
    )]
    pub(crate) prefix: String,
    #[command(flatten)]
    pub(crate) tls: Certificates,
}

/// TLS options for `rediss://`, `rediss-cluster://`, `rediss-sentinel://`.
#[derive(Debug, Default, clap::Args)]
#[expect(
    clippy::struct_field_names,
    reason = "the fields are named like the options"
)]
pub(crate) struct Certificates {
    /// CA certificates to trust with TLS (PEM) [default: the system's]
    #[arg(long, global = true, env = "NESTLOCK_TLS_CA", value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// Client certificate (PEM)
    #[arg(long, global = true, env = "NESTLOCK_TLS_CERT", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Private key of the client certificate (PEM)
    #[arg(long, global = true, env = "NESTLOCK_TLS_KEY", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Name that the servers' certificates must have [default: the host]
    #[arg(
        long,
        global = true,
        env = "NESTLOCK_TLS_SERVER_NAME",
        value_name = "NAME"
    )]
    pub(crate) tls_server_name: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a lock
    Exec(Exec),
    /// List the locks that are held
    Ls(Ls),
    /// Show the locks of a server, live
    Top(Top),
    /// Show the owners that hold a lock; exit code 1 if it is free
    Who(Who),
    /// Free a lock, whichever owner holds it; exit code 1 if it is free
    Force(Force),
    /// Release one hold of an owner; exit code 1 if it has none
    Release(Release),
    /// Extend an owner's hold to at least LEASE from now; exit code 1 if it has none
    Extend(Extend),
    /// Check whether a server is configured safely for locks. Exit code: 0 all good, 1 warnings or
    /// unknowns, 2 problems
    Doctor(Doctor),
    /// Print the ACL rules that a user of the server needs
    Acl(Acl),
    /// Measure the cost of a lock, compared with bare EVALSHA
    Bench(Bench),
    /// Generate shell completions
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the man page
    Man,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: the command's own; 128+N if signal N ended it; 75 (-E) if the lock is busy; 76 (--lost-code) if the lock was lost;
77 if it was lost, and a process of the command cannot be ended and runs on, because it became another user, as with sudo;
126, 127 if the command cannot be run, or was not found; 125 if nestlock failed; 64 for wrong usage.

nestlock renews the lock while it runs; if nestlock is gone, the lock is free after the lease. If the lock cannot be renewed,
the command's process group gets TERM one --grace before the last twentieth of the lease, and everything that the command
started gets KILL when that last twentieth begins: before another client can have the lock. An `exec` inside another
`exec` of the same lock shares the hold of the outer one.

When Control-Z stops the command, nestlock stops too, and the lock is not renewed: if the lease has ended when the job
resumes, the command is killed before it does anything. Processes that the command leaves behind are ended with it, or waited
for (--wait-group): on Linux in any process group or session and with any parent, elsewhere those in the command's process
group. On Linux, all of them also end if nestlock is killed. flock(1), in contrast, holds a lock while any of them lives.
A signal that is ignored when nestlock starts, as HUP is with nohup, is not forwarded.")]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate option")]
pub(crate) struct Exec {
    /// Name of the lock
    pub(crate) name: String,
    /// Kind of the lock
    #[arg(long, default_value = "reentrant")]
    pub(crate) kind: Kind,
    /// Share the lock with other readers; same as --kind read
    #[arg(short, long, conflicts_with = "kind")]
    pub(crate) shared: bool,
    /// Run at most NUMBER of these commands at a time, over all machines. The last `exec` to start
    /// says how many
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["kind", "shared"], value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub(crate) permits: Option<u32>,
    /// Give the permits to waiters in the order in which they came
    #[arg(long, requires = "permits")]
    pub(crate) fair: bool,
    /// Give up after TIME if the lock is busy: 500ms, 10s, 2m [default: wait forever]
    #[arg(short, long, value_parser = duration, value_name = "TIME", conflicts_with = "nonblock")]
    pub(crate) wait: Option<Duration>,
    /// Give up at once if the lock is busy
    #[arg(short, long)]
    pub(crate) nonblock: bool,
    /// How long the lock stays held without a renewal
    #[arg(long, value_parser = duration, default_value = "30s", value_name = "TIME")]
    pub(crate) lease: Duration,
    /// Start only when NUMBER replicas have the lock too, so that a failover is less likely to lose
    /// it and let in a second client
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) replicas: u32,
    /// Grace period: time between TERM and KILL when the lock is lost; at most a third of the lease
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub(crate) grace: Option<Duration>,
    /// First signal if the lock is already lost: TERM, with KILL after the grace; or KILL at once
    #[arg(long, value_name = "SIGNAL", default_value = "term")]
    pub(crate) on_lost: OnLost,
    /// Hold the lock until all processes of the command have ended, instead of ending those that it
    /// leaves behind
    #[arg(long)]
    pub(crate) wait_group: bool,
    /// Tell others why the lock is held: one line, for `who`, `ls --json`, `top`, and an `exec` that
    /// finds it busy
    #[arg(long, value_name = "TEXT")]
    pub(crate) note: Option<String>,
    /// Exit code if the lock is busy
    #[arg(short = 'E', long, default_value_t = 75, value_name = "CODE")]
    pub(crate) conflict_exit_code: u8,
    /// Exit code if the lock was lost
    #[arg(long, default_value_t = 76, value_name = "CODE")]
    pub(crate) lost_code: u8,
    /// Acquire a separate hold even inside another exec of the same lock, and wait for that exec
    #[arg(long)]
    pub(crate) no_inherit: bool,
    /// Run a line of shell instead of a command
    #[arg(
        short = 'c',
        long = "command",
        value_name = "LINE",
        conflicts_with = "program"
    )]
    pub(crate) line: Option<OsString>,
    /// The command
    #[arg(last = true, value_name = "COMMAND", required_unless_present = "line", action = ArgAction::Append)]
    pub(crate) program: Vec<OsString>,
}

/// How to end the command when another owner may already have the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    Term,
    Kill,
}

impl Exec {
    pub(crate) fn kind(&self) -> Result<Kind, Unusable> {
        match self.kind {
            _ if self.permits.is_some() => Ok(Kind::Permits),
            _ if self.shared => Ok(Kind::Read),
            Kind::Permits => Err(Unusable("say how many there are: --permits NUMBER".into())),
            kind => Ok(kind),
        }
    }

    /// Returns the name under which other clients see the holder: the command's, not nestlock's.
    pub(crate) fn application(&self) -> String {
        let program = self
            .program
            .first()
            .map_or_else(|| PathBuf::from("sh"), PathBuf::from);
        program
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }
}

/// A lock, by name and kind.
#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    /// Name of the lock
    pub(crate) name: String,
    /// Kind of the lock [default: as its record says; `string` is never guessed]
    #[arg(long)]
    pub(crate) kind: Option<Kind>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Who {
    #[command(flatten)]
    pub(crate) named: Named,
    /// Print JSON, one object
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep running, and print again when the owners or their hold counts change; `-`: free
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Which locks to search for.
#[derive(Debug, clap::Args)]
pub(crate) struct Find {
    /// Pattern for names, as for the server's KEYS, without the prefix: `order:*` [default: all]
    pub(crate) pattern: Option<String>,
    /// Include plain strings with a TTL: locks of the kind `string`, or of other libraries
    #[arg(long)]
    pub(crate) strings: bool,
    /// Refuse to scan a keyspace larger than this unless a PATTERN or --prefix is given
    #[arg(long, default_value_t = 1_000_000, value_name = "COUNT")]
    pub(crate) max_keys: u64,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
`reentrant` also stands for mutexes, spin locks, and fair locks without waiters: they have the same record on the server.
WAITING counts tasks for fair locks, otherwise client processes that listen. What the server does not report is `-`.

In a cluster all masters are scanned. Exit code 1: a server did not reply, and its locks are missing. With --watch and --stat
that server is reported instead, its locks are taken to be unchanged, and `ls` continues, with the server that takes over.")]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) find: Find,
    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,
    /// Keep running, and print each change: + held, - free, ~ other owners or another hold count
    #[arg(short, long, conflicts_with = "stat")]
    pub(crate) watch: bool,
    /// Keep running, and print a line of statistics per second
    #[arg(long)]
    pub(crate) stat: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Releases are counted where `top` can listen to them. In a cluster of Redis 7.0 or later it cannot, and they are `-`. A server
that does not reply is reported, its locks are shown as they were, and `top` switches to the server that takes over.")]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) find: Find,
    /// Never free a lock, whichever key is pressed
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Polling interval
    #[arg(short, long, value_parser = duration, default_value = "1s", value_name = "TIME")]
    pub(crate) interval: Duration,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
In a cluster, each row shows the worst node, with its address. With a plain URL of one node, only that node is checked.")]
pub(crate) struct Doctor {
    /// Kinds of locks to try, for a user who may use no others [default: all but `semaphore`]
    #[arg(long, value_delimiter = ',', value_name = "KINDS")]
    pub(crate) kinds: Vec<Kind>,
    /// Print JSON, one object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// The command that a user runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum For {
    Exec,
    Ls,
    Who,
    Top,
    Doctor,
    Force,
    Bench,
}

#[derive(Debug, clap::Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a separate option")]
pub(crate) struct Acl {
    /// Kinds of locks that the user needs [default: all]
    #[arg(long, value_delimiter = ',', value_name = "KINDS")]
    pub(crate) kinds: Vec<Kind>,
    /// Command that the user runs
    #[arg(long = "for", value_name = "COMMAND")]
    pub(crate) tool: Option<For>,
    /// The servers are a cluster [default: as the URL says]
    #[arg(long)]
    pub(crate) cluster: bool,
    /// Include the rules for locks that wait for replicas
    #[arg(long)]
    pub(crate) replicas: bool,
    /// Include the rules for locks that wait for the disk
    #[arg(long)]
    pub(crate) fsync: bool,
    /// Include the rules for notes of holders
    #[arg(long)]
    pub(crate) notes: bool,
    /// Print the rules for each sentinel instead of those for the servers
    #[arg(long, conflicts_with_all = ["kinds", "cluster", "replicas", "fsync", "notes"])]
    pub(crate) sentinel: bool,
    /// Name of the user
    #[arg(long, default_value = "nestlock", value_name = "NAME")]
    pub(crate) user: String,
    /// Read the version of the server: older versions need other rules
    #[arg(long)]
    pub(crate) for_server: bool,
    /// Print JSON, one object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    /// Concurrent tasks
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tasks: u16,
    /// Number of rounds, of which the median counts
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) rounds: u16,
    /// Total pairs of lock and unlock, at least 1000
    #[arg(long, default_value_t = 20_000, value_name = "COUNT", value_parser = clap::value_parser!(u32))]
    pub(crate) pairs: u32,
    /// Run even if the server is remote or in use
    #[arg(short, long)]
    pub(crate) yes: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Force {
    #[command(flatten)]
    pub(crate) named: Named,
    /// Release only the holds of this owner, one by one
    #[arg(long, value_name = "OWNER")]
    pub(crate) if_owner: Option<String>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Release {
    #[command(flatten)]
    pub(crate) named: Named,
    /// Owner of the hold, as `who` prints it
    #[arg(long)]
    pub(crate) owner: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Extend {
    #[command(flatten)]
    pub(crate) named: Named,
    /// Minimum lease from now: 500ms, 10s, 2m
    #[arg(value_parser = duration)]
    pub(crate) lease: Duration,
    /// Owner of the hold, as `who` prints it
    #[arg(long)]
    pub(crate) owner: String,
}

/// Parses a time such as `500ms`, `1.5s`, `2m`, `1h`. A bare number is in seconds, as with flock.
fn duration(text: &str) -> Result<Duration, String> {
    let unit_at = text
        .find(|letter: char| letter.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let seconds = match unit {
        "ms" => 0.001,
        "s" | "" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("unknown unit of time {unit:?}; use ms, s, m or h")),
    };
    let number = number
        .parse::<f64>()
        .map_err(|_| "expected a time such as 500ms, 10s or 2m".to_owned())?;
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
        let millis =
            ["500ms", "1.5s", "2m", "1h", "3", "0"].map(|text| duration(text).unwrap().as_millis());
        assert_eq!(millis, [500, 1_500, 120_000, 3_600_000, 3_000, 0]);
        for wrong in ["", "s", "5 s", "-1s", "5d", "1e99h", "nan"] {
            duration(wrong).unwrap_err();
        }
    }
}
