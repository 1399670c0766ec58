//! A single server, or a service whose master changes: one link for scripts, one for messages, and
//! one that `BLPOP` blocks.

use std::{sync::Arc, time::Instant};

use futures_util::future::join;
use nestlock_wire::{Dialer, Link, Locate, Pace};
use tokio::{sync::OnceCell, time::timeout};

use crate::{
    error::{Error, Result, StoreError},
    store::{
        cluster, connect_options::ConnectOptions, endpoint::Deployment, master::ServiceMaster,
        probe,
    },
    topology::{NodeRole, TopologyKind, TopologyNode},
};

/// A server, reached through its links.
#[derive(Debug)]
pub(super) struct One {
    pub(super) scripts: Arc<Link>,
    pub(super) messages: Arc<Link>,
    /// Created when a client first waits for a list.
    lists: OnceCell<Arc<Link>>,
    /// Identifies the server; read when the client connected.
    run_id: Option<String>,
    pace: Arc<Pace>,
    /// When the client connected to it.
    since: Instant,
    /// Knows the current server. `None`: the server is always the same.
    master: Option<Arc<ServiceMaster>>,
}

impl One {
    /// Connects. Must run on the client's own runtime.
    pub(super) async fn connect(dials: &ConnectOptions) -> Result<Self> {
        let pace = Arc::new(Pace::new());
        let master = ServiceMaster::of(dials, &pace);
        let to_it = |dial: Dialer| Dialer {
            locate: master.clone().map(|master| master as Arc<dyn Locate>),
            ..dial
        };
        let both = async {
            let scripts = Link::connect(to_it(dials.for_scripts()), &pace).await?;
            let messages = Link::connect(to_it(dials.for_messages()), &pace).await?;
            let runs = async {
                match scripts.up().await {
                    Ok((_, connection)) => probe::runs_scripts(&connection, &dials.config).await,
                    // the link reconnects automatically
                    Err(_) => Ok(()),
                }
            };
            let (about, runs) = join(scripts.about(), runs).await;
            let about = about.unwrap_or_default();
            if !about.is_sentinel {
                runs?;
            }
            // a cluster of a single master works like a single server
            let is_one_of_many = about.is_node && !cluster::is_alone(&scripts).await;
            Ok((scripts, messages, about, is_one_of_many))
        };
        let links = timeout(dials.config.connect_timeout, both)
            .await
            .unwrap_or_else(|_| Err(dials.timed_out()));
        let (scripts, messages, about, is_one_of_many) =
            links.map_err(|error| dials.unreachable(error))?;
        if is_one_of_many || about.is_sentinel {
            scripts.abandon();
            messages.abandon();
            let address = dials.endpoint.address();
            let reason = if about.is_sentinel {
                format!(
                    "{address} is a sentinel, not a server; use redis-sentinel://{address}/<service>"
                )
            } else {
                let secure = if dials.endpoint.server.is_by_tls() {
                    "s"
                } else {
                    ""
                };
                format!("{address} is a node of a cluster; connect with redis{secure}-cluster://")
            };
            return Err(Error::InvalidConfig { reason });
        }
        Ok(Self {
            scripts,
            messages,
            lists: OnceCell::new(),
            run_id: about.run_id,
            pace,
            since: Instant::now(),
            master,
        })
    }

    /// Returns a server that cannot be reached.
    pub(super) fn nowhere(link: &Arc<Link>) -> Self {
        let pace = Arc::new(Pace::new());
        Self {
            scripts: Arc::clone(link),
            messages: Arc::clone(link),
            lists: OnceCell::new(),
            run_id: None,
            pace,
            since: Instant::now(),
            master: None,
        }
    }

    /// Returns whether both are known to be the same server: the run ID is equal, or the address of
    /// the service's master. A single server that restarted between the two connects is not
    /// recognized.
    pub(super) fn is(&self, other: &Self) -> bool {
        let at = |one: &Self| one.master.as_ref().and_then(|master| master.at());
        self.run_id.is_some() && self.run_id == other.run_id
            || at(self).is_some() && at(self) == at(other)
    }

    /// Returns how the server is found, and the master and sentinels that are known.
    pub(super) fn topology(&self, dials: &ConnectOptions) -> (TopologyKind, Vec<TopologyNode>) {
        let kind = match &dials.endpoint.place {
            Deployment::List(_) => TopologyKind::Addresses,
            Deployment::Sentinel(_) => TopologyKind::Sentinel,
            Deployment::Server | Deployment::Cluster(_) => TopologyKind::Server,
        };
        let at = match &self.master {
            Some(master) => master.reigns().map(|(at, since)| (at.to_string(), since)),
            None => Some((dials.endpoint.address(), self.since)),
        };
        let master = at.map(|(address, since)| TopologyNode {
            address,
            role: NodeRole::Master,
            slots: Vec::new(),
            is_connected: Some(self.scripts.is_up()),
            since: Some(since),
        });
        let sentinels = self
            .master
            .iter()
            .flat_map(|master| master.sentinels())
            .map(|(at, answers)| TopologyNode {
                address: at.to_string(),
                role: NodeRole::Sentinel,
                slots: Vec::new(),
                is_connected: Some(answers),
                since: None,
            });
        (kind, master.into_iter().chain(sentinels).collect())
    }

    /// Returns the link for `BLPOP`, created on first use, once it is up. Must run on the client's
    /// own runtime.
    pub(super) async fn lists(&self, dials: &ConnectOptions) -> Result<&Arc<Link>, StoreError> {
        let link = self
            .lists
            .get_or_init(|| async {
                let dial = Dialer {
                    locate: self.master.clone().map(|master| master as Arc<dyn Locate>),
                    ..dials.for_lists()
                };
                Link::blocking(dial, &self.pace)
            })
            .await;
        match timeout(dials.config.connect_timeout, link.wait_up()).await {
            Ok(()) => Ok(link),
            Err(_) => Err(link.not_connected()),
        }
    }

    /// Stops polling the sentinels; returns the existing links.
    pub(super) fn stop(&self) -> Vec<Arc<Link>> {
        if let Some(master) = &self.master {
            master.close();
        }
        [Some(&self.scripts), Some(&self.messages), self.lists.get()]
            .into_iter()
            .flatten()
            .cloned()
            .collect()
    }
}
