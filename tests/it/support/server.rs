//! A real `redis-server` for one test: own port and folder, ended when dropped.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    sync::Mutex,
    time::{Duration, Instant},
};

use nestlock::{LockClient, LockClientBuilder};
use tempfile::TempDir;

use super::wire::{Reply, Wire};

/// A server process.
#[derive(Debug)]
pub struct Server {
    port: u16,
    folder: TempDir,
    args: Vec<String>,
    process: Mutex<Option<Child>>,
}

impl Server {
    /// Starts a server without persistence.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a server with further command line arguments (`--maxmemory`, `1mb`, ...).
    pub fn start_with(args: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let args = args.iter().map(ToString::to_string).collect();
        let mut server = Self { port: 0, folder, args, process: Mutex::new(None) };
        for _ in 0..20 {
            server.port = free_port();
            if server.try_boot() {
                return server;
            }
        }
        panic!("cannot start redis-server; `make setup` installs it");
    }

    fn try_boot(&self) -> bool {
        let mut child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .args(["--save", "", "--loglevel", "warning", "--enable-debug-command", "yes"])
            .arg("--dir")
            .arg(self.folder.path())
            .args(&self.args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server on PATH; `make setup` installs it");
        let start = Instant::now();
        loop {
            let answers = Wire::connect(self.addr()).and_then(|mut wire| wire.call(&["PING"]));
            // any answer will do: it may want a password, or be loading
            if answers.is_ok_and(|reply| !reply.text().starts_with("LOADING")) {
                *self.process.lock().unwrap() = Some(child);
                return true;
            }
            if child.try_wait().expect("a child").is_some() {
                return false; // somebody else took the port
            }
            assert!(start.elapsed() < Duration::from_secs(30), "redis-server does not answer");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Starts the server again after [`Server::kill`], on the same port and folder.
    pub fn restart(&self) {
        assert!(self.try_boot(), "cannot start redis-server again on port {}", self.port);
    }

    /// SIGKILL.
    pub fn kill(&self) {
        if let Some(mut child) = self.process.lock().unwrap().take() {
            child.kill().expect("a child to kill");
            child.wait().expect("its end");
        }
    }

    /// SIGSTOP: the server hangs, its sockets stay open.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// SIGCONT.
    pub fn cont(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        let pid = self.process.lock().unwrap().as_ref().expect("a running server").id();
        super::child::signal(pid, signal);
    }

    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// A nestlock client with the default configuration.
    pub async fn client(&self) -> LockClient {
        self.client_with(|builder| builder).await
    }

    /// A nestlock client.
    pub async fn client_with(&self, configure: impl FnOnce(LockClientBuilder) -> LockClientBuilder) -> LockClient {
        configure(LockClient::builder()).connect(self.url()).await.expect("a connection")
    }

    /// A plain connection.
    pub fn wire(&self) -> Wire {
        Wire::connect(self.addr()).expect("a connection")
    }

    /// Runs one command over a connection of its own. Errors come back as [`Reply::Error`].
    pub fn call(&self, parts: &[&str]) -> Reply {
        self.wire().call(parts).expect("an answer")
    }

    /// The whole record of a lock: owner -> hold count.
    pub fn record(&self, lock: &str) -> Vec<(String, i64)> {
        let reply = self.call(&["HGETALL", lock]);
        reply
            .list()
            .chunks(2)
            .map(|pair| (pair[0].text().to_owned(), pair[1].text().parse().expect("a count")))
            .collect()
    }

    /// The whole record of a lock, whatever its fields hold.
    pub fn record_of_any_kind(&self, lock: &str) -> Reply {
        self.call(&["HGETALL", lock])
    }

    pub fn pttl(&self, key: &str) -> i64 {
        self.call(&["PTTL", key]).int()
    }

    pub fn exists(&self, key: &str) -> bool {
        self.call(&["EXISTS", key]).int() == 1
    }

    /// Every key and its serialized value: equal before and after means that nothing was written.
    pub fn dump(&self) -> Vec<(String, Reply)> {
        let mut wire = self.wire();
        let mut keys: Vec<String> =
            wire.call(&["KEYS", "*"]).unwrap().list().iter().map(|key| key.text().to_owned()).collect();
        keys.sort();
        keys.into_iter()
            .map(|key| {
                let value = wire.call(&["DUMP", &key]).unwrap();
                (key, value)
            })
            .collect()
    }

    /// Channels that somebody is subscribed to.
    pub fn channels(&self) -> Vec<String> {
        self.call(&["PUBSUB", "CHANNELS"]).list().iter().map(|channel| channel.text().to_owned()).collect()
    }

    /// How often a command was executed since the start or `CONFIG RESETSTAT`, also inside scripts.
    pub fn command_count(&self, command: &str) -> u64 {
        let stats = self.call(&["INFO", "commandstats"]);
        let line = format!("cmdstat_{}:calls=", command.to_lowercase());
        let found = stats.text().lines().find_map(|stat| stat.strip_prefix(&line).map(str::to_owned));
        found.map_or(0, |rest| rest.split(',').next().unwrap().parse().expect("a count"))
    }

    /// How many scripts were run by clients.
    pub fn script_count(&self) -> u64 {
        self.command_count("evalsha") + self.command_count("eval")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port").local_addr().expect("its number").port()
}
