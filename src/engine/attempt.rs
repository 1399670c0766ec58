//! One attempt to acquire, in the owner's turn.

use std::{
    num::NonZeroU64,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::{
    core::Core,
    failure::{NO_RECEIPT, not_entered, not_replicated, silent, store_error},
    generation::{Copied, Grant, Ticket},
    hold::{Hold, Next},
    kind::{Adopts, Kind, Terms, Turn, Wake},
    lease::{Lease, Millis},
    settle::UnderWay,
    state::{Door, Request, Standing},
    turn::LastLook,
    wait::{place::Place, waiter::Waiter},
};
use crate::{
    clock::Instant,
    error::{Error, LossReason, Result, StoreError},
    options::{AcquireOptions, Copies, Wait, checked_lease},
    owner::OwnerId,
    store::{Acks, Acquired, Call, Epoch, Inspected, Route},
};

/// So many holds are not handed over while a subscription is under way: a waiter with as many before him has missed no
/// message, and need not try again when he listens. Should he have, he looks for himself within the poll cap.
const FAR: u32 = 16;

/// A hold that was acquired, and the ticket to it.
pub(crate) type Entered = (Arc<Hold>, Ticket);

/// One acquire, with everything resolved.
pub(crate) struct Acquire<'a> {
    pub(super) core: &'a Core,
    pub(super) kind: &'a Arc<dyn Kind>,
    pub(super) owner: OwnerId,
    pub(super) lease: Lease,
    /// Who must have it, before it counts.
    pub(super) copies: Option<Copies>,
    pub(super) waits: bool,
    /// By which number it may be granted the lock.
    turn: Option<Turn>,
    /// Whose hold is adopted.
    pub(super) from: Option<&'a OwnerId>,
    /// When that was asked for first, and may have been executed: what is in doubt since is asked for again.
    asked: Mutex<Option<Instant>>,
    /// See [`AcquireOptions::after_a_loss`].
    pub(super) after_loss: bool,
    pub(super) started: Instant,
    /// When the wait is over; `None`: never.
    pub(super) deadline: Option<Instant>,
}

/// What came of one attempt.
pub(super) enum Attempt<'a> {
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

/// Why an attempt is made.
#[derive(Clone, Copy)]
pub(super) enum Told<'w, 'a> {
    Nothing,
    /// The last holder hands the lock on, here.
    Handed(&'w Waiter<'a>),
    /// A message may have come, which may say that the lock was granted.
    Something(&'w Waiter<'a>),
}

impl<'w, 'a> Told<'w, 'a> {
    pub(super) fn at(waiter: Option<&'w Waiter<'a>>, is_handed: bool) -> Self {
        match waiter {
            Some(waiter) if is_handed => Self::Handed(waiter),
            Some(waiter) => Self::Something(waiter),
            None => Self::Nothing,
        }
    }
}

pub(super) struct Busy<'a> {
    pub(super) ttl: Option<Duration>,
    /// How to learn that it is worth trying again.
    pub(super) wake: Wake,
    pub(super) place: Option<Place<'a>>,
    /// Whether many are before this waiter.
    pub(super) far: bool,
}

/// Why what the server has granted was not entered.
pub(super) fn why_not_entered(hold: &Hold) -> StoreError {
    not_entered(hold.standing() == Standing::Orphaned)
}

/// How many replicas have it, if that is known; or what comes of the attempt.
type HasCopies<'a, 'b> = Pin<Box<dyn Future<Output = Result<Option<u8>, Result<Attempt<'a>>>> + Send + 'b>>;

impl<'a> Acquire<'a> {
    pub(crate) fn new(core: &'a Core, kind: &'a Arc<dyn Kind>, options: &AcquireOptions, wait: Wait) -> Result<Self> {
        core.check_ours(kind.name())?;
        let started = Instant::now();
        let checked = |lease| checked_lease(kind.name(), lease).map(Millis::of);
        let watched = |ttl| Lease::Watched { ttl, times: options.rare().max_renewals };
        let lease = match (options.lease, options.rare().watchdog_timeout) {
            (Some(lease), _) => Lease::Fixed(checked(lease)?),
            (None, Some(ttl)) => watched(checked(ttl)?),
            (None, None) if kind.about().endless => Lease::Endless,
            (None, None) => watched(Millis::of(core.config.watchdog_timeout)),
        };
        let (waits, copies) =
            (wait != Wait::No, core.config.copies(options.rare().replicas.unwrap_or(core.config.replicas)));
        // a lease is asked for, lest it begin with less; so are replicas, and whose renewals are counted
        let is_plain = copies.is_none() && matches!(lease, Lease::Watched { times: None, .. });
        Ok(Self {
            core,
            kind,
            lease,
            copies,
            waits,
            turn: (waits && is_plain && kind.about().own_channel).then(|| Turn::next(&core.turns)),
            from: None,
            asked: Mutex::default(),
            after_loss: options.rare().after_loss,
            started,
            deadline: wait.until(started),
            owner: core.resolve(kind, options)?,
        })
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

    /// One attempt, in the owner's turn; it is `now`.
    pub(super) async fn attempt(
        &self,
        told: Told<'_, 'a>,
        mut now: Instant,
        deadline: Option<Instant>,
    ) -> Result<Attempt<'a>> {
        let (core, kind, began) = (self.core, self.kind, now);
        if !core.store.is_connected() {
            if let Err(error) = core.connected(deadline).await {
                return if error.is_transient() { Ok(Attempt::Failed(error)) } else { Err(error) };
            }
            now = Instant::now();
        }
        if self.owner.is_value() {
            if let Some(attempt) = self.attempt_by_a_value_that_was_given_away(deadline).await {
                return attempt;
            }
            now = Instant::now();
        }
        let under_way = UnderWay { core, hold: core.holds.get_or_insert(kind, &self.owner) };
        let hold = &under_way.hold;
        let (_turn, mut now) = match core.turn_at(hold, deadline, now).await {
            Ok(turn) => turn,
            Err(error) => return Ok(Attempt::NoTurn(store_error(kind.name(), error))),
        };

        // what this owner left behind comes first
        let (request, sent) = loop {
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
            now = Instant::now();
        };
        let deadline = if sent > began { self.after_what_came_first(deadline, sent) } else { deadline };
        let mut route = core.route(hold, sent);
        hold.send(&request, self.lease, route.epoch(), sent);
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
        if let Some(ticket) = self.take(told, hold, &request) {
            return Ok(Attempt::Entered((Arc::clone(hold), self.entered(hold, ticket)?)));
        }
        let (call, since) = self.call(&request, sent);
        // whoever adopts has what its giver had: until the replicas know of it, they have that one's record
        route.copies = self.copies_around(hold, &request).filter(|_| self.from.is_none());
        route.give_up(deadline.map(|deadline| deadline - core.grace()));
        let ask = core.acquire_by(&mut route, (hold, &request), &call);
        let Some(answer) = self.in_time(deadline, pin!(ask)).await else {
            return Ok(Attempt::GivenUp);
        };
        match answer {
            Ok((Acquired::Yes { token }, epoch)) => {
                let replicas = match route.copies {
                    Some(copies) => match self.copied(hold, &route, copies, deadline).await {
                        Ok(replicas) => replicas,
                        Err(attempt) => return attempt,
                    },
                    None => None,
                };
                match self.take_in(hold, &request, since, token, (epoch, replicas))? {
                    Some(ticket) => Ok(Attempt::Entered((Arc::clone(hold), ticket))),
                    // nor would another answer come in time
                    None if self.from.is_some() => Err(store_error(kind.name(), why_not_entered(hold))),
                    None => self.failed(why_not_entered(hold)),
                }
            }
            Ok((Acquired::Busy { ttl, ahead, place }, epoch)) => {
                let queued = self.waits && kind.about().queues;
                let look = place.map(|place| LastLook { place, sent, epoch });
                let place = queued.then(|| Place::new(core, hold, look));
                hold.busy(&request, queued, epoch);
                let far = ahead.is_some_and(|ahead| ahead >= FAR);
                Ok(Attempt::Busy(Busy { ttl, wake: core.wake(kind, &request.owner), place, far }))
            }
            Ok((Acquired::Lost, epoch)) if self.from.is_some() => {
                hold.busy(&request, false, epoch);
                Err(hold.not_held_error(&request.owner))
            }
            Ok((Acquired::Lost, _)) => Err(hold.refused_as_lost(&request)),
            Ok((Acquired::WrongKind, _)) => {
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

    /// Takes what it may have been told of, which nobody asks for.
    fn take(&self, told: Told<'_, 'a>, hold: &Arc<Hold>, request: &Request) -> Option<Ticket> {
        match told {
            Told::Nothing => None,
            Told::Handed(waiter) => waiter.take(hold, request, self.lease, self.replicas()),
            Told::Something(waiter) => waiter.take_granted(hold, request, self.lease),
        }
    }

    /// What is asked for, and since when it counts: adopted by an earlier request, whose answer was lost, it has that one's lease.
    fn call(&self, request: &Request, sent: Instant) -> (Call, Instant) {
        let Self { kind, waits, turn, .. } = *self;
        let (owner, lease_ms, holds) = (&request.owner, self.lease.millis(), request.count);
        if let Some(from) = self.from {
            return (kind.adopt(from, owner, lease_ms), *self.asked().get_or_insert(sent));
        }
        (kind.acquire(Terms { owner, lease_ms, holds, waits, turn }), sent)
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
                    Ok(Attempt::Busy(Busy {
                        ttl,
                        wake: self.core.wake(self.kind, &self.owner),
                        place: None,
                        far: false,
                    }))
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
        (epoch, replicas): (Epoch, Option<u8>),
    ) -> Result<Option<Ticket>> {
        let core = self.core;
        // where others hold the record too, they may cut its TTL short: Redisson's readers do
        let is_told_again = self.kind.about().shared && !self.lease.is_watched();
        let kept_every = is_told_again.then(|| Millis::of(core.config.watchdog_timeout / 3));
        let copied = Copied { wanted: self.replicas(), had: replicas };
        let grant = Grant { kept_every, token, copied, ..Grant::of(sent, self.lease) };
        let ticket = hold.granted(request, &grant, epoch)?;
        ticket.map(|ticket| self.entered(hold, ticket)).transpose()
    }

    /// Looked at after the hold is entered: a shutdown that this look misses will end it.
    fn entered(&self, hold: &Arc<Hold>, ticket: Ticket) -> Result<Ticket> {
        if let Err(closed) = self.core.check_open() {
            hold.lose(LossReason::ShutDown);
            self.core.release_later(hold, &ticket);
            return Err(closed);
        }
        Ok(ticket)
    }

    /// How many replicas must have it.
    fn replicas(&self) -> u32 {
        self.copies.map_or(0, |copies| copies.replicas)
    }

    /// Who is asked for: an inner hold moves the end of the outer one, which may need more.
    fn copies_around(&self, hold: &Hold, request: &Request) -> Option<Copies> {
        let outer = (request.count > 1).then(|| hold.generation()).flatten();
        let of_outer = outer.map_or(0, |outer| outer.books().replicas);
        self.core.config.copies(self.replicas().max(of_outer))
    }

    /// Waits until the replicas have what was acquired, and undoes it if fewer have it than this acquire needs: how many have
    /// it, if that is known. In a box, as it is rare.
    fn copied<'b>(
        &'b self,
        hold: &'b Arc<Hold>,
        route: &'b Route,
        copies: Copies,
        deadline: Option<Instant>,
    ) -> HasCopies<'a, 'b> {
        Box::pin(async move {
            let core = self.core;
            let acks = match self.in_time(deadline, pin!(core.store.acknowledged(route))).await {
                Some(Ok(Some(acks))) if self.copies.is_none_or(|own| acks.suffice(own)) => {
                    return Ok(Some(acks.counted()));
                }
                // the outer hold only would have needed them
                _ if self.copies.is_none() => return Ok(None),
                Some(Ok(Some(acks))) => acks,
                Some(Ok(None)) => return Err(self.failed(silent(NO_RECEIPT))),
                // it was acquired, and WAIT will never be answered
                Some(Err(error)) if error.kind().is_denied() => {
                    let is_undone = matches!(self.in_time(deadline, pin!(core.settle(hold))).await, Some(Ok(())));
                    return Err(self.failed(if is_undone { error.of_a_read() } else { error }));
                }
                Some(Err(error)) => return Err(self.failed(error)),
                // nobody has said so in time
                None => Acks::default(),
            };
            let refused = Attempt::Failed(not_replicated(self.kind.name(), self.copies.unwrap_or(copies), acks));
            // what fails here is done by the next in line
            let _ = self.in_time(deadline, pin!(core.settle(hold))).await;
            Err(Ok(refused))
        })
    }

    fn failed(&self, error: StoreError) -> Result<Attempt<'a>> {
        let transient = error.is_transient();
        let error = store_error(self.kind.name(), error);
        if transient { Ok(Attempt::Failed(error)) } else { Err(error) }
    }
}
