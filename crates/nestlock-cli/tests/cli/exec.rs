//! `exec`.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{Running, World, eventually, is_alive, until};

/// Holds a lock until the file `go` is there.
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
    // nothing of all that is left
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
        &["exec", "l", "--url", "redis://localhost", "--url-file", "f", "--", "true"],
        &["exec", "l", "--url-file", "missing", "--", "true"],
    ] {
        let code = world.nestlock(wrong).env_remove("NESTLOCK_URL").output().unwrap().status.code();
        assert_eq!(code, Some(64), "{wrong:?}");
    }
    let url = world.server.url();
    drop(world.server.kill());
    let output = world.output(&["exec", "l", "--", "touch", "begun"]);
    assert_eq!((output.status.code(), world.exists("begun")), (Some(125), false), "{url}");
}

#[test]
fn a_password_is_in_no_output() {
    let world = World::new();
    let url = world.server.url().replace("redis://", "redis://someone:sesame@");
    let mut nestlock = world.nestlock(&["exec", "l", "--", "sh", "-c", "env"]);
    let output = nestlock.env("NESTLOCK_URL", &url).output().unwrap();
    let help = world.nestlock(&["exec", "--help"]).env("NESTLOCK_URL", &url).output().unwrap();
    assert_eq!((output.status.code(), help.status.code()), (Some(125), Some(0)));
    for text in [output.stdout, output.stderr, help.stdout, help.stderr] {
        assert!(!String::from_utf8_lossy(&text).contains("sesame"));
    }
}

#[test]
fn a_busy_lock_is_75_or_what_was_asked_for() {
    let world = World::new();
    let holder = holder(&world, &["l"]);
    assert_eq!(world.code(&["exec", "l", "-n", "--", "touch", "begun"]), 75);
    assert_eq!(world.code(&["exec", "l", "-w", "200ms", "--", "touch", "begun"]), 75);
    assert_eq!(world.code(&["exec", "l", "-n", "-E", "0", "--", "touch", "begun"]), 0);
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
    assert_eq!(world.code(&["exec", "l", "--kind", "write", "-n", "--", "true"]), 75);
}

#[test]
fn who_waits_has_it_next() {
    let world = World::new();
    let holder = holder(&world, &["l"]);
    let mut next = Running::of(world.nestlock(&["exec", "l", "-c", "echo next > next"]));
    // its place is to be seen by those who listen
    eventually("it waits", || world.server_says(&["PUBSUB", "NUMSUB", "redisson_lock__channel:{l}"]).contains(":1"));
    assert!(next.is_running() && !world.exists("next"));
    world.make("go");
    assert_eq!((holder.code(), next.code()), (Some(0), Some(0)));
    assert_eq!(world.text("next"), "next");
}

/// Signals are heard while it waits for the lock; no command begins, and no place in the queue stays.
#[test]
fn who_is_stopped_while_it_waits_leaves_nothing() {
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129), (Signal::SIGQUIT, 131)]
    {
        let world = World::new();
        let _holder = holder(&world, &["l", "--kind", "fair"]);
        let waiter = Running::of(world.nestlock(&["exec", "l", "--kind", "fair", "--", "touch", "begun"]));
        let queue = || world.server_says(&["LLEN", "redisson_lock_queue:{l}"]);
        eventually("it has a place", || queue() == ":1\r\n");
        waiter.send(signal);
        assert_eq!(waiter.code(), Some(code));
        assert_eq!((queue(), world.exists("begun")), (":0\r\n".to_owned(), false));
    }
}

#[test]
fn signals_are_the_commands_to_answer() {
    let world = World::new();
    let line = format!("trap 'exit 7' TERM; trap 'echo usr1 > usr1' USR1; echo > ready; {}", until("never"));
    let running = world.begin(&["exec", "l", "-c", &line], "ready");
    running.send(Signal::SIGUSR1);
    assert_eq!(world.text("usr1"), "usr1");
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(7));
    assert_eq!(world.code(&["who", "l"]), 1);
}

#[test]
fn whoever_asks_twice_means_it() {
    let world = World::new();
    let line = format!("trap 'echo > heard' TERM; echo > ready; {}", until("never"));
    let running = world.begin(&["exec", "l", "-c", &line], "ready");
    running.send(Signal::SIGTERM);
    world.text("heard");
    running.send(Signal::SIGTERM);
    assert_eq!(running.code(), Some(137));
}

/// The shell dies, and so does what it began: nothing runs on without the lock.
#[test]
fn what_the_command_leaves_in_its_group_is_ended() {
    let world = World::new();
    let line = "sleep 1000 & echo $! > left; exit 4";
    assert_eq!(world.code(&["exec", "l", "--lease", "3s", "-c", line]), 4);
    assert!(!is_alive(world.pid("left")));
}

#[test]
#[cfg(target_os = "linux")]
fn a_command_does_not_outlive_a_nestlock_that_is_killed() {
    let world = World::new();
    let running = world.begin(&["exec", "l", "--", "sh", "-c", "echo $$ > pid; exec sleep 1000"], "pid");
    let pid = world.pid("pid");
    assert!(is_alive(pid));
    running.send(Signal::SIGKILL);
    eventually("it is gone, too", || !is_alive(pid));
}

#[test]
fn a_lock_that_is_taken_away_ends_the_command() {
    let world = World::new();
    let line = format!("trap 'echo told > told; exit 0' TERM; echo > ready; {}", until("never"));
    let running = world.begin(&["exec", "l", "--lease", "1500ms", "-c", &line], "ready");
    assert_eq!(world.code(&["force", "l"]), 0);
    // although it ended well
    assert_eq!(running.code(), Some(76));
    assert_eq!(world.text("told"), "told");
    let running = world.begin(&["exec", "l", "--lease", "1500ms", "--lost-code", "3", "-c", &line], "ready");
    eventually("it is held", || world.code(&["who", "l"]) == 0);
    assert_eq!((world.code(&["force", "l"]), running.code()), (0, Some(3)));
}

/// The group is gone when another may have the lock, and had its grace before.
#[test]
fn a_server_that_hangs_ends_the_command_within_the_lease() {
    let world = World::new();
    let lease = Duration::from_secs(3);
    let line = "trap 'echo told > told' TERM; echo $$ > pid; while true; do sleep 0.02; done";
    let running = world.begin(&["exec", "l", "--lease", "3s", "--grace", "800ms", "-c", line], "pid");
    world.server.stop().unwrap();
    let stopped = Instant::now();
    world.text("told");
    let told = stopped.elapsed();
    let pid = world.pid("pid");
    eventually("it is killed", || !is_alive(pid));
    let killed = stopped.elapsed();
    assert!(killed < lease, "killed after {killed:?}");
    assert!(killed > told + Duration::from_millis(400), "told after {told:?}, killed after {killed:?}");
    world.server.cont().unwrap();
    assert_eq!(running.code(), Some(76));
}

/// An `exec` below another one of the same lock goes along with its hold, and never changes its count.
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
    assert!(world.text("who").starts_with(&format!("{outer} 1 ")), "{}", world.text("who"));
    assert_eq!(world.text("own"), "75");
    assert_ne!(world.text("other"), outer, "another lock is none of its business");
    assert_eq!(world.text("kind"), "75");
    // what is over is no hold to go along with
    let line = format!("{nestlock} force l > freed; {nestlock} exec l -n -c 'echo $NESTLOCK_OWNER > anew'");
    world.code(&["exec", "l", "-c", &line]);
    assert!(world.text("freed").starts_with("freed l "));
    assert_ne!(world.text("anew"), outer);
}

/// It keeps the outer hold alive though the outer `exec` cannot, and is told when it is lost.
#[test]
fn who_goes_along_keeps_the_hold_and_hears_of_its_loss() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let inner = format!("trap 'echo told > told; exit 0' TERM; echo > ready; {}", until("go"));
    let line = format!("{nestlock} exec l --lease 3s -c \"{inner}\"; echo $? > code");
    let outer = world.begin(&["exec", "l", "--lease", "3s", "-c", &line], "ready");
    outer.send(Signal::SIGSTOP);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(6) {
        assert_eq!(world.code(&["who", "l"]), 0, "lost after {:?}", start.elapsed());
    }
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!((world.text("told"), world.text("code")), ("told".to_owned(), "76".to_owned()));
    outer.send(Signal::SIGCONT);
    assert_eq!(outer.code(), Some(76));
}

#[test]
fn the_command_knows_its_lock() {
    let world = World::new();
    let line = "echo $NESTLOCK_NAME $NESTLOCK_KIND $NESTLOCK_TOKEN $NESTLOCK_DEPTH > told";
    assert_eq!(world.code(&["exec", "l", "--kind", "fenced", "--prefix", "p:", "-c", line]), 0);
    let told = world.text("told");
    let words: Vec<&str> = told.split(' ').collect();
    assert_eq!((words[0], words[1], words[3]), ("p:l", "fenced", "1"));
    let token = words[2].parse::<u64>().unwrap();
    assert_eq!(
        world.code(&["exec", "l", "--kind", "fenced", "--prefix", "p:", "-c", "echo $NESTLOCK_TOKEN > next"]),
        0
    );
    assert_eq!(world.text("next"), (token + 1).to_string());
}
