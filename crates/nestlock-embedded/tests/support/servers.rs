//! The two servers that are compared.

use std::{env, net::SocketAddr};

use nestlock_embedded::{EmbeddedServer, SpawnedServer};

use super::wire::Wire;

/// A value for each of the two servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Both<T> {
    pub real: T,
    pub ours: T,
}

impl<T> Both<T> {
    pub fn map<U>(self, mut with: impl FnMut(T) -> U) -> Both<U> {
        Both {
            real: with(self.real),
            ours: with(self.ours),
        }
    }

    pub fn as_mut(&mut self) -> Both<&mut T> {
        Both {
            real: &mut self.real,
            ours: &mut self.ours,
        }
    }
}

/// The reference server.
pub fn real() -> SpawnedServer {
    // otherwise a blocked client times out up to 100 ms late
    let server =
        SpawnedServer::start_with(["--hz", "500"]).unwrap_or_else(|error| panic!("{error}"));
    // other versions differ in some replies
    let info = Wire::connect(server.addr())
        .and_then(|mut wire| wire.call(&["INFO", "server"]))
        .expect("a reply");
    let info = String::from_utf8_lossy(info.text().expect("a text")).into_owned();
    assert!(
        info.contains("\nredis_version:7.0."),
        "these tests compare with Redis 7.0, and this is\n{info}"
    );
    server
}

/// A real server and the embedded one. With `NESTLOCK_TWINS=1` a second real one replaces the latter: then every difference
/// is a bug in the test.
#[derive(Debug)]
pub struct Pair {
    real: SpawnedServer,
    ours: Ours,
}

#[derive(Debug)]
enum Ours {
    Embedded(EmbeddedServer),
    Twin(SpawnedServer),
}

impl Pair {
    pub fn start() -> Self {
        let ours = match env::var_os("NESTLOCK_TWINS") {
            Some(_) => Ours::Twin(real()),
            None => Ours::Embedded(EmbeddedServer::start().expect("the embedded server starts")),
        };
        Self { real: real(), ours }
    }

    pub fn addrs(&self) -> Both<SocketAddr> {
        let ours = match &self.ours {
            Ours::Embedded(server) => server.addr(),
            Ours::Twin(server) => server.addr(),
        };
        Both {
            real: self.real.addr(),
            ours,
        }
    }
}
