//! Whether the cluster of a server is known to be down.

use tokio::sync::watch;

/// Whether a node has said that its cluster is down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    /// It has not, or it serves again.
    Nothing,
    /// It has, and is probed until it serves again.
    Down,
    /// It has, and is not probed: the user lacks the permission, or the link is closed. This is
    /// final.
    Unknown,
}

/// What a node has said about its cluster.
#[derive(Debug)]
pub(crate) struct HealthWatch(watch::Sender<Health>);

impl HealthWatch {
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(Health::Nothing))
    }

    /// Notes that the cluster is down. Returns whether that is new: the caller probes it then.
    pub(crate) fn note_down(&self) -> bool {
        self.0.send_if_modified(|says| {
            *says == Health::Nothing && std::mem::replace(says, Health::Down) == Health::Nothing
        })
    }

    /// Records the outcome of the probes.
    pub(crate) fn probed(&self, says: Health) {
        self.0.send_replace(says);
    }

    /// Waits until a node that rejected everything serves again. Never returns for any other node.
    pub(crate) async fn serving_again(&self) {
        let mut down = self.0.subscribe();
        if *down.borrow() == Health::Down
            && down
                .wait_for(|says| *says != Health::Down)
                .await
                .is_ok_and(|says| *says == Health::Nothing)
        {
            return;
        }
        std::future::pending::<()>().await;
    }
}
