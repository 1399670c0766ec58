//! A real server process of one's own, which ends with the process that started it, however that ends.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write},
    net::{Ipv4Addr, SocketAddr},
    os::unix::{
        fs::PermissionsExt,
        net::{SocketAddr as SocketPath, UnixStream},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use crate::ports;

/// The variable that names the server program.
const PROGRAM: &str = "NESTLOCK_SERVER_BIN";
const HOW_TO_INSTALL: &str = "Install one: `apt-get install redis-server` (Debian, Ubuntu), `dnf install valkey` or \
     `dnf install redis` (Fedora, RHEL), `brew install redis` (macOS). Or set NESTLOCK_SERVER_BIN to the path of a \
     redis-server or valkey-server";

/// How long a server may take until it answers.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at a server that starts.
const PAUSE: Duration = Duration::from_millis(1);
/// Ports tried until one is found that nobody takes first.
const PORTS_TRIED: usize = 20;
/// As long as a port may be away after an end of the server: a client that comes back can hold it for a moment.
const PORT_PATIENCE: Duration = Duration::from_secs(5);
/// What an error quotes of a log.
const LINES_QUOTED: usize = 12;

/// The parent of the server: `sh -c GUARD sh FOLDER MAKE PROGRAM ARGS...`. Its stdin is a pipe that only we hold, so
/// that it ends when we do; then the server is killed, and the folder removed.
///
/// - Its stderr is a second pipe, which it passes to the server and closes: it ends with the server.
/// - An answer may find nobody who reads it any more: that must not end the guard.
/// - `kill 0` also ends what the server has forked: it is the guard's group, and nobody else is in it.
const GUARD: &str = r#"
folder=$1 make=$2 gone=
shift 2
kill_server() {
    if [ -n "$!" ] && [ -z "$gone" ]; then kill -KILL "$!"; wait "$!"; fi
    gone=yes
}
end() {
    trap '' HUP INT TERM
    kill_server
    rm -rf "$folder"
    kill -KILL 0
}
trap '' PIPE
trap end HUP INT TERM
umask 077
if [ "$make" = yes ]; then mkdir "$folder" || exit; fi
"$@" </dev/null >&2 &
exec 2>/dev/null
echo "pid $!"
while read -r word; do
    case $word in
    STOP | CONT) if [ -z "$gone" ] && kill "-$word" "$!"; then echo done; else echo gone; fi ;;
    KILL) kill_server; echo done ;;
    GONE) gone=yes ;;
    LEAVE) exit ;;
    esac
done
end
"#;

/// Why there is no [`SpawnedServer`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// There is no server program: none on `PATH`, or not where `NESTLOCK_SERVER_BIN` says.
    #[error("{what}. {HOW_TO_INSTALL}")]
    NotFound {
        /// What was looked for, and where.
        what: String,
    },
    /// The server ended before it answered; often because of an argument.
    #[error("{} ended before it answered. The last that it wrote:\n{log}", .program.display())]
    Ended {
        /// The server program.
        program: PathBuf,
        /// The last lines of its output and its log.
        log: String,
    },
    /// The server runs, and does not answer within 30 s. It has been killed.
    #[error("{} does not answer. The last that it wrote:\n{log}", .program.display())]
    Silent {
        /// The server program.
        program: PathBuf,
        /// The last lines of its output and its log.
        log: String,
    },
    /// No process could be started, or no port be had.
    #[error("cannot start a server process: {0}")]
    Io(#[from] io::Error),
}

/// A real server process of one's own: `redis-server` or `valkey-server`, on a free port of 127.0.0.1.
///
/// The program is the one that the variable `NESTLOCK_SERVER_BIN` names, else `redis-server`, else `valkey-server` on
/// `PATH`. The server has a folder of its own (mode 0700, in the folder for temporary files) and saves nothing, unless
/// an argument says so. It is killed, and its folder removed, when this is dropped, and also when this process exits,
/// panics, aborts or is killed: a `/bin/sh` stands between, and waits for that.
///
/// ```
/// # fn main() -> Result<(), nestlock_embedded::SpawnError> {
/// let server = nestlock_embedded::SpawnedServer::start()?;
/// println!("{}", server.url()); // redis://127.0.0.1:23571
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SpawnedServer {
    program: PathBuf,
    args: Vec<OsString>,
    folder: PathBuf,
    port: u16,
    guard: Mutex<Guard>,
}

impl SpawnedServer {
    /// Starts a server and waits until it answers: some 10 ms.
    ///
    /// # Errors
    /// [`SpawnError::NotFound`]: there is no server program. All others say why it does not run.
    pub fn start() -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>([])
    }

    /// Starts a server with further command line arguments: `["--maxmemory", "1mb"]`.
    ///
    /// They may not change the port, the unix socket or the log file.
    ///
    /// # Errors
    /// Those of [`SpawnedServer::start`]. An argument that the server does not know is [`SpawnError::Ended`], with what
    /// the server says of it.
    pub fn start_with<A>(args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        Self::start_at(args.into_iter().map(Into::into).collect(), ports::free)
    }

    fn start_at(args: Vec<OsString>, mut port: impl FnMut() -> io::Result<u16>) -> Result<Self, SpawnError> {
        let program = program()?;
        let mut tried = 1;
        loop {
            let (folder, port) = (new_folder()?, port()?);
            match Guard::start(&program, &args, &folder, port, true) {
                Ok(guard) => return Ok(Self { program, args, folder, port, guard: Mutex::new(guard) }),
                Err(error) if port_taken(&error) && tried < PORTS_TRIED => tried += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// `redis://127.0.0.1:PORT`, the same after a restart.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// The address that clients connect to, the same after a restart.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The unix socket that the server listens on as well, in its folder.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket(&self.folder)
    }

    /// The folder of the server: its data, its log (`server.log`), its socket.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The process id of the server; another one after a restart.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.guard().pid
    }

    /// Kills the server (SIGKILL) and waits for its end. What it has written stays; see [`SpawnedServer::restart`].
    ///
    /// Does nothing if the server has ended.
    ///
    /// # Errors
    /// Somebody has ended the shell that guards it.
    pub fn kill(&self) -> io::Result<()> {
        self.guard().order("KILL")
    }

    /// Starts the server again, on the same port and folder and with the same arguments; kills it first if it runs.
    ///
    /// # Errors
    /// Those of [`SpawnedServer::start`]. [`SpawnError::Ended`] also means that somebody else has taken the port
    /// meanwhile, and keeps it: then try again later.
    pub fn restart(&self) -> Result<(), SpawnError> {
        let mut guard = self.guard();
        guard.order("KILL")?;
        let start = Instant::now();
        let next = loop {
            match Guard::start(&self.program, &self.args, &self.folder, self.port, false) {
                Err(error) if port_taken(&error) && start.elapsed() < PORT_PATIENCE => thread::sleep(20 * PAUSE),
                outcome => break outcome?,
            }
        };
        // only now, so that there is always one that ends the server and removes the folder
        std::mem::replace(&mut *guard, next).leave();
        Ok(())
    }

    /// Stops the server (SIGSTOP): it hangs, and its connections stay open. [`SpawnedServer::cont`] lets it go on.
    ///
    /// # Errors
    /// The server has ended.
    pub fn stop(&self) -> io::Result<()> {
        self.guard().order("STOP")
    }

    /// Lets a stopped server go on (SIGCONT).
    ///
    /// # Errors
    /// The server has ended.
    pub fn cont(&self) -> io::Result<()> {
        self.guard().order("CONT")
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where orders are written to; empty when the guard should end.
type Orders = Arc<Mutex<Option<ChildStdin>>>;

/// What became of a server that was started.
enum Outcome {
    Answers,
    /// With what it has written.
    Ended(Vec<u8>),
    Silent,
}

/// The shell that is the parent of the server. When dropped: no server, no folder.
#[derive(Debug)]
struct Guard {
    process: Child,
    orders: Orders,
    answers: BufReader<ChildStdout>,
    pid: u32,
}

impl Guard {
    /// Starts a server under a guard, and waits until it answers.
    fn start(
        program: &Path,
        args: &[OsString],
        folder: &Path,
        port: u16,
        make_folder: bool,
    ) -> Result<Self, SpawnError> {
        let (socket, log_file) = (socket(folder), folder.join("server.log"));
        let old_log = log_file.metadata().map_or(0, |file| file.len());
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "sh"]).arg(folder).arg(if make_folder { "yes" } else { "no" });
        command.arg(program).args(["--bind", "127.0.0.1", "--save", "", "--dir"]).arg(folder).args(args);
        // the last ones count
        command.args(["--port", &port.to_string(), "--unixsocket"]).arg(&socket);
        command.arg("--logfile").arg(&log_file).args(["--daemonize", "no"]);
        // a group of its own: Ctrl-C reaches us, and not the server before us
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (mut guard, ended) = Self::spawn(command)?;
        let log = |output: &[u8]| last_lines(output, &log_file, old_log);
        let failure = match guard.wait_until_it_answers(&ended, &socket) {
            Ok(Outcome::Answers) => return Ok(guard),
            Ok(Outcome::Ended(output)) => SpawnError::Ended { program: program.to_owned(), log: log(&output) },
            Ok(Outcome::Silent) => SpawnError::Silent { program: program.to_owned(), log: log(&[]) },
            Err(error) => error.into(),
        };
        if !make_folder {
            let _ = guard.order("KILL");
            guard.leave();
        }
        Err(failure)
    }

    fn wait_until_it_answers(&mut self, ended: &Receiver<Vec<u8>>, socket: &Path) -> io::Result<Outcome> {
        let Some(pid) = self.answer()?.strip_prefix("pid ").and_then(|pid| pid.parse().ok()) else {
            return Ok(Outcome::Ended(ended.recv().unwrap_or_default()));
        };
        self.pid = pid;
        let start = Instant::now();
        loop {
            match ended.recv_timeout(PAUSE) {
                Ok(output) => return Ok(Outcome::Ended(output)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Outcome::Ended(Vec::new())),
                Err(RecvTimeoutError::Timeout) if answers(socket) => return Ok(Outcome::Answers),
                Err(RecvTimeoutError::Timeout) if start.elapsed() > PATIENCE => return Ok(Outcome::Silent),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Starts the shell. The receiver gets what the server has written, when it has ended.
    fn spawn(mut command: Command) -> io::Result<(Self, Receiver<Vec<u8>>)> {
        // Where a pipe is made first and kept from children afterwards (macOS), a guard that is started at the same
        // time could inherit it, and the two would keep each other alive.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = command.spawn()?;
        drop(alone);
        let (Some(orders), Some(answers), Some(output)) =
            (process.stdin.take(), process.stdout.take(), process.stderr.take())
        else {
            return Err(io::Error::other("a process without pipes"));
        };
        let (orders, (sender, ended)) = (Orders::new(Mutex::new(Some(orders))), mpsc::channel());
        let guard = Self { process, orders: Arc::clone(&orders), answers: BufReader::new(answers), pid: 0 };
        thread::Builder::new()
            .name("nestlock-spawned".into())
            .spawn(move || wait_for_the_end(output, &orders, &sender))?;
        Ok((guard, ended))
    }

    /// Gives an order, and waits until it is carried out.
    fn order(&mut self, order: &str) -> io::Result<()> {
        write_order(&self.orders, order)?;
        match self.answer()?.as_str() {
            "done" => Ok(()),
            "gone" => Err(io::Error::new(ErrorKind::NotFound, "the server has ended")),
            _ => Err(io::Error::new(ErrorKind::BrokenPipe, "the shell that guards the server has ended")),
        }
    }

    /// The next answer; empty if the guard has ended.
    fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Ends the guard of a server that has ended, and leaves the folder.
    fn leave(self) {
        let _ = write_order(&self.orders, "LEAVE");
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.orders.lock().unwrap_or_else(PoisonError::into_inner).take());
        let _ = self.process.wait();
    }
}

fn write_order(orders: &Orders, order: &str) -> io::Result<()> {
    match &mut *orders.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(orders) => orders.write_all(format!("{order}\n").as_bytes()),
        None => Ok(()),
    }
}

/// Reads what only the server writes to, until it ends with the server. Then the guard forgets its process id, which
/// the system may give to somebody else.
fn wait_for_the_end(mut output: ChildStderr, orders: &Orders, ended: &Sender<Vec<u8>>) {
    const KEPT: usize = 4096;
    let (mut kept, mut bytes) = (Vec::new(), [0; 1024]);
    loop {
        match output.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => kept.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
        kept.drain(..kept.len().saturating_sub(KEPT));
    }
    let _ = write_order(orders, "GONE");
    let _ = ended.send(kept);
}

/// Whether the server answers. Over its own socket, which nobody else can have: a port may be somebody else's. Any
/// answer will do, perhaps it wants a password; but not that it is still loading.
fn answers(socket: &Path) -> bool {
    let ask = || {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        Ok::<_, io::Error>(answer)
    };
    ask().is_ok_and(|answer| !answer.is_empty() && !answer.starts_with("-LOADING"))
}

fn port_taken(error: &SpawnError) -> bool {
    matches!(error, SpawnError::Ended { log, .. } if log.contains("already in use"))
}

/// What the server has written last: to its output, which has the complaints about arguments, and to its log, from
/// `old_log` on.
fn last_lines(output: &[u8], log_file: &Path, old_log: u64) -> String {
    let mut log = Vec::new();
    let read = |log: &mut Vec<u8>| {
        let mut file = File::open(log_file)?;
        file.seek(SeekFrom::Start(old_log))?;
        file.read_to_end(log)
    };
    // no log: it ended before
    let _ = read(&mut log);
    let text = [String::from_utf8_lossy(output), String::from_utf8_lossy(&log)].join("\n");
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LINES_QUOTED)..].join("\n")
}

fn program() -> Result<PathBuf, SpawnError> {
    match std::env::var_os(PROGRAM).filter(|program| !program.is_empty()) {
        Some(named) => find(Path::new(&named)).ok_or_else(|| {
            let named = named.display();
            SpawnError::NotFound { what: format!("{PROGRAM} names {named}, which is no program that can be started") }
        }),
        None => ["redis-server", "valkey-server"]
            .iter()
            .find_map(|name| find(Path::new(name)))
            .ok_or_else(|| SpawnError::NotFound { what: "no redis-server or valkey-server on PATH".into() }),
    }
}

/// A program by its path, or by its name on `PATH`.
fn find(program: &Path) -> Option<PathBuf> {
    let runs =
        |path: &PathBuf| path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
    if program.components().count() > 1 {
        return Some(program.to_owned()).filter(runs);
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(program)).find(runs)
}

/// The path of a folder that nobody has; the guard makes it, so that it is never left behind.
fn new_folder() -> io::Result<PathBuf> {
    let folder = std::path::absolute(std::env::temp_dir())?;
    let folder = folder.join(format!("nestlock-{}-{:016x}", std::process::id(), ports::random()));
    // a path that is too long for a socket is told at once
    SocketPath::from_pathname(socket(&folder))?;
    Ok(folder)
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("server.sock")
}

#[cfg(test)]
mod tests {
    use std::{net::TcpListener, os::unix::net::UnixListener};

    use super::*;

    #[test]
    fn a_port_that_somebody_takes_first_is_passed_over() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let taken = || taken.local_addr().unwrap().port();
        let mut asked = 0;
        let server = SpawnedServer::start_at(Vec::new(), || {
            asked += 1;
            if asked <= 2 { Ok(taken()) } else { ports::free() }
        });
        assert_ne!(server.unwrap().port, taken());
        assert_eq!(asked, 3);
        let mut asked = 0;
        let server = SpawnedServer::start_at(Vec::new(), || {
            asked += 1;
            Ok(taken())
        });
        assert!(port_taken(&server.unwrap_err()));
        assert_eq!(asked, PORTS_TRIED);
    }

    #[test]
    fn any_answer_will_do_but_loading() {
        let folder = tempfile::tempdir().unwrap();
        let socket = socket(folder.path());
        assert!(!answers(&socket), "nobody is there");
        let listener = UnixListener::bind(&socket).unwrap();
        let replies = ["+PONG\r\n", "-NOAUTH Authentication required.\r\n", "-LOADING Redis is loading\r\n", ""];
        let server = thread::spawn(move || {
            for reply in replies {
                let (mut stream, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line).unwrap();
                stream.write_all(reply.as_bytes()).unwrap();
            }
        });
        assert_eq!(replies.map(|_| answers(&socket)), [true, true, false, false]);
        server.join().unwrap();
    }

    #[test]
    fn a_long_log_is_quoted_by_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert_eq!(last_lines(b"a\r\n\n b \n", &log, 0), "a\n b");
        let lines: Vec<String> = (0..100).map(|n| n.to_string()).collect();
        std::fs::write(&log, lines.join("\n")).unwrap();
        assert_eq!(last_lines(b"output", &log, 0), lines[100 - LINES_QUOTED..].join("\n"));
        // what was there before the start is not this start's
        assert_eq!(last_lines(b"output", &log, (lines.join("\n").len() - 5) as u64), "output\n98\n99");
    }

    /// The guard in each shell that is here, with a "server" that has a child.
    #[test]
    fn any_shell_can_be_the_guard() {
        let mut shells = 0;
        for shell in [&["/bin/sh"] as &[&str], &["dash"], &["bash", "--posix"], &["busybox", "sh"]] {
            for end in ["", "STOP\n", "KILL\n", "LEAVE\n"] {
                let folder = new_folder().unwrap();
                let mut command = Command::new(shell[0]);
                command.args(&shell[1..]).args(["-c", GUARD, "sh"]).arg(&folder).arg("yes");
                command
                    .args(["/bin/sh", "-c", "sleep 60 & echo $! >\"$0/new\"; mv \"$0/new\" \"$0/child\"; wait"])
                    .arg(&folder);
                command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
                let Ok((mut guard, ended)) = Guard::spawn(command) else { continue };
                shells += 1;
                let what = format!("{shell:?} {end:?}");
                let line = guard.answer().unwrap();
                let pid = line.strip_prefix("pid ").unwrap_or_else(|| panic!("{what}: {line:?}"));
                let child = read_soon(&folder.join("child"));
                let lives = |pid: &str| {
                    let state = Command::new("ps").args(["-o", "stat=", "-p", pid.trim()]).output().unwrap();
                    let state = String::from_utf8_lossy(&state.stdout).into_owned();
                    !state.is_empty() && !state.starts_with('Z')
                };
                assert!(lives(pid) && lives(&child), "{what}");
                guard.order("STOP").unwrap();
                guard.order("CONT").unwrap();
                if end == "LEAVE\n" {
                    guard.order("KILL").unwrap();
                    assert!(!lives(pid), "{what}");
                    assert!(guard.order("STOP").is_err() && guard.order("CONT").is_err(), "{what}");
                    guard.leave();
                    assert!(folder.exists(), "{what}");
                    std::fs::remove_dir_all(&folder).unwrap();
                    assert!(Command::new("kill").args(["-KILL", child.trim()]).status().unwrap().success());
                } else {
                    if !end.is_empty() {
                        guard.order(end.trim()).unwrap();
                    }
                    drop(guard);
                    assert!(!folder.exists(), "{what}");
                    // the child has been killed, too: the pipe has nobody left
                    ended.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what}: the pipe is held"));
                    assert!(!lives(pid) && !lives(&child), "{what}");
                }
            }
        }
        assert!(shells >= 4, "{shells}");
    }

    /// A server holds its output until it ends. What has let go of it counts as gone, even if it is not, as here.
    #[test]
    fn what_is_gone_gets_no_signal() {
        let folder = new_folder().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "sh"]).arg(&folder).arg("yes");
        command.args(["/bin/sh", "-c", "exec >/dev/null 2>&1; exec sleep 60"]).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (mut guard, ended) = Guard::spawn(command).unwrap();
        let line = guard.answer().unwrap();
        let pid = line.strip_prefix("pid ").unwrap();
        ended.recv_timeout(PATIENCE).unwrap();
        for order in ["STOP", "CONT"] {
            assert_eq!(guard.order(order).unwrap_err().kind(), ErrorKind::NotFound);
        }
        guard.order("KILL").unwrap();
        let lives = || Command::new("kill").args(["-0", pid]).stderr(Stdio::null()).status().unwrap().success();
        assert!(lives());
        // but nobody of the guard's group is left
        drop(guard);
        let start = Instant::now();
        while lives() && start.elapsed() < PATIENCE {
            thread::sleep(PAUSE);
        }
        // in some containers nobody collects the dead
        let state = Command::new("ps").args(["-o", "stat=", "-p", pid]).output().unwrap();
        assert!(state.stdout.is_empty() || state.stdout.starts_with(b"Z"));
    }

    fn read_soon(path: &Path) -> String {
        let start = Instant::now();
        loop {
            match std::fs::read_to_string(path) {
                Ok(text) => return text,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{}: {error}", path.display()),
            }
            thread::sleep(PAUSE);
        }
    }
}
