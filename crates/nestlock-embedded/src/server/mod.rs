//! The emulated server. As in Redis, one thread runs one command at a time.

pub(crate) mod client;
mod clock;
mod commands;
mod engine;
mod keyspace;
pub(crate) mod port;
pub(crate) mod resp;
mod script;
mod sorted_set;
mod state;
mod stats;

pub(crate) use self::engine::Engine;
