//! The janitor's list: settlements that no caller awaits. `janitor.rs` works through it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nestlock_wire::{Epoch, clock::Instant, log};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};

use super::{failure::again, hold::Hold, kind::Kind};

use crate::{
    error::{Result, StoreError},
    owner::OwnerId,
    sync::{
        DashMap, Entry, Notify,
        atomic::{AtomicUsize, Ordering},
    },
};

/// How many settlement requests may be in flight at once. Others wait for a slot.
const CONCURRENCY: usize = 512;
/// With this many in flight, holds to settle are batched.
const FEW: usize = 16;

/// The janitor's list. Posting never blocks and needs no runtime.
#[derive(Debug)]
pub(crate) struct Janitor {
    jobs: mpsc::UnboundedSender<Job>,
    /// The number of jobs that are not done. It goes up before a job is sent and down after its
    /// work, so a reader of 0 sees the effects of that work.
    pending: AtomicUsize,
    /// How many of them pause because the server denies their request until it is reconfigured.
    denied: AtomicUsize,
    /// Notified when a job is done, or denied.
    idle: Notify,
    slots: Semaphore,
    /// Notified when a settlement request is over.
    freed: Notify,
    /// Locks (family and name) for which one failing request is retried on behalf of all. The
    /// semaphore is closed when that probe ends.
    probes: DashMap<(&'static str, Arc<str>), Arc<Semaphore>>,
    failure: Mutex<LastFailure>,
}

/// Why the last settlement that failed did so.
#[derive(Debug, Default)]
struct LastFailure {
    /// `None` after all have succeeded.
    error: Option<StoreError>,
    /// A shutdown has reported it: what fails since then fails because the connections are closed.
    is_reported: bool,
}

#[derive(Debug)]
pub(crate) enum Job {
    Settle(Arc<Hold>),
    CleanUp(UnsettledRequest),
    /// Give up a place in a wait queue, under a name that is no longer used. The job keeps the
    /// owner lock until the connection has that request.
    Leave {
        place: UnsettledRequest,
        permit: LentOwnerLock,
    },
    /// Take one hold off the record, and report the outcome of the first attempt to `tell`.
    TakeOff {
        kind: Arc<dyn Kind>,
        owner: OwnerId,
        tell: oneshot::Sender<Result<()>>,
    },
}

impl Janitor {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Job>) {
        let (jobs, list) = mpsc::unbounded_channel();
        let slots = Semaphore::new(CONCURRENCY);
        let (idle, freed) = (Notify::new(), Notify::new());
        let (pending, denied) = (AtomicUsize::new(0), AtomicUsize::new(0));
        (
            Self {
                jobs,
                pending,
                denied,
                idle,
                slots,
                freed,
                probes: DashMap::new(),
                failure: Mutex::default(),
            },
            list,
        )
    }

    /// Posts a job that makes the server agree with a hold, unless it is on the list already.
    pub(crate) fn settle(&self, hold: &Arc<Hold>) {
        if hold.list() {
            self.post(Job::Settle(Arc::clone(hold)));
        }
    }

    /// Posts a job that removes what a late request may leave behind under an abandoned name.
    pub(crate) fn schedule_cleanup(&self, ghost: UnsettledRequest) {
        self.post(Job::CleanUp(ghost));
    }

    pub(crate) fn post(&self, job: Job) {
        self.pending.fetch_add(1, Ordering::AcqRel);
        if let Err(refused) = self.jobs.send(job) {
            self.done(1);
            log::later!(WARN, job = format!("{:?}", refused.0); "the lock client has ended; the lock is freed when its lease ends, a place in a queue when its patience ends");
        }
    }

    /// Counts jobs as done. Wakes waiters if at most denied jobs are left.
    pub(super) fn done(&self, jobs: usize) {
        let left = self.pending.fetch_sub(jobs, Ordering::AcqRel) - jobs;
        if left == 0 {
            self.failure().error.take();
        }
        if left <= self.denied.load(Ordering::Acquire) {
            self.idle.notify_waiters();
        }
    }

    /// Waits for the slot of one settlement request. The caller drops it when the request is over.
    pub(super) async fn slot(&self) -> Slot<'_> {
        Slot {
            janitor: self,
            permit: self.slots.acquire().await.ok(),
        }
    }

    /// Waits until fewer than [`FEW`] settlement requests are in flight.
    pub(super) async fn has_room(&self) {
        while self.slots.available_permits() + FEW <= CONCURRENCY {
            // `notify_one` keeps one notification, so a slot that was freed since the check counts.
            self.freed.notified().await;
        }
    }

    /// Returns how many jobs are not done.
    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Acquire)
    }

    /// Waits until all jobs are done.
    pub(crate) async fn idle(&self) {
        self.until(|| self.pending() == 0).await;
    }

    /// Waits until only denied jobs are left.
    pub(crate) async fn at_rest(&self) {
        self.until(|| self.pending() <= self.denied.load(Ordering::Acquire))
            .await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        loop {
            // Create this before the check, or a notification in between would be lost.
            let told = self.idle.notified();
            if is_so() {
                return;
            }
            told.await;
        }
    }

    /// Registers the probe of a lock: the one failing request that is retried on behalf of all.
    /// Returns `Err` if there is one already: a semaphore that is closed when that probe ends.
    pub(super) fn probe(&self, kind: &Arc<dyn Kind>) -> Result<Probe<'_>, Arc<Semaphore>> {
        let lock = (kind.about().family, Arc::clone(kind.name()));
        match self.probes.entry(lock.clone()) {
            Entry::Occupied(other) => Err(Arc::clone(other.get())),
            Entry::Vacant(place) => {
                place.insert(Arc::new(Semaphore::new(0)));
                Ok(Probe {
                    janitor: self,
                    lock,
                })
            }
        }
    }

    /// Records why a settlement failed. It is tried again.
    pub(super) fn failed(&self, error: StoreError) {
        let mut failure = self.failure();
        if !failure.is_reported {
            failure.error = Some(error);
        }
    }

    /// Returns why settlements failed, to be reported by a shutdown.
    pub(super) fn why(&self) -> Option<StoreError> {
        let mut failure = self.failure();
        failure.is_reported = true;
        failure.error.as_ref().map(again)
    }

    fn failure(&self) -> MutexGuard<'_, LastFailure> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a job as paused because it was denied, until the result is dropped.
    pub(super) fn denied(&self) -> Denied<'_> {
        self.denied.fetch_add(1, Ordering::AcqRel);
        self.idle.notify_waiters();
        Denied(self)
    }
}

/// The owner lock of a hold, taken by forgetting its permit. Dropping this returns the permit.
#[derive(Debug)]
pub(crate) struct LentOwnerLock(pub(super) Arc<Hold>);

impl Drop for LentOwnerLock {
    fn drop(&mut self) {
        self.0.owner_lock.add_permits(1);
    }
}

/// The one request that is retried, of all that fail about one lock. Dropping it lets the others
/// retry.
pub(super) struct Probe<'a> {
    janitor: &'a Janitor,
    lock: (&'static str, Arc<str>),
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if let Some((_, over)) = self.janitor.probes.remove_if(&self.lock, |_, _| true) {
            over.close();
        }
    }
}

/// A job that pauses because it was denied.
pub(super) struct Denied<'a>(&'a Janitor);

impl Drop for Denied<'_> {
    fn drop(&mut self) {
        self.0.denied.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The slot of one settlement request.
pub(super) struct Slot<'a> {
    janitor: &'a Janitor,
    permit: Option<SemaphorePermit<'a>>,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        // First: the notified task counts the free permits.
        drop(self.permit.take());
        self.janitor.freed.notify_one();
    }
}

/// A hold that a late request may still create under an abandoned name.
#[derive(Debug, Clone)]
pub(crate) struct UnsettledRequest {
    pub(crate) kind: Arc<dyn Kind>,
    pub(crate) owner: OwnerId,
    /// The name that the hold may be moved to.
    pub(crate) moves_to: Option<OwnerId>,
    /// The connection that carried the requests in doubt.
    pub(crate) epoch: Epoch,
    /// Until when the hold may live.
    pub(crate) ends: Instant,
}
