//! A server for the examples: the one that NESTLOCK_URL names, or a private `redis-server` that ends with the example.

use std::{
    error::Error,
    fs,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A server, ended when dropped if it is ours.
pub(crate) struct Server {
    url: String,
    ours: Option<(Child, PathBuf)>,
}

impl Server {
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((child, folder)) = &mut self.ours {
            let _ = child.kill();
            let _ = child.wait();
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// Uses NESTLOCK_URL; without it, starts a `redis-server` on a free port of the loopback interface.
pub(crate) fn server() -> Result<Server, Box<dyn Error>> {
    if let Ok(url) = std::env::var("NESTLOCK_URL") {
        return Ok(Server { url, ours: None });
    }
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let folder = std::env::temp_dir().join(format!("nestlock-example-{}", std::process::id()));
    fs::create_dir_all(&folder)?;
    let child = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"])
        .arg(&folder)
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| {
            format!(
                "cannot start redis-server ({error}). Install it: `apt-get install redis-server` on Debian and Ubuntu, \
                 `brew install redis` on macOS; or set NESTLOCK_URL to a server that runs already"
            )
        })?;
    let server = Server { url: format!("redis://127.0.0.1:{port}"), ours: Some((child, folder)) };
    let patience = Instant::now() + Duration::from_secs(10);
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        if Instant::now() > patience {
            return Err("redis-server does not open its port".into());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(server)
}
