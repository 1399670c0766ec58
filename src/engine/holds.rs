//! All holds of one client, by lock and owner.

use std::{
    borrow::Borrow,
    hash::{Hash, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use dashmap::{DashMap, DashSet};

use super::{
    Kind, Sibling,
    due::DueQueue,
    hold::{Hold, HoldKey, Leftover, Standing},
};
use crate::owner::OwnerId;

/// All holds of one client.
#[derive(Debug)]
pub(crate) struct Holds {
    /// A hold is its own key: there may be many.
    by_lock_and_owner: DashMap<Entry, ()>,
    /// Those that were handed over, by what their owner is called. Renewed, or known to be held for the rest of a lease.
    handed_over: DashMap<(HoldKey, OwnerId), Arc<Hold>>,
    /// Those of which nothing is left, and which somebody still had a handle of.
    to_be_reaped: Mutex<Vec<Weak<Hold>>>,
    /// What the watchdog must look at.
    pub(super) due: Arc<DueQueue>,
    /// Counts the names that may still be used by a late execution: see [`OwnerId::in_era`].
    era: AtomicU64,
    /// Locks, and values for which there is no other name, of which the same is true.
    values_in_doubt: DashSet<(Arc<str>, OwnerId)>,
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

impl Holds {
    pub(super) fn new(command_timeout: Duration) -> Self {
        Self {
            by_lock_and_owner: DashMap::new(),
            handed_over: DashMap::new(),
            to_be_reaped: Mutex::default(),
            due: Arc::new(DueQueue::new(command_timeout)),
            era: AtomicU64::new(0),
            values_in_doubt: DashSet::new(),
        }
    }

    /// The hold of `owner` on this lock, made if there is none.
    pub(crate) fn get_or_insert(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Arc<Hold> {
        let key = HoldKey::new(kind, owner);
        if let Some(known) = self.find(&key) {
            return known;
        }
        let hold = Entry(Arc::new(Hold::new(key, kind, &self.due)));
        // somebody else may have been quicker
        Arc::clone(&self.by_lock_and_owner.entry(hold).or_default().key().0)
    }

    /// The hold of `owner` on this lock, if this client knows of one.
    pub(crate) fn get(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.find(&HoldKey::new(kind, owner))
    }

    /// What was handed over as a hold of exactly this owner.
    pub(crate) fn handed_over(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.handed_over.get(&(HoldKey::new(kind, owner), owner.clone())).map(|hold| Arc::clone(&hold))
    }

    fn find(&self, key: &HoldKey) -> Option<Arc<Hold>> {
        self.by_lock_and_owner.get(key).map(|entry| Arc::clone(&entry.key().0))
    }

    /// What the same owner has of the lock's sibling kind, if it holds that.
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

    /// Looks at every hold, those included that were handed over. `look` must not come back to this map.
    pub(crate) fn for_each(&self, mut look: impl FnMut(&Arc<Hold>)) {
        self.by_lock_and_owner.iter().for_each(|entry| look(&entry.key().0));
        self.handed_over.iter().for_each(|hold| look(&hold));
    }

    /// A hold is somebody else's to release from here on: its owner goes on without it, under another name.
    pub(super) fn hand_over(&self, hold: &Arc<Hold>) {
        let owner = hold.owner();
        self.retire_names();
        if let Some((_, sibling)) = self.held_sibling(hold.kind(), &hold.key.owner) {
            sibling.share_its_name(&owner);
        }
        self.handed_over.insert((hold.key.clone(), owner), Arc::clone(hold));
        self.forget(hold);
    }

    /// A hold is in nobody's hands any more: its owner goes on without it.
    pub(super) fn forget(&self, hold: &Arc<Hold>) {
        self.by_lock_and_owner.remove_if(&hold.key, |Entry(kept), ()| Arc::ptr_eq(kept, hold));
    }

    /// Forgets a hold of which nothing is left: now, or a moment later, if somebody else has a handle of it.
    pub(crate) fn reap(&self, hold: &Arc<Hold>) {
        if !self.is_reaped(hold) && !hold.to_be_reaped.swap(true, Ordering::AcqRel) {
            let mut later = self.to_be_reaped();
            later.push(Arc::downgrade(hold));
            if later.len() == 1 {
                self.due.hurry();
            }
        }
    }

    /// Tries again to forget what somebody else had a handle of. Whether any of it is left.
    pub(super) fn reap_again(&self) -> bool {
        let mut left = std::mem::take(&mut *self.to_be_reaped());
        left.retain(|hold| {
            let Some(hold) = hold.upgrade() else { return false };
            let left = !self.is_reaped(&hold);
            hold.to_be_reaped.store(left, Ordering::Release);
            left
        });
        let mut later = self.to_be_reaped();
        later.append(&mut left);
        !later.is_empty()
    }

    /// Whether a hold is not known any more, or is to be.
    fn is_reaped(&self, hold: &Arc<Hold>) -> bool {
        if hold.standing() == Standing::HandedOver {
            let name = (hold.key.clone(), hold.owner());
            self.handed_over.remove_if(&name, |_, kept| Arc::ptr_eq(kept, hold));
            return true;
        }
        // two handles, the map's and the caller's: nobody else can get at it while the map's shard is locked
        let reaped = self.by_lock_and_owner.remove_if(&hold.key, |Entry(kept), ()| {
            Arc::ptr_eq(kept, hold) && Arc::strong_count(kept) == 2 && hold.leftover() == Leftover::Nothing
        });
        let is_known = || self.find(&hold.key).is_some_and(|known| Arc::ptr_eq(&known, hold));
        reaped.is_some() || hold.leftover() != Leftover::Nothing || !is_known()
    }

    fn to_be_reaped(&self) -> MutexGuard<'_, Vec<Weak<Hold>>> {
        self.to_be_reaped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many holds are known, also those being released or handed over.
    pub(crate) fn len(&self) -> usize {
        self.by_lock_and_owner.len() + self.handed_over.len()
    }

    /// No name used so far is used for a new hold: somebody else may still send requests under one.
    pub(crate) fn retire_names(&self) {
        self.era.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn era(&self) -> u64 {
        self.era.load(Ordering::Acquire)
    }

    /// A late execution may still use this value.
    pub(super) fn doubt_value(&self, lock: &Arc<str>, owner: &OwnerId) {
        self.values_in_doubt.insert((Arc::clone(lock), owner.clone()));
    }

    pub(super) fn is_value_in_doubt(&self, lock: &Arc<str>, owner: &OwnerId) -> bool {
        self.values_in_doubt.contains(&(Arc::clone(lock), owner.clone()))
    }

    /// The server has settled what was in doubt.
    pub(super) fn doubt_is_over(&self, lock: &Arc<str>, owner: &OwnerId) {
        self.values_in_doubt.remove(&(Arc::clone(lock), owner.clone()));
    }
}
