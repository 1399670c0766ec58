//! Wake-ups: what a message does, and what happens if messages are missing.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{LockClient, Tuning};

use crate::support::{
    Server,
    child::{ByHand, channel},
    eventually, poll_once,
    proxy::{Action, Proxy},
    within,
};

/// Far beyond the limit of each test, so that a missed wake-up shows.
const NEVER: Duration = Duration::from_secs(60);
/// The longest time that a wake-up may take.
const PROMPT: Duration = Duration::from_secs(10);

async fn patient_client(server: &Server) -> LockClient {
    let client = server.client_with(|builder| builder.poll_cap(NEVER)).await;
    // Loads the scripts, so that each try counts once.
    client
        .reentrant_lock("warm")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    client
}

/// Spawns `count` tasks that lock and unlock once each.
fn waiters(client: &LockClient, lock: &str, count: usize) -> Vec<tokio::task::JoinHandle<()>> {
    (0..count)
        .map(|_| {
            let lock = client.reentrant_lock(lock).unwrap();
            tokio::spawn(async move { lock.lock().await.unwrap().unlock().await.unwrap() })
        })
        .collect()
}

/// Asserts that all tasks end within `limit` and that none fails.
async fn all_end(what: &str, limit: Duration, tasks: Vec<tokio::task::JoinHandle<()>>) {
    let all = async {
        for task in tasks {
            task.await.expect("a task that does not fail");
        }
    };
    tokio::time::timeout(limit, all)
        .await
        .unwrap_or_else(|_| panic!("not within {limit:?}: {what}"));
}

async fn subscribed(server: &Server, lock: &str) {
    let channel = channel(lock);
    eventually("a subscription", || async {
        server.channels().contains(&channel)
    })
    .await;
}

/// Waits until `count` scripts were run since `before`.
async fn tries(server: &Server, before: u64, count: u64) {
    eventually(&format!("{count} tries"), || async {
        server.script_count() >= before + count
    })
    .await;
}

/// Kills the connections of all subscribers, again and again, until dropped.
struct Killer(Arc<AtomicBool>, Option<std::thread::JoinHandle<u64>>);

impl Killer {
    fn start(server: &Server, pause: Duration) -> Self {
        let (stop, mut wire) = (Arc::new(AtomicBool::new(false)), server.wire());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut killed = 0;
            while !stopped.load(Ordering::Acquire) {
                killed += wire
                    .call(&["CLIENT", "KILL", "TYPE", "pubsub"])
                    .unwrap()
                    .int() as u64;
                std::thread::sleep(pause);
            }
            killed
        });
        Self(stop, Some(thread))
    }

    fn end(mut self) -> u64 {
        self.0.store(true, Ordering::Release);
        self.1.take().unwrap().join().unwrap()
    }
}

impl Drop for Killer {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A release between the try and the subscription is not missed.
#[tokio::test]
async fn r85_a_release_between_try_and_subscription_is_not_missed() {
    let server = Server::start();
    let client = patient_client(&server).await;
    for round in 0..30 {
        let name = format!("l{round}");
        let other = ByHand::hold(&server, &name, NEVER);
        let lock = client.reentrant_lock(&name).unwrap();
        let mut acquire = pin!(lock.lock());
        let before = server.script_count();
        assert!(poll_once(acquire.as_mut()).await.is_pending());
        tries(&server, before, 1).await;
        // The try ran, but the client has not read the reply, so it is not subscribed.
        other.release();
        tokio::time::timeout(PROMPT, acquire)
            .await
            .expect("a wake-up")
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
}

/// A release between the try and joining an old subscription is not missed.
#[tokio::test]
async fn r85_a_release_before_joining_a_subscription_is_not_missed() {
    let server = Server::start();
    let client = patient_client(&server).await;
    for round in 0..30 {
        let name = format!("l{round}");
        let other = ByHand::hold(&server, &name, NEVER);
        let lock = client.reentrant_lock(&name).unwrap();
        let mut acquire = pin!(lock.lock());
        let before = server.script_count();
        assert!(poll_once(acquire.as_mut()).await.is_pending());
        tries(&server, before, 1).await;
        // Another task subscribes, and gives up. The subscription outlives it a little.
        let brief = client.reentrant_lock(&name).unwrap();
        let brief =
            tokio::spawn(async move { brief.try_lock_for(Duration::from_millis(30)).await });
        // On a slow machine the time may be over before the reply arrives.
        assert!(!matches!(brief.await.unwrap(), Ok(Some(_))));
        other.release();
        // After this round trip, the client has read the message.
        client
            .reentrant_lock("warm")
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        tokio::time::timeout(PROMPT, acquire)
            .await
            .expect("a wake-up")
            .unwrap()
            .unlock()
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn r86_a_refused_subscription_costs_time_and_spoils_nothing() {
    let server = Server::start_real();
    let user = |channels: &str| {
        let reply = server.call(&[
            "ACL",
            "SETUSER",
            "u",
            "on",
            ">p",
            "~*",
            "+@all",
            "resetchannels",
            channels,
        ]);
        assert!(!reply.is_error(), "{reply:?}");
    };
    user("&nothing");
    let url = format!("redis://u:p@{}", server.addr());
    let client = LockClient::builder()
        .poll_cap(Duration::from_secs(2))
        .connect(url)
        .await
        .unwrap();
    let other = ByHand::hold(&server, "l", NEVER);
    let lock = client.reentrant_lock("l").unwrap();
    let before = server.script_count();
    let waiter = tokio::spawn(async move { lock.lock().await.unwrap() });
    tries(&server, before, 1).await;
    other.release();
    // No message arrives, so the waiter polls.
    let guard = tokio::time::timeout(PROMPT, waiter)
        .await
        .expect("a poll")
        .unwrap();
    user("allchannels");
    guard.unlock().await.unwrap();
    eventually("the wait queue is gone", || async {
        client.stats().channels == 0
    })
    .await;

    let other = ByHand::hold(&server, "l", NEVER);
    let tasks = waiters(&client, "l", 1);
    subscribed(&server, "l").await;
    other.release();
    all_end("the next waiter", PROMPT, tasks).await;
}

#[tokio::test]
async fn r89_waiters_survive_a_server_restart() {
    // The server keeps its records, so that the waiters keep waiting.
    let server = Server::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let client = patient_client(&server).await;
    let names: Vec<String> = (0..10).map(|n| format!("l{n}")).collect();
    let holds: Vec<ByHand> = names
        .iter()
        .map(|name| ByHand::hold(&server, name, 10 * NEVER))
        .collect();
    let before = server.script_count();
    let tasks: Vec<_> = names
        .iter()
        .flat_map(|name| waiters(&client, name, 10))
        .collect();
    tries(&server, before, 100).await;
    eventually("all channels", || async { server.channels().len() == 10 }).await;

    server.kill();
    server.restart();
    eventually("all channels again", || async {
        server.channels().len() == 10
    })
    .await;
    assert!(names.iter().all(|name| server.exists(name)));
    holds.iter().for_each(ByHand::release);
    all_end("100 waiters", PROMPT, tasks).await;
}

#[tokio::test]
async fn r89_waiters_of_a_lock_that_a_restart_forgot_acquire_it() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let _other = ByHand::hold(&server, "l", NEVER);
    let before = server.script_count();
    let tasks = waiters(&client, "l", 100);
    tries(&server, before, 100).await;
    server.kill();
    server.restart();
    all_end("100 waiters", PROMPT, tasks).await;
}

#[tokio::test]
async fn r91_an_idle_subscription_stays_alive() {
    // The server closes connections that are idle for 1 s.
    let server = Server::start_with(&["--timeout", "1"]);
    let client = patient_client(&server).await;
    let other = ByHand::hold(&server, "l", NEVER);
    let tasks = waiters(&client, "l", 3);
    subscribed(&server, "l").await;
    let idle = Instant::now();
    eventually("three idle seconds", || async {
        idle.elapsed() > Duration::from_secs(3)
    })
    .await;
    other.release();
    all_end("waiters after an idle time", PROMPT, tasks).await;
}

#[tokio::test]
async fn r88_r94_no_channel_stays_subscribed_at_rest() {
    let server = Server::start();
    let (a, b) = (patient_client(&server).await, patient_client(&server).await);
    let mut tasks = Vec::new();
    for n in 0..300 {
        tasks.extend(waiters(&a, &format!("l{n}"), 2));
        tasks.extend(waiters(&b, &format!("l{n}"), 2));
    }
    all_end("all waiters", 2 * PROMPT, tasks).await;
    eventually("no channels", || async { server.channels().is_empty() }).await;
    for client in [a, b] {
        eventually("no wait queues, no holds", || async {
            let stats = client.stats();
            (stats.channels, stats.holds) == (0, 0)
        })
        .await;
    }
}

/// No channel stays subscribed after a storm of lost connections.
#[tokio::test]
async fn r94_a_storm_of_lost_connections_leaves_no_channel_subscribed() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(Duration::from_millis(100)))
        .await;
    let killer = Killer::start(&server, Duration::from_millis(7));
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        let tasks: Vec<_> = (0..20)
            .flat_map(|n| waiters(&client, &format!("l{n}"), 3))
            .collect();
        all_end("a round", 2 * PROMPT, tasks).await;
    }
    assert!(killer.end() > 0, "nothing was killed");
    eventually("no wait queues", || async { client.stats().channels == 0 }).await;
    eventually("no channels", || async { server.channels().is_empty() }).await;
}

/// Found by the soak: a server that runs a long script refuses UNSUBSCRIBE as well.
#[tokio::test]
async fn r94_a_refused_unsubscribe_leaves_no_channel_subscribed() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let mut refused = false;
    proxy.rule(move |request| {
        if request.is("UNSUBSCRIBE") && !std::mem::replace(&mut refused, true) {
            return Action::Refuse("BUSY Redis is busy running a script.");
        }
        Action::Pass
    });
    for name in ["l", "m"] {
        let other = ByHand::hold(&server, name, NEVER);
        let tasks = waiters(&client, name, 1);
        eventually("it listens", || async { !server.channels().is_empty() }).await;
        other.release();
        all_end("the waiter", PROMPT, tasks).await;
        eventually("no channels", || async {
            client.stats().channels == 0 && server.channels().is_empty()
        })
        .await;
    }
    assert!(
        proxy
            .requests()
            .iter()
            .any(|request| request.is("UNSUBSCRIBE"))
    );
}

#[tokio::test]
async fn r95_connections_last_while_locks_are_contended() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let connections = || {
        let list = server.call(&["CLIENT", "LIST"]);
        let ids = list
            .text()
            .lines()
            .filter(|line| line.contains("name=nestlock:"));
        let mut ids: Vec<String> = ids
            .map(|line| line.split(' ').next().unwrap().to_owned())
            .collect();
        ids.sort();
        ids
    };
    let before = connections();
    assert_eq!(before.len(), 2, "one for scripts, one for messages");
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        all_end("a round", PROMPT, waiters(&client, "l", 50)).await;
    }
    assert_eq!(connections(), before);
}

#[tokio::test]
async fn f19_waiters_hand_over_while_subscriptions_break() {
    let server = Server::start();
    let poll_cap = Duration::from_secs(1);
    let clients = [server.client().await, server.client().await];
    let killer = Killer::start(&server, Duration::from_millis(100));
    let releases: Arc<std::sync::Mutex<(Option<Instant>, Vec<Duration>)>> = Arc::default();
    let start = Instant::now();
    let tasks: Vec<_> = (0..20)
        .map(|n| {
            let (lock, releases) = (
                clients[n % 2].reentrant_lock("l").unwrap(),
                Arc::clone(&releases),
            );
            tokio::spawn(async move {
                while start.elapsed() < Duration::from_secs(5) {
                    let guard = lock.lock().await.unwrap();
                    {
                        let (last, gaps) = &mut *releases.lock().unwrap();
                        gaps.extend(last.map(|last| last.elapsed()));
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    releases.lock().unwrap().0 = Some(Instant::now());
                    guard.unlock().await.unwrap();
                }
            })
        })
        .collect();
    all_end("20 waiters", 2 * PROMPT, tasks).await;
    let killed = killer.end();
    let mut gaps = std::mem::take(&mut releases.lock().unwrap().1);
    gaps.sort();
    let (median, worst) = (gaps[gaps.len() / 2], gaps[gaps.len() - 1]);
    println!(
        "{} hand-overs, {killed} connections killed: median {median:?}, worst {worst:?}",
        gaps.len()
    );
    assert!(killed >= 10 && gaps.len() >= 20);
    assert!(worst < poll_cap + Duration::from_secs(2), "{worst:?}");
}

/// Without any messages, a lock changes hands within the poll cap.
#[tokio::test]
async fn f18_a_lock_without_messages_moves_on_within_the_poll_cap() {
    let server = Server::start_real();
    server.call(&[
        "ACL",
        "SETUSER",
        "u",
        "on",
        ">p",
        "~*",
        "+@all",
        "resetchannels",
    ]);
    let url = format!("redis://u:p@{}", server.addr());
    let poll_cap = Duration::from_millis(300);
    let client = LockClient::builder()
        .poll_cap(poll_cap)
        .connect(url)
        .await
        .unwrap();
    let mut times = Vec::new();
    for round in 0..10 {
        let name = format!("l{round}");
        let other = ByHand::hold(&server, &name, NEVER);
        let lock = client.reentrant_lock(&name).unwrap();
        let before = server.script_count();
        let waiter = tokio::spawn(async move {
            let guard = lock.lock().await.unwrap();
            (Instant::now(), guard.leave_to_lease())
        });
        tries(&server, before, 1).await;
        let released = Instant::now();
        other.release();
        let (acquired, _owner) = tokio::time::timeout(PROMPT, waiter)
            .await
            .expect("a poll")
            .unwrap();
        times.push(acquired - released);
    }
    times.sort();
    println!(
        "hand-over without pub/sub, poll cap {poll_cap:?}: median {:?}, worst {:?}",
        times[5], times[9]
    );
    assert!(
        times[9] < 2 * poll_cap + Duration::from_secs(1),
        "{times:?}"
    );
}

/// A refused subscription does not make the client connect again and again.
#[tokio::test]
async fn r86_a_refused_subscription_causes_no_repeated_connections() {
    let server = Server::start_real();
    server.call(&[
        "ACL",
        "SETUSER",
        "u",
        "on",
        ">p",
        "~*",
        "+@all",
        "resetchannels",
        "&*{good}",
    ]);
    let proxy = Proxy::start(&server);
    let url = proxy.url().replace("redis://", "redis://u:p@");
    let client = LockClient::builder()
        .poll_cap(Duration::from_millis(100))
        .connect(url)
        .await
        .unwrap();
    let others = ["bad", "good"].map(|name| ByHand::hold(&server, name, NEVER));
    let tasks: Vec<_> = ["bad", "good"]
        .iter()
        .flat_map(|name| waiters(&client, name, 1))
        .collect();
    subscribed(&server, "good").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let connections = proxy.connections();
    assert!(connections <= 5, "{connections} connections");
    // The waiters publish when they release.
    server.call(&["ACL", "SETUSER", "u", "allchannels"]);
    others.iter().for_each(ByHand::release);
    all_end("both waiters", PROMPT, tasks).await;
}

#[tokio::test]
async fn f18_a_subscriber_that_is_always_killed_hands_over_by_polling() {
    let server = Server::start();
    let poll_cap = Duration::from_millis(300);
    let client = server
        .client_with(|builder| builder.poll_cap(poll_cap))
        .await;
    let killer = Killer::start(&server, Duration::from_millis(1));
    for _ in 0..10 {
        let other = ByHand::hold(&server, "l", NEVER);
        let before = server.script_count();
        let tasks = waiters(&client, "l", 1);
        tries(&server, before, 1).await;
        other.release();
        all_end("a waiter", 2 * poll_cap + Duration::from_secs(2), tasks).await;
    }
    killer.end();
}

#[tokio::test]
async fn f20_a_flood_of_messages_loses_no_waiter() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let other = ByHand::hold(&server, "l", NEVER);
    let tasks = waiters(&client, "l", 10);
    subscribed(&server, "l").await;
    let (channel, mut wire) = (channel("l"), server.wire());
    // Each script publishes far more in one piece than fred keeps for a slow reader.
    let flood = format!("for n = 1, 10000 do redis.call('publish', '{channel}', 'x') end");
    for _ in 0..5 {
        wire.call(&["EVAL", &flood, "0"]).unwrap();
    }
    other.release();
    all_end("10 waiters", PROMPT, tasks).await;
}

/// A subscriber that is cut off for reading too slowly loses no waiter.
#[tokio::test]
async fn f20_a_subscriber_cut_off_as_too_slow_loses_no_waiter() {
    let server = Server::start_with(&[
        "--client-output-buffer-limit",
        "pubsub",
        "64kb",
        "64kb",
        "1",
    ]);
    let client = patient_client(&server).await;
    let other = ByHand::hold(&server, "l", NEVER);
    let tasks = waiters(&client, "l", 10);
    subscribed(&server, "l").await;
    let subscriber = || {
        let list = server.call(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        list.text().split(' ').next().unwrap_or_default().to_owned()
    };
    let before = subscriber();
    let (channel, mut wire) = (channel("l"), server.wire());
    // One script, because the server writes nothing to the subscriber before it ends.
    let flood =
        format!("for n = 1, 2000 do redis.call('publish', '{channel}', string.rep('x', 1000)) end");
    within(PROMPT, "the server cuts it off", || {
        wire.call(&["EVAL", &flood, "0"]).unwrap();
        let cut = subscriber() != before;
        async move { cut }
    })
    .await;
    // The release may fall into the gap. The reconnect makes up for the lost message.
    other.release();
    all_end("10 waiters", PROMPT, tasks).await;
}

#[tokio::test]
async fn messages_that_mean_nothing_are_ignored() {
    let server = Server::start();
    let client = server
        .client_with(|builder| {
            builder.poll_cap(NEVER).tuning(Tuning {
                bundle: false,
                ..Tuning::default()
            })
        })
        .await;
    // Loads the scripts, so that each try counts once.
    client
        .reentrant_lock("warm")
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let other = ByHand::hold(&server, "l", NEVER);
    let another = ByHand::hold(&server, "other", NEVER);
    let before = server.script_count();
    let tasks = waiters(&client, "l", 5);
    let parked = waiters(&client, "other", 1);
    subscribed(&server, "l").await;
    subscribed(&server, "other").await;
    // Six tries, and one more per channel when its subscription is confirmed.
    tries(&server, before, 8).await;
    let before = server.script_count();
    let long = "0".repeat(100_000);
    for payload in [
        "",
        "2",
        "-1",
        "00",
        " 0",
        "{\"a\":0}",
        "\u{1}\u{0}\u{7f}",
        "null",
        &long,
    ] {
        server.call(&["PUBLISH", &channel("l"), payload]);
    }
    // Messages arrive in order, so after this one the client has read the others.
    server.call(&["PUBLISH", &channel("other"), "0"]);
    tries(&server, before, 1).await;
    assert_eq!(
        server.script_count(),
        before + 1,
        "a message without a meaning, or of another lock, cost a try"
    );
    another.release();
    all_end("the other lock's waiter", PROMPT, parked).await;
    other.release();
    all_end("5 waiters", PROMPT, tasks).await;
}

/// The message `0` wakes one waiter of each client, and `1` wakes all of them.
#[tokio::test]
async fn zero_wakes_one_waiter_of_each_client_and_one_wakes_all() {
    let server = Server::start();
    let clients = [patient_client(&server).await, patient_client(&server).await];
    let other = ByHand::hold(&server, "l", NEVER);
    let before = server.script_count();
    let mut tasks = Vec::new();
    for client in &clients {
        tasks.extend(waiters(client, "l", 10));
    }
    // Each waiter tries once, and one of each client once more when its subscription is confirmed.
    tries(&server, before, 22).await;
    let mut expected = server.script_count();
    let mut wire = server.wire();
    for (payload, woken) in [("0", 2), ("0", 2), ("1", 20), ("0", 2), ("1", 20)] {
        assert_eq!(
            wire.call(&["PUBLISH", &channel("l"), payload])
                .unwrap()
                .int(),
            2,
            "two subscribers"
        );
        expected += woken;
        tries(&server, 0, expected).await;
    }
    assert_eq!(server.script_count(), expected);
    other.release();
    all_end("20 waiters", PROMPT, tasks).await;
}

/// Fake wake-ups cost one try each, and never lead to a wrong acquire.
#[tokio::test]
async fn f20_a_fake_wake_up_costs_one_try_and_never_a_wrong_acquire() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let other = ByHand::hold(&server, "l", NEVER);
    let before = server.script_count();
    let tasks = waiters(&client, "l", 5);
    tries(&server, before, 6).await;
    let before = server.script_count();
    let mut wire = server.wire();
    for _ in 0..500 {
        wire.call(&["PUBLISH", &channel("l"), "0"]).unwrap();
    }
    let record = server.record("l");
    assert_eq!(record.len(), 1);
    assert!(
        record[0].0.starts_with("00000000-"),
        "taken by another owner: {record:?}"
    );
    assert!(tasks.iter().all(|task| !task.is_finished()));
    assert!(
        server.script_count() <= before + 500,
        "{}",
        server.script_count() - before
    );
    other.release();
    all_end("5 waiters", PROMPT, tasks).await;
}

#[tokio::test]
async fn p13_a_storm_of_wake_ups_does_not_prolong_a_wait() {
    let server = Server::start();
    let client = patient_client(&server).await;
    let _other = ByHand::hold(&server, "l", NEVER);
    let (stop, mut wire) = (Arc::new(AtomicBool::new(false)), server.wire());
    let stopped = Arc::clone(&stop);
    let storm = std::thread::spawn(move || {
        while !stopped.load(Ordering::Acquire) {
            wire.call(&["PUBLISH", &channel("l"), "1"]).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    let start = Instant::now();
    let waits: Vec<_> = (0..10)
        .map(|_| {
            let lock = client.reentrant_lock("l").unwrap();
            tokio::spawn(async move {
                let outcome = lock.try_lock_for(Duration::from_secs(1)).await;
                (start.elapsed(), outcome.unwrap().is_none())
            })
        })
        .collect();
    for wait in waits {
        let (took, busy) = wait.await.unwrap();
        assert!(
            busy && took >= Duration::from_secs(1) && took < Duration::from_secs(4),
            "{busy} {took:?}"
        );
    }
    stop.store(true, Ordering::Release);
    storm.join().unwrap();
}

#[tokio::test]
async fn p8_freeing_by_force_wakes_waiters() {
    let server = Server::start();
    let (a, b) = (patient_client(&server).await, patient_client(&server).await);
    let guard = a.reentrant_lock("l").unwrap().lock().await.unwrap();
    let tasks = waiters(&b, "l", 5);
    subscribed(&server, "l").await;
    assert!(b.reentrant_lock("l").unwrap().force_unlock().await.unwrap());
    all_end("5 waiters", PROMPT, tasks).await;
    assert!(guard.unlock().await.is_err());
    assert!(!server.exists("l"));
}
