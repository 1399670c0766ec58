//! `acl --for`: a tool needs every rule that is printed, and no others.

use std::{
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;

use crate::support::{Running, World, eventually, until};

const OWNER: &str = "0a1b2c3d-1111-4222-8333-444455556666:42";
const OTHER: &str = "0a1b2c3d-2222-4222-8333-444455556666:43";
const DEAD: &str = "0a1b2c3d-3333-4222-8333-444455556666:44";
const PREFIX: &str = "app:";

/// Returns the printed patterns and commands, as rules.
fn rules(world: &World, args: &[&str]) -> Vec<String> {
    let (_, json, _) = world.said(&[&["acl", "--prefix", PREFIX, "--json"], args].concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    let list = |name: &str, sign: &str| -> Vec<String> {
        json[name]
            .as_array()
            .unwrap()
            .iter()
            .map(|rule| format!("{sign}{}", rule.as_str().unwrap()))
            .collect()
    };
    [
        list("keys", ""),
        list("channels", ""),
        list("commands", "+"),
    ]
    .concat()
}

/// Creates a lock of each kind, held by [`OWNER`]. Returns the name of each, and the additional
/// arguments that select it.
fn locks_of_each_kind(world: &World) -> Vec<(String, Vec<String>)> {
    let mut all = Vec::new();
    let set_up = |words: &[&str]| assert!(!world.server_says(words).starts_with('-'), "{words:?}");
    let writer = format!("{OWNER}:write");
    for twin in ["", "2"] {
        let key = |kind: &str| format!("{PREFIX}{kind}{twin}");
        for (kind, fields) in [
            ("plain", &[OWNER, "2"][..]),
            ("fair", &[OWNER, "1"]),
            ("read", &["mode", "read", OWNER, "2", OTHER, "1"]),
            ("write", &["mode", "write", &writer, "1"]),
        ] {
            set_up(&[&["HSET", &key(kind)], fields].concat());
            set_up(&["PEXPIRE", &key(kind), "600000"]);
        }
        set_up(&[
            "SET",
            &format!("redisson_lock_token:{{{}}}", key("plain")),
            "7",
        ]);
        // one dead waiter, and one behind it
        for waiter in [DEAD, OTHER] {
            set_up(&[
                "RPUSH",
                &format!("redisson_lock_queue:{{{}}}", key("fair")),
                waiter,
            ]);
            set_up(&[
                "ZADD",
                &format!("redisson_lock_timeout:{{{}}}", key("fair")),
                "9e12",
                waiter,
            ]);
            let seen = if waiter == DEAD { "1" } else { "9e12" };
            set_up(&[
                "ZADD",
                &format!("nestlock_fair_seen:{{{}}}", key("fair")),
                seen,
                waiter,
            ]);
        }
        // more readers than a release examines
        for n in 0..18 {
            set_up(&["HSET", &key("read"), &format!("{DEAD}{n}"), "1"]);
        }
        for (owner, n, ttl) in [
            (OWNER, 1, "300000"),
            (OWNER, 2, "600000"),
            (OTHER, 1, "600000"),
        ] {
            let hold = format!("{{{}}}:{owner}:rwlock_timeout:{n}", key("read"));
            set_up(&["SET", &hold, "1", "PX", ttl]);
        }
        // a wake-up that no waiter has fetched
        set_up(&["RPUSH", &format!("lock-signal:{}", key("signal")), "1"]);
        set_up(&[
            "SET",
            &format!("lock:{}", key("signal")),
            OWNER,
            "PX",
            "600000",
        ]);
        set_up(&["SET", &key("string"), OWNER, "PX", "600000"]);
        for permit in [OWNER.to_owned(), format!("{OWNER} 2"), OTHER.to_owned()] {
            let leases = format!("{{{}}}:timeout", key("permits"));
            set_up(&["ZADD", &leases, "9e12", &permit]);
        }
        set_up(&["SET", &key("permits"), "2"]);
        let leases = format!("nestlock_semaphore_leases:{{{}}}", key("semaphore"));
        set_up(&["ZADD", &leases, "9e12", OWNER]);
        set_up(&["SET", &key("semaphore"), "2"]);
        let kinds = [
            "plain",
            "fair",
            "read",
            "write",
            "signal",
            "permits",
            "semaphore",
        ];
        for kind in kinds {
            all.push((format!("{kind}{twin}"), vec![]));
        }
        all.push((
            format!("string{twin}"),
            vec!["--kind".to_owned(), "string".to_owned()],
        ));
    }
    all
}

/// Returns the output and the effects of the tool, on locks of each kind.
fn outcome(world: &World, tool: &str, rules: &[&str]) -> Vec<String> {
    assert_eq!(world.server_says(&["FLUSHALL"]), "+OK\r\n");
    assert_eq!(world.server_says(&["SCRIPT", "FLUSH"]), "+OK\r\n");
    let locks = locks_of_each_kind(world);
    assert_eq!(
        world.server_says(&[&["ACL", "SETUSER", "some", "reset", "on", ">pw"], rules].concat()),
        "+OK\r\n"
    );
    assert_eq!(world.server_says(&["ACL", "LOG", "RESET"]), "+OK\r\n");
    let url = format!("redis://some:pw@{}", world.server.addr());
    let run = |args: &[&str]| {
        let output = world
            .nestlock(args)
            .env("NESTLOCK_URL", &url)
            .env("NESTLOCK_PREFIX", PREFIX)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8(bytes).unwrap())
            .concat();
        // times differ from run to run
        let text: String = text
            .chars()
            .filter(|letter| !letter.is_ascii_digit())
            .collect();
        format!("{args:?}: {:?} {text}", output.status.code())
    };
    let mut said: Vec<String> = match tool {
        "ls" => vec![run(&["ls", "--strings", "--json"])],
        "doctor" => vec![run(&["doctor"])],
        "bench" => vec![bench(world, &url)],
        _ => thread::scope(|scope| {
            let runs = locks.iter().map(|(name, more)| {
                scope.spawn(|| {
                    let more = more.iter().map(String::as_str);
                    let if_owner = ["--if-owner", OWNER]
                        .into_iter()
                        .filter(|_| tool == "force" && name.ends_with('2'));
                    run(&[tool, name]
                        .into_iter()
                        .chain(more)
                        .chain(if_owner)
                        .collect::<Vec<_>>())
                })
            });
            let runs: Vec<_> = runs.collect();
            runs.into_iter().map(|run| run.join().unwrap()).collect()
        }),
    };
    said.push(format!("denied: {}", is_denied(world)));
    said.push(world.server_says(&["DBSIZE"]));
    said
}

fn is_denied(world: &World) -> bool {
    world.server_says(&["ACL", "LOG"]) != "*0\r\n"
}

/// Returns how it ends. If a permission is missing, it may wait for locks that it could not
/// release, and is not awaited.
fn bench(world: &World, url: &str) -> String {
    let mut bench = world.nestlock(&[
        "bench", "--yes", "--rounds", "1", "--pairs", "1000", "--tasks", "4",
    ]);
    bench
        .env("NESTLOCK_URL", url)
        .env("NESTLOCK_PREFIX", PREFIX)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut bench = bench.spawn().unwrap();
    while bench.try_wait().unwrap().is_none() {
        if is_denied(world) {
            bench.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(10));
    }
    format!("{:?}", bench.wait().unwrap())
}

fn each_rule_is_needed(tool: &str) {
    let world = World::new();
    let rules = rules(&world, &["--for", tool]);
    let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    // on a busy machine the checks may exceed the doctor's time limit
    let is_whole = |said: &Vec<String>| !said.iter().any(|said| said.contains("too slowly"));
    let all = (0..10)
        .map(|_| outcome(&world, tool, &rules))
        .find(is_whole)
        .expect("it has the time that it needs");
    assert!(all.contains(&"denied: false".to_owned()), "{all:#?}");
    assert!(
        !all.iter()
            .any(|said| said.contains("may not") || said.contains("unknown ")),
        "{all:#?}"
    );
    let superfluous = |left_out: &&&str| {
        // sent 100 ms after the last waiter is gone: the tool may have exited by then
        if ["doctor", "bench"].contains(&tool) && **left_out == "+unsubscribe" {
            return false;
        }
        let others: Vec<&str> = rules
            .iter()
            .copied()
            .filter(|rule| rule != *left_out)
            .collect();
        outcome(&world, tool, &others) == all
    };
    let superfluous: Vec<&&str> = rules.iter().filter(superfluous).collect();
    assert!(superfluous.is_empty(), "{tool}: {superfluous:?}");
}

#[test]
fn to_list_takes_no_more_than_what_is_printed() {
    each_rule_is_needed("ls");
}

#[test]
fn to_see_who_holds_takes_no_more_than_what_is_printed() {
    each_rule_is_needed("who");
}

#[test]
fn to_free_takes_no_more_than_what_is_printed() {
    each_rule_is_needed("force");
}

#[test]
fn to_examine_takes_no_more_than_what_is_printed() {
    each_rule_is_needed("doctor");
}

#[test]
fn to_measure_takes_no_more_than_what_is_printed() {
    each_rule_is_needed("bench");
}

/// With `--notes` also the keys of notes; otherwise `exec --note` runs all the same.
#[test]
fn a_user_who_writes_notes_gets_their_rules() {
    let world = World::new();
    for (extra, written) in [(&[][..], false), (&["--notes"], true)] {
        let args = [&["--for", "exec", "--kinds", "reentrant"], extra].concat();
        let user = ["ACL", "SETUSER", "some", "reset", "on", ">pw"];
        let rules = rules(&world, &args);
        let rules: Vec<&str> = user
            .into_iter()
            .chain(rules.iter().map(String::as_str))
            .collect();
        assert_eq!(world.server_says(&rules), "+OK\r\n");
        let url = format!("redis://some:pw@{}", world.server.addr());
        let lock = format!("l{written}");
        let begun = format!("begun{written}");
        let line = format!("echo $NESTLOCK_OWNER > {begun}; {}", until("go"));
        let mut exec = world.nestlock(&[
            "--prefix", PREFIX, "exec", &lock, "--note", "n", "-c", &line,
        ]);
        exec.env("NESTLOCK_URL", &url);
        let running = Running::of(exec);
        let key = format!("nestlock_note:{{{PREFIX}{lock}}}:{}", world.text(&begun));
        let there = || world.server_says(&["EXISTS", &key]) == ":1\r\n";
        if written {
            eventually("the note is there", there);
        } else {
            eventually("it is denied", || is_denied(&world));
            assert!(!there());
        }
        world.make("go");
        assert_eq!(running.code(), Some(0));
        std::fs::remove_file(world.path("go")).unwrap();
    }
}

/// A user of one kind gets its rules, and `doctor` then tries no other kind.
#[test]
fn a_user_of_one_kind_is_examined_for_it() {
    let world = World::new();
    let rules = rules(&world, &["--for", "doctor", "--kinds", "fenced"]);
    let user = ["ACL", "SETUSER", "some", "reset", "on", ">pw"];
    let rules: Vec<&str> = user
        .into_iter()
        .chain(rules.iter().map(String::as_str))
        .collect();
    assert_eq!(world.server_says(&rules), "+OK\r\n");
    let url = format!("redis://some:pw@{}", world.server.addr());
    let examined = |kinds: &[&str]| {
        let args = [&["--prefix", PREFIX, "doctor", "--json"], kinds].concat();
        let output = world.nestlock(&args).env("NESTLOCK_URL", &url).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let rows = examined(&["--kinds", "fenced"]);
    assert!(rows.contains("acquired and released"), "{rows}");
    assert!(!rows.contains("messages") && !is_denied(&world), "{rows}");
    assert!(examined(&[]).contains("signal"));
    assert!(is_denied(&world), "other kinds need more");
    let (code, _, why) = world.said(&["doctor", "--kinds", "semaphore"]);
    assert!(
        code == Some(64) && why.contains("`permits`"),
        "{code:?} {why}"
    );
}

/// Of the tools, only `exec` waits for replicas, and none waits for the disk. `doctor` tries WAIT.
#[test]
fn what_waits_for_no_copies_gets_no_rule_to_wait() {
    let world = World::new();
    for tool in ["ls", "who", "top", "force", "bench", "exec"] {
        let rules = rules(&world, &["--for", tool, "--replicas", "--fsync"]);
        let waits: Vec<&String> = rules
            .iter()
            .filter(|rule| rule.starts_with("+wait"))
            .collect();
        assert_eq!(
            waits,
            if tool == "exec" {
                vec!["+wait"]
            } else {
                vec![]
            },
            "{tool}"
        );
    }
}

/// `top` does what `ls`, `who` and `force` do, and also subscribes to releases.
#[test]
fn to_watch_takes_what_it_takes_to_list_and_free() {
    let world = World::new();
    let of = |tool: &str| rules(&world, &["--for", tool]);
    let mut parts = [of("ls"), of("who"), of("force")].concat();
    parts.extend(["+psubscribe", "+publish"].map(str::to_owned));
    // a rule to write a key includes reading it
    let written = parts.clone();
    parts.retain(|rule| {
        rule.strip_prefix("%R")
            .is_none_or(|plain| !written.iter().any(|other| other == plain))
    });
    let sorted = |rules: Vec<String>| {
        rules
            .into_iter()
            .collect::<std::collections::BTreeSet<String>>()
    };
    assert_eq!(sorted(of("top")), sorted(parts));
}

/// A tool that only reads gets no rule to write, whatever the user may do otherwise.
#[test]
fn what_only_looks_gets_no_rule_to_write() {
    let world = World::new();
    for tool in ["ls", "who"] {
        let rules = rules(&world, &["--for", tool]);
        let writes = |rule: &&String| {
            rule.starts_with('~') || ["+eval", "+evalsha", "+set"].contains(&&***rule)
        };
        let writes: Vec<&String> = rules.iter().filter(writes).collect();
        assert!(writes.is_empty(), "{tool}: {writes:?}");
    }
    // also without a prefix, where one pattern is enough
    let (_, line, _) = world.said(&["acl", "--for", "ls"]);
    let words = Command::new("sh")
        .args(["-c", &format!("printf '%s\\n' {line}")])
        .output()
        .unwrap();
    let words = String::from_utf8(words.stdout).unwrap();
    assert!(
        words.lines().any(|word| word == "%R~*")
            && !words.lines().any(|word| word.starts_with('~')),
        "{words}"
    );
}
