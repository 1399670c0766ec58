//! `ls`, `doctor`, `acl`, `bench`, completions, the man page.

use std::{
    fs,
    io::{BufRead, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use crate::support::{PATIENCE, Running, World, eventually, far_away, relay};

const KINDS: [&str; 7] = [
    "reentrant",
    "fair",
    "fenced",
    "read",
    "write",
    "signal",
    "string",
];

/// Returns the line about a lock, split into words.
pub fn line_of<'t>(table: &'t str, name: &str) -> Vec<&'t str> {
    let line = table
        .lines()
        .find(|line| line.split_whitespace().next() == Some(name));
    line.unwrap_or_else(|| panic!("{name}: {table}"))
        .split_whitespace()
        .collect()
}

#[test]
fn locks_of_each_kind_are_listed_and_nothing_else() {
    let world = World::new();
    assert_eq!(world.said(&["ls"]), (Some(0), String::new(), String::new()));
    let _holders = KINDS.map(|kind| world.hold(&format!("app:{kind}"), kind));
    for data in [
        &["HSET", "data", "a", "1"][..],
        &["SET", "text", "x"],
        &["RPUSH", "list", "1"],
        &["HSET", "{o}:b", "mode", "x"],
    ] {
        assert!(!world.server_says(data).starts_with('-'));
    }
    let _waiter =
        Running::of(world.nestlock(&["exec", "app:fair", "--kind", "fair", "--", "true"]));
    let _listener = Running::of(world.nestlock(&["exec", "app:reentrant", "--", "true"]));
    eventually("both wait", || {
        let table = world.said(&["ls"]).1;
        line_of(&table, "app:fair")[5] == "1"
            && line_of(&table, "app:reentrant")[5..7] == ["1", "client"]
    });
    let (_, table, errors) = world.said(&["ls"]);
    let names: Vec<&str> = table
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().next().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "app:fair",
            "app:fenced",
            "app:read",
            "app:reentrant",
            "app:signal",
            "app:write"
        ]
    );
    assert_eq!(errors, "");
    for (kind, told) in [
        ("fair", "fair"),
        ("fenced", "fenced?"),
        ("read", "read"),
        ("write", "write"),
        ("signal", "signal"),
    ] {
        let line = line_of(&table, &format!("app:{kind}"));
        assert_eq!(
            (line[1], line[2]),
            (told, &*world.text(&format!("held-{kind}"))),
            "{table}"
        );
    }
    // the server has no list of the waiters of a signal lock
    assert_eq!(line_of(&table, "app:signal")[5], "-", "{table}");
    assert!(
        line_of(&table, "app:fenced")
            .last()
            .unwrap()
            .parse::<u64>()
            .unwrap()
            > 0
    );
    assert!(world.said(&["ls", "--strings"]).1.contains("app:string"));
    // names are printed without the prefix, and the server evaluates the pattern
    let (_, json, _) = world.said(&["ls", "f*", "--prefix", "app:", "--json"]);
    assert_eq!(json.lines().count(), 2, "{json}");
    assert!(
        json.contains("\"name\":\"fair\"")
            && json.contains("\"waiting_clients\":null,\"waiting_tasks\":1"),
        "{json}"
    );
}

/// The tokens of a name outlive its holds, so the current holder may have a plain lock.
#[test]
fn a_kind_that_the_record_does_not_tell_is_maybe() {
    let world = World::new();
    let _plain = world.hold("plain", "reentrant");
    assert_eq!(
        world.code(&["exec", "led", "--kind", "fenced", "--", "true"]),
        0
    );
    let line = format!("echo held > led; {}", crate::support::until("go"));
    let _led = world.begin(&["exec", "led", "-c", &line], "led");
    let last_token = world.server_says(&["GET", "redisson_lock_token:{led}"]);
    let last_token: u64 = last_token.lines().nth(1).unwrap().parse().unwrap();
    let json =
        |args: &[&str]| -> serde_json::Value { serde_json::from_str(&world.said(args).1).unwrap() };
    for command in ["ls", "who"] {
        let led = json(&[command, "led", "--json"]);
        assert_eq!(
            (led["kind"].as_str(), led["maybe"].as_str()),
            (Some("reentrant"), Some("fenced")),
            "{led}"
        );
        assert!(
            led["last_token"] == last_token && led["token"].is_null(),
            "{led}"
        );
        let plain = json(&[command, "plain", "--json"]);
        assert!(
            plain["kind"] == "reentrant"
                && plain["maybe"].is_null()
                && plain["last_token"].is_null(),
            "{plain}"
        );
    }
    assert_eq!(line_of(&world.said(&["ls"]).1, "led")[1], "fenced?");
}

/// Returns the lines of standard output as they arrive, so a test can wait for one with a timeout.
fn lines_of(program: &mut Child) -> Receiver<String> {
    let (written, lines) = channel();
    let output = BufReader::new(program.stdout.take().unwrap());
    thread::spawn(move || {
        output
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| written.send(line))
    });
    lines
}

#[test]
fn a_change_is_a_line() {
    let world = World::new();
    let mut watch = world
        .nestlock(&["ls", "--watch"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = lines_of(&mut watch);
    // `ls` rarely discovers new locks, but sees those that exist when it starts
    let holder = world.hold("l", "reentrant");
    let first = lines.recv_timeout(PATIENCE).unwrap();
    let owner = world.text("held-reentrant");
    assert!(
        (first.starts_with("+ l ") || first.starts_with("= l ")) && first.contains(&owner),
        "{first}"
    );
    world.make("go");
    assert_eq!(holder.code(), Some(0));
    assert!(lines.recv_timeout(PATIENCE).unwrap().starts_with("- l "));
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn each_change_of_holders_is_a_line() {
    let world = World::new();
    let mut watch = world
        .nestlock(&["who", "l", "--watch"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = lines_of(&mut watch);
    assert_eq!(lines.recv_timeout(PATIENCE).unwrap(), "-");
    let holder = world.hold("l", "reentrant");
    let line = lines.recv_timeout(PATIENCE).unwrap();
    assert!(
        line.starts_with(&format!("{} 1 ", world.text("held-reentrant"))) && line.contains(" sh "),
        "{line}"
    );
    world.make("go");
    assert_eq!(holder.code(), Some(0));
    assert_eq!(lines.recv_timeout(PATIENCE).unwrap(), "-");
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn too_many_keys_are_not_scanned_unasked() {
    let world = World::new();
    for n in 0..5 {
        world.server_says(&["SET", &format!("k{n}"), "x"]);
    }
    let (code, out, errors) = world.said(&["ls", "--max-keys", "4"]);
    assert!(
        code == Some(64) && out.is_empty() && errors.contains("there are 5 keys"),
        "{errors}"
    );
    for args in [
        &["ls", "--max-keys", "5"][..],
        &["ls", "*", "--max-keys", "4"],
        &["ls", "--max-keys", "4", "--prefix", "a"],
    ] {
        assert_eq!(world.code(args), 0, "{args:?}");
    }
}

/// A value that this user may not read is `-`, and a warning gives the reason.
#[test]
fn a_missing_permission_is_reported() {
    let world = World::new();
    let _holder = world.hold("l", "reentrant");
    let rules = ["ACL", "SETUSER", "some", "on", ">pw", "~*", "&*", "+@all"];
    let with = |denied: &str| {
        assert_eq!(
            world.server_says(&[&rules[..], &[denied]].concat()),
            "+OK\r\n"
        );
        let address = format!("redis://some:pw@{}", world.server.addr());
        let ask = |args: &[&str]| {
            let output = world
                .nestlock(args)
                .env("NESTLOCK_URL", &address)
                .output()
                .unwrap();
            (
                output.status.code(),
                String::from_utf8(output.stdout).unwrap(),
                String::from_utf8(output.stderr).unwrap(),
            )
        };
        (ask(&["ls"]), ask(&["who", "l"]), ask(&["doctor"]))
    };
    let ((_, table, errors), ..) = with("-pubsub");
    assert_eq!(line_of(&table, "l")[5], "-", "{table}");
    assert!(
        errors.contains("+pubsub|numsub") && !errors.contains("pw"),
        "{errors}"
    );
    let (_, (code, who, errors), _) = with("-client");
    assert!(
        code == Some(0) && who.trim_end().ends_with("- - - -") && errors.contains("+client|list"),
        "{who} {errors}"
    );
    let (.., (code, rows, _)) = with("-config");
    assert!(
        code == Some(1) && rows.contains("unknown") && rows.contains("+config|get"),
        "{rows}"
    );
    let ((code, _, errors), ..) = with("-scan");
    assert!(code == Some(125) && errors.contains("+scan"), "{errors}");
}

#[test]
fn a_server_is_examined_and_nothing_stays_on_it() {
    let world = World::new();
    let (code, rows, _) = world.said(&["doctor", "--prefix", "app:"]);
    // without an append-only file
    assert_eq!(code, Some(1), "{rows}");
    for row in [
        "ok       version",
        "warn     persistence",
        "ok       fair",
        "ok       write",
        "ok       messages",
    ] {
        assert!(rows.contains(row), "{row}: {rows}");
    }
    eventually("nothing stays", || {
        world.server_says(&["DBSIZE"]) == ":0\r\n"
    });
    world.server_says(&[
        "CONFIG",
        "SET",
        "appendonly",
        "yes",
        "appendfsync",
        "always",
    ]);
    let (code, rows, _) = world.said(&["doctor"]);
    assert_eq!(code, Some(0), "{rows}");
    world.server_says(&[
        "CONFIG",
        "SET",
        "maxmemory",
        "100mb",
        "maxmemory-policy",
        "allkeys-lru",
    ]);
    let (code, json, _) = world.said(&["doctor", "--json"]);
    let memory = json
        .lines()
        .find(|line| line.contains("\"what\":\"memory\""))
        .unwrap();
    assert!(
        code == Some(2) && memory.contains("\"verdict\":\"bad\"") && memory.contains("\"v\":1"),
        "{json}"
    );
    world.server_says(&["CONFIG", "SET", "maxmemory", "0", "replica-announce-ip", ""]);
    let nobody = world
        .nestlock(&["doctor"])
        .env("NESTLOCK_URL", "redis://u:secret@127.0.0.1:1")
        .output()
        .unwrap();
    let errors = String::from_utf8(nobody.stderr).unwrap();
    assert!(
        nobody.status.code() == Some(125) && !errors.contains("secret"),
        "{errors}"
    );
}

/// The servers of the guide's page on services: without what they lack, locks work, and the report
/// says what does not.
#[test]
fn a_service_is_examined_without_what_it_lacks() {
    let no_config = "unknown  min-replicas-to-write";
    let no_wait = "warn     replicas";
    let cases: [(&[&str], &[&str]); 8] = [
        // ElastiCache, MemoryDB, Azure
        (&["CONFIG"], &[no_config]),
        // Memorystore
        (&["CONFIG", "WAIT"], &[no_config, no_wait]),
        // Redis Cloud
        (&["ROLE", "SELECT", "ASKING", "WAIT"], &[no_wait]),
        // Upstash
        (&["INFO"], &["unknown  server"]),
        // Aiven
        (&["CONFIG", "CLUSTER"], &[no_config]),
        // Garnet
        (&["WAIT", "SSUBSCRIBE"], &[no_wait]),
        // servers that do not name their clients, or show no subscribers
        (&["CLIENT", "PUBSUB"], &[]),
        // proxies
        (&["SUBSCRIBE"], &["warn     messages"]),
    ];
    for (lacking, said) in cases {
        let renamed = lacking
            .iter()
            .flat_map(|command| ["--rename-command", command, ""]);
        let world = World::with(&renamed.collect::<Vec<_>>());
        let (code, rows, errors) = world.said(&["doctor"]);
        let all = format!("without {lacking:?}: {rows}{errors}");
        assert!(code == Some(1) && errors.is_empty(), "{all}");
        assert_eq!(rows.matches("acquired and released").count(), 9, "{all}");
        for row in [no_config, no_wait, "unknown  server", "warn     messages"] {
            assert_eq!(rows.contains(row), said.contains(&row), "{row}; {all}");
        }
    }
    // Twemproxy, and a service that is set to RESP2
    let world = World::with(&["--rename-command", "HELLO", ""]);
    let (code, rows, _) = world.said(&["doctor"]);
    assert!(code == Some(2) && rows.contains("HELLO 3"), "{rows}");
}

/// A missing command is one problem, whatever does not work without it.
#[test]
fn a_command_that_the_server_lacks_is_bad_once() {
    for command in ["EVAL", "EVALSHA", "PEXPIRE", "PUBLISH", "TIME"] {
        let world = World::with(&["--rename-command", command, ""]);
        let (code, rows, errors) = world.said(&["doctor"]);
        let bad: Vec<&str> = rows.lines().filter(|row| row.starts_with("bad")).collect();
        assert!(
            code == Some(2) && bad.len() == 1,
            "without {command}: {rows}{errors}"
        );
        assert!(bad[0].contains(command), "without {command}: {rows}");
        assert!(!rows.contains("unknown  "), "without {command}: {rows}");
    }
}

/// The commands that send more requests than the library.
const LOOKS: [&[&str]; 8] = [
    &["ls"],
    &["who", "l"],
    &["force", "l"],
    &["release", "l", "--owner", "o"],
    &["extend", "l", "9s", "--owner", "o"],
    &["doctor"],
    &["acl", "--for-server"],
    &["bench", "--pairs", "1000", "--rounds", "1", "--yes"],
];

/// A server quotes the arguments of a command that it does not know, including a password. nestlock
/// does not show a reply to a login.
#[test]
fn no_command_shows_a_password_that_a_server_quotes() {
    let world = World::with(&["--rename-command", "AUTH", ""]);
    world.server_says(&["CONFIG", "SET", "requirepass", "S3CR3T"]);
    let proxy = relay(
        TcpListener::bind("127.0.0.1:0").unwrap(),
        world.server.addr(),
        |request| {
            let is_login = request.windows(4).any(|word| word == b"AUTH")
                && !request.windows(5).any(|word| word == b"HELLO");
            is_login.then_some("-ERR do you mean S3CR3T?\r\n")
        },
    );
    for (address, words) in [(world.server.addr(), "AUTH"), (proxy, "not shown")] {
        let url = format!("redis://:S3CR3T@{address}");
        for args in LOOKS {
            let output = world
                .nestlock(args)
                .env("NESTLOCK_URL", &url)
                .output()
                .unwrap();
            let said = [output.stdout, output.stderr]
                .map(|bytes| String::from_utf8(bytes).unwrap())
                .concat();
            assert!(
                said.contains(words) && !said.contains("S3CR3T"),
                "{args:?}: {said}"
            );
        }
    }
}

/// An address that never replies costs a moment, and not the whole connect timeout.
#[cfg(target_os = "linux")]
#[test]
fn a_dead_address_of_a_name_does_not_delay() {
    let world = World::new();
    // both addresses have one port; the first one that the resolver returns accepts no connections
    let hole = TcpListener::bind("127.0.0.1:0").unwrap();
    let dead = hole.local_addr().unwrap();
    let port = dead.port();
    let alive = relay(
        TcpListener::bind(("127.0.0.2", port)).unwrap(),
        world.server.addr(),
        |_| None,
    );
    let mut queue = Vec::new();
    while let Ok(taken) = TcpStream::connect_timeout(&dead, Duration::from_millis(300)) {
        queue.push(taken);
    }
    fs::write(
        world.path("hosts"),
        format!(
            "{} nestlock.test\n{} nestlock.test\n",
            dead.ip(),
            alive.ip()
        ),
    )
    .unwrap();
    let inside = |line: &str, args: &[&str]| {
        let line = format!("mount --bind hosts /etc/hosts && exec {line}");
        let shell = ["-m", "sh", "-c", &line, env!("CARGO_BIN_EXE_nestlock")];
        world
            .program("unshare", &[&shell[..], args].concat())
            .output()
            .unwrap()
    };
    let named = inside("getent ahosts nestlock.test", &[]);
    if !named.status.success() {
        eprintln!(
            "skipped: names take a mount of one's own, {}",
            String::from_utf8_lossy(&named.stderr)
        );
        return;
    }
    assert!(
        named.stdout.starts_with(b"127.0.0.1 "),
        "{}",
        String::from_utf8_lossy(&named.stdout)
    );
    let url = format!("redis://nestlock.test:{port}");
    for args in LOOKS {
        let output = inside("\"$0\" \"$@\"", &[args, &["--url", &url]].concat());
        let said = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8(bytes).unwrap())
            .concat();
        let code = output.status.code();
        assert!(
            matches!(code, Some(0 | 1)) && !said.contains("connect"),
            "{args:?}: {code:?} {said}"
        );
    }
}

/// This is a failure of nestlock, not wrong usage.
#[test]
fn without_file_descriptors_the_exit_code_is_125() {
    let world = World::new();
    let (file, authority) = (world.path("url"), world.path("ca.pem"));
    fs::write(&file, world.url()).unwrap();
    fs::write(&authority, "no certificate").unwrap();
    let (file, authority) = (file.to_str().unwrap(), authority.to_str().unwrap());
    let mut said = String::new();
    for limit in 3..24 {
        let line = format!(r#"ulimit -n {limit}; exec "$0" "$@""#);
        let run = |args: &[&str]| {
            let mut shell =
                world.program("/bin/sh", &["-c", &line, env!("CARGO_BIN_EXE_nestlock")]);
            let output = shell
                .args(args)
                .env_remove("NESTLOCK_URL")
                .output()
                .unwrap();
            (
                output.status.code(),
                String::from_utf8_lossy(&output.stderr).into_owned(),
            )
        };
        let (code, errors) = run(&["who", "l", "--url-file", file]);
        // the lock is free, or the program cannot be loaded
        assert!(
            matches!(code, Some(1 | 125 | 127)),
            "{limit}: {code:?} {errors}"
        );
        said += &errors;
        let (code, errors) = run(&[
            "who",
            "l",
            "--url",
            "rediss://127.0.0.1:1",
            "--tls-ca",
            authority,
        ]);
        let is_need = errors.contains("open files") || code == Some(127);
        assert!(is_need == (code != Some(64)), "{limit}: {code:?} {errors}");
        said += &errors;
    }
    assert!(
        said.contains("ulimit -n")
            && said.contains("--url-file cannot be read: Too many open files"),
        "{said}"
    );
    assert!(!said.contains("panicked"), "{said}");
}

/// The rules that `acl` prints are enough for each tool, when a shell parses them.
#[test]
fn the_rules_that_are_printed_are_enough() {
    let world = World::new();
    for (tool, kinds) in [
        ("exec", "fair,read"),
        ("doctor", ""),
        ("ls", ""),
        ("who", ""),
        ("force", ""),
        ("bench", ""),
    ] {
        let mut args = vec![
            "acl", "--prefix", "app:", "--for", tool, "--user", "some one",
        ];
        if !kinds.is_empty() {
            args.extend(["--kinds", kinds]);
        }
        let (_, line, _) = world.said(&args);
        assert!(!line.contains("+@all"));
        let shell = format!(
            "set -- {}; for word; do printf '%s\\n' \"$word\"; done",
            line.trim()
        );
        let words = Command::new("sh").args(["-c", &shell]).output().unwrap();
        let words = String::from_utf8(words.stdout)
            .unwrap()
            .replace(">PASSWORD", ">pw")
            .replace("some one", "some");
        let words: Vec<&str> = words.lines().collect();
        assert_eq!(
            world.server_says(&[&words[..], &["reset"], &words[3..]].concat()),
            "+OK\r\n",
            "{words:?}"
        );
        let address = format!("redis://some:pw@{}", world.server.addr());
        let run = |args: &[&str]| {
            let output = world
                .nestlock(args)
                .env("NESTLOCK_URL", &address)
                .env("NESTLOCK_PREFIX", "app:")
                .output()
                .unwrap();
            (
                output.status.code(),
                [output.stdout, output.stderr]
                    .map(|bytes| String::from_utf8(bytes).unwrap())
                    .concat(),
            )
        };
        match tool {
            "exec" => {
                for kind in ["fair", "read", "write", "reentrant"] {
                    assert_eq!(
                        run(&["exec", "l", "--kind", kind, "--", "true"]),
                        (Some(0), String::new()),
                        "{kind}"
                    );
                }
            }
            "doctor" => {
                let (code, rows) = run(&["doctor"]);
                assert!(
                    code == Some(1) && !rows.contains("unknown") && !rows.contains("bad"),
                    "{rows}"
                );
            }
            "ls" => assert_eq!(run(&["ls"]), (Some(0), String::new())),
            "bench" => assert_eq!(
                run(&["bench", "--pairs", "1000", "--rounds", "1", "--yes"]).0,
                Some(0)
            ),
            "who" => assert_eq!(run(&["who", "l"]).0, Some(1)),
            _ => assert_eq!(run(&["force", "l"]), (Some(1), String::new())),
        }
        assert_eq!(
            world.server_says(&["ACL", "LOG"]),
            "*0\r\n",
            "{tool}: nothing was denied"
        );
    }
    // the rules do not cover other names
    let (_, json, _) = world.said(&["acl", "--prefix", "app:", "--json", "--kinds", "signal"]);
    assert!(
        json.contains("\"~lock:app:*\"") && !json.contains("zadd"),
        "{json}"
    );
}

#[test]
fn a_measurement_says_what_it_sends_and_leaves_nothing() {
    let world = World::new();
    let (code, figures, errors) = world.said(&[
        "bench", "--pairs", "1000", "--rounds", "1", "--tasks", "4", "--yes",
    ]);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("about 8000 commands"), "{errors}");
    assert!(
        figures
            .lines()
            .nth(2)
            .is_some_and(|line| line.starts_with("hand-over") && line.contains(" x "))
            && figures.contains("lock and unlock")
            && figures.contains("p99")
            && figures.contains("1000 samples"),
        "{figures}"
    );
    eventually("nothing stays", || {
        world.server_says(&["DBSIZE"]) == ":0\r\n"
    });
    // another client uses the server
    let _holder = world.hold("l", "reentrant");
    let (code, figures, errors) = world.said(&["bench"]);
    assert!(
        code == Some(64) && figures.is_empty() && errors.contains("--yes"),
        "{errors}"
    );
}

#[test]
fn shells_and_man_know_each_command() {
    let world = World::new();
    let (_, bash, _) = world.said(&["completions", "bash"]);
    let (_, man, _) = world.said(&["man"]);
    for command in [
        "exec", "ls", "top", "who", "force", "release", "extend", "doctor", "acl", "bench",
    ] {
        assert!(
            bash.contains(command)
                && man.contains(&format!(".SH NESTLOCK {}", command.to_uppercase())),
            "{command}"
        );
    }
    assert!(
        Command::new("bash")
            .args(["-nc", &bash])
            .status()
            .unwrap()
            .success()
    );
    let top = world.output(&["top"]);
    let errors = String::from_utf8(top.stderr).unwrap();
    assert!(
        top.status.code() == Some(64) && errors.contains("ls --watch"),
        "{errors}"
    );
}

/// With 120 ms in each direction, everything is slower, and works as well.
#[test]
fn a_server_that_is_far_away_is_used_as_any_other() {
    let world = World::new();
    let url = far_away(&world, Duration::from_millis(120));
    let far = |args: &[&str]| {
        let output = world
            .nestlock(args)
            .env("NESTLOCK_URL", &url)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    let (code, rows, errors) = far(&["doctor"]);
    assert!(
        code == Some(1)
            && rows.contains("warn     round trip")
            && rows.contains("ok       messages"),
        "{rows} {errors}"
    );
    for kind in KINDS {
        assert!(rows.contains(&format!("ok       {kind}")), "{kind}: {rows}");
    }
    eventually("nothing stays", || {
        world.server_says(&["DBSIZE"]) == ":0\r\n"
    });
    let _holder = world.hold("l", "reentrant");
    assert_eq!(far(&["exec", "l", "-n", "--", "true"]).0, Some(75));
    let (_, table, _) = far(&["ls"]);
    assert_eq!(line_of(&table, "l")[2], world.text("held-reentrant"));
    // without a renewal, the grace would begin after 4 s
    assert_eq!(
        far(&["exec", "m", "--lease", "6s", "--", "sleep", "5"]),
        (Some(0), String::new(), String::new())
    );
}

/// No command hangs, and none reports what it has not read.
#[test]
fn a_server_that_hangs_is_given_up() {
    let world = &World::new();
    world.server.stop().unwrap();
    let run = |args: &[&str]| {
        let start = Instant::now();
        let (code, out, errors) = world.said(args);
        assert!(
            code == Some(125) && out.is_empty() && errors.contains("cannot connect"),
            "{args:?}: {errors}"
        );
        assert!(
            start.elapsed() < Duration::from_secs(8),
            "{args:?}: {:?}",
            start.elapsed()
        );
    };
    thread::scope(|scope| {
        for args in [
            &["ls"][..],
            &["who", "l"],
            &["force", "l"],
            &["doctor"],
            &["exec", "l", "--", "true"],
            &["bench", "--yes"],
        ] {
            scope.spawn(move || run(args));
        }
    });
    world.server.cont().unwrap();
}

/// Each command reports the missing permission, and `exec` does not start the command.
#[test]
fn a_user_without_permissions_gets_the_reason() {
    let world = World::new();
    assert_eq!(
        world.server_says(&[
            "ACL",
            "SETUSER",
            "nobody",
            "on",
            ">sesame",
            "resetkeys",
            "-@all"
        ]),
        "+OK\r\n"
    );
    let url = world
        .server
        .url()
        .replace("redis://", "redis://nobody:sesame@");
    for (args, code) in [
        (&["exec", "l", "--", "touch", "begun"][..], 125),
        (&["ls"], 125),
        (&["who", "l"], 125),
        (&["force", "l"], 125),
        (&["bench", "--yes"], 125),
        (&["doctor"], 2),
    ] {
        let output = world
            .nestlock(args)
            .env("NESTLOCK_URL", &url)
            .output()
            .unwrap();
        let told = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8(bytes).unwrap())
            .concat();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {told}");
        assert!(
            told.contains("permission") || told.contains("may not"),
            "{args:?}: {told}"
        );
        assert!(
            !told.contains("sesame") && !told.contains("panicked"),
            "{args:?}: {told}"
        );
    }
    assert!(!world.exists("begun"));
}

/// `--max-keys` also works if the user may not send DBSIZE.
#[test]
fn ls_counts_keys_while_it_scans_where_dbsize_is_denied() {
    let world = World::new();
    let fill = "for n = 1, 5000 do redis.call('set', 'k' .. n, 'x') end";
    assert!(!world.server_says(&["EVAL", fill, "0"]).starts_with('-'));
    world.server_says(&[
        "ACL", "SETUSER", "some", "on", ">pw", "~*", "&*", "+@all", "-dbsize",
    ]);
    let url = world.server.url().replace("redis://", "redis://some:pw@");
    let code = |most: &str| {
        world
            .nestlock(&["ls", "--max-keys", most])
            .env("NESTLOCK_URL", &url)
            .output()
            .unwrap()
            .status
            .code()
    };
    assert_eq!((code("2000"), code("100000")), (Some(64), Some(0)));
}

/// A full disk is an error, unlike a reader that has closed the pipe.
#[test]
#[cfg(target_os = "linux")]
fn an_output_that_cannot_be_written_is_an_error() {
    let world = World::new();
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = world.nestlock(&["man"]).stdout(full).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(125) && errors.contains("cannot write"),
        "{errors}"
    );
}

/// Holders of other libraries are recognized by their records: those of Redisson and
/// python-redis-lock.
#[test]
fn locks_of_other_libraries_are_listed() {
    let world = World::new();
    for record in [
        &[
            "HSET",
            "order",
            "0a1b2c3d-1111-4222-8333-444455556666:61",
            "2",
        ][..],
        &["SET", "lock:job", "k3yO0wNZ1DeF", "EX", "60"],
        &["PEXPIRE", "order", "60000"],
        &["SET", "redisson_lock_token:{order}", "x"],
    ] {
        assert!(!world.server_says(record).starts_with('-'));
    }
    let (_, table, _) = world.said(&["ls"]);
    let order = line_of(&table, "order");
    assert_eq!(
        (order[1], order[2], order[3]),
        ("reentrant", "0a1b2c3d-1111-4222-8333-444455556666:61", "2"),
        "{table}"
    );
    let job = line_of(&table, "job");
    assert_eq!(
        (job[1], job[2], job[5]),
        ("signal", "k3yO0wNZ1DeF", "-"),
        "{table}"
    );
    assert_eq!(world.code(&["exec", "order", "-n", "--", "true"]), 75);
    assert_eq!(
        world.code(&["exec", "job", "-n", "--kind", "signal", "--", "true"]),
        75
    );
}
