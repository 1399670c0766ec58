//! A cluster in which a slot has no master refuses everything, at each node. When that is over is asked once for the whole
//! client, so that nobody has to find out by trying.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::sleep};

use super::ANSWERS;
use crate::{
    clock::Instant,
    error::{StoreError, StoreErrorKind},
    store::{link::Link, pace::jitter},
};

/// How often a node is asked whether it serves again: for as long as a replica is expected to take over within, and later.
const ASKED: (Duration, Duration, Duration) =
    (Duration::from_millis(50), Duration::from_secs(60), Duration::from_millis(500));

/// Whether a node has said that its cluster is down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    /// Not that anybody knows.
    Nothing,
    /// It has, and is asked until it says the opposite.
    Down,
    /// It has, and is not asked: nobody may, or it was left. That stays so.
    Unknown,
}

/// What a node has said about its cluster.
#[derive(Debug)]
pub(in super::super) struct Down(watch::Sender<Says>);

impl Down {
    pub(in super::super) fn new() -> Self {
        Self(watch::Sender::new(Says::Nothing))
    }
}

impl Link {
    /// Takes note where a node has refused something as its cluster is down, and sees to it that it is asked.
    pub(super) fn refused(self: &Arc<Self>, error: &StoreError) {
        // "Hash slot not served" is about one slot, however the others are
        if error.kind() != StoreErrorKind::ClusterDown || !error.said().contains("cluster is down") {
            return;
        }
        let is_new = |says: &mut Says| *says == Says::Nothing && std::mem::replace(says, Says::Down) == Says::Nothing;
        if self.down.0.send_if_modified(is_new) {
            self.spawn(Arc::clone(self).ask_until_it_serves());
        }
    }

    async fn ask_until_it_serves(self: Arc<Self>) {
        let began = Instant::now();
        let says = loop {
            let (soon, at_first, later) = ASKED;
            sleep(jitter(if began.elapsed() < at_first { soon } else { later }, 0.2)).await;
            if self.is_closed() {
                break Says::Unknown;
            }
            match self.cluster_info(ANSWERS).await {
                Ok(info) if info.as_str().is_some_and(|info| info.contains("cluster_state:ok")) => break Says::Nothing,
                // its user may not ask
                Err(error) if error.kind() == StoreErrorKind::NoPermission => break Says::Unknown,
                _ => {}
            }
        };
        self.down.0.send_replace(says);
    }

    /// Waits until a node serves again that has refused everything. Of any other nothing is known: for ever.
    pub(in super::super) async fn serves_again(&self) {
        let mut down = self.down.0.subscribe();
        if *down.borrow() == Says::Down
            && down.wait_for(|says| *says != Says::Down).await.is_ok_and(|says| *says == Says::Nothing)
        {
            return;
        }
        std::future::pending::<()>().await;
    }
}
