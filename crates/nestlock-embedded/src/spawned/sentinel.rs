//! A master, its replicas, and the sentinels that watch them.

mod reports;

use std::{
    ffi::OsString,
    fmt::Write as _,
    thread,
    time::{Duration, Instant},
};

use self::reports::Reports;
use super::{SpawnError, SpawnedServer, link_to, plan::Plan, side_by_side};
use crate::ports;

/// More would be many processes for a slip of the finger.
const MOST: usize = 100;
/// Sentinels whose votes are split try again after 6 s only.
const PATIENCE: Duration = Duration::from_secs(60);
/// A failover that has not come about by then has been given up.
const GIVES_UP: Duration = Duration::from_secs(10);
/// What keeps sentinels from having a new master followed by another one at once, for which 500 ms are too short by
/// themselves. They ping it after one period or the down-after time, whichever is shorter: too late, for silence of that
/// time is an end. And what others said of the master before, that it was down, is forgotten after five of the other
/// period. Before 7.0, both are always 1 s.
const PERIODS: &str = "SENTINEL DEBUG PING-PERIOD 250 ASK-PERIOD 50";
/// Between two looks at all servers.
const LOOK: Duration = Duration::from_millis(10);

/// A Sentinel group of real servers of one's own: a master, replicas of it, and sentinels, which make a replica the master
/// if the master is away.
///
/// Each of them is a [`SpawnedServer`], which can be killed, restarted and stopped. All end when this is dropped, and also
/// when this process ends, however it does. A master that is away is noticed within half a second (before version 7.0:
/// 1.5 s); most sentinels name another one after 2 s in all, or 6 s more where their votes were split.
///
/// All methods block, a start for some 0.4 s, or 1 s with replicas.
///
/// ```
/// # fn main() -> Result<(), nestlock_embedded::SpawnError> {
/// use nestlock_embedded::SpawnedSentinel;
///
/// let group = SpawnedSentinel::start(2, 3)?; // 2 replicas, 3 sentinels: with the master, 6 processes
/// println!("{}", group.url()); // redis-sentinel://127.0.0.1:17001,127.0.0.1:20118,.../mymaster
///
/// let old = group.master()?;
/// old.kill()?;
/// let new = group.wait_for_another_master(old)?;
/// assert_ne!(new.addr(), old.addr());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SpawnedSentinel {
    // what is first ends first: no sentinel sees the servers go
    sentinels: Vec<SpawnedServer>,
    servers: Vec<SpawnedServer>,
}

impl SpawnedSentinel {
    /// What the sentinels call their master.
    pub const MASTER_NAME: &'static str = "mymaster";

    /// Starts a master with so many replicas, and so many sentinels, and waits until they know each other, and the
    /// replicas have the master's data and acknowledge what it writes: 0.4 s, or 1 s with replicas.
    ///
    /// Most sentinels must agree that a master is away: one is enough for a test of a client, three survive the loss of
    /// one. Without replicas, there is no failover.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: there is no sentinel, or there are more than 100 processes. [`SpawnError::NotFound`]: there
    /// is no server program. All others say why it does not run.
    pub fn start(replicas: usize, sentinels: usize) -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>(replicas, sentinels, [])
    }

    /// Starts a group whose master and replicas have further command line arguments: `["--min-replicas-to-write", "1"]`.
    ///
    /// They may not change the port, nor ask for TLS or a password.
    ///
    /// # Errors
    /// Those of [`SpawnedSentinel::start`]. An argument that the server does not know is [`SpawnError::Ended`].
    pub fn start_with<A>(replicas: usize, sentinels: usize, args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        if sentinels == 0 {
            return Err(invalid("a Sentinel group has at least one sentinel"));
        }
        let count = replicas.saturating_add(sentinels).saturating_add(1);
        if count > MOST {
            return Err(invalid(format!("{count} processes, and a Sentinel group has {MOST} at most")));
        }
        let args =
            ["--repl-diskless-sync-delay".into(), "0".into()].into_iter().chain(args.into_iter().map(Into::into));
        let plan = Plan::new(args.collect())?;
        // what the sentinels order is written there, so that it still holds after a restart
        let master = SpawnedServer::start_at(&plan.clone().configured(String::new()), ports::free)?;
        let config = format!("replicaof 127.0.0.1 {}\n", master.port);
        let start = || SpawnedServer::start_at(&plan.clone().configured(config.clone()), ports::free);
        let mut servers = vec![master];
        servers.extend(side_by_side((0..replicas).map(|_| start))?);
        let group = Self { sentinels: Vec::new(), servers };
        group.until("the replicas have the master's data", || group.reports().servers_unsettled(&group.servers[0]))?;
        let group = Self { sentinels: start_sentinels(&group.servers, sentinels)?, ..group };
        group.until("the sentinels know each other", || {
            let reports = group.reports();
            reports.away().or_else(|| reports.unsettled())
        })?;
        group.until("the replicas acknowledge", || unheard(&group.servers[0], replicas))?;
        Ok(group)
    }

    /// `redis-sentinel://127.0.0.1:PORT,127.0.0.1:PORT,.../mymaster`: all sentinels, the same whatever happens to them.
    #[must_use]
    pub fn url(&self) -> String {
        let addrs: Vec<_> = self.sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
        format!("redis-sentinel://{}/{}", addrs.join(","), Self::MASTER_NAME)
    }

    /// The sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[SpawnedServer] {
        &self.sentinels
    }

    /// The servers that they watch: first the one that was the master at the start, then those that were replicas.
    #[must_use]
    pub fn servers(&self) -> &[SpawnedServer] {
        &self.servers
    }

    /// The master: whom most of the sentinels that answer name. It need not run any more.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`]: no server is named by most of them.
    pub fn master(&self) -> Result<&SpawnedServer, SpawnError> {
        let reports = self.reports();
        let master = reports.named().and_then(|port| self.by_port(port));
        master.ok_or_else(|| SpawnError::Unsettled {
            what: "the sentinels do not agree on a master".into(),
            view: reports.to_string(),
        })
    }

    /// All servers but [`SpawnedSentinel::master`], whether they run or not.
    ///
    /// # Errors
    /// Those of [`SpawnedSentinel::master`].
    pub fn replicas(&self) -> Result<Vec<&SpawnedServer>, SpawnError> {
        let master = self.master()?;
        Ok(self.servers.iter().filter(|server| server.port != master.port).collect())
    }

    /// Has the sentinels make a replica the master while the old one runs (`SENTINEL FAILOVER`), and waits until most of
    /// them name it; returns it.
    ///
    /// The old one hears of it later, after 10 to 25 s: until then it is a second master, whose writes will be lost. To
    /// wait for that, there is [`SpawnedSentinel::wait_until_settled`]; to have it sooner,
    /// [`SpawnedSentinel::shorten_periods`].
    ///
    /// # Errors
    /// [`SpawnError::Invalid`]: there is no replica. [`SpawnError::Unsettled`]: not within 60 s.
    /// [`SpawnError::Refused`]: another answer than that a failover is under way, or that no replica is good now.
    pub fn failover(&self) -> Result<&SpawnedServer, SpawnError> {
        let old = self.master()?;
        if self.servers.len() < 2 {
            return Err(invalid("a failover needs a replica"));
        }
        let (order, mut refusal) = (format!("SENTINEL FAILOVER {}", Self::MASTER_NAME), None);
        // One sentinel only: those that hear of a new master later would have it followed by another one.
        let mut told: Option<(&SpawnedServer, Instant)> = None;
        let outcome = self.until("a replica is made the master", || {
            let reports = self.reports();
            if self.is_master_instead_of(old, &reports).is_some() {
                return None;
            }
            let sentinel = match told {
                Some((sentinel, when)) if when.elapsed() < GIVES_UP || !reports.names(sentinel, old.port) => {
                    return Some(format!("{} has been told", sentinel.addr()));
                }
                Some((sentinel, _)) => sentinel,
                None => match reports.who_names(old.port) {
                    Some(sentinel) => sentinel,
                    None => return Some("no sentinel names the old master".into()),
                },
            };
            match link_to(sentinel).and_then(|mut link| link.call(&order)) {
                Ok(_) => told = Some((sentinel, Instant::now())),
                Err(SpawnError::Refused { answer, .. })
                    if answer.starts_with("INPROG") || answer.starts_with("NOGOODSLAVE") =>
                {
                    return Some(answer);
                }
                Err(error) => {
                    refusal = Some(error);
                    return None;
                }
            }
            Some(format!("{} has been told", sentinel.addr()))
        });
        refusal.map_or(outcome, Err)?;
        self.wait_for_another_master(old)
    }

    /// Waits until most of the sentinels that answer name another master, which says that it is one; returns it.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`]: not within 60 s.
    pub fn wait_for_another_master(&self, old: &SpawnedServer) -> Result<&SpawnedServer, SpawnError> {
        let mut new = None;
        self.until("most sentinels name another master", || {
            new = self.is_master_instead_of(old, &self.reports());
            if new.is_none() { Some(format!("not one that is no longer {}", old.addr())) } else { None }
        })?;
        new.ok_or_else(|| invalid("no master"))
    }

    fn is_master_instead_of(&self, old: &SpawnedServer, reports: &Reports<'_>) -> Option<&SpawnedServer> {
        let port = reports.named().filter(|port| *port != old.port && reports.is_master(*port))?;
        self.by_port(port)
    }

    /// Waits until all sentinels that answer name the same master, and know each other, and all other servers that answer
    /// are its replicas, with all of its data. After a failover that takes 10 to 25 s, or 1 s with
    /// [`SpawnedSentinel::shorten_periods`].
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`]: not within 60 s.
    pub fn wait_until_settled(&self) -> Result<(), SpawnError> {
        self.until("the sentinels and the servers agree", || self.reports().unsettled())
    }

    /// Makes the sentinels ask the servers for their roles every 200 ms instead of every 10 s (`SENTINEL DEBUG`): an old
    /// master that comes back is a replica within about 1 s. A failover takes as long as before. A sentinel that is
    /// restarted has forgotten it: then call this again.
    ///
    /// # Errors
    /// [`SpawnError::Refused`]: before version 7.0, sentinels do not have this. [`SpawnError::Unreachable`].
    pub fn shorten_periods(&self) -> Result<(), SpawnError> {
        for sentinel in &self.sentinels {
            let mut link = link_to(sentinel)?;
            link.call("SENTINEL DEBUG INFO-PERIOD 200 PUBLISH-PERIOD 200")?;
            link.call(PERIODS)?;
        }
        Ok(())
    }

    /// What each process says of the others, for people: in the message of a test that fails.
    #[must_use]
    pub fn view(&self) -> String {
        self.reports().to_string()
    }

    fn reports(&self) -> Reports<'_> {
        Reports::of(&self.servers, &self.sentinels)
    }

    fn by_port(&self, port: u16) -> Option<&SpawnedServer> {
        self.servers.iter().find(|server| server.port == port)
    }

    /// Waits until nothing is in the way.
    fn until(&self, what: &str, mut obstacle: impl FnMut() -> Option<String>) -> Result<(), SpawnError> {
        let start = Instant::now();
        while let Some(obstacle) = obstacle() {
            if start.elapsed() > PATIENCE {
                let what = format!("not within {PATIENCE:?}: {what}; {obstacle}");
                return Err(SpawnError::Unsettled { what, view: self.view() });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// What keeps so many replicas from acknowledging what their master says: for a second, one that has all of its data may not do
/// so yet.
fn unheard(master: &SpawnedServer, replicas: usize) -> Option<String> {
    let acknowledged = || {
        let mut link = link_to(master)?;
        // replicas are told, and no key is written
        link.call("PUBLISH nestlock-embedded heard")?;
        Ok(link.call(&format!("WAIT {replicas} 50"))?.text())
    };
    let said = acknowledged().unwrap_or_else(|error: SpawnError| error.to_string());
    (said.parse() != Ok(replicas)).then(|| format!("{} is heard by {said} of {replicas}", master.addr()))
}

fn start_sentinels(servers: &[SpawnedServer], count: usize) -> Result<Vec<SpawnedServer>, SpawnError> {
    let plan = Plan::new(vec!["--sentinel".into()])?.configured(sentinel_config(servers, count));
    let sentinels = side_by_side((0..count).map(|_| || SpawnedServer::start_at(&plan, ports::free)))?;
    // Introduces each to all others, in the words that they use, when all of them listen: they would need seconds to find
    // each other, and one more to try again where they were not there yet.
    let mut links = sentinels.iter().map(link_to).collect::<Result<Vec<_>, _>>()?;
    let ids = links.iter_mut().map(|link| Ok(link.call("SENTINEL MYID")?.text()));
    let ids = ids.collect::<Result<Vec<_>, SpawnError>>()?;
    let (name, master) = (SpawnedSentinel::MASTER_NAME, servers[0].port);
    for (n, link) in links.iter_mut().enumerate() {
        let others = sentinels.iter().zip(&ids).enumerate().filter(|(other, _)| *other != n);
        for (_, (other, id)) in others {
            let hello = format!("127.0.0.1,{},{id},0,{name},127.0.0.1,{master},0", other.port);
            link.call(&format!("PUBLISH __sentinel__:hello {hello}"))?;
        }
        match link.call(PERIODS) {
            Err(SpawnError::Refused { .. }) => {
                link.call(&format!("SENTINEL SET {name} down-after-milliseconds 1500"))?;
            }
            outcome => _ = outcome?,
        }
    }
    Ok(sentinels)
}

fn sentinel_config(servers: &[SpawnedServer], sentinels: usize) -> String {
    let name = SpawnedSentinel::MASTER_NAME;
    let quorum = sentinels / 2 + 1;
    let mut config = format!("sentinel monitor {name} 127.0.0.1 {} {quorum}\n", servers[0].port);
    let _ = writeln!(config, "sentinel down-after-milliseconds {name} 500");
    let _ = writeln!(config, "sentinel failover-timeout {name} 3000");
    let _ = writeln!(config, "sentinel parallel-syncs {name} {}", servers.len());
    for server in &servers[1..] {
        let _ = writeln!(config, "sentinel known-replica {name} 127.0.0.1 {}", server.port);
    }
    config
}

fn invalid(what: impl Into<String>) -> SpawnError {
    SpawnError::Invalid { what: what.into() }
}
