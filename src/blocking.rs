//! Locks for threads without a runtime: each waits for a call on the thread that makes it.

use std::{
    future::Future,
    pin::pin,
    sync::{Arc, Condvar, Mutex, PoisonError},
    task::{Context, Poll, Wake},
    time::Duration,
};

use tokio::runtime::Handle;

use crate::{
    client::LockClient,
    error::Result,
    guard::LockGuard,
    lock::{Lock, Permits, ReadWriteLock},
};

/// Waits on this thread for a call of nestlock: for programs, and threads, without a runtime.
///
/// nestlock needs no runtime of the caller's: the client's own thread has what it needs. The most
/// common calls have a form of their own, such as [`Lock::blocking_lock`]; this function is for all
/// others. Of a lost lock, [`LockGuard::is_lost`] and [`LockGuard::remaining`] tell without waiting.
///
/// ```
/// # use nestlock_embedded::EmbeddedServer;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = EmbeddedServer::start()?;
/// use nestlock::{LockClient, block_on};
///
/// let client = LockClient::connect_blocking(server.url())?;
/// let guard = client.fair_lock("printer")?.blocking_lock()?;
/// block_on(guard.extend(std::time::Duration::from_secs(60)))?;
/// guard.blocking_unlock()?;
/// block_on(client.shutdown())?;
/// # Ok(())
/// # }
/// ```
///
/// # Owners
///
/// The owner of a lock is the thread, whether it waits or awaits: its calls nest, unless the lock is a
/// [`mutex`](LockClient::mutex), and those of other threads exclude each other. In `spawn_blocking` it
/// is that task. Jobs of a thread pool share their thread, so use a `mutex` there: see
/// [owners](crate::guide::owners).
///
/// # A client that was connected on a runtime
///
/// Its replies are read on that runtime while it runs. If it does not, a call waits 25 to 50 ms until
/// the client's own thread reads, and then no more until the runtime runs again a second or more later.
/// A thread that has entered that runtime, or that is one of its `spawn_blocking`, waits up to 300 ms.
/// A client that is connected on a thread without a runtime has no such waits.
///
/// # Panics
///
/// Like `tokio::runtime::Handle::block_on`, if this thread runs tasks of a tokio runtime: they would
/// all stand still. Use `spawn_blocking`, or await the call.
#[track_caller]
pub fn block_on<F: Future>(call: F) -> F::Output {
    // tokio's own check, and its own words
    if let Ok(runtime) = Handle::try_current() {
        runtime.block_on(async {});
    }
    let signal = Arc::new(Wakeup::default());
    let waker = Arc::clone(&signal).into();
    let (mut call, mut context) = (pin!(call), Context::from_waker(&waker));
    loop {
        if let Poll::Ready(output) = call.as_mut().poll(&mut context) {
            return output;
        }
        signal.wait();
    }
}

/// Wakes the thread that waits. Not `thread::park`: the call itself may park the thread.
#[derive(Default)]
struct Wakeup {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Wakeup {
    fn wait(&self) {
        let is_set = self.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(is_set, |is_set| !*is_set);
        *waited.unwrap_or_else(PoisonError::into_inner) = false;
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        *self.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
}

impl LockClient {
    /// Like [`connect`](Self::connect), on a thread without a runtime: see [`block_on`].
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn connect_blocking(url: impl AsRef<str>) -> Result<Self> {
        block_on(Self::connect(url))
    }
}

impl Lock {
    /// Like [`lock`](Self::lock), on a thread without a runtime: see [`block_on`].
    ///
    /// ```no_run
    /// # fn example(client: nestlock::LockClient) -> nestlock::Result<()> {
    /// let orders = client.reentrant_lock("orders")?;
    /// let guard = orders.blocking_lock()?;
    /// let inner = orders.blocking_lock()?; // the same thread
    /// inner.blocking_unlock()?;
    /// guard.blocking_unlock()
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_lock(&self) -> Result<LockGuard> {
        block_on(self.lock())
    }

    /// Like [`try_lock`](Self::try_lock), on a thread without a runtime: see [`block_on`].
    ///
    /// # Errors
    ///
    /// As [`try_lock`](Self::try_lock).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_try_lock(&self) -> Result<Option<LockGuard>> {
        block_on(self.try_lock())
    }

    /// Like [`try_lock_for`](Self::try_lock_for), on a thread without a runtime: see [`block_on`].
    ///
    /// # Errors
    ///
    /// As [`try_lock_for`](Self::try_lock_for).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_try_lock_for(&self, wait: Duration) -> Result<Option<LockGuard>> {
        block_on(self.try_lock_for(wait))
    }
}

impl LockGuard {
    /// Like [`unlock`](Self::unlock), on a thread without a runtime: see [`block_on`]. A dropped guard
    /// needs neither: the client's own thread releases it, unless the process exits before that. If the
    /// client or a runtime is in a `static`, nothing waits for it: end with this call, or with
    /// `block_on(client.shutdown())`.
    ///
    /// # Errors
    ///
    /// As [`unlock`](Self::unlock).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_unlock(self) -> Result<()> {
        block_on(self.unlock())
    }
}

impl ReadWriteLock {
    /// Like [`read`](Self::read), on a thread without a runtime: see [`block_on`].
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_read(&self) -> Result<LockGuard> {
        block_on(self.read())
    }

    /// Like [`write`](Self::write), on a thread without a runtime: see [`block_on`].
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_write(&self) -> Result<LockGuard> {
        block_on(self.write())
    }
}

impl Permits {
    /// Like [`acquire`](Self::acquire), on a thread without a runtime: see [`block_on`].
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire).
    ///
    /// # Panics
    ///
    /// As [`block_on`].
    #[track_caller]
    pub fn blocking_acquire(&self) -> Result<LockGuard> {
        block_on(self.acquire())
    }
}
