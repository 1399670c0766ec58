//! The loop: try, listen, try, wait. The only one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    Anchor, Core, Kind, UnderWay,
    holds::{Agreement, Hold, Ticket},
    hub::Woken,
};
use crate::{
    error::{Error, LossReason, Result, StoreError},
    options::{AcquireOptions, Wait, checked_lease, millis},
    owner::OwnerId,
    store::Acquired,
};

/// How long past the end of the wait the answer to a request under way is awaited.
const GRACE: Duration = Duration::from_millis(40);
/// The pause before a request that the server refused for now is repeated; half of it is random.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// A hold that was acquired, and the ticket to it.
pub(crate) type Entered = (Arc<Hold>, Ticket);

/// One acquire, with everything resolved.
struct Acquire<'a> {
    core: &'a Core,
    kind: &'a Arc<dyn Kind>,
    owner: OwnerId,
    lease: Duration,
    /// The watchdog's timeout, if it is to renew.
    watchdog: Option<Duration>,
}

enum Attempt {
    Entered(Entered),
    Busy {
        ttl: Option<Duration>,
    },
    /// It may work a little later. Nothing is held.
    Failed(Error),
}

/// Acquires; `None`: busy until the wait was over.
pub(crate) async fn acquire(anchor: &Anchor, kind: &Arc<dyn Kind>, options: AcquireOptions) -> Result<Option<Entered>> {
    let core = &**anchor;
    let (lease, watchdog) = match options.lease {
        Some(lease) => (checked_lease(kind.name(), lease)?, None),
        None => (core.config.watchdog_timeout, Some(core.config.watchdog_timeout)),
    };
    let owner = core.resolve(options.owner)?;
    let started = Instant::now();
    let this = Acquire { core, kind, owner, lease, watchdog };

    let limit = options.wait.until(started);
    // listening before the first try spares the second
    let mut waiter = if options.wait == Wait::No { None } else { core.hub.join_existing(kind.channel()) };
    let mut told = None;
    let (mut attempts, mut failing_since, mut pause) = (0_u32, None, PAUSE.0);
    loop {
        core.check_open()?;
        attempts += 1;
        let tried = Instant::now();
        // an outage ends the call within the patience, not an attempt later
        let patience = failing_since.map(|since: Instant| since + core.config.outage_patience);
        let attempt = this.attempt_until(limit.or(patience).filter(|_| options.wait != Wait::No)).await?;
        match attempt {
            Attempt::Entered(entered) => {
                forget(&mut told);
                if attempts > 1 {
                    let waited_ms = millis(started.elapsed());
                    tracing::debug!(lock = %kind.name(), owner = %this.owner, waited_ms, attempts, "acquired");
                }
                return Ok(Some(entered));
            }
            Attempt::Busy { ttl } => {
                forget(&mut told);
                (failing_since, pause) = (None, PAUSE.0);
                if limit.is_some_and(|limit| limit <= Instant::now()) {
                    return Ok(None);
                }
                let first = waiter.is_none();
                let waiter = waiter.get_or_insert_with(|| core.hub.join(kind.channel()));
                if first {
                    tracing::debug!(lock = %kind.name(), owner = %this.owner, "busy; waiting");
                }
                let alarm = |at| core.sleep_until(at);
                match waiter.wait(ttl, core.config.poll_cap, limit, alarm).await {
                    Woken::Told(permit) => told = Some(permit),
                    Woken::Poll => {}
                    Woken::TimedOut => return Ok(None),
                    Woken::Closed => return Err(Error::Closed),
                }
            }
            Attempt::Failed(error) => {
                drop(told.take()); // the next waiter may have better luck
                let since = *failing_since.get_or_insert(tried);
                let patience = limit.unwrap_or(since + core.config.outage_patience);
                if Instant::now() >= patience {
                    return Err(error);
                }
                tracing::debug!(lock = %kind.name(), %error, "trying again");
                this.pause(pause, patience).await;
                pause = (pause * 2).min(PAUSE.1);
            }
        }
    }
}

/// The try was made that the permit was for.
fn forget(told: &mut Option<OwnedSemaphorePermit>) {
    if let Some(permit) = told.take() {
        permit.forget();
    }
}

impl Acquire<'_> {
    /// One attempt, given up a little after the end of the wait. It then counts as cancelled.
    async fn attempt_until(&self, limit: Option<Instant>) -> Result<Attempt> {
        let limit = match limit {
            // the command timeout ends it earlier: no timer on the hot path
            Some(limit) if limit + GRACE < Instant::now() + self.core.config.command_timeout() => limit + GRACE,
            _ => return Box::pin(self.attempt()).await,
        };
        let attempt = Box::pin(self.attempt());
        tokio::select! {
            biased;
            attempt = attempt => attempt,
            () = self.core.sleep_until(limit) => Ok(Attempt::Failed(self.core.silence(self.kind.name()))),
        }
    }

    /// One attempt, in the owner's turn.
    async fn attempt(&self) -> Result<Attempt> {
        let Self { core, kind, .. } = *self;
        let under_way = UnderWay { core, hold: core.holds.get_or_insert(kind, &self.owner) };
        let hold = &under_way.hold;
        let _turn = hold.turn.lock().await;

        // what this owner left behind comes first: a dropped guard, a cancelled call, a lost reply
        match hold.agree(core).await {
            Agreement::Reached { .. } => {}
            Agreement::Refused(error) => return self.failed(error),
            Agreement::Silent(error) if hold.count() > 0 => return self.failed(error),
            Agreement::Silent(_) => hold.abandon_name_in_doubt(core),
        }
        let plan = hold.plan(&core.holds, core.config.max_holds)?;
        let link = core.store.link(kind.name());
        hold.sending(link.epoch());
        let sent = Instant::now();
        match core.store.acquire(kind.acquire(&plan.owner, millis(self.lease), plan.holds)).await {
            Ok(Acquired::Yes) => match hold.enter(&plan, sent, self.lease, self.watchdog) {
                Some(ticket) => Ok(Attempt::Entered((Arc::clone(hold), ticket))),
                None => Ok(Attempt::Failed(hold.lost_error(LossReason::LeaseExpired))),
            },
            Ok(Acquired::Busy { ttl }) => {
                hold.server_holds_nothing();
                Ok(Attempt::Busy { ttl })
            }
            Ok(Acquired::Lost) => {
                hold.server_holds_nothing();
                hold.lose(LossReason::RecordMissing);
                Err(hold.lost_error(LossReason::RecordMissing))
            }
            Ok(Acquired::WrongKind) => {
                hold.server_holds_nothing();
                Err(Error::WrongLockKind { lock: kind.name().to_string() })
            }
            Err(error) => {
                if !error.may_have_executed() {
                    hold.not_sent(&plan);
                }
                self.failed(error)
            }
        }
    }

    fn failed(&self, error: StoreError) -> Result<Attempt> {
        let transient = error.is_transient();
        let error = self.core.store_error(self.kind.name(), error);
        if transient { Ok(Attempt::Failed(error)) } else { Err(error) }
    }

    /// Waits until the server can be reached, and a little longer, with jitter; at most until `patience`.
    async fn pause(&self, pause: Duration, patience: Instant) {
        let left = patience.saturating_duration_since(Instant::now());
        if !self.core.store.link(self.kind.name()).is_up() {
            tokio::select! {
                () = self.core.store.link(self.kind.name()).wait_up() => return,
                () = self.core.sleep_until(patience) => return,
            }
        }
        let jitter = pause.mul_f64(0.5 + 0.5 * super::random_fraction());
        self.core.sleep_until(Instant::now() + jitter.min(left)).await;
    }
}
