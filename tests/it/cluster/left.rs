//! A master that was replaced, and has not said everything yet.

use std::{sync::Arc, time::Duration};

use nestlock::{LockClient, LockClientBuilder, LockGuard, NodeRole, TopologyNode};
use nestlock_embedded::{SpawnedCluster, SpawnedServer};

use super::{LONG, ask, by_way_of_a_proxy, calls, name_at, start, there};
use crate::support::{
    proxy::{Action, Proxy, Verb, Way},
    within,
};

/// A master that is asked by way of a proxy, and has a replica.
struct Old {
    cluster: Arc<SpawnedCluster>,
    proxy: Proxy,
    client: LockClient,
    /// Of a lock of its.
    name: String,
    held: LockGuard,
}

impl Old {
    async fn start() -> Self {
        Self::start_with(LockClient::builder()).await
    }

    async fn start_with(builder: LockClientBuilder) -> Self {
        let cluster = start(3, 3).await;
        let proxy = by_way_of_a_proxy(&cluster, 0).await;
        let client = builder.connect(cluster.url()).await.unwrap();
        let at = proxy.addr().to_string();
        let is_master = |node: &TopologyNode| node.role == NodeRole::Master && node.address == at;
        let is_known = || client.topology().nodes.iter().any(is_master);
        within(LONG, "it is asked by way of the proxy", || async { is_known() }).await;
        let name = name_at(&cluster, 0);
        let held = client.mutex(format!("{{{name}}}held")).unwrap().lock().await.unwrap();
        Self { cluster, proxy, client, name, held }
    }

    fn node(&self) -> &SpawnedServer {
        &self.cluster.nodes()[0]
    }

    /// Its replica, which will take over.
    fn heir(&self) -> &SpawnedServer {
        &self.cluster.nodes()[3]
    }

    /// Its replica hears of nothing any more.
    async fn keeps_to_itself(&self) {
        let knows = || ask(self.heir(), &["DBSIZE"]).int() >= ask(self.node(), &["DBSIZE"]).int();
        within(LONG, "its replica knows what is held", || async { knows() }).await;
        assert!(!ask(self.node(), &["ACL", "SETUSER", "default", "-psync", "-sync"]).is_error());
        ask(self.node(), &["CLIENT", "KILL", "TYPE", "replica"]);
        let is_alone = || ask(self.node(), &["INFO", "replication"]).text().contains("connected_slaves:0");
        within(LONG, "it has no replica", || async { is_alone() }).await;
    }

    /// Has the other one take over, and waits until the client knows.
    async fn is_left(&self) {
        let scripts = || calls(self.heir()).get("evalsha").copied().unwrap_or(0);
        let before = scripts();
        // nobody need agree: what the old one has said to its replicas does not come by the proxy
        ask(self.heir(), &["CLUSTER", "FAILOVER", "TAKEOVER"]);
        let role = |node| ask(node, &["ROLE"]).list()[0].text().to_owned();
        within(LONG, "it is replaced", || async { role(self.heir()) == "master" && role(self.node()) == "slave" })
            .await;
        // whoever meets a slot that has moved asks who has which
        let other = name_at(&self.cluster, 1);
        let moved = SpawnedCluster::slot_of(&other);
        there(&self.cluster, move |cluster| cluster.migrate(moved, &cluster.nodes()[2]).unwrap()).await;
        self.client.mutex(&other).unwrap().lock().await.unwrap().unlock().await.unwrap();
        // as soon as the old one is left, the new one is asked after what is held
        within(LONG, "it is left", || async { scripts() > before }).await;
    }
}

/// It grants a lock while another one takes over, which does not know of it: what it says then is not believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_grants_at_last_is_not_believed() {
    let old = Old::start().await;
    let (lock, asked) = (old.client.mutex(&old.name).unwrap(), old.proxy.count(Verb::Acquire));
    // it executes what it is asked, and nobody hears of it
    old.proxy.black_hole(Way::ToClient);
    let asks = tokio::spawn(async move { lock.lock().await });
    within(LONG, "it is granted", || async { ask(old.node(), &["EXISTS", &old.name]).int() == 1 }).await;
    // whatever the other one has heard of that
    ask(old.heir(), &["CONFIG", "SET", "replica-read-only", "no"]);
    ask(old.heir(), &["DEL", &old.name]);
    old.is_left().await;
    old.proxy.heal();
    let guard = asks.await.unwrap().unwrap();
    assert_eq!(ask(old.heir(), &["EXISTS", &old.name]).int(), 1, "held, and only the old master knew of it");
    assert_eq!(old.proxy.count(Verb::Acquire), asked + 1, "of the old master");
    guard.unlock().await.unwrap();
    old.held.unlock().await.unwrap();
}

/// It refuses a request that it was asked before it was replaced: that goes on to the new one, and nobody hears of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_refuses_at_last_is_asked_of_the_new_one() {
    // on a busy machine, 300 ms may be over before it is heard
    for _ in 0..3 {
        let old = Old::start().await;
        let lock = old.client.mutex(&old.name).unwrap();
        old.proxy.black_hole(Way::ToServer);
        let asks = tokio::spawn(async move { lock.try_lock().await });
        within(LONG, "it is under way", || async { old.client.stats().requests > 0 }).await;
        old.is_left().await;
        old.proxy.heal();
        if let Ok(guard) = asks.await.unwrap() {
            let guard = guard.expect("nobody has it");
            assert_eq!(ask(old.heir(), &["EXISTS", &old.name]).int(), 1);
            guard.unlock().await.unwrap();
            return old.held.unlock().await.unwrap();
        }
    }
    panic!("nobody hears what it refuses");
}

/// It is slow, and has time for its refusals then: whoever connects is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_refuses_late_is_asked_of_the_new_one_if_it_does_not_hang() {
    let old = Old::start().await;
    let lock = old.client.mutex(&old.name).unwrap();
    // who is silent for half a second is asked about, and left: by then one that hangs has another 300 ms
    old.proxy.once(Verb::Acquire, Action::Slow(Duration::from_millis(1_200)));
    let asks = tokio::spawn(async move { lock.try_lock().await });
    within(LONG, "it is under way", || async { old.client.stats().requests > 0 }).await;
    ask(old.heir(), &["CLUSTER", "FAILOVER", "TAKEOVER"]);
    let guard = asks.await.unwrap().unwrap().expect("nobody has it");
    assert_eq!(ask(old.heir(), &["EXISTS", &old.name]).int(), 1);
    guard.unlock().await.unwrap();
    old.held.unlock().await.unwrap();
}

/// It is slow, and has granted a lock of which its heir does not know. That is heard while it may still refuse, and is not
/// believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_grants_late_is_not_believed_though_it_does_not_hang() {
    // on a busy machine, the client may be held up for so long that it takes it for one that hangs
    for _ in 0..3 {
        let old = Old::start_with(LockClient::builder().command_timeout(Duration::from_secs(10))).await;
        let lock = old.client.mutex(&old.name).unwrap();
        old.keeps_to_itself().await;
        old.proxy.each(Verb::Acquire, Action::Held);
        let asks = tokio::spawn(async move { lock.lock().await });
        within(LONG, "it is granted", || async { ask(old.node(), &["EXISTS", &old.name]).int() == 1 }).await;
        old.is_left().await;
        // longer than one that hangs has
        tokio::time::sleep(Duration::from_millis(300)).await;
        let is_waited_for = !asks.is_finished();
        old.proxy.let_go();
        let guard = asks.await.unwrap().unwrap();
        assert_eq!(ask(old.heir(), &["EXISTS", &old.name]).int(), 1, "held, and only the old master knew of it");
        guard.unlock().await.unwrap();
        if is_waited_for {
            return old.held.unlock().await.unwrap();
        }
    }
    panic!("its answer is not waited for");
}
