//! Clusters of real servers: slots that migrate, masters that are lost, classic and sharded
//! messages.

mod attacks;
mod fake;
mod faults;
mod left;
mod shifted;
mod slow;
mod standing;

use std::{
    collections::{BTreeSet, HashMap},
    ops::RangeInclusive,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{
    Error, Lock, LockClient, LossReason, Messages, NodeRole, Result, Topology, TopologyKind,
    permissions::{CLUSTER, EVERY_CLIENT, rule},
};
use nestlock_embedded::{SpawnedCluster, SpawnedServer};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    bad_server::denied,
    support::{
        Server, eventually,
        proxy::Proxy,
        wire::{Reply, Wire},
        within,
    },
};

const LONG: Duration = Duration::from_secs(20);

async fn start(masters: usize, replicas: usize) -> Arc<SpawnedCluster> {
    // Without replicas, no test loses a master, so a busy machine must not cause a loss either.
    let args = if replicas == 0 {
        vec!["--cluster-node-timeout", "15000"]
    } else {
        Vec::new()
    };
    let start = move || {
        SpawnedCluster::start_with(masters, replicas, args)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    Arc::new(tokio::task::spawn_blocking(start).await.unwrap())
}

/// Runs `what` on a thread that may block.
async fn there<T: Send + 'static>(
    cluster: &Arc<SpawnedCluster>,
    what: impl FnOnce(&SpawnedCluster) -> T + Send + 'static,
) -> T {
    let cluster = Arc::clone(cluster);
    tokio::task::spawn_blocking(move || what(&cluster))
        .await
        .unwrap()
}

async fn client(cluster: &SpawnedCluster) -> LockClient {
    LockClient::connect(cluster.url()).await.unwrap()
}

/// Returns one lock of each kind under a name of its own. `n` spreads the names over many slots.
fn kinds(client: &LockClient, n: u32) -> Vec<(&'static str, Lock)> {
    let name = |kind: &str| format!("{kind}:{n}");
    let of = |lock: Result<Lock>| lock.unwrap();
    vec![
        ("reentrant", of(client.reentrant_lock(name("reentrant")))),
        ("mutex", of(client.mutex(name("mutex")))),
        ("fair", of(client.fair_lock(name("fair")))),
        (
            "write",
            of(client
                .read_write_lock(name("read_write"))
                .map(|lock| lock.write_lock())),
        ),
        ("fenced", of(client.fenced_lock(name("fenced")))),
        ("spin", of(client.spin_lock(name("spin")))),
        ("string", of(client.string_lock(name("string")))),
        ("signal", of(client.signal_lock(format!("signal:{{{n}}}")))),
        (
            "permits",
            of(client
                .permits(name("permits"), 1)
                .and_then(|permits| permits.many(1))),
        ),
        ("multi", {
            let members = (0..4).map(|member| client.mutex(format!("multi:{n}:{member}")).unwrap());
            client.multi_lock(members).unwrap()
        }),
    ]
}

/// Returns a name whose slot this master serves.
fn name_at(cluster: &SpawnedCluster, master: usize) -> String {
    let at = cluster.nodes()[master].addr();
    let mut names = (0..).map(|n| format!("n{n}"));
    names
        .find(|name| {
            cluster
                .master_of(SpawnedCluster::slot_of(name))
                .unwrap()
                .addr()
                == at
        })
        .unwrap()
}

fn port(server: &SpawnedServer) -> u16 {
    server.addr().port()
}

/// Sends a command to a node and returns its reply.
fn ask(server: &SpawnedServer, words: &[&str]) -> Reply {
    Wire::connect(server.addr()).unwrap().call(words).unwrap()
}

/// Starts a proxy for a node. From now on, all connections to this node go through it.
async fn by_way_of_a_proxy(cluster: &SpawnedCluster, node: usize) -> Proxy {
    let proxy = Proxy::to(cluster.nodes()[node].addr());
    let port = proxy.addr().port().to_string();
    ask(
        &cluster.nodes()[node],
        &["CONFIG", "SET", "cluster-announce-port", &port],
    );
    let announced = format!(":{port}@");
    let knows = |node: &SpawnedServer| ask(node, &["CLUSTER", "NODES"]).text().contains(&announced);
    within(LONG, "all know its new port", || async {
        cluster.nodes().iter().all(knows)
    })
    .await;
    proxy
}

/// Begins to migrate the slot, and migrates those of its keys that `moves` selects. Returns the
/// index of the target node.
async fn begin_to_move(
    cluster: &Arc<SpawnedCluster>,
    slot: u16,
    moves: impl Fn(&str) -> bool + Send + 'static,
) -> usize {
    there(cluster, move |cluster| {
        let from = cluster.master_of(slot).unwrap();
        let to = cluster
            .nodes()
            .iter()
            .position(|node| node.addr() != from.addr())
            .unwrap();
        let keys = ask(from, &["CLUSTER", "GETKEYSINSLOT", &slot.to_string(), "99"]);
        let migration = cluster.begin_migration(slot, &cluster.nodes()[to]).unwrap();
        for key in keys.list().iter().filter(|key| moves(key.text())) {
            assert!(migration.move_key(key.text()).unwrap());
        }
        to
    })
    .await
}

/// Returns whether the cluster has sharded messages. Redis 6 has none.
fn knows_sharded(cluster: &SpawnedCluster) -> bool {
    ask(&cluster.nodes()[0], &["COMMAND", "INFO", "SPUBLISH"]).list() != [Reply::Nil]
}

/// Returns the number of calls of each command since the node's statistics were reset.
fn calls(server: &SpawnedServer) -> HashMap<String, u64> {
    let info = ask(server, &["INFO", "commandstats"]);
    info.text()
        .lines()
        .filter_map(|line| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            Some((name.to_owned(), rest.split(',').next()?.parse().ok()?))
        })
        .collect()
}

/// Returns how often a node has received this `CLUSTER` subcommand. Where the server counts no
/// subcommands (Redis 6), returns the number of all `CLUSTER` calls.
fn asked_for(server: &SpawnedServer, what: &str) -> u64 {
    let calls = calls(server);
    calls
        .get(&format!("cluster|{what}"))
        .or(calls.get("cluster"))
        .copied()
        .unwrap_or(0)
}

/// Returns how often a node has replied with this error.
fn errors(server: &SpawnedServer, error: &str) -> u64 {
    let stats = ask(server, &["INFO", "errorstats"]);
    let line = format!("errorstat_{error}:count=");
    stats
        .text()
        .lines()
        .find_map(|stat| stat.strip_prefix(&line)?.trim().parse().ok())
        .unwrap_or(0)
}

#[tokio::test]
async fn each_kind_excludes_and_wakes_wherever_its_slot_is() {
    let cluster = start(3, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    for n in 0..8 {
        let both = kinds(&a, n).into_iter().zip(kinds(&b, n));
        join_all(both.map(|((kind, held), (_, waits))| async move {
            let guard = held
                .lock()
                .await
                .unwrap_or_else(|error| panic!("{kind}: {error}"));
            assert!(waits.try_lock().await.unwrap().is_none(), "{kind} {n}");
            let waiting = tokio::spawn(async move { waits.lock().await.unwrap().unlock().await });
            tokio::time::sleep(Duration::from_millis(20)).await;
            guard
                .unlock()
                .await
                .unwrap_or_else(|error| panic!("{kind}: {error}"));
            waiting
                .await
                .unwrap()
                .unwrap_or_else(|error| panic!("{kind}: {error}"));
        }))
        .await;
    }
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
}

/// A signal lock has two keys with different prefixes.
/// Its counter, its leases and its requests are in one slot, whatever the name.
#[tokio::test]
async fn a_semaphore_is_changed_wherever_its_slot_is() {
    let cluster = start(3, 0).await;
    let (client, other) = (self::client(&cluster).await, self::client(&cluster).await);
    for name in ["s", "t", "u", "{0}s", "a{b}c"] {
        let [semaphore, theirs] = [&client, &other].map(|client| client.semaphore(name).unwrap());
        assert!(semaphore.try_set_permits(1).await.unwrap(), "{name}");
        let held = semaphore.acquire().await.unwrap();
        let waits = {
            let theirs = theirs.clone();
            tokio::spawn(async move { theirs.acquire_many(2).await })
        };
        eventually("it waits", || async { other.stats().waiters == 1 }).await;
        held.unlock().await.unwrap();
        theirs.add_permits(1).await.unwrap();
        let both = waits.await.unwrap().unwrap();
        theirs.forget(&both).await.unwrap();
        semaphore.add_permits(3).await.unwrap();
        assert_eq!(semaphore.drain_permits().await.unwrap(), 3, "{name}");
    }
}

/// Its waiters listen at the node of its slot.
#[tokio::test]
async fn a_latch_opens_wherever_its_slot_is() {
    let cluster = start(3, 0).await;
    let builder = |url: String| LockClient::builder().poll_cap(10 * LONG).connect(url);
    let client = self::client(&cluster).await;
    let other = builder(cluster.url()).await.unwrap();
    for name in ["s", "t", "u"] {
        let latch = client.count_down_latch(name).unwrap();
        let theirs = other.count_down_latch(name).unwrap();
        assert!(latch.try_set_count(2).await.unwrap(), "{name}");
        let waits = tokio::spawn(async move { theirs.wait().await });
        eventually("it waits", || async { other.stats().waiters == 1 }).await;
        assert_eq!(latch.count_down().await.unwrap(), 1);
        assert_eq!(latch.count_down_as("last").await.unwrap(), 0);
        tokio::time::timeout(LONG, waits)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
}

/// Also if that takes longer than any patience: whether its key is still there, or was moved.
#[tokio::test]
async fn a_latch_is_looked_at_while_its_slot_moves() {
    for is_moved in [false, true] {
        let cluster = start(2, 0).await;
        let client = client(&cluster).await;
        let latch = client.count_down_latch("s").unwrap();
        assert!(latch.try_set_count(1).await.unwrap());
        begin_to_move(&cluster, SpawnedCluster::slot_of("s"), move |_| is_moved).await;
        for _ in 0..3 {
            assert_eq!(latch.count().await.unwrap(), 1);
        }
        assert!(!latch.wait_for(Duration::from_millis(50)).await.unwrap());
    }
}

#[tokio::test]
async fn a_lock_unfit_for_a_cluster_is_refused_before_any_request() {
    let cluster = start(1, 0).await;
    let client = client(&cluster).await;
    let error = client.signal_lock("untagged").unwrap_err();
    assert!(
        matches!(&error, Error::InvalidName { reason, .. } if reason.contains("braces")),
        "{error}"
    );
    let at = cluster.nodes()[0].addr();
    for (url, wanted) in [
        (format!("redis-cluster://{at}/1"), "one database"),
        // without the feature: it needs it; with it: not in a cluster
        (format!("redis-cluster://{at}?wire=fred"), "fred"),
    ] {
        let error = LockClient::connect(url).await.unwrap_err();
        assert!(
            matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains(wanted)),
            "{error}"
        );
    }
    let one = Server::start_real();
    let error = LockClient::connect(format!("redis-cluster://{}", one.addr()))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains("redis://")),
        "{error}"
    );
}

/// A Valkey 9 cluster has as many databases as configured, and all others have one.
#[tokio::test]
async fn a_cluster_may_have_several_databases() {
    let Ok(cluster) = SpawnedCluster::start_with(
        3,
        0,
        [
            "--cluster-node-timeout",
            "15000",
            "--cluster-databases",
            "4",
        ],
    ) else {
        let cluster = start(3, 0).await;
        let error = LockClient::connect(format!("{}/3", cluster.url()))
            .await
            .unwrap_err();
        assert!(
            matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains("one database")),
            "{error}"
        );
        return;
    };
    let (first, third) = (
        format!("{}/0", cluster.url()),
        format!("{}/3", cluster.url()),
    );
    let [first, third, other] = [first, third.clone(), third];
    let [first, third, other] = [
        LockClient::connect(first),
        LockClient::connect(third),
        LockClient::connect(other),
    ];
    let (first, third, other) = futures::join!(first, third, other);
    let (first, third, other) = (first.unwrap(), third.unwrap(), other.unwrap());
    for name in ["a", "b", "c", "d"] {
        let guard = third.mutex(name).unwrap().lock().await.unwrap();
        // The same name in another database is another lock.
        assert!(
            first
                .mutex(name)
                .unwrap()
                .try_lock()
                .await
                .unwrap()
                .is_some()
        );
        let lock = other.mutex(name).unwrap();
        assert!(lock.try_lock().await.unwrap().is_none());
        let waiter = tokio::spawn(async move { lock.lock().await.unwrap().unlock().await });
        // A new connection selects the same database.
        for node in cluster.nodes() {
            Wire::connect(node.addr())
                .unwrap()
                .call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
                .unwrap();
        }
        guard.unlock().await.unwrap();
        waiter.await.unwrap().unwrap();
    }
    let error = LockClient::connect(format!("{}/4", cluster.url()))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains("no such database")),
        "{error}"
    );
}

/// One node of several is not the standalone server that it seems to be.
#[tokio::test]
async fn a_node_of_a_cluster_is_no_server_of_its_own() {
    let cluster = start(3, 0).await;
    let error = LockClient::connect(cluster.nodes()[0].url())
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::InvalidConfig { reason, .. } if reason.contains("redis-cluster://")),
        "{error}"
    );
}

/// The user has exactly the guide's rules, at each node.
#[tokio::test]
async fn the_rules_for_users_of_clusters_are_enough() {
    let cluster = start(3, 0).await;
    // Redis 6 has no sharded messages, and no rules for them.
    let sharded = knows_sharded(&cluster);
    let unknown =
        |command: &str| !sharded && ["spublish", "ssubscribe", "sunsubscribe"].contains(&command);
    let some = CLUSTER.commands.iter().filter(|command| !unknown(command));
    let commands = EVERY_CLIENT.commands.iter().chain(some);
    let patterns = EVERY_CLIENT
        .keys
        .iter()
        .chain(EVERY_CLIENT.channels)
        .map(|pattern| rule(pattern, "app:"));
    let rules: Vec<String> = patterns
        .chain(commands.map(|command| format!("+{command}")))
        .collect();
    let words: Vec<&str> = [
        "ACL",
        "SETUSER",
        "u",
        "reset",
        "on",
        ">secret",
        "resetchannels",
    ]
    .into_iter()
    .chain(rules.iter().map(String::as_str))
    .collect();
    for node in cluster.nodes() {
        assert!(!ask(node, &words).is_error());
    }
    let url = cluster.url().replacen("://", "://u:secret@", 1);
    let (a, b) = (
        LockClient::connect(&url).await.unwrap(),
        LockClient::connect(&url).await.unwrap(),
    );
    for n in 0..3 {
        let name = format!("app:{n}");
        let guard = a.mutex(&name).unwrap().lock().await.unwrap();
        let waits = b.mutex(&name).unwrap();
        let waiting = tokio::spawn(async move { waits.lock().await.unwrap().unlock().await });
        eventually("it waits", || async { b.stats().waiters == 1 }).await;
        let slot = SpawnedCluster::slot_of(&name);
        there(&cluster, move |cluster| {
            let from = cluster.master_of(slot).unwrap().addr();
            let to = cluster
                .nodes()
                .iter()
                .find(|node| node.addr() != from)
                .unwrap();
            let migration = cluster.begin_migration(slot, to).unwrap();
            assert!(migration.move_key(&name).unwrap());
        })
        .await;
        // This release follows ASK.
        guard.unlock().await.unwrap();
        waiting.await.unwrap().unwrap();
    }
    for node in cluster.nodes() {
        assert_eq!(
            denied(&ask(node, &["ACL", "LOG"])),
            BTreeSet::new(),
            "at {}",
            port(node)
        );
    }
}

/// One reachable address is enough. If none replies, the error names each address, and their common
/// reason once, but no password.
#[tokio::test]
async fn any_node_that_replies_is_enough() {
    let cluster = start(3, 0).await;
    let dead = "127.0.0.1:1";
    let [a, b, c] = [0, 1, 2].map(|n| cluster.nodes()[n].addr());
    let url = format!("redis-cluster://{dead},{a},{b},{c}");
    let client = LockClient::connect(url).await.unwrap();
    for n in 0..9 {
        client
            .mutex(format!("l{n}"))
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    // Of all connections that were tried, one to each node stays.
    let of_ours = |node: &SpawnedServer| {
        ask(node, &["CLIENT", "LIST"])
            .text()
            .matches("name=nestlock:")
            .count()
    };
    eventually("one connection each", || async {
        cluster.nodes().iter().all(|node| of_ours(node) == 1)
    })
    .await;
    let error = LockClient::connect(format!("redis-cluster://u:secret@{dead},127.0.0.1:2"))
        .await
        .unwrap_err();
    let text = format!("{error} {error:?}");
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    let names_each = ["127.0.0.1:1, 127.0.0.1:2: ", "127.0.0.1:2, 127.0.0.1:1: "]
        .iter()
        .any(|each| text.contains(each));
    assert!(names_each && !text.contains("secret"), "{text}");
}

/// On the hot path, a lock is one request, an unlock is one request, and there is nothing else.
#[tokio::test]
async fn an_uncontended_pair_is_two_commands() {
    let cluster = start(3, 0).await;
    let client = client(&cluster).await;
    let lock = client.reentrant_lock("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let nodes = cluster.nodes();
    for node in nodes {
        ask(node, &["CONFIG", "RESETSTAT"]);
    }
    for _ in 0..100 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    let mut all: HashMap<String, u64> = HashMap::new();
    for (name, count) in nodes.iter().flat_map(calls) {
        *all.entry(name).or_default() += count;
    }
    assert_eq!(all.get("evalsha"), Some(&200), "{all:?}");
    assert!(
        !all.contains_key("eval") && !all.contains_key("asking"),
        "{all:?}"
    );
}

/// Returns the slot of this kind's lock, or of a multi-lock's first member.
fn slot(kind: &str, n: u32) -> u16 {
    SpawnedCluster::slot_of(match kind {
        "signal" => format!("{{{n}}}"),
        "write" => format!("read_write:{n}"),
        "multi" => format!("multi:{n}:0"),
        _ => format!("{kind}:{n}"),
    })
}

/// Migrates slots all the time, together with the locks held in them. Each slot moves once: servers
/// lose keys of slots that go back and forth.
async fn through_migrations(
    messages: Messages,
    names: u32,
    tasks: u32,
    holds: RangeInclusive<u64>,
) {
    let cluster = start(3, 0).await;
    let connect = || {
        LockClient::builder()
            .messages(messages)
            .command_timeout(Duration::from_secs(10))
            .connect(cluster.url())
    };
    let clients = [connect().await.unwrap(), connect().await.unwrap()];
    let (stop, releases) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(Mutex::new(Vec::new())),
    );
    let slots: Vec<u16> = (0..names)
        .flat_map(|n| {
            kinds(&clients[0], n)
                .into_iter()
                .map(move |(kind, _)| slot(kind, n))
        })
        .collect();
    let each = slots.len() / names as usize;
    let inside: Arc<Vec<AtomicU32>> = Arc::new(slots.iter().map(|_| AtomicU32::new(0)).collect());
    // The tasks use the lock that is being migrated.
    let at = Arc::new(AtomicU32::new(0));
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let (client, kind) = (clients[task as usize % 2].clone(), task as usize / 2 % each);
            let (stop, releases, inside, at) = (
                Arc::clone(&stop),
                Arc::clone(&releases),
                Arc::clone(&inside),
                Arc::clone(&at),
            );
            let mut random = StdRng::seed_from_u64(u64::from(task));
            let holds = holds.clone();
            tokio::spawn(async move {
                while !stop.load(Ordering::Acquire) {
                    let n = at.load(Ordering::Acquire);
                    let (name, lock) = kinds(&client, n).swap_remove(kind);
                    let guard = lock
                        .lock()
                        .await
                        .map_err(|error| format!("{name}: {error}"))?;
                    let inside = &inside[n as usize * each + kind];
                    assert_eq!(
                        inside.fetch_add(1, Ordering::AcqRel),
                        0,
                        "{name} {n} is held twice"
                    );
                    tokio::time::sleep(Duration::from_millis(random.random_range(holds.clone())))
                        .await;
                    inside.fetch_sub(1, Ordering::AcqRel);
                    let start = Instant::now();
                    guard
                        .unlock()
                        .await
                        .map_err(|error| format!("{name}, unlock: {error}"))?;
                    releases.lock().unwrap().push(start.elapsed());
                }
                Ok::<_, String>(())
            })
        })
        .collect();
    let migrations = slots.len();
    there(&cluster, move |cluster| {
        for (n, slot) in slots.into_iter().enumerate() {
            at.store((n / each) as u32, Ordering::Release);
            let from = cluster.master_of(slot).unwrap().addr();
            let to = cluster
                .nodes()
                .iter()
                .filter(|node| node.addr() != from)
                .nth(n % 2)
                .unwrap();
            cluster
                .migrate(slot, to)
                .unwrap_or_else(|error| panic!("{error}: {}", cluster.view()));
        }
    })
    .await;
    stop.store(true, Ordering::Release);
    for task in running {
        task.await.unwrap().unwrap();
    }
    let mut took = std::mem::take(&mut *releases.lock().unwrap());
    took.sort_unstable();
    let of_all = |permille: usize| took[(took.len() - 1) * permille / 1000];
    let redirects = ["MOVED", "ASK", "TRYAGAIN"].map(|error| {
        let count = |node: &SpawnedServer| errors(node, error);
        format!("{} {error}", cluster.nodes().iter().map(count).sum::<u64>())
    });
    println!(
        "{migrations} migrations, {tasks} tasks, holds of {holds:?} ms: {} pairs; {}; a release took {:?}, 999 of 1,000 \
         {:?}, the longest {:?}",
        took.len(),
        redirects.join(", "),
        of_all(500),
        of_all(999),
        of_all(1000),
    );
    for client in clients {
        client.shutdown().await.unwrap();
    }
    for node in cluster.nodes() {
        let left = ask(node, &["KEYS", "*"]);
        // Tokens and numbers of permits are kept, and signals expire a second later. A permit that was
        // given back by its set alone stays in it, expired.
        let stays = ["fence", "signal", "permits"];
        let is_left = |key: &&Reply| !stays.iter().any(|word| key.text().contains(word));
        let left: Vec<_> = left.list().iter().filter(is_left).collect();
        assert!(left.is_empty(), "left behind at {}: {left:?}", port(node));
    }
}

/// No lock is held twice or lost while slots move and messages are sharded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_move_doubles_and_loses_no_hold_with_sharded_messages() {
    through_migrations(Messages::Auto, 10, 40, 1..=1).await;
}

/// No lock is held twice or lost while slots move and messages are classic.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_move_doubles_and_loses_no_hold_with_classic_messages() {
    through_migrations(Messages::Classic, 10, 40, 1..=1).await;
}

/// A hold is renewed wherever it moves, for longer than its lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_is_renewed_wherever_it_moves() {
    let lease = Duration::from_secs(4);
    let cluster = start(3, 0).await;
    let connect = || {
        LockClient::builder()
            .watchdog_timeout(lease)
            .connect(cluster.url())
    };
    let (client, other) = (connect().await.unwrap(), connect().await.unwrap());
    let all: Vec<(u16, &str, Lock)> = (0..5)
        .flat_map(|n| {
            kinds(&client, n)
                .into_iter()
                .map(move |(kind, lock)| (slot(kind, n), kind, lock))
        })
        .collect();
    let held = join_all(
        all.iter()
            .map(|(_, kind, lock)| async move { (*kind, lock.lock().await.unwrap()) }),
    )
    .await;
    let slots: Vec<u16> = all.iter().map(|(slot, ..)| *slot).collect();
    there(&cluster, move |cluster| {
        let pause = 2 * lease / slots.len() as u32;
        for (n, slot) in slots.into_iter().enumerate() {
            let from = cluster.master_of(slot).unwrap().addr();
            let to = cluster
                .nodes()
                .iter()
                .filter(|node| node.addr() != from)
                .nth(n % 2)
                .unwrap();
            cluster
                .migrate(slot, to)
                .unwrap_or_else(|error| panic!("{error}: {}", cluster.view()));
            std::thread::sleep(pause);
        }
    })
    .await;
    for (kind, lock) in (0..5).flat_map(|n| kinds(&other, n)) {
        assert!(lock.try_lock().await.unwrap().is_none(), "{kind} is held");
    }
    for (kind, guard) in held {
        assert!(!guard.is_lost(), "{kind}");
        guard
            .unlock()
            .await
            .unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: the figures of BENCHMARKS.md"]
async fn a_thousand_migrations() {
    for messages in [Messages::Auto, Messages::Classic] {
        for holds in [1..=1, 50..=250] {
            through_migrations(messages, 112, 32, holds).await;
        }
    }
}

/// Only one of two keys in a slot has moved. A client that remembers ASK for the slot would query
/// the new master for a key that the old one still has.
#[tokio::test]
async fn asking_is_never_remembered() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    let lock =
        |client: &LockClient, name: &str| client.reentrant_lock(format!("{{tag}}{name}")).unwrap();
    let (stays, moves) = (
        lock(&a, "stays").lock().await.unwrap(),
        lock(&a, "moves").lock().await.unwrap(),
    );
    let slot = SpawnedCluster::slot_of("{tag}");
    there(&cluster, move |cluster| {
        let from = cluster.master_of(slot).unwrap().addr();
        let to = cluster
            .nodes()
            .iter()
            .find(|node| node.addr() != from)
            .unwrap();
        let migration = cluster.begin_migration(slot, to).unwrap();
        assert!(migration.move_key("{tag}moves").unwrap());
    })
    .await;
    for _ in 0..3 {
        assert!(
            lock(&b, "moves").try_lock().await.unwrap().is_none(),
            "held, at the new master"
        );
        assert!(
            lock(&b, "stays").try_lock().await.unwrap().is_none(),
            "held, at the old master"
        );
    }
    moves.unlock().await.unwrap();
    stays.unlock().await.unwrap();
    for name in ["moves", "stays"] {
        lock(&b, name)
            .try_lock()
            .await
            .unwrap()
            .expect("it is free")
            .unlock()
            .await
            .unwrap();
    }
}

/// A release that followed ASK would free the record that another reader holds, because the key of
/// that reader's hold may not have moved.
#[tokio::test]
async fn a_reader_stays_while_another_leaves_in_a_migration() {
    let cluster = start(2, 0).await;
    let (a, b, w) = (
        client(&cluster).await,
        client(&cluster).await,
        client(&cluster).await,
    );
    let readers = |client: &LockClient| client.read_write_lock("l").unwrap().read_lock();
    let (one, two) = (
        readers(&a).lock().await.unwrap(),
        readers(&b).lock().await.unwrap(),
    );
    let slot = SpawnedCluster::slot_of("l");
    let to = begin_to_move(&cluster, slot, |key| key == "l").await;
    let leaves = tokio::spawn(one.unlock());
    tokio::time::sleep(Duration::from_millis(100)).await;
    let mut imports = Wire::connect(cluster.nodes()[to].addr()).unwrap();
    imports.call(&["ASKING"]).unwrap();
    assert_eq!(
        imports.call(&["EXISTS", "l"]).unwrap().int(),
        1,
        "the other reader's record"
    );
    there(&cluster, move |cluster| {
        cluster.migrate(slot, &cluster.nodes()[to]).unwrap();
    })
    .await;
    leaves.await.unwrap().unwrap();
    let write = w.read_write_lock("l").unwrap().write_lock();
    assert!(
        write.try_lock().await.unwrap().is_none(),
        "another owner reads"
    );
    two.unlock().await.unwrap();
    write.lock().await.unwrap().unlock().await.unwrap();
}

/// Loses the master of a slot whose locks are held and waited for. Each hold survives or its guard
/// is notified, and all waiters get the lock.
///
/// With `told`, the old master keeps running, and a waiter's own hold may be lost too. Until the
/// old master learns of its demotion, a client that has not left it may release a lock there, and
/// another client may acquire it without the rest of the cluster.
async fn through_a_failover(
    each: usize,
    told: bool,
    lose: impl FnOnce(&SpawnedCluster, &SpawnedServer) + Send + 'static,
) {
    let cluster = start(3, 3).await;
    let connect = || {
        LockClient::builder()
            .outage_patience(Duration::from_secs(30))
            .connect(cluster.url())
    };
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    let slot = SpawnedCluster::slot_of("{0}");
    // All locks are in one slot, whose master is lost.
    let all = |client: &LockClient| {
        let rw = client.read_write_lock("{0}rw").unwrap();
        vec![
            client.mutex("{0}mutex").unwrap(),
            client.reentrant_lock("{0}reentrant").unwrap(),
            client.non_reentrant_lock("{0}non-reentrant").unwrap(),
            client.fair_lock("{0}fair").unwrap(),
            rw.write_lock(),
            client.fenced_lock("{0}fenced").unwrap(),
            client.spin_lock("{0}spin").unwrap(),
            client.signal_lock("{0}signal").unwrap(),
            client.string_lock("{0}string").unwrap(),
            client.permits("{0}permits", 1).unwrap().many(1).unwrap(),
            client
                .multi_lock(
                    [1, 2].map(|member| client.mutex(format!("{{0}}multi:{member}")).unwrap()),
                )
                .unwrap(),
        ]
    };
    let readers = b.read_write_lock("{0}rw").unwrap().read_lock();
    let held = join_all(
        all(&a)
            .iter()
            .map(|lock| async move { lock.lock().await.unwrap() }),
    )
    .await;
    let waiters: Vec<_> = (0..each)
        .flat_map(|_| all(&b).into_iter().chain([readers.clone()]))
        .map(|lock| tokio::spawn(async move { lock.lock().await?.unlock().await }))
        .collect();
    // Spin and string locks poll, and in a cluster signal locks do too.
    eventually("they wait", || async {
        b.stats().waiters == waiters.len() - 3 * each
    })
    .await;
    there(&cluster, move |cluster| {
        // The replicas need time to receive the grants.
        std::thread::sleep(Duration::from_millis(50));
        let master = cluster.master_of(slot).unwrap();
        lose(cluster, master);
    })
    .await;
    // Each hold either survived on the servers or is reported as lost.
    for guard in held {
        match guard.unlock().await {
            Ok(()) | Err(Error::Lost { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    for waiter in waiters {
        match tokio::time::timeout(Duration::from_secs(30), waiter)
            .await
            .expect("it waits in vain")
            .unwrap()
        {
            Ok(()) => {}
            Err(Error::Lost {
                reason: LossReason::RecordMissing | LossReason::TakenOver,
                ..
            }) if told => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    let (a, b) = tokio::join!(a.shutdown(), b.shutdown());
    a.and(b).unwrap();
}

#[tokio::test]
async fn waiters_outlive_a_master_that_is_killed() {
    through_a_failover(100, false, |cluster, master| {
        master.kill().unwrap();
        cluster.wait_until_settled().unwrap();
    })
    .await;
}

#[tokio::test]
async fn waiters_outlive_a_master_that_hangs() {
    through_a_failover(5, true, |cluster, master| {
        master.stop().unwrap();
        cluster.wait_until_settled().unwrap();
        master.cont().unwrap();
    })
    .await;
}

#[tokio::test]
async fn waiters_outlive_a_graceful_failover() {
    through_a_failover(5, false, |cluster, master| {
        _ = cluster.failover(master).unwrap();
    })
    .await;
}

/// A master that was replaced while it slept gets no more requests when it wakes: the cluster would
/// not know of its grants.
#[tokio::test]
async fn a_master_that_was_replaced_is_left() {
    let cluster = start(3, 3).await;
    let client = LockClient::builder()
        .outage_patience(Duration::from_secs(30))
        .connect(cluster.url())
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let slot = SpawnedCluster::slot_of("l");
    let old = there(&cluster, move |cluster| {
        let old = cluster.master_of(slot).unwrap();
        old.stop().unwrap();
        old.addr()
    })
    .await;
    // The sleeping master gets the request, and its successor sends the reply.
    let guard = lock.lock().await.unwrap();
    there(&cluster, move |cluster| {
        let node = cluster
            .nodes()
            .iter()
            .find(|node| node.addr() == old)
            .unwrap();
        node.cont().unwrap();
        cluster.wait_until_settled().unwrap();
        assert_ne!(cluster.master_of(slot).unwrap().addr(), old);
        // Wait until the node has woken and has seen which connections were closed.
        let start = Instant::now();
        while ask(node, &["CLIENT", "LIST"])
            .text()
            .contains("name=nestlock:")
        {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "{}",
                ask(node, &["CLIENT", "LIST"]).text()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    })
    .await;
    guard.unlock().await.unwrap();
}

/// With a poll cap of 30 s, only a message wakes a waiter in time, also after the slot has moved.
async fn wakes_after_a_move(messages: Messages) {
    let cluster = start(3, 0).await;
    let connect = || {
        LockClient::builder()
            .messages(messages)
            .poll_cap(Duration::from_secs(30))
            .connect(cluster.url())
    };
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    let slot = SpawnedCluster::slot_of("l");
    for _ in 0..3 {
        let guard = a.mutex("l").unwrap().lock().await.unwrap();
        let waits = b.mutex("l").unwrap();
        let waiting = tokio::spawn(async move { waits.lock().await.unwrap().unlock().await });
        eventually("it waits", || async { b.stats().waiters == 1 }).await;
        there(&cluster, move |cluster| {
            let from = cluster.master_of(slot).unwrap().addr();
            let to = cluster
                .nodes()
                .iter()
                .find(|node| node.addr() != from)
                .unwrap();
            cluster.migrate(slot, to).unwrap();
        })
        .await;
        let (channel, nodes) = ("redisson_lock__channel:{l}", cluster.nodes());
        let verb = if messages == Messages::Classic {
            "NUMSUB"
        } else {
            "SHARDNUMSUB"
        };
        // With classic messages, the client gets no notice of the move and checks every 5 s.
        within(
            Duration::from_secs(20),
            "it listens at the new master, and nowhere else",
            || async {
                let listens =
                    |node: &SpawnedServer| ask(node, &["PUBSUB", verb, channel]).list()[1].int();
                let home = there(&cluster, move |cluster| {
                    port(cluster.master_of(slot).unwrap())
                })
                .await;
                nodes
                    .iter()
                    .all(|node| listens(node) == i64::from(port(node) == home))
            },
        )
        .await;
        let released = Instant::now();
        guard.unlock().await.unwrap();
        waiting.await.unwrap().unwrap();
        assert!(
            released.elapsed() < Duration::from_secs(10),
            "{:?}",
            released.elapsed()
        );
    }
    // The client must not retry an unsubscribe forever at a node that the slot has left.
    let refused = || -> u64 {
        cluster
            .nodes()
            .iter()
            .map(|node| errors(node, "MOVED"))
            .sum()
    };
    eventually("no client is refused any more", || async {
        let before = refused();
        tokio::time::sleep(Duration::from_millis(500)).await;
        refused() == before
    })
    .await;
}

/// A waiter is notified by sharded messages after its slot has moved.
#[tokio::test]
async fn a_waiter_wakes_after_its_slot_moved_with_sharded_messages() {
    let cluster = start(1, 0).await;
    if !knows_sharded(&cluster) {
        let error = LockClient::builder()
            .messages(Messages::Sharded)
            .connect(cluster.url())
            .await
            .unwrap_err();
        assert!(
            error.to_string().contains("use Messages::Classic"),
            "{error}"
        );
        return;
    }
    wakes_after_a_move(Messages::Sharded).await;
}

/// A waiter is notified by classic messages after its slot has moved.
#[tokio::test]
async fn a_waiter_wakes_after_its_slot_moved_with_classic_messages() {
    wakes_after_a_move(Messages::Classic).await;
}

#[tokio::test]
async fn a_topology_names_each_master_with_its_slots_and_goes_along() {
    let cluster = start(3, 3).await;
    let client = client(&cluster).await;
    let replicas = |topology: &Topology| {
        topology
            .nodes
            .iter()
            .filter(|node| node.role == NodeRole::Replica)
            .count()
    };
    // The first map may come before the replicas are known.
    within(Duration::from_secs(20), "replicas", || async {
        replicas(&client.topology()) == 3
    })
    .await;
    let before = client.topology();
    assert_eq!(before.kind, TopologyKind::Cluster);
    let masters = |topology: &Topology| -> Vec<String> {
        let masters = topology
            .nodes
            .iter()
            .filter(|node| node.role == NodeRole::Master);
        masters.map(|node| node.address.clone()).collect()
    };
    let slots: usize = before
        .nodes
        .iter()
        .flat_map(|node| &node.slots)
        .map(|slots| slots.clone().count())
        .sum();
    assert_eq!((masters(&before).len(), slots), (3, 16384), "{before}");
    assert!(
        before
            .nodes
            .iter()
            .all(|node| node.since.is_some() == (node.role == NodeRole::Master))
    );
    let at = cluster.nodes()[0].addr().to_string();
    let new = there(&cluster, |cluster| {
        cluster
            .failover(&cluster.nodes()[0])
            .unwrap()
            .addr()
            .to_string()
    })
    .await;
    within(Duration::from_secs(20), "the new master", || async {
        let masters = masters(&client.topology());
        masters.contains(&new) && !masters.contains(&at) && masters.len() == 3
    })
    .await;
}
