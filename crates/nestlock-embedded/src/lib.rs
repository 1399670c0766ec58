#![doc = include_str!("../README.md")]

mod embedded;
mod server;

pub use embedded::EmbeddedServer;
