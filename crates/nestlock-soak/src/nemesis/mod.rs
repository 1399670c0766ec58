//! Faults, in independent lanes, so that two may occur at once. Each fault is written to a journal
//! with its beginning and its end.

mod fault;
mod link;
mod process;
mod server;

use std::{
    io,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rand::{Rng, rngs::StdRng};

use self::fault::{Effect, Fault};
pub(crate) use self::process::Processes;
use crate::{
    clock::{SECOND, now, sleep_until},
    history::History,
    servers::Servers,
    settings::{Mode, Settings},
    topology::SERVERS,
};

/// The length of a round, and of its first part, which has faults. The rest shows what is lost or
/// late without any.
const ROUND: u64 = 12 * SECOND;
const FAULTY: u64 = 8 * SECOND;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Half of the links: 0 those with even numbers, 1 those with odd ones.
    Link(usize),
    Server,
    Process,
}

impl Lane {
    fn name(self) -> String {
        match self {
            Self::Link(half) => format!("link{half}"),
            Self::Server => "server".to_owned(),
            Self::Process => "process".to_owned(),
        }
    }

    /// Returns the kinds of faults, with the shortest and the longest duration of each in
    /// milliseconds.
    fn sorts(self, mode: Mode) -> Vec<(&'static str, u64, u64)> {
        let mut sorts = match self {
            Self::Link(_) => link::SORTS.to_vec(),
            Self::Server => server::SORTS.to_vec(),
            Self::Process => process::SORTS.to_vec(),
        };
        if self == Self::Server && mode == Mode::Plain {
            sorts.extend(server::FORGETFUL);
        }
        sorts
    }
}

/// What the lanes share.
pub(crate) struct Nemesis<'a> {
    pub(crate) settings: &'a Settings,
    pub(crate) mode: Mode,
    pub(crate) servers: &'a Servers,
    pub(crate) journal: &'a History,
    pub(crate) epoch: u64,
    /// No fault begins after this.
    pub(crate) until: u64,
    pub(crate) schedule: Vec<(String, u64, Fault)>,
}

impl Nemesis<'_> {
    /// Runs all faults of a lane, one after the other.
    pub(crate) fn run(&self, lane: Lane, mut processes: Option<&mut Processes>) {
        if !self.schedule.is_empty() {
            for (_, offset, fault) in self
                .schedule
                .iter()
                .filter(|(name, ..)| *name == lane.name())
            {
                sleep_until(self.epoch + offset);
                self.strike(lane, fault, processes.as_deref_mut());
            }
            return;
        }
        let mut rng = self.settings.rng(match lane {
            Lane::Link(half) => 11 + half as u64,
            Lane::Server => 21,
            Lane::Process => 31,
        });
        let mut sorts = lane.sorts(self.mode);
        sorts.retain(|(sort, ..)| {
            self.settings.faults.is_empty() || self.settings.faults.iter().any(|name| name == sort)
        });
        if sorts.is_empty() || self.mode == Mode::None {
            return;
        }
        loop {
            let gap = match lane {
                Lane::Link(_) => rng.random_range(20..400),
                Lane::Server => rng.random_range(100..1200),
                Lane::Process => rng.random_range(300..2500),
            };
            thread::sleep(Duration::from_millis(gap));
            let quiet = (now() - self.epoch) % ROUND;
            if quiet > FAULTY {
                sleep_until(now() + ROUND - quiet);
            }
            if now() > self.until {
                return;
            }
            let fault = self.random(lane, &sorts, &mut rng);
            self.strike(lane, &fault, processes.as_deref_mut());
        }
    }

    fn random(&self, lane: Lane, sorts: &[(&str, u64, u64)], rng: &mut StdRng) -> Fault {
        let (sort, least, most) = sorts[rng.random_range(0..sorts.len())];
        let links = self.servers.proxies.len();
        let target = match lane {
            Lane::Link(half) => {
                (rng.random_range(0..links.div_ceil(2)) * 2 + half).min(links.saturating_sub(1))
            }
            Lane::Server => 0,
            Lane::Process => rng.random_range(0..self.settings.workers),
        };
        // most locks are on the first server
        let server = if rng.random_ratio(2, 3) {
            0
        } else {
            rng.random_range(0..SERVERS)
        };
        Fault {
            sort: sort.to_owned(),
            target,
            server,
            ms: rng.random_range(least..=most),
            arg: rng.random_range(0..1000),
        }
    }

    fn strike(&self, lane: Lane, fault: &Fault, processes: Option<&mut Processes>) {
        let start = now();
        let outcome = match (lane, processes) {
            (Lane::Link(_), _) => {
                link::strike(&self.servers.proxies[fault.target][fault.server], fault)
            }
            (Lane::Server, _) => {
                server::strike(&self.servers.servers[fault.server], fault, self.mode)
            }
            (Lane::Process, Some(processes)) => process::strike(processes, fault),
            (Lane::Process, None) => unreachable!("the process lane has the processes"),
        };
        let effect = match outcome {
            Ok(Effect::Kept) => "kept".to_owned(),
            Ok(Effect::Forgot) => "forgot".to_owned(),
            Err(error) => format!("failed {error}"),
        };
        let Fault {
            sort,
            target,
            server,
            ms,
            arg,
        } = fault;
        let (end, lane) = (now(), lane.name());
        self.journal.write_at(
            start,
            format_args!("fault {end} {lane} {sort} {target} {server} {ms} {arg} {effect}"),
        );
    }
}

/// Reads the faults of a journal: their lanes, and their beginnings in nanoseconds after the epoch.
pub(crate) fn read_schedule(path: &Path) -> io::Result<Vec<(String, u64, Fault)>> {
    let text = std::fs::read_to_string(path)?;
    let mut epoch = None;
    let mut faults = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |word: &str| word.parse::<u64>().unwrap_or(0);
        match words[..] {
            [time, "epoch"] => epoch = Some(number(time)),
            [time, "fault", _, lane, sort, target, server, ms, arg, ..] => {
                let fault = Fault {
                    sort: sort.to_owned(),
                    target: number(target) as usize,
                    server: number(server) as usize,
                    ms: number(ms),
                    arg: number(arg),
                };
                faults.push((
                    lane.to_owned(),
                    number(time).saturating_sub(epoch.unwrap_or(0)),
                    fault,
                ));
            }
            _ => {}
        }
    }
    faults.sort_by_key(|(_, offset, _)| *offset);
    Ok(faults)
}

/// Keeps a processor busy for `ms` milliseconds.
pub(crate) fn hog(ms: u64) -> bool {
    let (start, mut n) = (Instant::now(), 0_u64);
    while start.elapsed() < Duration::from_millis(ms) {
        n = std::hint::black_box(n.wrapping_add(1));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_is_a_schedule() {
        let folder =
            std::env::temp_dir().join(format!("nestlock-soak-test-{}", std::process::id()));
        std::fs::write(&folder, "# seed=1\n1000 epoch\n9000 fault 9500 link1 ghost 3 0 40 250 kept\n7000 fault 8000 server stop 0 2 5 6 failed x y\n").unwrap();
        let schedule = read_schedule(&folder).unwrap();
        std::fs::remove_file(&folder).unwrap();
        let fault = Fault {
            sort: "ghost".into(),
            target: 3,
            server: 0,
            ms: 40,
            arg: 250,
        };
        assert_eq!(schedule.len(), 2);
        assert_eq!(
            (schedule[0].1, &schedule[0].2.sort[..], schedule[0].2.server),
            (6000, "stop", 2)
        );
        assert_eq!(schedule[1], ("link1".to_owned(), 8000, fault));
    }
}
