//! A server, a folder, and the program under test.

use std::{
    fs,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    ops::Deref,
    os::unix::process::ExitStatusExt,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::mpsc,
    thread::{self, sleep},
    time::{Duration, Instant},
};

use nestlock_embedded::SpawnedServer;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

/// The limit for an expected event, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A separate server, and a folder.
pub struct World {
    pub server: SpawnedServer,
    place: Place,
}

/// A folder in which the program runs with this URL.
pub struct Place {
    url: String,
    folder: TempDir,
}

impl World {
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// Starts the server with these arguments.
    pub fn with(args: &[&str]) -> Self {
        let server = SpawnedServer::start_with(args).unwrap();
        let place = Place::at(server.url());
        Self { server, place }
    }

    /// Returns the raw reply of the server. A single read, so only for short replies.
    pub fn server_says(&self, words: &[&str]) -> String {
        says(self.server.addr(), words)
    }
}

impl Deref for World {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

/// Returns the raw reply of a server. A single read, so only for short replies.
pub fn says(server: SocketAddr, words: &[&str]) -> String {
    let mut connection = TcpStream::connect(server).unwrap();
    let words = words
        .iter()
        .map(|word| format!("${}\r\n{word}\r\n", word.len()));
    let words: Vec<String> = words.collect();
    connection
        .write_all(format!("*{}\r\n{}", words.len(), words.concat()).as_bytes())
        .unwrap();
    let mut answer = [0; 4096];
    let length = connection.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

impl Place {
    pub fn at(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// Returns the program with these arguments, in the folder. Its shell is `sh`.
    pub fn nestlock(&self, args: &[&str]) -> Command {
        self.program(env!("CARGO_BIN_EXE_nestlock"), args)
    }

    /// Copies a program into the folder, by `cp`. If this process wrote the file, a child that
    /// another test forks in the meantime would inherit the open descriptor, and the copy could not
    /// be executed (ETXTBSY) until that child calls exec.
    pub fn copy(&self, program: &str, name: &str) -> PathBuf {
        let copy = self.path(name);
        assert!(
            Command::new("cp")
                .arg(program)
                .arg(&copy)
                .status()
                .unwrap()
                .success()
        );
        copy
    }

    /// Returns another program, in the same folder. No signal is ignored, even if the tests were
    /// started that way.
    pub fn program(&self, program: &str, args: &[&str]) -> Command {
        let mut command = if cfg!(target_os = "linux") {
            let mut env = Command::new("env");
            env.arg("--default-signal=HUP,INT,QUIT,TERM").arg(program);
            env
        } else {
            Command::new(program)
        };
        command
            .args(args)
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        command
            .env("NESTLOCK_URL", &self.url)
            .env("SHELL", "/bin/sh");
        command
    }

    /// Returns the program in a new session, without the terminal of the tests.
    pub fn nestlock_without_terminal(&self, args: &[&str]) -> Command {
        self.program(
            "setsid",
            &[&[env!("CARGO_BIN_EXE_nestlock")], args].concat(),
        )
    }

    pub fn output(&self, args: &[&str]) -> Output {
        self.nestlock(args).output().unwrap()
    }

    pub fn code(&self, args: &[&str]) -> i32 {
        let output = self.output(args);
        let errors = String::from_utf8_lossy(&output.stderr);
        output
            .status
            .code()
            .unwrap_or_else(|| panic!("{args:?} {:?} {errors}", output.status))
    }

    /// Returns the exit code, the output and the errors.
    pub fn said(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let output = self.output(args);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    }

    /// Starts a holder that keeps the lock until the file `go` exists.
    pub fn hold(&self, name: &str, kind: &str) -> Running {
        let file = format!("held-{kind}");
        let line = format!("echo $NESTLOCK_OWNER > {file}; {}", until("go"));
        self.begin(&["exec", name, "--kind", kind, "-c", &line], &file)
    }

    /// Starts the program, and waits until it has written this file.
    pub fn begin(&self, args: &[&str], file: &str) -> Running {
        let running = Running::of(self.nestlock(args));
        self.text(file);
        running
    }

    /// Returns the content of a file, as soon as it has a line.
    pub fn text(&self, file: &str) -> String {
        let path = self.path(file);
        let read = || {
            fs::read_to_string(&path)
                .ok()
                .filter(|text| text.ends_with('\n'))
        };
        eventually(&format!("{file} is written"), || read().is_some());
        read().unwrap().trim().to_owned()
    }

    pub fn pid(&self, file: &str) -> i32 {
        self.text(file).parse().unwrap()
    }

    /// Creates this file, which ends each `until` that waits for it.
    pub fn make(&self, file: &str) {
        fs::write(self.path(file), "\n").unwrap();
    }

    pub fn exists(&self, file: &str) -> bool {
        self.path(file).exists()
    }
}

/// Returns a line of shell that waits for a file.
pub fn until(file: &str) -> String {
    format!("while [ ! -e {file} ]; do sleep 0.02; done")
}

/// A running program. It is killed when dropped.
pub struct Running(Child);

impl Running {
    pub fn of(mut command: Command) -> Self {
        Self(command.stderr(Stdio::null()).spawn().unwrap())
    }

    /// Starts a program with this standard error.
    pub fn telling(mut command: Command, stderr: impl Into<Stdio>) -> Self {
        Self(command.stderr(stderr).spawn().unwrap())
    }

    pub fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    pub fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Returns the exit code, or 128+N if signal N ended the program, as in a shell.
    pub fn code(mut self) -> Option<i32> {
        eventually("it ends", || self.0.try_wait().unwrap().is_some());
        let status = self.0.wait().unwrap();
        status.code().or_else(|| Some(128 + status.signal()?))
    }

    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns whether a process runs. A zombie does not.
pub fn is_alive(pid: i32) -> bool {
    let is_over =
        || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "));
    kill(Pid::from_raw(pid), None).is_ok() && !is_over()
}

/// Waits until the lock `l` is free. This process must have ended by then.
///
/// The process is checked after the lock, because it may end while `who` starts.
pub fn ends_before_it_is_free(world: &Place, pid: i32) {
    within(2 * PATIENCE, "it is free", || {
        let is_free = world.code(&["who", "l"]) == 1;
        assert!(!(is_free && is_alive(pid)), "it works on");
        is_free
    });
}

/// Returns all processes, with their parents and states.
fn processes() -> String {
    let ps = Command::new("ps")
        .args(["-eo", "pid,ppid,pgid,stat,args"])
        .output();
    ps.map_or_else(
        |error| error.to_string(),
        |ps| String::from_utf8_lossy(&ps.stdout).into_owned(),
    )
}

pub fn eventually(what: &str, is_so: impl FnMut() -> bool) {
    within(PATIENCE, what, is_so);
}

pub fn within(limit: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(
            start.elapsed() < limit,
            "not within {limit:?}: {what}\n{}",
            processes()
        );
        sleep(Duration::from_millis(10));
    }
}

/// Starts a proxy to the server. A request for which `answers` returns a reply is not forwarded.
pub fn relay(
    at: TcpListener,
    server: SocketAddr,
    answers: fn(&[u8]) -> Option<&'static str>,
) -> SocketAddr {
    let address = at.local_addr().unwrap();
    thread::spawn(move || {
        for near in at.incoming() {
            let (Ok(mut near), Ok(mut far)) = (near, TcpStream::connect(server)) else {
                return;
            };
            carry(
                far.try_clone().unwrap(),
                near.try_clone().unwrap(),
                Duration::ZERO,
            );
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = near.read(&mut bytes) {
                    let said = match answers(&bytes[..length]) {
                        Some(answer) => near.write_all(answer.as_bytes()),
                        None => far.write_all(&bytes[..length]),
                    };
                    if said.is_err() {
                        break;
                    }
                }
                let _ = far.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

/// Starts a proxy to the server that delays each direction by this time.
pub fn far_away(world: &World, takes: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, server) = (listener.local_addr().unwrap(), world.server.addr());
    thread::spawn(move || {
        for near in listener.incoming() {
            let (Ok(near), Ok(far)) = (near, TcpStream::connect(server)) else {
                return;
            };
            carry(near.try_clone().unwrap(), far.try_clone().unwrap(), takes);
            carry(far, near, takes);
        }
    });
    format!("redis://{address}")
}

/// Delays bytes without delaying the bytes after them: any number may be in flight.
fn carry(mut from: TcpStream, mut to: TcpStream, takes: Duration) {
    let (queue, queued) = mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut bytes) {
            if queue
                .send((Instant::now() + takes, bytes[..length].to_vec()))
                .is_err()
            {
                return;
            }
        }
    });
    thread::spawn(move || {
        for (due, bytes) in queued {
            sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
