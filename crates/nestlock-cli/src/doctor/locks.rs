//! Locks that are tried.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nestlock::{Error, LockClient, StoreErrorKind};

use super::{Row, Verdict, row};
use crate::{Failure, args::Server, kind::Kind, locks::derived, raw::Raw};

/// A message that comes later than this after a release did not wake: the waiter looked for itself.
const HEARD: Duration = Duration::from_millis(500);
/// What a release by message is tried with: nobody looks before.
const NEVER: Duration = Duration::from_secs(60);

/// Locks that are tried, and whose they are.
pub(super) struct Scratch {
    client: LockClient,
    /// Who waits for it, and never looks by itself.
    waits: LockClient,
    name: String,
}

impl Scratch {
    pub(super) async fn of(server: &Server, raw: &Raw<'_>) -> Result<Self, Failure> {
        let client = raw.locks()?.clone();
        let waits = server.build()?.poll_cap(NEVER).connect(server.url()?).await?;
        let id = client.current_owner().to_string();
        let name = format!("nestlock-doctor:{}", id.split(':').next().unwrap_or_default());
        Ok(Self { client, waits, name })
    }

    fn lock(&self, what: &str) -> String {
        format!("{}:{what}", self.name)
    }

    /// In a cluster, a signal lock's keys are in one slot only by a tag.
    fn lock_of(&self, kind: Kind) -> String {
        if kind == Kind::Signal { format!("{{{}}}:signal", self.name) } else { self.lock(&kind.name()) }
    }

    /// A fenced lock leaves its token behind: it is nobody's any more.
    pub(super) async fn tidy(self, raw: &Raw<'_>, server: &Server) {
        self.client.idle().await;
        let token = derived("redisson_lock_token", &format!("{}{}", server.prefix, self.lock("fenced")));
        // whoever may not delete it lets it stay: a small key
        let _ = raw.ask(&["DEL", &token]).await;
    }
}

/// What a failure means: of what this user may not do, nothing is known.
fn failed(what: String, kinds: &str, error: &Error) -> Row {
    match error {
        Error::Store { source, .. } if source.kind() == StoreErrorKind::NoPermission => {
            row(what, Verdict::Unknown, format!("{error}; `nestlock acl --kinds {kinds}` says what it takes"))
        }
        _ => row(what, Verdict::Bad, error.to_string()),
    }
}

/// Takes a lock of each kind, and gives it back.
pub(super) async fn of_kinds(scratch: &Scratch) -> Vec<Row> {
    let client = &scratch.client;
    let kinds =
        [Kind::Reentrant, Kind::Fair, Kind::Fenced, Kind::Spin, Kind::Signal, Kind::String, Kind::Read, Kind::Write];
    let tries = kinds.map(|kind| async move {
        let outcome = async {
            let lock = kind.lock(client, &scratch.lock_of(kind))?;
            let Some(guard) = lock.try_lock().await? else { return Ok(false) };
            guard.unlock().await?;
            Ok(true)
        };
        match outcome.await {
            Ok(true) => Ok(row(kind.name(), Verdict::Ok, "taken and given back")),
            Ok(false) => Ok(row(kind.name(), Verdict::Unknown, "somebody else holds the scratch lock")),
            Err(error) => Err((kind.name(), kind.name(), error)),
        }
    });
    let (mut tries, heard) = tokio::join!(join_all(tries), of_messages(scratch));
    tries.push(heard.map_err(|error| ("messages".into(), "reentrant".into(), error)));
    told(tries)
}

/// What kind was tried, what it is called by `acl`, and what came of it.
type Tried = Result<Row, (String, String, Error)>;

/// A row for each; of the command that the server lacks, one for all.
fn told(tries: Vec<Tried>) -> Vec<Row> {
    let (mut rows, mut lacking) = (Vec::new(), Vec::new());
    let mut missing: Option<Vec<String>> = None;
    for tried in tries {
        match tried {
            Ok(row) => rows.push(row),
            Err((what, _, Error::Store { source, .. })) if source.kind() == StoreErrorKind::UnknownCommand => {
                // each names all that it may be
                let named: Vec<String> =
                    source.command().unwrap_or("a command").split(',').map(str::to_uppercase).collect();
                let both = missing.iter().flatten().filter(|known| named.contains(known)).cloned().collect();
                missing = Some(match &missing {
                    Some(_) => both,
                    None => named,
                });
                lacking.push(what);
            }
            Err((what, kinds, error)) => rows.push(failed(what, &kinds, &error)),
        }
    }
    if let Some(missing) = missing {
        let missing = if missing.is_empty() { "several commands".to_owned() } else { missing.join(" or ") };
        let why = format!("the server lacks {missing}: enable it, under its own name");
        rows.push(row(lacking.join(", "), Verdict::Bad, why));
    }
    rows
}

/// Whether a release is heard.
async fn of_messages(scratch: &Scratch) -> nestlock::Result<Row> {
    let lock = |client: &LockClient| client.reentrant_lock(scratch.lock("messages"));
    let (held, waits) = (lock(&scratch.client)?.lock().await?, lock(&scratch.waits)?);
    let (heard, released) = tokio::join!(waits.try_lock_for(2 * HEARD), async {
        // by then it listens, or may not
        tokio::time::sleep(HEARD / 2).await;
        (Instant::now(), held.unlock().await)
    });
    released.1?;
    let took = released.0.elapsed();
    Ok(match heard? {
        Some(guard) => {
            guard.unlock().await?;
            row("messages", Verdict::Ok, format!("a waiter hears of a release within {} ms", took.as_millis()))
        }
        None => row(
            "messages",
            Verdict::Warn,
            "a waiter does not hear of a release, and looks once a second: may this user subscribe?",
        ),
    })
}

/// Takes a lock at each master of a cluster, and gives it back.
pub(super) async fn of_masters(scratch: &Scratch, raw: &Raw<'_>) -> Vec<(String, Vec<Row>)> {
    let tries = raw.masters().into_iter().map(async |node| {
        let name = raw.names_at(&node, &scratch.name).next()?;
        let outcome = async {
            let Some(guard) = scratch.client.reentrant_lock(&name)?.try_lock().await? else { return Ok(false) };
            guard.unlock().await?;
            Ok(true)
        };
        let row = match outcome.await {
            Ok(true) => row("each master", Verdict::Ok, "a lock is taken and given back there"),
            Ok(false) => row("each master", Verdict::Unknown, "somebody else holds the scratch lock"),
            Err(error) => failed("each master".into(), "reentrant", &error),
        };
        Some((node.address.clone(), vec![row]))
    });
    join_all(tries).await.into_iter().flatten().collect()
}
