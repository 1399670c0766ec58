//! The registry of all holds of one client, by lock and owner.
//!
//! A name is retired before another task can see that a hold no longer belongs to its owner: the
//! owner's next acquire, with a new hold, may be planned at that moment. A retired name stays
//! retired for the whole client: one counter gives all later outermost holds their suffix.

use std::{
    borrow::Borrow,
    hash::{Hash, Hasher},
    sync::{Arc, PoisonError, Weak},
    time::Duration,
};

use nestlock_wire::clock::Instant;

use super::{
    Hold,
    due::DueQueue,
    refusal::Refusal,
    state::{HeldSibling, Residue, SiblingState},
};

use crate::{
    engine::kind::Kind,
    error::Result,
    meter::Meter,
    owner::OwnerId,
    sync::{
        DashMap, DashSet, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
};

/// All holds of one client.
#[derive(Debug)]
pub(crate) struct Holds {
    /// Each hold is its own key: there may be many.
    by_lock_and_owner: DashMap<HoldEntry, ()>,
    /// Holds of which nothing is left, but that another task still had a handle of.
    to_be_reaped: Mutex<Vec<Weak<Hold>>>,
    /// The holds that the watchdog must poll.
    pub(crate) due: Arc<DueQueue<Hold>>,
    meter: Meter,
    /// The suffix for new names. Late requests may still use earlier ones: see
    /// [`OwnerId::with_suffix`].
    suffix: AtomicU64,
    /// Locks and owners that are values, which late requests may still use. A value has no other
    /// name.
    values_in_doubt: DashSet<ExactName>,
}

/// The key of a hold.
#[derive(Clone, Copy)]
struct Key<'a> {
    family: &'static str,
    lock: &'a Arc<str>,
    /// Compared without its suffix.
    owner: &'a OwnerId,
}

impl<'a> Key<'a> {
    fn new(kind: &'a Arc<dyn Kind>, owner: &'a OwnerId) -> Self {
        Self {
            family: kind.about().family,
            lock: kind.name(),
            owner,
        }
    }

    fn of(hold: &'a Hold) -> Self {
        Self::new(hold.kind(), &hold.caller)
    }
}

/// A value that has a key. A hold contains its own, so a map of holds needs no second copy.
trait Keyed {
    fn key(&self) -> Key<'_>;
}

impl Keyed for Key<'_> {
    fn key(&self) -> Key<'_> {
        *self
    }
}

impl PartialEq for dyn Keyed + '_ {
    fn eq(&self, other: &Self) -> bool {
        let (one, other) = (self.key(), other.key());
        one.owner.base() == other.owner.base()
            && one.lock == other.lock
            && one.family == other.family
    }
}

impl Eq for dyn Keyed + '_ {}

impl Hash for dyn Keyed + '_ {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let key = self.key();
        key.owner.base().hash(state);
        key.lock.hash(state);
    }
}

/// A hold as its own map key.
#[derive(Debug)]
struct HoldEntry(Arc<Hold>);

impl Keyed for HoldEntry {
    fn key(&self) -> Key<'_> {
        Key::of(&self.0)
    }
}

impl<'a> Borrow<dyn Keyed + 'a> for HoldEntry {
    fn borrow(&self) -> &(dyn Keyed + 'a) {
        self
    }
}

impl PartialEq for HoldEntry {
    fn eq(&self, other: &Self) -> bool {
        (self as &dyn Keyed) == (other as &dyn Keyed)
    }
}

impl Eq for HoldEntry {}

impl Hash for HoldEntry {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self as &dyn Keyed).hash(state);
    }
}

/// The exact name of a hold: its family, its lock, and its owner as the server knows it.
pub(crate) type ExactName = (&'static str, Arc<str>, OwnerId);

fn exact_name(kind: &Arc<dyn Kind>, owner: &OwnerId) -> ExactName {
    (kind.about().family, Arc::clone(kind.name()), owner.clone())
}

impl Holds {
    pub(crate) fn new(command_timeout: Duration, meter: Meter) -> Self {
        Self {
            by_lock_and_owner: DashMap::new(),
            to_be_reaped: Mutex::default(),
            due: Arc::new(DueQueue::new(command_timeout)),
            meter,
            suffix: AtomicU64::new(0),
            values_in_doubt: DashSet::new(),
        }
    }

    /// Returns the hold of `owner` on this lock. Creates it if there is none.
    pub(crate) fn get_or_insert(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Arc<Hold> {
        if let Some(known) = self.get(kind, owner) {
            return known;
        }
        let hold = HoldEntry(Arc::new(Hold::new(kind, owner, &self.due, self.meter)));
        // Another task may have inserted one since.
        Arc::clone(&self.by_lock_and_owner.entry(hold).or_default().key().0)
    }

    /// Returns the hold of `owner` on this lock, if this client has one.
    pub(crate) fn get(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.find(Key::new(kind, owner))
    }

    /// Returns the hold that this owner left to a lease that has not ended, if it is known.
    pub(crate) fn left(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.get(kind, owner)
            .filter(|hold| hold.is_left_to_lease() && hold.generation_of(owner).is_some())
    }

    fn find(&self, key: Key<'_>) -> Option<Arc<Hold>> {
        self.by_lock_and_owner
            .get(&key as &dyn Keyed)
            .map(|entry| Arc::clone(&entry.key().0))
    }

    /// Returns the same owner's hold of the lock's sibling kind, held or not.
    pub(crate) fn known_sibling(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        let sibling = kind.about().sibling?;
        self.find(Key {
            family: sibling.family,
            ..Key::new(kind, owner)
        })
    }

    /// Returns the same owner's hold of the lock's sibling kind, if it is held.
    pub(crate) fn held_sibling(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.known_sibling(kind, owner)
            .filter(|hold| hold.state().is_valid(Instant::now()))
    }

    /// Returns all holds of one lock and its sibling: what ends the record ends both.
    pub(crate) fn of_lock(&self, kind: &Arc<dyn Kind>) -> Vec<Arc<Hold>> {
        let (mut found, sibling) = (
            Vec::new(),
            kind.about().sibling.map(|sibling| sibling.family),
        );
        self.for_each(|hold| {
            let family = hold.kind().about().family;
            if hold.lock_name() == kind.name()
                && (family == kind.about().family || Some(family) == sibling)
            {
                found.push(Arc::clone(hold));
            }
        });
        found
    }

    /// Calls `look` for every hold. `look` must not access this map, which is partly locked.
    pub(crate) fn for_each(&self, mut look: impl FnMut(&Arc<Hold>)) {
        self.by_lock_and_owner
            .iter()
            .for_each(|entry| look(&entry.key().0));
    }

    /// Removes a hold from the map: its owner continues with another one, under another name. A
    /// value has no other name: what it left to a lease stays.
    pub(crate) fn forget(&self, hold: &Arc<Hold>) {
        if hold.caller.is_value() && hold.is_left_to_lease() {
            return;
        }
        self.by_lock_and_owner
            .remove_if(&Key::of(hold) as &dyn Keyed, |HoldEntry(kept), ()| {
                Arc::ptr_eq(kept, hold)
            });
    }

    /// Forgets a hold of which nothing is left: now, or a moment later if another task has a
    /// handle.
    pub(crate) fn reap(&self, hold: &Arc<Hold>) {
        if !self.is_reaped(hold) && hold.mark_for_reaping() {
            let mut later = self.to_be_reaped();
            later.push(Arc::downgrade(hold));
            if later.len() == 1 {
                // The watchdog retries, but may be asleep for a third of its timeout.
                self.due.wake();
            }
        }
    }

    /// Tries again to forget holds that had another handle. Returns whether any of them is left.
    pub(crate) fn reap_again(&self) -> bool {
        let mut left = std::mem::take(&mut *self.to_be_reaped());
        left.retain(|hold| {
            let Some(hold) = hold.upgrade() else {
                return false;
            };
            // Clear the mark before the check: another user may finish while this loop has a
            // handle, and must be able to list the hold again.
            hold.unmark_for_reaping();
            !self.is_reaped(&hold) && hold.mark_for_reaping()
        });
        let mut later = self.to_be_reaped();
        later.append(&mut left);
        !later.is_empty()
    }

    /// Forgets a hold if nothing of it is left and it has no other handle. Returns `false` if only
    /// another handle prevents that.
    fn is_reaped(&self, hold: &Arc<Hold>) -> bool {
        // Two handles: the map's and the caller's. No other task can get one while the map's shard
        // is locked.
        let reaped = self.by_lock_and_owner.remove_if(
            &Key::of(hold) as &dyn Keyed,
            |HoldEntry(kept), ()| {
                Arc::ptr_eq(kept, hold)
                    && Arc::strong_count(kept) == 2
                    && hold.residue() == Residue::Nothing
            },
        );
        let is_known = || {
            self.find(Key::of(hold))
                .is_some_and(|known| Arc::ptr_eq(&known, hold))
        };
        reaped.is_some() || hold.residue() != Residue::Nothing || !is_known()
    }

    fn to_be_reaped(&self) -> MutexGuard<'_, Vec<Weak<Hold>>> {
        self.to_be_reaped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many holds are known, including those being released.
    pub(crate) fn len(&self) -> usize {
        self.by_lock_and_owner.len()
    }

    /// Retires all names used so far: no new hold gets one, because other requests may still be
    /// sent under it.
    pub(crate) fn retire_names(&self) {
        // A task that sees what follows (an abandoned name, a hold left to its lease) must see
        // this, too.
        self.suffix.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns what an acquire must know beyond the state of its own hold.
    pub(crate) fn sibling_state<'a>(&self, hold: &'a Hold) -> SiblingState<'a> {
        let (mut sibling, mut lost_sibling) = (None, None);
        if let Some(of) = hold.kind().about().sibling
            && let Some(other) = self.known_sibling(hold.kind(), &hold.caller)
        {
            let (state, now) = (other.state(), Instant::now());
            if state.is_valid(now) {
                let owner = state.owner.clone();
                // An owner that holds what excludes the lock would wait for itself. And a name in
                // doubt may be in use elsewhere.
                let refusal = if of.excludes {
                    Some(Refusal::Upgrade(owner.clone()))
                } else {
                    state.sibling_in_doubt.then_some(Refusal::SiblingInDoubt)
                };
                sibling = Some(HeldSibling { owner, refusal });
            } else if !of.excludes {
                // A read nested in the owner's lost write is inside what was lost. A write is never
                // nested in a read.
                lost_sibling = state.lost_inside(now);
            }
        }
        SiblingState {
            caller: &hold.caller,
            sibling,
            lost_sibling,
            suffix: self.suffix.load(Ordering::Acquire),
            value_in_doubt: hold.caller.is_value()
                && self.is_value_in_doubt(hold.kind(), &hold.caller),
        }
    }

    /// Returns the obstacle to a first hold: the same owner's hold of a kind that excludes this
    /// one, or the hold that it was to be nested in, which was left since the plan. Returns `None`
    /// if there is none. Call with the request marked as in flight but not yet sent.
    ///
    /// `Err`: the other lock is held, or waited for in its queue, or was lost and a guard is alive.
    /// `Ok`: the server does not agree with the other hold. Settle that first: both have one name
    /// on the server, so settling it later would end this hold.
    ///
    /// Of two concurrent acquires, at least one sees the other, because both are in doubt by then.
    pub(crate) fn rival(&self, hold: &Hold, count: u32) -> Option<Result<Arc<Hold>>> {
        if count > 1 {
            return None;
        }
        // the next plan nests in nothing
        if let Some(sibling) = self.known_sibling(hold.kind(), &hold.caller)
            && sibling.is_left()
            && sibling.owner() == hold.owner()
        {
            return Some(Ok(sibling));
        }
        let family = hold.kind().about().rival?;
        let other = self.find(Key {
            family,
            ..Key::new(hold.kind(), &hold.caller)
        })?;
        let (state, now) = (other.state(), Instant::now());
        let refusal = match (state.lost_inside(now), state.residue()) {
            (Some((owner, reason)), _) => Refusal::Lost(owner, reason),
            (None, Residue::Left | Residue::Nothing) => return None,
            (None, Residue::Doubt) if !state.is_valid(now) => {
                drop(state);
                return Some(Ok(other));
            }
            (None, Residue::Held | Residue::Doubt) => Refusal::NotReentrant(state.owner.clone()),
        };
        Some(Err(refusal.into_error(hold.lock_name())))
    }

    /// Marks a value that late requests may still use.
    pub(crate) fn doubt_value(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) {
        self.values_in_doubt.insert(exact_name(kind, owner));
    }

    fn is_value_in_doubt(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> bool {
        self.values_in_doubt.contains(&exact_name(kind, owner))
    }

    /// Clears the mark of [`Holds::doubt_value`] after the requests in doubt are settled.
    pub(crate) fn doubt_is_over(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) {
        self.values_in_doubt.remove(&exact_name(kind, owner));
    }
}
