//! Adopts the holds that other tasks handed over, and releases those that they left.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use nestlock::{Error, LockGuard};

use super::{Hold, Task, nap};
use crate::{
    checks::enter,
    kinds::{Choice, Mode},
    ledger::{Doing, Gift, book, count, count_error, does, wrong},
    trace::note,
};

impl Task {
    /// Releases or adopts what other tasks left: all of those tasks may be waiting for these locks.
    pub(crate) async fn inherit(mut self, is_over: Arc<AtomicBool>) {
        while !is_over.load(Relaxed) {
            nap(self.rng.between(500, 2_000)).await;
            self.take_given().await;
            book(|book| _ = book.tasks.remove(&self.who));
        }
        // this task may have left what it adopted
        self.take_all_given().await;
        book(|book| _ = book.tasks.remove(&self.who));
    }

    pub(super) async fn take_all_given(&mut self) {
        while self.take_given().await {
            nap(100).await;
        }
    }

    /// Releases or adopts a hold that was left. Returns `true` if there is more to take.
    pub(super) async fn take_given(&mut self) -> bool {
        let Some(given) = book(|book| book.given.pop()) else {
            return false;
        };
        does(
            self.who,
            Doing::Other(format!("takes what was given of {}", given.lock)),
        );
        let Ok(choice) = self
            .plan
            .kind
            .lock(&self.clients, &given.lock, given.turn, None)
        else {
            return false;
        };
        book(|book| book.taking.insert(self.who, given.clone()));
        let outcome = match &given.gift {
            Gift::Left(owner) => choice.lock.release(owner).await,
            Gift::HandedOver(hand_over, before) => match choice.lock.adopt(hand_over).await {
                Ok(guard) => {
                    book(|book| book.taking.remove(&self.who));
                    self.adopted(guard, choice, given.turn, *before).await;
                    return book(|book| !book.given.is_empty());
                }
                Err(error) => Err(error),
            },
        };
        book(|book| book.taking.remove(&self.who));
        note(
            "taken for another",
            format!("{:?} {} {}", self.who, given.lock, outcome.is_ok()).as_bytes(),
        );
        match outcome {
            Ok(()) | Err(Error::NotHeld { .. } | Error::Lost { .. }) => {
                book(|book| !book.given.is_empty())
            }
            Err(error) => {
                count_error(&error);
                book(|book| book.given.push(given));
                !self.is_shut_down()
            }
        }
    }

    /// Checks that no other task had the lock between hand-over and adoption, unless the server
    /// lost the record. Then releases the hold.
    async fn adopted(&mut self, guard: LockGuard, choice: Choice, turn: u64, before: u64) {
        count("adopted");
        let (entries, void) = book(|book| {
            (
                book.entries(&choice.names[0]),
                book.may_vanish(&choice.names),
            )
        });
        let between = entries - before;
        if between > 0 && choice.mode == Mode::Alone && !void {
            wrong(|| {
                format!(
                    "{:?} adopted {}, which was acquired {between} times in between",
                    self.who, choice.names[0]
                )
            });
        }
        let (number, guard) = enter(
            self.who,
            choice.names.clone(),
            choice.mode,
            guard,
            false,
            false,
        );
        nap(self.rng.below(100)).await;
        self.release(
            Hold {
                number,
                guard,
                choice,
                turn,
            },
            true,
        )
        .await;
    }
}
