//! A node's reply to `CLUSTER SLOTS`: which node serves which slot.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use nestlock_wire::{Server, Value};

use crate::{
    error::{StoreError, StoreErrorKind},
    keys,
};

pub(super) const SLOTS: usize = keys::SLOTS as usize;

/// A master, as a node describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MappedMaster {
    /// `None`: the node that was queried does not know the address.
    server: Option<Server>,
    /// Its node ID.
    pub(super) id: String,
    /// Whether it has a replica that may take over.
    pub(super) has_replicas: bool,
}

/// One node's map.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeMap {
    masters: Vec<MappedMaster>,
    /// First slot, last slot, and the index of their master.
    ranges: Vec<(u16, u16, usize)>,
    /// Nodes that may become masters.
    replicas: Vec<Server>,
    /// The host names that nodes announce in addition to their IP addresses.
    names: Vec<(Server, Arc<str>)>,
}

impl NodeMap {
    /// Parses a reply to `CLUSTER SLOTS`. `asked` is the host that was queried; it stands in for
    /// nodes whose host the reply leaves out.
    pub(super) fn read(slots: &Value, asked: &str) -> Result<Self, StoreError> {
        let nonsense = || {
            StoreError::new(
                StoreErrorKind::Protocol,
                false,
                "unexpected reply to CLUSTER SLOTS",
            )
        };
        let Value::Array(ranges) = slots else {
            return Err(nonsense());
        };
        let mut view = Self::default();
        for range in ranges {
            view.add_range(range, asked).ok_or_else(nonsense)?;
        }
        if view.ranges.is_empty() {
            let none = "the cluster serves no slots; it may not have been created yet";
            return Err(StoreError::new(StoreErrorKind::ClusterDown, false, none));
        }
        if view.masters.iter().all(|master| master.server.is_none()) {
            let unknown = "the cluster reports `?` as the host of each node, because its nodes have no host names; set \
                           cluster-announce-hostname, or set cluster-preferred-endpoint-type to ip";
            return Err(StoreError::new(StoreErrorKind::ClusterDown, false, unknown));
        }
        view.ranges.sort_unstable();
        Ok(view)
    }

    /// Adds a range of slots and its nodes. Returns `None` if this is not a range.
    fn add_range(&mut self, range: &Value, asked: &str) -> Option<()> {
        let Value::Array(parts) = range else {
            return None;
        };
        let [from, to, master, replicas @ ..] = parts.as_slice() else {
            return None;
        };
        let (from, to) = (slot(from)?, slot(to)?);
        let (server, id) = node(master, asked)?;
        let at = self.index_of_master(server, id);
        for (replica, _) in replicas.iter().filter_map(|replica| node(replica, asked)) {
            self.masters[at].has_replicas = true;
            self.replicas
                .extend(replica.filter(|replica| !self.replicas.contains(replica)));
        }
        self.names
            .extend(parts[2..].iter().filter_map(announced_name));
        self.ranges.push((from, to, at));
        Some(())
    }

    /// Returns the index of a master, which is added if it is new.
    fn index_of_master(&mut self, server: Option<Server>, id: &str) -> usize {
        let is_it =
            |known: &MappedMaster| known.server == server && (server.is_some() || known.id == id);
        self.masters.iter().position(is_it).unwrap_or_else(|| {
            self.masters.push(MappedMaster {
                server,
                id: id.to_owned(),
                has_replicas: false,
            });
            self.masters.len() - 1
        })
    }

    pub(super) fn masters(&self) -> &[MappedMaster] {
        &self.masters
    }

    /// Returns the map's entry for the master at this address.
    pub(super) fn master(&self, server: &Server) -> Option<&MappedMaster> {
        self.masters
            .iter()
            .find(|master| master.server.as_ref() == Some(server))
    }

    fn owner(&self, slot: u16) -> Option<&Server> {
        let at = self
            .ranges
            .partition_point(|(from, ..)| *from <= slot)
            .checked_sub(1)?;
        let (_, to, at) = self.ranges[at];
        self.masters[at].server.as_ref().filter(|_| slot <= to)
    }
}

/// Returns the slot of this number, if there is one.
fn slot(said: &Value) -> Option<u16> {
    u16::try_from(said.as_number()?)
        .ok()
        .filter(|slot| usize::from(*slot) < SLOTS)
}

/// Returns a node's address, if it is known, and its ID.
fn node<'a>(said: &'a Value, asked: &str) -> Option<(Option<Server>, &'a str)> {
    let Value::Array(said) = said else {
        return None;
    };
    let [host, port, rest @ ..] = said.as_slice() else {
        return None;
    };
    let port = u16::try_from(port.as_number()?).ok()?;
    let server = host_of(host.as_str(), asked).map(|host| Server::new(host, port));
    Some((
        server,
        rest.first().and_then(Value::as_str).unwrap_or_default(),
    ))
}

/// Returns the IP address of a node and the host name that it announces in addition
/// (`cluster-announce-hostname`), from the node's metadata.
fn announced_name(said: &Value) -> Option<(Server, Arc<str>)> {
    let Value::Array(said) = said else {
        return None;
    };
    let [host, port, _, Value::Array(metadata), ..] = said.as_slice() else {
        return None;
    };
    let host = host.as_str()?;
    host.parse::<IpAddr>().ok()?;
    let port = u16::try_from(port.as_number()?).ok()?;
    let mut pairs = metadata.chunks_exact(2);
    let name = pairs.find(|pair| pair[0].as_str() == Some("hostname"))?[1].as_str()?;
    (!name.is_empty()).then(|| (Server::new(host, port), name.into()))
}

/// Returns the host of a node. For null or an empty string, this is the host that was queried, as
/// the protocol says (nodes behind one balancer, or a node that does not know its own host).
/// Returns `None` for `?`: a node without a host name in a cluster that prefers host names; it may
/// be anywhere.
pub(super) fn host_of<'a>(said: Option<&'a str>, asked: &'a str) -> Option<&'a str> {
    match said {
        None | Some("") => Some(asked),
        Some("?") => None,
        host => host,
    }
}

/// Returns the nodes that may become masters, in order.
pub(super) fn replicas(views: &[NodeMap]) -> Vec<Server> {
    let replicas: BTreeSet<_> = views.iter().flat_map(|view| &view.replicas).collect();
    replicas.into_iter().cloned().collect()
}

/// Returns the host names that nodes announce in addition to their IP addresses.
pub(super) fn names(views: &[NodeMap]) -> HashMap<Server, Arc<str>> {
    let names = views.iter().flat_map(|view| &view.names);
    names.cloned().collect()
}

/// Returns the master that most maps name for a slot. Returns `None` if no map names one, or if
/// several are named equally often and `now` is not among them.
pub(super) fn most<'v>(
    views: &'v [NodeMap],
    slot: u16,
    now: Option<&Server>,
) -> Option<&'v Server> {
    let first = views.iter().find_map(|view| view.owner(slot))?;
    if views
        .iter()
        .filter_map(|view| view.owner(slot))
        .all(|server| server == first)
    {
        return Some(first);
    }
    let mut said: Vec<(&Server, usize)> = Vec::with_capacity(views.len());
    for server in views.iter().filter_map(|view| view.owner(slot)) {
        match said.iter_mut().find(|(known, _)| *known == server) {
            Some((_, times)) => *times += 1,
            None => said.push((server, 1)),
        }
    }
    let (most, times) = said
        .iter()
        .max_by_key(|(server, times)| (*times, Some(*server) == now))
        .copied()?;
    let tied = said
        .iter()
        .any(|(server, other)| *server != most && *other == times);
    (!tied || Some(most) == now).then_some(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(ranges: &[(i64, i64, &str, i64)]) -> Result<NodeMap, StoreError> {
        let range = |(from, to, host, port): &(i64, i64, &str, i64)| {
            let master = vec![
                Value::text(host),
                Value::Integer(*port),
                Value::text("id"),
                Value::Array(Vec::new()),
            ];
            let replica = Value::Array(vec![
                Value::text("replica"),
                Value::Integer(1),
                Value::text("r"),
            ]);
            Value::Array(vec![
                Value::Integer(*from),
                Value::Integer(*to),
                Value::Array(master),
                replica,
            ])
        };
        NodeMap::read(&Value::Array(ranges.iter().map(range).collect()), "asked")
    }

    #[test]
    fn each_slot_has_the_master_that_is_said() {
        let view = view(&[(10, 16_383, "b", 2), (0, 4, "a", 1), (6, 6, "", 3)]).unwrap();
        for (slot, master) in [
            (0, Some(("a", 1))),
            (4, Some(("a", 1))),
            (5, None),
            (6, Some(("asked", 3))),
            (7, None),
            (9, None),
            (10, Some(("b", 2))),
            (16_383, Some(("b", 2))),
        ] {
            assert_eq!(
                view.owner(slot).map(|server| (&*server.host, server.port)),
                master,
                "{slot}"
            );
        }
    }

    /// Null and an empty string stand for the host that was queried, and `?` for no host. Two nodes
    /// with `?` are two masters.
    #[test]
    fn a_node_without_a_host_is_what_the_protocol_says() {
        let node = |host: Value, id| Value::Array(vec![host, Value::Integer(7), Value::text(id)]);
        let range = |from, to, host, id| {
            Value::Array(vec![
                Value::Integer(from),
                Value::Integer(to),
                node(host, id),
                node(Value::text("?"), "r"),
            ])
        };
        let slots = Value::Array(vec![
            range(0, 1, Value::Null, "a"),
            range(2, 3, Value::text(""), "a"),
            range(4, 5, Value::text("?"), "b"),
            range(6, 7, Value::text("?"), "c"),
            range(8, 9, Value::text("?"), "b"),
        ]);
        let view = NodeMap::read(&slots, "asked").unwrap();
        for (slot, host) in [
            (0, Some("asked")),
            (3, Some("asked")),
            (4, None),
            (7, None),
            (8, None),
        ] {
            assert_eq!(view.owner(slot).map(|server| &*server.host), host, "{slot}");
        }
        assert_eq!(view.masters().len(), 3);
        assert!(view.replicas.is_empty() && view.masters()[0].has_replicas);
        let unknown = NodeMap::read(
            &Value::Array(vec![range(0, 16_383, Value::text("?"), "b")]),
            "asked",
        )
        .unwrap_err();
        assert!(
            unknown.to_string().contains("cluster-announce-hostname"),
            "{unknown}"
        );
    }

    #[test]
    fn a_node_may_announce_a_name_for_its_ip_address() {
        let node = |host: Value, metadata: &[&str]| {
            let metadata = metadata.iter().map(|word| Value::text(word)).collect();
            let (port, id) = (Value::Integer(7), Value::text("id"));
            Value::Array(vec![host, port, id, Value::Array(metadata)])
        };
        let of_6_2 = Value::Array(vec![
            Value::text("10.0.0.4"),
            Value::Integer(7),
            Value::text("id"),
        ]);
        let slots = Value::Array(vec![Value::Array(vec![
            Value::Integer(0),
            Value::Integer(16_383),
            node(Value::text("10.0.0.1"), &["hostname", "a.example"]),
            node(Value::text("::1"), &["ip", "x", "hostname", "b.example"]),
            node(Value::text("10.0.0.2"), &["hostname", ""]),
            node(Value::text("10.0.0.3"), &["hostname"]),
            of_6_2,
            node(Value::text("c.example"), &["ip", "10.0.0.5"]),
            node(Value::text("c.example"), &["hostname", "d.example"]),
            node(Value::Null, &["hostname", "e.example"]),
        ])]);
        let view = NodeMap::read(&slots, "10.0.0.6").unwrap();
        let names = [("10.0.0.1", "a.example"), ("::1", "b.example")]
            .map(|(host, name)| (Server::new(host, 7), Arc::from(name)));
        assert_eq!(super::names(&[view]), HashMap::from(names));
    }

    #[test]
    fn what_is_no_map_is_an_error() {
        assert_eq!(view(&[]).unwrap_err().kind(), StoreErrorKind::ClusterDown);
        for nonsense in [
            view(&[(0, 16_384, "a", 1)]),
            view(&[(-1, 5, "a", 1)]),
            view(&[(0, 5, "a", 65_536)]),
            NodeMap::read(&Value::Null, "a"),
            NodeMap::read(&Value::Array(vec![Value::Integer(1)]), "a"),
        ] {
            assert_eq!(nonsense.unwrap_err().kind(), StoreErrorKind::Protocol);
        }
    }

    /// The majority of the maps counts, and a tie changes nothing.
    #[test]
    fn a_majority_of_views_is_believed_and_a_split_changes_nothing() {
        let [a, b, c] = ["a", "b", "c"].map(|host| view(&[(0, 16_383, host, 1)]).unwrap());
        let host = |views: &[&NodeMap], now: &str| {
            let views: Vec<NodeMap> = views
                .iter()
                .map(|view| NodeMap {
                    masters: view.masters.clone(),
                    ranges: view.ranges.clone(),
                    replicas: Vec::new(),
                    names: Vec::new(),
                })
                .collect();
            most(&views, 7, Some(&Server::new(now, 1))).map(|server| server.host.to_string())
        };
        assert_eq!(host(&[&a, &b, &b], "a").as_deref(), Some("b"));
        assert_eq!(host(&[&a, &b], "a").as_deref(), Some("a"));
        assert_eq!(host(&[&b, &a], "a").as_deref(), Some("a"));
        assert_eq!(host(&[&b, &c], "a"), None);
        assert_eq!(host(&[&b], "a").as_deref(), Some("b"));
        assert_eq!(host(&[], "a"), None);
    }
}
