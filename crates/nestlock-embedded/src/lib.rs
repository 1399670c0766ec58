#![doc = include_str!("../README.md")]

mod embedded;
mod server;
#[cfg(unix)]
mod spawned;

pub use embedded::EmbeddedServer;
#[cfg(unix)]
pub use spawned::{SpawnError, SpawnedServer};
