//! Matches replies to requests by number. `lua/numbered.lua` is the server's side of it.
//!
//! A connection counts from 32 random bits, so a reply of another connection does not fit. A reply
//! that does not fit ends the connection, and what is in flight is in doubt. A code and the number
//! are one integer. The word of a PING is such a number as well.
//!
//! No count can detect a reply without a number in place of another one without a number. Such a
//! reply may report an executed request as refused, or a copy that does not exist; it grants no
//! script. Decision 15.

use std::hash::{BuildHasher, RandomState};

use crate::{failure::Failure, resp::Value};

/// An integer reply is `number * CODES + code`: the code takes four bits.
const CODES: i64 = 16;
/// The code of a nil reply.
const NIL: i64 = 7;

/// Returns the number from which a connection counts its requests. It has ten digits and is random,
/// so that a reply of another connection does not match by chance. No replica count and no code is
/// as high.
pub(crate) fn base() -> u64 {
    if cfg!(test) {
        0
    } else {
        1 << 32 | u64::from(RandomState::new().hash_one(0) as u32)
    }
}

/// Returns a script's reply to the request of this number. Returns `None` if it belongs to another
/// request.
pub(crate) fn reply(number: u64, value: Value) -> Option<Value> {
    match value {
        Value::Integer(named) => {
            let code = named.checked_sub(i64::try_from(number).ok()?.checked_mul(CODES)?)?;
            match code {
                NIL => Some(Value::Null),
                -8..NIL => Some(Value::Integer(code)),
                _ => None,
            }
        }
        Value::Array(mut parts) if is_named(number, parts.first()) => {
            parts.remove(0);
            Some(Value::Array(parts))
        }
        _ => None,
    }
}

/// Returns the replies to `many` bundled requests. Returns `None` if they belong to another
/// request.
pub(crate) fn each(
    number: u64,
    value: Value,
    many: usize,
) -> Option<impl Iterator<Item = Result<Value, Failure>>> {
    let Value::Array(parts) = value else {
        return None;
    };
    let told = |part| {
        if let Value::Refused(error) = part {
            Err(Failure::Refused(error))
        } else {
            Ok(part)
        }
    };
    (parts.len() == many + 1 && is_named(number, parts.first()))
        .then(|| parts.into_iter().skip(1).map(told))
}

/// Returns whether this is the reply to the PING of this number.
pub(crate) fn is_pong(number: u64, value: &Value) -> bool {
    matches!(value, Value::Text(_)) && is_named(number, Some(value))
}

fn is_named(number: u64, part: Option<&Value>) -> bool {
    part.and_then(Value::as_number)
        .and_then(|named| u64::try_from(named).ok())
        == Some(number)
}
