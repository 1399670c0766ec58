//! The independent servers of a RedLock, and the calls to all of them at once.

use std::{
    future::poll_fn,
    mem::{Discriminant, discriminant},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use futures_util::{
    future::pending,
    stream::{FuturesUnordered, StreamExt},
};

use nestlock_wire::clock::Instant;

use super::Lock;

use crate::{
    engine::Anchor,
    error::{Error, LossReason, NodeAnswer, NodeSaid, Result},
};
/// The members of a quorum lock, and the calls to them.
#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) anchor: Arc<Anchor>,
    pub(crate) name: Arc<str>,
    pub(crate) locks: Vec<Lock>,
    /// The names of the members in errors.
    pub(crate) labels: Vec<Arc<str>>,
}

impl Nodes {
    /// Returns the smallest majority.
    pub(crate) fn needed(&self) -> usize {
        self.locks.len() / 2 + 1
    }

    /// Returns how many members may fail.
    pub(crate) fn spare(&self) -> usize {
        self.locks.len() - self.needed()
    }

    /// Calls nodes as [`ask`] does, for at most `limit`.
    pub(crate) async fn ask<T>(
        &self,
        asked: impl Iterator<Item = (usize, impl Future<Output = Result<T>>)>,
        limit: Duration,
        enough: impl FnMut(&[(usize, Result<T>)]) -> bool,
    ) -> Vec<(usize, Result<T>)> {
        ask(&self.anchor, asked, Some(Instant::now() + limit), enough).await
    }

    /// Calls all nodes as [`Nodes::ask`] does. Returns the successful replies if they are a
    /// majority.
    pub(crate) async fn ask_all<'a, T, F>(
        &'a self,
        limit: Duration,
        ask: impl Fn(&'a Lock) -> F,
    ) -> Result<Vec<T>>
    where
        F: Future<Output = Result<T>>,
    {
        let asked = self
            .locks
            .iter()
            .enumerate()
            .map(|(at, lock)| (at, ask(lock)));
        let answers = self.ask(asked, limit, |_| false).await;
        if answers.iter().filter(|(_, answer)| answer.is_ok()).count() >= self.needed() {
            return Ok(answers
                .into_iter()
                .filter_map(|(_, answer)| answer.ok())
                .collect());
        }
        Err(self.no_quorum(answers, |_| NodeSaid::Agreed))
    }

    /// Returns why too few nodes agreed: the error that more than [`spare`](Self::spare) nodes
    /// gave, if it is final; otherwise the reply of each node, with silent nodes included.
    pub(crate) fn no_quorum<T>(
        &self,
        answers: Vec<(usize, Result<T>)>,
        read: impl Fn(T) -> NodeSaid,
    ) -> Error {
        let mut nodes: Vec<_> = self
            .labels
            .iter()
            .map(|node| NodeAnswer {
                node: node.to_string(),
                said: NodeSaid::Nothing,
            })
            .collect();
        for (at, answer) in answers {
            nodes[at].said = answer.map_or_else(|error| NodeSaid::Failed(Box::new(error)), &read);
        }
        if let Some(at) = said_by_more_than(self.spare(), &nodes)
            && let NodeSaid::Failed(error) = nodes.swap_remove(at).said
        {
            return *error;
        }
        Error::NoQuorum {
            lock: self.name.to_string(),
            needed: self.needed(),
            nodes,
        }
    }
}

/// Runs calls to many nodes at once, until all have replied, `enough` returns true, or `over` has
/// passed. Calls that are still in flight are then dropped.
pub(crate) async fn ask<T>(
    anchor: &Anchor,
    asked: impl Iterator<Item = (usize, impl Future<Output = Result<T>>)>,
    over: Option<Instant>,
    mut enough: impl FnMut(&[(usize, Result<T>)]) -> bool,
) -> Vec<(usize, Result<T>)> {
    let mut asked: Vec<_> = asked
        .map(|(at, asked)| Box::pin(async move { (at, asked.await) }))
        .collect();
    let mut answers = Vec::with_capacity(asked.len());
    poll_fn(|context| {
        // `FuturesUnordered` may end its first pass early, and then a caller that polls only once
        // would leave some calls unbegun: an `unlock` would keep these members.
        asked.retain_mut(|call| match call.as_mut().poll(context) {
            Poll::Ready(answer) => {
                answers.push(answer);
                false
            }
            Poll::Pending => true,
        });
        Poll::Ready(())
    })
    .await;
    if enough(&answers) {
        return answers;
    }
    let mut asked: FuturesUnordered<_> = asked.into_iter().collect();
    let over = async {
        match over {
            Some(over) => anchor.sleep_until(over).await,
            None => pending().await,
        }
    };
    tokio::pin!(over);
    loop {
        tokio::select! {
            // A reply that has arrived counts, even if the time is over.
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

/// Returns whether the same call may succeed a little later.
pub(crate) fn may_pass(error: &Error) -> bool {
    match error {
        Error::Unconfirmed { .. } | Error::NotReplicated { .. } => true,
        Error::Store { source, .. } => source.is_transient(),
        _ => false,
    }
}

/// Returns the first node with the final error that more than `spare` nodes gave.
fn said_by_more_than(spare: usize, nodes: &[NodeAnswer]) -> Option<usize> {
    // A node that held the lock when its client was shut down reports `Lost`, the others `Closed`:
    // both are the shutdown.
    let shut_down_is_closed = |error: &Error| match error {
        Error::Lost {
            reason: LossReason::ShutDown,
            ..
        } => discriminant(&Error::Closed),
        other => discriminant(other),
    };
    let first_by = |what: fn(&Error) -> Discriminant<Error>| {
        let said: Vec<_> = nodes
            .iter()
            .map(|node| {
                node.said
                    .failure()
                    .filter(|error| !may_pass(error))
                    .map(what)
            })
            .collect();
        said.iter().position(|one| {
            one.is_some() && said.iter().filter(|other| *other == one).count() > spare
        })
    };
    first_by(discriminant).or_else(|| first_by(shut_down_is_closed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::{ClientId, OwnerId};

    #[test]
    fn a_shutdown_is_one_thing_whether_it_met_a_hold_or_an_acquire() {
        let owner = || OwnerId::named(&ClientId::random(), "me").unwrap();
        let lost = |reason| Error::Lost {
            lock: "l".into(),
            owner: owner(),
            reason,
        };
        let node = |said: Option<Error>| NodeAnswer {
            node: "n".into(),
            said: said.map_or(NodeSaid::Agreed, |error| NodeSaid::Failed(Box::new(error))),
        };
        let (closed, shut_down) = (|| Some(Error::Closed), || Some(lost(LossReason::ShutDown)));
        let of = |said: [Option<Error>; 3]| said_by_more_than(1, &said.map(node));
        assert_eq!(of([None, closed(), shut_down()]), Some(1));
        assert_eq!(of([shut_down(), None, closed()]), Some(0));
        assert_eq!(of([None, None, closed()]), None);
        assert_eq!(
            of([None, closed(), Some(lost(LossReason::RecordMissing))]),
            None,
            "two things"
        );
        assert_eq!(
            of([None, shut_down(), Some(lost(LossReason::RecordMissing))]),
            Some(1),
            "lost"
        );
    }
}
