#![doc = include_str!("guide/links.md")] // before README's own, which lead to files of the repository: the first counts
#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))] // docs.rs shows the feature that an item needs

mod blocking;
mod client;
mod engine;
mod error;
mod guard;
pub mod guide;
mod hand_over;
mod keys;
mod lock;
mod meter;
mod options;
mod owner;
pub mod permissions;
mod rlock;
mod store;
mod sync;
mod token;
mod topology;

#[cfg(feature = "fred")]
pub use fred;
#[cfg(feature = "redis-rs")]
pub use redis;

#[doc(hidden)]
pub use crate::options::Tuning;
#[cfg(any(feature = "fred", feature = "redis-rs"))]
pub use crate::store::Endpoint;
#[cfg(feature = "rustls")]
pub use crate::store::Tls;
pub use crate::{
    blocking::block_on,
    client::{LockClient, LockClientBuilder, Maintenance},
    engine::ClientStats,
    error::{Error, LossReason, NodeAnswer, NodeSaid, Result, StoreError, StoreErrorKind},
    guard::LockGuard,
    hand_over::HandOver,
    lock::{
        CountDownLatch, HolderNote, Inspection, Lock, Permits, ReadWriteLock, RedLockOptions,
        Semaphore,
    },
    options::{AcquireOptions, Backoff, Messages, SignalOptions},
    owner::OwnerId,
    rlock::RLock,
    token::FencingToken,
    topology::{NodeRole, Topology, TopologyKind, TopologyNode},
};
pub use nestlock_wire::Credentials;
#[doc(hidden)]
pub use nestlock_wire::Wire;
