//! Real server processes for tests. A server never outlives the process that started it,
//! however that process ends.
//!
//! A cluster and a Sentinel group are several such servers, joined by the commands that `redis-cli`
//! would send, and by the greetings of sentinels: so they are ready in 200 ms. They are ready when
//! all of them agree and each replica has its master's data.

mod cluster;
mod error;
mod folder;
mod guard;
mod guard_script;
mod link;
mod plan;
mod sentinel;

use std::{
    ffi::OsString,
    io,
    net::{Ipv4Addr, SocketAddr},
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
    folder::{new_folder, socket},
    guard::{Guard, PAUSE, port_taken},
    link::Link,
    plan::Plan,
};
use crate::ports::{self, Claim};

/// How many ports are tried before a start fails because each port was already taken.
const PORTS_TRIED: usize = 20;
/// How long a restart retries while the port is taken. A reconnecting client can hold the port for
/// a moment.
const PORT_PATIENCE: Duration = Duration::from_secs(5);

/// A real server process: `redis-server` or `valkey-server`, on a free port of 127.0.0.1.
///
/// The program is `NESTLOCK_SERVER_BIN` if this variable is set, else `redis-server` on `PATH`,
/// else `valkey-server` on `PATH`. The server has its own folder (mode 0700, in the folder for
/// temporary files) and saves nothing, unless an argument enables it. Dropping this kills the
/// server and removes its folder. So does the end of this process, if it exits, panics, aborts or
/// is killed: a `/bin/sh` parent process waits for that.
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
    /// Starts a server and waits until it replies, which takes about 10 ms.
    ///
    /// # Errors
    /// [`SpawnError::NotFound`] if there is no server program. All other errors say why the server
    /// does not run.
    pub fn start() -> Result<Self, SpawnError> {
        Self::start_with::<[OsString; 0]>([])
    }

    /// Starts a server with additional command line arguments, such as `["--maxmemory", "1mb"]`.
    ///
    /// The arguments may not change the port, the Unix socket or the log file.
    ///
    /// # Errors
    /// Those of [`SpawnedServer::start`]. [`SpawnError::Ended`], with the server's output, if the
    /// server does not know an argument.
    pub fn start_with<A>(args: A) -> Result<Self, SpawnError>
    where
        A: IntoIterator<Item: Into<OsString>>,
    {
        Self::start_at(
            &Plan::new(args.into_iter().map(Into::into).collect())?,
            ports::free,
        )
    }

    fn start_at(
        plan: &Plan,
        mut port: impl FnMut() -> io::Result<u16>,
    ) -> Result<Self, SpawnError> {
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
        Ok(Self {
            plan: plan.clone(),
            folder,
            port,
            guard: Mutex::new(guard),
            _claim: claim,
        })
    }

    /// Returns `redis://127.0.0.1:PORT`. It stays the same after a restart.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Returns the address that clients connect to. It stays the same after a restart.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns the path of the Unix socket, in the server's folder, on which the server also
    /// listens.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        socket(&self.folder)
    }

    /// Returns the server's folder, with its data, its log (`server.log`) and its socket.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the process id of the server. It changes with a restart.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.guard().pid
    }

    /// Kills the server (SIGKILL) and waits for its end. Its files stay; see
    /// [`SpawnedServer::restart`].
    ///
    /// Does nothing if the server has ended.
    ///
    /// # Errors
    /// The shell that guards the server has been killed.
    pub fn kill(&self) -> io::Result<()> {
        self.guard().order("KILL")
    }

    /// Restarts the server with the same port, folder and arguments. Kills it first if it is
    /// running.
    ///
    /// # Errors
    /// Those of [`SpawnedServer::start`]. [`SpawnError::Ended`] can also mean that another process
    /// has taken the port and keeps it: then try again later.
    pub fn restart(&self) -> Result<(), SpawnError> {
        let mut guard = self.guard();
        guard.order("KILL")?;
        let start = Instant::now();
        let next = loop {
            match Guard::start(&self.plan, &self.folder, self.port, false) {
                Err(error) if port_taken(&error) && start.elapsed() < PORT_PATIENCE => {
                    thread::sleep(20 * PAUSE);
                }
                outcome => break outcome?,
            }
        };
        // The old guard leaves only now, so that there is always a guard that kills the server and
        // removes the folder.
        std::mem::replace(&mut *guard, next).leave();
        Ok(())
    }

    /// Stops the server (SIGSTOP): it hangs, and its connections stay open. [`SpawnedServer::cont`]
    /// resumes it.
    ///
    /// # Errors
    /// The server has ended.
    pub fn stop(&self) -> io::Result<()> {
        let mut guard = self.guard();
        guard.order("STOP")?;
        guard.stopped = true;
        Ok(())
    }

    /// Resumes a stopped server (SIGCONT).
    ///
    /// # Errors
    /// The server has ended.
    pub fn cont(&self) -> io::Result<()> {
        let mut guard = self.guard();
        guard.order("CONT")?;
        guard.stopped = false;
        Ok(())
    }

    /// Returns whether [`SpawnedServer::stop`] has stopped the server.
    fn is_stopped(&self) -> bool {
        self.guard().stopped
    }

    fn guard(&self) -> MutexGuard<'_, Guard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens a connection for commands to a server. Fails at once if the server is stopped
/// ([`SpawnedServer::stop`]), instead of waiting for the timeout.
fn link_to(server: &SpawnedServer) -> Result<Link, SpawnError> {
    if server.is_stopped() {
        let source = io::Error::new(io::ErrorKind::TimedOut, "the server is stopped (SIGSTOP)");
        return Err(SpawnError::Unreachable {
            addr: server.addr(),
            source,
        });
    }
    Link::open(server.addr())
}

/// Runs `starts` in parallel. If one of them fails, drops all that have succeeded.
fn side_by_side<T: Send>(
    starts: impl IntoIterator<Item = impl FnOnce() -> Result<T, SpawnError> + Send>,
) -> Result<Vec<T>, SpawnError> {
    thread::scope(|scope| {
        let threads: Vec<_> = starts.into_iter().map(|start| scope.spawn(start)).collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_port_that_another_process_takes_first_is_skipped() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let taken = || taken.local_addr().unwrap().port();
        let mut asked = 0;
        let server = SpawnedServer::start_at(&Plan::new(Vec::new()).unwrap(), || {
            asked += 1;
            if asked <= 2 {
                Ok(taken())
            } else {
                ports::free()
            }
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
