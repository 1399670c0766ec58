//! String commands.

use super::{
    call::Call,
    error_text::{NOT_AN_INTEGER, OVERFLOW, SYNTAX, WRONG_TYPE, invalid_expire},
};
use crate::server::{
    keyspace::Value,
    resp::{Outcome, Reply, integer},
};

pub(super) fn get(call: &mut Call) -> Outcome {
    Ok(call
        .string(&call.args[1])?
        .map_or(Reply::Nil, |text| Reply::bulk(text.as_slice())))
}

pub(super) fn strlen(call: &mut Call) -> Outcome {
    Ok(Reply::len(call.string(&call.args[1])?.map_or(0, Vec::len)))
}

pub(super) fn mget(call: &mut Call) -> Outcome {
    // a key of another type is reported as missing
    let value = |key: &Vec<u8>| {
        call.string(key)
            .ok()
            .flatten()
            .map_or(Reply::Nil, |text| Reply::bulk(text.as_slice()))
    };
    Ok(Reply::list(call.args[1..].iter().map(value)))
}

/// Replaces the value of a key, of any type, and removes its deadline.
fn replace(call: &mut Call, key: &[u8], text: &[u8]) {
    call.server.keys.set_deadline(call.db, key, None);
    call.server
        .keys
        .put(call.db, key, Value::String(text.to_vec()));
}

/// Returns the deadline given by the argument at `at`, in milliseconds since the Unix epoch.
fn deadline(call: &Call, at: usize, unit: i64, relative: bool) -> Result<i64, String> {
    let time = integer(&call.args[at]).ok_or(NOT_AN_INTEGER)?;
    let base = if relative { call.now() } else { 0 };
    let time = Some(time)
        .filter(|time| *time > 0)
        .and_then(|time| time.checked_mul(unit)?.checked_add(base));
    time.ok_or_else(|| invalid_expire(call.name))
}

/// The unit of an expiry option in milliseconds, and whether it counts from now.
type ExpiryOption = (i64, bool);

/// Returns the expiry option at this position. Returns `None` if there is none, its value is
/// missing, or it differs from `before`, the previous expiry option: only the same one may be
/// repeated.
fn expiry_option(
    call: &Call,
    at: usize,
    before: Option<(usize, ExpiryOption)>,
) -> Option<ExpiryOption> {
    let options = [
        ("ex", (1000, true)),
        ("px", (1, true)),
        ("exat", (1000, false)),
        ("pxat", (1, false)),
    ];
    let (_, option) = options.into_iter().find(|(name, _)| call.is(at, name))?;
    (at + 1 < call.args.len() && before.is_none_or(|(_, before)| before == option))
        .then_some(option)
}

pub(super) fn set(call: &mut Call) -> Outcome {
    let (mut nx, mut xx, mut get, mut keep, mut expiry) = (false, false, false, false, None);
    let mut at = 3;
    while at < call.args.len() {
        if call.is(at, "nx") && !xx {
            nx = true;
        } else if call.is(at, "xx") && !nx {
            xx = true;
        } else if call.is(at, "get") {
            get = true;
        } else if call.is(at, "keepttl") && expiry.is_none() {
            keep = true;
        } else if let Some(option) = expiry_option(call, at, expiry)
            && !keep
        {
            at += 1;
            expiry = Some((at, option));
        } else {
            return Err(SYNTAX.into());
        }
        at += 1;
    }
    let deadline = expiry
        .map(|(at, (unit, relative))| deadline(call, at, unit, relative))
        .transpose()?;

    let key = &call.args[1];
    let before = if get { Some(self::get(call)?) } else { None };
    let exists = call.server.keys.contains(call.db, key);
    if nx && exists || xx && !exists {
        return Ok(before.unwrap_or(Reply::Nil));
    }
    if keep {
        call.server
            .keys
            .put(call.db, key, Value::String(call.args[2].clone()));
    } else {
        replace(call, key, &call.args[2]);
    }
    if deadline.is_some() {
        call.server.keys.set_deadline(call.db, key, deadline);
    }
    Ok(before.unwrap_or(Reply::OK))
}

pub(super) fn setnx(call: &mut Call) -> Outcome {
    let new = !call.server.keys.contains(call.db, &call.args[1]);
    if new {
        replace(call, &call.args[1], &call.args[2]);
    }
    Ok(Reply::Int(new.into()))
}

pub(super) fn setex(call: &mut Call) -> Outcome {
    set_for(call, 1000)
}

pub(super) fn psetex(call: &mut Call) -> Outcome {
    set_for(call, 1)
}

fn set_for(call: &mut Call, unit: i64) -> Outcome {
    let deadline = deadline(call, 2, unit, true)?;
    replace(call, &call.args[1], &call.args[3]);
    call.server
        .keys
        .set_deadline(call.db, &call.args[1], Some(deadline));
    Ok(Reply::OK)
}

pub(super) fn getset(call: &mut Call) -> Outcome {
    let before = get(call)?;
    replace(call, &call.args[1], &call.args[2]);
    Ok(before)
}

pub(super) fn getdel(call: &mut Call) -> Outcome {
    let before = get(call)?;
    call.delete(&call.args[1]);
    Ok(before)
}

pub(super) fn getex(call: &mut Call) -> Outcome {
    let (mut persist, mut expiry) = (false, None);
    let mut at = 2;
    while at < call.args.len() {
        if call.is(at, "persist") && expiry.is_none() {
            persist = true;
        } else if let Some(option) = expiry_option(call, at, expiry)
            && !persist
        {
            at += 1;
            expiry = Some((at, option));
        } else {
            return Err(SYNTAX.into());
        }
        at += 1;
    }
    let key = &call.args[1];
    let value = get(call)?;
    if value == Reply::Nil {
        return Ok(value);
    }
    if let Some((at, (unit, relative))) = expiry {
        let deadline = deadline(call, at, unit, relative)?;
        if deadline <= call.now() {
            call.delete(key);
        } else {
            call.server.keys.set_deadline(call.db, key, Some(deadline));
        }
    } else if persist {
        call.server.keys.set_deadline(call.db, key, None);
    }
    Ok(value)
}

pub(super) fn mset(call: &mut Call) -> Outcome {
    if call.args.len().is_multiple_of(2) {
        return Err(call.wrong_number().into());
    }
    for pair in call.args[1..].chunks_exact(2) {
        replace(call, &pair[0], &pair[1]);
    }
    Ok(Reply::OK)
}

pub(super) fn msetnx(call: &mut Call) -> Outcome {
    if call.args.len().is_multiple_of(2) {
        return Err(call.wrong_number().into());
    }
    if call.args[1..]
        .chunks_exact(2)
        .any(|pair| call.server.keys.contains(call.db, &pair[0]))
    {
        return Ok(Reply::Int(0));
    }
    mset(call)?;
    Ok(Reply::Int(1))
}

pub(super) fn append(call: &mut Call) -> Outcome {
    match call
        .server
        .keys
        .get_or_insert(call.db, &call.args[1], || Value::String(Vec::new()))
    {
        Value::String(text) => {
            text.extend_from_slice(&call.args[2]);
            Ok(Reply::len(text.len()))
        }
        _ => Err(WRONG_TYPE.into()),
    }
}

pub(super) fn incr(call: &mut Call) -> Outcome {
    add(call, 1)
}

pub(super) fn decr(call: &mut Call) -> Outcome {
    add(call, -1)
}

pub(super) fn incrby(call: &mut Call) -> Outcome {
    add(call, call.int(2)?)
}

pub(super) fn decrby(call: &mut Call) -> Outcome {
    add(
        call,
        call.int(2)?
            .checked_neg()
            .ok_or("ERR decrement would overflow")?,
    )
}

fn add(call: &mut Call, by: i64) -> Outcome {
    let key = &call.args[1];
    let before = call
        .string(key)?
        .map_or(Ok(0), |text| integer(text).ok_or(NOT_AN_INTEGER))?;
    let after = before.checked_add(by).ok_or(OVERFLOW)?;
    call.server
        .keys
        .put(call.db, key, Value::String(after.to_string().into_bytes()));
    Ok(Reply::Int(after))
}
