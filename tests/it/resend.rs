//! Only nestlock re-sends a request: the proof, and a tripwire for upgrades of fred.
//!
//! A release that another layer sends again later would free the next hold, so the driver must
//! never repeat a command by itself. Each call below makes exactly one attempt, so the proxy sees
//! what fred sent.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{Error, Lock, LockClient, OwnerId, Result};

use crate::support::{
    Server, eventually,
    proxy::{Action, Proxy, Verb},
};

const TIMEOUT: Duration = Duration::from_millis(400);

async fn client(url: String) -> LockClient {
    LockClient::builder()
        .watchdog_timeout(4 * TIMEOUT)
        .command_timeout(TIMEOUT)
        .connect(url)
        .await
        .unwrap()
}

fn stranger(task: usize) -> OwnerId {
    format!("0a1b2c3d-0000-4000-8000-000000000000:{task}")
        .parse()
        .unwrap()
}

/// Makes one attempt. If the attempt stays in doubt, the client settles it by releases, which the
/// test does not count.
async fn call(verb: Verb, lock: &Lock) -> Result<()> {
    match verb {
        Verb::Acquire => lock.try_lock().await.map(drop),
        Verb::Release => lock.release(&stranger(1)).await,
        Verb::Renew => match lock.extend(&stranger(1), Duration::from_secs(20)).await {
            Err(Error::NotHeld { .. }) => Ok(()),
            extended => extended,
        },
        Verb::Inspect => lock.is_locked().await.map(drop),
        Verb::ForceRelease => lock.force_unlock().await.map(drop),
        Verb::Transfer => unreachable!("it is sent again on purpose: see adopt.rs"),
        Verb::Bundle => unreachable!("it is not one call: see bundle.rs"),
        Verb::Count => unreachable!("not of this lock: see permits.rs"),
        Verb::Note => unreachable!("the client's own: see notes.rs"),
    }
}

/// Runs one call of each kind, each met by `action`. Asserts that it fails and that one request was
/// sent, once the connection is back and has carried other requests.
async fn one_attempt_is_one_request(action: Action) {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = client(proxy.url()).await;
    for (n, verb) in [
        Verb::Acquire,
        Verb::Release,
        Verb::Renew,
        Verb::Inspect,
        Verb::ForceRelease,
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("l{n}");
        let lock = client.reentrant_lock(&name).unwrap();
        if verb != Verb::Acquire {
            // A stranger holds the lock, and the client's ledger has no count for it.
            server.call(&["HSET", &name, stranger(1).as_str(), "1"]);
            server.call(&["PEXPIRE", &name, "60000"]);
        }
        // Loads the scripts, so that no request meets NOSCRIPT.
        let other = client.reentrant_lock("warm").unwrap();
        server.call(&["HSET", "warm", stranger(1).as_str(), "1"]);
        for warm in [
            Verb::Acquire,
            Verb::Inspect,
            Verb::Renew,
            Verb::Release,
            Verb::ForceRelease,
        ] {
            eventually("a warm-up", || async { call(warm, &other).await.is_ok() }).await;
        }
        client.idle().await;

        let before = proxy.count(verb);
        proxy.once(verb, action);
        let error = call(verb, &lock).await.expect_err("an error");
        // A query changes nothing, so it has no unknown outcome.
        let told = match verb {
            Verb::Inspect => matches!(error, Error::Store { .. }),
            _ => matches!(error, Error::Unconfirmed { .. }),
        };
        assert!(told, "{verb:?}: {error}");
        if action == Action::Mute {
            proxy.cut();
        }
        // Calls of another kind prove that the connection is back, without adding to the count.
        let again = if verb == Verb::Inspect {
            Verb::Renew
        } else {
            Verb::Inspect
        };
        for _ in 0..5 {
            eventually("the connection is back", || async {
                call(again, &other).await.is_ok()
            })
            .await;
        }
        client.idle().await;
        // What an acquire leaves behind is released, as often as necessary. The janitor repeats a
        // release by owner while the server records the same count as before.
        let wanted = if verb == Verb::Release && action == Action::CutBefore {
            2
        } else {
            1
        };
        assert_eq!(
            proxy.count(verb) - before,
            wanted,
            "{verb:?} {action:?}: sent again"
        );
    }
}

#[tokio::test]
async fn r38_a_request_whose_reply_was_cut_off_is_never_sent_again() {
    one_attempt_is_one_request(Action::Lose).await;
}

/// A request that was cut off before the server is never sent again.
#[tokio::test]
async fn r38_a_request_cut_off_before_the_server_is_never_resent() {
    one_attempt_is_one_request(Action::CutBefore).await;
}

#[tokio::test]
async fn r38_a_request_without_a_reply_is_never_sent_again() {
    one_attempt_is_one_request(Action::Mute).await;
}

/// A request whose reply comes after the timeout is never sent again.
#[tokio::test]
async fn r38_a_request_with_a_late_reply_is_never_resent() {
    one_attempt_is_one_request(Action::Late(3 * TIMEOUT)).await;
}

/// A request that arrives after the timeout is never sent again.
#[tokio::test]
async fn r38_a_request_that_arrives_late_is_never_resent() {
    one_attempt_is_one_request(Action::Slow(3 * TIMEOUT)).await;
}

/// 16 tasks make attempts with arguments of their own while connections are killed every few
/// milliseconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f14_a_storm_of_client_kill_executes_no_attempt_twice() {
    const ATTEMPTS: usize = 400;
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = client(proxy.url()).await;
    let lock = client.reentrant_lock("l").unwrap();
    for verb in [Verb::Acquire, Verb::Renew] {
        call(verb, &lock).await.unwrap();
    }
    client.idle().await;
    server.call(&["CONFIG", "RESETSTAT"]);
    let warm_up = proxy.requests().len();

    let (stop, answered, made) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
        16 * ATTEMPTS,
    );
    let storm = {
        let (stop, answered, mut wire) = (Arc::clone(&stop), Arc::clone(&answered), server.wire());
        std::thread::spawn(move || {
            let mut kills = 0;
            while !stop.load(Ordering::SeqCst) {
                let before = answered.load(Ordering::SeqCst);
                kills += wire
                    .call(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
                    .unwrap()
                    .int();
                std::thread::sleep(Duration::from_millis(5));
                // On a busy machine no task may have connected by then. Without this wait, the
                // kills would let no request through.
                while answered.load(Ordering::SeqCst) < before + 16 && !stop.load(Ordering::SeqCst)
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            kills
        })
    };
    let start = Instant::now();
    let tasks: Vec<_> = (0..16)
        .map(|task| {
            let (lock, answered) = (lock.clone(), Arc::clone(&answered));
            tokio::spawn(async move {
                for n in 0..ATTEMPTS {
                    let stranger = stranger(task * ATTEMPTS + n);
                    loop {
                        match lock.extend(&stranger, Duration::from_secs(20)).await {
                            Ok(()) => panic!("a stranger holds nothing"),
                            Err(Error::NotHeld { .. }) => {
                                answered.fetch_add(1, Ordering::SeqCst);
                            }
                            // Refused before it was sent, so not an attempt.
                            Err(Error::Store { .. })
                                if start.elapsed() < Duration::from_secs(60) =>
                            {
                                tokio::time::sleep(Duration::from_millis(1)).await;
                                continue;
                            }
                            Err(_) => {}
                        }
                        break;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    let kills = storm.join().unwrap();

    let mut sent = HashMap::<_, usize>::new();
    for request in &proxy.requests()[warm_up..] {
        if request.verb() == Some(Verb::Renew) {
            *sent.entry(request.args()[0].clone()).or_default() += 1;
        }
    }
    let (answered, executed) = (
        answered.load(Ordering::SeqCst),
        server.command_count("hmget") as usize,
    );
    println!(
        "{made} attempts, {kills} kills, {} requests, {executed} executed, {answered} with a reply",
        sent.len()
    );
    assert!(
        kills > 10 && answered > made / 10,
        "{kills} kills, {answered} replies: nothing was tested"
    );
    assert!(sent.len() > answered, "no request was lost");
    let repeated: Vec<_> = sent.iter().filter(|(_, times)| **times > 1).collect();
    assert!(
        repeated.is_empty(),
        "{} sent more than once, such as {:?}",
        repeated.len(),
        repeated.first()
    );
    assert!(
        answered <= executed && executed <= sent.len(),
        "{executed} executed, {} requests",
        sent.len()
    );
}
