//! The only room with a door to Redis: scripts go in, answers and typed errors come out.

mod link;
mod reply;
mod script;

use std::{sync::Arc, time::Duration};

use fred::types::{Message, config::Config as FredConfig};
use tokio::runtime::Handle;

pub(crate) use self::{
    link::Link,
    reply::{Acquired, Forced, Guarded, Inspected, Released, Renewed},
    script::{Arg, Arity, Call, Script, script},
};
use crate::{
    error::{Error, Result, StoreError},
    options::Config,
};

/// A message of a channel, as the hub sees it.
pub(crate) type ChannelMessage = Message;

/// Where the server is, and how to log in: made from a URL, or from a configuration of fred's.
#[derive(Clone)]
pub struct Endpoint(FredConfig);

impl std::fmt::Debug for Endpoint {
    /// Without user and password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({})", link::address(&self.0))
    }
}

impl From<FredConfig> for Endpoint {
    fn from(config: FredConfig) -> Self {
        Self(config)
    }
}

impl Endpoint {
    /// Reads `redis://`, `rediss://` (TLS) or `redis+unix://`, with user, password and database.
    pub(crate) fn from_url(url: &str) -> Result<Self> {
        let refuse = |reason: String| Err(Error::InvalidConfig { reason });
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        match scheme {
            "redis" | "valkey" | "redis+unix" => {}
            "rediss" | "valkeys" if cfg!(feature = "rustls") => {}
            "rediss" | "valkeys" => {
                return refuse(format!("{scheme}:// needs TLS; enable the feature `rustls` of nestlock"));
            }
            // the rest of the URL may hold a password
            _ => return refuse(format!("the URL's scheme is {scheme:?}; use redis://, rediss:// or redis+unix://")),
        }
        match FredConfig::from_url(url) {
            Ok(config) => Ok(Self(config)),
            Err(error) => refuse(format!("the URL cannot be read ({})", error.kind().to_str())),
        }
    }
}

/// The server, seen through its links: one for scripts, one for subscriptions. A lock name never changes its link.
#[derive(Debug)]
pub(crate) struct Store {
    scripts: Arc<Link>,
    subscriptions: Arc<Link>,
}

impl Store {
    /// Connects. Must run on the client's own runtime.
    pub(crate) async fn connect(endpoint: &Endpoint, config: &Config, own: &Handle, driver: Handle) -> Result<Self> {
        let unreachable = |source: StoreError| Error::Connect {
            address: link::address(&endpoint.0),
            source: source.before_any_request(),
        };
        let both = async {
            let scripts = Link::connect(&endpoint.0, config, own.clone(), driver).await?;
            let subscriptions = Link::connect(&endpoint.0, config, own.clone(), own.clone()).await?;
            Ok(Self { scripts, subscriptions })
        };
        match tokio::time::timeout(config.connect_timeout, both).await {
            Ok(store) => store.map_err(unreachable),
            Err(_) => Err(unreachable(StoreError::new(
                crate::error::StoreErrorKind::Timeout,
                false,
                format!("no connection within {:?}", config.connect_timeout),
            ))),
        }
    }

    /// The link that carries everything about this key. There is one on a standalone server.
    pub(crate) fn link(&self, _key: &str) -> &Arc<Link> {
        &self.scripts
    }

    /// Whether one script may name all these keys: they are on one link. A cluster also asks that they are in one slot.
    pub(crate) fn takes_together<'a>(&self, mut keys: impl Iterator<Item = &'a Arc<str>>) -> bool {
        let first = keys.next().map(|key| self.link(key));
        first.is_some_and(|first| keys.all(|key| Arc::ptr_eq(self.link(key), first)))
    }

    /// The link that carries subscriptions.
    pub(crate) fn subscriptions(&self) -> &Arc<Link> {
        &self.subscriptions
    }

    /// Waits until this key's server can be reached, at most `limit`.
    pub(crate) async fn wait_up(&self, key: &str, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.link(key).wait_up()).await;
    }

    async fn eval(&self, call: Call) -> Result<fred::types::Value, StoreError> {
        let link = self.link(call.keys.first().map_or("", |key| &**key));
        link.eval(call).await
    }

    /// Runs an acquire script.
    pub(crate) async fn acquire(&self, call: Call) -> Result<Acquired, StoreError> {
        reply::acquired(&self.eval(call).await?)
    }

    /// Runs a release script.
    pub(crate) async fn release(&self, call: Call) -> Result<Released, StoreError> {
        reply::released(&self.eval(call).await?)
    }

    /// Runs an acquire script over many locks; see [`reply::acquired_together`].
    pub(crate) async fn acquire_together(&self, call: Call) -> Result<Option<(usize, Acquired)>, StoreError> {
        let locks = call.keys.len();
        reply::acquired_together(&self.eval(call).await?, locks)
    }

    /// Runs a release script over many locks.
    pub(crate) async fn release_together(&self, call: Call) -> Result<Vec<Released>, StoreError> {
        let locks = call.keys.len();
        reply::released_together(&self.eval(call).await?, locks)
    }

    /// Runs a renew script over many locks.
    pub(crate) async fn renew(&self, call: Call) -> Result<Vec<Renewed>, StoreError> {
        let locks = call.keys.len();
        reply::renewed(&self.eval(call).await?, locks)
    }

    /// Runs a `force_release` script.
    pub(crate) async fn force_release(&self, call: Call) -> Result<Forced, StoreError> {
        reply::forced(&self.eval(call).await?)
    }

    /// Runs an inspect script.
    pub(crate) async fn inspect(&self, call: Call) -> Result<Inspected, StoreError> {
        reply::inspected(&self.eval(call).await?)
    }

    /// Runs a script that reads or writes a guarded key.
    pub(crate) async fn guarded(&self, call: Call) -> Result<Guarded, StoreError> {
        reply::guarded(self.eval(call).await?)
    }

    /// Ends both connections.
    pub(crate) async fn close(&self) {
        tokio::join!(self.scripts.close(), self.subscriptions.close());
    }
}

/// The digest by which the server knows a script.
pub(crate) fn sha1(source: &str) -> String {
    fred::util::sha1_hash(source)
}
