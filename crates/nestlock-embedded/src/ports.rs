//! Ports of one's own.

use std::{
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    io,
    net::{Ipv4Addr, TcpListener},
};

/// Listens at a free port, below those that systems give to outgoing connections: one of these could have it when a
/// server wants to come back.
pub(crate) fn listen() -> io::Result<TcpListener> {
    const FIRST: u16 = 16_384;
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

pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
