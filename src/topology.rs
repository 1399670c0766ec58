//! Which servers a client uses, for people and logs.

use std::{fmt, ops::RangeInclusive, time::Instant};

/// Which servers a client uses by now: see [`LockClient::topology`](crate::LockClient::topology).
///
/// `{}` is a line for each: `127.0.0.1:7000: master of 0-5460, connected, for 12 s`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// How servers are found.
    pub kind: TopologyKind,
    /// Masters first.
    pub nodes: Vec<TopologyNode>,
}

/// How the servers of a client are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopologyKind {
    /// One server, at one address.
    Server,
    /// By the map of a cluster.
    Cluster,
    /// Sentinels name the master.
    Sentinel,
    /// It is the one of several addresses that says that it is the master.
    Addresses,
}

/// A server that a client uses, or knows of.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopologyNode {
    /// Host and port, or the path of a socket.
    pub address: String,
    /// What it is.
    pub role: NodeRole,
    /// The slots that it serves, in a cluster.
    pub slots: Vec<RangeInclusive<u16>>,
    /// Whether requests can be sent to it; of a sentinel, whether it answers. Of a replica, to which nothing is sent, `None`.
    pub is_connected: Option<bool>,
    /// Since when this client takes it for the master; `None`: it is none.
    pub since: Option<Instant>,
}

/// What a server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeRole {
    /// Locks are there.
    Master,
    /// It has what a master has, and may become one.
    Replica,
    /// It says who is the master.
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
        let node =
            |role, slots, is_connected, since| TopologyNode { address: "h:1".into(), role, slots, is_connected, since };
        let master = node(NodeRole::Master, vec![0..=5460, 7..=7], Some(true), Some(Instant::now()));
        let replica = node(NodeRole::Replica, vec![], None, None);
        let topology = Topology { kind: TopologyKind::Cluster, nodes: vec![master, replica] };
        assert_eq!(topology.to_string(), "h:1: master of 0-5460, 7, connected, for 0 s\nh:1: replica");
    }
}
