//! Picks ports for servers, and reserves them within this process.

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

/// The lowest port to choose. All `COUNT` ports are below the ephemeral ports of most systems.
const FIRST: u16 = 16_384;
const COUNT: u16 = 16_384;
/// The offset of a cluster node's bus port from its port.
#[cfg(unix)]
const BUS: u16 = 10_000;

/// The ports of this process's servers, including those that were killed and may restart. A
/// Sentinel or a replica that still knows such an address must not find another server there.
#[cfg(unix)]
static CLAIMED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port, and the bus port that belongs to it, reserved for one server of this process.
#[cfg(unix)]
#[derive(Debug)]
pub(crate) struct Claim(u16);

#[cfg(unix)]
impl Claim {
    /// Reserves a port and its bus port. Returns `None` if either is reserved already.
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
    // a port that the system chose may be too high for a bus port
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

/// Listens on a free port below the ephemeral ports: an outgoing connection could hold one of these
/// when a server wants to restart. Falls back to a port that the system chooses.
pub(crate) fn listen() -> io::Result<TcpListener> {
    for _ in 0..100 {
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, any_of(COUNT))) {
            return Ok(listener);
        }
    }
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

/// Returns a port that is free for now.
#[cfg(unix)]
pub(crate) fn free() -> io::Result<u16> {
    find(COUNT, is_free).ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no free port"))
}

/// Returns a port that is free for now, as is the port 10,000 above it, which a cluster node uses
/// for its bus.
#[cfg(unix)]
pub(crate) fn free_for_a_node() -> io::Result<u16> {
    // COUNT - BUS, so that the bus port is below the ephemeral ports, too
    let found = find(COUNT - BUS, |port| is_free(port) && is_free(port + BUS));
    found.ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::AddrInUse,
            "no two free ports that are 10,000 apart",
        )
    })
}

/// Returns a random one of the first `count` ports for which `fits` is true. Returns `None` after
/// 1,000 tries.
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
        // no process listens there
        assert!(!is_free(port) && !is_free(port + BUS));
        assert!(
            Claim::of(port).is_none()
                && Claim::of(port + BUS).is_none()
                && Claim::of(port - BUS).is_none()
        );
        drop(claim);
        // a process that is being spawned holds copies of the listeners of `is_free` until it calls
        // exec
        let are_free = || is_free(port) && is_free(port + BUS);
        let soon = Instant::now() + Duration::from_secs(5);
        while !are_free() {
            assert!(Instant::now() < soon, "{port} is still claimed");
            sleep(Duration::from_millis(5));
        }
    }
}
