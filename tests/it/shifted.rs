//! A faulty middlebox: it swallows, duplicates or swaps one reply, and keeps the connection open.
//! Each later reply would then be taken for that of another request.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{FutureExt, future::join_all};
use nestlock::{LockClient, LockClientBuilder, LockGuard, Tuning};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::{
    Server, WIRES,
    proxy::{Action, Proxy, Request},
    within,
};

pub(crate) const LIES: [Action; 3] = [Action::Swallow, Action::Double, Action::Swap];
const THEIRS: usize = 20;
const TIMEOUT: Duration = Duration::from_millis(500);

/// Acquires the locks that another client holds throughout the test.
pub(crate) async fn theirs(direct: &LockClient, name: impl Fn(String) -> String) -> Vec<LockGuard> {
    let locks = (0..THEIRS).map(|n| direct.mutex(name(format!("theirs:{n}"))).unwrap());
    join_all(locks.map(|lock| async move { lock.lock().await.unwrap() })).await
}

/// Runs tasks of a client that try free locks and `theirs` for `time`, and returns the number of
/// acquires. Fails if the client acquires one of `theirs`.
pub(crate) async fn work(
    client: &LockClient,
    name: impl Fn(String) -> String + Clone,
    time: Duration,
) -> u32 {
    let (acquired, stolen) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let began = Instant::now();
    let tasks = (0..8).map(|task| {
        let (acquired, stolen, name) = (Arc::clone(&acquired), Arc::clone(&stolen), name.clone());
        async move {
            for n in 0.. {
                if began.elapsed() >= time {
                    return;
                }
                let is_theirs = n % 2 == 0;
                let what = if is_theirs {
                    format!("theirs:{}", n % THEIRS)
                } else {
                    format!("free:{task}")
                };
                if let Ok(Some(guard)) = client.mutex(name(what)).unwrap().try_lock().await {
                    let count = if is_theirs { &stolen } else { &acquired };
                    count.fetch_add(1, Ordering::Relaxed);
                    let _ = guard.unlock().await;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    });
    join_all(tasks).await;
    assert_eq!(
        stolen.load(Ordering::Relaxed),
        0,
        "locks were acquired that another client holds"
    );
    acquired.load(Ordering::Relaxed)
}

/// Returns a rule that applies `action` to every 20th script.
pub(crate) fn now_and_then(action: Action) -> impl FnMut(&Request) -> Action + Send {
    let mut left = 20;
    move |request| {
        if request.is_script() {
            left -= 1;
            if left == 0 {
                left = 20;
                return action;
            }
        }
        Action::Pass
    }
}

/// Returns a rule that applies `action` to the first script.
fn first_script(action: Action) -> impl FnMut(&Request) -> Action + Send {
    let mut is_first = true;
    move |request| {
        if request.is_script() && std::mem::take(&mut is_first) {
            action
        } else {
            Action::Pass
        }
    }
}

pub(crate) async fn works_again(client: &LockClient, name: String) {
    within(Duration::from_secs(15), "it works again", || async {
        match client.mutex(name.clone()).unwrap().try_lock().await {
            Ok(Some(guard)) => guard.unlock().await.is_ok(),
            _ => false,
        }
    })
    .await;
}

pub(crate) fn builder(bundle: bool) -> LockClientBuilder {
    LockClient::builder()
        .command_timeout(TIMEOUT)
        .watchdog_timeout(4 * TIMEOUT)
        .tuning(Tuning {
            bundle,
            ..Tuning::default()
        })
}

/// F23: the client never takes the reply of one request for that of another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_reply_that_strays_gives_no_lock_to_two() {
    let server = Server::start();
    let (proxy, direct) = (Proxy::start(&server), server.client().await);
    let held = theirs(&direct, |name| name).await;
    for bundle in [false, true] {
        for lie in LIES {
            let client = builder(bundle).connect(proxy.url()).await.unwrap();
            works_again(&client, "warm".into()).await;
            proxy.rule(now_and_then(lie));
            let acquired = work(&client, |name| name, Duration::from_secs(2)).await;
            assert!(
                acquired > 0,
                "{lie:?}, bundle({bundle}): the client acquires nothing"
            );
            proxy.pass();
            works_again(&client, "warm".into()).await;
        }
    }
    assert!(held.iter().all(|guard| !guard.is_lost()));
}

/// Errors and other replies without a request id are not trusted until a later reply confirms its
/// own id.
#[tokio::test]
async fn an_error_that_strays_refuses_no_other_request() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = builder(false).connect(proxy.url()).await.unwrap();
    works_again(&client, "warm".into()).await;
    server.call(&["SET", "text", "t"]);
    // the first reply is swallowed, and the second one, an error, arrives in its place
    proxy.rule(first_script(Action::Swallow));
    let (free, text) = (
        client.reentrant_lock("free").unwrap(),
        client.reentrant_lock("text").unwrap(),
    );
    let (free, text) = tokio::join!(free.try_lock(), text.try_lock());
    for (name, told) in [
        ("free", free.map(|got| got.is_some())),
        ("text", text.map(|got| got.is_some())),
    ] {
        assert!(
            matches!(told, Err(nestlock::Error::Unconfirmed { .. })),
            "{name}: {told:?}"
        );
    }
    proxy.pass();
    works_again(&client, "free".into()).await;
}

/// Such an error is not trusted either where the confirming reply belongs to a request that is no
/// longer awaited.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_not_believed_next_to_a_call_not_polled() {
    for &wire in WIRES {
        let server = Server::start();
        let proxy = Proxy::start(&server);
        let client = builder(false)
            .tuning(Tuning {
                wire,
                ..Tuning::default()
            })
            .connect(proxy.url())
            .await
            .unwrap();
        works_again(&client, "warm".into()).await;
        server.call(&["SET", "text", "t"]);
        // `free` is acquired, but that reply comes behind the error for `text`
        proxy.rule(first_script(Action::Swap));
        let (free, text) = (
            client.reentrant_lock("free").unwrap(),
            client.reentrant_lock("text").unwrap(),
        );
        let (mut asked, mut other) = (Box::pin(free.try_lock()), Box::pin(text.try_lock()));
        assert!(asked.as_mut().now_or_never().is_none() && other.as_mut().now_or_never().is_none());
        let told = asked.await.map(|got| got.is_some());
        assert!(
            matches!(told, Err(nestlock::Error::Unconfirmed { .. })),
            "{wire:?}: {told:?}"
        );
        drop(other);
        proxy.pass();
        works_again(&client, "free".into()).await;
    }
}

/// A connection that sends pushes but no replies is closed like a silent one.
#[tokio::test]
async fn a_connection_that_only_pushes_is_given_up() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = builder(true)
        .watchdog_timeout(Duration::from_secs(30))
        .connect(proxy.url())
        .await
        .unwrap();
    let held = client.mutex("held").unwrap().lock().await.unwrap();
    proxy.only_push();
    works_again(&client, "other".into()).await;
    assert!(!held.is_lost());
    held.unlock().await.unwrap();
}

/// Any request of any connection may lose its reply, handshakes included: the client recovers, and
/// never acquires a lock that another client holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_reply_strays_the_client_works_again() {
    let server = Server::start();
    let (proxy, direct) = (Proxy::start(&server), server.client().await);
    let _held = theirs(&direct, |name| name).await;
    let seed = 20_261_126;
    println!("seed {seed}");
    for round in 0..24 {
        let mut random = StdRng::seed_from_u64(seed + round);
        let client = builder(round % 2 == 0).connect(proxy.url()).await.unwrap();
        works_again(&client, "warm".into()).await;
        let signal = client.signal_lock("s").unwrap();
        let waits =
            tokio::spawn(
                async move { signal.try_lock_for(Duration::from_secs(1)).await.map(drop) },
            );
        proxy.rule(move |_| {
            if random.random_bool(0.05) {
                LIES[random.random_range(0..3)]
            } else {
                Action::Pass
            }
        });
        if round % 3 == 0 {
            // forces handshakes, which may also be hit
            proxy.cut();
        }
        work(&client, |name| name, Duration::from_millis(400)).await;
        proxy.pass();
        works_again(&client, "warm".into()).await;
        let _ = waits.await.unwrap();
    }
}
