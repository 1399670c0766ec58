//! The slot through which a hold passes from one waiter of a wait queue to the next: see
//! [`HandOff`].

use std::sync::{Arc, PoisonError};

use nestlock_wire::clock::Instant;

use crate::{
    engine::{
        hand_off::{HAND_OFF_WINDOW, HandOff},
        jobs::UnsettledRequest,
    },
    sync::{Mutex, MutexGuard, Semaphore},
};

/// A wait queue's hand-off slot. Only waiters that could use such a hold as it is are takers.
#[derive(Debug)]
pub(crate) struct Relay {
    /// One permit for each hand-off. A hand-off that expires leaves its permit behind: the waiter
    /// that gets it finds no hand-off and sleeps on.
    pub(super) permits: Arc<Semaphore>,
    slot: Mutex<RelaySlot>,
}

#[derive(Debug, Default)]
struct RelaySlot {
    hand_off: Option<HandOff>,
    /// Number of waiters that could take it.
    takers: usize,
    /// Number of hand-offs put here so far.
    number: u64,
    /// A task runs that expires unclaimed hand-offs.
    has_expiry: bool,
    /// This client holds the lock until then, as far as it knows.
    goes_on_until: Option<Instant>,
    closed: bool,
}

/// The result of [`Relay::expire`].
#[derive(Debug)]
pub(crate) enum RelayExpiry {
    /// The slot is empty and no hand-off was put here since. The expiry task ends.
    Quiet,
    /// Hand-offs were put here since: the number so far.
    Busy(u64),
    /// No waiter took this hand-off in time.
    Unclaimed(HandOff),
}

impl From<HandOff> for UnsettledRequest {
    /// Makes the request that releases a hand-off. Its name was retired when it was handed on.
    fn from(
        HandOff {
            kind,
            owner,
            hop,
            ends,
            ..
        }: HandOff,
    ) -> Self {
        Self {
            kind,
            owner,
            moves_to: None,
            epoch: hop.epoch,
            ends,
        }
    }
}

impl Relay {
    pub(super) fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            slot: Mutex::default(),
        }
    }

    fn course(&self) -> MutexGuard<'_, RelaySlot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn join(&self) {
        self.course().takers += 1;
    }

    /// Removes a taker. If it was the last one, returns the hand-off that is left in the slot.
    pub(super) fn leave(&self) -> Option<HandOff> {
        let mut course = self.course();
        course.takers -= 1;
        if course.takers == 0 {
            course.hand_off.take()
        } else {
            None
        }
    }

    /// Puts the hand-off that `give` returns into the slot, if there is a taker and the slot is
    /// free. Returns `None` if it did not; `Some(true)` if the caller must start the expiry task.
    pub(crate) fn hand_on(&self, give: impl FnOnce() -> Option<HandOff>) -> Option<bool> {
        let mut course = self.course();
        if course.takers == 0 {
            // The holder releases the lock instead, which may be free before the message arrives: a
            // waiter that comes now must send its request.
            course.goes_on_until = None;
        }
        if course.closed || course.takers == 0 || course.hand_off.is_some() {
            return None;
        }
        let hand_off = give()?;
        course.goes_on_until = Some(hand_off.hop.confirmed + HAND_OFF_WINDOW);
        course.hand_off = Some(hand_off);
        course.number += 1;
        let is_minded = std::mem::replace(&mut course.has_expiry, true);
        drop(course);
        self.permits.add_permits(1);
        Some(!is_minded)
    }

    /// Takes the hand-off, if there is one and `take` accepts it.
    pub(crate) fn take<T>(&self, take: impl FnOnce(&HandOff) -> Option<T>) -> Option<T> {
        let mut course = self.course();
        let taken = take(course.hand_off.as_ref()?)?;
        course.hand_off = None;
        Some(taken)
    }

    /// Returns the number of the hand-off in the slot. Returns `None` if the slot is empty.
    pub(crate) fn lying(&self) -> Option<u64> {
        let course = self.course();
        course.hand_off.as_ref().map(|_| course.number)
    }

    pub(crate) fn has_hand_off(&self) -> bool {
        self.course().hand_off.is_some()
    }

    /// Returns whether a request for the lock would be pointless: its holder hands it on or
    /// releases it, and this queue learns of either.
    pub(crate) fn goes_on(&self, now: Instant) -> bool {
        self.course().goes_on_until.is_some_and(|until| now < until)
    }

    /// Takes a hand-off that is unclaimed since `seen` hand-offs were put here.
    pub(crate) fn expire(&self, seen: u64) -> RelayExpiry {
        let mut course = self.course();
        if course.number != seen {
            return RelayExpiry::Busy(course.number);
        }
        course.has_expiry = false;
        course
            .hand_off
            .take()
            .map_or(RelayExpiry::Quiet, RelayExpiry::Unclaimed)
    }

    /// Runs `look` on the slot under its mutex, so that no hold is handed on in between.
    pub(crate) fn with_slot(&self, look: impl FnOnce(&mut Option<HandOff>)) {
        look(&mut self.course().hand_off);
    }

    /// Closes the slot: no hold is handed on any more.
    pub(super) fn close(&self) {
        self.permits.close();
        self.course().closed = true;
    }

    /// Takes the hand-off that no waiter takes any more.
    pub(super) fn take_back(&self) -> Option<HandOff> {
        self.course().hand_off.take()
    }
}
