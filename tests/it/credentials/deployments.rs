//! Tokens that rotate, in a cluster and with sentinels.

use std::{
    io::{Read, Write},
    sync::Mutex,
};

use nestlock::NodeRole;

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
    for &wire in WIRES {
        let fetch = || async { Ok::<_, io::Error>(Credentials::new("app", "pw")) };
        let client = builder(wire).credentials(fetch);
        let client = client.connect(group.url()).await.unwrap();
        let guard = client.mutex("l").unwrap().lock().await.unwrap();
        guard.unlock().await.unwrap();
        client.shutdown().await.unwrap();
    }
}

/// A sentinel lets clients in without a login, but not subscribe. While the function for credentials
/// hangs, it is polled all the same: the holder at the old master is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_is_polled_while_the_function_hangs() {
    for &wire in WIRES {
        let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
        let (master, other) = (group.servers()[0].addr(), Server::start_real());
        let sentinel = group.sentinels()[0].addr();
        for server in [master, other.addr(), sentinel] {
            let user = ["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"];
            admin(server, &user);
        }
        admin(sentinel, &["ACL", "SETUSER", "default", "resetchannels"]);
        let hangs = Arc::new(AtomicBool::new(false));
        let is_sealed = Arc::clone(&hangs);
        let fetch = move || {
            let is_sealed = Arc::clone(&is_sealed);
            async move {
                while is_sealed.load(Ordering::Acquire) {
                    tokio::time::sleep(ms(10)).await;
                }
                Ok::<_, io::Error>(Credentials::new("app", "pw").valid_for(ms(600_000)))
            }
        };
        // a login attempt may wait for the function for a quarter of a minute
        let client = builder(wire)
            .connect_timeout(ms(60_000))
            .watchdog_timeout(ms(60_000))
            .credentials(fetch)
            .connect(group.url())
            .await
            .unwrap();
        let guard = client.mutex("l").unwrap().lock().await.unwrap();
        // the first call serves the connections of its next 5 s
        tokio::time::sleep(ms(5_200)).await;
        hangs.store(true, Ordering::Release);
        admin(sentinel, &["CLIENT", "KILL", "TYPE", "pubsub"]);
        let is_polled = |line: &str| {
            let greets = ["cmd=hello", "cmd=client", "cmd=subscribe"];
            let is_ours = line.contains("name=nestlock:") && line.contains("user=default");
            is_ours && !greets.iter().any(|word| line.contains(word))
        };
        eventually("it is polled without a login", || async {
            let list = admin(sentinel, &["CLIENT", "LIST"]);
            list.text().lines().any(is_polled)
        })
        .await;
        assert_noticed(&client, other.addr(), sentinel).await;
        hangs.store(false, Ordering::Release);
        drop(guard);
        client.shutdown().await.unwrap();
    }
}

/// Makes a sentinel name another master, and asserts that the client takes it for the master.
async fn assert_noticed(client: &LockClient, master: SocketAddr, sentinel: SocketAddr) {
    name_master(sentinel, master);
    let port = master.port().to_string();
    let is_it = || async {
        let topology = client.topology();
        let mut masters = topology.nodes.iter();
        masters.any(|node| node.address.ends_with(&port) && node.role == NodeRole::Master)
    };
    within(ms(10_000), "the other master is known", is_it).await;
}

/// A sentinel that replies with nonsense, and one that closes each connection, get no login: nothing
/// says that they want one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_refuses_nothing_gets_no_login() {
    let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
    let user = [
        "ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all",
    ];
    sentinel::call(group.servers()[0].addr(), &user);
    for answer in ["", "nonsense\r\n", "-ERR unknown command 'HELLO'\r\n"] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let odd = listener.local_addr().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&heard);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, mut bytes) = (stream.unwrap(), [0; 4096]);
                let read = stream.read(&mut bytes).unwrap_or(0);
                log.lock().unwrap().push(bytes[..read].to_vec());
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        for &wire in WIRES {
            heard.lock().unwrap().clear();
            let url = format!(
                "redis-sentinel://{},{odd}/mymaster",
                group.sentinels()[0].addr()
            );
            let fetch = || async { Ok::<_, io::Error>(Credentials::new("app", "secret")) };
            let client = builder(wire).credentials(fetch);
            let client = client.connect(url).await.unwrap();
            eventually("it is tried again", || async {
                heard.lock().unwrap().len() >= 3
            })
            .await;
            let heard = heard.lock().unwrap().concat();
            let heard = String::from_utf8_lossy(&heard);
            assert!(!heard.contains("secret"), "{wire:?}, {answer:?}: {heard}");
            client.shutdown().await.unwrap();
        }
    }
}

/// A sentinel whose connections end at once is tried less and less often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_end_at_once_become_rare() {
    let group = tokio::task::block_in_place(|| sentinel::start(0, 1));
    let client = LockClient::connect(group.url()).await.unwrap();
    let mut wire = Wire::connect(group.sentinels()[0].addr()).unwrap();
    let received = |wire: &mut Wire| -> u64 {
        let info = wire.call(&["INFO", "stats"]).unwrap();
        let mut lines = info.text().lines();
        let count = lines.find_map(|line| line.strip_prefix("total_connections_received:"));
        count.unwrap().parse().unwrap()
    };
    let before = received(&mut wire);
    for _ in 0..300 {
        wire.call(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
        tokio::time::sleep(ms(10)).await;
    }
    let more = received(&mut wire) - before;
    assert!((3..30).contains(&more), "{more} connections in 3 s");
    client.shutdown().await.unwrap();
}
