//! Changes how many permits a semaphore has.

use nestlock::Semaphore;

use super::{Hold, Task, nap};
use crate::{
    checks::leave,
    kinds::PERMITS,
    ledger::{Doing, book, count, count_error, does, wrong},
    numbers::Changed,
};

impl Task {
    fn semaphore(&self, name: &str) -> Semaphore {
        let semaphore = self.clients[0].semaphore(name);
        semaphore.expect("a good name")
    }

    /// Says how many permits there are. Sometimes adds some for a while, or takes away what is
    /// available.
    pub(super) async fn change_permits(&mut self, name: &str) {
        does(self.who, Doing::Other(format!("changes {name}")));
        self.set_permits(name).await;
        match self.rng.below(20) {
            0 | 1 => {
                let more = self.rng.between(1, 2) as i32;
                self.add_permits(name, more).await;
                nap(self.rng.below(2_000)).await;
                self.add_permits(name, -more).await;
            }
            2 => {
                let taken = self.drain(name).await;
                nap(self.rng.below(500)).await;
                if taken > 0 {
                    self.add_permits(name, taken as i32).await;
                }
            }
            _ => {}
        }
    }

    async fn set_permits(&mut self, name: &str) {
        let era = book(|book| book.total(name).era());
        let semaphore = self.semaphore(name);
        match semaphore.try_set_permits(PERMITS).await {
            Ok(true) => book(|book| book.total(name).set(era)),
            Ok(false) => {}
            Err(error) => count_error(&error),
        }
    }

    async fn add_permits(&mut self, name: &str, by: i32) {
        let (semaphore, by_this) = (self.semaphore(name), i64::from(by));
        let change = book(|book| book.total(name).begin(by_this));
        let Some(outcome) = self.left_midway(10, semaphore.add_permits(by)).await else {
            return;
        };
        let changed = self.told(&format!("{name} by {by}"), &outcome);
        book(|book| book.total(name).end(change, by_this, changed));
        count("changed");
    }

    /// Returns how many permits it took away.
    async fn drain(&mut self, name: &str) -> i64 {
        let semaphore = self.semaphore(name);
        // a late one takes what will be available then
        let change = book(|book| book.total(name).begin(-i64::from(u32::MAX)));
        let outcome = semaphore.drain_permits().await;
        let taken = outcome.as_ref().map_or(0, |taken| i64::from(*taken));
        let changed = self.told(&format!("{name} drained of {taken}"), &outcome);
        book(|book| book.total(name).end(change, -taken, changed));
        taken
    }

    /// Forgets a hold's permits, and adds as many again.
    pub(super) async fn forget(&mut self, hold: Hold) {
        let Hold {
            number,
            guard,
            choice,
            ..
        } = hold;
        let name = &choice.names[0];
        does(self.who, Doing::Other(format!("forgets one of {name}")));
        let semaphore = self.semaphore(name);
        let (guard, _) = leave(number, guard);
        let taken = i64::from(choice.mode.holds());
        let change = book(|book| book.total(name).begin(-taken));
        let outcome = semaphore.forget(&guard).await;
        let changed = match &outcome {
            Ok(()) => Changed::Once,
            // of several permits, some may have been there
            Err(error) => {
                count_error(error);
                Changed::Unknown
            }
        };
        book(|book| book.total(name).end(change, -taken, changed));
        if outcome.is_err() {
            return;
        }
        if !guard.remaining().is_zero() {
            wrong(|| format!("{:?} holds what it has forgotten of {name}", self.who));
        }
        count("forgotten");
        nap(self.rng.below(1_000)).await;
        self.add_permits(name, taken as i32).await;
    }
}
