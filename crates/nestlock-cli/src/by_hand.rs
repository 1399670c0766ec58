//! `who`, `force`, `release`, `extend`: inspect or change a single lock by hand.

use std::time::Duration;

use nestlock::{Error, HolderNote, Inspection, Lock, OwnerId};
use serde_json::json;
use tokio::time::sleep;

use crate::{
    args::{Extend, Force, Named, Release, Server, Who},
    failure::{Failure, Unusable},
    kind::Kind,
    locks::{Found, Record, held_secs, since_ms},
    ls::printable,
    raw::Raw,
    search::{self, told},
    stderr::warn,
    stdout::say,
    whose::{People, Whose},
};

/// How often `--watch` polls.
const LOOK: Duration = Duration::from_secs(1);
/// Exit code: there was no hold to report or to change.
const NO_HOLD: u8 = 1;

fn owner(text: &str) -> Result<OwnerId, Unusable> {
    OwnerId::from_value(text).map_err(|error| Unusable(error.to_string()))
}

/// Converts an error that means "not held" into `false`.
fn done(outcome: nestlock::Result<()>) -> nestlock::Result<bool> {
    match outcome {
        Ok(()) => Ok(true),
        Err(Error::NotHeld { .. } | Error::Lost { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn code(is_done: bool, name: &str, owner: &str) -> u8 {
    if is_done {
        return 0;
    }
    warn(format_args!(
        "{} does not hold {}",
        printable(owner),
        printable(name)
    ));
    NO_HOLD
}

/// The servers, and the prefix of the names there.
struct Sight<'s> {
    raw: Raw<'s>,
    prefix: &'s str,
}

/// A lock that is held.
struct Held {
    lock: Lock,
    found: Found,
}

impl<'s> Sight<'s> {
    async fn open(server: &'s Server) -> Result<Self, Failure> {
        Ok(Self {
            raw: Raw::connect(server).await?,
            prefix: &server.prefix,
        })
    }

    /// Returns the lock and its holders, as `ls` reads them from the record. Returns `None` if it
    /// is free.
    async fn held(&self, named: &Named) -> Result<Option<Held>, Failure> {
        let lock = |kind: Kind| {
            kind.lock(self.raw.locks()?, &named.name)
                .map_err(Failure::from)
        };
        // fails for a name that no lock can have
        lock(named.kind.unwrap_or(Kind::Reentrant))?;
        let Some(found) = search::named(&self.raw, self.prefix, &named.name, named.kind).await?
        else {
            return Ok(None);
        };
        let kind = named.kind.unwrap_or(Kind::of(found.record));
        // the other half of a read-write lock is held, so this half is free
        let is_other_half = matches!(
            (kind, found.record),
            (Kind::Read, Record::Write) | (Kind::Write, Record::Read)
        );
        Ok(if is_other_half {
            None
        } else {
            Some(Held {
                lock: lock(kind)?,
                found,
            })
        })
    }
}

pub(crate) async fn who(server: &Server, who: &Who) -> Result<u8, Failure> {
    let sight = Sight::open(server).await?;
    let mut held = sight.held(&who.named).await?;
    let mut people = People::ask(&sight.raw).await;
    tell_holders(who, server, held.as_ref(), &people);
    if let Some(unknown) = people.unknown {
        warn(unknown);
    }
    let away = sight.raw.away();
    if !away.is_empty() {
        warn(format_args!(
            "{}; the clients connected there are unknown",
            told(&away)
        ));
    }
    if !who.watch {
        return Ok(if held.is_some() { 0 } else { NO_HOLD });
    }
    loop {
        sleep(LOOK).await;
        let now = sight.held(&who.named).await?;
        let holders = |held: &Option<Held>| held.as_ref().map(|held| held.found.holders.clone());
        if holders(&now) != holders(&held) {
            people = People::ask(&sight.raw).await;
            tell_holders(who, server, now.as_ref(), &people);
        }
        held = now;
    }
}

/// Prints the holders. As text, a free lock prints nothing, or `-` with `--watch`.
fn tell_holders(who: &Who, server: &Server, held: Option<&Held>, people: &People) {
    let found = held.map(|held| &held.found);
    let holders = found.map_or(&[][..], |found| &found.holders);
    if who.json {
        let holders: Vec<_> = holders
            .iter()
            .map(|(owner, holds)| {
                let note = found.and_then(|found| found.note(owner));
                holder_json(owner, *holds, people.of(owner), note)
            })
            .collect();
        let name = format!("{}{}", server.prefix, who.named.name);
        // a free lock has no record that shows its kind
        let kind = found
            .map(|found| found.record.name().to_owned())
            .or(who.named.kind.map(Kind::name));
        return say(json!({
            "v": 1, "name": name, "kind": kind, "maybe": found.and_then(Found::maybe), "holders": holders,
            "ttl_ms": found.and_then(|found| found.ttl), "last_token": found.and_then(|found| found.last_token),
        }));
    }
    for (owner, holds) in holders {
        let whose = people.of(owner).map_or("- - - -".to_owned(), |whose| {
            let Whose {
                application,
                host,
                process,
                age,
                ..
            } = whose;
            format!("{application} {host} {process} {age}s")
        });
        let ttl = found.map_or_else(String::new, Found::ttl_text);
        let note = found.and_then(|found| found.note(owner));
        let note = note.map_or_else(String::new, |note| {
            format!(" {}s {}", held_secs(note), note.note)
        });
        say(format_args!(
            "{} {holds} {ttl} {whose}{}",
            printable(owner),
            printable(&note)
        ));
    }
    if who.watch && holders.is_empty() {
        say("-");
    }
}

fn holder_json(
    owner: &str,
    holds: u64,
    whose: Option<&Whose>,
    note: Option<&HolderNote>,
) -> serde_json::Value {
    // the connections may be unknown, or gone
    let (application, host) = (
        note.map(|note| &note.application),
        note.map(|note| &note.host),
    );
    let process = note.map(|note| note.process.to_string());
    json!({
        "owner": owner, "holds": holds,
        "application": whose.map(|whose| &whose.application).or(application),
        "host": whose.map(|whose| &whose.host).or(host),
        "process": whose.map(|whose| whose.process.clone()).or(process), "connected_s": whose.map(|whose| whose.age),
        "address": whose.map(|whose| &whose.address),
        "note": note.map(|note| &note.note), "since_ms": note.map(since_ms),
    })
}

pub(crate) async fn force(server: &Server, force: &Force) -> Result<u8, Failure> {
    let owner = force.if_owner.as_deref().map(owner).transpose()?;
    let sight = Sight::open(server).await?;
    let Some(Held { lock, found, .. }) = sight.held(&force.named).await? else {
        return Ok(NO_HOLD);
    };
    let name = &force.named.name;
    let freed = match &owner {
        Some(owner) => match lock.inspect().await? {
            Some(held) if free_of(&lock, &held, owner).await? => {
                vec![(owner.to_string(), u64::from(held.hold_count(owner)))]
            }
            _ => return Ok(code(false, name, owner.as_str())),
        },
        None if lock.force_unlock().await? => found.holders.clone(),
        None => return Ok(NO_HOLD),
    };
    for (owner, holds) in freed {
        say(format_args!(
            "freed {} {} {holds} {}",
            printable(name),
            printable(&owner),
            found.ttl_text()
        ));
    }
    Ok(0)
}

/// Releases all holds of this owner one by one, and none of an owner that has the lock by now.
/// Returns `false` if this owner has no hold.
pub(crate) async fn free_of(
    lock: &Lock,
    found: &Inspection,
    owner: &OwnerId,
) -> nestlock::Result<bool> {
    let mut any = false;
    for _ in 0..found.hold_count(owner).max(1) {
        if !done(lock.release(owner).await)? {
            break;
        }
        any = true;
    }
    Ok(any)
}

pub(crate) async fn release(server: &Server, release: &Release) -> Result<u8, Failure> {
    let owner = owner(&release.owner)?;
    let held = Sight::open(server).await?.held(&release.named).await?;
    let is_done = match held {
        Some(held) => done(held.lock.release(&owner).await)?,
        None => false,
    };
    Ok(code(is_done, &release.named.name, &release.owner))
}

pub(crate) async fn extend(server: &Server, extend: &Extend) -> Result<u8, Failure> {
    let owner = owner(&extend.owner)?;
    let held = Sight::open(server).await?.held(&extend.named).await?;
    let is_done = match held {
        Some(held) => done(held.lock.extend(&owner, extend.lease).await)?,
        None => false,
    };
    Ok(code(is_done, &extend.named.name, &extend.owner))
}
