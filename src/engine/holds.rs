//! Who of this client holds what, how often, until when.
//!
//! One [`Hold`] for each (lock, owner). Its *turn* puts everything that this owner sends about this lock in single
//! file; its *state* says what we want the server to record (`count`) and what it is known to record (`server`).
//! Whoever changes the count makes the server agree: [`Hold::agree`] is the one verb of releases, cancellations and
//! lost replies alike.

use std::{
    borrow::Borrow,
    fmt,
    hash::{Hash, Hasher},
    num::{NonZeroU32, NonZeroU64},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use dashmap::{DashMap, DashSet};
use tokio::sync::Notify;

use super::{Core, Kind, Sibling};
use crate::{
    error::{Error, LossReason, Result, StoreError, StoreErrorKind},
    options::{millis, validity},
    owner::OwnerId,
    store::{Released, Renewed},
};

/// All holds of one client.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    /// A hold is its own key: there may be many.
    by_lock_and_owner: DashMap<Entry, ()>,
    /// Counts the names that may still be used by a late execution: see [`OwnerId::in_era`].
    era: AtomicU64,
    /// Locks, and values for which there is no other name, of which the same is true.
    values_in_doubt: DashSet<(Arc<str>, OwnerId)>,
}

#[derive(Clone, Debug)]
struct HoldKey {
    family: &'static str,
    lock: Arc<str>,
    /// Compared without its suffix.
    owner: OwnerId,
}

impl PartialEq for HoldKey {
    fn eq(&self, other: &Self) -> bool {
        self.owner.base() == other.owner.base() && self.lock == other.lock && self.family == other.family
    }
}

impl Eq for HoldKey {}

impl Hash for HoldKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.owner.base().hash(state);
        self.lock.hash(state);
    }
}

/// A hold, found by its key.
#[derive(Debug)]
struct Entry(Arc<Hold>);

impl Borrow<HoldKey> for Entry {
    fn borrow(&self) -> &HoldKey {
        &self.0.key
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl Eq for Entry {}

impl Hash for Entry {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.key.hash(state);
    }
}

/// What one owner has of one lock.
pub(crate) struct Hold {
    key: HoldKey,
    kind: Arc<dyn Kind>,
    /// Held around each request about this hold, and never while waiting for the lock.
    pub(crate) turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    /// Told when a generation ends.
    ended: Notify,
    /// The janitor has it on its list.
    pub(crate) listed: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// The owner as the server knows it.
    owner: OwnerId,
    /// The era that the name was made in.
    era: Option<u64>,
    /// Acquires of this owner that wait in the lock's queue.
    waiters: u32,
    /// The name under which the sibling is held may be used by a late execution about this one.
    sibling_in_doubt: bool,
    /// The fencing token of the current generation.
    token: Option<NonZeroU64>,
    /// The number of holds taken and not given back: what we want the server to record.
    count: u32,
    /// How many of them the watchdog renews, to what TTL, and how often still: see [`Watch`].
    watched: u32,
    watch_ms: u64,
    renewals: Option<NonZeroU32>,
    server: ServerSide,
    /// Ends (and counts up) when the count returns to zero. A guard belongs to one generation.
    generation: u64,
    last_end: Option<(u64, End)>,
    /// Until when the hold may be relied on; only confirmed answers move it.
    deadline: Instant,
    renew_at: Instant,
}

/// What the server records for this owner, as far as we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerSide {
    Holds(u32),
    /// It is in the lock's queue, and holds nothing.
    Waits,
    /// A request is under way or its answer was lost; the first such went out in this epoch of the link.
    InDoubt {
        epoch: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Released,
    Lost(LossReason),
    /// Given up, and the server refused the release for good.
    Refused(StoreErrorKind),
}

/// What an acquire should send.
pub(crate) struct Plan {
    pub(crate) owner: OwnerId,
    pub(crate) holds: u32,
    /// What the server records until then.
    before: ServerSide,
}

/// What a release was asked to do.
pub(crate) struct Asked {
    pub(crate) owner: OwnerId,
    wanted: u32,
    /// What the server recorded until then.
    before: ServerSide,
}

impl Asked {
    /// Whether all that it has to do is to end a hold: nothing is kept, and nothing is in doubt.
    pub(crate) fn ends_a_hold(&self) -> bool {
        self.wanted == 0 && matches!(self.before, ServerSide::Holds(_))
    }
}

/// The hold that a guard stands for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ticket {
    pub(crate) generation: u64,
    pub(crate) watched: bool,
    /// The fencing token, if the kind has one.
    pub(crate) token: Option<NonZeroU64>,
}

/// How the watchdog renews a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Watch {
    /// What each renewal sets the TTL to; it is due after a third.
    pub(crate) ttl: Duration,
    /// How many are left, plus one; `None`: no limit.
    pub(crate) renewals: Option<NonZeroU32>,
}

/// What came of [`Hold::agree`].
pub(crate) enum Agreement {
    /// The server records what we want. `held`: it had recorded this owner, or may have.
    Reached { held: bool },
    /// Not executed.
    Refused(StoreError),
    /// No answer.
    Silent(StoreError),
}

/// A hold under a name that is not used any more, which a late execution may still create.
#[derive(Debug, Clone)]
pub(crate) struct Ghost {
    pub(crate) kind: Arc<dyn Kind>,
    pub(crate) owner: OwnerId,
    pub(crate) epoch: u64,
}

impl Holds {
    /// The hold of `owner` on this lock, made if there is none.
    pub(crate) fn get_or_insert(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Arc<Hold> {
        let key = HoldKey { family: kind.family(), lock: Arc::clone(kind.name()), owner: owner.clone() };
        if let Some(known) = self.find(&key) {
            return known;
        }
        let now = Instant::now();
        let hold = Entry(Arc::new(Hold {
            key,
            kind: Arc::clone(kind),
            turn: tokio::sync::Mutex::new(()),
            state: Mutex::new(State {
                owner: owner.clone(),
                era: None,
                waiters: 0,
                sibling_in_doubt: false,
                token: None,
                count: 0,
                watched: 0,
                watch_ms: 0,
                renewals: None,
                server: ServerSide::Holds(0),
                generation: 0,
                last_end: None,
                deadline: now,
                renew_at: now,
            }),
            ended: Notify::new(),
            listed: AtomicBool::new(false),
        }));
        // somebody else may have been quicker
        Arc::clone(&self.by_lock_and_owner.entry(hold).or_default().key().0)
    }

    /// The hold of `owner` on this lock, if this client knows of one.
    pub(crate) fn get(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        let key = HoldKey { family: kind.family(), lock: Arc::clone(kind.name()), owner: owner.clone() };
        self.find(&key)
    }

    fn find(&self, key: &HoldKey) -> Option<Arc<Hold>> {
        self.by_lock_and_owner.get(key).map(|entry| Arc::clone(&entry.key().0))
    }

    /// What the same owner has of the lock's sibling kind, if he holds that.
    pub(crate) fn held_sibling(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<(Sibling, Arc<Hold>)> {
        let sibling = kind.sibling()?;
        let key = HoldKey { family: sibling.family, lock: Arc::clone(kind.name()), owner: owner.clone() };
        let hold = self.find(&key)?;
        hold.is_valid().then_some((sibling, hold))
    }

    /// Everything this client knows of one lock, its sibling included: whatever ends a record ends both.
    pub(crate) fn of_lock(&self, kind: &Arc<dyn Kind>) -> Vec<Arc<Hold>> {
        let (mut found, sibling) = (Vec::new(), kind.sibling().map(|sibling| sibling.family));
        self.for_each(|hold| {
            let family = hold.key.family;
            if hold.key.lock == *kind.name() && (family == kind.family() || Some(family) == sibling) {
                found.push(Arc::clone(hold));
            }
        });
        found
    }

    /// Looks at every hold. `look` must not come back to this map.
    pub(crate) fn for_each(&self, mut look: impl FnMut(&Arc<Hold>)) {
        self.by_lock_and_owner.iter().for_each(|entry| look(&entry.key().0));
    }

    /// Forgets a hold of which nothing is left. Call with a handle that is not used again.
    pub(crate) fn reap(&self, hold: &Arc<Hold>) {
        // two handles, the map's and the caller's: nobody else can get at it while the map's shard is locked
        self.by_lock_and_owner.remove_if(&hold.key, |Entry(kept), ()| {
            Arc::ptr_eq(kept, hold) && Arc::strong_count(kept) == 2 && hold.leftover() == Leftover::Nothing
        });
    }

    /// Forgets every hold of which nothing is left and that nobody uses: the net below [`Holds::reap`], which cannot
    /// forget a hold while another user looks at it.
    pub(crate) fn sweep(&self) {
        self.by_lock_and_owner
            .retain(|Entry(hold), ()| Arc::strong_count(hold) > 1 || hold.leftover() != Leftover::Nothing);
    }

    /// How many holds are known, also those being released.
    pub(crate) fn len(&self) -> usize {
        self.by_lock_and_owner.len()
    }

    /// No name used so far is used for a new hold: somebody else may still send requests under one.
    pub(crate) fn retire_names(&self) {
        self.era.fetch_add(1, Ordering::AcqRel);
    }

    /// The server has settled what was in doubt.
    pub(crate) fn doubt_is_over(&self, ghost: &Ghost) {
        self.values_in_doubt.remove(&(Arc::clone(ghost.kind.name()), ghost.owner.clone()));
    }

    fn era(&self) -> u64 {
        self.era.load(Ordering::Acquire)
    }
}

impl State {
    /// What a renewal sets the TTL to.
    fn ttl(&self) -> Duration {
        Duration::from_millis(self.watch_ms)
    }

    /// Whether the server records what we want.
    fn agrees(&self) -> bool {
        match self.server {
            ServerSide::Holds(known) => known == self.count,
            ServerSide::Waits => self.count == 0 && self.waiters > 0,
            ServerSide::InDoubt { .. } => false,
        }
    }

    /// The generation that was given up last, and is being released, turned out otherwise.
    fn release_ended(&mut self, otherwise: End) {
        match &mut self.last_end {
            Some((ended, end @ End::Released)) if self.count == 0 && *ended + 1 == self.generation => *end = otherwise,
            _ => {}
        }
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold").field("lock", &self.key.lock).field("state", &*self.state()).finish_non_exhaustive()
    }
}

impl Hold {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn kind(&self) -> &Arc<dyn Kind> {
        &self.kind
    }

    pub(crate) fn lock_name(&self) -> &Arc<str> {
        &self.key.lock
    }

    /// The owner as the server knows it.
    pub(crate) fn owner(&self) -> OwnerId {
        self.state().owner.clone()
    }

    /// What a user of this hold leaves behind.
    pub(crate) fn leftover(&self) -> Leftover {
        let state = self.state();
        match state.server {
            ServerSide::Holds(0) if state.count == 0 => Leftover::Nothing,
            ServerSide::Holds(known) if state.count == known => Leftover::Held,
            ServerSide::Waits if state.waiters > 0 => Leftover::Held,
            _ => Leftover::Doubt,
        }
    }

    pub(crate) fn count(&self) -> u32 {
        self.state().count
    }

    /// Held, and its lease is not over.
    fn is_valid(&self) -> bool {
        let state = self.state();
        state.count > 0 && state.deadline > Instant::now()
    }

    pub(crate) fn lost_error(&self, reason: LossReason) -> Error {
        Error::Lost { lock: self.key.lock.to_string(), owner: self.owner().to_string(), reason }
    }

    pub(crate) fn not_held_error(&self) -> Error {
        Error::NotHeld { lock: self.key.lock.to_string(), owner: self.owner().to_string() }
    }

    // --- acquiring: in turn ---

    /// What the next acquire should send. A re-entry into a hold whose lease is over is refused. `None`: a hold was
    /// given back since the server agreed; a new name now would leave the record under the old one behind.
    ///
    /// `kind` is the caller's, which may be another of the family than the one that the hold was made for.
    pub(crate) fn plan(&self, kind: &Arc<dyn Kind>, holds: &Holds, max_holds: u32) -> Result<Option<Plan>> {
        if self.lose_if_over() {
            return Err(self.lost_error(LossReason::LeaseExpired));
        }
        let sibling = holds.held_sibling(&self.kind, &self.key.owner);
        let sibling = sibling.map(|(sibling, hold)| (sibling, hold.owner(), hold.state().sibling_in_doubt));
        let mut state = self.state();
        if !state.agrees() {
            return Ok(None);
        }
        if state.count > 0 && !kind.is_reentrant() {
            let (lock, owner) = (self.key.lock.to_string(), state.owner.to_string());
            return Err(Error::NotReentrant { lock, owner });
        }
        if state.count >= max_holds {
            return Err(Error::TooManyHolds {
                lock: self.key.lock.to_string(),
                owner: state.owner.to_string(),
                holds: state.count,
            });
        }
        if state.owner.is_value() && holds.values_in_doubt.contains(&(Arc::clone(&self.key.lock), state.owner.clone()))
        {
            let source =
                super::silent("an earlier request with this value was never answered; wait, or use another value");
            return Err(Error::Unconfirmed { lock: self.key.lock.to_string(), source });
        }
        let era = holds.era();
        match sibling {
            _ if state.count > 0 => {}
            Some((Sibling { excludes: true, .. }, owner, _)) => {
                return Err(Error::UpgradeRefused { lock: self.key.lock.to_string(), owner: owner.to_string() });
            }
            Some((_, _, true)) => {
                let source =
                    super::silent("an earlier request inside the other hold was never answered; release that first");
                return Err(Error::Unconfirmed { lock: self.key.lock.to_string(), source });
            }
            // the server tells by the name that both are one owner's
            Some((_, owner, false)) => (state.owner, state.era) = (owner, None),
            // a place in the queue is kept under its name
            None if state.server == ServerSide::Waits || state.era == Some(era) => {}
            None => (state.owner, state.era) = (self.key.owner.in_era(era), Some(era)),
        }
        Ok(Some(Plan { owner: state.owner.clone(), holds: state.count + 1, before: state.server }))
    }

    /// From here on a request is under way: if nobody hears its answer, the server's side is unknown.
    pub(crate) fn sending(&self, epoch: u64) {
        let mut state = self.state();
        if !matches!(state.server, ServerSide::InDoubt { .. }) {
            state.server = ServerSide::InDoubt { epoch };
        }
    }

    /// The server did not execute the request: nothing is in doubt.
    pub(crate) fn not_sent(&self, plan: &Plan) {
        self.state().server = plan.before;
    }

    /// The server said that somebody else holds the lock. `queued`: this request has a place in its queue.
    pub(crate) fn busy(&self, plan: &Plan, queued: bool) {
        let queued = queued || plan.before == ServerSide::Waits;
        self.state().server = if queued { ServerSide::Waits } else { ServerSide::Holds(0) };
    }

    /// Counts a waiter in the queue.
    pub(crate) fn enter_queue(&self) {
        self.state().waiters += 1;
    }

    /// One waiter less; with the last one the place in the queue is given up, by the next who makes the server agree.
    pub(crate) fn leave_queue_once(&self, core: &Core) {
        let mut state = self.state();
        state.waiters = state.waiters.saturating_sub(1);
        if state.waiters == 0 {
            self.give_up_place(&mut state, core);
        }
    }

    /// All waiters leave the queue.
    pub(crate) fn leave_queue(&self, core: &Core) {
        self.give_up_place(&mut self.state(), core);
    }

    fn give_up_place(&self, state: &mut State, core: &Core) {
        if state.server == ServerSide::Waits {
            state.server = ServerSide::InDoubt { epoch: core.store.link(&self.key.lock).epoch() };
        }
    }

    /// The server said that this owner holds nothing.
    pub(crate) fn server_holds_nothing(&self) {
        self.state().server = ServerSide::Holds(0);
    }

    /// The acquire was confirmed. `None`: so late that the lease is over already.
    pub(crate) fn enter(
        &self,
        plan: &Plan,
        sent: Instant,
        lease: Duration,
        watch: Option<Watch>,
        token: Option<NonZeroU64>,
    ) -> Option<Ticket> {
        let mut state = self.state();
        // whoever looked was told of the loss: this is a new hold, not a longer old one
        self.end_if_over(&mut state);
        state.server = ServerSide::Holds(plan.holds);
        let mut deadline = sent + validity(lease);
        if state.count > 0 {
            deadline = deadline.max(state.deadline);
        }
        if deadline <= Instant::now() {
            return None;
        }
        state.deadline = deadline;
        // one token for all holds of a generation
        if state.count == 0 {
            state.token = token;
        }
        state.count += 1;
        if let Some(watch) = watch {
            // of nested holds the last one decides how
            state.watched += 1;
            (state.watch_ms, state.renewals) = (millis(watch.ttl), watch.renewals);
            state.renew_at = sent + watch.ttl / 3;
        }
        Some(Ticket { generation: state.generation, watched: watch.is_some(), token: state.token })
    }

    // --- holding ---

    /// How much longer this ticket's hold may be relied on; `Err`: no longer.
    pub(crate) fn remaining(&self, ticket: Ticket) -> Result<Duration> {
        let end = {
            let state = self.state();
            if state.generation == ticket.generation {
                match state.deadline.checked_duration_since(Instant::now()) {
                    Some(remaining) if !remaining.is_zero() => return Ok(remaining),
                    _ => End::Lost(LossReason::LeaseExpired),
                }
            } else {
                match state.last_end {
                    Some((generation, end)) if generation == ticket.generation => end,
                    _ => End::Released,
                }
            }
        };
        Err(match end {
            End::Lost(reason) => self.lost_error(reason),
            End::Released | End::Refused(_) => self.not_held_error(),
        })
    }

    /// Resolves when a generation of this hold ended after the call.
    pub(crate) fn ended(&self) -> tokio::sync::futures::Notified<'_> {
        self.ended.notified()
    }

    /// When the watchdog must look at this hold again, and whether it is to be renewed now.
    pub(crate) fn due(&self, now: Instant) -> Due {
        let state = self.state();
        if state.count == 0 {
            Due::Never
        } else if state.deadline <= now {
            Due::Expired
        } else if state.watched == 0 || state.renewals == Some(NonZeroU32::MIN) {
            Due::At(state.deadline)
        } else if state.renew_at <= now + slack(state.ttl()) {
            Due::Renew { owner: state.owner.clone(), generation: state.generation, ttl: state.ttl() }
        } else {
            Due::At(state.renew_at.min(state.deadline))
        }
    }

    /// Takes in what a renewal sent at `sent` was answered; a later end of the generation wins. So does a lease that
    /// ended before the answer came: whoever looked has been told that the lock is lost. `next`: when the watchdog is
    /// to renew it again; an extension leaves that as it is, since it may reach less far than the lease.
    pub(crate) fn renewed(
        &self,
        generation: u64,
        answer: Renewed,
        sent: Instant,
        lease: Duration,
        next: Option<Instant>,
    ) {
        let mut state = self.state();
        if self.end_if_over(&mut state) || state.generation != generation || state.count == 0 {
            return;
        }
        state.renew_at = next.unwrap_or(state.renew_at);
        if answer == Renewed::Yes && next.is_some() {
            state.renewals = state.renewals.map(|left| NonZeroU32::new(left.get() - 1).unwrap_or(left));
        }
        match answer {
            Renewed::Yes | Renewed::Endless => state.deadline = state.deadline.max(sent + validity(lease)),
            Renewed::Unknown => {}
            Renewed::Gone => self.end(&mut state, LossReason::RecordMissing),
            Renewed::Taken => self.end(&mut state, LossReason::TakenOver),
        }
    }

    /// The generation that a renewal or extension speaks of.
    pub(crate) fn generation(&self) -> Option<u64> {
        let state = self.state();
        (state.count > 0).then_some(state.generation)
    }

    // --- ending ---

    /// Gives one hold back, in our books; the server is told by [`Hold::agree`]. Without a ticket: one that has no
    /// guard. Returns the generation that it belonged to.
    pub(crate) fn leave(&self, ticket: Option<Ticket>) -> Result<u64> {
        let mut state = self.state();
        let generation = state.generation;
        match ticket {
            Some(ticket) if ticket.generation != generation || state.deadline <= Instant::now() => {
                // a lease that one guard found over is over for all: whoever gives up a guard must not meet its hold again
                self.end_if_over(&mut state);
                drop(state);
                return Err(self.remaining(ticket).err().unwrap_or_else(|| self.not_held_error()));
            }
            None if state.count == 0 => {
                drop(state);
                return Err(self.not_held_error());
            }
            _ => {}
        }
        state.watched -= u32::from(ticket.is_some_and(|ticket| ticket.watched) && state.watched > 0);
        state.count -= 1;
        state.watched = state.watched.min(state.count);
        if state.count == 0 {
            state.last_end = Some((generation, End::Released));
            state.sibling_in_doubt = false;
            state.generation += 1;
            self.ended.notify_waiters();
        }
        Ok(generation)
    }

    /// What the release of a generation came to, if another release of the same owner settled it first.
    pub(crate) fn check_released(&self, generation: u64) -> Result<()> {
        let end = self.state().last_end.filter(|(ended, _)| *ended == generation);
        match end {
            Some((_, End::Lost(reason))) => Err(self.lost_error(reason)),
            Some((_, End::Refused(kind))) => {
                let refusal = StoreError::new(kind, false, "the release was refused");
                Err(super::store_error(&self.key.lock, refusal))
            }
            _ => Ok(()),
        }
    }

    /// The lock is not ours any more.
    pub(crate) fn lose(&self, reason: LossReason) {
        self.end(&mut self.state(), reason);
    }

    /// The lock is not ours any more, if `generation` still is the current one.
    pub(crate) fn lose_generation(&self, generation: u64, reason: LossReason) {
        let mut state = self.state();
        if state.generation == generation {
            self.end(&mut state, reason);
        }
    }

    /// Ends a generation whose lease is over; whether it was.
    pub(crate) fn lose_if_over(&self) -> bool {
        self.end_if_over(&mut self.state())
    }

    fn end_if_over(&self, state: &mut State) -> bool {
        let over = state.count > 0 && state.deadline <= Instant::now();
        if over {
            self.end(state, LossReason::LeaseExpired);
        }
        over
    }

    /// Ends the current generation by a loss, if anything is held.
    fn end(&self, state: &mut State, reason: LossReason) {
        if state.count == 0 {
            return;
        }
        tracing::warn!(lock = %self.key.lock, owner = %state.owner, holds = state.count, %reason, "lock lost");
        let record_is_gone = matches!(reason, LossReason::RecordMissing | LossReason::TakenOver);
        if record_is_gone && matches!(state.server, ServerSide::Holds(_)) {
            state.server = ServerSide::Holds(0);
        }
        state.last_end = Some((state.generation, End::Lost(reason)));
        state.generation += 1;
        state.count = 0;
        state.watched = 0;
        state.sibling_in_doubt = false;
        self.ended.notify_waiters();
    }

    // --- settling: in turn ---

    /// Until when the record may live, as far as we know.
    pub(crate) fn deadline(&self) -> Instant {
        self.state().deadline
    }

    /// Leaves the record to its lease.
    pub(crate) fn write_off(&self, refusal: StoreErrorKind) {
        let mut state = self.state();
        state.server = ServerSide::Holds(state.count);
        state.release_ended(End::Refused(refusal));
    }

    /// Makes the server record our count, if it does not. Sent twice it changes nothing; dropped midway, the doubt
    /// stays and the next in line repeats it.
    pub(crate) async fn agree(&self, core: &Core) -> Agreement {
        let Some(asked) = self.asking(core) else { return Agreement::Reached { held: true } };
        match core.store.release(self.kind.release(&asked.owner, asked.wanted)).await {
            Ok(released) => Agreement::Reached { held: self.answered(core, &asked, released) },
            Err(error) if error.may_have_executed() => Agreement::Silent(error),
            Err(error) => {
                self.not_asked(&asked);
                Agreement::Refused(error)
            }
        }
    }

    /// A release is about to be sent: from here on the server's side is in doubt. `None`: it agrees already.
    pub(crate) fn asking(&self, core: &Core) -> Option<Asked> {
        let mut state = self.state();
        if state.agrees() {
            return None;
        }
        let asked = Asked { owner: state.owner.clone(), wanted: state.count, before: state.server };
        if !matches!(asked.before, ServerSide::InDoubt { .. }) {
            state.server = ServerSide::InDoubt { epoch: core.store.link(&self.key.lock).epoch() };
        }
        Some(asked)
    }

    /// The server did not execute the release.
    pub(crate) fn not_asked(&self, asked: &Asked) {
        self.state().server = asked.before;
    }

    /// The server answered the release. Whether it had recorded this owner, or may have.
    pub(crate) fn answered(&self, core: &Core, asked: &Asked, released: Released) -> bool {
        let Asked { wanted, before, .. } = *asked;
        match before {
            // an answer over another connection does not prove that earlier requests are over
            ServerSide::InDoubt { epoch } if wanted == 0 && core.store.link(&self.key.lock).epoch() != epoch => {
                self.abandon_name(core, epoch);
            }
            _ if released == Released::NotHeld => {
                let mut state = self.state();
                state.server = ServerSide::Holds(0);
                if let ServerSide::Holds(_) = before {
                    // it was lost before it was given up
                    state.release_ended(End::Lost(LossReason::RecordMissing));
                }
            }
            _ => self.state().server = ServerSide::Holds(wanted),
        }
        if wanted > 0 && released == Released::NotHeld {
            self.lose(LossReason::RecordMissing);
        }
        let was_in_doubt = matches!(before, ServerSide::InDoubt { .. });
        released != Released::NotHeld || wanted == 0 && was_in_doubt
    }

    /// Leaves the owner's name to late executions of what is in doubt, and goes on under another one. Does nothing
    /// while the lock is held: late copies of nested requests change nothing.
    pub(crate) fn abandon_name_in_doubt(&self, core: &Core) {
        let epoch = {
            let state = self.state();
            match state.server {
                ServerSide::InDoubt { epoch } if state.count == 0 => epoch,
                _ => return,
            }
        };
        self.abandon_name(core, epoch);
    }

    fn abandon_name(&self, core: &Core, epoch: u64) {
        let owner = {
            let mut state = self.state();
            core.holds.retire_names();
            state.server = ServerSide::Holds(0);
            state.owner.clone()
        };
        if owner.is_value() {
            core.holds.values_in_doubt.insert((Arc::clone(&self.key.lock), owner.clone()));
        }
        if let Some((_, sibling)) = core.holds.held_sibling(&self.kind, &self.key.owner) {
            let mut state = sibling.state();
            state.sibling_in_doubt |= state.owner == owner;
        }
        core.janitor.lay(Ghost { kind: Arc::clone(&self.kind), owner, epoch });
    }
}

/// What is left of a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leftover {
    /// The server does not record what we want, or may not.
    Doubt,
    /// It is held, and the server knows.
    Held,
    Nothing,
}

/// What is due within this time goes along now: fewer, fuller batches.
fn slack(ttl: Duration) -> Duration {
    ttl / 30
}

/// What the watchdog should do with a hold.
pub(crate) enum Due {
    Never,
    At(Instant),
    Renew { owner: OwnerId, generation: u64, ttl: Duration },
    Expired,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{keys::LockName, lock::Reentrant, owner::ClientId};

    fn entered(holds: &Holds, hold: &Hold) -> Ticket {
        let plan = hold.plan(hold.kind(), holds, u32::MAX).unwrap().unwrap();
        hold.enter(&plan, Instant::now(), Duration::from_secs(30), None, None).unwrap()
    }

    /// A guard that is given up while its hold is lost and taken anew must not take the new hold along.
    #[test]
    fn a_stale_ticket_never_gives_back_a_later_hold() {
        let holds = Holds::default();
        let kind: Arc<dyn Kind> = Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()));
        let owner = OwnerId::named(&ClientId::random(), "me").unwrap();
        let hold = holds.get_or_insert(&kind, &owner);
        let stale = entered(&holds, &hold);
        hold.lose_generation(stale.generation, LossReason::RecordMissing);
        let fresh = entered(&holds, &hold);
        assert!(matches!(hold.leave(Some(stale)), Err(Error::Lost { .. })));
        assert_eq!(hold.count(), 1);
        hold.leave(Some(fresh)).unwrap();
        assert_eq!(hold.count(), 0);
    }

    /// The watchdog looks, and ends what it saw expired a moment later.
    #[test]
    fn a_hold_that_was_taken_anew_does_not_expire() {
        let holds = Holds::default();
        let kind: Arc<dyn Kind> = Arc::new(Reentrant::new(&LockName::new("", "l", 1024).unwrap()));
        let hold = holds.get_or_insert(&kind, &OwnerId::named(&ClientId::random(), "me").unwrap());
        let over = Instant::now().checked_sub(Duration::from_millis(50)).unwrap();
        let plan = hold.plan(&kind, &holds, u32::MAX).unwrap().unwrap();
        let stale = hold.enter(&plan, over, Duration::from_millis(60), None, None);
        std::thread::sleep(Duration::from_millis(20));
        assert!(matches!(hold.due(Instant::now()), Due::Expired | Due::Never));
        if let Some(stale) = stale {
            assert!(hold.leave(Some(stale)).is_err());
        }
        assert!(hold.plan(&kind, &holds, u32::MAX).unwrap().is_none(), "the server still records it");
        hold.server_holds_nothing();
        let fresh = entered(&holds, &hold);
        hold.lose_if_over();
        assert!(hold.remaining(fresh).is_ok());
    }
}
