//! `exec` in a terminal, which `script` makes.

use std::{
    io::{Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use crate::support::{PATIENCE, World, eventually};

/// A shell in a terminal of its own.
struct Terminal {
    shell: Child,
    keys: ChildStdin,
    seen: Arc<Mutex<String>>,
}

impl Terminal {
    fn open(world: &World) -> Self {
        let mut script = Command::new("script");
        script.args(["-qfec", "PS1='$ ' bash --norc --noediting -i", "/dev/null"]).current_dir(world.path(""));
        script.env("NESTLOCK_URL", world.server.url()).env("SHELL", "/bin/sh");
        let mut shell = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script, of bsdutils");
        let (keys, mut screen) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        let seen = Arc::new(Mutex::new(String::new()));
        let written = Arc::clone(&seen);
        thread::spawn(move || {
            let mut bytes = [0; 1024];
            while let Ok(length @ 1..) = screen.read(&mut bytes) {
                written.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..length]).replace('\r', ""));
            }
        });
        Self { shell, keys, seen }
    }

    fn types(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
    }

    /// Waits until this is to be seen, and wipes the screen.
    fn shows(&self, text: &str) {
        let start = Instant::now();
        while !self.seen.lock().unwrap().contains(text) {
            assert!(start.elapsed() < PATIENCE, "{text:?} is not shown: {:?}", self.seen.lock().unwrap());
            thread::sleep(Duration::from_millis(10));
        }
        self.seen.lock().unwrap().clear();
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
    terminal.types(&format!("{NESTLOCK} exec l -c 'echo rea''dy; read x; echo read-$x'; read y; echo then-$y\n"));
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

/// Stopped by Control-Z it is a job like others. In the foreground it goes on, if its lease is not over by then.
#[test]
fn control_z_stops_it_and_fg_lets_it_go_on() {
    let world = World::new();
    let mut terminal = Terminal::open(&world);
    terminal.types(&format!("{NESTLOCK} exec l --lease 60s -c 'echo rea''dy; read x; echo read-$x'\n"));
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
