//! The folder of a server: its path, and the paths of the socket and the log in it.

use std::{
    io,
    os::unix::net::SocketAddr as SocketPath,
    path::{Path, PathBuf},
};

use crate::ports;

/// Returns a random folder path. The guard creates the folder, so that it is never left behind.
pub(super) fn new_folder() -> io::Result<PathBuf> {
    let folder = std::path::absolute(std::env::temp_dir())?;
    let folder = folder.join(format!(
        "nestlock-{}-{:016x}",
        std::process::id(),
        ports::random()
    ));
    // Fail now if the path is too long for a Unix socket, not when the server binds it.
    SocketPath::from_pathname(socket(&folder))?;
    Ok(folder)
}

pub(super) fn socket(folder: &Path) -> PathBuf {
    folder.join("server.sock")
}

pub(super) fn log_file(folder: &Path) -> PathBuf {
    folder.join("server.log")
}
