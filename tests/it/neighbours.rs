//! Locks whose names or derived keys collide: every pair is one lock, is refused, or stays apart.

use std::time::Duration;

use nestlock::{Error, FencingToken, Lock, LockClient, LockGuard, OwnerId, Result};

use crate::support::{Server, eventually, wire::Reply};

type Door = fn(&LockClient, &str) -> Result<Lock>;

/// The type of the record. Constructors with the same record at one name open the same lock.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Record {
    Plain,
    ReadWrite,
    String,
    Signal,
    Counted,
}

fn shown(token: u64) -> FencingToken {
    FencingToken::try_from(token).unwrap()
}

const DOORS: [(&str, Record, Door); 12] = [
    ("reentrant", Record::Plain, |client, name| {
        client.reentrant_lock(name)
    }),
    ("non-reentrant", Record::Plain, |client, name| {
        client.non_reentrant_lock(name)
    }),
    ("spin", Record::Plain, |client, name| client.spin_lock(name)),
    ("fenced", Record::Plain, |client, name| {
        client.fenced_lock(name)
    }),
    ("fair", Record::Plain, |client, name| client.fair_lock(name)),
    ("non-reentrant fair", Record::Plain, |client, name| {
        client.non_reentrant_fair_lock(name)
    }),
    ("read", Record::ReadWrite, |client, name| {
        client.read_write_lock(name).map(|lock| lock.read_lock())
    }),
    ("write", Record::ReadWrite, |client, name| {
        client.read_write_lock(name).map(|lock| lock.write_lock())
    }),
    ("string", Record::String, |client, name| {
        client.string_lock(name)
    }),
    ("signal", Record::Signal, |client, name| {
        client.signal_lock(name)
    }),
    ("permits", Record::Counted, |client, name| {
        client.permits(name, 1)?.many(1)
    }),
    ("semaphore", Record::Counted, |client, name| {
        client.semaphore(name)?.many(1)
    }),
];

/// Pairs of names that collide, in the record or in a key next to it.
const NAMES: [[&str; 2]; 14] = [
    ["x", "x"],
    ["x", "{x}"],
    ["x", "lock:x"],
    ["{x}", "lock:{x}"],
    ["x", "lock-signal:x"],
    ["x", "lock-signal:x:0a1b2c3d-1111-4222-8333-444455556666"],
    ["x", "redisson_lock_queue:{x}"],
    ["x", "redisson_lock_timeout:{x}"],
    ["x", "redisson_lock_token:{x}"],
    ["x", "nestlock_rwlock_intent:{x}"],
    ["x", "nestlock_rwlock_readers:{x}"],
    ["x", "nestlock_fence:{x}"],
    ["x", "{x}:timeout"],
    [
        "x",
        "{x}:0a1b2c3d-1111-4222-8333-444455556666:1:rwlock_timeout:1",
    ],
];

/// Returns the key of the lock's record.
fn record(kind: Record, name: &str) -> String {
    if kind == Record::Signal {
        format!("lock:{name}")
    } else {
        name.to_owned()
    }
}

/// Returns true if both locks have the same record. The record of a signal lock is a string, so a
/// string lock at that key is the same lock.
fn is_one_lock(a: (Record, &str), b: (Record, &str)) -> bool {
    let strings = [Record::String, Record::Signal];
    let alike = a.0 == b.0 || strings.contains(&a.0) && strings.contains(&b.0);
    alike && record(a.0, a.1) == record(b.0, b.1)
}

type Dump = Vec<(String, Reply, i64)>;

/// Returns true if every key from `before` is unchanged: no TTL was shortened, no record deleted.
fn is_untouched(before: &Dump, after: &Dump) -> bool {
    before.iter().all(|(key, value, expires)| {
        let found = after.iter().find(|(found, ..)| found == key);
        found.is_some_and(|(_, found, at)| found == value && (at >= expires || *at == -1))
    })
}

fn busy_or_refused<T>(outcome: &Result<Option<T>>) -> bool {
    let refused = matches!(
        outcome,
        Err(Error::WrongType { .. } | Error::WrongLockKind { .. } | Error::InvalidName { .. })
    );
    refused || matches!(outcome, Ok(None))
}

/// Acquires a free lock. A semaphore must be told that it has a permit.
async fn acquired(server: &Server, label: &str, lock: &Lock) -> LockGuard {
    if label == "semaphore" {
        server.call(&["SET", lock.name(), "1"]);
    }
    lock.lock().await.unwrap()
}

/// A7: for every pair of constructors, the holder keeps its lock, whatever is done to the other
/// one.
#[tokio::test]
async fn no_door_touches_what_another_one_keeps() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let (mut refused, mut shared, mut apart) = (0, 0, 0);
    for [one, other] in NAMES {
        let other_way = (one != other).then_some((other, one));
        for (name_a, name_b) in [(one, other)].into_iter().chain(other_way) {
            for (label_a, kind_a, door_a) in DOORS
                .into_iter()
                .filter(|(label, ..)| !label.starts_with("non-"))
            {
                let Ok(held) = door_a(&a, name_a) else {
                    continue;
                };
                for (label_b, kind_b, door_b) in DOORS {
                    let what = format!("{label_a} {name_a:?}, {label_b} {name_b:?}");
                    let Ok(lock) = door_b(&b, name_b) else {
                        refused += 1;
                        continue;
                    };
                    server.call(&["FLUSHALL"]);
                    let guard = acquired(&server, label_a, &held).await;
                    let before = server.dump();
                    let outcome = lock.try_lock().await;
                    if is_one_lock((kind_a, name_a), (kind_b, name_b)) {
                        shared += 1;
                        let both_read = (label_a, label_b) == ("read", "read");
                        assert!(
                            both_read || matches!(outcome, Ok(None)),
                            "{what}: {outcome:?}"
                        );
                    } else if let Ok(Some(theirs)) = outcome {
                        apart += 1;
                        assert_ne!(
                            record(kind_a, name_a),
                            record(kind_b, name_b),
                            "{what}: two owners"
                        );
                        theirs.extend(Duration::from_secs(60)).await.unwrap();
                        assert!(is_untouched(&before, &server.dump()), "{what}: acquired");
                        theirs.unlock().await.unwrap();
                        assert!(is_untouched(&before, &server.dump()), "{what}: released");
                        let _ = lock.force_unlock().await;
                        assert!(is_untouched(&before, &server.dump()), "{what}: freed");
                    } else {
                        refused += 1;
                        assert!(busy_or_refused(&outcome), "{what}: {outcome:?}");
                        // a counter without its leases is a string like any other
                        let counts = kind_a == Record::Counted && kind_b == Record::String;
                        if !counts || name_a != name_b {
                            let _ = lock.force_unlock().await;
                        }
                        let _ = lock.extend(&guard.owner(), Duration::from_secs(600)).await;
                        let _ = lock.release(&guard.owner()).await;
                        assert!(is_untouched(&before, &server.dump()), "{what}: refused");
                    }
                    guard
                        .extend(Duration::from_secs(40))
                        .await
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                    guard
                        .unlock()
                        .await
                        .unwrap_or_else(|error| panic!("{what}: {error}"));
                }
            }
        }
    }
    assert!(
        refused > 100 && shared > 30 && apart > 30,
        "{refused} {shared} {apart}"
    );
}

/// Guarded keys are not locks, but the same rule holds: neither touches what the other one keeps.
/// Permits are an exception: nothing distinguishes their counter from a guarded number.
#[tokio::test]
async fn no_lock_touches_a_guarded_value_and_no_guarded_value_a_lock() {
    let server = Server::start();
    let client = server.client().await;
    for [one, other] in NAMES {
        for (name, key) in [(one, other), (other, one)] {
            for (label, record, door) in DOORS {
                let what = format!("{label} {name:?}, key {key:?}");
                if record == Record::Counted && name == key {
                    continue;
                }
                let Ok(lock) = door(&client, name) else {
                    continue;
                };
                server.call(&["FLUSHALL"]);
                let guard = acquired(&server, label, &lock).await;
                let before = server.dump();
                for token in [7, 9_007_199_254_740_991] {
                    let _ = client.fenced_get(key, shown(token)).await;
                    let _ = client.fenced_set(key, "value", shown(token)).await;
                }
                assert!(
                    is_untouched(&before, &server.dump()),
                    "{what}: {before:?} -> {:?}",
                    server.dump()
                );
                guard
                    .unlock()
                    .await
                    .unwrap_or_else(|error| panic!("{what}: {error}"));

                server.call(&["FLUSHALL"]);
                if client.fenced_set(key, "value", shown(7)).await.is_err() {
                    continue;
                }
                let before = server.dump();
                let outcome = lock.try_lock().await;
                let _ = lock.force_unlock().await;
                drop(outcome);
                client.idle().await;
                assert!(
                    is_untouched(&before, &server.dump()),
                    "{what}: {before:?} -> {:?}",
                    server.dump()
                );
            }
        }
    }
}

/// No lock may have the name of a key that another lock keeps next to its record, with any prefix.
#[tokio::test]
async fn no_lock_is_named_like_a_key_that_another_one_keeps() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let mut keys = std::collections::BTreeSet::new();
    for (label, _, door) in DOORS {
        let held = acquired(&server, label, &door(&a, "x").unwrap()).await;
        let lock = door(&b, "x").unwrap();
        let waiter = tokio::spawn(async move { lock.lock().await.map(drop) });
        // Waiters leave keys as well.
        let looks = server.script_count();
        eventually("a poll", || async {
            waiter.is_finished() || server.script_count() > looks
        })
        .await;
        keys.extend(server.dump().into_iter().map(|(key, ..)| key));
        held.unlock().await.unwrap();
        keys.extend(server.dump().into_iter().map(|(key, ..)| key));
        waiter.await.unwrap().unwrap();
        b.idle().await;
        server.call(&["FLUSHALL"]);
    }
    a.fenced_set("x", "value", shown(7)).await.unwrap();
    keys.extend(server.dump().into_iter().map(|(key, ..)| key));
    assert!(keys.len() > 6, "{keys:?}");
    for key in keys.iter().filter(|key| *key != "x") {
        assert!(
            matches!(
                a.fenced_set(key, "value", shown(7)).await,
                Err(Error::InvalidName { .. })
            ),
            "{key}"
        );
        // A string lock may have this name: it shares the record of the signal lock `x`.
        if key == "lock:x" {
            continue;
        }
        for cut in [0, 4, key.len() / 2] {
            let (prefix, name) = key.split_at(cut);
            let client = server
                .client_with(|builder| builder.name_prefix(prefix))
                .await;
            for (label, _, door) in DOORS {
                let outcome = door(&client, name);
                assert!(
                    matches!(outcome, Err(Error::InvalidName { .. })),
                    "{label} {prefix:?} {name:?}: {outcome:?}"
                );
            }
        }
    }
}

/// A7: a signal lock leaves a foreign key in the place of its signal unchanged, and works all the
/// same.
#[tokio::test]
async fn a_signal_lock_leaves_a_foreign_key_where_its_signal_goes() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    // A lock of Redisson, which does not reserve this name.
    server.call(&[
        "HSET",
        "lock-signal:x",
        "ffffffff-1111-4222-8333-444455556666:1",
        "1",
    ]);
    server.call(&["PEXPIRE", "lock-signal:x", "60000"]);
    let before = server.dump();
    let (la, lb) = (a.signal_lock("x").unwrap(), b.signal_lock("x").unwrap());
    la.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(server.dump(), before);
    let held = la.lock().await.unwrap();
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap().unlock().await });
    eventually("it waits", || async {
        server.blocked() > 0 || server.command_count("blpop") > 0
    })
    .await;
    held.unlock().await.unwrap();
    waiter.await.unwrap().unwrap();
    let freed = la.lock().await.unwrap();
    assert!(la.force_unlock().await.unwrap());
    drop(freed);
    a.idle().await;
    b.idle().await;
    assert_eq!(server.dump(), before);
}

/// The owner is named like a field in a record that is not its own.
#[tokio::test]
async fn an_owner_called_like_a_field_holds_nothing() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    for held in [6, 7] {
        let (label, _, door) = DOORS[held];
        let guard = door(&a, "x").unwrap().lock().await.unwrap();
        let before = server.dump();
        let writer: OwnerId = format!("{}:write", guard.owner()).parse().unwrap();
        for owner in [OwnerId::from_value("mode").unwrap(), writer, guard.owner()] {
            for (other, kind, door) in DOORS
                .into_iter()
                .filter(|(_, kind, _)| *kind != Record::Signal)
            {
                let lock = door(&b, "x").unwrap();
                // Skips the real owner with constructors of its own kind.
                if owner == guard.owner() && kind == Record::ReadWrite {
                    continue;
                }
                let extended = lock.extend(&owner, Duration::from_secs(600)).await;
                let refused = matches!(
                    extended,
                    Err(Error::NotHeld { .. } | Error::WrongType { .. } | Error::Store { .. })
                );
                assert!(refused, "{label} as {other} of {owner}: {extended:?}");
                let released = lock.release(&owner).await;
                assert!(
                    released.is_err(),
                    "{label} as {other} of {owner}: {released:?}"
                );
                assert_eq!(server.dump(), before, "{label} as {other} of {owner}");
            }
        }
        guard.unlock().await.unwrap();
    }
}
