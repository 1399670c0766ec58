//! What is asked for.

use std::{cell::OnceCell, ffi::OsString, fmt, path::PathBuf, time::Duration};

use clap::{ArgAction, Parser, Subcommand, ValueEnum};

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
    /// The server's URL
    #[arg(
        long,
        help = "The server's URL: redis://HOST, redis-cluster://A,B, redis-sentinel://A,B/SERVICE, redis://A,B, with rediss for TLS, or redis+unix://PATH. Other users see it in the list of processes: prefer the variable [env: NESTLOCK_URL]",
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
    /// What these say. It is read once: the file may be a pipe.
    #[arg(skip)]
    pub(crate) said: OnceCell<String>,
    /// What stands before each name on the server
    #[arg(long, global = true, env = "NESTLOCK_PREFIX", default_value = "", value_name = "TEXT")]
    pub(crate) prefix: String,
    #[command(flatten)]
    pub(crate) tls: Certificates,
}

/// For `rediss://`, `rediss-cluster://`, `rediss-sentinel://`.
#[derive(Debug, Default, clap::Args)]
#[expect(clippy::struct_field_names, reason = "they are the names of options")]
pub(crate) struct Certificates {
    /// With TLS: authorities whose signatures are believed, in PEM [default: the system's]
    #[arg(long, global = true, env = "NESTLOCK_TLS_CA", value_name = "FILE")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// The certificate that a server is shown who asks for one, in PEM
    #[arg(long, global = true, env = "NESTLOCK_TLS_CERT", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(long, global = true, env = "NESTLOCK_TLS_KEY", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The name that the servers' certificates must have [default: the host]
    #[arg(long, global = true, env = "NESTLOCK_TLS_SERVER_NAME", value_name = "NAME")]
    pub(crate) tls_server_name: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a command under a lock
    Exec(Exec),
    /// Which locks are held
    Ls(Ls),
    /// The locks of a server, live
    Top(Top),
    /// Who holds a lock; exit code 1: nobody
    Who(Who),
    /// Free a lock, whoever holds it; exit code 1: nobody held it
    Force(Force),
    /// Give back one hold of an owner; exit code 1: it holds none
    Release(Release),
    /// Let an owner's hold live for at least so long; exit code 1: it holds none
    Extend(Extend),
    /// What this server means for locks; exit code 0: all is well, 1: something is not, or is not known, 2: something is bad
    Doctor(Doctor),
    /// The rules that a user of the server needs
    Acl(Acl),
    /// What a lock costs here, beside bare EVALSHA
    Bench(Bench),
    /// What a shell completes
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// The man page
    Man,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes: the command's own; 128+N if signal N ended it; 75 (-E) if the lock is busy; 76 (--lost-code) if it was lost;
77 if it was lost, and something of the command works on that cannot be ended: what became another user, as by sudo. 126, 127 if the command cannot be run or found; 125 if nestlock failed; 64 for wrong use.

The lock is renewed while nestlock runs, and dies with it after the lease. If it cannot be renewed, the command's process
group gets TERM a grace before the last twentieth of the lease, and all that the command began gets KILL then: before anybody else can
have the lock. Below another `exec` of the same lock it goes along with that one's hold.

Stopped by Control-Z, nestlock stops too, and nobody renews the lock meanwhile: if its lease is over when it goes on, the
command is killed before it does anything. What the command leaves behind is ended with it, or waited for (--wait-group): on
Linux whichever process group, session or parent it has; elsewhere what is in the command's process group. On Linux all of
it ends with a nestlock that is killed, too. flock(1) holds a lock for as long as any of them lives.
A signal that is ignored when nestlock begins, as nohup does with HUP, is not passed on.")]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
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
    /// Begin when so many replicas have the lock, too: else a failover may forget it, and two hold it
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub(crate) replicas: u32,
    /// How long the command has between TERM and KILL when the lock is lost: a third of the lease at most
    #[arg(long, value_parser = duration, value_name = "TIME")]
    pub(crate) grace: Option<Duration>,
    /// What the command gets first when the lock is gone already: TERM, and KILL after the grace; or KILL at once
    #[arg(long, value_name = "SIGNAL", default_value = "term")]
    pub(crate) on_lost: OnLost,
    /// Hold the lock until all that the command began has ended, rather than end what the command leaves behind
    #[arg(long)]
    pub(crate) wait_group: bool,
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

/// How the command is ended when others may have the lock already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    Term,
    Kill,
}

impl Exec {
    /// Whose lock it is, for whoever looks: the command's, rather than this program's.
    pub(crate) fn application(&self) -> String {
        let program = self.program.first().map_or_else(|| PathBuf::from("sh"), PathBuf::from);
        program.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// Which lock.
#[derive(Debug, clap::Args)]
pub(crate) struct Named {
    /// The lock
    pub(crate) name: String,
    /// Of which kind the lock is [default: what its record says; `string` is never guessed]
    #[arg(long)]
    pub(crate) kind: Option<Kind>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Who {
    #[command(flatten)]
    pub(crate) named: Named,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Go on, and tell it again whenever others hold it, or in another number; `-`: nobody
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Which locks to look for.
#[derive(Debug, clap::Args)]
pub(crate) struct Find {
    /// Names, as the server's KEYS takes them, without the prefix: `order:*` [default: all]
    pub(crate) pattern: Option<String>,
    /// Plain strings with a TTL are locks, too: those of `string`, or of other libraries
    #[arg(long)]
    pub(crate) strings: bool,
    /// Look through more keys than these only for a PATTERN or with a --prefix
    #[arg(long, default_value_t = 1_000_000, value_name = "COUNT")]
    pub(crate) max_keys: u64,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
`reentrant` is also what mutexes and spin locks have on the server, and fair locks that nobody waits for. WAITING is tasks
for fair locks, else client processes that listen. What the server does not say is `-`.

Of a cluster all masters are looked through. Exit code 1: one of the servers did not answer, and its locks are missing; with
--watch and --stat it is told, what it had is taken to be as it was, and it goes on, with whoever takes over.")]
pub(crate) struct Ls {
    #[command(flatten)]
    pub(crate) find: Find,
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Go on, with a line for each change: + held, - free, ~ held by others or in another number
    #[arg(short, long, conflicts_with = "stat")]
    pub(crate) watch: bool,
    /// Go on, with a line of figures a second
    #[arg(long)]
    pub(crate) stat: bool,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Releases are counted where one can listen to them: in a cluster of Redis 7.0 or later nobody can, and they are `-`. A server that
does not answer is told, what it had is shown as it was, and whoever takes over is asked.")]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) find: Find,
    /// Frees nothing, whichever key is pressed
    #[arg(long)]
    pub(crate) read_only: bool,
    /// How often to ask
    #[arg(short, long, value_parser = duration, default_value = "1s", value_name = "TIME")]
    pub(crate) interval: Duration,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Of the nodes of a cluster, each row tells the worst, with its address. A plain URL to a node tells of that alone.")]
pub(crate) struct Doctor {
    /// One JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which command a user is for.
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
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct Acl {
    /// Which kinds of locks it uses [default: all]
    #[arg(long, value_delimiter = ',', value_name = "KINDS")]
    pub(crate) kinds: Vec<Kind>,
    /// Which of these commands it runs
    #[arg(long = "for", value_name = "COMMAND")]
    pub(crate) tool: Option<For>,
    /// Its servers are a cluster [default: as the URL says]
    #[arg(long)]
    pub(crate) cluster: bool,
    /// It wants its locks to be on replicas
    #[arg(long)]
    pub(crate) replicas: bool,
    /// It wants its locks to be on disk
    #[arg(long)]
    pub(crate) fsync: bool,
    /// The rules that it needs at each sentinel, in place of those for the servers
    #[arg(long, conflicts_with_all = ["kinds", "cluster", "replicas", "fsync"])]
    pub(crate) sentinel: bool,
    /// The user's name
    #[arg(long, default_value = "nestlock", value_name = "NAME")]
    pub(crate) user: String,
    /// Ask the server for its version: old ones need a rule more
    #[arg(long)]
    pub(crate) for_server: bool,
    /// One JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    /// So many at a time
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tasks: u16,
    /// So many rounds, of which the median counts
    #[arg(long, default_value_t = 5, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) rounds: u16,
    /// So many pairs of lock and unlock in all, 1000 at least
    #[arg(long, default_value_t = 20_000, value_name = "COUNT", value_parser = clap::value_parser!(u32))]
    pub(crate) pairs: u32,
    /// Also where the server is far away, or others use it
    #[arg(short, long)]
    pub(crate) yes: bool,
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
