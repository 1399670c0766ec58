//! Migrations that stall: some keys of a name are at one master, some at another.

use std::time::{Duration, Instant};

use nestlock::{Error, Lock, LockClient, StoreErrorKind};
use nestlock_embedded::SpawnedCluster;

use super::{begin_to_move, client, start, there};
use crate::support::{wire::Wire, within};

/// Returns a lock of each kind that has several keys.
fn kinds(client: &LockClient, name: &str) -> Vec<(&'static str, Lock)> {
    let rw = client.read_write_lock(format!("{name}rw")).unwrap();
    vec![
        ("fair", client.fair_lock(format!("{name}fair")).unwrap()),
        ("write", rw.write_lock()),
        (
            "read",
            client
                .read_write_lock(format!("{name}read"))
                .unwrap()
                .read_lock(),
        ),
        (
            "fenced",
            client.fenced_lock(format!("{name}fenced")).unwrap(),
        ),
    ]
}

/// Returns whether the key is the record of a lock, not one of its other keys.
fn is_record(key: &str) -> bool {
    !key.contains("nestlock_") && !key.contains("redisson_") && !key.contains("rwlock_timeout")
}

/// A release succeeds wherever the record is, and a waiter acquires when the migration continues.
#[tokio::test]
async fn a_release_gets_through_while_a_migration_stands_still() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    for (n, moves) in [(0, false), (1, true)] {
        let name = format!("{{{n}}}");
        let slot = SpawnedCluster::slot_of(&name);
        let mut held = Vec::new();
        for (kind, lock) in kinds(&a, &name) {
            let guard = lock.lock().await.unwrap();
            // nested, so that one release only lowers the count; a reader's remaining TTL would
            // need its other keys
            let inner = if kind == "read" {
                None
            } else {
                Some(lock.lock().await.unwrap())
            };
            held.push((kind, inner, guard));
        }
        let waiting: Vec<_> = kinds(&b, &name)
            .into_iter()
            .filter(|(kind, _)| *kind != "read")
            .map(|(kind, lock)| {
                let waits =
                    tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
                (kind, waits)
            })
            .collect();
        within(Duration::from_secs(5), "they wait", || async {
            b.stats().waiters == 3
        })
        .await;
        let to = begin_to_move(&cluster, slot, move |key| is_record(key) == moves).await;
        for (kind, inner, guard) in held {
            let asked = Instant::now();
            if let Some(inner) = inner {
                inner
                    .unlock()
                    .await
                    .unwrap_or_else(|error| panic!("{kind}, {moves}: {error:?}"));
            }
            guard
                .unlock()
                .await
                .unwrap_or_else(|error| panic!("{kind}, {moves}: {error:?}"));
            assert!(
                asked.elapsed() < Duration::from_secs(2),
                "{kind}, {moves}: {:?}",
                asked.elapsed()
            );
        }
        there(&cluster, move |cluster| {
            cluster.migrate(slot, &cluster.nodes()[to]).unwrap();
        })
        .await;
        for (kind, waits) in waiting {
            let in_time = tokio::time::timeout(Duration::from_secs(20), waits).await;
            in_time
                .unwrap_or_else(|_| panic!("{kind} waits in vain"))
                .unwrap();
        }
    }
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
}

/// The list of a signal lock exists only for a moment, so no migration moves it.
#[tokio::test]
async fn a_signal_lock_is_released_while_a_migration_stands_still() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    for (n, moves) in [(0, false), (1, true)] {
        let name = format!("{{{n}}}");
        let [ours, theirs] = [&a, &b].map(|client| client.signal_lock(&name).unwrap());
        let guard = ours.lock().await.unwrap();
        let slot = SpawnedCluster::slot_of(&name);
        let to = begin_to_move(&cluster, slot, move |_| moves).await;
        let waits = tokio::spawn(async move { theirs.lock().await?.unlock().await });
        let asked = Instant::now();
        guard
            .unlock()
            .await
            .unwrap_or_else(|error| panic!("{moves}: {error:?}"));
        assert!(
            asked.elapsed() < Duration::from_secs(2),
            "{moves}: {:?}",
            asked.elapsed()
        );
        there(&cluster, move |cluster| {
            cluster.migrate(slot, &cluster.nodes()[to]).unwrap();
        })
        .await;
        let in_time = tokio::time::timeout(Duration::from_secs(20), waits).await;
        in_time
            .unwrap_or_else(|_| panic!("waits in vain"))
            .unwrap()
            .unwrap();
    }
}

/// The loss of a signal lock is reported at once, and a cancelled release that was executed delays
/// no other call: there is no queue that could contradict it.
#[tokio::test]
async fn a_client_knows_an_unheld_signal_lock_in_a_stalled_migration() {
    let cluster = start(2, 0).await;
    let a = client(&cluster).await;
    for (n, moves) in [(0, false), (1, true)] {
        let name = format!("{{{n}}}");
        let lock = a.signal_lock(&name).unwrap();
        let slot = SpawnedCluster::slot_of(&name);
        let guard = lock.lock().await.unwrap();
        let to = begin_to_move(&cluster, slot, move |_| moves).await;
        let mut at =
            Wire::connect(cluster.nodes()[if moves { to } else { 1 - to }].addr()).unwrap();
        at.call(&["ASKING"]).unwrap();
        at.call(&["SET", &format!("lock:{name}"), "somebody", "EX", "60"])
            .unwrap();
        let error = guard.unlock().await.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{moves}: {error:?}");
        at.call(&["ASKING"]).unwrap();
        assert_eq!(
            at.call(&["GET", &format!("lock:{name}")]).unwrap().text(),
            "somebody"
        );
    }
    a.shutdown().await.unwrap();
}

/// A reader that leaves shares its record with another reader.
#[tokio::test]
async fn an_owner_left_in_a_record_still_holds_it() {
    let cluster = start(2, 0).await;
    let (a, b, c) = (
        client(&cluster).await,
        client(&cluster).await,
        client(&cluster).await,
    );
    for (n, moves) in [(0, false), (1, true)] {
        let name = format!("{{{n}}}l");
        let slot = SpawnedCluster::slot_of(&name);
        let read = |client: &LockClient| client.read_write_lock(&name).unwrap().read_lock();
        let (leaves, stays) = (
            read(&a).lock().await.unwrap(),
            read(&b).lock().await.unwrap(),
        );
        // a writer's read hold inside its write: only its other keys say how long it lasts
        let both = a.read_write_lock(format!("{name}both")).unwrap();
        let (writes, reads) = (
            both.write_lock().lock().await.unwrap(),
            both.read_lock().lock().await.unwrap(),
        );
        let to = begin_to_move(&cluster, slot, move |key| is_record(key) == moves).await;
        leaves.unlock().await.unwrap();
        let error = writes.unlock().await.unwrap_err();
        let is_refused = matches!(&error, Error::Store { source, .. } if source.kind() == StoreErrorKind::TryAgain);
        assert!(is_refused && error.is_transient(), "{error:?}");
        there(&cluster, move |cluster| {
            cluster.migrate(slot, &cluster.nodes()[to]).unwrap();
        })
        .await;
        let write = c.read_write_lock(&name).unwrap().write_lock();
        assert!(
            write.try_lock().await.unwrap().is_none(),
            "another owner reads"
        );
        stays.unlock().await.unwrap();
        write.lock().await.unwrap().unlock().await.unwrap();
        let write = c
            .read_write_lock(format!("{name}both"))
            .unwrap()
            .write_lock();
        assert!(
            write.try_lock().await.unwrap().is_none(),
            "the writer still reads"
        );
        reads.unlock().await.unwrap();
        write.lock().await.unwrap().unlock().await.unwrap();
    }
}

/// Without the queue, the next waiter is unknown, but it is certain that nothing was executed.
#[tokio::test]
async fn what_is_only_refused_is_never_unconfirmed() {
    let cluster = start(2, 0).await;
    let (a, b) = (client(&cluster).await, client(&cluster).await);
    for (n, moves) in [(0, false), (1, true)] {
        let name = format!("{{{n}}}");
        let slot = SpawnedCluster::slot_of(&name);
        let mut held = Vec::new();
        for (_, lock) in kinds(&a, &name) {
            held.push(lock.lock().await.unwrap());
        }
        begin_to_move(&cluster, slot, move |key| is_record(key) == moves).await;
        let tries = kinds(&b, &name).into_iter().map(|(kind, lock)| async move {
            let wait = Duration::from_millis(200);
            let is_refused = |said: nestlock::Result<Option<_>>| {
                let Err(error) = said else {
                    panic!("{kind}, {moves}: {said:?}")
                };
                assert!(error.is_transient(), "{kind}, {moves}: {error:?}");
                matches!(&error, Error::Store { source, .. } if !source.may_have_executed())
            };
            assert!(is_refused(lock.try_lock().await), "{kind}, {moves}");
            // a reply that a busy machine delays beyond the end of the wait does not count
            for tries in (0..3).rev() {
                if is_refused(lock.try_lock_for(wait).await) {
                    break;
                }
                assert!(tries > 0, "{kind}, {moves}: waits");
            }
        });
        futures::future::join_all(tries).await;
        drop(held);
    }
}

/// Holds are renewed where they are, for longer than their lease.
#[tokio::test]
async fn a_migration_that_stands_still_costs_no_hold() {
    let lease = Duration::from_secs(3);
    let cluster = start(2, 0).await;
    let connect = || {
        LockClient::builder()
            .watchdog_timeout(lease)
            .connect(cluster.url())
    };
    let a = connect().await.unwrap();
    let mut held = Vec::new();
    for (n, moves) in [(0, false), (1, true)] {
        let name = format!("{{{n}}}");
        for (kind, lock) in kinds(&a, &name) {
            // a reader's record is only valid together with its other keys
            if kind != "read" {
                held.push((kind, moves, lock.lock().await.unwrap()));
            }
        }
        begin_to_move(&cluster, SpawnedCluster::slot_of(&name), move |key| {
            is_record(key) == moves
        })
        .await;
    }
    tokio::time::sleep(2 * lease).await;
    for (kind, moves, guard) in held {
        assert!(!guard.is_lost(), "{kind}, {moves}");
        guard
            .unlock()
            .await
            .unwrap_or_else(|error| panic!("{kind}, {moves}: {error:?}"));
    }
}
