//! `exec`.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{Running, World, eventually, far_away, is_alive, until};

/// Holds a lock until the file `go` exists.
fn holder(world: &World, args: &[&str]) -> Running {
    let line = format!("echo held > held; {}", until("go"));
    world.begin(&[&["exec"], args, &["-c", &line]].concat(), "held")
}

#[test]
fn the_exit_code_is_the_commands() {
    let world = World::new();
    let sh = |line: &str| world.code(&["exec", "l", "--", "sh", "-c", line]);
    assert_eq!((sh("exit 0"), sh("exit 7"), sh("exit 255")), (0, 7, 255));
    assert_eq!(sh("kill -TERM $$"), 143);
    assert_eq!(world.code(&["exec", "l", "-c", "exit 3"]), 3);
    assert_eq!(world.code(&["exec", "l", "--", "./no-such-command"]), 127);
    world.make("file");
    assert_eq!(world.code(&["exec", "l", "--", "./file"]), 126);
    // none of these runs left the lock held
    assert_eq!(world.code(&["who", "l"]), 1);
}

#[test]
fn wrong_use_is_64_and_its_own_failure_125() {
    let world = World::new();
    for wrong in [
        &["exec", "l"][..],
        &["exec", "l", "--kind", "odd", "--", "true"],
        &["exec", "l", "-w", "soon", "--", "true"],
        &["exec", "l", "--lease", "3s", "--grace", "2s", "--", "true"],
        &["odd"],
        &[
            "exec",
            "l",
            "--url",
            "redis://localhost",
            "--url-file",
            "f",
            "--",
            "true",
        ],
        &["exec", "l", "--url-file", "missing", "--", "true"],
        &["exec", "", "--", "true"],
        &["exec", "a}{", "--", "true"],
        &["exec", "l", "--lease", "1ms", "--", "true"],
    ] {
        assert_eq!(world.code(wrong), 64, "{wrong:?}");
    }
    let url = world.server.url();
    drop(world.server.kill());
    let output = world.output(&["exec", "l", "--", "touch", "begun"]);
    assert_eq!(
        (output.status.code(), world.exists("begun")),
        (Some(125), false),
        "{url}"
    );
}

/// nestlock passes the deadline to its guards in a file. If that file cannot be written, the lock
/// is released.
#[test]
#[cfg(target_os = "linux")]
fn where_no_file_may_be_written_the_lock_is_given_back() {
    let world = World::new();
    let line = r#"ulimit -f 0; exec "$0" exec l -- true"#;
    let output = world
        .program("sh", &["-c", line, env!("CARGO_BIN_EXE_nestlock")])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(125) && said.contains("File too large"),
        "{said}"
    );
    assert_eq!(world.code(&["who", "l"]), 1);
}

#[test]
fn a_password_is_in_no_output() {
    let world = World::new();
    let url = world
        .server
        .url()
        .replace("redis://", "redis://someone:sesame@");
    let mut nestlock = world.nestlock(&["exec", "l", "--", "sh", "-c", "env"]);
    let output = nestlock.env("NESTLOCK_URL", &url).output().unwrap();
    let help = world
        .nestlock(&["exec", "--help"])
        .env("NESTLOCK_URL", &url)
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), help.status.code()),
        (Some(125), Some(0))
    );
    for text in [output.stdout, output.stderr, help.stdout, help.stderr] {
        assert!(!String::from_utf8_lossy(&text).contains("sesame"));
    }
}

#[test]
fn a_busy_lock_is_75_or_what_was_asked_for() {
    let world = World::new();
    let holder = holder(&world, &["l"]);
    assert_eq!(world.code(&["exec", "l", "-n", "--", "touch", "begun"]), 75);
    assert_eq!(
        world.code(&["exec", "l", "-w", "200ms", "--", "touch", "begun"]),
        75
    );
    assert_eq!(
        world.code(&["exec", "l", "-n", "-E", "0", "--", "touch", "begun"]),
        0
    );
    assert!(!world.exists("begun"));
    assert_eq!(world.code(&["exec", "another", "-n", "--", "true"]), 0);
    world.make("go");
    assert_eq!(holder.code(), Some(0));
    assert_eq!(world.code(&["exec", "l", "-n", "--", "true"]), 0);
}

#[test]
fn readers_share_it() {
    let world = World::new();
    let _reader = holder(&world, &["l", "-s"]);
    assert_eq!(world.code(&["exec", "l", "-s", "-n", "--", "true"]), 0);
    assert_eq!(
        world.code(&["exec", "l", "--kind", "write", "-n", "--", "true"]),
        75
    );
}

#[test]
fn who_waits_has_it_next() {
    let world = World::new();
    let holder = holder(&world, &["l"]);
    let mut next = Running::of(world.nestlock(&["exec", "l", "-c", "echo next > next"]));
    // the waiter is visible as a subscriber
    eventually("it waits", || {
        world
            .server_says(&["PUBSUB", "NUMSUB", "redisson_lock__channel:{l}"])
            .contains(":1")
    });
    assert!(next.is_running() && !world.exists("next"));
    world.make("go");
    assert_eq!((holder.code(), next.code()), (Some(0), Some(0)));
    assert_eq!(world.text("next"), "next");
}

/// nestlock handles signals while it waits for the lock: the command does not start, and nestlock
/// leaves the queue.
#[test]
fn who_is_stopped_while_it_waits_leaves_nothing() {
    for (signal, code) in [
        (Signal::SIGTERM, 143),
        (Signal::SIGINT, 130),
        (Signal::SIGHUP, 129),
        (Signal::SIGQUIT, 131),
    ] {
        let world = World::new();
        let _holder = holder(&world, &["l", "--kind", "fair"]);
        let waiter =
            Running::of(world.nestlock(&["exec", "l", "--kind", "fair", "--", "touch", "begun"]));
        let queue = || world.server_says(&["LLEN", "redisson_lock_queue:{l}"]);
        eventually("it has a place", || queue() == ":1\r\n");
        waiter.send(signal);
        assert_eq!(waiter.code(), Some(code));
        assert_eq!(
            (queue(), world.exists("begun")),
            (":0\r\n".to_owned(), false)
        );
    }
}

#[test]
fn signals_are_the_commands_to_answer() {
    let world = World::new();
    let line = format!(
        "trap 'exit 7' TERM; trap 'echo usr1 > usr1' USR1; echo > ready; {}",
        until("never")
    );
    let running = world.begin(&["exec", "l", "-c", &line], "ready");
    running.send(Signal::SIGUSR1);
    assert_eq!(world.text("usr1"), "usr1");
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(7));
    assert_eq!(world.code(&["who", "l"]), 1);
}

#[test]
fn a_second_term_kills() {
    let world = World::new();
    let line = format!("trap 'echo > heard' TERM; echo > ready; {}", until("never"));
    let running = world.begin(&["exec", "l", "-c", &line], "ready");
    running.send(Signal::SIGTERM);
    world.text("heard");
    // as fast as a person presses Control-C again
    std::thread::sleep(Duration::from_millis(200));
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(137));
}

/// `timeout` signals its child and then its whole group, and a terminal that is closed does the
/// same: the command has its grace.
#[test]
fn two_signals_that_are_one_request_are_no_kill() {
    for (signals, pause) in [
        ([Signal::SIGTERM; 2], 0),
        ([Signal::SIGHUP; 2], 200),
        ([Signal::SIGTERM, Signal::SIGHUP], 200),
    ] {
        let world = World::new();
        let line = format!(
            "trap 'sleep 0.7; exit 9' TERM HUP; echo > ready; {}",
            until("never")
        );
        let running = world.begin(&["exec", "l", "-c", &line], "ready");
        running.send(signals[0]);
        std::thread::sleep(Duration::from_millis(pause));
        running.send(signals[1]);
        assert_eq!(running.code(), Some(9), "{signals:?}");
    }
}

/// The shell ends, and what it started ends with it: nothing runs on without the lock.
#[test]
fn what_the_command_leaves_in_its_group_is_ended() {
    let world = World::new();
    let line = "sleep 1000 & echo $! > left; exit 4";
    assert_eq!(world.code(&["exec", "l", "--lease", "3s", "-c", line]), 4);
    assert!(!is_alive(world.pid("left")));
}

/// Like a script that starts many background processes, for hours.
#[test]
#[cfg(target_os = "linux")]
fn orphans_that_ended_are_reaped_while_the_command_runs() {
    let world = World::new();
    let line = format!(
        "for i in 1 2 3 4; do (sh -c 'echo $$ > orphan-'$i &); done; echo > ready; {}",
        until("go")
    );
    let running = world.begin(&["exec", "l", "-c", &line], "ready");
    let orphans = ["orphan-1", "orphan-2", "orphan-3", "orphan-4"].map(|file| world.pid(file));
    // signal 0 still reaches a zombie
    eventually("all are reaped", || {
        orphans
            .iter()
            .all(|pid| kill(Pid::from_raw(*pid), None).is_err())
    });
    world.make("go");
    assert_eq!(running.code(), Some(0));
}

/// As process 1, nestlock adopts what other processes of the container leave behind, also while it
/// waits for the lock.
#[test]
#[cfg(target_os = "linux")]
fn as_process_1_it_reaps_what_others_leave_behind() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let _holder = holder(&world, &["l"]);
    // an orphan whose parent became nestlock
    let line = format!("(sleep 0.2; echo $$ > over) & exec {nestlock} exec l -c 'echo > ran'");
    let unshare = |line| {
        let args = [
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "sh",
            "-c",
            line,
        ];
        world.program("unshare", &args)
    };
    if !unshare("true").status().unwrap().success() {
        eprintln!("this system lets nobody make a namespace");
        return;
    }
    let running = Running::of(unshare(&line));
    world.text("over");
    let process_1 = || {
        let children =
            |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        children(running.pid())
            .trim()
            .parse::<i32>()
            .ok()
            .map(children)
    };
    eventually("it has no children", || {
        process_1().is_some_and(|children| children.is_empty())
    });
    world.make("go");
    world.text("ran");
    assert_eq!(running.code(), Some(0));
}

#[test]
#[cfg(target_os = "linux")]
fn a_command_does_not_outlive_a_nestlock_that_is_killed() {
    let world = World::new();
    let running = world.begin(
        &[
            "exec",
            "l",
            "--",
            "sh",
            "-c",
            "echo $$ > pid; exec sleep 1000",
        ],
        "pid",
    );
    let pid = world.pid("pid");
    assert!(is_alive(pid));
    running.send(Signal::SIGKILL);
    eventually("it is gone, too", || !is_alive(pid));
}

#[test]
fn a_lock_that_is_taken_away_ends_the_command() {
    let world = World::new();
    let line = format!(
        "trap 'echo told > told; exit 0' TERM; echo > ready; {}",
        until("never")
    );
    let running = world.begin(&["exec", "l", "--lease", "1500ms", "-c", &line], "ready");
    assert_eq!(world.code(&["force", "l"]), 0);
    // although the command exited with 0
    assert_eq!(running.code(), Some(76));
    assert_eq!(world.text("told"), "told");
    let running = world.begin(
        &[
            "exec",
            "l",
            "--lease",
            "1500ms",
            "--lost-code",
            "3",
            "-c",
            &line,
        ],
        "ready",
    );
    eventually("it is held", || world.code(&["who", "l"]) == 0);
    assert_eq!((world.code(&["force", "l"]), running.code()), (0, Some(3)));
}

/// The lease is renewed in time, so the grace never begins.
#[test]
fn a_short_lease_is_kept_for_as_long_as_the_command_runs() {
    let world = World::new();
    assert_eq!(
        world.code(&["exec", "l", "--lease", "1500ms", "--", "sleep", "4"]),
        0
    );
}

/// The process group is gone before another client may have the lock, and had its grace before
/// that.
#[test]
fn a_server_that_hangs_ends_the_command_within_the_lease() {
    let world = World::new();
    let lease = Duration::from_secs(9);
    let line = "trap 'echo told > told' TERM; echo $$ > pid; while true; do sleep 0.02; done";
    let running = world.begin(
        &["exec", "l", "--lease", "9s", "--grace", "800ms", "-c", line],
        "pid",
    );
    world.server.stop().unwrap();
    let stopped = Instant::now();
    world.text("told");
    let told = stopped.elapsed();
    let pid = world.pid("pid");
    eventually("it is killed", || !is_alive(pid));
    let killed = stopped.elapsed();
    assert!(killed < lease, "killed after {killed:?}");
    assert!(
        killed > told + Duration::from_millis(400),
        "told after {told:?}, killed after {killed:?}"
    );
    world.server.cont().unwrap();
    assert_eq!(running.code(), Some(76));
}

/// An `exec` inside another one of the same lock shares its hold, and never changes the hold count.
#[test]
fn below_another_exec_it_goes_along() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let line = format!(
        "{nestlock} exec l -n -c 'echo $NESTLOCK_DEPTH $NESTLOCK_OWNER > inner' && echo $NESTLOCK_OWNER > outer; \
         {nestlock} who l > who; {nestlock} exec l -n --no-inherit -- true; echo $? > own; \
         {nestlock} exec other -n -c 'echo $NESTLOCK_OWNER > other'; {nestlock} exec l -n --kind fenced -- true; \
         echo $? > kind"
    );
    assert_eq!(world.code(&["exec", "l", "-c", &line]), 0);
    let outer = world.text("outer");
    assert_eq!(world.text("inner"), format!("2 {outer}"));
    assert!(
        world.text("who").starts_with(&format!("{outer} 1 ")),
        "{}",
        world.text("who")
    );
    assert_eq!(world.text("own"), "75");
    assert_ne!(
        world.text("other"),
        outer,
        "another lock is none of its business"
    );
    assert_eq!(world.text("kind"), "75");
    // a hold that has ended cannot be shared
    let line = format!(
        "{nestlock} force l > freed; {nestlock} exec l -n -c 'echo $NESTLOCK_OWNER > anew'"
    );
    world.code(&["exec", "l", "-c", &line]);
    assert!(world.text("freed").starts_with("freed l "));
    assert_ne!(world.text("anew"), outer);
}

/// The outer `exec` renews only for its own lease, which is shorter.
#[test]
fn who_goes_along_keeps_the_hold_for_its_own_lease() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let line = format!(
        "{nestlock} exec l --lease 9s -c 'echo > ready; {}'",
        until("go")
    );
    let outer = world.begin(&["exec", "l", "--lease", "3s", "-c", &line], "ready");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(9) {
        let ttl = world.server_says(&["PTTL", "l"]);
        assert!(
            ttl.trim().trim_start_matches(':').parse::<i64>().unwrap() > 3_000,
            "{ttl} after {:?}",
            start.elapsed()
        );
    }
    world.make("go");
    assert_eq!(outer.code(), Some(0));
}

/// The inner `exec` notices the loss by itself: the outer one is stopped.
#[test]
fn who_goes_along_hears_of_the_loss() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let inner = format!(
        "trap 'echo told > told; exit 0' TERM; echo > ready; {}",
        until("never")
    );
    let line = format!("{nestlock} exec l --lease 3s -c \"{inner}\"; echo $? > code");
    let outer = world.begin(&["exec", "l", "--lease", "60s", "-c", &line], "ready");
    outer.send(Signal::SIGSTOP);
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!(
        (world.text("told"), world.text("code")),
        ("told".to_owned(), "76".to_owned())
    );
    outer.send(Signal::SIGCONT);
    assert_eq!(outer.code(), Some(76));
}

#[test]
fn the_command_knows_its_lock() {
    let world = World::new();
    let line = "echo $NESTLOCK_NAME $NESTLOCK_KIND $NESTLOCK_TOKEN $NESTLOCK_DEPTH > told";
    assert_eq!(
        world.code(&[
            "exec", "l", "--kind", "fenced", "--prefix", "p:", "-c", line
        ]),
        0
    );
    let told = world.text("told");
    let words: Vec<&str> = told.split(' ').collect();
    assert_eq!((words[0], words[1], words[3]), ("p:l", "fenced", "1"));
    let token = words[2].parse::<u64>().unwrap();
    assert_eq!(
        world.code(&[
            "exec",
            "l",
            "--kind",
            "fenced",
            "--prefix",
            "p:",
            "-c",
            "echo $NESTLOCK_TOKEN > next"
        ]),
        0
    );
    assert_eq!(world.text("next"), (token + 1).to_string());
}

/// Options take precedence over environment variables.
#[test]
fn a_file_that_is_named_beats_the_variable() {
    let world = World::new();
    std::fs::write(world.path("url"), format!("{}\n", world.server.url())).unwrap();
    let with = |args: &[&str], variable: &str, value: &str| {
        let mut nestlock = world.nestlock(args);
        nestlock
            .env_remove("NESTLOCK_URL")
            .env(variable, value)
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!(
        with(
            &["exec", "l", "--url-file", "url", "--", "true"],
            "NESTLOCK_URL",
            "redis://127.0.0.1:1"
        ),
        Some(0)
    );
    assert_eq!(
        with(&["exec", "l", "--", "true"], "NESTLOCK_URL_FILE", "url"),
        Some(0)
    );
    let url = world.server.url();
    assert_eq!(
        with(
            &["exec", "l", "--url", &url, "--", "true"],
            "NESTLOCK_URL_FILE",
            "missing"
        ),
        Some(0)
    );
}

/// A URL on the command line does not reach the command's environment, and is in the process list
/// only while nestlock runs.
#[test]
#[cfg(target_os = "linux")]
fn a_url_that_was_said_is_not_handed_on() {
    let world = World::new();
    world.server_says(&["ACL", "SETUSER", "default", ">sesame"]);
    let url = world
        .server
        .url()
        .replace("redis://", "redis://default:sesame@");
    let mut nestlock = world.nestlock(&[
        "exec",
        "l",
        "--url",
        &url,
        "-c",
        "env > env; ps -o args= $$ > ps; echo > done",
    ]);
    assert_eq!(
        nestlock
            .env_remove("NESTLOCK_URL")
            .output()
            .unwrap()
            .status
            .code(),
        Some(0)
    );
    world.text("done");
    for file in ["env", "ps"] {
        assert!(!world.text(file).contains("sesame"), "{file}");
    }
}

/// A warning whose reader is gone does not keep nestlock from ending the command.
#[test]
fn a_loss_is_acted_on_without_a_reader_of_the_warning() {
    let world = World::new();
    let line = format!(
        "exec 2> /dev/null; trap 'echo told > told; exit 0' TERM; echo > ready; {}",
        until("never")
    );
    let mut nestlock = world.nestlock(&["exec", "l", "--lease", "3s", "-c", &line]);
    let mut running = nestlock.stderr(Stdio::piped()).spawn().unwrap();
    drop(running.stderr.take());
    world.text("ready");
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!(running.wait().unwrap().code(), Some(76));
    assert_eq!(world.text("told"), "told");
}

#[test]
fn who_is_to_be_killed_when_it_is_lost_is_not_asked() {
    let world = World::new();
    let line = format!(
        "trap 'echo told > told' TERM; echo > ready; {}",
        until("never")
    );
    let running = world.begin(
        &[
            "exec",
            "l",
            "--lease",
            "30s",
            "--on-lost",
            "kill",
            "-c",
            &line,
        ],
        "ready",
    );
    assert_eq!((world.code(&["force", "l"]), running.code()), (0, Some(76)));
    assert!(!world.exists("told"));
}

/// As with flock and a descriptor: the lock is held until all of them have ended.
#[test]
fn the_rest_of_the_group_is_waited_for_if_asked() {
    let world = World::new();
    let line = format!(
        "({}; echo done > done) & echo $$ > pid; exit 4",
        until("go")
    );
    let mut running = world.begin(&["exec", "l", "--wait-group", "-c", &line], "pid");
    let pid = world.pid("pid");
    eventually("the command has ended", || !is_alive(pid));
    assert!(running.is_running() && world.code(&["who", "l"]) == 0);
    world.make("go");
    assert_eq!((running.code(), &*world.text("done")), (Some(4), "done"));
}

/// `NESTLOCK_TOKEN` belongs to the lock of `NESTLOCK_NAME`, at any depth.
#[test]
fn a_token_is_never_another_locks() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let fenced = format!("{nestlock} exec l -n --kind fenced");
    let line = format!(
        "echo $NESTLOCK_TOKEN > outer; {nestlock} exec m -c 'echo $NESTLOCK_NAME ${{NESTLOCK_TOKEN-none}} > other; \
         {fenced} -- sh -c \"echo \\$NESTLOCK_TOKEN > again\"'"
    );
    assert_eq!(
        world.code(&["exec", "l", "--kind", "fenced", "-c", &line]),
        0
    );
    assert_eq!(world.text("other"), "m none");
    assert_eq!(world.text("again"), world.text("outer"));
}

/// Started by `nohup`, or in the background of a script: ignored signals stay ignored, also for the
/// command.
#[test]
#[cfg(target_os = "linux")]
fn what_is_ignored_when_it_begins_is_not_passed_on() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let line = format!(
        "trap '' HUP INT; exec {nestlock} exec l -c 'echo > ready; {}; exit 5'",
        until("go")
    );
    let running = Running::of(world.program("sh", &["-c", &line]));
    world.text("ready");
    running.send(Signal::SIGHUP);
    running.send(Signal::SIGINT);
    // by the time that this returns, nestlock has got both signals
    assert_eq!(world.code(&["who", "l"]), 0);
    world.make("go");
    assert_eq!(running.code(), Some(5));
}

/// The command has ended, and the server does not reply: a signal ends the wait for the release.
#[test]
fn a_stop_does_not_wait_for_a_server_that_hangs() {
    let world = World::new();
    let running = world.begin(
        &[
            "exec",
            "l",
            "--lease",
            "60s",
            "-c",
            "echo $$ > pid; exec sleep 1000",
        ],
        "pid",
    );
    let pid = world.pid("pid");
    world.server.stop().unwrap();
    running.send(Signal::SIGTERM);
    eventually("the command has ended", || !is_alive(pid));
    // the first TERM was for the command, so this one is for nestlock
    let start = Instant::now();
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(143));
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    world.server.cont().unwrap();
}

/// nestlock waits for a lock, and can neither leave the queue nor undo what is in flight.
#[test]
fn a_server_that_hangs_does_not_hold_up_a_wait_that_is_stopped() {
    for kind in ["reentrant", "fair", "read", "spin", "string", "signal"] {
        let world = World::new();
        let held = if kind == "read" { "write" } else { kind };
        let _holder = holder(&world, &["l", "--kind", held]);
        let calls = || -> u32 {
            let stats = world.server_says(&["INFO", "commandstats"]);
            let calls = stats
                .lines()
                .filter(|line| line.contains("eval"))
                .filter_map(|line| line.split(['=', ',']).nth(1));
            calls.filter_map(|calls| calls.parse::<u32>().ok()).sum()
        };
        let before = calls();
        let waiter = Running::of(world.nestlock(&["exec", "l", "--kind", kind, "--", "true"]));
        eventually("it waits", || calls() > before);
        world.server.stop().unwrap();
        let start = Instant::now();
        waiter.send(Signal::SIGTERM);
        assert_eq!(waiter.code(), Some(143), "{kind}");
        assert!(
            start.elapsed() < Duration::from_secs(4),
            "{kind}: {:?}",
            start.elapsed()
        );
        world.server.cont().unwrap();
    }
}

/// The URL comes from a pipe without a writer.
#[test]
fn a_wait_for_the_url_is_ended_by_a_signal() {
    let world = World::new();
    assert!(
        Command::new("mkfifo")
            .arg(world.path("url"))
            .status()
            .unwrap()
            .success()
    );
    let running = Running::of(world.nestlock(&["exec", "l", "--url-file", "url", "--", "true"]));
    let stat =
        || std::fs::read_to_string(format!("/proc/{}/wchan", running.pid())).unwrap_or_default();
    eventually("it waits", || {
        stat().contains("fifo") || stat().contains("wait_for_partner")
    });
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(143));
    // the file is read only once, as a pipe can be
    let line = r#"echo "$NESTLOCK_URL" > url & exec "$0" exec l --url-file url -- true"#;
    assert_eq!(
        Running::of(world.program("sh", &["-c", line, env!("CARGO_BIN_EXE_nestlock")])).code(),
        Some(0)
    );
}

/// The lease frees the lock: nestlock exits at most 300 ms after the command has ended.
#[test]
fn a_server_that_hangs_is_not_lingered_for() {
    let world = World::new();
    let line = format!("echo $$ > pid; {}; exit 5", until("go"));
    let running = world.begin(&["exec", "l", "--lease", "60s", "-c", &line], "pid");
    let pid = world.pid("pid");
    world.server.stop().unwrap();
    world.make("go");
    eventually("the command has ended", || !is_alive(pid));
    let start = Instant::now();
    assert_eq!(running.code(), Some(5));
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    world.server.cont().unwrap();
}

/// The command is dead, and nestlock does not know it yet: the signal is for nestlock.
#[test]
fn a_stop_that_comes_when_the_command_has_ended_is_not_lost() {
    let world = World::new();
    let running = world.begin(
        &[
            "exec",
            "l",
            "--lease",
            "60s",
            "-c",
            "echo $$ > pid; exec sleep 1000",
        ],
        "pid",
    );
    let pid = world.pid("pid");
    world.server.stop().unwrap();
    running.send(Signal::SIGSTOP);
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    eventually("the command has ended", || !is_alive(pid));
    running.send(Signal::SIGTERM);
    let start = Instant::now();
    running.send(Signal::SIGCONT);
    assert_eq!(running.code(), Some(137));
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    world.server.cont().unwrap();
}

/// A service manager, such as systemd, signals all processes of a service, so nestlock gets TERM
/// when the command has already ended. The lock is released all the same.
#[test]
fn a_stop_after_the_command_has_ended_leaves_no_lock_behind() {
    let world = World::new();
    let far = far_away(&world, Duration::from_millis(20));
    for is_known in [false, true] {
        let mut nestlock = world.nestlock(&[
            "exec",
            "l",
            "--lease",
            "60s",
            "-c",
            "echo $$ > pid; exec sleep 1000",
        ]);
        if is_known {
            nestlock.env("NESTLOCK_URL", &far);
        }
        let running = Running::of(nestlock);
        let pid = world.pid("pid");
        if !is_known {
            running.send(Signal::SIGSTOP);
        }
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        eventually("the command has ended", || !is_alive(pid));
        running.send(Signal::SIGTERM);
        running.send(Signal::SIGCONT);
        assert_eq!(running.code(), Some(137), "{is_known}");
        assert_eq!(world.code(&["who", "l"]), 1, "{is_known}");
        std::fs::remove_file(world.path("pid")).unwrap();
    }
}

/// Not by a terminal: a signal stops the command, or nestlock, which forwards it. nestlock keeps
/// the lock all the while.
#[test]
#[cfg(target_os = "linux")]
fn a_command_that_was_stopped_by_hand_keeps_its_lock() {
    // a lease longer than a busy machine stalls; concurrently, as each run takes longer than a
    // lease
    std::thread::scope(|scope| {
        for signal in [
            Signal::SIGSTOP,
            Signal::SIGTSTP,
            Signal::SIGTTIN,
            Signal::SIGTTOU,
        ] {
            scope.spawn(move || keeps_its_lock_while_stopped_by(signal));
        }
    });
}

#[cfg(target_os = "linux")]
fn keeps_its_lock_while_stopped_by(signal: Signal) {
    let world = World::new();
    // it must not fork: a shell that waits for a fork to start cannot be stopped
    let line = "echo $$ > pid; exec sleep 1000";
    let running =
        Running::of(world.nestlock_without_terminal(&["exec", "l", "--lease", "4s", "-c", line]));
    let pid = world.pid("pid");
    let to = if signal == Signal::SIGSTOP {
        pid
    } else {
        running.pid()
    };
    let send = |signal| kill(Pid::from_raw(to), signal).unwrap();
    send(signal);
    let is_stopped = || {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .unwrap()
            .contains(") T ")
    };
    eventually("it is stopped", is_stopped);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(6) {
        assert_eq!(
            world.code(&["who", "l"]),
            0,
            "{signal}: lost after {:?}",
            start.elapsed()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    send(Signal::SIGCONT);
    eventually("it goes on", || !is_stopped());
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(143), "{signal}");
}

/// nestlock waits for hours, and a new version is installed in the meantime.
#[test]
fn a_nestlock_that_was_replaced_still_begins_its_command() {
    let world = World::new();
    let holder = holder(&world, &["l"]);
    let copy = world.copy(env!("CARGO_BIN_EXE_nestlock"), "nestlock");
    let waiter = Running::of(world.program(
        copy.to_str().unwrap(),
        &["exec", "l", "--", "touch", "begun"],
    ));
    eventually("it waits", || {
        world
            .server_says(&["PUBSUB", "NUMSUB", "redisson_lock__channel:{l}"])
            .contains(":1")
    });
    std::fs::remove_file(&copy).unwrap();
    world.make("go");
    assert_eq!(
        (holder.code(), waiter.code(), world.exists("begun")),
        (Some(0), Some(0), true)
    );
}
