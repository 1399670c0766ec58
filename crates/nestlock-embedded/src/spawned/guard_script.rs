//! The program of the guard: a text for any POSIX shell.

/// The parent process of the server: `sh -c GUARD sh FOLDER MAKE PROGRAM ARGS...`. Only this
/// process holds the other end of its stdin, a pipe, so the guard reads the end of file when this
/// process ends. Then it kills the server and removes the folder.
///
/// - Its stderr is a second pipe, which it passes to the server and then closes: it ends with the
///   server.
/// - It ignores SIGPIPE: a reply that is no longer read must not end it.
/// - `kill 0` also kills the processes that the server has forked: the process group is the guard's
///   own. Until then they may write to the folder, which makes `rm` fail: it is repeated.
pub(super) const GUARD: &str = r#"
folder=$1 make=$2 gone=
shift 2
kill_server() {
    if [ -n "$!" ] && [ -z "$gone" ]; then kill -KILL "$!"; wait "$!"; fi
    gone=yes
}
end() {
    trap '' HUP INT TERM
    kill_server
    n=0
    until rm -rf "$folder" || [ $n = 10 ]; do n=$((n + 1)); sleep 1; done
    kill -KILL 0
}
trap '' PIPE
trap end HUP INT TERM
umask 077
if [ "$make" = yes ]; then mkdir "$folder" || exit; fi
"$@" </dev/null >&2 &
exec 2>/dev/null
echo "pid $!"
while read -r word; do
    case $word in
    STOP | CONT) if [ -z "$gone" ] && kill "-$word" "$!"; then echo done; else echo gone; fi ;;
    KILL) kill_server; echo done ;;
    GONE) gone=yes ;;
    LEAVE) exit ;;
    esac
done
end
"#;

#[cfg(test)]
mod tests {
    use std::{
        io::ErrorKind,
        os::unix::process::CommandExt,
        path::Path,
        process::{Command, Stdio},
        thread,
        time::Instant,
    };

    use super::{
        super::{
            folder::new_folder,
            guard::{Guard, PATIENCE, PAUSE},
        },
        *,
    };

    /// Runs the guard in each installed shell, with a "server" that has a child process.
    #[test]
    fn any_shell_can_be_the_guard() {
        let mut shells = 0;
        for shell in [
            &["/bin/sh"] as &[&str],
            &["dash"],
            &["bash", "--posix"],
            &["busybox", "sh"],
        ] {
            for end in ["", "STOP\n", "KILL\n", "LEAVE\n"] {
                let folder = new_folder().unwrap();
                let mut command = Command::new(shell[0]);
                command
                    .args(&shell[1..])
                    .args(["-c", GUARD, "sh"])
                    .arg(&folder)
                    .arg("yes");
                command
                    .args([
                        "/bin/sh",
                        "-c",
                        "sleep 60 & echo $! >\"$0/new\"; mv \"$0/new\" \"$0/child\"; wait",
                    ])
                    .arg(&folder);
                command
                    .process_group(0)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                let Ok((mut guard, ended)) = Guard::spawn(command) else {
                    continue;
                };
                shells += 1;
                let what = format!("{shell:?} {end:?}");
                let line = guard.answer().unwrap();
                let pid = line
                    .strip_prefix("pid ")
                    .unwrap_or_else(|| panic!("{what}: {line:?}"));
                let child = read_soon(&folder.join("child"));
                let lives = |pid: &str| {
                    let state = Command::new("ps")
                        .args(["-o", "stat=", "-p", pid.trim()])
                        .output()
                        .unwrap();
                    let state = String::from_utf8_lossy(&state.stdout).into_owned();
                    !state.is_empty() && !state.starts_with('Z')
                };
                assert!(lives(pid) && lives(&child), "{what}");
                guard.order("STOP").unwrap();
                guard.order("CONT").unwrap();
                if end == "LEAVE\n" {
                    guard.order("KILL").unwrap();
                    assert!(!lives(pid), "{what}");
                    assert!(
                        guard.order("STOP").is_err() && guard.order("CONT").is_err(),
                        "{what}"
                    );
                    guard.leave();
                    assert!(folder.exists(), "{what}");
                    std::fs::remove_dir_all(&folder).unwrap();
                    assert!(
                        Command::new("kill")
                            .args(["-KILL", child.trim()])
                            .status()
                            .unwrap()
                            .success()
                    );
                } else {
                    if !end.is_empty() {
                        guard.order(end.trim()).unwrap();
                    }
                    drop(guard);
                    assert!(!folder.exists(), "{what}");
                    // the child has been killed, too: no process holds the pipe any more
                    ended
                        .recv_timeout(PATIENCE)
                        .unwrap_or_else(|_| panic!("{what}: the pipe is held"));
                    assert!(!lives(pid) && !lives(&child), "{what}");
                }
            }
        }
        assert!(shells >= 4, "{shells}");
    }

    /// A server holds its output until it ends. One that has closed it counts as gone, even if it
    /// is not, as here.
    #[test]
    fn what_is_gone_gets_no_signal() {
        let folder = new_folder().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", GUARD, "sh"]).arg(&folder).arg("yes");
        command
            .args(["/bin/sh", "-c", "exec >/dev/null 2>&1; exec sleep 60"])
            .process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (mut guard, ended) = Guard::spawn(command).unwrap();
        let line = guard.answer().unwrap();
        let pid = line.strip_prefix("pid ").unwrap();
        ended.recv_timeout(PATIENCE).unwrap();
        for order in ["STOP", "CONT"] {
            assert_eq!(guard.order(order).unwrap_err().kind(), ErrorKind::NotFound);
        }
        guard.order("KILL").unwrap();
        let lives = || {
            Command::new("kill")
                .args(["-0", pid])
                .stderr(Stdio::null())
                .status()
                .unwrap()
                .success()
        };
        assert!(lives());
        // the end of the guard kills its whole process group
        drop(guard);
        let start = Instant::now();
        while lives() && start.elapsed() < PATIENCE {
            thread::sleep(PAUSE);
        }
        // in some containers, no process reaps zombies
        let state = Command::new("ps")
            .args(["-o", "stat=", "-p", pid])
            .output()
            .unwrap();
        assert!(state.stdout.is_empty() || state.stdout.starts_with(b"Z"));
    }

    /// As a server that was killed while processes that it had forked saved its data.
    #[test]
    fn the_folder_goes_though_forks_still_write_to_it() {
        const WRITES: &str = "for of in a b c d; do \
             (n=0; while [ $n -lt 3000 ]; do n=$((n + 1)); : >\"$0/$of$n\" || exit; done) & \
             done; wait";
        for _ in 0..6 {
            let folder = new_folder().unwrap();
            let mut command = Command::new("/bin/sh");
            command.args(["-c", GUARD, "sh"]).arg(&folder).arg("yes");
            command.args(["/bin/sh", "-c", WRITES]).arg(&folder);
            command
                .process_group(0)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let (mut guard, _ended) = Guard::spawn(command).unwrap();
            assert!(guard.answer().unwrap().starts_with("pid "));
            read_soon(&folder.join("a9"));
            drop(guard);
            assert!(!folder.exists(), "{}", folder.display());
        }
    }

    fn read_soon(path: &Path) -> String {
        let start = Instant::now();
        loop {
            match std::fs::read_to_string(path) {
                Ok(text) => return text,
                Err(error) => assert!(start.elapsed() < PATIENCE, "{}: {error}", path.display()),
            }
            thread::sleep(PAUSE);
        }
    }
}
