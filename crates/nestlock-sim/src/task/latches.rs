//! Sets latches, counts them down, and waits for them.

use std::time::Duration;

use nestlock::CountDownLatch;

use super::{Task, nap};
use crate::{
    checks,
    clock::{MILLI, now},
    ledger::{Doing, book, count, count_error, does, wrong},
};

impl Task {
    pub(super) async fn use_latch(&mut self, name: &str) {
        let latch = self.clients[0].count_down_latch(name);
        let latch = latch.expect("a good name");
        match self.rng.below(10) {
            0..2 => self.set_count(&latch, name).await,
            2..6 => self.count_down(&latch, name).await,
            _ => self.wait_for_latch(&latch, name).await,
        }
        does(self.who, Doing::Other("is idle".into()));
    }

    async fn set_count(&mut self, latch: &CountDownLatch, name: &str) {
        does(self.who, Doing::Other(format!("sets {name}")));
        let (over, era) = book(|book| (book.latch(name).over(), book.era));
        let many = self.rng.between(1, 12);
        let outcome = self.left_midway(5, latch.try_set_count(many as u32)).await;
        match outcome {
            Some(Ok(true)) => {
                count("set");
                book(|book| {
                    if book.era == era {
                        book.latch(name).set(many, over);
                    }
                });
            }
            Some(Err(error)) => count_error(&error),
            _ => {}
        }
    }

    async fn count_down(&mut self, latch: &CountDownLatch, name: &str) {
        does(self.who, Doing::Other(format!("counts {name} down")));
        let caller = self.rng.chance(20).then(|| format!("c{}", self.who.1));
        let caller = caller.as_deref();
        let lowering = book(|book| book.latch(name).begin(caller));
        let lower = async {
            match caller {
                Some(caller) => latch.count_down_as(caller).await,
                None => latch.count_down().await,
            }
        };
        let Some(outcome) = self.left_midway(10, lower).await else {
            return;
        };
        let changed = self.told(&format!("{name} down by {caller:?}"), &outcome);
        book(|book| book.latch(name).end(lowering, caller, changed));
        count("counted down");
    }

    async fn wait_for_latch(&mut self, latch: &CountDownLatch, name: &str) {
        let (began, pauses) = (now(), book(|book| book.pauses(self.who.0)));
        let wait = self.rng.between(0, 8_000);
        let is_polled = self.rng.chance(90);
        let waits = latch.wait_for(Duration::from_millis(wait));
        tokio::pin!(waits);
        if !is_polled {
            does(self.who, Doing::Other(format!("does not poll for {name}")));
            let first = Duration::from_millis(self.rng.below(5));
            if tokio::time::timeout(first, &mut waits).await.is_err() {
                nap(self.rng.between(1_000, 5_000)).await;
            }
            return;
        }
        does(self.who, Doing::Acquires(vec![name.to_owned()]));
        let Some(outcome) = self.left_midway(10, waits).await else {
            return;
        };
        does(self.who, Doing::Other(format!("has awaited {name}")));
        match outcome {
            Ok(true) => {
                count("opened");
                let range = book(|book| book.latch(name).range());
                if let Some((least, _, since)) = range
                    && since < began
                {
                    let who = self.who;
                    wrong(|| format!("{who:?} passed {name}, with at least {least} left"));
                }
            }
            Ok(false) => count("missed"),
            Err(error) => count_error(&error),
        }
        let took = (now() - began) / MILLI;
        if pauses == book(|book| book.pauses(self.who.0))
            && now() > began + wait * MILLI + checks::slack(&self.plan, self.who.0)
        {
            wrong(|| format!("{:?} waited {took} ms for {name}, not {wait}", self.who));
        }
    }
}
