//! `exec` and `top` in a terminal, which `script` provides.

use std::{
    fs,
    io::{Read, Write},
    num::NonZero,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    ends::child,
    support::{PATIENCE, Place, World, ends_before_it_is_free, eventually, is_alive, until},
};

/// A shell in a separate terminal.
pub struct Terminal {
    shell: Child,
    keys: ChildStdin,
    seen: Arc<Mutex<String>>,
    /// The screen, as a terminal draws it.
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    pub fn open(world: &Place) -> Self {
        let mut script = Command::new("script");
        // if the tests run in the background, SIGINT is ignored, also in all their children
        let shell = "env --default-signal PS1='$ ' bash --norc --noediting -i";
        script
            .args(["-qfec", shell, "/dev/null"])
            .current_dir(world.path(""));
        script
            .env("NESTLOCK_URL", world.url())
            .env("SHELL", "/bin/sh");
        let mut shell = script
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script, of bsdutils");
        let (keys, mut screen) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        let seen = Arc::new(Mutex::new(String::new()));
        let drawn = Arc::new(Mutex::new(vt100::Parser::new(
            NonZero::new(30).unwrap(),
            NonZero::new(120).unwrap(),
            0,
        )));
        let (written, parser) = (Arc::clone(&seen), Arc::clone(&drawn));
        thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(length @ 1..) = screen.read(&mut bytes) {
                parser.lock().unwrap().process(&bytes[..length]);
                written
                    .lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&bytes[..length]).replace('\r', ""));
            }
        });
        Self {
            shell,
            keys,
            seen,
            screen: drawn,
        }
    }

    pub fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits until this text is on the screen.
    pub fn draws(&self, text: &str) {
        let screen = || self.screen.lock().unwrap().screen().contents();
        let start = Instant::now();
        while !screen().contains(text) {
            assert!(
                start.elapsed() < PATIENCE,
                "{text:?} is not drawn: {}",
                screen()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns whether this text was written; if it was, forgets all earlier output.
    pub fn has_shown(&self, text: &str) -> bool {
        let mut seen = self.seen.lock().unwrap();
        let is_there = seen.contains(text);
        if is_there {
            seen.clear();
        }
        is_there
    }

    /// Waits until this text is written, and forgets all earlier output.
    pub fn shows(&self, text: &str) {
        let start = Instant::now();
        while !self.has_shown(text) {
            assert!(
                start.elapsed() < PATIENCE,
                "{text:?} is not shown: {:?}",
                self.seen.lock().unwrap()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

const NESTLOCK: &str = env!("CARGO_BIN_EXE_nestlock");

#[test]
fn the_command_has_the_terminal_and_then_the_shell_has_it_again() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l -c 'echo rea''dy; read x; echo read-$x'; read y; echo then-$y\n"
    ));
    terminal.shows("ready\n");
    terminal.types("one\n");
    terminal.shows("read-one\n");
    terminal.types("two\n");
    terminal.shows("then-two\n");
}

#[test]
fn control_c_is_the_commands_to_answer() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal
        .types(&format!("{NESTLOCK} exec l -c 'trap \"exit 9\" INT; echo rea''dy; while true; do sleep 0.02; done'\n"));
    terminal.shows("ready\n");
    terminal.types("\x03");
    terminal.types("echo code-$?\n");
    terminal.shows("code-9\n");
}

/// Stopped by Control-Z, `exec` is a job like any other. In the foreground it continues, if its
/// lease has not ended by then.
#[test]
fn control_z_stops_it_and_fg_lets_it_go_on() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l --lease 60s -c 'echo rea''dy; read x; echo read-$x'\n"
    ));
    terminal.shows("ready\n");
    terminal.types("\x1a");
    terminal.shows("Stopped");
    assert_eq!(world.code(&["who", "l"]), 0, "it is held all the while");
    terminal.types("fg\n");
    terminal.shows("exec l");
    terminal.types("one\n");
    terminal.shows("read-one\n");
    eventually("it is free", || world.code(&["who", "l"]) == 1);
}

/// The job is stopped in the background because it wants to read, and reads in the foreground.
#[test]
fn a_job_that_is_fetched_from_the_background_has_the_terminal() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l --lease 60s -c 'read x; echo read-$x' &\n"
    ));
    eventually("it is held", || world.code(&["who", "l"]) == 0);
    // the command reads a moment after the lock is held
    eventually("it is stopped", || {
        terminal.types("jobs\n");
        thread::sleep(Duration::from_millis(50));
        terminal.has_shown("Stopped")
    });
    terminal.types("fg\n");
    terminal.shows("exec l");
    terminal.types("one\n");
    terminal.shows("read-one\n");
}

/// The lock was not renewed during the stop, so the command must not do anything more.
#[test]
fn a_job_resumed_after_its_lease_is_killed_before_it_acts() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l --lease 1s -c 'echo rea''dy; read x; echo > ran'\n"
    ));
    terminal.shows("ready\n");
    terminal.types("\x1a");
    terminal.shows("Stopped");
    eventually("the lease is over", || world.code(&["who", "l"]) == 1);
    terminal.types("fg\n");
    terminal.shows("the lease had ended when nestlock resumed");
    terminal.types("echo code-$?\n");
    terminal.shows("code-76\n");
    assert!(!world.exists("ran"));
}

/// A pager, for example, belongs to the same job, and needs the terminal for itself.
#[test]
fn the_others_of_a_pipeline_have_the_terminal() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    let reader = format!(
        "({}; echo rea''dy; read x < /dev/tty; echo read-$x; cat > /dev/null)",
        until("begun")
    );
    terminal.types(&format!(
        "{NESTLOCK} exec l -c 'echo > begun; exec sleep 1000' | {reader}; echo then-$?\n"
    ));
    terminal.shows("ready\n");
    terminal.types("one\n");
    terminal.shows("read-one\n");
    // Control-C, for the whole job
    terminal.types("\x03");
    eventually("it is free", || world.code(&["who", "l"]) == 1);
}

/// As ssh, sudo and gpg read a password, although standard input is not the terminal.
#[test]
fn a_command_may_read_the_terminal_and_not_stdin() {
    let world = World::new();
    for how in ["{} < /dev/null", "echo x | {}"] {
        let mut terminal = Terminal::open(&world);
        let exec = format!("{NESTLOCK} exec l -c 'echo rea''dy; read x < /dev/tty; echo read-$x'");
        terminal.types(&format!(
            "{}; read y; echo then-$y\n",
            how.replace("{}", &exec)
        ));
        terminal.shows("ready\n");
        terminal.types("one\n");
        terminal.shows("read-one\n");
        terminal.types("two\n");
        terminal.shows("then-two\n");
    }
}

/// The command has the terminal, and the script is in nestlock's process group: control keys reach
/// all of them.
#[test]
fn control_z_and_control_c_are_for_a_whole_script() {
    let world = World::new();
    let begun = |n: u8| format!("{NESTLOCK} exec l --lease 60s -c 'echo begun-{n}; read x'\n");
    fs::write(world.path("script"), [begun(1), begun(2)].concat()).unwrap();
    let mut terminal = Terminal::open(&world);
    terminal.types("bash ./script\n");
    terminal.shows("begun-1\n");
    terminal.types("\x1a");
    terminal.shows("Stopped");
    terminal.types("fg\n");
    terminal.shows("bash ./script\n");
    terminal.types("\x03");
    // input that is typed before the prompt is lost
    terminal.shows("$ ");
    terminal.types("echo code-$?\n");
    terminal.shows("code-130\n");
    assert!(!terminal.has_shown("begun-2"));
    assert_eq!(world.code(&["who", "l"]), 1);
}

/// The kernel truncates the process name in the middle of a character, so it is not valid UTF-8.
#[test]
fn a_command_with_a_name_that_is_no_text_stops_as_well() {
    let world = World::new();
    let sleep = Command::new("sh")
        .args(["-c", "command -v sleep"])
        .output()
        .unwrap()
        .stdout;
    world.copy(
        String::from_utf8(sleep).unwrap().trim(),
        "aaaaaaaaaaaaaa\u{e9}",
    );
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l --lease 60s -c 'echo $$ > pid; exec ./aaaaaaaaaaaaaa* 1000'\n"
    ));
    let pid = world.pid("pid");
    let name = || fs::read(format!("/proc/{pid}/comm")).unwrap();
    eventually("it has its name", || name().starts_with(b"aaaa"));
    terminal.types("\x1a");
    terminal.shows("Stopped");
}

/// The script is killed, and the shell has the terminal: nestlock does not take it when the command
/// ends.
#[test]
fn a_terminal_that_was_taken_meanwhile_is_not_taken_back() {
    let world = World::new();
    let exec = format!("{NESTLOCK} exec l -c 'echo > begun; {}'", until("go"));
    fs::write(
        world.path("script"),
        format!("echo $$ > pid\n{exec}\ntrue\n"),
    )
    .unwrap();
    let mut terminal = Terminal::open(&world);
    terminal.types("sh ./script\n");
    world.text("begun");
    kill(Pid::from_raw(world.pid("pid")), Signal::SIGKILL).unwrap();
    terminal.shows("Killed");
    world.make("go");
    eventually("it is free", || world.code(&["who", "l"]) == 1);
    terminal.types("echo al''ive\n");
    terminal.shows("alive\n");
}

/// A stop signal that was forwarded long ago, and ignored, did not cause this stop: the whole job
/// stops.
#[test]
fn a_job_that_ignored_a_stop_stops_as_a_whole_later() {
    let world = World::new();
    let line = format!(
        "trap \"\" TSTP; trap \"echo > heard\" USR1; echo > begun; {}; kill -STOP $$",
        until("go")
    );
    fs::write(
        world.path("script"),
        format!("echo $$ > pid\n{NESTLOCK} exec l --lease 60s -c '{line}'\ntrue\n"),
    )
    .unwrap();
    let mut terminal = Terminal::open(&world);
    terminal.types("sh ./script\n");
    world.text("begun");
    let nestlock = child(world.pid("pid")).unwrap();
    kill(Pid::from_raw(nestlock), Signal::SIGTSTP).unwrap();
    // by the time that the second signal arrives, nestlock has forwarded the first one
    thread::sleep(Duration::from_millis(100));
    kill(Pid::from_raw(nestlock), Signal::SIGUSR1).unwrap();
    world.text("heard");
    // longer than the time within which a stop is due to a forwarded signal
    thread::sleep(Duration::from_millis(800));
    world.make("go");
    terminal.shows("Stopped");
}

/// As started by `ssh -t`: there is no shell that could resume a job.
#[test]
fn control_z_stops_nothing_where_nothing_lets_it_go_on() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    let exec = format!("exec {NESTLOCK} exec l --lease 2s -c 'echo ready; read x; echo read-$x'");
    fs::write(world.path("line"), exec).unwrap();
    terminal.types("script -qec 'sh ./line' /dev/null\n");
    terminal.shows("ready\n");
    // for the inner terminal, as the outer one is in raw mode
    terminal.types("\x1a");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        assert_eq!(
            world.code(&["who", "l"]),
            0,
            "lost after {:?}",
            start.elapsed()
        );
    }
    terminal.types("one\n");
    terminal.shows("read-one\n");
}

/// A process in a separate session is not stopped by Control-Z, and the lock is not renewed during
/// the stop.
#[test]
fn what_does_not_stop_with_its_job_ends_with_the_lease() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l --lease 24s -c 'setsid sh -c \"echo \\$\\$ > pid; exec sleep 1000\" & sleep 1000'\n"
    ));
    let pid = world.pid("pid");
    terminal.types("\x1a");
    terminal.shows("Stopped");
    ends_before_it_is_free(&world, pid);
    terminal.types("fg\n");
    terminal.types("echo code-$?\n");
    terminal.shows("code-76\n");
}

/// The terminal shows nothing until Control-Q.
#[test]
fn control_s_does_not_hold_up_the_end() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!(
        "{NESTLOCK} exec l --lease 3s -c 'echo $$ > pid; echo rea''dy; exec sleep 1000'\n"
    ));
    terminal.shows("ready\n");
    let pid = world.pid("pid");
    terminal.types("\x13");
    assert_eq!(world.code(&["force", "l"]), 0);
    eventually("it is ended", || !is_alive(pid));
    terminal.types("\x11");
    terminal.shows("ending the command");
}

// --- top ---

/// Leaves the alternate screen: the terminal is restored.
const RESTORED: &str = "\x1b[?1049l";

pub fn open_top(world: &Place, args: &str) -> Terminal {
    let mut terminal = Terminal::open(world);
    terminal.types(&format!(
        "stty rows 30 cols 120; {NESTLOCK} top {args}; echo code-$?\n"
    ));
    terminal
}

/// `top` shows the holders, frees a lock only after `y`, and restores the terminal when it quits.
#[test]
fn top_shows_holders_frees_on_a_yes_and_restores_the_terminal() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "order:7", "-c", &line], "held");
    let mut terminal = open_top(&world, "");
    terminal.draws("order:7");
    terminal.types("f");
    terminal.draws("Free order:7");
    terminal.types("n");
    terminal.draws("nothing was freed");
    assert_eq!(world.code(&["who", "order:7"]), 0);
    terminal.types("f");
    terminal.draws("Free order:7");
    terminal.types("y");
    terminal.draws("freed order:7");
    assert_eq!(world.code(&["who", "order:7"]), 1);
    terminal.types("q");
    terminal.shows(RESTORED);
    terminal.types("stty -a\n");
    terminal.shows(" icanon");
}

/// A read-only `top` frees nothing, and restores the terminal when it is terminated.
#[test]
fn a_read_only_top_frees_nothing_and_restores_the_terminal() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "order:7", "-c", &line], "held");
    let mut terminal = open_top(&world, "--read-only & pid=$!; fg");
    terminal.draws("order:7");
    terminal.types("fy");
    terminal.types("?");
    terminal.draws("quit");
    assert_eq!(world.code(&["who", "order:7"]), 0);
    let found = Command::new("pgrep")
        .args(["-f", &format!("{NESTLOCK} top --read-only")])
        .output()
        .unwrap();
    let pids = String::from_utf8(found.stdout).unwrap();
    // select the one that uses this test's server
    let address = format!("127.0.0.1:{}", world.server.addr().port());
    let ours = |pid: &&str| {
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environ).contains(&address)
    };
    let pid = pids.lines().rfind(ours).expect("it runs");
    assert!(
        Command::new("kill")
            .args(["-TERM", pid])
            .status()
            .unwrap()
            .success()
    );
    terminal.shows(RESTORED);
}

/// A program that ignores HUP is not notified of the terminal's end.
#[test]
fn top_ends_with_its_terminal() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "order:7", "-c", &line], "held");
    let mut terminal = Terminal::open(&world);
    let line = format!("sh -c 'echo $$ > pid; exec {NESTLOCK} top'; echo $? > code");
    fs::write(world.path("line"), line).unwrap();
    terminal.types("stty rows 30 cols 120; trap '' HUP; sh ./line\n");
    terminal.draws("order:7");
    // while a question is open, `top` does not draw: a draw would fail, and end it
    terminal.types("f");
    terminal.draws("Free order:7");
    let pid = world.pid("pid");
    drop(terminal);
    let begun = Instant::now();
    while is_alive(pid) {
        if begun.elapsed() > PATIENCE {
            let _ = Command::new("kill")
                .args(["-KILL", &pid.to_string()])
                .status();
            panic!("it goes on without a terminal");
        }
        thread::sleep(Duration::from_millis(10));
    }
    let code = || fs::read_to_string(world.path("code")).unwrap_or_default();
    eventually("its shell has its exit code", || code().ends_with('\n'));
    // 134 would be an abort, after a panic while writing to the terminal
    assert_eq!(code(), "0\n");
}

/// The user can quit although the server does not reply.
#[test]
fn top_is_left_though_the_server_hangs_or_is_gone() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "order:7", "--lease", "60s", "-c", &line], "held");
    let mut terminal = open_top(&world, "");
    terminal.draws("order:7");
    world.server.stop().unwrap();
    terminal.types("?");
    terminal.draws("invert the order");
    terminal.types("?q");
    terminal.shows("code-0");
    world.server.cont().unwrap();
    terminal.types(&format!("{NESTLOCK} top; echo code-$?\n"));
    terminal.draws("order:7");
    drop(world.server.kill());
    terminal.draws("this data is old; retrying");
    terminal.draws("order:7");
    terminal.types("q");
    terminal.shows("code-0");
}

/// The rules that `acl` prints are enough for `top`, and of two locks with one name it frees the
/// selected one.
#[test]
fn top_needs_no_more_than_what_acl_says() {
    let world = World::new();
    let acl = world.output(&["acl", "--for", "top", "--user", "some", "--json"]);
    let json = String::from_utf8(acl.stdout).unwrap();
    let list = |name: &str| -> Vec<String> {
        let rest = json
            .split_once(&format!("\"{name}\":["))
            .unwrap()
            .1
            .split_once(']')
            .unwrap()
            .0
            .to_owned();
        rest.split(',')
            .map(|word| word.trim_matches('"').to_owned())
            .collect()
    };
    let commands = list("commands")
        .into_iter()
        .map(|command| format!("+{command}"));
    let rules: Vec<String> = [list("keys"), list("channels"), commands.collect()].concat();
    let rules: Vec<&str> = rules.iter().map(|rule| &**rule).collect();
    assert_eq!(
        world.server_says(
            &[
                &["ACL", "SETUSER", "some", "reset", "on", ">pw"],
                &rules[..]
            ]
            .concat()
        ),
        "+OK\r\n"
    );
    for kind in ["fair", "signal"] {
        let line = format!("echo held > held-{kind}; {}", until("go"));
        let args = ["exec", "order:7", "--kind", kind, "-c", &line];
        std::mem::forget(world.begin(&args, &format!("held-{kind}")));
    }
    let mut terminal = Terminal::open(&world);
    let url = world.server.url().replace("redis://", "redis://some:pw@");
    terminal.types(&format!(
        "stty rows 30 cols 120; NESTLOCK_URL={url} {NESTLOCK} top; echo code-$?\n"
    ));
    // `top` knows the programs by the names of their connections
    terminal.draws("sh on ");
    terminal.draws("releases: 0/s");
    assert!(
        !terminal
            .screen
            .lock()
            .unwrap()
            .screen()
            .contents()
            .contains("may not")
    );
    terminal.types("jf");
    terminal.draws("Free order:7");
    terminal.types("y");
    terminal.draws("freed order:7");
    assert_eq!(
        (
            world.code(&["who", "order:7", "--kind", "fair"]),
            world.code(&["who", "order:7", "--kind", "signal"])
        ),
        (0, 1)
    );
    terminal.types("q");
    terminal.shows("code-0");
    assert_eq!(
        world.server_says(&["ACL", "LOG"]),
        "*0\r\n",
        "nothing was denied"
    );
    world.make("go");
}

#[test]
fn top_fits_into_a_small_terminal_and_colours_nothing_unasked() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    // a short TTL is shown in colour
    let _holder = world.begin(&["exec", "order:7", "--lease", "1s", "-c", &line], "held");
    let mut terminal = open_top(&world, "");
    terminal.draws("order:7");
    let coloured = |terminal: &Terminal| terminal.seen.lock().unwrap().contains("38;5;3");
    eventually("it is coloured", || coloured(&terminal));
    terminal.types("q");
    terminal.shows(RESTORED);
    terminal.types(&format!(
        "stty rows 5 cols 20; NO_COLOR=1 {NESTLOCK} top; echo code-$?\n"
    ));
    // the selection is still visible
    terminal.draws("order:7");
    eventually("it is selected", || {
        terminal.seen.lock().unwrap().contains("\x1b[7morder:7")
    });
    assert!(!coloured(&terminal));
    terminal.types("?");
    terminal.draws("Keys");
    terminal.types("?f");
    terminal.draws("Free");
    terminal.types("nq");
    terminal.shows("code-0");
}

/// All keys are scanned only every 10 s; a lock that was released is read before that.
#[test]
fn top_hears_of_releases_and_says_when_it_does_not() {
    let world = World::new();
    let mut terminal = open_top(&world, "");
    terminal.draws("releases: 0/s");
    let began = Instant::now();
    assert_eq!(world.code(&["exec", "order:9", "--", "true"]), 0);
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "order:9", "-c", &line], "held");
    terminal.draws("order:9");
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "{:?}",
        began.elapsed()
    );
    terminal.types("q");
    terminal.shows("code-0");
    let rules = [
        "ACL",
        "SETUSER",
        "some",
        "reset",
        "on",
        ">pw",
        "~*",
        "+@all",
        "-psubscribe",
    ];
    assert_eq!(world.server_says(&rules), "+OK\r\n");
    let url = world.server.url().replace("redis://", "redis://some:pw@");
    terminal.types(&format!(
        "NESTLOCK_URL={url} {NESTLOCK} top; echo code-$?\n"
    ));
    terminal.draws("releases: -/s");
    terminal.draws("order:9");
    terminal.types("q");
    terminal.shows("code-0");
}
