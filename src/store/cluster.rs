//! A cluster: which node serves which slot, and the links to each node.
//!
//! The client keeps its own map. It refreshes the map when something is wrong, and rarely
//! otherwise; a redirect changes a single slot. A node that has lost its last slot is left at once,
//! even if its connections work: it may be a master that hung and was replaced, and now grants
//! locks that no other server knows of.

mod asking;
mod map;
mod redirect;
mod told;

use std::{
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    time::Duration,
};

use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};
use nestlock_wire::{
    CloseOnDrop, Dialer, Failure, Link, Pace, Request, Server, Until, clock::Instant, log,
};
use tokio::{
    sync::{Notify, watch},
    time::{sleep, timeout},
};

use crate::{
    error::{Error, Result, StoreError, StoreErrorKind},
    options::Messages,
    store::{
        cluster::{
            asking::{AWAY, RefreshSchedule, Trouble},
            map::{NodeMap, SLOTS},
            told::RedirectedSlots,
        },
        connect_options::ConnectOptions,
        probe,
    },
    topology::{NodeRole, TopologyNode},
};

/// Stands for no node.
const NO_NODE: u16 = u16::MAX;
/// How often to check whether a node is away.
const POLL: Duration = Duration::from_millis(100);
/// A node that leaves a request without a reply for this long counts as unreachable.
const SILENCE_LIMIT: Duration = Duration::from_millis(500);
/// How long to wait for the maps of nodes.
const REPLY_TIMEOUT: Duration = Duration::from_millis(250);
/// How many nodes to query for their maps at once.
const MAX_PROBED: usize = 5;
/// How long a connect waits for the other nodes once one of them can be reached.
const OTHERS: Duration = Duration::from_millis(500);
/// How long to keep a node without slots after an `ASK` named it as an importer.
const IMPORTS: Duration = Duration::from_secs(10);

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

/// Returns whether a node can be reached and replies in time.
fn is_reachable(link: &Link) -> bool {
    link.is_up()
        && link
            .waits_since()
            .is_none_or(|since| since.elapsed() < SILENCE_LIMIT)
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
    /// Connects; any of the seeds is enough. Must run on the client's own runtime.
    pub(super) async fn connect(
        dials: &Arc<ConnectOptions>,
        seeds: &[Server],
    ) -> Result<Arc<Self>> {
        let refuse = |reason: &str| {
            Err(Error::InvalidConfig {
                reason: reason.into(),
            })
        };
        if dials.endpoint.wire(&dials.config).is_fred() {
            return refuse(
                "fred's client cannot be used with a cluster (it follows redirects by itself); leave out wire=fred",
            );
        }
        let limit = dials.config.connect_timeout;
        let late = |_| Err(dials.unreachable(dials.timed_out()));
        let (view, sharded) = timeout(limit, Self::query_seeds(dials, seeds))
            .await
            .unwrap_or_else(late)?;
        let sharded = match dials.config.messages {
            Messages::Auto => sharded,
            Messages::Sharded if !sharded => {
                return refuse(
                    "the servers lack sharded pub/sub, or the user may not run PUBSUB SHARDNUMSUB; use Messages::Classic",
                );
            }
            Messages::Sharded => true,
            Messages::Classic => false,
        };
        let cluster = Arc::new(Self::new(dials, sharded));
        cluster.learn(&[view]);
        let links: Vec<_> = cluster
            .read()
            .iter()
            .filter_map(|node| node.scripts.clone())
            .collect();
        let any =
            futures_util::future::select_all(links.iter().map(|link| Box::pin(link.wait_up())));
        if timeout(limit, any).await.is_err() {
            cluster.stop().iter().for_each(|link| link.abandon());
            let each: Vec<String> = links
                .iter()
                .map(|link| link.not_connected().said())
                .collect();
            let why = format!(
                "no node can be reached at the address that the cluster announces: {}",
                each.join("; ")
            );
            return Err(dials.unreachable(StoreError::new(
                StoreErrorKind::Unavailable,
                false,
                why,
            )));
        }
        let _ = timeout(
            OTHERS.min(limit),
            join_all(links.iter().map(|link| link.wait_up())),
        )
        .await;
        dials
            .own
            .spawn(Self::keep_refreshed(Arc::downgrade(&cluster)));
        Ok(cluster)
    }

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

    /// Queries all seeds at once, and returns the first map.
    async fn query_seeds(dials: &Arc<ConnectOptions>, seeds: &[Server]) -> Result<(NodeMap, bool)> {
        let mut asked: FuturesUnordered<_> = seeds
            .iter()
            .map(|seed| Self::query_seed(dials, seed, true))
            .collect();
        let (mut said, mut kind) = (Vec::new(), StoreErrorKind::Unavailable);
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(known) => return Ok(known),
                Err((seed, error)) => {
                    let text = error.said();
                    if text.contains("cluster support disabled") {
                        let reason =
                            format!("{seed} is not a node of a cluster; connect with redis://");
                        return Err(Error::InvalidConfig { reason });
                    }
                    // Valkey 9 may have several databases in a cluster; other servers reject
                    // `SELECT`
                    let refusals = [
                        "SELECT is not allowed in cluster mode",
                        "DB index is out of range",
                    ];
                    if refusals.into_iter().any(|refusal| text.contains(refusal)) {
                        let reason = format!(
                            "the cluster of {seed} has no such database ({text}); a cluster has one database, unless its \
                             `cluster-databases` is higher: leave the number out of the URL"
                        );
                        return Err(Error::InvalidConfig { reason });
                    }
                    kind = error.kind();
                    said.push(format!("{seed}: {text}"));
                }
            }
        }
        Err(dials.unreachable(StoreError::new(kind, false, said.join("; "))))
    }

    /// Returns a node's map, and whether the node supports sharded messages. With `is_first`, also
    /// checks that it runs scripts.
    async fn query_seed<'s>(
        dials: &Arc<ConnectOptions>,
        seed: &'s Server,
        is_first: bool,
    ) -> Result<(NodeMap, bool), (&'s Server, StoreError)> {
        let failed = |error: StoreError| (seed, error);
        let mut dialer = dials.for_scripts().at(seed);
        if dials.endpoint.has_seed(seed) {
            // verify it by the configured address, as at the first connect: an announced name may
            // have changed since, and the new one is learned here
            drop(std::mem::take(&mut dialer.settings.server.announced));
        }
        let connected = dialer.connect(dials.config.connect_timeout).await;
        let ends = CloseOnDrop::new(connected.map_err(|refused| failed(refused.error))?);
        let limit = dials.config.command_timeout();
        let ask = async |words: &[&str]| {
            ends.connection
                .call(Request::Words(words), Until::new(Instant::now(), limit))
                .await
        };
        let view = ask(&["CLUSTER", "SLOTS"]).await.map_err(StoreError::from);
        let view = view
            .and_then(|slots| NodeMap::read(&slots, &seed.host))
            .map_err(failed);
        if is_first && view.is_ok() {
            probe::runs_scripts(&ends.connection, &dials.config)
                .await
                .map_err(failed)?;
        }
        let sharded = match &view {
            // servers before Redis 7.0 reject this command
            Ok(_) => !matches!(
                ask(&["PUBSUB", "SHARDNUMSUB"]).await,
                Err(Failure::Refused(_))
            ),
            Err(_) => false,
        };
        Ok((view?, sharded))
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

    /// Merges the maps of several nodes. For each slot, the master that most maps name counts. A
    /// slot keeps its master if the maps are tied, or if its previous master redirected it there a
    /// moment ago and the new one is not known to be down.
    fn learn(&self, views: &[NodeMap]) {
        // before any link is made; a node that a redirect names before the map does is verified by
        // its address until then
        let announced = &self.connect_options.endpoint.server.announced;
        announced.replace(map::names(views));
        let (mut changed, mut is_older) = (false, false);
        let is_down = |node: &Node| node.scripts.as_ref().is_some_and(|link| link.is_down());
        let known: Vec<_> = self
            .read()
            .iter()
            .map(|node| (node.server.clone(), is_down(node)))
            .collect();
        let told = self.redirected.lately();
        for slot in 0..SLOTS as u16 {
            let (now, is_down) = known
                .get(usize::from(self.owner(slot)))
                .map_or((None, true), |(now, down)| (Some(now), *down));
            let Some(said) = map::most(views, slot, now).filter(|said| Some(*said) != now) else {
                continue;
            };
            if told.contains_key(&slot) && !is_down {
                is_older = true;
                continue;
            }
            changed |= self.gives(slot, said).1;
        }
        if is_older {
            self.request_refresh();
        }
        for node in self.write().iter_mut() {
            let mut of_it = views
                .iter()
                .filter_map(|view| view.master(&node.server))
                .peekable();
            if let Some(master) = of_it.peek() {
                master.id.clone_into(&mut node.id);
                node.has_replicas = of_it.any(|master| master.has_replicas);
            }
        }
        let replicas = map::replicas(views);
        if !replicas.is_empty() {
            *self.replicas.lock().unwrap_or_else(PoisonError::into_inner) = replicas;
        }
        let is_over = self.leave();
        if changed || is_over {
            self.moves.send_modify(|moves| *moves += 1);
        }
        if is_over {
            // other servers may have the records of its locks now: check all holds again
            self.connect_options.epochs.recheck_all();
        }
    }

    /// Leaves the nodes that no longer serve a slot. Redirects may have moved their last slots
    /// before the map did. Returns whether there were any.
    fn leave(&self) -> bool {
        let mut nodes = self.write();
        let mut busy = vec![false; nodes.len()];
        for owner in &self.owners {
            if let Some(busy) = busy.get_mut(usize::from(owner.load(Ordering::Acquire))) {
                *busy = true;
            }
        }
        let mut left = Vec::new();
        for (node, busy) in nodes.iter_mut().zip(busy) {
            if busy {
                node.begins_to_serve();
                node.imports = None;
                continue;
            }
            node.serves = false;
            if node.imports.is_none_or(|since| since.elapsed() >= IMPORTS) {
                node.is_removed = true;
                left.push((node.scripts.take(), node.messages.take()));
            }
        }
        drop(nodes);
        let mut is_over = false;
        for (scripts, messages) in left {
            if let Some(scripts) = scripts {
                log::later!(DEBUG, host = scripts.host(); "a node no longer serves any slot; closing its connections");
                scripts.leave();
                is_over = true;
            }
            if let Some(messages) = messages {
                messages.abandon();
                is_over = true;
            }
        }
        is_over
    }

    /// Returns what is wrong, or `None` if all masters reply and all slots have one.
    fn trouble(&self) -> Option<Trouble> {
        let nodes = self.read();
        let away = nodes.iter().filter(|node| {
            node.serves
                && node
                    .scripts
                    .as_deref()
                    .is_some_and(|link| !is_reachable(link))
        });
        let no_heir = || {
            self.owners
                .iter()
                .any(|owner| owner.load(Ordering::Acquire) == NO_NODE)
                .then_some(Trouble::Stays)
        };
        away.map(|node| {
            if node.has_replicas {
                Trouble::Passes
            } else {
                Trouble::Stays
            }
        })
        .min()
        .or_else(no_heir)
    }

    /// Keeps the map fresh until the client ends.
    async fn keep_refreshed(cluster: Weak<Self>) {
        let (mut asking, mut was_rung) = (RefreshSchedule::new(Instant::now()), false);
        loop {
            let Some(cluster) = cluster.upgrade().filter(|cluster| !cluster.is_closed()) else {
                return;
            };
            let rung = timeout(POLL, cluster.refresh_requested.notified())
                .await
                .is_ok();
            was_rung |= rung;
            let trouble = cluster.trouble().or(was_rung.then_some(Trouble::Stays));
            let pause = asking.pause(trouble, Instant::now());
            if !pause.is_zero() {
                if rung {
                    sleep(pause.min(AWAY)).await;
                }
                if pause > AWAY || !rung {
                    continue;
                }
            }
            was_rung = false;
            asking.asked(trouble, Instant::now());
            let views = cluster.query_nodes().await;
            if !views.is_empty() {
                cluster.learn(&views);
            }
            asking.refreshed(*cluster.moves.borrow());
        }
    }

    /// Queries up to [`MAX_PROBED`] reachable nodes, and returns their maps once more than half
    /// have replied, or at the timeout. If none replied, queries all known addresses.
    async fn query_nodes(&self) -> Vec<NodeMap> {
        let mut fit: Vec<(Server, Arc<Link>)> = self
            .read()
            .iter()
            .filter_map(|node| Some((node.server.clone(), node.scripts.clone()?)))
            .filter(|(_, link)| is_reachable(link))
            .collect();
        if fit.is_empty() {
            return self.query_unknown_nodes().await;
        }
        // a random start, so that the queries spread over the nodes
        let at = uuid::Uuid::new_v4().as_u128() as usize % fit.len();
        fit.rotate_left(at);
        fit.truncate(MAX_PROBED);
        let most = fit.len() / 2 + 1;
        let mut asked: FuturesUnordered<_> = fit
            .iter()
            .map(async |(server, link)| {
                NodeMap::read(&link.slots(REPLY_TIMEOUT).await?, &server.host)
            })
            .collect();
        let mut views = Vec::new();
        let until = Instant::now() + REPLY_TIMEOUT;
        while let Ok(Some(answer)) = timeout(
            until.saturating_duration_since(Instant::now()),
            asked.next(),
        )
        .await
        {
            views.extend(answer);
            if views.len() >= most {
                break;
            }
        }
        // the nodes that were queried may have left the cluster
        if views.is_empty() {
            self.query_unknown_nodes().await
        } else {
            views
        }
    }

    /// Queries all known nodes, seeds and replicas over new connections, because no master replies.
    async fn query_unknown_nodes(&self) -> Vec<NodeMap> {
        let mut all: Vec<Server> = self.read().iter().map(|node| node.server.clone()).collect();
        if let super::Deployment::Cluster(seeds) = &self.connect_options.endpoint.place {
            all.extend(seeds.iter().cloned());
        }
        all.extend(
            self.replicas
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
                .cloned(),
        );
        all.sort_unstable();
        all.dedup();
        let asked = all.iter().map(|server| {
            timeout(
                // twice the time, because each query connects first
                2 * REPLY_TIMEOUT,
                Self::query_seed(&self.connect_options, server, false),
            )
        });
        let answers = join_all(asked).await;
        answers
            .into_iter()
            .filter_map(|answer| answer.ok()?.ok())
            .map(|(view, _)| view)
            .collect()
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
