//! The core: what the handles, guards and thread of one client share.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, atomic::AtomicU32, mpsc},
    time::Duration,
};

use nestlock_wire::clock::Instant;
use tokio::{
    runtime::Handle,
    sync::{Semaphore, SemaphorePermit, mpsc::UnboundedSender, oneshot},
    time::Sleep,
};

use super::{
    begin::Beginning,
    failure::store_error,
    hold::{Hold, registry::Holds},
    jobs::Janitor,
    kind::{Kind, Wake},
    wait::{queue::WaitQueue, subscriptions::Subscriptions},
};

use crate::{
    error::{Error, Result, StoreError, StoreErrorKind},
    options::{AcquireOptions, Backoff, Config},
    owner::{ClientId, OwnerId},
    store::Store,
    sync::atomic::{AtomicBool, Ordering},
};

/// Most locks in one script call: this many block the server for about a millisecond.
pub(crate) const LOCKS_AT_ONCE: usize = 500;
/// How long after the end of a wait, plus a round trip, the client waits for the reply to a request
/// in flight.
pub(super) const REPLY_GRACE: Duration = Duration::from_millis(40);
/// How many requests about notes may be in flight at once: those of locks queue behind them.
pub(super) const NOTES_AT_ONCE: usize = 32;
/// How long dropping the last handle waits for releases in flight. If the process exits next, they
/// would be lost.
const CLOSING: Duration = Duration::from_millis(500);

/// State shared by the handles, the guards and the thread of one client.
pub(crate) struct Core {
    pub(crate) client: ClientId,
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(super) beginning: Beginning,
    pub(crate) holds: Holds,
    /// Subscribed channels and the waiters for their messages.
    pub(super) subscriptions: Arc<Subscriptions>,
    /// Lists and the waiters for their elements.
    pub(super) signals: Subscriptions,
    pub(crate) janitor: Janitor,
    /// Wait queues with a hand-off: the janitor checks that each is claimed.
    pub(super) relays: UnboundedSender<Arc<WaitQueue>>,
    /// Counter for [`WaitId`](super::kind::WaitId) numbers.
    pub(super) owner_locks_taken: AtomicU32,
    pub(super) runtime: Handle,
    /// How many requests about notes may be in flight.
    pub(super) note_slots: Semaphore,
    /// A note was refused, and that was told.
    pub(super) notes_refused: AtomicBool,
    /// Set by a shutdown, which then scans the holds and wait queues. A call first adds itself to
    /// those, and only then loads this flag. The mutexes of those maps and holds order the two, so
    /// at least one sees the other.
    pub(super) closed: AtomicBool,
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("client", &self.client.as_str())
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// Keeps the client's thread alive. Clients, locks and guards hold it; dropping the last one ends
/// the thread.
#[derive(Debug)]
pub(crate) struct Anchor {
    pub(super) core: Arc<Core>,
    pub(super) end: Option<oneshot::Sender<()>>,
}

impl Deref for Anchor {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Drop for Anchor {
    /// Lets the client's thread run until dropped guards are released.
    ///
    /// If any job is pending, the drop waits for it, for at most [`CLOSING`]: the process may be
    /// about to exit. On a runtime's thread it does not wait, because that thread serves other
    /// tasks: a blocking task of that runtime waits instead, and so does the runtime's shutdown.
    fn drop(&mut self) {
        if !self.core.store.is_ours() {
            return;
        }
        let (core, end) = (Arc::clone(&self.core), self.end.take());
        let under_way = self.core.janitor.pending() > 0;
        let (settled, told) = mpsc::sync_channel(1);
        self.core.runtime.spawn(async move {
            let _ = tokio::time::timeout(core.settling_time(), core.janitor.at_rest()).await;
            // before the close: the drop waits for the releases, not for the connections
            let _ = settled.try_send(());
            core.closed.store(true, Ordering::Release);
            core.store.close().await;
            drop(end);
        });
        if !under_way {
            return;
        }
        self.core.store.prioritize();
        match Handle::try_current() {
            Err(_) => drop(Settling::begin(told)),
            // The client's own thread cannot wait for itself.
            Ok(here) if here.id() == self.core.runtime.id() => {}
            Ok(here) => {
                let settling = Settling::begin(told);
                drop(here.spawn_blocking(move || drop(settling)));
            }
        }
    }
}

/// Waits in its drop until pending releases are done.
///
/// A task on a runtime may drop the last handle just before that runtime shuts down. The runtime
/// then drops its queued blocking tasks without running them, so the wait must be in the drop.
struct Settling {
    told: mpsc::Receiver<()>,
    /// Deadline. It is fixed at creation, because the blocking task may queue behind others.
    until: Instant,
}

impl Settling {
    fn begin(told: mpsc::Receiver<()>) -> Self {
        Self {
            told,
            until: Instant::now() + CLOSING,
        }
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        let _ = self
            .told
            .recv_timeout(self.until.saturating_duration_since(Instant::now()));
    }
}

impl Core {
    /// Connects. Call on the client's own runtime.
    pub(super) async fn connect(&self) -> Result<()> {
        self.store.connect().await?;
        self.beginning.tell();
        if let Err(closed) = self.check_open() {
            // The shutdown ran before there was a connection to close.
            self.store.close().await;
            return Err(closed);
        }
        Ok(())
    }

    /// Waits until the client has been connected once; the first such call makes a lazy client
    /// connect. Waits at most until `deadline`, and at most twice the connect timeout: for the
    /// attempt in flight and the next one.
    ///
    /// # Errors
    ///
    /// Why the next attempt failed.
    pub(crate) async fn connected(&self, deadline: Option<Instant>) -> Result<()> {
        self.check_open()?;
        if self.store.is_connected() {
            Ok(())
        } else {
            Box::pin(self.first_connection(deadline)).await
        }
    }

    async fn first_connection(&self, deadline: Option<Instant>) -> Result<()> {
        if !self.store.is_ours() {
            // A fork has no thread to connect and no timer. Each request fails with an error that
            // says so.
            return Ok(());
        }
        let longest = Instant::now() + 2 * self.config.connect_timeout;
        let deadline = deadline.map_or(longest, |deadline| deadline.min(longest));
        let failed = tokio::select! {
            biased;
            failed = self.beginning.want(|| self.store.is_connected() || self.check_open().is_err()) => failed,
            () = self.sleep_until(deadline) => Some(self.store.not_connected_yet()),
        };
        self.check_open()?;
        failed.map_or(Ok(()), Err)
    }

    /// Checks that a call about a lock may start: refuses a fork, then waits for the first
    /// connection.
    pub(super) async fn enter(&self, lock: &str) -> Result<()> {
        self.check_ours(lock)?;
        self.connected(None).await
    }

    /// Refuses a fork: it does not hold the lock, though its parent may. Call before locking any
    /// mutex: one that another thread held at the fork stays locked in the child.
    pub(crate) fn check_ours(&self, lock: &str) -> Result<()> {
        self.store
            .check_ours()
            .map_err(|forked| store_error(lock, forked))
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            Err(Error::Closed)
        } else {
            Ok(())
        }
    }

    /// Marks the client as closed: no new call starts, and all waiters return.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.beginning.tell();
        for (hold, ticket) in self
            .subscriptions
            .close()
            .into_iter()
            .chain(self.signals.close())
        {
            self.release_later(&hold, &ticket);
        }
    }

    /// Returns how long the client waits for a server after the end of a wait, or after the request
    /// was sent.
    pub(crate) fn grace(&self) -> Duration {
        REPLY_GRACE + self.store.free_round_trip()
    }

    /// Returns a timer of the client's own runtime: the caller's may have none, or a paused clock.
    pub(crate) fn sleep_until(&self, at: Instant) -> Sleep {
        let _context = self.runtime.enter();
        tokio::time::sleep(at.saturating_duration_since(Instant::now()))
    }

    /// Returns how a waiter of this owner is woken. In a cluster, waiters poll instead of waiting
    /// for lists: BLPOP takes the keys of one slot only.
    pub(super) fn wake(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Wake {
        match kind.wake(owner) {
            Wake::Signal(_) if self.store.is_cluster() => {
                let (first, longest) = (Duration::from_millis(10), self.config.poll_cap);
                Wake::Poll(Box::new(Backoff::exponential(first, longest, 2.0)))
            }
            wake => wake,
        }
    }

    /// Resolves the owner of an acquire. The only function that does.
    pub(super) fn resolve(
        &self,
        kind: &Arc<dyn Kind>,
        options: &AcquireOptions,
    ) -> Result<OwnerId> {
        if let Some(value) = &options.rare().value {
            let refuse = |reason| {
                Err(Error::InvalidOwner {
                    owner: value.clone(),
                    reason,
                })
            };
            if !kind.about().values {
                return refuse(
                    "this kind of lock records tasks; acquire as an owner, or use a string lock",
                );
            }
            return match OwnerId::from_value(value)? {
                owner if owner.is_value() => Ok(owner),
                _ => refuse("it looks like a task of a client; use another text"),
            };
        }
        match &options.rare().owner {
            None => Ok(OwnerId::current(&self.client)),
            Some(owner) if owner.is_of(&self.client) => Ok(owner.clone()),
            Some(owner) => Err(Error::InvalidOwner {
                owner: owner.to_string(),
                reason: "it belongs to another client, which alone knows its hold count; \
                         this client can release or extend it, but not acquire as it",
            }),
        }
    }

    /// Returns when a hold that was acquired just now without a lease ends unless it is renewed.
    pub(super) fn default_end(&self, kind: &Arc<dyn Kind>) -> Instant {
        if kind.about().endless {
            Instant::NEVER
        } else {
            Instant::now() + self.config.watchdog_timeout
        }
    }

    /// Returns how long a settlement may take while the server replies.
    pub(super) fn settling_time(&self) -> Duration {
        2 * self.config.command_timeout() + Duration::from_millis(100)
    }

    /// Takes the owner lock of a hold. Returns the permit and when it was taken: `now`, if it was
    /// free.
    pub(super) async fn lock_owner_at<'h>(
        &self,
        hold: &'h Hold,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<(SemaphorePermit<'h>, Instant), StoreError> {
        match hold.owner_lock.try_acquire() {
            Ok(permit) => Ok((permit, now)),
            Err(_) => Ok((self.lock_owner(hold, deadline).await?, Instant::now())),
        }
    }

    /// Takes the owner lock of a hold. Starts no timer if it is free.
    ///
    /// A call under the lock sends at most two requests, so this waits no longer than those may
    /// take, whatever the deadline. The lock may still be stuck in a future that is no longer
    /// polled.
    pub(super) async fn lock_owner<'h>(
        &self,
        hold: &'h Hold,
        deadline: Option<Instant>,
    ) -> Result<SemaphorePermit<'h>, StoreError> {
        if let Ok(permit) = hold.owner_lock.try_acquire() {
            return Ok(permit);
        }
        let longest = Instant::now() + 2 * self.config.command_timeout();
        let deadline = deadline.map_or(longest, |deadline| deadline.min(longest));
        let permit = tokio::select! {
            biased;
            permit = hold.owner_lock.acquire() => permit.ok(),
            () = self.sleep_until(deadline) => None,
        };
        let stuck = "another call of this owner is in flight; check that its future is polled";
        permit.ok_or_else(|| StoreError::new(StoreErrorKind::Overloaded, false, stuck))
    }
}
