//! Links with round trips of 50 ms and more, which show defects that loopback hides.

use std::time::{Duration, Instant};

use futures::{StreamExt, future::join_all, stream};
use nestlock::{
    AcquireOptions, Error, Lock, LockClient, LockClientBuilder, LockGuard, OwnerId, StoreErrorKind,
    Tuning,
};

use crate::support::{
    Server, WIRES, eventually,
    proxy::{Action, Proxy, Request, Verb, Way, is_over_fred},
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Starts a proxy that adds this round trip to the server.
fn far(server: &Server, round_trip: u64) -> Proxy {
    let proxy = Proxy::start(server);
    // fred's client allows 2 s for each step of its handshake
    let is_of_fred = |request: &Request| {
        ["HELLO", "CLIENT", "INFO"]
            .into_iter()
            .any(|verb| request.is(verb))
    };
    proxy.rule(move |request| {
        if is_over_fred() && is_of_fred(request) {
            Action::Pass
        } else {
            Action::Late(ms(round_trip))
        }
    });
    proxy
}

async fn hold_many(client: &LockClient, count: usize) -> Vec<LockGuard> {
    stream::iter(0..count)
        .map(|n| {
            let lock = client.reentrant_lock(format!("h:{n}")).unwrap();
            OwnerId::scope(async move { lock.lock().await.unwrap() })
        })
        .buffer_unordered(2000)
        .collect()
        .await
}

fn of_kind(client: &LockClient, kind: &str, name: &str) -> Lock {
    match kind {
        "fair" => client.fair_lock(name).unwrap(),
        "write" => client.read_write_lock(name).unwrap().write_lock(),
        "read" => client.read_write_lock(name).unwrap().read_lock(),
        "fenced" => client.fenced_lock(name).unwrap(),
        "spin" => client.spin_lock(name).unwrap(),
        "signal" => client.signal_lock(name).unwrap(),
        "reentrant" => client.reentrant_lock(name).unwrap(),
        _ => {
            let member = |at: &str| client.fair_lock(format!("{name}:{at}")).unwrap();
            client.multi_lock([member("a"), member("b")]).unwrap()
        }
    }
}

/// A round trip in milliseconds. It is so long that the margin of a wait beyond it, a quarter and
/// 40 ms, exceeds the delays of this process, and of the proxy in it, on a busy machine.
const FAR: u64 = 1_600;

/// Returns a part of [`FAR`], in percent.
fn of_far(percent: u64) -> Duration {
    ms(FAR * percent / 100)
}

async fn connect_far(proxy: &Proxy) -> LockClient {
    connect_far_to(&proxy.url()).await
}

async fn connect_far_to(url: &str) -> LockClient {
    far_off().connect(url).await.unwrap()
}

fn far_off() -> LockClientBuilder {
    // only the wait ends a request; a connection takes several round trips
    let limit = ms(10_000);
    LockClient::builder()
        .command_timeout(limit)
        .connect_timeout(6 * limit)
}

/// A wait that ends with a reply in flight still awaits that reply, and returns `None` if the last
/// reply was "busy".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_a_busy_lock_ends_with_none_at_1600_ms() {
    let server = Server::start();
    let proxy = far(&server, FAR);
    let (near, far) = (server.client().await, connect_far(&proxy).await);
    let (mut held, mut calls) = (Vec::new(), Vec::new());
    for n in 0..60_u64 {
        let name = format!("l{n}");
        held.push(near.reentrant_lock(&name).unwrap().lock().await.unwrap());
        let lock = far.reentrant_lock(&name).unwrap();
        // the waits end before, during and after each of the tries
        calls.push(tokio::spawn(async move {
            lock.try_lock_for(of_far(5 + n * 5)).await
        }));
    }
    for outcome in join_all(calls).await {
        let outcome = outcome.unwrap();
        assert!(matches!(outcome, Ok(None)), "{outcome:?}");
    }
}

/// A wait for a busy multi-lock also ends with `None` if one member is already held when another
/// turns out to be busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_a_busy_multi_lock_ends_with_none_at_1600_ms() {
    let server = Server::start();
    let proxy = far(&server, FAR);
    let (near, far) = (server.client().await, connect_far(&proxy).await);
    let members = |name: &str| {
        [
            far.reentrant_lock(format!("{name}:x")).unwrap(),
            far.fair_lock(format!("{name}:y")).unwrap(),
        ]
    };
    far.multi_lock(members("warm"))
        .unwrap()
        .lock()
        .await
        .unwrap()
        .unlock()
        .await
        .unwrap();
    let (mut held, mut calls) = (Vec::new(), Vec::new());
    for n in 0..40_u64 {
        let name = format!("m{n}");
        held.push(
            near.fair_lock(format!("{name}:y"))
                .unwrap()
                .lock()
                .await
                .unwrap(),
        );
        let lock = far.multi_lock(members(&name)).unwrap();
        calls.push(tokio::spawn(async move {
            lock.try_lock_for(of_far(80 + n * 16)).await
        }));
    }
    let outcomes = join_all(calls)
        .await
        .into_iter()
        .map(|outcome| outcome.unwrap());
    let wrong: Vec<_> = outcomes
        .filter(|outcome| !matches!(outcome, Ok(None)))
        .collect();
    assert!(wrong.is_empty(), "{} of 40: {:?}", wrong.len(), wrong[0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_free_lock_is_acquired_however_short_the_wait_at_1600_ms() {
    let server = Server::start();
    let proxy = far(&server, FAR);
    let client = connect_far(&proxy).await;
    for wait in [1, 5, 20, 50].map(ms) {
        let lock = client
            .reentrant_lock(format!("l{}", wait.as_millis()))
            .unwrap();
        let guard = lock
            .try_lock_for(wait)
            .await
            .unwrap_or_else(|error| panic!("{wait:?}: {error}"));
        guard.expect("it is free").unlock().await.unwrap();
    }
}

/// A request of its own removes the waiter from the queue: the next call is sent right behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_waits_in_a_row_end_with_none_at_1600_ms() {
    let server = Server::start();
    let proxy = far(&server, FAR);
    let near = server.client().await;
    let rows = ["fair", "write", "multi"]
        .into_iter()
        .flat_map(|kind| (0..4).map(move |row| (kind, row)));
    let rows = rows.map(|(kind, row)| {
        let (near, proxy) = (&near, &proxy);
        async move {
            let name = format!("{kind}{row}");
            let held = OwnerId::scope(of_kind(near, kind, &name).lock())
                .await
                .unwrap();
            let far = connect_far(proxy).await;
            let lock = of_kind(&far, kind, &name);
            tokio::spawn(async move {
                for n in 0..6_u64 {
                    let wait = of_far(5 + (row * 6 + n) * 37 % 80);
                    let outcome = lock.try_lock_for(wait).await;
                    assert!(
                        matches!(outcome, Ok(None)),
                        "{name}, {n}, {wait:?}: {outcome:?}"
                    );
                }
                held.unlock().await.unwrap();
                // the entry that was just removed is not ahead of this try in the queue
                lock.try_lock()
                    .await
                    .unwrap()
                    .expect(&name)
                    .unlock()
                    .await
                    .unwrap();
            })
            .await
            .unwrap();
        }
    });
    join_all(rows).await;
}

/// The cleanup after a dropped guard or wait is settled first: the next short wait has its own
/// round trip behind that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_wait_after_a_drop_gets_its_reply_at_1600_ms() {
    let server = Server::start();
    let proxy = far(&server, FAR);
    let near = server.client().await;
    let far = &connect_far(&proxy).await;
    let rows = ["reentrant", "fair", "write"]
        .into_iter()
        .flat_map(|kind| (0..12_u64).map(move |n| (kind, n)));
    let rows = rows.map(|(kind, n)| {
        let near = &near;
        async move {
            let (free, busy) = (format!("{kind}{n}:free"), format!("{kind}{n}"));
            let held = OwnerId::scope(of_kind(near, kind, &busy).lock())
                .await
                .unwrap();
            let (lock, busy) = (of_kind(far, kind, &free), of_kind(far, kind, &busy));
            tokio::spawn(async move {
                let wait = of_far(5 + n * 37 % 80);
                drop(lock.lock().await.unwrap());
                let outcome = lock.try_lock_for(wait).await;
                assert!(
                    matches!(outcome, Ok(Some(_))),
                    "{kind}, a dropped guard, {n}, {wait:?}: {outcome:?}"
                );
                let dropped = tokio::time::timeout(of_far(17 + n * 11), busy.lock()).await;
                assert!(dropped.is_err());
                let outcome = busy.try_lock_for(wait).await;
                assert!(
                    matches!(outcome, Ok(None)),
                    "{kind}, a dropped wait, {n}, {wait:?}: {outcome:?}"
                );
                held.unlock().await.unwrap();
            })
            .await
            .unwrap();
        }
    });
    join_all(rows).await;
}

/// A script that the server does not know is sent with its text: a short wait has no time for a
/// second round trip.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_short_waits_end_with_none_at_1600_ms() {
    const KINDS: [&str; 3] = ["fair", "write", "multi"];
    let server = Server::start();
    let proxy = far(&server, FAR);
    let near = server.client().await;
    let mut held = Vec::new();
    for kind in KINDS {
        held.push(of_kind(&near, kind, kind).lock().await.unwrap());
    }
    let clients = join_all(KINDS.map(|_| connect_far(&proxy))).await;
    server.call(&["SCRIPT", "FLUSH"]);
    // many owners at once, each of them twice
    let waits = KINDS.into_iter().zip(&clients).flat_map(|(kind, far)| {
        (0..20_u64).map(move |n| {
            let lock = of_kind(far, kind, kind);
            OwnerId::scope(async move {
                for _ in 0..2 {
                    let outcome = lock.try_lock_for(of_far(n * 4)).await;
                    assert!(matches!(outcome, Ok(None)), "{kind}, {n}: {outcome:?}");
                }
            })
        })
    });
    join_all(waits).await;
    for held in held {
        held.unlock().await.unwrap();
    }
    let clients = join_all(KINDS.map(|_| connect_far(&proxy))).await;
    server.call(&["SCRIPT", "FLUSH"]);
    let waits = KINDS
        .into_iter()
        .zip(&clients)
        .map(|(kind, far)| async move {
            let guard = of_kind(far, kind, &format!("{kind}:free"))
                .try_lock_for(of_far(4))
                .await
                .unwrap();
            guard.expect("it is free").unlock().await.unwrap();
        });
    join_all(waits).await;
}

/// A wait also ends in time if an attempt is more than one request because an unsettled one comes
/// first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_in_time_on_a_silent_link() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::builder()
        .command_timeout(ms(1000))
        .connect(proxy.url())
        .await
        .unwrap();
    let lock = client.reentrant_lock("l").unwrap();
    let slack = ms(400);
    for wait in [0, 700, 2500] {
        eventually("the link is up", || async {
            lock.is_locked().await.is_ok()
        })
        .await;
        client.idle().await;
        let guard = lock.lock().await.unwrap();
        proxy.black_hole(Way::Both);
        // the owner has an unsettled request, so it cannot acquire yet
        let unlock = tokio::time::timeout(ms(20), guard.unlock()).await;
        assert!(unlock.is_err());
        let start = Instant::now();
        let options = AcquireOptions::new();
        let outcome = lock.try_lock_for_with(ms(wait), options).await;
        let took = start.elapsed();
        // a try may take as long as one request
        let limit = if wait == 0 { ms(1000) } else { ms(wait) };
        assert!(outcome.is_err(), "{wait}: {outcome:?}");
        assert!(took < limit + slack, "a wait of {wait} ms took {took:?}");
        proxy.heal();
        proxy.cut();
    }
}

/// Found by the simulator (reentrant 1193): time that a request spends on anything but its reply
/// must not count as round trip, because a bounded wait may overrun by a round trip.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_the_server_forgot_make_no_round_trip_longer() {
    let server = Server::start();
    let proxy = far(&server, 1_000);
    let client = connect_far(&proxy).await;
    let lock = client.reentrant_lock("l").unwrap();
    for _ in 0..2 {
        server.call(&["SCRIPT", "FLUSH"]);
        lock.lock().await.unwrap().unlock().await.unwrap();
    }
    proxy.black_hole(Way::Both);
    let told = client.stats().round_trip;
    assert!(told >= ms(1_250) && told < ms(1_250 + 700), "{told:?}");
    let start = Instant::now();
    lock.try_lock_for(ms(100)).await.unwrap_err();
    let took = start.elapsed();
    // a round trip, up to a quarter longer, and 100 ms; two round trips would take 2,600 ms, which
    // is below the command timeout
    let limit = ms(100 + 1_000 + 250 + 100);
    assert!(took < limit + ms(700), "not {limit:?}, but {took:?}");
}

/// Several batches are in flight at once, the most urgent first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_holds_and_a_short_one_are_renewed_at_1000_ms() {
    let server = Server::start_real();
    let proxy = Proxy::start(&server);
    // a third of either TTL exceeds a round trip plus the delays of this process on a busy machine
    let client = LockClient::builder()
        .watchdog_timeout(ms(9_600))
        .connect(proxy.url())
        .await
        .unwrap();
    let guards = hold_many(&client, 6_000).await;
    proxy.rule(|_| Action::Late(ms(1_000)));
    let short = AcquireOptions::new().watchdog_timeout(ms(6_000));
    let short = client
        .reentrant_lock("short")
        .unwrap()
        .try_lock_with(short)
        .await
        .unwrap()
        .unwrap();
    // 12 batches in sequence would take longer than the lease
    tokio::time::sleep(ms(24_000)).await;
    assert!(!short.is_lost());
    assert_eq!(
        guards.iter().filter(|guard| guard.is_lost()).count(),
        0,
        "of {}",
        guards.len()
    );
    // a shutdown has two command timeouts, 6 s here, which the next test covers
    proxy.pass();
    drop(guards);
    client.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_releases_thousands_of_holds_at_50_ms() {
    let server = Server::start_real();
    let proxy = Proxy::start(&server);
    // a shutdown has two command timeouts
    let client = LockClient::builder()
        .command_timeout(ms(9_000))
        .connect(proxy.url())
        .await
        .unwrap();
    let guards = hold_many(&client, 20_000).await;
    proxy.rule(|_| Action::Late(ms(50)));
    let (before, start) = (proxy.count(Verb::Release), Instant::now());
    client.shutdown().await.unwrap();
    let took = start.elapsed();
    assert_eq!(server.call(&["DBSIZE"]).int(), 0);
    let requests = proxy.count(Verb::Release) - before;
    // 16 batches in flight, each of which takes 50 ms while the next ones gather; then the last
    // batches, which are full
    let most = 60 + 18 * took.as_millis() as usize / 50;
    assert!(
        requests < most,
        "in batches: {requests} requests for {} holds in {took:?}",
        guards.len()
    );
}

/// A renewal that is refused as a whole costs one request per batch, not one per lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_renewals_do_not_hammer_the_server() {
    let server = Server::start_real();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(ms(6000)))
        .await;
    let guards = hold_many(&client, 3000).await;
    server.call(&["ACL", "SETUSER", "default", "-evalsha"]);
    let refused = || {
        let info = server.call(&["INFO", "stats"]).text().to_owned();
        let line = info
            .lines()
            .find(|line| line.starts_with("total_error_replies:"))
            .unwrap()
            .to_owned();
        line.split(':')
            .nth(1)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
    };
    let before = refused();
    eventually("the first loss", || async {
        guards.iter().any(LockGuard::is_lost)
    })
    .await;
    let requests = refused() - before;
    assert!(
        (6..600).contains(&requests),
        "{requests} refused requests for 3,000 holds, which 6 batches would do"
    );
    server.call(&["ACL", "SETUSER", "default", "+evalsha"]);
}

/// A lock that the ACL denies does not cost the others of its batch their renewal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_denied_does_not_cost_the_others_their_renewal() {
    let server = Server::start_real();
    let client = server
        .client_with(|builder| builder.watchdog_timeout(ms(2400)))
        .await;
    let guards = hold_many(&client, 400).await;
    let denied = client
        .reentrant_lock("denied")
        .unwrap()
        .lock()
        .await
        .unwrap();
    server.call(&["ACL", "SETUSER", "default", "resetkeys", "~h:*"]);
    let lost = tokio::time::timeout(Duration::from_secs(20), denied.lost()).await;
    assert!(lost.is_ok());
    tokio::time::sleep(ms(2500)).await;
    assert_eq!(guards.iter().filter(|guard| guard.is_lost()).count(), 0);
    server.call(&["ACL", "SETUSER", "default", "allkeys"]);
}

/// Two clients take the same locks in opposite order: each holds its first lock for a round trip
/// while it tries the second. The simulator found two that went on like this for more than a
/// minute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn multi_locks_do_not_disturb_each_other_for_ever_at_200_ms() {
    let server = Server::start();
    let proxy = far(&server, 200);
    let near = server.client().await;
    let [a, b] = ["a", "b"].map(|name| near.reentrant_lock(name).unwrap());
    let mut rounds = Vec::new();
    for round in 0..4 {
        let held = (a.lock().await.unwrap(), b.lock().await.unwrap());
        let mut waiting = Vec::new();
        for names in [["a", "b"], ["b", "a"]] {
            let far = LockClient::connect(proxy.url()).await.unwrap();
            let members = names.map(|name| far.reentrant_lock(name).unwrap());
            let both = far.multi_lock(members).unwrap();
            waiting.push(tokio::spawn(async move {
                both.lock().await.unwrap().unlock().await.unwrap();
            }));
        }
        tokio::time::sleep(ms(1_500)).await;
        let started = Instant::now();
        let (first, second) = held;
        let (first, second) = tokio::join!(first.unlock(), second.unlock());
        first.and(second).unwrap();
        join_all(waiting)
            .await
            .into_iter()
            .for_each(|ended| ended.unwrap());
        rounds.push(started.elapsed().as_millis());
        eprintln!("round {round}: {} ms", rounds[round]);
        assert!(started.elapsed() < ms(15_000), "{rounds:?}");
    }
}

/// A round trip measured during an outage is not used as the pause between two tries: the simulator
/// found a lock free for 7 s.
#[tokio::test]
async fn a_multi_lock_does_not_sleep_through_what_an_outage_taught_it() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    // far longer than the slow replies take, even if the machine stalls
    let builder = LockClient::builder().command_timeout(ms(10_000));
    let (client, near) = (
        builder.connect(proxy.url()).await.unwrap(),
        server.client().await,
    );
    let [a, b] = ["a", "b"].map(|name| client.reentrant_lock(name).unwrap());
    let both = client.multi_lock([a.clone(), b]).unwrap();
    let busy = ["a", "b"].map(|name| near.reentrant_lock(name).unwrap());
    // each sample counts for at most twice the estimate plus 40 ms
    proxy.rule(|_| Action::Late(ms(2_500)));
    for _ in 0..7 {
        assert!(!a.is_locked().await.unwrap());
    }
    proxy.rule(|_| Action::Pass);
    let mut took = Vec::new();
    for _ in 0..6 {
        eventually("no task waits", || async { client.stats().channels == 0 }).await;
        let (first, second) = (busy[0].lock().await.unwrap(), busy[1].lock().await.unwrap());
        let (waiter, released) = (both.clone(), proxy.count(Verb::Release));
        let waiting =
            tokio::spawn(async move { waiter.lock().await.unwrap().unlock().await.unwrap() });
        eventually("it waits for the first", || async {
            client.stats().channels > 0
        })
        .await;
        first.unlock().await.unwrap();
        // it acquires the first lock, finds the second busy, and releases the first
        eventually("it gives a lock back", || async {
            proxy.count(Verb::Release) > released
        })
        .await;
        let freed = Instant::now();
        second.unlock().await.unwrap();
        waiting.await.unwrap();
        took.push(freed.elapsed());
    }
    assert!(took.iter().all(|took| *took < ms(1_000)), "{took:?}");
}

/// The client measures the round trip even if the server refuses everything, PING included: the
/// last try receives its refusal in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_only_refused_on_a_slow_link_ends_as_refused() {
    const KINDS: [&str; 8] = [
        "reentrant",
        "fair",
        "write",
        "read",
        "fenced",
        "spin",
        "signal",
        "multi",
    ];
    let refusals = [
        (
            "LOADING Redis is loading the dataset in memory",
            StoreErrorKind::Loading,
            true,
        ),
        (
            "BUSY Redis is busy running a script.",
            StoreErrorKind::Busy,
            true,
        ),
        (
            "MASTERDOWN Link with MASTER is down",
            StoreErrorKind::MasterDown,
            true,
        ),
        (
            "TRYAGAIN Multiple keys request during rehashing of slot",
            StoreErrorKind::TryAgain,
            false,
        ),
        (
            "OOM command not allowed when used memory > 'maxmemory'.",
            StoreErrorKind::OutOfMemory,
            false,
        ),
    ];
    let server = Server::start();
    let cases = refusals
        .into_iter()
        .flat_map(|refusal| WIRES.iter().map(move |wire| (refusal, *wire)));
    let waits = cases.map(|((said, kind, refuses_ping), wire)| {
        let refusing = Proxy::start(&server);
        refusing.rule(move |request| {
            let is_refused = request.is_script() || refuses_ping && request.is("PING");
            if is_refused {
                Action::Refuse(said)
            } else {
                Action::Pass
            }
        });
        let proxy = Proxy::to(refusing.addr());
        // the handshake allows 2 s for each step
        proxy.rule(|request| {
            if request.is_script() || request.is("PING") {
                Action::Late(ms(FAR))
            } else {
                Action::Pass
            }
        });
        async move {
            let client = far_off()
                .tuning(Tuning {
                    wire,
                    ..Tuning::default()
                })
                .connect(format!("redis://{}", proxy.addr()))
                .await
                .unwrap();
            let waits = KINDS.map(|of| {
                let lock = of_kind(&client, of, of);
                OwnerId::scope(async move { (of, lock.try_lock_for(ms(16_000)).await) })
            });
            for (of, outcome) in join_all(waits).await {
                let Err(Error::Store { source, .. }) = outcome else {
                    panic!("{said}, {wire:?}, {of}: {outcome:?}")
                };
                assert_eq!(
                    (source.kind(), source.may_have_executed()),
                    (kind, false),
                    "{said}, {wire:?}, {of}"
                );
                assert!(
                    source.is_transient() && source.to_string().contains(said),
                    "{said}, {wire:?}, {of}: {source:?}"
                );
            }
            drop(refusing);
        }
    });
    join_all(waits).await;
}
