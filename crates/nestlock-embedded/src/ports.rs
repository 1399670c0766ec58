//! Ports of one's own.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    io,
    net::{Ipv4Addr, TcpListener},
};

const FIRST: u16 = 16_384;

/// Listens at a free port, below those that systems give to outgoing connections: one of these could have it when a
/// server wants to come back.
pub(crate) fn listen() -> io::Result<TcpListener> {
    for _ in 0..100 {
        let port = FIRST + u16::try_from(random() % 16_384).unwrap_or(0);
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            return Ok(listener);
        }
    }
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
}

/// A port that is free for now.
#[cfg(unix)]
pub(crate) fn free() -> io::Result<u16> {
    Ok(listen()?.local_addr()?.port())
}

/// A port that is free for now, as is the one 10,000 above it, which a node of a cluster takes for its bus.
#[cfg(unix)]
pub(crate) fn free_for_a_node() -> io::Result<u16> {
    // so that the other one, too, is below those of outgoing connections
    const COUNT: u64 = 32_768 - 10_000 - FIRST as u64;
    let free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    let mut ports = std::iter::repeat_with(|| FIRST + u16::try_from(random() % COUNT).unwrap_or(0)).take(1000);
    let found = ports.find(|port| free(*port) && free(port + 10_000));
    found.ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no two free ports that are 10,000 apart"))
}

pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
