//! Where a hold lies that goes from one waiter of a gate to the next: see [`Baton`].

use std::sync::{Arc, PoisonError};

use crate::{
    clock::Instant,
    engine::{
        baton::{Baton, ROUND},
        jobs::Ghost,
    },
    sync::{Mutex, MutexGuard, Semaphore},
};

/// Where a gate's waiters hand a hold on. Only those *take* part who could go on with it as it is.
#[derive(Debug)]
pub(crate) struct Relay {
    /// One for each baton that was put here. One may be left of what nobody has taken in time: whoever gets it finds no
    /// baton, and sleeps on.
    pub(super) permits: Arc<Semaphore>,
    course: Mutex<Course>,
}

#[derive(Debug, Default)]
struct Course {
    baton: Option<Baton>,
    /// How many wait for it.
    takers: usize,
    /// Counts the batons that were put here.
    number: u64,
    /// Somebody sees to it that no baton stays here.
    is_minded: bool,
    /// The lock is held by this client until then, as far as it knows.
    goes_on_until: Option<Instant>,
    closed: bool,
}

/// What came of [`Relay::mind`].
#[derive(Debug)]
pub(crate) enum Minded {
    /// Nothing was put here since; nobody minds it any more.
    Quiet,
    /// So many batons were put here.
    Busy(u64),
    /// Nobody has taken it since.
    Left(Baton),
}

impl From<Baton> for Ghost {
    /// To be released: its name was retired when it was handed on.
    fn from(Baton { kind, owner, leg, ends, .. }: Baton) -> Self {
        Self { kind, owner, moves_to: None, epoch: leg.epoch, ends }
    }
}

impl Relay {
    pub(super) fn new() -> Self {
        Self { permits: Arc::new(Semaphore::new(0)), course: Mutex::default() }
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn join(&self) {
        self.course().takers += 1;
    }

    /// One taker less. What lies there and nobody is left to take.
    pub(super) fn leave(&self) -> Option<Baton> {
        let mut course = self.course();
        course.takers -= 1;
        if course.takers == 0 { course.baton.take() } else { None }
    }

    /// Puts what `give` gives here, if somebody waits for it. `None`: it did not. `Some(true)`: somebody must mind it now.
    pub(crate) fn hand_on(&self, give: impl FnOnce() -> Option<Baton>) -> Option<bool> {
        let mut course = self.course();
        if course.takers == 0 {
            // it is released, and may be free before its message is here
            course.goes_on_until = None;
        }
        if course.closed || course.takers == 0 || course.baton.is_some() {
            return None;
        }
        let baton = give()?;
        course.goes_on_until = Some(baton.leg.confirmed + ROUND);
        course.baton = Some(baton);
        course.number += 1;
        let is_minded = std::mem::replace(&mut course.is_minded, true);
        drop(course);
        self.permits.add_permits(1);
        Some(!is_minded)
    }

    /// Takes what lies here, if `take` can.
    pub(crate) fn take<T>(&self, take: impl FnOnce(&Baton) -> Option<T>) -> Option<T> {
        let mut course = self.course();
        let taken = take(course.baton.as_ref()?)?;
        course.baton = None;
        Some(taken)
    }

    /// Which baton lies here, of all that were put here.
    pub(crate) fn lying(&self) -> Option<u64> {
        let course = self.course();
        course.baton.as_ref().map(|_| course.number)
    }

    pub(crate) fn has_baton(&self) -> bool {
        self.course().baton.is_some()
    }

    /// Whether to ask the server for the lock is in vain: whoever has it hands it on, or releases it, and that is heard of.
    pub(crate) fn goes_on(&self, now: Instant) -> bool {
        self.course().goes_on_until.is_some_and(|until| now < until)
    }

    /// What lies here longer than since `seen` batons were put here.
    pub(crate) fn mind(&self, seen: u64) -> Minded {
        let mut course = self.course();
        if course.number != seen {
            return Minded::Busy(course.number);
        }
        course.is_minded = false;
        course.baton.take().map_or(Minded::Quiet, Minded::Left)
    }

    /// Looks at what lies here, and at what else holds a record, while nothing is handed on.
    pub(crate) fn look(&self, look: impl FnOnce(&mut Option<Baton>)) {
        look(&mut self.course().baton);
    }

    /// Nothing is handed on any more.
    pub(super) fn close(&self) {
        self.permits.close();
        self.course().closed = true;
    }

    /// What lies here is nobody's any more.
    pub(super) fn take_back(&self) -> Option<Baton> {
        self.course().baton.take()
    }
}
