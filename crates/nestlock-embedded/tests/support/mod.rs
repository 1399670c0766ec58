//! The parts of the comparison tests: a raw client, two servers side by side, and a comparison of their replies.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses its own part"
)]

pub mod grammar;
pub mod nonsense;
pub mod play;
#[cfg(unix)]
pub mod processes;
pub mod resp;
pub mod rng;
pub mod rounds;
pub mod scripts;
pub mod servers;
pub mod wire;
