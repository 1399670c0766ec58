//! The worker processes, and their faults.

use std::{
    io::{self, BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::fault::{Effect, Fault};
use crate::{
    clock::{now, wait_for},
    servers::Servers,
    settings::{Mode, Settings},
    topology::CLIENTS,
};

pub(super) const SORTS: [(&str, u64, u64); 5] = [
    ("pause", 20, 600),
    ("pause-long", 800, 2600),
    ("crash", 0, 300),
    ("hogs", 100, 400),
    // must not cost a lock: renewal does not depend on the runtime
    ("block-runtime", 100, 2500),
];

/// A worker process. It ends with the thread that started it, so that thread must outlive it.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) name: String,
    child: Child,
    orders: ChildStdin,
    lines: Receiver<String>,
    /// Violations that it reported.
    pub(crate) wrong: Vec<String>,
    pub(crate) resources: String,
}

impl Worker {
    pub(crate) fn order(&mut self, order: &str) {
        // a worker that has ended is detected elsewhere
        let _ = writeln!(self.orders, "{order}");
    }

    /// Waits until the worker prints `what`. Returns `false` if it ends first, or does not print it
    /// in time.
    pub(crate) fn wait_for(&mut self, what: &str, until: u64) -> bool {
        loop {
            let left = Duration::from_nanos(until.saturating_sub(now()));
            match self.lines.recv_timeout(left) {
                Ok(line) if line == what => return true,
                Ok(line) => match line.split_once(' ') {
                    Some(("wrong:", text)) => self.wrong.push(text.to_owned()),
                    Some(("resources", text)) => text.clone_into(&mut self.resources),
                    _ => {}
                },
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    pub(crate) fn wait_for_the_end(&mut self, limit: u64) -> Option<ExitStatus> {
        let mut status = None;
        wait_for(limit, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        status
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        kill(
            Pid::from_raw(self.child.id().try_into().expect("a process id")),
            signal,
        )
        .map_err(io::Error::from)
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All worker processes.
pub(crate) struct Processes {
    pub(crate) workers: Vec<Worker>,
    generations: Vec<usize>,
    words: String,
    urls: Vec<String>,
    folder: PathBuf,
}

impl Processes {
    pub(crate) fn start(
        settings: &Settings,
        mode: Mode,
        servers: &Servers,
        folder: PathBuf,
        until: u64,
    ) -> io::Result<Self> {
        let words = format!("{} until={until}", settings.words(mode));
        let urls = (0..settings.workers * CLIENTS)
            .map(|client| servers.urls(client))
            .collect();
        let mut all = Self {
            workers: Vec::new(),
            generations: vec![0; settings.workers],
            words,
            urls,
            folder,
        };
        for slot in 0..settings.workers {
            let worker = all.spawn(slot)?;
            all.workers.push(worker);
        }
        Ok(all)
    }

    fn spawn(&self, slot: usize) -> io::Result<Worker> {
        let generation = self.generations[slot];
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("worker").args(self.words.split(' '));
        command
            .arg(format!("slot={slot}"))
            .arg(format!("generation={generation}"));
        command.arg(format!("folder={}", self.folder.display()));
        for client in slot * CLIENTS..(slot + 1) * CLIENTS {
            command.arg(format!("urls{client}={}", self.urls[client]));
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().expect("its stdin");
        let output = BufReader::new(child.stdout.take().expect("its stdout"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            output
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| sender.send(line))
        });
        let name = format!("s{slot}g{generation}");
        Ok(Worker {
            name,
            child,
            orders,
            lines,
            wrong: Vec::new(),
            resources: String::new(),
        })
    }

    fn replace(&mut self, slot: usize) -> io::Result<()> {
        self.generations[slot] += 1;
        let worker = self.spawn(slot)?;
        self.workers[slot] = worker;
        Ok(())
    }
}

pub(super) fn strike(all: &mut Processes, fault: &Fault) -> io::Result<Effect> {
    match &*fault.sort {
        "pause" | "pause-long" => {
            all.workers[fault.target].signal(Signal::SIGSTOP)?;
            fault.sleep();
            all.workers[fault.target].signal(Signal::SIGCONT)?;
        }
        "crash" => {
            all.workers[fault.target].kill();
            fault.sleep();
            all.replace(fault.target)?;
        }
        "hogs" => {
            let hog = || {
                Command::new(std::env::current_exe()?)
                    .args(["hog", &fault.ms.to_string()])
                    .spawn()
            };
            for mut hog in [hog()?, hog()?] {
                hog.wait()?;
            }
        }
        "block-runtime" => {
            all.workers[fault.target].order(&format!("block {}", fault.ms));
            fault.sleep();
        }
        other => return Err(io::Error::other(format!("unknown fault: {other}"))),
    }
    Ok(Effect::Kept)
}
