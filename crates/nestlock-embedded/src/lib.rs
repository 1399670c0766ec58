#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))] // docs.rs shows the feature that an item needs

mod embedded;
mod ports;
mod server;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulated;
#[cfg(unix)]
mod spawned;

pub use embedded::EmbeddedServer;
#[cfg(unix)]
pub use spawned::{Migration, SpawnError, SpawnedCluster, SpawnedSentinel, SpawnedServer};
