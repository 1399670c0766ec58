//! What a node says about who serves which slot.

use fred::types::config::Server;

use crate::{
    error::{StoreError, StoreErrorKind},
    store::wire::Value,
};

pub(super) const SLOTS: usize = 16_384;

/// A master, as a node knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Master {
    /// `None`: that node does not know.
    server: Option<Server>,
    /// What it calls itself.
    pub(super) id: String,
    /// Whether somebody may take over from it.
    pub(super) has_replicas: bool,
}

/// One node's map.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct View {
    masters: Vec<Master>,
    /// From and to which slot, and whose they are.
    ranges: Vec<(u16, u16, usize)>,
    /// Who may become a master.
    replicas: Vec<Server>,
}

impl View {
    /// Reads an answer to CLUSTER SLOTS. `asked`: the host that was asked, for nodes of which no other is said.
    pub(super) fn read(slots: &Value, asked: &str) -> Result<Self, StoreError> {
        let nonsense =
            || StoreError::new(StoreErrorKind::Protocol, false, "CLUSTER SLOTS was answered by something else");
        let Value::Array(ranges) = slots else { return Err(nonsense()) };
        let mut view = Self { masters: Vec::new(), ranges: Vec::new(), replicas: Vec::new() };
        for range in ranges {
            let Value::Array(parts) = range else { return Err(nonsense()) };
            let [from, to, master, replicas @ ..] = parts.as_slice() else { return Err(nonsense()) };
            let slot = |value: &Value| u16::try_from(value.as_number()?).ok().filter(|slot| usize::from(*slot) < SLOTS);
            let (Some(from), Some(to), Some((server, id))) = (slot(from), slot(to), node(master, asked)) else {
                return Err(nonsense());
            };
            let is_it = |known: &Master| known.server == server && (server.is_some() || known.id == id);
            let at = view.masters.iter().position(is_it).unwrap_or_else(|| {
                view.masters.push(Master { server, id: id.to_owned(), has_replicas: false });
                view.masters.len() - 1
            });
            for (replica, _) in replicas.iter().filter_map(|replica| node(replica, asked)) {
                view.masters[at].has_replicas = true;
                view.replicas.extend(replica.filter(|replica| !view.replicas.contains(replica)));
            }
            view.ranges.push((from, to, at));
        }
        if view.ranges.is_empty() {
            let none = "the cluster serves no slots; was it created?";
            return Err(StoreError::new(StoreErrorKind::ClusterDown, false, none));
        }
        if view.masters.iter().all(|master| master.server.is_none()) {
            let unknown = "the cluster names no node's host, but `?`: its nodes have no host names; set \
                           cluster-announce-hostname, or cluster-preferred-endpoint-type to ip";
            return Err(StoreError::new(StoreErrorKind::ClusterDown, false, unknown));
        }
        view.ranges.sort_unstable();
        Ok(view)
    }

    /// Who may become a master.
    pub(super) fn replicas(&self) -> &[Server] {
        &self.replicas
    }

    pub(super) fn masters(&self) -> &[Master] {
        &self.masters
    }

    /// What it says of the master at this address.
    pub(super) fn master(&self, server: &Server) -> Option<&Master> {
        self.masters.iter().find(|master| master.server.as_ref() == Some(server))
    }

    fn owner(&self, slot: u16) -> Option<&Server> {
        let at = self.ranges.partition_point(|(from, ..)| *from <= slot).checked_sub(1)?;
        let (_, to, at) = self.ranges[at];
        self.masters[at].server.as_ref().filter(|_| slot <= to)
    }
}

/// A node's address, if it is known, and what it calls itself.
fn node<'a>(said: &'a Value, asked: &str) -> Option<(Option<Server>, &'a str)> {
    let Value::Array(said) = said else { return None };
    let [host, port, rest @ ..] = said.as_slice() else { return None };
    let port = u16::try_from(port.as_number()?).ok()?;
    let server = host_of(host.as_str(), asked).map(|host| Server::new(host, port));
    Some((server, rest.first().and_then(Value::as_str).unwrap_or_default()))
}

/// The host of a node. Null, or nothing: the one that was asked, as the protocol has it (nodes behind one balancer, or one that
/// does not know its own). `None`: `?`, a node that has no host name where those are preferred; it may be anywhere.
pub(super) fn host_of<'a>(said: Option<&'a str>, asked: &'a str) -> Option<&'a str> {
    match said {
        None | Some("") => Some(asked),
        Some("?") => None,
        host => host,
    }
}

/// What most of them say of a slot. `None`: nobody serves it, or two others are named as often.
pub(super) fn most<'v>(views: &'v [View], slot: u16, now: Option<&Server>) -> Option<&'v Server> {
    let first = views.iter().find_map(|view| view.owner(slot))?;
    if views.iter().filter_map(|view| view.owner(slot)).all(|server| server == first) {
        return Some(first);
    }
    let mut said: Vec<(&Server, usize)> = Vec::with_capacity(views.len());
    for server in views.iter().filter_map(|view| view.owner(slot)) {
        match said.iter_mut().find(|(known, _)| *known == server) {
            Some((_, times)) => *times += 1,
            None => said.push((server, 1)),
        }
    }
    let (most, times) = said.iter().max_by_key(|(server, times)| (*times, Some(*server) == now)).copied()?;
    let tied = said.iter().any(|(server, other)| *server != most && *other == times);
    (!tied || Some(most) == now).then_some(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(ranges: &[(i64, i64, &str, i64)]) -> Result<View, StoreError> {
        let range = |(from, to, host, port): &(i64, i64, &str, i64)| {
            let master = vec![Value::text(host), Value::Integer(*port), Value::text("id"), Value::Array(Vec::new())];
            let replica = Value::Array(vec![Value::text("replica"), Value::Integer(1), Value::text("r")]);
            Value::Array(vec![Value::Integer(*from), Value::Integer(*to), Value::Array(master), replica])
        };
        View::read(&Value::Array(ranges.iter().map(range).collect()), "asked")
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
            assert_eq!(view.owner(slot).map(|server| (&*server.host, server.port)), master, "{slot}");
        }
    }

    /// Null and nothing are the host that was asked, and `?` is none. Two of those are two masters.
    #[test]
    fn a_node_without_a_host_is_what_the_protocol_says() {
        let node = |host: Value, id| Value::Array(vec![host, Value::Integer(7), Value::text(id)]);
        let range = |from, to, host, id| {
            Value::Array(vec![Value::Integer(from), Value::Integer(to), node(host, id), node(Value::text("?"), "r")])
        };
        let slots = Value::Array(vec![
            range(0, 1, Value::Null, "a"),
            range(2, 3, Value::text(""), "a"),
            range(4, 5, Value::text("?"), "b"),
            range(6, 7, Value::text("?"), "c"),
            range(8, 9, Value::text("?"), "b"),
        ]);
        let view = View::read(&slots, "asked").unwrap();
        for (slot, host) in [(0, Some("asked")), (3, Some("asked")), (4, None), (7, None), (8, None)] {
            assert_eq!(view.owner(slot).map(|server| &*server.host), host, "{slot}");
        }
        assert_eq!(view.masters().len(), 3);
        assert!(view.replicas().is_empty() && view.masters()[0].has_replicas);
        let unknown = View::read(&Value::Array(vec![range(0, 16_383, Value::text("?"), "b")]), "asked").unwrap_err();
        assert!(unknown.to_string().contains("cluster-announce-hostname"), "{unknown}");
    }

    #[test]
    fn what_is_no_map_is_an_error() {
        assert_eq!(view(&[]).unwrap_err().kind(), StoreErrorKind::ClusterDown);
        for nonsense in [
            view(&[(0, 16_384, "a", 1)]),
            view(&[(-1, 5, "a", 1)]),
            view(&[(0, 5, "a", 65_536)]),
            View::read(&Value::Null, "a"),
            View::read(&Value::Array(vec![Value::Integer(1)]), "a"),
        ] {
            assert_eq!(nonsense.unwrap_err().kind(), StoreErrorKind::Protocol);
        }
    }

    #[test]
    fn most_of_them_are_believed_and_where_they_are_at_odds_nothing_changes() {
        let [a, b, c] = ["a", "b", "c"].map(|host| view(&[(0, 16_383, host, 1)]).unwrap());
        let host = |views: &[&View], now: &str| {
            let views: Vec<View> = views
                .iter()
                .map(|view| View { masters: view.masters.clone(), ranges: view.ranges.clone(), replicas: Vec::new() })
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
