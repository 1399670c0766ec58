//! The acquire loop: try, subscribe, try again, wait. No other loop waits for a lock.
//!
//! A bounded wait ends in time, whatever an attempt has to do. All steps of an attempt (the owner
//! lock, the settlement, the request) have the same deadline: the end of the wait, plus 40 ms and a
//! round trip. A step whose deadline is further away than the command timeout needs no timer. If
//! something of the owner must be settled first, such as the release of a dropped guard, the
//! request has 80 ms and a round trip from then on. So a wait ends 120 ms and two round trips late
//! at most. An acquire whose last reply was "busy" returns `None` when its wait is over: the
//! outcome is known.
//!
//! If the channel has a wait queue already, the acquire joins it before its first attempt, which
//! then is also the check after subscribing. Otherwise the first busy reply subscribes, and one
//! more attempt follows when the subscription is confirmed.

pub(super) mod attempt;
mod copies;
pub(super) mod enter;
pub(crate) mod options;

use std::{future::Future, pin::Pin, time::Duration};

use nestlock_wire::clock::{Instant, millis};
use tokio::sync::OwnedSemaphorePermit;

use self::{
    attempt::{Attempt, Busy},
    options::Acquire,
};

use super::{
    core::Core,
    failure::{NO_REPLY, no_reply, store_error},
    hold::Entered,
    kind::{Sharing, Wake},
    retry::{Failing, jittered},
    wait::{
        place::QueueEntry,
        waiter::{PollTurn, Waiter, Woken},
    },
};

use crate::error::{Error, Result};

/// How often a sleeping acquire checks for a shutdown: no wake-up reports one.
const SHUTDOWN_POLL: Duration = Duration::from_millis(200);

/// What one acquire knows between its attempts.
struct Attempts<'a> {
    /// The permit of the message that led to this attempt. Unless an attempt brings a reply, dropping
    /// it wakes the next waiter. Dropped before the waiter: when the last one has left, an element of a
    /// signal lock's list is handed back only if its permit is there.
    told: Option<OwnedSemaphorePermit>,
    /// The turn of a poll, likewise.
    polls: Option<PollTurn>,
    waiter: Option<Waiter<'a>>,
    made: u32,
    /// The last reply was that the lock is busy, or another holder of this client keeps it busy.
    was_busy: bool,
    /// Boxed, as it is rare: the future of each waiter stays small.
    failing: Option<Box<Failing>>,
}

impl Attempts<'_> {
    /// The wake-up has led to a reply: another waiter would try in vain.
    fn forget_wake_up(&mut self) {
        self.told
            .take()
            .into_iter()
            .for_each(OwnedSemaphorePermit::forget);
        self.polls.take().into_iter().for_each(PollTurn::forget);
    }

    fn pass_wake_up_on(&mut self) {
        drop((self.told.take(), self.polls.take()));
    }

    /// Skips the first request if it would be pointless: the acquire waits instead. Returns whether
    /// it was skipped.
    fn skip_request(&mut self) -> bool {
        let waiter = self.waiter.as_ref();
        let Some(waiter) = waiter.filter(|waiter| waiter.is_request_pointless()) else {
            return false;
        };
        self.was_busy = true;
        waiter.poll_after_relay();
        true
    }
}

/// What follows an attempt.
enum Next<'b> {
    /// The acquire is over: with the lock, or without it since its wait is over.
    Over(Option<Entered>),
    Again,
    /// Try again after this pause.
    Pause(Pin<Box<dyn Future<Output = ()> + Send + 'b>>),
    /// Try again when the waiter is woken.
    Sleep,
}

impl<'a> Acquire<'a> {
    /// Acquires the lock. Returns `None` if it was busy until the wait was over.
    pub(crate) fn run(self) -> impl Future<Output = Result<Option<Entered>>> + Send + use<'a> {
        // a waiter that is subscribed before its first attempt misses no message, and needs no
        // second attempt
        let waiter = if self.waits {
            self.core
                .join_existing(self.kind, &self.owner, self.takes())
        } else {
            None
        };
        // a block: an `async fn` would store its arguments twice
        async move {
            let _kept = self.keep_adopted();
            let mut attempts = Attempts {
                told: None,
                polls: None,
                waiter,
                made: 0,
                was_busy: false,
                failing: None,
            };
            loop {
                self.core.check_open()?;
                let is_first = attempts.made == 0 && !attempts.was_busy;
                let tried = if is_first {
                    self.started
                } else {
                    Instant::now()
                };
                if !(is_first && attempts.skip_request()) {
                    // boxed: no part of an attempt stays in the future of a waiter that sleeps
                    match Box::pin(self.next(&mut attempts, tried)).await? {
                        Next::Over(entered) => return Ok(entered),
                        Next::Again => continue,
                        Next::Pause(pause) => {
                            pause.await;
                            continue;
                        }
                        Next::Sleep => {}
                    }
                }
                let Some(waiter) = &attempts.waiter else {
                    continue;
                };
                if waiter.was_notified_since(tried) {
                    attempts.told = waiter.take_permit();
                    continue;
                }
                match waiter.wait(self.deadline).await {
                    Woken::Notified(permit) => attempts.told = Some(permit),
                    Woken::Handed((hold, ticket)) => {
                        let ticket = self.entered(&hold, ticket)?;
                        attempts.made += 1;
                        self.acquired(&attempts);
                        return Ok(Some((hold, ticket)));
                    }
                    Woken::Poll(turn) => attempts.polls = Some(turn),
                    Woken::TimedOut => return Ok(None),
                    Woken::Closed => return Err(Error::Closed),
                }
            }
        }
    }

    /// Counts an adoption as a waiter between two attempts, too: otherwise the janitor would
    /// release a hold that an attempt adopted, but whose reply was lost.
    fn keep_adopted(&self) -> Option<QueueEntry<'a>> {
        let (core, kind) = (self.core, self.kind);
        self.from
            .map(|_| QueueEntry::new(core, &core.holds.get_or_insert(kind, &self.owner), None))
    }

    /// Makes an attempt, and returns what follows it.
    async fn next(&self, attempts: &mut Attempts<'a>, tried: Instant) -> Result<Next<'_>> {
        attempts.made += 1;
        // an outage must end the call when its patience is over, not one attempt later
        let outage = attempts
            .failing
            .as_ref()
            .map(|failing| failing.since + self.core.config.outage_patience);
        let attempt = self
            .attempt(
                attempts.waiter.as_ref(),
                tried,
                self.attempt_deadline(outage),
            )
            .await;
        let attempt = attempt.map_err(|error| match &mut attempts.failing {
            Some(failing) => failing.as_a_whole(error),
            None => error,
        })?;
        match &attempt {
            Attempt::Entered(_) | Attempt::Busy(_) => attempts.forget_wake_up(),
            Attempt::FailedAlone(_) | Attempt::OwnerLockTimeout(_) => attempts.pass_wake_up_on(),
            // it keeps the wake-up and tries again: the next waiter would meet the same server, and so
            // would all others after it
            Attempt::Failed(_) | Attempt::Again | Attempt::GivenUp => {}
        }
        match attempt {
            Attempt::Entered(entered) => {
                self.acquired(attempts);
                Ok(Next::Over(Some(entered)))
            }
            Attempt::Busy(_) if self.is_over() => Ok(Next::Over(None)),
            Attempt::Busy(busy) => {
                attempts.was_busy = true;
                attempts.failing = None;
                if let Some(waiter) = &attempts.waiter {
                    waiter.was_busy(tried);
                }
                let pause = self.listen(busy, &mut attempts.waiter, attempts.made);
                Ok(pause.map_or(Next::Sleep, Next::Pause))
            }
            Attempt::Again => Ok(Next::Again),
            // the last reply was "busy", and the wait is over: the outcome is known
            Attempt::OwnerLockTimeout(_) | Attempt::GivenUp
                if attempts.was_busy && self.is_over() =>
            {
                Ok(Next::Over(None))
            }
            Attempt::GivenUp => Err(store_error(self.kind.name(), no_reply(NO_REPLY))),
            Attempt::Failed(error)
            | Attempt::FailedAlone(error)
            | Attempt::OwnerLockTimeout(error) => self.after_failure(attempts, error, tried),
        }
    }

    fn acquired(&self, attempts: &Attempts<'a>) {
        match &attempts.waiter {
            Some(waiter) if self.kind.about().sharing != Sharing::Exclusive => waiter.pass_on(),
            Some(waiter) if self.kind.about().own_channel => waiter.wake_next(),
            _ => {}
        }
        if attempts.made > 1 {
            let (waited_ms, attempts) = (millis(self.started.elapsed()), attempts.made);
            tracing::debug!(lock = %self.kind.name(), owner = %self.owner, waited_ms, attempts, "acquired");
        }
    }

    /// Returns the pause after a failed attempt, or the error if the deadline has passed. Without a
    /// deadline, the outage patience limits the series of failures.
    fn after_failure(
        &self,
        attempts: &mut Attempts<'a>,
        error: Error,
        tried: Instant,
    ) -> Result<Next<'_>> {
        let failing = attempts
            .failing
            .get_or_insert_with(|| Box::new(Failing::since(tried)));
        let deadline = self
            .deadline
            .unwrap_or(failing.since + self.core.config.outage_patience);
        if Instant::now() >= deadline {
            return Err(failing.as_a_whole(error));
        }
        tracing::debug!(lock = %self.kind.name(), %error, "trying again");
        if matches!(error, Error::Unconfirmed { .. }) {
            failing.unconfirmed = Some(error);
        }
        let (record, pause) = (self.kind.record(), failing.retry.next());
        Ok(Next::Pause(self.core.pause(record, pause, deadline)))
    }

    fn is_over(&self) -> bool {
        self.deadline
            .is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Makes sure that the waiter is woken when another attempt is worthwhile. Returns the back-off
    /// before that attempt if the lock can only be polled.
    fn listen<'b>(
        &'b self,
        busy: Busy<'a>,
        waiter: &mut Option<Waiter<'a>>,
        attempts: u32,
    ) -> Option<Pin<Box<dyn Future<Output = ()> + Send + 'b>>> {
        let Busy {
            ttl,
            wake,
            queue_entry: place,
            far,
        } = busy;
        match wake {
            Wake::Channel(channel) => {
                // the name in the queue may have changed, and the channel with it
                let same = waiter.take().filter(|waiter| waiter.listens_to(&channel));
                let waiter = waiter.insert(
                    same.unwrap_or_else(|| self.core.join(self.kind, &channel, far, self.takes())),
                );
                waiter.keep(place);
                waiter.poll_after(ttl);
                None
            }
            Wake::Signal(list) => {
                waiter
                    .get_or_insert_with(|| self.core.join_list(self.kind, &list))
                    .poll_after(ttl);
                None
            }
            Wake::Poll(backoff) => Some(self.back_off(backoff.pause(attempts), ttl)),
        }
    }

    /// Sleeps before the next attempt at a lock that can only be polled: for `pause`, with jitter,
    /// but no longer than the TTL or the deadline. Boxed, as it is rare.
    fn back_off(
        &self,
        pause: Duration,
        ttl: Option<Duration>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        let pause = jittered(pause);
        // one millisecond more: the server rounds the TTL down
        let pause = ttl.map_or(pause, |ttl| pause.min(ttl + Duration::from_millis(1)));
        let over = Instant::now() + pause;
        let over = self.deadline.map_or(over, |deadline| deadline.min(over));
        Box::pin(self.core.sleep_while_open(over))
    }
}

impl Core {
    /// Sleeps until this instant. A shutdown ends the sleep up to [`SHUTDOWN_POLL`] later.
    async fn sleep_while_open(&self, until: Instant) {
        while Instant::now() < until && self.check_open().is_ok() {
            self.sleep_until(until.min(Instant::now() + SHUTDOWN_POLL))
                .await;
        }
    }

    /// Pauses after a failed attempt, until the deadline at most. If the link is down, waits until
    /// it is up; otherwise for `pause`, with jitter, or until a cluster that was down serves again.
    /// Boxed, as it is rare.
    pub(super) fn pause<'b>(
        &'b self,
        record: &'b str,
        pause: Duration,
        deadline: Instant,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'b>> {
        Box::pin(async move {
            let store = &self.store;
            if store.is_connected() && !store.is_up(record) {
                tokio::select! {
                    () = store.wait_up(record) => {}
                    () = self.sleep_while_open(deadline) => {}
                }
                return;
            }
            tokio::select! {
                () = store.serving_again(record) => {}
                () = self.sleep_while_open(deadline.min(Instant::now() + jittered(pause))) => {}
            }
        })
    }
}
