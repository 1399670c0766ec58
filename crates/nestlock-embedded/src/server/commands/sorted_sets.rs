//! Sorted set commands.

use super::{call::Call, error_text::SYNTAX, float::strtod, lists::range};
use crate::server::{
    resp::{Outcome, Reply},
    sorted_set::{Score, SortedSet},
};

const NO_RANGE: &str = "ERR min or max is not a float";
const NOT_A_NUMBER: &str = "ERR resulting score is not a number (NaN)";

fn score_or_nil(score: Option<f64>) -> Reply {
    score.map_or(Reply::Nil, Reply::Double)
}

pub(super) fn zadd(call: &mut Call) -> Outcome {
    let [mut nx, mut xx, mut gt, mut lt, mut changed_too, mut incr] = [false; 6];
    let mut at = 2;
    while at < call.args.len() {
        match call.args[at].to_ascii_lowercase().as_slice() {
            b"nx" => nx = true,
            b"xx" => xx = true,
            b"gt" => gt = true,
            b"lt" => lt = true,
            b"ch" => changed_too = true,
            b"incr" => incr = true,
            _ => break,
        }
        at += 1;
    }
    let pairs = &call.args[at..];
    if pairs.is_empty() || !pairs.len().is_multiple_of(2) {
        return Err(SYNTAX.into());
    }
    if nx && xx {
        return Err("ERR XX and NX options at the same time are not compatible".into());
    }
    if nx && (gt || lt) || gt && lt {
        return Err("ERR GT, LT, and/or NX options at the same time are not compatible".into());
    }
    if incr && pairs.len() > 2 {
        return Err("ERR INCR option supports a single increment-element pair".into());
    }
    let scores: Vec<f64> = (at..call.args.len())
        .step_by(2)
        .map(|at| call.float(at))
        .collect::<Result<_, _>>()?;

    let key = &call.args[1];
    if call.sorted_set(key)?.is_none() && xx {
        return Ok(if incr { Reply::Nil } else { Reply::Int(0) });
    }
    let set = call.sorted_set_or_new(key)?;
    let (mut added, mut updated, mut result) = (0, 0, None);
    for (pair, score) in pairs.chunks_exact(2).zip(scores) {
        let member = &pair[1];
        let Some(before) = set.score(member) else {
            if !xx {
                set.insert(member, score);
                added += 1;
                result = Some(score);
            }
            continue;
        };
        if nx {
            continue;
        }
        let score = if incr { before + score } else { score };
        if score.is_nan() {
            return Err(NOT_A_NUMBER.into());
        }
        if gt && score <= before || lt && score >= before {
            continue;
        }
        result = Some(score);
        if Score(score) != Score(before) {
            set.insert(member, score);
            updated += 1;
        }
    }
    call.tidy(key);
    Ok(if incr {
        score_or_nil(result)
    } else {
        Reply::Int(if changed_too { added + updated } else { added })
    })
}

pub(super) fn zincrby(call: &mut Call) -> Outcome {
    // Redis runs ZINCRBY as ZADD INCR, so an option in place of the increment is parsed as an
    // option, and an increment or a member is missing
    if ["nx", "xx", "gt", "lt", "ch", "incr"]
        .iter()
        .any(|option| call.is(2, option))
    {
        return Err(SYNTAX.into());
    }
    let by = call.float(2)?;
    let (key, member) = (&call.args[1], &call.args[3]);
    let score = call
        .sorted_set(key)?
        .and_then(|set| set.score(member))
        .map_or(by, |score| score + by);
    if score.is_nan() {
        return Err(NOT_A_NUMBER.into());
    }
    call.sorted_set_or_new(key)?.insert(member, score);
    Ok(Reply::Double(score))
}

pub(super) fn zrem(call: &mut Call) -> Outcome {
    let args = call.args;
    remove(call, |_| args[2..].to_vec())
}

/// Removes the members that `which` returns.
fn remove(call: &mut Call, which: impl FnOnce(&SortedSet) -> Vec<Vec<u8>>) -> Outcome {
    let key = &call.args[1];
    let Some(set) = call.sorted_set(key)? else {
        return Ok(Reply::Int(0));
    };
    let members = which(set);
    let set = call.sorted_set_or_new(key)?;
    let gone = members.iter().filter(|member| set.remove(member)).count();
    call.tidy(key);
    Ok(Reply::len(gone))
}

pub(super) fn zremrangebyscore(call: &mut Call) -> Outcome {
    let bounds = Bounds::parse(&call.args[2], &call.args[3])?;
    remove(call, |set| {
        bounds.of(set).map(|(member, _)| member.to_vec()).collect()
    })
}

pub(super) fn zremrangebyrank(call: &mut Call) -> Outcome {
    let (first, last) = (call.int(2)?, call.int(3)?);
    remove(call, |set| {
        let range = range(first, last, set.len());
        set.iter()
            .skip(range.start)
            .take(range.len())
            .map(|(member, _)| member.to_vec())
            .collect()
    })
}

pub(super) fn zscore(call: &mut Call) -> Outcome {
    Ok(score_or_nil(
        call.sorted_set(&call.args[1])?
            .and_then(|set| set.score(&call.args[2])),
    ))
}

pub(super) fn zmscore(call: &mut Call) -> Outcome {
    let set = call.sorted_set(&call.args[1])?;
    Ok(Reply::list(call.args[2..].iter().map(|member| {
        score_or_nil(set.and_then(|set| set.score(member)))
    })))
}

pub(super) fn zcard(call: &mut Call) -> Outcome {
    Ok(Reply::len(
        call.sorted_set(&call.args[1])?.map_or(0, SortedSet::len),
    ))
}

pub(super) fn zcount(call: &mut Call) -> Outcome {
    let bounds = Bounds::parse(&call.args[2], &call.args[3])?;
    Ok(Reply::len(
        call.sorted_set(&call.args[1])?
            .map_or(0, |set| bounds.of(set).count()),
    ))
}

pub(super) fn zrank(call: &mut Call) -> Outcome {
    let rank = call
        .sorted_set(&call.args[1])?
        .and_then(|set| set.rank(&call.args[2]));
    Ok(rank.map_or(Reply::Nil, Reply::len))
}

pub(super) fn zrevrank(call: &mut Call) -> Outcome {
    let set = call.sorted_set(&call.args[1])?;
    let rank = set.and_then(|set| Some(set.len() - 1 - set.rank(&call.args[2])?));
    Ok(rank.map_or(Reply::Nil, Reply::len))
}

pub(super) fn zpopmin(call: &mut Call) -> Outcome {
    pop(call, false)
}

pub(super) fn zpopmax(call: &mut Call) -> Outcome {
    pop(call, true)
}

fn pop(call: &mut Call, from_the_end: bool) -> Outcome {
    if call.args.len() > 3 {
        return Err(SYNTAX.into());
    }
    let count = if call.args.len() == 3 {
        Some(call.positive(2)?)
    } else {
        None
    };
    let key = &call.args[1];
    let Some(set) = call.sorted_set(key)? else {
        return Ok(Reply::List(Vec::new()));
    };
    let popped = pick(set.iter(), from_the_end, 0, count.unwrap_or(1));
    remove(call, |_| {
        popped.iter().map(|(member, _)| member.clone()).collect()
    })?;
    // without a count, the reply is a flat pair in RESP3, too
    Ok(if count.is_some() {
        scored(call, popped)
    } else {
        Reply::List(popped.into_iter().flat_map(pair).collect())
    })
}

fn pair((member, score): (Vec<u8>, f64)) -> [Reply; 2] {
    [Reply::Bulk(member), Reply::Double(score)]
}

/// Converts members with their scores to a reply: pairs in RESP3, flat in RESP2.
fn scored(call: &Call, members: Vec<(Vec<u8>, f64)>) -> Reply {
    if call.speaks_resp3() {
        Reply::list(members.into_iter().map(|member| Reply::list(pair(member))))
    } else {
        Reply::list(members.into_iter().flat_map(pair))
    }
}

fn pick<'a>(
    members: impl DoubleEndedIterator<Item = (&'a [u8], f64)>,
    from_the_end: bool,
    skip: usize,
    count: usize,
) -> Vec<(Vec<u8>, f64)> {
    let own = |(member, score): (&[u8], f64)| (member.to_vec(), score);
    if from_the_end {
        members.rev().skip(skip).take(count).map(own).collect()
    } else {
        members.skip(skip).take(count).map(own).collect()
    }
}

/// A range of scores: `(bound, excluded)` at each end.
struct Bounds {
    min: (f64, bool),
    max: (f64, bool),
}

impl Bounds {
    fn parse(min: &[u8], max: &[u8]) -> Result<Self, String> {
        let bound = |text: &[u8]| {
            let (text, open) = text
                .strip_prefix(b"(")
                .map_or((text, false), |rest| (rest, true));
            // as in C, the text ends at the first NUL
            let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
            strtod(text).map(|number| (number, open)).ok_or(NO_RANGE)
        };
        Ok(Self {
            min: bound(min)?,
            max: bound(max)?,
        })
    }

    fn of<'a>(&self, set: &'a SortedSet) -> impl DoubleEndedIterator<Item = (&'a [u8], f64)> {
        let (min, max) = (self.min, self.max);
        set.iter().filter(move |(_, score)| {
            let above = if min.1 {
                *score > min.0
            } else {
                *score >= min.0
            };
            let below = if max.1 {
                *score < max.0
            } else {
                *score <= max.0
            };
            above && below
        })
    }
}

pub(super) fn zrange(call: &mut Call) -> Outcome {
    range_of(call, None, None)
}

pub(super) fn zrevrange(call: &mut Call) -> Outcome {
    range_of(call, Some(false), Some(true))
}

pub(super) fn zrangebyscore(call: &mut Call) -> Outcome {
    range_of(call, Some(true), Some(false))
}

pub(super) fn zrevrangebyscore(call: &mut Call) -> Outcome {
    range_of(call, Some(true), Some(true))
}

/// Runs ZRANGE or one of its older forms. `by_score` and `reverse` are `None` where options set
/// them, and `Some` where the command's name does.
fn range_of(call: &mut Call, mut by_score: Option<bool>, mut reverse: Option<bool>) -> Outcome {
    let (mut scores, mut limit) = (false, (0, -1));
    let mut at = 4;
    while at < call.args.len() {
        let left = call.args.len() - at - 1;
        if call.is(at, "withscores") {
            scores = true;
        } else if call.is(at, "limit") && left >= 2 {
            limit = (call.int(at + 1)?, call.int(at + 2)?);
            at += 2;
        } else if reverse.is_none() && call.is(at, "rev") {
            reverse = Some(true);
        } else if by_score.is_none() && call.is(at, "byscore") {
            by_score = Some(true);
        } else if by_score.is_none() && call.is(at, "bylex") {
            return Err("ERR BYLEX is not emulated by nestlock-embedded".into());
        } else {
            return Err(SYNTAX.into());
        }
        at += 1;
    }
    let (by_score, reverse) = (by_score.unwrap_or(false), reverse.unwrap_or(false));
    // a count of -1 is no limit
    if limit.1 != -1 && !by_score {
        return Err(
            "ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX"
                .into(),
        );
    }
    let members = if by_score {
        let (min, max) = if reverse { (3, 2) } else { (2, 3) };
        let bounds = Bounds::parse(&call.args[min], &call.args[max])?;
        let set = call.sorted_set(&call.args[1])?;
        let (skip, count) = limit;
        let all = |number: i64| usize::try_from(number).unwrap_or(usize::MAX);
        // a negative offset is past the end, a negative count is no limit
        set.map_or(Vec::new(), |set| {
            pick(bounds.of(set), reverse, all(skip), all(count))
        })
    } else {
        let (first, last) = (call.int(2)?, call.int(3)?);
        let set = call.sorted_set(&call.args[1])?;
        set.map_or(Vec::new(), |set| {
            let range = range(first, last, set.len());
            pick(set.iter(), reverse, range.start, range.len())
        })
    };
    Ok(if scores {
        scored(call, members)
    } else {
        Reply::list(members.into_iter().map(|(name, _)| Reply::Bulk(name)))
    })
}
