//! Giving locks up: with a guard or without, by giving them away, by force, and all at once at the end of a client.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::sync::oneshot;

use super::{
    baton::{Baton, ROUND, Record},
    core::Core,
    failure::{NOT_CONFIRMED, not_replicated, silent, store_error},
    generation::{Generation, Ticket},
    hold::Hold,
    jobs::Job,
    kind::{Kind, Wake},
    retry::Retry,
    settle::{Agreement, UnderWay},
    state::{Effects, Left, Standing, State, Unsettled},
    watchdog,
};
use crate::{
    clock::Instant,
    error::{Error, LossReason, Result, StoreError},
    options::checked_lease,
    owner::OwnerId,
    store::{Forced, Inspected, Released, Renewed, SPARE},
};

const NOT_POLLED: &str = "another call of this owner is not polled any more; all of it is being undone";

/// What somebody awaits, and is repeated until its time is over.
pub(super) struct Repeat {
    retry: Retry,
    deadline: Instant,
    /// A try that may have been executed.
    unconfirmed: Option<StoreError>,
}

impl Repeat {
    pub(super) fn until(deadline: Instant) -> Self {
        // twice as long each time; the deadline is the longest
        Self { retry: Retry::new(Duration::from_millis(5), Duration::MAX), deadline, unconfirmed: None }
    }

    /// Pauses after a try that failed. `Err`: that was the last one.
    pub(super) async fn after(&mut self, core: &Core, hold: &Hold, error: StoreError) -> Result<()> {
        let next = Instant::now() + self.retry.pause();
        if !error.is_transient() || next + core.config.command_timeout() / SPARE > self.deadline {
            // where one try may have been executed, or all is being undone, nobody can say that nothing was
            let error = match self.unconfirmed.take() {
                _ if error.may_have_executed() => error,
                Some(unconfirmed) => unconfirmed,
                None if hold.standing() == Standing::Orphaned => silent(NOT_POLLED),
                None => error,
            };
            return Err(store_error(hold.lock_name(), error));
        }
        if error.may_have_executed() {
            self.unconfirmed = Some(error);
        }
        tokio::select! {
            () = core.store.serves_again(hold.kind().record()) => {}
            () = core.sleep_until(Instant::now() + self.retry.next()) => {}
        }
        tokio::select! {
            () = core.store.wait_up(hold.kind().record()) => {}
            () = core.sleep_until(self.deadline) => {}
        }
        Ok(())
    }
}

impl Core {
    /// Gives up one hold, and waits until the server knows. Dropped midway, the janitor goes on, if the caller tidies then.
    pub(crate) async fn release(&self, hold: &Arc<Hold>, ticket: Ticket) -> Result<()> {
        self.check_ours(hold.lock_name())?;
        if self.hand_on(hold, &ticket) {
            return Ok(());
        }
        // before the first await: from here on it is neither renewed nor relied on
        let now = Instant::now();
        let left = hold.leave(&ticket, now)?;
        self.left(hold, left, now, now + self.config.command_timeout()).await
    }

    /// Hands the hold on to the next waiter of this client, if it can go on as it is. `false`: nothing has changed.
    fn hand_on(&self, hold: &Arc<Hold>, ticket: &Ticket) -> bool {
        if !self.config.relay || !hold.kind().about().relayed || self.hub.is_empty() {
            return false;
        }
        let Wake::Channel(channel) = hold.kind().wake(&ticket.generation.owner) else { return false };
        let Some(gate) = self.hub.get(&channel).filter(|gate| gate.is_of(hold.kind())) else { return false };
        // an answer that lay there unheard says nothing about now
        let heard = ticket.generation.since + self.store.round_trip() + ROUND;
        if heard <= Instant::now() {
            return false;
        }
        // whoever has the turn may have planned something
        let Ok(_turn) = hold.turn.try_acquire() else { return false };
        let mut effects = Effects::default();
        let must_be_minded = gate.relay.hand_on(|| {
            let (epoch, ttl) = (self.epoch(hold), self.config.watchdog_timeout);
            let handed = hold.change_quietly(|state, effects| {
                state.hand_on(hold.kind(), ticket, epoch, ttl, Instant::now(), effects)
            });
            effects = handed.1;
            // its owner's next acquire must not be taken for a re-entry
            handed.0.inspect(|_| self.holds.retire_names())
        });
        hold.tell(effects);
        if must_be_minded == Some(true) {
            // refused: the client has ended, and with it whoever waits
            let _ = self.relays.send(gate);
        }
        must_be_minded.is_some()
    }

    /// Waits until the server knows what was given up in our books; it is `now`.
    pub(super) async fn left(&self, hold: &Arc<Hold>, left: Left, now: Instant, deadline: Instant) -> Result<()> {
        match left {
            Left::Here(generation) => self.released(hold, &generation, now, deadline).await,
            Left::Elsewhere(owner) => self.take_off(hold.kind(), owner, Some(hold)).await,
        }
    }

    /// Takes one hold off what the server records. Once polled, it goes on when it is dropped.
    async fn take_off(&self, kind: &Arc<dyn Kind>, owner: OwnerId, hold: Option<&Arc<Hold>>) -> Result<()> {
        let (tell, told) = oneshot::channel();
        self.janitor.post(Job::TakeOff { kind: Arc::clone(kind), owner, hold: hold.cloned(), tell: Some(tell) });
        told.await.unwrap_or(Err(Error::Closed))
    }

    /// Waits until the server knows that a generation of this hold was given up.
    async fn released(
        &self,
        hold: &Arc<Hold>,
        generation: &Generation,
        mut now: Instant,
        deadline: Instant,
    ) -> Result<()> {
        let mut repeat = Repeat::until(deadline);
        loop {
            let error = match self.turn_at(hold, Some(deadline), now).await {
                Ok((_turn, now)) => match self.agree(hold, now).await {
                    Agreement::Reached { held: true } => return hold.check_released(generation),
                    Agreement::Reached { held: false } => {
                        return Err(hold.lost_error(&generation.owner, LossReason::RecordMissing));
                    }
                    // what it was to be told is passed on, or being undone
                    Agreement::NotOurs => return Err(store_error(hold.lock_name(), silent(NOT_CONFIRMED))),
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
        if self.hand_on(hold, ticket) {
            return self.tidy(hold);
        }
        // lost already: nothing to give up
        if let Ok(Left::Elsewhere(owner)) = hold.leave(ticket, Instant::now()) {
            self.take_off_later(hold, &owner, 1);
        }
        self.tidy(hold);
    }

    /// Takes so many holds off what the server records of a lock that was given away, without waiting.
    fn take_off_later(&self, hold: &Arc<Hold>, owner: &OwnerId, holds: u32) {
        for _ in 0..holds {
            let (kind, owner, hold) = (Arc::clone(hold.kind()), owner.clone(), Some(Arc::clone(hold)));
            self.janitor.post(Job::TakeOff { kind, owner, hold, tell: None });
        }
    }

    /// Lets go of a guard: its hold is somebody else's from here on.
    pub(crate) fn give_away(&self, hold: &Arc<Hold>, ticket: &Ticket) {
        if !self.store.is_ours() {
            return;
        }
        // first: the owner's next acquire comes as soon as this is somebody else's, and must know by then
        let name = self.holds.about_to_give_away(hold);
        let unsettled = hold.give_away(ticket);
        self.holds.gave_it_away(hold, &name, unsettled.is_some());
        if let Some(unsettled) = unsettled {
            match unsettled {
                Unsettled::Nothing => {}
                Unsettled::Owed(holds) => self.take_off_later(hold, &ticket.generation.owner, holds),
                Unsettled::InDoubt(holds) => self.janitor.post(Job::SetCount { hold: Arc::clone(hold), holds }),
            }
        }
        self.tidy(hold);
    }

    /// Gives up one hold of an owner, without a guard.
    pub(crate) async fn release_owner(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Result<()> {
        self.enter(kind.name()).await?;
        if let Some(hold) = self.holds.get(kind, owner)
            && hold.generation_of(owner).is_some()
        {
            let under_way = UnderWay { core: self, hold };
            let hold = &under_way.hold;
            let left = hold.leave_without_guard(owner)?;
            let now = Instant::now();
            return self.left(hold, left, now, now + self.config.command_timeout()).await;
        }
        if !owner.is_exact() {
            return Err(not_held(kind, owner));
        }
        // what was handed on under this name is not the caller's any more
        let mut is_handed_on = false;
        self.look_at_relay(kind, |baton| {
            let is_theirs = |hold: &Arc<Hold>| hold.standing() == Standing::Ours && hold.generation_of(owner).is_some();
            is_handed_on = baton.as_ref().is_some_and(|baton| baton.record().is_of(owner))
                || self.holds.of_lock(kind).iter().any(is_theirs);
        });
        if is_handed_on {
            return Err(not_held(kind, owner));
        }
        // given away, by this client or another one: the count is in the record only
        self.take_off(kind, owner.clone(), None).await
    }

    /// Takes one hold off what the server records, whatever others do at the same time. What this client had given away
    /// ends with the last one. `in_doubt`: the count of the first try that was not answered. While the server records the
    /// same, that try was not executed, and will not be if this one is; else it was, or another release was. That stays so
    /// whatever becomes of later tries: it may still arrive.
    pub(super) async fn release_elsewhere(
        &self,
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        in_doubt: &mut Option<u32>,
    ) -> Result<()> {
        let released = self.take_one_off(kind, owner, in_doubt).await;
        if let Ok(Released::Free) | Err(Error::NotHeld { .. }) = released
            && let Some(given_away) = self.holds.given_away(kind, owner)
        {
            given_away.lose(LossReason::RecordMissing);
            self.tidy(&given_away);
        }
        released.map(drop)
    }

    async fn take_one_off(
        &self,
        kind: &Arc<dyn Kind>,
        owner: &OwnerId,
        in_doubt: &mut Option<u32>,
    ) -> Result<Released> {
        let mut seen = match self.ask(kind).await? {
            Inspected::Held { holders, .. } => {
                let holder = holders.into_iter().find(|(holder, _)| holder == owner);
                holder.map(|(_, holds)| holds).ok_or_else(|| not_held(kind, owner))?
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
            match self.store.release_in_no_books(&release).await.map(|(released, _)| released) {
                Ok(released @ (Released::Free | Released::StillHeld)) => return Ok(released),
                Ok(Released::NotHeld) => return Err(not_held(kind, owner)),
                // since it was looked at: the try that was not answered was executed, or another release
                Ok(Released::Changed { .. }) if unanswered.is_some() => return Ok(Released::StillHeld),
                // somebody else was quicker
                Ok(Released::Changed { holds }) => seen = holds,
                Err(error) if !error.may_have_executed() => {
                    *in_doubt = unanswered;
                    return Err(store_error(kind.name(), error));
                }
                Err(error) => return Err(store_error(kind.name(), error)),
            }
        }
    }

    /// Lets a hold live for at least `lease` from now.
    pub(crate) async fn extend(&self, kind: &Arc<dyn Kind>, owner: &OwnerId, lease: Duration) -> Result<()> {
        self.enter(kind.name()).await?;
        let lease = checked_lease(kind.name(), lease)?;
        let known = self.holds.get(kind, owner).into_iter().chain(self.holds.given_away(kind, owner));
        let known = known.map(|hold| (hold.generation_of(owner), hold)).find(|(generation, _)| generation.is_some());
        let known = known.map(|(generation, hold)| (generation, UnderWay { core: self, hold }));
        let current = known.as_ref().and_then(|(generation, known)| Some((generation.as_ref()?, &known.hold)));
        if current.is_none() && !owner.is_exact() {
            return Err(not_held(kind, owner));
        }
        let name = current.map_or(owner, |(generation, _)| &generation.owner);
        let replicas = current.map_or(self.config.replicas, |(generation, _)| generation.books().replicas);
        let copies = self.config.copies(replicas);
        if let Some((_, hold)) = current {
            // also if it does not count, or nobody hears that it does
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
            hold.renewed(generation, answer, sent, lease, None);
            if !hold.is_current(generation) {
                return Err(not_held(kind, owner)); // it ended before the answer came
            }
        }
        match answer {
            Renewed::Yes => Ok(()),
            Renewed::Endless => Err(Error::NotExpirable { lock: kind.name().to_string(), owner: name.clone() }),
            Renewed::Gone | Renewed::Taken => Err(not_held(kind, owner)),
            Renewed::Unknown => Err(store_error(kind.name(), silent("the server refused the renewal"))),
        }
    }

    /// Frees a lock, whoever holds it. `false`: nobody did.
    pub(crate) async fn force_unlock(&self, kind: &Arc<dyn Kind>) -> Result<bool> {
        self.enter(kind.name()).await?;
        // who holds it now, or is handed it; a hold that begins meanwhile is not ours to end
        let ours: Vec<_> = self.holds.of_lock(kind).into_iter().map(|hold| UnderWay { core: self, hold }).collect();
        let mut records = Vec::new();
        self.look_at_relay(kind, |baton| {
            let held = ours.iter().filter_map(|ours| ours.hold.generation());
            records.extend(held.map(|generation| Record::of(&generation)));
            records.extend(baton.as_ref().map(Baton::record));
        });
        match self.store.force_release(&kind.force_release()).await {
            Ok(Forced::Freed) => {
                let is_one = |record: Record| records.contains(&record);
                let mut told = Vec::new();
                self.look_at_relay(kind, |baton| {
                    baton.take_if(|baton| is_one(baton.record()));
                    for hold in self.holds.of_lock(kind) {
                        let lose = |state: &mut State, effects: &mut Effects| {
                            if state.held().is_some_and(|(generation, _)| is_one(Record::of(generation))) {
                                state.lose(LossReason::RecordMissing, effects);
                            }
                        };
                        told.push((hold.change_quietly(lose).1, UnderWay { core: self, hold }));
                    }
                });
                for (effects, ours) in told {
                    ours.hold.tell(effects);
                }
                Ok(true)
            }
            Ok(Forced::WasFree) => Ok(false),
            Ok(Forced::WrongKind) => Err(Error::WrongLockKind { lock: kind.name().to_string() }),
            Err(error) => Err(store_error(kind.name(), error)),
        }
    }

    /// Looks at a lock's holds, or changes them, while none is handed on, and at what lies between two of them.
    fn look_at_relay(&self, kind: &Arc<dyn Kind>, look: impl FnOnce(&mut Option<Baton>)) {
        match self.hub.of_lock(kind) {
            Some(gate) => gate.relay.look(look),
            None => look(&mut None),
        }
    }

    /// Frees all locks whose records are at keys of this pattern, as [`Core::force_unlock`] does; returns how many were
    /// held. `kind_of`: the lock of a record.
    pub(crate) async fn force_unlock_all(
        &self,
        pattern: &str,
        kind_of: impl Fn(&str) -> Option<Arc<dyn Kind>>,
    ) -> Result<u64> {
        let (mut cursor, mut freed) = ("0".to_owned(), 0);
        loop {
            self.enter(pattern).await?;
            let page = self.store.scan(&cursor, pattern).await.map_err(|error| store_error(pattern, error))?;
            let kinds: Vec<_> = page.keys.iter().filter_map(|key| kind_of(key)).collect();
            for outcome in join_all(kinds.iter().map(|kind| self.force_unlock(kind))).await {
                match outcome {
                    Ok(held) => freed += u64::from(held),
                    // no record any more
                    Err(Error::WrongType { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            match page.next {
                Some(next) => cursor = next,
                None => return Ok(freed),
            }
        }
    }

    /// Turns waiters away, releases what is held, and ends the connections. What was given away is left alone.
    pub(crate) async fn shutdown(&self) -> Result<()> {
        if !self.store.is_ours() {
            // of a fork: the client goes on where it was made
            return Err(Error::Closed);
        }
        self.close();
        let mut held = Vec::new();
        self.holds.for_each(|hold| held.push(Arc::clone(hold)));
        for hold in held {
            match hold.standing() {
                Standing::Ours => {
                    hold.lose(LossReason::ShutDown);
                    hold.leave_queue(self.epoch(&hold));
                }
                // what was given away is somebody else's; what a guard still has is given up
                Standing::GivenAway => {
                    let guards = hold.lose_guards(LossReason::ShutDown);
                    self.take_off_later(&hold, &hold.owner(), guards);
                }
                Standing::Orphaned => {}
            }
            self.tidy(&hold);
        }
        let answers = tokio::select! {
            () = self.janitor.at_rest() => true,
            () = self.sleep_until(Instant::now() + self.settling_time()) => false,
        };
        let locks = self.janitor.pending();
        if answers {
            self.store.close().await;
        } else {
            // a server that does not answer does not answer to a good-bye either
            self.store.abandon();
        }
        if locks == 0 { Ok(()) } else { Err(Error::Unsettled { locks }) }
    }
}

fn not_held(kind: &Arc<dyn Kind>, owner: &OwnerId) -> Error {
    Error::NotHeld { lock: kind.name().to_string(), owner: owner.clone() }
}
