//! Each value of a cache is filled once: for many concurrent callers, and after a death, a failure
//! or the end of a value.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use nestlock::LockGuard;
use nestlock_embedded::{EmbeddedServer, SpawnedServer};
use nestlock_recipes::cached::{BoxError, CacheError, Cached, Json, RedisStore, Store, cached};
use tokio::{sync::Notify, task::JoinSet};

use crate::support::{
    Child, a_cache, ask, child, client, eventually, exists, ms, number, poll_times,
    poll_times_and_keep, run_child, say,
};

/// A store that counts reads of failure markers. Its first reader gets a TTL that is shorter by
/// `ago`, as if the value was refreshed after that read.
struct Watched {
    store: RedisStore,
    looks: Arc<AtomicU32>,
    ago: Mutex<Duration>,
}

#[async_trait::async_trait]
impl Store for Watched {
    async fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Duration)>, BoxError> {
        let found = self.store.get(key).await?;
        self.looks
            .fetch_add(u32::from(key.ends_with(":failed")), SeqCst);
        let ago = std::mem::take(&mut *self.ago.lock().unwrap());
        Ok(found.map(|(value, left)| (value, left.saturating_sub(ago))))
    }

    async fn set(
        &self,
        key: &str,
        value: Vec<u8>,
        ttl: Duration,
        filler: &LockGuard,
    ) -> Result<bool, BoxError> {
        self.store.set(key, value, ttl, filler).await
    }
}

async fn a_watched_cache(url: &str, ago: Duration) -> (Cached<Watched>, Arc<AtomicU32>) {
    let looks = Arc::new(AtomicU32::new(0));
    let store = RedisStore::connect(url).await.unwrap();
    let watched = Watched {
        store,
        looks: Arc::clone(&looks),
        ago: Mutex::new(ago),
    };
    (cached(&client(url).await, watched).beta(0.0), looks)
}

/// Advances the clock beyond a TTL: the key still exists in the millisecond in which its TTL ends.
fn outlast(server: &EmbeddedServer, ttl: Duration) {
    server.advance(ttl + ms(1));
}

/// Creates fills, and counts how many run.
#[derive(Default, Clone)]
struct Fills(Arc<AtomicU32>);

impl Fills {
    fn count(&self) -> u32 {
        self.0.load(SeqCst)
    }

    fn value(&self, value: &str) -> impl Future<Output = io::Result<Vec<u8>>> + Send + 'static {
        let (fills, value) = (self.clone(), value.as_bytes().to_vec());
        async move {
            fills.0.fetch_add(1, SeqCst);
            Ok(value)
        }
    }

    fn error(&self) -> impl Future<Output = io::Result<Vec<u8>>> + Send + 'static {
        let fills = self.clone();
        async move {
            fills.0.fetch_add(1, SeqCst);
            tokio::task::yield_now().await;
            Err(io::Error::other("no database"))
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// The main function of the child processes: `many` concurrent callers, or one fill during which
/// the process is killed, or a fill that fails again and again.
#[test]
fn a_filling_process() {
    let Some(words) = child() else { return };
    let [url, what] = &words[..] else {
        panic!("{words:?}")
    };
    run_child(async move {
        let cache = a_cache(url).await;
        let addr = url.strip_prefix("redis://").unwrap().parse().unwrap();
        let counted = move || number(addr, &["INCR", "fills"]);
        match &**what {
            "many" => {
                say("ready");
                eventually("the start", || async { exists(addr, "start") }).await;
                let mut waiters = JoinSet::new();
                for _ in 0..250 {
                    let cache = cache.clone();
                    waiters.spawn(async move {
                        let fill = async move {
                            counted();
                            tokio::time::sleep(ms(300)).await;
                            io::Result::Ok(b"value".to_vec())
                        };
                        assert_eq!(cache.try_get_with("key", fill).await.unwrap(), b"value");
                    });
                }
                while let Some(waiter) = waiters.join_next().await {
                    waiter.unwrap();
                }
                say("done");
            }
            "die" => {
                let fill = async move {
                    counted();
                    say("fills");
                    std::future::pending::<io::Result<Vec<u8>>>().await
                };
                cache.try_get_with("key", fill).await.unwrap();
            }
            "fail" => loop {
                let fill = async move {
                    say(counted());
                    let now = ask(addr, &["TIME"]);
                    let words: Vec<&str> = now.split("\r\n").collect();
                    // the server's seconds and microseconds
                    ask(
                        addr,
                        &["RPUSH", "tries", &format!("{}{:0>6}", words[2], words[4])],
                    );
                    io::Result::<Vec<u8>>::Err(io::Error::other("no database"))
                };
                cache.try_get_with("key", fill).await.unwrap_err();
            },
            other => panic!("{other}"),
        }
    });
}

/// The bound: 1,000 waiters in 4 processes, 1 fill.
#[test]
fn a_thousand_waiters_in_four_processes_fill_once() {
    let server = SpawnedServer::start().unwrap();
    let children =
        [(); 4].map(|()| Child::start("cached::a_filling_process", &[&server.url(), "many"]));
    for child in &children {
        assert_eq!(child.line(), "ready");
    }
    let began = Instant::now();
    ask(server.addr(), &["SET", "start", "1"]);
    for child in &children {
        assert_eq!(child.line(), "done");
    }
    let fills = ask(server.addr(), &["GET", "fills"]);
    println!(
        "1,000 waiters in 4 processes: {fills:?} fills of 300 ms, all served after {:?}",
        began.elapsed()
    );
    assert_eq!(fills, "$1\r\n1\r\n");
}

/// The bound: the next process fills at most 3 s and the poll cap after a filler was killed.
#[tokio::test]
async fn the_next_filler_fills_within_the_lease_of_a_killed_one() {
    let server = SpawnedServer::start().unwrap();
    let cache = a_cache(&server.url()).await;
    let mut filler = Child::start("cached::a_filling_process", &[&server.url(), "die"]);
    assert_eq!(filler.line(), "fills");
    let waiter = tokio::spawn({
        let cache = cache.clone();
        async move {
            cache
                .try_get_with("key", async { io::Result::Ok(b"next".to_vec()) })
                .await
        }
    });
    eventually("a waiter", || async {
        !ask(server.addr(), &["PUBSUB", "CHANNELS"]).starts_with("*0")
    })
    .await;
    let killed = Instant::now();
    filler.kill();
    let left = number(server.addr(), &["PTTL", "fill:key"]);
    let next = waiter.await.unwrap().unwrap();
    let took = killed.elapsed();
    assert_eq!(next, b"next");
    println!(
        "the filler's lease had {left} ms left; the next fill was done {took:?} after the kill"
    );
    // by the server's clock, which a busy machine does not delay
    assert!(left <= 3_000, "{left}");
    // the poll cap is 1 s, and a loaded machine may add the rest
    assert!(
        took < ms(3_000 + 1_000) + Duration::from_secs(3),
        "{took:?}"
    );
}

/// The bound: over all processes, a fill that fails is tried at most once a second.
#[test]
fn a_fill_that_fails_in_many_processes_is_tried_once_a_second() {
    let server = SpawnedServer::start().unwrap();
    let children =
        [(); 3].map(|()| Child::start("cached::a_filling_process", &[&server.url(), "fail"]));
    let start = Instant::now();
    while number(server.addr(), &["LLEN", "tries"]) < 4 {
        assert!(start.elapsed() < Duration::from_secs(60), "no tries");
        std::thread::sleep(ms(10));
    }
    drop(children);
    let answer = ask(server.addr(), &["LRANGE", "tries", "0", "-1"]);
    let tries: Vec<u64> = answer
        .split("\r\n")
        .filter(|line| line.len() == 16)
        .map(|line| line.parse().unwrap())
        .collect();
    let apart: Vec<u64> = tries
        .windows(2)
        .map(|two| (two[1] - two[0]) / 1_000)
        .collect();
    println!(
        "three processes that ask all the time, and fills that fail: tried {apart:?} ms apart"
    );
    assert!(
        apart.len() >= 3 && apart.iter().all(|apart| *apart >= 1_000),
        "{apart:?}"
    );
}

/// The same bound, to the millisecond, on a clock that the test moves.
#[tokio::test]
async fn a_failure_reaches_all_waiters_and_is_retried_after_a_second() {
    let server = EmbeddedServer::start().unwrap();
    let (here, there, fills) = (
        a_cache(&server.url()).await,
        a_cache(&server.url()).await,
        Fills::default(),
    );
    for tries in 1..=3 {
        let mut waiters = JoinSet::new();
        for _ in 0..50 {
            let (cache, fill) = (here.clone(), fills.error());
            waiters.spawn(async move { cache.try_get_with("key", fill).await.unwrap_err() });
        }
        while let Some(error) = waiters.join_next().await {
            let error = error.unwrap();
            assert!(matches!(error, CacheError::Fill(_)), "{error}");
            assert_eq!(error.to_string(), "the fill failed: no database");
        }
        for _ in 0..20 {
            let error = there.try_get_with("key", fills.error()).await.unwrap_err();
            assert!(
                matches!(&error, CacheError::FailedElsewhere(said) if &**said == "no database"),
                "{error}"
            );
        }
        assert_eq!(fills.count(), tries);
        outlast(&server, SECOND);
    }
    assert_eq!(
        there
            .try_get_with("key", fills.value("at last"))
            .await
            .unwrap(),
        b"at last"
    );
    assert!(!exists(server.addr(), "fill:key"));
}

#[tokio::test]
async fn a_value_is_filled_once_and_again_after_its_end() {
    let server = EmbeddedServer::start().unwrap();
    let (here, there, fills) = (
        a_cache(&server.url()).await,
        a_cache(&server.url()).await,
        Fills::default(),
    );
    assert_eq!(there.get("key").await.unwrap(), None);
    for round in 1..=3 {
        for cache in [&here, &there, &here] {
            assert_eq!(
                cache
                    .try_get_with("key", fills.value("value"))
                    .await
                    .unwrap(),
                b"value"
            );
            assert_eq!(there.get("key").await.unwrap().unwrap(), b"value");
        }
        assert_eq!(fills.count(), round);
        outlast(&server, 60 * SECOND);
    }
    // all keys have expired
    assert_eq!(ask(server.addr(), &["KEYS", "*"]), "*0\r\n");
}

/// A filler does not write if another one has had the lock since: the server rejects its request,
/// even if its own clock has not noticed.
#[tokio::test]
async fn a_late_filler_does_not_write() {
    let server = EmbeddedServer::start().unwrap();
    let (late, next, fills) = (
        a_cache(&server.url()).await,
        a_cache(&server.url()).await,
        Fills::default(),
    );
    for fails in [false, true] {
        let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let fill = {
            let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
            async move {
                begun.notify_one();
                go_on.notified().await;
                if fails {
                    Err(io::Error::other("late"))
                } else {
                    Ok(b"late".to_vec())
                }
            }
        };
        let filler = tokio::spawn({
            let late = late.clone();
            async move { late.try_get_with("key", fill).await }
        });
        begun.notified().await;
        outlast(&server, 3 * SECOND);
        assert_eq!(
            next.try_get_with("key", fills.value("next")).await.unwrap(),
            b"next"
        );
        go_on.notify_one();
        // the caller gets the value of its fill, or an error if it noticed the loss before
        let _ = filler.await.unwrap();
        assert_eq!(next.get("key").await.unwrap().unwrap(), b"next");
        assert!(!exists(server.addr(), "key:failed"));
        ask(server.addr(), &["DEL", "key"]);
    }
}

#[tokio::test]
async fn a_filler_that_notices_its_loss_drops_its_fill() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(&server.url()).await.lease(ms(300));
    let url = server.addr();
    let fill = async move {
        ask(url, &["DEL", "fill:key"]);
        std::future::pending::<io::Result<Vec<u8>>>().await
    };
    let error = cache.try_get_with("key", fill).await.unwrap_err();
    assert!(
        matches!(&error, CacheError::Lock(lost) if lost.is_lost()),
        "{error}"
    );
    assert_eq!(
        cache
            .try_get_with("key", Fills::default().value("again"))
            .await
            .unwrap(),
        b"again"
    );
}

/// Only the caller that started the lost fill gets an error. The others run their own fills.
#[tokio::test]
async fn who_shares_a_fill_that_lost_its_lock_fills_for_itself() {
    let server = EmbeddedServer::start().unwrap();
    let (locks, addr) = (client(server.url()).await, server.addr());
    let cache = cached(&locks, RedisStore::connect(server.url()).await.unwrap()).beta(0.0);
    for how in ["deleted", "freed by force", "expired"] {
        let (cache, begun) = (cache.clone().lease(ms(300)), Arc::new(Notify::new()));
        let endless = {
            let begun = Arc::clone(&begun);
            async move {
                begun.notify_one();
                std::future::pending::<io::Result<Vec<u8>>>().await
            }
        };
        let fills = Fills::default();
        let first = tokio::spawn({
            let cache = cache.clone();
            async move { cache.try_get_with("key", endless).await }
        });
        begun.notified().await;
        let mut sharing: Vec<_> = (0..3)
            .map(|_| Box::pin(cache.try_get_with("key", fills.value("own"))))
            .collect();
        for one in &mut sharing {
            assert!(poll_times_and_keep(one, 1).await.is_none());
        }
        match how {
            "deleted" => assert_eq!(number(addr, &["DEL", "fill:key"]), 1),
            "freed by force" => assert!(
                locks
                    .mutex("fill:key")
                    .unwrap()
                    .force_unlock()
                    .await
                    .unwrap()
            ),
            _ => outlast(&server, ms(300)),
        }
        for one in sharing {
            let own = tokio::time::timeout(10 * SECOND, one)
                .await
                .expect("a caller hangs");
            assert_eq!(own.unwrap(), b"own", "{how}");
        }
        let error = first.await.unwrap().unwrap_err();
        assert!(
            matches!(&error, CacheError::Lock(lost) if lost.is_lost()),
            "{how}: {error}"
        );
        assert_eq!(fills.count(), 1, "{how}: by one of them");
        ask(addr, &["DEL", "key"]);
    }
}

/// Each fill loses its lock. Each caller tries its own fill once and then gets the error; a caller
/// whose wait is over tries none.
#[tokio::test]
async fn repeated_losses_end_within_the_callers_own_time() {
    let server = EmbeddedServer::start().unwrap();
    let addr = server.addr();
    let loses = |tries: &Arc<AtomicU32>| {
        let tries = Arc::clone(tries);
        async move {
            tries.fetch_add(1, SeqCst);
            ask(addr, &["DEL", "fill:key"]);
            std::future::pending::<io::Result<Vec<u8>>>().await
        }
    };
    for (wait, most) in [(30 * SECOND, 3), (Duration::ZERO, 1)] {
        let cache = a_cache(&server.url()).await.lease(ms(300)).wait(wait);
        let tries = Arc::default();
        let ask = || cache.try_get_with("key", loses(&tries));
        let (one, two, three) = tokio::join!(ask(), ask(), ask());
        for outcome in [one, two, three] {
            let error = outcome.unwrap_err();
            assert!(
                matches!(&error, CacheError::Lock(lost) if lost.is_lost()),
                "{error}"
            );
        }
        assert_eq!(tries.load(SeqCst), most, "{wait:?}");
    }
}

/// The caller is dropped at each poll: a fill that has started continues, and one that has not
/// leaves nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_dropped_at_any_poll_stops_no_fill() {
    let server = EmbeddedServer::start().unwrap();
    let (locks, other) = (client(server.url()).await, a_cache(&server.url()).await);
    let cache = cached(&locks, RedisStore::connect(server.url()).await.unwrap());
    let (mut k, mut ends) = (1, 0);
    while ends < 3 {
        assert!(k < 100, "it never ends");
        let (key, fills) = (format!("key{k}"), Fills::default());
        ends += u32::from(
            poll_times(cache.try_get_with(&key, fills.value("value")), k)
                .await
                .is_some(),
        );
        // joins the fill that continues, or starts one
        assert_eq!(
            cache
                .try_get_with(&key, fills.value("value"))
                .await
                .unwrap(),
            b"value"
        );
        assert_eq!(
            other
                .try_get_with(&key, fills.value("value"))
                .await
                .unwrap(),
            b"value"
        );
        assert_eq!(fills.count(), 1, "{k} polls");
        drop(poll_times(cache.get(&key), k).await);
        k += 1;
    }
    eventually("nothing is left", || async {
        locks.idle().await;
        locks.stats().holds == 0 && !ask(server.addr(), &["KEYS", "fill:*"]).contains("fill:")
    })
    .await;
}

#[tokio::test]
async fn a_fill_goes_on_without_the_one_who_began_it() {
    let server = EmbeddedServer::start().unwrap();
    let (cache, fills) = (a_cache(&server.url()).await, Fills::default());
    let begun = Arc::new(Notify::new());
    let slow = {
        let (begun, fill) = (Arc::clone(&begun), fills.value("value"));
        async move {
            begun.notify_one();
            tokio::time::sleep(ms(50)).await;
            fill.await
        }
    };
    tokio::select! {
        _ = cache.try_get_with("key", slow) => panic!("too early"),
        () = begun.notified() => {}
    }
    assert_eq!(
        cache
            .try_get_with("key", fills.value("other"))
            .await
            .unwrap(),
        b"value"
    );
    assert_eq!(fills.count(), 1);
}

#[tokio::test]
async fn a_panic_reaches_all_waiters_and_counts_as_a_failure() {
    let server = EmbeddedServer::start().unwrap();
    let (here, there, fills) = (
        a_cache(&server.url()).await,
        a_cache(&server.url()).await,
        Fills::default(),
    );
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let panics = {
        let (begun, go_on) = (Arc::clone(&begun), Arc::clone(&go_on));
        async move {
            begun.notify_one();
            go_on.notified().await;
            panic!("a fill that panics, as it should") as io::Result<Vec<u8>>
        }
    };
    let (one, two) = tokio::join!(here.try_get_with("key", panics), async {
        begun.notified().await;
        let waits = here.try_get_with("key", fills.value("value"));
        go_on.notify_one();
        waits.await
    });
    assert!(
        matches!(
            (&one, &two),
            (Err(CacheError::Panicked), Err(CacheError::Panicked))
        ),
        "{one:?} {two:?}"
    );
    let error = there
        .try_get_with("key", fills.value("value"))
        .await
        .unwrap_err();
    assert!(matches!(error, CacheError::FailedElsewhere(_)), "{error}");
    outlast(&server, SECOND);
    assert_eq!(
        there
            .try_get_with("key", fills.value("value"))
            .await
            .unwrap(),
        b"value"
    );
    assert_eq!(fills.count(), 1);
}

#[tokio::test]
async fn a_stale_value_is_served_while_one_refills_it() {
    let server = EmbeddedServer::start().unwrap();
    let (url, fills) = (server.url(), Fills::default());
    let (here, (there, looks)) = (
        a_cache(&url).await,
        a_watched_cache(&url, Duration::ZERO).await,
    );
    let (here, there) = (here.stale_for(600 * SECOND), there.stale_for(600 * SECOND));
    here.try_get_with("key", fills.value("old")).await.unwrap();
    server.advance(59 * SECOND);
    assert_eq!(
        here.try_get_with("key", fills.value("new")).await.unwrap(),
        b"old"
    );
    assert_eq!(fills.count(), 1, "fresh for a second more");
    server.advance(2 * SECOND);
    // a refresh that fails removes nothing, and is retried after a second
    for _ in 0..20 {
        assert_eq!(
            here.try_get_with("key", fills.error()).await.unwrap(),
            b"old"
        );
    }
    eventually("a try", || async {
        fills.count() == 2 && exists(server.addr(), "key:failed")
    })
    .await;
    eventually("its end", || async { !exists(server.addr(), "fill:key") }).await;
    assert_eq!(
        there.try_get_with("key", fills.value("new")).await.unwrap(),
        b"old"
    );
    eventually("a look", || async {
        looks.load(SeqCst) == 1 && !exists(server.addr(), "fill:key")
    })
    .await;
    assert_eq!(fills.count(), 2);
    outlast(&server, SECOND);
    let third = a_cache(&url).await.stale_for(600 * SECOND);
    assert_eq!(
        third.try_get_with("key", fills.value("new")).await.unwrap(),
        b"old"
    );
    eventually("a new value", || async {
        third.get("key").await.unwrap().unwrap() == b"new"
    })
    .await;
    assert_eq!(
        here.try_get_with("key", fills.value("newer"))
            .await
            .unwrap(),
        b"new"
    );
    assert_eq!(
        there
            .try_get_with("key", fills.value("newer"))
            .await
            .unwrap(),
        b"new"
    );
    assert_eq!(fills.count(), 3);
    outlast(&server, 660 * SECOND);
    assert_eq!(here.get("key").await.unwrap(), None, "gone after both");
}

/// A reader decides to refresh, shortly before another process has refreshed the value. It notices
/// that under the lock.
#[tokio::test]
async fn a_value_refreshed_since_its_read_is_not_refreshed_again() {
    let server = EmbeddedServer::start().unwrap();
    let (url, fills) = (server.url(), Fills::default());
    let slow = {
        let fill = fills.value("value");
        async move {
            tokio::time::sleep(ms(20)).await;
            fill.await
        }
    };
    a_cache(&url).await.try_get_with("key", slow).await.unwrap();
    let (late, looks) = a_watched_cache(&url, 10 * SECOND).await;
    let late = late.beta(1e9);
    late.try_get_with("key", fills.value("again"))
        .await
        .unwrap();
    eventually("a look", || async {
        looks.load(SeqCst) == 1 && !exists(server.addr(), "fill:key")
    })
    .await;
    assert_eq!(fills.count(), 1);
}

/// The random choice at its two extremes: always, and never.
#[tokio::test]
async fn a_value_is_refreshed_before_its_end_by_one_who_reads_it() {
    let server = EmbeddedServer::start().unwrap();
    let (cache, fills) = (a_cache(&server.url()).await, Fills::default());
    let slow = {
        let fill = fills.value("old");
        async move {
            tokio::time::sleep(ms(200)).await;
            fill.await
        }
    };
    cache.try_get_with("key", slow).await.unwrap();
    // with a beta of 1e9, each read refreshes
    let eager = a_cache(&server.url()).await.beta(1e9);
    assert_eq!(
        eager.try_get_with("key", fills.value("new")).await.unwrap(),
        b"old",
        "in the background"
    );
    eventually("a new value", || async {
        cache.get("key").await.unwrap().unwrap() == b"new"
    })
    .await;
    assert_eq!(fills.count(), 2);
    // with a beta of 0, no read refreshes before the end
    server.advance(ms(59_000));
    for _ in 0..100 {
        cache
            .try_get_with("key", fills.value("newer"))
            .await
            .unwrap();
    }
    assert_eq!(fills.count(), 2);
}

#[tokio::test]
async fn that_there_is_none_is_cached_by_choice() {
    let server = EmbeddedServer::start().unwrap();
    let (url, finds) = (server.url(), Arc::new(AtomicU32::new(0)));
    let none = || {
        let finds = Arc::clone(&finds);
        async move {
            finds.fetch_add(1, SeqCst);
            io::Result::Ok(None)
        }
    };
    let plain = a_cache(&url).await;
    for looks in 1..=2 {
        assert_eq!(
            plain.try_optionally_get_with("key", none()).await.unwrap(),
            None
        );
        assert_eq!(finds.load(SeqCst), looks, "not cached");
    }
    let caches = a_cache(&url).await.none_ttl(5 * SECOND);
    for _ in 0..3 {
        assert_eq!(
            caches.try_optionally_get_with("key", none()).await.unwrap(),
            None
        );
    }
    assert_eq!(finds.load(SeqCst), 3);
    outlast(&server, 5 * SECOND);
    assert_eq!(
        caches.try_optionally_get_with("key", none()).await.unwrap(),
        None
    );
    assert_eq!(finds.load(SeqCst), 4);
    // a caller that requires a value does not accept a cached "no value"
    let fills = Fills::default();
    assert_eq!(
        caches
            .try_get_with("key", fills.value("value"))
            .await
            .unwrap(),
        b"value"
    );
    assert_eq!(
        caches
            .try_optionally_get_with("key", none())
            .await
            .unwrap()
            .unwrap(),
        b"value"
    );
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Page {
    title: String,
}

#[tokio::test]
async fn values_have_a_codec_and_what_it_cannot_read_is_missing() {
    let server = EmbeddedServer::start().unwrap();
    let bytes = a_cache(&server.url()).await;
    let pages = bytes.clone().codec(Json::<Page>::new());
    let page = Page {
        title: "one".into(),
    };
    let fill = || {
        std::future::ready(io::Result::Ok(Page {
            title: "one".into(),
        }))
    };
    assert_eq!(pages.try_get_with("key", fill()).await.unwrap(), page);
    assert_eq!(
        bytes.get("key").await.unwrap().unwrap(),
        br#"{"title":"one"}"#
    );
    assert_eq!(pages.get("key").await.unwrap(), Some(page.clone()));
    // a value of another format, and bytes without a header
    for other in [
        "\x11\0\0\0\0\0\0\0\0nonsense",
        "something else, of somebody else's",
    ] {
        ask(server.addr(), &["SET", "key", other]);
        assert_eq!(pages.get("key").await.unwrap(), None);
        assert_eq!(pages.try_get_with("key", fill()).await.unwrap(), page);
    }
}

#[tokio::test]
async fn a_long_wait_and_a_long_key_are_errors() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(&server.url()).await.wait(ms(50));
    let locks = client(server.url()).await;
    let guard = locks.mutex("fill:key").unwrap().lock().await.unwrap();
    let error = cache
        .try_get_with("key", Fills::default().value("value"))
        .await
        .unwrap_err();
    assert!(matches!(error, CacheError::Busy(_)), "{error}");
    guard.unlock().await.unwrap();
    let error = cache
        .try_get_with(&"k".repeat(1_024), Fills::default().value("value"))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, CacheError::Lock(name) if matches!(**name, nestlock::Error::InvalidName { .. })),
        "{error}"
    );
}

/// Callers share a fill, but each waits for its own full time.
#[tokio::test]
async fn who_comes_later_waits_for_as_long() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(&server.url()).await.wait(ms(3_000));
    let elsewhere = client(server.url())
        .await
        .mutex("fill:key")
        .unwrap()
        .lock()
        .await
        .unwrap();
    let ask = || {
        let cache = cache.clone();
        tokio::spawn(async move {
            cache
                .try_get_with("key", Fills::default().value("value"))
                .await
        })
    };
    let first = ask();
    tokio::time::sleep(ms(1_500)).await;
    let second = ask();
    let error = first.await.unwrap().unwrap_err();
    assert!(matches!(error, CacheError::Busy(_)), "{error}");
    elsewhere.unlock().await.unwrap();
    assert_eq!(second.await.unwrap().unwrap(), b"value");
}

/// Even with a `wait` of zero a caller fills, since the lock is free.
#[tokio::test]
async fn who_does_not_wait_fills_all_the_same() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(&server.url()).await.wait(Duration::ZERO);
    let fills = Fills::default();
    let (first, second) = tokio::join!(
        cache.try_get_with("key", fills.value("value")),
        cache.try_get_with("key", fills.value("value"))
    );
    assert_eq!(
        (first.unwrap(), second.unwrap()),
        (b"value".to_vec(), b"value".to_vec())
    );
    assert_eq!(fills.count(), 1);
}

/// A caller that joins a fill of a later caller does not wait longer than its own time, though that
/// fill does.
#[tokio::test]
async fn who_shares_a_fill_waits_for_its_own_time() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(&server.url()).await.wait(ms(2_000));
    let elsewhere = client(server.url())
        .await
        .mutex("fill:key")
        .unwrap()
        .lock()
        .await
        .unwrap();
    let ask = |begins: u64| {
        let cache = cache.clone();
        tokio::spawn(async move {
            tokio::time::sleep(ms(begins)).await;
            let began = std::time::Instant::now();
            (
                cache
                    .try_get_with("key", Fills::default().value("value"))
                    .await,
                began.elapsed(),
            )
        })
    };
    // when the first caller gives up, one of the last starts the next fill, which the others join
    let callers: Vec<_> = [0]
        .into_iter()
        .chain([100; 10])
        .chain([1_800; 10])
        .map(ask)
        .collect();
    for caller in callers {
        let (filled, took) = caller.await.unwrap();
        assert!(matches!(filled, Err(CacheError::Busy(_))), "{filled:?}");
        assert!(took < ms(3_000), "{took:?}");
    }
    elsewhere.unlock().await.unwrap();
}

fn is_send<T: Send>(_: &T) {}

#[tokio::test]
async fn its_futures_may_be_spawned() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(&server.url()).await;
    is_send(&cache.try_get_with("key", Fills::default().value("value")));
    is_send(&cache.get("key"));
}
