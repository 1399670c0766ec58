//! Futures that have sent a request and are then no longer polled.

use std::{
    future::Future,
    net::{Ipv4Addr, TcpListener},
    pin::Pin,
    task::Poll,
    time::{Duration, Instant},
};

use nestlock::{
    AcquireOptions, Error, Lock, LockClient, LockGuard, OwnerId, RedLockOptions, Result,
};

use crate::support::{
    Server, eventually, poll_once,
    proxy::{Action, Proxy, Verb},
};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub type Parked<'a> = Pin<Box<dyn Future<Output = Result<LockGuard>> + Send + 'a>>;

/// Returns an acquire that was polled once and has sent its request. If the reply arrives within
/// that poll, the lock is released and another acquire is tried.
pub async fn park(lock: &Lock) -> Parked<'_> {
    loop {
        let mut future: Parked<'_> = Box::pin(lock.lock());
        let polled = poll_once(future.as_mut()).await;
        match polled {
            Poll::Pending => return future,
            Poll::Ready(guard) => guard.unwrap().unlock().await.unwrap(),
        }
    }
}

/// The owner locks of 1000 holds belong to futures that are not polled: the janitor must not wait
/// for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_guards_are_released_whatever_others_do_not_poll() {
    let server = Server::start();
    let (a, b) = (server.client().await, server.client().await);
    let locks: Vec<_> = (0..1000)
        .map(|n| a.reentrant_lock(format!("job:{n}")).unwrap())
        .collect();
    let mut parked = Vec::new();
    for lock in &locks {
        let guard = lock.lock().await.unwrap();
        drop(guard);
        parked.push(park(lock).await);
    }
    let other = a.reentrant_lock("other").unwrap();
    for _ in 0..3 {
        let guard = OwnerId::scope(other.lock()).await.unwrap();
        drop(guard);
        let there = b.reentrant_lock("other").unwrap();
        there
            .try_lock_for(Duration::from_secs(5))
            .await
            .unwrap()
            .expect("released")
            .unlock()
            .await
            .unwrap();
    }
    // a future that is polled again gets the lock
    let guard = parked.pop().unwrap().await.unwrap();
    assert!(!guard.is_lost());
    assert!(
        b.reentrant_lock("job:999")
            .unwrap()
            .try_lock()
            .await
            .unwrap()
            .is_none()
    );
}

/// The error of the try is the real cause (`Unconfirmed`), not the end of its lease.
#[tokio::test]
async fn a_try_that_was_not_polled_reports_it() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.command_timeout(ms(300)))
        .await;
    let lock = client.reentrant_lock("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap(); // the server knows the scripts
    let parked = loop {
        let mut tries =
            Box::pin(lock.try_lock_with(AcquireOptions::new().lease(Duration::from_secs(30))));
        if poll_once(tries.as_mut()).await.is_pending() {
            break tries;
        }
        eventually("it is free", || async { !server.exists("l") }).await;
    };
    eventually("it has the lock", || async { server.exists("l") }).await;
    eventually("it is given up", || async { !server.exists("l") }).await;
    let error = parked.await.unwrap_err();
    assert!(matches!(error, Error::Unconfirmed { .. }), "{error:?}");
    assert!(error.to_string().contains("not polled"), "{error}");
}

/// An acquire whose reply is not polled does not hold the lock for its whole lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_acquire_holds_no_longer_than_a_request_may_take() {
    let server = Server::start();
    let a = server
        .client_with(|builder| builder.command_timeout(ms(500)))
        .await;
    let b = server.client().await;
    let (here, there) = (
        a.reentrant_lock("l").unwrap(),
        b.reentrant_lock("l").unwrap(),
    );
    here.lock().await.unwrap().unlock().await.unwrap(); // the server knows the scripts
    let parked = park(&here).await;
    eventually("it was executed", || async { server.exists("l") }).await;
    // the lease is 30 s
    let guard = there
        .try_lock_for(Duration::from_secs(10))
        .await
        .unwrap()
        .expect("no task has a guard");
    // polled again, it waits like any other acquire
    let waiting = tokio::time::timeout(ms(300), parked).await;
    assert!(waiting.is_err(), "two guards: {waiting:?}");
    guard.unlock().await.unwrap();
    eventually("nothing is left", || async {
        a.stats().holds == 0 && !server.exists("l")
    })
    .await;
}

/// The owner acquires again, under another owner name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_of_a_call_that_is_not_polled_can_acquire_again() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.command_timeout(ms(500)))
        .await;
    let lock = client.reentrant_lock("l").unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let parked = park(&lock).await;
    let guard = lock
        .try_lock_for(Duration::from_secs(10))
        .await
        .unwrap()
        .expect("a second call of the same owner");
    assert_eq!(server.record("l"), [(guard.owner().to_string(), 1)]);
    drop(parked);
    client.idle().await;
    assert_eq!(
        server.record("l"),
        [(guard.owner().to_string(), 1)],
        "what the first one does comes to nothing"
    );
    guard.unlock().await.unwrap();
}

/// A queued waiter is woken and acquires the lock, but its reply is lost and it is not polled
/// again: an acquire in doubt does not count as a queue entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_waiter_let_in_unheard_holds_for_a_requests_time() {
    let server = Server::start();
    for kind in ["reentrant", "fair", "write"] {
        let proxy = Proxy::start(&server);
        let a = server.client().await;
        let b = LockClient::builder()
            .command_timeout(ms(500))
            .connect(proxy.url())
            .await
            .unwrap();
        let door = |client: &LockClient| match kind {
            "reentrant" => client.reentrant_lock("l").unwrap(),
            "fair" => client.fair_lock("f").unwrap(),
            _ => client.read_write_lock("w").unwrap().write_lock(),
        };
        let (here, there) = (door(&a), door(&b));
        let held = here.lock().await.unwrap();
        let mut parked = Box::pin(there.lock_with(AcquireOptions::new().lease(ms(30_000))));
        assert!(tokio::time::timeout(ms(400), &mut parked).await.is_err());
        let tries = proxy.count(Verb::Acquire);
        proxy.once(Verb::Acquire, Action::Lose);
        proxy.refuse();
        let ((), polled) = tokio::join!(
            async {
                held.unlock().await.unwrap();
                eventually("it has tried", || async {
                    proxy.count(Verb::Acquire) > tries
                })
                .await;
            },
            tokio::time::timeout(ms(1_200), &mut parked),
        );
        assert!(polled.is_err(), "{kind}: it learned of it: {polled:?}");
        proxy.heal();
        let guard = here.try_lock_for(ms(12_000)).await.unwrap();
        guard
            .unwrap_or_else(|| panic!("{kind}: it is held for a future that is not polled"))
            .unlock()
            .await
            .unwrap();
        drop(parked);
    }
}

/// Polls a future until `is_so`, which must be before it ends.
async fn poll_until<F: Future<Output: std::fmt::Debug>>(
    mut future: Pin<&mut F>,
    is_so: impl Fn() -> bool,
) {
    tokio::select! {
        output = future.as_mut() => panic!("it ended: {output:?}"),
        () = eventually("it has asked all members", || async { is_so() }) => {}
    }
}

/// A multi-lock of `a` and `b`, where the replies of `b` come through a proxy.
struct Multi {
    server: Server,
    proxy: Proxy,
    a: LockClient,
    b: LockClient,
    lock: Lock,
}

impl Multi {
    async fn new() -> Self {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let builder = || LockClient::builder().command_timeout(ms(500));
        let a = builder().connect(server.url()).await.unwrap();
        let b = builder().connect(proxy.url()).await.unwrap();
        // Locks of two clients cannot be acquired by one command.
        let members = [
            a.reentrant_lock("a").unwrap(),
            b.reentrant_lock("b").unwrap(),
        ];
        let lock = a.multi_lock(members).unwrap();
        lock.lock().await.unwrap().unlock().await.unwrap();
        Self {
            server,
            proxy,
            a,
            b,
            lock,
        }
    }

    fn is_recorded(&self) -> [bool; 2] {
        ["a", "b"].map(|name| self.server.exists(name))
    }

    async fn is_freed(&self) {
        eventually("no member is held", || async {
            self.is_recorded() == [false; 2] && self.a.stats().holds + self.b.stats().holds == 0
        })
        .await;
    }
}

/// A multi-lock has one member and waits for the reply of the other, when its future is no longer
/// polled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_multi_lock_holds_no_member_for_long() {
    let multi = Multi::new().await;
    multi.proxy.each(Verb::Acquire, Action::Held);
    let mut parked = Box::pin(multi.lock.lock());
    poll_until(parked.as_mut(), || multi.is_recorded() == [true; 2]).await;
    multi.is_freed().await;
    multi.proxy.let_go();

    // polled again, it waits like any other acquire
    let other = multi.server.client().await;
    let theirs = other.reentrant_lock("b").unwrap().lock().await.unwrap();
    let waiting = tokio::time::timeout(ms(300), &mut parked).await;
    assert!(waiting.is_err(), "two guards: {waiting:?}");
    theirs.unlock().await.unwrap();
    let guard = parked.await.unwrap();
    assert!(multi.is_recorded() == [true; 2] && !guard.is_lost());
    guard.unlock().await.unwrap();
    multi.is_freed().await;
}

/// Without time to start over, the error is the real cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_lock_that_was_not_polled_reports_it() {
    let multi = Multi::new().await;
    multi.proxy.each(Verb::Acquire, Action::Held);
    let mut parked = Box::pin(multi.lock.try_lock());
    poll_until(parked.as_mut(), || multi.is_recorded() == [true; 2]).await;
    multi.is_freed().await;
    multi.proxy.let_go();
    let error = parked.await.unwrap_err();
    assert!(matches!(error, Error::Unconfirmed { .. }), "{error:?}");
    assert!(error.to_string().contains("not polled"), "{error}");
}

/// A RedLock has two of three servers and waits for the third, when its future is no longer polled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_red_lock_holds_no_majority_for_long() {
    let servers = [Server::start(), Server::start(), Server::start()];
    let proxy = Proxy::start(&servers[2]);
    let urls = [servers[0].url(), servers[1].url(), proxy.url()];
    let mut clients = Vec::new();
    for url in urls {
        let builder = LockClient::builder().command_timeout(ms(500));
        clients.push(builder.connect(url).await.unwrap());
    }
    // a round waits for 5 s
    let options = || RedLockOptions::new().expiry(ms(10_000)).timeout_factor(0.5);
    let lock = LockClient::red_lock(&clients, "l", options()).unwrap();
    lock.lock().await.unwrap().unlock().await.unwrap();
    let holds = || servers.iter().filter(|server| server.exists("l")).count();
    eventually("it is free", || async { holds() == 0 }).await;

    proxy.each(Verb::Acquire, Action::Held);
    let mut parked = Box::pin(lock.lock());
    poll_until(parked.as_mut(), || holds() == 3).await;
    eventually("no server records it", || async { holds() == 0 }).await;
    proxy.let_go();

    // polled again, it waits like any other acquire
    let mut others = Vec::new();
    for server in &servers {
        others.push(server.client().await);
    }
    let there = LockClient::red_lock(&others, "l", options()).unwrap();
    let theirs = there.lock().await.unwrap();
    let waiting = tokio::time::timeout(ms(300), &mut parked).await;
    assert!(waiting.is_err(), "two guards: {waiting:?}");
    theirs.unlock().await.unwrap();
    parked.await.unwrap().unlock().await.unwrap();
}

/// A server that is connected to and never answers, and a multi-lock of `a`, which is acquired
/// first, and a lock there.
struct Mute {
    server: Server,
    lock: Lock,
    _listener: TcpListener,
}

impl Mute {
    async fn new(command_timeout: Duration, connect_timeout: Duration) -> Self {
        let server = Server::start();
        let a = server
            .client_with(|builder| builder.command_timeout(command_timeout))
            .await;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let b = LockClient::builder()
            .connect_timeout(connect_timeout)
            .connect_lazy(format!("redis://{}", listener.local_addr().unwrap()))
            .unwrap();
        let members = [
            a.reentrant_lock("a").unwrap(),
            b.reentrant_lock("b").unwrap(),
        ];
        Self {
            server,
            lock: a.multi_lock(members).unwrap(),
            _listener: listener,
        }
    }
}

/// The time without polls counts from the last poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_lock_keeps_its_members_for_a_requests_time() {
    // it is given up 4 s after the last poll
    let mute = Mute::new(ms(3_000), ms(60_000)).await;
    let mut parked = Box::pin(mute.lock.lock());
    let polled = tokio::time::timeout(ms(1_900), &mut parked).await;
    assert!(polled.is_err(), "{polled:?}");
    tokio::time::sleep(ms(2_700)).await;
    assert!(mute.server.exists("a"), "it is given up already");
    eventually("it is given up", || async { !mute.server.exists("a") }).await;
}

/// The release of a lock with many members is polled once: it has begun for each of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_release_keeps_none_of_many_members() {
    let servers = [Server::start(), Server::start()];
    let proxy = Proxy::start(&servers[1]);
    let builder = || LockClient::builder().command_timeout(ms(500));
    let clients = [
        builder().connect(servers[0].url()).await.unwrap(),
        builder().connect(proxy.url()).await.unwrap(),
    ];
    let members = || {
        let names = (0..40).map(|n| (&clients[n % 2], format!("{n}")));
        let members = names.map(|(client, name)| client.reentrant_lock(name).unwrap());
        members.collect::<Vec<_>>()
    };
    let red = clients[0]
        .red_lock_over(members(), RedLockOptions::new())
        .unwrap();
    for lock in [clients[0].multi_lock(members()).unwrap(), red] {
        let guard = lock.lock().await.unwrap();
        proxy.rule(|request| {
            if request.is_script() {
                Action::Late(ms(300))
            } else {
                Action::Pass
            }
        });
        let mut parked = Box::pin(guard.unlock());
        assert!(poll_once(parked.as_mut()).await.is_pending());
        proxy.pass();
        eventually("no member is held", || async {
            servers.iter().all(|server| server.dump().is_empty())
        })
        .await;
        drop(parked);
    }
}

/// A multi-lock waits for a server that does not answer, much longer than a request may take, and
/// nothing else wakes its future: it is polled, so it keeps its first member.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_lock_that_waits_for_a_mute_server_is_polled() {
    // an unpolled one would be given up after 1.1 s
    let mute = Mute::new(ms(100), ms(3_000)).await;
    let start = Instant::now();
    let error = mute.lock.try_lock().await.unwrap_err();
    assert!(start.elapsed() > ms(1_500), "{:?}", start.elapsed());
    assert!(matches!(error, Error::Connect { .. }), "{error:?}");
}
