//! A real server process: it starts, restarts, hangs on request, and never outlives the process that started it.
#![cfg(unix)]
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

mod support;

use std::{
    io::Read,
    net::TcpStream,
    os::unix::{fs::PermissionsExt, net::UnixStream, process::ExitStatusExt},
    path::Path,
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use nestlock_embedded::{SpawnError, SpawnedServer};

#[cfg(target_os = "linux")]
use self::support::processes::processes;
use self::support::processes::{
    Owner, PATIENCE, ROLE, ask, assert_nothing_is_left, call, ended, eventually, ms, runs, say,
    signal, try_call,
};

/// The process id that the server reports.
fn says(server: &SpawnedServer) -> u32 {
    let info = call(server, "INFO server");
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("process_id:"))
        .expect("a process id");
    line.trim().parse().expect("a number")
}

// --- one server ---

#[test]
fn starts_and_answers_over_tcp_and_over_its_socket() {
    let server = SpawnedServer::start().unwrap();
    assert_eq!(server.url(), format!("redis://{}", server.addr()));
    assert!(server.addr().ip().is_loopback());
    assert_eq!(call(&server, "PING"), "+PONG");
    assert_eq!(
        ask(&mut UnixStream::connect(server.socket()).unwrap(), "PING").unwrap(),
        "+PONG"
    );
    assert_eq!(says(&server), server.pid());
    assert_eq!(
        server.folder().metadata().unwrap().permissions().mode() & 0o777,
        0o700
    );
    // saves nothing
    assert_eq!(call(&server, "CONFIG GET save"), "*2\r\n$4\r\nsave\r\n$0");
    let (pid, folder) = (server.pid(), server.folder().to_owned());
    drop(server);
    assert!(!runs(pid) && !folder.exists());
}

#[test]
fn comes_back_with_its_port_and_without_its_data() {
    let server = SpawnedServer::start().unwrap();
    let (addr, folder) = (server.addr(), server.folder().to_owned());
    for _ in 0..5 {
        let pid = server.pid();
        assert_eq!(call(&server, "SET k v"), "+OK");
        server.kill().unwrap();
        assert!(!runs(pid) && folder.exists());
        assert!(try_call(addr, "PING").is_err());
        server.kill().unwrap();
        server.restart().unwrap();
        assert_eq!((server.addr(), server.folder()), (addr, &*folder));
        assert_ne!(server.pid(), pid);
        assert_eq!(says(&server), server.pid());
        assert_eq!(call(&server, "GET k"), "$-1");
    }
    // a server that is still running
    let pid = server.pid();
    server.restart().unwrap();
    assert!(!runs(pid));
    assert_eq!(says(&server), server.pid());
    let pid = server.pid();
    drop(server);
    assert!(!runs(pid) && !folder.exists());
}

#[test]
fn comes_back_with_its_data_if_that_was_asked_for() {
    let server =
        SpawnedServer::start_with(["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    assert_eq!(call(&server, "SET k v"), "+OK");
    server.kill().unwrap();
    server.restart().unwrap();
    assert_eq!(call(&server, "GET k"), "$1\r\nv");
}

#[test]
fn comes_back_when_its_port_is_free_again() {
    let server = SpawnedServer::start().unwrap();
    server.kill().unwrap();
    let other = std::net::TcpListener::bind(server.addr()).unwrap();
    let freed = std::thread::spawn(move || {
        sleep(ms(200));
        drop(other);
    });
    server.restart().unwrap();
    freed.join().unwrap();
    assert_eq!(says(&server), server.pid());
}

#[test]
fn hangs_when_stopped_and_goes_on() {
    let server = SpawnedServer::start().unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    assert_eq!(ask(&mut stream, "PING").unwrap(), "+PONG");
    server.stop().unwrap();
    stream.set_read_timeout(Some(ms(200))).unwrap();
    assert!(ask(&mut stream, "PING").is_err(), "answered");
    server.cont().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(stream.read(&mut [0; 7]).unwrap(), 7, "the reply comes late");
    // a stopped one can be killed
    server.stop().unwrap();
    let (pid, folder) = (server.pid(), server.folder().to_owned());
    server.kill().unwrap();
    assert!(!runs(pid));
    server.restart().unwrap();
    server.stop().unwrap();
    let pid = server.pid();
    drop(server);
    assert!(!runs(pid) && !folder.exists());
}

#[test]
fn an_end_of_its_own_is_noticed() {
    let server = SpawnedServer::start().unwrap();
    let pid = server.pid();
    let _ = try_call(server.addr(), "SHUTDOWN NOSAVE");
    eventually(
        "no signal reaches a process that may belong to another program",
        || server.stop().is_err(),
    );
    assert!(server.cont().is_err());
    eventually("the process has ended", || ended(pid));
    server.kill().unwrap();
    server.restart().unwrap();
    assert_eq!(says(&server), server.pid());
}

#[test]
fn many_at_once_are_strangers_to_each_other() {
    let servers: Vec<_> = (0..8)
        .map(|_| std::thread::spawn(SpawnedServer::start))
        .collect();
    let servers: Vec<_> = servers
        .into_iter()
        .map(|server| server.join().unwrap().unwrap())
        .collect();
    for (n, server) in servers.iter().enumerate() {
        assert_eq!(says(server), server.pid());
        assert_eq!(call(server, "DBSIZE"), ":0");
        assert_eq!(call(server, &format!("SET k {n}")), "+OK");
    }
    for (n, server) in servers.iter().enumerate() {
        assert_eq!(call(server, "GET k"), format!("$1\r\n{n}"));
    }
    // each ends even while others live
    for server in servers {
        let (pid, start) = (server.pid(), Instant::now());
        drop(server);
        assert!(!runs(pid) && start.elapsed() < PATIENCE);
    }
}

#[test]
fn a_password_is_an_answer() {
    let server = SpawnedServer::start_with(["--requirepass", "pw"]).unwrap();
    assert!(call(&server, "PING").starts_with("-NOAUTH"));
}

#[test]
fn an_argument_that_is_none_is_an_error_that_quotes_the_server() {
    match SpawnedServer::start_with(["--no-such-thing", "yes"]) {
        Err(error @ SpawnError::Ended { .. }) => {
            assert!(error.to_string().contains("no-such-thing"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    // an error that shows later, and is in the log
    match SpawnedServer::start_with(["--bind", "203.0.113.1"]) {
        Err(error @ SpawnError::Ended { .. }) => {
            assert!(error.to_string().contains("203.0.113.1"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_port_kept_by_another_process_is_an_error_without_loss() {
    let server =
        SpawnedServer::start_with(["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    assert_eq!(call(&server, "SET k v"), "+OK");
    server.kill().unwrap();
    let other = std::net::TcpListener::bind(server.addr()).unwrap();
    match server.restart() {
        Err(SpawnError::Ended { log, .. }) => assert!(log.contains("already in use"), "{log}"),
        other => panic!("{other:?}"),
    }
    assert!(server.stop().is_err());
    drop(other);
    server.restart().unwrap();
    assert_eq!(call(&server, "GET k"), "$1\r\nv");
}

// --- owners that end ---

#[test]
fn a_child_process_plays_its_role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    say("starts");
    let server = match SpawnedServer::start() {
        Ok(server) => server,
        Err(error) => {
            say(format!("{error:?}\u{1f}{error}").replace('\n', " "));
            return;
        }
    };
    if role == "stop" {
        server.stop().unwrap();
    }
    if role == "killed" {
        server.kill().unwrap();
    }
    if role == "restart" {
        server.restart().unwrap();
    }
    say(format_args!(
        "{} {}",
        server.pid(),
        server.folder().display()
    ));
    match role.as_str() {
        "return" => {}
        "exit" => std::process::exit(3),
        "panic" => panic!("as told"),
        "abort" => std::process::abort(),
        // until this process is killed, or its parent ends
        _ => drop(std::io::stdin().read(&mut [0])),
    }
}

#[test]
fn nothing_is_left_however_the_owner_ends() {
    for role in ["return", "exit", "panic", "abort"] {
        let mut owner = Owner::start(role, &[]);
        assert_eq!(owner.line(), "starts");
        let (pid, folder) = owner.server();
        let status = owner.process.wait().unwrap();
        assert_eq!(status.signal().is_some(), role == "abort", "{status}");
        assert_nothing_is_left(role, pid, &folder);
    }
}

#[test]
fn nothing_is_left_of_an_owner_that_is_killed() {
    for role in ["wait", "stop", "restart", "killed"] {
        let mut owner = Owner::start(role, &[]);
        assert_eq!(owner.line(), "starts");
        let (pid, folder) = owner.server();
        assert_eq!(
            (runs(pid), folder.exists()),
            (role != "killed", true),
            "{role}"
        );
        owner.process.kill().unwrap();
        assert_nothing_is_left(role, pid, &folder);
    }
}

#[test]
fn nothing_is_left_when_the_guard_gets_the_order_to_end() {
    let server = SpawnedServer::start().unwrap();
    let (pid, folder) = (server.pid(), server.folder().to_owned());
    let parent = Command::new("ps")
        .args(["-o", "ppid=", "-p", &pid.to_string()])
        .output()
        .unwrap();
    // HUP and INT have the same effect, but if this process ignores them, so do all of its children
    signal(
        "TERM",
        String::from_utf8_lossy(&parent.stdout)
            .trim()
            .parse()
            .unwrap(),
    );
    assert_nothing_is_left("TERM", pid, &folder);
    assert!(server.kill().is_err() && server.stop().is_err());
    assert!(server.restart().is_err());
}

#[cfg(target_os = "linux")]
#[test]
fn a_running_server_is_found_by_its_folder() {
    let folder = tempfile::tempdir().unwrap();
    let owner = Owner::start("wait", &[("TMPDIR", folder.path())]);
    assert_eq!(owner.line(), "starts");
    let (pid, _) = owner.server();
    let found = processes(folder.path());
    // the owner, the guard, the server
    assert!(
        found.len() == 3
            && found
                .iter()
                .any(|line| line.starts_with(&format!("/proc/{pid}:"))),
        "{found:?}"
    );
}

/// An owner that is killed at any moment of the start leaves no process and no folder behind.
#[cfg(target_os = "linux")]
#[test]
fn an_owner_killed_at_any_moment_of_its_start_leaves_nothing() {
    const ROUNDS: u64 = 60;
    let folder = tempfile::tempdir().unwrap();
    let (mut started, mut early) = (0, 0);
    for round in 0..ROUNDS {
        let mut owner = Owner::start("wait", &[("TMPDIR", folder.path())]);
        assert_eq!(owner.line(), "starts");
        // every moment of 30 ms, in scattered order
        sleep(Duration::from_micros(round * 7 % ROUNDS * 30_000 / ROUNDS));
        owner.process.kill().unwrap();
        owner.process.wait().unwrap();
        match owner.lines.recv_timeout(PATIENCE) {
            Ok(_) => started += 1,
            Err(_) => early += 1,
        }
    }
    eventually("no process is left", || processes(folder.path()).is_empty());
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "a folder is left"
    );
    println!("{started} killed after the start, {early} during it");
    assert!(early > 5, "too late: nothing was tested");
}

// --- no server program ---

#[test]
fn no_server_program_is_an_error_that_says_how_to_get_one() {
    let empty = tempfile::tempdir().unwrap();
    let nowhere = empty.path().join("no-such-server");
    let folder = empty.path();
    for (variables, wanted) in [
        (
            [("NESTLOCK_SERVER_BIN", &*nowhere), ("PATH", folder)],
            "no-such-server",
        ),
        (
            [("NESTLOCK_SERVER_BIN", Path::new("")), ("PATH", folder)],
            "on PATH",
        ),
        // a folder is not a program, and an invalid setting must not fall back to PATH
        (
            [("NESTLOCK_SERVER_BIN", folder), ("LANG", Path::new("C"))],
            "not an executable program",
        ),
        (
            [
                ("NESTLOCK_SERVER_BIN", Path::new("no-such-server")),
                ("LANG", Path::new("C")),
            ],
            "no-such-server",
        ),
    ] {
        let owner = Owner::start("wait", &variables);
        assert_eq!(owner.line(), "starts");
        let line = owner.line();
        let (debug, message) = line.split_once('\u{1f}').expect("an error");
        assert!(debug.starts_with("NotFound"), "{debug}");
        for part in [
            wanted,
            "apt-get install",
            "dnf install",
            "brew install",
            "NESTLOCK_SERVER_BIN",
        ] {
            assert!(message.contains(part), "no {part} in: {message}");
        }
    }
}

#[test]
fn the_variable_names_the_server_by_path_or_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let server = folder.path().join("my-server");
    // by a shell: a process that another test forks meanwhile inherits a file that this process has open for writing, and until it
    // calls exec the script cannot be executed (ETXTBSY)
    let write = r#"printf '#!/bin/sh\nexec redis-server "$@"\n' >"$0" && chmod 755 "$0""#;
    assert!(
        Command::new("sh")
            .arg("-c")
            .arg(write)
            .arg(&server)
            .status()
            .unwrap()
            .success()
    );
    for name in [&*server, Path::new("redis-server")] {
        let owner = Owner::start("wait", &[("NESTLOCK_SERVER_BIN", name)]);
        assert_eq!(owner.line(), "starts");
        assert!(runs(owner.server().0), "{}", name.display());
    }
}
