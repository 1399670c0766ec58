//! The emulated server. As in Redis, one thread runs one command at a time.
//!
//! It is built to be compared with redis-server 7.0: a store that is almost Redis is worse than
//! none. nestlock meets it over a socket like any other server.
//!
//! - The order is that of Redis, without locks: one command at a time on a current-thread runtime.
//!   The time is read once for each command or script. Keys whose deadline has passed are removed
//!   before it runs, from an index in order of deadlines, so no command sees one. `advance` only
//!   moves that clock.
//! - One table has each known command, the number of its words, and whether it writes. Any other
//!   fails with `ERR` before anything is written, if possible with the text of Redis, since clients
//!   sort errors by it.

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
