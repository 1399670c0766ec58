//! The state of a hold as a value: what this client wants the server to record for one owner of one
//! lock, what the server is known to record, and what transitions share. No I/O and no clock:
//! instants and epochs are passed in. Side effects are returned in [`Effects`], to run after
//! unlocking.
//!
//! - `current` is the generation: held, or given up until the server agrees, or lost while a guard
//!   of it lives.
//! - `server` is what the server is known to record: a count, a place in the queue, or a doubt,
//!   with the epoch in which it began.
//! - `late_request` is a request that a reply over a newer connection has overtaken, and that may
//!   still be executed.
//! - `is_left`: all that is held was left to its lease. `ownership`: ours, or orphaned.
//!
//! A request is planned, then sent: from then on the server's side is in doubt. Then it has a
//! reply, or is known not to be executed (all is as before), or the doubt stays until a later call
//! settles it.

use std::{
    num::NonZeroU8,
    sync::{Arc, MutexGuard},
    time::Duration,
};

use nestlock_wire::{Epoch, clock::Instant};

use super::{
    generation::{Generation, GenerationEnd, Ledger},
    refusal::Refusal,
};

use crate::{
    engine::{
        kind::{Adopts, KindInfo},
        lease::Keep,
    },
    error::LossReason,
    owner::OwnerId,
};

/// What the client knows about one owner and one lock.
#[derive(Debug)]
pub(crate) struct HoldState {
    pub(crate) ownership: Ownership,
    /// The owner as the server knows it.
    pub(crate) owner: OwnerId,
    /// All that is held was left to its lease, so the owner is no longer inside it: it continues
    /// with another hold, under another name.
    pub(crate) is_left: bool,
    /// Acquires of this owner that are waiting in the lock's wait queue.
    pub(crate) waiters: u32,
    /// A hold of the sibling kind may exist under the name of this hold: it was left to its lease,
    /// or a late request may still acquire it. So this client nests no new one in this hold.
    pub(crate) sibling_in_doubt: bool,
    pub(crate) server: ServerSide,
    /// The record must be checked as soon as an acquire that is in flight is granted.
    pub(crate) to_be_checked: bool,
    /// The name to which the hold may have been moved, while that is in doubt.
    pub(crate) moves_to: Option<Box<OwnerId>>,
    /// An earlier request under this name that may still be executed: a later request got its reply
    /// over another connection.
    pub(crate) late_request: Option<LateRequest>,
    /// When the last request was sent.
    pub(crate) last_sent: Instant,
    /// Until when a record may live that this owner requested by an acquire, an extension or a
    /// move.
    pub(crate) ends: Instant,
    /// The generation that is held; or that was given up, until the server agrees; or that was
    /// lost, while a guard of it is alive.
    pub(crate) current: Option<Arc<Generation>>,
}

/// A request that may still be executed although a later one has its reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LateRequest {
    /// The connection that carried it.
    pub(crate) epoch: Epoch,
    /// Until when it is expected: a record that it might create has ended by then.
    pub(crate) until: Instant,
}

/// Whether a hold is this client's to manage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ownership {
    /// This client makes the server record what the ledger says.
    Ours,
    /// A request about it belongs to a future that is no longer polled. Its effect is undone under
    /// the old name, and the owner continues with a new hold.
    Orphaned,
}

/// What the server records for this owner, as far as the client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerSide {
    /// This hold count.
    Holds(u32),
    /// The owner is in the wait queue and holds nothing.
    Waits,
    /// Requests are in flight, or their replies were lost.
    InDoubt {
        /// The connection that carried them; [`Epoch::NONE`] if there were several.
        epoch: Epoch,
        /// Whether all of them only acquire a first hold.
        outermost: bool,
    },
}

/// A request about this hold. It is planned, then sent; after that it has a reply, is known not to
/// have been executed, or is in doubt.
#[derive(Debug)]
pub(crate) struct HoldRequest {
    pub(crate) owner: OwnerId,
    /// The hold count that it leads to.
    pub(crate) count: u32,
    /// What the server records until it is executed.
    pub(crate) before: ServerSide,
    pub(crate) is_release: bool,
}

impl HoldRequest {
    /// Returns whether all it does is end a hold: no hold is kept, and nothing is in doubt.
    pub(crate) fn ends_a_hold(&self) -> bool {
        self.count == 0 && matches!(self.before, ServerSide::Holds(_))
    }
}

/// The parameters of an acquire that its plan depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AcquireMode<'a> {
    /// The caller's kind. It may be another kind of the family than the one that the hold was
    /// created for.
    pub(crate) about: KindInfo,
    /// The caller waits if the lock is busy: in the wait queue, if the kind has one.
    pub(crate) waits: bool,
    /// Set if the acquire adopts the only hold of another owner, which handed it over.
    pub(crate) adopts: Option<Adopts>,
    /// The highest hold count of one owner.
    pub(crate) max_holds: u32,
    /// Acquire even while a guard of a lost hold is alive: the caller knows of that loss.
    pub(crate) after_loss: bool,
    /// The owner, if the caller named it. The owner of one acquire may be named only while it
    /// holds the lock.
    pub(crate) named: Option<&'a OwnerId>,
    /// Set if the caller did not name an owner, and is the owner of one acquire. The hold may have
    /// been created for a name that was read from the record.
    pub(crate) turn: Option<NonZeroU8>,
}

/// What an acquire must know beyond the state of its own hold.
#[derive(Debug)]
pub(crate) struct SiblingState<'a> {
    /// The owner without a suffix. New names derive from this one.
    pub(crate) caller: &'a OwnerId,
    /// The same owner's hold of the sibling kind.
    pub(crate) sibling: Option<HeldSibling>,
    /// The name and the loss of the same owner's hold of the sibling kind, while a guard of it is
    /// alive.
    pub(crate) lost_sibling: Option<(OwnerId, LossReason)>,
    /// The suffix for a new name. Late requests may still use earlier ones.
    pub(crate) suffix: u64,
    /// The owner is a value that late requests may still use. A value has no other name.
    pub(crate) value_in_doubt: bool,
}

/// The other half of a read-write lock, held by the same owner.
#[derive(Debug)]
pub(crate) struct HeldSibling {
    /// The owner as the server knows it there.
    pub(crate) owner: OwnerId,
    /// Why this hold excludes another one of its sibling kind. `None` if it does not.
    pub(crate) refusal: Option<Refusal>,
}

/// The next step of an acquire.
#[derive(Debug)]
pub(crate) enum AcquirePlan {
    Send(HoldRequest),
    /// The server does not agree with the ledger: settle that first.
    Agree,
    /// The owner no longer uses this hold: continue with another one.
    Forget,
}

/// Side effects of a transition, to run after the state is unlocked: wakers and subscribers are
/// user code.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    /// The generation that ended: notify its guards.
    pub(crate) ended: Option<Arc<Generation>>,
    /// The reason and the number of holds, if it was lost while a guard was alive.
    pub(crate) lost: Option<(LossReason, u32)>,
}

/// The outcome of a release that has its reply.
#[derive(Debug)]
pub(crate) struct Answered {
    /// Whether the server recorded this owner, or may have.
    pub(crate) held: bool,
    /// A name that is no longer used.
    pub(crate) abandoned: Option<Abandoned>,
    /// The name to which the hold may have been moved, if no caller has received it. No later
    /// request moves a hold there.
    pub(crate) untold: Option<Abandoned>,
}

/// A name that is no longer used, but that late requests may still act under.
#[derive(Debug)]
pub(crate) struct Abandoned {
    pub(crate) owner: OwnerId,
    /// The name to which its hold may have been moved, or may yet be, if no caller has received it.
    pub(crate) moves_to: Option<OwnerId>,
    /// The connection that carried those requests.
    pub(crate) epoch: Epoch,
    /// Until when a record under this name may live.
    pub(crate) ends: Instant,
}

/// The state of a hold after a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Residue {
    /// The server does not record what the client wants, or may not.
    Doubt,
    /// It is held and the server agrees; or a guard of a lost generation is alive.
    Held,
    /// It is left to its lease, and the server agrees.
    Left,
    Nothing,
}

/// What the watchdog must do about a hold.
#[derive(Debug)]
pub(crate) enum Due {
    Nothing,
    Renew(DueRenewal),
    /// The lease has ended.
    Ended,
    /// A request has been in flight for longer than is possible if its future is polled.
    Stuck,
}

/// A renewal that is due.
#[derive(Debug)]
pub(crate) struct DueRenewal {
    pub(crate) generation: Arc<Generation>,
    pub(crate) keep: Keep,
    /// When it became due.
    pub(crate) due: Instant,
    /// A reply after this instant comes too late.
    pub(crate) deadline: Instant,
    /// Time until the next renewal is due.
    pub(crate) period: Duration,
}

/// How early a stuck request may be reported, so that many are reported together.
pub(crate) const STUCK_SLACK: Duration = Duration::from_millis(256);

/// Returns how early a hold may be renewed: a tenth of its period, for fewer and fuller batches.
pub(crate) fn slack(ledger: &Ledger) -> Duration {
    ledger.period().map_or(Duration::ZERO, |period| period / 10)
}

// --- queries ---

impl HoldState {
    pub(crate) fn new(owner: OwnerId, now: Instant) -> Self {
        Self {
            ownership: Ownership::Ours,
            owner,
            is_left: false,
            waiters: 0,
            sibling_in_doubt: false,
            server: ServerSide::Holds(0),
            to_be_checked: false,
            moves_to: None,
            late_request: None,
            last_sent: now,
            ends: now,
            current: None,
        }
    }

    /// Returns the generation that is held, with its ledger locked.
    pub(crate) fn held(&self) -> Option<(&Arc<Generation>, MutexGuard<'_, Ledger>)> {
        let generation = self.current.as_ref()?;
        let ledger = generation.ledger();
        ledger.is_held().then_some((generation, ledger))
    }

    /// Returns the hold count that the server should record for this owner.
    pub(crate) fn wanted(&self) -> u32 {
        self.held().map_or(0, |(_, ledger)| ledger.count)
    }

    /// Returns whether a guard is alive whose lease has ended.
    fn is_expired(&self) -> bool {
        self.current.as_ref().is_some_and(|generation| {
            let ledger = generation.ledger();
            ledger.guards > 0 && ledger.end == Some(GenerationEnd::Lost(LossReason::LeaseExpired))
        })
    }

    /// Returns the owner and the loss of a generation while a guard of it is alive.
    pub(crate) fn lost_inside(&self, now: Instant) -> Option<(OwnerId, LossReason)> {
        let generation = self.current.as_ref()?;
        let ledger = generation.ledger();
        let reason = match ledger.end {
            Some(GenerationEnd::Lost(reason)) => reason,
            None if ledger.deadline <= now => LossReason::LeaseExpired,
            _ => return None,
        };
        (ledger.guards > 0).then(|| (generation.owner.clone(), reason))
    }

    /// Returns whether a guard holds it and its lease has not ended.
    pub(crate) fn is_valid(&self, now: Instant) -> bool {
        self.held()
            .is_some_and(|(_, ledger)| ledger.guards > 0 && ledger.deadline > now)
    }

    /// Returns whether it was left to a lease that has not ended.
    pub(crate) fn is_left_to_lease(&self) -> bool {
        self.is_left && self.held().is_some()
    }

    /// Returns whether this is the current generation, which may have ended.
    pub(crate) fn is_current(&self, generation: &Arc<Generation>) -> bool {
        self.current
            .as_ref()
            .is_some_and(|current| Arc::ptr_eq(current, generation))
    }

    pub(crate) fn is_in_doubt(&self) -> bool {
        matches!(self.server, ServerSide::InDoubt { .. })
    }

    /// Returns whether the server records what the client wants.
    pub(crate) fn agrees(&self) -> bool {
        match self.server {
            // Another party may have extended the record: do not release it.
            _ if self.is_left && self.held().is_none() => true,
            // A late request may still acquire the lock.
            ServerSide::Holds(0) if self.late_request.is_some() && self.current.is_none() => false,
            ServerSide::Holds(known) => known == self.wanted(),
            ServerSide::Waits => self.wanted() == 0 && self.waiters > 0,
            ServerSide::InDoubt { .. } => false,
        }
    }

    /// Returns the epoch of the requests that may still be executed, where `before` is the server's
    /// side. Returns `None` if there are none.
    pub(crate) fn doubts(&self, before: ServerSide) -> Option<Epoch> {
        match before {
            ServerSide::InDoubt { epoch, .. } => Some(
                self.late_request
                    .map_or(epoch, |late| late.epoch.and(epoch)),
            ),
            _ => self.late_request.map(|late| late.epoch),
        }
    }

    /// Returns whether only the acquire of a first hold is in doubt. A retry under the same name is
    /// then idempotent.
    pub(crate) fn may_retry(&self) -> bool {
        matches!(
            self.server,
            ServerSide::InDoubt {
                outermost: true,
                ..
            }
        ) && self.current.is_none()
    }

    /// Returns what a call on this hold leaves behind.
    pub(crate) fn residue(&self) -> Residue {
        match self.ownership {
            // Leave the release to the guards: settling now would cut the lease short.
            Ownership::Ours if self.is_expired() && !self.is_in_doubt() => Residue::Held,
            // The waiter retries under the same name. Settling would cost it its place.
            Ownership::Ours if self.waiters > 0 && self.may_retry() => Residue::Held,
            Ownership::Ours if !self.agrees() => Residue::Doubt,
            Ownership::Ours if self.is_left_to_lease() => Residue::Left,
            Ownership::Ours if self.current.is_some() || self.server == ServerSide::Waits => {
                Residue::Held
            }
            _ => Residue::Nothing,
        }
    }

    /// Returns until when the record may live, as far as the client knows.
    pub(crate) fn record_ends(&self) -> Instant {
        // Take the later one: `ends` includes the drift allowance, but renewals move only the
        // deadline.
        self.current.as_ref().map_or(self.ends, |generation| {
            generation.ledger().deadline.max(self.ends)
        })
    }

    /// Returns when the watchdog must poll the hold, and how much earlier it may. Returns `None` if
    /// it need not. `overdue`: the longest time that a request can be in flight.
    pub(crate) fn next_poll(&self, overdue: Duration) -> Option<(Instant, Duration)> {
        let in_doubt = self.may_be_stuck();
        let stuck = in_doubt.then(|| (self.last_sent + overdue, STUCK_SLACK));
        let Some((_, ledger)) = self.held() else {
            return stuck;
        };
        let renewal = ledger.renew_at.map(|at| (at, slack(&ledger)));
        // The client need not notice the end of what was left, unless its owner is a value, which
        // has no other name.
        let ends = ledger.deadline != Instant::NEVER
            && (!self.is_left || in_doubt || self.owner.is_value() || renewal.is_some());
        let end = ends.then_some((ledger.deadline, Duration::ZERO));
        // A nested request that is stuck holds nothing, unless what it was nested in was left.
        let stuck = stuck.filter(|_| self.is_left);
        [end, renewal, stuck]
            .into_iter()
            .flatten()
            .min_by_key(|(at, _)| *at)
    }
}

// --- endings, and what they have in common ---

impl HoldState {
    /// Drops a generation that has ended and is no longer needed: a loss is kept until its last
    /// guard is gone, any other end until the server agrees. Part of every change.
    pub(crate) fn forget_ended(&mut self) {
        let over = self.current.as_ref().is_some_and(|generation| {
            let ledger = generation.ledger();
            match ledger.end {
                None => false,
                Some(
                    GenerationEnd::Released
                    | GenerationEnd::Refused(_)
                    | GenerationEnd::Unconfirmed,
                ) => self.server == ServerSide::Holds(0),
                Some(GenerationEnd::Lost(_)) => ledger.guards == 0,
            }
        });
        if over {
            self.current = None;
        }
    }

    /// Treats the last request as sent just now, so that it does not count as stuck: if a waiter is
    /// in the wait queue, or if the janitor settles what was left. Returns whether that is so.
    pub(crate) fn bear(&mut self, now: Instant) -> bool {
        let bears = self.waiters > 0 || self.is_left;
        if bears {
            self.last_sent = now;
        }
        bears
    }

    /// Marks the server's side as in doubt, by a request over the connection `epoch`.
    pub(crate) fn doubt(&mut self, epoch: Epoch, outermost: bool, now: Instant) {
        let (epoch, before) = match self.server {
            ServerSide::InDoubt {
                epoch: doubt,
                outermost,
            } => (doubt.and(epoch), outermost),
            _ => (epoch, true),
        };
        self.server = ServerSide::InDoubt {
            epoch,
            outermost: outermost && before,
        };
        self.last_sent = now;
    }

    /// Records that a request has its reply, over the connection `epoch`. If earlier requests are
    /// in doubt that another connection carried, the reply does not prove that they are over: they
    /// count as late.
    pub(crate) fn overtake(&mut self, before: ServerSide, epoch: Epoch) {
        let overtaken =
            matches!(before, ServerSide::InDoubt { epoch: doubt, .. } if doubt != epoch);
        let until = self
            .late_request
            .filter(|_| !overtaken)
            .map_or(self.ends, |late| late.until);
        self.late_request = self
            .doubts(before)
            .filter(|doubt| *doubt != epoch)
            .map(|epoch| LateRequest { epoch, until });
    }

    /// Abandons the name to requests that may still be executed, and assumes an empty record.
    pub(crate) fn abandon(&mut self, epoch: Epoch) -> Abandoned {
        self.server = ServerSide::Holds(0);
        self.late_request = None;
        Abandoned {
            owner: self.owner.clone(),
            moves_to: self.moves_to.take().map(|to| *to),
            epoch,
            ends: self.record_ends(),
        }
    }

    /// Marks the generation that is held as lost, if there is one.
    pub(crate) fn lose(&mut self, reason: LossReason, effects: &mut Effects) {
        let Some((generation, mut ledger)) = self.held() else {
            return;
        };
        let generation = Arc::clone(generation);
        ledger.end = Some(GenerationEnd::Lost(reason));
        effects.lost = (ledger.guards > 0).then_some((reason, ledger.count));
        drop(ledger);
        let record_is_gone = matches!(reason, LossReason::RecordMissing | LossReason::TakenOver);
        if record_is_gone && matches!(self.server, ServerSide::Holds(_)) {
            self.server = ServerSide::Holds(0);
        }
        self.sibling_in_doubt = false;
        // The end of a hold that was left to its lease was reported when it was left.
        effects.ended = (!self.is_left).then_some(generation);
    }

    /// Returns whether a request is in flight whose outcome matters.
    fn may_be_stuck(&self) -> bool {
        self.ownership == Ownership::Ours && self.is_in_doubt() && !self.agrees()
    }

    /// Returns whether a request has been in flight for longer than is possible if its future is
    /// polled.
    pub(crate) fn is_stuck(&self, now: Instant, overdue: Duration) -> bool {
        self.may_be_stuck() && self.last_sent + overdue <= now + STUCK_SLACK
    }

    /// Marks the generation as lost if its lease has ended. Returns whether it had.
    pub(crate) fn lose_if_over(&mut self, now: Instant, effects: &mut Effects) -> bool {
        let over = self
            .held()
            .is_some_and(|(_, ledger)| ledger.deadline <= now);
        if over {
            self.lose(LossReason::LeaseExpired, effects);
        }
        over
    }
}
