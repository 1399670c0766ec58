//! The libraries that are compared, and how their workers are started.

use std::{fs, process::Command};

use crate::root;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    /// Whether it can wait. Bare scripts only take free locks.
    pub(crate) waits: bool,
    pub(crate) color: (u8, u8, u8),
    program: Program,
}

#[derive(Debug, Clone, Copy)]
enum Program {
    /// This program.
    Rust,
    Go,
    Python,
    Node,
    Java,
}

const fn contender(
    name: &'static str,
    waits: bool,
    program: Program,
    color: (u8, u8, u8),
) -> Contender {
    Contender {
        name,
        waits,
        color,
        program,
    }
}

pub(crate) const NESTLOCK: &str = "nestlock";
pub(crate) const REDIS_RS: &str = "bare redis-rs";

pub(crate) const ALL: [Contender; 9] = [
    contender(NESTLOCK, true, Program::Rust, (214, 39, 40)),
    contender(REDIS_RS, false, Program::Rust, (90, 90, 90)),
    contender("bare fred", false, Program::Rust, (165, 165, 165)),
    contender("rslock", true, Program::Rust, (255, 127, 14)),
    contender("rlock", true, Program::Rust, (188, 143, 30)),
    contender("redsync", true, Program::Go, (23, 160, 190)),
    contender("python-redis-lock", true, Program::Python, (44, 140, 44)),
    contender("node-redlock", true, Program::Node, (148, 103, 189)),
    contender("Redisson", true, Program::Java, (31, 90, 180)),
];

pub(crate) fn named(name: &str) -> Option<&'static Contender> {
    ALL.iter().find(|contender| contender.name == name)
}

impl Contender {
    /// Returns the version of a Rust library, from Cargo.lock.
    pub(crate) fn locked_version(&self) -> String {
        let name = self
            .name
            .trim_start_matches("bare ")
            .replace("redis-rs", "redis");
        let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap_or_default();
        let package = lock
            .split("[[package]]")
            .find(|package| package.contains(&format!("\nname = \"{name}\"\n")));
        package
            .and_then(|package| package.split('"').nth(3))
            .unwrap_or("unknown")
            .to_owned()
    }

    pub(crate) fn command(&self) -> Command {
        let installed = root().join("target/interop");
        let workers = root().join("crates/nestlock-peers/workers");
        match self.program {
            Program::Rust => {
                let mut command = Command::new(std::env::current_exe().expect("a path"));
                command.args(["worker", self.name]);
                command
            }
            Program::Go => Command::new(installed.join("peers-redsync")),
            Program::Python => {
                let mut command = Command::new(installed.join("venv/bin/python"));
                command.arg(workers.join("python/worker.py"));
                command
            }
            Program::Node => {
                let mut command = Command::new("node");
                command
                    .env("NODE_PATH", installed.join("node/node_modules"))
                    .arg(workers.join("node/worker.js"));
                command
            }
            Program::Java => {
                let redisson = installed.join("redisson");
                let jars = format!("{0}/peers:{0}/lib/*", redisson.display());
                let mut command = Command::new("java");
                command.args(["-cp", &jars, "Worker"]);
                command
            }
        }
    }
}
