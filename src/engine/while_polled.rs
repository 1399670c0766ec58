//! Work that holds something between two awaits: it is dropped if its future is no longer polled.
//!
//! A single acquire holds nothing before it returns its guard. One of several locks has the guards
//! of some members while it waits for the others, and the watchdog renews those. So the client must
//! be able to end it, as dropping the future would: decision 7.

use std::{
    mem,
    pin::Pin,
    sync::{Arc, PoisonError, TryLockError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use nestlock_wire::log;
use tokio::task::JoinHandle;

use super::{
    core::Core,
    failure::{not_entered, store_error},
};

use crate::{error::Result, sync::Mutex};

/// A future that the caller polls and the client's thread may drop: see [`Core::while_polled`].
pub(crate) struct WhilePolled<F> {
    lock: Arc<str>,
    work: Arc<Mutex<Work<F>>>,
    check: Option<JoinHandle<()>>,
}

struct Work<F> {
    /// `None`: it is done, or was dropped.
    future: Option<Pin<Box<F>>>,
    /// Whether the caller has polled since the last check.
    polled: bool,
    /// Wakes the caller.
    waker: Waker,
}

impl Core {
    /// Runs `work` of an acquire in the caller's task.
    ///
    /// # Errors
    ///
    /// The work was dropped, because the caller did not poll for as long as a request may take. The
    /// lock can be acquired again.
    pub(crate) fn while_polled<F>(&self, lock: &Arc<str>, work: F) -> WhilePolled<F>
    where
        F: Future + Send + 'static,
    {
        let work = Arc::new(Mutex::new(Work {
            future: Some(Box::pin(work)),
            polled: true,
            waker: Waker::noop().clone(),
        }));
        // A fork has no thread; its requests fail at once.
        let check = self.store.is_ours().then(|| {
            let check = check(
                Arc::clone(lock),
                Arc::clone(&work),
                self.holds.due.overdue() / 2,
            );
            self.runtime.spawn(check)
        });
        let lock = Arc::clone(lock);
        WhilePolled { lock, work, check }
    }
}

/// Wakes the caller once in each period, and drops its work if it has not polled a period later.
/// Without the wake, a caller that waits for a slow server would look the same.
async fn check<F: Future>(lock: Arc<str>, work: Arc<Mutex<Work<F>>>, period: Duration) {
    loop {
        tokio::time::sleep(period).await;
        let (waker, dropped) = {
            let mut work = match work.try_lock() {
                Ok(work) => work,
                Err(TryLockError::Poisoned(work)) => work.into_inner(),
                // The caller polls it just now.
                Err(TryLockError::WouldBlock) => continue,
            };
            let polled = mem::take(&mut work.polled);
            let dropped = if polled { None } else { work.future.take() };
            (work.waker.clone(), dropped)
        };
        let Some(dropped) = dropped else {
            waker.wake();
            continue;
        };
        log::later!(
            WARN, lock = lock;
            "the future of an acquire is no longer polled; releasing the members that it has"
        );
        drop(dropped);
        return waker.wake();
    }
}

impl<F: Future> Future for WhilePolled<F> {
    type Output = Result<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        work.polled = true;
        work.waker.clone_from(context.waker());
        let Some(future) = &mut work.future else {
            let error = store_error(&self.lock, not_entered(true));
            return Poll::Ready(Err(error));
        };
        let output = ready!(future.as_mut().poll(context));
        work.future = None;
        Poll::Ready(Ok(output))
    }
}

impl<F> Drop for WhilePolled<F> {
    fn drop(&mut self) {
        if let Some(check) = &self.check {
            check.abort();
        }
        // The check may still be running: drop the work here, not when it ends.
        let future = {
            let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
            work.future.take()
        };
        drop(future);
    }
}
