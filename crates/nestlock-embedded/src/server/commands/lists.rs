//! List commands, including the blocking ones.

use std::{collections::VecDeque, time::Duration};

use super::{
    call::Call,
    error_text::{NOT_AN_INTEGER, SYNTAX, WRONG_TYPE},
};
use crate::server::{
    client::{Blocked, End},
    keyspace::Value,
    resp::{Outcome, Reply, integer},
    state::Server,
};

const OUT_OF_RANGE: &str = "ERR value is out of range";

fn pop_one(list: &mut VecDeque<Vec<u8>>, end: End) -> Option<Vec<u8>> {
    match end {
        End::Left => list.pop_front(),
        End::Right => list.pop_back(),
    }
}

pub(super) fn lpush(call: &mut Call) -> Outcome {
    push(call, End::Left, false)
}

pub(super) fn rpush(call: &mut Call) -> Outcome {
    push(call, End::Right, false)
}

pub(super) fn lpushx(call: &mut Call) -> Outcome {
    push(call, End::Left, true)
}

pub(super) fn rpushx(call: &mut Call) -> Outcome {
    push(call, End::Right, true)
}

fn push(call: &mut Call, end: End, only_existing: bool) -> Outcome {
    let args = call.args;
    if call.list(&args[1])?.is_none() && only_existing {
        return Ok(Reply::Int(0));
    }
    let Value::List(list) = call
        .server
        .keys
        .get_or_insert(call.db, &args[1], || Value::List(VecDeque::new()))
    else {
        return Err(WRONG_TYPE.into());
    };
    for element in &args[2..] {
        match end {
            End::Left => list.push_front(element.clone()),
            End::Right => list.push_back(element.clone()),
        }
    }
    let len = Reply::len(list.len());
    call.server.keys.note_push(call.db, &args[1]);
    Ok(len)
}

pub(super) fn lpop(call: &mut Call) -> Outcome {
    pop(call, End::Left)
}

pub(super) fn rpop(call: &mut Call) -> Outcome {
    pop(call, End::Right)
}

fn pop(call: &mut Call, end: End) -> Outcome {
    if call.args.len() > 3 {
        return Err(call.wrong_number().into());
    }
    let count = if call.args.len() == 3 {
        Some(call.positive(2)?)
    } else {
        None
    };
    let key = &call.args[1];
    let Some(list) = call.list_mut(key)? else {
        return Ok(if count.is_some() {
            Reply::NilList
        } else {
            Reply::Nil
        });
    };
    let reply = match count {
        None => pop_one(list, end).map_or(Reply::Nil, Reply::Bulk),
        Some(count) => Reply::list(
            (0..count.min(list.len()))
                .map_while(|_| pop_one(list, end))
                .map(Reply::Bulk),
        ),
    };
    call.tidy(key);
    Ok(reply)
}

pub(super) fn blpop(call: &mut Call) -> Outcome {
    blocking_pop(call, End::Left)
}

pub(super) fn brpop(call: &mut Call) -> Outcome {
    blocking_pop(call, End::Right)
}

fn blocking_pop(call: &mut Call, end: End) -> Outcome {
    let last = call.args.len() - 1;
    let timeout = std::str::from_utf8(&call.args[last])
        .ok()
        .and_then(|text| text.parse::<f64>().ok());
    let timeout = timeout
        .filter(|timeout| !timeout.is_nan())
        .ok_or("ERR timeout is not a float or out of range")?;
    // as Redis does, report a timeout beyond the range of an integer as negative
    let timeout = Duration::try_from_secs_f64(timeout)
        .ok()
        .filter(|timeout| i64::try_from(timeout.as_millis()).is_ok());
    let timeout = timeout.ok_or("ERR timeout is negative")?;
    let keys = &call.args[1..last];
    for key in keys {
        if let Some(list) = call.list_mut(key)? {
            let element = pop_one(list, end).map_or(Reply::Nil, Reply::Bulk);
            call.tidy(key);
            return Ok(Reply::list([Reply::bulk(key.as_slice()), element]));
        }
    }
    let until = (!timeout.is_zero()).then(|| call.server.clock.now() + timeout);
    let blocked = Blocked {
        db: call.db,
        keys: keys.to_vec(),
        end,
        until,
    };
    call.server.block(call.client, blocked);
    Ok(Reply::Nothing)
}

/// Serves pushed elements to the clients that are blocked on the list, in order of arrival.
pub(crate) fn serve_blocked(server: &mut Server) {
    for (db, key) in server.keys.take_pushed() {
        for id in server.waiting_for(db, &key) {
            let Some(Value::List(list)) = server.keys.get_mut(db, &key) else {
                break;
            };
            let Some(blocked) = server
                .clients
                .get_mut(&id)
                .and_then(|client| client.blocked.take())
            else {
                continue;
            };
            let element = pop_one(list, blocked.end).map_or(Reply::Nil, Reply::Bulk);
            server.keys.tidy(db, &key);
            server.unblock(id, &Reply::list([Reply::bulk(key.as_slice()), element]));
        }
    }
}

pub(super) fn llen(call: &mut Call) -> Outcome {
    Ok(Reply::len(
        call.list(&call.args[1])?.map_or(0, VecDeque::len),
    ))
}

/// Resolves a Redis index: a negative one counts from the end.
fn index(number: i64, len: usize) -> i64 {
    if number < 0 {
        number.saturating_add(i64::try_from(len).unwrap_or(i64::MAX))
    } else {
        number
    }
}

/// Returns the range of the elements from `first` to `last`, both included.
pub(super) fn range(first: i64, last: i64, len: usize) -> std::ops::Range<usize> {
    let first = usize::try_from(index(first, len)).unwrap_or(0);
    let end = usize::try_from(index(last, len).saturating_add(1))
        .unwrap_or(0)
        .min(len);
    if first < end { first..end } else { 0..0 }
}

pub(super) fn lrange(call: &mut Call) -> Outcome {
    let (from, to) = (call.int(2)?, call.int(3)?);
    let Some(list) = call.list(&call.args[1])? else {
        return Ok(Reply::List(Vec::new()));
    };
    Ok(Reply::list(
        list.range(range(from, to, list.len()))
            .map(|element| Reply::bulk(element.as_slice())),
    ))
}

pub(super) fn lindex(call: &mut Call) -> Outcome {
    let Some(list) = call.list(&call.args[1])? else {
        return Ok(Reply::Nil);
    };
    let at = usize::try_from(index(call.int(2)?, list.len())).ok();
    Ok(at
        .and_then(|at| list.get(at))
        .map_or(Reply::Nil, |element| Reply::bulk(element.as_slice())))
}

pub(super) fn lset(call: &mut Call) -> Outcome {
    let args = call.args;
    let number = call.int(2);
    let Some(list) = call.list_mut(&args[1])? else {
        return Err("ERR no such key".into());
    };
    let at = usize::try_from(index(number?, list.len())).ok();
    let element = at
        .and_then(|at| list.get_mut(at))
        .ok_or("ERR index out of range")?;
    element.clone_from(&args[3]);
    Ok(Reply::OK)
}

pub(super) fn ltrim(call: &mut Call) -> Outcome {
    let (from, to) = (call.int(2)?, call.int(3)?);
    let key = &call.args[1];
    if let Some(list) = call.list_mut(key)? {
        let keep = range(from, to, list.len());
        list.truncate(keep.end);
        list.drain(..keep.start);
    }
    call.tidy(key);
    Ok(Reply::OK)
}

pub(super) fn lrem(call: &mut Call) -> Outcome {
    let count = call.int(2)?;
    let args = call.args;
    let Some(list) = call.list_mut(&args[1])? else {
        return Ok(Reply::Int(0));
    };
    let limit = if count == 0 {
        usize::MAX
    } else {
        usize::try_from(count.unsigned_abs()).unwrap_or(usize::MAX)
    };
    let fits = |(_, element): &(usize, &Vec<u8>)| **element == args[3];
    let mut gone: Vec<usize> = if count < 0 {
        list.iter()
            .enumerate()
            .rev()
            .filter(fits)
            .take(limit)
            .map(|(at, _)| at)
            .collect()
    } else {
        list.iter()
            .enumerate()
            .filter(fits)
            .take(limit)
            .map(|(at, _)| at)
            .collect()
    };
    gone.sort_unstable();
    let mut at = 0;
    list.retain(|_| {
        at += 1;
        gone.binary_search(&(at - 1)).is_err()
    });
    call.tidy(&args[1]);
    Ok(Reply::len(gone.len()))
}

pub(super) fn linsert(call: &mut Call) -> Outcome {
    let args = call.args;
    let after = match args[2].to_ascii_lowercase().as_slice() {
        b"after" => 1,
        b"before" => 0,
        _ => return Err(SYNTAX.into()),
    };
    let Some(list) = call.list_mut(&args[1])? else {
        return Ok(Reply::Int(0));
    };
    let Some(pivot) = list.iter().position(|element| *element == args[3]) else {
        return Ok(Reply::Int(-1));
    };
    list.insert(pivot + after, args[4].clone());
    Ok(Reply::len(list.len()))
}

pub(super) fn lpos(call: &mut Call) -> Outcome {
    let (mut rank, mut count, mut max_len) = (1, None, 0);
    let mut at = 3;
    while at < call.args.len() {
        let known = ["rank", "count", "maxlen"]
            .iter()
            .position(|option| call.is(at, option));
        let (Some(option), true) = (known, at + 1 < call.args.len()) else {
            return Err(SYNTAX.into());
        };
        let number = integer(&call.args[at + 1]);
        let not_negative = |text: &str| {
            number
                .filter(|number| *number >= 0)
                .ok_or_else(|| format!("ERR {text}"))
        };
        match option {
            0 => {
                rank = number.ok_or(NOT_AN_INTEGER)?;
                if rank == i64::MIN {
                    return Err(OUT_OF_RANGE.into());
                }
                if rank == 0 {
                    return Err(
                        "ERR RANK can't be zero: use 1 to start from the first match, 2 from the second ... or \
                                use negative to start from the end of the list"
                            .into(),
                    );
                }
            }
            1 => count = Some(not_negative("COUNT can't be negative")?),
            _ => max_len = not_negative("MAXLEN can't be negative")?,
        }
        at += 2;
    }
    let Some(list) = call.list(&call.args[1])? else {
        return Ok(if count.is_some() {
            Reply::List(Vec::new())
        } else {
            Reply::Nil
        });
    };
    let size = |number: i64| {
        if number == 0 {
            usize::MAX
        } else {
            usize::try_from(number).unwrap_or(usize::MAX)
        }
    };
    let skip = usize::try_from(rank.unsigned_abs() - 1).unwrap_or(usize::MAX);
    let fits = |(_, element): &(usize, &Vec<u8>)| **element == call.args[2];
    let elements = list.iter().enumerate();
    let mut found: Box<dyn Iterator<Item = (usize, &Vec<u8>)>> = if rank < 0 {
        Box::new(elements.rev().take(size(max_len)).filter(fits).skip(skip))
    } else {
        Box::new(elements.take(size(max_len)).filter(fits).skip(skip))
    };
    Ok(match count {
        None => found.next().map_or(Reply::Nil, |(at, _)| Reply::len(at)),
        Some(count) => Reply::list(found.take(size(count)).map(|(at, _)| Reply::len(at))),
    })
}
