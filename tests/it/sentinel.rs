//! A service whose master changes: behind sentinels, and at one of several addresses.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use nestlock::{
    Error, Lock, LockClient, LockClientBuilder, LockGuard, LossReason, NodeRole, RedLockOptions,
    StoreErrorKind, TopologyKind,
};
use nestlock_embedded::{SpawnedSentinel, SpawnedServer};
use tokio::task::block_in_place;

use crate::support::{
    Server,
    proxy::{is_over_fred, with_wire},
    wire::{Reply, Wire},
    within,
};

/// Longest wait for a failover. A failover takes 2 s, or 8 s after a split vote of the sentinels,
/// and the tests run theirs concurrently.
const LONG: Duration = Duration::from_secs(120);

pub fn start(replicas: usize, sentinels: usize) -> SpawnedSentinel {
    block_in_place(|| {
        SpawnedSentinel::start(replicas, sentinels).unwrap_or_else(|error| panic!("{error}"))
    })
}

fn builder() -> LockClientBuilder {
    LockClient::builder()
        .outage_patience(LONG)
        .connect_timeout(Duration::from_secs(20))
}

async fn client_of(group: &SpawnedSentinel) -> LockClient {
    builder().connect(with_wire(group.url())).await.unwrap()
}

/// Waits until most sentinels name another master, and returns that master.
fn another<'g>(group: &'g SpawnedSentinel, old: &SpawnedServer) -> &'g SpawnedServer {
    block_in_place(|| group.wait_for_another_master(old)).unwrap_or_else(|error| panic!("{error}"))
}

pub fn call(addr: SocketAddr, parts: &[&str]) -> Reply {
    Wire::connect(addr).unwrap().call(parts).unwrap()
}

/// Returns the number of scripts that the server has run or refused.
fn scripts(addr: SocketAddr) -> u64 {
    // sentinels cut off the connections of a server that they reconfigure
    let stats = (0..20).find_map(|_| {
        Wire::connect(addr)
            .ok()?
            .call(&["INFO", "commandstats"])
            .ok()
    });
    let stats = stats.expect("a server that runs");
    let of = |line: &str| {
        let (_, rest) = line.strip_prefix("cmdstat_eval")?.split_once(":calls=")?;
        rest.split(',').next()?.parse::<u64>().ok()
    };
    stats.text().lines().filter_map(of).sum()
}

/// Returns the number of nestlock's connections to the server.
fn connections(addr: SocketAddr) -> usize {
    call(addr, &["CLIENT", "LIST"])
        .text()
        .matches("name=nestlock:")
        .count()
}

/// Waits until all servers of the group have as many keys as the master.
async fn replicated(group: &SpawnedSentinel) {
    let keys = |server: &SpawnedServer| call(server.addr(), &["DBSIZE"]).int();
    within(LONG, "the replicas have what the master has", || async {
        let expected = keys(&group.servers()[0]);
        expected > 0
            && group
                .servers()
                .iter()
                .all(|server| keys(server) == expected)
    })
    .await;
}

/// Returns one lock of each kind.
fn kinds(client: &LockClient) -> Vec<(&'static str, Lock)> {
    let read_write = client.read_write_lock("rw").unwrap();
    vec![
        ("mutex", client.mutex("mutex").unwrap()),
        ("reentrant", client.reentrant_lock("reentrant").unwrap()),
        (
            "non-reentrant",
            client.non_reentrant_lock("non-reentrant").unwrap(),
        ),
        ("fenced", client.fenced_lock("fenced").unwrap()),
        ("fair", client.fair_lock("fair").unwrap()),
        ("write", read_write.write_lock()),
        ("spin", client.spin_lock("spin").unwrap()),
        ("string", client.string_lock("string").unwrap()),
        ("signal", client.signal_lock("signal").unwrap()),
        (
            "permits",
            client.permits("permits", 1).unwrap().many(1).unwrap(),
        ),
    ]
}

async fn hold_all(client: &LockClient) -> Vec<LockGuard> {
    let mut guards = Vec::new();
    for (kind, lock) in kinds(client) {
        guards.push(
            lock.lock()
                .await
                .unwrap_or_else(|error| panic!("{kind}: {error}")),
        );
    }
    guards
}

/// Spawns `each` tasks per kind that each take the lock once.
fn waiters(
    client: &LockClient,
    each: usize,
) -> Vec<(&'static str, tokio::task::JoinHandle<nestlock::Result<()>>)> {
    let waiter = |(kind, lock): (&'static str, Lock)| {
        (
            kind,
            tokio::spawn(async move { lock.lock().await?.unlock().await }),
        )
    };
    (0..each).flat_map(|_| kinds(client)).map(waiter).collect()
}

async fn until_waited_for(group: &SpawnedSentinel, client: &LockClient, waiters: usize) {
    within(LONG, "all wait", || async {
        client.stats().waiters == waiters
    })
    .await;
    // the waiters must have subscribed, too
    let master = group.servers()[0].addr();
    within(LONG, "channels", || async {
        !call(master, &["PUBSUB", "CHANNELS"]).list().is_empty()
    })
    .await;
}

async fn all_get_it(waiters: Vec<(&'static str, tokio::task::JoinHandle<nestlock::Result<()>>)>) {
    for (kind, waiter) in waiters {
        let outcome = tokio::time::timeout(LONG, waiter)
            .await
            .unwrap_or_else(|_| panic!("{kind}: it waits for ever"));
        outcome
            .unwrap()
            .unwrap_or_else(|error| panic!("{kind}: {error}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_kind_works_behind_sentinels() {
    let group = start(1, 3);
    let (a, b) = (client_of(&group).await, client_of(&group).await);
    let topology = a.topology();
    assert_eq!(topology.kind, TopologyKind::Sentinel);
    let roles: Vec<_> = topology.nodes.iter().map(|node| node.role).collect();
    assert_eq!(
        roles,
        [
            NodeRole::Master,
            NodeRole::Sentinel,
            NodeRole::Sentinel,
            NodeRole::Sentinel
        ]
    );
    assert_eq!(
        topology.nodes[0].address,
        group.servers()[0].addr().to_string()
    );
    assert!(
        a.address().ends_with("/mymaster") && a.address().starts_with("127.0.0.1:"),
        "{}",
        a.address()
    );
    let guards = hold_all(&a).await;
    for (kind, lock) in kinds(&b) {
        assert!(lock.try_lock().await.unwrap().is_none(), "{kind}");
    }
    let waiting = waiters(&b, 1);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    all_get_it(waiting).await;
    // the same service twice is not a quorum of two
    let twice = LockClient::red_lock([&a, &b], "l", RedLockOptions::new());
    assert!(
        matches!(twice, Err(Error::InvalidConfig { .. })),
        "{twice:?}"
    );
}

/// A lazy client queries the sentinels at its first use, not when it is built.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lazy_client_finds_the_master_of_its_first_use() {
    let group = start(1, 3);
    let old = &group.servers()[0];
    let lazy = || builder().connect_lazy(with_wire(group.url())).unwrap();
    let (early, late) = (lazy(), lazy());
    assert_eq!(early.topology().kind, TopologyKind::Sentinel);
    let held = hold_all(&early).await;
    old.kill().unwrap();
    // `late` knows no master, and none is promoted yet: it waits as other clients do
    let lock = late.mutex("late").unwrap();
    let (new, guard) = tokio::join!(async { another(&group, old) }, lock.lock());
    assert_eq!(call(new.addr(), &["EXISTS", "late"]).int(), 1);
    guard.unwrap().unlock().await.unwrap();
    late.ready().await.unwrap();
    drop(held);
}

/// Redisson's #558, #2007, #2181, #4706, #4822, #5205: waiters that never woke after a failover, or
/// never acquired again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f9_waiters_of_each_kind_outlive_the_master() {
    let group = start(2, 3);
    let (a, b) = (client_of(&group).await, client_of(&group).await);
    let guards = hold_all(&a).await;
    let waiting = waiters(&b, 100);
    // spin and string locks do not subscribe
    until_waited_for(&group, &b, waiting.len() - 200).await;
    replicated(&group).await;
    let old = &group.servers()[0];
    old.kill().unwrap();
    let new = another(&group, old);
    // the holds survive and are renewed at once; the watchdog alone would renew only after 10 s
    let left = || call(new.addr(), &["PTTL", "mutex"]).int();
    within(LONG, "a renewal through the new master", || async {
        left() > 29_000
    })
    .await;
    for guard in guards {
        assert!(!guard.is_lost(), "{}", guard.name());
        let name = guard.name().to_owned();
        guard
            .unlock()
            .await
            .unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    all_get_it(waiting).await;
    assert!(scripts(new.addr()) > 0);
}

/// The lock is free during the failover: an acquire that waits gets it from the new master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f9_the_loss_of_a_sentinel_and_of_the_master_costs_a_failover() {
    let group = start(1, 3);
    let client = client_of(&group).await;
    client
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    group.sentinels()[0].kill().unwrap();
    let old = &group.servers()[0];
    old.kill().unwrap();
    let refused = client.mutex("l").unwrap().try_lock().await;
    assert!(
        refused.as_ref().is_err_and(Error::is_transient),
        "{refused:?}"
    );
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    assert_eq!(call(another(&group, old).addr(), &["EXISTS", "l"]).int(), 1);
    guard.unlock().await.unwrap();
    // a new client finds the new master as well
    client_of(&group)
        .await
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// A stopped master that resumes acts as a master for 10 s more, and would grant locks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f9_an_old_master_that_goes_on_gets_no_request() {
    let group = start(1, 3);
    let client = client_of(&group).await;
    let guard = client.mutex("held").unwrap().lock().await.unwrap();
    replicated(&group).await;
    let old = &group.servers()[0];
    let before = scripts(old.addr());
    within(LONG, "its connections are named", || async {
        connections(old.addr()) == 2
    })
    .await;
    old.stop().unwrap();
    let new = another(&group, old);
    // requests sent before the notification wait in the socket of the old master; the client would
    // need 8 s to detect that silence, so it must learn of the new master from the sentinels
    within(
        Duration::from_secs(4),
        "it knows of the new master",
        || async { connections(new.addr()) == 2 },
    )
    .await;
    let pairs = async |count: usize| {
        for _ in 0..count {
            client
                .mutex("l")
                .unwrap()
                .lock()
                .await
                .unwrap()
                .unlock()
                .await
                .unwrap();
        }
    };
    pairs(20).await;
    old.cont().unwrap();
    within(LONG, "it knows that its connections have ended", || async {
        connections(old.addr()) == 0
    })
    .await;
    let role = call(old.addr(), &["ROLE"]);
    assert_eq!(role.list()[0].text(), "master", "so it is dangerous");
    pairs(200).await;
    assert_eq!(scripts(old.addr()), before);
    assert_eq!(connections(old.addr()), 0);
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    assert_eq!(call(new.addr(), &["EXISTS", "held"]).int(), 0);
}

/// The old master is healthy, and remains a master until it is reconfigured.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f9_a_failover_by_order_moves_all_clients_at_once() {
    let group = start(1, 3);
    let client = client_of(&group).await;
    let guard = client.reentrant_lock("held").unwrap().lock().await.unwrap();
    let waiter = client_of(&group).await;
    let lock = waiter.reentrant_lock("held").unwrap();
    let waiting = tokio::spawn(async move { lock.lock().await?.unlock().await });
    within(LONG, "a waiter", || async { waiter.stats().waiters == 1 }).await;
    replicated(&group).await;
    let old = &group.servers()[0];
    let new = block_in_place(|| group.failover()).unwrap();
    // after 10 s, the sentinels would cut off the connections to the old master themselves
    within(
        Duration::from_secs(5),
        "all links lead to the new master",
        || async { connections(new.addr()) == 4 },
    )
    .await;
    let before = scripts(old.addr());
    guard.unlock().await.unwrap();
    waiting.await.unwrap().unwrap();
    for _ in 0..100 {
        client
            .mutex("l")
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
    assert_eq!((scripts(old.addr()), connections(old.addr())), (before, 0));
}

/// A holder whose hold did not survive is notified of the loss soon after the switch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f8_f9_a_hold_lost_in_a_failover_is_reported_soon_after() {
    let group = start(1, 3);
    let client = client_of(&group).await;
    let (gone, kept) = (client.mutex("gone").unwrap(), client.mutex("kept").unwrap());
    let (gone, kept) = (gone.lock().await.unwrap(), kept.lock().await.unwrap());
    replicated(&group).await;
    let [old, replica] = group.servers() else {
        panic!()
    };
    call(
        replica.addr(),
        &["CONFIG", "SET", "replica-read-only", "no"],
    );
    assert_eq!(call(replica.addr(), &["DEL", "gone"]).int(), 1);
    old.kill().unwrap();
    another(&group, old);
    // the watchdog alone would check it 10 s after the acquire
    let told = tokio::time::timeout(Duration::from_secs(5), gone.lost())
        .await
        .expect("soon");
    assert!(
        matches!(
            told,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{told:?}"
    );
    kept.unlock().await.unwrap();
}

// --- lists of addresses ---

fn list(servers: &[&Server]) -> String {
    let addrs: Vec<_> = servers
        .iter()
        .map(|server| server.addr().to_string())
        .collect();
    with_wire(format!("redis://{}", addrs.join(",")))
}

/// Starts a master and a replica that has its data.
async fn pair() -> (Server, Server) {
    let (master, replica) = (
        Server::start_real(),
        Server::start_with(&["--repl-diskless-sync-delay", "0"]),
    );
    master.call(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    follow(&replica, &master).await;
    (master, replica)
}

async fn follow(replica: &Server, master: &Server) {
    replica.call(&["REPLICAOF", "127.0.0.1", &master.addr().port().to_string()]);
    let is_up = || async {
        replica
            .call(&["INFO", "replication"])
            .text()
            .contains("master_link_status:up")
    };
    within(LONG, "a replica", is_up).await;
}

#[tokio::test]
async fn of_a_list_the_master_is_taken_whichever_it_is() {
    let (a, b) = pair().await;
    let dead = Server::start_real();
    dead.kill();
    let client = builder().connect(list(&[&dead, &b, &a])).await.unwrap();
    let guards = hold_all(&client).await;
    assert_eq!(b.script_count(), 0);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    within(LONG, "the replica has it", || async { b.exists("l") }).await;
    // the servers swap roles
    b.call(&["REPLICAOF", "NO", "ONE"]);
    follow(&a, &b).await;
    client
        .mutex("other")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    assert!(b.script_count() > 0);
    guard.unlock().await.unwrap();
    assert!(!b.exists("l"));
    // and back, this time by a crash
    b.kill();
    a.call(&["REPLICAOF", "NO", "ONE"]);
    client
        .mutex("other")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// Two masters in a list are an error at first, and later neither of them is used.
#[tokio::test]
async fn two_masters_in_a_list_are_refused_at_first_and_unused_later() {
    let (a, b) = pair().await;
    let client = builder().connect(list(&[&a, &b])).await.unwrap();
    let lock = client.mutex("l").unwrap();
    b.call(&["REPLICAOF", "NO", "ONE"]);
    let refused = builder().connect(list(&[&a, &b])).await.unwrap_err();
    let Error::Connect {
        address, source, ..
    } = &refused
    else {
        panic!("{refused:?}")
    };
    assert_eq!(*address, format!("{},{}", a.addr(), b.addr()));
    assert_eq!(source.kind(), StoreErrorKind::Other);
    let text = source.to_string();
    assert!(
        text.contains(&format!(
            "{} is a master; {} is a master",
            a.addr(),
            b.addr()
        )),
        "{text}"
    );
    assert!(!refused.is_transient(), "{refused}");
    // established connections stay usable
    lock.lock().await.unwrap().unlock().await.unwrap();
    a.call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    a.call(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    within(LONG, "no connection", || async {
        lock.try_lock()
            .await
            .is_err_and(|error| error.is_transient())
    })
    .await;
    let before = (a.script_count(), b.script_count());
    let waiter = client.mutex("l").unwrap();
    let waiter = tokio::spawn(async move { waiter.lock().await?.unlock().await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(
        (a.script_count(), b.script_count()),
        before,
        "a request to one of two masters"
    );
    follow(&b, &a).await;
    tokio::time::timeout(LONG, waiter)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(b.script_count(), before.1);
}

// --- bad input ---

/// Returns the error of a connect; its text contains all of `says` and no password.
async fn refused(url: &str, says: &[&str]) -> Error {
    refused_by(LockClient::builder(), url, says).await
}

async fn refused_by(builder: LockClientBuilder, url: &str, says: &[&str]) -> Error {
    let began = Instant::now();
    let error = builder
        .connect(with_wire(url.to_owned()))
        .await
        .unwrap_err();
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{error}: beyond the time to connect"
    );
    let text = format!("{error} {error:?}");
    for word in says {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    assert!(!text.contains("s3cret"), "{text}");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_a_services_address_is_said() {
    let group = start(0, 2);
    let (sentinel, server) = (group.sentinels()[0].addr(), group.servers()[0].addr());
    let dead = Server::start_real();
    dead.kill();
    let kind = |error: &Error| match error {
        Error::Connect { source, .. } => (source.kind(), source.is_transient()),
        other => panic!("{other:?}"),
    };
    let url = group.url().replace("mymaster", "other");
    let error = refused(
        &url,
        &[
            "\"other\"",
            &format!("{sentinel} does not know it"),
            "sentinel monitor",
        ],
    )
    .await;
    assert_eq!(kind(&error), (StoreErrorKind::Other, false));

    let url = format!("redis-sentinel://{}/mymaster", dead.addr());
    let error = refused(&url, &[&dead.addr().to_string(), "are they running?"]).await;
    assert!(error.is_transient(), "{error}");

    let error = refused(
        &format!("redis-sentinel://{server}/mymaster"),
        &["not sentinels", "redis://"],
    )
    .await;
    assert_eq!(kind(&error), (StoreErrorKind::Other, false));

    let error = refused(
        &format!("redis://{sentinel}"),
        &["is a sentinel", "redis-sentinel://"],
    )
    .await;
    assert!(matches!(error, Error::InvalidConfig { .. }), "{error:?}");

    let error = refused(
        &format!("redis://{},{sentinel}", dead.addr()),
        &["is a sentinel", "redis-sentinel://"],
    )
    .await;
    assert_eq!(kind(&error).0, StoreErrorKind::Unavailable);

    // a dead sentinel and a hanging one cost only time
    group.sentinels()[1].stop().unwrap();
    let hangs = group.sentinels()[1].addr();
    let url = with_wire(format!(
        "redis-sentinel://{},{hangs},{sentinel}/mymaster",
        dead.addr()
    ));
    LockClient::connect(url)
        .await
        .unwrap()
        .mutex("l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    refused(
        &format!("redis-sentinel://{hangs}/mymaster"),
        &[&hangs.to_string()],
    )
    .await;
}

/// A sentinel does not know yet that its master became a replica: no lock is acquired at a replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_named_as_master_that_is_none_is_not_believed() {
    let group = start(1, 1);
    let [named, other] = group.servers() else {
        panic!()
    };
    call(other.addr(), &["REPLICAOF", "NO", "ONE"]);
    call(
        named.addr(),
        &["REPLICAOF", "127.0.0.1", &other.addr().port().to_string()],
    );
    let says = format!("{} says that it is a replica", named.addr());
    let error = refused(&group.url(), &[&says]).await;
    assert!(error.is_transient(), "{error}");
    assert_eq!(scripts(named.addr()) + scripts(other.addr()), 0);
}

/// Two sentinels disagree, and nothing shows which of them is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_disagree_name_no_master() {
    let (one, other) = (start(0, 1), start(0, 1));
    let [a, b] = [&one, &other].map(|group| group.sentinels()[0].addr());
    let names = format!("{a} names {}", one.servers()[0].addr());
    let error = refused(
        &format!("redis-sentinel://{a},{b}/mymaster"),
        &[&names, "do not agree"],
    )
    .await;
    assert!(error.is_transient());
}

/// Covers sentinels with and without a password, with a login that differs from the servers', and
/// with a user that has only the permissions in the README.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_have_logins_of_their_own() {
    let group = start(1, 1);
    let (sentinel, url) = (group.sentinels()[0].addr(), group.url());
    let pair = async |client: LockClient| {
        client
            .mutex("l")
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
    };
    for server in group.servers() {
        call(
            server.addr(),
            &[
                "ACL", "SETUSER", "app", "on", ">s3cret", "~*", "&*", "+@all",
            ],
        );
    }
    // the sentinel has no such user, and requires no login
    let with_login = url.replace("redis-sentinel://", "redis-sentinel://app:s3cret@");
    pair(
        LockClient::connect(with_wire(with_login.clone()))
            .await
            .unwrap(),
    )
    .await;

    let mut user = vec![
        "ACL",
        "SETUSER",
        "watcher",
        "on",
        ">s3cret/",
        "-@all",
        "+sentinel|get-master-addr-by-name",
        "+subscribe",
        "resetchannels",
        "&+switch-master",
    ];
    if is_over_fred() {
        user.push("+client|id");
    }
    assert!(!call(sentinel, &user).is_error());
    assert!(
        !call(
            sentinel,
            &["ACL", "SETUSER", "default", "resetpass", ">s3cret/"]
        )
        .is_error()
    );
    let error = refused(&url, &["sentinel_login", "sentinelPassword"]).await;
    assert!(
        matches!(&error, Error::Connect { source, .. } if source.kind() == StoreErrorKind::Auth),
        "{error:?}"
    );
    refused(&with_login, &["sentinel_login"]).await;
    let login = LockClient::builder().sentinel_login("watcher", "s3cret");
    assert!(!format!("{login:?}").contains("s3cret"));
    refused_by(login, &url, &["sentinel_login"]).await;

    for user in ["watcher", "default"] {
        let login = LockClient::builder().sentinel_login(user, "s3cret/");
        pair(login.connect(with_wire(with_login.clone())).await.unwrap()).await;
    }
    let mut options = format!("{with_login}?sentinelUsername=watcher&sentinelPassword=s3cret%2F");
    if let Ok(wire) = std::env::var("NESTLOCK_TEST_WIRE") {
        options = format!("{options}&wire={wire}");
    }
    // the login in the URL takes precedence
    pair(
        LockClient::builder()
            .sentinel_login("nobody", "x")
            .connect(options)
            .await
            .unwrap(),
    )
    .await;

    // it is notified of a new master, too
    let client = LockClient::builder()
        .outage_patience(LONG)
        .sentinel_login("watcher", "s3cret/");
    let client = client.connect(with_wire(with_login)).await.unwrap();
    group.servers()[0].kill().unwrap();
    pair(client).await;
}

/// After a shutdown, the client has no connection to a sentinel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_was_shut_down_asks_no_sentinel_any_more() {
    let group = start(0, 2);
    let client = client_of(&group).await;
    let open = || {
        group
            .sentinels()
            .iter()
            .map(|sentinel| connections(sentinel.addr()))
            .sum::<usize>()
    };
    within(LONG, "a connection to each", || async { open() == 2 }).await;
    for sentinel in group.sentinels() {
        // with RESP3, one connection carries both the notifications of failovers and the queries
        let is_told = || {
            call(sentinel.addr(), &["CLIENT", "LIST"])
                .text()
                .lines()
                .any(|line| line.contains("name=nestlock:") && line.contains(" sub=1 "))
        };
        within(LONG, "it is notified of failovers", || async { is_told() }).await;
    }
    client.shutdown().await.unwrap();
    within(LONG, "no connection", || async { open() == 0 }).await;
    assert!(matches!(
        client.mutex("l").unwrap().try_lock().await,
        Err(Error::Closed)
    ));
    drop(client);
}

// --- figures ---

/// How the master goes away.
#[derive(Debug, Clone, Copy)]
enum Going {
    Killed,
    Hung,
    ByOrder,
}

/// Measures the time from when most sentinels name another master to the first script that it runs,
/// and to the loss of a guard whose hold the new master does not know. Run by `cargo test --release
/// ... --test it -- --ignored --nocapture sentinel::figures`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; nothing can fail"]
async fn figures() {
    for going in [Going::Killed, Going::Hung, Going::ByOrder] {
        let (mut acquires, mut losses) = (Vec::new(), Vec::new());
        for _ in 0..7 {
            let (acquire, loss) = switch(going).await;
            acquires.push(acquire);
            losses.push(loss);
        }
        for (what, mut times) in [("first acquire", acquires), ("reported as lost", losses)] {
            times.sort_unstable();
            println!(
                "{going:?}: {what}: median {} ms, all {times:?}",
                times[times.len() / 2]
            );
        }
    }
}

/// Returns both times in milliseconds after most sentinels name another master; negative means
/// before.
async fn switch(going: Going) -> (i64, i64) {
    let group = start(1, 3);
    let client = client_of(&group).await;
    let guard = client.mutex("gone").unwrap().lock().await.unwrap();
    replicated(&group).await;
    let [old, replica] = group.servers() else {
        panic!()
    };
    call(
        replica.addr(),
        &["CONFIG", "SET", "replica-read-only", "no"],
    );
    call(replica.addr(), &["DEL", "gone"]);
    let mut sentinels: Vec<_> = group
        .sentinels()
        .iter()
        .map(|s| Wire::connect(s.addr()).unwrap())
        .collect();
    let named = std::thread::spawn({
        let new = replica.addr().port().to_string();
        move || loop {
            let ask = [
                "SENTINEL",
                "GET-MASTER-ADDR-BY-NAME",
                SpawnedSentinel::MASTER_NAME,
            ];
            let names = sentinels
                .iter_mut()
                .map(|s| s.call(&ask).unwrap())
                .filter(|said| said.list()[1].text() == new)
                .count();
            if names >= 2 {
                return Instant::now();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let first = std::thread::spawn({
        let replica = replica.addr();
        move || {
            while scripts(replica) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            Instant::now()
        }
    });
    let lost = tokio::spawn(async move {
        guard.lost().await;
        Instant::now()
    });
    match going {
        Going::Killed => old.kill().unwrap(),
        Going::Hung => old.stop().unwrap(),
        Going::ByOrder => {
            let order = ["SENTINEL", "FAILOVER", SpawnedSentinel::MASTER_NAME];
            call(group.sentinels()[0].addr(), &order);
        }
    }
    let lock = client.mutex("l").unwrap();
    let acquires = tokio::spawn(async move {
        loop {
            if let Ok(guard) = lock.lock().await {
                tokio::time::sleep(Duration::from_millis(2)).await;
                let _ = guard.unlock().await;
            }
        }
    });
    let (named, first, lost) = (
        block_in_place(|| named.join()),
        block_in_place(|| first.join()),
        lost.await,
    );
    acquires.abort();
    let named = named.unwrap();
    let after = |time: Instant| match time.checked_duration_since(named) {
        Some(after) => after.as_millis() as i64,
        None => -(named.duration_since(time).as_millis() as i64),
    };
    (after(first.unwrap()), after(lost.unwrap()))
}
