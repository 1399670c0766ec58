//! Shared parts of the tests: servers, a proxy that injects faults, child processes.

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
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use nestlock::{Error, StoreErrorKind, Wire};

pub use self::server::Server;

/// The clients that carry requests.
pub const WIRES: &[Wire] = &[
    Wire::Own,
    #[cfg(feature = "fred")]
    Wire::Fred,
];

/// Polls once, so that the future sends its request.
pub async fn poll_once<F: Future + ?Sized>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Returns whether a short wait ended before its reply arrived, or before an earlier call of the
/// same owner ended, which happens on a busy machine.
pub fn came_too_late(error: &Error) -> bool {
    match error {
        Error::Unconfirmed { .. } => true,
        Error::Store { source, .. } => source.kind() == StoreErrorKind::Overloaded,
        _ => false,
    }
}

/// Waits for a state, up to a deadline far beyond the needs of a loaded machine. Panics with `what`
/// at the deadline.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut state: impl FnMut() -> F) {
    within(Duration::from_secs(20), what, &mut state).await;
}

/// Like [`eventually`], with a deadline of `limit`.
pub async fn within<F: Future<Output = bool>>(
    limit: Duration,
    what: &str,
    mut state: impl FnMut() -> F,
) {
    let start = Instant::now();
    while !state().await {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Measures the longest delay of tasks on this runtime since the last `forget`, caused by a busy
/// machine or a stopped process.
pub struct Pauses(Arc<AtomicU64>);

impl Pauses {
    /// Starts the measurement on the runtime of the test.
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

    /// Returns whether a delay was long enough to make a reply late.
    pub fn was_held_up(&self) -> bool {
        self.0.load(Ordering::Acquire) > 10
    }
}
