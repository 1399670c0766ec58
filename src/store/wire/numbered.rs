//! Which request a reply names. `lua/parts/numbered.lua` is the other side of it.

use std::hash::{BuildHasher, RandomState};

use super::{Failure, resp::Value};

/// Codes of scripts take four bits beside the number.
const CODES: i64 = 16;
/// The code of a reply that is none.
const NIL: i64 = 7;

/// What a connection counts its requests from: ten digits, of which another connection's replies hit none by chance. No count
/// of replicas is as high, nor any code.
pub(super) fn base() -> u64 {
    if cfg!(test) { 0 } else { 1 << 32 | u64::from(RandomState::new().hash_one(0) as u32) }
}

/// What a script answered to the request of this number; `None`: it is another one's reply.
pub(super) fn reply(number: u64, value: Value) -> Option<Value> {
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

/// The same for each of so many that went together.
pub(super) fn each(number: u64, value: Value, many: usize) -> Option<impl Iterator<Item = Result<Value, Failure>>> {
    let Value::Array(parts) = value else { return None };
    let told = |part| if let Value::Refused(error) = part { Err(Failure::Refused(error)) } else { Ok(part) };
    (parts.len() == many + 1 && is_named(number, parts.first())).then(|| parts.into_iter().skip(1).map(told))
}

/// Whether this is the word of the PING of this number.
pub(super) fn is_pong(number: u64, value: &Value) -> bool {
    matches!(value, Value::Text(_)) && is_named(number, Some(value))
}

fn is_named(number: u64, part: Option<&Value>) -> bool {
    part.and_then(Value::as_number).and_then(|named| u64::try_from(named).ok()) == Some(number)
}
