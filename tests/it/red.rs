//! The RedLock: one lock over independent servers, of which some are dead, hang, or lose their
//! data.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures::FutureExt;
use nestlock::{
    AcquireOptions, Error, Lock, LockClient, LockGuard, LossReason, NodeSaid, OwnerId,
    RedLockOptions,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    bad_server::{log_in, set_user},
    cancel::poll_times,
    contract::contract_suite,
    support::{
        Server, eventually,
        proxy::{Action, Proxy, Verb},
        wire::Reply,
    },
};

contract_suite! {
    mod contract,
    door = |client, name| {
        let members = [name.to_owned(), format!("{name}:2"), format!("{name}:3")];
        let members = members.map(|name| client.reentrant_lock(name).unwrap());
        // Leases in these tests are short: a round limit of a twentieth would be a few
        // milliseconds.
        let options = nestlock::RedLockOptions::new().expiry(std::time::Duration::from_secs(30)).timeout_factor(0.9);
        client.red_lock_over(members, options).unwrap()
    },
    one_record = false,
    listens = false,
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Independent servers, with ways to connect clients and read the records.
struct Fleet {
    servers: Vec<Server>,
}

impl Fleet {
    fn new(servers: usize) -> Self {
        Self {
            servers: (0..servers).map(|_| Server::start()).collect(),
        }
    }

    async fn clients(&self) -> Vec<LockClient> {
        let mut clients = Vec::new();
        for server in &self.servers {
            clients.push(server.client().await);
        }
        clients
    }

    /// Returns a RedLock and its own clients.
    async fn lock(&self, options: RedLockOptions) -> (Lock, Vec<LockClient>) {
        let clients = self.clients().await;
        (
            LockClient::red_lock(&clients, "l", options).unwrap(),
            clients,
        )
    }

    /// Returns the value that each server records.
    fn values(&self) -> Vec<Option<String>> {
        let value = |server: &Server| match server.call(&["GET", "l"]) {
            Reply::Nil => None,
            reply => Some(reply.text().to_owned()),
        };
        self.servers.iter().map(value).collect()
    }

    /// Acquires the lock on this server for another process: `SET NX PX`, as all libraries do.
    fn take(&self, at: usize, value: &str) {
        assert!(
            !self.servers[at]
                .call(&["SET", "l", value, "NX", "PX", "60000"])
                .is_error()
        );
    }

    async fn is_free(&self) {
        eventually("no record is left", || async {
            self.values().iter().all(Option::is_none)
        })
        .await;
    }
}

/// Returns options with a round limit that a busy machine can meet.
fn patient() -> RedLockOptions {
    RedLockOptions::new().expiry(Duration::from_secs(40))
}

fn limit(options_expiry: Duration) -> Duration {
    options_expiry / 20
}

/// One random value is on every server while the lock is held, and gone after the release.
#[tokio::test]
async fn a_random_value_is_on_every_server_until_the_release() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let guard = lock.lock().await.unwrap();
        let value = guard.owner().to_string();
        assert_eq!(fleet.values(), vec![Some(value.clone()); 3]);
        assert!(
            fleet
                .servers
                .iter()
                .all(|server| (30_000..=40_000).contains(&server.pttl("l")))
        );
        assert!(value.len() >= 22 && !seen.contains(&value), "{value}");
        seen.push(value);
        assert!(
            guard.valid_until() > Instant::now() + ms(30_000) && guard.remaining() < ms(40_000)
        );
        assert_eq!(
            (
                lock.is_locked().await.unwrap(),
                lock.holder().await.unwrap()
            ),
            (true, Some(guard.owner()))
        );
        assert_eq!(lock.hold_count(&guard.owner()).await.unwrap(), 1);
        assert!(lock.remaining_lease().await.unwrap().unwrap() > ms(30_000));
        guard.unlock().await.unwrap();
        assert_eq!(fleet.values(), vec![None; 3]);
        assert_eq!(
            (
                lock.is_locked().await.unwrap(),
                lock.holder().await.unwrap()
            ),
            (false, None)
        );
        assert_eq!(lock.remaining_lease().await.unwrap(), None);
    }
}

/// N1: what a minority granted is released before the call returns.
#[tokio::test]
async fn n1_a_busy_majority_returns_none_and_leaves_nothing() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    fleet.take(0, "theirs");
    fleet.take(2, "theirs");
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(fleet.values()[1], None);
    assert!(lock.is_locked().await.unwrap());
    assert_eq!(lock.holder().await.unwrap().unwrap().as_str(), "theirs");
    // A busy minority does not block the acquire.
    fleet.servers[0].call(&["DEL", "l"]);
    let guard = lock.try_lock().await.unwrap().expect("two of three");
    assert_eq!(guard.members().len(), 2);
    guard.unlock().await.unwrap();
    assert_eq!(fleet.values(), [None, None, Some("theirs".into())]);
}

/// N14: each of two holders has half of the servers. Neither waits for ever.
#[tokio::test]
async fn n14_split_votes_of_even_numbers_decide() {
    for servers in [2, 4] {
        let fleet = Fleet::new(servers);
        let (lock, _clients) = fleet.lock(patient().tries(2)).await;
        (0..servers / 2).for_each(|at| fleet.take(at, "theirs"));
        assert!(
            lock.try_lock_for(Duration::from_secs(30))
                .await
                .unwrap()
                .is_none()
        );
        assert!(fleet.values()[servers / 2..].iter().all(Option::is_none));
        // One more server makes a majority.
        fleet.servers[0].call(&["DEL", "l"]);
        lock.try_lock()
            .await
            .unwrap()
            .expect("more than a half")
            .unlock()
            .await
            .unwrap();
    }
    let fleet = Fleet::new(1);
    let (lock, _clients) = fleet.lock(patient()).await;
    lock.lock().await.unwrap().unlock().await.unwrap();
}

/// S3, R82, L6: a server that hangs costs the round limit, for an acquire and for a release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_l6_r82_a_hung_minority_costs_no_more_than_the_round_limit() {
    for servers in [3, 5] {
        let fleet = Fleet::new(servers);
        let (lock, clients) = fleet.lock(patient()).await;
        lock.lock().await.unwrap().unlock().await.unwrap();
        let most = limit(ms(40_000)).mul_f64(1.2);
        (0..servers / 2).for_each(|at| fleet.servers[at].stop());
        let start = Instant::now();
        let guard = lock.try_lock().await.unwrap().expect("a majority");
        let acquired = start.elapsed();
        assert!(
            acquired <= most,
            "acquired within {acquired:?}, not {most:?}"
        );
        assert_eq!(guard.members().len(), servers - servers / 2);
        let start = Instant::now();
        guard.unlock().await.unwrap();
        let released = start.elapsed();
        assert!(
            released <= most,
            "released within {released:?}, not {most:?}"
        );
        println!(
            "{servers} servers: acquired in {acquired:?}, released in {released:?}, limit {:?}",
            limit(ms(40_000))
        );
        fleet.servers.iter().for_each(Server::cont);
        for client in &clients {
            client.idle().await;
        }
        fleet.is_free().await;
    }
}

/// S3: a server that hangs only while the lock is held costs the release at most the round limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_a_later_hang_costs_the_release_at_most_the_round_limit() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[1].stop();
    let start = Instant::now();
    guard.unlock().await.unwrap();
    assert!(
        start.elapsed() <= limit(ms(40_000)).mul_f64(1.2),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(fleet.servers[0].call(&["GET", "l"]), Reply::Nil);
    fleet.servers[1].cont();
    fleet.is_free().await;
}

/// A dead minority costs nothing, and a dead majority is an error that names each server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_minority_costs_nothing_and_a_dead_majority_errs() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    fleet.servers[0].kill();
    let guard = lock.try_lock().await.unwrap();
    // The first request may be the one that finds the connection broken.
    let guard = guard.expect("two of three");
    assert_eq!(guard.members().len(), 2);
    guard.unlock().await.unwrap();
    fleet.servers[1].kill();
    let error = lock.try_lock().await.unwrap_err();
    let Error::NoQuorum {
        needed: 2, nodes, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(nodes.len(), 3);
    for (node, server) in nodes.iter().zip(&fleet.servers) {
        assert_eq!(node.node, server.addr().to_string());
    }
    assert!(matches!(nodes[2].said, NodeSaid::Agreed), "{error}");
    assert!(
        !matches!(nodes[0].said, NodeSaid::Agreed | NodeSaid::Busy),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains("\"l\"") && text.contains(&nodes[0].node) && text.contains("agreed"),
        "{text}"
    );
    // The server that agreed keeps no record.
    assert_eq!(fleet.servers[2].call(&["GET", "l"]), Reply::Nil);
    assert!(lock.is_locked().await.is_err() && lock.force_unlock().await.is_err());
    assert!(
        lock.release(&OwnerId::from_value("v").unwrap())
            .await
            .is_err()
    );
}

/// S4, S14: a contended acquire retries until the wait or the tries are used up, and reports why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s4_s14_a_contended_acquire_tries_again_until_it_may_not() {
    let fleet = Fleet::new(3);
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    let options = patient().tries(4).retry_delay_of(move |tries| {
        log.lock().unwrap().push(tries);
        ms(1)
    });
    let (lock, clients) = fleet.lock(options).await;
    (0..3).for_each(|at| fleet.take(at, "theirs"));
    // Busy servers: four rounds with pauses between them, but only one round without a wait.
    lock.try_lock().await.unwrap();
    let scripts = || fleet.servers.iter().map(Server::script_count).sum::<u64>();
    let before = scripts();
    assert!(
        lock.try_lock_for(Duration::from_secs(60))
            .await
            .unwrap()
            .is_none()
    );
    assert_eq!(
        (scripts() - before, &*asked.lock().unwrap()),
        (4 * 3, &vec![1, 2, 3])
    );
    asked.lock().unwrap().clear();
    let before = scripts();
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!((scripts() - before, &*asked.lock().unwrap()), (3, &vec![]));
    // The wait ends before the tries do.
    let endless = LockClient::red_lock(&clients, "l", patient().tries(u32::MAX)).unwrap();
    let start = Instant::now();
    assert!(endless.try_lock_for(ms(400)).await.unwrap().is_none());
    assert!(
        start.elapsed() >= ms(400) && start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    // The lock becomes free during the wait, and the waiter gets it.
    let waiter = tokio::spawn(async move { endless.lock().await });
    tokio::task::yield_now().await;
    for server in &fleet.servers {
        server.call(&["DEL", "l"]);
    }
    waiter.await.unwrap().unwrap().unlock().await.unwrap();
    // Errors are retried as well, and the last one is returned.
    fleet.servers[0].kill();
    fleet.servers[1].kill();
    asked.lock().unwrap().clear();
    let error = lock
        .try_lock_for(Duration::from_secs(60))
        .await
        .unwrap_err();
    assert!(matches!(error, Error::NoQuorum { .. }), "{error}");
    assert_eq!(*asked.lock().unwrap(), [1, 2, 3]);
}

/// S5, L3: an extension or a renewal that fails releases nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s5_l3_an_extension_that_fails_releases_nothing() {
    let fleet = Fleet::new(3);
    let options = RedLockOptions::new()
        .expiry(Duration::from_secs(20))
        .timeout_factor(0.02);
    let (lock, _clients) = fleet.lock(options).await;
    let lease = AcquireOptions::new().lease(Duration::from_secs(20));
    let guard = lock.try_lock_with(lease).await.unwrap().unwrap();
    let value = guard.owner();
    fleet.servers[0].stop();
    guard.extend(Duration::from_secs(60)).await.unwrap();
    assert!(fleet.servers[1].pttl("l") > 50_000 && fleet.servers[2].pttl("l") > 50_000);
    assert!(guard.remaining() > Duration::from_secs(50));
    lock.extend(&value, Duration::from_secs(90)).await.unwrap();
    // A majority does not reply: the extension fails, and nothing changes.
    fleet.servers[1].stop();
    let error = guard.extend(Duration::from_secs(600)).await.unwrap_err();
    assert!(matches!(error, Error::NoQuorum { .. }), "{error}");
    assert!(!guard.is_lost() && guard.remaining() > Duration::from_secs(50));
    assert_eq!(fleet.servers[2].call(&["GET", "l"]).text(), value.as_str());
    fleet.servers[0].cont();
    fleet.servers[1].cont();
    assert!(
        fleet
            .values()
            .iter()
            .all(|found| found.as_deref() == Some(value.as_str()))
    );
    guard.unlock().await.unwrap();
    fleet.is_free().await;
}

/// S6: a server that restarted without its data is acquired again. A lost lock is not recreated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s6_a_restarted_member_rejoins_and_a_lost_quorum_stays_lost() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient().recreate_on_extend(true)).await;
    let plain = LockClient::red_lock(&clients, "l", patient()).unwrap();
    let lease = || AcquireOptions::new().lease(Duration::from_secs(40));
    for (lock, rejoins) in [(&plain, false), (&lock, true)] {
        let guard = lock.try_lock_with(lease()).await.unwrap().unwrap();
        fleet.servers[0].call(&["DEL", "l"]);
        // The first extension finds the record missing, the second acquires it again.
        let _ = guard.extend(Duration::from_secs(40)).await;
        guard.extend(Duration::from_secs(50)).await.unwrap();
        assert_eq!(fleet.values()[0].is_some(), rejoins);
        // It is a full member, so another server may now lose its record.
        fleet.servers[1].call(&["DEL", "l"]);
        let extended = guard.extend(Duration::from_secs(60)).await;
        assert_eq!(extended.is_ok(), rejoins, "{extended:?}");
        if rejoins {
            assert!(!guard.is_lost());
            guard.unlock().await.unwrap();
        } else {
            assert!(guard.is_lost());
            assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
        }
        fleet.is_free().await;
    }
    // Two of three servers lose the record at once: the loss is reported, and nothing is written.
    let guard = lock.try_lock_with(lease()).await.unwrap().unwrap();
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.servers[1].call(&["DEL", "l"]);
    assert!(matches!(
        guard.extend(Duration::from_secs(60)).await,
        Err(Error::Lost { .. })
    ));
    let lost = tokio::time::timeout(Duration::from_secs(10), guard.lost())
        .await
        .expect("known at once");
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: LossReason::RecordMissing,
                ..
            }
        ),
        "{lost}"
    );
    assert!(matches!(
        guard.extend(Duration::from_secs(60)).await,
        Err(Error::Lost { .. })
    ));
    assert_eq!(fleet.values()[..2], [None, None]);
    drop(guard);
    fleet.is_free().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_renew_and_the_loss_of_a_majority_is_reported() {
    let fleet = Fleet::new(3);
    // The round limit is 850 ms.
    let (lock, clients) = fleet
        .lock(RedLockOptions::new().expiry(ms(2500)).timeout_factor(0.34))
        .await;
    let guard = lock.lock().await.unwrap();
    let start = Instant::now();
    fleet.servers[2].call(&["DEL", "l"]);
    while start.elapsed() < ms(6000) {
        assert!(
            !guard.is_lost() && fleet.servers[0].pttl("l") > 0,
            "after {:?}",
            start.elapsed()
        );
        tokio::time::sleep(ms(20)).await;
    }
    assert!(guard.remaining() <= ms(2500));
    fleet.servers[0].call(&["SET", "l", "theirs"]);
    let lost = tokio::time::timeout(Duration::from_secs(10), guard.lost())
        .await
        .expect("it is noticed");
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    assert_eq!(fleet.values(), [Some("theirs".into()), None, None]);
    fleet.servers[0].call(&["DEL", "l"]);
    // The options limit the hold time.
    let capped = LockClient::red_lock(
        &clients,
        "l",
        RedLockOptions::new().expiry(ms(1500)).max_hold(ms(2000)),
    )
    .unwrap();
    let guard = loop {
        // The round limit is 75 ms, which a busy machine may miss.
        match capped.try_lock().await {
            Ok(Some(guard)) => break guard,
            other => drop(other),
        }
    };
    let start = Instant::now();
    tokio::time::timeout(Duration::from_secs(10), guard.lost())
        .await
        .expect("it ends");
    assert!(start.elapsed() > ms(1600), "{:?}", start.elapsed());
}

/// S2: the remaining time grows only with a renewal, and an explicit lease ends by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s2_an_explicit_lease_takes_the_place_of_the_expiry() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(RedLockOptions::new().timeout_factor(0.9)).await;
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(ms(1500)))
        .await
        .unwrap()
        .unwrap();
    let mut before = ms(1485);
    while !guard.is_lost() {
        let remaining = guard.remaining();
        assert!(remaining <= before, "{remaining:?} after {before:?}");
        before = remaining;
        tokio::time::sleep(ms(5)).await;
    }
    assert!(guard.valid_until() <= Instant::now());
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LossReason::LeaseExpired,
            ..
        })
    ));
    fleet.is_free().await;
    // More drift leaves less time to rely on.
    let (lock, _clients) = fleet.lock(patient().drift_factor(0.5)).await;
    let guard = lock.lock().await.unwrap();
    assert!(
        guard.remaining() < ms(20_000) && guard.remaining() > ms(15_000),
        "{:?}",
        guard.remaining()
    );
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fail_fast_does_not_wait_for_a_server_that_hangs() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient().fail_fast(true).shuffle(true)).await;
    fleet.servers[0].stop();
    let start = Instant::now();
    let guard = lock.try_lock().await.unwrap().expect("a majority");
    assert!(
        start.elapsed() < limit(ms(40_000)) / 2,
        "{:?}",
        start.elapsed()
    );
    assert_eq!(guard.members().len(), 2);
    guard.unlock().await.unwrap();
    fleet.take(1, "theirs");
    fleet.take(2, "theirs");
    let start = Instant::now();
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(
        start.elapsed() < limit(ms(40_000)) / 2,
        "{:?}",
        start.elapsed()
    );
    fleet.servers[0].cont();
    eventually("the one that hung has nothing", || async {
        fleet.values()[0].is_none()
    })
    .await;
}

/// Another process that knows the value can extend and release the lock.
#[tokio::test]
async fn a_value_is_handed_over() {
    let fleet = Fleet::new(3);
    let clients = fleet.clients().await;
    let (other, _others) = fleet.lock(patient()).await;
    let made = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&made);
    let generator = move || format!("made-{}", count.fetch_add(1, Ordering::SeqCst));
    for (options, value) in [
        (patient().value("fixed"), "fixed"),
        (patient().value_generator(generator), "made-0"),
    ] {
        let lock = LockClient::red_lock(&clients, "l", options).unwrap();
        let guard = lock.lock().await.unwrap();
        assert_eq!(fleet.values(), vec![Some(value.to_owned()); 3]);
        let owner = guard.leave_to_lease();
        assert_eq!(owner.as_str(), value);
        assert!(other.try_lock().await.unwrap().is_none());
        let adopted = OwnerId::from_value(value).unwrap();
        other
            .extend(&adopted, Duration::from_secs(600))
            .await
            .unwrap();
        assert!(
            fleet
                .servers
                .iter()
                .all(|server| server.pttl("l") > 500_000)
        );
        assert!(matches!(
            other
                .extend(
                    &OwnerId::from_value("guess").unwrap(),
                    Duration::from_secs(9)
                )
                .await,
            Err(Error::NotHeld { .. })
        ));
        other.release(&adopted).await.unwrap();
        assert_eq!(fleet.values(), vec![None; 3]);
        assert!(matches!(
            other.release(&adopted).await,
            Err(Error::NotHeld { .. })
        ));
    }
    assert_eq!(made.load(Ordering::SeqCst), 1);
    // One acquire may bring its own value.
    let guard = other
        .try_lock_with(AcquireOptions::new().value("mine"))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(fleet.values(), vec![Some("mine".to_owned()); 3]);
    assert!(other.force_unlock().await.unwrap());
    assert!(!other.force_unlock().await.unwrap());
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
}

/// F32, L9: an acquire that is dropped at any poll leaves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_l9_a_cancelled_acquire_leaves_nothing_on_any_server() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient()).await;
    lock.lock().await.unwrap().unlock().await.unwrap();
    for polls in 1..12 {
        let polled = poll_times(lock.try_lock_for(ms(5000)), polls).await;
        drop(polled);
        for client in &clients {
            client.idle().await;
        }
        assert_eq!(fleet.values(), vec![None; 3], "after {polls} polls");
    }
    // The same for a dropped guard.
    drop(lock.lock().await.unwrap());
    fleet.is_free().await;
    for client in &clients {
        eventually("the ledger is empty", || async {
            client.stats().holds == 0
        })
        .await;
    }
}

/// L4: the time that is left when the replies arrive decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_r83_a_lease_over_before_the_replies_leaves_nothing() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet
        .lock(patient().drift_factor(0.5).timeout_factor(1.0))
        .await;
    let mut refused = 0;
    for _ in 0..200 {
        match lock
            .try_lock_with(AcquireOptions::new().lease(ms(10)))
            .await
        {
            Ok(Some(guard)) => assert!(guard.remaining() <= ms(5)),
            Ok(None) | Err(Error::NoQuorum { .. }) => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    println!("{refused} of 200 were refused");
    for client in &clients {
        client.idle().await;
    }
    fleet.is_free().await;
}

/// L5, N3: options at the edge of their range work or are refused.
#[tokio::test]
async fn l5_n3_options_that_make_no_sense_are_refused() {
    let fleet = Fleet::new(1);
    let clients = fleet.clients().await;
    let made = |options: RedLockOptions| LockClient::red_lock(&clients, "l", options);
    let new = RedLockOptions::new;
    for bad in [
        new().tries(0),
        new().drift_factor(-0.1),
        new().drift_factor(0.6),
        new().drift_factor(f64::NAN),
        new().timeout_factor(0.0),
        new().timeout_factor(1.1),
        new().timeout_factor(f64::NAN),
        new().retry_delay(ms(2), ms(1)),
    ] {
        assert!(matches!(made(bad), Err(Error::InvalidConfig { .. })));
    }
    assert!(matches!(
        made(new().expiry(ms(9))),
        Err(Error::InvalidLease { .. })
    ));
    assert!(matches!(
        LockClient::red_lock([], "l", new()),
        Err(Error::InvalidConfig { .. })
    ));
    assert!(matches!(
        LockClient::red_lock(&clients, "", new()),
        Err(Error::InvalidName { .. })
    ));
    assert!(matches!(
        clients[0].red_lock_over([], new()),
        Err(Error::InvalidConfig { .. })
    ));
    let member = || clients[0].reentrant_lock("r").unwrap();
    let valued = clients[0].red_lock_over([member()], new().value("v"));
    assert!(matches!(valued, Err(Error::InvalidConfig { .. })));
    // No pause, one try, no drift.
    let lock = made(
        patient()
            .retry_delay(Duration::ZERO, Duration::ZERO)
            .tries(1)
            .drift_factor(0.0),
    )
    .unwrap();
    let guard = lock.lock().await.unwrap();
    assert!(lock.try_lock_for(ms(10)).await.unwrap().is_none());
    guard.unlock().await.unwrap();
    assert!(!format!("{:?}", patient().value("secret")).contains("secret"));
}

type Door = fn(&LockClient) -> Lock;

/// R84: members of any kind, each on its own server. A reply that all members give is passed on
/// unchanged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r84_members_of_every_kind() {
    let fleet = Fleet::new(3);
    let clients = fleet.clients().await;
    let doors: [Door; 6] = [
        |client| client.reentrant_lock("reentrant").unwrap(),
        |client| client.fair_lock("fair").unwrap(),
        |client| client.fenced_lock("fenced").unwrap(),
        |client| client.read_write_lock("read-write").unwrap().write_lock(),
        |client| client.spin_lock("spin").unwrap(),
        |client| client.non_reentrant_lock("once").unwrap(),
    ];
    for (number, door) in doors.into_iter().enumerate() {
        let lock = clients[0]
            .red_lock_over(clients.iter().map(door), patient())
            .unwrap();
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.members().len(), 3);
        if number == 5 {
            let again = [lock.lock().await.map(Some), lock.try_lock().await];
            assert!(
                matches!(again, [Err(Error::NotReentrant { .. }), Ok(None)]),
                "{again:?}"
            );
        } else {
            lock.try_lock()
                .await
                .unwrap()
                .expect("it is reentrant")
                .unlock()
                .await
                .unwrap();
        }
        let rival = lock.clone();
        assert!(
            tokio::spawn(async move { rival.try_lock().await.unwrap().is_none() })
                .await
                .unwrap()
        );
        guard.unlock().await.unwrap();
    }
    let (first, others) = clients.split_first().unwrap();
    let lock = first
        .red_lock_over(clients.iter().map(doors[0]), patient())
        .unwrap();
    let owner = first.owner("job").unwrap();
    // The other two clients do not know this owner.
    assert!(matches!(
        lock.try_lock_with(AcquireOptions::new().owner(owner)).await,
        Err(Error::InvalidOwner { .. })
    ));
    for client in others {
        client.shutdown().await.unwrap();
    }
    assert!(matches!(lock.lock().await, Err(Error::Closed)));
}

/// The time in which a holder was certain of its lock.
type Interval = (Instant, Instant);

/// Kills, stops and restarts the servers of a RedLock under its holders. The servers persist each
/// write, so no two holds may overlap.
async fn storm(servers: usize, seed: u64) {
    const PERSIST: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];
    let fleet = Fleet {
        servers: (0..servers).map(|_| Server::start_with(&PERSIST)).collect(),
    };
    let over = Arc::new(AtomicBool::new(false));
    let intervals: Arc<Mutex<Vec<Interval>>> = Arc::default();
    let failures = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for number in 0..4 {
        // The round limit is 200 ms.
        let options = RedLockOptions::new()
            .expiry(ms(2000))
            .timeout_factor(0.1)
            .retry_delay(ms(1), ms(20));
        let (lock, clients) = fleet.lock(options).await;
        let (over, intervals, failures) = (
            Arc::clone(&over),
            Arc::clone(&intervals),
            Arc::clone(&failures),
        );
        workers.push(tokio::spawn(async move {
            let mut rng = StdRng::seed_from_u64(seed + number);
            while !over.load(Ordering::SeqCst) {
                let guard: LockGuard = match lock.try_lock_for(ms(2000)).await {
                    Ok(Some(guard)) => guard,
                    Ok(None) => continue,
                    Err(
                        Error::NoQuorum { .. } | Error::Unconfirmed { .. } | Error::Lost { .. },
                    ) => {
                        failures.fetch_add(1, Ordering::SeqCst);
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                // Some holds last longer than the TTL, so that members renew.
                let long = rng.random_bool(0.02);
                let until = Instant::now() + ms(if long { 2500 } else { rng.random_range(0..20) });
                let mut sure: Option<Interval> = None;
                loop {
                    let now = Instant::now();
                    if guard.is_lost() {
                        break;
                    }
                    sure = Some((sure.map_or(now, |(start, _)| start), now));
                    if now >= until {
                        break;
                    }
                    tokio::time::sleep(ms(1)).await;
                }
                intervals.lock().unwrap().extend(sure);
                if rng.random_bool(0.9) {
                    let _ = guard.unlock().await;
                }
            }
            clients
        }));
    }
    let mut rng = StdRng::seed_from_u64(seed);
    let mut down = vec![false; servers];
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(12) {
        let at = rng.random_range(0..servers);
        let server = &fleet.servers[at];
        if down[at] {
            server.restart();
            down[at] = false;
        } else if down.iter().filter(|down| **down).count() < servers / 2 || rng.random_bool(0.2) {
            if rng.random_bool(0.5) {
                server.kill();
                down[at] = true;
            } else {
                server.stop();
                tokio::time::sleep(ms(rng.random_range(1..1000))).await;
                server.cont();
            }
        }
        tokio::time::sleep(ms(rng.random_range(1..400))).await;
    }
    for (server, down) in fleet.servers.iter().zip(down) {
        if down {
            server.restart();
        }
    }
    over.store(true, Ordering::SeqCst);
    let mut clients = Vec::new();
    for worker in workers {
        clients.extend(worker.await.unwrap());
    }
    let mut intervals = std::mem::take(&mut *intervals.lock().unwrap());
    intervals.sort_unstable();
    let overlaps = intervals
        .windows(2)
        .filter(|pair| pair[0].1 >= pair[1].0)
        .count();
    println!(
        "{servers} servers: {} holds, {overlaps} overlaps, {failures:?} failed acquires",
        intervals.len()
    );
    assert_eq!(overlaps, 0);
    assert!(intervals.len() > 50, "{} holds", intervals.len());
    for client in &clients {
        client.idle().await;
    }
    fleet.is_free().await;
}

/// No holds overlap while three servers are killed, stopped and restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_holds_overlap_while_three_servers_fail_and_restart() {
    storm(3, 0x5eed).await;
}

/// No holds overlap while five servers are killed, stopped and restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_holds_overlap_while_five_servers_fail_and_restart() {
    storm(5, 0xfeed).await;
}

/// Returns a RedLock whose members are reentrant locks, which could be acquired twice.
fn of_reentrant(clients: &[LockClient], options: RedLockOptions) -> Lock {
    let members = clients
        .iter()
        .map(|client| client.reentrant_lock("l").unwrap());
    clients[0].red_lock_over(members, options).unwrap()
}

/// Issue 10, A2: each extension acquired the server that had lost its data, both holds counted, and
/// two of five servers were a majority.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_taken_by_two_extensions_at_once_counts_once() {
    let fleet = Fleet::new(5);
    let options = || {
        RedLockOptions::new()
            .expiry(ms(3000))
            .timeout_factor(0.3)
            .recreate_on_extend(true)
    };
    let (clients, others) = (fleet.clients().await, fleet.clients().await);
    let (lock, rival) = (
        of_reentrant(&clients, options()),
        of_reentrant(&others, options()),
    );
    let _blocker = others[4].reentrant_lock("l").unwrap().lock().await.unwrap();
    let guard = lock.lock().await.unwrap();
    fleet.servers[3].call(&["DEL", "l"]);
    eventually("its loss is noticed", || async {
        guard.members()[3].is_lost()
    })
    .await;
    let lease = ms(3000);
    let extended = tokio::join!(
        guard.extend(lease),
        guard.extend(lease),
        guard.extend(lease)
    );
    assert!(matches!(extended, (Ok(()), Ok(()), Ok(()))), "{extended:?}");
    clients[3].idle().await;
    assert_eq!(
        fleet.servers[3].record("l"),
        [(guard.members()[3].owner().to_string(), 1)]
    );
    // Two of five servers are left.
    fleet.servers[1].call(&["DEL", "l"]);
    fleet.servers[2].call(&["DEL", "l"]);
    eventually("the loss is noticed", || async { guard.is_lost() }).await;
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    eventually("it is free for another one", || async {
        matches!(rival.try_lock().await, Ok(Some(guard)) if !guard.is_lost())
    })
    .await;
}

/// Issue 10, A2: the lease ended between two checks of one call.
#[tokio::test]
async fn a_lease_end_is_reported_at_any_moment_it_is_checked() {
    let fleet = Fleet::new(1);
    let (lock, _clients) = fleet.lock(RedLockOptions::new().timeout_factor(1.0)).await;
    let mut told = 0;
    while told < 100 {
        let Ok(Some(guard)) = lock
            .try_lock_with(AcquireOptions::new().lease(ms(15)))
            .await
        else {
            continue;
        };
        let lost = loop {
            if let Some(lost) = guard.lost().now_or_never() {
                break lost;
            }
        };
        assert!(matches!(lost, Error::Lost { .. }), "{lost}");
        told += 1;
    }
}

/// Issue 10, A2: one extension is enough, as in redsync.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_extension_takes_every_server_that_has_forgotten() {
    let fleet = Fleet::new(8);
    let (lock, clients) = fleet.lock(patient().recreate_on_extend(true)).await;
    let leased = AcquireOptions::new().lease(Duration::from_secs(40));
    for options in [AcquireOptions::new(), leased] {
        let guard = lock.try_lock_with(options).await.unwrap().unwrap();
        let value = guard.owner().to_string();
        for forget in [[0, 1, 2], [5, 6, 7], [0, 3, 7]] {
            for at in forget {
                fleet.servers[at].call(&["DEL", "l"]);
            }
            guard.extend(Duration::from_secs(90)).await.unwrap();
            assert_eq!(fleet.values(), vec![Some(value.clone()); 8]);
            assert!(
                fleet.servers.iter().all(|server| server.pttl("l") > 80_000),
                "all have the lease"
            );
            assert!(guard.remaining() > Duration::from_secs(80));
        }
        guard.unlock().await.unwrap();
        fleet.is_free().await;
    }
    // If another client has acquired the server, the extension leaves it alone.
    let guard = lock.lock().await.unwrap();
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.take(0, "theirs");
    guard.extend(Duration::from_secs(90)).await.unwrap();
    assert_eq!(fleet.values()[0].as_deref(), Some("theirs"));
    guard.unlock().await.unwrap();
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.is_free().await;
    for client in &clients {
        eventually("the ledger is empty", || async {
            client.stats().holds == 0
        })
        .await;
    }
}

/// A server that hangs neither keeps the extension from acquiring one that lost its data, nor costs
/// more than the round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extension_takes_a_server_in_time_while_another_hangs() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet
        .lock(
            patient()
                .expiry(Duration::from_secs(80))
                .recreate_on_extend(true),
        )
        .await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.servers[1].stop();
    let start = Instant::now();
    guard.extend(Duration::from_secs(90)).await.unwrap();
    assert!(
        start.elapsed() <= limit(ms(80_000)).mul_f64(1.5),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(
        fleet.servers[0].call(&["GET", "l"]).text(),
        guard.owner().as_str()
    );
    assert!(guard.remaining() > Duration::from_secs(80));
    fleet.servers[1].cont();
    guard.unlock().await.unwrap();
    for client in &clients {
        client.idle().await;
    }
    fleet.is_free().await;
}

/// An extension counts for the holder, whichever task makes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_taken_by_another_tasks_extension_is_the_holders() {
    let fleet = Fleet::new(5);
    let clients = fleet.clients().await;
    let lock = of_reentrant(&clients, patient().recreate_on_extend(true));
    let owners: Vec<_> = clients
        .iter()
        .map(|client| client.current_owner().to_string())
        .collect();
    // One server was never acquired, another one loses its record.
    fleet.servers[4].call(&["HSET", "l", "0a1b2c3d-1111-4222-8333-444455556666:7", "1"]);
    let guard = Arc::new(lock.lock().await.unwrap());
    assert_eq!(guard.members().len(), 4);
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.servers[4].call(&["DEL", "l"]);
    let extending = Arc::clone(&guard);
    tokio::spawn(async move { extending.extend(Duration::from_secs(90)).await })
        .await
        .unwrap()
        .unwrap();
    for (server, owner) in fleet.servers.iter().zip(&owners) {
        assert_eq!(server.record("l"), [(owner.clone(), 1)]);
    }
    let inner = lock.try_lock().await.unwrap().expect("a re-entry");
    assert_eq!(inner.members().len(), 5);
    inner.unlock().await.unwrap();
    Arc::into_inner(guard)
        .expect("the only handle")
        .unlock()
        .await
        .unwrap();
    eventually("no record is left", || async {
        fleet.servers.iter().all(|server| !server.exists("l"))
    })
    .await;
}

/// An extension that is dropped at any poll has acquired a server completely or not at all. The
/// next one completes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_extension_leaves_each_server_one_hold_or_none() {
    let fleet = Fleet::new(3);
    let clients = fleet.clients().await;
    let lock = of_reentrant(&clients, patient().recreate_on_extend(true));
    let lease = Duration::from_secs(90);
    let mut polls = 0;
    loop {
        polls += 1;
        let guard = lock.lock().await.unwrap();
        fleet.servers[1].call(&["DEL", "l"]);
        let ended = poll_times(guard.extend(lease), polls).await.is_some();
        for client in &clients {
            client.idle().await;
        }
        for (server, client) in fleet.servers.iter().zip(&clients) {
            let (owner, record) = (client.current_owner(), server.record("l"));
            let one = matches!(&*record, [(of, 1)] if of.starts_with(owner.as_str()));
            assert!(
                one || record.is_empty() && server.addr() == fleet.servers[1].addr(),
                "{polls} polls: {record:?}"
            );
        }
        guard.extend(lease).await.unwrap();
        assert!(
            fleet
                .servers
                .iter()
                .all(|server| server.record("l").len() == 1),
            "after {polls} polls"
        );
        guard.unlock().await.unwrap();
        eventually("no record is left", || async {
            fleet.servers.iter().all(|server| !server.exists("l"))
        })
        .await;
        if ended {
            break;
        }
    }
    assert!(polls > 1, "{polls} polls");
}

/// Once a loss was reported, a later renewal does not bring the lock back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quorum_that_was_seen_lost_stays_lost() {
    let fleet = Fleet::new(1);
    // Half of the TTL is not relied on, so the lock is over here while the member may still renew.
    let options = RedLockOptions::new()
        .expiry(ms(8000))
        .drift_factor(0.5)
        .timeout_factor(0.5)
        .recreate_on_extend(true);
    let (lock, clients) = fleet.lock(options).await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[0].stop();
    let lost = guard.lost().await;
    assert!(
        matches!(
            lost,
            Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            }
        ),
        "{lost}"
    );
    assert!(!guard.members()[0].is_lost());
    fleet.servers[0].cont();
    eventually("the member renews", || async {
        guard.members()[0].remaining() > ms(6000)
    })
    .await;
    assert!(guard.is_lost() && guard.remaining() == Duration::ZERO);
    let again = guard.lost().now_or_never();
    assert!(
        matches!(
            again,
            Some(Error::Lost {
                reason: LossReason::LeaseExpired,
                ..
            })
        ),
        "{again:?}"
    );
    assert!(matches!(
        guard.extend(ms(8000)).await,
        Err(Error::Lost { .. })
    ));
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    fleet.is_free().await;
    clients[0].idle().await;
}

/// A server that is acquired counts only if a majority was held until then, even if the loss was
/// not observed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_taken_while_the_quorum_is_lost_does_not_restore_it() {
    let fleet = Fleet::new(3);
    let proxy = Proxy::start(&fleet.servers[2]);
    let mut clients = fleet.clients().await;
    clients[2] = LockClient::connect(proxy.url()).await.unwrap();
    let lock = of_reentrant(&clients, patient().recreate_on_extend(true));
    let guard = lock.lock().await.unwrap();
    fleet.servers[2].call(&["DEL", "l"]);
    proxy.rule(|request| match request.verb() {
        Some(Verb::Acquire) if request.args().len() > 2 => Action::Late(ms(700)),
        _ => Action::Pass,
    });
    let lose_another = async {
        eventually("it is taken, and the reply is in flight", || async {
            fleet.servers[2].exists("l")
        })
        .await;
        fleet.servers[0].call(&["DEL", "l"]);
        guard.members()[0].extend(Duration::from_secs(90)).await
    };
    let (extended, lost) = tokio::join!(guard.extend(Duration::from_secs(90)), lose_another);
    assert!(matches!(lost, Err(Error::Lost { .. })), "{lost:?}");
    assert!(matches!(extended, Err(Error::Lost { .. })), "{extended:?}");
    assert!(guard.is_lost());
    drop(guard);
    eventually("no record is left", || async {
        fleet.servers.iter().all(|server| !server.exists("l"))
    })
    .await;
}

/// The drift is a part of the lease, also of one that an extension sets.
#[tokio::test]
async fn the_drift_factor_counts_for_an_extension_too() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient().drift_factor(0.5)).await;
    let guard = lock
        .try_lock_with(AcquireOptions::new().lease(Duration::from_secs(40)))
        .await
        .unwrap()
        .unwrap();
    assert!(
        guard.remaining() <= Duration::from_secs(20),
        "{:?}",
        guard.remaining()
    );
    guard.extend(Duration::from_secs(400)).await.unwrap();
    let remaining = guard.remaining().as_secs();
    assert!((150..=200).contains(&remaining), "{remaining} s");
    // The remaining time never shrinks.
    guard.extend(Duration::from_secs(10)).await.unwrap();
    assert!(
        guard.remaining().as_secs() >= 150,
        "{:?}",
        guard.remaining()
    );
    guard.unlock().await.unwrap();
}

/// The drift is a part of the TTL, which a maximum hold time shortens: as a part of the expiry, it
/// would be longer than the records live, and each round would be undone.
#[tokio::test]
async fn the_drift_is_a_part_of_the_ttl_that_a_maximum_hold_sets() {
    let fleet = Fleet::new(3);
    let options = || patient().drift_factor(0.5).timeout_factor(0.5);
    let limited = AcquireOptions::new().max_hold(ms(10_000));
    let leased = AcquireOptions::new().lease(Duration::from_secs(40));
    for (options, asked) in [
        (options(), limited.clone()),
        (options(), limited.lease(Duration::from_secs(40))),
        (options().max_hold(ms(10_000)), AcquireOptions::new()),
        (options().max_hold(ms(10_000)), leased),
    ] {
        let (lock, _clients) = fleet.lock(options).await;
        let guard = lock.try_lock_with(asked).await.unwrap();
        let guard = guard.expect("it is free");
        let remaining = guard.remaining();
        assert!(
            (ms(2_000)..=ms(5_000)).contains(&remaining),
            "{remaining:?}"
        );
        guard.unlock().await.unwrap();
        fleet.is_free().await;
    }
}

/// A server that an extension acquires is held up to the limit of the whole hold: with a limit of
/// its own, a majority of such servers would be renewed beyond it.
#[tokio::test]
async fn a_rejoined_server_ends_at_the_maximum_hold_time() {
    let fleet = Fleet::new(3);
    let options = patient().recreate_on_extend(true).max_hold(ms(30_000));
    let (lock, _clients) = fleet.lock(options).await;
    let guard = lock.try_lock().await.unwrap().unwrap();
    eventually("2 s have passed", || async {
        fleet.servers[0].pttl("l") <= 28_000
    })
    .await;
    fleet.servers[2].call(&["DEL", "l"]);
    guard.extend(ms(1_000)).await.unwrap();
    let ttl = fleet.servers[2].pttl("l");
    assert!((1..=28_500).contains(&ttl), "{ttl} ms");
    guard.unlock().await.unwrap();
}

/// An extension beyond the maximum hold time is as long on a server that it acquires as on the
/// others: a shorter one would end the lock that it has promised.
#[tokio::test]
async fn an_extension_beyond_the_limit_is_whole_where_it_rejoins() {
    let fleet = Fleet::new(3);
    let options = patient().recreate_on_extend(true).max_hold(ms(20_000));
    let (lock, _clients) = fleet.lock(options).await;
    let leased = AcquireOptions::new().lease(Duration::from_secs(40));
    for asked in [AcquireOptions::new(), leased] {
        let guard = lock.try_lock_with(asked).await.unwrap().unwrap();
        fleet.servers[2].call(&["DEL", "l"]);
        guard.extend(Duration::from_secs(90)).await.unwrap();
        let ttls: Vec<_> = fleet
            .servers
            .iter()
            .map(|server| server.pttl("l"))
            .collect();
        assert!(ttls.iter().all(|ttl| *ttl > 80_000), "{ttls:?}");
        guard.unlock().await.unwrap();
        fleet.is_free().await;
    }
}

/// A lost quorum is not handed over: its members would be renewed without a holder.
#[tokio::test]
async fn a_quorum_that_was_lost_is_not_handed_over() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.servers[2].call(&["DEL", "l"]);
    assert!(matches!(
        guard.extend(Duration::from_secs(60)).await,
        Err(Error::Lost { .. })
    ));
    let owner = guard.leave_to_lease();
    fleet.is_free().await;
    assert!(matches!(
        lock.release(&owner).await,
        Err(Error::NotHeld { .. })
    ));
}

/// A server that an extension acquired is handed over with the others.
#[tokio::test]
async fn servers_that_were_acquired_again_are_handed_over_too() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient().recreate_on_extend(true)).await;
    let (other, _others) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    let value = guard.owner().to_string();
    fleet.servers[0].call(&["DEL", "l"]);
    guard.extend(Duration::from_secs(60)).await.unwrap();
    let owner = guard.leave_to_lease();
    assert_eq!(fleet.values(), vec![Some(value); 3]);
    other
        .release(&OwnerId::from_value(owner.as_str()).unwrap())
        .await
        .unwrap();
    assert_eq!(fleet.values(), vec![None; 3]);
}

/// A quorum that was released by its owner's name is not called lost.
#[tokio::test]
async fn a_quorum_released_by_its_owners_name_is_not_called_lost() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    lock.release(&guard.owner()).await.unwrap();
    let ended = guard.lost().now_or_never();
    assert!(matches!(ended, Some(Error::NotHeld { .. })), "{ended:?}");
    assert!(guard.is_lost());
    assert!(matches!(guard.unlock().await, Err(Error::NotHeld { .. })));
    fleet.is_free().await;
}

/// Issue 10, A2: without a limit to the wait, a busy lock does not end it. A lock for which most
/// servers do not reply does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_without_a_limit_is_not_ended_by_the_tries() {
    let fleet = Fleet::new(3);
    let pauses = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&pauses);
    let options = patient().tries(2).retry_delay_of(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        ms(1)
    });
    let (lock, _clients) = fleet.lock(options).await;
    for bounded in [false, true] {
        (0..3).for_each(|at| fleet.take(at, "theirs"));
        pauses.store(0, Ordering::SeqCst);
        let waiting = lock.clone();
        let waiter = tokio::spawn(async move {
            if bounded {
                waiting.try_lock_for(Duration::MAX).await
            } else {
                waiting.lock().await.map(Some)
            }
        });
        eventually("more rounds than tries", || async {
            pauses.load(Ordering::SeqCst) > 4 || waiter.is_finished()
        })
        .await;
        for server in &fleet.servers {
            server.call(&["DEL", "l"]);
        }
        let guard = waiter
            .await
            .unwrap()
            .unwrap()
            .expect("it waits until it is free");
        guard.unlock().await.unwrap();
    }
    fleet.servers[0].kill();
    fleet.servers[1].kill();
    pauses.store(0, Ordering::SeqCst);
    let refused = lock.lock().await.map(drop);
    assert!(
        matches!(refused, Err(Error::NoQuorum { .. })),
        "{refused:?}"
    );
    assert_eq!(pauses.load(Ordering::SeqCst), 1, "two rounds");
}

/// Issue 10, E31: no pause follows the last round, and a pause beyond the range of the clock lasts
/// as long as the wait.
#[tokio::test]
async fn a_pause_beyond_the_clock_is_one_that_the_wait_ends() {
    let fleet = Fleet::new(1);
    let clients = fleet.clients().await;
    fleet.take(0, "theirs");
    let new = || patient().tries(3);
    for options in [
        new().retry_delay_of(|_| Duration::MAX),
        new().retry_delay(Duration::MAX, Duration::MAX),
        new().retry_delay(ms(1000), Duration::MAX),
        new().expiry(Duration::from_secs(10 * 365 * 24 * 3600)),
    ] {
        let lock = LockClient::red_lock(&clients, "l", options).unwrap();
        assert!(lock.try_lock().await.unwrap().is_none());
        let start = Instant::now();
        assert!(lock.try_lock_for(ms(100)).await.unwrap().is_none());
        assert!(
            start.elapsed() >= ms(100) && start.elapsed() < Duration::from_secs(10),
            "{:?}",
            start.elapsed()
        );
        let endless = lock.try_lock_for(Duration::MAX).now_or_never();
        assert!(endless.is_none(), "{endless:?}");
    }
}

/// Issue 10, A2: a server that counts twice could be a majority by itself.
#[tokio::test]
async fn two_clients_of_one_server_are_refused() {
    let (one, two) = (Server::start(), Server::start());
    let proxy = Proxy::start(&one);
    let a = one.client().await;
    let same = [
        one.client().await,
        LockClient::connect(proxy.url()).await.unwrap(),
        LockClient::connect(format!("redis://{}/1", one.addr()))
            .await
            .unwrap(),
    ];
    let other = two.client().await;
    let lock = |client: &LockClient, name: &str| client.reentrant_lock(name).unwrap();
    for b in same.iter().chain([&a]) {
        for refused in [
            LockClient::red_lock([&a, &other, b], "l", patient()),
            a.red_lock_over([lock(&other, "l"), lock(b, "l"), lock(&a, "l")], patient()),
        ] {
            let Err(Error::InvalidConfig { reason, .. }) = &refused else {
                panic!("{refused:?}")
            };
            assert!(
                reason.contains(a.address()) && reason.contains(b.address()),
                "{reason}"
            );
        }
        // Locks of two names are two locks.
        a.red_lock_over([lock(&a, "l"), lock(b, "m")], patient())
            .unwrap();
    }
    LockClient::red_lock([&a, &other], "l", patient()).unwrap();
    a.red_lock_over([lock(&a, "l"), lock(&other, "l")], patient())
        .unwrap();
}

/// A lazy client knows its server only after its first use.
#[tokio::test]
async fn lazy_clients_of_one_server_are_refused_when_used() {
    let (one, two) = (Server::start(), Server::start());
    let proxy = Proxy::start(&one);
    let [a, b, other] =
        [one.url(), proxy.url(), two.url()].map(|url| LockClient::connect_lazy(url).unwrap());
    // A quorum of two needs both replies.
    let both = LockClient::red_lock([&a, &b], "both", patient()).unwrap();
    let all = LockClient::red_lock([&a, &b, &other], "all", patient()).unwrap();
    for lock in [&both, &all, &all] {
        let refused = lock.lock().await;
        let Err(Error::InvalidConfig { reason, .. }) = &refused else {
            panic!("{refused:?}")
        };
        assert!(
            reason.contains(a.address()) && reason.contains(b.address()),
            "{reason}"
        );
        let is_free = || async {
            [&one, &two]
                .iter()
                .all(|server| !server.exists(lock.name()))
        };
        eventually("nothing is held", is_free).await;
    }
}

#[tokio::test]
async fn lazy_clients_are_a_quorum_where_one_server_is_away() {
    let servers = [Server::start(), Server::start(), Server::start_real()];
    servers[2].kill();
    let clients = [0, 1, 2].map(|at: usize| LockClient::connect_lazy(servers[at].url()).unwrap());
    let lock = LockClient::red_lock(&clients, "l", patient()).unwrap();
    let guard = lock.lock().await.unwrap();
    assert_eq!(
        servers[..2]
            .iter()
            .filter(|server| server.exists("l"))
            .count(),
        2
    );
    assert!(lock.try_lock().await.unwrap().is_none());
    guard.unlock().await.unwrap();
    servers[2].restart();
    clients[2].ready().await.unwrap();
    servers[0].kill();
    let guard = lock.lock().await.unwrap();
    assert_eq!(
        servers[1..]
            .iter()
            .filter(|server| server.exists("l"))
            .count(),
        2
    );
    guard.unlock().await.unwrap();
}

/// A user without INFO cannot learn the identity of its server. Such servers still form a quorum.
#[tokio::test]
async fn a_server_that_does_not_say_which_one_it_is_is_not_refused() {
    let server = Server::start_real();
    let commands = [
        "evalsha", "eval", "get", "set", "del", "pexpire", "pttl", "ping",
    ];
    set_user(&server, "locks", &commands, &["~*", "&*"]);
    let (a, b) = (
        log_in(&server, "locks", LockClient::builder()).await,
        log_in(&server, "locks", LockClient::builder()).await,
    );
    LockClient::red_lock([&a, &b], "l", patient()).unwrap();
    // One client is one server, whatever the server says.
    assert!(matches!(
        LockClient::red_lock([&a, &a], "l", patient()),
        Err(Error::InvalidConfig { .. })
    ));
}

/// The example `shutdown` does this at SIGTERM: every server gets the release before the process
/// ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r30_a_shutdown_of_the_clients_releases_a_quorum() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[2].kill();
    for client in &clients[..2] {
        client.shutdown().await.unwrap();
    }
    assert_eq!(
        fleet.servers[..2]
            .iter()
            .filter(|server| server.exists("l"))
            .count(),
        0
    );
    assert!(matches!(
        guard.lost().await,
        Error::Lost {
            reason: LossReason::ShutDown,
            ..
        }
    ));
    assert!(matches!(
        guard.unlock().await,
        Err(Error::Lost {
            reason: LossReason::ShutDown,
            ..
        })
    ));
    assert!(matches!(lock.lock().await, Err(Error::Closed)));
}

/// With an owner per acquire, an extension also acquires the server that has lost its data.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_per_acquire_rejoins_a_member() {
    let fleet = Fleet::new(3);
    let clients = fleet.clients().await;
    let lock = of_reentrant(&clients, patient().recreate_on_extend(true)).owner_per_acquire();
    let guard = lock.lock().await.unwrap();
    fleet.servers[2].call(&["DEL", "l"]);
    eventually("the third server is acquired again", || async {
        guard.extend(ms(60_000)).await.unwrap();
        fleet.servers[2].exists("l")
    })
    .await;
    guard.unlock().await.unwrap();
}
