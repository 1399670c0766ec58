//! Wait queues, where the waiters of one channel sleep. Permits wake them, and a shared instant
//! says when one of them polls.
//!
//! The wait queue of a read-write lock has two sides. A message, `0` or `1`, wakes all readers, since
//! they may hold the lock together, and one writer: the release of the next holder wakes the next
//! writer. That of permits has a side for each number of permits that waiters want. A
//! message is the number given back, and wakes on each side those that could get in with them.
//! Too few for one waiter is too few for its whole side, and for no other.
//!
//! A semaphore has a permit for each waiter that may try; the message `0` adds one, `1` one per
//! waiter. A permit that leads to no try wakes the next waiter. A message that finds no waiter is
//! kept, one per queue: a waiter may have tried before it came, and be about to sleep. Waiters of
//! one side share the instant of the next poll; those that keep a place on the server by polling
//! have a queue, or a side, of their own.

use std::sync::{Arc, OnceLock, PoisonError};

use nestlock_wire::clock::Instant;

use super::{awaited::Awaited, relay::Relay};

use crate::{
    engine::{
        hold::{Entered, granted::Granted},
        kind::{HEARD_SIDE, Kind, Sharing},
    },
    meter::Source,
    sync::{
        Mutex, MutexGuard, Semaphore,
        atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering},
    },
};

/// The waiters of one channel.
#[derive(Debug)]
pub(crate) struct WaitQueue {
    pub(super) channel: Arc<str>,
    pub(super) awaited: Awaited,
    /// Waiters that need the lock exclusively, or one permit.
    first: SideQueue,
    /// Waiters that may share the lock, if it is a read-write lock. Of permits: those that want two,
    /// three, and so on, each since its first waiter came.
    others: Box<[OnceLock<Box<SideQueue>>]>,
    /// The slot for hand-offs between its waiters.
    pub(crate) relay: Relay,
    /// The last grant, until a waiter takes it.
    granted: Mutex<Option<Granted>>,
    /// Set if a subscription was requested and listening has not stopped since. `SeqCst`, like the
    /// waiter counts: a waiter is counted first and then reads this flag, and stopping clears the
    /// flag first and then reads the counts. At least one of the two must see the other.
    listened: AtomicBool,
    /// Set by the first confirmed subscription. Each later one means that messages may have been
    /// missed. Only the subscribing task swaps it.
    was_live: AtomicBool,
    /// Set if the last wake-up was for messages that may have been missed. A hint, for metrics
    /// only.
    by_reconnect: AtomicBool,
    /// Its waiters cannot have missed a message that concerns them before its subscription.
    quiet: bool,
    /// The ACL user may not subscribe: waiters poll, and a reconnect does not subscribe again.
    pub(super) denied: AtomicBool,
    /// The number of the node that sends its messages.
    node: AtomicU16,
}

/// One side of a wait queue: waiters that are woken by the same rules.
#[derive(Debug)]
pub(super) struct SideQueue {
    pub(super) permits: Arc<Semaphore>,
    waiters: AtomicUsize,
    /// When all were last woken. A waiter whose attempt began earlier and that came to wait later
    /// missed that.
    notified_all_at: Mutex<Option<Instant>>,
    /// Set if the last wake-up or poll was for one waiter alone. If that waiter gets a lock that
    /// others may share, no message wakes the others, so it must.
    ///
    /// A hint: a stale value costs an attempt in vain, or a wait until the next poll.
    pub(super) notified_one: AtomicBool,
    /// When one waiter polls without having been woken.
    next_poll: Mutex<Instant>,
    /// Of permits: since when each waiter that gets one wakes the next, because messages about
    /// several may have been missed. `None`: a waiter has found none left since.
    chain: Mutex<Option<Instant>>,
}

impl SideQueue {
    pub(super) fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            waiters: AtomicUsize::new(0),
            notified_all_at: Mutex::new(None),
            notified_one: AtomicBool::new(false),
            next_poll: Mutex::new(Instant::now()),
            chain: Mutex::new(None),
        }
    }

    /// Returns a side to which messages may have come before its first waiter, which may have made
    /// its attempt before them.
    fn late() -> Self {
        let side = Self::new();
        side.begin_chain();
        side.wake_some(1);
        side
    }

    pub(super) fn wake_one(&self) {
        self.notified_one.store(true, Ordering::Release);
        self.wake_some(1);
    }

    pub(super) fn wake_all(&self) {
        self.notified_one.store(false, Ordering::Release);
        // Keep the lock until the permits are added. A waiter that read the new time before would
        // retry without its permit, which would then wake another waiter.
        let mut told_all = self.notified_all();
        *told_all = Some(Instant::now());
        self.wake_some(usize::MAX);
    }

    /// Begins a chain: see [`SideQueue::chain`].
    pub(super) fn begin_chain(&self) {
        *self.chain() = Some(Instant::now());
    }

    /// Wakes the next waiter of a chain, after one got a permit.
    pub(super) fn go_on(&self) {
        if self.chain().is_some() {
            self.wake_some(1);
        }
    }

    /// Wakes `n` waiters. If fewer sleep, some may have made their attempt and be about to wait: each
    /// that gets in wakes the next.
    fn wake_exactly(&self, n: usize) {
        let asleep = self
            .waiters()
            .saturating_sub(self.permits.available_permits());
        if n > asleep {
            self.begin_chain();
        }
        self.wake_some(n);
    }

    /// Ends the chain, unless it began after this request was made, which found no permit.
    pub(super) fn end_chain(&self, tried: Instant) {
        let mut chain = self.chain();
        *chain = chain.filter(|began| *began >= tried);
    }

    fn chain(&self) -> MutexGuard<'_, Option<Instant>> {
        self.chain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes up to `n` waiters.
    pub(super) fn wake_some(&self, n: usize) {
        // One permit even without waiters: one may have made its attempt and be about to wait.
        let missing = self
            .waiters()
            .max(1)
            .saturating_sub(self.permits.available_permits());
        self.permits.add_permits(missing.min(n));
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

    pub(super) fn notified_all(&self) -> MutexGuard<'_, Option<Instant>> {
        self.notified_all_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_poll(&self) -> MutexGuard<'_, Instant> {
        self.next_poll
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitQueue {
    pub(super) fn new(awaited: Awaited, channel: &Arc<str>, quiet: bool) -> Self {
        let about = awaited.about();
        let other = |number| {
            // no message has come yet
            if about.sibling.is_some() || number == about.sharing.side() {
                Box::new(SideQueue::new()).into()
            } else {
                OnceLock::new()
            }
        };
        Self {
            channel: Arc::clone(channel),
            awaited,
            first: SideQueue::new(),
            others: (1..about.sides()).map(other).collect(),
            relay: Relay::new(),
            granted: Mutex::new(None),
            listened: AtomicBool::new(true),
            was_live: AtomicBool::new(false),
            by_reconnect: AtomicBool::new(false),
            quiet,
            denied: AtomicBool::new(false),
            node: AtomicU16::new(0),
        }
    }

    /// Returns whether its messages come from node `home`.
    pub(super) fn is_at(&self, home: u16) -> bool {
        self.node() == home
    }

    /// Returns the number of the node that sends its messages.
    pub(super) fn node(&self) -> u16 {
        self.node.load(Ordering::Acquire)
    }

    /// Sets the node that sends its messages.
    pub(super) fn move_to(&self, home: u16) {
        self.node.store(home, Ordering::Release);
    }

    /// Returns whether holds of this lock are handed off in this queue. It compares the names
    /// because the locks `x` and `{x}` share a channel.
    pub(crate) fn is_of(&self, kind: &Arc<dyn Kind>) -> bool {
        self.awaited.name() == kind.name() && self.awaited.about().family == kind.about().family
    }

    /// Returns a side: see [`Sharing::side`].
    pub(super) fn side(&self, number: usize) -> &SideQueue {
        let other = number.checked_sub(1).and_then(|at| self.others.get(at));
        other.map_or(&self.first, |side| {
            side.get_or_init(|| Box::new(SideQueue::late()))
        })
    }

    pub(super) fn sides(&self) -> impl Iterator<Item = &SideQueue> {
        // The sharing side comes first. If a writer comes second, it waits only for the readers
        // that are in, because it holds back later ones. Readers that come second cannot hold back
        // later writers.
        self.others().map(|(_, side)| side).chain([&self.first])
    }

    /// Returns the sides that have had a waiter, except the first, and their numbers.
    fn others(&self) -> impl Iterator<Item = (usize, &SideQueue)> {
        let numbered = self.others.iter().enumerate();
        numbered.filter_map(|(at, side)| Some((at + 1, &**side.get()?)))
    }

    /// Wakes one waiter, because the lock may be free for one holder. With two sides, or if all waiters
    /// may go, does the same as [`WaitQueue::wake_all`].
    pub(super) fn wake_one(&self) {
        if self.others.is_empty() && self.awaited.about().sharing == Sharing::Exclusive {
            self.first.wake_one();
        } else {
            self.wake_all();
        }
    }

    /// Returns whether its messages are numbers of permits.
    pub(super) fn has_permits(&self) -> bool {
        matches!(self.awaited.about().sharing, Sharing::Counted { .. })
    }

    /// Begins a chain on each side, and wakes the first waiters.
    fn wake_chains(&self) {
        for side in self.sides() {
            side.begin_chain();
            side.wake_some(1);
        }
    }

    /// Wakes the waiters that may get in with these permits. Fewer than one of them wants were
    /// available before, or it would not wait: so rounded up.
    /// `is_in_line`: the waiters of the other kind were told already.
    pub(super) fn wake_for(&self, permits: usize, is_in_line: bool) {
        for (number, side) in self.others() {
            if number < HEARD_SIDE {
                side.wake_exactly(permits.div_ceil(number + 1));
            } else if !is_in_line {
                // its request tells the first of the queue
                side.wake_some(1);
            }
        }
        self.first.wake_exactly(permits);
    }

    /// Stores a grant and wakes one waiter to take it.
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

    /// Wakes all waiters, because the lock may be free for many. With two sides, wakes all that may
    /// share it and one that needs it exclusively.
    pub(super) fn wake_all(&self) {
        if self.others.is_empty() {
            return self.first.wake_all();
        }
        self.side(1).wake_all();
        self.first.wake_one();
    }

    /// Marks the subscription as confirmed. The first time, wakes one waiter of each side, unless
    /// the queue is `quiet`: either it gets the lock and its release will be heard, or another
    /// holder has the lock, whose release will be heard. Later, wakes all. Of permits, begins a chain
    /// each time.
    pub(super) fn live(&self) {
        if self.was_live.swap(true, Ordering::AcqRel) {
            self.wake_all_queues();
        } else if self.has_permits() && !self.quiet {
            self.wake_chains();
        } else if !self.quiet {
            self.sides().for_each(SideQueue::wake_one);
        }
    }

    pub(super) fn waiters(&self) -> usize {
        self.sides().map(SideQueue::waiters).sum()
    }

    /// Returns the number of waiters for its lock: without those that also wait elsewhere.
    pub(super) fn own_waiters(&self) -> usize {
        let heard = self.others().filter(|(number, _)| *number == HEARD_SIDE);
        self.waiters() - heard.map(|(_, side)| side.waiters()).sum::<usize>()
    }

    /// Wakes all waiters to check the lock, because messages may have been missed; of permits, begins
    /// a chain.
    pub(super) fn wake_all_queues(&self) {
        // a waiter that hears another kind wakes there, and its request tells the first of the queue
        let lock = self.awaited.lock();
        if lock.is_some_and(|kind| kind.heard().is_some()) {
            return;
        }
        self.by_reconnect.store(true, Ordering::Relaxed);
        if self.has_permits() {
            self.wake_chains();
        } else {
            self.sides().for_each(SideQueue::wake_all);
        }
    }

    /// Records that a message causes the next wake-up.
    pub(super) fn notify(&self) {
        if self.by_reconnect.load(Ordering::Relaxed) {
            self.by_reconnect.store(false, Ordering::Relaxed);
        }
    }

    /// Returns what caused the last wake-up.
    pub(super) fn notified_by(&self) -> Source {
        if self.by_reconnect.load(Ordering::Relaxed) {
            Source::Reconnect
        } else {
            Source::Message
        }
    }

    /// Marks the queue as listened to. Returns whether it was not: the caller must then request a
    /// subscription.
    pub(super) fn must_be_listened_to(&self) -> bool {
        !self.listened.swap(true, Ordering::SeqCst)
    }

    /// Closes the permits, so that all waits end.
    pub(super) fn close_permits(&self) {
        self.sides().for_each(|side| side.permits.close());
        self.relay.close();
    }

    /// Closes the queue for good. Returns the hand-off in its slot, which no waiter will take.
    pub(super) fn close(&self) -> Option<Entered> {
        self.close_permits();
        self.relay.take()
    }

    /// Returns whether messages are received. A broken connection may still lose some; then all
    /// waiters are woken.
    pub(super) fn is_live(&self) -> bool {
        self.was_live.load(Ordering::Acquire)
    }

    /// Stops listening unless more than `so_many` waiters are there. Returns whether it stopped.
    /// The next waiter requests a subscription again.
    pub(super) fn stop_unless_more_than(&self, so_many: usize) -> bool {
        // Clear the flag first: a waiter that comes now is either counted below or requests
        // listening.
        self.listened.store(false, Ordering::SeqCst);
        let goes_on = self.waiters() > so_many;
        if goes_on {
            self.listened.store(true, Ordering::SeqCst);
        }
        !goes_on
    }

    /// Takes back the permits if no waiter is left to use them. Returns whether there were any.
    pub(super) fn take_unclaimed(&self) -> bool {
        self.waiters() == 0 && self.first.permits.forget_permits(usize::MAX) > 0
    }
}
