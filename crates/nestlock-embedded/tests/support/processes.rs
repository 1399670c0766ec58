//! Processes in tests: their replies, whether they still run, and test binaries that own servers and end.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread::sleep,
    time::{Duration, Instant},
};

use nestlock_embedded::SpawnedServer;

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Far beyond what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(20);

#[track_caller]
pub fn eventually(what: &str, mut state: impl FnMut() -> bool) {
    let start = Instant::now();
    while !state() {
        assert!(
            start.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        sleep(ms(2));
    }
}

/// Sends a command, and reads the first line of the reply and what has arrived with it.
pub fn ask(stream: &mut (impl Read + Write), command: &str) -> std::io::Result<String> {
    stream.write_all(format!("{command}\r\n").as_bytes())?;
    let mut answer = vec![0; 4096];
    let count = stream.read(&mut answer)?;
    answer.truncate(count);
    Ok(String::from_utf8_lossy(&answer).trim_end().to_owned())
}

pub fn try_call(addr: SocketAddr, command: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(addr)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    ask(&mut stream, command)
}

pub fn call(server: &SpawnedServer, command: &str) -> String {
    try_call(server.addr(), command).expect("a reply")
}

/// Whether the process exists, even as a zombie.
pub fn runs(pid: u32) -> bool {
    Command::new("kill")
        .args(["-0", &pid.to_string()])
        .stderr(Stdio::null())
        .status()
        .expect("kill(1)")
        .success()
}

/// Returns whether a process has ended. It may be a zombie: the guard's shell reaps the server only
/// when it carries out an order.
pub fn ended(pid: u32) -> bool {
    let state = Command::new("ps")
        .args(["-o", "stat=", "-p", &pid.to_string()])
        .output()
        .expect("ps(1)");
    state.stdout.is_empty() || state.stdout.starts_with(b"Z")
}

pub fn signal(name: &str, pid: u32) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .status()
        .expect("kill(1)");
    assert!(status.success(), "kill -{name} {pid}");
}

/// Set in child processes: what to do.
pub const ROLE: &str = "NESTLOCK_SPAWNED_ROLE";
/// The prefix of every line of a child process: libtest prints lines as well.
pub const MARK: &str = "@child ";

/// This test binary, started again as the owner of a server.
#[derive(Debug)]
pub struct Owner {
    pub process: Child,
    _stdin: ChildStdin,
    pub lines: Receiver<String>,
}

impl Owner {
    pub fn start(role: &str, variables: &[(&str, &Path)]) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "a_child_process_plays_its_role",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ROLE, role)
            .env("RUST_BACKTRACE", "0")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (stdin, output) = (
            process.stdin.take().unwrap(),
            BufReader::new(process.stdout.take().unwrap()),
        );
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some((_, line)) = line.split_once(MARK) {
                    let _ = sender.send(line.to_owned());
                }
            }
        });
        Self {
            process,
            _stdin: stdin,
            lines,
        }
    }

    pub fn line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("a line")
    }

    /// The server's process id and folder.
    pub fn server(&self) -> (u32, PathBuf) {
        let line = self.line();
        let (pid, folder) = line.split_once(' ').expect("two words");
        (pid.parse().expect("a number"), folder.into())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn say(what: impl std::fmt::Display) {
    println!("{MARK}{what}");
}

pub fn assert_nothing_is_left(what: &str, pid: u32, folder: &Path) {
    eventually(&format!("{what}: the server ends"), || !runs(pid));
    eventually(&format!("{what}: the folder is removed"), || {
        !folder.exists()
    });
}

/// Checks, without a server program, that this many invalid numbers are errors before the program is searched for, and
/// that valid ones are not.
pub fn assert_wrong_numbers_come_first(wrong: usize) {
    let owner = Owner::start(
        "wrong",
        &[("NESTLOCK_SERVER_BIN", Path::new("no-such-server"))],
    );
    for _ in 0..wrong {
        let line = owner.line();
        assert!(line.starts_with("Invalid"), "{line}");
    }
    let line = owner.line();
    assert!(line.starts_with("NotFound"), "{line}");
}

/// Three servers of a killed owner end with it.
pub fn assert_nothing_is_left_of_a_killed_owner() {
    let mut owner = Owner::start("wait", &[]);
    let servers = [owner.server(), owner.server(), owner.server()];
    assert!(
        servers
            .iter()
            .all(|(pid, folder)| runs(*pid) && folder.exists())
    );
    owner.process.kill().unwrap();
    for (pid, folder) in servers {
        assert_nothing_is_left("killed", pid, &folder);
    }
}

/// Kills an owner this long after it begins to start servers in this folder. `true`: before it had reported all of them.
#[cfg(target_os = "linux")]
pub fn is_killed_during_the_start(folder: &Path, after: Duration) -> bool {
    let mut owner = Owner::start("start", &[("TMPDIR", folder)]);
    assert_eq!(owner.line(), "starts");
    sleep(after);
    owner.process.kill().unwrap();
    owner.process.wait().unwrap();
    let is_early = owner.lines.recv_timeout(PATIENCE).is_err();
    eventually("no process is left", || processes(folder).is_empty());
    eventually("no folder is left", || {
        std::fs::read_dir(folder).unwrap().count() == 0
    });
    is_early
}

/// Processes that have this folder on their command line or in their environment, or as their working directory: a server
/// overwrites the first two with its title.
#[cfg(target_os = "linux")]
pub fn processes(folder: &Path) -> Vec<String> {
    let text = folder.to_str().unwrap();
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let process = process.path();
        // it may have ended meanwhile
        let read = |file: &str| std::fs::read(process.join(file)).unwrap_or_default();
        let command_line = String::from_utf8_lossy(&read("cmdline")).into_owned();
        let is_in_it = process
            .join("cwd")
            .read_link()
            .is_ok_and(|at| at.starts_with(folder));
        if is_in_it
            || command_line.contains(text)
            || String::from_utf8_lossy(&read("environ")).contains(text)
        {
            found.push(format!("{}: {command_line}", process.display()));
        }
    }
    found
}
