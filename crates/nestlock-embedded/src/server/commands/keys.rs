//! Key commands, for values of any type.

use super::{
    call::Call,
    error_text::{NOT_AN_INTEGER, SYNTAX, invalid_expire, shortened, text},
    glob::glob,
};
use crate::server::{
    keyspace::Value,
    resp::{Outcome, Reply, integer},
};

pub(super) fn del(call: &mut Call) -> Outcome {
    let gone = call.args[1..]
        .iter()
        .filter(|key| call.server.keys.take(call.db, key).is_some())
        .count();
    Ok(Reply::len(gone))
}

pub(super) fn exists(call: &mut Call) -> Outcome {
    Ok(Reply::len(
        call.args[1..]
            .iter()
            .filter(|key| call.server.keys.contains(call.db, key))
            .count(),
    ))
}

pub(super) fn type_name(call: &mut Call) -> Outcome {
    let value = call.server.keys.get(call.db, &call.args[1]);
    Ok(Reply::Status(value.map_or("none", Value::type_name).into()))
}

pub(super) fn keys(call: &mut Call) -> Outcome {
    let keys = call.server.keys.keys(call.db).map(|(key, _)| key);
    Ok(Reply::list(
        keys.filter(|key| names_key(&call.args[1], key))
            .map(Reply::bulk),
    ))
}

/// Returns whether a pattern matches a key. `*` also matches the empty key.
fn names_key(pattern: &[u8], key: &[u8]) -> bool {
    pattern == b"*" || glob(pattern, key)
}

pub(super) fn scan(call: &mut Call) -> Outcome {
    let cursor = match call.args[1].as_slice() {
        b"" => Some(0),
        text => std::str::from_utf8(text)
            .ok()
            .and_then(|text| text.parse::<u64>().ok()),
    };
    let cursor = cursor.ok_or("ERR invalid cursor")?;
    let (mut count, mut pattern, mut type_name) = (10, None, None);
    let mut at = 2;
    while at < call.args.len() {
        let value = call.args.get(at + 1).ok_or(SYNTAX)?;
        if call.is(at, "count") {
            count = call.int(at + 1)?;
            if count < 1 {
                return Err(SYNTAX.into());
            }
        } else if call.is(at, "match") {
            pattern = Some(value.as_slice());
        } else if call.is(at, "type") {
            type_name = Some(value.as_slice());
        } else {
            return Err(SYNTAX.into());
        }
        at += 2;
    }
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let (next, found) = call.server.keys.scan(call.db, cursor, count);
    let found = found.into_iter().filter(|(key, value)| {
        pattern.is_none_or(|pattern| names_key(pattern, key))
            && type_name.is_none_or(|name| name.eq_ignore_ascii_case(value.type_name().as_bytes()))
    });
    Ok(Reply::list([
        Reply::bulk(next.to_string()),
        Reply::list(found.map(|(key, _)| Reply::bulk(key))),
    ]))
}

pub(super) fn persist(call: &mut Call) -> Outcome {
    let had = call.server.keys.deadline(call.db, &call.args[1]).is_some();
    call.server.keys.set_deadline(call.db, &call.args[1], None);
    Ok(Reply::Int(had.into()))
}

pub(super) fn ttl(call: &mut Call) -> Outcome {
    remaining(call, |deadline, now| ((deadline - now).max(0) + 500) / 1000)
}

pub(super) fn pttl(call: &mut Call) -> Outcome {
    remaining(call, |deadline, now| (deadline - now).max(0))
}

pub(super) fn expiretime(call: &mut Call) -> Outcome {
    remaining(call, |deadline, _| {
        deadline / 1000 + i64::from(deadline % 1000 >= 500)
    })
}

pub(super) fn pexpiretime(call: &mut Call) -> Outcome {
    remaining(call, |deadline, _| deadline)
}

fn remaining(call: &mut Call, answer: impl Fn(i64, i64) -> i64) -> Outcome {
    let (db, key) = (call.db, &call.args[1]);
    Ok(Reply::Int(match call.server.keys.deadline(db, key) {
        Some(deadline) => answer(deadline, call.now()),
        None if call.server.keys.contains(db, key) => -1,
        None => -2,
    }))
}

pub(super) fn expire(call: &mut Call) -> Outcome {
    set_expiry(call, 1000, call.now())
}

pub(super) fn pexpire(call: &mut Call) -> Outcome {
    set_expiry(call, 1, call.now())
}

pub(super) fn expireat(call: &mut Call) -> Outcome {
    set_expiry(call, 1000, 0)
}

pub(super) fn pexpireat(call: &mut Call) -> Outcome {
    set_expiry(call, 1, 0)
}

fn set_expiry(call: &mut Call, unit: i64, base: i64) -> Outcome {
    let [mut nx, mut xx, mut gt, mut lt] = [false; 4];
    for at in 3..call.args.len() {
        if call.is(at, "nx") {
            nx = true;
        } else if call.is(at, "xx") {
            xx = true;
        } else if call.is(at, "gt") {
            gt = true;
        } else if call.is(at, "lt") {
            lt = true;
        } else {
            return Err(text([
                b"ERR Unsupported option ",
                shortened(&call.args[at], usize::MAX),
            ]));
        }
    }
    if nx && (xx || gt || lt) {
        return Err("ERR NX and XX, GT or LT options at the same time are not compatible".into());
    }
    if gt && lt {
        return Err("ERR GT and LT options at the same time are not compatible".into());
    }
    let deadline = integer(&call.args[2]).ok_or(NOT_AN_INTEGER)?;
    let deadline = deadline
        .checked_mul(unit)
        .and_then(|time| time.checked_add(base));
    let deadline = deadline.ok_or_else(|| invalid_expire(call.name))?;

    let key = &call.args[1];
    if !call.server.keys.contains(call.db, key) {
        return Ok(Reply::Int(0));
    }
    let before = call.server.keys.deadline(call.db, key);
    // a key without a deadline is treated as one that never expires
    let refused = nx && before.is_some()
        || xx && before.is_none()
        || gt && before.is_none_or(|before| deadline <= before)
        || lt && before.is_some_and(|before| deadline >= before);
    if refused {
        return Ok(Reply::Int(0));
    }
    if deadline <= call.now() {
        call.delete(key);
    } else {
        call.server.keys.set_deadline(call.db, key, Some(deadline));
    }
    Ok(Reply::Int(1))
}
