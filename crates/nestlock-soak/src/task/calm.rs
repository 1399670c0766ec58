//! The calm at the end of a run: a task must get each lock in time.

use std::time::Duration;

use rand::Rng;

use super::{Task, Way};
use crate::{
    kinds::{self, Choice, Class, Kind},
    settings::{FAIR_PATIENCE, LONGEST_LEASE, LONGEST_WATCHDOG, POLL_CAP},
};

/// How often each lock is tried in calm.
const TRIES: u32 = 3;

/// Returns how long an acquire may take in calm: a killed process leaves its lease behind, and no
/// message reports its end.
fn calm_limit(kind: Kind) -> Duration {
    let patience = if kind.is_fair() {
        FAIR_PATIENCE
    } else {
        Duration::ZERO
    };
    LONGEST_WATCHDOG.max(LONGEST_LEASE) + POLL_CAP + Duration::from_secs(2) + patience
}

impl Task {
    /// Acquires and releases each lock once.
    pub(crate) async fn calm(mut self) {
        let only = self.process.settings.only.clone();
        let mut choices: Vec<Choice> = Vec::new();
        for kind in only {
            let all = kinds::names(kind);
            let sets = if kind == Kind::Multi {
                vec![all]
            } else {
                all.into_iter().map(|name| vec![name]).collect()
            };
            for (at, names) in sets.into_iter().enumerate() {
                let class = if kind == Kind::ReadWrite && at == 1 {
                    Class::Shared
                } else {
                    Class::Alone
                };
                let open = Choice::open(
                    &self.client.servers,
                    kind,
                    names,
                    class,
                    false,
                    self.client.watchdog,
                );
                choices.push(open.expect("good names"));
            }
        }
        let begin = self.rng.random_range(0..choices.len());
        choices.rotate_left(begin);
        for choice in choices {
            // on a busy machine a call may fail; the next one has the full time
            for _ in 0..TRIES {
                let way = Way::Calm(calm_limit(choice.kind));
                if let Some(mut held) = self.acquire(choice.clone(), way, None, None).await {
                    self.look(&mut held).await;
                    self.unlock(held).await;
                    break;
                }
            }
        }
    }
}
