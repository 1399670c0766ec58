//! The only room with a door to Redis: scripts go in, answers and typed errors come out.

mod link;
mod pace;
mod refusal;
mod reply;
mod round_trip;
mod script;
mod wire;

use std::{sync::Arc, time::Duration};

use fred::{
    bytes_utils::Str,
    types::config::{Config as FredConfig, ServerConfig},
};
use tokio::{runtime::Handle, sync::OnceCell, time::timeout};

pub(crate) use self::{
    link::{Epoch, Link},
    reply::{Acquired, Forced, Guarded, Inspected, Released, Renewed},
    script::{Arg, Arity, Call, Script, script},
    wire::{Heard, Sink, Value, has_io_here},
};
use self::{pace::Pace, wire::Dial};
use crate::{
    error::{Error, Result, StoreError, StoreErrorKind},
    options::{Config, Wire},
};

/// Where the server is, and how to log in: made from a URL, or from a configuration of fred's.
#[derive(Clone)]
#[cfg_attr(not(feature = "fred-config"), expect(unreachable_pub, reason = "public with the feature"))]
pub struct Endpoint {
    server: FredConfig,
    /// As the URL says.
    wire: Option<Wire>,
}

impl std::fmt::Debug for Endpoint {
    /// Without user and password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", wire::address(&self.server))
    }
}

#[cfg(feature = "fred-config")]
impl From<FredConfig> for Endpoint {
    fn from(server: FredConfig) -> Self {
        Self { server, wire: None }
    }
}

impl Endpoint {
    /// Reads `redis://`, `rediss://` (TLS) or `redis+unix://`, with user, password and database, and `?wire=` at the end.
    pub(crate) fn from_url(url: &str) -> Result<Self> {
        let refuse = |reason: String| Err(Error::InvalidConfig { reason });
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        match scheme {
            "redis" | "valkey" | "redis+unix" => {}
            "rediss" | "valkeys" if cfg!(feature = "rustls") => {}
            "rediss" | "valkeys" => {
                return refuse(format!("{scheme}:// needs TLS; enable the feature `rustls` of nestlock"));
            }
            _ if scheme.ends_with("-cluster") => return Err(no_cluster()),
            _ if scheme.ends_with("-sentinel") => return Err(no_sentinel()),
            // the rest of the URL may hold a password
            _ => return refuse(format!("the URL's scheme is {scheme:?}; use redis://, rediss:// or redis+unix://")),
        }
        let (url, query) = url.split_once('?').unwrap_or((url, ""));
        let mut wire = None;
        for option in query.split('&').filter(|option| !option.is_empty()) {
            wire = match option {
                "wire=own" => Some(Wire::Own),
                "wire=fred" => Some(Wire::Fred),
                _ => return refuse("the URL has an option after `?` that is neither wire=own nor wire=fred".into()),
            };
        }
        match FredConfig::from_url(url) {
            Ok(server) => Ok(Self { server, wire }),
            Err(error) => refuse(format!("the URL cannot be read ({})", error.kind().to_str())),
        }
    }

    /// Which client carries requests and messages.
    pub(crate) fn wire(&self, config: &Config) -> Wire {
        self.wire.unwrap_or(config.wire)
    }

    /// Refuses what would be followed by no link.
    fn check(&self) -> Result<()> {
        match &self.server.server {
            ServerConfig::Centralized { .. } | ServerConfig::Unix { .. } => Ok(()),
            ServerConfig::Clustered { .. } => Err(no_cluster()),
            ServerConfig::Sentinel { .. } => Err(no_sentinel()),
        }
    }
}

fn no_cluster() -> Error {
    let reason = "clusters are not supported yet; connect to one server with redis:// or ServerConfig::new_centralized \
                  (a cluster of one node, which has all slots, is one), or use a RedLock over several";
    Error::InvalidConfig { reason: reason.into() }
}

fn no_sentinel() -> Error {
    let reason = "Sentinel is not supported yet; connect to an address that leads to the master (a virtual IP, a \
                  service, a proxy) with redis:// or ServerConfig::new_centralized: after a failover it is looked up again";
    Error::InvalidConfig { reason: reason.into() }
}

/// The server, seen through its links: one for scripts, one for subscriptions, and, once somebody waits for a list, one
/// that BLPOP blocks. A lock name never changes its link.
#[derive(Debug)]
pub(crate) struct Store {
    scripts: Arc<Link>,
    subscriptions: Arc<Link>,
    address: String,
    /// What tells the server from all others, as it said when the client connected.
    run_id: Option<String>,
    lists: OnceCell<Arc<Link>>,
    pace: Arc<Pace>,
    endpoint: Endpoint,
    config: Config,
    name: Arc<str>,
    own: Handle,
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
    ///
    /// `driver`: the runtime that reads answers and messages, while it runs. `sink`: who hears messages.
    pub(crate) async fn connect(
        endpoint: &Endpoint,
        config: &Config,
        name: &Arc<str>,
        own: &Handle,
        driver: Option<Handle>,
        sink: Sink,
    ) -> Result<Self> {
        endpoint.check()?;
        let unreachable = |source: StoreError| Error::Connect {
            address: wire::address(&endpoint.server),
            source: source.before_any_request(),
        };
        let pace = Arc::new(Pace::new());
        let both = async {
            let dial = |sink| Dial::new(endpoint, config, name, own, driver.clone(), sink);
            let scripts = Link::connect(dial(None), &pace).await?;
            let subscriptions = Link::connect(dial(Some(sink)), &pace).await?;
            // some that speak the protocol say the same everywhere
            let run_id = scripts.run_id().await.filter(|id| id.len() == 40 && id.bytes().any(|byte| byte != b'0'));
            Ok((scripts, subscriptions, run_id))
        };
        let late = |_| {
            let late = format!("no connection within {:?}", config.connect_timeout);
            Err(StoreError::new(StoreErrorKind::Timeout, false, late))
        };
        let links = timeout(config.connect_timeout, both).await.unwrap_or_else(late);
        let (scripts, subscriptions, run_id) = links.map_err(unreachable)?;
        let address = wire::address(&endpoint.server);
        let (endpoint, config, name, own) = (endpoint.clone(), config.clone(), Arc::clone(name), own.clone());
        Ok(Self {
            scripts,
            subscriptions,
            address,
            run_id,
            lists: OnceCell::new(),
            pace,
            endpoint,
            config,
            name,
            own,
            #[cfg(test)]
            played: None,
        })
    }

    /// The link that carries everything about this key. There is one on a standalone server.
    pub(crate) fn link(&self, _key: &str) -> &Arc<Link> {
        &self.scripts
    }

    /// Where the server is. Never the password.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// What a request takes, and a quarter more; zero while that is not known.
    pub(crate) fn round_trip(&self) -> Duration {
        self.scripts.round_trip()
    }

    /// Whether both are known to lead to one server. One that was restarted between the two connects is not recognised.
    pub(crate) fn is_of_same_server(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.run_id.is_some() && self.run_id == other.run_id
    }

    /// Whether one script may name all these keys: they are on one link. A cluster also asks that they are in one slot.
    pub(crate) fn takes_together<'a>(&self, mut keys: impl Iterator<Item = &'a Arc<str>>) -> bool {
        let first = keys.next().map(|key| self.link(key));
        first.is_some_and(|first| keys.all(|key| Arc::ptr_eq(self.link(key), first)))
    }

    /// Changes whenever the connection that carries scripts was made anew, to its epoch.
    pub(crate) fn connections(&self) -> tokio::sync::watch::Receiver<Epoch> {
        self.scripts.connections()
    }

    /// The link that carries subscriptions.
    pub(crate) fn subscriptions(&self) -> &Arc<Link> {
        &self.subscriptions
    }

    /// The link that waits for elements of lists, made when it is first asked for. Must be asked for on the client's
    /// own runtime.
    pub(crate) async fn lists(&self) -> Result<&Arc<Link>, StoreError> {
        let dial = || Dial::new(&self.endpoint, &self.config, &self.name, &self.own, None, None);
        let link = self.lists.get_or_init(|| async { Link::blocking(dial(), &self.pace) }).await;
        match timeout(self.config.connect_timeout, link.wait_up()).await {
            Ok(()) => Ok(link),
            Err(_) => Err(StoreError::new(StoreErrorKind::Unavailable, false, "not connected")),
        }
    }

    /// Requests that are not answered yet, of those that carry scripts.
    pub(crate) fn under_way(&self) -> usize {
        self.scripts.under_way()
    }

    /// Answers are needed soon, whatever becomes of the user's runtime.
    pub(crate) fn hurry(&self) {
        self.scripts.hurry();
    }

    /// Waits until this key's server can be reached, at most `limit`.
    pub(crate) async fn wait_up(&self, key: &str, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.link(key).wait_up()).await;
    }

    async fn eval(&self, call: &Call) -> Result<Value, StoreError> {
        #[cfg(test)]
        if let Some(server) = &self.played {
            return server.answer(call.clone()).await;
        }
        let link = self.link(call.keys.first().map_or("", |key| &**key));
        link.eval(call).await
    }

    /// Runs an acquire script, or a transfer script, which never answers "busy".
    pub(crate) async fn acquire(&self, call: &Call) -> Result<Acquired, StoreError> {
        reply::acquired(&self.eval(call).await?)
    }

    /// Runs a release script.
    pub(crate) async fn release(&self, call: &Call) -> Result<Released, StoreError> {
        reply::released(&self.eval(call).await?)
    }

    /// Runs an acquire script over many locks; see [`reply::acquired_together`].
    pub(crate) async fn acquire_together(&self, call: &Call) -> Result<Option<(usize, Acquired)>, StoreError> {
        let locks = call.keys.len();
        reply::acquired_together(&self.eval(call).await?, locks)
    }

    /// Runs a release script over many locks.
    pub(crate) async fn release_together(&self, call: &Call) -> Result<Vec<Released>, StoreError> {
        let locks = call.keys.len();
        reply::released_together(&self.eval(call).await?, locks)
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
        let (next, keys) = self.scripts.scan(cursor, pattern).await.map_err(StoreError::of_a_read)?;
        Ok(Page { keys, next: (next != "0").then_some(next) })
    }

    /// Runs a script that reads or writes a guarded key.
    pub(crate) async fn guarded(&self, call: &Call) -> Result<Guarded, StoreError> {
        reply::guarded(&self.eval(call).await?)
    }

    /// Ends the connections without a word.
    pub(crate) fn abandon(&self) {
        for link in [Some(&self.scripts), Some(&self.subscriptions), self.lists.get()].into_iter().flatten() {
            link.abandon();
        }
    }

    /// Ends the connections.
    pub(crate) async fn close(&self) {
        let lists = async {
            if let Some(link) = self.lists.get() {
                link.abandon();
            }
        };
        tokio::join!(self.scripts.close(), self.subscriptions.close(), lists);
    }
}

/// The digest by which the server knows a script.
pub(crate) fn sha1(source: &str) -> Str {
    fred::util::sha1_hash(source).into()
}

#[cfg(test)]
pub(crate) mod tests;
