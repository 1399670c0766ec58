//! `who`, `force`, `release`, `extend`: what an operator asks and does by hand.

use std::time::Duration;

use nestlock::{Error, Inspection, OwnerId};
use serde_json::json;

use crate::{
    Failure,
    args::{Extend, Force, Release, Server, Unusable, Who},
    say,
};

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
            eprintln!("{owner} does not hold {name}");
            Ok(NOBODY)
        }
        Err(error) => Err(error.into()),
    }
}

fn ttl(remaining: Option<Duration>) -> String {
    remaining.map_or("-".to_owned(), |ttl| format!("{}ms", ttl.as_millis()))
}

fn tell(what: &str, name: &str, found: &Inspection) {
    for (owner, holds) in &found.holders {
        say(format_args!("{what} {name} {owner} {holds} {}", ttl(found.remaining)));
    }
}

pub(crate) async fn who(server: &Server, who: &Who) -> Result<u8, Failure> {
    let client = server.connect(None).await?;
    let lock = who.kind.lock(&client, &who.name)?;
    let found = lock.inspect().await?;
    if who.json {
        let holders = found.iter().flat_map(|found| &found.holders);
        let holders: Vec<_> =
            holders.map(|(owner, holds)| json!({ "owner": owner.to_string(), "holds": holds })).collect();
        let ttl = found.as_ref().and_then(|found| found.remaining).map(|ttl| ttl.as_millis() as u64);
        say(json!({ "v": 1, "name": lock.name(), "kind": who.kind.name(), "holders": holders, "ttl_ms": ttl }));
    } else if let Some(found) = &found {
        for (owner, holds) in &found.holders {
            say(format_args!("{owner} {holds} {}", ttl(found.remaining)));
        }
    }
    Ok(if found.is_some() { 0 } else { NOBODY })
}

pub(crate) async fn force(server: &Server, force: &Force) -> Result<u8, Failure> {
    let client = server.connect(None).await?;
    let lock = force.kind.lock(&client, &force.name)?;
    let Some(found) = lock.inspect().await? else { return Ok(NOBODY) };
    if let Some(text) = &force.if_owner {
        let owner = owner(text)?;
        for _ in 0..found.hold_count(&owner).max(1) {
            if done(lock.release(&owner).await, &force.name, text)? != 0 {
                return Ok(NOBODY);
            }
        }
        say(format_args!("freed {} {owner}", force.name));
        return Ok(0);
    }
    let freed = lock.force_unlock().await?;
    if freed {
        tell("freed", &force.name, &found);
    }
    Ok(if freed { 0 } else { NOBODY })
}

pub(crate) async fn release(server: &Server, release: &Release) -> Result<u8, Failure> {
    let client = server.connect(None).await?;
    let lock = release.kind.lock(&client, &release.name)?;
    done(lock.release(&owner(&release.owner)?).await, &release.name, &release.owner)
}

pub(crate) async fn extend(server: &Server, extend: &Extend) -> Result<u8, Failure> {
    let client = server.connect(None).await?;
    let lock = extend.kind.lock(&client, &extend.name)?;
    done(lock.extend(&owner(&extend.owner)?, extend.lease).await, &extend.name, &extend.owner)
}
