//! Clusters in which several things go wrong.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{executor::block_on, future::join_all};
use nestlock::{Lock, LockClient, LockGuard};
use nestlock_embedded::{SpawnedCluster, SpawnedServer};

use super::{LONG, ask, asked_for, by_way_of_a_proxy, client, errors, name_at, start, there};
use crate::support::{
    proxy::{Action, Verb},
    within,
};

/// Locks need no runtime of the user, even while they wait for a master that is away.
#[test]
fn a_master_that_is_away_is_waited_for_without_a_runtime() {
    let cluster = SpawnedCluster::start(3, 0).unwrap();
    let client = block_on(LockClient::connect(cluster.url())).unwrap();
    let name = name_at(&cluster, 0);
    let lock = client.mutex(&name).unwrap();
    let guard = block_on(lock.lock()).unwrap();
    cluster.nodes()[0].kill().unwrap();
    let waits = client.mutex(format!("{{{name}}}")).unwrap();
    let away = Instant::now();
    while !matches!(block_on(waits.try_lock()), Err(error) if error.to_string().contains("not connected"))
    {
        assert!(away.elapsed() < Duration::from_secs(10));
    }
    assert!(block_on(waits.try_lock_for(Duration::from_millis(300))).is_err());
    assert!(block_on(guard.unlock()).is_err());
    cluster.nodes()[0].restart().unwrap();
    block_on(block_on(waits.lock()).unwrap().unlock()).unwrap();
}

/// Holds at a master that hangs do not delay the renewals of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_hangs_costs_no_hold_of_another_master() {
    // a long node timeout: a busy machine must not make another master count as failed
    let args = [
        "--cluster-require-full-coverage",
        "no",
        "--cluster-node-timeout",
        "15000",
    ];
    let cluster =
        tokio::task::spawn_blocking(move || SpawnedCluster::start_with(3, 0, args).unwrap());
    let cluster = Arc::new(cluster.await.unwrap());
    let lease = Duration::from_secs(6);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .connect(cluster.url())
        .await
        .unwrap();
    let locks: Vec<_> = (0..1000)
        .map(|n| client.mutex(format!("l{n}")).unwrap())
        .collect();
    let guards = join_all(
        locks
            .iter()
            .map(|lock| async move { lock.lock().await.unwrap() }),
    )
    .await;
    cluster.nodes()[0].stop().unwrap();
    let hung = 0..=(16384 / 3 - 1) as u16;
    tokio::time::sleep(2 * lease).await;
    let elsewhere = guards
        .iter()
        .enumerate()
        .filter(|(n, _)| !hung.contains(&SpawnedCluster::slot_of(format!("l{n}"))));
    let elsewhere: Vec<_> = elsewhere.map(|(_, guard)| guard).collect();
    let lost: Vec<_> = elsewhere.iter().filter(|guard| guard.is_lost()).collect();
    let why = match lost.first() {
        Some(guard) => Some(guard.lost().await),
        None => None,
    };
    cluster.nodes()[0].cont().unwrap();
    assert_eq!(lost.len(), 0, "of {}: {why:?}", elsewhere.len());
}

/// All masters are lost at once, and an operator promotes their replicas: no node that the client
/// used is left.
#[tokio::test]
async fn replicas_are_queried_when_no_master_is_left() {
    let cluster = start(3, 3).await;
    let client = LockClient::builder()
        .outage_patience(Duration::from_secs(30))
        .connect(format!("redis-cluster://{}", cluster.nodes()[0].addr()))
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    // a master lists a replica only after it has received that replica's replication offset
    let nodes = cluster.nodes();
    let known = |node| {
        ask(node, &["CLUSTER", "SLOTS"])
            .list()
            .iter()
            .all(|range| range.list().len() > 3)
    };
    within(Duration::from_secs(20), "they are named", || async {
        nodes[..3].iter().all(known)
    })
    .await;
    let asked = || {
        nodes
            .iter()
            .map(|node| asked_for(node, "slots"))
            .sum::<u64>()
    };
    let before = asked();
    within(
        Duration::from_secs(20),
        "the client sends two queries",
        || async { asked() > before + 3 },
    )
    .await;
    there(&cluster, |cluster| {
        let (masters, replicas) = cluster.nodes().split_at(3);
        for master in masters {
            master.kill().unwrap();
        }
        for replica in replicas {
            assert!(!ask(replica, &["CLUSTER", "FAILOVER", "TAKEOVER"]).is_error());
        }
    })
    .await;
    let guard = tokio::time::timeout(Duration::from_secs(20), lock.lock())
        .await
        .unwrap_or_else(|_| panic!("no node is queried: {}", cluster.view()))
        .unwrap();
    guard.unlock().await.unwrap();
}

fn ours(node: &SpawnedServer) -> usize {
    ask(node, &["CLIENT", "LIST"])
        .text()
        .matches("name=nestlock:")
        .count()
}

/// A redirect may be the first sign that a master has lost its last slot.
#[tokio::test]
async fn a_master_without_slots_is_left() {
    // otherwise the servers turn it into a replica, and it reports so
    let args = ["--cluster-allow-replica-migration", "no"];
    let cluster =
        tokio::task::spawn_blocking(move || SpawnedCluster::start_with(3, 0, args).unwrap());
    let cluster = Arc::new(cluster.await.unwrap());
    let slot = SpawnedCluster::slot_of(name_at(&cluster, 2));
    let name = name_at(&cluster, 2);
    // all of its slots but one go to the first master
    there(&cluster, move |cluster| {
        let nodes = cluster.nodes();
        let mut parts = vec![(10922u16, slot.saturating_sub(1)), (slot + 1, 16383)];
        parts.retain(|(from, to)| from <= to);
        for (from, to) in parts {
            let slots: Vec<String> = (from..=to).map(|slot| slot.to_string()).collect();
            let words = |verb| {
                ["CLUSTER", verb]
                    .into_iter()
                    .chain(slots.iter().map(String::as_str))
                    .collect::<Vec<_>>()
            };
            // gossip between the nodes may undo it at one of them
            let begun = Instant::now();
            loop {
                for node in &nodes[..3] {
                    ask(node, &words("DELSLOTS"));
                }
                let said = ask(&nodes[0], &words("ADDSLOTS"));
                if !said.is_error() {
                    break;
                }
                assert!(begun.elapsed() < Duration::from_secs(10), "{said:?}");
            }
        }
        cluster.wait_until_settled().unwrap();
    })
    .await;
    let client = client(&cluster).await;
    assert_eq!(ours(&cluster.nodes()[2]), 1);
    let lock = client.mutex(&name).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let stops = stop.clone();
    let runs = tokio::spawn(async move {
        while !stops.load(Ordering::Acquire) {
            lock.try_lock()
                .await
                .unwrap()
                .unwrap()
                .unlock()
                .await
                .unwrap();
        }
    });
    there(&cluster, move |cluster| {
        cluster.migrate(slot, &cluster.nodes()[0]).unwrap();
    })
    .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    stop.store(true, Ordering::Release);
    runs.await.unwrap();
    within(Duration::from_secs(8), "it is left", || async {
        ours(&cluster.nodes()[2]) == 0
    })
    .await;
}

/// A request that a graceful failover refuses is sent to the new master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_failover_fails_no_call() {
    let cluster = start(3, 3).await;
    let client = client(&cluster).await;
    let (stop, errors) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(Mutex::new(Vec::new())),
    );
    let running: Vec<_> = (0..32)
        .map(|n| {
            let (client, stop, errors) = (client.clone(), stop.clone(), errors.clone());
            tokio::spawn(async move {
                let mut pairs = 0u32;
                while !stop.load(Ordering::Acquire) {
                    let lock = client.mutex(format!("{n}:{}", pairs % 8)).unwrap();
                    pairs += 1;
                    match lock.try_lock().await {
                        Ok(Some(guard)) => {
                            if let Err(error) = guard.unlock().await {
                                errors
                                    .lock()
                                    .unwrap()
                                    .push(format!("unlock: {error} {error:?}"));
                            }
                        }
                        Ok(None) => errors.lock().unwrap().push("busy".into()),
                        Err(error) => errors
                            .lock()
                            .unwrap()
                            .push(format!("try_lock: {error} {error:?}")),
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                pairs
            })
        })
        .collect();
    let longest = there(&cluster, |cluster| {
        let one = || {
            let (master, began) = (cluster.master_of(100).unwrap(), Instant::now());
            cluster.failover(master).unwrap();
            began.elapsed()
        };
        (0..4).map(|_| one()).max().unwrap()
    })
    .await;
    stop.store(true, Ordering::Release);
    let pairs: u32 = join_all(running)
        .await
        .into_iter()
        .map(|task| task.unwrap())
        .sum();
    let mut errors = errors.lock().unwrap();
    // a failover that does not succeed at once pauses clients for 5 s
    errors.retain(|error: &String| {
        longest < Duration::from_secs(2) || !error.contains("no reply within")
    });
    errors.retain(|error| !is_of_the_cluster(error));
    assert!(
        errors.is_empty(),
        "{} of {pairs}: {:#?}",
        errors.len(),
        &errors[..errors.len().min(5)]
    );
}

/// A new master takes longer to accept a connection than the client waits for a broken one: it is
/// slow, not gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_failover_to_a_slow_master_fails_no_call() {
    let cluster = start(3, 3).await;
    let heir = by_way_of_a_proxy(&cluster, 3).await;
    // a failover that does not succeed at once makes masters wait for 5 s
    let limit = Duration::from_secs(20);
    let builder = LockClient::builder()
        .watchdog_timeout(3 * limit)
        .command_timeout(limit);
    let client = builder.connect(cluster.url()).await.unwrap();
    let name = name_at(&cluster, 0);
    heir.rule(|_| Action::Late(Duration::from_millis(900)));
    let is_over = Arc::new(AtomicBool::new(false));
    let running: Vec<_> = (0..16)
        .map(|n| {
            let (lock, is_over) = (
                client.mutex(format!("{{{name}}}{n}")).unwrap(),
                is_over.clone(),
            );
            tokio::spawn(async move {
                let mut errors = Vec::new();
                while !is_over.load(Ordering::Acquire) {
                    match lock.try_lock().await {
                        Ok(Some(guard)) => {
                            if let Err(error) = guard.unlock().await {
                                errors.push(format!("unlock: {error} {error:?}"));
                            }
                        }
                        Ok(None) => errors.push("busy".into()),
                        Err(error) => errors.push(format!("try_lock: {error} {error:?}")),
                    }
                }
                errors
            })
        })
        .collect();
    there(&cluster, |cluster| {
        cluster.failover(&cluster.nodes()[0]).map(drop).unwrap();
    })
    .await;
    within(limit, "it gets a request", || async {
        heir.count(Verb::Acquire) > 0
    })
    .await;
    is_over.store(true, Ordering::Release);
    let mut errors: Vec<String> = join_all(running)
        .await
        .into_iter()
        .flat_map(|runs| runs.unwrap())
        .collect();
    errors.retain(|error| !is_of_the_cluster(error));
    assert!(
        errors.is_empty(),
        "{}: {:#?}",
        errors.len(),
        &errors[..errors.len().min(5)]
    );
}

/// Returns whether masters on a busy machine lost one another for a moment, which is not nestlock's
/// fault.
fn is_of_the_cluster(error: &str) -> bool {
    error.contains("CLUSTERDOWN The cluster is down")
}

/// One owner reads and writes while its keys move one by one: no other owner acquires, and both
/// holds are released.
#[tokio::test]
async fn an_owner_reads_and_writes_while_its_keys_move_one_by_one() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    for (name, record_first) in [("one", false), ("two", true)] {
        let (rw, other) = (
            a.read_write_lock(name).unwrap(),
            b.read_write_lock(name).unwrap(),
        );
        let (writes, reads) = (
            rw.write_lock().lock().await.unwrap(),
            rw.read_lock().lock().await.unwrap(),
        );
        let slot = SpawnedCluster::slot_of(name);
        let to = there(&cluster, move |cluster| {
            let from = cluster.master_of(slot).unwrap();
            let to = cluster
                .nodes()
                .iter()
                .position(|node| node.addr() != from.addr())
                .unwrap();
            let keys = ask(from, &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "9"]);
            assert_eq!(keys.list().len(), 2, "{keys:?}");
            let migration = cluster.begin_migration(slot, &cluster.nodes()[to]).unwrap();
            for key in keys
                .list()
                .iter()
                .filter(|key| (key.text() == name) == record_first)
            {
                assert!(migration.move_key(key.text()).unwrap());
            }
            to
        })
        .await;
        let wait = Duration::from_millis(200);
        let (read, write) = (other.read_lock(), other.write_lock());
        let (read, write) = tokio::join!(read.try_lock_for(wait), write.try_lock_for(wait));
        for got in [read, write] {
            assert!(!matches!(got, Ok(Some(_))), "it is held: {got:?}");
        }
        let ends = tokio::spawn(async move { (reads.unlock().await, writes.unlock().await) });
        tokio::time::sleep(Duration::from_millis(100)).await;
        there(&cluster, move |cluster| {
            cluster.migrate(slot, &cluster.nodes()[to]).unwrap();
        })
        .await;
        let (reads, writes) = ends.await.unwrap();
        reads.and(writes).unwrap();
        other
            .write_lock()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
}

/// If no master will take over, the client polls ever less often, instead of 20 times a second.
#[tokio::test]
async fn a_master_that_stays_away_is_polled_ever_less_often() {
    let args = [
        "--cluster-require-full-coverage",
        "no",
        "--cluster-node-timeout",
        "15000",
    ];
    let cluster =
        tokio::task::spawn_blocking(move || SpawnedCluster::start_with(3, 0, args).unwrap());
    let cluster = Arc::new(cluster.await.unwrap());
    let client = client(&cluster).await;
    let (lock, unserved) = (
        client.mutex(name_at(&cluster, 0)).unwrap(),
        client.mutex(name_at(&cluster, 1)).unwrap(),
    );
    lock.lock().await.unwrap().unlock().await.unwrap();
    let slot = SpawnedCluster::slot_of(unserved.name()).to_string();
    cluster.nodes()[0].kill().unwrap();
    for node in &cluster.nodes()[1..] {
        assert!(!ask(node, &["CLUSTER", "DELSLOTS", &slot]).is_error());
    }
    let asked = || {
        cluster.nodes()[1..]
            .iter()
            .map(|node| asked_for(node, "slots"))
            .sum::<u64>()
    };
    let (before, began) = (asked(), Instant::now());
    while began.elapsed() < Duration::from_secs(6) {
        for lock in [&lock, &unserved] {
            assert!(lock.try_lock().await.unwrap_err().is_transient());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let times = asked() - before;
    assert!(times > 2, "no client polls");
    assert!(times < 60, "queried {times} times");
}

/// A master that refuses everything says nothing about the refusals of another one.
#[tokio::test]
async fn a_master_refusing_renewals_costs_no_hold_of_another_master() {
    let cluster = start(2, 0).await;
    let words = "ACL SETUSER u on >secret ~* &* +@all";
    for node in cluster.nodes() {
        assert!(!ask(node, &words.split(' ').collect::<Vec<_>>()).is_error());
    }
    let url = cluster.url().replacen("://", "://u:secret@", 1);
    let lease = Duration::from_secs(3);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .connect(url)
        .await
        .unwrap();
    let (refuses, serves) = (name_at(&cluster, 0), name_at(&cluster, 1));
    let names = |tag: &str, kind: &str, many: u32| {
        (0..many)
            .map(|n| format!("{{{tag}}}{kind}{n}"))
            .collect::<Vec<_>>()
    };
    let hold = |names: Vec<String>| {
        join_all(names.into_iter().map(|name| {
            let lock = client.mutex(name).unwrap();
            async move { lock.lock().await.unwrap() }
        }))
    };
    // all holds at one master, and a single lock at the other
    let all = hold(names(&refuses, "any", 64)).await;
    let nodes = cluster.nodes();
    assert!(!ask(&nodes[0], &["ACL", "SETUSER", "u", "-evalsha", "-eval"]).is_error());
    within(Duration::from_secs(20), "it refuses", || async {
        !ask(&nodes[0], &["ACL", "LOG"]).list().is_empty()
    })
    .await;
    let (good, bad) = tokio::join!(
        hold(names(&serves, "good", 8)),
        hold(names(&serves, "bad", 1))
    );
    let only = format!("~{{{serves}}}good*");
    assert!(
        !ask(
            &cluster.nodes()[1],
            &["ACL", "SETUSER", "u", "resetkeys", &only]
        )
        .is_error()
    );
    tokio::time::sleep(2 * lease).await;
    let lost = good.iter().filter(|guard| guard.is_lost()).count();
    assert_eq!(lost, 0, "of {}", good.len());
    assert!(all.iter().chain(&bad).all(LockGuard::is_lost));
}

/// A node refuses everything because a slot has no master: one poll serves all waiters, which are
/// all woken when the node serves again.
#[tokio::test]
async fn a_waiter_on_a_down_cluster_hears_when_it_serves_again() {
    const WAITERS: usize = 20;
    let cluster = start(3, 0).await;
    let client = LockClient::builder()
        .outage_patience(Duration::from_secs(60))
        .connect(cluster.url())
        .await
        .unwrap();
    let name = name_at(&cluster, 0);
    let slot = SpawnedCluster::slot_of(&name);
    let unserved = u16::from(slot == 0).to_string();
    let locks: Vec<_> = (0..WAITERS)
        .map(|n| client.mutex(format!("{{{name}}}{n}")).unwrap())
        .collect();
    locks[0].lock().await.unwrap().unlock().await.unwrap();
    let node = &cluster.nodes()[0];
    let asked = || asked_for(node, "info");
    // a stall may spread the waiters in some rounds; with polls of their own, they would be spread
    // in every round
    let mut spreads = Vec::new();
    while spreads
        .last()
        .is_none_or(|spread| *spread >= Duration::from_millis(150))
    {
        assert!(spreads.len() < 5, "{spreads:?}");
        assert!(!ask(node, &["CLUSTER", "DELSLOTS", &unserved]).is_error());
        let (before, began) = (asked(), Instant::now());
        let waits =
            |lock: Lock| tokio::spawn(async move { (lock.lock().await.unwrap(), Instant::now()) });
        let got: Vec<_> = locks.iter().cloned().map(waits).collect();
        // by then each of them pauses for 250 to 500 ms
        tokio::time::sleep(Duration::from_secs(3)).await;
        within(LONG, "a client polls", || async { asked() - before > 3 }).await;
        let (times, took) = (asked() - before, began.elapsed().as_millis() as u64);
        assert!(
            times < 10 + took / 20,
            "queried {times} times within {took} ms, as if each waiter polled by itself"
        );
        assert!(!ask(node, &["CLUSTER", "ADDSLOTS", &unserved]).is_error());
        let got = join_all(got).await.into_iter().map(Result::unwrap);
        let (guards, at): (Vec<_>, Vec<_>) = got.unzip();
        // with pauses of their own, the waiters would be spread over half a second
        spreads.push(*at.iter().max().unwrap() - *at.iter().min().unwrap());
        for guard in guards {
            guard.unlock().await.unwrap();
        }
    }
    let before = asked();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(asked() - before < 3, "it is still polled");
}

/// A client without the permission for CLUSTER INFO is denied once, however many tasks wait, and
/// however long.
#[tokio::test]
async fn a_client_that_may_not_query_its_cluster_tries_once() {
    let cluster = start(3, 0).await;
    let rules = [
        "ACL",
        "SETUSER",
        "u",
        "reset",
        "on",
        ">secret",
        "~*",
        "&*",
        "+@all",
        "-cluster|info",
    ];
    // Redis 6 cannot deny a subcommand
    if cluster
        .nodes()
        .iter()
        .any(|node| ask(node, &rules).is_error())
    {
        return;
    }
    let url = cluster.url().replacen("://", "://u:secret@", 1);
    let client = LockClient::builder()
        .outage_patience(Duration::from_secs(60))
        .connect(url)
        .await
        .unwrap();
    let name = name_at(&cluster, 0);
    let unserved = u16::from(SpawnedCluster::slot_of(&name) == 0).to_string();
    let locks: Vec<_> = (0..20)
        .map(|n| client.mutex(format!("{{{name}}}{n}")).unwrap())
        .collect();
    locks[0].lock().await.unwrap().unlock().await.unwrap();
    let node = &cluster.nodes()[0];
    assert!(!ask(node, &["CLUSTER", "DELSLOTS", &unserved]).is_error());
    let (denied, refused) = (errors(node, "NOPERM"), errors(node, "CLUSTERDOWN"));
    let waits = |lock: nestlock::Lock| {
        tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
    };
    let waiting: Vec<_> = locks.into_iter().map(waits).collect();
    // each of them has tried several times
    within(Duration::from_secs(20), "they are refused", || async {
        errors(node, "CLUSTERDOWN") > refused + 150
    })
    .await;
    assert_eq!(errors(node, "NOPERM") - denied, 1);
    assert!(!ask(node, &["CLUSTER", "ADDSLOTS", &unserved]).is_error());
    for waits in waiting {
        waits.await.unwrap();
    }
}
