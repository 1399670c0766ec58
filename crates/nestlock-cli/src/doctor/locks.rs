//! Checks that locks can be acquired and released.

use std::time::{Duration, Instant};

use futures_util::future::{OptionFuture, join_all};
use nestlock::{Error, LockClient, StoreErrorKind};

use super::row::{Row, Verdict, row};
use crate::{args::Server, failure::Failure, kind::Kind, locks::derived, raw::Raw};

/// The release comes after half of this time, and the waiter gives up after twice this time.
const HEARD: Duration = Duration::from_millis(500);
/// The polling interval of the waiter, long enough that only a message can wake it.
const NEVER: Duration = Duration::from_secs(60);

/// Scratch locks, and the clients that use them.
pub(super) struct Scratch {
    client: LockClient,
    /// The client of the waiter, which never polls in time.
    waits: LockClient,
    name: String,
}

impl Scratch {
    pub(super) async fn of(server: &Server, raw: &Raw<'_>) -> Result<Self, Failure> {
        let client = raw.locks()?.clone();
        let waits = server
            .build()?
            .poll_cap(NEVER)
            .connect(server.url()?)
            .await?;
        let id = client.current_owner().to_string();
        let name = format!(
            "nestlock-doctor:{}",
            id.split(':').next().unwrap_or_default()
        );
        Ok(Self {
            client,
            waits,
            name,
        })
    }

    fn lock(&self, what: &str) -> String {
        format!("{}:{what}", self.name)
    }

    /// Returns the name of the scratch lock. In a cluster, only a hash tag keeps the keys of a
    /// signal lock in one slot.
    fn lock_of(&self, kind: Kind) -> String {
        if kind == Kind::Signal {
            format!("{{{}}}:signal", self.name)
        } else {
            self.lock(&kind.name())
        }
    }

    /// Deletes the fencing token and the number of permits, which locks leave behind, and no owner
    /// needs any more.
    pub(super) async fn tidy(self, raw: &Raw<'_>, server: &Server) {
        self.client.idle().await;
        let key = |kind: Kind| format!("{}{}", server.prefix, self.lock_of(kind));
        let token = derived("redisson_lock_token", &key(Kind::Fenced));
        for left in [token, key(Kind::Permits)] {
            // a user who may not delete it leaves a small key behind
            let _ = raw.ask(&["DEL", &left]).await;
        }
    }
}

/// Converts a failure into a row. A missing permission makes the result unknown, not bad.
fn failed(what: String, kinds: &str, error: &Error) -> Row {
    match error {
        Error::Store { source, .. } if source.kind() == StoreErrorKind::NoPermission => row(
            what,
            Verdict::Unknown,
            format!(
                "{error} (`--kinds {kinds}` prints those for this row); if the user may only use keys with a prefix, give doctor --prefix"
            ),
        ),
        _ => row(what, Verdict::Bad, error.to_string()),
    }
}

/// The kinds that are checked by default: not a semaphore, which has no permits until a client sets
/// their number.
pub(super) const KINDS: [Kind; 9] = [
    Kind::Reentrant,
    Kind::Fair,
    Kind::Fenced,
    Kind::Spin,
    Kind::Signal,
    Kind::String,
    Kind::Read,
    Kind::Write,
    Kind::Permits,
];

/// Acquires and releases a lock of each kind.
pub(super) async fn of_kinds(scratch: &Scratch, kinds: &[Kind]) -> Vec<Row> {
    let client = &scratch.client;
    let tries = kinds.iter().copied().map(|kind| async move {
        let outcome = async {
            let lock = kind.lock(client, &scratch.lock_of(kind))?;
            let Some(guard) = lock.try_lock().await? else {
                return Ok(false);
            };
            guard.unlock().await?;
            Ok(true)
        };
        match outcome.await {
            Ok(true) => Ok(row(kind.name(), Verdict::Ok, "acquired and released")),
            Ok(false) => Ok(row(
                kind.name(),
                Verdict::Unknown,
                "another client holds the scratch lock",
            )),
            Err(error) => Err((kind.name(), kind.name(), error)),
        }
    });
    let heard = async {
        let heard = of_messages(scratch).await;
        heard.map_err(|error| ("messages".into(), "reentrant".into(), error))
    };
    let (mut tries, heard) = tokio::join!(
        join_all(tries),
        OptionFuture::from(has_reentrant(kinds).then_some(heard)),
    );
    tries.extend(heard);
    told(tries)
}

/// The result of one check. On failure: the check, its kinds as `acl` names them, and the error.
type Tried = Result<Row, (String, String, Error)>;

/// Returns a row for each check, and a single row for all that failed because the server lacks a
/// command.
fn told(tries: Vec<Tried>) -> Vec<Row> {
    let (mut rows, mut lacking) = (Vec::new(), Vec::new());
    let mut missing: Option<Vec<String>> = None;
    for tried in tries {
        match tried {
            Ok(row) => rows.push(row),
            Err((what, _, Error::Store { source, .. }))
                if source.kind() == StoreErrorKind::UnknownCommand =>
            {
                // each error names all commands that may be missing: keep those that all of them
                // name
                let named: Vec<String> = source
                    .command()
                    .unwrap_or("a command")
                    .split(',')
                    .map(str::to_uppercase)
                    .collect();
                let both = missing
                    .iter()
                    .flatten()
                    .filter(|known| named.contains(known))
                    .cloned()
                    .collect();
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
        let missing = if missing.is_empty() {
            "several commands".to_owned()
        } else {
            missing.join(" or ")
        };
        let why = format!("the server lacks {missing}: enable it, under its own name");
        rows.push(row(lacking.join(", "), Verdict::Bad, why));
    }
    rows
}

/// Returns whether the user may acquire a reentrant lock, which the checks of messages and of
/// masters do.
fn has_reentrant(kinds: &[Kind]) -> bool {
    let reentrant = Kind::Reentrant.permissions();
    kinds.iter().any(|kind| kind.permissions() == reentrant)
}

/// Checks whether a release wakes a waiter.
async fn of_messages(scratch: &Scratch) -> nestlock::Result<Row> {
    let lock = |client: &LockClient| client.reentrant_lock(scratch.lock("messages"));
    let (held, waits) = (lock(&scratch.client)?.lock().await?, lock(&scratch.waits)?);
    let (heard, released) = tokio::join!(waits.try_lock_for(2 * HEARD), async {
        // by now the waiter has subscribed, or may not subscribe
        tokio::time::sleep(HEARD / 2).await;
        (Instant::now(), held.unlock().await)
    });
    released.1?;
    let took = released.0.elapsed();
    Ok(match heard? {
        Some(guard) => {
            guard.unlock().await?;
            row(
                "messages",
                Verdict::Ok,
                format!(
                    "a waiter is notified of a release within {} ms",
                    took.as_millis()
                ),
            )
        }
        None => row(
            "messages",
            Verdict::Warn,
            "a waiter is not notified of a release, and polls once a second: this user may not subscribe, or the server or a proxy lacks SUBSCRIBE",
        ),
    })
}

/// Acquires and releases a lock at each master of a cluster.
pub(super) async fn of_masters(
    scratch: &Scratch,
    raw: &Raw<'_>,
    kinds: &[Kind],
) -> Vec<(String, Vec<Row>)> {
    if !has_reentrant(kinds) {
        return Vec::new();
    }
    let tries = raw.masters().into_iter().map(async |node| {
        let name = raw.names_at(&node, &scratch.name).next()?;
        let outcome = async {
            let Some(guard) = scratch.client.reentrant_lock(&name)?.try_lock().await? else {
                return Ok(false);
            };
            guard.unlock().await?;
            Ok(true)
        };
        let row = match outcome.await {
            Ok(true) => row(
                "each master",
                Verdict::Ok,
                "a lock was acquired and released there",
            ),
            Ok(false) => row(
                "each master",
                Verdict::Unknown,
                "another client holds the scratch lock",
            ),
            Err(error) => failed("each master".into(), "reentrant", &error),
        };
        Some((node.address.clone(), vec![row]))
    });
    join_all(tries).await.into_iter().flatten().collect()
}
