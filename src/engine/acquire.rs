//! The loop: try, listen, try, wait. The only one.

use std::{
    future::Future,
    num::{NonZeroU32, NonZeroU64},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    Core, Kind, Request, UnderWay, Wake,
    holds::{Agreement, Hold, Plan, Ticket, Watch},
    hub::{Place, Waiter, Woken},
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
    /// Whether the watchdog renews, and how often at most.
    watched: bool,
    renewals: Option<NonZeroU32>,
    waits: bool,
    started: Instant,
    /// When the wait is over; `None`: never.
    pub(super) limit: Option<Instant>,
}

enum Attempt<'a> {
    Entered(Entered),
    Busy(Busy<'a>),
    /// It may work a little later. Nothing is held.
    Failed(Error),
}

struct Busy<'a> {
    ttl: Option<Duration>,
    /// How to learn that it is worth trying again.
    wake: Wake,
    place: Option<Place<'a>>,
    /// Whether many are before this waiter.
    far: bool,
}

impl<'a> Acquire<'a> {
    pub(crate) fn new(core: &'a Core, kind: &'a Arc<dyn Kind>, options: &AcquireOptions) -> Result<Self> {
        let started = Instant::now();
        let lease = match options.lease.or(options.rare().renewed) {
            Some(lease) => checked_lease(kind.name(), lease)?,
            None => core.default_lease(kind),
        };
        Ok(Self {
            core,
            kind,
            lease,
            watched: options.lease.is_none() && (options.rare().renewed.is_some() || !kind.is_endless()),
            renewals: options.rare().max_renewals,
            waits: options.wait != Wait::No,
            started,
            limit: options.wait.until(started),
            owner: core.resolve(kind, options)?,
        })
    }

    /// Acquires; `None`: busy until the wait was over.
    pub(crate) async fn run(&self) -> Result<Option<Entered>> {
        // listening before the first try spares the second
        let mut waiter = match self.waits.then(|| self.kind.wake(&self.owner)) {
            Some(Wake::Channel(channel)) => self.core.join_existing(self.kind, &channel),
            _ => None,
        };
        let mut told = None;
        let mut attempts = 0_u32;
        // in a box, as it is rare
        let mut failing: Option<Box<Failing>> = None;
        loop {
            self.core.check_open()?;
            attempts += 1;
            let tried = Instant::now();
            // an outage ends the call within the patience, not an attempt later
            let patience = failing.as_ref().map(|failing| failing.since + self.core.config.outage_patience);
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
                Attempt::Busy(busy) => {
                    forget(&mut told);
                    if self.limit.is_some_and(|limit| limit <= Instant::now()) {
                        return Ok(None);
                    }
                    if let Some(pause) = self.listen(busy, &mut waiter, attempts) {
                        pause.await;
                    }
                    None
                }
                Attempt::Failed(error) => {
                    drop(told.take()); // the next waiter may have better luck
                    let failing = failing.get_or_insert_with(|| Box::new(Failing { since: tried, pause: PAUSE.0 }));
                    let patience = self.limit.unwrap_or(failing.since + self.core.config.outage_patience);
                    if Instant::now() >= patience {
                        return Err(error);
                    }
                    tracing::debug!(lock = %self.kind.name(), %error, "trying again");
                    Some(patience)
                }
            };
            if let (Some(patience), Some(failing)) = (failure, &mut failing) {
                let paused = self.pause(failing.pause, patience);
                failing.pause = (failing.pause * 2).min(PAUSE.1);
                paused.await;
                continue;
            }
            failing = None;
            let Some(waiter) = &waiter else { continue };
            if waiter.was_told_since(tried) {
                told = waiter.take_permit();
                continue;
            }
            match waiter.wait(self.limit).await {
                Woken::Told(permit) => told = Some(permit),
                Woken::Poll => {}
                Woken::TimedOut => return Ok(None),
                Woken::Closed => return Err(Error::Closed),
            }
        }
    }
}

/// Requests that fail, though they may succeed a little later.
struct Failing {
    since: Instant,
    /// Before the next one.
    pause: Duration,
}

impl<'a> Acquire<'a> {
    /// Sees to it that the waiter is told when it is worth trying again; without a channel, the pause until then.
    fn listen<'b>(
        &'b self,
        busy: Busy<'a>,
        waiter: &mut Option<Waiter<'a>>,
        attempts: u32,
    ) -> Option<Pin<Box<dyn Future<Output = ()> + Send + 'b>>> {
        let Busy { ttl, wake, place, far } = busy;
        match wake {
            Wake::Channel(channel) => {
                // the name in the queue, and the channel with it, may have changed
                let same = waiter.take().filter(|waiter| waiter.listens_to(&channel));
                let waiter = waiter.insert(same.unwrap_or_else(|| self.core.join(self.kind, &channel, far)));
                waiter.keep(place);
                waiter.look_after(ttl);
                None
            }
            Wake::Signal(list) => {
                waiter.get_or_insert_with(|| self.core.join_list(self.kind, &list)).look_after(ttl);
                None
            }
            Wake::Poll(backoff) => Some(self.back_off(backoff.pause(attempts), ttl)),
        }
    }
}

/// The try was made that the permit was for.
fn forget(told: &mut Option<OwnedSemaphorePermit>) {
    if let Some(permit) = told.take() {
        permit.forget();
    }
}

impl<'a> Acquire<'a> {
    /// One attempt, given up a little after the end of the wait: it then counts as cancelled.
    ///
    /// In a box, so that a waiter, which spends its time elsewhere, stays small.
    fn attempt_in_time(
        &self,
        limit: Option<Instant>,
    ) -> Pin<Box<dyn Future<Output = Result<Attempt<'a>>> + Send + '_>> {
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
    async fn attempt(&self) -> Result<Attempt<'a>> {
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
                Ok(Attempt::Busy(Busy { ttl, wake: kind.wake(&plan.owner), place, far }))
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
    pub(super) fn enter(
        &self,
        hold: &Hold,
        plan: &Plan,
        sent: Instant,
        token: Option<NonZeroU64>,
    ) -> Result<Option<Ticket>> {
        let watch = self.watched.then_some(Watch { ttl: self.lease, renewals: self.renewals });
        let ticket = hold.enter(plan, sent, self.lease, watch, token);
        if self.watched && self.lease < self.core.config.watchdog_timeout {
            self.core.sooner.notify_one();
        }
        // looked at after the hold is entered: a shutdown that this look misses will end it
        if let Err(closed) = self.core.check_open() {
            hold.lose(LossReason::ShutDown);
            return Err(closed);
        }
        Ok(ticket)
    }

    fn failed(&self, error: StoreError) -> Result<Attempt<'a>> {
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
