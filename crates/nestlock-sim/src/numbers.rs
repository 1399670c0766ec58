//! What the ledger knows of numbers that any task may change: how many permits a semaphore has, and
//! how many a latch still counts.
//!
//! A change whose outcome is unknown may be executed at any later time, so a number is a range. A
//! server that forgets everything also forgets which changes it has made, and makes a late one again.

use std::collections::{BTreeSet, VecDeque};

use nestlock::Error;

use crate::{
    clock::{SECOND, now},
    kinds::PERMITS,
};

/// How long an acquire may be in flight: it took its permits of the number at some time in between.
const IN_FLIGHT: u64 = 40 * SECOND;

/// How long after its call a change may arrive again.
const LATE: u64 = 20 * SECOND;

/// What is known of a change after its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Changed {
    Once,
    Never,
    /// It may have been executed, or will be.
    Unknown,
}

impl Changed {
    pub(crate) fn of<T>(outcome: Result<&T, &Error>) -> Self {
        match outcome {
            Ok(_) => Self::Once,
            // the promise of these errors
            Err(Error::Store { .. } | Error::Closed | Error::InvalidCount { .. }) => Self::Never,
            Err(_) => Self::Unknown,
        }
    }
}

/// How many permits a semaphore has, available and taken, by what its callers were told.
#[derive(Debug, Default)]
pub(crate) struct Total {
    /// The number is set. Since then, the server has not forgotten it.
    is_set: bool,
    /// How often the server has forgotten it.
    era: u32,
    /// The sum of the changes that are known to have been made.
    changed: i64,
    /// By how much those that may be made yet would lower and raise it.
    doubt: (i64, i64),
    /// The last changes that are not in doubt, and when their calls ended.
    recent: Vec<(u64, i64)>,
    /// The largest number possible since each time, the last first.
    most: VecDeque<(u64, i64)>,
}

/// A change that is in flight.
#[derive(Debug, Clone, Copy)]
#[must_use = "end it"]
pub(crate) struct Change {
    era: u32,
    by: i64,
}

impl Total {
    /// Returns the range of the number, if it is known.
    pub(crate) fn range(&self) -> Option<(i64, i64)> {
        let known = i64::from(PERMITS) + self.changed;
        self.is_set
            .then_some((known - self.doubt.0, known + self.doubt.1))
    }

    /// Returns the largest number that an acquire which ends now may have found.
    pub(crate) fn most(&self) -> i64 {
        let began = now().saturating_sub(IN_FLIGHT);
        let seen = self.most.iter();
        let until_then = seen.scan(true, |goes_on, (since, most)| {
            let takes = *goes_on;
            *goes_on = *since > began;
            takes.then_some(*most)
        });
        until_then.max().unwrap_or_else(|| i64::from(PERMITS))
    }

    fn note_most(&mut self) {
        let most = i64::from(PERMITS) + self.changed + self.doubt.1;
        self.most.push_front((now(), most));
        self.most.truncate(1_000);
    }

    pub(crate) fn set(&mut self, era: u32) {
        self.is_set |= era == self.era;
    }

    pub(crate) fn era(&self) -> u32 {
        self.era
    }

    pub(crate) fn begin(&mut self, by: i64) -> Change {
        self.doubt(by);
        self.note_most();
        Change { era: self.era, by }
    }

    fn doubt(&mut self, by: i64) {
        self.doubt.0 += (-by).max(0);
        self.doubt.1 += by.max(0);
    }

    /// `by`: how much it changed.
    pub(crate) fn end(&mut self, change: Change, by: i64, changed: Changed) {
        let is_late = change.era != self.era;
        if is_late || changed == Changed::Unknown {
            return;
        }
        self.doubt.0 -= (-change.by).max(0);
        self.doubt.1 -= change.by.max(0);
        if changed == Changed::Once {
            self.changed += by;
            self.recent.push((now(), change.by));
        }
        self.note_most();
    }

    /// The server has forgotten everything. What is in doubt may come yet.
    pub(crate) fn forget(&mut self) {
        self.is_set = false;
        self.era += 1;
        self.changed = 0;
        for (ended, by) in std::mem::take(&mut self.recent) {
            if ended + LATE > now() {
                self.doubt(by);
            }
        }
        self.note_most();
    }
}

/// How many a latch still counts, by what its callers were told.
#[derive(Debug, Default)]
pub(crate) struct Latch {
    /// Changes that began. Each may be made at any time from its beginning on, if it is not over.
    begun: u64,
    /// Changes that are over: none of them is made any more.
    over: u64,
    /// When the last of them ended.
    recent: Vec<u64>,
    /// Changes in flight whose callers have counted already. Of the next count, they would be the first.
    repeats: u64,
    set: Option<SetCount>,
    /// How often its count was set.
    sets: u64,
}

/// The last count that was set, if the latch cannot have been opened since.
#[derive(Debug)]
struct SetCount {
    count: u64,
    /// How many changes were over before.
    over_before: u64,
    /// When the task that set it knew.
    known: u64,
    /// Changes that began later, and were made.
    made: u64,
    /// Who has counted down once for all.
    callers: BTreeSet<String>,
}

/// A change of a latch that is in flight.
#[derive(Debug, Clone, Copy)]
#[must_use = "end it"]
pub(crate) struct Lowering {
    sets: u64,
    /// Its caller has not counted before.
    counts: bool,
}

impl Latch {
    pub(crate) fn over(&self) -> u64 {
        self.over
    }

    /// Its count was set, by a call that began when `over_before` changes were over.
    pub(crate) fn set(&mut self, count: u64, over_before: u64) {
        self.sets += 1;
        self.begun += std::mem::take(&mut self.repeats);
        self.set = Some(SetCount {
            count,
            over_before,
            known: now(),
            made: 0,
            callers: BTreeSet::new(),
        });
        self.check();
    }

    /// `caller`: who counts down once for all.
    pub(crate) fn begin(&mut self, caller: Option<&str>) -> Lowering {
        let has_counted = |set: &SetCount| caller.is_some_and(|it| set.callers.contains(it));
        let counts = !self.set.as_ref().is_some_and(has_counted);
        if counts {
            self.begun += 1;
        } else {
            self.repeats += 1;
        }
        self.check();
        Lowering {
            sets: self.sets,
            counts,
        }
    }

    pub(crate) fn end(&mut self, lowering: Lowering, caller: Option<&str>, changed: Changed) {
        if changed == Changed::Unknown {
            return;
        }
        if !lowering.counts {
            // otherwise it is in doubt, as if it were unknown
            self.repeats -= u64::from(lowering.sets == self.sets);
            return;
        }
        self.over += 1;
        self.recent.push(now());
        if let Some(set) = &mut self.set
            && lowering.sets == self.sets
            && changed == Changed::Once
        {
            match caller {
                // it may have counted before the call
                Some(caller) => _ = set.callers.insert(caller.to_owned()),
                None => set.made += 1,
            }
        }
    }

    /// Forgets the count if it may be 0 by now.
    fn check(&mut self) {
        if self.least() == 0 {
            self.set = None;
        }
    }

    fn least(&self) -> u64 {
        let left = |set: &SetCount| set.count.saturating_sub(self.begun - set.over_before);
        self.set.as_ref().map_or(0, left)
    }

    /// Returns the range of its count, and since when it cannot have been 0. `None`: unknown.
    pub(crate) fn range(&self) -> Option<(u64, u64, u64)> {
        let set = self.set.as_ref()?;
        Some((self.least(), set.count - set.made, set.known))
    }

    /// The server has forgotten everything. What is in doubt may come yet.
    pub(crate) fn forget(&mut self) {
        self.set = None;
        self.sets += 1;
        self.begun += std::mem::take(&mut self.repeats);
        let again = std::mem::take(&mut self.recent);
        self.over -= again.iter().filter(|ended| **ended + LATE > now()).count() as u64;
    }
}
