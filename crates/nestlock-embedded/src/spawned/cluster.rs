//! A cluster of real servers.

mod migration;
mod slot;
mod view;

use std::{
    ffi::OsString,
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

pub use self::migration::Migration;
use self::view::{View, Views};
use super::{
    SpawnError, SpawnedServer,
    guard::{PATIENCE, PAUSE},
    link::Link,
    link_to,
    plan::Plan,
    side_by_side,
};
use crate::ports;

const SLOTS: u16 = 16_384;
/// More would be many processes for a slip of the finger.
const MOST: usize = 1000;
/// A lost node is noticed after half a second, and a replica may take over however old its data is. All other settings
/// are the server's own.
const ARGS: [&str; 10] = [
    "--cluster-enabled",
    "yes",
    "--cluster-config-file",
    "nodes.conf",
    "--cluster-node-timeout",
    "500",
    "--cluster-replica-validity-factor",
    "0",
    "--repl-diskless-sync-delay",
    "0",
];
/// A graceful failover that has not come about: the replica has given up by itself.
const FAILOVER_ENDS: Duration = Duration::from_secs(6);
/// Between two looks at all nodes.
const LOOK: Duration = Duration::from_millis(10);

/// A cluster of real servers of one's own: masters, which share the 16,384 slots, and replicas of them.
///
/// Each node is a [`SpawnedServer`], which can be killed, restarted and stopped; for what happens then, there is
/// [`SpawnedCluster::wait_until_settled`]. All end when this is dropped, and also when this process ends, however it does.
/// A node that is away is noticed within half a second; a replica has taken over after 1.5 s, if most masters are there.
///
/// All methods block, a start for some 2 s: that long, the servers themselves wait before they serve.
///
/// ```
/// # fn main() -> Result<(), nestlock_embedded::SpawnError> {
/// use nestlock_embedded::SpawnedCluster;
///
/// let cluster = SpawnedCluster::start(3, 3)?; // 6 processes
/// println!("{}", cluster.url()); // redis-cluster://127.0.0.1:17001,127.0.0.1:20118,...
///
/// let slot = SpawnedCluster::slot_of("order:17");
/// let master = cluster.master_of(slot)?;
/// master.kill()?;
/// cluster.wait_until_settled()?;
/// assert_ne!(cluster.master_of(slot)?.addr(), master.addr());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SpawnedCluster {
    nodes: Vec<SpawnedServer>,
    /// Of the nodes, in their order.
    ids: Vec<String>,
}

impl SpawnedCluster {
    /// Starts so many masters, and so many replicas in all, and waits until the cluster serves and the replicas have
    /// their masters' data: some 2 s.
    ///
    /// `start(3, 3)` are six processes, each master with one replica. Replicas are dealt out in turn: of `start(3, 4)`, the
    /// first master has two. To survive the loss of a master, a cluster must have three of them.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: there is no master, or there are more than 1,000 nodes. [`SpawnError::NotFound`]: there is
    /// no server program. All others say why it does not run.
    pub fn start(masters: usize, replicas: usize) -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>(masters, replicas, [])
    }

    /// Starts a cluster whose nodes have further command line arguments: `["--cluster-require-full-coverage", "no"]`.
    ///
    /// These count more than those that it sets itself: `--cluster-node-timeout 500`,
    /// `--cluster-replica-validity-factor 0`, `--repl-diskless-sync-delay 0`. They may not change the port, nor ask for
    /// TLS or a password.
    ///
    /// # Errors
    /// Those of [`SpawnedCluster::start`]. An argument that the server does not know is [`SpawnError::Ended`].
    pub fn start_with<A>(masters: usize, replicas: usize, args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        let count = masters.saturating_add(replicas);
        if masters == 0 {
            return Err(invalid("a cluster has at least one master"));
        }
        if count > MOST {
            return Err(invalid(format!("{count} nodes, and a cluster has {MOST} at most")));
        }
        let args = ARGS.into_iter().map(OsString::from).chain(args.into_iter().map(Into::into));
        let plan = Plan::new(args.collect())?;
        let start = || SpawnedServer::start_at(&plan, ports::free_for_a_node);
        let nodes = side_by_side((0..count).map(|_| start))?;
        let ids = nodes.iter().map(|node| Ok(link_to(node)?.call("CLUSTER MYID")?.text()));
        let ids = ids.collect::<Result<_, SpawnError>>()?;
        let cluster = Self { nodes, ids };
        cluster.join(masters)?;
        Ok(cluster)
    }

    /// Makes one cluster of the nodes, the first of which become masters.
    fn join(&self, masters: usize) -> Result<(), SpawnError> {
        let mut links = self.nodes.iter().map(link_to).collect::<Result<Vec<_>, _>>()?;
        for (n, link) in links.iter_mut().enumerate().take(masters) {
            let share = |n: usize| n * usize::from(SLOTS) / masters;
            let (first, last) = (share(n), share(n + 1) - 1);
            match link.call(&format!("CLUSTER ADDSLOTSRANGE {first} {last}")) {
                // before 7.0
                Err(SpawnError::Refused { .. }) => {
                    let slots: Vec<_> = (first..=last).map(|slot| slot.to_string()).collect();
                    link.call(&format!("CLUSTER ADDSLOTS {}", slots.join(" ")))?;
                }
                outcome => _ = outcome?,
            }
            link.call(&format!("CLUSTER SET-CONFIG-EPOCH {}", n + 1))?;
        }
        for (n, link) in links.iter_mut().enumerate() {
            for other in &self.nodes[n + 1..] {
                link.call(&format!("CLUSTER MEET 127.0.0.1 {}", other.addr().port()))?;
            }
        }
        self.until(LOOK, "all nodes know each other", || {
            let meeting = |link: &mut Link| match view::nodes(link) {
                Ok(nodes) if nodes.len() == self.nodes.len() => nodes.iter().any(|node| node.is("handshake")),
                _ => true,
            };
            links.iter_mut().position(meeting).map(|n| format!("{} does not", self.nodes[n].addr()))
        })?;
        for (n, link) in links.iter_mut().enumerate().skip(masters) {
            link.call(&format!("CLUSTER REPLICATE {}", self.ids[(n - masters) % masters]))?;
        }
        self.until(LOOK, "the cluster serves", || {
            let views = self.views();
            let away = views.of.iter().find_map(|(_, _, view)| view.as_ref().err().map(ToString::to_string));
            away.or_else(|| views.unsettled())
        })
    }

    /// `redis-cluster://127.0.0.1:PORT,127.0.0.1:PORT,...`: all nodes, the same whatever happens to them.
    #[must_use]
    pub fn url(&self) -> String {
        let addrs: Vec<_> = self.addrs().iter().map(ToString::to_string).collect();
        format!("redis-cluster://{}", addrs.join(","))
    }

    /// The addresses of all nodes, in the order of [`SpawnedCluster::nodes`].
    #[must_use]
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(SpawnedServer::addr).collect()
    }

    /// All nodes: first those that were masters at the start, then those that were replicas, the first one of the first
    /// master, and so on.
    #[must_use]
    pub fn nodes(&self) -> &[SpawnedServer] {
        &self.nodes
    }

    /// The slot of a key. If it has `{..}` with something inside, that decides, and nothing else.
    #[must_use]
    pub fn slot_of(key: impl AsRef<[u8]>) -> u16 {
        slot::slot_of(key.as_ref())
    }

    /// The master of a slot, as the nodes that answer say; if they do not agree, the one that the cluster will come to. It
    /// need not run any more: nobody has taken over yet.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: no such slot. [`SpawnError::Unsettled`]: no node answers, or the slot has no master.
    pub fn master_of(&self, slot: u16) -> Result<&SpawnedServer, SpawnError> {
        check(slot)?;
        let views = self.views();
        let owner = views.owner(slot).and_then(|id| self.by_id(id));
        owner.ok_or_else(|| SpawnError::Unsettled { what: format!("nobody has slot {slot}"), view: views.to_string() })
    }

    /// The masters that have slots, in the order of [`SpawnedCluster::nodes`]; those of which [`SpawnedCluster::master_of`]
    /// tells one.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`]: no node answers.
    pub fn masters(&self) -> Result<Vec<&SpawnedServer>, SpawnError> {
        let views = self.views();
        let owners: std::collections::BTreeSet<_> = (0..SLOTS).filter_map(|slot| views.owner(slot)).collect();
        if owners.is_empty() {
            return Err(SpawnError::Unsettled { what: "nobody has any slots".into(), view: views.to_string() });
        }
        let nodes = self.nodes.iter().zip(&self.ids).filter(|(_, id)| owners.contains(&***id));
        Ok(nodes.map(|(node, _)| node).collect())
    }

    /// The replicas of a master, as they say themselves: those that answer.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: that is none of this cluster's nodes.
    pub fn replicas_of(&self, master: &SpawnedServer) -> Result<Vec<&SpawnedServer>, SpawnError> {
        let (id, views) = (self.id(master)?, self.views());
        let follows = |view: &View| view.myself().is_some_and(|node| node.master.as_deref() == Some(id));
        Ok(views.here().filter(|(_, _, view)| follows(view)).filter_map(|(_, id, _)| self.by_id(id)).collect())
    }

    /// Has a replica take over from its master, which runs (`CLUSTER FAILOVER`): nothing is lost. Waits until all agree,
    /// and the old master has become a replica; returns the new one.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: it has no replica, or is none of this cluster's nodes. [`SpawnError::Refused`]: it has
    /// failed. [`SpawnError::Unsettled`]: not done within 30 s.
    pub fn failover(&self, master: &SpawnedServer) -> Result<&SpawnedServer, SpawnError> {
        let Some(replica) = self.replicas_of(master)?.into_iter().next() else {
            return Err(invalid(format!("{} has no replica that answers", master.addr())));
        };
        let mut told: Option<Instant> = None;
        let mut refusal = None;
        let outcome = self.until(PAUSE, "a replica takes over", || {
            let views = self.views();
            let of = |node: &SpawnedServer| views.here().find(|(other, _, _)| other.addr() == node.addr());
            let is_master = |node| of(node).and_then(|(_, _, view)| view.myself()).map(|node| node.master.is_none());
            if is_master(replica) == Some(true) {
                return if is_master(master) == Some(true) { Some("two masters".into()) } else { views.unsettled() };
            }
            if told.is_none_or(|told| told.elapsed() > FAILOVER_ENDS) {
                told = Some(Instant::now());
                if let Err(error) = link_to(replica).and_then(|mut link| link.call("CLUSTER FAILOVER")) {
                    refusal = Some(error);
                    return None;
                }
            }
            Some(format!("{} is a replica", replica.addr()))
        });
        refusal.map_or(outcome, Err).map(|()| replica)
    }

    /// Moves a slot with its keys to another master, and waits until all agree. Nothing happens if it is there already.
    ///
    /// # Errors
    /// Those of [`SpawnedCluster::begin_migration`], [`Migration::move_keys`] and [`Migration::finish`].
    pub fn migrate(&self, slot: u16, to: &SpawnedServer) -> Result<(), SpawnError> {
        if self.master_of(slot)?.addr() == to.addr() {
            return Ok(());
        }
        self.begin_migration(slot, to)?.finish()
    }

    /// Begins to move a slot to another master, and moves no key yet: what is between, a test may want to see.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: no such slot, `to` is no master of this cluster, or has the slot already. The others: a
    /// node does not answer, or refuses.
    pub fn begin_migration<'a>(&'a self, slot: u16, to: &SpawnedServer) -> Result<Migration<'a>, SpawnError> {
        let (from, id) = (self.master_of(slot)?, self.id(to)?);
        let Some(to) = self.by_id(id) else { return Err(not_ours(to)) };
        if from.addr() == to.addr() {
            return Err(invalid(format!("{} has slot {slot} already", to.addr())));
        }
        if View::of(to)?.myself().is_none_or(|node| node.master.is_some()) {
            return Err(invalid(format!("{} is no master", to.addr())));
        }
        Migration::begin(self, slot, from, to)
    }

    /// Waits until the nodes that answer agree on who is there, and who has which slots, until all of these masters
    /// answer, and each replica has its master's data. That is so after a start; after a master's end, when a replica
    /// has taken over; after a restart, when the node is back.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`]: not within 30 s.
    pub fn wait_until_settled(&self) -> Result<(), SpawnError> {
        self.until(LOOK, "the nodes agree", || self.views().unsettled())
    }

    /// What each node says of all nodes, for people: in the message of a test that fails.
    #[must_use]
    pub fn view(&self) -> String {
        self.views().to_string()
    }

    fn views(&self) -> Views<'_> {
        let nodes = self.nodes.iter().zip(&self.ids);
        Views { of: nodes.map(|(node, id)| (node, &**id, View::of(node))).collect() }
    }

    /// Waits until nothing is in the way.
    fn until(
        &self,
        pause: Duration,
        what: &str,
        mut obstacle: impl FnMut() -> Option<String>,
    ) -> Result<(), SpawnError> {
        let start = Instant::now();
        while let Some(obstacle) = obstacle() {
            if start.elapsed() > PATIENCE {
                return Err(self.gives_up(what, &obstacle));
            }
            thread::sleep(pause);
        }
        Ok(())
    }

    fn gives_up(&self, what: &str, obstacle: &str) -> SpawnError {
        SpawnError::Unsettled { what: format!("not within {PATIENCE:?}: {what}; {obstacle}"), view: self.view() }
    }

    fn by_id(&self, id: &str) -> Option<&SpawnedServer> {
        self.ids.iter().position(|own| own == id).map(|n| &self.nodes[n])
    }

    fn id(&self, node: &SpawnedServer) -> Result<&str, SpawnError> {
        let found = self.nodes.iter().position(|own| own.addr() == node.addr());
        found.map(|n| &*self.ids[n]).ok_or_else(|| not_ours(node))
    }
}

fn check(slot: u16) -> Result<(), SpawnError> {
    if slot < SLOTS { Ok(()) } else { Err(invalid(format!("slot {slot}, and the last one is {}", SLOTS - 1))) }
}

fn invalid(what: impl Into<String>) -> SpawnError {
    SpawnError::Invalid { what: what.into() }
}

fn not_ours(node: &SpawnedServer) -> SpawnError {
    invalid(format!("{} is none of this cluster's nodes", node.addr()))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn a_node_needs_a_second_port_for_its_bus() {
        let plan = Plan::new(ARGS.map(OsString::from).to_vec()).unwrap();
        let taken = ports::free_for_a_node().unwrap();
        let bus = TcpListener::bind((Ipv4Addr::LOCALHOST, taken + 10_000)).unwrap();
        assert!(bus.local_addr().unwrap().port() < 32_768);
        let mut asked = 0;
        let node = SpawnedServer::start_at(&plan, || {
            asked += 1;
            if asked == 1 { Ok(taken) } else { ports::free_for_a_node() }
        });
        assert_ne!(node.unwrap().addr().port(), taken);
        assert_eq!(asked, 2);
    }
}
