//! The program on clusters, behind sentinels, and at several addresses.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use nestlock_embedded::{SpawnedCluster, SpawnedSentinel, SpawnedServer};

use crate::{
    look::line_of,
    support::{PATIENCE, Place, Running, eventually, says, until},
};

/// Returns a name in a slot of this node of the cluster.
fn name_at(cluster: &SpawnedCluster, node: &SpawnedServer, before: &str) -> String {
    let is_there = |name: &String| {
        cluster
            .master_of(SpawnedCluster::slot_of(name))
            .unwrap()
            .addr()
            == node.addr()
    };
    (0..10_000)
        .map(|n| format!("{before}{n}"))
        .find(is_there)
        .unwrap()
}

/// Starts a holder that keeps the lock until the file `go` exists.
fn holder(place: &Place, name: &str) -> Running {
    let file = format!("held-{name}");
    let line = format!("echo $NESTLOCK_OWNER > 'held-{name}'; {}", until("go"));
    place.begin(&["exec", name, "--lease", "60s", "-c", &line], &file)
}

/// Subscribes at this node, until the connection is dropped.
fn listen(at: SocketAddr, command: &str, channel: &str) -> TcpStream {
    let mut connection = TcpStream::connect(at).unwrap();
    connection
        .write_all(format!("{command} {channel}\r\n").as_bytes())
        .unwrap();
    assert!(connection.read(&mut [0; 256]).unwrap() > 0);
    connection
}

/// A running program, and its lines as they arrive.
struct Lines {
    program: std::process::Child,
    told: mpsc::Receiver<String>,
}

impl Lines {
    fn of(place: &Place, args: &[&str]) -> Self {
        let mut program = place
            .nestlock(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, told) = mpsc::channel();
        let errors = program.stderr.take().unwrap();
        let output = program.stdout.take().unwrap();
        let other = tell.clone();
        thread::spawn(move || {
            BufReader::new(errors)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| other.send(line))
        });
        thread::spawn(move || {
            BufReader::new(output)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| tell.send(line))
        });
        Self { program, told }
    }

    /// Waits for a line that contains this text. Returns the lines before it.
    fn until(&self, text: &str) -> Vec<String> {
        let (start, mut before) = (Instant::now(), Vec::new());
        loop {
            let line = self
                .told
                .recv_timeout(PATIENCE.saturating_sub(start.elapsed()));
            let line = line.unwrap_or_else(|_| panic!("{text:?} is not told: {before:?}"));
            if line.contains(text) {
                return before;
            }
            before.push(line);
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// Checks what all commands do on any deployment.
fn all_is_shown_and_done(place: &Place, names: &[String]) {
    let _holders: Vec<Running> = names.iter().map(|name| holder(place, name)).collect();
    let (code, table, errors) = place.said(&["ls"]);
    assert!(
        code == Some(0) && errors.is_empty() && table.lines().count() == 1 + names.len(),
        "{table}{errors}"
    );
    for name in names {
        let owner = place.text(&format!("held-{name}"));
        assert_eq!(
            line_of(&table, name)[1..4],
            ["reentrant", &owner, "1"],
            "{table}"
        );
        assert_eq!(line_of(&table, name)[5..7], ["0", "clients"], "{table}");
        // the program of the holder, on whichever server it is connected
        let (code, told, errors) = place.said(&["who", name]);
        assert!(
            code == Some(0) && told.starts_with(&owner) && told.contains(" sh "),
            "{told}{errors}"
        );
        assert_eq!(
            place.said(&["extend", name, "5m", "--owner", &owner]),
            (Some(0), String::new(), String::new())
        );
        let ttl = |line: &[&str]| line[4].trim_end_matches("ms").parse::<u64>().unwrap();
        assert!(ttl(&line_of(&place.said(&["ls"]).1, name)) > 200_000);
    }
    let [first, second, ..] = names else {
        panic!("too few")
    };
    assert_eq!(
        place.code(&[
            "release",
            first,
            "--owner",
            &place.text(&format!("held-{first}"))
        ]),
        0
    );
    let (code, told, _) = place.said(&["force", second]);
    assert!(
        code == Some(0) && told.starts_with(&format!("freed {second} ")),
        "{told}"
    );
    let (_, table, _) = place.said(&["ls", "--json"]);
    assert_eq!(table.lines().count(), names.len() - 2, "{table}");
    place.make("go");
    let (code, figures, errors) =
        place.said(&["bench", "--pairs", "1000", "--rounds", "1", "--yes"]);
    assert!(
        code == Some(0) && figures.contains("hand-over, fair"),
        "{figures}{errors}"
    );
}

/// One cluster for all tests that only read it.
#[test]
fn a_cluster_is_shown_whole() {
    let cluster = SpawnedCluster::start(3, 3).unwrap();
    let masters = cluster.masters().unwrap();
    let place = Place::at(cluster.url());
    let mut names: Vec<String> = masters
        .iter()
        .map(|node| name_at(&cluster, node, "lock"))
        .collect();
    names.push("{tag}:lock".into());
    all_is_shown_and_done(&place, &names);
    assert_eq!(
        place.said(&["ls"]),
        (Some(0), String::new(), String::new()),
        "nothing stays"
    );

    // --- waiters: of sharded and of classic messages, on any node, each counted once ---
    let place = Place::at(cluster.url());
    let _holders = [
        place.hold(&names[0], "reentrant"),
        place.hold("{t}fair", "fair"),
    ];
    let _waiters = [(&*names[0], "reentrant"), ("{t}fair", "fair")].map(|(name, kind)| {
        Running::of(place.nestlock(&["exec", name, "--kind", kind, "--", "true"]))
    });
    let waiting = |name: &str| line_of(&place.said(&["ls"]).1, name)[5..].join(" ");
    eventually("both wait", || {
        waiting(&names[0]) == "1 client -" && waiting("{t}fair") == "1 -"
    });
    let channel = format!("redisson_lock__channel:{{{}}}", names[0]);
    let replica = cluster.replicas_of(masters[0]).unwrap()[0].addr();
    let _elsewhere = [masters[1].addr(), replica].map(|at| listen(at, "SUBSCRIBE", &channel));
    assert_eq!(waiting(&names[0]), "3 clients -");
    {
        // a node that does not reply may still have listeners
        let gone = cluster.replicas_of(masters[2]).unwrap()[0];
        gone.stop().unwrap();
        let (code, table, errors) = place.said(&["ls"]);
        assert_eq!(
            (code, &*line_of(&table, &names[0])[5..].join(" ")),
            (Some(0), "- -"),
            "{table}"
        );
        assert!(
            errors.contains(&gone.addr().to_string())
                && errors.contains("the number of waiters is not known"),
            "{errors}"
        );
        gone.cont().unwrap();
    }
    eventually("it is back", || waiting(&names[0]) == "3 clients -");

    assert_eq!(
        place.said(&["who", "nobody's"]),
        (Some(1), String::new(), String::new())
    );
    assert_eq!(
        place.code(&["exec", "{t}s", "--kind", "signal", "--", "true"]),
        0
    );
    let (code, _, errors) = place.said(&["exec", "s", "--kind", "signal", "--", "true"]);
    assert!(code == Some(64) && errors.contains('{'), "{errors}");

    // --- the number of keys, over all masters ---
    let keys = |most: &str| place.code(&["ls", "--max-keys", most]);
    for node in &masters {
        for n in 0..3 {
            says(
                node.addr(),
                &["SET", &name_at(&cluster, node, &format!("data{n}:")), "x"],
            );
        }
    }
    assert_eq!((keys("8"), keys("1000")), (64, 0));

    // --- a slot that migrates: each node has some of its keys ---
    let slot = SpawnedCluster::slot_of("t");
    let to = masters
        .iter()
        .find(|node| node.addr() != cluster.master_of(slot).unwrap().addr())
        .unwrap();
    let migration = cluster.begin_migration(slot, to).unwrap();
    for moved in ["{t}fair", "redisson_lock_queue:{t}fair"] {
        let (_, table, errors) = place.said(&["ls"]);
        let line = line_of(&table, "{t}fair");
        assert_eq!(
            (line[1], line[5], &*errors),
            ("fair", "1", ""),
            "{moved}: {table}"
        );
        assert!(migration.move_key(moved).unwrap());
    }
    assert_eq!(line_of(&place.said(&["ls"]).1, "{t}fair")[5], "1");
    assert_eq!(place.code(&["who", "{t}fair"]), 0);
    migration.finish().unwrap();

    // --- doctor, for the cluster and for a single node ---
    let (code, rows, errors) = place.said(&["doctor"]);
    assert_eq!(code, Some(1), "{rows}{errors}");
    for row in [
        "3 masters, 3 replicas",
        "each slot has a master",
        "warn     persistence",
        "ok       each master",
        "ok       signal",
        "ok       messages",
        "warn     cluster-node-timeout",
        "cluster-require-full-coverage",
    ] {
        assert!(rows.contains(row), "{row}: {rows}");
    }
    for (setting, value) in [("maxmemory", "100mb"), ("maxmemory-policy", "allkeys-lru")] {
        says(masters[1].addr(), &["CONFIG", "SET", setting, value]);
    }
    let (code, rows, _) = place.said(&["doctor"]);
    let worst = format!("{}: maxmemory-policy is allkeys-lru", masters[1].addr());
    assert!(code == Some(2) && rows.contains(&worst), "{rows}");
    let alone = Place::at(masters[0].url());
    let (code, rows, _) = alone.said(&["doctor"]);
    assert!(
        code == Some(2) && rows.contains("warn     role") && rows.contains("a node of a cluster"),
        "{rows}"
    );
    let (code, _, errors) = alone.said(&["ls"]);
    assert!(
        code == Some(64) && errors.contains("redis-cluster://"),
        "{errors}"
    );
    the_rules_are_enough_in_a_cluster(&cluster);
}

/// Returns the rules of `ACL SETUSER` as `acl` prints them, without the name of the user.
fn rules(place: &Place, args: &[&str]) -> Vec<String> {
    let (_, line, _) = place.said(&[&["acl", "--prefix", "app:"], args].concat());
    assert!(!line.contains("+@all"));
    let shell = format!(
        "set -- {}; for word; do printf '%s\\n' \"$word\"; done",
        line.trim()
    );
    let words = Command::new("sh").args(["-c", &shell]).output().unwrap();
    let words = String::from_utf8(words.stdout)
        .unwrap()
        .replace(">PASSWORD", ">pw");
    words.lines().skip(3).map(str::to_owned).collect()
}

fn the_rules_are_enough_in_a_cluster(cluster: &SpawnedCluster) {
    let place = Place::at(cluster.url());
    for tool in ["exec", "ls", "who", "doctor", "force", "bench"] {
        let rules = rules(&place, &["--for", tool]);
        let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
        for node in cluster.nodes() {
            let told = says(
                node.addr(),
                &[&["ACL", "SETUSER", "some", "reset"], &rules[..]].concat(),
            );
            assert_eq!(told, "+OK\r\n", "{rules:?}");
            says(node.addr(), &["ACL", "LOG", "RESET"]);
        }
        let user = Place::at(cluster.url().replace("://", "://some:pw@"));
        let run = |args: &[&str]| {
            user.nestlock(args)
                .env("NESTLOCK_PREFIX", "app:")
                .output()
                .unwrap()
        };
        let codes: Vec<Option<i32>> = match tool {
            "exec" => ["{l}", "m"]
                .iter()
                .flat_map(|name| {
                    ["fair", "read", "write", "reentrant"].map(|kind| {
                        run(&["exec", &format!("{name}x"), "--kind", kind, "--", "true"])
                            .status
                            .code()
                    })
                })
                .collect(),
            "ls" => vec![run(&["ls"]).status.code()],
            "who" => vec![run(&["who", "l"]).status.code().map(|code| code - 1)],
            "force" => vec![run(&["force", "l"]).status.code().map(|code| code - 1)],
            "bench" => vec![
                run(&["bench", "--pairs", "1000", "--rounds", "1", "--yes"])
                    .status
                    .code(),
            ],
            _ => {
                let rows = String::from_utf8(run(&["doctor"]).stdout).unwrap();
                assert!(
                    !rows.contains("unknown") && rows.contains("each master"),
                    "{rows}"
                );
                for pattern in rules.iter().filter(|rule| rule.starts_with('~')) {
                    let others: Vec<&str> = rules
                        .iter()
                        .copied()
                        .filter(|rule| rule != pattern)
                        .collect();
                    for node in cluster.nodes() {
                        says(
                            node.addr(),
                            &[&["ACL", "SETUSER", "some", "reset"], &others[..]].concat(),
                        );
                    }
                    let rows = String::from_utf8(run(&["doctor"]).stdout).unwrap();
                    assert!(rows.contains("unknown"), "without {pattern}: {rows}");
                }
                cluster
                    .nodes()
                    .iter()
                    .for_each(|node| drop(says(node.addr(), &["ACL", "LOG", "RESET"])));
                vec![Some(0)]
            }
        };
        assert!(
            codes.iter().all(|code| *code == Some(0)),
            "{tool}: {codes:?}"
        );
        for node in cluster.nodes() {
            assert_eq!(
                says(node.addr(), &["ACL", "LOG"]),
                "*0\r\n",
                "{tool}: nothing was denied"
            );
        }
    }
}

/// One master hangs, and one is gone: the locks of the others are shown all the while, and those of
/// the lost master are not reported as free.
#[test]
fn a_cluster_that_loses_a_master_is_watched_on() {
    // long enough for this test to see the loss before a replica takes over
    let cluster = SpawnedCluster::start_with(
        3,
        1,
        [
            "--cluster-require-full-coverage",
            "no",
            "--cluster-node-timeout",
            "4000",
        ],
    )
    .unwrap();
    let place = Place::at(cluster.url());
    let masters = cluster.masters().unwrap();
    let names = [0, 1, 2].map(|at| name_at(&cluster, masters[at], &format!("lock{at}:")));
    let _holders: Vec<Running> = names.iter().map(|name| holder(&place, name)).collect();
    let watch = Lines::of(&place, &["ls", "--watch"]);
    for name in &names {
        watch.until(&format!("= {name} "));
    }
    #[cfg(target_os = "linux")]
    let mut top = {
        let top = crate::terminal::open_top(&place, "--interval 250ms");
        for name in &names {
            top.draws(name);
        }
        // patterns do not match sharded messages
        top.draws("releases: -/s");
        top
    };
    let replaced = masters[0];
    replaced.stop().unwrap();
    let (code, table, errors) = place.said(&["ls"]);
    assert!(
        code == Some(1) && errors.contains(&replaced.addr().to_string()),
        "{errors}"
    );
    let lists = |table: &str, name: &str| {
        table
            .lines()
            .any(|line| line.starts_with(&format!("{name} ")))
    };
    assert_eq!(
        names.each_ref().map(|name| lists(&table, name)),
        [false, true, true],
        "{table}"
    );
    let (code, rows, _) = place.said(&["doctor"]);
    assert!(
        code == Some(2) && rows.contains(&format!("bad      {}", replaced.addr())),
        "{rows}"
    );
    cluster.wait_until_settled().unwrap();
    let mut before = watch.until("the locks there are taken to be unchanged");
    before.extend(watch.until("all servers reply"));
    #[cfg(target_os = "linux")]
    {
        top.draws("q quit");
        for name in &names {
            top.draws(name);
        }
    }
    let (code, table, errors) = place.said(&["ls"]);
    assert!(
        code == Some(0) && names.iter().all(|name| lists(&table, name)),
        "{table}{errors}"
    );

    // changes of locks on the new master are reported
    assert_eq!(place.code(&["force", &names[0]]), 0);
    before.extend(watch.until(&format!("- {} ", names[0])));
    assert!(
        !before.iter().any(|line| line.starts_with('-')),
        "{before:?}"
    );
    // read now: after a stall of the machine for one node timeout, other masters may have been
    // replaced, too
    let master_of = |name: &String| cluster.master_of(SpawnedCluster::slot_of(name)).unwrap();
    let (well, alone) = (master_of(&names[1]), master_of(&names[2]));
    // no replica takes over
    for replica in cluster.replicas_of(alone).unwrap() {
        replica.stop().unwrap();
    }
    drop(alone.kill());
    #[cfg(target_os = "linux")]
    {
        top.draws("the locks there may be stale");
        top.draws(&names[2]);
    }
    let mut before = watch.until("the locks there are taken to be unchanged");
    // the scan for new locks continues on the other masters
    let new = name_at(&cluster, well, "new");
    let _new = holder(&place, &new);
    before.extend(watch.until(&format!("+ {new} ")));
    assert!(
        !before.iter().any(|line| line.starts_with('-')),
        "{before:?}"
    );
    #[cfg(target_os = "linux")]
    {
        top.types("q");
        top.shows("code-0");
    }
    let (code, table, errors) = place.said(&["ls"]);
    assert!(
        code == Some(1) && errors.contains(&alone.addr().to_string()) && lists(&table, &names[1]),
        "{table}{errors}"
    );
    // a server that is gone has no listeners, so the count is known
    assert_eq!(
        line_of(&table, &names[1])[5..7],
        ["0", "clients"],
        "{table}"
    );
    replaced.cont().unwrap();
}

/// With `--replicas`, the command starts only after the replicas have the lock.
#[test]
fn exec_waits_for_as_many_replicas_as_are_wanted() {
    let group = SpawnedSentinel::start(1, 1).unwrap();
    let place = Place::at(group.url());
    let master = group.master().unwrap().addr();
    says(master, &["CONFIG", "RESETSTAT"]);
    let waits = || says(master, &["INFO", "commandstats"]).contains("cmdstat_wait:");
    assert_eq!(place.code(&["exec", "l", "--", "true"]), 0);
    assert!(!waits());
    assert_eq!(
        place.code(&["exec", "--replicas", "1", "l", "--", "true"]),
        0
    );
    assert!(waits());
    let (code, _, errors) = place.said(&["exec", "--replicas", "2", "l", "--", "true"]);
    assert!(
        code != Some(0) && errors.contains("`replicas` is 2"),
        "{code:?} {errors}"
    );
}

#[test]
fn sentinels_lead_to_the_master_and_to_the_next_one() {
    let group = SpawnedSentinel::start(2, 3).unwrap();
    let place = Place::at(group.url());
    all_is_shown_and_done(&place, &["a".into(), "b".into(), "c".into()]);
    let (code, rows, errors) = place.said(&["doctor"]);
    assert_eq!(code, Some(1), "{rows}{errors}");
    for row in [
        "2 replicas: a failover may lose",
        "ok       sentinels",
        "3 of 3 reply, there are 3, and 2 must agree",
        "ok       messages",
    ] {
        assert!(rows.contains(row), "{row}: {rows}");
    }
    sentinels_are_asked_with_the_rules_that_are_printed(&group);

    let place = Place::at(group.url());
    let _holder = holder(&place, "kept");
    let watch = Lines::of(&place, &["ls", "--watch"]);
    watch.until("= kept ");
    // a failover may be over before `ls` polls, so it is delayed until `ls` has reported the loss
    let down_after = |time: &str| {
        for sentinel in group.sentinels() {
            let set = [
                "SENTINEL",
                "SET",
                SpawnedSentinel::MASTER_NAME,
                "down-after-milliseconds",
                time,
            ];
            assert_eq!(says(sentinel.addr(), &set), "+OK\r\n");
        }
    };
    down_after("600000");
    let old = group.master().unwrap();
    old.kill().unwrap();
    let mut before = watch.until("the locks there are taken to be unchanged");
    down_after("500");
    group.wait_for_another_master(old).unwrap();
    before.extend(watch.until("all servers reply"));
    let (code, table, errors) = place.said(&["ls"]);
    assert!(code == Some(0) && table.contains("kept"), "{table}{errors}");
    assert_eq!(place.code(&["force", "kept"]), 0);
    before.extend(watch.until("- kept "));
    assert!(
        !before.iter().any(|line| line.starts_with('-')),
        "{before:?}"
    );
}

fn sentinels_are_asked_with_the_rules_that_are_printed(group: &SpawnedSentinel) {
    let place = Place::at(group.url());
    let user = Place::at(format!(
        "{}?sentinelUsername=some&sentinelPassword=pw",
        group.url()
    ));
    let doctor = |args: &[&str]| {
        let rules = rules(&place, args);
        let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
        for sentinel in group.sentinels() {
            let told = says(
                sentinel.addr(),
                &[&["ACL", "SETUSER", "some", "reset"], &rules[..]].concat(),
            );
            assert_eq!(told, "+OK\r\n", "{rules:?}");
        }
        user.said(&["doctor"]).1
    };
    let rows = doctor(&["--sentinel", "--for", "doctor"]);
    assert!(rows.contains("3 of 3 reply, there are 3"), "{rows}");
    for sentinel in group.sentinels() {
        assert_eq!(
            says(sentinel.addr(), &["ACL", "LOG"]),
            "*0\r\n",
            "nothing was denied"
        );
    }
    let rows = doctor(&["--sentinel"]);
    assert!(
        rows.contains("unknown  sentinels") && rows.contains("+sentinel|masters"),
        "{rows}"
    );
    // the rules for the servers, where the client has to find the master
    assert!(place.said(&["acl"]).1.contains("+role"));
}

#[test]
fn several_addresses_lead_to_the_one_that_is_the_master() {
    let master = SpawnedServer::start().unwrap();
    let replica = SpawnedServer::start_with([
        "--replicaof",
        "127.0.0.1",
        &master.addr().port().to_string(),
    ])
    .unwrap();
    let place = Place::at(format!("redis://{},{}", replica.addr(), master.addr()));
    all_is_shown_and_done(&place, &["a".into(), "b".into(), "c".into()]);
    let (code, rows, _) = place.said(&["doctor"]);
    assert!(code == Some(1) && rows.contains("ok       fair"), "{rows}");
}

#[test]
fn an_invalid_url_is_reported() {
    for (url, told) in [
        ("redis://127.0.0.1:1,redis://127.0.0.1:2", "several URLs"),
        ("http://127.0.0.1:1", "no such scheme"),
        ("redis-sentinel://127.0.0.1:1", "names no service"),
        (
            "redis-cluster://127.0.0.1:1/x",
            "the database must be a number",
        ),
    ] {
        for args in [
            &["ls"][..],
            &["doctor"],
            &["who", "l"],
            &["exec", "l", "--", "true"],
        ] {
            let (code, _, errors) = Place::at(url).said(args);
            assert!(
                code == Some(64) && errors.contains(told),
                "{url} {args:?}: {code:?} {errors}"
            );
        }
    }
}

/// The server requires client certificates; its own certificate is for `redis.internal`.
#[test]
fn certificates_are_shown_and_checked_by_each_connection() {
    let (servers, clients, strangers) = (
        authority("servers"),
        authority("clients"),
        authority("strangers"),
    );
    let files = Place::at("");
    let file = |name: &str, pem: String| {
        std::fs::write(files.path(name), pem).unwrap();
        files.path(name).display().to_string()
    };
    let pair = |name: &str, by: &Authority, host: &str| {
        let [cert, key] = signed(by, host);
        (
            file(&format!("{name}.pem"), cert),
            file(&format!("{name}-key.pem"), key),
        )
    };
    let ((cert, key), (own, own_key)) = (
        pair("server", &servers, "redis.internal"),
        pair("own", &clients, "client"),
    );
    let (ca, believed) = (
        file("ca.pem", servers.pem()),
        file("clients.pem", clients.pem()),
    );
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let _server = SpawnedServer::start_with([
        "--tls-port",
        &free.to_string(),
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &believed,
        "--tls-auth-clients",
        "yes",
    ])
    .unwrap();
    let place = Place::at(format!("rediss://127.0.0.1:{free}"));
    let all = [
        "--tls-ca",
        &ca,
        "--tls-cert",
        &own,
        "--tls-key",
        &own_key,
        "--tls-server-name",
        "redis.internal",
    ];
    for args in [
        &["ls"][..],
        &["bench", "--pairs", "1000", "--rounds", "1"],
        &["exec", "l", "--", "true"],
    ] {
        let (code, _, errors) = place.said(&[&all, args].concat());
        assert_eq!(code, Some(0), "{args:?}: {errors}");
    }
    // by environment variables, as inside a command of `exec`
    let mut doctor = place.nestlock(&["doctor"]);
    for (at, name) in ["CA", "CERT", "KEY", "SERVER_NAME"].iter().enumerate() {
        doctor.env(format!("NESTLOCK_TLS_{name}"), all[2 * at + 1]);
    }
    let rows = String::from_utf8(doctor.output().unwrap().stdout).unwrap();
    assert!(
        rows.contains("ok       messages") && rows.contains("ok       version"),
        "{rows}"
    );
    let (other, other_key) = pair("other", &strangers, "client");
    for (wrong, code) in [
        (
            [
                "--tls-ca",
                &ca,
                "--tls-cert",
                &other,
                "--tls-key",
                &other_key,
                "--tls-server-name",
                "redis.internal",
            ],
            125,
        ),
        (
            [
                "--tls-ca",
                &believed,
                "--tls-cert",
                &own,
                "--tls-key",
                &own_key,
                "--tls-server-name",
                "redis.internal",
            ],
            125,
        ),
        (
            [
                "--tls-ca",
                &ca,
                "--tls-cert",
                &own,
                "--tls-key",
                &other_key,
                "--tls-server-name",
                "redis.internal",
            ],
            64,
        ),
        (
            [
                "--tls-ca",
                "nowhere.pem",
                "--tls-cert",
                &own,
                "--tls-key",
                &own_key,
                "--tls-server-name",
                "redis.internal",
            ],
            64,
        ),
    ] {
        for args in [&["ls"][..], &["doctor"]] {
            let (said, _, errors) = place.said(&[&wrong[..], args].concat());
            assert_eq!(said, Some(code), "{wrong:?}: {errors}");
        }
    }
    let (code, _, errors) = place.said(&["ls", "--tls-cert", &own]);
    assert!(code == Some(64) && errors.contains("--tls-key"), "{errors}");
}

type Authority = rcgen::CertifiedIssuer<'static, rcgen::KeyPair>;

fn authority(name: &str) -> Authority {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, name);
    Authority::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap()
}

/// Returns a certificate and its key, in PEM.
fn signed(by: &Authority, host: &str) -> [String; 2] {
    let mut params = rcgen::CertificateParams::new(vec![host.to_owned()]).unwrap();
    params
        .distinguished_name
        .push(rcgen::DnType::CommonName, "somebody");
    let key = rcgen::KeyPair::generate().unwrap();
    [
        params.signed_by(&key, by).unwrap().pem(),
        key.serialize_pem(),
    ]
}

/// Releases are counted by a pattern only if it receives all of them: before Redis 7.0.
#[test]
#[cfg(target_os = "linux")]
fn messages_are_heard_where_no_server_has_others() {
    let cluster = SpawnedCluster::start(1, 0).unwrap();
    let is_old = says(cluster.nodes()[0].addr(), &["PUBSUB", "SHARDNUMSUB"]).starts_with('-');
    let mut top = crate::terminal::open_top(&Place::at(cluster.url()), "");
    if is_old {
        top.draws("releases: 0/s");
    } else {
        // sent once by this test, once by the library, and once by `top` before it would subscribe
        let asked = || {
            says(cluster.nodes()[0].addr(), &["INFO", "commandstats"])
                .contains("shardnumsub:calls=3,")
        };
        eventually("it has seen that there are others", asked);
        assert_eq!(
            says(cluster.nodes()[0].addr(), &["PUBSUB", "NUMPAT"]),
            ":0\r\n"
        );
        top.draws("releases: -/s");
    }
    top.types("q");
    top.shows("code-0");
}
