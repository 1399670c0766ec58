//! `who`, `force`, `release`, `extend`: what an operator asks and does by hand.

use std::time::Duration;

use nestlock::{Error, Inspection, Lock, OwnerId, StoreErrorKind};
use serde_json::json;
use tokio::time::sleep;

use crate::{
    Failure,
    args::{Extend, Force, Named, Release, Server, Unusable, Who},
    kind::Kind,
    locks::derived,
    ls::printable,
    raw::Raw,
    say,
    search::told,
    warn,
    whose::{People, Whose},
};

/// How often `--watch` looks.
const LOOK: Duration = Duration::from_secs(1);
/// There was nothing to tell, or to do.
const NOBODY: u8 = 1;

fn owner(text: &str) -> Result<OwnerId, Unusable> {
    OwnerId::from_value(text).map_err(|error| Unusable(error.to_string()))
}

/// What an error that means "nobody held it" comes to.
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
    warn(format_args!("{} does not hold {}", printable(owner), printable(name)));
    NOBODY
}

fn ttl(found: &Inspection) -> String {
    found.remaining.map_or("-".to_owned(), |ttl| format!("{}ms", ttl.as_millis()))
}

fn is_denied(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if source.kind() == StoreErrorKind::NoPermission)
}

/// The servers, by both ways to ask them.
struct Sight<'s> {
    raw: Raw<'s>,
}

/// A lock that somebody holds.
struct Held {
    lock: Lock,
    kind: Kind,
    found: Inspection,
}

impl<'s> Sight<'s> {
    async fn open(server: &'s Server) -> Result<Self, Failure> {
        Ok(Self { raw: Raw::connect(server).await? })
    }

    /// Who holds it; of the kind that its record says, if nobody else says one.
    async fn held(&self, named: &Named) -> Result<Option<Held>, Failure> {
        let client = self.raw.locks()?;
        let held = |kind: Kind| async move {
            let lock = kind.lock(client, &named.name)?;
            Ok::<_, Error>(lock.inspect().await?.map(|found| Held { lock, kind, found }))
        };
        if let Some(kind) = named.kind {
            return Ok(held(kind).await?);
        }
        // all together, as the server may be far away
        let (hash, signal) = tokio::join!(held(Kind::Reentrant), held(Kind::Signal));
        let hash = match hash {
            // the same record as that of a fair lock, whose waiters hear of other news
            Ok(Some(found)) if self.is_queued_for(&found.lock).await => held(Kind::Fair).await?,
            Err(Error::WrongLockKind { .. }) => match held(Kind::Write).await? {
                None => held(Kind::Read).await?,
                writer => writer,
            },
            other => other?,
        };
        let signal = match signal {
            // a key of its own: whoever may not see it has none
            Err(error) if hash.is_some() || is_denied(&error) => None,
            // in a cluster there is none of this name: it has no tag
            Err(Error::InvalidName { .. }) => None,
            other => other?,
        };
        match (hash, signal) {
            (Some(one), Some(other)) => Err(Unusable(format!(
                "two locks are called {:?}: one is {}, one is {}; say --kind",
                named.name,
                one.kind.name(),
                other.kind.name()
            ))
            .into()),
            (hash, signal) => Ok(hash.or(signal)),
        }
    }

    async fn is_queued_for(&self, lock: &Lock) -> bool {
        let length = self.raw.ask(&["LLEN", &derived("redisson_lock_queue", lock.name())]).await;
        length.ok().and_then(|length| length.as_u64()).is_some_and(|length| length > 0)
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
        warn(format_args!("{}; whose connections are there is not known", told(&away)));
    }
    if !who.watch {
        return Ok(if held.is_some() { 0 } else { NOBODY });
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

/// Nobody is no line, unless somebody goes on to look.
fn tell_holders(who: &Who, server: &Server, held: Option<&Held>, people: &People) {
    let holders = held.map_or(&[][..], |held| &held.found.holders);
    if who.json {
        let holders: Vec<_> =
            holders.iter().map(|(owner, holds)| holder_json(owner, *holds, people.of(owner.as_str()))).collect();
        let ttl = held.and_then(|held| held.found.remaining).map(|ttl| ttl.as_millis() as u64);
        let name = format!("{}{}", server.prefix, who.named.name);
        // that of a free lock nobody knows
        let kind = held.map(|held| held.kind).or(who.named.kind).map(Kind::name);
        return say(json!({ "v": 1, "name": name, "kind": kind, "holders": holders, "ttl_ms": ttl }));
    }
    for (owner, holds) in holders {
        let whose = people.of(owner.as_str()).map_or("- - - -".to_owned(), |whose| {
            let Whose { application, host, process, age, .. } = whose;
            format!("{application} {host} {process} {age}s")
        });
        let ttl = held.map_or_else(String::new, |held| ttl(&held.found));
        say(format_args!("{} {holds} {ttl} {whose}", printable(owner.as_str())));
    }
    if who.watch && holders.is_empty() {
        say("-");
    }
}

fn holder_json(owner: &OwnerId, holds: u32, whose: Option<&Whose>) -> serde_json::Value {
    json!({
        "owner": owner.to_string(), "holds": holds,
        "application": whose.map(|whose| &whose.application), "host": whose.map(|whose| &whose.host),
        "process": whose.map(|whose| &whose.process), "connected_s": whose.map(|whose| whose.age),
        "address": whose.map(|whose| &whose.address),
    })
}

pub(crate) async fn force(server: &Server, force: &Force) -> Result<u8, Failure> {
    let owner = force.if_owner.as_deref().map(owner).transpose()?;
    let sight = Sight::open(server).await?;
    let Some(Held { lock, found, .. }) = sight.held(&force.named).await? else { return Ok(NOBODY) };
    let name = &force.named.name;
    let freed = match &owner {
        Some(owner) => {
            if !free_of(&lock, &found, owner).await? {
                return Ok(code(false, name, owner.as_str()));
            }
            vec![(owner.clone(), found.hold_count(owner))]
        }
        None if lock.force_unlock().await? => found.holders.clone(),
        None => return Ok(NOBODY),
    };
    for (owner, holds) in freed {
        say(format_args!("freed {} {} {holds} {}", printable(name), printable(owner.as_str()), ttl(&found)));
    }
    Ok(0)
}

/// Gives back all that this owner holds, one by one: nothing of whoever may have it by now. `false`: it holds nothing.
pub(crate) async fn free_of(lock: &Lock, found: &Inspection, owner: &OwnerId) -> nestlock::Result<bool> {
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
