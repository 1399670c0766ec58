//! A cluster: which node serves which slot, and the links to each node.
//!
//! The client keeps its own map. It refreshes the map when something is wrong, and rarely
//! otherwise; a redirect changes a single slot. A node that has lost its last slot is left at once,
//! even if its connections work: it may be a master that hung and was replaced, and now grants
//! locks that no other server knows of.
//!
//! - Requests in flight at a node that was left have 1 s more, or 100 ms if one of them has been
//!   without a reply for 1 s, provided that a new connection to the node works: then it is slow and
//!   does not hang.
//! - A redirect may take a node's last slot, so each new map is searched for nodes without slots. A
//!   node that only ASK has named is kept for 10 s. A node's number is reused.
//! - If no master replies, the client queries the replicas that were named last, and the nodes of
//!   the URL.
//! - Requests in doubt over two connections are over by time only: no single reply proves it.
//!
//! Decisions 19 to 21.

mod asking;
mod connect;
mod map;
mod redirect;
mod refresh;
mod told;

use std::{
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    time::Duration,
};

use nestlock_wire::{Dialer, Link, Pace, Server, clock::Instant};
use tokio::sync::{Notify, watch};

use crate::{
    store::{
        cluster::{
            map::{NodeMap, SLOTS},
            told::RedirectedSlots,
        },
        connect_options::ConnectOptions,
    },
    topology::{NodeRole, TopologyNode},
};

/// Stands for no node.
const NO_NODE: u16 = u16::MAX;
/// How long to wait for the maps of nodes.
const REPLY_TIMEOUT: Duration = Duration::from_millis(250);

/// A cluster, reached through the links to its masters.
#[derive(Debug)]
pub(super) struct Cluster {
    connect_options: Arc<ConnectOptions>,
    /// Indexed by node number. The number of a node that was left is reused.
    nodes: RwLock<Vec<Node>>,
    /// Queried for the map if no master can be reached.
    replicas: Mutex<Vec<Server>>,
    /// The number of each slot's master, or [`NO_NODE`].
    owners: Box<[AtomicU16]>,
    redirected: RedirectedSlots,
    /// Notified when the map may be stale.
    refresh_requested: Notify,
    /// Changes when slots have moved to other masters.
    moves: watch::Sender<u64>,
    /// Whether waiters use `SSUBSCRIBE` and scripts `SPUBLISH`.
    sharded: bool,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Node {
    server: Server,
    /// Its node ID.
    id: String,
    pace: Arc<Pace>,
    scripts: Option<Arc<Link>>,
    messages: Option<Arc<Link>>,
    serves: bool,
    /// When it started to serve.
    since: std::time::Instant,
    /// Whether it has a replica that may take over.
    has_replicas: bool,
    /// Whether it was left: its number is free.
    is_removed: bool,
    /// When an `ASK` last named it as the importer of a slot, while it served none.
    imports: Option<Instant>,
}

impl Node {
    fn new(server: Server) -> Self {
        Self {
            server,
            id: String::new(),
            pace: Arc::new(Pace::new()),
            scripts: None,
            messages: None,
            serves: false,
            since: std::time::Instant::now(),
            has_replicas: false,
            is_removed: false,
            imports: None,
        }
    }

    fn begins_to_serve(&mut self) {
        if !std::mem::replace(&mut self.serves, true) {
            self.since = std::time::Instant::now();
        }
    }
}

/// Returns whether the node's map has a single master. True if the node returns no map.
pub(super) async fn is_alone(link: &Link) -> bool {
    match link.slots(REPLY_TIMEOUT).await {
        Ok(slots) => NodeMap::read(&slots, "").map_or(true, |view| view.masters().len() == 1),
        Err(_) => true,
    }
}

/// Returns where a scan resumes: the index of the node, and the cursor there. `nodes` are the node
/// numbers in ascending order. If the node of `cursor` is gone, the scan starts the next one from
/// `0`: a cursor is valid only on its own node. Returns `None` if no node is left.
pub(super) fn go_on(cursor: &str, mut nodes: impl Iterator<Item = u16>) -> Option<(usize, &str)> {
    let (node, cursor) = cursor.split_once('/').unwrap_or(("0", cursor));
    let from: u16 = node.parse().unwrap_or(0);
    let mut is_its_own = false;
    let at = nodes.position(|node| {
        is_its_own = node == from;
        node >= from
    })?;
    Some((at, if is_its_own { cursor } else { "0" }))
}

impl Cluster {
    fn new(dials: &Arc<ConnectOptions>, sharded: bool) -> Self {
        Self {
            connect_options: Arc::clone(dials),
            nodes: RwLock::default(),
            replicas: Mutex::default(),
            owners: (0..SLOTS).map(|_| AtomicU16::new(NO_NODE)).collect(),
            redirected: RedirectedSlots::default(),
            refresh_requested: Notify::new(),
            moves: watch::Sender::new(0),
            sharded,
            closed: AtomicBool::new(false),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Node>> {
        self.nodes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Node>> {
        self.nodes.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of a slot's master.
    pub(super) fn owner(&self, slot: u16) -> u16 {
        self.owners[usize::from(slot)].load(Ordering::Acquire)
    }

    /// Returns the link to the master of a slot. If the slot has none, returns the link to any
    /// node, whose reply says so.
    pub(super) fn link(&self, slot: u16) -> Arc<Link> {
        let owner = self.owner(slot);
        let nodes = self.read();
        if let Some(link) = nodes
            .get(usize::from(owner))
            .and_then(|node| node.scripts.as_ref())
        {
            return Arc::clone(link);
        }
        self.refresh_requested.notify_one();
        let up = nodes
            .iter()
            .filter_map(|node| node.scripts.as_ref())
            .max_by_key(|link| link.is_up());
        if let Some(link) = up.filter(|_| owner == NO_NODE) {
            return Arc::clone(link);
        }
        drop(nodes);
        self.scripts(owner)
    }

    /// Returns the link for scripts to a node, created if there is none.
    fn scripts(&self, node: u16) -> Arc<Link> {
        let (_, link) = self.of_node(node, |node| {
            let make = || self.make(self.connect_options.for_scripts(), &node.server, &node.pace);
            Arc::clone(node.scripts.get_or_insert_with(make))
        });
        link
    }

    /// Returns where a slot's waiters subscribe: the number of its master, and the link for
    /// messages.
    pub(super) fn node_of_slot(&self, slot: u16) -> (u16, Arc<Link>) {
        self.of_node(self.owner(slot), |node| {
            let make = || {
                self.make(
                    self.connect_options.for_messages(),
                    &node.server,
                    &node.pace,
                )
            };
            Arc::clone(node.messages.get_or_insert_with(make))
        })
    }

    /// Applies `change` to the node of this number, or to the last node if the number is unused.
    /// Returns the number of the node and the result.
    fn of_node<T>(&self, node: u16, change: impl FnOnce(&mut Node) -> T) -> (u16, T) {
        let mut nodes = self.write();
        let at = usize::from(node).min(nodes.len() - 1);
        (at as u16, change(&mut nodes[at]))
    }

    fn make(&self, dial: Dialer, server: &Server, pace: &Arc<Pace>) -> Arc<Link> {
        let link = Link::lazy(
            Dialer {
                sharded: self.sharded,
                bundles: false,
                ..dial.at(server)
            },
            pace,
        );
        if self.is_closed() {
            link.abandon();
        }
        link
    }

    /// Returns a receiver that changes when slots have moved to other masters.
    pub(super) fn moves(&self) -> watch::Receiver<u64> {
        self.moves.subscribe()
    }

    /// Applies `change` to the node at an address, after adding the node and its link for scripts
    /// if they are missing. One lock covers both steps: otherwise `leave` could remove the node in
    /// between, as it does not serve yet.
    fn at<T>(&self, server: &Server, change: impl FnOnce(u16, &mut Node) -> T) -> (Arc<Link>, T) {
        let mut nodes = self.write();
        let known = nodes.iter().position(|node| node.server == *server);
        let at = known
            .or_else(|| nodes.iter().position(|node| node.is_removed))
            .unwrap_or(nodes.len());
        if known.is_none() {
            let node = Node::new(server.clone());
            match nodes.get_mut(at) {
                Some(left) => *left = node,
                None => nodes.push(node),
            }
        }
        let node = &mut nodes[at];
        node.is_removed = false;
        let make = || self.make(self.connect_options.for_scripts(), &node.server, &node.pace);
        let link = Arc::clone(node.scripts.get_or_insert_with(make));
        (link, change(at as u16, node))
    }

    /// Makes a node the master of a slot. Returns its link, and whether the master changed.
    fn gives(&self, slot: u16, to: &Server) -> (Arc<Link>, bool) {
        self.at(to, |number, node| {
            node.begins_to_serve();
            self.owners[usize::from(slot)].swap(number, Ordering::AcqRel) != number
        })
    }

    /// Applies a `MOVED` that arrived over this link. Returns the link to the slot's new master.
    fn moved(&self, slot: u16, server: &Server, over: &Arc<Link>) -> Arc<Link> {
        if Arc::ptr_eq(&self.link(slot), over) {
            self.redirected.of(slot);
        }
        let (link, has_changed) = self.gives(slot, server);
        if has_changed {
            self.moves.send_modify(|moves| *moves += 1);
        }
        link
    }

    /// Returns the link to a node that, as an `ASK` says, is importing a slot.
    fn importing(&self, server: &Server) -> Arc<Link> {
        self.at(server, |_, node| {
            node.imports = (!node.serves).then(Instant::now);
        })
        .0
    }

    /// Requests a refresh, because the map may be stale.
    pub(super) fn request_refresh(&self) {
        self.refresh_requested.notify_one();
    }

    /// Returns the masters and their replicas.
    pub(super) fn topology(&self) -> Vec<TopologyNode> {
        let mut slots: Vec<Vec<RangeInclusive<u16>>> = vec![Vec::new(); self.read().len()];
        for slot in 0..SLOTS as u16 {
            let Some(of_owner) = slots.get_mut(usize::from(self.owner(slot))) else {
                continue;
            };
            match of_owner.last_mut() {
                Some(last) if *last.end() + 1 == slot => *last = *last.start()..=slot,
                _ => of_owner.push(slot..=slot),
            }
        }
        let masters: Vec<_> = self
            .read()
            .iter()
            .zip(slots)
            .filter_map(|(node, slots)| {
                let is_connected = node.scripts.as_ref().is_some_and(|link| link.is_up());
                (!slots.is_empty()).then(|| TopologyNode {
                    address: node.server.to_string(),
                    role: NodeRole::Master,
                    slots,
                    is_connected: Some(is_connected),
                    since: Some(node.since),
                })
            })
            .collect();
        let replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        let is_master = |replica: &Server| {
            masters
                .iter()
                .any(|master| master.address == replica.to_string())
        };
        let replicas: Vec<_> = replicas
            .iter()
            .filter(|replica| !is_master(replica))
            .map(|replica| TopologyNode {
                address: replica.to_string(),
                role: NodeRole::Replica,
                slots: Vec::new(),
                is_connected: None,
                since: None,
            })
            .collect();
        masters.into_iter().chain(replicas).collect()
    }

    /// Returns whether both are known to be the same cluster, by a shared node ID.
    pub(super) fn is(&self, other: &Self) -> bool {
        if std::ptr::eq(self, other) {
            return true;
        }
        let ids: Vec<String> = self
            .read()
            .iter()
            .map(|node| node.id.clone())
            .filter(|id| !id.is_empty())
            .collect();
        other.read().iter().any(|node| ids.contains(&node.id))
    }

    /// Returns the longest of these times over all masters.
    pub(super) fn longest(&self, of_link: fn(&Link) -> Duration) -> Duration {
        let nodes = self.read();
        let links = nodes.iter().filter_map(|node| node.scripts.as_deref());
        links.map(of_link).max().unwrap_or_default()
    }

    /// Returns the links for scripts, with the numbers of their nodes: all masters, and nodes that
    /// are importing a slot.
    pub(super) fn masters(&self) -> Vec<(u16, Arc<Link>)> {
        let nodes = self.read();
        let link = |(at, node): (usize, &Node)| Some((at as u16, node.scripts.clone()?));
        nodes.iter().enumerate().filter_map(link).collect()
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Stops creating links and refreshing the map; returns the existing links.
    pub(super) fn stop(&self) -> Vec<Arc<Link>> {
        self.closed.store(true, Ordering::Release);
        self.refresh_requested.notify_one();
        let nodes = self.read();
        nodes
            .iter()
            .flat_map(|node| node.scripts.iter().chain(&node.messages))
            .cloned()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nestlock_wire::Value;

    use crate::{
        options::Config,
        store::tests::{dials, stopped},
    };

    /// Returns a map of three nodes, at these ports.
    fn view(ports: [u16; 3]) -> NodeMap {
        let range = |(n, port): (i64, u16)| {
            let (from, to) = (n * 16_384 / 3, (n + 1) * 16_384 / 3 - 1);
            let node = vec![
                Value::text("127.0.0.1"),
                Value::Integer(port.into()),
                Value::text(&format!("id{port}")),
            ];
            Value::Array(vec![
                Value::Integer(from),
                Value::Integer(to),
                Value::Array(node),
            ])
        };
        NodeMap::read(&Value::Array((0..).zip(ports).map(range).collect()), "").unwrap()
    }

    #[test]
    fn a_thousand_nodes_come_and_go() {
        let dials = Arc::new(dials(
            "redis-cluster://127.0.0.1:1",
            Config::default(),
            stopped(),
        ));
        let cluster = Cluster::new(&dials, false);
        for port in 0..1_000 {
            let ports = [port, port + 1, port + 2].map(|port| 10_000 + port);
            cluster.learn(&[view(ports)]);
            for (n, port) in ports.into_iter().enumerate() {
                let (number, link) = cluster.node_of_slot((n * SLOTS / 3) as u16);
                assert_eq!(cluster.read()[usize::from(number)].server.port, port);
                assert!(!link.is_closed());
            }
            // a node that is importing a slot
            let imports = cluster.importing(&Server::new("127.0.0.1", 9_000));
            assert_eq!(imports.host(), "127.0.0.1");
        }
        assert!(cluster.read().len() <= 6, "{}", cluster.read().len());
        assert_eq!(cluster.masters().len(), 4);
        cluster.stop().iter().for_each(|link| link.abandon());
    }

    /// A scan continues with its own cursor, or starts at the next node.
    #[test]
    fn a_scan_resumes_at_its_cursor_or_starts_at_the_next_node() {
        for (cursor, at) in [
            ("0", Some((0, "0"))),
            ("1/17", Some((0, "17"))),
            ("2/17", Some((1, "0"))),
            ("4/17", Some((1, "17"))),
            ("5/0", None),
        ] {
            assert_eq!(go_on(cursor, [1, 4].into_iter()), at, "{cursor}");
        }
    }
}
