//! Compatibility with Redisson in both directions: keys, fields, numbers, messages.

use std::time::Duration;

use nestlock::{AcquireOptions, Lock, LockClient, OwnerId};

use crate::support::{
    Server, eventually,
    proxy::is_over_fred,
    wire::{Reply, Wire},
};

const LOCK: &str = "orders:7";
const CHANNEL: &str = "redisson_lock__channel:{orders:7}";

/// A Redisson process, as the plain commands of its scripts.
struct Redisson {
    wire: Wire,
    field: String,
}

impl Redisson {
    fn new(server: &Server) -> Self {
        Self {
            wire: server.wire(),
            field: "5b8f1c9e-27d4-4a06-8f55-0c1d2e3f4a5b:71".into(),
        }
    }

    /// Acquires if the lock is free or its own, and renews the TTL. Returns the PTTL if another
    /// owner holds it.
    fn acquire(&mut self, lock: &str, lease: &str) -> Option<i64> {
        let free = self.wire.call(&["EXISTS", lock]).unwrap().int() == 0;
        if free
            || self
                .wire
                .call(&["HEXISTS", lock, &self.field])
                .unwrap()
                .int()
                == 1
        {
            let count = self
                .wire
                .call(&["HINCRBY", lock, &self.field, "1"])
                .unwrap();
            assert!(count.int() >= 1, "{count:?}");
            assert_eq!(self.wire.call(&["PEXPIRE", lock, lease]).unwrap().int(), 1);
            return None;
        }
        Some(self.wire.call(&["PTTL", lock]).unwrap().int())
    }

    /// Releases once. Returns `None` if it is not the owner, and `Some(false)` if it still holds
    /// the lock.
    fn release(&mut self, lock: &str, channel: &str) -> Option<bool> {
        if self
            .wire
            .call(&["HEXISTS", lock, &self.field])
            .unwrap()
            .int()
            == 0
        {
            return None;
        }
        if self
            .wire
            .call(&["HINCRBY", lock, &self.field, "-1"])
            .unwrap()
            .int()
            > 0
        {
            self.wire.call(&["PEXPIRE", lock, "30000"]).unwrap();
            return Some(false);
        }
        self.wire.call(&["DEL", lock]).unwrap();
        self.wire.call(&["PUBLISH", channel, "0"]).unwrap();
        Some(true)
    }

    fn force_release(&mut self, lock: &str, channel: &str) -> bool {
        let freed = self.wire.call(&["DEL", lock]).unwrap().int() == 1;
        if freed {
            self.wire.call(&["PUBLISH", channel, "0"]).unwrap();
        }
        freed
    }
}

fn keys(server: &Server) -> Vec<String> {
    server.dump().into_iter().map(|(key, ..)| key).collect()
}

/// Returns a client with such a long poll interval that only a message wakes its waiters.
async fn deaf_client(server: &Server) -> LockClient {
    server
        .client_with(|builder| builder.poll_cap(Duration::from_secs(600)))
        .await
}

/// The record is Redisson's byte for byte, and there is no other key next to it.
#[tokio::test]
async fn r35_r111_the_record_is_redissons_byte_for_byte_and_alone() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let mut guards = Vec::new();
    for holds in 1..=3 {
        guards.push(lock.lock().await.unwrap());
        let owner = guards[0].owner().to_string();
        assert_eq!(server.call(&["TYPE", LOCK]).text(), "hash");
        let record = server.call(&["HGETALL", LOCK]);
        assert_eq!(
            record.list(),
            [Reply::Text(owner.clone()), Reply::Text(holds.to_string())]
        );
        let (uuid, task) = owner.split_at(36);
        let hyphens: Vec<usize> = uuid.match_indices('-').map(|(at, _)| at).collect();
        assert_eq!(hyphens, [8, 13, 18, 23], "{owner}");
        assert!(
            uuid.bytes()
                .all(|byte| byte == b'-' || byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        );
        assert!(task.starts_with(':') && task.len() > 1, "{owner}");
        let ttl = server.pttl(LOCK);
        assert!(
            (25_000..=30_000).contains(&ttl),
            "the lease of Redisson's watchdog, not {ttl}"
        );
        assert_eq!(keys(&server), [LOCK], "nothing else in the keyspace");
        // Redisson can do arithmetic on the hold count
        assert_eq!(
            server.call(&["HINCRBY", LOCK, &owner, "0"]),
            Reply::Int(holds)
        );
    }
    while let Some(guard) = guards.pop() {
        guard.unlock().await.unwrap();
        assert_eq!(
            keys(&server),
            if guards.is_empty() {
                &[] as &[&str]
            } else {
                &[LOCK]
            }
        );
    }
}

#[tokio::test]
async fn a_spawned_task_is_a_decimal_number_as_a_java_thread_is() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let owner = tokio::spawn(async move { lock.lock().await.unwrap().leave_to_lease() })
        .await
        .unwrap();
    let task = owner.as_str().split_once(':').unwrap().1;
    assert!(task.parse::<i64>().is_ok(), "{owner}");
    assert_eq!(server.record(LOCK), [(owner.to_string(), 1)]);
}

#[tokio::test]
async fn a_given_lease_is_the_ttl_in_milliseconds() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let options = AcquireOptions::new().lease(Duration::from_secs(7200));
    let guard = lock.try_lock_with(options).await.unwrap().unwrap();
    let ttl = server.pttl(LOCK);
    assert!((7_190_000..=7_200_000).contains(&ttl), "{ttl}");
    // only the last release publishes a message
    let mut ears = server.wire();
    ears.call(&["PSUBSCRIBE", "*"]).unwrap();
    let inner = lock.lock().await.unwrap();
    inner.unlock().await.unwrap();
    guard.unlock().await.unwrap();
    server.call(&["PUBLISH", "end", "end"]);
    let said = ears.read().unwrap();
    assert_eq!(
        said.list()[2..],
        [Reply::Text(CHANNEL.into()), Reply::Text("0".into())]
    );
    assert_eq!(ears.read().unwrap().list()[2].text(), "end");
}

#[tokio::test]
async fn names_with_braces_keep_them_in_the_channel() {
    let server = Server::start();
    let client = server.client().await;
    let mut ears = server.wire();
    ears.call(&["PSUBSCRIBE", "*"]).unwrap();
    for (name, channel) in [
        ("plain", "redisson_lock__channel:{plain}"),
        ("{tag}:a", "redisson_lock__channel:{tag}:a"),
        ("a:{tag}", "redisson_lock__channel:a:{tag}"),
    ] {
        client
            .reentrant_lock(name)
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        assert_eq!(
            ears.read().unwrap().list()[2..],
            [Reply::Text(channel.into()), Reply::Text("0".into())]
        );
    }
}

#[tokio::test]
async fn a_redisson_peer_and_nestlock_exclude_each_other() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let mut peer = Redisson::new(&server);

    let guard = lock.lock().await.unwrap();
    let ttl = peer.acquire(LOCK, "30000").expect("nestlock holds it");
    assert!(ttl > 25_000, "{ttl}: Redisson waits that long");
    assert_eq!(
        peer.release(LOCK, CHANNEL),
        None,
        "Redisson cannot release what it does not hold"
    );
    guard.unlock().await.unwrap();

    for _ in 0..2 {
        assert_eq!(peer.acquire(LOCK, "30000"), None);
        assert!(lock.try_lock().await.unwrap().is_none());
    }
    let holder: OwnerId = peer.field.parse().unwrap();
    assert_eq!(lock.holder().await.unwrap(), Some(holder.clone()));
    assert_eq!(lock.hold_count(&holder).await.unwrap(), 2);
    assert!(lock.remaining_lease().await.unwrap().unwrap() > Duration::from_secs(20));
    assert_eq!(peer.release(LOCK, CHANNEL), Some(false));
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(peer.release(LOCK, CHANNEL), Some(true));
    lock.try_lock()
        .await
        .unwrap()
        .expect("free")
        .unlock()
        .await
        .unwrap();
    assert_eq!(keys(&server), [] as [&str; 0]);
}

#[tokio::test]
async fn a_redisson_peer_wakes_a_waiter_of_nestlock() {
    let server = Server::start();
    let client = deaf_client(&server).await;
    let mut peer = Redisson::new(&server);
    for force in [false, true] {
        assert_eq!(peer.acquire(LOCK, "600000"), None);
        let lock = client.reentrant_lock(LOCK).unwrap();
        let waiter =
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() });
        eventually("a subscription", || async {
            server.channels() == [CHANNEL]
        })
        .await;
        if force {
            assert!(peer.force_release(LOCK, CHANNEL));
        } else {
            assert_eq!(peer.release(LOCK, CHANNEL), Some(true));
        }
        tokio::time::timeout(Duration::from_secs(60), waiter)
            .await
            .expect("woken by the message")
            .unwrap();
    }
    assert!(!server.exists(LOCK));
}

/// A Redisson peer hears of the release and of the force unlock of nestlock.
#[tokio::test]
async fn a_redisson_peer_hears_nestlocks_release_and_force_unlock() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let mut ears = server.wire();
    ears.call(&["SUBSCRIBE", CHANNEL]).unwrap();
    let mut hears = || {
        let message = ears.read().unwrap();
        assert_eq!(
            message.list()[1..],
            [Reply::Text(CHANNEL.into()), Reply::Text("0".into())]
        );
    };
    lock.lock().await.unwrap().unlock().await.unwrap();
    hears();
    drop(lock.lock().await.unwrap());
    hears();
    let guard = lock.lock().await.unwrap();
    assert!(lock.force_unlock().await.unwrap());
    hears();
    drop(guard);
    // also for the hold of a Redisson client
    assert_eq!(Redisson::new(&server).acquire(LOCK, "30000"), None);
    assert!(lock.force_unlock().await.unwrap());
    hears();
    assert!(!lock.force_unlock().await.unwrap());
    client.idle().await;
    server.call(&["PUBLISH", CHANNEL, "end"]);
    assert_eq!(
        ears.read().unwrap().list()[2].text(),
        "end",
        "no message was sent twice"
    );
}

#[tokio::test]
async fn a_hold_that_a_redisson_peer_forced_open_is_lost() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let guard = lock.lock().await.unwrap();
    let mut peer = Redisson::new(&server);
    assert!(peer.force_release(LOCK, CHANNEL));
    assert_eq!(peer.acquire(LOCK, "30000"), None);
    assert!(matches!(
        guard.unlock().await,
        Err(nestlock::Error::Lost { .. })
    ));
    assert_eq!(
        server.record(LOCK),
        [(peer.field, 1)],
        "the peer's hold is its own"
    );
}

/// Records the commands of clients, without heartbeats.
struct Monitor(Wire);

impl Monitor {
    fn new(server: &Server) -> Self {
        let mut wire = server.wire();
        assert_eq!(wire.call(&["MONITOR"]).unwrap().text(), "OK");
        Self(wire)
    }

    /// Returns the commands of clients since the last call, without those inside scripts.
    fn sent(&mut self, server: &Server) -> Vec<String> {
        server.call(&["ECHO", "end-of-list"]);
        let mut sent = Vec::new();
        loop {
            let line = self.0.read().unwrap().text().to_owned();
            let (client, command) = line.split_once("] ").expect("a monitored command");
            if command.contains("end-of-list") {
                return sent;
            }
            if !client.ends_with(" lua") && !command.to_uppercase().starts_with("\"PING\"") {
                sent.push(command.split('"').nth(1).unwrap().to_uppercase());
            }
        }
    }
}

/// Covers every kind. A multi-lock costs the commands of its members, unless one request serves
/// all.
#[tokio::test]
async fn an_uncontended_lock_and_unlock_of_any_kind_are_two_commands() {
    let server = Server::start();
    let client = server.client().await;
    let read_write = client.read_write_lock("read-write").unwrap();
    let plain: [Lock; 3] = [
        client.reentrant_lock("m1").unwrap(),
        client.spin_lock("m2").unwrap(),
        client.non_reentrant_lock("m3").unwrap(),
    ];
    let mixed: [Lock; 3] = [
        client.reentrant_lock("m4").unwrap(),
        client.reentrant_lock("m5").unwrap(),
        client.fenced_lock("m6").unwrap(),
    ];
    let kinds: [(Lock, usize); 10] = [
        (client.reentrant_lock("reentrant").unwrap(), 2),
        (client.fenced_lock("fenced").unwrap(), 2),
        (client.fair_lock("fair").unwrap(), 2),
        (client.non_reentrant_fair_lock("fair-once").unwrap(), 2),
        (read_write.read_lock(), 2),
        (read_write.write_lock(), 2),
        (client.spin_lock("spin").unwrap(), 2),
        (client.non_reentrant_lock("once").unwrap(), 2),
        (client.multi_lock(plain).unwrap(), 2),
        // two of the three releases share a request, except over fred's client
        (
            client.multi_lock(mixed).unwrap(),
            if is_over_fred() { 6 } else { 5 },
        ),
    ];
    let mut monitor = Monitor::new(&server);
    for (lock, commands) in kinds {
        lock.lock().await.unwrap().unlock().await.unwrap();
        monitor.sent(&server); // the first time, texts go along
        lock.lock().await.unwrap().unlock().await.unwrap();
        assert_eq!(
            monitor.sent(&server),
            vec!["EVALSHA"; commands],
            "{}",
            lock.name()
        );
    }
}

/// R110: one round trip to acquire, one to release, no subscription, no keys left. A script is sent
/// by text the first time, and by digest from then on.
#[tokio::test]
async fn r110_an_uncontended_lock_and_unlock_are_two_commands() {
    let server = Server::start();
    let client = server.client().await;
    let lock = client.reentrant_lock(LOCK).unwrap();
    let mut monitor = Monitor::new(&server);
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(
        monitor.sent(&server),
        ["EVAL"; 2],
        "each text goes along once"
    );

    for _ in 0..3 {
        lock.lock().await.unwrap().unlock().await.unwrap();
        assert_eq!(monitor.sent(&server), ["EVALSHA"; 2]);
    }
    drop(lock.lock().await.unwrap());
    client.idle().await;
    assert_eq!(
        monitor.sent(&server),
        ["EVALSHA"; 2],
        "a dropped guard costs the same"
    );

    let outer = lock.lock().await.unwrap();
    monitor.sent(&server);
    let inner = lock.lock().await.unwrap();
    assert_eq!(monitor.sent(&server), ["EVALSHA"], "a re-entry is one");
    inner.unlock().await.unwrap();
    assert_eq!(monitor.sent(&server), ["EVALSHA"], "and so is its release");
    outer.unlock().await.unwrap();
    assert_eq!(server.command_count("subscribe"), 0);
    assert_eq!(keys(&server), [] as [&str; 0]);

    // after SCRIPT FLUSH, each script is sent by text once more
    assert!(!server.call(&["SCRIPT", "FLUSH"]).is_error());
    monitor.sent(&server);
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(monitor.sent(&server), ["EVALSHA", "EVAL", "EVAL"]);
    lock.lock().await.unwrap().unlock().await.unwrap();
    assert_eq!(monitor.sent(&server), ["EVALSHA"; 2]);
}
