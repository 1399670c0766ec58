//! `exec`: all that the command starts ends with it, in any process group or session and with any
//! parent.

use std::{
    fs,
    io::Write,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::support::{Running, World, ends_before_it_is_free, eventually, is_alive, until, within};

/// Ways to start `step`, of which the first two wait for it: as a job, in a separate process group,
/// as a daemon.
const WAYS: [&str; 3] = [
    "bash -mc 'sh ./step x; true'",
    "timeout 1000 sh ./step x; true",
    "setsid sh -c 'sh ./step x &'; sleep 1000",
];

fn world() -> World {
    let world = World::new();
    fs::write(world.path("step"), "echo $$ > pid-$1; exec sleep 1000\n").unwrap();
    world
}

fn begin(world: &World, args: &[&str], line: &str) -> (Running, i32) {
    let _ = fs::remove_file(world.path("pid-x"));
    let running = world.begin(&[&["exec", "l"], args, &["-c", line]].concat(), "pid-x");
    (running, world.pid("pid-x"))
}

#[test]
fn what_the_command_leaves_behind_is_ended_wherever_it_is() {
    let world = world();
    for way in WAYS {
        let line = format!("({way}) & {}; exit 4", until("pid-x"));
        let (running, pid) = begin(&world, &["--lease", "3s"], &line);
        assert_eq!((running.code(), is_alive(pid)), (Some(4), false), "{way}");
        assert_eq!(world.code(&["who", "l"]), 1, "{way}");
    }
}

#[test]
fn a_stop_ends_what_the_command_began_wherever_it_is() {
    let world = world();
    for way in WAYS {
        let (running, pid) = begin(&world, &["--lease", "3s"], way);
        running.send(Signal::SIGTERM);
        assert_eq!((running.code(), is_alive(pid)), (Some(143), false), "{way}");
    }
}

#[test]
fn a_loss_ends_what_the_command_began_wherever_it_is() {
    let world = world();
    for on_lost in ["term", "kill"] {
        for way in WAYS {
            let (running, pid) = begin(
                &world,
                &["--lease", "3s", "--on-lost", on_lost, "--wait-group"],
                way,
            );
            assert_eq!(world.code(&["force", "l"]), 0);
            assert_eq!((running.code(), is_alive(pid)), (Some(76), false), "{way}");
        }
    }
}

/// All processes are gone before the lease has ended.
#[test]
fn a_server_that_hangs_ends_all_of_it_within_the_lease() {
    for way in WAYS {
        let world = world();
        let (running, pid) = begin(&world, &["--lease", "3s", "--grace", "500ms"], way);
        world.server.stop().unwrap();
        let stopped = Instant::now();
        eventually("it is ended", || !is_alive(pid));
        assert!(
            stopped.elapsed().as_millis() < 3_000,
            "{way}: {:?}",
            stopped.elapsed()
        );
        world.server.cont().unwrap();
        assert_eq!(running.code(), Some(76));
    }
}

/// A daemon that the command left behind gets TERM, too, and has its grace.
#[test]
fn what_is_left_behind_is_asked_before_it_is_killed() {
    let world = World::new();
    let daemon = format!(
        "trap \"echo told > told; exit\" TERM; echo $$ > pid; {}",
        until("never")
    );
    fs::write(world.path("daemon"), daemon).unwrap();
    let line = format!("setsid sh -c 'sh ./daemon &'; {}; exit 4", until("pid"));
    assert_eq!(
        Running::of(world.nestlock(&["exec", "l", "-c", &line])).code(),
        Some(4)
    );
    assert_eq!(world.text("told"), "told");
}

#[test]
fn a_daemon_is_waited_for_if_asked() {
    let world = World::new();
    fs::write(
        world.path("daemon"),
        format!("echo $$ > pid; {}; echo done > done", until("go")),
    )
    .unwrap();
    let line = format!(
        "setsid sh -c 'sh ./daemon &'; {}; echo $$ > command; exit 4",
        until("pid")
    );
    let mut running = world.begin(&["exec", "l", "--wait-group", "-c", &line], "command");
    let command = world.pid("command");
    eventually("the command has ended", || !is_alive(command));
    assert!(running.is_running() && world.code(&["who", "l"]) == 0);
    world.make("go");
    assert_eq!((running.code(), &*world.text("done")), (Some(4), "done"));
}

/// It forks again and again, each child in a new session, and exits: no single search sees all of
/// them.
#[test]
fn what_forks_forever_is_ended() {
    let world = World::new();
    // a limit, in case that it is not ended
    let hop = "import os, time\nend = time.time() + 30\nwhile time.time() < end:\n  if os.fork(): os._exit(0)\n  os.setsid()\n  \
               open('hops', 'a').write('x')\n";
    fs::write(world.path("hop.py"), hop).unwrap();
    let line = format!("setsid python3 hop.py & {}; exit 4", until("hops"));
    assert_eq!(
        Running::of(world.nestlock(&["exec", "l", "--lease", "10s", "-c", &line])).code(),
        Some(4)
    );
    let hops = || fs::metadata(world.path("hops")).unwrap().len();
    let before = hops();
    sleep(Duration::from_millis(100));
    assert_eq!(hops(), before);
}

/// Two such chains: the search must not take the process that it killed for the only one. The pace
/// lets a busy machine reap them: at full speed, they take all process IDs from the tests that run
/// concurrently.
const HOP: &str = r#"
#include <stdio.h>
#include <time.h>
#include <unistd.h>
int main() {
    time_t end = time(0) + 90;
    for (int chain = 0; chain < 2; chain++)
        if (!fork()) {
            setsid();
            // a limit, in case that it is not ended
            while (time(0) < end)
                if (fork()) {
                    FILE *hops = fopen("hops", "a");
                    fputc('x', hops);
                    fclose(hops);
                    _exit(0);
                } else {
                    usleep(1000);
                }
            _exit(0);
        }
    for (;;) pause();
}
"#;

/// Without the guards, nestlock itself adopts the processes, and has to notice when none is left.
#[test]
fn what_forks_forever_is_ended_without_guards() {
    let world = World::new();
    fs::write(world.path("hop.c"), HOP).unwrap();
    compile(&world, "hop.c", &["-o", "hop"]);
    for round in 0..4 {
        let _ = fs::remove_file(world.path("hops"));
        let mut running = Running::of(world.nestlock(&["exec", "l", "--", "./hop"]));
        eventually("it works", || world.exists("hops"));
        let first = child(running.pid()).unwrap();
        kill_all([child(first).unwrap(), first]);
        // long before the chains end by themselves
        within(Duration::from_secs(60), "it ends", || !running.is_running());
        assert_eq!(running.code(), Some(125), "{round}");
        let hops = || fs::metadata(world.path("hops")).unwrap().len();
        let before = hops();
        sleep(Duration::from_millis(100));
        assert_eq!(hops(), before, "{round}");
    }
}

/// The last guard adopts the processes, and ends them without nestlock.
#[test]
fn what_forks_forever_does_not_outlive_a_killed_nestlock() {
    let world = World::new();
    fs::write(world.path("hop.c"), HOP).unwrap();
    compile(&world, "hop.c", &["-o", "hop"]);
    let running = Running::of(world.nestlock(&["exec", "l", "--lease", "10s", "--", "./hop"]));
    eventually("it works", || world.exists("hops"));
    let first = child(running.pid()).unwrap();
    kill_all([running.pid()]);
    // the first guard ends only when it has no children left
    eventually("the guards have ended", || !is_alive(first));
    let hops = || fs::metadata(world.path("hops")).unwrap().len();
    let before = hops();
    sleep(Duration::from_millis(100));
    assert_eq!(hops(), before);
}

/// The pipe is full, or the terminal is stopped by Control-S: a write of nestlock would block
/// forever.
#[test]
fn unread_messages_do_not_hold_up_the_end() {
    let world = world();
    let (_reader, mut full) = std::io::pipe().unwrap();
    // the capacity of a pipe
    full.write_all(&vec![b'x'; 65_536]).unwrap();
    let line = "sh ./step x; true";
    let running = Running::telling(
        world.nestlock(&["exec", "l", "--lease", "3s", "-c", line]),
        full,
    );
    let pid = world.pid("pid-x");
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!((running.code(), is_alive(pid)), (Some(76), false));
}

/// The guards know until when the command may keep the lock.
#[test]
fn a_stopped_nestlock_loses_its_command_with_the_lease() {
    let world = world();
    // on a busy machine, the guards are delayed by less than 1/40 of this lease
    let (running, pid) = begin(&world, &["--lease", "24s"], "setsid sh ./step x; true");
    running.send(Signal::SIGSTOP);
    ends_before_it_is_free(&world, pid);
    running.send(Signal::SIGCONT);
    assert_eq!(running.code(), Some(76));
}

/// nestlock resumes after its guards have ended everything, and before the lease has ended: it
/// reads the messages of the guards before it notices that they have ended.
#[test]
fn a_suspended_nestlock_knows_why_its_guards_ended() {
    let world = world();
    let args = [
        "exec",
        "l",
        "--wait-group",
        "--lease",
        "4s",
        "-c",
        "setsid sh -c 'sh ./step x &'; exit 0",
    ];
    for round in 0..3 {
        let _ = fs::remove_file(world.path("pid-x"));
        let running = Running::telling(
            world.nestlock(&args),
            fs::File::create(world.path("said")).unwrap(),
        );
        let pid = world.pid("pid-x");
        running.send(Signal::SIGSTOP);
        eventually("the guards end it", || !is_alive(pid));
        running.send(Signal::SIGCONT);
        assert_eq!(running.code(), Some(76), "{round}");
        let said = fs::read_to_string(world.path("said")).unwrap();
        // the second, if this test was delayed until the lease had ended
        let is_why = said.contains("was suspended") || said.contains("the lease ended");
        assert!(is_why && !said.contains("guard"), "{said}");
    }
}

/// Delays the start of one guard by 3 s: the variable says how many guards are below it.
const LATE: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
__attribute__((constructor)) static void late(int argc, char **argv) {
    if (argc > 2 && !strcmp(argv[1], "__guard") && !strcmp(argv[2], getenv("LATE"))) sleep(3);
}
"#;

/// The guards also know of renewals before the command starts.
#[test]
fn a_guard_that_is_late_begins_what_is_still_locked() {
    let world = world();
    fs::write(world.path("late.c"), LATE).unwrap();
    compile(&world, "late.c", &["-shared", "-fPIC", "-o", "late.so"]);
    let begin = |below: &str, line: &str| {
        let mut nestlock = world.nestlock(&["exec", "l", "--lease", "2s", "-c", line]);
        nestlock
            .env("LD_PRELOAD", world.path("late.so"))
            .env("LATE", below);
        Running::of(nestlock)
    };
    assert_eq!(begin("1", "exit 4").code(), Some(4));
    assert_eq!(begin("0", "exit 4").code(), Some(4));
    // without the lock, the command does not start
    let running = begin("0", "echo > begun");
    eventually("the first guard is there", || {
        child(running.pid()).is_some_and(|first| child(first).is_some())
    });
    running.send(Signal::SIGSTOP);
    eventually("it is free", || world.code(&["who", "l"]) == 1);
    running.send(Signal::SIGCONT);
    assert_eq!(running.code(), Some(76));
    assert!(!world.exists("begun"));
}

/// A shorter stop has no effect: a deadline that a guard knew before does not limit a later
/// renewal.
#[test]
fn a_nestlock_that_is_stopped_for_less_than_its_lease_goes_on() {
    let world = World::new();
    let line = format!("echo > begun; {}; exit 4", until("go"));
    let running = world.begin(&["exec", "l", "--lease", "6s", "-c", &line], "begun");
    for _ in 0..6 {
        running.send(Signal::SIGSTOP);
        sleep(Duration::from_millis(700));
        running.send(Signal::SIGCONT);
        sleep(Duration::from_millis(700));
    }
    world.make("go");
    assert_eq!(running.code(), Some(4));
}

/// Killed processes get their time to end, although nestlock itself could not check them.
#[test]
fn a_suspended_nestlock_gives_killed_processes_time() {
    let world = World::new();
    let line = format!("trap '' TERM; echo > begun; {}", until("never"));
    let said = || fs::read_to_string(world.path("said")).unwrap();
    let nestlock = world.nestlock(&["exec", "l", "--lease", "3s", "--grace", "1s", "-c", &line]);
    let running = Running::telling(nestlock, fs::File::create(world.path("said")).unwrap());
    world.text("begun");
    assert_eq!(world.code(&["force", "l"]), 0);
    eventually("it ends the command", || {
        said().contains("ending the command")
    });
    running.send(Signal::SIGSTOP);
    // longer than the grace, and the time that the kernel has to end the processes
    sleep(Duration::from_millis(3_500));
    running.send(Signal::SIGCONT);
    assert_eq!(running.code(), Some(76));
    assert!(!said().contains("cannot be ended"), "{}", said());
}

/// Also for signals without a name.
#[test]
#[cfg(target_os = "linux")]
fn what_a_real_time_signal_ends_is_seen_to_have_ended() {
    let world = World::new();
    let code = |line: &str| {
        Running::of(world.nestlock(&["exec", "l", "--lease", "3s", "-c", line])).code()
    };
    assert_eq!(code("kill -40 $$"), Some(168));
    // a process that the command left behind
    let orphan = format!(
        "(setsid sh -c 'echo > orphan; kill -40 $$' &); {}; sleep 0.2; exit 3",
        until("orphan")
    );
    assert_eq!(code(&orphan), Some(3));
    // a guard is killed that way
    let running = world.begin(
        &[
            "exec",
            "l",
            "--lease",
            "3s",
            "-c",
            "echo > begun; sleep 1000",
        ],
        "begun",
    );
    let guard = child(running.pid()).unwrap().to_string();
    assert!(
        Command::new("kill")
            .args(["-40", &guard])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!((running.code(), world.code(&["who", "l"])), (Some(125), 1));
}

/// Runs a program as the first process of a new process namespace. Returns `None` if these tests
/// may not create one.
#[cfg(target_os = "linux")]
fn contained(world: &World, flags: &[&str], program: &[&str]) -> Option<Command> {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let flags = [
        &[if is_root { "-pf" } else { "-Urpf" }, "--kill-child"],
        flags,
    ]
    .concat();
    let is_allowed = world
        .program("unshare", &[&flags[..], &["true"]].concat())
        .status()
        .is_ok_and(|code| code.success());
    if !is_allowed {
        eprintln!("needs root, or namespaces of a user's own");
        return None;
    }
    Some(world.program("unshare", &[&flags[..], program].concat()))
}

/// In a container nestlock may be process 1, which a signal does not end.
#[test]
#[cfg(target_os = "linux")]
fn the_first_process_tells_of_an_interrupt_by_its_code() {
    let world = World::new();
    let nestlock = [
        env!("CARGO_BIN_EXE_nestlock"),
        "exec",
        "l",
        "-c",
        "kill -INT $$",
    ];
    let Some(command) = contained(&world, &["--mount-proc"], &nestlock) else {
        return;
    };
    assert_eq!(Running::of(command).code(), Some(130));
}

/// Ends a process that does not belong to the command, and starts one with the same process ID.
const SAME_NUMBER: &str = "
other=$(cat other)
echo > go
while [ -e /proc/$other ]; do sleep 0.02; done
echo $((other - 1)) > /proc/sys/kernel/ns_last_pid
setsid sleep 1000 & [ $! = $other ] && exit 5
exit 9
";

/// The shell that became nestlock had started a process. That process ends, and one that the
/// command starts gets its ID.
#[test]
#[cfg(target_os = "linux")]
fn what_gets_the_number_of_anothers_process_is_ended() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let begin = format!(
        "sh -c '{}' & echo $! > other\nexec {nestlock} exec l --lease 3s -- sh ./command",
        until("go")
    );
    fs::write(world.path("begin"), begin).unwrap();
    fs::write(world.path("command"), SAME_NUMBER).unwrap();
    // this shell outlives nestlock, because the end of process 1 would end all others
    fs::write(
        world.path("first"),
        "sh ./begin; echo $? > code; kill -0 $(cat other) && echo > outlived; exit 0",
    )
    .unwrap();
    // repeated, because a thread may take the process ID
    let mut codes = (0..20).map(|_| {
        let _ = fs::remove_file(world.path("go"));
        let Some(command) = contained(&world, &["--mount-proc"], &["sh", "./first"]) else {
            return "5".to_owned();
        };
        assert_eq!(Running::of(command).code(), Some(0));
        assert!(!world.exists("outlived"));
        world.text("code")
    });
    assert!(codes.any(|code| code == "5"));
}

/// While nestlock is stopped, the command ends, and another process gets its ID and ends as an
/// orphan that nestlock adopts.
const SAME_COMMAND: &str = "
import os, signal, time
def wait(is_so):
    while not is_so(): time.sleep(0.02)
nestlock = os.getppid()
wait(lambda: os.path.exists('command') and open('command').read().endswith('\\n'))
command = int(open('command').read())
os.kill(nestlock, signal.SIGSTOP)
open('end', 'w')
wait(lambda: not os.path.exists(f'/proc/{command}'))
leaves = os.fork()
if not leaves:
    for n in range(100):
        open('/proc/sys/kernel/ns_last_pid', 'w').write(str(command - 1))
        other = os.fork()
        if not other: os._exit(7)
        if other == command:
            open('same', 'w')
            break
    os._exit(0)
wait(lambda: open(f'/proc/{leaves}/stat').read().rsplit(') ')[1][0] == 'Z')
os.kill(nestlock, signal.SIGCONT)
";

/// The guards report how the command ended, whatever other processes end.
#[test]
#[cfg(target_os = "linux")]
fn the_code_is_the_commands_though_another_gets_its_number() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let line = format!("echo $$ > command; {}; exit 5", until("end"));
    let begin = format!("python3 other.py & exec {nestlock} exec l --lease 60s -c '{line}'");
    fs::write(world.path("other.py"), SAME_COMMAND).unwrap();
    fs::write(world.path("begin"), begin).unwrap();
    fs::write(world.path("first"), "sh ./begin; exit $?").unwrap();
    let Some(command) = contained(&world, &["--mount-proc"], &["sh", "./first"]) else {
        return;
    };
    assert_eq!(Running::of(command).code(), Some(5));
    assert!(world.exists("same"));
}

/// A process namespace with the `/proc` of its host. nestlock cannot find the processes there, but
/// knows that some are left.
#[test]
#[cfg(target_os = "linux")]
fn what_proc_does_not_show_keeps_the_lock_or_is_said() {
    let world = world();
    let line = format!("setsid sh ./step x & {}; exit 4", until("pid-x"));
    let nestlock = [
        env!("CARGO_BIN_EXE_nestlock"),
        "exec",
        "l",
        "--lease",
        "3s",
        "-c",
        &line,
    ];
    let Some(command) = contained(&world, &[], &nestlock) else {
        return;
    };
    let said = || fs::read_to_string(world.path("said")).unwrap();
    let running = Running::telling(command, fs::File::create(world.path("said")).unwrap());
    eventually("it is said", || {
        said().contains("nestlock keeps the lock until it has ended")
    });
    assert!(
        said().contains("only the command's process group can be ended"),
        "{}",
        said()
    );
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!(running.code(), Some(77), "{}", said());
    assert!(
        said().contains("it runs on although the lock is lost"),
        "{}",
        said()
    );
}

/// A shell started these children, and became nestlock. nestlock also adopts what one of them
/// leaves behind.
#[test]
fn children_that_nestlock_had_before_are_none_of_the_commands() {
    let world = world();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let leaves = format!("sh ./step y & {}", until("go"));
    let line = format!(
        "sleep 1000 & echo $! > pid; sh -c '{leaves}' & echo $! > pid-left; \
         exec {nestlock} exec l --lease 3s --on-lost kill -c 'sh ./step x; true'"
    );
    for round in 0..4 {
        for file in ["go", "pid", "pid-left", "pid-x", "pid-y"] {
            let _ = fs::remove_file(world.path(file));
        }
        let running = Running::of(world.program("sh", &["-c", &line]));
        let [own, theirs, left, orphan] =
            ["pid-x", "pid", "pid-left", "pid-y"].map(|file| world.pid(file));
        world.make("go");
        eventually("one has ended", || !is_alive(left));
        let code = match round {
            0 => {
                assert_eq!(world.code(&["force", "l"]), 0);
                76
            }
            1 => {
                running.send(Signal::SIGTERM);
                143
            }
            // the command goes on without its step; in the last round nestlock has to kill a guard
            _ => {
                if round == 3 {
                    let guard = children(running.pid())
                        .into_iter()
                        .find(|pid| ![theirs, orphan].contains(pid));
                    kill(Pid::from_raw(guard.unwrap()), Signal::SIGSTOP).unwrap();
                }
                kill_all([own]);
                0
            }
        };
        assert_eq!((running.code(), is_alive(own)), (Some(code), false));
        assert_eq!([theirs, orphan].map(is_alive), [true, true], "{round}");
        kill_all([theirs, orphan]);
        eventually("it is free", || world.code(&["who", "l"]) == 1);
    }
}

/// It starts thousands of processes, which end together with it.
const MANY: &str = r#"
#include <stdio.h>
#include <unistd.h>
int main() {
    int ends[2];
    pipe(ends);
    for (int many = 0; many < 4000; many++)
        if (!fork()) {
            char byte;
            close(ends[1]);
            read(ends[0], &byte, 1);
            _exit(0);
        }
    fclose(fopen("begun", "w"));
    while (access("go", F_OK)) usleep(10000);
    return 3;
}
"#;

/// No guard sleeps while there are more processes to reap.
#[test]
fn thousands_that_end_at_once_do_not_hold_up_the_end() {
    let world = World::new();
    fs::write(world.path("many.c"), MANY).unwrap();
    compile(&world, "many.c", &["-o", "many"]);
    // with a pause of 500 ms per 256 processes, no run could be this fast; a slower run on a busy
    // machine proves nothing, so it is repeated
    let is_fast = |_| {
        for file in ["begun", "go"] {
            let _ = fs::remove_file(world.path(file));
        }
        let running = Running::of(world.nestlock(&["exec", "l", "--wait-group", "--", "./many"]));
        eventually("all are there", || world.exists("begun"));
        let last = child(child(running.pid()).unwrap()).unwrap();
        // stopped, so that it finds all of them at once
        kill(Pid::from_raw(last), Signal::SIGSTOP).unwrap();
        world.make("go");
        eventually("all have ended", || {
            let left = children(last);
            left.len() > 4000 && !left.into_iter().any(is_alive)
        });
        kill(Pid::from_raw(last), Signal::SIGCONT).unwrap();
        let since = Instant::now();
        assert_eq!(running.code(), Some(3));
        since.elapsed() < Duration::from_secs(6)
    };
    assert!((0..5).any(is_fast));
}

/// While nestlock is stopped, its guards report each stop of the command. The message about the end
/// comes after those.
#[test]
#[cfg(target_os = "linux")]
fn a_paused_nestlock_hears_of_the_end_after_many_stops() {
    let world = world();
    let line = format!("echo $$ > pid-x; {}; exit 4", until("go"));
    let (running, pid) = begin(&world, &["--lease", "30s"], &line);
    let first = child(running.pid()).unwrap();
    running.send(Signal::SIGSTOP);
    let last = child(first).unwrap();
    let is_written = |fd: &i32| {
        let info = fs::read_to_string(format!("/proc/{last}/fdinfo/{fd}")).unwrap_or_default();
        info.lines()
            .any(|line| line.starts_with("flags:") && line.ends_with('1'))
    };
    let is_pipe = |fd: &i32| {
        fs::read_link(format!("/proc/{last}/fd/{fd}"))
            .is_ok_and(|link| link.to_string_lossy().starts_with("pipe:"))
    };
    // without standard output and standard error
    let told: Vec<i32> = (3..64).filter(is_written).filter(is_pipe).collect();
    assert_eq!(told.len(), 1);
    // the smallest capacity of a pipe, so that fewer stops would fill it
    let mut pipe = fs::File::options();
    let pipe = pipe
        .write(true)
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(format!("/proc/{last}/fd/{}", told[0]));
    nix::fcntl::fcntl(pipe.unwrap(), nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    for _ in 0..2_000 {
        for signal in [Signal::SIGSTOP, Signal::SIGCONT] {
            kill(Pid::from_raw(pid), signal).unwrap();
            sleep(Duration::from_micros(200));
        }
    }
    world.make("go");
    eventually("the command has ended", || !is_alive(pid));
    running.send(Signal::SIGCONT);
    assert_eq!(running.code(), Some(4));
}

// --- nestlock, or a guard, is killed ---

/// A daemon, a step of a script with a pipe, and the next step.
const SCRIPT: &str = "setsid sh -c 'sh ./step x &'; sh ./step y | cat; echo > went-on";

/// Starts this script. Returns the processes of nestlock, which are itself and its guards, and
/// those of the script.
fn script(world: &World) -> (Running, [i32; 3], [i32; 2]) {
    let _ = fs::remove_file(world.path("pid-y"));
    let (running, x) = begin(world, &["--lease", "30s"], SCRIPT);
    let y = world.pid("pid-y");
    let first = child(running.pid()).unwrap();
    let all = [running.pid(), first, child(first).unwrap()];
    (running, all, [x, y])
}

pub fn child(pid: i32) -> Option<i32> {
    children(pid).first().copied()
}

fn children(pid: i32) -> Vec<i32> {
    let children =
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children
        .split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

fn kill_all(pids: impl IntoIterator<Item = i32>) {
    for pid in pids {
        // the end of the first one may already have ended the second one
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

#[test]
fn nothing_outlives_a_nestlock_that_is_killed() {
    let world = world();
    for round in 0..20 {
        let (running, [own, ..], steps) = script(&world);
        kill_all([own]);
        eventually("all are gone", || !steps.iter().any(|pid| is_alive(*pid)));
        assert!(!world.exists("went-on"), "{round}");
        drop(running);
        world.code(&["force", "l"]);
    }
}

#[test]
fn nothing_outlives_a_nestlock_that_is_killed_with_a_guard() {
    let world = world();
    for round in 0..20 {
        let (running, [own, first, second], steps) = script(&world);
        let guard = if round % 2 == 0 { first } else { second };
        kill_all(if round % 4 < 2 {
            [own, guard]
        } else {
            [guard, own]
        });
        eventually("all are gone", || !steps.iter().any(|pid| is_alive(*pid)));
        assert!(!world.exists("went-on"), "{round}");
        drop(running);
        world.code(&["force", "l"]);
    }
}

/// nestlock then releases the lock, and fails with 125.
#[test]
fn guards_that_are_killed_end_all_of_it() {
    let world = world();
    for round in 0..24 {
        let (running, [_, first, second], steps) = script(&world);
        match round % 4 {
            0 => kill_all([first]),
            1 => kill_all([second]),
            // nestlock may adopt the children of the second one before it notices the end of the
            // first one
            2 => kill_all([first, second]),
            _ => kill_all([second, first]),
        }
        assert_eq!(running.code(), Some(125), "{round}");
        assert!(
            !steps.iter().any(|pid| is_alive(*pid)) && !world.exists("went-on"),
            "{round}"
        );
        assert_eq!(world.code(&["who", "l"]), 1, "{round}");
    }
}

/// Blocks the message of the last guard that the command has started.
const SILENT: &str = "
#include <sys/syscall.h>
#include <unistd.h>
ssize_t write(int fd, const void *bytes, size_t count) {
    if (count == 5 && *(const char *)bytes == 'b')
        for (;;) pause();
    return syscall(SYS_write, fd, bytes, count);
}
";

fn compile(world: &World, source: &str, args: &[&str]) {
    let mut compiler = Command::new("cc");
    compiler.args(args).current_dir(world.path("")).arg(source);
    assert!(
        compiler
            .status()
            .expect("a C compiler, which Rust links with")
            .success()
    );
}

/// Its first thread ends, and another one runs on: `/proc` shows the process as a zombie.
const HEADLESS: &str = r#"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static pthread_t first;
static void *work(void *none) {
    pthread_join(first, 0);
    FILE *file = fopen("pid-x", "w");
    fprintf(file, "%d\n", getpid());
    fclose(file);
    for (;;) pause();
}
int main() {
    pthread_t other;
    first = pthread_self();
    signal(SIGTERM, SIG_IGN);
    setsid();
    pthread_create(&other, 0, work, 0);
    pthread_exit(0);
}
"#;

#[test]
fn what_has_lost_its_first_thread_is_ended() {
    let world = world();
    fs::write(world.path("headless.c"), HEADLESS).unwrap();
    compile(&world, "headless.c", &["-pthread", "-o", "headless"]);
    let gone = |pid: i32, how: &str| eventually(how, || !exists(pid));
    let line = format!("./headless & {}; exit 4", until("pid-x"));
    let (running, pid) = begin(&world, &["--lease", "3s"], &line);
    assert_eq!(running.code(), Some(4));
    gone(pid, "left behind, it is ended");
    let (running, pid) = begin(&world, &["--lease", "3s"], "./headless & sleep 1000");
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!(running.code(), Some(76));
    gone(pid, "it is ended with the lock");
    assert_eq!(world.code(&["who", "l"]), 1);
}

/// The command starts only when nestlock knows of it: a guard that is killed before leaves no
/// command behind.
#[test]
fn guards_killed_before_the_command_is_known_leave_none() {
    let world = world();
    fs::write(world.path("silent.c"), SILENT).unwrap();
    compile(&world, "silent.c", &["-shared", "-fPIC", "-o", "silent.so"]);
    for round in 0..4 {
        let mut nestlock = world.nestlock(&["exec", "l", "--lease", "30s", "-c", SCRIPT]);
        nestlock.env("LD_PRELOAD", world.path("silent.so"));
        let running = Running::of(nestlock);
        let (own, mut below) = (running.pid(), Vec::new());
        eventually("the last guard has begun what becomes the command", || {
            below = vec![own];
            while let Some(next) = child(*below.last().unwrap()) {
                below.push(next);
            }
            below.len() == 4
        });
        // a command that does not wait for nestlock would be running by then
        sleep(Duration::from_millis(200));
        let [_, first, second, _] = below[..] else {
            panic!("{below:?}")
        };
        // the last guard hangs in its write and notices nothing: in each round it is killed, or
        // ended by the first guard
        let ends = [
            vec![second],
            vec![second, first],
            vec![own],
            vec![own, second],
        ];
        kill_all(ends[round].clone());
        if !ends[round].contains(&own) {
            assert_eq!(running.code(), Some(125), "{round}");
            assert_eq!(world.code(&["who", "l"]), 1, "{round}");
        }
        eventually("all are gone", || {
            !below[1..].iter().any(|pid| is_alive(*pid))
        });
        assert!(!world.exists("pid-x") && !world.exists("pid-y"), "{round}");
        world.code(&["force", "l"]);
    }
}

/// The command inherits nothing of the guards: no descriptor, no blocked or ignored signal.
#[test]
fn the_command_has_what_it_would_have_without_nestlock() {
    let world = World::new();
    let line = "ls /proc/self/fd; grep -E '^Sig(Blk|Ign)' /proc/self/status; ps -o tty=,sid= -p $$; umask; pwd";
    let run = |mut command: Command| {
        let output = command
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let bare = run(world.program("sh", &["-c", line]));
    assert_eq!(run(world.nestlock(&["exec", "l", "-c", line])), bare);
}

/// A supervisor may start nestlock with SIGCHLD blocked. nestlock notices the end of the command
/// all the same, and the command has the signal mask that it would have without nestlock.
#[test]
#[cfg(target_os = "linux")]
fn exec_ends_where_the_end_of_children_is_blocked() {
    let world = World::new();
    let nestlock = env!("CARGO_BIN_EXE_nestlock");
    let ended = |args: &[&str]| {
        let mut command = world.program("env", &[&["--block-signal=CHLD,USR1"], args].concat());
        command.stdout(fs::File::create(world.path("said")).unwrap());
        (Running::of(command).code(), world.text("said"))
    };
    assert_eq!(
        ended(&[nestlock, "exec", "l", "-c", "echo; exit 7"]).0,
        Some(7)
    );
    // not by a shell, as some unblock all signals
    let look = ["grep", "^SigBlk", "/proc/self/status"];
    let bare = ended(&look);
    assert!(
        bare.0 == Some(0) && !bare.1.contains("\t0000000000000000"),
        "{bare:?}"
    );
    assert_eq!(
        ended(&[&[nestlock, "exec", "l", "--"], &look[..]].concat()),
        bare
    );
}

// --- what cannot be ended ---

/// nestlock runs as an ordinary user, and its command becomes root, so nestlock may not end it.
struct Users {
    world: World,
    /// The command prefix that runs a line of shell as root.
    become_root: &'static str,
    is_root: bool,
}

impl Users {
    /// Returns `None` if these tests neither run as root nor may become root.
    fn new() -> Option<Self> {
        let world = world();
        let run = |program: &str, args: &[&str]| {
            world
                .program(program, args)
                .status()
                .is_ok_and(|code| code.success())
        };
        let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
        if is_root {
            let program = Command::new("sh")
                .args(["-c", "command -v setpriv"])
                .output()
                .unwrap()
                .stdout;
            world.copy(String::from_utf8(program).unwrap().trim(), "become");
            world.copy(env!("CARGO_BIN_EXE_nestlock"), "nestlock");
            assert!(run("chmod", &["4755", "become"]) && run("chmod", &["777", "."]));
        } else if !run("sudo", &["-n", "true"]) {
            eprintln!("needs root, or sudo without a password");
            return None;
        }
        let become_root = if is_root {
            "./become --reuid 0 --regid 0 --clear-groups sh -c"
        } else {
            "sudo -n sh -c"
        };
        Some(Self {
            world,
            become_root,
            is_root,
        })
    }

    /// Starts nestlock, with its messages in the file `said`.
    fn exec(&self, line: &str) -> std::process::Child {
        let args = ["exec", "l", "--lease", "3s", "-c", line];
        let mut command = if self.is_root {
            let nobody = [
                "--reuid=65534",
                "--regid=65534",
                "--clear-groups",
                "./nestlock",
            ];
            self.world
                .program("setpriv", &[&nobody[..], &args].concat())
        } else {
            self.world.nestlock(&args)
        };
        command
            .stdout(Stdio::null())
            .stderr(fs::File::create(self.world.path("said")).unwrap())
            .spawn()
            .unwrap()
    }

    /// Returns the number of the process that `step` becomes. Until then, its name is that of the
    /// shell, and nestlock would say that one.
    fn sleeper(&self, step: &str) -> i32 {
        let pid = self.world.pid(&format!("pid-{step}"));
        eventually("the step sleeps", || {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
        });
        pid
    }

    fn said(&self, what: &str) -> bool {
        fs::read_to_string(self.world.path("said"))
            .unwrap()
            .contains(what)
    }

    fn end(&self, pid: i32) {
        let pid = pid.to_string();
        let kill = if self.is_root {
            vec!["kill", "-KILL", &pid]
        } else {
            vec!["sudo", "-n", "kill", "-KILL", &pid]
        };
        assert!(
            self.world
                .program(kill[0], &kill[1..])
                .status()
                .unwrap()
                .success()
        );
    }
}

fn code(child: &mut std::process::Child) -> Option<i32> {
    eventually("it ends", || child.try_wait().unwrap().is_some());
    child.wait().unwrap().code()
}

#[test]
fn what_became_another_user_is_said_when_the_lock_is_lost() {
    let Some(users) = Users::new() else { return };
    let world = &users.world;
    let mut running = users.exec(&format!("{} 'sh ./step x'; true", users.become_root));
    let pid = users.sleeper("x");
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!(code(&mut running), Some(77));
    assert!(
        users.said(&format!("process {pid} (sleep) cannot be ended"))
            && users.said("sudo nestlock exec")
    );
    assert!(exists(pid));
    users.end(pid);
}

/// The other guard goes on, as it cannot end all processes. nestlock is notified at once that a
/// guard was killed, and no longer relies on the command's process ID, which may be reused by then.
#[test]
#[cfg(target_os = "linux")]
fn a_killed_guard_is_reported_while_the_other_one_goes_on() {
    let Some(users) = Users::new() else { return };
    let world = &users.world;
    let mut running = users.exec(&format!(
        "{} 'sh ./step x' & {}",
        users.become_root,
        until("never")
    ));
    let pid = world.pid("pid-x");
    let first = child(running.id().cast_signed()).unwrap();
    users.end(child(first).unwrap());
    eventually("it is said", || {
        users.said("a guard of the command was killed")
    });
    assert!(exists(pid) && running.try_wait().unwrap().is_none());
    users.end(pid);
    assert_eq!(
        (code(&mut running), world.code(&["who", "l"])),
        (Some(125), 1)
    );
}

/// No other client gets the lock while the process runs.
#[test]
fn what_became_another_user_and_was_left_keeps_the_lock() {
    let Some(users) = Users::new() else { return };
    let world = &users.world;
    let mut running = users.exec(&format!(
        "{} 'sh ./step x' & {}; exit 4",
        users.become_root,
        until("pid-x")
    ));
    let pid = world.pid("pid-x");
    eventually("it is said", || {
        users.said("nestlock keeps the lock until it has ended")
    });
    assert_eq!(
        (world.code(&["who", "l"]), running.try_wait().unwrap()),
        (0, None)
    );
    users.end(pid);
    assert_eq!(
        (code(&mut running), world.code(&["who", "l"])),
        (Some(4), 1)
    );
}

#[test]
fn what_became_another_user_is_said_when_nestlock_is_killed() {
    let Some(users) = Users::new() else { return };
    let mut running = users.exec(&format!("{} 'sh ./step x'; true", users.become_root));
    let pid = users.sleeper("x");
    running.kill().unwrap();
    running.wait().unwrap();
    eventually("it is said", || {
        users.said(&format!("process {pid} (sleep) cannot be ended"))
    });
    users.end(pid);
}

/// Returns whether a process exists, even one of another user.
fn exists(pid: i32) -> bool {
    fs::exists(format!("/proc/{pid}/stat")).unwrap()
}
