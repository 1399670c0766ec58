//! What the sentinels report about the servers, and the servers about themselves.

use std::collections::BTreeMap;

use super::super::{SpawnError, SpawnedServer, link::Answer, link_to};

/// The report of a sentinel.
#[derive(Debug)]
struct Report {
    /// The port of the master that it reports.
    master: Option<u16>,
    /// The flags that it reports for the master.
    flags: String,
    replicas: Vec<Answer>,
    sentinels: Vec<Answer>,
}

/// The role that a server reports.
#[derive(Debug, PartialEq, Eq)]
enum Role {
    /// With the ports of the replicas that have all of its data.
    Master(Vec<u16>),
    Replica {
        master: u16,
        /// `connected`, if all is well.
        state: String,
    },
}

#[derive(Debug)]
pub(super) struct Reports<'a> {
    servers: Vec<(&'a SpawnedServer, Result<Role, SpawnError>)>,
    sentinels: Vec<(&'a SpawnedServer, Result<Report, SpawnError>)>,
}

impl Report {
    /// Asks a sentinel about the master of this name.
    fn of(sentinel: &SpawnedServer, name: &str) -> Result<Self, SpawnError> {
        let mut link = link_to(sentinel)?;
        let master = link
            .call(&format!("SENTINEL GET-MASTER-ADDR-BY-NAME {name}"))?
            .items();
        Ok(Self {
            master: master.get(1).and_then(port),
            flags: link
                .call(&format!("SENTINEL MASTER {name}"))?
                .field("flags"),
            replicas: link.call(&format!("SENTINEL REPLICAS {name}"))?.items(),
            sentinels: link.call(&format!("SENTINEL SENTINELS {name}"))?.items(),
        })
    }
}

impl Role {
    fn of(server: &SpawnedServer) -> Result<Self, SpawnError> {
        let role = link_to(server)?.call("ROLE")?.items();
        let item = |n: usize| role.get(n).map_or(String::new(), Answer::text);
        Ok(if item(0) == "master" {
            let replicas = role.get(2).cloned().map_or(Vec::new(), Answer::items);
            Self::Master(
                replicas
                    .into_iter()
                    .filter_map(|replica| port(replica.items().get(1)?))
                    .collect(),
            )
        } else {
            Self::Replica {
                master: item(2).parse().unwrap_or(0),
                state: item(3),
            }
        })
    }
}

/// Returns whether these flags, of a master, a replica or a sentinel, show no problem. All other
/// flags are ignored: Valkey keeps outdated ones, from other sentinels' opinions of a master.
fn is_well(flags: &str) -> bool {
    let wrong = [
        "s_down",
        "o_down",
        "disconnected",
        "failover_in_progress",
        "promoted",
    ];
    !flags.is_empty() && !flags.split(',').any(|flag| wrong.contains(&flag))
}

fn port(answer: &Answer) -> Option<u16> {
    answer.text().parse().ok()
}

impl<'a> Reports<'a> {
    /// Asks all servers, and all sentinels about the master of this name.
    pub(super) fn of(
        servers: &'a [SpawnedServer],
        sentinels: &'a [SpawnedServer],
        name: &str,
    ) -> Self {
        Self {
            servers: servers
                .iter()
                .map(|server| (server, Role::of(server)))
                .collect(),
            sentinels: sentinels
                .iter()
                .map(|sentinel| (sentinel, Report::of(sentinel, name)))
                .collect(),
        }
    }

    fn sentinels(&self) -> impl Iterator<Item = (&'a SpawnedServer, &Report)> {
        self.sentinels
            .iter()
            .filter_map(|(sentinel, report)| Some((*sentinel, report.as_ref().ok()?)))
    }

    /// Returns the port that a majority of the replying sentinels report as the master's. Returns
    /// `None` if there is no majority.
    pub(super) fn named(&self) -> Option<u16> {
        let mut votes = BTreeMap::new();
        self.sentinels()
            .filter_map(|(_, report)| report.master)
            .for_each(|port| *votes.entry(port).or_insert(0) += 1);
        let most = self.sentinels().count() / 2 + 1;
        votes
            .into_iter()
            .find(|(_, votes)| *votes >= most)
            .map(|(port, _)| port)
    }

    /// Returns the first sentinel that reports this master.
    pub(super) fn who_names(&self, master: u16) -> Option<&'a SpawnedServer> {
        self.sentinels()
            .find(|(_, report)| report.master == Some(master))
            .map(|(sentinel, _)| sentinel)
    }

    /// Returns whether this sentinel reports this master.
    pub(super) fn names(&self, sentinel: &SpawnedServer, master: u16) -> bool {
        self.sentinels()
            .any(|(other, report)| other.port == sentinel.port && report.master == Some(master))
    }

    /// Returns whether a server reports that it is a master.
    pub(super) fn is_master(&self, port: u16) -> bool {
        self.servers
            .iter()
            .any(|(server, role)| server.port == port && matches!(role, Ok(Role::Master(_))))
    }

    /// Returns the error of the first server or sentinel that does not reply, if any.
    pub(super) fn away(&self) -> Option<String> {
        let servers = self
            .servers
            .iter()
            .find_map(|(_, role)| role.as_ref().err());
        servers
            .or_else(|| {
                self.sentinels
                    .iter()
                    .find_map(|(_, report)| report.as_ref().err())
            })
            .map(ToString::to_string)
    }

    /// Returns why not all replying servers are replicas of `master` with all of its data, or
    /// `None`.
    pub(super) fn servers_unsettled(&self, master: &SpawnedServer) -> Option<String> {
        let role = self
            .servers
            .iter()
            .find(|(server, _)| server.port == master.port)
            .map(|(_, role)| role);
        let Some(Ok(Role::Master(replicas))) = role else {
            return Some(format!("{} is not a master", master.addr()));
        };
        for (server, role) in &self.servers {
            let addr = server.addr();
            match role {
                Ok(_) if server.port == master.port => {}
                Ok(Role::Replica { master: of, state })
                    if *of == master.port
                        && state == "connected"
                        && replicas.contains(&server.port) => {}
                Ok(_) => return Some(format!("{addr} is not in sync with the master")),
                Err(SpawnError::Unreachable { .. }) => {}
                Err(error) => return Some(error.to_string()),
            }
        }
        None
    }

    /// Returns why the members of the group do not agree yet. Returns `None` if they do.
    pub(super) fn unsettled(&self) -> Option<String> {
        let Some(named) = self.named() else {
            return Some("no majority of the sentinels names a master".into());
        };
        let Some((master, _)) = self.servers.iter().find(|(server, _)| server.port == named) else {
            return Some(format!(
                "the sentinels name an unknown master, with port {named}"
            ));
        };
        if let Some(obstacle) = self.servers_unsettled(master) {
            return Some(obstacle);
        }
        let replicas = self
            .servers
            .iter()
            .filter(|(server, role)| server.port != named && role.is_ok());
        let replicas: Vec<_> = replicas.map(|(server, _)| server.port).collect();
        let sentinels: Vec<_> = self
            .sentinels()
            .map(|(sentinel, _)| sentinel.port)
            .collect();
        for (sentinel, report) in self.sentinels() {
            let addr = sentinel.addr();
            if report.master != Some(named) || !is_well(&report.flags) {
                return Some(format!("{addr} does not agree on the master"));
            }
            let knows = |known: &[Answer], port: u16, in_sync: bool| {
                let known = known
                    .iter()
                    .find(|known| known.field("port") == port.to_string());
                known.is_some_and(|known| {
                    is_well(&known.field("flags"))
                        && (!in_sync || known.field("master-link-status") == "ok")
                })
            };
            if !replicas
                .iter()
                .all(|port| knows(&report.replicas, *port, true))
            {
                return Some(format!("{addr} has not seen all replicas in sync"));
            }
            let others = sentinels.iter().filter(|port| **port != sentinel.port);
            if !others
                .into_iter()
                .all(|port| knows(&report.sentinels, *port, false))
            {
                return Some(format!("{addr} has no connection to another sentinel"));
            }
        }
        None
    }
}

/// For humans: a line for each server and sentinel, with what it reports about the others.
impl std::fmt::Display for Reports<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (server, role) in &self.servers {
            match role {
                Ok(Role::Master(replicas)) => {
                    writeln!(out, "{}: master of {replicas:?}", server.addr())?;
                }
                Ok(Role::Replica { master, state }) => {
                    writeln!(out, "{}: replica of {master}, {state}", server.addr())?;
                }
                Err(error) => writeln!(out, "{}: {error}", server.addr())?,
            }
        }
        for (sentinel, report) in &self.sentinels {
            let report = match report {
                Ok(report) => report,
                Err(error) => {
                    writeln!(out, "sentinel {}: {error}", sentinel.addr())?;
                    continue;
                }
            };
            let master = report.master.unwrap_or(0);
            writeln!(
                out,
                "sentinel {}: master {master} {}",
                sentinel.addr(),
                report.flags
            )?;
            for known in report.replicas.iter().chain(&report.sentinels) {
                let [port, flags] = ["port", "flags"].map(|name| known.field(name));
                let of = known.field("master-port");
                let of = if of.is_empty() {
                    of
                } else {
                    format!(" of {of}, link {}", known.field("master-link-status"))
                };
                writeln!(out, "  {port} {flags}{of}")?;
            }
        }
        Ok(())
    }
}
