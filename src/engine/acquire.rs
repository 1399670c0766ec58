//! The acquire loop: try, subscribe, try again, wait. No other loop waits for a lock.

use std::{future::Future, pin::Pin, time::Duration};

use nestlock_wire::clock::{Instant, millis};
use tokio::sync::OwnedSemaphorePermit;

use super::{
    attempt::{Acquire, Attempt, AttemptCause, Busy, Entered},
    core::REPLY_GRACE,
    failure::{NO_REPLY, no_reply, store_error},
    kind::Wake,
    retry::{Failing, jittered},
    wait::{
        place::QueueEntry,
        waiter::{Waiter, Woken},
    },
};

use crate::error::{Error, Result};

/// How often a sleeping acquire checks for a shutdown: no wake-up reports one.
const SHUTDOWN_POLL: Duration = Duration::from_millis(200);

impl<'a> Acquire<'a> {
    /// Acquires the lock. Returns `None` if it was busy until the wait was over.
    pub(crate) fn run(self) -> impl Future<Output = Result<Option<Entered>>> + Send + use<'a> {
        // a waiter that is subscribed before its first attempt misses no message, and needs no
        // second attempt
        let mut waiter = if self.waits {
            self.core.join_existing(self.kind, &self.owner, self.lease)
        } else {
            None
        };
        // a block: an `async fn` would store its arguments twice
        async move {
            // counts as a waiter between two attempts: else the janitor would release a hold that
            // one of them adopted, but whose reply was lost
            let _kept = self.from.map(|_| {
                QueueEntry::new(
                    self.core,
                    &self.core.holds.get_or_insert(self.kind, &self.owner),
                    None,
                )
            });
            let (mut told, mut handed): (
                Option<OwnedSemaphorePermit>,
                Option<OwnedSemaphorePermit>,
            ) = (None, None);
            let (mut attempts, mut was_busy) = (0_u32, false);
            // boxed, as it is rare: the future of each waiter stays small
            let mut failing: Option<Box<Failing>> = None;
            loop {
                self.core.check_open()?;
                let tried = if attempts == 0 && !was_busy {
                    self.started
                } else {
                    Instant::now()
                };
                let knows =
                    |waiter: &&Waiter<'_>| waiter.is_request_pointless(self.kind, &self.owner);
                if let Some(waiter) = waiter
                    .as_ref()
                    .filter(|_| attempts == 0 && !was_busy)
                    .filter(knows)
                {
                    was_busy = true;
                    waiter.poll_after(None);
                } else {
                    attempts += 1;
                    // an outage must end the call when its patience is over, not one attempt later
                    let outage = failing
                        .as_ref()
                        .map(|failing| failing.since + self.core.config.outage_patience);
                    let told_of = AttemptCause::at(waiter.as_ref(), handed.is_some());
                    // boxed: no part of an attempt stays in the future of a waiter that sleeps
                    let attempt =
                        match Box::pin(self.attempt(told_of, tried, self.attempt_deadline(outage)))
                            .await
                        {
                            Err(error) => {
                                return Err(match &mut failing {
                                    Some(failing) => failing.as_a_whole(error),
                                    None => error,
                                });
                            }
                            Ok(attempt) => attempt,
                        };
                    // the permit returns, and wakes the next waiter, only if the hand-off is still
                    // there
                    if let (Some(permit), Some(waiter)) = (handed.take(), &waiter)
                        && !waiter.is_handed_something()
                    {
                        permit.forget();
                    }
                    // the permit has led to an attempt: if it returned, it would wake another
                    // waiter in vain
                    if matches!(attempt, Attempt::Entered(_) | Attempt::Busy(_))
                        && let Some(permit) = told.take()
                    {
                        permit.forget();
                    }
                    let failure = match attempt {
                        Attempt::Entered(entered) => {
                            match &waiter {
                                Some(waiter) if self.kind.about().shared => waiter.pass_on(),
                                Some(waiter) if self.kind.about().own_channel => waiter.wake_next(),
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
                        // the last reply was "busy", and the wait is over: the outcome is known
                        Attempt::OwnerLockTimeout(_) | Attempt::GivenUp
                            if was_busy && self.is_over() =>
                        {
                            return Ok(None);
                        }
                        Attempt::GivenUp => {
                            return Err(store_error(self.kind.name(), no_reply(NO_REPLY)));
                        }
                        Attempt::Failed(error) | Attempt::OwnerLockTimeout(error) => {
                            drop(told.take()); // the next waiter may have better luck
                            let failing =
                                failing.get_or_insert_with(|| Box::new(Failing::since(tried)));
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
                            Some(deadline)
                        }
                    };
                    if let (Some(deadline), Some(failing)) = (failure, &mut failing) {
                        self.pause(failing.retry.next(), deadline).await;
                        continue;
                    }
                    failing = None;
                }
                let Some(waiter) = &waiter else { continue };
                if waiter.was_notified_since(tried) {
                    told = waiter.take_permit();
                    continue;
                }
                match waiter.wait(self.deadline).await {
                    Woken::Notified(permit) => told = Some(permit),
                    Woken::Handed(permit) => handed = Some(permit),
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
                    same.unwrap_or_else(|| self.core.join(self.kind, &channel, far, self.lease)),
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

    /// Returns when an attempt is given up. A waiter gets a short grace after its deadline; an
    /// attempt that does not wait gets the time that one request may take. Without a deadline, only
    /// a long outage ends it.
    pub(super) fn attempt_deadline(&self, outage: Option<Instant>) -> Option<Instant> {
        match self.deadline {
            Some(_) if !self.waits => {
                Some(self.started + self.core.config.command_timeout() + REPLY_GRACE)
            }
            Some(deadline) => Some(deadline + self.core.grace()),
            None => outage,
        }
    }

    /// Extends `deadline` if something of this owner had to be settled first, such as the release
    /// of a dropped guard: the request that is sent at `asked` still gets a round trip.
    pub(super) fn after_what_came_first(
        &self,
        deadline: Option<Instant>,
        asked: Instant,
    ) -> Option<Instant> {
        let longer = self
            .deadline
            .map(|_| asked + REPLY_GRACE + self.core.grace());
        deadline.max(longer)
    }

    /// Runs a step of an attempt. Returns `None` if it was given up at `deadline`, which counts as
    /// a cancellation.
    ///
    /// Sets no timer if the command timeout ends the request earlier. Takes the step by reference:
    /// by value, the future would store it once for each branch.
    pub(super) async fn in_time<F: Future>(
        &self,
        deadline: Option<Instant>,
        step: Pin<&mut F>,
    ) -> Option<F::Output> {
        match deadline {
            Some(deadline) if deadline < Instant::now() + self.core.config.command_timeout() => {
                tokio::select! {
                    biased;
                    output = step => Some(output),
                    () = self.core.sleep_until(deadline) => None,
                }
            }
            _ => Some(step.await),
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
        Box::pin(self.sleep_while_open(over))
    }

    /// Sleeps until this instant. A shutdown ends the sleep up to [`SHUTDOWN_POLL`] later.
    async fn sleep_while_open(&self, until: Instant) {
        while Instant::now() < until && self.core.check_open().is_ok() {
            self.core
                .sleep_until(until.min(Instant::now() + SHUTDOWN_POLL))
                .await;
        }
    }

    /// Pauses after a failed attempt, until the deadline at most. If the link is down, waits until
    /// it is up; otherwise for `pause`, with jitter, or until a cluster that was down serves again.
    /// Boxed, as it is rare.
    fn pause(
        &self,
        pause: Duration,
        deadline: Instant,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            let (store, record) = (&self.core.store, self.kind.record());
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
