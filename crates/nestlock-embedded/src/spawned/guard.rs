//! The process that stands between us and a server, and ends it when we end.

use std::{
    fs::File,
    io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    SpawnError,
    plan::{Plan, log_file},
    socket,
};

/// How long a server may take until it answers.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// Between two looks at a server that starts.
pub(super) const PAUSE: Duration = Duration::from_millis(1);
/// What an error quotes of a log.
const LINES_QUOTED: usize = 12;

/// The parent of the server: `sh -c GUARD sh FOLDER MAKE PROGRAM ARGS...`. Its stdin is a pipe that only we hold, so
/// that it ends when we do; then the server is killed, and the folder removed.
///
/// - Its stderr is a second pipe, which it passes to the server and closes: it ends with the server.
/// - An answer may find nobody who reads it any more: that must not end the guard.
/// - `kill 0` also ends what the server has forked: it is the guard's group, and nobody else is in it.
pub(super) const GUARD: &str = r#"
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
pub(super) struct Guard {
    process: Child,
    orders: Orders,
    answers: BufReader<ChildStdout>,
    pub(super) pid: u32,
    /// Whether it hangs, by order.
    pub(super) stopped: bool,
}

impl Guard {
    /// Starts a server under a guard, and waits until it answers.
    pub(super) fn start(plan: &Plan, folder: &Path, port: u16, make_folder: bool) -> Result<Self, SpawnError> {
        let (socket, log_file) = (socket(folder), log_file(folder));
        let old_log = log_file.metadata().map_or(0, |file| file.len());
        let command = plan.command(folder, port, make_folder);
        let (mut guard, ended) = Self::spawn(command)?;
        let log = |output: &[u8]| last_lines(output, &log_file, old_log);
        let failure = match guard.wait_until_it_answers(&ended, &socket) {
            Ok(Outcome::Answers) => return Ok(guard),
            Ok(Outcome::Ended(output)) => SpawnError::Ended { program: plan.program.clone(), log: log(&output) },
            Ok(Outcome::Silent) => SpawnError::Silent { program: plan.program.clone(), log: log(&[]) },
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
        let guard =
            Self { process, orders: Arc::clone(&orders), answers: BufReader::new(answers), pid: 0, stopped: false };
        thread::Builder::new()
            .name("nestlock-spawned".into())
            .spawn(move || wait_for_the_end(output, &orders, &sender))?;
        Ok((guard, ended))
    }

    /// Gives an order, and waits until it is carried out.
    pub(super) fn order(&mut self, order: &str) -> io::Result<()> {
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
    pub(super) fn leave(self) {
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

pub(super) fn port_taken(error: &SpawnError) -> bool {
    match error {
        SpawnError::Ended { log, .. } => log.contains("already in use"),
        SpawnError::Io(error) => error.kind() == ErrorKind::AddrInUse,
        _ => false,
    }
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

#[cfg(test)]
mod tests {
    use std::{
        os::unix::{net::UnixListener, process::CommandExt},
        process::Stdio,
    };

    use super::{super::new_folder, *};

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
