//! A server for one test, real or embedded, which ends on drop.

use std::{
    io::ErrorKind,
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::{Mutex, MutexGuard},
    thread::sleep,
    time::{Duration, Instant},
};

use nestlock::{LockClient, LockClientBuilder};
use nestlock_embedded::{EmbeddedServer, SpawnedServer};

use super::{
    proxy::with_wire,
    wire::{Reply, Wire},
};

/// The variable that selects the kind of [`Server::start`]: `real`, the default, or `embedded`.
const KIND: &str = "NESTLOCK_TEST_SERVER";
/// Longest wait for a port that a server needs again.
const PORT_PATIENCE: Duration = Duration::from_secs(5);

/// A server.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Real(SpawnedServer),
    /// `None` after a kill.
    Embedded(Mutex<Option<EmbeddedServer>>),
}

/// Returns whether the embedded server is requested.
fn embedded(kind: Option<&str>) -> bool {
    match kind {
        None | Some("real") => false,
        Some("embedded") => true,
        Some(other) => panic!("{KIND} is {other:?}: there is `real` and `embedded`"),
    }
}

impl Server {
    /// Starts a server of the kind that `NESTLOCK_TEST_SERVER` names.
    pub fn start() -> Self {
        if !embedded(std::env::var(KIND).ok().as_deref()) {
            return Self::start_real();
        }
        let server = EmbeddedServer::start().expect("an embedded server");
        Self {
            addr: server.addr(),
            kind: Kind::Embedded(Mutex::new(Some(server))),
        }
    }

    /// Starts a real server, for features that the embedded one lacks: users, passwords,
    /// persistence, replicas, limits of memory and buffers, slow scripts, other sockets.
    pub fn start_real() -> Self {
        Self::start_with(&[])
    }

    /// Starts a real server with further command line arguments (`--maxmemory`, `1mb`, ...).
    pub fn start_with(args: &[&str]) -> Self {
        let server = SpawnedServer::start_with(args).unwrap_or_else(|error| panic!("{error}"));
        Self {
            addr: server.addr(),
            kind: Kind::Real(server),
        }
    }

    /// Returns whether this is a real server.
    pub fn is_real(&self) -> bool {
        matches!(self.kind, Kind::Real(_))
    }

    /// Returns whether the server supports keys of this type: the embedded server has neither sets
    /// nor streams.
    pub fn has_type(&self, name: &str) -> bool {
        self.is_real() || !["set", "stream"].contains(&name)
    }

    /// Kills the server by SIGKILL, or drops the embedded one.
    pub fn kill(&self) {
        match &self.kind {
            Kind::Real(server) => server.kill().expect("a server to kill"),
            Kind::Embedded(server) => {
                drop(lock(server).take());
                // a child process that another test starts also has the port until its exec
                let start = Instant::now();
                while TcpStream::connect(self.addr).is_ok() && start.elapsed() < PORT_PATIENCE {
                    sleep(Duration::from_millis(1));
                }
            }
        }
    }

    /// Starts the server again after [`Server::kill`] on the same port; a real one in the same
    /// folder.
    pub fn restart(&self) {
        match &self.kind {
            Kind::Real(server) => server.restart().unwrap_or_else(|error| panic!("{error}")),
            Kind::Embedded(server) => {
                let (mut server, start) = (lock(server), Instant::now());
                *server = None;
                *server = Some(loop {
                    match EmbeddedServer::start_on(self.addr.port()) {
                        // a client that reconnects can occupy the port for a moment
                        Err(error)
                            if error.kind() == ErrorKind::AddrInUse
                                && start.elapsed() < PORT_PATIENCE =>
                        {
                            sleep(Duration::from_millis(20));
                        }
                        outcome => break outcome.expect("an embedded server again"),
                    }
                });
            }
        }
    }

    /// Stops the server by SIGSTOP, or pauses the embedded one: it hangs with open sockets.
    pub fn stop(&self) {
        match &self.kind {
            Kind::Real(server) => server.stop().expect("a running server"),
            Kind::Embedded(server) => lock(server).as_ref().expect("a running server").pause(),
        }
    }

    /// Resumes the server after [`Server::stop`].
    pub fn cont(&self) {
        match &self.kind {
            Kind::Real(server) => server.cont().expect("a running server"),
            Kind::Embedded(server) => lock(server).as_ref().expect("a running server").resume(),
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Returns the unix socket of a real server.
    pub fn socket(&self) -> PathBuf {
        match &self.kind {
            Kind::Real(server) => server.socket(),
            Kind::Embedded(_) => panic!("the embedded server has no unix socket"),
        }
    }

    pub fn url(&self) -> String {
        with_wire(format!("redis://{}", self.addr()))
    }

    /// Returns a nestlock client with the default configuration.
    pub async fn client(&self) -> LockClient {
        self.client_with(|builder| builder).await
    }

    /// Returns a nestlock client with the configuration that `configure` makes.
    pub async fn client_with(
        &self,
        configure: impl FnOnce(LockClientBuilder) -> LockClientBuilder,
    ) -> LockClient {
        configure(LockClient::builder())
            .connect(self.url())
            .await
            .expect("a connection")
    }

    /// Opens a plain connection.
    pub fn wire(&self) -> Wire {
        Wire::connect(self.addr()).expect("a connection")
    }

    /// Runs one command over a new connection. Returns errors as [`Reply::Error`].
    pub fn call(&self, parts: &[&str]) -> Reply {
        self.wire().call(parts).expect("a reply")
    }

    /// Returns the record of a lock: owners with their hold counts.
    pub fn record(&self, lock: &str) -> Vec<(String, i64)> {
        let reply = self.call(&["HGETALL", lock]);
        reply
            .list()
            .chunks(2)
            .map(|pair| {
                (
                    pair[0].text().to_owned(),
                    pair[1].text().parse().expect("a count"),
                )
            })
            .collect()
    }

    /// Returns the record of a lock with arbitrary fields.
    pub fn record_of_any_kind(&self, lock: &str) -> Reply {
        self.call(&["HGETALL", lock])
    }

    pub fn pttl(&self, key: &str) -> i64 {
        self.call(&["PTTL", key]).int()
    }

    /// Returns the server's clock, in milliseconds since 1970.
    pub fn now(&self) -> i64 {
        let time = self.call(&["TIME"]);
        let number = |n: usize| time.list()[n].text().parse::<i64>().unwrap();
        number(0) * 1000 + number(1) / 1000
    }

    pub fn exists(&self, key: &str) -> bool {
        self.call(&["EXISTS", key]).int() == 1
    }

    /// Returns every key with its value and expiry time: equal dumps mean that nothing was written
    /// in between.
    pub fn dump(&self) -> Vec<(String, Reply, i64)> {
        let mut wire = self.wire();
        let mut call = |parts: &[&str]| wire.call(parts).unwrap();
        let mut keys: Vec<String> = call(&["KEYS", "*"])
            .list()
            .iter()
            .map(|key| key.text().to_owned())
            .collect();
        keys.sort();
        keys.into_iter()
            .map(|key| {
                let kind = call(&["TYPE", &key]);
                let value = match kind.text() {
                    "string" => call(&["GET", &key]),
                    "hash" => {
                        let mut fields: Vec<_> = call(&["HGETALL", &key])
                            .list()
                            .chunks(2)
                            .map(<[_]>::to_vec)
                            .collect();
                        fields.sort();
                        Reply::List(fields.concat())
                    }
                    "list" => call(&["LRANGE", &key, "0", "-1"]),
                    "set" => {
                        let mut members = call(&["SMEMBERS", &key]).list().to_vec();
                        members.sort();
                        Reply::List(members)
                    }
                    "zset" => call(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]),
                    "stream" => call(&["XRANGE", &key, "-", "+"]),
                    // it has expired since KEYS
                    "none" => Reply::Nil,
                    other => panic!("{key}: a {other}"),
                };
                let expires = expires(&mut call, &key);
                (key, Reply::List(vec![kind, value]), expires)
            })
            .collect()
    }

    /// Returns when a key expires, in milliseconds of the Unix epoch; -1 if never, -2 if it does
    /// not exist.
    pub fn expires(&self, key: &str) -> i64 {
        expires(&mut |words| self.call(words), key)
    }

    /// Returns the number of clients that block in a command.
    pub fn blocked(&self) -> u64 {
        let info = self.call(&["INFO", "clients"]);
        let found = info
            .text()
            .lines()
            .find_map(|line| line.strip_prefix("blocked_clients:").map(str::to_owned));
        found.map_or(0, |count| count.trim().parse().expect("a count"))
    }

    /// Returns the channels that have subscribers.
    pub fn channels(&self) -> Vec<String> {
        self.call(&["PUBSUB", "CHANNELS"])
            .list()
            .iter()
            .map(|channel| channel.text().to_owned())
            .collect()
    }

    /// Returns how often a command was executed since the start or `CONFIG RESETSTAT`, also inside
    /// scripts.
    pub fn command_count(&self, command: &str) -> u64 {
        let stats = self.call(&["INFO", "commandstats"]);
        let line = format!("cmdstat_{}:calls=", command.to_lowercase());
        let found = stats
            .text()
            .lines()
            .find_map(|stat| stat.strip_prefix(&line).map(str::to_owned));
        found.map_or(0, |rest| {
            rest.split(',').next().unwrap().parse().expect("a count")
        })
    }

    /// Returns the number of connections since the start, including the one of this call.
    pub fn connections(&self) -> u64 {
        let stats = self.call(&["INFO", "stats"]);
        let line = stats
            .text()
            .lines()
            .find_map(|line| line.strip_prefix("total_connections_received:"));
        line.expect("a count").trim().parse().expect("a count")
    }

    /// Returns the number of scripts that clients ran.
    pub fn script_count(&self) -> u64 {
        self.command_count("evalsha") + self.command_count("eval")
    }
}

fn expires(call: &mut impl FnMut(&[&str]) -> Reply, key: &str) -> i64 {
    let answer = call(&["PEXPIRETIME", key]);
    if !answer.is_error() {
        return answer.int();
    }
    // Redis 6 has no such command; the PTTL between two equal readings of the server's clock is
    // exact
    let millis = |time: &Reply| {
        let [seconds, micros] =
            [0, 1].map(|at| time.list()[at].text().parse::<i64>().expect("a number"));
        seconds * 1000 + micros / 1000
    };
    let mut left = call(&["PTTL", key]).int();
    // a key without expiry needs no clock: a test may have denied TIME
    while left >= 0 {
        let before = millis(&call(&["TIME"]));
        left = call(&["PTTL", key]).int();
        if left >= 0 && millis(&call(&["TIME"])) == before {
            return before + left;
        }
    }
    left
}

fn lock(server: &Mutex<Option<EmbeddedServer>>) -> MutexGuard<'_, Option<EmbeddedServer>> {
    server.lock().expect("no thread panicked with it")
}

#[test]
fn the_kind_of_server_is_one_of_two() {
    assert_eq!(
        [None, Some("real"), Some("embedded")].map(embedded),
        [false, false, true]
    );
    for other in ["", "Embedded", "redis"] {
        assert!(
            std::panic::catch_unwind(|| embedded(Some(other))).is_err(),
            "{other:?}"
        );
    }
}

#[test]
fn a_dump_shows_every_value_and_its_end() {
    let server = Server::start();
    let commands: [&[&str]; 7] = [
        &["SET", "string", "s"],
        &["HSET", "hash", "b", "2", "a", "1"],
        &["RPUSH", "list", "b", "a"],
        &["SADD", "set", "b", "a"],
        &["ZADD", "zset", "2", "a", "1.5", "b"],
        &["SET", "brief", "s"],
        &["PEXPIREAT", "brief", "9000000000000"],
    ];
    let has = |key: &&str| server.has_type(key);
    for command in commands.into_iter().filter(|command| has(&command[1])) {
        assert!(!server.call(command).is_error(), "{command:?}");
    }
    let text = |text: &str| Reply::Text(text.into());
    let list = |parts: &[&str]| Reply::List(parts.iter().copied().map(text).collect());
    let entry = |key: &str, kind: &str, value: Reply, expires: i64| {
        (
            key.to_owned(),
            Reply::List(vec![text(kind), value]),
            expires,
        )
    };
    let wanted = [
        entry("brief", "string", text("s"), 9_000_000_000_000),
        entry("hash", "hash", list(&["a", "1", "b", "2"]), -1),
        entry("list", "list", list(&["b", "a"]), -1),
        entry("set", "set", list(&["a", "b"]), -1),
        entry("string", "string", text("s"), -1),
        entry("zset", "zset", list(&["b", "1.5", "a", "2"]), -1),
    ];
    let wanted: Vec<_> = wanted
        .into_iter()
        .filter(|(key, ..)| has(&&**key))
        .collect();
    assert_eq!(server.dump(), wanted);
}

/// Holds for both kinds of server: tests of outages depend on it.
#[test]
fn a_server_goes_away_comes_back_and_hangs_on_order() {
    let server = Server::start();
    let (addr, mut wire) = (server.addr(), server.wire());
    for _ in 0..3 {
        assert_eq!(wire.call(&["SET", "k", "v"]).unwrap().text(), "OK");
        server.kill();
        assert!(wire.call(&["PING"]).is_err(), "the connection is closed");
        assert!(Wire::connect(addr).is_err(), "the port is closed");
        server.kill();
        server.restart();
        assert_eq!(server.addr(), addr);
        wire = server.wire();
        assert_eq!(wire.call(&["GET", "k"]).unwrap(), Reply::Nil);
    }
    server.stop();
    wire.limit(Duration::from_millis(200));
    assert!(wire.call(&["PING"]).is_err(), "it replied while it hangs");
    // other clients can connect, and wait
    let mut other = server.wire();
    other.send(&["ECHO", "late"]).unwrap();
    server.cont();
    wire.limit(Duration::from_secs(30));
    assert_eq!(wire.read().unwrap().text(), "PONG");
    assert_eq!(other.read().unwrap().text(), "late");
    // a server that hangs can be killed, too
    server.stop();
    server.kill();
    assert!(Wire::connect(addr).is_err());
}
