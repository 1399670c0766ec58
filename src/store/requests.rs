//! The requests of the [`Store`]: each runs a script, and reads its reply.

use nestlock_wire::{Acks, Call, Copies, Epoch, Value, clock::Instant};

use super::{
    Servers, Store, cluster,
    reply::{self, Acquired, Forced, Guarded, Inspected, Released, Renewed},
    route::Route,
};

use crate::error::{StoreError, StoreErrorKind};
/// One page of keys that `SCAN` found, and the cursor of the next page.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) keys: Vec<String>,
    pub(crate) next: Option<String>,
}

impl Store {
    /// Sends a request over its route. Returns the reply and the epoch of the connection that
    /// brought it. If a cluster node rejects it, notes in the route where the request goes next.
    async fn send(&self, route: &mut Route, call: &Call) -> Result<(Value, Epoch), StoreError> {
        #[cfg(test)]
        if let Some(server) = &self.played {
            return Ok((server.answer(call.clone()).await?, route.epoch()));
        }
        let reply = route
            .link
            .eval(call, route.until, route.asking, route.copies)
            .await;
        match (reply, self.servers()) {
            (Ok(reply), _) => {
                route.receipt = reply.receipt;
                Ok((reply.value, reply.epoch))
            }
            (Err(error), Servers::Cluster(cluster)) => {
                let error = call.script.refusal(error);
                route.next = cluster.next(route.slot, call, &route.link, &error);
                Err(error)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Sends a request that no ledger records, over the current route of its first key. Follows
    /// redirects. Returns the same as [`Store::send`].
    async fn eval(&self, call: &Call) -> Result<(Value, Epoch), StoreError> {
        self.eval_by(
            &mut self.route(call.keys.first().map_or("", |key| &**key), Instant::now()),
            call,
        )
        .await
    }

    async fn eval_by(&self, route: &mut Route, call: &Call) -> Result<(Value, Epoch), StoreError> {
        loop {
            match self.send(route, call).await {
                Err(_) if self.follow(route).await => {}
                answer => return answer,
            }
        }
    }

    /// Runs an acquire script, or a transfer script, which never replies "busy". Also returns the
    /// epoch of the connection that brought the reply.
    pub(crate) async fn acquire(
        &self,
        route: &mut Route,
        call: &Call,
    ) -> Result<(Acquired, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::acquired(&answer)?, epoch))
    }

    /// Runs a release script, as [`Store::acquire`].
    pub(crate) async fn release(
        &self,
        route: &mut Route,
        call: &Call,
    ) -> Result<(Released, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::released(&answer)?, epoch))
    }

    /// Runs a release script that no ledger records: for an unsettled request, or for a hold
    /// without a guard. Follows redirects.
    pub(crate) async fn release_unrecorded(
        &self,
        call: &Call,
    ) -> Result<(Released, Epoch), StoreError> {
        let (answer, epoch) = self.eval(call).await?;
        Ok((reply::released(&answer)?, epoch))
    }

    /// Runs an acquire script over many locks, as [`Store::acquire`]; see
    /// [`reply::acquired_together`].
    pub(crate) async fn acquire_together(
        &self,
        route: &mut Route,
        call: &Call,
    ) -> Result<(Option<(usize, Acquired)>, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::acquired_together(&answer, call.keys.len())?, epoch))
    }

    /// Runs a release script over many locks, as [`Store::acquire`].
    pub(crate) async fn release_together(
        &self,
        route: &mut Route,
        call: &Call,
    ) -> Result<(Vec<Released>, Epoch), StoreError> {
        let (answer, epoch) = self.send(route, call).await?;
        Ok((reply::released_together(&answer, call.keys.len())?, epoch))
    }

    /// Waits for the acknowledgements that the route requested for what its script wrote, and
    /// returns those that arrived. Returns `Ok(None)` if it requested none.
    pub(crate) async fn acknowledged(&self, route: &Route) -> Result<Option<Acks>, StoreError> {
        match &route.receipt {
            Some(receipt) => route
                .link
                .acknowledged(receipt, route.until)
                .await
                .map(Some),
            None => Ok(None),
        }
    }

    /// Runs a renew script over many locks. Returns its reply, and the acknowledgements of the
    /// requested copies. Does not depend on the user's runtime.
    pub(crate) async fn renew(
        &self,
        call: &Call,
        copies: Option<Copies>,
    ) -> Result<(Vec<Renewed>, Result<Option<Acks>, StoreError>), StoreError> {
        let locks = call.keys.len();
        let mut route = self.route(call.keys.first().map_or("", |key| &**key), Instant::now());
        route.copies = copies;
        // a renewal grants nothing, so it may follow a late `ASK`
        route.lets_nobody_in();
        let asked = async {
            let mut answers = reply::renewed(&self.eval_by(&mut route, call).await?.0, locks)?;
            // after a late `ASK`, "not found" proves nothing: the slot may have moved back since
            if route.may_have_missed() {
                let is_missed = |answer: &Renewed| matches!(answer, Renewed::Gone | Renewed::Taken);
                if locks == 1 && answers.iter().all(is_missed) {
                    let missed = "not found at the importing node; its slot may be back by now";
                    return Err(StoreError::new(StoreErrorKind::Moved, false, missed));
                }
                answers
                    .iter_mut()
                    .filter(|answer| is_missed(answer))
                    .for_each(|answer| *answer = Renewed::Unknown);
            }
            let acks = self.acknowledged(&route).await;
            Ok((answers, acks))
        };
        // `join` polls the request first: the check whether its reply is read must follow the send
        let (answer, ()) = futures_util::future::join(asked, async { self.prioritize() }).await;
        answer
    }

    /// Runs a `force_release` script.
    pub(crate) async fn force_release(&self, call: &Call) -> Result<Forced, StoreError> {
        reply::forced(&self.eval(call).await?.0)
    }

    /// Runs an inspect script.
    pub(crate) async fn inspect(&self, call: &Call) -> Result<Inspected, StoreError> {
        let answer = self
            .eval(call)
            .await
            .and_then(|(value, _)| reply::inspected(&value));
        answer.map_err(StoreError::of_a_read)
    }

    /// Runs a script that wakes one waiter.
    pub(crate) async fn signal(&self, call: &Call) -> Result<(), StoreError> {
        self.eval(call).await.map(drop)
    }

    /// Returns one page of the string keys that match a pattern. `cursor` starts at `0`; the last
    /// page has no `next`.
    pub(crate) async fn scan(&self, cursor: &str, pattern: &str) -> Result<Page, StoreError> {
        let Servers::Cluster(cluster) = self.servers() else {
            let link = self.link("");
            let (next, keys) = link
                .scan(cursor, pattern)
                .await
                .map_err(StoreError::of_a_read)?;
            return Ok(Page {
                keys,
                next: (next != "0").then_some(next),
            });
        };
        // one master after the other, with cursors `node/cursor`; a key that moves during the scan
        // may be found twice
        let masters = cluster.masters();
        let Some((at, cursor)) = cluster::go_on(cursor, masters.iter().map(|(node, _)| *node))
        else {
            return Ok(Page {
                keys: Vec::new(),
                next: None,
            });
        };
        let (node, link) = &masters[at];
        let (next, keys) = link
            .scan(cursor, pattern)
            .await
            .map_err(StoreError::of_a_read)?;
        let next = if next == "0" {
            format!("{}/0", node + 1)
        } else {
            format!("{node}/{next}")
        };
        let is_over = next.ends_with("/0") && masters.iter().all(|(other, _)| other <= node);
        Ok(Page {
            keys,
            next: (!is_over).then_some(next),
        })
    }

    /// Runs a script that only reads, and replies with a number of permits. Returns `None` if the key
    /// has another kind.
    pub(crate) async fn read_count(&self, call: &Call) -> Result<Option<u32>, StoreError> {
        self.count(call).await.map_err(StoreError::of_a_read)
    }

    /// Runs a script that replies with a number of permits. Returns `None` if the key has another
    /// kind.
    pub(crate) async fn count(&self, call: &Call) -> Result<Option<u32>, StoreError> {
        reply::count(&self.eval(call).await?.0)
    }

    /// Runs a script that writes or erases a holder's note. Returns whether that was done.
    pub(crate) async fn note(&self, call: &Call) -> Result<bool, StoreError> {
        Ok(self.eval(call).await?.0 == Value::Integer(1))
    }

    /// Runs a script that only reads, and replies with a text for each of its keys.
    pub(crate) async fn texts(&self, call: &Call) -> Result<Vec<String>, StoreError> {
        let texts = self.eval(call).await;
        let texts = texts.and_then(|(value, _)| reply::texts(&value, call.keys.len()));
        texts.map_err(StoreError::of_a_read)
    }

    /// Runs a script that reads or writes a guarded key.
    pub(crate) async fn guarded(&self, call: &Call) -> Result<Guarded, StoreError> {
        reply::guarded(&self.eval(call).await?.0)
    }
}
