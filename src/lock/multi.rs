//! Several locks as one: all or nothing. Redisson's `RedissonMultiLock`. No Redis here.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::join_all;

use crate::{
    clock::Instant,
    engine::{Anchor, Kind, acquire::Acquire, random_fraction, together::Outcome},
    error::{Error, Result, StoreError, StoreErrorKind},
    guard::LockGuard,
    options::{AcquireOptions, Wait},
    owner::OwnerId,
    quorum::ask,
    rlock::RLock,
};

use super::Lock;

/// The pause after a round in which some members were busy grows by this, up to [`MAX_PAUSE`]; all of it is random.
const PAUSE_STEP: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_millis(50);
/// How long past the end of the wait answers to requests under way are awaited.
const GRACE: Duration = Duration::from_millis(40);

/// Several locks that are held together or not at all, made by [`LockClient::multi_lock`](crate::LockClient::multi_lock).
///
/// The members may be of any kind, on any servers. Where all are this client's own reentrant, non-reentrant or spin locks,
/// one request takes them together, and one gives them back. Nobody waits for one member while he holds another, so that processes
/// which name the same locks in different orders do not block each other.
#[derive(Debug, Clone)]
pub struct MultiLock {
    anchor: Arc<Anchor>,
    members: Arc<[Arc<dyn RLock>]>,
    /// The members' kinds, if they are this client's own locks: one request may take them together.
    kinds: Option<Arc<[Arc<dyn Kind>]>>,
    name: Arc<str>,
}

impl MultiLock {
    pub(crate) fn new(anchor: &Arc<Anchor>, members: impl IntoIterator<Item = Arc<dyn RLock>>) -> Result<Self> {
        let members: Arc<[Arc<dyn RLock>]> = members.into_iter().collect();
        if members.is_empty() {
            let reason = "a multi-lock needs at least one member".into();
            return Err(Error::InvalidName { name: String::new(), reason });
        }
        let names: Vec<_> = members.iter().map(|member| member.name()).collect();
        let kind = |member: &Arc<dyn RLock>| {
            let lock = Lock::of(member).filter(|lock| Arc::ptr_eq(&lock.anchor, anchor))?;
            Some(Arc::clone(&lock.kind))
        };
        let kinds = members.iter().map(kind).collect();
        Ok(Self { anchor: Arc::clone(anchor), name: names.join("+").into(), kinds, members })
    }

    /// The members, in the order in which they were given.
    #[must_use]
    pub fn members(&self) -> &[Arc<dyn RLock>] {
        &self.members
    }

    /// Acquires all members by one request, without waiting, if that can be done.
    async fn together(&self, options: &AcquireOptions) -> Result<Round> {
        let Some(kinds) = &self.kinds else { return Ok(Round::Again(0)) };
        let all = Acquire::new(&self.anchor, &kinds[0], options)?;
        Ok(match all.together(kinds).await? {
            Outcome::Entered(entered) => {
                let guard = |entered| LockGuard::new(Arc::clone(&self.anchor), entered);
                Round::Entered(entered.into_iter().map(guard).collect())
            }
            Outcome::Busy(_) if options.wait == Wait::No => Round::Busy,
            Outcome::Busy(at) => Round::Again(at),
            Outcome::NotThisWay => Round::Again(0),
        })
    }

    /// Acquires one member, and waits for it; then all others, without waiting, and for their answers until `over`.
    async fn round(&self, first: usize, wait: Wait, options: &AcquireOptions, over: Option<Instant>) -> Result<Round> {
        let awaited = AcquireOptions { wait, ..options.clone() };
        let Some(guard) = self.members[first].acquire(awaited).await? else { return Ok(Round::Busy) };
        let at_once = AcquireOptions { wait: Wait::No, ..options.clone() };
        let others = self.members.iter().enumerate().filter(|(at, _)| *at != first);
        let others = others.map(|(at, member)| (at, member.acquire(at_once.clone())));
        let answers = ask(&self.anchor, others, over, |_| false).await;

        let silent = (0..self.members.len()).find(|at| *at != first && answers.iter().all(|(other, _)| other != at));
        let (mut guards, mut busy, mut failure) = (vec![(first, guard)], None, None);
        for (at, outcome) in answers {
            match outcome {
                Ok(Some(guard)) => guards.push((at, guard)),
                Ok(None) => busy = busy.or(Some(at)),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if guards.len() == self.members.len() {
            guards.sort_unstable_by_key(|(at, _)| *at);
            return Ok(Round::Entered(guards.into_iter().map(|(_, guard)| guard).collect()));
        }
        // what fails or is late here is settled by the member's client, or ends with its lease
        let released = guards.into_iter().map(|(at, guard)| (at, guard.unlock()));
        ask(&self.anchor, released, over.map(|over| over.max(Instant::now() + GRACE)), |_| false).await;
        match (failure, busy, silent) {
            (Some(error), ..) => Err(error),
            (None, None, Some(silent)) => {
                let source = StoreError::new(StoreErrorKind::Timeout, true, "no answer before the wait was over");
                Err(Error::Unconfirmed { lock: self.members[silent].name().to_owned(), source })
            }
            (None, busy, _) => Ok(Round::Again(busy.unwrap_or(first))),
        }
    }
}

/// Asks all members at once; the first failure, if any.
async fn all<T>(asked: impl Iterator<Item = impl Future<Output = Result<T>>>) -> Result<Vec<T>> {
    join_all(asked).await.into_iter().collect()
}

enum Round {
    Entered(Vec<LockGuard>),
    /// The member that was waited for, was busy all the time.
    Busy,
    /// This one was busy: wait for it next.
    Again(usize),
}

#[async_trait]
impl RLock for MultiLock {
    fn name(&self) -> &str {
        &self.name
    }

    async fn acquire(&self, options: AcquireOptions) -> Result<Option<LockGuard>> {
        let limit = options.wait.until(Instant::now());
        let over = limit.filter(|_| options.wait != Wait::No).map(|limit| limit + GRACE);
        let mut first = match self.together(&options).await? {
            Round::Entered(guards) => return Ok(Some(LockGuard::of_many(Arc::clone(&self.name), guards))),
            Round::Busy => return Ok(None),
            Round::Again(first) => first,
        };
        let mut pause = PAUSE_STEP;
        loop {
            let wait = match limit {
                None => Wait::Forever,
                Some(_) if options.wait == Wait::No => Wait::No,
                Some(limit) => Wait::For(limit.saturating_duration_since(Instant::now())),
            };
            match self.round(first, wait, &options, over).await? {
                Round::Entered(guards) => {
                    return Ok(Some(LockGuard::of_many(Arc::clone(&self.name), guards)));
                }
                Round::Busy => return Ok(None),
                Round::Again(_) if limit.is_some_and(|limit| limit <= Instant::now()) => return Ok(None),
                Round::Again(busy) => first = busy,
            }
            // two that take turns in disturbing each other would go on for ever
            let until = Instant::now() + pause.mul_f64(random_fraction());
            self.anchor.sleep_until(limit.map_or(until, |limit| until.min(limit))).await;
            pause = (pause + PAUSE_STEP).min(MAX_PAUSE);
        }
    }

    async fn release(&self, owner: &OwnerId) -> Result<()> {
        all(self.members.iter().map(|member| member.release(owner))).await.map(drop)
    }

    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<bool> {
        let all = all(self.members.iter().map(|member| member.extend(owner, lease))).await?;
        Ok(all.into_iter().all(|extended| extended))
    }

    async fn force_unlock(&self) -> Result<bool> {
        let all = all(self.members.iter().map(|member| member.force_unlock())).await?;
        Ok(all.into_iter().any(|freed| freed))
    }

    /// Whether any member is held: then the whole can not be acquired.
    async fn is_locked(&self) -> Result<bool> {
        let all = all(self.members.iter().map(|member| member.is_locked())).await?;
        Ok(all.into_iter().any(|locked| locked))
    }

    /// How often `owner` holds all members.
    async fn hold_count(&self, owner: &OwnerId) -> Result<u32> {
        let all = all(self.members.iter().map(|member| member.hold_count(owner))).await?;
        Ok(all.into_iter().min().unwrap_or(0))
    }

    /// Who holds all members, if that is one owner; members of several clients have several.
    async fn holder(&self) -> Result<Option<OwnerId>> {
        let all = all(self.members.iter().map(|member| member.holder())).await?;
        let mut all = all.into_iter();
        let first = all.next().flatten();
        Ok(first.filter(|first| all.all(|other| other.is_some_and(|other| other.base() == first.base()))))
    }

    /// The shortest of the members' leases; `None` if one is free or has no TTL.
    async fn remaining_lease(&self) -> Result<Option<Duration>> {
        let all = all(self.members.iter().map(|member| member.remaining_lease())).await?;
        Ok(all.into_iter().collect::<Option<Vec<_>>>().and_then(|leases| leases.into_iter().min()))
    }
}
