//! The RedLock: one lock over several independent servers, held while most of them record it. No
//! Redis commands here.
//!
//! <https://redis.io/docs/latest/develop/use/patterns/distributed-locks/>

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use nestlock_wire::clock::Instant;
use uuid::Uuid;

use crate::{
    engine::Anchor,
    error::{Error, NodeSaid, Result},
    guard::{Held, LockGuard},
    options::{AcquireOptions, Wait},
    owner::OwnerId,
};

use super::{
    Inspection, Lock, Several,
    nodes::{Nodes, may_pass},
    quorum::{Quorum, QuorumTerms},
    red_options::{OwnerValue, RedLockOptions},
};

/// One lock over several independent servers, held while most of them record it.
#[derive(Debug)]
pub(crate) struct RedLock {
    nodes: Arc<Nodes>,
    options: RedLockOptions,
    /// Whether the members are string records: then each round uses a value of its own.
    valued: bool,
}

/// The locks of a RedLock, and their names in errors.
pub(crate) struct RedMembers {
    pub(crate) locks: Vec<Lock>,
    pub(crate) labels: Vec<Arc<str>>,
}

impl RedLock {
    pub(crate) fn new(
        anchor: Option<&Arc<Anchor>>,
        name: Arc<str>,
        members: RedMembers,
        options: RedLockOptions,
        valued: bool,
    ) -> Result<Self> {
        let RedMembers { locks, labels } = members;
        let (Some(anchor), false) = (anchor, locks.is_empty()) else {
            return Err(Error::InvalidConfig {
                reason: "a RedLock needs at least one server".into(),
            });
        };
        if !valued && !matches!(options.value, OwnerValue::Random) {
            let reason = "only a RedLock over servers (red_lock) has a value; leave it out".into();
            return Err(Error::InvalidConfig { reason });
        }
        no_twins(&locks)?;
        let options = options.validate(&name)?;
        Ok(Self {
            nodes: Arc::new(Nodes {
                anchor: Arc::clone(anchor),
                name,
                locks,
                labels,
            }),
            options,
            valued,
        })
    }

    /// Returns how long a round waits for servers.
    fn limit(&self, ttl: Duration) -> Duration {
        ttl.mul_f64(self.options.timeout_factor)
    }

    /// Returns the options of one round, the same for each member.
    fn of_round(&self, options: &AcquireOptions) -> AcquireOptions {
        let mut asked = options.clone();
        if asked.lease.is_none() {
            asked = asked.watchdog_timeout(
                options
                    .rare()
                    .watchdog_timeout
                    .unwrap_or(self.options.expiry),
            );
        }
        if let (None, Some(longest)) = (options.rare().max_hold, self.options.max_hold) {
            asked = asked.max_hold(longest);
        }
        if !self.valued || options.rare().value.is_some() || options.rare().owner.is_some() {
            return asked;
        }
        asked.value(match &self.options.value {
            OwnerValue::Random => Uuid::new_v4().simple().to_string(),
            OwnerValue::Fixed(value) => value.clone(),
            OwnerValue::Made(make) => make(),
        })
    }

    /// Returns the options with which an extension acquires each member again. They name the
    /// current caller as the owner, because another task may call `extend`.
    fn as_now(&self, asked: &AcquireOptions) -> Vec<AcquireOptions> {
        let named = asked.rare().owner.is_some() || asked.rare().value.is_some();
        let of_member = |member: &Lock| match member.single() {
            Some(single) if !named => asked.clone().owner(OwnerId::current(&single.anchor.client)),
            _ => asked.clone(),
        };
        self.nodes
            .locks
            .iter()
            .map(|member| of_member(member).after_a_loss())
            .collect()
    }

    /// Tries to acquire all members once, without waiting for holders.
    async fn round(self: &Arc<Self>, options: &AcquireOptions) -> Result<QuorumAttempt> {
        let (lock, options) = (Arc::clone(self), options.clone());
        let round = async move { lock.ask_for_holds(&options).await };
        let nodes = &self.nodes;
        let outcome = nodes.anchor.while_polled(&nodes.name, round).await;
        outcome.unwrap_or_else(|undone| Ok(QuorumAttempt::Failed(undone)))
    }

    /// Asks all members for a hold. Releases those that it got if they are too few.
    async fn ask_for_holds(&self, options: &AcquireOptions) -> Result<QuorumAttempt> {
        let (nodes, needed) = (&self.nodes, self.nodes.needed());
        let asked = self.of_round(options);
        let terms = self.terms(&asked);
        let calls = self
            .order()
            .into_iter()
            .map(|at| (at, nodes.locks[at].acquire(Wait::No, &asked)));
        let answers = nodes
            .ask(calls, terms.limit, |answers| self.is_decided(answers))
            .await;
        let RoundAnswers {
            guards,
            said,
            busy,
            hopeless,
        } = RoundAnswers::read(answers);
        let agreed = guards.len();
        if agreed > 0 {
            let quorum = Quorum::new(nodes, guards, terms);
            // A lazy client has only now learned which server it is connected to.
            let independent = no_twins(&nodes.locks);
            if agreed >= needed && independent.is_ok() && quorum.remaining().is_ok() {
                return Ok(QuorumAttempt::Entered(LockGuard::of_several(quorum)));
            }
            // A release that fails here is settled by the member's client, or ends with its lease.
            let _ = Box::new(quorum).unlock().await;
            independent?;
        }
        // If the members that failed could not have made a majority, the lock is busy.
        let failed = nodes.locks.len() - agreed - busy;
        if failed == 0 || agreed + failed < needed {
            return Ok(QuorumAttempt::Busy);
        }
        let error = nodes.no_quorum(said, |said| said);
        if hopeless > nodes.spare() {
            Err(error)
        } else {
            Ok(QuorumAttempt::Failed(error))
        }
    }

    /// Returns the order in which a round calls the members.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.nodes.locks.len()).collect();
        if self.options.shuffle {
            order.sort_by_cached_key(|_| Uuid::new_v4());
        }
        order
    }

    /// Returns whether a round need not wait for more answers.
    fn is_decided(&self, answers: &[(usize, Result<Option<LockGuard>>)]) -> bool {
        let agreed = answers
            .iter()
            .filter(|(_, answer)| matches!(answer, Ok(Some(_))))
            .count();
        let refused = answers.len() - agreed;
        self.options.fail_fast && (agreed >= self.nodes.needed() || refused > self.nodes.spare())
    }

    /// Returns the terms of a quorum that is now acquired with these options.
    fn terms(&self, asked: &AcquireOptions) -> QuorumTerms {
        let ttl = asked.ttl(self.options.expiry);
        QuorumTerms {
            limit: self.limit(ttl),
            ttl,
            // Each member already deducts 1 % by itself.
            drift: (self.options.drift_factor - 0.01).max(0.0),
            rejoin: if self.options.recreate_on_extend {
                self.as_now(asked)
            } else {
                Vec::new()
            },
            leased: asked.lease.is_some(),
            until: asked
                .rare()
                .max_hold
                .map(|longest| Instant::now() + longest),
        }
    }
}

/// The answers to one round.
#[derive(Default)]
struct RoundAnswers {
    guards: Vec<(usize, LockGuard)>,
    /// What each member that answered said.
    said: Vec<(usize, Result<NodeSaid>)>,
    /// How many members have another holder.
    busy: usize,
    /// How many members failed in a way that a later round does not change.
    hopeless: usize,
}

impl RoundAnswers {
    /// Sorts the answers of the members.
    fn read(answers: Vec<(usize, Result<Option<LockGuard>>)>) -> Self {
        let mut read = Self::default();
        for (at, answer) in answers {
            read.busy += usize::from(matches!(answer, Ok(None)));
            read.hopeless += usize::from(matches!(&answer, Err(error) if !may_pass(error)));
            let said = answer.map(|guard| match guard {
                None => NodeSaid::Busy,
                Some(guard) => {
                    read.guards.push((at, guard));
                    NodeSaid::Agreed
                }
            });
            read.said.push((at, said));
        }
        read
    }
}

/// Rejects members if two of them are known to be the same lock on the same server.
fn no_twins(members: &[Lock]) -> Result<()> {
    let locks: Vec<_> = members
        .iter()
        .filter_map(|lock| Some((lock.name(), lock.single()?)))
        .collect();
    let pairs = locks
        .iter()
        .enumerate()
        .flat_map(|(at, one)| locks[at + 1..].iter().map(move |other| (*one, *other)));
    let mut alike = pairs.filter(|(one, other)| one.0 == other.0);
    let Some(((name, one), (_, other))) =
        alike.find(|(one, other)| one.1.anchor.store.is_of_same_server(&other.1.anchor.store))
    else {
        return Ok(());
    };
    let [one, other] = [one, other].map(|single| single.anchor.store.address());
    let reason = format!(
        "{one} and {other} are the same server, so its lock {name:?} would count twice; leave one out"
    );
    Err(Error::InvalidConfig { reason })
}

/// The outcome of one round.
enum QuorumAttempt {
    Entered(LockGuard),
    Busy,
    /// Too few servers replied, or the future was not polled. Nothing is held.
    Failed(Error),
}

#[async_trait]
impl Several for RedLock {
    fn label(&self) -> &'static str {
        "red"
    }

    fn name(&self) -> &str {
        &self.nodes.name
    }

    fn members(&self) -> &[Lock] {
        &self.nodes.locks
    }

    /// Acquires in rounds. Returns `None` if the lock was busy until the wait or the
    /// [`RedLockOptions::tries`] were over, and [`Error::NoQuorum`] if too few servers replied in
    /// the last round.
    ///
    /// The last round begins no later than the end of the wait. It takes at most one round limit,
    /// and as long again to release what a minority granted; see
    /// [`RedLockOptions::timeout_factor`].
    async fn acquire(
        self: Arc<Self>,
        wait: Wait,
        options: &AcquireOptions,
    ) -> Result<Option<LockGuard>> {
        let limit = wait.until(Instant::now());
        // With a limit, every round counts against the tries; without one, only consecutive failed
        // rounds do.
        let (mut made, mut counted) = (0_u32, 0);
        loop {
            let failure = match self.round(options).await? {
                QuorumAttempt::Entered(guard) => return Ok(Some(guard)),
                QuorumAttempt::Busy => None,
                QuorumAttempt::Failed(error) => Some(error),
            };
            made = made.saturating_add(1);
            counted = if limit.is_none() && failure.is_none() {
                0
            } else {
                counted + 1
            };
            if counted >= self.options.tries || limit.is_some_and(|limit| limit <= Instant::now()) {
                return failure.map_or(Ok(None), Err);
            }
            let next = Instant::now() + self.options.pause(made);
            self.nodes
                .anchor
                .sleep_until(limit.map_or(next, |limit| limit.min(next)))
                .await;
        }
    }

    async fn release(&self, owner: &OwnerId) -> Result<()> {
        self.ask(|lock| lock.release(owner)).await.map(drop)
    }

    async fn extend(&self, owner: &OwnerId, lease: Duration) -> Result<()> {
        self.ask(|lock| lock.extend(owner, lease)).await.map(drop)
    }

    async fn force_unlock(&self) -> Result<bool> {
        let answers = self.ask(Lock::force_unlock).await?;
        Ok(answers.into_iter().any(|freed| freed))
    }

    /// Returns whether enough servers have a holder to keep any other owner from acquiring the
    /// lock.
    async fn is_locked(&self) -> Result<bool> {
        let answers = self.ask(Lock::is_locked).await?;
        Ok(answers.into_iter().filter(|locked| !locked).count() < self.nodes.needed())
    }

    /// Returns how often `owner` holds most members.
    async fn hold_count(&self, owner: &OwnerId) -> Result<u32> {
        let counts = self.ask(|lock| lock.hold_count(owner)).await?;
        Ok(self.of_most(counts))
    }

    /// Returns the owners that hold most members, and how long most are held. Members of different
    /// clients know one task by different owner names, which count separately.
    async fn inspect(&self) -> Result<Option<Inspection>> {
        let answers = self.ask(Lock::inspect).await?;
        let held: Vec<_> = answers.into_iter().flatten().collect();
        let counts = |owner: &OwnerId| held.iter().map(|held| held.hold_count(owner)).collect();
        let mut holders: Vec<(OwnerId, u32)> = Vec::new();
        for (owner, _) in held.iter().flat_map(|held| &held.holders) {
            let holds = self.of_most(counts(owner));
            if holds > 0
                && holders
                    .iter()
                    .all(|(known, _)| known.base() != owner.base())
            {
                holders.push((owner.clone(), holds));
            }
        }
        if holders.is_empty() {
            return Ok(None);
        }
        let remaining = self.of_most(held.iter().filter_map(|held| held.remaining).collect());
        Ok(Some(Inspection {
            holders,
            remaining: Some(remaining).filter(|remaining| !remaining.is_zero()),
        }))
    }

    /// Returns how long most members are held, by any owner. Returns `None` if they are not held or
    /// have no TTL.
    async fn remaining_lease(&self) -> Result<Option<Duration>> {
        let leases = self.ask(Lock::remaining_lease).await?;
        Ok(Some(self.of_most(leases.into_iter().flatten().collect()))
            .filter(|lease| !lease.is_zero()))
    }
}

impl RedLock {
    /// Calls all members, within the round limit.
    async fn ask<'a, T, F>(&'a self, ask: impl Fn(&'a Lock) -> F) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        self.nodes
            .ask_all(self.limit(self.options.expiry), ask)
            .await
    }

    /// Returns the largest value that most members reach.
    fn of_most<T: Ord + Default>(&self, mut all: Vec<T>) -> T {
        all.sort_unstable_by(|a, b| b.cmp(a));
        all.into_iter()
            .nth(self.nodes.needed() - 1)
            .unwrap_or_default()
    }
}
