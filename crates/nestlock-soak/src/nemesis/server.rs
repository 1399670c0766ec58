//! Faults of a server.

use std::{io, thread, time::Duration};

use nestlock_embedded::SpawnedServer;

use super::fault::{Effect, Fault};
use crate::{
    servers::{call, connect},
    settings::Mode,
    support::wire::{Reply, Wire},
};

pub(super) const SORTS: [(&str, u64, u64); 15] = [
    ("stop", 50, 700),
    ("stop-long", 1000, 2600),
    ("kill", 0, 700),
    ("restart", 0, 300),
    ("script-flush", 100, 600),
    ("client-kill", 1, 100),
    ("client-kill-pubsub", 50, 400),
    ("client-pause", 50, 600),
    ("debug-sleep", 20, 500),
    ("busy-script", 50, 500),
    ("out-of-memory", 100, 900),
    ("no-replicas", 100, 900),
    ("read-only", 100, 900),
    ("max-clients", 100, 900),
    ("no-rights", 100, 900),
];
/// More faults for the mode `plain`, in which a kill loses the server's data as well.
pub(super) const FORGETFUL: [(&str, u64, u64); 2] = [("flushall", 0, 1), ("kill", 0, 700)];

/// Permissions that are revoked for a while.
const RIGHTS: [&[&str]; 4] = [
    &["-evalsha", "-eval"],
    &["-publish"],
    &["-subscribe"],
    &["-pexpire", "-blpop"],
];

pub(super) fn strike(server: &SpawnedServer, fault: &Fault, mode: Mode) -> io::Result<Effect> {
    // the effect of a kill
    let killed = if mode == Mode::Aof {
        Effect::Kept
    } else {
        Effect::Forgot
    };
    match &*fault.sort {
        "stop" | "stop-long" => {
            server.stop()?;
            fault.sleep();
            server.cont()?;
        }
        "kill" => {
            server.kill()?;
            fault.sleep();
            server.restart().map_err(io::Error::other)?;
            return Ok(killed);
        }
        "restart" => {
            // the server ends without a reply
            let _ = wire(server)?.call(&["SHUTDOWN", "NOSAVE"]);
            server.kill()?;
            fault.sleep();
            server.restart().map_err(io::Error::other)?;
            return Ok(killed);
        }
        "flushall" => {
            call(&mut wire(server)?, &["FLUSHALL"])?;
            return Ok(Effect::Forgot);
        }
        "script-flush" => repeat(server, fault, 10, &["SCRIPT", "FLUSH"])?,
        "client-kill" => {
            _ = call(
                &mut wire(server)?,
                &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"],
            )?;
        }
        "client-kill-pubsub" => repeat(server, fault, 100, &["CLIENT", "KILL", "TYPE", "pubsub"])?,
        "client-pause" => {
            let what = if fault.arg.is_multiple_of(2) {
                "ALL"
            } else {
                "WRITE"
            };
            call(
                &mut wire(server)?,
                &["CLIENT", "PAUSE", &fault.ms.to_string(), what],
            )?;
            fault.sleep();
        }
        "debug-sleep" => {
            _ = call(
                &mut wire(server)?,
                &["DEBUG", "SLEEP", &format!("0.{:03}", fault.ms)],
            )?;
        }
        "busy-script" => {
            let mut wire = wire(server)?;
            call(&mut wire, &["CONFIG", "SET", "lua-time-limit", "10"])?;
            // time stands still inside a script, so it counts
            let script = "local n = 0 while n < tonumber(ARGV[1]) do n = n + 1 end return n";
            call(
                &mut wire,
                &["EVAL", script, "0", &(fault.ms * 5_000).to_string()],
            )?;
            call(&mut wire, &["CONFIG", "SET", "lua-time-limit", "5000"])?;
        }
        "out-of-memory" => setting(server, fault, "maxmemory", "1", "0")?,
        "no-replicas" => setting(server, fault, "min-replicas-to-write", "1", "0")?,
        "read-only" => {
            // replica of a server that does not exist, so it keeps its data
            call(&mut wire(server)?, &["REPLICAOF", "127.0.0.1", "1"])?;
            fault.sleep();
            until_done(server, &["REPLICAOF", "NO", "ONE"])?;
        }
        "max-clients" => {
            let mut wire = wire(server)?;
            call(&mut wire, &["CONFIG", "SET", "maxclients", "6"])?;
            call(
                &mut wire,
                &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"],
            )?;
            fault.sleep();
            call(&mut wire, &["CONFIG", "SET", "maxclients", "10000"])?;
        }
        "no-rights" => {
            let rights = RIGHTS[fault.arg as usize % RIGHTS.len()];
            let mut wire = wire(server)?;
            let taken: Vec<&str> = ["ACL", "SETUSER", "default"]
                .into_iter()
                .chain(rights.iter().copied())
                .collect();
            call(&mut wire, &taken)?;
            fault.sleep();
            call(&mut wire, &["ACL", "SETUSER", "default", "+@all"])?;
        }
        other => return Err(io::Error::other(format!("unknown fault: {other}"))),
    }
    Ok(Effect::Kept)
}

fn wire(server: &SpawnedServer) -> io::Result<Wire> {
    connect(server.addr())
}

fn setting(
    server: &SpawnedServer,
    fault: &Fault,
    name: &str,
    bad: &str,
    good: &str,
) -> io::Result<()> {
    call(&mut wire(server)?, &["CONFIG", "SET", name, bad])?;
    fault.sleep();
    until_done(server, &["CONFIG", "SET", name, good])
}

/// Sends a command until it succeeds, 50 times at most: the end of a fault must not fail.
fn until_done(server: &SpawnedServer, parts: &[&str]) -> io::Result<()> {
    for _ in 0..50 {
        if wire(server)
            .and_then(|mut wire| call(&mut wire, parts))
            .is_ok()
        {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(io::Error::other(format!(
        "the fault was not ended by {parts:?}"
    )))
}

/// Sends a command every `every` milliseconds for as long as the fault lasts.
fn repeat(server: &SpawnedServer, fault: &Fault, every: u64, parts: &[&str]) -> io::Result<()> {
    let mut wire = wire(server)?;
    for _ in 0..=fault.ms / every {
        let _: Reply = call(&mut wire, parts)?;
        thread::sleep(Duration::from_millis(every));
    }
    Ok(())
}
