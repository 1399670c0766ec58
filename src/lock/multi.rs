//! The multi-lock: several locks, all or nothing. Redisson's `RedissonMultiLock`. No Redis commands
//! here.
//!
//! It waits for one member, then tries the others at once, and starts again by waiting for the
//! member that was busy. If `engine/together.rs` can take all members by one request, that is tried
//! first; a busy member is then the first to wait for. Decision 23.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::{join_all, select_all};
use nestlock_wire::clock::Instant;

use crate::{
    engine::{Anchor, Kind, acquire::options::Acquire, random_fraction, together::JointOutcome},
    error::{Error, Result, StoreError, StoreErrorKind},
    guard::{Held, LockGuard, of_one_client},
    options::{AcquireOptions, Wait},
    owner::OwnerId,
};

use super::{Inspection, Lock, Several, nodes::ask, note};

/// The pause after an attempt in which members were busy grows by this and a round trip, up to
/// [`MAX_PAUSE`] and two round trips. All of it is random. Without the round trips, the pause would
/// be too short next to the attempts to separate two callers that collide.
const PAUSE_STEP: Duration = Duration::from_millis(2);
const MAX_PAUSE: Duration = Duration::from_millis(50);
/// Cap on the round trip in the pause. A longer measurement mostly comes from an outage that may be
/// over by now, and a longer pause would leave a free lock unused.
const LONGEST_ROUND_TRIP: Duration = Duration::from_millis(250);

/// Several locks that are held together or not at all: see
/// [`LockClient::multi_lock`](crate::LockClient::multi_lock).
#[derive(Debug)]
pub(crate) struct MultiLock {
    anchor: Arc<Anchor>,
    members: Vec<Lock>,
    /// The kinds of the members, if all are locks of this client: one request may then acquire them
    /// together.
    kinds: Option<Vec<Arc<dyn Kind>>>,
    name: Arc<str>,
}

impl MultiLock {
    pub(crate) fn new(anchor: &Arc<Anchor>, members: Vec<Lock>) -> Result<Self> {
        if members.is_empty() {
            let reason = "a multi-lock needs at least one member".into();
            return Err(Error::InvalidName {
                name: String::new(),
                reason,
            });
        }
        let names: Vec<_> = members.iter().map(Lock::name).collect();
        let kind = |member: &Lock| {
            let single = member
                .single()
                .filter(|single| Arc::ptr_eq(&single.anchor, anchor))?;
            (!member.owner_per_acquire).then(|| Arc::clone(&single.kind))
        };
        let kinds = members.iter().map(kind).collect();
        Ok(Self {
            anchor: Arc::clone(anchor),
            name: names.join("+").into(),
            kinds,
            members,
        })
    }

    /// Tries to acquire all members by one request, without waiting.
    async fn together(&self, wait: Wait, options: &AcquireOptions) -> Result<MultiAttempt> {
        let Some(kinds) = &self.kinds else {
            return Ok(MultiAttempt::Again(0));
        };
        let all = Acquire::new(&self.anchor, &kinds[0], options, wait)?;
        Ok(match all.together(kinds).await? {
            JointOutcome::Entered(entered) => {
                let guard = |entered| note::guard(&self.anchor, entered, options);
                MultiAttempt::Entered(entered.into_iter().map(guard).collect())
            }
            JointOutcome::Busy(_) if wait == Wait::No => MultiAttempt::Busy,
            JointOutcome::Busy(at) => MultiAttempt::Again(at),
            JointOutcome::NotThisWay => MultiAttempt::Again(0),
        })
    }

    /// Acquires member `first`, waiting for it, and then all others without waiting. Waits for the
    /// replies of the others until `over`.
    async fn round(
        self: &Arc<Self>,
        first: usize,
        wait: Wait,
        options: &AcquireOptions,
        over: Option<Instant>,
    ) -> Result<MultiAttempt> {
        let Some(guard) = self.members[first].acquire(wait, options).await? else {
            return Ok(MultiAttempt::Busy);
        };
        let (lock, options) = (Arc::clone(self), options.clone());
        let others = async move { lock.others(first, guard, &options, over).await };
        let outcome = self.anchor.while_polled(&self.name, others).await;
        outcome.unwrap_or_else(|undone| Ok(MultiAttempt::Undone(undone)))
    }

    /// Acquires all members but `first`, which `guard` holds, without waiting.
    async fn others(
        &self,
        first: usize,
        guard: LockGuard,
        options: &AcquireOptions,
        over: Option<Instant>,
    ) -> Result<MultiAttempt> {
        let others = self
            .members
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != first);
        let others = others.map(|(at, member)| (at, member.acquire(Wait::No, options)));
        // The others are sent only now, and get at least a grace period for their replies.
        let over = over.map(|over| over.max(Instant::now() + self.anchor.grace()));
        let answers = ask(&self.anchor, others, over, |_| false).await;

        let silent = (0..self.members.len())
            .find(|at| *at != first && answers.iter().all(|(other, _)| other != at));
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
            return Ok(MultiAttempt::Entered(
                guards.into_iter().map(|(_, guard)| guard).collect(),
            ));
        }
        // A release that fails or is late here is settled by the member's client, or ends with its
        // lease.
        let released = guards.into_iter().map(|(at, guard)| (at, guard.unlock()));
        ask(
            &self.anchor,
            released,
            over.map(|over| over.max(Instant::now() + self.anchor.grace())),
            |_| false,
        )
        .await;
        match (failure, busy, silent) {
            (Some(error), ..) => Err(error),
            (None, None, Some(silent)) => {
                let source = StoreError::new(
                    StoreErrorKind::Timeout,
                    true,
                    "no reply before the wait was over",
                );
                Err(Error::Unconfirmed {
                    lock: self.members[silent].name().to_owned(),
                    source,
                })
            }
            (None, busy, _) => Ok(MultiAttempt::Again(busy.unwrap_or(first))),
        }
    }
}

/// Calls all members at once. Returns the first failure, if any.
async fn all<T>(asked: impl Iterator<Item = impl Future<Output = Result<T>>>) -> Result<Vec<T>> {
    join_all(asked).await.into_iter().collect()
}

/// The outcome of one attempt to acquire all members.
enum MultiAttempt {
    Entered(Vec<LockGuard>),
    /// The member that the call waited for was busy all the time.
    Busy,
    /// This member was busy: wait for it next.
    Again(usize),
    /// The future was not polled, so the client has released what it had.
    Undone(Error),
}

#[async_trait]
impl Several for MultiLock {
    fn label(&self) -> &'static str {
        "multi"
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn members(&self) -> &[Lock] {
        &self.members
    }

    async fn acquire(
        self: Arc<Self>,
        wait: Wait,
        options: &AcquireOptions,
    ) -> Result<Option<LockGuard>> {
        let limit = wait.until(Instant::now());
        let over = limit
            .filter(|_| wait != Wait::No)
            .map(|limit| limit + self.anchor.grace());
        let guard = |guards| {
            LockGuard::of_several(All {
                anchor: Arc::clone(&self.anchor),
                name: Arc::clone(&self.name),
                guards,
            })
        };
        let mut first = match self.together(wait, options).await? {
            MultiAttempt::Entered(guards) => return Ok(Some(guard(guards))),
            MultiAttempt::Busy => return Ok(None),
            MultiAttempt::Undone(undone) => return Err(undone),
            MultiAttempt::Again(first) => first,
        };
        let (mut pause, mut was_busy) = (Duration::ZERO, false);
        loop {
            let wait = match limit {
                None => Wait::Forever,
                Some(_) if wait == Wait::No => Wait::No,
                Some(limit) => Wait::For(limit.saturating_duration_since(Instant::now())),
            };
            match self.round(first, wait, options, over).await {
                Ok(MultiAttempt::Entered(guards)) => return Ok(Some(guard(guards))),
                Ok(MultiAttempt::Busy) => return Ok(None),
                Ok(MultiAttempt::Again(_))
                    if limit.is_some_and(|limit| limit <= Instant::now()) =>
                {
                    return Ok(None);
                }
                Ok(MultiAttempt::Again(busy)) => (first, was_busy) = (busy, true),
                Ok(MultiAttempt::Undone(undone))
                    if limit.is_some_and(|limit| limit <= Instant::now()) =>
                {
                    return Err(undone);
                }
                Ok(MultiAttempt::Undone(_)) => {}
                // A member without a reply may still be busy, as the last reply said.
                Err(Error::Unconfirmed { .. }) if was_busy && limit.is_some() => return Ok(None),
                Err(error) => return Err(error),
            }
            // Without a random pause, two callers that each hold a member could block each other
            // forever.
            let round_trip = self.anchor.store.round_trip().min(LONGEST_ROUND_TRIP);
            pause = (pause + PAUSE_STEP + round_trip).min(MAX_PAUSE + 2 * round_trip);
            let until = Instant::now() + pause.mul_f64(random_fraction());
            self.anchor
                .sleep_until(limit.map_or(until, |limit| until.min(limit)))
                .await;
        }
    }

    async fn release(&self, owner: &OwnerId) -> Result<()> {
        all(self.members.iter().map(|member| member.release(owner)))
            .await
            .map(drop)
    }

    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()> {
        all(self
            .members
            .iter()
            .map(|member| member.extend(owner, lease)))
        .await
        .map(drop)
    }

    async fn force_unlock(&self) -> Result<bool> {
        let all = all(self.members.iter().map(Lock::force_unlock)).await?;
        Ok(all.into_iter().any(|freed| freed))
    }

    /// Returns whether any member is held: then the whole cannot be acquired.
    async fn is_locked(&self) -> Result<bool> {
        let all = all(self.members.iter().map(Lock::is_locked)).await?;
        Ok(all.into_iter().any(|locked| locked))
    }

    /// Returns how often `owner` holds all members.
    async fn hold_count(&self, owner: &OwnerId) -> Result<u32> {
        let all = all(self.members.iter().map(|member| member.hold_count(owner))).await?;
        Ok(all.into_iter().min().unwrap_or(0))
    }

    /// Returns the owners that hold all members, and the shortest remaining lease. Members of
    /// different clients know one task by different owner names; then no owner holds all.
    async fn inspect(&self) -> Result<Option<Inspection>> {
        let all = all(self.members.iter().map(Lock::inspect)).await?;
        let Some(held) = all.into_iter().collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let remaining = held
            .iter()
            .map(|held| held.remaining)
            .min_by_key(|left| left.unwrap_or(Duration::MAX));
        let of_all = |owner: &OwnerId| {
            held.iter()
                .map(|held| held.hold_count(owner))
                .min()
                .unwrap_or(0)
        };
        let holders = held[0]
            .holders
            .iter()
            .map(|(owner, _)| (owner.clone(), of_all(owner)));
        let holders = holders.filter(|(_, holds)| *holds > 0).collect();
        Ok(Some(Inspection {
            holders,
            remaining: remaining.flatten(),
        }))
    }
}

/// The guards of all members, as one guard.
struct All {
    anchor: Arc<Anchor>,
    name: Arc<str>,
    guards: Vec<LockGuard>,
}

#[async_trait]
impl Held for All {
    fn name(&self) -> &str {
        &self.name
    }

    fn owner(&self) -> OwnerId {
        self.guards[0].owner()
    }

    fn members(&self) -> &[LockGuard] {
        &self.guards
    }

    async fn unlock(self: Box<Self>) -> Result<()> {
        let Self {
            anchor, mut guards, ..
        } = *self;
        if let Some((anchor, held)) = of_one_client(&mut guards) {
            return anchor.release_together(held).await;
        }
        let released = guards.into_iter().map(LockGuard::unlock).enumerate();
        let mut answers = ask(&anchor, released, None, |_| false).await;
        answers.sort_unstable_by_key(|(at, _)| *at);
        answers.into_iter().try_for_each(|(_, released)| released)
    }

    async fn lost(&self) -> Error {
        let (error, ..) = select_all(self.guards.iter().map(|guard| Box::pin(guard.lost()))).await;
        error
    }

    fn remaining(&self) -> Result<Duration> {
        let mut all = self.guards.iter().map(LockGuard::remaining_or_error);
        all.try_fold(Duration::MAX, |least, remaining| Ok(least.min(remaining?)))
    }

    async fn extend(&self, lease: Duration) -> Result<()> {
        join_all(self.guards.iter().map(|guard| guard.extend(lease)))
            .await
            .into_iter()
            .collect()
    }

    fn leave_to_lease(self: Box<Self>) -> OwnerId {
        let owner = self.owner();
        for guard in self.guards {
            guard.leave_to_lease();
        }
        owner
    }
}
