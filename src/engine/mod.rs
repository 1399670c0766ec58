//! The engine: the client's own thread with its connections, subscriptions, watchdog and janitor.
//!
//! The modules are listed bottom up: each uses those above it in this list and none below.

mod begin;
mod failure;
mod retry;

mod kind;
mod lease;

pub(crate) mod hold;

mod core;
mod jobs;
mod wait;

mod redirect;
mod settle;
mod watchdog;
mod while_polled;

pub(crate) mod acquire;
mod counts;
mod force;
mod inspect;
mod latch;
mod left;
mod notes;
pub(crate) mod release;
pub(crate) mod together;
mod transfer;

mod janitor;
mod start;

pub use self::inspect::ClientStats;
pub(crate) use self::{
    core::{Anchor, LOCKS_AT_ONCE as MOST_KEYS},
    kind::{
        AcquireTerms, JointScripts, Kind, KindInfo, MOST_PERMITS, Sharing, Sibling, WaitId, Wake,
    },
    latch::Awaiting,
    notes::NoteCalls,
    retry::random_fraction,
    start::{connect, connect_lazy},
};
