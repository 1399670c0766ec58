//! The proxy and the plain connection of `tests/it`: the same files, with what they need from their
//! neighbours.

use std::net::SocketAddr;

#[allow(
    dead_code,
    unreachable_pub,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "they are the tests'"
)]
#[path = "../../../tests/it/support/frames.rs"]
pub(crate) mod frames;
#[allow(
    dead_code,
    unreachable_pub,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "they are the tests'"
)]
#[path = "../../../tests/it/support/proxy.rs"]
pub(crate) mod proxy;
#[allow(
    dead_code,
    unreachable_pub,
    clippy::pedantic,
    clippy::unwrap_used,
    reason = "they are the tests'"
)]
#[path = "../../../tests/it/support/wire.rs"]
pub(crate) mod wire;

/// The server that a proxy forwards to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Server(pub(crate) SocketAddr);

impl Server {
    pub(crate) fn addr(self) -> SocketAddr {
        self.0
    }
}

/// Stands in for the tests' module: no script has a name here.
pub(crate) mod scripts {
    pub(crate) fn names() -> Vec<String> {
        Vec::new()
    }

    pub(crate) fn sent(name: &str) -> String {
        unreachable!("no script has a name here: {name}")
    }
}
