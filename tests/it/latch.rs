//! Latches: all wait until a count is zero.

use std::time::{Duration, Instant};

use nestlock::{CountDownLatch, Error, LockClient};
use tokio::task::JoinSet;

use crate::support::{
    Server, eventually,
    proxy::{Action, Proxy, Verb},
    wire::Reply,
};

const CHANNEL: &str = "redisson_countdownlatch__channel__{l}";

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn latch(client: &LockClient) -> CountDownLatch {
    client.count_down_latch("l").unwrap()
}

/// A client whose waiters are woken by messages, or never.
async fn patient(server: &Server) -> LockClient {
    let builder = |builder: nestlock::LockClientBuilder| builder.poll_cap(ms(600_000));
    server.client_with(builder).await
}

/// Starts this many tasks that wait, and returns when they sleep.
async fn waiting(client: &LockClient, tasks: usize) -> JoinSet<nestlock::Result<()>> {
    let before = client.stats().waiters;
    let wait = |latch: CountDownLatch| async move { latch.wait().await };
    let waiters = (0..tasks).map(|_| wait(latch(client))).collect();
    let all = || async { client.stats().waiters == before + tasks };
    eventually("they wait", all).await;
    waiters
}

async fn are_asleep(server: &Server) {
    let settled = || async {
        let looks = server.script_count();
        tokio::time::sleep(ms(50)).await;
        server.script_count() == looks && !server.channels().is_empty()
    };
    eventually("they sleep", settled).await;
}

async fn all_go(mut waiters: JoinSet<nestlock::Result<()>>) {
    while let Some(went) = waiters.join_next().await {
        went.unwrap().unwrap();
    }
}

/// All waiters of all clients go on at zero, and those that come later at once.
#[tokio::test]
async fn all_waiters_go_on_at_zero() {
    let server = Server::start();
    let (a, b) = (patient(&server).await, patient(&server).await);
    assert!(latch(&a).try_set_count(2).await.unwrap());
    assert!(!latch(&b).try_set_count(7).await.unwrap());
    let (first, second) = (waiting(&a, 40).await, waiting(&b, 40).await);
    are_asleep(&server).await;
    let before = server.script_count();
    assert_eq!(latch(&a).count_down().await.unwrap(), 1);
    assert_eq!(latch(&b).count().await.unwrap(), 1);
    assert_eq!((a.stats().waiters, b.stats().waiters), (40, 40));
    assert_eq!(latch(&b).count_down().await.unwrap(), 0);
    all_go(first).await;
    all_go(second).await;
    // two changes, one read, and a look of each waiter
    assert_eq!(server.script_count() - before, 83);
    latch(&b).wait().await.unwrap();
    assert_eq!(latch(&a).count_down().await.unwrap(), 0, "nothing is left");
    assert!(!server.exists("l"));
    eventually("nothing is listened to", || async {
        server.channels().is_empty()
    })
    .await;
}

/// What Redisson does at zero, and when it sets a count anew.
#[tokio::test]
async fn messages_of_redisson_are_understood() {
    let server = Server::start();
    let client = patient(&server).await;
    server.call(&["SET", "l", "1"]);
    let waiters = waiting(&client, 10).await;
    are_asleep(&server).await;
    for message in ["1", "x"] {
        server.call(&["PUBLISH", CHANNEL, message]);
        are_asleep(&server).await;
    }
    assert_eq!(client.stats().waiters, 10);
    server.call(&["DEL", "l"]);
    server.call(&["PUBLISH", CHANNEL, "0"]);
    all_go(waiters).await;
}

/// A lost message costs the poll cap: the one that polls wakes the others.
#[tokio::test]
async fn a_lost_message_costs_one_poll() {
    let server = Server::start();
    let client = server
        .client_with(|builder| builder.poll_cap(ms(300)))
        .await;
    latch(&client).try_set_count(1).await.unwrap();
    let waiters = waiting(&client, 50).await;
    are_asleep(&server).await;
    server.call(&["DEL", "l"]);
    let began = Instant::now();
    all_go(waiters).await;
    assert!(began.elapsed() < ms(5_000), "{:?}", began.elapsed());
}

/// Also if its end comes before the poll.
#[tokio::test]
async fn a_wait_looks_once_more_at_its_end() {
    let server = Server::start();
    let client = patient(&server).await;
    latch(&client).try_set_count(1).await.unwrap();
    let waits = tokio::spawn({
        let latch = latch(&client);
        async move { latch.wait_for(ms(500)).await }
    });
    are_asleep(&server).await;
    server.call(&["DEL", "l"]);
    assert!(waits.await.unwrap().unwrap(), "it was zero by then");
}

/// A replica may not have the count yet, or any more.
#[tokio::test]
async fn a_replica_opens_no_latch() {
    let server = Server::start_real();
    let client = server.client_with(|builder| builder.poll_cap(ms(50))).await;
    latch(&client).try_set_count(1).await.unwrap();
    let waiters = waiting(&client, 10).await;
    // it gets the data of an empty master
    let empty = Server::start_real();
    empty.call(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
    server.call(&["REPLICAOF", "127.0.0.1", &empty.addr().port().to_string()]);
    let has_none = || async { server.call(&["EXISTS", "l"]) == Reply::Int(0) };
    eventually("it has the master's data", has_none).await;
    let polls = server.script_count();
    let polled = || async { server.script_count() > polls + 3 };
    eventually("it has polled", polled).await;
    assert_eq!(client.stats().waiters, 10, "they wait for a master");
    server.call(&["REPLICAOF", "NO", "ONE"]);
    all_go(waiters).await;
}

/// Messages that a broken connection missed are made up for.
#[tokio::test]
async fn a_reconnect_looks_again() {
    let server = Server::start();
    let client = patient(&server).await;
    latch(&client).try_set_count(1).await.unwrap();
    let waiters = waiting(&client, 20).await;
    are_asleep(&server).await;
    server.call(&["DEL", "l"]);
    server.call(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    all_go(waiters).await;
}

#[tokio::test]
async fn a_caller_counts_once() {
    let server = Server::start();
    let client = server.client().await;
    let latch = latch(&client);
    latch.try_set_count(3).await.unwrap();
    for _ in 0..3 {
        assert_eq!(latch.count_down_as("a").await.unwrap(), 2);
    }
    assert_eq!(latch.count_down_as("b").await.unwrap(), 1);
    assert_eq!(latch.count_down_as("a").await.unwrap(), 1);
    assert_eq!(latch.count_down().await.unwrap(), 0);
    // the next count begins with none
    latch.try_set_count(2).await.unwrap();
    assert_eq!(latch.count_down_as("a").await.unwrap(), 1);
}

/// A change whose reply is lost, or that arrives twice, is made once.
#[tokio::test]
async fn a_change_with_a_lost_reply_is_made_once() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let client = LockClient::connect(proxy.url()).await.unwrap();
    let latch = latch(&client);
    for action in [
        Action::Lose,
        Action::CutBefore,
        Action::Ghost(ms(40)),
        Action::Twice,
    ] {
        let lose = || proxy.once(Verb::Count, action);
        lose();
        assert!(latch.try_set_count(5).await.unwrap(), "{action:?}");
        lose();
        assert_eq!(latch.count_down().await.unwrap(), 4, "{action:?}");
        lose();
        assert_eq!(latch.count_down_as("a").await.unwrap(), 3, "{action:?}");
        lose();
        assert_eq!(latch.count().await.map_or(3, |count| count), 3);
        // a request may be on its way still
        tokio::time::sleep(ms(100)).await;
        assert_eq!(latch.count().await.unwrap(), 3, "{action:?}");
        server.call(&["DEL", "l"]);
    }
}

/// A bounded wait ends in time, whether the count is read or not.
#[tokio::test]
async fn a_wait_ends_in_time() {
    let server = Server::start();
    let client = server.client().await;
    let latch = latch(&client);
    latch.try_set_count(1).await.unwrap();
    let timed = async |wait| {
        let began = Instant::now();
        let outcome = latch.wait_for(wait).await;
        (outcome, began.elapsed())
    };
    for wait in [ms(0), ms(60), ms(300)] {
        let (outcome, took) = timed(wait).await;
        assert!(!outcome.unwrap());
        assert!(
            took >= wait && took < wait + ms(1_000),
            "{wait:?}: {took:?}"
        );
    }
    server.stop();
    let (outcome, took) = timed(ms(200)).await;
    let error = outcome.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    assert!(took < ms(1_500), "{took:?}");
    server.cont();
    latch.count_down().await.unwrap();
    assert!(timed(ms(0)).await.0.unwrap());
}

/// A wait goes on through an outage, and ends with the client.
#[tokio::test]
async fn an_outage_is_waited_out_and_a_shutdown_is_not() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder().poll_cap(ms(100));
    let client = builder.connect(proxy.url()).await.unwrap();
    latch(&client).try_set_count(1).await.unwrap();
    let waiters = waiting(&client, 5).await;
    proxy.refuse();
    proxy.cut();
    tokio::time::sleep(ms(600)).await;
    server.call(&["DEL", "l"]);
    proxy.heal();
    all_go(waiters).await;

    latch(&client).try_set_count(1).await.unwrap();
    let mut waiters = waiting(&client, 5).await;
    client.shutdown().await.unwrap();
    while let Some(ended) = waiters.join_next().await {
        assert!(matches!(ended.unwrap(), Err(Error::Closed)));
    }
}

/// With a server that refuses, a wait ends with its patience, and says why.
#[tokio::test]
async fn a_refusal_ends_a_wait() {
    let server = Server::start();
    let proxy = Proxy::start(&server);
    let builder = LockClient::builder().outage_patience(ms(300));
    let client = builder.connect(proxy.url()).await.unwrap();
    latch(&client).try_set_count(1).await.unwrap();
    for refusal in [
        "LOADING Redis is loading the dataset in memory",
        "NOPERM no",
    ] {
        proxy.each(Verb::Count, Action::Refuse(refusal));
        let error = latch(&client).wait().await.unwrap_err();
        let Error::Store { source, .. } = &error else {
            panic!("{error}")
        };
        assert!(source.to_string().contains(&refusal[..6]), "{error}");
    }
}

#[tokio::test]
async fn bad_counts_and_names_are_refused() {
    let server = Server::start();
    let client = server.client().await;
    let latch = latch(&client);
    let before = server.script_count();
    for count in [0, 1 << 31] {
        let error = latch.try_set_count(count).await.unwrap_err();
        assert!(matches!(error, Error::InvalidCount { .. }), "{error}");
    }
    for caller in [String::new(), "x".repeat(257)] {
        let error = latch.count_down_as(&caller).await.unwrap_err();
        assert!(matches!(error, Error::InvalidOwner { .. }), "{error}");
    }
    for name in ["", "a{b}", "{x}", "lock:x", "nestlock_latch_callers:x"] {
        let error = client.count_down_latch(name).unwrap_err();
        assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    }
    assert_eq!(server.script_count(), before);
    server.call(&["SET", "l", "many"]);
    let error = latch.wait().await.unwrap_err();
    assert!(matches!(error, Error::WrongLockKind { .. }), "{error}");
    server.call(&["DEL", "l"]);
    server.call(&["HSET", "l", "a", "1"]);
    let error = latch.wait().await.unwrap_err();
    assert!(matches!(error, Error::WrongType { .. }), "{error}");
}
