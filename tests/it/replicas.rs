//! Locks that succeed only after replicas have acknowledged them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{
    AcquireOptions, Error, Lock, LockClient, LockClientBuilder, LossReason, StoreErrorKind,
};
use nestlock_embedded::{SpawnedCluster, SpawnedServer};

use crate::{
    cancel::poll_times,
    support::{
        proxy::{Action, Proxy, Way, with_wire},
        wire::{Reply, Wire},
        within,
    },
};

const LONG: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_millis(300);

/// A server and its replicas.
pub(crate) struct Group {
    pub(crate) master: SpawnedServer,
    pub(crate) replicas: Vec<SpawnedServer>,
}

impl Group {
    pub(crate) async fn start(replicas: usize) -> Self {
        Self::start_with(replicas, &[]).await
    }

    pub(crate) async fn start_with(replicas: usize, args: &'static [&'static str]) -> Self {
        let group = tokio::task::spawn_blocking(move || {
            let args = || args.iter().copied();
            let master = SpawnedServer::start_with(args()).unwrap();
            let port = master.addr().port().to_string();
            // Otherwise the master would drop a replica that is stopped for a while.
            call(&master, &["CONFIG", "SET", "repl-timeout", "600"]);
            call(&master, &["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
            let of_it = ["--replicaof", "127.0.0.1", &port];
            let replica = |_| SpawnedServer::start_with(args().chain(of_it)).unwrap();
            Self {
                replicas: (0..replicas).map(replica).collect(),
                master,
            }
        });
        let group = group.await.unwrap();
        group.are_there(replicas).await;
        group
    }

    /// Waits until this many replicas have all writes.
    pub(crate) async fn are_there(&self, replicas: usize) {
        let all = || async {
            // For a connection without writes, WAIT counts all replicas. A replica that has just
            // connected acknowledges once, and then not for 1 s, so three replies in a row must
            // count.
            let mut wire = Wire::connect(self.master.addr()).unwrap();
            (0..3).all(|_| {
                wire.call(&["SET", "written", "1"]).unwrap();
                wire.call(&["WAIT", &replicas.to_string(), "100"])
                    .unwrap()
                    .int()
                    >= replicas as i64
            })
        };
        within(LONG, "replicas", all).await;
    }

    pub(crate) fn builder(replicas: u32) -> LockClientBuilder {
        LockClient::builder().replicas(replicas, PATIENCE)
    }

    pub(crate) async fn client(&self, replicas: u32) -> LockClient {
        Self::builder(replicas)
            .connect(with_wire(self.master.url()))
            .await
            .unwrap()
    }

    pub(crate) fn stop(&self, replicas: usize) {
        self.replicas[..replicas]
            .iter()
            .for_each(|replica| replica.stop().unwrap());
    }

    pub(crate) fn cont(&self) {
        self.replicas
            .iter()
            .for_each(|replica| replica.cont().unwrap());
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        call(&self.master, &["EXISTS", key]).int() == 1
    }

    /// Returns how often the server has run this command.
    fn calls(&self, command: &str) -> u64 {
        calls(&self.master, command)
    }
}

pub(crate) fn call(server: &SpawnedServer, parts: &[&str]) -> Reply {
    Wire::connect(server.addr()).unwrap().call(parts).unwrap()
}

fn calls(server: &SpawnedServer, command: &str) -> u64 {
    let stats = call(server, &["INFO", "commandstats"]);
    let of = |line: &str| {
        let rest = line
            .strip_prefix("cmdstat_")?
            .strip_prefix(command)?
            .strip_prefix(":calls=")?;
        rest.split(',').next()?.parse::<u64>().ok()
    };
    stats.text().lines().filter_map(of).sum()
}

/// Returns one lock of each kind, with the key that exists while the lock is held.
pub(crate) fn kinds(client: &LockClient) -> Vec<(&'static str, Lock)> {
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
        ("rw", read_write.write_lock()),
        ("read", client.read_write_lock("read").unwrap().read_lock()),
        ("spin", client.spin_lock("spin").unwrap()),
        ("string", client.string_lock("string").unwrap()),
        ("lock:signal", client.signal_lock("signal").unwrap()),
        (
            "{permits}:timeout",
            client.permits("permits", 1).unwrap().many(1).unwrap(),
        ),
    ]
}

#[track_caller]
pub(crate) fn is_not_replicated<T: std::fmt::Debug>(
    outcome: nestlock::Result<T>,
    acked: u32,
    wanted: u32,
) {
    match outcome {
        Err(Error::NotReplicated {
            acked: had,
            wanted: were,
            on_disk: None,
            ..
        }) => {
            assert_eq!((had, were), (acked, wanted));
        }
        other => panic!("{other:?}"),
    }
}

/// Each kind of lock counts when its replicas have it, and costs no more requests than the WAIT.
#[tokio::test]
async fn each_kind_counts_its_replicas_at_the_cost_of_one_wait() {
    let group = Group::start(2).await;
    let client = group.client(2).await;
    for (record, lock) in kinds(&client) {
        // Loads the scripts.
        lock.lock().await.unwrap().unlock().await.unwrap();
        let before = (group.calls("evalsha"), group.calls("wait"));
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.replicas(), Some(2), "{record}");
        assert!(group.has(record), "{record}");
        for replica in &group.replicas {
            assert_eq!(call(replica, &["EXISTS", record]).int(), 1, "{record}");
        }
        guard.unlock().await.unwrap();
        assert_eq!(
            (group.calls("evalsha"), group.calls("wait")),
            (before.0 + 2, before.1 + 1),
            "{record}"
        );
    }
    let lock = client.reentrant_lock("nested").unwrap();
    let outer = lock
        .lock_with(AcquireOptions::new().replicas(0))
        .await
        .unwrap();
    let inner = lock
        .lock_with(AcquireOptions::new().replicas(1))
        .await
        .unwrap();
    assert_eq!(outer.replicas(), None);
    assert!(inner.replicas() >= Some(1), "{:?}", inner.replicas());
}

#[tokio::test]
async fn r32_without_enough_replicas_nothing_of_any_kind_is_held() {
    let group = Group::start(2).await;
    let client = group.client(2).await;
    for (stopped, had) in [(1, 1), (2, 0)] {
        group.stop(stopped);
        for (record, lock) in kinds(&client) {
            is_not_replicated(lock.try_lock().await, had, 2);
            assert!(!group.has(record), "{record}: it was not given back");
        }
        let one = AcquireOptions::new().replicas(1);
        let lock = client.mutex("one").unwrap();
        match stopped {
            1 => assert_eq!(
                lock.try_lock_with(one).await.unwrap().unwrap().replicas(),
                Some(1)
            ),
            _ => is_not_replicated(lock.try_lock_with(one).await, 0, 1),
        }
        group.cont();
    }
    let stats = client.stats();
    client.idle().await;
    assert_eq!(stats.waiters, 0);
}

/// A script that the server does not know has written nothing, and neither has a try of a busy
/// lock.
#[tokio::test]
async fn r39_what_has_not_written_counts_for_nothing() {
    let group = Group::start(1).await;
    let client = group.client(1).await;
    let lock = client.mutex("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let other = LockClient::connect(group.master.url()).await.unwrap();
    let held = other.mutex("held").unwrap().lock().await.unwrap();
    call(&group.master, &["SCRIPT", "FLUSH"]);
    // For a connection without writes, WAIT reports that all replicas have everything.
    group.are_there(1).await;
    group.stop(1);
    is_not_replicated(lock.try_lock().await, 0, 1);
    assert!(
        client
            .mutex("held")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    held.unlock().await.unwrap();
    group.cont();
}

/// An acquire that waits for the lock also waits for the replicas.
#[tokio::test]
async fn a_waiter_has_the_lock_when_the_replicas_are_back() {
    let group = Group::start(1).await;
    let client = group.client(1).await;
    group.stop(1);
    let lock = client.mutex("l").unwrap();
    let begun = Instant::now();
    is_not_replicated(lock.try_lock_for(Duration::from_millis(800)).await, 0, 1);
    assert!(begun.elapsed() >= Duration::from_millis(800));
    let waits = tokio::spawn(async move { lock.lock().await?.unlock().await });
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!waits.is_finished());
    group.cont();
    waits.await.unwrap().unwrap();
}

/// A connection proves nothing about the writes of another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_counts_for_what_it_wrote_itself() {
    let group = Arc::new(Group::start(1).await);
    let client = Group::builder(1)
        .outage_patience(Duration::from_secs(2))
        .connect(group.master.url())
        .await
        .unwrap();
    group.stop(1);
    let over = Arc::new(AtomicBool::new(false));
    let (killed, group_of_it) = (Arc::clone(&over), Arc::clone(&group));
    let killer = tokio::task::spawn_blocking(move || {
        while !killed.load(Ordering::Relaxed) {
            call(&group_of_it.master, &["CLIENT", "KILL", "TYPE", "normal"]);
            std::thread::sleep(Duration::from_millis(7));
        }
    });
    let locks: Vec<_> = (0..8)
        .map(|n| client.mutex(format!("l{n}")).unwrap())
        .collect();
    let granted = join_all(locks.iter().map(|lock| async move {
        let mut granted = 0;
        for _ in 0..25 {
            granted += usize::from(matches!(lock.try_lock().await, Ok(Some(_))));
        }
        granted
    }));
    let granted: usize = granted.await.into_iter().sum();
    over.store(true, Ordering::Relaxed);
    killer.await.unwrap();
    assert_eq!(granted, 0);
    group.cont();
}

/// A lease may end earlier on a replica that missed its renewal. So neither a renewal nor an
/// extension counts without the replicas.
#[tokio::test]
async fn a_renewal_counts_when_replicas_have_it() {
    let group = Group::start(1).await;
    let (lease, patience) = (Duration::from_millis(1500), Duration::from_millis(100));
    let builder = LockClient::builder()
        .watchdog_timeout(lease)
        .replicas(1, patience);
    let client = builder
        .connect(with_wire(group.master.url()))
        .await
        .unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    let leased = client.mutex("leased").unwrap();
    let leased = leased
        .lock_with(AcquireOptions::new().lease(Duration::from_secs(60)))
        .await
        .unwrap();
    tokio::time::sleep(2 * lease).await;
    assert!(!guard.is_lost());
    group.stop(1);
    is_not_replicated(leased.extend(Duration::from_secs(120)).await, 0, 1);
    // All requests in flight have their replies by then.
    let left = guard.remaining();
    assert!(!leased.is_lost() && leased.remaining() < Duration::from_secs(60));
    let loss = tokio::time::timeout(left + PATIENCE, guard.lost())
        .await
        .expect("it is lost with its lease");
    assert!(
        matches!(
            loss,
            Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            }
        ),
        "{loss}"
    );
    group.cont();
    leased.extend(Duration::from_secs(120)).await.unwrap();
    assert!(leased.remaining() > Duration::from_secs(100));
}

/// The server becomes a replica while WAIT is in flight.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_demotion_during_the_wait_grants_nothing() {
    let group = Group::start(1).await;
    let client = LockClient::builder()
        .replicas(1, Duration::from_millis(900))
        .outage_patience(Duration::from_millis(500))
        .connect(with_wire(group.master.url()))
        .await
        .unwrap();
    let lock = client.mutex("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    group.stop(1);
    let asked = tokio::spawn(async move { lock.try_lock().await });
    within(LONG, "it waits", || async {
        call(&group.master, &["INFO", "clients"])
            .text()
            .contains("blocked_clients:1")
    })
    .await;
    let port = group.replicas[0].addr().port().to_string();
    call(&group.master, &["REPLICAOF", "127.0.0.1", &port]);
    let outcome = asked.await.unwrap();
    assert!(
        matches!(outcome, Err(Error::Unconfirmed { .. })),
        "{outcome:?}"
    );
    group.cont();
}

/// A hold that goes from task to task has the copies that each task requires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_that_is_handed_on_has_its_copies() {
    let group = Group::start(1).await;
    // Half of the tasks require a copy.
    let client = group.client(0).await;
    let tasks = (0..16u32).map(|n| {
        let lock = client.mutex("l").unwrap();
        tokio::spawn(async move {
            for _ in 0..50 {
                let wanted = n % 2;
                let guard = lock
                    .lock_with(AcquireOptions::new().replicas(wanted))
                    .await
                    .unwrap();
                assert!(guard.replicas().unwrap_or(0) >= wanted);
                guard.unlock().await.unwrap();
            }
        })
    });
    for task in join_all(tasks).await {
        task.unwrap();
    }
}

#[tokio::test]
async fn several_locks_by_one_request_count_together() {
    let group = Group::start(1).await;
    let client = group.client(1).await;
    let all = client
        .multi_lock((0..3).map(|n| client.mutex(format!("l{n}")).unwrap()))
        .unwrap();
    let guard = all.lock().await.unwrap();
    assert_eq!(guard.replicas(), Some(1));
    guard.unlock().await.unwrap();
    group.stop(1);
    is_not_replicated(all.try_lock().await, 0, 1);
    assert!((0..3).all(|n| !group.has(&format!("l{n}"))));
    group.cont();
    all.lock().await.unwrap().unlock().await.unwrap();
}

/// Concurrent acquires share a WAIT, which covers all requests before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r39_one_wait_is_in_flight_at_a_time() {
    let group = Group::start(1).await;
    let client = Group::builder(1).connect(group.master.url()).await.unwrap();
    let locks: Vec<_> = (0..64)
        .map(|n| client.mutex(format!("l{n}")).unwrap())
        .collect();
    // Loads the scripts.
    locks[0].lock().await.unwrap().unlock().await.unwrap();
    // The statistics count a WAIT that blocks twice, so the test uses MONITOR.
    let mut monitor = Wire::connect(group.master.addr()).unwrap();
    monitor.call(&["MONITOR"]).unwrap();
    // A slow replica makes sure that the requests meet.
    group.stop(1);
    let asked = tokio::spawn(join_all(
        locks
            .clone()
            .into_iter()
            .map(|lock| async move { lock.lock().await }),
    ));
    tokio::time::sleep(PATIENCE / 3).await;
    group.cont();
    let guards = asked.await.unwrap();
    assert!(
        guards
            .iter()
            .all(|guard| guard.as_ref().unwrap().replicas() == Some(1))
    );
    call(&group.master, &["PING", "over"]);
    let (mut waits, mut scripts) = (0, 0);
    loop {
        let line = monitor.read().unwrap();
        waits += usize::from(line.text().contains("\"WAIT\""));
        scripts += usize::from(line.text().contains("\"EVAL"));
        if line.text().contains("\"over\"") {
            break;
        }
    }
    // The first WAIT, and one for all requests that came while it was in flight.
    assert!(
        (2..=3).contains(&waits),
        "{waits} WAITs for {scripts} scripts"
    );
}

#[tokio::test]
async fn in_a_cluster_each_master_has_replicas_of_its_own() {
    let cluster = tokio::task::spawn_blocking(|| SpawnedCluster::start(3, 3).unwrap())
        .await
        .unwrap();
    let client = Group::builder(1).connect(cluster.url()).await.unwrap();
    for n in 0..20 {
        let lock = client.fair_lock(format!("l{n}")).unwrap();
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.replicas(), Some(1));
        guard.unlock().await.unwrap();
    }
    let refused = Group::builder(2).connect(cluster.url()).await;
    assert!(
        matches!(&refused, Err(Error::InvalidConfig { reason, .. }) if reason.contains("`replicas` is 2")),
        "{refused:?}"
    );
}

/// R106: options that the servers cannot satisfy are refused at connect, not at each acquire.
#[tokio::test]
async fn r106_what_cannot_be_had_is_refused_at_connect() {
    let group = Group::start(1).await;
    let url = group.master.url();
    for (replicas, timeout) in [(1, 0), (0, 0), (1, 1001)] {
        let builder = LockClient::builder().replicas(replicas, Duration::from_millis(timeout));
        let refused = builder.connect(&url).await;
        let says = |reason: &str| reason.contains("a third of the command timeout");
        assert!(
            matches!(&refused, Err(Error::InvalidConfig { reason, .. }) if says(reason)),
            "{refused:?}"
        );
    }
    let begun = Instant::now();
    let refused = Group::builder(2).connect(with_wire(url.clone())).await;
    let says =
        |reason: &str| reason.contains("`replicas` is 2") && reason.contains("1 acknowledged");
    assert!(
        matches!(&refused, Err(Error::InvalidConfig { reason, .. }) if says(reason)),
        "{refused:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(5));
    let hurried = Group::builder(2)
        .connect_timeout(Duration::from_secs(1))
        .connect(with_wire(url.clone()))
        .await;
    assert!(
        matches!(&hurried, Err(Error::InvalidConfig { reason, .. }) if says(reason)),
        "{hurried:?}"
    );
    let rules = [
        "ACL", "SETUSER", "some", "reset", "on", ">pw", "~*", "&*", "+@all", "-wait",
    ];
    assert_eq!(call(&group.master, &rules).text(), "OK");
    let refused = Group::builder(1)
        .connect(url.replace("redis://", "redis://some:pw@"))
        .await;
    let is_denied = |error: &Error| matches!(error, Error::Connect { source, .. } if source.kind() == StoreErrorKind::NoPermission);
    assert!(refused.as_ref().is_err_and(is_denied), "{refused:?}");
    // Servers before Redis 7.2 lack WAITAOF.
    let refused = LockClient::builder().fsync(true).connect(&url).await;
    if call(&group.master, &["WAITAOF", "0", "0", "1"]).is_error() {
        assert!(
            matches!(&refused, Err(Error::InvalidConfig { reason, .. }) if reason.contains("Redis 7.2")),
            "{refused:?}"
        );
    }
}

/// A lazy client is refused at its first use, and works if the replicas exist.
#[tokio::test]
async fn a_lazy_client_is_refused_the_copies_that_it_cannot_have() {
    let group = Group::start(1).await;
    let client = Group::builder(2)
        .connect_lazy(with_wire(group.master.url()))
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    for _ in 0..2 {
        let refused = tokio::time::timeout(LONG, lock.lock())
            .await
            .expect("it waits");
        assert!(
            matches!(&refused, Err(Error::InvalidConfig { .. })),
            "{refused:?}"
        );
        assert!(!group.has("l"));
    }
    let client = Group::builder(1)
        .connect_lazy(with_wire(group.master.url()))
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let before = group.calls("wait");
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert!(group.calls("wait") > before);
    group.stop(1);
    let short = lock.try_lock().await;
    assert!(short.as_ref().is_err_and(Error::is_transient), "{short:?}");
    group.cont();
    lock.lock().await.unwrap().unlock().await.unwrap();
}

/// A write that was received may not be on disk. A write on disk survives a kill. Servers before
/// 7.2 cannot report the difference.
#[tokio::test]
async fn r108_what_is_asked_for_on_disk_counts_when_it_is_there() {
    let group = Group::start_with(1, &["--appendonly", "yes", "--appendfsync", "always"]).await;
    let builder = || Group::builder(1).fsync(true);
    if call(&group.master, &["WAITAOF", "0", "0", "1"]).is_error() {
        let refused = builder().connect(with_wire(group.master.url())).await;
        assert!(
            matches!(&refused, Err(Error::InvalidConfig { reason, .. }) if reason.contains("Redis 7.2")),
            "{refused:?}"
        );
        return;
    }
    let client = builder()
        .connect(with_wire(group.master.url()))
        .await
        .unwrap();
    let lock = client.fenced_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    assert_eq!(guard.replicas(), Some(1));
    group.master.kill().unwrap();
    group.master.restart().unwrap();
    assert!(group.has("l"));
    group.are_there(1).await;
    guard.unlock().await.unwrap();
    // From here on, the server does not sync its writes to disk.
    call(&group.master, &["CONFIG", "SET", "appendfsync", "no"]);
    let refused = lock.try_lock().await;
    assert!(
        matches!(
            refused,
            Err(Error::NotReplicated {
                on_disk: Some(false),
                ..
            })
        ),
        "{refused:?}"
    );
    assert!(!group.has("l"));
    call(&group.master, &["CONFIG", "SET", "appendonly", "no"]);
    let refused = builder().connect(with_wire(group.master.url())).await;
    assert!(
        matches!(&refused, Err(Error::InvalidConfig { reason, .. }) if reason.contains("appendonly")),
        "{refused:?}"
    );
}

/// Nothing stays held, and the next acquire gets the lock, with and without replicas that reply.
#[tokio::test]
async fn an_acquire_dropped_at_any_poll_leaves_nothing() {
    let group = Group::start(1).await;
    let proxy = Proxy::to(group.master.addr());
    // The reply to the script arrives before the reply to WAIT.
    proxy.rule(|request| {
        if request.is("WAIT") {
            Action::Late(Duration::from_millis(100))
        } else {
            Action::Pass
        }
    });
    let client = Group::builder(1).connect(proxy.url()).await.unwrap();
    let lock = client.mutex("l").unwrap();
    for is_away in [false, true] {
        if is_away {
            group.stop(1);
        }
        let mut k = 0;
        loop {
            k += 1;
            let ended = poll_times(lock.try_lock(), k).await;
            let is_over = ended.is_some();
            match ended {
                Some(Ok(guard)) => guard
                    .expect("no other client has it")
                    .unlock()
                    .await
                    .unwrap(),
                Some(Err(error)) => assert!(
                    is_away && matches!(error, Error::NotReplicated { .. }),
                    "{k}: {error}"
                ),
                None => {}
            }
            client.idle().await;
            assert!(!group.has("l"), "{k} polls");
            if is_over {
                break;
            }
        }
        assert!(k > 2, "it was polled {k} times");
    }
    group.cont();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let stats = client.stats();
    assert_eq!((stats.holds, stats.settling), (0, 0));
}

/// An acquire that found its lock busy does not wait for its WAIT. That WAIT must not keep the next
/// acquire from sending its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_busy_lock_wait_goes_along_as_before() {
    let group = Group::start(1).await;
    let proxy = Proxy::to(group.master.addr());
    let client = Group::builder(1)
        .command_timeout(Duration::from_secs(10))
        .connect(proxy.url())
        .await
        .unwrap();
    let other = LockClient::connect(group.master.url()).await.unwrap();
    let held = other.mutex("held").unwrap().lock().await.unwrap();
    let lock = client.mutex("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert!(
        client
            .mutex("held")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    // Replies arrive in order, so the reply to that WAIT has arrived.
    assert!(!lock.is_locked().await.unwrap());
    proxy.forget_requests();
    proxy.black_hole(Way::ToClient);
    let asked = tokio::spawn(async move { lock.try_lock().await });
    let waits = || async { proxy.requests().iter().any(|request| request.is("WAIT")) };
    within(
        Duration::from_secs(5),
        "the reply to WAIT arrives before the script's",
        waits,
    )
    .await;
    proxy.heal();
    asked
        .await
        .unwrap()
        .unwrap()
        .unwrap()
        .unlock()
        .await
        .unwrap();
    held.unlock().await.unwrap();
}

/// From Redis 7.2 on, WAIT counts all replicas for a connection that has only read a longer TTL.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_extension_is_not_believed_over_another_connection() {
    let group = Group::start(1).await;
    let client = group.client(1).await;
    let mut guards = Vec::new();
    for (record, lock) in kinds(&client) {
        guards.push((
            record,
            lock.lock_with(AcquireOptions::new().lease(Duration::from_secs(60)))
                .await
                .unwrap(),
        ));
    }
    group.stop(1);
    for (record, guard) in &guards {
        is_not_replicated(guard.extend(Duration::from_secs(120)).await, 0, 1);
        call(&group.master, &["CLIENT", "KILL", "TYPE", "normal"]);
        let extended = || async {
            match guard.extend(Duration::from_secs(100)).await {
                Err(Error::Store { .. } | Error::Unconfirmed { .. }) => None,
                outcome => Some(outcome),
            }
        };
        let mut outcome = extended().await;
        while outcome.is_none() {
            outcome = extended().await;
        }
        assert!(
            matches!(outcome, Some(Err(Error::NotReplicated { acked: 0, .. }))),
            "{record}: {outcome:?}"
        );
        assert!(guard.remaining() < Duration::from_secs(60), "{record}");
    }
    group.cont();
    for (record, guard) in &guards {
        guard.extend(Duration::from_secs(100)).await.unwrap();
        assert!(guard.remaining() > Duration::from_secs(90), "{record}");
    }
}
