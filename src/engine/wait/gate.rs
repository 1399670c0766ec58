//! Where the waiters of one channel sleep: permits for those who are told, and a time at which one looks.
//!
//! The gate of a read-write lock has a side for those who may hold the lock together, who are all woken by any message,
//! and one for the others, of whom one is: it gets the lock, or somebody else has it, whose release tells the next.

use std::sync::{Arc, PoisonError};

use super::relay::Relay;
use crate::{
    clock::Instant,
    engine::{baton::Baton, kind::Kind, turn::Granted},
    meter::Source,
    sync::{
        Mutex, MutexGuard, Semaphore,
        atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering},
    },
};

/// Where the waiters of one channel sleep.
#[derive(Debug)]
pub(crate) struct Gate {
    pub(super) channel: Arc<str>,
    /// The lock that its first waiter waits for.
    pub(super) kind: Arc<dyn Kind>,
    /// Those who want the lock for themselves.
    alone: Side,
    /// Those who may hold it together, where the lock has two sides.
    together: Option<Box<Side>>,
    /// Where its waiters hand the lock on.
    pub(crate) relay: Relay,
    /// Who was granted the lock last.
    granted: Mutex<Option<Granted>>,
    /// Listening was asked for, and nobody has stopped since. Sequentially consistent, as the number of waiters: a waiter is
    /// counted and then looks here, whoever stops says so here and then counts, and one must see the other.
    listened: AtomicBool,
    /// Swapped by the task that subscribes alone. It was subscribed to once; from then on, a subscription means that messages may have been missed.
    was_live: AtomicBool,
    /// Its waiters were told last since messages may have been missed. A hint, for what is counted.
    by_reconnect: AtomicBool,
    /// What happened before its subscription is nothing to its waiters.
    quiet: bool,
    /// The ACL user may not listen: waiters poll, and nobody subscribes again while they do.
    pub(super) denied: AtomicBool,
    /// The number of the node that its messages come from.
    home: AtomicU16,
}

/// The waiters of a gate that are told alike.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) permits: Arc<Semaphore>,
    waiters: AtomicUsize,
    /// When all were told last: whoever tried before, and comes to wait afterwards, was not.
    told_all: Mutex<Option<Instant>>,
    /// Somebody tries alone. If it gets a lock that others may hold with it, nobody else tells them.
    ///
    /// A hint: read wrongly, it costs a try that is made in vain, or one that is made at the next look.
    pub(super) told_one: AtomicBool,
    /// The next time that one waiter tries without having been told to.
    next_poll: Mutex<Instant>,
}

impl Side {
    pub(super) fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            waiters: AtomicUsize::new(0),
            told_all: Mutex::new(None),
            told_one: AtomicBool::new(false),
            next_poll: Mutex::new(Instant::now()),
        }
    }

    pub(super) fn wake_one(&self) {
        self.told_one.store(true, Ordering::Release);
        // one also where nobody waits: somebody may have tried already, and be about to wait
        if self.permits.available_permits() < self.waiters().max(1) {
            self.permits.add_permits(1);
        }
    }

    pub(super) fn wake_all(&self) {
        self.told_one.store(false, Ordering::Release);
        // locked until the permits are there: who looks in between would try without its own, which then wakes another
        let mut told_all = self.told_all();
        *told_all = Some(Instant::now());
        let missing = self.waiters().max(1).saturating_sub(self.permits.available_permits());
        self.permits.add_permits(missing);
    }

    pub(super) fn waiters(&self) -> usize {
        self.waiters.load(Ordering::SeqCst)
    }

    pub(super) fn add_waiter(&self) {
        self.waiters.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn remove_waiter(&self) {
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn told_all(&self) -> MutexGuard<'_, Option<Instant>> {
        self.told_all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_poll(&self) -> MutexGuard<'_, Instant> {
        self.next_poll.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate {
    pub(super) fn new(kind: &Arc<dyn Kind>, channel: &Arc<str>, quiet: bool) -> Self {
        Self {
            channel: Arc::clone(channel),
            kind: Arc::clone(kind),
            alone: Side::new(),
            together: kind.about().has_two_sides().then(|| Box::new(Side::new())),
            relay: Relay::new(),
            granted: Mutex::new(None),
            listened: AtomicBool::new(true),
            was_live: AtomicBool::new(false),
            by_reconnect: AtomicBool::new(false),
            quiet,
            denied: AtomicBool::new(false),
            home: AtomicU16::new(0),
        }
    }

    /// Whether its messages come from this node.
    pub(super) fn is_at(&self, home: u16) -> bool {
        self.home() == home
    }

    /// The number of that node.
    pub(super) fn home(&self) -> u16 {
        self.home.load(Ordering::Acquire)
    }

    /// Its messages come from this node, from now on.
    pub(super) fn move_to(&self, home: u16) {
        self.home.store(home, Ordering::Release);
    }

    /// Whether holds of this lock are handed on here: `x` and `{x}` have one channel.
    pub(crate) fn is_of(&self, kind: &Arc<dyn Kind>) -> bool {
        self.kind.name() == kind.name() && self.kind.about().family == kind.about().family
    }

    pub(super) fn side(&self, shares: bool) -> &Side {
        self.together.as_deref().filter(|_| shares).unwrap_or(&self.alone)
    }

    pub(super) fn sides(&self) -> impl Iterator<Item = &Side> {
        // those who may be in together first: a writer that comes second waits for them alone, since it holds the next
        // ones back; they have no such means against the next writers
        self.together.as_deref().into_iter().chain([&self.alone])
    }

    /// The lock may be free for one.
    pub(super) fn wake_one(&self) {
        match &self.together {
            Some(_) => self.wake_all(),
            None => self.alone.wake_one(),
        }
    }

    /// The lock was granted to one.
    pub(super) fn grant(&self, granted: Granted) {
        *self.granted() = Some(granted);
        self.wake_one();
    }

    pub(super) fn take_granted(&self) -> Option<Granted> {
        self.granted().take()
    }

    fn granted(&self) -> MutexGuard<'_, Option<Granted>> {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock may be free for many: but only one of those who want it alone can have it.
    pub(super) fn wake_all(&self) {
        match &self.together {
            Some(together) => {
                together.wake_all();
                self.alone.wake_one();
            }
            None => self.alone.wake_all(),
        }
    }

    /// The subscription has arrived. The first time, one waiter tries again: it gets the lock, and its release is
    /// heard; or somebody has the lock, whose release will be. Later, all do.
    pub(super) fn live(&self) {
        if self.was_live.swap(true, Ordering::AcqRel) {
            self.wake_both_sides();
        } else if !self.quiet {
            self.sides().for_each(Side::wake_one);
        }
    }

    pub(super) fn waiters(&self) -> usize {
        self.sides().map(Side::waiters).sum()
    }

    /// Messages may have been missed: everybody looks.
    pub(super) fn wake_both_sides(&self) {
        self.by_reconnect.store(true, Ordering::Relaxed);
        self.sides().for_each(Side::wake_all);
    }

    /// A message came, which tells its waiters.
    pub(super) fn hear(&self) {
        if self.by_reconnect.load(Ordering::Relaxed) {
            self.by_reconnect.store(false, Ordering::Relaxed);
        }
    }

    /// What its waiters were told by last.
    pub(super) fn told_by(&self) -> Source {
        if self.by_reconnect.load(Ordering::Relaxed) { Source::Reconnect } else { Source::Message }
    }

    /// Whether somebody has to ask for listening; from here on, this caller.
    pub(super) fn must_be_listened_to(&self) -> bool {
        !self.listened.swap(true, Ordering::SeqCst)
    }

    /// Turns its waiters away.
    pub(super) fn turn_away(&self) {
        self.sides().for_each(|side| side.permits.close());
        self.relay.close();
    }

    /// The same for good. What its waiters were about to hand on is nobody's any more.
    pub(super) fn close(&self) -> Option<Baton> {
        self.turn_away();
        self.relay.take_back()
    }

    /// Whether messages are heard, but for those that a broken connection costs: of that all are told.
    pub(super) fn is_live(&self) -> bool {
        self.was_live.load(Ordering::Acquire)
    }

    /// Ends listening, unless more than `so_many` wait: whoever comes to wait asks for it again.
    pub(super) fn stop_unless_more_than(&self, so_many: usize) -> bool {
        // first, so that a waiter who comes now either is counted or asks
        self.listened.store(false, Ordering::SeqCst);
        let goes_on = self.waiters() > so_many;
        if goes_on {
            self.listened.store(true, Ordering::SeqCst);
        }
        !goes_on
    }

    /// Takes back what nobody is left to hear.
    pub(super) fn take_unheard(&self) -> bool {
        self.waiters() == 0 && self.alone.permits.forget_permits(usize::MAX) > 0
    }
}
