//! For unit tests: tokio's `Notify` and `Semaphore`, where other tasks may run before each call.

use std::sync::Arc;

use shuttle::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, TryAcquireError, futures::Notified};

/// A value that is read before each call: at such a read, shuttle chooses the task that runs next.
#[derive(Debug)]
struct Step(AtomicBool);

impl Step {
    fn take(&self) {
        self.0.load(Ordering::SeqCst);
    }
}

#[derive(Debug)]
pub(crate) struct Notify(tokio::sync::Notify, Step);

impl Notify {
    pub(crate) fn new() -> Self {
        Self(tokio::sync::Notify::new(), Step(AtomicBool::new(false)))
    }

    pub(crate) fn notify_one(&self) {
        self.1.take();
        self.0.notify_one();
    }

    pub(crate) fn notify_waiters(&self) {
        self.1.take();
        self.0.notify_waiters();
    }

    pub(crate) fn notified(&self) -> Notified<'_> {
        self.1.take();
        self.0.notified()
    }
}

#[derive(Debug)]
pub(crate) struct Semaphore(Arc<tokio::sync::Semaphore>, Step);

impl Semaphore {
    pub(crate) fn new(permits: usize) -> Self {
        Self(
            Arc::new(tokio::sync::Semaphore::new(permits)),
            Step(AtomicBool::new(false)),
        )
    }

    fn step(&self) -> &Arc<tokio::sync::Semaphore> {
        self.1.take();
        &self.0
    }

    pub(crate) fn available_permits(&self) -> usize {
        self.step().available_permits()
    }

    pub(crate) fn add_permits(&self, permits: usize) {
        self.step().add_permits(permits);
    }

    pub(crate) fn forget_permits(&self, permits: usize) -> usize {
        self.step().forget_permits(permits)
    }

    pub(crate) fn close(&self) {
        self.step().close();
    }

    pub(crate) fn try_acquire_owned(
        self: Arc<Self>,
    ) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        Arc::clone(self.step()).try_acquire_owned()
    }

    pub(crate) async fn acquire_owned(
        self: Arc<Self>,
    ) -> Result<OwnedSemaphorePermit, AcquireError> {
        let permits = Arc::clone(self.step());
        permits.acquire_owned().await
    }
}
