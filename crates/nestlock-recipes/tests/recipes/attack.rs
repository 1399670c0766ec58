//! Defects that a hostile review found.

use std::{
    collections::HashMap,
    future::{Future, Ready, ready},
    io,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use nestlock::{Error, LockClient, LockGuard};
use nestlock_embedded::{EmbeddedServer, SpawnedServer};
use nestlock_recipes::{
    cached::{BoxError, CacheError, Codec, RedisStore, Store, cached},
    leader::Leader,
    once_per::{Ticks, once_per},
    tower::{HeldLock, LockLayer},
};
use tower::{Layer, ServiceExt, service_fn};

use crate::support::{Wire, a_cache, ask, client, ms, poll_times_and_keep};

const SECOND: Duration = Duration::from_secs(1);

fn value(value: &'static str) -> Ready<io::Result<Vec<u8>>> {
    ready(Ok(value.into()))
}

// --- cached ---

/// A store that needs no runtime.
#[derive(Default)]
struct Memory(Mutex<HashMap<String, Vec<u8>>>);

#[async_trait::async_trait]
impl Store for Memory {
    async fn get(&self, key: &str) -> Result<Option<(Vec<u8>, Duration)>, BoxError> {
        Ok(self
            .0
            .lock()
            .unwrap()
            .get(key)
            .map(|value| (value.clone(), SECOND)))
    }

    async fn set(
        &self,
        key: &str,
        value: Vec<u8>,
        _: Duration,
        _: &LockGuard,
    ) -> Result<bool, BoxError> {
        self.0.lock().unwrap().insert(key.to_owned(), value);
        Ok(true)
    }
}

#[test]
fn a_runtime_that_shuts_down_while_a_task_misses_ends() {
    let server = EmbeddedServer::start().unwrap();
    let locks = tokio::runtime::Runtime::new().unwrap();
    let cache = locks.block_on(async { cached(&client(server.url()).await, Memory::default()) });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let ((begun, has_begun), (go, may_go), (done, is_done)) =
        (mpsc::channel(), mpsc::channel::<()>(), mpsc::channel());
    runtime.spawn(async move {
        begun.send(()).unwrap();
        // a single poll, during which the runtime begins to shut down
        may_go.recv().unwrap();
        let _ =
            pin!(cache.try_get_with("k", value("v"))).poll(&mut Context::from_waker(Waker::noop()));
        done.send(()).unwrap();
    });
    has_begun.recv().unwrap();
    let ending = std::thread::spawn(move || runtime.shutdown_timeout(SECOND * 60));
    // the shutdown begins within this time; an earlier poll would prove nothing
    std::thread::sleep(ms(100));
    go.send(()).unwrap();
    is_done
        .recv_timeout(SECOND * 20)
        .expect("it does not wait for itself");
    ending.join().unwrap();
}

#[tokio::test]
async fn a_fill_that_finds_none_ends_what_was_stale() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(server.url())
        .await
        .ttl(SECOND)
        .stale_for(SECOND * 600);
    cache.try_get_with("k", value("v")).await.unwrap();
    server.advance(SECOND * 2);
    let none = || async { io::Result::Ok(None) };
    assert_eq!(
        cache
            .try_optionally_get_with("k", none())
            .await
            .unwrap()
            .as_deref(),
        Some(&b"v"[..]),
        "stale"
    );
    let is_over = async || cache.get("k").await.unwrap().is_none();
    crate::support::eventually("the refresh found none", is_over).await;
}

#[tokio::test]
async fn a_long_stale_for_makes_no_value_fresh_and_a_long_ttl_is_kept() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(server.url())
        .await
        .ttl(SECOND)
        .stale_for(Duration::MAX);
    cache.try_get_with("k", value("old")).await.unwrap();
    server.advance(SECOND * 3_600);
    assert_eq!(cache.try_get_with("k", value("new")).await.unwrap(), b"old");
    let is_new = async || cache.get("k").await.unwrap().as_deref() == Some(b"new");
    crate::support::eventually("the stale value is refilled", is_new).await;

    let server = SpawnedServer::start().unwrap();
    let cache = a_cache(server.url())
        .await
        .ttl(Duration::MAX)
        .error_ttl(Duration::MAX);
    cache.try_get_with("k", value("a")).await.unwrap();
    assert_eq!(cache.try_get_with("k", value("b")).await.unwrap(), b"a");
    let fails = ready(Err::<Vec<u8>, _>(io::Error::other("no database")));
    assert!(matches!(
        cache.try_get_with("f", fails).await,
        Err(CacheError::Fill(_))
    ));
    assert!(matches!(
        cache.try_get_with("f", value("b")).await,
        Err(CacheError::FailedElsewhere(_))
    ));
}

#[tokio::test]
async fn a_value_is_no_failure_of_another_key() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(server.url()).await;
    cache
        .try_get_with("job:1:failed", value("three of them"))
        .await
        .unwrap();
    assert_eq!(cache.try_get_with("job:1", value("v")).await.unwrap(), b"v");
}

struct Panics;

impl Codec for Panics {
    type Value = Vec<u8>;

    fn encode(&self, _: &Vec<u8>) -> Result<Vec<u8>, BoxError> {
        panic!("no bytes")
    }

    fn decode(&self, bytes: Vec<u8>) -> Option<Vec<u8>> {
        Some(bytes)
    }
}

#[tokio::test]
async fn a_codec_that_panics_is_a_fill_that_fails() {
    let server = EmbeddedServer::start().unwrap();
    let (cache, fills) = (
        a_cache(server.url()).await.codec(Panics),
        Arc::new(AtomicU32::new(0)),
    );
    for _ in 0..5 {
        let fills = Arc::clone(&fills);
        let fill = async move { io::Result::Ok(vec![fills.fetch_add(1, SeqCst) as u8]) };
        cache.try_get_with("k", fill).await.unwrap_err();
    }
    assert_eq!(fills.load(SeqCst), 1, "one try a second");
}

/// Panics at a value that another codec has written.
struct Shies;

impl Codec for Shies {
    type Value = Vec<u8>;

    fn encode(&self, value: &Vec<u8>) -> Result<Vec<u8>, BoxError> {
        Ok(value.clone())
    }

    fn decode(&self, bytes: Vec<u8>) -> Option<Vec<u8>> {
        assert_ne!(bytes, b"old", "bytes at which a codec panics, as it should");
        Some(bytes)
    }
}

#[tokio::test]
async fn a_value_at_which_the_codec_panics_is_missing_and_refilled() {
    let server = EmbeddedServer::start().unwrap();
    let cache = a_cache(server.url()).await.stale_for(ms(60_000));
    let shies = cache.clone().codec(Shies);
    // in the caller's task, and in the task of the fill, under the lock
    for (key, ttl) in [("fresh", ms(60_000)), ("stale", ms(1))] {
        cache
            .clone()
            .ttl(ttl)
            .try_get_with(key, value("old"))
            .await
            .unwrap();
        assert_eq!(cache.get(key).await.unwrap().unwrap(), b"old", "{key}");
        assert_eq!(shies.get(key).await.unwrap(), None, "{key}");
        let reads = async || {
            tokio::join!(
                shies.try_get_with(key, value("a")),
                shies.try_get_with(key, value("b"))
            )
        };
        let (one, two) = tokio::time::timeout(ms(10_000), reads())
            .await
            .expect("a caller hangs");
        let filled = one.unwrap();
        assert_eq!(two.unwrap(), filled, "{key}: filled once");
        assert_eq!(
            shies.get(key).await.unwrap(),
            Some(filled),
            "{key}: and kept"
        );
    }
}

#[tokio::test]
async fn a_store_of_its_own_is_back_after_a_restart() {
    let server = SpawnedServer::start().unwrap();
    let cache = a_cache(server.url()).await;
    cache.try_get_with("k", value("a")).await.unwrap();
    server.kill().unwrap();
    assert!(
        matches!(cache.get("k").await, Err(CacheError::Store(_))),
        "it says so, and does not hang"
    );
    server.restart().unwrap();
    let is_back = async || cache.try_get_with("k", value("b")).await.is_ok();
    crate::support::eventually("it fills again", is_back).await;
}

#[tokio::test]
async fn a_store_that_hangs_keeps_no_lock() {
    let server = SpawnedServer::start().unwrap();
    let wire = Arc::new(Wire::to(server.addr()).await);
    let cut_off = cached(
        &client(server.url()).await,
        RedisStore::connect(wire.url()).await.unwrap(),
    );
    let fill = {
        let wire = Arc::clone(&wire);
        async move {
            wire.cut();
            value("lost").await
        }
    };
    let filling = tokio::spawn(async move { cut_off.try_get_with("k", fill).await });
    let healthy = a_cache(server.url()).await;
    let locks = client(server.url()).await;
    let is_filling = async || locks.mutex("fill:k").unwrap().is_locked().await.unwrap();
    crate::support::eventually("the other one has the lock", is_filling).await;
    // the other process gives up its write after 3 s, and this one may wait for 27 s more
    assert_eq!(healthy.try_get_with("k", value("v")).await.unwrap(), b"v");
    filling.await.unwrap().unwrap();
    wire.mend();
}

#[tokio::test]
async fn who_waits_sees_the_value_though_the_lock_is_taken() {
    let server = EmbeddedServer::start().unwrap();
    let (cache, locks) = (a_cache(server.url()).await, client(server.url()).await);
    cache.try_get_with("other", value("v")).await.unwrap();
    let held = locks.mutex("fill:k").unwrap().lock().await.unwrap();
    let waiting = tokio::spawn(async move { cache.try_get_with("k", value("mine")).await });
    tokio::time::sleep(ms(100)).await;
    let copies = "return redis.call('set', KEYS[2], redis.call('get', KEYS[1]), 'px', 60000)";
    assert_eq!(
        ask(server.addr(), &["EVAL", copies, "2", "other", "k"]),
        "+OK\r\n"
    );
    assert_eq!(waiting.await.unwrap().unwrap(), b"v");
    held.unlock().await.unwrap();
}

// --- leader and once_per ---

#[tokio::test]
async fn a_term_that_is_over_begins_no_work() {
    let server = EmbeddedServer::start().unwrap();
    let wire = Wire::to(server.addr()).await;
    let locks = client(wire.url()).await;
    let (mut terms, begun) = (0, AtomicU32::new(0));
    for polls in 1..12 {
        let leader = Leader::new(&locks, format!("office:{polls}"))
            .unwrap()
            .lease(ms(200));
        let mut campaign = Box::pin(leader.campaign());
        let mut lead = Box::pin(leader.lead(|term| {
            begun.fetch_add(u32::from(term.remaining().is_zero()), SeqCst);
            async move { drop(term) }
        }));
        if poll_times_and_keep(&mut campaign, polls).await.is_some() {
            break;
        }
        wire.cut();
        std::thread::sleep(ms(500));
        wire.mend();
        terms += u32::from(campaign.await.is_ok_and(|term| term.remaining().is_zero()));
        locks.idle().await;
        if poll_times_and_keep(&mut lead, polls).await.is_none() {
            wire.cut();
            std::thread::sleep(ms(500));
            wire.mend();
            let _ = tokio::time::timeout(ms(300), &mut lead).await;
        }
        drop(lead);
        locks.idle().await;
    }
    assert_eq!(
        (terms, begun.load(SeqCst)),
        (0, 0),
        "terms that were over, and work in them"
    );
}

#[tokio::test]
async fn what_can_never_be_ends() {
    let server = EmbeddedServer::start().unwrap();
    let locks = client(server.url()).await;
    let prefixed = LockClient::builder()
        .name_prefix("lock:")
        .connect(server.url())
        .await
        .unwrap();
    let ended = Leader::new(&prefixed, "office")
        .unwrap()
        .lead(|term| async move { drop(term) })
        .await;
    assert!(matches!(ended, Error::InvalidName { .. }), "{ended}");
    let ended = Leader::new(&locks, "office")
        .unwrap()
        .lease(Duration::ZERO)
        .lead(|term| async move { drop(term) })
        .await;
    assert!(matches!(ended, Error::InvalidLease { .. }), "{ended}");
    let job = once_per(&prefixed, "job", Ticks::every(SECOND)).unwrap();
    let ended = job.run_forever(|_| async {}).await;
    assert!(matches!(ended, Error::InvalidName { .. }), "{ended}");
    let job = once_per(&locks, "job", Ticks::every(SECOND))
        .unwrap()
        .lease(Duration::ZERO);
    let ended = job.run_forever(|_| async {}).await;
    assert!(matches!(ended, Error::InvalidLease { .. }), "{ended}");
}

// --- the tower layer ---

#[tokio::test]
async fn requests_that_pass_are_owners_of_their_own_too() {
    let server = EmbeddedServer::start().unwrap();
    let locks = client(server.url()).await;
    let (inside, most) = (AtomicU32::new(0), AtomicU32::new(0));
    let (inside, most) = (Arc::new(inside), Arc::new(most));
    let (held_by, seen) = (locks.clone(), Arc::clone(&most));
    let handler = service_fn(move |_: Request<()>| {
        let (locks, inside, most) = (held_by.clone(), Arc::clone(&inside), Arc::clone(&seen));
        async move {
            let guard = locks.reentrant_lock("stock")?.lock().await?;
            most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
            tokio::time::sleep(ms(50)).await;
            inside.fetch_sub(1, SeqCst);
            guard.unlock().await?;
            Ok::<_, Error>(Response::new(Full::<Bytes>::default()))
        }
    });
    let service = LockLayer::new(locks, |_| None).layer(handler);
    let (one, other) = tokio::join!(
        service.clone().oneshot(Request::new(())),
        service.oneshot(Request::new(()))
    );
    assert!(one.is_ok() && other.is_ok());
    assert_eq!(most.load(SeqCst), 1, "at once in the lock of their handler");
}

#[tokio::test]
async fn a_body_that_keeps_its_request_ends_with_the_lock_free() {
    let server = EmbeddedServer::start().unwrap();
    let locks = client(server.url()).await;
    for _ in 0..20 {
        let handler = service_fn(|request: Request<()>| async move {
            let frames = [Ok::<_, io::Error>(Frame::data(Bytes::from_static(b"1")))]
                .into_iter()
                .inspect(move |_| {
                    assert!(request.extensions().get::<HeldLock>().is_some());
                });
            Ok::<_, io::Error>(Response::new(StreamBody::new(futures_util::stream::iter(
                frames,
            ))))
        });
        let service = LockLayer::new(locks.clone(), |_| Some("n".into()))
            .until_body_end()
            .layer(handler);
        let mut body = service
            .clone()
            .oneshot(Request::new(()))
            .await
            .unwrap()
            .into_body();
        while let Some(frame) = body.frame().await {
            frame.unwrap();
        }
        let next = service.oneshot(Request::new(())).await.unwrap();
        assert_eq!(next.status(), StatusCode::OK, "the lock is free");
        drop(next);
        locks.idle().await;
    }
}
