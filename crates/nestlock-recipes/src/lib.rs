//! Ready-made patterns for a distributed lock, built on the public API of [`nestlock`].
//!
//! | page | what it solves |
//! |---|---|
//! | [`cached`](mod@cached) | fill a cache once for all concurrent readers, even if one dies |
//! | [`once_per`](mod@once_per) | run a job once per tick, on any one replica |
//! | [`leader`](mod@leader) | elect one replica, and end its work before the next one begins |
//! | [`locked`](mod@locked) | run a function under a lock, without any lock code in its body |
#![cfg_attr(
    feature = "tower",
    doc = "| [`tower`] | handle one request at a time for each resource, in a tower service |"
)]
//!
//! The locks run in any executor; the pages that sleep (`cached`, `once_per`, `leader`) need a tokio
//! runtime with timers, and panic without one.
#![cfg_attr(docsrs, feature(doc_cfg))] // docs.rs shows the feature that an item needs

pub mod cached;
pub mod leader;
pub mod locked;
pub mod once_per;
mod retry;
#[cfg(feature = "tower")]
pub mod tower;

#[doc(hidden)]
pub use nestlock;
#[doc(inline)]
pub use nestlock_macros::locked;

pub use crate::locked::LockedError;
#[doc(inline)]
pub use crate::{cached::cached, leader::Leader, once_per::once_per};

/// The program in the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
