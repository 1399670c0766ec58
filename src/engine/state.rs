//! What one owner has of one lock, as a value: what we want the server to record, what it is known to record, and the
//! transitions between.
//!
//! No I/O and no clock: instants and epochs are passed in, and what is to be done besides is told by [`Effects`].

use std::{
    sync::{Arc, MutexGuard},
    time::Duration,
};

use super::{
    generation::{Books, End, Generation},
    kind::{About, Adopts},
    lease::{Keep, Millis},
    refusal::Refusal,
};
use crate::{clock::Instant, error::LossReason, owner::OwnerId, store::Epoch};

/// The state of a hold.
#[derive(Debug)]
pub(super) struct State {
    pub(super) standing: Standing,
    /// The owner as the server knows it.
    pub(super) owner: OwnerId,
    /// Acquires of this owner that wait in the lock's queue.
    pub(super) waiters: u32,
    /// The name under which the sibling is held may be used by somebody else: a late execution about this one, or whoever
    /// it was given away to.
    pub(super) sibling_in_doubt: bool,
    pub(super) server: ServerSide,
    /// The name that the hold may have been moved to, while that is in doubt.
    pub(super) moves_to: Option<Box<OwnerId>>,
    /// A request under this name was answered over a newer connection than that of an earlier one, which may still be
    /// executed.
    pub(super) late: Option<Late>,
    /// When the last request was sent.
    pub(super) asked: Instant,
    /// Until when a record may live that an acquire or a move of this owner's has asked for.
    pub(super) ends: Instant,
    /// The generation that is held; that was given up, until the server agrees; or that was lost, while a guard of it
    /// lives.
    pub(super) current: Option<Arc<Generation>>,
}

/// What may still be executed, though a later request was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Late {
    /// Over which connection it was sent.
    pub(super) epoch: Epoch,
    /// For how long it is expected to come: what the last such request asked for is over then.
    pub(super) until: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is this client's business.
    Ours,
    /// Somebody else may release it, or was asked to: the server's count is not ours alone any more.
    GivenAway,
    /// A request about it is in the hands of a future that nobody polls: what it may do is undone under the old name, and
    /// the owner goes on with a new hold.
    Orphaned,
}

/// What the server records for this owner, as far as we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServerSide {
    Holds(u32),
    /// It is in the lock's queue, and holds nothing.
    Waits,
    /// Requests are under way or their answers were lost; they went out in this epoch.
    InDoubt {
        epoch: Epoch,
        /// Whether none asks for more than a first hold, or gives one back.
        outermost: bool,
    },
}

/// A request about this hold: planned, then sent, and then answered, or known not to be executed, or in doubt.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) owner: OwnerId,
    /// The count that it leads to.
    pub(crate) count: u32,
    /// What the server records until then.
    pub(super) before: ServerSide,
    pub(super) is_release: bool,
}

impl Request {
    /// Whether all that it has to do is to end a hold: nothing is kept, and nothing is in doubt.
    pub(crate) fn ends_a_hold(&self) -> bool {
        self.count == 0 && matches!(self.before, ServerSide::Holds(_))
    }
}

/// How somebody acquires.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Door {
    /// The caller's kind, which may be another of the family than the one that the hold was made for.
    pub(crate) about: About,
    /// Whoever asks will wait: in the lock's queue, if it has one.
    pub(crate) waits: bool,
    /// What is acquired was given away by another owner, who had it alone.
    pub(crate) adopts: Option<Adopts>,
    /// How often one owner may hold it.
    pub(crate) max_holds: u32,
    /// Whoever asks knows of the loss that its guards tell of.
    pub(crate) after_loss: bool,
}

/// What a hold must know of others.
#[derive(Debug)]
pub(crate) struct Around<'a> {
    /// What the owner is called without a suffix. Names are made of this: it may have held the lock under another's.
    pub(super) caller: &'a OwnerId,
    /// What the same owner has of the sibling kind.
    pub(super) sibling: Option<HeldSibling>,
    /// A guard lives of what the same owner has lost of the sibling kind.
    pub(super) lost_sibling: Option<(OwnerId, LossReason)>,
    /// Earlier suffixes may still be used by late executions.
    pub(super) suffix: u64,
    /// The owner is a value that late executions may still use: it has no other name.
    pub(super) value_in_doubt: bool,
}

/// The other half of a read-write lock, held by the same owner.
#[derive(Debug)]
pub(super) struct HeldSibling {
    /// The owner as the server knows it there.
    pub(super) owner: OwnerId,
    /// Why there can be no hold beside it.
    pub(super) refusal: Option<Refusal>,
}

/// What comes of planning an acquire.
#[derive(Debug)]
pub(super) enum Planned {
    Send(Request),
    /// The server does not agree with the books: that comes first.
    Unsettled,
    /// The hold is not this client's business any more: take another.
    Gone,
    Refused(Refusal),
}

/// What a transition leaves to do when the state is not locked any more: wakers and subscribers are the user's code.
#[derive(Debug, Default)]
pub(super) struct Effects {
    /// Its guards are to be told.
    pub(super) ended: Option<Arc<Generation>>,
    /// It had a guard when it was lost: so many holds.
    pub(super) lost: Option<(LossReason, u32)>,
}

/// What a release came to.
#[derive(Debug)]
pub(super) struct Answered {
    /// Whether the server had recorded this owner, or may have.
    pub(super) held: bool,
    /// A name that is not used any more.
    pub(super) abandoned: Option<Abandoned>,
    /// The name that the hold may have been moved to, of which nobody was told. From here on nothing moves there.
    pub(super) untold: Option<Abandoned>,
}

/// A name that late executions may still use; they were sent in this epoch.
#[derive(Debug)]
pub(crate) struct Abandoned {
    pub(crate) owner: OwnerId,
    /// The name that its hold may have been moved to, or may still be, of which nobody was told.
    pub(crate) moves_to: Option<OwnerId>,
    pub(crate) epoch: Epoch,
    /// Until when a record under it may live.
    pub(crate) ends: Instant,
}

/// What is to be done for a guard that was given up.
#[derive(Debug)]
pub(crate) enum Left {
    /// The server must agree with our books.
    Here(Arc<Generation>),
    /// The lock was given away meanwhile: one hold is to be taken off what the server records.
    Elsewhere(OwnerId),
}

/// What is to be done after it was given away.
#[derive(Debug)]
pub(crate) enum Unsettled {
    Nothing,
    /// So many holds were given up before, and the server was not told.
    Owed(u32),
    /// A request was under way: the server must record so many. Until it does, nobody knows how many it records, so
    /// that the lock is not renewed any more.
    InDoubt(u32),
}

/// What is left of a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// The server does not record what we want, or may not.
    Doubt,
    /// It is held, and the server knows; or a guard of a lost generation lives.
    Held,
    Nothing,
}

/// What the watchdog finds.
#[derive(Debug)]
pub(super) enum Due {
    Nothing,
    Renew {
        generation: Arc<Generation>,
        keep: Keep,
        /// Since when.
        due: Instant,
        /// What is not answered by then comes too late.
        deadline: Instant,
        /// After how long it is due again.
        period: Duration,
    },
    /// The lease is over.
    Ended,
    /// A request has been under way for longer than one can be.
    Stuck,
}

/// A request that is stuck is looked for up to so much later: many go together.
pub(super) const STUCK_SLACK: Duration = Duration::from_millis(256);

/// What is due within this time goes along now: fewer, fuller batches.
pub(super) fn slack(books: &Books) -> Duration {
    let period = books.watch().map(|(_, period)| period).or(books.kept_every.map(Millis::duration));
    period.map_or(Duration::ZERO, |period| period / 10)
}

// --- questions ---

impl State {
    pub(super) fn new(owner: OwnerId, now: Instant) -> Self {
        Self {
            standing: Standing::Ours,
            owner,
            waiters: 0,
            sibling_in_doubt: false,
            server: ServerSide::Holds(0),
            moves_to: None,
            late: None,
            asked: now,
            ends: now,
            current: None,
        }
    }

    /// The generation that is held.
    pub(super) fn held(&self) -> Option<(&Arc<Generation>, MutexGuard<'_, Books>)> {
        let generation = self.current.as_ref()?;
        let books = generation.books();
        books.is_held().then_some((generation, books))
    }

    /// How often we want the server to record this owner.
    pub(super) fn wanted(&self) -> u32 {
        self.held().map_or(0, |(_, books)| books.count)
    }

    /// Whether a guard lives of what a lease has ended.
    fn is_expired(&self) -> bool {
        self.current.as_ref().is_some_and(|generation| {
            let books = generation.books();
            books.guards > 0 && books.end == Some(End::Lost(LossReason::LeaseExpired))
        })
    }

    /// What was lost, while a guard of it lives.
    pub(super) fn lost_inside(&self, now: Instant) -> Option<(OwnerId, LossReason)> {
        let generation = self.current.as_ref()?;
        let books = generation.books();
        let reason = match books.end {
            Some(End::Lost(reason)) => reason,
            None if books.deadline <= now => LossReason::LeaseExpired,
            _ => return None,
        };
        (books.guards > 0).then(|| (generation.owner.clone(), reason))
    }

    /// Held, and its lease is not over.
    pub(super) fn is_valid(&self, now: Instant) -> bool {
        self.held().is_some_and(|(_, books)| books.deadline > now)
    }

    pub(super) fn is_current(&self, generation: &Arc<Generation>) -> bool {
        self.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, generation))
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        matches!(self.server, ServerSide::InDoubt { .. })
    }

    /// Whether the server records what we want.
    pub(super) fn agrees(&self) -> bool {
        match self.server {
            // what is late may still take it
            ServerSide::Holds(0) if self.late.is_some() && self.current.is_none() => false,
            ServerSide::Holds(known) => known == self.wanted(),
            ServerSide::Waits => self.wanted() == 0 && self.waiters > 0,
            ServerSide::InDoubt { .. } => false,
        }
    }

    /// The epoch of the requests that may still be executed.
    pub(super) fn doubts(&self, before: ServerSide) -> Option<Epoch> {
        match before {
            ServerSide::InDoubt { epoch, .. } => Some(self.late.map_or(epoch, |late| late.epoch.and(epoch))),
            _ => self.late.map(|late| late.epoch),
        }
    }

    /// Nothing but the acquire of a first hold is in doubt: asking for the same again, under the same name, changes nothing.
    pub(super) fn may_ask_again(&self) -> bool {
        matches!(self.server, ServerSide::InDoubt { outermost: true, .. }) && self.current.is_none()
    }

    /// What a user of this hold leaves behind.
    pub(super) fn leftover(&self) -> Leftover {
        match self.standing {
            // others may release it: what is left is in nobody's books
            Standing::GivenAway if self.held().is_some() => Leftover::Held,
            // what a lease has ended is released by whoever gives its guards up, lest the lease be cut short
            Standing::Ours if self.is_expired() && !self.is_in_doubt() => Leftover::Held,
            // whoever waits in the queue asks again, under the same name: to settle it would cost the place
            Standing::Ours if self.waiters > 0 && self.may_ask_again() => Leftover::Held,
            Standing::Ours if !self.agrees() => Leftover::Doubt,
            Standing::Ours if self.current.is_some() || self.server == ServerSide::Waits => Leftover::Held,
            _ => Leftover::Nothing,
        }
    }

    /// Until when the record may live, as far as we know.
    pub(super) fn record_ends(&self) -> Instant {
        // the deadline is earlier than that by the drift allowance; it may have been extended
        self.current.as_ref().map_or(self.ends, |generation| generation.books().deadline.max(self.ends))
    }

    /// When the watchdog must look at it, and how much earlier it may. `overdue`: how long a request may take.
    pub(super) fn next_look(&self, overdue: Duration) -> Option<(Instant, Duration)> {
        if let Some((_, books)) = self.held() {
            let end = (books.deadline, Duration::ZERO);
            let renewal = books.renew_at.map(|at| (at, slack(&books)));
            return Some(renewal.filter(|(at, _)| *at < books.deadline).unwrap_or(end));
        }
        let stuck = self.is_in_doubt() && self.standing == Standing::Ours;
        stuck.then(|| (self.asked + overdue, STUCK_SLACK))
    }
}

// --- endings, and what they have in common ---

impl State {
    /// Forgets a generation of which nobody wants to know any more. Part of every change.
    pub(super) fn forget_ended(&mut self) {
        let over = self.current.as_ref().is_some_and(|generation| {
            let books = generation.books();
            match books.end {
                None => false,
                Some(End::Released | End::Refused(_) | End::Unconfirmed) => self.server == ServerSide::Holds(0),
                Some(End::Lost(_)) => books.guards == 0,
            }
        });
        if over {
            self.current = None;
        }
    }

    /// If somebody waits in the queue, the last request counts as sent just now. Whether somebody does.
    pub(super) fn bear_with_queue(&mut self, now: Instant) -> bool {
        if self.waiters > 0 {
            self.asked = now;
        }
        self.waiters > 0
    }

    pub(super) fn doubt(&mut self, epoch: Epoch, outermost: bool, now: Instant) {
        let (epoch, before) = match self.server {
            ServerSide::InDoubt { epoch: doubt, outermost } => (doubt.and(epoch), outermost),
            _ => (epoch, true),
        };
        self.server = ServerSide::InDoubt { epoch, outermost: outermost && before };
        self.asked = now;
    }

    /// An answer came in this epoch: over another connection it does not prove that what was in doubt before is over.
    pub(super) fn overtake(&mut self, before: ServerSide, epoch: Epoch) {
        let overtaken = matches!(before, ServerSide::InDoubt { epoch: doubt, .. } if doubt != epoch);
        let until = self.late.filter(|_| !overtaken).map_or(self.ends, |late| late.until);
        self.late = self.doubts(before).filter(|doubt| *doubt != epoch).map(|epoch| Late { epoch, until });
    }

    pub(super) fn abandon(&mut self, epoch: Epoch) -> Abandoned {
        self.server = ServerSide::Holds(0);
        self.late = None;
        Abandoned {
            owner: self.owner.clone(),
            moves_to: self.moves_to.take().map(|to| *to),
            epoch,
            ends: self.record_ends(),
        }
    }

    /// Nobody knows any more how many holds the server records.
    pub(super) fn stop_watching(&mut self) {
        if let Some((_, mut books)) = self.held() {
            books.stop_watching();
        }
    }

    /// Ends the generation that is held, if one is.
    pub(super) fn lose(&mut self, reason: LossReason, effects: &mut Effects) {
        let Some((generation, mut books)) = self.held() else { return };
        let generation = Arc::clone(generation);
        books.end = Some(End::Lost(reason));
        // what was given away is for somebody else to miss
        effects.lost = (books.guards > 0).then_some((reason, books.count));
        drop(books);
        let record_is_gone = matches!(reason, LossReason::RecordMissing | LossReason::TakenOver);
        if record_is_gone && matches!(self.server, ServerSide::Holds(_)) {
            self.server = ServerSide::Holds(0);
        }
        self.sibling_in_doubt = false;
        effects.ended = Some(generation);
    }

    /// Ends the generation whose lease is over. Whether it was.
    pub(super) fn lose_if_over(&mut self, now: Instant, effects: &mut Effects) -> bool {
        let over = self.held().is_some_and(|(_, books)| books.deadline <= now);
        if over {
            self.lose(LossReason::LeaseExpired, effects);
        }
        over
    }
}
