//! The guard: a shell process between this process and a server. It ends the server when this
//! process ends.

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
    folder::{log_file, socket},
    plan::Plan,
};

/// How long a server may take until its first reply.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// The pause between two polls of a server that is starting.
pub(super) const PAUSE: Duration = Duration::from_millis(1);
/// How many lines of a log an error quotes.
const LINES_QUOTED: usize = 12;

/// The guard's stdin, for orders. `None` when it has been closed, which ends the guard.
type Orders = Arc<Mutex<Option<ChildStdin>>>;

/// How the start of a server has ended.
enum Startup {
    Answers,
    /// With the last of its output.
    Ended(Vec<u8>),
    Silent,
}

/// The shell that is the parent of the server. Dropping this kills the server and removes the
/// folder.
#[derive(Debug)]
pub(super) struct Guard {
    process: Child,
    orders: Orders,
    answers: BufReader<ChildStdout>,
    pub(super) pid: u32,
    /// Whether an order has stopped the server.
    pub(super) stopped: bool,
}

impl Guard {
    /// Starts a server under a guard, and waits until it replies.
    pub(super) fn start(
        plan: &Plan,
        folder: &Path,
        port: u16,
        make_folder: bool,
    ) -> Result<Self, SpawnError> {
        let (socket, log_file) = (socket(folder), log_file(folder));
        let old_log = log_file.metadata().map_or(0, |file| file.len());
        let command = plan.command(folder, port, make_folder);
        let (mut guard, ended) = Self::spawn(command)?;
        let log = |output: &[u8]| last_lines(output, &log_file, old_log);
        let failure = match guard.wait_until_it_answers(&ended, &socket) {
            Ok(Startup::Answers) => return Ok(guard),
            Ok(Startup::Ended(output)) => SpawnError::Ended {
                program: plan.program.clone(),
                log: log(&output),
            },
            Ok(Startup::Silent) => SpawnError::Silent {
                program: plan.program.clone(),
                log: log(&[]),
            },
            Err(error) => error.into(),
        };
        // a failed restart must not remove the folder
        if !make_folder {
            let _ = guard.order("KILL");
            guard.leave();
        }
        Err(failure)
    }

    fn wait_until_it_answers(
        &mut self,
        ended: &Receiver<Vec<u8>>,
        socket: &Path,
    ) -> io::Result<Startup> {
        let Some(pid) = self
            .answer()?
            .strip_prefix("pid ")
            .and_then(|pid| pid.parse().ok())
        else {
            return Ok(Startup::Ended(ended.recv().unwrap_or_default()));
        };
        self.pid = pid;
        let start = Instant::now();
        loop {
            match ended.recv_timeout(PAUSE) {
                Ok(output) => return Ok(Startup::Ended(output)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Startup::Ended(Vec::new())),
                Err(RecvTimeoutError::Timeout) if answers(socket) => return Ok(Startup::Answers),
                Err(RecvTimeoutError::Timeout) if start.elapsed() > PATIENCE => {
                    return Ok(Startup::Silent);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Starts the shell. The receiver gets the last output of the server when it has ended.
    pub(super) fn spawn(mut command: Command) -> io::Result<(Self, Receiver<Vec<u8>>)> {
        // On macOS, a pipe is created first and made close-on-exec afterwards. A guard that is
        // started in between would inherit it, and the two guards would keep each other alive.
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let mut process = command.spawn()?;
        drop(alone);
        let (Some(orders), Some(answers), Some(output)) = (
            process.stdin.take(),
            process.stdout.take(),
            process.stderr.take(),
        ) else {
            return Err(io::Error::other("the process has no pipes"));
        };
        let (orders, (sender, ended)) = (Orders::new(Mutex::new(Some(orders))), mpsc::channel());
        let guard = Self {
            process,
            orders: Arc::clone(&orders),
            answers: BufReader::new(answers),
            pid: 0,
            stopped: false,
        };
        thread::Builder::new()
            .name("nestlock-spawned".into())
            .spawn(move || wait_for_the_end(output, &orders, &sender))?;
        Ok((guard, ended))
    }

    /// Sends an order and waits until it is carried out.
    pub(super) fn order(&mut self, order: &str) -> io::Result<()> {
        write_order(&self.orders, order)?;
        match self.answer()?.as_str() {
            "done" => Ok(()),
            "gone" => Err(io::Error::new(ErrorKind::NotFound, "the server has ended")),
            _ => Err(io::Error::new(
                ErrorKind::BrokenPipe,
                "the shell that guards the server has ended",
            )),
        }
    }

    /// Returns the guard's next reply. Returns an empty string if the guard has ended.
    pub(super) fn answer(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }

    /// Ends the guard of a server that has ended, and keeps the folder.
    pub(super) fn leave(self) {
        let _ = write_order(&self.orders, "LEAVE");
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(
            self.orders
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        let _ = self.process.wait();
    }
}

fn write_order(orders: &Orders, order: &str) -> io::Result<()> {
    match &mut *orders.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(orders) => orders.write_all(format!("{order}\n").as_bytes()),
        None => Ok(()),
    }
}

/// Reads the pipe that only the server writes to, until it ends with the server. Then makes the
/// guard forget the server's process id, which the system may reuse.
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

/// Returns whether the server replies on its own socket. A port could belong to another process.
/// Any reply counts, such as a request for a password, except that the server is still loading.
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

/// Returns the last lines that the server has written: to its output, where it complains about
/// arguments, and to its log, from the offset `old_log` on.
fn last_lines(output: &[u8], log_file: &Path, old_log: u64) -> String {
    let mut log = Vec::new();
    let read = |log: &mut Vec<u8>| {
        let mut file = File::open(log_file)?;
        file.seek(SeekFrom::Start(old_log))?;
        file.read_to_end(log)
    };
    // without a log, the server ended before it opened one
    let _ = read(&mut log);
    let text = [
        String::from_utf8_lossy(output),
        String::from_utf8_lossy(&log),
    ]
    .join("\n");
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty())
        .collect();
    lines[lines.len().saturating_sub(LINES_QUOTED)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn any_answer_will_do_but_loading() {
        let folder = tempfile::tempdir().unwrap();
        let socket = socket(folder.path());
        assert!(!answers(&socket), "no process listens there");
        let listener = UnixListener::bind(&socket).unwrap();
        let replies = [
            "+PONG\r\n",
            "-NOAUTH Authentication required.\r\n",
            "-LOADING Redis is loading\r\n",
            "",
        ];
        let server = thread::spawn(move || {
            for reply in replies {
                let (mut stream, _) = listener.accept().unwrap();
                let mut line = String::new();
                BufReader::new(&stream).read_line(&mut line).unwrap();
                stream.write_all(reply.as_bytes()).unwrap();
            }
        });
        assert_eq!(
            replies.map(|_| answers(&socket)),
            [true, true, false, false]
        );
        server.join().unwrap();
    }

    #[test]
    fn a_long_log_is_quoted_by_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        assert_eq!(last_lines(b"a\r\n\n b \n", &log, 0), "a\n b");
        let lines: Vec<String> = (0..100).map(|n| n.to_string()).collect();
        std::fs::write(&log, lines.join("\n")).unwrap();
        assert_eq!(
            last_lines(b"output", &log, 0),
            lines[100 - LINES_QUOTED..].join("\n")
        );
        // lines from before this start are not quoted
        assert_eq!(
            last_lines(b"output", &log, (lines.join("\n").len() - 5) as u64),
            "output\n98\n99"
        );
    }
}
