//! Hash commands.

use super::{
    call::Call,
    error_text::{OVERFLOW, SYNTAX},
};
use crate::{
    ports::random,
    server::{
        keyspace::Value,
        resp::{Outcome, Reply, Text, integer},
    },
};

fn value(found: Option<&Vec<u8>>) -> Reply {
    found.map_or(Reply::Nil, |value| Reply::bulk(value.as_slice()))
}

pub(super) fn hget(call: &mut Call) -> Outcome {
    Ok(value(
        call.hash(&call.args[1])?
            .and_then(|hash| hash.get(&call.args[2])),
    ))
}

pub(super) fn hmget(call: &mut Call) -> Outcome {
    let hash = call.hash(&call.args[1])?;
    Ok(Reply::list(
        call.args[2..]
            .iter()
            .map(|field| value(hash.and_then(|hash| hash.get(field)))),
    ))
}

pub(super) fn hstrlen(call: &mut Call) -> Outcome {
    Ok(Reply::len(
        call.hash(&call.args[1])?
            .and_then(|hash| hash.get(&call.args[2]))
            .map_or(0, Vec::len),
    ))
}

pub(super) fn hexists(call: &mut Call) -> Outcome {
    let found = call
        .hash(&call.args[1])?
        .is_some_and(|hash| hash.contains_key(&call.args[2]));
    Ok(Reply::Int(found.into()))
}

pub(super) fn hlen(call: &mut Call) -> Outcome {
    Ok(Reply::len(
        call.hash(&call.args[1])?.map_or(0, indexmap::IndexMap::len),
    ))
}

pub(super) fn hkeys(call: &mut Call) -> Outcome {
    let hash = call.hash(&call.args[1])?;
    Ok(Reply::list(
        hash.into_iter()
            .flat_map(|hash| hash.keys())
            .map(|field| Reply::bulk(field.as_slice())),
    ))
}

pub(super) fn hvals(call: &mut Call) -> Outcome {
    let hash = call.hash(&call.args[1])?;
    Ok(Reply::list(
        hash.into_iter()
            .flat_map(|hash| hash.values())
            .map(|value| Reply::bulk(value.as_slice())),
    ))
}

pub(super) fn hgetall(call: &mut Call) -> Outcome {
    let pairs = call.hash(&call.args[1])?.into_iter().flatten();
    Ok(Reply::Map(
        pairs
            .map(|(field, value)| (Reply::bulk(field.as_slice()), Reply::bulk(value.as_slice())))
            .collect(),
    ))
}

/// How many fields one reply may repeat.
const MAX_REPEATED: usize = 1_000_000;

/// Returns fields of a hash: consecutive ones, starting at a random field. A negative count may
/// repeat fields.
pub(super) fn hrandfield(call: &mut Call) -> Outcome {
    let counted = call.args.len() > 2;
    let count = if counted { call.int(2)? } else { 1 };
    if count == i64::MIN {
        return Err("ERR value is out of range, value must between -9223372036854775807 and 9223372036854775807".into());
    }
    let values = call.args.len() == 4 && call.is(3, "withvalues");
    if call.args.len() > 3 && !values {
        return Err(SYNTAX.into());
    }
    if values && count.unsigned_abs() > i64::MAX.unsigned_abs() / 2 {
        return Err("ERR value is out of range".into());
    }
    let Some(hash) = call.hash(&call.args[1])?.filter(|hash| !hash.is_empty()) else {
        return Ok(if counted { Reply::list([]) } else { Reply::Nil });
    };
    let wanted = usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX);
    // Redis would repeat fields until it is out of memory
    if count < 0 && wanted > MAX_REPEATED {
        return Err(
            format!("ERR the embedded server repeats at most {MAX_REPEATED} fields").into(),
        );
    }
    let (wanted, first) = match (count < 0, wanted < hash.len()) {
        (false, false) => (hash.len(), 0),
        _ => (
            wanted,
            usize::try_from(random() % hash.len() as u64).unwrap_or(0),
        ),
    };
    let mut picked = hash.iter().cycle().skip(first).take(wanted);
    let bulk = |bytes: &Vec<u8>| Reply::bulk(bytes.as_slice());
    if !counted {
        return Ok(picked.next().map_or(Reply::Nil, |(field, _)| bulk(field)));
    }
    Ok(match (values, call.speaks_resp3()) {
        (false, _) => Reply::list(picked.map(|(field, _)| bulk(field))),
        (true, false) => Reply::list(picked.flat_map(|(field, value)| [bulk(field), bulk(value)])),
        (true, true) => {
            Reply::list(picked.map(|(field, value)| Reply::list([bulk(field), bulk(value)])))
        }
    })
}

fn set_all(call: &mut Call) -> Result<usize, Text> {
    if call.args.len() % 2 == 1 {
        return Err(call.wrong_number().into());
    }
    let args = call.args;
    let hash = call.hash_or_new(&args[1])?;
    let pairs = args[2..].chunks_exact(2);
    Ok(pairs
        .filter(|pair| hash.insert(pair[0].clone(), pair[1].clone()).is_none())
        .count())
}

pub(super) fn hset(call: &mut Call) -> Outcome {
    set_all(call).map(Reply::len)
}

pub(super) fn hmset(call: &mut Call) -> Outcome {
    set_all(call).map(|_| Reply::OK)
}

pub(super) fn hsetnx(call: &mut Call) -> Outcome {
    let args = call.args;
    let hash = call.hash_or_new(&args[1])?;
    let new = !hash.contains_key(&args[2]);
    if new {
        hash.insert(args[2].clone(), args[3].clone());
    }
    Ok(Reply::Int(new.into()))
}

pub(super) fn hincrby(call: &mut Call) -> Outcome {
    let by = call.int(3)?;
    let args = call.args;
    let before = call.hash(&args[1])?.and_then(|hash| hash.get(&args[2]));
    let before = before.map_or(Ok(0), |value| {
        integer(value).ok_or("ERR hash value is not an integer")
    })?;
    let after = before.checked_add(by).ok_or(OVERFLOW)?;
    call.hash_or_new(&args[1])?
        .insert(args[2].clone(), after.to_string().into_bytes());
    Ok(Reply::Int(after))
}

pub(super) fn hdel(call: &mut Call) -> Outcome {
    let args = call.args;
    call.hash(&args[1])?;
    let Some(Value::Hash(hash)) = call.server.keys.get_mut(call.db, &args[1]) else {
        return Ok(Reply::Int(0));
    };
    let gone = args[2..]
        .iter()
        .filter(|field| hash.shift_remove(*field).is_some())
        .count();
    call.tidy(&args[1]);
    Ok(Reply::len(gone))
}
