//! A master that was replaced, and has not said everything yet.

use std::{net::SocketAddr, time::Duration};

use nestlock::{LockClient, NodeRole, Topology};
use nestlock_embedded::{SpawnedCluster, SpawnedServer};

use super::{ask, calls, name_at, start, there};
use crate::support::{
    proxy::{Proxy, Verb, Way},
    within,
};

const LONG: Duration = Duration::from_secs(20);

fn is_master(topology: &Topology, addr: SocketAddr) -> bool {
    let addr = addr.to_string();
    topology.nodes.iter().any(|node| node.role == NodeRole::Master && node.address == addr)
}

/// It grants a lock while another one takes over, which does not know of it: what it says then is not believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_grants_at_last_is_not_believed() {
    let cluster = start(3, 3).await;
    let proxy = Proxy::to(cluster.nodes()[0].addr());
    let announced = proxy.addr().port().to_string();
    ask(&cluster.nodes()[0], &["CONFIG", "SET", "cluster-announce-port", &announced]);
    let announced = format!(":{announced}@");
    let knows = |node: &SpawnedServer| ask(node, &["CLUSTER", "NODES"]).text().contains(&announced);
    within(LONG, "all know its new port", || async { cluster.nodes().iter().all(knows) }).await;
    let client = LockClient::connect(cluster.url()).await.unwrap();
    within(LONG, "it is asked by way of the proxy", || async { is_master(&client.topology(), proxy.addr()) }).await;
    let (name, other) = (name_at(&cluster, 0), name_at(&cluster, 1));
    let lock = client.mutex(&name).unwrap();
    let held = client.mutex(format!("{{{name}}}held")).unwrap().lock().await.unwrap();
    let asked = proxy.count(Verb::Acquire);
    // it executes what it is asked, and nobody hears of it
    proxy.black_hole(Way::ToClient);
    let asks = tokio::spawn(async move { lock.lock().await });
    within(LONG, "it is granted", || async { ask(&cluster.nodes()[0], &["EXISTS", &name]).int() == 1 }).await;
    // whatever it has heard of that
    let heir = &cluster.nodes()[3];
    ask(heir, &["CONFIG", "SET", "replica-read-only", "no"]);
    ask(heir, &["DEL", &name]);
    // its master need not agree, and what that has said does not come by the proxy
    ask(heir, &["CLUSTER", "FAILOVER", "TAKEOVER"]);
    within(LONG, "another one takes over", || async { ask(heir, &["ROLE"]).list()[0].text() == "master" }).await;
    // whoever meets a slot that has moved asks who has which
    let moved = SpawnedCluster::slot_of(&other);
    there(&cluster, move |cluster| cluster.migrate(moved, &cluster.nodes()[2]).unwrap()).await;
    client.mutex(&other).unwrap().lock().await.unwrap().unlock().await.unwrap();
    // as soon as the old one is left, the new one is asked after what is held
    within(LONG, "it is left", || async { calls(heir).contains_key("evalsha") }).await;
    proxy.heal();
    let guard = asks.await.unwrap().unwrap();
    assert_eq!(ask(heir, &["EXISTS", &name]).int(), 1, "held, and only the old master knew of it");
    assert_eq!(proxy.count(Verb::Acquire), asked + 1, "of the old master");
    guard.unlock().await.unwrap();
    held.unlock().await.unwrap();
}
