//! Tokens that rotate, in a cluster and with sentinels.

use super::*;
#[cfg(feature = "rustls")]
use crate::tls::TlsCluster;

/// Issues tokens that live for a second: each is a user at all these servers. The one before the
/// last is deleted there, and its connections are closed.
fn rotating(servers: Vec<SocketAddr>) -> (impl Fn() -> Slow + Clone, Arc<AtomicU32>) {
    let issued = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&issued);
    let fetch = move || {
        let number = count.fetch_add(1, Ordering::AcqRel) + 1;
        let [new, old] = [number, number.saturating_sub(2)].map(|number| format!("token{number}"));
        for server in &servers {
            let issue = ["ACL", "SETUSER", &new, "on", ">pw", "~*", "&*", "+@all"];
            admin(*server, &issue);
            admin(*server, &["ACL", "DELUSER", &old]);
        }
        let token = Credentials::new(new, "pw").valid_for(ms(1_000));
        let fetch: Slow = Box::pin(async { Ok(token) });
        fetch
    };
    (fetch, issued)
}

/// Lets clients in only with a token, and the test.
fn protect(server: SocketAddr) {
    sentinel::call(server, &["ACL", "SETUSER", "default", ">admin"]);
}

/// Asserts that one call serves all nodes, and that no lock is lost at any of them.
async fn assert_tokens_expire(nodes: Vec<SocketAddr>, client: LockClientBuilder, url: String) {
    nodes.iter().copied().for_each(protect);
    let (fetch, issued) = rotating(nodes);
    let client = client
        .watchdog_timeout(ms(6_000))
        .outage_patience(ms(60_000))
        .credentials(fetch)
        .connect(url)
        .await
        .unwrap();
    let mut guards = Vec::new();
    for lock in 0..12 {
        let lock = client.mutex(format!("l{lock}")).unwrap();
        guards.push(lock.lock().await.unwrap());
    }
    // longer than a lease, and several tokens
    tokio::time::sleep(ms(7_000)).await;
    let calls = issued.load(Ordering::Acquire);
    assert!((4..30).contains(&calls), "{calls} calls for three nodes");
    for guard in guards {
        guard.unlock().await.unwrap();
    }
    client.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_expire_at_each_node_of_a_cluster() {
    let cluster = nestlock_embedded::SpawnedCluster::start(3, 0).unwrap();
    assert_tokens_expire(cluster.addrs(), LockClient::builder(), cluster.url()).await;
}

#[cfg(feature = "rustls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_expire_at_each_node_of_a_cluster_with_tls() {
    let cluster = TlsCluster::start(3).await;
    assert_tokens_expire(cluster.addrs(), cluster.builder(), cluster.url()).await;
}

/// The sentinel wants a token as well. Its connection ends, and the first token is gone; the next
/// connection has a later one, and learns that there is another master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_is_asked_with_a_later_token() {
    let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
    let (master, other) = (group.servers()[0].addr(), Server::start_real());
    let sentinel = group.sentinels()[0].addr();
    protect(sentinel);
    protect(other.addr());
    let (fetch, issued) = rotating(vec![master, sentinel, other.addr()]);
    let client = LockClient::builder()
        .watchdog_timeout(ms(3_000))
        .credentials(fetch)
        .connect(group.url())
        .await
        .unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    eventually("the first token is gone", || async {
        issued.load(Ordering::Acquire) > 3
    })
    .await;
    assert!(!guard.is_lost());
    assert_told_of(other.addr(), sentinel, &guard).await;
    let lock = client.mutex("l").unwrap();
    let next = tokio::time::timeout(ms(10_000) + SLACK, lock.lock()).await;
    let guard = next.expect("the other master is used").unwrap();
    guard.unlock().await.unwrap();
    client.shutdown().await.unwrap();
}

/// The sentinel lets clients in without a login, and does not let them subscribe: then the client
/// logs in, and hears of a failover at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_would_not_tell_gets_the_login() {
    let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
    let sentinel = group.sentinels()[0].addr();
    for server in [group.servers()[0].addr(), sentinel] {
        let user = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"];
        sentinel::call(server, &user);
    }
    for rules in ["resetchannels", "-@pubsub", "-subscribe"] {
        sentinel::call(sentinel, &["ACL", "SETUSER", "default", "+@all", rules]);
        for &wire in WIRES {
            let fetch = || async { Ok::<_, io::Error>(Credentials::new("app", "pw")) };
            let client = builder(wire).credentials(fetch);
            let client = client.connect(group.url()).await.unwrap();
            let list = sentinel::call(sentinel, &["CLIENT", "LIST"]);
            let is_told = |line: &str| line.contains("user=app") && line.contains("sub=1");
            assert!(list.text().lines().any(is_told), "{rules}: {list:?}");
            client.shutdown().await.unwrap();
        }
    }
    // it is polled without a login if it does not know that one
    sentinel::call(sentinel, &["ACL", "DELUSER", "app"]);
    let fetch = || async { Ok::<_, io::Error>(Credentials::new("app", "pw")) };
    let client = LockClient::builder().credentials(fetch);
    let client = client.connect(group.url()).await.unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    guard.unlock().await.unwrap();
    client.shutdown().await.unwrap();
}
