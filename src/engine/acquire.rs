//! The loop: try, listen, try, wait. The only one.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    Core, Kind, Request, UnderWay, Wake,
    holds::{Agreement, Hold, Plan, Ticket},
    hub::{Place, Woken},
};
use crate::{
    error::{Error, LossReason, Result, StoreError},
    options::{AcquireOptions, Wait, checked_lease, millis},
    owner::OwnerId,
    store::Acquired,
};

/// How long past the end of the wait the answer to a request under way is awaited.
const GRACE: Duration = Duration::from_millis(40);
/// So many holds are not handed over while a subscription is under way: a waiter with as many before him has missed no
/// message, and need not try again when he listens. Should he have, he looks for himself within the poll cap.
const FAR: u32 = 16;
/// The pause before a request that the server refused for now is repeated; half of it is random.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

pub(super) const NO_ANSWER: &str = "no answer before the wait was over";
pub(super) const TOO_LATE: &str = "the answer came when the lease was over already";

/// A hold that was acquired, and the ticket to it.
pub(crate) type Entered = (Arc<Hold>, Ticket);

/// How often a pause of a spin lock's waiter looks whether the client was shut down.
const LOOK: Duration = Duration::from_millis(200);

/// One acquire, with everything resolved.
pub(crate) struct Acquire<'a> {
    pub(super) core: &'a Core,
    pub(super) kind: &'a Arc<dyn Kind>,
    pub(super) owner: OwnerId,
    pub(super) lease: Duration,
    /// Whether the watchdog renews.
    watched: bool,
    waits: bool,
    started: Instant,
    /// When the wait is over; `None`: never.
    pub(super) limit: Option<Instant>,
}

enum Attempt<'a> {
    Entered(Entered),
    Busy {
        ttl: Option<Duration>,
        /// How to learn that it is worth trying again.
        wake: Wake,
        place: Option<Place<'a>>,
        /// Whether many are before this waiter.
        far: bool,
    },
    /// It may work a little later. Nothing is held.
    Failed(Error),
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(core: &'a Core, kind: &'a Arc<dyn Kind>, options: AcquireOptions) -> Result<Self> {
        let started = Instant::now();
        Ok(Self {
            core,
            kind,
            lease: match options.lease {
                Some(lease) => checked_lease(kind.name(), lease)?,
                None => core.config.watchdog_timeout,
            },
            watched: options.lease.is_none(),
            waits: options.wait != Wait::No,
            started,
            limit: options.wait.until(started),
            owner: core.resolve(options.owner)?,
        })
    }

    /// Acquires; `None`: busy until the wait was over.
    pub(crate) async fn run(&self) -> Result<Option<Entered>> {
        // listening before the first try spares the second
        let mut waiter = match self.waits.then(|| self.kind.wake(&self.owner)) {
            Some(Wake::Channel(channel)) => self.core.join_existing(&channel),
            _ => None,
        };
        let mut told = None;
        let (mut attempts, mut failing_since, mut pause) = (0_u32, None, PAUSE.0);
        loop {
            self.core.check_open()?;
            attempts += 1;
            let tried = Instant::now();
            // an outage ends the call within the patience, not an attempt later
            let patience = failing_since.map(|since: Instant| since + self.core.config.outage_patience);
            // nothing of an attempt lives on while its waiter sleeps
            let failure = match self.attempt_in_time(self.limit.or(patience)).await? {
                Attempt::Entered(entered) => {
                    forget(&mut told);
                    match &waiter {
                        Some(waiter) if self.kind.shares() => waiter.pass_on(),
                        Some(waiter) if self.kind.has_own_channel() => waiter.tell_next(),
                        _ => {}
                    }
                    if attempts > 1 {
                        let waited_ms = millis(self.started.elapsed());
                        tracing::debug!(lock = %self.kind.name(), owner = %self.owner, waited_ms, attempts, "acquired");
                    }
                    return Ok(Some(entered));
                }
                Attempt::Busy { ttl, wake, place, far } => {
                    forget(&mut told);
                    if self.limit.is_some_and(|limit| limit <= Instant::now()) {
                        return Ok(None);
                    }
                    match wake {
                        Wake::Channel(channel) => {
                            // the name in the queue, and the channel with it, may have changed
                            let same = waiter.take().filter(|waiter| waiter.listens_to(&channel));
                            let waiter = waiter.insert(same.unwrap_or_else(|| self.core.join(&channel, far)));
                            waiter.keep(place);
                            waiter.look_after(ttl);
                        }
                        Wake::Poll(backoff) => self.back_off(backoff.pause(attempts), ttl).await,
                    }
                    None
                }
                Attempt::Failed(error) => {
                    drop(told.take()); // the next waiter may have better luck
                    let since = *failing_since.get_or_insert(tried);
                    let patience = self.limit.unwrap_or(since + self.core.config.outage_patience);
                    if Instant::now() >= patience {
                        return Err(error);
                    }
                    tracing::debug!(lock = %self.kind.name(), %error, "trying again");
                    Some(patience)
                }
            };
            match (failure, &waiter) {
                (Some(patience), _) => {
                    self.pause(pause, patience).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
                (None, None) => (failing_since, pause) = (None, PAUSE.0),
                (None, Some(waiter)) => {
                    (failing_since, pause) = (None, PAUSE.0);
                    match waiter.wait(tried, self.limit).await {
                        Woken::Told(permit) => told = Some(permit),
                        Woken::Poll => {}
                        Woken::TimedOut => return Ok(None),
                        Woken::Closed => return Err(Error::Closed),
                    }
                }
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
    /// One attempt, given up a little after the end of the wait: it then counts as cancelled.
    ///
    /// In a box, so that a waiter, which spends its time elsewhere, stays small.
    fn attempt_in_time(
        &self,
        limit: Option<Instant>,
    ) -> Pin<Box<dyn Future<Output = Result<Attempt<'_>>> + Send + '_>> {
        match self.give_up(limit) {
            Some(give_up) => Box::pin(async move {
                tokio::select! {
                    biased;
                    attempt = self.attempt() => attempt,
                    () = self.core.sleep_until(give_up) => self.failed(super::silent(NO_ANSWER)),
                }
            }),
            None => Box::pin(self.attempt()),
        }
    }

    /// When an attempt is given up. `None`: the command timeout ends it earlier, without a timer on the hot path.
    pub(super) fn give_up(&self, limit: Option<Instant>) -> Option<Instant> {
        let give_up = limit? + GRACE;
        (self.waits && give_up < Instant::now() + self.core.config.command_timeout()).then_some(give_up)
    }

    /// One attempt, in the owner's turn.
    async fn attempt(&self) -> Result<Attempt<'_>> {
        let Self { core, kind, .. } = *self;
        let under_way = UnderWay { core, hold: core.holds.get_or_insert(kind, &self.owner) };
        let hold = &under_way.hold;
        // whoever has the turn sends two requests at most
        let _turn = match core.turn(hold, Instant::now() + 2 * core.config.command_timeout()).await {
            Ok(turn) => turn,
            Err(error) => return self.failed(error),
        };

        // what this owner left behind comes first: a dropped guard, a cancelled call, a lost reply
        let plan = loop {
            match hold.agree(core).await {
                Agreement::Reached { .. } => {}
                Agreement::Refused(error) => return self.failed(error),
                Agreement::Silent(error) if hold.count() > 0 => return self.failed(error),
                Agreement::Silent(_) => hold.abandon_name_in_doubt(core),
            }
            if let Some(plan) = hold.plan(kind, &core.holds, core.config.max_holds.min(kind.max_holds()))? {
                break plan;
            }
        };
        let link = core.store.link(kind.name());
        hold.sending(link.epoch());
        // looked at after the hold is in doubt: a shutdown that this look misses will wait for this turn
        if let Err(closed) = core.check_open() {
            hold.not_sent(&plan);
            return Err(closed);
        }
        let sent = Instant::now();
        let request =
            Request { owner: &plan.owner, lease_ms: millis(self.lease), holds: plan.holds, waits: self.waits };
        match core.store.acquire(kind.acquire(request)).await {
            Ok(Acquired::Yes { token }) => match self.enter(hold, &plan, sent, token)? {
                Some(ticket) => Ok(Attempt::Entered((Arc::clone(hold), ticket))),
                None => self.failed(super::silent(TOO_LATE)),
            },
            Ok(Acquired::Busy { ttl, ahead }) => {
                let queued = self.waits && kind.queues();
                let place = queued.then(|| Place::new(core, hold));
                hold.busy(&plan, queued);
                let far = ahead.is_some_and(|ahead| ahead >= FAR);
                Ok(Attempt::Busy { ttl, wake: kind.wake(&plan.owner), place, far })
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

    /// Takes in that the server has acquired. `None`: so late that the lease is over already.
    pub(super) fn enter(&self, hold: &Hold, plan: &Plan, sent: Instant, token: Option<u64>) -> Result<Option<Ticket>> {
        let watchdog = self.watched.then_some(self.core.config.watchdog_timeout);
        let ticket = hold.enter(plan, sent, self.lease, watchdog, token);
        // looked at after the hold is entered: a shutdown that this look misses will end it
        if let Err(closed) = self.core.check_open() {
            hold.lose(LossReason::ShutDown);
            return Err(closed);
        }
        Ok(ticket)
    }

    fn failed(&self, error: StoreError) -> Result<Attempt<'_>> {
        let transient = error.is_transient();
        let error = super::store_error(self.kind.name(), error);
        if transient { Ok(Attempt::Failed(error)) } else { Err(error) }
    }

    /// Pauses before the next try of a lock that has no channel. In a box, as it is rare.
    fn back_off(&self, pause: Duration, ttl: Option<Duration>) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let pause = pause.mul_f64(1.0 - 0.5 * super::random_fraction());
        let pause = ttl.map_or(pause, |ttl| pause.min(ttl + Duration::from_millis(1)));
        let until = Instant::now() + pause;
        let until = self.limit.map_or(until, |limit| limit.min(until));
        Box::pin(async move {
            // nothing wakes it for a shutdown
            while Instant::now() < until && self.core.check_open().is_ok() {
                self.core.sleep_until(until.min(Instant::now() + LOOK)).await;
            }
        })
    }

    /// Waits until the server can be reached, and a little longer, with jitter; at most until `patience`. In a box, as
    /// it is rare.
    fn pause(&self, pause: Duration, patience: Instant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let link = self.core.store.link(self.kind.name());
        Box::pin(async move {
            if !link.is_up() {
                tokio::select! {
                    () = link.wait_up() => {}
                    () = self.core.sleep_until(patience) => {}
                }
                return;
            }
            let jitter = pause.mul_f64(0.5 + 0.5 * super::random_fraction());
            self.core.sleep_until(patience.min(Instant::now() + jitter)).await;
        })
    }
}
