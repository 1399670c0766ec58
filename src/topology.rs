//! The servers that a client uses, for display and logs.

use std::{fmt, ops::RangeInclusive, time::Instant};

/// The servers that a client uses now: see [`LockClient::topology`](crate::LockClient::topology).
///
/// `{}` prints one line for each: `127.0.0.1:7000: master of 0-5460, connected, for 12 s`.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = nestlock_embedded::EmbeddedServer::start()?;
/// # let client = nestlock::LockClient::connect(server.url()).await?;
/// use nestlock::{NodeRole, TopologyKind};
///
/// let topology = client.topology();
/// assert_eq!(topology.kind, TopologyKind::Server);
/// for node in &topology.nodes {
///     assert_eq!((node.role, node.is_connected), (NodeRole::Master, Some(true)));
///     println!("{}", node.address);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// How the client finds its servers.
    pub kind: TopologyKind,
    /// Masters first.
    pub nodes: Vec<TopologyNode>,
}

/// How a client finds its servers.
///
/// For an example, see [`Topology`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopologyKind {
    /// One server, at one address.
    Server,
    /// The slot map of a cluster.
    Cluster,
    /// Sentinels name the master.
    Sentinel,
    /// The master is the one of several addresses that reports itself as master.
    Addresses,
}

/// A server that a client uses or knows of.
///
/// For an example, see [`Topology`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopologyNode {
    /// Host and port, or the path of a socket.
    pub address: String,
    /// Its role.
    pub role: NodeRole,
    /// The slots that it serves, in a cluster.
    pub slots: Vec<RangeInclusive<u16>>,
    /// Whether requests can be sent to it; for a sentinel, whether it replies. `None` for a
    /// replica, to which nothing is sent.
    pub is_connected: Option<bool>,
    /// When this client began to consider it the master; `None` if it does not.
    pub since: Option<Instant>,
}

/// The role of a server.
///
/// For an example, see [`Topology`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeRole {
    /// It stores locks.
    Master,
    /// It copies a master, and may be promoted.
    Replica,
    /// It names the master.
    Sentinel,
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, node) in self.nodes.iter().enumerate() {
            write!(f, "{}{node}", if at > 0 { "\n" } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Display for TopologyNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let role = match self.role {
            NodeRole::Master => "master",
            NodeRole::Replica => "replica",
            NodeRole::Sentinel => "sentinel",
        };
        write!(f, "{}: {role}", self.address)?;
        for (at, slots) in self.slots.iter().enumerate() {
            let (first, last) = (slots.start(), slots.end());
            write!(f, "{}{first}", if at == 0 { " of " } else { ", " })?;
            if last > first {
                write!(f, "-{last}")?;
            }
        }
        match self.is_connected {
            Some(true) => write!(f, ", connected")?,
            Some(false) => write!(f, ", not connected")?,
            None => {}
        }
        match self.since {
            Some(since) => write!(f, ", for {} s", since.elapsed().as_secs()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_line() {
        let node = |role, slots, is_connected, since| TopologyNode {
            address: "h:1".into(),
            role,
            slots,
            is_connected,
            since,
        };
        let master = node(
            NodeRole::Master,
            vec![0..=5460, 7..=7],
            Some(true),
            Some(Instant::now()),
        );
        let replica = node(NodeRole::Replica, vec![], None, None);
        let topology = Topology {
            kind: TopologyKind::Cluster,
            nodes: vec![master, replica],
        };
        assert_eq!(
            topology.to_string(),
            "h:1: master of 0-5460, 7, connected, for 0 s\nh:1: replica"
        );
    }
}
