//! The servers of a run and their proxies, and queries for what is left on the servers.

use std::{net::SocketAddr, sync::Arc, thread, time::Duration};

use nestlock_embedded::SpawnedServer;

use crate::{
    clock::now,
    heartbeat,
    history::History,
    kinds::{self, Kind},
    settings::{Mode, Settings},
    support::{
        Server,
        proxy::Proxy,
        wire::{Reply, Wire},
    },
    topology::{CLIENTS, SERVERS, link},
};

pub(crate) struct Servers {
    pub(crate) servers: Vec<SpawnedServer>,
    /// By link, then by server.
    pub(crate) proxies: Vec<Vec<Proxy>>,
}

impl Servers {
    pub(crate) fn start(settings: &Settings, mode: Mode) -> Result<Self, String> {
        let mut args = vec!["--save", "", "--enable-debug-command", "yes"];
        if mode == Mode::Aof {
            // not everysec: while the disk is busy, a write may follow its reply by up to 2 s
            args.extend(["--appendonly", "yes", "--appendfsync", "always"]);
        }
        let start = |_| SpawnedServer::start_with(&args).map_err(|error| error.to_string());
        let servers: Vec<SpawnedServer> = (0..SERVERS).map(start).collect::<Result<_, _>>()?;
        let links = (0..settings.workers * CLIENTS).filter_map(link).count();
        let proxies = |_| {
            servers
                .iter()
                .map(|server| Proxy::start(&Server(server.addr())))
                .collect()
        };
        let proxies = (0..links).map(proxies).collect();
        Ok(Self { servers, proxies })
    }

    /// Returns the URLs that a client connects to, one per server.
    pub(crate) fn urls(&self, client: usize) -> String {
        let urls: Vec<String> = match link(client) {
            Some(link) => self.proxies[link].iter().map(Proxy::url).collect(),
            None => self.servers.iter().map(SpawnedServer::url).collect(),
        };
        urls.join("+")
    }

    /// Records when a server did not reply, whatever the reason.
    pub(crate) fn watch(&self, history: &Arc<History>) {
        for (number, server) in self.servers.iter().enumerate() {
            let (addr, history) = (server.addr(), Arc::clone(history));
            thread::spawn(move || {
                let (mut last, mut wire) = (now(), None);
                loop {
                    thread::sleep(Duration::from_millis(5));
                    let answer = match &mut wire {
                        Some(wire) => call(wire, &["PING"]).is_ok(),
                        None => false,
                    };
                    if answer {
                        last = heartbeat::beat(&history, &format!("sgap{number}"), last);
                    } else {
                        wire = connect(addr).ok();
                    }
                }
            });
        }
    }

    /// Runs one command. An error reply is returned as an error.
    pub(crate) fn ask(&self, server: usize, parts: &[&str]) -> std::io::Result<Reply> {
        call(&mut connect(self.servers[server].addr())?, parts)
    }

    /// Returns the permits of each name that are available, and those that are taken or expired: a
    /// request moves a permit from one to the other, so their sum stays. Leaves out names that the
    /// server has lost.
    pub(crate) fn permits(&self) -> Vec<(String, i64, i64)> {
        let permits = |(name, leases): (String, String)| {
            let available = self.ask(0, &["GET", &name]).ok()?;
            let taken = self.ask(0, &["ZCARD", &leases]).ok()?;
            let available = match available {
                Reply::Text(text) => text.parse().ok()?,
                _ => return None,
            };
            Some((name, available, taken.int()))
        };
        leases().filter_map(permits).collect()
    }

    /// Returns all keys, except those that stay: the counters of tokens, guarded values, the permits
    /// (an expired one stays until an acquire), and for a minute the changes of a semaphore.
    pub(crate) fn keys(&self, server: usize) -> Vec<String> {
        let permits: Vec<(String, String)> = leases().collect();
        let is_of = |(name, leases): &(String, String), key: &str| key == name || key == leases;
        let stays = |key: &str| {
            key.contains("token")
                || key.contains("guarded")
                || key.starts_with("nestlock_semaphore_request:")
                || permits.iter().any(|one| is_of(one, key))
        };
        let Ok(Reply::List(keys)) = self.ask(server, &["KEYS", "*"]) else {
            return vec!["no reply".to_owned()];
        };
        keys.iter()
            .map(|key| key.text().to_owned())
            .filter(|key| !stays(key))
            .collect()
    }

    pub(crate) fn channels(&self, server: usize) -> Vec<String> {
        match self.ask(server, &["PUBSUB", "CHANNELS"]) {
            Ok(Reply::List(channels)) => channels
                .iter()
                .map(|channel| channel.text().to_owned())
                .collect(),
            other => vec![format!("no reply: {other:?}")],
        }
    }
}

/// Returns the names of all permits, and the keys of their leases.
fn leases() -> impl Iterator<Item = (String, String)> {
    let permits = [Kind::Permits, Kind::FairPermits]
        .into_iter()
        .flat_map(kinds::names)
        .map(|name| {
            let leases = format!("{{{name}}}:timeout");
            (name, leases)
        });
    let semaphores = kinds::names(Kind::Semaphore).into_iter().map(|name| {
        let leases = format!("nestlock_semaphore_leases:{{{name}}}");
        (name, leases)
    });
    permits.chain(semaphores)
}

pub(crate) fn connect(addr: SocketAddr) -> std::io::Result<Wire> {
    let wire = Wire::connect(addr)?;
    wire.limit(Duration::from_secs(4));
    Ok(wire)
}

pub(crate) fn call(wire: &mut Wire, parts: &[&str]) -> std::io::Result<Reply> {
    match wire.call(parts)? {
        Reply::Error(error) => Err(std::io::Error::other(error)),
        reply => Ok(reply),
    }
}
