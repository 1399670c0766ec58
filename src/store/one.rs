//! One server, or one service whose server changes: a link for scripts, one for messages, and one that BLPOP blocks.

use std::{sync::Arc, time::Instant};

use futures_util::future::join;
use tokio::{sync::OnceCell, time::timeout};

use super::{Dials, cluster, endpoint::Place, link::Link, master::Master, pace::Pace, probe, wire::Dial};
use crate::{
    error::{Error, Result, StoreError},
    topology::{NodeRole, TopologyKind, TopologyNode},
};

/// A server, seen through its links.
#[derive(Debug)]
pub(super) struct One {
    pub(super) scripts: Arc<Link>,
    pub(super) messages: Arc<Link>,
    /// Made when somebody waits for a list first.
    lists: OnceCell<Arc<Link>>,
    /// What tells the server from all others, as it said when the client connected.
    run_id: Option<String>,
    pace: Arc<Pace>,
    /// When it was connected to.
    since: Instant,
    /// Who knows which server it is by now; `None`: it is always the same one.
    master: Option<Arc<Master>>,
}

impl One {
    /// Connects. On the client's own runtime.
    pub(super) async fn connect(dials: &Dials) -> Result<Self> {
        let pace = Arc::new(Pace::new());
        let master = Master::of(dials, &pace);
        let to_it = |dial: Dial| Dial { master: master.clone(), ..dial };
        let both = async {
            let scripts = Link::connect(to_it(dials.for_scripts()), &pace).await?;
            let messages = Link::connect(to_it(dials.for_messages()), &pace).await?;
            let runs = async {
                match scripts.up().await {
                    Ok((_, connection)) => probe::runs_scripts(&connection, &dials.config).await,
                    // it comes back by itself
                    Err(_) => Ok(()),
                }
            };
            let (about, runs) = join(scripts.about(), runs).await;
            let about = about.unwrap_or_default();
            if !about.is_sentinel {
                runs?;
            }
            let is_one_of_many = about.is_node && !cluster::is_alone(&scripts).await;
            Ok((scripts, messages, about, is_one_of_many))
        };
        let links = timeout(dials.config.connect_timeout, both).await.unwrap_or_else(|_| Err(dials.late()));
        let (scripts, messages, about, is_one_of_many) = links.map_err(|error| dials.unreachable(error))?;
        if is_one_of_many || about.is_sentinel {
            scripts.abandon();
            messages.abandon();
            let address = dials.endpoint.address();
            let reason = if about.is_sentinel {
                format!("{address} is a sentinel, not a server; use redis-sentinel://{address}/<service>")
            } else {
                format!("{address} is a node of a cluster; connect with redis-cluster://")
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

    /// One that leads nowhere.
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

    /// Whether both are known to be one server. One that was restarted between the two connects is not recognised.
    pub(super) fn is(&self, other: &Self) -> bool {
        let at = |one: &Self| one.master.as_ref().and_then(|master| master.at());
        self.run_id.is_some() && self.run_id == other.run_id || at(self).is_some() && at(self) == at(other)
    }

    /// How it is found, and who takes part in that.
    pub(super) fn topology(&self, dials: &Dials) -> (TopologyKind, Vec<TopologyNode>) {
        let kind = match &dials.endpoint.place {
            Place::List(_) => TopologyKind::Addresses,
            Place::Sentinel(_) => TopologyKind::Sentinel,
            Place::Server | Place::Cluster(_) => TopologyKind::Server,
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
        let sentinels = self.master.iter().flat_map(|master| master.sentinels()).map(|(at, answers)| TopologyNode {
            address: at.to_string(),
            role: NodeRole::Sentinel,
            slots: Vec::new(),
            is_connected: Some(answers),
            since: None,
        });
        (kind, master.into_iter().chain(sentinels).collect())
    }

    /// The link that waits for elements of lists. On the client's own runtime.
    pub(super) async fn lists(&self, dials: &Dials) -> Result<&Arc<Link>, StoreError> {
        let link = self
            .lists
            .get_or_init(|| async {
                let dial = Dial { master: self.master.clone(), ..dials.for_lists() };
                Link::blocking(dial, &self.pace)
            })
            .await;
        match timeout(dials.config.connect_timeout, link.wait_up()).await {
            Ok(()) => Ok(link),
            Err(_) => Err(link.not_connected()),
        }
    }

    /// Asks nobody any more which server it is: the links that there are.
    pub(super) fn stop(&self) -> Vec<Arc<Link>> {
        if let Some(master) = &self.master {
            master.close();
        }
        [Some(&self.scripts), Some(&self.messages), self.lists.get()].into_iter().flatten().cloned().collect()
    }
}
