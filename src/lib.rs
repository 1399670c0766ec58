// where docs.rs serves the files that the README links to: the first definition of a link wins
#![doc = "[ARCHITECTURE.md]: https://docs.rs/crate/nestlock/latest/source/ARCHITECTURE.md"]
#![doc = "[BENCHMARKS.md]: https://docs.rs/crate/nestlock/latest/source/BENCHMARKS.md"]
#![doc = "[CHANGELOG.md]: https://docs.rs/crate/nestlock/latest/source/CHANGELOG.md"]
#![doc = "[CONTRIBUTING.md]: https://docs.rs/crate/nestlock/latest/source/CONTRIBUTING.md"]
#![doc = ""]
#![doc = include_str!("../README.md")]

mod client;
mod engine;
mod error;
mod guard;
mod keys;
mod lock;
mod options;
mod owner;
mod rlock;
mod store;

pub use fred;

pub use crate::{
    client::{ClientStats, LockClient, LockClientBuilder},
    error::{Error, LossReason, Result, StoreError, StoreErrorKind},
    guard::LockGuard,
    lock::Lock,
    options::AcquireOptions,
    owner::OwnerId,
    rlock::RLock,
    store::Endpoint,
};
