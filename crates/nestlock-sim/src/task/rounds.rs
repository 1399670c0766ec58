//! The rounds of a task: each takes one lock, perhaps several times, nested.

use std::time::Duration;

use super::{Hold, Task, nap};
use crate::{
    clock::{SECOND, now},
    kinds::Kind,
    ledger::{Doing, book, count, count_error, does, wrong},
    plan::MOST_PROCESSES,
    trace::note,
};

impl Task {
    /// Takes locks until the plan's end.
    pub(crate) async fn run(mut self) {
        while now() < self.plan.end && !self.is_shut_down() {
            self.round().await;
            nap(self.rng.below(30 + self.plan.calm)).await;
        }
        self.take_all_given().await;
        book(|book| _ = book.tasks.remove(&self.who));
        note("task ends", format!("{:?}", self.who).as_bytes());
    }

    /// Acquires a lock, perhaps several times, and releases it.
    async fn round(&mut self) {
        let name = self.plan.kind.next_lock(&mut self.rng);
        if self.plan.kind == Kind::Latch {
            return self.use_latch(&name).await;
        }
        if self.plan.kind == Kind::Semaphore {
            self.change_permits(&name).await;
        }
        if self.plan.gives && self.rng.chance(50) {
            self.take_given().await;
        }
        if self.plan.forces && self.rng.chance(3) {
            self.force(&name).await;
        }
        let depth = if self.plan.kind.nests() {
            self.rng.between(1, 3)
        } else {
            1
        };
        let (mut held, mut counts) = (Vec::<Hold>::new(), true);
        for nesting in 0..depth {
            let inside = held.last().map(|hold| hold.choice.mode);
            let turn = if self.plan.kind == Kind::Multi && nesting > 0 {
                held[0].turn
            } else {
                self.rng.next()
            };
            match self.acquire(&name, turn, inside, &mut counts).await {
                Some(one) => held.push(one),
                None => break,
            }
            if nesting == 0 && self.rng.chance(60) {
                break;
            }
        }
        if counts {
            self.check_count(&held).await;
        }
        if !held.is_empty() && !self.rng.chance(self.plan.kind.momentary()) {
            nap(match self.rng.below(10) {
                0 => self.rng.between(1_000, 6_000),
                1..4 => self.rng.between(50, 400),
                _ => self.rng.below(20),
            })
            .await;
        }
        if let Some(hold) = held.first()
            && self.rng.chance(10)
        {
            does(self.who, Doing::Other(format!("extends {name}")));
            let lease = Duration::from_millis(self.rng.between(20, 3_000));
            if let Err(error) = hold.guard.extend(lease).await {
                count_error(&error);
            }
        }
        if self.plan.kind == Kind::Semaphore
            && self.rng.chance(10)
            && let Some(hold) = held.pop()
        {
            self.forget(hold).await;
        }
        does(self.who, Doing::Other(format!("releases {name}")));
        let alone = held.len() == 1;
        while !held.is_empty() {
            let at = self.rng.below(held.len() as u64) as usize;
            counts &= self.release(held.remove(at), alone).await;
            if counts {
                self.check_count(&held).await;
                does(self.who, Doing::Other(format!("releases {name}")));
            }
        }
        does(self.who, Doing::Other("is idle".into()));
    }

    /// Checks that the server's hold count is the task's own. After a fault it may be larger, if an
    /// acquire was executed late: the next release sets the right count.
    async fn check_count(&mut self, held: &[Hold]) {
        let Some(first) = held.first().filter(|_| self.rng.chance(20)) else {
            return;
        };
        let owner = first.guard.owner();
        let expected: u32 = held.iter().map(|hold| hold.choice.mode.holds()).sum();
        let same =
            |hold: &Hold| hold.choice.mode == first.choice.mode && hold.guard.owner() == owner;
        if self.plan.kind.is_red() || !held.iter().all(same) || first.choice.names.len() > 1 {
            return;
        }
        does(self.who, Doing::Other("counts".into()));
        let counted = first.choice.lock.hold_count(&owner).await;
        let is_void = book(|book| book.is_void(first.number) || book.is_miscounted(first.number));
        if let Ok(counted) = counted
            && counted != expected
            && !(counted > expected && book(|book| book.is_disturbed(self.who.0)))
            && !is_void
            && held.iter().all(|hold| !hold.guard.is_lost())
        {
            wrong(|| {
                format!(
                    "{:?} holds {} {expected} times, the server's count is {counted}",
                    self.who, first.choice.names[0]
                )
            });
        }
    }

    /// Frees a lock from its holders, as an operator would.
    async fn force(&mut self, name: &str) {
        does(self.who, Doing::Other(format!("frees {name}")));
        let turn = self.rng.next();
        let Ok(choice) = self.plan.kind.lock(&self.clients, name, turn, None) else {
            return;
        };
        // without a reply, the request may still be executed late
        book(|book| {
            book.forced(&choice.names, self.who.0, now() + 20 * SECOND);
            book.disturb(1..MOST_PROCESSES, now() + 20 * SECOND);
        });
        if let Err(error) = choice.lock.force_unlock().await {
            count_error(&error);
        }
        count("freed");
    }
}
