//! A real server process of one's own, which ends with the process that started it, however that ends.

mod cluster;
mod error;
mod guard;
mod link;
mod plan;
mod sentinel;

use std::{
    ffi::OsString,
    io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::SocketAddr as SocketPath,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

pub use self::{
    cluster::{Migration, SpawnedCluster},
    error::SpawnError,
    sentinel::SpawnedSentinel,
};
use self::{
    guard::{Guard, PAUSE, port_taken},
    link::Link,
    plan::Plan,
};
use crate::ports::{self, Claim};

/// Ports tried until one is found that nobody takes first.
const PORTS_TRIED: usize = 20;
/// As long as a port may be away after an end of the server: a client that comes back can hold it for a moment.
const PORT_PATIENCE: Duration = Duration::from_secs(5);

/// A real server process of one's own: `redis-server` or `valkey-server`, on a free port of 127.0.0.1.
///
/// The program is the one that the variable `NESTLOCK_SERVER_BIN` names, else `redis-server`, else `valkey-server` on
/// `PATH`. The server has a folder of its own (mode 0700, in the folder for temporary files) and saves nothing, unless
/// an argument says so. It is killed, and its folder removed, when this is dropped, and also when this process exits,
/// panics, aborts or is killed: a `/bin/sh` stands between, and waits for that.
///
/// ```
/// # fn main() -> Result<(), nestlock_embedded::SpawnError> {
/// let server = nestlock_embedded::SpawnedServer::start()?;
/// println!("{}", server.url()); // redis://127.0.0.1:23571
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SpawnedServer {
    plan: Plan,
    folder: PathBuf,
    port: u16,
    guard: Mutex<Guard>,
    _claim: Claim,
}

impl SpawnedServer {
    /// Starts a server and waits until it answers: some 10 ms.
    ///
    /// # Errors
    /// [`SpawnError::NotFound`]: there is no server program. All others say why it does not run.
    pub fn start() -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>([])
    }

    /// Starts a server with further command line arguments: `["--maxmemory", "1mb"]`.
    ///
    /// They may not change the port, the unix socket or the log file.
    ///
    /// # Errors
    /// Those of [`SpawnedServer::start`]. An argument that the server does not know is [`SpawnError::Ended`], with what
    /// the server says of it.
    pub fn start_with<A>(args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        Self::start_at(&Plan::new(args.into_iter().map(Into::into).collect())?, ports::free)
    }

    fn start_at(plan: &Plan, mut port: impl FnMut() -> io::Result<u16>) -> Result<Self, SpawnError> {
        for _ in 1..PORTS_TRIED {
            match Self::start_there(plan, port()?) {
                Err(error) if port_taken(&error) => {}
                outcome => return outcome,
            }
        }
        Self::start_there(plan, port()?)
    }

    fn start_there(plan: &Plan, port: u16) -> Result<Self, SpawnError> {
        let claim = Claim::of(port).ok_or_else(|| io::Error::from(io::ErrorKind::AddrInUse))?;
        let folder = new_folder()?;
        let guard = Guard::start(plan, &folder, port, true)?;
        Ok(Self { plan: plan.clone(), folder, port, guard: Mutex::new(guard), _claim: claim })
    }

    /// `redis://127.0.0.1:PORT`, the same after a restart.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// The address that clients connect to, the same after a restart.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The unix socket that the server listens on as well, in its folder.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket(&self.folder)
    }

    /// The folder of the server: its data, its log (`server.log`), its socket.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The process id of the server; another one after a restart.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.guard().pid
    }

    /// Kills the server (SIGKILL) and waits for its end. What it has written stays; see [`SpawnedServer::restart`].
    ///
    /// Does nothing if the server has ended.
    ///
    /// # Errors
    /// Somebody has ended the shell that guards it.
    pub fn kill(&self) -> io::Result<()> {
        self.guard().order("KILL")
    }

    /// Starts the server again, on the same port and folder and with the same arguments; kills it first if it runs.
    ///
    /// # Errors
    /// Those of [`SpawnedServer::start`]. [`SpawnError::Ended`] also means that somebody else has taken the port
    /// meanwhile, and keeps it: then try again later.
    pub fn restart(&self) -> Result<(), SpawnError> {
        let mut guard = self.guard();
        guard.order("KILL")?;
        let start = Instant::now();
        let next = loop {
            match Guard::start(&self.plan, &self.folder, self.port, false) {
                Err(error) if port_taken(&error) && start.elapsed() < PORT_PATIENCE => thread::sleep(20 * PAUSE),
                outcome => break outcome?,
            }
        };
        // only now, so that there is always one that ends the server and removes the folder
        std::mem::replace(&mut *guard, next).leave();
        Ok(())
    }

    /// Stops the server (SIGSTOP): it hangs, and its connections stay open. [`SpawnedServer::cont`] lets it go on.
    ///
    /// # Errors
    /// The server has ended.
    pub fn stop(&self) -> io::Result<()> {
        let mut guard = self.guard();
        guard.order("STOP")?;
        guard.stopped = true;
        Ok(())
    }

    /// Lets a stopped server go on (SIGCONT).
    ///
    /// # Errors
    /// The server has ended.
    pub fn cont(&self) -> io::Result<()> {
        let mut guard = self.guard();
        guard.order("CONT")?;
        guard.stopped = false;
        Ok(())
    }

    /// Whether it hangs, by [`SpawnedServer::stop`].
    fn is_stopped(&self) -> bool {
        self.guard().stopped
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For orders to a server; one that hangs by [`SpawnedServer::stop`] is not waited for.
fn link_to(server: &SpawnedServer) -> Result<Link, SpawnError> {
    if server.is_stopped() {
        let source = io::Error::new(io::ErrorKind::TimedOut, "it is stopped");
        return Err(SpawnError::Unreachable { addr: server.addr(), source });
    }
    Link::open(server.addr())
}

/// Starts several side by side; if one does not start, none is left.
fn side_by_side<T: Send>(
    starts: impl IntoIterator<Item = impl FnOnce() -> Result<T, SpawnError> + Send>,
) -> Result<Vec<T>, SpawnError> {
    thread::scope(|scope| {
        let threads: Vec<_> = starts.into_iter().map(|start| scope.spawn(start)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// The path of a folder that nobody has; the guard makes it, so that it is never left behind.
fn new_folder() -> io::Result<PathBuf> {
    let folder = std::path::absolute(std::env::temp_dir())?;
    let folder = folder.join(format!("nestlock-{}-{:016x}", std::process::id(), ports::random()));
    // a path that is too long for a socket is told at once
    SocketPath::from_pathname(socket(&folder))?;
    Ok(folder)
}

fn socket(folder: &Path) -> PathBuf {
    folder.join("server.sock")
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_that_somebody_takes_first_is_passed_over() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let taken = || taken.local_addr().unwrap().port();
        let mut asked = 0;
        let server = SpawnedServer::start_at(&Plan::new(Vec::new()).unwrap(), || {
            asked += 1;
            if asked <= 2 { Ok(taken()) } else { ports::free() }
        });
        assert_ne!(server.unwrap().port, taken());
        assert_eq!(asked, 3);
        let mut asked = 0;
        let server = SpawnedServer::start_at(&Plan::new(Vec::new()).unwrap(), || {
            asked += 1;
            Ok(taken())
        });
        assert!(port_taken(&server.unwrap_err()));
        assert_eq!(asked, PORTS_TRIED);
    }
}
