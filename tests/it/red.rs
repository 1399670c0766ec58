//! The RedLock: one lock over independent servers, some of which are dead, hang, or forget.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{
    AcquireOptions, Error, LockClient, LockGuard, LossReason, NodeSaid, OwnerId, RLock, RedLock, RedLockOptions,
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{
    cancel::poll_times,
    contract::contract_suite,
    support::{Server, eventually, wire::Reply},
};

contract_suite! {
    mod contract,
    door = |client, name| {
        let members = [name.to_owned(), format!("{name}:2"), format!("{name}:3")];
        let members = members.map(|name| std::sync::Arc::new(client.reentrant_lock(name).unwrap()) as _);
        // leases of these tests are short: a round limit of a twentieth would be a few milliseconds
        let options = nestlock::RedLockOptions::new().expiry(std::time::Duration::from_secs(30)).timeout_factor(0.9);
        std::sync::Arc::new(nestlock::RedLock::over_members(client, members, options).unwrap())
    },
    one_record = false,
    listens = false,
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Independent servers, and clients of each.
struct Fleet {
    servers: Vec<Server>,
}

impl Fleet {
    fn new(servers: usize) -> Self {
        Self { servers: (0..servers).map(|_| Server::start()).collect() }
    }

    async fn clients(&self) -> Vec<LockClient> {
        let mut clients = Vec::new();
        for server in &self.servers {
            clients.push(server.client().await);
        }
        clients
    }

    /// A RedLock with clients of its own, and these.
    async fn lock(&self, options: RedLockOptions) -> (RedLock, Vec<LockClient>) {
        let clients = self.clients().await;
        (RedLock::over_servers(&clients, "l", options).unwrap(), clients)
    }

    /// What each server records.
    fn values(&self) -> Vec<Option<String>> {
        let value = |server: &Server| match server.call(&["GET", "l"]) {
            Reply::Nil => None,
            reply => Some(reply.text().to_owned()),
        };
        self.servers.iter().map(value).collect()
    }

    /// Another process holds it there: `SET NX PX`, as all libraries do.
    fn take(&self, at: usize, value: &str) {
        assert!(!self.servers[at].call(&["SET", "l", value, "NX", "PX", "60000"]).is_error());
    }

    async fn is_free(&self) {
        eventually("no record is left", || async { self.values().iter().all(Option::is_none) }).await;
    }
}

/// A round limit that a busy machine keeps.
fn patient() -> RedLockOptions {
    RedLockOptions::new().expiry(Duration::from_secs(40))
}

fn limit(options_expiry: Duration) -> Duration {
    options_expiry / 20
}

#[tokio::test]
async fn one_random_value_is_on_every_server_and_gone_after_the_release() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let guard = lock.lock().await.unwrap();
        let value = guard.owner().to_string();
        assert_eq!(fleet.values(), vec![Some(value.clone()); 3]);
        assert!(fleet.servers.iter().all(|server| (30_000..=40_000).contains(&server.pttl("l"))));
        assert!(value.len() >= 22 && !seen.contains(&value), "{value}");
        seen.push(value);
        assert!(guard.until() > Instant::now() + ms(30_000) && guard.remaining() < ms(40_000));
        assert_eq!((lock.is_locked().await.unwrap(), lock.holder().await.unwrap()), (true, Some(guard.owner())));
        assert_eq!(lock.hold_count(&guard.owner()).await.unwrap(), 1);
        assert!(lock.remaining_lease().await.unwrap().unwrap() > ms(30_000));
        guard.unlock().await.unwrap();
        assert_eq!(fleet.values(), vec![None; 3]);
        assert_eq!((lock.is_locked().await.unwrap(), lock.holder().await.unwrap()), (false, None));
        assert_eq!(lock.remaining_lease().await.unwrap(), None);
    }
}

/// N1: what was acquired of a minority is given back before the answer.
#[tokio::test]
async fn n1_a_busy_majority_answers_none_and_leaves_nothing() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    fleet.take(0, "theirs");
    fleet.take(2, "theirs");
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(fleet.values()[1], None);
    assert!(lock.is_locked().await.unwrap());
    assert_eq!(lock.holder().await.unwrap().unwrap().as_str(), "theirs");
    // a busy minority is in nobody's way
    fleet.servers[0].call(&["DEL", "l"]);
    let guard = lock.try_lock().await.unwrap().expect("two of three");
    assert_eq!(guard.members().len(), 2);
    guard.unlock().await.unwrap();
    assert_eq!(fleet.values(), [None, None, Some("theirs".into())]);
}

/// N14: each of two holders has half of the servers; neither waits for ever.
#[tokio::test]
async fn n14_split_votes_of_even_numbers_decide() {
    for servers in [2, 4] {
        let fleet = Fleet::new(servers);
        let (lock, _clients) = fleet.lock(patient().tries(2)).await;
        (0..servers / 2).for_each(|at| fleet.take(at, "theirs"));
        assert!(lock.try_lock_for(Duration::from_secs(30)).await.unwrap().is_none());
        assert!(fleet.values()[servers / 2..].iter().all(Option::is_none));
        // one more, and it is a majority
        fleet.servers[0].call(&["DEL", "l"]);
        lock.try_lock().await.unwrap().expect("more than a half").unlock().await.unwrap();
    }
    let fleet = Fleet::new(1);
    let (lock, _clients) = fleet.lock(patient()).await;
    lock.lock().await.unwrap().unlock().await.unwrap();
}

/// S3, R82, L6: a server that hangs costs the round limit, when acquiring and when releasing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_l6_r82_a_minority_that_hangs_costs_no_more_than_the_round_limit() {
    for servers in [3, 5] {
        let fleet = Fleet::new(servers);
        let (lock, clients) = fleet.lock(patient()).await;
        lock.lock().await.unwrap().unlock().await.unwrap();
        let most = limit(ms(40_000)).mul_f64(1.2);
        (0..servers / 2).for_each(|at| fleet.servers[at].stop());
        let start = Instant::now();
        let guard = lock.try_lock().await.unwrap().expect("a majority");
        let acquired = start.elapsed();
        assert!(acquired <= most, "acquired within {acquired:?}, not {most:?}");
        assert_eq!(guard.members().len(), servers - servers / 2);
        let start = Instant::now();
        guard.unlock().await.unwrap();
        let released = start.elapsed();
        assert!(released <= most, "released within {released:?}, not {most:?}");
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

/// A server that hangs while the lock is held, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s3_a_server_that_hangs_later_costs_the_release_no_more_than_the_round_limit() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[1].stop();
    let start = Instant::now();
    guard.unlock().await.unwrap();
    assert!(start.elapsed() <= limit(ms(40_000)).mul_f64(1.2), "{:?}", start.elapsed());
    assert_eq!(fleet.servers[0].call(&["GET", "l"]), Reply::Nil);
    fleet.servers[1].cont();
    fleet.is_free().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_minority_costs_nothing_and_a_dead_majority_is_an_error_that_names_each() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient()).await;
    fleet.servers[0].kill();
    let guard = lock.try_lock().await.unwrap();
    // the first request may be the one that finds the connection broken
    let guard = guard.expect("two of three");
    assert_eq!(guard.members().len(), 2);
    guard.unlock().await.unwrap();
    fleet.servers[1].kill();
    let error = lock.try_lock().await.unwrap_err();
    let Error::NoQuorum { needed: 2, nodes, .. } = &error else { panic!("{error}") };
    assert_eq!(nodes.len(), 3);
    for (node, server) in nodes.iter().zip(&fleet.servers) {
        assert_eq!(node.node, server.addr().to_string());
    }
    assert!(matches!(nodes[2].said, NodeSaid::Agreed), "{error}");
    assert!(!matches!(nodes[0].said, NodeSaid::Agreed | NodeSaid::Busy), "{error}");
    let text = error.to_string();
    assert!(text.contains("\"l\"") && text.contains(&nodes[0].node) && text.contains("agreed"), "{text}");
    // the one that agreed has nothing left
    assert_eq!(fleet.servers[2].call(&["GET", "l"]), Reply::Nil);
    assert!(lock.is_locked().await.is_err() && lock.force_unlock().await.is_err());
    assert!(lock.release(&OwnerId::from_value("v").unwrap()).await.is_err());
}

/// S4, S14: it goes on until the wait or the tries are over, and says so.
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
    // busy: four rounds, and none without a wait
    assert!(lock.try_lock_for(Duration::from_secs(60)).await.unwrap().is_none());
    assert_eq!(*asked.lock().unwrap(), [1, 2, 3, 4]);
    asked.lock().unwrap().clear();
    assert!(lock.try_lock().await.unwrap().is_none());
    assert_eq!(*asked.lock().unwrap(), [1]);
    // the wait ends it earlier
    let endless = RedLock::over_servers(&clients, "l", patient().tries(u32::MAX)).unwrap();
    let start = Instant::now();
    assert!(endless.try_lock_for(ms(400)).await.unwrap().is_none());
    assert!(start.elapsed() >= ms(400) && start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // freed meanwhile: it gets it
    let waiter = tokio::spawn(async move { endless.lock().await });
    tokio::task::yield_now().await;
    for server in &fleet.servers {
        server.call(&["DEL", "l"]);
    }
    waiter.await.unwrap().unwrap().unlock().await.unwrap();
    // errors, too, are tried again, and the last one is told
    fleet.servers[0].kill();
    fleet.servers[1].kill();
    asked.lock().unwrap().clear();
    let error = lock.try_lock_for(Duration::from_secs(60)).await.unwrap_err();
    assert!(matches!(error, Error::NoQuorum { .. }), "{error}");
    assert_eq!(*asked.lock().unwrap(), [1, 2, 3, 4]);
}

/// S5, L3: an extension or renewal that fails releases nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s5_l3_an_extension_that_fails_releases_nothing() {
    let fleet = Fleet::new(3);
    let options = RedLockOptions::new().expiry(Duration::from_secs(20)).timeout_factor(0.02);
    let (lock, _clients) = fleet.lock(options).await;
    let lease = AcquireOptions::new().lease(Duration::from_secs(20));
    let guard = lock.acquire(lease).await.unwrap().unwrap();
    let value = guard.owner();
    fleet.servers[0].stop();
    guard.extend(Duration::from_secs(60)).await.unwrap();
    assert!(fleet.servers[1].pttl("l") > 50_000 && fleet.servers[2].pttl("l") > 50_000);
    assert!(guard.remaining() > Duration::from_secs(50));
    assert!(lock.extend(&value, Duration::from_secs(90)).await.unwrap());
    // a majority that says nothing: an error, and all as before
    fleet.servers[1].stop();
    let error = guard.extend(Duration::from_secs(600)).await.unwrap_err();
    assert!(matches!(error, Error::NoQuorum { .. }), "{error}");
    assert!(!guard.is_lost() && guard.remaining() > Duration::from_secs(50));
    assert_eq!(fleet.servers[2].call(&["GET", "l"]).text(), value.as_str());
    fleet.servers[0].cont();
    fleet.servers[1].cont();
    assert!(fleet.values().iter().all(|found| found.as_deref() == Some(value.as_str())));
    guard.unlock().await.unwrap();
    fleet.is_free().await;
}

/// S6: a server that was restarted without its data is taken again; a lock that was lost is not made anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s6_a_restarted_member_rejoins_and_a_lost_quorum_stays_lost() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient().recreate_on_extend(true)).await;
    let plain = RedLock::over_servers(&clients, "l", patient()).unwrap();
    let lease = || AcquireOptions::new().lease(Duration::from_secs(40));
    for (lock, rejoins) in [(&plain, false), (&lock, true)] {
        let guard = lock.acquire(lease()).await.unwrap().unwrap();
        fleet.servers[0].call(&["DEL", "l"]);
        // the first finds it missing, the second takes it
        let _ = guard.extend(Duration::from_secs(40)).await;
        guard.extend(Duration::from_secs(50)).await.unwrap();
        assert_eq!(fleet.values()[0].is_some(), rejoins);
        // it is a member like any other: another one may go now
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
    // lost at once on two of three: reported, and nothing is written
    let guard = lock.acquire(lease()).await.unwrap().unwrap();
    fleet.servers[0].call(&["DEL", "l"]);
    fleet.servers[1].call(&["DEL", "l"]);
    assert!(matches!(guard.extend(Duration::from_secs(60)).await, Err(Error::Lost { .. })));
    let lost = tokio::time::timeout(Duration::from_secs(10), guard.lost()).await.expect("known at once");
    assert!(matches!(lost, Error::Lost { reason: LossReason::RecordMissing, .. }), "{lost}");
    assert!(matches!(guard.extend(Duration::from_secs(60)).await, Err(Error::Lost { .. })));
    assert_eq!(fleet.values()[..2], [None, None]);
    drop(guard);
    fleet.is_free().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_renew_and_the_loss_of_a_majority_is_told() {
    let fleet = Fleet::new(3);
    // a round limit of 850 ms
    let (lock, clients) = fleet.lock(RedLockOptions::new().expiry(ms(2500)).timeout_factor(0.34)).await;
    let guard = lock.lock().await.unwrap();
    let start = Instant::now();
    fleet.servers[2].call(&["DEL", "l"]);
    while start.elapsed() < ms(6000) {
        assert!(!guard.is_lost() && fleet.servers[0].pttl("l") > 0, "after {:?}", start.elapsed());
        tokio::time::sleep(ms(20)).await;
    }
    assert!(guard.remaining() <= ms(2500));
    fleet.servers[0].call(&["SET", "l", "theirs"]);
    let lost = tokio::time::timeout(Duration::from_secs(10), guard.lost()).await.expect("it is noticed");
    assert!(matches!(lost, Error::Lost { .. }), "{lost}");
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
    assert_eq!(fleet.values(), [Some("theirs".into()), None, None]);
    fleet.servers[0].call(&["DEL", "l"]);
    // a limit to the renewals
    let capped = RedLock::over_servers(&clients, "l", RedLockOptions::new().expiry(ms(1500)).max_renewals(1)).unwrap();
    let guard = loop {
        // a round limit of 75 ms
        match capped.try_lock().await {
            Ok(Some(guard)) => break guard,
            other => drop(other),
        }
    };
    let start = Instant::now();
    tokio::time::timeout(Duration::from_secs(10), guard.lost()).await.expect("it ends");
    assert!(start.elapsed() > ms(1600), "{:?}", start.elapsed());
}

/// S2: what remains never grows but by a renewal, and an explicit lease ends by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s2_an_explicit_lease_takes_the_place_of_the_expiry() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(RedLockOptions::new().timeout_factor(0.9)).await;
    let guard = lock.acquire(AcquireOptions::new().lease(ms(1500))).await.unwrap().unwrap();
    let mut before = ms(1485);
    while !guard.is_lost() {
        let remaining = guard.remaining();
        assert!(remaining <= before, "{remaining:?} after {before:?}");
        before = remaining;
        tokio::time::sleep(ms(5)).await;
    }
    assert!(guard.until() <= Instant::now());
    assert!(matches!(guard.unlock().await, Err(Error::Lost { reason: LossReason::LeaseExpired, .. })));
    fleet.is_free().await;
    // more drift: less to rely on
    let (lock, _clients) = fleet.lock(patient().drift_factor(0.5)).await;
    let guard = lock.lock().await.unwrap();
    assert!(guard.remaining() < ms(20_000) && guard.remaining() > ms(15_000), "{:?}", guard.remaining());
    guard.unlock().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fail_fast_does_not_wait_for_a_server_that_hangs() {
    let fleet = Fleet::new(3);
    let (lock, _clients) = fleet.lock(patient().fail_fast(true).shuffle(true)).await;
    fleet.servers[0].stop();
    let start = Instant::now();
    let guard = lock.try_lock().await.unwrap().expect("a majority");
    assert!(start.elapsed() < limit(ms(40_000)) / 2, "{:?}", start.elapsed());
    assert_eq!(guard.members().len(), 2);
    guard.unlock().await.unwrap();
    fleet.take(1, "theirs");
    fleet.take(2, "theirs");
    let start = Instant::now();
    assert!(lock.try_lock().await.unwrap().is_none());
    assert!(start.elapsed() < limit(ms(40_000)) / 2, "{:?}", start.elapsed());
    fleet.servers[0].cont();
    eventually("the one that hung has nothing", || async { fleet.values()[0].is_none() }).await;
}

/// A value that another process knows: it extends and releases what this one holds.
#[tokio::test]
async fn a_value_is_handed_over() {
    let fleet = Fleet::new(3);
    let clients = fleet.clients().await;
    let (other, _others) = fleet.lock(patient()).await;
    let made = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&made);
    let generator = move || format!("made-{}", count.fetch_add(1, Ordering::SeqCst));
    for (options, value) in [(patient().value("fixed"), "fixed"), (patient().value_generator(generator), "made-0")] {
        let lock = RedLock::over_servers(&clients, "l", options).unwrap();
        let guard = lock.lock().await.unwrap();
        assert_eq!(fleet.values(), vec![Some(value.to_owned()); 3]);
        let owner = guard.forget();
        assert_eq!(owner.as_str(), value);
        assert!(other.try_lock().await.unwrap().is_none());
        let adopted = OwnerId::from_value(value).unwrap();
        assert!(other.extend(&adopted, Duration::from_secs(600)).await.unwrap());
        assert!(fleet.servers.iter().all(|server| server.pttl("l") > 500_000));
        assert!(!other.extend(&OwnerId::from_value("guess").unwrap(), Duration::from_secs(9)).await.unwrap());
        other.release(&adopted).await.unwrap();
        assert_eq!(fleet.values(), vec![None; 3]);
        assert!(matches!(other.release(&adopted).await, Err(Error::NotHeld { .. })));
    }
    assert_eq!(made.load(Ordering::SeqCst), 1);
    // one acquire may bring its own
    let guard = other.acquire(AcquireOptions::new().value("mine")).await.unwrap().unwrap();
    assert_eq!(fleet.values(), vec![Some("mine".to_owned()); 3]);
    assert!(other.force_unlock().await.unwrap());
    assert!(!other.force_unlock().await.unwrap());
    assert!(matches!(guard.unlock().await, Err(Error::Lost { .. })));
}

/// F32, L9: dropped at any poll, nothing stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f32_l9_a_cancelled_acquire_leaves_nothing_on_any_server() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient()).await;
    lock.lock().await.unwrap().unlock().await.unwrap();
    for polls in 1..12 {
        let polled = poll_times(lock.acquire(AcquireOptions::new().wait(ms(5000))), polls).await;
        drop(polled);
        for client in &clients {
            client.idle().await;
        }
        assert_eq!(fleet.values(), vec![None; 3], "after {polls} polls");
    }
    // a dropped guard, too
    drop(lock.lock().await.unwrap());
    fleet.is_free().await;
    for client in &clients {
        eventually("the books are empty", || async { client.stats().holds == 0 }).await;
    }
}

/// L4: the time that is left when the answers are there decides.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_r83_a_lease_that_is_over_before_the_answers_leaves_nothing() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient().drift_factor(0.5).timeout_factor(1.0)).await;
    let mut refused = 0;
    for _ in 0..200 {
        match lock.acquire(AcquireOptions::new().lease(ms(10))).await {
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

/// L5, N3: options at their edges are refused, or work.
#[tokio::test]
async fn l5_n3_options_that_make_no_sense_are_refused() {
    let fleet = Fleet::new(1);
    let clients = fleet.clients().await;
    let made = |options: RedLockOptions| RedLock::over_servers(&clients, "l", options);
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
    assert!(matches!(made(new().expiry(ms(9))), Err(Error::InvalidLease { .. })));
    assert!(matches!(RedLock::over_servers([], "l", new()), Err(Error::InvalidConfig { .. })));
    assert!(matches!(RedLock::over_servers(&clients, "", new()), Err(Error::InvalidName { .. })));
    assert!(matches!(RedLock::over_members(&clients[0], [], new()), Err(Error::InvalidConfig { .. })));
    let member = || Arc::new(clients[0].reentrant_lock("r").unwrap()) as Arc<dyn RLock>;
    let valued = RedLock::over_members(&clients[0], [member()], new().value("v"));
    assert!(matches!(valued, Err(Error::InvalidConfig { .. })));
    // no pause, one try, no drift
    let lock = made(patient().retry_delay(Duration::ZERO, Duration::ZERO).tries(1).drift_factor(0.0)).unwrap();
    let guard = lock.lock().await.unwrap();
    assert!(lock.try_lock_for(ms(10)).await.unwrap().is_none());
    guard.unlock().await.unwrap();
    assert!(!format!("{:?}", patient().value("secret")).contains("secret"));
}

type Door = fn(&LockClient) -> Arc<dyn RLock>;

/// R84: members of any kind, each on a server of its own; what all say is said as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r84_members_of_every_kind() {
    let fleet = Fleet::new(3);
    let clients = fleet.clients().await;
    let doors: [Door; 6] = [
        |client| Arc::new(client.reentrant_lock("reentrant").unwrap()),
        |client| Arc::new(client.fair_lock("fair").unwrap()),
        |client| Arc::new(client.fenced_lock("fenced").unwrap()),
        |client| Arc::new(client.read_write_lock("read-write").unwrap().write()),
        |client| Arc::new(client.spin_lock("spin").unwrap()),
        |client| Arc::new(client.non_reentrant_lock("once").unwrap()),
    ];
    for (number, door) in doors.into_iter().enumerate() {
        let lock = RedLock::over_members(&clients[0], clients.iter().map(door), patient()).unwrap();
        let guard = lock.lock().await.unwrap();
        assert_eq!(guard.members().len(), 3);
        let again = lock.try_lock().await;
        if number == 5 {
            assert!(matches!(again, Err(Error::NotReentrant { .. })), "{again:?}");
        } else {
            again.unwrap().expect("it is reentrant").unlock().await.unwrap();
        }
        let rival = lock.clone();
        assert!(tokio::spawn(async move { rival.try_lock().await.unwrap().is_none() }).await.unwrap());
        guard.unlock().await.unwrap();
    }
    let (first, others) = clients.split_first().unwrap();
    let lock = RedLock::over_members(first, clients.iter().map(doors[0]), patient()).unwrap();
    let owner = first.owner("job").unwrap();
    // the other two do not know him
    assert!(matches!(lock.acquire(AcquireOptions::new().owner(owner)).await, Err(Error::InvalidOwner { .. })));
    for client in others {
        client.shutdown().await.unwrap();
    }
    assert!(matches!(lock.lock().await, Err(Error::Closed)));
}

/// The time in which a holder was sure of his lock.
type Interval = (Instant, Instant);

/// Servers of a RedLock are killed, stopped and restarted under its holders. They persist each write: nobody overlaps.
async fn storm(servers: usize, seed: u64) {
    const PERSIST: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];
    let fleet = Fleet { servers: (0..servers).map(|_| Server::start_with(&PERSIST)).collect() };
    let over = Arc::new(AtomicBool::new(false));
    let intervals: Arc<Mutex<Vec<Interval>>> = Arc::default();
    let failures = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for number in 0..4 {
        // a round limit of 200 ms
        let options = RedLockOptions::new().expiry(ms(2000)).timeout_factor(0.1).retry_delay(ms(1), ms(20));
        let (lock, clients) = fleet.lock(options).await;
        let (over, intervals, failures) = (Arc::clone(&over), Arc::clone(&intervals), Arc::clone(&failures));
        workers.push(tokio::spawn(async move {
            let mut rng = StdRng::seed_from_u64(seed + number);
            while !over.load(Ordering::SeqCst) {
                let guard: LockGuard = match lock.try_lock_for(ms(2000)).await {
                    Ok(Some(guard)) => guard,
                    Ok(None) => continue,
                    Err(Error::NoQuorum { .. } | Error::Unconfirmed { .. } | Error::Lost { .. }) => {
                        failures.fetch_add(1, Ordering::SeqCst);
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                // some hold longer than a TTL: members renew
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
    let overlaps = intervals.windows(2).filter(|pair| pair[0].1 >= pair[1].0).count();
    println!("{servers} servers: {} holds, {overlaps} overlaps, {failures:?} failed acquires", intervals.len());
    assert_eq!(overlaps, 0);
    assert!(intervals.len() > 50, "{} holds", intervals.len());
    for client in &clients {
        client.idle().await;
    }
    fleet.is_free().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_overlaps_while_three_servers_are_killed_stopped_and_restarted() {
    storm(3, 0x5eed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_overlaps_while_five_servers_are_killed_stopped_and_restarted() {
    storm(5, 0xfeed).await;
}

/// What the example `shutdown` does at SIGTERM: every server is told before the process ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r30_a_shutdown_of_the_clients_releases_a_quorum() {
    let fleet = Fleet::new(3);
    let (lock, clients) = fleet.lock(patient()).await;
    let guard = lock.lock().await.unwrap();
    fleet.servers[2].kill();
    for client in &clients[..2] {
        client.shutdown().await.unwrap();
    }
    assert_eq!(fleet.servers[..2].iter().filter(|server| server.exists("l")).count(), 0);
    assert!(matches!(guard.lost().await, Error::Lost { reason: LossReason::ShutDown, .. }));
    assert!(matches!(guard.unlock().await, Err(Error::Lost { reason: LossReason::ShutDown, .. })));
    assert!(matches!(lock.lock().await, Err(Error::Closed)));
}
