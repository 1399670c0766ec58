//! A cluster: who serves which slot, and the links to each node.
//!
//! The map is our own. It is asked for when something is wrong, and seldom otherwise; a redirect changes one slot of it. A node
//! that has lost its last slot is left at once, whether or not its connections live: it may be a master that was
//! replaced while it slept, and grant what nobody else knows of.

mod asking;
mod down;
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

use fred::types::config::Server;
use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};
use tokio::{
    sync::{Notify, watch},
    time::{sleep, timeout},
};

use self::{
    asking::{AWAY, Asking, Trouble},
    map::{SLOTS, View},
    told::Told,
};
pub(super) use self::{down::Down, redirect::Next};
use super::{
    Dials,
    link::Link,
    pace::Pace,
    probe,
    wire::{Dial, Ends, Failure, Request, Until},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError, StoreErrorKind},
    log,
    options::{Messages, Wire},
    topology::{NodeRole, TopologyNode},
};

/// No node.
const NOBODY: u16 = u16::MAX;
/// Whether a node is away is looked at so often.
const LOOK: Duration = Duration::from_millis(100);
/// A node that leaves a request unanswered for so long is asked about.
const SILENT: Duration = Duration::from_millis(500);
/// How long the answers of nodes are waited for, and how many are asked.
const ANSWERS: Duration = Duration::from_millis(250);
const ASKED: usize = 5;
/// How long a connect waits for the other nodes once one can be reached.
const OTHERS: Duration = Duration::from_millis(500);
/// How long a node without slots is kept that was asked, as it is about to get one.
const IMPORTS: Duration = Duration::from_secs(10);

/// A cluster, seen through the links to its masters.
#[derive(Debug)]
pub(super) struct Cluster {
    dials: Arc<Dials>,
    /// Whoever has a node's number finds it; the number of one that was left goes to the next that comes.
    nodes: RwLock<Vec<Node>>,
    /// Who may know more where no master can be reached.
    replicas: Mutex<Vec<Server>>,
    /// The number of each slot's master.
    owners: Box<[AtomicU16]>,
    told: Told,
    /// The map may be old.
    bell: Notify,
    /// Changes when slots have changed their masters.
    moves: watch::Sender<u64>,
    /// Whether waiters listen with SSUBSCRIBE, and scripts publish with SPUBLISH.
    sharded: bool,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Node {
    server: Server,
    /// What it calls itself.
    id: String,
    pace: Arc<Pace>,
    scripts: Option<Arc<Link>>,
    messages: Option<Arc<Link>>,
    serves: bool,
    /// Since when.
    since: std::time::Instant,
    /// Whether somebody may take over from it.
    has_heirs: bool,
    /// It was left: its number is free.
    is_left: bool,
    /// When it was asked last for what it is about to get, serving nothing yet.
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
            has_heirs: false,
            is_left: false,
            imports: None,
        }
    }

    fn begins_to_serve(&mut self) {
        if !std::mem::replace(&mut self.serves, true) {
            self.since = std::time::Instant::now();
        }
    }
}

/// The slot of a key.
pub(super) fn slot_of(key: &str) -> u16 {
    fred::util::redis_keyslot(key.as_bytes())
}

/// Whether a node can be reached, and is not silent.
fn answers(link: &Link) -> bool {
    link.is_up() && link.waits_since().is_none_or(|since| since.elapsed() < SILENT)
}

/// Whether a node has all slots, as far as it says.
pub(super) async fn is_alone(link: &Link) -> bool {
    match link.slots(ANSWERS).await {
        Ok(slots) => View::read(&slots, "").map_or(true, |view| view.masters().len() == 1),
        Err(_) => true,
    }
}

/// Where a scan goes on, of the nodes with these numbers: with the first one from its node on. To another one than that, its
/// cursor means nothing.
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
    /// Connects: any of these nodes is enough. On the client's own runtime.
    pub(super) async fn connect(dials: &Arc<Dials>, seeds: &[Server]) -> Result<Arc<Self>> {
        let refuse = |reason: &str| Err(Error::InvalidConfig { reason: reason.into() });
        if dials.endpoint.wire(&dials.config) == Wire::Fred {
            return refuse(
                "fred's client cannot be used with a cluster (it follows redirects by itself); leave out wire=fred",
            );
        }
        let limit = dials.config.connect_timeout;
        let late = |_| Err(dials.unreachable(dials.late()));
        let (view, sharded) = timeout(limit, Self::ask_seeds(dials, seeds)).await.unwrap_or_else(late)?;
        let sharded = match dials.config.messages {
            Messages::Auto => sharded,
            Messages::Sharded if !sharded => {
                return refuse("the servers know no sharded messages, or the user may not ask; use Messages::Classic");
            }
            Messages::Sharded => true,
            Messages::Classic => false,
        };
        let cluster = Arc::new(Self::new(dials, sharded));
        cluster.learn(&[view]);
        let links: Vec<_> = cluster.read().iter().filter_map(|node| node.scripts.clone()).collect();
        let any = futures_util::future::select_all(links.iter().map(|link| Box::pin(link.wait_up())));
        if timeout(limit, any).await.is_err() {
            cluster.stop().iter().for_each(|link| link.abandon());
            let each: Vec<String> = links.iter().map(|link| link.not_connected().said()).collect();
            let why = format!("no node can be reached at the address that the cluster names: {}", each.join("; "));
            return Err(dials.unreachable(StoreError::new(StoreErrorKind::Unavailable, false, why)));
        }
        let _ = timeout(OTHERS.min(limit), join_all(links.iter().map(|link| link.wait_up()))).await;
        dials.own.spawn(Self::mind(Arc::downgrade(&cluster)));
        Ok(cluster)
    }

    fn new(dials: &Arc<Dials>, sharded: bool) -> Self {
        Self {
            dials: Arc::clone(dials),
            nodes: RwLock::default(),
            replicas: Mutex::default(),
            owners: (0..SLOTS).map(|_| AtomicU16::new(NOBODY)).collect(),
            told: Told::default(),
            bell: Notify::new(),
            moves: watch::Sender::new(0),
            sharded,
            closed: AtomicBool::new(false),
        }
    }

    /// Asks all at once; the first that answers is believed.
    async fn ask_seeds(dials: &Arc<Dials>, seeds: &[Server]) -> Result<(View, bool)> {
        let mut asked: FuturesUnordered<_> = seeds.iter().map(|seed| Self::ask_seed(dials, seed, true)).collect();
        let (mut said, mut kind) = (Vec::new(), StoreErrorKind::Unavailable);
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(known) => return Ok(known),
                Err((seed, error)) => {
                    let text = error.said();
                    if text.contains("cluster support disabled") {
                        let reason = format!("{seed} is not a node of a cluster; connect with redis://");
                        return Err(Error::InvalidConfig { reason });
                    }
                    // those of Valkey 9 may have several
                    let refusals = ["SELECT is not allowed in cluster mode", "DB index is out of range"];
                    if refusals.into_iter().any(|refusal| text.contains(refusal)) {
                        let reason = format!(
                            "the cluster of {seed} has no such database ({text}); a cluster has one database, unless its \
                             `cluster-databases` says more: leave the number out of the URL"
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

    /// What a node says of the map; when a client connects, also whether it runs scripts.
    async fn ask_seed<'s>(
        dials: &Arc<Dials>,
        seed: &'s Server,
        is_first: bool,
    ) -> Result<(View, bool), (&'s Server, StoreError)> {
        let failed = |error: StoreError| (seed, error);
        let connected = dials.for_scripts().at(seed).connect(dials.config.connect_timeout).await;
        let ends = Ends::new(connected.map_err(|refused| failed(refused.error))?);
        let limit = dials.config.command_timeout();
        let ask =
            async |words: &[&str]| ends.connection.call(Request::Words(words), Until::new(Instant::now(), limit)).await;
        let view = ask(&["CLUSTER", "SLOTS"]).await.map_err(StoreError::from);
        let view = view.and_then(|slots| View::read(&slots, &seed.host)).map_err(failed);
        if is_first && view.is_ok() {
            probe::runs_scripts(&ends.connection, &dials.config).await.map_err(failed)?;
        }
        let sharded = match &view {
            // older servers know no such question
            Ok(_) => !matches!(ask(&["PUBSUB", "SHARDNUMSUB"]).await, Err(Failure::Refused(_))),
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

    /// The number of a slot's master.
    pub(super) fn owner(&self, slot: u16) -> u16 {
        self.owners[usize::from(slot)].load(Ordering::Acquire)
    }

    /// The link to the master of a slot. Of a slot that nobody serves, any: it says so.
    pub(super) fn link(&self, slot: u16) -> Arc<Link> {
        let owner = self.owner(slot);
        let nodes = self.read();
        if let Some(link) = nodes.get(usize::from(owner)).and_then(|node| node.scripts.as_ref()) {
            return Arc::clone(link);
        }
        self.bell.notify_one();
        let up = nodes.iter().filter_map(|node| node.scripts.as_ref()).max_by_key(|link| link.is_up());
        if let Some(link) = up.filter(|_| owner == NOBODY) {
            return Arc::clone(link);
        }
        drop(nodes);
        self.scripts(owner)
    }

    /// The link for scripts to a node, made if there is none.
    fn scripts(&self, node: u16) -> Arc<Link> {
        let (_, link) = self.of_node(node, |node| {
            let make = || self.make(self.dials.for_scripts(), &node.server, &node.pace);
            Arc::clone(node.scripts.get_or_insert_with(make))
        });
        link
    }

    /// Where a slot's waiters listen: the number of its master, and the link for that.
    pub(super) fn home(&self, slot: u16) -> (u16, Arc<Link>) {
        self.of_node(self.owner(slot), |node| {
            let make = || self.make(self.dials.for_messages(), &node.server, &node.pace);
            Arc::clone(node.messages.get_or_insert_with(make))
        })
    }

    /// Changes the node of this number, or any where nobody has it; with its number.
    fn of_node<T>(&self, node: u16, change: impl FnOnce(&mut Node) -> T) -> (u16, T) {
        let mut nodes = self.write();
        let at = usize::from(node).min(nodes.len() - 1);
        (at as u16, change(&mut nodes[at]))
    }

    fn make(&self, dial: Dial, server: &Server, pace: &Arc<Pace>) -> Arc<Link> {
        let link = Link::lazy(Dial { sharded: self.sharded, bundles: false, ..dial.at(server) }, pace);
        if self.is_closed() {
            link.abandon();
        }
        link
    }

    /// Changes when slots have changed their masters.
    pub(super) fn moves(&self) -> watch::Receiver<u64> {
        self.moves.subscribe()
    }

    /// Changes the node at an address, and makes its link for scripts. In one step: what is not known to serve may be left.
    fn at<T>(&self, server: &Server, change: impl FnOnce(u16, &mut Node) -> T) -> (Arc<Link>, T) {
        let mut nodes = self.write();
        let known = nodes.iter().position(|node| node.server == *server);
        let at = known.or_else(|| nodes.iter().position(|node| node.is_left)).unwrap_or(nodes.len());
        if known.is_none() {
            let node = Node::new(server.clone());
            match nodes.get_mut(at) {
                Some(left) => *left = node,
                None => nodes.push(node),
            }
        }
        let node = &mut nodes[at];
        node.is_left = false;
        let make = || self.make(self.dials.for_scripts(), &node.server, &node.pace);
        let link = Arc::clone(node.scripts.get_or_insert_with(make));
        (link, change(at as u16, node))
    }

    /// A slot's master is this one now. Whether it was another one.
    fn gives(&self, slot: u16, to: &Server) -> (Arc<Link>, bool) {
        self.at(to, |number, node| {
            node.begins_to_serve();
            self.owners[usize::from(slot)].swap(number, Ordering::AcqRel) != number
        })
    }

    /// A server said, over this link, that a slot has another master.
    fn moved(&self, slot: u16, server: &Server, over: &Arc<Link>) -> Arc<Link> {
        if Arc::ptr_eq(&self.link(slot), over) {
            self.told.of(slot);
        }
        let (link, has_changed) = self.gives(slot, server);
        if has_changed {
            self.moves.send_modify(|moves| *moves += 1);
        }
        link
    }

    /// A server said that another one is about to have a slot: that one's link.
    fn importing(&self, server: &Server) -> Arc<Link> {
        self.at(server, |_, node| node.imports = (!node.serves).then(Instant::now)).0
    }

    /// Takes in what nodes say. Of each slot, what most of them say counts; where they are at odds, nothing changes, nor where its
    /// own master has just said something else, unless whom it named lets nobody in.
    fn learn(&self, views: &[View]) {
        let (mut changed, mut is_older) = (false, false);
        let is_down = |node: &Node| node.scripts.as_ref().is_some_and(|link| link.is_down());
        let known: Vec<_> = self.read().iter().map(|node| (node.server.clone(), is_down(node))).collect();
        let told = self.told.lately();
        for slot in 0..SLOTS as u16 {
            let (now, is_down) =
                known.get(usize::from(self.owner(slot))).map_or((None, true), |(now, down)| (Some(now), *down));
            let Some(said) = map::most(views, slot, now).filter(|said| Some(*said) != now) else { continue };
            if told.contains_key(&slot) && !is_down {
                is_older = true;
                continue;
            }
            changed |= self.gives(slot, said).1;
        }
        if is_older {
            self.ring();
        }
        for node in self.write().iter_mut() {
            let mut of_it = views.iter().filter_map(|view| view.master(&node.server)).peekable();
            if let Some(master) = of_it.peek() {
                master.id.clone_into(&mut node.id);
                node.has_heirs = of_it.any(|master| master.has_replicas);
            }
        }
        let mut replicas: Vec<Server> = views.iter().flat_map(View::replicas).cloned().collect();
        let key = |server: &Server| (server.host.to_string(), server.port);
        replicas.sort_unstable_by_key(key);
        replicas.dedup_by_key(|server| key(server));
        if !replicas.is_empty() {
            *self.replicas.lock().unwrap_or_else(PoisonError::into_inner) = replicas;
        }
        let is_over = self.leave();
        if changed || is_over {
            self.moves.send_modify(|moves| *moves += 1);
        }
        if is_over {
            // what was held there is somebody else's to know now: all of it is looked at
            self.dials.epochs.stir();
        }
    }

    /// Leaves the nodes that serve nothing any more. Redirects may have been the first to say so. Whether there are any.
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
                node.is_left = true;
                left.push((node.scripts.take(), node.messages.take()));
            }
        }
        drop(nodes);
        let mut is_over = false;
        for (scripts, messages) in left {
            if let Some(scripts) = scripts {
                log::later!(DEBUG, host = scripts.host(); "a node serves no slot any more");
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

    /// What is wrong. `None`: all masters answer, and all slots have one.
    fn trouble(&self) -> Option<Trouble> {
        let nodes = self.read();
        let away =
            nodes.iter().filter(|node| node.serves && node.scripts.as_deref().is_some_and(|link| !answers(link)));
        let no_heir =
            || self.owners.iter().any(|owner| owner.load(Ordering::Acquire) == NOBODY).then_some(Trouble::Stays);
        away.map(|node| if node.has_heirs { Trouble::Passes } else { Trouble::Stays }).min().or_else(no_heir)
    }

    /// Keeps the map, until the client ends.
    async fn mind(cluster: Weak<Self>) {
        let (mut asking, mut was_rung) = (Asking::new(Instant::now()), false);
        loop {
            let Some(cluster) = cluster.upgrade().filter(|cluster| !cluster.is_closed()) else { return };
            let rung = timeout(LOOK, cluster.bell.notified()).await.is_ok();
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
            let views = cluster.ask().await;
            if !views.is_empty() {
                cluster.learn(&views);
            }
            asking.answered(*cluster.moves.borrow());
        }
    }

    /// What nodes say that can be reached.
    async fn ask(&self) -> Vec<View> {
        let mut fit: Vec<(Server, Arc<Link>)> = self
            .read()
            .iter()
            .filter_map(|node| Some((node.server.clone(), node.scripts.clone()?)))
            .filter(|(_, link)| answers(link))
            .collect();
        if fit.is_empty() {
            return self.ask_strangers().await;
        }
        // not always the same ones
        let at = uuid::Uuid::new_v4().as_u128() as usize % fit.len();
        fit.rotate_left(at);
        fit.truncate(ASKED);
        let most = fit.len() / 2 + 1;
        let mut asked: FuturesUnordered<_> =
            fit.iter().map(async |(server, link)| View::read(&link.slots(ANSWERS).await?, &server.host)).collect();
        let mut views = Vec::new();
        let until = Instant::now() + ANSWERS;
        while let Ok(Some(answer)) = timeout(until.saturating_duration_since(Instant::now()), asked.next()).await {
            views.extend(answer);
            if views.len() >= most {
                break;
            }
        }
        // none of them may be of this cluster any more
        if views.is_empty() { self.ask_strangers().await } else { views }
    }

    /// Asks whoever may know, over connections of their own: no master can be reached.
    async fn ask_strangers(&self) -> Vec<View> {
        let mut all: Vec<Server> = self.read().iter().map(|node| node.server.clone()).collect();
        if let super::Place::Cluster(seeds) = &self.dials.endpoint.place {
            all.extend(seeds.iter().cloned());
        }
        all.extend(self.replicas.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned());
        let key = |server: &Server| (server.host.to_string(), server.port);
        all.sort_unstable_by_key(key);
        all.dedup_by_key(|server| key(server));
        let asked = all.iter().map(|server| timeout(2 * ANSWERS, Self::ask_seed(&self.dials, server, false)));
        let answers = join_all(asked).await;
        answers.into_iter().filter_map(|answer| answer.ok()?.ok()).map(|(view, _)| view).collect()
    }

    /// Something does not go as it should: the map may be old.
    pub(super) fn ring(&self) {
        self.bell.notify_one();
    }

    /// Its masters and their replicas.
    pub(super) fn topology(&self) -> Vec<TopologyNode> {
        let mut slots: Vec<Vec<RangeInclusive<u16>>> = vec![Vec::new(); self.read().len()];
        for slot in 0..SLOTS as u16 {
            let Some(of_owner) = slots.get_mut(usize::from(self.owner(slot))) else { continue };
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
        let is_master = |replica: &Server| masters.iter().any(|master| master.address == replica.to_string());
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

    /// Whether both are known to be one cluster.
    pub(super) fn is(&self, other: &Self) -> bool {
        if std::ptr::eq(self, other) {
            return true;
        }
        let ids: Vec<String> = self.read().iter().map(|node| node.id.clone()).filter(|id| !id.is_empty()).collect();
        other.read().iter().any(|node| ids.contains(&node.id))
    }

    /// The longest of what this is for each of the masters.
    pub(super) fn longest(&self, of_link: fn(&Link) -> Duration) -> Duration {
        let nodes = self.read();
        let links = nodes.iter().filter_map(|node| node.scripts.as_deref());
        links.map(of_link).max().unwrap_or_default()
    }

    /// The links for scripts to all masters, with the numbers of their nodes.
    pub(super) fn masters(&self) -> Vec<(u16, Arc<Link>)> {
        let nodes = self.read();
        let link = |(at, node): (usize, &Node)| Some((at as u16, node.scripts.clone()?));
        nodes.iter().enumerate().filter_map(link).collect()
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Makes no more links, and asks for no map: the links that there are.
    pub(super) fn stop(&self) -> Vec<Arc<Link>> {
        self.closed.store(true, Ordering::Release);
        self.bell.notify_one();
        let nodes = self.read();
        nodes.iter().flat_map(|node| node.scripts.iter().chain(&node.messages)).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        options::Config,
        store::{
            tests::{dials, stopped},
            wire::Value,
        },
    };

    /// A map of three nodes, at these ports.
    fn view(ports: [u16; 3]) -> View {
        let range = |(n, port): (i64, u16)| {
            let (from, to) = (n * 16_384 / 3, (n + 1) * 16_384 / 3 - 1);
            let node = vec![Value::text("127.0.0.1"), Value::Integer(port.into()), Value::text(&format!("id{port}"))];
            Value::Array(vec![Value::Integer(from), Value::Integer(to), Value::Array(node)])
        };
        View::read(&Value::Array((0..).zip(ports).map(range).collect()), "").unwrap()
    }

    #[test]
    fn a_thousand_nodes_come_and_go() {
        let dials = Arc::new(dials("redis-cluster://127.0.0.1:1", Config::default(), stopped()));
        let cluster = Cluster::new(&dials, false);
        for port in 0..1_000 {
            let ports = [port, port + 1, port + 2].map(|port| 10_000 + port);
            cluster.learn(&[view(ports)]);
            for (n, port) in ports.into_iter().enumerate() {
                let (number, link) = cluster.home((n * SLOTS / 3) as u16);
                assert_eq!(cluster.read()[usize::from(number)].server.port, port);
                assert!(!link.is_closed());
            }
            // one that is about to have something
            let imports = cluster.importing(&Server::new("127.0.0.1", 9_000));
            assert_eq!(imports.host(), "127.0.0.1");
        }
        assert!(cluster.read().len() <= 6, "{}", cluster.read().len());
        assert_eq!(cluster.masters().len(), 4);
        cluster.stop().iter().for_each(|link| link.abandon());
    }

    #[test]
    fn a_scan_goes_on_with_its_own_cursor_or_begins_with_the_next_node() {
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
