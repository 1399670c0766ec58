//! The program of a server, and its command line.

use std::{
    ffi::OsString,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    SpawnError,
    folder::{log_file, socket},
    guard_script::GUARD,
};

/// The environment variable that names the server program.
const PROGRAM: &str = "NESTLOCK_SERVER_BIN";

/// Writes the configuration file, unless it exists, and becomes the server: `sh -c CONFIGURED sh
/// FILE TEXT PROGRAM ARGS...`. The guard creates the folder, and removes the file with it.
const CONFIGURED: &str = r#"
file=$1 text=$2 program=$3
shift 3
[ -e "$file" ] || printf '%s' "$text" >"$file" || exit
exec "$program" "$file" "$@"
"#;

/// What is started, and started again at a restart.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) program: PathBuf,
    args: Vec<OsString>,
    /// The initial content of the server's configuration file. The server may rewrite the file.
    config: Option<String>,
}

impl Plan {
    pub(super) fn new(args: Vec<OsString>) -> Result<Self, SpawnError> {
        Ok(Self {
            program: program()?,
            args,
            config: None,
        })
    }

    /// Adds a configuration file in the server's folder, with this content at the first start.
    pub(super) fn configured(self, config: String) -> Self {
        Self {
            config: Some(config),
            ..self
        }
    }

    /// Returns the command that starts the guard, with the server.
    pub(super) fn command(&self, folder: &Path, port: u16, make_folder: bool) -> Command {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", GUARD, "sh"])
            .arg(folder)
            .arg(if make_folder { "yes" } else { "no" });
        if let Some(config) = &self.config {
            command
                .args(["/bin/sh", "-c", CONFIGURED, "sh"])
                .arg(folder.join("server.conf"))
                .arg(config);
        }
        command
            .arg(&self.program)
            .args(["--bind", "127.0.0.1", "--save", "", "--dir"])
            .arg(folder)
            .args(&self.args);
        // the last occurrence of an argument wins, so `args` cannot override these
        command
            .args(["--port", &port.to_string(), "--unixsocket"])
            .arg(socket(folder));
        command
            .arg("--logfile")
            .arg(log_file(folder))
            .args(["--daemonize", "no"]);
        // its own process group: Ctrl-C reaches this process only, so the server does not end first
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

fn program() -> Result<PathBuf, SpawnError> {
    match std::env::var_os(PROGRAM).filter(|program| !program.is_empty()) {
        Some(named) => find(Path::new(&named)).ok_or_else(|| {
            let named = named.display();
            SpawnError::NotFound {
                what: format!("{PROGRAM} is {named}, which is not an executable program"),
            }
        }),
        None => ["redis-server", "valkey-server"]
            .iter()
            .find_map(|name| find(Path::new(name)))
            .ok_or_else(|| SpawnError::NotFound {
                what: "no redis-server or valkey-server on PATH".into(),
            }),
    }
}

/// Finds a program by its path, or by its name on `PATH`. Returns `None` if there is none that can
/// be executed.
fn find(program: &Path) -> Option<PathBuf> {
    let runs = |path: &PathBuf| {
        path.metadata()
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    if program.components().count() > 1 {
        return Some(program.to_owned()).filter(runs);
    }
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(runs)
}
