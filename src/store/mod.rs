//! The only room with a door to Redis: scripts go in, answers and typed errors come out.

mod acks;
mod bundle;
mod cluster;
mod endpoint;
mod link;
mod master;
mod one;
mod pace;
mod probe;
mod refusal;
mod reply;
mod round_trip;
mod route;
mod script;
#[cfg(feature = "rustls")]
mod tls;
mod url;
mod wire;

use std::{
    fmt, io,
    sync::{Arc, OnceLock},
    time::Duration,
};

use fred::bytes_utils::Str;
use futures_util::future::join_all;
use tokio::{runtime::Handle, sync::watch, time::timeout};

#[cfg_attr(not(feature = "fred-config"), expect(unreachable_pub, reason = "that feature makes it public"))]
pub use self::endpoint::Endpoint;
#[cfg(feature = "rustls")]
pub use self::tls::Tls;
pub(crate) use self::{
    acks::Acks,
    bundle::Bundle,
    link::{Epoch, Link},
    reply::{Acquired, Forced, Guarded, Inspected, Released, Renewed, Score},
    route::Route,
    script::{Arg, Arity, Call, Script, script},
    wire::{Heard, Sink, Value, has_io_here},
};
use self::{
    cluster::{Cluster, Next, slot_of},
    endpoint::Place,
    link::{Carries, Epochs},
    one::One,
    pace::Pace,
    wire::Dial,
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError, StoreErrorKind},
    options::{Config, Copies},
    topology::{Topology, TopologyKind},
};
#[cfg(feature = "fred-config")]
pub(crate) use fred::types::config::Config as FredConfig;

/// What is sent elsewhere last, after a pause, has this part of a command timeout for its answer, beside what the one before took.
pub(crate) const SPARE: u32 = 10;

/// How long the map is waited for, where whom it names does not serve: it is asked for again and again meanwhile.
const ELSEWHERE: Duration = Duration::from_millis(500);

/// How the links of one client connect.
pub(crate) struct Dials {
    pub(crate) endpoint: Endpoint,
    pub(crate) config: Config,
    /// What its connections are called.
    pub(crate) name: Arc<str>,
    /// The client's own runtime.
    pub(crate) own: Handle,
    /// The runtime that reads answers and messages, while it runs.
    pub(crate) driver: Option<Handle>,
    /// Who hears messages.
    pub(crate) sink: Sink,
    epochs: Arc<Epochs>,
}

impl Dials {
    pub(crate) fn new(
        endpoint: Endpoint,
        config: Config,
        name: Arc<str>,
        own: Handle,
        driver: Option<Handle>,
        sink: Sink,
    ) -> Self {
        Self { endpoint, config, name, own, driver, sink, epochs: Arc::default() }
    }

    /// Why there is no connection.
    fn unreachable(&self, source: StoreError) -> Error {
        let (late, said) = (self.late(), source.said());
        let source = source.before_any_request();
        let was_closed = || ["closed by the server", "reset by peer"].iter().any(|part| said.contains(part));
        let source = match source.kind() {
            kind @ StoreErrorKind::Timeout if said != late.said() => {
                StoreError::new(kind, false, format!("{}: {said}", late.said()))
            }
            kind @ StoreErrorKind::Unavailable if !self.is_by_tls() && was_closed() => {
                StoreError::new(kind, false, format!("{said}, spoken to in plain text"))
            }
            _ => source,
        };
        Error::Connect { address: self.endpoint.address(), source }
    }

    #[cfg_attr(not(feature = "rustls"), expect(clippy::unused_self, reason = "with TLS it is"))]
    fn is_by_tls(&self) -> bool {
        #[cfg(feature = "rustls")]
        let by_tls = self.endpoint.server.tls.is_some();
        #[cfg(not(feature = "rustls"))]
        let by_tls = false;
        by_tls
    }

    /// That there was none within the time for it.
    fn late(&self) -> StoreError {
        let by_tls = if self.is_by_tls() { " by TLS" } else { "" };
        let late = format!("no connection{by_tls} within {:?}", self.config.connect_timeout);
        StoreError::new(StoreErrorKind::Timeout, false, late)
    }

    fn for_scripts(&self) -> Dial {
        Dial::new(self, self.driver.clone(), None)
    }

    fn for_messages(&self) -> Dial {
        Dial::new(self, self.driver.clone(), Some(Arc::clone(&self.sink)))
    }

    fn for_lists(&self) -> Dial {
        Dial::new(self, None, None)
    }
}

impl Endpoint {
    /// That the system has no thread for a client, or no file descriptor.
    pub(crate) fn without_a_thread(&self, error: &io::Error) -> Error {
        let why = format!("cannot start a thread: {error}");
        Error::Connect { address: self.address(), source: StoreError::new(StoreErrorKind::Unavailable, false, why) }
    }
}

impl fmt::Debug for Dials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dials").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// The servers, seen through their links. All requests about a lock name go over one link, until its server is another one.
#[derive(Debug)]
pub(crate) struct Store {
    /// Set when the client has connected.
    servers: OnceLock<Servers>,
    /// What stands for them until then: a link that leads nowhere.
    nowhere: OnceLock<Servers>,
    dials: Arc<Dials>,
    address: String,
    /// What answers in the server's place.
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
            Self::Cluster(cluster) => cluster.masters().into_iter().map(|(_, link)| link).collect(),
        }
    }

    /// Makes no more links, and looks for no server any more: those that there are.
    fn stop(&self) -> Vec<Arc<Link>> {
        match self {
            Self::One(one) => one.stop(),
            Self::Cluster(cluster) => cluster.stop(),
        }
    }
}

/// Keys that `SCAN` found, and where to go on.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) keys: Vec<String>,
    pub(crate) next: Option<String>,
}

impl Store {
    /// Without any connection.
    pub(crate) fn new(dials: Dials) -> Self {
        Self {
            servers: OnceLock::new(),
            nowhere: OnceLock::new(),
            address: dials.endpoint.address(),
            dials: Arc::new(dials),
            #[cfg(test)]
            played: None,
        }
    }

    /// Connects. Must run on the client's own runtime, once at a time.
    pub(crate) async fn connect(&self) -> Result<()> {
        let dials = &self.dials;
        let servers = match &dials.endpoint.place {
            Place::Server | Place::Sentinel(_) | Place::List(_) => Servers::One(One::connect(dials).await?),
            Place::Cluster(seeds) => Servers::Cluster(Cluster::connect(dials, seeds).await?),
        };
        if let Some(copies) = dials.config.copies(dials.config.replicas)
            && let Err(error) = self.have_replicas(&servers, copies).await
        {
            servers.stop().iter().for_each(|link| link.abandon());
            return Err(error);
        }
        let _ = self.servers.set(servers);
        // how long a round trip takes is known from here on. If it is not answered, the first request will be told
        self.barrier().await;
        Ok(())
    }

    async fn have_replicas(&self, servers: &Servers, copies: Copies) -> Result<()> {
        let limit = self.dials.config.connect_timeout;
        let checked = timeout(limit, acks::check(&servers.script_links(), copies, &self.address, limit)).await;
        checked.unwrap_or_else(|_| Err(self.dials.unreachable(self.dials.late())))
    }

    /// Whether there has been a connection.
    pub(crate) fn is_connected(&self) -> bool {
        self.servers.get().is_some()
    }

    /// That there was none, and is none in time.
    pub(crate) fn not_connected_yet(&self) -> Error {
        let why = StoreError::new(StoreErrorKind::Timeout, false, "no connection before the wait was over");
        Error::Connect { address: self.address.clone(), source: why }
    }

    /// The servers. Where there has been no connection, one that cannot be reached.
    fn servers(&self) -> &Servers {
        self.servers.get().unwrap_or_else(|| {
            self.nowhere.get_or_init(|| {
                let pace = Arc::new(Pace::new());
                Servers::One(One::nowhere(&Link::new(self.dials.for_scripts(), &pace, Carries::Requests)))
            })
        })
    }

    /// Whether every server that locks go to answers now.
    pub(crate) async fn answers(&self) -> Result<()> {
        self.check_ours().map_err(|forked| self.dials.unreachable(forked))?;
        let answers = join_all(self.script_links().iter().map(|link| link.barrier())).await;
        let all: std::result::Result<Vec<()>, StoreError> = answers.into_iter().collect();
        all.map(drop).map_err(|error| self.dials.unreachable(error))
    }

    /// Whether the servers are a cluster.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.dials.endpoint.place, Place::Cluster(_))
    }

    /// The link that carries everything about this key by now.
    fn link(&self, key: &str) -> Arc<Link> {
        self.link_of(self.group_of(key))
    }

    fn link_of(&self, group: u16) -> Arc<Link> {
        match self.servers() {
            Servers::One(one) => Arc::clone(&one.scripts),
            Servers::Cluster(cluster) => cluster.link(group),
        }
    }

    /// The number of the connection that carries requests about this key by now.
    pub(crate) fn epoch(&self, key: &str) -> Epoch {
        self.link(key).epoch()
    }

    /// The way of a request about this key that is asked now.
    pub(crate) fn route(&self, key: &str, asked: Instant) -> Route {
        let slot = self.group_of(key);
        let link = self.link_of(slot);
        let until = link.until(asked);
        Route::new(link, until, slot)
    }

    /// Turns a route to where its request, which was not executed, goes now. `false`: nowhere.
    pub(crate) async fn follow(&self, route: &mut Route) -> bool {
        let Servers::Cluster(cluster) = self.servers() else { return false };
        let spare = self.dials.config.command_timeout() / SPARE;
        let Some((next, pause)) = route.go_on(spare) else { return false };
        let timer = |pause| {
            let _context = self.dials.own.enter();
            tokio::time::sleep(pause)
        };
        if !pause.is_zero() {
            timer(pause).await;
        }
        let (link, asking) = match next {
            Next::To(link) => (link, false),
            Next::Asking(link) => {
                let goes = route.goes_asking(pause) && link.is_up();
                // after it is judged: what is late widens no window of its own
                if pause.is_zero() {
                    route.link.sent_elsewhere(route.until.asked());
                }
                if goes {
                    (link, true)
                } else if route.has_time_again(spare) {
                    // the master says so once more, and then there is a connection
                    route.has_rested = link.up_by(route.until).await.is_ok();
                    (cluster.link(route.slot), false)
                } else {
                    return false;
                }
            }
            Next::Later => (cluster.link(route.slot), false),
            Next::Elsewhere { or_there } => {
                let nowhere = async {
                    if or_there {
                        // until then it is slow to let anybody in, and not gone
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
        route.turn(link, asking);
        true
    }

    /// Where the server is. Never the password.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Which servers there are, as far as is known.
    pub(crate) fn topology(&self) -> Topology {
        let (kind, nodes) = match self.servers() {
            _ if self.is_cluster() && !self.is_connected() => (TopologyKind::Cluster, Vec::new()),
            Servers::One(one) => one.topology(&self.dials),
            Servers::Cluster(cluster) => (TopologyKind::Cluster, cluster.topology()),
        };
        Topology { kind, nodes }
    }

    /// What a request takes, and a quarter more; zero while that is not known.
    pub(crate) fn round_trip(&self) -> Duration {
        self.longest(Link::round_trip)
    }

    /// The same without what is spent behind a WAIT of this client.
    pub(crate) fn free_round_trip(&self) -> Duration {
        self.longest(Link::free_round_trip)
    }

    fn longest(&self, of_link: fn(&Link) -> Duration) -> Duration {
        match self.servers() {
            Servers::One(one) => of_link(&one.scripts),
            Servers::Cluster(cluster) => cluster.longest(of_link),
        }
    }

    /// Whether both are known to lead to one server. One that was restarted between the two connects is not recognised.
    pub(crate) fn is_of_same_server(&self, other: &Self) -> bool {
        match (self.servers(), other.servers()) {
            _ if std::ptr::eq(self, other) => true,
            _ if !self.is_connected() || !other.is_connected() => self.address == other.address,
            (Servers::One(one), Servers::One(other)) => one.is(other),
            (Servers::Cluster(one), Servers::Cluster(other)) => one.is(other),
            _ => false,
        }
    }

    /// Whether one script may name all these keys: in a cluster they must be in one slot.
    pub(crate) fn takes_together<'a>(&self, mut keys: impl Iterator<Item = &'a Arc<str>>) -> bool {
        let first = keys.next().map(|key| self.group_of(key));
        first.is_some_and(|first| keys.all(|key| self.group_of(key) == first))
    }

    /// What the keys of one script have in common: in a cluster, the slot.
    pub(crate) fn group_of(&self, key: &str) -> u16 {
        match self.servers() {
            Servers::One(_) => 0,
            Servers::Cluster(_) => slot_of(key),
        }
    }

    /// The number of the server that has a group's keys by now.
    pub(crate) fn server_of(&self, group: u16) -> u16 {
        match self.servers() {
            Servers::One(_) => 0,
            Servers::Cluster(cluster) => cluster.owner(group),
        }
    }

    /// Changes whenever the connection that carries scripts was made anew, to its epoch.
    pub(crate) fn connections(&self) -> watch::Receiver<Epoch> {
        self.dials.epochs.of_scripts()
    }

    /// Where waiters of a channel listen: the number of the node, and the link for that.
    pub(crate) fn home(&self, channel: &str) -> (u16, Arc<Link>) {
        match self.servers() {
            Servers::One(one) => (0, Arc::clone(&one.messages)),
            Servers::Cluster(cluster) => cluster.home(slot_of(channel)),
        }
    }

    /// Changes when channels have other homes; `None`: that never happens.
    pub(crate) fn moves(&self) -> Option<watch::Receiver<u64>> {
        match self.servers() {
            Servers::One(_) => None,
            Servers::Cluster(cluster) => Some(cluster.moves()),
        }
    }

    /// A node said that a slot has another master.
    pub(crate) fn ring(&self) {
        if let Servers::Cluster(cluster) = self.servers() {
            cluster.ring();
        }
    }

    /// The link that waits for elements of lists, made when it is first asked for. Must be asked for on the client's
    /// own runtime. In a cluster there is none.
    pub(crate) async fn lists(&self) -> Result<&Arc<Link>, StoreError> {
        match self.servers() {
            Servers::One(one) => one.lists(&self.dials).await,
            Servers::Cluster(_) => {
                Err(StoreError::new(StoreErrorKind::Unavailable, false, "nobody waits for lists in a cluster"))
            }
        }
    }

    fn script_links(&self) -> Vec<Arc<Link>> {
        self.servers().script_links()
    }

    /// Waits until what was sent is answered, and knows then how long that takes.
    pub(crate) async fn barrier(&self) {
        join_all(self.script_links().iter().map(|link| link.barrier())).await;
    }

    /// Whether this process is the client's, and no fork of it.
    pub(crate) fn is_ours(&self) -> bool {
        self.dials.epochs.are_ours()
    }

    pub(crate) fn check_ours(&self) -> Result<(), StoreError> {
        self.dials.epochs.check_ours()
    }

    /// Requests that are not answered yet, of those that carry scripts.
    pub(crate) fn under_way(&self) -> usize {
        self.script_links().iter().map(|link| link.under_way()).sum()
    }

    /// Answers are needed soon, whatever becomes of the user's runtime.
    pub(crate) fn hurry(&self) {
        match self.servers() {
            Servers::One(one) => one.scripts.hurry(),
            Servers::Cluster(_) => self.script_links().iter().for_each(|link| link.hurry()),
        }
    }

    /// Whether this key's server can be reached.
    pub(crate) fn is_up(&self, key: &str) -> bool {
        self.link(key).is_up()
    }

    /// Waits until this key's server can be reached.
    pub(crate) async fn wait_up(&self, key: &str) {
        let Servers::Cluster(cluster) = self.servers() else { return self.link(key).wait_up().await };
        let mut moves = cluster.moves();
        loop {
            let link = self.link(key);
            tokio::select! {
                () = link.wait_up() => return,
                // it may be another server now
                _ = moves.changed() => {}
            }
        }
    }

    /// Waits until this key's server serves again that refused everything, as its cluster was down. Of any other nothing is
    /// known: for ever.
    pub(crate) async fn serves_again(&self, key: &str) {
        self.link(key).serves_again().await;
    }

    /// Sends a request on its way: the answer, and the number of the connection that brought it.
    async fn send(&self, route: &mut Route, call: &Call) -> Result<(Value, Epoch), StoreError> {
        #[cfg(test)]
        if let Some(server) = &self.played {
            return Ok((server.answer(call.clone()).await?, route.epoch()));
        }
        let answer = route.link.eval(call, route.until, route.asking, (route.copies, &mut route.receipt)).await;
        let Servers::Cluster(cluster) = self.servers() else { return answer };
        answer.map_err(|error| {
            let error = call.script.refusal(error);
            route.next = cluster.next(route.slot, call, &route.link, &error);
            error
        })
    }

    /// The same for a request that is in nobody's books: on whichever way it goes by now.
    async fn eval(&self, call: &Call) -> Result<(Value, Epoch), StoreError> {
        self.eval_by(&mut self.route(call.keys.first().map_or("", |key| &**key), Instant::now()), call).await
    }

    async fn eval_by(&self, route: &mut Route, call: &Call) -> Result<(Value, Epoch), StoreError> {
        loop {
            match self.send(route, call).await {
                Err(_) if self.follow(route).await => {}
                answer => return answer,
            }
        }
    }

    /// Runs an acquire script, or a transfer script, which never answers "busy". With the number of the connection that
    /// brought the answer.
    pub(crate) async fn acquire(&self, route: &mut Route, call: &Call) -> Result<(Acquired, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::acquired(&answer)?, epoch))
    }

    /// Runs a release script, as [`Store::acquire`].
    pub(crate) async fn release(&self, route: &mut Route, call: &Call) -> Result<(Released, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::released(&answer)?, epoch))
    }

    /// The same for a release that is in nobody's books: of a ghost, or of what was given away.
    pub(crate) async fn release_in_no_books(&self, call: &Call) -> Result<(Released, Epoch), StoreError> {
        let (answer, epoch) = self.eval(call).await?;
        Ok((reply::released(&answer)?, epoch))
    }

    /// Runs an acquire script over many locks, as [`Store::acquire`]; see [`reply::acquired_together`].
    pub(crate) async fn acquire_together(
        &self,
        route: &mut Route,
        call: &Call,
    ) -> Result<(Option<(usize, Acquired)>, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::acquired_together(&answer, call.keys.len())?, epoch))
    }

    /// Runs a release script over many locks, as [`Store::acquire`].
    pub(crate) async fn release_together(
        &self,
        route: &mut Route,
        call: &Call,
    ) -> Result<(Vec<Released>, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::released_together(&answer, call.keys.len())?, epoch))
    }

    /// Waits until the copies are there that a route was to see to, of what its script has written. `Ok(None)`: none were
    /// wanted.
    pub(crate) async fn acknowledged(&self, route: &Route) -> Result<Option<Acks>, StoreError> {
        match &route.receipt {
            Some(receipt) => route.link.acknowledged(receipt, route.until).await.map(Some),
            None => Ok(None),
        }
    }

    /// Runs a renew script over many locks: what it answered, and whether those copies have it. It waits for no runtime of
    /// the user's.
    pub(crate) async fn renew(
        &self,
        call: &Call,
        copies: Option<Copies>,
    ) -> Result<(Vec<Renewed>, Result<Option<Acks>, StoreError>), StoreError> {
        let locks = call.keys.len();
        let mut route = self.route(call.keys.first().map_or("", |key| &**key), Instant::now());
        route.copies = copies;
        route.lets_nobody_in();
        let asked = async {
            let mut answers = reply::renewed(&self.eval_by(&mut route, call).await?.0, locks)?;
            if route.may_have_missed() {
                let is_missed = |answer: &Renewed| matches!(answer, Renewed::Gone | Renewed::Taken);
                if locks == 1 && answers.iter().all(is_missed) {
                    let missed = "not found where its slot goes; it may have come back meanwhile";
                    return Err(StoreError::new(StoreErrorKind::Moved, false, missed));
                }
                answers.iter_mut().filter(|answer| is_missed(answer)).for_each(|answer| *answer = Renewed::Unknown);
            }
            let acks = self.acknowledged(&route).await;
            Ok((answers, acks))
        };
        // once it is asked, the keeper looks whether anybody reads the answer
        let (answer, ()) = futures_util::future::join(asked, async { self.hurry() }).await;
        answer
    }

    /// Runs a `force_release` script.
    pub(crate) async fn force_release(&self, call: &Call) -> Result<Forced, StoreError> {
        reply::forced(&self.eval(call).await?.0)
    }

    /// Runs an inspect script.
    pub(crate) async fn inspect(&self, call: &Call) -> Result<Inspected, StoreError> {
        let answer = self.eval(call).await.and_then(|(value, _)| reply::inspected(&value));
        answer.map_err(StoreError::of_a_read)
    }

    /// Runs a script that tells one waiter.
    pub(crate) async fn signal(&self, call: &Call) -> Result<(), StoreError> {
        self.eval(call).await.map(drop)
    }

    /// Keys of a pattern, strings only: the page after `cursor`, which begins and ends at `0`.
    pub(crate) async fn scan(&self, cursor: &str, pattern: &str) -> Result<Page, StoreError> {
        let Servers::Cluster(cluster) = self.servers() else {
            let link = self.link("");
            let (next, keys) = link.scan(cursor, pattern).await.map_err(StoreError::of_a_read)?;
            return Ok(Page { keys, next: (next != "0").then_some(next) });
        };
        // one master after the other: `node/cursor`. What moves meanwhile may be found twice
        let masters = cluster.masters();
        let Some((at, cursor)) = cluster::go_on(cursor, masters.iter().map(|(node, _)| *node)) else {
            return Ok(Page { keys: Vec::new(), next: None });
        };
        let (node, link) = &masters[at];
        let (next, keys) = link.scan(cursor, pattern).await.map_err(StoreError::of_a_read)?;
        let next = if next == "0" { format!("{}/0", node + 1) } else { format!("{node}/{next}") };
        let is_over = next.ends_with("/0") && masters.iter().all(|(other, _)| other <= node);
        Ok(Page { keys, next: (!is_over).then_some(next) })
    }

    /// Runs a script that reads or writes a guarded key.
    pub(crate) async fn guarded(&self, call: &Call) -> Result<Guarded, StoreError> {
        reply::guarded(&self.eval(call).await?.0)
    }

    /// Ends the connections without a word.
    pub(crate) fn abandon(&self) {
        self.last_links().iter().for_each(|link| link.abandon());
    }

    /// Ends the connections.
    pub(crate) async fn close(&self) {
        join_all(self.last_links().iter().map(|link| link.close())).await;
    }

    /// Makes no more links, and looks for no server any more: those that there are.
    fn last_links(&self) -> Vec<Arc<Link>> {
        self.servers().stop()
    }
}

/// The digest by which the server knows a script.
pub(crate) fn sha1(source: &str) -> Str {
    fred::util::sha1_hash(source).into()
}

#[cfg(test)]
pub(crate) mod tests;
