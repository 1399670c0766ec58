//! Releases a hold, hands it over to another task, or leaves it to its lease.

use std::{sync::Arc, time::Duration};

use nestlock::LockGuard;

use super::{Hold, Task, nap};
use crate::{
    checks::{self, Leaving, leave},
    ledger::{Gift, Given, book, count, count_error, wrong},
    trace::note,
};

impl Task {
    /// Releases a hold, hands it over, or leaves it to its lease. Returns `true` if the server
    /// confirmed the release.
    pub(super) async fn release(&mut self, hold: Hold, alone: bool) -> bool {
        let Hold {
            number,
            guard,
            choice,
            turn,
        } = hold;
        let lock = choice.names.join("+");
        if alone
            && self.plan.gives
            && self.rng.chance(25)
            && choice.names.len() == 1
            && !self.plan.kind.is_red()
        {
            if self.rng.chance(40) {
                self.hand_over(Hold {
                    number,
                    guard,
                    choice,
                    turn,
                })
                .await;
            } else {
                self.leave_to_lease(number, guard, lock, turn);
            }
            return false;
        }
        let (guard, leaving) = leave(number, guard);
        if leaving.is_lost {
            count("found lost");
            // a lost hold must stay lost
            if self.rng.chance(50) {
                nap(self.rng.between(1, 2_500)).await;
                if !guard.is_lost() {
                    wrong(|| format!("{:?} regained {lock} after a loss", self.who));
                }
            }
        }
        if self.rng.chance(25) {
            drop(guard);
            return false;
        }
        let Some(outcome) = self.left_midway(5, guard.unlock()).await else {
            return false;
        };
        note(
            "unlocked",
            format!("{:?} {lock} {}", self.who, outcome.is_ok()).as_bytes(),
        );
        if let Err(error) = &outcome {
            count_error(error);
        }
        checks::unlocked(self.who, &lock, leaving, outcome.as_ref().copied());
        outcome.is_ok()
    }

    /// Leaves a hold to its lease: a task of any process may release it.
    fn leave_to_lease(&mut self, number: u64, guard: Arc<LockGuard>, lock: String, turn: u64) {
        let (guard, Leaving { .. }) = leave(number, guard);
        count("left to its lease");
        let owner = guard.leave_to_lease();
        note(
            "leaves",
            format!("{:?} {lock} {owner}", self.who).as_bytes(),
        );
        if self.rng.chance(70) {
            book(|book| {
                book.given.push(Given {
                    lock,
                    turn,
                    gift: Gift::Left(owner),
                });
            });
        }
    }

    /// Hands a hold over: a task of any process may adopt it.
    async fn hand_over(&mut self, hold: Hold) {
        let Hold {
            number,
            guard,
            choice,
            turn,
        } = hold;
        let (lock, before) = (
            choice.names[0].clone(),
            book(|book| book.entries(&choice.names[0])),
        );
        let (guard, leaving) = leave(number, guard);
        let keep = Duration::from_millis(self.rng.between(10, 5_000));
        let Some(outcome) = self.left_midway(10, guard.hand_over(keep)).await else {
            return;
        };
        note(
            "handed over",
            format!("{:?} {lock} {}", self.who, outcome.is_ok()).as_bytes(),
        );
        match &outcome {
            Ok(_) => count("handed over"),
            Err(error) => count_error(error),
        }
        checks::unlocked(self.who, &lock, leaving, outcome.as_ref().map(|_| ()));
        if let Ok(hand_over) = outcome {
            book(|book| {
                book.given.push(Given {
                    lock,
                    turn,
                    gift: Gift::HandedOver(hand_over, before),
                });
            });
        }
    }
}
