//! Clusters behind slow links.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use nestlock::LockClient;
use nestlock_embedded::SpawnedCluster;

use super::{ask, start, there};

/// A way to a server that takes so long each way.
pub(super) struct Slow {
    pub(super) addr: SocketAddr,
    /// In microseconds: to the server, and back.
    pub(super) to: Arc<AtomicU64>,
    pub(super) back: Arc<AtomicU64>,
}

pub(super) fn pump(mut from: TcpStream, mut to: TcpStream, delay: Arc<AtomicU64>) {
    let (send, receive) = mpsc::channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        for (due, bytes) in receive {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&bytes).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
    std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from.read(&mut bytes) {
            let due = Instant::now() + Duration::from_micros(delay.load(Ordering::Acquire));
            if send.send((due, bytes[..read].to_vec())).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
    });
}

impl Slow {
    pub(super) fn way_to(server: SocketAddr, each_way: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let micros = each_way.as_micros() as u64;
        let (to, back) = (Arc::new(AtomicU64::new(micros)), Arc::new(AtomicU64::new(micros)));
        let delays = (to.clone(), back.clone());
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(server) else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                pump(client.try_clone().unwrap(), server.try_clone().unwrap(), delays.0.clone());
                pump(server, client, delays.1.clone());
            }
        });
        Self { addr, to, back }
    }

    pub(super) fn set(&self, each_way: Duration) {
        for way in [&self.to, &self.back] {
            way.store(each_way.as_micros() as u64, Ordering::Release);
        }
    }
}

/// Each node of a cluster is reached by a way of its own.
pub(super) fn ways(cluster: &SpawnedCluster, each_way: Duration) -> Vec<Slow> {
    let ways: Vec<Slow> = cluster.nodes().iter().map(|node| Slow::way_to(node.addr(), each_way)).collect();
    for (node, way) in cluster.nodes().iter().zip(&ways) {
        let said = ask(node, &["CONFIG", "SET", "cluster-announce-port", &way.addr.port().to_string()]);
        assert!(!said.is_error(), "{said:?}");
    }
    let begun = Instant::now();
    let knows = |node| {
        let slots = ask(node, &["CLUSTER", "NODES"]).text().to_owned();
        ways.iter().all(|way| slots.contains(&format!(":{}@", way.addr.port())))
    };
    while !cluster.nodes().iter().all(knows) {
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", cluster.view());
        std::thread::sleep(Duration::from_millis(20));
    }
    ways
}

pub(super) fn url(ways: &[Slow]) -> String {
    let all: Vec<_> = ways.iter().map(|way| way.addr.to_string()).collect();
    format!("redis-cluster://{}", all.join(","))
}

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Between the two masters: the old one's number, and the new one's.
pub(super) fn halfway(cluster: &SpawnedCluster, slot: u16, keys: &[&str]) -> (usize, usize) {
    let from = cluster.master_of(slot).unwrap().addr();
    let at = |is_from: bool| cluster.nodes().iter().position(|node| (node.addr() == from) == is_from).unwrap();
    let migration = cluster.begin_migration(slot, &cluster.nodes()[at(false)]).unwrap();
    for key in keys {
        assert!(migration.move_key(key).unwrap(), "{key}");
    }
    (at(true), at(false))
}

/// All that a client has at a master is sent elsewhere by it, all the time, and then the link becomes slow: what it refuses
/// tells how slow, so that redirects are followed, and nothing is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_held_behind_ask_is_renewed_over_a_link_that_becomes_slow() {
    let cluster = start(2, 0).await;
    let ways = there(&cluster, |cluster| ways(cluster, ms(0))).await;
    let lease = Duration::from_secs(6);
    let client = LockClient::builder().watchdog_timeout(lease).connect(url(&ways)).await.unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    // they ask all the time: no PING goes over a link that is never silent
    let waiting = [(); 4].map(|()| {
        let lock = client.spin_lock("l").unwrap();
        tokio::spawn(async move { lock.lock().await?.unlock().await })
    });
    let slot = SpawnedCluster::slot_of("l");
    let (from, _) = there(&cluster, move |cluster| halfway(cluster, slot, &["l"])).await;
    ways[from].set(ms(150));
    tokio::time::sleep(2 * lease).await;
    assert!(!guard.is_lost());
    guard.unlock().await.unwrap();
    for waits in waiting {
        waits.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_release_behind_ask_is_done_over_a_link_that_becomes_slow() {
    let cluster = start(2, 0).await;
    let ways = there(&cluster, |cluster| ways(cluster, ms(0))).await;
    let client = LockClient::connect(url(&ways)).await.unwrap();
    let guard = client.mutex("l").unwrap().lock().await.unwrap();
    let slot = SpawnedCluster::slot_of("l");
    let (from, _) = there(&cluster, move |cluster| halfway(cluster, slot, &["l"])).await;
    ways[from].set(ms(150));
    guard.unlock().await.unwrap();
}
