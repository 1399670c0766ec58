//! Ends holds: with a guard or without, by leaving them to their lease, by force, and all at once
//! at shutdown. Extends holds, too.
//!
//! The guard's ticket is given back in the ledger before the first await, so a future that is
//! dropped has released all the same. Then `Core::agree` makes the server follow. It retries for
//! one command timeout; the janitor continues until the lease of the record is over.
//!
//! Without a guard, `Lock::release` sends the new count along with the count that it read, and
//! takes effect only if the record still has that one.
//!
//! `shutdown` ends the holds of guards, releases the hand-offs that no waiter took, and keeps the
//! holds that were left to their lease.

use std::{sync::Arc, time::Duration};

use nestlock_wire::clock::Instant;
use tokio::sync::oneshot;

use super::{
    core::Core,
    failure::{NO_REPLY, NOT_CONFIRMED, no_reply, not_replicated, store_error},
    hold::{
        Hold,
        generation::{Generation, Ticket},
        hand_off::HAND_OFF_WINDOW,
        state::{Effects, HoldState, Ownership},
    },
    jobs::Job,
    kind::{Kind, Wake},
    lease::RenewalReply,
    retry::Retry,
    settle::{Agreement, CallInFlight},
    watchdog,
};

use crate::{
    error::{Error, LossReason, Result, StoreError},
    options::checked_lease,
    owner::OwnerId,
    store::{Inspected, Released, Renewed, SPARE},
};

const NOT_POLLED: &str =
    "the future of another call of this owner is no longer polled; its hold is being undone";

/// The retries of a request that a caller awaits, until the deadline.
pub(super) struct Repeat {
    retry: Retry,
    deadline: Instant,
    /// The last error of a try that may have been executed.
    unconfirmed: Option<StoreError>,
}

impl Repeat {
    pub(super) fn until(deadline: Instant) -> Self {
        // the pause doubles without a limit: the deadline is the limit
        Self {
            retry: Retry::new(Duration::from_millis(5), Duration::MAX),
            deadline,
            unconfirmed: None,
        }
    }

    /// Pauses after a failed try of a request about a hold. Returns `Err` if that was the last one.
    pub(super) async fn after(
        &mut self,
        core: &Core,
        hold: &Hold,
        error: StoreError,
    ) -> Result<()> {
        let paused = self.pause(core, hold.kind().record(), error).await;
        paused.map_err(|error| {
            // the hold is being undone: this error alone would say that nothing happened
            let is_undone = hold.ownership() == Ownership::Orphaned && !error.may_have_executed();
            let error = if is_undone {
                no_reply(NOT_POLLED)
            } else {
                error
            };
            store_error(hold.lock_name(), error)
        })
    }

    /// Returns the last error of a try that may have been executed.
    pub(super) fn unconfirmed(&mut self) -> Option<StoreError> {
        self.unconfirmed.take()
    }

    /// Pauses after a failed try. Returns the error of all of them if that was the last one.
    pub(super) async fn pause(
        &mut self,
        core: &Core,
        record: &str,
        error: StoreError,
    ) -> Result<(), StoreError> {
        let next = Instant::now() + self.retry.pause();
        // no retry whose reply would have less than a tenth of the command timeout left
        if !error.is_transient() || next + core.config.command_timeout() / SPARE > self.deadline {
            // if an earlier try may have been executed, the outcome is unknown
            return Err(match self.unconfirmed.take() {
                Some(unconfirmed) if !error.may_have_executed() => unconfirmed,
                _ => error,
            });
        }
        if error.may_have_executed() {
            self.unconfirmed = Some(error);
        }
        tokio::select! {
            () = core.store.serving_again(record) => {}
            () = core.sleep_until(Instant::now() + self.retry.next()) => {}
        }
        tokio::select! {
            () = core.store.wait_up(record) => {}
            () = core.sleep_until(self.deadline) => {}
        }
        Ok(())
    }
}

impl Core {
    /// Gives up one hold, and waits until the server has released it. If it is dropped midway, the
    /// janitor finishes, provided that the caller then calls [`Core::tidy`].
    pub(crate) async fn release(&self, hold: &Arc<Hold>, ticket: Ticket) -> Result<()> {
        self.check_ours(hold.lock_name())?;
        if self.hand_off(hold, &ticket) {
            return Ok(());
        }
        // before the first await: from here on the hold is neither renewed nor relied on, even if
        // this future is dropped
        let now = Instant::now();
        hold.leave(&ticket, now)?;
        let deadline = now + self.config.command_timeout();
        self.released(hold, &ticket.generation, now, deadline).await
    }

    /// Hands the hold off to the next waiter of this client, if that can take it as it is. Returns
    /// `false` if not; then nothing has changed.
    fn hand_off(&self, hold: &Arc<Hold>, ticket: &Ticket) -> bool {
        if !self.config.tuning.relay
            || !hold.kind().about().relayed
            || hold.caller.turn().is_none()
            || self.subscriptions.is_empty()
        {
            return false;
        }
        let Wake::Channel(channel) = hold.kind().wake(&ticket.generation.owner) else {
            return false;
        };
        let Some(queue) = self
            .subscriptions
            .get(&channel)
            .filter(|queue| queue.is_of(hold.kind()))
        else {
            return false;
        };
        // a reply that was read late proves nothing about now, so count from when the request was
        // sent
        let heard = ticket.generation.since + self.store.round_trip() + HAND_OFF_WINDOW;
        if heard <= Instant::now() {
            return false;
        }
        // another call that has the owner lock may have planned a request
        let Ok(_turn) = hold.owner_lock.try_acquire() else {
            return false;
        };
        let mut effects = Effects::default();
        let must_expire = queue.relay.hand_off(|| {
            let (epoch, ttl) = (self.epoch(hold), self.config.watchdog_timeout);
            let handed = hold.change_quietly(|state, effects| {
                state.hand_off(ticket, epoch, ttl, Instant::now(), effects)
            });
            effects = handed.1;
            handed.0.map(|ticket| (Arc::clone(hold), ticket))
        });
        // not before the relay is unlocked: wakers are the user's code
        hold.notify(effects);
        if must_expire == Some(true) {
            // fails only if the client has ended, and its waiters with it
            let _ = self.relays.send(queue);
        }
        must_expire.is_some()
    }

    /// Takes one hold off the count that the server records. Once polled, this happens even if the
    /// future is dropped.
    async fn take_off(&self, kind: &Arc<dyn Kind>, owner: OwnerId) -> Result<()> {
        let (tell, told) = oneshot::channel();
        self.janitor.post(Job::TakeOff {
            kind: Arc::clone(kind),
            owner,
            tell,
        });
        told.await.unwrap_or(Err(Error::Closed))
    }

    /// Waits until the server agrees that a hold of this generation was given up. `now` is the
    /// current time.
    pub(super) async fn released(
        &self,
        hold: &Arc<Hold>,
        generation: &Generation,
        mut now: Instant,
        deadline: Instant,
    ) -> Result<()> {
        let mut repeat = Repeat::until(deadline);
        loop {
            let error = match self.lock_owner_at(hold, Some(deadline), now).await {
                Ok((_turn, now)) => match self.agree(hold, now).await {
                    Agreement::Reached { held: true } => return hold.check_released(generation),
                    Agreement::Reached { held: false } => {
                        return Err(hold.lost_error(&generation.owner, LossReason::RecordMissing));
                    }
                    // orphaned: it is undone in the background
                    Agreement::NotOurs => {
                        return Err(store_error(hold.lock_name(), no_reply(NOT_CONFIRMED)));
                    }
                    Agreement::Refused(error) | Agreement::Silent(error) => error,
                },
                Err(error) => error,
            };
            repeat.after(self, hold, error).await?;
            now = Instant::now();
        }
    }

    /// Gives up one hold without waiting.
    pub(crate) fn release_later(&self, hold: &Arc<Hold>, ticket: &Ticket) {
        if !self.store.is_ours() {
            return;
        }
        if self.hand_off(hold, ticket) {
            return self.tidy(hold);
        }
        // an error means that the hold was lost: there is nothing to give up
        let _ = hold.leave(ticket, Instant::now());
        self.tidy(hold);
    }

    /// Gives up one hold of an owner, without a guard.
    pub(crate) async fn release_owner(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Result<()> {
        self.enter(kind.name()).await?;
        if let Some(hold) = self.holds.get(kind, owner) {
            let call = CallInFlight { core: self, hold };
            let (hold, now) = (&call.hold, Instant::now());
            if let Some(generation) = hold.generation_of(owner)
                && hold.leave_without_guard(&generation, now)?
            {
                let deadline = now + self.config.command_timeout();
                return self.released(hold, &generation, now, deadline).await;
            }
            if hold.has_ended_for(owner) {
                return Err(not_held(kind, owner));
            }
        }
        if !owner.is_exact() {
            return Err(not_held(kind, owner));
        }
        // left to its lease, or another client's: only the record has the count
        self.take_off(kind, owner.clone()).await
    }

    /// Takes one hold off the count that the server records, whatever other clients do at the same
    /// time. With the last one, the hold that this client left to its lease ends.
    ///
    /// `in_doubt`: the count before the first try that got no reply. While the server records the
    /// same count, that try was not executed, and will not be if this one is; otherwise it was, or
    /// another release was. The count is kept whatever becomes of later tries, since the first one
    /// may still arrive.
    pub(super) async fn release_elsewhere(
        &self,
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        in_doubt: &mut Option<u32>,
    ) -> Result<()> {
        let released = self.take_one_off(kind, owner, in_doubt).await;
        if let Ok(Released::Free) | Err(Error::NotHeld { .. }) = released
            && let Some(left) = self.holds.left(kind, owner)
        {
            left.change(|state, effects| state.lose(LossReason::RecordMissing, effects));
            self.tidy(&left);
        }
        released.map(drop)
    }

    async fn take_one_off(
        &self,
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        in_doubt: &mut Option<u32>,
    ) -> Result<Released> {
        let mut seen = match self.send_inspect(kind).await? {
            Inspected::Held { holders, .. } => {
                let holder = holders.into_iter().find(|(holder, _)| holder == owner);
                holder
                    .map(|(_, holds)| holds)
                    .ok_or_else(|| not_held(kind, owner))?
            }
            _ => return Err(not_held(kind, owner)),
        };
        let unanswered = *in_doubt;
        if unanswered.is_some_and(|before| before != seen) {
            return Ok(Released::StillHeld);
        }
        loop {
            *in_doubt = Some(seen);
            let release = kind.release_if(owner, seen.saturating_sub(1), seen);
            match self
                .store
                .release_unrecorded(&release)
                .await
                .map(|(released, _)| released)
            {
                Ok(released @ (Released::Free | Released::StillHeld)) => return Ok(released),
                Ok(Released::NotHeld) => return Err(not_held(kind, owner)),
                // the count changed after it was read: the try without a reply was executed, or
                // another release was
                Ok(Released::Changed { .. }) if unanswered.is_some() => {
                    return Ok(Released::StillHeld);
                }
                // another client was faster: retry with the new count
                Ok(Released::Changed { holds }) => seen = holds,
                Err(error) if !error.may_have_executed() => {
                    *in_doubt = unanswered;
                    return Err(store_error(kind.name(), error));
                }
                Err(error) => return Err(store_error(kind.name(), error)),
            }
        }
    }

    /// Extends a hold to at least `lease` from now.
    pub(crate) async fn extend(
        &self,
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        lease: Duration,
    ) -> Result<()> {
        self.enter(kind.name()).await?;
        let lease = checked_lease(kind.name(), lease)?;
        let known = self.holds.get(kind, owner);
        let known = known.map(|hold| CallInFlight { core: self, hold });
        let generation = known
            .as_ref()
            .and_then(|known| known.hold.generation_of(owner));
        let current = generation
            .as_ref()
            .zip(known.as_ref().map(|known| &known.hold));
        let has_ended = |known: &CallInFlight<'_>| known.hold.has_ended_for(owner);
        if current.is_none() && (!owner.is_exact() || known.as_ref().is_some_and(has_ended)) {
            return Err(not_held(kind, owner));
        }
        let name = current.map_or(owner, |(generation, _)| &generation.owner);
        let replicas = current.map_or(self.config.replicas, |(generation, _)| {
            generation.ledger().replicas
        });
        let copies = self.config.copies(replicas);
        if let Some((_, hold)) = current {
            // set even if the extension fails or its reply is lost: the record may live that long
            hold.change(|state, _| state.ends = state.ends.max(Instant::now() + lease));
        }
        let (sent, answer) = watchdog::extend(self, kind, name, lease, copies).await;
        let (answer, acks) = answer.map_err(|error| store_error(kind.name(), error))?;
        if let (Renewed::Yes, Some(copies), Some(acks)) = (answer, copies, acks)
            && !acks.suffice(copies)
        {
            return Err(not_replicated(kind.name(), copies, acks));
        }
        if let Some((generation, hold)) = current {
            let reply = RenewalReply {
                renewed: answer,
                sent,
                ttl: lease,
                next: None,
            };
            hold.renewed(generation, reply);
            if !hold.is_current(generation) {
                return Err(not_held(kind, owner)); // it ended before the reply came
            }
        }
        match answer {
            Renewed::Yes => Ok(()),
            Renewed::Endless => Err(Error::NotExpirable {
                lock: kind.name().to_string(),
                owner: name.clone(),
            }),
            Renewed::Gone | Renewed::Taken => Err(not_held(kind, owner)),
            Renewed::Unknown => Err(store_error(
                kind.name(),
                no_reply("the server refused the renewal"),
            )),
        }
    }

    /// Ends all waits, releases all holds, and closes the connections. Holds that were left to
    /// their lease stay. Returns [`Error::Unsettled`] if some releases are not confirmed in time.
    pub(crate) async fn shutdown(&self) -> Result<()> {
        if !self.store.is_ours() {
            // a forked child: the client lives on in its parent
            return Err(Error::Closed);
        }
        self.close();
        let mut held = Vec::new();
        self.holds.for_each(|hold| held.push(Arc::clone(hold)));
        for hold in held {
            if hold.ownership() == Ownership::Ours {
                hold.change(HoldState::shut_down);
                let epoch = self.epoch(&hold);
                hold.change(|state, _| state.leave_queue(epoch, Instant::now()));
            }
            self.tidy(&hold);
        }
        let answers = tokio::select! {
            () = self.janitor.at_rest() => true,
            () = self.sleep_until(Instant::now() + self.settling_time()) => false,
        };
        let (releases, why) = (self.janitor.pending(), self.janitor.why());
        if answers {
            self.store.close().await;
        } else {
            // a server that sends no replies would not reply to an orderly close either
            self.store.abandon();
        }
        if releases == 0 {
            Ok(())
        } else {
            Err(Error::Unsettled {
                releases,
                source: why.unwrap_or_else(|| no_reply(NO_REPLY)),
            })
        }
    }
}

fn not_held(kind: &Arc<dyn Kind>, owner: &OwnerId) -> Error {
    Error::NotHeld {
        lock: kind.name().to_string(),
        owner: owner.clone(),
    }
}
