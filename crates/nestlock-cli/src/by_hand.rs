//! `who`, `force`, `release`, `extend`: what an operator asks and does by hand.

use std::time::Duration;

use nestlock::{Error, Inspection, Lock, LockClient, OwnerId};
use serde_json::json;
use tokio::time::sleep;

use crate::{
    Failure,
    args::{Extend, Force, Named, Release, Server, Unusable, Who},
    raw::Raw,
    say, warn,
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
fn done(outcome: nestlock::Result<()>, name: &str, owner: &str) -> Result<u8, Failure> {
    match outcome {
        Ok(()) => Ok(0),
        Err(Error::NotHeld { .. } | Error::Lost { .. }) => {
            warn(format_args!("{owner} does not hold {name}"));
            Ok(NOBODY)
        }
        Err(error) => Err(error.into()),
    }
}

fn ttl(found: &Inspection) -> String {
    found.remaining.map_or("-".to_owned(), |ttl| format!("{}ms", ttl.as_millis()))
}

/// A line for each holder, with this before it.
fn tell(before: &str, found: &Inspection) {
    let ttl = ttl(found);
    for (owner, holds) in &found.holders {
        say(format_args!("{before}{owner} {holds} {ttl}"));
    }
}

/// The lock, and the client that it lives by.
async fn lock(server: &Server, named: &Named) -> Result<(LockClient, Lock), Failure> {
    let client = server.connect(None).await?;
    let lock = named.kind.lock(&client, &named.name)?;
    Ok((client, lock))
}

pub(crate) async fn who(server: &Server, who: &Who) -> Result<u8, Failure> {
    let (_client, lock) = lock(server, &who.named).await?;
    let raw = Raw::connect(server).await?;
    let mut found = lock.inspect().await?;
    let mut people = People::ask(&raw).await;
    tell_holders(who, &lock, found.as_ref(), &people);
    if let Some(unknown) = people.unknown {
        warn(unknown);
    }
    while who.watch {
        sleep(LOOK).await;
        let now = lock.inspect().await?;
        let holders = |found: &Option<Inspection>| found.as_ref().map(|found| found.holders.clone());
        if holders(&now) != holders(&found) {
            people = People::ask(&raw).await;
            tell_holders(who, &lock, now.as_ref(), &people);
        }
        found = now;
    }
    Ok(if found.is_some() { 0 } else { NOBODY })
}

/// Nobody is no line, unless somebody goes on to look.
fn tell_holders(who: &Who, lock: &Lock, found: Option<&Inspection>, people: &People) {
    let holders = found.map_or(&[][..], |found| &found.holders);
    if who.json {
        let holders: Vec<_> =
            holders.iter().map(|(owner, holds)| holder_json(owner, *holds, people.of(owner.as_str()))).collect();
        let ttl = found.and_then(|found| found.remaining).map(|ttl| ttl.as_millis() as u64);
        return say(
            json!({ "v": 1, "name": lock.name(), "kind": who.named.kind.name(), "holders": holders, "ttl_ms": ttl }),
        );
    }
    for (owner, holds) in holders {
        let whose = people.of(owner.as_str()).map_or("- - - -".to_owned(), |whose| {
            let Whose { application, host, process, age, .. } = whose;
            format!("{application} {host} {process} {age}s")
        });
        say(format_args!("{owner} {holds} {} {whose}", found.map_or_else(String::new, ttl)));
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
    let (_client, lock) = lock(server, &force.named).await?;
    let Some(found) = lock.inspect().await? else { return Ok(NOBODY) };
    if let Some(text) = &force.if_owner {
        let owner = owner(text)?;
        for _ in 0..found.hold_count(&owner).max(1) {
            if done(lock.release(&owner).await, &force.named.name, text)? != 0 {
                return Ok(NOBODY);
            }
        }
        say(format_args!("freed {} {owner}", force.named.name));
        return Ok(0);
    }
    let freed = lock.force_unlock().await?;
    if freed {
        tell(&format!("freed {} ", force.named.name), &found);
    }
    Ok(if freed { 0 } else { NOBODY })
}

pub(crate) async fn release(server: &Server, release: &Release) -> Result<u8, Failure> {
    let (_client, lock) = lock(server, &release.named).await?;
    done(lock.release(&owner(&release.owner)?).await, &release.named.name, &release.owner)
}

pub(crate) async fn extend(server: &Server, extend: &Extend) -> Result<u8, Failure> {
    let (_client, lock) = lock(server, &extend.named).await?;
    done(lock.extend(&owner(&extend.owner)?, extend.lease).await, &extend.named.name, &extend.owner)
}
