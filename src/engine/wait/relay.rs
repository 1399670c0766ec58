//! The slot through which a hold passes from its holder to a waiter of the same wait queue: see
//! [`HoldState::hand_off`](crate::engine::hold::state::HoldState::hand_off).
//!
//! Hand-offs have permits of their own, for the waiters that can take them. A waiter that is
//! dropped passes its permit on; the last one releases the hold in the slot. A future that is no
//! longer polled would keep it there: a hold that no waiter takes within 20 ms and a round trip is
//! released by `janitor::expire_relays`. While a series goes on, newcomers join the queue without a
//! request: the lock is known to be busy, and its release will be heard. `x` and `{x}` share a
//! channel: only the lock of the queue's first waiter is handed off.

use std::sync::{Arc, PoisonError};

use nestlock_wire::clock::Instant;

use crate::{
    engine::hold::{Entered, hand_off::HAND_OFF_WINDOW},
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
    /// A hold that a waiter may take: the server records it, and no task has it.
    hand_off: Option<Entered>,
    /// Number of waiters that could take it.
    takers: usize,
    /// Number of hand-offs put here so far.
    number: u64,
    /// Whether a task runs that expires unclaimed hand-offs.
    has_expiry: bool,
    /// A hand-off was taken to be released, and is not released yet.
    is_expiring: bool,
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
    Unclaimed(Entered),
}

impl Relay {
    pub(super) fn new() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(0)),
            slot: Mutex::default(),
        }
    }

    fn slot(&self) -> MutexGuard<'_, RelaySlot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn join(&self) {
        self.slot().takers += 1;
    }

    /// Removes a taker. If it was the last one, returns the hand-off that is left in the slot.
    pub(super) fn leave(&self) -> Option<Entered> {
        let mut slot = self.slot();
        slot.takers -= 1;
        if slot.takers == 0 {
            slot.hand_off.take()
        } else {
            None
        }
    }

    /// Puts the hand-off that `give` returns into the slot, if there is a taker and the slot is
    /// free. Returns `None` if it did not; `Some(true)` if the caller must start the expiry task.
    pub(crate) fn hand_off(&self, give: impl FnOnce() -> Option<Entered>) -> Option<bool> {
        let mut slot = self.slot();
        if slot.takers == 0 {
            // The holder releases the lock instead, which may be free before the message arrives: a
            // waiter that comes now must send its request.
            slot.goes_on_until = None;
        }
        if slot.closed || slot.takers == 0 || slot.hand_off.is_some() {
            return None;
        }
        let hand_off = give()?;
        slot.goes_on_until = Some(hand_off.1.generation.confirmed.at + HAND_OFF_WINDOW);
        slot.hand_off = Some(hand_off);
        slot.number += 1;
        let has_expiry = std::mem::replace(&mut slot.has_expiry, true);
        // Unlock first: a permit wakes a waiter, and wakers are user code.
        drop(slot);
        self.permits.add_permits(1);
        Some(!has_expiry)
    }

    /// Takes the hand-off, if there is one.
    pub(super) fn take(&self) -> Option<Entered> {
        self.slot().hand_off.take()
    }

    /// Returns the number of the hand-off in the slot, or of one that is being released. Returns
    /// `None` if there is none.
    pub(crate) fn lying(&self) -> Option<u64> {
        let slot = self.slot();
        (slot.hand_off.is_some() || slot.is_expiring).then_some(slot.number)
    }

    /// Reports that the hand-off from [`Relay::expire`] is being settled.
    pub(crate) fn expired(&self) {
        self.slot().is_expiring = false;
    }

    /// Returns whether a request for the lock would be pointless: its holder hands it on or
    /// releases it, and this queue learns of either.
    pub(crate) fn goes_on(&self, now: Instant) -> bool {
        self.slot().goes_on_until.is_some_and(|until| now < until)
    }

    /// Takes a hand-off that is unclaimed since `seen` hand-offs were put here.
    pub(crate) fn expire(&self, seen: u64) -> RelayExpiry {
        let mut slot = self.slot();
        if slot.number != seen {
            return RelayExpiry::Busy(slot.number);
        }
        slot.has_expiry = false;
        let unclaimed = slot.hand_off.take();
        // until its release is on the janitor's list: `idle` would miss it in between
        slot.is_expiring = unclaimed.is_some();
        unclaimed.map_or(RelayExpiry::Quiet, RelayExpiry::Unclaimed)
    }

    /// Closes the slot: no more holds are handed off.
    pub(super) fn close(&self) {
        self.permits.close();
        self.slot().closed = true;
    }
}
