//! Settles what nobody awaits: dropped guards, cancelled calls, lost replies, ghosts.

use std::{iter, sync::Arc, time::Duration};

use futures_util::FutureExt;
use tokio::{
    sync::{mpsc, oneshot},
    time::{sleep, timeout},
};

use super::{
    core::{Core, LOCKS_AT_ONCE},
    hold::Hold,
    jobs::{Ghost, Janitor, Job, LentTurn},
    kind::{Kind, Terms},
    retry::Retry,
    settle::Agreement,
    state::{Leftover, Standing},
    wait::{gate::Gate, relay::Minded},
};
use crate::{
    clock::Instant,
    error::{Error, Result, StoreError},
    log,
    meter::Meter,
    owner::OwnerId,
    store::Released,
    sync::spawn,
};

/// The longest pause after a settlement failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

fn retry() -> Retry {
    Retry::new(Duration::from_millis(20), LONGEST_PAUSE)
}

/// Pauses before a request about this lock is repeated: for as long as the link is down, and a little longer. No shutdown
/// waits for what `is_denied`.
async fn pause(core: &Core, record: &str, retry: &mut Retry, is_denied: bool) {
    let _denied = is_denied.then(|| core.janitor.denied());
    let _ = timeout(LONGEST_PAUSE, core.store.wait_up(record)).await;
    let _ = timeout(retry.next(), core.store.serves_again(record)).await;
}

/// Until when the janitor tries, for a record that may live until `ends`: one whose last request came a moment ago lives for
/// a default lease.
fn deadline(core: &Core, kind: &Arc<dyn Kind>, ends: Instant) -> Instant {
    ends.max(core.default_end(kind)) + core.config.command_timeout()
}

/// Works through the list until the client ends. Holds gather while many requests are under way; nothing else waits for that.
pub(crate) async fn run(core: Arc<Core>, mut list: mpsc::UnboundedReceiver<Job>) {
    let (mut jobs, mut holds) = (Vec::new(), Vec::new());
    loop {
        let count = tokio::select! {
            biased;
            () = core.janitor.has_room(), if holds.len() >= LOCKS_AT_ONCE => 0,
            count = list.recv_many(&mut jobs, LOCKS_AT_ONCE) => count,
            // answers come on other threads, and may be quicker than whoever drops a thousand guards one by one
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
                Job::Leave { place, turn } => leave(&core, place, turn),
                other => drop(spawn(work(Arc::clone(&core), other))),
            }
        }
    }
}

/// Counts jobs as done even if one panics.
struct Done<'a>(&'a Janitor, usize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.done(self.1);
    }
}

async fn work(core: Arc<Core>, job: Job) {
    let _done = Done(&core.janitor, 1);
    match job {
        // it is the batch's, and the connection's
        Job::Settle(_) | Job::Leave { .. } => {}
        Job::Bust(ghost) => {
            bust(&core, &ghost).await;
            core.holds.doubt_is_over(&ghost.kind, &ghost.owner);
        }
        Job::TakeOff { kind, owner, hold, tell } => take_off(&core, &kind, &owner, hold, tell).await,
        Job::SetCount { hold, holds } => set_count(&core, &hold, holds).await,
    }
}

/// Settles many holds: by one request, what can be; what is left then, each by itself.
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
        // whoever has the turn may be a future that nobody polls any more: then the watchdog makes an orphan of the hold
        let turn = core.turn(&hold, Some(Instant::now() + core.holds.due.overdue())).await;
        if hold.standing() != Standing::Ours {
            hold.unlist();
            break;
        }
        let Ok(turn) = turn else { continue };
        let slot = core.janitor.slot().await;
        let refused = match core.agree(&hold, Instant::now()).await {
            Agreement::Reached { .. } => {
                Meter::settlement("settled");
                None
            }
            Agreement::NotOurs => None,
            Agreement::Refused(error) => {
                // an answer that may change, and a record that may live: the release goes on
                if Instant::now() > deadline {
                    log::later!(
                        WARN, lock = hold.lock_name(), error = error; "cannot settle; the lease has freed the lock"
                    );
                    core.write_off(&hold, error.kind());
                    Meter::settlement("given_up");
                    None
                } else {
                    Some(error)
                }
            }
            // a ghost from here on: whoever wants the lock meanwhile uses another name
            Agreement::Silent(error) => {
                core.abandon_name_in_doubt(&hold);
                Some(error)
            }
        };
        drop((turn, slot));
        // whoever changed something up to here saw it on the list
        hold.unlist();
        if hold.leftover() != Leftover::Doubt || !hold.list() {
            break; // settled, or on the list again
        }
        let Some(error) = refused else { continue };
        log::later!(DEBUG, lock = hold.lock_name(), error = error; "settling again");
        pause(core, hold.kind().record(), &mut retry, !error.is_transient()).await;
    }
    core.tidy(&hold);
}

/// Releases an abandoned name until no earlier request about it can still be executed.
///
/// An answer over the connection that carried the request proves it. Otherwise the request may lie in an old socket:
/// release now, and once more after the command timeout. What comes later still dies by its lease.
async fn bust(core: &Core, ghost: &Ghost) {
    let lock = ghost.kind.name();
    // what is on its way still may begin a lease when it arrives
    let arrives = core.default_end(&ghost.kind) + core.config.watchdog_timeout;
    let deadline = deadline(core, &ghost.kind, ghost.ends.max(arrives));
    let mut retry = retry();
    let (mut once_more, mut probe) = (true, None);
    loop {
        let is_denied = match release_ghost(core, ghost).await {
            Ok(is_over) => {
                if is_over || !once_more {
                    return;
                }
                (once_more, probe) = (false, None);
                sleep(core.config.command_timeout()).await;
                continue;
            }
            Err(error) if Instant::now() < deadline => !error.is_transient(),
            Err(error) => {
                log::later!(
                    WARN, lock = lock, owner = ghost.owner, error = error;
                    "cannot settle; the lease has freed the lock"
                );
                return;
            }
        };
        // a lock that is waited for may have left a name behind with each try: one of them asks for all. What is denied may be
        // so for a reason of its own
        if is_denied {
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
        pause(core, ghost.kind.record(), &mut retry, is_denied).await;
    }
}

/// Gives up a place in a queue. What its owner asks next may come right behind the request: the connection has it when it was
/// polled once.
fn leave(core: &Arc<Core>, place: Ghost, turn: LentTurn) {
    let core_of_task = Arc::clone(core);
    let mut leaving = Box::pin(async move {
        let _done = Done(&core_of_task.janitor, 1);
        bust(&core_of_task, &place).await;
    });
    let is_left = leaving.as_mut().now_or_never().is_some();
    // before its owner asks: what is under way then would be taken for something to be settled
    core.tidy(&turn.0);
    drop(turn);
    if !is_left {
        spawn(leaving);
    }
}

/// Where it may be moved to comes last: then nothing is left to be moved. Whether that proves that nothing comes any more.
async fn release_ghost(core: &Core, ghost: &Ghost) -> Result<bool, StoreError> {
    let mut is_over = true;
    for owner in iter::once(&ghost.owner).chain(&ghost.moves_to) {
        let (released, epoch) = core.store.release_in_no_books(&ghost.kind.release(owner, 0)).await?;
        is_over &= epoch == ghost.epoch;
        if released != Released::NotHeld {
            log::later!(DEBUG, lock = ghost.kind.name(), owner = owner; "removed a hold that nobody had");
        }
    }
    Ok(is_over)
}

/// Takes one hold off what the server records, whoever keeps the count besides.
async fn take_off(
    core: &Core,
    kind: &Arc<dyn Kind>,
    owner: &OwnerId,
    hold: Option<Arc<Hold>>,
    mut tell: Option<oneshot::Sender<Result<()>>>,
) {
    let deadline = deadline(core, kind, hold.as_ref().map_or(Instant::now(), |hold| hold.record_ends()));
    let (mut retry, mut in_doubt) = (retry(), None);
    loop {
        let outcome = core.release_elsewhere(kind, owner, &mut in_doubt).await;
        let unknown = matches!(outcome, Err(Error::Unconfirmed { .. }));
        let is_denied = outcome.as_ref().is_err_and(|error| !error.is_transient());
        let again = unknown || hold.is_some() && matches!(outcome, Err(Error::Store { .. }));
        if let Some(tell) = tell.take() {
            let _ = tell.send(outcome);
        }
        // nobody knows how many it records; while it is asked, the lease goes on to its end
        if let Some(hold) = hold.as_ref().filter(|_| unknown) {
            hold.stop_watching();
        }
        if !again || Instant::now() > deadline {
            return;
        }
        pause(core, kind.record(), &mut retry, is_denied).await;
    }
}

/// Makes the server record so many holds of a lock that was given away while a request was under way, or might come late.
/// A release elsewhere that comes before this counts for nothing, until the record's end: better that than two owners.
async fn set_count(core: &Core, hold: &Arc<Hold>, holds: u32) {
    let (deadline, owner) = (deadline(core, hold.kind(), hold.record_ends()), hold.owner());
    let mut retry = retry();
    while Instant::now() < deadline {
        // of what is gone, nothing but a first hold would be acquired anew
        let raised = holds == 1 || {
            // as long as it lives anyhow
            let lease_ms = hold.record_ends().saturating_duration_since(Instant::now()).as_millis().max(1) as u64;
            let terms = Terms { owner: &owner, lease_ms, holds, waits: false, turn: None };
            let mut route = core.route(hold, Instant::now());
            core.store.acquire(&mut route, &hold.kind().acquire(terms)).await.is_ok()
        };
        if raised && core.store.release_in_no_books(&hold.kind().release(&owner, holds)).await.is_ok() {
            return;
        }
        pause(core, hold.kind().record(), &mut retry, false).await;
    }
}

/// How long a hold that is handed on may lie there, and a round trip: whoever was told of it may be a future that nobody
/// polls any more, or is asking the server for the lock meanwhile.
const TAKEN_WITHIN: Duration = Duration::from_millis(20);

/// Sees to it that what is handed on is taken, until the client ends.
pub(crate) async fn mind_relays(core: Arc<Core>, mut gates: mpsc::UnboundedReceiver<Arc<Gate>>) {
    while let Some(gate) = gates.recv().await {
        let core = Arc::clone(&core);
        spawn(async move {
            let mut seen = 0;
            loop {
                match gate.relay.mind(seen) {
                    Minded::Busy(number) => seen = number,
                    Minded::Quiet => return,
                    Minded::Left(baton) => {
                        log::later!(DEBUG, lock = baton.kind.name(); "nobody has taken a hold that was handed on");
                        return core.janitor.lay(baton.into());
                    }
                }
                sleep(TAKEN_WITHIN + core.store.round_trip()).await;
            }
        });
    }
}
