//! A cluster in which a slot has no master rejects every request, at each node. For each node, one
//! task probes for the end of that on behalf of all requests, so that no request has to find out by
//! trying.
//!
//! It asks `CLUSTER INFO` every 50 ms, once for the whole client, because the slot map shows the
//! new master too early or too late. Without that permission, only the callers' pauses are left.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::sleep;

use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    health::Health,
    link::Link,
    pace::jitter,
};

/// How long to wait for a node's reply about its cluster.
const REPLY_TIMEOUT: Duration = Duration::from_millis(250);

/// How often to probe whether a node serves again: the interval while a replica is expected to take
/// over, how long that is, and the interval after that.
const PROBE_INTERVALS: (Duration, Duration, Duration) = (
    Duration::from_millis(50),
    Duration::from_secs(60),
    Duration::from_millis(500),
);

impl Link {
    /// Notes that a node rejected a request because its cluster is down, and starts to probe it.
    /// Ignores all other errors.
    pub fn refused(self: &Arc<Self>, error: &StoreError) {
        // "Hash slot not served" is about one slot; the others may be fine
        if error.kind() != StoreErrorKind::ClusterDown || !error.said().contains("cluster is down")
        {
            return;
        }
        if self.down.note_down() {
            self.spawn(Self::probe_until_serving(Arc::downgrade(self)));
        }
    }

    /// Waits until a node that rejected everything serves again. Never returns for any other node.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn serving_again(&self) {
        self.down.serving_again().await;
    }

    async fn probe_until_serving(link: Weak<Self>) {
        let began = Instant::now();
        let says = loop {
            let (soon, at_first, later) = PROBE_INTERVALS;
            sleep(jitter(
                if began.elapsed() < at_first {
                    soon
                } else {
                    later
                },
                0.2,
            ))
            .await;
            let Some(link) = link.upgrade() else {
                return;
            };
            if link.is_closed() {
                break Health::Unknown;
            }
            match link.cluster_info(REPLY_TIMEOUT).await {
                Ok(info)
                    if info
                        .as_str()
                        .is_some_and(|info| info.contains("cluster_state:ok")) =>
                {
                    break Health::Nothing;
                }
                // the user may not run `CLUSTER INFO`
                Err(error) if error.kind() == StoreErrorKind::NoPermission => {
                    break Health::Unknown;
                }
                _ => {}
            }
        };
        if let Some(link) = link.upgrade() {
            link.down.probed(says);
        }
    }
}
