//! The janitor settles in the background what no caller awaits: dropped guards, cancelled calls,
//! lost replies, and unsettled requests under abandoned names.
//!
//! An unsettled request is one whose late execution may create a hold under an abandoned name. That
//! hold never yields a guard, and is never renewed. The janitor releases the name, and the name to
//! which the hold may have been moved: once, if the reply comes over the connection of the request,
//! otherwise again after the command timeout. An acquire that arrives even later ends with its
//! lease. A release that arrives later ends what is held under its name, which matters only for a
//! value that is used again.

use std::{iter, sync::Arc, time::Duration};

use futures_util::FutureExt;
use nestlock_wire::{clock::Instant, log};
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};

use super::{
    core::{Core, LOCKS_AT_ONCE},
    failure::again,
    hold::{Hold, state::Residue},
    jobs::{Janitor, Job, LentOwnerLock, UnsettledRequest},
    kind::Kind,
    retry::Retry,
    settle::Agreement,
    wait::{queue::WaitQueue, relay::RelayExpiry},
};

use crate::{
    error::{Error, Result, StoreError},
    meter::Meter,
    owner::OwnerId,
    store::Released,
    sync::spawn,
};

/// Longest pause between two attempts at a settlement.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

fn retry() -> Retry {
    Retry::new(Duration::from_millis(20), LONGEST_PAUSE)
}

/// Waits before a request about this lock is retried: until the link is up, for at most
/// [`LONGEST_PAUSE`], and then for the back-off. A server that refused everything because its
/// cluster was down ends the back-off early when it serves again.
///
/// While the job pauses because its request was denied, no shutdown waits for it.
async fn pause(core: &Core, record: &str, retry: &mut Retry, error: StoreError) {
    let is_denied = !error.is_transient();
    core.janitor.failed(error);
    let _denied = is_denied.then(|| core.janitor.denied());
    let _ = timeout(LONGEST_PAUSE, core.store.wait_up(record)).await;
    let _ = timeout(retry.next(), core.store.serving_again(record)).await;
}

/// Returns when the janitor gives up on a record that may live until `ends`. A request sent a
/// moment ago may have started a default lease, so that lease is the minimum.
fn deadline(core: &Core, kind: &Arc<dyn Kind>, ends: Instant) -> Instant {
    ends.max(core.default_end(kind)) + core.config.command_timeout()
}

/// Processes the list until the client ends. Holds are batched while many requests are in flight;
/// other jobs start at once.
pub(crate) async fn run(core: Arc<Core>, mut list: mpsc::UnboundedReceiver<Job>) {
    let (mut jobs, mut holds) = (Vec::new(), Vec::new());
    loop {
        let count = tokio::select! {
            biased;
            () = core.janitor.has_room(), if holds.len() >= LOCKS_AT_ONCE => 0,
            count = list.recv_many(&mut jobs, LOCKS_AT_ONCE) => count,
            // Replies arrive on other threads, maybe faster than a loop drops 1000 guards.
            // Receiving jobs first (`biased`) keeps such guards from being settled in many small
            // batches.
            () = core.janitor.has_room(), if !holds.is_empty() => 0,
        };
        if count == 0 {
            if holds.is_empty() {
                return;
            }
            let batch = holds.drain(..holds.len().min(LOCKS_AT_ONCE)).collect();
            spawn(settle_all(Arc::clone(&core), batch));
        }
        for job in jobs.drain(..) {
            match job {
                Job::Settle(hold) => holds.push(hold),
                Job::Leave { place, permit } => leave(&core, place, permit),
                other => drop(spawn(work(Arc::clone(&core), other))),
            }
        }
    }
}

/// Counts jobs as done when dropped, so a panic cannot block shutdown.
struct Done<'a>(&'a Janitor, usize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done(self.1);
    }
}

async fn work(core: Arc<Core>, job: Job) {
    let _done = Done(&core.janitor, 1);
    match job {
        // `run` handles these itself
        Job::Settle(_) | Job::Leave { .. } => {}
        Job::CleanUp(ghost) => {
            clean_up(&core, &ghost).await;
            core.holds.doubt_is_over(&ghost.kind, &ghost.owner);
        }
        Job::TakeOff { kind, owner, tell } => take_off(&core, &kind, &owner, tell).await,
    }
}

/// Settles many holds: as many as possible by one request, then each remaining hold by a request of
/// its own.
async fn settle_all(core: Arc<Core>, holds: Vec<Arc<Hold>>) {
    let mut done = Done(&core.janitor, holds.len());
    if holds.len() > 1 {
        core.settle_together(&holds).await;
    }
    for hold in holds {
        done.1 -= 1;
        let core_of_task = Arc::clone(&core);
        spawn(async move {
            let _done = Done(&core_of_task.janitor, 1);
            settle(&core_of_task, hold).await;
        });
    }
}

async fn settle(core: &Core, hold: Arc<Hold>) {
    let deadline = deadline(core, hold.kind(), hold.record_ends());
    let mut retry = retry();
    loop {
        // The future that has the owner lock may never be polled again. Then the watchdog orphans
        // the hold, or its lease ends, and this loop must notice that, hence the timeout.
        let permit = core
            .lock_owner(&hold, Some(Instant::now() + core.holds.due.overdue()))
            .await;
        let Ok(permit) = permit else {
            hold.unlist();
            if hold.residue() != Residue::Doubt || !hold.list() {
                break;
            }
            continue;
        };
        let slot = core.janitor.slot().await;
        let refused = match core.agree(&hold, Instant::now()).await {
            Agreement::Reached { .. } => {
                Meter::settlement("settled");
                None
            }
            Agreement::NotOurs => None,
            Agreement::Refused(error) => {
                // The refusal may be temporary and the record may live: retry until the deadline.
                if Instant::now() > deadline {
                    log::later!(
                        WARN, lock = hold.lock_name(), error = error; "the release was refused until the lease ended, which freed the lock"
                    );
                    core.write_off(&hold, error.kind());
                    Meter::settlement("given_up");
                    None
                } else {
                    Some(error)
                }
            }
            // The request may still run. Abandon the name, so that the next acquire uses another
            // one.
            Agreement::Silent(error) => {
                core.janitor.failed(again(&error));
                core.abandon_name_in_doubt(&hold);
                Some(error)
            }
        };
        drop((permit, slot));
        // A change made before this line saw the hold on the list and did not post it again. So
        // check for a residue after unlisting.
        hold.unlist();
        if hold.residue() != Residue::Doubt || !hold.list() {
            break; // settled, or on the list again
        }
        let Some(error) = refused else { continue };
        log::later!(DEBUG, lock = hold.lock_name(), error = error; "the settlement failed; retrying");
        pause(core, hold.kind().record(), &mut retry, error).await;
    }
    core.tidy(&hold);
}

/// Releases an abandoned name until no earlier request under it can still be executed.
///
/// A reply over the connection that carried the request proves that. Otherwise the request may
/// still sit in an old socket: the janitor releases at once, and a second time after the command
/// timeout. If the request arrives even later, its record ends with its lease.
async fn clean_up(core: &Core, ghost: &UnsettledRequest) {
    let lock = ghost.kind.name();
    // A request that is still in flight may start a lease when it arrives.
    let arrives = core.default_end(&ghost.kind) + core.config.watchdog_timeout;
    let deadline = deadline(core, &ghost.kind, ghost.ends.max(arrives));
    let mut retry = retry();
    let (mut once_more, mut probe) = (true, None);
    loop {
        let error = match release_unsettled(core, ghost).await {
            Ok(is_over) => {
                if is_over || !once_more {
                    return;
                }
                (once_more, probe) = (false, None);
                sleep(core.config.command_timeout()).await;
                continue;
            }
            Err(error) if Instant::now() < deadline => error,
            Err(error) => {
                log::later!(
                    WARN, lock = lock, owner = ghost.owner, error = error;
                    "the cleanup of an unsettled request failed until the lease ended, which freed the lock"
                );
                return;
            }
        };
        // A contended lock may leave one unsettled name per try: while the server fails, one of
        // them probes for all. A denied request does not probe, because the denial may concern that
        // request alone.
        if !error.is_transient() {
            probe = None;
        } else if probe.is_none() {
            match core.janitor.probe(&ghost.kind) {
                Ok(own) => probe = Some(own),
                Err(other) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    let _ = timeout(left, other.acquire()).await;
                    continue;
                }
            }
        }
        pause(core, ghost.kind.record(), &mut retry, error).await;
    }
}

/// Gives up a place in the wait queue.
///
/// The first poll hands the release to the connection. The owner's next request then goes out
/// behind it, without waiting for its reply.
fn leave(core: &Arc<Core>, place: UnsettledRequest, permit: LentOwnerLock) {
    let core_of_task = Arc::clone(core);
    let mut leaving = Box::pin(async move {
        let _done = Done(&core_of_task.janitor, 1);
        clean_up(&core_of_task, &place).await;
    });
    let is_left = leaving.as_mut().now_or_never().is_some();
    // Tidy before the owner lock is free: otherwise the owner's next request, while in flight,
    // could be taken for a doubt to settle.
    core.tidy(&permit.0);
    drop(permit);
    if !is_left {
        spawn(leaving);
    }
}

/// Releases the abandoned name, then the name that the hold may have been moved to: in this order,
/// no record is left to be moved. Returns whether the replies prove that no earlier request can
/// still run.
async fn release_unsettled(core: &Core, ghost: &UnsettledRequest) -> Result<bool, StoreError> {
    let mut is_over = true;
    for owner in iter::once(&ghost.owner).chain(&ghost.moves_to) {
        let (released, epoch) = core
            .store
            .release_unrecorded(&ghost.kind.release(owner, 0))
            .await?;
        is_over &= epoch == ghost.epoch;
        if released != Released::NotHeld {
            log::later!(DEBUG, lock = ghost.kind.name(), owner = owner; "released a hold that had no guard");
        }
    }
    Ok(is_over)
}

/// Takes one hold off the record of a lock whose hold count this client does not own.
///
/// Reports the result of the first attempt to `tell`, and retries while its outcome is unknown.
async fn take_off(
    core: &Core,
    kind: &Arc<dyn Kind>,
    owner: &OwnerId,
    tell: oneshot::Sender<Result<()>>,
) {
    let deadline = deadline(core, kind, Instant::now());
    // otherwise a release that this client has not settled yet would be taken for this one
    if let Some(left) = core.holds.left(kind, owner)
        && left.residue() == Residue::Doubt
        && let Ok(_permit) = core.lock_owner(&left, None).await
    {
        core.agree(&left, Instant::now()).await;
    }
    let (mut retry, mut in_doubt, mut tell) = (retry(), None, Some(tell));
    loop {
        let outcome = core.release_elsewhere(kind, owner, &mut in_doubt).await;
        let failure = match &outcome {
            Err(Error::Unconfirmed { source, .. }) => Some(again(source)),
            // This try was not executed, but an earlier one may have been.
            Err(Error::Store { source, .. }) => in_doubt.map(|_| again(source)),
            _ => None,
        };
        if let Some(tell) = tell.take() {
            let _ = tell.send(outcome);
        }
        match failure {
            Some(error) if Instant::now() <= deadline => {
                pause(core, kind.record(), &mut retry, error).await;
            }
            _ => return,
        }
    }
}

/// How long a hand-off may stay unclaimed, plus a round trip. Its waiter may be a future that is no
/// longer polled, or may be sending its own request to the server.
const TAKEN_WITHIN: Duration = Duration::from_millis(20);

/// Releases hand-offs that no waiter claims in time. Runs until the client ends.
pub(crate) async fn expire_relays(
    core: Arc<Core>,
    mut queues: mpsc::UnboundedReceiver<Arc<WaitQueue>>,
) {
    while let Some(queue) = queues.recv().await {
        let core = Arc::clone(&core);
        spawn(async move {
            let mut seen = 0;
            loop {
                match queue.relay.expire(seen) {
                    RelayExpiry::Busy(number) => seen = number,
                    RelayExpiry::Quiet => return,
                    RelayExpiry::Unclaimed((hold, ticket)) => {
                        log::later!(DEBUG, lock = hold.lock_name(); "no waiter took a hold that was handed off; releasing it");
                        core.release_later(&hold, &ticket);
                        return queue.relay.expired();
                    }
                }
                sleep(TAKEN_WITHIN + core.store.round_trip()).await;
            }
        });
    }
}
