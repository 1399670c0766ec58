#![doc = include_str!("../README.md")]

mod client;
mod clock;
mod engine;
mod error;
mod guard;
mod keys;
mod lock;
mod log;
mod options;
mod owner;
mod quorum;
mod rlock;
mod store;

pub use fred;

pub use crate::{
    client::{ClientStats, LockClient, LockClientBuilder},
    error::{Error, LossReason, NodeAnswer, NodeSaid, Result, StoreError, StoreErrorKind},
    guard::LockGuard,
    lock::{Lock, MultiLock, ReadWriteLock, RedLock, RedLockOptions},
    options::{AcquireOptions, Backoff, SignalOptions},
    owner::OwnerId,
    rlock::RLock,
    store::Endpoint,
};
