//! A task: what a program does with locks, and what it checks of what nestlock returns.

mod acquire;
mod gifts;
mod latches;
mod release;
mod rounds;
mod semaphores;

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use nestlock::{Error, LockClient, LockGuard};

use crate::{
    kinds::Choice,
    ledger::{Who, count_error},
    numbers::Changed,
    orders::Orders,
    plan::Plan,
    rng::Rng,
    trace::note,
};

async fn nap(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

/// One hold of a task.
struct Hold {
    number: u64,
    guard: Arc<LockGuard>,
    choice: Choice,
    turn: u64,
}

/// A task of a process.
pub(crate) struct Task {
    pub(crate) who: Who,
    pub(crate) clients: Vec<LockClient>,
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) orders: Arc<Orders>,
}

impl Task {
    fn is_shut_down(&self) -> bool {
        self.orders.is_shut_down.load(Relaxed)
    }

    /// Records what the caller of a change was told, and returns what that means.
    fn told<T>(&self, what: &str, outcome: &Result<T, Error>) -> Changed {
        if let Err(error) = outcome {
            count_error(error);
        }
        let changed = Changed::of(outcome.as_ref());
        note(
            "change",
            format!("{:?} {what}: {changed:?}", self.who).as_bytes(),
        );
        changed
    }

    /// Awaits a call to its end or, with a probability of `percent`, drops it before it completes.
    /// Returns `None` if it was dropped.
    async fn left_midway<T>(&mut self, percent: u64, call: impl Future<Output = T>) -> Option<T> {
        if !self.rng.chance(percent) {
            return Some(call.await);
        }
        let patience = Duration::from_millis(self.rng.below(20));
        tokio::time::timeout(patience, call).await.ok()
    }
}
