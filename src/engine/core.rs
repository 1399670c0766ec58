//! What a client's handles, guards and its own thread share.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, atomic::AtomicU32, mpsc},
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{SemaphorePermit, mpsc::UnboundedSender, oneshot},
    time::Sleep,
};

use super::{
    begin::Beginning,
    failure::store_error,
    hold::Hold,
    holds::Holds,
    jobs::Janitor,
    kind::{Kind, Wake},
    wait::{gate::Gate, hub::Hub},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError, StoreErrorKind},
    options::{AcquireOptions, Backoff, Config},
    owner::{ClientId, OwnerId},
    store::Store,
    sync::atomic::{AtomicBool, Ordering},
};

/// Locks in one script call: the server is blocked for a millisecond or so.
pub(super) const LOCKS_AT_ONCE: usize = 500;
/// How long past the end of a wait, and a round trip, the answer to a request under way is awaited.
pub(super) const LATE_ANSWER: Duration = Duration::from_millis(40);
/// How long the drop of a client's last handle waits for releases that are under way: a process that ends next would take
/// them along.
const CLOSING: Duration = Duration::from_millis(500);

/// Everything that one client shares between its handles, its guards and its own thread.
pub(crate) struct Core {
    pub(crate) client: ClientId,
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(super) beginning: Beginning,
    pub(crate) holds: Holds,
    /// Channels, and who waits for their messages.
    pub(super) hub: Arc<Hub>,
    /// The same for lists and their elements.
    pub(super) signals: Hub,
    pub(crate) janitor: Janitor,
    /// Gates where holds are handed on: somebody must see to it that each is taken.
    pub(super) relays: UnboundedSender<Arc<Gate>>,
    /// How many turns were taken.
    pub(super) turns: AtomicU32,
    pub(super) runtime: Handle,
    /// Stored, then the holds and gates are looked through; whoever begins something puts it there first, and then loads
    /// this. The mutexes of those maps and holds order the two: one of both sees the other.
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

/// Keeps the client's thread alive: held by clients, locks and guards. The last one ends it.
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
    /// The client's thread goes on until what was dropped is released. If anything is under way, it is waited for, for
    /// [`CLOSING`] at most: perhaps the process is about to end. Not on a runtime's thread, which has others to serve: there it is
    /// the end of the runtime that waits, as for all that blocks.
    fn drop(&mut self) {
        if !self.core.store.is_ours() {
            return;
        }
        let (core, end) = (Arc::clone(&self.core), self.end.take());
        let under_way = self.core.janitor.pending() > 0;
        let (settled, told) = mpsc::sync_channel(1);
        self.core.runtime.spawn(async move {
            let _ = tokio::time::timeout(core.settling_time(), core.janitor.at_rest()).await;
            let _ = settled.try_send(());
            core.closed.store(true, Ordering::Release);
            core.store.close().await;
            drop(end);
        });
        if !under_way {
            return;
        }
        self.core.store.hurry();
        match Handle::try_current() {
            Err(_) => drop(Settling::begin(told)),
            // the client's own thread cannot wait for itself
            Ok(here) if here.id() == self.core.runtime.id() => {}
            Ok(here) => {
                let settling = Settling::begin(told);
                drop(here.spawn_blocking(move || drop(settling)));
            }
        }
    }
}

/// What was dropped is being released. Its drop waits for that: a runtime that ends, in which a task had the last handle, runs
/// nothing any more that blocks, but drops it.
struct Settling {
    told: mpsc::Receiver<()>,
    /// However late it is waited for: behind others, where few threads may block.
    until: Instant,
}

impl Settling {
    fn begin(told: mpsc::Receiver<()>) -> Self {
        Self { told, until: Instant::now() + CLOSING }
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        let _ = self.told.recv_timeout(self.until.saturating_duration_since(Instant::now()));
    }
}

impl Core {
    /// Connects. On the client's own runtime.
    pub(super) async fn connect(&self) -> Result<()> {
        self.store.connect().await?;
        self.beginning.tell();
        if let Err(closed) = self.check_open() {
            // the shutdown had nothing to end yet
            self.store.close().await;
            return Err(closed);
        }
        Ok(())
    }

    /// Waits until there has been a connection: a lazy client makes it when it is first asked for one. Until `deadline` at most,
    /// and no longer than the try that is under way and the next one may take.
    ///
    /// # Errors
    ///
    /// Why the next try has failed.
    pub(crate) async fn connected(&self, deadline: Option<Instant>) -> Result<()> {
        self.check_open()?;
        if self.store.is_connected() { Ok(()) } else { Box::pin(self.first_connection(deadline)).await }
    }

    async fn first_connection(&self, deadline: Option<Instant>) -> Result<()> {
        if !self.store.is_ours() {
            // a fork has no thread that would connect, and no timer: each request is told so
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

    /// The door of a call about a lock: refuses a fork, and waits for the first connection.
    pub(super) async fn enter(&self, lock: &str) -> Result<()> {
        self.check_ours(lock)?;
        self.connected(None).await
    }

    /// Of a lock that this process, a fork, does not hold: its parent does, perhaps. Before the first mutex: one that another
    /// thread had when the process forked stays locked in the child.
    pub(crate) fn check_ours(&self, lock: &str) -> Result<()> {
        self.store.check_ours().map_err(|forked| store_error(lock, forked))
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(Error::Closed) } else { Ok(()) }
    }

    /// From here on nothing begins, and nobody waits.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.beginning.tell();
        for baton in self.hub.close().into_iter().chain(self.signals.close()) {
            self.janitor.lay(baton.into());
        }
    }

    /// How long past the end of a wait, or after it was asked, a server is waited for.
    pub(crate) fn grace(&self) -> Duration {
        LATE_ANSWER + self.store.free_round_trip()
    }

    /// A timer of the client's own runtime: the caller's may have none, or a paused clock.
    pub(crate) fn sleep_until(&self, at: Instant) -> Sleep {
        let _context = self.runtime.enter();
        tokio::time::sleep(at.saturating_duration_since(Instant::now()))
    }

    /// How whoever waits as this owner is woken. In a cluster nobody waits for lists: their slots are many, and BLPOP takes one.
    pub(super) fn wake(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Wake {
        match kind.wake(owner) {
            Wake::Signal(_) if self.store.is_cluster() => {
                let (first, longest) = (Duration::from_millis(10), self.config.poll_cap);
                Wake::Poll(Box::new(Backoff::exponential(first, longest, 2.0)))
            }
            wake => wake,
        }
    }

    /// Who acquires: the one door at which identity is resolved.
    pub(super) fn resolve(&self, kind: &Arc<dyn Kind>, options: &AcquireOptions) -> Result<OwnerId> {
        if let Some(value) = &options.rare().value {
            let refuse = |reason| Err(Error::InvalidOwner { owner: value.clone(), reason });
            if !kind.about().values {
                return refuse("this kind of lock records tasks; acquire as an owner, or use a string lock");
            }
            return match OwnerId::from_value(value)? {
                owner if owner.is_value() => Ok(owner),
                _ => refuse("it reads as a client's task; use another text"),
            };
        }
        match &options.rare().owner {
            None => Ok(OwnerId::current(&self.client)),
            Some(owner) if owner.is_of(&self.client) => Ok(owner.clone()),
            Some(owner) => Err(Error::InvalidOwner {
                owner: owner.to_string(),
                reason: "it belongs to another client, which alone knows its hold count; \
                         here it can be released or extended, not acquired as",
            }),
        }
    }

    /// When a hold is over that was acquired a moment ago without a lease, if nobody renews it.
    pub(super) fn default_end(&self, kind: &Arc<dyn Kind>) -> Instant {
        if kind.about().endless { Instant::NEVER } else { Instant::now() + self.config.watchdog_timeout }
    }

    /// How long a settlement may take while the server answers.
    pub(super) fn settling_time(&self) -> Duration {
        2 * self.config.command_timeout() + Duration::from_millis(100)
    }

    /// The turn of a hold, and when that was: `now`, where nobody had it.
    pub(super) async fn turn_at<'h>(
        &self,
        hold: &'h Hold,
        deadline: Option<Instant>,
        now: Instant,
    ) -> Result<(SemaphorePermit<'h>, Instant), StoreError> {
        match hold.turn.try_acquire() {
            Ok(turn) => Ok((turn, now)),
            Err(_) => Ok((self.turn(hold, deadline).await?, Instant::now())),
        }
    }

    /// The turn of a hold; no timer where it is free. Whoever has it sends two requests at most, so nobody waits for longer
    /// than those may take, whatever the deadline; but it may be a future that nobody polls any more.
    pub(super) async fn turn<'h>(
        &self,
        hold: &'h Hold,
        deadline: Option<Instant>,
    ) -> Result<SemaphorePermit<'h>, StoreError> {
        if let Ok(turn) = hold.turn.try_acquire() {
            return Ok(turn);
        }
        let longest = Instant::now() + 2 * self.config.command_timeout();
        let deadline = deadline.map_or(longest, |deadline| deadline.min(longest));
        let turn = tokio::select! {
            biased;
            turn = hold.turn.acquire() => turn.ok(),
            () = self.sleep_until(deadline) => None,
        };
        let stuck = "another call of this owner is under way; is its future polled?";
        turn.ok_or_else(|| StoreError::new(StoreErrorKind::Overloaded, false, stuck))
    }
}
