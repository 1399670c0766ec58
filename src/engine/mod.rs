//! The engine: the client's own thread with its connections, subscriptions, watchdog and janitor.
//!
//! The modules are listed bottom up: each uses those above it in this list and none below.

mod begin;
mod failure;
mod refusal;
mod retry;

mod kind;
mod lease;

mod due;
pub(crate) mod generation;
mod pending;

mod state;

mod holding;
mod transitions;

mod hand_off;
mod turn;

pub(crate) mod hold;
mod holds;

mod core;
mod jobs;
mod wait;

mod redirect;
mod settle;

pub(crate) mod attempt;
mod copies;
mod left;

mod acquire;
mod force;
mod inspect;
pub(crate) mod release;
pub(crate) mod together;
mod transfer;

mod janitor;
mod start;
mod watchdog;
mod watches;

pub use self::inspect::ClientStats;
pub(crate) use self::{
    core::Anchor,
    kind::{AcquireTerms, JointScripts, Kind, KindInfo, Sibling, WaitId, Wake},
    retry::random_fraction,
    start::{connect, connect_lazy},
};
