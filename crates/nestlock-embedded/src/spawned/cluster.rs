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
use self::{
    slot::SLOTS,
    view::{View, Views},
};
use super::{
    SpawnError, SpawnedServer,
    guard::{PATIENCE, PAUSE},
    link::Link,
    link_to,
    plan::Plan,
    side_by_side,
};
use crate::ports;

/// The maximum number of nodes. A larger number is likely a typo, and would start many processes.
const MOST: usize = 1000;
/// The nodes detect the loss of a node after 500 ms, and a replica may take over however old its
/// data is. All other settings are the server's defaults.
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
/// How long a replica tries a graceful failover before it gives up. Then it is requested again.
const FAILOVER_ENDS: Duration = Duration::from_secs(6);
/// The pause between two polls of all nodes.
const LOOK: Duration = Duration::from_millis(10);

/// A cluster of real servers: masters, which share the 16,384 slots, and their replicas.
///
/// Each node is a [`SpawnedServer`], which can be killed, restarted and stopped; then call
/// [`SpawnedCluster::wait_until_settled`]. All nodes end when this is dropped, and also when this
/// process ends, however it ends. The loss of a node is detected within 500 ms; a replica has taken
/// over after 1.5 s, if a majority of the masters is up.
///
/// All methods block. A start takes about 2 s: the servers themselves wait this long before they
/// serve requests.
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
    /// The ids of the nodes, in the order of `nodes`.
    ids: Vec<String>,
}

impl SpawnedCluster {
    /// Starts `masters` masters and a total of `replicas` replicas. Waits until the cluster serves
    /// requests and the replicas have their masters' data, which takes about 2 s.
    ///
    /// `start(3, 3)` starts 6 processes; each master has one replica. Replicas are assigned
    /// round-robin: with `start(3, 4)`, the first master has two. A cluster needs at least three
    /// masters to survive the loss of one.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if there is no master, or there are more than 1,000 nodes.
    /// [`SpawnError::NotFound`] if there is no server program. All other errors say why a server
    /// does not run.
    pub fn start(masters: usize, replicas: usize) -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>(masters, replicas, [])
    }

    /// Starts a cluster whose nodes have additional command line arguments, such as
    /// `["--cluster-require-full-coverage", "no"]`.
    ///
    /// These override the arguments that every node has: `--cluster-node-timeout 500`,
    /// `--cluster-replica-validity-factor 0`, `--repl-diskless-sync-delay 0`. They may not change
    /// the port, nor require TLS or a password.
    ///
    /// # Errors
    /// Those of [`SpawnedCluster::start`]. [`SpawnError::Ended`] if the server does not know an
    /// argument.
    pub fn start_with<A>(masters: usize, replicas: usize, args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        let count = masters.saturating_add(replicas);
        if masters == 0 {
            return Err(invalid("a cluster needs at least one master"));
        }
        if count > MOST {
            return Err(invalid(format!(
                "{count} nodes: a cluster may have at most {MOST}"
            )));
        }
        let args = ARGS
            .into_iter()
            .map(OsString::from)
            .chain(args.into_iter().map(Into::into));
        let plan = Plan::new(args.collect())?;
        let start = || SpawnedServer::start_at(&plan, ports::free_for_a_node);
        let nodes = side_by_side((0..count).map(|_| start))?;
        let ids = nodes
            .iter()
            .map(|node| Ok(link_to(node)?.call("CLUSTER MYID")?.text()));
        let ids = ids.collect::<Result<_, SpawnError>>()?;
        let cluster = Self { nodes, ids };
        cluster.join(masters)?;
        Ok(cluster)
    }

    /// Joins the nodes to a cluster. The first `masters` of them become masters.
    fn join(&self, masters: usize) -> Result<(), SpawnError> {
        let mut links = self
            .nodes
            .iter()
            .map(link_to)
            .collect::<Result<Vec<_>, _>>()?;
        for (n, link) in links.iter_mut().enumerate().take(masters) {
            let share = |n: usize| n * usize::from(SLOTS) / masters;
            let (first, last) = (share(n), share(n + 1) - 1);
            match link.call(&format!("CLUSTER ADDSLOTSRANGE {first} {last}")) {
                // before 7.0, there is no ADDSLOTSRANGE
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
                Ok(nodes) if nodes.len() == self.nodes.len() => {
                    nodes.iter().any(|node| node.is("handshake"))
                }
                _ => true,
            };
            links
                .iter_mut()
                .position(meeting)
                .map(|n| format!("{} does not", self.nodes[n].addr()))
        })?;
        for (n, link) in links.iter_mut().enumerate().skip(masters) {
            link.call(&format!(
                "CLUSTER REPLICATE {}",
                self.ids[(n - masters) % masters]
            ))?;
        }
        self.until(LOOK, "the cluster serves", || {
            let views = self.views();
            let away = views
                .of
                .iter()
                .find_map(|(_, _, view)| view.as_ref().err().map(ToString::to_string));
            away.or_else(|| views.unsettled())
        })
    }

    /// Returns `redis-cluster://127.0.0.1:PORT,127.0.0.1:PORT,...` with all nodes. It never
    /// changes.
    #[must_use]
    pub fn url(&self) -> String {
        let addrs: Vec<_> = self.addrs().iter().map(ToString::to_string).collect();
        format!("redis-cluster://{}", addrs.join(","))
    }

    /// Returns the addresses of all nodes, in the order of [`SpawnedCluster::nodes`].
    #[must_use]
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(SpawnedServer::addr).collect()
    }

    /// Returns all nodes: first the initial masters, then the initial replicas, of which the first
    /// belongs to the first master, and so on.
    #[must_use]
    pub fn nodes(&self) -> &[SpawnedServer] {
        &self.nodes
    }

    /// Returns the slot of a key. If the key contains a non-empty `{..}`, only that part is hashed.
    #[must_use]
    pub fn slot_of(key: impl AsRef<[u8]>) -> u16 {
        slot::slot_of(key.as_ref())
    }

    /// Returns the master of a slot, as reported by the nodes that reply. If they disagree, the
    /// claim with the highest epoch wins, as it will in the cluster. The master may be down, if no
    /// replica has taken over yet.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if there is no such slot. [`SpawnError::Unsettled`] if no node
    /// replies, or the slot has no master.
    pub fn master_of(&self, slot: u16) -> Result<&SpawnedServer, SpawnError> {
        check(slot)?;
        let views = self.views();
        let owner = views.owner(slot).and_then(|id| self.by_id(id));
        owner.ok_or_else(|| SpawnError::Unsettled {
            what: format!("no node owns slot {slot}"),
            view: views.to_string(),
        })
    }

    /// Returns the masters that own slots, by the rule of [`SpawnedCluster::master_of`] and in the
    /// order of [`SpawnedCluster::nodes`].
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`] if no node replies, or no slot has a master.
    pub fn masters(&self) -> Result<Vec<&SpawnedServer>, SpawnError> {
        let views = self.views();
        let owners: std::collections::BTreeSet<_> =
            (0..SLOTS).filter_map(|slot| views.owner(slot)).collect();
        if owners.is_empty() {
            return Err(SpawnError::Unsettled {
                what: "no node owns any slots".into(),
                view: views.to_string(),
            });
        }
        let nodes = self
            .nodes
            .iter()
            .zip(&self.ids)
            .filter(|(_, id)| owners.contains(&***id));
        Ok(nodes.map(|(node, _)| node).collect())
    }

    /// Returns the replicas of a master: the nodes that reply and report this master.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if `master` is not a node of this cluster.
    pub fn replicas_of(&self, master: &SpawnedServer) -> Result<Vec<&SpawnedServer>, SpawnError> {
        let (id, views) = (self.id(master)?, self.views());
        let follows = |view: &View| {
            view.myself()
                .is_some_and(|node| node.master.as_deref() == Some(id))
        };
        Ok(views
            .here()
            .filter(|(_, _, view)| follows(view))
            .filter_map(|(_, id, _)| self.by_id(id))
            .collect())
    }

    /// Makes a replica take over from its running master (`CLUSTER FAILOVER`), without loss of
    /// data. Waits until all nodes agree and the old master has become a replica. Returns the new
    /// master.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if the master has no replica that replies, or is not a node of this
    /// cluster. [`SpawnError::Refused`] if the replica refuses the failover.
    /// [`SpawnError::Unsettled`] if it takes more than 30 s.
    pub fn failover(&self, master: &SpawnedServer) -> Result<&SpawnedServer, SpawnError> {
        let Some(replica) = self.replicas_of(master)?.into_iter().next() else {
            return Err(invalid(format!(
                "{} has no replica that replies",
                master.addr()
            )));
        };
        let mut told: Option<Instant> = None;
        let mut refusal = None;
        let outcome = self.until(PAUSE, "a replica takes over", || {
            let views = self.views();
            let of = |node: &SpawnedServer| {
                views
                    .here()
                    .find(|(other, _, _)| other.addr() == node.addr())
            };
            let is_master = |node| {
                of(node)
                    .and_then(|(_, _, view)| view.myself())
                    .map(|node| node.master.is_none())
            };
            if is_master(replica) == Some(true) {
                return if is_master(master) == Some(true) {
                    Some("two masters".into())
                } else {
                    views.unsettled()
                };
            }
            if told.is_none_or(|told| told.elapsed() > FAILOVER_ENDS) {
                told = Some(Instant::now());
                if let Err(error) =
                    link_to(replica).and_then(|mut link| link.call("CLUSTER FAILOVER"))
                {
                    refusal = Some(error);
                    return None;
                }
            }
            Some(format!("{} is a replica", replica.addr()))
        });
        refusal.map_or(outcome, Err).map(|()| replica)
    }

    /// Waits until the nodes that reply agree on the members of the cluster and on the owners of
    /// the slots, all owners of slots reply, and each replica has its master's data. After the loss
    /// of a master this is so when a replica has taken over; after a restart, when the node is
    /// back.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`] if it takes more than 30 s.
    pub fn wait_until_settled(&self) -> Result<(), SpawnError> {
        self.until(LOOK, "the nodes agree", || self.views().unsettled())
    }

    /// Returns what each node reports about all nodes, as text for the message of a failed test.
    #[must_use]
    pub fn view(&self) -> String {
        self.views().to_string()
    }

    fn views(&self) -> Views<'_> {
        let nodes = self.nodes.iter().zip(&self.ids);
        Views {
            of: nodes
                .map(|(node, id)| (node, &**id, View::of(node)))
                .collect(),
        }
    }

    /// Polls until `obstacle` returns `None`. Fails after 30 s.
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
        SpawnError::Unsettled {
            what: format!("not within {PATIENCE:?}: {what}; {obstacle}"),
            view: self.view(),
        }
    }

    fn by_id(&self, id: &str) -> Option<&SpawnedServer> {
        self.ids
            .iter()
            .position(|own| own == id)
            .map(|n| &self.nodes[n])
    }

    fn id(&self, node: &SpawnedServer) -> Result<&str, SpawnError> {
        let found = self.nodes.iter().position(|own| own.addr() == node.addr());
        found.map(|n| &*self.ids[n]).ok_or_else(|| not_ours(node))
    }
}

fn check(slot: u16) -> Result<(), SpawnError> {
    if slot < SLOTS {
        Ok(())
    } else {
        Err(invalid(format!(
            "there is no slot {slot}: the last one is {}",
            SLOTS - 1
        )))
    }
}

fn invalid(what: impl Into<String>) -> SpawnError {
    SpawnError::Invalid { what: what.into() }
}

fn not_ours(node: &SpawnedServer) -> SpawnError {
    invalid(format!("{} is not a node of this cluster", node.addr()))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn a_node_needs_a_second_port_for_its_bus() {
        let plan = Plan::new(ARGS.map(OsString::from).to_vec()).unwrap();
        // another test may take the port in between
        let take = |_| {
            let port = ports::free_for_a_node().unwrap();
            let bus = TcpListener::bind((Ipv4Addr::LOCALHOST, port + 10_000));
            Some((port, bus.ok()?))
        };
        let (taken, bus) = (0..100).find_map(take).expect("a free port");
        assert!(bus.local_addr().unwrap().port() < 32_768);
        let mut asked = 0;
        let node = SpawnedServer::start_at(&plan, || {
            asked += 1;
            if asked == 1 {
                Ok(taken)
            } else {
                ports::free_for_a_node()
            }
        });
        assert_ne!(node.unwrap().addr().port(), taken);
        assert_eq!(asked, 2);
    }
}
