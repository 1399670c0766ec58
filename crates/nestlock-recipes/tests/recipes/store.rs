//! The separate connection of a store ends with the store, and no later.

use std::{io, net::SocketAddr, time::Duration};

use nestlock_embedded::EmbeddedServer;
use nestlock_recipes::cached::{CacheError, RedisStore, cached};

use crate::support::{ask, client, eventually, ms, poll_times};

/// Returns the number of connections to the server, without the one that sends this request.
fn connections(addr: SocketAddr) -> usize {
    ask(addr, &["CLIENT", "LIST"]).matches(" addr=").count() - 1
}

async fn only(addr: SocketAddr, left: usize) {
    eventually("its connection ends", || async {
        connections(addr) == left
    })
    .await;
}

#[tokio::test]
async fn its_connection_ends_with_the_last_of_it() {
    let server = EmbeddedServer::start().unwrap();
    let (addr, locks) = (server.addr(), client(server.url()).await);
    let others = connections(addr);
    let store = RedisStore::connect(server.url()).await.unwrap();
    let cache = cached(&locks, store.clone());
    assert_eq!(connections(addr), others + 1);
    drop(store);
    cache
        .try_get_with("key", async { io::Result::Ok(b"value".to_vec()) })
        .await
        .unwrap();
    assert_eq!(connections(addr), others + 1);
    drop(cache);
    only(addr, others).await;
}

/// A client that the user created is left for the user to end.
#[tokio::test]
async fn a_client_that_was_given_is_not_ended() {
    use fred::prelude::{Builder, ClientLike, Config};

    let server = EmbeddedServer::start().unwrap();
    let theirs = Builder::from_config(Config::from_url(&server.url()).unwrap())
        .build()
        .unwrap();
    theirs.init().await.unwrap();
    let store = RedisStore::new(theirs.clone());
    store.shutdown();
    drop(store);
    let pong: String = theirs.ping(None).await.unwrap();
    assert_eq!(pong, "PONG");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connecting_dropped_at_any_poll_leaves_no_connection() {
    let server = EmbeddedServer::start().unwrap();
    let (mut polls, mut ends) = (1, 0);
    while ends < 3 {
        assert!(polls < 100, "it never ends");
        ends += u32::from(
            poll_times(RedisStore::connect(server.url()), polls)
                .await
                .is_some(),
        );
        polls += 1;
    }
    only(server.addr(), 0).await;
}

/// A store is useless without its lock client, even if a cache remains.
#[tokio::test]
async fn it_is_shut_down_with_its_client() {
    let server = EmbeddedServer::start().unwrap();
    let (addr, locks) = (server.addr(), client(server.url()).await);
    let store = RedisStore::connect(server.url()).await.unwrap();
    let cache = cached(&locks, store.clone());
    locks.shutdown().await.unwrap();
    store.shutdown();
    only(addr, 0).await;
    let error = tokio::time::timeout(ms(10_000), cache.get("key"))
        .await
        .expect("it hangs")
        .unwrap_err();
    assert!(matches!(error, CacheError::Store(_)), "{error}");
    only(addr, 0).await;
}

/// A refresh that failed and pauses for an hour keeps no connection open.
#[tokio::test]
async fn a_refresh_that_pauses_keeps_no_connection() {
    let server = EmbeddedServer::start().unwrap();
    let (addr, locks) = (server.addr(), client(server.url()).await);
    let others = connections(addr);
    let store = RedisStore::connect(server.url()).await.unwrap();
    let hour = Duration::from_secs(3_600);
    let cache = cached(&locks, store)
        .ttl(ms(1_000))
        .stale_for(hour)
        .error_ttl(hour)
        .beta(0.0);
    cache
        .try_get_with("key", async { io::Result::Ok(b"old".to_vec()) })
        .await
        .unwrap();
    server.advance(ms(1_001));
    let fails = async { io::Result::Err(io::Error::other("no database")) };
    assert_eq!(cache.try_get_with("key", fails).await.unwrap(), b"old");
    eventually("the refresh fails", || async {
        crate::support::exists(addr, "key:failed")
    })
    .await;
    drop(cache);
    only(addr, others).await;
}
