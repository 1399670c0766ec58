//! Settles what nobody awaits: dropped guards, cancelled calls, lost replies, ghosts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, Semaphore, mpsc},
    time::sleep,
};

use super::{
    Core,
    holds::{Agreement, Ghost, Hold, Leftover},
};
use crate::store::Released;

/// How many settlements run at once; the rest waits its turn.
const CONCURRENCY: usize = 256;
/// The pause after a settlement failed: from, to.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// The janitor's list. Posting never blocks and needs no runtime.
#[derive(Debug)]
pub(crate) struct Janitor {
    jobs: mpsc::UnboundedSender<Job>,
    pending: AtomicUsize,
    idle: Notify,
}

#[derive(Debug)]
pub(crate) enum Job {
    Settle(Arc<Hold>),
    Bust(Ghost),
}

impl Janitor {
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Job>) {
        let (jobs, list) = mpsc::unbounded_channel();
        (Self { jobs, pending: AtomicUsize::new(0), idle: Notify::new() }, list)
    }

    /// Makes the server agree with a hold, sometime soon.
    pub(crate) fn settle(&self, hold: &Arc<Hold>) {
        if !hold.listed.swap(true, Ordering::AcqRel) {
            self.post(Job::Settle(Arc::clone(hold)));
        }
    }

    /// Removes what a late execution may leave behind under an abandoned name.
    pub(crate) fn lay(&self, ghost: Ghost) {
        self.post(Job::Bust(ghost));
    }

    fn post(&self, job: Job) {
        self.pending.fetch_add(1, Ordering::AcqRel);
        if let Err(refused) = self.jobs.send(job) {
            self.done();
            tracing::warn!(job = ?refused.0, "the lock client has ended; the lease will free the lock");
        }
    }

    fn done(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// How many jobs are not done.
    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Acquire)
    }

    /// Waits until the list is empty.
    pub(crate) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.pending() == 0 {
                return;
            }
            idle.await;
        }
    }
}

/// Works through the list until the client ends.
pub(crate) async fn run(core: Arc<Core>, mut list: mpsc::UnboundedReceiver<Job>) {
    let slots = Arc::new(Semaphore::new(CONCURRENCY));
    while let Some(job) = list.recv().await {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let core = Arc::clone(&core);
        tokio::spawn(async move {
            let done = Done(&core.janitor);
            match job {
                Job::Settle(hold) => settle(&core, hold).await,
                // ghosts wait most of the time
                Job::Bust(ghost) => {
                    drop(slot);
                    bust(&core, &ghost).await;
                    core.holds.doubt_is_over(&ghost);
                }
            }
            drop(done);
        });
    }
}

/// Counts a job as done even if it panics.
struct Done<'a>(&'a Janitor);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done();
    }
}

async fn settle(core: &Core, hold: Arc<Hold>) {
    let record_ends = hold.deadline().max(Instant::now() + core.default_lease(hold.kind()));
    let give_up = record_ends + core.config.command_timeout();
    let mut pause = PAUSE.0;
    loop {
        let turn = hold.turn.lock().await;
        // from here on a change needs another look
        hold.listed.store(false, Ordering::Release);
        let error = match hold.agree(core).await {
            Agreement::Reached { .. } => break,
            Agreement::Refused(error) => {
                if !error.is_transient() || Instant::now() > give_up {
                    tracing::warn!(lock = %hold.lock_name(), %error, "cannot settle; the lease will free the lock");
                    hold.abandon_name_in_doubt(core);
                    hold.write_off(error.kind());
                    break;
                }
                error
            }
            // a ghost from here on: whoever wants the lock meanwhile uses another name
            Agreement::Silent(error) => {
                hold.abandon_name_in_doubt(core);
                error
            }
        };
        drop(turn);
        if hold.leftover() != Leftover::Doubt || hold.listed.swap(true, Ordering::AcqRel) {
            break; // settled, or on the list again
        }
        tracing::debug!(lock = %hold.lock_name(), %error, "settling again");
        core.store.wait_up(hold.lock_name(), PAUSE.1).await;
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
    core.tidy(&hold);
}

/// Releases an abandoned name until no earlier request about it can still be executed.
///
/// An answer over the connection that carried the request proves it. Otherwise the request may lie in an old socket:
/// release now, and once more after the command timeout. What comes later still dies by its lease.
async fn bust(core: &Core, ghost: &Ghost) {
    let lock = ghost.kind.name();
    let link = core.store.link(lock);
    let give_up = Instant::now() + 2 * core.default_lease(&ghost.kind) + core.config.command_timeout();
    let mut pause = PAUSE.0;
    let mut once_more = true;
    loop {
        match core.store.release(ghost.kind.release(&ghost.owner, 0)).await {
            Ok(released) => {
                if released != Released::NotHeld {
                    tracing::debug!(%lock, owner = %ghost.owner, "removed a hold that nobody had");
                }
                if link.epoch() == ghost.epoch || !once_more {
                    return;
                }
                once_more = false;
                sleep(core.config.command_timeout()).await;
                continue;
            }
            Err(error) if error.is_transient() && Instant::now() < give_up => {}
            Err(error) => {
                tracing::warn!(%lock, owner = %ghost.owner, %error, "cannot settle; the lease will free the lock");
                return;
            }
        }
        core.store.wait_up(lock, PAUSE.1).await;
        sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}
