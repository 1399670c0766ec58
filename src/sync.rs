//! The types that tasks and threads share, from std, dashmap and tokio. In unit tests they come
//! from shuttle, which chooses the task that runs next.

#[cfg(not(test))]
pub(crate) use dashmap::{DashMap, DashSet, Entry};
#[cfg(not(test))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(test))]
pub(crate) use tokio::{
    spawn,
    sync::{Notify, Semaphore},
};

#[cfg(test)]
pub(crate) use self::{
    maps::{DashMap, DashSet, Entry},
    steps::{Notify, Semaphore},
};
#[cfg(test)]
pub(crate) use shuttle::{
    future::spawn,
    sync::{Mutex, MutexGuard, atomic},
};

#[cfg(test)]
mod maps;
#[cfg(test)]
mod steps;
#[cfg(test)]
pub(crate) mod tests;
