//! A worker process, and the resources that it and the server use.

use std::{
    fmt::Display,
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use nix::unistd::{SysconfVar, sysconf};

use crate::contenders::Contender;

/// A worker that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(40);

#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
    /// The version of the library.
    pub(crate) version: String,
}

impl Worker {
    pub(crate) fn start(contender: &Contender, url: &str) -> Result<Self, String> {
        let mut command = contender.command();
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| format!("its worker does not start: {error}"))?;
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let stdin = child.stdin.take().expect("a pipe");
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix("@ ") {
                    let _ = sender.send(answer.to_owned());
                }
            }
        });
        let mut worker = Self {
            child,
            stdin,
            answers,
            version: String::new(),
        };
        worker.version = worker.ask("connected", format_args!("connect {url}"))?;
        Ok(worker)
    }

    pub(crate) fn ask(&mut self, wanted: &str, request: impl Display) -> Result<String, String> {
        self.send(request)?;
        self.answer(wanted)
    }

    pub(crate) fn send(&mut self, request: impl Display) -> Result<(), String> {
        writeln!(self.stdin, "{request}")
            .and_then(|()| self.stdin.flush())
            .map_err(|_| "its worker ended".into())
    }

    /// Returns what follows the wanted word in the next reply.
    pub(crate) fn answer(&mut self, wanted: &str) -> Result<String, String> {
        let answer = self
            .answers
            .recv_timeout(PATIENCE)
            .map_err(|error| match error {
                mpsc::RecvTimeoutError::Timeout => format!("its worker does not reply ({wanted})"),
                mpsc::RecvTimeoutError::Disconnected => format!("its worker ended ({wanted})"),
            })?;
        match answer.strip_prefix(wanted) {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => Err(format!("{wanted}: {answer}")),
        }
    }

    pub(crate) fn numbers(
        &mut self,
        wanted: &str,
        request: impl Display,
    ) -> Result<Vec<f64>, String> {
        let answer = self.ask(wanted, request)?;
        answer
            .split(' ')
            .map(|word| word.parse().map_err(|_| format!("{wanted} {answer}")))
            .collect()
    }

    /// Returns the processor time so far, in microseconds. It is counted in steps of 10 ms.
    pub(crate) fn cpu(&self) -> f64 {
        let stat =
            fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // the program's name may contain blanks; utime and stime are 12th and 13th after it
        let fields = stat.rsplit(')').next().unwrap_or_default();
        let ticks: f64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<f64>().ok())
            .sum();
        let second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
        ticks / second as f64 * 1e6
    }

    /// Returns `VmRSS:` or `VmHWM:`, in kB.
    pub(crate) fn memory(&self, field: &str) -> f64 {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(field))
            .unwrap_or_default();
        line.trim_matches(|letter: char| !letter.is_ascii_digit())
            .parse()
            .unwrap_or(f64::NAN)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection for the server's `INFO`.
#[derive(Debug)]
pub(crate) struct Info(BufReader<TcpStream>);

impl Info {
    pub(crate) fn connect(address: SocketAddr) -> Self {
        Self(BufReader::new(
            TcpStream::connect(address).expect("a server"),
        ))
    }

    fn section(&mut self, section: &str) -> String {
        self.0
            .get_mut()
            .write_all(format!("INFO {section}\r\n").as_bytes())
            .expect("a server");
        let mut length = String::new();
        self.0.read_line(&mut length).expect("an answer");
        let length: usize = length
            .trim()
            .trim_start_matches('$')
            .parse()
            .expect("a length");
        let mut text = vec![0; length + 2];
        self.0.read_exact(&mut text).expect("an answer");
        String::from_utf8(text).expect("text")
    }

    pub(crate) fn field(&mut self, section: &str, field: &str) -> String {
        let text = self.section(section);
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.expect("a field").trim().to_owned()
    }

    /// Returns the server's processor time so far, in microseconds.
    pub(crate) fn cpu(&mut self) -> f64 {
        let text = self.section("cpu");
        let fields = text.lines().filter_map(|line| {
            line.strip_prefix("used_cpu_user:")
                .or_else(|| line.strip_prefix("used_cpu_sys:"))?
                .trim()
                .parse::<f64>()
                .ok()
        });
        fields.sum::<f64>() * 1e6
    }
}
