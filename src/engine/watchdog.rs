//! Renews leaseless holds every third of their TTL, in batches, and notices holds whose lease is over.
//!
//! The hot path does nothing for the watchdog: a hold taken after a pass is not due before the next one, since it is
//! due a third of the TTL after it was taken.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::time::sleep;

use super::{
    Core, Kind,
    holds::{Due, Hold},
};
use crate::{
    error::StoreError,
    options::millis,
    owner::OwnerId,
    store::{Arg, Call, Renewed, Script},
};

/// Locks in one script call: the server is blocked for a millisecond or so.
pub(super) const BATCH: usize = 500;
/// However soon a renewal is due again: no spinning.
const SHORTEST_PAUSE: Duration = Duration::from_millis(2);

struct Renewal {
    hold: Arc<Hold>,
    owner: OwnerId,
    generation: u64,
    ttl: Duration,
}

/// Runs until the client ends.
pub(crate) async fn run(core: Arc<Core>) {
    let period = core.config.watchdog_timeout / 3;
    loop {
        // a hold taken while the pass lasts is due a period after the pass began
        let latest = Instant::now() + period;
        let next = pass(&core).await.unwrap_or(latest).min(latest);
        let pause = next.saturating_duration_since(Instant::now()).max(SHORTEST_PAUSE);
        tokio::select! {
            () = sleep(pause) => {}
            // a hold with a shorter TTL was taken
            () = core.sooner.notified() => {}
        }
    }
}

/// Renews what is due; returns when the next hold will be.
async fn pass(core: &Arc<Core>) -> Option<Instant> {
    let now = Instant::now();
    let (mut next, mut expired) = (None::<Instant>, Vec::new());
    let mut renewals: HashMap<(&'static str, Duration), (&'static Script, Vec<Renewal>)> = HashMap::new();
    core.holds.for_each(|hold| match hold.due(now) {
        Due::Never => {}
        Due::At(at) => next = Some(next.map_or(at, |next| next.min(at))),
        Due::Expired => expired.push(Arc::clone(hold)),
        Due::Renew { owner, generation, ttl } => {
            let script = hold.kind().renew();
            let renewal = Renewal { hold: Arc::clone(hold), owner, generation, ttl };
            renewals.entry((script.name, ttl)).or_insert_with(|| (script, Vec::new())).1.push(renewal);
        }
    });
    for hold in expired {
        hold.lose_if_over();
        core.tidy(&hold);
    }
    for (script, batch) in renewals.into_values() {
        for chunk in batch.chunks(BATCH) {
            let soonest = renew(core, script, chunk).await;
            next = Some(next.map_or(soonest, |next| next.min(soonest)));
        }
    }
    core.holds.sweep();
    next
}

/// Renews one batch; returns when it is due again. A refusal that concerns one lock must not cost the others their
/// renewal, so a refused batch is halved.
async fn renew(core: &Arc<Core>, script: &'static Script, batch: &[Renewal]) -> Instant {
    // a batch has one TTL
    let lease = batch[0].ttl;
    let (sent, answers) = send(core, script, batch).await;
    let again = sent + lease / 3;
    let retry = Instant::now() + lease / 30;
    match answers {
        Ok(answers) => {
            let mut soonest = again;
            for (renewal, answer) in batch.iter().zip(answers) {
                let next = if answer == Renewed::Unknown { retry } else { again };
                soonest = soonest.min(next);
                renewal.hold.renewed(renewal.generation, answer, sent, lease, Some(next));
                // lost, or released meanwhile
                core.tidy(&renewal.hold);
            }
            soonest
        }
        Err(error) if batch.len() > 1 && !error.is_transient() => {
            let (left, right) = batch.split_at(batch.len() / 2);
            let left = Box::pin(renew(core, script, left)).await;
            left.min(Box::pin(renew(core, script, right)).await)
        }
        Err(error) => {
            tracing::warn!(locks = batch.len(), %error, "renewal failed; trying again until the lease ends");
            for renewal in batch {
                renewal.hold.renewed(renewal.generation, Renewed::Unknown, sent, lease, Some(retry));
                core.tidy(&renewal.hold);
            }
            retry
        }
    }
}

async fn send(core: &Core, script: &'static Script, batch: &[Renewal]) -> (Instant, Result<Vec<Renewed>, StoreError>) {
    let keys = batch.iter().map(|renewal| Arc::clone(renewal.hold.kind().record())).collect();
    let args = batch.iter().flat_map(|renewal| [Arg::from(&renewal.owner), millis(renewal.ttl).into()]).collect();
    let sent = Instant::now();
    (sent, core.store.renew(Call::new(script, keys, args)).await)
}

/// Lets a hold live for at least `lease` from now: the watchdog's script on one lock.
pub(crate) async fn extend(
    core: &Core,
    kind: &Arc<dyn Kind>,
    owner: &OwnerId,
    lease: Duration,
) -> (Instant, Result<Renewed, StoreError>) {
    let call = Call::new(kind.renew(), vec![Arc::clone(kind.record())], vec![owner.into(), millis(lease).into()]);
    let sent = Instant::now();
    (sent, core.store.renew(call).await.map(|answers| answers[0]))
}
