//! The loop: try, listen, try, wait. The only one.

use std::{future::Future, pin::Pin, time::Duration};

use tokio::sync::OwnedSemaphorePermit;

use super::{
    attempt::{Acquire, Attempt, Busy, Entered, Told},
    core::LATE_ANSWER,
    failure::{NO_ANSWER, silent, store_error},
    kind::Wake,
    retry::{Failing, jittered},
    wait::{
        place::Place,
        waiter::{Waiter, Woken},
    },
};
use crate::{
    clock::Instant,
    error::{Error, Result},
    options::millis,
};

/// How often a pause looks whether the client was shut down.
const LOOK_FOR_SHUTDOWN: Duration = Duration::from_millis(200);

impl<'a> Acquire<'a> {
    /// Acquires; `None`: busy until the wait was over.
    pub(crate) fn run(self) -> impl Future<Output = Result<Option<Entered>>> + Send + use<'a> {
        // listening before the first try spares the second
        let mut waiter = if self.waits { self.core.join_existing(self.kind, &self.owner, self.lease) } else { None };
        // a block, since an `async fn` keeps its arguments twice
        async move {
            // between two tries the janitor must not release what one of them may have adopted unheard
            let _kept =
                self.from.map(|_| Place::new(self.core, &self.core.holds.get_or_insert(self.kind, &self.owner), None));
            let (mut told, mut handed): (Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>) = (None, None);
            let (mut attempts, mut was_busy) = (0_u32, false);
            // in a box, as it is rare
            let mut failing: Option<Box<Failing>> = None;
            loop {
                self.core.check_open()?;
                let tried = if attempts == 0 && !was_busy { self.started } else { Instant::now() };
                let knows = |waiter: &&Waiter<'_>| waiter.knows_better_than_to_ask(self.kind, &self.owner);
                if let Some(waiter) = waiter.as_ref().filter(|_| attempts == 0 && !was_busy).filter(knows) {
                    was_busy = true;
                    waiter.look_after(None);
                } else {
                    attempts += 1;
                    // an outage ends the call when its patience is over, not an attempt later
                    let outage = failing.as_ref().map(|failing| failing.since + self.core.config.outage_patience);
                    // nothing of an attempt lives on while its waiter sleeps. In a box, so that a waiter stays small
                    let told_of = Told::at(waiter.as_ref(), handed.is_some());
                    let attempt = match Box::pin(self.attempt(told_of, tried, self.attempt_deadline(outage))).await {
                        Err(error) => {
                            return Err(match &mut failing {
                                Some(failing) => failing.as_a_whole(error),
                                None => error,
                            });
                        }
                        Ok(attempt) => attempt,
                    };
                    if let (Some(permit), Some(waiter)) = (handed.take(), &waiter)
                        && !waiter.is_handed_something()
                    {
                        permit.forget();
                    }
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
                            if let Some(own) = self.core.holds.given_away_in_part(self.kind, &self.owner) {
                                return Err(own.not_reentrant_error(&own.owner()));
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
                }
                let Some(waiter) = &waiter else { continue };
                if waiter.was_told_since(tried) {
                    told = waiter.take_permit();
                    continue;
                }
                match waiter.wait(self.deadline).await {
                    Woken::Told(permit) => told = Some(permit),
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
                let waiter =
                    waiter.insert(same.unwrap_or_else(|| self.core.join(self.kind, &channel, far, self.lease)));
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

    /// The same where something of this owner came first, as the release of a guard that was dropped: what is asked only now
    /// has the time of a round trip all the same.
    pub(super) fn after_what_came_first(&self, deadline: Option<Instant>, asked: Instant) -> Option<Instant> {
        let longer = self.deadline.map(|_| asked + LATE_ANSWER + self.core.grace());
        deadline.max(longer)
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
                () = store.serves_again(record) => {}
                () = self.sleep_while_open(deadline.min(Instant::now() + jittered(pause))) => {}
            }
        })
    }
}
