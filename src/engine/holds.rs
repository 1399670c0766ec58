//! All holds of one client, by lock and owner.

use std::{
    borrow::Borrow,
    hash::{Hash, Hasher},
    sync::{Arc, PoisonError, Weak},
    time::Duration,
};

use super::{
    due::DueQueue,
    hold::Hold,
    kind::Kind,
    refusal::Refusal,
    state::{Around, HeldSibling, Leftover, Standing},
};
use crate::{
    clock::Instant,
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
    /// A hold is its own key: there may be many.
    by_lock_and_owner: DashMap<Entry, ()>,
    /// Those that were given away, by what their owner is called. Renewed, or known to be held for the rest of a lease.
    given_away: DashMap<ExactName, Arc<Hold>>,
    /// Those of which nothing is left, and which somebody still had a handle of.
    to_be_reaped: Mutex<Vec<Weak<Hold>>>,
    /// What the watchdog must look at.
    pub(super) due: Arc<DueQueue<Hold>>,
    meter: Meter,
    /// Counts the names that may still be used by a late execution: see [`OwnerId::with_suffix`].
    suffix: AtomicU64,
    /// Locks, and values for which there is no other name, of which the same is true.
    values_in_doubt: DashSet<ExactName>,
}

/// Which hold.
#[derive(Clone, Copy)]
struct Key<'a> {
    family: &'static str,
    lock: &'a Arc<str>,
    /// Compared without its suffix.
    owner: &'a OwnerId,
}

impl<'a> Key<'a> {
    fn new(kind: &'a Arc<dyn Kind>, owner: &'a OwnerId) -> Self {
        Self { family: kind.about().family, lock: kind.name(), owner }
    }

    fn of(hold: &'a Hold) -> Self {
        Self::new(hold.kind(), &hold.caller)
    }
}

/// What has a key: a hold has its own, so that a map of holds needs no second one.
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
        one.owner.base() == other.owner.base() && one.lock == other.lock && one.family == other.family
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

/// A hold, found by its key.
#[derive(Debug)]
struct Entry(Arc<Hold>);

impl Keyed for Entry {
    fn key(&self) -> Key<'_> {
        Key::of(&self.0)
    }
}

impl<'a> Borrow<dyn Keyed + 'a> for Entry {
    fn borrow(&self) -> &(dyn Keyed + 'a) {
        self
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self as &dyn Keyed) == (other as &dyn Keyed)
    }
}

impl Eq for Entry {}

impl Hash for Entry {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self as &dyn Keyed).hash(state);
    }
}

/// What a hold that was given away is called: its family, its lock, and its owner as the server knows it.
pub(super) type ExactName = (&'static str, Arc<str>, OwnerId);

fn exact_name(kind: &Arc<dyn Kind>, owner: &OwnerId) -> ExactName {
    (kind.about().family, Arc::clone(kind.name()), owner.clone())
}

impl Holds {
    pub(super) fn new(command_timeout: Duration, meter: Meter) -> Self {
        Self {
            by_lock_and_owner: DashMap::new(),
            given_away: DashMap::new(),
            to_be_reaped: Mutex::default(),
            due: Arc::new(DueQueue::new(command_timeout)),
            meter,
            suffix: AtomicU64::new(0),
            values_in_doubt: DashSet::new(),
        }
    }

    /// The hold of `owner` on this lock, made if there is none.
    pub(crate) fn get_or_insert(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Arc<Hold> {
        if let Some(known) = self.get(kind, owner) {
            return known;
        }
        let hold = Entry(Arc::new(Hold::new(kind, owner, &self.due, self.meter)));
        // somebody else may have been quicker
        Arc::clone(&self.by_lock_and_owner.entry(hold).or_default().key().0)
    }

    /// The hold of `owner` on this lock, if this client knows of one.
    pub(crate) fn get(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.find(Key::new(kind, owner))
    }

    /// What was given away as a hold of exactly this owner.
    pub(crate) fn given_away(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.given_away.get(&exact_name(kind, owner)).map(|hold| Arc::clone(&hold))
    }

    /// What this owner gave away, and still has a guard of: who waits for that waits for itself.
    pub(super) fn given_away_in_part(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        let (about, base) = (kind.about(), owner.base());
        let sibling = about.sibling.map(|sibling| sibling.family);
        let is_it = |(family, lock, of): &ExactName| {
            lock == kind.name() && of.base() == base && (*family == about.family || Some(*family) == sibling)
        };
        let has_guards = |hold: &Hold| hold.state().held().is_some_and(|(_, books)| books.guards > 0);
        let found = self.given_away.iter().find(|hold| is_it(hold.key()) && has_guards(hold))?;
        Some(Arc::clone(&found))
    }

    /// What is recorded under this name, if somebody else of this client has it now: see [`OwnerId::lent_to`].
    pub(super) fn lent(&self, kind: &Arc<dyn Kind>, recorded: &OwnerId) -> Option<OwnerId> {
        let name = |hold: Arc<Hold>| hold.generation_of(recorded).map(|generation| generation.owner.clone());
        if self.get(kind, recorded).and_then(name).is_some() {
            return None;
        }
        self.of_lock(kind).into_iter().find_map(name)
    }

    fn find(&self, key: Key<'_>) -> Option<Arc<Hold>> {
        self.by_lock_and_owner.get(&key as &dyn Keyed).map(|entry| Arc::clone(&entry.key().0))
    }

    /// What this client knows of the same owner and the lock's sibling kind.
    pub(super) fn known_sibling(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        let sibling = kind.about().sibling?;
        self.find(Key { family: sibling.family, ..Key::new(kind, owner) })
    }

    /// What the same owner has of the lock's sibling kind, if it holds that.
    pub(super) fn held_sibling(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> Option<Arc<Hold>> {
        self.known_sibling(kind, owner).filter(|hold| hold.state().is_valid(Instant::now()))
    }

    /// Everything this client knows of one lock, its sibling included: whatever ends a record ends both.
    pub(crate) fn of_lock(&self, kind: &Arc<dyn Kind>) -> Vec<Arc<Hold>> {
        let (mut found, sibling) = (Vec::new(), kind.about().sibling.map(|sibling| sibling.family));
        self.for_each(|hold| {
            let family = hold.kind().about().family;
            if hold.lock_name() == kind.name() && (family == kind.about().family || Some(family) == sibling) {
                found.push(Arc::clone(hold));
            }
        });
        found
    }

    /// Looks at every hold, those included that were given away. `look` must not come back to this map.
    pub(crate) fn for_each(&self, mut look: impl FnMut(&Arc<Hold>)) {
        self.by_lock_and_owner.iter().for_each(|entry| look(&entry.key().0));
        self.given_away.iter().for_each(|hold| look(&hold));
    }

    /// A hold is about to be somebody else's to release. Its owner goes on without it, under another name; of a value,
    /// which has no other name, its next acquire finds it here.
    pub(super) fn about_to_give_away(&self, hold: &Arc<Hold>) -> ExactName {
        let name = exact_name(hold.kind(), &hold.owner());
        self.retire_names();
        self.given_away.insert(name.clone(), Arc::clone(hold));
        name
    }

    /// It is given away, or, if it was lost before, it is not.
    pub(super) fn gave_it_away(&self, hold: &Arc<Hold>, name: &ExactName, is_over: bool) {
        if !is_over {
            // it is given away already if another guard was
            let keeps = hold.standing() == Standing::GivenAway;
            self.given_away.remove_if(name, |_, kept| !keeps && Arc::ptr_eq(kept, hold));
            return;
        }
        // another guard that was let go of meanwhile may have taken it out
        self.given_away.insert(name.clone(), Arc::clone(hold));
        if let Some(sibling) = self.held_sibling(hold.kind(), &hold.caller) {
            sibling.share_its_name(&name.2);
        }
        self.forget(hold);
    }

    /// A hold is in nobody's hands any more: its owner goes on without it.
    pub(super) fn forget(&self, hold: &Arc<Hold>) {
        self.by_lock_and_owner.remove_if(&Key::of(hold) as &dyn Keyed, |Entry(kept), ()| Arc::ptr_eq(kept, hold));
    }

    /// Forgets a hold of which nothing is left: now, or a moment later, if somebody else has a handle of it.
    pub(crate) fn reap(&self, hold: &Arc<Hold>) {
        if !self.is_reaped(hold) && hold.mark_for_reaping() {
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
            // first: whoever is done with it while it is looked at, and in our hands, puts it on the list again
            hold.unmark_for_reaping();
            !self.is_reaped(&hold) && hold.mark_for_reaping()
        });
        let mut later = self.to_be_reaped();
        later.append(&mut left);
        !later.is_empty()
    }

    /// Whether a hold is not known any more, or is to be.
    fn is_reaped(&self, hold: &Arc<Hold>) -> bool {
        if hold.standing() == Standing::GivenAway {
            let name = exact_name(hold.kind(), &hold.owner());
            self.given_away.remove_if(&name, |_, kept| Arc::ptr_eq(kept, hold));
            return true;
        }
        // two handles, the map's and the caller's: nobody else can get at it while the map's shard is locked
        let reaped = self.by_lock_and_owner.remove_if(&Key::of(hold) as &dyn Keyed, |Entry(kept), ()| {
            Arc::ptr_eq(kept, hold) && Arc::strong_count(kept) == 2 && hold.leftover() == Leftover::Nothing
        });
        let is_known = || self.find(Key::of(hold)).is_some_and(|known| Arc::ptr_eq(&known, hold));
        reaped.is_some() || hold.leftover() != Leftover::Nothing || !is_known()
    }

    fn to_be_reaped(&self) -> MutexGuard<'_, Vec<Weak<Hold>>> {
        self.to_be_reaped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many holds are known, also those being released or given away.
    pub(crate) fn len(&self) -> usize {
        self.by_lock_and_owner.len() + self.given_away.len()
    }

    /// No name used so far is used for a new hold: somebody else may still send requests under one.
    pub(crate) fn retire_names(&self) {
        // whoever sees what follows (a name abandoned, a hold given away) sees this, too
        self.suffix.fetch_add(1, Ordering::AcqRel);
    }

    /// What a hold must know of others, for an acquire.
    pub(super) fn around<'a>(&self, hold: &'a Hold) -> Around<'a> {
        let (mut sibling, mut lost_sibling) = (None, None);
        if let Some(of) = hold.kind().about().sibling
            && let Some(other) = self.known_sibling(hold.kind(), &hold.caller)
        {
            let (state, now) = (other.state(), Instant::now());
            if state.is_valid(now) {
                let owner = state.owner.clone();
                // whoever holds what excludes it would wait for itself; somebody else may use the name of what is in doubt
                let refusal = if of.excludes {
                    Some(Refusal::Upgrade(owner.clone()))
                } else {
                    state.sibling_in_doubt.then_some(Refusal::SiblingInDoubt)
                };
                sibling = Some(HeldSibling { owner, refusal });
            } else if !of.excludes {
                // whoever reads inside its own writing is inside what it lost; nobody writes inside its own reading
                lost_sibling = state.lost_inside(now);
            }
        }
        Around {
            caller: &hold.caller,
            sibling,
            lost_sibling,
            suffix: self.suffix.load(Ordering::Acquire),
            value_in_doubt: hold.caller.is_value() && self.is_value_in_doubt(hold.kind(), &hold.caller),
        }
    }

    /// What keeps a first hold, which is in doubt by now, from being asked for: its owner has one of a kind that does not go
    /// with it, or waits for one in the queue, or is inside what it lost. `Ok`: the server does not agree with that one; both
    /// would have one name there, and what settles the one would end the other. Of two that ask at once, one at least sees
    /// the other.
    pub(super) fn rival(&self, hold: &Hold, count: u32) -> Option<Result<Arc<Hold>>> {
        let family = hold.kind().about().rival.filter(|_| count == 1)?;
        let other = self.find(Key { family, ..Key::new(hold.kind(), &hold.caller) })?;
        let (state, now) = (other.state(), Instant::now());
        let refusal = match (state.lost_inside(now), state.leftover()) {
            (Some((owner, reason)), _) => Refusal::Lost(owner, reason),
            (None, Leftover::Nothing) => return None,
            (None, Leftover::Doubt) if !state.is_valid(now) => {
                drop(state);
                return Some(Ok(other));
            }
            (None, Leftover::Held | Leftover::Doubt) => Refusal::NotReentrant(state.owner.clone()),
        };
        Some(Err(refusal.into_error(hold.lock_name())))
    }

    /// A late execution may still use this value.
    pub(super) fn doubt_value(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) {
        self.values_in_doubt.insert(exact_name(kind, owner));
    }

    fn is_value_in_doubt(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) -> bool {
        self.values_in_doubt.contains(&exact_name(kind, owner))
    }

    /// The server has settled what was in doubt.
    pub(super) fn doubt_is_over(&self, kind: &Arc<dyn Kind>, owner: &OwnerId) {
        self.values_in_doubt.remove(&exact_name(kind, owner));
    }
}
