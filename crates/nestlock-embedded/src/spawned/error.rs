//! What can go wrong.

use std::{io, net::SocketAddr, path::PathBuf};

const HOW_TO_INSTALL: &str = "Install one: `apt-get install redis-server` (Debian, Ubuntu), `dnf install valkey` or \
     `dnf install redis` (Fedora, RHEL), `brew install redis` (macOS). Or set NESTLOCK_SERVER_BIN to the path of a \
     redis-server or valkey-server";

/// Why there is no [`SpawnedServer`], [`SpawnedCluster`] or [`SpawnedSentinel`], or why it does not do as it is told.
///
/// [`SpawnedServer`]: crate::SpawnedServer
/// [`SpawnedCluster`]: crate::SpawnedCluster
/// [`SpawnedSentinel`]: crate::SpawnedSentinel
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// There is no server program: none on `PATH`, or not where `NESTLOCK_SERVER_BIN` says.
    #[error("{what}. {HOW_TO_INSTALL}")]
    NotFound {
        /// What was looked for, and where.
        what: String,
    },
    /// The server ended before it answered; often because of an argument.
    #[error("{} ended before it answered. The last that it wrote:\n{log}", .program.display())]
    Ended {
        /// The server program.
        program: PathBuf,
        /// The last lines of its output and its log.
        log: String,
    },
    /// The server runs, and does not answer within 30 s. It has been killed.
    #[error("{} does not answer. The last that it wrote:\n{log}", .program.display())]
    Silent {
        /// The server program.
        program: PathBuf,
        /// The last lines of its output and its log.
        log: String,
    },
    /// No process could be started, or no port be had.
    #[error("cannot start a server process: {0}")]
    Io(#[from] io::Error),
    /// That cannot be: a cluster without masters, slot 20,000, a server of another cluster. Nothing has been done.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: String,
    },
    /// A server does not answer.
    #[error("{addr} does not answer: {source}")]
    Unreachable {
        /// The server.
        addr: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// A server has refused a command.
    #[error("{addr} answers {answer:?} to {command}")]
    Refused {
        /// The server.
        addr: SocketAddr,
        /// The first words of the command.
        command: String,
        /// The server's answer.
        answer: String,
    },
    /// The servers run, and have not come in time to what they should.
    #[error("{what}\n{view}")]
    Unsettled {
        /// What was waited for, and why it has not come.
        what: String,
        /// What the servers say of each other.
        view: String,
    },
}
