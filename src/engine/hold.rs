//! What one owner has of one lock: what we want the server to record, and what it is known to record.
//!
//! A [`Hold`]'s *turn* puts everything that its owner sends about the lock in single file. Its *state* is changed in short
//! transitions, none of which asks the server: `Core::agree` makes it follow.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64},
    },
    time::Duration,
};

use super::{
    Kind, Sibling,
    due::{DueQueue, NOWHERE},
    generation::{Books, End, Generation, Grant, Ticket},
    holds::Holds,
    lease::Millis,
};
use crate::{
    clock::Instant,
    error::{Error, LossReason, Result, StoreErrorKind},
    log,
    options::validity,
    owner::OwnerId,
    store::{Released, Renewed},
};

/// What one owner has of one lock.
pub(crate) struct Hold {
    /// What the owner is called at first; the same without its suffix for as long as it lives.
    pub(super) caller: OwnerId,
    kind: Arc<dyn Kind>,
    /// Held around each request about this hold, and never while waiting for the lock.
    pub(crate) turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    due: Arc<DueQueue>,
    /// Where the watchdog finds it: its bucket and its index there. See [`DueQueue`], under whose mutex they are written.
    pub(super) bucket: AtomicU64,
    pub(super) index: AtomicU32,
    /// The janitor has it on its list.
    pub(crate) listed: AtomicBool,
    /// It is on the list of those to be forgotten as soon as nobody has a handle of it.
    pub(super) to_be_reaped: AtomicBool,
}

#[derive(Debug)]
struct State {
    standing: Standing,
    /// The owner as the server knows it.
    owner: OwnerId,
    /// The era that the name was made in.
    era: Option<u64>,
    /// Acquires of this owner that wait in the lock's queue.
    waiters: u32,
    /// The name under which the sibling is held may be used by somebody else: a late execution about this one, or whoever
    /// it was handed over to.
    sibling_in_doubt: bool,
    server: ServerSide,
    /// An acquire under this name was answered over a newer connection than that of an earlier one, of this epoch, which
    /// may still be executed.
    late: Option<u64>,
    /// When the last request was sent.
    asked: Instant,
    /// The generation that is held; that was given up, until the server agrees; or that was lost, while a guard of it
    /// lives.
    current: Option<Arc<Generation>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is this client's business.
    Ours,
    /// Somebody else may release it, or was asked to: the server's count is not ours alone any more.
    HandedOver,
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
    /// A request is under way or its answer was lost; the first such went out in this epoch of the link.
    InDoubt {
        epoch: u64,
        /// Whether a release is among them.
        release: bool,
    },
}

/// What an acquire should send.
pub(crate) struct Plan {
    pub(crate) owner: OwnerId,
    pub(crate) holds: u32,
    /// What the server records until then.
    before: ServerSide,
}

/// What comes of planning an acquire.
pub(crate) enum Planned {
    Send(Plan),
    /// The server does not agree with the books: that comes first.
    Unsettled,
    /// The hold is not this client's business any more: take another.
    Gone,
}

/// What a release was asked to do.
pub(crate) struct Asked {
    pub(crate) owner: OwnerId,
    pub(super) wanted: u32,
    /// What the server recorded until then.
    before: ServerSide,
}

impl Asked {
    /// Whether all that it has to do is to end a hold: nothing is kept, and nothing is in doubt.
    pub(crate) fn ends_a_hold(&self) -> bool {
        self.wanted == 0 && matches!(self.before, ServerSide::Holds(_))
    }
}

/// What a release came to.
pub(crate) struct Answered {
    /// Whether the server had recorded this owner, or may have.
    pub(crate) held: bool,
    /// A name that is not used any more.
    pub(crate) abandoned: Option<Abandoned>,
}

/// A name that late executions may still use; the oldest was sent in this epoch.
pub(crate) struct Abandoned {
    pub(crate) owner: OwnerId,
    pub(crate) epoch: u64,
}

/// What is to be done for a guard that was given up.
pub(crate) enum Left {
    /// The server must agree with our books.
    Here(Arc<Generation>),
    /// The lock was handed over meanwhile: one hold is to be taken off what the server records.
    Elsewhere(OwnerId),
}

/// What is to be done after a hand-over.
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
pub(crate) enum Look {
    Nothing,
    Renew(Renewal),
    /// The lease is over.
    Ended,
    /// A request has been under way for longer than one can be.
    Stuck,
}

/// A generation to be renewed.
pub(crate) struct Renewal {
    pub(crate) hold: Arc<Hold>,
    pub(crate) generation: Arc<Generation>,
    pub(crate) keep: Keep,
    /// What is not answered by then comes too late.
    pub(crate) deadline: Instant,
    /// After how long it is due again.
    pub(crate) period: Duration,
}

/// What a renewal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// This TTL.
    For(Duration),
    /// What is left of a lease.
    Until(Instant),
    /// Nothing: it only asks whether the record is there.
    AsItIs,
}

impl Keep {
    /// The TTL that a renewal sent now asks for, in whole milliseconds.
    pub(crate) fn ttl(self, now: Instant) -> Duration {
        let shortest = Duration::from_millis(1);
        match self {
            Self::For(ttl) => ttl,
            Self::Until(end) => {
                Duration::from_millis(end.saturating_duration_since(now).as_millis() as u64).max(shortest)
            }
            Self::AsItIs => shortest,
        }
    }
}

impl State {
    /// The generation that is held.
    fn held(&self) -> Option<(&Arc<Generation>, MutexGuard<'_, Books>)> {
        let generation = self.current.as_ref()?;
        let books = generation.books();
        books.is_held().then_some((generation, books))
    }

    /// How often we want the server to record this owner.
    fn wanted(&self) -> u32 {
        self.held().map_or(0, |(_, books)| books.count)
    }

    /// Whether a guard lives of what a lease has ended.
    fn is_expired(&self) -> bool {
        self.current.as_ref().is_some_and(|generation| {
            let books = generation.books();
            books.guards > 0 && books.end == Some(End::Lost(LossReason::LeaseExpired))
        })
    }

    /// Whether the server records what we want.
    fn agrees(&self) -> bool {
        match self.server {
            ServerSide::Holds(known) => known == self.wanted(),
            ServerSide::Waits => self.wanted() == 0 && self.waiters > 0,
            ServerSide::InDoubt { .. } => false,
        }
    }

    /// The epoch of the oldest request that may still be executed.
    fn oldest_doubt(&self, before: ServerSide) -> Option<u64> {
        match before {
            ServerSide::InDoubt { epoch, .. } => Some(self.late.map_or(epoch, |late| late.min(epoch))),
            _ => self.late,
        }
    }

    /// Nothing but an acquire is in doubt: asking for the same again, under the same name, changes nothing.
    fn may_ask_again(&self) -> bool {
        matches!(self.server, ServerSide::InDoubt { release: false, .. }) && self.current.is_none()
    }

    /// Forgets a generation of which nobody wants to know any more.
    fn forget_ended(&mut self) {
        let over = self.current.as_ref().is_some_and(|generation| {
            let books = generation.books();
            match books.end {
                None => false,
                Some(End::Released | End::Refused(_)) => self.server == ServerSide::Holds(0),
                Some(End::Lost(_)) => books.guards == 0,
            }
        });
        if over {
            self.current = None;
        }
    }

    fn doubt(&mut self, epoch: u64, release: bool) {
        let (epoch, before) = match self.server {
            ServerSide::InDoubt { epoch, release } => (epoch, release),
            _ => (epoch, false),
        };
        self.server = ServerSide::InDoubt { epoch, release: release || before };
        self.asked = Instant::now();
    }

    fn abandon(&mut self, epoch: u64) -> Abandoned {
        self.server = ServerSide::Holds(0);
        self.late = None;
        Abandoned { owner: self.owner.clone(), epoch }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("lock", self.lock_name()).field("state", &*self.state()).finish_non_exhaustive()
    }
}

/// The state, to be changed. Afterwards the watchdog knows when to look, and guards are told of their end: in this order,
/// and the latter without the mutex, since wakers are the user's code.
struct Change<'h> {
    hold: &'h Arc<Hold>,
    state: Option<MutexGuard<'h, State>>,
    ended: Option<Arc<Generation>>,
}

impl Deref for Change<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        // taken in drop() only
        self.state.as_ref().expect("the state is locked")
    }
}

impl DerefMut for Change<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("the state is locked")
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if let Some(mut state) = self.state.take() {
            state.forget_ended();
            self.hold.due.put(self.hold, self.hold.next_look(&state));
        }
        if let Some(generation) = self.ended.take() {
            generation.ended.notify_waiters();
        }
    }
}

impl Change<'_> {
    /// Ends the generation that is held, if one is.
    fn lose(&mut self, reason: LossReason) {
        let Some((generation, mut books)) = self.held() else { return };
        let generation = Arc::clone(generation);
        books.end = Some(End::Lost(reason));
        let (holds, guards) = (books.count, books.guards);
        drop(books);
        // what was handed over is for somebody else to miss
        if guards > 0 {
            log::later!(
                WARN, lock = self.hold.lock_name(), owner = generation.owner, holds = holds, reason = reason; "lock lost"
            );
        }
        let record_is_gone = matches!(reason, LossReason::RecordMissing | LossReason::TakenOver);
        if record_is_gone && matches!(self.server, ServerSide::Holds(_)) {
            self.server = ServerSide::Holds(0);
        }
        self.sibling_in_doubt = false;
        self.ended = Some(generation);
    }

    /// Ends the generation whose lease is over. Whether it was.
    fn lose_if_over(&mut self, now: Instant) -> bool {
        let over = self.held().is_some_and(|(_, books)| books.deadline <= now);
        if over {
            self.lose(LossReason::LeaseExpired);
        }
        over
    }

    fn is_current(&self, generation: &Arc<Generation>) -> bool {
        self.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, generation))
    }
}

impl Hold {
    pub(super) fn new(kind: &Arc<dyn Kind>, owner: &OwnerId, due: &Arc<DueQueue>) -> Self {
        let state = State {
            standing: Standing::Ours,
            owner: owner.clone(),
            era: None,
            waiters: 0,
            sibling_in_doubt: false,
            server: ServerSide::Holds(0),
            late: None,
            asked: Instant::now(),
            current: None,
        };
        Self {
            caller: owner.clone(),
            kind: Arc::clone(kind),
            turn: tokio::sync::Mutex::new(()),
            state: Mutex::new(state),
            due: Arc::clone(due),
            bucket: AtomicU64::new(NOWHERE),
            index: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            to_be_reaped: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(self: &Arc<Self>) -> Change<'_> {
        Change { hold: self, state: Some(self.state()), ended: None }
    }

    pub(crate) fn kind(&self) -> &Arc<dyn Kind> {
        &self.kind
    }

    pub(crate) fn lock_name(&self) -> &Arc<str> {
        self.kind.name()
    }

    /// The owner as the server knows it.
    pub(crate) fn owner(&self) -> OwnerId {
        self.state().owner.clone()
    }

    pub(crate) fn standing(&self) -> Standing {
        self.state().standing
    }

    /// What a user of this hold leaves behind.
    pub(crate) fn leftover(&self) -> Leftover {
        let state = self.state();
        let is_in_doubt = matches!(state.server, ServerSide::InDoubt { .. });
        match state.standing {
            // others may release it: what is left is in nobody's books
            Standing::HandedOver if state.held().is_some() => Leftover::Held,
            // what a lease has ended is released by whoever gives its guards up, lest the lease be cut short
            Standing::Ours if state.is_expired() && !is_in_doubt => Leftover::Held,
            // whoever waits in the queue asks again, under the same name: to settle it would cost the place
            Standing::Ours if state.waiters > 0 && state.may_ask_again() => Leftover::Held,
            Standing::Ours if !state.agrees() => Leftover::Doubt,
            Standing::Ours if state.current.is_some() || state.server == ServerSide::Waits => Leftover::Held,
            _ => Leftover::Nothing,
        }
    }

    /// How often it is held.
    pub(crate) fn count(&self) -> u32 {
        self.state().wanted()
    }

    /// Held, and its lease is not over.
    pub(super) fn is_valid(&self) -> bool {
        self.state().held().is_some_and(|(_, books)| books.deadline > Instant::now())
    }

    /// The generation that is held.
    pub(crate) fn generation(&self) -> Option<Arc<Generation>> {
        self.state().held().map(|(generation, _)| Arc::clone(generation))
    }

    /// The generation that is held, if this is what its owner is called.
    pub(crate) fn generation_of(&self, owner: &OwnerId) -> Option<Arc<Generation>> {
        self.generation().filter(|generation| !owner.is_exact() || generation.owner == *owner)
    }

    /// Whether it is this generation that is held.
    pub(crate) fn is_current(&self, generation: &Arc<Generation>) -> bool {
        self.state().held().is_some_and(|(held, _)| Arc::ptr_eq(held, generation))
    }

    pub(crate) fn lost_error(&self, owner: &OwnerId, reason: LossReason) -> Error {
        Error::Lost { lock: self.lock_name().to_string(), owner: owner.clone(), reason }
    }

    pub(crate) fn not_held_error(&self, owner: &OwnerId) -> Error {
        Error::NotHeld { lock: self.lock_name().to_string(), owner: owner.clone() }
    }

    /// What the guards of a generation that has ended are told.
    pub(crate) fn end_error(&self, generation: &Generation, end: End) -> Error {
        match end {
            End::Lost(reason) => self.lost_error(&generation.owner, reason),
            End::Released | End::Refused(_) => self.not_held_error(&generation.owner),
        }
    }

    // --- acquiring: in turn ---

    /// What the next acquire should send.
    ///
    /// `kind` is the caller's, which may be another of the family than the one that the hold was made for. `waits`: it
    /// takes a place in the queue, if the kind has one. `after_loss`: whoever asks knows of the loss that its guards tell of.
    pub(crate) fn plan(
        self: &Arc<Self>,
        kind: &Arc<dyn Kind>,
        holds: &Holds,
        max_holds: u32,
        waits: bool,
        after_loss: bool,
    ) -> Result<Planned> {
        let sibling = holds.held_sibling(&self.kind, &self.caller);
        let sibling = sibling.map(|(sibling, hold)| (sibling, hold.owner(), hold.state().sibling_in_doubt));
        let lock = || self.lock_name().to_string();
        let mut state = self.change();
        if state.standing != Standing::Ours {
            return Ok(Planned::Gone);
        }
        state.lose_if_over(Instant::now());
        state.forget_ended();
        // while a guard of a lost generation lives, its owner is inside what it lost
        if let Some(generation) = state.current.clone()
            && let Some(end @ End::Lost(_)) = generation.books().end
        {
            if !after_loss {
                return Err(self.end_error(&generation, end));
            }
            state.current = None;
        }
        let again = waits && kind.queues() && state.may_ask_again();
        if !state.agrees() && !again {
            return Ok(Planned::Unsettled);
        }
        let count = state.wanted();
        if let Some((generation, _)) = state.held() {
            let owner = || generation.owner.clone();
            if !kind.is_reentrant() {
                return Err(Error::NotReentrant { lock: lock(), owner: owner() });
            }
            if kind.has_token() && generation.token.is_none() {
                return Err(Error::NoToken { lock: lock(), owner: owner() });
            }
            if count >= max_holds {
                return Err(Error::TooManyHolds { lock: lock(), owner: owner(), holds: count });
            }
        }
        if state.owner.is_value() && holds.is_value_in_doubt(self.lock_name(), &state.owner) {
            let source =
                super::silent("an earlier request with this value was never answered; wait, or use another value");
            return Err(Error::Unconfirmed { lock: lock(), source });
        }
        let era = holds.era();
        match sibling {
            _ if count > 0 => {}
            Some((Sibling { excludes: true, .. }, owner, _)) => {
                return Err(Error::UpgradeRefused { lock: lock(), owner });
            }
            Some((_, _, true)) => {
                let source = super::silent(
                    "a hold inside the other one was handed over, or a request about it was never answered; release the \
                     other one first",
                );
                return Err(Error::Unconfirmed { lock: lock(), source });
            }
            // the server tells by the name that both are one owner's
            Some((_, owner, false)) => (state.owner, state.era) = (owner, None),
            // a place in the queue is kept under its name
            None if state.server == ServerSide::Waits || again || state.era == Some(era) => {}
            None => (state.owner, state.era) = (self.caller.in_era(era), Some(era)),
        }
        Ok(Planned::Send(Plan { owner: state.owner.clone(), holds: count + 1, before: state.server }))
    }

    /// From here on a request is under way: if nobody hears its answer, the server's side is unknown.
    pub(crate) fn sending(self: &Arc<Self>, epoch: u64) {
        self.change().doubt(epoch, false);
    }

    /// The server did not execute the request: nothing is in doubt.
    pub(crate) fn not_sent(self: &Arc<Self>, plan: &Plan) {
        let mut state = self.change();
        if state.standing == Standing::Ours {
            state.server = plan.before;
        }
    }

    /// The answer to an acquire came while the link was in `epoch`: over the connection of an earlier one, it proves that
    /// this is over, too.
    fn acquire_answered(state: &mut State, plan: &Plan, epoch: u64) {
        state.late = state.oldest_doubt(plan.before).filter(|doubt| *doubt != epoch);
    }

    /// The server said that somebody else holds the lock. `queued`: this request has a place in its queue.
    pub(crate) fn busy(self: &Arc<Self>, plan: &Plan, queued: bool, epoch: u64) {
        let mut state = self.change();
        if state.standing != Standing::Ours {
            return;
        }
        Self::acquire_answered(&mut state, plan, epoch);
        let queued = queued || plan.before == ServerSide::Waits;
        state.server = if queued { ServerSide::Waits } else { ServerSide::Holds(0) };
    }

    /// The server said that the record is of another kind. A place in the queue is as it was.
    pub(crate) fn refused_as_another_kind(self: &Arc<Self>, plan: &Plan) {
        let mut state = self.change();
        if state.standing != Standing::Ours {
            return;
        }
        state.server = match plan.before {
            ServerSide::Holds(_) => ServerSide::Holds(0),
            before => before,
        };
        state.lose(LossReason::TakenOver);
    }

    /// The server said that this owner does not hold what it re-entered.
    pub(crate) fn refused_as_lost(self: &Arc<Self>, plan: &Plan) -> Error {
        let mut state = self.change();
        if state.standing == Standing::Ours {
            state.server = ServerSide::Holds(0);
            state.lose(LossReason::RecordMissing);
        }
        self.lost_error(&plan.owner, LossReason::RecordMissing)
    }

    /// Counts a waiter in the queue.
    pub(crate) fn enter_queue(&self) {
        self.state().waiters += 1;
    }

    /// One waiter less; with the last one the place in the queue is given up, by the next who makes the server agree.
    pub(crate) fn leave_queue_once(self: &Arc<Self>, epoch: u64) {
        let mut state = self.change();
        state.waiters = state.waiters.saturating_sub(1);
        if state.waiters == 0 && state.server == ServerSide::Waits {
            state.doubt(epoch, false);
        }
    }

    /// All waiters leave the queue.
    pub(crate) fn leave_queue(self: &Arc<Self>, epoch: u64) {
        let mut state = self.change();
        state.waiters = 0;
        if state.server == ServerSide::Waits {
            state.doubt(epoch, false);
        }
    }

    /// The acquire was confirmed while the link was in `epoch`. `Ok(None)`: so late that the lease is over already, or
    /// that nobody counts on it any more.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the hold that it was to be nested in was lost meanwhile.
    pub(crate) fn enter(self: &Arc<Self>, plan: &Plan, grant: &Grant, epoch: u64) -> Result<Option<Ticket>> {
        let mut state = self.change();
        if state.standing != Standing::Ours {
            return Ok(None);
        }
        let now = Instant::now();
        state.lose_if_over(now);
        Self::acquire_answered(&mut state, plan, epoch);
        state.server = ServerSide::Holds(plan.holds);
        state.forget_ended();
        if let Some(generation) = &state.current
            && let Some(end @ End::Lost(_)) = generation.books().end
        {
            return Err(self.end_error(generation, end));
        }
        let nested = state.held().map(|(generation, _)| Arc::clone(generation));
        if nested.is_none() && grant.lease.valid_until(grant.sent) <= now {
            return Ok(None);
        }
        let generation = nested.unwrap_or_else(|| Generation::new(plan.owner.clone(), grant));
        let ticket = generation.enter(grant);
        state.current = Some(generation);
        Ok(Some(ticket))
    }

    // --- holding ---

    /// When the watchdog must look at it, and how much earlier it may.
    fn next_look(&self, state: &State) -> Option<(Instant, Duration)> {
        if let Some((_, books)) = state.held() {
            let end = (books.deadline, Duration::ZERO);
            let renewal = books.renew_at.map(|at| (at, slack(&books)));
            return Some(renewal.filter(|(at, _)| *at < books.deadline).unwrap_or(end));
        }
        let in_doubt = matches!(state.server, ServerSide::InDoubt { .. }) && state.standing == Standing::Ours;
        in_doubt.then(|| (state.asked + self.due.overdue(), Duration::from_millis(256)))
    }

    /// What is due.
    pub(crate) fn look(self: &Arc<Self>, now: Instant) -> Look {
        let mut state = self.change();
        if state.lose_if_over(now) {
            return Look::Ended;
        }
        if let Some((generation, mut books)) = state.held() {
            let early = slack(&books);
            if books.renew_at.is_none_or(|at| at > now + early) {
                return Look::Nothing;
            }
            let checked = std::mem::take(&mut books.to_be_checked);
            let (keep, period) = match (books.watch(), books.kept_every) {
                (Some((ttl, period)), _) => (Keep::For(ttl), Some(period)),
                // what its guards rely on: a little less than the lease, so that what nobody cut is left as it is
                (None, Some(period)) => (Keep::Until(books.deadline), Some(period.duration())),
                (None, None) if checked => (Keep::AsItIs, None),
                (None, None) => {
                    books.renew_at = None;
                    return Look::Nothing;
                }
            };
            // until the answer is here
            books.renew_at = period.map(|period| now + period);
            return Look::Renew(Renewal {
                hold: Arc::clone(self),
                generation: Arc::clone(generation),
                keep,
                deadline: books.deadline,
                period: period.unwrap_or(books.deadline.saturating_duration_since(now)),
            });
        }
        let in_doubt = matches!(state.server, ServerSide::InDoubt { .. }) && state.standing == Standing::Ours;
        if in_doubt && state.asked + self.due.overdue() <= now + Duration::from_millis(256) {
            return Look::Stuck;
        }
        Look::Nothing
    }

    /// Asks at once whether the record is still there, and renews it if it is to be renewed.
    pub(crate) fn check_soon(self: &Arc<Self>, now: Instant) {
        let state = self.change();
        if let Some((_, mut books)) = state.held() {
            books.to_be_checked = true;
            books.renew_by(now);
        }
    }

    /// Takes in what a renewal sent at `sent` was answered; an end of the generation wins. So does a lease that ended
    /// before the answer came: whoever looked has been told that the lock is lost. `next`: when it is due again, `None`:
    /// that stays as it is.
    pub(crate) fn renewed(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        answer: Renewed,
        sent: Instant,
        lease: Duration,
        next: Option<Instant>,
    ) {
        let mut state = self.change();
        if !state.is_current(generation) || state.lose_if_over(Instant::now()) {
            return;
        }
        let Some((_, mut books)) = state.held() else { return };
        let by_watchdog = next.is_some();
        match answer {
            Renewed::Yes | Renewed::Endless => {
                books.deadline = books.deadline.max(sent + validity(lease));
                if by_watchdog {
                    books.count_renewal();
                }
            }
            Renewed::Unknown => {}
            Renewed::Gone | Renewed::Taken => {
                drop(books);
                let gone = answer == Renewed::Gone;
                return state.lose(if gone { LossReason::RecordMissing } else { LossReason::TakenOver });
            }
        }
        if let Some(next) = next {
            let goes_on = books.watch().is_some() || books.kept_every.is_some();
            books.renew_at = goes_on.then_some(next);
        }
    }

    /// The renewal was not confirmed; it is due again at `next`.
    pub(crate) fn not_renewed(self: &Arc<Self>, generation: &Arc<Generation>, next: Instant) {
        let mut state = self.change();
        if !state.is_current(generation) || state.lose_if_over(Instant::now()) {
            return;
        }
        if let Some((_, mut books)) = state.held() {
            books.renew_at = Some(next);
        }
    }

    // --- ending ---

    /// Gives one hold back, in our books; the server is told by `Core::agree`.
    pub(crate) fn leave(self: &Arc<Self>, ticket: &Ticket) -> Result<Left> {
        let generation = &ticket.generation;
        let mut state = self.change();
        // a lease that one guard found over is over for all: whoever gives up a guard must not meet its hold again
        if state.is_current(generation) {
            state.lose_if_over(Instant::now());
        }
        let mut books = generation.books();
        books.guards -= u32::from(ticket.leave());
        if let Some(end) = books.end {
            drop(books);
            return Err(self.end_error(generation, end));
        }
        Ok(Self::leave_books(&mut state, generation, books, Some(ticket)))
    }

    /// Gives one hold of the generation back that is held under this name, whichever guard it has.
    pub(crate) fn leave_without_guard(self: &Arc<Self>, owner: &OwnerId) -> Result<Left> {
        let mut state = self.change();
        if state.lose_if_over(Instant::now()) {
            return Err(self.lost_error(&state.owner, LossReason::LeaseExpired));
        }
        let Some(generation) = state.held().map(|(generation, _)| Arc::clone(generation)) else {
            return Err(self.not_held_error(owner));
        };
        let books = generation.books();
        Ok(Self::leave_books(&mut state, &generation, books, None))
    }

    fn leave_books(
        state: &mut Change<'_>,
        generation: &Arc<Generation>,
        mut books: MutexGuard<'_, Books>,
        ticket: Option<&Ticket>,
    ) -> Left {
        if state.standing == Standing::HandedOver {
            // whoever it was handed over to still has a hold
            books.leave_watch(ticket);
            return Left::Elsewhere(generation.owner.clone());
        }
        books.leave(ticket);
        if !books.is_held() {
            state.sibling_in_doubt = false;
            state.ended = Some(Arc::clone(generation));
        }
        Left::Here(Arc::clone(generation))
    }

    /// A guard is let go of without a release: from here on the hold is somebody else's to release. `None`: there is
    /// nothing to hand over, the lock was lost.
    pub(crate) fn hand_over(self: &Arc<Self>, ticket: &Ticket) -> Option<Unsettled> {
        let mut state = self.change();
        let generation = &ticket.generation;
        let current = state.is_current(generation) && !state.lose_if_over(Instant::now());
        let mut books = generation.books();
        books.guards -= u32::from(ticket.leave());
        if !current || !books.is_held() {
            return None;
        }
        if state.standing == Standing::HandedOver {
            return Some(Unsettled::Nothing);
        }
        state.standing = Standing::HandedOver;
        Some(match state.server {
            ServerSide::Holds(known) if known == books.count => Unsettled::Nothing,
            ServerSide::Holds(known) if known > books.count => Unsettled::Owed(known - books.count),
            _ => {
                books.stop_watching();
                Unsettled::InDoubt(books.count)
            }
        })
    }

    /// Nobody knows any more how many holds the server records.
    pub(crate) fn stop_watching(self: &Arc<Self>) {
        let state = self.change();
        if let Some((_, mut books)) = state.held() {
            books.stop_watching();
        }
    }

    /// The name is shared with a hold that was handed over.
    pub(super) fn share_its_name(&self, owner: &OwnerId) {
        let mut state = self.state();
        state.sibling_in_doubt |= state.owner == *owner;
    }

    /// Gives up on a request that is never answered to anybody. `None`: it was answered meanwhile.
    pub(crate) fn orphan(self: &Arc<Self>) -> Option<Abandoned> {
        let mut state = self.change();
        let ServerSide::InDoubt { epoch, .. } = state.server else { return None };
        if state.held().is_some() || state.standing != Standing::Ours {
            return None;
        }
        state.standing = Standing::Orphaned;
        let epoch = state.late.map_or(epoch, |late| late.min(epoch));
        Some(state.abandon(epoch))
    }

    /// What the release of a generation came to, if another release of the same owner settled it first.
    pub(crate) fn check_released(&self, generation: &Generation) -> Result<()> {
        let end = generation.books().end;
        match end {
            Some(End::Lost(reason)) => Err(self.lost_error(&generation.owner, reason)),
            Some(End::Refused(kind)) => {
                let refusal = crate::error::StoreError::new(kind, false, "the release was refused");
                Err(super::store_error(self.lock_name(), refusal))
            }
            _ => Ok(()),
        }
    }

    /// The lock is not ours any more.
    pub(crate) fn lose(self: &Arc<Self>, reason: LossReason) {
        self.change().lose(reason);
    }

    /// The lock is not ours any more, if `generation` still is the current one.
    pub(crate) fn lose_generation(self: &Arc<Self>, generation: &Arc<Generation>, reason: LossReason) {
        let mut state = self.change();
        if state.is_current(generation) {
            state.lose(reason);
        }
    }

    // --- settling: in turn ---

    /// Until when the record may live, as far as we know.
    pub(crate) fn record_ends(&self) -> Instant {
        let state = self.state();
        // the deadline is earlier than that by the drift allowance
        state.current.as_ref().map_or(state.asked, |generation| generation.books().deadline)
    }

    /// Leaves the record to its lease.
    pub(crate) fn write_off(self: &Arc<Self>, refusal: StoreErrorKind) {
        let mut state = self.change();
        state.server = ServerSide::Holds(state.wanted());
        state.late = None;
        if let Some(generation) = &state.current {
            let mut books = generation.books();
            if books.end == Some(End::Released) {
                books.end = Some(End::Refused(refusal));
            }
        }
    }

    /// A release is about to be sent: from here on the server's side is in doubt. `None`: it agrees already, or it is not
    /// ours to tell.
    pub(crate) fn asking(self: &Arc<Self>, epoch: u64) -> Option<Asked> {
        let mut state = self.change();
        if state.standing != Standing::Ours || state.agrees() {
            return None;
        }
        let asked = Asked { owner: state.owner.clone(), wanted: state.wanted(), before: state.server };
        state.doubt(epoch, true);
        Some(asked)
    }

    /// The server did not execute the release.
    pub(crate) fn not_asked(self: &Arc<Self>, asked: &Asked) {
        let mut state = self.change();
        if state.standing == Standing::Ours {
            state.server = asked.before;
        }
    }

    /// The server answered the release while the link was in `epoch`.
    pub(crate) fn answered(self: &Arc<Self>, asked: &Asked, released: Released, epoch: u64) -> Answered {
        let Asked { wanted, before, .. } = *asked;
        let was_in_doubt = matches!(before, ServerSide::InDoubt { .. });
        let held = released != Released::NotHeld || wanted == 0 && was_in_doubt;
        let mut state = self.change();
        if state.standing != Standing::Ours {
            return Answered { held, abandoned: None };
        }
        let mut abandoned = None;
        match state.oldest_doubt(before) {
            // an answer over another connection does not prove that earlier requests are over
            Some(doubt) if wanted == 0 && doubt != epoch => abandoned = Some(state.abandon(doubt)),
            _ if released == Released::NotHeld => {
                state.server = ServerSide::Holds(0);
                if !was_in_doubt && let Some(generation) = &state.current {
                    let mut books = generation.books();
                    // it was lost before it was given up
                    if books.end == Some(End::Released) {
                        books.end = Some(End::Lost(LossReason::RecordMissing));
                    }
                }
            }
            _ => state.server = ServerSide::Holds(wanted),
        }
        if wanted == 0 {
            state.late = None;
        }
        if wanted > 0 && released == Released::NotHeld {
            state.lose(LossReason::RecordMissing);
        }
        Answered { held, abandoned }
    }

    /// Leaves the owner's name to late executions of what is in doubt. `None`: nothing is, or the lock is held: late copies
    /// of nested requests change nothing.
    pub(crate) fn abandon_name_in_doubt(self: &Arc<Self>) -> Option<Abandoned> {
        let mut state = self.change();
        match state.server {
            ServerSide::InDoubt { epoch, .. } if state.wanted() == 0 && state.standing == Standing::Ours => {
                let epoch = state.late.map_or(epoch, |late| late.min(epoch));
                Some(state.abandon(epoch))
            }
            _ => None,
        }
    }
}

/// What is due within this time goes along now: fewer, fuller batches.
fn slack(books: &Books) -> Duration {
    let period = books.watch().map(|(_, period)| period).or(books.kept_every.map(Millis::duration));
    period.map_or(Duration::ZERO, |period| period / 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{engine::lease::Lease, keys::LockName, lock::Reentrant, owner::ClientId};

    fn kind() -> Arc<dyn Kind> {
        Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()))
    }

    fn entered(holds: &Holds, hold: &Arc<Hold>, sent: Instant, lease: Duration) -> Option<Ticket> {
        let Ok(Planned::Send(plan)) = hold.plan(hold.kind(), holds, u32::MAX, false, true) else {
            panic!("nothing is in doubt")
        };
        let grant = Grant { sent, lease: Lease::Fixed(Millis::of(lease)), kept_every: None, token: None };
        hold.enter(&plan, &grant, 1).unwrap()
    }

    fn new(holds: &Holds) -> Arc<Hold> {
        holds.get_or_insert(&kind(), &OwnerId::named(&ClientId::random(), "me").unwrap())
    }

    /// A guard that is given up while its hold is lost and taken anew must not take the new hold along.
    #[test]
    fn a_stale_ticket_never_gives_back_a_later_hold() {
        let holds = Holds::new(Duration::from_secs(3));
        let hold = new(&holds);
        let lease = Duration::from_secs(30);
        let stale = entered(&holds, &hold, Instant::now(), lease).unwrap();
        hold.lose_generation(&stale.generation, LossReason::RecordMissing);
        let inside = hold.plan(hold.kind(), &holds, u32::MAX, false, false);
        assert!(matches!(inside, Err(Error::Lost { .. })), "a guard of what was lost lives");
        let fresh = entered(&holds, &hold, Instant::now(), lease).unwrap();
        for _ in 0..2 {
            assert!(matches!(hold.leave(&stale), Err(Error::Lost { .. })));
            assert_eq!(hold.count(), 1);
        }
        assert!(fresh.generation.remaining().is_ok());
        assert!(matches!(hold.leave(&fresh), Ok(Left::Here(_))));
        assert_eq!(hold.count(), 0);
    }

    /// The watchdog takes a hold out of its queue, and looks a moment later.
    #[test]
    fn a_hold_that_was_taken_anew_does_not_expire() {
        let holds = Holds::new(Duration::from_secs(3));
        let hold = new(&holds);
        let stale = entered(&holds, &hold, Instant::now() - Duration::from_millis(50), Duration::from_millis(60));
        std::thread::sleep(Duration::from_millis(20));
        let due = holds.due.take(Instant::now());
        assert_eq!(due.len(), usize::from(stale.is_some()));
        if let Some(stale) = stale {
            assert!(hold.leave(&stale).is_err());
        }
        // the record is gone, too
        if let Some(asked) = hold.asking(1) {
            hold.answered(&asked, Released::NotHeld, 1);
        }
        let fresh = entered(&holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
        assert!(matches!(hold.look(Instant::now()), Look::Nothing));
        assert!(fresh.generation.remaining().is_ok());
    }

    /// A renewal that was sent before the lease ended, and answered after, brings nothing back.
    #[test]
    fn a_loss_is_final() {
        let holds = Holds::new(Duration::from_secs(3));
        let hold = new(&holds);
        let sent = Instant::now();
        let ticket = entered(&holds, &hold, sent, Duration::from_millis(30)).unwrap();
        std::thread::sleep(Duration::from_millis(40));
        hold.renewed(&ticket.generation, Renewed::Yes, sent, Duration::from_secs(30), Some(sent));
        assert!(ticket.generation.remaining().is_err());
        assert!(matches!(hold.leave(&ticket), Err(Error::Lost { reason: LossReason::LeaseExpired, .. })));
    }

    /// What was handed over is nothing of its owner's.
    #[test]
    fn a_hold_that_was_handed_over_is_neither_planned_nor_settled() {
        let holds = Holds::new(Duration::from_secs(3));
        let hold = new(&holds);
        let ticket = entered(&holds, &hold, Instant::now(), Duration::from_secs(30)).unwrap();
        assert!(matches!(hold.hand_over(&ticket), Some(Unsettled::Nothing)));
        assert!(matches!(hold.plan(hold.kind(), &holds, u32::MAX, false, false), Ok(Planned::Gone)));
        assert!(hold.asking(1).is_none());
        assert_eq!(hold.leftover(), Leftover::Held);
        hold.lose(LossReason::RecordMissing);
        assert_eq!(hold.leftover(), Leftover::Nothing);
    }
}
