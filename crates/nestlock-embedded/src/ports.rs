//! Ports of one's own.

#[cfg(unix)]
use std::{
    collections::BTreeSet,
    sync::{Mutex, MutexGuard, PoisonError},
};
use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    io,
    net::{Ipv4Addr, TcpListener},
};

const FIRST: u16 = 16_384;
const COUNT: u16 = 16_384;
/// How far above a node's port its bus is.
#[cfg(unix)]
const BUS: u16 = 10_000;

/// What servers of this process have that were killed and may come back, too: whoever still knows their addresses, a Sentinel or
/// a replica, must not meet another server there.
#[cfg(unix)]
static CLAIMED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port that nobody else of this process is given, nor the bus that belongs to it.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct Claim(u16);

#[cfg(unix)]
impl Claim {
    /// `None`: somebody else's.
    pub(crate) fn of(port: u16) -> Option<Self> {
        let (mut claimed, both) = (claimed(), with_bus(port));
        let is_free = both.iter().all(|port| !claimed.contains(port));
        is_free.then(|| {
            claimed.extend(both);
            Self(port)
        })
    }
}

#[cfg(unix)]
impl Drop for Claim {
    fn drop(&mut self) {
        let both = with_bus(self.0);
        claimed().retain(|port| !both.contains(port));
    }
}

#[cfg(unix)]
fn with_bus(port: u16) -> [u16; 2] {
    // those of the system may be the highest there are
    [port, port.saturating_add(BUS)]
}

#[cfg(unix)]
fn claimed() -> MutexGuard<'static, BTreeSet<u16>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(unix)]
fn is_free(port: u16) -> bool {
    !claimed().contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// Listens at a free port, below those that systems give to outgoing connections: one of these could have it when a
/// server wants to come back.
pub(crate) fn listen() -> io::Result<TcpListener> {
    for _ in 0..100 {
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, any_of(COUNT))) {
            return Ok(listener);
        }
    }
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

/// A port that is free for now.
#[cfg(unix)]
pub(crate) fn free() -> io::Result<u16> {
    find(COUNT, is_free).ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no free port"))
}

/// A port that is free for now, as is the one 10,000 above it, which a node of a cluster takes for its bus.
#[cfg(unix)]
pub(crate) fn free_for_a_node() -> io::Result<u16> {
    // so that the other one, too, is below those of outgoing connections
    let found = find(COUNT - BUS, |port| is_free(port) && is_free(port + BUS));
    found.ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no two free ports that are 10,000 apart"))
}

/// One of so many ports that fits.
#[cfg(unix)]
fn find(count: u16, fits: impl Fn(u16) -> bool) -> Option<u16> {
    let mut ports = std::iter::repeat_with(|| any_of(count)).take(1000);
    ports.find(|port| fits(*port))
}

fn any_of(count: u16) -> u16 {
    FIRST + u16::try_from(random() % u64::from(count)).unwrap_or(0)
}

pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(all(test, unix))]
mod tests {
    use std::{
        thread::sleep,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn a_port_is_one_servers_until_that_is_gone() {
        let port = free_for_a_node().unwrap();
        let claim = Claim::of(port).unwrap();
        // nobody listens there
        assert!(!is_free(port) && !is_free(port + BUS));
        assert!(Claim::of(port).is_none() && Claim::of(port + BUS).is_none() && Claim::of(port - BUS).is_none());
        drop(claim);
        // whoever starts a process at this moment has a copy of the listeners that were looked with, until it runs
        let are_free = || is_free(port) && is_free(port + BUS);
        let soon = Instant::now() + Duration::from_secs(5);
        while !are_free() {
            assert!(Instant::now() < soon, "{port} is claimed still");
            sleep(Duration::from_millis(5));
        }
    }
}
