//! What tests are made of: servers, a proxy that misbehaves on order, child processes.

pub mod answers;
pub mod child;
pub mod clock;
pub mod frames;
pub mod history;
pub mod proxy;
pub mod redisson;
pub mod scripts;
pub mod server;
pub mod wire;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nestlock::{Error, StoreErrorKind};

pub use self::server::Server;

/// Whether a short wait ended before an answer came, or before this owner's earlier call was over: so it is on a busy machine.
pub fn came_too_late(error: &Error) -> bool {
    match error {
        Error::Unconfirmed { .. } => true,
        Error::Store { source, .. } => source.kind() == StoreErrorKind::Overloaded,
        _ => false,
    }
}

/// Waits for a state, with a deadline far beyond what a loaded machine needs. Panics with `what` when it passes.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut state: impl FnMut() -> F) {
    within(Duration::from_secs(20), what, &mut state).await;
}

/// As [`eventually`], with a deadline of one's own.
pub async fn within<F: Future<Output = bool>>(limit: Duration, what: &str, mut state: impl FnMut() -> F) {
    let start = Instant::now();
    while !state().await {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// How long tasks of this runtime were held up at most, since that was asked to be forgotten: a busy machine, or a stopped process.
pub struct Pauses(Arc<AtomicU64>);

impl Pauses {
    /// On the runtime of the test.
    pub fn watch() -> Self {
        let longest = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&longest);
        tokio::spawn(async move {
            loop {
                let start = Instant::now();
                tokio::time::sleep(Duration::from_millis(1)).await;
                seen.fetch_max(start.elapsed().as_millis() as u64, Ordering::AcqRel);
            }
        });
        Self(longest)
    }

    pub fn forget(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Whether one was long enough for an answer to come too late.
    pub fn was_held_up(&self) -> bool {
        self.0.load(Ordering::Acquire) > 10
    }
}
