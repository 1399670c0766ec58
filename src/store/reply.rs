//! Replies of scripts, as values. The codes are in `lua/README.md`.

use std::{num::NonZeroU64, time::Duration};

use nestlock_wire::Value;

use crate::{
    error::{StoreError, StoreErrorKind},
    owner::OwnerId,
    token::FencingToken,
};

/// The reply of an acquire script.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Acquired {
    /// Acquired, with the fencing token if the kind has one.
    Yes {
        token: Option<NonZeroU64>,
    },
    /// Another owner holds it, for `ttl` at most. `None`: its record has no TTL.
    Busy {
        ttl: Option<Duration>,
        /// How many waiters are ahead of this owner, if the lock has a queue.
        ahead: Option<u32>,
        /// The score by which a release names this owner's place, if it grants the lock.
        place: Option<Score>,
    },
    /// A re-entry into a lock that this owner does not hold.
    Lost,
    WrongKind,
}

/// A score, compared as a number: server versions print the same score in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Score(u64);

impl Score {
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let score: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
        score.is_finite().then(|| Self(score.to_bits()))
    }
}

/// The reply of a release script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Released {
    Free,
    StillHeld,
    NotHeld,
    /// Nothing was done: the record has this hold count.
    Changed {
        holds: u32,
    },
}

/// The reply of a renew script for one lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Renewed {
    Yes,
    /// Held, and the record has no TTL.
    Endless,
    /// There is no record.
    Gone,
    /// The record does not have this owner.
    Taken,
    /// The server refused this lock of several, or its record may be on another node.
    Unknown,
}

/// The reply of a `force_release` script.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Forced {
    Freed,
    WasFree,
    WrongKind,
}

/// The reply of an inspect script.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Inspected {
    Free,
    /// Held by these owners, each with its hold count.
    Held {
        ttl: Option<Duration>,
        holders: Vec<(OwnerId, u32)>,
    },
    WrongKind,
}

/// The reply of a script about a guarded key.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Guarded {
    /// Done, with the value if it was requested and exists.
    Done(Option<Vec<u8>>),
    Stale {
        seen: FencingToken,
    },
}

fn nonsense(value: &Value) -> StoreError {
    StoreError::new(
        StoreErrorKind::Protocol,
        true,
        format!("unexpected reply {value:?}"),
    )
}

fn ttl(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

pub(crate) fn acquired(value: &Value) -> Result<Acquired, StoreError> {
    let nonsense = || nonsense(value);
    Ok(match value {
        Value::Integer(1) => Acquired::Yes { token: None },
        Value::Integer(-2) => Acquired::Lost,
        Value::Integer(-3) => Acquired::WrongKind,
        Value::Array(parts) => match parts.as_slice() {
            [Value::Integer(1), Value::Integer(token)] => {
                let token = u64::try_from(*token).ok().and_then(NonZeroU64::new);
                Acquired::Yes {
                    token: Some(token.ok_or_else(nonsense)?),
                }
            }
            [Value::Integer(0), Value::Integer(millis @ -1..)] => Acquired::Busy {
                ttl: ttl(*millis),
                ahead: None,
                place: None,
            },
            [
                Value::Integer(0),
                Value::Integer(millis @ -1..),
                Value::Integer(ahead),
                place @ ..,
            ] => {
                let ahead = Some(u32::try_from(*ahead).map_err(|_| nonsense())?);
                let place = match place {
                    [] => None,
                    [Value::Text(place)] => Some(Score::parse(place).ok_or_else(nonsense)?),
                    _ => return Err(nonsense()),
                };
                Acquired::Busy {
                    ttl: ttl(*millis),
                    ahead,
                    place,
                }
            }
            _ => return Err(nonsense()),
        },
        _ => return Err(nonsense()),
    })
}

/// Parses the reply of an acquire script over many locks. Returns `None` if all were acquired, else
/// the index (from 0) of a lock that was not, and why.
pub(crate) fn acquired_together(
    value: &Value,
    locks: usize,
) -> Result<Option<(usize, Acquired)>, StoreError> {
    let parts = match value {
        Value::Integer(1) => return Ok(None),
        Value::Array(parts) => parts.as_slice(),
        _ => return Err(nonsense(value)),
    };
    let [Value::Integer(number @ 1..), Value::Integer(why)] = parts else {
        return Err(nonsense(value));
    };
    let why = match why {
        -3 => Acquired::WrongKind,
        -1.. => Acquired::Busy {
            ttl: ttl(*why),
            ahead: None,
            place: None,
        },
        _ => return Err(nonsense(value)),
    };
    match usize::try_from(*number) {
        Ok(number) if number <= locks => Ok(Some((number - 1, why))),
        _ => Err(nonsense(value)),
    }
}

pub(crate) fn released(value: &Value) -> Result<Released, StoreError> {
    Ok(match value {
        Value::Integer(1) => Released::Free,
        Value::Integer(0) => Released::StillHeld,
        Value::Null => Released::NotHeld,
        Value::Array(parts) => match parts.as_slice() {
            [Value::Integer(0), Value::Integer(holds @ 1..)] => Released::Changed {
                holds: u32::try_from(*holds).map_err(|_| nonsense(value))?,
            },
            _ => return Err(nonsense(value)),
        },
        other => return Err(nonsense(other)),
    })
}

/// Returns the elements of a list with one reply for each lock.
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
            let [millis, holders @ ..] = parts.as_slice() else {
                return Err(nonsense(value));
            };
            let (pairs, []) = holders.as_chunks::<2>() else {
                return Err(nonsense(value));
            };
            let holder = |[owner, holds]: &[Value; 2]| {
                // any bytes may be an owner, and a count that is too large is capped
                let owner = owner.as_lossy_str()?;
                Some((
                    OwnerId::recorded(&owner),
                    u32::try_from(u64::try_from(holds.as_number()?).ok()?).unwrap_or(u32::MAX),
                ))
            };
            match (
                millis.as_number(),
                pairs.iter().map(holder).collect::<Option<Vec<_>>>(),
            ) {
                (Some(millis), Some(holders)) if !holders.is_empty() => Ok(Inspected::Held {
                    ttl: ttl(millis),
                    holders,
                }),
                _ => Err(nonsense(value)),
            }
        }
        other => Err(nonsense(other)),
    }
}

/// Parses a number of permits. Returns `None` if the key has another kind.
pub(crate) fn count(value: &Value) -> Result<Option<u32>, StoreError> {
    match value {
        Value::Integer(-3) => Ok(None),
        Value::Array(parts) => match parts.as_slice() {
            [Value::Integer(count @ 0..)] => Ok(Some(u32::try_from(*count).unwrap_or(u32::MAX))),
            _ => Err(nonsense(value)),
        },
        other => Err(nonsense(other)),
    }
}

pub(crate) fn texts(value: &Value, keys: usize) -> Result<Vec<String>, StoreError> {
    let text = |text: &Value| Some(text.as_lossy_str()?.into_owned());
    let texts: Option<Vec<_>> = for_each(value, keys)?.iter().map(text).collect();
    texts.ok_or_else(|| nonsense(value))
}

pub(crate) fn guarded(value: &Value) -> Result<Guarded, StoreError> {
    let parts = match value {
        Value::Integer(1) => return Ok(Guarded::Done(None)),
        Value::Array(parts) => parts.as_slice(),
        _ => return Err(nonsense(value)),
    };
    Ok(match parts {
        [Value::Integer(1), Value::Null] => Guarded::Done(None),
        [Value::Integer(1), Value::Text(text)] => Guarded::Done(Some(text.clone())),
        [Value::Integer(0), Value::Integer(seen @ 1..)] => Guarded::Stale {
            seen: FencingToken::try_from(seen.unsigned_abs()).map_err(|_| nonsense(value))?,
        },
        _ => return Err(nonsense(value)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(numbers: &[i64]) -> Value {
        Value::Array(numbers.iter().copied().map(Value::Integer).collect())
    }

    #[test]
    fn answers_are_read_strictly() {
        let busy = |ttl, ahead| Acquired::Busy {
            ttl,
            ahead,
            place: None,
        };
        let millis = Duration::from_millis;
        assert_eq!(
            acquired(&Value::Integer(1)).unwrap(),
            Acquired::Yes { token: None }
        );
        assert_eq!(
            acquired(&list(&[1, 7])).unwrap(),
            Acquired::Yes {
                token: NonZeroU64::new(7)
            }
        );
        assert_eq!(
            acquired(&list(&[0, 0])).unwrap(),
            busy(Some(Duration::ZERO), None)
        );
        assert_eq!(
            acquired(&list(&[0, 1])).unwrap(),
            busy(Some(millis(1)), None)
        );
        assert_eq!(
            acquired(&list(&[0, 7, 2])).unwrap(),
            busy(Some(millis(7)), Some(2))
        );
        let place = |text| {
            Value::Array(vec![
                Value::Integer(0),
                Value::Integer(7),
                Value::Integer(2),
                Value::text(text),
            ])
        };
        let (ttl, ahead) = (Some(millis(7)), Some(2));
        let granted = |text| Acquired::Busy {
            ttl,
            ahead,
            place: Score::parse(text),
        };
        assert_eq!(
            acquired(&place("1764099690123.0029")).unwrap(),
            granted(b"1764099690123.0029296875"),
            "as a number"
        );
        assert_ne!(
            acquired(&place("1764099690123.0029")).unwrap(),
            granted(b"1764099690123.0039")
        );
        assert!(acquired(&place("soon")).is_err());
        // H3: a record without a TTL is busy, never acquired
        assert_eq!(acquired(&list(&[0, -1])).unwrap(), busy(None, None));
        assert_eq!(acquired(&Value::Integer(-2)).unwrap(), Acquired::Lost);
        assert_eq!(acquired(&Value::Integer(-3)).unwrap(), Acquired::WrongKind);
        assert_eq!(acquired_together(&Value::Integer(1), 2).unwrap(), None);
        assert_eq!(
            acquired_together(&list(&[2, 7]), 2).unwrap(),
            Some((1, busy(Some(millis(7)), None)))
        );
        assert_eq!(
            acquired_together(&list(&[1, -1]), 2).unwrap(),
            Some((0, busy(None, None)))
        );
        assert_eq!(
            acquired_together(&list(&[1, -3]), 2).unwrap(),
            Some((0, Acquired::WrongKind))
        );
        let answers = Value::Array(vec![Value::Integer(1), Value::Null]);
        assert_eq!(
            released_together(&answers, 2).unwrap(),
            [Released::Free, Released::NotHeld]
        );
        assert_eq!(guarded(&Value::Integer(1)).unwrap(), Guarded::Done(None));
        assert_eq!(
            guarded(&list(&[0, 7])).unwrap(),
            Guarded::Stale {
                seen: FencingToken::try_from(7).unwrap()
            }
        );
        assert_eq!(
            guarded(&Value::Array(vec![Value::Integer(1), Value::Null])).unwrap(),
            Guarded::Done(None)
        );
        let value = Value::Array(vec![Value::Integer(1), Value::text("v")]);
        assert_eq!(guarded(&value).unwrap(), Guarded::Done(Some(b"v".to_vec())));
    }

    /// A stray nil must not pass for an acquired lock, or for a value that was written.
    #[test]
    fn what_no_script_answers_is_an_error() {
        let text = Value::text("OK");
        for bad in [
            Value::Integer(-4),
            Value::Other,
            text,
            Value::Array(vec![]),
            Value::Array(vec![Value::Null]),
        ] {
            assert!(acquired(&bad).is_err(), "{bad:?}");
            assert!(released(&bad).is_err(), "{bad:?}");
            assert!(forced(&bad).is_err(), "{bad:?}");
            assert!(inspected(&bad).is_err(), "{bad:?}");
            assert!(count(&bad).is_err(), "{bad:?}");
            assert!(renewed(&bad, 1).is_err(), "{bad:?}");
            assert!(acquired_together(&bad, 1).is_err(), "{bad:?}");
            assert!(guarded(&bad).is_err(), "{bad:?}");
        }
        assert!(count(&Value::Null).is_err() && count(&Value::Integer(-1)).is_err());
        assert!(acquired(&Value::Null).is_err());
        assert!(acquired_together(&Value::Null, 1).is_err());
        assert!(guarded(&Value::Null).is_err());
        assert!(forced(&Value::Null).is_err());
        assert!(renewed(&Value::Null, 1).is_err());
        for bad in [Value::Integer(0), Value::Integer(-1), Value::Integer(7)] {
            assert!(acquired(&bad).is_err(), "{bad:?}");
            assert!(acquired_together(&bad, 1).is_err(), "{bad:?}");
            assert!(guarded(&bad).is_err(), "{bad:?}");
        }
        for bad in [
            list(&[1]),
            list(&[1, 0]),
            list(&[1, -7]),
            list(&[0, -2]),
            list(&[0, 7, -1]),
            list(&[2, 7]),
        ] {
            assert!(acquired(&bad).is_err(), "{bad:?}");
        }
        for bad in [
            list(&[0, 7]),
            list(&[3, 7]),
            list(&[1, -2]),
            list(&[1, -4]),
            list(&[1]),
        ] {
            assert!(acquired_together(&bad, 2).is_err(), "{bad:?}");
        }
        assert!(released_together(&list(&[1]), 2).is_err());
        assert!(renewed(&list(&[1]), 2).is_err());
        for bad in [
            list(&[0, 0]),
            list(&[1]),
            list(&[1, 7]),
            Value::Array(vec![Value::text("v")]),
        ] {
            assert!(guarded(&bad).is_err(), "{bad:?}");
        }
    }
}
