//! Tests the program as users run it: processes, signals, exit codes, a real server.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod acl;
mod by_hand;
#[cfg(target_os = "linux")]
mod ends;
mod exec;
mod look;
mod notes;
mod permits;
mod support;
#[cfg(target_os = "linux")]
mod terminal;
mod topologies;
