//! Foreign data at the lock's name, and servers that refuse, forget or deny.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use nestlock::{
    AcquireOptions, Error, LockClient, LockClientBuilder, LossReason, OwnerId, StoreErrorKind,
};

use crate::support::{Server, eventually, wire::Reply, within};

/// Awaits `future` for 60 s at most: enough for any machine, and a hang fails.
async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .expect("an end")
}

/// Makes a client renew its holds every 500 ms.
fn quick(builder: LockClientBuilder) -> LockClientBuilder {
    builder.watchdog_timeout(Duration::from_millis(1500))
}

/// Makes a client [`quick`], without retries of an acquire that has no wait limit.
fn impatient(builder: LockClientBuilder) -> LockClientBuilder {
    quick(builder)
        .outage_patience(Duration::ZERO)
        .command_timeout(Duration::from_millis(300))
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(outcome: nestlock::Result<T>, wanted: StoreErrorKind) {
    match outcome {
        Err(Error::Store { source, .. }) => {
            assert_eq!(source.kind(), wanted, "{source}");
            assert!(!source.may_have_executed(), "{source}");
        }
        other => panic!("{other:?} instead of {wanted:?}"),
    }
}

// --- foreign data at the lock's name ---

const DATA: [(&str, &[&str]); 12] = [
    ("string", &["SET", "l", "data"]),
    ("string with TTL", &["SET", "l", "data", "PX", "600000"]),
    ("list", &["RPUSH", "l", "a", "b"]),
    ("set", &["SADD", "l", "a"]),
    ("zset", &["ZADD", "l", "1", "a"]),
    ("stream", &["XADD", "l", "*", "a", "b"]),
    ("hash of one field", &["HSET", "l", "name", "Ada"]),
    (
        "hash of several fields",
        &["HSET", "l", "name", "Ada", "born", "1815"],
    ),
    (
        "hash with TTL",
        &[
            "EVAL",
            "redis.call('hset', 'l', 'name', 'Ada') return redis.call('pexpire', 'l', 600000)",
            "0",
        ],
    ),
    (
        "Redisson read lock",
        &[
            "HSET",
            "l",
            "mode",
            "read",
            "0a1b2c3d-1111-4222-8333-444455556666:42",
            "1",
        ],
    ),
    (
        "Redisson write lock",
        &[
            "HSET",
            "l",
            "mode",
            "write",
            "0a1b2c3d-1111-4222-8333-444455556666:42:write",
            "1",
        ],
    ),
    ("hash with an empty field", &["HSET", "l", "", ""]),
];

/// Returns the entries of [`DATA`] whose types the server supports.
fn data(server: &Server) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    DATA.into_iter().filter(|(what, _)| server.has_type(what))
}

/// N12, R52, F29, F30: the client refuses the key with a typed error that names it, and never
/// modifies or deletes it.
#[tokio::test]
async fn n12_r52_f29_f30_data_at_a_lock_name_is_refused_and_untouched() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock("l").unwrap();
    let (me, other): (_, OwnerId) = (
        client.current_owner(),
        "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:1".parse().unwrap(),
    );
    for (what, command) in data(&server) {
        server.call(&["DEL", "l"]);
        assert!(!server.call(command).is_error(), "{what}");
        let before = server.dump();
        let is_hash = server.call(&["TYPE", "l"]).text() == "hash";
        let refused = |error: Error| match error {
            Error::WrongLockKind { lock, .. } if is_hash => assert_eq!(lock, "l"),
            Error::WrongType { lock, .. } if !is_hash => assert_eq!(lock, "l"),
            error => panic!("{what}: {error:?}"),
        };
        refused(soon(lock.lock()).await.unwrap_err());
        refused(lock.try_lock().await.unwrap_err());
        refused(
            soon(lock.try_lock_for(Duration::from_secs(600)))
                .await
                .unwrap_err(),
        );
        refused(
            lock.try_lock_with(AcquireOptions::new().lease(Duration::from_secs(1)))
                .await
                .unwrap_err(),
        );
        refused(lock.force_unlock().await.unwrap_err());
        refused(lock.is_locked().await.unwrap_err());
        refused(lock.holder().await.unwrap_err());
        refused(lock.hold_count(&me).await.unwrap_err());
        refused(lock.remaining_lease().await.unwrap_err());
        refused(lock.release(&other).await.unwrap_err());
        assert!(
            matches!(lock.release(&me).await, Err(Error::NotHeld { .. })),
            "{what}"
        );
        assert!(
            matches!(
                lock.extend(&me, Duration::from_secs(60)).await,
                Err(Error::NotHeld { .. })
            ),
            "{what}"
        );
        assert!(
            matches!(
                lock.extend(&other, Duration::from_secs(60)).await,
                Err(Error::NotHeld { .. })
            ),
            "{what}"
        );
        client.idle().await;
        assert_eq!(server.dump(), before, "{what}");
        assert_eq!(
            (client.stats().holds, client.stats().settling),
            (0, 0),
            "{what}"
        );
    }
    server.call(&["DEL", "l"]);
    lock.lock().await.unwrap().unlock().await.unwrap();
}

/// F29, F30: under a held lock, the holder is notified and the data stays.
#[tokio::test]
async fn f29_f30_data_that_appears_under_a_held_lock_is_never_touched() {
    let server = Server::start();
    let client = server.client_with(quick).await;
    let lock = client.reentrant_lock("l").unwrap();
    for (what, command) in data(&server) {
        // The watchdog finds it.
        server.call(&["DEL", "l"]);
        let guard = lock.lock().await.unwrap();
        server.call(&["DEL", "l"]);
        assert!(!server.call(command).is_error(), "{what}");
        let before = server.dump();
        let error = soon(guard.lost()).await;
        assert!(
            matches!(
                error,
                Error::Lost {
                    reason: LossReason::TakenOver,
                    ..
                }
            ),
            "{what}: {error}"
        );
        assert!(
            matches!(guard.unlock().await, Err(Error::Lost { .. })),
            "{what}"
        );
        // A release, a re-entry, or a dropped guard finds it.
        for how in 0..3 {
            server.call(&["DEL", "l"]);
            let guard = lock.lock().await.unwrap();
            server.call(&["DEL", "l"]);
            assert!(!server.call(command).is_error(), "{what}");
            match how {
                0 => assert!(guard.unlock().await.is_err(), "{what}"),
                1 => assert!(lock.lock().await.is_err(), "{what}"),
                _ => drop(guard),
            }
            soon(client.idle()).await;
        }
        let after = server.dump();
        // Streams and TTLs differ with the clock.
        assert_eq!(after.len(), before.len(), "{what}");
        if !what.contains("stream") {
            assert_eq!(after[0].1, before[0].1, "{what}");
        }
    }
}

// --- a server without memory, without disk, without replicas ---

/// R25, F25: nothing can be acquired, but every hold is still renewed and released.
#[tokio::test]
async fn r25_f25_h12_a_full_server_renews_and_releases_held_locks() {
    let server = Server::start_real();
    let client = server.client_with(impatient).await;
    let (lock, free) = (
        client.reentrant_lock("l").unwrap(),
        client.reentrant_lock("free").unwrap(),
    );
    let outer = lock.lock().await.unwrap();
    let inner = lock.lock().await.unwrap();
    let dropped = client
        .reentrant_lock("dropped")
        .unwrap()
        .lock()
        .await
        .unwrap();
    server.call(&["CONFIG", "SET", "maxmemory", "1"]);
    for _ in 0..2 {
        assert_refused(soon(free.lock()).await, StoreErrorKind::OutOfMemory);
        assert_refused(free.try_lock().await, StoreErrorKind::OutOfMemory);
    }
    assert!(!server.exists("free"));
    let renewals = server.command_count("pexpire");
    eventually("renewals", || async {
        server.command_count("pexpire") >= renewals + 5
    })
    .await;
    assert!(!outer.is_lost() && !inner.is_lost() && !dropped.is_lost());
    inner.unlock().await.unwrap();
    assert_eq!(server.record("l"), [(outer.owner().to_string(), 1)]);
    drop(dropped);
    outer.unlock().await.unwrap();
    soon(client.idle()).await;
    assert_eq!(server.dump(), []);
    assert_eq!(client.stats().holds, 0);
    server.call(&["CONFIG", "SET", "maxmemory", "0"]);
    free.lock().await.unwrap().unlock().await.unwrap();
}

/// Checks a client against a server that refuses every write.
async fn refuses_writes(server: &Server, refuse: impl Fn(bool), wanted: StoreErrorKind) {
    outlasts_a_refusal(server, &refuse, wanted).await;
    let client = server.client_with(impatient).await;
    let (lock, free) = (
        client.reentrant_lock("l").unwrap(),
        client.reentrant_lock("free").unwrap(),
    );
    let kept = client.reentrant_lock("kept").unwrap().lock().await.unwrap();
    let guard = lock.lock().await.unwrap();
    refuse(true);
    assert_refused(soon(free.lock()).await, wanted);
    assert_refused(free.try_lock().await, wanted);
    // N4: the caller learns that a release failed.
    assert_refused(guard.unlock().await, wanted);
    assert_refused(lock.force_unlock().await, wanted);
    // The holder keeps its hold until the lease ends, and no longer.
    assert!(!kept.is_lost());
    let error = soon(kept.lost()).await;
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            }
        ),
        "{error}"
    );
    refuse(false);
    soon(client.idle()).await;
    for lock in [&lock, &free] {
        soon(lock.lock()).await.unwrap().unlock().await.unwrap();
    }
    drop(kept);
    soon(client.idle()).await;
    eventually("no lock", || async { server.dump().is_empty() }).await;
}

/// Checks that a try reports a transient refusal, and that a wait and a release outlast it.
async fn outlasts_a_refusal(server: &Server, refuse: impl Fn(bool), wanted: StoreErrorKind) {
    let client = server.client().await;
    let (lock, held) = (
        client.reentrant_lock("l").unwrap(),
        client.reentrant_lock("held").unwrap(),
    );
    let guard = held.lock().await.unwrap();
    refuse(true);
    assert_refused(lock.try_lock().await, wanted);
    server.call(&["CONFIG", "RESETSTAT"]);
    let waiting = tokio::spawn(async move { lock.try_lock_for(Duration::from_secs(60)).await });
    eventually("refusals", || async { server.script_count() >= 2 }).await;
    let unlocking = tokio::spawn(guard.unlock());
    eventually("refusals", || async { server.script_count() >= 6 }).await;
    assert!(!waiting.is_finished());
    refuse(false);
    let guard = soon(waiting).await.unwrap().unwrap().expect("the lock");
    if wanted != StoreErrorKind::OutOfMemory {
        soon(unlocking).await.unwrap().unwrap();
        assert!(!server.exists("held"));
    }
    guard.unlock().await.unwrap();
}

#[tokio::test]
async fn a_wait_outlasts_a_server_without_memory() {
    let server = Server::start_real();
    let fill = |full: bool| {
        server.call(&["CONFIG", "SET", "maxmemory", if full { "1" } else { "0" }]);
    };
    outlasts_a_refusal(&server, fill, StoreErrorKind::OutOfMemory).await;
}

#[tokio::test]
async fn f26_n4_a_server_that_cannot_save_is_a_typed_error() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start_with(&["--dir", folder.path().to_str().unwrap()]);
    server.call(&["CONFIG", "SET", "save", "3600 1000000"]);
    // A directory at the path of the snapshot makes the save fail.
    std::fs::create_dir(folder.path().join("dump.rdb")).unwrap();
    let save = |fails: bool| {
        server.call(&[
            "CONFIG",
            "SET",
            "stop-writes-on-bgsave-error",
            if fails { "yes" } else { "no" },
        ]);
    };
    save(false);
    server.call(&["BGSAVE"]);
    eventually("a failed save", || async {
        server
            .call(&["INFO", "persistence"])
            .text()
            .contains("rdb_last_bgsave_status:err")
    })
    .await;
    refuses_writes(&server, save, StoreErrorKind::Misconfigured).await;
}

#[tokio::test]
async fn f26_n4_a_server_without_replicas_is_a_typed_error() {
    let server = Server::start_real();
    let require = |required: bool| {
        server.call(&[
            "CONFIG",
            "SET",
            "min-replicas-to-write",
            if required { "1" } else { "0" },
        ]);
    };
    refuses_writes(&server, require, StoreErrorKind::NoReplicas).await;
}

// --- a server that forgets ---

/// R105, F15: no caller notices that the server has forgotten the scripts.
#[tokio::test]
async fn r105_f15_a_script_flush_between_any_commands_goes_unnoticed() {
    let server = Server::start();
    let (a, b) = (server.client_with(quick).await, server.client().await);
    let flush = || assert_eq!(server.call(&["SCRIPT", "FLUSH"]).text(), "OK");
    let (la, lb) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    flush();
    let outer = la.lock().await.unwrap();
    flush();
    let inner = la.lock().await.unwrap();
    assert_eq!(server.record("l"), [(outer.owner().to_string(), 2)]);
    flush();
    assert!(lb.try_lock().await.unwrap().is_none());
    flush();
    inner.unlock().await.unwrap();
    assert_eq!(server.record("l"), [(outer.owner().to_string(), 1)]);
    flush();
    assert!(outer.extend(Duration::from_secs(2)).await.is_ok());
    flush();
    assert_eq!(la.hold_count(&outer.owner()).await.unwrap(), 1);
    flush();
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap() });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    for _ in 0..3 {
        flush();
        let renewals = server.command_count("pexpire");
        eventually("a renewal", || async {
            server.command_count("pexpire") > renewals
        })
        .await;
    }
    flush();
    outer.unlock().await.unwrap();
    drop(soon(waiter).await.unwrap());
    flush();
    b.idle().await;
    flush();
    assert!(!la.force_unlock().await.unwrap());
    assert_eq!(server.dump(), []);
}

/// F15, R110: a flush costs one more round trip for each script, and no more.
#[tokio::test]
async fn f15_r110_script_flush_in_a_loop_costs_round_trips_only() {
    let server = Server::start();
    let client = server.client().await;
    let mut wire = server.wire();
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<()>();
    let flushing = tokio::task::spawn_blocking(move || {
        let mut flushes = 0;
        while stopped.try_recv().is_err() {
            assert_eq!(wire.call(&["SCRIPT", "FLUSH"]).unwrap().text(), "OK");
            flushes += 1;
        }
        flushes
    });
    let lock = client.reentrant_lock("l").unwrap();
    for _ in 0..300 {
        let outer = soon(lock.lock()).await.unwrap();
        let inner = soon(lock.lock()).await.unwrap();
        assert_eq!(server.record("l"), [(outer.owner().to_string(), 2)]);
        inner.unlock().await.unwrap();
        outer.unlock().await.unwrap();
    }
    stop.send(()).unwrap();
    assert!(flushing.await.unwrap() > 100);
    assert_eq!(server.dump(), []);
    // Each script is sent as text once and then called by its digest. The release may be the first
    // to hit the last flush, so the acquire may be learned a round later.
    for _ in 0..2 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    let texts = server.command_count("eval");
    assert!(texts <= 1204, "{texts} texts for 1204 calls");
    for _ in 0..10 {
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    assert_eq!(server.command_count("eval"), texts);
}

/// R17, R20, R22, F16: the holder learns that all data is gone long before its lease ends. The lost
/// hold is not renewed, and a new hold is.
#[tokio::test]
async fn r17_r20_r22_f16_a_holder_notices_and_forgets_a_flushed_lock() {
    let server = Server::start();
    let lease = Duration::from_secs(2);
    let client = server
        .client_with(|b| {
            b.watchdog_timeout(lease)
                .command_timeout(Duration::from_millis(500))
        })
        .await;
    let lock = client.reentrant_lock("l").unwrap();
    let guard = lock.lock().await.unwrap();
    let inner = lock.lock().await.unwrap();
    let flushed = Instant::now();
    server.call(&["FLUSHALL"]);
    let error = soon(guard.lost()).await;
    let took = flushed.elapsed();
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{error}"
    );
    assert!(
        took < lease / 3 + Duration::from_millis(500) + Duration::from_millis(500),
        "{took:?}"
    );
    assert!(guard.is_lost() && inner.is_lost() && guard.remaining().is_zero());
    // R22: the lost hold causes no more requests.
    client.idle().await;
    let scripts = server.script_count();
    let quiet = Instant::now();
    within(lease * 3, "a quiet lease", || async {
        assert_eq!(server.script_count(), scripts);
        quiet.elapsed() > lease
    })
    .await;
    assert!(matches!(inner.unlock().await, Err(Error::Lost { .. })));
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    assert_eq!((client.stats().holds, server.script_count()), (0, scripts));
    // R20: the next hold is renewed like any other.
    let guard = lock.lock().await.unwrap();
    let relocked = Instant::now();
    within(lease * 6, "three leases", || async {
        assert!(server.exists("l") && !guard.is_lost());
        relocked.elapsed() > lease * 3
    })
    .await;
    guard.unlock().await.unwrap();
    assert_eq!(server.dump(), []);
}

/// F17, P8, R17: after a forced unlock, waiters are woken, and the old holder is notified and
/// touches nothing.
#[tokio::test]
async fn f17_p8_r17_force_unlock_wakes_waiters_and_alerts_the_holder() {
    let server = Server::start();
    let a = server.client_with(quick).await;
    let b = server
        .client_with(|builder| builder.poll_cap(Duration::from_secs(600)))
        .await;
    let c = server.client().await;
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let lb = b.reentrant_lock("l").unwrap();
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap() });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    assert!(c.reentrant_lock("l").unwrap().force_unlock().await.unwrap());
    let new = soon(waiter).await.unwrap();
    let error = soon(guard.lost()).await;
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::TakenOver,
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    soon(a.idle()).await;
    assert_eq!(server.record("l"), [(new.owner().to_string(), 1)]);
    new.unlock().await.unwrap();
    // Without a new holder, the record is missing.
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    assert!(c.reentrant_lock("l").unwrap().force_unlock().await.unwrap());
    let error = soon(guard.lost()).await;
    assert!(
        matches!(
            error,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{error}"
    );
    assert!(!c.reentrant_lock("l").unwrap().force_unlock().await.unwrap());
}

// --- permissions ---

/// Commands that the reentrant lock needs, as lua/README.md and src/guide/permissions.md list them.
const COMMANDS: &[&str] = nestlock::permissions::EVERY_CLIENT.commands;

pub fn set_user(server: &Server, name: &str, commands: &[&str], rules: &[&str]) {
    let grants: Vec<String> = commands
        .iter()
        .map(|command| format!("+{command}"))
        .collect();
    let mut parts = vec![
        "ACL",
        "SETUSER",
        name,
        "reset",
        "on",
        ">pw",
        "resetchannels",
    ];
    parts.extend(rules);
    parts.extend(grants.iter().map(String::as_str));
    assert_eq!(server.call(&parts).text(), "OK", "{parts:?}");
}

pub async fn log_in(server: &Server, name: &str, builder: LockClientBuilder) -> LockClient {
    builder
        .connect(format!("redis://{name}:pw@{}", server.addr()))
        .await
        .expect("a connection")
}

/// Returns what the server denied to any user: commands, keys, channels.
pub fn denials(server: &Server) -> BTreeSet<String> {
    denied(&server.call(&["ACL", "LOG"]))
}

/// Returns the objects in `ACL LOG`, without the client's introduction: a server may refuse that
/// one (guide: permissions).
pub fn denied(log: &Reply) -> BTreeSet<String> {
    let object = |entry: &Reply| {
        let fields = entry.list();
        let at = fields
            .iter()
            .position(|field| *field == Reply::Text("object".into()))
            .unwrap();
        fields[at + 1].text().to_owned()
    };
    // Redis 6 logs no subcommands.
    let introduces = |object: &String| ["client|setinfo", "client"].contains(&&**object);
    log.list()
        .iter()
        .map(object)
        .filter(|object| !introduces(object))
        .collect()
}

const APP: [&str; 2] = ["~app:*", "&redisson_lock__channel:{app:*"];

/// R112, F28: everything works for a user with exactly the permissions in the guide.
#[tokio::test]
async fn r112_f28_everything_works_with_the_minimal_permissions() {
    let server = Server::start_real();
    set_user(&server, "locks", COMMANDS, &APP);
    let a = log_in(&server, "locks", quick(LockClient::builder())).await;
    let b = log_in(
        &server,
        "locks",
        LockClient::builder().poll_cap(Duration::from_secs(600)),
    )
    .await;
    let (la, lb) = (
        a.reentrant_lock("app:l").unwrap(),
        b.reentrant_lock("app:l").unwrap(),
    );
    server.call(&["SCRIPT", "FLUSH"]);
    let outer = la.lock().await.unwrap();
    let inner = la.lock().await.unwrap();
    assert!(lb.try_lock().await.unwrap().is_none());
    inner.unlock().await.unwrap();
    outer.extend(Duration::from_secs(5)).await.unwrap();
    assert_eq!(la.hold_count(&outer.owner()).await.unwrap(), 1);
    assert_eq!(lb.holder().await.unwrap(), Some(outer.owner()));
    assert!(lb.is_locked().await.unwrap() && lb.remaining_lease().await.unwrap().is_some());
    let (other, renewals) = (
        a.reentrant_lock("app:r").unwrap().lock().await.unwrap(),
        server.command_count("pexpire"),
    );
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap() });
    eventually("renewals", || async {
        server.command_count("pexpire") >= renewals + 3
    })
    .await;
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    outer.unlock().await.unwrap();
    let taken = soon(waiter).await.unwrap();
    assert!(la.force_unlock().await.unwrap());
    drop((taken, other));
    soon(a.idle()).await;
    soon(b.idle()).await;
    eventually("no channel", || async { server.channels().is_empty() }).await;
    a.shutdown().await.unwrap();
    b.shutdown().await.unwrap();
    assert_eq!(denials(&server), BTreeSet::new());
    assert_eq!(server.dump(), []);
}

/// R112: each command is needed: without it, the server denies a request.
#[tokio::test]
async fn r112_f28_no_permission_in_the_list_is_superfluous() {
    let server = Server::start_real();
    set_user(&server, "other", &["@all"], &["~*", "&*"]);
    for missing in COMMANDS {
        let rest: Vec<&str> = COMMANDS
            .iter()
            .copied()
            .filter(|command| command != missing)
            .collect();
        set_user(&server, "locks", &rest, &APP);
        server.call(&["ACL", "LOG", "RESET"]);
        server.call(&["FLUSHALL"]);
        server.call(&["SCRIPT", "FLUSH"]);
        let url = format!("redis://locks:pw@{}", server.addr());
        // A reply has a third of it, which is longer than a busy machine stalls this process.
        let builder = LockClient::builder().watchdog_timeout(Duration::from_millis(4_500));
        if let Ok(client) = soon(builder.connect(url)).await {
            let lock = client.reentrant_lock("app:l").unwrap();
            let _ = soon(lock.try_lock_for(Duration::from_millis(1)))
                .await
                .map(drop);
            let _ = soon(lock.try_lock_for(Duration::from_millis(1)))
                .await
                .map(drop);
            soon(client.idle()).await;
            if let Ok(Some(guard)) = soon(lock.try_lock()).await {
                let _ = soon(lock.try_lock()).await.map(drop);
                let _ = soon(guard.extend(Duration::from_secs(60))).await;
                let _ = soon(lock.holder()).await;
                server.call(&["HSET", "app:l", "data", "1"]);
                let _ = soon(guard.unlock()).await;
            }
            server.call(&["DEL", "app:l"]);
            server.call(&[
                "HSET",
                "app:l",
                "0a1b2c3d-1111-4222-8333-444455556666:42",
                "1",
            ]);
            // The wait is long enough to subscribe.
            let _ = soon(lock.try_lock_for(Duration::from_millis(1_200))).await;
            let _ = soon(lock.force_unlock()).await;
            // The client unsubscribes only after its last waiter has left.
            eventually(&format!("a denial without {missing}"), || async {
                !denials(&server).is_empty()
            })
            .await;
        }
        let denied = denials(&server);
        assert!(
            denied.contains(*missing),
            "without {missing}, denied: {denied:?}"
        );
    }
}

/// F28: a denied command is a typed error, is not retried, and leaves no partial write.
#[tokio::test]
async fn f28_a_denied_command_is_a_typed_error_and_writes_nothing() {
    let server = Server::start_real();
    set_user(&server, "locks", COMMANDS, &APP);
    let client = log_in(&server, "locks", LockClient::builder()).await;
    let (free, held) = (
        client.reentrant_lock("app:free").unwrap(),
        client.reentrant_lock("app:held").unwrap(),
    );
    let denied = |command: &str| {
        assert!(
            !server
                .call(&["ACL", "SETUSER", "locks", command])
                .is_error()
        );
    };
    // From here on, scripts are called by their digests.
    free.lock().await.unwrap().unlock().await.unwrap();
    assert!(!held.force_unlock().await.unwrap());
    for command in ["evalsha", "pttl", "hset", "pexpire"] {
        denied(&format!("-{command}"));
        let start = Instant::now();
        assert_refused(soon(free.lock()).await, StoreErrorKind::NoPermission);
        assert_refused(
            soon(free.try_lock_for(Duration::from_secs(600))).await,
            StoreErrorKind::NoPermission,
        );
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{command} was tried again"
        );
        assert_eq!(server.dump(), [], "without {command}");
        denied(&format!("+{command}"));
    }
    for command in [
        "evalsha", "hmget", "publish", "hdel", "hlen", "hgetall", "del",
    ] {
        let mut guard = Some(held.lock().await.unwrap());
        let before = server.dump();
        denied(&format!("-{command}"));
        // Only `force_unlock` needs these three.
        if !["hlen", "hgetall", "del"].contains(&command) {
            assert_refused(
                soon(guard.take().unwrap().unlock()).await,
                StoreErrorKind::NoPermission,
            );
            assert_eq!(server.dump(), before, "without {command}");
        }
        // Only a release needs these two.
        if !["hmget", "hdel"].contains(&command) {
            assert_refused(
                soon(held.force_unlock()).await,
                StoreErrorKind::NoPermission,
            );
            assert_eq!(server.dump(), before, "without {command}");
        }
        // The release is retried until it is allowed or the lease ends.
        assert_eq!(client.stats().settling, usize::from(guard.is_none()));
        denied(&format!("+{command}"));
        drop(guard);
        soon(client.idle()).await;
        assert_eq!(server.dump(), [], "without {command} for a while");
    }
    let guard = held.lock().await.unwrap();
    for command in ["pttl", "pexpire", "hmget"] {
        denied(&format!("-{command}"));
        let before = server.dump();
        assert_refused(
            soon(guard.extend(Duration::from_secs(600))).await,
            StoreErrorKind::NoPermission,
        );
        assert_eq!(server.dump(), before, "without {command}");
        denied(&format!("+{command}"));
    }
    guard.extend(Duration::from_secs(600)).await.unwrap();
    guard.unlock().await.unwrap();
}

/// F28: a denied key or channel is a typed error too.
#[tokio::test]
async fn f28_r112_a_denied_key_or_channel_gives_only_a_typed_error() {
    let server = Server::start_real();
    set_user(
        &server,
        "locks",
        COMMANDS,
        &["~app:*", "~mute:*", "&redisson_lock__channel:{app:*"],
    );
    let client = log_in(&server, "locks", LockClient::builder()).await;
    let other = client.reentrant_lock("other").unwrap();
    server.call(&[
        "HSET",
        "other",
        "0a1b2c3d-1111-4222-8333-444455556666:42",
        "1",
    ]);
    let before = server.dump();
    assert_refused(soon(other.lock()).await, StoreErrorKind::NoPermission);
    assert_refused(
        soon(other.force_unlock()).await,
        StoreErrorKind::NoPermission,
    );
    assert_refused(soon(other.holder()).await, StoreErrorKind::NoPermission);
    assert_eq!(server.dump(), before);
    server.call(&["DEL", "other"]);

    // The user may write the record but not publish its release. The record then stays until its
    // lease ends.
    let mute = client.reentrant_lock("mute:l").unwrap();
    let guard = mute
        .try_lock_with(AcquireOptions::new().lease(Duration::from_secs(60)))
        .await
        .unwrap()
        .unwrap();
    let before = server.dump();
    assert_refused(soon(guard.unlock()).await, StoreErrorKind::NoPermission);
    assert_refused(
        soon(mute.force_unlock()).await,
        StoreErrorKind::NoPermission,
    );
    assert_eq!(server.dump(), before);
    assert_eq!(client.stats().settling, 1, "it may be allowed to later");
    // The other locks of this client are not affected.
    client
        .reentrant_lock("app:l")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
}

/// R112, F28: a waiter that may not subscribe polls, and other channels keep their messages.
#[tokio::test]
async fn r112_f28_a_denied_subscriber_polls_and_spares_other_channels() {
    let server = Server::start_real();
    set_user(
        &server,
        "locks",
        COMMANDS,
        &["~*", "&redisson_lock__channel:{app:*"],
    );
    let client = log_in(
        &server,
        "locks",
        LockClient::builder().poll_cap(Duration::from_millis(400)),
    )
    .await;
    let holder = server.client().await;
    let (good, bad) = ("app:l", "deaf:l");
    let guards = [
        holder.reentrant_lock(good).unwrap().lock().await.unwrap(),
        holder.reentrant_lock(bad).unwrap().lock().await.unwrap(),
    ];
    let mut waiters = Vec::new();
    for name in [good, bad] {
        let lock = client.reentrant_lock(name).unwrap();
        waiters.push(tokio::spawn(async move { lock.lock().await.unwrap() }));
    }
    let channels = ["redisson_lock__channel:{app:l}"];
    eventually("a subscription", || async { server.channels() == channels }).await;
    eventually("a denial", || async {
        denials(&server).contains("redisson_lock__channel:{deaf:l}")
    })
    .await;
    // The reconnects after the denial come to an end, and the permitted channel keeps its
    // subscription.
    let settled = tokio::sync::Mutex::new((server.connections(), Instant::now()));
    within(
        Duration::from_secs(20),
        "an end of reconnecting",
        || async {
            let mut settled = settled.lock().await;
            // Each of these calls opens a connection too: an increment of 1 means that no client
            // reconnected.
            let (before, now) = (settled.0, server.connections());
            if now == before + 1 {
                settled.0 = now;
            } else {
                *settled = (now, Instant::now());
            }
            settled.1.elapsed() > Duration::from_secs(1)
        },
    )
    .await;
    assert_eq!(server.channels(), channels);
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    let [heard, polled] = <[_; 2]>::try_from(waiters).unwrap();
    soon(heard).await.unwrap().unlock().await.unwrap();
    // The user may not publish the release either.
    assert_refused(
        soon(polled).await.unwrap().unlock().await,
        StoreErrorKind::NoPermission,
    );
    assert_eq!(server.dump().len(), 1);
}

/// R93, F41: the password changes and every connection is cut. No hold within its lease is lost
/// before the new password works, and then messages reach waiters again.
#[tokio::test]
async fn r93_f41_rotated_credentials_lose_no_lock() {
    let server = Server::start_real();
    server.call(&["ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all"]);
    let a = log_in(
        &server,
        "locks",
        LockClient::builder().watchdog_timeout(Duration::from_secs(6)),
    )
    .await;
    let b = log_in(
        &server,
        "locks",
        LockClient::builder().poll_cap(Duration::from_secs(600)),
    )
    .await;
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let lb = b.reentrant_lock("l").unwrap();
    let waiter = tokio::spawn(async move { lb.lock().await.unwrap() });
    eventually("a waiter", || async { !server.channels().is_empty() }).await;
    let logged_in = || {
        server
            .call(&["CLIENT", "LIST"])
            .text()
            .matches("user=locks")
            .count()
    };
    let cut = || server.call(&["CLIENT", "KILL", "USER", "locks"]).int();
    // Both passwords work for a while.
    server.call(&["ACL", "SETUSER", "locks", ">new"]);
    assert_eq!(cut(), 4);
    eventually("the connections again", || async { logged_in() == 4 }).await;
    eventually("the subscription again", || async {
        !server.channels().is_empty()
    })
    .await;
    // The old password is removed, and no client can log in for a while.
    server.call(&["ACL", "SETUSER", "locks", "<pw"]);
    assert_eq!(cut(), 4);
    let failures = || denials(&server).contains("AUTH") || denials(&server).contains("HELLO");
    eventually("failed logins", || async { failures() }).await;
    assert!(!guard.is_lost());
    server.call(&["ACL", "SETUSER", "locks", ">pw"]);
    eventually("the subscription again", || async {
        !server.channels().is_empty()
    })
    .await;
    let renewals = server.command_count("pexpire");
    eventually("a renewal", || async {
        server.command_count("pexpire") > renewals
    })
    .await;
    assert!(!guard.is_lost());
    soon(guard.unlock()).await.unwrap();
    soon(waiter).await.unwrap().unlock().await.unwrap();
    assert_eq!(server.dump(), []);
}
