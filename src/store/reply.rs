//! Answers of scripts, as values. The codes stand in `lua/README.md`.

use std::{num::NonZeroU64, time::Duration};

use fred::types::Value;

use crate::{
    error::{StoreError, StoreErrorKind},
    owner::OwnerId,
};

/// What an acquire script answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// With the fencing token, if the kind has one.
    Yes {
        token: Option<NonZeroU64>,
    },
    /// Another owner holds it, for `ttl` at most; `None`: its record has no TTL.
    Busy {
        ttl: Option<Duration>,
        /// How many wait before this owner, if the lock has a queue.
        ahead: Option<u32>,
    },
    /// A re-entry into a lock that this owner does not hold.
    Lost,
    WrongKind,
}

/// What a release script answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Released {
    Free,
    StillHeld,
    NotHeld,
}

/// What a renew script answered for one lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renewed {
    Yes,
    /// Held, and the record has no TTL.
    Endless,
    Gone,
    Taken,
    Unknown,
}

/// What a `force_release` script answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Forced {
    Freed,
    WasFree,
    WrongKind,
}

/// What an inspect script answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Inspected {
    Free,
    /// By whom, and how often.
    Held {
        ttl: Option<Duration>,
        holders: Vec<(OwnerId, u32)>,
    },
    WrongKind,
}

/// What a script about a guarded key answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Guarded {
    /// With the value, if it was asked for and there is one.
    Done(Option<Vec<u8>>),
    Stale {
        seen: u64,
    },
}

fn nonsense(value: &Value) -> StoreError {
    StoreError::new(StoreErrorKind::Protocol, true, format!("unexpected answer {value:?}"))
}

fn ttl(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

pub(crate) fn acquired(value: &Value) -> Result<Acquired, StoreError> {
    Ok(match value {
        Value::Null => Acquired::Yes { token: None },
        Value::Array(parts) => match parts.as_slice() {
            [Value::Integer(1), token] => {
                let token = token.as_u64().and_then(NonZeroU64::new);
                Acquired::Yes { token: Some(token.ok_or_else(|| nonsense(value))?) }
            }
            [Value::Integer(0), Value::Integer(millis @ -1..), ahead] => {
                let ahead = ahead.as_u64().and_then(|ahead| u32::try_from(ahead).ok());
                Acquired::Busy { ttl: ttl(*millis), ahead: Some(ahead.ok_or_else(|| nonsense(value))?) }
            }
            _ => return Err(nonsense(value)),
        },
        Value::Integer(-3) => Acquired::WrongKind,
        Value::Integer(-2) => Acquired::Lost,
        Value::Integer(millis @ -1..) => Acquired::Busy { ttl: ttl(*millis), ahead: None },
        other => return Err(nonsense(other)),
    })
}

/// `None`: all of them; else one that could not be had, by its number from 0, and why not.
pub(crate) fn acquired_together(value: &Value, locks: usize) -> Result<Option<(usize, Acquired)>, StoreError> {
    let Value::Array(parts) = value else {
        return if value.is_null() { Ok(None) } else { Err(nonsense(value)) };
    };
    let [Value::Integer(number @ 1..), why @ Value::Integer(_)] = parts.as_slice() else { return Err(nonsense(value)) };
    match (usize::try_from(*number), acquired(why)?) {
        (Ok(number), why @ (Acquired::Busy { .. } | Acquired::WrongKind)) if number <= locks => {
            Ok(Some((number - 1, why)))
        }
        _ => Err(nonsense(value)),
    }
}

pub(crate) fn released(value: &Value) -> Result<Released, StoreError> {
    Ok(match value {
        Value::Integer(1) => Released::Free,
        Value::Integer(0) => Released::StillHeld,
        Value::Null => Released::NotHeld,
        other => return Err(nonsense(other)),
    })
}

/// A list with one answer for each lock.
fn for_each(value: &Value, locks: usize) -> Result<&[Value], StoreError> {
    match value {
        Value::Array(answers) if answers.len() == locks => Ok(answers),
        _ => Err(nonsense(value)),
    }
}

pub(crate) fn released_together(value: &Value, locks: usize) -> Result<Vec<Released>, StoreError> {
    for_each(value, locks)?.iter().map(released).collect()
}

pub(crate) fn renewed(value: &Value, locks: usize) -> Result<Vec<Renewed>, StoreError> {
    for_each(value, locks)?
        .iter()
        .map(|answer| {
            Ok(match answer {
                Value::Integer(1) => Renewed::Yes,
                Value::Integer(0) => Renewed::Gone,
                Value::Integer(-1) => Renewed::Taken,
                Value::Integer(-2) => Renewed::Unknown,
                Value::Integer(-4) => Renewed::Endless,
                other => return Err(nonsense(other)),
            })
        })
        .collect()
}

pub(crate) fn forced(value: &Value) -> Result<Forced, StoreError> {
    Ok(match value {
        Value::Integer(1) => Forced::Freed,
        Value::Integer(0) => Forced::WasFree,
        Value::Integer(-3) => Forced::WrongKind,
        other => return Err(nonsense(other)),
    })
}

pub(crate) fn inspected(value: &Value) -> Result<Inspected, StoreError> {
    match value {
        Value::Null => Ok(Inspected::Free),
        Value::Integer(-3) => Ok(Inspected::WrongKind),
        Value::Array(parts) => {
            let [millis, holders @ ..] = parts.as_slice() else { return Err(nonsense(value)) };
            let (pairs, []) = holders.as_chunks::<2>() else { return Err(nonsense(value)) };
            let holder = |[owner, holds]: &[Value; 2]| {
                Some((OwnerId::recorded(&owner.as_str()?), u32::try_from(holds.as_u64()?).ok()?))
            };
            match (millis.as_i64(), pairs.iter().map(holder).collect::<Option<Vec<_>>>()) {
                (Some(millis), Some(holders)) if !holders.is_empty() => {
                    Ok(Inspected::Held { ttl: ttl(millis), holders })
                }
                _ => Err(nonsense(value)),
            }
        }
        other => Err(nonsense(other)),
    }
}

pub(crate) fn guarded(value: Value) -> Result<Guarded, StoreError> {
    match value {
        Value::Null => Ok(Guarded::Done(None)),
        Value::Integer(seen @ 1..) => Ok(Guarded::Stale { seen: seen.unsigned_abs() }),
        Value::Array(parts) => match <[Value; 1]>::try_from(parts) {
            Ok([Value::Null]) => Ok(Guarded::Done(None)),
            Ok([Value::String(text)]) => Ok(Guarded::Done(Some(text.as_bytes().to_vec()))),
            Ok([Value::Bytes(bytes)]) => Ok(Guarded::Done(Some(bytes.to_vec()))),
            Ok([other]) => Err(nonsense(&other)),
            Err(parts) => Err(nonsense(&Value::Array(parts))),
        },
        other => Err(nonsense(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_strictly() {
        assert_eq!(acquired(&Value::Null).unwrap(), Acquired::Yes { token: None });
        let token = Value::Array(vec![Value::Integer(1), Value::Integer(7)]);
        assert_eq!(acquired(&token).unwrap(), Acquired::Yes { token: NonZeroU64::new(7) });
        assert_eq!(acquired(&Value::Integer(0)).unwrap(), Acquired::Busy { ttl: Some(Duration::ZERO), ahead: None });
        // H3: a record without a TTL is busy, never acquired
        assert_eq!(acquired(&Value::Integer(-1)).unwrap(), Acquired::Busy { ttl: None, ahead: None });
        assert_eq!(acquired(&Value::Integer(-2)).unwrap(), Acquired::Lost);
        assert_eq!(acquired(&Value::Integer(-3)).unwrap(), Acquired::WrongKind);
        for bad in [Value::Integer(-4), Value::Boolean(true), Value::from_static_str("OK"), Value::Array(vec![])] {
            assert!(acquired(&bad).is_err(), "{bad:?}");
            assert!(released(&bad).is_err(), "{bad:?}");
            assert!(forced(&bad).is_err(), "{bad:?}");
            assert!(inspected(&bad).is_err(), "{bad:?}");
            assert!(renewed(&bad, 1).is_err(), "{bad:?}");
            assert!(acquired_together(&bad, 1).is_err(), "{bad:?}");
            assert!(released_together(&bad, 1).is_err(), "{bad:?}");
        }
        let list = |numbers: &[i64]| Value::Array(numbers.iter().copied().map(Value::Integer).collect());
        assert_eq!(acquired_together(&Value::Null, 2).unwrap(), None);
        let busy = Acquired::Busy { ttl: Some(Duration::from_millis(7)), ahead: None };
        assert_eq!(acquired_together(&list(&[2, 7]), 2).unwrap(), Some((1, busy)));
        assert_eq!(acquired_together(&list(&[1, -3]), 2).unwrap(), Some((0, Acquired::WrongKind)));
        for bad in [list(&[0, 7]), list(&[3, 7]), list(&[1, -2]), list(&[1, -4]), list(&[1]), Value::Integer(1)] {
            assert!(acquired_together(&bad, 2).is_err(), "{bad:?}");
        }
        let answers = Value::Array(vec![Value::Integer(1), Value::Null]);
        assert_eq!(released_together(&answers, 2).unwrap(), [Released::Free, Released::NotHeld]);
        assert!(released_together(&answers, 3).is_err());
        assert!(renewed(&Value::Array(vec![Value::Integer(1)]), 2).is_err());
        assert_eq!(guarded(Value::Null).unwrap(), Guarded::Done(None));
        assert_eq!(guarded(Value::Integer(7)).unwrap(), Guarded::Stale { seen: 7 });
        assert_eq!(guarded(Value::Array(vec![Value::Null])).unwrap(), Guarded::Done(None));
        let value = Value::Array(vec![Value::from_static_str("v")]);
        assert_eq!(guarded(value).unwrap(), Guarded::Done(Some(b"v".to_vec())));
        for bad in [Value::Integer(0), Value::Integer(-1), Value::from_static_str("OK"), Value::Array(vec![])] {
            assert!(guarded(bad).is_err());
        }
    }
}
