//! The faults and gaps of a run, by time and place: they excuse what would be a violation
//! otherwise.

use std::collections::{BTreeMap, HashMap};

use super::op::{Client, Op, process};
use crate::{
    clock::{MILLI, SECOND},
    kinds::Kind,
    topology::SERVERS,
};

/// An upper bound for the length of a fault or gap.
const LONGEST: u64 = 20 * SECOND;

/// How long the recovery from a fault may take.
pub(super) const RECOVERY: u64 = 2 * SECOND;

/// How long a mute connection may last. The client sends a heartbeat per second, and gives the
/// connection up after two without a reply.
const MUTE: u64 = 4 * SECOND;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// No thread of the process ran.
    Starved,
    /// The process's runtime did not run.
    Blocked,
}

/// A fault, from a line of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PastFault {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) lane: String,
    pub(crate) sort: String,
    pub(crate) target: usize,
    pub(crate) server: usize,
    /// `kept`, `forgot` or `failed`.
    pub(crate) effect: String,
    pub(crate) line: String,
}

#[derive(Debug, Clone, Copy)]
struct Gap {
    from: u64,
    to: u64,
    event: Event,
}

#[derive(Debug, Default)]
pub(crate) struct Weather {
    pub(crate) faults: Vec<PastFault>,
    gaps: HashMap<String, Vec<Gap>>,
    servers: BTreeMap<usize, Vec<Gap>>,
}

impl Weather {
    pub(crate) fn read(journal: &str) -> Self {
        let fault = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            let [
                start,
                "fault",
                end,
                lane,
                sort,
                target,
                server,
                _,
                _,
                effect,
                ..,
            ] = words[..]
            else {
                return None;
            };
            let after = if sort == "mute" { MUTE } else { 0 };
            Some(PastFault {
                start: start.parse().ok()?,
                end: end.parse::<u64>().ok()? + after,
                lane: lane.to_owned(),
                sort: sort.to_owned(),
                target: target.parse().ok()?,
                server: server.parse().ok()?,
                effect: effect.to_owned(),
                line: line.to_owned(),
            })
        };
        Self {
            faults: journal.lines().filter_map(fault).collect(),
            ..Self::default()
        }
    }

    pub(crate) fn gap(&mut self, event: Event, process: &str, from: u64, to: u64) {
        self.gaps
            .entry(process.to_owned())
            .or_default()
            .push(Gap { from, to, event });
    }

    pub(crate) fn server_gap(&mut self, server: usize, from: u64, to: u64) {
        self.servers.entry(server).or_default().push(Gap {
            from,
            to,
            event: Event::Starved,
        });
    }

    pub(crate) fn sort(&mut self) {
        self.faults.sort_by_key(|fault| fault.start);
        self.gaps
            .values_mut()
            .chain(self.servers.values_mut())
            .for_each(|gaps| gaps.sort_by_key(|gap| gap.from));
    }

    /// Returns the faults between two times.
    pub(crate) fn faults(&self, from: u64, to: u64) -> impl Iterator<Item = &PastFault> {
        let first = self
            .faults
            .partition_point(|fault| fault.start + LONGEST < from);
        let near = self.faults[first..]
            .iter()
            .take_while(move |fault| fault.start <= to);
        near.filter(move |fault| fault.end >= from)
    }

    /// Returns `true` if there was a fault of this process, client or server.
    pub(crate) fn is_foul(&self, who: &Place, from: u64, to: u64) -> bool {
        self.faults(from, to).any(|fault| who.is_met_by(fault))
    }

    /// Returns how long this process, the servers and the proxies did not run, added up. With
    /// `Blocked`, gaps of the process's runtime count as well.
    pub(crate) fn starved(&self, who: &Place, event: Event, from: u64, to: u64) -> u64 {
        let own = self.gaps.get(who.process).map_or(&[][..], Vec::as_slice);
        let proxies = self.gaps.get("run").map_or(&[][..], Vec::as_slice);
        let servers = (0..)
            .take_while(|server| who.meets(*server))
            .filter_map(|server| self.servers.get(&server));
        let all = [own, proxies].into_iter().chain(servers.map(Vec::as_slice));
        all.map(|gaps| {
            let first = gaps.partition_point(|gap| gap.from + LONGEST < from);
            let near = gaps[first..].iter().take_while(|gap| gap.from < to);
            let counts = near.filter(|gap| gap.event == Event::Starved || gap.event == event);
            counts
                .map(|gap| gap.to.min(to).saturating_sub(gap.from.max(from)))
                .sum::<u64>()
        })
        .sum()
    }

    /// Returns the faults in which a server with locks of this kind lost its data.
    pub(crate) fn forgot(&self, kind: Kind) -> impl Iterator<Item = &PastFault> {
        self.faults.iter().filter(move |fault| {
            fault.effect == "forgot" && (fault.server == 0 || kind == Kind::Red)
        })
    }

    /// Returns `true` if such a fault occurred between two times.
    pub(crate) fn has_forgotten(&self, kind: Kind, from: u64, to: u64) -> bool {
        let mut near = self
            .faults(from, to)
            .filter(|fault| fault.effect == "forgot");
        near.any(|fault| fault.server == 0 || kind == Kind::Red)
    }
}

/// Where an operation happens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    process: &'a str,
    slot: usize,
    client: Client,
    kind: Kind,
}

impl<'a> Place<'a> {
    pub(crate) fn of(op: &'a Op, client: Client) -> Self {
        Self::new(&op.task, client, op.kind)
    }

    pub(crate) fn new(task: &'a str, client: Client, kind: Kind) -> Self {
        let process = process(task);
        let slot = process
            .trim_start_matches('s')
            .split('g')
            .next()
            .and_then(|slot| slot.parse().ok());
        Self {
            process,
            slot: slot.unwrap_or(usize::MAX),
            client,
            kind,
        }
    }

    fn meets(&self, server: usize) -> bool {
        server == 0 || (self.kind == Kind::Red && server < SERVERS)
    }

    pub(crate) fn is_met_by(&self, fault: &PastFault) -> bool {
        match &*fault.lane {
            "server" => self.meets(fault.server),
            // all processes share the machine
            "process" => fault.sort == "hogs" || fault.target == self.slot,
            _ => self.client.link == Some(fault.target) && self.meets(fault.server),
        }
    }
}

/// Returns the delay that a gap excuses: several steps may be delayed by it.
pub(crate) fn slack(starved: u64) -> u64 {
    if starved == 0 {
        0
    } else {
        3 * starved + 20 * MILLI
    }
}
