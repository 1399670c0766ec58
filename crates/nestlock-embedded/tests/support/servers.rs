//! The two servers that are compared.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

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

/// A real server and the embedded one.
#[derive(Debug)]
pub struct Pair {
    real: Real,
    ours: Real,
}

impl Pair {
    pub fn start() -> Self {
        let pair = Self { real: Real::start(), ours: Real::start() };
        // what is compared with is one version: another one answers differently here and there
        let mut wire = Wire::connect(pair.real.addr()).expect("a connection");
        let info = wire.call(&["INFO", "server"]).expect("an answer");
        let info = String::from_utf8_lossy(info.text().expect("a text")).into_owned();
        assert!(info.contains("\nredis_version:7.0."), "these tests compare with Redis 7.0, and this is\n{info}");
        // else a blocked client's timeout is noticed up to 100 ms late
        assert_eq!(wire.call(&["CONFIG", "SET", "hz", "500"]).expect("an answer"), Value::Simple(b"OK".into()));
        pair
    }

    pub fn addrs(&self) -> Both<SocketAddr> {
        Both { real: self.real.addr(), ours: self.ours.addr() }
    }
}
