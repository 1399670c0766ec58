//! Permits: `exec --permits`, and what the other commands show and change.

use serde_json::{Value, json};

use crate::{
    look::line_of,
    support::{Running, World, eventually, until},
};

/// Starts a holder of one of these permits, until the file `go` exists. Returns its owner, too.
fn holder(world: &World, permits: &str, number: u32) -> (Running, String) {
    let file = format!("held-{number}");
    let line = format!("echo $NESTLOCK_OWNER > {file}; {}", until("go"));
    let running = world.begin(&["exec", "jobs", "--permits", permits, "-c", &line], &file);
    let owner = world.text(&file);
    (running, owner)
}

/// Returns the line of `ls` about these permits.
fn told(world: &World) -> String {
    line_of(&world.said(&["ls"]).1, "jobs").join(" ")
}

/// Returns how many are taken, and how many there are.
fn holds(world: &World) -> String {
    let line = told(world);
    line.split(' ')
        .find(|word| word.contains('/'))
        .unwrap_or_default()
        .to_owned()
}

fn json(world: &World, args: &[&str]) -> Value {
    serde_json::from_str(&world.said(args).1).unwrap()
}

#[test]
fn as_many_commands_run_as_there_are_permits() {
    let world = World::new();
    let (one, first) = holder(&world, "2", 1);
    let (other, second) = holder(&world, "2", 2);
    assert_ne!(first, second);
    let busy = |permits| world.code(&["exec", "jobs", "--permits", permits, "-n", "--", "true"]);
    assert_eq!(busy("2"), 75);
    // a waiter runs as soon as a holder has ended
    let waiter = Running::of(world.nestlock(&["exec", "jobs", "--permits", "2", "--", "true"]));
    eventually("it waits", || told(&world).ends_with("1 client -"));
    world.make("go");
    assert_eq!(
        (one.code(), other.code(), waiter.code()),
        (Some(0), Some(0), Some(0))
    );
    assert_eq!(world.said(&["ls"]).1, "");
}

/// Those that wait with `--fair` run in the order in which they came, one after the other.
#[test]
fn fair_commands_run_in_the_order_they_came() {
    let world = World::new();
    let held = world.begin(
        &[
            "exec",
            "jobs",
            "--permits",
            "1",
            "-c",
            &format!("echo 1 > held; {}", until("go")),
        ],
        "held",
    );
    let waits = |number: usize| {
        let line = format!("echo {number} >> order");
        let args = ["exec", "jobs", "--permits", "1", "--fair", "-c", &line];
        let running = Running::of(world.nestlock(&args));
        eventually("it is in the queue", || {
            world.server_says(&["ZCARD", "nestlock_permits_queue:{jobs}"])
                == format!(":{number}\r\n")
        });
        running
    };
    let waiters: Vec<_> = (1..=4).map(waits).collect();
    world.make("go");
    assert_eq!(held.code(), Some(0));
    for waiter in waiters {
        assert_eq!(waiter.code(), Some(0));
    }
    assert_eq!(world.text("order"), "1\n2\n3\n4");
}

/// The number on the server would otherwise be that of the first `exec` for ever.
#[test]
fn the_last_exec_says_how_many_permits_there_are() {
    let world = World::new();
    let _one = holder(&world, "1", 1);
    let _other = holder(&world, "2", 2);
    assert_eq!(holds(&world), "2/2");
    let code = |permits| world.code(&["exec", "jobs", "--permits", permits, "-n", "--", "true"]);
    // fewer than are taken: the holders keep theirs
    assert_eq!(code("1"), 75);
    assert_eq!(holds(&world), "2/1");
    assert_eq!(code("3"), 0);
}

#[test]
fn below_another_exec_it_shares_the_permit() {
    let world = World::new();
    let inner = format!(
        "{} exec jobs --permits 1 -n -c 'echo $NESTLOCK_DEPTH $NESTLOCK_KIND $NESTLOCK_OWNER > inner'; \
         echo $NESTLOCK_OWNER > outer",
        env!("CARGO_BIN_EXE_nestlock")
    );
    assert_eq!(
        world.code(&["exec", "jobs", "--permits", "1", "-c", &inner]),
        0
    );
    let outer = world.text("outer");
    assert_eq!(world.text("inner"), format!("2 permits {outer}"));
}

#[test]
fn what_makes_no_sense_with_permits_is_refused() {
    let world = World::new();
    for (args, told) in [
        (&["--permits", "0"][..], "0 is not in 1.."),
        (&["--permits", "-1"], "unexpected argument"),
        (&["--permits", "2147483648"], "is not in 1.."),
        (&["--permits", "2", "--kind", "fair"], "cannot be used with"),
        (&["--permits", "2", "--shared"], "cannot be used with"),
        (&["--fair"], "required arguments were not provided"),
        (
            &["--kind", "permits"],
            "say how many there are: --permits NUMBER",
        ),
    ] {
        let all = [&["exec", "jobs"], args, &["--", "touch", "ran"]].concat();
        let (code, _, errors) = world.said(&all);
        assert!(
            code == Some(64) && errors.contains(told),
            "{args:?}: {errors}"
        );
    }
    assert!(!world.exists("ran"));
    assert_eq!(world.server_says(&["DBSIZE"]), ":0\r\n");
    let _lock = world.hold("l", "reentrant");
    let (code, _, errors) = world.said(&["exec", "l", "--permits", "2", "--", "true"]);
    assert!(
        code == Some(125) && errors.contains("another type"),
        "{errors}"
    );
}

#[test]
fn holders_of_permits_are_shown() {
    let world = World::new();
    let (_one, first) = holder(&world, "3", 1);
    let (_other, second) = holder(&world, "3", 2);
    // Redisson's are random bytes; this one has expired
    let random = "0123456789abcdef";
    for (score, permit) in [("9e12", random), ("1", "fedcba9876543210")] {
        world.server_says(&["ZADD", "{jobs}:timeout", score, permit]);
    }
    // other data with such a key
    world.server_says(&["ZADD", "{data}:timeout", "9e12", "a member"]);
    world.server_says(&["ZADD", "data:timeout", "9e12", &first]);
    let hex = "30313233343536373839616263646566";
    let mut owners = [&first, &second, hex].map(|owner| json!([owner, 1]));
    owners.sort_by_key(|pair| pair[0].as_str().map(str::to_owned));
    let holders = |json: &Value| -> Vec<Value> {
        let all = json["holders"].as_array().unwrap().iter();
        all.map(|holder| json!([holder["owner"], holder["holds"]]))
            .collect()
    };
    for args in [
        &["ls", "--json"][..],
        &["ls", "j*", "--json"],
        &["who", "jobs", "--json"],
    ] {
        let told = json(&world, args);
        assert_eq!(holders(&told), owners, "{told}");
        assert_eq!(
            (&told["kind"], &told["name"]),
            (&json!("permits"), &json!("jobs"))
        );
        assert!(
            told["ttl_ms"]
                .as_u64()
                .is_some_and(|ttl| ttl > 1_000_000_000),
            "{told}"
        );
    }
    // two of the four in the set are not of these three permits
    assert_eq!(json(&world, &["ls", "--json"])["permits"], 5);
    // a name with a hash tag, and a prefix
    assert_eq!(world.code(&["force", "jobs"]), 0);
    let line = format!("echo > tagged; {}", until("end"));
    let _tagged = world.begin(
        &[
            "exec",
            "{t}:jobs",
            "--prefix",
            "app:",
            "--permits",
            "1",
            "-c",
            &line,
        ],
        "tagged",
    );
    for args in [
        &["ls", "--prefix", "app:"][..],
        &["ls", "{t}*", "--prefix", "app:"],
    ] {
        let table = world.said(args).1;
        assert_eq!(line_of(&table, "{t}:jobs")[3], "1/1", "{table}");
    }
    let told = json(&world, &["who", "{t}:jobs", "--prefix", "app:", "--json"]);
    assert_eq!(told["kind"], "permits");
}

#[test]
fn permits_are_freed_by_hand() {
    let world = World::new();
    let (_one, first) = holder(&world, "3", 1);
    let (_other, second) = holder(&world, "3", 2);
    let code = |args: &[&str]| world.code(args);
    assert_eq!(code(&["extend", "jobs", "5m", "--owner", &first]), 0);
    assert_eq!(code(&["release", "jobs", "--owner", &first]), 0);
    assert_eq!(code(&["release", "jobs", "--owner", &first]), 1);
    assert_eq!(
        line_of(&world.said(&["ls"]).1, "jobs")[2..4],
        [&*second, "1/3"]
    );
    assert_eq!(code(&["force", "jobs", "--if-owner", &first]), 1);
    let (code, freed, _) = world.said(&["force", "jobs", "--if-owner", &second]);
    assert!(
        code == Some(0) && freed.starts_with(&format!("freed jobs {second} 1 ")),
        "{freed}"
    );
    let free = world.said(&["who", "jobs", "--kind", "permits"]);
    assert_eq!(free, (Some(1), String::new(), String::new()));
    assert_eq!(world.server_says(&["GET", "jobs"]), "$1\r\n3\r\n");
}

/// Whether they are free is not known to a user who may not read them.
#[test]
fn permits_that_may_not_be_read_are_not_free() {
    let world = World::new();
    let _one = holder(&world, "1", 1);
    let rules = ["on", ">pw", "~*", "&*", "+@all", "-zrange"];
    world.server_says(&[&["ACL", "SETUSER", "some"], &rules[..]].concat());
    let url = format!("redis://some:pw@{}", world.server.addr());
    let mut who = world.nestlock(&["who", "jobs", "--kind", "permits"]);
    let output = who.env("NESTLOCK_URL", &url).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(125) && errors.contains("zrange"),
        "{:?} {errors}",
        output.status
    );
}

/// What Redisson took has no owner: it only lowers the number.
#[test]
fn a_semaphore_is_shown_and_taken() {
    let world = World::new();
    let exec = |line: &[&str]| {
        let args = ["exec", "jobs", "--kind", "semaphore"];
        world.code(&[&args, line].concat())
    };
    assert_eq!(exec(&["-n", "--", "true"]), 75, "there is no number yet");
    assert_eq!(world.server_says(&["SET", "jobs", "2"]), "+OK\r\n");
    let line = format!("echo $NESTLOCK_OWNER > held; {}", until("go"));
    let args = ["exec", "jobs", "--kind", "semaphore", "-c", &line];
    let holder = world.begin(&args, "held");
    assert_eq!(world.server_says(&["GET", "jobs"]), "$1\r\n1\r\n");
    assert!(told(&world).contains("semaphore"), "{}", told(&world));
    let who = json(&world, &["who", "jobs", "--json"]);
    assert_eq!(
        (&who["kind"], &who["permits"]),
        (&json!("semaphore"), &Value::Null)
    );
    assert_eq!(exec(&["-n", "--", "true"]), 0);
    world.server_says(&["DECR", "jobs"]);
    assert_eq!(exec(&["-n", "--", "true"]), 75);
    world.make("go");
    assert_eq!(holder.code(), Some(0));
    assert_eq!(world.server_says(&["GET", "jobs"]), "$1\r\n1\r\n");
}
