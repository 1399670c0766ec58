//! What the nodes report about the cluster and about themselves.

use std::{collections::BTreeMap, fmt::Write as _, ops::RangeInclusive};

use super::super::{SpawnError, SpawnedServer, link::Link, link_to};

/// The report of a node.
#[derive(Debug)]
pub(super) struct View {
    /// Whether it serves requests.
    serves: bool,
    /// For a replica: whether it has all of its master's data.
    in_sync: bool,
    /// For a master: how many replicas follow it and have all of its data.
    followers: usize,
    pub(super) nodes: Vec<Seen>,
}

/// A node, as a node reports it.
#[derive(Debug, PartialEq)]
pub(super) struct Seen {
    pub(super) id: String,
    flags: Vec<String>,
    pub(super) master: Option<String>,
    pub(super) epoch: u64,
    connected: bool,
    pub(super) slots: Vec<RangeInclusive<u16>>,
    /// The slots that it is migrating or importing. A node reports only its own.
    pub(super) moving: Vec<u16>,
}

impl Seen {
    /// Parses a line of `CLUSTER NODES`. Returns `None` if it is malformed.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let [id, _, flags, master, _, _, epoch, state, slots @ ..] = &*words else {
            return None;
        };
        let mut seen = Self {
            id: (*id).to_owned(),
            flags: flags.split(',').map(str::to_owned).collect(),
            master: (*master != "-").then(|| (*master).to_owned()),
            epoch: epoch.parse().ok()?,
            connected: *state == "connected",
            slots: Vec::new(),
            moving: Vec::new(),
        };
        for slot in slots {
            if let Some((slot, _)) = slot.strip_prefix('[').and_then(|slot| slot.split_once('-')) {
                seen.moving.push(slot.parse().ok()?);
            } else {
                let (first, last) = slot.split_once('-').unwrap_or((slot, slot));
                seen.slots.push(first.parse().ok()?..=last.parse().ok()?);
            }
        }
        Some(seen)
    }

    pub(super) fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|own| own == flag)
    }

    /// Returns the properties on which all nodes must agree.
    fn role(&self) -> (Option<&str>, &[RangeInclusive<u16>]) {
        (self.master.as_deref(), &self.slots)
    }
}

impl View {
    pub(super) fn of(node: &SpawnedServer) -> Result<Self, SpawnError> {
        let mut link = link_to(node)?;
        let state = link.call("CLUSTER INFO")?.text();
        let nodes = nodes(&mut link)?;
        let replication = link.call("INFO replication")?.text();
        let followers = |line: &&str| line.starts_with("slave") && line.contains("state=online");
        Ok(Self {
            serves: state.contains("cluster_state:ok"),
            in_sync: replication.contains("master_link_status:up"),
            followers: replication.lines().filter(followers).count(),
            nodes,
        })
    }

    pub(super) fn myself(&self) -> Option<&Seen> {
        self.nodes.iter().find(|node| node.is("myself"))
    }

    pub(super) fn owner(&self, slot: u16) -> Option<&Seen> {
        self.nodes
            .iter()
            .find(|node| node.slots.iter().any(|slots| slots.contains(&slot)))
    }
}

pub(super) fn nodes(link: &mut Link) -> Result<Vec<Seen>, SpawnError> {
    Ok(link
        .call("CLUSTER NODES")?
        .text()
        .lines()
        .filter_map(Seen::parse)
        .collect())
}

/// The reports of all nodes, in the order of the nodes, each with the node's id.
#[derive(Debug)]
pub(super) struct Views<'a> {
    pub(super) of: Vec<(&'a SpawnedServer, &'a str, Result<View, SpawnError>)>,
}

impl Views<'_> {
    /// Returns the nodes that reply.
    pub(super) fn here(&self) -> impl Iterator<Item = (&SpawnedServer, &str, &View)> {
        self.of
            .iter()
            .filter_map(|(node, id, view)| Some((*node, *id, view.as_ref().ok()?)))
    }

    /// Returns the id of a slot's owner. As in the cluster itself, the claim with the highest epoch
    /// wins. Returns `None` if no node claims the slot.
    pub(super) fn owner(&self, slot: u16) -> Option<&str> {
        let claims = self.here().filter_map(|(_, _, view)| view.owner(slot));
        claims
            .max_by_key(|owner| owner.epoch)
            .map(|owner| &*owner.id)
    }

    /// Returns why the nodes do not agree yet, or the cluster does not serve requests. Returns
    /// `None` if all is well.
    pub(super) fn unsettled(&self) -> Option<String> {
        let here: BTreeMap<&str, &View> = self.here().map(|(_, id, view)| (id, view)).collect();
        let Some((_, _, first)) = self.here().next() else {
            return Some("no node replies".into());
        };
        for (node, id, view) in &self.of {
            let addr = node.addr();
            let view = match view {
                Ok(view) => view,
                // it is down; if it owns slots, the other nodes report that
                Err(SpawnError::Unreachable { .. }) => continue,
                Err(error) => return Some(error.to_string()),
            };
            if !view.serves {
                return Some(format!("{addr} does not serve"));
            }
            if view.nodes.len() < self.of.len() {
                return Some(format!("{addr} does not know all nodes"));
            }
            for seen in &view.nodes {
                let is_here = here.contains_key(&*seen.id);
                if !is_here && !seen.slots.is_empty() {
                    return Some(format!("{addr} names a master that does not reply"));
                }
                if is_here
                    && (!seen.connected
                        || ["fail", "fail?", "handshake"]
                            .iter()
                            .any(|flag| seen.is(flag)))
                {
                    return Some(format!("{addr} has no connection to {}", seen.id));
                }
                let other = first.nodes.iter().find(|other| other.id == seen.id);
                if is_here && other.is_none_or(|other| other.role() != seen.role()) {
                    return Some(format!("{addr} does not agree on {}", seen.id));
                }
            }
            let Some(myself) = view.myself() else {
                return Some(format!("{addr} does not know itself"));
            };
            if myself.master.is_some() && !view.in_sync {
                return Some(format!("{addr} does not have its master's data yet"));
            }
            let following = |view: &&View| {
                view.myself()
                    .is_some_and(|node| node.master.as_deref() == Some(*id))
            };
            if view.followers
                < here
                    .values()
                    .copied()
                    .filter(|view| following(view))
                    .count()
            {
                return Some(format!("{addr} does not have its replicas yet"));
            }
        }
        None
    }
}

/// For humans: a line for each node, with what it reports about the others.
impl std::fmt::Display for Views<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (node, id, view) in &self.of {
            let name = |id: &str| {
                let addr = self
                    .of
                    .iter()
                    .find(|(_, other, _)| *other == id)
                    .map(|(node, _, _)| node.addr().to_string());
                addr.unwrap_or_else(|| id.to_owned())
            };
            write!(out, "{} ({})", node.addr(), &id[..id.len().min(8)])?;
            let view = match view {
                Ok(view) => view,
                Err(error) => {
                    writeln!(out, ": {error}")?;
                    continue;
                }
            };
            writeln!(
                out,
                "{}, followers: {}",
                if view.serves { "" } else { " does not serve" },
                view.followers
            )?;
            for seen in &view.nodes {
                let mut line = format!(
                    "  {} {} epoch {}",
                    name(&seen.id),
                    seen.flags.join(","),
                    seen.epoch
                );
                if let Some(master) = &seen.master {
                    let _ = write!(line, " of {}", name(master));
                }
                for slots in &seen.slots {
                    let _ = write!(line, " {}-{}", slots.start(), slots.end());
                }
                for slot in &seen.moving {
                    let _ = write!(line, " [{slot} moves]");
                }
                writeln!(
                    out,
                    "{line}{}",
                    if seen.connected { "" } else { " not connected" }
                )?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_versions() {
        let master = "07c3 127.0.0.1:30004@40004 myself,master - 0 1426238317239 4 connected 0-5460 5462 [93-<-292f] [77->-e7d1]";
        let master = Seen::parse(master).unwrap();
        assert!(master.is("master") && master.is("myself") && !master.is("fail"));
        assert_eq!(
            (&*master.id, master.epoch, &master.master, master.connected),
            ("07c3", 4, &None, true)
        );
        assert_eq!(
            (master.slots, master.moving),
            (vec![0..=5460, 5462..=5462], vec![93, 77])
        );
        let replica = "e7d1 127.0.0.1:30002@40002,,tls-port=0,shard-id=69bc slave,fail? 67ed 0 1 2 disconnected";
        let replica = Seen::parse(replica).unwrap();
        assert_eq!(
            (
                replica.master.as_deref(),
                replica.connected,
                replica.is("fail?")
            ),
            (Some("67ed"), false, true)
        );
        assert_eq!(Seen::parse("vars currentEpoch 6 lastVoteEpoch 0"), None);
    }

    const LINES: [&str; 3] = [
        "a 127.0.0.1:1@1 master - 0 0 3 connected 0-9",
        "b 127.0.0.1:2@2 master - 0 0 2 connected 10-16383",
        "c 127.0.0.1:3@3 slave a 0 0 3 connected",
    ];

    /// Returns the report of node number `own`, after replacing texts in some lines.
    fn view(own: usize, changes: &[(usize, &str, &str)]) -> View {
        let mut lines = LINES.map(str::to_owned);
        lines[own] = lines[own]
            .replace("master -", "myself,master -")
            .replace("slave", "myself,slave");
        for (n, old, new) in changes {
            assert!(lines[*n].contains(old));
            lines[*n] = lines[*n].replace(old, new);
        }
        let nodes = lines
            .iter()
            .map(|line| Seen::parse(line).unwrap())
            .collect();
        View {
            serves: true,
            in_sync: own == 2,
            followers: usize::from(own == 0),
            nodes,
        }
    }

    #[test]
    fn what_keeps_a_cluster_from_being_one() {
        // only the address of this server matters
        let node = SpawnedServer::start().unwrap();
        let check = |views: [Result<View, SpawnError>; 3]| {
            let of = ["a", "b", "c"]
                .into_iter()
                .zip(views)
                .map(|(id, view)| (&node, id, view))
                .collect();
            Views { of }.unsettled().unwrap_or_default()
        };
        let away = || {
            Err(SpawnError::Unreachable {
                addr: node.addr(),
                source: std::io::ErrorKind::TimedOut.into(),
            })
        };
        let all = || [0, 1, 2].map(|n| Ok(view(n, &[])));
        assert_eq!(check(all()), "");
        let [a, b, _] = all();
        assert_eq!(check([a, b, away()]), "", "a replica may be away");
        let [_, b, c] = all();
        assert!(check([away(), b, c]).contains("names a master that does not reply"));
        assert!(check([away(), away(), away()]).contains("no node replies"));
        for (wrong, wanted) in [
            (
                View {
                    serves: false,
                    ..view(2, &[])
                },
                "does not serve",
            ),
            (
                View {
                    in_sync: false,
                    ..view(2, &[])
                },
                "does not have its master's data",
            ),
            (view(2, &[(1, "0 2 conn", "0 2 disconn")]), "no connection"),
            (view(2, &[(1, "master", "master,fail?")]), "no connection"),
            (
                view(2, &[(1, "10-", "[10-<-a] 11-")]),
                "does not agree on b",
            ),
        ] {
            let [a, b, _] = all();
            let said = check([a, b, Ok(wrong)]);
            assert!(said.contains(wanted), "{said}: {wanted}");
        }
        let [_, b, c] = all();
        assert!(
            check([
                Ok(View {
                    followers: 0,
                    ..view(0, &[])
                }),
                b,
                c
            ])
            .contains("does not have its replicas")
        );
        let [a, _, c] = all();
        assert!(
            check([a, Ok(view(1, &[(2, "slave a", "slave b")])), c])
                .contains("does not agree on c")
        );
        let refused = SpawnError::Refused {
            addr: node.addr(),
            command: "x".into(),
            answer: "LOADING".into(),
        };
        let [a, b, _] = all();
        assert!(
            check([a, b, Err(refused)]).contains("LOADING"),
            "it is there, and not yet well"
        );
    }

    #[test]
    fn the_claim_of_the_highest_epoch_counts() {
        let node = SpawnedServer::start().unwrap();
        for (epoch, wanted) in [("4", "c"), ("2", "a")] {
            let claim = [
                (0, " 0-9", ""),
                (2, "slave a 0 0 3", &*format!("master - 0 0 {epoch}")),
                (2, "connected", "connected 0-9"),
            ];
            let claim = view(2, &claim);
            let of = vec![(&node, "a", Ok(view(0, &[]))), (&node, "c", Ok(claim))];
            assert_eq!(Views { of }.owner(3), Some(wanted));
        }
    }
}
