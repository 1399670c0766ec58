//! The only room with a door to Redis: scripts go in, answers and typed errors come out.

mod endpoint;
mod link;
mod one;
mod pace;
mod refusal;
mod reply;
mod round_trip;
mod route;
mod script;
mod wire;

use std::{fmt, sync::Arc, time::Duration};

use fred::bytes_utils::Str;
use futures_util::future::join_all;
use tokio::runtime::Handle;

pub use self::endpoint::Endpoint;
use self::{endpoint::Place, link::Epochs, one::One, wire::Dial};
pub(crate) use self::{
    link::{Epoch, Link},
    reply::{Acquired, Forced, Guarded, Inspected, Released, Renewed},
    route::Route,
    script::{Arg, Arity, Call, Script, script},
    wire::{Heard, Sink, Value, has_io_here},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError},
    options::Config,
};

const NO_CLUSTER: &str = "clusters are not supported yet; connect to one server with redis:// or ServerConfig::new_centralized \
     (a cluster of one node, which has all slots, is one), or use a RedLock over several";
const NO_SENTINEL: &str = "Sentinel is not supported yet; connect to an address that leads to the master (a virtual IP, a service, \
     a proxy) with redis:// or ServerConfig::new_centralized: after a failover it is looked up again";
const NO_LIST: &str = "several addresses are not supported yet; connect to one";

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

impl fmt::Debug for Dials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dials").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// The servers, seen through their links. All requests about a lock name go over one link, until its server is another one.
#[derive(Debug)]
pub(crate) struct Store {
    one: One,
    dials: Dials,
    address: String,
    /// What answers in the server's place.
    #[cfg(test)]
    played: Option<Arc<tests::Server>>,
}

/// Keys that `SCAN` found, and where to go on.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) keys: Vec<String>,
    pub(crate) next: Option<String>,
}

impl Store {
    /// Connects. Must run on the client's own runtime.
    pub(crate) async fn connect(dials: Dials) -> Result<Self> {
        let refuse = |reason: &str| Err(Error::InvalidConfig { reason: reason.into() });
        let one = match &dials.endpoint.place {
            Place::Server => One::connect(&dials).await?,
            Place::Cluster(_) => return refuse(NO_CLUSTER),
            Place::Sentinel(_) => return refuse(NO_SENTINEL),
            Place::List(_) => return refuse(NO_LIST),
        };
        Ok(Self {
            one,
            address: dials.endpoint.address(),
            dials,
            #[cfg(test)]
            played: None,
        })
    }

    /// The link that carries everything about this key.
    pub(crate) fn link(&self, _key: &str) -> Arc<Link> {
        Arc::clone(&self.one.scripts)
    }

    /// The way of a request about this key that is asked now.
    pub(crate) fn route(&self, key: &str, asked: Instant) -> Route {
        let link = self.link(key);
        let until = link.until(asked);
        Route::new(link, until)
    }

    /// Where the server is. Never the password.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// What a request takes, and a quarter more; zero while that is not known.
    pub(crate) fn round_trip(&self) -> Duration {
        self.one.scripts.round_trip()
    }

    /// Whether both are known to lead to one server. One that was restarted between the two connects is not recognised.
    pub(crate) fn is_of_same_server(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.one.is(&other.one)
    }

    /// Whether one script may name all these keys: they are on one link. A cluster also asks that they are in one slot.
    pub(crate) fn takes_together<'a>(&self, mut keys: impl Iterator<Item = &'a Arc<str>>) -> bool {
        let first = keys.next().map(|key| self.link(key));
        first.is_some_and(|first| keys.all(|key| Arc::ptr_eq(&self.link(key), &first)))
    }

    /// Changes whenever the connection that carries scripts was made anew, to its epoch.
    pub(crate) fn connections(&self) -> tokio::sync::watch::Receiver<Epoch> {
        self.dials.epochs.of_scripts()
    }

    /// The link that carries subscriptions.
    pub(crate) fn subscriptions(&self) -> &Arc<Link> {
        &self.one.messages
    }

    /// The link that waits for elements of lists, made when it is first asked for. Must be asked for on the client's
    /// own runtime.
    pub(crate) async fn lists(&self) -> Result<&Arc<Link>, StoreError> {
        self.one.lists(&self.dials).await
    }

    /// Requests that are not answered yet, of those that carry scripts.
    pub(crate) fn under_way(&self) -> usize {
        self.one.scripts.under_way()
    }

    /// Answers are needed soon, whatever becomes of the user's runtime.
    pub(crate) fn hurry(&self) {
        self.one.scripts.hurry();
    }

    /// Whether this key's server can be reached.
    pub(crate) fn is_up(&self, key: &str) -> bool {
        self.link(key).is_up()
    }

    /// Waits until this key's server can be reached.
    pub(crate) async fn wait_up(&self, key: &str) {
        self.link(key).wait_up().await;
    }

    /// Sends a request on its way: the answer, and the number of the connection that brought it.
    async fn send(&self, route: &Route, call: &Call) -> Result<(Value, Epoch), StoreError> {
        #[cfg(test)]
        if let Some(server) = &self.played {
            return Ok((server.answer(call.clone()).await?, route.epoch()));
        }
        route.link.eval(call, route.until).await
    }

    /// The same for a request that is in nobody's books: on whichever way it goes by now.
    async fn eval(&self, call: &Call) -> Result<Value, StoreError> {
        let key = call.keys.first().map_or("", |key| &**key);
        let (answer, _) = self.send(&self.route(key, Instant::now()), call).await?;
        Ok(answer)
    }

    /// Runs an acquire script, or a transfer script, which never answers "busy". With the number of the connection that
    /// brought the answer.
    pub(crate) async fn acquire(&self, route: &Route, call: &Call) -> Result<(Acquired, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::acquired(&answer)?, epoch))
    }

    /// Runs a release script, as [`Store::acquire`].
    pub(crate) async fn release(&self, route: &Route, call: &Call) -> Result<(Released, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::released(&answer)?, epoch))
    }

    /// Runs an acquire script over many locks, as [`Store::acquire`]; see [`reply::acquired_together`].
    pub(crate) async fn acquire_together(
        &self,
        route: &Route,
        call: &Call,
    ) -> Result<(Option<(usize, Acquired)>, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::acquired_together(&answer, call.keys.len())?, epoch))
    }

    /// Runs a release script over many locks, as [`Store::acquire`].
    pub(crate) async fn release_together(
        &self,
        route: &Route,
        call: &Call,
    ) -> Result<(Vec<Released>, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::released_together(&answer, call.keys.len())?, epoch))
    }

    /// Runs a renew script over many locks. It waits for no runtime of the user's.
    pub(crate) async fn renew(&self, call: &Call) -> Result<Vec<Renewed>, StoreError> {
        let locks = call.keys.len();
        // once it is asked, the keeper looks whether anybody reads the answer
        let (answer, ()) = futures_util::future::join(self.eval(call), async { self.hurry() }).await;
        reply::renewed(&answer?, locks)
    }

    /// Runs a `force_release` script.
    pub(crate) async fn force_release(&self, call: &Call) -> Result<Forced, StoreError> {
        reply::forced(&self.eval(call).await?)
    }

    /// Runs an inspect script.
    pub(crate) async fn inspect(&self, call: &Call) -> Result<Inspected, StoreError> {
        let answer = self.eval(call).await.and_then(|value| reply::inspected(&value));
        answer.map_err(StoreError::of_a_read)
    }

    /// Runs a script that tells one waiter.
    pub(crate) async fn signal(&self, call: &Call) -> Result<(), StoreError> {
        self.eval(call).await.map(drop)
    }

    /// Keys of a pattern, strings only: the page after `cursor`, which begins and ends at `0`.
    pub(crate) async fn scan(&self, cursor: &str, pattern: &str) -> Result<Page, StoreError> {
        let (next, keys) = self.one.scripts.scan(cursor, pattern).await.map_err(StoreError::of_a_read)?;
        Ok(Page { keys, next: (next != "0").then_some(next) })
    }

    /// Runs a script that reads or writes a guarded key.
    pub(crate) async fn guarded(&self, call: &Call) -> Result<Guarded, StoreError> {
        reply::guarded(&self.eval(call).await?)
    }

    /// Ends the connections without a word.
    pub(crate) fn abandon(&self) {
        self.one.links().for_each(|link| link.abandon());
    }

    /// Ends the connections.
    pub(crate) async fn close(&self) {
        join_all(self.one.links().map(|link| link.close())).await;
    }
}

/// The digest by which the server knows a script.
pub(crate) fn sha1(source: &str) -> Str {
    fred::util::sha1_hash(source).into()
}

#[cfg(test)]
pub(crate) mod tests;
