//! A lock that is held while most of its members are: what a RedLock's guard stands for.

use std::{
    fmt,
    mem::discriminant,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures_util::{
    future::select_all,
    stream::{FuturesUnordered, StreamExt},
};

use crate::{
    engine::Anchor,
    error::{Error, LossReason, NodeAnswer, NodeSaid, Result},
    guard::LockGuard,
    options::{AcquireOptions, Wait},
    owner::OwnerId,
    rlock::RLock,
};

/// The members of a quorum lock, and how they are asked.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) anchor: Arc<Anchor>,
    pub(crate) name: Arc<str>,
    pub(crate) locks: Vec<Arc<dyn RLock>>,
    /// What an error calls them.
    pub(crate) labels: Vec<Arc<str>>,
}

impl Nodes {
    /// The smallest majority.
    pub(crate) fn needed(&self) -> usize {
        self.locks.len() / 2 + 1
    }

    /// How many may fail.
    pub(crate) fn spare(&self) -> usize {
        self.locks.len() - self.needed()
    }

    /// Asks nodes at once; whoever has not answered within `limit` is not waited for, and what was asked of him is
    /// dropped. `enough` ends it earlier.
    pub(crate) async fn ask<T>(
        &self,
        asked: impl Iterator<Item = (usize, impl Future<Output = Result<T>>)>,
        limit: Duration,
        mut enough: impl FnMut(&[(usize, Result<T>)]) -> bool,
    ) -> Vec<(usize, Result<T>)> {
        let mut asked: FuturesUnordered<_> = asked.map(|(at, asked)| async move { (at, asked.await) }).collect();
        let over = self.anchor.sleep_until(Instant::now() + limit);
        tokio::pin!(over);
        let mut answers = Vec::with_capacity(asked.len());
        loop {
            tokio::select! {
                biased;
                answer = asked.next() => match answer {
                    Some(answer) => answers.push(answer),
                    None => return answers,
                },
                () = &mut over => return answers,
            }
            if enough(&answers) {
                return answers;
            }
        }
    }

    /// As [`Nodes::ask`], all nodes, and as many answers as are needed.
    pub(crate) async fn ask_all<'a, T, F>(&'a self, limit: Duration, ask: impl Fn(&'a dyn RLock) -> F) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let asked = self.locks.iter().enumerate().map(|(at, lock)| (at, ask(&**lock)));
        let answers = self.ask(asked, limit, |_| false).await;
        if answers.iter().filter(|(_, answer)| answer.is_ok()).count() >= self.needed() {
            return Ok(answers.into_iter().filter_map(|(_, answer)| answer.ok()).collect());
        }
        Err(self.no_quorum(answers, |_| NodeSaid::Agreed))
    }

    /// Why too few agreed: what most said, if that is one thing and final; else what each said, silence included.
    pub(crate) fn no_quorum<T>(&self, answers: Vec<(usize, Result<T>)>, read: impl Fn(T) -> NodeSaid) -> Error {
        let mut nodes: Vec<_> =
            self.labels.iter().map(|node| NodeAnswer { node: node.to_string(), said: NodeSaid::Nothing }).collect();
        for (at, answer) in answers {
            nodes[at].said = answer.map_or_else(|error| NodeSaid::Failed(Box::new(error)), &read);
        }
        let final_at = |at: usize| nodes[at].said.failure().filter(|error| !may_pass(error)).map(discriminant);
        let all = 0..nodes.len();
        let most = |at: &usize| {
            let said = final_at(*at);
            said.is_some() && all.clone().filter(|other| final_at(*other) == said).count() > self.spare()
        };
        if let Some(at) = all.clone().find(most)
            && let NodeSaid::Failed(error) = nodes.swap_remove(at).said
        {
            return *error;
        }
        Error::NoQuorum { lock: self.name.to_string(), needed: self.needed(), nodes }
    }
}

/// Whether the same call may succeed a little later.
pub(crate) fn may_pass(error: &Error) -> bool {
    match error {
        Error::Unconfirmed { .. } => true,
        Error::Store { source, .. } => source.is_transient(),
        _ => false,
    }
}

/// The holds of a quorum lock. When dropped, each is released by its own client.
pub(crate) struct Quorum {
    nodes: Arc<Nodes>,
    /// The nodes that were acquired first, and which ones they are.
    guards: Vec<LockGuard>,
    at: Vec<usize>,
    /// Those that were taken later, while the quorum was held all the time.
    rejoined: Mutex<Vec<(usize, Arc<LockGuard>)>>,
    /// How long nodes are waited for.
    limit: Duration,
    /// What is taken off the lease for clocks that drift more than the members allow for.
    margin: Duration,
    /// How a node that lost its record is taken again; `None`: not at all.
    rejoin: Option<AcquireOptions>,
}

impl Quorum {
    pub(crate) fn new(
        nodes: &Arc<Nodes>,
        mut guards: Vec<(usize, LockGuard)>,
        limit: Duration,
        margin: Duration,
        rejoin: Option<AcquireOptions>,
    ) -> Self {
        guards.sort_unstable_by_key(|(at, _)| *at);
        let (at, guards) = guards.into_iter().unzip();
        Self { nodes: Arc::clone(nodes), guards, at, rejoined: Mutex::default(), limit, margin, rejoin }
    }

    pub(crate) fn name(&self) -> &str {
        &self.nodes.name
    }

    pub(crate) fn members(&self) -> &[LockGuard] {
        &self.guards
    }

    pub(crate) fn owner(&self) -> OwnerId {
        self.guards[0].owner()
    }

    fn rejoined(&self) -> Vec<(usize, Arc<LockGuard>)> {
        self.rejoined.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How long most nodes may be relied on; `Err`: too few are held.
    pub(crate) fn remaining(&self) -> Result<Duration> {
        let rejoined = self.rejoined();
        let mut remaining: Vec<_> = self.guards.iter().map(LockGuard::remaining).collect();
        remaining.extend(rejoined.iter().map(|(_, guard)| guard.remaining()));
        remaining.sort_unstable_by(|a, b| b.cmp(a));
        let least = remaining.get(self.nodes.needed() - 1).copied().unwrap_or_default();
        match least.saturating_sub(self.margin) {
            Duration::ZERO => Err(self.lost_error()),
            remaining => Ok(remaining),
        }
    }

    fn lost_error(&self) -> Error {
        let reason = self.guards.iter().find_map(LockGuard::loss).unwrap_or(LossReason::LeaseExpired);
        Error::Lost { lock: self.nodes.name.to_string(), owner: self.owner().to_string(), reason }
    }

    pub(crate) async fn lost(&self) -> Error {
        loop {
            let remaining = match self.remaining() {
                Ok(remaining) => remaining,
                Err(error) => return error,
            };
            let rejoined = self.rejoined();
            let all = self.guards.iter().chain(rejoined.iter().map(|(_, guard)| &**guard));
            let ends = all.filter(|guard| !guard.is_lost()).map(|guard| Box::pin(guard.lost()));
            tokio::select! {
                // one less; perhaps there are enough still
                _ = select_all(ends.collect::<Vec<_>>()) => {}
                () = self.nodes.anchor.sleep_until(Instant::now() + remaining) => {}
            }
        }
    }

    /// Releases all nodes at once, and waits for those that answer in time; the others are released in the background.
    pub(crate) async fn unlock(self) -> Result<()> {
        let owner = self.owner();
        let (nodes, limit) = (self.nodes, self.limit);
        let rejoined = self.rejoined.into_inner().unwrap_or_else(PoisonError::into_inner);
        // while somebody extends, a clone lives on: dropped, it releases
        let rejoined = rejoined.into_iter().filter_map(|(at, guard)| Some((at, Arc::into_inner(guard)?)));
        let held = self.at.into_iter().zip(self.guards).chain(rejoined);
        let answers = nodes.ask(held.map(|(at, guard)| (at, Box::pin(guard.unlock()))), limit, |_| false).await;
        if answers.iter().filter(|(_, answer)| answer.is_ok()).count() >= nodes.needed() {
            return Ok(());
        }
        Err(match nodes.no_quorum(answers, |()| NodeSaid::Agreed) {
            // the members' name is not the lock's
            Error::Lost { reason, .. } => {
                Error::Lost { lock: nodes.name.to_string(), owner: owner.to_string(), reason }
            }
            error => error,
        })
    }

    /// Lets most nodes live for at least `lease` from now. What fails on some changes nothing for the others.
    pub(crate) async fn extend(&self, lease: Duration) -> Result<()> {
        let rejoined = self.rejoined();
        let all = || {
            let first = self.at.iter().copied().zip(&self.guards);
            first.chain(rejoined.iter().map(|(at, guard)| (*at, &**guard)))
        };
        let held: Vec<_> = all().filter(|(_, guard)| !guard.is_lost()).collect();
        let missing = (0..self.nodes.locks.len()).filter(|at| held.iter().all(|(held, _)| held != at));
        let extended = held.iter().map(|(at, guard)| (*at, Asked::Extend(guard)));
        let taken = missing.filter_map(|at| Some((at, Asked::Take(&self.nodes.locks[at], self.rejoin.as_ref()?))));
        let asked = extended.chain(taken).map(|(at, asked)| (at, Box::pin(asked.run(lease))));
        let answers = self.nodes.ask(asked, self.limit, |_| false).await;

        let mut agreed = 0;
        let mut said = Vec::new();
        for (at, answer) in answers {
            said.push((
                at,
                answer.map(|taken| match taken {
                    Taken::Busy => NodeSaid::Busy,
                    Taken::Extended => NodeSaid::Agreed,
                    Taken::Anew(guard) => {
                        self.rejoined.lock().unwrap_or_else(PoisonError::into_inner).push((at, Arc::new(guard)));
                        NodeSaid::Agreed
                    }
                }),
            ));
            agreed += usize::from(matches!(said.last(), Some((_, Ok(NodeSaid::Agreed)))));
        }
        // a quorum that was lost meanwhile stays lost, however many nodes were taken again
        self.remaining()?;
        if agreed >= self.nodes.needed() {
            return Ok(());
        }
        Err(self.nodes.no_quorum(said, |said| said))
    }

    pub(crate) fn forget(self) -> OwnerId {
        let owner = self.owner();
        let rejoined = self.rejoined.into_inner().unwrap_or_else(PoisonError::into_inner);
        let rejoined = rejoined.into_iter().filter_map(|(_, guard)| Arc::into_inner(guard));
        self.guards.into_iter().chain(rejoined).for_each(|guard| drop(guard.forget()));
        owner
    }
}

/// What an extension asks of a node.
enum Asked<'a> {
    Extend(&'a LockGuard),
    Take(&'a Arc<dyn RLock>, &'a AcquireOptions),
}

enum Taken {
    Extended,
    Anew(LockGuard),
    Busy,
}

impl Asked<'_> {
    async fn run(self, lease: Duration) -> Result<Taken> {
        match self {
            Self::Extend(guard) => guard.extend(lease).await.map(|()| Taken::Extended),
            Self::Take(lock, options) => {
                let options = AcquireOptions { wait: Wait::No, ..options.clone() };
                // one that is watched stays so
                let options = if options.lease.is_some() { options.lease(lease) } else { options };
                Ok(lock.acquire(options).await?.map_or(Taken::Busy, Taken::Anew))
            }
        }
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quorum").field("nodes", &self.nodes).field("held", &self.at).finish_non_exhaustive()
    }
}
