//! Acquires a lock: bounded or not, dropped midway, not polled for a while.

use std::time::Duration;

use nestlock::{AcquireOptions, Error};

use super::{Hold, Task, nap};
use crate::{
    checks::{self, enter},
    clock::{MILLI, now},
    kinds::{Kind, Mode},
    ledger::{Doing, book, count, count_error, does, waits_as, wrong},
};

impl Task {
    /// Acquires a lock, in one of many ways. Sets `counts` to `false` if the server's hold count
    /// may now be another one than the task's.
    pub(super) async fn acquire(
        &mut self,
        name: &str,
        turn: u64,
        inside: Option<Mode>,
        counts: &mut bool,
    ) -> Option<Hold> {
        let kind = self.plan.kind;
        let choice = match kind.lock(&self.clients, name, turn, inside) {
            Ok(choice) => choice,
            Err(error) => {
                count_error(&error);
                return None;
            }
        };
        let mut how = AcquireOptions::new();
        if kind.has_values() && self.rng.chance(30) {
            // each value is used only once
            how = how.value(format!("v{}.{}.{turn}", self.who.0, self.who.1));
        } else if !kind.is_red() && kind.nests() {
            let owner = self.clients[0]
                .owner(format!("t{}", self.who.1))
                .expect("a good name");
            waits_as(self.who, &owner);
            how = how.owner(owner);
        }
        let is_leased = self.rng.chance(if kind == Kind::Relay { 5 } else { 25 });
        if is_leased {
            // a lease shorter than the round trip would expire before the reply arrives
            how = how.lease(Duration::from_millis(
                self.rng.between(20 + 5 * self.plan.distance, 3_000),
            ));
        }
        let wait = match self.rng.below(4) {
            0 => Some(0),
            3 if kind != Kind::Semaphore => None,
            // what the server has forgotten, each task sets before it waits
            _ => Some(self.rng.between(1, 8_000)),
        };
        let (began, pauses) = (now(), book(|book| book.pauses(self.who.0)));
        // a waiter for several permits may be passed by waiters for one
        let doing = if choice.mode == Mode::Permits(2) {
            Doing::Other(format!("acquires several of {name}"))
        } else {
            Doing::Acquires(choice.names.clone())
        };
        does(self.who, doing.clone());
        let lock = choice.lock.clone();
        let acquire = async move {
            match wait {
                Some(0) => lock.try_lock_with(how).await,
                Some(wait) => {
                    lock.try_lock_for_with(Duration::from_millis(wait), how)
                        .await
                }
                None => lock.lock_with(how).await.map(Some),
            }
        };
        let mut in_turn = true;
        let outcome = match self.rng.below(100) {
            // dropped before it completes
            0..15 => {
                let patience = Duration::from_millis(self.rng.between(0, 300));
                tokio::time::timeout(patience, acquire)
                    .await
                    .unwrap_or_else(|_| {
                        *counts = false;
                        Ok(None)
                    })
            }
            // begun, then not polled for a while: the lock may be acquired long before the call
            // returns
            15..18 => {
                *counts = false;
                in_turn = false;
                tokio::pin!(acquire);
                let first =
                    tokio::time::timeout(Duration::from_millis(self.rng.below(5)), &mut acquire)
                        .await;
                if let Ok(outcome) = first {
                    outcome
                } else {
                    does(self.who, Doing::Other(format!("does not poll for {name}")));
                    nap(self.rng.between(1_000, 5_000)).await;
                    if self.rng.chance(50) {
                        does(self.who, doing);
                        acquire.await
                    } else {
                        Ok(None)
                    }
                }
            }
            _ => {
                let outcome = acquire.await;
                if let Some(wait) = wait.filter(|_| pauses == book(|book| book.pauses(self.who.0)))
                    && now() > began + wait * MILLI + checks::slack(&self.plan, self.who.0)
                    && !(wait == 0 || kind.is_red())
                {
                    let took = (now() - began) / MILLI;
                    wrong(|| {
                        format!(
                            "{:?} waited {took} ms for {name}, not {wait}: {:?}",
                            self.who,
                            outcome.is_ok()
                        )
                    });
                }
                outcome
            }
        };
        does(self.who, Doing::Other(format!("has tried {name}")));
        match outcome {
            Ok(Some(guard)) => {
                let (number, guard) = enter(
                    self.who,
                    choice.names.clone(),
                    choice.mode,
                    guard,
                    is_leased,
                    in_turn,
                );
                Some(Hold {
                    number,
                    guard,
                    choice,
                    turn,
                })
            }
            Ok(None) => {
                count("missed");
                None
            }
            Err(error) => {
                *counts = false;
                count_error(&error);
                if matches!(
                    error,
                    Error::NotReentrant { .. }
                        | Error::WrongLockKind { .. }
                        | Error::UpgradeRefused { .. }
                ) {
                    wrong(|| format!("{:?} acquires {name}: {error}", self.who));
                }
                None
            }
        }
    }
}
