//! Work that holds something between two awaits: it is dropped if its future is no longer polled.
//!
//! A single acquire holds nothing before it returns its guard. One of several locks has the guards
//! of some members while it waits for the others, and the watchdog renews those. So the client must
//! be able to end it, as dropping the future would: decision 7.

use std::{
    pin::Pin,
    sync::{Arc, PoisonError, TryLockError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use nestlock_wire::{clock::Instant, log};
use tokio::{task::JoinHandle, time::sleep};

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
    polled_at: Instant,
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
            polled_at: Instant::now(),
            waker: Waker::noop().clone(),
        }));
        // A fork has no thread; its requests fail at once.
        let check = self.store.is_ours().then(|| {
            let (lock, work) = (Arc::clone(lock), Arc::clone(&work));
            self.runtime
                .spawn(check(lock, work, self.holds.due.overdue()))
        });
        let lock = Arc::clone(lock);
        WhilePolled { lock, work, check }
    }
}

/// Drops the work when the caller has not polled it for `limit`. Wakes the caller halfway: without
/// that, one that waits for a slow server would look the same.
async fn check<F: Future>(lock: Arc<str>, work: Arc<Mutex<Work<F>>>, limit: Duration) {
    let (mut last, mut is_woken) = (Instant::now(), false);
    loop {
        let next = last + if is_woken { limit } else { limit / 2 };
        sleep(next.saturating_duration_since(Instant::now())).await;
        let (waker, unpolled) = {
            let mut work = match work.try_lock() {
                Ok(work) => work,
                Err(TryLockError::Poisoned(work)) => work.into_inner(),
                // The caller polls it just now. Its code must not block this thread.
                Err(TryLockError::WouldBlock) => {
                    (last, is_woken) = (Instant::now(), false);
                    continue;
                }
            };
            if work.polled_at > last {
                (last, is_woken) = (work.polled_at, false);
                continue;
            }
            let unpolled = if is_woken { work.future.take() } else { None };
            (work.waker.clone(), unpolled)
        };
        if is_woken {
            log::later!(
                WARN, lock = lock;
                "the future of an acquire is no longer polled; releasing the members that it has"
            );
            drop(unpolled);
            return waker.wake();
        }
        is_woken = true;
        waker.wake();
    }
}

impl<F: Future> Future for WhilePolled<F> {
    type Output = Result<F::Output>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        work.polled_at = Instant::now();
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
