//! A lock that is held while most of its members are: the state behind the guard of a RedLock.
//!
//! One place per member, with its guard or none: no server counts twice, whatever happens at the
//! same time. The deadline is the one that most places reach, the loss that of one too many. One
//! look at all places answers every question, and one that finds too few held ends the quorum: a
//! loss is final here as well. Decision 23.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{
    future::select_all,
    stream::{FuturesUnordered, StreamExt},
};

use async_trait::async_trait;
use nestlock_wire::clock::Instant;

use super::nodes::Nodes;

use crate::{
    error::{Error, LossReason, NodeSaid, Result},
    guard::{Held, LockGuard},
    options::{AcquireOptions, Wait},
    owner::OwnerId,
};

/// The holds of a quorum lock. When dropped, each is released by its own client.
pub(crate) struct Quorum {
    nodes: Arc<Nodes>,
    /// The holds that the acquire took.
    first: Vec<LockGuard>,
    places: Mutex<Places>,
    terms: QuorumTerms,
}

/// The parameters that a quorum was acquired with.
pub(crate) struct QuorumTerms {
    /// How long a call waits for nodes.
    pub(crate) limit: Duration,
    /// The TTL requested from each node.
    pub(crate) ttl: Duration,
    /// The share of the TTL that the holder must not rely on, in addition to the drift allowance of
    /// the members themselves.
    pub(crate) drift: f64,
    /// The options with which an extension acquires a node without a hold, one for each node.
    /// Empty: an extension does not acquire.
    pub(crate) rejoin: Vec<AcquireOptions>,
    /// Whether the TTL is a fixed lease, which the watchdog does not renew.
    pub(crate) leased: bool,
    /// When the maximum hold time is over. `None`: it has no limit.
    pub(crate) until: Option<Instant>,
}

/// One slot for each node, so that concurrent calls cannot count a node twice.
struct Places {
    held: Vec<Option<NodeHold>>,
    /// Subtracted from the remaining time.
    margin: Duration,
    /// How the quorum ended, once a check has found that. The end is final.
    end: Option<QuorumEnd>,
}

/// The hold of a node.
#[derive(Clone)]
enum NodeHold {
    /// An index into [`Quorum::first`].
    First(usize),
    /// Acquired by an extension.
    Rejoined(Arc<LockGuard>),
}

#[derive(Clone, Copy)]
enum QuorumEnd {
    Lost(LossReason),
    Released,
}

/// A snapshot of a quorum that is held.
struct Live {
    /// How long most nodes may be relied on.
    remaining: Duration,
    /// The nodes that are held: a majority.
    held: Vec<(usize, NodeHold)>,
}

impl Quorum {
    /// Creates a quorum from at least one guard.
    pub(crate) fn new(
        nodes: &Arc<Nodes>,
        mut guards: Vec<(usize, LockGuard)>,
        terms: QuorumTerms,
    ) -> Self {
        guards.sort_unstable_by_key(|(at, _)| *at);
        let mut held = vec![None; nodes.locks.len()];
        for (index, (at, _)) in guards.iter().enumerate() {
            held[*at] = Some(NodeHold::First(index));
        }
        let places = Mutex::new(Places {
            held,
            margin: terms.ttl.mul_f64(terms.drift),
            end: None,
        });
        let first = guards.into_iter().map(|(_, guard)| guard).collect();
        Self {
            nodes: Arc::clone(nodes),
            first,
            places,
            terms,
        }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn guard<'a>(&'a self, held: &'a NodeHold) -> &'a LockGuard {
        match held {
            NodeHold::First(index) => &self.first[*index],
            NodeHold::Rejoined(guard) => guard,
        }
    }

    /// Checks all slots at one moment. If too few are held, the quorum ends.
    fn look(&self, places: &mut Places) -> Result<Live> {
        // All guards of a fork count as lost, which does not mean that the quorum is.
        self.nodes.anchor.check_ours(&self.nodes.name)?;
        if let Some(end) = places.end {
            return Err(self.error(end));
        }
        let (mut held, mut remaining) = (Vec::new(), Vec::new());
        for (at, place) in places.held.iter().enumerate() {
            let Some(place) = place else { continue };
            let left = self.guard(place).remaining();
            if !left.is_zero() {
                held.push((at, place.clone()));
                remaining.push(left);
            }
        }
        // The longest first: a majority is held as long as the shortest of the `needed` longest.
        remaining.sort_unstable_by(|a, b| b.cmp(a));
        let least = remaining
            .get(self.nodes.needed() - 1)
            .copied()
            .unwrap_or_default();
        match least.saturating_sub(places.margin) {
            Duration::ZERO => Err(self.error(*places.end.insert(self.how_it_ended(&places.held)))),
            remaining => Ok(Live { remaining, held }),
        }
    }

    fn how_it_ended(&self, places: &[Option<NodeHold>]) -> QuorumEnd {
        let guards = places.iter().flatten().map(|held| self.guard(held));
        let reasons: Vec<_> = guards
            .filter(|guard| guard.is_lost())
            .map(LockGuard::loss)
            .collect();
        match reasons.iter().flatten().next() {
            Some(reason) => QuorumEnd::Lost(*reason),
            // No hold is lost, but the rest of their time is within the margin.
            None if reasons.is_empty() => QuorumEnd::Lost(LossReason::LeaseExpired),
            None => QuorumEnd::Released,
        }
    }

    fn error(&self, end: QuorumEnd) -> Error {
        let (lock, owner) = (self.nodes.name.to_string(), self.owner());
        match end {
            QuorumEnd::Lost(reason) => Error::Lost {
                lock,
                owner,
                reason,
            },
            QuorumEnd::Released => Error::NotHeld { lock, owner },
        }
    }

    /// Stores a newly acquired hold in its slot, if the quorum was held all the time and the slot
    /// has no live hold; otherwise releases it.
    fn put(&self, at: usize, guard: LockGuard) {
        let mut places = self.places();
        let is_held = places.held[at]
            .as_ref()
            .is_some_and(|held| !self.guard(held).is_lost());
        let mut rejoined = Some(NodeHold::Rejoined(Arc::new(guard)));
        if self.look(&mut places).is_ok() && !is_held {
            std::mem::swap(&mut places.held[at], &mut rejoined);
        }
        // The guard that stays out of its slot is dropped after this: it releases its hold.
        drop(places);
    }

    /// Returns the guards that are in their slots.
    fn into_guards(self) -> impl Iterator<Item = (usize, LockGuard)> {
        let mut first: Vec<_> = self.first.into_iter().map(Some).collect();
        let places = self
            .places
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        places
            .held
            .into_iter()
            .enumerate()
            .filter_map(move |(at, held)| match held? {
                NodeHold::First(index) => Some((at, first[index].take()?)),
                // `into_inner` succeeds: any other handle would borrow the quorum.
                NodeHold::Rejoined(guard) => Some((at, Arc::into_inner(guard)?)),
            })
    }

    /// Extends the hold of a node, or acquires the node. The outer `Err` means that its hold is
    /// lost.
    async fn ask(
        &self,
        at: usize,
        held: Option<NodeHold>,
        lease: Duration,
    ) -> (usize, Result<Result<NodeSaid>>) {
        let answer = match held {
            Some(held) => match self.guard(&held).extend(lease).await {
                Err(lost) if self.guard(&held).is_lost() => Err(lost),
                answer => Ok(answer.map(|()| NodeSaid::Agreed)),
            },
            None => Ok(self.take(at, lease).await),
        };
        (at, answer)
    }

    async fn take(&self, at: usize, lease: Duration) -> Result<NodeSaid> {
        let mut options = self.terms.rejoin[at].clone();
        // A limit counted from here would renew the node beyond that of the others. One that is
        // over sooner than `lease` would make the extension shorter than it says.
        if let Some(until) = self.terms.until {
            let left = until.saturating_duration_since(Instant::now());
            options = options.max_hold(left.max(lease));
        }
        if self.terms.leased {
            options = options.lease(lease);
        }
        let Some(guard) = self.nodes.locks[at].acquire(Wait::No, &options).await? else {
            return Ok(NodeSaid::Busy);
        };
        // The acquire set the TTL of the watchdog, which may be shorter than `lease`.
        if !self.terms.leased {
            guard.extend(lease).await?;
        }
        self.put(at, guard);
        Ok(NodeSaid::Agreed)
    }
}

#[async_trait]
impl Held for Quorum {
    fn name(&self) -> &str {
        &self.nodes.name
    }

    fn members(&self) -> &[LockGuard] {
        &self.first
    }

    fn owner(&self) -> OwnerId {
        self.first[0].owner()
    }

    /// How long most nodes may be relied on; `Err`: too few are held, or were at some time.
    fn remaining(&self) -> Result<Duration> {
        self.look(&mut self.places()).map(|live| live.remaining)
    }

    async fn lost(&self) -> Error {
        loop {
            let live = match self.look(&mut self.places()) {
                Ok(live) => live,
                Err(error) => return error,
            };
            let ends = live
                .held
                .iter()
                .map(|(_, held)| Box::pin(self.guard(held).lost()));
            tokio::select! {
                // One hold fewer: check whether a majority is left.
                _ = select_all(ends) => {}
                () = self.nodes.anchor.sleep_until(Instant::now() + live.remaining) => {}
            }
        }
    }

    /// Releases all nodes at once, and waits for those that reply in time. The others are released
    /// in the background.
    async fn unlock(self: Box<Self>) -> Result<()> {
        let (owner, lost) = (self.owner(), self.remaining().err());
        let (nodes, limit) = (Arc::clone(&self.nodes), self.terms.limit);
        let held = self
            .into_guards()
            .map(|(at, guard)| (at, Box::pin(guard.unlock())));
        let answers = nodes.ask(held, limit, |_| false).await;
        if let Some(lost) = lost {
            return Err(lost);
        }
        if answers.iter().filter(|(_, answer)| answer.is_ok()).count() >= nodes.needed() {
            return Ok(());
        }
        Err(match nodes.no_quorum(answers, |()| NodeSaid::Agreed) {
            // The member's error names the member, not this lock.
            Error::Lost { reason, .. } => Error::Lost {
                lock: nodes.name.to_string(),
                owner,
                reason,
            },
            error => error,
        })
    }

    /// Leaves all nodes to their leases. If the quorum was lost, its holds are dropped instead.
    fn leave_to_lease(self: Box<Self>) -> OwnerId {
        let owner = self.owner();
        if self.remaining().is_ok() {
            self.into_guards()
                .for_each(|(_, guard)| drop(guard.leave_to_lease()));
        }
        owner
    }

    /// Extends most nodes to at least `lease` from now. A failure of some nodes does not affect the
    /// others.
    ///
    /// With [`QuorumTerms::rejoin`], nodes without a hold are acquired too: once a majority has
    /// confirmed, once all have replied, or after half of the time, and only while the quorum is
    /// held. So one call is enough, and a server that hangs does not keep another from rejoining.
    async fn extend(&self, lease: Duration) -> Result<()> {
        let (nodes, limit) = (&self.nodes, self.terms.limit);
        let held = self.look(&mut self.places())?.held;
        let mut missing: Vec<_> = (0..nodes.locks.len()).collect();
        missing.retain(|at| held.iter().all(|(held, _)| held != at));
        let mut asked: FuturesUnordered<_> = held
            .into_iter()
            .map(|(at, held)| Box::pin(self.ask(at, Some(held), lease)))
            .collect();
        let now = Instant::now();
        let (half, over) = (
            nodes.anchor.sleep_until(now + limit / 2),
            nodes.anchor.sleep_until(now + limit),
        );
        tokio::pin!(half, over);
        let (mut agreed, mut said, mut half_is_over) = (0, Vec::new(), false);
        loop {
            let all_or_most = asked.is_empty() || agreed >= nodes.needed();
            let wanted = !self.terms.rejoin.is_empty() && !missing.is_empty();
            if wanted && (all_or_most || half_is_over) && self.remaining().is_ok() {
                asked.extend(
                    missing
                        .drain(..)
                        .map(|at| Box::pin(self.ask(at, None, lease))),
                );
            }
            let answer = tokio::select! {
                // As in the function `ask`.
                biased;
                answer = asked.next() => answer,
                () = &mut half, if !half_is_over => {
                    half_is_over = true;
                    continue;
                }
                () = &mut over => None,
            };
            let Some((at, answer)) = answer else { break };
            let answer = answer.unwrap_or_else(|lost| {
                missing.push(at);
                Err(lost)
            });
            agreed += usize::from(matches!(answer, Ok(NodeSaid::Agreed)));
            said.push((at, answer));
        }
        // A quorum that was lost during the call stays lost, however many nodes have agreed.
        self.remaining()?;
        if agreed < nodes.needed() {
            return Err(nodes.no_quorum(said, |said| said));
        }
        if self.terms.leased {
            let mut places = self.places();
            places.margin = places.margin.max(lease.mul_f64(self.terms.drift));
        }
        Ok(())
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quorum")
            .field("nodes", &self.nodes)
            .field("first", &self.first)
            .finish_non_exhaustive()
    }
}
