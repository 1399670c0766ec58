//! Keeps the map of a cluster up to date.

use std::{
    sync::{Arc, PoisonError, Weak, atomic::Ordering},
    time::Duration,
};

use futures_util::{
    future::join_all,
    stream::{FuturesUnordered, StreamExt},
};
use nestlock_wire::{Link, Server, clock::Instant, log};
use tokio::time::{sleep, timeout};

use super::{
    Cluster, NO_NODE, REPLY_TIMEOUT,
    asking::{AWAY, RefreshSchedule, Trouble},
    map::{self, NodeMap, SLOTS},
};

use crate::store::endpoint::Deployment;

/// How often to check whether a node is away.
const POLL: Duration = Duration::from_millis(100);
/// A node that leaves a request without a reply for this long counts as unreachable.
const SILENCE_LIMIT: Duration = Duration::from_millis(500);
/// How many nodes to query for their maps at once.
const MAX_PROBED: usize = 5;
/// How long to keep a node without slots after an `ASK` named it as an importer.
const IMPORTS: Duration = Duration::from_secs(10);

/// Returns whether a node can be reached and replies in time.
fn is_reachable(link: &Link) -> bool {
    link.is_up()
        && link
            .waits_since()
            .is_none_or(|since| since.elapsed() < SILENCE_LIMIT)
}

impl Cluster {
    /// Merges the maps of several nodes. For each slot, the master that most maps name counts. A
    /// slot keeps its master if the maps are tied, or if its previous master redirected it there a
    /// moment ago.
    pub(super) fn learn(&self, views: &[NodeMap]) {
        // before any link is made; a node that a redirect names before the map does is verified by
        // its address until then
        let announced = &self.connect_options.endpoint.server.announced;
        announced.replace(map::names(views));
        let (mut changed, mut is_older) = (false, false);
        let known: Vec<_> = self.read().iter().map(|node| node.server.clone()).collect();
        let told = self.redirected.lately();
        for slot in 0..SLOTS as u16 {
            let now = known.get(usize::from(self.owner(slot)));
            let Some(said) = map::most(views, slot, now).filter(|said| Some(*said) != now) else {
                continue;
            };
            if now.is_some() && told.contains_key(&slot) {
                is_older = true;
                continue;
            }
            changed |= self.gives(slot, said).1;
        }
        if is_older {
            self.request_refresh();
        }
        for node in self.write().iter_mut() {
            let mut of_it = views
                .iter()
                .filter_map(|view| view.master(&node.server))
                .peekable();
            if let Some(master) = of_it.peek() {
                master.id.clone_into(&mut node.id);
                node.has_replicas = of_it.any(|master| master.has_replicas);
            }
        }
        let replicas = map::replicas(views);
        if !replicas.is_empty() {
            *self.replicas.lock().unwrap_or_else(PoisonError::into_inner) = replicas;
        }
        let is_over = self.leave();
        if changed || is_over {
            self.moves.send_modify(|moves| *moves += 1);
        }
        if is_over {
            // other servers may have the records of its locks now: check all holds again
            self.connect_options.epochs.recheck_all();
        }
    }

    /// Leaves the nodes that no longer serve a slot. Redirects may have moved their last slots
    /// before the map did. Returns whether there were any.
    fn leave(&self) -> bool {
        let mut nodes = self.write();
        let mut busy = vec![false; nodes.len()];
        for owner in &self.owners {
            if let Some(busy) = busy.get_mut(usize::from(owner.load(Ordering::Acquire))) {
                *busy = true;
            }
        }
        let mut left = Vec::new();
        for (node, busy) in nodes.iter_mut().zip(busy) {
            if busy {
                node.begins_to_serve();
                node.imports = None;
                continue;
            }
            node.serves = false;
            if node.imports.is_none_or(|since| since.elapsed() >= IMPORTS) {
                node.is_removed = true;
                left.push((node.scripts.take(), node.messages.take()));
            }
        }
        drop(nodes);
        let mut is_over = false;
        for (scripts, messages) in left {
            if let Some(scripts) = scripts {
                log::later!(DEBUG, host = scripts.host(); "a node no longer serves any slot; closing its connections");
                scripts.leave();
                is_over = true;
            }
            if let Some(messages) = messages {
                messages.abandon();
                is_over = true;
            }
        }
        is_over
    }

    /// Returns what is wrong, or `None` if all masters reply and all slots have one.
    fn trouble(&self) -> Option<Trouble> {
        let nodes = self.read();
        let away = nodes.iter().filter(|node| {
            node.serves
                && node
                    .scripts
                    .as_deref()
                    .is_some_and(|link| !is_reachable(link))
        });
        let no_heir = || {
            self.owners
                .iter()
                .any(|owner| owner.load(Ordering::Acquire) == NO_NODE)
                .then_some(Trouble::Stays)
        };
        away.map(|node| {
            if node.has_replicas {
                Trouble::Passes
            } else {
                Trouble::Stays
            }
        })
        .min()
        .or_else(no_heir)
    }

    /// Keeps the map fresh until the client ends.
    pub(super) async fn keep_refreshed(cluster: Weak<Self>) {
        let (mut asking, mut was_rung) = (RefreshSchedule::new(Instant::now()), false);
        loop {
            let Some(cluster) = cluster.upgrade().filter(|cluster| !cluster.is_closed()) else {
                return;
            };
            let rung = timeout(POLL, cluster.refresh_requested.notified())
                .await
                .is_ok();
            was_rung |= rung;
            let trouble = cluster.trouble().or(was_rung.then_some(Trouble::Stays));
            let pause = asking.pause(trouble, Instant::now());
            if !pause.is_zero() {
                if rung {
                    sleep(pause.min(AWAY)).await;
                }
                if pause > AWAY || !rung {
                    continue;
                }
            }
            was_rung = false;
            asking.asked(trouble, Instant::now());
            let views = cluster.query_nodes().await;
            if !views.is_empty() {
                cluster.learn(&views);
            }
            asking.refreshed(*cluster.moves.borrow());
        }
    }

    /// Queries up to [`MAX_PROBED`] reachable nodes, and returns their maps once more than half
    /// have replied, or at the timeout. If none replied, queries all known addresses.
    async fn query_nodes(&self) -> Vec<NodeMap> {
        let mut fit: Vec<(Server, Arc<Link>)> = self
            .read()
            .iter()
            .filter_map(|node| Some((node.server.clone(), node.scripts.clone()?)))
            .filter(|(_, link)| is_reachable(link))
            .collect();
        if fit.is_empty() {
            return self.query_unknown_nodes().await;
        }
        // a random start, so that the queries spread over the nodes
        let at = uuid::Uuid::new_v4().as_u128() as usize % fit.len();
        fit.rotate_left(at);
        fit.truncate(MAX_PROBED);
        let most = fit.len() / 2 + 1;
        let mut asked: FuturesUnordered<_> = fit
            .iter()
            .map(async |(server, link)| {
                NodeMap::read(&link.slots(REPLY_TIMEOUT).await?, &server.host)
            })
            .collect();
        let mut views = Vec::new();
        let until = Instant::now() + REPLY_TIMEOUT;
        while let Ok(Some(answer)) = timeout(
            until.saturating_duration_since(Instant::now()),
            asked.next(),
        )
        .await
        {
            views.extend(answer);
            if views.len() >= most {
                break;
            }
        }
        // the nodes that were queried may have left the cluster
        if views.is_empty() {
            self.query_unknown_nodes().await
        } else {
            views
        }
    }

    /// Queries all known nodes, seeds and replicas over new connections, because no master replies.
    async fn query_unknown_nodes(&self) -> Vec<NodeMap> {
        let mut all: Vec<Server> = self.read().iter().map(|node| node.server.clone()).collect();
        if let Deployment::Cluster(seeds) = &self.connect_options.endpoint.place {
            all.extend(seeds.iter().cloned());
        }
        all.extend(
            self.replicas
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .iter()
                .cloned(),
        );
        all.sort_unstable();
        all.dedup();
        let asked = all.iter().map(|server| {
            timeout(
                // twice the time, because each query connects first
                2 * REPLY_TIMEOUT,
                Self::query_seed(&self.connect_options, server, false),
            )
        });
        let answers = join_all(asked).await;
        answers
            .into_iter()
            .filter_map(|answer| answer.ok()?.ok())
            .map(|(view, _)| view)
            .collect()
    }
}
