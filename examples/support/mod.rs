//! A server for the examples: the one that `NESTLOCK_URL` names, or a private `redis-server` that ends with the example.

use std::{
    error::Error,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

const HOW_TO_INSTALL: &str = "no redis-server on PATH. Install it: `make setup`, or `apt-get install redis-server` on \
     Debian and Ubuntu, `brew install redis` on macOS. Or set NESTLOCK_URL to the URL of a server that runs already";

/// A server; if it is ours, it ends when this is dropped.
pub(crate) struct Server {
    url: String,
    ours: Option<Process>,
}

struct Process {
    child: Child,
    _folder: TempDir,
}

impl Server {
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(process) = &mut self.ours {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

/// Uses `NESTLOCK_URL`; without it, starts a `redis-server` on a free port of the loopback interface.
pub(crate) fn server() -> Result<Server, Box<dyn Error>> {
    if let Ok(url) = std::env::var("NESTLOCK_URL") {
        return Ok(Server { url, ours: None });
    }
    for _ in 0..10 {
        if let Some(server) = start()? {
            return Ok(server);
        }
    }
    Err("redis-server does not start; run it by hand to see why".into())
}

/// `None`: it ended at once, perhaps because somebody else took the port.
fn start() -> Result<Option<Server>, Box<dyn Error>> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let folder = tempfile::tempdir()?;
    let spawned = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"])
        .arg(folder.path())
        .stdout(Stdio::null())
        .spawn();
    let child = match spawned {
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(HOW_TO_INSTALL.into()),
        spawned => spawned?,
    };
    let pid = child.id();
    let mut process = Process { child, _folder: folder };
    let patience = Instant::now() + Duration::from_secs(10);
    while process.child.try_wait()?.is_none() {
        if listens(port, pid) {
            return Ok(Some(Server { url: format!("redis://127.0.0.1:{port}"), ours: Some(process) }));
        }
        if Instant::now() > patience {
            let _ = process.child.kill();
            return Err("redis-server does not answer".into());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(None)
}

/// Whether the server on this port is the one that we started.
fn listens(port: u16, pid: u32) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"INFO server\r\nQUIT\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok::<_, std::io::Error>(answer)
    };
    ask().is_ok_and(|answer| answer.contains(&format!("process_id:{pid}\r\n")))
}
