//! `who`, `force`, `release`, `extend`.

use std::process::Stdio;

use crate::support::{Running, World, eventually, until};

fn said(world: &World, args: &[&str]) -> (Option<i32>, String) {
    let output = world.output(args);
    (
        output.status.code(),
        String::from_utf8(output.stdout).unwrap(),
    )
}

#[test]
fn a_held_lock_is_reported_and_freed() {
    let world = World::new();
    assert_eq!(said(&world, &["who", "l"]), (Some(1), String::new()));
    assert_eq!(
        said(&world, &["who", "l", "--json"]),
        (Some(1), "{\"holders\":[],\"kind\":null,\"last_token\":null,\"maybe\":null,\"name\":\"l\",\"ttl_ms\":null,\"v\":1}\n".to_owned())
    );
    assert_eq!(said(&world, &["force", "l"]), (Some(1), String::new()));
    let line = format!("echo $NESTLOCK_OWNER > owner; {}", until("go"));
    let _holder = world.begin(&["exec", "l", "-c", &line], "owner");
    let owner = world.text("owner");
    let (code, told) = said(&world, &["who", "l"]);
    assert!(
        code == Some(0) && told.starts_with(&format!("{owner} 1 ")),
        "{told}"
    );
    // the program of the holder: the shell, on this machine
    let words: Vec<&str> = told.split_whitespace().collect();
    assert!(
        words[2].ends_with("ms") && words[3] == "sh" && words[5].parse::<u32>().is_ok(),
        "{told}"
    );
    let (_, told) = said(&world, &["who", "l", "--json"]);
    for part in [
        format!("\"owner\":\"{owner}\""),
        "\"application\":\"sh\"".into(),
        format!("\"process\":\"{}\"", words[5]),
    ] {
        assert!(told.contains(&part), "{part}: {told}");
    }

    let nobody = "11111111-2222-3333-4444-555555555555:1";
    for args in [
        &["release", "l", "--owner", nobody][..],
        &["extend", "l", "1m", "--owner", nobody],
    ] {
        assert_eq!(said(&world, args), (Some(1), String::new()), "{args:?}");
    }
    assert_eq!(
        said(&world, &["force", "l", "--if-owner", nobody]),
        (Some(1), String::new())
    );
    assert_eq!(world.code(&["who", "l"]), 0, "it is as it was");
    assert_eq!(
        said(&world, &["extend", "l", "5m", "--owner", &owner]),
        (Some(0), String::new())
    );
    let ttl = said(&world, &["who", "l"]).1;
    assert!(
        ttl.split(' ')
            .nth(2)
            .unwrap()
            .trim_end_matches("ms")
            .parse::<u64>()
            .unwrap()
            > 200_000,
        "{ttl}"
    );
    let (code, freed) = said(&world, &["force", "l", "--if-owner", &owner]);
    assert!(
        code == Some(0)
            && freed.starts_with(&format!("freed l {owner} 1 "))
            && freed.ends_with("ms\n"),
        "{freed}"
    );
    assert_eq!(world.code(&["who", "l"]), 1);
}

#[test]
fn a_lock_of_another_kind_is_reported_and_left_alone() {
    let world = World::new();
    assert_eq!(world.server_says(&["SET", "l", "text"]), "+OK\r\n");
    assert_eq!(said(&world, &["force", "l"]).0, Some(125));
    assert_eq!(world.server_says(&["GET", "l"]), "$4\r\ntext\r\n");
}

/// As in `nestlock who l | true`: no message, and no panic.
#[test]
fn a_reader_may_close_the_pipe_early() {
    let world = World::new();
    let line = format!("echo held > held; {}", until("go"));
    let _holder = world.begin(&["exec", "l", "-c", &line], "held");
    let mut who = world
        .nestlock(&["who", "l"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(who.stdout.take());
    let output = who.wait_with_output().unwrap();
    assert_eq!(
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap()
        ),
        (Some(141), String::new())
    );
}

fn hold(world: &World, kind: &str) -> Running {
    let line = format!("echo $NESTLOCK_OWNER > held-{kind}; {}", until("go"));
    world.begin(
        &["exec", "l", "--kind", kind, "-c", &line],
        &format!("held-{kind}"),
    )
}

/// Without `--kind`, the kind is read from the record.
#[test]
fn the_kind_is_what_the_record_says() {
    let kinds = [
        ("write", "write"),
        ("read", "read"),
        ("signal", "signal"),
        ("fair", "reentrant"),
        ("fenced", "reentrant"),
    ];
    let look = |kind: &str, told: &str| {
        let world = World::new();
        let holder = hold(&world, kind);
        let owner = world.text(&format!("held-{kind}"));
        let (code, json) = said(&world, &["who", "l", "--json"]);
        assert!(
            code == Some(0) && json.contains(&format!("\"kind\":\"{told}\"")),
            "{kind}: {json}"
        );
        assert_eq!(
            said(&world, &["extend", "l", "5m", "--owner", &owner]).0,
            Some(0),
            "{kind}"
        );
        let (code, freed) = said(&world, &["force", "l"]);
        assert!(
            code == Some(0) && freed.starts_with(&format!("freed l {owner} 1 ")),
            "{kind}: {freed}"
        );
        assert_eq!(
            (world.code(&["who", "l"]), holder.code()),
            (1, Some(76)),
            "{kind}"
        );
    };
    // each holder notices the loss when its next renewal is due, after some 10 s
    std::thread::scope(|scope| {
        for (kind, told) in kinds {
            scope.spawn(move || look(kind, told));
        }
    });
}

/// The next waiter of a fair queue is notified, although `--kind` was not given.
#[test]
fn who_waits_for_a_fair_lock_hears_that_it_was_freed() {
    let world = World::new();
    let _holder = hold(&world, "fair");
    let waiter =
        Running::of(world.nestlock(&["exec", "l", "--kind", "fair", "--", "touch", "begun"]));
    eventually("it has a place", || {
        world.server_says(&["LLEN", "redisson_lock_queue:{l}"]) == ":1\r\n"
    });
    let (_, json) = said(&world, &["who", "l", "--json"]);
    assert!(json.contains("\"kind\":\"fair\""), "{json}");
    let head = world.server_says(&["LINDEX", "redisson_lock_queue:{l}", "0"]);
    let channel = format!(
        "redisson_lock__channel:{{l}}:{}",
        head.lines().nth(1).unwrap()
    );
    eventually("it listens", || {
        world
            .server_says(&["PUBSUB", "NUMSUB", &channel])
            .contains(":1")
    });
    assert_eq!(world.code(&["force", "l"]), 0);
    assert_eq!((waiter.code(), world.exists("begun")), (Some(0), true));
}

#[test]
fn of_two_locks_of_one_name_none_is_guessed() {
    let world = World::new();
    let (_one, _other) = (hold(&world, "reentrant"), hold(&world, "signal"));
    for args in [&["who", "l"][..], &["force", "l"]] {
        assert_eq!(said(&world, args), (Some(64), String::new()), "{args:?}");
    }
    let (_, table) = said(&world, &["ls"]);
    for kind in ["reentrant", "signal"] {
        assert!(
            table.contains(&world.text(&format!("held-{kind}"))),
            "{table}"
        );
        assert_eq!(
            said(&world, &["force", "l", "--kind", kind]).0,
            Some(0),
            "{kind}"
        );
    }
}

/// `--if-owner` frees the holds of that owner only.
#[test]
fn one_reader_is_freed_and_the_others_stay() {
    let world = World::new();
    let _first = hold(&world, "read");
    let line = format!("echo $NESTLOCK_OWNER > second; {}", until("go"));
    let _second = world.begin(&["exec", "l", "-s", "-c", &line], "second");
    let (first, second) = (world.text("held-read"), world.text("second"));
    assert_eq!(
        said(&world, &["force", "l", "--if-owner", &first]).0,
        Some(0)
    );
    let (_, who) = said(&world, &["who", "l"]);
    assert!(who.contains(&second) && !who.contains(&first), "{who}");
}

/// A record that another program wrote may contain any characters.
#[test]
fn what_others_wrote_moves_no_cursor() {
    let world = World::new();
    world.server_says(&["SET", "lock:l", "a\u{1b}[2Jb", "PX", "60000"]);
    for args in [&["who", "l"][..], &["ls"], &["force", "l"]] {
        let (code, told) = said(&world, args);
        assert!(
            code == Some(0) && told.contains("a\u{FFFD}[2Jb"),
            "{args:?}: {told:?}"
        );
    }
}
