//! The loop: try, listen, try, wait. The only one.

use std::{
    future::Future,
    num::NonZeroU64,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    core::{Core, LATE_ANSWER},
    failure::{NO_ANSWER, TOO_LATE, silent, store_error},
    generation::{Grant, Ticket},
    hold::{Hold, Next},
    kind::{Adopts, Kind, Terms, Wake},
    lease::{Lease, Millis},
    retry::{Failing, jittered},
    settle::UnderWay,
    state::{Door, Request},
    wait::{
        place::Place,
        waiter::{Waiter, Woken},
    },
};
use crate::{
    clock::Instant,
    error::{Error, LossReason, Result, StoreError},
    options::{AcquireOptions, Wait, checked_lease, millis},
    owner::OwnerId,
    store::{Acquired, Inspected},
};

/// So many holds are not handed over while a subscription is under way: a waiter with as many before him has missed no
/// message, and need not try again when he listens. Should he have, he looks for himself within the poll cap.
const FAR: u32 = 16;

/// A hold that was acquired, and the ticket to it.
pub(crate) type Entered = (Arc<Hold>, Ticket);

/// How often a pause looks whether the client was shut down.
const LOOK_FOR_SHUTDOWN: Duration = Duration::from_millis(200);

/// One acquire, with everything resolved.
pub(crate) struct Acquire<'a> {
    pub(super) core: &'a Core,
    pub(super) kind: &'a Arc<dyn Kind>,
    pub(super) owner: OwnerId,
    pub(super) lease: Lease,
    pub(super) waits: bool,
    /// Whose hold is adopted.
    pub(super) from: Option<&'a OwnerId>,
    /// When that was asked for first, and may have been executed: what is in doubt since is asked for again.
    asked: Mutex<Option<Instant>>,
    /// See [`AcquireOptions::after_a_loss`].
    pub(super) after_loss: bool,
    started: Instant,
    /// When the wait is over; `None`: never.
    pub(super) deadline: Option<Instant>,
}

enum Attempt<'a> {
    Entered(Entered),
    Busy(Busy<'a>),
    /// It may work a little later. Nothing is held.
    Failed(Error),
    /// The same: another call of this owner is under way all the while.
    NoTurn(Error),
    /// The time is over, and no answer has come. What was sent is undone.
    GivenUp,
    /// The books have changed meanwhile: at once again.
    Again,
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
    pub(crate) fn new(core: &'a Core, kind: &'a Arc<dyn Kind>, options: &AcquireOptions, wait: Wait) -> Result<Self> {
        let started = Instant::now();
        let checked = |lease| checked_lease(kind.name(), lease).map(Millis::of);
        let watched = |ttl| Lease::Watched { ttl, times: options.rare().max_renewals };
        let lease = match (options.lease, options.rare().watchdog_timeout) {
            (Some(lease), _) => Lease::Fixed(checked(lease)?),
            (None, Some(ttl)) => watched(checked(ttl)?),
            (None, None) if kind.about().endless => Lease::Endless,
            (None, None) => watched(Millis::of(core.config.watchdog_timeout)),
        };
        Ok(Self {
            core,
            kind,
            lease,
            waits: wait != Wait::No,
            from: None,
            asked: Mutex::default(),
            after_loss: options.rare().after_loss,
            started,
            deadline: wait.until(started),
            owner: core.resolve(kind, options)?,
        })
    }

    /// Acquires; `None`: busy until the wait was over.
    pub(crate) fn run(self) -> impl Future<Output = Result<Option<Entered>>> + Send + use<'a> {
        // listening before the first try spares the second
        let mut waiter = if self.waits { self.core.join_existing(self.kind, &self.owner) } else { None };
        // a block, since an `async fn` keeps its arguments twice
        async move {
            // between two tries the janitor must not release what one of them may have adopted unheard
            let _kept =
                self.from.map(|_| Place::new(self.core, &self.core.holds.get_or_insert(self.kind, &self.owner)));
            let mut told: Option<OwnedSemaphorePermit> = None;
            let (mut attempts, mut was_busy) = (0_u32, false);
            // in a box, as it is rare
            let mut failing: Option<Box<Failing>> = None;
            loop {
                self.core.check_open()?;
                attempts += 1;
                let tried = Instant::now();
                // an outage ends the call when its patience is over, not an attempt later
                let outage = failing.as_ref().map(|failing| failing.since + self.core.config.outage_patience);
                // nothing of an attempt lives on while its waiter sleeps. In a box, so that a waiter stays small
                let attempt = match Box::pin(self.attempt(self.attempt_deadline(outage))).await {
                    Err(error) => {
                        return Err(match &mut failing {
                            Some(failing) => failing.as_a_whole(error),
                            None => error,
                        });
                    }
                    Ok(attempt) => attempt,
                };
                // the try was made that it was told to make
                if matches!(attempt, Attempt::Entered(_) | Attempt::Busy(_))
                    && let Some(permit) = told.take()
                {
                    permit.forget();
                }
                let failure = match attempt {
                    Attempt::Entered(entered) => {
                        match &waiter {
                            Some(waiter) if self.kind.about().shared => waiter.pass_on(),
                            Some(waiter) if self.kind.about().own_channel => waiter.tell_next(),
                            _ => {}
                        }
                        if attempts > 1 {
                            let waited_ms = millis(self.started.elapsed());
                            tracing::debug!(lock = %self.kind.name(), owner = %self.owner, waited_ms, attempts, "acquired");
                        }
                        return Ok(Some(entered));
                    }
                    Attempt::Busy(busy) => {
                        was_busy = true;
                        if self.is_over() {
                            return Ok(None);
                        }
                        if let Some(pause) = self.listen(busy, &mut waiter, attempts) {
                            pause.await;
                        }
                        None
                    }
                    Attempt::Again => continue,
                    // the last that was heard of it
                    Attempt::NoTurn(_) | Attempt::GivenUp if was_busy && self.is_over() => return Ok(None),
                    Attempt::GivenUp => return Err(store_error(self.kind.name(), silent(NO_ANSWER))),
                    Attempt::Failed(error) | Attempt::NoTurn(error) => {
                        drop(told.take()); // the next waiter may have better luck
                        let failing = failing.get_or_insert_with(|| Box::new(Failing::since(tried)));
                        let deadline = self.deadline.unwrap_or(failing.since + self.core.config.outage_patience);
                        if Instant::now() >= deadline {
                            return Err(failing.as_a_whole(error));
                        }
                        tracing::debug!(lock = %self.kind.name(), %error, "trying again");
                        if matches!(error, Error::Unconfirmed { .. }) {
                            failing.unconfirmed = Some(error);
                        }
                        Some(deadline)
                    }
                };
                if let (Some(deadline), Some(failing)) = (failure, &mut failing) {
                    self.pause(failing.retry.next(), deadline).await;
                    continue;
                }
                failing = None;
                let Some(waiter) = &waiter else { continue };
                if waiter.was_told_since(tried) {
                    told = waiter.take_permit();
                    continue;
                }
                match waiter.wait(self.deadline).await {
                    Woken::Told(permit) => told = Some(permit),
                    Woken::Poll => {}
                    Woken::TimedOut => return Ok(None),
                    Woken::Closed => return Err(Error::Closed),
                }
            }
        }
    }
}

impl<'a> Acquire<'a> {
    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

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

    /// When an attempt is given up: a little after the end of the wait, or when an outage has lasted too long. A try has the
    /// time that one request may take.
    pub(super) fn attempt_deadline(&self, outage: Option<Instant>) -> Option<Instant> {
        match self.deadline {
            Some(_) if !self.waits => Some(self.started + self.core.config.command_timeout() + LATE_ANSWER),
            Some(deadline) => Some(deadline + self.core.grace()),
            None => outage,
        }
    }

    /// `None`: it was given up, and counts as cancelled. Without a timer where the command timeout ends a request earlier.
    /// By reference, since the step would be kept once for each way in here.
    pub(super) async fn in_time<F: Future>(&self, deadline: Option<Instant>, step: Pin<&mut F>) -> Option<F::Output> {
        match deadline {
            Some(deadline) if deadline < Instant::now() + self.core.config.command_timeout() => tokio::select! {
                biased;
                output = step => Some(output),
                () = self.core.sleep_until(deadline) => None,
            },
            _ => Some(step.await),
        }
    }

    /// How it acquires this lock.
    pub(super) fn door(&self, kind: &Arc<dyn Kind>, waits: bool) -> Door {
        let about = kind.about();
        let max_holds = self.core.config.max_holds.min(about.max_holds);
        Door { about, waits, adopts: self.adopts(), max_holds, after_loss: self.after_loss }
    }

    fn adopts(&self) -> Option<Adopts> {
        self.from.map(|_| if self.asked().is_some() { Adopts::Again } else { Adopts::First })
    }

    fn asked(&self) -> MutexGuard<'_, Option<Instant>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One attempt, in the owner's turn.
    async fn attempt(&self, deadline: Option<Instant>) -> Result<Attempt<'a>> {
        let Self { core, kind, .. } = *self;
        if self.owner.is_value()
            && let Some(attempt) = self.attempt_by_a_value_that_was_given_away(deadline).await
        {
            return attempt;
        }
        let under_way = UnderWay { core, hold: core.holds.get_or_insert(kind, &self.owner) };
        let hold = &under_way.hold;
        let _turn = match core.turn(hold, deadline).await {
            Ok(turn) => turn,
            Err(error) => return Ok(Attempt::NoTurn(store_error(kind.name(), error))),
        };

        // what this owner left behind comes first
        let (request, sent) = loop {
            let now = Instant::now();
            match hold.plan(self.door(kind, self.waits), core.holds.around(hold), now)? {
                Next::Send(request) => break (request, now),
                Next::Forget => {
                    core.holds.forget(hold);
                    return Ok(Attempt::Again);
                }
                Next::Agree => {}
            }
            match self.in_time(deadline, pin!(core.settle(hold))).await {
                Some(Ok(())) => {}
                Some(Err(error)) => return self.failed(error),
                None => return Ok(Attempt::GivenUp),
            }
        };
        hold.send(&request, self.lease, core.epoch(hold), sent);
        // looked at after the hold is in doubt: a shutdown that this look misses will wait for this turn
        let refused = core.check_open().err().map(Err).or_else(|| core.holds.rival(hold, request.count));
        if let Some(refused) = refused {
            hold.not_executed(&request);
            return match self.in_time(deadline, pin!(core.settle_rival(refused?))).await {
                Some(Ok(())) => Ok(Attempt::Again),
                Some(Err(_)) if !self.waits => Err(hold.not_reentrant_error(&request.owner)),
                Some(Err(error)) => self.failed(error),
                None => Ok(Attempt::GivenUp),
            };
        }
        let (owner, lease_ms) = (&request.owner, self.lease.millis());
        // adopted by an earlier request, whose answer was lost, it has that one's lease
        let (call, since) = match self.from {
            Some(from) => (kind.adopt(from, owner, lease_ms), *self.asked().get_or_insert(sent)),
            None => (kind.acquire(Terms { owner, lease_ms, holds: request.count, waits: self.waits }), sent),
        };
        let Some(answer) = self.in_time(deadline, pin!(core.store.acquire(&call))).await else {
            return Ok(Attempt::GivenUp);
        };
        match answer {
            Ok(Acquired::Yes { token }) => match self.take_in(hold, &request, since, token)? {
                Some(ticket) => Ok(Attempt::Entered((Arc::clone(hold), ticket))),
                // nor would another answer come in time
                None if self.from.is_some() => Err(store_error(kind.name(), silent(TOO_LATE))),
                None => self.failed(silent(TOO_LATE)),
            },
            Ok(Acquired::Busy { ttl, ahead }) => {
                let queued = self.waits && kind.about().queues;
                let place = queued.then(|| Place::new(core, hold));
                hold.busy(&request, queued, core.epoch(hold));
                let far = ahead.is_some_and(|ahead| ahead >= FAR);
                Ok(Attempt::Busy(Busy { ttl, wake: kind.wake(&request.owner), place, far }))
            }
            Ok(Acquired::Lost) if self.from.is_some() => {
                hold.busy(&request, false, core.epoch(hold));
                Err(hold.not_held_error(&request.owner))
            }
            Ok(Acquired::Lost) => Err(hold.refused_as_lost(&request)),
            Ok(Acquired::WrongKind) => {
                hold.refused_as_another_kind(&request);
                Err(Error::WrongLockKind { lock: kind.name().to_string() })
            }
            Err(error) => {
                if !error.may_have_executed() {
                    hold.not_executed(&request);
                    self.asked().take_if(|asked| *asked == sent);
                }
                self.failed(error)
            }
        }
    }

    /// The server cannot tell whoever acquires under a text from whoever this client gave it away to: only while the
    /// latter holds nothing may it be asked. In a box, as it is rare.
    fn attempt_by_a_value_that_was_given_away(
        &self,
        deadline: Option<Instant>,
    ) -> Pin<Box<dyn Future<Output = Option<Result<Attempt<'a>>>> + Send + '_>> {
        Box::pin(async move {
            let given_away = self.core.holds.given_away(self.kind, &self.owner)?;
            Some(match self.in_time(deadline, pin!(self.core.store.inspect(&self.kind.inspect()))).await {
                Some(Ok(Inspected::Held { ttl, holders })) if holders.iter().any(|(owner, _)| *owner == self.owner) => {
                    Ok(Attempt::Busy(Busy { ttl, wake: self.kind.wake(&self.owner), place: None, far: false }))
                }
                Some(Ok(Inspected::WrongKind)) => Err(Error::WrongLockKind { lock: self.kind.name().to_string() }),
                Some(Ok(_)) => {
                    given_away.lose(LossReason::RecordMissing);
                    self.core.tidy(&given_away);
                    return None;
                }
                Some(Err(error)) => self.failed(error),
                None => Ok(Attempt::GivenUp),
            })
        })
    }

    /// Takes in that the server has acquired. `None`: so late that the lease is over already.
    pub(super) fn take_in(
        &self,
        hold: &Arc<Hold>,
        request: &Request,
        sent: Instant,
        token: Option<NonZeroU64>,
    ) -> Result<Option<Ticket>> {
        let core = self.core;
        // where others hold the record too, they may cut its TTL short: Redisson's readers do
        let is_told_again = self.kind.about().shared && !self.lease.is_watched();
        let kept_every = is_told_again.then(|| Millis::of(core.config.watchdog_timeout / 3));
        let grant = Grant { sent, lease: self.lease, kept_every, token };
        let ticket = hold.granted(request, &grant, core.epoch(hold))?;
        // looked at after the hold is entered: a shutdown that this look misses will end it
        if let Err(closed) = core.check_open() {
            hold.lose(LossReason::ShutDown);
            if let Some(ticket) = ticket {
                core.release_later(hold, &ticket);
            }
            return Err(closed);
        }
        Ok(ticket)
    }

    fn failed(&self, error: StoreError) -> Result<Attempt<'a>> {
        let transient = error.is_transient();
        let error = store_error(self.kind.name(), error);
        if transient { Ok(Attempt::Failed(error)) } else { Err(error) }
    }

    /// Pauses before the next try of a lock that has no channel. In a box, as it is rare.
    fn back_off(&self, pause: Duration, ttl: Option<Duration>) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let pause = jittered(pause);
        let pause = ttl.map_or(pause, |ttl| pause.min(ttl + Duration::from_millis(1)));
        let over = Instant::now() + pause;
        let over = self.deadline.map_or(over, |deadline| deadline.min(over));
        Box::pin(self.sleep_while_open(over))
    }

    /// Sleeps until then. A shutdown ends it a little later: nothing else would tell it.
    async fn sleep_while_open(&self, until: Instant) {
        while Instant::now() < until && self.core.check_open().is_ok() {
            self.core.sleep_until(until.min(Instant::now() + LOOK_FOR_SHUTDOWN)).await;
        }
    }

    /// Waits until the server can be reached, and a little longer, with jitter; at most until the deadline. In a box, as
    /// it is rare.
    fn pause(&self, pause: Duration, deadline: Instant) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let link = self.core.store.link(self.kind.name());
        Box::pin(async move {
            if !link.is_up() {
                tokio::select! {
                    () = link.wait_up() => {}
                    () = self.sleep_while_open(deadline) => {}
                }
                return;
            }
            self.sleep_while_open(deadline.min(Instant::now() + jittered(pause))).await;
        })
    }
}
