//! A cluster of real servers: it serves, its masters fail over, its slots move, and nothing is left of it.
#![cfg(unix)]
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

mod support;

use std::{collections::BTreeSet, io::Read, net::SocketAddr, path::PathBuf, time::Instant};

use nestlock_embedded::{SpawnError, SpawnedCluster, SpawnedServer};

use self::support::{
    processes::{
        PATIENCE, ROLE, assert_nothing_is_left_of_a_killed_owner, assert_wrong_numbers_come_first,
        call, eventually, ms, runs, say,
    },
    rng::Rng,
};

fn addrs<'a>(nodes: impl IntoIterator<Item = &'a SpawnedServer>) -> Vec<SocketAddr> {
    nodes.into_iter().map(SpawnedServer::addr).collect()
}

fn processes(cluster: &SpawnedCluster) -> Vec<(u32, PathBuf)> {
    cluster
        .nodes()
        .iter()
        .map(|node| (node.pid(), node.folder().to_owned()))
        .collect()
}

#[test]
fn three_masters_share_all_slots_and_each_has_a_replica() {
    let start = Instant::now();
    let cluster = SpawnedCluster::start(3, 3).unwrap();
    println!("3 masters, 3 replicas: {:?}", start.elapsed());
    assert!(start.elapsed() < PATIENCE);

    assert_eq!(cluster.nodes().len(), 6);
    assert_eq!(cluster.addrs(), addrs(cluster.nodes()));
    let seeds: Vec<_> = cluster.addrs().iter().map(ToString::to_string).collect();
    assert_eq!(
        cluster.url(),
        format!("redis-cluster://{}", seeds.join(","))
    );
    assert_eq!(cluster.addrs().iter().collect::<BTreeSet<_>>().len(), 6);

    let (masters, replicas) = cluster.nodes().split_at(3);
    assert_eq!(addrs(cluster.masters().unwrap()), addrs(masters));
    for (master, replica) in masters.iter().zip(replicas) {
        assert_eq!(
            addrs(cluster.replicas_of(master).unwrap()),
            [replica.addr()]
        );
        assert!(cluster.replicas_of(replica).unwrap().is_empty());
    }
    let owners: Vec<_> = (0..16_384)
        .step_by(1_000)
        .map(|slot| cluster.master_of(slot).unwrap().addr())
        .collect();
    assert!(
        owners.is_sorted_by_key(|owner| cluster.addrs().iter().position(|addr| addr == owner)),
        "{owners:?}"
    );
    for node in cluster.nodes() {
        let info = call(node, "CLUSTER INFO");
        assert!(
            info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384"),
            "{info}"
        );
        assert!(
            info.contains("cluster_known_nodes:6") && info.contains("cluster_size:3"),
            "{info}"
        );
    }
    for (n, master) in masters.iter().enumerate() {
        let key = key_of(&cluster, master);
        assert_eq!(call(master, &format!("SET {key} v")), "+OK");
        eventually("the replica has it", || {
            call(&replicas[n], "DBSIZE") == ":1"
        });
    }

    let all = processes(&cluster);
    drop(cluster);
    assert!(
        all.iter()
            .all(|(pid, folder)| !runs(*pid) && !folder.exists())
    );
}

/// A key whose slot this master owns.
fn key_of(cluster: &SpawnedCluster, master: &SpawnedServer) -> String {
    let is_its = |key: &String| {
        cluster
            .master_of(SpawnedCluster::slot_of(key))
            .unwrap()
            .addr()
            == master.addr()
    };
    (0..10_000)
        .map(|n| format!("key:{n}"))
        .find(is_its)
        .unwrap()
}

#[test]
fn replicas_are_dealt_out_in_turn() {
    let cluster = SpawnedCluster::start(2, 3).unwrap();
    let all = cluster.addrs();
    assert_eq!(
        addrs(cluster.replicas_of(&cluster.nodes()[0]).unwrap()),
        [all[2], all[4]]
    );
    assert_eq!(
        addrs(cluster.replicas_of(&cluster.nodes()[1]).unwrap()),
        [all[3]]
    );
}

#[test]
fn slots_are_those_of_the_server() {
    let cluster = SpawnedCluster::start(1, 0).unwrap();
    let mut rng = Rng::new(7);
    for _ in 0..500 {
        let key: String = (0..=rng.below(12))
            .map(|_| char::from(b"{}{}ab7:"[rng.below(8)]))
            .collect();
        let slot = call(&cluster.nodes()[0], &format!("CLUSTER KEYSLOT {key}"));
        assert_eq!(slot, format!(":{}", SpawnedCluster::slot_of(&key)), "{key}");
    }
}

#[test]
fn a_replica_takes_over_on_order_and_nothing_is_lost() {
    let cluster = SpawnedCluster::start(3, 3).unwrap();
    let slot = SpawnedCluster::slot_of("k");
    let first = cluster.master_of(slot).unwrap();
    assert_eq!(call(first, "SET k v"), "+OK");
    let second = cluster.failover(first).unwrap();
    assert_ne!(second.addr(), first.addr());
    assert_eq!(cluster.master_of(slot).unwrap().addr(), second.addr());
    assert_eq!(addrs(cluster.replicas_of(second).unwrap()), [first.addr()]);
    assert_eq!(call(second, "GET k"), "$1\r\nv");
    // and back
    assert_eq!(cluster.failover(second).unwrap().addr(), first.addr());
    assert_eq!(call(first, "GET k"), "$1\r\nv");

    let replica = cluster.replicas_of(first).unwrap()[0];
    assert!(matches!(
        cluster.failover(replica),
        Err(SpawnError::Invalid { .. })
    ));
    let other = SpawnedServer::start().unwrap();
    assert!(matches!(
        cluster.failover(&other),
        Err(SpawnError::Invalid { .. })
    ));
}

#[test]
fn a_master_that_is_killed_or_hangs_is_followed_by_its_replica() {
    let cluster = SpawnedCluster::start(3, 3).unwrap();
    let slot = SpawnedCluster::slot_of("k");
    let first = cluster.master_of(slot).unwrap();
    let replica = cluster.replicas_of(first).unwrap()[0];
    assert_eq!(call(first, "SET k v"), "+OK");
    eventually("the replica has it", || call(replica, "DBSIZE") == ":1");

    first.kill().unwrap();
    assert_eq!(
        cluster.master_of(slot).unwrap().addr(),
        first.addr(),
        "no replica has taken over yet"
    );
    let start = Instant::now();
    cluster.wait_until_settled().unwrap();
    println!("another master after {:?}", start.elapsed());
    assert_eq!(cluster.master_of(slot).unwrap().addr(), replica.addr());
    assert!(
        cluster
            .view()
            .contains(&format!("{} does not reply", first.addr())),
        "{}",
        cluster.view()
    );
    assert_eq!(call(replica, "GET k"), "$1\r\nv");
    // it returns as a replica, with the data
    first.restart().unwrap();
    cluster.wait_until_settled().unwrap();
    assert_eq!(addrs(cluster.replicas_of(replica).unwrap()), [first.addr()]);
    assert_eq!(call(first, "DBSIZE"), ":1");

    replica.stop().unwrap();
    let start = Instant::now();
    cluster.wait_until_settled().unwrap();
    println!("another master after {:?}", start.elapsed());
    assert_eq!(cluster.master_of(slot).unwrap().addr(), first.addr());
    replica.cont().unwrap();
    cluster.wait_until_settled().unwrap();
    assert_eq!(addrs(cluster.replicas_of(first).unwrap()), [replica.addr()]);
    assert_eq!(call(first, "GET k"), "$1\r\nv");
}

#[test]
fn a_slot_moves_with_its_keys_and_all_agree_at_once() {
    const KEYS: usize = 250;
    let cluster = SpawnedCluster::start(3, 3).unwrap();
    let slot = SpawnedCluster::slot_of("{t}");
    let first = cluster.master_of(slot).unwrap();
    for n in 0..KEYS {
        assert_eq!(call(first, &format!("SET {{t}}:{n} {n}")), "+OK");
    }
    let masters = cluster.masters().unwrap();
    for turn in 0..12 {
        let to = masters[turn % 3];
        let from = cluster.master_of(slot).unwrap();
        cluster.migrate(slot, to).unwrap();
        // all nodes; the replicas learn of it last
        for node in cluster.nodes().iter().rev() {
            let answer = call(node, "GET {t}:7");
            let moved = format!("-MOVED {slot} {}", to.addr());
            assert_eq!(
                answer,
                if node.addr() == to.addr() {
                    "$1\r\n7"
                } else {
                    &moved
                },
                "{}",
                cluster.view()
            );
        }
        let count = |node| call(node, &format!("CLUSTER COUNTKEYSINSLOT {slot}"));
        assert_eq!(count(to), format!(":{KEYS}"));
        if from.addr() != to.addr() {
            assert_eq!(count(from), ":0");
        }
        assert_eq!(cluster.master_of(slot).unwrap().addr(), to.addr());
    }
    cluster.wait_until_settled().unwrap();
}

#[test]
fn a_test_can_look_in_between() {
    let cluster = SpawnedCluster::start(2, 1).unwrap();
    let slot = SpawnedCluster::slot_of("{t}");
    let from = cluster.master_of(slot).unwrap();
    let (masters, replica) = cluster.nodes().split_at(2);
    let to = masters
        .iter()
        .find(|node| node.addr() != from.addr())
        .unwrap();
    for key in ["a", "b", "c"] {
        assert_eq!(call(from, &format!("SET {{t}}{key} {key}")), "+OK");
    }
    let refused = [
        (16_384, to),
        (slot, from),
        (slot, &replica[0]),
        (slot, &SpawnedServer::start().unwrap()),
    ]
    .map(|(slot, to)| cluster.begin_migration(slot, to).unwrap_err());
    assert!(
        refused
            .iter()
            .all(|error| matches!(error, SpawnError::Invalid { .. })),
        "{refused:?}"
    );
    assert!(matches!(
        cluster.master_of(16_384),
        Err(SpawnError::Invalid { .. })
    ));

    let migration = cluster.begin_migration(slot, to).unwrap();
    assert_eq!(
        (
            migration.slot(),
            migration.from().addr(),
            migration.to().addr()
        ),
        (slot, from.addr(), to.addr())
    );
    let ask = format!("-ASK {slot} {}", to.addr());
    assert_eq!(
        [call(from, "GET {t}a"), call(from, "GET {t}z")],
        ["$1\r\na", &ask]
    );
    assert!(migration.move_key("{t}a").unwrap());
    assert!(!migration.move_key("{t}a").unwrap());
    assert_eq!(
        [call(from, "GET {t}a"), call(from, "GET {t}b")],
        [&ask, "$1\r\nb"]
    );
    // before 7.0, it redirects them
    let several = call(from, "MGET {t}a {t}b");
    assert!(
        several.starts_with("-TRYAGAIN") || several == ask,
        "{several}"
    );
    assert_eq!(
        call(to, "GET {t}a"),
        format!("-MOVED {slot} {}", from.addr())
    );
    assert!(
        cluster.view().contains(&format!("[{slot} moves]")),
        "{}",
        cluster.view()
    );
    assert_eq!(migration.move_keys().unwrap(), 2);
    assert_eq!(call(from, "GET {t}b"), ask);
    migration.finish().unwrap();
    assert_eq!(
        [call(from, "GET {t}a"), call(to, "GET {t}a")],
        [&format!("-MOVED {slot} {}", to.addr()), "$1\r\na"]
    );
    assert!(!cluster.view().contains("moves]"));
    // there already
    cluster.migrate(slot, to).unwrap();
}

#[test]
fn arguments_reach_every_node_and_a_wrong_one_is_reported() {
    let cluster = SpawnedCluster::start_with(
        1,
        1,
        ["--maxmemory", "99mb", "--cluster-node-timeout", "700"],
    )
    .unwrap();
    for node in cluster.nodes() {
        assert!(call(node, "CONFIG GET maxmemory").contains("103809024"));
        assert!(call(node, "CONFIG GET cluster-node-timeout").contains("700"));
        assert!(call(node, "CONFIG GET cluster-replica-validity-factor").ends_with("\r\n0"));
    }
    match SpawnedCluster::start_with(1, 1, ["--no-such-option", "1"]) {
        Err(SpawnError::Ended { log, .. }) => assert!(log.contains("no-such-option"), "{log}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_child_process_plays_its_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("wrong") => {
            for (masters, replicas) in [
                (0, 3),
                (0, 0),
                (3, 998),
                (1001, 0),
                (usize::MAX, usize::MAX),
            ] {
                say(format!(
                    "{:?}",
                    SpawnedCluster::start(masters, replicas).unwrap_err()
                ));
            }
            say(format!("{:?}", SpawnedCluster::start(1000, 0).unwrap_err()));
        }
        Ok("start") => {
            say("starts");
            let _cluster = SpawnedCluster::start(3, 3).unwrap();
            panic!("not killed by the test");
        }
        Ok(_) => {
            let cluster = SpawnedCluster::start(2, 1).unwrap();
            cluster.nodes()[2].stop().unwrap();
            for (pid, folder) in processes(&cluster) {
                say(format_args!("{pid} {}", folder.display()));
            }
            drop(std::io::stdin().read(&mut [0]));
        }
        Err(_) => {}
    }
}

#[test]
fn wrong_numbers_are_errors_before_anything_starts() {
    assert_wrong_numbers_come_first(5);
}

#[test]
fn nothing_is_left_of_an_owner_that_is_killed() {
    assert_nothing_is_left_of_a_killed_owner();
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_is_left_of_an_owner_that_is_killed_during_the_start() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..6 {
        // from before the first process until the nodes meet
        support::processes::is_killed_during_the_start(folder.path(), ms(round * 60));
    }
}
