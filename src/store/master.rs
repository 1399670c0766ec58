//! Which of several servers is a service's master: asked whenever one is connected to, and told by sentinels meanwhile.
//!
//! A link knows nothing of it: it connects by a dial, and the dial asks here. When another server becomes the master, all
//! connections to the old one are ended, whether it still answers or not; then the links connect as they always do.

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
    Dials,
    endpoint::Place,
    pace::Pace,
    wire::{Connection, Dial, Ends, NotConnected, Request, Until, Value},
};
use crate::{
    clock,
    error::{StoreError, StoreErrorKind},
    log,
};

/// What an answer may take of whoever knows the master; at most half of the time to connect.
const ANSWER: Duration = Duration::from_secs(2);

/// The master of a service, whichever server that is.
pub(super) struct Master {
    whom: Whom,
    current: Mutex<Current>,
    /// Counts the masters.
    terms: watch::Sender<u64>,
    /// Some link has no connection: whoever knows is asked more often.
    is_away: AtomicBool,
    pace: Arc<Pace>,
}

/// Whom to ask.
enum Whom {
    Sentinels(Watch),
    /// The servers themselves.
    List(Vec<Server>),
}

/// The master by now.
#[derive(Default)]
struct Current {
    term: u64,
    at: Option<Server>,
    /// Since when.
    since: Option<Instant>,
    /// To it.
    connections: Vec<Connection>,
}

impl fmt::Debug for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Master").field("at", &self.current().at).finish_non_exhaustive()
    }
}

impl Master {
    /// Of the service that a URL names; `None`: it names one server. On the client's own runtime.
    pub(super) fn of(dials: &Dials, pace: &Arc<Pace>) -> Option<Arc<Self>> {
        let new = |whom| Self {
            whom,
            current: Mutex::default(),
            terms: watch::Sender::new(0),
            is_away: AtomicBool::new(true),
            pace: Arc::clone(pace),
        };
        match &dials.endpoint.place {
            Place::Sentinel(sentinels) => {
                Some(Arc::new_cyclic(|master| new(Whom::Sentinels(Watch::start(dials, sentinels, master)))))
            }
            Place::List(at) => Some(Arc::new(new(Whom::List(at.clone())))),
            Place::Server | Place::Cluster(_) => None,
        }
    }

    /// Connects to whoever is the master now, and says so. On the client's own runtime.
    pub(super) async fn connect(&self, dial: &Dial) -> Result<Connection, NotConnected> {
        self.is_away.store(true, Ordering::Release);
        loop {
            let at = match &self.whom {
                Whom::Sentinels(watch) => watch.find().await?,
                Whom::List(servers) => list::find(dial, servers).await?,
            };
            let term = self.is_now(&at);
            let mut terms = self.terms.subscribe();
            let connected = tokio::select! {
                biased;
                // this one may hang for long
                _ = terms.wait_for(|now| *now != term) => continue,
                connected = open(dial, &at) => connected?,
            };
            if self.take(term, &connected.connection) {
                self.is_away.store(false, Ordering::Release);
                return Ok(connected.keep());
            }
        }
    }

    /// Where it is, as far as is known.
    pub(super) fn at(&self) -> Option<Server> {
        self.current().at.clone()
    }

    /// The same, and since when.
    pub(super) fn reigns(&self) -> Option<(Server, Instant)> {
        let current = self.current();
        current.at.clone().zip(current.since)
    }

    /// The sentinels, and whether they answer.
    pub(super) fn sentinels(&self) -> Vec<(Server, bool)> {
        match &self.whom {
            Whom::Sentinels(watch) => watch.sentinels(),
            Whom::List(_) => Vec::new(),
        }
    }

    /// Asks nobody any more.
    pub(super) fn close(&self) {
        if let Whom::Sentinels(watch) = &self.whom {
            watch.close();
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This server is the master: its term. If another one was, nothing is believed of that any more.
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
        self.pace.hurry();
        if let Some(before) = before {
            log::later!(WARN, before = before, now = at; "the service has another master; the old one is left");
        }
        term
    }

    /// A connection to the master of this term; `false`: there is another one by now.
    fn take(&self, term: u64, connection: &Connection) -> bool {
        let mut current = self.current();
        if current.term != term {
            return false;
        }
        current.connections.retain(|connection| !connection.has_ended());
        current.connections.push(connection.clone());
        true
    }
}

/// What each of those who know has for its answer.
fn limit(dial: &Dial) -> Duration {
    ANSWER.min(dial.connect_timeout / 2)
}

/// Connects to a server that says that it is a master.
async fn open(dial: &Dial, at: &Server) -> Result<Ends, NotConnected> {
    let of_it = |NotConnected { error, nobody_listens }| NotConnected { error: said(at, &error), nobody_listens };
    let connection = dial.clone().at(at).open().await.map(Ends::new).map_err(of_it)?;
    match role(&connection.connection, limit(dial)).await.map_err(|error| of_it(error.into()))? {
        Role::Master => Ok(connection),
        other => Err(NotConnected {
            error: StoreError::new(StoreErrorKind::ReadOnly, false, format!("{at} says that it is {other}")),
            // whoever named it is asked again soon
            nobody_listens: true,
        }),
    }
}

/// What a server says of itself.
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
    let Value::Array(parts) = &answer else { return Err(nonsense("ROLE")) };
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

/// An error, and whose it is. Over such a connection nothing was asked that changes anything.
fn said(at: &Server, error: &StoreError) -> StoreError {
    StoreError::new(error.kind(), false, format!("{at}: {}", words(error))).before_any_request()
}

/// What was said, without its kind.
fn words(error: &StoreError) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
