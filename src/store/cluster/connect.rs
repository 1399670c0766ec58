//! The first connect to a cluster: finds its nodes through the seeds.

use std::{sync::Arc, time::Duration};

use futures_util::{
    future::{join_all, select_all},
    stream::{FuturesUnordered, StreamExt},
};
use nestlock_wire::{CloseOnDrop, Failure, Request, Server, Until, clock::Instant};
use tokio::time::timeout;

use super::{Cluster, map::NodeMap};

use crate::{
    error::{Error, Result, StoreError, StoreErrorKind},
    options::Messages,
    store::{connect_options::ConnectOptions, probe},
};

/// How long a connect waits for the other nodes once one of them can be reached.
const OTHERS: Duration = Duration::from_millis(500);

impl Cluster {
    /// Connects; any of the seeds is enough. Must run on the client's own runtime.
    pub(in crate::store) async fn connect(
        dials: &Arc<ConnectOptions>,
        seeds: &[Server],
    ) -> Result<Arc<Self>> {
        if dials.endpoint.wire(&dials.config).is_fred() {
            return Err(refused(
                "fred's client cannot be used with a cluster (it follows redirects by itself); leave out wire=fred, or use TLS by rustls",
            ));
        }
        let limit = dials.config.connect_timeout;
        let began = Instant::now();
        let late = |_| Err(dials.unreachable(dials.timed_out()));
        let (view, can_shard) = timeout(limit, Self::query_seeds(dials, seeds))
            .await
            .unwrap_or_else(late)?;
        let sharded = are_sharded(dials.config.messages, can_shard)?;
        let cluster = Arc::new(Self::new(dials, sharded));
        cluster.learn(&[view]);
        cluster
            .wait_for_nodes(limit.saturating_sub(began.elapsed()))
            .await?;
        dials
            .own
            .spawn(Self::keep_refreshed(Arc::downgrade(&cluster)));
        Ok(cluster)
    }

    /// Waits until a node can be reached, and a moment longer for the others.
    async fn wait_for_nodes(&self, limit: Duration) -> Result<()> {
        let links: Vec<_> = self
            .read()
            .iter()
            .filter_map(|node| node.scripts.clone())
            .collect();
        let any = select_all(links.iter().map(|link| Box::pin(link.wait_up())));
        if timeout(limit, any).await.is_err() {
            self.stop().iter().for_each(|link| link.abandon());
            let said: Vec<_> = links
                .iter()
                .filter_map(|link| Some((link.address().clone(), link.refusal()?)))
                .collect();
            let error = if said.is_empty() {
                self.connect_options.timed_out()
            } else {
                let what = match self.connect_options.endpoint.server.credentials {
                    // the address may be right, and the function may fail
                    Some(_) => "no node of the cluster lets the client in",
                    None => "no node can be reached at the address that the cluster announces",
                };
                let why = format!("{what}: {}", each_reason(said));
                StoreError::new(StoreErrorKind::Unavailable, false, why)
            };
            return Err(self.connect_options.unreachable(error));
        }
        let all = join_all(links.iter().map(|link| link.wait_up()));
        let _ = timeout(OTHERS.min(limit), all).await;
        Ok(())
    }

    /// Queries all seeds at once, and returns the first map.
    async fn query_seeds(dials: &Arc<ConnectOptions>, seeds: &[Server]) -> Result<(NodeMap, bool)> {
        let mut asked: FuturesUnordered<_> = seeds
            .iter()
            .map(|seed| Self::query_seed(dials, seed, true))
            .collect();
        let (mut said, mut kind) = (Vec::new(), StoreErrorKind::Unavailable);
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(known) => return Ok(known),
                Err((seed, error)) => {
                    let text = error.said();
                    if text.contains("cluster support disabled") {
                        let reason =
                            format!("{seed} is not a node of a cluster; connect with redis://");
                        return Err(Error::InvalidConfig { reason });
                    }
                    // Valkey 9 may have several databases in a cluster; other servers reject
                    // `SELECT`
                    let refusals = [
                        "SELECT is not allowed in cluster mode",
                        "DB index is out of range",
                    ];
                    if refusals.into_iter().any(|refusal| text.contains(refusal)) {
                        let reason = format!(
                            "the cluster of {seed} has no such database ({text}); a cluster has one database, unless its \
                             `cluster-databases` is higher: leave the number out of the URL"
                        );
                        return Err(Error::InvalidConfig { reason });
                    }
                    kind = error.kind();
                    said.push((seed.to_string(), text));
                }
            }
        }
        Err(dials.unreachable(StoreError::new(kind, false, each_reason(said))))
    }

    /// Returns a node's map, and whether the node supports sharded messages. With `is_first`, also
    /// checks that it runs scripts.
    pub(super) async fn query_seed<'s>(
        dials: &Arc<ConnectOptions>,
        seed: &'s Server,
        is_first: bool,
    ) -> Result<(NodeMap, bool), (&'s Server, StoreError)> {
        let failed = |error: StoreError| (seed, error);
        let mut dialer = dials.for_scripts().at(seed);
        if dials.endpoint.has_seed(seed) {
            // verify it by the configured address, as at the first connect: an announced name may
            // have changed since, and the new one is learned here
            drop(std::mem::take(&mut dialer.settings.server.announced));
        }
        let connected = dialer.connect(dials.config.connect_timeout).await;
        let ends = CloseOnDrop::new(connected.map_err(|refused| failed(refused.error))?);
        let limit = dials.config.command_timeout();
        let ask = async |words: &[&str]| {
            ends.connection
                .call(Request::Words(words), Until::new(Instant::now(), limit))
                .await
        };
        let view = ask(&["CLUSTER", "SLOTS"]).await.map_err(StoreError::from);
        let view = view
            .and_then(|slots| NodeMap::read(&slots, &seed.host))
            .map_err(failed);
        if is_first && view.is_ok() {
            probe::runs_scripts(&ends.connection, &dials.config)
                .await
                .map_err(failed)?;
        }
        let sharded = match &view {
            // servers before Redis 7.0 reject this command
            Ok(_) => !matches!(
                ask(&["PUBSUB", "SHARDNUMSUB"]).await,
                Err(Failure::Refused(_))
            ),
            Err(_) => false,
        };
        Ok((view?, sharded))
    }
}

/// Lists why servers failed, each reason once: `a:1, b:2: why; c:3: why not`.
fn each_reason(said: Vec<(String, String)>) -> String {
    let mut reasons: Vec<(String, String)> = Vec::new();
    for (server, why) in said {
        match reasons.iter_mut().find(|(_, known)| *known == why) {
            Some((servers, _)) => *servers = format!("{servers}, {server}"),
            None => reasons.push((server, why)),
        }
    }
    let reasons = reasons.iter();
    let reasons = reasons.map(|(servers, why)| format!("{servers}: {why}"));
    reasons.collect::<Vec<_>>().join("; ")
}

/// Returns whether messages are sharded, as the configuration demands and the servers can.
fn are_sharded(messages: Messages, can_shard: bool) -> Result<bool> {
    match messages {
        Messages::Auto => Ok(can_shard),
        Messages::Sharded if !can_shard => Err(refused(
            "the servers lack sharded pub/sub, or the user may not run PUBSUB SHARDNUMSUB; use Messages::Classic",
        )),
        Messages::Sharded => Ok(true),
        Messages::Classic => Ok(false),
    }
}

/// Returns the error for a configuration that cannot be used.
fn refused(reason: &str) -> Error {
    let reason = reason.into();
    Error::InvalidConfig { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_stands_once() {
        let said = [("a:1", "why"), ("c:3", "why not"), ("b:2", "why")];
        let said = said.map(|(server, why)| (server.to_owned(), why.to_owned()));
        assert_eq!(each_reason(said.into()), "a:1, b:2: why; c:3: why not");
    }
}
