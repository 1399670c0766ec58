//! Which of several servers is the master of a service. The client queries this at every connect,
//! and sentinels report changes in between.
//!
//! A link does not know about it: the link connects through a `Dialer`, which queries the master
//! here. When another server becomes the master, all connections to the old one end, even if it
//! still replies; the links then reconnect as usual.

mod list;
mod sentinels;
mod vote;

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fred::types::config::Server;
use tokio::sync::watch;

use self::sentinels::Watch;
use super::{
    ConnectOptions,
    endpoint::Deployment,
    pace::Pace,
    wire::{CloseOnDrop, Connection, Dialer, NotConnected, Request, Until, Value},
};
use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    log,
};

/// How long a sentinel or a listed server has to reply; at most half of the connect timeout.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

/// The master of a service, whichever server that is.
pub(super) struct ServiceMaster {
    discovery: Discovery,
    current: Mutex<Current>,
    /// Counts the masters.
    terms: watch::Sender<u64>,
    /// Whether a link is reconnecting; the sentinels are polled more often then.
    is_away: AtomicBool,
    pace: Arc<Pace>,
}

/// How the master is found.
enum Discovery {
    Sentinels(Watch),
    /// Queries the servers themselves.
    List(Vec<Server>),
}

/// The current master.
#[derive(Default)]
struct Current {
    term: u64,
    at: Option<Server>,
    /// When it became the master, as far as the client knows.
    since: Option<Instant>,
    /// The connections to it.
    connections: Vec<Connection>,
}

impl fmt::Debug for ServiceMaster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Master")
            .field("at", &self.current().at)
            .finish_non_exhaustive()
    }
}

impl ServiceMaster {
    /// Returns the master of the service that the endpoint names. Returns `None` for a single
    /// server or a cluster. Must run on the client's own runtime.
    pub(super) fn of(dials: &ConnectOptions, pace: &Arc<Pace>) -> Option<Arc<Self>> {
        let new = |whom| Self {
            discovery: whom,
            current: Mutex::default(),
            terms: watch::Sender::new(0),
            is_away: AtomicBool::new(true),
            pace: Arc::clone(pace),
        };
        match &dials.endpoint.place {
            Deployment::Sentinel(sentinels) => Some(Arc::new_cyclic(|master| {
                new(Discovery::Sentinels(Watch::start(dials, sentinels, master)))
            })),
            Deployment::List(at) => Some(Arc::new(new(Discovery::List(at.clone())))),
            Deployment::Server | Deployment::Cluster(_) => None,
        }
    }

    /// Connects to the current master; the server itself must say that it is one. Must run on the
    /// client's own runtime.
    pub(super) async fn connect(&self, dial: &Dialer) -> Result<Connection, NotConnected> {
        self.is_away.store(true, Ordering::Release);
        loop {
            let at = match &self.discovery {
                Discovery::Sentinels(watch) => watch.find().await?,
                Discovery::List(servers) => list::find(dial, servers).await?,
            };
            let term = self.is_now(&at);
            let mut terms = self.terms.subscribe();
            let connected = tokio::select! {
                biased;
                // another server became the master, and this attempt may hang
                _ = terms.wait_for(|now| *now != term) => continue,
                connected = open(dial, &at) => connected?,
            };
            if self.take(term, &connected.connection) {
                self.is_away.store(false, Ordering::Release);
                return Ok(connected.keep());
            }
        }
    }

    /// Returns the current master, if it is known.
    pub(super) fn at(&self) -> Option<Server> {
        self.current().at.clone()
    }

    /// Returns the current master, and since when it has been one.
    pub(super) fn reigns(&self) -> Option<(Server, Instant)> {
        let current = self.current();
        current.at.clone().zip(current.since)
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

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a server the master, and returns its term. Ends the connections to any other master:
    /// its replies count no more.
    fn is_now(&self, at: &Server) -> u64 {
        let mut current = self.current();
        if current.at.as_ref() == Some(at) {
            return current.term;
        }
        let old = std::mem::take(&mut current.connections);
        let before = current.at.replace(at.clone());
        current.since = Some(Instant::now());
        current.term += 1;
        let term = current.term;
        self.terms.send_replace(term);
        drop(current);
        for connection in old {
            connection.end();
        }
        self.pace.attempt_now();
        if let Some(before) = before {
            log::later!(WARN, before = before, now = at; "the service has another master; the old one is left");
        }
        term
    }

    /// Adds a connection to the master of this term. Returns `false` if the master has changed
    /// since.
    fn take(&self, term: u64, connection: &Connection) -> bool {
        let mut current = self.current();
        if current.term != term {
            return false;
        }
        current
            .connections
            .retain(|connection| !connection.has_ended());
        current.connections.push(connection.clone());
        true
    }
}

/// Returns how long each sentinel or server has to reply.
fn limit(dial: &Dialer) -> Duration {
    REPLY_TIMEOUT.min(dial.connect_timeout / 2)
}

/// Connects to a server, and fails unless its role is master.
async fn open(dial: &Dialer, at: &Server) -> Result<CloseOnDrop, NotConnected> {
    let of_it = |NotConnected {
                     error,
                     nobody_listens,
                 }| NotConnected {
        error: said(at, &error),
        nobody_listens,
    };
    let connection = dial
        .clone()
        .at(at)
        .open()
        .await
        .map(CloseOnDrop::new)
        .map_err(of_it)?;
    match role(&connection.connection, limit(dial))
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

/// A server's role, as it says itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Master,
    Replica,
    Sentinel,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Master => "a master",
            Self::Replica => "a replica",
            Self::Sentinel => "a sentinel",
        })
    }
}

async fn role(connection: &Connection, limit: Duration) -> Result<Role, super::wire::Failure> {
    let until = Until::new(clock::Instant::now(), limit);
    let answer = connection.call(Request::Words(&["ROLE"]), until).await?;
    let Value::Array(parts) = &answer else {
        return Err(nonsense("ROLE"));
    };
    match parts.first().and_then(Value::as_str) {
        Some("master") => Ok(Role::Master),
        Some("slave") => Ok(Role::Replica),
        Some("sentinel") => Ok(Role::Sentinel),
        _ => Err(nonsense("ROLE")),
    }
}

fn nonsense(request: &str) -> super::wire::Failure {
    super::wire::Failure::Nonsense(format!("{request} was answered by something else"))
}

/// Prefixes an error with the server's address. Such a connection has carried only reads, so
/// nothing can have been executed.
fn said(at: &Server, error: &StoreError) -> StoreError {
    StoreError::new(error.kind(), false, format!("{at}: {}", words(error))).before_any_request()
}

/// Returns the error's text without its kind.
fn words(error: &StoreError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
