//! Errors of spawned servers.

use std::{io, net::SocketAddr, path::PathBuf};

const HOW_TO_INSTALL: &str = "Install one: `apt-get install redis-server` (Debian, Ubuntu), `dnf install valkey` or \
     `dnf install redis` (Fedora, RHEL), `brew install redis` (macOS). Or set NESTLOCK_SERVER_BIN to the path of a \
     redis-server or valkey-server";

/// Why a [`SpawnedServer`], [`SpawnedCluster`] or [`SpawnedSentinel`] does not start, or an
/// operation on it fails.
///
/// ```
/// # fn main() -> Result<(), nestlock_embedded::SpawnError> {
/// use nestlock_embedded::{SpawnError, SpawnedServer};
///
/// match SpawnedServer::start() {
///     Ok(server) => println!("{}", server.url()),
///     Err(SpawnError::NotFound { what }) => println!("skipped: {what}"),
///     Err(error) => return Err(error),
/// }
/// # Ok(())
/// # }
/// ```
///
/// [`SpawnedServer`]: crate::SpawnedServer
/// [`SpawnedCluster`]: crate::SpawnedCluster
/// [`SpawnedSentinel`]: crate::SpawnedSentinel
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// There is no server program: neither on `PATH`, nor at `NESTLOCK_SERVER_BIN` if that is set.
    #[error("{what}. {HOW_TO_INSTALL}")]
    NotFound {
        /// The program that was searched for, and where.
        what: String,
    },
    /// The server ended before its first reply, often because of an argument.
    #[error("{} exited before its first reply. Its last output:\n{log}", .program.display())]
    Ended {
        /// The server program.
        program: PathBuf,
        /// The last lines of its output and its log.
        log: String,
    },
    /// The server runs, but has not replied within 30 s. It has been killed.
    #[error("{} did not reply within 30 s and was killed. Its last output:\n{log}", .program.display())]
    Silent {
        /// The server program.
        program: PathBuf,
        /// The last lines of its output and its log.
        log: String,
    },
    /// A process could not be started, or no port was free.
    #[error("cannot start a server process: {0}")]
    Io(#[from] io::Error),
    /// The arguments are invalid: a cluster without masters, slot 20,000, a server of another
    /// cluster. Nothing has been changed.
    #[error("{what}")]
    Invalid {
        /// What is invalid.
        what: String,
    },
    /// A server does not reply.
    #[error("{addr} does not reply: {source}")]
    Unreachable {
        /// The address of the server.
        addr: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// A server has refused a command.
    #[error("{addr} replied {answer:?} to {command}")]
    Refused {
        /// The address of the server.
        addr: SocketAddr,
        /// The first words of the command.
        command: String,
        /// The server's error reply.
        answer: String,
    },
    /// The servers run, but have not reached the expected state in time.
    #[error("{what}\n{view}")]
    Unsettled {
        /// The expected state, and what is missing.
        what: String,
        /// What the servers report about each other.
        view: String,
    },
}
