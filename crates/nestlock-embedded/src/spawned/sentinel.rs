//! A group of real servers: a master, its replicas, and the sentinels that monitor them.

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

/// The maximum number of processes. A larger number is likely a typo.
const MOST: usize = 100;
/// How long the methods wait. After a split vote, sentinels retry only after 6 s.
const PATIENCE: Duration = Duration::from_secs(60);
/// A failover that is not done after this time has been given up by its sentinel.
const GIVES_UP: Duration = Duration::from_secs(10);
/// Keeps the sentinels from failing over again right after a failover, as they would with the
/// down-after time of 500 ms alone. A sentinel pings the new master after PING-PERIOD or the
/// down-after time, whichever is shorter. The latter is too late: a master that has been silent for
/// that long counts as down. The other sentinels' reports that the old master was down expire after
/// five ASK-PERIODs. Before 7.0, both periods are fixed at 1 s.
const PERIODS: &str = "SENTINEL DEBUG PING-PERIOD 250 ASK-PERIOD 50";
/// The pause between two polls of all servers.
const LOOK: Duration = Duration::from_millis(10);

/// A Sentinel group of real servers: a master, its replicas, and sentinels, which promote a replica
/// if the master is down.
///
/// Each of them is a [`SpawnedServer`], which can be killed, restarted and stopped. All end when
/// this is dropped, and also when this process ends, however it ends. The loss of the master is
/// detected within 500 ms (before version 7.0: 1.5 s). A majority of the sentinels report a new
/// master after a total of 2 s, or 6 s more if their votes were split.
///
/// All methods block. A start takes about 0.4 s, or 1 s with replicas.
///
/// ```
/// # fn main() -> Result<(), nestlock_embedded::SpawnError> {
/// use nestlock_embedded::SpawnedSentinel;
///
/// let group = SpawnedSentinel::start(2, 3)?; // 2 replicas, 3 sentinels, the master: 6 processes
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
    // fields drop in order: the sentinels end first, so that they do not see the servers go down
    sentinels: Vec<SpawnedServer>,
    servers: Vec<SpawnedServer>,
}

impl SpawnedSentinel {
    /// The name of the master in the sentinels' configuration.
    pub const MASTER_NAME: &'static str = "mymaster";

    /// Starts a master with `replicas` replicas, and `sentinels` sentinels. Waits until the
    /// sentinels know each other, and the replicas have the master's data and acknowledge its
    /// writes: 0.4 s, or 1 s with replicas.
    ///
    /// A majority of the sentinels must agree that a master is down. One sentinel is enough to test
    /// a client; three survive the loss of one. Without replicas, there is no failover.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if there is no sentinel, or there are more than 100 processes.
    /// [`SpawnError::NotFound`] if there is no server program. All other errors say why a server
    /// does not run.
    pub fn start(replicas: usize, sentinels: usize) -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>(replicas, sentinels, [])
    }

    /// Starts a group whose master and replicas have additional command line arguments, such as
    /// `["--min-replicas-to-write", "1"]`.
    ///
    /// They may not change the port, nor require TLS or a password.
    ///
    /// # Errors
    /// Those of [`SpawnedSentinel::start`]. [`SpawnError::Ended`] if the server does not know an
    /// argument.
    pub fn start_with<A>(replicas: usize, sentinels: usize, args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        if sentinels == 0 {
            return Err(invalid("a Sentinel group needs at least one sentinel"));
        }
        let count = replicas.saturating_add(sentinels).saturating_add(1);
        if count > MOST {
            return Err(invalid(format!(
                "{count} processes: a Sentinel group may have at most {MOST}"
            )));
        }
        let args = ["--repl-diskless-sync-delay".into(), "0".into()]
            .into_iter()
            .chain(args.into_iter().map(Into::into));
        let plan = Plan::new(args.collect())?;
        // each server has a configuration file: what the sentinels change is saved there, and
        // survives a restart
        let master = SpawnedServer::start_at(&plan.clone().configured(String::new()), ports::free)?;
        let config = format!("replicaof 127.0.0.1 {}\n", master.port);
        let start =
            || SpawnedServer::start_at(&plan.clone().configured(config.clone()), ports::free);
        let mut servers = vec![master];
        servers.extend(side_by_side((0..replicas).map(|_| start))?);
        let group = Self {
            sentinels: Vec::new(),
            servers,
        };
        group.until("the replicas have the master's data", || {
            group.reports().servers_unsettled(&group.servers[0])
        })?;
        let group = Self {
            sentinels: start_sentinels(&group.servers, sentinels)?,
            ..group
        };
        group.until("the sentinels know each other", || {
            let reports = group.reports();
            reports.away().or_else(|| reports.unsettled())
        })?;
        group.until("the replicas acknowledge", || {
            unheard(&group.servers[0], replicas)
        })?;
        Ok(group)
    }

    /// Returns `redis-sentinel://127.0.0.1:PORT,127.0.0.1:PORT,.../mymaster` with all sentinels. It
    /// never changes.
    #[must_use]
    pub fn url(&self) -> String {
        let addrs: Vec<_> = self
            .sentinels
            .iter()
            .map(|sentinel| sentinel.addr().to_string())
            .collect();
        format!("redis-sentinel://{}/{}", addrs.join(","), Self::MASTER_NAME)
    }

    /// Returns the sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[SpawnedServer] {
        &self.sentinels
    }

    /// Returns the servers that the sentinels monitor: first the initial master, then the initial
    /// replicas.
    #[must_use]
    pub fn servers(&self) -> &[SpawnedServer] {
        &self.servers
    }

    /// Returns the server that a majority of the replying sentinels report as the master. It may be
    /// down.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`] if there is no such majority.
    pub fn master(&self) -> Result<&SpawnedServer, SpawnError> {
        let reports = self.reports();
        let master = reports.named().and_then(|port| self.by_port(port));
        master.ok_or_else(|| SpawnError::Unsettled {
            what: "the sentinels do not agree on a master".into(),
            view: reports.to_string(),
        })
    }

    /// Returns all servers except [`SpawnedSentinel::master`], whether they run or not.
    ///
    /// # Errors
    /// Those of [`SpawnedSentinel::master`].
    pub fn replicas(&self) -> Result<Vec<&SpawnedServer>, SpawnError> {
        let master = self.master()?;
        Ok(self
            .servers
            .iter()
            .filter(|server| server.port != master.port)
            .collect())
    }

    /// Makes the sentinels promote a replica while the old master is running (`SENTINEL FAILOVER`).
    /// Waits until a majority of them report the new master, and returns it.
    ///
    /// The old master learns of it only after 10 to 25 s. Until then it is a second master, whose
    /// writes will be lost. [`SpawnedSentinel::wait_until_settled`] waits for the end of this time,
    /// and [`SpawnedSentinel::shorten_periods`] shortens it.
    ///
    /// # Errors
    /// [`SpawnError::Invalid`] if there is no replica. [`SpawnError::Unsettled`] if it takes more
    /// than 60 s. [`SpawnError::Refused`] if a sentinel refuses for another reason than a failover
    /// in progress, or the temporary lack of a good replica.
    pub fn failover(&self) -> Result<&SpawnedServer, SpawnError> {
        let old = self.master()?;
        if self.servers.len() < 2 {
            return Err(invalid("a failover needs a replica"));
        }
        let (order, mut refusal) = (format!("SENTINEL FAILOVER {}", Self::MASTER_NAME), None);
        // Only one sentinel gets the command: another one, which learns of the new master later,
        // would start a second failover.
        let mut told: Option<(&SpawnedServer, Instant)> = None;
        let outcome = self.until("a replica is made the master", || {
            let reports = self.reports();
            if self.is_master_instead_of(old, &reports).is_some() {
                return None;
            }
            let sentinel = match told {
                Some((sentinel, when))
                    if when.elapsed() < GIVES_UP || !reports.names(sentinel, old.port) =>
                {
                    return Some(format!("{} got the command", sentinel.addr()));
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
            Some(format!("{} got the command", sentinel.addr()))
        });
        refusal.map_or(outcome, Err)?;
        self.wait_for_another_master(old)
    }

    /// Waits until a majority of the replying sentinels report another master than `old`, and it
    /// says that it is one. Returns the new master.
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`] if it takes more than 60 s.
    pub fn wait_for_another_master(
        &self,
        old: &SpawnedServer,
    ) -> Result<&SpawnedServer, SpawnError> {
        let mut new = None;
        self.until("most sentinels name another master", || {
            new = self.is_master_instead_of(old, &self.reports());
            if new.is_none() {
                Some(format!(
                    "they do not name another master than {} yet",
                    old.addr()
                ))
            } else {
                None
            }
        })?;
        new.ok_or_else(|| invalid("no master"))
    }

    fn is_master_instead_of(
        &self,
        old: &SpawnedServer,
        reports: &Reports<'_>,
    ) -> Option<&SpawnedServer> {
        let port = reports
            .named()
            .filter(|port| *port != old.port && reports.is_master(*port))?;
        self.by_port(port)
    }

    /// Waits until all replying sentinels report the same master and know each other, and all other
    /// replying servers are its replicas, with all of its data. After a failover this takes 10 to
    /// 25 s, or 1 s with [`SpawnedSentinel::shorten_periods`].
    ///
    /// # Errors
    /// [`SpawnError::Unsettled`] if it takes more than 60 s.
    pub fn wait_until_settled(&self) -> Result<(), SpawnError> {
        self.until("the sentinels and the servers agree", || {
            self.reports().unsettled()
        })
    }

    /// Makes the sentinels query the servers' roles every 200 ms instead of every 10 s (`SENTINEL
    /// DEBUG`). An old master that comes back is then a replica within about 1 s. A failover takes
    /// as long as before. A sentinel loses this setting when it restarts: then call this again.
    ///
    /// # Errors
    /// [`SpawnError::Refused`]: before version 7.0, sentinels do not support it.
    /// [`SpawnError::Unreachable`].
    pub fn shorten_periods(&self) -> Result<(), SpawnError> {
        for sentinel in &self.sentinels {
            let mut link = link_to(sentinel)?;
            link.call("SENTINEL DEBUG INFO-PERIOD 200 PUBLISH-PERIOD 200")?;
            link.call(PERIODS)?;
        }
        Ok(())
    }

    /// Returns what each process reports about the others, as text for the message of a failed
    /// test.
    #[must_use]
    pub fn view(&self) -> String {
        self.reports().to_string()
    }

    fn reports(&self) -> Reports<'_> {
        Reports::of(&self.servers, &self.sentinels, Self::MASTER_NAME)
    }

    fn by_port(&self, port: u16) -> Option<&SpawnedServer> {
        self.servers.iter().find(|server| server.port == port)
    }

    /// Polls until `obstacle` returns `None`. Fails after 60 s.
    fn until(
        &self,
        what: &str,
        mut obstacle: impl FnMut() -> Option<String>,
    ) -> Result<(), SpawnError> {
        let start = Instant::now();
        while let Some(obstacle) = obstacle() {
            if start.elapsed() > PATIENCE {
                let what = format!("not within {PATIENCE:?}: {what}; {obstacle}");
                return Err(SpawnError::Unsettled {
                    what,
                    view: self.view(),
                });
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }
}

/// Returns why fewer than `replicas` replicas acknowledge their master's writes. Returns `None` if
/// all do. A replica with all of the data may need up to a second before it does.
fn unheard(master: &SpawnedServer, replicas: usize) -> Option<String> {
    let acknowledged = || {
        let mut link = link_to(master)?;
        // this reaches the replicas without writing a key
        link.call("PUBLISH nestlock-embedded heard")?;
        Ok(link.call(&format!("WAIT {replicas} 50"))?.text())
    };
    let said = acknowledged().unwrap_or_else(|error: SpawnError| error.to_string());
    (said.parse() != Ok(replicas)).then(|| {
        format!(
            "writes of {} are acknowledged by {said} of {replicas} replicas",
            master.addr()
        )
    })
}

fn start_sentinels(
    servers: &[SpawnedServer],
    count: usize,
) -> Result<Vec<SpawnedServer>, SpawnError> {
    let plan = Plan::new(vec!["--sentinel".into()])?.configured(sentinel_config(servers, count));
    let sentinels =
        side_by_side((0..count).map(|_| || SpawnedServer::start_at(&plan, ports::free)))?;
    // Introduces each sentinel to all others, by their own hello messages, when all of them listen.
    // On their own, they would need seconds to find each other, and one more to retry if the other
    // one was not up yet.
    let mut links = sentinels
        .iter()
        .map(link_to)
        .collect::<Result<Vec<_>, _>>()?;
    let ids = links
        .iter_mut()
        .map(|link| Ok(link.call("SENTINEL MYID")?.text()));
    let ids = ids.collect::<Result<Vec<_>, SpawnError>>()?;
    let (name, master) = (SpawnedSentinel::MASTER_NAME, servers[0].port);
    for (n, link) in links.iter_mut().enumerate() {
        let others = sentinels
            .iter()
            .zip(&ids)
            .enumerate()
            .filter(|(other, _)| *other != n);
        for (_, (other, id)) in others {
            let hello = format!(
                "127.0.0.1,{},{id},0,{name},127.0.0.1,{master},0",
                other.port
            );
            link.call(&format!("PUBLISH __sentinel__:hello {hello}"))?;
        }
        match link.call(PERIODS) {
            // before 7.0, the periods are fixed at 1 s: see `PERIODS`
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
    let mut config = format!(
        "sentinel monitor {name} 127.0.0.1 {} {quorum}\n",
        servers[0].port
    );
    let _ = writeln!(config, "sentinel down-after-milliseconds {name} 500");
    let _ = writeln!(config, "sentinel failover-timeout {name} 3000");
    let _ = writeln!(config, "sentinel parallel-syncs {name} {}", servers.len());
    for server in &servers[1..] {
        let _ = writeln!(
            config,
            "sentinel known-replica {name} 127.0.0.1 {}",
            server.port
        );
    }
    config
}

fn invalid(what: impl Into<String>) -> SpawnError {
    SpawnError::Invalid { what: what.into() }
}
