//! Servers for running and testing nestlock with nothing installed.

#[cfg(unix)]
mod spawned;

#[cfg(unix)]
pub use spawned::{SpawnError, SpawnedServer};
