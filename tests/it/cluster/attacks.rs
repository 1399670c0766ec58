//! Clusters under load while things go wrong.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::future::join_all;
use nestlock::{Error, LockClient, LockGuard};
use nestlock_embedded::SpawnedCluster;

use super::{ask, begin_to_move, client, start, there};
use crate::support::{eventually, within};

/// A slot that moves back and forth between two masters. The moves end on drop, so that a failing
/// test does not wait for them.
struct ToAndFro {
    stop: Arc<AtomicBool>,
    moves: Option<tokio::task::JoinHandle<u32>>,
}

impl ToAndFro {
    /// The pause between two moves, longer than a request takes. A redirected request could
    /// otherwise reach the new master after the slot has moved back and started to move again. It
    /// would then acquire a held lock, which no client can detect (`promises.md`).
    const REST: Duration = Duration::from_millis(250);

    fn start(cluster: &Arc<SpawnedCluster>, slot: u16) -> Self {
        let (cluster, stop) = (Arc::clone(cluster), Arc::new(AtomicBool::new(false)));
        let stops = Arc::clone(&stop);
        let moves = tokio::task::spawn_blocking(move || {
            let mut times = 0;
            while !stops.load(Ordering::Acquire) {
                let from = cluster.master_of(slot).unwrap().addr();
                let to = cluster
                    .nodes()
                    .iter()
                    .find(|node| node.addr() != from)
                    .unwrap();
                cluster
                    .migrate(slot, to)
                    .unwrap_or_else(|error| panic!("{error}: {}", cluster.view()));
                times += 1;
                std::thread::sleep(Self::REST);
            }
            times
        });
        Self {
            stop,
            moves: Some(moves),
        }
    }

    /// Stops, and returns the number of moves.
    async fn end(mut self) -> u32 {
        self.stop.store(true, Ordering::Release);
        self.moves.take().unwrap().await.unwrap()
    }
}

impl Drop for ToAndFro {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// All holds are renewed, slot by slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a minute of both processors: 10,000 holds"]
async fn ten_thousand_holds_live_on() {
    let cluster = start(3, 0).await;
    let lease = Duration::from_secs(10);
    let client = LockClient::builder()
        .watchdog_timeout(lease)
        .connect(cluster.url())
        .await
        .unwrap();
    let locks: Vec<_> = (0..10_000)
        .map(|n| client.mutex(format!("l{n}")).unwrap())
        .collect();
    let guards = join_all(
        locks
            .iter()
            .map(|lock| async move { lock.lock().await.unwrap() }),
    )
    .await;
    tokio::time::sleep(3 * lease).await;
    assert_eq!(guards.iter().filter(|guard| guard.is_lost()).count(), 0);
    let released = join_all(guards.into_iter().map(LockGuard::unlock)).await;
    assert_eq!(
        released.iter().filter(|released| released.is_err()).count(),
        0
    );
    client.shutdown().await.unwrap();
}

/// All waiters acquire, one at a time, wherever the slot is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_of_a_slot_that_goes_to_and_fro_all_get_in() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    let slot = SpawnedCluster::slot_of("{s}");
    let held = a.mutex("{s}mutex").unwrap().lock().await.unwrap();
    let held_fair = a.fair_lock("{s}fair").unwrap().lock().await.unwrap();
    let inside: Arc<[AtomicU32; 2]> = Arc::default();
    let waiting: Vec<_> = (0..64)
        .map(|n| {
            let (client, inside) = ([&a, &b][n % 2].clone(), Arc::clone(&inside));
            tokio::spawn(async move {
                let which = n / 2 % 2;
                let lock = if which == 0 {
                    client.mutex("{s}mutex")
                } else {
                    client.fair_lock("{s}fair")
                }
                .unwrap();
                let guard = lock.lock().await.unwrap();
                assert_eq!(
                    inside[which].fetch_add(1, Ordering::AcqRel),
                    0,
                    "held twice"
                );
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside[which].fetch_sub(1, Ordering::AcqRel);
                guard.unlock().await.unwrap();
            })
        })
        .collect();
    eventually("they wait", || async {
        a.stats().waiters + b.stats().waiters >= 64
    })
    .await;
    let moves = ToAndFro::start(&cluster, slot);
    tokio::time::sleep(Duration::from_millis(500)).await;
    held.unlock().await.unwrap();
    held_fair.unlock().await.unwrap();
    for waits in waiting {
        tokio::time::timeout(Duration::from_secs(60), waits)
            .await
            .expect("it waits in vain")
            .unwrap();
    }
    assert!(moves.end().await > 1);
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
}

/// Hand-overs, multi-locks and cancelled futures during redirects: nothing is held twice, and
/// nothing is left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_in_progress_during_redirects_ends_well() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    let slot = SpawnedCluster::slot_of("{s}");
    let moves = ToAndFro::start(&cluster, slot);
    let began = Instant::now();
    let mut rounds = 0u32;
    while began.elapsed() < Duration::from_secs(6) {
        rounds += 1;
        // from one client to the other
        let guard = a.mutex("{s}handed").unwrap().lock().await.unwrap();
        let passed = guard.hand_over(Duration::from_secs(30)).await.unwrap();
        let guard = b.mutex("{s}handed").unwrap().adopt(&passed).await.unwrap();
        assert!(
            a.mutex("{s}handed")
                .unwrap()
                .try_lock()
                .await
                .unwrap()
                .is_none(),
            "{rounds}"
        );
        guard.unlock().await.unwrap();
        // several locks at once, some of which do not move
        let members = || {
            [
                b.mutex("{s}one").unwrap(),
                b.mutex("{s}two").unwrap(),
                b.mutex("elsewhere").unwrap(),
            ]
        };
        let guard = b.multi_lock(members()).unwrap().lock().await.unwrap();
        assert!(
            a.mutex("{s}two")
                .unwrap()
                .try_lock()
                .await
                .unwrap()
                .is_none(),
            "{rounds}"
        );
        guard.unlock().await.unwrap();
        // cancelled in between
        let dropped = a.fair_lock("{s}dropped").unwrap();
        let _ = tokio::time::timeout(
            Duration::from_micros(u64::from(rounds % 40) * 50),
            dropped.lock(),
        )
        .await;
        let guard = b
            .fair_lock("{s}dropped")
            .unwrap()
            .try_lock_for(Duration::from_secs(10))
            .await
            .unwrap();
        guard
            .unwrap_or_else(|| panic!("round {rounds}: it stays held"))
            .unlock()
            .await
            .unwrap();
    }
    assert!(moves.end().await > 1);
    println!("{rounds} rounds");
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
}

/// Kills the source or the target of a migration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_and_a_kill_at_once_leave_all_in_working_order() {
    for kills_new in [false, true] {
        let cluster = start(3, 3).await;
        let connect = || {
            LockClient::builder()
                .outage_patience(Duration::from_secs(60))
                .connect(cluster.url())
        };
        let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
        let held = a.mutex("{s}held").unwrap().lock().await.unwrap();
        let waits = b.mutex("{s}held").unwrap();
        let waiting = tokio::spawn(async move { waits.lock().await?.unlock().await });
        eventually("it waits", || async { b.stats().waiters == 1 }).await;
        let slot = SpawnedCluster::slot_of("{s}");
        let from = there(&cluster, move |cluster| {
            let from = cluster.master_of(slot).unwrap();
            let masters = &cluster.nodes()[..3];
            let to = masters
                .iter()
                .find(|node| node.addr() != from.addr())
                .unwrap();
            let migration = cluster.begin_migration(slot, to).unwrap();
            migration.move_key("{s}held").unwrap();
            std::thread::sleep(Duration::from_millis(50));
            if kills_new { to } else { from }.kill().unwrap();
            cluster
                .nodes()
                .iter()
                .position(|node| node.addr() == from.addr())
                .unwrap()
        })
        .await;
        // the record is behind an ASK, or was lost with its master, which the guard then reports
        match tokio::time::timeout(Duration::from_secs(10), held.unlock())
            .await
            .expect("it is notified")
        {
            Ok(()) => {}
            Err(error) => {
                assert!(
                    error.is_transient()
                        || error.is_lost()
                        || matches!(error, Error::NotHeld { .. }),
                    "{error:?}"
                );
            }
        }
        if kills_new {
            // until the migration is cancelled, the old master redirects all requests to the dead
            // node
            assert!(
                !ask(
                    &cluster.nodes()[from],
                    &["CLUSTER", "SETSLOT", &slot.to_string(), "STABLE"]
                )
                .is_error()
            );
        }
        tokio::time::timeout(Duration::from_secs(90), waiting)
            .await
            .expect("it waits in vain")
            .unwrap()
            .unwrap();
    }
}

/// A master fails over during a migration of one of its slots, of which its replica may know
/// nothing. Locks that have moved may be lost then (`promises.md`), which their holders learn
/// within a lease. Locks that have not moved are still held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_learns_when_a_failover_loses_its_half_moved_lock() {
    const LEASE: Duration = Duration::from_secs(6);
    let cluster = start(3, 3).await;
    let connect = || {
        LockClient::builder()
            .watchdog_timeout(LEASE)
            .connect(cluster.url())
    };
    let (a, b) = (connect().await.unwrap(), connect().await.unwrap());
    let slot = SpawnedCluster::slot_of("{s}");
    let [stayed, gone] = ["{s}stayed", "{s}gone"].map(|name| a.mutex(name).unwrap());
    let (stayed, gone) = (stayed.lock().await.unwrap(), gone.lock().await.unwrap());
    begin_to_move(&cluster, slot, |key| key == "{s}gone").await;
    // the target of the migration may serve nothing until the migration is cancelled
    let heir = there(&cluster, move |cluster| {
        let replicas = cluster
            .replicas_of(cluster.master_of(slot).unwrap())
            .unwrap();
        assert!(!ask(replicas[0], &["CLUSTER", "FAILOVER"]).is_error());
        cluster
            .nodes()
            .iter()
            .position(|node| node.addr() == replicas[0].addr())
            .unwrap()
    })
    .await;
    let heir = &cluster.nodes()[heir];
    eventually("it takes over", || async {
        ask(heir, &["INFO", "replication"])
            .text()
            .contains("role:master")
    })
    .await;
    let theirs = b.mutex("{s}gone").unwrap();
    let began = Instant::now();
    // the record is lost, or still held, as the servers may continue the migration
    let mut taken = None;
    while taken.is_none() && began.elapsed() < 2 * LEASE {
        tokio::time::sleep(Duration::from_millis(20)).await;
        taken = theirs.try_lock().await.unwrap_or_else(|error| {
            assert!(error.is_transient(), "{error:?}");
            None
        });
    }
    if taken.is_some() {
        within(LEASE, "it is notified", || async { gone.is_lost() }).await;
    } else {
        assert!(!gone.is_lost());
    }
    assert!(
        b.mutex("{s}stayed")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
    stayed.unlock().await.unwrap();
}

/// A shutdown ends in time, whichever server is away.
#[tokio::test]
async fn a_shutdown_during_a_failover_ends_in_time() {
    let cluster = start(3, 3).await;
    for after in [0, 100, 700] {
        let client = LockClient::builder()
            .command_timeout(Duration::from_secs(1))
            .connect(cluster.url())
            .await
            .unwrap();
        let locks: Vec<_> = (0..16)
            .map(|n| client.fair_lock(format!("l{n}")).unwrap())
            .collect();
        let guards = join_all(
            locks
                .iter()
                .map(|lock| async move { lock.lock().await.unwrap() }),
        )
        .await;
        let slot = SpawnedCluster::slot_of("l0");
        let killed = there(&cluster, move |cluster| {
            std::thread::sleep(Duration::from_millis(50));
            let master = cluster.master_of(slot).unwrap();
            master.kill().unwrap();
            cluster
                .nodes()
                .iter()
                .position(|node| node.addr() == master.addr())
                .unwrap()
        })
        .await;
        tokio::time::sleep(Duration::from_millis(after)).await;
        let began = Instant::now();
        let ended = client.shutdown().await;
        assert!(
            began.elapsed() < Duration::from_secs(6),
            "{after}: {:?}",
            began.elapsed()
        );
        assert!(
            matches!(ended, Ok(()) | Err(Error::Unsettled { .. })),
            "{ended:?}"
        );
        assert!(guards.iter().all(LockGuard::is_lost));
        there(&cluster, move |cluster| {
            cluster.nodes()[killed].restart().unwrap();
            cluster.wait_until_settled().unwrap();
        })
        .await;
    }
}
