//! The two servers that are compared.

use std::{
    env,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use nestlock_embedded::EmbeddedServer;

use super::{resp::Value, wire::Wire};

/// One thing for each of the two servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Both<T> {
    pub real: T,
    pub ours: T,
}

impl<T> Both<T> {
    pub fn map<U>(self, mut with: impl FnMut(T) -> U) -> Both<U> {
        Both { real: with(self.real), ours: with(self.ours) }
    }

    pub fn as_mut(&mut self) -> Both<&mut T> {
        Both { real: &mut self.real, ours: &mut self.ours }
    }
}

/// A `redis-server` of this test's own.
#[derive(Debug)]
pub struct Real {
    child: Child,
    _folder: tempfile::TempDir,
    addr: SocketAddr,
}

impl Real {
    pub fn start() -> Self {
        (0..20).find_map(|_| Self::try_start()).expect("redis-server starts; `make setup` installs it")
    }

    fn try_start() -> Option<Self> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr()).ok()?.port();
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--loglevel", "warning"])
            .arg("--dir")
            .arg(folder.path())
            .env("LC_ALL", "C")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server on PATH; `make setup` installs it");
        let (start, addr) = (Instant::now(), (Ipv4Addr::LOCALHOST, port).into());
        while start.elapsed() < Duration::from_secs(30) {
            if Wire::connect(addr).and_then(|mut wire| wire.call(&["PING"])).is_ok() {
                return Some(Self { child, _folder: folder, addr });
            }
            if child.try_wait().expect("a child").is_some() {
                return None; // somebody else took the port
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        panic!("redis-server does not answer");
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A real server and the embedded one. With `NESTLOCK_TWINS=1` a second real one takes its place: then every difference
/// is a fault of the test.
#[derive(Debug)]
pub struct Pair {
    real: Real,
    ours: Ours,
}

#[derive(Debug)]
enum Ours {
    Embedded(EmbeddedServer),
    Twin(Real),
}

impl Pair {
    pub fn start() -> Self {
        let ours = match env::var_os("NESTLOCK_TWINS") {
            Some(_) => Ours::Twin(Real::start()),
            None => Ours::Embedded(EmbeddedServer::start().expect("the embedded server starts")),
        };
        let pair = Self { real: Real::start(), ours };
        // what is compared with is one version: another one answers differently here and there
        let mut wire = Wire::connect(pair.real.addr()).expect("a connection");
        let info = wire.call(&["INFO", "server"]).expect("an answer");
        let info = String::from_utf8_lossy(info.text().expect("a text")).into_owned();
        assert!(info.contains("\nredis_version:7.0."), "these tests compare with Redis 7.0, and this is\n{info}");
        // else the end of a blocked client's patience is noticed up to 100 ms late
        assert_eq!(wire.call(&["CONFIG", "SET", "hz", "500"]).expect("an answer"), Value::Simple(b"OK".into()));
        pair
    }

    pub fn addrs(&self) -> Both<SocketAddr> {
        let ours = match &self.ours {
            Ours::Embedded(server) => server.addr(),
            Ours::Twin(server) => server.addr(),
        };
        Both { real: self.real.addr(), ours }
    }
}
