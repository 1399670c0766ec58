//! A Sentinel group of real servers: it has a master, gets another one, and nothing is left of it.
#![cfg(unix)]
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

mod support;

use std::{io::Read, net::SocketAddr, path::PathBuf, time::Instant};

use nestlock_embedded::{SpawnError, SpawnedSentinel, SpawnedServer};

use self::support::processes::{
    PATIENCE, ROLE, assert_nothing_is_left_of_a_killed_owner, assert_wrong_numbers_come_first,
    call, eventually, ms, runs, say,
};

fn addrs<'a>(servers: impl IntoIterator<Item = &'a SpawnedServer>) -> Vec<SocketAddr> {
    servers.into_iter().map(SpawnedServer::addr).collect()
}

fn processes(group: &SpawnedSentinel) -> Vec<(u32, PathBuf)> {
    let all = group.servers().iter().chain(group.sentinels());
    all.map(|server| (server.pid(), server.folder().to_owned()))
        .collect()
}

/// A group whose old masters become replicas sooner, if the sentinels support that: from 7.0.
fn start() -> SpawnedSentinel {
    let group = SpawnedSentinel::start(2, 3).unwrap();
    match group.shorten_periods() {
        Ok(()) | Err(SpawnError::Refused { .. }) => group,
        Err(error) => panic!("{error}"),
    }
}

/// Waits until all agree on this master. Otherwise panics with what the sentinels did.
fn settle_on(group: &SpawnedSentinel, master: &SpawnedServer) {
    let outcome = group.wait_until_settled();
    if outcome.is_err() || group.master().unwrap().addr() != master.addr() {
        for sentinel in group.sentinels() {
            println!(
                "{}:\n{}",
                sentinel.addr(),
                std::fs::read_to_string(sentinel.folder().join("server.log")).unwrap()
            );
        }
        panic!("not settled on {}: {outcome:?}", master.addr());
    }
}

fn is_master(server: &SpawnedServer) -> bool {
    call(server, "ROLE").contains("master\r\n:")
}

#[test]
fn a_master_two_replicas_and_three_sentinels() {
    let start = Instant::now();
    let group = SpawnedSentinel::start(2, 3).unwrap();
    println!("2 replicas, 3 sentinels: {:?}", start.elapsed());
    assert!(start.elapsed() < PATIENCE);

    let seeds: Vec<_> = addrs(group.sentinels())
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        group.url(),
        format!("redis-sentinel://{}/mymaster", seeds.join(","))
    );
    assert_eq!((group.servers().len(), group.sentinels().len()), (3, 3));
    let (master, replicas) = group.servers().split_first().unwrap();
    assert_eq!(group.master().unwrap().addr(), master.addr());
    assert_eq!(addrs(group.replicas().unwrap()), addrs(replicas));
    assert_eq!(call(master, "SET k v"), "+OK");
    for replica in replicas {
        eventually("the replica has it", || call(replica, "GET k") == "$1\r\nv");
        assert!(call(replica, "SET k w").starts_with("-READONLY"));
    }
    for sentinel in group.sentinels() {
        assert!(call(sentinel, "SENTINEL CKQUORUM mymaster").starts_with("+OK 3 usable Sentinels"));
        let port = format!("$5\r\n{}", master.addr().port());
        assert!(call(sentinel, "SENTINEL GET-MASTER-ADDR-BY-NAME mymaster").ends_with(&port));
    }

    let all = processes(&group);
    drop(group);
    assert!(
        all.iter()
            .all(|(pid, folder)| !runs(*pid) && !folder.exists())
    );
}

#[test]
fn a_replica_follows_a_master_that_is_killed() {
    let group = start();
    let first = group.master().unwrap();
    assert_eq!(call(first, "SET k v"), "+OK");
    for replica in group.replicas().unwrap() {
        eventually("the replica has it", || call(replica, "DBSIZE") == ":1");
    }
    first.kill().unwrap();
    assert_eq!(
        group.master().unwrap().addr(),
        first.addr(),
        "no replica has taken over yet"
    );
    let start = Instant::now();
    let second = group.wait_for_another_master(first).unwrap();
    println!("another master after {:?}", start.elapsed());
    assert_ne!(second.addr(), first.addr());
    assert_eq!(group.master().unwrap().addr(), second.addr());
    assert!(is_master(second));
    assert_eq!(call(second, "GET k"), "$1\r\nv");
    assert!(
        group
            .view()
            .contains(&format!("{} does not reply", first.addr())),
        "{}",
        group.view()
    );
    settle_on(&group, second);

    // the old one returns as a master, without its data, until a sentinel demotes it
    first.restart().unwrap();
    let start = Instant::now();
    settle_on(&group, second);
    println!("the old one is a replica after {:?}", start.elapsed());
    assert_eq!(
        (is_master(first), &*call(first, "GET k")),
        (false, "$1\r\nv")
    );
    // the sentinels' configuration survives a restart
    second.restart().unwrap();
    assert!(is_master(second));
    first.restart().unwrap();
    assert!(!is_master(first));
    settle_on(&group, second);
}

#[test]
fn a_replica_follows_a_master_that_hangs() {
    let group = start();
    let first = group.master().unwrap();
    first.stop().unwrap();
    let second = group.wait_for_another_master(first).unwrap();
    first.cont().unwrap();
    settle_on(&group, second);
    assert!(!is_master(first));
}

#[test]
fn a_replica_takes_over_on_order() {
    let group = start();
    let first = group.master().unwrap();
    let start = Instant::now();
    let second = group.failover().unwrap();
    println!("another master after {:?}", start.elapsed());
    assert_ne!(second.addr(), first.addr());
    assert_eq!(group.master().unwrap().addr(), second.addr());
    assert!(is_master(second));
    assert!(addrs(group.replicas().unwrap()).contains(&first.addr()));
    // another failover immediately
    let third = group.failover().unwrap();
    assert_ne!(third.addr(), second.addr());
    settle_on(&group, third);
}

#[test]
fn two_sentinels_are_enough_and_the_third_comes_back() {
    let group = start();
    let sentinel = &group.sentinels()[0];
    sentinel.kill().unwrap();
    let first = group.master().unwrap();
    first.kill().unwrap();
    let second = group.wait_for_another_master(first).unwrap();
    sentinel.restart().unwrap();
    settle_on(&group, second);
    let port = format!("$5\r\n{}", second.addr().port());
    assert!(call(sentinel, "SENTINEL GET-MASTER-ADDR-BY-NAME mymaster").ends_with(&port));
}

#[test]
fn one_sentinel_and_no_replica() {
    let group = SpawnedSentinel::start(0, 1).unwrap();
    assert_eq!(group.master().unwrap().addr(), group.servers()[0].addr());
    assert!(group.replicas().unwrap().is_empty());
    assert!(matches!(group.failover(), Err(SpawnError::Invalid { .. })));
}

#[test]
fn arguments_reach_the_servers_and_a_wrong_one_is_reported() {
    let group = SpawnedSentinel::start_with(1, 1, ["--maxmemory", "99mb"]).unwrap();
    for server in group.servers() {
        assert!(call(server, "CONFIG GET maxmemory").contains("103809024"));
    }
    match SpawnedSentinel::start_with(1, 1, ["--no-such-option", "1"]) {
        Err(SpawnError::Ended { log, .. }) => assert!(log.contains("no-such-option"), "{log}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_child_process_plays_its_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("wrong") => {
            for (replicas, sentinels) in [(2, 0), (0, 0), (97, 3), (usize::MAX, usize::MAX)] {
                say(format!(
                    "{:?}",
                    SpawnedSentinel::start(replicas, sentinels).unwrap_err()
                ));
            }
            say(format!("{:?}", SpawnedSentinel::start(96, 3).unwrap_err()));
        }
        Ok("start") => {
            say("starts");
            let group = SpawnedSentinel::start(2, 3).unwrap();
            say(group.url());
            drop(std::io::stdin().read(&mut [0]));
        }
        Ok(_) => {
            let group = SpawnedSentinel::start(1, 1).unwrap();
            group.servers()[0].stop().unwrap();
            for (pid, folder) in processes(&group) {
                say(format_args!("{pid} {}", folder.display()));
            }
            drop(std::io::stdin().read(&mut [0]));
        }
        Err(_) => {}
    }
}

#[test]
fn wrong_numbers_are_errors_before_anything_starts() {
    assert_wrong_numbers_come_first(4);
}

#[test]
fn nothing_is_left_of_an_owner_that_is_killed() {
    assert_nothing_is_left_of_a_killed_owner();
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_is_left_of_an_owner_that_is_killed_during_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let early = (0..8)
        .filter(|round| {
            support::processes::is_killed_during_the_start(folder.path(), ms(round * 40))
        })
        .count();
    assert!(early > 1, "too late: nothing was tested");
}
