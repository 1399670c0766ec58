//! A master that was replaced while its replies are still in flight.

use std::{sync::Arc, time::Duration};

use nestlock::{LockClient, LockClientBuilder, LockGuard, NodeRole, TopologyNode};
use nestlock_embedded::{SpawnedCluster, SpawnedServer};

use super::{LONG, ask, by_way_of_a_proxy, calls, name_at, start, there};
use crate::support::{
    proxy::{Action, Proxy, Verb, Way},
    within,
};

/// A master that the client reaches through a proxy, and that has a replica.
struct Old {
    cluster: Arc<SpawnedCluster>,
    proxy: Proxy,
    client: LockClient,
    /// The name of a lock of this master.
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
        within(LONG, "it is reached through the proxy", || async {
            is_known()
        })
        .await;
        let name = name_at(&cluster, 0);
        let held = client
            .mutex(format!("{{{name}}}held"))
            .unwrap()
            .lock()
            .await
            .unwrap();
        Self {
            cluster,
            proxy,
            client,
            name,
            held,
        }
    }

    fn node(&self) -> &SpawnedServer {
        &self.cluster.nodes()[0]
    }

    /// Returns the replica that will take over.
    fn heir(&self) -> &SpawnedServer {
        &self.cluster.nodes()[3]
    }

    /// Cuts its replica off from replication.
    async fn keeps_to_itself(&self) {
        let knows = || ask(self.heir(), &["DBSIZE"]).int() >= ask(self.node(), &["DBSIZE"]).int();
        within(LONG, "its replica knows what is held", || async { knows() }).await;
        assert!(
            !ask(
                self.node(),
                &["ACL", "SETUSER", "default", "-psync", "-sync"]
            )
            .is_error()
        );
        ask(self.node(), &["CLIENT", "KILL", "TYPE", "replica"]);
        let is_alone = || {
            ask(self.node(), &["INFO", "replication"])
                .text()
                .contains("connected_slaves:0")
        };
        within(LONG, "it has no replica", || async { is_alone() }).await;
    }

    /// Lets the replica take over, and waits until the client knows.
    async fn is_left(&self) {
        let scripts = || calls(self.heir()).get("evalsha").copied().unwrap_or(0);
        let before = scripts();
        // TAKEOVER needs no agreement with the old master, whose replication stream may be stuck in
        // the proxy
        ask(self.heir(), &["CLUSTER", "FAILOVER", "TAKEOVER"]);
        let role = |node| ask(node, &["ROLE"]).list()[0].text().to_owned();
        within(LONG, "it is replaced", || async {
            role(self.heir()) == "master" && role(self.node()) == "slave"
        })
        .await;
        // a request for a slot that has moved makes the client refresh its map
        let other = name_at(&self.cluster, 1);
        let moved = SpawnedCluster::slot_of(&other);
        there(&self.cluster, move |cluster| {
            cluster.migrate(moved, &cluster.nodes()[2]).unwrap();
        })
        .await;
        self.client
            .mutex(&other)
            .unwrap()
            .lock()
            .await
            .unwrap()
            .unlock()
            .await
            .unwrap();
        // once the client has left the old master, it queries the new one for its holds
        within(LONG, "it is left", || async { scripts() > before }).await;
    }
}

/// The master grants a lock while its replica, which does not know of it, takes over: the client
/// discards that reply.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_grants_at_last_is_not_believed() {
    let old = Old::start().await;
    let (lock, asked) = (
        old.client.mutex(&old.name).unwrap(),
        old.proxy.count(Verb::Acquire),
    );
    // the master executes requests, but its replies do not arrive
    old.proxy.black_hole(Way::ToClient);
    let asks = tokio::spawn(async move { lock.lock().await });
    within(LONG, "it is granted", || async {
        ask(old.node(), &["EXISTS", &old.name]).int() == 1
    })
    .await;
    // in case the replica already has the record
    ask(old.heir(), &["CONFIG", "SET", "replica-read-only", "no"]);
    ask(old.heir(), &["DEL", &old.name]);
    old.is_left().await;
    old.proxy.heal();
    let guard = asks.await.unwrap().unwrap();
    assert_eq!(
        ask(old.heir(), &["EXISTS", &old.name]).int(),
        1,
        "held, and only the old master knew of it"
    );
    assert_eq!(
        old.proxy.count(Verb::Acquire),
        asked + 1,
        "of the old master"
    );
    guard.unlock().await.unwrap();
    old.held.unlock().await.unwrap();
}

/// The master refuses a request that was sent before it was replaced: the client sends it to the
/// new one, without an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_refuses_at_last_is_sent_to_the_new_one() {
    // on a busy machine, the refusal may arrive after the 300 ms that the client waits for it
    for _ in 0..3 {
        let old = Old::start().await;
        let lock = old.client.mutex(&old.name).unwrap();
        old.proxy.black_hole(Way::ToServer);
        let asks = tokio::spawn(async move { lock.try_lock().await });
        within(LONG, "it is in flight", || async {
            old.client.stats().requests > 0
        })
        .await;
        old.is_left().await;
        old.proxy.heal();
        if let Ok(guard) = asks.await.unwrap() {
            let guard = guard.expect("no client has it");
            assert_eq!(ask(old.heir(), &["EXISTS", &old.name]).int(), 1);
            guard.unlock().await.unwrap();
            return old.held.unlock().await.unwrap();
        }
    }
    panic!("no refusal reaches the client");
}

/// The master is slow but alive, as its reply to a new connection shows, so the client waits longer
/// for its refusals.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_masters_late_refusal_sends_the_request_to_the_new_one() {
    let old = Old::start().await;
    let lock = old.client.mutex(&old.name).unwrap();
    // after 500 ms of silence, the client polls the cluster and leaves the master; a master that
    // hangs would have another 300 ms
    old.proxy
        .once(Verb::Acquire, Action::Slow(Duration::from_millis(1_200)));
    let asks = tokio::spawn(async move { lock.try_lock().await });
    within(LONG, "it is in flight", || async {
        old.client.stats().requests > 0
    })
    .await;
    ask(old.heir(), &["CLUSTER", "FAILOVER", "TAKEOVER"]);
    let guard = asks.await.unwrap().unwrap().expect("no client has it");
    assert_eq!(ask(old.heir(), &["EXISTS", &old.name]).int(), 1);
    guard.unlock().await.unwrap();
    old.held.unlock().await.unwrap();
}

/// The slow master has granted a lock of which its replica does not know. That reply arrives while
/// a refusal would still count, and is discarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_it_grants_late_is_not_believed_though_it_does_not_hang() {
    // on a busy machine, the client may stall so long that it takes the master for one that hangs
    for _ in 0..3 {
        let old =
            Old::start_with(LockClient::builder().command_timeout(Duration::from_secs(10))).await;
        let lock = old.client.mutex(&old.name).unwrap();
        old.keeps_to_itself().await;
        old.proxy.each(Verb::Acquire, Action::Held);
        let asks = tokio::spawn(async move { lock.lock().await });
        within(LONG, "it is granted", || async {
            ask(old.node(), &["EXISTS", &old.name]).int() == 1
        })
        .await;
        old.is_left().await;
        // longer than the client waits for a master that hangs
        tokio::time::sleep(Duration::from_millis(300)).await;
        let is_waited_for = !asks.is_finished();
        old.proxy.let_go();
        let guard = asks.await.unwrap().unwrap();
        assert_eq!(
            ask(old.heir(), &["EXISTS", &old.name]).int(),
            1,
            "held, and only the old master knew of it"
        );
        guard.unlock().await.unwrap();
        if is_waited_for {
            return old.held.unlock().await.unwrap();
        }
    }
    panic!("the client does not wait for its reply");
}
