//! Answers of scripts, as values. The codes stand in `lua/README.md`.

use std::time::Duration;

use fred::types::Value;

use crate::{
    error::{StoreError, StoreErrorKind},
    owner::OwnerId,
};

/// What an acquire script answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    Yes,
    /// Another owner holds it, for `ttl` at most; `None`: its record has no TTL.
    Busy {
        ttl: Option<Duration>,
    },
    /// A re-entry into a lock that this owner does not hold.
    Lost,
    WrongKind,
}

/// What a release script answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Released {
    Free,
    StillHeld,
    NotHeld,
}

/// What a renew script answered for one lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Renewed {
    Yes,
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
    Held { ttl: Option<Duration>, owner: OwnerId, holds: u32 },
    WrongKind,
}

fn nonsense(value: &Value) -> StoreError {
    StoreError::new(StoreErrorKind::Protocol, true, format!("unexpected answer {value:?}"))
}

fn ttl(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

pub(crate) fn acquired(value: &Value) -> Result<Acquired, StoreError> {
    Ok(match value {
        Value::Null => Acquired::Yes,
        Value::Integer(-3) => Acquired::WrongKind,
        Value::Integer(-2) => Acquired::Lost,
        Value::Integer(millis @ -1..) => Acquired::Busy { ttl: ttl(*millis) },
        other => return Err(nonsense(other)),
    })
}

pub(crate) fn released(value: &Value) -> Result<Released, StoreError> {
    Ok(match value {
        Value::Integer(1) => Released::Free,
        Value::Integer(0) => Released::StillHeld,
        Value::Null => Released::NotHeld,
        other => return Err(nonsense(other)),
    })
}

pub(crate) fn renewed(value: &Value, locks: usize) -> Result<Vec<Renewed>, StoreError> {
    let Value::Array(answers) = value else { return Err(nonsense(value)) };
    if answers.len() != locks {
        return Err(nonsense(value));
    }
    answers
        .iter()
        .map(|answer| {
            Ok(match answer {
                Value::Integer(1) => Renewed::Yes,
                Value::Integer(0) => Renewed::Gone,
                Value::Integer(-1) => Renewed::Taken,
                Value::Integer(-2) => Renewed::Unknown,
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
            let [millis, owner, holds] = parts.as_slice() else { return Err(nonsense(value)) };
            let owner = owner.as_str().and_then(|owner| owner.parse().ok());
            let holds = holds.as_u64().and_then(|holds| u32::try_from(holds).ok());
            match (millis.as_i64(), owner, holds) {
                (Some(millis), Some(owner), Some(holds)) => Ok(Inspected::Held { ttl: ttl(millis), owner, holds }),
                _ => Err(nonsense(value)),
            }
        }
        other => Err(nonsense(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_strictly() {
        assert_eq!(acquired(&Value::Null).unwrap(), Acquired::Yes);
        assert_eq!(acquired(&Value::Integer(0)).unwrap(), Acquired::Busy { ttl: Some(Duration::ZERO) });
        // H3: a record without a TTL is busy, never acquired
        assert_eq!(acquired(&Value::Integer(-1)).unwrap(), Acquired::Busy { ttl: None });
        assert_eq!(acquired(&Value::Integer(-2)).unwrap(), Acquired::Lost);
        assert_eq!(acquired(&Value::Integer(-3)).unwrap(), Acquired::WrongKind);
        for bad in [Value::Integer(-4), Value::Boolean(true), Value::from_static_str("OK"), Value::Array(vec![])] {
            assert!(acquired(&bad).is_err(), "{bad:?}");
            assert!(released(&bad).is_err(), "{bad:?}");
            assert!(forced(&bad).is_err(), "{bad:?}");
            assert!(inspected(&bad).is_err(), "{bad:?}");
            assert!(renewed(&bad, 1).is_err(), "{bad:?}");
        }
        assert!(renewed(&Value::Array(vec![Value::Integer(1)]), 2).is_err());
    }
}
