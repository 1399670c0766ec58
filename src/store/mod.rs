//! The facade to Redis: scripts go in, replies and typed errors come out. It hides whether the
//! client talks to a single server, a service with failover, or a cluster.

mod cluster;
pub(crate) mod connect_options;
mod credentials;
mod endpoint;
#[cfg(feature = "fred")]
mod fred_config;
mod master;
mod next_hop;
mod one;
mod probe;
#[cfg(feature = "redis-rs")]
mod redis_rs;
mod replication;
mod reply;
mod requests;
mod route;
mod script;
#[cfg(feature = "rustls")]
mod tls;
mod url;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::future::join_all;
use tokio::{sync::watch, time::timeout};

#[cfg_attr(
    not(any(feature = "fred", feature = "redis-rs")),
    expect(unreachable_pub, reason = "those features make it public")
)]
pub use self::endpoint::Endpoint;
#[cfg(feature = "rustls")]
pub use self::tls::Tls;
use nestlock_wire::{Copies, Epoch, Link, LinkPurpose, Pace, clock::Instant};

pub(crate) use crate::store::{
    connect_options::ConnectOptions,
    credentials::from_fn,
    reply::{Acquired, Forced, Guarded, Inspected, Released, Renewed, Score},
    route::Route,
    script::script,
};
use crate::{
    error::{Error, Result, StoreError, StoreErrorKind},
    keys::slot_of,
    store::{cluster::Cluster, endpoint::Deployment, next_hop::RedirectTo, one::One},
    topology::{Topology, TopologyKind},
};

/// Divisor of the command timeout. A request that pauses before a redirect is sent again only if
/// its reply has this share of the timeout left, on top of the time that the last reply took.
pub(crate) const SPARE: u32 = 10;

/// How long to wait for a new map if the master that the map names does not serve. The client keeps
/// refreshing the map during that time.
const ELSEWHERE: Duration = Duration::from_millis(500);

/// The servers, reached through their links. All requests about a lock name go over one link, until
/// another server becomes responsible for it.
#[derive(Debug)]
pub(crate) struct Store {
    /// Set once the client has connected.
    servers: OnceLock<Servers>,
    /// A placeholder until then: a link that leads nowhere.
    nowhere: OnceLock<Servers>,
    connect_options: Arc<ConnectOptions>,
    address: String,
    /// Replies in place of a server.
    #[cfg(test)]
    played: Option<Arc<tests::Server>>,
}

#[derive(Debug)]
enum Servers {
    One(One),
    Cluster(Arc<Cluster>),
}

impl Servers {
    fn script_links(&self) -> Vec<Arc<Link>> {
        match self {
            Self::One(one) => vec![Arc::clone(&one.scripts)],
            Self::Cluster(cluster) => cluster
                .masters()
                .into_iter()
                .map(|(_, link)| link)
                .collect(),
        }
    }

    /// Stops creating links and searching for servers; returns the existing links.
    fn stop(&self) -> Vec<Arc<Link>> {
        match self {
            Self::One(one) => one.stop(),
            Self::Cluster(cluster) => cluster.stop(),
        }
    }
}

impl Store {
    /// Returns the program that its connections name: `<application>:<host>:<process>`.
    pub(crate) fn program(&self) -> &str {
        let name = &*self.connect_options.name;
        let name = name.strip_prefix("nestlock:").unwrap_or(name);
        name.rsplit_once(':').map_or(name, |(program, _)| program)
    }

    /// Creates a store without any connection.
    pub(crate) fn new(dials: ConnectOptions) -> Self {
        Self {
            servers: OnceLock::new(),
            nowhere: OnceLock::new(),
            address: dials.endpoint.address(),
            connect_options: Arc::new(dials),
            #[cfg(test)]
            played: None,
        }
    }

    /// Connects. Must run on the client's own runtime, and never concurrently.
    pub(crate) async fn connect(&self) -> Result<()> {
        let dials = &self.connect_options;
        let servers = match &dials.endpoint.place {
            Deployment::Server | Deployment::Sentinel(_) | Deployment::List(_) => {
                Servers::One(One::connect(dials).await?)
            }
            Deployment::Cluster(seeds) => Servers::Cluster(Cluster::connect(dials, seeds).await?),
        };
        if let Some(copies) = dials.config.copies(dials.config.replicas)
            && let Err(error) = self.have_replicas(&servers, copies).await
        {
            servers.stop().iter().for_each(|link| link.abandon());
            return Err(error);
        }
        let _ = self.servers.set(servers);
        // measures the first round trip; an error is ignored, as the first request would report it
        self.barrier().await;
        Ok(())
    }

    async fn have_replicas(&self, servers: &Servers, copies: Copies) -> Result<()> {
        let limit = self.connect_options.config.connect_timeout;
        let checked = timeout(
            limit,
            replication::check(&servers.script_links(), copies, &self.address, limit),
        )
        .await;
        checked.unwrap_or_else(|_| {
            Err(self
                .connect_options
                .unreachable(self.connect_options.timed_out()))
        })
    }

    /// Returns whether the client has ever connected.
    pub(crate) fn is_connected(&self) -> bool {
        self.servers.get().is_some()
    }

    /// Returns the error for a wait that ended before the first connection.
    pub(crate) fn not_connected_yet(&self) -> Error {
        let why = StoreError::new(
            StoreErrorKind::Timeout,
            false,
            "no connection before the wait ended",
        );
        Error::Connect {
            address: self.address.clone(),
            source: why,
        }
    }

    /// Returns the servers. Before the first connect, returns one that cannot be reached.
    fn servers(&self) -> &Servers {
        self.servers.get().unwrap_or_else(|| {
            self.nowhere.get_or_init(|| {
                let pace = Arc::new(Pace::new());
                Servers::One(One::nowhere(&Link::new(
                    self.connect_options.for_scripts(),
                    &pace,
                    LinkPurpose::Requests,
                )))
            })
        })
    }

    /// Checks that every server that holds locks replies now.
    pub(crate) async fn check_reachable(&self) -> Result<()> {
        self.check_ours()
            .map_err(|forked| self.connect_options.unreachable(forked))?;
        let answers = join_all(self.script_links().iter().map(|link| link.barrier())).await;
        let all: std::result::Result<Vec<()>, StoreError> = answers.into_iter().collect();
        all.map(drop)
            .map_err(|error| self.connect_options.unreachable(error))
    }

    /// Returns whether the servers are a cluster.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.connect_options.endpoint.place, Deployment::Cluster(_))
    }

    /// Returns the link that now carries all requests about this key.
    fn link(&self, key: &str) -> Arc<Link> {
        self.link_of(self.group_of(key))
    }

    fn link_of(&self, group: u16) -> Arc<Link> {
        match self.servers() {
            Servers::One(one) => Arc::clone(&one.scripts),
            Servers::Cluster(cluster) => cluster.link(group),
        }
    }

    /// Returns the epoch of the connection that now carries requests about this key.
    pub(crate) fn epoch(&self, key: &str) -> Epoch {
        self.link(key).epoch()
    }

    /// Returns the route of a request about this key; its command timeout starts at `asked`.
    pub(crate) fn route(&self, key: &str, asked: Instant) -> Route {
        let slot = self.group_of(key);
        let link = self.link_of(slot);
        let until = link.until(asked);
        Route::new(link, until, slot)
    }

    /// Redirects a route to where its request goes next. The request must not have been executed.
    /// Returns `false` if it goes nowhere.
    pub(crate) async fn follow(&self, route: &mut Route) -> bool {
        let Servers::Cluster(cluster) = self.servers() else {
            return false;
        };
        let spare = self.connect_options.config.command_timeout() / SPARE;
        let Some((next, pause)) = route.go_on(spare) else {
            return false;
        };
        let timer = |pause| {
            let _context = self.connect_options.own.enter();
            tokio::time::sleep(pause)
        };
        if !pause.is_zero() {
            timer(pause).await;
        }
        let (link, asking) = match next {
            RedirectTo::To(link) => (link, false),
            RedirectTo::Asking(link) => {
                let goes = route.goes_with_asking(pause) && link.is_up();
                // only after the decision: otherwise a late reply would widen its own window
                if pause.is_zero() {
                    route.link.sent_elsewhere(route.until.asked());
                }
                if goes {
                    (link, true)
                } else if route.has_time_again(spare) {
                    // the master redirects the retry again, and by then the connection is up
                    route.has_rested = link.up_by(route.until).await.is_ok();
                    (cluster.link(route.slot), false)
                } else {
                    return false;
                }
            }
            RedirectTo::Later => (cluster.link(route.slot), false),
            RedirectTo::Elsewhere { or_there } => {
                let nowhere = async {
                    if or_there {
                        // until the link is known to be down, the node may just be slow to accept
                        route.link.wait_down().await;
                    }
                    timer(ELSEWHERE).await;
                };
                tokio::select! {
                    Some(link) = cluster.next_master(route.slot, &route.link) => (link, false),
                    () = route.link.wait_up(), if or_there => (Arc::clone(&route.link), false),
                    () = nowhere => return false,
                    () = timer(route.waits(spare, or_there)) => return false,
                }
            }
        };
        route.until = route.until.again(Instant::now());
        if route.until.is_over() {
            return false;
        }
        route.redirect_to(link, asking);
        true
    }

    /// Returns the server's address, never the password.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the known servers.
    pub(crate) fn topology(&self) -> Topology {
        let (kind, nodes) = match self.servers() {
            _ if self.is_cluster() && !self.is_connected() => (TopologyKind::Cluster, Vec::new()),
            Servers::One(one) => one.topology(&self.connect_options),
            Servers::Cluster(cluster) => (TopologyKind::Cluster, cluster.topology()),
        };
        Topology { kind, nodes }
    }

    /// Returns the round trip of recent requests plus a quarter; zero if it is not known yet.
    pub(crate) fn round_trip(&self) -> Duration {
        self.longest(Link::round_trip)
    }

    /// Returns the round trip without time spent behind a `WAIT` of this client.
    pub(crate) fn free_round_trip(&self) -> Duration {
        self.longest(Link::free_round_trip)
    }

    fn longest(&self, of_link: fn(&Link) -> Duration) -> Duration {
        match self.servers() {
            Servers::One(one) => of_link(&one.scripts),
            Servers::Cluster(cluster) => cluster.longest(of_link),
        }
    }

    /// Returns whether both stores are known to use the same server. Compares the addresses if
    /// either has not connected yet. A single server that restarted between the two connects is not
    /// recognized.
    pub(crate) fn is_of_same_server(&self, other: &Self) -> bool {
        match (self.servers(), other.servers()) {
            _ if std::ptr::eq(self, other) => true,
            _ if !self.is_connected() || !other.is_connected() => self.address == other.address,
            (Servers::One(one), Servers::One(other)) => one.is(other),
            (Servers::Cluster(one), Servers::Cluster(other)) => one.is(other),
            _ => false,
        }
    }

    /// Returns whether one script may take all these keys: in a cluster they must share a slot.
    pub(crate) fn takes_together<'a>(&self, mut keys: impl Iterator<Item = &'a Arc<str>>) -> bool {
        let first = keys.next().map(|key| self.group_of(key));
        first.is_some_and(|first| keys.all(|key| self.group_of(key) == first))
    }

    /// Returns what the keys of one script must share: the slot in a cluster, else 0.
    pub(crate) fn group_of(&self, key: &str) -> u16 {
        match self.servers() {
            Servers::One(_) => 0,
            Servers::Cluster(_) => slot_of(key),
        }
    }

    /// Returns the number of the server that now has a group's keys.
    pub(crate) fn server_of(&self, group: u16) -> u16 {
        match self.servers() {
            Servers::One(_) => 0,
            Servers::Cluster(cluster) => cluster.owner(group),
        }
    }

    /// Returns a receiver that changes to the new epoch whenever a connection for scripts is up. It
    /// is also notified, with the same epoch, when all holds must be checked again.
    pub(crate) fn connections(&self) -> watch::Receiver<Epoch> {
        self.connect_options.epochs.of_scripts()
    }

    /// Returns where waiters of a channel subscribe: the number of the node, and its link for
    /// messages.
    pub(crate) fn node_of_channel(&self, channel: &str) -> (u16, Arc<Link>) {
        match self.servers() {
            Servers::One(one) => (0, Arc::clone(&one.messages)),
            Servers::Cluster(cluster) => cluster.node_of_slot(slot_of(channel)),
        }
    }

    /// Returns a receiver that changes when slots, and so channels, move to other nodes. Returns
    /// `None` outside a cluster.
    pub(crate) fn moves(&self) -> Option<watch::Receiver<u64>> {
        match self.servers() {
            Servers::One(_) => None,
            Servers::Cluster(cluster) => Some(cluster.moves()),
        }
    }

    /// Requests a new map: a node said that a slot has another master. No-op outside a cluster.
    pub(crate) fn request_refresh(&self) {
        if let Servers::Cluster(cluster) = self.servers() {
            cluster.request_refresh();
        }
    }

    /// Returns the link for `BLPOP`, created on first use, once it is up. Fails in a cluster. Must
    /// run on the client's own runtime.
    pub(crate) async fn lists(&self) -> Result<&Arc<Link>, StoreError> {
        match self.servers() {
            Servers::One(one) => one.lists(&self.connect_options).await,
            Servers::Cluster(_) => Err(StoreError::new(
                StoreErrorKind::Unavailable,
                false,
                "BLPOP is not used in a cluster",
            )),
        }
    }

    fn script_links(&self) -> Vec<Arc<Link>> {
        self.servers().script_links()
    }

    /// Waits for the replies to all requests sent so far, and measures the round trip.
    pub(crate) async fn barrier(&self) {
        join_all(self.script_links().iter().map(|link| link.barrier())).await;
    }

    /// Returns whether this process created the client, and is not a fork.
    pub(crate) fn is_ours(&self) -> bool {
        self.connect_options.epochs.are_ours()
    }

    pub(crate) fn check_ours(&self) -> Result<(), StoreError> {
        self.connect_options.epochs.check_ours()
    }

    /// Returns how many script requests are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.script_links()
            .iter()
            .map(|link| link.in_flight())
            .sum()
    }

    /// Ensures that replies are read soon, even if the user's runtime is blocked.
    pub(crate) fn prioritize(&self) {
        match self.servers() {
            Servers::One(one) => one.scripts.prioritize(),
            Servers::Cluster(_) => self
                .script_links()
                .iter()
                .for_each(|link| link.prioritize()),
        }
    }

    /// Returns whether this key's server can be reached.
    pub(crate) fn is_up(&self, key: &str) -> bool {
        self.link(key).is_up()
    }

    /// Waits until this key's server can be reached.
    pub(crate) async fn wait_up(&self, key: &str) {
        let Servers::Cluster(cluster) = self.servers() else {
            return self.link(key).wait_up().await;
        };
        let mut moves = cluster.moves();
        loop {
            let link = self.link(key);
            tokio::select! {
                () = link.wait_up() => return,
                // the slot may have another master now
                _ = moves.changed() => {}
            }
        }
    }

    /// Waits until this key's server serves again after it rejected everything because its cluster
    /// was down. Never returns for any other server.
    pub(crate) async fn serving_again(&self, key: &str) {
        self.link(key).serving_again().await;
    }

    /// Ends the connections at once, without draining requests in flight.
    pub(crate) fn abandon(&self) {
        self.last_links().iter().for_each(|link| link.abandon());
    }

    /// Ends the connections after the requests in flight, or after 500 ms.
    pub(crate) async fn close(&self) {
        join_all(self.last_links().iter().map(|link| link.close())).await;
    }

    /// Stops creating links and searching for servers; returns the existing links.
    fn last_links(&self) -> Vec<Arc<Link>> {
        self.servers().stop()
    }
}

#[cfg(test)]
pub(crate) mod tests;
