//! The janitor's list: what is to be settled though nobody awaits it.

use std::sync::Arc;

use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot};

use super::{hold::Hold, kind::Kind};
use crate::{
    clock::Instant,
    error::Result,
    log,
    owner::OwnerId,
    store::Epoch,
    sync::{
        DashMap, Entry, Notify,
        atomic::{AtomicUsize, Ordering},
    },
};

/// How many requests of settlements are under way at once; the rest waits its turn.
const CONCURRENCY: usize = 512;
/// While so many are, what is to be settled besides gathers, and goes together.
const FEW: usize = 16;

/// The janitor's list. Posting never blocks and needs no runtime.
#[derive(Debug)]
pub(crate) struct Janitor {
    jobs: mpsc::UnboundedSender<Job>,
    /// Counted up before a job is sent, and down when its work is over: whoever reads zero sees what that work has done.
    pending: AtomicUsize,
    /// How many of them pause, as the server has refused them for as long as it is configured as it is.
    denied: AtomicUsize,
    /// Told when a job is done, or denied.
    idle: Notify,
    slots: Semaphore,
    /// Told when a request is over.
    freed: Notify,
    /// The family and name of locks about which a request fails that is tried again: closed when that has ended.
    probes: DashMap<(&'static str, Arc<str>), Arc<Semaphore>>,
}

#[derive(Debug)]
pub(crate) enum Job {
    Settle(Arc<Hold>),
    Bust(Ghost),
    /// Give up a place in a queue, under a name that is not used any more. Its owner waits for its turn.
    Leave {
        place: Ghost,
        turn: LentTurn,
    },
    /// Take one hold off what the server records; tell what came of the first try.
    TakeOff {
        kind: Arc<dyn Kind>,
        owner: OwnerId,
        /// The guard of a lock that was given away in part was given up: this goes on until it counts.
        hold: Option<Arc<Hold>>,
        tell: Option<oneshot::Sender<Result<()>>>,
    },
    /// Make the server record so many holds of a lock that was given away.
    SetCount {
        hold: Arc<Hold>,
        holds: u32,
    },
}

impl Janitor {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Job>) {
        let (jobs, list) = mpsc::unbounded_channel();
        let slots = Semaphore::new(CONCURRENCY);
        let (idle, freed) = (Notify::new(), Notify::new());
        let (pending, denied) = (AtomicUsize::new(0), AtomicUsize::new(0));
        (Self { jobs, pending, denied, idle, slots, freed, probes: DashMap::new() }, list)
    }

    /// Makes the server agree with a hold, sometime soon.
    pub(crate) fn settle(&self, hold: &Arc<Hold>) {
        if hold.list() {
            self.post(Job::Settle(Arc::clone(hold)));
        }
    }

    /// Removes what a late execution may leave behind under an abandoned name.
    pub(crate) fn lay(&self, ghost: Ghost) {
        self.post(Job::Bust(ghost));
    }

    pub(crate) fn post(&self, job: Job) {
        self.pending.fetch_add(1, Ordering::AcqRel);
        if let Err(refused) = self.jobs.send(job) {
            self.done(1);
            log::later!(WARN, job = format!("{:?}", refused.0); "the lock client has ended; what it leaves ends with its lease, or its patience");
        }
    }

    pub(super) fn done(&self, jobs: usize) {
        if self.pending.fetch_sub(jobs, Ordering::AcqRel) - jobs <= self.denied.load(Ordering::Acquire) {
            self.idle.notify_waiters();
        }
    }

    /// Whoever makes a request of a settlement has one of these, and holds it no longer than that.
    pub(super) async fn slot(&self) -> Slot<'_> {
        Slot { janitor: self, permit: self.slots.acquire().await.ok() }
    }

    /// Waits until few requests are under way.
    pub(super) async fn has_room(&self) {
        while self.slots.available_permits() + FEW <= CONCURRENCY {
            self.freed.notified().await;
        }
    }

    /// How many jobs are not done.
    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Acquire)
    }

    /// Waits until the list is empty.
    pub(crate) async fn idle(&self) {
        self.until(|| self.pending() == 0).await;
    }

    /// Waits until nothing is on the list but what is denied.
    pub(crate) async fn at_rest(&self) {
        self.until(|| self.pending() <= self.denied.load(Ordering::Acquire)).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        loop {
            let told = self.idle.notified();
            if is_so() {
                return;
            }
            told.await;
        }
    }

    /// A request about this lock has failed, and is tried again, for all that fail. `Err`: another one is; closed when that has
    /// ended.
    pub(super) fn probe(&self, kind: &Arc<dyn Kind>) -> Result<Probe<'_>, Arc<Semaphore>> {
        let lock = (kind.about().family, Arc::clone(kind.name()));
        match self.probes.entry(lock.clone()) {
            Entry::Occupied(other) => Err(Arc::clone(other.get())),
            Entry::Vacant(place) => {
                place.insert(Arc::new(Semaphore::new(0)));
                Ok(Probe { janitor: self, lock })
            }
        }
    }

    /// A job pauses that was denied.
    pub(super) fn denied(&self) -> Denied<'_> {
        self.denied.fetch_add(1, Ordering::AcqRel);
        self.idle.notify_waiters();
        Denied(self)
    }
}

/// The turn of a hold, whose permit was forgotten.
#[derive(Debug)]
pub(crate) struct LentTurn(pub(super) Arc<Hold>);

impl Drop for LentTurn {
    fn drop(&mut self) {
        self.0.turn.add_permits(1);
    }
}

/// Of the requests about one lock that fail, the one that is tried again. When it is dropped, the others are.
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

/// A job that pauses, as it was denied.
pub(super) struct Denied<'a>(&'a Janitor);

impl Drop for Denied<'_> {
    fn drop(&mut self) {
        self.0.denied.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One request of a settlement.
pub(super) struct Slot<'a> {
    janitor: &'a Janitor,
    permit: Option<SemaphorePermit<'a>>,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.janitor.freed.notify_one();
    }
}

/// A hold under a name that is not used any more, which a late execution may still create.
#[derive(Debug, Clone)]
pub(crate) struct Ghost {
    pub(crate) kind: Arc<dyn Kind>,
    pub(crate) owner: OwnerId,
    /// The name that it may be moved to.
    pub(crate) moves_to: Option<OwnerId>,
    pub(crate) epoch: Epoch,
    /// Until when it may live.
    pub(crate) ends: Instant,
}
