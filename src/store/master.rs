//! Which of several servers is the master of a service. The client finds out at every connect, and
//! sentinels report changes in between.
//!
//! A link does not know about it: the link connects through a `Dialer`, which queries the master
//! here. When another server becomes the master, all connections to the old one end, even if it
//! still replies; the links then reconnect as usual.
//!
//! Sentinels that name another address end the connections of the old term even if the old master
//! hangs, which the connections themselves would report after 8 s. An attempt to connect ends as
//! well. If no master is named, or the named one lets no client in, the attempt has failed, and
//! `Pace` says when the next one is; a new term makes it due at once. An old master that replies,
//! even with `ROLE` master, proves nothing for 10 s and more after a failover.

mod list;
mod reign;
mod role;
mod sentinels;
mod vote;

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use nestlock_wire::{CloseOnDrop, Connection, Dialer, Locate, NotConnected, Pace, Server};

use self::{
    reign::Reign,
    role::{Role, failed, reply_timeout, role},
    sentinels::Watch,
};

use crate::{
    error::{StoreError, StoreErrorKind},
    store::{connect_options::ConnectOptions, endpoint::Deployment},
};

/// The master of a service. It may be another server at each connect.
pub(super) struct ServiceMaster {
    discovery: Discovery,
    reign: Arc<Reign>,
}

/// How the master is found.
enum Discovery {
    Sentinels(Watch),
    /// Queries the servers themselves.
    List(Vec<Server>),
}

impl fmt::Debug for ServiceMaster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Master")
            .field("at", &self.at())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Locate for ServiceMaster {
    /// Connects to the current master; the server itself must say that it is one. Must run on the
    /// client's own runtime.
    async fn connect(&self, dial: &Dialer, limit: Duration) -> Result<Connection, NotConnected> {
        self.reign.set_away(true);
        loop {
            let at = match &self.discovery {
                Discovery::Sentinels(watch) => watch.find().await?,
                Discovery::List(servers) => list::find(dial, servers).await?,
            };
            let term = self.reign.is_now(&at);
            let mut terms = self.reign.terms();
            let connected = tokio::select! {
                biased;
                // another server became the master, and this attempt may hang
                _ = terms.wait_for(|now| *now != term) => continue,
                connected = open(dial, &at, limit) => connected?,
            };
            if self.reign.take(term, &connected.connection) {
                self.reign.set_away(false);
                return Ok(connected.keep());
            }
        }
    }
}

impl ServiceMaster {
    /// Returns the master of the service that the endpoint names. Returns `None` for a single
    /// server or a cluster. Must run on the client's own runtime.
    pub(super) fn of(dials: &ConnectOptions, pace: &Arc<Pace>) -> Option<Arc<Self>> {
        let reign = Arc::new(Reign::new(pace));
        let discovery = match &dials.endpoint.place {
            Deployment::Sentinel(sentinels) => {
                Discovery::Sentinels(Watch::start(dials, sentinels, &reign))
            }
            Deployment::List(at) => Discovery::List(at.clone()),
            Deployment::Server | Deployment::Cluster(_) => return None,
        };
        Some(Arc::new(Self { discovery, reign }))
    }

    /// Returns the current master, if it is known.
    pub(super) fn at(&self) -> Option<Server> {
        self.reign.at()
    }

    /// Returns the current master, and since when it has been one.
    pub(super) fn reigns(&self) -> Option<(Server, Instant)> {
        self.reign.reigns()
    }

    /// Returns the sentinels, and whether they reply.
    pub(super) fn sentinels(&self) -> Vec<(Server, bool)> {
        match &self.discovery {
            Discovery::Sentinels(watch) => watch.sentinels(),
            Discovery::List(_) => Vec::new(),
        }
    }

    /// Stops polling the sentinels.
    pub(super) fn close(&self) {
        if let Discovery::Sentinels(watch) = &self.discovery {
            watch.close();
        }
    }
}

/// Connects to a server, and fails unless its role is master.
async fn open(dial: &Dialer, at: &Server, limit: Duration) -> Result<CloseOnDrop, NotConnected> {
    let of_it = |failure| failed(at, &failure);
    let connection = dial
        .clone()
        .at(at)
        .open(limit)
        .await
        .map(CloseOnDrop::new)
        .map_err(of_it)?;
    match role(&connection.connection, reply_timeout(dial))
        .await
        .map_err(|error| of_it(error.into()))?
    {
        Role::Master => Ok(connection),
        other => Err(NotConnected {
            error: StoreError::new(
                StoreErrorKind::ReadOnly,
                false,
                format!("{at} says that it is {other}"),
            ),
            // keeps the back-off short: by the next attempt, another master may be known
            nobody_listens: true,
        }),
    }
}
